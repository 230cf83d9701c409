//! Time and chance, the only two outside things the hub knows. Decides nothing; it makes what
//! depends on them repeatable in a test. Monotonic time is `tokio::time::Instant` everywhere; where
//! thousands are kept it is a `Moment`, which is the same in less room.

use std::num::NonZeroU64;
use std::ops::Add;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use tokio::time::Instant;

/// The system's clock is followed where it differs by so much. A clock that is slewed moves the monotonic one
/// with it, so a smaller difference is none of a step.
const STEP: Duration = Duration::from_secs(1);

/// Wall-clock time that advances with tokio's clock: under a paused clock `exp` moves too. All clones
/// show the same.
#[derive(Clone, Debug)]
pub struct Clock {
    started: Instant,
    /// Nanoseconds since 1970 at `started`, wrapping (it may lie before); until 2554.
    unix_at_start: Arc<AtomicU64>,
    source: Source,
}

#[derive(Clone, Copy, Debug)]
enum Source {
    System,
    /// Whoever made it said what it shows.
    Told,
}

/// The system's clock was set, or the machine slept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Step {
    Forward(Duration),
    Back(Duration),
}

impl Clock {
    /// The system's clock. Between two calls of `follow` it advances monotonically with tokio's.
    pub fn system() -> Self {
        Self::new(system_time(), Source::System)
    }

    /// A clock that shows `unix` (time since 1970) now.
    pub fn at(unix: Duration) -> Self {
        Self::new(unix, Source::Told)
    }

    fn new(unix: Duration, source: Source) -> Self {
        Self { started: Instant::now(), unix_at_start: Arc::new(AtomicU64::new(nanos(unix))), source }
    }

    /// Time since 1970-01-01 UTC.
    pub fn unix(&self) -> Duration {
        Duration::from_nanos(self.unix_at_start.load(Ordering::Relaxed).wrapping_add(nanos(self.started.elapsed())))
    }

    /// The instant at which this clock will show `unix`, as it goes now; the past gives now.
    pub fn instant_of(&self, unix: Duration) -> Instant {
        Instant::now() + unix.saturating_sub(self.unix())
    }

    /// Takes over what the system's clock shows, where it was set by a second or more since it was read: a
    /// node that started before the machine knew the time, or slept with it, must not go by the wrong
    /// one until it is restarted. To be called about once a second, by one only.
    pub(crate) fn follow(&self) -> Option<Step> {
        match self.source {
            Source::System => self.set(system_time()),
            Source::Told => None,
        }
    }

    /// Shows `unix` from now on, if that is another time.
    pub(crate) fn set(&self, unix: Duration) -> Option<Step> {
        let shown = self.unix();
        if unix.abs_diff(shown) < STEP {
            return None;
        }
        self.unix_at_start.store(nanos(unix).wrapping_sub(nanos(self.started.elapsed())), Ordering::Relaxed);
        Some(match unix.checked_sub(shown) {
            Some(by) => Step::Forward(by),
            None => Step::Back(shown - unix),
        })
    }
}

fn system_time() -> Duration {
    #[allow(clippy::disallowed_methods)]
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default()
}

fn nanos(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

/// A point in time as sessions keep it: 8 bytes, as an `Option` too, where an `Instant` takes 16. Exact
/// to the nanosecond: an instant comes back from it as it went in.
///
/// It counts from a day before the process first asked. So it holds every instant of every runtime of
/// the process, paused clocks included, for they begin at the real time and only move on; and
/// those that lie up to a day before that, where the machine's clock reaches so far back. Whatever is
/// earlier is the first moment, and what is more than 584 years later the last.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Moment(NonZeroU64);

impl Moment {
    /// The time from `earlier` to this; zero where that is later.
    pub fn since(self, earlier: Moment) -> Duration {
        Duration::from_nanos(self.0.get().saturating_sub(earlier.0.get()))
    }
}

impl From<Instant> for Moment {
    fn from(at: Instant) -> Self {
        let since = at.saturating_duration_since(epoch()).as_nanos();
        Self(NonZeroU64::new(u64::try_from(since).unwrap_or(u64::MAX)).unwrap_or(NonZeroU64::MIN))
    }
}

impl From<Moment> for Instant {
    fn from(at: Moment) -> Self {
        epoch() + Duration::from_nanos(at.0.get())
    }
}

impl Add<Duration> for Moment {
    type Output = Self;

    fn add(self, span: Duration) -> Self {
        Self(self.0.saturating_add(u64::try_from(span.as_nanos()).unwrap_or(u64::MAX)))
    }
}

/// What moments count from. Of the real clock: a paused one may have been moved on by years when it is
/// asked first, and would put the instants of all others before the beginning.
fn epoch() -> Instant {
    static EPOCH: OnceLock<Instant> = OnceLock::new();
    *EPOCH.get_or_init(|| {
        const HOUR: Duration = Duration::from_secs(3_600);
        #[allow(clippy::disallowed_methods)]
        let now = std::time::Instant::now();
        // Some systems' clocks begin when the machine does.
        let earlier = [24 * HOUR, HOUR, HOUR / 60].into_iter().find_map(|span| now.checked_sub(span));
        Instant::from_std(earlier.unwrap_or(now))
    })
}

/// The one source of jitter. Cheap to clone; all clones draw from one seeded generator.
#[derive(Clone)]
pub struct Dice(Arc<Mutex<StdRng>>);

impl Dice {
    /// A generator whose whole sequence follows from `seed`.
    pub fn seeded(seed: u64) -> Self {
        Self(Arc::new(Mutex::new(StdRng::seed_from_u64(seed))))
    }

    /// Uniform in `[0, 1)`.
    pub fn unit(&self) -> f64 {
        self.0.lock().expect("no panic while the dice are held").random::<f64>()
    }

    /// Uniform in `[low, high)`; `low` where the range is empty.
    pub fn between(&self, low: Duration, high: Duration) -> Duration {
        low + high.saturating_sub(low).mul_f64(self.unit())
    }

    /// 64 random bits, for session ids and incarnation tags (not for secrets).
    pub fn bits(&self) -> u64 {
        self.0.lock().expect("no panic while the dice are held").random::<u64>()
    }
}

impl std::fmt::Debug for Dice {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Dice")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_clock_that_was_set_is_followed_by_all_its_clones_and_one_that_only_strays_is_not() {
        let at = Duration::from_secs;
        let (hour, clock) = (at(3_600), Clock::at(at(1_000_000)));
        let clone = clock.clone();
        tokio::time::advance(at(10)).await;
        assert_eq!((clock.set(at(1_000_010) + STEP / 2), clock.unix()), (None, at(1_000_010)));
        assert_eq!(clock.set(at(1_000_010) + 8 * hour), Some(Step::Forward(8 * hour)));
        tokio::time::advance(at(5)).await;
        assert_eq!(clone.unix(), at(1_000_015) + 8 * hour);
        assert_eq!(clock.set(at(1_000_015)), Some(Step::Back(8 * hour)));
        assert_eq!(clone.unix(), at(1_000_015));
        assert_eq!(clock.follow(), None, "what it shows it was told");
        assert_eq!(Clock::system().follow(), None);
        assert_eq!((clock.set(at(2)), clone.unix()), (Some(Step::Back(at(1_000_013))), at(2)));
    }

    #[tokio::test(start_paused = true)]
    async fn an_instant_comes_back_from_a_moment_as_it_went_in_and_the_two_agree_on_time() {
        let now = Instant::now();
        let years = 50 * 365 * Duration::from_secs(86_400);
        let spans = [0, 1, 999_999_999, 1_000_000_001].map(Duration::from_nanos).into_iter().chain([years]);
        for span in spans {
            tokio::time::advance(span.min(Duration::from_secs(1))).await;
            let later = now + span;
            assert_eq!(Instant::from(Moment::from(later)), later);
            assert_eq!(Moment::from(now) + span, Moment::from(later));
            assert_eq!(Moment::from(later).since(Moment::from(now)), span);
            assert_eq!(Moment::from(now).since(Moment::from(later)), Duration::ZERO);
        }
        let earlier = now.checked_sub(Duration::from_secs(50)).unwrap();
        assert_eq!(Instant::from(Moment::from(earlier)), earlier);
        assert!(Moment::from(earlier) < Moment::from(now));
    }

    #[test]
    fn clocks_that_were_moved_on_by_years_and_those_that_were_not_tell_the_same_moments() {
        let runtime =
            || tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build().unwrap();
        let moved = runtime().block_on(async {
            tokio::time::advance(Duration::from_secs(100_000_000)).await;
            let now = Instant::now();
            assert_eq!(Instant::from(Moment::from(now)), now);
            Moment::from(now)
        });
        runtime().block_on(async {
            let now = Instant::now();
            assert_eq!(Instant::from(Moment::from(now)), now);
            assert!(Moment::from(now) < moved);
        });
    }

    #[test]
    fn what_is_beyond_either_end_stays_there() {
        let (first, last) = (Moment(NonZeroU64::MIN), Moment(NonZeroU64::MAX));
        assert_eq!(last + Duration::from_nanos(1), last);
        assert_eq!(first + Duration::MAX, last);
        assert_eq!(last.since(first), Duration::from_nanos(u64::MAX - 1));
        assert_eq!(Moment::from(epoch()), first);
        assert_eq!(size_of::<Option<Moment>>(), 8);
    }
}
