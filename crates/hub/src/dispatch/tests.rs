use std::sync::Weak;

use tokio::time::advance;

use crate::auth::Identity;
use crate::channel::{Grants, Pattern};
use crate::close::CloseReason;
use crate::event::Wire;
use crate::fanout::LINGER;
use crate::hub::Open;
use crate::outbox::Item;
use crate::plugin::Plugins;
use crate::refusal::RefusalCode;
use crate::testing::{Kernel, Testing, config, identity, items, settle, until};

use super::*;

#[tokio::test(start_paused = true)]
async fn a_thousand_who_wait_share_one_encoding_a_wire_and_the_last_to_read_frees_it() {
    let large = |config: &mut crate::hub::HubConfig| config.max_message = 64 * 1024;
    let node = Testing::new(0).node_like("n", large).await;
    let wires = [Wire::Ws, Wire::Sse];
    let crowd: Vec<Open> = (0..1_000).map(|i| node.open_on(wires[i % 2], identity(None), &["news"])).collect();
    settle().await;
    for open in &crowd {
        items(open);
    }
    node.publish("news", &format!("\"{}\"", "x".repeat(60_000))).await;
    settle().await;
    let (mut event, mut bytes) = (Weak::new(), [None; 2]);
    for (i, open) in crowd.iter().enumerate() {
        let waiting = items(open);
        let [Item::Event(encoded)] = &waiting[..] else { panic!("{} items wait", waiting.len()) };
        assert!(event.ptr_eq(&Arc::downgrade(encoded)) || i == 0, "an event of its own");
        event = Arc::downgrade(encoded);
        let at = encoded.on(wires[i % 2]).as_ptr();
        assert_eq!(*bytes[i % 2].get_or_insert(at), at, "bytes of its own");
        assert!(i + 1 == crowd.len() || event.strong_count() > 1);
    }
    assert_eq!(event.strong_count(), 0, "all have read it");
}

#[tokio::test(start_paused = true)]
async fn a_large_fan_out_gives_others_their_turns_and_a_newcomer_is_live_before_its_end() {
    const CROWD: usize = 5_000;
    const EVENTS: usize = 20;
    let node = Testing::new(0).node("n").await;
    let crowd: Vec<Open> = (0..CROWD).map(|_| node.open_as(identity(None), &["large"])).collect();
    let _somebody = node.open_as(identity(None), &["small"]);
    settle().await;
    let waits = |open: &Open| open.session().lock().outbox.bytes();
    let last = crowd.last().unwrap();
    items(last);
    node.publish("large", "1").await;
    settle().await;
    let size = waits(last);
    assert!(size > 0);
    items(last);

    for _ in 0..EVENTS {
        node.publish("large", "1").await;
    }
    let newcomer = node.open_as(identity(None), &["small"]);
    let (mut n_turns, mut seen) = (0, None);
    while waits(last) < EVENTS * size {
        tokio::task::yield_now().await;
        n_turns += 1;
        if seen.is_none() && newcomer.session().lock().stage == Stage::Live {
            seen = Some(waits(last) / size);
        }
    }
    // One thread: each turn of ours is one that the dispatcher gave away.
    assert!(n_turns >= (EVENTS - 2) * CROWD / spread::CHUNK, "{n_turns} turns");
    assert!(seen.is_some_and(|n_events| n_events < EVENTS / 2), "live after {seen:?} of {EVENTS} events");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn drivers_write_where_the_link_is_far_behind_and_there_are_threads_for_it() {
    let node = Testing::new(0).node("n").await;
    let route = |n_waiting| spread::route(&node.hub, &waiting(n_waiting));
    assert_eq!([0, HALF].map(route), [Route::AtOnce; 2]);
    assert_eq!(route(HALF + 1), Route::Driver);
}

const HALF: usize = 8;

/// A link on which so many wait.
fn waiting(n: usize) -> mpsc::Receiver<FromLink> {
    let (tell, link) = mpsc::channel(2 * HALF);
    (0..n).for_each(|_| tell.try_send(FromLink::FleetChanged).unwrap());
    link
}

#[tokio::test(start_paused = true)]
async fn a_burst_over_many_small_channels_lets_others_in_between() {
    const CHANNELS: usize = 10 * spread::CHUNK;
    let node = Testing::new(0).node("n").await;
    let names: Vec<String> = (0..CHANNELS).map(|i| format!("c{i}")).collect();
    let crowd: Vec<Open> = names.iter().map(|name| node.open_as(identity(None), &[name])).collect();
    settle().await;
    crowd.iter().for_each(|open| drop(items(open)));
    let (tell, link) = mpsc::channel(CHANNELS);
    for name in &names {
        let event = Event { channel: Channel::new(name).unwrap(), id: None, name: None, data: "1".into() };
        tell.try_send(FromLink::Event(event)).unwrap();
    }
    tokio::spawn(run(node.hub.clone(), link));
    let (mut n_reached, mut longest) = (0, 0);
    while n_reached < CHANNELS {
        tokio::task::yield_now().await;
        let n_now = crowd.iter().take_while(|open| open.session().lock().outbox.bytes() > 0).count();
        longest = longest.max(n_now - n_reached);
        n_reached = n_now;
    }
    assert!(longest < 2 * spread::CHUNK, "{longest} between two of our turns");
}

#[tokio::test(start_paused = true)]
async fn a_link_that_always_has_something_keeps_no_channel_that_nobody_listens_on() {
    let testing = Testing::new(0);
    let (node, open) = (testing.still(config("n", 100), Plugins::new()), testing.node("other").await.open("u"));
    let [heard, awaited] = ["heard", "awaited"].map(|name| Channel::new(name).unwrap());
    for channel in [&heard, &awaited] {
        let (slot, _) = node.hub.channels.listen(channel, Listener::new(open.session().clone(), 0));
        node.hub.channels.unlisten(channel, slot);
    }
    node.hub.channels.confirm(&heard);
    let (tell, link) = mpsc::channel(4 * HALF);
    tokio::spawn(run(node.hub.clone(), link));
    for _ in 0..2 * LINGER.as_secs() {
        // Something is there whenever it is due.
        while tell.try_send(FromLink::Beacon(EventId::ZERO)).is_ok() {}
        advance(SWEEP).await;
        while tell.capacity() < tell.max_capacity() {
            tokio::task::yield_now().await;
        }
    }
    assert_eq!(node.hub.channels.sweep(Instant::now(), Which::All), 1, "only the one that is not confirmed yet");
}

#[tokio::test(start_paused = true)]
async fn the_only_worker_writes_itself_however_much_waits() {
    let node = Testing::new(0).node("n").await;
    assert_eq!(spread::route(&node.hub, &waiting(2 * HALF)), Route::AtOnce);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_crowd_that_all_workers_write_to_has_everything_once_and_in_order() {
    const CROWD: usize = 40 * spread::CHUNK + 1;
    const EVENTS: usize = 60;
    let node = Testing::new(0).node("n").await;
    let wires = [Wire::Ws, Wire::Sse];
    let crowd: Vec<Open> = (0..CROWD).map(|i| node.open_on(wires[i % 2], identity(None), &["news"])).collect();
    until("all are live", || crowd.iter().all(|open| open.session().lock().stage == Stage::Live)).await;
    let lend = |open: &Open| {
        items(open);
        let kernel = Arc::new(Kernel::default());
        kernel.make_room(usize::MAX);
        open.lend(kernel.clone());
        kernel
    };
    let kernels: Vec<Arc<Kernel>> = crowd.iter().map(lend).collect();
    let mut ids = Vec::new();
    for n in 0..EVENTS {
        ids.push(node.publish("news", &n.to_string()).await);
    }
    until("all was dispatched", || node.hub.place.position() >= ids[EVENTS - 1]).await;
    for (i, kernel) in kernels.iter().enumerate() {
        let text = String::from_utf8_lossy(&kernel.taken()).into_owned();
        let seen: Vec<usize> =
            text.split("\"data\":").skip(1).map(|rest| rest[..rest.find('}').unwrap()].parse().unwrap()).collect();
        assert_eq!(seen, (0..EVENTS).collect::<Vec<_>>(), "session {i}");
        assert_eq!(crowd[i].session().lock().outbox.bytes(), 0);
    }
}

#[tokio::test(start_paused = true)]
async fn an_outbox_that_is_full_ends_its_session_and_no_other_of_the_same_event() {
    let node = Testing::new(0).node_like("n", |config| config.session.outbox_bytes = 3_000).await;
    let crowd: Vec<Open> = (0..600).map(|_| node.open_as(identity(None), &["news"])).collect();
    settle().await;
    for open in &crowd {
        items(open);
    }
    for _ in 0..5 {
        node.publish("news", &format!("\"{}\"", "x".repeat(900))).await;
        settle().await;
        // Every seventh does not read.
        for open in crowd.iter().enumerate().filter(|(i, _)| i % 7 != 0).map(|(_, open)| open) {
            assert_eq!(items(open).len(), 1);
        }
    }
    for (i, open) in crowd.iter().enumerate() {
        assert_eq!(open.session().ending(), (i % 7 == 0).then_some(CloseReason::Slow), "{i}");
    }
}

#[tokio::test]
async fn a_node_whose_dispatcher_panicked_says_that_it_cannot_go_on() {
    let node = Testing::new(0).node("n").await;
    let open = node.open_as(identity(None), &["news"]);
    until("it is live", || open.session().lock().stage == Stage::Live).await;
    let session = open.session().clone();
    // Whoever comes to its state from now on panics, as after any panic under its lock.
    let poisoned = std::thread::spawn(move || {
        let _state = session.lock();
        panic!("on purpose");
    });
    assert!(poisoned.join().is_err());
    node.publish("news", "1").await;
    tokio::time::timeout(Duration::from_secs(20), node.hub.broken()).await.expect("it says so");
    // Its end would panic as well.
    std::mem::forget(open);
}

#[tokio::test(start_paused = true)]
async fn a_node_whose_link_is_gone_for_good_says_that_it_cannot_go_on_and_one_that_stops_does_not() {
    let testing = Testing::new(0);
    let still = testing.still(config("n", 100), Plugins::new());
    let (tell, link) = mpsc::channel(1);
    still.hub.vital("dispatcher", run(still.hub.clone(), link));
    settle().await;
    drop(tell);
    tokio::time::timeout(Duration::from_secs(20), still.hub.broken()).await.expect("it says so");

    let stops = testing.node("stops").await;
    stops.hub.shut_down().await;
    tokio::time::timeout(Duration::from_secs(20), stops.hub.broken()).await.expect_err("nothing is broken");
}

#[test]
fn no_more_names_are_looked_at_than_it_takes_to_refuse_them() {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
    let _inside = runtime.enter();
    let node = Testing::new(0).still(config("n", 100), Plugins::new());
    let grants = Grants { joined: Vec::new(), askable: vec![Pattern::new("room:*").unwrap()] };
    let anybody = Identity { grants, ..identity(None) };
    let rooms = |n: usize| (0..n).map(|i| format!("room:{i}")).collect::<Vec<_>>();
    let most = node.hub.config.max_channels;
    let asked = |names: &[String]| node.hub.channels_for(&anybody, names).map(|all| all.len()).map_err(|no| no.code);
    assert_eq!(asked(&rooms(most)), Ok(most));
    assert_eq!(asked(&[rooms(most), rooms(most)].concat()), Ok(most), "twice is once");
    assert_eq!(asked(&[rooms(most), vec!["other".into()]].concat()), Err(RefusalCode::Forbidden));
    assert_eq!(asked(&[rooms(most + 1), vec!["other".into()]].concat()), Err(RefusalCode::TooManyChannels));
}
