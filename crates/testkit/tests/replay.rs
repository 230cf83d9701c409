//! Replays that do not fit: a slow reader takes them page by page, whatever it costs in time and
//! never in memory; what comes meanwhile comes after, in order; what is beyond the cap is told.

use std::time::Duration;

use hub::event::Wire;
use serde_json::Value;
use tidegate_testkit::world::{World, WorldConfig};

const PAD: usize = 10_000;

/// Pipes that hold less than one event.
fn narrow() -> WorldConfig {
    let mut config = WorldConfig::new(1);
    config.pipe_bytes = 8 * 1024;
    config
}

/// A client of `a` and `b` that was there and is cut.
async fn away(world: &mut World, wire: Wire) -> usize {
    let client = world.add_client(wire, &["a", "b"]);
    world.bring(client, 0).await;
    world.clients[client].cut();
    client
}

fn numbers(world: &World, client: usize) -> Vec<u64> {
    let number = |event: &Value| event["data"].as_u64().or_else(|| event["data"]["number"].as_u64()).unwrap();
    world.clients[client].heard_of("event").map(number).collect()
}

/// What waits in all outboxes of the node, as its figures say.
fn outbox_bytes(world: &World) -> i64 {
    let figures = world.nodes[0].metrics.encode();
    let line = figures.lines().find_map(|line| line.strip_prefix("gateway_outbox_bytes "));
    line.expect("the gauge is there").parse().unwrap()
}

/// One sip of a slow reader: at most 8 KiB in 20 ms.
async fn sip(world: &mut World, client: usize) {
    tokio::time::sleep(Duration::from_millis(20)).await;
    world.clients[client]
        .receive(&world.truth, 8 * 1024, usize::MAX)
        .unwrap_or_else(|violation| world.fail(&violation));
}

#[tokio::test(start_paused = true)]
async fn a_slow_reader_resumes_ten_megabytes_and_then_hears_what_came_meanwhile() {
    for wire in [Wire::Ws, Wire::Sse] {
        let mut world = World::new(narrow()).await;
        let client = away(&mut world, wire).await;
        for i in 0..1_000 {
            world.publish_with(["a", "b"][i % 2], None, PAD).await;
        }
        world.connect(client, 0);
        let (mut n_sips, mut most) = (0, 0);
        while !world.clients[client].is_ready() {
            sip(&mut world, client).await;
            n_sips += 1;
            if n_sips % 10 == 0 {
                world.publish_with("a", None, PAD).await;
            }
            most = most.max(outbox_bytes(&world));
            assert!(n_sips < 5_000, "the replay does not end");
        }
        // A page and what is held back, with frames around; never the replay.
        assert!((1..600 * 1024).contains(&most), "{most} bytes waited");
        while (numbers(&world, client).len() as u64) < world.truth.n_events() {
            sip(&mut world, client).await;
            n_sips += 1;
            assert!(world.clients[client].is_connected() && n_sips < 5_000);
        }
        assert_eq!(numbers(&world, client), (1..=world.truth.n_events()).collect::<Vec<_>>());
        assert_eq!(world.clients[client].judge().n_gaps(), 0);
    }
}

#[tokio::test(start_paused = true)]
async fn a_replay_larger_than_the_outbox_may_be_does_not_end_the_session() {
    for wire in [Wire::Ws, Wire::Sse] {
        let mut config = narrow();
        config.session.outbox_bytes = 64 * 1024;
        let mut world = World::new(config).await;
        let client = away(&mut world, wire).await;
        for _ in 0..40 {
            world.publish_with("a", None, PAD).await;
        }
        world.connect(client, 0);
        // As much comes meanwhile as the client takes: a fifth of it.
        for n_sips in 1.. {
            sip(&mut world, client).await;
            if n_sips % 8 == 0 && n_sips < 200 {
                world.publish_with("b", None, PAD).await;
            }
            assert!(world.clients[client].is_connected(), "{:?}", world.clients[client].heard().last());
            if numbers(&world, client).len() as u64 == world.truth.n_events() && n_sips > 200 {
                break;
            }
            assert!(n_sips < 2_000);
        }
        assert_eq!(numbers(&world, client), (1..=world.truth.n_events()).collect::<Vec<_>>());
        assert_eq!(world.clients[client].judge().n_gaps(), 0);
    }
}

#[tokio::test(start_paused = true)]
async fn a_later_subscribe_may_take_as_long_as_its_reader_needs() {
    let mut world = World::new(narrow()).await;
    let client = world.add_client(Wire::Ws, &["a"]);
    world.bring(client, 0).await;
    let since = world.clients[client].cursor().map(str::to_owned);
    for _ in 0..300 {
        world.publish_with("c", None, PAD).await;
    }
    world.subscribe(client, "c", since.as_deref());
    for n_sips in 0.. {
        sip(&mut world, client).await;
        if n_sips % 50 == 0 {
            world.publish("a").await;
        }
        if world.clients[client].is_settled() {
            break;
        }
        assert!(n_sips < 2_000);
    }
    // It took more than the second after which an unreachable log is given up.
    assert_eq!(world.clients[client].heard_of("error").count(), 0);
    assert_eq!(world.clients[client].heard_of("ok").count(), 1);
    world.conclude().await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn beyond_the_cap_a_replay_has_a_gap_and_keeps_the_newest_and_at_the_cap_it_has_none() {
    for (n_missed, n_gaps) in [(999, 0), (1_000, 0), (1_001, 1), (1_700, 1)] {
        let mut config = WorldConfig::new(1);
        config.history.history_size = 2_000;
        let mut world = World::new(config).await;
        let client = away(&mut world, Wire::Ws).await;
        for _ in 0..n_missed {
            world.publish("a").await;
        }
        world.bring(client, 1).await;
        let kept = n_missed.min(1_000);
        assert_eq!(numbers(&world, client), (n_missed - kept + 1..=n_missed).collect::<Vec<_>>());
        let gaps: Vec<&Value> = world.clients[client].heard_of("gap").collect();
        assert_eq!(gaps.len(), n_gaps, "{n_missed} missed");
        assert!(gaps.iter().all(|gap| gap["reason"] == "overflow" && gap["channel"] == "a"));
        let ready = world.clients[client].heard_of("ready").last().unwrap();
        assert_eq!(ready["replayed"], kept);
        assert_eq!(ready["resume"], ["ok", "gap"][n_gaps]);
    }
}

#[tokio::test(start_paused = true)]
async fn a_reader_that_stops_in_its_replay_is_ended_by_the_write_timeout() {
    let mut world = World::new(narrow()).await;
    let client = away(&mut world, Wire::Ws).await;
    for _ in 0..100 {
        world.publish_with("a", None, PAD).await;
    }
    world.connect(client, 0);
    tokio::time::sleep(Duration::from_millis(9_800)).await;
    let n_open = |world: &World| world.nodes[0].hub.load().n_sessions;
    let n_slow = |world: &World| world.nodes[0].metrics.encode().matches("closed_total{reason=\"slow\"} 1").count();
    assert_eq!((n_open(&world), n_slow(&world)), (1, 0));
    // The write timeout, and then the close timeout: nobody takes the bye either.
    tokio::time::sleep(Duration::from_millis(3_500)).await;
    assert_eq!((n_open(&world), n_slow(&world)), (0, 1));
}

#[tokio::test(start_paused = true)]
async fn a_hole_between_two_pages_of_a_repair_is_told_before_the_event_behind_it() {
    let mut config = WorldConfig::new(1);
    config.history.history_size = 40;
    config.session.outbox_bytes = 64 * 1024 * 1024;
    let mut world = World::new(config).await;
    let client = world.add_client(Wire::Ws, &["a"]);
    world.bring(client, 0).await;
    world.nodes[0].memory().cut_link();
    // Six megabytes: two pages of a repair.
    for _ in 0..40 {
        world.publish_with("a", None, 150_000).await;
    }
    let held = world.nodes[0].faults.hold(tidegate_testkit::faults::Call::Read);
    world.nodes[0].memory().restore_link();
    held.arrived(1).await;
    // Before the second page is read, it is gone.
    for _ in 0..40 {
        world.publish_with("a", None, 150_000).await;
    }
    held.release();
    for _ in 0..2_000 {
        world.flow().await;
    }
    assert_eq!(numbers(&world, client), (41..=80).collect::<Vec<_>>());
    assert_eq!(world.clients[client].judge().n_gaps(), 1);
}
