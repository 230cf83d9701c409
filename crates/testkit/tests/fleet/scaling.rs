//! More nodes, other capacities, other balancers: how fast a fleet becomes even, and at which cost.

use tidegate_testkit::fleet::{Balancing, Fleet, FleetConfig, Kind};
use tokio::time::Instant;

use crate::{BEFORE_AND_AFTER, Figures, s, scaled_out};

const LEAST: Balancing = Balancing::LeastConnections;

const CAPACITIES: [usize; 3] = [10_000, 20_000, 40_000];

#[tokio::test(start_paused = true)]
async fn from_six_to_ten_50_000_sessions_become_even_within_the_budgets_time_and_nothing_is_lost() {
    let (mut fleet, from) = scaled_out(FleetConfig::new(1, LEAST), 6, 4, 50_000).await;
    fleet.run(s(310)).await;
    let figures = Figures::since(from, &fleet, "6 -> 10, 50,000 sessions, least connections");
    // Four newcomers accept 100 a second each, and half of that is for us. 18,000 are the least
    // that brings all within 10 %, 20,000 the least that makes them equal.
    assert_eq!(figures.budget, 200.0);
    figures.assert_even_within(1.15 * (BEFORE_AND_AFTER + 18_000.0 / figures.budget));
    figures.assert_within_budget();
    assert!(figures.n_shed <= 20_000, "{} moves", figures.n_shed);
    // Not left at the edge of a band.
    assert!(figures.worst < 0.05, "{:?}", fleet.counts());
    let heard = fleet.heard().await;
    println!("{heard:?}");
    assert!(heard.n_gaps == 0 && heard.n_moved > 40 && heard.n_caught_up > 3, "{heard:?}");
    assert_eq!(fleet.n_clients(), (50_000, 0, 0));
}

#[tokio::test(start_paused = true)]
async fn one_newcomer_gets_no_more_than_half_of_what_it_accepts() {
    let (mut fleet, from) = scaled_out(FleetConfig::new(2, LEAST), 6, 1, 21_000).await;
    fleet.run(s(240)).await;
    let figures = Figures::since(from, &fleet, "6 -> 7, 21,000 sessions, least connections");
    assert_eq!(figures.budget, 50.0);
    figures.assert_even_within(1.15 * (BEFORE_AND_AFTER + 2_700.0 / figures.budget));
    figures.assert_within_budget();
    assert!(figures.n_shed <= 3_000, "{} moves", figures.n_shed);
}

#[tokio::test(start_paused = true)]
async fn twenty_donors_keep_to_the_one_budget() {
    let (mut fleet, from) = scaled_out(FleetConfig::new(3, LEAST), 20, 4, 50_000).await;
    fleet.run(s(240)).await;
    let figures = Figures::since(from, &fleet, "20 -> 24, 50,000 sessions, least connections");
    assert_eq!(figures.budget, 200.0);
    // 8,333 make them equal; each of four lacks 10 % of 2,083 less.
    figures.assert_even_within(1.15 * (BEFORE_AND_AFTER + 7_500.0 / figures.budget));
    figures.assert_within_budget();
    assert!(figures.n_shed <= 8_334, "{} moves", figures.n_shed);
}

#[tokio::test(start_paused = true)]
async fn nobody_is_moved_to_a_newcomer_that_the_balancer_does_not_send_to_yet() {
    let mut config = FleetConfig::new(4, LEAST);
    config.front.joins_after = s(30);
    let mut fleet = Fleet::standing(config, &[2_000; 5]).await;
    // They joined while nobody came.
    let (from, new) = (Instant::now(), fleet.add());
    fleet.run(s(15)).await;
    assert_eq!(fleet.record.closes.len(), 0);
    fleet.run(s(285)).await;
    let figures = Figures::since(from, &fleet, "5 -> 6, 10,000 sessions, the balancer 30 s late");
    let first = fleet.record.closes.first().expect("it is filled in the end").at;
    println!("the first left {:?} after {new} was ready", first - from);
    // 50 a second are moved as soon as it may be; those of the first seconds go round.
    figures.assert_even_within(30.0 + 1.15 * (2.5 + 1_500.0 / 50.0) + 5.0);
    assert_eq!(figures.n_refused, 0);
}

#[tokio::test(start_paused = true)]
async fn capacities_of_1_to_2_to_4_come_to_their_shares_and_no_big_node_is_emptied() {
    let mut fleet = Fleet::new(FleetConfig::new(5, LEAST));
    for capacity in CAPACITIES {
        let node = fleet.add_like(Kind { capacity, ..fleet.config.kind });
        fleet.fill(node, 7_000);
    }
    let from = Instant::now();
    fleet.run(s(450)).await;
    let figures = Figures::since(from, &fleet, "7,000 each on 10,000, 20,000 and 40,000 places");
    for (n, target) in fleet.counts().into_iter().zip([3_000.0, 6_000.0, 12_000.0]) {
        assert!((n as f64 / target - 1.0).abs() < 0.02, "{:?}", fleet.counts());
    }
    assert!(figures.n_shed <= 5_000, "{} moves: only what the big one misses", figures.n_shed);
    assert_eq!((figures.n_refused, figures.n_ping_pong), (0, 0));
}

#[tokio::test(start_paused = true)]
async fn nodes_that_are_as_full_as_each_other_are_even_whatever_their_counts() {
    let mut fleet = Fleet::new(FleetConfig::new(9, LEAST));
    for capacity in CAPACITIES {
        let node = fleet.add_like(Kind { capacity, ..fleet.config.kind });
        fleet.fill(node, capacity / 10);
    }
    fleet.run(s(300)).await;
    assert_eq!(fleet.record.closes.len(), 0);
}

#[tokio::test(start_paused = true)]
async fn in_turn_takes_longer_never_swings_and_is_over_when_it_is_even() {
    let (mut fleet, from) = scaled_out(FleetConfig::new(6, Balancing::InTurn), 6, 4, 50_000).await;
    fleet.run(s(600)).await;
    let figures = Figures::since(from, &fleet, "6 -> 10, 50,000 sessions, in turn");
    figures.assert_even_within(290.0);
    let Figures { mean, budget, n_shed, n_moved_again, .. } = figures;
    assert!(mean <= 1.1 * budget, "{mean}/s of {budget}/s");
    // Six of ten turns are a donor's, so it takes two and a half times the moves: as many as there are
    // sessions, each moved once and none of them twice.
    assert!(n_shed <= 50_000, "{n_shed} moves");
    assert_eq!((figures.n_refused, figures.n_ping_pong, n_moved_again), (0, 0, 0));
    let even_at = from + s(figures.t10.unwrap() as u64 + 120);
    assert_eq!(fleet.record.n_shed(even_at, Instant::now()), 0, "and then it is over");
}

#[tokio::test(start_paused = true)]
async fn two_choices_take_a_little_longer_than_least_connections() {
    let (mut fleet, from) = scaled_out(FleetConfig::new(7, Balancing::TwoChoices), 6, 4, 20_000).await;
    fleet.run(s(420)).await;
    let figures = Figures::since(from, &fleet, "6 -> 10, 20,000 sessions, two choices");
    figures.assert_even_within(200.0);
    assert_eq!((figures.n_refused, figures.n_ping_pong), (0, 0));
}

#[tokio::test(start_paused = true)]
async fn a_second_scale_out_in_the_midst_of_the_first_is_followed_and_nobody_is_moved_twice() {
    let (mut fleet, _) = scaled_out(FleetConfig::new(8, LEAST), 6, 2, 20_000).await;
    fleet.run(s(60)).await;
    let from = Instant::now();
    fleet.add();
    fleet.add();
    fleet.run(s(420)).await;
    let figures = Figures::since(from, &fleet, "6 -> 8 -> 10, 20,000 sessions, least connections");
    figures.assert_even_within(200.0);
    assert_eq!((figures.n_refused, figures.n_ping_pong, figures.n_moved_again), (0, 0, 0));
}
