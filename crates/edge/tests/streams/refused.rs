//! Who is told no at the door, and what it costs: heads that are too large to the byte, clients that
//! are too old, credentials that are bad or not there.

use std::time::Duration;

use serde_json::json;
use testkit::http::{Head, Wire};
use testkit::sse::SseClient;
use testkit::ws::WsClient;
use tidegate_edge::origin::OriginPolicy;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::time::sleep;

use crate::node::{Node, ROOMY, Settings, user};

/// The largest head, in bytes, as the protocol's document has it.
const MAX_HEAD: usize = 32 * 1024;

/// A good request for a stream whose head has exactly `n` bytes.
fn head_of(node: &Node, n: usize) -> Vec<u8> {
    let auth = node.bearer(&user("u"));
    let filled = |n: usize| {
        format!("GET /v1/sse HTTP/1.1\r\nHost: n1\r\nAuthorization: {auth}\r\nCookie: {}\r\n\r\n", "c".repeat(n))
    };
    filled(n - filled(0).len()).into_bytes()
}

#[tokio::test(start_paused = true)]
async fn a_head_of_32_kib_is_read_and_one_byte_more_is_not() {
    let node = Node::start(Settings::new());
    for n in [MAX_HEAD - 1, MAX_HEAD, MAX_HEAD + 1, MAX_HEAD + 1_024, 36 * 1_024, 40 * 1_024, 48 * 1_024] {
        let expected = if n <= MAX_HEAD { 200 } else { 431 };
        // However it comes: at once, or in pieces that end where it does or do not.
        for piece in [n, 1_000, 4_096, 16 * 1_024, MAX_HEAD] {
            let (mut read, mut write) = tokio::io::split(node.dial(ROOMY));
            let request = head_of(&node, n);
            assert_eq!(request.len(), n);
            let sending = async {
                for part in request.chunks(piece) {
                    // It may have been told no already.
                    if write.write_all(part).await.is_err() {
                        return;
                    }
                    sleep(Duration::from_millis(1)).await;
                }
            };
            let answered = async {
                let mut status = [0; 12];
                read.read_exact(&mut status).await.expect("an answer");
                String::from_utf8_lossy(&status).into_owned()
            };
            let (status, ()) = tokio::join!(answered, sending);
            assert_eq!(status, format!("HTTP/1.1 {expected}"), "{n} bytes in pieces of {piece}");
        }
    }
    assert_eq!(node.metric("gateway_refused_total{code=\"head_too_large\"}"), 25.0);
}

#[tokio::test(start_paused = true)]
async fn a_client_that_knows_no_chunks_is_told_so_and_gets_none() {
    let node = Node::start(Settings::new());
    for path in ["/v1/sse", "/v1/ws"] {
        let mut socket = node.dial(ROOMY);
        let upgrade = if path == "/v1/ws" { "Connection: Upgrade\r\nUpgrade: websocket\r\n" } else { "" };
        let auth = node.bearer(&user("u"));
        let request = format!("GET {path} HTTP/1.0\r\nHost: n1\r\n{upgrade}Authorization: {auth}\r\n\r\n");
        socket.write_all(request.as_bytes()).await.unwrap();
        let mut answer = String::new();
        socket.read_to_string(&mut answer).await.expect("an answer and an end");
        assert!(answer.starts_with("HTTP/1.0 400 ") || answer.starts_with("HTTP/1.1 400 "), "{answer}");
        assert!(!answer.to_ascii_lowercase().contains("transfer-encoding"), "{answer}");
        assert!(answer.contains("needs HTTP/1.1"), "{answer}");
    }
    assert_eq!(node.n_sessions(), 0);
}

/// What came of an attempt with these headers, from one office's address.
async fn attempt(node: &Node, headers: &[(&str, &str)]) -> u16 {
    let socket = node.dial_from([198, 51, 100, 7], ROOMY);
    match WsClient::over(socket, "n1", "/v1/ws", headers).await {
        Ok(_) => 101,
        Err(refused) => refused.status(),
    }
}

#[tokio::test(start_paused = true)]
async fn only_a_bad_credential_costs_its_address_more_than_an_attempt() {
    let many: Vec<String> = (0..11).map(|i| format!("c{i}")).collect();
    let office = |burst| Node::start(Settings { per_address: (burst, 0.001), ..Settings::new() });
    let node = office(12);
    let expired = node.bearer(&json!({"sub": "u", "exp": 1}));
    let too_many = node.bearer(&json!({"sub": "u", "channels": many}));
    let good = node.bearer(&user("u"));
    // An attempt is one in itself.
    for (what, auth, status, n_left) in [
        ("no token at all", None, 401, 11),
        ("more channels than a session may hold", Some(too_many.as_str()), 403, 11),
        ("a bad signature", Some("Bearer x.y.z"), 401, 6),
        ("an empty one", Some("Bearer "), 401, 6),
        ("an expired one", Some(expired.as_str()), 401, 6),
    ] {
        let node = office(12);
        let headers: Vec<_> = auth.iter().map(|auth| ("Authorization", *auth)).collect();
        assert_eq!(attempt(&node, &headers).await, status, "{what}");
        for i in 0..=n_left {
            let expected = if i < n_left { 101 } else { 429 };
            assert_eq!(attempt(&node, &[("Authorization", &good)]).await, expected, "{what}, then {i} others");
        }
    }
}

/// The answer to an event stream's request by a page that cannot name itself.
async fn nameless(node: &Node, path: &str, auth: Option<&str>) -> Head {
    let mut headers = vec![("Origin", "null")];
    headers.extend(auth.map(|auth| ("Authorization", auth)));
    match SseClient::over(node.dial(ROOMY), "n1", path, &headers).await {
        Ok(stream) => stream.head,
        Err(refused) => refused.head,
    }
}

#[tokio::test(start_paused = true)]
async fn where_every_page_may_connect_one_without_a_name_may_and_reads_what_it_is_told() {
    let node = Node::start(Settings { origin: OriginPolicy::Any, ..Settings::new() });
    let token = node.token(&user("u"));
    for (path, auth, status) in [
        ("/v1/sse", Some(format!("Bearer {token}")), 200),
        (&format!("/v1/sse?access_token={token}"), None, 200),
        ("/v1/sse", Some("Bearer x.y.z".to_owned()), 401),
    ] {
        let head = nameless(&node, path, auth.as_deref()).await;
        assert_eq!(head.status, status, "{path}");
        assert_eq!(head.header("access-control-allow-origin"), Some("*"));
        assert_eq!(head.header("access-control-allow-credentials"), None);
    }
    for origin in ["null", "file://"] {
        let offer = format!("tidegate.v1, bearer.{token}");
        let headers = [("Origin", origin), ("Sec-WebSocket-Protocol", &*offer)];
        let opened = WsClient::over(node.dial(ROOMY), "n1", "/v1/ws", &headers).await;
        assert!(opened.is_ok(), "{origin}");
    }
    let mut wire = Wire::new(node.dial(ROOMY));
    let asked = [("Origin", "null"), ("Access-Control-Request-Method", "GET")];
    wire.ask("OPTIONS", "/v1/sse", "n1", &asked, b"").await.unwrap();
    let preflight = wire.head().await.unwrap();
    assert_eq!((preflight.status, preflight.header("access-control-allow-origin")), (204, Some("*")));
}
