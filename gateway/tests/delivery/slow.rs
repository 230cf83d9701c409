//! Readers that stop: what waits for them is bounded, they are ended at the cap or the deadline and
//! their sockets are free in the close timeout, and nobody else misses anything.

use serde_json::{Value, json};
use testkit::gateway::GatewayProcess;
use testkit::sse::{self, SseClient};
use testkit::ws::{Heard, WsClient};

use super::{
    bearer, closed, hearing, n_open, n_sockets, narrow_sse, narrow_ws, options, resident, until, until_open, ws,
};

/// Clients that never read, on both transports.
struct Stalled {
    ws: Vec<WsClient>,
    sse: Vec<SseClient>,
}

impl Stalled {
    async fn on(gateway: &GatewayProcess, each: usize) -> Self {
        let mut stalled = Self { ws: Vec::new(), sse: Vec::new() };
        for _ in 0..each {
            stalled.ws.push(narrow_ws(gateway.public(), &hearing(&["news"])).await);
            stalled.sse.push(narrow_sse(gateway.public(), &hearing(&["news"])).await);
        }
        stalled
    }
}

fn large(n: usize) -> Value {
    json!({"n": n, "pad": "x".repeat(30_000)})
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn whoever_stops_at_its_cap_is_gone_in_the_close_timeout_though_it_never_reads() {
    const STALLED: usize = 10;
    const READING: usize = 10;
    const CAP: usize = 256 << 10;
    let options = options()
        .env("GATEWAY_OUTBOX_BYTES", "256KiB")
        .env("GATEWAY_CLOSE_TIMEOUT", "1s")
        // What is kept for others is not what waits for these.
        .env("GATEWAY_HISTORY_SIZE", "1");
    let gateway = GatewayProcess::start(options).await;
    let stalled = Stalled::on(&gateway, STALLED / 2).await;
    let mut reading = Vec::new();
    for _ in 0..READING {
        reading.push(ws(gateway.public(), &hearing(&["news"])).await);
    }
    let before = resident(&gateway);
    let (mut n, mut grown) = (0, 0);
    // At the readers' pace, until the last that stopped has filled its kernel's buffers and its cap
    // and was cut.
    while gateway.metric(&closed("slow")).await != Some(STALLED as f64) {
        gateway.publish("news", &large(n)).await;
        for client in &mut reading {
            let heard = client.json().await;
            assert_eq!(heard["data"]["n"], n, "{heard}");
        }
        n += 1;
        grown = grown.max(resident(&gateway).saturating_sub(before));
        assert!(n < 3_000, "{} open after {n} events", n_open(&gateway).await);
    }
    until_open(&gateway, READING).await;
    until("the sockets are free", async || n_sockets(&gateway) == READING).await;
    println!("memory grew by at most {grown} while {n} events were published");
    // What waits at the cap is the same for all on a wire; the rest comes and goes with the calls.
    assert!(grown < 2 * CAP + (6 << 20), "{grown} bytes after {n} events");
    drop(stalled);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_write_past_its_deadline_ends_both_transports_alike_and_they_may_resume() {
    const N: usize = 400;
    let gateway = GatewayProcess::start(
        options()
            .env("GATEWAY_OUTBOX_BYTES", "64MiB")
            .env("GATEWAY_WRITE_TIMEOUT", "1s")
            .env("GATEWAY_CLOSE_TIMEOUT", "1s")
            .env("GATEWAY_HISTORY_SIZE", "10000")
            .env("GATEWAY_REPLAY_MAX", "10000"),
    )
    .await;
    let mut stalled = Stalled::on(&gateway, 3).await;
    let mut reading = ws(gateway.public(), &hearing(&["news"])).await;
    // More than the kernels between hold, less than the cap.
    for n in 0..N {
        gateway.publish("news", &large(n)).await;
        assert_eq!(reading.json().await["data"]["n"], n);
    }
    gateway.until_metric(&closed("slow"), 6.0).await;
    until_open(&gateway, 1).await;
    until("the sockets are free", async || n_sockets(&gateway) == 1).await;
    // What had reached each is whole, in order, and a place to go on from.
    let (mut stream, mut socket) = (stalled.sse.remove(0), stalled.ws.remove(0));
    let (mut n_stream, mut cursor) = (0, String::new());
    while let sse::Heard::Block(block) = stream.next().await {
        if block.event.is_none() && !block.is_comment() {
            assert_eq!(block.json()["data"]["n"], n_stream);
            (n_stream, cursor) = (n_stream + 1, block.id.expect("logged"));
        }
    }
    assert_resumes(&gateway, &cursor, n_stream, N).await;
    let mut n_socket = 0;
    while let Heard::Text(text) = socket.next().await {
        let message: Value = serde_json::from_str(&text).expect("JSON");
        if message["type"] == "event" {
            assert_eq!(message["data"]["n"], n_socket);
            (n_socket, cursor) = (n_socket + 1, message["id"].as_str().expect("logged").to_owned());
        }
    }
    assert_resumes(&gateway, &cursor, n_socket, N).await;
}

async fn assert_resumes(gateway: &GatewayProcess, cursor: &str, from: usize, to: usize) {
    let auth = bearer(&hearing(&["news"]));
    let headers = [("Authorization", auth.as_str()), ("Last-Event-ID", cursor)];
    let mut again = WsClient::connect(gateway.public(), "/v1/ws", &headers).await.expect("let in again");
    let messages = again.until("ready").await;
    let numbers: Vec<u64> =
        messages.iter().filter(|m| m["type"] == "event").map(|m| m["data"]["n"].as_u64().expect("numbered")).collect();
    assert!(numbers.iter().copied().eq(from as u64..to as u64), "{from}..{to}, got {numbers:?}");
    assert_eq!(messages.last().expect("ready")["resume"], "ok");
}
