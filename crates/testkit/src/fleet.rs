//! A fleet as large as real ones in one thread: tens of real hubs on one in-memory log, and tens of
//! thousands of light clients that come through a balancer, obey their `bye` and come back. Under
//! tokio's paused clock minutes take a second.
//!
//! `node` a hub and its door · `client` one client · `front` the balancer before them · `record`
//! what happened. Whole nodes from the accept loop on, and clients on pipes, are `world`'s: there
//! every byte counts, here every session does. The caller brings a current-thread runtime with a
//! paused clock. What is drawn follows from one seed; in which order a node goes through its
//! sessions does not, so figures differ a little from run to run.

mod client;
mod front;
mod node;
mod record;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use hub::auth::Identity;
use hub::backplane::{Backplane, Publish};
use hub::balance::BalanceConfig;
use hub::channel::{Channel, Grants};
use hub::clock::{Clock, Dice};
use hub::close::CloseReason;
use hub::departure::{DrainConfig, Window};
use hub::memory::{Memory, MemoryConfig, MemoryLog};
use hub::message::Backoff;
use hub::shed::ShedMode;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep_until};

use self::client::{Bells, Client, Listener, Taken};
use self::front::Front;
use self::node::Caller;
use crate::world::judge::{Truth, Violation};

pub use self::front::{Balancing, FrontConfig};
pub use self::node::{Kind, Node};
pub use self::record::{Close, Look, Record, Return, peak};

/// 2030-01-01 00:00 UTC: when every fleet begins.
const BEGINNING: Duration = Duration::from_secs(1_893_456_000);

/// Clients look so often whether they have something to do: as finely as the hub's own wheel turns.
const TICK: Duration = Duration::from_millis(100);
const TICKS_A_SECOND: u64 = 10;

/// Channels of numbered events, and the seconds from one of its events to the next. Of some so many
/// that whoever hears them is idle now and then: others are moved first.
const CHANNELS: [(&str, u64); 4] = [("north", 1), ("east", 37), ("south", 41), ("west", 43)];
/// One client in so many hears one of them.
const LISTENS: usize = 50;

/// How long everybody may need to have the newest event, in simulated time.
const PATIENCE: Duration = Duration::from_secs(120);

/// Sheds of one client closer together than this are one too many.
const MOVED_LATELY: Duration = Duration::from_secs(600);
/// A node that was below its share so lately should not give anybody away.
const BELOW_LATELY: Duration = Duration::from_secs(120);
const BELOW: f64 = 0.99;

/// What a fleet is made of.
#[derive(Clone, Copy, Debug)]
pub struct FleetConfig {
    /// All that is drawn follows from it.
    pub seed: u64,
    /// What stands before the nodes.
    pub front: FrontConfig,
    /// What a node is if nobody says otherwise.
    pub kind: Kind,
    /// Attempts that a node lets in.
    pub accept_per_second: f64,
    /// So many of them at once.
    pub accept_burst: u32,
    /// From when to when sessions are recycled; `None`: never.
    pub max_age: Option<(Duration, Duration)>,
    /// Whether sessions are moved.
    pub shed: ShedMode,
    /// How.
    pub balance: BalanceConfig,
    /// How a drain goes.
    pub drain: DrainConfig,
    /// Between two pings. Clients answer at once, so that less often than usual makes no difference.
    pub heartbeat: Duration,
}

impl FleetConfig {
    /// The defaults of a gateway, but that nobody is recycled.
    pub fn new(seed: u64, balancing: Balancing) -> Self {
        Self {
            seed,
            front: FrontConfig { balancing, joins_after: Duration::ZERO, leaves_after: Duration::from_secs(2) },
            kind: Kind { version: "1", capacity: 40_000 },
            accept_per_second: 100.0,
            accept_burst: 200,
            max_age: None,
            shed: ShedMode::On,
            balance: BalanceConfig {
                tolerance: 0.05,
                fraction: 0.025,
                interval: Duration::from_secs(5),
                report_every: Duration::from_secs(5),
            },
            drain: DrainConfig {
                grace: Duration::from_secs(5),
                window: Window::Auto,
                deadline: Duration::from_secs(120),
                takes_per_second: 50.0,
            },
            heartbeat: Duration::from_secs(600),
        }
    }
}

/// What listeners heard.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Heard {
    /// Listeners.
    pub n_listeners: usize,
    /// Of them those that were connected more than once.
    pub n_moved: usize,
    /// Events received by all of them, each once.
    pub n_events: usize,
    /// Events that one of them was away for, and received all the same.
    pub n_caught_up: usize,
    /// Gaps that they were told of.
    pub n_gaps: u64,
}

/// Nodes, clients, the log between them and the balancer before them.
pub struct Fleet {
    /// As it was made.
    pub config: FleetConfig,
    /// The shared log.
    pub log: Arc<MemoryLog>,
    /// All nodes there ever were.
    pub nodes: Vec<Node>,
    /// What happened.
    pub record: Record,
    /// The part of those told to go who come back at all.
    pub returning: f64,
    clock: Clock,
    dice: Dice,
    front: Front,
    clients: Vec<Client>,
    /// Those that hear something.
    listeners: Vec<usize>,
    n_missed: usize,
    /// Clients that are away, by the tick at which they come back.
    away: BTreeMap<u64, Vec<usize>>,
    n_gone: usize,
    bells: Bells,
    /// A node nobody connects to: back ends publish there.
    publisher: Arc<Memory>,
    truth: Truth,
    identity: Arc<Identity>,
    /// Nodes on their way out, by number.
    leaving: JoinSet<usize>,
    began_at: Instant,
    n_ticks: u64,
}

impl Fleet {
    /// No node and no client yet.
    ///
    /// # Panics
    /// Outside a tokio runtime.
    pub fn new(config: FleetConfig) -> Self {
        let (clock, dice) = (Clock::at(BEGINNING), Dice::seeded(config.seed));
        let ttl = Duration::from_secs(3600);
        let history = MemoryConfig { history_size: 10_000, history_ttl: ttl, idempotency_ttl: ttl };
        let log = MemoryLog::new(history, clock.clone(), dice.clone());
        Self {
            publisher: log.node("publisher"),
            log,
            nodes: Vec::new(),
            record: Record::default(),
            returning: 1.0,
            front: Front::new(config.front, dice.clone()),
            clients: Vec::new(),
            listeners: Vec::new(),
            n_missed: 0,
            away: BTreeMap::new(),
            n_gone: 0,
            bells: Bells::default(),
            truth: Truth::default(),
            identity: anybody(None),
            leaving: JoinSet::new(),
            began_at: Instant::now(),
            n_ticks: 0,
            clock,
            dice,
            config,
        }
    }

    /// Nodes with so many sessions each, that have been standing for two and a half minutes.
    pub async fn standing(config: FleetConfig, counts: &[usize]) -> Self {
        let mut fleet = Self::new(config);
        for n in counts {
            let node = fleet.add();
            fleet.fill(node, *n);
        }
        fleet.run(Duration::from_secs(150)).await;
        fleet
    }

    // ---- nodes

    /// One more node, serving at once; returns its number.
    pub fn add(&mut self) -> usize {
        self.add_like(self.config.kind)
    }

    /// As `add`, of another kind.
    pub fn add_like(&mut self, kind: Kind) -> usize {
        // All shares change: who holds too much now may not have before.
        self.nodes.iter_mut().for_each(|node| node.below_at = None);
        let name: Arc<str> = format!("node{}", self.nodes.len()).into();
        let memory = self.log.node(&name);
        self.nodes.push(Node::start(&self.config, kind, name, memory, &self.clock, &self.dice));
        self.nodes.len() - 1
    }

    /// The node drains as at SIGTERM, and its process ends when nobody is left.
    pub fn drain(&mut self, node: usize) {
        let hub = self.nodes[node].hub.clone();
        self.nodes[node].left_at = Some(Instant::now());
        hub.drain();
        self.leaving.spawn(async move {
            hub::departure::drain(&hub).await;
            hub.shut_down().await;
            node
        });
    }

    /// The node's process is gone without a word: its report stays, its clients are cut.
    pub fn kill(&mut self, node: usize) {
        self.nodes[node].cut_off();
        self.nodes[node].is_up = false;
        self.cut_of(node);
        let hub = self.nodes[node].hub.clone();
        self.leaving.spawn(async move {
            hub.shut_down().await;
            node
        });
    }

    /// Sessions of every node that there ever was.
    pub fn counts(&self) -> Vec<usize> {
        self.nodes.iter().map(Node::n_sessions).collect()
    }

    /// The nodes that serve.
    pub fn serving(&self) -> impl Iterator<Item = &Node> {
        self.nodes.iter().filter(|node| node.is_serving())
    }

    /// Do all that serve say that they move nobody, for this reason among others?
    pub fn all_say(&self, reason: &str) -> bool {
        self.serving().all(|node| node.suspended().contains(&reason))
    }

    /// No node reaches the backplane any more.
    pub fn cut_off(&self) {
        self.nodes.iter().filter(|node| node.is_up).for_each(Node::cut_off);
    }

    /// Ends `cut_off`.
    pub fn mend(&self) {
        self.nodes.iter().filter(|node| node.is_up).for_each(Node::mend);
    }

    // ---- clients

    /// So many new clients, on this node at once.
    ///
    /// # Panics
    /// It has no room for them.
    pub fn fill(&mut self, node: usize, n: usize) {
        for _ in 0..n {
            let number = self.clients.len();
            let mut client = Client::new(number, &self.bells);
            if number.is_multiple_of(LISTENS) {
                client.listen(&format!("client{number}"), CHANNELS[number / LISTENS % CHANNELS.len()].0);
                self.listeners.push(number);
            }
            let caller = Caller { identity: &self.identity, channels: client.channels(), since: client.since() };
            client.sit(node, self.nodes[node].admit_at_once(caller).expect("the node has room"));
            self.clients.push(client);
        }
    }

    /// Whoever opens a session from now on shows a token that ends after this time from now, all at
    /// the same instant; `None`: one that does not end.
    pub fn tokens_end_in(&mut self, time: Option<Duration>) {
        self.identity = anybody(time.map(|time| self.clock.unix() + time));
    }

    /// The connections of this part of all clients are cut at once.
    pub fn cut(&mut self, part: f64) {
        for client in 0..self.clients.len() {
            if self.dice.unit() < part {
                self.cut_client(client);
            }
        }
    }

    /// All connections to this node are cut at once.
    pub fn cut_of(&mut self, node: usize) {
        for client in 0..self.clients.len() {
            if self.clients[client].node() == Some(node) {
                self.cut_client(client);
            }
        }
    }

    fn cut_client(&mut self, client: usize) {
        if let Some(node) = self.clients[client].cut() {
            self.closed(Instant::now(), node, client, CloseReason::Lost);
            self.comes_back(client, self.dice.between(Duration::ZERO, Backoff::default().first_max));
        }
    }

    /// Clients that are connected, are on their way back, and will never be.
    pub fn n_clients(&self) -> (usize, usize, usize) {
        let n_connected = self.clients.iter().filter(|client| client.node().is_some()).count();
        (n_connected, self.away.values().map(Vec::len).sum(), self.n_gone)
    }

    // ---- time

    /// Lets this much time pass.
    ///
    /// # Panics
    /// A listener was promised something else.
    pub async fn run(&mut self, time: Duration) {
        let until = Instant::now() + time;
        while self.next_tick() <= until {
            self.step().await;
        }
    }

    /// Lets time pass until `is` holds; returns how long that took.
    ///
    /// # Panics
    /// It does not within `limit`, or as `run`.
    pub async fn run_until(&mut self, what: &str, limit: Duration, is: impl Fn(&Self) -> bool) -> Duration {
        let from = Instant::now();
        while !is(self) {
            let shed = self.serving().next().map(|node| node.hub.fleet().shed);
            assert!(from.elapsed() < limit, "never: {what}: {:?}, {shed:?}", self.counts());
            self.run(Duration::from_secs(1)).await;
        }
        from.elapsed()
    }

    fn next_tick(&self) -> Instant {
        self.began_at + TICK * u32::try_from(self.n_ticks + 1).expect("13 years")
    }

    async fn step(&mut self) {
        sleep_until(self.next_tick()).await;
        self.n_ticks += 1;
        while let Some(node) = self.leaving.try_join_next() {
            self.nodes[node.expect("a drain never panics")].is_up = false;
        }
        let now = Instant::now();
        self.answer(now);
        self.bring_back(now);
        if self.n_ticks.is_multiple_of(TICKS_A_SECOND) {
            self.look(now);
            self.publish().await;
        }
    }

    /// Everybody to whom something was said takes it.
    fn answer(&mut self, now: Instant) {
        let rung = std::mem::take(&mut *self.bells.lock().expect("a few lines"));
        for client in rung {
            match self.clients[client].take(&self.truth).unwrap_or_else(|violation| fail(&violation)) {
                Taken::Stays => {}
                Taken::Leaves { node, reason, after } => {
                    self.closed(now, node, client, reason);
                    match after.filter(|_| self.returning >= 1.0 || self.dice.unit() < self.returning) {
                        Some(after) => self.comes_back(client, after),
                        None => self.n_gone += 1,
                    }
                }
                Taken::Cut { node, reason } => {
                    self.closed(now, node, client, reason);
                    self.comes_back(client, self.dice.between(Duration::ZERO, Backoff::default().first_max));
                }
            }
        }
    }

    fn closed(&mut self, at: Instant, node: usize, client: usize, reason: CloseReason) {
        self.record.closes.push(Close { at, node, client, reason });
        self.clients[client].closed_at = Some(at);
        if let Some(listener) = &mut self.clients[client].listener {
            listener.n_moves += 1;
        }
        if reason != CloseReason::Shed {
            return;
        }
        let lately = |before: Option<Instant>, span| before.is_some_and(|before| at - before < span);
        let shed_at = self.clients[client].shed_at.replace(at);
        self.record.n_moved_again += usize::from(lately(shed_at, MOVED_LATELY));
        self.record.n_ping_pong += usize::from(lately(self.nodes[node].below_at, BELOW_LATELY));
    }

    fn comes_back(&mut self, client: usize, after: Duration) {
        let ticks = after.as_nanos().div_ceil(TICK.as_nanos()).max(1);
        let tick = self.n_ticks + u64::try_from(ticks).expect("clients wait for minutes");
        self.away.entry(tick).or_default().push(client);
    }

    fn bring_back(&mut self, now: Instant) {
        while let Some(due) = self.away.first_entry().filter(|entry| *entry.key() <= self.n_ticks) {
            for client in due.remove() {
                self.knock(client, now);
            }
        }
    }

    /// The client comes through the balancer.
    fn knock(&mut self, client: usize, now: Instant) {
        let Some(node) = self.front.choose(&self.nodes, self.clients[client].last, now) else {
            let backoff = Backoff::default();
            return self.comes_back(client, self.dice.between(backoff.min, backoff.max));
        };
        let one = &mut self.clients[client];
        let caller = Caller { identity: &self.identity, channels: one.channels(), since: one.since() };
        match self.nodes[node].admit(caller, now) {
            Ok(open) => {
                one.sit(node, open);
                let away = one.closed_at.map_or(Duration::ZERO, |at| now - at);
                self.record.returns.push(Return { at: now, away });
            }
            Err(after) => {
                self.record.refusals.push((now, node));
                self.comes_back(client, after);
            }
        }
    }

    fn look(&mut self, now: Instant) {
        let mut budget = None;
        let (mut total, mut capacity) = (0, 0);
        for node in self.nodes.iter().filter(|node| node.is_serving()) {
            node.gauge(now);
            (total, capacity) = (total + node.n_sessions(), capacity + node.capacity);
            budget.get_or_insert_with(|| node.hub.fleet().shed.budget);
        }
        let level = total as f64 / capacity.max(1) as f64;
        let (mut worst, mut squares, mut n, mut sum) = (0.0_f64, 0.0, 0.0, 0.0);
        for node in self.nodes.iter_mut().filter(|node| node.is_serving()) {
            let filled = node.n_sessions() as f64 / node.capacity as f64;
            if level > 0.0 {
                worst = worst.max((filled / level - 1.0).abs());
            }
            if filled < BELOW * level {
                node.below_at = Some(now);
            }
            (n, sum, squares) = (n + 1.0, sum + filled, squares + filled * filled);
        }
        let mean = sum / f64::max(n, 1.0);
        let variance = (squares / f64::max(n, 1.0) - mean * mean).max(0.0);
        let cv = if mean > 0.0 { variance.sqrt() / mean } else { 0.0 };
        self.record.looks.push(Look { at: now, worst, cv, n_sessions: total, budget: budget.unwrap_or(0.0) });
    }

    // ---- events

    fn listeners(&self) -> impl Iterator<Item = (bool, &Listener)> {
        let clients = self.listeners.iter().map(|client| &self.clients[*client]);
        clients.filter_map(|client| Some((client.node().is_some(), client.listener.as_deref()?)))
    }

    /// One event that carries its number on each channel whose turn it is.
    async fn publish(&mut self) {
        let second = self.n_ticks / TICKS_A_SECOND;
        for (channel, _) in CHANNELS.iter().filter(|(_, every)| second.is_multiple_of(*every)) {
            let event = Publish {
                channel: Channel::new(channel).expect("a good name"),
                name: None,
                data: Bytes::from(self.truth.next_number().to_string()),
                ephemeral: false,
                key: None,
            };
            let published = self.publisher.publish(event).await.expect("the publisher is never cut off");
            self.truth.published(channel, published.id.expect("it is logged"));
            let is_away = |(is_here, listener): &(bool, &Listener)| !is_here && listener.channel == *channel;
            self.n_missed += self.listeners().filter(is_away).count();
        }
    }

    /// Waits until every listener has the newest event of its channel, and tells what they heard.
    ///
    /// # Panics
    /// One is stuck, or as `run`.
    pub async fn heard(&mut self) -> Heard {
        let newest: Vec<u64> = CHANNELS.iter().filter_map(|(channel, _)| self.truth.newest(channel)).collect();
        let has_newest = |listener: &Listener| newest.iter().any(|number| listener.judge.has_seen(*number));
        let all_have = |fleet: &Self| fleet.listeners().all(|(_, listener)| has_newest(listener));
        self.run_until("all have the newest event", PATIENCE, all_have).await;
        let mut heard = Heard { n_listeners: self.listeners.len(), n_caught_up: self.n_missed, ..Heard::default() };
        for (_, listener) in self.listeners() {
            heard.n_moved += usize::from(listener.n_moves > 0);
            heard.n_events += listener.judge.n_seen();
            heard.n_gaps += listener.judge.n_gaps();
        }
        heard
    }
}

fn anybody(expires_at: Option<Duration>) -> Arc<Identity> {
    Arc::new(Identity { user: None, jti: None, sid: None, issued_at: 0, expires_at, grants: Grants::default() })
}

fn fail(violation: &Violation) -> ! {
    panic!("{violation}")
}
