//! What a client asked for and has not got yet. Decides whose turn it is, how long that may last, and how
//! much may wait: one at a time, in the order in which it came, the tokens that came with it counted. How
//! a channel comes to be live is `attach`'s.

use std::collections::VecDeque;
use std::mem;
use std::sync::Arc;
use std::time::Duration;

use serde_json::value::RawValue;
use tokio::time::{Instant, timeout_at};

use super::say_error;
use super::withdraw::{Had, take_off};
use crate::attach::{self, Late};
use crate::channel::Channel;
use crate::cursor::Since;
use crate::hub::{Hub, HubConfig};
use crate::message::{self, ErrorCode, Message, Resume};
use crate::session::{Session, Stage, State, SubStage};

pub(super) const NOT_GRANTED: &str = "this token does not grant the channel";
/// Most that waits for its turn where a session may hear fewer channels, however large a burst it may send:
/// with the longest names and references 128 KiB.
const MOST_WAITING: usize = 256;

/// What a client asked for and has not got yet; worked off one at a time. There is none of it where nothing
/// waits.
#[derive(Default)]
pub(crate) struct Asks {
    queue: VecDeque<ChannelAsk>,
    /// The one under way.
    pub current: Option<Arc<ChannelAsk>>,
    /// A task works it off.
    is_attended: bool,
    /// Tokens that are being checked, by their turns.
    unsettled: Vec<u32>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Wish {
    Join(Since),
    Leave,
    /// The new token joins it, nobody asked: it stays a wish until it is fulfilled.
    Granted,
}

/// A `subscribe` or `unsubscribe` waiting for its turn.
#[derive(Clone, Debug)]
pub(crate) struct ChannelAsk {
    pub reference: Option<Box<RawValue>>,
    pub channel: Channel,
    wish: Wish,
    asked_at: Instant,
    /// So many tokens came before it; a wish of the last of them counts as said with it.
    n_auths: u32,
}

impl ChannelAsk {
    /// The answer that it will not be, where somebody waits for one.
    pub fn forbidden(&self, why: &str) -> Option<Message> {
        let is_awaited = self.wish != Wish::Granted;
        is_awaited.then(|| message::error(self.reference.as_deref(), ErrorCode::Forbidden, why, None))
    }

    fn is_granted_of(&self, channel: &Channel) -> bool {
        self.wish == Wish::Granted && self.channel == *channel
    }

    fn say_unavailable(&self, session: &Session, why: &str) {
        say_error(session, self.reference.as_deref(), ErrorCode::Unavailable, why, None);
    }
}

impl Asks {
    /// Has one more its place? A client may send a burst and as much again in debt; what its tokens join
    /// is counted apart.
    fn has_room(&self, ask: &ChannelAsk, config: &HubConfig) -> bool {
        let is_granted = |ask: &ChannelAsk| ask.wish == Wish::Granted;
        let most = if is_granted(ask) {
            config.max_channels
        } else {
            config.max_channels.max(((2.0 * config.session.client_burst) as usize).min(MOST_WAITING))
        };
        self.queue.iter().filter(|other| is_granted(other) == is_granted(ask)).count() < most
    }

    /// What a token joins goes before what was asked for after that.
    fn put(&mut self, ask: ChannelAsk) {
        let comes_later = |other: &ChannelAsk| other.wish != Wish::Granted && other.n_auths >= ask.n_auths;
        let place = if ask.wish == Wish::Granted { self.queue.iter().position(comes_later) } else { None };
        self.queue.insert(place.unwrap_or(self.queue.len()), ask);
    }

    /// What was granted before a client asks to leave it is not joined after that.
    fn forget_granted(&mut self, left: &ChannelAsk) {
        self.queue.retain(|ask| !ask.is_granted_of(&left.channel) || ask.n_auths > left.n_auths);
    }
}

/// Nothing is kept of it where nothing waits.
fn release(state: &mut State) {
    if state.asks.as_ref().is_some_and(|asks| !asks.is_attended && asks.unsettled.is_empty()) {
        state.asks = None;
    }
}

/// Is one of the first so many tokens being checked that would be in force if it were good?
fn is_unsettled(state: &State, n_auths: u32) -> bool {
    let later = state.auth_in_force + 1..=n_auths;
    state.asks.as_ref().is_some_and(|asks| asks.unsettled.iter().any(|turn| later.contains(turn)))
}

/// A token that is being checked, for as long as this lives.
pub(super) struct Checking {
    session: Arc<Session>,
    turn: u32,
}

impl Checking {
    pub fn begin(session: &Arc<Session>, turn: u32) -> Self {
        let mut state = session.lock();
        if !state.is_over() {
            state.asks.get_or_insert_default().unsettled.push(turn);
        }
        drop(state);
        Self { session: session.clone(), turn }
    }
}

impl Drop for Checking {
    fn drop(&mut self) {
        let mut state = self.session.lock();
        if let Some(asks) = &mut state.asks {
            asks.unsettled.retain(|turn| *turn != self.turn);
            release(&mut state);
            state.tell_progress();
        }
    }
}

/// A client asks for a channel or leaves it: its turn will come, unless the answer is known.
pub(super) fn ask(
    hub: &Arc<Hub>,
    session: &Arc<Session>,
    reference: Option<&RawValue>,
    channel: Channel,
    wish: Wish,
    now: Instant,
) {
    let (n_auths, is_judged) = {
        let state = session.lock();
        (state.n_auths, !is_unsettled(&state, state.n_auths))
    };
    if is_judged && matches!(wish, Wish::Join(_)) && !is_granted(hub, session, &channel) {
        return say_error(session, reference, ErrorCode::Forbidden, NOT_GRANTED, None);
    }
    let ask = ChannelAsk { reference: reference.map(ToOwned::to_owned), channel, wish, asked_at: now, n_auths };
    enqueue(hub, session, ask);
}

/// The session's token of this turn joins a channel.
pub(super) fn grant(hub: &Arc<Hub>, session: &Arc<Session>, channel: &Channel, turn: u32) {
    let (channel, asked_at) = (channel.clone(), Instant::now());
    enqueue(hub, session, ChannelAsk { reference: None, channel, wish: Wish::Granted, asked_at, n_auths: turn });
}

fn enqueue(hub: &Arc<Hub>, session: &Arc<Session>, ask: ChannelAsk) {
    let mut state = session.lock();
    if state.is_over() {
        return;
    }
    let asks = state.asks.get_or_insert_default();
    if ask.wish == Wish::Granted {
        // Once is enough.
        asks.queue.retain(|other| !other.is_granted_of(&ask.channel));
    }
    if !asks.has_room(&ask, &hub.config) {
        drop(state);
        return say_crowded(hub, session, &ask);
    }
    asks.put(ask);
    let is_attended = mem::replace(&mut asks.is_attended, true);
    drop(state);
    if !is_attended {
        hub.tasks.spawn(work_off(hub.clone(), session.clone()));
    }
}

fn say_crowded(hub: &Hub, session: &Session, ask: &ChannelAsk) {
    if ask.wish == Wish::Granted {
        return say_too_many(hub, session, ask);
    }
    // The one under way is over by then, unless its client reads slowly.
    let after = hub.config.auth_timeout;
    let reference = ask.reference.as_deref();
    say_error(session, reference, ErrorCode::RateLimited, "too much waits for its turn", Some(after));
}

/// How long a turn may last: until the backplane, and nothing else, has let it wait for so long.
struct Patience {
    /// The end of what went well before; what was asked for later has waited since then only.
    since: Instant,
    span: Duration,
}

impl Patience {
    fn deadline(&self, ask: &ChannelAsk) -> Instant {
        ask.asked_at.max(self.since) + self.span
    }

    /// Something that was waited for came.
    fn renew(&mut self) {
        self.since = Instant::now();
    }
}

/// Works off what one session asked for, in order, one replay at a time. Ends when nothing is left
/// or the session does.
async fn work_off(hub: Arc<Hub>, session: Arc<Session>) {
    let mut patience = Patience { since: Instant::now(), span: hub.config.auth_timeout };
    while let Some(ask) = next_ask(&session, &mut patience).await {
        match ask.wish {
            Wish::Leave => leave(&hub, &session, &ask),
            Wish::Join(since) => join(&hub, &session, &ask, since, &mut patience).await,
            Wish::Granted => granted(&hub, &session, &ask, &mut patience).await,
        }
    }
}

/// Whose turn it is; the tokens that came before it are settled then, or it has waited for long enough.
async fn next_ask(session: &Session, patience: &mut Patience) -> Option<Arc<ChannelAsk>> {
    let early = |state: &State| {
        let first = state.asks.as_ref()?.queue.front()?;
        is_unsettled(state, first.n_auths).then(|| patience.deadline(first))
    };
    let wait = early(&session.lock());
    if let Some(deadline) = wait
        && timeout_at(deadline, session.until(|state| early(state).is_none())).await.is_ok()
    {
        patience.renew();
    }
    let mut state = session.lock();
    let asks = state.asks.as_mut()?;
    asks.current = asks.queue.pop_front().map(Arc::new);
    let current = asks.current.clone();
    if current.is_none() {
        asks.is_attended = false;
        release(&mut state);
    }
    current
}

fn leave(hub: &Hub, session: &Session, ask: &ChannelAsk) {
    let (reference, channel) = (ask.reference.as_deref(), &ask.channel);
    let mut slot = None;
    session.tell(hub.place.position(), |state, position| {
        slot = state.take_sub(channel).map(|sub| sub.slot());
        if let Some(asks) = &mut state.asks {
            asks.forget_granted(ask);
        }
        Some(message::ok(reference, Some(channel), None, position))
    });
    if let Some(slot) = slot {
        hub.channels.unlisten(channel, slot);
    }
}

async fn join(hub: &Arc<Hub>, session: &Arc<Session>, ask: &ChannelAsk, since: Since, patience: &mut Patience) {
    let (reference, channel) = (ask.reference.as_deref(), &ask.channel);
    if opened(session, ask, patience).await.is_err() {
        return ask.say_unavailable(session, "the session is not ready yet");
    }
    let mut is_held = false;
    session.tell(hub.place.position(), |state, position| {
        is_held = state.find(channel).is_some();
        is_held.then(|| message::ok(reference, Some(channel), Some(Resume::Ok), position))
    });
    if is_held {
        return;
    }
    if is_unsettled(&session.lock(), ask.n_auths) {
        return ask.say_unavailable(session, "the token that was sent before it is still being checked");
    }
    // Asked again, now that its turn has come: a token with fewer grants may have replaced the one
    // that the question was asked with.
    if !is_granted(hub, session, channel) {
        return say_error(session, reference, ErrorCode::Forbidden, NOT_GRANTED, None);
    }
    if !has_place(hub, session, ask) {
        return;
    }
    match attached(hub, session, channel, since, patience.deadline(ask)).await {
        Ok(()) => patience.renew(),
        Err(Late) => ask.say_unavailable(session, "the backplane did not answer in time"),
    }
}

/// A channel that the new token joins. Nobody waits for an answer, so what is no news is not told,
/// and while the backplane is away it goes behind what was asked for meanwhile and has its turn again.
async fn granted(hub: &Arc<Hub>, session: &Arc<Session>, ask: &ChannelAsk, patience: &mut Patience) {
    let opened = opened(session, ask, patience).await;
    let is_held = session.lock().find(&ask.channel).is_some();
    if is_held || !is_granted(hub, session, &ask.channel) || !has_place(hub, session, ask) {
        return;
    }
    if opened.is_ok() && attached(hub, session, &ask.channel, Since::Now, patience.deadline(ask)).await.is_ok() {
        return patience.renew();
    }
    if let Some(asks) = &mut session.lock().asks {
        asks.queue.push_back(ChannelAsk { asked_at: Instant::now(), ..ask.clone() });
    }
}

/// Waits until the session has its history.
async fn opened(session: &Session, ask: &ChannelAsk, patience: &mut Patience) -> Result<(), Late> {
    if session.lock().stage == Stage::Opening {
        let opened = session.until(|state| state.stage != Stage::Opening);
        timeout_at(patience.deadline(ask), opened).await.map_err(|_| Late)?;
        patience.renew();
    }
    Ok(())
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
        say_too_many(hub, session, ask);
    }
    has_place
}

fn say_too_many(hub: &Hub, session: &Session, ask: &ChannelAsk) {
    let text = format!(
        "a session hears at most {} channels (GATEWAY_MAX_CHANNELS): {} is one too many",
        hub.config.max_channels, ask.channel
    );
    say_error(session, ask.reference.as_deref(), ErrorCode::TooManyChannels, &text, None);
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
        Err(Late) if take_off(hub, session, channel, |_| None) == Had::It => Err(Late),
        _ => Ok(()),
    }
}
