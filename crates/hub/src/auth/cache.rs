//! What need not be verified twice: a bounded memory of good tokens. It takes the signature out of
//! a reconnect storm (measured: 0.3 µs a look-up against 30 to 130 µs a signature). Decides only
//! what to forget; whether a remembered token is still in time is asked by the caller every time.
//!
//! A token is remembered as long as a session has it, and a minute or two beyond: so long whoever
//! lost its connection may take to come back. What a storm of others left is gone then.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::time::Instant;

use super::{Identity, Verified};

/// Most tokens remembered: more than `GATEWAY_MAX_SESSIONS`' default, so that a node's whole crowd
/// fits.
pub(super) const CAPACITY: usize = 65_536;
/// Most bytes of token text that the remembered identities may stand for; an identity is about as
/// large as its token. 64 MiB is `CAPACITY` at 1 KiB, a large token.
pub(super) const CAPACITY_BYTES: usize = 64 * 1024 * 1024;

/// After so long without a use a token without a session grows old, after as long again it is
/// forgotten: clients wait at most 60 s between two attempts.
pub(super) const AGE: Duration = Duration::from_secs(60);

/// What a token is known by: the first half of its text's SHA-256. The text itself is never kept.
///
/// Half is enough: to be taken for somebody else one needs a text with the mark of a token that is
/// remembered, a second preimage of 128 bits (2^112 texts to be hashed until one has the mark of any
/// of `CAPACITY`). Two texts of one mark, both of one's own making, are cheaper (2^64) and gain
/// nothing: one of the two must be a good token, and the other is taken for the same bearer's.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Mark([u8; 16]);

impl Mark {
    /// The mark of this token.
    pub(super) fn of(token: &str) -> Self {
        Self(*super::mark(token).first_chunk().expect("32 bytes begin with 16"))
    }
}

/// What is remembered of a token. With its mark it has 32 bytes, and so has every free place of the
/// table, which may be more than half of all.
#[derive(Debug)]
struct Known {
    identity: Arc<Identity>,
    /// `nbf` less the leeway, in whole seconds rounded down: in time it was when it was put here, and
    /// only a clock that was set back can ask again.
    not_before: u32,
    /// Length of the token's text.
    n_bytes: u32,
}

impl Known {
    fn verified(&self) -> Verified {
        Verified { identity: self.identity.clone(), not_before: Duration::from_secs(self.not_before.into()) }
    }
}

/// Two generations: what is used moves to the young one; when that has half the capacity the old
/// one is forgotten and the young one grows old. Every call is O(1) (amortised).
#[derive(Debug)]
pub(super) struct Cache {
    half: usize,
    half_bytes: usize,
    generations: Mutex<Generations>,
}

struct Generations {
    /// When they last grew old by time.
    since: Instant,
    young: HashMap<Mark, Known>,
    young_bytes: usize,
    old: HashMap<Mark, Known>,
}

impl std::fmt::Debug for Generations {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} tokens", self.young.len() + self.old.len())
    }
}

impl Cache {
    /// At most `capacity` tokens of `capacity_bytes` of text in all.
    pub(super) fn new(capacity: usize, capacity_bytes: usize) -> Self {
        let generations =
            Generations { since: Instant::now(), young: HashMap::new(), young_bytes: 0, old: HashMap::new() };
        Self { half: (capacity / 2).max(1), half_bytes: capacity_bytes / 2, generations: Mutex::new(generations) }
    }

    /// What is remembered of the token with this mark.
    pub(super) fn get(&self, mark: &Mark) -> Option<Verified> {
        let mut generations = self.lock();
        if let Some(known) = generations.young.get(mark) {
            return Some(known.verified());
        }
        let known = generations.old.remove(mark)?;
        let verified = known.verified();
        let forgotten = self.remember(&mut generations, *mark, known);
        drop(generations);
        drop(forgotten);
        Some(verified)
    }

    /// Remembers a token whose text has `n_bytes`.
    pub(super) fn put(&self, mark: Mark, verified: Verified, n_bytes: usize) {
        if n_bytes > self.half_bytes {
            return;
        }
        let known = Known {
            identity: verified.identity,
            not_before: u32::try_from(verified.not_before.as_secs()).unwrap_or(u32::MAX),
            n_bytes: u32::try_from(n_bytes).unwrap_or(u32::MAX),
        };
        let forgotten = self.remember(&mut self.lock(), mark, known);
        drop(forgotten);
    }

    /// Forgets what was not used for `AGE` or more and belongs to no session. To be called now and
    /// then; O(tokens) once in `AGE`, else O(1).
    pub(super) fn age(&self, now: Instant) {
        let mut generations = self.lock();
        if now.saturating_duration_since(generations.since) < AGE {
            return;
        }
        generations.since = now;
        let mut gone = std::mem::take(&mut generations.old);
        generations.old = std::mem::take(&mut generations.young);
        generations.young_bytes = 0;
        for (mark, known) in gone.extract_if(|_, known| Arc::strong_count(&known.identity) > 1) {
            generations.young_bytes += known.n_bytes as usize;
            generations.young.insert(mark, known);
        }
        // What is forgotten is freed after others may go on.
        drop(generations);
    }

    /// Forgets it.
    pub(super) fn remove(&self, mark: &Mark) {
        let mut generations = self.lock();
        if let Some(known) = generations.young.remove(mark) {
            generations.young_bytes -= known.n_bytes as usize;
        }
        generations.old.remove(mark);
    }

    /// Returns what was forgotten for it: up to half of all, and best freed after the lock.
    #[must_use]
    fn remember(&self, generations: &mut Generations, mark: Mark, known: Known) -> HashMap<Mark, Known> {
        let (n_bytes, mut forgotten) = (known.n_bytes as usize, HashMap::new());
        if generations.young.len() >= self.half || generations.young_bytes + n_bytes > self.half_bytes {
            forgotten = std::mem::replace(&mut generations.old, std::mem::take(&mut generations.young));
            generations.young_bytes = 0;
        }
        if let Some(before) = generations.young.insert(mark, known) {
            generations.young_bytes -= before.n_bytes as usize;
        }
        generations.young_bytes += n_bytes;
        forgotten
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Generations> {
        self.generations.lock().expect("no panic while the token cache is held")
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::time::Duration;

    use super::*;
    use crate::channel::Grants;

    fn somebody() -> Verified {
        let identity =
            Identity { user: None, jti: None, sid: None, issued_at: 0, expires_at: None, grants: Grants::default() };
        Verified { identity: Arc::new(identity), not_before: Duration::ZERO }
    }

    fn mark(i: u32) -> Mark {
        let mut mark = [0; 16];
        mark[..4].copy_from_slice(&i.to_be_bytes());
        Mark(mark)
    }

    fn n_held(cache: &Cache) -> usize {
        let generations = cache.lock();
        generations.young.len() + generations.old.len()
    }

    #[test]
    fn it_never_holds_more_than_its_capacity_and_keeps_what_is_used() {
        let cache = Cache::new(100, 1 << 20);
        cache.put(mark(u32::MAX), somebody(), 10);
        for i in 0..10_000 {
            cache.put(mark(i), somebody(), 10);
            assert!(n_held(&cache) <= 100, "{i}");
            assert!(cache.get(&mark(u32::MAX)).is_some(), "in use, forgotten at {i}");
        }
        assert!(cache.get(&mark(0)).is_none());
        assert!(cache.get(&mark(9_999)).is_some());
    }

    #[test]
    fn a_token_without_a_session_is_forgotten_in_time_and_one_with_a_session_never() {
        let cache = Cache::new(200, 1 << 20);
        let (of_a_session, start) = (somebody(), Instant::now());
        for i in 0..50 {
            cache.put(mark(i), somebody(), 10);
        }
        cache.put(mark(99), of_a_session.clone(), 10);
        cache.age(start + AGE - Duration::from_secs(1));
        cache.age(start + AGE);
        cache.age(start + 2 * AGE - Duration::from_secs(1));
        assert_eq!(n_held(&cache), 51, "a minute after its last use everybody is known");
        assert!(cache.get(&mark(7)).is_some());
        cache.age(start + 2 * AGE);
        assert_eq!(n_held(&cache), 2, "who came again and who has a session");
        cache.age(start + 3 * AGE);
        for n in 4..20 {
            cache.age(start + n * AGE);
            assert!(cache.lock().young.contains_key(&mark(99)) || cache.lock().old.contains_key(&mark(99)), "{n}");
        }
        assert_eq!(n_held(&cache), 1);
        drop(of_a_session);
        cache.age(start + 20 * AGE);
        cache.age(start + 21 * AGE);
        let generations = cache.lock();
        assert_eq!((generations.young.len(), generations.old.len(), generations.young_bytes), (0, 0, 0));
    }

    #[test]
    fn a_place_in_it_is_thirty_two_bytes_and_the_room_of_the_forgotten_is_given_back() {
        assert_eq!(size_of::<(Mark, Known)>(), 32);
        let (cache, start) = (Cache::new(CAPACITY, CAPACITY_BYTES), Instant::now());
        (0..10_000).for_each(|i| cache.put(mark(i), somebody(), 10));
        cache.age(start + AGE);
        cache.age(start + 2 * AGE);
        let generations = cache.lock();
        assert_eq!((generations.young.capacity(), generations.old.capacity()), (0, 0));
    }

    #[test]
    fn a_token_that_begins_is_remembered_with_the_second_in_which_it_does() {
        let cache = Cache::new(4, 1_000);
        let from = |not_before| Verified { not_before, ..somebody() };
        for (i, not_before, kept) in [
            (0, Duration::ZERO, 0),
            (1, Duration::from_millis(1_800_000_000_999), 1_800_000_000),
            (2, Duration::from_secs(u64::from(u32::MAX)), u32::MAX),
            (3, Duration::from_secs(u64::from(u32::MAX) + 1), u32::MAX),
        ] {
            cache.put(mark(i), from(not_before), 10);
            assert_eq!(cache.get(&mark(i)).unwrap().not_before, Duration::from_secs(kept.into()));
        }
    }

    #[test]
    fn large_tokens_fill_it_by_bytes() {
        let cache = Cache::new(1_000, 1_000);
        for i in 0..100 {
            cache.put(mark(i), somebody(), 100);
        }
        assert!(n_held(&cache) <= 10, "{}", n_held(&cache));
        cache.put(mark(200), somebody(), 501);
        assert!(cache.get(&mark(200)).is_none(), "more than half of all");
        cache.put(mark(201), somebody(), 500);
        assert!(cache.get(&mark(201)).is_some());
    }

    #[test]
    fn what_is_removed_is_gone_from_both_generations() {
        let cache = Cache::new(4, 1_000);
        for i in 0..3 {
            cache.put(mark(i), somebody(), 10);
        }
        cache.remove(&mark(0));
        cache.remove(&mark(2));
        assert!(cache.get(&mark(0)).is_none());
        assert!(cache.get(&mark(2)).is_none());
        assert!(cache.get(&mark(1)).is_some());
    }
}
