//! A fleet of two under everything that can go wrong, by chance: publishes, connects, cuts, moves,
//! later subscribes, lost links, late reads, flushes, restarts, idle hours. Whatever happened, every
//! client's view must hold what it was promised; once all is mended everybody must have the newest
//! event. A violation prints its seed and the whole trace; `TEST_SEED=<n>` plays that one again,
//! `TEST_RUNS=<n>` plays more than usual.

use std::collections::HashSet;
use std::fmt::Write as _;
use std::time::Duration;

use hub::clock::Dice;
use hub::close::CloseReason;
use hub::event::Wire;
use hub::memory::Restart;
use tidegate_testkit::faults::{Call, Held};
use tidegate_testkit::world::judge::Violation;
use tidegate_testkit::world::line::InFlight;
use tidegate_testkit::world::{World, WorldConfig};

/// Some eight seconds. Of the mistakes that were tried, each was found by fewer.
const N_RUNS: u64 = 5_000;
const N_NODES: usize = 2;
const CHANNELS: [&str; 4] = ["a", "b", "c", "d"];

#[test]
fn whatever_goes_wrong_nobody_sees_an_event_twice_out_of_order_or_a_silent_hole() {
    let number = |name: &str| std::env::vars().find(|(key, _)| key == name).map(|(_, n)| n.parse().expect("a number"));
    let seeds = match number("TEST_SEED") {
        Some(seed) => seed..seed + 1,
        None => 0..number("TEST_RUNS").unwrap_or(N_RUNS),
    };
    let (mut n_events, mut n_gaps, mut n_seen, mut failures) = (0, 0, 0, Vec::new());
    for seed in seeds.clone() {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build().unwrap();
        let mut run = runtime.block_on(Run::new(seed));
        match runtime.block_on(run.go()) {
            Ok(()) => {
                n_events += run.world.truth.n_events();
                n_gaps += run.world.clients.iter().map(|client| client.judge().n_gaps()).sum::<u64>();
                n_seen += run.world.clients.iter().map(|client| client.judge().n_seen()).sum::<usize>();
            }
            Err(violation) => failures.push((seed, run.tell(&violation))),
        }
        if failures.len() == 5 {
            break;
        }
    }
    println!("seeds {seeds:?}: {n_events} events published, {n_seen} received, {n_gaps} gaps");
    let shortest = failures.iter().min_by_key(|(_, trace)| trace.len());
    if let Some((seed, trace)) = shortest {
        let all: Vec<u64> = failures.iter().map(|(seed, _)| *seed).collect();
        panic!("broken in seeds {all:?}; the shortest, TEST_SEED={seed}:\n{trace}");
    }
}

/// Which kinds of trouble one run looks at. Few at a time, or they hide each other.
struct Trouble {
    flush: bool,
    restart: bool,
    idle: bool,
    link: bool,
    slow_link: bool,
    slow_reads: bool,
    unreachable: bool,
    extra: bool,
    bye: bool,
    big: bool,
}

impl Trouble {
    fn drawn(dice: &Dice) -> Self {
        let often = |p: f64| dice.unit() < p;
        Self {
            flush: often(0.25),
            restart: often(0.25),
            idle: often(0.3),
            link: often(0.6),
            slow_link: often(0.5),
            slow_reads: often(0.5),
            unreachable: often(0.2),
            extra: often(0.6),
            bye: often(0.3),
            big: often(0.15),
        }
    }
}

struct Run {
    seed: u64,
    dice: Dice,
    trouble: Trouble,
    world: World,
    reads: [Option<Held>; N_NODES],
    /// What was ever asked for later, by whom.
    asked: HashSet<(usize, &'static str)>,
    trace: Vec<String>,
}

type Outcome = Result<(), Violation>;

impl Run {
    async fn new(seed: u64) -> Self {
        let dice = Dice::seeded(seed ^ 0x5eed);
        let trouble = Trouble::drawn(&dice);
        let mut config = WorldConfig::new(seed);
        config.n_nodes = N_NODES;
        config.history.history_size = 4;
        config.replay_max = 5;
        if trouble.big {
            config.history.history_size = 40;
            config.replay_max = 30;
            config.pipe_bytes = 16 * 1024;
        } else if dice.unit() < 0.5 {
            config.pipe_bytes = 512;
        }
        let mut world = World::new(config).await;
        for _ in 0..1 + dice.bits() % 3 {
            let mut joined: Vec<&str> = CHANNELS.into_iter().filter(|_| dice.unit() < 0.4).collect();
            if joined.is_empty() && dice.unit() < 0.7 {
                joined.push("a");
            }
            let wire = if dice.unit() < 0.7 { Wire::Ws } else { Wire::Sse };
            world.add_client(wire, &joined);
        }
        Self { seed, dice, trouble, world, reads: Default::default(), asked: HashSet::new(), trace: Vec::new() }
    }

    fn below(&self, n: usize) -> usize {
        (self.dice.bits() % n as u64) as usize
    }

    async fn go(&mut self) -> Outcome {
        let n_steps = [15, 30, 60, 100][self.below(4)];
        for _ in 0..n_steps {
            self.step().await?;
        }
        self.trace.push("all is mended".to_owned());
        for i in 0..N_NODES {
            self.reads[i] = None;
            let node = &self.world.nodes[i];
            node.faults.mend(Call::Read);
            // A hold without anybody behind it holds nothing.
            drop(node.faults.hold(Call::Read));
            node.memory().set_reachable(true);
            node.line().flow();
            node.memory().restore_link();
        }
        self.world.conclude().await
    }

    async fn step(&mut self) -> Outcome {
        let t = &self.trouble;
        let weight = |is_on: bool, weight: usize| if is_on { weight } else { 0 };
        let table = [
            (26, Step::Publish),
            (12, Step::Run),
            (8, Step::Settle),
            (16, Step::Receive),
            (10, Step::Connect),
            (5, Step::Cut),
            (3, Step::Pass),
            (3, Step::Ephemeral),
            (weight(t.idle, 3), Step::Idle),
            (weight(t.flush, 2), Step::Flush),
            (weight(t.restart, 2), Step::Restart),
            (weight(t.link, 6), Step::Link),
            (weight(t.slow_link, 12), Step::Line),
            (weight(t.slow_reads, 12), Step::Reads),
            (weight(t.unreachable, 3), Step::Reach),
            (weight(t.extra, 10), Step::Subscribe),
            (weight(t.extra, 2), Step::Unsubscribe),
            (weight(t.extra, 2), Step::Authenticate),
            (weight(t.bye, 3), Step::Bye),
            (3, Step::Beacon),
        ];
        let mut at = self.below(table.iter().map(|(weight, _)| weight).sum());
        let step = table.into_iter().find_map(|(weight, step)| match at.checked_sub(weight) {
            Some(rest) => {
                at = rest;
                None
            }
            None => Some(step),
        });
        self.take(step.expect("within the sum")).await
    }

    async fn take(&mut self, step: Step) -> Outcome {
        let (client, node) = (self.below(self.world.clients.len()), self.below(N_NODES));
        match step {
            Step::Publish => self.publish().await,
            Step::Ephemeral => {
                let channel = CHANNELS[self.below(4)];
                self.world.publish_ephemeral(channel).await;
            }
            Step::Run => {
                let turns = 1 + self.below(12);
                self.trace.push(format!("{turns} turns"));
                for _ in 0..turns {
                    tokio::task::yield_now().await;
                }
            }
            Step::Settle => {
                self.trace.push("settle".to_owned());
                self.world.settle().await;
            }
            Step::Receive => return self.receive(client),
            Step::Connect if !self.world.clients[client].is_connected() => {
                self.trace.push(format!("client{client} connects to node{node}"));
                self.world.connect(client, node);
            }
            Step::Cut if self.world.clients[client].is_connected() => {
                self.trace.push(format!("client{client} is cut"));
                self.world.clients[client].cut();
            }
            Step::Pass => self.pass(Duration::from_millis(1 + self.below(120) as u64)).await,
            Step::Idle => {
                let seconds = if self.below(10) < 7 { self.below(900) as u64 } else { 590 };
                self.pass(Duration::from_secs(seconds)).await;
            }
            Step::Flush => {
                self.trace.push("flush".to_owned());
                self.world.flush().await;
            }
            Step::Restart => {
                let restart = [Restart::Clean, Restart::Torn][self.below(2)];
                self.trace.push(format!("restart, {restart:?}"));
                self.world.restart(restart).await;
            }
            Step::Link => self.link(node),
            Step::Line => self.line(node),
            Step::Reads => self.reads(node),
            Step::Reach => {
                let is_reachable = self.below(2) == 0;
                self.trace.push(format!("node{node} reaches the log: {is_reachable}"));
                self.world.nodes[node].memory().set_reachable(is_reachable);
            }
            Step::Subscribe => self.subscribe(client),
            Step::Unsubscribe => self.unsubscribe(client),
            Step::Authenticate if self.world.clients[client].wire == Wire::Ws => {
                self.trace.push(format!("client{client} authenticates"));
                self.world.clients[client].authenticate();
            }
            Step::Bye => {
                self.trace.push(format!("client{client} is asked to leave"));
                self.world.ask_to_leave(client, CloseReason::Recycle);
            }
            Step::Beacon => {
                self.trace.push(format!("node{node} sends a beacon"));
                hub::backplane::Backplane::beacon(self.world.nodes[node].memory());
            }
            _ => {}
        }
        Ok(())
    }

    async fn publish(&mut self) {
        let channel = CHANNELS[self.below(4)];
        let key = (self.below(10) == 0).then(|| format!("k{}", self.below(4)));
        let pad = if self.trouble.big { self.below(120_000) } else { 0 };
        let published = self.world.publish_with(channel, key.as_deref(), pad).await;
        let number = self.world.truth.n_events();
        let id = published.id.map_or_else(String::new, |id| id.to_string());
        self.trace.push(format!("publish {number} on {channel}: {id} duplicate: {}", published.duplicate));
    }

    fn receive(&mut self, client: usize) -> Outcome {
        let n_messages = 1 + self.below(4);
        let max_bytes = if self.trouble.big { 150_000 } else { 1_000 };
        let before = self.world.clients[client].log().len();
        let World { clients, truth, .. } = &mut self.world;
        let received = clients[client].receive(truth, max_bytes, n_messages);
        for line in &clients[client].log()[before..] {
            self.trace.push(format!("client{client} {line}"));
        }
        received.map(|_| ())
    }

    async fn pass(&mut self, time: Duration) {
        self.trace.push(format!("{time:?} pass"));
        tokio::time::advance(time).await;
    }

    fn link(&mut self, node: usize) {
        let memory = self.world.nodes[node].memory();
        if self.dice.unit() < 0.5 {
            self.trace.push(format!("the link of node{node} breaks"));
            memory.cut_link();
        } else {
            self.trace.push(format!("the link of node{node} is mended"));
            memory.restore_link();
        }
    }

    fn line(&mut self, node: usize) {
        let kind = self.below(5);
        let line = self.world.nodes[node].line();
        let what = match kind {
            0 => {
                line.hold();
                "is held"
            }
            1 => {
                line.flow();
                "flows"
            }
            2 => {
                line.when_lost([InFlight::Arrives, InFlight::IsLost][self.below(2)]);
                "may lose"
            }
            _ => {
                line.pass(1);
                "lets one pass"
            }
        };
        self.trace.push(format!("the line of node{node} {what}"));
    }

    fn reads(&mut self, node: usize) {
        let faults = &self.world.nodes[node].faults;
        let what = match (self.below(3), &self.reads[node]) {
            (0, _) => {
                self.reads[node] = Some(faults.hold(Call::Read));
                "are held"
            }
            (1, Some(held)) => {
                held.release_one();
                "let one go"
            }
            _ => {
                self.reads[node] = None;
                "flow"
            }
        };
        self.trace.push(format!("reads of node{node} {what}"));
    }

    fn subscribe(&mut self, client: usize) {
        let channel = CHANNELS[self.below(4)];
        let known = &self.world.clients[client];
        if known.wire == Wire::Sse || !known.is_ready() || known.hears(channel) {
            return;
        }
        // A replay that goes back behind what was heard before repeats it, rightly: a channel that
        // was given up is asked for from now on.
        let is_first = self.asked.insert((client, channel));
        let since = match self.below(3) {
            0 => None,
            1 => known.cursor().map(str::to_owned),
            _ => known.first_cursor().map(str::to_owned),
        };
        let since = since.filter(|_| is_first);
        self.trace.push(format!("client{client} subscribes {channel} since {since:?}"));
        self.world.subscribe(client, channel, since.as_deref());
    }

    fn unsubscribe(&mut self, client: usize) {
        let channel = CHANNELS[self.below(4)];
        let known = &self.world.clients[client];
        // What the token joined comes back with the next connection; it is left alone here.
        if known.wire == Wire::Ws && known.is_connected() && !known.is_joined(channel) {
            self.trace.push(format!("client{client} unsubscribes {channel}"));
            self.world.clients[client].unsubscribe(channel);
        }
    }

    fn tell(&self, violation: &Violation) -> String {
        let mut told = format!("{violation}\n  seed {}\n", self.seed);
        for (i, client) in self.world.clients.iter().enumerate() {
            let channels: Vec<&String> = client.channels().collect();
            let _ = writeln!(told, "  client{i} {:?} hears {channels:?}", client.wire);
        }
        for line in &self.trace {
            let _ = writeln!(told, "  {line}");
        }
        if let Some(client) = self.world.clients.iter().find(|client| client.name == violation.client) {
            let _ = writeln!(told, "  all that {} said and received:", client.name);
            for line in client.log() {
                let _ = writeln!(told, "    {line}");
            }
        }
        told
    }
}

#[derive(Clone, Copy)]
enum Step {
    Publish,
    Ephemeral,
    Run,
    Settle,
    Receive,
    Connect,
    Cut,
    Pass,
    Idle,
    Flush,
    Restart,
    Link,
    Line,
    Reads,
    Reach,
    Subscribe,
    Unsubscribe,
    Authenticate,
    Bye,
    Beacon,
}
