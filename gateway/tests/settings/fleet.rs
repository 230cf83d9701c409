//! When a fleet counts as uneven.
//!
//! Nobody is moved before a fleet has been known and still for half a minute, so whoever sees that somebody
//! is, or that nobody is, waits for that long.

use std::time::Duration;

use serde_json::{Value, json};
use testkit::gateway::{GatewayOptions, GatewayProcess, token};
use testkit::http;
use testkit::redis::RedisServer;
use testkit::sse::SseClient;
use tokio::time::{Instant, sleep};

use super::{LOOK, bearer, with};

/// More than chance would make of two nodes: with all of them on one, it holds twice its share.
const N: usize = 120;
/// Half a minute; and what a busy machine makes of it, where an outage is suspected meanwhile.
const SETTLED: Duration = Duration::from_secs(180);

fn node(redis: &RedisServer, fleet: &str, name: &str, tolerance: &str, mode: &str) -> GatewayOptions {
    with(&[
        ("GATEWAY_REDIS_URL", &redis.url()),
        ("GATEWAY_REDIS_PREFIX", fleet),
        ("GATEWAY_REDIS_TIMEOUT", "5s"),
        ("GATEWAY_NODE", name),
        ("GATEWAY_FLEET_REPORT", "1s"),
        ("GATEWAY_FLEET_TTL", "10s"),
        ("GATEWAY_SHED", mode),
        ("GATEWAY_SHED_INTERVAL", "1s"),
        ("GATEWAY_SHED_TOLERANCE", tolerance),
    ])
}

/// Event streams, which nobody has to read for them to stay.
async fn fill(gateway: &GatewayProcess) -> Vec<SseClient> {
    let mut held = Vec::new();
    for i in 0..N {
        let auth = bearer(&token(&json!({"sub": format!("u{i}")})));
        let opened = SseClient::connect(gateway.public(), "/v1/sse", &[("Authorization", &auth)]).await;
        held.push(opened.unwrap_or_else(|refused| panic!("{}", refused.text())));
    }
    held
}

async fn until_shedding(gateway: &GatewayProcess, is_so: impl Fn(&Value) -> bool) -> Value {
    let until = Instant::now() + SETTLED;
    loop {
        let shed = http::get(gateway.admin(), "/v1/fleet").await.json()["shedding"].clone();
        if is_so(&shed) {
            return shed;
        }
        assert!(Instant::now() < until, "{shed}\n{}", gateway.stderr());
        sleep(5 * LOOK).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_node_is_over_its_share_by_more_than_the_tolerance_that_is_set_or_left_alone() {
    let redis = RedisServer::plain();
    // Of the wide ones the full node is off by all of the tolerance and no more; in the other fleet it is counted.
    let (full, empty, counting, other) = tokio::join!(
        GatewayProcess::start(node(&redis, "wide", "a", "1", "on")),
        GatewayProcess::start(node(&redis, "wide", "b", "1", "on")),
        GatewayProcess::start(node(&redis, "narrow", "a", "0.9", "dry-run")),
        GatewayProcess::start(node(&redis, "narrow", "b", "0.9", "dry-run")),
    );
    let held = (fill(&full).await, fill(&counting).await);
    let counts = |least: u64| move |shed: &Value| shed["shed_total"].as_u64().is_some_and(|n| n >= least);
    until_shedding(&counting, counts(1)).await;
    let is_idle = |shed: &Value| shed["state"] == "idle";
    let shed = until_shedding(&full, is_idle).await;
    assert_eq!((&shed["why"], &shed["shed_total"]), (&json!("even"), &json!(0)));
    // And so it stays, while the other goes on.
    until_shedding(&counting, counts(10)).await;
    let shed = until_shedding(&full, is_idle).await;
    assert_eq!((&shed["why"], &shed["shed_total"]), (&json!("even"), &json!(0)));
    for (gateway, n) in [(&full, N), (&empty, 0), (&counting, N), (&other, 0)] {
        let is = gateway.metric("gateway_sessions_open{transport=\"sse\"}").await.unwrap_or(0.0);
        assert_eq!((is, gateway.metric("gateway_shed_total").await), (n as f64, Some(0.0)));
    }
    drop(held);
}
