//! The one pub/sub link. Decides when a subscription stands, when the link is whole, deaf or
//! lost, and that the hub hears of all that in the order of the wire. What a loss means for
//! sessions the hub decides.
//!
//! - At most one SUBSCRIBE or UNSUBSCRIBE is under way, so that a confirmation can never be
//!   overtaken by a later command for the same channel.
//! - The node's own beacon goes out over another connection and must come back over this one:
//!   that tells a quiet link from a deaf one, and a link to another server from the right one.
//! - redis-rs would buffer unread messages without bound; here its driver hands each message to a
//!   bounded queue, and a queue that is full ends the link (the log has what it missed).

use std::collections::{HashSet, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use futures_util::future::BoxFuture;
use hub::backplane::{FromLink, MAX_TELL_BYTES};
use hub::channel::Channel;
use hub::cursor::EventId;
use redis::aio::MultiplexedConnection;
use redis::{PushInfo, PushKind, Value};
use tokio::sync::{mpsc, watch};
use tokio::time::{Instant, timeout};

use crate::LinkStats;
use crate::dial::{Backoff, Fault, SharedDialer};
use crate::keys::Keys;
use crate::lane::{Again, Lane};
use crate::message;
use crate::schema::{Schema, StartError};
use crate::wants::Wants;

/// Channels in one SUBSCRIBE. Measured: 10,000 one by one take 521 ms, in chunks of 500 37 ms.
const CHUNK: usize = 500;
/// Messages that wait between redis-rs and us, in number and bytes.
const MAX_QUEUED: usize = 8_192;
const MAX_QUEUED_BYTES: usize = 32 << 20;
/// Messages taken in one turn; then everything else of the link has its own.
const PUSHES_A_TURN: usize = 64;
/// How often a beacon and a PING go out.
const PULSE: Duration = Duration::from_secs(1);
/// A PING, a SUBSCRIBE or a beacon that is not answered for so long ends the link.
const SILENCE: Duration = Duration::from_secs(3);
/// How often silence is looked for.
const TICK: Duration = Duration::from_millis(250);

/// How far the backplane has got, for whoever waits to start.
#[derive(Clone, Debug)]
pub(crate) enum Start {
    /// Not yet.
    Waiting,
    /// The link was whole at least once.
    Ready,
    /// Waiting does not help.
    Refused(StartError),
}

pub(crate) struct Supervisor {
    pub(crate) dialer: SharedDialer,
    pub(crate) keys: Keys,
    pub(crate) node: String,
    /// Its beacon channel is subscribed too: that somebody listens there tells that this process lives.
    pub(crate) life: String,
    pub(crate) max_data: usize,
    pub(crate) schema: Arc<Schema>,
    pub(crate) control: Arc<Lane>,
    pub(crate) wants: Arc<Wants>,
    pub(crate) stats: Arc<LinkStats>,
    pub(crate) start: watch::Sender<Start>,
    pub(crate) out: mpsc::Sender<FromLink>,
}

/// Why a link is given up.
#[derive(Debug, thiserror::Error)]
enum Loss {
    /// No further link is made.
    #[error("nobody listens any more")]
    NobodyListens,
    #[error("the server closed it")]
    Closed,
    #[error("messages came faster than they were taken")]
    Overrun,
    #[error("the server does not answer on it")]
    Silent,
    /// The beacon went out, and did not come back over this link.
    #[error("it does not hear what is published")]
    Deaf,
    #[error("another life of the log was seen")]
    Asked,
    #[error("the server refuses: {0}")]
    Refused(String),
}

impl Supervisor {
    /// Makes link after link until the hub is gone.
    pub(crate) async fn run(self, mut backoff: Backoff) {
        loop {
            let (loss, lived) = match self.connect().await {
                Ok((connection, pushes)) => {
                    let since = Instant::now();
                    let loss = Link::new(&self, connection, pushes).run().await;
                    (loss, since.elapsed())
                }
                Err(error) => {
                    if self.out.is_closed() {
                        return;
                    }
                    self.report(error);
                    self.dialer.pause(backoff.next()).await;
                    continue;
                }
            };
            self.stats.pubsub_up.store(false, Ordering::Relaxed);
            self.stats.deaf.store(matches!(loss, Loss::Deaf | Loss::Silent), Ordering::Relaxed);
            self.stats.relinks.fetch_add(1, Ordering::Relaxed);
            if matches!(loss, Loss::NobodyListens) || self.out.send(FromLink::Lost).await.is_err() {
                return;
            }
            self.stats.set_trouble(Some(format!("the pub/sub link was lost: {loss}")));
            tracing::warn!(reason = %loss, "pub/sub link lost, making it anew");
            if lived >= Backoff::GOOD {
                backoff.reset();
            }
            tokio::time::sleep(backoff.next()).await;
        }
    }

    async fn connect(&self) -> Result<(MultiplexedConnection, Pushes), StartError> {
        self.schema.prepare().await?;
        let (queue, pushes) = queue(self.stats.clone(), self.max_payload());
        let connection = self.dialer.link(queue).await.map_err(|e| StartError::from(Fault::of(&e)))?;
        Ok((connection, pushes))
    }

    /// Waits for the hub; what arrives meanwhile fills the bounded queue, and ends the link if it
    /// does not fit.
    async fn emit(&self, message: FromLink) -> Result<(), Loss> {
        self.out.send(message).await.map_err(|_| Loss::NobodyListens)
    }

    /// Longer messages are not looked at. Generous, as another node may allow larger events.
    fn max_payload(&self) -> usize {
        self.max_data.max(MAX_TELL_BYTES) + 4_096
    }

    fn report(&self, error: StartError) {
        if self.stats.set_trouble(Some(error.to_string())) {
            tracing::warn!(%error, "no pub/sub link, trying again for ever");
        }
        self.start.send_modify(|start| {
            if !matches!(start, Start::Ready) && error.is_final() {
                *start = Start::Refused(error.clone());
            }
        });
    }
}

/// What redis-rs' driver has handed over.
struct Pushes {
    rx: mpsc::Receiver<PushInfo>,
    bytes: Arc<AtomicUsize>,
    overrun: Arc<AtomicBool>,
}

/// The driver's side never blocks: it counts, drops what is too long, and notes what did not fit.
fn queue(
    stats: Arc<LinkStats>,
    max_payload: usize,
) -> (impl Fn(PushInfo) -> Result<(), ()> + Send + Sync + 'static, Pushes) {
    let (tx, rx) = mpsc::channel(MAX_QUEUED);
    let pushes = Pushes { rx, bytes: Arc::default(), overrun: Arc::default() };
    let (bytes, overrun) = (pushes.bytes.clone(), pushes.overrun.clone());
    let hand_over = move |push: PushInfo| {
        let size = size(&push);
        if size > max_payload {
            stats.skipped.fetch_add(1, Ordering::Relaxed);
            return Ok(());
        }
        let queued = bytes.fetch_add(size, Ordering::Relaxed) + size;
        if queued > MAX_QUEUED_BYTES || tx.try_send(push).is_err() {
            overrun.store(true, Ordering::Relaxed);
            return Err(());
        }
        Ok(())
    };
    (hand_over, pushes)
}

fn size(push: &PushInfo) -> usize {
    let bytes = |value: &Value| if let Value::BulkString(b) = value { b.len() } else { 0 };
    push.data.iter().map(bytes).sum()
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Phase {
    /// Something that was wanted at the beginning is not confirmed yet.
    Joining,
    /// Confirmed; a beacon with this number or a later one makes it whole.
    Calling(u64),
    Up,
}

/// One link from its first SUBSCRIBE to its loss.
struct Link<'a> {
    s: &'a Supervisor,
    connection: MultiplexedConnection,
    pushes: Pushes,
    phase: Phase,
    /// Confirmed upstream.
    standing: HashSet<Channel>,
    /// Wanted at the beginning, or the link's own, and not confirmed yet.
    owed: HashSet<String>,
    joins: VecDeque<Channel>,
    leaves: VecDeque<Channel>,
    own: Vec<String>,
    /// The one SUBSCRIBE or UNSUBSCRIBE under way.
    command: Option<(Instant, BoxFuture<'static, Result<(), String>>)>,
    ping: Option<(Instant, BoxFuture<'static, Result<(), String>>)>,
    next_ping: Instant,
    beacon: Option<(u64, BoxFuture<'static, Result<(), Fault>>)>,
    next_beacon: Instant,
    /// Tells this link's beacons from an earlier link's and from a namesake's.
    name: String,
    sent: u64,
    answered: u64,
    seen: u64,
    /// Since when an answered beacon is missing.
    missing: Option<Instant>,
}

impl<'a> Link<'a> {
    fn new(s: &'a Supervisor, connection: MultiplexedConnection, pushes: Pushes) -> Self {
        s.wants.take_beacon();
        s.wants.take_relink();
        let joins: VecDeque<_> = s.wants.all().into();
        let own = vec![s.keys.ctl(), s.keys.node(&s.node), s.keys.beacon(&s.node), s.keys.beacon(&s.life)];
        let owed = joins.iter().map(|c| s.keys.live(c)).chain(own.iter().cloned()).collect();
        let now = Instant::now();
        Self {
            s,
            connection,
            pushes,
            phase: Phase::Joining,
            standing: HashSet::new(),
            owed,
            joins,
            leaves: VecDeque::new(),
            own,
            command: None,
            ping: None,
            next_ping: now + PULSE,
            beacon: None,
            next_beacon: now,
            name: format!("{:016x}", s.stats.dice.bits()),
            sent: 0,
            answered: 0,
            seen: 0,
            missing: None,
        }
    }

    async fn run(mut self) -> Loss {
        let mut tick = tokio::time::interval(TICK);
        loop {
            if let Err(loss) = self.step(&mut tick).await {
                return loss;
            }
        }
    }

    /// Waits for one thing to happen. Every arm is cancel-safe: queues, bells and timers keep what
    /// they have, the futures are polled where they are stored.
    async fn step(&mut self, tick: &mut tokio::time::Interval) -> Result<(), Loss> {
        self.look_at_wants().await?;
        self.send_what_is_due();
        tokio::select! {
            push = self.pushes.rx.recv() => self.take_some(push.ok_or(Loss::Closed)?).await,
            done = stored(&mut self.command) => { self.command = None; done.map_err(Loss::Refused) }
            done = stored(&mut self.ping) => { self.ping = None; done.map_err(Loss::Refused) }
            done = stored(&mut self.beacon) => self.beacon_answered(done),
            () = self.s.wants.changed() => Ok(()),
            _ = tick.tick() => Ok(()),
        }?;
        self.look_for_silence()
    }

    async fn look_at_wants(&mut self) -> Result<(), Loss> {
        if self.s.wants.take_relink() {
            return Err(Loss::Asked);
        }
        for (channel, is_wanted) in self.s.wants.touched() {
            match (is_wanted, self.standing.contains(&channel)) {
                (true, false) => self.joins.push_back(channel),
                (false, true) => self.leaves.push_back(channel),
                // An UNSUBSCRIBE that waits to be sent is dropped when its turn comes.
                (true, true) => self.s.emit(FromLink::Confirmed(channel)).await?,
                (false, false) => drop(self.owed.remove(&self.s.keys.live(&channel))),
            }
        }
        Ok(())
    }

    fn send_what_is_due(&mut self) {
        let now = Instant::now();
        if self.command.is_none() {
            self.command = self.next_command().map(|command| (now, command));
        }
        if self.ping.is_none() && now >= self.next_ping {
            self.next_ping = now + PULSE;
            let mut connection = self.connection.clone();
            let ping =
                async move { redis::cmd("PING").exec_async(&mut connection).await.map_err(|e| Fault::of(&e).text()) };
            self.ping = Some((now, Box::pin(ping)));
        }
        if self.phase == Phase::Joining && self.owed.is_empty() {
            self.phase = Phase::Calling(self.sent + 1);
            self.next_beacon = now;
        }
        let is_due =
            now >= self.next_beacon || (self.phase == Phase::Up && self.beacon.is_none() && self.s.wants.take_beacon());
        if self.phase != Phase::Joining && self.beacon.is_none() && is_due {
            self.next_beacon = now + PULSE;
            self.sent += 1;
            self.beacon = Some((self.sent, self.call_beacon(self.sent)));
        }
    }

    fn call_beacon(&self, number: u64) -> BoxFuture<'static, Result<(), Fault>> {
        let control = self.s.control.clone();
        let mut cmd = redis::cmd("FCALL");
        cmd.arg("tidegate_beacon_1")
            .arg(1)
            .arg(self.s.keys.log())
            .arg(&self.s.node)
            .arg(format!("{}.{number}", self.name));
        Box::pin(async move { control.call::<()>(&cmd, Again::Once).await })
    }

    /// The next chunk to join or to leave, as it stands now.
    fn next_command(&mut self) -> Option<BoxFuture<'static, Result<(), String>>> {
        let mut connection = self.connection.clone();
        let mut names = std::mem::take(&mut self.own);
        while names.len() < CHUNK
            && let Some(channel) = self.joins.pop_front()
        {
            let name = self.s.keys.live(&channel);
            if !self.s.wants.is_wanted(&channel) {
                self.owed.remove(&name);
            } else if !self.standing.contains(&channel) {
                names.push(name);
            }
        }
        if !names.is_empty() {
            return Some(Box::pin(async move { connection.subscribe(names).await.map_err(|e| Fault::of(&e).text()) }));
        }
        while names.len() < CHUNK
            && let Some(channel) = self.leaves.pop_front()
        {
            if !self.s.wants.is_wanted(&channel) && self.standing.remove(&channel) {
                names.push(self.s.keys.live(&channel));
            }
        }
        if names.is_empty() {
            return None;
        }
        Some(Box::pin(async move { connection.unsubscribe(names).await.map_err(|e| Fault::of(&e).text()) }))
    }

    /// The push, and a few that wait behind it: what else there is to look at is looked at once for all.
    async fn take_some(&mut self, first: PushInfo) -> Result<(), Loss> {
        self.take(first).await?;
        for _ in 1..PUSHES_A_TURN {
            let Ok(next) = self.pushes.rx.try_recv() else { break };
            self.take(next).await?;
        }
        Ok(())
    }

    async fn take(&mut self, push: PushInfo) -> Result<(), Loss> {
        self.pushes.bytes.fetch_sub(size(&push), Ordering::Relaxed);
        let mut data = push.data.into_iter();
        let (Some(Value::BulkString(name)), payload) = (data.next(), data.next()) else {
            return if push.kind == PushKind::Disconnection { Err(Loss::Closed) } else { Ok(()) };
        };
        let Ok(name) = String::from_utf8(name) else { return Ok(()) };
        match (push.kind, payload) {
            (PushKind::Subscribe, _) => self.joined(name).await,
            (PushKind::Message, Some(Value::BulkString(payload))) => self.heard(&name, payload).await,
            _ => Ok(()),
        }
    }

    async fn joined(&mut self, name: String) -> Result<(), Loss> {
        self.owed.remove(&name);
        let Some(channel) = self.s.keys.channel_of(&name) else { return Ok(()) };
        if let Some(channel) = self.s.wants.wanted(channel) {
            self.standing.insert(channel.clone());
            return self.s.emit(FromLink::Confirmed(channel)).await;
        }
        if let Ok(channel) = Channel::new(channel) {
            self.standing.insert(channel.clone());
            self.leaves.push_back(channel);
        }
        Ok(())
    }

    async fn heard(&mut self, name: &str, payload: Vec<u8>) -> Result<(), Loss> {
        if let Some(channel) = self.s.keys.channel_of(name) {
            let Some(channel) = self.standing.get(channel).cloned() else { return Ok(()) };
            return match message::event(channel, payload, self.s.max_data) {
                Some(event) => self.s.emit(FromLink::Event(event)).await,
                None => self.skip(),
            };
        }
        if name == self.s.keys.ctl() || name == self.s.keys.node(&self.s.node) {
            return match message::control(payload) {
                Some(Some(said)) => self.s.emit(said).await,
                Some(None) => Ok(()),
                None => self.skip(),
            };
        }
        match message::beacon(&payload) {
            Some((position, nonce)) => self.beacon_seen(position, nonce).await,
            None => self.skip(),
        }
    }

    async fn beacon_seen(&mut self, position: EventId, nonce: &str) -> Result<(), Loss> {
        let number = nonce.strip_prefix(&*self.name).and_then(|n| n.strip_prefix('.')).and_then(|n| n.parse().ok());
        let Some(number) = number else { return Ok(()) };
        self.seen = self.seen.max(number);
        match self.phase {
            Phase::Joining => Ok(()),
            Phase::Calling(first) if number < first => Ok(()),
            Phase::Calling(_) => {
                self.phase = Phase::Up;
                self.s.stats.pubsub_up.store(true, Ordering::Relaxed);
                self.s.stats.deaf.store(false, Ordering::Relaxed);
                self.s.stats.set_trouble(None);
                self.s.emit(FromLink::Up(position)).await?;
                self.s.start.send_replace(Start::Ready);
                Ok(())
            }
            Phase::Up => self.s.emit(FromLink::Beacon(position)).await,
        }
    }

    fn beacon_answered(&mut self, done: Result<(), Fault>) -> Result<(), Loss> {
        let number = self.beacon.take().map_or(0, |(number, _)| number);
        match done {
            Ok(()) => self.answered = self.answered.max(number),
            // The library went (FUNCTION FLUSH), or another server answers: prepare it, link anew.
            Err(fault @ (Fault::Missing | Fault::Demoted)) => return Err(Loss::Refused(fault.text())),
            Err(fault) => tracing::debug!(error = fault.text(), "no beacon went out"),
        }
        Ok(())
    }

    fn look_for_silence(&mut self) -> Result<(), Loss> {
        if self.pushes.overrun.load(Ordering::Relaxed) {
            return Err(Loss::Overrun);
        }
        let is_late = |since: Instant| since.elapsed() >= SILENCE;
        // Only when all that has arrived was looked at: slowness here is no silence there.
        if !self.pushes.rx.is_empty() {
            return Ok(());
        }
        self.missing = if self.answered > self.seen { self.missing.or_else(|| Some(Instant::now())) } else { None };
        if self.missing.is_some_and(is_late) {
            return Err(Loss::Deaf);
        }
        let waiting = [self.command.as_ref().map(|(since, _)| *since), self.ping.as_ref().map(|(since, _)| *since)];
        if waiting.into_iter().flatten().any(is_late) { Err(Loss::Silent) } else { Ok(()) }
    }

    fn skip(&self) -> Result<(), Loss> {
        self.s.stats.skipped.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }
}

/// The stored future's end; pending where there is none.
async fn stored<T, R>(slot: &mut Option<(T, BoxFuture<'static, R>)>) -> R {
    match slot {
        Some((_, future)) => future.await,
        None => std::future::pending().await,
    }
}

/// Waits until the link was whole once.
pub(crate) async fn wait_ready(mut start: watch::Receiver<Start>) -> Result<(), StartError> {
    let decided = start.wait_for(|s| !matches!(s, Start::Waiting)).await;
    match decided.as_deref() {
        Ok(Start::Refused(error)) => Err(error.clone()),
        Ok(_) => Ok(()),
        Err(_) => Err(StartError::Unreachable("the backplane has stopped".to_owned())),
    }
}

/// `timeout` with the error that a caller can show.
pub(crate) async fn within<T>(
    limit: Duration,
    what: impl Future<Output = Result<T, StartError>>,
) -> Result<T, StartError> {
    timeout(limit, what).await.unwrap_or_else(|_| Err(StartError::Unreachable("no answer in time".to_owned())))
}
