//! The node's pulse: turns the wheel, so that each session is looked at when it must be, and once a second looks
//! at what changes by itself: counts, the way of recycling, the system's clock. Decides who waits for the backplane
//! to come back; what becomes of a session that is due is `session`'s and `recycle`'s.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use tokio::time::{Instant, MissedTickBehavior, interval};

use super::Hub;
use crate::clock::Step;
use crate::recycle::{Aged, Way};
use crate::session::Session;
use crate::wheel::{TICK, Tick};

impl Hub {
    /// Has the wheel look at the session when it next must.
    pub(crate) fn arm(&self, session: &Arc<Session>) {
        let due = session.next_due(Instant::now(), &self.config.session);
        self.schedule(session, due);
    }

    fn schedule(&self, session: &Arc<Session>, due: Instant) {
        let tick = self.wheel.tick_at(due);
        let mut state = session.lock();
        if tick < state.scheduled {
            state.scheduled = tick;
            drop(state);
            self.wheel.add(tick, &session.info.id);
        }
    }

    fn turn(&self, now: Instant) {
        let is_cut_off = self.is_cut_off();
        for (tick, sessions) in self.wheel.due(now) {
            for session in sessions.filter_map(|id| self.sessions.get(&id)) {
                {
                    let mut state = session.lock();
                    // An entry that an earlier one has overtaken.
                    if state.scheduled != tick {
                        continue;
                    }
                    state.scheduled = Tick::MAX;
                }
                if is_cut_off {
                    self.await_expiry(&session, now);
                }
                let n_sessions = self.n_sessions.load(Ordering::Relaxed);
                let aged = |one: &Aged| self.recycle.judge(now, one, n_sessions, &self.dice);
                let next = session.on_time(now, self.place.position(), &self.config.session, &self.dice, aged);
                // Never the tick that was just handled.
                self.schedule(&session, next.max(now + Duration::from_millis(1)));
            }
        }
    }

    /// Once a second: what is counted over seconds, and who goes first. There is one budget for all
    /// that are moved by choice: a drain before shedding before recycling.
    fn pulse(&self, now: Instant) {
        self.fleet.look(now, self.counts());
        let is_second = self.shed.is_under_way() || self.fleet.is_peer_leaving();
        self.recycle.set_way(if self.is_cut_off() {
            Way::Stays
        } else if is_second {
            Way::Yields
        } else {
            Way::Open
        });
        if let Some(step) = self.clock.follow() {
            self.clock_was_set(step);
        }
    }

    /// Does the backplane fail, or did it just now? Whoever leaves then may find no node that can take it in.
    pub(crate) fn is_cut_off(&self) -> bool {
        self.fleet.failing_since().is_some() || !self.place.state().is_live
    }

    /// A session that was to end a little before its token does, so that tokens minted together do not end
    /// together, has the rest of its time.
    fn await_expiry(&self, session: &Session, now: Instant) {
        let mut state = session.lock();
        if state.token_end().0.is_none_or(|at| at > now) {
            return;
        }
        let expires_at = state.identity.expires_at.map(|at| self.clock.instant_of(at));
        if let Some(at) = expires_at.filter(|at| *at > now) {
            state.set_token_end(Some(at), None);
        }
    }

    /// Tokens end by the wall's clock, and were judged by the wrong time.
    pub(crate) fn clock_was_set(&self, step: Step) {
        tracing::warn!(?step, "the system's clock was set, or the machine slept: tokens are judged by the new time");
        let moved = |at: Instant| match step {
            Step::Forward(by) => at.checked_sub(by).unwrap_or_else(Instant::now),
            Step::Back(by) => at + by,
        };
        for session in self.all_sessions() {
            {
                let mut state = session.lock();
                let (token_at, expiring_at) = state.token_end();
                state.set_token_end(token_at.map(moved), expiring_at.map(moved));
            }
            self.arm(&session);
        }
    }

    /// Sums what waits in all outboxes into the gauge.
    fn gauge_outboxes(&self, last: &mut i64) {
        let bytes: usize = self.all_sessions().iter().map(|s| s.lock().outbox.bytes()).sum();
        let bytes = i64::try_from(bytes).unwrap_or(i64::MAX);
        self.metrics.outbox_bytes(bytes - *last);
        *last = bytes;
    }
}

pub(super) async fn turn_wheel(hub: Arc<Hub>) {
    let mut ticks = interval(TICK);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Skip);
    let (mut n, mut outboxes) = (0u64, 0);
    // Keeps the position of a quiet node young: twice between two `position` messages, at least
    // once in 15 s, at most once a second.
    let beacon_every = (hub.config.session.position_every / 2).clamp(Duration::from_secs(1), Duration::from_secs(15));
    let beacon_every = (beacon_every.as_millis() / TICK.as_millis()) as u64;
    loop {
        tokio::select! {
            _ = ticks.tick() => {}
            () = hub.stop.cancelled() => return,
        }
        let now = Instant::now();
        hub.turn(now);
        if n.is_multiple_of(10) {
            hub.pulse(now);
        }
        if n.is_multiple_of(beacon_every) {
            hub.backplane.beacon();
        }
        n += 1;
        if n.is_multiple_of(50) {
            hub.gauge_outboxes(&mut outboxes);
        }
    }
}
