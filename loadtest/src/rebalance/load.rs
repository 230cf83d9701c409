//! The steady load while sessions move: events for all, and events for one, first of all for those
//! who are away just now. Decides who gets which number; who hears it is `crowd`'s to note.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use tokio::sync::{mpsc, watch};
use tokio::time::{MissedTickBehavior, interval};

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
}

/// Publishes until `is_over` changes.
///
/// # Errors
/// A publish failed: what it did is unknown, and nothing can be said of losses any more.
pub async fn publish(
    world: Arc<World>,
    admin: SocketAddr,
    rates: Rates,
    mut moved: mpsc::Receiver<usize>,
    mut is_over: watch::Receiver<bool>,
) -> Result<Published, String> {
    let mut publisher = Publisher::connect(&Address::of(admin), None).await?;
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
            publisher.publish(COMMON, &format!("{{{MARKER}{}}}", done.n_common)).await?;
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
        publisher.publish(&own_channel(to), &format!("{{{MARKER}{seq}}}")).await?;
        record.n_own_published.store(seq + 1, Ordering::Relaxed);
        done.n_own += 1;
    }
}
