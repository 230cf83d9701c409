//! What a client says in an open session: `subscribe`, `unsubscribe`, `auth`, `busy`, `ping`, and
//! whatever a plugin understands. Decides which of it is understood and allowed for now, and what is
//! answered at once. What has to wait for its turn is `asks`', a new token `token`'s, what is taken from a
//! client `withdraw`'s; how a channel comes to be live is `attach`'s.

mod asks;
mod token;
mod withdraw;

use std::borrow::Cow;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use serde::{Deserialize, Deserializer};
use serde_json::value::RawValue;
use tokio::time::Instant;

use crate::channel::Channel;
use crate::close::{CloseReason, Violation};
use crate::cursor::Since;
use crate::event::frame;
use crate::hub::Hub;
use crate::message::{self, ErrorCode};
use crate::plugin::{Admission, Inbound, Received};
use crate::session::{Flood, Session};

pub(crate) use asks::Asks;
pub(crate) use withdraw::{Had, unsubscribe, withdraw};

use asks::Wish;

/// Longest `ref` that is echoed, in bytes of JSON.
const MAX_REFERENCE_BYTES: usize = 128;
/// What any message costs of the message rate.
const MESSAGE: Cost = Cost { now: 1.0, whole: 1.0 };
/// A `subscribe` with `since` reads history and costs ten (contract), one of which is taken as of any
/// message.
const REPLAY: Cost = Cost { now: 9.0, whole: 10.0 };
/// Longest span of `busy` (contract).
const MAX_BUSY: Duration = Duration::from_secs(60);

/// What a message takes of the message rate.
#[derive(Clone, Copy)]
struct Cost {
    now: f64,
    /// Altogether: repeating it makes sense once so much is there again.
    whole: f64,
}

#[derive(Deserialize)]
struct Kind<'a> {
    #[serde(borrow, rename = "type")]
    kind: Cow<'a, str>,
    #[serde(borrow, rename = "ref", default, deserialize_with = "as_it_is")]
    reference: Option<&'a RawValue>,
}

/// A `null` is something, too.
fn as_it_is<'de, D: Deserializer<'de>>(from: D) -> Result<Option<&'de RawValue>, D::Error> {
    <&RawValue>::deserialize(from).map(Some)
}

#[derive(Deserialize)]
struct ChannelFields<'a> {
    #[serde(borrow)]
    channel: Cow<'a, str>,
    #[serde(borrow)]
    since: Option<Cow<'a, str>>,
}

impl ChannelFields<'_> {
    fn since(&self) -> Since {
        Since::parse(self.since.as_deref().unwrap_or_default().as_bytes())
    }
}

#[derive(Deserialize)]
struct AuthFields<'a> {
    #[serde(borrow)]
    token: Cow<'a, str>,
}

#[derive(Deserialize)]
struct BusyFields {
    for_ms: u64,
}

/// A whole message came in. Called by the session's driver, in order; never waits.
pub(crate) fn received(hub: &Arc<Hub>, session: &Arc<Session>, message: Inbound) {
    if session.info.admission == Admission::Raw {
        offer_to_plugins(hub, session, &message, None);
    } else {
        looked_at(hub, session, &message);
    }
    // Answers count like events: who does not read them is slow.
    if session.is_overfull(hub.config.session.outbox_bytes) {
        hub.end(session, CloseReason::Slow);
    }
}

fn looked_at(hub: &Arc<Hub>, session: &Arc<Session>, message: &Inbound) {
    let now = Instant::now();
    // What follows our last words is not looked at.
    if session.ending().is_some() {
        return;
    }
    let Inbound::Text(text) = message else {
        if has_room(hub, session, MESSAGE, now, None) {
            offer_to_plugins(hub, session, message, None);
        }
        return;
    };
    // Read before the rate is looked at: who is told "too many" must know of which.
    let kind =
        parse::<Kind<'_>>(text).filter(|kind| kind.reference.is_none_or(|r| r.get().len() <= MAX_REFERENCE_BYTES));
    let cost = kind.as_ref().map_or(MESSAGE, |kind| cost_of(kind, text));
    if !has_room(hub, session, cost, now, kind.as_ref().and_then(|kind| kind.reference)) {
        return;
    }
    match kind {
        Some(kind) => known(hub, session, message, text, &kind, now),
        None => say_error(session, None, ErrorCode::BadMessage, "a message is a JSON object with a type", None),
    }
}

/// As of any message; but who is refused is told when there is room for all that this one costs.
fn cost_of(kind: &Kind<'_>, text: &[u8]) -> Cost {
    let is_replay =
        kind.kind == "subscribe" && parse::<ChannelFields<'_>>(text).is_some_and(|f| f.since() != Since::Now);
    if is_replay { Cost { whole: REPLAY.whole, ..MESSAGE } } else { MESSAGE }
}

fn known(hub: &Arc<Hub>, session: &Arc<Session>, message: &Inbound, text: &Bytes, kind: &Kind<'_>, now: Instant) {
    let reference = kind.reference;
    match &*kind.kind {
        "subscribe" | "unsubscribe" => match parse::<ChannelFields<'_>>(text) {
            Some(fields) => channel_ask(hub, session, reference, &kind.kind, &fields, now),
            None => {
                say_error(session, reference, ErrorCode::BadMessage, "channel must be a string, since a string", None)
            }
        },
        "auth" => match parse::<AuthFields<'_>>(text) {
            Some(fields) => token::auth(hub, session, reference, &fields.token),
            None => say_error(session, reference, ErrorCode::BadMessage, "token must be a string", None),
        },
        "busy" => match parse::<BusyFields>(text).map(|f| Duration::from_millis(f.for_ms)) {
            Some(span) if span <= MAX_BUSY => session.lock().set_busy(now, span),
            _ => {
                say_error(session, reference, ErrorCode::BadMessage, "for_ms must be a whole number up to 60000", None)
            }
        },
        "ping" => session.say(&message::pong()),
        _ => offer_to_plugins(hub, session, message, reference),
    }
}

/// A JSON object (an array would fit a struct, too).
fn parse<'a, T: Deserialize<'a>>(text: &'a [u8]) -> Option<T> {
    let first = text.iter().find(|b| !b.is_ascii_whitespace())?;
    (*first == b'{').then(|| serde_json::from_slice(text).ok()).flatten()
}

fn has_room(hub: &Arc<Hub>, session: &Arc<Session>, cost: Cost, now: Instant, reference: Option<&RawValue>) -> bool {
    let taken = session.lock().take_messages(cost.now, now, &hub.config.session);
    match taken {
        Ok(()) => true,
        Err(Flood::Over(even)) => {
            // The debt, and then what a repetition takes: sooner it would be refused again. A
            // millisecond more, as parts of one are not told.
            let after = even + Duration::from_secs_f64(cost.whole / hub.config.session.client_rate);
            let after = after + Duration::from_millis(1);
            say_error(session, reference, ErrorCode::RateLimited, "too many messages", Some(after));
            false
        }
        Err(Flood::Far) => {
            hub.end(session, CloseReason::BadMessage(Violation::Policy));
            false
        }
    }
}

fn say_error(session: &Session, reference: Option<&RawValue>, code: ErrorCode, text: &str, after: Option<Duration>) {
    session.say(&message::error(reference, code, text, after));
}

fn offer_to_plugins(hub: &Arc<Hub>, session: &Arc<Session>, message: &Inbound, reference: Option<&RawValue>) {
    match hub.plugins.received(&session.info, message) {
        Received::Handled => {}
        Received::Reply(Inbound::Text(bytes)) => session.send(frame(0x1, &bytes)),
        Received::Reply(Inbound::Binary(bytes)) => session.send(frame(0x2, &bytes)),
        Received::Leave(reason) => hub.end(session, reason),
        Received::Pass => match message {
            Inbound::Binary(_) => hub.end(session, CloseReason::BadMessage(Violation::Unsupported)),
            Inbound::Text(_) if session.info.admission == Admission::Raw => {}
            Inbound::Text(_) => say_error(session, reference, ErrorCode::UnknownType, "no such message type", None),
        },
    }
}

fn channel_ask(
    hub: &Arc<Hub>,
    session: &Arc<Session>,
    reference: Option<&RawValue>,
    kind: &str,
    fields: &ChannelFields<'_>,
    now: Instant,
) {
    let Ok(channel) = Channel::new(&fields.channel) else {
        let text = "a channel name has 1 to 200 bytes of A-Z a-z 0-9 _ - . : + @ = , / | ~ %";
        return say_error(session, reference, ErrorCode::UnknownChannel, text, None);
    };
    let wish = if kind == "unsubscribe" { Wish::Leave } else { Wish::Join(fields.since()) };
    let is_replay = !matches!(wish, Wish::Leave | Wish::Join(Since::Now));
    if !is_replay || has_room(hub, session, REPLAY, now, reference) {
        asks::ask(hub, session, reference, channel, wish, now);
    }
}

#[cfg(test)]
mod tests;
