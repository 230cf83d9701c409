//! What the nodes of a fleet know of each other. Decides what a node says of itself and when
//! (`said`, `recent`); `namesake` sees whether its name is its own; `placement` watches where the balancer in
//! front puts clients, `view` is what people are shown. Whether anybody is to move because of it is decided by `balance`.
//!
//! Reports travel through the backplane and are seconds old: nothing on a client's path waits for
//! them, and with no backplane a node soon knows of nobody but itself. A report that has expired is
//! not counted as an empty node, it is not counted.

use std::num::NonZeroU32;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use arc_swap::ArcSwapOption;
use tokio::sync::Notify;
use tokio::time::{Instant, sleep, timeout};

use self::namesake::{Complaint, Namesake};
use self::placement::Placement;
use self::recent::Recent;
use self::said::{FORM, Said};
use crate::backplane::{Hold, Report, Unavailable};
use crate::balance::View;
use crate::clock::{Clock, Dice};
use crate::close::CloseReason;
use crate::cursor::Since;
use crate::hub::{Hub, Phase};
use crate::recycle::Home;
use crate::refusal::RefusalCode;
use crate::session::SessionInfo;
use crate::telemetry::LbPolicy;

mod namesake;
mod placement;
mod recent;
mod said;
mod view;

pub(crate) use recent::Counts;
pub use view::{FleetView, NodeView, PlacingView, ShedView};

/// Reports come within this part of their interval, more or less, so that a fleet that was started
/// together does not write together.
const SPREAD: f64 = 0.2;

/// A report that failed is repeated after about so long.
const RETRY: Duration = Duration::from_secs(1);

/// While sessions are moved, by this node or another, it reports and reads so often, so that all
/// know what has moved, and an outage of the backplane stops it within one more second.
const HURRIED: (Duration, Duration) = (Duration::from_millis(800), Duration::from_secs(1));

/// A backplane that has not answered for so long fails: twice the default deadline of a command, so
/// that sessions stop moving within two seconds even of one that is only slow. The answer is waited
/// for all the same, but not for ever: reports have to go on when it is back.
const LATE: Duration = Duration::from_millis(500);
const GIVEN_UP: Duration = Duration::from_secs(5);
/// A node that stops waits no longer than this for its report to be taken away.
const LAST_WORD: Duration = Duration::from_secs(1);

/// An error is remembered for so long, even if all is well again: whoever looks once a second sees it.
const ERRED_LATELY: Duration = Duration::from_secs(2);

/// At the reading a report was so many intervals old at most, or it says nothing about now.
const FRESH: u32 = 3;

/// A cursor may be ahead of this node's time by so much, for clocks differ.
const SKEW: Duration = Duration::from_secs(60);

/// What a node tells its fleet, and what holds over all of it.
#[derive(Clone, Copy, Debug)]
pub struct FleetConfig {
    /// The version that runs.
    pub version: &'static str,
    /// `GATEWAY_FLEET_REPORT`: between two reports.
    pub report_every: Duration,
    /// `GATEWAY_FLEET_TTL`: a node that is silent for so long no longer counts.
    pub ttl: Duration,
    /// `GATEWAY_MAX_SESSIONS_PER_USER`; `None`: no limit.
    pub max_sessions_per_user: Option<NonZeroU32>,
}

impl FleetConfig {
    /// Reports at the default pace, limits nobody.
    pub fn unlimited(version: &'static str) -> Self {
        let (report_every, ttl) = (Duration::from_secs(5), Duration::from_secs(20));
        Self { version, report_every, ttl, max_sessions_per_user: None }
    }
}

/// How well this node is, as its readiness sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fitness {
    /// `/readyz` answers yes.
    pub is_ready: bool,
    /// The runtime is late: no more should be given to it, even if it is ready.
    pub is_lagging: bool,
}

/// What the backplane said last.
pub(crate) struct Snapshot {
    /// Without this node's own.
    others: Vec<(Report, Option<Said>)>,
    /// Another process under this node's name.
    namesake: Option<Namesake>,
    /// As it was sent.
    own: Said,
    hold: Option<Hold>,
    birth_ms: u64,
    /// The backplane's clock at the reading.
    now_ms: u64,
    read_at: Instant,
}

impl Snapshot {
    /// The hold, while it lasts.
    fn hold(&self) -> Option<&Hold> {
        let now_ms = self.now_ms.saturating_add(u64::try_from(self.read_at.elapsed().as_millis()).unwrap_or(u64::MAX));
        self.hold.as_ref().filter(|hold| hold.until_ms > now_ms)
    }

    /// What all others said, a namesake too; `None` for a report that this version cannot read.
    fn all_others(&self) -> impl Iterator<Item = (&Report, Option<&Said>)> {
        let namesake = self.namesake.iter().map(|namesake| (&namesake.report, Some(&namesake.said)));
        self.others.iter().map(|(report, said)| (report, said.as_ref())).chain(namesake)
    }
}

/// A process of the fleet, as its report names it.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Peer {
    pub node: Arc<str>,
    /// Tells it from others of its name; `None`: its report cannot be read.
    pub boot: Option<Arc<str>>,
}

/// What this node knows of its fleet.
pub(crate) struct Fleet {
    pub config: FleetConfig,
    /// Of this process; drawn at its start.
    pub boot: String,
    started_at: u64,
    snapshot: ArcSwapOption<Snapshot>,
    recent: Recent,
    pub placement: Placement,
    health: Mutex<Health>,
    /// Somebody wants the report, or the reading, now.
    nudge: Notify,
    is_hurried: AtomicBool,
}

/// How this node is, and how the backplane is to it.
#[derive(Default)]
struct Health {
    /// `None` until somebody says: then the phase alone counts.
    fitness: Option<Fitness>,
    ready_since: Option<Instant>,
    /// Reporting has failed since then.
    failing_since: Option<Instant>,
    erred_at: Option<Instant>,
    /// Another process has this node's name.
    complaint: Complaint,
}

impl Fleet {
    pub fn new(config: FleetConfig, clock: &Clock, dice: &Dice) -> Self {
        Self {
            config,
            boot: format!("{:016x}", dice.bits()),
            started_at: clock.unix().as_secs(),
            snapshot: ArcSwapOption::empty(),
            recent: Recent::default(),
            placement: Placement::new(dice.bits()),
            health: Mutex::default(),
            nudge: Notify::new(),
            is_hurried: AtomicBool::new(false),
        }
    }

    /// All others that were there when the backplane was last asked; `None`: it never answered.
    pub fn others(&self) -> Option<Vec<Peer>> {
        let snapshot = self.snapshot.load_full()?;
        let peer = |(report, said): (&Report, Option<&Said>)| Peer {
            node: report.node.clone(),
            boot: said.map(|said| said.boot.as_str().into()),
        };
        Some(snapshot.all_others().map(peer).collect())
    }

    /// What those of the others that were ready when the fleet was last read accept a second of
    /// `n_sessions` (`accepted`), and how many of the others are leaving. From memory, and also while
    /// the backplane is away: an old word about the others is better than none.
    pub fn takers(&self, n_sessions: usize) -> (f64, usize) {
        let Some(snapshot) = self.snapshot.load_full() else { return (0.0, 0) };
        let fresh = snapshot
            .all_others()
            .filter(|(report, _)| report.age <= FRESH * self.config.report_every)
            .filter_map(|(_, said)| said);
        let (mut ready, mut n_leaving) = (Vec::new(), 0);
        for said in fresh {
            match said.phase() {
                Some(Phase::Serving) if said.ready_ms.is_some() && said.accept_rate.is_finite() => ready.push(said),
                Some(Phase::Draining) => n_leaving += 1,
                _ => {}
            }
        }
        (accepted(n_sessions, ready), n_leaving)
    }

    /// Is a node of the fleet leaving, as far as is known?
    pub fn is_peer_leaving(&self) -> bool {
        let snapshot = self.snapshot.load();
        let Some(snapshot) = snapshot.as_ref() else { return false };
        let since = snapshot.read_at.elapsed();
        snapshot.all_others().any(|(report, said)| {
            let is_fresh = report.age + since <= FRESH * self.config.report_every;
            is_fresh && said.is_some_and(|said| said.phase() == Some(Phase::Draining))
        })
    }

    /// Does somebody want the fleet to stay as it is?
    pub fn is_held(&self) -> bool {
        self.snapshot.load().as_ref().is_some_and(|snapshot| snapshot.hold().is_some())
    }

    /// The backplane failed just now, or the link to it did.
    pub fn erred(&self) {
        self.health().erred_at = Some(Instant::now());
    }

    /// Since when the backplane fails; an error that passed is remembered for a moment.
    pub fn failing_since(&self) -> Option<Instant> {
        let health = self.health();
        let lately = health.erred_at.filter(|at| at.elapsed() < ERRED_LATELY);
        health.failing_since.or(lately)
    }

    /// What the backplane answers; from `LATE` on it counts as failing until then.
    ///
    /// # Errors
    /// `Unavailable`: its own, or it did not answer at all.
    async fn answer<T>(&self, call: impl Future<Output = Result<T, Unavailable>>) -> Result<T, Unavailable> {
        tokio::pin!(call);
        if let Ok(answer) = timeout(LATE, &mut call).await {
            return answer;
        }
        self.health().failing_since.get_or_insert_with(Instant::now);
        let answer = timeout(GIVEN_UP - LATE, call).await.unwrap_or_else(|_| Err(unanswered()));
        self.erred();
        answer
    }

    /// Whether to report and read every second rather than at the usual pace.
    pub fn hurry(&self, pace: Pace) {
        let is_hurried = pace == Pace::Hurried;
        if self.is_hurried.swap(is_hurried, Ordering::Relaxed) != is_hurried && is_hurried {
            self.nudge.notify_one();
        }
    }

    /// The counters as they are now, once a second.
    pub fn look(&self, now: Instant, counts: Counts) {
        self.recent.look(now, counts);
    }

    fn health(&self) -> MutexGuard<'_, Health> {
        self.health.lock().expect("no panic while the health is held")
    }

    fn pause(&self, dice: &Dice, is_well: bool) -> Duration {
        let every = if is_well { self.config.report_every } else { self.config.report_every.min(RETRY) };
        let usual = dice.between(every.mul_f64(1.0 - SPREAD), every.mul_f64(1.0 + SPREAD));
        if self.is_hurried.load(Ordering::Relaxed) { usual.min(dice.between(HURRIED.0, HURRIED.1)) } else { usual }
    }
}

/// How often this node reports.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Pace {
    /// Every `GATEWAY_FLEET_REPORT`.
    Usual,
    /// Every second.
    Hurried,
}

/// Reports until the hub stops, then takes this node out of the fleet. A drain is told at once.
pub(crate) async fn run(hub: Arc<Hub>) {
    let mut phases = hub.phases();
    loop {
        phases.mark_unchanged();
        // A report that is given up in the middle is one that was lost.
        let Some(refreshed) = hub.stop.run_until_cancelled(refresh(&hub)).await else { break };
        if let Err(error) = &refreshed {
            tracing::debug!(%error, "this node could not report");
        }
        hub.metrics.fleet(hub.fleet().figures);
        tokio::select! {
            () = hub.stop.cancelled() => break,
            _ = phases.changed() => {}
            () = hub.fleet.nudge.notified() => {}
            () = sleep(hub.fleet.pause(&hub.dice, refreshed.is_ok())) => {}
        }
    }
    let retired = timeout(LAST_WORD, hub.backplane.retire()).await;
    if let Err(error) = retired.unwrap_or_else(|_| Err(unanswered())) {
        tracing::debug!(%error, "this node could not take its report away; it ends by itself");
    }
}

/// Reports, and learns what the others have said.
///
/// # Errors
/// `Unavailable`: what was known stays.
pub(crate) async fn refresh(hub: &Hub) -> Result<(), Unavailable> {
    let fleet = &hub.fleet;
    let own = said(hub);
    let body = serde_json::to_string(&own).expect("numbers and words always become JSON");
    let known = match fleet.answer(hub.backplane.report(body, fleet.config.ttl)).await {
        Ok(known) => known,
        Err(error) => {
            fleet.erred();
            fleet.health().failing_since.get_or_insert_with(Instant::now);
            return Err(error);
        }
    };
    fleet.health().failing_since = None;
    let others = known.reports.into_iter().filter(|report| report.node != hub.config.node).map(|report| {
        let said = Said::read(&report.body);
        if said.is_none() {
            tracing::debug!(node = &*report.node, "a node's report cannot be read by this version");
        }
        (report, said)
    });
    let earlier = fleet.snapshot.load_full();
    let snapshot = Snapshot {
        others: others.collect(),
        namesake: Namesake::find(known.before, earlier.as_deref(), &own, fleet.config.ttl),
        own,
        hold: known.hold,
        birth_ms: known.birth_ms,
        now_ms: known.now_ms,
        read_at: Instant::now(),
    };
    let snapshot = Arc::new(snapshot);
    fleet.snapshot.store(Some(snapshot.clone()));
    complain(hub, &snapshot);
    observe(hub, &snapshot);
    Ok(())
}

fn unanswered() -> Unavailable {
    Unavailable("it does not answer".to_owned())
}

/// Says, not too often, that this node's name is another's too. It serves all the same: whoever has the
/// name by right cannot be told from here.
fn complain(hub: &Hub, snapshot: &Snapshot) {
    let Some(namesake) = &snapshot.namesake else { return };
    if hub.fleet.health().complaint.is_due(Instant::now()) {
        tracing::error!(
            node = &*hub.config.node,
            boot = hub.fleet.boot,
            others_boot = namesake.said.boot,
            others_sessions = namesake.said.sessions,
            others_started_at = namesake.said.started_at,
            "another process reports under this node's name, so the fleet sees only one of them at a time: give each \
             node a GATEWAY_NODE of its own, or leave it unset"
        );
    }
}

/// Looks at where the balancer in front has put clients, and says so when it seems to go by
/// something else than before.
fn observe(hub: &Hub, snapshot: &Snapshot) {
    let fresh = FRESH * hub.fleet.config.report_every;
    let young = || snapshot.others.iter().filter(|(report, said)| report.age <= fresh && said.is_some());
    let trials = young().filter_map(|(_, said)| Some(said.as_ref()?.trials));
    let mut nodes = hub.seen().nodes;
    nodes.retain(|node| node.age <= fresh);
    let now = Instant::now();
    let Some(policy) = hub.fleet.placement.read(now, &hub.config.node, &nodes, trials) else { return };
    hub.metrics.lb_policy(policy);
    hub.recycle.set_home(if policy == LbPolicy::Sticky { Home::Here } else { Home::Anywhere });
    let (_, all) = hub.fleet.placement.observed();
    if policy == LbPolicy::Sticky {
        tracing::warn!(
            lb_policy_observed = policy.word(),
            moved = all.moved,
            back = all.back,
            "clients that are moved come back to the node they were moved from: the balancer in front goes by address, \
             cookie or hash, so moving them evens out nothing; sessions are kept for half of what is left to \
             GATEWAY_MAX_AGE_MAX beyond their age. Use least connections, or switch moving off \
             (GATEWAY_SHED=off, GATEWAY_MAX_AGE_MIN=0s, GATEWAY_MAX_AGE_MAX=0s)"
        );
    } else {
        tracing::info!(
            lb_policy_observed = policy.word(),
            moved = all.moved,
            back = all.back,
            "where the balancer in front puts clients"
        );
    }
}

/// What these accept a second of `n_sessions`, on average until the last of them is in, behind a
/// balancer that sends each to the emptiest: where one is much emptier than the rest (a new one in a
/// deploy) it alone is sent clients until it is as full as they, and the others' rates are of no use.
fn accepted(n_sessions: usize, mut ready: Vec<&Said>) -> f64 {
    let level = |said: &Said| said.sessions as f64 / said.capacity.max(1) as f64;
    ready.sort_by(|a, b| level(a).total_cmp(&level(b)));
    let (mut left, mut seconds, mut capacity, mut rate) = (n_sessions as f64, 0.0, 0.0, 0.0);
    for (i, said) in ready.iter().enumerate() {
        capacity += said.capacity.max(1) as f64;
        rate += said.accept_rate.max(0.0);
        let next = ready.get(i + 1).map_or(f64::INFINITY, |next| level(next));
        let taken = left.min((next - level(said)) * capacity);
        seconds += if taken > 0.0 { taken / rate } else { 0.0 };
        left -= taken;
    }
    if seconds > 0.0 { n_sessions as f64 / seconds } else { rate }
}

fn said(hub: &Hub) -> Said {
    let (load, now) = (hub.load(), Instant::now());
    let (ready_since, is_lagging) = {
        let health = hub.fleet.health();
        (health.ready_since, health.fitness.is_some_and(|fitness| fitness.is_lagging))
    };
    let ready_for = ready_since.filter(|_| load.phase == Phase::Serving).map(|at| now.saturating_duration_since(at));
    Said {
        v: FORM,
        sessions: load.n_sessions,
        capacity: load.capacity,
        phase: load.phase.word().to_owned(),
        version: hub.fleet.config.version.to_owned(),
        boot: hub.fleet.boot.clone(),
        started_at: hub.fleet.started_at,
        accept_rate: hub.metrics.accept_rate(),
        ready_ms: ready_for.map(|ready| u64::try_from(ready.as_millis()).unwrap_or(u64::MAX)),
        lagging: is_lagging,
        lately: hub.fleet.recent.lately(now, hub.counts()),
        trials: hub.fleet.placement.trials(now),
    }
}

impl Hub {
    /// The fleet as this node knows it: from memory, at once.
    pub fn fleet(&self) -> FleetView {
        let mut nodes = vec![view::node(self.config.node.clone(), &said(self), Duration::ZERO)];
        if let Some(snapshot) = self.fleet.snapshot.load_full() {
            let since = snapshot.read_at.elapsed();
            let others = snapshot
                .all_others()
                .filter_map(|(report, said)| Some(view::node(report.node.clone(), said?, report.age + since)));
            nodes.extend(others.filter(|node| node.age < self.fleet.config.ttl));
        }
        // Stable: this node stands before one of its name.
        nodes.sort_by(|a, b| a.node.cmp(&b.node));
        let own = nodes.iter().position(|node| node.node == self.config.node).expect("it was put there");
        let (nodes, figures) = view::evened(nodes, own);
        let hold = self.fleet.snapshot.load().as_ref().and_then(|snapshot| snapshot.hold().cloned());
        let (policy, trials) = self.fleet.placement.observed();
        let placing = PlacingView { policy, n_moved: trials.moved, n_back: trials.back };
        FleetView { nodes, figures, shed: self.shed.view(), placing, hold }
    }

    /// How well this node is; to be said once a second or so, from where readiness is judged.
    /// Until it is first said, the node counts as ready while it serves.
    pub fn set_fitness(&self, fitness: Fitness) {
        let mut health = self.fleet.health();
        health.fitness = Some(fitness);
        let since = health.ready_since.unwrap_or_else(Instant::now);
        health.ready_since = fitness.is_ready.then_some(since);
    }

    /// It serves from now on.
    pub(crate) fn begins_to_serve(&self) {
        let mut health = self.fleet.health();
        if health.fitness.is_none() {
            health.ready_since = Some(Instant::now());
        }
    }

    /// What holds for the whole fleet has changed: it is read again at once.
    pub(crate) fn fleet_changed(&self) {
        self.fleet.nudge.notify_one();
    }

    /// A session that was moved from here is over; a client of the same name may come back.
    pub(crate) fn was_moved(&self, session: &SessionInfo) {
        let is_the_last = || !self.all_sessions().iter().any(|other| placement::is_same(&other.info, session));
        self.fleet.placement.moved(Instant::now(), session, is_the_last);
    }

    /// This node's counters.
    pub(crate) fn counts(&self) -> Counts {
        Counts {
            opened: self.n_opened(),
            refused: [RefusalCode::Overloaded, RefusalCode::AtCapacity]
                .map(|code| self.metrics.n_refused(code))
                .iter()
                .sum(),
            shed: self.metrics.n_closed(CloseReason::Shed),
            recycled: self.metrics.n_closed(CloseReason::Recycle),
            drained: self.metrics.n_closed(CloseReason::Drain),
        }
    }

    /// The fleet as the balancing sees it. Without a namesake: it tells nodes apart by their names.
    pub(crate) fn seen(&self) -> View {
        let failing_since = self.fleet.failing_since().or_else(|| (!self.place.state().is_live).then(Instant::now));
        let Some(snapshot) = self.fleet.snapshot.load_full() else {
            return View { failing_since, ..View::default() };
        };
        let since = snapshot.read_at.elapsed();
        let mut nodes = vec![snapshot.own.seen(self.config.node.clone(), since)];
        let mut n_unreadable = 0;
        for (report, said) in snapshot.others.iter().filter(|(report, _)| report.age + since < self.fleet.config.ttl) {
            match said {
                Some(said) => nodes.push(said.seen(report.node.clone(), report.age + since)),
                None => n_unreadable += 1,
            }
        }
        let is_held = snapshot.hold().is_some();
        View {
            nodes,
            n_unreadable,
            birth_ms: Some(snapshot.birth_ms),
            read_at: Some(snapshot.read_at),
            failing_since,
            is_held,
        }
    }

    /// Could this cursor come from an earlier session on this log: does it lie between the log's
    /// birth and now? A hint by which returning clients are told from new ones, and no proof: a
    /// client may write what it likes. Waits for nothing.
    pub fn may_be_returning(&self, since: &Since) -> bool {
        let Since::After(id) = since else { return false };
        // Not known yet: no position is too old.
        let birth_ms = self.fleet.snapshot.load().as_ref().map_or(0, |snapshot| snapshot.birth_ms);
        let now_ms = u64::try_from((self.clock.unix() + SKEW).as_millis()).unwrap_or(u64::MAX);
        (birth_ms..=now_ms.max(self.place.position().ms)).contains(&id.ms)
    }
}

#[cfg(test)]
mod tests;
