//! What the nodes of a fleet know of each other. Decides what a node says of itself and when, and
//! what the fleet's figures are; whether anybody is to move because of them is decided elsewhere.
//!
//! Reports travel through the backplane and are seconds old: nothing on a client's path waits for
//! them, and with no backplane a node soon knows of nobody but itself. A report that has expired is
//! not counted as an empty node, it is not counted.

use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::Duration;

use arc_swap::ArcSwapOption;
use serde::{Deserialize, Serialize};
use tokio::time::{Instant, sleep};

use crate::backplane::{Report, Unavailable};
use crate::clock::{Clock, Dice};
use crate::cursor::Since;
use crate::hub::{Hub, Phase};
use crate::telemetry::FleetFigures;

/// Reports come within this part of their interval, more or less, so that a fleet that was started
/// together does not write together.
const SPREAD: f64 = 0.2;

/// A report that failed is repeated after about so long.
const RETRY: Duration = Duration::from_secs(1);

/// Form of the reports. Fields are only ever added to it; a higher number means that this version
/// cannot read them.
const FORM: u32 = 1;

/// A cursor may be ahead of this node's time by so much, for clocks differ.
const SKEW: Duration = Duration::from_secs(60);

/// What a node tells its fleet, and what holds over all of it.
#[derive(Clone, Copy, Debug)]
pub struct FleetConfig {
    /// The version that runs.
    pub version: &'static str,
    /// `GATEWAY_FLEET_REPORT`: between two reports.
    pub report_every: Duration,
    /// `GATEWAY_FLEET_TTL`: a node that is silent for so long no longer counts.
    pub ttl: Duration,
    /// `GATEWAY_MAX_SESSIONS_PER_USER`; `None`: no limit.
    pub max_sessions_per_user: Option<NonZeroU32>,
}

impl FleetConfig {
    /// Reports at the default pace, limits nobody.
    pub fn unlimited(version: &'static str) -> Self {
        let (report_every, ttl) = (Duration::from_secs(5), Duration::from_secs(20));
        Self { version, report_every, ttl, max_sessions_per_user: None }
    }
}

/// The fleet as this node knows it.
#[derive(Clone, Debug, PartialEq)]
pub struct FleetView {
    /// By name. This node as it is now, the others as they said last.
    pub nodes: Vec<NodeView>,
    /// Over all of them.
    pub figures: FleetFigures,
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
    /// The version that runs on it.
    pub version: String,
    /// How old this is.
    pub age: Duration,
}

/// What a node says of itself. Others may be of another version: what is not known is left out.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct Said {
    /// `FORM`.
    v: u32,
    sessions: usize,
    capacity: usize,
    phase: String,
    version: String,
    /// Drawn at the start: a restarted node of the same name begins anew.
    boot: String,
    /// Unix seconds.
    started_at: u64,
    /// Sessions a second that it takes in.
    accept_rate: f64,
}

/// What the backplane said last.
pub(crate) struct Snapshot {
    /// Without this node's own.
    others: Vec<(Report, Option<Said>)>,
    birth_ms: u64,
    read_at: Instant,
}

/// What this node knows of its fleet.
pub(crate) struct Fleet {
    pub config: FleetConfig,
    boot: String,
    started_at: u64,
    snapshot: ArcSwapOption<Snapshot>,
}

impl Fleet {
    pub fn new(config: FleetConfig, clock: &Clock, dice: &Dice) -> Self {
        let boot = format!("{:016x}", dice.bits());
        Self { config, boot, started_at: clock.unix().as_secs(), snapshot: ArcSwapOption::empty() }
    }

    /// All other nodes that were there when the backplane was last asked; `None`: it never answered.
    pub fn others(&self) -> Option<Vec<Arc<str>>> {
        let snapshot = self.snapshot.load_full()?;
        Some(snapshot.others.iter().map(|(report, _)| report.node.clone()).collect())
    }
}

/// Reports until the hub stops, then takes this node out of the fleet. A drain is told at once.
pub(crate) async fn run(hub: Arc<Hub>) {
    let mut phases = hub.phases();
    while !hub.stop.is_cancelled() {
        phases.mark_unchanged();
        let mut every = hub.fleet.config.report_every;
        if let Err(error) = refresh(&hub).await {
            tracing::debug!(%error, "this node could not report");
            every = every.min(RETRY);
        }
        hub.metrics.fleet(hub.fleet().figures);
        let pause = hub.dice.between(every.mul_f64(1.0 - SPREAD), every.mul_f64(1.0 + SPREAD));
        tokio::select! {
            () = hub.stop.cancelled() => {}
            _ = phases.changed() => {}
            () = sleep(pause) => {}
        }
    }
    if let Err(error) = hub.backplane.retire().await {
        tracing::debug!(%error, "this node could not take its report away; it ends by itself");
    }
}

/// Reports, and learns what the others have said.
///
/// # Errors
/// `Unavailable`: what was known stays.
pub(crate) async fn refresh(hub: &Hub) -> Result<(), Unavailable> {
    let fleet = &hub.fleet;
    let body = serde_json::to_string(&said(hub)).expect("numbers and words always become JSON");
    let known = hub.backplane.report(body, fleet.config.ttl).await?;
    let others = known.reports.into_iter().filter(|report| report.node != hub.config.node).map(|report| {
        let said = serde_json::from_str::<Said>(&report.body).ok().filter(|said| said.v == FORM);
        if said.is_none() {
            tracing::debug!(node = &*report.node, "a node's report cannot be read by this version");
        }
        (report, said)
    });
    let snapshot = Snapshot { others: others.collect(), birth_ms: known.birth_ms, read_at: Instant::now() };
    fleet.snapshot.store(Some(Arc::new(snapshot)));
    Ok(())
}

fn said(hub: &Hub) -> Said {
    let load = hub.load();
    Said {
        v: FORM,
        sessions: load.n_sessions,
        capacity: load.capacity,
        phase: load.phase.word().to_owned(),
        version: hub.fleet.config.version.to_owned(),
        boot: hub.fleet.boot.clone(),
        started_at: hub.fleet.started_at,
        accept_rate: hub.metrics.accept_rate(),
    }
}

impl Hub {
    /// The fleet as this node knows it: from memory, at once.
    pub fn fleet(&self) -> FleetView {
        let mut nodes = vec![node(self.config.node.clone(), &said(self), Duration::ZERO)];
        if let Some(snapshot) = self.fleet.snapshot.load_full() {
            let since = snapshot.read_at.elapsed();
            let others = snapshot
                .others
                .iter()
                .filter_map(|(report, said)| Some(node(report.node.clone(), said.as_ref()?, report.age + since)));
            nodes.extend(others.filter(|node| node.age < self.fleet.config.ttl));
        }
        nodes.sort_by(|a, b| a.node.cmp(&b.node));
        let own = nodes.iter().position(|node| node.node == self.config.node).expect("it was put there");
        view(nodes, own)
    }

    /// Could this cursor come from an earlier session on this log: does it lie between the log's
    /// birth and now? A hint by which returning clients are told from new ones, and no proof: a
    /// client may write what it likes. Waits for nothing.
    pub fn may_be_returning(&self, since: &Since) -> bool {
        let Since::After(id) = since else { return false };
        // Not known yet: no position is too old.
        let birth_ms = self.fleet.snapshot.load().as_ref().map_or(0, |snapshot| snapshot.birth_ms);
        let now_ms = u64::try_from((self.clock.unix() + SKEW).as_millis()).unwrap_or(u64::MAX);
        (birth_ms..=now_ms.max(self.place.position().ms)).contains(&id.ms)
    }
}

fn node(node: Arc<str>, said: &Said, age: Duration) -> NodeView {
    NodeView {
        node,
        n_sessions: said.sessions,
        capacity: said.capacity,
        share: 0.0,
        target: 0.0,
        phase: said.phase.clone(),
        version: said.version.clone(),
        age,
    }
}

/// Shares, targets and figures. Who does not serve has no share: whoever is still there has to go
/// to the others.
fn view(mut nodes: Vec<NodeView>, own: usize) -> FleetView {
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
    FleetView { nodes, figures }
}

#[cfg(test)]
mod tests;
