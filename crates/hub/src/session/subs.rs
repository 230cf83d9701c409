//! The channels of one session: which it has, and whether their events go to its client yet. Decides
//! nothing about who may hear what (`inbound`), nor about when a channel goes live (`attach`).

use smallvec::SmallVec;

use super::{Held, State};
use crate::channel::Channel;

/// A session's channels, each in a place that stays its own. So many stand in the session itself, where
/// a delivery needs no further cache line to find them: a user's own channel and two more.
pub(crate) type Subs = SmallVec<[Option<Sub>; 3]>;

/// A channel of a session.
pub(crate) struct Sub {
    pub channel: Channel,
    /// Its place among the channel's listeners. Half as wide as an index, for every session has one for
    /// each of its channels.
    slot: u32,
    pub stage: SubStage,
}

/// Whether a channel's events go to the client, once the session is live.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum SubStage {
    Live,
    /// Of a later `subscribe` whose history is being read: they are held back. One at a time.
    Joining,
}

impl Sub {
    pub fn slot(&self) -> usize {
        self.slot as usize
    }

    /// The channel, and its slot.
    pub fn into_parts(self) -> (Channel, usize) {
        let slot = self.slot();
        (self.channel, slot)
    }

    /// It is heard from here on, at this slot and by the channel's shared name.
    pub fn heard_at(&mut self, slot: usize, channel: Channel) {
        self.slot = u32::try_from(slot).expect("a node has fewer than 2^32 sessions");
        self.channel = channel;
    }
}

impl State {
    pub fn find(&self, channel: &Channel) -> Option<usize> {
        self.subs.iter().position(|s| s.as_ref().is_some_and(|s| s.channel == *channel))
    }

    /// Gives a channel the first free place; returns which. Its listener is still to be entered.
    pub fn add_sub(&mut self, channel: Channel, stage: SubStage) -> usize {
        if stage == SubStage::Joining {
            self.held = Some(Box::new(Held::new()));
        }
        let added = Some(Sub { channel, slot: u32::MAX, stage });
        let index = self.subs.iter().position(Option::is_none).unwrap_or(self.subs.len());
        if index < self.subs.len() {
            self.subs[index] = added;
        } else {
            // No room for another: most sessions never need it.
            self.subs.reserve_exact(1);
            self.subs.push(added);
        }
        index
    }

    /// Takes a channel off the session, with what was held back of it.
    pub fn take_sub(&mut self, channel: &Channel) -> Option<Sub> {
        let sub = self.find(channel).and_then(|index| self.subs[index].take())?;
        if sub.stage == SubStage::Joining {
            self.held = None;
        }
        Some(sub)
    }

    pub fn n_subs(&self) -> usize {
        self.subs.iter().flatten().count()
    }
}
