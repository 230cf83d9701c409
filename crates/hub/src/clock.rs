//! Time and chance, the only two outside things the hub knows. Decides nothing; it makes what
//! depends on them repeatable in a test. Monotonic time is `tokio::time::Instant` everywhere.

use std::sync::{Arc, Mutex};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use tokio::time::Instant;

/// Wall-clock time that advances with tokio's clock: under a paused clock `exp` moves too.
#[derive(Clone, Debug)]
pub struct Clock {
    started: Instant,
    unix_at_start: Duration,
}

impl Clock {
    /// The system's clock, read once; from then on it advances monotonically with tokio's.
    /// A step of the system clock (NTP) after the start is deliberately not followed.
    pub fn system() -> Self {
        #[allow(clippy::disallowed_methods)]
        let unix = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        Self::at(unix)
    }

    /// A clock that shows `unix` (time since 1970) now.
    pub fn at(unix: Duration) -> Self {
        Self { started: Instant::now(), unix_at_start: unix }
    }

    /// Time since 1970-01-01 UTC.
    pub fn unix(&self) -> Duration {
        self.unix_at_start + self.started.elapsed()
    }

    /// The instant at which this clock will show `unix`; the past gives now.
    pub fn instant_of(&self, unix: Duration) -> Instant {
        Instant::now() + unix.saturating_sub(self.unix())
    }
}

/// The one source of jitter. Cheap to clone; all clones draw from one seeded generator.
#[derive(Clone)]
pub struct Dice(Arc<Mutex<StdRng>>);

impl Dice {
    /// A generator whose whole sequence follows from `seed`.
    pub fn seeded(seed: u64) -> Self {
        Self(Arc::new(Mutex::new(StdRng::seed_from_u64(seed))))
    }

    /// Uniform in `[0, 1)`.
    pub fn unit(&self) -> f64 {
        self.0.lock().expect("no panic while the dice are held").random::<f64>()
    }

    /// Uniform in `[low, high)`; `low` where the range is empty.
    pub fn between(&self, low: Duration, high: Duration) -> Duration {
        low + high.saturating_sub(low).mul_f64(self.unit())
    }

    /// 64 random bits, for session ids and incarnation tags (not for secrets).
    pub fn bits(&self) -> u64 {
        self.0.lock().expect("no panic while the dice are held").random::<u64>()
    }
}

impl std::fmt::Debug for Dice {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Dice")
    }
}
