//! Moves this node's sessions to emptier nodes: the one task that asks `balance` once a second how
//! many, picks them (`balance::pick`), and lets them go within that second. Decides nothing about
//! how many or when; but it stops between two of them as soon as this node leaves, the backplane
//! fails or somebody holds the fleet, for then what was decided a moment ago counts no more.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, Weak};
use std::time::Duration;

use tokio::time::{Instant, MissedTickBehavior, interval_at, sleep_until};

use crate::balance::pick::choose;
use crate::balance::{BalanceConfig, Balancer, Orders, Own, Recycling, Rest, State, Warning};
use crate::close::CloseReason;
use crate::fleet::{Pace, ShedView};
use crate::hub::{Hub, Phase};
use crate::recycle::Short;
use crate::session::Session;
use crate::telemetry::ShedSuspension;

/// So often it is decided how many leave.
const TICK: Duration = Duration::from_secs(1);

/// Two lines in the log are at least so far apart, however often the state changes.
const QUIET: Duration = Duration::from_secs(10);

/// `GATEWAY_SHED`: whether sessions are moved to emptier nodes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ShedMode {
    /// They are.
    On,
    /// They are not.
    Off,
    /// It is only counted how many would be.
    DryRun,
}

impl ShedMode {
    /// The word in `/v1/fleet`.
    pub fn word(self) -> &'static str {
        match self {
            ShedMode::On => "on",
            ShedMode::Off => "off",
            ShedMode::DryRun => "dry-run",
        }
    }
}

/// What the moving obeys.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ShedConfig {
    /// Whether.
    pub mode: ShedMode,
    /// When and how many.
    pub balance: BalanceConfig,
}

/// What is said of it to whoever asks.
#[derive(Debug, Default)]
pub(crate) struct Shedding {
    view: Mutex<ShedView>,
}

impl Shedding {
    pub fn view(&self) -> ShedView {
        self.lock().clone()
    }

    /// Does this node move sessions just now?
    pub fn is_under_way(&self) -> bool {
        let view = self.lock();
        view.mode == ShedMode::On.word() && view.state == State::Shedding.word()
    }

    fn lock(&self) -> MutexGuard<'_, ShedView> {
        self.view.lock().expect("no panic while the view is held")
    }
}

impl Hub {
    /// Moves sessions to emptier nodes from now on, as `config` says. Called once, after `start`;
    /// without it, or with `ShedMode::Off`, nobody is moved.
    pub fn balance(self: &Arc<Self>, config: ShedConfig) {
        let state = if config.mode == ShedMode::Off { "off" } else { State::Idle.word() };
        *self.shed.lock() = ShedView { mode: config.mode.word(), state, ..ShedView::default() };
        if config.mode != ShedMode::Off {
            self.tasks.spawn(run(self.clone(), config));
        }
    }
}

async fn run(hub: Arc<Hub>, config: ShedConfig) {
    // Drawn, so that nodes that started together do not decide together.
    let first = Instant::now() + hub.dice.between(Duration::ZERO, TICK);
    let mut ticks = interval_at(first, TICK);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut phases = hub.phases();
    let mut shedder = Shedder::new(hub.clone(), config);
    loop {
        let next = shedder.going.front().map(|(at, _)| *at);
        tokio::select! {
            biased;
            () = hub.stop.cancelled() => return,
            _ = phases.wait_for(|phase| *phase >= Phase::Draining) => return shedder.end(),
            () = sleep_until(next.unwrap_or_else(Instant::now)), if next.is_some() => shedder.let_go(Instant::now()),
            _ = ticks.tick() => shedder.tick(Instant::now()),
        }
    }
}

struct Shedder {
    hub: Arc<Hub>,
    mode: ShedMode,
    /// Sessions are left alone for so long.
    stays: Duration,
    balancer: Balancer,
    /// Who leaves when, within this second.
    going: VecDeque<(Instant, Weak<Session>)>,
    /// Moved, or in a dry run: that would have been.
    n_moved: u64,
    logged: Option<(Instant, State)>,
    warned: Option<Warning>,
}

impl Shedder {
    fn new(hub: Arc<Hub>, config: ShedConfig) -> Self {
        let balancer = Balancer::new(config.balance, hub.config.node.clone(), hub.dice.clone());
        let (mode, stays) = (config.mode, config.balance.stays());
        Self { hub, mode, stays, balancer, going: VecDeque::new(), n_moved: 0, logged: None, warned: None }
    }

    fn tick(&mut self, now: Instant) {
        let hub = &self.hub;
        let own = Own { n_sessions: hub.load().n_sessions, n_shed: hub.counts().shed };
        let orders = self.balancer.tick(now, &hub.seen(), &own);
        hub.recycle.set_short(match orders.recycling {
            Recycling::Extend => Short::Yes,
            Recycling::AsDrawn => Short::No,
        });
        // A node that is filled hurries too: were its reports older than the donors', the total would
        // seem smaller than it is, and they would give away what nobody misses.
        let is_hurried = self.mode == ShedMode::On && orders.is_eventful;
        hub.fleet.hurry(if is_hurried { Pace::Hurried } else { Pace::Usual });
        if orders.state != State::Shedding {
            self.going.clear();
        }
        match self.mode {
            ShedMode::On => self.order(now, orders.n_to_shed),
            ShedMode::DryRun => self.n_moved += orders.n_to_shed as u64,
            ShedMode::Off => {}
        }
        self.tell(now, &orders);
    }

    /// Picks `n` sessions and gives each its place in this second.
    fn order(&mut self, now: Instant, n: usize) {
        if n == 0 {
            return;
        }
        let mut all = self.hub.all_sessions();
        let dice = &self.hub.dice;
        // In a random order, drawn no further than it is asked for: who was drawn keeps its place.
        let drawn = (0..all.len()).filter_map(|i| {
            let other = i + (dice.bits() % (all.len() - i) as u64) as usize;
            all.swap(i, other);
            Some((all[i].candidate()?, i))
        });
        let chosen = choose(now, self.stays, drawn, n);
        let slot = TICK.div_f64(chosen.len().max(1) as f64);
        for (i, place) in chosen.into_iter().enumerate() {
            let at = now + slot.mul_f64(i as f64 + self.hub.dice.unit());
            self.going.push_back((at, Arc::downgrade(&all[place])));
        }
    }

    /// Those whose time has come leave, unless something came between.
    fn let_go(&mut self, now: Instant) {
        if self.hub.is_cut_off() || self.hub.fleet.is_held() {
            self.going.clear();
            return;
        }
        while self.going.front().is_some_and(|(at, _)| *at <= now) {
            let session = self.going.pop_front().and_then(|(_, session)| session.upgrade());
            let Some(session) = session else { continue };
            // It may have said that it is busy since it was picked.
            if session.candidate().is_some_and(|one| one.may_move(now, self.stays)) {
                self.hub.end(&session, CloseReason::Shed);
                self.hub.metrics.shed(1);
                self.n_moved += 1;
            }
        }
    }

    fn tell(&mut self, now: Instant, orders: &Orders) {
        let reasons = orders.state.reasons();
        self.hub.metrics.shed_suspended(reasons);
        let bound = orders.plan.budget.bound.word();
        // Never the zero below zero: it would be shown.
        let budget = orders.plan.budget.per_second.max(0.0) + 0.0;
        *self.hub.shed.lock() = ShedView {
            mode: self.mode.word(),
            state: orders.state.word(),
            suspended: reasons.iter().map(|reason| reason.word()).collect(),
            why: orders.rest.map(Rest::word),
            budget,
            bound,
            shed_total: self.n_moved,
        };
        if orders.warning != self.warned {
            self.warned = orders.warning;
            if let Some(warning) = orders.warning {
                warn(warning, self.n_moved);
            }
        }
        let may_log = self.logged.as_ref().is_none_or(|(at, state)| *state != orders.state && *at + QUIET <= now);
        if may_log {
            self.logged = Some((now, orders.state.clone()));
            let suspended = self.hub.shed.view().suspended.join(",");
            tracing::info!(
                mode = self.mode.word(),
                state = orders.state.word(),
                suspended,
                why = orders.rest.map(Rest::word),
                budget,
                bound,
                cv = orders.plan.cv,
                moved = self.n_moved,
                "moving sessions to emptier nodes"
            );
        }
    }

    /// This node leaves: from now on its drain moves everybody.
    fn end(self) {
        let leaving = [ShedSuspension::Draining];
        self.hub.metrics.shed_suspended(&leaving);
        self.hub.fleet.hurry(Pace::Usual);
        let mut view = self.hub.shed.lock();
        view.state = State::Suspended(Vec::new()).word();
        view.suspended = leaving.iter().map(|reason| reason.word()).collect();
        view.why = None;
    }
}

fn warn(warning: Warning, moved: u64) {
    match warning {
        Warning::MixedVersions => {
            tracing::warn!("several versions have been running for a day; sessions are moved all the same");
        }
        Warning::StayAway => {
            tracing::warn!(moved, "clients that were moved do not come back to any node; nobody is moved for a while");
        }
        Warning::ComeBack => tracing::warn!(
            moved,
            "clients that were moved come back to this node; nobody is moved for a while: does the balancer in front \
             go by least connections?"
        ),
    }
}

#[cfg(test)]
mod tests;
