//! Leaving: the one mechanism by which the node ends sessions of its own accord, and the drain.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use tokio::time::{Instant, sleep, timeout_at};

use crate::balance::pick::IDLE;
use crate::close::CloseReason;
use crate::hub::{Hub, Phase};
use crate::session::Session;

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

/// The window, by what is known of the other nodes; waits for nobody.
fn window(hub: &Hub, n_sessions: usize) -> Duration {
    let (config, close_timeout) = (hub.config.drain, hub.config.session.close_timeout);
    let (accept, n_others_draining) = hub.fleet.takers();
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
