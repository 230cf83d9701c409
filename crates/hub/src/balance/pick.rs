//! Whom to move, once it is known how many: those who will notice it least, and who would have had
//! to leave soon anyway, so that moving hardly adds to what a client lives through in an hour.

use std::time::Duration;

use tokio::time::Instant;

/// For each session to be moved, look at so many drawn at random: enough to find idle ones, and
/// never a walk over all.
pub const SAMPLE: usize = 8;

/// Idle for longer than this: nothing is going on.
pub const IDLE: Duration = Duration::from_secs(30);

/// Whoever was moved or cut off so lately is moved again only where nobody else is found.
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
    /// It came with a cursor, so it was moved or cut off when it opened here. Of moves before that
    /// nothing is known.
    pub has_come_back: bool,
    /// When its age ends; `None`: never.
    pub recycle_at: Option<Instant>,
}

impl Candidate {
    /// May it be moved at all, where sessions stay for so long (`BalanceConfig::stays`)?
    pub fn may_move(&self, now: Instant, stays: Duration) -> bool {
        let is_busy = self.busy_until.is_some_and(|until| until > now);
        !is_busy && self.age(now) >= stays
    }

    fn age(&self, now: Instant) -> Duration {
        now.saturating_duration_since(self.opened_at)
    }

    fn is_active(&self, now: Instant) -> bool {
        now.saturating_duration_since(self.idle_since) <= IDLE
    }

    fn was_moved_lately(&self, now: Instant) -> bool {
        self.has_come_back && self.age(now) < MOVED_LATELY
    }
}

/// The places in `candidates` of the `n` to be moved, or fewer where not enough may be: idle ones
/// first, of those the ones that were not moved lately, and of those the ones whose age ends soonest.
pub fn choose(now: Instant, stays: Duration, candidates: &[Candidate], n: usize) -> Vec<usize> {
    let mut chosen: Vec<usize> = (0..candidates.len()).filter(|i| candidates[*i].may_move(now, stays)).collect();
    chosen.sort_by_key(|i| {
        let one = &candidates[*i];
        (one.is_active(now), one.was_moved_lately(now), one.recycle_at.is_none(), one.recycle_at)
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

    const STAYS: Duration = s(120);

    fn quiet(now: Instant) -> Candidate {
        Candidate {
            opened_at: now - s(1_000),
            idle_since: now - s(100),
            busy_until: None,
            has_come_back: false,
            recycle_at: Some(now + s(1_000)),
        }
    }

    fn now() -> Instant {
        Instant::now() + s(10_000)
    }

    fn chosen(now: Instant, candidates: &[Candidate], n: usize) -> Vec<usize> {
        choose(now, STAYS, candidates, n)
    }

    #[test]
    fn idle_sessions_leave_first_and_of_those_the_ones_that_must_leave_soonest() {
        let now = now();
        let active = Candidate { idle_since: now - s(30), recycle_at: Some(now + s(1)), ..quiet(now) };
        let idle = Candidate { idle_since: now - s(31), ..quiet(now) };
        let soon = Candidate { recycle_at: Some(now + s(60)), ..quiet(now) };
        let never = Candidate { recycle_at: None, ..quiet(now) };
        let all = [active, never, idle, soon];
        assert_eq!(chosen(now, &all, 4), [3, 2, 1, 0]);
        assert_eq!(chosen(now, &all, 1), [3]);
        assert!(chosen(now, &all, 0).is_empty());
        assert!(chosen(now, &[], 4).is_empty());
    }

    #[test]
    fn a_busy_session_stays_until_its_time_is_over() {
        let now = now();
        let busy = Candidate { busy_until: Some(now + s(1)), ..quiet(now) };
        assert!(chosen(now, &[busy], 1).is_empty());
        assert_eq!(chosen(now + s(1), &[busy], 1), [0]);
    }

    #[test]
    fn a_session_is_left_alone_for_as_long_as_sessions_stay_whichever_way_it_came() {
        let now = now();
        for has_come_back in [false, true] {
            let young = Candidate { opened_at: now - s(119), has_come_back, ..quiet(now) };
            assert!(chosen(now, &[young], 1).is_empty());
            assert_eq!(chosen(now + s(1), &[young], 1), [0]);
            assert_eq!(choose(now, s(119), &[young], 1), [0]);
        }
    }

    #[test]
    fn whoever_was_moved_within_ten_minutes_is_moved_again_only_for_want_of_others() {
        let now = now();
        let moved = |ago| Candidate { opened_at: now - s(ago), has_come_back: true, ..quiet(now) };
        let (lately, earlier) = (moved(599), moved(600));
        let later = Candidate { recycle_at: Some(now + s(2_000)), ..quiet(now) };
        assert_eq!(chosen(now, &[lately, later, earlier], 3), [2, 1, 0]);
        // But an idle one goes before one that would notice.
        let active = Candidate { idle_since: now, ..quiet(now) };
        assert_eq!(chosen(now, &[active, lately], 2), [1, 0]);
    }
}
