//! A new token in an open session: decides whether it takes the old one's place, and what that changes.
//! What is asked for after it waits until it is found good or bad (`asks`).

use std::sync::Arc;

use serde_json::value::RawValue;
use tokio::time::Instant;

use super::asks::{self, Checking};
use super::say_error;
use crate::auth::{Denied, Identity};
use crate::hub::Hub;
use crate::message::{self, ErrorCode};
use crate::refusal::RefusalCode;
use crate::revocation::{CheckOutcome, WhenUnavailable};
use crate::session::Session;

/// Answered at once unless the keys must be fetched or the revocation list be asked.
pub(super) fn auth(hub: &Arc<Hub>, session: &Arc<Session>, reference: Option<&RawValue>, token: &str) {
    // In the order in which they came: a later one that is found good earlier stays in force.
    let turn = {
        let mut state = session.lock();
        state.n_auths += 1;
        state.n_auths
    };
    let verified = match hub.verifier.verify(token, hub.clock.unix()) {
        Ok(identity) if !is_same_user(session, &identity) => return say_another_sub(session, reference),
        Err(denied) if denied != Denied::UnknownKey => return say_denied(session, reference, denied),
        verified => verified.map_err(|_| token.to_owned()),
    };
    let checking = Checking::begin(session, turn);
    let (hub, session) = (hub.clone(), session.clone());
    let reference = reference.map(ToOwned::to_owned);
    hub.tasks.clone().spawn(async move {
        // Over when everything that the token changes is said and asked for.
        let _checking = checking;
        let reference = reference.as_deref();
        let identity = match verified {
            Ok(identity) => Ok(identity),
            Err(token) => {
                let deadline = Instant::now() + hub.config.auth_timeout;
                hub.verifier.authenticate(&token, &hub.clock, deadline).await
            }
        };
        match identity {
            Ok(identity) if is_same_user(&session, &identity) => {
                take_over(&hub, &session, reference, &identity, turn).await;
            }
            Ok(_) => say_another_sub(&session, reference),
            Err(denied) => say_denied(&session, reference, denied),
        }
    });
}

fn is_same_user(session: &Session, identity: &Identity) -> bool {
    identity.user == session.info.identity.user
}

fn say_another_sub(session: &Session, reference: Option<&RawValue>) {
    say_error(session, reference, ErrorCode::TokenInvalid, "the token is of another sub", None);
}

fn say_denied(session: &Session, reference: Option<&RawValue>, denied: Denied) {
    let code = match denied.code() {
        RefusalCode::TokenExpired => ErrorCode::TokenExpired,
        RefusalCode::TooManyChannels => ErrorCode::TooManyChannels,
        RefusalCode::AuthUnavailable => ErrorCode::Unavailable,
        _ => ErrorCode::TokenInvalid,
    };
    say_error(session, reference, code, denied.detail(), None);
}

/// Puts a verified identity in the place of the session's, unless it was revoked.
async fn take_over(
    hub: &Arc<Hub>,
    session: &Arc<Session>,
    reference: Option<&RawValue>,
    identity: &Arc<Identity>,
    turn: u32,
) {
    let outcome = match hub.revocations.check(identity).await {
        // As whoever comes anew: it is looked up as soon as the list can be read again.
        CheckOutcome::Unavailable if hub.revocations.when_unavailable() == WhenUnavailable::Allow => CheckOutcome::Good,
        outcome => outcome,
    };
    match outcome {
        CheckOutcome::Revoked => say_error(session, reference, ErrorCode::TokenRevoked, "the token was revoked", None),
        CheckOutcome::Unavailable => {
            say_error(session, reference, ErrorCode::Unavailable, "the revocation list cannot be read now", None);
        }
        CheckOutcome::Good => {
            let before = session.lock().identity.clone();
            hub.replace_identity(session, identity, turn);
            session.tell(hub.place.position(), |_, position| Some(message::ok(reference, None, None, position)));
            join_granted(hub, session, &before, identity, turn);
        }
    }
}

/// Joins what the new token names and the one `before` it did not, as a new connection would. What
/// the client has left of the old one stays left.
fn join_granted(hub: &Arc<Hub>, session: &Arc<Session>, before: &Identity, after: &Arc<Identity>, turn: u32) {
    // A later token that was faster is in force, with channels of its own.
    if !Arc::ptr_eq(&session.lock().identity, after) {
        return;
    }
    for channel in after.grants.joined.iter().filter(|channel| !before.grants.joined.contains(channel)) {
        asks::grant(hub, session, channel, turn);
    }
}
