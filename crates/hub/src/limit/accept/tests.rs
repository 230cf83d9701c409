//! The promises of the accept bucket, to one kind of client and to two.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use super::super::bucket::{FURTHEST, SOONEST};
use super::Coming::{Back, New};
use super::*;

const MS: Duration = Duration::from_millis(1);
const SECOND: Duration = Duration::from_secs(1);

fn dice() -> Dice {
    Dice::seeded(7)
}

/// Of `n` attempts, one `every` so often.
fn n_admitted(bucket: &AcceptBucket, who: Coming, from: Instant, every: Duration, n: u32) -> u32 {
    (0..n).filter(|&i| bucket.take(who, from + every * i).is_ok()).count() as u32
}

/// Of `n` attempts at one instant.
fn n_at_once(bucket: &AcceptBucket, who: Coming, now: Instant, n: u32) -> u32 {
    n_admitted(bucket, who, now, Duration::ZERO, n)
}

/// Admitted of both kinds, by second, while each kind tries every so often; at the very end one
/// of each tries once more.
fn both_for(bucket: &AcceptBucket, start: Instant, seconds: u32, back: Duration, new: Duration) -> Vec<[u32; 2]> {
    let mut admitted = vec![[0, 0]; seconds as usize + 1];
    let end = SECOND * seconds;
    let mut next = [Duration::ZERO, Duration::ZERO];
    while next[0].min(next[1]) < end {
        let kind = usize::from(next[1] < next[0]);
        let at = next[kind];
        admitted[at.as_secs() as usize][kind] += u32::from(bucket.take([Back, New][kind], start + at).is_ok());
        next[kind] += [back, new][kind];
    }
    for (kind, who) in [Back, New].into_iter().enumerate() {
        admitted[seconds as usize][kind] += u32::from(bucket.take(who, start + end).is_ok());
    }
    admitted
}

fn sum(admitted: &[[u32; 2]]) -> [u32; 2] {
    admitted.iter().fold([0, 0], |sum, of| [sum[0] + of[0], sum[1] + of[1]])
}

// ---- one kind

#[test]
fn a_full_bucket_accepts_its_burst_and_not_one_more() {
    let bucket = AcceptBucket::new(200, 100.0, dice());
    let now = Instant::now();
    assert_eq!(n_admitted(&bucket, New, now, Duration::ZERO, 1_000), 200);
    assert_eq!(bucket.tokens(now), 0.0);
    assert!(bucket.take(New, now + 9 * MS).is_err());
    assert!(bucket.take(New, now + 10 * MS).is_ok());
}

#[test]
fn the_rate_is_exact_over_30_seconds_of_overload() {
    for (burst, rate, expected) in [(200, 100.0, 200 + 3_000), (2, 3.0, 2 + 90), (5, 0.5, 5 + 15)] {
        let bucket = AcceptBucket::new(burst, rate, dice());
        let start = Instant::now();
        // 20,000 attempts a second, and the last one at exactly 30 s.
        let n = n_admitted(&bucket, New, start, Duration::from_micros(50), 600_001);
        assert_eq!(n, expected, "burst {burst}, {rate}/s");
    }
}

#[test]
fn tokens_never_exceed_the_burst() {
    let bucket = AcceptBucket::new(10, 100.0, dice());
    let now = Instant::now();
    bucket.give_back(Coming::New, now);
    assert_eq!(bucket.tokens(now), 10.0);
    let later = now + Duration::from_secs(86_400 * 365);
    assert_eq!(bucket.tokens(later), 10.0);
    assert!(bucket.take(New, later).is_ok());
    assert_eq!(bucket.tokens(later), 9.0);
    bucket.give_back(Coming::New, later);
    bucket.give_back(Coming::New, later);
    assert_eq!(bucket.tokens(later), 10.0);
    assert_eq!(n_admitted(&bucket, New, later, Duration::ZERO, 100), 10);
}

#[test]
fn an_instant_before_the_last_one_changes_nothing() {
    let bucket = AcceptBucket::new(1, 1.0, dice());
    let now = Instant::now() + Duration::from_secs(10);
    assert!(bucket.take(New, now).is_ok());
    assert!(bucket.take(New, now - Duration::from_secs(5)).is_err());
    assert!(bucket.take(New, now + 999 * MS).is_err());
    assert!(bucket.take(New, now + 1_000 * MS).is_ok());
}

#[test]
fn a_refused_crowd_is_spread_over_the_time_the_bucket_needs() {
    let bucket = AcceptBucket::new(200, 100.0, dice());
    let now = Instant::now();
    assert_eq!(n_admitted(&bucket, New, now, Duration::ZERO, 200), 200);
    let mut per_second = [0; 61];
    let mut last = Duration::ZERO;
    for i in 0..1_000u32 {
        last = bucket.take(New, now + MS * i / 100).unwrap_err();
        assert!(last >= SOONEST && last <= FURTHEST, "{last:?}");
        per_second[last.as_secs() as usize] += 1;
    }
    assert!(per_second.iter().all(|&n| n <= 250), "{per_second:?}");
    // 1,000 at 95 a second, after the first second: the last comes back after 11.5 s or so.
    assert!((11..=13).contains(&last.as_secs()), "{last:?}");
    let used = per_second.iter().filter(|&&n| n > 0).count();
    assert!((11..=13).contains(&used), "{per_second:?}");
}

#[test]
fn the_hint_grows_with_the_debt_and_never_promises_more_than_a_minute() {
    let bucket = AcceptBucket::new(1, 10.0, dice());
    let now = Instant::now();
    assert!(bucket.take(New, now).is_ok());
    let hints: Vec<Duration> = (0..5_000).map(|_| bucket.take(New, now).unwrap_err()).collect();
    let mean = |some: &[Duration]| some.iter().sum::<Duration>() / some.len() as u32;
    assert!(mean(&hints[..50]) < mean(&hints[200..250]));
    assert!(hints.iter().all(|hint| *hint >= SOONEST && *hint <= FURTHEST));
    // Beyond the promise: U(30, 60), no heap at the cap.
    let beyond = &hints[1_000..];
    assert!(beyond.iter().all(|hint| *hint >= FURTHEST / 2));
    let n_at_cap = beyond.iter().filter(|hint| hint.as_secs() == 59).count();
    assert!(n_at_cap < beyond.len() / 15, "{n_at_cap}");
    // The queue did not grow on while it was full.
    let later = now + Duration::from_secs(61);
    assert!(bucket.promise(later) < 3 * SOONEST);
}

// ---- both kinds

#[test]
fn one_kind_alone_has_the_whole_bucket() {
    for who in [Back, New] {
        for (burst, rate, expected) in
            [(200, 100.0, 200 + 3_000), (2, 3.0, 2 + 90), (5, 0.5, 5 + 15), (1, 1.0, 1 + 30), (1, 100.0, 1 + 3_000)]
        {
            let bucket = AcceptBucket::new(burst, rate, dice());
            let start = Instant::now();
            assert_eq!(n_at_once(&bucket, who, start, 1_000), burst);
            let n = n_admitted(&bucket, who, start, Duration::from_micros(250), 120_001);
            assert_eq!(burst + n, expected, "{who:?}, burst {burst}, {rate}/s");
        }
    }
}

#[test]
fn newcomers_do_not_reach_into_the_reserve_and_returning_ones_do() {
    let bucket = AcceptBucket::new(200, 100.0, dice());
    let now = Instant::now();
    assert_eq!(n_at_once(&bucket, Back, now, 100), 100);
    assert_eq!(n_at_once(&bucket, New, now, 1_000), 60);
    assert_eq!(n_at_once(&bucket, Back, now, 1_000), 40);
}

#[test]
fn a_reserve_is_no_larger_than_what_returning_ones_asked_for() {
    for (n_back, n_new) in [(0, 200), (1, 198), (39, 122), (40, 120), (41, 119), (160, 0)] {
        let bucket = AcceptBucket::new(200, 100.0, dice());
        let now = Instant::now();
        assert_eq!(n_at_once(&bucket, Back, now, n_back), n_back);
        assert_eq!(n_at_once(&bucket, New, now, 1_000), n_new, "after {n_back}");
    }
}

#[test]
fn what_is_kept_is_free_five_seconds_after_its_kind_was_last_seen() {
    let gone = Duration::from_secs(5);
    for (late, n_new) in [(gone - MS, 160), (gone, 200), (gone + MS, 200)] {
        let bucket = AcceptBucket::new(200, 100.0, dice());
        let now = Instant::now();
        assert_eq!(n_at_once(&bucket, Back, now, 100), 100);
        assert_eq!(n_at_once(&bucket, New, now + late, 1_000), n_new, "{late:?} later");
    }
    for (late, n_back) in [(gone - MS, 160), (gone, 200), (gone + MS, 200)] {
        let bucket = AcceptBucket::new(200, 100.0, dice());
        let now = Instant::now();
        assert_eq!(n_at_once(&bucket, New, now, 200), 200);
        assert_eq!(n_at_once(&bucket, Back, now + late, 1_000), n_back, "{late:?} later");
    }
}

#[test]
fn the_rate_is_exact_whatever_the_mix_and_newcomers_get_their_fifth() {
    for percent_new in [2, 10, 50, 90, 98] {
        let bucket = AcceptBucket::new(200, 100.0, dice());
        let every = |percent: u32| SECOND / (percent * 200);
        let admitted = both_for(&bucket, Instant::now(), 30, every(100 - percent_new), every(percent_new));
        let [back, new] = sum(&admitted);
        assert_eq!(back + new, 200 + 3_000, "{percent_new} % new");
        // Any five seconds, those of the burst apart: 100 of the 500 tokens, give or take one.
        for five in admitted[..30].windows(5).skip(1) {
            let [back, new] = sum(five);
            assert!((99..=101).contains(&new), "{percent_new} % new: {new} and {back}");
            assert!((399..=401).contains(&back), "{percent_new} % new: {new} and {back}");
        }
    }
}

#[test]
fn whoever_asks_for_less_than_its_part_is_not_refused_and_the_others_get_the_rest() {
    let dense = SECOND / 2_000;
    for (back, new, sparse) in [(dense, SECOND / 10, 1), (dense, SECOND, 1), (dense, 4 * SECOND, 1)] {
        let bucket = AcceptBucket::new(200, 100.0, dice());
        let admitted = both_for(&bucket, Instant::now(), 64, back, new);
        let asked = |seconds: u32| (SECOND * seconds).as_nanos().div_ceil(new.as_nanos()) as u32;
        // The first that found the bucket empty was refused; from then on one is kept for them.
        let later = sum(&admitted[4..60]);
        assert!(later[sparse] + 1 >= asked(60) - asked(4), "{new:?}: {later:?}");
        let all = sum(&admitted);
        assert!(all[0] + all[1] >= 200 + 6_400 - asked(10), "{new:?}: {all:?}");
    }
    for back in [SECOND / 50, SECOND / 10, SECOND, 4 * SECOND] {
        let bucket = AcceptBucket::new(200, 100.0, dice());
        let admitted = both_for(&bucket, Instant::now(), 64, back, dense);
        let asked = |seconds: u32| (SECOND * seconds).as_nanos().div_ceil(back.as_nanos()) as u32;
        let later = sum(&admitted[4..60]);
        assert_eq!(later[0], asked(60) - asked(4), "{back:?}");
        let all = sum(&admitted);
        assert!(all[0] + all[1] >= 200 + 6_400 - asked(10).min(40), "{back:?}: {all:?}");
    }
}

#[test]
fn the_refill_is_not_lost_while_anybody_is_refused() {
    for seed in 0..40 {
        let dice = Dice::seeded(seed);
        let (burst, rate) = [(200, 100.0), (50, 400.0), (5, 2.0), (2, 1.0), (1, 1.0)][seed as usize % 5];
        let bucket = AcceptBucket::new(burst, rate, Dice::seeded(seed));
        let start = Instant::now();
        let mut at = Duration::ZERO;
        let mut n = 0;
        // Phases of 0 to 3 s in which each kind is silent, or tries densely, or now and then. One
        // of the two is always dense, so that somebody is refused all the time.
        while at < 60 * SECOND {
            let part_new = [0.0, 0.001, 0.05, 0.5, 0.95, 0.999, 1.0][(dice.unit() * 7.0) as usize];
            let end = at + dice.between(Duration::ZERO, 3 * SECOND);
            while at < end {
                let who = if dice.unit() < part_new { New } else { Back };
                n += u32::from(bucket.take(who, start + at).is_ok());
                at += dice.between(Duration::ZERO, MS);
            }
        }
        let all = f64::from(burst) + at.as_secs_f64() * rate;
        let kept = (f64::from(burst) / 5.0).max(1.0);
        assert!(f64::from(n) <= all, "seed {seed}: {n} of {all}");
        assert!(f64::from(n) >= all - 2.0 * kept - 1.0, "seed {seed}: {n} of {all}");
    }
}

#[test]
fn low_rates_and_small_bursts_starve_nobody() {
    for (burst, rate) in [(1, 1.0), (5, 0.5), (1, 0.5), (1, 20.0), (2, 1.0), (3, 0.2)] {
        for (back, new) in [(1_000, 1_000), (1_000, 20), (20, 1_000)] {
            let bucket = AcceptBucket::new(burst, rate, dice());
            let admitted = both_for(&bucket, Instant::now(), 120, SECOND / back, SECOND / new);
            let [n_back, n_new] = sum(&admitted);
            let case = format!("burst {burst}, {rate}/s, {back} and {new} attempts/s: {n_back} and {n_new}");
            let refill = (rate * 120.0) as u32;
            assert!((refill + burst - 1..=refill + burst).contains(&(n_back + n_new)), "{case}");
            assert!(n_new + 2 >= refill / 5, "{case}");
            assert!(n_back + 2 + burst >= refill * 4 / 5, "{case}");
        }
    }
}

#[test]
fn a_forged_cursor_shuts_nobody_out() {
    let bucket = AcceptBucket::new(200, 100.0, dice());
    let admitted = both_for(&bucket, Instant::now(), 60, SECOND / 20_000, SECOND / 20);
    let n_new = sum(&admitted[1..60])[1];
    // Twenty a second are exactly the newcomers' part.
    assert!(n_new >= 59 * 20 - 2, "{n_new}");
}

#[test]
fn forged_tokens_do_not_use_up_the_newcomers_share() {
    let bucket = AcceptBucket::new(200, 100.0, dice());
    let start = Instant::now();
    let mut n_good = 0;
    for ms in 0..30_000 {
        let now = start + MS * ms;
        let _ = bucket.take(Back, now);
        // A good newcomer now and then, behind two forged ones.
        for _ in 0..2 {
            if bucket.take(New, now).is_ok() {
                bucket.give_back(New, now);
            }
        }
        n_good += u32::from(ms % 20 == 0 && bucket.take(New, now).is_ok());
    }
    assert!(n_good >= 30 * 19, "{n_good} good newcomers in 30 s, a fifth of 100 a second is theirs");
}

#[test]
fn a_refusal_is_counted_and_a_promise_is_none() {
    let bucket = AcceptBucket::new(2, 1.0, dice());
    let now = Instant::now();
    assert_eq!(n_at_once(&bucket, New, now, 2), 2);
    assert_eq!(bucket.n_refused(), 0);
    assert_eq!(n_at_once(&bucket, New, now, 5) + n_at_once(&bucket, Back, now, 3), 0);
    bucket.promise(now);
    assert_eq!(bucket.n_refused(), 8);
}

// ---- another rate

#[test]
fn a_new_rate_counts_from_its_instant_and_not_before() {
    let bucket = AcceptBucket::new(200, 100.0, dice());
    let start = Instant::now();
    assert_eq!(n_at_once(&bucket, New, start, 1_000), 200);
    bucket.set_rate(400.0, start + SECOND / 2);
    assert_eq!(bucket.rate(), 400.0);
    assert_eq!(bucket.tokens(start + SECOND / 2), 50.0);
    assert_eq!(n_at_once(&bucket, New, start + SECOND * 3 / 4, 1_000), 150);
    bucket.set_rate(0.5, start + SECOND);
    assert_eq!(n_at_once(&bucket, New, start + SECOND, 1_000), 100);
    assert_eq!(n_at_once(&bucket, New, start + 3 * SECOND - MS, 1_000), 0);
    assert_eq!(n_at_once(&bucket, New, start + 3 * SECOND, 1_000), 1);
    let later = start + 3_600 * SECOND;
    assert_eq!(bucket.tokens(later), 200.0, "the burst stays");
}

#[test]
fn the_queue_is_as_long_as_the_new_rate_makes_it() {
    let waits = |rate_then: f64, n: u32| {
        let bucket = AcceptBucket::new(1, 100.0, dice());
        let now = Instant::now();
        assert_eq!(n_at_once(&bucket, New, now, n), 1);
        bucket.set_rate(rate_then, now);
        bucket.promise(now).as_secs_f64()
    };
    // 1,900 wait, which takes 20 s at 95 a second, and one second more; the jitter adds a tenth.
    assert!((21.0..24.0).contains(&waits(100.0, 1_901)));
    assert!((2.1..3.2).contains(&waits(1_000.0, 1_901)));
    assert!((42.0..47.0).contains(&waits(50.0, 1_901)));
    let furthest = FURTHEST.as_secs_f64();
    assert!((30.0..=furthest).contains(&waits(1.0, 1_901)));
    assert!((1.0..=2.0).contains(&waits(1_000.0, 1)));
}

// ---- a crowd that obeys

struct Return {
    ideal: f64,
    /// When the last of each kind was in, and when on the average, in seconds.
    last: [f64; 2],
    mean: [f64; 2],
    attempts_each: f64,
}

/// `n` clients, each first trying within 5 s, then when it was told to.
fn a_crowd_returns(n: u32, percent_new: u32) -> Return {
    let bucket = AcceptBucket::new(200, 100.0, dice());
    let first = Dice::seeded(11);
    let start = Instant::now();
    let mut trying: BinaryHeap<Reverse<(Duration, u32)>> =
        (0..n).map(|i| Reverse((first.between(Duration::ZERO, 5 * SECOND), i))).collect();
    let mut came = [Vec::new(), Vec::new()];
    let mut n_attempts = 0;
    while let Some(Reverse((at, i))) = trying.pop() {
        n_attempts += 1;
        let kind = usize::from(i % 100 < percent_new);
        match bucket.take([Back, New][kind], start + at) {
            Ok(()) => came[kind].push(at.as_secs_f64()),
            Err(after) => trying.push(Reverse((at + after, i))),
        }
    }
    Return {
        ideal: f64::from(n - 200) / 100.0,
        last: [0, 1].map(|kind| came[kind].last().copied().unwrap_or_default()),
        mean: [0, 1].map(|kind| came[kind].iter().sum::<f64>() / came[kind].len().max(1) as f64),
        attempts_each: f64::from(n_attempts) / f64::from(n),
    }
}

#[test]
fn a_crowd_that_obeys_is_back_in_little_more_than_the_time_it_needs() {
    // 10,000 clients of one crashed node on four others; and all of them on one bucket, where
    // nobody can do better than 2.2 attempts: no delay is longer than 60 s, so a third of them
    // must ask a third time.
    for (n, attempts_each) in [(2_500, 1.9), (10_000, 2.35)] {
        for percent_new in [0, 5, 20, 50, 80, 95, 100] {
            let done = a_crowd_returns(n, percent_new);
            let case = format!("{n}, {percent_new} % new: {:?} of {} s", done.last, done.ideal);
            let last = done.last[0].max(done.last[1]);
            assert!(last <= 1.15 * done.ideal, "{case}");
            assert!(done.attempts_each <= attempts_each, "{case}, {} attempts", done.attempts_each);
            // The smaller kind of the two hardly waits; of equal ones the returning go first.
            if (50..100).contains(&percent_new) {
                assert!(done.mean[0] < 0.8 * done.mean[1], "{case}, on the average {:?}", done.mean);
            }
        }
    }
}
