//! The request's head: what is a handshake, what is too much, what is too slow, what is elsewhere.

use std::time::Duration;

use testkit::gateway::{GatewayProcess, Signal};
use testkit::http::{self, Wire};
use testkit::lag::Lag;
use testkit::redis::RedisServer;
use tokio::net::TcpStream;
use tokio::task::JoinSet;
use tokio::time::{Instant, timeout};

use super::{SOON, UPGRADE, answer, bearer, code_of, head, options, outcome, raw, try_ws, usual_token, ws};

/// Processor time that the gateway has used.
fn processor_time(gateway: &GatewayProcess) -> Duration {
    let stat = std::fs::read_to_string(format!("/proc/{}/stat", gateway.pid())).expect("the process runs");
    let fields: Vec<&str> = stat.rsplit_once(')').expect("a name in brackets").1.split_whitespace().collect();
    let ticks: u64 = fields[11..13].iter().map(|n| n.parse::<u64>().expect("a number of ticks")).sum();
    Duration::from_millis(ticks * 10)
}

#[tokio::test]
async fn a_handshake_is_told_from_what_only_looks_like_one() {
    let gateway = GatewayProcess::start(options()).await;
    let auth = bearer(&usual_token());
    // The usual lines with these instead of those of the same name; `-` takes a line away.
    let ask = async |method: &str, lines: &[(&str, &str)]| {
        let mut all: Vec<(&str, &str)> = UPGRADE.to_vec();
        all.retain(|(name, _)| !lines.iter().any(|(given, _)| given.eq_ignore_ascii_case(name)));
        all.extend(lines.iter().filter(|(_, value)| *value != "-"));
        all.push(("Authorization", &auth));
        raw(&gateway, &head(&format!("{method} /v1/ws"), &all)).await.expect("an answer")
    };
    for lines in [
        &[][..],
        &[("Connection", "keep-alive, Upgrade")],
        &[("Connection", "keep-alive"), ("Connection", "Upgrade")],
        &[("Upgrade", "WebSocket"), ("connection", "UPGRADE")],
        &[("Sec-WebSocket-Extensions", "permessage-deflate; client_max_window_bits=99; what")],
    ] {
        let answer = ask("GET", lines).await;
        assert_eq!(answer.status(), 101, "{lines:?}: {}", answer.text());
        assert_eq!(answer.header("sec-websocket-accept"), Some("s3pPLMBiTxaQ9kYGzzhZRbK+xOo="));
        assert_eq!(answer.header("sec-websocket-extensions"), None);
    }
    let mut n_refused = std::collections::BTreeMap::new();
    for (method, lines, status, code) in [
        ("GET", &[("Connection", "not-upgrade")][..], 426, "upgrade_required"),
        ("GET", &[("Connection", "-")], 426, "upgrade_required"),
        ("GET", &[("Upgrade", "-")], 426, "upgrade_required"),
        ("GET", &[("Upgrade", "h2c")], 426, "upgrade_required"),
        ("GET", &[("Sec-WebSocket-Version", "8")], 426, "upgrade_required"),
        ("GET", &[("Sec-WebSocket-Version", "-")], 426, "upgrade_required"),
        ("GET", &[("Sec-WebSocket-Key", "-")], 400, "bad_request"),
        ("GET", &[("Sec-WebSocket-Key", "abc")], 400, "bad_request"),
        ("GET", &[UPGRADE[3], UPGRADE[3]], 400, "bad_request"),
        ("POST", &[], 405, "method_not_allowed"),
        ("PUT", &[], 405, "method_not_allowed"),
    ] {
        let answer = ask(method, lines).await;
        assert_eq!((answer.status(), code_of(&answer).as_str()), (status, code), "{method} {lines:?}");
        assert_eq!(answer.header("allow"), (status == 405).then_some("GET, OPTIONS"));
        assert_eq!(answer.header("sec-websocket-version"), (status == 426).then_some("13"));
        *n_refused.entry(code).or_insert(0.0) += 1.0;
    }
    let answer = http::request(gateway.public(), "HEAD", "/v1/ws", &UPGRADE, b"").await;
    assert_eq!(answer.status(), 405);
    *n_refused.entry("method_not_allowed").or_insert(0.0) += 1.0;
    for (code, n) in n_refused {
        gateway.until_metric(&format!("gateway_refused_total{{code=\"{code}\"}}"), n).await;
    }
}

#[tokio::test]
async fn our_subprotocol_is_answered_once_and_a_clients_own_words_never() {
    let gateway = GatewayProcess::start(options().env("GATEWAY_AUTH_COOKIE", "session")).await;
    let token = usual_token();
    let offer = format!("tidegate.v1, bearer.{token}");
    let carried = format!("bearer.{token}");
    let cookie = format!("session={token}");
    let origin = format!("http://{}", gateway.public());
    let auth = bearer(&token);
    for (lines, answered) in [
        (&[("Sec-WebSocket-Protocol", offer.as_str())][..], true),
        (&[("Sec-WebSocket-Protocol", "tidegate.v1"), ("Sec-WebSocket-Protocol", carried.as_str())], true),
        (&[("Sec-WebSocket-Protocol", carried.as_str()), ("Sec-WebSocket-Protocol", "tidegate.v1")], true),
        (&[("Sec-WebSocket-Protocol", "tidegate.v1"), ("Cookie", &cookie), ("Origin", &origin)], true),
        (&[("Sec-WebSocket-Protocol", "graphql-ws"), ("Authorization", &auth)], false),
    ] {
        let client = try_ws(&gateway, "/v1/ws", lines).await.unwrap_or_else(|refused| panic!("{}", refused.text()));
        assert_eq!(client.head.header("sec-websocket-protocol"), answered.then_some("tidegate.v1"), "{lines:?}");
        let head = format!("{:?}", client.head);
        assert!(!head.contains(&token) && !head.contains("graphql"), "{head}");
    }
}

#[tokio::test]
async fn a_flood_of_headers_is_cut_short_and_costs_next_to_nothing() {
    let gateway = GatewayProcess::start(options()).await;
    let auth = bearer(&usual_token());
    let with = |more: &str| {
        let mut request = head("GET /v1/ws", &[&UPGRADE[..], &[("Authorization", &auth)]].concat());
        request.truncate(request.len() - 2);
        request.extend(more.as_bytes());
        request.extend(b"\r\n");
        request
    };
    let many: String = (0..5_000).map(|i| format!("X-{i}: {i}\r\n")).collect();
    let cookie = format!("Cookie: a={}\r\n", "c".repeat(64 * 1024));
    for (what, request) in [("5,000 headers", with(&many)), ("a cookie of 64 KiB", with(&cookie))] {
        // It may be gone before it was read to its end; it is never let in.
        if let Some(answer) = raw(&gateway, &request).await {
            assert_eq!(answer.status(), 431, "{what}");
        }
    }
    let before = processor_time(&gateway);
    let huge = with(&format!("X-Huge: {}\r\n", "h".repeat(20 << 20)));
    let flooding = async {
        if let Some(answer) = raw(&gateway, &huge).await {
            assert_eq!(answer.status(), 431);
        }
    };
    let ordinary = async {
        for _ in 0..20 {
            let began = Instant::now();
            ws(&gateway).await;
            assert!(began.elapsed() < Duration::from_secs(5), "{:?}", began.elapsed());
        }
    };
    tokio::join!(flooding, ordinary);
    let used = processor_time(&gateway) - before;
    assert!(used < Duration::from_secs(3), "{used:?} of processor time");
    // Legal, and slow only by its segments: one byte each.
    let legal = with(&format!("X-Long: {}\r\n", "l".repeat(8 * 1024)));
    let socket = TcpStream::connect(gateway.public()).await.unwrap();
    socket.set_nodelay(true).unwrap();
    let mut wire = Wire::new(socket);
    for byte in legal.chunks(1) {
        wire.send(byte).await.unwrap();
    }
    assert_eq!(answer(&mut wire).await.expect("an answer").status(), 101);
    assert!(!gateway.stderr().contains("panicked"));
    gateway.until_metric("gateway_refused_total{code=\"head_too_large\"}", 3.0).await;
}

#[tokio::test]
async fn http_2_is_refused_in_plain_and_by_upgrade() {
    let gateway = GatewayProcess::start(options()).await;
    // The preface of prior knowledge and an empty SETTINGS.
    let preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00\x00\x04\x00\x00\x00\x00\x00";
    if let Some(answer) = raw(&gateway, preface).await {
        assert!((400..500).contains(&answer.status()), "{}", answer.status());
    }
    let upgrade =
        [("Connection", "Upgrade, HTTP2-Settings"), ("Upgrade", "h2c"), ("HTTP2-Settings", "AAMAAABkAAQAAP__")];
    let refused = raw(&gateway, &head("GET /v1/ws", &upgrade)).await.expect("an answer");
    assert_eq!(refused.status(), 426);
    let extended = b"CONNECT /v1/ws HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n";
    if let Some(answer) = raw(&gateway, extended).await {
        assert!((400..500).contains(&answer.status()), "{}", answer.status());
    }
    for garbage in [&b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"[..], b"\0\0\0\0\r\n\r\n", b"GET /v1/ws\r\n\r\n"] {
        let mut wire = Wire::new(TcpStream::connect(gateway.public()).await.unwrap());
        wire.send(garbage).await.unwrap();
        if let Some(refused) = answer(&mut wire).await {
            assert_eq!(refused.status(), 400);
        }
    }
    ws(&gateway).await;
    assert!(!gateway.stderr().contains("panicked"));
}

#[tokio::test]
async fn who_resets_before_the_answer_leaves_nothing_behind() {
    const N: usize = 500;
    let gateway = GatewayProcess::start(options().env("GATEWAY_MAX_SESSIONS", "600")).await;
    let auth = bearer(&usual_token());
    let request = head("GET /v1/ws", &[&UPGRADE[..], &[("Authorization", &auth)]].concat());
    for i in 0..N {
        let socket = TcpStream::connect(gateway.public()).await.unwrap();
        socket.set_zero_linger().unwrap();
        let mut wire = Wire::new(socket);
        wire.send(&request).await.unwrap();
        // Some leave at once, some after the session was opened and before its 101 was read.
        if i % 3 == 0 {
            wire.peek(1).await.unwrap();
        }
        drop(wire);
    }
    let open = "gateway_sessions_open{transport=\"ws\"}";
    gateway.until_metric(open, 0.0).await;
    // Every place is free again.
    let mut held = Vec::new();
    for _ in 0..100 {
        held.push(ws(&gateway).await);
    }
    gateway.until_metric(open, 100.0).await;
    drop(held);
    gateway.until_metric(open, 0.0).await;
    assert_eq!(gateway.metric("gateway_refused_total{code=\"at_capacity\"}").await.unwrap_or(0.0), 0.0);
}

#[tokio::test]
async fn a_request_for_a_stream_has_no_body() {
    let gateway = GatewayProcess::start(options()).await;
    let auth = bearer(&usual_token());
    // What would follow as a frame, or as a request of somebody else's.
    let inner = "GET /v1/client.js HTTP/1.1\r\nHost: x\r\n\r\n";
    for lines in [
        &[("Content-Length", "5")][..],
        &[("Transfer-Encoding", "chunked")],
        &[("Content-Length", "5"), ("Transfer-Encoding", "chunked")],
        &[("Content-Length", "5"), ("Content-Length", "6")],
        &[("Content-Length", "0"), ("Content-Length", "40")],
        &[("Transfer-Encoding", "gzip, chunked")],
        &[("Transfer-Encoding", "identity")],
        &[("Content-Length", "-1")],
        &[("Content-Length", "5x")],
    ] {
        for path in ["/v1/ws", "/v1/sse"] {
            let all = [&UPGRADE[..], &[("Authorization", auth.as_str())], lines].concat();
            let request = [head(&format!("GET {path}"), &all), inner.as_bytes().to_vec()].concat();
            let mut wire = Wire::new(TcpStream::connect(gateway.public()).await.unwrap());
            let _ = wire.send(&request).await;
            let first = answer(&mut wire).await.expect("an answer");
            assert_eq!(first.status(), 400, "{path} {lines:?}");
            let second = answer(&mut wire).await;
            assert!(second.is_none(), "{path} {lines:?}: the body was taken for a request: {second:?}");
        }
    }
}

#[tokio::test]
async fn slow_heads_are_cut_in_time_and_nobody_else_waits_for_them() {
    const EACH: usize = 100;
    let head_timeout = Duration::from_secs(1);
    let gateway = GatewayProcess::start(options().env("GATEWAY_HEAD_TIMEOUT", "1s")).await;
    let (lag, mut slow) = (Lag::watch(), JoinSet::new());
    for i in 0..3 * EACH {
        let socket = TcpStream::connect(gateway.public()).await.unwrap();
        let began = Instant::now();
        slow.spawn(async move {
            let mut wire = Wire::new(socket);
            let drip = async {
                match i % 3 {
                    0 => {}
                    1 => wire.send(b"GET /v1/ws HT").await?,
                    _ => {
                        wire.send(b"GET /v1/ws HTTP/1.1\r\nHost: x\r\n").await?;
                        let mut every = tokio::time::interval(Duration::from_millis(200));
                        loop {
                            every.tick().await;
                            wire.send(b"X").await?;
                        }
                    }
                }
                wire.peek(1).await.map(|_| ())
            };
            let ended = timeout(SOON, drip).await.expect("it is cut in the end");
            (ended.is_err(), began.elapsed())
        });
    }
    for _ in 0..20 {
        assert_eq!(outcome(&gateway, "/v1/ws", &[("Authorization", &bearer(&usual_token()))]).await.0, 101);
    }
    while let Some(ended) = slow.join_next().await {
        let (is_cut, after) = ended.unwrap();
        assert!(is_cut, "cut without an answer");
        // The one that drips learns of it with the byte after.
        assert!(after < head_timeout + Duration::from_secs(5) + lag.longest(), "{after:?}");
    }
    gateway.until_metric("gateway_refused_total{code=\"head_timeout\"}", (3 * EACH) as f64).await;
}

#[tokio::test]
async fn a_full_house_drops_the_longest_incomplete_head() {
    let gateway =
        GatewayProcess::start(options().env("GATEWAY_HANDSHAKES", "10").env("GATEWAY_HEAD_TIMEOUT", "60s")).await;
    let mut silent = Vec::new();
    for _ in 0..10 {
        silent.push(Wire::new(TcpStream::connect(gateway.public()).await.unwrap()));
    }
    for _ in 0..5 {
        ws(&gateway).await;
    }
    // A newcomer took the place of the first, or was one of the places that came free by it.
    assert!(timeout(SOON, silent[0].peek(1)).await.expect("it was dropped").is_err());
    assert!(timeout(Duration::from_millis(50), silent[9].peek(1)).await.is_err(), "the last one still waits");
}

#[tokio::test]
async fn nothing_of_the_other_listeners_is_on_the_public_one() {
    let gateway = GatewayProcess::start(options()).await;
    let probe_host = gateway.probes().to_string();
    for path in [
        "/livez",
        "/readyz",
        "/startupz",
        "/metrics",
        "//metrics",
        "/metrics/",
        "/%6detrics",
        "/METRICS",
        "/./metrics",
        "/v1/../metrics",
        "/v1/ws/../../metrics",
        "/metrics?x",
        "/metrics;x",
        "http://localhost/metrics",
        "/console",
        "/v1/openapi.json",
        "/v1/publish",
        "/v1/fleet",
        "/v1/sessions",
        "/",
        "/v1/ws/",
        "//v1/ws",
        "/v1/WS",
        "/v1/%77s",
    ] {
        for host in ["localhost", &probe_host, "metrics.internal"] {
            let answer = http::request(gateway.public(), "GET", path, &[("Host", host)], b"").await;
            assert_eq!((answer.status(), code_of(&answer).as_str()), (404, "not_found"), "{path} of {host}");
        }
    }
    for path in ["/v1/publish", "/v1/drain", "/v1/revocations"] {
        let answer =
            http::request(gateway.public(), "POST", path, &[("Content-Type", "application/json")], b"{}").await;
        assert_eq!(answer.status(), 404, "{path}");
    }
    let script = http::get(gateway.public(), "/v1/client.js").await;
    assert_eq!((script.status(), script.header("content-type")), (200, Some("text/javascript; charset=utf-8")));
    assert_eq!(http::get(gateway.probes(), "/v1/ws").await.status(), 404);
}

#[tokio::test(flavor = "multi_thread")]
async fn metrics_are_whole_and_200_however_bad_it_is() {
    let mut redis = RedisServer::start(testkit::redis::RedisOptions {
        requirepass: Some("hidden-redis-password".into()),
        ..Default::default()
    });
    let gateway = GatewayProcess::start(
        options()
            .env("GATEWAY_REDIS_URL", redis.url())
            .env("GATEWAY_MAX_SESSIONS", "1")
            .env("GATEWAY_DRAIN_GRACE", "30s"),
    )
    .await;
    let _client = ws(&gateway).await;
    gateway.until_status("/readyz", 503).await;
    let full = http::get(gateway.probes(), "/readyz").await.json();
    assert_eq!(full["reasons"], serde_json::json!(["at_capacity"]));
    check_exposition(&gateway).await;
    redis.kill9();
    gateway.until_metric("gateway_redis_up{link=\"pubsub\"}", 0.0).await;
    check_exposition(&gateway).await;
    gateway.signal(Signal::Term);
    gateway.until_metric("gateway_phase{phase=\"draining\"}", 1.0).await;
    check_exposition(&gateway).await;
    for path in ["/livez", "/readyz", "/startupz", "/metrics"] {
        let text = http::get(gateway.probes(), path).await.text().to_owned();
        assert!(!text.contains("hidden-redis-password") && !text.contains(&redis.port().to_string()), "{text}");
    }
}

/// Every line of the Prometheus text is a comment or a sample with a number.
async fn check_exposition(gateway: &GatewayProcess) {
    let answer = http::get(gateway.probes(), "/metrics").await;
    assert_eq!(answer.status(), 200);
    let mut n_samples = 0;
    for line in answer.text().lines() {
        if line.starts_with('#') {
            continue;
        }
        let (name, value) = line.rsplit_once(' ').unwrap_or_else(|| panic!("no sample: {line:?}"));
        assert!(value.parse::<f64>().is_ok(), "{line:?}");
        assert!(name.starts_with("gateway_") || name.starts_with("process_"), "{line:?}");
        n_samples += 1;
    }
    assert!(n_samples > 40, "{n_samples} samples");
}
