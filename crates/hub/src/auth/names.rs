//! Names that many tokens carry, kept once: ten thousand identities that may hear `news` share one
//! text. Decides which names are worth it; one that is not shared costs its bearer a copy of its own,
//! and nothing else.

use std::collections::HashSet;
use std::mem;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use tokio::time::Instant;

use crate::channel::{Grants, USER_PREFIX};

/// Most names remembered. A name is shared if it comes again before half as many others have come, and
/// what many tokens carry does. With the longest of names it is a MiB that serves nobody.
pub(super) const CAPACITY: usize = 4_096;

/// So often names are forgotten that nobody carries any more: as often as tokens grow old.
const AGE: Duration = super::cache::AGE;

/// The names seen lately, in two generations: what is seen again moves to the young one; when that has
/// half the capacity the old one is forgotten and the young one grows old. So a name that many carry
/// stays, however many come by that one token carries. Every call is O(its names) (amortised).
#[derive(Debug)]
pub(super) struct Names {
    half: usize,
    generations: Mutex<Generations>,
}

#[derive(Debug)]
struct Generations {
    /// When what nobody carries was last forgotten.
    since: Instant,
    young: HashSet<Arc<str>>,
    old: HashSet<Arc<str>>,
}

impl Names {
    /// At most `capacity` names.
    pub(super) fn new(capacity: usize) -> Self {
        let generations = Generations { since: Instant::now(), young: HashSet::new(), old: HashSet::new() };
        Self { half: (capacity / 2).max(1), generations: Mutex::new(generations) }
    }

    /// Has the grants share the texts of names that others carry, too. Not those of users' own
    /// channels: nobody else carries them. To be called with what a good token grants, or anybody
    /// could fill the room.
    pub(super) fn share(&self, grants: &mut Grants) {
        let mut texts = grants.texts_mut().filter(|text| !text.starts_with(USER_PREFIX)).peekable();
        if texts.peek().is_none() {
            return;
        }
        let mut generations = self.lock();
        let mut gone = HashSet::new();
        for text in texts {
            if let Some(known) = generations.young.get(&**text) {
                *text = known.clone();
                continue;
            }
            if let Some(known) = generations.old.take(&**text) {
                *text = known;
            }
            if generations.young.len() >= self.half {
                let young = mem::take(&mut generations.young);
                gone = mem::replace(&mut generations.old, young);
            }
            generations.young.insert(text.clone());
        }
        // What is forgotten is freed after others may go on.
        drop(generations);
        drop(gone);
    }

    /// Forgets names that nobody carries. To be called now and then; O(names) once in `AGE`, else
    /// O(1).
    pub(super) fn age(&self, now: Instant) {
        let mut generations = self.lock();
        if now.saturating_duration_since(generations.since) < AGE {
            return;
        }
        generations.since = now;
        let Generations { young, old, .. } = &mut *generations;
        for names in [young, old] {
            names.retain(|name| Arc::strong_count(name) > 1);
            if names.len() * 4 < names.capacity() {
                names.shrink_to_fit();
            }
        }
    }

    fn lock(&self) -> MutexGuard<'_, Generations> {
        self.generations.lock().expect("no panic while the names are held")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::channel::{Channel, Pattern};

    fn grants(joined: &[&str], askable: &[&str]) -> Grants {
        Grants {
            joined: joined.iter().map(|name| Channel::new(name).unwrap()).collect(),
            askable: askable.iter().map(|text| Pattern::new(text).unwrap()).collect(),
        }
    }

    fn shared(names: &Names, joined: &[&str], askable: &[&str]) -> Vec<Arc<str>> {
        let mut grants = grants(joined, askable);
        let before = grants.clone();
        names.share(&mut grants);
        assert_eq!(grants, before, "they read the same");
        grants.texts_mut().map(|text| text.clone()).collect()
    }

    fn n_held(names: &Names) -> usize {
        let generations = names.lock();
        generations.young.len() + generations.old.len()
    }

    #[test]
    fn who_carries_the_same_names_shares_their_texts_in_all_kinds_of_grants() {
        let names = Names::new(100);
        let first = shared(&names, &["news", "lobby"], &["room:*", "lobby"]);
        let second = shared(&names, &["lobby", "news"], &["lobby", "room:*"]);
        for (one, other) in [(0, 1), (1, 0), (2, 3), (3, 2), (1, 2)] {
            assert!(Arc::ptr_eq(&first[one], &second[other]), "{}", first[one]);
        }
        assert_eq!(n_held(&names), 3);
    }

    #[test]
    fn a_users_own_channel_is_not_remembered() {
        let names = Names::new(100);
        shared(&names, &["user:1", "user:2"], &["user:3", "user:4:*"]);
        assert_eq!(n_held(&names), 0);
    }

    #[test]
    fn a_name_of_many_stays_shared_however_many_names_of_one_come_by() {
        let names = Names::new(100);
        let news = shared(&names, &["news"], &[]);
        for i in 0..10_000 {
            let of_one = format!("room:{i}");
            let these = shared(&names, &[&of_one, "news"], &[]);
            assert!(Arc::ptr_eq(&these[1], &news[0]), "{i}");
            assert!(n_held(&names) <= 100, "{i}");
        }
        // More at once than there is room for.
        let many: Vec<String> = (0..1_000).map(|i| i.to_string()).collect();
        let many: Vec<&str> = many.iter().map(String::as_str).collect();
        shared(&names, &many, &[]);
        assert!(n_held(&names) <= 100);
    }

    #[test]
    fn what_nobody_carries_is_forgotten_in_time_with_its_room() {
        let (names, start) = (Names::new(CAPACITY), Instant::now());
        let carried = shared(&names, &["news"], &[]);
        for i in 0..2_500 {
            shared(&names, &[&i.to_string()], &[]);
        }
        names.age(start + AGE - Duration::from_secs(1));
        assert_eq!(n_held(&names), 2_501);
        names.age(start + AGE);
        assert_eq!(n_held(&names), 1);
        assert!(Arc::ptr_eq(&carried[0], &shared(&names, &["news"], &[])[0]));
        drop(carried);
        names.age(start + 2 * AGE);
        let generations = names.lock();
        assert_eq!((generations.young.capacity(), generations.old.capacity()), (0, 0));
    }
}
