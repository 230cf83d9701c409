//! The loop of every open stream, WebSocket and SSE alike: one small future a session owns the
//! bare socket, feeds what it reads to the session and writes what waits in the outbox, all of it
//! in one vectored write. Live events that nothing waits before do not come by here: the hub writes
//! them itself, by the outlet that it is lent. Decides nothing about the session: `hub` does; only
//! how a socket is ended properly stands here.
//!
//! Nothing is read before there is something to read, into a scratch buffer of the thread; nothing
//! is allocated while a session is idle; there is no timer here (the hub's wheel wakes the session
//! when something is due). Everything is polled in place, so nothing can be cancelled half-way.

use std::cell::RefCell;
use std::future::Future;
use std::io::IoSlice;
use std::ops::ControlFlow;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use bytes::{Bytes, BytesMut};
use hub::event::Wire;
use hub::hub::Open;
use hub::outbox::{Batch, Item, MAX_SLICES};
use hub::plugin;
use hub::session::Attention;
use tokio::io::ReadBuf;

use crate::frame::{Assembler, Inbound, Limits, pong_frame};
use crate::socket::Socket;

/// Bytes of one read. 16 KiB: a page of small messages, shared by all sessions of a thread.
const SCRATCH: usize = 16 * 1024;

/// Reads in one turn; then other sessions of the thread have theirs.
const READS_A_TURN: usize = 4;

thread_local! {
    static SCRATCH_BUFFER: RefCell<Box<[u8]>> = RefCell::new(vec![0; SCRATCH].into());
}

/// Drives one session until its socket is done with. Dropping it closes the session's books.
pub struct Driver<S> {
    socket: S,
    open: Open,
    batch: Batch,
    assembler: Assembler,
    /// Bytes that came behind the request's head.
    early: Option<Box<BytesMut>>,
    stage: Stage,
    /// Given back once the response head is out; bounds the memory of handshakes in a storm.
    handshake: Option<Box<dyn Send + Sync>>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Stage {
    Serving,
    /// The peer has said its close (WebSocket), or will say nothing (SSE): once flushed, shut down.
    Leaving,
    /// Our side is shut down; waiting for the peer's end, so that nothing unread resets what we sent.
    Lingering,
}

impl<S: Socket> Driver<S> {
    /// `head` is the response head; `early` what the client sent behind its request's head;
    /// `handshake` is dropped once the head is written.
    pub fn new(socket: S, open: Open, head: Bytes, early: &[u8], handshake: impl Send + Sync + 'static) -> Self {
        let batch = open.begin(head);
        if let Some(outlet) = socket.outlet() {
            open.lend(outlet);
        }
        Self {
            batch,
            socket,
            open,
            assembler: Assembler::new(),
            early: (!early.is_empty()).then(|| Box::new(BytesMut::from(early))),
            stage: Stage::Serving,
            handshake: Some(Box::new(handshake)),
        }
    }

    /// Reads what there is. `Ready` means the peer's end (or a fault) was reached.
    fn read(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        if let Some(mut early) = self.early.take() {
            self.take_in(&mut early);
        }
        SCRATCH_BUFFER.with_borrow_mut(|scratch| {
            for _ in 0..READS_A_TURN {
                let mut buffer = ReadBuf::new(scratch);
                match Pin::new(&mut self.socket).poll_read(cx, &mut buffer) {
                    Poll::Pending => return Poll::Pending,
                    Poll::Ready(Err(_)) => return Poll::Ready(()),
                    Poll::Ready(Ok(())) if buffer.filled().is_empty() => return Poll::Ready(()),
                    Poll::Ready(Ok(())) => self.take_in(buffer.filled_mut()),
                }
            }
            cx.waker().wake_by_ref();
            Poll::Pending
        })
    }

    fn take_in(&mut self, input: &mut [u8]) {
        self.open.session().heard();
        if self.open.session().info.wire == Wire::Sse {
            // Nothing is expected of an event stream's client; what comes is not looked at.
            return;
        }
        let limits = Limits { max_message: self.open.max_message() };
        let (open, stage) = (&self.open, &mut self.stage);
        let fed = self.assembler.feed(input, &limits, &mut |inbound| {
            match inbound {
                Inbound::Text(text) => open.received(plugin::Inbound::Text(text)),
                Inbound::Binary(bytes) => open.received(plugin::Inbound::Binary(bytes)),
                Inbound::Ping(payload) => open.pinged(pong_frame(&payload)),
                Inbound::Pong => {}
                Inbound::Close { code, .. } => {
                    open.client_closed(code);
                    *stage = Stage::Leaving;
                }
            }
            ControlFlow::Continue(())
        });
        if let Err(fault) = fed {
            // The stream is out of step: the peer's own close could not be told any more.
            self.open.end(fault.reason());
            self.stage = Stage::Leaving;
        }
    }

    /// Writes all that waits. `Ready(Some)`: everything is written; `Ready(None)`: cut, or the
    /// socket failed.
    fn write(&mut self, cx: &mut Context<'_>) -> Poll<Option<Attention>> {
        let wire = self.open.session().info.wire;
        loop {
            let attention = self.open.attend(cx.waker(), &mut self.batch);
            if attention == Attention::Cut {
                return Poll::Ready(None);
            }
            if self.batch.is_empty() {
                self.handshake = None;
                return Poll::Ready(Some(attention));
            }
            let mut slices = [IoSlice::new(&[]); MAX_SLICES];
            let n_slices = self.batch.slices(wire, &mut slices);
            // Nearly always one: sendto(2) spares what writev(2) does around it.
            let sent = match &slices[..n_slices] {
                [only] => Pin::new(&mut self.socket).poll_write(cx, only),
                some => Pin::new(&mut self.socket).poll_write_vectored(cx, some),
            };
            match sent {
                Poll::Pending => {
                    self.open.progress(0, true);
                    return Poll::Pending;
                }
                Poll::Ready(Err(_) | Ok(0)) => return Poll::Ready(None),
                Poll::Ready(Ok(n)) => self.wrote(wire, n),
            }
        }
    }

    fn wrote(&mut self, wire: Wire, n: usize) {
        let (mut n_events, mut newest) = (0, None);
        self.batch.advance(wire, n, |item| {
            if let Item::Event(event) = item {
                n_events += 1;
                newest = event.event.id.or(newest);
            }
        });
        self.open.progress(n, !self.batch.is_empty());
        if n_events > 0 {
            self.open.delivered(n_events, newest);
        }
    }
}

impl<S: Socket> Future for Driver<S> {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        let this = &mut *self;
        if this.read(cx).is_ready() {
            // Who said goodbye and closed his half at once may still hear ours.
            if this.stage == Stage::Leaving {
                let _ = this.write(cx);
            }
            return Poll::Ready(());
        }
        if this.stage == Stage::Lingering {
            // Only the peer's end or the wheel's cut is awaited.
            let is_cut = this.open.attend(cx.waker(), &mut this.batch) == Attention::Cut;
            return if is_cut { Poll::Ready(()) } else { Poll::Pending };
        }
        let Some(attention) = ready!(this.write(cx)) else { return Poll::Ready(()) };
        if attention == Attention::Serve {
            return Poll::Pending;
        }
        // All is flushed and nothing will follow. A WebSocket's peer answers our close with its own
        // first; its stage is `Leaving` from then on.
        if this.stage == Stage::Serving && this.open.session().info.wire == Wire::Ws {
            return Poll::Pending;
        }
        if ready!(Pin::new(&mut this.socket).poll_shutdown(cx)).is_err() {
            return Poll::Ready(());
        }
        this.stage = Stage::Lingering;
        cx.waker().wake_by_ref();
        Poll::Pending
    }
}
