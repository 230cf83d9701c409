//! One client's session: what it may still be sent, and when it must go.
//!
//! Decides what becomes of a live event (`offer`), when a sign of life is overdue, when the session
//! leaves (`leave`) and with which words. Knows no socket: the edge's driver calls `attend`,
//! `progress`, `heard` and `gone`, and lends a way to write at once; the hub's wheel calls
//! `on_time`. What a client asks for is `inbound`'s, how history is replayed is `attach`'s.

use std::net::IpAddr;
use std::sync::{Arc, Mutex, MutexGuard};
use std::task::Waker;
use std::time::Duration;

use tokio::sync::Notify;
use tokio::time::Instant;

use crate::auth::Identity;
use crate::balance::pick::Candidate;
use crate::channel::Channel;
use crate::clock::{Dice, Moment};
use crate::close::{CloseReason, PlannedCodes};
use crate::cursor::EventId;
use crate::event::{Encoded, LAST_CHUNK, Wire, frame};
use crate::inbound::Asks;
use crate::limit::Seat;
use crate::message::{self, Backoff, Message, Resume};
use crate::outbox::{Batch, Item, Outbox, Outlet};
use crate::plugin::Admission;
use crate::quota::Place;
use crate::recycle::{Aged, Verdict};
use crate::wheel::Tick;

mod id;
mod leave;
mod offer;
mod subs;

pub use id::SessionId;
pub(crate) use offer::{Held, Offer, Rest, Route};
pub(crate) use subs::{Sub, SubStage, Subs};

/// What is fixed when a session opens.
#[derive(Clone, Debug)]
pub struct SessionInfo {
    /// Random, unique over the fleet.
    pub id: SessionId,
    /// Who it is. `auth` may replace it; this is the identity at opening.
    pub identity: Arc<Identity>,
    /// The transport.
    pub wire: Wire,
    /// The client's address.
    pub address: IpAddr,
    /// When it opened.
    pub opened_at: Instant,
    /// The contract's protocol, or a plugin's own.
    pub admission: Admission,
}

/// What every session of a node obeys.
#[derive(Clone, Debug)]
pub struct SessionConfig {
    /// `GATEWAY_OUTBOX_BYTES`: more than this never waits for a client, the coming event counted.
    pub outbox_bytes: usize,
    /// `GATEWAY_WRITE_TIMEOUT`: bytes that the kernel does not take for so long end the session.
    pub write_timeout: Duration,
    /// `GATEWAY_CLOSE_TIMEOUT`: from `bye` to the cut.
    pub close_timeout: Duration,
    /// `GATEWAY_HEARTBEAT`.
    pub heartbeat: Duration,
    /// `GATEWAY_HEARTBEAT_TIMEOUT`: after a ping without any sign of life.
    pub heartbeat_timeout: Duration,
    /// A position is sent when no id went out for so long: min(history TTL / 4, 5 min).
    pub position_every: Duration,
    /// `GATEWAY_CLIENT_RATE`, messages a second.
    pub client_rate: f64,
    /// `GATEWAY_CLIENT_BURST`, messages.
    pub client_burst: f64,
    /// Close codes of the planned endings.
    pub planned: PlannedCodes,
    /// What clients are told about coming back.
    pub reconnect: Backoff,
}

/// One client's session. The lock is held for a few lines at a time, never across a wait, and
/// never together with another.
pub struct Session {
    /// What is fixed.
    pub info: SessionInfo,
    state: Mutex<State>,
}

/// How far a session's life has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stage {
    /// `hello` is out, history is being read; live events are held back.
    Opening,
    /// `ready` is out.
    Live,
    /// A plugin's own protocol: no channels, no ready.
    Raw,
    /// `bye` is queued; nothing follows it.
    Closing,
    /// Over; the books are closed.
    Gone,
}

/// What a driver is to do next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Attention {
    /// Write the batch; then wait.
    Serve,
    /// Write the batch, then end: wait for the peer at most until `on_time` says `Cut`.
    Close,
    /// Drop the socket now.
    Cut,
}

/// Whether it is to end, beside its age's and its token's end.
enum Exit {
    /// Nobody asked it to.
    None,
    /// It was asked to leave then.
    Asked(Moment, CloseReason),
    /// It does, and is cut then.
    Ending(CloseReason, Moment),
    /// Its socket is to be dropped.
    Cut(CloseReason),
}

/// Why the end of its age may not be its end yet. Few have one.
#[derive(Default)]
struct PutOff {
    /// The client asked not to be moved until then.
    busy_until: Option<Moment>,
    /// By how much the end of its age was put off, extensions aside.
    postponed: Duration,
    is_extended: bool,
}

/// In this order: what a delivery touches comes first and stands together. Cache misses are most of
/// what is ours in a delivery to one of thousands of sessions (profiled). A node has tens of thousands
/// of these, so what is seldom there stands behind a pointer, and no field leaves a hole.
#[repr(C)]
pub(crate) struct State {
    pub stage: Stage,
    /// The driver must throw away what it has not begun to write.
    discard: bool,
    has_written: bool,
    /// How the cursor was honoured, once `ready` is out.
    pub resumed: Option<Resume>,
    /// Tokens sent in the session so far, and which of them is in force: their checks may end in
    /// another order than they began, and the last one counts.
    pub n_auths: u32,
    /// Where what nothing waits before goes at once; lent by the driver.
    outlet: Option<Arc<dyn Outlet>>,
    /// Every logged event ≤ this on the session's channels has been queued or lies before its
    /// cursor. `ZERO` until history was read.
    pub position: EventId,
    id_sent_at: Moment,
    /// The last event, with an id or without, or message in either direction; a position is none.
    active_at: Moment,
    pub outbox: Outbox,
    pub subs: Subs,
    // From here on: not touched by a delivery that the kernel takes at once.
    /// The driver, where it waits.
    waker: Option<Waker>,
    blocked_since: Option<Moment>,
    /// Live events, while the history before them is read: of all channels at the opening, then of the
    /// one that is being joined.
    pub held: Option<Box<Held>>,
    pub identity: Arc<Identity>,
    pub auth_in_force: u32,
    /// The wheel's tick at which this session is looked at next.
    pub scheduled: Tick,
    /// What the client asked for and has not got yet.
    pub asks: Option<Box<Asks>>,
    /// Told whenever the outbox drained, the stage changed or the session ended; exists only while
    /// somebody reads history for this session.
    progress: Option<Arc<Notify>>,
    exit: Exit,
    age_at: Option<Moment>,
    token_at: Option<Moment>,
    expiring_at: Option<Moment>,
    put_off: Option<Box<PutOff>>,
    next_beat: Moment,
    alive_by: Option<Moment>,
    /// When the client may send a whole burst again; later than a burst takes: it has sent too much.
    burst_at: Moment,
    /// Held until the session's end, so that the books balance whatever is cancelled where.
    pub seat: Option<Seat>,
    /// Its place among its user's sessions, where those are limited: given back as soon as the
    /// session begins to end.
    place: Option<Box<Place>>,
}

/// The deadlines a session is born with.
#[derive(Clone, Copy, Debug, Default)]
pub struct Deadlines {
    /// End of its age.
    pub age_at: Option<Instant>,
    /// The token's end, drawn.
    pub token_at: Option<Instant>,
    /// When the client is told that its token ends.
    pub expiring_at: Option<Instant>,
}

/// What is left of a session that is over.
pub(crate) struct Buried {
    pub reason: CloseReason,
    /// It did not go by itself: it was waited for and then cut.
    pub was_cut: bool,
    /// Where it was listening.
    pub subs: Vec<(Channel, usize)>,
}

impl Session {
    pub(crate) fn new(
        info: SessionInfo,
        seat: Option<Seat>,
        deadlines: Deadlines,
        config: &SessionConfig,
        dice: &Dice,
    ) -> Self {
        let now = info.opened_at;
        let stage = match info.admission {
            Admission::Standard => Stage::Opening,
            Admission::Raw => Stage::Raw,
        };
        // The first beat is drawn, so that a crowd that came together does not beat together.
        let next_beat = (now + dice.between(config.heartbeat / 2, config.heartbeat)).into();
        let now = now.into();
        let state = State {
            stage,
            discard: false,
            has_written: false,
            resumed: None,
            n_auths: 0,
            outlet: None,
            subs: Subs::new(),
            position: EventId::ZERO,
            id_sent_at: now,
            active_at: now,
            outbox: Outbox::default(),
            waker: None,
            blocked_since: None,
            held: (stage == Stage::Opening).then(|| Box::new(Held::new())),
            identity: info.identity.clone(),
            auth_in_force: 0,
            scheduled: Tick::MAX,
            asks: None,
            progress: None,
            exit: Exit::None,
            age_at: deadlines.age_at.map(Moment::from),
            token_at: deadlines.token_at.map(Moment::from),
            expiring_at: deadlines.expiring_at.map(Moment::from),
            put_off: None,
            next_beat,
            alive_by: None,
            burst_at: now,
            seat,
            place: None,
        };
        Self { info, state: Mutex::new(state) }
    }

    /// Holds the place until it begins to end; a session that does already gives it back.
    pub(crate) fn take_place(&self, place: Option<Box<Place>>) {
        let mut state = self.lock();
        if !state.is_over() {
            state.place = place;
        }
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("no panic while a session is held")
    }

    /// Has what a delivery reads first brought near. Of several sessions in a row the processor waits
    /// for all at once, where it would wait for each alone when it comes to it.
    pub(crate) fn fetch(&self) {
        std::hint::black_box((self.info.wire, self.state.is_poisoned()));
    }

    /// Has the driver attend to it again. Nobody calls it who holds the state.
    pub(crate) fn wake(&self) {
        let waker = self.lock().waker.take();
        if let Some(waker) = waker {
            waker.wake();
        }
    }

    /// Was it there already when something of this age was published? What is older was replayed:
    /// nobody was late with it.
    pub(crate) fn was_open_for(&self, age: Duration, now: Instant) -> bool {
        age <= now.saturating_duration_since(self.info.opened_at)
    }

    /// Queues a message of this session's own and wakes its driver. Nothing follows a `bye`: an
    /// answer that comes after it is dropped.
    pub(crate) fn say(&self, m: &Message) {
        let framed = m.on(self.info.wire);
        {
            let mut state = self.lock();
            if state.is_over() {
                return;
            }
            state.push_own(framed, self.info.wire);
        }
        self.wake();
    }

    /// As `say`, of what is true in one moment only: `what` sees the session and its position, no event comes
    /// between that and the message, and it may change the session with it. `node` is the node's position,
    /// read before. Of a session that is over nothing is asked.
    pub(crate) fn tell(&self, node: EventId, what: impl FnOnce(&mut State, Option<EventId>) -> Option<Message>) {
        let mut state = self.lock();
        if state.is_over() {
            return;
        }
        let position = (state.position > EventId::ZERO).then(|| state.position_with(node));
        let Some(m) = what(&mut state, position) else { return };
        state.push_own(m.on(self.info.wire), self.info.wire);
        drop(state);
        self.wake();
    }

    // ---- the driver's side

    /// Registers the driver and hands over what is to be written, if `batch` is empty.
    pub fn attend(&self, waker: &Waker, batch: &mut Batch) -> Attention {
        let mut state = self.lock();
        if !state.waker.as_ref().is_some_and(|known| known.will_wake(waker)) {
            state.waker = Some(waker.clone());
        }
        if state.is_cut() || state.stage == Stage::Gone {
            return Attention::Cut;
        }
        // Before the first byte is out, the batch is the response head and our first words: without
        // them nothing that follows could be read.
        if std::mem::take(&mut state.discard) && state.has_written {
            let n = batch.discard_unbegun(self.info.wire);
            state.outbox.written(n);
        }
        if batch.is_empty() && !state.outbox.is_empty() {
            *batch = state.outbox.take();
        }
        match state.exit {
            Exit::Ending(..) | Exit::Cut(_) => Attention::Close,
            Exit::None | Exit::Asked(..) => Attention::Serve,
        }
    }

    /// The kernel took `n` bytes at `now`; `is_blocked` says that it wants no more for the moment.
    /// Returns whether the wheel must look again (a write deadline began).
    pub fn progress(&self, n: usize, is_blocked: bool, now: Instant) -> bool {
        let mut state = self.lock();
        state.outbox.written(n);
        state.has_written |= n > 0;
        let began = is_blocked && (n > 0 || state.blocked_since.is_none());
        if let (1.., Some(since), Some(by)) = (n, state.blocked_since, state.alive_by) {
            // The ping may have stood behind what the kernel did not take: a peer that reads slowly has not had it.
            state.alive_by = Some(by + Moment::from(now).since(since));
        }
        state.blocked_since = match (is_blocked, n) {
            (false, _) => None,
            (true, 0) => state.blocked_since.or(Some(now.into())),
            (true, _) => Some(now.into()),
        };
        if n > 0 && state.outbox.bytes() == 0 {
            state.tell_progress();
        }
        began
    }

    /// Bytes came from the client: a sign of life.
    pub fn heard(&self) {
        self.lock().alive_by = None;
    }

    /// Queues a frame of this session's own (a pong, a plugin's answer). It counts like an event:
    /// see `is_overfull`.
    pub fn send(&self, framed: bytes::Bytes) {
        let mut state = self.lock();
        if state.ending().is_none() {
            state.push_own(framed, self.info.wire);
        }
        drop(state);
        self.wake();
    }

    /// Does more wait than `cap`? Then the client does not read what it asked for.
    pub fn is_overfull(&self, cap: usize) -> bool {
        self.lock().outbox.bytes() > cap
    }

    /// Ends the session: queues `bye` and the close (or cuts). The first reason counts; returns
    /// whether it was this one. `node` is the node's position (for `bye.id`).
    pub fn end(&self, reason: CloseReason, node: EventId, config: &SessionConfig, dice: &Dice) -> bool {
        let (low, high) = reason.after_range(config.reconnect.first_max);
        let after = dice.between(low, high);
        let ended = self.lock().end(&self.info, reason, after, node, config);
        if ended {
            self.wake();
        }
        ended
    }

    /// The client closed (WebSocket): echo its code, then end.
    pub fn client_closed(&self, code: Option<u16>, config: &SessionConfig) {
        let mut state = self.lock();
        if state.ending().is_some() {
            return;
        }
        let payload = code.map(u16::to_be_bytes);
        state.push_own(frame(0x8, payload.as_ref().map_or(&[], |p| p)), self.info.wire);
        state.close(CloseReason::Client, Instant::now() + config.close_timeout);
        drop(state);
        self.wake();
    }

    /// Drops the socket; what was not said stays unsaid.
    pub(crate) fn cut(&self, reason: CloseReason) {
        self.lock().cut(reason);
        self.wake();
    }

    /// Why it ended or is ending.
    pub fn ending(&self) -> Option<CloseReason> {
        self.lock().ending()
    }

    // ---- the wheel's side

    /// What is due at `now`; `aged` decides about an age that is over. Returns the next instant at
    /// which the session must be looked at.
    pub(crate) fn on_time(
        &self,
        now: Instant,
        node: EventId,
        config: &SessionConfig,
        dice: &Dice,
        aged: impl FnOnce(&Aged) -> Verdict,
    ) -> Instant {
        let due = self.lock().due(now.into(), &self.info, config);
        match due {
            Some(Due::Cut(reason)) => {
                self.lock().cut(reason);
                self.wake();
            }
            Some(Due::Leave(reason)) => {
                self.end(reason, node, config, dice);
            }
            Some(Due::Aged(one)) => match aged(&one) {
                Verdict::Leave => {
                    self.end(CloseReason::Recycle, node, config, dice);
                }
                put_off => {
                    self.lock().aged(put_off);
                    self.beat(now.into(), node, config);
                }
            },
            None => self.beat(now.into(), node, config),
        }
        self.next_due(now, config)
    }

    fn beat(&self, now: Moment, node: EventId, config: &SessionConfig) {
        let mut state = self.lock();
        if state.on_beat(now, &self.info, node, config) {
            drop(state);
            self.wake();
        }
    }

    /// What is known of it when some are to be moved; `None` where it is leaving already.
    pub(crate) fn candidate(&self) -> Option<Candidate> {
        self.lock().candidate(self.info.opened_at)
    }

    /// When the session must be looked at next.
    pub(crate) fn next_due(&self, now: Instant, config: &SessionConfig) -> Instant {
        self.lock().next_due(now.into(), config).into()
    }

    /// Waits until `done` says so; returns at once where it does.
    ///
    /// # Cancel safety
    /// Nothing is lost.
    pub(crate) async fn until(&self, done: impl Fn(&mut State) -> bool) {
        loop {
            // Under one lock: what is told between a look and the wait would be told to nobody.
            let told = {
                let mut state = self.lock();
                if done(&mut state) {
                    return;
                }
                state.progress().notified_owned()
            };
            told.await;
        }
    }
}

enum Due {
    Cut(CloseReason),
    Leave(CloseReason),
    /// Its age is over.
    Aged(Aged),
}

impl State {
    pub fn push_own(&mut self, framed: bytes::Bytes, wire: Wire) {
        if self.stage != Stage::Gone {
            self.outbox.push(Item::own(framed), wire);
        }
    }

    /// Queues an event with an id, or an ephemeral one, whatever the cap says (replay).
    pub fn push_event(&mut self, event: Arc<Encoded>, wire: Wire, now: impl Into<Moment>) {
        self.note_event(&event, now.into());
        self.outbox.push(Item::Event(event), wire);
    }

    /// The event is queued, or with the kernel.
    fn note_event(&mut self, event: &Encoded, now: Moment) {
        self.active_at = now;
        if let Some(id) = event.event.id {
            self.position = self.position.max(id);
            self.id_sent_at = now;
        }
    }

    pub fn is_over(&self) -> bool {
        self.ending().is_some() || self.stage == Stage::Gone
    }

    fn is_cut(&self) -> bool {
        matches!(self.exit, Exit::Cut(_))
    }

    fn ending(&self) -> Option<CloseReason> {
        match self.exit {
            Exit::Ending(reason, _) | Exit::Cut(reason) => Some(reason),
            Exit::None | Exit::Asked(..) => None,
        }
    }

    /// The session's position: what every message that carries one says.
    pub fn position_with(&mut self, node: EventId) -> EventId {
        // Every event ≤ the node's position was dispatched before it was read, so a live session may
        // claim it, and must then never deliver anything at or below it. While history is still
        // being replayed only what was replayed may be claimed; and of a log that was reset the
        // node knows before the session was told.
        if self.stage == Stage::Live && node.incarnation() == self.position.incarnation() {
            self.position = self.position.max(node);
        }
        self.position
    }

    fn end(
        &mut self,
        info: &SessionInfo,
        reason: CloseReason,
        after: Duration,
        node: EventId,
        config: &SessionConfig,
    ) -> bool {
        if self.is_over() {
            return false;
        }
        if matches!(reason, CloseReason::Unresponsive | CloseReason::Lost | CloseReason::Client) {
            self.cut(reason);
            return true;
        }
        let mut id = match self.stage {
            Stage::Live => Some(self.position_with(node)),
            Stage::Opening if self.position > EventId::ZERO => Some(self.position),
            _ => None,
        };
        if reason == CloseReason::Slow {
            // What waits is thrown away, so the position would claim too much: the client resumes
            // from the last id that reached it.
            self.outbox.discard(info.wire);
            self.discard = true;
            id = None;
        }
        if info.admission == Admission::Standard {
            let bye = message::bye(reason, config.planned, after, id).on(info.wire);
            self.push_own(bye, info.wire);
        }
        match (info.wire, reason.code(config.planned)) {
            (Wire::Ws, Some(code)) => {
                let mut payload = code.to_be_bytes().to_vec();
                payload.extend_from_slice(reason.word().as_bytes());
                self.push_own(frame(0x8, &payload), info.wire);
            }
            (Wire::Ws, None) => {}
            (Wire::Sse, _) => self.push_own(bytes::Bytes::from_static(LAST_CHUNK), info.wire),
        }
        self.close(reason, Instant::now() + config.close_timeout);
        true
    }

    /// The one way into an ending, whatever the reason.
    fn close(&mut self, reason: CloseReason, close_by: Instant) {
        self.stage = Stage::Closing;
        self.exit = Exit::Ending(reason, close_by.into());
        self.held = None;
        self.asks = None;
        self.place = None;
        self.tell_progress();
    }

    fn cut(&mut self, reason: CloseReason) {
        let first = self.ending();
        if first.is_none() {
            self.close(reason, Instant::now());
        }
        self.exit = Exit::Cut(first.unwrap_or(reason));
    }

    /// The books are closed. `None` where they were already.
    pub fn bury(&mut self, fallback: CloseReason) -> Option<Buried> {
        if self.stage == Stage::Gone {
            return None;
        }
        let (reason, was_cut) = (self.ending().unwrap_or(fallback), self.is_cut());
        self.close(reason, Instant::now());
        self.stage = Stage::Gone;
        self.seat = None;
        self.outlet = None;
        self.outbox = Outbox::default();
        let subs = std::mem::take(&mut self.subs);
        let subs = subs.into_iter().flatten().map(Sub::into_parts).collect();
        Some(Buried { reason, was_cut, subs })
    }

    fn progress(&mut self) -> Arc<Notify> {
        self.progress.get_or_insert_with(Arc::default).clone()
    }

    pub fn tell_progress(&mut self) {
        // Dropped once told: whoever still waits takes a new one.
        if let Some(progress) = self.progress.take() {
            progress.notify_waiters();
        }
    }
}

/// A client sends more than it may.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Flood {
    /// Refused; there is room after this.
    Over(Duration),
    /// A whole burst in debt: the session ends.
    Far,
}

#[cfg(test)]
mod tests;
