//! One coarse timer wheel for all sessions: pings, leaves, deadlines. Decides only when a session
//! is looked at again; what is then due the session says itself. A session costs one word here and no
//! timer of its own. The word is its id: a pointer, a weak one too, would keep the memory of whoever
//! left until its turn comes, of a storm's whole crowd for half a minute and more.

use std::collections::BTreeMap;
use std::sync::Mutex;
use std::time::Duration;

use tokio::time::Instant;

use crate::session::SessionId;

/// Resolution of everything the wheel drives. 100 ms: a timer wake-up is dear (a 20-ms beat cost
/// 0.6 % of a core where it was measured), and no promise is finer than half a second.
pub const TICK: Duration = Duration::from_millis(100);

/// A tick since the wheel's start. Enough of them for 13 years.
pub type Tick = u32;

/// The wheel. Slots are absolute, so nothing drifts however late a turn is.
pub struct Wheel {
    started: Instant,
    /// Ids as the bits that they are.
    slots: Mutex<BTreeMap<Tick, Vec<u64>>>,
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
    pub fn add(&self, tick: Tick, session: &SessionId) {
        self.slots.lock().expect("no panic while the wheel is held").entry(tick).or_default().push(session.bits());
    }

    /// All that are due now, with the tick they were added for. Who left is among them.
    pub fn due(&self, now: Instant) -> impl Iterator<Item = (Tick, impl Iterator<Item = SessionId>)> {
        let now = Tick::try_from(now.saturating_duration_since(self.started).as_nanos() / TICK.as_nanos())
            .unwrap_or(Tick::MAX);
        let mut slots = self.slots.lock().expect("no panic while the wheel is held");
        let later = slots.split_off(&now.saturating_add(1));
        let due = std::mem::replace(&mut *slots, later);
        due.into_iter().map(|(tick, ids)| (tick, ids.into_iter().map(SessionId::new)))
    }
}

impl Default for Wheel {
    fn default() -> Self {
        Self::new()
    }
}
