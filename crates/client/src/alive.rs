//! When silence means death. Decides on bytes, not messages: a large message that trickles in is a
//! sign of life, and so is a heartbeat comment.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use futures_util::task::AtomicWaker;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::{Instant, Sleep};

/// How long a connection may be silent while we wait for it; can be changed while it is in use.
#[derive(Clone)]
pub(crate) struct SilenceLimit(Arc<Shared>);

struct Shared {
    ms: AtomicU64,
    waiting: AtomicWaker,
}

impl SilenceLimit {
    pub(crate) fn new(limit: Duration) -> SilenceLimit {
        SilenceLimit(Arc::new(Shared { ms: AtomicU64::new(millis(limit)), waiting: AtomicWaker::new() }))
    }

    /// Applies at once, also to a read that is waiting now.
    pub(crate) fn set(&self, limit: Duration) {
        self.0.ms.store(millis(limit), Ordering::Release);
        self.0.waiting.wake();
    }

    fn get(&self) -> Duration {
        Duration::from_millis(self.0.ms.load(Ordering::Acquire))
    }
}

fn millis(limit: Duration) -> u64 {
    u64::try_from(limit.as_millis()).unwrap_or(u64::MAX)
}

/// A stream whose reads fail with `TimedOut` once the peer was silent for longer than the limit.
/// Time during which nobody reads does not count: then it is we who are slow.
pub(crate) struct Alive<S> {
    stream: S,
    limit: SilenceLimit,
    /// Since when the read in progress has waited.
    since: Option<Instant>,
    alarm: Pin<Box<Sleep>>,
}

impl<S> Alive<S> {
    pub(crate) fn new(stream: S, limit: SilenceLimit) -> Alive<S> {
        Alive { stream, limit, since: None, alarm: Box::pin(tokio::time::sleep(Duration::ZERO)) }
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Alive<S> {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let me = &mut *self;
        if let Poll::Ready(read) = Pin::new(&mut me.stream).poll_read(cx, buf) {
            me.since = None;
            return Poll::Ready(read);
        }
        // Registered before the limit is read: a change in between wakes us.
        me.limit.0.waiting.register(cx.waker());
        let deadline = *me.since.get_or_insert_with(Instant::now) + me.limit.get();
        if me.alarm.deadline() != deadline {
            me.alarm.as_mut().reset(deadline);
        }
        ready!(me.alarm.as_mut().poll(cx));
        Poll::Ready(Err(io::Error::new(io::ErrorKind::TimedOut, "the server gave no sign of life")))
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Alive<S> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(cx, buf)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write_vectored(cx, bufs)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::io::{AsyncReadExt, AsyncWriteExt, duplex};

    const LIMIT: Duration = Duration::from_secs(10);

    #[tokio::test(start_paused = true)]
    async fn silence_ends_a_read_at_the_limit_and_a_byte_starts_it_anew() {
        let (ours, mut theirs) = duplex(64);
        let mut alive = Alive::new(ours, SilenceLimit::new(LIMIT));
        let start = Instant::now();
        let writer = async {
            tokio::time::sleep(LIMIT - Duration::from_millis(1)).await;
            theirs.write_all(b"x").await.unwrap();
            std::future::pending::<()>().await;
        };
        let reader = async {
            assert_eq!(alive.read_u8().await.unwrap(), b'x');
            assert_eq!(alive.read_u8().await.unwrap_err().kind(), io::ErrorKind::TimedOut);
        };
        tokio::select! { () = writer => unreachable!(), () = reader => {} }
        let took = start.elapsed();
        assert!(
            took >= 2 * LIMIT - Duration::from_millis(1) && took < 2 * LIMIT + Duration::from_millis(5),
            "{took:?}"
        );
    }

    #[tokio::test(start_paused = true)]
    async fn time_in_which_nobody_reads_does_not_count() {
        let (ours, _theirs) = duplex(64);
        let mut alive = Alive::new(ours, SilenceLimit::new(LIMIT));
        tokio::time::sleep(10 * LIMIT).await;
        let start = Instant::now();
        assert!(alive.read_u8().await.is_err());
        assert!(start.elapsed() >= LIMIT);
    }

    #[tokio::test(start_paused = true)]
    async fn a_new_limit_counts_for_a_read_that_waits_already() {
        for (limit, expected) in [(LIMIT / 5, LIMIT / 5), (LIMIT * 3, LIMIT * 3)] {
            let (ours, _theirs) = duplex(64);
            let silence = SilenceLimit::new(LIMIT);
            let mut alive = Alive::new(ours, silence.clone());
            let start = Instant::now();
            let read = tokio::spawn(async move { alive.read_u8().await.map_err(|error| error.kind()) });
            tokio::task::yield_now().await;
            silence.set(limit);
            assert_eq!(read.await.unwrap(), Err(io::ErrorKind::TimedOut));
            assert!(start.elapsed() >= expected && start.elapsed() < expected + Duration::from_millis(5));
        }
    }
}
