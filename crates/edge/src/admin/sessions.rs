//! `GET` and `DELETE /v1/sessions`, `DELETE /v1/subscriptions`: whose, on every node. How the fleet is
//! asked is `hub`'s; here is decided what an answer says where not everybody answered.

use std::sync::Arc;

use axum::Json;
use axum::extract::{Path, RawQuery, State};
use axum::response::{IntoResponse, Response};
use hub::channel::Channel;
use hub::departure::Who;
use hub::refusal::{Refusal, RefusalCode};
use hub::roll::{Ended, RollError};
use serde_json::json;

use super::{Inner, Problem, Shared, form_value};

/// `GET /v1/sessions?user=…`
pub(super) async fn list(State(inner): State<Shared>, RawQuery(query): RawQuery) -> Result<Response, Problem> {
    let roll = inner.state.gateway.sessions(user(query)?).await.map_err(|error| inner.unasked(error))?;
    let answer = json!({ "sessions": roll.sessions, "missing": roll.missing, "truncated": roll.truncated });
    Ok(Json(answer).into_response())
}

/// `DELETE /v1/sessions?user=…`
pub(super) async fn end_user(State(inner): State<Shared>, RawQuery(query): RawQuery) -> Result<Response, Problem> {
    Ok(told(end(&inner, user(query)?).await?))
}

/// `DELETE /v1/sessions/<session>`. Not found is only what nobody has: while a node does not
/// answer, the session may be its.
pub(super) async fn end_one(State(inner): State<Shared>, Path(session): Path<String>) -> Result<Response, Problem> {
    let ended = end(&inner, Who::Session(session.into())).await?;
    if ended.n_ended == 0 && ended.missing.is_empty() {
        return Err(Refusal::new(RefusalCode::NotFound, "no such session is open on any node").into());
    }
    Ok(told(ended))
}

/// `DELETE /v1/subscriptions?channel=…&user=…` or `…&session=…`: the sessions stay.
pub(super) async fn unsubscribe(State(inner): State<Shared>, RawQuery(query): RawQuery) -> Result<Response, Problem> {
    let query = query.unwrap_or_default();
    let bad = |text: &str| Refusal::new(RefusalCode::BadRequest, text);
    let channel = form_value(&query, "channel").and_then(|name| Channel::new(&name).ok());
    let channel = channel.ok_or_else(|| bad("name one channel: ?channel=…"))?;
    let who = match (form_value(&query, "user"), form_value(&query, "session")) {
        (Some(user), None) => Who::User(user.into()),
        (None, Some(session)) => Who::Session(session.into()),
        _ => return Err(bad("name one user or one session: &user=… or &session=…").into()),
    };
    let ended = inner.state.gateway.unsubscribe(who, &channel).await.map_err(|error| inner.unasked(error))?;
    Ok(told(ended))
}

fn user(query: Option<String>) -> Result<Who, Refusal> {
    // All sessions of a fleet are no answer of this API: a node alone may have tens of thousands.
    let user = form_value(query.as_deref().unwrap_or_default(), "user")
        .ok_or_else(|| Refusal::new(RefusalCode::BadRequest, "name one user: ?user=…"))?;
    Ok(Who::User(user.into()))
}

async fn end(inner: &Arc<Inner>, who: Who) -> Result<Ended, Refusal> {
    inner.state.gateway.end_sessions(who).await.map_err(|error| inner.unasked(error))
}

fn told(ended: Ended) -> Response {
    Json(json!({ "ended": ended.n_ended, "missing": ended.missing })).into_response()
}

impl Inner {
    fn unasked(&self, error: RollError) -> Refusal {
        match error {
            RollError::Busy => {
                let after = self.state.dice.between(super::RETRY.0, super::RETRY.1);
                Refusal::retry(RefusalCode::Overloaded, error.to_string(), after)
            }
            RollError::UnknownFleet => self.unavailable(error.to_string()),
        }
    }
}
