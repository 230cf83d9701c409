//! Leaving: the one mechanism by which the node ends sessions of its own accord, and the drain.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use tokio::time::{Instant, sleep, timeout_at};

use crate::balance::pick::IDLE;
use crate::close::CloseReason;
use crate::hub::{Hub, Phase};
use crate::session::{Session, SessionInfo};

/// Which sessions.
#[derive(Clone, Debug)]
pub enum Who {
    /// All of them.
    All,
    /// All of one user.
    User(Arc<str>),
    /// One, by its id.
    Session(Arc<str>),
}

/// The i-th of n leaves at `(i + U(0,1))·over/n` from now. Only ever moves a session's end earlier.
#[derive(Clone, Debug)]
pub struct Departure {
    /// Which sessions.
    pub who: Who,
    /// With which words.
    pub reason: CloseReason,
    /// Spread over this time; zero: at once.
    pub over: Duration,
}

/// Over which time a drain spreads its closes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Window {
    /// As long as the rest of the fleet needs to take the sessions in.
    Auto,
    /// Exactly so long.
    Fixed(Duration),
}

/// So few sessions leave at once: no balancer and no node notices ten.
const FEW: usize = 10;

/// How a drain goes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct DrainConfig {
    /// `GATEWAY_DRAIN_GRACE`: unready but still serving, until the balancer has noticed.
    pub grace: Duration,
    /// `GATEWAY_DRAIN_WINDOW`.
    pub window: Window,
    /// `GATEWAY_DRAIN_DEADLINE`, from the signal; what remains is cut.
    pub deadline: Duration,
    /// Sessions a second that are thought to be taken in elsewhere while no other node is known:
    /// half of `GATEWAY_ACCEPT_RATE`, as of one node like this one.
    pub takes_per_second: f64,
}

impl DrainConfig {
    /// The window for `n` sessions where `takes` of them a second can go elsewhere. `close_timeout`
    /// is what the last close may still take.
    pub fn window_for(&self, n: usize, takes: f64, close_timeout: Duration) -> Duration {
        let needed = needed(n, takes);
        let window = match self.window {
            Window::Fixed(window) if n > FEW => window,
            Window::Fixed(window) => window.min(needed),
            Window::Auto => needed,
        };
        window.min(self.most(close_timeout))
    }

    /// The longest window that fits.
    fn most(&self, close_timeout: Duration) -> Duration {
        self.deadline.saturating_sub(self.grace).saturating_sub(close_timeout)
    }

    /// Sessions a second that the others take, all draining nodes together using half of what the
    /// ready ones `accept`: the other half is for those who come anyway.
    fn takes(&self, accept: f64, n_draining: usize) -> f64 {
        if accept > 0.0 { accept / 2.0 / n_draining.max(1) as f64 } else { self.takes_per_second }
    }
}

fn needed(n: usize, takes: f64) -> Duration {
    // A year is more than any deadline, and no arithmetic can fail.
    Duration::from_secs_f64((n as f64 / takes.max(0.1)).min(3.2e7))
}

/// Who leaves first in a drain.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum DrainTurn {
    /// Nothing is going on.
    Idle,
    /// Events or messages went to or fro lately.
    Active,
    /// It asked not to be moved now.
    Busy,
    /// It came during the grace: it has just been moved once.
    Late,
}

impl DrainTurn {
    pub fn of(session: &Session, began: Instant, now: Instant) -> Self {
        let Some(one) = session.candidate() else { return DrainTurn::Idle };
        if one.opened_at >= began {
            DrainTurn::Late
        } else if one.busy_until.is_some_and(|until| until > now) {
            DrainTurn::Busy
        } else if now.saturating_duration_since(one.idle_since) <= IDLE {
            DrainTurn::Active
        } else {
            DrainTurn::Idle
        }
    }
}

/// How a drain ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Drained {
    /// Sessions that were there when the closes began.
    pub n_sessions: usize,
    /// Those of them that had to be cut: no answer within the close timeout, or at the deadline.
    pub n_cut: usize,
}

/// Waits for the phase `Draining`, then: grace (unready, still serving) → closes spread over the
/// window → at the deadline the rest is cut. Returns with nobody connected.
///
/// # Cancel safety
/// Dropped, the sessions stay as they are.
pub async fn drain(hub: &Arc<Hub>) -> Drained {
    let mut phases = hub.phases();
    let _ = phases.wait_for(|phase| *phase >= Phase::Draining).await;
    let config = hub.config.drain;
    let began = Instant::now();
    let deadline = began + config.deadline;
    sleep(config.grace).await;
    hub.close_door();
    let n_sessions = hub.load().n_sessions;
    let over = window(hub, n_sessions);
    hub.depart_for_drain(began, over);
    if timeout_at(deadline, hub.emptied()).await.is_err() {
        let n_left = hub.cut_all();
        tracing::warn!(n_left, "cut at the drain's deadline (GATEWAY_DRAIN_DEADLINE)");
        hub.emptied().await;
    }
    let n_cut = hub.n_forced.load(Ordering::SeqCst);
    if n_cut > 0 {
        tracing::warn!(n_cut, "sessions that did not answer their close had to be cut");
    }
    Drained { n_sessions, n_cut }
}

impl Hub {
    /// Asks sessions to leave: the i-th of n at `(i + U(0,1))·over/n`. Returns how many were asked.
    pub fn depart(&self, departure: Departure) -> usize {
        let leaving = self.all_sessions().into_iter().filter(|s| departure.who.is(&s.info)).collect();
        // By chance, not by age: an order would send whole cohorts together.
        self.spread(self.shuffled(leaving), departure.reason, departure.over)
    }

    /// As `depart`, of all sessions, for a drain that began at `began`: those who will notice it least first.
    pub(crate) fn depart_for_drain(&self, began: Instant, over: Duration) -> usize {
        let now = Instant::now();
        let mut leaving = self.shuffled(self.all_sessions());
        leaving.sort_by_cached_key(|session| DrainTurn::of(session, began, now));
        self.spread(leaving, CloseReason::Drain, over)
    }

    fn shuffled(&self, mut sessions: Vec<Arc<Session>>) -> Vec<Arc<Session>> {
        for i in (1..sessions.len()).rev() {
            sessions.swap(i, (self.dice.bits() % (i as u64 + 1)) as usize);
        }
        sessions
    }

    /// In this order, each in its part of the time: absolute, so that nothing drifts.
    fn spread(&self, leaving: Vec<Arc<Session>>, reason: CloseReason, over: Duration) -> usize {
        let now = Instant::now();
        let slot = over.div_f64(leaving.len().max(1) as f64);
        let mut asked = 0;
        for (i, session) in leaving.iter().enumerate() {
            let at = now + slot.mul_f64(i as f64 + self.dice.unit());
            if session.lock().ask_to_leave(at, reason) {
                asked += 1;
                self.arm(session);
            }
        }
        asked
    }

    /// Drops the sockets of all that are still here; returns how many.
    pub(crate) fn cut_all(&self) -> usize {
        let left = self.all_sessions();
        for session in &left {
            session.cut(CloseReason::Drain);
        }
        left.len()
    }
}

impl Who {
    pub(crate) fn is(&self, session: &SessionInfo) -> bool {
        match self {
            Who::All => true,
            Who::User(user) => session.identity.user.as_ref() == Some(user),
            Who::Session(id) => *session.id == **id,
        }
    }
}

/// The window, by what is known of the other nodes; waits for nobody.
fn window(hub: &Hub, n_sessions: usize) -> Duration {
    let (config, close_timeout) = (hub.config.drain, hub.config.session.close_timeout);
    let (accept, n_others_draining) = hub.fleet.takers(n_sessions);
    let takes = config.takes(accept, n_others_draining + 1);
    let over = config.window_for(n_sessions, takes, close_timeout);
    tracing::info!(n_sessions, window_s = over.as_secs_f64(), takes_per_second = takes, "closing sessions");
    let needed = needed(n_sessions, takes);
    if config.window == Window::Auto && over < needed {
        tracing::warn!(
            window_s = over.as_secs(),
            needed_s = needed.as_secs(),
            deadline_s = (config.grace + needed + close_timeout).as_secs() + 1,
            "the window is shorter than the other nodes bear; raise GATEWAY_DRAIN_DEADLINE to deadline_s, and what kills this process later still"
        );
    }
    over
}

#[cfg(test)]
mod tests;
