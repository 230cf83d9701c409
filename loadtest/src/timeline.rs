//! What happened when: counts in short bins since an instant that is chosen later, by many tasks
//! without a lock.

use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

/// Width of a bin.
pub const BIN: Duration = Duration::from_millis(100);
/// Twenty minutes; what comes later is counted in the last bin.
const N_BINS: usize = 12_000;
/// Bins in a second.
pub const PER_SECOND: usize = 10;
/// Width of the longest bar.
const BAR: usize = 50;

/// Counts over time.
pub struct Timeline(Box<[AtomicU32]>);

impl Timeline {
    pub fn new() -> Timeline {
        Timeline((0..N_BINS).map(|_| AtomicU32::new(0)).collect())
    }

    pub fn record(&self, at: Duration) {
        self.0[n_bins(at).min(N_BINS - 1)].fetch_add(1, Ordering::Relaxed);
    }

    /// What came before `until`, to a bin.
    pub fn before(&self, until: Duration) -> u32 {
        let n = n_bins(until);
        self.0[..n].iter().map(|bin| bin.load(Ordering::Relaxed)).sum()
    }

    /// The end of the bin until which `part` (0 to 1) of all came; `None` where nothing did.
    pub fn quantile(&self, part: f64) -> Option<Duration> {
        let wanted = f64::from(self.before(Duration::MAX)) * part;
        let ends = (1..=N_BINS as u32).map(|n| BIN * n);
        ends.into_iter().find(|end| wanted > 0.0 && f64::from(self.before(*end)) >= wanted)
    }

    /// Counts of the bins that lie wholly before `until`.
    pub fn bins(&self, until: Duration) -> Vec<u32> {
        self.0[..n_bins(until)].iter().map(|bin| bin.load(Ordering::Relaxed)).collect()
    }

    /// Counts of all windows of so many seconds that lie wholly before `until`, a bin apart.
    pub fn windows(&self, n_seconds: usize, until: Duration) -> Vec<u32> {
        let bins = self.bins(until);
        bins.windows(n_seconds * PER_SECOND).map(|some| some.iter().sum()).collect()
    }

    /// Counts of the whole seconds up to the last that has any.
    pub fn seconds(&self) -> Vec<u32> {
        let bins: Vec<u32> = self.0.iter().map(|bin| bin.load(Ordering::Relaxed)).collect();
        let mut seconds: Vec<u32> = bins.chunks(PER_SECOND).map(|second| second.iter().sum()).collect();
        while seconds.last() == Some(&0) {
            seconds.pop();
        }
        seconds
    }
}

/// The whole bins before `until`.
fn n_bins(until: Duration) -> usize {
    usize::try_from(until.as_millis() / BIN.as_millis()).unwrap_or(N_BINS).min(N_BINS)
}

/// A bar a second, two series side by side; both to one scale.
pub fn bars(first: &[u32], second: &[u32]) -> Vec<String> {
    let highest = first.iter().chain(second).copied().max().unwrap_or(0).max(1) as usize;
    let bar = |n: u32, with: &str| with.repeat((n as usize * BAR).div_ceil(highest));
    (0..first.len().max(second.len()))
        .flat_map(|at| {
            let of = |series: &[u32]| series.get(at).copied().unwrap_or(0);
            let (a, b) = (of(first), of(second));
            [format!("{at:>4} s {a:>6} {}", bar(a, "#")), format!("       {b:>6} {}", bar(b, "."))]
        })
        .collect()
}

/// The smallest value that `part` (0 to 1) of the sorted values do not exceed.
pub fn quantile(sorted: &[Duration], part: f64) -> Option<Duration> {
    let at = ((sorted.len() as f64 * part).ceil() as usize).clamp(1, sorted.len().max(1));
    sorted.get(at - 1).copied()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn windows_slide_by_a_bin_and_end_before_the_limit() {
        let timeline = Timeline::new();
        for ms in [0, 99, 100, 950, 1_000, 2_500] {
            timeline.record(Duration::from_millis(ms));
        }
        assert_eq!(timeline.windows(1, Duration::from_millis(999)), [0; 0]);
        assert_eq!(timeline.windows(1, Duration::from_millis(1_200)), [4, 3, 2]);
        assert_eq!(timeline.windows(2, Duration::from_millis(2_000)), [5]);
        assert_eq!(timeline.seconds(), [4, 1, 1]);
        assert_eq!([0, 100, 2_500, 2_600].map(|ms| timeline.before(Duration::from_millis(ms))), [0, 2, 5, 6]);
        assert_eq!([0.5, 1.0].map(|part| timeline.quantile(part).unwrap().as_millis()), [200, 2_600]);
        assert_eq!(Timeline::new().quantile(0.5), None);
        timeline.record(Duration::from_secs(100_000));
        assert_eq!(timeline.before(Duration::MAX), 7, "nothing is lost beyond the end");
    }

    #[test]
    fn a_quantile_of_a_few_is_one_of_them() {
        let sorted: Vec<Duration> = (1..=100).map(Duration::from_secs).collect();
        let at = |part| quantile(&sorted, part).unwrap().as_secs();
        assert_eq!((at(0.0), at(0.5), at(0.99), at(1.0)), (1, 50, 99, 100));
        assert_eq!(quantile(&[], 0.5), None);
        assert_eq!(quantile(&sorted[..1], 0.99), Some(Duration::from_secs(1)));
    }

    #[test]
    fn bars_share_one_scale() {
        let lines = bars(&[10, 0], &[5]);
        assert_eq!(lines.len(), 4);
        let marks = |line: &str| line.matches(['#', '.']).count();
        assert_eq!(lines.iter().map(|line| marks(line)).collect::<Vec<_>>(), [BAR, BAR / 2, 0, 0]);
    }
}
