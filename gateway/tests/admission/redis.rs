//! The revocation list in Redis: written by us, by others, away; and what never asks it.

use std::time::Duration;

use serde_json::{Value, json};
use testkit::gateway::{GatewayOptions, GatewayProcess};
use testkit::http::Wire;
use testkit::lag::Lag;
use testkit::proxy::{Direction, Flow, Proxy};
use testkit::redis::RedisServer;
use testkit::sse::SseClient;
use tokio::net::TcpStream;
use tokio::time::{Instant, timeout};

use super::{SOON, bearer, code_of, now, options, refused, revoke, token, try_ws, usual_token, with_token, ws};

fn on(redis: &RedisServer) -> GatewayOptions {
    options().env("GATEWAY_REDIS_URL", redis.url())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_revocation_holds_whoever_wrote_it() {
    let redis = RedisServer::plain();
    let gateway = GatewayProcess::start(on(&redis).env("GATEWAY_REVOCATION_SWEEP", "2s")).await;
    let second = GatewayProcess::start(on(&redis)).await;
    let of = |claims: Value| token(&claims);
    let past = now() - 100;
    // Each kind, written by the API of another node and by a stranger.
    redis.cli(&["SET", "tidegate:revoked:jti:foreign", "anything"]);
    redis.cli(&["SET", "tidegate:revoked:sid:foreign", ""]);
    redis.cli(&["SET", "tidegate:revoked:sub:foreign", &past.to_string()]);
    redis.cli(&["FCALL", "tidegate_revoke", "1", "tidegate:log", "jti", "function", "60"]);
    revoke(&second, &json!({"jti": "api"})).await;
    revoke(&second, &json!({"sid": "api", "ttl": 60})).await;
    revoke(&second, &json!({"sub": "api", "before": past, "ttl": "1h"})).await;
    let revoked = || refused(401, "token_revoked");
    let good = || (101, String::new());
    for (claims, expected) in [
        (json!({"sub": "1", "jti": "foreign"}), revoked()),
        (json!({"sub": "1", "sid": "foreign"}), revoked()),
        (json!({"sub": "foreign"}), revoked()),
        (json!({"sub": "foreign", "iat": past}), revoked()),
        (json!({"sub": "foreign", "iat": past + 1}), good()),
        (json!({"sub": "1", "jti": "function"}), revoked()),
        (json!({"sub": "1", "jti": "api"}), revoked()),
        (json!({"sub": "1", "sid": "api"}), revoked()),
        (json!({"sub": "api", "iat": past - 1}), revoked()),
        (json!({"sub": "api", "iat": past + 1}), good()),
        (json!({"sub": "1", "jti": "other", "sid": "other"}), good()),
        // A name does not reach another kind's list, nor a pattern anything.
        (json!({"sub": "1", "jti": "jti:foreign"}), good()),
        (json!({"sub": "1", "jti": "*"}), good()),
    ] {
        assert_eq!(with_token(&gateway, &of(claims.clone())).await, expected, "{claims}");
    }
    // Taken back by a stranger, the list decides.
    redis.cli(&["DEL", "tidegate:revoked:sid:foreign"]);
    let until = Instant::now() + SOON;
    while with_token(&gateway, &of(json!({"sub": "1", "sid": "foreign"}))).await.0 != 101 {
        assert!(Instant::now() < until, "still refused");
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
    // An open session ends on every node.
    let auth = bearer(&of(json!({"sub": "9", "jti": "open"})));
    let mut here = try_ws(&gateway, "/v1/ws", &[("Authorization", &auth)]).await.expect("let in");
    let mut there = SseClient::connect(second.public(), "/v1/sse", &[("Authorization", &auth)]).await.expect("let in");
    here.until("ready").await;
    there.until("ready").await;
    let stays = ws(&gateway).await;
    let (lag, began) = (Lag::watch(), Instant::now());
    revoke(&second, &json!({"jti": "open"})).await;
    let (messages, code) = here.until_closed().await;
    let blocks = there.until_end().await;
    assert!(began.elapsed() < Duration::from_secs(2) + lag.longest(), "{:?}", began.elapsed());
    assert_eq!((code, &messages.last().expect("a bye")["reason"]), (4403, &json!("revoked")));
    assert_eq!(blocks.last().expect("a bye").json()["reason"], "revoked");
    // Of what a stranger wrote nobody is told; it is found.
    let auth = bearer(&token(&json!({"sub": "9", "sid": "swept"})));
    let mut swept = try_ws(&gateway, "/v1/ws", &[("Authorization", &auth)]).await.expect("let in");
    swept.until("ready").await;
    redis.cli(&["SET", "tidegate:revoked:sid:swept", "1"]);
    assert_eq!(swept.until_closed().await.1, 4403);
    gateway.until_metric("gateway_sessions_open{transport=\"ws\"}", 1.0).await;
    drop(stays);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_foreign_list_is_read_as_it_stands() {
    let redis = RedisServer::plain();
    let gateway =
        GatewayProcess::start(on(&redis).env("GATEWAY_REVOCATION_KEYS", "jti=blacklist:{jti},sub=logout/{sub}")).await;
    redis.cli(&["SET", "blacklist:a", "1"]);
    redis.cli(&["SET", "logout/7", &now().to_string()]);
    redis.cli(&["SET", "tidegate:revoked:sid:s", "1"]);
    for (claims, expected) in [
        (json!({"sub": "1", "jti": "a"}), refused(401, "token_revoked")),
        (json!({"sub": "7", "iat": now() - 5}), refused(401, "token_revoked")),
        (json!({"sub": "7", "iat": now() + 100}), (101, String::new())),
        // A kind that is left out is not asked.
        (json!({"sub": "1", "sid": "s"}), (101, String::new())),
    ] {
        assert_eq!(with_token(&gateway, &token(&claims)).await, expected, "{claims}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn while_the_list_is_silent_newcomers_are_told_so_and_the_others_stay() {
    let redis = RedisServer::plain();
    let proxy = Proxy::start(redis.addr()).await;
    // An admission ends by its time, and one command by its own, however silent Redis is.
    const AUTH_TIMEOUT: Duration = Duration::from_secs(2);
    let behind = || {
        let behind = options().env("GATEWAY_REDIS_URL", redis.url_at(proxy.port()));
        behind.env("GATEWAY_REDIS_TIMEOUT", "1s").env("GATEWAY_AUTH_TIMEOUT", "2s")
    };
    let refusing = GatewayProcess::start(behind()).await;
    let allowing = GatewayProcess::start(behind().env("GATEWAY_REVOCATION_UNAVAILABLE", "allow")).await;
    let gone = token(&json!({"sub": "1", "jti": "gone"}));
    revoke(&refusing, &json!({"jti": "gone"})).await;
    // Both have seen it.
    for gateway in [&refusing, &allowing] {
        assert_eq!(with_token(gateway, &gone).await, refused(401, "token_revoked"));
    }
    let mut open = Vec::new();
    for _ in 0..5 {
        open.push(ws(&refusing).await);
    }
    let auth = bearer(&usual_token());
    let mut stream =
        SseClient::connect(refusing.public(), "/v1/sse", &[("Authorization", &auth)]).await.expect("let in");
    stream.until("ready").await;

    // A black hole: what is sent is taken, and nothing ever comes back.
    proxy.set(Direction::Up, Flow::Swallow);
    proxy.set(Direction::Down, Flow::Swallow);
    let (lag, began) = (Lag::watch(), Instant::now());
    let answer = try_ws(&refusing, "/v1/ws", &[("Authorization", &auth)]).await.err().expect("a refusal");
    assert!(began.elapsed() < 2 * AUTH_TIMEOUT + lag.longest(), "{:?}", began.elapsed());
    assert_eq!((answer.status(), code_of(&answer).as_str()), (503, "auth_unavailable"));
    assert!(answer.header("retry-after").is_some_and(|s| s.parse::<u32>().is_ok_and(|s| s >= 1)));
    assert_eq!(answer.header("www-authenticate"), None, "nobody is told to sign in again");
    let soft = SseClient::connect(refusing.public(), &format!("/v1/sse?access_token={}", usual_token()), &[]).await;
    assert_eq!(soft.expect("a soft refusal").until_end().await.len(), 1);
    // What was seen revoked stays so; a bad signature needs nobody.
    assert_eq!(with_token(&refusing, &gone).await, refused(401, "token_revoked"));
    assert_eq!(with_token(&refusing, "x.y.z").await, refused(401, "token_invalid"));
    assert_eq!(with_token(&allowing, &gone).await, refused(401, "token_revoked"));
    // The other mode lets in; what needs Redis comes later.
    let mut unchecked = try_ws(&allowing, "/v1/ws", &[("Authorization", &auth)]).await.expect("let in");
    assert_eq!(unchecked.json().await["type"], "hello");
    // Somebody revoked this one, and nobody here can know yet.
    redis.cli(&["SET", "tidegate:revoked:jti:unseen", "1"]);
    let unseen = bearer(&token(&json!({"sub": "1", "jti": "unseen"})));
    let mut unseen = try_ws(&allowing, "/v1/ws", &[("Authorization", &unseen)]).await.expect("let in");
    assert_eq!(unseen.json().await["type"], "hello");
    assert_eq!(refusing.metric("gateway_sessions_open{transport=\"ws\"}").await, Some(5.0));
    assert_eq!(refusing.metric("gateway_sessions_open{transport=\"sse\"}").await, Some(1.0));

    proxy.set(Direction::Up, Flow::Pass);
    proxy.set(Direction::Down, Flow::Pass);
    proxy.cut();
    assert_eq!(unchecked.json().await["type"], "ready");
    let (messages, code) = unseen.until_closed().await;
    assert_eq!((code, &messages.last().expect("a bye")["reason"]), (4403, &json!("revoked")));
    let until = Instant::now() + SOON;
    while with_token(&refusing, &usual_token()).await.0 != 101 {
        assert!(Instant::now() < until, "{}", refusing.stderr());
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    // Nobody lost anything.
    refusing.publish("news", &json!("after")).await;
    for client in &mut open {
        assert_eq!(client.until("event").await.last().expect("an event")["data"], "after");
    }
    assert_eq!(stream.until("event").await.last().expect("an event").json()["data"], "after");
}

#[tokio::test(flavor = "multi_thread")]
async fn forged_and_expired_tokens_never_reach_redis() {
    let redis = RedisServer::plain();
    // Its one report is there before anything is counted, and the next is far off.
    let quiet = on(&redis).env("GATEWAY_FLEET_REPORT", "5m").env("GATEWAY_FLEET_TTL", "15m");
    let gateway = GatewayProcess::start(quiet.env("GATEWAY_AUTH_COOKIE", "session")).await;
    let until = Instant::now() + SOON;
    while redis.cli(&["EXISTS", "tidegate:fleet:idx"]) != "1" {
        assert!(Instant::now() < until, "it never reported");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    // What the gateway does by itself: its links, its beacons.
    let asked = |redis: &RedisServer| {
        let stats = redis.cli(&["INFO", "commandstats"]);
        let of = |line: &str| line.strip_prefix("cmdstat_")?.split_once(':').map(|(name, _)| name.to_owned());
        let own =
            ["ping", "publish", "info", "config|resetstat", "client|setinfo", "client|list", "hello", "subscribe"];
        stats.lines().filter_map(of).filter(|name| !own.contains(&name.as_str())).collect::<Vec<_>>()
    };
    let forged =
        hub::auth::mint(b"another secret of thirty-two bytes", &json!({"sub": "42", "exp": now() + 60, "jti": "a"}));
    let forged = forged.expect("long enough");
    let expired = token(&json!({"sub": "42", "jti": "a", "exp": now() - 1}));
    redis.cli(&["CONFIG", "RESETSTAT"]);
    let mut slowest = Duration::ZERO;
    for i in 0..200 {
        let began = Instant::now();
        let (token, code) = if i % 2 == 0 { (&forged, "token_invalid") } else { (&expired, "token_expired") };
        let answer = try_ws(&gateway, "/v1/ws", &[("Authorization", &bearer(token))]).await.err().expect("a refusal");
        slowest = slowest.max(began.elapsed());
        assert_eq!((answer.status(), code_of(&answer).as_str()), (401, code));
        assert_eq!(answer.header("retry-after"), None, "there is nothing to wait for");
    }
    // Nor do refusals for a method, a body, an origin or a channel.
    for (path, headers) in [
        ("/v1/ws?channel=secret", vec![("Authorization", bearer(&usual_token()))]),
        ("/v1/ws", vec![("Authorization", bearer(&usual_token())), ("Content-Length", "5".into())]),
        ("/v1/ws", vec![("Cookie", format!("session={}", usual_token())), ("Origin", "https://evil.test".into())]),
        ("/v1/ws", vec![]),
    ] {
        let headers: Vec<_> = headers.iter().map(|(name, value)| (*name, value.as_str())).collect();
        assert!(try_ws(&gateway, path, &headers).await.is_err(), "{path}");
    }
    let asked_for_the_refused = asked(&redis);
    assert!(asked_for_the_refused.is_empty(), "{asked_for_the_refused:?}");
    // Nobody of them waited for anything: an admission may take twice as long.
    assert!(slowest < Duration::from_secs(5), "{slowest:?}");
    // The good one does ask, so the test sees what it looks for.
    ws(&gateway).await;
    assert!(asked(&redis).iter().any(|name| name == "mget"), "{:?}", asked(&redis));
    gateway.until_metric("gateway_refused_total{code=\"token_invalid\"}", 100.0).await;
    gateway.until_metric("gateway_refused_total{code=\"token_expired\"}", 100.0).await;
}

/// One command as Redis reads it; arguments of any bytes.
fn command(args: &[&[u8]]) -> Vec<u8> {
    let mut out = format!("*{}\r\n", args.len()).into_bytes();
    for arg in args {
        out.extend(format!("${}\r\n", arg.len()).as_bytes());
        out.extend(*arg);
        out.extend(b"\r\n");
    }
    out
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_no_text_is_refused_at_the_door_or_skipped_and_counted() {
    let redis = RedisServer::plain();
    let gateway = GatewayProcess::start(on(&redis)).await;
    let mut client = ws(&gateway).await;
    let auth = bearer(&usual_token());
    let mut stream =
        SseClient::connect(gateway.public(), "/v1/sse", &[("Authorization", &auth)]).await.expect("let in");
    stream.until("ready").await;
    let mut wire = Wire::new(TcpStream::connect(redis.addr()).await.unwrap());
    let nested = [vec![b'['; 100_000], vec![b']'; 100_000]].concat();
    let large = [b"\"".to_vec(), vec![b'x'; 70_000], b"\"".to_vec()].concat();
    // Through the Function: names, size and UTF-8 are its to refuse.
    for data in [&b"\xff\xfe\x00\x80"[..], b"\"\xed\xa0\x80\"", &large] {
        wire.send(&command(&[b"FCALL", b"tidegate_publish", b"1", b"tidegate:log", b"news", data])).await.unwrap();
        assert_eq!(reply(&mut wire).await, b'-', "{:?}", &data[..data.len().min(20)]);
    }
    for channel in [&b""[..], b"a b", b"news\n", b"\xff", &[b'x'; 201]] {
        wire.send(&command(&[b"FCALL", b"tidegate_publish", b"1", b"tidegate:log", channel, b"1"])).await.unwrap();
        assert_eq!(reply(&mut wire).await, b'-', "{channel:?}");
    }
    // What it takes and what goes past it, a node must bear.
    let mut n_bad = 0;
    for data in [&b"{"[..], b"", b"nul", &nested] {
        wire.send(&command(&[b"FCALL", b"tidegate_publish", b"1", b"tidegate:log", b"news", data])).await.unwrap();
        n_bad += usize::from(reply(&mut wire).await == b'$');
    }
    let over_the_limit = [br#"{"data":"#, &large[..], b"}"].concat();
    let past_it = [
        &b""[..],
        b"\xff\xfe\x00\x80",
        b"{",
        b"null",
        b"{\"data\":",
        b"{\"event\":7}",
        b"9-9",
        &nested,
        &over_the_limit,
        // JSON but for one byte, in every place where a text may stand.
        b"{\"data\":\"\xed\xa0\x80\"}",
        b"{\"event\":\"\xff\",\"data\":1}",
        b"{\"data\":1,\"\xff\":2}",
        b"- -\n\"\xed\xa0\x80\"",
        b"- \xff\n1",
    ];
    n_bad += past_it.len();
    for payload in past_it {
        wire.send(&command(&[b"PUBLISH", b"tidegate:live:news", payload])).await.unwrap();
        assert_eq!(reply(&mut wire).await, b':');
    }
    wire.send(&command(&[b"PUBLISH", b"tidegate:live:news", br#"{"event":"e","data":{"is":"good"}}"#])).await.unwrap();
    reply(&mut wire).await;
    let heard = client.json().await;
    assert_eq!(heard, json!({"type": "event", "channel": "news", "event": "e", "data": {"is": "good"}}));
    assert_eq!(stream.block().await.json(), heard);
    // A logged one as well, on the same connections.
    let id = gateway.publish("news", &json!("still here")).await;
    assert_eq!(client.json().await["id"], json!(id));
    assert_eq!(stream.block().await.id, Some(id));
    let until = Instant::now() + SOON;
    while n_skipped(&gateway).await < n_bad as f64 {
        assert!(Instant::now() < until, "{} of {n_bad} were counted", n_skipped(&gateway).await);
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    assert_eq!(n_skipped(&gateway).await, n_bad as f64, "each once");
    assert!(!gateway.stderr().contains("panicked"));
}

/// What the gateway has passed over so far, for whatever reason.
async fn n_skipped(gateway: &GatewayProcess) -> f64 {
    let text = testkit::http::get(gateway.probes(), "/metrics").await;
    let lines = text.text().lines().filter(|line| line.starts_with("gateway_events_skipped_total{"));
    lines.filter_map(|line| line.rsplit(' ').next()?.parse::<f64>().ok()).sum()
}

/// The first byte of a reply of one line or one bulk; the rest of it is taken, too.
async fn reply(wire: &mut Wire) -> u8 {
    let read = async {
        let kind = wire.exactly(1).await.unwrap()[0];
        let mut line = Vec::new();
        while !line.ends_with(b"\r\n") {
            line.extend(wire.exactly(1).await.unwrap());
        }
        if kind == b'$' {
            let n: usize = std::str::from_utf8(&line).unwrap().trim().parse().unwrap();
            wire.exactly(n + 2).await.unwrap();
        }
        kind
    };
    timeout(SOON, read).await.expect("Redis answers")
}
