//! The log's position for those who replay nothing. Decides that newcomers who arrive together are
//! told by one read: in a storm it would otherwise be one of the log's calls for each of them.
//!
//! A read counts for whoever asked before it began: by then their channels were confirmed (rule
//! *confirm*), and the position is the log's at one instant all the same (rule *atomic*).

use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

use tokio::sync::Mutex as Turn;

use crate::backplane::{Facts, Read, Unavailable};

/// Shares reads: those who ask while one is under way share the next.
#[derive(Default)]
pub(crate) struct Position {
    n_asked: AtomicU64,
    /// One read at a time; the others wait in the order in which they came.
    turn: Turn<()>,
    last: Mutex<Option<Known>>,
}

struct Known {
    /// Of those who have asked, so many had when the read began.
    of: u64,
    read: Result<Read, Unavailable>,
}

impl Position {
    /// The log's position at an instant after this call, for `n_channels` channels from `Here`.
    ///
    /// # Errors
    /// As `read`; everybody who shared it is told.
    ///
    /// # Cancel safety
    /// Whoever waits behind a dropped caller reads in its stead.
    pub async fn get(
        &self,
        n_channels: usize,
        read: impl AsyncFnOnce() -> Result<Read, Unavailable>,
    ) -> Result<Read, Unavailable> {
        let mine = self.n_asked.fetch_add(1, Ordering::SeqCst);
        let _turn = self.turn.lock().await;
        if let Some(shared) = self.known(mine) {
            return shared.map(|read| for_channels(read, n_channels));
        }
        let of = self.n_asked.load(Ordering::SeqCst);
        let read = read().await;
        *self.last.lock().expect("a few lines") = Some(Known { of, read: read.clone() });
        read.map(|read| for_channels(read, n_channels))
    }

    fn known(&self, mine: u64) -> Option<Result<Read, Unavailable>> {
        self.last.lock().expect("a few lines").as_ref().filter(|known| known.of > mine).map(|known| known.read.clone())
    }
}

/// Nobody who reads from `Here` looks at what a channel holds.
fn for_channels(read: Read, n: usize) -> Read {
    Read { facts: vec![Facts::default(); n], ..read }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::time::Duration;

    use tokio::time::{Instant, sleep};

    use super::*;
    use crate::cursor::EventId;

    fn at(ms: u64) -> Read {
        Read {
            position: EventId { ms, n: 1 },
            now_ms: ms,
            ttl: Duration::from_secs(60),
            has_history: true,
            broken: None,
            facts: Vec::new(),
            events: Vec::new(),
            more: false,
        }
    }

    /// Reads of 10 ms each; the n-th says n, the one numbered `failing` fails.
    #[derive(Default)]
    struct Log {
        position: Position,
        n_reads: AtomicU64,
        failing: u64,
    }

    impl Log {
        async fn ask(&self) -> Result<u64, Unavailable> {
            let read = self.position.get(3, async || {
                let n = self.n_reads.fetch_add(1, Ordering::SeqCst) + 1;
                sleep(Duration::from_millis(10)).await;
                if n == self.failing { Err(Unavailable("away".to_owned())) } else { Ok(at(n)) }
            });
            read.await.map(|read| {
                assert_eq!(read.facts.len(), 3, "facts for each channel asked for");
                read.position.ms
            })
        }
    }

    #[tokio::test(start_paused = true)]
    async fn who_asks_while_a_read_is_under_way_shares_the_next_and_never_that_one() {
        let log = Arc::new(Log::default());
        let first = tokio::spawn({
            let log = log.clone();
            async move { log.ask().await }
        });
        sleep(Duration::from_millis(5)).await;
        let crowd: Vec<_> = (0..1_000)
            .map(|_| {
                let log = log.clone();
                tokio::spawn(async move { log.ask().await })
            })
            .collect();
        assert_eq!(first.await.unwrap().unwrap(), 1);
        for asked in crowd {
            assert_eq!(asked.await.unwrap().unwrap(), 2, "a read that began before it was asked for");
        }
        assert_eq!(log.n_reads.load(Ordering::SeqCst), 2);
        // And what is known is old for who comes later.
        assert_eq!(log.ask().await.unwrap(), 3);
    }

    #[tokio::test(start_paused = true)]
    async fn a_failed_read_is_everybodys_who_shared_it_and_a_cancelled_one_nobodys() {
        let log = Arc::new(Log { failing: 2, ..Log::default() });
        let asks: Vec<_> = (0..10)
            .map(|_| {
                let log = log.clone();
                tokio::spawn(async move { log.ask().await })
            })
            .collect();
        let start = Instant::now();
        let outcomes: Vec<bool> = {
            let mut all = Vec::new();
            for ask in asks {
                all.push(ask.await.unwrap().is_ok());
            }
            all
        };
        assert_eq!(outcomes.iter().filter(|ok| **ok).count(), 1, "the first alone: {outcomes:?}");
        assert_eq!(start.elapsed(), Duration::from_millis(20), "nobody waits for a second failure");

        let led = tokio::spawn({
            let log = log.clone();
            async move { log.ask().await }
        });
        sleep(Duration::from_millis(5)).await;
        let behind = tokio::spawn({
            let log = log.clone();
            async move { log.ask().await }
        });
        tokio::task::yield_now().await;
        led.abort();
        assert!(behind.await.unwrap().is_ok());
    }
}
