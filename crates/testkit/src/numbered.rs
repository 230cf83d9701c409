//! Numbered events, who published them, and what a client saw of them: the one way in which tests
//! ask "is it complete, in order, without a double?". Decides nothing about when a client connects
//! or is cut; that is the test's.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::task::JoinHandle;
use tokio::time::{Instant, MissedTickBehavior, interval};
use tokio_util::sync::CancellationToken;

use crate::http::{self, Response};
use crate::sse::{self, SseClient};
use crate::ws::{self, WsClient};

/// Between two batches of a publisher.
const BATCH_EVERY: Duration = Duration::from_millis(20);
/// Between two tries of a batch that nobody took.
const RETRY: Duration = Duration::from_millis(25);
/// So long a publisher tries before it fails the test.
const PATIENCE: Duration = Duration::from_secs(60);
/// So long an answer of Redis may take. A Redis that is killed ends the connection at once; this is
/// for one that is busy.
const REPLIES: Duration = Duration::from_secs(10);

/// An event's place in the log, as its id says.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Id {
    ms: u64,
    n: u64,
}

impl Id {
    /// Reads `<ms>-<n>`.
    ///
    /// # Panics
    /// Where the text is something else.
    pub fn new(text: &str) -> Self {
        let parts = text.split_once('-').and_then(|(ms, n)| Some((ms.parse().ok()?, n.parse().ok()?)));
        let (ms, n) = parts.unwrap_or_else(|| panic!("no id: {text:?}"));
        Self { ms, n }
    }

    /// Which life of the log gave it (the low 16 bits of its second number).
    pub fn life(self) -> u64 {
        self.n & 0xffff
    }
}

impl std::fmt::Display for Id {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}-{}", self.ms, self.n)
    }
}

/// Everything that was acknowledged to the publishers: the truth that clients are measured by.
#[derive(Default)]
pub struct Ledger {
    by_channel: Mutex<HashMap<String, BTreeMap<Id, u64>>>,
}

impl Ledger {
    fn enter(&self, channel: &str, id: Id, number: u64) {
        let mut books = self.by_channel.lock().expect("nothing panics while it is held");
        books.entry(channel.to_owned()).or_default().insert(id, number);
    }

    /// The events of a channel after `from` up to and with `to`, oldest first.
    pub fn between(&self, channel: &str, from: Id, to: Id) -> Vec<(Id, u64)> {
        let books = self.by_channel.lock().expect("nothing panics while it is held");
        let Some(events) = books.get(channel) else { return Vec::new() };
        events.range(..=to).filter(|(id, _)| **id > from).map(|(id, number)| (*id, *number)).collect()
    }

    /// The highest id so far.
    pub fn last(&self) -> Id {
        let books = self.by_channel.lock().expect("nothing panics while it is held");
        books.values().filter_map(|events| events.last_key_value()).map(|(id, _)| *id).max().unwrap_or_default()
    }

    /// Acknowledged events.
    pub fn n_events(&self) -> usize {
        self.by_channel.lock().expect("nothing panics while it is held").values().map(BTreeMap::len).sum()
    }
}

/// By which way a batch goes into the log.
#[derive(Clone, Debug)]
pub enum Route {
    /// `POST /v1/publish/batch` at this admin listener.
    Admin(SocketAddr),
    /// `FCALL tidegate_publish` over a connection to this Redis, with this log's key.
    Function {
        /// The server.
        redis: SocketAddr,
        /// `<prefix>:log`.
        log: String,
    },
}

/// Publishes `{"n":<number>}`, numbered per channel, until it is stopped; the last one of each channel
/// says so (`"last":true`), so that a client knows when it has everything. Each event carries an
/// idempotency key and is repeated, by whichever route comes next, until it is acknowledged; so a
/// log that keeps what it acknowledged holds each number once.
pub struct Publisher {
    ledger: Arc<Ledger>,
    stop: CancellationToken,
    task: Option<JoinHandle<()>>,
}

impl Publisher {
    /// Starts at once: `per_second` events over all channels, one batch each 20 ms, the batches by
    /// the routes in turn.
    pub fn start(channels: &[&str], routes: Vec<Route>, per_second: usize) -> Self {
        assert!(!channels.is_empty() && !routes.is_empty());
        let ledger = Arc::new(Ledger::default());
        let stop = CancellationToken::new();
        let a_batch = (per_second * BATCH_EVERY.as_millis() as usize / 1000).max(1);
        let channels = channels.iter().map(|&name| name.to_owned()).collect();
        let press = Press { channels, routes, n_tries: 0, a_batch, next: 0, ledger: ledger.clone() };
        let task = tokio::spawn(press.run(stop.clone()));
        Self { ledger, stop, task: Some(task) }
    }

    /// What was acknowledged so far.
    pub fn ledger(&self) -> &Arc<Ledger> {
        &self.ledger
    }

    /// Waits until everything up to this place is acknowledged: a client may see an event before its
    /// publisher is told.
    ///
    /// # Panics
    /// Where it is not within a minute.
    pub async fn until_acknowledged(&self, place: Id) {
        let until = Instant::now() + PATIENCE;
        // Batches follow each other, so a higher id means that all before it are entered.
        while self.ledger.last() <= place {
            assert!(Instant::now() < until, "{place} is not acknowledged");
            tokio::time::sleep(BATCH_EVERY / 4).await;
        }
    }

    /// Waits until so many further events are acknowledged.
    ///
    /// # Panics
    /// Where they are not within a minute.
    pub async fn more(&self, n: usize) {
        let (goal, until) = (self.ledger.n_events() + n, Instant::now() + PATIENCE);
        while self.ledger.n_events() < goal {
            assert!(Instant::now() < until, "{} of {goal} events were taken", self.ledger.n_events());
            tokio::time::sleep(BATCH_EVERY / 4).await;
        }
    }

    /// Ends after the batch that is under way and the last events; gives the whole truth.
    pub async fn stop(mut self) -> Arc<Ledger> {
        self.stop.cancel();
        let task = self.task.take().expect("stopped once");
        task.await.expect("the publisher's own checks hold");
        self.ledger.clone()
    }
}

impl Drop for Publisher {
    fn drop(&mut self) {
        self.stop.cancel();
    }
}

struct Press {
    channels: Vec<String>,
    routes: Vec<Route>,
    n_tries: usize,
    a_batch: usize,
    next: u64,
    ledger: Arc<Ledger>,
}

#[derive(Clone)]
struct Item {
    channel: String,
    number: u64,
    place: Place,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Place {
    Amid,
    Last,
}

impl Item {
    fn key(&self) -> String {
        format!("{}#{}", self.channel, self.number)
    }

    fn data(&self) -> Value {
        match self.place {
            Place::Amid => json!({ "n": self.number }),
            Place::Last => json!({ "n": self.number, "last": true }),
        }
    }
}

impl Press {
    async fn run(mut self, stop: CancellationToken) {
        let mut turns = interval(BATCH_EVERY);
        turns.set_missed_tick_behavior(MissedTickBehavior::Delay);
        while stop.run_until_cancelled(turns.tick()).await.is_some() {
            let batch = self.items(self.a_batch, Place::Amid);
            self.batch(batch).await;
        }
        let last = self.items(self.channels.len(), Place::Last);
        self.batch(last).await;
    }

    fn items(&mut self, n_items: usize, place: Place) -> Vec<Item> {
        let n = self.channels.len() as u64;
        let numbers = self.next..self.next + n_items as u64;
        self.next = numbers.end;
        let item = |k| Item { channel: self.channels[(k % n) as usize].clone(), number: k / n, place };
        numbers.map(item).collect()
    }

    /// One batch, repeated until all of it is in the log.
    async fn batch(&mut self, mut left: Vec<Item>) {
        let until = Instant::now() + PATIENCE;
        loop {
            let route = self.routes[self.n_tries % self.routes.len()].clone();
            self.n_tries += 1;
            let answers = match &route {
                Route::Admin(admin) => by_admin(*admin, &left).await,
                Route::Function { redis, log } => by_function(*redis, log, &left).await,
            };
            let mut again = Vec::new();
            for (i, item) in left.into_iter().enumerate() {
                match answers.get(i).copied().flatten() {
                    Some(id) => self.ledger.enter(&item.channel, id, item.number),
                    None => again.push(item),
                }
            }
            if again.is_empty() {
                return;
            }
            assert!(Instant::now() < until, "{} events were not taken for {PATIENCE:?}", again.len());
            left = again;
            tokio::time::sleep(RETRY).await;
        }
    }
}

async fn by_admin(admin: SocketAddr, items: &[Item]) -> Vec<Option<Id>> {
    let body: Vec<Value> = items
        .iter()
        .map(|item| json!({"channel": item.channel, "data": item.data(), "idempotency_key": item.key()}))
        .collect();
    let body = Value::from(body).to_string();
    let headers = [("Content-Type", "application/json")];
    let answer = http::try_request(admin, "POST", "/v1/publish/batch", &headers, body.as_bytes()).await;
    let Ok(answer) = answer else { return Vec::new() };
    match answer.status() {
        200 => answer.json()["results"]
            .as_array()
            .unwrap_or_else(|| panic!("results in {}", answer.text()))
            .iter()
            .map(|result| result["id"].as_str().map(Id::new))
            .collect(),
        503 => Vec::new(),
        _ => panic!("publishing: {}", answer.text()),
    }
}

async fn by_function(redis: SocketAddr, log: &str, items: &[Item]) -> Vec<Option<Id>> {
    let calls = items.iter().map(|item| {
        let words =
            ["FCALL", "tidegate_publish", "1", log, &item.channel, &item.data().to_string(), "KEY", &item.key()];
        words.map(|word| word.as_bytes().to_vec()).to_vec()
    });
    let replies = call_redis(redis, &calls.collect::<Vec<_>>()).await;
    replies.iter().map(|reply| reply.strip_prefix('$').map(Id::new)).collect()
}

/// Sends these commands over a connection of their own, all at once, and gives the replies in order:
/// `$<text>` of a bulk string, else the reply's first line as it stands. Fewer where the connection
/// ended or ten seconds passed before.
pub async fn call_redis<W: AsRef<[u8]>>(redis: SocketAddr, commands: &[Vec<W>]) -> Vec<String> {
    let mut replies = Vec::new();
    let whole = async {
        let mut redis = TcpStream::connect(redis).await.ok()?;
        for command in commands {
            redis.write_all(&in_resp(command)).await.ok()?;
        }
        let mut unread = Vec::new();
        while replies.len() < commands.len() {
            let first = line(&mut redis, &mut unread).await?;
            replies.push(match first.strip_prefix('$') {
                Some("-1") | None => first,
                Some(_) => format!("${}", line(&mut redis, &mut unread).await?),
            });
        }
        Some(())
    };
    let _ = tokio::time::timeout(REPLIES, whole).await;
    replies
}

fn in_resp<W: AsRef<[u8]>>(words: &[W]) -> Vec<u8> {
    let mut out = format!("*{}\r\n", words.len()).into_bytes();
    for word in words {
        let word = word.as_ref();
        out.extend_from_slice(format!("${}\r\n", word.len()).as_bytes());
        out.extend_from_slice(word);
        out.extend_from_slice(b"\r\n");
    }
    out
}

async fn line(redis: &mut TcpStream, unread: &mut Vec<u8>) -> Option<String> {
    loop {
        if let Some(end) = unread.windows(2).position(|two| two == b"\r\n") {
            let rest = unread.split_off(end + 2);
            let line = std::mem::replace(unread, rest);
            return String::from_utf8(line[..end].to_vec()).ok();
        }
        if redis.read_buf(unread).await.ok()? == 0 {
            return None;
        }
    }
}

/// How a client listens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Transport {
    /// `/v1/ws`
    Ws,
    /// `/v1/sse`
    Sse,
}

impl Transport {
    /// Both.
    pub const ALL: [Transport; 2] = [Transport::Ws, Transport::Sse];
}

enum Stream {
    Ws(Box<WsClient>),
    Sse(Box<SseClient>),
}

/// One client through all its connections: follows the rule of the cursor, keeps what it saw, and
/// fails the test at once where an id does not rise.
pub struct Follower {
    /// For messages of a failure.
    pub name: String,
    /// The last id received, by the contract's rule.
    pub cursor: Option<String>,
    /// Every `gap` since the last `begin_anew`.
    pub gaps: Vec<Value>,
    /// Every `ready`, in order.
    pub readies: Vec<Value>,
    /// Every `bye`.
    pub byes: Vec<Value>,
    transport: Transport,
    token: String,
    channels: Vec<String>,
    stream: Option<Stream>,
    /// It had a cursor before it ever was ready.
    is_resuming: bool,
    start: Option<Id>,
    /// After a reset: only events of this life of the log count.
    life: Option<u64>,
    reached: Id,
    seen: HashMap<String, Vec<(Id, u64)>>,
    /// Channels whose last event it saw.
    ended: HashSet<String>,
}

impl Follower {
    /// A client of this token, whose channels are those.
    pub fn new(name: impl Into<String>, transport: Transport, token: &str, channels: &[&str]) -> Self {
        Self {
            name: name.into(),
            cursor: None,
            gaps: Vec::new(),
            readies: Vec::new(),
            byes: Vec::new(),
            transport,
            token: token.to_owned(),
            channels: channels.iter().map(|&name| name.to_owned()).collect(),
            stream: None,
            is_resuming: false,
            start: None,
            life: None,
            reached: Id::default(),
            seen: HashMap::new(),
            ended: HashSet::new(),
        }
    }

    /// Has a cursor already, whatever it says.
    pub fn resuming(mut self, cursor: &str) -> Self {
        self.cursor = Some(cursor.to_owned());
        self.is_resuming = true;
        self
    }

    /// Connects, from its cursor if it has one.
    ///
    /// # Errors
    /// The whole answer where it is refused.
    pub async fn try_connect(&mut self, gateway: SocketAddr) -> Result<(), Response> {
        self.stream = None;
        let bearer = format!("Bearer {}", self.token);
        let mut headers = vec![("Authorization", bearer.as_str())];
        if let Some(cursor) = &self.cursor {
            headers.push(("Last-Event-ID", cursor));
        }
        self.stream = Some(match self.transport {
            Transport::Ws => Stream::Ws(Box::new(WsClient::connect(gateway, "/v1/ws", &headers).await?)),
            Transport::Sse => Stream::Sse(Box::new(SseClient::connect(gateway, "/v1/sse", &headers).await?)),
        });
        Ok(())
    }

    /// As `try_connect`.
    ///
    /// # Panics
    /// Where it is refused.
    pub async fn connect(&mut self, gateway: SocketAddr) {
        let connected = self.try_connect(gateway).await;
        connected.unwrap_or_else(|refused| panic!("{}: refused with {}", self.name, refused.text()));
    }

    /// Drops the connection as it stands; what is on the wire is lost.
    pub fn cut(&mut self) {
        self.stream = None;
    }

    /// Is it connected, as far as it knows?
    pub fn is_connected(&self) -> bool {
        self.stream.is_some()
    }

    /// The next message, noted; `None` once the connection ended.
    ///
    /// # Panics
    /// Where ids do not rise, or as the raw clients do.
    ///
    /// # Cancel safety
    /// Not safe: half a message may be lost. `cut` it afterwards.
    pub async fn next(&mut self) -> Option<Value> {
        loop {
            let (message, id) = match self.stream.as_mut()? {
                Stream::Ws(stream) => match stream.next().await {
                    ws::Heard::Text(text) => {
                        let message: Value = serde_json::from_str(&text).expect("messages are JSON");
                        let id =
                            if message["replay"] == true { None } else { message["id"].as_str().map(str::to_owned) };
                        (message, id)
                    }
                    ws::Heard::Close { .. } | ws::Heard::Cut => {
                        self.stream = None;
                        return None;
                    }
                    _ => continue,
                },
                Stream::Sse(stream) => match stream.next().await {
                    sse::Heard::Block(block) if block.is_comment() => continue,
                    sse::Heard::Block(block) => (block.json(), block.id),
                    sse::Heard::End | sse::Heard::Cut => {
                        self.stream = None;
                        return None;
                    }
                },
            };
            self.note(&message);
            if let Some(id) = id {
                self.take_cursor(&message, id);
            }
            return Some(message);
        }
    }

    fn note(&mut self, message: &Value) {
        match message["type"].as_str().unwrap_or_default() {
            "event" => {
                let id = Id::new(message["id"].as_str().expect("only logged events are published here"));
                let channel = message["channel"].as_str().expect("an event has a channel");
                let number = message["data"]["n"].as_u64().expect("a numbered event");
                assert!(message["replay"].is_null(), "{}: nothing was asked for late: {message}", self.name);
                assert!(id > self.reached, "{}: {id:?} came at {:?}: {message}", self.name, self.reached);
                assert!(self.start.is_some() || self.is_resuming, "{}: an event before its first ready", self.name);
                if message["data"]["last"] == true {
                    self.ended.insert(channel.to_owned());
                }
                self.seen.entry(channel.to_owned()).or_default().push((id, number));
            }
            "ready" => {
                self.readies.push(message.clone());
                self.start = self.start.or_else(|| message["id"].as_str().map(Id::new));
            }
            "gap" => self.gaps.push(message.clone()),
            "bye" => self.byes.push(message.clone()),
            _ => {}
        }
    }

    fn take_cursor(&mut self, message: &Value, id: String) {
        let place = Id::new(&id);
        if message["type"] != "ready" {
            assert!(place >= self.reached, "{}: the cursor fell from {:?}: {message}", self.name, self.reached);
        }
        self.reached = place;
        self.cursor = Some(id);
    }

    /// Takes whatever comes up to the first message that `is_it`.
    ///
    /// # Panics
    /// Where the connection ends, or as `next`.
    pub async fn until(&mut self, mut is_it: impl FnMut(&Value) -> bool) -> Value {
        loop {
            let message = self.next().await;
            let message = message.unwrap_or_else(|| panic!("the connection of {} ended: {:?}", self.name, self.byes));
            if is_it(&message) {
                return message;
            }
        }
    }

    /// Takes whatever comes until its cursor is at or beyond this place.
    ///
    /// # Panics
    /// Where the connection ends, or as `next`.
    pub async fn until_at(&mut self, place: Id) {
        while self.reached < place {
            self.until(|_| true).await;
        }
    }

    /// Takes whatever comes until it saw the last event of each of its channels.
    ///
    /// # Panics
    /// Where the connection ends, or as `next`.
    pub async fn until_the_last(&mut self) {
        while self.ended.len() < self.channels.len() {
            self.until(|_| true).await;
        }
    }

    /// The place of its cursor.
    pub fn reached(&self) -> Id {
        self.reached
    }

    /// Events seen since it began.
    pub fn n_seen(&self) -> usize {
        self.seen.values().map(Vec::len).sum()
    }

    /// Forgets what it saw; it is measured from its cursor on. For after a reset of the log.
    pub fn begin_anew(&mut self) {
        self.seen.clear();
        self.gaps.clear();
        self.start = Some(self.reached);
        self.life = Some(self.reached.life());
    }

    /// Did it see exactly what the ledger holds between its first `ready` and its cursor, on each of
    /// its channels, in order? And was it never told of a gap?
    ///
    /// # Panics
    /// Where not, with the first difference.
    pub fn assert_complete(&self, ledger: &Ledger) {
        assert!(self.gaps.is_empty(), "{} was told of gaps: {:?}", self.name, self.gaps);
        let start = self.start.unwrap_or_else(|| panic!("{} was never ready", self.name));
        for channel in &self.channels {
            let seen = self.seen.get(channel).map_or(&[][..], Vec::as_slice);
            let mut truth = ledger.between(channel, start, self.reached);
            truth.retain(|(id, _)| self.life.is_none_or(|life| id.life() == life));
            let at = seen.iter().zip(&truth).position(|(a, b)| a != b).unwrap_or(seen.len().min(truth.len()));
            assert!(
                seen == truth,
                "{} on {channel}: {} seen, {} published; from the {at}th on {:?} instead of {:?}",
                self.name,
                seen.len(),
                truth.len(),
                seen.get(at..).map(|rest| &rest[..rest.len().min(3)]),
                truth.get(at..).map(|rest| &rest[..rest.len().min(3)]),
            );
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ledger() -> Ledger {
        let ledger = Ledger::default();
        for n in 1..=4 {
            ledger.enter("c", Id { ms: n, n: 7 }, n);
        }
        ledger
    }

    /// A client that began after event 1 and saw these.
    fn after_one(saw: &[u64]) -> Follower {
        let mut follower = Follower::new("f", Transport::Ws, "", &["c"]);
        follower.note(&json!({"type": "ready", "id": "1-7"}));
        follower.take_cursor(&json!({"type": "ready"}), "1-7".to_owned());
        for n in saw {
            let event = json!({"type": "event", "channel": "c", "id": format!("{n}-7"), "data": {"n": n}});
            follower.note(&event);
            follower.take_cursor(&event, format!("{n}-7"));
        }
        follower
    }

    #[test]
    fn what_lies_between_ready_and_cursor_is_complete() {
        after_one(&[2, 3, 4]).assert_complete(&ledger());
        after_one(&[2, 3]).assert_complete(&ledger());
    }

    #[test]
    #[should_panic(expected = "2 seen, 3 published; from the 1th on")]
    fn a_hole_is_found() {
        after_one(&[2, 4]).assert_complete(&ledger());
    }

    #[test]
    #[should_panic(expected = "came at")]
    fn a_double_is_found() {
        after_one(&[2, 2]);
    }

    #[test]
    #[should_panic(expected = "came at")]
    fn a_wrong_order_is_found() {
        after_one(&[3, 2]);
    }

    #[test]
    #[should_panic(expected = "told of gaps")]
    fn a_gap_is_no_completeness() {
        let mut follower = after_one(&[2, 3, 4]);
        follower.note(&json!({"type": "gap", "channel": "c"}));
        follower.assert_complete(&ledger());
    }
}
