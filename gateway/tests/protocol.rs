//! What goes over an open stream, as the bytes on the wire show it: the real binary, raw clients
//! that send whatever a test can think of, and no other witness.
//!
//! `frames` what a WebSocket peer may send and what it gets for it · `messages` the JSON objects of
//! the protocol, one by one · `sse` the event stream · `crowd` order, slow readers, shared memory.

use std::time::Duration;

use serde_json::{Value, json};
use testkit::gateway::{GatewayOptions, GatewayProcess, token};
use testkit::http::{self, Response};
use testkit::sse::SseClient;
use testkit::ws::{Heard, WsClient};

#[path = "protocol/crowd.rs"]
mod crowd;
#[path = "protocol/frames.rs"]
mod frames;
#[path = "protocol/messages.rs"]
mod messages;
#[path = "protocol/sse.rs"]
mod sse;

/// The longest that a state may take to be reached; nothing is promised by it.
const SOON: Duration = Duration::from_secs(60);

/// A gateway whose limits do not get in the way of a test that is about something else.
fn options() -> GatewayOptions {
    GatewayOptions::new(env!("CARGO_BIN_EXE_tidegate"))
        .patient()
        .env("GATEWAY_ACCEPT_BURST", "100000")
        .env("GATEWAY_ACCEPT_RATE", "100000")
}

/// As `options`, for clients that send a lot.
fn talkative() -> GatewayOptions {
    options().env("GATEWAY_CLIENT_RATE", "1000000").env("GATEWAY_CLIENT_BURST", "1000000")
}

/// A token for user 42 that joins `news` and may ask for `room:…`.
fn usual_token() -> String {
    token(&json!({"sub": "42", "channels": ["news"], "subscribe": ["room:*"]}))
}

fn bearer(token: &str) -> String {
    format!("Bearer {token}")
}

/// A WebSocket with this token, before anything was read from it.
async fn ws_with(gateway: &GatewayProcess, token: &str, path: &str) -> WsClient {
    let opened = WsClient::connect(gateway.public(), path, &[("Authorization", &bearer(token))]).await;
    opened.unwrap_or_else(|refused| panic!("{} {}", refused.status(), refused.text()))
}

/// A WebSocket that is ready.
async fn ws(gateway: &GatewayProcess) -> WsClient {
    let mut client = ws_with(gateway, &usual_token(), "/v1/ws").await;
    client.until("ready").await;
    client
}

/// A stream with this token, before anything was read from it.
async fn sse_with(gateway: &GatewayProcess, token: &str, path: &str) -> SseClient {
    let opened = SseClient::connect(gateway.public(), path, &[("Authorization", &bearer(token))]).await;
    opened.unwrap_or_else(|refused| panic!("{} {}", refused.status(), refused.text()))
}

/// Publishes lines of `{"channel":…,"data":…}` in one call.
async fn publish_lines(gateway: &GatewayProcess, lines: &[String]) {
    let body = lines.join("\n");
    let headers = [("Content-Type", "application/x-ndjson")];
    let answer = http::request(gateway.admin(), "POST", "/v1/publish/batch", &headers, body.as_bytes()).await;
    assert_eq!(answer.status(), 200, "{}", answer.text());
    assert!(!answer.text().contains("\"error\""), "{}", answer.text());
}

/// Publishes a body as it stands.
async fn publish_text(gateway: &GatewayProcess, body: &[u8]) -> Response {
    http::request(gateway.admin(), "POST", "/v1/publish", &[("Content-Type", "application/json")], body).await
}

/// The text of the next message, as it stood in its frame.
async fn next_text(client: &mut WsClient) -> String {
    loop {
        match client.next().await {
            Heard::Text(text) => return text,
            Heard::Ping(_) | Heard::Pong(_) => {}
            other => panic!("{other:?} instead of a message"),
        }
    }
}

/// Resident memory of the gateway in bytes.
fn resident(gateway: &GatewayProcess) -> usize {
    let status = std::fs::read_to_string(format!("/proc/{}/status", gateway.pid())).expect("the process runs");
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).expect("Linux tells VmRSS");
    let kib: usize = line.trim().trim_end_matches(" kB").parse().expect("a number of KiB");
    kib * 1024
}

/// What a token's claims are for a test that ends soon after `seconds`.
fn token_for(seconds: u64) -> String {
    let now = hub::clock::Clock::system().unix().as_secs();
    token(&json!({"sub": "42", "channels": ["news"], "exp": now + seconds}))
}

/// Every `field` of these messages.
fn all<'a>(messages: &'a [Value], field: &str) -> Vec<&'a Value> {
    messages.iter().map(|message| &message[field]).collect()
}
