//! How many sessions this node should move to emptier nodes in this second, and why none. A pure
//! state machine: it is shown the fleet once a second and answers with orders; it has no clock, no
//! task and no socket, and closes nobody itself. Whoever asks decides what orders mean
//! (`GATEWAY_SHED=dry-run` counts them, `off` does not ask), picks the sessions with `pick` and
//! lets them depart within the second.
//!
//! Every node decides for itself alone, from the same reports by the same rules, so that together
//! they keep to one budget. In walking order: `plan` (who holds how much of what, and what may be
//! moved a second?) → `calm` (may that be believed now?) → here (is it worth moving anybody, and
//! how many of them are mine?) → `effect` (does it help?).

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use crate::clock::Dice;
use crate::handle::Phase;
pub use crate::telemetry::ShedSuspension;

mod calm;
mod effect;
pub mod pick;
mod plan;

pub(crate) use plan::is_sane;
pub use plan::{Bound, Budget, Place, Plan, Role};

use calm::Calm;
use effect::Effect;

/// An imbalance must show in so many different readings of the fleet before anybody is moved.
const READINGS: u32 = 2;

/// Nobody moves on before so many report intervals are over: whoever came just now may have been
/// moved here, and by then every node has seen what that did. Two minutes at the default.
const STAYS: u32 = 24;

/// A node so far below its target keeps its sessions longer, if the fleet is uneven.
const BELOW: f64 = 0.95;
/// From this coefficient of variation on the fleet is uneven.
const UNEVEN: f64 = 0.1;

/// No more than this is made up for when ticks came late.
const LATE_AT_MOST: Duration = Duration::from_secs(2);

/// Of the second from one decision to the next.
const HALF_A_SECOND: Duration = Duration::from_millis(500);

/// What the balancing obeys.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct BalanceConfig {
    /// `GATEWAY_SHED_TOLERANCE`: a node this far from its target, in either direction, starts the
    /// moving (0.05 = 5 %). Once started it goes on almost to the target itself: a band at whose
    /// edge it stopped would leave full nodes at its upper edge and new ones far below the lower.
    pub tolerance: f64,
    /// `GATEWAY_SHED_FRACTION`: at most this part of this node's sessions in an interval.
    pub fraction: f64,
    /// `GATEWAY_SHED_INTERVAL`.
    pub interval: Duration,
    /// `GATEWAY_FLEET_REPORT`: reports older than three of these are stale, and a session is left
    /// alone for its first 24.
    pub report_every: Duration,
}

impl BalanceConfig {
    /// A session younger than this is not moved, nor is any from a node that was below its target
    /// so lately: what it would move may be what was just moved to it.
    pub fn stays(&self) -> Duration {
        STAYS * self.report_every
    }

    /// Up to this age a report is believed.
    fn fresh(&self) -> Duration {
        3 * self.report_every
    }

    /// Sessions that a node of `n` may move in an interval. One at least, or a small node could
    /// never be moved from.
    fn own_cap(&self, n: usize) -> usize {
        ((self.fraction * n as f64) as usize).max(1)
    }
}

/// The fleet as this node has read it last.
#[derive(Clone, Debug, Default)]
pub struct View {
    /// All reports that have not expired, this node's own among them as it was last sent.
    pub nodes: Vec<Seen>,
    /// Reports that are there and that this version cannot read.
    pub n_unreadable: usize,
    /// When the log was born, by the backplane's clock, in ms since 1970; `None`: not known. Another
    /// birth is another log: the old one is lost, and with it what the nodes had reported.
    pub birth_ms: Option<u64>,
    /// When the reports were read last with success. A new instant is a new reading.
    pub read_at: Option<Instant>,
    /// Since when the backplane fails: the last report or reading did, or a link is known to be
    /// down. `None`: all is well.
    pub failing_since: Option<Instant>,
    /// An operator holds the fleet as it is.
    pub is_held: bool,
}

/// One node's report. Ages count to now, not to the reading.
#[derive(Clone, Debug)]
pub struct Seen {
    /// Its name.
    pub node: Arc<str>,
    /// Drawn at its start: the same name with another one is another node.
    pub boot: Arc<str>,
    /// The version that runs on it.
    pub version: Arc<str>,
    /// `None`: a word that this version does not know.
    pub phase: Option<Phase>,
    /// How old the report is.
    pub age: Duration,
    /// Its sessions.
    pub n_sessions: usize,
    /// Sessions that it has room for: its weight.
    pub capacity: usize,
    /// Sessions a second that it takes in.
    pub accept_rate: f64,
    /// For how long its readiness probe has answered yes without a break; `None`: it says no.
    pub ready_for: Option<Duration>,
    /// Its runtime is late: it should not get more to do.
    pub is_lagging: bool,
    /// What it closed in the 5 s before the report.
    pub moved: Moved,
    /// Sessions that it opened in the 5 s before the report.
    pub n_opened: usize,
    /// Attempts that it refused for want of room or of rate in the 5 s before the report. Bad
    /// tokens and noisy addresses are not among them: those say nothing about moved clients.
    pub n_refused: usize,
}

/// Sessions closed in 5 s whose clients are expected back elsewhere.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Moved {
    /// To even out the fleet.
    pub shed: usize,
    /// At the end of their age.
    pub recycled: usize,
    /// Because the node leaves.
    pub drained: usize,
}

impl Moved {
    fn all(self) -> usize {
        self.shed + self.recycled + self.drained
    }
}

/// What this node knows of itself without asking anybody.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Own {
    /// Its sessions now.
    pub n_sessions: usize,
    /// Sessions it closed because of orders, since its start. (In a dry run: none.)
    pub n_shed: u64,
}

/// How it stands with the moving of sessions.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum State {
    /// The fleet is even enough.
    Idle,
    /// It is not, but this node has nothing to give, or nobody to give to.
    Armed,
    /// This node moves sessions.
    Shedding,
    /// Nobody is moved, for these reasons (in the order of `ShedSuspension::ALL`).
    Suspended(Vec<ShedSuspension>),
}

impl State {
    /// The word in `/v1/fleet`.
    pub fn word(&self) -> &'static str {
        match self {
            State::Idle => "idle",
            State::Armed => "armed",
            State::Shedding => "shedding",
            State::Suspended(_) => "suspended",
        }
    }

    /// For `gateway_shed_suspended`: empty unless suspended.
    pub fn reasons(&self) -> &[ShedSuspension] {
        match self {
            State::Suspended(reasons) => reasons,
            _ => &[],
        }
    }
}

/// Why nobody is moved from here just now, beside what suspends it in the whole fleet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rest {
    /// No node is off its target by more than the tolerance.
    Even,
    /// One is, by so few sessions that it may be chance.
    BelowMinimum,
    /// One is, in a single reading of the fleet so far.
    SeenOnce,
    /// There is no other node.
    Alone,
    /// No node can be given any: too young, refusing, late, or full enough.
    NoRecipient,
    /// This node was below its own target a moment ago.
    BelowLately,
    /// This node holds about what it should, or less.
    NoExcess,
    /// What was moved is still on its way.
    OnTheirWay,
    /// Moved clients did not come back at all: a break (`ShedSuspension::Ineffective`).
    StayAway,
    /// Moved clients came back to this node: a break (`ShedSuspension::Ineffective`).
    ComeBack,
}

impl Rest {
    /// The word in `/v1/fleet`.
    pub fn word(self) -> &'static str {
        match self {
            Rest::Even => "even",
            Rest::BelowMinimum => "below_minimum",
            Rest::SeenOnce => "seen_once",
            Rest::Alone => "alone",
            Rest::NoRecipient => "no_recipient",
            Rest::BelowLately => "below_lately",
            Rest::NoExcess => "no_excess",
            Rest::OnTheirWay => "on_their_way",
            Rest::StayAway => "stay_away",
            Rest::ComeBack => "come_back",
        }
    }
}

/// What becomes of a session whose age is over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Recycling {
    /// It leaves.
    AsDrawn,
    /// It is given a quarter of its age more, once: this node has too few sessions as it is, and
    /// whoever leaves it may end on a fuller one.
    Extend,
}

/// Something an operator should look at; log it once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Warning {
    /// Several versions have been running for a day: a stuck deploy. Sessions are moved again.
    MixedVersions,
    /// Sessions that were moved did not come back to any node: nobody is moved for a while.
    StayAway,
    /// They came back here: the balancer in front does not send them to emptier nodes. Nobody is
    /// moved for a while.
    ComeBack,
}

/// What to do in this second, and all there is to say about it.
#[derive(Clone, Debug)]
pub struct Orders {
    /// Sessions that should leave within this second, spread over it. Within every budget.
    pub n_to_shed: usize,
    /// Log a line when it changes.
    pub state: State,
    /// Why nobody is moved from here; `None` where some are, or the fleet's suspension says it all.
    pub rest: Option<Rest>,
    /// Targets, deviations and the budget.
    pub plan: Plan,
    /// For sessions whose age ends now.
    pub recycling: Recycling,
    /// Sessions are being moved, here or elsewhere: report and read the fleet every second until
    /// this is over, so that nobody goes by counts that moving has made old, and an outage of the
    /// backplane stops it within a second more.
    pub is_eventful: bool,
    /// To be logged when it appears.
    pub warning: Option<Warning>,
}

/// Decides for one node.
pub struct Balancer {
    config: BalanceConfig,
    node: Arc<str>,
    dice: Dice,
    calm: Calm,
    effect: Effect,
    trigger: Trigger,
    /// Too much is to be given away; holds until nearly all of it is gone.
    is_moving: bool,
    /// Sessions to move that have not become a whole one yet.
    owed: f64,
    ticked_at: Option<Instant>,
    /// Ordered within the last interval.
    ordered: VecDeque<(Instant, usize)>,
    below_at: Option<Instant>,
}

impl Balancer {
    /// For the node of this name, which knows nothing yet.
    pub fn new(config: BalanceConfig, node: Arc<str>, dice: Dice) -> Self {
        let (calm, effect) = (Calm::new(dice.clone()), Effect::new(dice.clone()));
        Self {
            config,
            node,
            dice,
            calm,
            effect,
            trigger: Trigger::default(),
            is_moving: false,
            owed: 0.0,
            ticked_at: None,
            ordered: VecDeque::new(),
            below_at: None,
        }
    }

    /// To be called once a second, also while nothing should move: what it sees in quiet times is
    /// what it judges by.
    pub fn tick(&mut self, now: Instant, view: &View, own: &Own) -> Orders {
        let dt = self.ticked_at.map_or(Duration::ZERO, |at| now.saturating_duration_since(at)).min(LATE_AT_MOST);
        self.ticked_at = Some(now);
        let plan = Plan::of(view, &self.node, &self.config);
        let calm = self.calm.judge(now, dt, view, &self.node, own, &self.config);
        if calm.has_changed {
            self.below_at = None;
        }
        if own_place(&plan, &self.node).is_some_and(|place| (own.n_sessions as f64) < plan.landed(place)) {
            self.below_at = Some(now);
        }
        let mut reasons = calm.reasons;
        self.effect.observe(now, dt, &plan, own, calm.has_changed);
        if self.effect.is_idle_until(now) {
            reasons.push(ShedSuspension::Ineffective);
        }
        let is_blind = reasons.iter().any(|r| matches!(r, ShedSuspension::Backplane | ShedSuspension::Stale));
        if is_blind {
            self.trigger = Trigger::default();
        } else {
            self.trigger.look(view.read_at, plan.is_uneven());
        }
        let (state, rest, n_to_shed) = self.decide(now, dt, &plan, own, reasons);
        let recycling = if is_blind { Recycling::AsDrawn } else { recycling(&plan, &self.node, own) };
        let is_eventful = state == State::Shedding || plan.shed_rate > 0.0;
        let warning = self.effect.warning(now).or(calm.warning);
        Orders { n_to_shed, state, rest, plan, recycling, is_eventful, warning }
    }

    fn decide(
        &mut self,
        now: Instant,
        dt: Duration,
        plan: &Plan,
        own: &Own,
        reasons: Vec<ShedSuspension>,
    ) -> (State, Option<Rest>, usize) {
        if !reasons.is_empty() {
            self.rest();
            return (State::Suspended(reasons), self.effect.rest(now), 0);
        }
        let may_give = match self.may_give(now, plan, own) {
            Ok(may_give) => may_give,
            Err(Rest::NoExcess) if self.is_moving && self.is_on_the_way(plan, own) => {
                return (State::Shedding, Some(Rest::OnTheirWay), 0);
            }
            Err(rest) => {
                self.rest();
                return if self.trigger.is_on() {
                    (State::Armed, Some(rest), 0)
                } else {
                    (State::Idle, Some(self.calm_rest(plan)), 0)
                };
            }
        };
        if !self.is_moving {
            if !self.trigger.is_on() {
                return (State::Idle, Some(self.calm_rest(plan)), 0);
            }
            self.is_moving = true;
            // Drawn: else all donors' first sessions would leave in the same second.
            self.owed = self.dice.unit();
        }
        (State::Shedding, None, self.portion(now, dt, plan, own, may_give))
    }

    /// Sessions that leave in this second, of those that may.
    fn portion(&mut self, now: Instant, dt: Duration, plan: &Plan, own: &Own, may_give: usize) -> usize {
        let cap = self.config.own_cap(own.n_sessions) as f64 / self.config.interval.as_secs_f64();
        let per_second = plan.own_per_second.min(cap);
        self.owed = (self.owed + per_second * dt.as_secs_f64()).min(per_second * LATE_AT_MOST.as_secs_f64() + 1.0);
        let n = (self.owed as usize).min(may_give).min(self.left_in_interval(now, own));
        self.owed -= n as f64;
        if n > 0 {
            self.ordered.push_back((now, n));
        }
        n
    }

    fn rest(&mut self) {
        self.is_moving = false;
        self.owed = 0.0;
    }

    /// What this node holds beyond where it should stop; else why it should not move anybody.
    fn may_give(&self, now: Instant, plan: &Plan, own: &Own) -> Result<usize, Rest> {
        let place = own_place(plan, &self.node).ok_or(Rest::NoExcess)?;
        let was_below = self.below_at.is_some_and(|at| now.saturating_duration_since(at) < self.config.stays());
        let excess = (own.n_sessions as f64 - place.target * (1.0 + plan.stop)).max(0.0) as usize;
        match excess {
            _ if plan.n_live() < 2 => Err(Rest::Alone),
            0 => Err(Rest::NoExcess),
            _ if was_below => Err(Rest::BelowLately),
            _ if !plan.has_recipient() => Err(Rest::NoRecipient),
            excess => Ok(excess),
        }
    }

    /// Half of what was moved lately is taken to be on its way, whether it is or not. While that
    /// guess alone says that this node holds no more than it should, it waits for the truth: were
    /// it to stop, a gap below the trigger's minimum would remain for good.
    fn is_on_the_way(&self, plan: &Plan, own: &Own) -> bool {
        let holds_more = |place: &Place| own.n_sessions as f64 - plan.landed(place) * (1.0 + plan.stop) >= 1.0;
        plan.shed_rate > 0.0 && own_place(plan, &self.node).is_some_and(holds_more)
    }

    /// Why the trigger is off.
    fn calm_rest(&self, plan: &Plan) -> Rest {
        match (plan.n_live(), plan.is_uneven(), plan.is_off_by_few) {
            (0 | 1, ..) => Rest::Alone,
            (_, true, _) => Rest::SeenOnce,
            (_, _, true) => Rest::BelowMinimum,
            _ => Rest::Even,
        }
    }

    fn left_in_interval(&mut self, now: Instant, own: &Own) -> usize {
        // A second is woken a little early or late. What was ordered a whole interval of seconds ago is
        // over, and does not count once more for want of a millisecond (12 % of the moves, measured).
        let over = self.config.interval.saturating_sub(HALF_A_SECOND);
        while self.ordered.front().is_some_and(|(at, _)| now.saturating_duration_since(*at) >= over) {
            self.ordered.pop_front();
        }
        let used: usize = self.ordered.iter().map(|(_, n)| n).sum();
        self.config.own_cap(own.n_sessions).saturating_sub(used)
    }
}

impl std::fmt::Debug for Balancer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Balancer").field("node", &self.node).field("is_moving", &self.is_moving).finish_non_exhaustive()
    }
}

/// Counts readings in a row that show an uneven fleet.
#[derive(Debug, Default)]
struct Trigger {
    n_readings: u32,
    seen: Option<Instant>,
}

impl Trigger {
    fn look(&mut self, read_at: Option<Instant>, is_uneven: bool) {
        if read_at == self.seen {
            return;
        }
        self.seen = read_at;
        self.n_readings = if is_uneven { self.n_readings.saturating_add(1) } else { 0 };
    }

    fn is_on(&self) -> bool {
        self.n_readings >= READINGS
    }
}

fn own_place<'a>(plan: &'a Plan, node: &str) -> Option<&'a Place> {
    plan.places.iter().find(|place| &*place.node == node && place.role != Role::Away)
}

fn recycling(plan: &Plan, node: &str, own: &Own) -> Recycling {
    let is_low = own_place(plan, node).is_some_and(|place| (own.n_sessions as f64) < BELOW * place.target);
    if is_low && plan.cv > UNEVEN { Recycling::Extend } else { Recycling::AsDrawn }
}

#[cfg(test)]
mod tests;
