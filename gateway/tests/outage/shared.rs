//! Whose fault an outage is: one node that is cut off from a Redis which the others reach turns
//! unready, and its clients keep their sockets; a Redis that is gone for all takes no node from the
//! balancer where readiness is set to leave it out.

use std::time::Duration;

use serde_json::json;
use testkit::gateway::{GatewayOptions, GatewayProcess, token};
use testkit::http;
use testkit::proxy::Proxy;
use testkit::redis::RedisServer;
use testkit::ws::WsClient;
use tokio::task::block_in_place;
use tokio::time::{Instant, sleep};

use super::{options, until_data, ws};

const GRACE: Duration = Duration::from_secs(1);

async fn three(options: [GatewayOptions; 3]) -> [GatewayProcess; 3] {
    let [a, b, c] = options.map(GatewayProcess::start);
    tokio::join!(a, b, c).into()
}

/// Two sessions on each node, ready.
async fn sessions(gateways: &[GatewayProcess; 3]) -> Vec<WsClient> {
    let mut clients = Vec::new();
    for gateway in gateways {
        for _ in 0..2 {
            let mut client = ws(gateway, &["news"]).await;
            client.until("ready").await;
            clients.push(client);
        }
    }
    clients
}

async fn readiness(gateway: &GatewayProcess) -> u16 {
    http::get(gateway.probes(), "/readyz").await.status()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_of_three_that_is_cut_off_alone_turns_unready_and_keeps_its_sessions() {
    let redis = RedisServer::plain();
    let wire = Proxy::start(redis.addr()).await;
    let graced = |url: String| options(&url).patient().env("GATEWAY_READY_REDIS_GRACE", "1s");
    let gateways = three([graced(redis.url_at(wire.port())), graced(redis.url()), graced(redis.url())]).await;
    let [cut_off, b, c] = &gateways;
    let mut clients = sessions(&gateways).await;

    let cut = Instant::now();
    wire.close();
    cut_off.until_status("/readyz", 503).await;
    assert!(cut.elapsed() >= GRACE, "{:?}", cut.elapsed());
    let said = http::get(cut_off.probes(), "/readyz").await.json();
    assert_eq!(said["reasons"], json!(["pubsub_down"]), "{said}");
    assert_eq!(http::get(cut_off.probes(), "/livez").await.status(), 200);
    // The others go on as if nothing were: ready, open to newcomers, heard by their own.
    for gateway in [b, c] {
        assert_eq!(readiness(gateway).await, 200);
        ws(gateway, &["news"]).await.until("ready").await;
    }
    b.publish("news", &json!("meanwhile")).await;
    for client in &mut clients[2..] {
        until_data(client, "meanwhile").await;
    }
    assert_eq!(cut_off.metric("gateway_sessions_open{transport=\"ws\"}").await, Some(2.0));

    wire.open();
    cut_off.until_status("/readyz", 200).await;
    // On the sockets that they had all the time.
    for client in &mut clients[..2] {
        until_data(client, "meanwhile").await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn three_nodes_that_lose_their_redis_together_may_stay_ready_and_keep_all_sessions() {
    let mut redis = RedisServer::plain();
    let looks_away = || {
        let quick = options(&redis.url()).env("GATEWAY_READY_REDIS_GRACE", "1s").env("GATEWAY_AUTH_TIMEOUT", "2s");
        quick.env("GATEWAY_READY_REDIS", "off").env("GATEWAY_REDIS_TIMEOUT", "1s")
    };
    let gateways = three([looks_away(), looks_away(), looks_away()]).await;
    let mut clients = sessions(&gateways).await;

    block_in_place(|| redis.kill9());
    for gateway in &gateways {
        gateway.until_metric("gateway_redis_up{link=\"pubsub\"}", 0.0).await;
    }
    // Over the grace after which a node that looks at Redis would have turned unready.
    let until = Instant::now() + 2 * GRACE;
    while Instant::now() < until {
        for gateway in &gateways {
            assert_eq!(readiness(gateway).await, 200, "{}", gateway.stderr());
        }
        sleep(Duration::from_millis(50)).await;
    }
    // Who comes now is refused for now, by a node that can say when; who was there is still there.
    for (gateway, pair) in gateways.iter().zip(clients.chunks_mut(2)) {
        let bearer = format!("Bearer {}", token(&json!({"sub": "new"})));
        let refused = WsClient::connect(gateway.public(), "/v1/ws", &[("Authorization", &bearer)]).await;
        let refused = refused.err().expect("nobody can say whether the token was revoked");
        assert_eq!((refused.status(), &refused.json()["code"]), (503, &json!("auth_unavailable")));
        assert!(refused.header("retry-after").is_some(), "{}", refused.text());
        for client in pair {
            client.send_json(&json!({"type": "ping"})).await;
            client.until("pong").await;
        }
    }

    block_in_place(|| redis.restart());
    for gateway in &gateways {
        gateway.until_metric("gateway_redis_up{link=\"pubsub\"}", 1.0).await;
    }
    for client in &mut clients {
        // It came back empty, which they are told; they hear again on the sockets that they had.
        client.until("ready").await;
    }
    gateways[0].publish_once_it_can("news", &json!("again")).await;
    for client in &mut clients {
        until_data(client, "again").await;
    }
}
