//! What waits for one client. Decides how bytes are counted and in which order they leave; the
//! cap is the session's, the socket is the edge's.
//!
//! An outbox holds pointers to shared events. It allocates only while more than one item waits: a
//! single one has its place in it. A woken driver takes everything at once (`Outbox::take`) and writes
//! it with vectored writes; bytes count until the kernel has them.

use std::collections::VecDeque;
use std::io::IoSlice;
use std::sync::Arc;

use bytes::Bytes;

use crate::event::{Encoded, Wire};

/// Slices offered to one vectored write. 64: a write costs ~10 µs and ~0.3 µs a further frame
/// (measured on loopback), so beyond this nothing is gained, and Linux takes up to 1,024.
pub const MAX_SLICES: usize = 64;

/// The way to a session's socket for whoever offers an event: what nothing waits before is handed to
/// the kernel on the spot, and no task is woken for it.
pub trait Outlet: Send + Sync {
    /// Hands over as many of the bytes as the kernel takes at once, and returns how many. Never waits.
    /// 0 as well where the socket has failed: its driver finds that out.
    fn write_now(&self, bytes: &[u8]) -> usize;
}

/// One thing that waits.
#[derive(Clone, Debug)]
pub enum Item {
    /// A live event, encoded once for all who hear it.
    Event(Arc<Encoded>),
    /// Bytes of this session only, framed for its wire. Boxed: they are few, and every session has room
    /// for an item.
    Own(Box<Bytes>),
}

impl Item {
    /// Of this session only.
    pub fn own(framed: Bytes) -> Self {
        Item::Own(Box::new(framed))
    }

    /// Its bytes for the socket.
    pub fn on(&self, wire: Wire) -> &Bytes {
        match self {
            Item::Event(event) => event.on(wire),
            Item::Own(bytes) => bytes,
        }
    }
}

/// A queue of items. 16 bytes: every idle session has two.
#[derive(Debug, Default)]
enum Queue {
    #[default]
    Empty,
    One(Item),
    /// At least one.
    #[expect(clippy::box_collection, reason = "an idle session holds the pointer only")]
    Many(Box<VecDeque<Item>>),
}

impl Queue {
    fn push(&mut self, item: Item) {
        *self = match std::mem::take(self) {
            Queue::Empty => Queue::One(item),
            Queue::One(first) => Queue::Many(Box::new(VecDeque::from([first, item]))),
            Queue::Many(mut items) => {
                items.push_back(item);
                Queue::Many(items)
            }
        };
    }

    fn push_front(&mut self, item: Item) {
        *self = match std::mem::take(self) {
            Queue::Empty => Queue::One(item),
            Queue::One(second) => Queue::Many(Box::new(VecDeque::from([item, second]))),
            Queue::Many(mut items) => {
                items.push_front(item);
                Queue::Many(items)
            }
        };
    }

    fn pop(&mut self) -> Option<Item> {
        match std::mem::take(self) {
            Queue::Empty => None,
            Queue::One(item) => Some(item),
            Queue::Many(mut items) => {
                let popped = items.pop_front();
                if !items.is_empty() {
                    *self = Queue::Many(items);
                }
                popped
            }
        }
    }

    fn is_empty(&self) -> bool {
        matches!(self, Queue::Empty)
    }

    fn first(&self) -> Option<&Item> {
        self.iter().next()
    }

    fn iter(&self) -> impl Iterator<Item = &Item> {
        let (one, many) = match self {
            Queue::Empty => (None, None),
            Queue::One(item) => (Some(item), None),
            Queue::Many(items) => (None, Some(items.iter())),
        };
        one.into_iter().chain(many.into_iter().flatten())
    }
}

/// The bounded queue of one session; guarded by the session's lock.
#[derive(Debug, Default)]
#[repr(C)]
pub struct Outbox {
    /// First: the one word that a delivery looks at where nothing waits.
    bytes: usize,
    /// Bytes of the first item that the kernel has already.
    begun: usize,
    queue: Queue,
}

impl Outbox {
    /// Bytes that the kernel has not taken yet: queued ones and those of the batch being written.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Is nothing queued? (A batch may still be on its way.)
    pub fn is_empty(&self) -> bool {
        self.queue.is_empty()
    }

    /// Appends. The caller has checked the cap against `bytes() + item's length`.
    pub fn push(&mut self, item: Item, wire: Wire) {
        self.bytes += item.on(wire).len();
        self.queue.push(item);
    }

    /// Appends what the kernel has `begun` bytes of, to an outbox without a byte.
    pub fn push_begun(&mut self, item: Item, wire: Wire, begun: usize) {
        debug_assert!(self.bytes == 0, "something would be overtaken");
        self.push(item, wire);
        self.begun = begun;
        self.written(begun);
    }

    /// Everything queued, to be written. Its bytes stay counted until `written`.
    pub fn take(&mut self) -> Batch {
        Batch { queue: std::mem::take(&mut self.queue), offset: std::mem::take(&mut self.begun) }
    }

    /// Everything queued, behind `head`, in one batch: a response head and the first words leave
    /// in one write.
    pub fn take_behind(&mut self, head: Bytes) -> Batch {
        self.bytes += head.len();
        let mut batch = self.take();
        batch.queue.push_front(Item::own(head));
        batch
    }

    /// The kernel took `n` bytes (or a batch of `n` bytes was thrown away).
    pub fn written(&mut self, n: usize) {
        self.bytes = self.bytes.saturating_sub(n);
    }

    /// Throws away what is queued and not begun; returns how many bytes.
    pub fn discard(&mut self, wire: Wire) -> usize {
        let mut batch = self.take();
        let n = batch.discard_unbegun(wire);
        (self.queue, self.begun) = (batch.queue, batch.offset);
        self.written(n);
        n
    }
}

/// What a driver is writing.
#[derive(Debug, Default)]
pub struct Batch {
    queue: Queue,
    /// Bytes of the first item that the kernel has already.
    offset: usize,
}

impl Batch {
    /// Is everything written?
    pub fn is_empty(&self) -> bool {
        self.queue.is_empty()
    }

    /// Fills `slices` with what is left, in order; returns how many.
    pub fn slices<'a>(&'a self, wire: Wire, slices: &mut [IoSlice<'a>; MAX_SLICES]) -> usize {
        let mut n = 0;
        for (item, slice) in self.queue.iter().zip(slices.iter_mut()) {
            let skip = if n == 0 { self.offset } else { 0 };
            *slice = IoSlice::new(&item.on(wire)[skip..]);
            n += 1;
        }
        n
    }

    /// The kernel took `n` bytes; `done` sees every item that is now wholly written.
    pub fn advance(&mut self, wire: Wire, n: usize, mut done: impl FnMut(&Item)) {
        let mut left = self.offset + n;
        while let Some(item) = self.queue.first() {
            let length = item.on(wire).len();
            if left < length {
                break;
            }
            left -= length;
            done(item);
            self.queue.pop();
        }
        self.offset = left;
    }

    /// Keeps only the item that the kernel has a part of already; returns how many bytes were
    /// thrown away. A frame once begun must be finished, or the stream is out of step.
    pub fn discard_unbegun(&mut self, wire: Wire) -> usize {
        let begun = if self.offset > 0 { self.queue.pop() } else { None };
        let n = self.queue.iter().map(|item| item.on(wire).len()).sum();
        self.queue = begun.map_or(Queue::Empty, Queue::One);
        n
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn own(text: &'static str) -> Item {
        Item::own(Bytes::from_static(text.as_bytes()))
    }

    fn rest(batch: &Batch) -> String {
        let mut slices = [IoSlice::new(&[]); MAX_SLICES];
        let n = batch.slices(Wire::Ws, &mut slices);
        slices[..n].iter().map(|s| std::str::from_utf8(s).unwrap()).collect()
    }

    #[test]
    fn bytes_count_until_the_kernel_has_them_and_order_is_kept() {
        let mut outbox = Outbox::default();
        for text in ["one", "two", "three"] {
            outbox.push(own(text), Wire::Ws);
        }
        let mut batch = outbox.take();
        assert!(outbox.is_empty());
        assert_eq!(outbox.bytes(), 11);
        let mut done = 0;
        batch.advance(Wire::Ws, 4, |_| done += 1);
        outbox.written(4);
        assert_eq!((done, rest(&batch).as_str(), outbox.bytes()), (1, "wothree", 7));
        batch.advance(Wire::Ws, 7, |_| done += 1);
        outbox.written(7);
        assert_eq!((done, batch.is_empty(), outbox.bytes()), (3, true, 0));
    }

    #[test]
    fn a_frame_once_begun_is_finished_and_the_rest_thrown_away() {
        let mut outbox = Outbox::default();
        for text in ["one", "two", "three"] {
            outbox.push(own(text), Wire::Ws);
        }
        let mut batch = outbox.take();
        batch.advance(Wire::Ws, 1, |_| {});
        assert_eq!(batch.discard_unbegun(Wire::Ws), 8);
        assert_eq!(rest(&batch), "ne");
        let mut untouched = Outbox::default().take_behind(Bytes::from_static(b"head"));
        assert_eq!(untouched.discard_unbegun(Wire::Ws), 4);
        assert!(untouched.is_empty());
    }

    #[test]
    fn a_head_leaves_before_what_was_queued_and_is_counted() {
        let mut outbox = Outbox::default();
        outbox.push(own("hello"), Wire::Ws);
        outbox.push(own("!"), Wire::Ws);
        let batch = outbox.take_behind(Bytes::from_static(b"head "));
        assert_eq!((rest(&batch).as_str(), outbox.bytes()), ("head hello!", 11));
    }

    #[test]
    fn what_the_kernel_has_begun_already_goes_on_where_it_stopped_and_is_never_thrown_away() {
        let mut outbox = Outbox::default();
        outbox.push_begun(own("one"), Wire::Ws, 1);
        outbox.push(own("two"), Wire::Ws);
        assert_eq!((outbox.bytes(), outbox.discard(Wire::Ws), outbox.bytes()), (5, 3, 2));
        outbox.push(own("bye"), Wire::Ws);
        let mut batch = outbox.take();
        assert_eq!((rest(&batch).as_str(), outbox.bytes()), ("nebye", 5));
        batch.advance(Wire::Ws, 5, |_| {});
        outbox.written(5);
        assert_eq!((batch.is_empty(), outbox.bytes()), (true, 0));
    }

    #[test]
    fn one_waiting_item_allocates_nothing_and_an_empty_outbox_keeps_nothing() {
        let mut outbox = Outbox::default();
        outbox.push(own("x"), Wire::Ws);
        assert!(matches!(outbox.queue, Queue::One(_)));
        outbox.push(own("y"), Wire::Ws);
        assert!(matches!(outbox.queue, Queue::Many(_)));
        let mut batch = outbox.take();
        batch.advance(Wire::Ws, 2, |_| {});
        assert!(matches!((&batch.queue, &outbox.queue), (Queue::Empty, Queue::Empty)));
    }
}
