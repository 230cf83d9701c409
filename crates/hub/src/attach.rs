//! How a session comes to be live on its channels without a hole or a double.
//!
//! Order of every attach, at connect and at a later `subscribe`: listen (live events are held back
//! from here on) → wait until the link is up and the channels' subscriptions are confirmed on it
//! (*confirm*) → one atomic read that tells the log's position P with the history (*atomic*) → gaps
//! first, then events, then `ready` or `ok` (*gapfirst*, *readypos*) → what was held back and lies
//! above P (*floor*) → live. If the link was lost or the log changed its incarnation meanwhile, the
//! whole is done again from the position that the client has by then (*agree*).

mod position;

use std::sync::{Arc, MutexGuard};
use std::time::Duration;

use tokio::time::{Instant, timeout_at};

use crate::backplane::{From, GapReason, Read, ReadAsk, Unavailable};
use crate::channel::Channel;
use crate::cursor::{EventId, Since};
use crate::event::{Encoded, Event, Replay, Wire, event_json, sse_chunk, text_frame};
use crate::fanout::LinkState;
use crate::hub::Hub;
use crate::message::{self, Resume};
use crate::session::{Held, Session, Stage, State, SubStage};

pub(crate) use position::Position;

/// Entries of one page of a replay. 256: a page is read again from the log's memory in well under
/// a millisecond, and a slow client holds no more than this.
const PAGE_EVENTS: usize = 256;
/// Bytes of one page of a replay.
const PAGE_BYTES: usize = 256 * 1024;

/// Opens a session: replays from `since`, says `ready`, goes live. Ends when the session does.
pub(crate) async fn open(hub: Arc<Hub>, session: Arc<Session>, since: Since) {
    let mut opening = Opening::new(&session, since);
    loop {
        let ended = session.until(|state| state.is_over());
        tokio::pin!(ended);
        let step = tokio::select! {
            biased;
            () = &mut ended => return,
            step = opening.step(&hub, &session) => step,
        };
        match step {
            Step::Done => {
                // A live session is told its position now and then: the wheel must know.
                hub.arm(&session);
                return;
            }
            Step::Again => {}
            // The page must have left before the next is read: only a write past its deadline can
            // end a session during its replay, not the outbox.
            Step::More => session.until(|state| state.is_over() || state.outbox.bytes() == 0).await,
        }
    }
}

enum Step {
    Done,
    Again,
    More,
}

struct Opening {
    channels: Vec<Channel>,
    from: From,
    /// Gaps that the cursor itself deserves, told with the first page.
    cursor_gap: Option<GapReason>,
    resume: Resume,
    replayed: usize,
}

impl Opening {
    fn new(session: &Session, since: Since) -> Self {
        let channels = session.lock().subs.iter().flatten().map(|sub| sub.channel.clone()).collect();
        let (from, cursor_gap, resume) = match since {
            Since::Now => (From::Here, None, Resume::New),
            Since::Start => (From::Start, None, Resume::New),
            Since::After(id) => (From::After(id), None, Resume::Ok),
            Since::Unknown => (From::Here, Some(GapReason::UnknownPosition), Resume::Gap),
        };
        Self { channels, from, cursor_gap, resume, replayed: 0 }
    }

    async fn step(&mut self, hub: &Hub, session: &Arc<Session>) -> Step {
        {
            // What was taken off meanwhile is neither waited for nor read.
            let state = session.lock();
            self.channels.retain(|channel| state.find(channel).is_some());
        }
        let link = confirmed(hub, &self.channels).await;
        let Some(read) = read(hub, self.channels.iter().map(|c| (c.clone(), self.from)).collect()).await else {
            return Step::Again;
        };
        if link.incarnation != Some(read.position.incarnation()) {
            hub.disagree(link).await;
            return Step::Again;
        }
        self.apply(hub, session, link, &read)
    }

    /// Writes one page into the outbox; atomic towards the dispatcher by the session's lock.
    fn apply(&mut self, hub: &Hub, session: &Session, link: LinkState, read: &Read) -> Step {
        let wire = session.info.wire;
        let mut state = session.lock();
        if state.is_over() {
            return Step::Done;
        }
        // Under the session's lock: a loss counts its generation before it visits sessions, so
        // either it is seen here, or the loss finds a live session and repairs it.
        if hub.place.state() != link {
            return Step::Again;
        }
        self.gaps(hub, &mut state, wire, read);
        for event in &read.events {
            // Read before the channel was taken off: it is not heard any more.
            if state.find(&event.channel).is_some() {
                state.push_event(Encoded::new(event.clone()), wire, Instant::now());
                self.replayed += 1;
            }
        }
        if read.more {
            if let Some(last) = read.events.last().and_then(|event| event.id) {
                self.from = From::After(last);
            }
            drop(state);
            session.wake();
            return Step::More;
        }
        state.position = read.position;
        let held = state.held.as_mut().expect("held while opening");
        let is_short = held.missed > read.position;
        let n_held = held.bytes();
        if is_short || state.outbox.bytes() + n_held > hub.config.session.outbox_bytes / 2 {
            // More came while we read than could be held back, or the client has yet to take so
            // much that the next live event might end it: the log has it all, for later.
            self.from = From::After(read.position);
            state.held.as_mut().expect("held while opening").clear();
            drop(state);
            session.wake();
            return Step::More;
        }
        let ready = message::ready(self.resume, self.replayed, read.position);
        state.push_own(ready.on(wire), wire);
        go_live(&mut state, wire, self.resume);
        drop(state);
        hub.metrics.session_ready(wire, self.resume.into());
        session.wake();
        Step::Done
    }

    fn gaps(&mut self, hub: &Hub, state: &mut State, wire: Wire, read: &Read) {
        let cursor_gap = self.cursor_gap.take();
        let hole = |facts| match self.from {
            From::After(since) => {
                read.broken.or_else(|| read.hole(facts, since)).or(facts.cut.then_some(GapReason::Overflow))
            }
            From::Here => cursor_gap,
            From::Start => None,
        };
        let holes =
            self.channels.iter().zip(&read.facts).filter_map(|(channel, facts)| Some((channel.clone(), hole(facts)?)));
        let gaps: Vec<_> = holes.filter(|(channel, _)| state.find(channel).is_some()).collect();
        if gaps.is_empty() {
            return;
        }
        self.resume = Resume::Gap;
        // The old cursor stays good until the replay is through; a broken one is replaced.
        let at = match (self.from, read.broken) {
            (From::After(since), None) => since,
            _ => read.position,
        };
        for m in message::gaps(&gaps, at) {
            state.push_own(m.on(wire), wire);
        }
        gaps.iter().for_each(|(_, reason)| hub.metrics.gap(*reason));
    }
}

/// From here on live events go straight to the outbox; what was held back and is new goes first.
fn go_live(state: &mut State, wire: Wire, resume: Resume) {
    let position = state.position;
    state.stage = Stage::Live;
    state.resumed = Some(resume);
    if let Some(held) = state.held.take() {
        for event in held.events {
            let is_heard = state.find(&event.event.channel).is_some();
            if is_heard && event.event.id.is_none_or(|id| id > position) {
                state.push_event(event, wire, Instant::now());
            }
        }
    }
    state.tell_progress();
}

/// A later `subscribe`: the channel is already listened on, pending. Returns once it is live and
/// answered, or the session ended.
///
/// # Errors
/// `Late` where the backplane did not answer by `deadline`, counted anew for each page that the
/// client took: a slow reader is no reason to give up. The caller takes the channel off the session.
///
/// # Cancel safety
/// Dropping it leaves the channel pending; the caller takes it off the session.
pub(crate) async fn subscribe(
    hub: &Hub,
    session: &Arc<Session>,
    channel: &Channel,
    since: Since,
    mut deadline: Instant,
) -> Result<(), Late> {
    let (from, cursor_gap) = match since {
        Since::Now => (From::Here, None),
        Since::Start => (From::Start, None),
        Since::After(id) => (From::After(id), None),
        Since::Unknown => (From::Here, Some(GapReason::UnknownPosition)),
    };
    let mut joining =
        Joining { channel: channel.clone(), since, from, cursor_gap, replayed: EventId::ZERO, resume: None };
    loop {
        match timeout_at(deadline, joining.step(hub, session)).await.map_err(|_| Late)? {
            Step::Done => return Ok(()),
            Step::Again => {}
            Step::More => {
                session.until(|state| state.is_over() || state.outbox.bytes() == 0).await;
                deadline = Instant::now() + hub.config.auth_timeout;
            }
        }
    }
}

/// The backplane did not answer in time.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Late;

struct Joining {
    channel: Channel,
    since: Since,
    from: From,
    cursor_gap: Option<GapReason>,
    /// Highest id replayed so far.
    replayed: EventId,
    resume: Option<Resume>,
}

impl Joining {
    async fn step(&mut self, hub: &Hub, session: &Session) -> Step {
        if session.lock().is_over() {
            return Step::Done;
        }
        let link = confirmed(hub, std::slice::from_ref(&self.channel)).await;
        let Some(read) = read(hub, vec![(self.channel.clone(), self.from)]).await else { return Step::Again };
        if link.incarnation != Some(read.position.incarnation()) {
            hub.disagree(link).await;
            return Step::Again;
        }
        if !read.more {
            // The channel goes live only once the link has passed P, so that `ok.id`, the
            // session's position, is not below what was replayed (rule *barrier*).
            hub.backplane.beacon();
            hub.place.passed(read.position, link.generation).await;
        }
        self.apply(hub, session, link, &read)
    }

    fn apply(&mut self, hub: &Hub, session: &Session, link: LinkState, read: &Read) -> Step {
        let wire = session.info.wire;
        let node = hub.place.position();
        let mut state = session.lock();
        if state.is_over() {
            return Step::Done;
        }
        let Some(index) = state.find(&self.channel) else { return Step::Done };
        if hub.place.state() != link {
            return Step::Again;
        }
        let position = state.position_with(node);
        if !read.more && position < read.position {
            // The link has passed P, and so has the session; else what was replayed would come again.
            return Step::Again;
        }
        self.gap(hub, &mut state, wire, read);
        for event in &read.events {
            self.replay(&mut state, wire, event);
        }
        if read.more {
            self.from = From::After(self.replayed);
            drop(state);
            session.wake();
            return Step::More;
        }
        let held = state.held.take().map_or_else(Held::new, |held| *held);
        let needed_from = if self.since == Since::Now { position } else { read.position };
        if held.missed > needed_from {
            // More came while we read than could be held back: the log has it.
            state.held = Some(Box::new(Held::new()));
            if self.since != Since::Now {
                self.from = From::After(read.position);
            }
            return Step::Again;
        }
        state.subs[index].as_mut().expect("found above").stage = SubStage::Live;
        // What was held back and lies at or below the session's position is a part of the replay
        // (its id must not move the cursor); what lies above is live already.
        let (passed, late): (Vec<_>, Vec<_>) =
            held.events.into_iter().partition(|event| event.event.id.is_some_and(|id| id <= position));
        if self.since != Since::Now {
            for event in passed.iter().filter(|event| event.event.id.is_some_and(|id| id > read.position)) {
                self.replay(&mut state, wire, &event.event);
            }
        }
        let resume = self.resume.unwrap_or(match self.since {
            Since::Now | Since::Start => Resume::New,
            _ => Resume::Ok,
        });
        finish(state, session, late, resume, position);
        Step::Done
    }

    fn gap(&mut self, hub: &Hub, state: &mut State, wire: Wire, read: &Read) {
        let facts = read.facts.first().copied().unwrap_or_default();
        let reason = match self.from {
            From::After(since) => {
                read.broken.or_else(|| read.hole(&facts, since)).or(facts.cut.then_some(GapReason::Overflow))
            }
            From::Here => self.cursor_gap.take(),
            From::Start => None,
        };
        if let Some(reason) = reason {
            self.resume = Some(Resume::Gap);
            hub.metrics.gap(reason);
            let at = state.position;
            state.push_own(message::gap(&self.channel, reason, Some(at)).on(wire), wire);
        }
    }

    fn replay(&mut self, state: &mut State, wire: Wire, event: &Event) {
        if let Some(id) = event.id {
            self.replayed = self.replayed.max(id);
        }
        let json = event_json(event, Replay::Yes);
        let framed = match wire {
            Wire::Ws => text_frame(&json),
            Wire::Sse => sse_chunk(None, None, None, &json),
        };
        state.push_own(framed, wire);
    }
}

fn finish(
    mut state: MutexGuard<'_, State>,
    session: &Session,
    late: Vec<Arc<Encoded>>,
    resume: Resume,
    position: EventId,
) {
    let wire = session.info.wire;
    let current = state.asks.as_ref().and_then(|asks| asks.current.clone());
    if let Some(ask) = current {
        let ok = message::ok(ask.reference.as_deref(), Some(&ask.channel), Some(resume), Some(position));
        state.push_own(ok.on(wire), wire);
    }
    for event in late {
        state.push_event(event, wire, Instant::now());
    }
    drop(state);
    session.wake();
}

/// Waits until the link is up and repaired and every channel is confirmed on it.
async fn confirmed(hub: &Hub, channels: &[Channel]) -> LinkState {
    loop {
        let link = hub.place.live().await;
        for channel in channels {
            hub.channels.confirmed(channel).await;
        }
        if hub.place.state() == link {
            return link;
        }
    }
}

/// One read, bounded in number over the node; `None` after a pause where the backplane cannot answer.
async fn read(hub: &Hub, channels: Vec<(Channel, From)>) -> Option<Read> {
    let read = if channels.iter().all(|(_, from)| *from == From::Here) {
        // Only the position is wanted, which is everybody's.
        hub.log_position.get(channels.len(), async || ask(hub, Vec::new()).await).await
    } else {
        ask(hub, channels).await
    };
    match read {
        Ok(read) => Some(read),
        Err(e) => {
            tracing::debug!(error = %e, "history could not be read, trying again");
            let pause = hub.dice.between(Duration::from_millis(50), Duration::from_millis(500));
            tokio::time::sleep(pause).await;
            None
        }
    }
}

async fn ask(hub: &Hub, channels: Vec<(Channel, From)>) -> Result<Read, Unavailable> {
    let _turn = hub.reads.acquire().await.expect("never closed");
    let ask = ReadAsk {
        channels,
        check: None,
        cap: hub.config.replay_max,
        page_events: PAGE_EVENTS,
        // A page of a later subscribe waits beside live events.
        page_bytes: PAGE_BYTES.min(hub.config.session.outbox_bytes / 4),
    };
    hub.backplane.read(ask).await
}
