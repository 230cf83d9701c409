//! Fewer nodes: an orchestrator that takes them away one after the other, one that changes its mind
//! while new ones are filled, one that takes all of them at once; and how long a drain is.

use std::time::Duration;

use hub::close::CloseReason;
use hub::shed::ShedMode;
use tidegate_testkit::fleet::{Balancing, Fleet, FleetConfig, peak};
use tokio::time::Instant;

use crate::{Figures, s, scaled_out};

const LEAST: Balancing = Balancing::LeastConnections;

/// An orchestrator takes one node away, and leaves the others this much time.
const BETWEEN: Duration = s(120);

/// Takes this node away and waits until it is gone.
async fn take_away(fleet: &mut Fleet, node: usize) {
    fleet.drain(node);
    fleet.run_until("it is gone", s(180), |fleet| !fleet.nodes[node].is_up).await;
}

/// Ends for this reason since then, of one node.
fn n_closed(fleet: &Fleet, node: usize, reason: CloseReason, from: Instant) -> usize {
    fleet.record.closes.iter().filter(|close| (close.node, close.reason) == (node, reason) && close.at > from).count()
}

#[tokio::test(start_paused = true)]
async fn from_ten_to_six_each_drain_moves_its_own_and_nobody_else_is_moved() {
    let mut fleet = Fleet::standing(FleetConfig::new(51, LEAST), &[2_000; 10]).await;
    let from = Instant::now();
    for node in [9, 4, 0, 7] {
        let (began, held) = (Instant::now(), fleet.counts()[node]);
        take_away(&mut fleet, node).await;
        let moved = n_closed(&fleet, node, CloseReason::Drain, began);
        // Whoever came in the two seconds until the balancer noticed is moved as well.
        assert!((held..held + held / 50).contains(&moved), "{moved} moved of {held}");
        fleet.run(BETWEEN).await;
        // What a drain moves is even already: it leaves the balancing nothing to do.
        assert!(fleet.record.now().worst < 0.05, "{:?}", fleet.counts());
    }
    let figures = Figures::since(from, &fleet, "10 -> 6, 20,000 sessions, least connections");
    assert_eq!((figures.n_shed, figures.n_refused, figures.n_ping_pong), (0, 0, 0));
    let n_drained = fleet.record.closed(CloseReason::Drain, from).len();
    assert!(n_drained <= 2_100 + 2_400 + 2_700 + 3_100, "{n_drained} were moved");
    let heard = fleet.heard().await;
    assert_eq!((heard.n_gaps, fleet.n_clients()), (0, (20_000, 0, 0)), "{heard:?}");
}

#[tokio::test(start_paused = true)]
async fn a_new_node_that_goes_while_it_is_filled_is_filled_no_further() {
    let (mut fleet, _) = scaled_out(FleetConfig::new(52, LEAST), 6, 4, 20_000).await;
    fleet.run(s(40)).await;
    let began = Instant::now();
    assert!(fleet.record.n_shed(began - s(5), began) > 100, "it is being filled");
    fleet.drain(9);
    // The next reading shows that it leaves.
    fleet.run(s(6)).await;
    let told = Instant::now();
    assert!(fleet.all_say("draining"), "{:?}", fleet.nodes[0].suspended());
    fleet.run_until("it is gone", s(180), |fleet| !fleet.nodes[9].is_up).await;
    assert_eq!(fleet.record.n_shed(told, Instant::now()), 0, "a drain comes first");
    fleet.run(s(420)).await;
    let figures = Figures::since(began, &fleet, "6 -> 10 -> 9 in the midst of the moving, 20,000 sessions");
    assert!(figures.worst < 0.05, "{:?}", fleet.counts());
    assert_eq!((figures.n_refused, figures.n_ping_pong, figures.n_moved_again), (0, 0, 0));
    // Three newcomers' shares, and what the fourth had been given before it went.
    let n_shed = fleet.record.n_shed(began - s(60), Instant::now()) as f64;
    let least = 3.0 * 20_000.0 / 9.0;
    assert!(n_shed <= 1.05 * (least + 2_000.0 / 4.0 * 3.0), "{n_shed} moves");
    let heard = fleet.heard().await;
    assert_eq!((heard.n_gaps, fleet.n_clients()), (0, (20_000, 0, 0)), "{heard:?}");
}

#[tokio::test(start_paused = true)]
async fn all_nodes_that_are_replaced_at_once_still_send_their_sessions_away_bit_by_bit() {
    const EACH: usize = 2_000;
    let mut fleet = Fleet::standing(FleetConfig::new(53, LEAST), &[EACH; 3]).await;
    let began = Instant::now();
    (0..3).for_each(|node| fleet.drain(node));
    fleet.run_until("all are gone", s(180), |fleet| fleet.nodes.iter().all(|node| !node.is_up)).await;
    let ends = fleet.record.closed(CloseReason::Drain, began);
    assert_eq!(ends.len(), 3 * EACH);
    // Nobody is there who would take them, so each goes by what one node like itself takes: at 50 a second.
    for node in 0..3 {
        let of_node = fleet.record.closes.iter().filter(|close| close.node == node && close.at > began);
        let of_node: Vec<Instant> = of_node.map(|close| close.at).collect();
        let (length, most) = (*of_node.last().unwrap() - of_node[0], peak(&of_node, s(1)));
        println!("{EACH} sessions of node {node}, like those of the other two: over {length:?}, at most {most}/s");
        assert!(length >= s(38) && most <= 1.25 * 50.0, "{length:?}, {most}/s");
    }
    for _ in 0..3 {
        fleet.add();
    }
    fleet.run(s(120)).await;
    let figures = Figures::since(began, &fleet, "three nodes replaced at once, 6,000 sessions");
    assert_eq!((figures.n_shed, figures.n_ping_pong), (0, 0));
    assert!(figures.worst < 0.10, "{:?}", fleet.counts());
    let heard = fleet.heard().await;
    assert_eq!((heard.n_gaps, fleet.n_clients()), (0, (3 * EACH, 0, 0)), "{heard:?}");
}

#[tokio::test(start_paused = true)]
async fn a_drain_of_40_000_is_as_long_as_planned_and_its_pace_does_not_drift() {
    const N: usize = 40_000;
    let config = FleetConfig { shed: ShedMode::Off, ..FleetConfig::new(54, LEAST) };
    let mut fleet = Fleet::new(config);
    for n in [N, 100, 100, 100, 100, 100, 100, 100, 100] {
        let node = fleet.add();
        fleet.fill(node, n);
    }
    fleet.run(s(30)).await;
    let began = Instant::now();
    take_away(&mut fleet, 0).await;
    let ends = fleet.record.closed(CloseReason::Drain, began);
    assert_eq!((ends.len(), fleet.record.refusals.len()), (N, 0));
    // Eight others take a hundred a second each, half of that is for these: a hundred seconds.
    let (first, pace) = (ends[0], N as f64 / 100.0);
    assert!(first >= began + s(5) && first <= began + s(6), "the grace first: {:?}", first - began);
    for (i, at) in ends.iter().enumerate().step_by(N / 20) {
        let late = (*at - first).as_secs_f64() - i as f64 / pace;
        assert!(late.abs() <= 1.0, "{i} of {N} left {late} s late");
    }
    let length = (*ends.last().unwrap() - first).as_secs_f64();
    assert!((length / 100.0 - 1.0).abs() <= 0.05, "{length} s");
    assert!(peak(&ends, s(1)) <= 1.25 * pace, "{}/s", peak(&ends, s(1)));
    fleet.run(s(10)).await;
    assert_eq!(fleet.heard().await.n_gaps, 0);
}
