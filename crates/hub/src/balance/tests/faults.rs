//! What keeps everybody where they are: faults, deploys, operators, and clients that do not go
//! where they should.

use super::super::*;
use super::sim::{Front, Sim};

/// From six to ten, in the midst of the moving.
fn moving(front: Front) -> Sim {
    let mut sim = Sim::standing(1, front, &[8_333; 6]);
    for _ in 0..4 {
        sim.add();
    }
    sim.run(50);
    assert!(sim.sheds[sim.t] > 100, "{:?}", sim.sheds);
    sim
}

fn all_say(sim: &Sim, reason: ShedSuspension) -> bool {
    let serving = |node: &usize| sim.nodes[*node].orders.is_some();
    (0..sim.nodes.len()).filter(serving).all(|node| sim.reasons(node).contains(&reason))
}

#[test]
fn nobody_is_moved_before_a_newcomer_was_ready_for_15_s() {
    let mut sim = Sim::standing(1, Front::LeastConnections, &[10_000; 5]);
    let (from, new) = (sim.t, sim.add());
    sim.nodes[new].is_routed = false;
    sim.run(14);
    assert_eq!(sim.n_shed(), 0);
    sim.run(16);
    sim.nodes[new].is_routed = true;
    sim.run(600);
    assert!(sim.settled(&sim.worst, 0.10, from) < 250);
}

#[test]
fn the_ghost_of_a_killed_node_moves_nobody_for_60_s() {
    // In a small fleet the total jumps; in a big one only the member is missing, and its report
    // still stands while its clients are back already.
    for (n, width) in [(5_000, 4), (2_000, 40)] {
        let mut sim = Sim::standing(1, Front::InTurn, &vec![n; width]);
        sim.nodes[0].n = n * 2;
        sim.kill(0);
        sim.run(20);
        let from = sim.t;
        sim.run(55);
        assert_eq!(sim.shed_since(from), 0);
        sim.run(600);
        assert_eq!(sim.n_shed(), 0, "all are even: {:?}", sim.counts());
    }
}

#[test]
fn a_node_that_dies_while_sessions_are_moved_stops_the_moving_for_60_s() {
    let mut sim = moving(Front::LeastConnections);
    sim.kill(0);
    sim.run(20);
    let from = sim.t;
    assert!(all_say(&sim, ShedSuspension::Unsettled));
    sim.run(50);
    assert_eq!(sim.shed_since(from), 0);
    sim.run(300);
    assert!(sim.worst[sim.t] < 0.03, "{:?}", sim.counts());
}

#[test]
fn deleted_reports_are_not_empty_nodes() {
    let mut sim = Sim::standing(1, Front::LeastConnections, &[5_000; 10]);
    for _ in 0..100 {
        sim.store.clear();
        sim.run(1);
    }
    assert!(all_say(&sim, ShedSuspension::Stale), "each knows of itself alone");
    sim.run(200);
    assert_eq!(sim.n_shed(), 0);
}

#[test]
fn a_flush_while_sessions_are_moved_stops_it_with_the_next_reading() {
    let mut sim = moving(Front::LeastConnections);
    sim.store.clear();
    sim.run(6);
    let from = sim.t;
    sim.run(50);
    assert_eq!(sim.shed_since(from), 0);
    sim.run(400);
    assert!(sim.worst[sim.t] < 0.03, "{:?}", sim.counts());
    assert!(sim.n_shed() <= 20_000, "{} moves", sim.n_shed());
}

#[test]
fn a_backplane_that_fails_stops_the_moving_within_2_s_and_all_go_on_at_different_times() {
    let mut sim = moving(Front::LeastConnections);
    sim.backplane_is_up = false;
    sim.run(2);
    let from = sim.t;
    assert!((0..6).all(|node| sim.reasons(node).contains(&ShedSuspension::Backplane)));
    sim.run(60);
    assert_eq!(sim.shed_since(from), 0);
    assert!(all_say(&sim, ShedSuspension::Backplane) && all_say(&sim, ShedSuspension::Stale));
    sim.backplane_is_up = true;
    let back = sim.t;
    sim.run(35);
    assert_eq!(sim.shed_since(back), 0, "two readings and at least 30 s more");
    let resumed: std::collections::HashSet<usize> = (0..10)
        .map(|node| sim.run_until(60, |sim| !sim.reasons(node).contains(&ShedSuspension::Backplane)) + sim.t)
        .collect();
    assert!(resumed.len() > 3, "{resumed:?}");
    sim.run(600);
    assert!(sim.worst[sim.t] < 0.03, "{:?}", sim.counts());
}

#[test]
fn two_versions_move_nobody_until_60_s_after_the_last_of_the_old() {
    let mut sim = Sim::standing(1, Front::LeastConnections, &[8_333; 6]);
    for _ in 0..4 {
        let new = sim.add();
        sim.nodes[new].version = "2".into();
    }
    sim.run(600);
    assert_eq!(sim.n_shed(), 0);
    assert!((0..10).all(|node| sim.reasons(node) == [ShedSuspension::Deploy]));
    for node in &mut sim.nodes {
        node.version = "2".into();
    }
    sim.run(60);
    assert_eq!(sim.n_shed(), 0);
    sim.run(30);
    assert!(sim.n_shed() > 0);
}

#[test]
fn affinity_is_noticed_within_90_s_and_each_break_is_longer() {
    let mut sim = Sim::standing(1, Front::Affinity, &[8_333; 6]);
    for _ in 0..4 {
        sim.add();
    }
    sim.run_until(60, |sim| sim.n_shed() > 0);
    let first = sim.t;
    sim.run(90);
    assert!((0..6).all(|node| sim.reasons(node) == [ShedSuspension::Ineffective]));
    let n_first = sim.n_shed();
    assert_eq!(sim.shed_since(first + 75), 0, "all had stopped by then");
    sim.run(500);
    assert_eq!(sim.n_shed(), n_first, "for ten minutes");
    sim.run(400);
    let n_second = sim.n_shed();
    assert!(n_second > n_first, "then it tries again");
    sim.run(800);
    assert_eq!(sim.n_shed(), n_second, "and the next break is twice as long");
}

#[test]
fn in_turn_with_one_newcomer_among_twenty_is_left_to_recycling() {
    let mut sim = Sim::standing(1, Front::InTurn, &[2_500; 20]);
    sim.add();
    sim.run(120);
    let n = (0..20).filter(|node| sim.reasons(*node) == [ShedSuspension::Ineffective]).count();
    assert!(n >= 15, "{n} of 20");
}

#[test]
fn clients_that_do_not_come_back_are_no_longer_sent_away_after_75_s() {
    for returning in [0.0, 0.5] {
        let mut sim = Sim::standing(1, Front::LeastConnections, &[8_333; 6]);
        sim.returning = returning;
        for _ in 0..4 {
            sim.add();
        }
        sim.run_until(60, |sim| sim.n_shed() > 0);
        let first = sim.t;
        sim.run(600);
        assert_eq!(sim.shed_since(first + 75), 0, "{returning}");
        assert!((0..6).all(|node| sim.reasons(node).contains(&ShedSuspension::Ineffective)));
    }
    let mut sim = Sim::standing(1, Front::LeastConnections, &[8_333; 6]);
    sim.returning = 0.85;
    for _ in 0..4 {
        sim.add();
    }
    sim.run(400);
    assert!(sim.worst[sim.t] < 0.03, "most return: it goes on, {:?}", sim.counts());
}

#[test]
fn after_a_cut_of_60_percent_nobody_is_moved_until_the_total_stood_still_for_30_s() {
    let mut sim = Sim::standing(1, Front::InTurn, &[5_000; 10]);
    // All of six nodes' clients: they come back everywhere, so that the other four are over.
    for node in 0..6 {
        sim.nodes[node].n = 0;
    }
    for second in 0..30 {
        for node in 0..10 {
            sim.nodes[node].n += 100;
        }
        sim.run(1);
        assert!(second < 6 || all_say(&sim, ShedSuspension::Unsettled), "{second}");
    }
    sim.run(27);
    assert_eq!(sim.n_shed(), 0);
    sim.run(20);
    assert!(sim.n_shed() > 0, "{:?}", sim.counts());
}

#[test]
fn a_cut_of_everybody_while_sessions_are_moved_stops_it_at_once() {
    let mut sim = moving(Front::LeastConnections);
    sim.cut(0.6, 30);
    let from = sim.t;
    sim.run(40);
    assert_eq!(sim.shed_since(from), 0);
}

#[test]
fn a_node_that_leaves_is_neither_filled_nor_emptied_by_shedding() {
    let mut sim = Sim::standing(1, Front::LeastConnections, &[5_000, 5_000, 5_000, 1_000]);
    let from = sim.t;
    sim.drain(3, 20);
    sim.run(3);
    let told = sim.t;
    sim.run(40);
    assert!(all_say(&sim, ShedSuspension::Draining));
    assert!(sim.shed_since(told + 4) == 0 && told > from);
    sim.run(300);
    assert_eq!(sim.shed_since(told + 4), 0, "the rest is even");
}

#[test]
fn a_hold_stops_it_within_a_second_and_its_end_lets_it_go_on() {
    let mut sim = moving(Front::LeastConnections);
    sim.is_held = true;
    let from = sim.t;
    sim.run(100);
    assert_eq!(sim.shed_since(from), 0);
    assert!((0..10).all(|node| sim.reasons(node) == [ShedSuspension::Hold]));
    sim.is_held = false;
    sim.run(1);
    assert!(sim.shed_since(from + 100) > 0);
}

#[test]
fn a_pause_of_whatever_length_never_makes_it_seem_to_be_of_no_use() {
    // After it, the last minute holds a few closes from before and a few whose clients are on their way still.
    for pause in 45..65 {
        let mut sim = moving(Front::LeastConnections);
        sim.is_held = true;
        sim.run(pause);
        sim.is_held = false;
        for _ in 0..70 {
            sim.run(1);
            let useless = |node: &usize| sim.reasons(*node).contains(&ShedSuspension::Ineffective);
            assert_eq!((0..10).find(useless), None, "after {pause} s, {:?}", sim.counts());
        }
    }
}

#[test]
fn a_fleet_that_refuses_is_not_sent_more() {
    let mut sim = moving(Front::LeastConnections);
    // They say that they take 100 a second; something else takes most of it.
    for node in 6..10 {
        (sim.nodes[node].takes, sim.nodes[node].accept_rate) = (20.0, 100.0);
    }
    sim.run_until(30, |sim| sim.n_refused > 0);
    sim.run(12);
    let from = sim.t;
    assert!(all_say(&sim, ShedSuspension::Refusing));
    sim.run_until(200, |sim| !all_say(sim, ShedSuspension::Refusing));
    assert_eq!(sim.shed_since(from), 0, "until nobody was refused for 10 s");
}

#[test]
fn a_dry_run_counts_on_and_is_never_ineffective() {
    let mut sim = Sim::standing(1, Front::LeastConnections, &[8_333; 6]);
    sim.is_dry = true;
    for _ in 0..4 {
        sim.add();
    }
    sim.run(300);
    assert_eq!(sim.counts()[..6], [8_333; 6]);
    assert!(sim.sheds[sim.t] > 100);
    assert!((0..6).all(|node| sim.nodes[node].orders.as_ref().unwrap().state == State::Shedding));
}

#[test]
fn a_restarted_node_of_the_same_name_is_another_node() {
    let mut sim = Sim::standing(1, Front::LeastConnections, &[5_000; 4]);
    sim.kill(0);
    let new = sim.add();
    sim.nodes[new].name = sim.nodes[0].name.clone();
    sim.run(8);
    let from = sim.t;
    sim.run(50);
    assert_eq!(sim.shed_since(from), 0);
    assert!(sim.reasons(1).contains(&ShedSuspension::Unsettled));
}
