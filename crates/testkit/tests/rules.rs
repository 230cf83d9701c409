//! The rules of order, attach, repair and gap, one by one: each test is the shortest way in which a
//! client would see a broken promise without the rule it names. What a client sees is judged all
//! the while (`world::judge`), so that a test states only what is its own.

use std::time::Duration;

use hub::backplane::{Backplane, FromLink};
use hub::channel::Channel;
use hub::clock::{Clock, Dice};
use hub::cursor::EventId;
use hub::event::Wire;
use hub::memory::{MemoryLog, Restart};
use serde_json::Value;
use tidegate_testkit::faults::Call;
use tidegate_testkit::world::line::InFlight;
use tidegate_testkit::world::{World, WorldConfig};
use tokio::time::timeout;

/// Four events a channel, five a replay: the smallest log in which everything can happen.
async fn small_world() -> World {
    let mut config = WorldConfig::new(1);
    config.history.history_size = 4;
    config.replay_max = 5;
    World::new(config).await
}

/// Pages of two events: what does not fit a pipe waits at the server.
async fn world_of_pages() -> World {
    let mut config = WorldConfig::new(1);
    config.pipe_bytes = 8 * 1024;
    World::new(config).await
}
const PAGE_PAD: usize = 120 * 1024;

/// What a client heard since message `from`: events as their number, the rest as type and channel.
fn heard(world: &World, client: usize, from: usize) -> Vec<String> {
    let word = |message: &Value| {
        let text = |field: &str| message[field].as_str().unwrap_or_default().to_owned();
        match message["type"].as_str().unwrap() {
            "event" => message["data"].as_u64().or_else(|| message["data"]["number"].as_u64()).unwrap().to_string(),
            "gap" => format!("gap {} {}", text("channel"), text("reason")),
            kind => format!("{kind} {}", text("channel")).trim_end().to_owned(),
        }
    };
    world.clients[client].heard()[from..].iter().map(word).collect()
}

fn n_heard(world: &World, client: usize) -> usize {
    world.clients[client].heard().len()
}

fn id_of(message: &Value) -> EventId {
    message["id"].as_str().expect("with an id").parse().expect("a good one")
}

fn ready_ids(world: &World, client: usize) -> Vec<EventId> {
    world.clients[client].heard_of("ready").map(id_of).collect()
}

fn take_some(world: &mut World, client: usize, n_messages: usize) {
    world.clients[client].receive(&world.truth, usize::MAX, n_messages).unwrap();
}

/// Lets all tasks run without that time passes.
async fn turns() {
    for _ in 0..200 {
        tokio::task::yield_now().await;
    }
}

async fn pass(time: Duration) {
    tokio::time::advance(time).await;
}

// confirm

#[tokio::test(start_paused = true)]
async fn history_is_read_only_once_the_link_carries_the_channel() {
    let mut world = small_world().await;
    let client = world.add_client(Wire::Ws, &["a", "b"]);
    world.nodes[0].line().hold();
    world.connect(client, 0);
    world.flow().await;
    assert_eq!(heard(&world, client, 0), ["hello"]);
    world.nodes[0].line().pass(1);
    world.flow().await;
    assert_eq!(heard(&world, client, 0), ["hello"], "one of two channels");
    world.publish("a").await;
    world.publish("b").await;
    world.nodes[0].line().flow();
    world.flow().await;
    assert_eq!(heard(&world, client, 0), ["hello", "ready"]);
    world.conclude().await.unwrap();
}

// gen

#[tokio::test(start_paused = true)]
async fn a_channel_given_up_upstream_is_confirmed_anew_for_the_next_listener() {
    let mut world = small_world().await;
    let client = world.add_client(Wire::Ws, &["a"]);
    world.bring(client, 0).await;
    world.clients[client].cut();
    world.settle().await;
    pass(Duration::from_secs(12)).await;
    world.settle().await;
    world.nodes[0].line().hold();
    world.connect(client, 0);
    world.flow().await;
    assert!(!world.clients[client].is_ready(), "the old confirmation does not count");
    world.nodes[0].line().flow();
    world.flow().await;
    assert!(world.clients[client].is_ready());
    world.conclude().await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn a_confirmation_of_what_was_given_up_meanwhile_never_comes() {
    let log = MemoryLog::new(WorldConfig::new(1).history, Clock::at(Duration::from_secs(1)), Dice::seeded(1));
    let node = log.node("node");
    let mut link = node.link();
    assert!(matches!(link.recv().await, Some(FromLink::Up(_))));
    let channel = Channel::new("a").unwrap();
    node.want(&channel);
    node.unwant(&channel);
    node.beacon();
    assert!(matches!(link.recv().await, Some(FromLink::Beacon(_))));
}

// atomic

#[tokio::test(start_paused = true)]
async fn one_read_serves_all_channels_as_of_one_position() {
    let mut world = small_world().await;
    let client = world.add_client(Wire::Ws, &["a", "b"]);
    world.bring(client, 0).await;
    world.clients[client].cut();
    world.publish("a").await;
    let held = world.nodes[0].faults.hold(Call::Read);
    world.connect(client, 0);
    held.arrived(1).await;
    let position = world.position().await;
    // Behind the read on both channels; the link brings them before its answer is here.
    world.publish("b").await;
    world.publish("a").await;
    world.settle().await;
    assert!(timeout(Duration::from_millis(500), held.arrived(2)).await.is_err(), "a second read");
    held.release();
    let from = n_heard(&world, client);
    world.flow().await;
    assert_eq!(heard(&world, client, from), ["hello", "1", "ready", "2", "3"]);
    assert_eq!(ready_ids(&world, client)[1], position);
}

// floor

#[tokio::test(start_paused = true)]
async fn a_late_link_does_not_repeat_what_was_replayed() {
    let mut world = small_world().await;
    let (keeper, client) = (world.add_client(Wire::Ws, &["a"]), world.add_client(Wire::Ws, &["a"]));
    world.bring(keeper, 0).await;
    world.bring(client, 0).await;
    world.clients[client].cut();
    world.nodes[0].line().hold();
    world.publish("a").await;
    let from = n_heard(&world, client);
    world.bring(client, 0).await;
    world.nodes[0].line().flow();
    world.publish("a").await;
    world.flow().await;
    assert_eq!(heard(&world, client, from), ["hello", "1", "ready", "2"]);
    assert_eq!(heard(&world, keeper, 2), ["1", "2"]);
}

// dedup

#[tokio::test(start_paused = true)]
async fn what_the_repair_read_is_not_delivered_again_by_the_link() {
    let mut world = small_world().await;
    let client = world.add_client(Wire::Ws, &["a"]);
    world.bring(client, 0).await;
    world.nodes[0].memory().cut_link();
    world.nodes[0].faults.delay(Call::Read, Duration::from_secs(1));
    world.nodes[0].memory().restore_link();
    world.settle().await;
    world.publish("a").await;
    world.publish_ephemeral("a").await;
    pass(Duration::from_secs(2)).await;
    world.flow().await;
    let numbers = heard(&world, client, 2);
    assert_eq!(numbers.iter().filter(|word| *word == "1").count(), 1, "{numbers:?}");
    world.nodes[0].faults.delay(Call::Read, Duration::ZERO);
    world.conclude().await.unwrap();
}

// gapfirst

#[tokio::test(start_paused = true)]
async fn every_gap_of_a_replay_precedes_its_first_event() {
    let mut world = small_world().await;
    for wire in [Wire::Ws, Wire::Sse] {
        let client = world.add_client(wire, &["a", "b"]);
        world.bring(client, 0).await;
        world.clients[client].cut();
        // Six on two channels, five fit: the first of `a` does not.
        for channel in ["a", "b", "b", "b", "b", "a"] {
            world.publish(channel).await;
        }
        world.connect(client, 0);
        world.settle().await;
        let from = n_heard(&world, client);
        take_some(&mut world, client, 4);
        let words = heard(&world, client, from);
        assert_eq!(words[..2], ["hello", "gap a overflow"], "{words:?}");
        // Cut behind the gap, it must be told again: its `id` is not beyond the hole.
        world.clients[client].cut();
        world.bring(client, 1).await;
    }
    world.conclude().await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn every_gap_of_a_repair_precedes_its_first_event() {
    let mut world = small_world().await;
    let client = world.add_client(Wire::Ws, &["a", "b"]);
    world.bring(client, 0).await;
    world.nodes[0].memory().cut_link();
    for channel in ["b", "a", "a", "a", "a", "a"] {
        world.publish(channel).await;
    }
    world.nodes[0].memory().restore_link();
    let from = n_heard(&world, client);
    world.flow().await;
    assert_eq!(heard(&world, client, from), ["gap a evicted", "1", "3", "4", "5", "6"]);
}

#[tokio::test(start_paused = true)]
async fn an_event_stream_cut_between_two_gaps_is_told_of_the_second_again() {
    let mut world = small_world().await;
    let client = world.add_client(Wire::Sse, &["a", "b"]);
    world.bring(client, 0).await;
    world.clients[client].cut();
    world.publish("a").await;
    world.publish("b").await;
    world.flush().await;
    world.connect(client, 0);
    world.settle().await;
    let from = n_heard(&world, client);
    take_some(&mut world, client, 2);
    assert_eq!(heard(&world, client, from), ["hello", "gap a reset"]);
    world.clients[client].cut();
    world.bring(client, 0).await;
    assert_eq!(heard(&world, client, from + 2), ["hello", "gap a reset", "gap b reset", "ready"]);
}

// readypos

#[tokio::test(start_paused = true)]
async fn ready_tells_where_the_read_stood_and_not_how_far_the_link_has_come() {
    let mut world = small_world().await;
    let (keeper, client) = (world.add_client(Wire::Ws, &["a"]), world.add_client(Wire::Ws, &["a"]));
    world.bring(keeper, 0).await;
    world.nodes[0].line().hold();
    world.publish("a").await;
    world.bring(client, 0).await;
    assert_eq!(ready_ids(&world, client), [world.position().await]);
    world.nodes[0].line().flow();
    world.conclude().await.unwrap();
}

// hold

#[tokio::test(start_paused = true)]
async fn nothing_of_a_new_link_is_delivered_before_the_repair_of_the_old() {
    let mut world = small_world().await;
    let client = world.add_client(Wire::Ws, &["a", "b"]);
    world.bring(client, 0).await;
    world.nodes[0].memory().cut_link();
    world.publish("a").await;
    let held = world.nodes[0].faults.hold(Call::Read);
    world.nodes[0].memory().restore_link();
    held.arrived(1).await;
    world.publish("b").await;
    world.publish("a").await;
    let from = n_heard(&world, client);
    world.flow().await;
    assert_eq!(heard(&world, client, from), [""; 0]);
    held.release();
    world.flow().await;
    assert_eq!(heard(&world, client, from), ["1", "2", "3"]);
}

// cov

#[tokio::test(start_paused = true)]
async fn a_repair_starts_where_each_session_stands() {
    let mut world = small_world().await;
    let (keeper, client) = (world.add_client(Wire::Ws, &["a"]), world.add_client(Wire::Ws, &["a"]));
    world.bring(keeper, 0).await;
    world.bring(client, 0).await;
    world.clients[client].cut();
    world.nodes[0].line().hold();
    world.nodes[0].line().when_lost(InFlight::IsLost);
    for _ in 0..6 {
        world.publish("a").await;
    }
    // It is ahead of the link by six; the keeper is not.
    world.bring(client, 0).await;
    let from = n_heard(&world, client);
    world.nodes[0].memory().cut_link();
    world.settle().await;
    world.publish("a").await;
    world.nodes[0].line().flow();
    world.nodes[0].memory().restore_link();
    world.flow().await;
    assert_eq!(heard(&world, client, from), ["7"], "neither a gap nor a repetition");
    assert_eq!(heard(&world, keeper, 2), ["gap a evicted", "4", "5", "6", "7"]);
}

// since_hi

#[tokio::test(start_paused = true)]
async fn a_subscribe_cut_in_its_replay_goes_on_from_the_highest_id_it_brought() {
    let mut world = world_of_pages().await;
    let client = world.add_client(Wire::Ws, &["a"]);
    world.bring(client, 0).await;
    let since = world.clients[client].cursor().map(str::to_owned);
    for _ in 0..6 {
        world.publish_with("b", None, PAGE_PAD).await;
    }
    world.subscribe(client, "b", since.as_deref());
    while n_heard(&world, client) < 5 {
        world.settle().await;
        take_some(&mut world, client, 1);
    }
    assert_eq!(heard(&world, client, 2), ["1", "2", "3"]);
    world.clients[client].cut();
    // Its cursor, moved by another channel, must play no part.
    world.publish("a").await;
    world.bring(client, 1).await;
    world.flow().await;
    assert_eq!(heard(&world, client, 5), ["hello", "7", "ready", "4", "5", "6", "ok b"]);
    let replayed = world.clients[client].heard_of("event").filter(|event| event["replay"] == true);
    assert_eq!(replayed.count(), 6, "what does not move the cursor says so");
}

// since_lost

#[tokio::test(start_paused = true)]
async fn a_held_channel_is_asked_again_from_the_cursor_at_the_loss() {
    let mut world = small_world().await;
    let client = world.add_client(Wire::Ws, &["a"]);
    world.bring(client, 0).await;
    world.subscribe(client, "b", None);
    world.flow().await;
    world.clients[client].cut();
    world.publish("b").await;
    world.publish("a").await;
    let from = n_heard(&world, client);
    world.bring(client, 1).await;
    world.flow().await;
    // The replay of `a` moved the cursor over the event of `b` before it could be asked for.
    assert_eq!(heard(&world, client, from), ["hello", "2", "ready", "1", "ok b"]);
}

// barrier

#[tokio::test(start_paused = true)]
async fn a_later_subscribe_is_answered_once_the_link_has_come_as_far_as_its_replay() {
    let mut world = small_world().await;
    let client = world.add_client(Wire::Ws, &["a"]);
    let keeper = world.add_client(Wire::Ws, &["b"]);
    world.bring(client, 0).await;
    world.bring(keeper, 0).await;
    let since = world.clients[client].cursor().map(str::to_owned);
    let from = n_heard(&world, client);
    world.nodes[0].line().hold();
    world.publish("a").await;
    world.publish("b").await;
    world.subscribe(client, "b", since.as_deref());
    world.flow().await;
    assert_eq!(heard(&world, client, from), [""; 0]);
    world.nodes[0].line().flow();
    world.flow().await;
    assert_eq!(heard(&world, client, from), ["1", "2", "ok b"]);
    let ok = world.clients[client].heard_of("ok").next().unwrap();
    assert_eq!(id_of(ok), world.position().await);
    world.conclude().await.unwrap();
}

// tag

#[tokio::test(start_paused = true)]
async fn a_cursor_of_another_log_is_recognised_whatever_its_numbers() {
    let mut world = small_world().await;
    let client = world.add_client(Wire::Ws, &["a"]);
    world.bring(client, 0).await;
    world.publish("a").await;
    world.flow().await;
    world.clients[client].cut();
    world.flush().await;
    // The new log passes the old cursor by before anybody asks with it.
    pass(Duration::from_secs(1)).await;
    world.publish("a").await;
    let from = n_heard(&world, client);
    world.bring(client, 0).await;
    assert_eq!(heard(&world, client, from), ["hello", "gap a reset", "ready"]);
    let ready = world.clients[client].heard_of("ready").last().unwrap();
    assert_eq!(ready["resume"], "gap");
    world.conclude().await.unwrap();
}

// torn

#[tokio::test(start_paused = true)]
async fn after_a_torn_restart_every_older_position_has_a_gap_and_after_a_clean_one_none() {
    for (restart, told) in [(Restart::Torn, &["gap a reset", "ready", "2"][..]), (Restart::Clean, &["2"])] {
        let mut world = small_world().await;
        let (open, away) = (world.add_client(Wire::Ws, &["a"]), world.add_client(Wire::Ws, &["a"]));
        world.bring(open, 0).await;
        world.bring(away, 0).await;
        world.publish("a").await;
        world.flow().await;
        world.clients[away].cut();
        let from = n_heard(&world, open);
        world.restart(restart).await;
        world.flow().await;
        world.publish("a").await;
        world.flow().await;
        assert_eq!(heard(&world, open, from), told, "{restart:?}");
        let from = n_heard(&world, away);
        world.bring(away, 1).await;
        let resumed: &[&str] = match restart {
            Restart::Torn => &["hello", "gap a reset", "ready"],
            Restart::Clean => &["hello", "2", "ready"],
        };
        assert_eq!(heard(&world, away, from), resumed, "{restart:?}");
        world.conclude().await.unwrap();
    }
}

#[tokio::test(start_paused = true)]
async fn a_quiet_session_is_told_its_position_before_its_cursor_ages_also_over_a_clean_restart() {
    let mut world = small_world().await;
    let client = world.add_client(Wire::Ws, &["a"]);
    world.bring(client, 0).await;
    world.restart(Restart::Clean).await;
    world.flow().await;
    let position = world.position().await;
    pass(Duration::from_secs(151)).await;
    world.flow().await;
    let said = world.clients[client].heard_of("position").last().map(id_of);
    assert!(said >= Some(position), "{said:?} < {position}");
}

// slack, expid

#[tokio::test(start_paused = true)]
async fn a_stream_outlives_its_ttl_by_five_minutes_counted_from_its_last_id() {
    let ttl = WorldConfig::new(1).history.history_ttl;
    let kept = ttl + Duration::from_secs(300);
    for (age, told) in
        [(kept - Duration::from_millis(1), &["hello", "1", "2", "ready"][..]), (kept, &["hello", "ready"])]
    {
        let mut world = small_world().await;
        let client = world.add_client(Wire::Ws, &["a"]);
        world.publish("a").await;
        pass(ttl).await;
        world.publish("a").await;
        pass(age).await;
        world.clients[client].set_cursor(Some("0"));
        // A read that executes at once: the clock stands still until then.
        world.connect(client, 0);
        while !world.clients[client].is_ready() {
            tokio::task::yield_now().await;
            world.receive(client).unwrap();
        }
        assert_eq!(heard(&world, client, 0), told, "{age:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_gap_is_told_by_the_ttl_alone() {
    let ttl = WorldConfig::new(1).history.history_ttl;
    for (age, told) in [
        (ttl, &["hello", "1", "ready"][..]),
        (ttl + Duration::from_millis(1), &["hello", "gap a expired", "1", "ready"]),
    ] {
        let mut world = small_world().await;
        let client = world.add_client(Wire::Ws, &["a"]);
        let position = world.position().await;
        world.clients[client].set_cursor(Some(&position.to_string()));
        // The first event held lies so long behind the cursor.
        pass(Duration::from_millis(position.ms) + age - world.unix()).await;
        world.publish("a").await;
        world.bring(client, 0).await;
        assert_eq!(heard(&world, client, 0), told, "{age:?}");
    }
}

// again, latest

#[tokio::test(start_paused = true)]
async fn after_a_reset_an_open_session_gets_its_gaps_and_ready_again_and_its_cursor_goes_down() {
    for wire in [Wire::Ws, Wire::Sse] {
        let mut world = small_world().await;
        let client = world.add_client(wire, &["a", "b"]);
        world.bring(client, 0).await;
        // All in one millisecond, so that the new log's ids are lower than those of the old.
        for _ in 0..3 {
            world.publish("a").await;
        }
        world.flush().await;
        let born = world.position().await;
        world.publish("b").await;
        let from = n_heard(&world, client);
        world.flow().await;
        assert_eq!(heard(&world, client, from), ["1", "2", "3", "gap a reset", "gap b reset", "ready"]);
        assert!(
            ready_ids(&world, client)[1] > born && ready_ids(&world, client)[1].incarnation() == born.incarnation()
        );
        assert_eq!(world.clients[client].cursor(), Some(&*ready_ids(&world, client)[1].to_string()));
        world.clients[client].cut();
        world.publish("a").await;
        world.bring(client, 1).await;
        assert_eq!(heard(&world, client, from + 6), ["hello", "5", "ready"], "and it is as good as any");
        world.conclude().await.unwrap();
    }
}

#[tokio::test(start_paused = true)]
async fn after_a_reset_events_are_delivered_although_their_ids_are_lower_than_those_before() {
    let mut world = small_world().await;
    let client = world.add_client(Wire::Ws, &["a"]);
    world.bring(client, 0).await;
    // The clock stands still as long as there is anything to do.
    for _ in 0..10 {
        world.publish("a").await;
    }
    turns().await;
    world.flush().await;
    world.publish("a").await;
    turns().await;
    world.publish("a").await;
    turns().await;
    take_some(&mut world, client, usize::MAX);
    let ids: Vec<EventId> = world.clients[client].heard_of("event").map(id_of).collect();
    assert!(ids[10] < ids[9] && ids[10].ms == ids[9].ms);
    assert_eq!(heard(&world, client, 12), ["gap a reset", "ready", "12"]);
    assert_eq!(world.clients[client].cursor(), Some(&*ids[10].to_string()));
}

// agree

#[tokio::test(start_paused = true)]
async fn a_read_of_another_log_than_the_links_does_not_count() {
    let mut world = small_world().await;
    let (open, newcomer) = (world.add_client(Wire::Ws, &["a"]), world.add_client(Wire::Ws, &["a"]));
    world.bring(open, 0).await;
    world.nodes[0].line().hold();
    world.flush().await;
    world.connect(newcomer, 0);
    world.flow().await;
    assert!(!world.clients[newcomer].is_ready(), "the link still speaks of the old log");
    world.publish("a").await;
    world.nodes[0].line().flow();
    world.flow().await;
    assert!(world.clients[newcomer].is_ready());
    assert_eq!(heard(&world, open, 2), ["gap a reset", "ready"]);
    world.conclude().await.unwrap();
}

// inflight

#[tokio::test(start_paused = true)]
async fn a_session_whose_read_was_under_way_when_the_link_broke_is_told_of_what_it_missed() {
    let mut world = small_world().await;
    let client = world.add_client(Wire::Ws, &["a"]);
    world.bring(client, 0).await;
    world.clients[client].cut();
    world.publish("a").await;
    let held = world.nodes[0].faults.hold(Call::Read);
    world.connect(client, 0);
    held.arrived(1).await;
    world.nodes[0].memory().cut_link();
    for _ in 0..6 {
        world.publish("a").await;
    }
    world.nodes[0].memory().restore_link();
    let from = n_heard(&world, client);
    // The repair is through before the first answer is: that one is of a time gone by.
    held.arrived(2).await;
    held.release();
    world.flow().await;
    assert_eq!(heard(&world, client, from), ["hello", "gap a evicted", "4", "5", "6", "7", "ready"]);
}

// birth

#[tokio::test(start_paused = true)]
async fn an_empty_log_has_a_position_that_is_good_to_resume_from() {
    let mut world = small_world().await;
    let client = world.add_client(Wire::Ws, &["a"]);
    world.bring(client, 0).await;
    assert_eq!(ready_ids(&world, client), [world.position().await]);
    world.clients[client].cut();
    world.publish("a").await;
    world.bring(client, 1).await;
    assert_eq!(heard(&world, client, 2), ["hello", "1", "ready"]);
}

// Positions.

#[tokio::test(start_paused = true)]
async fn an_answer_in_the_midst_of_a_replay_claims_only_what_was_replayed() {
    let mut world = world_of_pages().await;
    let client = world.add_client(Wire::Ws, &["a"]);
    world.bring(client, 0).await;
    world.clients[client].cut();
    for _ in 0..6 {
        world.publish_with("a", None, PAGE_PAD).await;
    }
    world.connect(client, 0);
    while n_heard(&world, client) < 4 {
        world.settle().await;
        take_some(&mut world, client, 1);
    }
    world.clients[client].authenticate();
    while world.clients[client].heard_of("ok").next().is_none() {
        world.settle().await;
        take_some(&mut world, client, 1);
    }
    // The judge has compared the `id` of `ok`; and cut here, the client misses nothing.
    assert!(!world.clients[client].is_ready());
    world.clients[client].cut();
    world.bring(client, 1).await;
    assert_eq!(world.clients[client].judge().n_seen(), 6);
}
