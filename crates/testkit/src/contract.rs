//! What every backplane must do, as a suite that runs over a factory of fleets of two nodes on one
//! log. Decides what the trait's sentences mean where they could be read in two ways.
//!
//! A check that must see time pass waits until the log itself says that it has.

mod fleet;
mod link;
mod log;

use std::any::Any;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures_util::FutureExt;
use futures_util::future::BoxFuture;
use hub::backplane::{Backplane, From, FromLink, Publish, Published, Read, ReadAsk};
use hub::channel::Channel;
use hub::cursor::EventId;
use hub::event::Event;
use tokio::sync::mpsc;

/// Longest that one check may take. Far above what any needs, so that a busy machine does not fail it.
const CHECK_TIMEOUT: Duration = Duration::from_secs(30);

/// What a check asks of its fleet.
#[derive(Clone, Copy, Debug)]
pub struct Setup {
    /// Events kept a channel; 0 is no history.
    pub history_size: usize,
    /// How long they are kept.
    pub history_ttl: Duration,
    /// How long a key is remembered.
    pub idempotency_ttl: Duration,
}

impl Setup {
    /// The gateway's own defaults.
    pub const USUAL: Setup = Setup {
        history_size: 1000,
        history_ttl: Duration::from_secs(24 * 3600),
        idempotency_ttl: Duration::from_secs(300),
    };
}

/// Two nodes on one log that nobody else uses.
pub struct Pair {
    /// Named `a` and `b`. Their links have not been taken; dropped by the suite, a node is gone.
    pub nodes: [Arc<dyn Backplane>; 2],
    /// A further node, again with the name `b`, as after a restart of its process.
    pub again: Box<dyn Fn() -> Arc<dyn Backplane> + Send + Sync>,
    /// Forgets everything in the log under the open links, as `FLUSHALL` does.
    pub flush: Box<dyn Fn() -> BoxFuture<'static, ()> + Send + Sync>,
    /// Whatever must outlive the check (a server, say).
    pub keep: Box<dyn Any + Send>,
}

/// Makes fleets of two for the suite.
pub trait Bench: Send + Sync {
    /// A new pair on a new, empty log.
    fn open(&self, setup: Setup) -> BoxFuture<'_, Pair>;
}

type Check = (&'static str, for<'a> fn(&'a dyn Bench) -> BoxFuture<'a, ()>);

/// Names functions `async fn(&dyn Bench)` once.
macro_rules! checks {
    ($($name:ident),* $(,)?) => {
        &[$((stringify!($name), |bench| Box::pin($name(bench)))),*]
    };
}
use checks;

/// Every check's name, in the order in which `suite` runs them.
pub fn names() -> Vec<&'static str> {
    all().map(|(name, _)| *name).collect()
}

/// Runs every check, each on a pair of its own.
///
/// # Panics
/// At the end, with the names of those that failed or took longer than 30 s.
pub async fn suite(bench: &dyn Bench) {
    let mut failed = Vec::new();
    for (name, check) in all() {
        let run = AssertUnwindSafe(tokio::time::timeout(CHECK_TIMEOUT, check(bench))).catch_unwind();
        match run.await {
            Ok(Ok(())) => eprintln!("contract: {name} ... ok"),
            Ok(Err(_)) => failed.push(format!("{name} (no end within {CHECK_TIMEOUT:?})")),
            Err(_) => failed.push(name.to_string()),
        }
    }
    assert!(failed.is_empty(), "the backplane breaks its contract:\n  {}", failed.join("\n  "));
}

fn all() -> impl Iterator<Item = &'static Check> {
    log::CHECKS.iter().chain(link::CHECKS).chain(fleet::CHECKS)
}

// What the checks share.

/// Both nodes with their links up.
struct Fleet {
    a: Hearing,
    b: Hearing,
    again: Box<dyn Fn() -> Arc<dyn Backplane> + Send + Sync>,
    flush: Box<dyn Fn() -> BoxFuture<'static, ()> + Send + Sync>,
    _keep: Box<dyn Any + Send>,
}

impl Fleet {
    async fn open(bench: &dyn Bench, setup: Setup) -> Self {
        let Pair { nodes: [a, b], again, flush, keep } = bench.open(setup).await;
        Self { a: Hearing::up("a", a).await, b: Hearing::up("b", b).await, again, flush, _keep: keep }
    }
}

/// A node and what its link says.
struct Hearing {
    name: &'static str,
    node: Arc<dyn Backplane>,
    link: mpsc::Receiver<FromLink>,
}

impl Hearing {
    async fn up(name: &'static str, node: Arc<dyn Backplane>) -> Self {
        let link = node.link();
        let mut hearing = Self { name, node, link };
        hearing.until_up().await;
        hearing
    }

    async fn next(&mut self) -> FromLink {
        self.link.recv().await.unwrap_or_else(|| panic!("node {}: the link ended", self.name))
    }

    /// Passes over beacons (a node may send some for itself); anything else but `Up` fails.
    async fn until_up(&mut self) -> EventId {
        loop {
            match self.next().await {
                FromLink::Up(position) => return position,
                FromLink::Beacon(_) => {}
                other => panic!("node {}: {other:?} before the link is up", self.name),
            }
        }
    }

    async fn want(&mut self, channel: &Channel) {
        self.node.want(channel);
        loop {
            match self.next().await {
                FromLink::Confirmed(confirmed) if confirmed == *channel => return,
                FromLink::Confirmed(_) | FromLink::Beacon(_) => {}
                other => panic!("node {}: {other:?} before {channel} is confirmed", self.name),
            }
        }
    }

    /// Takes what the link holds by now: confirmations and beacons.
    fn hear_what_waits(&mut self) {
        while let Ok(message) = self.link.try_recv() {
            assert!(
                matches!(message, FromLink::Confirmed(_) | FromLink::Beacon(_)),
                "node {}: {message:?} before anything was published",
                self.name
            );
        }
    }

    /// Every event that the link brings before the node's beacon tells that all up to `position`
    /// have passed.
    async fn events_until(&mut self, position: EventId) -> Vec<Event> {
        let mut events = Vec::new();
        self.node.beacon();
        loop {
            match self.next().await {
                FromLink::Event(event) => events.push(event),
                FromLink::Beacon(passed) if passed >= position => return events,
                // Its answer may be older than the position: it was asked for by somebody else.
                FromLink::Beacon(_) => self.node.beacon(),
                FromLink::Confirmed(_) => {}
                other => panic!("node {}: {other:?} instead of events", self.name),
            }
        }
    }

    async fn publish(&self, event: Publish) -> Published {
        self.node.publish(event).await.unwrap_or_else(|e| panic!("node {}: {e}", self.name))
    }

    /// Publishes a small logged event and gives its id.
    async fn log(&self, to: &Channel) -> EventId {
        self.publish(event(to, "1")).await.id.expect("a logged event has an id")
    }

    async fn read(&self, ask: ReadAsk) -> Read {
        let n_asked = ask.channels.len();
        let read = self.node.read(ask).await.unwrap_or_else(|e| panic!("node {}: {e}", self.name));
        assert_eq!(read.facts.len(), n_asked, "one fact a channel");
        assert!(ids(&read.events).is_sorted_by(|x, y| x < y), "ids of a read rise strictly");
        assert!(read.events.iter().all(|e| e.id.is_some_and(|id| id <= read.position)), "nothing above the position");
        read
    }

    async fn position(&self) -> EventId {
        self.read(ask(&[])).await.position
    }
}

fn channel(name: &str) -> Channel {
    Channel::new(name).expect("a channel of the suite")
}

fn event(to: &Channel, data: impl Into<Bytes>) -> Publish {
    Publish { channel: to.clone(), name: None, data: data.into(), ephemeral: false, key: None }
}

fn ask(channels: &[(&Channel, From)]) -> ReadAsk {
    ReadAsk {
        channels: channels.iter().map(|(channel, from)| ((*channel).clone(), *from)).collect(),
        check: None,
        cap: 1000,
        page_events: 1000,
        page_bytes: 16 * 1024 * 1024,
    }
}

fn ids(events: &[Event]) -> Vec<EventId> {
    events.iter().filter_map(|e| e.id).collect()
}

/// Between two looks at something that only time changes.
async fn a_little() {
    tokio::time::sleep(Duration::from_millis(10)).await;
}
