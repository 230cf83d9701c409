//! What nodes share: the log, its link, the revocation list, and what they know of each other
//! (reports, messages, a user's sessions, a hold on moving any). Decides what every backplane must answer and how a hole
//! is told from the facts of a read. Two real ones exist: `Memory` (one
//! process, a product feature) and Redis (crate `redis-backplane`). `testkit::contract` is the
//! suite that both must pass.
//!
//! The rules of order, attach, repair and gap (docs/ARCHITECTURE.md, "Order, log, resume") are
//! divided so: a backplane gives ids, reads atomically and reports its link in order; the hub
//! (`fanout`) decides who gets what, when a gap is declared, and what a position is.

use std::ops::RangeInclusive;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures_util::future::BoxFuture;
use tokio::sync::mpsc;

use crate::channel::{Channel, EventName};
use crate::cursor::EventId;
use crate::event::Event;

/// Longest idempotency key in bytes (contract).
pub const MAX_KEY_BYTES: usize = 128;

/// Longest text that `Backplane::tell` carries, in bytes.
pub const MAX_TELL_BYTES: usize = 1024 * 1024;

/// How long one `Backplane::hold` may last. A day: whoever needs longer renews it, so that none is
/// forgotten.
pub const HOLD_TIMES: RangeInclusive<Duration> = Duration::from_secs(1)..=Duration::from_secs(24 * 3600);

/// Longest `Hold::reason`, in bytes.
pub const MAX_REASON_BYTES: usize = 200;

/// One thing to publish. `data` is JSON text, checked at the edge (`Event::check_data`).
#[derive(Clone, Debug)]
pub struct Publish {
    /// Where to.
    pub channel: Channel,
    /// The event's name, if it has one.
    pub name: Option<EventName>,
    /// JSON text, kept byte for byte.
    pub data: Bytes,
    /// Not logged, no id, heard only by who is live now.
    pub ephemeral: bool,
    /// At most `MAX_KEY_BYTES`; a repeat on the same channel within the TTL gives the first id again.
    pub key: Option<Arc<str>>,
}

/// What became of a `Publish`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Published {
    /// `None` for an ephemeral event.
    pub id: Option<EventId>,
    /// The key had been used: nothing was published now, `id` is the first one's.
    pub duplicate: bool,
}

/// The backplane cannot answer now. For a publish it is unknown whether the event was stored:
/// repeat it with the same key.
#[derive(Debug, Clone, thiserror::Error)]
#[error("the backplane does not answer: {0}")]
pub struct Unavailable(pub String);

/// Why events may be missing. Label of `gateway_gaps_total` and word on the wire.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum GapReason {
    /// Older than the history's TTL.
    Expired,
    /// Pushed out by newer events (history size).
    Evicted,
    /// Another log: flushed, rolled back, replaced, or a position ahead of it.
    Reset,
    /// The cursor is none of ours.
    UnknownPosition,
    /// History is off.
    NoHistory,
    /// The node could not read what it missed.
    Backplane,
    /// More than `GATEWAY_REPLAY_MAX` were missed: the newest are kept.
    Overflow,
}

impl GapReason {
    /// Every reason.
    pub const ALL: [GapReason; 7] = [
        GapReason::Expired,
        GapReason::Evicted,
        GapReason::Reset,
        GapReason::UnknownPosition,
        GapReason::NoHistory,
        GapReason::Backplane,
        GapReason::Overflow,
    ];

    /// The word on the wire.
    pub fn word(self) -> &'static str {
        match self {
            GapReason::Expired => "expired",
            GapReason::Evicted => "evicted",
            GapReason::Reset => "reset",
            GapReason::UnknownPosition => "unknown_position",
            GapReason::NoHistory => "no_history",
            GapReason::Backplane => "backplane",
            GapReason::Overflow => "overflow",
        }
    }
}

/// From where a channel is read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum From {
    /// No entries; only the log's position and the channel's facts.
    Here,
    /// All that is kept. Never a hole.
    Start,
    /// Entries with a higher id than this. The id must lie in what the log knows (`Read::broken`).
    After(EventId),
}

/// One atomic read over several channels (rules *atomic*, *readypos*).
#[derive(Clone, Debug)]
pub struct ReadAsk {
    /// Which channels, from where.
    pub channels: Vec<(Channel, From)>,
    /// A further position whose honour is to be checked (the node's own, in a repair).
    pub check: Option<EventId>,
    /// At most so many entries over all channels, the newest; what is cut is told by `Facts::cut`.
    pub cap: usize,
    /// The first so many of those entries are returned now; `Read::more` tells that some are left.
    pub page_events: usize,
    /// As `page_events`, in bytes of data; at least one entry is returned whatever its size.
    pub page_bytes: usize,
}

/// What one channel's stream looked like at the moment of the read.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Facts {
    /// Oldest entry still held.
    pub first: Option<EventId>,
    /// Highest id that was pushed out by size.
    pub evicted: Option<EventId>,
    /// Entries of this channel were left out because of `ReadAsk::cap`.
    pub cut: bool,
}

/// The answer: everything in it holds at one instant of the log, `position`.
#[derive(Clone, Debug)]
pub struct Read {
    /// The log's position P: every event with an id ≤ P on the asked channels is either in
    /// `events` (or a later page), or ≤ the asked position, or a hole that `facts` tell.
    pub position: EventId,
    /// The log's clock, ms since 1970.
    pub now_ms: u64,
    /// How long history is kept, as the log counts it.
    pub ttl: Duration,
    /// History is on (`GATEWAY_HISTORY_SIZE` > 0).
    pub has_history: bool,
    /// One of the asked positions (or `check`) is not of this log or ahead of it: `events` is
    /// empty, everything older is uncertain.
    pub broken: Option<GapReason>,
    /// In the order asked.
    pub facts: Vec<Facts>,
    /// Merged over all channels, ids strictly rising, all ≤ `position`.
    pub events: Vec<Event>,
    /// Entries were left for a further page: ask again from the last id of `events`.
    pub more: bool,
}

impl Read {
    /// Is there possibly a hole after position `since` on the channel with these facts?
    pub fn hole(&self, facts: &Facts, since: EventId) -> Option<GapReason> {
        if !self.has_history {
            return (since < self.position).then_some(GapReason::NoHistory);
        }
        let ttl_ms = u64::try_from(self.ttl.as_millis()).unwrap_or(u64::MAX);
        match facts.first {
            None => (self.now_ms.saturating_sub(since.ms) >= ttl_ms).then_some(GapReason::Expired),
            Some(_) if facts.evicted.is_some_and(|evicted| evicted > since) => Some(GapReason::Evicted),
            Some(first) => (first.ms.saturating_sub(since.ms) > ttl_ms).then_some(GapReason::Expired),
        }
    }
}

/// What the link tells the hub, in the order in which it happened on the link.
#[derive(Debug)]
pub enum FromLink {
    /// The link is gone. Nothing confirmed before counts any more. A backplane sends this exactly
    /// once per loss, before anything of the next link.
    Lost,
    /// A channel's subscription stands on the link in use, and no later SUBSCRIBE or UNSUBSCRIBE
    /// of it is under way (rules *confirm*, *gen*).
    Confirmed(Channel),
    /// The link is whole: everything wanted when it was made is confirmed, and the node's own
    /// beacon came back over it with the log's position (rule *agree*).
    Up(EventId),
    /// An event of a wanted channel, logged or ephemeral.
    Event(Event),
    /// The node's own beacon: every logged event ≤ this has passed the link (rule *barrier*).
    Beacon(EventId),
    /// A revocation made somewhere in the fleet through the gateway's API or Function.
    Revoked(Revocation),
    /// A text that some node told this one, or all.
    Told(String),
    /// A session lost its place among its user's (`Backplane::claim`). Every node hears of every
    /// one; the one that holds it ends it. May come before the session's own claim is answered.
    Replaced {
        /// Whose.
        user: Arc<str>,
        /// Which.
        session: Arc<str>,
    },
    /// A hold began, changed or was taken away: `Backplane::report` says what holds now. None is
    /// sent when a hold ends with its time.
    FleetChanged,
}

/// What a revocation names.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum RevocationKey {
    /// One token.
    Jti(Arc<str>),
    /// All tokens of a login session.
    Sid(Arc<str>),
    /// All tokens of a user issued at or before a time.
    Sub(Arc<str>),
}

/// One revocation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Revocation {
    /// Whom.
    pub key: RevocationKey,
    /// For `Sub`: tokens with `iat` ≤ this Unix time (seconds). Ignored otherwise.
    pub before: u64,
}

/// A node's word about itself, as the backplane holds it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Report {
    /// Whose.
    pub node: Arc<str>,
    /// JSON text of the hub's; a backplane does not look into it.
    pub body: String,
    /// Since it was written, by the backplane's clock.
    pub age: Duration,
}

/// Somebody's word that for a while no session is to be moved for the balance of the fleet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Hold {
    /// When it ends, ms since 1970 by the backplane's clock.
    pub until_ms: u64,
    /// Why, for those who wonder; may be empty.
    pub reason: String,
    /// The node that took it.
    pub by: Arc<str>,
}

/// What the backplane knows of the fleet at one instant.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fleet {
    /// By node name; the asker's own included.
    pub reports: Vec<Report>,
    /// What stood under the asker's own name until it reported now: its own report before, or that of another
    /// process of its name. Only the hub can tell, who knows what it wrote.
    pub before: Option<Report>,
    /// The hold in force, if there is one; its end lies after `now_ms`.
    pub hold: Option<Hold>,
    /// When the log was born, ms since 1970: no position of it is older. A flushed log is born
    /// again; 0: it is not born yet.
    pub birth_ms: u64,
    /// The backplane's clock, ms since 1970.
    pub now_ms: u64,
}

/// One session's claim to a place among its user's.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Claim {
    /// Whose.
    pub user: Arc<str>,
    /// Which: not empty, no white space.
    pub session: Arc<str>,
    /// The place it was given (`Claimed::since`); `None`: the newest.
    pub since: Option<u64>,
}

/// What became of a `Claim`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Claimed {
    /// Its place: µs since 1970 by the backplane's clock, for one user strictly rising.
    pub since: u64,
    /// It is itself one too many, and has no place any more.
    pub replaced: bool,
}

/// The world shared by all nodes of a fleet. Cheap calls; whatever waits has its own deadline
/// (`GATEWAY_REDIS_TIMEOUT`) and answers `Unavailable` at it.
pub trait Backplane: Send + Sync + 'static {
    /// Logs and fans out one event, or only fans it out.
    ///
    /// # Cancel safety
    /// Dropping the future does not undo the publish; whether it happened is unknown.
    fn publish(&self, event: Publish) -> BoxFuture<'_, Result<Published, Unavailable>>;

    /// Reads several channels at one instant of the log.
    fn read(&self, ask: ReadAsk) -> BoxFuture<'_, Result<Read, Unavailable>>;

    /// Wants this channel on the link from now on; answered by `FromLink::Confirmed`, also again
    /// after every loss of the link. Wanting twice is wanting once (and is confirmed again).
    fn want(&self, channel: &Channel);

    /// Wants it no more.
    fn unwant(&self, channel: &Channel);

    /// Asks for a `FromLink::Beacon`. Cheap, coalesced; lost when the link is.
    fn beacon(&self);

    /// Makes the link anew (another incarnation was seen on it). `FromLink::Lost` follows.
    fn relink(&self);

    /// The link's messages. Called once, by the hub.
    fn link(&self) -> mpsc::Receiver<FromLink>;

    /// What the revocation list says of these keys, in their order: the stored value, if any.
    fn revocations(&self, keys: Vec<RevocationKey>) -> BoxFuture<'_, Result<Vec<Option<String>>, Unavailable>>;

    /// Writes a revocation and tells every node. Kept for `ttl`.
    fn revoke(&self, revocation: Revocation, ttl: Duration) -> BoxFuture<'_, Result<(), Unavailable>>;

    /// Writes what this node says of itself, and gives what all have said, at one instant. A report
    /// older than `ttl` is forgotten.
    fn report(&self, body: String, ttl: Duration) -> BoxFuture<'_, Result<Fleet, Unavailable>>;

    /// Takes this node's report away: it leaves the fleet.
    fn retire(&self) -> BoxFuture<'_, Result<(), Unavailable>>;

    /// Begins a hold of the fleet, in this node's name, for a time within `HOLD_TIMES` and with a
    /// reason of at most `MAX_REASON_BYTES`, in place of any other; `None` takes away what there
    /// is. Answers what holds from now on; every node, this one too, hears `FromLink::FleetChanged`.
    ///
    /// # Errors
    /// `Unavailable`, also for another time or a longer reason. Whether it was done is then unknown: doing it
    /// again is no harm.
    fn hold(&self, hold: Option<(Duration, String)>) -> BoxFuture<'_, Result<Option<Hold>, Unavailable>>;

    /// Sends a text of at most `MAX_TELL_BYTES` to one node (`to`), or to all, this one too. It
    /// arrives as `FromLink::Told`, once; it is lost where no such node listens now.
    ///
    /// # Errors
    /// `Unavailable`, also for a longer text. Whether it was sent is then unknown.
    fn tell(&self, to: Option<Arc<str>>, text: String) -> BoxFuture<'_, Result<(), Unavailable>>;

    /// Gives sessions of this node their places among their users', in this order, and answers in
    /// this order. Up to some hundreds a call.
    ///
    /// A claim without `since` gets the highest place of its user's; one with `since` keeps that
    /// place (a renewal), or is put back at it (after a flush, or while its node was thought gone).
    /// If the user then has more than `max` (at least 1), sessions of nodes that are gone go
    /// without a word; if there are still more, those with the lowest places go, each with a
    /// `FromLink::Replaced` on every node. A node is gone while its link is down, and once it has not
    /// reported again within the `ttl` of its last report (a host that vanished leaves its link standing for
    /// minutes), but never to itself; what an earlier process under its name held is gone too. So claim again, with
    /// `since`, whatever is held whenever the link comes up, and every half minute: who was thought gone gets its
    /// places back by it. Places end some 10 minutes after the user's last claim.
    ///
    /// # Errors
    /// `Unavailable`: whether the claims were made is unknown. Claiming again drops nobody else; `release`
    /// gives up what may have been claimed.
    ///
    /// # Cancel safety
    /// As an error.
    fn claim(&self, claims: Vec<Claim>, max: u32) -> BoxFuture<'_, Result<Vec<Claimed>, Unavailable>>;

    /// Gives up the places of sessions of this node, as (user, session). What is not there is no harm.
    fn release(&self, of: Vec<(Arc<str>, Arc<str>)>) -> BoxFuture<'_, Result<(), Unavailable>>;

    /// Is the link up now? For `/readyz` and `gateway_redis_up`.
    fn is_link_up(&self) -> bool;
}
