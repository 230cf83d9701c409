//! From which page a session may be opened, and which pages may read the answer.

use serde_json::json;
use testkit::gateway::GatewayProcess;
use testkit::http::{self, Response};
use testkit::sse::SseClient;

use super::{bearer, code_of, options, revoke, token, try_ws, usual_token};

const APP: &str = "https://app.example";

#[tokio::test]
async fn with_a_cookie_only_the_named_origin_and_our_own_pass() {
    let gateway =
        GatewayProcess::start(options().env("GATEWAY_ALLOWED_ORIGINS", APP).env("GATEWAY_AUTH_COOKIE", "session"))
            .await;
    let cookie = format!("session={}", usual_token());
    let ours = format!("http://{}", gateway.public());
    let ask = async |lines: &[(&str, &str)]| {
        let ws = match try_ws(&gateway, "/v1/ws", lines).await {
            Ok(_) => 101,
            Err(refused) => refused.status(),
        };
        let sse = match SseClient::connect(gateway.public(), "/v1/sse", lines).await {
            Ok(_) => 200,
            Err(refused) => refused.status(),
        };
        (ws, sse)
    };
    for (origin, may) in [
        (APP, true),
        ("https://app.example:443", true),
        ("HTTPS://APP.EXAMPLE", true),
        (ours.as_str(), true),
        ("http://app.example", false),
        ("https://app.example:8443", false),
        ("https://app.example/", false),
        ("https://app.example.evil.test", false),
        ("https://evil.test/app.example", false),
        ("https://evil-app.example", false),
        ("https://user@app.example", false),
        ("https://app.example:", false),
        ("https://app.example:0443x", false),
        ("null", false),
        ("", false),
        ("http://a:b", false),
        ("*", false),
        ("app.example", false),
        ("https://app.example, https://app.example", false),
        ("https://\u{e4}pp.example", false),
    ] {
        let expected = if may { (101, 200) } else { (403, 403) };
        assert_eq!(ask(&[("Cookie", &cookie), ("Origin", origin)]).await, expected, "{origin:?}");
    }
    assert_eq!(ask(&[("Cookie", &cookie), ("Origin", APP), ("Origin", APP)]).await, (403, 403), "twice");
    // Without an origin a cookie opens a stream for our own pages only, and a WebSocket never.
    assert_eq!(ask(&[("Cookie", &cookie)]).await, (403, 403));
    for (site, sse) in [("same-origin", 200), ("same-site", 403), ("cross-site", 403), ("none", 403), ("", 403)] {
        assert_eq!(ask(&[("Cookie", &cookie), ("Sec-Fetch-Site", site)]).await, (403, sse), "{site}");
    }
    // A header is sent by who has the token: a program without an origin passes, a foreign page
    // does not where origins are named.
    let auth = bearer(&usual_token());
    assert_eq!(ask(&[("Authorization", &auth)]).await, (101, 200));
    assert_eq!(ask(&[("Authorization", &auth), ("Origin", APP)]).await, (101, 200));
    assert_eq!(ask(&[("Authorization", &auth), ("Origin", "https://evil.test")]).await, (403, 403));
    // The origin is looked at before the token.
    let bad = [("Cookie", "session=x.y.z"), ("Origin", "https://evil.test")];
    assert_eq!(ask(&bad).await, (403, 403));

    // Where none is named, only cookies are asked for one.
    let gateway = GatewayProcess::start(options().env("GATEWAY_AUTH_COOKIE", "session")).await;
    let foreign = ("Origin", "https://evil.test");
    assert!(try_ws(&gateway, "/v1/ws", &[("Authorization", &auth), foreign]).await.is_ok());
    let refused = try_ws(&gateway, "/v1/ws", &[("Cookie", &cookie), foreign]).await.err().expect("a refusal");
    assert_eq!((refused.status(), code_of(&refused).as_str()), (403, "origin_forbidden"));
}

/// What a page of this origin may know of an answer.
fn check_cors(answer: &testkit::http::Head, may: bool, what: &str) {
    let of = |name: &str| answer.header(name);
    assert_eq!(of("vary"), Some("Origin"), "{what}");
    assert_eq!(of("access-control-allow-origin"), may.then_some(APP), "{what}");
    assert_eq!(of("access-control-allow-credentials"), may.then_some("true"), "{what}");
    assert_eq!(of("access-control-expose-headers"), may.then_some("Retry-After"), "{what}");
}

#[tokio::test]
async fn a_named_page_may_read_every_answer_and_another_page_none() {
    let gateway = GatewayProcess::start(
        options()
            .env("GATEWAY_ALLOWED_ORIGINS", format!("{APP}, https://second.example"))
            .env("GATEWAY_AUTH_COOKIE", "session")
            .env("GATEWAY_MAX_SESSIONS", "1"),
    )
    .await;
    let cookie = format!("session={}", usual_token());
    let revoked = token(&json!({"sub": "42", "jti": "gone"}));
    revoke(&gateway, &json!({"jti": "gone"})).await;
    let ask = async |path: &str, origin: &str, auth: Option<&str>| -> Response {
        let mut headers = vec![("Origin", origin)];
        headers.extend(auth.map(|auth| ("Authorization", auth)));
        http::request(gateway.public(), "GET", path, &headers, b"").await
    };
    let good = bearer(&usual_token());
    for (path, auth, status) in [
        ("/v1/sse", bearer("x.y.z"), 401),
        ("/v1/sse", bearer(&revoked), 401),
        ("/v1/sse?channel=secret", good.clone(), 403),
        ("/v1/nowhere", good.clone(), 404),
    ] {
        let answer = ask(path, APP, Some(&auth)).await;
        assert_eq!(answer.status(), status, "{path}");
        check_cors(&answer.head, true, path);
    }
    let foreign = ask("/v1/sse", "https://evil.test", Some(&good)).await;
    assert_eq!(foreign.status(), 403);
    check_cors(&foreign.head, false, "a foreign page");

    let headers = [("Origin", APP), ("Cookie", cookie.as_str())];
    let stream = SseClient::connect(gateway.public(), "/v1/sse", &headers).await.expect("a stream");
    check_cors(&stream.head, true, "the stream");
    // The one place is taken now.
    let full = ask("/v1/sse", APP, Some(&good)).await;
    assert_eq!((full.status(), full.header("retry-after").is_some()), (503, true));
    check_cors(&full.head, true, "503");
    let soft = SseClient::connect(gateway.public(), "/v1/sse", &headers).await.expect("a soft refusal");
    check_cors(&soft.head, true, "the soft refusal");
    drop(stream);
    gateway.until_metric("gateway_sessions_open{transport=\"sse\"}", 0.0).await;

    for (origin, may) in [(APP, true), ("https://evil.test", false), ("null", false)] {
        let preflight = [
            ("Origin", origin),
            ("Access-Control-Request-Method", "GET"),
            ("Access-Control-Request-Headers", "authorization,last-event-id"),
        ];
        let answer = http::request(gateway.public(), "OPTIONS", "/v1/sse", &preflight, b"").await;
        assert_eq!(answer.status(), 204, "{origin}");
        check_cors(&answer.head, may, origin);
        let allowed = answer.header("access-control-allow-headers").unwrap_or_default().to_ascii_lowercase();
        assert_eq!(allowed.contains("authorization") && allowed.contains("last-event-id"), may, "{origin}: {allowed}");
        assert_eq!(answer.header("access-control-allow-methods"), may.then_some("GET"));
    }
}
