//! Who watches a storm without being in it: sessions that stay and hear a steady load, and probes of
//! the living. On a thread and a runtime of its own, so that ten thousand clients of the same
//! program do not stand in its way. Decides nothing; it notes.

use std::net::SocketAddr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::{Instant, MissedTickBehavior};

use crate::admin::Publisher;
use crate::fleet::Gateway;
use crate::histogram::Histogram;
use crate::probe::{self, Metrics};
use crate::timeline::BIN;
use crate::token::{self, Flaw};
use crate::wire::{Address, Subscriber, Transport, number_after};

const CHANNEL: &str = "stay";
const MARKER: &[u8] = br#""seq":"#;
/// Between two looks at each probe.
const PROBE_EVERY: Duration = Duration::from_millis(200);
const LAG_EVERY: Duration = Duration::from_millis(10);
/// For what is still on its way when the load ends.
const DRAIN: Duration = Duration::from_secs(3);
/// More events than any run publishes.
const MAX_EVENTS: usize = 1 << 20;

/// How far the storm is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd)]
pub enum Stage {
    Setup,
    Before,
    Storm,
    Over,
}

/// What is watched.
pub struct Watch {
    pub stayers: usize,
    pub rate: f64,
    /// New sessions a second, over all nodes.
    pub connect_rate: f64,
}

/// What was seen.
pub struct Seen {
    /// Publish to receive, of events published before the kill and after it.
    pub before: Histogram,
    pub during: Histogram,
    /// How late this thread's own timer was: what the machine alone adds to the above.
    pub lag_before: Histogram,
    pub lag_during: Histogram,
    /// Sessions that the living nodes had opened, together, and when after the kill; the client's word
    /// for it comes as late as the machine lets the client have it.
    opened: Mutex<Vec<(Duration, f64)>>,
    n_published: AtomicU64,
    n_publish_failed: AtomicU64,
    n_lost: AtomicU64,
    n_doubled: AtomicU64,
    n_ended: AtomicU64,
    pub livez: Probe,
    pub readyz: Probe,
}

/// Answers of one kind of probe.
pub struct Probe {
    pub took: Histogram,
    pub n_asked: AtomicU64,
    pub n_failed: AtomicU64,
}

/// What the stayers got.
pub struct Delivery {
    pub n_published: u64,
    pub n_publish_failed: u64,
    pub n_lost: u64,
    pub n_doubled: u64,
    pub n_ended: u64,
}

impl Seen {
    fn new() -> Seen {
        let probe = || Probe { took: Histogram::new(), n_asked: AtomicU64::new(0), n_failed: AtomicU64::new(0) };
        Seen {
            before: Histogram::new(),
            during: Histogram::new(),
            lag_before: Histogram::new(),
            lag_during: Histogram::new(),
            opened: Mutex::default(),
            n_published: AtomicU64::new(0),
            n_publish_failed: AtomicU64::new(0),
            n_lost: AtomicU64::new(0),
            n_doubled: AtomicU64::new(0),
            n_ended: AtomicU64::new(0),
            livez: probe(),
            readyz: probe(),
        }
    }

    /// Sessions opened from the kill until then, by the nodes' own count; between two looks evenly.
    pub fn opened_by(&self, then: Duration) -> f64 {
        let opened = self.opened.lock().expect("nothing panics while it is held");
        let at = opened.partition_point(|(at, _)| *at <= then);
        let count = match (at.checked_sub(1).map(|at| opened[at]), opened.get(at)) {
            (Some((from, n)), Some((to, more))) => {
                n + (more - n) * (then - from).as_secs_f64() / (*to - from).as_secs_f64()
            }
            (Some((_, n)), None) | (None, Some(&(_, n))) => n,
            (None, None) => return 0.0,
        };
        count - opened[0].1
    }

    pub fn delivery(&self) -> Delivery {
        let of = |count: &AtomicU64| count.load(Ordering::Relaxed);
        Delivery {
            n_published: of(&self.n_published),
            n_publish_failed: of(&self.n_publish_failed),
            n_lost: of(&self.n_lost),
            n_doubled: of(&self.n_doubled),
            n_ended: of(&self.n_ended),
        }
    }
}

/// Where the living are.
struct Nodes {
    publics: Vec<SocketAddr>,
    probes: Vec<SocketAddr>,
    admin: SocketAddr,
}

/// A running observer.
pub struct Observer {
    stage: watch::Sender<Stage>,
    thread: JoinHandle<Result<(), String>>,
    pub seen: Arc<Seen>,
    ready: watch::Receiver<bool>,
}

impl Observer {
    /// Starts watching `living`.
    pub fn start(living: &[&Gateway], what: Watch) -> Result<Observer, String> {
        let nodes = Nodes {
            publics: living.iter().map(|node| node.public).collect(),
            probes: living.iter().map(|node| node.probes).collect(),
            admin: living.first().ok_or("no node is left")?.admin,
        };
        let (stage, staged) = watch::channel(Stage::Setup);
        let (is_ready, ready) = watch::channel(false);
        let seen = Arc::new(Seen::new());
        let noting = Arc::clone(&seen);
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        let runtime = runtime.map_err(|error| error.to_string())?;
        let thread = std::thread::spawn(move || runtime.block_on(observe(nodes, what, staged, is_ready, noting)));
        Ok(Observer { stage, thread, seen, ready })
    }

    /// Waits until every session that is to stay is there.
    pub async fn ready(&mut self) -> Result<(), String> {
        if self.ready.wait_for(|is_ready| *is_ready).await.is_ok() {
            return Ok(());
        }
        Err("the sessions that stay could not be opened".to_owned())
    }

    pub fn enter(&self, stage: Stage) {
        self.stage.send_replace(stage);
    }

    /// Ends the watch; gives what it saw.
    pub async fn end(self) -> Result<Arc<Seen>, String> {
        self.stage.send_replace(Stage::Over);
        let thread = self.thread;
        let joined = tokio::task::spawn_blocking(move || thread.join()).await;
        joined.map_err(|error| error.to_string())?.map_err(|_| "the observer panicked")??;
        Ok(self.seen)
    }
}

async fn observe(
    nodes: Nodes,
    what: Watch,
    stage: watch::Receiver<Stage>,
    is_ready: watch::Sender<bool>,
    seen: Arc<Seen>,
) -> Result<(), String> {
    let load = Arc::new(Load {
        started: Instant::now(),
        sent: (0..MAX_EVENTS).map(|_| AtomicU64::new(0)).collect(),
        stage: stage.clone(),
        seen: Arc::clone(&seen),
    });
    let mut stayers = JoinSet::new();
    let mut pace = tokio::time::interval(Duration::from_secs_f64(1.0 / what.connect_rate));
    let (finish, finished) = watch::channel(());
    for n in 0..what.stayers {
        pace.tick().await;
        let to = Address::of(nodes.publics[n % nodes.publics.len()]);
        let token = token::full(&format!("stay-{n}"), &[CHANNEL], Flaw::None);
        let subscriber = Subscriber::open(&to, Transport::Ws, Some(&token), "").await;
        stayers.spawn(stay(subscriber?, Arc::clone(&load), finished.clone()));
    }
    is_ready.send_replace(true);
    let mut probes = JoinSet::new();
    probes.spawn(count(nodes.probes.clone(), stage.clone(), Arc::clone(&seen)));
    for address in nodes.probes {
        probes.spawn(poll(address, stage.clone(), Arc::clone(&seen)));
    }
    probes.spawn(lag(stage.clone(), Arc::clone(&seen)));
    publish(&load, nodes.admin, what.rate).await?;
    tokio::time::sleep(DRAIN).await;
    drop(finish);
    let n_published = seen.n_published.load(Ordering::Relaxed);
    for got in stayers.join_all().await {
        seen.n_lost.fetch_add(n_published - got.n_distinct.min(n_published), Ordering::Relaxed);
        seen.n_doubled.fetch_add(got.n_doubled, Ordering::Relaxed);
        seen.n_ended.fetch_add(u64::from(got.has_ended), Ordering::Relaxed);
    }
    Ok(())
}

/// The steady load.
struct Load {
    started: Instant,
    /// When each event was sent, in ns after the start, its lowest bit: was it before the kill?
    sent: Vec<AtomicU64>,
    stage: watch::Receiver<Stage>,
    seen: Arc<Seen>,
}

#[derive(Default)]
struct Got {
    next: u64,
    n_distinct: u64,
    n_doubled: u64,
    has_ended: bool,
}

async fn stay(mut subscriber: Subscriber, load: Arc<Load>, mut finished: watch::Receiver<()>) -> Got {
    let mut got = Got::default();
    // Listening is cancel-safe; `finished` only ever tells the end.
    let has_ended = tokio::select! {
        _ = subscriber.listen(|text| load.note(text, &mut got)) => true,
        _ = finished.changed() => false,
    };
    got.has_ended = has_ended;
    got
}

impl Load {
    fn note(&self, text: &[u8], got: &mut Got) {
        let Some(seq) = number_after(text, MARKER) else { return };
        let Some(sent) = self.sent.get(seq as usize).map(|sent| sent.load(Ordering::Acquire)) else { return };
        let took = self.started.elapsed().saturating_sub(Duration::from_nanos(sent));
        let histogram = if sent & 1 == 1 { &self.seen.before } else { &self.seen.during };
        histogram.record(took);
        if seq < got.next {
            got.n_doubled += 1;
        } else {
            got.next = seq + 1;
            got.n_distinct += 1;
        }
    }
}

/// Publishes from `Before` until `Over`.
async fn publish(load: &Load, admin: SocketAddr, rate: f64) -> Result<(), String> {
    let mut publisher = Publisher::connect(&Address::of(admin), None).await?;
    let mut stage = load.stage.clone();
    let gone = |_| "the storm is gone".to_owned();
    stage.wait_for(|stage| *stage >= Stage::Before).await.map_err(gone)?;
    let mut pace = tokio::time::interval(Duration::from_secs_f64(1.0 / rate));
    // A late publish does not thin the load out.
    pace.set_missed_tick_behavior(MissedTickBehavior::Burst);
    let marker = std::str::from_utf8(MARKER).expect("it is text");
    for (seq, sent) in load.sent.iter().enumerate() {
        pace.tick().await;
        let is_before = match *stage.borrow() {
            Stage::Over => break,
            stage => stage == Stage::Before,
        };
        sent.store((load.started.elapsed().as_nanos() as u64) & !1 | u64::from(is_before), Ordering::Release);
        load.seen.n_published.fetch_add(1, Ordering::Relaxed);
        if let Err(why) = publisher.publish(CHANNEL, &format!("{{{marker}{seq}}}")).await {
            eprintln!("{why}");
            load.seen.n_publish_failed.fetch_add(1, Ordering::Relaxed);
            publisher = Publisher::connect(&Address::of(admin), None).await?;
        }
    }
    Ok(())
}

/// Sleeps and notes by how much it overslept.
async fn lag(stage: watch::Receiver<Stage>, seen: Arc<Seen>) {
    loop {
        let due = Instant::now() + LAG_EVERY;
        tokio::time::sleep_until(due).await;
        match *stage.borrow() {
            Stage::Setup => {}
            Stage::Before => seen.lag_before.record(due.elapsed()),
            Stage::Storm => seen.lag_during.record(due.elapsed()),
            Stage::Over => return,
        }
    }
}

/// Reads from the kill on how many sessions the living nodes have opened.
async fn count(probes: Vec<SocketAddr>, mut stage: watch::Receiver<Stage>, seen: Arc<Seen>) {
    if stage.wait_for(|stage| *stage >= Stage::Storm).await.is_err() {
        return;
    }
    let killed = Instant::now();
    let mut pace = tokio::time::interval(BIN);
    while *stage.borrow() < Stage::Over {
        pace.tick().await;
        let asked = killed.elapsed();
        let Ok(metrics) = Metrics::read_all(probes.iter().copied()).await else { continue };
        let at = (asked + killed.elapsed()) / 2;
        let opened = metrics.sum("gateway_sessions_opened_total").unwrap_or_default();
        seen.opened.lock().expect("nothing panics while it is held").push((at, opened));
    }
}

/// Asks both probes of a living node until the storm is over.
async fn poll(probes: SocketAddr, mut stage: watch::Receiver<Stage>, seen: Arc<Seen>) {
    if stage.wait_for(|stage| *stage >= Stage::Storm).await.is_err() {
        return;
    }
    let mut pace = tokio::time::interval(PROBE_EVERY);
    while *stage.borrow() < Stage::Over {
        pace.tick().await;
        for (path, probe) in [("/livez", &seen.livez), ("/readyz", &seen.readyz)] {
            let asked = Instant::now();
            let answer = probe::get(probes, path).await;
            probe.took.record(asked.elapsed());
            probe.n_asked.fetch_add(1, Ordering::Relaxed);
            if !matches!(answer, Ok((200, _))) {
                probe.n_failed.fetch_add(1, Ordering::Relaxed);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sessions_opened_are_counted_from_the_kill_and_evenly_between_two_looks() {
        let seen = Seen::new();
        let ms = Duration::from_millis;
        assert_eq!(seen.opened_by(ms(10)), 0.0);
        *seen.opened.lock().unwrap() = vec![(ms(0), 100.0), (ms(100), 150.0), (ms(300), 250.0)];
        assert_eq!(
            [0, 50, 100, 200, 300, 900].map(|at| seen.opened_by(ms(at))),
            [0.0, 25.0, 50.0, 100.0, 150.0, 150.0]
        );
    }
}
