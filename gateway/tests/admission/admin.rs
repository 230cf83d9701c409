//! The back ends' API over its own listener, and the command line as processes.

use std::process::Stdio;

use serde_json::{Value, json};
use testkit::gateway::{GatewayOptions, GatewayProcess, JWT_SECRET};
use testkit::http::{self, Response};
use tokio::io::{AsyncBufReadExt, BufReader};
use tokio::process::Command;
use tokio::time::timeout;

use super::{SOON, bearer, code_of, options, token, try_ws, ws};

async fn post(gateway: &GatewayProcess, path: &str, headers: &[(&str, &str)], body: &[u8]) -> Response {
    http::request(gateway.admin(), "POST", path, headers, body).await
}

const JSON: (&str, &str) = ("Content-Type", "application/json");

#[tokio::test]
async fn without_a_key_no_web_page_gets_through() {
    let gateway = GatewayProcess::start(options().env("GATEWAY_ADMIN_HOSTS", "admin.internal")).await;
    let port = gateway.admin().port();
    let body = br#"{"channel":"news","data":1}"#;
    let own = format!("http://127.0.0.1:{port}");
    let local = format!("localhost:{port}");
    let named = format!("ADMIN.internal:{port}");
    let local_origin = format!("http://localhost:{port}");
    for (headers, code) in [
        (&[][..], ""),
        (&[("Origin", own.as_str())], ""),
        (&[("Host", local.as_str())], ""),
        (&[("Host", local.as_str()), ("Origin", local_origin.as_str())], ""),
        (&[("Host", "localhost")], ""),
        (&[("Host", "10.1.2.3:80")], ""),
        (&[("Host", "[::1]:80")], ""),
        (&[("Host", named.as_str())], ""),
        (&[("Origin", "https://evil.test")], "origin_forbidden"),
        (&[("Origin", "null")], "origin_forbidden"),
        (&[("Origin", local_origin.as_str())], "origin_forbidden"),
        (&[("Host", "evil.test")], "forbidden"),
        (&[("Host", "localhost.evil.test")], "forbidden"),
        (&[("Host", "127.0.0.1.evil.test")], "forbidden"),
        (&[("Host", "admin.internal.evil.test")], "forbidden"),
        (&[("Host", "")], "forbidden"),
    ] {
        let answer = post(&gateway, "/v1/publish", &[&[JSON], headers].concat(), body).await;
        let status = if code.is_empty() { 200 } else { 403 };
        assert_eq!((answer.status(), code_of(&answer).as_str()), (status, code), "{headers:?}");
        assert_eq!(answer.header("access-control-allow-origin"), None);
    }
    for path in ["/v1/fleet", "/console", "/v1/openapi.json"] {
        let answer = http::request(gateway.admin(), "GET", path, &[("Host", "evil.test")], b"").await;
        assert_eq!(answer.status(), 403, "{path}");
    }
}

#[tokio::test]
async fn with_a_key_the_key_decides_and_the_page_itself_needs_none() {
    let gateway = GatewayProcess::start(options().env("GATEWAY_ADMIN_KEY", "a-key-of-32-visible-characters-!")).await;
    let body = br#"{"channel":"news","data":1}"#;
    for (auth, status) in [
        (Some("Bearer a-key-of-32-visible-characters-!"), 200),
        (Some("bearer a-key-of-32-visible-characters-!"), 200),
        (None, 401),
        (Some("Bearer a-key-of-32-visible-characters-?"), 401),
        (Some("Bearer a-key"), 401),
        (Some("Bearer "), 401),
        (Some("a-key-of-32-visible-characters-!"), 401),
        (Some("Basic a-key-of-32-visible-characters-!"), 401),
    ] {
        let headers: Vec<_> = [JSON].into_iter().chain(auth.map(|auth| ("Authorization", auth))).collect();
        let answer = post(&gateway, "/v1/publish", &headers, body).await;
        assert_eq!(answer.status(), status, "{auth:?}");
        assert_eq!(answer.header("www-authenticate").is_some(), status == 401);
    }
    let key = ("Authorization", "Bearer a-key-of-32-visible-characters-!");
    let answer =
        post(&gateway, "/v1/publish", &[JSON, key, ("Host", "any.name"), ("Origin", "https://any.name")], body).await;
    assert_eq!(answer.status(), 200, "with the key it does not matter from where");
    for (path, kind) in [
        ("/console", "text/html; charset=utf-8"),
        ("/v1/openapi.json", "application/json"),
        ("/v1/client.js", "text/javascript; charset=utf-8"),
    ] {
        let page = http::get(gateway.admin(), path).await;
        assert_eq!((page.status(), page.header("content-type")), (200, Some(kind)), "{path}");
        assert!(page.body.len() > 500, "{path}");
    }
    let described = http::get(gateway.admin(), "/v1/openapi.json").await.json();
    assert!(described["openapi"].as_str().is_some_and(|version| version.starts_with("3.")));
    assert!(described["paths"]["/v1/publish"]["post"].is_object());
    assert_eq!(http::get(gateway.admin(), "/v1/fleet").await.status(), 401);
}

#[tokio::test]
async fn publishing_answers_for_each_event_and_takes_nothing_that_is_no_json() {
    let gateway = GatewayProcess::start(options()).await;
    let mut client = ws(&gateway).await;
    for (kind, status) in [
        ("application/json", 200),
        ("application/json; charset=utf-8", 200),
        ("APPLICATION/JSON", 200),
        ("application/x-ndjson", 415),
        ("text/plain", 415),
        ("application/x-www-form-urlencoded", 415),
        ("multipart/form-data; boundary=x", 415),
        ("", 415),
    ] {
        let answer = post(&gateway, "/v1/publish", &[("Content-Type", kind)], br#"{"channel":"x","data":1}"#).await;
        assert_eq!(answer.status(), status, "{kind:?}");
    }
    assert_eq!(post(&gateway, "/v1/publish", &[], br#"{"channel":"x","data":1}"#).await.status(), 415);
    for bad in [
        &b""[..],
        b"{",
        b"[]",
        b"null",
        br#"{"data":1}"#,
        br#"{"channel":"news"}"#,
        br#"{"channel":"","data":1}"#,
        br#"{"channel":"a b","data":1}"#,
        br#"{"channel":"news","channels":["a"],"data":1}"#,
        br#"{"channels":[],"data":1}"#,
        br#"{"channel":"news","data":1,"idempotency_key":""}"#,
        b"{\"channel\":\"news\",\"data\":\"\xff\xfe\x00\x80\"}",
        b"{\"channel\":\"news\",\"data\":\"\xed\xa0\x80\"}",
        b"{\"channel\":\"news\",\"data\":}",
        b"{\"channel\":\"news\",\"data\":1}{\"channel\":\"news\",\"data\":2}",
        b"\x00",
    ] {
        let answer = post(&gateway, "/v1/publish", &[JSON], bad).await;
        assert_eq!((answer.status(), code_of(&answer).as_str()), (400, "bad_request"), "{bad:?}");
    }
    // JSON all the same, however deep; the client of the kit reads no deeper than 128.
    let deep = format!(r#"{{"channel":"elsewhere","data":{}{}}}"#, "[".repeat(30_000), "]".repeat(30_000));
    assert_eq!(post(&gateway, "/v1/publish", &[JSON], deep.as_bytes()).await.status(), 200);
    let keyed = |key: &str| json!({"channel": "news", "data": 1, "idempotency_key": key});
    assert_eq!(gateway.try_publish(&keyed(&"k".repeat(129))).await.status(), 400);
    let large = json!({"channel": "news", "data": "x".repeat(64 * 1024)});
    let answer = gateway.try_publish(&large).await;
    assert_eq!((answer.status(), code_of(&answer).as_str()), (413, "payload_too_large"));
    // None of that has broken the connections that would have heard it.
    gateway.publish("news", &json!("first")).await;
    assert_eq!(client.json().await["data"], "first");

    // A repeat is the first one again, heard once.
    let first = gateway.try_publish(&keyed("k")).await.json();
    assert_eq!(first.as_object().map(serde_json::Map::len), Some(1), "{first}");
    let again = gateway.try_publish(&json!({"channel": "news", "data": 2, "idempotency_key": "k"})).await.json();
    assert_eq!(again, json!({"id": first["id"], "duplicate": true}));
    let elsewhere = gateway.try_publish(&json!({"channel": "x", "data": 1, "idempotency_key": "k"})).await.json();
    assert!(elsewhere.get("duplicate").is_none(), "a key is a channel's own: {elsewhere}");
    // Several channels at once, a bad name failing alone.
    let many = gateway.try_publish(&json!({"channels": ["news", "a b", "user:42"], "data": "many"})).await;
    let results = many.json()["results"].clone();
    assert_eq!((many.status(), results.as_array().map(Vec::len)), (200, Some(3)), "{results}");
    assert_eq!((&results[0]["channel"], &results[1]["channel"]), (&json!("news"), &json!("a b")));
    assert!(results[0]["id"].is_string() && results[1]["error"]["code"] == "bad_request", "{results}");
    let heard: Vec<Value> = vec![client.json().await, client.json().await, client.json().await];
    assert_eq!(data_of(&heard), [json!(1), json!("many"), json!("many")]);

    let batch =
        r#"[{"channel":"news","data":"a"},{"channel":"news"},7,{"channel":"news","data":"b","ephemeral":true}]"#;
    let lines = "{\"channel\":\"news\",\"data\":\"a\"}\n\n{\"channel\":\"news\"}\r\n7\n{\"channel\":\"news\",\"data\":\"b\",\"ephemeral\":true}";
    for (kind, body) in [("application/json", batch), ("application/x-ndjson", lines)] {
        let answer = post(&gateway, "/v1/publish/batch", &[("Content-Type", kind)], body.as_bytes()).await;
        let results = answer.json()["results"].clone();
        assert_eq!((answer.status(), results.as_array().map(Vec::len)), (200, Some(4)), "{kind}: {results}");
        assert!(results[0]["id"].is_string() && results[3]["id"].is_null(), "{results}");
        assert!([1, 2].iter().all(|&i| results[i]["error"]["code"] == "bad_request"), "{results}");
        let heard: Vec<Value> = vec![client.json().await, client.json().await];
        assert_eq!(data_of(&heard), [json!("a"), json!("b")]);
    }
    assert_eq!(post(&gateway, "/v1/publish/batch", &[JSON], b"{}").await.status(), 400);
    // Other methods, other paths.
    let answer = http::get(gateway.admin(), "/v1/publish").await;
    assert_eq!((answer.status(), answer.header("allow")), (405, Some("POST")));
    assert_eq!(http::get(gateway.admin(), "/v1/nowhere").await.status(), 404);
    assert_eq!(http::get(gateway.admin(), "/metrics").await.status(), 404);
    assert_eq!(http::get(gateway.admin(), "/v1/ws").await.status(), 404);
}

#[tokio::test]
async fn sessions_are_ended_and_the_node_is_told() {
    let gateway = GatewayProcess::start(options().env("GATEWAY_NODE", "node-a").env("GATEWAY_DRAIN_GRACE", "0s")).await;
    let mut mine = ws(&gateway).await;
    let auth = bearer(&token(&json!({"sub": "43"})));
    let mut other = try_ws(&gateway, "/v1/ws", &[("Authorization", &auth)]).await.expect("let in");
    let session = other.json().await["session"].as_str().expect("an id").to_owned();
    let fleet = http::get(gateway.admin(), "/v1/fleet").await.json();
    let node = &fleet["nodes"][0];
    assert_eq!((&node["node"], &node["sessions"], &node["phase"]), (&json!("node-a"), &json!(2), &json!("serving")));
    assert_eq!(fleet["total"], 2);
    let ended = http::request(gateway.admin(), "DELETE", "/v1/sessions?user=42", &[], b"").await;
    assert_eq!(ended.status(), 200, "{}", ended.text());
    let (messages, code) = mine.until_closed().await;
    let bye = messages.last().expect("a bye");
    assert_eq!((code, &bye["reason"], &bye["reconnect"]), (4403, &json!("kicked"), &json!("never")));
    let ended = http::request(gateway.admin(), "DELETE", &format!("/v1/sessions/{session}"), &[], b"").await;
    assert_eq!(ended.status(), 200, "{}", ended.text());
    assert_eq!(other.until_closed().await.1, 4403);
    let again = http::request(gateway.admin(), "DELETE", &format!("/v1/sessions/{session}"), &[], b"").await;
    assert_eq!(again.status(), 404);
    assert_eq!(http::request(gateway.admin(), "DELETE", "/v1/sessions", &[], b"").await.status(), 400);
    for bad in ["{}", r#"{"jti":""}"#, r#"{"jti":"a","sub":"b"}"#, r#"{"jti":"a","ttl":0}"#, "[]", ""] {
        assert_eq!(post(&gateway, "/v1/revocations", &[JSON], bad.as_bytes()).await.status(), 400, "{bad}");
    }
}

/// Runs a command of the binary to its end; its standard output.
async fn run(args: &[&str], env: &[(&str, &str)]) -> (i32, String, String) {
    let mut options = GatewayOptions::new(env!("CARGO_BIN_EXE_tidegate"))
        .unset("GATEWAY_LISTEN")
        .unset("GATEWAY_ADMIN_LISTEN")
        .unset("GATEWAY_PROBE_LISTEN")
        .args(args);
    for (name, value) in env {
        options = options.env(name, *value);
    }
    let ended = options.run(SOON).await;
    (ended.status.code().unwrap_or(-1), ended.stdout, ended.stderr)
}

#[tokio::test]
async fn a_token_is_made_an_event_published_and_watched_from_the_command_line() {
    let gateway = GatewayProcess::start(options().env("GATEWAY_ADMIN_KEY", "a-key-of-32-visible-characters-!")).await;
    let (admin, public) = (format!("http://{}", gateway.admin()), format!("http://{}", gateway.public()));
    let key = [("GATEWAY_ADMIN_KEY", "a-key-of-32-visible-characters-!")];
    let (code, token, complaint) =
        run(&["token", "--sub", "42", "--channel", "news", "--jti", "from-cli", "--ttl", "10m"], &[]).await;
    assert_eq!(code, 0, "{complaint}");
    let token = token.trim().to_owned();
    assert!(JWT_SECRET.len() >= 32 && token.split('.').count() == 3);

    for transport in ["ws", "sse"] {
        let mut tail = Command::new(env!("CARGO_BIN_EXE_tidegate"))
            .args(["tail", "--url", &public, "--token", &token, "--transport", transport])
            .env_clear()
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .kill_on_drop(true)
            .spawn()
            .expect("the binary runs");
        let mut said = BufReader::new(tail.stderr.take().expect("piped")).lines();
        let mut events = BufReader::new(tail.stdout.take().expect("piped")).lines();
        loop {
            let line = timeout(SOON, said.next_line()).await.expect("in time").unwrap().expect("tail goes on");
            if line.starts_with("# ready") {
                break;
            }
        }
        let args = ["publish", "news", r#"{"n":1.50}"#, "--event", "priced", "--key", transport, "--admin", &admin];
        let (code, answer, complaint) = run(&args, &key).await;
        assert_eq!(code, 0, "{complaint}");
        let id = serde_json::from_str::<Value>(&answer).unwrap()["id"].as_str().expect("an id").to_owned();
        let line = timeout(SOON, events.next_line()).await.expect("in time").unwrap().expect("an event");
        assert_eq!(line, format!(r#"{id} news priced {{"n":1.50}}"#));
        let (_, again, _) = run(&args, &key).await;
        assert_eq!(serde_json::from_str::<Value>(&again).unwrap(), json!({"id": id, "duplicate": true}));
        tail.kill().await.unwrap();
    }
    // Without the key, and with nobody there.
    let args = ["publish", "news", "1", "--admin", &admin];
    let (code, _, complaint) = run(&args, &[]).await;
    assert_ne!(code, 0, "{complaint}");
    let closed =
        std::net::TcpListener::bind("127.0.0.1:0").and_then(|socket| socket.local_addr()).expect("a free port");
    let nobody = format!("http://{closed}");
    let (code, _, complaint) = run(&["publish", "news", "1", "--admin", &nobody], &key).await;
    assert_eq!(code, 69, "{complaint}");

    // A revocation from the command line ends the watcher for good.
    let mut tail = Command::new(env!("CARGO_BIN_EXE_tidegate"))
        .args(["tail", "--url", &public, "--token", &token])
        .env_clear()
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .kill_on_drop(true)
        .spawn()
        .expect("the binary runs");
    let mut said = BufReader::new(tail.stderr.take().expect("piped")).lines();
    while !timeout(SOON, said.next_line())
        .await
        .expect("in time")
        .unwrap()
        .expect("tail goes on")
        .starts_with("# ready")
    {}
    let (code, _, complaint) = run(&["revoke", "--jti", "from-cli", "--admin", &admin], &key).await;
    assert_eq!(code, 0, "{complaint}");
    let status = timeout(SOON, tail.wait()).await.expect("it ends").unwrap();
    assert_eq!(status.code(), Some(69));
    let answer = http::request(gateway.public(), "GET", "/v1/sse", &[("Authorization", &bearer(&token))], b"").await;
    assert_eq!((answer.status(), code_of(&answer).as_str()), (401, "token_revoked"));
}

fn data_of(events: &[Value]) -> Vec<Value> {
    events.iter().map(|event| event["data"].clone()).collect()
}
