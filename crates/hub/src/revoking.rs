//! Revocations that this node was told of: open sessions that they name end. Decides how many of them are
//! looked for in one walk over the sessions: all that came meanwhile, so that a back end which revokes ten
//! thousand tokens in a row costs some walks and not ten thousand. The dispatcher, which brings them, walks itself
//! only where too many wait. What nobody tells is `sweep`'s to find.

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Mutex, MutexGuard};

use tokio::sync::Notify;
use tokio::task::yield_now;

use crate::auth::Identity;
use crate::backplane::{Revocation, RevocationKey};
use crate::close::CloseReason;
use crate::hub::Hub;
use crate::session::Session;

/// Revocations that may wait. A walk takes milliseconds: far more than come in one.
const MAX_WAITING: usize = 10_000;
/// Sessions looked at between two yields: some tenths of a millisecond.
const CHUNK: usize = 1_024;

/// What waits to be looked for.
#[derive(Default)]
pub(crate) struct Revoking {
    named: Mutex<Named>,
    bell: Notify,
}

impl Revoking {
    fn named(&self) -> MutexGuard<'_, Named> {
        self.named.lock().expect("no panic while it is held")
    }
}

/// Whom several revocations name.
#[derive(Default)]
struct Named {
    jti: HashSet<Arc<str>>,
    sid: HashSet<Arc<str>>,
    /// Tokens issued at or before this Unix time.
    sub: HashMap<Arc<str>, u64>,
}

impl Named {
    fn add(&mut self, revocation: &Revocation) {
        match &revocation.key {
            RevocationKey::Jti(jti) => drop(self.jti.insert(jti.clone())),
            RevocationKey::Sid(sid) => drop(self.sid.insert(sid.clone())),
            RevocationKey::Sub(sub) => {
                let before = self.sub.entry(sub.clone()).or_default();
                *before = revocation.before.max(*before);
            }
        }
    }

    fn len(&self) -> usize {
        self.jti.len() + self.sid.len() + self.sub.len()
    }

    fn is(&self, who: &Identity) -> bool {
        who.jti.as_ref().is_some_and(|jti| self.jti.contains(jti))
            || who.sid.as_ref().is_some_and(|sid| self.sid.contains(sid))
            || who.user.as_ref().and_then(|user| self.sub.get(user)).is_some_and(|&before| who.issued_at <= before)
    }

    fn end(&self, hub: &Hub, sessions: &[Arc<Session>]) {
        for session in sessions.iter().filter(|session| self.is(&session.lock().identity)) {
            hub.end(session, CloseReason::Revoked);
        }
    }
}

impl Hub {
    /// A revocation reached this node. Newcomers are judged by it from now on; open sessions that it names end
    /// in the next walk.
    pub(crate) fn revoked(&self, revocation: &Revocation) {
        self.revocations.note(revocation);
        let too_many = {
            let mut named = self.revoking.named();
            named.add(revocation);
            (named.len() >= MAX_WAITING).then(|| std::mem::take(&mut *named))
        };
        match too_many {
            None => self.revoking.bell.notify_one(),
            Some(named) => named.end(self, &self.all_sessions()),
        }
    }
}

/// Walks whenever something waits. Ends with the hub.
pub(crate) async fn run(hub: Arc<Hub>) {
    loop {
        // Cancel-safe: what waits stays where it is.
        tokio::select! {
            () = hub.revoking.bell.notified() => {}
            () = hub.stop.cancelled() => return,
        }
        let named = std::mem::take(&mut *hub.revoking.named());
        if named.len() == 0 {
            continue;
        }
        // Who opens from here on is judged at the door.
        for sessions in hub.all_sessions().chunks(CHUNK) {
            named.end(&hub, sessions);
            yield_now().await;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::hub::Open;
    use crate::testing::{Testing, endings, identity, settle};

    fn revocation(key: RevocationKey, before: u64) -> Revocation {
        Revocation { key, before }
    }

    #[test]
    fn several_name_whom_each_of_them_names_and_nobody_else() {
        let mut named = Named::default();
        named.add(&revocation(RevocationKey::Jti("a".into()), 0));
        named.add(&revocation(RevocationKey::Sid("b".into()), 0));
        named.add(&revocation(RevocationKey::Sub("c".into()), 100));
        named.add(&revocation(RevocationKey::Sub("c".into()), 50));
        assert_eq!(named.len(), 3);
        let who = |jti: &str, sid: &str, user: &str, issued_at| Identity {
            jti: Some(jti.into()),
            sid: Some(sid.into()),
            issued_at,
            ..identity(Some(user))
        };
        for (who, is) in [
            (who("a", "", "", 200), true),
            (who("", "b", "", 200), true),
            (who("", "", "c", 100), true),
            (who("", "", "c", 101), false),
            (who("b", "c", "a", 0), false),
            (identity(None), false),
        ] {
            assert_eq!(named.is(&who), is, "{who:?}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn ten_thousand_in_a_row_end_all_whom_they_name_and_wait_for_nobody() {
        const N: usize = MAX_WAITING + 10;
        let node = Testing::new(0).node("n").await;
        let token = |i: usize| Identity { jti: Some(format!("t{i}").into()), ..identity(Some("u")) };
        let open: Vec<Open> = [0, 1, MAX_WAITING - 1, N - 1, N].map(|i| node.open_as(token(i), &[])).into();
        settle().await;
        for i in 0..N {
            node.hub.revoked(&revocation(RevocationKey::Jti(format!("t{i}").into()), 0));
        }
        settle().await;
        let revoked = Some(CloseReason::Revoked);
        assert_eq!(endings(&open), [revoked, revoked, revoked, revoked, None]);
        assert_eq!(node.hub.revoking.named().len(), 0);
    }
}
