//! Whether moving sessions does any good. Two ways in which it does not: the clients do not come
//! back, so that it empties the service; or they come back here, because the balancer in front goes
//! by address or cookie, or hands out in turn to very many nodes. Either way it stops for a while
//! and leaves the rest to recycling; it tries again, less and less often.

use std::collections::VecDeque;
use std::time::Duration;

use tokio::time::Instant;

use super::plan::ON_THEIR_WAY;
use super::{Own, Plan, Rest, Warning};
use crate::clock::Dice;

/// What is looked back on.
const WINDOW: Duration = Duration::from_secs(60);
/// Clients are on their way for at most so long, evenly.
const RETURN: Duration = Duration::from_secs(5);

/// Nobody closed for so long is a pause: what is closed after it is judged by itself. (After a pause
/// of just under a minute the last one held a few closes of before and a few whose clients were on
/// their way, and all seemed to stay away.) So few as are judged at all come more often.
const PAUSE: Duration = Duration::from_secs(15);

/// Fewer than this part came back.
const RETURNED: f64 = 0.7;
/// More than this part of those closed is missing: others left too, for another reason.
const OUTSIDE: f64 = 1.5;
/// This node lost less than this part of what it closed. One newcomer among five in turn gives
/// 0.2, one among twenty 0.05.
const HELPED: f64 = 0.1;

/// Too few closes to judge by: this many, and this part of the sessions, for sessions come and go.
const FEWEST: f64 = 20.0;
const FEWEST_PART: f64 = 0.01;

/// The first break; each further one is twice as long, up to sixteen times.
const BREAK: Duration = Duration::from_secs(600);
const LONGEST: u32 = 16;
/// Breaks are drawn this much longer, so that not all nodes try again together.
const BREAK_SPREAD: f64 = 0.2;

#[derive(Clone, Copy)]
struct Sample {
    at: Instant,
    own: f64,
    own_shed: f64,
    total: f64,
    /// Shed by all nodes since this began to count.
    all_shed: f64,
}

pub(super) struct Effect {
    dice: Dice,
    samples: VecDeque<Sample>,
    /// The first close after a pause, and the last.
    began_at: Option<Instant>,
    closed_at: Option<Instant>,
    all_shed: f64,
    until: Option<Instant>,
    /// What the last break is for.
    cause: Cause,
    times: u32,
}

#[derive(Clone, Copy)]
enum Cause {
    /// They did not come back at all.
    StayAway,
    /// They came back here.
    ComeBack,
}

impl Effect {
    pub fn new(dice: Dice) -> Self {
        let cause = Cause::StayAway;
        let samples = VecDeque::new();
        Self { dice, samples, began_at: None, closed_at: None, all_shed: 0.0, until: None, cause, times: 1 }
    }

    pub fn is_idle_until(&self, now: Instant) -> bool {
        self.until.is_some_and(|until| now < until)
    }

    /// Why there is a break, while there is one.
    pub fn rest(&self, now: Instant) -> Option<Rest> {
        self.is_idle_until(now).then_some(match self.cause {
            Cause::StayAway => Rest::StayAway,
            Cause::ComeBack => Rest::ComeBack,
        })
    }

    /// To be logged once, at its beginning.
    pub fn warning(&self, now: Instant) -> Option<Warning> {
        self.is_idle_until(now).then_some(match self.cause {
            Cause::StayAway => Warning::StayAway,
            Cause::ComeBack => Warning::ComeBack,
        })
    }

    /// Takes down this second and judges the last minute. `has_changed`: nodes came or went,
    /// so what was seen until now says nothing.
    pub fn observe(&mut self, now: Instant, dt: Duration, plan: &Plan, own: &Own, has_changed: bool) {
        self.all_shed += plan.shed_rate * dt.as_secs_f64();
        let (own_n, own_shed) = (own.n_sessions as f64, own.n_shed as f64);
        if self.samples.back().is_some_and(|last| own_shed > last.own_shed) {
            self.closed_at = Some(now);
        }
        if has_changed || self.is_paused(now) || self.is_idle_until(now) {
            self.forget();
        }
        self.samples.push_back(Sample { at: now, own: own_n, own_shed, total: plan.total, all_shed: self.all_shed });
        while self.samples.get(1).is_some_and(|next| now.saturating_duration_since(next.at) >= WINDOW + RETURN) {
            self.samples.pop_front();
        }
        let first = self.at(now, WINDOW);
        let closed = own_shed - first.own_shed;
        if closed <= 0.0 {
            return;
        }
        let began_at = *self.began_at.get_or_insert(now);
        let is_long = now.saturating_duration_since(began_at) >= WINDOW;
        if !is_long || closed < FEWEST.max(FEWEST_PART * own_n) {
            return;
        }
        let all_closed = self.all_shed - first.all_shed;
        let missing = first.total - plan.total;
        if missing > OUTSIDE * all_closed {
            self.forget();
            return;
        }
        // Some of those who left are only on their way back here; as they were at its beginning.
        let on_their_way = ON_THEIR_WAY * (own_shed - self.at(now, RETURN).own_shed);
        let were_on_their_way = ON_THEIR_WAY * (first.own_shed - self.at(now, WINDOW + RETURN).own_shed);
        let fell = (first.own + were_on_their_way) - (own_n + on_their_way);
        let stay_away = all_closed - missing < RETURNED * all_closed;
        if stay_away || fell < HELPED * closed {
            self.cause = if stay_away { Cause::StayAway } else { Cause::ComeBack };
            let spread = 1.0 + BREAK_SPREAD * self.dice.unit();
            self.until = Some(now + (BREAK * self.times).mul_f64(spread));
            self.times = (self.times * 2).min(LONGEST);
        } else {
            self.times = 1;
        }
    }

    fn is_paused(&self, now: Instant) -> bool {
        self.closed_at.is_none_or(|at| now.saturating_duration_since(at) > PAUSE)
    }

    fn forget(&mut self) {
        self.samples.clear();
        self.began_at = None;
    }

    /// As it was so long ago, or as early as is known.
    fn at(&self, now: Instant, ago: Duration) -> Sample {
        let found = self.samples.iter().rev().find(|sample| now.saturating_duration_since(sample.at) >= ago);
        *found.unwrap_or(&self.samples[0])
    }
}
