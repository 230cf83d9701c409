//! How many attempts the node authenticates, and which of them when both kinds come: clients that
//! come back and clients that come for the first time. Decides who may take a token that is there;
//! how many there are is `bucket`'s.
//!
//! Whoever comes back goes first: somebody was listening a moment ago and is missing events now.
//! But a cursor is a hint that anybody can forge, so it orders and never excludes. Two things are
//! kept while both kinds are about, and nothing at all while only one is:
//!
//! - a *reserve*, 20 % of the burst, into which newcomers do not reach;
//! - the *newcomers' share*: 20 % of the refill is put by for them, and those tokens the returning
//!   ones leave alone.
//!
//! So the few newcomers in a crowd that comes back are served at once, all the more if its cursors
//! are forged, and where there are many the returning ones pass them.
//!
//! Neither is kept beyond what its kind asked for lately, so a token is never held for somebody who
//! does not come, and a full bucket refuses nobody. What is kept is stored, not lost: the sum over
//! any time is that of the plain bucket.

#[cfg(test)]
mod tests;

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard};
use std::time::Duration;

use tokio::time::Instant;

use super::bucket::{Bucket, Rate, Slot, TOKEN};
use crate::clock::Dice;

/// One in so many tokens of the burst is kept for returning ones, and of the refill for newcomers:
/// a fifth. Enough that nobody starves, little enough that a crowd which comes back hardly waits
/// longer for it.
const KEPT: i64 = 5;
/// A kind of client is about until it has not been seen for so long: the window in which clients
/// that were cut off together make their first attempt.
const ABOUT: Duration = Duration::from_secs(5);
/// At rates below one a second the newcomers' share needs longer than `ABOUT` for one token. No
/// longer than this: by then everybody refused has been told to be back.
const ABOUT_AT_MOST: Duration = Duration::from_secs(60);

/// Whether a client was here before. A hint of its own telling.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Coming {
    /// It shows a cursor that may be true, so it was cut off and misses events.
    Back,
    /// It shows none.
    New,
}

/// How many attempts the node authenticates: a burst, and then a rate that holds over any time,
/// shared between clients that come back and new ones.
#[derive(Debug)]
pub struct AcceptBucket {
    shared: Mutex<Shared>,
    n_refused: AtomicU64,
    dice: Dice,
}

impl AcceptBucket {
    /// Full. `burst` is the most tokens it ever holds (at least 1), `per_second` what it gains.
    pub fn new(burst: u32, per_second: f64, dice: Dice) -> Self {
        let shared = Shared::full(Rate::new(burst, per_second), Instant::now());
        Self { shared: Mutex::new(shared), n_refused: AtomicU64::new(0), dice }
    }

    /// Tokens it gains a second.
    pub fn rate(&self) -> f64 {
        self.lock().rate.per_second()
    }

    /// Changes what it gains a second from `now` on; the burst stays. Whoever waits in the queue
    /// keeps the time it was given; the queue's length is counted anew for those who follow.
    pub fn set_rate(&self, per_second: f64, now: Instant) {
        self.lock().set_rate(per_second, now);
    }

    /// Takes one place. While only one kind of client is about it has the whole bucket; else see
    /// the head of this file.
    ///
    /// # Errors
    /// When to come back: 1 to 60 s, drawn from the virtual queue.
    pub fn take(&self, who: Coming, now: Instant) -> Result<(), Duration> {
        let slot = self.lock().take(who, now);
        slot.map_err(|slot| {
            self.n_refused.fetch_add(1, Ordering::Relaxed);
            slot.delay(&self.dice)
        })
    }

    /// How many `take` has refused since the start.
    pub fn n_refused(&self) -> u64 {
        self.n_refused.load(Ordering::Relaxed)
    }

    /// When somebody who is refused for another reason that passes (no capacity, say) may come
    /// back: a slot in the same queue, 1 to 60 s.
    pub fn promise(&self, now: Instant) -> Duration {
        let slot = self.lock().promise(now);
        slot.delay(&self.dice)
    }

    /// Gives back the place that `who` took: the attempt cost less than was thought. Never above
    /// the burst; a newcomer's goes to the newcomers' share, so forged tokens do not use that up.
    pub fn give_back(&self, who: Coming, now: Instant) {
        self.lock().give_back(who, now);
    }

    /// Places at hand, 0 to `burst`.
    pub fn tokens(&self, now: Instant) -> f64 {
        let mut shared = self.lock();
        shared.refill(now);
        shared.bucket.level.min(shared.rate.full) as f64 / TOKEN as f64
    }

    fn lock(&self) -> MutexGuard<'_, Shared> {
        self.shared.lock().expect("no panic while the accept bucket is held")
    }
}

/// One bucket and the claims on it.
#[derive(Debug)]
struct Shared {
    rate: Rate,
    about: Duration,
    bucket: Bucket,
    back: Asked,
    new: Asked,
    /// What of the newcomers' share is put by, in billionths of a token.
    put_by: i64,
}

impl Shared {
    fn full(rate: Rate, now: Instant) -> Self {
        Self {
            rate,
            about: about(&rate),
            bucket: Bucket::full(&rate, now),
            back: Asked::nobody(now),
            new: Asked::nobody(now),
            put_by: 0,
        }
    }

    fn take(&mut self, who: Coming, now: Instant) -> Result<(), Slot> {
        self.refill(now);
        match who {
            Coming::Back => self.back.count(self.about, now),
            Coming::New => self.new.count(self.about, now),
        }
        if self.bucket.level < TOKEN + self.kept_from(who, now) {
            return Err(self.bucket.promise(&self.rate, now));
        }
        self.bucket.level -= TOKEN;
        if who == Coming::New {
            self.put_by = (self.put_by - TOKEN).max(0);
        }
        Ok(())
    }

    fn promise(&mut self, now: Instant) -> Slot {
        self.bucket.promise(&self.rate, now)
    }

    fn give_back(&mut self, who: Coming, now: Instant) {
        self.refill(now);
        self.bucket.level = (self.bucket.level + TOKEN).min(self.most(now));
        if who == Coming::New {
            self.put_by = (self.put_by + TOKEN).min(self.claim(self.new, now));
        }
    }

    fn set_rate(&mut self, per_second: f64, now: Instant) {
        self.refill(now);
        let new = self.rate.at(per_second);
        self.bucket.requeue(&self.rate, &new, now);
        self.about = about(&new);
        self.rate = new;
    }

    fn refill(&mut self, now: Instant) {
        let most = self.most(now);
        let gained = self.bucket.refill(&self.rate, most, now);
        let claim = self.claim(self.new, now);
        self.put_by = self.put_by.saturating_add(gained / KEPT).min(claim);
    }

    /// What this kind may not touch. Of the newcomers' share only whole tokens: a part of one is
    /// of no use to them yet.
    fn kept_from(&self, who: Coming, now: Instant) -> i64 {
        match who {
            Coming::Back => self.put_by - self.put_by % TOKEN,
            Coming::New if self.put_by >= TOKEN => 0,
            Coming::New => self.claim(self.back, now),
        }
    }

    /// What may be kept for a kind: a fifth of the burst, one token at least, and no more than it
    /// asked for lately.
    fn claim(&self, kind: Asked, now: Instant) -> i64 {
        kind.tokens(self.about, now).min((self.rate.full / KEPT).max(TOKEN))
    }

    /// The most it holds: the burst. But a burst of 1 has no room for a token that is kept and one
    /// that flows, and would pour the refill away while it refuses; it has 2 while both are about.
    fn most(&self, now: Instant) -> i64 {
        let both_about = self.claim(self.back, now) > 0 && self.claim(self.new, now) > 0;
        if both_about { self.rate.full.max(2 * TOKEN) } else { self.rate.full }
    }
}

/// How long a kind counts as being about after it was seen: at a low rate, until the newcomers'
/// share has gained one token.
fn about(rate: &Rate) -> Duration {
    let one_of_the_share = Duration::from_secs_f64(KEPT as f64 / rate.per_second());
    one_of_the_share.clamp(ABOUT, ABOUT_AT_MOST)
}

/// How often one kind of client asked lately, admitted or not, in two windows of the time that it
/// counts as being about.
#[derive(Clone, Copy, Debug)]
struct Asked {
    last: Option<Instant>,
    window_began: Instant,
    n: u32,
    n_before: u32,
}

impl Asked {
    fn nobody(now: Instant) -> Self {
        Self { last: None, window_began: now, n: 0, n_before: 0 }
    }

    fn count(&mut self, window: Duration, now: Instant) {
        let age = now.saturating_duration_since(self.window_began);
        if age >= window {
            self.n_before = if age < 2 * window { self.n } else { 0 };
            self.n = 0;
            self.window_began = now;
        }
        self.n = self.n.saturating_add(1);
        self.last = Some(now);
    }

    /// Billionths of a token it asked for; 0 once it was not seen for a whole window.
    fn tokens(&self, window: Duration, now: Instant) -> i64 {
        match self.last {
            Some(last) if now.saturating_duration_since(last) < window => {
                (i64::from(self.n) + i64::from(self.n_before)) * TOKEN
            }
            _ => 0,
        }
    }
}
