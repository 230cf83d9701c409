//! The in-memory log itself: ids, streams, idempotency keys, revocations. Decides what is kept, how
//! long, and what a read answers, by the same rules as the Redis schema. Plain data without lock,
//! task or link: `memory` holds the one lock and tells the nodes.

use std::collections::{BTreeMap, BinaryHeap, HashMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;

use super::{MemoryConfig, Restart, ms};
use crate::backplane::{Facts, From, GapReason, Publish, Published, Read, ReadAsk, Revocation, RevocationKey};
use crate::channel::{Channel, EventName};
use crate::cursor::EventId;
use crate::event::Event;

/// How much longer than the TTL a stream is kept. Gaps are judged by the TTL alone, so a cursor that
/// is just young enough never finds its stream gone between the judgement and the read.
pub(super) const STREAM_SLACK: Duration = Duration::from_secs(5 * 60);
/// A log without events moves its position on this often (or with an eighth of the history's TTL).
const QUIET: Duration = Duration::from_secs(30);
/// At most so many expired things of each kind are dropped per call, so that no call pays for a
/// million dead channels. Every call creates at most one, so the rest melts away.
const SWEEP_STEP: usize = 16;
/// Former incarnations whose end is remembered; an older position counts as one of another log.
const MAX_ENDS: usize = 64;

struct Entry {
    id: EventId,
    name: Option<EventName>,
    data: Bytes,
}

#[derive(Default)]
struct Stream {
    /// Never empty while the stream is in the map.
    entries: VecDeque<Entry>,
    evicted: Option<EventId>,
}

/// One life of the log and what it remembers of earlier ones.
pub(super) struct Log {
    config: MemoryConfig,
    /// When it was born, ms since 1970; a restart is no birth.
    birth_ms: u64,
    /// The highest id given; a born log has one even if nothing was published.
    last: EventId,
    /// The incarnation in force; 0 is never one, so `EventId::ZERO` is of no log.
    tag: u16,
    /// First position of this incarnation.
    start: EventId,
    /// Where earlier incarnations ended of which everything is known, oldest first.
    ends: VecDeque<(u16, EventId)>,
    streams: HashMap<Channel, Stream>,
    /// Every stream by its last id: the order in which they expire.
    by_age: BTreeMap<EventId, Channel>,
    /// What a key gave, and until which ms it is remembered.
    keys: HashMap<(Channel, Arc<str>), (Option<EventId>, u64)>,
    /// Every key by the ms at which it expires, oldest first: all live equally long.
    keys_by_age: VecDeque<(u64, (Channel, Arc<str>))>,
    revoked: HashMap<RevocationKey, Revoked>,
    revoked_by_age: BTreeMap<(u64, u64), RevocationKey>,
    n_revoked_ever: u64,
}

struct Revoked {
    before: u64,
    /// Its place in `revoked_by_age`: expiry in ms, then a number of its own.
    place: (u64, u64),
}

impl Log {
    /// A log born at `now_ms` in incarnation `tag`.
    pub(super) fn born(config: MemoryConfig, now_ms: u64, tag: u16) -> Self {
        let start = EventId::ZERO.next(now_ms, tag);
        Self {
            config,
            birth_ms: start.ms,
            last: start,
            tag,
            start,
            ends: VecDeque::new(),
            streams: HashMap::new(),
            by_age: BTreeMap::new(),
            keys: HashMap::new(),
            keys_by_age: VecDeque::new(),
            revoked: HashMap::new(),
            revoked_by_age: BTreeMap::new(),
            n_revoked_ever: 0,
        }
    }

    /// Begins incarnation `tag` over what is there. After a clean restart positions of earlier
    /// lives stay good; after a torn one nobody knows what was lost, and none is.
    pub(super) fn reborn(&mut self, now_ms: u64, tag: u16, restart: Restart) {
        match restart {
            Restart::Clean => {
                self.ends.push_back((self.tag, self.last));
                if self.ends.len() > MAX_ENDS {
                    self.ends.pop_front();
                }
            }
            Restart::Torn => self.ends.clear(),
        }
        self.tag = tag;
        self.last = self.last.next(now_ms, tag);
        self.start = self.last;
    }

    /// May `tag` name a new incarnation?
    pub(super) fn is_free(&self, tag: u16) -> bool {
        tag != 0 && tag != self.tag && self.ends.iter().all(|(end, _)| *end != tag)
    }

    /// The position of a quiet log moves on with the time: else the cursors of everybody who has
    /// missed nothing would grow older than the history, and they would be told of a gap.
    pub(super) fn age(&mut self, now_ms: u64) {
        let quiet_ms = (ms(self.config.history_ttl) / 8).min(ms(QUIET));
        if now_ms.saturating_sub(self.last.ms) >= quiet_ms {
            self.last = self.last.next(now_ms, self.tag);
        }
    }

    /// When it was born, ms since 1970.
    pub(super) fn birth_ms(&self) -> u64 {
        self.birth_ms
    }

    /// The highest id given.
    pub(super) fn position(&self) -> EventId {
        self.last
    }

    /// Gives the id and stores the event; `None` beside the answer where nothing is to be told to
    /// the nodes because the key had been used.
    pub(super) fn publish(&mut self, now_ms: u64, ask: Publish) -> (Published, Option<Event>) {
        self.sweep(now_ms);
        let key = ask.key.map(|key| (ask.channel.clone(), key));
        if let Some((id, until)) = key.as_ref().and_then(|key| self.keys.get(key)).copied()
            && now_ms < until
        {
            return (Published { id, duplicate: true }, None);
        }
        let id = (!ask.ephemeral).then(|| self.append(now_ms, &ask.channel, ask.name.clone(), ask.data.clone()));
        if let Some(key) = key {
            let until = now_ms.saturating_add(ms(self.config.idempotency_ttl));
            self.keys.insert(key.clone(), (id, until));
            self.keys_by_age.push_back((until, key));
        }
        let event = Event { channel: ask.channel, id, name: ask.name, data: ask.data };
        (Published { id, duplicate: false }, Some(event))
    }

    fn append(&mut self, now_ms: u64, channel: &Channel, name: Option<EventName>, data: Bytes) -> EventId {
        let id = self.last.next(now_ms, self.tag);
        self.last = id;
        if self.config.history_size == 0 {
            return id;
        }
        self.forget_if_expired(now_ms, channel);
        let stream = self.streams.entry(channel.clone()).or_default();
        if let Some(newest) = stream.entries.back() {
            self.by_age.remove(&newest.id);
        }
        stream.entries.push_back(Entry { id, name, data });
        while stream.entries.len() > self.config.history_size {
            stream.evicted = stream.entries.pop_front().map(|oldest| oldest.id);
        }
        self.by_age.insert(id, channel.clone());
        id
    }

    /// Answers a read; everything in the answer holds now.
    pub(super) fn read(&mut self, now_ms: u64, ask: &ReadAsk) -> Read {
        self.sweep(now_ms);
        for (channel, _) in &ask.channels {
            self.forget_if_expired(now_ms, channel);
        }
        let asked = ask.channels.iter().filter_map(|(_, from)| match from {
            From::After(id) => Some(*id),
            From::Here | From::Start => None,
        });
        let broken = asked.chain(ask.check).find_map(|id| self.unknown(id));
        let mut facts: Vec<Facts> = ask.channels.iter().map(|(channel, _)| self.facts(channel)).collect();
        let (events, more) = match broken {
            Some(_) => (Vec::new(), false),
            None => self.page(ask, &mut facts),
        };
        Read {
            position: self.last,
            now_ms,
            ttl: self.config.history_ttl,
            has_history: self.config.history_size > 0,
            broken,
            facts,
            events,
            more,
        }
    }

    /// Why this log cannot say what came after `id`, if so.
    fn unknown(&self, id: EventId) -> Option<GapReason> {
        let is_known = if id.incarnation() == self.tag {
            self.start <= id && id <= self.last
        } else {
            self.ends.iter().any(|(tag, end)| *tag == id.incarnation() && id <= *end)
        };
        (!is_known).then_some(GapReason::Reset)
    }

    fn facts(&self, channel: &Channel) -> Facts {
        match self.streams.get(channel) {
            None => Facts::default(),
            Some(stream) => Facts { first: stream.entries.front().map(|e| e.id), evicted: stream.evicted, cut: false },
        }
    }

    /// The newest `cap` entries, found from the new end so that the cost follows the cap and not
    /// what is stored; then the first page of them.
    fn page(&self, ask: &ReadAsk, facts: &mut [Facts]) -> (Vec<Event>, bool) {
        // What is left to look at of every channel: entries [low, high) of its stream.
        let mut spans: Vec<Option<(&Stream, usize, usize)>> = ask
            .channels
            .iter()
            .map(|(channel, from)| {
                let stream = self.streams.get(channel)?;
                let low = match from {
                    From::Here => return None,
                    From::Start => 0,
                    From::After(id) => stream.entries.partition_point(|e| e.id <= *id),
                };
                (low < stream.entries.len()).then_some((stream, low, stream.entries.len()))
            })
            .collect();
        let mut newest: BinaryHeap<(EventId, usize)> = spans
            .iter()
            .enumerate()
            .filter_map(|(i, span)| span.map(|(stream, _, high)| (stream.entries[high - 1].id, i)))
            .collect();
        let mut kept: Vec<(usize, usize)> = Vec::new();
        while kept.len() < ask.cap {
            let Some((_, i)) = newest.pop() else { break };
            let Some((stream, low, high)) = spans[i].as_mut() else { continue };
            *high -= 1;
            kept.push((i, *high));
            if low < high {
                newest.push((stream.entries[*high - 1].id, i));
            }
        }
        for (_, i) in newest {
            facts[i].cut = true;
        }
        self.first_page(ask, kept)
    }

    /// `kept` names channel and place, newest first.
    fn first_page(&self, ask: &ReadAsk, mut kept: Vec<(usize, usize)>) -> (Vec<Event>, bool) {
        let (mut events, mut n_bytes) = (Vec::new(), 0);
        while let Some((i, at)) = kept.pop() {
            let channel = &ask.channels[i].0;
            let entry = &self.streams[channel].entries[at];
            n_bytes += entry.data.len();
            let is_full = events.len() >= ask.page_events || n_bytes > ask.page_bytes;
            if is_full && !events.is_empty() {
                return (events, true);
            }
            events.push(Event {
                channel: channel.clone(),
                id: Some(entry.id),
                name: entry.name.clone(),
                data: entry.data.clone(),
            });
        }
        (events, false)
    }

    /// Stores a revocation. A repeat never takes anything back: the later time and the later
    /// expiry hold.
    pub(super) fn revoke(&mut self, now_ms: u64, revocation: &Revocation, ttl: Duration) {
        self.sweep(now_ms);
        let (mut before, mut until) = (revocation.before, now_ms.saturating_add(ms(ttl)));
        if let Some(old) = self.revoked.remove(&revocation.key) {
            self.revoked_by_age.remove(&old.place);
            if old.place.0 > now_ms {
                before = before.max(old.before);
                until = until.max(old.place.0);
            }
        }
        self.n_revoked_ever += 1;
        let place = (until, self.n_revoked_ever);
        self.revoked_by_age.insert(place, revocation.key.clone());
        self.revoked.insert(revocation.key.clone(), Revoked { before, place });
    }

    /// The stored value as Redis would give it: a Unix time for `Sub`, anything for the others.
    pub(super) fn revoked(&self, now_ms: u64, key: &RevocationKey) -> Option<String> {
        let found = self.revoked.get(key).filter(|found| found.place.0 > now_ms)?;
        Some(match key {
            RevocationKey::Sub(_) => found.before.to_string(),
            RevocationKey::Jti(_) | RevocationKey::Sid(_) => "1".to_owned(),
        })
    }

    /// Drops a few of the things whose time is over.
    pub(super) fn sweep(&mut self, now_ms: u64) {
        for _ in 0..SWEEP_STEP {
            if self.keys_by_age.front().is_none_or(|(until, _)| *until > now_ms) {
                break;
            }
            if let Some((_, key)) = self.keys_by_age.pop_front()
                // A key used anew after its time, before this sweep, lives on.
                && self.keys.get(&key).is_some_and(|(_, until)| *until <= now_ms)
            {
                self.keys.remove(&key);
            }
        }
        for _ in 0..SWEEP_STEP {
            let Some((last, _)) = self.by_age.first_key_value() else { break };
            if !self.is_expired(now_ms, *last) {
                break;
            }
            if let Some((_, channel)) = self.by_age.pop_first() {
                self.streams.remove(&channel);
            }
        }
        for _ in 0..SWEEP_STEP {
            let Some(((until, _), _)) = self.revoked_by_age.first_key_value() else { break };
            if *until > now_ms {
                break;
            }
            if let Some((_, key)) = self.revoked_by_age.pop_first() {
                self.revoked.remove(&key);
            }
        }
    }

    fn is_expired(&self, now_ms: u64, last: EventId) -> bool {
        last.ms.saturating_add(ms(self.config.history_ttl)).saturating_add(ms(STREAM_SLACK)) <= now_ms
    }

    /// Expiry does not wait for the sweep.
    fn forget_if_expired(&mut self, now_ms: u64, channel: &Channel) {
        let last = self.streams.get(channel).and_then(|stream| stream.entries.back()).map(|entry| entry.id);
        if let Some(last) = last.filter(|last| self.is_expired(now_ms, *last)) {
            self.by_age.remove(&last);
            self.streams.remove(channel);
        }
    }

    /// Streams, keys and revocations held.
    #[cfg(test)]
    pub(super) fn held(&self) -> (usize, usize, usize) {
        assert_eq!(self.streams.len(), self.by_age.len());
        assert_eq!(self.revoked.len(), self.revoked_by_age.len());
        (self.streams.len(), self.keys.len(), self.revoked.len())
    }
}
