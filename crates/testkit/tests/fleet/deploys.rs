//! Old nodes for new ones, one after the other, as an orchestrator does it.

use std::time::Duration;

use hub::close::CloseReason;
use hub::departure::Window;
use tidegate_testkit::fleet::{Balancing, Fleet, FleetConfig, Kind, peak};
use tokio::time::Instant;

use crate::{AGES, Figures, s};

/// How the new one and the old one follow each other.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Style {
    /// The new one comes first (`maxSurge`).
    Surge,
    /// The old one goes first (`maxUnavailable`).
    InPlace,
}

/// Until an orchestrator calls a new pod available, and until it has one in an old one's place.
const AVAILABLE: Duration = s(30);
const IN_ITS_PLACE: Duration = s(20);

/// Replaces all that serve; returns when the last new one serves and the last old one is gone.
async fn roll(fleet: &mut Fleet, version: &'static str, style: Style) {
    let kind = Kind { version, ..fleet.config.kind };
    let old: Vec<usize> = (0..fleet.nodes.len()).filter(|node| fleet.nodes[*node].is_serving()).collect();
    for node in old.iter().copied() {
        if style == Style::Surge {
            fleet.add_like(kind);
            fleet.run(AVAILABLE).await;
        }
        fleet.drain(node);
        fleet.run_until("it is gone", fleet.config.drain.deadline + s(60), |fleet| !fleet.nodes[node].is_up).await;
        if style == Style::InPlace {
            fleet.run(IN_ITS_PLACE).await;
            fleet.add_like(kind);
            if Some(&node) != old.last() {
                fleet.run(AVAILABLE).await;
            }
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_deploy_in_place_moves_nobody_until_its_end_and_is_even_240_s_later_at_the_latest() {
    let mut fleet = Fleet::standing(FleetConfig::new(11, Balancing::LeastConnections), &[10_000; 5]).await;
    let began = Instant::now();
    roll(&mut fleet, "2", Style::InPlace).await;
    let from = Instant::now();
    println!("the deploy took {:?} and left {:?}", from - began, fleet.counts());
    assert_eq!(fleet.record.n_shed(began, from), 0, "churn on churn");
    fleet.run(s(430)).await;
    let figures = Figures::since(from, &fleet, "deploy of 5 in place, 50,000 sessions");
    figures.assert_even_within(240.0);
    // 9,000 bring the last one within 10 % of its share, 10,000 make all equal: a tenth more than the least.
    assert!(figures.n_shed <= 9_900, "{} moves", figures.n_shed);
    assert!(figures.worst <= 0.015, "and not left at the edge of a band: {:?}", fleet.counts());
    assert_eq!((figures.n_refused, figures.n_ping_pong), (0, 0));
    // The deadline leaves each node 112 s, and the one emptier node takes no 12,500 in that time: the
    // rest is refused with a time at which to come back, and does. (The log names the deadline that
    // would do; see the next test.)
    let (n_refused, away) = (fleet.record.refusals.len(), fleet.record.longest_away(began));
    println!("refused {n_refused} times during the deploy, away {away:?} at the longest");
    assert!(away <= s(60), "{away:?}");
    let heard = fleet.heard().await;
    println!("{heard:?}");
    assert!(heard.n_gaps == 0 && heard.n_moved == heard.n_listeners, "{heard:?}");
}

#[tokio::test(start_paused = true)]
async fn with_the_deadline_that_a_drain_asks_for_a_deploy_in_place_refuses_nobody() {
    let mut config = FleetConfig::new(16, Balancing::LeastConnections);
    // All of the fifth part: 2,500 to the one newcomer, of whose 20 a second ten are for us.
    (config.accept_per_second, config.accept_burst) = (20.0, 40);
    config.drain.deadline = s(250) + config.drain.grace + s(4);
    let mut fleet = Fleet::standing(config, &[2_000; 5]).await;
    let began = Instant::now();
    roll(&mut fleet, "2", Style::InPlace).await;
    println!("a deploy in place with a deadline of 259 s took {:?} and left {:?}", began.elapsed(), fleet.counts());
    assert!(fleet.record.closed(CloseReason::Drain, began).len() >= 10_000);
    assert_eq!((fleet.record.refusals.len(), fleet.record.n_shed(began, Instant::now())), (0, 0));
    assert!(fleet.record.longest_away(began) <= s(6), "{:?}", fleet.record.longest_away(began));
}

/// Five nodes by surge; every node within 10 % of its share at its end, and nobody shed.
async fn surged(config: FleetConfig, n_each: usize, what: &str) -> Figures {
    let mut fleet = Fleet::standing(config, &[n_each; 5]).await;
    let began = Instant::now();
    roll(&mut fleet, "2", Style::Surge).await;
    let (took, at_its_end) = (began.elapsed(), fleet.counts());
    // Those of the last second are on their way.
    fleet.run(s(6)).await;
    let worst = fleet.record.now().worst;
    println!("{what}: took {took:?} and left {at_its_end:?}, {worst:.4} from the share 6 s later");
    assert!(worst <= 0.10, "{:?}", fleet.counts());
    fleet.run(s(300)).await;
    let figures = Figures::since(began, &fleet, what);
    assert_eq!(figures.n_shed, 0);
    let n_drained = fleet.record.closed(CloseReason::Drain, began).len();
    // Everybody once; whoever was taken in by a node that left later, once more.
    assert!((5 * n_each..=6 * n_each).contains(&n_drained), "{n_drained}");
    let heard = fleet.heard().await;
    assert_eq!((heard.n_gaps, fleet.n_clients()), (0, (5 * n_each, 0, 0)), "{heard:?}");
    figures
}

#[tokio::test(start_paused = true)]
async fn a_deploy_by_surge_leaves_the_fleet_even_and_sheds_nobody_at_all() {
    let config = FleetConfig::new(12, Balancing::LeastConnections);
    let figures = surged(config, 10_000, "deploy of 5 by surge, 50,000 sessions").await;
    // Everybody is sent to the one newcomer: the drain goes by what that one accepts.
    assert_eq!(figures.n_refused, 0);
    assert!(figures.away <= s(6), "{:?}", figures.away);
}

#[tokio::test(start_paused = true)]
async fn a_deploy_by_surge_at_the_pace_of_the_one_newcomer_refuses_nobody() {
    let mut config = FleetConfig::new(15, Balancing::LeastConnections);
    // 89 a second, and a newcomer accepts 100.
    config.drain.window = Window::Fixed(s(45));
    let figures = surged(config, 4_000, "deploy of 5 by surge, 20,000 sessions, a window of 45 s").await;
    assert_eq!(figures.n_refused, 0);
    assert!(figures.away <= s(6), "{:?}", figures.away);
}

#[tokio::test(start_paused = true)]
async fn while_two_versions_live_nobody_is_moved_and_an_end_of_it_lets_it_go_on() {
    let mut fleet = Fleet::standing(FleetConfig::new(13, Balancing::LeastConnections), &[2_000; 4]).await;
    let old = fleet.add_like(Kind { version: "2", ..fleet.config.kind });
    fleet.run(s(300)).await;
    assert_eq!(fleet.record.closes.len(), 0);
    assert!(fleet.all_say("deploy"));
    // The canary goes again: it leaves an even fleet behind.
    fleet.drain(old);
    fleet.run(s(5)).await;
    assert!(fleet.all_say("draining"), "{:?}", fleet.nodes[0].suspended());
    fleet.run(s(115)).await;
    assert_eq!(fleet.record.closes.len(), 0);
    assert!(!fleet.all_say("deploy"));
}

#[tokio::test(start_paused = true)]
async fn deploys_every_half_hour_and_ages_of_20_to_60_minutes_do_not_resound() {
    let config = FleetConfig { max_age: Some(AGES), ..FleetConfig::new(14, Balancing::LeastConnections) };
    let mut fleet = Fleet::standing(config, &[1_000; 5]).await;
    let began = Instant::now();
    for round in 0..8 {
        let at = Instant::now();
        roll(&mut fleet, ["2", "1"][round % 2], Style::Surge).await;
        fleet.run(s(30 * 60) - at.elapsed()).await;
    }
    let recycled = fleet.record.closed(CloseReason::Recycle, began);
    let (n_drained, n_shed) =
        (fleet.record.closed(CloseReason::Drain, began).len(), fleet.record.closed(CloseReason::Shed, began).len());
    let mean = recycled.len() as f64 / began.elapsed().as_secs_f64();
    let most = peak(&recycled, s(60));
    println!(
        "4 h, 8 deploys, 5,000 sessions: {n_drained} drained, {n_shed} shed, {} recycled, {mean:.2}/s, at most {most:.2}/s in 60 s",
        recycled.len()
    );
    assert!(most <= 2.0 * mean, "{most}/s of {mean}/s");
    let heard = fleet.heard().await;
    println!("{heard:?}");
    assert_eq!((heard.n_gaps, fleet.record.refusals.len()), (0, 0));
}
