//! How much of a call is read, and how much memory bodies may take together. Memory is taken for
//! bytes, never for a promise of them: a body of which nothing has come holds nothing.
//!
//! Small bodies have memory of their own, which no large one waits for or is kept waiting in: a
//! revocation gets through whatever else is being uploaded. A body that says its length takes memory
//! for all of it, once, and waits for that in its turn. One that does not (chunked) takes more as it
//! grows, and does not wait while it holds some: two such bodies could wait for each other. What a
//! body took beyond its length is free again when it is here.

use std::time::Duration;

use axum::body::{Body, HttpBody};
use bytes::{Bytes, BytesMut};
use http_body_util::BodyExt;
use hub::clock::Dice;
use hub::refusal::{Refusal, RefusalCode};
use tokio::sync::{Semaphore, SemaphorePermit};
use tokio::time::{Instant, timeout, timeout_at};

use super::RETRY;

/// Largest body, unless one message of `GATEWAY_MAX_MESSAGE` needs more.
const MAX_BODY_BYTES: usize = 16 << 20;

/// What an event's envelope may add to its `data`: names, key, escapes.
const ENVELOPE_BYTES: usize = 64 << 10;

/// So many of the largest bodies fit into memory at once; smaller ones in proportion.
const N_LARGEST_BODIES: usize = 4;

/// Up to this a body is small: one event of the usual size, or any order (a revocation has a few
/// hundred bytes).
const SMALL_KIB: usize = 64;

/// So many of the largest small bodies fit into their memory at once: 16 MiB, and 16,384 bodies of
/// at most a KiB.
const N_SMALL_BODIES: usize = 256;

/// For the first byte of a body, for its memory, and for the rest: each. Ten seconds carry 16 MiB at
/// 13 Mbit/s.
const BODY_TIMEOUT: Duration = Duration::from_secs(10);

/// The memory that bodies may take together. A permit is a KiB.
pub(super) struct Bodies {
    max: usize,
    small: Semaphore,
    large: Semaphore,
    dice: Dice,
}

/// A body's memory, given back when this is dropped: to be held as long as the body.
pub(super) type Memory<'a> = SemaphorePermit<'a>;

impl Bodies {
    pub(super) fn new(max_message: usize, dice: Dice) -> Self {
        let max = MAX_BODY_BYTES.max(max_message + ENVELOPE_BYTES);
        Self {
            max,
            small: Semaphore::new(N_SMALL_BODIES * SMALL_KIB),
            large: Semaphore::new(N_LARGEST_BODIES * kib(max)),
            dice,
        }
    }

    /// A whole body as text, and its memory.
    ///
    /// # Errors
    /// `payload_too_large`, `bad_request` (cut off, too slow, no UTF-8), `overloaded` (others'
    /// bodies take the memory: come again).
    ///
    /// # Cancel safety
    /// What was read is lost, and its memory given back.
    pub(super) async fn read(&self, mut body: Body) -> Result<(Text, Memory<'_>), Refusal> {
        let hint = body.size_hint();
        if hint.lower() > self.max as u64 {
            return Err(self.too_large());
        }
        let announced = hint.exact().and_then(|n| usize::try_from(n).ok());
        let first = piece(&mut body, Instant::now() + BODY_TIMEOUT).await?.unwrap_or_default();
        if first.len() > self.max {
            return Err(self.too_large());
        }
        let mut memory = self.take(announced.unwrap_or_default().max(first.len())).await?;
        let deadline = Instant::now() + BODY_TIMEOUT;
        let mut bytes = BytesMut::with_capacity(announced.unwrap_or_default());
        bytes.extend_from_slice(&first);
        while let Some(more) = piece(&mut body, deadline).await? {
            let n_bytes = bytes.len() + more.len();
            if n_bytes > self.max {
                return Err(self.too_large());
            }
            if kib(n_bytes) > memory.num_permits() {
                self.grow(&mut memory, n_bytes)?;
            }
            bytes.extend_from_slice(&more);
        }
        drop(memory.split(memory.num_permits() - kib(bytes.len())));
        Ok((Text::new(bytes.freeze())?, memory))
    }

    fn of(&self, n_kib: usize) -> &Semaphore {
        if n_kib > SMALL_KIB { &self.large } else { &self.small }
    }

    /// The first memory of a body: waits its turn.
    async fn take(&self, n_bytes: usize) -> Result<Memory<'_>, Refusal> {
        let n = kib(n_bytes);
        let taken = timeout(BODY_TIMEOUT, self.of(n).acquire_many(permits(n))).await;
        Ok(taken.map_err(|_| self.overloaded())?.expect("nobody closes these"))
    }

    /// At least `n_bytes` and twice what it has, at once or not at all.
    fn grow<'a>(&'a self, memory: &mut Memory<'a>, n_bytes: usize) -> Result<(), Refusal> {
        let has = memory.num_permits();
        let wants = kib(n_bytes).max((2 * has).min(kib(self.max)));
        let try_take = |n| self.of(wants).try_acquire_many(permits(n)).map_err(|_| self.overloaded());
        if std::ptr::eq(self.of(wants), self.of(has)) {
            memory.merge(try_take(wants - has)?);
        } else {
            *memory = try_take(wants)?;
        }
        Ok(())
    }

    fn overloaded(&self) -> Refusal {
        let after = self.dice.between(RETRY.0, RETRY.1);
        Refusal::retry(RefusalCode::Overloaded, "too many large bodies at once", after)
    }

    fn too_large(&self) -> Refusal {
        Refusal::new(RefusalCode::PayloadTooLarge, format!("a body has at most {} bytes", self.max))
    }
}

/// The KiB of so many bytes; an empty body counts as one, for it is a call that is under way.
fn kib(n_bytes: usize) -> usize {
    n_bytes.div_ceil(1024).max(1)
}

fn permits(n_kib: usize) -> u32 {
    u32::try_from(n_kib).expect("a message has at most some MiB")
}

/// The next bytes of a body; `None` at its end.
async fn piece(body: &mut Body, deadline: Instant) -> Result<Option<Bytes>, Refusal> {
    let late = |_| Refusal::new(RefusalCode::BadRequest, "the body did not come in time");
    while let Some(frame) = timeout_at(deadline, body.frame()).await.map_err(late)? {
        let frame = frame.map_err(|_| Refusal::new(RefusalCode::BadRequest, "the body was cut off"))?;
        // The other kind are trailers, which say nothing to us.
        if let Ok(bytes) = frame.into_data()
            && !bytes.is_empty()
        {
            return Ok(Some(bytes));
        }
    }
    Ok(None)
}

/// A body that is UTF-8.
#[derive(Debug)]
pub(super) struct Text(Bytes);

impl Text {
    pub(super) fn new(bytes: Bytes) -> Result<Self, Refusal> {
        match std::str::from_utf8(&bytes) {
            Ok(_) => Ok(Self(bytes)),
            Err(e) => {
                Err(Refusal::new(RefusalCode::BadRequest, format!("the body is no UTF-8 at byte {}", e.valid_up_to())))
            }
        }
    }

    pub(super) fn as_str(&self) -> &str {
        std::str::from_utf8(&self.0).expect("checked by new")
    }
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;
    use std::pin::Pin;
    use std::sync::Arc;
    use std::task::{Context, Poll};

    use futures_util::{StreamExt, stream};
    use hyper::body::{Frame, SizeHint};
    use tokio::task::JoinHandle;

    use super::*;

    fn bodies() -> Arc<Bodies> {
        Arc::new(Bodies::new(64 << 10, Dice::seeded(1)))
    }

    fn code<T>(result: Result<T, Refusal>) -> &'static str {
        result.map_or_else(|refusal| refusal.code.word(), |_| "ok")
    }

    /// A body of spaces that does not say its length: comes at once, in these pieces.
    fn chunked(pieces: &[usize]) -> Body {
        let pieces: Vec<_> = pieces.iter().map(|n| Ok::<_, Infallible>(vec![b' '; *n])).collect();
        Body::from_stream(stream::iter(pieces))
    }

    /// As `chunked`, and then nothing more comes, nor the end.
    fn stalled(pieces: &[usize]) -> Body {
        let pieces: Vec<_> = pieces.iter().map(|n| Ok::<_, Infallible>(vec![b' '; *n])).collect();
        Body::from_stream(stream::iter(pieces).chain(stream::pending()))
    }

    /// Reads it on a task of its own, and comes back when that has got as far as it gets.
    async fn reading(bodies: &Arc<Bodies>, body: Body) -> JoinHandle<&'static str> {
        let bodies = bodies.clone();
        let task = tokio::spawn(async move { code(bodies.read(body).await) });
        for _ in 0..8 {
            tokio::task::yield_now().await;
        }
        task
    }

    #[tokio::test]
    async fn a_body_is_read_up_to_the_limit_and_not_beyond() {
        let bodies = bodies();
        for (n, expected) in [(0, "ok"), (MAX_BODY_BYTES, "ok"), (MAX_BODY_BYTES + 1, "payload_too_large")] {
            assert_eq!(code(bodies.read(Body::from(vec![b' '; n])).await), expected, "{n}");
            assert_eq!(code(bodies.read(chunked(&[n])).await), expected, "{n} unannounced");
            assert_eq!(code(bodies.read(chunked(&[n / 2, n - n / 2])).await), expected, "{n} in two");
        }
        assert_eq!(code(bodies.read(Body::from(&b"\"\xed\xa0\x80\""[..])).await), "bad_request");
        let cut = Body::from_stream(stream::iter([Ok("{"), Err(std::io::Error::other("gone"))]));
        assert_eq!(code(bodies.read(cut).await), "bad_request");
        assert_eq!(
            Bodies::new(16 << 20, Dice::seeded(1)).max,
            (16 << 20) + ENVELOPE_BYTES,
            "one whole message always fits"
        );
    }

    #[tokio::test]
    async fn what_was_read_is_what_came_whole_or_in_pieces() {
        let text: String = (0..40_000).map(|i| format!("{i},")).collect();
        let pieces: Vec<_> = text.as_bytes().chunks(7_000).map(|piece| Ok::<_, Infallible>(piece.to_vec())).collect();
        let bodies = bodies();
        for body in [Body::from(text.clone()), Body::from_stream(stream::iter(pieces))] {
            let (read, memory) = bodies.read(body).await.unwrap();
            assert_eq!(read.as_str(), text);
            assert_eq!(memory.num_permits(), text.len().div_ceil(1024), "it holds what it is, and no more");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_small_body_never_waits_for_large_ones_however_these_stand() {
        let bodies = bodies();
        let began = Instant::now();
        let largest = MAX_BODY_BYTES;
        let mut others = Vec::new();
        // They hold all the memory of large ones; behind these wait as many again.
        for _ in 0..2 * N_LARGEST_BODIES {
            let announced = Announced { rest: Some(Bytes::from_static(b"[")), n: largest as u64 };
            others.push(reading(&bodies, Body::new(announced)).await);
        }
        // These have no length and stand still at every size.
        for pieces in [&[][..], &[1], &[SMALL_KIB << 10], &[SMALL_KIB << 10, 1], &[largest - 1]] {
            others.push(reading(&bodies, stalled(pieces)).await);
        }
        assert_eq!(code(bodies.read(Body::from("{}")).await), "ok");
        assert_eq!(code(bodies.read(chunked(&[2])).await), "ok");
        assert_eq!(code(bodies.read(Body::from(vec![b' '; SMALL_KIB << 10])).await), "ok");
        assert_eq!(began.elapsed(), Duration::ZERO);
        // Nobody stays for ever either.
        for other in others {
            assert!(["bad_request", "overloaded"].contains(&other.await.unwrap()));
        }
        assert!(began.elapsed() <= 3 * BODY_TIMEOUT, "{:?}", began.elapsed());
        assert_eq!(bodies.large.available_permits(), N_LARGEST_BODIES * kib(bodies.max));
        assert_eq!(bodies.small.available_permits(), N_SMALL_BODIES * SMALL_KIB);
    }

    #[tokio::test(start_paused = true)]
    async fn a_body_of_which_nothing_came_keeps_nobody_waiting() {
        let bodies = bodies();
        let began = Instant::now();
        for _ in 0..100 {
            reading(&bodies, stalled(&[])).await;
            reading(&bodies, Body::new(Announced { rest: None, n: MAX_BODY_BYTES as u64 })).await;
        }
        assert_eq!(code(bodies.read(Body::from(vec![b' '; MAX_BODY_BYTES])).await), "ok");
        assert_eq!(began.elapsed(), Duration::ZERO);
    }

    #[tokio::test(start_paused = true)]
    async fn bodies_together_take_bounded_memory_and_come_in_their_turn() {
        let bodies = bodies();
        let mut held = Vec::new();
        for _ in 0..N_LARGEST_BODIES {
            held.push(bodies.read(Body::from(vec![b' '; MAX_BODY_BYTES])).await.unwrap());
        }
        // Full: one that grows does not wait, one that says its length does.
        let began = Instant::now();
        assert_eq!(code(bodies.read(chunked(&[SMALL_KIB << 10, 1])).await), "overloaded");
        assert_eq!(began.elapsed(), Duration::ZERO);
        let large = || Body::from(vec![b' '; (SMALL_KIB << 10) + 1]);
        assert_eq!(code(bodies.read(large()).await), "overloaded");
        assert_eq!(began.elapsed(), BODY_TIMEOUT);
        let waiting = reading(&bodies, large()).await;
        held.pop();
        assert_eq!(waiting.await.unwrap(), "ok");
        assert_eq!(began.elapsed(), BODY_TIMEOUT);
        assert_eq!(code(bodies.read(chunked(&[SMALL_KIB << 10, 1])).await), "ok");
    }

    /// Says its length, gives these bytes, and stands still.
    struct Announced {
        rest: Option<Bytes>,
        n: u64,
    }

    impl HttpBody for Announced {
        type Data = Bytes;
        type Error = Infallible;

        fn poll_frame(
            mut self: Pin<&mut Self>,
            _cx: &mut Context<'_>,
        ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
            match self.rest.take() {
                Some(bytes) => Poll::Ready(Some(Ok(Frame::data(bytes)))),
                None => Poll::Pending,
            }
        }

        fn size_hint(&self) -> SizeHint {
            SizeHint::with_exact(self.n)
        }
    }
}
