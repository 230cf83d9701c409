//! Which rate the authentication path bears: moves the accept bucket's rate between a floor and a
//! ceiling, once a second, by what the attempts of the last second took. Decides a number and says
//! why; it sets nothing, and whoever asks it tells the bucket.
//!
//! The path is *slow* when the median of its time is twice what it was at its best. By then a queue
//! stands somewhere, and what the path delivered in that second is what it can deliver: the *knee*.
//! The rate falls below it, so that the queue drains, and comes back to it in ever smaller steps,
//! passes it by less than one percent, and grows again in ever larger ones where the path lets it.
//!
//! It grows only while the bucket refuses: a rate that nobody reached has shown nothing. It falls
//! for the same reasons whoever is refused, and never under the floor, which is the operator's word.

#[cfg(test)]
mod tests;

use std::sync::{Mutex, MutexGuard};
use std::time::Duration;

use tokio::time::Instant;

/// Fewer attempts than this say nothing; the window goes on until they are there.
const ENOUGH_SAMPLES: u64 = 10;
/// A window that is not full by then is thrown away: it would mix two situations.
const WINDOW_AT_MOST: Duration = Duration::from_secs(60);
/// A path that answers faster than this has no queue worth a thought, only noise.
const FASTEST: f64 = 0.001;
/// Slow: the median over so many times its base.
const SLOW: f64 = 2.0;
/// The tail holds growth back (but lowers nothing): the 99th percentile over so many times its base.
const TAIL: f64 = 4.0;
/// More than one in so many attempts failed: not a few unlucky ones, but the path.
const ONE_ERROR_IN: u64 = 100;
/// The runtime itself is late: readiness calls it saturated at the same figure.
const LAG: Duration = Duration::from_millis(250);
/// Back under the knee after a slow second, or one with a late runtime.
const EASE: f64 = 0.85;
/// After a second with errors.
const RETREAT: f64 = 0.7;
/// No second lowers it more than this, whatever it measured.
const FALL_AT_MOST: f64 = 0.5;
/// The largest step up, far from any knee: from 100 to 400 a second in 8 s.
const LARGEST_STEP: f64 = 0.2;
/// The smallest, at the knee: so much it is passed by before the queue is noticed.
const SMALLEST_STEP: f64 = 0.005;
/// A step goes this part of the way to the knee that is left.
const APPROACH: f64 = 0.25;
/// A step goes this part of the way that was come beyond the knee.
const DEPARTURE: f64 = 0.5;

/// Why the rate is what it is. A closed set, for logs and labels.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Why {
    /// Nothing to change: nobody was refused, too little was seen, the path has just recovered, or
    /// the rate is at its ceiling.
    Steady,
    /// Raised: some were refused and the path bears more.
    Probing,
    /// Lowered: the median is twice its base.
    Slow,
    /// Lowered: more than 1 % of the attempts failed.
    Errors,
    /// Lowered: the runtime is late.
    Saturated,
}

impl Why {
    /// Every value.
    pub const ALL: &'static [Why] = &[Why::Steady, Why::Probing, Why::Slow, Why::Errors, Why::Saturated];

    /// The word for logs and labels.
    pub fn word(self) -> &'static str {
        match self {
            Why::Steady => "steady",
            Why::Probing => "probing",
            Why::Slow => "slow",
            Why::Errors => "errors",
            Why::Saturated => "saturated",
        }
    }
}

/// What one look came to.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Verdict {
    /// Tokens a second, from the floor to the ceiling.
    pub rate: f64,
    /// Why this rate. A fall that the floor stopped keeps its reason.
    pub why: Why,
    /// The median time of the attempts looked at; none where they were too few.
    pub p50: Option<Duration>,
}

/// The controller. Told of every attempt, asked once a second; each takes a short lock, and only
/// that of what is seen is shared between the two.
#[derive(Debug)]
pub struct Adaptive {
    seen: Mutex<Window>,
    course: Mutex<Course>,
}

impl Adaptive {
    /// Begins at the floor. Rates in tokens a second; a ceiling below the floor is the floor.
    pub fn new(floor: f64, ceiling: f64, now: Instant) -> Self {
        let course = Course {
            floor,
            ceiling: ceiling.max(floor),
            rate: floor,
            knee: None,
            is_easing: false,
            median: Base(None),
            tail: Base(None),
            n_refused: 0,
        };
        Self { seen: Mutex::new(Window::new(now)), course: Mutex::new(course) }
    }

    /// An attempt that took a token was answered by the path, yes or no, after `took`. Not to be
    /// told of one that was refused before the path was asked: it would make the path look fast.
    pub fn admitted(&self, took: Duration) {
        self.window().times.count(took);
    }

    /// An attempt that took a token got no answer: its deadline passed, or the revocation list
    /// could not be read.
    pub fn failed(&self) {
        self.window().n_failed += 1;
    }

    /// The rate from now on. To be called about once a second. `lag_p99`: how late the runtime is,
    /// over the last second or little more; `n_refused`: how many the bucket has refused since the
    /// start (`AcceptBucket::n_refused`).
    pub fn tick(&self, now: Instant, lag_p99: Duration, n_refused: u64) -> Verdict {
        let seen = self.window().close(now);
        let mut course = self.course.lock().expect("no panic while the course is held");
        let is_bucket_the_limit = n_refused > course.n_refused;
        let why = match &seen {
            _ if lag_p99 > LAG => course.retreat(Why::Saturated, EASE),
            None => Why::Steady,
            Some(seen) => course.steer(seen, is_bucket_the_limit),
        };
        if seen.is_some() {
            course.n_refused = n_refused;
        }
        Verdict { rate: course.rate, why, p50: seen.and_then(|seen| seen.p50).map(Duration::from_secs_f64) }
    }

    fn window(&self) -> MutexGuard<'_, Window> {
        self.seen.lock().expect("no panic while the window is held")
    }
}

/// What is remembered from look to look. Rates in tokens a second.
#[derive(Debug)]
struct Course {
    floor: f64,
    ceiling: f64,
    rate: f64,
    /// What the path delivered when it last began to be slow.
    knee: Option<f64>,
    /// The last look lowered the rate, so what is seen now may still be the old queue.
    is_easing: bool,
    median: Base,
    tail: Base,
    n_refused: u64,
}

impl Course {
    fn steer(&mut self, seen: &Seen, is_bucket_the_limit: bool) -> Why {
        let is_slow = seen.p50.is_some_and(|p50| self.median.is_exceeded(p50, SLOW));
        let has_tail = seen.p99.is_some_and(|p99| self.tail.is_exceeded(p99, TAIL));
        self.median.follow(seen.p50);
        self.tail.follow(seen.p99);
        if seen.n_failed * ONE_ERROR_IN > seen.n {
            self.retreat(Why::Errors, RETREAT)
        } else if is_slow {
            self.ease(seen.delivered, is_bucket_the_limit)
        } else if self.is_easing {
            self.is_easing = false;
            Why::Steady
        } else if !is_bucket_the_limit || has_tail || self.rate >= self.ceiling {
            Why::Steady
        } else {
            self.probe()
        }
    }

    /// In ever smaller steps towards the knee, in ever larger ones beyond it: where the path bears
    /// more than it did, the knee is history.
    fn probe(&mut self) -> Why {
        let step = match self.knee.map(|knee| self.rate / knee - 1.0) {
            None => LARGEST_STEP,
            Some(beyond) if beyond > 0.0 => DEPARTURE * beyond,
            Some(before) => APPROACH * -before,
        };
        let step = step.clamp(SMALLEST_STEP, LARGEST_STEP);
        self.set(self.rate * (1.0 + step));
        Why::Probing
    }

    /// Below what the path delivered, so that the queue drains. What it delivered says nothing
    /// where few came.
    fn ease(&mut self, delivered: f64, is_bucket_the_limit: bool) -> Why {
        let is_knee = is_bucket_the_limit && delivered < self.rate;
        let bears = if is_knee { delivered.max(FALL_AT_MOST / EASE * self.rate) } else { self.rate };
        if !self.is_easing && (is_knee || self.knee.is_none()) {
            self.knee = Some(bears);
        }
        self.is_easing = true;
        self.set(EASE * bears);
        Why::Slow
    }

    /// Where nothing tells what the path delivers: down by a factor. The knee is no higher than
    /// where it began.
    fn retreat(&mut self, why: Why, factor: f64) -> Why {
        if !self.is_easing {
            self.knee = Some(self.knee.map_or(self.rate, |knee| knee.min(self.rate)));
        }
        self.is_easing = true;
        self.set(factor * self.rate);
        why
    }

    fn set(&mut self, rate: f64) {
        self.rate = rate.clamp(self.floor, self.ceiling);
    }
}

/// What a percentile is at its best, in seconds: falls half of the way at once, rises in ten
/// minutes, so that a path that became slower for good is slow for a while and then is as it is.
#[derive(Debug)]
struct Base(Option<f64>);

impl Base {
    const FALL: f64 = 0.5;
    const RISE: f64 = 1.0 / 600.0;

    fn is_exceeded(&self, seconds: f64, times: f64) -> bool {
        self.0.is_some_and(|base| seconds > times * base)
    }

    fn follow(&mut self, seconds: Option<f64>) {
        let Some(seconds) = seconds.map(|seconds| seconds.max(FASTEST)) else { return };
        let base = self.0.unwrap_or(seconds);
        let part = if seconds < base { Self::FALL } else { Self::RISE };
        self.0 = Some(base + part * (seconds - base));
    }
}

/// What came since the last verdict.
#[derive(Debug)]
struct Window {
    began: Instant,
    times: Times,
    n_failed: u64,
}

/// A closed window. Times in seconds; none where all failed.
#[derive(Debug)]
struct Seen {
    n: u64,
    n_failed: u64,
    /// Answers a second.
    delivered: f64,
    p50: Option<f64>,
    p99: Option<f64>,
}

impl Window {
    fn new(now: Instant) -> Self {
        Self { began: now, times: Times::none(), n_failed: 0 }
    }

    /// What was seen, if it is enough, and a new window.
    fn close(&mut self, now: Instant) -> Option<Seen> {
        let age = now.saturating_duration_since(self.began);
        let n_answered = self.times.n();
        let n = n_answered + self.n_failed;
        let seen = (n >= ENOUGH_SAMPLES).then(|| Seen {
            n,
            n_failed: self.n_failed,
            delivered: n_answered as f64 / age.as_secs_f64().max(FASTEST),
            p50: self.times.quantile(0.50),
            p99: self.times.quantile(0.99),
        });
        if seen.is_some() || age >= WINDOW_AT_MOST {
            *self = Self::new(now);
        }
        seen
    }
}

/// A histogram with eight steps an octave, so a percentile is right within 5 %.
#[derive(Debug)]
struct Times([u32; Times::LEN]);

impl Times {
    const LEN: usize = 160;
    const PER_OCTAVE: f64 = 8.0;
    /// Seconds. The last step ends 20 octaves above, at 67 s: no deadline is as far.
    const FIRST: f64 = 0.000_064;

    fn none() -> Self {
        Self([0; Self::LEN])
    }

    fn count(&mut self, took: Duration) {
        let octaves = (took.as_secs_f64().max(Self::FIRST) / Self::FIRST).log2();
        let step = ((octaves * Self::PER_OCTAVE) as usize).min(Self::LEN - 1);
        self.0[step] = self.0[step].saturating_add(1);
    }

    fn n(&self) -> u64 {
        self.0.iter().map(|&n| u64::from(n)).sum()
    }

    /// The middle of the step in which this part of all lies.
    fn quantile(&self, part: f64) -> Option<f64> {
        let mut left = (self.n() as f64 * part).ceil() as u64;
        let step = self.0.iter().position(|&n| {
            let is_here = n > 0 && u64::from(n) >= left;
            left = left.saturating_sub(u64::from(n));
            is_here
        })?;
        Some(Self::FIRST * ((step as f64 + 0.5) / Self::PER_OCTAVE).exp2())
    }
}
