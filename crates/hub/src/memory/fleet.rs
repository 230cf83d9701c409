//! What the nodes of an in-memory log say of themselves, the hold on them, and the places of users'
//! sessions. Decides which report is too old and which session is one too many, by the same rules as the Redis
//! schema. Plain data: `memory` holds the lock, knows which nodes are there, and tells them.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;
use std::time::Duration;

use super::ms;
use crate::backplane::{Claim, Claimed, Hold, Report};

/// How long a user's places are kept after the last claim.
pub(super) const PLACES_TTL: Duration = Duration::from_secs(10 * 60);
/// How long it is remembered of a process that it reported at all.
const LIVES_TTL: Duration = Duration::from_secs(24 * 3600);
/// At most so many users' places that nobody renewed are dropped a call.
const SWEEP_STEP: usize = 16;

/// All that a fleet knows of itself.
#[derive(Default)]
pub(super) struct FleetState {
    reports: BTreeMap<Arc<str>, Written>,
    /// Until when the last report of each life was to be kept, by that time alone.
    lives: HashMap<Arc<str>, u64>,
    hold: Option<Hold>,
    places: HashMap<Arc<str>, Places>,
    /// Every user with places by the ms at which they end.
    by_age: BTreeSet<(u64, Arc<str>)>,
}

struct Written {
    body: String,
    at_ms: u64,
    until_ms: u64,
}

/// One user's; never empty while it is in the map.
#[derive(Default)]
struct Places {
    of: HashMap<Holder, u64>,
    by_since: BTreeSet<(u64, Holder)>,
    until_ms: u64,
}

/// A session and the life of its node: a node that comes back is another one.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
struct Holder {
    session: Arc<str>,
    life: Arc<str>,
}

/// What a batch of claims came to.
#[derive(Default)]
pub(super) struct Settled {
    /// In the order of the claims.
    pub(super) claimed: Vec<Claimed>,
    /// User and session of everyone that lost a place to another, as it happened.
    pub(super) replaced: Vec<(Arc<str>, Arc<str>)>,
}

impl FleetState {
    /// Keeps the report of this life of `node` for `ttl`; gives all that are younger, and what stood under the
    /// name before.
    pub(super) fn report(
        &mut self,
        now_ms: u64,
        node: &Arc<str>,
        life: &Arc<str>,
        body: String,
        ttl: Duration,
    ) -> (Vec<Report>, Option<Report>) {
        let until_ms = now_ms.saturating_add(ms(ttl));
        let oldest_ms = now_ms.saturating_sub(ms(ttl));
        self.reports.retain(|_, written| written.at_ms >= oldest_ms && written.until_ms >= now_ms);
        self.lives.retain(|_, until_ms| until_ms.saturating_add(ms(LIVES_TTL)) >= now_ms);
        let report = |(node, written): (&Arc<str>, &Written)| Report {
            node: node.clone(),
            body: written.body.clone(),
            age: Duration::from_millis(now_ms.saturating_sub(written.at_ms)),
        };
        let before = self.reports.get_key_value(node).map(report);
        self.lives.insert(life.clone(), until_ms);
        self.reports.insert(node.clone(), Written { body, at_ms: now_ms, until_ms });
        (self.reports.iter().map(report).collect(), before)
    }

    /// Takes `node`'s report away, and this life of it.
    pub(super) fn retire(&mut self, node: &str, life: &str) {
        self.reports.remove(node);
        self.lives.remove(life);
    }

    /// Begins a hold, or takes away what there is.
    pub(super) fn hold(&mut self, hold: Option<Hold>) {
        self.hold = hold;
    }

    /// The hold in force now.
    pub(super) fn held_by(&self, now_ms: u64) -> Option<Hold> {
        self.hold.clone().filter(|hold| now_ms < hold.until_ms)
    }

    /// Gives places to sessions of one node, in this order. `is_there` knows the others' lives.
    pub(super) fn claim(
        &mut self,
        now: Duration,
        life: &Arc<str>,
        claims: &[Claim],
        max: u32,
        is_there: impl Fn(&str) -> bool,
    ) -> Settled {
        let max = usize::try_from(max.max(1)).unwrap_or(usize::MAX);
        let mut settled = Settled::default();
        for claim in claims {
            let holder = Holder { session: claim.session.clone(), life: life.clone() };
            let since = self.place(now, &claim.user, holder, claim.since);
            settled.claimed.push(Claimed { since, replaced: false });
            let (now_ms, lives) = (ms(now), &self.lives);
            // As of a host that vanished, whose link stands a while longer. Who never reported is not silent.
            let is_silent = |other: &str| lives.get(other).is_some_and(|until_ms| *until_ms <= now_ms);
            let is_left = |other: &str| other == &**life || (is_there(other) && !is_silent(other));
            let Some(places) = self.places.get_mut(&claim.user) else { continue };
            let replaced = places.make_room(max, is_left);
            settled.replaced.extend(replaced.into_iter().map(|session| (claim.user.clone(), session)));
        }
        // Whoever came later in the batch may have replaced one that came earlier.
        for (claim, claimed) in claims.iter().zip(&mut settled.claimed) {
            let holder = Holder { session: claim.session.clone(), life: life.clone() };
            claimed.replaced = !self.places.get(&claim.user).is_some_and(|places| places.of.contains_key(&holder));
        }
        settled
    }

    /// Puts the holder at its place, whatever place it had.
    fn place(&mut self, now: Duration, user: &Arc<str>, holder: Holder, since: Option<u64>) -> u64 {
        let now_ms = ms(now);
        self.sweep(now_ms);
        self.forget_if_over(now_ms, user);
        let places = self.places.entry(user.clone()).or_default();
        let highest = places.by_since.last().map_or(0, |(since, _)| *since);
        let now_us = u64::try_from(now.as_micros()).unwrap_or(u64::MAX);
        let since = since.unwrap_or(now_us.max(highest.saturating_add(1)));
        places.take(&holder);
        places.by_since.insert((since, holder.clone()));
        places.of.insert(holder, since);
        self.by_age.remove(&(places.until_ms, user.clone()));
        places.until_ms = now_ms.saturating_add(ms(PLACES_TTL));
        self.by_age.insert((places.until_ms, user.clone()));
        since
    }

    /// Gives up the place of a session of this node, if it has one.
    pub(super) fn release(&mut self, life: &Arc<str>, user: &Arc<str>, session: &Arc<str>) {
        let Some(places) = self.places.get_mut(user) else { return };
        places.take(&Holder { session: session.clone(), life: life.clone() });
        if places.of.is_empty() {
            self.by_age.remove(&(places.until_ms, user.clone()));
            self.places.remove(user);
        }
    }

    /// Drops a few users' places that nobody renewed.
    pub(super) fn sweep(&mut self, now_ms: u64) {
        for _ in 0..SWEEP_STEP {
            let Some((_, user)) = self.by_age.first().filter(|(until_ms, _)| *until_ms <= now_ms) else { return };
            let user = user.clone();
            self.forget_if_over(now_ms, &user);
        }
    }

    fn forget_if_over(&mut self, now_ms: u64, user: &Arc<str>) {
        if let Some(until_ms) = self.places.get(user).map(|places| places.until_ms).filter(|until| *until <= now_ms) {
            self.by_age.remove(&(until_ms, user.clone()));
            self.places.remove(user);
        }
    }

    /// Reports and users with places held.
    #[cfg(test)]
    pub(super) fn held(&self) -> (usize, usize) {
        assert_eq!(self.places.len(), self.by_age.len());
        assert!(self.places.values().all(|p| p.of.len() == p.by_since.len() && !p.of.is_empty()));
        (self.reports.len(), self.places.len())
    }
}

impl Places {
    /// Leaves at most `max`: who is gone goes first, then the lowest, which are given.
    fn make_room(&mut self, max: usize, is_there: impl Fn(&str) -> bool) -> Vec<Arc<str>> {
        if self.of.len() <= max {
            return Vec::new();
        }
        let gone: Vec<Holder> = self.of.keys().filter(|holder| !is_there(&holder.life)).cloned().collect();
        for holder in &gone {
            self.take(holder);
        }
        let mut replaced = Vec::new();
        while self.of.len() > max {
            let Some((_, lowest)) = self.by_since.pop_first() else { break };
            self.of.remove(&lowest);
            replaced.push(lowest.session);
        }
        replaced
    }

    fn take(&mut self, holder: &Holder) {
        if let Some(since) = self.of.remove(holder) {
            self.by_since.remove(&(since, holder.clone()));
        }
    }
}
