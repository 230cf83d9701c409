//! The clients of a storm: those that lose their node and come back, and those that stay. Decides
//! how a client behaves (`Manner`) and notes what became of it; what is good is `outcome`'s.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;

use clap::ValueEnum;
use client::{Client, Loss, Message, Resume};
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use tokio::task::JoinSet;
use tokio::time::Instant;

use crate::balancer::{Balancer, Given};
use crate::timeline::Timeline;
use crate::token::{self, Flaw};
use crate::wire::{Failure, Subscriber, Transport};

/// The node that is killed.
pub const VICTIM: usize = 0;

/// The channel of all clients at home on one node.
pub fn channel(home: usize) -> String {
    format!("crowd-{home}")
}

/// The article's backoff, which knows nothing of servers' hints.
const PLAIN_BASE: Duration = Duration::from_millis(500);
const PLAIN_CAP: Duration = Duration::from_secs(10);

/// What a plain client gives an attempt, and a session to be ready.
const PLAIN_TIMEOUT: Duration = Duration::from_secs(15);

/// Nobody listens there: where an attempt goes while the balancer has no healthy node.
const NOWHERE: &str = "127.0.0.1:1";

/// How a client comes back.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Manner {
    /// Tidegate's Rust client: hints, cursor, first delay from 0 to 5 s
    Ours,
    /// Full jitter from 0.5 s to 10 s; sees no hint and has no cursor
    Plain,
}

/// What became of one client since the kill.
#[derive(Default)]
pub struct Record {
    pub n_attempts: AtomicU32,
    /// When it was ready again, in µs after the kill, plus one; 0: it is not.
    back_us: AtomicU64,
    pub is_resumed: AtomicU32,
    /// Events of its channel that it heard.
    pub n_heard: AtomicU32,
}

impl Record {
    pub fn back(&self) -> Option<Duration> {
        self.back_us.load(Ordering::Relaxed).checked_sub(1).map(Duration::from_micros)
    }
}

/// What all clients share.
pub struct World {
    pub balancer: Arc<Balancer>,
    pub manner: Manner,
    pub transport: Transport,
    killed: OnceLock<Instant>,
    /// By client; those of the victim come first.
    pub records: Vec<Record>,
    pub n_victims: usize,
    pub n_open: AtomicUsize,
    pub n_back: AtomicUsize,
    /// When the victims noticed.
    pub noticed: Timeline,
    pub attempts: Timeline,
    /// Those of them that were sent to a living node.
    pub demand: Timeline,
    pub admitted: Timeline,
    /// By code; attempts that found no node stand under `no connection`.
    pub refused: Mutex<BTreeMap<String, u32>>,
    /// Sessions on living nodes that ended.
    pub n_lost_elsewhere: AtomicU32,
}

impl World {
    pub fn new(
        balancer: Arc<Balancer>,
        manner: Manner,
        transport: Transport,
        n_victims: usize,
        n_clients: usize,
    ) -> World {
        World {
            balancer,
            manner,
            transport,
            killed: OnceLock::new(),
            records: (0..n_clients).map(|_| Record::default()).collect(),
            n_victims,
            n_open: AtomicUsize::new(0),
            n_back: AtomicUsize::new(0),
            noticed: Timeline::new(),
            attempts: Timeline::new(),
            demand: Timeline::new(),
            admitted: Timeline::new(),
            refused: Mutex::default(),
            n_lost_elsewhere: AtomicU32::new(0),
        }
    }

    /// The storm begins now.
    pub fn kill(&self) -> Instant {
        *self.killed.get_or_init(Instant::now)
    }

    fn since_kill(&self) -> Option<Duration> {
        self.killed.get().map(Instant::elapsed)
    }

    /// Client `n` tries: before the kill at its home, later where the balancer sends it.
    fn attempt(&self, n: usize, home: usize) -> Option<Given> {
        let Some(at) = self.since_kill() else { return Some(self.balancer.give(home)) };
        self.attempts.record(at);
        self.records[n].n_attempts.fetch_add(1, Ordering::Relaxed);
        let given = self.balancer.choose();
        if given.as_ref().is_some_and(|given| given.node != VICTIM) {
            self.demand.record(at);
        }
        given
    }

    fn admitted(&self) {
        if let Some(at) = self.since_kill() {
            self.admitted.record(at);
        }
    }

    fn ready(&self, n: usize, is_resumed: bool) {
        self.n_open.fetch_add(1, Ordering::Relaxed);
        let Some(at) = self.since_kill() else { return };
        let record = &self.records[n];
        let us = at.as_micros() as u64 + 1;
        let is_first = record.back_us.compare_exchange(0, us, Ordering::Relaxed, Ordering::Relaxed).is_ok();
        if is_first && n < self.n_victims {
            record.is_resumed.store(u32::from(is_resumed), Ordering::Relaxed);
            self.n_back.fetch_add(1, Ordering::Relaxed);
        }
    }

    fn lost(&self, n: usize) {
        self.n_open.fetch_sub(1, Ordering::Relaxed);
        match self.since_kill() {
            Some(at) if n < self.n_victims && self.records[n].back().is_none() => self.noticed.record(at),
            _ => drop(self.n_lost_elsewhere.fetch_add(1, Ordering::Relaxed)),
        }
    }

    fn refused(&self, code: &str) {
        *self.refused.lock().expect("nothing panics while it is held").entry(code.to_owned()).or_default() += 1;
    }
}

/// The crowd stands for other people's machines: on this one it takes only what the gateways leave.
/// Lowers the priority of the runtime's threads, on which the clients run; the observer has a thread
/// of its own.
pub fn step_back() -> Result<(), String> {
    let told = |error: std::io::Error| format!("the priority of the crowd's threads: {error}");
    let mut renice = std::process::Command::new("renice");
    renice.args(["-n", "10", "-p"]).stdout(std::process::Stdio::null());
    for thread in std::fs::read_dir("/proc/self/task").map_err(told)? {
        let thread = thread.map_err(told)?;
        if std::fs::read_to_string(thread.path().join("comm")).is_ok_and(|name| name.starts_with("tokio")) {
            renice.arg(thread.file_name());
        }
    }
    let status = renice.status().map_err(told)?;
    status.success().then_some(()).ok_or_else(|| format!("renice gave {status}"))
}

/// Starts the clients `from..to`, at home on `home`, `rate` a second, and keeps them running.
pub async fn gather(world: Arc<World>, range: std::ops::Range<usize>, home: usize, rate: f64) {
    let mut clients = JoinSet::new();
    let mut pace = tokio::time::interval(Duration::from_secs_f64(1.0 / rate));
    for n in range {
        pace.tick().await;
        let world = Arc::clone(&world);
        match world.manner {
            Manner::Ours => clients.spawn(ours(world, n, home)),
            Manner::Plain => clients.spawn(plain(world, n, home)),
        };
    }
    clients.join_all().await;
}

async fn ours(world: Arc<World>, n: usize, home: usize) {
    let given: Arc<Mutex<Option<Given>>> = Arc::default();
    let source = {
        let (world, given) = (Arc::clone(&world), Arc::clone(&given));
        move || {
            let next = world.attempt(n, home);
            let address = next.as_ref().map(|next| world.balancer.address(next.node));
            *given.lock().expect("nothing panics while it is held") = next;
            address
        }
    };
    let transport = match world.transport {
        Transport::Ws => client::Transport::Ws,
        Transport::Sse => client::Transport::Sse,
    };
    let client = Client::builder(format!("http://{NOWHERE}"))
        .token(token::full(&n.to_string(), &[&channel(home)], Flaw::None))
        .transport(transport)
        .seed(n as u64)
        .address_source(source)
        .connect();
    let mut client = client.expect("the URL is well formed");
    let mut is_open = false;
    while let Some(message) = client.next().await {
        match message {
            Message::Hello(_) => world.admitted(),
            Message::Ready(ready) if !is_open => {
                is_open = true;
                world.ready(n, ready.resume == Resume::Ok);
            }
            Message::Event(_) => drop(world.records[n].n_heard.fetch_add(1, Ordering::Relaxed)),
            Message::Lost(lost) => {
                *given.lock().expect("nothing panics while it is held") = None;
                match lost.why {
                    _ if is_open => world.lost(n),
                    Loss::Refused { code, .. } => world.refused(&code),
                    Loss::Bye { reason } => world.refused(&format!("bye {reason}")),
                    _ => world.refused("no connection"),
                }
                is_open = false;
            }
            _ => {}
        }
    }
    world.refused(&format!("ended: {}", client.end().map(ToString::to_string).unwrap_or_default()));
}

async fn plain(world: Arc<World>, n: usize, home: usize) {
    let token = token::full(&n.to_string(), &[&channel(home)], Flaw::None);
    let mut dice = StdRng::seed_from_u64(n as u64);
    let mut failures = 0;
    loop {
        let given = world.attempt(n, home);
        let authority =
            given.as_ref().map_or_else(|| NOWHERE.to_owned(), |given| world.balancer.address(given.node).to_string());
        match plain_session(&world, &authority, &token).await {
            Ok(mut subscriber) => {
                failures = 0;
                world.ready(n, false);
                subscriber.listen(|_| {}).await;
                world.lost(n);
            }
            Err(Failure::Refused { code, .. }) => world.refused(&code),
            Err(Failure::Broken(_)) => world.refused("no connection"),
        }
        drop(given);
        let ceiling = PLAIN_BASE.saturating_mul(1 << failures.min(16)).min(PLAIN_CAP);
        failures += 1;
        tokio::time::sleep(ceiling.mul_f64(dice.random::<f64>())).await;
    }
}

async fn plain_session(world: &World, authority: &str, token: &str) -> Result<Subscriber, Failure> {
    let opening = async {
        let mut subscriber = Subscriber::connect(authority, world.transport, Some(token), "").await?;
        world.admitted();
        subscriber.until_ready().await.map_err(Failure::Broken)?;
        Ok(subscriber)
    };
    let late = || Err(Failure::Broken("no answer in time".to_owned()));
    tokio::time::timeout(PLAIN_TIMEOUT, opening).await.unwrap_or_else(|_| late())
}
