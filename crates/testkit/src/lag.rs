//! How late the test itself was. Decides nothing: whoever compares instants that its own tasks noted
//! allows for the longest time that none of them had a turn, so that a machine that stood still for a
//! second is no fault of the gateway's, and on a quiet one the bound is as narrow as it was meant.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep_until};

/// Between two looks; a delay that is not far above it does not show.
const LOOK: Duration = Duration::from_millis(10);

/// Watches from its start until it is dropped, as a task beside those of the test.
pub struct Lag {
    longest_ms: Arc<AtomicU64>,
    task: JoinHandle<()>,
}

impl Lag {
    /// Begins to watch the runtime that this is called on.
    pub fn watch() -> Self {
        let longest_ms = Arc::new(AtomicU64::new(0));
        let noted = longest_ms.clone();
        let task = tokio::spawn(async move {
            loop {
                let due = Instant::now() + LOOK;
                sleep_until(due).await;
                let late = u64::try_from(due.elapsed().as_millis()).unwrap_or(u64::MAX);
                noted.fetch_max(late, Ordering::Relaxed);
            }
        });
        Self { longest_ms, task }
    }

    /// The longest that a task which was due had to wait for its turn.
    pub fn longest(&self) -> Duration {
        Duration::from_millis(self.longest_ms.load(Ordering::Relaxed))
    }
}

impl Drop for Lag {
    fn drop(&mut self) {
        self.task.abort();
    }
}
