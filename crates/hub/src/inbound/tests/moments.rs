//! What is said together with a position or of a channel that goes is true in the moment in which it is
//! queued, whatever is delivered meanwhile on another thread.

use std::thread;

use crate::cursor::EventId;
use crate::event::{Event, Run};
use crate::message::Unsubscribed;
use crate::session::{Offer, Route, SubStage};

use super::*;

const N_ROUNDS: usize = 300;

/// Offers events of `a` and of `b` in turns, ids rising by one millisecond, until told to stop.
fn deliver(node: &Node, open: &Open, stop: &AtomicBool) {
    let session = open.session();
    let start = session.lock().position;
    let how = Offer { cap: node.hub.config.session.outbox_bytes, now: Instant::now(), route: Route::Driver };
    let mut ids = (1..).map(|i| EventId { ms: start.ms + 1_000_000_000 + i, n: start.n });
    while !stop.load(Ordering::SeqCst) {
        // Made before, so that they come as fast as they can.
        let runs: Vec<(usize, Run)> = (0..64)
            .map(|i| {
                let sub = i % 2;
                let channel = Channel::new(["a", "b"][sub]).unwrap();
                let run = Run::new(vec![Event { channel, id: ids.next(), name: None, data: "1".into() }]);
                run.on(open.session().info.wire);
                (sub, run)
            })
            .collect();
        for (sub, run) in &runs {
            session.offer(run, *sub, &how);
        }
        while session.is_overfull(32_000) && !stop.load(Ordering::SeqCst) {
            thread::yield_now();
        }
    }
}

/// What the client makes of what it is told.
#[derive(Default)]
struct Client {
    cursor: u64,
    /// It has had an event of `b` and has not been told since that `b` is gone: it misses none.
    hears_b: bool,
}

impl Client {
    fn is_told(&mut self, m: &Value) {
        let id = m["id"].as_str().map(|id| id.split_once('-').unwrap().0.parse::<u64>().unwrap());
        match m["type"].as_str().unwrap() {
            "event" => {
                let id = id.unwrap();
                assert!(id > self.cursor, "{m} after {}", self.cursor);
                assert!(!self.hears_b || id == self.cursor + 1, "{m} after {}: one of b is lost", self.cursor);
                self.hears_b |= m["channel"] == "b";
            }
            "ok" => assert!(id.unwrap() >= self.cursor, "{m} after {}", self.cursor),
            _ => {}
        }
        if m["channel"] == "b" && m["type"] != "event" {
            self.hears_b = false;
        }
        self.cursor = id.unwrap_or(0).max(self.cursor);
    }
}

/// Has `act` done over and over while events are delivered, each time until it is answered; `b` is there anew
/// each time.
async fn amid_events(answer: &str, act: impl Fn(&Node, &Open)) {
    let change = |config: &mut crate::hub::HubConfig| {
        (config.session.client_rate, config.session.client_burst) = (1e6, 1e6);
    };
    let node = Testing::new(0).node_like("n", change).await;
    let identity = node.hub.verifier.verify(&token(&json!({"channels": ["a"]})), BEGINNING).unwrap();
    let open = node.open_as((*identity).clone(), &["a"]);
    open.session().until(|state| state.resumed.is_some()).await;
    said(&open);
    let (stop, b) = (Arc::new(AtomicBool::new(false)), Channel::new("b").unwrap());
    let (node, open) = (Arc::new(node), Arc::new(open));
    let deliverer = thread::spawn({
        let (node, open, stop) = (node.clone(), open.clone(), stop.clone());
        move || deliver(&node, &open, &stop)
    });
    let mut client = Client::default();
    for _ in 0..N_ROUNDS {
        node.hub.join_channel(open.session(), &b, SubStage::Live);
        // There is something to be lost.
        let mut heard = Vec::new();
        while !heard.iter().any(|m: &Value| m["channel"] == "b") {
            heard.extend(said(&open));
            thread::yield_now();
        }
        act(&node, &open);
        let mut rest = heard.len();
        loop {
            heard.extend(said(&open));
            if words(&heard[rest..]).iter().any(|said| said.starts_with(answer)) {
                break;
            }
            rest = heard.len();
            tokio::task::yield_now().await;
        }
        heard.iter().for_each(|m| client.is_told(m));
    }
    stop.store(true, Ordering::SeqCst);
    deliverer.join().unwrap();
    assert_eq!(open.session().ending(), None);
}

#[tokio::test]
async fn no_answer_of_a_channel_that_is_held_already_carries_an_id_below_an_event_before_it() {
    amid_events("ok 1 a", |_, open| say(open, &json!({"type": "subscribe", "ref": 1, "channel": "a"}))).await;
}

#[tokio::test]
async fn no_answer_to_a_new_token_carries_an_id_below_an_event_before_it() {
    amid_events("ok auth", |_, open| auth(open, &json!({"channels": ["a", "b"]}))).await;
}

#[tokio::test]
async fn who_leaves_a_channel_has_all_of_it_that_its_cursor_has_passed_until_it_is_told() {
    amid_events("ok 1 b", |_, open| say(open, &json!({"type": "unsubscribe", "ref": 1, "channel": "b"}))).await;
}

#[tokio::test]
async fn whose_channel_is_taken_away_has_all_of_it_that_its_cursor_has_passed_until_it_is_told() {
    amid_events("unsubscribed b", |node, open| withdraw(&node.hub, open.session(), Unsubscribed::Grant)).await;
    let b = Channel::new("b").unwrap();
    amid_events("unsubscribed b", |node, open| assert_eq!(unsubscribe(&node.hub, open.session(), &b), Had::It)).await;
}
