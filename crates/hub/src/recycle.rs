//! At which age sessions are moved, so that no crowd stays together for ever and a new node fills in
//! the course of an hour. Decides the age at opening, and at its end whether the session goes now
//! or a little later. Who is asked is the session, by the hub's wheel.
//!
//! A crowd that came together must not come back together: ages are drawn from a range that is as
//! wide as their mean, and in a storm earlier, as if each had been here for a while already. And if
//! many ages end at once all the same (a process that stood still, a machine that slept), those
//! beyond a few times the steady rate leave drawn over `MAX_POSTPONED`. Nobody stays longer than
//! that beyond the maximum, whatever was put off how often.

use std::sync::Mutex;
use std::time::Duration;

use tokio::time::Instant;

use crate::clock::Dice;

/// Nobody stays longer than this beyond the maximum age, or beyond the end of its own age for being
/// busy or for lack of a turn (contract: maximum + 90 s).
pub const MAX_POSTPONED: Duration = Duration::from_secs(90);

/// While others are moved for better reasons, or nobody can come back, sessions ask again after so long.
const AGAIN: (Duration, Duration) = (Duration::from_secs(5), Duration::from_secs(30));

/// Turns a second as a multiple of the steady rate, sessions by their mean age: what is steady is
/// never held up, and what comes all at once is spread.
const TURNS: f64 = 5.0;
/// Turns that are saved up, as time.
const SAVED: Duration = Duration::from_secs(2);
/// So few at once are no crowd.
const FEW: f64 = 10.0;

/// Arrivals are averaged over these times, to tell a storm from what is usual.
const JUST_NOW: Duration = Duration::from_secs(10);
const USUALLY: Duration = Duration::from_secs(600);
/// So many times the usual rate is a storm.
const STORM: f64 = 3.0;
/// Fewer than this in `JUST_NOW` have no echo worth the name, however unusual they are.
const CROWD: f64 = 100.0;
/// In a storm the shortest age is this part of the minimum.
const SHORTEST: u32 = 10;

/// An extension is this part of what is left to the maximum, and there is one: ages that were drawn
/// evenly still end evenly, where a part of the age itself would pile up at the maximum. A quarter
/// on a node that is short of sessions; half where clients only come back to it.
const EXTENSION: f64 = 0.25;
const EXTENSION_AT_HOME: f64 = 0.5;

/// When sessions are recycled on this node.
#[derive(Debug)]
pub(crate) struct Recycle {
    /// `GATEWAY_MAX_AGE_MIN` and `_MAX`; `None`: never.
    range: Option<(Duration, Duration)>,
    inner: Mutex<Inner>,
}

#[derive(Debug)]
struct Inner {
    began_at: Instant,
    /// Arrivals a second, averaged.
    just_now: Average,
    usually: Average,
    turns: f64,
    turned_at: Instant,
    way: Way,
    short: Short,
    home: Home,
}

/// Whether anybody has a turn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Way {
    /// At its pace.
    Open,
    /// Sessions are moved for a better reason just now (shedding, another node's drain): their
    /// budget is one, and recycling comes last.
    Yields,
    /// The backplane fails, and who leaves may find no node that can take it in: sessions outlast that, as far
    /// as the maximum lets them.
    Stays,
    /// This node leaves: all its sessions have their time to go.
    Closed,
}

/// Whether this node has too few sessions as it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Short {
    /// No: whoever's age is over leaves.
    No,
    /// Yes, in an uneven fleet: who leaves it may end on a fuller node.
    Yes,
}

/// Where clients go that leave this node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Home {
    /// Wherever the balancer in front puts them.
    Anywhere,
    /// Back here: recycling moves nobody, it only costs. It goes on, for nobody stays beyond the
    /// maximum, and not all of a crowd can wait for that.
    Here,
}

/// A session whose age is over.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Aged {
    pub opened_at: Instant,
    /// It asked not to be moved until then.
    pub busy_until: Option<Instant>,
    /// It was put off by so much already, extensions aside.
    pub postponed: Duration,
    /// It had its extension.
    pub is_extended: bool,
}

/// What becomes of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Verdict {
    /// It leaves.
    Leave,
    /// It is asked again at `to`, and was put off by this much in all by then.
    Postpone { to: Instant, postponed: Duration },
    /// It is asked again then; this was its extension.
    Extend(Instant),
}

impl Recycle {
    pub fn new(range: Option<(Duration, Duration)>, now: Instant) -> Self {
        let inner = Inner {
            began_at: now,
            just_now: Average::new(JUST_NOW, now),
            usually: Average::new(USUALLY, now),
            turns: FEW,
            turned_at: now,
            way: Way::Open,
            short: Short::No,
            home: Home::Anywhere,
        };
        Self { range, inner: Mutex::new(inner) }
    }

    /// A session opens: the age that it may reach; `None`: any.
    pub fn age(&self, now: Instant, dice: &Dice) -> Option<Duration> {
        let (min, max) = self.range?;
        let age = dice.between(min, max);
        if self.with(|inner| inner.arrives(now)) {
            Some(dice.between((min / SHORTEST).min(age), age))
        } else {
            Some(age)
        }
    }

    /// Does a session whose age is over leave now, on a node with `n_sessions`?
    pub fn judge(&self, now: Instant, aged: &Aged, n_sessions: usize, dice: &Dice) -> Verdict {
        let Some((min, max)) = self.range else { return Verdict::Leave };
        let latest = aged.opened_at + max + MAX_POSTPONED;
        if now >= latest {
            return Verdict::Leave;
        }
        let left = MAX_POSTPONED.saturating_sub(aged.postponed);
        let later = |by: Duration, postponed| Verdict::Postpone { to: (now + by).min(latest), postponed };
        let (way, extension) = self.with(|inner| (inner.way, inner.extension()));
        if way == Way::Closed {
            return Verdict::Postpone { to: latest, postponed: aged.postponed };
        }
        if way == Way::Stays {
            // Not counted: it is no fault of theirs.
            return later(dice.between(AGAIN.0, AGAIN.1), aged.postponed);
        }
        if left.is_zero() {
            return Verdict::Leave;
        }
        if let Some(until) = aged.busy_until.filter(|until| *until > now) {
            let by = (until - now).min(left);
            return later(by, aged.postponed + by);
        }
        let by = (aged.opened_at + max).saturating_duration_since(now).mul_f64(extension);
        if !by.is_zero() && !aged.is_extended {
            return Verdict::Extend(now + by);
        }
        if self.with(|inner| inner.takes_turn(now, n_sessions, (min + max) / 2)) {
            return Verdict::Leave;
        }
        if way == Way::Yields && left > AGAIN.1 {
            let by = dice.between(AGAIN.0, AGAIN.1);
            return later(by, aged.postponed + by);
        }
        // Its last time: a crowd that asked again and again would leave together in the end.
        later(dice.between(Duration::ZERO, left), MAX_POSTPONED)
    }

    /// From now on, whether anybody has a turn. `Closed` is for good.
    pub fn set_way(&self, way: Way) {
        self.with(|inner| {
            if inner.way != Way::Closed {
                inner.way = way;
            }
        });
    }

    /// From now on, whether this node has too few sessions.
    pub fn set_short(&self, short: Short) {
        self.with(|inner| inner.short = short);
    }

    /// From now on, where clients go that leave this node.
    pub fn set_home(&self, home: Home) {
        self.with(|inner| inner.home = home);
    }

    fn with<R>(&self, call: impl FnOnce(&mut Inner) -> R) -> R {
        call(&mut self.inner.lock().expect("no panic while recycling is held"))
    }
}

impl Inner {
    /// Counts an arrival; is it one of a storm?
    fn arrives(&mut self, now: Instant) -> bool {
        self.just_now.count(now);
        self.usually.count(now);
        let is_young = now.saturating_duration_since(self.began_at) < USUALLY;
        let is_crowd = self.just_now.per_second() * JUST_NOW.as_secs_f64() >= CROWD;
        is_crowd && (is_young || self.just_now.per_second() > STORM * self.usually.per_second())
    }

    fn extension(&self) -> f64 {
        match (self.home, self.short) {
            (Home::Here, _) => EXTENSION_AT_HOME,
            (Home::Anywhere, Short::Yes) => EXTENSION,
            (Home::Anywhere, Short::No) => 0.0,
        }
    }

    fn takes_turn(&mut self, now: Instant, n_sessions: usize, mean: Duration) -> bool {
        let per_second = TURNS * n_sessions as f64 / mean.as_secs_f64().max(0.001);
        let since = now.saturating_duration_since(self.turned_at).as_secs_f64();
        self.turned_at = now;
        let most = (per_second * SAVED.as_secs_f64()).max(FEW);
        self.turns = (self.turns + since * per_second).min(most);
        if self.way != Way::Open || self.turns < 1.0 {
            return false;
        }
        self.turns -= 1.0;
        true
    }
}

/// A rate, averaged exponentially over a time.
#[derive(Debug)]
struct Average {
    over: f64,
    per_second: f64,
    at: Instant,
}

impl Average {
    fn new(over: Duration, now: Instant) -> Self {
        Self { over: over.as_secs_f64(), per_second: 0.0, at: now }
    }

    fn count(&mut self, now: Instant) {
        let since = now.saturating_duration_since(self.at).as_secs_f64();
        self.at = now;
        self.per_second = self.per_second * (-since / self.over).exp() + 1.0 / self.over;
    }

    /// As of the last that was counted.
    fn per_second(&self) -> f64 {
        self.per_second
    }
}

#[cfg(test)]
mod tests;
