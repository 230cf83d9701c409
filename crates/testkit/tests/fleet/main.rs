//! Fleets of tens of nodes and up to 50,000 sessions under a paused clock: the hub's own reports,
//! balancing, recycling and drains, with clients that obey, in simulated minutes to hours. Each test
//! prints its figures.
//!
//! `scaling` more nodes, other capacities, other balancers · `shrinking` fewer nodes · `deploys` old
//! nodes for new ones · `faults` what breaks · `blackout` everything breaks at once · `recycling`
//! hours in which nothing happens · `crowds` clients that do not go where they should.

use std::time::Duration;

use hub::close::CloseReason;
use tidegate_testkit::fleet::{Balancing, Fleet, FleetConfig, peak};
use tokio::time::Instant;

mod blackout;
mod crowds;
mod deploys;
mod faults;
mod recycling;
mod scaling;
mod shrinking;

/// Ages as they are drawn by default.
const AGES: (Duration, Duration) = (s(20 * 60), s(60 * 60));

/// Until a new node counts as a recipient, and half of what clients take to return.
const BEFORE_AND_AFTER: f64 = 15.0 + 2.5;

const fn s(n: u64) -> Duration {
    Duration::from_secs(n)
}

/// What became of a fleet since an instant.
#[derive(Debug)]
struct Figures {
    /// Seconds until every node was within 10 % of its share for good; `None`: it is not.
    t10: Option<f64>,
    /// Seconds until the coefficient of variation was below 0.1 for good.
    cv: Option<f64>,
    n_shed: usize,
    /// Clients that came back a second: the most in any 10 s, and in any second.
    mean: f64,
    most: f64,
    /// The most that a node showed as the fleet's budget.
    budget: f64,
    n_refused: usize,
    /// The longest that a client was away.
    away: Duration,
    n_ping_pong: usize,
    n_moved_again: usize,
    /// The furthest from its share in the end.
    worst: f64,
}

impl Figures {
    /// Of this time, and printed.
    fn since(from: Instant, fleet: &Fleet, what: &str) -> Self {
        let record = &fleet.record;
        let returns = record.returns_after(from);
        let figures = Self {
            t10: record.settled(from, |look| look.worst <= 0.10).map(|t| t.as_secs_f64()),
            cv: record.settled(from, |look| look.cv < 0.1).map(|t| t.as_secs_f64()),
            n_shed: record.closed(CloseReason::Shed, from).len(),
            mean: peak(&returns, s(10)),
            most: peak(&returns, s(1)),
            budget: record.looks.iter().filter(|look| look.at > from).map(|look| look.budget).fold(0.0, f64::max),
            n_refused: record.refusals.iter().filter(|(at, _)| *at > from).count(),
            away: record.longest_away(from),
            n_ping_pong: record.n_ping_pong,
            n_moved_again: record.n_moved_again,
            worst: record.now().worst,
        };
        println!("{what}: {figures:?}, in the end {:?}", fleet.counts());
        figures
    }

    /// Every node within 10 % of its share and all of them even within `limit` seconds, for good.
    fn assert_even_within(&self, limit: f64) {
        let (t10, cv) = (self.t10.expect("it becomes even"), self.cv.expect("it becomes even"));
        assert!(t10 <= limit && cv <= limit, "{t10} s, cv {cv} s, of {limit:.0} s");
    }

    /// Reconnects keep to the budget that was shown: 10-s mean ≤ 1.1, most in a second ≤ 1.5 of it.
    /// Nobody is refused, and nobody gives away what it was given.
    fn assert_within_budget(&self) {
        let Self { mean, most, budget, .. } = *self;
        assert!(mean <= 1.1 * budget && most <= 1.5 * budget, "{mean}/s, at most {most}/s of {budget}/s");
        assert_eq!((self.n_refused, self.n_ping_pong, self.n_moved_again), (0, 0, 0));
    }
}

/// A fleet of `old` standing nodes with `n` sessions and `new` ones more, as of now.
async fn scaled_out(config: FleetConfig, old: usize, new: usize, n: usize) -> (Fleet, Instant) {
    let counts: Vec<usize> = (0..old).map(|i| n / old + usize::from(i < n % old)).collect();
    let mut fleet = Fleet::standing(config, &counts).await;
    assert_eq!(fleet.record.closes.len(), 0, "an even fleet is left alone");
    for _ in 0..new {
        fleet.add();
    }
    (fleet, Instant::now())
}

/// From six to ten, in the midst of the moving.
async fn moving(n: usize) -> Fleet {
    let (mut fleet, from) = scaled_out(FleetConfig::new(1, Balancing::LeastConnections), 6, 4, n).await;
    fleet.run(s(50)).await;
    let lately = fleet.record.n_shed(Instant::now() - s(5), Instant::now());
    assert!(lately > n / 100, "{lately} in 5 s, after {:?}", from.elapsed());
    fleet
}
