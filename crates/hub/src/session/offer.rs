//! What becomes of live events that are offered to a session: handed to the kernel at once, queued,
//! held back while history is read, or dropped (rules *floor* and *hold* of the log); and when the
//! outbox is too full for them.

use std::sync::Arc;

use tokio::time::Instant;

use super::{Session, Stage, State, SubStage};
use crate::channel::Channel;
use crate::cursor::EventId;
use crate::event::{Encoded, Run, Wire};
use crate::outbox::{Item, Outlet};

/// At most so many bytes of live events wait while a session's history is read. What does not fit
/// is read from the log again. 256 KiB: a quarter of the default outbox.
pub(super) const MAX_HELD_BYTES: usize = 256 * 1024;

/// Live events that wait until history was read.
pub(crate) struct Held {
    pub events: Vec<Arc<Encoded>>,
    bytes: usize,
    /// Highest id that did not fit: the log must be read again beyond it.
    pub missed: EventId,
}

impl Held {
    pub fn new() -> Self {
        Self { events: Vec::new(), bytes: 0, missed: EventId::ZERO }
    }

    pub fn push(&mut self, event: &Arc<Encoded>) {
        let size = event.event.data.len() + 128;
        if self.bytes + size > MAX_HELD_BYTES {
            // Ephemeral events have no log to be read again from; they are for who keeps up.
            self.missed = self.missed.max(event.event.id.unwrap_or(EventId::ZERO));
            return;
        }
        self.bytes += size;
        self.events.push(event.clone());
    }

    pub fn bytes(&self) -> usize {
        self.bytes
    }

    pub fn clear(&mut self) {
        *self = Self::new();
    }
}

/// How events are offered to sessions.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Offer {
    /// More bytes than this never wait, the coming event counted.
    pub cap: usize,
    pub now: Instant,
    pub route: Route,
}

/// Who writes what is offered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Route {
    /// Whoever offers it, where nothing waits before it: that spares waking the driver.
    AtOnce,
    /// The session's driver, on whichever thread has time.
    Driver,
}

/// What became of events offered to a session.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Offered {
    /// So many of the oldest are with the kernel already.
    pub n_written: usize,
    pub rest: Rest,
}

/// What became of those that are not.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Rest {
    /// Queued, and the driver was woken.
    Taken,
    /// None are left, or they were held back, or they are not for this session.
    Passed,
    /// One did not fit: the session is to be ended as `slow`.
    Overflowed,
}

impl Session {
    /// Live events of one of its channels (`sub` is the channel's place in `State::subs`), under one
    /// lock and with one wake-up at most, so that they leave in one write. Ends at the first that does
    /// not fit.
    pub(crate) fn offer(&self, run: &Run, sub: usize, how: &Offer) -> Offered {
        let wire = self.info.wire;
        let mut state = self.lock();
        let (n_written, n_settled) = match how.route {
            Route::AtOnce => state.write_now(run, sub, wire, how.now),
            Route::Driver => (0, 0),
        };
        let mut rest = if n_written < n_settled { Rest::Taken } else { Rest::Passed };
        for event in &run.events()[n_settled..] {
            match state.offer(event, sub, wire, how) {
                Rest::Overflowed => return Offered { n_written, rest: Rest::Overflowed },
                Rest::Taken => rest = Rest::Taken,
                Rest::Passed => {}
            }
        }
        let waker = if rest == Rest::Taken { state.waker.take() } else { None };
        drop(state);
        if let Some(waker) = waker {
            waker.wake();
        }
        Offered { n_written, rest }
    }

    /// From now on events go to the socket at once wherever nothing waits before them. The driver has
    /// taken its first batch and writes only what it took: so nobody overtakes anybody.
    pub(crate) fn lend(&self, outlet: Arc<dyn Outlet>) {
        let mut state = self.lock();
        if state.stage != Stage::Gone {
            state.outlet = Some(outlet);
        }
    }
}

impl State {
    fn offer(&mut self, event: &Arc<Encoded>, index: usize, wire: Wire, how: &Offer) -> Rest {
        if !self.is_due(index, &event.event.channel, event.event.id) {
            self.hold_back(event, index);
            return Rest::Passed;
        }
        let size = event.on(wire).len();
        if self.outbox.bytes() > 0 && self.outbox.bytes() + size > how.cap {
            return Rest::Overflowed;
        }
        self.push_event(event.clone(), wire, how.now);
        Rest::Taken
    }

    /// Is an event of this channel and id to go to the client now? Where several leave together the
    /// oldest id decides for all.
    fn is_due(&self, index: usize, channel: &Channel, id: Option<EventId>) -> bool {
        let Some(Some(sub)) = self.subs.get(index) else { return false };
        self.stage == Stage::Live
            && sub.channel == *channel
            && sub.stage == SubStage::Live
            && id.is_none_or(|id| id > self.position)
    }

    /// Keeps it where the history before it is still being read.
    fn hold_back(&mut self, event: &Arc<Encoded>, index: usize) {
        let Some(Some(sub)) = self.subs.get(index) else { return };
        let is_read = self.stage == Stage::Opening || sub.stage == SubStage::Joining;
        if let Some(held) = self.held.as_mut().filter(|_| is_read && sub.channel == event.event.channel) {
            held.push(event);
        }
    }

    /// Hands the run to the kernel, where all of it is for this session and nothing waits before it:
    /// bytes of a batch that the driver is writing count until the kernel has them. Returns how many
    /// of its events are written, and how many are settled: of one that was begun the rest waits.
    fn write_now(&mut self, run: &Run, index: usize, wire: Wire, now: Instant) -> (usize, usize) {
        let may_go = self.outbox.bytes() == 0 && self.is_due(index, run.channel(), run.first_id());
        let Some(outlet) = self.outlet.as_ref().filter(|_| may_go) else { return (0, 0) };
        let (mut left, mut n_written, mut n_settled) = (outlet.write_now(run.on(wire)), 0, 0);
        for event in run.events() {
            let length = event.on(wire).len();
            if left == 0 {
                break;
            }
            self.note_event(event, now.into());
            n_settled += 1;
            if left < length {
                self.outbox.push_begun(Item::Event(event.clone()), wire, left);
                break;
            }
            left -= length;
            n_written += 1;
        }
        (n_written, n_settled)
    }
}
