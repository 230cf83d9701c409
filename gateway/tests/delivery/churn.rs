//! What crowds that come and go leave behind: nothing, neither here nor in Redis.

use futures_util::future::join_all;
use serde_json::{Value, json};
use testkit::gateway::GatewayProcess;
use testkit::http;
use testkit::redis::RedisServer;

use super::{closed, hearing, n_sockets, on_redis, resident, sse, status, until, until_open, ws};

/// Names that a crowd joins and asks for; each is used again and again.
const CHANNELS: usize = 200;
/// How many are connected at once.
const AT_ONCE: usize = 20;

/// One life: connected, subscribed to more than its token names, gone in one of several ways.
async fn live(gateway: &GatewayProcess, i: usize) {
    let joined = format!("c{}", i % CHANNELS);
    if i % 2 == 1 {
        drop(sse(gateway.public(), &hearing(&[&joined])).await);
        return;
    }
    let mut client = ws(gateway.public(), &hearing(&[&joined])).await;
    let asked = json!({"type": "subscribe", "channel": format!("room:{}", i % CHANNELS), "since": "0"});
    client.send_json(&asked).await;
    match i % 8 {
        // Its answer never finds it.
        0 => {}
        2 => drop(client.until("ok").await),
        4 => {
            client.until("ok").await;
            client.send_json(&json!({"type": "unsubscribe", "channel": joined})).await;
            client.until("ok").await;
        }
        _ => {
            client.until("ok").await;
            client.send_close(1000, "").await.expect("open");
            client.until_closed().await;
        }
    }
    if i.is_multiple_of(6) {
        client.socket().set_zero_linger().expect("an option");
    }
}

async fn lives(gateway: &GatewayProcess, from: usize, to: usize) {
    for first in (from..to).step_by(AT_ONCE) {
        join_all((first..first + AT_ONCE).map(|i| live(gateway, i))).await;
    }
    until_open(gateway, 0).await;
    until("no socket is left", async || n_sockets(gateway) == 0).await;
}

fn n_descriptors(gateway: &GatewayProcess) -> usize {
    std::fs::read_dir(format!("/proc/{}/fd", gateway.pid())).expect("the process runs").count()
}

/// Series and their labels, without values: what `/metrics` has a row for.
async fn series(gateway: &GatewayProcess) -> Vec<String> {
    let text = http::get(gateway.probes(), "/metrics").await;
    let name = |line: &str| line.rsplit_once(' ').expect("a name and a value").0.to_owned();
    text.text().lines().filter(|line| !line.starts_with('#')).map(name).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn three_thousand_who_came_and_went_leave_nothing_behind() {
    const ROUND: usize = 1_000;
    let redis = RedisServer::plain();
    let gateway = GatewayProcess::start(on_redis(&redis.url())).await;
    // The first thousand bring everything to its usual size: pools, connections, threads.
    lives(&gateway, 0, ROUND).await;
    let (descriptors, series_before, first) = (n_descriptors(&gateway), series(&gateway).await, resident(&gateway));
    let links = redis.cli(&["CLIENT", "LIST"]).lines().count();
    lives(&gateway, ROUND, 2 * ROUND).await;
    let second = resident(&gateway);
    lives(&gateway, 2 * ROUND, 3 * ROUND).await;
    let third = resident(&gateway);
    // A kilobyte a life that stays would be two megabytes over both.
    assert!(
        third.saturating_sub(first) < 8 << 20 && third.saturating_sub(second) < 4 << 20,
        "{first} {second} {third}"
    );
    assert!(n_descriptors(&gateway) <= descriptors + 2, "{descriptors}, then {}", n_descriptors(&gateway));
    assert!(redis.cli(&["CLIENT", "LIST"]).lines().count() <= links + 2);
    assert_eq!(series(&gateway).await, series_before, "no label grew");
    assert!(status(&gateway, "Threads") < 64, "{}", status(&gateway, "Threads"));
    // Channels are kept for some seconds in case their listeners come back; then Redis has none.
    let subscribed = || redis.cli(&["PUBSUB", "CHANNELS", "tidegate:live:*"]);
    until("no channel is subscribed", async || subscribed().is_empty()).await;
    until("each is counted as closed", async || sum(&gateway, "gateway_sessions_closed_total{").await == 3_000.0).await;
    assert_eq!(sum(&gateway, "gateway_sessions_opened_total{").await, 3_000.0);
    assert_eq!(gateway.metric("gateway_outbox_bytes").await, Some(0.0));
    // And whoever comes now is served like the first.
    let mut client = ws(gateway.public(), &hearing(&["c1"])).await;
    gateway.publish("c1", &json!("still here")).await;
    let heard: Value = client.json().await;
    assert_eq!(heard["data"], "still here");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn users_that_came_and_went_keep_no_place_and_no_key_in_redis() {
    const USERS: usize = 40;
    const EACH: usize = 5;
    let redis = RedisServer::plain();
    let gateway = GatewayProcess::start(on_redis(&redis.url()).env("GATEWAY_MAX_SESSIONS_PER_USER", "3")).await;
    let keys = || {
        let mut keys: Vec<String> = redis.cli(&["KEYS", "*"]).lines().map(str::to_owned).collect();
        keys.sort_unstable();
        keys
    };
    // Its own report and all that a node has at any time.
    drop(ws(gateway.public(), &hearing(&["c"])).await);
    until_open(&gateway, 0).await;
    until("a report", async || redis.cli(&["EXISTS", "tidegate:fleet:idx"]) == "1").await;
    until("the first's place is free", async || !keys().iter().any(|key| key.contains(":sessions:"))).await;
    let before = keys();
    for round in 0..2 {
        let user = async |i: usize| {
            let claims = json!({"sub": format!("u{i}"), "channels": [format!("c{i}")]});
            let mut sessions = Vec::new();
            for _ in 0..EACH {
                sessions.push(ws(gateway.public(), &claims).await);
            }
            // The first two were one too many, in turn.
            for session in &mut sessions[..EACH - 3] {
                assert_eq!(session.until_closed().await.1, 4409, "round {round}");
            }
        };
        for first in (0..USERS).step_by(AT_ONCE) {
            join_all((first..first + AT_ONCE).map(user)).await;
        }
        until_open(&gateway, 0).await;
        until("no place is kept", async || keys() == before).await;
    }
    gateway.until_metric(&closed("replaced"), (2 * USERS * (EACH - 3)) as f64).await;
}

async fn sum(gateway: &GatewayProcess, prefix: &str) -> f64 {
    let text = http::get(gateway.probes(), "/metrics").await;
    let value = |line: &str| line.rsplit(' ').next().and_then(|value| value.parse::<f64>().ok());
    text.text().lines().filter(|line| line.starts_with(prefix)).filter_map(value).sum()
}
