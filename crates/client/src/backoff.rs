//! When to try again. Decides delays only; whether to try at all is the driver's.
//!
//! Every delay is drawn: a crowd that lost its node together must not come back together.

use std::time::Duration;

use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};

/// The bounds that delays are drawn from. A server may set them in its `hello`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pace {
    /// The first delay is drawn from 0 to this. Default 5 s: with less, ten thousand clients of a
    /// crashed node make most of their attempts in its first second.
    pub first_max: Duration,
    /// The ceiling doubles from here. Default 0.5 s.
    pub base: Duration,
    /// No ceiling is above this, before jitter: a cap after it would line the crowd up again. Default 30 s.
    pub cap: Duration,
}

impl Default for Pace {
    fn default() -> Self {
        Pace { first_max: Duration::from_secs(5), base: Duration::from_millis(500), cap: Duration::from_secs(30) }
    }
}

/// A connection that lived this long counts as good and clears the count of failures. Not at the
/// opening: a server that accepts and closes at once would be hammered at the first delay for ever.
pub const STABLE_AFTER: Duration = Duration::from_secs(30);

/// Least width of the jitter on top of a server's hint.
const HINT_JITTER: Duration = Duration::from_secs(1);

/// Draws the delay before each attempt.
#[derive(Debug)]
pub struct Backoff {
    pace: Pace,
    failures: u32,
    dice: StdRng,
}

impl Backoff {
    /// A backoff whose whole sequence follows from `seed`.
    pub fn seeded(pace: Pace, seed: u64) -> Backoff {
        Backoff { pace, failures: 0, dice: StdRng::seed_from_u64(seed) }
    }

    /// Draws from `pace` from now on.
    pub fn set_pace(&mut self, pace: Pace) {
        self.pace = pace;
    }

    /// A connection ended that had been open for `age`.
    pub fn lived(&mut self, age: Duration) {
        if age >= STABLE_AFTER {
            self.failures = 0;
        }
    }

    /// The delay before the next attempt. With a server's `hint` it is never shorter than that and
    /// always a little longer, so that equal hints do not bring a crowd back together.
    pub fn next_delay(&mut self, hint: Option<Duration>) -> Duration {
        let ceiling = self.ceiling();
        let is_first = self.failures == 0;
        self.failures = self.failures.saturating_add(1);
        match hint {
            None => self.up_to(ceiling),
            Some(hint) => {
                let width = HINT_JITTER.max(hint / 10);
                hint.saturating_add(self.up_to(if is_first { width } else { width.max(ceiling) }))
            }
        }
    }

    /// Uniform in `[0, high)`.
    pub fn up_to(&mut self, high: Duration) -> Duration {
        high.mul_f64(self.dice.random::<f64>())
    }

    fn ceiling(&self) -> Duration {
        match self.failures {
            0 => self.pace.first_max,
            n => self.pace.base.saturating_mul(1 << n.min(20)).min(self.pace.cap),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn seed() -> u64 {
        // A failing run is repeated with the seed that it printed.
        let seed = option_env!("TEST_SEED").and_then(|text| text.parse().ok()).unwrap_or(20_251_129);
        println!("TEST_SEED={seed}");
        seed
    }

    fn secs(n: f64) -> Duration {
        Duration::from_secs_f64(n)
    }

    #[test]
    fn delays_fill_the_first_range_then_double_up_to_the_cap() {
        let ceilings = [5.0, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0, 30.0];
        let mut highest = [Duration::ZERO; 9];
        for run in 0..500 {
            let mut backoff = Backoff::seeded(Pace::default(), seed() + run);
            for (n, ceiling) in ceilings.iter().enumerate() {
                let delay = backoff.next_delay(None);
                assert!(delay < secs(*ceiling), "delay {n} was {delay:?}");
                highest[n] = highest[n].max(delay);
            }
        }
        for (n, ceiling) in ceilings.iter().enumerate() {
            assert!(
                highest[n] > secs(ceiling * 0.95),
                "full jitter reaches the ceiling of delay {n}: {:?}",
                highest[n]
            );
        }
    }

    #[test]
    fn a_crowd_comes_back_evenly_over_the_first_range() {
        let mut bins = [0; 5];
        for client in 0..10_000 {
            bins[Backoff::seeded(Pace::default(), seed() + client).next_delay(None).as_secs() as usize] += 1;
        }
        assert!(bins.iter().all(|n| (1_800..2_200).contains(n)), "{bins:?}");
    }

    #[test]
    fn a_hint_is_a_floor_and_equal_hints_are_spread() {
        for hint in [0.0, 0.4, 3.0, 60.0] {
            let delays: Vec<Duration> =
                (0..200).map(|n| Backoff::seeded(Pace::default(), seed() + n).next_delay(Some(secs(hint)))).collect();
            let (low, high) = (delays.iter().min().unwrap(), delays.iter().max().unwrap());
            assert!(*low >= secs(hint) && *high < secs(hint + f64::max(1.0, hint / 10.0)), "{hint}: {low:?} {high:?}");
            assert!(*high - *low > secs(0.8));
        }
    }

    #[test]
    fn only_a_connection_that_lived_half_a_minute_clears_the_count() {
        let mut backoff = Backoff::seeded(Pace { first_max: Duration::ZERO, ..Pace::default() }, seed());
        assert_eq!(backoff.next_delay(None), Duration::ZERO);
        backoff.lived(STABLE_AFTER - Duration::from_millis(1));
        assert!(backoff.next_delay(None) > Duration::ZERO);
        backoff.lived(STABLE_AFTER);
        assert_eq!(backoff.next_delay(None), Duration::ZERO);
    }

    #[test]
    fn a_server_that_accepts_and_closes_at_once_is_not_hammered() {
        let attempts: usize = (0..200)
            .map(|client| {
                let mut backoff = Backoff::seeded(Pace::default(), seed() + client);
                let (mut at, mut n) = (Duration::ZERO, 0);
                while at < secs(60.0) {
                    n += 1;
                    backoff.lived(Duration::ZERO);
                    at += backoff.next_delay(Some(Duration::from_millis(1)));
                }
                n
            })
            .sum();
        assert!(attempts / 200 <= 11, "{} attempts a minute", attempts / 200);
    }

    #[test]
    fn the_delays_follow_from_the_seed_and_from_the_servers_pace() {
        let draw = || {
            let mut backoff = Backoff::seeded(Pace::default(), 7);
            backoff.set_pace(Pace { first_max: secs(0.1), base: secs(0.01), cap: secs(0.02) });
            [(); 4].map(|()| backoff.next_delay(None))
        };
        assert_eq!(draw(), draw());
        assert!(draw()[0] < secs(0.1) && draw()[1..].iter().all(|delay| *delay < secs(0.02)));
    }
}
