//! The clients of a fleet that grows: Tidegate's own, which obey what a `bye` says, resume with
//! their cursor and notice every event that is missing or came twice. Decides nothing; it notes.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;

use client::{Bye, Client, Event, Loss, Message, Resume};
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio::time::Instant;

use crate::mix::Mix;
use crate::timeline::Timeline;
use crate::token::{self, Flaw};
use crate::wire::{self, number_after};

/// What everybody hears.
pub const COMMON: &str = "all";
/// In every event's data: its number on its channel, from 0.
pub const MARKER: &str = r#""seq":"#;
/// The reason of those that are moved to emptier nodes.
const SHED: &str = "shed";

/// The channel of one client alone.
pub fn own_channel(n: usize) -> String {
    // `token::full` makes this `sub` of the name.
    format!("user:u-{n}")
}

/// The events of one channel, as one client hears them.
#[derive(Default)]
pub struct Heard {
    next: AtomicU32,
    n_skipped: AtomicU32,
    n_doubled: AtomicU32,
}

impl Heard {
    /// Event `seq` came. Only one task ever calls this.
    fn note(&self, seq: u32) {
        let next = self.next.load(Ordering::Relaxed);
        if seq < next {
            self.n_doubled.fetch_add(1, Ordering::Relaxed);
            return;
        }
        self.n_skipped.fetch_add(seq - next, Ordering::Relaxed);
        self.next.store(seq + 1, Ordering::Relaxed);
    }

    /// Of `n_published` so far, those that did not come.
    pub fn n_lost(&self, n_published: u32) -> u32 {
        let missing = n_published.saturating_sub(self.next.load(Ordering::Relaxed));
        self.n_skipped.load(Ordering::Relaxed) + missing
    }

    /// Those that came again, or after a later one.
    pub fn n_doubled(&self) -> u32 {
        self.n_doubled.load(Ordering::Relaxed)
    }
}

/// What became of one client.
#[derive(Default)]
pub struct Record {
    pub common: Heard,
    pub own: Heard,
    /// Events published to it alone.
    pub n_own_published: AtomicU32,
    pub n_moves: AtomicU32,
}

/// What all clients share.
pub struct World {
    url: String,
    mix: Mix,
    /// When the new nodes were started.
    began: OnceLock<Instant>,
    pub records: Vec<Record>,
    pub n_common_published: AtomicU32,
    /// Sessions that are ready.
    pub n_open: AtomicUsize,
    /// Sessions asked to move, since the begin.
    pub sheds: Timeline,
    /// Clients that were let in again, since the begin.
    pub reconnects: Timeline,
    /// Reconnects, and those of them that were told of a gap or got no resume.
    pub n_unresumed: AtomicU32,
    pub n_gaps: AtomicU32,
    /// How sessions ended, and attempts, since the begin.
    pub ends: Mutex<BTreeMap<String, u32>>,
    pub refused: Mutex<BTreeMap<String, u32>>,
    /// Who has just been moved: events for them matter most.
    moved: mpsc::Sender<usize>,
}

impl World {
    pub fn new(proxy: std::net::SocketAddr, mix: Mix, n: usize, moved: mpsc::Sender<usize>) -> World {
        World {
            url: format!("http://{proxy}"),
            mix,
            began: OnceLock::new(),
            records: (0..n).map(|_| Record::default()).collect(),
            n_common_published: AtomicU32::new(0),
            n_open: AtomicUsize::new(0),
            sheds: Timeline::new(),
            reconnects: Timeline::new(),
            n_unresumed: AtomicU32::new(0),
            n_gaps: AtomicU32::new(0),
            ends: Mutex::default(),
            refused: Mutex::default(),
            moved,
        }
    }

    /// The new nodes are started now.
    pub fn begin(&self) -> Instant {
        *self.began.get_or_init(Instant::now)
    }

    fn since_begin(&self) -> Option<Duration> {
        self.began.get().map(Instant::elapsed)
    }

    /// Events that somebody did not hear, of those published so far.
    pub fn n_lost(&self) -> u32 {
        let n_common = self.n_common_published.load(Ordering::Relaxed);
        let of = |record: &Record| {
            record.common.n_lost(n_common) + record.own.n_lost(record.n_own_published.load(Ordering::Relaxed))
        };
        self.records.iter().map(of).sum()
    }

    pub fn n_doubled(&self) -> u32 {
        self.records.iter().map(|record| record.common.n_doubled() + record.own.n_doubled()).sum()
    }

    fn said_bye(&self, n: usize, bye: &Bye) {
        let Some(at) = self.since_begin().filter(|_| bye.reason == SHED) else { return };
        self.sheds.record(at);
        self.records[n].n_moves.fetch_add(1, Ordering::Relaxed);
        // Full: so many wait for an event of their own that one more makes no difference.
        let _ = self.moved.try_send(n);
    }

    fn let_in(&self) {
        if let Some(at) = self.since_begin() {
            self.reconnects.record(at);
        }
    }

    fn ready(&self, resume: Resume) {
        self.n_open.fetch_add(1, Ordering::Relaxed);
        if self.began.get().is_some() && resume != Resume::Ok {
            self.n_unresumed.fetch_add(1, Ordering::Relaxed);
        }
    }

    fn heard(&self, n: usize, event: &Event) {
        let Some(seq) = number_after(event.data.get().as_bytes(), MARKER.as_bytes()) else { return };
        let record = &self.records[n];
        let heard = if event.channel == COMMON { &record.common } else { &record.own };
        heard.note(u32::try_from(seq).expect("the load is no longer than that"));
    }

    /// A session ended, or an attempt failed.
    fn lost(&self, was_ready: bool, why: &Loss) {
        if was_ready {
            self.n_open.fetch_sub(1, Ordering::Relaxed);
        }
        if self.began.get().is_none() {
            return;
        }
        let (counts, word) = match why {
            Loss::Bye { reason } if was_ready => (&self.ends, reason.clone()),
            other if was_ready => (&self.ends, other.to_string()),
            Loss::Refused { status, code } => (&self.refused, format!("{status} {code}")),
            other => (&self.refused, other.to_string()),
        };
        *counts.lock().expect("nothing panics while it is held").entry(word.trim_end().to_owned()).or_default() += 1;
    }
}

/// Starts all clients, `rate` a second, and keeps them running.
pub async fn gather(world: Arc<World>, rate: f64) {
    let mut clients = JoinSet::new();
    let mut pace = tokio::time::interval(Duration::from_secs_f64(1.0 / rate));
    for n in 0..world.records.len() {
        pace.tick().await;
        clients.spawn(live(Arc::clone(&world), n));
    }
    clients.join_all().await;
}

async fn live(world: Arc<World>, n: usize) {
    let transport = match world.mix.of(n) {
        wire::Transport::Ws => client::Transport::Ws,
        wire::Transport::Sse => client::Transport::Sse,
    };
    let client = Client::builder(&world.url)
        .token(token::full(&n.to_string(), &[COMMON], Flaw::None))
        .transport(transport)
        .seed(n as u64)
        .connect();
    let mut client = client.expect("the URL is well formed");
    let mut is_ready = false;
    while let Some(message) = client.next().await {
        match message {
            Message::Hello(_) => world.let_in(),
            // It may come again in an open session.
            Message::Ready(ready) if !is_ready => {
                is_ready = true;
                world.ready(ready.resume);
            }
            Message::Event(event) => world.heard(n, &event),
            Message::Gap(_) => drop(world.n_gaps.fetch_add(1, Ordering::Relaxed)),
            Message::Bye(bye) => world.said_bye(n, &bye),
            Message::Lost(lost) => world.lost(std::mem::take(&mut is_ready), &lost.why),
            _ => {}
        }
    }
    let end = client.end().map(ToString::to_string).unwrap_or_default();
    *world.refused.lock().expect("nothing panics while it is held").entry(format!("ended: {end}")).or_default() += 1;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_missing_and_what_came_twice_is_counted() {
        let heard = Heard::default();
        for seq in [0, 1, 4, 4, 2, 5] {
            heard.note(seq);
        }
        assert_eq!((heard.n_lost(6), heard.n_doubled()), (2, 2), "2 and 3 did not come in their time");
        assert_eq!(heard.n_lost(8), 4, "and the last two not at all");
        assert_eq!(Heard::default().n_lost(3), 3);
    }
}
