//! When a session must go or be looked at: its one leave (the earliest of age, token and ask), its
//! beats and deadlines, and how many messages it may send. Decides by the instant it is given;
//! who looks is the hub's wheel.

use std::time::Duration;

use tokio::time::Instant;

use super::{Due, Exit, Flood, SessionConfig, SessionInfo, Stage, State};
use crate::balance::pick::Candidate;
use crate::clock::Moment;
use crate::close::CloseReason;
use crate::cursor::EventId;
use crate::event::{Wire, frame, http_chunk};
use crate::message::{self, Resume};
use crate::recycle::{Aged, Verdict};

impl State {
    // ---- leaving

    /// Asks the session to leave at `at`; only ever moves its end earlier.
    pub fn ask_to_leave(&mut self, at: Instant, reason: CloseReason) -> bool {
        if self.is_over() {
            return false;
        }
        let at = at.into();
        if self.ask().is_none_or(|(earlier, _)| at < earlier) {
            self.exit = Exit::Asked(at, reason);
        }
        true
    }

    /// The client asks not to be moved for a while; zero ends it.
    pub fn set_busy(&mut self, now: Instant, span: Duration) {
        let busy_until = (span > Duration::ZERO).then(|| (now + span).into());
        if busy_until.is_some() || self.put_off.is_some() {
            self.put_off.get_or_insert_default().busy_until = busy_until;
        }
    }

    /// A new token: its end replaces the old one's.
    pub fn set_token_end(&mut self, token_at: Option<Instant>, expiring_at: Option<Instant>) {
        self.token_at = token_at.map(Moment::from);
        self.expiring_at = expiring_at.map(Moment::from);
    }

    /// When the session ends with its token, and when its client is told that it is about to.
    pub fn token_end(&self) -> (Option<Instant>, Option<Instant>) {
        (self.token_at.map(Instant::from), self.expiring_at.map(Instant::from))
    }

    fn ask(&self) -> Option<(Moment, CloseReason)> {
        match self.exit {
            Exit::Asked(at, reason) => Some((at, reason)),
            Exit::None | Exit::Ending(..) | Exit::Cut(_) => None,
        }
    }

    /// The one leave: the earliest of age, token and ask.
    fn leave(&self) -> Option<(Moment, CloseReason)> {
        let age = self.age_at.map(|at| (at, CloseReason::Recycle));
        let token = self.token_at.map(|at| (at, CloseReason::TokenExpired));
        [age, token, self.ask()].into_iter().flatten().min_by_key(|(at, _)| *at)
    }

    pub(super) fn due(&mut self, now: Moment, info: &SessionInfo, config: &SessionConfig) -> Option<Due> {
        match self.exit {
            Exit::Ending(reason, close_by) => return (now >= close_by).then_some(Due::Cut(reason)),
            Exit::Cut(reason) => return Some(Due::Cut(reason)),
            Exit::None | Exit::Asked(..) => {}
        }
        if self.alive_by.is_some_and(|by| now >= by) {
            return Some(Due::Cut(CloseReason::Unresponsive));
        }
        if self.blocked_since.is_some_and(|since| now >= since + config.write_timeout) {
            // Not even a bye may get through in time, but it is tried: the cut follows anyway.
            return Some(Due::Leave(CloseReason::Slow));
        }
        let (at, reason) = self.leave()?;
        if now < at {
            return None;
        }
        match reason {
            // Its age alone ends it, and that can wait a little.
            CloseReason::Recycle if self.age_at.is_some() && self.ask().is_none_or(|(ask, _)| ask > at) => {
                Some(Due::Aged(self.age(info)))
            }
            _ => Some(Due::Leave(reason)),
        }
    }

    fn age(&self, info: &SessionInfo) -> Aged {
        let (postponed, is_extended) =
            self.put_off.as_ref().map_or_else(Default::default, |it| (it.postponed, it.is_extended));
        Aged { opened_at: info.opened_at, busy_until: self.busy_until(), postponed, is_extended }
    }

    fn busy_until(&self) -> Option<Instant> {
        Some(self.put_off.as_ref()?.busy_until?.into())
    }

    /// What was decided of its age.
    pub(super) fn aged(&mut self, verdict: Verdict) {
        match verdict {
            Verdict::Leave => {}
            Verdict::Postpone { to, postponed } => {
                self.put_off.get_or_insert_default().postponed = postponed;
                self.age_at = Some(to.into());
            }
            Verdict::Extend(to) => {
                self.put_off.get_or_insert_default().is_extended = true;
                self.age_at = Some(to.into());
            }
        }
    }

    /// What is known of it when some are to be moved; `None` where it is leaving already.
    pub(super) fn candidate(&self, opened_at: Instant) -> Option<Candidate> {
        (!self.is_over()).then_some(Candidate {
            opened_at,
            idle_since: self.active_at.into(),
            busy_until: self.busy_until(),
            has_come_back: matches!(self.resumed, Some(Resume::Ok | Resume::Gap)),
            recycle_at: self.age_at.map(Instant::from),
        })
    }

    /// Beats, positions and warnings. Returns whether something was queued.
    pub(super) fn on_beat(&mut self, now: Moment, info: &SessionInfo, node: EventId, config: &SessionConfig) -> bool {
        if self.is_over() {
            return false;
        }
        let before = self.outbox.bytes();
        if now >= self.next_beat {
            self.next_beat = now + config.heartbeat;
            self.beat(info, now, config);
        }
        if self.expiring_at.is_some_and(|at| now >= at) {
            self.expiring_at = None;
            if let Some(at) = self.token_at {
                let m = message::token_expiring(at.since(now));
                self.push_own(m.on(info.wire), info.wire);
            }
        }
        if self.stage == Stage::Live && now >= self.id_sent_at + config.position_every {
            let m = message::position(self.position_with(node));
            self.id_sent_at = now;
            self.push_own(m.on(info.wire), info.wire);
        }
        self.outbox.bytes() > before
    }

    fn beat(&mut self, info: &SessionInfo, now: Moment, config: &SessionConfig) {
        match info.wire {
            Wire::Ws => {
                self.push_own(frame(0x9, b""), info.wire);
                self.alive_by.get_or_insert(now + config.heartbeat_timeout);
            }
            Wire::Sse => self.push_own(http_chunk(b":\n\n"), info.wire),
        }
    }

    pub(super) fn next_due(&self, now: Moment, config: &SessionConfig) -> Moment {
        match self.exit {
            Exit::Ending(_, close_by) => return close_by,
            Exit::Cut(_) => return now,
            Exit::None | Exit::Asked(..) => {}
        }
        let mut next = self.next_beat;
        let mut sooner = |at: Option<Moment>| {
            if let Some(at) = at {
                next = next.min(at);
            }
        };
        sooner(self.leave().map(|(at, _)| at));
        sooner(self.alive_by);
        sooner(self.expiring_at);
        sooner(self.blocked_since.map(|since| since + config.write_timeout));
        sooner((self.stage == Stage::Live).then(|| self.id_sent_at + config.position_every));
        next.max(now)
    }

    // ---- message rate

    /// Takes `cost` messages from the client's bucket. `Err` says after how long there is room;
    /// the bucket may go a whole burst into debt before the session is ended.
    pub fn take_messages(&mut self, cost: f64, now: Instant, config: &SessionConfig) -> Result<(), Flood> {
        let now = Moment::from(now);
        self.active_at = now;
        let takes = |n_messages: f64| Duration::from_nanos((n_messages * 1e9 / config.client_rate) as u64);
        let burst = takes(config.client_burst);
        self.burst_at = self.burst_at.max(now) + takes(cost);
        let short_of = self.burst_at.since(now);
        if short_of <= burst {
            Ok(())
        } else if short_of <= 2 * burst {
            Err(Flood::Over(short_of - burst))
        } else {
            Err(Flood::Far)
        }
    }
}
