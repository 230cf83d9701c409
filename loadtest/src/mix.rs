//! Which of a crowd speak which wire.

use clap::ValueEnum;

use crate::wire::Transport;

/// How a crowd connects.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Mix {
    /// All by WebSocket
    Ws,
    /// All by server-sent events
    Sse,
    /// By turns
    Mixed,
}

impl Mix {
    /// How the `n`-th of them connects.
    pub fn of(self, n: usize) -> Transport {
        match self {
            Mix::Ws => Transport::Ws,
            Mix::Sse => Transport::Sse,
            Mix::Mixed if n.is_multiple_of(2) => Transport::Ws,
            Mix::Mixed => Transport::Sse,
        }
    }

    /// The word on the command line.
    pub fn word(self) -> &'static str {
        match self {
            Mix::Ws => "ws",
            Mix::Sse => "sse",
            Mix::Mixed => "mixed",
        }
    }
}
