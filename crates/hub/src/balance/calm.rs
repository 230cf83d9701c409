//! Whether the fleet stands still enough, and is seen clearly enough, for anybody to be moved. Says
//! every reason why not. It remembers what it saw, for most reasons outlast their cause: churn on
//! top of churn is what it exists to prevent.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use super::plan::{COUNTED, is_fresh, is_live, is_sane, on_their_way};
use super::{BalanceConfig, Own, Seen, ShedSuspension, View, Warning};
use crate::clock::Dice;
use crate::handle::Phase;

/// After a node left, the backplane lost its memory, or two versions were seen: longer than an
/// orchestrator takes from one node of a rolling deploy to the next.
const SETTLE: Duration = Duration::from_secs(60);

/// The total is watched over this time; it also has to be known for so long.
const WATCHED: Duration = Duration::from_secs(30);
/// A total that moves by more than this part (and by more than a few sessions) in that time is not
/// our doing.
const TOTAL_MOVED: f64 = 0.05;
const TOTAL_FLOOR: f64 = 50.0;
/// Of those closed meanwhile, so many may be away still: clients that wait 5 to 30 s.
const MAY_BE_AWAY: f64 = 0.5;

/// More than this part of all attempts refused: moved clients would not come in.
const REFUSED: f64 = 0.01;
/// Two reports.
const REFUSED_LATELY: Duration = Duration::from_secs(10);

/// Fewer nodes than half of what were known in this time: the reports are gone, not the nodes.
const KNOWN_FOR: Duration = Duration::from_secs(600);
/// More than a quarter of the reports stale.
const STALE: usize = 4;

/// Several versions for longer than this are no deploy but a stuck one.
const DEPLOY_AT_MOST: Duration = Duration::from_secs(24 * 3600);

/// After the backplane failed: so many readings, then a drawn while more, so that not all nodes go
/// on together.
const CLEAN_READINGS: u32 = 2;
const RESUME: (Duration, Duration) = (Duration::from_secs(30), Duration::from_secs(60));

/// What was found.
pub(super) struct Judged {
    /// In the order of `ShedSuspension::ALL`.
    pub reasons: Vec<ShedSuspension>,
    /// A node came or went: what was measured across that says nothing.
    pub has_changed: bool,
    pub warning: Option<Warning>,
}

pub(super) struct Calm {
    dice: Dice,
    /// Name and boot of every node seen, and whether it served.
    members: BTreeMap<(Arc<str>, Arc<str>), bool>,
    left_at: Option<Instant>,
    birth_ms: Option<u64>,
    totals: VecDeque<Total>,
    known: VecDeque<(Instant, usize)>,
    began_at: Option<Instant>,
    mixed_since: Option<Instant>,
    mixed_at: Option<Instant>,
    refusing_at: Option<Instant>,
    outage: Outage,
}

struct Total {
    at: Instant,
    n: f64,
    /// Closed by all since the tick before.
    closed: f64,
}

enum Outage {
    None,
    /// Failing, or readings since then.
    Open {
        n_clean: u32,
        seen: Option<Instant>,
    },
    Waits {
        until: Instant,
    },
}

impl Calm {
    pub fn new(dice: Dice) -> Self {
        Self {
            dice,
            members: BTreeMap::new(),
            left_at: None,
            birth_ms: None,
            totals: VecDeque::new(),
            known: VecDeque::new(),
            began_at: None,
            mixed_since: None,
            mixed_at: None,
            refusing_at: None,
            outage: Outage::None,
        }
    }

    pub fn judge(
        &mut self,
        now: Instant,
        dt: Duration,
        view: &View,
        node: &str,
        own: &Own,
        config: &BalanceConfig,
    ) -> Judged {
        self.began_at.get_or_insert(now);
        let fresh: Vec<&Seen> = view.nodes.iter().filter(|seen| is_fresh(seen, config)).collect();
        let has_changed = self.membership(now, &fresh, config);
        self.memory(now, view);
        self.versions(now, &fresh);
        let is_draining = fresh.iter().any(|seen| matches!(seen.phase, Some(Phase::Draining | Phase::Stopped)));
        let is_stale = self.is_stale(now, view, node, config);
        let holds = |reason: ShedSuspension, this: &mut Self| match reason {
            ShedSuspension::Hold => view.is_held,
            ShedSuspension::Draining => is_draining,
            ShedSuspension::Deploy => this.is_deploy(now),
            ShedSuspension::Unsettled => this.is_unsettled(now, dt, &fresh, node, own),
            ShedSuspension::Refusing => this.is_refusing(now, &fresh, config),
            ShedSuspension::Stale => is_stale,
            ShedSuspension::Backplane => this.is_out(now, view),
            // `effect` knows.
            ShedSuspension::Ineffective => false,
        };
        let reasons = ShedSuspension::ALL.iter().copied().filter(|reason| holds(*reason, self)).collect();
        let is_stuck = self.mixed_since.is_some_and(|since| now.saturating_duration_since(since) > DEPLOY_AT_MOST);
        Judged { reasons, has_changed, warning: is_stuck.then_some(Warning::MixedVersions) }
    }

    fn membership(&mut self, now: Instant, fresh: &[&Seen], config: &BalanceConfig) -> bool {
        let members: BTreeMap<_, _> =
            fresh.iter().map(|seen| ((seen.node.clone(), seen.boot.clone()), is_live(seen, config))).collect();
        let has_left = |(who, served): (&(Arc<str>, Arc<str>), &bool)| match members.get(who) {
            None => true,
            Some(serves) => *served && !serves,
        };
        if self.members.iter().any(has_left) {
            self.left_at = Some(now);
        }
        let has_changed = self.members != members;
        self.members = members;
        has_changed
    }

    /// A log that is new has forgotten every report. Most nodes miss somebody's in their next reading,
    /// but whoever reports last finds all of them again; so all go by the log itself.
    fn memory(&mut self, now: Instant, view: &View) {
        if view.birth_ms != self.birth_ms && self.birth_ms.is_some() {
            self.left_at = Some(now);
        }
        self.birth_ms = view.birth_ms.or(self.birth_ms);
    }

    fn versions(&mut self, now: Instant, fresh: &[&Seen]) {
        let mut versions = fresh.iter().map(|seen| &seen.version);
        let first = versions.next();
        if versions.any(|version| Some(version) != first) {
            self.mixed_at = Some(now);
            self.mixed_since.get_or_insert(now);
        } else if !lately(self.mixed_at, now, SETTLE) {
            self.mixed_since = None;
        }
    }

    fn is_deploy(&self, now: Instant) -> bool {
        let is_stuck = self.mixed_since.is_some_and(|since| now.saturating_duration_since(since) > DEPLOY_AT_MOST);
        lately(self.mixed_at, now, SETTLE) && !is_stuck
    }

    fn is_unsettled(&mut self, now: Instant, dt: Duration, fresh: &[&Seen], node: &str, own: &Own) -> bool {
        // Its own sessions it knows; it would be a report late otherwise.
        let n_of = |seen: &&Seen| if &*seen.node == node { own.n_sessions } else { seen.n_sessions } as f64;
        let n = fresh.iter().map(n_of).sum::<f64>() + on_their_way(fresh);
        let closed = fresh.iter().map(|seen| seen.moved.all() as f64).sum::<f64>() / COUNTED * dt.as_secs_f64();
        self.totals.push_back(Total { at: now, n, closed });
        while self.totals.front().is_some_and(|total| now.saturating_duration_since(total.at) > WATCHED) {
            self.totals.pop_front();
        }
        let most = self.totals.iter().map(|total| total.n).fold(0.0, f64::max);
        let least = self.totals.iter().map(|total| total.n).fold(f64::INFINITY, f64::min);
        let closed: f64 = self.totals.iter().map(|total| total.closed).sum();
        let has_moved = most - least > TOTAL_FLOOR.max(TOTAL_MOVED * most) + MAY_BE_AWAY * closed;
        let is_young = self.began_at.is_some_and(|at| now.saturating_duration_since(at) < WATCHED);
        has_moved || is_young || lately(self.left_at, now, SETTLE)
    }

    fn is_refusing(&mut self, now: Instant, fresh: &[&Seen], config: &BalanceConfig) -> bool {
        let live = || fresh.iter().filter(|seen| is_live(seen, config));
        let refused: usize = live().map(|seen| seen.n_refused).sum();
        let opened: usize = live().map(|seen| seen.n_opened).sum();
        if refused as f64 > REFUSED * (refused + opened) as f64 {
            self.refusing_at = Some(now);
        }
        lately(self.refusing_at, now, REFUSED_LATELY)
    }

    fn is_stale(&mut self, now: Instant, view: &View, node: &str, config: &BalanceConfig) -> bool {
        let n_known = view.nodes.iter().filter(|seen| is_sane(seen)).count();
        while self.known.front().is_some_and(|(at, _)| now.saturating_duration_since(*at) > KNOWN_FOR) {
            self.known.pop_front();
        }
        self.known.push_back((now, n_known));
        let n_most = self.known.iter().map(|(_, n)| *n).max().unwrap_or(0);
        let n_bad = view.nodes.iter().filter(|seen| !is_fresh(seen, config)).count() + view.n_unreadable;
        let n_all = view.nodes.len() + view.n_unreadable;
        let is_own_fresh = view.nodes.iter().any(|seen| &*seen.node == node && is_fresh(seen, config));
        !is_own_fresh || n_bad * STALE > n_all || n_known * 2 < n_most
    }

    fn is_out(&mut self, now: Instant, view: &View) -> bool {
        if view.failing_since.is_some() {
            self.outage = Outage::Open { n_clean: 0, seen: view.read_at };
            return true;
        }
        if let Outage::Open { n_clean, seen } = &mut self.outage
            && view.read_at != *seen
        {
            *seen = view.read_at;
            *n_clean += 1;
            if *n_clean >= CLEAN_READINGS {
                self.outage = Outage::Waits { until: now + self.dice.between(RESUME.0, RESUME.1) };
            }
        }
        if matches!(self.outage, Outage::Waits { until } if now >= until) {
            self.outage = Outage::None;
        }
        !matches!(self.outage, Outage::None)
    }
}

fn lately(at: Option<Instant>, now: Instant, span: Duration) -> bool {
    at.is_some_and(|at| now.saturating_duration_since(at) < span)
}
