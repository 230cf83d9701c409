//! Where the balancer in front puts clients, as far as it shows from behind it. Balancers are not
//! always what their settings say: "least connections" of which each worker counts for itself is in
//! turn, and a cookie makes any of them sticky. Moving sessions is of use only where clients end on
//! emptier nodes, so it is observed and said. Decides what the balancer seems to go by, and whether
//! recycling is worth its cost; nobody is moved or kept by it alone.
//!
//! Two things are watched. Of the sessions that this node moves while another one is emptier, some
//! are remembered: did the same client come back here (`moved`, `arrived`)? And of all sessions that
//! are opened while the fleet is uneven, how many land on the emptier nodes (`read`)? In an even
//! fleet nothing can be told apart, so nothing is said.

use std::collections::VecDeque;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard};
use std::time::Duration;

use serde::{Deserialize, Serialize};
use tokio::time::Instant;

use crate::balance::Seen;
use crate::handle::Phase;
use crate::session::SessionInfo;
use crate::telemetry::LbPolicy;

/// A client that has not come back here after so long is elsewhere, or gone: it waits 5 s at most,
/// and a full node sends it away for a minute at most.
const RETURNS: Duration = Duration::from_secs(60);

/// Moved sessions that are remembered, one in so long: whoever is asked about must have no other
/// session here, and looking for one costs a walk over all.
const ONE_IN: Duration = Duration::from_secs(1);

/// What became of so many at most, for so long at most, makes the figure: few enough that a balancer
/// that is mended shows while the fleet becomes even.
const REMEMBERED: usize = 50;
const FOR: Duration = Duration::from_secs(30 * 60);

/// Another node counts as emptier if this many sessions, and this part of ours, fewer are on it: by
/// as much reports may be behind.
const EMPTIER: (f64, f64) = (10.0, 0.02);

/// Of so many moved sessions at least, over the whole fleet, more than `STICKY` came back to where
/// they were; from then on it is so until fewer than `LOOSE` do. In turn over two nodes gives a half.
const ENOUGH_MOVED: usize = 20;
const STICKY: f64 = 0.8;
const LOOSE: f64 = 0.6;

/// A node below this part of the mean level is one of the emptier ones.
const LOW: f64 = 0.95;
/// Sessions opened in an uneven fleet count half after so long.
const HALVED: Duration = Duration::from_secs(300);
/// So many must have been opened, not more than this part of them expected on the emptier nodes anyway.
const ENOUGH_OPENED: f64 = 50.0;
const TOO_WIDE: f64 = 0.8;
/// By how much more than an even spread they went to the emptier nodes: 0 is not at all, 1 is all.
/// The better of two gives the emptier nodes' own part.
const EMPTIEST: f64 = 0.7;
const RATHER: f64 = 0.25;

/// Reports count openings over 5 s.
const COUNTED: f64 = 5.0;
/// No more than this is made up for after a break.
const LATE_AT_MOST: Duration = Duration::from_secs(10);
/// A node that is ready for less is not sent clients for sure.
const JOINED: Duration = Duration::from_secs(15);

/// Another verdict counts once so many readings in a row gave it.
const READINGS: u32 = 3;

/// What became of moved sessions.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub(crate) struct Trials {
    /// Sessions moved while another node was emptier.
    pub moved: usize,
    /// Of them came back to the node that had moved them.
    pub back: usize,
}

impl Trials {
    /// All nodes' together; what cannot be is left out.
    fn of(all: impl Iterator<Item = Self>) -> Self {
        let sane = all.filter(|one| one.back <= one.moved && one.moved <= REMEMBERED);
        sane.fold(Self::default(), |sum, one| Self { moved: sum.moved + one.moved, back: sum.back + one.back })
    }

    fn part(self) -> f64 {
        self.back as f64 / self.moved.max(1) as f64
    }
}

/// What is seen of the balancer in front.
#[derive(Debug)]
pub(crate) struct Placement {
    seed: u64,
    /// Length of `Inner::away`, so that opening a session takes no lock while nobody is awaited.
    n_away: AtomicUsize,
    inner: Mutex<Inner>,
}

#[derive(Debug, Default)]
struct Inner {
    /// Another node is emptier: least connections would not send anybody here.
    is_fuller: bool,
    looked_at: Option<Instant>,
    /// Moved sessions, the oldest first, and whether they came back.
    away: VecDeque<Away>,
    /// When it was known of each, and whether it came back.
    known: VecDeque<(Instant, bool)>,
    landed: Landed,
    policy: Option<LbPolicy>,
    /// Another verdict, and in how many readings.
    other: Option<(LbPolicy, u32)>,
    /// Of the whole fleet.
    all: Trials,
}

#[derive(Debug)]
struct Away {
    at: Instant,
    who: u64,
    is_back: bool,
}

/// Are these one client, as far as a node can tell? By user, or by address where there is none.
pub(crate) fn is_same(one: &SessionInfo, other: &SessionInfo) -> bool {
    match (&one.identity.user, &other.identity.user) {
        (Some(one), Some(other)) => one == other,
        (None, None) => one.address == other.address,
        _ => false,
    }
}

impl Placement {
    /// Knows nothing yet. `seed`: so that nobody can choose names that collide.
    pub fn new(seed: u64) -> Self {
        Self { seed, n_away: AtomicUsize::new(0), inner: Mutex::default() }
    }

    /// Who this is, to be told again when it returns.
    fn name(&self, session: &SessionInfo) -> u64 {
        let mut hasher = DefaultHasher::new();
        self.seed.hash(&mut hasher);
        match &session.identity.user {
            Some(user) => (0_u8, user).hash(&mut hasher),
            None => (1_u8, session.address).hash(&mut hasher),
        }
        hasher.finish()
    }

    /// This session was moved away from here. `is_the_last`: none that `is_same` is left here; asked
    /// once a second at most.
    pub fn moved(&self, now: Instant, session: &SessionInfo, is_the_last: impl FnOnce() -> bool) {
        {
            let mut inner = self.lock();
            let is_soon = inner.looked_at.is_some_and(|at| now.saturating_duration_since(at) < ONE_IN);
            if !inner.is_fuller || is_soon {
                return;
            }
            inner.looked_at = Some(now);
        }
        if !is_the_last() {
            return;
        }
        let who = self.name(session);
        let mut inner = self.lock();
        if !inner.away.iter().any(|away| away.who == who) {
            inner.away.push_back(Away { at: now, who, is_back: false });
            self.n_away.store(inner.away.len(), Ordering::Relaxed);
        }
    }

    /// This session opened here.
    pub fn arrived(&self, session: &SessionInfo) {
        if self.n_away.load(Ordering::Relaxed) == 0 {
            return;
        }
        let who = self.name(session);
        if let Some(away) = self.lock().away.iter_mut().find(|away| away.who == who) {
            away.is_back = true;
        }
    }

    /// What became of those moved from here, lately.
    pub fn trials(&self, now: Instant) -> Trials {
        let mut inner = self.lock();
        inner.learn(now);
        self.n_away.store(inner.away.len(), Ordering::Relaxed);
        Trials { moved: inner.known.len(), back: inner.known.iter().filter(|(_, is_back)| *is_back).count() }
    }

    /// A new reading of the fleet: all its young reports. `others`: what became of those whom the
    /// other nodes moved. Gives the policy where it is another one from now on.
    pub fn read(
        &self,
        now: Instant,
        own: &str,
        nodes: &[Seen],
        others: impl Iterator<Item = Trials>,
    ) -> Option<LbPolicy> {
        let mine = self.trials(now);
        let mut inner = self.lock();
        let serving: Vec<&Seen> = nodes.iter().filter(|node| has_joined(node)).collect();
        inner.is_fuller = is_fuller(own, &serving);
        inner.landed.read(now, &serving);
        if inner.policy == Some(LbPolicy::Sticky) {
            // Who comes back shows nothing of where others are put, also once this is over.
            inner.landed.clear();
        }
        inner.all = Trials::of(others.chain([mine]));
        let verdict = inner.verdict();
        inner.settle(verdict)
    }

    /// For people: the policy, and what became of moved sessions in the whole fleet.
    pub fn observed(&self) -> (LbPolicy, Trials) {
        let inner = self.lock();
        (inner.policy(), inner.all)
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().expect("no panic while the placement is held")
    }
}

impl Inner {
    fn policy(&self) -> LbPolicy {
        self.policy.unwrap_or(LbPolicy::Unknown)
    }

    /// Of those who were moved long enough ago, it is known now.
    fn learn(&mut self, now: Instant) {
        while self.away.front().is_some_and(|away| now.saturating_duration_since(away.at) >= RETURNS) {
            let away = self.away.pop_front().expect("it was looked at");
            self.known.push_back((now, away.is_back));
        }
        let is_old = |known: &(Instant, bool)| now.saturating_duration_since(known.0) > FOR;
        while self.known.len() > REMEMBERED || self.known.front().is_some_and(is_old) {
            self.known.pop_front();
        }
    }

    fn verdict(&self) -> LbPolicy {
        let was_sticky = self.policy == Some(LbPolicy::Sticky);
        let bound = if was_sticky { LOOSE } else { STICKY };
        if self.all.moved >= ENOUGH_MOVED && self.all.part() > bound {
            return LbPolicy::Sticky;
        }
        // Sticky is what was seen last, as long as anything is remembered of it.
        if was_sticky && self.all.moved > 0 && self.all.moved < ENOUGH_MOVED {
            return LbPolicy::Sticky;
        }
        match self.landed.lean() {
            Some(lean) if lean >= EMPTIEST => LbPolicy::Emptiest,
            Some(lean) if lean >= RATHER => LbPolicy::Emptier,
            Some(lean) if lean > -RATHER => LbPolicy::Spread,
            // What an even fleet does not show was so before, but for stickiness: that is over. And
            // who avoids the emptier nodes goes back to where it was, which `moved` will tell.
            _ if was_sticky => LbPolicy::Unknown,
            _ => self.policy(),
        }
    }

    fn settle(&mut self, verdict: LbPolicy) -> Option<LbPolicy> {
        if verdict == self.policy() {
            self.other = None;
            return None;
        }
        let n = self.other.filter(|(other, _)| *other == verdict).map_or(1, |(_, n)| n + 1);
        self.other = Some((verdict, n));
        if n < READINGS {
            return None;
        }
        (self.policy, self.other) = (Some(verdict), None);
        Some(verdict)
    }
}

/// Sessions opened while the fleet was uneven.
#[derive(Debug, Default)]
struct Landed {
    read_at: Option<Instant>,
    n: f64,
    /// On the emptier nodes.
    n_low: f64,
    /// As many an even spread would have put there.
    n_expected: f64,
}

impl Landed {
    fn read(&mut self, now: Instant, serving: &[&Seen]) {
        let dt = self.read_at.map_or(Duration::ZERO, |at| now.saturating_duration_since(at)).min(LATE_AT_MOST);
        self.read_at = Some(now);
        let kept = 0.5_f64.powf(dt.as_secs_f64() / HALVED.as_secs_f64());
        for sum in [&mut self.n, &mut self.n_low, &mut self.n_expected] {
            *sum *= kept;
        }
        let capacity: f64 = serving.iter().map(|node| node.capacity as f64).sum();
        let mean = serving.iter().map(|node| node.n_sessions as f64).sum::<f64>() / capacity.max(1.0);
        let is_low = |node: &Seen| {
            let fair = mean * node.capacity as f64;
            (node.n_sessions as f64) < (LOW * fair).min(fair - EMPTIER.0)
        };
        let n_low = serving.iter().filter(|node| is_low(node)).count();
        if n_low == 0 {
            return;
        }
        let opened = |keep: &dyn Fn(&Seen) -> bool| {
            let some = serving.iter().filter(|node| keep(node)).map(|node| node.n_opened as f64).sum::<f64>();
            some / COUNTED * dt.as_secs_f64()
        };
        let all = opened(&|_| true);
        self.n += all;
        self.n_low += opened(&is_low);
        self.n_expected += all * n_low as f64 / serving.len() as f64;
    }

    fn clear(&mut self) {
        *self = Self { read_at: self.read_at, ..Self::default() };
    }

    fn lean(&self) -> Option<f64> {
        let is_enough = self.n >= ENOUGH_OPENED && self.n_expected <= TOO_WIDE * self.n;
        is_enough.then(|| (self.n_low - self.n_expected) / (self.n - self.n_expected))
    }
}

/// It serves, and the balancer in front should know of it.
fn has_joined(node: &Seen) -> bool {
    node.phase == Some(Phase::Serving) && node.capacity > 0 && node.ready_for.is_some_and(|ready| ready >= JOINED)
}

fn is_fuller(own: &str, serving: &[&Seen]) -> bool {
    let Some(me) = serving.iter().find(|node| &*node.node == own) else { return false };
    let mine = me.n_sessions as f64;
    let least = EMPTIER.0.max(EMPTIER.1 * mine);
    let scaled = |node: &&Seen| node.n_sessions as f64 / node.capacity as f64 * me.capacity as f64;
    serving.iter().map(scaled).any(|other| other + least < mine)
}

#[cfg(test)]
mod tests;
