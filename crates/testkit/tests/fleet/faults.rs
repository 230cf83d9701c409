//! What breaks: a node, the backplane's memory, the backplane, everybody's connections.

use hub::close::CloseReason;
use tidegate_testkit::faults::{Call, Failure};
use tidegate_testkit::fleet::{Balancing, Fleet, FleetConfig};
use tokio::time::Instant;

use crate::{Figures, moving, s};

#[tokio::test(start_paused = true)]
async fn the_ghost_of_a_full_node_that_was_killed_moves_nobody() {
    let mut fleet = Fleet::standing(FleetConfig::new(21, Balancing::LeastConnections), &[4_500; 10]).await;
    fleet.fill(0, 5_000);
    let killed = Instant::now();
    fleet.kill(0);
    fleet.run(s(10)).await;
    let known = |fleet: &Fleet| fleet.nodes[1].hub.fleet().nodes.len();
    assert_eq!(known(&fleet), 10, "its report is still there");
    fleet.run(s(50)).await;
    assert_eq!(known(&fleet), 9);
    assert_eq!(fleet.record.n_shed(killed, Instant::now()), 0);
    fleet.run(s(240)).await;
    let figures = Figures::since(killed, &fleet, "one of 10 killed with 9,500 of 50,000 sessions");
    assert_eq!(figures.n_shed, 0);
    figures.assert_even_within(60.0);
}

#[tokio::test(start_paused = true)]
async fn a_node_that_dies_while_sessions_are_moved_stops_the_moving_for_60_s() {
    let mut fleet = moving(10_000).await;
    fleet.kill(0);
    // Its report ends first.
    fleet.run(s(20)).await;
    let from = Instant::now();
    assert!(fleet.all_say("unsettled"), "{:?}", fleet.nodes[1].suspended());
    fleet.run(s(50)).await;
    assert_eq!(fleet.record.n_shed(from, Instant::now()), 0);
    fleet.run(s(300)).await;
    let figures = Figures::since(from, &fleet, "one of 10 killed in the midst of the moving, 10,000 sessions");
    assert!(figures.worst < 0.10, "{:?}", fleet.counts());
}

#[tokio::test(start_paused = true)]
async fn a_flush_closes_nobody_and_makes_nobody_move() {
    let mut fleet = Fleet::standing(FleetConfig::new(22, Balancing::LeastConnections), &[5_000; 10]).await;
    for _ in 0..3 {
        fleet.log.flush();
        fleet.run(s(7)).await;
    }
    fleet.run(s(180)).await;
    println!("three flushes, 50,000 sessions: {} closes", fleet.record.closes.len());
    assert_eq!(fleet.record.closes.len(), 0);
    let heard = fleet.heard().await;
    assert!(heard.n_gaps >= heard.n_listeners as u64, "all were told: {heard:?}");
}

#[tokio::test(start_paused = true)]
async fn a_flush_in_the_midst_of_the_moving_stops_it_with_the_next_reading() {
    let mut fleet = moving(50_000).await;
    fleet.log.flush();
    fleet.run(s(2)).await;
    let from = Instant::now();
    fleet.run(s(50)).await;
    println!("{} sheds from 2 s to 52 s after a flush", fleet.record.n_shed(from, Instant::now()));
    assert_eq!(fleet.record.n_shed(from, Instant::now()), 0);
    fleet.run(s(300)).await;
    let figures = Figures::since(from, &fleet, "a flush in the midst of the moving, 50,000 sessions");
    assert!(figures.worst < 0.05, "{:?}", fleet.counts());
    assert!(fleet.record.closes.len() as f64 <= 1.05 * 20_000.0, "{}", fleet.record.closes.len());
}

#[tokio::test(start_paused = true)]
async fn an_outage_in_the_midst_of_the_moving_stops_it_within_2_s_and_it_goes_on_later() {
    let mut fleet = moving(50_000).await;
    fleet.cut_off();
    let out = Instant::now();
    fleet.run(s(2)).await;
    let (from, before) = (Instant::now(), fleet.record.n_shed(out, Instant::now()));
    fleet.run(s(60)).await;
    println!("{before} sheds in the first 2 s of an outage, {} after", fleet.record.n_shed(from, Instant::now()));
    assert_eq!(fleet.record.n_shed(from, Instant::now()), 0);
    assert!(fleet.all_say("backplane"));
    fleet.mend();
    let back = Instant::now();
    fleet.run(s(30)).await;
    assert_eq!(fleet.record.n_shed(back, Instant::now()), 0, "it waits until it is sure");
    fleet.run(s(300)).await;
    let figures = Figures::since(back, &fleet, "after an outage of 62 s in the midst of the moving, 50,000 sessions");
    assert!(figures.worst < 0.05, "{:?}", fleet.counts());
    let heard = fleet.heard().await;
    println!("{heard:?}");
    assert_eq!((heard.n_gaps, fleet.n_clients()), (0, (50_000, 0, 0)));
}

#[tokio::test(start_paused = true)]
async fn a_backplane_that_answers_only_half_of_what_it_should_stops_it_too() {
    // Calls fail while the link stands, as of a replica that does not write; a lost answer; and a
    // link that is down while calls are answered.
    let kinds: [fn(&Fleet); 3] = [
        |fleet| fleet.nodes.iter().for_each(|node| node.faults.fail(Call::Report, Failure::Request)),
        |fleet| fleet.nodes.iter().for_each(|node| node.faults.fail(Call::Report, Failure::Answer)),
        |fleet| fleet.nodes.iter().for_each(|node| node.faults.inner().cut_link()),
    ];
    for (i, breaks) in kinds.into_iter().enumerate() {
        let mut fleet = moving(6_000).await;
        breaks(&fleet);
        fleet.run(s(2)).await;
        let from = Instant::now();
        fleet.run(s(60)).await;
        assert_eq!(fleet.record.n_shed(from, Instant::now()), 0, "of kind {i}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_backplane_that_does_not_answer_at_all_stops_it_within_2_s_too() {
    let mut fleet = moving(6_000).await;
    let held: Vec<_> = fleet.nodes.iter().map(|node| node.faults.hold(Call::Report)).collect();
    fleet.run(s(2)).await;
    let from = Instant::now();
    fleet.run(s(60)).await;
    assert_eq!(fleet.record.n_shed(from, Instant::now()), 0);
    assert!(fleet.all_say("backplane"), "{:?}", fleet.nodes[0].suspended());
    drop(held);
}

#[tokio::test(start_paused = true)]
async fn after_a_cut_of_60_percent_nobody_is_moved_until_all_have_been_back_for_half_a_minute() {
    let mut fleet = Fleet::standing(FleetConfig::new(23, Balancing::InTurn), &[5_000; 10]).await;
    let cut = Instant::now();
    // All of six nodes: in turn they come back everywhere, so that the other four are over.
    (0..6).for_each(|node| fleet.cut_of(node));
    fleet.run(s(2)).await;
    let took = fleet.run_until("all but a few are back", s(180), |fleet| fleet.record.now().n_sessions >= 47_500).await;
    let steady = Instant::now();
    fleet.run(s(25)).await;
    println!("back after {took:?}: {:?}; {} refusals", fleet.counts(), fleet.record.refusals.len());
    assert_eq!(fleet.record.n_shed(cut, Instant::now()), 0);
    fleet.run(s(395)).await;
    let figures = Figures::since(steady, &fleet, "after a cut of 60 % of 50,000 sessions");
    assert!(figures.n_shed > 0 && figures.n_ping_pong == 0);
    assert!(figures.worst < 0.10, "{:?}", fleet.counts());
    let heard = fleet.heard().await;
    assert_eq!((heard.n_gaps, fleet.n_clients()), (0, (50_000, 0, 0)));
}

#[tokio::test(start_paused = true)]
async fn a_cut_in_the_midst_of_the_moving_stops_it_at_once() {
    let mut fleet = moving(10_000).await;
    fleet.cut(0.6);
    fleet.run(s(2)).await;
    let from = Instant::now();
    fleet.run(s(40)).await;
    assert_eq!(fleet.record.n_shed(from, Instant::now()), 0);
    assert_eq!(fleet.record.closed(CloseReason::Lost, from).len(), 0);
}
