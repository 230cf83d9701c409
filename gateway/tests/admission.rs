//! Who is let in and how the others are told: the real binary, whole requests byte by byte, and
//! what came back over the wire.
//!
//! `heads` the request itself · `tokens` who somebody is · `keys` by whose key · `limits` how many at once · `origins`
//! from which page · `channels` what may be heard · `redis` a revocation list that is late or away ·
//! `fleet` what nodes decide together · `holds` how they are kept from moving anybody · `storms` what a crowd costs · `secrets` what never reaches a log · `admin` the back ends' API and the command line.

use std::io::Write;
use std::process::{Command, Stdio};
use std::time::Duration;

use serde_json::{Value, json};
use testkit::gateway::{GatewayOptions, GatewayProcess, token};
use testkit::http::{self, Response, Wire};
use testkit::ws::WsClient;
use tokio::net::TcpStream;
use tokio::time::timeout;

#[path = "admission/admin.rs"]
mod admin;
#[path = "admission/channels.rs"]
mod channels;
#[path = "admission/fleet.rs"]
mod fleet;
#[path = "admission/heads.rs"]
mod heads;
#[path = "admission/holds.rs"]
mod holds;
#[path = "admission/keys.rs"]
mod keys;
#[path = "admission/limits.rs"]
mod limits;
#[path = "admission/origins.rs"]
mod origins;
#[path = "admission/redis.rs"]
mod redis;
#[path = "admission/secrets.rs"]
mod secrets;
#[path = "admission/storms.rs"]
mod storms;
#[path = "admission/tokens.rs"]
mod tokens;

/// The longest that a state may take to be reached; nothing is promised by it.
const SOON: Duration = Duration::from_secs(60);

/// A handshake as a browser's, less the request line and `Host`.
const UPGRADE: [(&str, &str); 4] = [
    ("Connection", "Upgrade"),
    ("Upgrade", "websocket"),
    ("Sec-WebSocket-Version", "13"),
    ("Sec-WebSocket-Key", "dGhlIHNhbXBsZSBub25jZQ=="),
];

/// A gateway whose limits do not get in the way of a test that is about something else.
fn options() -> GatewayOptions {
    GatewayOptions::new(env!("CARGO_BIN_EXE_tidegate"))
        .patient()
        .env("GATEWAY_ACCEPT_BURST", "100000")
        .env("GATEWAY_ACCEPT_RATE", "100000")
}

/// A token for user 42 that joins `news` and may ask for `room:…`.
fn usual_token() -> String {
    token(&json!({"sub": "42", "channels": ["news"], "subscribe": ["room:*"]}))
}

fn bearer(token: &str) -> String {
    format!("Bearer {token}")
}

/// Now, in Unix seconds.
fn now() -> u64 {
    hub::clock::Clock::system().unix().as_secs()
}

/// An open WebSocket, or the refusal.
async fn try_ws(gateway: &GatewayProcess, path: &str, headers: &[(&str, &str)]) -> Result<WsClient, Response> {
    WsClient::connect(gateway.public(), path, headers).await
}

/// An open WebSocket with the usual token, ready.
async fn ws(gateway: &GatewayProcess) -> WsClient {
    let opened = try_ws(gateway, "/v1/ws", &[("Authorization", &bearer(&usual_token()))]).await;
    let mut client = opened.unwrap_or_else(|refused| panic!("{} {}", refused.status(), refused.text()));
    client.until("ready").await;
    client
}

/// What came of a handshake: 101, or the status and `code` of the refusal.
async fn outcome(gateway: &GatewayProcess, path: &str, headers: &[(&str, &str)]) -> (u16, String) {
    match try_ws(gateway, path, headers).await {
        Ok(_) => (101, String::new()),
        Err(refused) => (refused.status(), code_of(&refused)),
    }
}

/// As `outcome`, with this token as the `Authorization`.
async fn with_token(gateway: &GatewayProcess, token: &str) -> (u16, String) {
    outcome(gateway, "/v1/ws", &[("Authorization", &bearer(token))]).await
}

fn code_of(refused: &Response) -> String {
    serde_json::from_slice::<Value>(&refused.body)
        .ok()
        .and_then(|problem| problem["code"].as_str().map(str::to_owned))
        .unwrap_or_default()
}

fn refused(status: u16, code: &str) -> (u16, String) {
    (status, code.to_owned())
}

/// What OpenSSL makes of it: keys that this project did not make itself.
fn openssl(args: &[&str], input: &str) -> String {
    let mut child = Command::new("openssl")
        .args(args)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .expect("openssl is installed");
    child.stdin.take().expect("piped").write_all(input.as_bytes()).expect("it reads");
    let output = child.wait_with_output().expect("it ends");
    assert!(output.status.success(), "openssl {args:?}");
    String::from_utf8(output.stdout).expect("PEM is text")
}

/// A request's head as bytes.
fn head(line: &str, headers: &[(&str, &str)]) -> Vec<u8> {
    let mut text = format!("{line} HTTP/1.1\r\nHost: gateway.test\r\n");
    for (name, value) in headers {
        text.push_str(&format!("{name}: {value}\r\n"));
    }
    text.push_str("\r\n");
    text.into_bytes()
}

/// Sends these bytes and reads one answer. `None`: the connection was ended without one.
async fn raw(gateway: &GatewayProcess, request: &[u8]) -> Option<Response> {
    let mut wire = Wire::new(TcpStream::connect(gateway.public()).await.expect("it listens"));
    // It may have answered and gone before all was sent.
    let _ = wire.send(request).await;
    answer(&mut wire).await
}

/// The next answer on a connection, if there is one.
async fn answer(wire: &mut Wire) -> Option<Response> {
    let exchange = async {
        let head = wire.head().await.ok()?;
        let is_stream = head.header("content-type") == Some("text/event-stream");
        let body =
            if is_stream { wire.chunk().await.ok()?.unwrap_or_default() } else { wire.body(&head).await.ok()? };
        Some(Response { head, body })
    };
    timeout(SOON, exchange).await.expect("an answer or an end in time")
}

/// Revokes through the admin API.
async fn revoke(gateway: &GatewayProcess, what: &Value) {
    let answer = http::post_json(gateway.admin(), "/v1/revocations", what).await;
    assert_eq!(answer.status(), 204, "{}", answer.text());
}
