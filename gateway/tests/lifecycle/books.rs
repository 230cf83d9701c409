//! What is counted is what is there: places, gauges and the kernel's own view agree after any mix
//! of ends.

use std::net::SocketAddr;
use std::time::Duration;

use serde_json::json;
use testkit::gateway::GatewayProcess;
use testkit::http::{self, Response};
use testkit::sse::SseClient;
use testkit::ws::{Frame, WsClient, opcode};
use tokio::io::AsyncWriteExt;
use tokio::net::TcpStream;
use tokio::time::{Instant, sleep};

use crate::{bearer, claims, n_open, options, sse, until_open, ws};

/// Established connections of the public port, as the kernel counts them on the gateway's side.
fn n_established(public: SocketAddr) -> usize {
    let local = format!(":{:04X}", public.port());
    let table = std::fs::read_to_string("/proc/net/tcp").unwrap();
    let is_ours = |line: &&str| {
        let mut fields = line.split_whitespace().skip(1);
        let (at, _, state) = (fields.next(), fields.next(), fields.next());
        at.is_some_and(|at| at.ends_with(&local)) && state == Some("01")
    };
    table.lines().filter(is_ours).count()
}

/// The gauge and the kernel come to agree on `n` within a moment.
async fn agree(gateway: &GatewayProcess, n: usize) {
    until_open(gateway, n as f64).await;
    let until = Instant::now() + Duration::from_secs(60);
    while n_established(gateway.public()) != n {
        assert!(Instant::now() < until, "{} connections and {n} sessions", n_established(gateway.public()));
        sleep(Duration::from_millis(20)).await;
    }
}

enum Client {
    Ws(#[expect(dead_code, reason = "held open")] WsClient),
    Sse(#[expect(dead_code, reason = "held open")] SseClient),
}

async fn try_open(gateway: &GatewayProcess, i: usize, n_ws: usize) -> Result<Client, Response> {
    let auth = bearer(&claims(&format!("u{i}")));
    let auth = [("Authorization", auth.as_str())];
    if i < n_ws {
        WsClient::connect(gateway.public(), "/v1/ws", &auth).await.map(Client::Ws)
    } else {
        SseClient::connect(gateway.public(), "/v1/sse", &auth).await.map(Client::Sse)
    }
}

/// `max` sessions fit in this mix and not one more; one that leaves makes room for exactly one.
async fn exactly_fit(gateway: &GatewayProcess, max: usize, n_ws: usize) {
    let mut held = Vec::new();
    for i in 0..max {
        held.push(try_open(gateway, i, n_ws).await.unwrap_or_else(|refused| panic!("{i}: {}", refused.text())));
    }
    for i in [0, max] {
        refused_as_full(try_open(gateway, i, n_ws).await.err().expect("it is full"));
    }
    agree(gateway, max).await;
    held.pop();
    until_open(gateway, (max - 1) as f64).await;
    held.push(try_open(gateway, 0, n_ws).await.unwrap_or_else(|refused| panic!("{}", refused.text())));
    refused_as_full(try_open(gateway, 0, n_ws).await.err().expect("it is full again"));
    drop(held);
    agree(gateway, 0).await;
}

fn refused_as_full(refused: Response) {
    assert_eq!((refused.status(), &refused.json()["code"]), (503, &json!("at_capacity")));
    assert!(refused.header("retry-after").unwrap().parse::<u64>().unwrap() >= 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_place_is_held_as_long_as_its_stream_whatever_the_transport() {
    let gateway = GatewayProcess::start(options().env("GATEWAY_MAX_SESSIONS", "5")).await;
    for n_ws in [5, 0, 3] {
        exactly_fit(&gateway, 5, n_ws).await;
    }
}

/// Gone with a reset instead of an end.
fn reset(socket: &TcpStream) {
    socket.set_zero_linger().unwrap();
}

/// One random life, over before this returns.
async fn live(gateway: &GatewayProcess, kind: usize, i: usize) {
    let claims = json!({"sub": format!("life{i}"), "jti": format!("life{i}"), "channels": ["news"]});
    let auth = bearer(&claims);
    let head = format!(
        "GET /v1/ws HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\
         Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nAuthorization: {auth}\r\n\r\n"
    );
    match kind {
        // Reset within the head; right behind it, so that the 101 finds nobody.
        0 | 1 => {
            let mut socket = TcpStream::connect(gateway.public()).await.unwrap();
            let n = if kind == 0 { head.len() / 2 } else { head.len() };
            socket.write_all(&head.as_bytes()[..n]).await.unwrap();
            reset(&socket);
        }
        // Reset as a session that has not read its hello; later.
        2 => {
            let client = crate::ws_unread(gateway.public(), &claims).await;
            reset(client.socket());
        }
        3 => reset(ws(gateway, &claims).await.socket()),
        4 => {
            let refused = WsClient::connect(gateway.public(), "/v1/ws", &[("Authorization", "Bearer x.y.z")]).await;
            assert_eq!(refused.err().unwrap().status(), 401);
        }
        5 => {
            let mut client = ws(gateway, &claims).await;
            client.send_bytes(&Frame { rsv: 7, ..Frame::new(opcode::TEXT, "x") }.bytes()).await.unwrap();
            assert_eq!(client.until_closed().await.1, 1002);
        }
        6 => {
            let mut client = ws(gateway, &claims).await;
            client.send_close(1000, "").await.unwrap();
            assert_eq!(client.until_closed().await.1, 1000);
        }
        7 => drop(sse(gateway, &claims).await),
        8 => {
            let client = ws(gateway, &claims).await;
            let answer = http::post_json(gateway.admin(), "/v1/revocations", &json!({"jti": format!("life{i}")})).await;
            assert_eq!(answer.status(), 204);
            assert_eq!(crate::ws_end(client).await.code, Some(4403));
        }
        // No handshake at all.
        _ => assert_eq!(http::get(gateway.public(), "/v1/nowhere").await.status(), 404),
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn after_any_mix_of_ends_the_books_balance_and_every_place_is_free_again() {
    const KINDS: usize = 10;
    const ROUNDS: usize = 40;
    let gateway = GatewayProcess::start(options().env("GATEWAY_MAX_SESSIONS", "30")).await;
    for round in 0..ROUNDS {
        // Ten lives at a time, each of another kind: they meet in every order.
        let lives = (0..KINDS).map(|kind| live(&gateway, kind, round * KINDS + kind));
        futures_util::future::join_all(lives).await;
        assert!(n_open(&gateway).await >= 0.0);
    }
    agree(&gateway, 0).await;
    // Who was reset before it was accepted may come to be counted, in and out, only now.
    let until = Instant::now() + Duration::from_secs(10);
    let opened = loop {
        let metrics = http::get(gateway.probes(), "/metrics").await;
        let sum = |prefix: &str| -> f64 {
            let of =
                |line: &str| line.starts_with(prefix).then(|| line.rsplit(' ').next().unwrap().parse::<f64>().unwrap());
            metrics.text().lines().filter_map(of).sum()
        };
        let opened = sum("gateway_sessions_opened_total{");
        if opened == sum("gateway_sessions_closed_total{") {
            break opened;
        }
        assert!(Instant::now() < until, "{}", metrics.text());
        sleep(Duration::from_millis(20)).await;
    };
    // Six kinds surely had a session, one perhaps; refusals have counters of their own.
    let n = ROUNDS as f64;
    assert!(opened >= 6.0 * n && opened <= 7.0 * n, "{opened}");
    for (code, count) in [("token_invalid", n), ("not_found", n)] {
        gateway.until_metric(&format!("gateway_refused_total{{code=\"{code}\"}}"), count).await;
    }
    exactly_fit(&gateway, 30, 15).await;
}
