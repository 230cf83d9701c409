//! The backplane without Redis: one process, everything works. Decides what Redis would: ids, what
//! is kept, what a read answers (`memory::log`), who is in the fleet, who holds it and whose session is one too
//! many (`memory::fleet`), and here what each node hears over its link, in
//! which order, and when a link is lost. The twin of crate `redis-backplane`; both pass
//! `testkit::contract`.
//!
//! Several nodes may share one log, which makes a simulated fleet. The calls that break things
//! (`flush`, `restart`, `cut_link`, `set_reachable`) are for tests.
//!
//! Deliberately absent: anything that survives the process.

mod fleet;
mod log;

use std::collections::{HashSet, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use futures_util::future::BoxFuture;
use slab::Slab;
use tokio::sync::{Notify, mpsc};
use tokio::task::AbortHandle;

use self::fleet::FleetState;
use self::log::Log;
use crate::backplane::{
    Backplane, Claim, Claimed, Fleet, FromLink, HOLD_TIMES, Hold, MAX_REASON_BYTES, MAX_TELL_BYTES, Publish, Published,
    Read, ReadAsk, Revocation, RevocationKey, Unavailable,
};
use crate::channel::Channel;
use crate::clock::{Clock, Dice};

/// What may wait for one node, in bytes of data and `MESSAGE_COST` a message, before its link is
/// lost. As the hard limit that Redis sets by default for pub/sub (`client-output-buffer-limit`).
pub const MAX_LINK_BYTES: usize = 32 * 1024 * 1024;
/// What a waiting message counts beside its data: about what it takes.
const MESSAGE_COST: usize = 128;
/// Messages handed over ahead of the hub. Small: what waits should wait where it is counted. Not smaller: with half
/// of them waiting the hub counts as far behind, and that should be more than a burst.
const LINK_AHEAD: usize = 256;

/// How long and how much the log remembers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryConfig {
    /// Events kept a channel (`GATEWAY_HISTORY_SIZE`); 0 keeps none.
    pub history_size: usize,
    /// How long they are kept (`GATEWAY_HISTORY_TTL`).
    pub history_ttl: Duration,
    /// How long a key is remembered (`GATEWAY_IDEMPOTENCY_TTL`).
    pub idempotency_ttl: Duration,
}

/// In which state a log comes back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Restart {
    /// With everything it had acknowledged.
    Clean,
    /// Perhaps with less: positions of before count no more.
    Torn,
}

/// A log and the nodes on it.
pub struct MemoryLog {
    config: MemoryConfig,
    clock: Clock,
    dice: Dice,
    /// The one lock. Never held across an await; each hold is one call's work.
    inner: Mutex<Inner>,
}

struct Inner {
    log: Log,
    fleet: FleetState,
    nodes: Slab<Node>,
    n_nodes_ever: u64,
}

/// One node's side of the log.
struct Node {
    name: Arc<str>,
    /// Tells it from an earlier node of its name, whose sessions are gone.
    life: Arc<str>,
    wanted: HashSet<Channel>,
    link: Link,
    is_reachable: bool,
    queue: VecDeque<(FromLink, usize)>,
    queued_bytes: usize,
    wake: Arc<Notify>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Link {
    /// Nobody listens yet.
    Untaken,
    Up,
    /// Too much waited. Comes up again when what is left has been taken.
    Overflowed,
    /// A test cut it; only `restore_link` mends it.
    Cut,
    /// The hub dropped its end.
    Gone,
}

impl MemoryLog {
    /// An empty log, born now. Its incarnations are drawn from `dice`.
    pub fn new(config: MemoryConfig, clock: Clock, dice: Dice) -> Arc<Self> {
        let tag = draw_tag(&dice, |tag| tag != 0);
        let log = Log::born(config, now_ms(&clock), tag);
        let inner = Inner { log, fleet: FleetState::default(), nodes: Slab::new(), n_nodes_ever: 0 };
        Arc::new(Self { config, clock, dice, inner: Mutex::new(inner) })
    }

    /// A further node on this log. It leaves the log when it is dropped.
    pub fn node(self: &Arc<Self>, name: &str) -> Arc<Memory> {
        let wake = Arc::new(Notify::new());
        let name: Arc<str> = name.into();
        let mut inner = self.lock();
        inner.n_nodes_ever += 1;
        let life: Arc<str> = format!("{name}/{}", inner.n_nodes_ever).into();
        let node = Node {
            name: name.clone(),
            life: life.clone(),
            wanted: HashSet::new(),
            link: Link::Untaken,
            is_reachable: true,
            queue: VecDeque::new(),
            queued_bytes: 0,
            wake: wake.clone(),
        };
        let slot = inner.nodes.insert(node);
        drop(inner);
        Arc::new(Memory { name, life, log: self.clone(), slot, wake, pump: Mutex::new(None) })
    }

    /// For tests: everything is forgotten under the open links, as by `FLUSHALL`.
    pub fn flush(&self) {
        let mut inner = self.lock();
        let tag = draw_tag(&self.dice, |tag| inner.log.is_free(tag));
        inner.log = Log::born(self.config, now_ms(&self.clock), tag);
        inner.fleet = FleetState::default();
    }

    /// For tests: a restart of the server. Every link that was up is lost and comes back.
    pub fn restart(&self, restart: Restart) {
        let mut inner = self.lock();
        let tag = draw_tag(&self.dice, |tag| inner.log.is_free(tag));
        inner.log.reborn(now_ms(&self.clock), tag, restart);
        let Inner { log, nodes, .. } = &mut *inner;
        for (_, node) in nodes.iter_mut().filter(|(_, node)| node.link == Link::Up) {
            node.lose(Link::Cut);
            node.connect(log);
        }
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().expect("nothing panics while the log is held")
    }
}

impl Node {
    /// Puts one message on the link, if it is up and has room for it; a link without room is lost.
    fn push(&mut self, message: FromLink) {
        if self.link != Link::Up {
            return;
        }
        let data = match &message {
            FromLink::Event(event) => event.data.len(),
            FromLink::Told(text) => text.len(),
            _ => 0,
        };
        let cost = data + MESSAGE_COST;
        if self.queued_bytes + cost > MAX_LINK_BYTES {
            self.lose(Link::Overflowed);
            return;
        }
        self.queued_bytes += cost;
        self.queue.push_back((message, cost));
        self.wake.notify_one();
    }

    /// The link goes, and with it what waited on it. A loss that nobody was told of yet is the same loss.
    fn lose(&mut self, into: Link) {
        if self.link == Link::Gone {
            return;
        }
        let is_news = self.link == Link::Up;
        self.link = into;
        if is_news {
            self.queue.clear();
            self.queued_bytes = 0;
            self.queue.push_back((FromLink::Lost, 0));
        }
        self.wake.notify_one();
    }

    /// A new link: everything wanted is confirmed at once, and the log's position has come over it.
    /// This costs no room: it is bounded by what is wanted.
    fn connect(&mut self, log: &Log) {
        self.link = Link::Up;
        self.queue.extend(self.wanted.iter().map(|channel| (FromLink::Confirmed(channel.clone()), 0)));
        self.queue.push_back((FromLink::Up(log.position()), 0));
        self.wake.notify_one();
    }

    /// As the others see it: its beacon is listened for.
    fn is_there(&self) -> bool {
        matches!(self.link, Link::Untaken | Link::Up)
    }

    fn beacon(&mut self, log: &Log) {
        match self.queue.back_mut() {
            Some((FromLink::Beacon(position), _)) if self.link == Link::Up => *position = log.position(),
            _ => self.push(FromLink::Beacon(log.position())),
        }
    }

    fn next(&mut self, log: &Log) -> Option<FromLink> {
        if self.queue.is_empty() && self.link == Link::Overflowed {
            self.connect(log);
        }
        while let Some((message, cost)) = self.queue.pop_front() {
            self.queued_bytes -= cost;
            // A confirmation of what is wanted no more would say too much. One that precedes an
            // unwant and a want again is as good as the later one: here a want holds at once.
            let is_stale = matches!(&message, FromLink::Confirmed(channel) if !self.wanted.contains(channel));
            if !is_stale {
                return Some(message);
            }
        }
        None
    }
}

/// One node on a `MemoryLog`.
pub struct Memory {
    name: Arc<str>,
    life: Arc<str>,
    log: Arc<MemoryLog>,
    slot: usize,
    wake: Arc<Notify>,
    /// The task that hands messages to the hub; ends with the receiver or this node.
    pump: Mutex<Option<AbortHandle>>,
}

impl Memory {
    /// The name it was given.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// For tests: the link breaks and stays down. Again is harmless.
    pub fn cut_link(&self) {
        self.with(|node, _| node.lose(Link::Cut));
    }

    /// For tests: mends what `cut_link` broke.
    pub fn restore_link(&self) {
        self.with(|node, log| {
            if node.link == Link::Cut {
                node.connect(log);
            }
        });
    }

    /// For tests: calls of this node are answered (`true`) or `Unavailable`. The link is not touched.
    pub fn set_reachable(&self, is_reachable: bool) {
        self.with(|node, _| node.is_reachable = is_reachable);
    }

    fn with<T>(&self, call: impl FnOnce(&mut Node, &mut Log) -> T) -> T {
        let mut inner = self.log.lock();
        let Inner { log, nodes, .. } = &mut *inner;
        call(&mut nodes[self.slot], log)
    }

    /// One call at the log, at its time, if it can be reached.
    fn call<T>(&self, call: impl FnOnce(&mut Inner, u64) -> T) -> Result<T, Unavailable> {
        let mut inner = self.log.lock();
        if !inner.nodes[self.slot].is_reachable {
            return Err(Unavailable("this node is cut off from its log".to_owned()));
        }
        Ok(call(&mut inner, now_ms(&self.log.clock)))
    }
}

impl Backplane for Memory {
    fn publish(&self, event: Publish) -> BoxFuture<'_, Result<Published, Unavailable>> {
        Box::pin(async move {
            let published = self.call(|inner, now_ms| {
                let (published, event) = inner.log.publish(now_ms, event);
                if let Some(event) = event {
                    for (_, node) in &mut inner.nodes {
                        if node.wanted.contains(&event.channel) {
                            node.push(FromLink::Event(event.clone()));
                        }
                    }
                }
                published
            })?;
            // Never waiting for a wire, a loop of publishes would starve the hub on the same thread.
            tokio::task::coop::consume_budget().await;
            Ok(published)
        })
    }

    fn read(&self, ask: ReadAsk) -> BoxFuture<'_, Result<Read, Unavailable>> {
        Box::pin(async move {
            let read = self.call(|inner, now_ms| inner.log.read(now_ms, &ask))?;
            // As in `publish`: a loop over pages must leave the others a turn.
            tokio::task::coop::consume_budget().await;
            Ok(read)
        })
    }

    fn want(&self, channel: &Channel) {
        self.with(|node, _| {
            node.wanted.insert(channel.clone());
            node.push(FromLink::Confirmed(channel.clone()));
        });
    }

    fn unwant(&self, channel: &Channel) {
        self.with(|node, _| {
            node.wanted.remove(channel);
        });
    }

    fn beacon(&self) {
        let now_ms = now_ms(&self.log.clock);
        self.with(|node, log| {
            // Beacons come from an idle node too: what is dead goes away without any traffic.
            log.sweep(now_ms);
            log.age(now_ms);
            node.beacon(log);
        });
        self.log.lock().fleet.sweep(now_ms);
    }

    fn relink(&self) {
        self.with(|node, log| {
            if node.link == Link::Up {
                node.lose(Link::Cut);
                node.connect(log);
            }
        });
    }

    /// # Panics
    /// When called a second time, or outside a tokio runtime.
    fn link(&self) -> mpsc::Receiver<FromLink> {
        let (ahead, link) = mpsc::channel(LINK_AHEAD);
        let task = tokio::spawn(pump(self.log.clone(), self.slot, self.wake.clone(), ahead));
        let earlier = self.pump.lock().expect("nothing panics while it is held").replace(task.abort_handle());
        assert!(earlier.is_none(), "the link is taken once");
        self.with(|node, log| {
            // A node that a test cut off before comes up when it is restored.
            if node.link == Link::Untaken {
                node.connect(log);
            }
        });
        link
    }

    fn revocations(&self, keys: Vec<RevocationKey>) -> BoxFuture<'_, Result<Vec<Option<String>>, Unavailable>> {
        Box::pin(
            async move { self.call(|inner, now_ms| keys.iter().map(|key| inner.log.revoked(now_ms, key)).collect()) },
        )
    }

    fn revoke(&self, revocation: Revocation, ttl: Duration) -> BoxFuture<'_, Result<(), Unavailable>> {
        Box::pin(async move {
            self.call(|inner, now_ms| {
                inner.log.revoke(now_ms, &revocation, ttl);
                for (_, node) in &mut inner.nodes {
                    node.push(FromLink::Revoked(revocation.clone()));
                }
            })
        })
    }

    fn report(&self, body: String, ttl: Duration) -> BoxFuture<'_, Result<Fleet, Unavailable>> {
        Box::pin(async move {
            self.call(|inner, now_ms| {
                let (reports, before) = inner.fleet.report(now_ms, &self.name, &self.life, body, ttl);
                let (hold, birth_ms) = (inner.fleet.held_by(now_ms), inner.log.birth_ms());
                Fleet { reports, before, hold, birth_ms, now_ms }
            })
        })
    }

    fn retire(&self) -> BoxFuture<'_, Result<(), Unavailable>> {
        Box::pin(async move { self.call(|inner, _| inner.fleet.retire(&self.name, &self.life)) })
    }

    fn hold(&self, hold: Option<(Duration, String)>) -> BoxFuture<'_, Result<Option<Hold>, Unavailable>> {
        Box::pin(async move {
            let is_sound =
                |(time, reason): &(Duration, String)| HOLD_TIMES.contains(time) && reason.len() <= MAX_REASON_BYTES;
            if !hold.as_ref().is_none_or(is_sound) {
                return Err(Unavailable(format!(
                    "a hold is of {HOLD_TIMES:?}, its reason of {MAX_REASON_BYTES} bytes"
                )));
            }
            self.call(|inner, now_ms| {
                let until = |time| now_ms.saturating_add(ms(time));
                let hold = hold.map(|(time, reason)| Hold { until_ms: until(time), reason, by: self.name.clone() });
                inner.fleet.hold(hold.clone());
                for (_, node) in &mut inner.nodes {
                    node.push(FromLink::FleetChanged);
                }
                hold
            })
        })
    }

    fn tell(&self, to: Option<Arc<str>>, text: String) -> BoxFuture<'_, Result<(), Unavailable>> {
        Box::pin(async move {
            if text.len() > MAX_TELL_BYTES {
                return Err(Unavailable(format!("a text has at most {MAX_TELL_BYTES} bytes")));
            }
            self.call(|inner, _| {
                for (_, node) in &mut inner.nodes {
                    if to.as_ref().is_none_or(|to| *to == node.name) {
                        node.push(FromLink::Told(text.clone()));
                    }
                }
            })
        })
    }

    fn claim(&self, claims: Vec<Claim>, max: u32) -> BoxFuture<'_, Result<Vec<Claimed>, Unavailable>> {
        Box::pin(async move {
            if let Some(odd) = claims.iter().find(|claim| !is_sound(claim)) {
                return Err(Unavailable(format!("{:?} is no session, or its place no place", odd.session)));
            }
            let now = self.log.clock.unix();
            let claimed = self.call(|Inner { fleet, nodes, .. }, _| {
                let is_there = |life: &str| nodes.iter().any(|(_, node)| *node.life == *life && node.is_there());
                let settled = fleet.claim(now, &self.life, &claims, max, is_there);
                for (user, session) in settled.replaced {
                    for (_, node) in nodes.iter_mut() {
                        node.push(FromLink::Replaced { user: user.clone(), session: session.clone() });
                    }
                }
                settled.claimed
            })?;
            // As in `publish`: a storm of claims must leave the others a turn.
            tokio::task::coop::consume_budget().await;
            Ok(claimed)
        })
    }

    fn release(&self, of: Vec<(Arc<str>, Arc<str>)>) -> BoxFuture<'_, Result<(), Unavailable>> {
        Box::pin(async move {
            self.call(|inner, _| of.iter().for_each(|(user, session)| inner.fleet.release(&self.life, user, session)))
        })
    }

    fn is_link_up(&self) -> bool {
        self.with(|node, _| node.link == Link::Up)
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        if let Some(pump) = self.pump.get_mut().ok().and_then(Option::take) {
            pump.abort();
        }
        if let Ok(mut inner) = self.log.inner.lock() {
            inner.nodes.try_remove(self.slot);
        }
    }
}

/// Hands a node's messages to its hub, in order, as it takes them.
async fn pump(log: Arc<MemoryLog>, slot: usize, wake: Arc<Notify>, ahead: mpsc::Sender<FromLink>) {
    // The node may be gone, and its slot another's already.
    let of_node = |call: &mut dyn FnMut(&mut Node, &Log) -> Option<FromLink>| {
        let mut inner = log.lock();
        let Inner { log, nodes, .. } = &mut *inner;
        let node = nodes.get_mut(slot).filter(|node| Arc::ptr_eq(&node.wake, &wake))?;
        call(node, log)
    };
    // Fails once the hub has dropped its end.
    while let Ok(room) = ahead.reserve().await {
        match of_node(&mut |node, log| node.next(log)) {
            Some(message) => room.send(message),
            None => {
                drop(room);
                tokio::select! {
                    // Both keep nothing: a wake-up is stored until it is awaited.
                    () = wake.notified() => {}
                    () = ahead.closed() => break,
                }
            }
        }
    }
    of_node(&mut |node, _| {
        node.lose(Link::Gone);
        node.queue.clear();
        None
    });
}

fn draw_tag(dice: &Dice, is_free: impl Fn(u16) -> bool) -> u16 {
    loop {
        let tag = (dice.bits() >> 48) as u16;
        if is_free(tag) {
            return tag;
        }
    }
}

/// As the Redis schema must have it: names are parted by spaces there, places counted in doubles.
fn is_sound(claim: &Claim) -> bool {
    let is_name = !claim.session.is_empty() && !claim.session.contains(|c: char| c.is_ascii() && c.is_whitespace());
    is_name && claim.since.is_none_or(|since| since <= 1 << 53)
}

fn now_ms(clock: &Clock) -> u64 {
    ms(clock.unix())
}

fn ms(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests;
