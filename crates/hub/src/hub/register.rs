//! The sessions of the node, found by their id. Decides nothing; a session is in it from its opening
//! to its end.

use std::borrow::Borrow;
use std::collections::HashSet;
use std::hash::{Hash, Hasher};
use std::sync::{Arc, Mutex, MutexGuard};

use crate::session::Session;

const N_SHARDS: usize = 16;

/// All sessions. A place in it is one word: the id is read from the session itself.
#[derive(Default)]
pub(super) struct Register([Mutex<HashSet<ById>>; N_SHARDS]);

impl Register {
    /// Enters a session; it replaces one of the same id.
    pub fn enter(&self, session: Arc<Session>) {
        self.shard(&session.info.id).replace(ById(session));
    }

    /// Strikes a session out.
    pub fn strike(&self, session: &Session) {
        let mut shard = self.shard(&session.info.id);
        shard.remove(&*session.info.id);
        if shard.capacity() > 64 && shard.len() * 4 < shard.capacity() {
            // The room of a crowd that went.
            shard.shrink_to_fit();
        }
    }

    /// The session of this id.
    pub fn get(&self, id: &str) -> Option<Arc<Session>> {
        self.shard(id).get(id).map(|found| found.0.clone())
    }

    /// Adds all of them to `all`.
    pub fn copy(&self, all: &mut Vec<Arc<Session>>) {
        for shard in &self.0 {
            let shard = shard.lock().expect("no panic while a shard is held");
            all.extend(shard.iter().map(|found| found.0.clone()));
        }
    }

    fn shard(&self, id: &str) -> MutexGuard<'_, HashSet<ById>> {
        // Ids end in a hexadecimal digit: each has a shard of its own.
        let i = id.bytes().last().map_or(0, |b| usize::from(b & 15) + 9 * usize::from(b >> 6));
        self.0[i % N_SHARDS].lock().expect("no panic while a shard is held")
    }
}

/// A session that is told from others by its id.
struct ById(Arc<Session>);

impl Borrow<str> for ById {
    fn borrow(&self) -> &str {
        &self.0.info.id
    }
}

impl PartialEq for ById {
    fn eq(&self, other: &Self) -> bool {
        self.0.info.id == other.0.info.id
    }
}

impl Eq for ById {}

impl Hash for ById {
    fn hash<H: Hasher>(&self, state: &mut H) {
        // As the text alone: it is found by that.
        Borrow::<str>::borrow(self).hash(state);
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;
    use crate::hub::Open;
    use crate::testing::Testing;

    #[tokio::test(start_paused = true)]
    async fn a_session_is_found_by_its_id_until_it_is_struck_out() {
        let testing = Testing::new(0);
        let node = testing.node("n").await;
        let register = Register::default();
        let crowd: Vec<Open> = (0..500).map(|i| node.open(&i.to_string())).collect();
        crowd.iter().for_each(|open| register.enter(open.session().clone()));
        let ids = || {
            let mut all = Vec::new();
            register.copy(&mut all);
            assert!(all.len() <= 500, "nobody twice");
            all.iter().map(|session| session.info.id.to_string()).collect::<BTreeSet<_>>()
        };
        assert_eq!(ids().len(), 500);
        let (gone, stays) = crowd.split_at(250);
        gone.iter().for_each(|open| register.strike(open.session()));
        // Again is harmless.
        register.strike(gone[0].session());
        for open in gone {
            assert!(register.get(&open.session().info.id).is_none());
        }
        for open in stays {
            assert!(Arc::ptr_eq(&register.get(&open.session().info.id).unwrap(), open.session()));
        }
        assert_eq!(ids(), stays.iter().map(|open| open.session().info.id.to_string()).collect());
        assert!(register.get("").is_none());
    }

    #[tokio::test(start_paused = true)]
    async fn the_memory_of_who_left_is_free_at_once() {
        let testing = Testing::new(0);
        let node = testing.node("n").await;
        let open = node.open("u");
        tokio::time::advance(std::time::Duration::from_secs(2)).await;
        assert_eq!(Arc::weak_count(open.session()), 0, "a weak pointer keeps it too");
        let left = Arc::downgrade(open.session());
        drop(open);
        assert_eq!(left.strong_count(), 0);
    }

    #[test]
    fn every_last_digit_of_an_id_has_a_shard_and_a_place_there_is_one_word() {
        let register = Register::default();
        let shards = "0123456789abcdef".chars().map(|digit| {
            let shard = register.shard(&format!("000{digit}"));
            std::ptr::from_ref(&*shard).addr()
        });
        assert_eq!(shards.collect::<BTreeSet<_>>().len(), N_SHARDS);
        assert_eq!(size_of::<ById>(), size_of::<usize>());
    }
}
