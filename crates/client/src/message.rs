//! The messages that a server sends, as types. Decides what each one says; what follows from it is
//! the driver's. Unknown fields are ignored and an unknown type is passed on untouched, so that a
//! newer server or a plugin of it does not break an older client.

use std::time::Duration;

use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::value::RawValue;

use crate::end::Loss;

/// Whatever a program hears from its client: the server's messages, and the client's own [`Lost`].
#[derive(Debug, Clone)]
#[non_exhaustive]
pub enum Message {
    /// A session exists. Comes once a connection, before anything else.
    Hello(Hello),
    /// All channels are live and the replay is done: from here on nothing is missed.
    Ready(Ready),
    /// An event of a channel.
    Event(Event),
    /// Nothing was missed up to this id; keeps a quiet client's cursor young.
    Position(Position),
    /// A `subscribe`, `unsubscribe` or `auth` was done.
    Ok(Subscribed),
    /// A message of ours was refused; the session goes on.
    Error(Failed),
    /// Events of this channel may be missing: fetch its state anew.
    Gap(Gap),
    /// The server took a channel away.
    Unsubscribed(Unsubscribed),
    /// The token ends soon. With a token source the client renews it by itself.
    TokenExpiring(TokenExpiring),
    /// The server ends this session and says what to do next; the client does it.
    Bye(Bye),
    /// The answer to a `ping`.
    Pong,
    /// A type that this version does not know, a plugin's for example: the whole JSON object.
    Other(Box<RawValue>),
    /// There is no connection any more (or an attempt failed); the client tries again by itself.
    Lost(Lost),
}

/// `hello`: who we are to the server.
#[derive(Debug, Clone, Deserialize)]
#[non_exhaustive]
pub struct Hello {
    /// The session's id.
    pub session: String,
    /// The node that holds it.
    #[serde(default)]
    pub node: Option<String>,
    /// The token's subject; `None` for an anonymous session.
    #[serde(default)]
    pub user: Option<String>,
    /// The channels joined at once.
    #[serde(default)]
    pub channels: Vec<String>,
    /// The server gives a sign of life at least this often, in ms.
    #[serde(default)]
    pub heartbeat_ms: Option<u64>,
    /// When the token ends, in seconds since 1970.
    #[serde(default)]
    pub expires_at: Option<f64>,
    /// How the server wants to be approached again.
    #[serde(default)]
    pub reconnect: Option<Pacing>,
}

/// `hello.reconnect`: the server's wish for our backoff, all in ms.
#[derive(Debug, Clone, Copy, Deserialize, PartialEq, Eq)]
#[non_exhaustive]
pub struct Pacing {
    /// The backoff's base.
    pub min_ms: u64,
    /// The backoff's cap, before jitter.
    pub max_ms: u64,
    /// The first delay is drawn from 0 to this.
    pub first_max_ms: u64,
}

/// How a session or a channel began.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Resume {
    /// No cursor was given.
    New,
    /// Everything after the cursor was or will be delivered.
    Ok,
    /// Something may be missing; a `gap` for each such channel came before.
    Gap,
    /// A word that this version does not know.
    #[serde(other)]
    Unknown,
}

/// `ready`: the replay is done.
#[derive(Debug, Clone, Deserialize)]
#[non_exhaustive]
pub struct Ready {
    /// How the session began.
    pub resume: Resume,
    /// How many events were replayed.
    #[serde(default)]
    pub replayed: u64,
    /// The session's position. It replaces the cursor, downwards too.
    #[serde(default)]
    pub id: Option<String>,
}

/// `event`: one event of a channel.
#[derive(Debug, Clone, Deserialize)]
#[non_exhaustive]
pub struct Event {
    /// The channel it was published on.
    pub channel: String,
    /// Its place in the log; `None` for an ephemeral event.
    #[serde(default)]
    pub id: Option<String>,
    /// The event's name, where it was published with one.
    #[serde(default)]
    pub event: Option<String>,
    /// The payload, as JSON text.
    pub data: Box<RawValue>,
    /// It comes from the replay of a later `subscribe` and does not move the cursor.
    #[serde(default)]
    pub replay: bool,
}

/// `position`: nothing missed up to here.
#[derive(Debug, Clone, Deserialize)]
#[non_exhaustive]
pub struct Position {
    /// The session's position.
    pub id: String,
}

/// `ok`: what was asked under `reference` is done.
#[derive(Debug, Clone, Deserialize)]
#[non_exhaustive]
pub struct Subscribed {
    /// The reference that the asking call returned.
    #[serde(rename = "ref", default, deserialize_with = "text_or_number")]
    pub reference: Option<String>,
    /// The channel, where it was about one.
    #[serde(default)]
    pub channel: Option<String>,
    /// How the channel began; its replay came before this message.
    #[serde(default)]
    pub resume: Option<Resume>,
    /// The session's position.
    #[serde(default)]
    pub id: Option<String>,
}

/// `error`: a message of ours was refused.
#[derive(Debug, Clone, Deserialize)]
#[non_exhaustive]
pub struct Failed {
    /// The reference of what was refused.
    #[serde(rename = "ref", default, deserialize_with = "text_or_number")]
    pub reference: Option<String>,
    /// A word to act on: `forbidden`, `rate_limited`, …
    pub code: String,
    /// A sentence for people.
    #[serde(default)]
    pub message: String,
    /// The same may succeed later. What a `subscribe` or `unsubscribe` of the client asked is
    /// asked again by itself.
    #[serde(default)]
    pub retry: bool,
    /// Not before this many ms.
    #[serde(default)]
    pub after_ms: Option<u64>,
}

/// `gap`: events of a channel may be missing.
#[derive(Debug, Clone, Deserialize)]
#[non_exhaustive]
pub struct Gap {
    /// The channel.
    pub channel: String,
    /// Why: `expired`, `evicted`, `reset`, …
    pub reason: String,
    /// Where it goes on.
    #[serde(default)]
    pub id: Option<String>,
}

/// `unsubscribed`: the server took a channel away.
#[derive(Debug, Clone, Deserialize)]
#[non_exhaustive]
pub struct Unsubscribed {
    /// The channel.
    pub channel: String,
    /// Why: `grant`, `plugin` or `admin`.
    #[serde(default)]
    pub reason: String,
}

/// `token_expiring`: the token ends soon.
#[derive(Debug, Clone, Copy, Deserialize)]
#[non_exhaustive]
pub struct TokenExpiring {
    /// In this many ms.
    #[serde(default)]
    pub in_ms: u64,
}

/// What the server wants us to do after the end of a session.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Reconnect {
    /// Come back later.
    After,
    /// Come back with a new token.
    Reauth,
    /// Do not come back.
    Never,
    /// A word that this version does not know; treated as `After`.
    #[serde(other)]
    Unknown,
}

/// `bye`: the session ends.
#[derive(Debug, Clone, Deserialize)]
#[non_exhaustive]
pub struct Bye {
    /// Why, in a word: `drain`, `recycle`, `revoked`, …
    pub reason: String,
    /// The close code to come.
    #[serde(default)]
    pub code: Option<u16>,
    /// What to do next.
    pub reconnect: Reconnect,
    /// Not before this many ms.
    #[serde(default)]
    pub after_ms: Option<u64>,
    /// The session's position.
    #[serde(default)]
    pub id: Option<String>,
}

/// The client's own message: not connected, and for how long.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct Lost {
    /// What happened.
    pub why: Loss,
    /// The next attempt comes after this time.
    pub retry_in: Duration,
}

/// What came is no JSON object with a `type`, or one of a known type without its fields.
#[derive(Debug, thiserror::Error)]
#[error("not a message of this protocol")]
pub struct NotAMessage(#[from] serde_json::Error);

#[derive(Deserialize)]
struct Head<'a> {
    #[serde(rename = "type", borrow)]
    kind: std::borrow::Cow<'a, str>,
}

impl Message {
    /// Reads one message.
    ///
    /// # Errors
    /// `NotAMessage`; a client should skip it and go on.
    pub fn parse(text: &str) -> Result<Message, NotAMessage> {
        let head: Head<'_> = serde_json::from_str(text)?;
        Ok(match &*head.kind {
            "hello" => Message::Hello(read(text)?),
            "ready" => Message::Ready(read(text)?),
            "event" => Message::Event(read(text)?),
            "position" => Message::Position(read(text)?),
            "ok" => Message::Ok(read(text)?),
            "error" => Message::Error(read(text)?),
            "gap" => Message::Gap(read(text)?),
            "unsubscribed" => Message::Unsubscribed(read(text)?),
            "token_expiring" => Message::TokenExpiring(read(text)?),
            "bye" => Message::Bye(read(text)?),
            "pong" => Message::Pong,
            _ => Message::Other(read(text)?),
        })
    }
}

fn read<T: DeserializeOwned>(text: &str) -> Result<T, NotAMessage> {
    Ok(serde_json::from_str(text)?)
}

/// A reference comes back as it was sent; other clients may have sent numbers, ours are texts.
fn text_or_number<'de, D: serde::Deserializer<'de>>(from: D) -> Result<Option<String>, D::Error> {
    Ok(match Option::<serde_json::Value>::deserialize(from)? {
        Some(serde_json::Value::String(text)) => Some(text),
        Some(serde_json::Value::Null) | None => None,
        Some(other) => Some(other.to_string()),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_message_of_the_wire_is_read_with_its_fields() {
        let hello = r#"{"type":"hello","session":"s1","node":"n","user":"42","channels":["a","b"],"heartbeat_ms":25000,
            "expires_at":1764460000,"reconnect":{"min_ms":500,"max_ms":30000,"first_max_ms":5000},"new_field":{}}"#;
        let Ok(Message::Hello(hello)) = Message::parse(hello) else { panic!("hello") };
        assert_eq!((hello.session.as_str(), hello.channels.len(), hello.heartbeat_ms), ("s1", 2, Some(25_000)));
        assert_eq!(hello.reconnect.map(|r| (r.min_ms, r.max_ms, r.first_max_ms)), Some((500, 30_000, 5_000)));

        let Ok(Message::Ready(ready)) = Message::parse(r#"{"type":"ready","resume":"gap","replayed":3,"id":"5-1"}"#)
        else {
            panic!("ready")
        };
        assert_eq!((ready.resume, ready.replayed, ready.id.as_deref()), (Resume::Gap, 3, Some("5-1")));

        let Ok(Message::Bye(bye)) = Message::parse(
            r#"{"type":"bye","reason":"drain","code":1001,"reconnect":"after","after_ms":12,"id":"5-1"}"#,
        ) else {
            panic!("bye")
        };
        assert_eq!((bye.code, bye.reconnect, bye.after_ms), (Some(1001), Reconnect::After, Some(12)));
        assert!(matches!(Message::parse(r#"{"type":"pong"}"#), Ok(Message::Pong)));
    }

    #[test]
    fn the_data_of_an_event_keeps_its_exact_text() {
        let Ok(Message::Event(event)) =
            Message::parse(r#"{"type":"event","channel":"c","id":"1-0","data":{"n":1.0e2 , "s":"\u00e9"}}"#)
        else {
            panic!("event")
        };
        assert_eq!(event.data.get(), r#"{"n":1.0e2 , "s":"\u00e9"}"#);
        assert!(!event.replay && event.event.is_none());
    }

    #[test]
    fn a_type_nobody_knows_is_passed_on_whole() {
        let text = r#"{"type":"presence","who":[1,2]}"#;
        let Ok(Message::Other(raw)) = Message::parse(text) else { panic!("other") };
        assert_eq!(raw.get(), text);
    }

    #[test]
    fn words_nobody_knows_do_not_break_a_known_type() {
        let Ok(Message::Bye(bye)) = Message::parse(r#"{"type":"bye","reason":"x","reconnect":"tomorrow"}"#) else {
            panic!("bye")
        };
        assert_eq!(bye.reconnect, Reconnect::Unknown);
    }

    #[test]
    fn what_is_no_message_is_an_error_and_no_panic() {
        for text in ["", "1", "[]", "{}", r#"{"type":1}"#, r#"{"type":"event"}"#, "{\"type\":\"hello\"}"] {
            assert!(Message::parse(text).is_err(), "{text}");
        }
    }
}
