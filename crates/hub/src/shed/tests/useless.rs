//! Clients that do not go where they should: moving them stops, it is said why, and what the
//! balancer in front seems to go by is shown.

use super::*;
use crate::telemetry::LbPolicy;
use crate::testing::lines::Lines;

const COME_BACK: &str = "clients that were moved come back to this node";
const STICKY: &str = "the balancer in front goes by address, cookie or hash";

fn policies(world: &World) -> Vec<LbPolicy> {
    world.nodes.iter().map(|node| node.hub.fleet().placing.policy).collect()
}

#[tokio::test(start_paused = true)]
async fn affinity_stops_it_within_90_s_for_ten_minutes_and_is_said_once() {
    let lines = Lines::listen();
    let mut world = World::new();
    world.front = Front::Same;
    let mut world = world.with_three_and_a_new_one(ShedMode::On).await;
    world.until_shedding().await;
    let first = world.closes[0].0;
    world.pass(s(90)).await;
    for node in 0..3 {
        let view = world.shed(node);
        assert_eq!((view.state, &view.suspended[..], view.why), ("suspended", &["ineffective"][..], Some("come_back")));
        let series = "gateway_shed_suspended{reason=\"ineffective\"} 1";
        assert!(world.nodes[node].metrics.encode().contains(series));
    }
    let stopped = world.closes.len();
    assert!(world.closes.iter().all(|(at, ..)| *at - first < s(80)), "all had stopped by then");
    world.pass(s(480)).await;
    assert_eq!(world.closes.len(), stopped, "for ten minutes");
    assert_eq!(world.counts(), [300, 300, 300, 0]);
    assert_eq!(lines.with(COME_BACK).len(), 3, "once a node: {:?}", lines.with(COME_BACK));
}

#[tokio::test(start_paused = true)]
async fn what_the_balancer_goes_by_is_known_to_all_nodes() {
    let lines = Lines::listen();
    let mut world = World::new();
    world.front = Front::Same;
    let mut world = world.with_three_and_a_new_one(ShedMode::On).await;
    assert_eq!(policies(&world), [LbPolicy::Unknown; 4]);
    world.until("all know", |world| policies(world) == [LbPolicy::Sticky; 4]).await;
    let placing = world.nodes[3].hub.fleet().placing;
    assert!(placing.n_moved >= 20 && placing.n_back == placing.n_moved, "{placing:?}");
    let series = "gateway_lb_policy_observed{policy=\"sticky\"} 1";
    assert!(world.nodes[3].metrics.encode().contains(series));
    world.pass(s(600)).await;
    assert_eq!(lines.with(STICKY).len(), 4, "once a node: {:?}", lines.with(STICKY));
    assert!(lines.with(STICKY)[0].starts_with("WARN"), "{:?}", lines.with(STICKY));
}

#[tokio::test(start_paused = true)]
async fn least_connections_and_in_turn_are_told_apart() {
    for (front, expected) in [(Front::Emptiest, LbPolicy::Emptiest), (Front::InTurn, LbPolicy::Spread)] {
        let mut world = World::new();
        world.front = front;
        let mut world = world.with_three_and_a_new_one(ShedMode::On).await;
        world.until_shedding().await;
        world.until("it shows", |world| policies(world).iter().all(|policy| *policy == expected)).await;
        world.pass(s(300)).await;
        assert_eq!(policies(&world), [expected; 4], "and stays, though the fleet is even");
    }
}

#[tokio::test(start_paused = true)]
async fn clients_that_stay_away_are_no_longer_sent_away() {
    let lines = Lines::listen();
    let mut world = World::new();
    world.returning = 0.4;
    let mut world = world.with_three_and_a_new_one(ShedMode::On).await;
    world.until_shedding().await;
    let first = world.closes[0].0;
    world.pass(s(200)).await;
    assert!(world.closes.iter().all(|(at, ..)| *at - first < s(90)), "{}", world.closes.len());
    world.until("it says why", |world| world.shed(0).why == Some("stay_away")).await;
    assert!(world.shed(0).suspended.contains(&"ineffective"), "{:?}", world.shed(0));
    assert!(!lines.with("clients that were moved do not come back").is_empty());
}

#[tokio::test(start_paused = true)]
async fn behind_a_sticky_balancer_ages_are_stretched_as_long_as_it_is_one() {
    let mut world = World::new();
    world.front = Front::Same;
    for n in [150, 150, 0] {
        world.add_like(n, ShedMode::Off, |config| config.max_age = Some((s(200), s(600)))).await;
    }
    world.until("it is known", |world| policies(world)[0] == LbPolicy::Sticky).await;
    // Two lives later nobody is left whose age was not.
    world.pass(s(1_200)).await;
    let from = Instant::now();
    world.pass(s(1_200)).await;
    // 400 s on the mean as drawn; half of what is left to 600 s more.
    let mean = 1_200.0 * 300.0 / world.n_after(from) as f64;
    assert!((470.0..=530.0).contains(&mean), "{mean} s");
    assert_eq!(policies(&world), [LbPolicy::Sticky; 3]);
    // Somebody mends the balancer.
    world.front = Front::Emptiest;
    world.until("that is known", |world| !policies(world).contains(&LbPolicy::Sticky)).await;
    assert!(!policies(&world).contains(&LbPolicy::Spread), "what was sticky is no sign of anything else");
    assert!(world.closes.iter().all(|(.., reason)| *reason == CloseReason::Recycle));
}
