//! A client that follows the protocol's rules of cursor and resume, and tells its judge what it
//! receives. Written from the rules alone, apart from the published client, so that a mistake
//! cannot be on both sides. It does nothing by itself: a test connects it, lets it read, cuts it.

use std::collections::BTreeMap;

use hub::cursor::EventId;
use hub::event::Wire;
use serde_json::{Value, json};
use tokio::io::DuplexStream;

use super::judge::{Judge, Promise, Truth, Violation};
use super::wire::{Arrival, Connection, Request, Stage};

/// A channel asked for in an open session.
#[derive(Clone, Debug)]
struct Extra {
    reference: String,
    /// `ok` came on this connection.
    is_held: bool,
    since: Option<String>,
}

/// One client, over all its connections.
pub struct Client {
    /// Its `sub`.
    pub name: String,
    /// The transport.
    pub wire: Wire,
    token: String,
    /// Channels joined by the token.
    joined: Vec<String>,
    /// Channels asked for in the query.
    asked: Vec<String>,
    cursor: Option<String>,
    first_cursor: Option<String>,
    extras: BTreeMap<String, Extra>,
    connection: Option<Connection>,
    is_ready: bool,
    n_asked: u64,
    n_auths: u64,
    judge: Judge,
    /// What was received, in short, for the trace of a failure.
    log: Vec<String>,
    /// Kinds of message received in this connection's life, with the whole message.
    heard: Vec<Value>,
}

impl Client {
    /// Hears `joined` by its token and `asked` by its query.
    pub fn new(name: &str, wire: Wire, token: String, joined: &[String], asked: &[String]) -> Self {
        Self {
            name: name.to_owned(),
            wire,
            token,
            joined: joined.to_vec(),
            asked: asked.to_vec(),
            cursor: None,
            first_cursor: None,
            extras: BTreeMap::new(),
            connection: None,
            is_ready: false,
            n_asked: 0,
            n_auths: 0,
            judge: Judge::new(name),
            log: Vec::new(),
            heard: Vec::new(),
        }
    }

    /// Its cursor now.
    pub fn cursor(&self) -> Option<&str> {
        self.cursor.as_deref()
    }

    /// Its cursor at the first `ready`.
    pub fn first_cursor(&self) -> Option<&str> {
        self.first_cursor.as_deref()
    }

    /// Resumes from here next time, as a program that stored a cursor does.
    pub fn set_cursor(&mut self, cursor: Option<&str>) {
        self.cursor = cursor.map(str::to_owned);
    }

    /// What it received, judged.
    pub fn judge(&self) -> &Judge {
        &self.judge
    }

    /// Everything said and received, a line each.
    pub fn log(&self) -> &[String] {
        &self.log
    }

    /// Messages received on all connections, in order.
    pub fn heard(&self) -> &[Value] {
        &self.heard
    }

    /// Messages of one type, in order.
    pub fn heard_of(&self, kind: &str) -> impl Iterator<Item = &Value> {
        self.heard.iter().filter(move |message| message["type"] == kind)
    }

    /// Is there a connection, open or on its way?
    pub fn is_connected(&self) -> bool {
        self.connection.is_some()
    }

    /// Has `ready` come on this connection?
    pub fn is_ready(&self) -> bool {
        self.is_ready
    }

    /// Is everything it asked for held?
    pub fn is_settled(&self) -> bool {
        self.is_ready && self.extras.values().all(|extra| extra.is_held)
    }

    /// Every channel it means to hear.
    pub fn channels(&self) -> impl Iterator<Item = &String> {
        self.joined.iter().chain(&self.asked).chain(self.extras.keys())
    }

    /// Is it one of its token's?
    pub fn is_joined(&self, channel: &str) -> bool {
        self.joined.iter().any(|known| known == channel)
    }

    /// Does it mean to hear this one?
    pub fn hears(&self, channel: &str) -> bool {
        self.channels().any(|known| known == channel)
    }

    /// Connects over `socket`, from its cursor.
    pub fn connect(&mut self, socket: DuplexStream) {
        self.cut();
        self.log.push(format!("connects from {:?}", self.cursor));
        let request =
            Request { wire: self.wire, token: &self.token, cursor: self.cursor.as_deref(), channels: &self.asked };
        self.connection = Some(Connection::new(socket, &request));
    }

    /// The connection is lost; what was not read is lost with it.
    pub fn cut(&mut self) {
        if self.connection.take().is_none() {
            return;
        }
        self.log.push("is cut".to_owned());
        self.is_ready = false;
        self.judge.begin();
        for extra in self.extras.values_mut().filter(|extra| extra.is_held) {
            extra.is_held = false;
            extra.since.clone_from(&self.cursor);
        }
    }

    /// Asks for one more channel (WebSocket, once ready).
    pub fn subscribe(&mut self, truth: &Truth, channel: &str, since: Option<&str>) {
        if let Some(id) = since.and_then(|since| since.parse().ok()) {
            self.judge.follow(channel, truth.number_at(id));
        }
        let since = since.map(str::to_owned);
        self.extras.insert(channel.to_owned(), Extra { reference: String::new(), is_held: false, since });
        self.ask(channel);
    }

    fn ask(&mut self, channel: &str) {
        let (Some(extra), Some(connection)) = (self.extras.get_mut(channel), &mut self.connection) else { return };
        self.n_asked += 1;
        extra.reference = format!("s{}", self.n_asked);
        let mut message = json!({ "type": "subscribe", "ref": extra.reference, "channel": channel });
        if let Some(since) = &extra.since {
            message["since"] = since.as_str().into();
        }
        self.log.push(format!("says {message}"));
        connection.send(&message);
    }

    /// Gives up a channel it asked for.
    pub fn unsubscribe(&mut self, channel: &str) {
        self.extras.remove(channel);
        self.judge.forget(channel);
        self.say(&json!({ "type": "unsubscribe", "ref": "u", "channel": channel }));
    }

    /// Shows its token again in the open session.
    pub fn authenticate(&mut self) {
        self.n_auths += 1;
        let message = json!({ "type": "auth", "ref": format!("a{}", self.n_auths), "token": self.token });
        self.say(&message);
    }

    /// Says anything (WebSocket).
    pub fn say(&mut self, message: &Value) {
        if let Some(connection) = &mut self.connection {
            self.log.push(format!("says {}", message["type"]));
            connection.send(message);
        }
    }

    /// Reads at most `max_bytes` that are there and acts on at most `max_messages` of them; what
    /// was read and not acted upon waits for the next time. Returns whether anything happened.
    ///
    /// # Errors
    /// A promise was broken.
    pub fn receive(&mut self, truth: &Truth, max_bytes: usize, max_messages: usize) -> Result<bool, Violation> {
        let Some(connection) = &mut self.connection else { return Ok(false) };
        let mut happened = connection.pull(max_bytes);
        for _ in 0..max_messages {
            let Some(arrival) = self.connection.as_mut().and_then(Connection::arrival) else { break };
            happened = true;
            self.hear(truth, arrival)?;
        }
        match self.connection.as_ref().map(Connection::stage) {
            Some(Stage::Refused(status)) => {
                self.log.push(format!("is refused: {status}"));
                self.cut();
            }
            Some(Stage::Ended) => self.cut(),
            _ => {}
        }
        Ok(happened)
    }

    fn hear(&mut self, truth: &Truth, arrival: Arrival) -> Result<(), Violation> {
        let Arrival { message, line_id } = arrival;
        self.log.push(short(&message));
        let id: Option<EventId> = message["id"].as_str().and_then(|id| id.parse().ok());
        let channel = message["channel"].as_str().unwrap_or_default().to_owned();
        let kind = message["type"].as_str().unwrap_or_default().to_owned();
        match &*kind {
            "event" => self.event(truth, &channel, id, &message)?,
            "gap" => self.judge.gap(truth, &channel),
            "ready" => self.ready(truth, id)?,
            "position" | "bye" => self.claim(truth, id)?,
            "ok" => self.ok(truth, id, &channel, &message)?,
            "error" => self.error(&message)?,
            "hello" | "pong" | "unsubscribed" | "token_expiring" => {}
            _ => return Err(self.odd(&message)),
        }
        if self.wire == Wire::Sse && line_id.is_some() {
            self.cursor = line_id;
        }
        self.heard.push(message);
        Ok(())
    }

    fn odd(&self, message: &Value) -> Violation {
        Violation { promise: Promise::Protocol, client: self.name.clone(), what: format!("unexpected {message}") }
    }

    fn event(&mut self, truth: &Truth, channel: &str, id: Option<EventId>, message: &Value) -> Result<(), Violation> {
        let Some(id) = id else { return Ok(()) };
        let number = message["data"].as_u64().or_else(|| message["data"]["number"].as_u64());
        let Some(number) = number else { return Err(self.odd(message)) };
        self.judge.event(truth, channel, id, number)?;
        if message["replay"] == true {
            let pending = self.extras.get_mut(channel).filter(|extra| !extra.is_held);
            if let Some(extra) = pending
                && extra.since.as_deref().and_then(|since| since.parse().ok()).is_none_or(|since: EventId| id > since)
            {
                extra.since = Some(id.to_string());
            }
        } else if self.wire == Wire::Ws {
            self.cursor = Some(id.to_string());
        }
        Ok(())
    }

    fn move_cursor(&mut self, id: Option<EventId>) {
        if let Some(id) = id.filter(|_| self.wire == Wire::Ws) {
            self.cursor = Some(id.to_string());
        }
    }

    /// The session says that everything up to `id` was delivered, but for what is still pending.
    fn claim(&mut self, truth: &Truth, id: Option<EventId>) -> Result<(), Violation> {
        self.move_cursor(id);
        let Some(id) = id else { return Ok(()) };
        let extras = &self.extras;
        self.judge.claim(truth, id, &|channel| extras.get(channel).is_some_and(|extra| !extra.is_held))
    }

    fn ready(&mut self, truth: &Truth, id: Option<EventId>) -> Result<(), Violation> {
        let is_first = !self.is_ready;
        self.is_ready = true;
        self.judge.begin();
        self.claim(truth, id)?;
        let number = id.map_or(0, |id| truth.number_at(id));
        for channel in self.joined.iter().chain(&self.asked) {
            self.judge.follow(channel, number);
        }
        if self.first_cursor.is_none() {
            self.first_cursor = id.map(|id| id.to_string());
        }
        if is_first {
            let extras: Vec<String> = self.extras.keys().cloned().collect();
            extras.iter().for_each(|channel| self.ask(channel));
        }
        Ok(())
    }

    fn ok(&mut self, truth: &Truth, id: Option<EventId>, channel: &str, message: &Value) -> Result<(), Violation> {
        let asked = self.extras.get_mut(channel).filter(|extra| message["ref"] == extra.reference.as_str());
        if let Some(extra) = asked {
            extra.is_held = true;
            self.judge.follow(channel, id.map_or(0, |id| truth.number_at(id)));
        }
        self.claim(truth, id)
    }

    fn error(&mut self, message: &Value) -> Result<(), Violation> {
        if message["retry"] != true {
            return Err(self.odd(message));
        }
        let asked = self.extras.iter().find(|(_, extra)| message["ref"] == extra.reference.as_str());
        if let Some((channel, _)) = asked.map(|(channel, extra)| (channel.clone(), extra)) {
            self.ask(&channel);
        }
        Ok(())
    }
}

fn short(message: &Value) -> String {
    let mut message = message.clone();
    if !message["data"]["pad"].is_null() {
        message["data"]["pad"] = "...".into();
    }
    format!("<- {message}")
}
