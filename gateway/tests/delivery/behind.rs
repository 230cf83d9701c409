//! The gateway's own receiver that lags: more comes over the link than the hub can hand out. It
//! gives the link up at its bound, says so and makes up for it; nobody is left open and silent.

use serde_json::json;
use testkit::gateway::GatewayProcess;
use testkit::numbered::call_redis;
use testkit::redis::RedisServer;
use testkit::ws::{Heard, WsClient};
use tokio::task::JoinSet;

use super::order::{first_by_sse, first_by_ws};
use super::{hearing, on_redis, resident, sse, until_open, ws};

/// Listeners of the crowd's channel: an event for them takes a hundred times as long to hand out as
/// to publish.
const CROWD: usize = 200;
/// Numbered events between two looks.
const ROUND: usize = 100;
/// What the link says when it holds as much as it may.
const OVERRUN: &str = "messages came faster than they were taken";

/// Numbers for the crowd, each with a large event for somebody else behind it.
async fn publish(redis: &RedisServer, from: usize) {
    let word = |text: &str| text.as_bytes().to_vec();
    let large = format!(r#"{{"data":"{}"}}"#, "x".repeat(60_000));
    let pair = |n: usize| {
        let numbered = json!({"n": n}).to_string();
        let logged = ["FCALL", "tidegate_publish", "1", "tidegate:log", "crowd", &numbered].map(word).to_vec();
        [logged, ["PUBLISH", "tidegate:live:heavy", &large].map(word).to_vec()]
    };
    for from in (from..from + ROUND).step_by(20) {
        let commands: Vec<Vec<Vec<u8>>> = (from..from + 20).flat_map(pair).collect();
        let replies = call_redis(redis.addr(), &commands).await;
        assert_eq!(replies.len(), commands.len(), "{replies:?}");
        assert!(replies.iter().all(|reply| !reply.starts_with('-')), "{replies:?}");
    }
}

/// Somebody who hears the large ones, as far as they come.
async fn hear_heavy(mut client: WsClient) -> usize {
    let mut n_heard = 0;
    loop {
        match client.next().await {
            Heard::Text(text) if text.contains("the last") => return n_heard,
            Heard::Text(_) => n_heard += 1,
            Heard::Ping(_) => {}
            other => panic!("{other:?}"),
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_hub_that_falls_behind_its_link_says_so_and_leaves_nobody_with_a_hole() {
    let redis = RedisServer::plain();
    // Redis would wait for ever: the bound that is met is the gateway's own.
    redis.cli(&["CONFIG", "SET", "client-output-buffer-limit", "pubsub 0 0 0"]);
    let options = on_redis(&redis.url())
        .env("GATEWAY_WORKERS", "1")
        .env("GATEWAY_OUTBOX_BYTES", "64MiB")
        .env("GATEWAY_HISTORY_SIZE", "100000");
    let gateway = GatewayProcess::start(options).await;
    let (mut crowd, claims) = (Vec::new(), hearing(&["crowd"]));
    for _ in 0..CROWD / 2 {
        crowd.push(tokio::join!(ws(gateway.public(), &claims), sse(gateway.public(), &claims)));
    }
    let heavy = tokio::spawn(hear_heavy(ws(gateway.public(), &hearing(&["heavy"])).await));
    let before = resident(&gateway);
    let (mut n, mut most) = (0, 0);
    while !gateway.stderr().contains(OVERRUN) {
        publish(&redis, n).await;
        n += ROUND;
        most = most.max(resident(&gateway).saturating_sub(before));
        assert!(n <= 10_000, "it keeps up, or keeps all of it");
    }
    println!("overrun after {n} numbers; memory grew by at most {most}");
    // Twice the link's bound while its buffer grows, and what waits for the hub behind it.
    assert!(most < 192 << 20, "{most} bytes");
    // All of it, from the link or from the log, and then what comes over the new link.
    publish(&redis, n).await;
    n += ROUND;
    let mut listeners = JoinSet::new();
    for (socket, stream) in crowd {
        listeners.spawn(first_by_ws(socket, n));
        listeners.spawn(first_by_sse(stream, n));
    }
    while let Some(heard) = listeners.join_next().await {
        heard.expect("all in order");
    }
    let repairs = gateway.metric("gateway_redis_repairs_total").await;
    assert!(repairs.is_some_and(|n| n >= 1.0), "{repairs:?}");
    until_open(&gateway, 1).await;
    gateway.publish("heavy", &json!("the last")).await;
    println!("{} of {n} large ones were heard", heavy.await.expect("nothing ended it"));
    assert_eq!(gateway.metric("gateway_gaps_total{reason=\"backplane\"}").await, Some(0.0), "nothing was missed");
    until_open(&gateway, 0).await;
}
