//! The node: its sessions, its phase, its ways in for the edge, the API and plugins.

use std::net::IpAddr;
use std::panic::AssertUnwindSafe;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, RwLock};
use std::time::Duration;

use futures_util::FutureExt;
use tokio::runtime::Handle;
use tokio::sync::{Notify, Semaphore, watch};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tracing::Instrument;

use crate::attach;
use crate::auth::{Identity, Verifier};
use crate::backplane::{Backplane, Publish, Published, Revocation, Unavailable};
use crate::channel::Channel;
use crate::clock::{Clock, Dice};
use crate::close::CloseReason;
use crate::cursor::{EventId, Since};
use crate::departure::DrainConfig;
use crate::dispatch;
use crate::event::{Event, Wire};
use crate::fanout::{Channels, LinkState, Listener, Place};
use crate::fleet::{self, Fleet, FleetConfig};
use crate::inbound;
use crate::limit::Seat;
use crate::message::{self, Hello, Unsubscribed};
use crate::plugin::{Admission, Plugins};
use crate::quota::{self, Quota};
use crate::recycle::{Recycle, Way};
use crate::refusal::{Refusal, RefusalCode};
use crate::revocation::Revocations;
use crate::revoking::{self, Revoking};
use crate::roll::{self, Rolls};
use crate::session::{Buried, Deadlines, Session, SessionConfig, SessionId, SessionInfo, SubStage};
use crate::shed::Shedding;
use crate::sweep;
use crate::telemetry::{Metrics, ResumeLabel};
use crate::wheel::Wheel;

pub use crate::handle::{GatewayHandle, Load, Phase, PublishError};
pub use crate::open::Open;

mod pulse;
mod register;

use pulse::turn_wheel;
use register::Register;

/// Replay reads in flight over the node; the rest waits its turn. 64: enough to keep one Redis
/// busy, few enough that a storm's reads do not pile up in front of everything else.
const MAX_READS: usize = 64;

/// How long the end of cut sessions is waited for at shutdown. 1 s: their drivers only have to run once.
const CUT_WAIT: Duration = Duration::from_secs(1);

/// What a hub is told at its birth.
#[derive(Clone, Debug)]
pub struct HubConfig {
    /// This node's name, unique over the fleet.
    pub node: Arc<str>,
    /// `GATEWAY_MAX_SESSIONS` in force.
    pub capacity: usize,
    /// `GATEWAY_MAX_CHANNELS`, per session.
    pub max_channels: usize,
    /// `GATEWAY_MAX_MESSAGE`, bytes of an event's `data`.
    pub max_message: usize,
    /// `GATEWAY_REPLAY_MAX`, events.
    pub replay_max: usize,
    /// `GATEWAY_AUTH_TIMEOUT`: a later subscribe is answered within it.
    pub auth_timeout: Duration,
    /// `GATEWAY_MAX_AGE_MIN` and `_MAX`; `None`: nobody is recycled.
    pub max_age: Option<(Duration, Duration)>,
    /// `GATEWAY_REVOCATION_SWEEP`: a revocation that nobody told us of ends sessions within it.
    pub revocation_sweep: Duration,
    /// What it tells its fleet, and what holds over all of it.
    pub fleet: FleetConfig,
    /// How a drain goes.
    pub drain: DrainConfig,
    /// What every session obeys.
    pub session: SessionConfig,
}

/// What a hub is built from.
pub struct Parts {
    /// Its settings.
    pub config: HubConfig,
    /// The shared world.
    pub backplane: Arc<dyn Backplane>,
    /// Whose tokens count.
    pub verifier: Arc<Verifier>,
    /// What is known of revoked tokens.
    pub revocations: Arc<Revocations>,
    /// The extensions.
    pub plugins: Plugins,
    /// The figures.
    pub metrics: Arc<Metrics>,
    /// Time.
    pub clock: Clock,
    /// Chance.
    pub dice: Dice,
}

/// Who wants a session, after admission agreed.
pub struct Newcomer {
    /// Who it is.
    pub identity: Arc<Identity>,
    /// The transport.
    pub wire: Wire,
    /// The client's address.
    pub address: IpAddr,
    /// What it will hear from the start (`Hub::channels_for`).
    pub channels: Vec<Channel>,
    /// From where.
    pub since: Since,
    /// Which protocol.
    pub admission: Admission,
    /// Its place among the node's sessions.
    pub seat: Seat,
}

/// The node.
pub struct Hub {
    pub(crate) config: HubConfig,
    pub(crate) backplane: Arc<dyn Backplane>,
    pub(crate) verifier: Arc<Verifier>,
    pub(crate) revocations: Arc<Revocations>,
    pub(crate) plugins: Plugins,
    pub(crate) metrics: Arc<Metrics>,
    pub(crate) clock: Clock,
    pub(crate) dice: Dice,
    pub(crate) channels: Channels,
    pub(crate) place: Place,
    pub(crate) fleet: Fleet,
    pub(crate) rolls: Rolls,
    /// Only where a user's sessions are limited.
    pub(crate) quota: Option<Quota>,
    pub(crate) recycle: Recycle,
    pub(crate) shed: Shedding,
    pub(crate) reads: Semaphore,
    pub(crate) log_position: attach::Position,
    /// Where sessions are driven and their tasks run.
    pub(crate) runtime: Handle,
    pub(crate) tasks: TaskTracker,
    pub(crate) stop: CancellationToken,
    broken: CancellationToken,
    pub(crate) revoking: Revoking,
    sessions: Register,
    n_sessions: AtomicUsize,
    /// Since the start.
    n_opened: AtomicU64,
    /// Sessions that a drain had to cut.
    pub(crate) n_forced: AtomicUsize,
    emptied: Notify,
    wheel: Wheel,
    phase: watch::Sender<Phase>,
    /// Set once the closes of a drain begin: nobody is let in any more.
    is_closed: AtomicBool,
    /// Opening takes it shared, the begin of a drain's closes exclusively: nobody slips between.
    door: RwLock<()>,
    relinked: AtomicU64,
}

impl Hub {
    /// A hub in phase `Starting`; `start` sets it going. Its sessions live on the runtime in whose
    /// context this is called.
    ///
    /// # Panics
    /// Outside a tokio runtime.
    pub fn new(parts: Parts) -> Arc<Self> {
        parts.metrics.phase(Phase::Starting);
        parts.plugins.count_in(&parts.metrics);
        Arc::new(Self {
            channels: Channels::new(parts.backplane.clone()),
            place: Place::new(),
            fleet: Fleet::new(parts.config.fleet, &parts.clock, &parts.dice),
            rolls: Rolls::new(),
            quota: parts.config.fleet.max_sessions_per_user.map(Quota::new),
            recycle: Recycle::new(parts.config.max_age, Instant::now()),
            shed: Shedding::default(),
            reads: Semaphore::new(MAX_READS),
            log_position: attach::Position::default(),
            runtime: Handle::current(),
            tasks: TaskTracker::new(),
            stop: CancellationToken::new(),
            broken: CancellationToken::new(),
            revoking: Revoking::default(),
            sessions: Register::default(),
            n_sessions: AtomicUsize::new(0),
            n_opened: AtomicU64::new(0),
            n_forced: AtomicUsize::new(0),
            emptied: Notify::new(),
            wheel: Wheel::new(),
            phase: watch::Sender::new(Phase::Starting),
            is_closed: AtomicBool::new(false),
            door: RwLock::new(()),
            relinked: AtomicU64::new(0),
            config: parts.config,
            backplane: parts.backplane,
            verifier: parts.verifier,
            revocations: parts.revocations,
            plugins: parts.plugins,
            metrics: parts.metrics,
            clock: parts.clock,
            dice: parts.dice,
        })
    }

    /// Starts the dispatcher, the wheel and the plugins' own tasks. Called once.
    pub fn start(self: &Arc<Self>) {
        let link = self.backplane.link();
        self.vital("dispatcher", dispatch::run(self.clone(), link));
        self.vital("wheel", turn_wheel(self.clone()));
        self.vital("revocations", revoking::run(self.clone()));
        // It waits for changes and for the list; shutting down waits for neither.
        self.vital("sweep", self.stop.clone().run_until_cancelled_owned(sweep::run(self.clone())).map(drop));
        self.vital("rolls", self.stop.clone().run_until_cancelled_owned(roll::run(self.clone())).map(drop));
        // These two end with a word to the others.
        self.vital("fleet", fleet::run(self.clone()));
        if self.quota.is_some() {
            self.vital("quota", quota::run(self.clone()));
        }
        for task in self.plugins.tasks(&self.handle(), &self.stop) {
            self.tasks.spawn(task);
        }
    }

    /// A task that the node cannot do without: were it gone, sessions would stay open and hear nothing, or the
    /// node would be no part of its fleet any more. It ends by a panic, or because what it listens to is gone.
    pub(crate) fn vital(self: &Arc<Self>, name: &'static str, task: impl Future<Output = ()> + Send + 'static) {
        let hub = self.clone();
        self.tasks.spawn(async move {
            let ended = AssertUnwindSafe(task).catch_unwind().await;
            if ended.is_err() || !hub.stop.is_cancelled() {
                let how = if ended.is_err() { "panicked" } else { "ended" };
                tracing::error!(task = name, how, "a task that the node cannot do without is gone");
                hub.broken.cancel();
            }
        });
    }

    /// Waits until the node is good for nothing any more, for a fault of ours: the process should end, and be
    /// started anew.
    ///
    /// # Cancel safety
    /// Nothing is lost.
    pub async fn broken(&self) {
        self.broken.cancelled().await;
    }

    /// For the API and plugins.
    pub fn handle(self: &Arc<Self>) -> GatewayHandle {
        GatewayHandle { hub: self.clone() }
    }

    // ---- phases

    /// The phase now.
    pub fn phase(&self) -> Phase {
        *self.phase.borrow()
    }

    /// Watches the phase.
    pub fn phases(&self) -> watch::Receiver<Phase> {
        self.phase.subscribe()
    }

    /// The node is open for business. No effect once it drains.
    pub fn serve(&self) {
        self.move_to(Phase::Serving);
    }

    /// Starts the drain: readiness falls at once, see `departure::drain`. Again is harmless.
    pub fn drain(&self) {
        self.move_to(Phase::Draining);
    }

    pub(crate) fn move_to(&self, to: Phase) {
        let moved = self.phase.send_if_modified(|phase| {
            let forward = to > *phase;
            if forward {
                *phase = to;
            }
            forward
        });
        if moved {
            match to {
                Phase::Serving => self.begins_to_serve(),
                // The drain has a time for everybody.
                Phase::Draining | Phase::Stopped => self.recycle.set_way(Way::Closed),
                Phase::Starting => {}
            }
            self.metrics.phase(to);
            tracing::info!(phase = to.word(), sessions = self.load().n_sessions, "phase");
        }
    }

    /// From here on nobody is let in.
    pub(crate) fn close_door(&self) {
        let _closing = self.door.write().expect("no panic at the door");
        self.is_closed.store(true, Ordering::SeqCst);
    }

    /// Are newcomers refused with `draining`?
    pub fn is_door_closed(&self) -> bool {
        self.is_closed.load(Ordering::SeqCst)
    }

    /// Cuts whoever is still connected (nobody, after a drain), stops the node's own tasks and waits
    /// for them.
    pub async fn shut_down(&self) {
        self.move_to(Phase::Stopped);
        self.close_door();
        self.cut_all();
        // So that a session that is still being opened does not keep its task, and plugins hear of
        // every end. A driver that does not run any more is not waited for.
        let _ = tokio::time::timeout(CUT_WAIT, self.emptied()).await;
        self.stop.cancel();
        self.tasks.close();
        self.tasks.wait().await;
    }

    // ---- sessions

    /// The channels a newcomer hears from the start: those of its token that no plugin denies, and
    /// those it asks for.
    ///
    /// # Errors
    /// `forbidden` for a bad name or one not granted, `too_many_channels` over the limit.
    pub fn channels_for(&self, identity: &Identity, asked: &[String]) -> Result<Vec<Channel>, Refusal> {
        let granted = |channel: &&Channel| self.plugins.may_subscribe(identity, channel);
        let max = self.config.max_channels;
        let mut channels: Vec<Channel> = identity.grants.joined.iter().filter(granted).cloned().collect();
        for name in asked {
            if channels.len() > max {
                // A head has room for thousands of names: no more is looked at than it takes to say no.
                break;
            }
            let allowed = Channel::new(name).ok().filter(|channel| granted(&channel));
            let channel = allowed.ok_or_else(|| {
                Refusal::new(RefusalCode::Forbidden, "a channel asked for in the query is not granted by this token")
            })?;
            if !channels.contains(&channel) {
                channels.push(channel);
            }
        }
        if channels.len() > max {
            let detail = format!("a session hears at most {max} channels (GATEWAY_MAX_CHANNELS)");
            return Err(Refusal::new(RefusalCode::TooManyChannels, detail));
        }
        Ok(channels)
    }

    /// Opens a session: `hello` is its first message; what it hears follows once history was read.
    ///
    /// # Errors
    /// `draining` where the drain's closes began meanwhile.
    pub fn open(self: &Arc<Self>, newcomer: Newcomer) -> Result<Open, Refusal> {
        let _open = self.door.read().expect("no panic at the door");
        if self.is_door_closed() {
            let after = self.dice.between(Duration::from_secs(1), Duration::from_secs(3));
            return Err(Refusal::retry(RefusalCode::Draining, "this node is leaving", after));
        }
        let info = SessionInfo {
            id: SessionId::new(self.dice.bits()),
            identity: newcomer.identity,
            wire: newcomer.wire,
            address: newcomer.address,
            opened_at: Instant::now(),
            admission: newcomer.admission,
        };
        let age_at = self.recycle.age(info.opened_at, &self.dice).map(|age| info.opened_at + age);
        let deadlines = Deadlines { age_at, ..self.token_ends(&info.identity) };
        let session = Arc::new(Session::new(info, Some(newcomer.seat), deadlines, &self.config.session, &self.dice));
        self.register(&session);
        self.fleet.placement.arrived(&session.info);
        if let Some(quota) = &self.quota {
            session.take_place(quota.place(&session.info));
        }
        let open = Open { hub: self.clone(), session };
        if newcomer.admission == Admission::Standard {
            open.session.say(&self.hello(&open.session, &newcomer.channels));
            for channel in &newcomer.channels {
                self.join_channel(&open.session, channel, SubStage::Live);
            }
            let replay = tracing::debug_span!(target: "tidegate::trace", "replay");
            // Admission may run elsewhere: what a session needs runs where sessions do.
            let attach = attach::open(self.clone(), open.session.clone(), newcomer.since).instrument(replay);
            self.tasks.spawn_on(attach, &self.runtime);
        }
        // What was revoked between the check and here has found no session to end.
        if self.revocations.is_seen(&open.session.info.identity) {
            self.end(&open.session, CloseReason::Revoked);
        }
        self.arm(&open.session);
        Ok(open)
    }

    fn hello(&self, session: &Session, channels: &[Channel]) -> message::Message {
        let identity = &session.info.identity;
        let backoff = self.config.session.reconnect;
        message::hello(&Hello {
            session: &session.info.id,
            node: &self.config.node,
            user: identity.user.as_deref(),
            channels,
            heartbeat: self.config.session.heartbeat,
            expires_at: identity.expires_at.map(|at| at.as_secs()),
            reconnect: backoff,
            retry: self.dice.between(Duration::from_secs(1).min(backoff.first_max), backoff.first_max),
        })
    }

    fn register(&self, session: &Arc<Session>) {
        self.sessions.enter(session.clone());
        self.n_sessions.fetch_add(1, Ordering::SeqCst);
        self.n_opened.fetch_add(1, Ordering::Relaxed);
        self.metrics.session_opened(session.info.wire);
        self.plugins.opened(&session.info);
    }

    /// The session is over, whatever ended it; counts exactly one reason. Idempotent.
    pub(crate) fn bury(&self, session: &Arc<Session>, fallback: CloseReason) {
        let Some(Buried { reason, was_cut, subs }) = session.lock().bury(fallback) else { return };
        for (channel, slot) in subs {
            self.channels.unlisten(&channel, slot);
        }
        self.sessions.strike(session);
        self.metrics.session_closed(session.info.wire, reason);
        if reason == CloseReason::Drain && was_cut {
            self.metrics.drain_forced(1);
            self.n_forced.fetch_add(1, Ordering::SeqCst);
        }
        if matches!(reason, CloseReason::Shed | CloseReason::Recycle) {
            self.was_moved(&session.info);
        }
        if session.lock().resumed.is_none() {
            self.metrics.session_ready(session.info.wire, ResumeLabel::None);
        }
        self.plugins.closed(&session.info, reason);
        let age = session.info.opened_at.elapsed();
        tracing::debug!(session = &*session.info.id, reason = reason.word(), age_s = age.as_secs(), "session over");
        if self.n_sessions.fetch_sub(1, Ordering::SeqCst) == 1 {
            self.emptied.notify_waiters();
        }
    }

    pub(crate) fn session(&self, id: &str) -> Option<Arc<Session>> {
        self.sessions.get(id)
    }

    pub(crate) fn all_sessions(&self) -> Vec<Arc<Session>> {
        let mut all = Vec::with_capacity(self.n_sessions.load(Ordering::SeqCst));
        self.sessions.copy(&mut all);
        all
    }

    /// Waits until no session is open.
    ///
    /// # Cancel safety
    /// Nothing is lost.
    pub async fn emptied(&self) {
        loop {
            let told = self.emptied.notified();
            tokio::pin!(told);
            told.as_mut().enable();
            if self.n_sessions.load(Ordering::SeqCst) == 0 {
                return;
            }
            told.await;
        }
    }

    /// How full the node is.
    pub fn load(&self) -> Load {
        Load { n_sessions: self.n_sessions.load(Ordering::SeqCst), capacity: self.config.capacity, phase: self.phase() }
    }

    /// Ends a session now, with its words.
    pub(crate) fn end(&self, session: &Arc<Session>, reason: CloseReason) {
        if session.end(reason, self.place.position(), &self.config.session, &self.dice) {
            self.arm(session);
        }
    }

    // ---- channels of a session

    /// Listens for a session that is opening, or joins a channel of a later `subscribe`.
    pub(crate) fn join_channel(&self, session: &Arc<Session>, channel: &Channel, stage: SubStage) {
        let sub = {
            let mut state = session.lock();
            if state.is_over() || state.find(channel).is_some() {
                return;
            }
            state.add_sub(channel.clone(), stage)
        };
        let (slot, shared) = self.channels.listen(channel, Listener::new(session.clone(), sub));
        let mut state = session.lock();
        match state.subs.get_mut(sub).and_then(Option::as_mut).filter(|s| s.channel == *channel) {
            Some(sub) => sub.heard_at(slot, shared),
            // The session ended in between.
            None => {
                drop(state);
                self.channels.unlisten(channel, slot);
            }
        }
    }

    /// The session's `turn`-th token was found good; a later one that was faster stays in force.
    pub(crate) fn replace_identity(self: &Arc<Self>, session: &Arc<Session>, identity: &Arc<Identity>, turn: u32) {
        let ends = self.token_ends(identity);
        {
            let mut state = session.lock();
            if turn < state.auth_in_force {
                return;
            }
            state.auth_in_force = turn;
            state.identity = identity.clone();
            state.set_token_end(ends.token_at, ends.expiring_at);
        }
        inbound::withdraw(self, session, Unsubscribed::Grant);
        // What was revoked between the check and here has found the old token.
        if self.revocations.is_seen(identity) {
            self.end(session, CloseReason::Revoked);
        }
        self.arm(session);
    }

    /// Draws when a session has to end because of its token: `exp − U(0, 0.2·remaining)`, with less
    /// than a minute remaining `exp` itself, so that tokens minted together do not end together.
    fn token_ends(&self, identity: &Identity) -> Deadlines {
        let Some(remaining) = identity.expires_at.map(|at| at.saturating_sub(self.clock.unix())) else {
            return Deadlines::default();
        };
        let life = if remaining < Duration::from_secs(60) {
            remaining
        } else {
            remaining.mul_f64(1.0 - 0.2 * self.dice.unit())
        };
        let now = Instant::now();
        let warning = Duration::from_secs(60).min(life / 2);
        Deadlines { age_at: None, token_at: Some(now + life), expiring_at: Some(now + life - warning) }
    }

    // ---- what others say

    pub(crate) async fn revoke(&self, revocation: Revocation, ttl: Duration) -> Result<(), Unavailable> {
        self.backplane.revoke(revocation, ttl).await
    }

    pub(crate) async fn publish(&self, event: Publish) -> Result<Published, PublishError> {
        let event = self.plugins.publishing(event).ok_or(PublishError::Dropped)?;
        if event.data.len() > self.config.max_message {
            return Err(PublishError::TooLarge { size: event.data.len(), max: self.config.max_message });
        }
        Event::check_data(&event.data)?;
        let published = self.backplane.publish(event).await?;
        if !published.duplicate {
            self.metrics.published();
        }
        Ok(published)
    }

    // ---- the link

    /// Another incarnation of the log was seen: the link is made anew, once per generation.
    pub(crate) fn relink(&self, seen: LinkState) {
        if self.relinked.fetch_max(seen.generation + 1, Ordering::SeqCst) <= seen.generation {
            self.place.set(|link| link.is_live = link.is_live && link.generation != seen.generation);
            self.backplane.relink();
        }
    }

    /// As `relink`, then waits a moment for the link to change.
    pub(crate) async fn disagree(&self, seen: LinkState) {
        self.relink(seen);
        let changed = async {
            let mut links = self.place.changes();
            let _ = links.wait_for(|link| *link != seen).await;
        };
        let _ = tokio::time::timeout(Duration::from_secs(1), changed).await;
    }

    /// Sessions opened since the start.
    pub(crate) fn n_opened(&self) -> u64 {
        self.n_opened.load(Ordering::Relaxed)
    }

    /// How long ago the event of this id was published, by the log's clock and ours.
    pub(crate) fn age_of(&self, id: EventId) -> Duration {
        self.clock.unix().saturating_sub(Duration::from_millis(id.ms))
    }
}
