//! The balancer in front of a simulated fleet: to which node it sends a client. It knows what such
//! a balancer knows: how many connections it holds to each node, and whether the readiness probe
//! answers, a little late.

use std::time::Duration;

use hub::clock::Dice;
use tokio::time::Instant;

use super::node::Node;

/// How it chooses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Balancing {
    /// The node that is emptiest for its capacity, exactly.
    LeastConnections,
    /// Each in its turn.
    InTurn,
    /// The emptier of two drawn ones.
    TwoChoices,
    /// The node the client was on last (a cookie), any other only where that one is gone.
    Affinity,
}

impl Balancing {
    /// For what a test prints.
    pub fn word(self) -> &'static str {
        match self {
            Balancing::LeastConnections => "least connections",
            Balancing::InTurn => "in turn",
            Balancing::TwoChoices => "two choices",
            Balancing::Affinity => "affinity",
        }
    }
}

/// What the balancer obeys.
#[derive(Clone, Copy, Debug)]
pub struct FrontConfig {
    /// How it chooses.
    pub balancing: Balancing,
    /// A node is sent clients so long after it began to serve.
    pub joins_after: Duration,
    /// A node that leaves is sent no more clients so long after it said so.
    pub leaves_after: Duration,
}

/// The balancer.
pub(super) struct Front {
    pub config: FrontConfig,
    dice: Dice,
    turn: usize,
}

impl Front {
    pub fn new(config: FrontConfig, dice: Dice) -> Self {
        Self { config, dice, turn: 0 }
    }

    /// The node for a client that was on `last`; `None`: none is up.
    pub fn choose(&mut self, nodes: &[Node], last: Option<usize>, now: Instant) -> Option<usize> {
        let open: Vec<usize> = (0..nodes.len()).filter(|node| self.sends_to(&nodes[*node], now)).collect();
        if open.is_empty() {
            return None;
        }
        let level = |node: usize| nodes[node].n_sessions() as f64 / nodes[node].capacity as f64;
        let emptier = |a: usize, b: usize| if level(b) < level(a) { b } else { a };
        Some(match self.config.balancing {
            Balancing::LeastConnections => open.into_iter().reduce(emptier)?,
            Balancing::TwoChoices => emptier(self.any(&open), self.any(&open)),
            Balancing::InTurn => {
                self.turn += 1;
                open[self.turn % open.len()]
            }
            Balancing::Affinity => last.filter(|last| open.contains(last)).unwrap_or_else(|| self.any(&open)),
        })
    }

    fn sends_to(&self, node: &Node, now: Instant) -> bool {
        let has_noticed = now >= node.began_at + self.config.joins_after;
        let is_leaving = node.left_at.is_some_and(|at| now >= at + self.config.leaves_after);
        node.is_up && has_noticed && !is_leaving
    }

    fn any(&self, open: &[usize]) -> usize {
        open[(self.dice.bits() % open.len() as u64) as usize]
    }
}
