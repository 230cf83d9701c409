//! All nodes die at once, and one of them is back a minute before the others: the whole crowd finds
//! that one. It takes in what its bucket gives and no more, and whoever it refused comes back in time
//! to find the others.

use std::time::Duration;

use hub::close::CloseReason;
use tidegate_testkit::fleet::{Balancing, Fleet, FleetConfig, Kind, peak};
use tokio::time::Instant;

use crate::{Figures, s};

const N_NODES: usize = 5;
const N: usize = 20_000;
/// The first that is back has the number after those that died.
const FIRST: usize = N_NODES;

/// The first one has the crowd to itself for so long; then the others come, so far from each other.
const ALONE: Duration = s(60);
const APART: Duration = s(15);

/// A fleet that comes back, looked at once a second.
struct Comeback {
    fleet: Fleet,
    died_at: Instant,
    first_at: Instant,
    /// Sessions of each node there was, second by second.
    seconds: Vec<Vec<usize>>,
}

impl Comeback {
    /// All nodes of an even fleet are gone, and nobody answers for `dark`; then the first serves.
    async fn after(config: FleetConfig, dark: Duration) -> Self {
        let mut fleet = Fleet::standing(config, &[N / N_NODES; N_NODES]).await;
        assert_eq!(fleet.record.closes.len(), 0, "an even fleet is left alone");
        let died_at = Instant::now();
        (0..N_NODES).for_each(|node| fleet.kill(node));
        fleet.run(dark).await;
        assert_eq!((fleet.n_clients(), fleet.record.returns.len()), ((0, N, 0), 0), "nobody to come back to");
        assert_eq!(fleet.add(), FIRST);
        Self { seconds: vec![fleet.counts()], first_at: Instant::now(), died_at, fleet }
    }

    async fn run(&mut self, time: Duration) {
        let until = Instant::now() + time;
        while Instant::now() < until {
            self.fleet.run(s(1)).await;
            self.seconds.push(self.fleet.counts());
        }
    }

    /// The others come one by one; returns once everybody has a place again.
    async fn the_others_come(&mut self) {
        for _ in 1..N_NODES {
            self.fleet.add();
            self.run(APART).await;
        }
        while self.fleet.n_clients().0 < N {
            assert!(self.first_at.elapsed() < s(240), "not all are back: {:?}", self.fleet.counts());
            self.run(s(1)).await;
        }
    }

    /// What a node let in, second by second since it came. Nobody leaves one meanwhile.
    fn let_in(&self, node: usize) -> Vec<usize> {
        assert_eq!(self.fleet.record.closes.len(), N, "those of the dead nodes, and no other");
        let there: Vec<usize> = self.seconds.iter().filter_map(|second| second.get(node).copied()).collect();
        // The others were added after a look, the first one before its own.
        let empty = if node == FIRST { None } else { Some(0) };
        let looks: Vec<usize> = empty.into_iter().chain(there).collect();
        looks.windows(2).map(|pair| pair[1] - pair[0]).collect()
    }

    /// Over any time a node lets in its burst and its rate's part at most.
    fn assert_within_bucket(&self, node: usize) {
        let (config, let_in) = (&self.fleet.config, self.let_in(node));
        for begin in 0..let_in.len() {
            let mut sum = 0;
            for (i, n) in let_in[begin..].iter().enumerate() {
                sum += n;
                let most = f64::from(config.accept_burst) + config.accept_per_second * (i + 1) as f64;
                assert!(sum as f64 <= most, "{sum} in {} s from second {begin} on: {let_in:?}", i + 1);
            }
        }
    }

    /// While it stands before the crowd alone, the first gives all that its bucket holds, has no second
    /// of the crowd's once the burst is gone, and sends whoever it refuses away for long enough.
    fn assert_first_alone(&self, n_expected: usize) {
        let (rate, record) = (self.fleet.config.accept_per_second, &self.fleet.record);
        let alone = record.returns_after(self.first_at);
        let later: Vec<Instant> = alone.iter().copied().filter(|at| *at > self.first_at + s(5)).collect();
        let refused: Vec<Instant> = record.refusals.iter().map(|(at, _)| *at).collect();
        let (most, mean) = (peak(&later, s(1)), peak(&later, s(10)));
        println!(
            "the first let in {} in {ALONE:?}, after its burst at most {most}/s and {mean}/s in 10 s; it refused {}, at most {}/s",
            alone.len(),
            refused.len(),
            peak(&refused, s(1)),
        );
        assert!(alone.len() <= n_expected && alone.len() as f64 >= 0.97 * n_expected as f64, "{}", alone.len());
        // What it could not give in a second in which nobody came it may give in the next.
        assert!(mean <= 1.15 * rate && most <= 2.0 * rate, "{mean}/s, at most {most}/s");
        assert!(refused.len() <= 2 * N, "{} refusals", refused.len());
    }

    /// Whoever was moved left a fleet whose total had hardly changed for half a minute.
    fn assert_moved_only_when_steady(&self) {
        let record = &self.fleet.record;
        let total = |at: Instant| record.looks[record.looks.partition_point(|look| look.at <= at) - 1].n_sessions;
        for at in record.closed(CloseReason::Shed, self.died_at) {
            let (before, then) = (total(at - s(30)), total(at));
            // 5 %, and what reports are late.
            assert!(before.abs_diff(then) * 100 <= then * 6, "moved while the total went from {before} to {then}");
        }
    }
}

/// Kills the fleet and follows its comeback to the end; `n_expected` is what the first can take in alone.
async fn comes_back(config: FleetConfig, dark: Duration, n_expected: usize) {
    let what = format!("5 nodes with 20,000 sessions dead for {dark:?}, {}", config.front.balancing.word());
    let mut back = Comeback::after(config, dark).await;
    back.run(ALONE).await;
    back.assert_first_alone(n_expected);
    back.the_others_come().await;
    (FIRST..FIRST + N_NODES).for_each(|node| back.assert_within_bucket(node));
    let all_back = Instant::now();
    let n_refused = back.fleet.record.refusals.len();
    println!("all back {:?} later, {n_refused} refusals: {:?}", all_back - back.first_at, back.fleet.counts());
    assert!(n_refused <= 3 * N, "{n_refused} refusals");

    back.fleet.run(s(330)).await;
    back.assert_moved_only_when_steady();
    let mut fleet = back.fleet;
    let figures = Figures::since(all_back, &fleet, &what);
    figures.assert_even_within(300.0);
    assert!(figures.worst <= 0.10 && figures.n_shed > 0, "{:?}", fleet.counts());
    assert_eq!((figures.n_refused, figures.n_ping_pong), (0, 0));
    let heard = fleet.heard().await;
    println!("{heard:?}");
    assert!(heard.n_gaps == 0 && heard.n_moved == heard.n_listeners && heard.n_caught_up > 0, "{heard:?}");
    fleet.run_until("those that are moved are back", s(60), |fleet| fleet.n_clients() == (N, 0, 0)).await;
    assert_eq!(fleet.counts().iter().sum::<usize>(), N, "nobody has two places");
}

#[tokio::test(start_paused = true)]
async fn the_first_node_back_takes_in_what_its_bucket_gives_and_everybody_finds_a_place() {
    comes_back(FleetConfig::new(51, Balancing::LeastConnections), s(5), 6_200).await;
}

#[tokio::test(start_paused = true)]
async fn a_crowd_that_waited_for_minutes_is_no_worse_for_the_first_node_back() {
    comes_back(FleetConfig::new(52, Balancing::TwoChoices), s(180), 6_200).await;
}

#[tokio::test(start_paused = true)]
async fn a_first_node_that_is_full_before_the_others_come_takes_in_nobody_more() {
    let config = FleetConfig::new(53, Balancing::LeastConnections);
    let kind = Kind { capacity: 5_000, ..config.kind };
    comes_back(FleetConfig { kind, ..config }, s(5), kind.capacity).await;
}
