//! The one task that reads the node's link: moves events to outboxes in id order, and mends what a
//! lost link missed. The rules it keeps: from the loss of the link to the end of the repair nothing
//! logged is dispatched and the node's position stands still (*hold*); the repair and its gap test
//! start at each session's own position (*cov*); gaps go before events (*gapfirst*); what was
//! repaired is not dispatched again (*dedup*); a message of another incarnation makes the link anew
//! (*agree*); after a reset under open sessions `ready` is said again (*ready2*).

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use futures_util::FutureExt;
use futures_util::future::BoxFuture;
use tokio::sync::mpsc;
use tokio::time::{Instant, sleep_until};

use crate::backplane::{Facts, From, FromLink, GapReason, Read, ReadAsk};
use crate::channel::Channel;
use crate::cursor::EventId;
use crate::event::{Event, Run};
use crate::fanout::{Listener, Which};
use crate::hub::Hub;
use crate::message::{self, Resume};
use crate::session::{Route, Stage, SubStage};

mod spread;

/// Events of one channel that are offered together: what waits already leaves in one write.
const MAX_RUN: usize = 32;
/// How often channels that nobody listens on are looked for.
const SWEEP: Duration = Duration::from_secs(1);
/// Channels of one read of a repair: keeps one call of the log's Function short.
const REPAIR_CHANNELS: usize = 200;
/// Events that a repair may hold at once, over all channels; beyond it sessions get `gap`.
const REPAIR_EVENTS: usize = 100_000;
/// Bytes that a repair may hold at once.
const REPAIR_BYTES: usize = 128 * 1024 * 1024;
/// Logged events held back while a repair reads; beyond it the repair reads again.
const MAX_HOLD: usize = 65_536;
/// If the log cannot be read for so long although the link is up, sessions get `gap` and go on.
const REPAIR_PATIENCE: Duration = Duration::from_secs(15);

pub(crate) async fn run(hub: Arc<Hub>, mut link: mpsc::Receiver<FromLink>) {
    let mut dispatcher = Dispatcher::new(hub.clone());
    // What ended the last run of events.
    let mut ahead = None;
    let mut next_sweep = Instant::now() + SWEEP;
    loop {
        // Not an arm of its own: a link that always has something would never let it have its turn.
        if Instant::now() >= next_sweep {
            let which = if ahead.is_none() && link.is_empty() { Which::All } else { Which::Confirmed };
            hub.channels.sweep(Instant::now(), which);
            next_sweep = Instant::now() + SWEEP;
        }
        tokio::select! {
            biased;
            // First, or a busy link would starve its own repair. Cancel-safe: polled in place.
            repaired = pending_or(&mut dispatcher.repair) => dispatcher.repaired(repaired).await,
            // Cancel-safe: what is ahead is taken only where it is also given.
            said = said_next(&mut ahead, &mut link) => match said {
                Some(FromLink::Event(first)) => {
                    dispatcher.route = spread::route(&hub, &link);
                    let run;
                    (run, ahead) = dispatcher.run_of(first, &mut link);
                    dispatcher.events(run).await;
                }
                Some(said) => dispatcher.on(said),
                None => return,
            },
            () = sleep_until(next_sweep) => {}
            () = hub.stop.cancelled() => return,
        }
    }
}

async fn said_next(ahead: &mut Option<FromLink>, link: &mut mpsc::Receiver<FromLink>) -> Option<FromLink> {
    match ahead.take() {
        Some(said) => Some(said),
        None => link.recv().await,
    }
}

async fn pending_or(repair: &mut Option<BoxFuture<'static, Repair>>) -> Repair {
    match repair {
        Some(reading) => reading.await,
        None => std::future::pending().await,
    }
}

struct Dispatcher {
    hub: Arc<Hub>,
    scratch: Vec<Listener>,
    route: Route,
    /// Logged events of the new link that wait for the repair's end.
    hold: Vec<Event>,
    redo: bool,
    repair: Option<BoxFuture<'static, Repair>>,
    /// Bytes offered to each listener since others last had a turn.
    breath: usize,
    /// Events offered since then, each to each of its listeners.
    n_offered: usize,
}

/// What was read to mend the time without a link.
enum Repair {
    /// The log, as of one position.
    Read { position: EventId, broken: Option<GapReason>, channels: HashMap<Channel, (Facts, Read)>, events: Vec<Event> },
    /// The log could not be read in time; it stood at this position when the link came up.
    Unreadable(EventId),
    /// The log changed its incarnation while it was read.
    Void,
}

impl Dispatcher {
    fn new(hub: Arc<Hub>) -> Self {
        Self {
            hub,
            scratch: Vec::new(),
            route: Route::AtOnce,
            hold: Vec::new(),
            redo: false,
            repair: None,
            breath: 0,
            n_offered: 0,
        }
    }

    /// The event and those of the same channel that wait right behind it; then what ended the run.
    fn run_of(&self, first: Event, link: &mut mpsc::Receiver<FromLink>) -> (Vec<Event>, Option<FromLink>) {
        let most = self.hub.config.session.outbox_bytes / 8;
        let mut bytes = first.data.len() + 128;
        let mut run = vec![first];
        while run.len() < MAX_RUN && bytes < most {
            match link.try_recv() {
                Ok(FromLink::Event(event)) if event.channel == run[0].channel => {
                    bytes += event.data.len() + 128;
                    run.push(event);
                }
                Ok(other) => return (run, Some(other)),
                Err(_) => break,
            }
        }
        (run, None)
    }

    /// Whatever is no event.
    fn on(&mut self, said: FromLink) {
        match said {
            FromLink::Event(_) => unreachable!("events come in runs"),
            FromLink::Beacon(position) => self.beacon(position),
            FromLink::Confirmed(channel) => self.hub.channels.confirm(&channel),
            FromLink::Lost => self.lost(),
            FromLink::Up(position) => self.up(position),
            FromLink::Revoked(revocation) => self.hub.revoked(&revocation),
            FromLink::Told(text) => self.hub.rolls.told(text),
            FromLink::Replaced { user, session } => self.hub.replaced(&user, &session),
            FromLink::FleetChanged => self.hub.fleet_changed(),
        }
    }

    /// Events of one channel, oldest first: those that count are offered together.
    async fn events(&mut self, run: Vec<Event>) {
        let mut position = self.hub.place.position();
        let is_fresh = |event: Event| {
            let Some(id) = event.id else { return Some(event) };
            let link = self.hub.place.state();
            if !link.is_live {
                self.hold(event);
            } else if link.incarnation != Some(id.incarnation()) {
                self.hub.relink(link);
            } else if id > position {
                position = id;
                return Some(event);
            }
            None
        };
        let fresh: Vec<Event> = run.into_iter().filter_map(is_fresh).collect();
        if !fresh.is_empty() {
            self.dispatch(fresh).await;
            self.hub.place.advance(position);
        }
    }

    /// Before the link is whole, everything is below what the repair will read; while it reads, what
    /// comes may be above.
    fn hold(&mut self, event: Event) {
        if self.repair.is_some() {
            self.hold.push(event);
            if self.hold.len() > MAX_HOLD {
                self.hold = Vec::new();
                self.redo = true;
            }
        }
    }

    /// Offers events of one channel, oldest first, to everybody who hears it.
    async fn dispatch(&mut self, events: Vec<Event>) {
        self.breath += events.iter().map(|event| event.data.len() + 128).sum::<usize>();
        if self.breath > self.hub.config.session.outbox_bytes / 8 || self.n_offered >= spread::CHUNK {
            // Who is to write what was offered may wait for this very thread: without a turn of
            // theirs a burst fills every outbox, however fast its client reads. And as within a large
            // channel, so over many small ones: everything else has its turn.
            (self.breath, self.n_offered) = (0, 0);
            tokio::task::yield_now().await;
        }
        self.n_offered += spread::spread(&self.hub, Run::new(events), self.route, &mut self.scratch).await;
    }

    fn beacon(&mut self, position: EventId) {
        let link = self.hub.place.state();
        if !link.is_live {
            return;
        }
        if link.incarnation == Some(position.incarnation()) {
            self.hub.place.advance(position);
        } else {
            self.hub.relink(link);
        }
    }

    fn lost(&mut self) {
        self.hub.fleet.erred();
        self.repair = None;
        self.hold = Vec::new();
        self.redo = false;
        self.hub.place.set(|link| {
            link.generation += 1;
            link.is_live = false;
        });
        self.hub.channels.unconfirm_all();
        // What was held back may have a hole now: those sessions read again on the next link.
        for session in self.hub.all_sessions() {
            let mut state = session.lock();
            if let Some(held) = &mut state.held {
                held.clear();
            }
        }
        tracing::warn!("the link to the backplane is lost; sessions stay, what is missed will be read from the log");
    }

    fn up(&mut self, position: EventId) {
        let link = self.hub.place.state();
        if link.is_live {
            return self.beacon(position);
        }
        if link.incarnation.is_none() {
            self.hub.place.reset(position);
            self.live(position);
            return;
        }
        self.hold = Vec::new();
        self.redo = false;
        self.repair = Some(read_repair(self.hub.clone(), self.hub.place.position(), position).boxed());
    }

    fn live(&mut self, position: EventId) {
        self.hub.place.set(|link| {
            link.is_live = true;
            link.incarnation = Some(position.incarnation());
        });
    }

    async fn repaired(&mut self, repair: Repair) {
        self.repair = None;
        if std::mem::take(&mut self.redo) {
            let position = self.hub.place.position();
            let up = match repair {
                Repair::Read { position, .. } | Repair::Unreadable(position) => position,
                Repair::Void => position,
            };
            self.repair = Some(read_repair(self.hub.clone(), position, up).boxed());
            return;
        }
        match repair {
            Repair::Void => return self.hub.relink(self.hub.place.state()),
            Repair::Unreadable(position) => self.give_up(position),
            Repair::Read { position, broken: Some(reason), .. } => self.reset(position, reason),
            Repair::Read { position, broken: None, channels, events } => self.mend(position, &channels, events).await,
        }
        self.hub.metrics.redis_repair();
        for event in std::mem::take(&mut self.hold) {
            self.events(vec![event]).await;
        }
    }

    /// The log is the same: everybody gets what the link missed, after the gaps.
    async fn mend(&mut self, position: EventId, channels: &HashMap<Channel, (Facts, Read)>, events: Vec<Event>) {
        let node = self.hub.place.position();
        for session in self.hub.all_sessions() {
            let wire = session.info.wire;
            let mut state = session.lock();
            if state.stage != Stage::Live {
                continue;
            }
            let base = state.position.max(node);
            let mut gaps = Vec::new();
            for sub in state.subs.iter().flatten().filter(|sub| sub.stage == SubStage::Live) {
                if let Some((facts, read)) = channels.get(&sub.channel) {
                    let hole = read.hole(facts, base).or(facts.cut.then_some(GapReason::Overflow));
                    gaps.extend(hole.map(|reason| (sub.channel.clone(), reason)));
                }
            }
            for m in message::gaps(&gaps, base) {
                state.push_own(m.on(wire), wire);
            }
            drop(state);
            gaps.iter().for_each(|(_, reason)| self.hub.metrics.gap(*reason));
            if !gaps.is_empty() {
                session.wake();
            }
        }
        let n_events = events.len();
        for event in events {
            let id = event.id;
            self.dispatch(vec![event]).await;
            if let Some(id) = id {
                self.hub.place.advance(id);
            }
        }
        self.hub.place.advance(position);
        for session in self.hub.all_sessions() {
            let mut state = session.lock();
            // Also where nothing came: P may be of a new incarnation, which the node alone would
            // not carry into it.
            if state.stage == Stage::Live {
                state.position = state.position.max(position);
            }
        }
        self.live(position);
        tracing::info!(n_events, "the link to the backplane is back; what was missed was read from the log");
    }

    /// Another log: whatever is older is uncertain. Gaps, then a new position.
    fn reset(&mut self, position: EventId, reason: GapReason) {
        self.hub.place.reset(position);
        self.every_channel_gets(reason, position, ToldBy::Ready);
        self.live(position);
        tracing::warn!(reason = reason.word(), "the log was reset; every session was told");
    }

    /// The log cannot be read: sessions are told of the hole and go on from where the log stands.
    fn give_up(&mut self, position: EventId) {
        if self.hub.place.state().incarnation != Some(position.incarnation()) {
            return self.reset(position, GapReason::Reset);
        }
        self.every_channel_gets(GapReason::Backplane, position, ToldBy::Gap);
        self.hub.place.advance(position);
        self.live(position);
        tracing::warn!("what the link missed could not be read; every session was told");
    }

    fn every_channel_gets(&self, reason: GapReason, position: EventId, told: ToldBy) {
        for session in self.hub.all_sessions() {
            let wire = session.info.wire;
            let mut state = session.lock();
            if state.stage != Stage::Live {
                continue;
            }
            let live = state.subs.iter().flatten().filter(|sub| sub.stage == SubStage::Live);
            let gaps: Vec<_> = live.map(|sub| (sub.channel.clone(), reason)).collect();
            for m in message::gaps(&gaps, position) {
                self.hub.metrics.gap(reason);
                state.push_own(m.on(wire), wire);
            }
            state.position = position;
            if let Some(held) = &mut state.held {
                held.clear();
            }
            if told == ToldBy::Ready {
                state.push_own(message::ready(Resume::Gap, 0, position).on(wire), wire);
            }
            drop(state);
            session.wake();
        }
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum ToldBy {
    /// The position may have gone down: `ready` replaces the client's cursor.
    Ready,
    /// The gap's own id does.
    Gap,
}

/// Reads what all listened channels had after `since`, as of one position. `up` is where the log
/// stood when the link came up.
async fn read_repair(hub: Arc<Hub>, since: EventId, up: EventId) -> Repair {
    let give_up_at = Instant::now() + REPAIR_PATIENCE;
    let mut reading = Reading::default();
    let listened = hub.channels.listened();
    let mut groups: Vec<&[Channel]> = listened.chunks(REPAIR_CHANNELS).collect();
    if groups.is_empty() {
        groups.push(&[]);
    }
    for group in groups {
        let mut from = From::After(since);
        loop {
            let channels = group.iter().map(|c| (c.clone(), from)).collect();
            let Some(read) = read_once(&hub, channels, since, give_up_at).await else {
                return Repair::Unreadable(up);
            };
            match reading.take(group, from, read) {
                Taken::Void => return Repair::Void,
                Taken::Broken(position, reason) => {
                    return Repair::Read {
                        position,
                        broken: Some(reason),
                        channels: HashMap::new(),
                        events: Vec::new(),
                    };
                }
                Taken::More(last) => from = From::After(last),
                Taken::Whole => break,
            }
        }
    }
    let mut events = Vec::from(reading.events);
    events.sort_by_key(|event| event.id);
    let position = reading.position.expect("at least one read was taken");
    Repair::Read { position, broken: None, channels: reading.channels, events }
}

async fn read_once(hub: &Hub, channels: Vec<(Channel, From)>, check: EventId, give_up_at: Instant) -> Option<Read> {
    let ask =
        ReadAsk { channels, check: Some(check), cap: REPAIR_EVENTS, page_events: 2_000, page_bytes: 4 * 1024 * 1024 };
    loop {
        match hub.backplane.read(ask.clone()).await {
            Ok(read) => return Some(read),
            Err(e) if Instant::now() < give_up_at => {
                tracing::debug!(error = %e, "the repair could not read the log, trying again");
                tokio::time::sleep(hub.dice.between(Duration::from_millis(50), Duration::from_millis(500))).await;
            }
            Err(_) => return None,
        }
    }
}

#[derive(Default)]
struct Reading {
    /// P of the first read: entries above it come over the link.
    position: Option<EventId>,
    channels: HashMap<Channel, (Facts, Read)>,
    /// Of each channel in the order of its ids.
    events: VecDeque<Event>,
    bytes: usize,
}

enum Taken {
    Void,
    Broken(EventId, GapReason),
    More(EventId),
    Whole,
}

impl Reading {
    /// A channel has a hole here. Its gap will be told before all events, so nothing of it that
    /// lies before the hole may come after the gap.
    fn cut(&mut self, channel: &Channel) {
        self.events.retain(|event| event.channel != *channel);
        self.bytes = self.events.iter().map(|event| event.data.len()).sum();
        if let Some((facts, _)) = self.channels.get_mut(channel) {
            facts.cut = true;
        }
    }

    fn take(&mut self, group: &[Channel], from: From, mut read: Read) -> Taken {
        let position = *self.position.get_or_insert(read.position);
        if read.position.incarnation() != position.incarnation() {
            return Taken::Void;
        }
        if let Some(reason) = read.broken {
            return Taken::Broken(read.position, reason);
        }
        let events = std::mem::take(&mut read.events);
        let last = events.last().and_then(|event| event.id);
        for (channel, facts) in group.iter().zip(&read.facts) {
            let hole_in_page = match from {
                From::After(at) => read.hole(facts, at).is_some(),
                _ => false,
            };
            if !self.channels.contains_key(channel) {
                let now = Read { events: Vec::new(), facts: Vec::new(), ..read.clone() };
                self.channels.insert(channel.clone(), (*facts, now));
            } else if facts.cut || hole_in_page {
                self.cut(channel);
            }
        }
        for event in events.into_iter().filter(|event| event.id.is_none_or(|id| id <= position)) {
            self.bytes += event.data.len();
            self.events.push_back(event);
        }
        while self.bytes > REPAIR_BYTES {
            // Of every channel the oldest goes first, so its hole lies before what is kept.
            let Some(oldest) = self.events.pop_front() else { break };
            self.bytes -= oldest.data.len();
            self.channels.entry(oldest.channel).and_modify(|(facts, _)| facts.cut = true);
        }
        match last {
            Some(last) if read.more && last < position => Taken::More(last),
            _ => Taken::Whole,
        }
    }
}

#[cfg(test)]
mod tests;
