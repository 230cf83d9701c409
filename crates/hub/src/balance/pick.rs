//! Whom to move, once it is known how many: those who will notice it least, and who would have had
//! to leave soon anyway, so that moving hardly adds to what a client lives through in an hour.

use std::time::Duration;

use tokio::time::Instant;

/// For each session to be moved, so many are looked at, drawn at random: enough to find idle ones.
const SAMPLE: usize = 8;

/// Where too few of those are idle and have not been moved lately, so many are looked at in a second,
/// and no more: under 4 ms, less than listing 50,000 takes (measured, not optimised). Behind a
/// balancer that hands out in turn, evening out takes about as many moves as the fleet has sessions,
/// however many nodes are new, so each has to be moved once and none needs to be twice; but towards
/// the end the ones that have not been moved are one in a hundred, and in a sample there are none.
/// (50,000 sessions from six to ten nodes: of 49,400 moves 1,400 were of somebody who had been moved
/// already, now none.)
const LOOKED_AT: usize = 5_000;

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

    /// When it was moved, if that was lately.
    fn moved_at(&self, now: Instant) -> Option<Instant> {
        (self.has_come_back && self.age(now) < MOVED_LATELY).then_some(self.opened_at)
    }

    /// Could none be better, but for its age?
    fn is_first_choice(&self, now: Instant) -> bool {
        !self.is_active(now) && self.moved_at(now).is_none()
    }
}

/// The `n` to be moved of those that come, in a random order, or fewer where not enough may be: idle
/// ones first, of those the ones that were not moved lately, or the longest ago, and of those the
/// ones whose age ends soonest. Takes no more from `some` than it needs to find good ones.
pub fn choose<T>(now: Instant, stays: Duration, some: impl IntoIterator<Item = (Candidate, T)>, n: usize) -> Vec<T> {
    let (mut found, mut n_first) = (Vec::new(), 0);
    for (i, (one, whose)) in some.into_iter().enumerate() {
        if one.may_move(now, stays) {
            n_first += usize::from(one.is_first_choice(now));
            found.push((one, whose));
        }
        let is_enough = i + 1 >= n * SAMPLE && (n_first >= n || i + 1 >= LOOKED_AT);
        if is_enough {
            break;
        }
    }
    found.sort_by_key(|(one, _)| (one.is_active(now), one.moved_at(now), one.recycle_at.is_none(), one.recycle_at));
    found.truncate(n);
    found.into_iter().map(|(_, whose)| whose).collect()
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

    fn numbered(candidates: &[Candidate]) -> impl Iterator<Item = (Candidate, usize)> {
        candidates.iter().enumerate().map(|(i, one)| (*one, i))
    }

    fn chosen(now: Instant, candidates: &[Candidate], n: usize) -> Vec<usize> {
        choose(now, STAYS, numbered(candidates), n)
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
            assert_eq!(choose(now, s(119), [(young, 0)], 1), [0]);
        }
    }

    #[test]
    fn whoever_was_moved_within_ten_minutes_is_moved_again_only_for_want_of_others() {
        let now = now();
        let moved = |ago| Candidate { opened_at: now - s(ago), has_come_back: true, ..quiet(now) };
        let (lately, earlier) = (moved(599), moved(600));
        let later = Candidate { recycle_at: Some(now + s(2_000)), ..quiet(now) };
        assert_eq!(chosen(now, &[lately, later, earlier], 3), [2, 1, 0]);
        // For want of others: whoever has been here longest, cut off then perhaps and moved by nobody.
        let soon = Candidate { recycle_at: Some(now + s(1)), ..moved(130) };
        assert_eq!(chosen(now, &[soon, moved(200), lately], 3), [2, 1, 0]);
        // But an idle one goes before one that would notice.
        let active = Candidate { idle_since: now, ..quiet(now) };
        assert_eq!(chosen(now, &[active, lately], 2), [1, 0]);
    }

    #[test]
    fn eight_are_looked_at_for_each_and_more_only_where_too_few_of_them_are_good() {
        let now = now();
        let moved = Candidate { opened_at: now - s(200), has_come_back: true, ..quiet(now) };
        let active = Candidate { idle_since: now, ..quiet(now) };
        let looked_at = |candidates: &[Candidate], n| {
            let mut n_looked = 0;
            let chosen = choose(now, STAYS, numbered(candidates).inspect(|_| n_looked += 1), n);
            (n_looked, chosen)
        };
        assert_eq!(looked_at(&[quiet(now); 100], 10).0, 80);
        for bad in [moved, active] {
            let mut one_good = vec![bad; 20_000];
            one_good[4_000] = quiet(now);
            assert_eq!(looked_at(&one_good, 1), (4_001, vec![4_000]));
            // A second one is nowhere near.
            let (n_looked, chosen) = looked_at(&one_good, 2);
            assert_eq!((n_looked, chosen.len(), chosen[0]), (5_000, 2, 4_000));
        }
        assert_eq!(looked_at(&[moved; 100], 10).0, 100);
        assert_eq!(looked_at(&vec![moved; 20_000], 2_000).0, 16_000);
    }
}
