//! How sessions and the process itself end, seen from outside: the real binary, real signals, raw
//! clients. `signals` (what stops it, and when), `drain` (how everybody leaves), `midway` (who and
//! what is on its way then), `grace` (how long whoever runs it waits), `gone` (who left while it
//! stood still), `recycle` (ages), `shed` (moves to a node with room), `fleet` (when nobody is to
//! move), `balancers` (all that behind HAProxy and nginx), `returns` (everybody at once), `endings`
//! (every other reason with its words), `calls` (back ends that are in the middle of one), `books`
//! (what is counted is what is there), `probes` (what an orchestrator is told meanwhile).
//!
//! A reason that no mechanism of this build gives (`overload`) has no test here; `replaced` is a
//! fleet's, with admission.

mod balancers;
mod books;
mod calls;
mod drain;
mod endings;
mod fleet;
mod gone;
mod grace;
mod midway;
mod probes;
mod recycle;
mod returns;
mod shed;
mod signals;

use std::net::SocketAddr;
use std::time::Duration;

use serde_json::{Value, json};
use testkit::gateway::{GatewayOptions, GatewayProcess, token};
use testkit::sse::{self, SseClient};
use testkit::ws::WsClient;
use tokio::net::{TcpSocket, TcpStream};
use tokio::time::Instant;

/// The binary under test.
const TIDEGATE: &str = env!("CARGO_BIN_EXE_tidegate");

/// A process that has nothing left to do is gone within this, also on a busy machine. Shorter than
/// whatever it must not wait for: a grace of 30 s, a deadline of two minutes.
const SOON: Duration = Duration::from_secs(20);

/// A gateway that lets a test's crowd in at once, and waits for a Redis that is busy.
fn options() -> GatewayOptions {
    GatewayOptions::new(TIDEGATE)
        .patient()
        .env("GATEWAY_ACCEPT_BURST", "5000")
        .env("GATEWAY_ACCEPT_RATE", "5000")
        .env("GATEWAY_HANDSHAKES", "5000")
}

fn bearer(claims: &Value) -> String {
    format!("Bearer {}", token(claims))
}

/// Opens a WebSocket and reads up to `ready`.
async fn ws(gateway: &GatewayProcess, claims: &Value) -> WsClient {
    let mut client = ws_unread(gateway.public(), claims).await;
    client.until("ready").await;
    client
}

async fn ws_unread(public: SocketAddr, claims: &Value) -> WsClient {
    WsClient::connect(public, "/v1/ws", &[("Authorization", &bearer(claims))])
        .await
        .unwrap_or_else(|refused| panic!("{}", refused.text()))
}

/// A connection whose kernel takes little before its reader must read.
async fn small(public: SocketAddr) -> TcpStream {
    let socket = TcpSocket::new_v4().unwrap();
    socket.set_recv_buffer_size(4096).unwrap();
    socket.connect(public).await.unwrap()
}

async fn ws_small(public: SocketAddr, claims: &Value) -> WsClient {
    let mut client = WsClient::over(small(public).await, "gateway", "/v1/ws", &[("Authorization", &bearer(claims))])
        .await
        .unwrap_or_else(|refused| panic!("{}", refused.text()));
    client.until("ready").await;
    client
}

async fn sse_small(public: SocketAddr, claims: &Value) -> SseClient {
    let mut client = SseClient::over(small(public).await, "gateway", "/v1/sse", &[("Authorization", &bearer(claims))])
        .await
        .unwrap_or_else(|refused| panic!("{}", refused.text()));
    client.until("ready").await;
    client
}

/// Opens an event stream and reads up to `ready`.
async fn sse(gateway: &GatewayProcess, claims: &Value) -> SseClient {
    let mut client = SseClient::connect(gateway.public(), "/v1/sse", &[("Authorization", &bearer(claims))])
        .await
        .unwrap_or_else(|refused| panic!("{}", refused.text()));
    client.until("ready").await;
    client
}

/// How a client saw its session end.
#[derive(Debug)]
struct Ending {
    at: Instant,
    /// The close code; an SSE body that ended as it should has none.
    code: Option<u16>,
    /// The last message, which is the `bye` where there was one.
    bye: Value,
    /// `retry:` of the SSE block that carried it.
    retry: Option<u64>,
}

impl Ending {
    /// Reason, close code, `reconnect`; and checks that `bye` announced the close that came.
    fn words(&self) -> (&str, u16, &str) {
        let bye = &self.bye;
        assert_eq!(bye["type"], "bye", "{self:?}");
        let is_final = bye["reconnect"] == "never";
        let after = bye["after_ms"].as_u64();
        assert!(after.is_some() || is_final, "after_ms in {bye}");
        let code = u16::try_from(bye["code"].as_u64().unwrap_or_else(|| panic!("code in {bye}"))).unwrap();
        if let Some(seen) = self.code {
            assert_eq!(seen, code, "the code that bye announced");
        } else {
            // An EventSource is never told 0: it would come back within the same moment, for ever.
            assert_eq!(self.retry, if is_final { Some(86_400_000) } else { after.map(|ms| ms.max(1)) }, "{self:?}");
        }
        (bye["reason"].as_str().unwrap(), code, bye["reconnect"].as_str().unwrap())
    }
}

/// Reads to the close as a browser does: answers it, then the connection is over.
async fn ws_end(mut client: WsClient) -> Ending {
    let (messages, code) = client.until_closed().await;
    let at = Instant::now();
    if code != 1006 {
        let _ = client.send_close(code, "").await;
    }
    Ending { at, code: Some(code), bye: messages.last().cloned().unwrap_or_default(), retry: None }
}

/// Reads to the end of the body.
async fn sse_end(mut client: SseClient) -> Ending {
    let blocks = client.until_end().await;
    let at = Instant::now();
    let last = blocks.iter().rfind(|block| !block.is_comment()).cloned().unwrap_or_default();
    assert_eq!(last.event.as_deref(), Some("bye"), "{last:?}");
    Ending { at, code: None, bye: last.json(), retry: last.retry }
}

fn closed(reason: &str) -> String {
    format!("gateway_sessions_closed_total{{reason=\"{reason}\"}}")
}

/// Sessions open by the gateway's own count, both transports.
async fn n_open(gateway: &GatewayProcess) -> f64 {
    let mut n = 0.0;
    for wire in ["ws", "sse"] {
        n += gateway
            .metric(&format!("gateway_sessions_open{{transport=\"{wire}\"}}"))
            .await
            .expect("the gauge is there");
    }
    n
}

async fn until_open(gateway: &GatewayProcess, n: f64) {
    let until = Instant::now() + Duration::from_secs(60);
    loop {
        let is = n_open(gateway).await;
        if is == n {
            return;
        }
        assert!(Instant::now() < until, "{is} sessions are open and not {n}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// Reads a stream up to its first event and gives it.
async fn first_event(client: &mut SseClient) -> sse::Block {
    client.until("event").await.pop().expect("until gives at least one")
}

fn claims(sub: &str) -> Value {
    json!({"sub": sub, "channels": ["news"]})
}
