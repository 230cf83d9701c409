//! Clients that do not go where they should, or do not come back: moving them does no good, and is
//! given up.

use tidegate_testkit::fleet::{Balancing, Fleet, FleetConfig};
use tokio::time::Instant;

use crate::{Figures, s, scaled_out};

/// When the first was moved.
async fn first_shed(fleet: &mut Fleet) -> Instant {
    fleet.run_until("somebody is moved", s(90), |fleet| !fleet.record.closes.is_empty()).await;
    fleet.record.closes[0].at
}

#[tokio::test(start_paused = true)]
async fn affinity_is_noticed_within_90_s_and_moving_stops_for_ten_minutes() {
    let (mut fleet, from) = scaled_out(FleetConfig::new(41, Balancing::Affinity), 6, 4, 20_000).await;
    let first = first_shed(&mut fleet).await;
    fleet.run(first + s(90) - Instant::now()).await;
    let stopped = Instant::now();
    let figures = Figures::since(from, &fleet, "6 -> 10, 20,000 sessions, affinity");
    let last = fleet.record.closes.last().unwrap().at;
    println!("moved from {:?} to {:?}", first - from, last - from);
    for node in fleet.nodes.iter().take(6) {
        assert_eq!(node.suspended(), ["ineffective"]);
    }
    assert_eq!(figures.n_refused, 0);
    fleet.run(s(500)).await;
    assert_eq!(fleet.record.n_shed(stopped, Instant::now()), 0, "for ten minutes");
}

#[tokio::test(start_paused = true)]
async fn clients_that_do_not_come_back_are_no_longer_sent_away_after_90_s() {
    for returning in [0.0, 0.5] {
        let (mut fleet, from) = scaled_out(FleetConfig::new(42, Balancing::LeastConnections), 6, 4, 10_000).await;
        fleet.returning = returning;
        let first = first_shed(&mut fleet).await;
        fleet.run(first + s(90) - Instant::now()).await;
        let stopped = Instant::now();
        fleet.run(s(400)).await;
        let figures = Figures::since(from, &fleet, &format!("6 -> 10, 10,000 sessions, {returning} of them return"));
        assert_eq!(fleet.record.n_shed(stopped, Instant::now()), 0, "{returning}");
        // Half a percent a second of each node, for less than 90 s.
        assert!(figures.n_shed < 4_000, "{}", figures.n_shed);
    }
}

#[tokio::test(start_paused = true)]
async fn in_turn_with_one_newcomer_among_twenty_is_left_to_recycling() {
    let (mut fleet, from) = scaled_out(FleetConfig::new(43, Balancing::InTurn), 20, 1, 40_000).await;
    let first = first_shed(&mut fleet).await;
    fleet.run(first + s(90) - Instant::now()).await;
    let n = fleet.serving().filter(|node| node.suspended() == ["ineffective"]).count();
    let figures = Figures::since(from, &fleet, "20 -> 21, 40,000 sessions, in turn");
    assert!(n >= 15, "{n} of 20");
    assert_eq!((figures.n_refused, figures.n_ping_pong), (0, 0));
}
