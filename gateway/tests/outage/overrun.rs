//! A node that cannot keep up with Redis: it stands still, Redis gives it up, and nobody who is
//! connected to it misses anything.

use std::time::Duration;

use serde_json::json;
use testkit::gateway::{GatewayProcess, Signal, token};
use testkit::numbered::{Follower, Publisher, Route, Transport};
use testkit::redis::RedisServer;
use tokio::time::Instant;

use super::{CHANNELS, Crowd, assert_nobody_noticed, options, ws};

fn n_links(redis: &RedisServer) -> usize {
    redis.cli(&["CLIENT", "LIST", "TYPE", "pubsub"]).lines().filter(|line| !line.is_empty()).count()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_node_that_redis_gives_up_as_too_slow_makes_up_for_what_it_missed() {
    let redis = RedisServer::plain();
    redis.cli(&["CONFIG", "SET", "client-output-buffer-limit", "pubsub 1mb 512kb 1"]);
    // Who reads is never too slow here: it is about the link.
    let roomy = || options(&redis.url()).patient().env("GATEWAY_OUTBOX_BYTES", "64MiB");
    let (a, b) = tokio::join!(GatewayProcess::start(roomy()), GatewayProcess::start(roomy()));
    let mut followers = Vec::new();
    for i in 0..8 {
        let transport = Transport::ALL[i % 2];
        let token = token(&json!({"sub": "u", "channels": CHANNELS}));
        let mut follower = Follower::new(format!("{transport:?} {i}"), transport, &token, &CHANNELS);
        follower.connect(a.public()).await;
        follower.until(|message| message["type"] == "ready").await;
        followers.push(follower);
    }
    // Somebody on the same node hears what fills the link.
    let mut heavy = ws(&a, &["heavy"]).await;
    heavy.until("ready").await;
    let heavily = tokio::spawn(async move { while heavy.json().await["data"] != "the last" {} });
    let crowd = Crowd::listening(followers);
    let publisher = Publisher::start(&CHANNELS, vec![Route::Admin(b.admin())], 500);
    publisher.more(100).await;

    a.signal(Signal::Stop);
    let until = Instant::now() + Duration::from_secs(60);
    let data = json!("x".repeat(60_000));
    while n_links(&redis) == 2 {
        // More than the kernels hold, in the midst of one of these: what is cut is cut in two.
        for _ in 0..20 {
            b.publish("heavy", &data).await;
        }
        assert!(Instant::now() < until, "Redis keeps the link: {}", redis.cli(&["CLIENT", "LIST"]));
    }
    publisher.more(100).await;
    a.signal(Signal::Cont);
    a.until_status("/readyz", 200).await;
    publisher.more(200).await;
    b.publish("heavy", &json!("the last")).await;
    let ledger = publisher.stop().await;
    assert_nobody_noticed(&ledger, &crowd.at_the_end().await);
    heavily.await.expect("nothing ended it");
    let repairs = a.metric("gateway_redis_repairs_total").await;
    assert!(repairs.is_some_and(|n| n >= 1.0), "{repairs:?}");
    assert!(!a.stderr().contains("panicked"), "{}", a.stderr());
}
