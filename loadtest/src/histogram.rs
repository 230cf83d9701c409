//! Durations of many tasks, counted without a lock in buckets about 3 % wide.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// Each power of two is cut into so many buckets.
const FINE: u64 = 32;
const N_BUCKETS: usize = 64 * FINE as usize;

/// Counts of durations in µs.
pub struct Histogram(Box<[AtomicU64]>);

impl Histogram {
    pub fn new() -> Histogram {
        Histogram((0..N_BUCKETS).map(|_| AtomicU64::new(0)).collect())
    }

    pub fn record(&self, took: Duration) {
        let us = u64::try_from(took.as_micros()).unwrap_or(u64::MAX);
        self.0[bucket(us)].fetch_add(1, Ordering::Relaxed);
    }

    /// The duration that `part` (0 to 1) of the recorded ones do not exceed; `None` without any.
    pub fn quantile(&self, part: f64) -> Option<Duration> {
        let counts: Vec<u64> = self.0.iter().map(|count| count.load(Ordering::Relaxed)).collect();
        let total: u64 = counts.iter().sum();
        let wanted = ((total as f64 * part).ceil() as u64).max(1);
        let mut below = 0;
        let at = counts.iter().position(|count| {
            below += count;
            below >= wanted
        });
        at.map(|at| Duration::from_micros(highest(at)))
    }
}

fn bucket(us: u64) -> usize {
    if us < FINE {
        return us as usize;
    }
    let shift = us.ilog2() - FINE.ilog2();
    ((u64::from(shift) + 1) * FINE + ((us >> shift) - FINE)) as usize
}

/// The highest value of a bucket.
fn highest(bucket: usize) -> u64 {
    let (row, column) = (bucket as u64 / FINE, bucket as u64 % FINE);
    match row {
        0 => column,
        _ => ((FINE + column + 1) << (row - 1)) - 1,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_duration_lies_in_a_bucket_at_most_a_thirtysecond_wide() {
        for us in (0..100).chain([1_000, 4_095, 4_096, 1_000_000, u64::from(u32::MAX)]) {
            let top = highest(bucket(us));
            assert!(top >= us && top - us <= us / FINE, "{us} {top}");
        }
        assert!(bucket(u64::MAX) < N_BUCKETS);
    }

    #[test]
    fn quantiles_are_those_of_what_was_recorded() {
        let histogram = Histogram::new();
        assert_eq!(histogram.quantile(0.5), None);
        for us in 1..=100 {
            histogram.record(Duration::from_micros(us * 100));
        }
        let at = |part| histogram.quantile(part).unwrap().as_micros();
        assert!((5_000..5_160).contains(&at(0.5)) && (9_900..10_220).contains(&at(0.99)) && at(1.0) >= 10_000);
    }
}
