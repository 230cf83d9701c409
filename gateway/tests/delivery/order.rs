//! Numbers stay in order over two nodes whatever their size, and nothing crosses between two
//! deployments on one Redis.

use serde_json::{Value, json};
use testkit::gateway::GatewayProcess;
use testkit::http;
use testkit::redis::RedisServer;
use testkit::sse::SseClient;
use testkit::ws::WsClient;
use tokio::task::JoinSet;

use super::{hearing, on_redis, publish_lines, sse, until, until_open, ws};

/// How many are published; every second one of 1.5 KB, every hundredth of 200 KB.
const N: usize = 10_000;

fn numbered(i: usize) -> String {
    let pad = match i {
        i if i % 100 == 50 => 200_000,
        i if i % 2 == 1 => 1_500,
        _ => 1,
    };
    format!(r#"{{"channel":"news","data":{{"n":{i},"pad":"{}"}}}}"#, "x".repeat(pad))
}

/// An id as the two numbers that it is compared by.
fn id_of(text: &str) -> (u64, u64) {
    let (ms, n) = text.split_once('-').expect("an id");
    (ms.parse().expect("ms"), n.parse().expect("n"))
}

/// Fails where an event is not the next one, or its id does not rise.
#[derive(Default)]
pub(super) struct Next {
    pub(super) n: u64,
    id: (u64, u64),
}

impl Next {
    pub(super) fn take(&mut self, event: &Value) {
        assert_eq!(event["data"]["n"], self.n, "in order: {}", event["id"]);
        let id = id_of(event["id"].as_str().expect("logged"));
        assert!(id > self.id, "{id:?} after {:?}", self.id);
        (self.n, self.id) = (self.n + 1, id);
    }
}

/// The first `n`, and nothing else before or between them.
pub(super) async fn first_by_ws(mut client: WsClient, n: usize) {
    let mut next = Next::default();
    while next.n < n as u64 {
        next.take(&client.json().await);
    }
}

/// As `first_by_ws`.
pub(super) async fn first_by_sse(mut stream: SseClient, n: usize) {
    let mut next = Next::default();
    while next.n < n as u64 {
        let block = stream.block().await;
        let event = block.json();
        assert_eq!(event["id"].as_str(), block.id.as_deref(), "the block's id is the event's");
        next.take(&event);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn ten_thousand_numbers_of_alternating_size_arrive_in_order_on_two_nodes() {
    let redis = RedisServer::plain();
    // Nobody is slow here: all of it fits an outbox, the log and the link.
    redis.cli(&["CONFIG", "SET", "client-output-buffer-limit", "pubsub 256mb 256mb 60"]);
    let options = || {
        on_redis(&redis.url())
            .env("GATEWAY_MAX_MESSAGE", "256KiB")
            .env("GATEWAY_OUTBOX_BYTES", "64MiB")
            .env("GATEWAY_HISTORY_SIZE", "20000")
    };
    let (a, b) = tokio::join!(GatewayProcess::start(options()), GatewayProcess::start(options()));
    let mut listeners = JoinSet::new();
    for node in [&a, &b] {
        for _ in 0..4 {
            listeners.spawn(first_by_ws(ws(node.public(), &hearing(&["news"])).await, N));
            listeners.spawn(first_by_sse(sse(node.public(), &hearing(&["news"])).await, N));
        }
    }
    // By both nodes in turn, each batch after the last was acknowledged: numbers in the order of ids.
    for (i, from) in (0..N).step_by(200).enumerate() {
        let lines: Vec<String> = (from..from + 200).map(numbered).collect();
        publish_lines([&a, &b][i % 2].admin(), &lines).await;
    }
    while let Some(heard) = listeners.join_next().await {
        heard.expect("all in order");
    }
    // Each delivery was counted once, whoever wrote it.
    for node in [&a, &b] {
        for transport in ["ws", "sse"] {
            let delivered = format!("gateway_events_delivered_total{{transport=\"{transport}\"}}");
            node.until_metric(&delivered, (4 * N) as f64).await;
        }
        assert!(node.metric("gateway_delivery_seconds_count").await.is_some_and(|n| n > 0.0));
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_deployments_on_one_redis_do_not_count_list_or_end_each_others_sessions() {
    let redis = RedisServer::plain();
    // One prefix begins with the other.
    let of = |prefix: &str| {
        let options = on_redis(&redis.url()).env("GATEWAY_REDIS_PREFIX", prefix).env("GATEWAY_FLEET_REPORT", "1s");
        GatewayProcess::start(options.env("GATEWAY_NODE", format!("node-of-{prefix}")))
    };
    let (a, ab) = tokio::join!(of("a"), of("ab"));
    let mut clients = [ws(a.public(), &hearing(&[])).await, ws(ab.public(), &hearing(&[])).await];
    let _third = ws(ab.public(), &json!({"sub": "another"})).await;
    for (gateway, name, n) in [(&a, "node-of-a", 1), (&ab, "node-of-ab", 2)] {
        let is_alone = async || {
            let fleet = http::get(gateway.admin(), "/v1/fleet").await.json();
            let rows = fleet["nodes"].as_array().expect("rows");
            assert!(rows.len() <= 1, "{fleet}");
            rows.first().is_some_and(|row| row["node"] == name && row["sessions"] == n) && fleet["total"] == n
        };
        until("its own sessions in its own fleet", is_alone).await;
        let listed = http::get(gateway.admin(), "/v1/sessions?user=u").await.json();
        assert_eq!(listed["sessions"].as_array().map(Vec::len), Some(1), "{listed}");
        assert_eq!(listed["missing"], json!([]), "{listed}");
    }
    // A hold and an end in one of them.
    let held = http::post_json(a.admin(), "/v1/fleet/hold", &json!({"for": "15m", "reason": "a's own"})).await;
    assert_eq!(held.status(), 200, "{}", held.text());
    let ended = http::request(a.admin(), "DELETE", "/v1/sessions?user=u", &[], b"").await;
    assert!(matches!(ended.status(), 200 | 202 | 204), "{} {}", ended.status(), ended.text());
    assert_eq!(clients[0].until_closed().await.1, 4403);
    let _ = clients[0].send_close(4403, "").await;
    clients[1].send_json(&json!({"type": "ping"})).await;
    assert_eq!(clients[1].json().await["type"], "pong");
    let other = http::get(ab.admin(), "/v1/fleet").await.text().to_owned();
    assert!(!other.contains("a's own"), "{other}");
    until_open(&ab, 2).await;
}
