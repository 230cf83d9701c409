//! What the API, the command line and plugins see of a running node. Decides nothing; `hub` does.

use std::sync::Arc;
use std::time::Duration;

use crate::backplane::{Hold, Publish, Published, Revocation, Unavailable};
use crate::departure::Departure;
use crate::event::NotJson;
use crate::fleet::FleetView;
use crate::hub::Hub;

/// Life of the process, watched: tests and drains wait on it, never on sleeps.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Phase {
    /// Not serving yet (waiting for Redis, say).
    Starting,
    /// Open for business.
    Serving,
    /// Leaving: unready, still serving during the grace, then closing on schedule.
    Draining,
    /// Nobody is connected any more.
    Stopped,
}

impl Phase {
    /// Every phase.
    pub const ALL: [Phase; 4] = [Phase::Starting, Phase::Serving, Phase::Draining, Phase::Stopped];

    /// The word in `/readyz` and the label of `gateway_phase`.
    pub fn word(self) -> &'static str {
        match self {
            Phase::Starting => "starting",
            Phase::Serving => "serving",
            Phase::Draining => "draining",
            Phase::Stopped => "stopped",
        }
    }
}

/// How full the node is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Load {
    /// Open sessions.
    pub n_sessions: usize,
    /// `GATEWAY_MAX_SESSIONS` in force.
    pub capacity: usize,
    /// The phase now.
    pub phase: Phase,
}

/// A publish that did not happen, or may not have.
#[derive(Debug, Clone, thiserror::Error)]
pub enum PublishError {
    /// A plugin dropped the event: for good.
    #[error("a plugin refused the event")]
    Dropped,
    /// `data` is over `GATEWAY_MAX_MESSAGE`: for good.
    #[error("data has {size} bytes, at most {max} are allowed (GATEWAY_MAX_MESSAGE)")]
    TooLarge {
        /// Bytes of `data`.
        size: usize,
        /// The limit in force.
        max: usize,
    },
    /// `data` is no JSON: for good.
    #[error(transparent)]
    NotJson(#[from] NotJson),
    /// Unknown whether it was stored: repeat with the same key.
    #[error(transparent)]
    Unavailable(#[from] Unavailable),
}

/// What the API, the command line and plugins may do with a running node. Cheap to clone.
#[derive(Clone)]
pub struct GatewayHandle {
    pub(crate) hub: Arc<Hub>,
}

impl GatewayHandle {
    /// Publishes through the plugins to every node.
    ///
    /// # Errors
    /// See `PublishError`.
    pub async fn publish(&self, event: Publish) -> Result<Published, PublishError> {
        self.hub.publish(event).await
    }

    /// Asks sessions of this node to leave; returns how many were asked.
    pub fn depart(&self, departure: Departure) -> usize {
        self.hub.depart(departure)
    }

    /// How full the node is.
    pub fn load(&self) -> Load {
        self.hub.load()
    }

    /// The fleet as this node knows it: from memory, seconds old.
    pub fn fleet(&self) -> FleetView {
        self.hub.fleet()
    }

    /// This node's name.
    pub fn node(&self) -> &str {
        &self.hub.config.node
    }

    /// Revokes on every node; kept for `ttl`.
    ///
    /// # Errors
    /// `Unavailable`: not known to be stored, repeat it.
    pub async fn revoke(&self, revocation: Revocation, ttl: Duration) -> Result<(), Unavailable> {
        self.hub.revoke(revocation, ttl).await
    }

    /// Suspends shedding on every node, in place of any other hold: for a time within
    /// `backplane::HOLD_TIMES`, with a reason of at most `backplane::MAX_REASON_BYTES`.
    ///
    /// # Errors
    /// `Unavailable`: not known to hold, repeat it.
    pub async fn hold(&self, time: Duration, reason: String) -> Result<Hold, Unavailable> {
        let hold = self.hub.backplane.hold(Some((time, reason))).await?;
        hold.ok_or_else(|| Unavailable("it answers what is no hold".to_owned()))
    }

    /// Ends the hold, if there is one.
    ///
    /// # Errors
    /// `Unavailable`: perhaps it still holds, repeat it.
    pub async fn release(&self) -> Result<(), Unavailable> {
        self.hub.backplane.hold(None).await.map(|_| ())
    }

    /// Starts this node's drain, as SIGTERM does. Again is harmless.
    pub fn drain(&self) {
        self.hub.drain();
    }
}
