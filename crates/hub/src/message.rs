//! What the server says: the JSON objects of the protocol, framed for a session's wire. The same
//! objects go out as WebSocket text frames and as SSE events.

use std::time::Duration;

use bytes::Bytes;
use serde_json::value::RawValue;
use serde_json::{Value, json};

use crate::backplane::GapReason;
use crate::channel::Channel;
use crate::close::{CloseReason, PlannedCodes, Reconnect};
use crate::cursor::EventId;
use crate::event::{Wire, sse_chunk, text_frame};
use crate::telemetry::ResumeLabel;

/// `retry:` of a stream that must not come back by itself: a day in ms (contract).
const NEVER_RETRY_MS: u64 = 86_400_000;

/// Why a client's message was not carried out. The words of `error.code`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ErrorCode {
    /// No JSON object with a `type`, or a field of the wrong kind.
    BadMessage,
    /// Neither we nor a plugin know this type.
    UnknownType,
    /// The identity may not hear this channel.
    Forbidden,
    /// The name is none.
    UnknownChannel,
    /// Over `GATEWAY_MAX_CHANNELS`; in-band `auth`: the token joins more.
    TooManyChannels,
    /// Over the message rate, or too much waits for its turn; `after_ms` says when there is room.
    RateLimited,
    /// In-band `auth`: the token is not good, or of another `sub`.
    TokenInvalid,
    /// In-band `auth`.
    TokenExpired,
    /// In-band `auth`.
    TokenRevoked,
    /// The backplane does not answer in time: ask again.
    Unavailable,
}

impl ErrorCode {
    /// The word on the wire.
    pub fn word(self) -> &'static str {
        match self {
            ErrorCode::BadMessage => "bad_message",
            ErrorCode::UnknownType => "unknown_type",
            ErrorCode::Forbidden => "forbidden",
            ErrorCode::UnknownChannel => "unknown_channel",
            ErrorCode::TooManyChannels => "too_many_channels",
            ErrorCode::RateLimited => "rate_limited",
            ErrorCode::TokenInvalid => "token_invalid",
            ErrorCode::TokenExpired => "token_expired",
            ErrorCode::TokenRevoked => "token_revoked",
            ErrorCode::Unavailable => "unavailable",
        }
    }

    /// Does asking again make sense?
    pub fn may_retry(self) -> bool {
        matches!(self, ErrorCode::RateLimited | ErrorCode::Unavailable)
    }
}

/// Why a channel was taken from an open session.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unsubscribed {
    /// The new token does not grant it.
    Grant,
    /// A plugin said so.
    Plugin,
    /// An administrator said so.
    Admin,
}

impl Unsubscribed {
    fn word(self) -> &'static str {
        match self {
            Unsubscribed::Grant => "grant",
            Unsubscribed::Plugin => "plugin",
            Unsubscribed::Admin => "admin",
        }
    }
}

/// How a session's cursor was honoured.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Resume {
    /// There was none to honour.
    New,
    /// Nothing was missed.
    Ok,
    /// A `gap` went before.
    Gap,
}

impl Resume {
    /// The word on the wire.
    pub fn word(self) -> &'static str {
        match self {
            Resume::New => "new",
            Resume::Ok => "ok",
            Resume::Gap => "gap",
        }
    }
}

impl From<Resume> for ResumeLabel {
    fn from(resume: Resume) -> Self {
        match resume {
            Resume::New => ResumeLabel::New,
            Resume::Ok => ResumeLabel::Ok,
            Resume::Gap => ResumeLabel::Gap,
        }
    }
}

/// A message to one session, not yet framed.
#[derive(Clone, Debug)]
pub struct Message {
    kind: &'static str,
    /// The SSE `id:`, where the message moves the cursor.
    id: Option<EventId>,
    /// The SSE `retry:`.
    retry_ms: Option<u64>,
    json: Value,
    /// The client's own text for it, of which nothing is to be changed.
    reference: Option<Box<RawValue>>,
}

impl Message {
    fn new(kind: &'static str, mut json: Value) -> Self {
        json["type"] = kind.into();
        Self { kind, id: None, retry_ms: None, json, reference: None }
    }

    fn to(mut self, reference: Option<&RawValue>) -> Self {
        self.reference = reference.map(ToOwned::to_owned);
        self
    }

    fn at(mut self, id: EventId) -> Self {
        self.json["id"] = id.to_string().into();
        self.id = Some(id);
        self
    }

    /// The whole frame or chunk.
    pub fn on(&self, wire: Wire) -> Bytes {
        let json = self.text();
        match wire {
            Wire::Ws => text_frame(json.as_bytes()),
            Wire::Sse => {
                let id = self.id.map(|id| id.to_string());
                sse_chunk(Some(self.kind), id.as_deref(), self.retry_ms, json.as_bytes())
            }
        }
    }

    fn text(&self) -> String {
        let mut json = self.json.to_string();
        if let Some(reference) = &self.reference {
            // There is always a `type` before it.
            json.pop();
            json.push_str(",\"ref\":");
            // A raw line end in JSON text stands between tokens only, and would end an SSE line.
            json.extend(reference.get().chars().map(|c| if matches!(c, '\n' | '\r') { ' ' } else { c }));
            json.push('}');
        }
        json
    }
}

/// The first words of a session.
pub struct Hello<'a> {
    /// The session's id.
    pub session: &'a str,
    /// This node.
    pub node: &'a str,
    /// `sub`, if not anonymous.
    pub user: Option<&'a str>,
    /// What it hears from the start.
    pub channels: &'a [Channel],
    /// `GATEWAY_HEARTBEAT`.
    pub heartbeat: Duration,
    /// End of the token, Unix seconds.
    pub expires_at: Option<u64>,
    /// Bounds of the client's backoff.
    pub reconnect: Backoff,
    /// SSE's `retry:`, drawn per session.
    pub retry: Duration,
}

/// What clients are told about coming back: `reconnect` of `hello`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Backoff {
    /// Base of the backoff.
    pub min: Duration,
    /// Its cap, applied before the jitter.
    pub max: Duration,
    /// The first delay after a loss is drawn from zero to this.
    pub first_max: Duration,
}

impl Default for Backoff {
    /// 0.5 s, 30 s and 5 s: with them a lost node's 10,000 clients come back as fast as the
    /// others' buckets allow and no faster (simulated: t99 24 s of 23 s ideal, 1.8 attempts each).
    fn default() -> Self {
        Self { min: Duration::from_millis(500), max: Duration::from_secs(30), first_max: Duration::from_secs(5) }
    }
}

/// Whole milliseconds of a duration.
pub fn ms(d: Duration) -> u64 {
    u64::try_from(d.as_millis()).unwrap_or(u64::MAX)
}

/// `hello`.
pub fn hello(h: &Hello<'_>) -> Message {
    let mut m = Message::new(
        "hello",
        json!({
            "session": h.session,
            "node": h.node,
            "user": h.user,
            "channels": h.channels.iter().map(Channel::as_str).collect::<Vec<_>>(),
            "heartbeat_ms": ms(h.heartbeat),
            "expires_at": h.expires_at,
            "reconnect": {
                "min_ms": ms(h.reconnect.min),
                "max_ms": ms(h.reconnect.max),
                "first_max_ms": ms(h.reconnect.first_max),
            },
        }),
    );
    m.retry_ms = Some(ms(h.retry).max(1));
    m
}

/// `ready`: from `id` on nothing is missed.
pub fn ready(resume: Resume, replayed: usize, id: EventId) -> Message {
    Message::new("ready", json!({ "resume": resume.word(), "replayed": replayed })).at(id)
}

/// `position`.
pub fn position(id: EventId) -> Message {
    Message::new("position", json!({})).at(id)
}

/// `gap` on a channel. `id` is a position that is safe to resume from: nothing that is still to
/// come on any channel of the session lies at or below it.
pub fn gap(channel: &Channel, reason: GapReason, id: Option<EventId>) -> Message {
    let m = Message::new("gap", json!({ "channel": channel.as_str(), "reason": reason.word() }));
    match id {
        Some(id) => m.at(id),
        None => m,
    }
}

/// A `gap` a channel. Only the last carries the id and so moves the client's cursor: one that is
/// cut between two of them must be told of the others again.
pub fn gaps(gaps: &[(Channel, GapReason)], id: EventId) -> impl Iterator<Item = Message> + '_ {
    gaps.iter().enumerate().map(move |(i, (channel, reason))| {
        let is_last = i + 1 == gaps.len();
        gap(channel, *reason, is_last.then_some(id))
    })
}

/// `ok` to a client's message.
pub fn ok(
    reference: Option<&RawValue>,
    channel: Option<&Channel>,
    resume: Option<Resume>,
    id: Option<EventId>,
) -> Message {
    let mut json = json!({});
    if let Some(channel) = channel {
        json["channel"] = channel.as_str().into();
    }
    if let Some(resume) = resume {
        json["resume"] = resume.word().into();
    }
    let m = Message::new("ok", json).to(reference);
    match id {
        Some(id) => m.at(id),
        None => m,
    }
}

/// `error` to a client's message.
pub fn error(reference: Option<&RawValue>, code: ErrorCode, message: &str, after: Option<Duration>) -> Message {
    let mut json = json!({ "code": code.word(), "message": message, "retry": code.may_retry() });
    if let Some(after) = after {
        json["after_ms"] = ms(after).into();
    }
    Message::new("error", json).to(reference)
}

/// `unsubscribed`.
pub fn unsubscribed(channel: &Channel, reason: Unsubscribed) -> Message {
    Message::new("unsubscribed", json!({ "channel": channel.as_str(), "reason": reason.word() }))
}

/// `token_expiring`.
pub fn token_expiring(left: Duration) -> Message {
    Message::new("token_expiring", json!({ "in_ms": ms(left) }))
}

/// `pong`.
pub fn pong() -> Message {
    Message::new("pong", json!({}))
}

/// `bye`: the last message. `after` is drawn by the caller and not told where nobody shall return.
pub fn bye(reason: CloseReason, planned: PlannedCodes, after: Duration, id: Option<EventId>) -> Message {
    let reconnect = reason.reconnect();
    let mut json = json!({ "reason": reason.word(), "reconnect": reconnect.word() });
    if let Some(code) = reason.code(planned) {
        json["code"] = code.into();
    }
    if reconnect != Reconnect::Never {
        json["after_ms"] = ms(after).into();
    }
    let mut m = Message::new("bye", json);
    m.retry_ms = Some(if reconnect == Reconnect::Never { NEVER_RETRY_MS } else { ms(after).max(1) });
    match id {
        Some(id) => m.at(id),
        None => m,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_never_bye_tells_no_delay_and_parks_an_event_source_for_a_day() {
        let bye = bye(CloseReason::Revoked, PlannedCodes::default(), Duration::from_secs(3), None);
        let sse = String::from_utf8(bye.on(Wire::Sse).to_vec()).unwrap();
        assert!(sse.contains("retry: 86400000\nevent: bye\n"), "{sse}");
        assert!(!sse.contains("after_ms"), "{sse}");
    }

    #[test]
    fn a_cursor_moves_by_the_sse_id_of_ready_position_gap_and_bye() {
        let id = EventId { ms: 9, n: 1 };
        let channel = Channel::new("a").unwrap();
        for m in [ready(Resume::Ok, 3, id), position(id), gap(&channel, GapReason::Expired, Some(id))] {
            let sse = String::from_utf8(m.on(Wire::Sse).to_vec()).unwrap();
            assert!(sse.contains("\nid: 9-1\n") && sse.contains(r#""id":"9-1""#), "{sse}");
        }
    }
}
