//! The look-out for revocations that nobody told us of: keys that another system wrote, and what
//! was said while the link was down or the list could not be read. Decides when open sessions are
//! looked up again; what a revocation is stands in `revocation`.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::{Instant, sleep, sleep_until, timeout_at};

use crate::auth::Identity;
use crate::close::CloseReason;
use crate::hub::Hub;
use crate::session::Session;

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
    let sessions: Vec<(Arc<Session>, Arc<Identity>)> = hub
        .all_sessions()
        .into_iter()
        .map(|session| {
            let identity = session.lock().identity.clone();
            (session, identity)
        })
        .filter(|(_, who)| who.jti.is_some() || who.sid.is_some() || who.user.is_some())
        .collect();
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
async fn ask(hub: &Arc<Hub>, chunk: &[(Arc<Session>, Arc<Identity>)], pace: Pace) {
    let identities: Vec<Arc<Identity>> = chunk.iter().map(|(_, identity)| identity.clone()).collect();
    loop {
        match hub.revocations.sweep(&identities).await {
            Ok(revoked) => {
                for ((session, _), _) in chunk.iter().zip(revoked).filter(|(_, is_revoked)| *is_revoked) {
                    hub.end(session, CloseReason::Revoked);
                }
                return;
            }
            Err(error) => {
                tracing::debug!(%error, "open sessions could not be looked up in the revocation list");
                if let Pace::Spread(_) = pace {
                    // The next pass comes soon enough.
                    return;
                }
                sleep(hub.dice.between(Duration::from_millis(250), Duration::from_secs(1))).await;
            }
        }
    }
}
