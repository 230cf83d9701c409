//! Between a publish and the sockets, when somebody on the way is slow, silent, gone or too eager:
//! the real binary, real sockets, raw clients.
//!
//! `order` numbers over two nodes, and what two deployments on one Redis see of each other ·
//! `deployments` with nodes, users and tokens of the same names · `crowd` hundreds on one channel ·
//! `upstream` what Redis is asked for on behalf of clients · `poison` what is no event · `slow` readers
//! that stop · `behind` the gateway's own receiver that lags · `silence` peers that vanish without a
//! word, and those that only say nothing · `churn` what crowds leave behind · `eager` who asks faster
//! than it can be answered · `excess` who sends more than anybody may. What one connection may send
//! stands in `protocol`, what an outage of Redis does in `outage`.

use std::net::SocketAddr;
use std::time::Duration;

use serde_json::{Value, json};
use testkit::gateway::{GatewayOptions, GatewayProcess, token};
use testkit::http;
use testkit::sse::SseClient;
use testkit::ws::WsClient;
use tokio::net::{TcpSocket, TcpStream};
use tokio::time::{Instant, sleep};

#[path = "delivery/behind.rs"]
mod behind;
#[path = "delivery/churn.rs"]
mod churn;
#[path = "delivery/crowd.rs"]
mod crowd;
#[path = "delivery/deployments.rs"]
mod deployments;
#[path = "delivery/eager.rs"]
mod eager;
#[path = "delivery/excess.rs"]
mod excess;
#[path = "delivery/order.rs"]
mod order;
#[path = "delivery/poison.rs"]
mod poison;
#[cfg(target_os = "linux")]
#[path = "delivery/silence.rs"]
mod silence;
#[path = "delivery/slow.rs"]
mod slow;
#[path = "delivery/upstream.rs"]
mod upstream;

/// The longest that a state may take to be reached; nothing is promised by it.
const SOON: Duration = Duration::from_secs(60);

/// A gateway whose limits do not get in the way of a test that is about something else.
fn options() -> GatewayOptions {
    GatewayOptions::new(env!("CARGO_BIN_EXE_tidegate"))
        .patient()
        .env("GATEWAY_ACCEPT_BURST", "100000")
        .env("GATEWAY_ACCEPT_RATE", "100000")
        .env("GATEWAY_USER_CHANNEL", "off")
        .env("GATEWAY_LOG", "warn")
}

fn on_redis(url: &str) -> GatewayOptions {
    options().env("GATEWAY_REDIS_URL", url)
}

fn bearer(claims: &Value) -> String {
    format!("Bearer {}", token(claims))
}

/// Claims of a user who hears these channels and may ask for any `room:…`.
fn hearing(channels: &[&str]) -> Value {
    json!({"sub": "u", "channels": channels, "subscribe": ["room:*"]})
}

/// A WebSocket, ready.
async fn ws(gateway: SocketAddr, claims: &Value) -> WsClient {
    let opened = WsClient::connect(gateway, "/v1/ws", &[("Authorization", &bearer(claims))]).await;
    let mut client = opened.unwrap_or_else(|refused| panic!("{}", refused.text()));
    client.until("ready").await;
    client
}

/// An event stream, ready.
async fn sse(gateway: SocketAddr, claims: &Value) -> SseClient {
    let opened = SseClient::connect(gateway, "/v1/sse", &[("Authorization", &bearer(claims))]).await;
    let mut client = opened.unwrap_or_else(|refused| panic!("{}", refused.text()));
    client.until("ready").await;
    client
}

/// A socket that buffers next to nothing, so that a reader that stops is felt at once.
async fn narrow(gateway: SocketAddr) -> TcpStream {
    let socket = TcpSocket::new_v4().expect("a socket");
    socket.set_recv_buffer_size(4096).expect("an option");
    socket.connect(gateway).await.expect("it listens")
}

async fn narrow_ws(gateway: SocketAddr, claims: &Value) -> WsClient {
    let opened = WsClient::over(narrow(gateway).await, "x", "/v1/ws", &[("Authorization", &bearer(claims))]).await;
    let mut client = opened.unwrap_or_else(|refused| panic!("{}", refused.text()));
    client.until("ready").await;
    client
}

async fn narrow_sse(gateway: SocketAddr, claims: &Value) -> SseClient {
    let opened = SseClient::over(narrow(gateway).await, "x", "/v1/sse", &[("Authorization", &bearer(claims))]).await;
    let mut client = opened.unwrap_or_else(|refused| panic!("{}", refused.text()));
    client.until("ready").await;
    client
}

fn closed(reason: &str) -> String {
    format!("gateway_sessions_closed_total{{reason=\"{reason}\"}}")
}

/// Sessions open by the gateway's own count, both transports.
async fn n_open(gateway: &GatewayProcess) -> f64 {
    let mut n = 0.0;
    for wire in ["ws", "sse"] {
        let gauge = format!("gateway_sessions_open{{transport=\"{wire}\"}}");
        n += gateway.metric(&gauge).await.expect("the gauge is there");
    }
    n
}

/// Waits until something is so; looks each few milliseconds.
async fn until(what: &str, mut is: impl AsyncFnMut() -> bool) {
    let give_up = Instant::now() + SOON;
    while !is().await {
        assert!(Instant::now() < give_up, "never: {what}");
        sleep(Duration::from_millis(20)).await;
    }
}

async fn until_open(gateway: &GatewayProcess, n: usize) {
    until(&format!("{n} sessions"), async || n_open(gateway).await == n as f64).await;
}

/// Connections of the public port that the kernel holds for the gateway, in whatever state before the end.
fn n_sockets(gateway: &GatewayProcess) -> usize {
    let local = format!(":{:04X}", gateway.public().port());
    let table = std::fs::read_to_string("/proc/net/tcp").expect("Linux has a table");
    let is_held = |line: &&str| {
        let mut fields = line.split_whitespace().skip(1);
        let (at, _, state) = (fields.next(), fields.next(), fields.next());
        // Neither the listener (0A) nor what only the kernel remembers (06, and without an inode).
        let is_process_s = fields.nth(5).is_some_and(|inode| inode != "0");
        at.is_some_and(|at| at.ends_with(&local)) && !matches!(state, Some("0A" | "06")) && is_process_s
    };
    table.lines().filter(is_held).count()
}

/// Publishes lines of `{"channel":…,"data":…}` in one call.
async fn publish_lines(admin: SocketAddr, lines: &[String]) {
    let headers = [("Content-Type", "application/x-ndjson")];
    let answer = http::request(admin, "POST", "/v1/publish/batch", &headers, lines.join("\n").as_bytes()).await;
    assert_eq!(answer.status(), 200, "{}", answer.text());
    assert!(!answer.text().contains("\"error\""), "{}", answer.text());
}

/// What `/proc/<pid>/status` says of this field.
fn status(gateway: &GatewayProcess, field: &str) -> usize {
    let status = std::fs::read_to_string(format!("/proc/{}/status", gateway.pid())).expect("the process runs");
    let line = status.lines().find_map(|line| line.strip_prefix(field)).expect("Linux tells it");
    line.trim_start_matches(':').trim().trim_end_matches(" kB").parse().expect("a number")
}

/// Resident memory in bytes.
fn resident(gateway: &GatewayProcess) -> usize {
    status(gateway, "VmRSS") * 1024
}
