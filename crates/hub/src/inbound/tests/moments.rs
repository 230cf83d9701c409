//! What is said together with a position or of a channel that goes is true in the moment in which it is
//! queued, whatever is delivered meanwhile on another thread.

use std::collections::VecDeque;
use std::sync::atomic::AtomicUsize;
use std::thread;

use crate::cursor::EventId;
use crate::event::{Event, Run, Wire};
use crate::message::Unsubscribed;
use crate::session::{Offer, Route, SubStage};
use crate::testing::items;

use super::*;

const N_ROUNDS: usize = 200;
/// Events that are made before each round, so that they come as fast as they can: from shortly before the
/// moment in question until some time after it.
const N_READY: usize = 200;

/// One test at a time: two threads that race need two processors.
static ALONE: tokio::sync::Mutex<()> = tokio::sync::Mutex::const_new(());

/// When events are delivered.
#[derive(Default)]
struct Gate {
    is_open: AtomicBool,
    /// All are made, and none is delivered any more.
    is_ready: AtomicBool,
    is_over: AtomicBool,
    n_delivered: AtomicUsize,
}

impl Gate {
    /// Opens it, if it is not; a few events are through then.
    fn open(&self) {
        let enough = self.n_delivered.load(Ordering::SeqCst) + 4;
        self.is_open.store(true, Ordering::SeqCst);
        while self.n_delivered.load(Ordering::SeqCst) < enough {
            thread::yield_now();
        }
    }
}

/// Opens it whenever it is asked, which is right before a new token changes what the session hears.
impl Plugin for Arc<Gate> {
    fn name(&self) -> &'static str {
        "gate"
    }

    fn may_subscribe(&self, _: &Identity, _: &Channel) -> Verdict {
        self.open();
        Verdict::Pass
    }
}

/// Has who delivers come to an end, whatever the test comes to.
struct Ends(Arc<Gate>);

impl Drop for Ends {
    fn drop(&mut self) {
        self.0.is_over.store(true, Ordering::SeqCst);
        self.0.is_open.store(false, Ordering::SeqCst);
    }
}

/// Offers events of `a` and of `b` in turns, ids rising by one millisecond, while the gate is open.
fn deliver(node: &Node, open: &Open, gate: &Gate) {
    let session = open.session();
    let start = session.lock().position;
    let how = Offer { cap: node.hub.config.session.outbox_bytes, now: Instant::now(), route: Route::Driver };
    let mut runs = (1..).map(|i| {
        let channel = Channel::new(["a", "b"][i % 2]).unwrap();
        let id = EventId { ms: start.ms + 1_000_000_000 + i as u64, n: start.n };
        let run = Run::new(vec![Event { channel, id: Some(id), name: None, data: "1".into() }]);
        run.on(Wire::Sse);
        (run, i % 2)
    });
    let mut made = VecDeque::new();
    while !gate.is_over.load(Ordering::SeqCst) {
        made.extend(runs.by_ref().take(N_READY - made.len()));
        gate.is_ready.store(true, Ordering::SeqCst);
        while !gate.is_open.load(Ordering::SeqCst) && !gate.is_over.load(Ordering::SeqCst) {
            thread::yield_now();
        }
        gate.is_ready.store(false, Ordering::SeqCst);
        while gate.is_open.load(Ordering::SeqCst) {
            match made.pop_front() {
                Some((run, sub)) => drop(session.offer(&run, sub, &how)),
                None => thread::yield_now(),
            }
            gate.n_delivered.fetch_add(1, Ordering::SeqCst);
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

/// What is said until something says this. Nothing is made of it yet: others are to have no time to come to rest.
async fn until_told(open: &Open, this: &str) -> Vec<String> {
    let mut told: Vec<String> = Vec::new();
    loop {
        tokio::task::yield_now().await;
        let before = told.len();
        told.extend(items(open).iter().map(|item| String::from_utf8(item.on(Wire::Sse).to_vec()).unwrap()));
        if told[before..].iter().any(|text| text.contains(this)) {
            return told;
        }
    }
}

fn data(line: &str) -> Option<Value> {
    Some(serde_json::from_str(line.strip_prefix("data: ")?).unwrap())
}

/// Has `act` done over and over, which opens the gate right before that of which something is said; `b` is
/// there anew each time.
async fn amid_events(answer: &str, act: impl Fn(&Node, &Open, &Gate)) {
    let _alone = ALONE.lock().await;
    let gate = Arc::new(Gate::default());
    let node = Arc::new(Testing::new(0).node_extended("n", Plugins::new().with(gate.clone())).await);
    let identity = node.hub.verifier.verify(&token(&json!({"channels": ["a"]})), BEGINNING).unwrap();
    let open = Arc::new(node.open_as((*identity).clone(), &["a"]));
    open.session().until(|state| state.resumed.is_some()).await;
    said(&open);
    let deliverer = thread::spawn({
        let (node, open, gate) = (node.clone(), open.clone(), gate.clone());
        move || deliver(&node, &open, &gate)
    });
    let ends = Ends(gate.clone());
    let (mut client, b) = (Client::default(), Channel::new("b").unwrap());
    for _ in 0..N_ROUNDS {
        while !gate.is_ready.load(Ordering::SeqCst) {
            thread::yield_now();
        }
        node.hub.join_channel(open.session(), &b, SubStage::Live);
        act(&node, &open, &gate);
        let heard = until_told(&open, "\nevent: ").await;
        gate.is_open.store(false, Ordering::SeqCst);
        let heard: Vec<Value> = heard.iter().flat_map(|text| text.lines()).filter_map(data).collect();
        assert!(words(&heard).iter().any(|said| said == answer), "{answer}");
        heard.iter().for_each(|m| client.is_told(m));
    }
    drop(ends);
    deliverer.join().unwrap();
    assert_eq!(open.session().ending(), None);
}

/// As the client says it, which may say as much as it likes here.
fn asked(node: &Node, open: &Open, channel: &str, wish: Wish) {
    asks::ask(&node.hub, open.session(), None, Channel::new(channel).unwrap(), wish, Instant::now());
}

#[tokio::test]
async fn no_answer_of_a_channel_that_is_held_already_carries_an_id_below_an_event_before_it() {
    let held = |node: &Node, open: &Open, gate: &Gate| {
        (0..8).for_each(|_| asked(node, open, "a", Wish::Join(Since::Now)));
        gate.open();
    };
    amid_events("ok a", held).await;
}

#[tokio::test]
async fn no_answer_to_a_new_token_carries_an_id_below_an_event_before_it() {
    let token = token(&json!({"channels": ["a", "b"]}));
    amid_events("ok", |node, open, _| super::super::token::auth(&node.hub, open.session(), None, &token)).await;
}

#[tokio::test]
async fn who_leaves_a_channel_has_all_of_it_that_its_cursor_has_passed_until_it_is_told() {
    let left = |node: &Node, open: &Open, gate: &Gate| {
        asked(node, open, "b", Wish::Leave);
        gate.open();
    };
    amid_events("ok b", left).await;
}

#[tokio::test]
async fn whose_channel_is_taken_away_has_all_of_it_that_its_cursor_has_passed_until_it_is_told() {
    amid_events("unsubscribed b grant", |node, open, _| withdraw(&node.hub, open.session(), Unsubscribed::Grant)).await;
    let b = Channel::new("b").unwrap();
    let taken = |node: &Node, open: &Open, gate: &Gate| {
        gate.open();
        assert_eq!(unsubscribe(&node.hub, open.session(), &b), Had::It);
    };
    amid_events("unsubscribed b admin", taken).await;
}
