//! What was published, and whether what a client received of it is what was promised: per channel
//! no event twice, ids strictly rising between two `ready`, no hole without a `gap`, and no position
//! that claims more than was delivered. Knows nothing of the server; it is told every publish by
//! who made it and every message by who received it.

use std::collections::{HashMap, HashSet};
use std::fmt;

use hub::cursor::EventId;

/// A promise that was broken.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Violation {
    /// Which promise.
    pub promise: Promise,
    /// Who found it broken.
    pub client: String,
    /// What happened, for the reader of a trace.
    pub what: String,
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}: {}: {}", self.promise, self.client, self.what)
    }
}

/// What every client is promised.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Promise {
    /// No event twice.
    Once,
    /// Ids of a channel strictly rise between two `ready`.
    InOrder,
    /// Between an event and the next one lies no hole without a `gap`.
    NoSilentHole,
    /// A message's `id` says that everything up to it was delivered or told as a gap.
    TrueToItsPosition,
    /// Once all is well again everybody gets the newest event.
    NeverStuck,
    /// Messages come as the protocol says.
    Protocol,
}

#[derive(Clone, Copy, Debug)]
struct Told {
    id: EventId,
    number: u64,
}

/// One life of the log, from a flush or restart to the next.
#[derive(Debug)]
struct Life {
    incarnation: u16,
    /// Events published before it.
    born_at: u64,
    events: Vec<Told>,
}

/// Everything that was published. Events are numbered from 1 in the order of their publishing.
#[derive(Debug, Default)]
pub struct Truth {
    n_events: u64,
    channels: HashMap<String, Vec<Told>>,
    lives: Vec<Life>,
}

impl Truth {
    /// The log stands at `position` in a life that was perhaps not known before.
    pub fn log_is_at(&mut self, position: EventId) {
        if self.lives.last().is_none_or(|life| life.incarnation != position.incarnation()) {
            let (incarnation, born_at) = (position.incarnation(), self.n_events);
            self.lives.push(Life { incarnation, born_at, events: Vec::new() });
        }
    }

    /// The number that the next event will have.
    pub fn next_number(&self) -> u64 {
        self.n_events + 1
    }

    /// How many were published.
    pub fn n_events(&self) -> u64 {
        self.n_events
    }

    /// An event was published; it carries `next_number()`.
    pub fn published(&mut self, channel: &str, id: EventId) {
        self.log_is_at(id);
        self.n_events += 1;
        let told = Told { id, number: self.n_events };
        self.channels.entry(channel.to_owned()).or_default().push(told);
        self.lives.last_mut().expect("of `log_is_at`").events.push(told);
    }

    /// The number of the newest event that a client with this position has behind it.
    pub fn number_at(&self, position: EventId) -> u64 {
        // Incarnations are drawn anew each time; were one drawn twice, the later is meant.
        let life = self.lives.iter().rev().find(|life| life.incarnation == position.incarnation());
        let Some(life) = life else { return 0 };
        let n_before = life.events.partition_point(|told| told.id <= position);
        n_before.checked_sub(1).map_or(life.born_at, |last| life.events[last].number)
    }

    /// Numbers of a channel's events in `(after, up_to]`.
    fn between(&self, channel: &str, after: u64, up_to: u64) -> impl Iterator<Item = u64> {
        let events = self.channels.get(channel).map_or(&[][..], Vec::as_slice);
        let from = events.partition_point(|told| told.number <= after);
        events[from..].iter().map(|told| told.number).take_while(move |number| *number <= up_to)
    }

    /// The newest event of a channel.
    pub fn newest(&self, channel: &str) -> Option<u64> {
        self.channels.get(channel)?.last().map(|told| told.number)
    }
}

/// A channel that a client is owed.
#[derive(Clone, Copy, Debug)]
struct Followed {
    /// Nothing up to this event is owed any more.
    settled: u64,
    /// The newest event there was when the last `gap` came.
    gap: Option<u64>,
}

/// The view of one client over its whole life.
#[derive(Debug)]
pub struct Judge {
    client: String,
    followed: HashMap<String, Followed>,
    seen: HashSet<u64>,
    /// Ids by channel since the last `ready`.
    last: HashMap<String, EventId>,
    n_gaps: u64,
}

impl Judge {
    /// Of a client that has heard nothing yet.
    pub fn new(client: &str) -> Self {
        Self {
            client: client.to_owned(),
            followed: HashMap::new(),
            seen: HashSet::new(),
            last: HashMap::new(),
            n_gaps: 0,
        }
    }

    fn broken(&self, promise: Promise, what: String) -> Violation {
        Violation { promise, client: self.client.clone(), what }
    }

    /// Did it receive event `number`?
    pub fn has_seen(&self, number: u64) -> bool {
        self.seen.contains(&number)
    }

    /// Events received, in all.
    pub fn n_seen(&self) -> usize {
        self.seen.len()
    }

    /// Gaps received, in all.
    pub fn n_gaps(&self) -> u64 {
        self.n_gaps
    }

    /// From here on everything after event `number` is owed on `channel`, unless it was before.
    pub fn follow(&mut self, channel: &str, number: u64) {
        self.followed.entry(channel.to_owned()).or_insert(Followed { settled: number, gap: None });
    }

    /// The client gave the channel up.
    pub fn forget(&mut self, channel: &str) {
        self.followed.remove(channel);
        self.last.remove(channel);
    }

    /// A connection ended, or `ready` came: ids may begin anew.
    pub fn begin(&mut self) {
        self.last.clear();
    }

    /// A `gap` came.
    pub fn gap(&mut self, truth: &Truth, channel: &str) {
        self.n_gaps += 1;
        if let Some(followed) = self.followed.get_mut(channel) {
            followed.gap = Some(truth.n_events);
        }
    }

    /// A logged event came.
    ///
    /// # Errors
    /// It came twice, out of order, or behind a hole.
    pub fn event(&mut self, truth: &Truth, channel: &str, id: EventId, number: u64) -> Result<(), Violation> {
        if !self.seen.insert(number) {
            return Err(self.broken(Promise::Once, format!("event {number} ({id}) of {channel} came twice")));
        }
        if let Some(last) = self.last.insert(channel.to_owned(), id)
            && id <= last
        {
            return Err(self.broken(Promise::InOrder, format!("event {number} of {channel}: {id} after {last}")));
        }
        self.hole(truth, channel, number - 1, Promise::NoSilentHole)?;
        if let Some(followed) = self.followed.get_mut(channel).filter(|followed| followed.settled < number) {
            *followed = Followed { settled: number, gap: None };
        }
        Ok(())
    }

    /// A message said that everything up to `position` was delivered. `but` is a channel of which
    /// it says nothing.
    ///
    /// # Errors
    /// It was not.
    pub fn claim(&mut self, truth: &Truth, position: EventId, but: &dyn Fn(&str) -> bool) -> Result<(), Violation> {
        let number = truth.number_at(position);
        let channels: Vec<String> = self.followed.keys().filter(|channel| !but(channel)).cloned().collect();
        channels.iter().try_for_each(|channel| self.hole(truth, channel, number, Promise::TrueToItsPosition))
    }

    /// Is there an event up to `number` that is owed, was not received and not told as a gap?
    fn hole(&self, truth: &Truth, channel: &str, number: u64, promise: Promise) -> Result<(), Violation> {
        let Some(followed) = self.followed.get(channel) else { return Ok(()) };
        let told = followed.gap.unwrap_or(0);
        let mut missed = truth.between(channel, followed.settled, number);
        match missed.find(|number| !self.seen.contains(number) && *number > told) {
            None => Ok(()),
            Some(hole) => Err(self.broken(promise, format!("event {hole} of {channel} is missing at {number}"))),
        }
    }

    /// All is well and quiet: is the newest event of every channel here?
    ///
    /// # Errors
    /// It is not.
    pub fn end(&self, truth: &Truth, channels: impl Iterator<Item = impl AsRef<str>>) -> Result<(), Violation> {
        for channel in channels {
            let channel = channel.as_ref();
            if let Some(newest) = truth.newest(channel).filter(|newest| !self.seen.contains(newest)) {
                return Err(self.broken(Promise::NeverStuck, format!("event {newest} of {channel} never came")));
            }
        }
        Ok(())
    }
}
