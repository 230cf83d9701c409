//! Settings that no other test of the real binary sets, each to something else than its default and seen to
//! do from outside what the table promises; and what a start is refused for.
//!
//! `admission` who may come, and how the others are told · `lifetimes` how long something is kept · `redis`
//! how Redis is reached · `probes` when a node counts as full, late or dead · `fleet` when a fleet counts as
//! uneven · here: values that are none, and the log's form.

use std::time::Duration;

use serde_json::{Value, json};
use testkit::gateway::{Ended, GatewayOptions, GatewayProcess, Signal, token};
use testkit::http::Response;
use testkit::temp::TempDir;
use testkit::ws::WsClient;

#[path = "settings/admission.rs"]
mod admission;
#[path = "settings/fleet.rs"]
mod fleet;
#[path = "settings/lifetimes.rs"]
mod lifetimes;
#[path = "settings/probes.rs"]
mod probes;
#[path = "settings/redis.rs"]
mod redis;

/// The longest that a state may take to be reached; nothing is promised by it.
const SOON: Duration = Duration::from_secs(60);
/// Between two looks at a state that is about to be reached.
const LOOK: Duration = Duration::from_millis(20);

/// A gateway whose limits do not get in the way of a test that is about something else.
fn options() -> GatewayOptions {
    GatewayOptions::new(env!("CARGO_BIN_EXE_tidegate"))
        .patient()
        .env("GATEWAY_ACCEPT_BURST", "100000")
        .env("GATEWAY_ACCEPT_RATE", "100000")
        .env("GATEWAY_HANDSHAKES", "100000")
        .env("GATEWAY_DRAIN_GRACE", "0s")
}

/// `options` with these variables besides.
fn with(variables: &[(&str, &str)]) -> GatewayOptions {
    variables.iter().fold(options(), |options, (name, value)| options.env(name, *value))
}

/// A token for user 42 that joins `news`.
fn usual_token() -> String {
    token(&json!({"sub": "42", "channels": ["news"]}))
}

fn bearer(token: &str) -> String {
    format!("Bearer {token}")
}

/// An open WebSocket with this token, ready; or the refusal.
async fn try_ws(gateway: &GatewayProcess, token: &str) -> Result<WsClient, Response> {
    let mut client = WsClient::connect(gateway.public(), "/v1/ws", &[("Authorization", &bearer(token))]).await?;
    client.until("ready").await;
    Ok(client)
}

/// As `try_ws` with the usual token, which nobody refuses.
async fn ws(gateway: &GatewayProcess) -> WsClient {
    try_ws(gateway, &usual_token()).await.unwrap_or_else(|refused| panic!("{}", refused.text()))
}

/// Status and `code` of what came of a handshake; 101 without a code where it was let in.
fn outcome<T>(answer: Result<T, Response>) -> (u16, String) {
    match answer {
        Ok(_) => (101, String::new()),
        Err(refused) => (refused.status(), refused.json()["code"].as_str().unwrap_or_default().to_owned()),
    }
}

fn refused(status: u16, code: &str) -> (u16, String) {
    (status, code.to_owned())
}

/// What is published on `news` reaches a client.
async fn serves(gateway: &GatewayProcess) {
    let mut client = ws(gateway).await;
    let id = gateway.publish("news", &json!("hello")).await;
    let event = client.until("event").await.pop().expect("an event");
    assert_eq!((&event["id"], &event["data"]), (&json!(id), &json!("hello")));
}

/// The start fails with exit code 64 and names each of these.
fn is_refused(ended: &Ended, names: &[&str]) {
    assert_eq!(ended.status.code(), Some(64), "{names:?}: {}", ended.stderr);
    for name in names {
        assert!(ended.stderr.contains(name), "{name} is not named: {}", ended.stderr);
    }
}

#[tokio::test]
async fn a_value_that_is_none_stops_the_start_and_is_named() {
    for (name, values) in [
        ("GATEWAY_ACCEPT_MODE", &["fast", "Adaptive"][..]),
        ("GATEWAY_ACCEPT_RATE_MAX", &["0", "1000001", "10.5"]),
        ("GATEWAY_AUTH_QUERY", &["yes", "1", "OFF"]),
        ("GATEWAY_SSE_REFUSE", &["hard", "on"]),
        ("GATEWAY_IDEMPOTENCY_TTL", &["0s", "300", "367d"]),
        ("GATEWAY_JWT_ALGORITHMS", &["none", "HS256,none", "hs256", "RS256", ","]),
        ("GATEWAY_LIVE_STALE", &["0s", "30", "250ms"]),
        ("GATEWAY_READY_HEADROOM", &["0", "1.01", "95%", "-0.5", "NaN"]),
        ("GATEWAY_READY_LAG", &["0s", "250", "30s"]),
        ("GATEWAY_REVOCATION_TTL", &["0s", "30", "367d"]),
        ("GATEWAY_SHED_TOLERANCE", &["0", "1.01", "5%"]),
        ("GATEWAY_PARTITIONS", &["0", "9", "2"]),
        ("GATEWAY_LOG_FORMAT", &["xml", "JSON"]),
        ("GATEWAY_REDIS_CA_FILE", &["/no/such/file"]),
        ("GATEWAY_TLS_CERT_FILE", &["/no/such/file"]),
        ("GATEWAY_TLS_KEY_FILE", &["/no/such/file"]),
    ] {
        for value in values {
            is_refused(&with(&[(name, value)]).run(SOON).await, &[name]);
        }
    }
}

#[tokio::test]
async fn values_that_contradict_each_other_stop_the_start_and_are_all_named() {
    let directory = TempDir::new("contradictions");
    let (certificate, _) = directory.certificate();
    for variables in [
        &[("GATEWAY_ACCEPT_MODE", "adaptive"), ("GATEWAY_ACCEPT_RATE", "20"), ("GATEWAY_ACCEPT_RATE_MAX", "19")][..],
        &[("GATEWAY_LIVE_STALE", "5s"), ("GATEWAY_READY_LAG", "5s")],
        &[("GATEWAY_PARTITIONS", "2"), ("GATEWAY_REDIS_URL", "redis://127.0.0.1:6379")],
        &[("GATEWAY_REDIS_PASSWORD", "a"), ("GATEWAY_REDIS_URL", "redis://:b@127.0.0.1:6379")],
        &[("GATEWAY_TLS_CERT_FILE", &certificate)],
    ] {
        let names: Vec<&str> = variables.iter().map(|(name, _)| *name).collect();
        is_refused(&with(variables).run(SOON).await, &names);
    }
}

#[tokio::test]
async fn the_last_values_within_their_bounds_are_good() {
    let variables = [
        // The maximum is read only where the mode is adaptive, so it may lie below the rate.
        ("GATEWAY_ACCEPT_RATE_MAX", "1"),
        ("GATEWAY_IDEMPOTENCY_TTL", "366d"),
        ("GATEWAY_JWT_ALGORITHMS", "HS512, HS256,"),
        ("GATEWAY_LIVE_STALE", "251ms"),
        ("GATEWAY_READY_HEADROOM", "1"),
        ("GATEWAY_READY_LAG", "250ms"),
        ("GATEWAY_REVOCATION_TTL", "1ms"),
        ("GATEWAY_SHED_TOLERANCE", "1"),
        ("GATEWAY_PARTITIONS", "1"),
    ];
    let ended = with(&variables).args(&["config", "--check"]).run(SOON).await;
    assert_eq!(ended.status.code(), Some(0), "{}", ended.stderr);
}

#[tokio::test]
async fn what_this_build_cannot_do_is_refused_by_name_and_the_check_says_so_too() {
    let directory = TempDir::new("tls");
    let (certificate, key) = directory.certificate();
    for (variables, named) in [
        (
            &[("GATEWAY_TLS_CERT_FILE", certificate.as_str()), ("GATEWAY_TLS_KEY_FILE", &key)][..],
            &["GATEWAY_TLS_CERT_FILE", "GATEWAY_TLS_KEY_FILE"][..],
        ),
        (
            &[("GATEWAY_REDIS_URL", "redis+cluster://127.0.0.1:7000"), ("GATEWAY_PARTITIONS", "8")],
            &["GATEWAY_REDIS_URL", "Cluster"],
        ),
        (&[("GATEWAY_REDIS_URL", "redis+sentinel://127.0.0.1:26379")], &["GATEWAY_REDIS_URL", "Sentinel"]),
    ] {
        is_refused(&with(variables).run(SOON).await, named);
        let checked = with(variables).args(&["config", "--check"]).run(SOON).await;
        is_refused(&checked, named);
        assert_eq!(checked.stdout, "");
    }
}

#[tokio::test]
async fn files_and_addresses_that_serve_cannot_use_are_refused_by_the_check_too() {
    let directory = TempDir::new("unusable");
    let junk = directory.file("junk", "neither PEM nor JSON\n");
    for (variables, unset, named) in [
        (&[("GATEWAY_JWT_JWKS_FILE", junk.as_str())][..], Some("GATEWAY_JWT_SECRET"), "GATEWAY_JWT_JWKS_FILE"),
        (
            &[("GATEWAY_REDIS_URL", "rediss://127.0.0.1:1/"), ("GATEWAY_REDIS_CA_FILE", &junk)],
            None,
            "GATEWAY_REDIS_CA_FILE",
        ),
        (&[("GATEWAY_REDIS_URL", "redis://127.0.0.1:1/nought")], None, "GATEWAY_REDIS_URL"),
    ] {
        for arguments in [&["serve"][..], &["config", "--check"]] {
            let options = unset.into_iter().fold(with(variables), GatewayOptions::unset);
            is_refused(&options.args(arguments).run(SOON).await, &[named]);
        }
    }
}

/// All that a gateway says from its start to the end of its drain.
async fn log_of(options: GatewayOptions) -> String {
    let mut gateway = GatewayProcess::start(options).await;
    gateway.signal(Signal::Term);
    assert!(gateway.wait(SOON).await.success());
    gateway.stderr()
}

#[tokio::test]
async fn the_log_is_json_where_it_is_set_or_nobody_watches_and_text_where_that_is_set() {
    let json = options().env("GATEWAY_LOG_FORMAT", "json");
    for options in [json, options().unset("GATEWAY_LOG_FORMAT")] {
        let log = log_of(options).await;
        // Beside what is logged, the addresses, which are for scripts.
        let (said, logged): (Vec<&str>, _) = log.lines().partition(|line| line.starts_with("listening public="));
        assert_eq!(said.len(), 1, "{log}");
        let line = |line: &str| serde_json::from_str::<Value>(line).unwrap_or_else(|e| panic!("no JSON ({e}): {line}"));
        let lines: Vec<Value> = Vec::into_iter(logged).map(line).collect();
        for line in &lines {
            assert!(["timestamp", "level", "target", "message"].iter().all(|name| line[name].is_string()), "{line}");
        }
        let drained = lines.iter().find(|line| line["message"] == "drained").expect("the last word");
        assert_eq!((&drained["level"], &drained["sessions"]), (&json!("INFO"), &json!(0)));
    }
    let log = log_of(options().env("GATEWAY_LOG_FORMAT", "text")).await;
    assert!(log.lines().all(|line| !line.starts_with('{') && !line.contains('\u{1b}')), "{log}");
    assert!(log.contains("drained sessions=0"), "{log}");
}
