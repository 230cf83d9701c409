//! Sessions that move to a node with room, between real processes on one Redis.
//!
//! A session is left alone for its first two minutes, whatever is configured, so the test that sees
//! one move takes a little longer than that.

use std::time::Duration;

use serde_json::{Value, json};
use testkit::gateway::{GatewayOptions, GatewayProcess};
use testkit::http;
use testkit::redis::RedisServer;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, sleep_until};

use crate::{Ending, claims, closed, n_open, options, sse, sse_end, ws, ws_end};

/// Between two looks at a state that is about to be reached.
const LOOK: Duration = Duration::from_millis(100);
/// A client that nobody moves hears nothing but heartbeats.
const QUIET: Duration = Duration::from_secs(300);

/// Quick to see and to act: how fast it goes is the fleet's budget alone.
fn on(redis: &RedisServer, name: &str, mode: &str) -> GatewayOptions {
    options()
        .env("GATEWAY_REDIS_URL", redis.url())
        .env("GATEWAY_NODE", name)
        .env("GATEWAY_FLEET_REPORT", "1s")
        .env("GATEWAY_FLEET_TTL", "10s")
        .env("GATEWAY_SHED", mode)
        .env("GATEWAY_SHED_INTERVAL", "1s")
        .env("GATEWAY_SHED_FRACTION", "0.1")
        .env("GATEWAY_DRAIN_GRACE", "0s")
}

/// Opens a session, WebSocket and SSE by turns, and reads it to its end.
async fn until_moved(gateway: &GatewayProcess, i: usize, ends: &mut JoinSet<Ending>) {
    let claims = claims(&format!("u{i}"));
    if i.is_multiple_of(2) {
        let mut client = ws(gateway, &claims).await;
        client.set_patience(QUIET);
        ends.spawn(ws_end(client));
    } else {
        let mut client = sse(gateway, &claims).await;
        client.set_patience(QUIET);
        ends.spawn(sse_end(client));
    }
}

async fn shedding(gateway: &GatewayProcess) -> Value {
    http::get(gateway.admin(), "/v1/fleet").await.json()["shedding"].clone()
}

/// Waits until this node says so of its shedding; gives it.
async fn until_shedding(gateway: &GatewayProcess, limit: Duration, is_so: impl Fn(&Value) -> bool) -> Value {
    let until = Instant::now() + limit;
    loop {
        let shed = shedding(gateway).await;
        if is_so(&shed) {
            return shed;
        }
        assert!(Instant::now() < until, "{shed}\n{}", gateway.stderr());
        sleep(LOOK).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sessions_move_to_a_node_that_joins_unless_the_fleet_is_held() {
    const N: usize = 160;
    let redis = RedisServer::plain();
    let a = GatewayProcess::start(on(&redis, "a", "on")).await;
    let mut ends = JoinSet::new();
    for i in 0..N {
        until_moved(&a, i, &mut ends).await;
    }
    let opened = Instant::now();
    sleep_until(opened + Duration::from_secs(85)).await;
    let b = GatewayProcess::start(on(&redis, "b", "on")).await;
    until_shedding(&a, Duration::from_secs(30), |shed| shed["state"] == "shedding").await;
    let held = http::post_json(b.admin(), "/v1/fleet/hold", &json!({"for": "10m", "reason": "a test"})).await;
    assert_eq!(held.status(), 200, "{}", held.text());
    let shed = until_shedding(&a, Duration::from_secs(3), |shed| shed["state"] == "suspended").await;
    assert_eq!(shed["suspended"], json!(["hold"]));
    a.until_metric("gateway_shed_suspended{reason=\"hold\"}", 1.0).await;
    // All of them may be moved from here on, and nobody is.
    sleep_until(opened + Duration::from_secs(124)).await;
    assert_eq!((n_open(&a).await, ends.try_join_next().is_none()), (N as f64, true));

    let released = http::request(a.admin(), "DELETE", "/v1/fleet/hold", &[], b"").await;
    assert_eq!(released.status(), 204, "{}", released.text());
    let released = Instant::now();
    let (mut n_moved, mut returning) = (0, Vec::new());
    let is_even = |n: f64| (n - N as f64 / 2.0).abs() <= N as f64 / 20.0;
    while !is_even(n_open(&a).await) || !is_even(n_open(&b).await) {
        assert!(released.elapsed() < Duration::from_secs(60), "{}\n{}", shedding(&a).await, a.stderr());
        while let Some(end) = ends.try_join_next() {
            let end = end.unwrap();
            assert_eq!(end.words(), ("shed", 1012, "after"));
            let after = end.bye["after_ms"].as_u64().unwrap();
            assert!(after <= 5_000, "{}", end.bye);
            returning.push(end.at + Duration::from_millis(after));
        }
        // The clients come back when they were told to, to the node with fewer.
        for _ in returning.extract_if(.., |at| *at <= Instant::now()) {
            until_moved(&b, n_moved, &mut ends).await;
            n_moved += 1;
        }
        sleep(Duration::from_millis(10)).await;
    }
    // And there it stays.
    sleep(Duration::from_secs(5)).await;
    assert!(is_even(n_open(&a).await), "{} on a", n_open(&a).await);
    let n_shed = a.metric("gateway_shed_total").await.unwrap();
    assert!(n_shed >= n_moved as f64 && n_shed <= 1.1 * N as f64 / 2.0, "{n_shed} moved");
    assert_eq!(a.metric(&closed("shed")).await, Some(n_shed));
    assert_eq!(b.metric("gateway_shed_total").await, Some(0.0));
    let n_lines = a.stderr().matches("moving sessions to emptier nodes").count();
    assert!(n_lines < 15, "{n_lines} lines in two minutes:\n{}", a.stderr());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_dry_run_only_counts_and_off_does_not_even_that() {
    const N: usize = 130;
    let redis = RedisServer::plain();
    let (a, b) =
        tokio::join!(GatewayProcess::start(on(&redis, "a", "dry-run")), GatewayProcess::start(on(&redis, "b", "off")));
    let mut ends = JoinSet::new();
    for i in 0..N {
        until_moved(&a, i, &mut ends).await;
    }
    let counts = |shed: &Value| shed["state"] == "shedding" && shed["shed_total"].as_u64().is_some_and(|n| n > 20);
    let shed = until_shedding(&a, Duration::from_secs(90), counts).await;
    assert_eq!((&shed["mode"], &shed["suspended"]), (&json!("dry-run"), &json!([])));
    assert_eq!((n_open(&a).await, ends.try_join_next().is_none()), (N as f64, true));
    assert_eq!(a.metric("gateway_shed_total").await, Some(0.0));
    let off = shedding(&b).await;
    assert_eq!((&off["mode"], &off["state"], &off["shed_total"]), (&json!("off"), &json!("off"), &json!(0)));
    let fleet = http::get(b.admin(), "/v1/fleet").await.json();
    assert_eq!((&fleet["nodes"][0]["sessions"], &fleet["budget"]), (&json!(N), &json!(0.0)), "{fleet}");
}
