//! Sessions that move to a node with room, between real processes on one Redis.
//!
//! Nobody is moved before a fleet has been known and still for half a minute, and a session is left
//! alone for its first 24 reports, so whoever sees one move waits for that long.

use std::time::Duration;

use serde_json::{Value, json};
use testkit::gateway::{GatewayOptions, GatewayProcess, Signal};
use testkit::http;
use testkit::lag::Lag;
use testkit::redis::RedisServer;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, sleep_until};

use crate::{Ending, claims, closed, n_open, options, sse, sse_end, ws, ws_end};

/// Between two looks at a state that is about to be reached.
const LOOK: Duration = Duration::from_millis(100);
/// A client that nobody moves hears nothing but heartbeats.
const QUIET: Duration = Duration::from_secs(300);
/// For so long a fleet has to stand still.
const STILL: Duration = Duration::from_secs(30);
/// So long a fleet may take to stand still, where a busy machine makes it suspect an outage now and then:
/// each time it begins anew. Nothing is promised by it.
const SETTLED: Duration = Duration::from_secs(240);
/// Within two seconds of whatever stops it nobody is moved any more; a look and a busy machine more.
const STOPS: Duration = Duration::from_secs(5);
/// For so long it is looked at that nobody is.
const STOPPED: Duration = Duration::from_secs(3);

/// Quick to see and to act: how fast it goes is the fleet's budget alone.
fn on(redis: &RedisServer, name: &str, mode: &str) -> GatewayOptions {
    options()
        .env("GATEWAY_REDIS_URL", redis.url())
        // A report that hangs for longer is none; it stops shedding.
        .env("GATEWAY_REDIS_TIMEOUT", "1s")
        .env("GATEWAY_NODE", name)
        .env("GATEWAY_FLEET_REPORT", "1s")
        .env("GATEWAY_FLEET_TTL", "10s")
        .env("GATEWAY_SHED", mode)
        .env("GATEWAY_SHED_INTERVAL", "1s")
        .env("GATEWAY_SHED_FRACTION", "0.1")
        .env("GATEWAY_DRAIN_GRACE", "0s")
}

/// Opens the session of client `i`, WebSocket and SSE by turns, and reads it to its end.
async fn until_moved(gateway: &GatewayProcess, i: usize, ends: &mut JoinSet<(usize, Ending)>) {
    let claims = claims(&format!("u{i}"));
    if i.is_multiple_of(2) {
        let mut client = ws(gateway, &claims).await;
        client.set_patience(QUIET);
        ends.spawn(async move { (i, ws_end(client).await) });
    } else {
        let mut client = sse(gateway, &claims).await;
        client.set_patience(QUIET);
        ends.spawn(async move { (i, sse_end(client).await) });
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

fn is_suspended(shed: &Value, reason: &str) -> bool {
    shed["suspended"].as_array().is_some_and(|reasons| reasons.iter().any(|one| one == reason))
}

/// The most of these that lie within one second.
fn peak(mut at: Vec<Instant>) -> usize {
    at.sort();
    let within =
        |(i, first): (usize, &Instant)| at[i..].iter().take_while(|at| **at - *first < Duration::from_secs(1)).count();
    at.iter().enumerate().map(within).max().unwrap_or(0)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_full_nodes_fill_a_third_unless_the_fleet_is_held() {
    const EACH: usize = 150;
    const SHARE: f64 = 100.0;
    let redis = RedisServer::plain();
    let (a, b, c) = tokio::join!(
        GatewayProcess::start(on(&redis, "a", "on")),
        GatewayProcess::start(on(&redis, "b", "on").env("GATEWAY_CLOSE_CODE_SHED", "1013")),
        GatewayProcess::start(on(&redis, "c", "on"))
    );
    let nodes = [&a, &b, &c];
    let (lag, mut ends) = (Lag::watch(), JoinSet::new());
    for i in 0..2 * EACH {
        until_moved(nodes[i / EACH], i, &mut ends).await;
    }
    let opened = Instant::now();
    let held = http::post_json(c.admin(), "/v1/fleet/hold", &json!({"for": "10m", "reason": "a test"})).await;
    assert_eq!(held.status(), 200, "{}", held.text());
    // Longer than anything else would keep them where they are.
    sleep_until(opened + STILL + Duration::from_secs(2)).await;
    for donor in [&a, &b] {
        let shed = until_shedding(donor, SETTLED, |shed| shed["suspended"] == json!(["hold"])).await;
        assert_eq!(shed["shed_total"], 0, "{shed}");
        donor.until_metric("gateway_shed_suspended{reason=\"hold\"}", 1.0).await;
    }
    assert!(ends.try_join_next().is_none());

    let released = http::request(a.admin(), "DELETE", "/v1/fleet/hold", &[], b"").await;
    assert_eq!(released.status(), 204, "{}", released.text());
    let released = Instant::now();
    let (mut moved, mut closed_at, mut returning) = (Vec::new(), Vec::new(), Vec::new());
    let is_even = |n: f64| (n - SHARE).abs() <= SHARE / 10.0;
    loop {
        let counts = [n_open(&a).await, n_open(&b).await, n_open(&c).await];
        if counts.into_iter().all(is_even) && returning.is_empty() {
            break;
        }
        assert!(released.elapsed() < SETTLED, "{counts:?} {}\n{}", shedding(&a).await, a.stderr());
        while let Some(end) = ends.try_join_next() {
            let (i, end) = end.unwrap();
            // The code of the node that it was on: each is moved once.
            assert_eq!(end.words(), ("shed", [1012, 1013][i / EACH], "after"));
            let after = end.bye["after_ms"].as_u64().unwrap();
            assert!(after <= 5_000, "{}", end.bye);
            assert!(!moved.contains(&i), "client {i} was moved twice");
            moved.push(i);
            closed_at.push(end.at);
            returning.push((i, end.at + Duration::from_millis(after)));
        }
        // The clients come back when they were told to, to the node with the fewest.
        for (i, _) in returning.extract_if(.., |(_, at)| *at <= Instant::now()) {
            let (mut emptiest, mut fewest) = (&c, f64::INFINITY);
            for node in nodes {
                let n = n_open(node).await;
                if n < fewest {
                    (emptiest, fewest) = (node, n);
                }
            }
            until_moved(emptiest, i, &mut ends).await;
        }
        sleep(Duration::from_millis(10)).await;
    }
    let minutes = 1 + released.elapsed().as_secs() as usize / 60;
    // And there it stays.
    sleep(Duration::from_secs(5)).await;
    assert!(is_even(n_open(&c).await), "{} on c", n_open(&c).await);
    // They all came back to the emptiest, and that shows from behind.
    for node in nodes {
        node.until_metric("gateway_lb_policy_observed{policy=\"emptiest\"}", 1.0).await;
    }
    let mut n_shed = 0.0;
    for donor in [&a, &b] {
        let n = donor.metric("gateway_shed_total").await.unwrap();
        assert_eq!(donor.metric(&closed("shed")).await, Some(n));
        n_shed += n;
        let n_lines = donor.stderr().matches("moving sessions to emptier nodes").count();
        assert!(n_lines < 15 * minutes, "{n_lines} lines in {minutes} min:\n{}", donor.stderr());
    }
    // Hardly more than the newcomer's share, nor faster than both donors may in an interval of a second;
    // where the second begins is not said, so twice that fits in one; and whoever had no turn for a while
    // hears in one second of what happened meanwhile.
    assert!(n_shed <= 1.1 * SHARE, "{n_shed} moved");
    let most = (2.0 + lag.longest().as_secs_f64()) * (2 * EACH / 10) as f64;
    assert!(peak(closed_at) as f64 <= most, "more in a second than a tenth of what the donors hold");
    assert_eq!(c.metric("gateway_shed_total").await, Some(0.0));
}

/// Waits until this is among the reasons, and then that nothing is counted any more.
async fn stops_for(gateway: &GatewayProcess, reason: &str) -> Value {
    let (lag, began) = (Lag::watch(), Instant::now());
    let stopped = until_shedding(gateway, SETTLED, |shed| is_suspended(shed, reason)).await;
    assert!(began.elapsed() < STOPS + lag.longest(), "{reason} after {:?}: {stopped}", began.elapsed());
    assert_eq!(stopped["state"], "suspended");
    let until = Instant::now() + STOPPED;
    while Instant::now() < until {
        let shed = shedding(gateway).await;
        assert!(is_suspended(&shed, reason), "{reason} is over already: {shed}");
        assert_eq!(shed["shed_total"], stopped["shed_total"], "counted on: {shed}");
        sleep(LOOK).await;
    }
    gateway.until_metric(&format!("gateway_shed_suspended{{reason=\"{reason}\"}}"), 1.0).await;
    stopped
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_dry_run_only_counts_and_stops_for_whatever_happens_to_the_fleet() {
    const N: usize = 130;
    let redis = RedisServer::plain();
    let (a, b, mut c) = tokio::join!(
        GatewayProcess::start(on(&redis, "a", "dry-run")),
        GatewayProcess::start(on(&redis, "b", "off")),
        GatewayProcess::start(on(&redis, "c", "on").env("GATEWAY_DRAIN_GRACE", "60s")),
    );
    let mut ends = JoinSet::new();
    for i in 0..N {
        until_moved(&a, i, &mut ends).await;
    }
    let counts = |shed: &Value| shed["state"] == "shedding" && shed["shed_total"].as_u64().is_some_and(|n| n > 10);
    let shed = until_shedding(&a, SETTLED, counts).await;
    assert_eq!((&shed["mode"], &shed["suspended"]), (&json!("dry-run"), &json!([])));
    assert_eq!((n_open(&a).await, ends.try_join_next().is_none()), (N as f64, true));
    assert_eq!(a.metric("gateway_shed_total").await, Some(0.0));
    let off = shedding(&b).await;
    assert_eq!((&off["mode"], &off["state"], &off["shed_total"]), (&json!("off"), &json!("off"), &json!(0)));
    let fleet = http::get(b.admin(), "/v1/fleet").await.json();
    assert_eq!((&fleet["nodes"][0]["sessions"], &fleet["budget"]), (&json!(N), &json!(0.0)), "{fleet}");

    // A node leaves: what it moves comes first, and nobody is moved to it.
    c.signal(Signal::Term);
    stops_for(&a, "draining").await;
    // More than half of all clients are cut off at once, as by a proxy that restarts.
    ends.abort_all();
    let mut rest = JoinSet::new();
    for i in 0..N / 3 {
        until_moved(&a, i, &mut rest).await;
    }
    stops_for(&a, "unsettled").await;
    // Redis stands still: it stops for that too, and nobody is promised a hold.
    redis.pause();
    stops_for(&a, "backplane").await;
    let asked = Instant::now();
    let refused = http::post_json(a.admin(), "/v1/fleet/hold", &json!({"for": "10m"})).await;
    assert_eq!((refused.status(), &refused.json()["code"]), (503, &json!("unavailable")));
    assert!(asked.elapsed() < 2 * STOPS, "{:?}", asked.elapsed());
    redis.resume();
    assert_eq!((n_open(&a).await, a.metric("gateway_shed_total").await), ((N / 3) as f64, Some(0.0)));
    assert_eq!(c.ended(), None);
}
