//! What never reaches a log, at any level, on any path.

use serde_json::json;
use testkit::gateway::{GatewayProcess, Signal, token};
use testkit::http;
use testkit::redis::{RedisOptions, RedisServer};
use testkit::sse::SseClient;

use super::{SOON, UPGRADE, bearer, head, now, options, raw, try_ws};

const ADMIN_KEY: &str = "an-admin-key-that-nobody-may-read";
const REDIS_PASSWORD: &str = "a-redis-password-that-nobody-may-read";
const PAYLOAD: &str = "a-payload-that-nobody-may-read";

/// Takes a credential over every road on which one may come.
async fn walk(gateway: &GatewayProcess, token: &str) {
    let origin = format!("http://{}", gateway.public());
    let encoded: String = token.bytes().map(|byte| format!("%{byte:02X}")).collect();
    let twice = encoded.replace('%', "%25");
    let paths = [
        format!("access_token={token}"),
        format!("%61ccess_token={token}"),
        format!("access%5Ftoken={encoded}"),
        format!("ACCESS_TOKEN={token}"),
        format!("Access_Token={encoded}"),
        format!("access_token={twice}"),
        format!("token={token}"),
        format!("channel=x;access_token={token}"),
        format!("channel={token}"),
        format!("last_event_id={token}"),
    ];
    for query in &paths {
        for path in ["/v1/ws", "/v1/sse", "/v1/nowhere", "/v1/client.js"] {
            let request = head(&format!("GET {path}?{query}"), &[&UPGRADE[..], &[("Origin", &origin)]].concat());
            raw(gateway, &request).await;
        }
    }
    let auth = bearer(token);
    let carried = format!("tidegate.v1, bearer.{token}");
    let cookie = format!("session={token}");
    for headers in [
        &[("Authorization", auth.as_str())][..],
        &[("Authorization", &auth), ("Authorization", &auth)],
        &[("Authorization", &auth), ("Content-Length", "5")],
        &[("Authorization", token)],
        &[("Sec-WebSocket-Protocol", &carried)],
        &[("Sec-WebSocket-Protocol", token)],
        &[("Cookie", &cookie), ("Origin", &origin)],
        &[("Cookie", &cookie), ("Origin", "https://evil.test")],
        &[("Last-Event-ID", token)],
        &[("Referer", token), ("X-Token", token)],
        &[("Host", token)],
        // No head at all that hyper would take.
        &[("Bad\u{1}Name", token)],
    ] {
        for path in ["/v1/ws", "/v1/sse"] {
            raw(gateway, &head(&format!("GET {path}"), &[&UPGRADE[..], headers].concat())).await;
        }
    }
    raw(gateway, &head(&format!("GET /v1/ws/{token}"), &UPGRADE)).await;
    raw(gateway, &head(&format!("{token} /v1/ws"), &UPGRADE)).await;
    for (method, path) in [("POST", "/v1/publish"), ("DELETE", "/v1/sessions?user=1"), ("GET", "/v1/nowhere")] {
        http::request(gateway.admin(), method, path, &[("Authorization", &auth)], b"{}").await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn no_token_payload_key_or_password_is_ever_logged() {
    let redis = RedisServer::start(RedisOptions { requirepass: Some(REDIS_PASSWORD.into()), ..Default::default() });
    let mut gateway = GatewayProcess::start(
        options()
            .env("GATEWAY_LOG", "trace")
            .env("GATEWAY_REDIS_URL", redis.url())
            // In the end there is none that lets it in, and it is waited for.
            .env("GATEWAY_REDIS_TIMEOUT", "2s")
            .env("GATEWAY_AUTH_TIMEOUT", "4s")
            .env("GATEWAY_AUTH_COOKIE", "session")
            .env("GATEWAY_ADMIN_KEY", ADMIN_KEY)
            .env("GATEWAY_DRAIN_GRACE", "0s"),
    )
    .await;
    // As base64 the first bytes of a payload are always the same, so a marker stands in the midst.
    let claims = |more: serde_json::Value| {
        let mut claims = json!({"sub": "42", "zz_marker": "marker-marker-marker", "channels": ["news"]});
        claims.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        token(&claims)
    };
    let good = claims(json!({}));
    let expired = claims(json!({"exp": now() - 5}));
    let revoked = claims(json!({"jti": "gone"}));
    let key = ("Authorization", format!("Bearer {ADMIN_KEY}"));
    let admin = [(key.0, key.1.as_str()), ("Content-Type", "application/json")];
    let answer = http::request(gateway.admin(), "POST", "/v1/revocations", &admin, br#"{"jti":"gone"}"#).await;
    assert_eq!(answer.status(), 204);
    let malformed = "eyJhbGciOiJIUzI1NiJ9.eyJtYXJrZXIiOiJtYWxmb3JtZWQtbWFsZm9ybWVkIn0.bWFsZm9ybWVkLXNpZ25hdHVyZQ";
    let tokens = [good.as_str(), &expired, &revoked, malformed];
    for token in tokens {
        walk(&gateway, token).await;
    }
    // In an open session: a new token, a payload in and out.
    let auth = bearer(&good);
    let mut client = try_ws(&gateway, "/v1/ws", &[("Authorization", &auth)]).await.expect("let in");
    let mut stream =
        SseClient::connect(gateway.public(), "/v1/sse", &[("Authorization", &auth)]).await.expect("let in");
    client.until("ready").await;
    stream.until("ready").await;
    for token in tokens {
        client.send_json(&json!({"type": "auth", "token": token})).await;
        client.json().await;
    }
    client.send_json(&json!({"type": PAYLOAD, "data": PAYLOAD})).await;
    client.json().await;
    let body = json!({"channel": "news", "data": {"text": PAYLOAD}, "idempotency_key": PAYLOAD}).to_string();
    for body in [body.as_str(), &body[..body.len() - 1], &body.replace("news", "a b")] {
        http::request(gateway.admin(), "POST", "/v1/publish", &admin, body.as_bytes()).await;
    }
    assert_eq!(client.json().await["data"]["text"], PAYLOAD);
    assert_eq!(stream.block().await.json()["data"]["text"], PAYLOAD);
    // Redis goes and comes, and refuses.
    redis.cli(&["CONFIG", "SET", "requirepass", "another"]);
    let kill = "AUTH another\r\nCLIENT KILL TYPE pubsub\r\nCLIENT KILL TYPE normal SKIPME yes\r\n";
    let mut wire = http::Wire::new(tokio::net::TcpStream::connect(redis.addr()).await.unwrap());
    wire.send(kill.as_bytes()).await.unwrap();
    assert_eq!(wire.exactly(5).await.unwrap(), b"+OK\r\n");
    try_ws(&gateway, "/v1/ws", &[("Authorization", &auth)]).await.ok();
    gateway.signal(Signal::Term);
    gateway.wait(SOON).await;

    let log = gateway.stderr();
    assert!(log.contains("TRACE") || log.contains("DEBUG"), "the log is at its loudest: {log}");
    for token in tokens {
        for part in token.split('.').skip(1) {
            let middle = &part[part.len() / 4..part.len() / 4 + 20];
            assert!(!log.contains(middle), "a part of a token is logged: {}", line_with(&log, middle));
        }
    }
    for secret in [ADMIN_KEY, REDIS_PASSWORD, PAYLOAD, testkit::gateway::JWT_SECRET, "marker-marker"] {
        assert!(!log.contains(secret), "{}", line_with(&log, secret));
    }
}

fn line_with<'a>(log: &'a str, what: &str) -> &'a str {
    log.lines().find(|line| line.contains(what)).unwrap_or_default()
}
