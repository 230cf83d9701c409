//! The driver's side of a session: what a socket's loop tells the hub, and the guard by which a
//! session's books are closed whatever happens to that loop.

use std::sync::Arc;
use std::task::Waker;
use std::time::Duration;

use tokio::time::Instant;

use crate::close::CloseReason;
use crate::cursor::EventId;
use crate::hub::Hub;
use crate::inbound;
use crate::outbox::{Batch, Outlet};
use crate::plugin::Inbound;
use crate::session::{Attention, Session};

/// An open session in the hands of its driver. Dropping it closes the books, whatever happened to
/// the driver: `opened` and `closed` pair exactly.
pub struct Open {
    pub(crate) hub: Arc<Hub>,
    pub(crate) session: Arc<Session>,
}

impl Open {
    /// The session.
    pub fn session(&self) -> &Arc<Session> {
        &self.session
    }

    /// The first batch: the response head, and `hello` if it is queued, in one write.
    pub fn begin(&self, head: bytes::Bytes) -> Batch {
        self.session.lock().outbox.take_behind(head)
    }

    /// Lends the socket to whoever offers events, once `begin` was called: see `Outlet`. It is given
    /// back with the session's end.
    pub fn lend(&self, outlet: Arc<dyn Outlet>) {
        self.session.lend(outlet);
    }

    /// See `Session::attend`.
    pub fn attend(&self, waker: &Waker, batch: &mut Batch) -> Attention {
        self.session.attend(waker, batch)
    }

    /// The kernel took `n` bytes, or wants no more for the moment.
    pub fn progress(&self, n: usize, is_blocked: bool) {
        if self.session.progress(n, is_blocked, Instant::now()) {
            self.hub.arm(&self.session);
        }
    }

    /// Events whose last byte went to the kernel; the id of the newest measures the delivery.
    pub fn delivered(&self, n: u64, newest: Option<EventId>) {
        self.hub.metrics.delivered(self.session.info.wire, n);
        let was_live = |age: &Duration| self.session.was_open_for(*age, Instant::now());
        if let Some(age) = newest.map(|id| self.hub.age_of(id)).filter(was_live) {
            self.hub.metrics.delivery_seconds(age.as_secs_f64(), 1);
        }
    }

    /// A whole message from the client.
    pub fn received(&self, message: Inbound) {
        inbound::received(&self.hub, &self.session, message);
    }

    /// A ping: answered like an event, so that a peer who does not read is slow.
    pub fn pinged(&self, pong: bytes::Bytes) {
        self.session.send(pong);
        if self.session.is_overfull(self.hub.config.session.outbox_bytes) {
            self.end(CloseReason::Slow);
        }
    }

    /// The client closed.
    pub fn client_closed(&self, code: Option<u16>) {
        self.session.client_closed(code, &self.hub.config.session);
        self.hub.arm(&self.session);
    }

    /// Ends it now.
    pub fn end(&self, reason: CloseReason) {
        self.hub.end(&self.session, reason);
    }

    /// The longest message that is taken from a client, bytes.
    pub fn max_message(&self) -> usize {
        self.hub.config.max_message
    }
}

impl Drop for Open {
    fn drop(&mut self) {
        self.hub.bury(&self.session, CloseReason::Lost);
    }
}
