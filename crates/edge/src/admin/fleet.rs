//! `GET /v1/fleet`: the fleet as the asked node knows it, from its memory. Asks nobody, so that it
//! answers while Redis does not.

use axum::Json;
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use hub::fleet::NodeView;
use serde_json::{Value, json};

use super::Shared;

pub(super) async fn show(State(inner): State<Shared>) -> Response {
    let fleet = inner.state.gateway.fleet();
    let nodes: Vec<Value> = fleet.nodes.iter().map(row).collect();
    let figures = fleet.figures;
    let answer = json!({
        "nodes": nodes,
        "total": figures.n_sessions,
        "cv": rounded(figures.cv),
        "busiest_ratio": rounded(figures.busiest_ratio),
    });
    Json(answer).into_response()
}

fn row(node: &NodeView) -> Value {
    json!({
        "node": &*node.node,
        "phase": node.phase,
        "sessions": node.n_sessions,
        "capacity": node.capacity,
        "share": rounded(node.share),
        "target": rounded(node.target),
        "version": node.version,
        "age_ms": u64::try_from(node.age.as_millis()).unwrap_or(u64::MAX),
    })
}

/// For people: four decimals.
fn rounded(figure: f64) -> f64 {
    (figure * 10_000.0).round() / 10_000.0
}
