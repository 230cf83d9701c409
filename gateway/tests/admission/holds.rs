//! The hold of a fleet: taken on one node, known to all at once, ended by its time or by anybody;
//! over the admin API and from the command line.

use std::time::Duration;

use serde_json::{Value, json};
use testkit::gateway::{Ended, GatewayOptions, GatewayProcess};
use testkit::http;
use testkit::redis::RedisServer;
use tokio::time::{Instant, sleep};

use super::{SOON, code_of, now, options};

/// Between two looks at a state that is about to be reached.
const LOOK: Duration = Duration::from_millis(20);

/// A node whose next report is far beyond `SOON`: what it learns before, it was told.
fn on(redis: &RedisServer, name: &str) -> GatewayOptions {
    options()
        .env("GATEWAY_REDIS_URL", redis.url())
        .env("GATEWAY_NODE", name)
        .env("GATEWAY_FLEET_REPORT", "5m")
        .env("GATEWAY_FLEET_TTL", "15m")
}

async fn pair(redis: &RedisServer) -> (GatewayProcess, GatewayProcess) {
    tokio::join!(GatewayProcess::start(on(redis, "a")), GatewayProcess::start(on(redis, "b")))
}

/// Waits until this node shows a hold that is so.
async fn until_hold(gateway: &GatewayProcess, is_so: impl Fn(&Value) -> bool) -> Value {
    let until = Instant::now() + SOON;
    loop {
        let fleet = http::get(gateway.admin(), "/v1/fleet").await.json();
        let hold = fleet.get("hold").unwrap_or_else(|| panic!("no word of a hold: {fleet}")).clone();
        if is_so(&hold) {
            return hold;
        }
        assert!(Instant::now() < until, "{fleet}");
        sleep(LOOK).await;
    }
}

/// Waits until this node shows itself ready, as its probe does.
async fn until_ready(gateway: &GatewayProcess, name: &str) {
    let until = Instant::now() + SOON;
    loop {
        let fleet = http::get(gateway.admin(), "/v1/fleet").await.json();
        let rows = fleet["nodes"].as_array().expect("rows");
        let row = rows.iter().find(|row| row["node"] == name).unwrap_or_else(|| panic!("no row of {name}: {fleet}"));
        match row["ready"].as_bool().unwrap_or_else(|| panic!("no word of readiness: {row}")) {
            true => return,
            false => assert!(Instant::now() < until, "{fleet}"),
        }
        sleep(LOOK).await;
    }
}

async fn hold(gateway: &GatewayProcess, body: &Value) -> Value {
    let answer = http::post_json(gateway.admin(), "/v1/fleet/hold", body).await;
    assert_eq!(answer.status(), 200, "{}", answer.text());
    answer.json()
}

async fn release(gateway: &GatewayProcess) {
    let answer = http::request(gateway.admin(), "DELETE", "/v1/fleet/hold", &[], b"").await;
    assert_eq!((answer.status(), answer.text()), (204, ""));
}

/// A command on this node's admin API, to its end.
async fn run(gateway: &GatewayProcess, args: &[&str]) -> (i32, Ended) {
    let admin = format!("http://{}", gateway.admin());
    let ended = options().args(&[args, &["--admin", &admin]].concat()).run(SOON).await;
    (ended.status.code().unwrap_or(-1), ended)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_hold_is_known_on_every_node_at_once_and_so_is_its_end() {
    let redis = RedisServer::plain();
    let (a, b) = pair(&redis).await;
    until_hold(&b, Value::is_null).await;
    let earliest = now() + 900;
    let held = hold(&a, &json!({"for": "15m", "reason": "deploy"})).await;
    let until = held["until"].as_u64().expect("a time");
    assert!((earliest..=now() + 901).contains(&until), "{held}");
    assert_eq!(held, json!({"until": until, "reason": "deploy"}));
    let expected = json!({"until": until, "reason": "deploy", "by": "a"});
    for gateway in [&a, &b] {
        assert_eq!(until_hold(gateway, Value::is_object).await, expected);
    }
    // Anybody replaces it; who starts later or comes back sees it, and it outlives who took it.
    hold(&b, &json!({"for": 600})).await;
    let c = GatewayProcess::start(on(&redis, "c")).await;
    for gateway in [&a, &b, &c] {
        let shown = until_hold(gateway, |hold| hold["by"] == "b").await;
        assert_eq!(shown["reason"], "");
        assert!(shown["until"].as_u64().is_some_and(|end| end < until), "{shown}");
    }
    drop(b);
    until_hold(&c, Value::is_object).await;
    for _ in 0..2 {
        release(&c).await;
        for gateway in [&a, &c] {
            until_hold(gateway, Value::is_null).await;
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_hold_ends_by_itself_on_every_node() {
    let redis = RedisServer::plain();
    let (a, b) = pair(&redis).await;
    let until = hold(&a, &json!({"for": "6s"})).await["until"].as_u64().expect("a time");
    for gateway in [&a, &b] {
        until_hold(gateway, |hold| hold["until"] == until).await;
    }
    for gateway in [&b, &a] {
        until_hold(gateway, Value::is_null).await;
    }
    // Both clocks are this machine's; the answer is in whole seconds, rounded up.
    assert!(now() + 1 >= until);
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_no_hold_is_refused_and_without_redis_nobody_promises_one() {
    let mut redis = RedisServer::plain();
    let a = GatewayProcess::start(on(&redis, "a").env("GATEWAY_REDIS_TIMEOUT", "1s")).await;
    for bad in ["", "{}", r#"{"for":0}"#, r#"{"for":"86401s"}"#, r#"{"for":"15m","reason":"a\nb"}"#] {
        let answer =
            http::request(a.admin(), "POST", "/v1/fleet/hold", &[("Content-Type", "application/json")], bad.as_bytes());
        assert_eq!(answer.await.status(), 400, "{bad}");
    }
    until_hold(&a, Value::is_null).await;
    redis.kill9();
    let refused = http::post_json(a.admin(), "/v1/fleet/hold", &json!({"for": "15m"})).await;
    assert_eq!((refused.status(), code_of(&refused).as_str()), (503, "unavailable"));
    let refused = http::request(a.admin(), "DELETE", "/v1/fleet/hold", &[], b"").await;
    assert_eq!((refused.status(), code_of(&refused).as_str()), (503, "unavailable"));
    let (code, ended) = run(&a, &["hold", "15m"]).await;
    assert_eq!(code, 69, "{ended:?}");
    // The fleet is shown all the same.
    assert_eq!(run(&a, &["fleet"]).await.0, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_fleet_is_held_watched_and_released_from_the_command_line() {
    let redis = RedisServer::plain();
    let (a, b) = pair(&redis).await;
    let (code, ended) = run(&a, &["hold", "15m", "--reason", "deploy"]).await;
    assert_eq!(code, 0, "{ended:?}");
    let held: Value = serde_json::from_str(&ended.stdout).expect("what the gateway answered");
    assert_eq!(held["reason"], "deploy");
    until_hold(&b, |hold| hold["until"] == held["until"]).await;
    until_ready(&b, "b").await;
    let (code, ended) = run(&b, &["fleet"]).await;
    assert_eq!(code, 0, "{ended:?}");
    let lines: Vec<&str> = ended.stdout.lines().collect();
    let columns: Vec<&str> = lines[0].split_whitespace().collect();
    let wanted = ["NODE", "PHASE", "READY", "SESSIONS", "TARGET", "CAPACITY", "SHARE", "VERSION", "AGE"];
    assert_eq!(columns, wanted, "{}", ended.stdout);
    let of_b = lines.iter().find(|line| line.starts_with("b ")).unwrap_or_else(|| panic!("{}", ended.stdout));
    assert_eq!(of_b.split_whitespace().collect::<Vec<_>>()[..4], ["b", "serving", "yes", "0"], "{}", ended.stdout);
    assert!(lines.iter().any(|line| line.starts_with("total 0, cv 0, busiest 1")), "{}", ended.stdout);
    assert!(lines.iter().any(|line| line.starts_with("budget ") && line.contains(", shedding o")), "{}", ended.stdout);
    let unknown = "the balancer in front has not shown yet where it puts clients";
    assert!(lines.contains(&unknown), "{}", ended.stdout);
    let shown = lines.iter().find(|line| line.starts_with("held for 1")).unwrap_or_else(|| panic!("{}", ended.stdout));
    assert!(shown.ends_with(" more by a: \"deploy\""), "{shown}");
    let (code, ended) = run(&b, &["release"]).await;
    assert_eq!((code, ended.stdout.as_str()), (0, ""), "{ended:?}");
    until_hold(&a, Value::is_null).await;
    for bad in [&["hold"][..], &["hold", "0s"], &["hold", "25h"], &["hold", "soon"], &["hold", "100ms"]] {
        let (code, ended) = run(&a, bad).await;
        assert_eq!(code, 64, "{bad:?}: {ended:?}");
    }
}
