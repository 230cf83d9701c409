//! A token bucket with its virtual queue, the arithmetic of both limiters: how it fills, and which
//! slot a refused one is promised. Knows no lock and no chance, nor who may take which token.

use std::time::Duration;

use tokio::time::Instant;

use crate::clock::Dice;

/// Nobody is asked to come back sooner.
pub(super) const SOONEST: Duration = Duration::from_secs(1);
/// No slot is promised further ahead: who knows what the fleet looks like then.
pub(super) const FURTHEST: Duration = Duration::from_secs(60);
/// The part of the rate that is promised; the rest is for newcomers who were never refused.
const PROMISED: f64 = 0.95;
/// One token, counted in billionths so that a rate is exact over any time.
pub(super) const TOKEN: i64 = 1_000_000_000;

/// Level and queue of one bucket.
#[derive(Clone, Copy, Debug)]
pub(super) struct Bucket {
    /// Billionths of a token; below 0 after a charge that it could not pay.
    pub level: i64,
    /// What the last refill had left over, in billionths of a billionth.
    remainder: u64,
    refilled_at: Instant,
    /// End of the last slot promised.
    promised: Instant,
}

/// What a bucket may hold and gains.
#[derive(Clone, Copy, Debug)]
pub(super) struct Rate {
    /// Billionths of a token.
    pub full: i64,
    /// Billionths of a token a second.
    pub gain: u64,
    /// The time one slot of the virtual queue takes.
    slot: Duration,
}

/// The slot a refused one was given, to be made a delay with chance.
#[derive(Clone, Copy, Debug)]
pub(super) enum Slot {
    In(Duration),
    BeyondPromise,
}

impl Rate {
    /// At least one token of burst and one in a year, so that no arithmetic can fail.
    pub fn new(burst: u32, per_second: f64) -> Self {
        Self { full: i64::from(burst.max(1)) * TOKEN, gain: 0, slot: Duration::ZERO }.at(per_second)
    }

    /// The same burst at another rate.
    pub fn at(self, per_second: f64) -> Self {
        let per_second = per_second.max(3.2e-8);
        Self {
            full: self.full,
            gain: (per_second * TOKEN as f64).round() as u64,
            slot: Duration::from_secs_f64(1.0 / (PROMISED * per_second)),
        }
    }

    /// Tokens a second.
    pub fn per_second(&self) -> f64 {
        self.gain as f64 / TOKEN as f64
    }
}

impl Bucket {
    /// Full, and nobody promised anything.
    pub fn full(rate: &Rate, now: Instant) -> Self {
        Self { level: rate.full, remainder: 0, refilled_at: now, promised: now }
    }

    /// Adds what came since the last refill, up to `most`; says how much came, poured over or not.
    pub fn refill(&mut self, rate: &Rate, most: i64, now: Instant) -> i64 {
        let elapsed = now.saturating_duration_since(self.refilled_at).as_nanos();
        if elapsed == 0 {
            return 0;
        }
        let gained = elapsed * u128::from(rate.gain) + u128::from(self.remainder);
        let whole = i64::try_from(gained / TOKEN as u128).unwrap_or(i64::MAX);
        self.level = self.level.saturating_add(whole).min(most);
        self.remainder = if self.level == most { 0 } else { (gained % TOKEN as u128) as u64 };
        self.refilled_at = now;
        whole
    }

    /// One token, or a slot in the queue.
    pub fn take(&mut self, rate: &Rate, now: Instant) -> Result<(), Slot> {
        self.refill(rate, rate.full, now);
        if self.level >= TOKEN {
            self.level -= TOKEN;
            return Ok(());
        }
        Err(self.promise(rate, now))
    }

    /// The next slot of the queue.
    pub fn promise(&mut self, rate: &Rate, now: Instant) -> Slot {
        let start = (now + SOONEST).max(self.promised);
        if start - now > FURTHEST {
            return Slot::BeyondPromise;
        }
        self.promised = start + rate.slot;
        Slot::In(start - now)
    }

    /// May leave a debt, but none above a whole bucket.
    pub fn charge(&mut self, rate: &Rate, n_tokens: u32, now: Instant) {
        self.refill(rate, rate.full, now);
        let owed = i64::from(n_tokens) * TOKEN;
        self.level = self.level.saturating_sub(owed).max(-rate.full);
    }

    /// The rate changed: as many wait as before, so whoever is refused next stands behind them for
    /// as long as they take *now*. Slots that were given stay as they are; nobody can be told.
    pub fn requeue(&mut self, old: &Rate, new: &Rate, now: Instant) {
        let waiting = self.promised.saturating_duration_since(now).min(FURTHEST);
        let takes = waiting.as_secs_f64() * old.gain as f64 / new.gain as f64;
        self.promised = now + Duration::from_secs_f64(takes.min(FURTHEST.as_secs_f64()));
    }
}

impl Slot {
    /// The jitter is added, never clamped: a clamp would gather again what was spread.
    pub fn delay(self, dice: &Dice) -> Duration {
        match self {
            Slot::In(slot) => {
                let room = SOONEST.max(slot / 10).min(FURTHEST.saturating_sub(slot));
                slot + dice.between(Duration::ZERO, room)
            }
            Slot::BeyondPromise => dice.between(FURTHEST / 2, FURTHEST),
        }
    }
}
