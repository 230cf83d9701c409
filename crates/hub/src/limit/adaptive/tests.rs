//! A simulated authentication path under the controller, through the real bucket.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use super::super::{AcceptBucket, Coming};
use super::*;
use crate::clock::Dice;

const SECOND: Duration = Duration::from_secs(1);
const MS: Duration = Duration::from_millis(1);
const QUIET: Duration = Duration::ZERO;

// ---- the path

/// What becomes of an attempt.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Health {
    Up,
    /// One in so many is answered with an error.
    Fails(u32),
    /// Nothing is answered; the deadline of a second passes.
    Hangs,
}

/// Answers after `base` up to `capacity` attempts a second; beyond, a queue grows. Attempts come
/// evenly, `demand` a second, and each is refused by the bucket or goes in.
struct World {
    bucket: AcceptBucket,
    adaptive: Adaptive,
    start: Instant,
    now: Duration,
    demand: u32,
    capacity: f64,
    base: Duration,
    /// The base is drawn from half to one and a half of itself.
    noise: Option<Dice>,
    health: Health,
    lag: Duration,
    free_at: Duration,
    n_tried: u32,
    /// What is under way: when it ends, and how long it took if it was answered.
    under_way: BinaryHeap<Reverse<(Duration, Option<Duration>)>>,
}

/// One second of it.
#[derive(Debug)]
struct Second {
    verdict: Verdict,
    /// Sorted.
    times: Vec<Duration>,
}

impl World {
    fn new(floor: f64, ceiling: f64, capacity: f64) -> Self {
        let start = Instant::now();
        Self {
            bucket: AcceptBucket::new(200, floor, Dice::seeded(7)),
            adaptive: Adaptive::new(floor, ceiling, start),
            start,
            now: Duration::ZERO,
            demand: 2_000,
            capacity,
            base: 2 * MS,
            noise: None,
            health: Health::Up,
            lag: QUIET,
            free_at: Duration::ZERO,
            n_tried: 0,
            under_way: BinaryHeap::new(),
        }
    }

    fn run(&mut self, seconds: u32) -> Vec<Second> {
        (0..seconds).map(|_| self.second()).collect()
    }

    fn second(&mut self) -> Second {
        let began = self.now;
        let mut times = Vec::new();
        for i in 0..self.demand {
            self.now = began + SECOND * i / self.demand;
            self.finish(&mut times);
            if self.bucket.take(Coming::New, self.start + self.now).is_ok() {
                self.enter();
            }
        }
        self.now = began + SECOND;
        self.finish(&mut times);
        let now = self.start + self.now;
        let verdict = self.adaptive.tick(now, self.lag, self.bucket.n_refused());
        self.bucket.set_rate(verdict.rate, now);
        times.sort_unstable();
        Second { verdict, times }
    }

    fn finish(&mut self, times: &mut Vec<Duration>) {
        while let Some(Reverse((at, took))) = self.under_way.peek().copied()
            && at <= self.now
        {
            self.under_way.pop();
            match took {
                Some(took) => {
                    self.adaptive.admitted(took);
                    times.push(took);
                }
                None => self.adaptive.failed(),
            }
        }
    }

    fn enter(&mut self) {
        self.n_tried += 1;
        let begins = self.free_at.max(self.now);
        let factor = self.noise.as_ref().map_or(1.0, |dice| 0.5 + dice.unit());
        let took = begins - self.now + self.base.mul_f64(factor);
        let is_error = match self.health {
            Health::Up => false,
            Health::Fails(one_in) => self.n_tried.is_multiple_of(one_in),
            Health::Hangs => true,
        };
        // Whoever would wait for longer than the deadline leaves the queue and costs nothing.
        if self.health == Health::Hangs || took > SECOND {
            self.under_way.push(Reverse((self.now + SECOND, None)));
            return;
        }
        self.free_at = begins + Duration::from_secs_f64(1.0 / self.capacity);
        self.under_way.push(Reverse((self.now + took, (!is_error).then_some(took))));
    }
}

fn rates(seconds: &[Second]) -> Vec<u32> {
    seconds.iter().map(|second| second.verdict.rate.round() as u32).collect()
}

fn median(seconds: &[Second]) -> Duration {
    let mut all: Vec<Duration> = seconds.iter().flat_map(|second| second.times.iter().copied()).collect();
    all.sort_unstable();
    all.get(all.len() / 2).copied().unwrap_or_default()
}

fn n_slow(seconds: &[Second], base: Duration) -> usize {
    seconds.iter().filter(|second| second.times.get(second.times.len() / 2).is_some_and(|p50| *p50 > 2 * base)).count()
}

fn whys(seconds: &[Second]) -> Vec<Why> {
    seconds.iter().map(|second| second.verdict.why).collect()
}

// ---- the knee

#[test]
fn it_finds_the_knee_in_ten_seconds_and_stays_there() {
    for noise in [None, Some(Dice::seeded(3))] {
        let mut world = World::new(100.0, 1_000.0, 400.0);
        world.noise = noise;
        let climb = rates(&world.run(10));
        assert_eq!(climb[0], 120);
        assert!(climb.iter().any(|&rate| rate >= 340), "{climb:?}");
        assert!(climb.iter().all(|&rate| rate <= 440), "{climb:?}");
        world.run(10);
        // For five minutes: within 15 % below and 2 % above, the median that of an idle path, one
        // second in twelve spent beyond the knee, and 94 % of what the path can do is done.
        let steady = world.run(300);
        let held = rates(&steady);
        assert!(held.iter().all(|rate| (335..=408).contains(rate)), "{held:?}");
        assert!(median(&steady) <= 3 * MS, "{:?}", median(&steady));
        assert!(n_slow(&steady, 2 * MS) <= 25, "{}", n_slow(&steady, 2 * MS));
        let n_answered: usize = steady.iter().map(|second| second.times.len()).sum();
        assert!(n_answered >= 300 * 376, "{n_answered}");
        let longest = steady.iter().filter_map(|second| second.times.last()).max().unwrap();
        assert!(*longest < 30 * MS, "{longest:?}");
    }
}

#[test]
fn it_finds_other_knees_too() {
    for (capacity, within) in [(150.0, 30), (700.0, 15), (950.0, 15)] {
        let mut world = World::new(100.0, 1_000.0, capacity);
        world.run(within);
        let held = rates(&world.run(120));
        let (low, high) = ((capacity * 0.75) as u32, (capacity * 1.10) as u32);
        assert!(held.iter().all(|rate| (low..=high).contains(rate)), "{capacity}: {held:?}");
    }
}

#[test]
fn it_backs_off_within_three_seconds_when_the_capacity_halves_and_returns_with_it() {
    let mut world = World::new(100.0, 1_000.0, 400.0);
    world.run(40);
    world.capacity = 200.0;
    let fall = world.run(3);
    assert!(rates(&fall)[2] < 200, "{:?}", rates(&fall));
    assert!(whys(&fall).contains(&Why::Slow));
    world.run(12);
    let halved = world.run(60);
    assert!(rates(&halved).iter().all(|rate| (150..=206).contains(rate)), "{:?}", rates(&halved));
    assert!(median(&halved) <= 3 * MS);
    world.capacity = 400.0;
    let climb = rates(&world.run(25));
    assert!(climb.iter().any(|&rate| rate >= 340), "{climb:?}");
    world.run(10);
    let held = rates(&world.run(60));
    assert!(held.iter().all(|rate| (335..=408).contains(rate)), "{held:?}");
}

#[test]
fn it_stays_between_floor_and_ceiling() {
    let mut low = World::new(100.0, 1_000.0, 50.0);
    assert!(rates(&low.run(60)).iter().all(|&rate| (100..=120).contains(&rate)));
    let mut high = World::new(100.0, 300.0, 5_000.0);
    let climb = high.run(20);
    assert_eq!(rates(&climb)[6..], [300; 14]);
    assert_eq!(whys(&climb)[..7], [Why::Probing; 7]);
    assert_eq!(whys(&climb)[7..], [Why::Steady; 13]);
    let adaptive = Adaptive::new(100.0, 20.0, Instant::now());
    assert_eq!(adaptive.tick(Instant::now() + SECOND, QUIET, 0).rate, 100.0);
}

#[test]
fn a_rate_that_nobody_reaches_is_not_raised() {
    let mut world = World::new(100.0, 1_000.0, 400.0);
    world.demand = 90;
    let quiet = world.run(30);
    assert_eq!(rates(&quiet), [100; 30]);
    assert_eq!(whys(&quiet), [Why::Steady; 30]);
    // And one that was found is kept for the next storm.
    world.demand = 2_000;
    world.run(30);
    world.demand = 90;
    let found = world.run(1)[0].verdict.rate;
    let kept = world.run(60);
    assert!(kept.iter().all(|second| second.verdict.rate == found || second.verdict.rate >= 335.0));
}

// ---- faults

#[test]
fn errors_bring_it_to_the_floor_and_it_climbs_again_after() {
    for health in [Health::Fails(20), Health::Hangs] {
        let mut world = World::new(100.0, 1_000.0, 400.0);
        world.run(40);
        world.health = health;
        let fall = world.run(7);
        assert!(rates(&fall)[2] <= 200, "{:?}", rates(&fall));
        assert_eq!(rates(&fall)[5..], [100; 2]);
        assert!(whys(&fall)[1..].iter().all(|why| *why == Why::Errors));
        assert_eq!(rates(&world.run(60)), [100; 60]);
        world.health = Health::Up;
        let climb = rates(&world.run(25));
        assert!(climb.iter().any(|&rate| rate >= 340), "{climb:?}");
    }
}

/// A verdict on so many attempts, answered or not, after one second in which one was refused and
/// everything was well.
fn verdict_on(n_answered: u32, took: Duration, n_failed: u32, lag: Duration) -> Verdict {
    let start = Instant::now();
    let adaptive = Adaptive::new(100.0, 1_000.0, start);
    let n_seconds = 5;
    for i in 1..=n_seconds {
        (0..100).for_each(|_| adaptive.admitted(10 * MS));
        adaptive.tick(start + SECOND * i, QUIET, u64::from(i));
    }
    (0..n_answered).for_each(|_| adaptive.admitted(took));
    (0..n_failed).for_each(|_| adaptive.failed());
    adaptive.tick(start + SECOND * (n_seconds + 1), lag, u64::from(n_seconds) + 1)
}

#[test]
fn fewer_than_ten_attempts_say_nothing() {
    assert_eq!(verdict_on(9, 500 * MS, 0, QUIET).why, Why::Steady);
    assert_eq!(verdict_on(9, 500 * MS, 0, QUIET).p50, None);
    assert_eq!(verdict_on(10, 500 * MS, 0, QUIET).why, Why::Slow);
    assert_eq!(verdict_on(11, 500 * MS, 0, QUIET).why, Why::Slow);
    assert_eq!(verdict_on(0, QUIET, 9, QUIET).why, Why::Steady);
    assert_eq!(verdict_on(0, QUIET, 10, QUIET).why, Why::Errors);
}

#[test]
fn at_a_rate_below_ten_a_second_the_window_goes_on_until_there_are_ten() {
    let mut world = World::new(2.0, 100.0, 40.0);
    world.bucket = AcceptBucket::new(2, 2.0, Dice::seeded(7));
    let climb = world.run(60);
    assert_eq!(rates(&climb[..4]), [2; 4]);
    assert_eq!(climb[4].verdict.why, Why::Probing);
    let held = rates(&world.run(60));
    assert!(held.iter().all(|rate| (30..=44).contains(rate)), "{held:?} after {:?}", rates(&climb));
}

#[test]
fn one_percent_of_errors_is_bad_luck_and_more_is_not() {
    for (n_failed, why) in [(0, Why::Probing), (9, Why::Probing), (10, Why::Probing), (11, Why::Errors)] {
        let verdict = verdict_on(1_000 - n_failed, 10 * MS, n_failed, QUIET);
        assert_eq!(verdict.why, why, "{n_failed} of 1,000");
    }
}

#[test]
fn twice_the_best_median_is_slow() {
    for (took, why) in [(10 * MS, Why::Probing), (18 * MS, Why::Probing), (22 * MS, Why::Slow)] {
        assert_eq!(verdict_on(100, took, 0, QUIET).why, why, "{took:?}");
    }
    let p50 = verdict_on(100, 18 * MS, 0, QUIET).p50.unwrap();
    assert!(p50 > 17 * MS && p50 < 19 * MS, "{p50:?}");
}

#[test]
fn a_late_runtime_is_a_reason_of_its_own_whoever_came() {
    for (lag, why) in [(249, Why::Probing), (250, Why::Probing), (251, Why::Saturated)] {
        let verdict = verdict_on(100, 10 * MS, 0, MS * lag);
        assert_eq!(verdict.why, why, "{lag} ms");
    }
    assert_eq!(verdict_on(0, QUIET, 0, 251 * MS).why, Why::Saturated);
    let mut world = World::new(100.0, 1_000.0, 400.0);
    world.run(40);
    let before = world.run(1)[0].verdict.rate;
    world.lag = SECOND;
    let late = world.run(3)[2].verdict.rate;
    assert!((late / before - 0.85f64.powi(3)).abs() < 0.001, "{before} and {late}");
}

#[test]
fn a_long_tail_holds_growth_and_lowers_nothing() {
    let start = Instant::now();
    let adaptive = Adaptive::new(100.0, 1_000.0, start);
    let mut rate = 100.0;
    for i in 1..=20u32 {
        let tail = if i > 10 { 200 * MS } else { 10 * MS };
        (0..98).for_each(|_| adaptive.admitted(10 * MS));
        (0..2).for_each(|_| adaptive.admitted(tail));
        let verdict = adaptive.tick(start + SECOND * i, QUIET, u64::from(i));
        assert_eq!(verdict.why, if i > 10 { Why::Steady } else { Why::Probing }, "{i}");
        assert!(verdict.rate >= rate);
        rate = verdict.rate;
    }
}

#[test]
fn a_path_that_became_slower_for_good_is_slow_for_some_minutes_only() {
    let mut world = World::new(100.0, 1_000.0, 400.0);
    world.run(40);
    world.base = 8 * MS;
    let fall = world.run(20);
    assert_eq!(rates(&fall)[19], 100);
    let later = rates(&world.run(400));
    assert!(later[399] >= 335, "{:?}", &later[300..]);
}

#[test]
fn a_path_quicker_than_a_millisecond_is_not_slow_at_one_and_a_half() {
    let start = Instant::now();
    let adaptive = Adaptive::new(100.0, 1_000.0, start);
    for (i, took) in [200, 200, 200, 1_500, 1_500].into_iter().enumerate() {
        (0..100).for_each(|_| adaptive.admitted(Duration::from_micros(took)));
        let verdict = adaptive.tick(start + SECOND * (i as u32 + 1), QUIET, i as u64 + 1);
        assert!(matches!(verdict.why, Why::Probing | Why::Steady), "{verdict:?}");
        assert!(verdict.rate > 100.0);
    }
}

#[test]
fn a_burst_that_queues_does_not_become_the_measure_of_the_path() {
    // The 200 of the burst come at once and wait for up to half a second: the first median there is.
    let mut world = World::new(100.0, 1_000.0, 400.0);
    let first = world.run(1);
    assert!(first[0].verdict.p50.unwrap() > 100 * MS);
    world.run(7);
    let slow = world.run(3);
    assert!(whys(&slow).contains(&Why::Slow), "{:?}", rates(&slow));
}

#[test]
fn every_reason_has_a_word_of_its_own() {
    let words: Vec<&str> = Why::ALL.iter().map(|why| why.word()).collect();
    assert_eq!(words, ["steady", "probing", "slow", "errors", "saturated"]);
}
