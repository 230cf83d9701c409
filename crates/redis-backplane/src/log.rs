//! Publishing to and reading from the log: arguments and answers of the two Functions. Decides
//! nothing about ids, trimming or incarnations (the Functions do, atomically) nor about gaps
//! (the hub does).

use std::time::Duration;

use bytes::Bytes;
use deadpool::managed::{Manager, Metrics, Object, Pool, RecycleResult};
use deadpool_redis::{Runtime, Timeouts};
use hub::backplane::{Facts, From as Since, GapReason, Publish, Published, Read, ReadAsk};
use hub::channel::{Channel, EventName};
use hub::cursor::EventId;
use hub::event::Event;
use redis::aio::MultiplexedConnection;
use redis::{Cmd, RedisError, Value};
use tokio_util::task::TaskTracker;

use crate::dial::{Dialer, Fault};

/// Replies may be large and each keeps the server busy for a while, so few are in flight.
const READERS: usize = 4;

/// The call that publishes.
pub(crate) fn publish_cmd(log: &str, event: &Publish) -> Cmd {
    let mut cmd = redis::cmd("FCALL");
    cmd.arg("tidegate_publish_1").arg(1).arg(log).arg(event.channel.as_str()).arg(&event.data[..]);
    if let Some(name) = &event.name {
        cmd.arg("EVENT").arg(name.as_str());
    }
    if let Some(key) = &event.key {
        cmd.arg("KEY").arg(&**key);
    }
    if event.ephemeral {
        cmd.arg("EPHEMERAL");
    }
    cmd
}

/// Its answer: the id ('' for an ephemeral event), and whether it is an earlier one's.
pub(crate) fn published((id, duplicate): (String, u8)) -> Result<Published, Fault> {
    let id = match id.as_str() {
        "" => None,
        id => Some(id.parse().map_err(|_| odd())?),
    };
    Ok(Published { id, duplicate: duplicate != 0 })
}

/// The call that reads.
pub(crate) fn read_cmd(log: &str, ask: &ReadAsk) -> Cmd {
    let mut cmd = redis::cmd("FCALL");
    cmd.arg("tidegate_read_1").arg(1).arg(log).arg(ask.cap).arg(ask.page_events).arg(ask.page_bytes);
    cmd.arg(ask.check.map(|id| id.to_string()).unwrap_or_default());
    for (channel, since) in &ask.channels {
        cmd.arg(channel.as_str());
        match since {
            Since::Here => cmd.arg("here"),
            Since::Start => cmd.arg("start"),
            Since::After(id) => cmd.arg(id.to_string()),
        };
    }
    cmd
}

/// An answer, and what of it was no event.
pub(crate) struct Page {
    pub(crate) read: Read,
    /// Entries that were left out because their data is no JSON or their name no name.
    pub(crate) n_skipped: u64,
    /// The last entry's id, skipped or not.
    pub(crate) last: Option<EventId>,
}

type Answer = (String, u64, u64, u8, String, u8, Vec<Value>, Vec<Value>);

/// Its answer. Every event is checked: back ends may have logged what is no JSON.
pub(crate) fn page(asked: &[(Channel, Since)], answer: Answer) -> Result<Page, Fault> {
    let (position, now_ms, ttl_ms, has_history, broken, more, facts, entries) = answer;
    let mut read = Read {
        position: position.parse().map_err(|_| odd())?,
        now_ms,
        ttl: Duration::from_millis(ttl_ms),
        has_history: has_history != 0,
        broken: (!broken.is_empty()).then_some(GapReason::Reset),
        facts: facts.chunks_exact(3).map(one_channel).collect::<Result<_, _>>()?,
        events: Vec::with_capacity(entries.len() / 4),
        more: more != 0,
    };
    let (mut n_skipped, mut last) = (0, None);
    let mut entries = entries.into_iter();
    while let (Some(index), Some(id), Some(name), Some(data)) =
        (entries.next(), entries.next(), entries.next(), entries.next())
    {
        let index: usize = redis::from_redis_value(index).map_err(|_| odd())?;
        let id: EventId = text(id)?.parse().map_err(|_| odd())?;
        last = Some(id);
        let channel = asked.get(index).ok_or_else(odd)?.0.clone();
        // Whoever wrote it into the stream by hand may have left no text there: that ends no read.
        let name = text(name).ok().and_then(|name| name_of(&name));
        match (name, data_of(data)) {
            (Some(name), Some(data)) => read.events.push(Event { channel, id: Some(id), name, data }),
            _ => n_skipped += 1,
        }
    }
    Ok(Page { read, n_skipped, last })
}

/// Joins two instants of the same read into what the asker needs to know: what was pushed out
/// behind the place that the first page had reached is a hole, what was pushed out before it is not.
pub(crate) fn join(first: Read, reached: EventId, second: Read) -> Read {
    let facts = first.facts.iter().zip(&second.facts).map(|(a, b)| Facts {
        first: a.first,
        evicted: b.evicted.filter(|evicted| *evicted > reached).or(a.evicted),
        cut: a.cut || b.cut,
    });
    let facts = facts.collect();
    Read { facts, ..second }
}

fn one_channel(facts: &[Value]) -> Result<Facts, Fault> {
    let [first, evicted, cut] = facts else { return Err(odd()) };
    let id = |value: &Value| match text(value.clone())?.as_str() {
        "" => Ok(None),
        id => id.parse().map(Some).map_err(|_| odd()),
    };
    Ok(Facts { first: id(first)?, evicted: id(evicted)?, cut: *cut == Value::Int(1) })
}

fn text(value: Value) -> Result<String, Fault> {
    redis::from_redis_value(value).map_err(|_| odd())
}

/// `Some(None)`: no name. `None`: something that is no name.
pub(crate) fn name_of(name: &str) -> Option<Option<EventName>> {
    if name.is_empty() { Some(None) } else { EventName::new(name).ok().map(Some) }
}

fn data_of(value: Value) -> Option<Bytes> {
    let Value::BulkString(data) = value else { return None };
    Event::check_data(&data).ok()?;
    Some(Bytes::from(data))
}

pub(crate) fn odd() -> Fault {
    Fault::Down("the function's answer is not understood".to_owned())
}

/// A connection that was used so lately is not tried before it is used again: the two commands that
/// cost are a third of what a short read costs the server.
const TRUSTED: Duration = Duration::from_millis(500);

/// Dials and tries as the library does, but tries only what has rested.
struct Dialing(deadpool_redis::Manager);

impl Manager for Dialing {
    type Type = MultiplexedConnection;
    type Error = RedisError;

    async fn create(&self) -> Result<MultiplexedConnection, RedisError> {
        self.0.create().await
    }

    async fn recycle(&self, connection: &mut MultiplexedConnection, used: &Metrics) -> RecycleResult<RedisError> {
        if used.last_used() < TRUSTED { Ok(()) } else { self.0.recycle(connection, used).await }
    }
}

/// The connections for reads: few, apart from all others.
pub(crate) struct Readers {
    pool: Pool<Dialing>,
    tasks: TaskTracker,
    limit: Duration,
}

impl Readers {
    pub(crate) fn new(dialer: &Dialer, limit: Duration) -> Result<Self, redis::RedisError> {
        let manager = Dialing(deadpool_redis::Manager::new_with_config(dialer.info(), dialer.async_config())?);
        let timeouts = Timeouts { wait: Some(limit), create: Some(dialer.connect_timeout()), recycle: Some(limit) };
        let pool = Pool::builder(manager).max_size(READERS).timeouts(timeouts).runtime(Runtime::Tokio1).build();
        Ok(Self { pool: pool.expect("a runtime is given with the time-outs"), tasks: TaskTracker::new(), limit })
    }

    /// One read, repeated once if its connection broke.
    ///
    /// # Cancel safety
    /// Reads change nothing that matters; a dropped call leaves its connection usable.
    pub(crate) async fn call<T: redis::FromRedisValue>(&self, cmd: &Cmd) -> Result<T, Fault> {
        let twice = async {
            match self.once(cmd).await {
                Err(Fault::Broken(_)) => self.once(cmd).await,
                other => other,
            }
        };
        let late = |_| Err(Fault::Down("no answer in time".to_owned()));
        tokio::time::timeout(self.limit, twice).await.unwrap_or_else(late)
    }

    async fn once<T: redis::FromRedisValue>(&self, cmd: &Cmd) -> Result<T, Fault> {
        // In a task of its own: a dial that takes longer than this call's deadline still serves the next.
        let pool = self.pool.clone();
        let got =
            self.tasks.spawn(async move { pool.get().await }).await.map_err(|_| Fault::Down("stopped".to_owned()))?;
        let mut connection = got.map_err(|_| Fault::Down("no connection".to_owned()))?;
        let error = match cmd.query_async(&mut *connection).await {
            Ok(answer) => return Ok(answer),
            Err(error) => Fault::of(&error),
        };
        if error.is_fatal() {
            drop(Object::take(connection));
        }
        Err(error)
    }
}
