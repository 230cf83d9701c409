//! What `/readyz` says, and the words for it. Decides nothing: the judge is `vitals`.

use serde::{Serialize, Serializer};

/// Why a node is not ready.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum Reason {
    Starting,
    Draining,
    AtCapacity,
    Saturated,
    PubsubDown,
    PubsubDeaf,
    FdLow,
}

impl Reason {
    /// Every reason, in the order in which they are told.
    pub const ALL: [Reason; 7] = [
        Reason::Starting,
        Reason::Draining,
        Reason::AtCapacity,
        Reason::Saturated,
        Reason::PubsubDown,
        Reason::PubsubDeaf,
        Reason::FdLow,
    ];

    /// The word in `/readyz` and the label of `gateway_unready`.
    pub const fn word(self) -> &'static str {
        match self {
            Reason::Starting => "starting",
            Reason::Draining => "draining",
            Reason::AtCapacity => "at_capacity",
            Reason::Saturated => "saturated",
            Reason::PubsubDown => "pubsub_down",
            Reason::PubsubDeaf => "pubsub_deaf",
            Reason::FdLow => "fd_low",
        }
    }

    pub(super) fn bit(self) -> u8 {
        1 << self as u8
    }
}

impl Serialize for Reason {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.word())
    }
}

/// The body of `/readyz`.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Readiness {
    /// No reason speaks against it.
    pub ready: bool,
    /// The phase's word.
    pub phase: &'static str,
    /// What speaks against it.
    pub reasons: Vec<Reason>,
    /// Open now.
    pub sessions: usize,
    /// At most so many.
    pub capacity: usize,
    /// 99th percentile of the heartbeat's lateness over the last 10 to 20 s.
    pub lag_p99_ms: u64,
}
