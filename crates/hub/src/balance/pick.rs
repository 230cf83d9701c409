//! Whom to move, once it is known how many: those who will notice it least, and who would have had
//! to leave soon anyway, so that moving hardly adds to what a client lives through in an hour.

use std::time::Duration;

use tokio::time::Instant;

/// For each session to be moved, look at so many drawn at random: enough to find idle ones, and
/// never a walk over all.
pub const SAMPLE: usize = 8;

/// Idle for longer than this: nothing is going on.
pub const IDLE: Duration = Duration::from_secs(30);

/// Whoever came so lately may just have been moved here.
pub const TOO_YOUNG: Duration = Duration::from_secs(120);

/// Nobody is moved a third time within this.
pub const MOVED_LATELY: Duration = Duration::from_secs(600);

/// What is known of a session that might be moved.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Candidate {
    /// When it opened here.
    pub opened_at: Instant,
    /// The last event or message in either direction; pings and positions are none.
    pub idle_since: Instant,
    /// Until then the client asked not to be moved.
    pub busy_until: Option<Instant>,
    /// When this client was moved the last two times, as far as is known.
    pub moved_at: [Option<Instant>; 2],
    /// When its age ends; `None`: never.
    pub recycle_at: Option<Instant>,
}

impl Candidate {
    /// May it be moved at all?
    pub fn may_move(&self, now: Instant) -> bool {
        let is_busy = self.busy_until.is_some_and(|until| until > now);
        let is_young = now.saturating_duration_since(self.opened_at) < TOO_YOUNG;
        let was_moved = |at: &Option<Instant>| at.is_some_and(|at| now.saturating_duration_since(at) < MOVED_LATELY);
        !is_busy && !is_young && !self.moved_at.iter().all(was_moved)
    }

    fn is_active(&self, now: Instant) -> bool {
        now.saturating_duration_since(self.idle_since) <= IDLE
    }
}

/// The places in `candidates` of the `n` to be moved, or fewer where not enough may be: idle ones
/// first, and of those the ones whose age ends soonest.
pub fn choose(now: Instant, candidates: &[Candidate], n: usize) -> Vec<usize> {
    let mut chosen: Vec<usize> = (0..candidates.len()).filter(|i| candidates[*i].may_move(now)).collect();
    chosen.sort_by_key(|i| {
        let one = &candidates[*i];
        (one.is_active(now), one.recycle_at.is_none(), one.recycle_at)
    });
    chosen.truncate(n);
    chosen
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn s(n: u64) -> Duration {
        Duration::from_secs(n)
    }

    fn quiet(now: Instant) -> Candidate {
        Candidate {
            opened_at: now - s(1_000),
            idle_since: now - s(100),
            busy_until: None,
            moved_at: [None, None],
            recycle_at: Some(now + s(1_000)),
        }
    }

    fn now() -> Instant {
        Instant::now() + s(10_000)
    }

    #[test]
    fn idle_sessions_leave_first_and_of_those_the_ones_that_must_leave_soonest() {
        let now = now();
        let active = Candidate { idle_since: now - s(30), recycle_at: Some(now + s(1)), ..quiet(now) };
        let idle = Candidate { idle_since: now - s(31), ..quiet(now) };
        let soon = Candidate { recycle_at: Some(now + s(60)), ..quiet(now) };
        let never = Candidate { recycle_at: None, ..quiet(now) };
        let all = [active, never, idle, soon];
        assert_eq!(choose(now, &all, 4), [3, 2, 1, 0]);
        assert_eq!(choose(now, &all, 1), [3]);
        assert!(choose(now, &all, 0).is_empty());
        assert!(choose(now, &[], 4).is_empty());
    }

    #[test]
    fn a_busy_session_stays_until_its_time_is_over() {
        let now = now();
        let busy = Candidate { busy_until: Some(now + s(1)), ..quiet(now) };
        assert!(choose(now, &[busy], 1).is_empty());
        assert_eq!(choose(now + s(1), &[busy], 1), [0]);
    }

    #[test]
    fn a_session_stays_for_two_minutes_at_least() {
        let now = now();
        let young = Candidate { opened_at: now - s(119), ..quiet(now) };
        assert!(choose(now, &[young], 1).is_empty());
        assert_eq!(choose(now + s(1), &[young], 1), [0]);
    }

    #[test]
    fn pitfall_9_nobody_is_moved_three_times_in_ten_minutes() {
        let now = now();
        let moved = |ago: [Option<u64>; 2]| Candidate { moved_at: ago.map(|a| a.map(|a| now - s(a))), ..quiet(now) };
        assert!(moved([None, None]).may_move(now));
        assert!(moved([Some(130), None]).may_move(now));
        assert!(moved([Some(130), Some(600)]).may_move(now));
        assert!(!moved([Some(130), Some(599)]).may_move(now));
    }
}
