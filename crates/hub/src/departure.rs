//! Leaving: the one mechanism by which the node ends sessions of its own accord, and the drain.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use tokio::time::{Instant, sleep, timeout_at};

use crate::close::CloseReason;
use crate::hub::{Hub, Phase};

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

/// How a drain goes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct DrainConfig {
    /// `GATEWAY_DRAIN_GRACE`: unready but still serving, until the balancer has noticed.
    pub grace: Duration,
    /// `GATEWAY_DRAIN_WINDOW`.
    pub window: Window,
    /// `GATEWAY_DRAIN_DEADLINE`, from the signal; what remains is cut.
    pub deadline: Duration,
    /// Sessions a second that the rest of the fleet may be expected to take: half of
    /// `GATEWAY_ACCEPT_RATE`, the other half is for those who come anyway.
    pub takes_per_second: f64,
}

impl DrainConfig {
    /// The window for `n` sessions. `close_timeout` is what the last close may still take.
    pub fn window_for(&self, n: usize, close_timeout: Duration) -> Duration {
        let most = self.deadline.saturating_sub(self.grace).saturating_sub(close_timeout);
        match self.window {
            Window::Fixed(window) => window.min(most),
            Window::Auto => Duration::from_secs_f64(n as f64 / self.takes_per_second.max(1.0)).min(most),
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
    let deadline = Instant::now() + config.deadline;
    sleep(config.grace).await;
    hub.close_door();
    let n_sessions = hub.load().n_sessions;
    let over = config.window_for(n_sessions, hub.config.session.close_timeout);
    tracing::info!(n_sessions, window_s = over.as_secs_f64(), "closing sessions");
    hub.depart(Departure { who: Who::All, reason: CloseReason::Drain, over });
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_window_fits_the_deadline_and_few_sessions_leave_at_once() {
        let s = Duration::from_secs;
        let config = DrainConfig { grace: s(5), window: Window::Auto, deadline: s(120), takes_per_second: 50.0 };
        assert_eq!(config.window_for(0, s(3)), Duration::ZERO);
        assert_eq!(config.window_for(1, s(3)), Duration::from_millis(20));
        assert_eq!(config.window_for(1_000, s(3)), s(20));
        assert_eq!(config.window_for(1_000_000, s(3)), s(112));
        let fixed = DrainConfig { window: Window::Fixed(s(10)), ..config };
        assert_eq!(fixed.window_for(1, s(3)), s(10));
    }
}
