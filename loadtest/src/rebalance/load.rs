//! The steady load while sessions move: events for all, and events for one, first of all for those
//! who are away just now. Decides who gets which number; who hears it is `crowd`'s to note.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use tokio::sync::{mpsc, watch};
use tokio::time::{Instant, MissedTickBehavior, interval};

use super::crowd::{COMMON, MARKER, World, own_channel};
use crate::admin::Publisher;
use crate::wire::Address;

/// Events a second.
#[derive(Clone, Copy)]
pub struct Rates {
    pub common: f64,
    pub own: f64,
}

/// What was published.
#[derive(Clone, Copy, Debug, Default)]
pub struct Published {
    pub n_common: u32,
    pub n_own: u32,
    /// Of those, to somebody who had just been moved.
    pub n_moved: u32,
    /// Tried again, with the same key, because the answer was not known.
    pub n_repeated: u32,
}

/// A gateway may say that Redis did not answer in time (250 ms): on a busy machine that happens.
const REPEAT_FOR: Duration = Duration::from_secs(10);
const REPEAT_AFTER: Duration = Duration::from_millis(100);

/// Publishes until `is_over` changes.
///
/// # Errors
/// A publish failed and went on failing: what it did is unknown, and nothing can be said of losses.
pub async fn publish(
    world: Arc<World>,
    admin: SocketAddr,
    rates: Rates,
    mut moved: mpsc::Receiver<usize>,
    mut is_over: watch::Receiver<bool>,
) -> Result<Published, String> {
    let mut back_end = BackEnd { publisher: Publisher::connect(&Address::of(admin), None).await?, admin };
    let pace = |rate: f64| {
        let mut pace = interval(Duration::from_secs_f64(1.0 / rate));
        pace.set_missed_tick_behavior(MissedTickBehavior::Delay);
        pace
    };
    let (mut common, mut own) = (pace(rates.common), pace(rates.own));
    let mut done = Published::default();
    let mut turn = 0;
    loop {
        // Ticks, and a value that only ever becomes true: nothing is lost when another one wins.
        let is_common = tokio::select! {
            biased;
            _ = is_over.changed() => return Ok(done),
            _ = common.tick() => true,
            _ = own.tick() => false,
        };
        if is_common {
            done.n_repeated += back_end.publish(COMMON, done.n_common).await?;
            done.n_common += 1;
            world.n_common_published.store(done.n_common, Ordering::Relaxed);
            continue;
        }
        let to = match moved.try_recv() {
            Ok(n) => {
                done.n_moved += 1;
                n
            }
            Err(_) => {
                turn += 1;
                turn % world.records.len()
            }
        };
        let record = &world.records[to];
        let seq = record.n_own_published.load(Ordering::Relaxed);
        done.n_repeated += back_end.publish(&own_channel(to), seq).await?;
        record.n_own_published.store(seq + 1, Ordering::Relaxed);
        done.n_own += 1;
    }
}

struct BackEnd {
    publisher: Publisher,
    admin: SocketAddr,
}

impl BackEnd {
    /// Publishes event `seq` of a channel once, however often that takes; gives how often more.
    async fn publish(&mut self, channel: &str, seq: u32) -> Result<u32, String> {
        let (data, key) = (format!("{{{MARKER}{seq}}}"), seq.to_string());
        let until = Instant::now() + REPEAT_FOR;
        let mut n_repeated = 0;
        while let Err(why) = self.publisher.publish_keyed(channel, &data, &key).await {
            if Instant::now() >= until {
                return Err(why);
            }
            n_repeated += 1;
            tokio::time::sleep(REPEAT_AFTER).await;
            // The old connection may be closed, or in the middle of an answer.
            if let Ok(publisher) = Publisher::connect(&Address::of(self.admin), None).await {
                self.publisher = publisher;
            }
        }
        Ok(n_repeated)
    }
}
