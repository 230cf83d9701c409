//! The moving of sessions on real hubs, under a balancer of this file: how it goes, what stops it
//! (`silent`: a backplane without a word), and what is noticed where it is of no use (`useless`).

mod silent;
mod useless;

use std::collections::BTreeMap;

use tokio::time::sleep;

use super::*;
use crate::backplane::Backplane;
use crate::hub::{HubConfig, Open};
use crate::testing::{Node, Testing};

const fn s(n: u64) -> Duration {
    Duration::from_secs(n)
}

const CONFIG: ShedConfig = ShedConfig {
    mode: ShedMode::On,
    balance: BalanceConfig { tolerance: 0.05, fraction: 0.025, interval: s(5), report_every: s(5) },
};

/// How the balancer in front chooses.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Front {
    Emptiest,
    InTurn,
    /// The node it was on.
    Same,
}

/// A client that was told to leave.
struct Away {
    back_at: Instant,
    user: String,
    /// The node it was on.
    was_on: usize,
}

/// Clients behind a balancer, who come back up to 5 s after a close.
struct World {
    testing: Testing,
    front: Front,
    config: ShedConfig,
    /// Clients come back within this time,
    within: Duration,
    /// this part of them.
    returning: f64,
    nodes: Vec<Node>,
    clients: Vec<(usize, Open)>,
    away: Vec<Away>,
    turn: usize,
    /// When, from which node, why.
    closes: Vec<(Instant, usize, CloseReason)>,
    /// How often each user was told to leave.
    n_moves: BTreeMap<String, usize>,
}

impl World {
    fn new() -> Self {
        Self {
            testing: Testing::new(0),
            front: Front::Emptiest,
            config: CONFIG,
            within: s(5),
            returning: 1.0,
            nodes: Vec::new(),
            clients: Vec::new(),
            away: Vec::new(),
            turn: 0,
            closes: Vec::new(),
            n_moves: BTreeMap::new(),
        }
    }

    /// A node with so many sessions.
    async fn add(&mut self, n: usize, mode: ShedMode) {
        self.add_like(n, mode, |_| {}).await;
    }

    async fn add_like(&mut self, n: usize, mode: ShedMode, change: impl FnOnce(&mut HubConfig)) {
        let name = char::from(b'a' + self.nodes.len() as u8).to_string();
        let report_every = self.config.balance.report_every;
        let change = |config: &mut HubConfig| {
            config.fleet.report_every = report_every;
            change(config);
        };
        let node = self.testing.node_like(&name, change).await;
        node.hub.balance(ShedConfig { mode, ..self.config });
        let of_node = self.nodes.len();
        self.clients.extend((0..n).map(|i| (of_node, node.open(&format!("{name}{i}")))));
        self.nodes.push(node);
    }

    /// Three with 300 each that have been there for a while, then an empty one.
    async fn three_and_a_new_one(mode: ShedMode) -> Self {
        Self::new().with_three_and_a_new_one(mode).await
    }

    async fn with_three_and_a_new_one(mut self, mode: ShedMode) -> Self {
        for _ in 0..3 {
            self.add(300, mode).await;
        }
        self.pass(s(150)).await;
        assert_eq!(self.closes, [], "an even fleet is left alone");
        self.add(0, mode).await;
        self
    }

    async fn pass(&mut self, time: Duration) {
        let until = Instant::now() + time;
        while Instant::now() < until {
            sleep(Duration::from_millis(50)).await;
            self.step();
        }
    }

    async fn until(&mut self, what: &str, is: impl Fn(&Self) -> bool) {
        let give_up = Instant::now() + s(600);
        while !is(self) {
            assert!(Instant::now() < give_up, "never: {what}: {:?}, {:?}", self.counts(), self.shed(0));
            self.pass(Duration::from_millis(50)).await;
        }
    }

    fn step(&mut self) {
        let now = Instant::now();
        let dice = &self.nodes[0].hub.dice;
        self.clients.retain(|(node, open)| {
            let Some(reason) = open.session().ending() else { return true };
            let user = open.session().info.identity.user.as_deref().expect("all have one").to_owned();
            self.closes.push((now, *node, reason));
            *self.n_moves.entry(user.clone()).or_default() += 1;
            if dice.unit() < self.returning {
                let back_at = now + dice.between(Duration::ZERO, self.within);
                self.away.push(Away { back_at, user, was_on: *node });
            }
            false
        });
        let due: Vec<Away> = self.away.extract_if(.., |away| away.back_at <= now).collect();
        for away in due {
            let node = self.choose(away.was_on);
            self.clients.push((node, self.nodes[node].open(&away.user)));
        }
    }

    fn choose(&mut self, was_on: usize) -> usize {
        let serves = |node: &usize| self.nodes[*node].hub.phase() == Phase::Serving;
        let open: Vec<usize> = (0..self.nodes.len()).filter(serves).collect();
        self.turn += 1;
        match self.front {
            Front::Same if open.contains(&was_on) => was_on,
            Front::Same | Front::InTurn => open[self.turn % open.len()],
            Front::Emptiest => {
                *open.iter().min_by_key(|node| self.nodes[**node].hub.load().n_sessions).expect("one serves")
            }
        }
    }

    fn counts(&self) -> Vec<usize> {
        self.nodes.iter().map(|node| node.hub.load().n_sessions).collect()
    }

    fn shed(&self, node: usize) -> ShedView {
        self.nodes[node].hub.fleet().shed
    }

    /// Closes after this instant.
    fn n_after(&self, at: Instant) -> usize {
        self.closes.iter().filter(|(closed, ..)| *closed > at).count()
    }

    async fn until_shedding(&mut self) {
        self.until("ten were moved", |world| world.closes.len() > 10).await;
    }
}

#[tokio::test(start_paused = true)]
async fn a_new_node_is_filled_in_the_time_that_the_budget_makes_and_no_further() {
    let mut world = World::three_and_a_new_one(ShedMode::On).await;
    let joined = Instant::now();
    let is_even = |world: &World| world.counts().iter().all(|n| (203..=247).contains(n));
    world.until("all within a tenth of 225", is_even).await;
    let took = joined.elapsed();
    // It joins, two readings see it, six to seven in five seconds from each of three, the way back.
    let formula = 15.0 + 10.0 + 0.9 * 225.0 / (3.0 * 6.0 / 5.0) + 2.5;
    assert!(took.as_secs_f64() <= 1.15 * formula, "{took:?}, by the formula {formula:.0} s");
    world.pass(s(180)).await;
    assert!(is_even(&world), "{:?}", world.counts());
    let n = world.closes.len();
    assert!(n as f64 <= 1.05 * 225.0 && world.closes.iter().all(|(.., reason)| *reason == CloseReason::Shed), "{n}");
    for node in 0..4 {
        let of_node: Vec<Instant> = world.closes.iter().filter(|(_, of, _)| *of == node).map(|(at, ..)| *at).collect();
        let most = of_node.iter().map(|at| of_node.iter().filter(|a| (*at..*at + s(4)).contains(a)).count()).max();
        assert!(most.unwrap_or(0) <= 8, "{most:?} of {node} in an interval");
        assert!(node != 3 || of_node.is_empty(), "the new one gives nobody away");
    }
    let moved: u64 = (0..4).map(|node| world.shed(node).shed_total).sum();
    assert_eq!(moved, n as u64);
    assert!(world.n_moves.values().all(|n| *n == 1), "nobody twice");
    let view = world.shed(0);
    assert_eq!((view.state, &view.suspended[..], view.why), ("idle", &[][..], Some("even")));
    world.closes.clear();
    world.pass(s(600)).await;
    assert_eq!(world.closes, [], "what is even stays as it is");
}

#[tokio::test(start_paused = true)]
async fn while_sessions_are_moved_every_node_reports_every_second_the_one_that_is_filled_too() {
    let mut world = World::three_and_a_new_one(ShedMode::On).await;
    let oldest = |world: &World| world.nodes[0].hub.fleet().nodes.iter().map(|node| node.age).max().unwrap();
    world.until_shedding().await;
    // Those who watch learn of it by their next reading.
    world.pass(s(7)).await;
    for _ in 0..200 {
        world.pass(Duration::from_millis(50)).await;
        assert!(oldest(&world) <= Duration::from_millis(2_100), "{:?}", world.nodes[0].hub.fleet().nodes);
    }
    world.until("it is over", |world| world.shed(0).state == "idle").await;
    world.pass(s(20)).await;
    let mut n_older = 0;
    for _ in 0..200 {
        world.pass(Duration::from_millis(50)).await;
        n_older += usize::from(oldest(&world) > s(3));
    }
    assert!(n_older > 100, "then at the usual pace: {n_older} of 200");
}

#[tokio::test(start_paused = true)]
async fn closes_are_spread_within_the_second() {
    let mut world = World::three_and_a_new_one(ShedMode::On).await;
    world.until_shedding().await;
    world.pass(s(20)).await;
    let mut in_tenth = BTreeMap::<u128, usize>::new();
    let began = world.closes[0].0;
    for (at, ..) in &world.closes {
        *in_tenth.entry((*at - began).as_millis() / 100).or_default() += 1;
    }
    assert!(in_tenth.values().all(|n| *n <= 4), "{in_tenth:?}");
}

#[tokio::test(start_paused = true)]
async fn a_hold_stops_all_nodes_at_once_and_its_end_lets_them_go_on() {
    let mut world = World::three_and_a_new_one(ShedMode::On).await;
    world.until_shedding().await;
    assert_eq!((world.shed(0).mode, world.shed(0).state), ("on", "shedding"));
    assert!(world.shed(0).budget > 1.0, "{:?}", world.shed(0));
    world.nodes[3].memory.hold(Some((s(60), "a test".to_owned()))).await.unwrap();
    let held = Instant::now();
    world.pass(s(2)).await;
    assert_eq!(world.n_after(held + Duration::from_millis(100)), 0);
    for node in 0..3 {
        let view = world.nodes[node].hub.fleet();
        assert_eq!((view.shed.state, &view.shed.suspended[..]), ("suspended", &["hold"][..]));
        assert_eq!(view.hold.as_ref().map(|hold| (&*hold.reason, &*hold.by)), Some(("a test", "d")));
        let series = "gateway_shed_suspended{reason=\"hold\"} 1";
        assert!(world.nodes[node].metrics.encode().contains(series));
    }
    world.pass(s(57)).await;
    assert_eq!(world.n_after(held + Duration::from_millis(100)), 0);
    // It ends with its time, though nobody says so.
    world.pass(s(20)).await;
    assert!(world.n_after(held + s(60)) > 5);
    assert_eq!(world.nodes[0].hub.fleet().hold, None);
    world.nodes[1].memory.hold(Some((s(600), String::new()))).await.unwrap();
    world.pass(s(5)).await;
    world.nodes[2].memory.hold(None).await.unwrap();
    let released = Instant::now();
    world.pass(s(5)).await;
    assert!(world.n_after(released) > 0, "released, it goes on within seconds");
}

#[tokio::test(start_paused = true)]
async fn a_drain_of_another_node_comes_first_and_a_minute_passes_after_it() {
    let mut world = World::three_and_a_new_one(ShedMode::On).await;
    world.until_shedding().await;
    world.nodes[2].hub.drain();
    world.pass(s(2)).await;
    let known = Instant::now();
    world.pass(s(3)).await;
    assert_eq!(world.n_after(known), 0);
    // It is the node itself too: it gives away nobody but by its drain.
    for node in 0..3 {
        assert!(world.shed(node).suspended.contains(&"draining"), "{:?}", world.shed(node));
    }
    let node = world.nodes[2].hub.clone();
    let drained = tokio::spawn(async move { crate::departure::drain(&node).await });
    while !drained.is_finished() {
        world.pass(s(1)).await;
    }
    world.nodes[2].hub.shut_down().await;
    let gone = Instant::now();
    assert!(world.closes.iter().all(|(at, _, reason)| *at <= known || *reason == CloseReason::Drain));
    world.pass(s(60)).await;
    assert_eq!(world.n_after(gone), 0, "{:?}", world.shed(0));
}

#[tokio::test(start_paused = true)]
async fn within_two_seconds_of_an_outage_nobody_is_moved_any_more() {
    let mut world = World::three_and_a_new_one(ShedMode::On).await;
    world.until_shedding().await;
    world.nodes.iter().for_each(|node| node.memory.set_reachable(false));
    let out = Instant::now();
    world.pass(s(30)).await;
    assert_eq!(world.n_after(out + s(2)), 0);
    assert!(world.shed(0).suspended.contains(&"backplane"), "{:?}", world.shed(0));
    world.nodes.iter().for_each(|node| node.memory.set_reachable(true));
    let back = Instant::now();
    world.pass(s(30)).await;
    assert_eq!(world.n_after(back), 0, "it waits until it is sure");
    world.until("it goes on", |world| world.n_after(back) > 10).await;
}

#[tokio::test(start_paused = true)]
async fn an_error_that_passed_between_two_looks_stops_it_too() {
    let mut world = World::three_and_a_new_one(ShedMode::On).await;
    world.until_shedding().await;
    world.nodes[0].memory.cut_link();
    world.nodes[0].memory.restore_link();
    let erred = Instant::now();
    world.pass(s(25)).await;
    let from_a = world.closes.iter().filter(|(at, node, _)| *at > erred && *node == 0).count();
    assert_eq!(from_a, 0);
    assert!(world.n_after(erred) > 0, "the others have seen no error");
}

#[tokio::test(start_paused = true)]
async fn a_dry_run_counts_and_moves_nobody() {
    let mut world = World::three_and_a_new_one(ShedMode::DryRun).await;
    world.pass(s(60)).await;
    assert_eq!((world.closes.len(), world.counts()), (0, vec![300, 300, 300, 0]));
    let view = world.shed(0);
    assert_eq!((view.mode, view.state), ("dry-run", "shedding"));
    assert!(view.shed_total > 10, "{view:?}");
    assert!(world.nodes[0].metrics.encode().contains("gateway_shed_total 0"));
}

#[tokio::test(start_paused = true)]
async fn off_is_off() {
    let mut world = World::three_and_a_new_one(ShedMode::Off).await;
    world.pass(s(60)).await;
    assert_eq!(world.closes.len(), 0);
    assert_eq!(world.shed(0), ShedView::default());
    // Others do not know that it is off; it does not take part, and they move theirs.
    assert_eq!(world.nodes[0].hub.fleet().nodes.len(), 4);
}

#[tokio::test(start_paused = true)]
async fn who_is_busy_or_came_just_now_is_left_alone() {
    let mut world = World::new();
    for _ in 0..2 {
        world.add(300, ShedMode::On).await;
    }
    world.pass(s(110)).await;
    world.add(0, ShedMode::On).await;
    let busy: Vec<_> = world.clients.iter().step_by(2).map(|(_, open)| open.session().clone()).collect();
    let began = Instant::now();
    while began.elapsed() < s(60) {
        busy.iter().for_each(|session| session.lock().set_busy(Instant::now(), s(60)));
        world.pass(s(5)).await;
    }
    assert!(world.closes.len() > 10, "{}", world.closes.len());
    assert!(busy.iter().all(|session| session.ending().is_none()));
    // Two that were filled a minute ago and one that is empty: nobody has been there for long enough.
    let mut world = World::new();
    for _ in 0..2 {
        world.add(0, ShedMode::On).await;
    }
    world.add(0, ShedMode::On).await;
    world.pass(s(60)).await;
    for node in 0..2 {
        let open: Vec<_> = (0..300).map(|i| (node, world.nodes[node].open(&i.to_string()))).collect();
        world.clients.extend(open);
    }
    world.pass(s(119)).await;
    assert_eq!(world.closes, []);
    world.pass(s(15)).await;
    assert!(!world.closes.is_empty(), "{:?}", world.shed(0));
}

#[tokio::test(start_paused = true)]
async fn with_short_reports_sessions_are_left_alone_for_less() {
    let mut world = World::new();
    world.config.balance.report_every = s(1);
    world.add(300, ShedMode::On).await;
    world.add(0, ShedMode::On).await;
    // Their own age would let them go after 24 s; the fleet must have been watched for 30.
    let opened = Instant::now();
    world.until_shedding().await;
    let took = world.closes[0].0 - opened;
    assert!(took >= s(30) && took < s(36), "{took:?}");
}

#[tokio::test(start_paused = true)]
async fn a_gap_below_the_minimum_is_left_and_said_to_be() {
    let mut world = World::new();
    world.add(100, ShedMode::On).await;
    world.add(0, ShedMode::On).await;
    world.pass(s(150)).await;
    assert_eq!(world.closes, []);
    let view = world.shed(0);
    assert_eq!((view.state, &view.suspended[..], view.why), ("idle", &[][..], Some("below_minimum")));
    // Two more and it is fifty-one.
    let more: Vec<_> = (0..2).map(|i| (0, world.nodes[0].open(&format!("more{i}")))).collect();
    world.clients.extend(more);
    world.until("it is moved away", |world| world.counts()[0] < 60).await;
}

#[tokio::test(start_paused = true)]
async fn clients_that_come_back_at_once_are_moved_until_the_fleet_is_even() {
    let mut world = World::new();
    world.within = Duration::ZERO;
    // Fast enough that much more is taken to be on its way than is.
    world.config.balance = BalanceConfig { fraction: 0.1, interval: s(1), report_every: s(1), ..world.config.balance };
    world.add(160, ShedMode::On).await;
    world.add(0, ShedMode::On).await;
    world.until_shedding().await;
    world.pass(s(60)).await;
    let counts = world.counts();
    assert!(counts[0].abs_diff(80) <= 3, "{counts:?}");
    assert!(world.closes.len() <= 84 && world.n_moves.values().all(|n| *n == 1), "{}", world.closes.len());
    assert_eq!(world.shed(0).state, "idle");
}
