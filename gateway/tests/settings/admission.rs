//! Who may come, and how the others are told.

use std::process::{Command, Stdio};

use hub::auth::{Algorithm, mint_with_pem, mint_with_secret};
use hub::clock::Clock;
use serde_json::{Value, json};
use testkit::gateway::{GatewayProcess, JWT_SECRET};
use testkit::sse::SseClient;
use testkit::temp::TempDir;
use testkit::ws::WsClient;
use tokio::time::{Instant, sleep};

use super::{LOOK, SOON, bearer, options, outcome, refused, try_ws, usual_token, with, ws};

#[tokio::test]
async fn with_the_query_off_a_token_there_is_as_if_it_were_not() {
    let off = || with(&[("GATEWAY_AUTH_QUERY", "off")]);
    let gateway = GatewayProcess::start(off()).await;
    let (token, auth) = (usual_token(), bearer(&usual_token()));
    for query in [format!("access_token={token}"), "access_token=".to_owned(), "access_token=x.y.z".to_owned()] {
        let (ws, sse) = (format!("/v1/ws?{query}"), format!("/v1/sse?{query}"));
        let missing = refused(401, "token_missing");
        assert_eq!(outcome(WsClient::connect(gateway.public(), &ws, &[]).await), missing, "{query}");
        assert_eq!(outcome(SseClient::connect(gateway.public(), &sse, &[]).await), missing, "{query}");
        let header = [("Authorization", auth.as_str())];
        let mut client = WsClient::connect(gateway.public(), &ws, &header).await.expect("the header decides");
        assert_eq!(client.until("ready").await[0]["user"], "42");
    }
    // Nor does it keep from an anonymous session who has nothing else.
    let open = GatewayProcess::start(off().env("GATEWAY_ANONYMOUS_CHANNELS", "public")).await;
    let path = format!("/v1/ws?access_token={token}&channel=public");
    let mut anonymous = WsClient::connect(open.public(), &path, &[]).await.expect("let in");
    let hello = anonymous.json().await;
    assert_eq!((&hello["user"], &hello["channels"]), (&Value::Null, &json!(["public"])));
}

#[tokio::test]
async fn a_temporary_refusal_of_a_stream_is_a_status_or_soft_for_everybody_as_it_is_set() {
    let full = |mode: &str| with(&[("GATEWAY_SSE_REFUSE", mode), ("GATEWAY_MAX_SESSIONS", "1")]);
    let (by_status, soft) = tokio::join!(GatewayProcess::start(full("status")), GatewayProcess::start(full("soft")));
    let (query, auth) = (format!("/v1/sse?access_token={}", usual_token()), bearer(&usual_token()));
    // As a native EventSource, and as a program that sees statuses.
    let manners: [(&str, &[(&str, &str)]); 2] = [(&query, &[]), ("/v1/sse", &[("Authorization", &auth)])];
    // What coming back does not mend is a status in either case.
    for gateway in [&by_status, &soft] {
        let bad = SseClient::connect(gateway.public(), "/v1/sse?access_token=x.y.z", &[]).await;
        assert_eq!(outcome(bad), refused(401, "token_invalid"));
    }
    let _held = (ws(&by_status).await, ws(&soft).await);
    for (path, headers) in manners {
        let refusal = SseClient::connect(by_status.public(), path, headers).await.err().expect("there is no room");
        assert!(refusal.header("retry-after").is_some_and(|after| after != "0"), "{refusal:?}");
        assert_eq!(outcome::<()>(Err(refusal)), refused(503, "at_capacity"));

        let mut stream = SseClient::connect(soft.public(), path, headers).await.expect("a soft refusal");
        let blocks = stream.until_end().await;
        let [bye] = &blocks[..] else { panic!("{blocks:?}") };
        let said = bye.json();
        assert_eq!((bye.event.as_deref(), &said["reason"]), (Some("bye"), &json!("overload")));
        assert_eq!((&said["reconnect"], said["after_ms"].as_u64()), (&json!("after"), bye.retry));
        assert!(bye.retry.is_some_and(|ms| ms >= 1_000), "{bye:?}");
    }
    // It is about streams: a WebSocket's client sees the status.
    assert_eq!(outcome(try_ws(&soft, &usual_token()).await), refused(503, "at_capacity"));
    for gateway in [&by_status, &soft] {
        assert_eq!(gateway.metric("gateway_sessions_open{transport=\"ws\"}").await, Some(1.0));
    }
}

/// What comes of a token of an hour, signed so.
async fn by(gateway: &GatewayProcess, sign: impl Fn(&Value) -> String) -> (u16, String) {
    let claims = json!({"sub": "42", "exp": Clock::system().unix().as_secs() + 3600});
    outcome(try_ws(gateway, &sign(&claims)).await)
}

#[tokio::test]
async fn only_the_listed_algorithms_are_taken_and_the_command_line_signs_with_one_of_them() {
    let hmac = |algorithm| move |claims: &Value| mint_with_secret(algorithm, JWT_SECRET.as_bytes(), claims).unwrap();
    let listed = || with(&[("GATEWAY_JWT_ALGORITHMS", "HS512, HS384")]);
    let gateway = GatewayProcess::start(listed()).await;
    let invalid = || refused(401, "token_invalid");
    assert_eq!(by(&gateway, hmac(Algorithm::HS512)).await.0, 101);
    assert_eq!(by(&gateway, hmac(Algorithm::HS384)).await.0, 101);
    assert_eq!(by(&gateway, hmac(Algorithm::HS256)).await, invalid());
    let signed = listed().args(&["token", "--sub", "42"]).run(SOON).await;
    assert_eq!(by(&gateway, |_| signed.stdout.trim_end().to_owned()).await.0, 101, "{}", signed.stderr);

    // One RSA key checks six algorithms, where none is said.
    let key = Command::new("openssl")
        .args(["genpkey", "-algorithm", "RSA", "-pkeyopt", "rsa_keygen_bits:2048"])
        .stderr(Stdio::null())
        .output()
        .expect("openssl is installed")
        .stdout;
    let directory = TempDir::new("rsa");
    let private = directory.file("private", std::str::from_utf8(&key).expect("PEM is text"));
    let public = directory.path_of("public");
    let made = Command::new("openssl").args(["pkey", "-in", &private, "-pubout", "-out", &public]).status();
    assert!(made.expect("openssl is installed").success());
    let gateway = GatewayProcess::start(
        options()
            .unset("GATEWAY_JWT_SECRET")
            .env("GATEWAY_JWT_PUBLIC_KEY_FILE", public)
            .env("GATEWAY_JWT_ALGORITHMS", "PS256"),
    )
    .await;
    let rsa = |algorithm| {
        let key = key.clone();
        move |claims: &Value| mint_with_pem(algorithm, &key, claims).unwrap()
    };
    assert_eq!(by(&gateway, rsa(Algorithm::PS256)).await.0, 101);
    for algorithm in [Algorithm::RS256, Algorithm::PS384] {
        assert_eq!(by(&gateway, rsa(algorithm)).await, invalid(), "{algorithm:?}");
    }
}

#[tokio::test]
async fn an_adaptive_rate_rises_while_some_are_refused_and_ends_at_its_maximum_and_a_fixed_one_stands() {
    const LEAST: f64 = 20.0;
    // The first step up would be a fifth, beyond it.
    const MOST: f64 = 22.0;
    let limits = |mode: &str, most: &str| {
        with(&[
            ("GATEWAY_ACCEPT_BURST", "20"),
            ("GATEWAY_ACCEPT_RATE", "20"),
            ("GATEWAY_ACCEPT_MODE", mode),
            ("GATEWAY_ACCEPT_RATE_MAX", most),
        ])
    };
    // The maximum is not read where the rate is fixed.
    let (adaptive, fixed) =
        tokio::join!(GatewayProcess::start(limits("adaptive", "22")), GatewayProcess::start(limits("fixed", "1")));
    const RATE: &str = "gateway_accept_rate";
    let auth = bearer(&usual_token());
    let until = Instant::now() + SOON;
    // More come than either lets in, until the one rate is at its end.
    loop {
        for gateway in [&adaptive, &fixed] {
            let _ = WsClient::connect(gateway.public(), "/v1/ws", &[("Authorization", &auth)]).await;
        }
        let rate = adaptive.metric(RATE).await.expect("it is told");
        // Before the first look at it none is told.
        assert!(rate == 0.0 || (LEAST..=MOST).contains(&rate), "{rate}");
        if rate == MOST {
            break;
        }
        assert!(Instant::now() < until, "{rate}\n{}", adaptive.stderr());
        sleep(LOOK / 4).await;
    }
    assert!(adaptive.stderr().contains("the accept rate moves"), "{}", adaptive.stderr());
    for gateway in [&adaptive, &fixed] {
        let n_refused = gateway.metric("gateway_refused_total{code=\"overloaded\"}").await;
        assert!(n_refused.is_some_and(|n| n > 0.0), "{n_refused:?}");
    }
    fixed.until_metric(RATE, LEAST).await;
    assert!(!fixed.stderr().contains("the accept rate moves"), "{}", fixed.stderr());
}
