//! The one pub/sub link. Decides when a subscription stands, when the link is whole, deaf or
//! lost, and that the hub hears of all that in the order of the wire. What a loss means for
//! sessions the hub decides.
//!
//! - At most one SUBSCRIBE or UNSUBSCRIBE is under way, so that a confirmation can never be
//!   overtaken by a later command for the same channel.
//! - The node's own beacon goes out over another connection and must come back over this one:
//!   that tells a quiet link from a deaf one, and a link to another server from the right one.
//! - It is read on while the hub is slow, up to a bound; what is more ends the link (the log has what
//!   it missed).

use std::collections::{HashSet, VecDeque};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use futures_util::future::BoxFuture;
use hub::backplane::{FromLink, MAX_TELL_BYTES};
use hub::channel::Channel;
use hub::cursor::EventId;
use tokio::sync::mpsc::error::TrySendError;
use tokio::sync::{mpsc, watch};
use tokio::time::{Instant, MissedTickBehavior, timeout};

use crate::LinkStats;
use crate::dial::{Backoff, Fault, SharedDialer};
use crate::keys::Keys;
use crate::lane::{Again, Lane};
use crate::message;
use crate::schema::{Schema, StartError};
use crate::wants::{Touched, Wants};
use crate::wire::{Broken, Input, Output, Said};

/// Channels in one SUBSCRIBE. Measured: 10,000 one by one take 521 ms, in chunks of 500 37 ms.
const CHUNK: usize = 500;
/// Bytes that may have arrived and wait for the hub, unless messages may be longer. As much as Redis itself
/// keeps for a subscriber that does not read (its default `client-output-buffer-limit pubsub`).
const MAX_WAITING: usize = 32 << 20;
/// Messages taken in one turn; then everything else of the link has its own.
const MESSAGES_A_TURN: usize = 64;
/// How often a beacon and a PING go out.
const PULSE: Duration = Duration::from_secs(1);
/// A PING, a SUBSCRIBE or a beacon that is not answered for so long ends the link.
const SILENCE: Duration = Duration::from_secs(3);
/// How often silence is looked for.
const TICK: Duration = Duration::from_millis(250);
/// Whoever looks so late has stood still itself, and what came meanwhile lies in the socket.
const LATE_LOOK: Duration = Duration::from_secs(1);

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
    #[error("{0}")]
    Broken(String),
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

impl From<Broken> for Loss {
    fn from(broken: Broken) -> Self {
        Loss::Broken(Fault::from(broken).text())
    }
}

impl Supervisor {
    /// Makes link after link until the hub is gone.
    pub(crate) async fn run(self, mut backoff: Backoff) {
        loop {
            let (loss, lived) = match self.connect().await {
                Ok((input, output)) => {
                    let since = Instant::now();
                    let loss = Link::new(&self, output).run(input).await;
                    (loss, since.elapsed())
                }
                Err(error) => {
                    if self.out.is_closed() {
                        return;
                    }
                    self.wants.forget();
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

    async fn connect(&self) -> Result<(Input, Output), StartError> {
        self.schema.prepare().await?;
        self.dialer.link(self.max_payload()).await.map_err(StartError::from)
    }

    /// Bytes that may have arrived and wait for the hub: a message of the greatest length, in any case.
    fn max_waiting(&self) -> usize {
        MAX_WAITING.max(2 * self.max_payload())
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
    output: Output,
    phase: Phase,
    /// Wanted at the beginning, or the link's own, and not confirmed yet.
    owed: HashSet<String>,
    joins: VecDeque<Channel>,
    leaves: VecDeque<Channel>,
    own: Vec<String>,
    /// The one SUBSCRIBE or UNSUBSCRIBE under way: since when, and how many answers it waits for.
    command: Option<(Instant, usize)>,
    /// Which of the two was sent last.
    last: Direction,
    /// The PING under way: since when, and the newest beacon that had gone out before it.
    ping: Option<(Instant, u64)>,
    next_ping: Instant,
    beacon: Option<(u64, BoxFuture<'static, Result<(), Fault>>)>,
    next_beacon: Instant,
    /// For the hub, before anything that arrives from now on.
    to_tell: VecDeque<FromLink>,
    /// Tells this link's beacons from an earlier link's and from a namesake's.
    name: String,
    sent: u64,
    answered: u64,
    seen: u64,
    /// This beacon and those before it stand, on the wire, before a PONG that has arrived.
    passed: u64,
    /// The oldest answered beacon that is missing, and since when.
    missing: Option<(u64, Instant)>,
    /// When something arrived last.
    heard: Instant,
}

/// Which way a channel goes.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Direction {
    Join,
    Leave,
}

/// Is there more to hand over?
#[derive(Clone, Copy, PartialEq, Eq)]
enum Behind {
    /// All that arrived was looked at.
    No,
    /// The hub has no room now, or everything else has a turn first.
    Yes,
}

impl<'a> Link<'a> {
    fn new(s: &'a Supervisor, output: Output) -> Self {
        s.wants.take_beacon();
        s.wants.take_relink();
        let joins: VecDeque<_> = s.wants.begin().into();
        let own = vec![s.keys.ctl(), s.keys.node(&s.node), s.keys.beacon(&s.node), s.keys.beacon(&s.life)];
        let owed = joins.iter().map(|c| s.keys.live(c)).chain(own.iter().cloned()).collect();
        let now = Instant::now();
        Self {
            s,
            output,
            phase: Phase::Joining,
            owed,
            joins,
            leaves: VecDeque::new(),
            own,
            command: None,
            last: Direction::Leave,
            ping: None,
            next_ping: now + PULSE,
            beacon: None,
            next_beacon: now,
            to_tell: VecDeque::new(),
            name: format!("{:016x}", s.stats.dice.bits()),
            sent: 0,
            answered: 0,
            seen: 0,
            passed: 0,
            missing: None,
            heard: now,
        }
    }

    async fn run(mut self, mut input: Input) -> Loss {
        let mut tick = tokio::time::interval(TICK);
        tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            if let Err(loss) = self.step(&mut input, &mut tick).await {
                return loss;
            }
        }
    }

    /// Hands over what there is, then waits for one thing to happen. Every arm is cancel-safe:
    /// buffers, bells and timers keep what they have, the beacon is polled where it is stored.
    async fn step(&mut self, input: &mut Input, tick: &mut tokio::time::Interval) -> Result<(), Loss> {
        self.look_at_wants()?;
        self.send_what_is_due();
        let behind = self.hand_over(input)?;
        if input.n_waiting() > self.s.max_waiting() {
            return Err(Loss::Overrun);
        }
        let is_flushed = self.output.is_flushed();
        tokio::select! {
            room = self.s.out.reserve(), if behind == Behind::Yes => room.map(drop).map_err(|_| Loss::NobodyListens),
            filled = input.fill() => {
                self.heard = Instant::now();
                filled.map_err(Loss::from)
            }
            flushed = self.output.flush(), if !is_flushed => flushed.map_err(Loss::from),
            done = stored(&mut self.beacon) => self.beacon_answered(done),
            () = self.s.wants.changed() => Ok(()),
            due = tick.tick() => {
                // Only when all that has arrived was looked at: slowness here is no silence there.
                let may_look = behind == Behind::No && due.elapsed() < LATE_LOOK;
                if may_look { self.look_for_silence() } else { Ok(()) }
            }
        }
    }

    /// Tells the hub what there is to tell and what has arrived, as far as it has room.
    fn hand_over(&mut self, input: &mut Input) -> Result<Behind, Loss> {
        for _ in 0..MESSAGES_A_TURN {
            let room = match self.s.out.try_reserve() {
                Ok(room) => room,
                Err(TrySendError::Full(())) => return Ok(Behind::Yes),
                Err(TrySendError::Closed(())) => return Err(Loss::NobodyListens),
            };
            if let Some(told) = self.to_tell.pop_front() {
                room.send(told);
                continue;
            }
            let Some(said) = input.next()? else { return Ok(Behind::No) };
            if let Some(told) = self.take(said)? {
                room.send(told);
            }
        }
        Ok(Behind::Yes)
    }

    fn look_at_wants(&mut self) -> Result<(), Loss> {
        if self.s.wants.take_relink() {
            return Err(Loss::Asked);
        }
        for Touched { channel, is_wanted, stands } in self.s.wants.touched() {
            match (is_wanted, stands) {
                (true, false) => self.joins.push_back(channel),
                (false, true) => self.leaves.push_back(channel),
                // An UNSUBSCRIBE that waits to be sent is dropped when its turn comes.
                (true, true) => self.to_tell.push_back(FromLink::Confirmed(channel)),
                (false, false) => drop(self.owed.remove(&self.s.keys.live(&channel))),
            }
        }
        Ok(())
    }

    fn send_what_is_due(&mut self) {
        let now = Instant::now();
        if self.command.is_none() {
            self.command = self.next_command().map(|n_names| (now, n_names));
        }
        if self.ping.is_none() && now >= self.next_ping {
            self.next_ping = now + PULSE;
            self.output.command("PING", &[""; 0]);
            self.ping = Some((now, self.answered));
        }
        if self.phase == Phase::Joining && self.owed.is_empty() {
            self.owed = HashSet::new();
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

    /// Sends the next chunk to join or to leave, as it stands now; returns how many names are in it. In turns, once
    /// the link is whole: what nobody wants any more would stay for as long as others keep being joined.
    fn next_command(&mut self) -> Option<usize> {
        let is_leaves_turn = self.phase != Phase::Joining && self.last == Direction::Join;
        let mut turns = [Direction::Join, Direction::Leave];
        if is_leaves_turn {
            turns.reverse();
        }
        for direction in turns {
            let (command, names) = match direction {
                Direction::Join => ("SUBSCRIBE", self.names_to_join()),
                Direction::Leave => ("UNSUBSCRIBE", self.names_to_leave()),
            };
            if !names.is_empty() {
                self.output.command(command, &names);
                self.last = direction;
                return Some(names.len());
            }
        }
        None
    }

    fn names_to_join(&mut self) -> Vec<String> {
        let mut names = std::mem::take(&mut self.own);
        while names.len() < CHUNK
            && let Some(channel) = self.joins.pop_front()
        {
            let name = self.s.keys.live(&channel);
            if self.s.wants.is_missing(&channel) {
                names.push(name);
            } else if !self.s.wants.is_wanted(&channel) {
                self.owed.remove(&name);
            }
        }
        give_back(&mut self.joins);
        names
    }

    fn names_to_leave(&mut self) -> Vec<String> {
        let mut names = Vec::new();
        while names.len() < CHUNK
            && let Some(channel) = self.leaves.pop_front()
        {
            if self.s.wants.leaves(&channel) {
                names.push(self.s.keys.live(&channel));
            }
        }
        give_back(&mut self.leaves);
        names
    }

    /// What the server says, and what the hub is to be told of it.
    fn take(&mut self, said: Said<'_>) -> Result<Option<FromLink>, Loss> {
        match said {
            Said::Message { name, payload } => match std::str::from_utf8(name) {
                Ok(name) => Ok(self.heard(name, payload)),
                Err(_) => Ok(None),
            },
            Said::TooLong => Ok(self.skip()),
            Said::Subscribed(name) => {
                self.answered_one();
                Ok(std::str::from_utf8(name).ok().and_then(|name| self.joined(name)))
            }
            Said::Unsubscribed => {
                self.answered_one();
                Ok(None)
            }
            Said::Pong => {
                self.passed = self.ping.take().map_or(self.passed, |(_, newest)| newest);
                Ok(None)
            }
            Said::Error(line) => Err(Loss::Refused(Fault::of_line(line).text())),
            Said::Other => Ok(None),
        }
    }

    fn answered_one(&mut self) {
        self.command = self.command.and_then(|(since, n)| (n > 1).then(|| (since, n - 1)));
    }

    fn joined(&mut self, name: &str) -> Option<FromLink> {
        self.owed.remove(name);
        match self.s.wants.joined(self.s.keys.channel_of(name)?)? {
            Ok(channel) => Some(FromLink::Confirmed(channel)),
            Err(channel) => {
                self.leaves.push_back(channel);
                None
            }
        }
    }

    fn heard(&mut self, name: &str, payload: &[u8]) -> Option<FromLink> {
        if let Some(channel) = self.s.keys.channel_of(name) {
            let channel = self.s.wants.standing(channel)?;
            return match message::event(channel, payload, self.s.max_data) {
                Some(event) => Some(FromLink::Event(event)),
                None => self.skip(),
            };
        }
        if name == self.s.keys.ctl() || name == self.s.keys.node(&self.s.node) {
            return match message::control(payload) {
                Some(said) => said,
                None => self.skip(),
            };
        }
        match message::beacon(payload) {
            Some((position, nonce)) => self.beacon_seen(position, nonce),
            None => self.skip(),
        }
    }

    fn beacon_seen(&mut self, position: EventId, nonce: &str) -> Option<FromLink> {
        let number = nonce.strip_prefix(&*self.name)?.strip_prefix('.')?.parse().ok()?;
        self.seen = self.seen.max(number);
        match self.phase {
            Phase::Joining => None,
            Phase::Calling(first) if number < first => None,
            Phase::Calling(_) => {
                self.phase = Phase::Up;
                self.s.stats.n_ups.fetch_add(1, Ordering::Relaxed);
                self.s.stats.pubsub_up.store(true, Ordering::Relaxed);
                self.s.stats.deaf.store(false, Ordering::Relaxed);
                self.s.stats.set_trouble(None);
                self.s.start.send_replace(Start::Ready);
                Some(FromLink::Up(position))
            }
            Phase::Up => Some(FromLink::Beacon(position)),
        }
    }

    fn beacon_answered(&mut self, done: Result<(), Fault>) -> Result<(), Loss> {
        let number = self.beacon.take().map_or(0, |(number, _)| number);
        match done {
            Ok(()) => self.answered = self.answered.max(number),
            // The library went (FUNCTION FLUSH), or another server answers: prepare it, link anew.
            Err(fault @ (Fault::Missing | Fault::Demoted)) => return Err(Loss::Refused(fault.text())),
            Err(fault) if self.phase == Phase::Up => tracing::debug!(error = fault.text(), "no beacon went out"),
            // Until one has, the node waits for it.
            Err(fault) => {
                let trouble = format!("no beacon goes out: {}", fault.text());
                if self.s.stats.set_trouble(Some(trouble)) {
                    tracing::warn!(
                        error = fault.text(),
                        "the pub/sub link stands, but no beacon goes out, trying again for ever"
                    );
                }
            }
        }
        Ok(())
    }

    /// A beacon is not missing as long as what arrives may stand before it: a PING that went out after it was
    /// answered tells, for its PONG stands behind it. And who is being heard is not silent.
    fn look_for_silence(&mut self) -> Result<(), Loss> {
        let is_late = |since: Instant| since.elapsed() >= SILENCE;
        self.missing = match self.missing {
            Some((number, since)) if self.seen < number => Some((number, since)),
            _ => (self.answered > self.seen).then(|| (self.answered, Instant::now())),
        };
        if self.missing.is_some_and(|(number, since)| is_late(since) && self.passed >= number) {
            return Err(Loss::Deaf);
        }
        let waiting = [self.command.map(|(since, _)| since), self.ping.map(|(since, _)| since)];
        let is_silent = waiting.into_iter().flatten().any(|since| is_late(since.max(self.heard)));
        if is_silent { Err(Loss::Silent) } else { Ok(()) }
    }

    fn skip(&self) -> Option<FromLink> {
        self.s.stats.skipped.fetch_add(1, Ordering::Relaxed);
        None
    }
}

/// The room of a crowd is given back once all of it was sent.
fn give_back(queue: &mut VecDeque<Channel>) {
    if queue.is_empty() {
        *queue = VecDeque::new();
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
