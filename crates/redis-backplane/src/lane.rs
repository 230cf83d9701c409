//! One connection for one purpose, shared by concurrent calls, kept up by an owned task.
//! Decides when a connection is given up (an error that says so, or a PING unanswered) and that
//! every call ends at its deadline. What is called, and whether again, the caller says.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use hub::clock::Dice;
use redis::aio::MultiplexedConnection;
use redis::{Cmd, FromRedisValue};
use tokio::sync::{Notify, watch};
use tokio::time::{Instant, timeout};
use tokio_util::task::AbortOnDropHandle;

use crate::dial::{Backoff, Fault, SharedDialer};

/// Shorter than the shortest idle time-out a server can be given (1 s): no connection is ever
/// found closed by the first call after a quiet spell.
const KEEP_ALIVE: Duration = Duration::from_millis(500);
/// A server that is busy for less than this is slow, not dead: calls in flight may still succeed.
const PING_LIMIT: Duration = Duration::from_secs(1);

/// May the call be sent a second time if the connection broke under it?
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Again {
    /// It changes nothing, or the same again.
    Once,
    /// Twice would not be the same as once.
    Never,
}

#[derive(Clone)]
struct Live {
    number: u64,
    connection: MultiplexedConnection,
}

/// The number of the newest connection that is known to be useless, and a bell.
#[derive(Default)]
struct Doubt {
    broken: AtomicU64,
    bell: Notify,
    /// Why there is no connection.
    why: Mutex<Option<String>>,
}

impl Doubt {
    fn set_why(&self, why: Option<String>) {
        *self.why.lock().expect("nothing panics while it is held") = why;
    }

    fn why(&self) -> String {
        self.why
            .lock()
            .expect("nothing panics while it is held")
            .clone()
            .unwrap_or_else(|| "no answer in time".to_owned())
    }
}

pub(crate) struct Lane {
    live: watch::Receiver<Option<Live>>,
    doubt: Arc<Doubt>,
    timeout: Duration,
    _keeper: AbortOnDropHandle<()>,
}

impl Lane {
    /// Starts the keeper, which dials at once and for ever. `up` shows whether it has a connection.
    pub(crate) fn start(dialer: SharedDialer, limit: Duration, dice: Dice, up: Arc<AtomicBool>) -> Self {
        let (tx, live) = watch::channel(None);
        let doubt = Arc::new(Doubt::default());
        let keeper = Keeper { dialer, limit, doubt: doubt.clone(), tx, up };
        let task = tokio::spawn(keeper.run(Backoff::new(dice)));
        Self { live, doubt, timeout: limit, _keeper: AbortOnDropHandle::new(task) }
    }

    /// Calls with the lane's own deadline.
    ///
    /// # Cancel safety
    /// Dropping the future does not undo what was sent.
    pub(crate) async fn call<T: FromRedisValue>(&self, cmd: &Cmd, again: Again) -> Result<T, Fault> {
        self.call_within(self.timeout, cmd, again).await
    }

    /// As `call`, with another deadline.
    pub(crate) async fn call_within<T: FromRedisValue>(
        &self,
        limit: Duration,
        cmd: &Cmd,
        again: Again,
    ) -> Result<T, Fault> {
        match timeout(limit, self.attempts(cmd, again)).await {
            Ok(answer) => answer,
            Err(_) => {
                // Slow, or dead? The keeper asks.
                self.doubt.bell.notify_one();
                Err(Fault::Down(self.doubt.why()))
            }
        }
    }

    async fn attempts<T: FromRedisValue>(&self, cmd: &Cmd, again: Again) -> Result<T, Fault> {
        let mut may_repeat = again == Again::Once;
        loop {
            let mut live = self.connection().await?;
            let error = match cmd.query_async(&mut live.connection).await {
                Ok(answer) => return Ok(answer),
                Err(error) => Fault::of(&error),
            };
            if error.is_fatal() {
                self.doubt.broken.fetch_max(live.number, Ordering::Relaxed);
                self.doubt.bell.notify_one();
            }
            if !may_repeat || !matches!(error, Fault::Broken(_)) {
                return Err(error);
            }
            may_repeat = false;
        }
    }

    /// The connection in use, as soon as there is one.
    async fn connection(&self) -> Result<Live, Fault> {
        let mut live = self.live.clone();
        let is_good =
            |live: &Option<Live>| live.as_ref().is_some_and(|l| l.number > self.doubt.broken.load(Ordering::Relaxed));
        let found = live.wait_for(is_good).await.map_err(|_| Fault::Down("the backplane has stopped".to_owned()))?;
        Ok(found.clone().expect("is_good looked"))
    }
}

struct Keeper {
    dialer: SharedDialer,
    limit: Duration,
    doubt: Arc<Doubt>,
    tx: watch::Sender<Option<Live>>,
    up: Arc<AtomicBool>,
}

impl Keeper {
    async fn run(self, mut backoff: Backoff) {
        for number in 1.. {
            let connection = loop {
                match self.dialer.commands().await {
                    Ok(connection) => break connection,
                    Err(error) => self.doubt.set_why(Some(Fault::of(&error).text())),
                }
                self.dialer.pause(backoff.next()).await;
            };
            let since = Instant::now();
            self.up.store(true, Ordering::Relaxed);
            self.doubt.set_why(None);
            self.tx.send_replace(Some(Live { number, connection: connection.clone() }));
            self.watch(number, connection).await;
            self.tx.send_replace(None);
            self.up.store(false, Ordering::Relaxed);
            if since.elapsed() >= Backoff::GOOD {
                backoff.reset();
            }
            tokio::time::sleep(backoff.next()).await;
        }
    }

    /// Returns when the connection is of no more use.
    async fn watch(&self, number: u64, mut connection: MultiplexedConnection) {
        let ping = redis::cmd("PING");
        loop {
            // Both arms are cancel-safe: a missed bell only brings the PING forward.
            tokio::select! {
                () = self.doubt.bell.notified() => {}
                () = tokio::time::sleep(KEEP_ALIVE) => {}
            }
            if self.doubt.broken.load(Ordering::Relaxed) >= number {
                return;
            }
            if !matches!(timeout(self.limit.max(PING_LIMIT), ping.exec_async(&mut connection)).await, Ok(Ok(()))) {
                return;
            }
        }
    }
}
