//! Who hears one channel, in slots that do not move. Decides how they are kept: most channels are a
//! user's own with one listener, which costs no allocation; a few have crowds.

use std::sync::Arc;

use slab::Slab;
use tokio::time::Instant;

use crate::clock::Moment;
use crate::session::Session;

/// A session that hears a channel, and the channel's place in the session.
#[derive(Clone)]
pub(crate) struct Listener {
    pub session: Arc<Session>,
    /// Half a word, so that `Listeners` has two and not three.
    sub: u32,
}

impl Listener {
    /// # Panics
    /// Where `sub` is over 32 bits: a session's channels are bounded far below.
    pub fn new(session: Arc<Session>, sub: usize) -> Self {
        Self { session, sub: u32::try_from(sub).expect("a session has far fewer channels") }
    }

    /// The channel's place in the session.
    pub fn sub(&self) -> usize {
        self.sub as usize
    }
}

/// The listeners of a channel. A slot is its listener's until that leaves, however many come and go.
pub(super) enum Listeners {
    /// Since then.
    Nobody(Moment),
    /// A listener in slot 0; its parts stand here themselves, so that the half word that `sub`
    /// leaves tells which of the three this is.
    One { session: Arc<Session>, sub: u32 },
    /// More than one, or what is left of them.
    Many(Box<Slab<Listener>>),
}

impl Listeners {
    /// With their first, and its slot.
    pub fn one(Listener { session, sub }: Listener) -> (usize, Self) {
        (0, Self::One { session, sub })
    }

    /// Adds a listener; returns its slot.
    pub fn insert(&mut self, listener: Listener) -> usize {
        match self {
            Self::Nobody(_) => {
                let (slot, one) = Self::one(listener);
                *self = one;
                slot
            }
            Self::One { session, sub } => {
                let mut slab = Slab::with_capacity(2);
                slab.insert(Listener { session: session.clone(), sub: *sub });
                let slot = slab.insert(listener);
                *self = Self::Many(Box::new(slab));
                slot
            }
            Self::Many(slab) => slab.insert(listener),
        }
    }

    /// Frees a slot; nothing where nobody has it.
    pub fn remove(&mut self, slot: usize) {
        let was_last = match self {
            Self::Nobody(_) => false,
            Self::One { .. } => slot == 0,
            Self::Many(slab) => slab.try_remove(slot).is_some() && slab.is_empty(),
        };
        if was_last {
            *self = Self::Nobody(Instant::now().into());
        }
    }

    /// Copies those in up to `max` slots from `from` on; returns the slot to go on from, if any.
    pub fn copy(&self, from: usize, max: usize, out: &mut Vec<Listener>) -> Option<usize> {
        let end = self.n_slots().min(from.saturating_add(max));
        out.extend((from..end).filter_map(|slot| self.get(slot)));
        (end < self.n_slots()).then_some(end)
    }

    /// Since when nobody listens; `None` while somebody does.
    pub fn idle_since(&self) -> Option<Moment> {
        match self {
            Self::Nobody(since) => Some(*since),
            Self::One { .. } | Self::Many(_) => None,
        }
    }

    /// Gives back the room of those who went. Slots do not move.
    pub fn shrink(&mut self) {
        let Self::Many(slab) = self else { return };
        if slab.len() == 1
            && let Some(left) = slab.try_remove(0)
        {
            (_, *self) = Self::one(left);
        } else if slab.capacity() > 64 && slab.len() * 4 < slab.capacity() {
            slab.shrink_to_fit();
        }
    }

    /// Slots that there is room for.
    pub fn n_slots(&self) -> usize {
        match self {
            Self::Nobody(_) => 0,
            Self::One { .. } => 1,
            Self::Many(slab) => slab.capacity(),
        }
    }

    fn get(&self, slot: usize) -> Option<Listener> {
        match self {
            Self::Nobody(_) => None,
            Self::One { session, sub } => (slot == 0).then(|| Listener { session: session.clone(), sub: *sub }),
            Self::Many(slab) => slab.get(slot).cloned(),
        }
    }
}
