//! Leaving: the one mechanism by which the node ends sessions of its own accord.

use std::sync::Arc;
use std::time::Duration;

use crate::close::CloseReason;

/// Which sessions.
#[derive(Clone, Debug)]
pub enum Who {
    /// All of them.
    All,
    /// All of one user.
    User(Arc<str>),
    /// One, by its id.
    Session(Arc<str>),
}

/// The i-th of n leaves at `(i + U(0,1))·over/n` from now. Only ever moves a session's end earlier.
#[derive(Clone, Debug)]
pub struct Departure {
    /// Which sessions.
    pub who: Who,
    /// With which words.
    pub reason: CloseReason,
    /// Spread over this time; zero: at once.
    pub over: Duration,
}
