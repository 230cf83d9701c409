//! When a session must go or be looked at: its one leave (the earliest of age, token and ask), its
//! beats and deadlines, and how many messages it may send. Decides by the instant it is given;
//! who looks is the hub's wheel.

use std::time::Duration;

use tokio::time::Instant;

use super::{Due, Flood, SessionConfig, SessionInfo, Stage, State};
use crate::balance::pick::Candidate;
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
        if self.ask.is_none_or(|(earlier, _)| at < earlier) {
            self.ask = Some((at, reason));
        }
        true
    }

    /// The client asks not to be moved for a while; zero ends it.
    pub fn set_busy(&mut self, now: Instant, span: Duration) {
        self.busy_until = (span > Duration::ZERO).then_some(now + span);
    }

    /// A new token: its end replaces the old one's.
    pub fn set_token_end(&mut self, token_at: Option<Instant>, expiring_at: Option<Instant>) {
        self.token_at = token_at;
        self.expiring_at = expiring_at;
    }

    /// The one leave: the earliest of age, token and ask.
    fn leave(&self) -> Option<(Instant, CloseReason)> {
        let age = self.age_at.map(|at| (at, CloseReason::Recycle));
        let token = self.token_at.map(|at| (at, CloseReason::TokenExpired));
        [age, token, self.ask].into_iter().flatten().min_by_key(|(at, _)| *at)
    }

    pub(super) fn due(&mut self, now: Instant, info: &SessionInfo, config: &SessionConfig) -> Option<Due> {
        if let Some(ending) = &self.ending {
            return (now >= ending.close_by).then_some(Due::Cut(ending.reason));
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
            CloseReason::Recycle if self.age_at.is_some() && self.ask.is_none_or(|(ask, _)| ask > at) => {
                let postponed = Duration::from_millis(u64::from(self.postponed_ms));
                let (busy_until, is_extended) = (self.busy_until, self.is_extended);
                Some(Due::Aged(Aged { opened_at: info.opened_at, busy_until, postponed, is_extended }))
            }
            _ => Some(Due::Leave(reason)),
        }
    }

    /// What was decided of its age.
    pub(super) fn aged(&mut self, verdict: Verdict) {
        match verdict {
            Verdict::Leave => {}
            Verdict::Postpone { to, postponed } => {
                self.postponed_ms = u32::try_from(postponed.as_millis()).unwrap_or(u32::MAX);
                self.age_at = Some(to);
            }
            Verdict::Extend(to) => {
                self.is_extended = true;
                self.age_at = Some(to);
            }
        }
    }

    /// What is known of it when some are to be moved; `None` where it is leaving already.
    pub(super) fn candidate(&self, opened_at: Instant) -> Option<Candidate> {
        (!self.is_over()).then_some(Candidate {
            opened_at,
            idle_since: self.message_at.max(self.event_at),
            busy_until: self.busy_until,
            has_come_back: matches!(self.resumed, Some(Resume::Ok | Resume::Gap)),
            recycle_at: self.age_at,
        })
    }

    /// Beats, positions and warnings. Returns whether something was queued.
    pub(super) fn on_beat(&mut self, now: Instant, info: &SessionInfo, node: EventId, config: &SessionConfig) -> bool {
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
                let m = message::token_expiring(at.saturating_duration_since(now));
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

    fn beat(&mut self, info: &SessionInfo, now: Instant, config: &SessionConfig) {
        match info.wire {
            Wire::Ws => {
                self.push_own(frame(0x9, b""), info.wire);
                self.alive_by.get_or_insert(now + config.heartbeat_timeout);
            }
            Wire::Sse => self.push_own(http_chunk(b":\n\n"), info.wire),
        }
    }

    pub(super) fn next_due(&self, now: Instant, config: &SessionConfig) -> Instant {
        if let Some(ending) = &self.ending {
            return ending.close_by;
        }
        let mut next = self.next_beat;
        let mut sooner = |at: Option<Instant>| {
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
        let since = now.saturating_duration_since(self.message_at).as_secs_f64();
        self.message_at = now;
        self.message_tokens = (self.message_tokens + since * config.client_rate).min(config.client_burst);
        self.message_tokens -= cost;
        if self.message_tokens >= 0.0 {
            return Ok(());
        }
        if self.message_tokens < -config.client_burst {
            return Err(Flood::Far);
        }
        Err(Flood::Over(Duration::from_secs_f64(-self.message_tokens / config.client_rate)))
    }
}
