//! The fleet as it is shown to people: rows, shares, targets and figures. Decides nothing; whether
//! anybody is to move because of them is decided by `balance`.

use std::sync::Arc;
use std::time::Duration;

use super::said::Said;
use crate::backplane::Hold;
use crate::hub::Phase;
use crate::telemetry::{FleetFigures, LbPolicy};

/// The fleet as this node knows it.
#[derive(Clone, Debug, PartialEq)]
pub struct FleetView {
    /// By name. This node as it is now, the others as they said last.
    pub nodes: Vec<NodeView>,
    /// Over all of them.
    pub figures: FleetFigures,
    /// How it stands with the moving of sessions from this node.
    pub shed: ShedView,
    /// Where the balancer in front puts clients, as far as it shows.
    pub placing: PlacingView,
    /// Somebody wants the fleet to stay as it is, until a time of the backplane's clock.
    pub hold: Option<Hold>,
}

/// Where the balancer in front puts clients, as far as it shows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PlacingView {
    /// What it goes by.
    pub policy: LbPolicy,
    /// Sessions that nodes moved while another node was emptier, over all of them, lately.
    pub n_moved: usize,
    /// Those of them that came back to the node that had moved them.
    pub n_back: usize,
}

/// How it stands with the moving of this node's sessions to emptier nodes.
#[derive(Clone, Debug, PartialEq)]
pub struct ShedView {
    /// `on`, `off`, `dry-run`.
    pub mode: &'static str,
    /// `off`, `idle`, `armed`, `shedding`, `suspended`.
    pub state: &'static str,
    /// Why it is suspended: the labels of `gateway_shed_suspended`.
    pub suspended: Vec<&'static str>,
    /// Why this node moves nobody though nothing but itself keeps it from it: `balance::Rest`.
    pub why: Option<&'static str>,
    /// Sessions a second that all nodes together may move; 0 where it is off.
    pub budget: f64,
    /// What bounds the budget: `recipients`, `fleet`, `donors`, `room`; `none` where it is off.
    pub bound: &'static str,
    /// Sessions moved from this node since its start; in a dry run: that would have been.
    pub shed_total: u64,
}

impl Default for ShedView {
    /// Nothing is moved.
    fn default() -> Self {
        Self { mode: "off", state: "off", suspended: Vec::new(), why: None, budget: 0.0, bound: "none", shed_total: 0 }
    }
}

/// One node of it.
#[derive(Clone, Debug, PartialEq)]
pub struct NodeView {
    /// Its name.
    pub node: Arc<str>,
    /// Its sessions.
    pub n_sessions: usize,
    /// Sessions that it has room for.
    pub capacity: usize,
    /// Its part of the capacity of all that serve, 0 to 1; 0 where it does not serve.
    pub share: f64,
    /// Sessions that it should hold: its share of all there are.
    pub target: f64,
    /// The word of its phase.
    pub phase: String,
    /// Its readiness probe says yes.
    pub is_ready: bool,
    /// The version that runs on it.
    pub version: String,
    /// How old this is.
    pub age: Duration,
}

pub(super) fn node(node: Arc<str>, said: &Said, age: Duration) -> NodeView {
    NodeView {
        node,
        n_sessions: said.sessions,
        capacity: said.capacity,
        share: 0.0,
        target: 0.0,
        phase: said.phase.clone(),
        is_ready: said.ready_ms.is_some(),
        version: said.version.clone(),
        age,
    }
}

/// Shares, targets and figures. Who does not serve has no share: whoever is still there has to go
/// to the others.
pub(super) fn evened(mut nodes: Vec<NodeView>, own: usize) -> (Vec<NodeView>, FleetFigures) {
    let serves = |node: &NodeView| node.phase == Phase::Serving.word() && node.capacity > 0;
    let total: usize = nodes.iter().map(|node| node.n_sessions).sum();
    let room: usize = nodes.iter().filter(|node| serves(node)).map(|node| node.capacity).sum();
    for node in nodes.iter_mut().filter(|node| serves(node)) {
        node.share = node.capacity as f64 / room as f64;
        node.target = node.share * total as f64;
    }
    let full: Vec<f64> =
        nodes.iter().filter(|node| serves(node)).map(|node| node.n_sessions as f64 / node.capacity as f64).collect();
    let mean = full.iter().sum::<f64>() / full.len().max(1) as f64;
    let (cv, busiest_ratio) = if mean > 0.0 {
        let variance = full.iter().map(|one| (one - mean).powi(2)).sum::<f64>() / full.len() as f64;
        (variance.sqrt() / mean, full.iter().fold(0.0, |a: f64, b| a.max(*b)) / mean)
    } else {
        // Nobody is connected: perfectly even.
        (0.0, 1.0)
    };
    let figures = FleetFigures { n_nodes: nodes.len(), n_sessions: total, share: nodes[own].share, cv, busiest_ratio };
    (nodes, figures)
}
