//! One coarse timer wheel for all sessions: pings, leaves, deadlines. Decides only when a session
//! is looked at again; what is then due the session says itself. A session costs one weak pointer
//! here and no timer of its own.

use std::collections::BTreeMap;
use std::sync::{Mutex, Weak};
use std::time::Duration;

use tokio::time::Instant;

use crate::session::Session;

/// Resolution of everything the wheel drives. 100 ms: a timer wake-up is dear (a 20-ms beat cost
/// 0.6 % of a core where it was measured), and no promise is finer than half a second.
pub const TICK: Duration = Duration::from_millis(100);

/// A tick since the wheel's start. Enough of them for 13 years.
pub type Tick = u32;

/// The wheel. Slots are absolute, so nothing drifts however late a turn is.
pub struct Wheel {
    started: Instant,
    slots: Mutex<BTreeMap<Tick, Vec<Weak<Session>>>>,
}

impl Wheel {
    /// An empty wheel whose tick 0 is now.
    pub fn new() -> Self {
        Self { started: Instant::now(), slots: Mutex::default() }
    }

    /// The first tick at or after `at`.
    pub fn tick_at(&self, at: Instant) -> Tick {
        let since = at.saturating_duration_since(self.started);
        Tick::try_from(since.as_nanos().div_ceil(TICK.as_nanos())).unwrap_or(Tick::MAX)
    }

    /// Has this session looked at when `tick` comes.
    pub fn add(&self, tick: Tick, session: Weak<Session>) {
        self.slots.lock().expect("no panic while the wheel is held").entry(tick).or_default().push(session);
    }

    /// All that are due now, with the tick they were added for.
    pub fn due(&self, now: Instant) -> Vec<(Tick, Vec<Weak<Session>>)> {
        let now = Tick::try_from(now.saturating_duration_since(self.started).as_nanos() / TICK.as_nanos())
            .unwrap_or(Tick::MAX);
        let mut slots = self.slots.lock().expect("no panic while the wheel is held");
        let later = slots.split_off(&now.saturating_add(1));
        std::mem::replace(&mut *slots, later).into_iter().collect()
    }
}

impl Default for Wheel {
    fn default() -> Self {
        Self::new()
    }
}
