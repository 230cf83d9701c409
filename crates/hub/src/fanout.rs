//! Who hears what: channels and their listeners on this node, and the node's place in the log.
//! Decides nothing about one session; `dispatch` moves events through here, `attach` waits here.

use std::collections::{HashMap, hash_map};
use std::hash::{BuildHasher, RandomState};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use slab::Slab;
use tokio::sync::{oneshot, watch};
use tokio::time::Instant;

use crate::backplane::Backplane;
use crate::channel::Channel;
use crate::cursor::EventId;
use crate::session::Session;

/// A channel stays subscribed upstream for so long after its last local listener, so that a
/// reconnect does not flap.
pub const LINGER: Duration = Duration::from_secs(10);

const N_SHARDS: usize = 16;

/// A session that hears a channel, and the channel's place in the session.
#[derive(Clone)]
pub(crate) struct Listener {
    pub session: Arc<Session>,
    pub sub: usize,
}

struct Entry {
    listeners: Slab<Listener>,
    /// The subscription stands on the link in use (rule *confirm*).
    is_confirmed: bool,
    waiters: Vec<oneshot::Sender<()>>,
    idle_since: Option<Instant>,
}

/// All channels of the node.
pub(crate) struct Channels {
    shards: [Mutex<HashMap<Channel, Entry>>; N_SHARDS],
    hasher: RandomState,
    backplane: Arc<dyn Backplane>,
}

impl Channels {
    pub fn new(backplane: Arc<dyn Backplane>) -> Self {
        Self { shards: Default::default(), hasher: RandomState::new(), backplane }
    }

    fn shard(&self, channel: &Channel) -> MutexGuard<'_, HashMap<Channel, Entry>> {
        let i = self.hasher.hash_one(channel) as usize % N_SHARDS;
        self.shards[i].lock().expect("no panic while a shard is held")
    }

    /// Adds a listener; returns its slot, and the channel as it stands here: who keeps that one shares
    /// its text. From here on every event of the channel is offered to the listener.
    ///
    /// `want` and `unwant` are called under the shard's lock, the one place where a second lock is
    /// taken: in any other order a channel could end up unwanted with a listener on it, for ever deaf.
    pub fn listen(&self, channel: &Channel, listener: Listener) -> (usize, Channel) {
        let mut shard = self.shard(channel);
        if let hash_map::Entry::Occupied(mut known) = shard.entry(channel.clone()) {
            known.get_mut().idle_since = None;
            return (known.get_mut().listeners.insert(listener), known.key().clone());
        }
        let mut listeners = Slab::with_capacity(1);
        let slot = listeners.insert(listener);
        let entry = Entry { listeners, is_confirmed: false, waiters: Vec::new(), idle_since: None };
        shard.insert(channel.clone(), entry);
        self.backplane.want(channel);
        (slot, channel.clone())
    }

    /// Removes a listener.
    pub fn unlisten(&self, channel: &Channel, slot: usize) {
        let mut shard = self.shard(channel);
        if let Some(entry) = shard.get_mut(channel) {
            entry.listeners.try_remove(slot);
            if entry.listeners.is_empty() {
                entry.listeners = Slab::new();
                entry.idle_since = Some(Instant::now());
            }
        }
    }

    /// Copies up to `max` listeners from slot `from` on; returns the slot to go on from, if any.
    /// Slots are stable: who joins meanwhile reads the log after joining, so an event that is being
    /// dispatched is in what it reads.
    pub fn listeners(&self, channel: &Channel, from: usize, max: usize, out: &mut Vec<Listener>) -> Option<usize> {
        let shard = self.shard(channel);
        let entry = shard.get(channel)?;
        let end = entry.listeners.capacity().min(from.saturating_add(max));
        out.extend((from..end).filter_map(|slot| entry.listeners.get(slot).cloned()));
        (end < entry.listeners.capacity()).then_some(end)
    }

    /// Every channel that somebody listens on.
    pub fn listened(&self) -> Vec<Channel> {
        let mut all = Vec::new();
        for shard in &self.shards {
            let shard = shard.lock().expect("no panic while a shard is held");
            all.extend(shard.iter().filter(|(_, e)| !e.listeners.is_empty()).map(|(c, _)| c.clone()));
        }
        all
    }

    /// The backplane confirmed the subscription on the link in use.
    pub fn confirm(&self, channel: &Channel) {
        if let Some(entry) = self.shard(channel).get_mut(channel) {
            entry.is_confirmed = true;
            for waiter in entry.waiters.drain(..) {
                let _ = waiter.send(());
            }
            entry.waiters = Vec::new();
        }
    }

    /// The link is gone: nothing is confirmed.
    pub fn unconfirm_all(&self) {
        for shard in &self.shards {
            let mut shard = shard.lock().expect("no panic while a shard is held");
            shard.values_mut().for_each(|entry| entry.is_confirmed = false);
        }
    }

    /// Waits until the channel's subscription is confirmed; at once where it is.
    ///
    /// # Cancel safety
    /// Nothing is lost.
    pub async fn confirmed(&self, channel: &Channel) {
        loop {
            let told = {
                let mut shard = self.shard(channel);
                match shard.get_mut(channel) {
                    Some(entry) if !entry.is_confirmed => {
                        entry.waiters.retain(|w| !w.is_closed());
                        let (tell, told) = oneshot::channel();
                        entry.waiters.push(tell);
                        told
                    }
                    // No entry: the listener left meanwhile, there is nothing to wait for.
                    _ => return,
                }
            };
            let _ = told.await;
        }
    }

    /// Gives up channels without a listener for longer than `LINGER`; returns how many.
    pub fn sweep(&self, now: Instant) -> usize {
        let mut n = 0;
        for shard in &self.shards {
            let mut shard = shard.lock().expect("no panic while a shard is held");
            shard.retain(|channel, entry| {
                let listeners = &mut entry.listeners;
                if listeners.capacity() > 64 && listeners.len() * 4 < listeners.capacity() {
                    // The room of a crowd that went; slots do not move.
                    listeners.shrink_to_fit();
                }
                let stays = entry.idle_since.is_none_or(|since| now < since + LINGER);
                if !stays {
                    self.backplane.unwant(channel);
                    n += 1;
                }
                stays
            });
            if shard.capacity() > 64 && shard.len() * 4 < shard.capacity() {
                shard.shrink_to_fit();
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
