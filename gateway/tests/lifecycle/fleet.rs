//! What reaches nodes from each other when something is wrong with it: a heartbeat that hangs, and
//! nonsense in the table. Every node goes on with what it knows of itself, and nobody is moved.

use std::time::Duration;

use serde_json::{Value, json};
use testkit::gateway::{GatewayOptions, GatewayProcess, Signal};
use testkit::http;
use testkit::proxy::{Direction, Flow, Proxy};
use testkit::redis::RedisServer;
use testkit::ws::WsClient;
use tokio::time::{Instant, sleep};

use crate::{SOON, claims, options, ws};

const LOOK: Duration = Duration::from_millis(50);

fn on(redis: &str, name: &str) -> GatewayOptions {
    options()
        .env("GATEWAY_REDIS_URL", redis)
        .env("GATEWAY_NODE", name)
        // What hangs is given up after this; what is only slow is not.
        .env("GATEWAY_REDIS_TIMEOUT", "2s")
        .env("GATEWAY_FLEET_REPORT", "1s")
        // A node that has no turn for some seconds is there still.
        .env("GATEWAY_FLEET_TTL", "8s")
        .env("GATEWAY_SHED_INTERVAL", "1s")
        .env("GATEWAY_DRAIN_GRACE", "0s")
}

async fn fleet(gateway: &GatewayProcess) -> Value {
    http::get(gateway.admin(), "/v1/fleet").await.json()
}

/// Waits until the fleet as this node shows it is so; gives it.
async fn until_fleet(gateway: &GatewayProcess, what: &str, is_so: impl Fn(&Value) -> bool) -> Value {
    let until = Instant::now() + Duration::from_secs(60);
    loop {
        let fleet = fleet(gateway).await;
        if is_so(&fleet) {
            return fleet;
        }
        assert!(Instant::now() < until, "not {what}: {fleet}\n{}", gateway.stderr());
        sleep(LOOK).await;
    }
}

fn names(fleet: &Value) -> Vec<&str> {
    fleet["nodes"].as_array().unwrap().iter().map(|node| node["node"].as_str().unwrap()).collect()
}

fn is_suspended_for(fleet: &Value, reason: &str) -> bool {
    fleet["shedding"]["suspended"].as_array().unwrap().iter().any(|one| one == reason)
}

async fn is_served(client: &mut WsClient) {
    client.send_json(&json!({"type": "ping"})).await;
    client.until("pong").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_heartbeat_that_hangs_ends_at_its_deadline_goes_on_by_itself_and_delays_no_end() {
    let redis = RedisServer::plain();
    let wire = Proxy::start(redis.addr()).await;
    let hung = || {
        wire.set(Direction::Up, Flow::Swallow);
        wire.set(Direction::Down, Flow::Swallow);
    };
    let (mut a, b) = tokio::join!(
        GatewayProcess::start(on(&redis.url_at(wire.port()), "a")),
        GatewayProcess::start(on(&redis.url(), "b"))
    );
    let mut client = ws(&a, &claims("u")).await;
    for node in [&a, &b] {
        until_fleet(node, "both", |fleet| names(fleet) == ["a", "b"]).await;
    }
    for _ in 0..2 {
        hung();
        until_fleet(&a, "suspended", |fleet| is_suspended_for(fleet, "backplane")).await;
        a.until_metric("gateway_redis_up{link=\"fleet\"}", 0.0).await;
        until_fleet(&b, "alone", |fleet| names(fleet) == ["b"]).await;
        // What it knows of itself it still knows, of the other it knows no more.
        let seen = until_fleet(&a, "alone", |fleet| names(fleet) == ["a"]).await;
        assert_eq!((&seen["total"], &seen["nodes"][0]["sessions"]), (&json!(1), &json!(1)), "{seen}");
        is_served(&mut client).await;
        wire.set(Direction::Up, Flow::Pass);
        wire.set(Direction::Down, Flow::Pass);
        for node in [&a, &b] {
            until_fleet(node, "both again", |fleet| names(fleet) == ["a", "b"]).await;
        }
        a.until_metric("gateway_redis_up{link=\"fleet\"}", 1.0).await;
    }
    hung();
    a.signal(Signal::Term);
    assert!(a.wait(SOON).await.success(), "{}", a.stderr());
    until_fleet(&b, "alone", |fleet| names(fleet) == ["b"]).await;
}

/// Puts a report into the table as nobody of ours would write it.
fn plant(redis: &RedisServer, name: &str, report: &str) {
    let time = redis.cli(&["TIME"]);
    let (seconds, micros) = time.split_once('\n').unwrap();
    let ms = seconds.parse::<u64>().unwrap() * 1_000 + micros.trim().parse::<u64>().unwrap() / 1_000;
    redis.cli(&["SET", &format!("tidegate:fleet:n:{name}"), report]);
    redis.cli(&["ZADD", "tidegate:fleet:idx", &ms.to_string(), name]);
}

/// A report of node `b` with one thing changed.
fn like(real: &str, key: &str, value: Value) -> String {
    let mut report: Value = serde_json::from_str(real).unwrap();
    report[key] = value;
    report.to_string()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nonsense_in_the_table_is_nobody_and_moves_nobody() {
    const N: usize = 60;
    let redis = RedisServer::plain();
    let (mut a, b) = tokio::join!(
        GatewayProcess::start(
            on(&redis.url(), "a").env("GATEWAY_DRAIN_WINDOW", "auto").env("GATEWAY_ACCEPT_RATE", "20")
        ),
        GatewayProcess::start(on(&redis.url(), "b").env("GATEWAY_ACCEPT_RATE", "20"))
    );
    let mut clients = Vec::new();
    for i in 0..N {
        clients.push(ws(&a, &claims(&format!("u{i}"))).await);
    }
    let is_known = |fleet: &Value| names(fleet) == ["a", "b"] && fleet["total"] == N;
    for node in [&a, &b] {
        until_fleet(node, "known", is_known).await;
    }
    let real = redis.cli(&["GET", "tidegate:fleet:n:b"]);
    let nonsense: Vec<String> = ["abc", "", "-5", "1000000000000", "null", "[]", "{}"]
        .into_iter()
        .map(str::to_owned)
        .chain([
            like(&real, "v", json!(99)),
            like(&real, "sessions", json!(-5)),
            like(&real, "sessions", json!(1_000_000_000_000_u64)),
            like(&real, "sessions", json!("60")),
            like(&real, "capacity", json!(1_000_000_000_000_u64)),
            like(&real, "accept_rate", json!(-1.0)),
            like(&real, "accept_rate", json!(1e300)),
            like(&real, "accept_rate", Value::Null),
        ])
        .collect();
    // Longer than a few reports: each node has read it, and none has believed it.
    let until = Instant::now() + Duration::from_secs(4);
    while Instant::now() < until {
        for (i, report) in nonsense.iter().enumerate() {
            plant(&redis, &format!("ghost{i}"), report);
        }
        for node in [&a, &b] {
            let fleet = fleet(node).await;
            assert!(is_known(&fleet), "{fleet}");
            assert_eq!(fleet["nodes"][0]["share"], 0.5, "{fleet}");
        }
        sleep(LOOK).await;
    }
    // Most of what is there cannot be read: nobody is moved on the rest of it.
    until_fleet(&a, "suspended", |fleet| is_suspended_for(fleet, "stale")).await;

    // Its own record is gone: it is there again with the next report. So after a flush.
    for gone in [vec!["DEL", "tidegate:fleet:n:a"], vec!["ZREM", "tidegate:fleet:idx", "a"], vec!["FLUSHALL"]] {
        redis.cli(&gone);
        let until = Instant::now() + SOON;
        while redis.cli(&["EXISTS", "tidegate:fleet:n:a"]) == "0"
            || redis.cli(&["ZSCORE", "tidegate:fleet:idx", "a"]).is_empty()
        {
            assert!(Instant::now() < until, "not there again after {gone:?}");
            sleep(LOOK).await;
        }
        until_fleet(&a, "known", is_known).await;
    }
    // Something else where the table should be: nodes are blind until it is gone, and then see again.
    redis.cli(&["DEL", "tidegate:fleet:idx"]);
    redis.cli(&["SET", "tidegate:fleet:idx", "nonsense"]);
    for node in [&a, &b] {
        until_fleet(node, "suspended", |fleet| is_suspended_for(fleet, "backplane")).await;
        assert_eq!(http::get(node.probes(), "/readyz").await.status(), 200);
    }
    redis.cli(&["DEL", "tidegate:fleet:idx"]);
    for node in [&a, &b] {
        until_fleet(node, "known", is_known).await;
    }
    for client in &mut clients {
        is_served(client).await;
    }
    for node in [&a, &b] {
        assert_eq!(node.metric("gateway_shed_total").await, Some(0.0));
        assert!(!node.stderr().contains("panicked"), "{}", node.stderr());
    }
    drained_at_the_pace_of_real_nodes(&redis, &mut a, &real, clients).await;
}

/// A ghost that says it accepts anything must not make a node send everybody away at once: 60 sessions
/// at half of the other node's twenty a second are six seconds.
async fn drained_at_the_pace_of_real_nodes(
    redis: &RedisServer,
    a: &mut GatewayProcess,
    real: &str,
    clients: Vec<WsClient>,
) {
    let boast = like(&like(real, "accept_rate", json!(1e12)), "ready_ms", json!(60_000));
    let until = Instant::now() + Duration::from_secs(3);
    while Instant::now() < until {
        plant(redis, "boaster", &boast);
        sleep(LOOK).await;
    }
    a.signal(Signal::Term);
    let ends = futures_util::future::join_all(clients.into_iter().map(crate::ws_end)).await;
    assert!(ends.iter().all(|end| end.words().0 == "drain"));
    assert!(a.wait(SOON).await.success(), "{}", a.stderr());
    let log = a.stderr();
    let closing = log.lines().find(|line| line.contains("closing sessions")).expect("it is said");
    assert!(closing.contains("window_s=6.0"), "{closing}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_redis_that_was_demoted_moves_nobody_and_holds_nobody_up() {
    let (redis, newer) = (RedisServer::plain(), RedisServer::plain());
    let (mut a, b) =
        tokio::join!(GatewayProcess::start(on(&redis.url(), "a")), GatewayProcess::start(on(&redis.url(), "b")));
    let mut clients = [ws(&a, &claims("u")).await, ws(&b, &claims("v")).await];
    for node in [&a, &b] {
        until_fleet(node, "both", |fleet| names(fleet) == ["a", "b"]).await;
    }
    // Its replica takes its place and it becomes a replica itself: it answers, and refuses every write.
    tokio::task::block_in_place(|| newer.replica_of(&redis));
    newer.promote();
    tokio::task::block_in_place(|| redis.replica_of(&newer));
    for (node, name) in [(&a, "a"), (&b, "b")] {
        until_fleet(node, "suspended", |fleet| is_suspended_for(fleet, "backplane")).await;
        let alone = until_fleet(node, "alone", |fleet| names(fleet) == [name]).await;
        assert_eq!((&alone["total"], &alone["shedding"]["shed_total"]), (&json!(1), &json!(0)), "{alone}");
        assert_eq!(http::get(node.probes(), "/livez").await.status(), 200);
    }
    for client in &mut clients {
        is_served(client).await;
    }
    // It is written to again, and what nodes say of themselves stands there again.
    redis.promote();
    for node in [&a, &b] {
        until_fleet(node, "both again", |fleet| names(fleet) == ["a", "b"]).await;
    }
    tokio::task::block_in_place(|| redis.replica_of(&newer));
    until_fleet(&a, "suspended", |fleet| is_suspended_for(fleet, "backplane")).await;
    let signalled = Instant::now();
    a.signal(Signal::Term);
    let [of_a, _of_b] = clients;
    assert_eq!(crate::ws_end(of_a).await.words(), ("drain", 1001, "after"));
    assert!(a.wait(SOON).await.success(), "{}", a.stderr());
    assert!(signalled.elapsed() < SOON, "{:?}", signalled.elapsed());
}
