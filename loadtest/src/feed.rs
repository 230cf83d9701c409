//! A steady load on one channel, of which every delivery's delay is known. Decides when an event is
//! due; its delay counts from then, so that a publisher that is held up hides nothing.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::{Instant, sleep_until};

use crate::fanout::{Event, Source};
use crate::histogram::Histogram;
use crate::readers::Group;

/// Until all that is on its way has come.
pub const PATIENCE: Duration = Duration::from_secs(60);

/// A channel, its readers and whoever publishes on it.
pub struct Feed {
    pub group: Arc<Group>,
    pub source: Source,
    pub channel: &'static str,
    pub n_bytes: usize,
    pub next: u64,
}

impl Feed {
    /// Sends at `rate` events a second for so long; delays are counted in `delays`. Gives the time
    /// from the last event to its last delivery, or `None` where that took longer than `patience`.
    pub async fn load(
        &mut self,
        rate: f64,
        over: Duration,
        delays: &Arc<Histogram>,
        patience: Duration,
    ) -> Result<Option<Duration>, String> {
        self.group.count_in(Arc::clone(delays));
        let n = ((over.as_secs_f64() * rate).ceil() as u64).max(1);
        let begin = Instant::now();
        for at in 0..n {
            let due = begin + Duration::from_secs_f64(at as f64 / rate);
            sleep_until(due).await;
            self.group.sent(self.next, due);
            let event = Event { channel: self.channel, seq: self.next };
            self.source.publish(&[event], self.n_bytes).await?;
            self.next += 1;
        }
        let last = begin + Duration::from_secs_f64((n - 1) as f64 / rate);
        let wanted = self.next * self.group.n_members() as u64;
        let patience = patience.saturating_sub(last.elapsed());
        Ok(self.group.until_received(wanted, patience).await.then(|| last.elapsed()))
    }

    /// Waits for all that is still on its way.
    pub async fn settle(&self) -> Result<(), String> {
        let wanted = self.next * self.group.n_members() as u64;
        if self.group.until_received(wanted, PATIENCE).await {
            return Ok(());
        }
        Err(format!("{} of {wanted} deliveries; ended: {:?}", self.group.n_received(), self.group.ended().first()))
    }
}
