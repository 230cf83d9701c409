//! A fleet in one-second steps: nodes that each run the real `Balancer`, a balancer in front,
//! clients that return, and reports that are seconds old. Sessions are counts, so that fifty
//! thousand of them cost nothing. All chance is seeded.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use super::super::*;

pub const CONFIG: BalanceConfig = BalanceConfig {
    tolerance: 0.05,
    fraction: 0.025,
    interval: Duration::from_secs(5),
    report_every: Duration::from_secs(5),
};

const TTL: Duration = Duration::from_secs(20);
const BURST: f64 = 200.0;

pub const fn s(n: u64) -> Duration {
    Duration::from_secs(n)
}

/// How the balancer in front chooses.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Front {
    /// Exactly the emptiest for its capacity.
    LeastConnections,
    TwoChoices,
    InTurn,
    /// Always the node the client was on.
    Affinity,
}

/// What one node did in one second.
#[derive(Clone, Copy, Default)]
struct Second {
    moved: Moved,
    n_opened: usize,
    n_refused: usize,
}

pub struct Node {
    pub name: Arc<str>,
    boot: Arc<str>,
    pub version: Arc<str>,
    pub capacity: usize,
    pub phase: Phase,
    pub n: usize,
    /// The balancer in front sends it clients.
    pub is_routed: bool,
    /// The process is there.
    pub is_up: bool,
    ready_at: Instant,
    pub accept_rate: f64,
    /// What it really takes in a second, whatever it says.
    pub takes: f64,
    tokens: f64,
    /// Closed a second once it drains.
    drain_rate: usize,
    balancer: Balancer,
    next_report: Instant,
    read: Vec<(Seen, Instant)>,
    read_at: Option<Instant>,
    failing_since: Option<Instant>,
    seconds: VecDeque<Second>,
    n_shed: u64,
    pub orders: Option<Orders>,
    /// It held less than 99 % of its target then.
    below_at: Option<Instant>,
}

pub struct Sim {
    pub now: Instant,
    pub t: usize,
    pub dice: Dice,
    pub nodes: Vec<Node>,
    pub front: Front,
    /// Clients return within so many seconds, evenly.
    pub returns_within: usize,
    /// The part of the clients that return at all.
    pub returning: f64,
    /// Mean age at which sessions are recycled, seconds; `None`: never.
    pub mean_age: Option<f64>,
    pub backplane_is_up: bool,
    pub is_held: bool,
    /// While sessions are being moved all report and read every second, not only every five.
    pub reads_often: bool,
    /// `GATEWAY_SHED=dry-run`.
    pub is_dry: bool,
    /// The backplane's reports.
    pub store: BTreeMap<Arc<str>, (Seen, Instant)>,
    back: BTreeMap<usize, Vec<usize>>,
    turn: usize,
    /// By second: clients placed, sessions shed, attempts refused.
    pub arrivals: Vec<usize>,
    pub sheds: Vec<usize>,
    pub n_refused: usize,
    /// By second: the furthest from its share, and how uneven all are.
    pub worst: Vec<f64>,
    pub cv: Vec<f64>,
    /// Sessions shed by nodes that were below their targets within two minutes.
    pub n_ping_pong: usize,
}

impl Sim {
    pub fn new(seed: u64, front: Front) -> Self {
        Self {
            now: Instant::now() + s(100_000),
            t: 0,
            dice: Dice::seeded(seed),
            nodes: Vec::new(),
            front,
            returns_within: 5,
            returning: 1.0,
            mean_age: None,
            backplane_is_up: true,
            is_held: false,
            reads_often: true,
            is_dry: false,
            store: BTreeMap::new(),
            back: BTreeMap::new(),
            turn: 0,
            arrivals: vec![0],
            sheds: vec![0],
            n_refused: 0,
            worst: vec![0.0],
            cv: vec![0.0],
            n_ping_pong: 0,
        }
    }

    /// A fleet that has been standing for two minutes, `n` sessions on each of these.
    pub fn standing(seed: u64, front: Front, n: &[usize]) -> Self {
        let mut sim = Self::new(seed, front);
        for n in n {
            let node = sim.add();
            sim.nodes[node].n = *n;
        }
        sim.run(120);
        sim
    }

    /// One more node, empty, serving and routed to at once.
    pub fn add(&mut self) -> usize {
        // All targets change: what is too much now was not before.
        self.nodes.iter_mut().for_each(|node| node.below_at = None);
        let id = self.nodes.len();
        let name: Arc<str> = format!("n{id}").into();
        let boot: Arc<str> = format!("{:x}", self.dice.bits()).into();
        self.nodes.push(Node {
            balancer: Balancer::new(CONFIG, name.clone(), Dice::seeded(self.dice.bits())),
            name,
            boot,
            version: "1".into(),
            capacity: 40_000,
            phase: Phase::Serving,
            n: 0,
            is_routed: true,
            is_up: true,
            ready_at: self.now,
            accept_rate: 100.0,
            takes: 100.0,
            tokens: BURST,
            drain_rate: 0,
            next_report: self.now + self.dice.between(s(0), s(1)),
            read: Vec::new(),
            read_at: None,
            failing_since: None,
            seconds: VecDeque::from([Second::default()]),
            n_shed: 0,
            orders: None,
            below_at: None,
        });
        id
    }

    pub fn run(&mut self, seconds: usize) {
        for _ in 0..seconds {
            self.step();
        }
    }

    pub fn run_until(&mut self, limit: usize, what: impl Fn(&Sim) -> bool) -> usize {
        let from = self.t;
        while !what(self) {
            assert!(self.t < from + limit, "not within {limit} s");
            self.step();
        }
        self.t - from
    }

    /// Closes `rate` a second and is gone, its report with it, when it is empty.
    pub fn drain(&mut self, node: usize, rate: usize) {
        let node = &mut self.nodes[node];
        (node.phase, node.is_routed, node.drain_rate) = (Phase::Draining, false, rate);
        node.next_report = self.now;
    }

    /// Gone without a word; its clients come back.
    pub fn kill(&mut self, node: usize) {
        let n = std::mem::take(&mut self.nodes[node].n);
        (self.nodes[node].is_up, self.nodes[node].is_routed) = (false, false);
        self.send_back(node, n);
    }

    /// Cuts this part of all sessions; they return over `within` seconds.
    pub fn cut(&mut self, part: f64, within: usize) {
        let usual = std::mem::replace(&mut self.returns_within, within);
        for node in 0..self.nodes.len() {
            let n = (self.nodes[node].n as f64 * part) as usize;
            self.nodes[node].n -= n;
            self.send_back(node, n);
        }
        self.returns_within = usual;
    }

    pub fn n_shed(&self) -> usize {
        self.sheds.iter().sum()
    }

    pub fn shed_since(&self, t: usize) -> usize {
        self.sheds[t + 1..].iter().sum()
    }

    pub fn counts(&self) -> Vec<usize> {
        self.nodes.iter().map(|node| node.n).collect()
    }

    pub fn reasons(&self, node: usize) -> Vec<ShedSuspension> {
        self.nodes[node].orders.as_ref().map_or(Vec::new(), |orders| orders.state.reasons().to_vec())
    }

    /// Seconds after `from` from which on `of` stays below `limit` until the end.
    pub fn settled(&self, of: &[f64], limit: f64, from: usize) -> usize {
        let last = (from..of.len()).rev().find(|t| of[*t] > limit).unwrap_or(from);
        assert!(last + 1 < of.len(), "never below {limit}: {}, {:?}", of[of.len() - 1], self.counts());
        last + 1 - from
    }

    /// The highest mean of `of` over `width` seconds.
    pub fn peak(of: &[usize], width: usize) -> f64 {
        of.windows(width).map(|w| w.iter().sum::<usize>()).max().unwrap_or(0) as f64 / width as f64
    }

    fn step(&mut self) {
        self.t += 1;
        self.now += s(1);
        self.sheds.push(0);
        self.arrivals.push(0);
        for node in &mut self.nodes {
            node.seconds.push_back(Second::default());
            while node.seconds.len() > 5 {
                node.seconds.pop_front();
            }
            node.tokens = (node.tokens + node.takes).min(BURST);
        }
        self.note_below();
        for i in 0..self.nodes.len() {
            self.recycle(i);
            self.drain_some(i);
            self.tick(i);
        }
        self.place_all();
        for i in 0..self.nodes.len() {
            self.report(i);
        }
        let (worst, cv) = self.unevenness();
        self.worst.push(worst);
        self.cv.push(cv);
    }

    fn tick(&mut self, i: usize) {
        let (now, is_held) = (self.now, self.is_held);
        let node = &mut self.nodes[i];
        if !node.is_up || node.phase != Phase::Serving {
            node.orders = None;
            return;
        }
        let view = node.view(now, is_held);
        let own = Own { n_sessions: node.n, n_shed: node.n_shed };
        let orders = node.balancer.tick(now, &view, &own);
        let n = orders.n_to_shed;
        node.orders = Some(orders);
        self.sheds[self.t] += n;
        if self.is_dry {
            return;
        }
        node.n = node.n.checked_sub(n).expect("no more than there are");
        node.n_shed += n as u64;
        node.second().moved.shed += n;
        if node.below_at.is_some_and(|at| now - at < s(120)) {
            self.n_ping_pong += n;
        }
        self.send_back(i, n);
    }

    fn recycle(&mut self, i: usize) {
        let Some(mean) = self.mean_age.filter(|_| self.nodes[i].phase == Phase::Serving) else { return };
        let n = (self.nodes[i].n as f64 / mean + self.dice.unit()) as usize;
        let n = n.min(self.nodes[i].n);
        self.nodes[i].n -= n;
        self.nodes[i].second().moved.recycled += n;
        self.send_back(i, n);
    }

    fn drain_some(&mut self, i: usize) {
        let node = &mut self.nodes[i];
        if node.phase != Phase::Draining || !node.is_up {
            return;
        }
        if node.n == 0 {
            (node.phase, node.is_up) = (Phase::Stopped, false);
            self.store.remove(&node.name);
            return;
        }
        let n = node.drain_rate.min(node.n);
        node.n -= n;
        node.second().moved.drained += n;
        self.send_back(i, n);
    }

    fn send_back(&mut self, from: usize, n: usize) {
        for _ in 0..n {
            if self.dice.unit() < self.returning {
                let after = 1 + (self.dice.unit() * self.returns_within as f64) as usize;
                self.back.entry(self.t + after).or_default().push(from);
            }
        }
    }

    fn place_all(&mut self) {
        let mut coming = self.back.remove(&self.t).unwrap_or_default();
        for i in (1..coming.len()).rev() {
            coming.swap(i, (self.dice.unit() * (i + 1) as f64) as usize);
        }
        for from in coming {
            let to = self.choose(from);
            let node = &mut self.nodes[to];
            if node.tokens < 1.0 {
                node.second().n_refused += 1;
                self.n_refused += 1;
                let after = 1 + (self.dice.unit() * 3.0) as usize;
                self.back.entry(self.t + after).or_default().push(from);
                continue;
            }
            node.tokens -= 1.0;
            node.n += 1;
            node.second().n_opened += 1;
            self.arrivals[self.t] += 1;
        }
    }

    fn choose(&mut self, from: usize) -> usize {
        let open: Vec<usize> = (0..self.nodes.len()).filter(|i| self.nodes[*i].is_routed).collect();
        let level = |i: usize| self.nodes[i].n as f64 / self.nodes[i].capacity as f64;
        let any = |dice: &Dice| open[(dice.unit() * open.len() as f64) as usize];
        match self.front {
            Front::LeastConnections => {
                open.iter().copied().min_by(|a, b| level(*a).total_cmp(&level(*b))).expect("somebody is up")
            }
            Front::TwoChoices => {
                let (a, b) = (any(&self.dice), any(&self.dice));
                if level(a) <= level(b) { a } else { b }
            }
            Front::InTurn => {
                self.turn += 1;
                open[self.turn % open.len()]
            }
            Front::Affinity if self.nodes[from].is_routed => from,
            Front::Affinity => any(&self.dice),
        }
    }

    fn report(&mut self, i: usize) {
        let (now, is_up, reads_often) = (self.now, self.backplane_is_up, self.reads_often);
        let node = &mut self.nodes[i];
        let is_shedding = node.orders.as_ref().is_some_and(|orders| orders.state == State::Shedding);
        // Whoever sheds notices an outage at once.
        let is_eventful = node.orders.as_ref().is_some_and(|orders| orders.is_eventful);
        let reads_anyway = (is_shedding && !is_up) || (is_eventful && reads_often);
        if !node.is_up || (now < node.next_report && !reads_anyway) {
            return;
        }
        node.next_report = now + self.dice.between(s(4), s(6));
        if !is_up {
            node.failing_since.get_or_insert(now);
            return;
        }
        node.failing_since = None;
        node.read_at = Some(now);
        self.store.insert(node.name.clone(), (node.seen(now), now));
        node.read = self.store.values().filter(|(_, at)| now - *at < TTL).cloned().collect();
    }

    fn note_below(&mut self) {
        let serving = || self.nodes.iter().filter(|node| node.is_up && node.phase == Phase::Serving);
        let total: usize = serving().map(|node| node.n).sum();
        let capacity: usize = serving().map(|node| node.capacity).sum();
        let now = self.now;
        for node in &mut self.nodes {
            if (node.n as f64) < 0.99 * total as f64 * node.capacity as f64 / capacity as f64 {
                node.below_at = Some(now);
            }
        }
    }

    fn unevenness(&self) -> (f64, f64) {
        let serving = || self.nodes.iter().filter(|node| node.is_up && node.phase == Phase::Serving);
        let levels: Vec<f64> = serving().map(|node| node.n as f64 / node.capacity as f64).collect();
        let total = serving().map(|node| node.n as f64).sum::<f64>();
        let mean_level = total / serving().map(|node| node.capacity as f64).sum::<f64>();
        if total == 0.0 {
            return (0.0, 0.0);
        }
        let worst = levels.iter().map(|level| (level / mean_level - 1.0).abs()).fold(0.0, f64::max);
        let mean = levels.iter().sum::<f64>() / levels.len() as f64;
        let variance = levels.iter().map(|level| (level - mean).powi(2)).sum::<f64>() / levels.len() as f64;
        (worst, variance.sqrt() / mean)
    }
}

impl Node {
    fn second(&mut self) -> &mut Second {
        self.seconds.back_mut().expect("one is pushed at each step")
    }

    fn seen(&self, now: Instant) -> Seen {
        let sum = |of: fn(&Second) -> usize| self.seconds.iter().map(of).sum::<usize>();
        let moved = Moved {
            shed: sum(|second| second.moved.shed),
            recycled: sum(|second| second.moved.recycled),
            drained: sum(|second| second.moved.drained),
        };
        Seen {
            node: self.name.clone(),
            boot: self.boot.clone(),
            version: self.version.clone(),
            phase: Some(self.phase),
            age: Duration::ZERO,
            n_sessions: self.n,
            capacity: self.capacity,
            accept_rate: self.accept_rate,
            ready_for: (self.phase == Phase::Serving).then(|| now - self.ready_at),
            is_lagging: false,
            moved,
            n_opened: sum(|second| second.n_opened),
            n_refused: sum(|second| second.n_refused),
        }
    }

    fn view(&self, now: Instant, is_held: bool) -> View {
        let aged = |(seen, at): &(Seen, Instant)| Seen {
            age: now - *at,
            ready_for: seen.ready_for.map(|ready| ready + (now - *at)),
            ..seen.clone()
        };
        View {
            nodes: self.read.iter().map(aged).filter(|seen| seen.age < TTL).collect(),
            n_unreadable: 0,
            birth_ms: Some(1),
            read_at: self.read_at,
            failing_since: self.failing_since,
            is_held,
        }
    }
}
