//! One run of events to everybody who hears its channel. Decides who writes, and how many threads
//! take part: what nothing waits before is written on the spot, for to wake a task costs more than all
//! else that is ours in a delivery (measured: 1.4 us of 3.3 beside a write of 14 on a large channel, 6
//! of 34 in all where each channel has one listener); a large channel's listeners are shared out to all workers, and the run is over when all have done theirs.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use tokio::sync::mpsc;
use tokio::task::{JoinError, JoinSet, yield_now};
use tokio::time::Instant;

use crate::backplane::FromLink;
use crate::close::CloseReason;
use crate::event::{Run, Wire};
use crate::fanout::Listener;
use crate::hub::Hub;
use crate::session::{Offer, Rest, Route};

/// Events offered between two yields: a big fan-out lets probes, accepts and other tasks of its
/// worker in. 128 writes of 10 us are over well before anybody waits for them.
pub(super) const CHUNK: usize = 128;

/// Who writes what comes next. With the link half full one thread cannot keep up with many small channels:
/// their sessions' drivers write, on all threads.
pub(super) fn route(hub: &Hub, link: &mpsc::Receiver<FromLink>) -> Route {
    let is_far_behind = link.len() > link.max_capacity() / 2;
    if is_far_behind && n_workers(hub) > 1 { Route::Driver } else { Route::AtOnce }
}

fn n_workers(hub: &Hub) -> usize {
    hub.runtime.metrics().num_workers()
}

/// Offers the run to every listener of its channel; over when all have it in hand. Returns to how many it
/// was offered without a yield. `scratch` is empty before and after.
///
/// # Cancel safety
/// None: some have the run then and others not.
pub(super) async fn spread(hub: &Arc<Hub>, run: Run, route: Route, scratch: &mut Vec<Listener>) -> usize {
    let work =
        Work { hub: hub.clone(), step: (CHUNK / run.events().len()).max(1), run, route, next: AtomicUsize::new(0) };
    // Nearly every channel ends here.
    let (n_offered, more) = work.step(scratch);
    if !more {
        return n_offered;
    }
    let work = Arc::new(work);
    let mut others = JoinSet::new();
    for _ in 1..n_workers(hub) {
        let work = work.clone();
        others.spawn_on(async move { work.rest(&mut Vec::new()).await }, &hub.runtime);
    }
    yield_now().await;
    work.rest(scratch).await;
    while let Some(done) = others.join_next().await {
        // Cancelled ones: the runtime ends, and everybody with it.
        if let Err(Ok(panic)) = done.map_err(JoinError::try_into_panic) {
            std::panic::resume_unwind(panic);
        }
    }
    0
}

/// So many sessions are fetched from memory together before they are offered anything. Few enough to
/// be there still when their turn comes: the kernel goes through some 10 KB of its own for each.
const FETCHED: usize = 8;

/// A run, and how far it has come.
struct Work {
    hub: Arc<Hub>,
    run: Run,
    route: Route,
    /// Slots looked at in one go.
    step: usize,
    /// The first slot that nobody has looked at.
    next: AtomicUsize,
}

impl Work {
    async fn rest(&self, scratch: &mut Vec<Listener>) {
        while self.step(scratch).1 {
            yield_now().await;
        }
    }

    /// Offers the run to the next few; returns to how many, and whether there are more.
    fn step(&self, scratch: &mut Vec<Listener>) -> (usize, bool) {
        let from = self.next.fetch_add(self.step, Ordering::Relaxed);
        let more = self.hub.channels.listeners(self.run.channel(), from, self.step, scratch);
        let n_offered = scratch.len();
        if n_offered > 0 {
            self.offer(scratch);
        }
        (n_offered * self.run.events().len(), more.is_some())
    }

    fn offer(&self, listeners: &mut Vec<Listener>) {
        let how = Offer { cap: self.hub.config.session.outbox_bytes, now: Instant::now(), route: self.route };
        let newest = self.run.last_id();
        let age = newest.map(|id| self.hub.age_of(id));
        let (mut n_written, mut n_in_time) = ([0; 2], 0);
        let mut left = listeners.drain(..);
        while !left.as_slice().is_empty() {
            left.as_slice().iter().take(FETCHED).for_each(|listener| listener.session.fetch());
            for listener in left.by_ref().take(FETCHED) {
                let session = &listener.session;
                let offered = session.offer(&self.run, listener.sub(), &how);
                if offered.n_written > 0 {
                    n_written[session.info.wire as usize] += offered.n_written as u64;
                    n_in_time += usize::from(age.is_some_and(|age| session.was_open_for(age, how.now)));
                }
                if offered.rest == Rest::Overflowed {
                    self.hub.end(session, CloseReason::Slow);
                }
            }
        }
        for wire in [Wire::Ws, Wire::Sse] {
            self.hub.metrics.delivered(wire, n_written[wire as usize]);
        }
        if let (Some(id), 1..) = (newest, n_in_time) {
            // All at their last one's time: a few of a thousandth of a second too much.
            self.hub.metrics.delivery_seconds(self.hub.age_of(id).as_secs_f64(), n_in_time);
        }
    }
}
