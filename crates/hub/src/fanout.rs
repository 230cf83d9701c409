//! Who hears what: channels and their listeners on this node, and the node's place in the log.
//! Decides nothing about one session; `dispatch` moves events through here, `attach` waits here.

mod listeners;

use std::hash::{BuildHasher, RandomState};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use hashbrown::HashTable;
use tokio::sync::{oneshot, watch};
use tokio::time::Instant;

use crate::backplane::Backplane;
use crate::channel::Channel;
use crate::clock::Moment;
use crate::cursor::EventId;

pub(crate) use listeners::Listener;
use listeners::Listeners;

/// A channel stays subscribed upstream for so long after its last local listener, so that a
/// reconnect does not flap.
pub const LINGER: Duration = Duration::from_secs(10);

const N_SHARDS: usize = 16;

/// A channel of this node. In the usual case, a user's own channel that one session hears, this is
/// all there is of it besides the name.
struct Entry {
    channel: Channel,
    listeners: Listeners,
    /// Who waits for the subscription; `None` where it stands on the link in use (rule *confirm*).
    awaited: Option<Box<Waiters>>,
}

#[derive(Default)]
struct Waiters(Vec<oneshot::Sender<()>>);

/// Entries by the hash of their channel. Boxed, so that the table's free places, often more than
/// half of all, are a word each.
type Shard = HashTable<Box<Entry>>;

/// Which channels may be given up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Which {
    /// Any: no confirmation waits to be heard.
    All,
    /// Those whose confirmation was heard. Another's may wait in the link, and a newcomer who listens anew
    /// would take it for its own, while its own subscription does not stand yet.
    Confirmed,
}

/// All channels of the node.
pub(crate) struct Channels {
    shards: [Mutex<Shard>; N_SHARDS],
    hasher: RandomState,
    backplane: Arc<dyn Backplane>,
}

impl Channels {
    pub fn new(backplane: Arc<dyn Backplane>) -> Self {
        Self { shards: Default::default(), hasher: RandomState::new(), backplane }
    }

    /// The shard that has the channel or would have it, and the channel's hash.
    fn shard(&self, channel: &Channel) -> (MutexGuard<'_, Shard>, u64) {
        let hash = self.hasher.hash_one(channel);
        // The table goes to a place by the low bits and tells neighbours apart by the top seven:
        // with either of those here, a shard's entries would have some of them in common.
        let i = (hash >> 48) as usize % N_SHARDS;
        (self.shards[i].lock().expect("no panic while a shard is held"), hash)
    }

    /// Adds a listener; returns its slot, and the channel as it stands here: who keeps that one shares
    /// its text. From here on every event of the channel is offered to the listener.
    ///
    /// `want` and `unwant` are called under the shard's lock, the one place where a second lock is
    /// taken: in any other order a channel could end up unwanted with a listener on it, for ever deaf.
    pub fn listen(&self, channel: &Channel, listener: Listener) -> (usize, Channel) {
        let (mut shard, hash) = self.shard(channel);
        if let Some(known) = shard.find_mut(hash, |entry| entry.channel == *channel) {
            return (known.listeners.insert(listener), known.channel.clone());
        }
        let (slot, listeners) = Listeners::one(listener);
        let entry = Entry { channel: channel.clone(), listeners, awaited: Some(Box::default()) };
        shard.insert_unique(hash, Box::new(entry), |entry| self.hasher.hash_one(&entry.channel));
        self.backplane.want(channel);
        (slot, channel.clone())
    }

    /// Removes a listener.
    pub fn unlisten(&self, channel: &Channel, slot: usize) {
        let (mut shard, hash) = self.shard(channel);
        if let Some(entry) = shard.find_mut(hash, |entry| entry.channel == *channel) {
            entry.listeners.remove(slot);
        }
    }

    /// Copies up to `max` listeners from slot `from` on; returns the slot to go on from, if any.
    /// Slots are stable: who joins meanwhile reads the log after joining, so an event that is being
    /// dispatched is in what it reads.
    pub fn listeners(&self, channel: &Channel, from: usize, max: usize, out: &mut Vec<Listener>) -> Option<usize> {
        let (shard, hash) = self.shard(channel);
        shard.find(hash, |entry| entry.channel == *channel)?.listeners.copy(from, max, out)
    }

    /// Every channel that somebody listens on.
    pub fn listened(&self) -> Vec<Channel> {
        let mut all = Vec::new();
        for shard in &self.shards {
            let shard = shard.lock().expect("no panic while a shard is held");
            let listened = shard.iter().filter(|entry| entry.listeners.idle_since().is_none());
            all.extend(listened.map(|entry| entry.channel.clone()));
        }
        all
    }

    /// The backplane confirmed the subscription on the link in use.
    pub fn confirm(&self, channel: &Channel) {
        let waiters = {
            let (mut shard, hash) = self.shard(channel);
            shard.find_mut(hash, |entry| entry.channel == *channel).and_then(|entry| entry.awaited.take())
        };
        for waiter in waiters.into_iter().flat_map(|waiters| waiters.0) {
            let _ = waiter.send(());
        }
    }

    /// The link is gone: nothing is confirmed.
    pub fn unconfirm_all(&self) {
        for shard in &self.shards {
            let mut shard = shard.lock().expect("no panic while a shard is held");
            for entry in shard.iter_mut() {
                entry.awaited.get_or_insert_default();
            }
        }
    }

    /// Waits until the channel's subscription is confirmed; at once where it is.
    ///
    /// # Cancel safety
    /// Nothing is lost.
    pub async fn confirmed(&self, channel: &Channel) {
        loop {
            let told = {
                let (mut shard, hash) = self.shard(channel);
                // No entry: the listener left meanwhile, there is nothing to wait for.
                let entry = shard.find_mut(hash, |entry| entry.channel == *channel);
                let Some(Waiters(waiters)) = entry.and_then(|entry| entry.awaited.as_deref_mut()) else { return };
                waiters.retain(|w| !w.is_closed());
                let (tell, told) = oneshot::channel();
                waiters.push(tell);
                told
            };
            let _ = told.await;
        }
    }

    /// Gives up channels without a listener for longer than `LINGER`, as far as `which` has them; returns
    /// how many.
    pub fn sweep(&self, now: Instant, which: Which) -> usize {
        let (now, mut n) = (Moment::from(now), 0);
        for shard in &self.shards {
            let mut shard = shard.lock().expect("no panic while a shard is held");
            shard.retain(|entry| {
                entry.listeners.shrink();
                let is_over = entry.listeners.idle_since().is_some_and(|since| now >= since + LINGER);
                let goes = is_over && (which == Which::All || entry.awaited.is_none());
                if goes {
                    self.backplane.unwant(&entry.channel);
                    n += 1;
                }
                !goes
            });
            if shard.capacity() > 64 && shard.len() * 4 < shard.capacity() {
                shard.shrink_to_fit(|entry| self.hasher.hash_one(&entry.channel));
            }
        }
        n
    }
}

/// The node's place in the log, as its one link has brought it.
pub(crate) struct Place {
    inner: Mutex<Inner>,
    changed: watch::Sender<LinkState>,
}

struct Inner {
    /// Every logged event ≤ this has been dispatched.
    position: EventId,
    barriers: Vec<(EventId, oneshot::Sender<()>)>,
}

/// What attaching sessions must know of the link.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct LinkState {
    /// Counts losses: what was confirmed or read under an older one does not count.
    pub generation: u64,
    /// The link is up and repaired.
    pub is_live: bool,
    /// The log's incarnation that the link speaks of.
    pub incarnation: Option<u16>,
}

impl Place {
    pub fn new() -> Self {
        let inner = Inner { position: EventId::ZERO, barriers: Vec::new() };
        let state = LinkState { generation: 0, is_live: false, incarnation: None };
        Self { inner: Mutex::new(inner), changed: watch::Sender::new(state) }
    }

    pub fn state(&self) -> LinkState {
        *self.changed.borrow()
    }

    /// Watches the link.
    pub fn changes(&self) -> watch::Receiver<LinkState> {
        self.changed.subscribe()
    }

    pub fn position(&self) -> EventId {
        self.inner.lock().expect("no panic while the place is held").position
    }

    /// Every event ≤ `to` was dispatched. Never moves back.
    pub fn advance(&self, to: EventId) {
        let released: Vec<_> = {
            let mut inner = self.inner.lock().expect("no panic while the place is held");
            if to <= inner.position {
                return;
            }
            inner.position = to;
            if inner.barriers.is_empty() {
                return;
            }
            inner.barriers.extract_if(.., |(at, _)| *at <= to).collect()
        };
        for (_, tell) in released {
            let _ = tell.send(());
        }
    }

    /// Another log: the position is what it is, also downwards.
    pub fn reset(&self, to: EventId) {
        self.inner.lock().expect("no panic while the place is held").position = to;
    }

    pub fn set(&self, change: impl FnOnce(&mut LinkState)) {
        self.changed.send_modify(change);
    }

    /// Waits until the link is up and repaired.
    ///
    /// # Cancel safety
    /// Nothing is lost.
    pub async fn live(&self) -> LinkState {
        let mut changes = self.changed.subscribe();
        let state = changes.wait_for(|state| state.is_live).await;
        *state.expect("the sender lives as long as self")
    }

    /// Waits until the link has passed `at` (rule *barrier*) or was lost.
    ///
    /// # Cancel safety
    /// Nothing is lost.
    pub async fn passed(&self, at: EventId, generation: u64) {
        let told = {
            let mut inner = self.inner.lock().expect("no panic while the place is held");
            if inner.position >= at {
                return;
            }
            inner.barriers.retain(|(_, tell)| !tell.is_closed());
            let (tell, told) = oneshot::channel();
            inner.barriers.push((at, tell));
            told
        };
        let mut changes = self.changed.subscribe();
        tokio::select! {
            _ = told => {}
            _ = changes.wait_for(|state| state.generation != generation) => {}
        }
    }
}

#[cfg(test)]
mod tests;
