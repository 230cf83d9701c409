//! What a client asks for in an open session: `subscribe`, `unsubscribe`, `auth`, `busy`, `ping`,
//! and whatever a plugin understands. Decides what is answered; how a channel comes to be live is
//! `attach`'s.

use std::borrow::Cow;
use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use serde::Deserialize;
use serde_json::value::RawValue;
use tokio::time::{Instant, timeout_at};

use crate::attach::{self, Late};
use crate::auth::{Denied, Identity};
use crate::channel::Channel;
use crate::close::{CloseReason, Violation};
use crate::cursor::Since;
use crate::event::frame;
use crate::hub::Hub;
use crate::message::{self, ErrorCode, Unsubscribed};
use crate::plugin::{Admission, Inbound, Received};
use crate::refusal::RefusalCode;
use crate::revocation::CheckOutcome;
use crate::session::{Flood, Session, Stage, SubStage};

/// Longest `ref` that is echoed, in bytes of JSON.
const MAX_REFERENCE_BYTES: usize = 128;
/// What any message costs of the message rate.
const MESSAGE: Cost = Cost { now: 1.0, whole: 1.0 };
/// A `subscribe` with `since` reads history and costs ten (contract), one of which is taken as of any
/// message.
const REPLAY: Cost = Cost { now: 9.0, whole: 10.0 };
const NOT_GRANTED: &str = "this token does not grant the channel";
/// Longest span of `busy` (contract).
const MAX_BUSY: Duration = Duration::from_secs(60);

/// What a client asked for and has not got yet; worked off one at a time.
#[derive(Default)]
pub(crate) struct Asks {
    queue: VecDeque<ChannelAsk>,
    /// The one under way.
    pub current: Option<Arc<ChannelAsk>>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Wish {
    Join(Since),
    Leave,
    /// The new token joins it, nobody asked: it stays a wish until it is fulfilled.
    Granted,
}

/// A `subscribe` or `unsubscribe` waiting for its turn.
#[derive(Debug)]
pub(crate) struct ChannelAsk {
    pub reference: Option<Box<RawValue>>,
    pub channel: Channel,
    wish: Wish,
    deadline: Instant,
}

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
    #[serde(borrow, rename = "ref")]
    reference: Option<&'a RawValue>,
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
            Some(fields) => auth(hub, session, reference, &fields.token),
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
    let wish = if kind == "unsubscribe" {
        Wish::Leave
    } else {
        let since = fields.since();
        if since != Since::Now && !has_room(hub, session, REPLAY, now, reference) {
            return;
        }
        if !is_granted(hub, session, &channel) {
            return say_error(session, reference, ErrorCode::Forbidden, NOT_GRANTED, None);
        }
        Wish::Join(since)
    };
    let deadline = now + hub.config.auth_timeout;
    let ask = ChannelAsk { reference: reference.map(ToOwned::to_owned), channel, wish, deadline };
    enqueue(hub, session, ask);
}

fn enqueue(hub: &Arc<Hub>, session: &Arc<Session>, ask: ChannelAsk) {
    let mut state = session.lock();
    if state.is_over() {
        return;
    }
    let n_queued = state.asks.as_ref().map_or(0, |asks| asks.queue.len());
    // Leaving is always possible; the queue is bounded by the same number all the same.
    if n_queued >= hub.config.max_channels {
        drop(state);
        return say_error(
            session,
            ask.reference.as_deref(),
            ErrorCode::TooManyChannels,
            "too many channels asked for at once",
            None,
        );
    }
    let is_first = state.asks.is_none();
    state.asks.get_or_insert_default().queue.push_back(ask);
    drop(state);
    if is_first {
        hub.tasks.spawn(work_off(hub.clone(), session.clone()));
    }
}

/// Works off what one session asked for, in order, one replay at a time. Ends when nothing is left
/// or the session does.
async fn work_off(hub: Arc<Hub>, session: Arc<Session>) {
    while let Some(ask) = next_ask(&session) {
        match ask.wish {
            Wish::Leave => {
                hub.leave_channel(&session, &ask.channel);
                let position = hub.session_position(&session);
                session.say(&message::ok(ask.reference.as_deref(), Some(&ask.channel), None, position));
            }
            Wish::Join(since) => join(&hub, &session, &ask, since).await,
            Wish::Granted => granted(&hub, &session, &ask).await,
        }
    }
}

fn next_ask(session: &Session) -> Option<Arc<ChannelAsk>> {
    let mut state = session.lock();
    let asks = state.asks.as_mut()?;
    match asks.queue.pop_front() {
        Some(ask) => {
            let ask = Arc::new(ask);
            asks.current = Some(ask.clone());
            Some(ask)
        }
        None => {
            state.asks = None;
            None
        }
    }
}

async fn join(hub: &Arc<Hub>, session: &Arc<Session>, ask: &ChannelAsk, since: Since) {
    let reference = ask.reference.as_deref();
    let opened = session.until(|state| state.stage != Stage::Opening);
    if timeout_at(ask.deadline, opened).await.is_err() {
        return say_error(session, reference, ErrorCode::Unavailable, "the session is not ready yet", None);
    }
    if session.lock().find(&ask.channel).is_some() {
        let position = hub.session_position(session);
        return session.say(&message::ok(reference, Some(&ask.channel), Some(message::Resume::Ok), position));
    }
    // Asked again, now that its turn has come: a token with fewer grants may have replaced the one
    // that the question was asked with.
    if !is_granted(hub, session, &ask.channel) {
        return say_error(session, reference, ErrorCode::Forbidden, NOT_GRANTED, None);
    }
    if !has_place(hub, session, ask) {
        return;
    }
    if attached(hub, session, &ask.channel, since, ask.deadline).await.is_err() {
        say_error(session, reference, ErrorCode::Unavailable, "the backplane did not answer in time", None);
    }
}

/// A channel that the new token joins. Nobody waits for an answer, so what is no news is not told,
/// and while the backplane is away it goes behind what was asked for meanwhile and has its turn again.
async fn granted(hub: &Arc<Hub>, session: &Arc<Session>, ask: &ChannelAsk) {
    let deadline = Instant::now() + hub.config.auth_timeout;
    let opened = timeout_at(deadline, session.until(|state| state.stage != Stage::Opening)).await;
    let is_held = session.lock().find(&ask.channel).is_some();
    if is_held || !is_granted(hub, session, &ask.channel) || !has_place(hub, session, ask) {
        return;
    }
    if opened.is_err() || attached(hub, session, &ask.channel, Since::Now, deadline).await.is_err() {
        let again = ChannelAsk { reference: None, channel: ask.channel.clone(), wish: Wish::Granted, deadline };
        enqueue(hub, session, again);
    }
}

/// May the session's identity, as it is now, hear the channel?
fn is_granted(hub: &Hub, session: &Session, channel: &Channel) -> bool {
    let identity = session.lock().identity.clone();
    hub.plugins.may_subscribe(&identity, channel)
}

/// Has the session room for one more channel? It is told where it has none.
fn has_place(hub: &Hub, session: &Session, ask: &ChannelAsk) -> bool {
    let has_place = session.lock().n_subs() < hub.config.max_channels;
    if !has_place {
        let text = format!(
            "a session hears at most {} channels (GATEWAY_MAX_CHANNELS): {} is one too many",
            hub.config.max_channels, ask.channel
        );
        say_error(session, ask.reference.as_deref(), ErrorCode::TooManyChannels, &text, None);
    }
    has_place
}

/// Listens, replays, answers; where the backplane is late the channel is off the session again.
async fn attached(
    hub: &Arc<Hub>,
    session: &Arc<Session>,
    channel: &Channel,
    since: Since,
    deadline: Instant,
) -> Result<(), Late> {
    hub.join_channel(session, channel, SubStage::Joining);
    let ended = session.until(|state| state.is_over());
    let joined = tokio::select! {
        biased;
        () = ended => Ok(()),
        joined = attach::subscribe(hub, session, channel, since, deadline) => joined,
    };
    match joined {
        // What a new token took off meanwhile has had its answer.
        Err(Late) if take_off(hub, session, channel).is_some() => Err(Late),
        _ => Ok(()),
    }
}

/// Answered at once unless the keys must be fetched or the revocation list be asked.
fn auth(hub: &Arc<Hub>, session: &Arc<Session>, reference: Option<&RawValue>, token: &str) {
    // In the order in which they came: a later one that is found good earlier stays in force.
    let turn = {
        let mut state = session.lock();
        state.n_auths += 1;
        state.n_auths
    };
    let verified = match hub.verifier.verify(token, hub.clock.unix()) {
        Ok(identity) if !is_same_user(session, &identity) => return say_another_sub(session, reference),
        Err(denied) if denied != Denied::UnknownKey => return say_denied(session, reference, denied),
        verified => verified.map_err(|_| token.to_owned()),
    };
    let (hub, session) = (hub.clone(), session.clone());
    let reference = reference.map(ToOwned::to_owned);
    hub.tasks.clone().spawn(async move {
        let reference = reference.as_deref();
        let identity = match verified {
            Ok(identity) => Ok(identity),
            Err(token) => {
                let deadline = Instant::now() + hub.config.auth_timeout;
                hub.verifier.authenticate(&token, &hub.clock, deadline).await
            }
        };
        match identity {
            Ok(identity) if is_same_user(&session, &identity) => {
                take_over(&hub, &session, reference, &identity, turn).await;
            }
            Ok(_) => say_another_sub(&session, reference),
            Err(denied) => say_denied(&session, reference, denied),
        }
    });
}

fn is_same_user(session: &Session, identity: &Identity) -> bool {
    identity.user == session.info.identity.user
}

fn say_another_sub(session: &Session, reference: Option<&RawValue>) {
    say_error(session, reference, ErrorCode::TokenInvalid, "the token is of another sub", None);
}

fn say_denied(session: &Session, reference: Option<&RawValue>, denied: Denied) {
    let code = match denied.code() {
        RefusalCode::TokenExpired => ErrorCode::TokenExpired,
        RefusalCode::AuthUnavailable => ErrorCode::Unavailable,
        _ => ErrorCode::TokenInvalid,
    };
    say_error(session, reference, code, denied.detail(), None);
}

/// Puts a verified identity in the place of the session's, unless it was revoked.
async fn take_over(
    hub: &Arc<Hub>,
    session: &Arc<Session>,
    reference: Option<&RawValue>,
    identity: &Arc<Identity>,
    turn: u32,
) {
    match hub.revocations.check(identity).await {
        CheckOutcome::Revoked => say_error(session, reference, ErrorCode::TokenRevoked, "the token was revoked", None),
        CheckOutcome::Unavailable => {
            say_error(session, reference, ErrorCode::Unavailable, "the revocation list cannot be read now", None);
        }
        CheckOutcome::Good => {
            let before = session.lock().identity.clone();
            hub.replace_identity(session, identity, turn);
            let position = hub.session_position(session);
            session.say(&message::ok(reference, None, None, position));
            join_granted(hub, session, &before, identity);
        }
    }
}

/// Joins what the new token names and the one `before` it did not, as a new connection would. What
/// the client has left of the old one stays left.
fn join_granted(hub: &Arc<Hub>, session: &Arc<Session>, before: &Identity, after: &Arc<Identity>) {
    // A later token that was faster is in force, with channels of its own.
    if !Arc::ptr_eq(&session.lock().identity, after) {
        return;
    }
    let deadline = Instant::now() + hub.config.auth_timeout;
    for channel in after.grants.joined.iter().filter(|channel| !before.grants.joined.contains(channel)) {
        let ask = ChannelAsk { reference: None, channel: channel.clone(), wish: Wish::Granted, deadline };
        enqueue(hub, session, ask);
    }
}

/// Takes away what the session may no longer hear. `reason` is for what its identity does not
/// grant; where a plugin forbids what the identity grants, the plugin is the reason.
pub(crate) fn withdraw(hub: &Arc<Hub>, session: &Arc<Session>, reason: Unsubscribed) {
    let (identity, channels): (_, Vec<Channel>) = {
        let state = session.lock();
        (state.identity.clone(), state.subs.iter().flatten().map(|sub| sub.channel.clone()).collect())
    };
    for channel in channels {
        if hub.plugins.may_subscribe(&identity, &channel) {
            continue;
        }
        let reason = if identity.grants.allow(&channel) { Unsubscribed::Plugin } else { reason };
        match take_off(hub, session, &channel) {
            Some(Off::Heard) => session.say(&message::unsubscribed(&channel, reason)),
            Some(Off::Asked(ask)) if ask.wish != Wish::Granted => {
                say_error(session, ask.reference.as_deref(), ErrorCode::Forbidden, NOT_GRANTED, None);
            }
            Some(Off::Asked(_)) | None => {}
        }
    }
}

/// Had the session a channel that it was to lose?
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Had {
    It,
    Nothing,
}

/// Takes one channel away because an administrator says so; the client is told.
pub(crate) fn unsubscribe(hub: &Hub, session: &Session, channel: &Channel) -> Had {
    match take_off(hub, session, channel) {
        Some(Off::Heard) => session.say(&message::unsubscribed(channel, Unsubscribed::Admin)),
        Some(Off::Asked(ask)) if ask.wish != Wish::Granted => {
            say_error(session, ask.reference.as_deref(), ErrorCode::Forbidden, "taken away by an administrator", None);
        }
        Some(Off::Asked(_)) => {}
        None => return Had::Nothing,
    }
    Had::It
}

/// A channel that was taken off a session.
enum Off {
    /// It was live.
    Heard,
    /// It was being joined: this has no answer yet, and will get none from `attach`.
    Asked(Arc<ChannelAsk>),
}

fn take_off(hub: &Hub, session: &Session, channel: &Channel) -> Option<Off> {
    let (slot, off) = {
        let mut state = session.lock();
        let sub = state.take_sub(channel)?;
        // An answer is queued in the moment in which the channel is live.
        let asked = state.asks.as_ref().filter(|_| sub.stage == SubStage::Joining);
        let current = asked.and_then(|asks| asks.current.clone());
        (sub.slot(), current.map_or(Off::Heard, Off::Asked))
    };
    hub.channels.unlisten(channel, slot);
    Some(off)
}

#[cfg(test)]
mod tests;
