//! The look-out for revocations that nobody told us of: keys that another system wrote, and what
//! was said while the link was down or the list could not be read. Decides when open sessions are
//! looked up again; what a revocation is stands in `revocation`.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::{Instant, sleep, sleep_until, timeout_at};

use crate::auth::Identity;
use crate::close::CloseReason;
use crate::hub::Hub;
use crate::session::{Session, SessionId};

/// Sessions of one question. 256, three keys each: Redis answers in well under a millisecond.
const CHUNK: usize = 256;

/// Looks through all open sessions twice in every `GATEWAY_REVOCATION_SWEEP`, spread over the time,
/// and at once when the link has come back. Ends with the hub.
pub(crate) async fn run(hub: Arc<Hub>) {
    let every = hub.config.revocation_sweep / 2;
    let mut links = hub.place.changes();
    let mut pace = Pace::Spread(every);
    loop {
        let began = Instant::now();
        tokio::select! {
            () = pass(&hub, pace) => {}
            () = hub.stop.cancelled() => return,
        }
        // A pass may end early or late; the next begins when it would have anyway.
        let seen = links.borrow_and_update().generation;
        let came_back = links.wait_for(|link| link.generation != seen && link.is_live);
        pace = match timeout_at(began + every, came_back).await {
            Ok(_) => Pace::AtOnce,
            Err(_) => Pace::Spread(every),
        };
        if hub.stop.is_cancelled() {
            return;
        }
    }
}

#[derive(Clone, Copy)]
enum Pace {
    /// Over this time, so that the list is asked evenly.
    Spread(Duration),
    AtOnce,
}

async fn pass(hub: &Arc<Hub>, pace: Pace) {
    // By their ids: who leaves meanwhile is not kept for as long as the pass takes.
    let sessions: Vec<SessionId> = hub.all_sessions().iter().map(|session| session.info.id.clone()).collect();
    let began = Instant::now();
    let n_chunks = sessions.len().div_ceil(CHUNK).max(1);
    for (i, chunk) in sessions.chunks(CHUNK).enumerate() {
        if let Pace::Spread(over) = pace {
            sleep_until(began + over.mul_f64(0.8 * i as f64 / n_chunks as f64)).await;
        }
        ask(hub, chunk, pace).await;
    }
}

/// One question; at once: again until it is answered, for these sessions may be unchecked.
async fn ask(hub: &Arc<Hub>, chunk: &[SessionId], pace: Pace) {
    loop {
        let (sessions, identities): (Vec<_>, Vec<_>) = chunk.iter().filter_map(|id| who_has(hub, id)).unzip();
        match hub.revocations.sweep(&identities).await {
            Ok(revoked) => {
                for ((session, identity), is_revoked) in sessions.iter().zip(&identities).zip(revoked) {
                    // A token that another has replaced meanwhile is no matter any more.
                    if is_revoked && Arc::ptr_eq(&session.lock().identity, identity) {
                        hub.end(session, CloseReason::Revoked);
                    }
                }
                return;
            }
            Err(error) => {
                tracing::debug!(%error, "open sessions could not be looked up in the revocation list");
                if let Pace::Spread(_) = pace {
                    // The next pass comes soon enough.
                    return;
                }
                drop((sessions, identities));
                sleep(hub.dice.between(Duration::from_millis(250), Duration::from_secs(1))).await;
            }
        }
    }
}

/// The session, if it is open and the list may name it, with the identity that it has now.
fn who_has(hub: &Hub, id: &str) -> Option<(Arc<Session>, Arc<Identity>)> {
    let session = hub.session(id)?;
    let identity = session.lock().identity.clone();
    let is_nameable = identity.jti.is_some() || identity.sid.is_some() || identity.user.is_some();
    is_nameable.then_some((session, identity))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backplane::{Backplane, Revocation, RevocationKey};
    use crate::hub::Open;
    use crate::testing::mute::Answers;
    use crate::testing::{Testing, endings, identity, settle};

    fn with_jti(jti: String) -> Identity {
        Identity { jti: Some(jti.into()), ..identity(Some("u")) }
    }

    fn of_jti(jti: String) -> Revocation {
        Revocation { key: RevocationKey::Jti(jti.into()), before: 0 }
    }

    #[tokio::test(start_paused = true)]
    async fn a_token_that_was_replaced_during_the_pass_ends_nobody_and_one_that_was_not_does() {
        const N: usize = 3 * CHUNK;
        let node = Testing::new(0).node("n").await;
        let open: Vec<Open> = (0..=N).map(|i| node.open_as(with_jti(format!("old{i}")), &[])).collect();
        settle().await;
        let rotated = async {
            sleep(Duration::from_secs(1)).await;
            for (i, open) in open[..N].iter().enumerate() {
                node.hub.replace_identity(open.session(), &Arc::new(with_jti(format!("new{i}"))), 1);
            }
            // As another system writes it: no node is told.
            node.memory.cut_link();
            for i in 0..=N {
                node.memory.revoke(of_jti(format!("old{i}")), Duration::from_secs(600)).await.unwrap();
            }
        };
        tokio::join!(pass(&node.hub, Pace::Spread(Duration::from_secs(10))), rotated);
        assert_eq!(endings(&open[..N]), [None; N]);
        pass(&node.hub, Pace::AtOnce).await;
        assert_eq!(endings(&open[N..]), [Some(CloseReason::Revoked)]);
        assert_eq!(endings(&open[..N]), [None; N]);
    }

    #[tokio::test(start_paused = true)]
    async fn a_token_that_was_replaced_while_the_list_answers_ends_nobody() {
        let node = Testing::new(0).node("n").await;
        let [replaced, kept] = ["replaced", "kept"].map(|jti| node.open_as(with_jti(jti.into()), &[]));
        settle().await;
        node.mute.set(Answers::After(Duration::from_millis(500)));
        node.memory.cut_link();
        for jti in ["replaced", "kept"] {
            node.memory.revoke(of_jti(jti.into()), Duration::from_secs(600)).await.unwrap();
        }
        let rotated = async {
            sleep(Duration::from_millis(250)).await;
            node.hub.replace_identity(replaced.session(), &Arc::new(with_jti("new".into())), 1);
        };
        tokio::join!(pass(&node.hub, Pace::AtOnce), rotated);
        assert_eq!(endings([&replaced, &kept]), [None, Some(CloseReason::Revoked)]);
    }

    #[tokio::test(start_paused = true)]
    async fn a_token_that_was_revoked_before_it_took_over_ends_its_session() {
        let node = Testing::new(0).node("n").await;
        let open = node.open_as(with_jti("old".into()), &[]);
        settle().await;
        // It was found good; this comes before it is in force, and names nobody.
        node.hub.revoked(&of_jti("new".into()));
        assert_eq!(endings([&open]), [None]);
        node.hub.replace_identity(open.session(), &Arc::new(with_jti("new".into())), 1);
        assert_eq!(endings([&open]), [Some(CloseReason::Revoked)]);
    }
}
