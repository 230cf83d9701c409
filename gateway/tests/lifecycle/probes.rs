//! What an orchestrator asks: answered whatever the node is busy with, and never flapping.

use std::time::Duration;

use serde_json::{Value, json};
use testkit::gateway::GatewayProcess;
use testkit::http;
use testkit::redis::RedisServer;
use testkit::ws::WsClient;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep};

use crate::{claims, options, until_open, ws};

const LOOK: Duration = Duration::from_millis(20);

async fn readiness(gateway: &GatewayProcess) -> Value {
    http::get(gateway.probes(), "/readyz").await.json()
}

/// For some ten looks of the node at itself it says the same.
async fn stays(gateway: &GatewayProcess, is_ready: bool) {
    let until = Instant::now() + Duration::from_secs(1);
    while Instant::now() < until {
        let said = readiness(gateway).await;
        assert_eq!(said["ready"], is_ready, "{said}");
        sleep(LOOK).await;
    }
}

#[tokio::test]
async fn a_full_node_says_so_serves_on_and_does_not_waver_at_the_threshold() {
    let gateway = GatewayProcess::start(options().env("GATEWAY_MAX_SESSIONS", "20")).await;
    let mut held = Vec::new();
    for i in 0..18 {
        held.push(ws(&gateway, &claims(&format!("u{i}"))).await);
    }
    stays(&gateway, true).await;
    // 95 %: unready, and still nobody is refused or moved.
    held.push(ws(&gateway, &claims("the nineteenth")).await);
    gateway.until_status("/readyz", 503).await;
    assert_eq!(readiness(&gateway).await["reasons"], json!(["at_capacity"]));
    held.push(ws(&gateway, &claims("the twentieth")).await);
    // 90 % is not yet below it.
    held.truncate(18);
    until_open(&gateway, 18.0).await;
    stays(&gateway, false).await;
    held.pop();
    gateway.until_status("/readyz", 200).await;
    for client in &mut held {
        client.send_json(&json!({"type": "ping"})).await;
        client.until("pong").await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_storm_delays_no_probe_and_kills_nobody() {
    const LANES: usize = 40;
    let small =
        options().env("GATEWAY_WORKERS", "1").env("GATEWAY_ACCEPT_BURST", "10").env("GATEWAY_ACCEPT_RATE", "10");
    let gateway = GatewayProcess::start(small).await;
    let (public, until) = (gateway.public(), Instant::now() + Duration::from_secs(3));
    let mut storm = JoinSet::new();
    for lane in 0..LANES {
        storm.spawn(async move {
            let auth = crate::bearer(&claims(&format!("lane{lane}")));
            let mut n = 0;
            while Instant::now() < until {
                let _ = WsClient::connect(public, "/v1/ws", &[("Authorization", &auth)]).await;
                n += 1;
            }
            n
        });
    }
    let mut n_asked = 0;
    while Instant::now() < until {
        for path in ["/livez", "/metrics", "/startupz"] {
            // As long as an orchestrator waits for readiness; it waits longer for the others.
            let asked = tokio::time::timeout(Duration::from_secs(2), http::get(gateway.probes(), path)).await;
            assert_eq!(asked.expect("in time").status(), 200, "{path}");
            n_asked += 1;
        }
    }
    let n: usize = storm.join_all().await.into_iter().sum();
    assert!(n > LANES && n_asked > 10, "{n} handshakes and {n_asked} probes");
    assert_eq!(http::get(gateway.probes(), "/livez").await.status(), 200);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_redis_that_stands_still_is_no_reason_to_restart_nor_if_so_set_to_send_nobody() {
    let redis = RedisServer::plain();
    let on = || options().env("GATEWAY_REDIS_URL", redis.url()).env("GATEWAY_READY_REDIS_GRACE", "1s");
    let (looks, looks_away) =
        tokio::join!(GatewayProcess::start(on()), GatewayProcess::start(on().env("GATEWAY_READY_REDIS", "off")));
    redis.pause();
    looks.until_status("/readyz", 503).await;
    let reasons = readiness(&looks).await["reasons"].clone();
    assert!(reasons == json!(["pubsub_down"]) || reasons == json!(["pubsub_deaf"]), "{reasons}");
    stays(&looks_away, true).await;
    for gateway in [&looks, &looks_away] {
        assert_eq!(http::get(gateway.probes(), "/livez").await.status(), 200);
    }
    redis.resume();
    looks.until_status("/readyz", 200).await;
}
