//! The event stream as a browser's parser sees it.

use std::collections::BTreeSet;
use std::time::Duration;

use serde_json::json;
use testkit::gateway::{GatewayProcess, token};
use testkit::http::{self, Response, Wire};
use testkit::proxy::{Direction, Flow, Proxy};
use testkit::redis::RedisServer;
use testkit::sse::{Heard, SseClient};
use tokio::net::TcpStream;
use tokio::time::timeout;

use super::{SOON, bearer, options, publish_text, sse_with, token_for, usual_token};

/// Sends these bytes and reads the head and, unless it is a stream, the body of the answer.
async fn raw(gateway: &GatewayProcess, request: &[u8]) -> Response {
    let mut wire = Wire::new(TcpStream::connect(gateway.public()).await.expect("it listens"));
    let _ = wire.send(request).await;
    let exchange = async {
        let head = wire.head().await?;
        let is_stream = head.status == 200 && head.header("content-type") == Some("text/event-stream");
        let body = if is_stream { wire.chunk().await?.unwrap_or_default() } else { wire.body(&head).await? };
        std::io::Result::Ok(Response { head, body })
    };
    timeout(SOON, exchange).await.expect("an answer in time").expect("an answer")
}

#[tokio::test]
async fn the_stream_begins_at_once_in_its_own_order_and_with_the_headers_that_nobody_may_buffer() {
    // A position comes each quarter of it, and not before the first event.
    let gateway =
        GatewayProcess::start(options().env("GATEWAY_HISTORY_TTL", "16s").env("GATEWAY_HEARTBEAT", "1s")).await;
    let auth = bearer(&usual_token());
    let headers = [("Authorization", auth.as_str()), ("Accept-Encoding", "gzip, br, zstd, deflate")];
    let mut stream = SseClient::connect(gateway.public(), "/v1/sse", &headers).await.expect("a stream");
    for (name, value) in [
        ("content-type", Some("text/event-stream")),
        ("cache-control", Some("no-store, no-transform")),
        ("x-accel-buffering", Some("no")),
        ("content-encoding", None),
        ("content-length", None),
    ] {
        assert_eq!(stream.head.header(name), value, "{name}");
    }
    let hello = stream.block().await;
    assert_eq!((hello.event.as_deref(), hello.id.as_deref()), (Some("hello"), None));
    let first_max = hello.json()["reconnect"]["first_max_ms"].as_u64().expect("a number of ms");
    let retry = hello.retry.expect("the first block tells when to come back");
    assert!((1_000..=first_max).contains(&retry), "{retry}");
    let ready = stream.block().await;
    assert_eq!((ready.event.as_deref(), ready.kind().as_str()), (Some("ready"), "ready"));
    assert_eq!(ready.id.as_deref(), ready.json()["id"].as_str(), "ready carries the cursor");
    let id = gateway.publish("news", &json!(1)).await;
    let event = stream.block().await;
    assert_eq!((event.event.as_deref(), event.id.as_deref()), (None, Some(id.as_str())));
    assert_eq!(event.json(), json!({"type": "event", "channel": "news", "id": id, "data": 1}));
    // Then nothing is published: comments, and a position so that the cursor does not age.
    let (mut is_alive, mut position) = (false, None);
    while !is_alive || position.is_none() {
        match stream.next().await {
            Heard::Block(block) if block.is_comment() => is_alive = true,
            Heard::Block(block) => {
                assert_eq!(block.event.as_deref(), Some("position"), "{block:?}");
                assert_eq!(block.id.as_deref(), block.json()["id"].as_str());
                position = block.id;
            }
            end => panic!("{end:?}"),
        }
    }
    // Of several gaps the last one moves the cursor: who is cut before it is told of all again.
    let mut gapped = sse_with(&gateway, &usual_token(), "/v1/sse?last_event_id=nonsense").await;
    let blocks = gapped.until("ready").await;
    let gaps: Vec<_> = blocks.iter().filter(|block| block.kind() == "gap").collect();
    assert_eq!(gaps.len(), 2, "one a channel: {blocks:?}");
    for (i, gap) in gaps.iter().enumerate() {
        assert_eq!((gap.event.as_deref(), &gap.json()["reason"]), (Some("gap"), &json!("unknown_position")));
        let told = gap.json()["id"].as_str().map(str::to_owned);
        assert!(told.is_some() == (i == 1) && gap.id == told, "{gap:?}");
    }
    assert_eq!(blocks.last().expect("ready").json()["resume"], "gap");
    // Nobody is told the same delay on purpose.
    let mut retries = BTreeSet::from([retry]);
    for _ in 0..12 {
        let hello = sse_with(&gateway, &usual_token(), "/v1/sse").await.block().await;
        retries.insert(hello.retry.expect("a delay"));
    }
    assert!(retries.len() > 6, "{retries:?}");
}

#[tokio::test]
async fn line_breaks_marks_and_long_lines_in_data_are_one_event_each() {
    let gateway =
        GatewayProcess::start(options().env("GATEWAY_MAX_MESSAGE", "2MiB").env("GATEWAY_OUTBOX_BYTES", "8MiB")).await;
    let token = usual_token();
    let mut stream =
        SseClient::connect(gateway.public(), "/v1/sse", &[("Authorization", &bearer(&token))]).await.expect("a stream");
    stream.until("ready").await;
    let long = "x".repeat(1 << 20);
    // U+FEFF as the very first event, and again later.
    for text in [
        "\u{feff}mark",
        "a\rb",
        "a\nb",
        "a\r\nb",
        "a\n\nb",
        " leading",
        "trailing\n",
        "x\revent: steal",
        "x\nid: 99-0\ndata: more\n\n",
        "",
        "\u{85}\u{2028}\u{2029}",
        "\u{feff}again",
        &long,
    ] {
        let id = gateway.publish("news", &json!(text)).await;
        let block = stream.block().await;
        assert_eq!((block.event.as_deref(), block.id.as_deref(), block.retry), (None, Some(id.as_str()), None));
        assert!(block.comments.is_empty());
        assert_eq!(block.json()["data"], json!(text));
    }
    let spread = b"{\"channel\":\"news\",\"data\":\r\n{\r\"a\"\n:\n\n\"b\"\r\n}\r\n}";
    assert_eq!(publish_text(&gateway, spread).await.status(), 200);
    assert_eq!(stream.block().await.json()["data"], json!({"a": "b"}));
    // The first bytes of a body are a field, never a byte order mark.
    let request = format!("GET /v1/sse HTTP/1.1\r\nHost: x\r\nAuthorization: {}\r\n\r\n", bearer(&token));
    let first = raw(&gateway, request.as_bytes()).await;
    assert!(first.body.starts_with(b"retry: "), "{:?}", String::from_utf8_lossy(&first.body));
}

#[tokio::test(flavor = "multi_thread")]
async fn headers_and_hello_leave_before_any_history_was_read() {
    let redis = RedisServer::plain();
    let proxy = Proxy::start(redis.addr()).await;
    // Anonymous: nobody is looked up, so only the history needs Redis.
    let gateway = GatewayProcess::start(
        options().env("GATEWAY_REDIS_URL", redis.url_at(proxy.port())).env("GATEWAY_ANONYMOUS_CHANNELS", "public"),
    )
    .await;
    proxy.set(Direction::Down, Flow::Stall);
    let mut stream = SseClient::connect(gateway.public(), "/v1/sse", &[]).await.expect("a stream");
    let hello = stream.block().await;
    assert_eq!((hello.kind().as_str(), &hello.json()["user"]), ("hello", &json!(null)));
    // Redis says nothing, so neither does `ready` come; a comment may.
    let early = timeout(Duration::from_millis(300), stream.block()).await;
    assert!(early.is_err(), "{early:?} while Redis is silent");
    proxy.set(Direction::Down, Flow::Pass);
    assert_eq!(stream.block().await.kind(), "ready");
}

#[tokio::test]
async fn twenty_channels_fit_one_stream_and_one_id_resumes_them_all() {
    let gateway = GatewayProcess::start(options()).await;
    let names: Vec<String> = (0..20).map(|i| format!("room:{i}")).collect();
    let query: Vec<String> = names.iter().map(|name| format!("channel={name}")).collect();
    let path = format!("/v1/sse?{}", query.join("&"));
    let mut stream = sse_with(&gateway, &usual_token(), &path).await;
    assert_eq!(stream.block().await.json()["channels"].as_array().map(Vec::len), Some(22));
    stream.until("ready").await;
    let mut cursor = None;
    for name in &names {
        gateway.publish(name, &json!(name)).await;
        let block = stream.block().await;
        assert_eq!(block.json()["channel"], json!(name));
        cursor = block.id;
    }
    drop(stream);
    for name in names.iter().rev() {
        gateway.publish(name, &json!("missed")).await;
    }
    let cursor = cursor.expect("a cursor");
    let auth = bearer(&usual_token());
    let headers = [("Authorization", auth.as_str()), ("Last-Event-ID", cursor.as_str())];
    // The header wins over the query, which a browser repeats from the first URL.
    let path = format!("{path}&last_event_id=0");
    let mut stream = SseClient::connect(gateway.public(), &path, &headers).await.expect("a stream");
    let blocks = stream.until("ready").await;
    let missed: Vec<_> = blocks.iter().filter(|b| b.kind() == "event").map(|b| b.json()["channel"].clone()).collect();
    assert_eq!(missed, names.iter().rev().map(|name| json!(name)).collect::<Vec<_>>());
    let ready = blocks.last().expect("ready").json();
    assert_eq!((&ready["resume"], &ready["replayed"]), (&json!("ok"), &json!(20)));
}

#[tokio::test]
async fn a_hostile_cursor_is_an_unknown_position_or_a_bad_request() {
    let gateway = GatewayProcess::start(options().env("GATEWAY_LOG", "trace")).await;
    let ask = |lines: &[&[u8]]| {
        let mut request = b"GET /v1/sse HTTP/1.1\r\nHost: x\r\nAuthorization: ".to_vec();
        request.extend(bearer(&usual_token()).as_bytes());
        for line in lines {
            request.extend(b"\r\nLast-Event-ID: ");
            request.extend(*line);
        }
        request.extend(b"\r\n\r\n");
        request
    };
    let id = gateway.publish("news", &json!(1)).await;
    let long = [b'9'; 16 * 1024];
    let joined = format!("{id},{id}");
    for (what, lines, may_resume) in [
        ("high bytes", vec![&b"\x80\xff\xfe"[..]], false),
        ("UTF-8", vec!["ümlaut-1".as_bytes()], false),
        ("a tab", vec![b"1\t-1"], false),
        ("16 KiB", vec![&long[..]], false),
        ("two lines", vec![b"1-1", b"2-2"], false),
        ("comma-joined", vec![joined.as_bytes()], false),
        ("a control character", vec![b"1-1\x07"], false),
        ("far ahead", vec![b"99999999999999-1"], false),
        ("over 64 bits", vec![b"99999999999999999999999-1"], false),
        ("negative", vec![b"-1--1"], false),
        ("empty", vec![b""], true),
        ("a real one", vec![id.as_bytes()], true),
    ] {
        let answer = raw(&gateway, &ask(&lines)).await;
        match answer.status() {
            200 => {
                let mut wire = sse_after(&gateway, &ask(&lines)).await;
                let blocks = wire.until("ready").await;
                let resume = blocks.last().expect("ready").json()["resume"].clone();
                assert_eq!(resume != "gap", may_resume, "{what}: {blocks:?}");
            }
            400 | 431 => assert!(!may_resume, "{what}"),
            status => panic!("{what}: {status}"),
        }
    }
    let log = gateway.stderr();
    assert!(!log.contains("panicked") && !log.contains("99999999999999999999999"), "{log}");
}

/// A stream that was asked for with exactly these bytes.
async fn sse_after(gateway: &GatewayProcess, request: &[u8]) -> Blocks {
    let mut wire = Wire::new(TcpStream::connect(gateway.public()).await.expect("it listens"));
    wire.send(request).await.expect("it reads");
    let head = wire.head().await.expect("a head");
    assert_eq!(head.status, 200);
    Blocks { wire, text: Vec::new() }
}

struct Blocks {
    wire: Wire,
    text: Vec<u8>,
}

impl Blocks {
    async fn until(&mut self, kind: &str) -> Vec<testkit::sse::Block> {
        let mut blocks = Vec::new();
        loop {
            let chunk = timeout(SOON, self.wire.chunk()).await.expect("in time").expect("a chunk").expect("no end");
            self.text.extend(chunk);
            let text = String::from_utf8(std::mem::take(&mut self.text)).expect("UTF-8");
            for block in text.split_terminator("\n\n") {
                let field = |name: &str| block.lines().find_map(|l| l.strip_prefix(name)).map(str::to_owned);
                blocks.push(testkit::sse::Block { data: field("data: "), id: field("id: "), ..Default::default() });
            }
            blocks.retain(|block| block.data.is_some());
            if blocks.last().is_some_and(|block| block.kind() == kind) {
                return blocks;
            }
        }
    }
}

#[tokio::test]
async fn other_methods_and_types_open_nothing_and_end_at_once() {
    let gateway = GatewayProcess::start(options()).await;
    let auth = bearer(&usual_token());
    let ask = async |method: &str, headers: &[(&str, &str)]| {
        let headers = [&[("Authorization", auth.as_str())], headers].concat();
        http::request(gateway.public(), method, "/v1/sse", &headers, b"").await
    };
    for method in ["HEAD", "POST", "PUT", "DELETE"] {
        let answer = ask(method, &[]).await;
        assert_eq!(answer.status(), 405, "{method}");
        assert_eq!(answer.header("allow"), Some("GET, OPTIONS"), "{method}");
    }
    let preflight = [
        ("Origin", "https://app.example"),
        ("Access-Control-Request-Method", "GET"),
        ("Access-Control-Request-Headers", "authorization, last-event-id"),
    ];
    let answer = ask("OPTIONS", &preflight).await;
    assert!((200..300).contains(&answer.status()), "{}", answer.status());
    assert_eq!(answer.header("access-control-allow-origin"), None, "no origin is allowed here");
    assert_eq!(ask("GET", &[("Accept", "application/json")]).await.status(), 406);
    assert_eq!(gateway.metric("gateway_sessions_open{transport=\"sse\"}").await, Some(0.0));
    assert_eq!(gateway.metric("gateway_refused_total{code=\"method_not_allowed\"}").await, Some(4.0));
    assert_eq!(gateway.metric("gateway_refused_total{code=\"not_acceptable\"}").await, Some(1.0));
}

#[tokio::test]
async fn a_stream_says_by_its_status_or_its_last_block_whether_to_come_back() {
    let gateway = GatewayProcess::start(
        options()
            .env("GATEWAY_MAX_SESSIONS", "3")
            .env("GATEWAY_DRAIN_GRACE", "0s")
            .env("GATEWAY_DRAIN_WINDOW", "1s")
            .env("GATEWAY_DRAIN_DEADLINE", "20s"),
    )
    .await;
    // For good: a status, which a native EventSource takes as final.
    let revoked = token(&json!({"sub": "9", "jti": "gone"}));
    let answer = http::post_json(gateway.admin(), "/v1/revocations", &json!({"jti": "gone"})).await;
    assert_eq!(answer.status(), 204);
    let expired = token(&json!({"sub": "9", "exp": 1}));
    let good = usual_token();
    let q = |token: &str| format!("/v1/sse?access_token={token}");
    for (path, status, code) in [
        ("/v1/sse".to_owned(), 401, "token_missing"),
        (q("x.y.z"), 401, "token_invalid"),
        (q(""), 401, "token_invalid"),
        (q(&expired), 401, "token_expired"),
        (q(&revoked), 401, "token_revoked"),
        (format!("{}&channel=secret", q(&good)), 403, "forbidden"),
        (format!("{}&channel=room:*", q(&good)), 403, "forbidden"),
        ("/v1/other".to_owned(), 404, "not_found"),
    ] {
        let answer = http::get(gateway.public(), &path).await;
        assert_eq!((answer.status(), &answer.json()["code"]), (status, &json!(code)), "{path}");
        assert_eq!(answer.header("content-type"), Some("application/problem+json"));
        assert_eq!(answer.header("connection"), Some("close"));
        assert_eq!(answer.header("retry-after"), None, "{path}");
        assert_eq!(answer.header("www-authenticate").is_some(), status == 401, "{path}");
    }
    // In the midst of a stream: what to do stands in the last block.
    let ending = sse_with(&gateway, &token_for(3), "/v1/sse").await;
    let (bye, retry) = last_words(ending).await;
    assert_eq!((&bye["reason"], &bye["reconnect"]), (&json!("token_expired"), &json!("reauth")));
    assert_eq!(Some(retry), bye["after_ms"].as_u64().map(|ms| ms.max(1)));
    let kicked = sse_with(&gateway, &good, "/v1/sse").await;
    let answer = http::request(gateway.admin(), "DELETE", "/v1/sessions?user=42", &[], b"").await;
    assert_eq!(answer.status(), 200, "{}", answer.text());
    let (bye, retry) = last_words(kicked).await;
    assert_eq!((&bye["reason"], &bye["reconnect"], retry), (&json!("kicked"), &json!("never"), 86_400_000));
    gateway.until_metric("gateway_sessions_open{transport=\"sse\"}", 0.0).await;

    // For the moment: 200 and a drawn delay, or a status for who shows that it can see one.
    let mut held = Vec::new();
    for _ in 0..3 {
        held.push(sse_with(&gateway, &good, "/v1/sse").await);
    }
    let (bye, retry) =
        last_words(SseClient::connect(gateway.public(), &q(&good), &[]).await.expect("a soft refusal")).await;
    assert_eq!((&bye["reason"], &bye["reconnect"]), (&json!("overload"), &json!("after")));
    assert!(retry >= 1_000, "{retry}");
    let Err(refused) = SseClient::connect(gateway.public(), "/v1/sse", &[("Authorization", &bearer(&good))]).await
    else {
        panic!("a fourth of three");
    };
    assert_eq!((refused.status(), &refused.json()["code"]), (503, &json!("at_capacity")));
    assert!(refused.header("retry-after").is_some_and(|s| s.parse::<u32>().is_ok_and(|s| s >= 1)));
    // Leaving: each stream ends with a delay of its own.
    assert_eq!(http::post_json(gateway.admin(), "/v1/drain", &json!({})).await.status(), 202);
    for mut stream in held {
        stream.set_patience(SOON);
        let (bye, retry) = last_words(stream).await;
        assert_eq!((&bye["reason"], &bye["reconnect"]), (&json!("drain"), &json!("after")));
        assert_eq!(Some(retry), bye["after_ms"].as_u64().map(|ms| ms.max(1)));
        assert!(bye["id"].is_string(), "the position goes with it: {bye}");
    }
}

/// The `bye` in the last block before the body's end, and its `retry:`.
async fn last_words(mut stream: SseClient) -> (serde_json::Value, u64) {
    let blocks = stream.until_end().await;
    let last = blocks.last().expect("a block");
    assert_eq!(last.event.as_deref(), Some("bye"), "{blocks:?}");
    (last.json(), last.retry.expect("a bye tells when to come back"))
}
