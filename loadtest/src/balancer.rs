//! A load balancer in a few lines: which node gets the next attempt. It knows of a node only what a
//! real one would: `/readyz` every so often, and how many connections it has given it.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use clap::ValueEnum;
use tokio::task::JoinSet;

use crate::probe;

/// How a node is chosen among the healthy ones.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Policy {
    LeastConnections,
    RoundRobin,
    Random,
    /// The emptier of two drawn ones
    TwoRandom,
}

/// Where a node is.
#[derive(Clone, Copy, Debug)]
pub struct Place {
    pub public: SocketAddr,
    pub probes: SocketAddr,
}

struct Node {
    place: Place,
    is_healthy: AtomicBool,
    n_given: AtomicUsize,
}

/// The balancer.
pub struct Balancer {
    nodes: Vec<Node>,
    policy: Policy,
    turn: AtomicUsize,
}

/// A connection that the balancer counts; dropped with it.
pub struct Given {
    balancer: Arc<Balancer>,
    pub node: usize,
}

impl Drop for Given {
    fn drop(&mut self) {
        self.balancer.nodes[self.node].n_given.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Balancer {
    /// All nodes count as healthy at first.
    pub fn new(places: impl IntoIterator<Item = Place>, policy: Policy) -> Arc<Balancer> {
        let node = |place| Node { place, is_healthy: AtomicBool::new(true), n_given: AtomicUsize::new(0) };
        Arc::new(Balancer { nodes: places.into_iter().map(node).collect(), policy, turn: AtomicUsize::new(0) })
    }

    /// The node for the next attempt; `None` while none is healthy.
    pub fn choose(self: &Arc<Self>) -> Option<Given> {
        let healthy: Vec<usize> =
            (0..self.nodes.len()).filter(|node| self.nodes[*node].is_healthy.load(Ordering::Relaxed)).collect();
        if healthy.is_empty() {
            return None;
        }
        let turn = self.turn.fetch_add(1, Ordering::Relaxed);
        let given = |node: &&usize| self.nodes[**node].n_given.load(Ordering::Relaxed);
        let node = match self.policy {
            Policy::RoundRobin => healthy[turn % healthy.len()],
            Policy::Random => healthy[scattered(turn) % healthy.len()],
            Policy::TwoRandom => {
                let [one, other] = [2 * turn, 2 * turn + 1].map(|n| healthy[scattered(n) % healthy.len()]);
                if given(&&one) <= given(&&other) { one } else { other }
            }
            Policy::LeastConnections => *healthy.iter().min_by_key(given).expect("it is not empty"),
        };
        Some(self.give(node))
    }

    /// A connection to this very node.
    pub fn give(self: &Arc<Self>, node: usize) -> Given {
        self.nodes[node].n_given.fetch_add(1, Ordering::Relaxed);
        Given { balancer: Arc::clone(self), node }
    }

    pub fn address(&self, node: usize) -> SocketAddr {
        self.nodes[node].place.public
    }

    /// Checks every node's health for ever. Dropping the future ends it.
    pub async fn watch(self: Arc<Self>, every: Duration) {
        let mut checks = JoinSet::new();
        for node in 0..self.nodes.len() {
            let balancer = Arc::clone(&self);
            checks.spawn(async move {
                let node = &balancer.nodes[node];
                let mut pace = tokio::time::interval(every);
                loop {
                    pace.tick().await;
                    let is_healthy = matches!(probe::get(node.place.probes, "/readyz").await, Ok((200, _)));
                    node.is_healthy.store(is_healthy, Ordering::Relaxed);
                }
            });
        }
        checks.join_all().await;
    }
}

/// A number that looks drawn (splitmix64), the same in every run.
fn scattered(n: usize) -> usize {
    let mut x = (n as u64).wrapping_add(0x9e37_79b9_7f4a_7c15).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x ^= x >> 27;
    x = x.wrapping_mul(0x94d0_49bb_1331_11eb);
    (x ^ (x >> 31)) as usize
}

#[cfg(test)]
mod tests {
    use super::*;

    fn balancer(policy: Policy) -> Arc<Balancer> {
        let place = |port| Place { public: ([127, 0, 0, 1], port).into(), probes: ([127, 0, 0, 1], port).into() };
        Balancer::new((1..=3).map(place), policy)
    }

    fn counts(balancer: &Arc<Balancer>, n: usize) -> [usize; 3] {
        let given: Vec<Given> = (0..n).filter_map(|_| balancer.choose()).collect();
        [0, 1, 2].map(|node| given.iter().filter(|given| given.node == node).count())
    }

    #[test]
    fn an_unhealthy_node_gets_nothing_and_the_others_share_alike() {
        for policy in [Policy::LeastConnections, Policy::RoundRobin, Policy::Random, Policy::TwoRandom] {
            let balancer = balancer(policy);
            balancer.nodes[1].is_healthy.store(false, Ordering::Relaxed);
            let [first, second, third] = counts(&balancer, 1_000);
            assert!(first.abs_diff(third) < 100 && second == 0 && first + third == 1_000, "{policy:?} {first} {third}");
        }
    }

    #[test]
    fn least_connections_fills_the_emptier_node_and_forgets_what_ended() {
        let balancer = balancer(Policy::LeastConnections);
        let _first: Vec<Given> = (0..10).map(|_| balancer.give(0)).collect();
        assert_eq!(counts(&balancer, 8), [0, 4, 4]);
        assert_eq!(counts(&balancer, 8), [0, 4, 4], "those were dropped");
    }

    #[test]
    fn with_nobody_healthy_there_is_no_node() {
        let balancer = balancer(Policy::Random);
        balancer.nodes.iter().for_each(|node| node.is_healthy.store(false, Ordering::Relaxed));
        assert!(balancer.choose().is_none());
    }
}
