//! `GET /v1/fleet`: the fleet as the asked node knows it, from its memory. Asks nobody, so that it
//! answers while Redis does not. `/v1/fleet/hold`: for how long no node is to move sessions for the
//! sake of balance; what that suspends is `hub`'s.

use std::time::Duration;

use axum::Json;
use axum::extract::{Request, State};
use axum::response::{IntoResponse, Response};
use http::StatusCode;
use hub::backplane::{HOLD_TIMES, Hold, MAX_REASON_BYTES};
use hub::fleet::{NodeView, PlacingView, ShedView};
use hub::refusal::{Refusal, RefusalCode};
use serde::Deserialize;
use serde_json::{Value, json};

use super::guard::{Form, form};
use super::span::Span;
use super::{Problem, Shared};

pub(super) async fn show(State(inner): State<Shared>) -> Response {
    let fleet = inner.state.gateway.fleet();
    let nodes: Vec<Value> = fleet.nodes.iter().map(row).collect();
    let figures = fleet.figures;
    let answer = json!({
        "nodes": nodes,
        "total": figures.n_sessions,
        "cv": rounded(figures.cv),
        "busiest_ratio": rounded(figures.busiest_ratio),
        "budget": rounded(fleet.shed.budget),
        "shedding": shedding(&fleet.shed),
        "lb_policy_observed": fleet.placing.policy.word(),
        "moved_lately": moved(fleet.placing),
        "hold": fleet.hold.as_ref().map(held),
    });
    Json(answer).into_response()
}

fn row(node: &NodeView) -> Value {
    json!({
        "node": &*node.node,
        "phase": node.phase,
        "ready": node.is_ready,
        "sessions": node.n_sessions,
        "capacity": node.capacity,
        "share": rounded(node.share),
        "target": rounded(node.target),
        "version": node.version,
        "age_ms": u64::try_from(node.age.as_millis()).unwrap_or(u64::MAX),
    })
}

fn shedding(shed: &ShedView) -> Value {
    json!({
        "mode": shed.mode,
        "state": shed.state,
        "suspended": shed.suspended,
        "why": shed.why,
        "bound": shed.bound,
        "shed_total": shed.shed_total,
    })
}

fn moved(placing: PlacingView) -> Value {
    json!({ "watched": placing.n_moved, "back": placing.n_back })
}

fn held(hold: &Hold) -> Value {
    json!({ "until": until(hold), "reason": hold.reason, "by": &*hold.by })
}

/// For people: four decimals.
fn rounded(figure: f64) -> f64 {
    (figure * 10_000.0).round() / 10_000.0
}

/// `POST /v1/fleet/hold`
pub(super) async fn hold(State(inner): State<Shared>, request: Request) -> Result<Response, Problem> {
    let (head, body) = request.into_parts();
    if form(&head.headers)? != Form::Json {
        return Err(Refusal::new(RefusalCode::UnsupportedMediaType, "a hold is application/json").into());
    }
    let (text, _memory) = inner.bodies.read(body).await?;
    let (time, reason) = parse(text.as_str())?;
    match inner.state.gateway.hold(time, reason).await {
        Ok(hold) => {
            tracing::info!(reason = ?hold.reason, seconds = time.as_secs(), "the fleet is held by the admin API");
            Ok(Json(json!({ "until": until(&hold), "reason": hold.reason })).into_response())
        }
        Err(_) => Err(inner.unavailable("the backplane does not answer; repeat the hold").into()),
    }
}

/// `DELETE /v1/fleet/hold`. Where none is, none is taken away.
pub(super) async fn release(State(inner): State<Shared>) -> Result<StatusCode, Problem> {
    match inner.state.gateway.release().await {
        Ok(()) => {
            tracing::info!("the hold of the fleet is taken away by the admin API");
            Ok(StatusCode::NO_CONTENT)
        }
        Err(_) => Err(inner.unavailable("the backplane does not answer; repeat the release").into()),
    }
}

/// Unix seconds; in the last of them it may have ended.
fn until(hold: &Hold) -> u64 {
    hold.until_ms.div_ceil(1_000)
}

#[derive(Deserialize)]
struct Body {
    #[serde(rename = "for")]
    time: Span,
    reason: Option<String>,
}

fn parse(text: &str) -> Result<(Duration, String), Refusal> {
    let bad = |detail: String| Refusal::new(RefusalCode::BadRequest, detail);
    let body: Body = serde_json::from_str(text).map_err(|e| bad(e.to_string()))?;
    let time = body.time.within(HOLD_TIMES);
    let time = time.ok_or_else(|| bad("for is whole seconds or a duration as 30s, 15m or 2h, 1s to 24h".to_owned()))?;
    let reason = body.reason.unwrap_or_default();
    // It is shown on terminals and in logs: a line, nothing that moves a cursor.
    if reason.len() > MAX_REASON_BYTES || reason.contains(char::is_control) {
        return Err(bad(format!("reason is one line of at most {MAX_REASON_BYTES} bytes")));
    }
    Ok((time, reason))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_hold_is_read_from_a_second_to_a_day() {
        let longest = "x".repeat(MAX_REASON_BYTES);
        for (text, seconds, reason) in [
            (r#"{"for":"15m","reason":"deploy"}"#, 900, "deploy"),
            (r#"{"for":1}"#, 1, ""),
            (r#"{"for":"1s","reason":null}"#, 1, ""),
            (r#"{"for":86400,"reason":""}"#, 86_400, ""),
            (r#"{"for":"1d","reason":"ü"}"#, 86_400, "ü"),
            (&format!(r#"{{"for":"24h","reason":"{longest}"}}"#), 86_400, &longest),
        ] {
            assert_eq!(parse(text).unwrap(), (Duration::from_secs(seconds), reason.to_owned()), "{text}");
        }
    }

    #[test]
    fn what_is_unclear_holds_nothing() {
        let long = "x".repeat(MAX_REASON_BYTES + 1);
        for text in [
            "",
            "{}",
            r#"{"reason":"deploy"}"#,
            r#"{"for":null}"#,
            r#"{"for":0}"#,
            r#"{"for":"0s"}"#,
            r#"{"for":86401}"#,
            r#"{"for":"25h"}"#,
            r#"{"for":"2d"}"#,
            r#"{"for":-1}"#,
            r#"{"for":1.5}"#,
            r#"{"for":"900"}"#,
            r#"{"for":"1500ms"}"#,
            r#"{"for":"99999999999999999999d"}"#,
            r#"{"for":"15m","reason":7}"#,
            r#"{"for":"15m","reason":"a\nb"}"#,
            &format!(r#"{{"for":"15m","reason":"{long}"}}"#),
        ] {
            assert_eq!(parse(text).unwrap_err().code, RefusalCode::BadRequest, "{text}");
        }
    }
}
