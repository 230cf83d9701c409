//! The API over a real hub on the in-memory backplane.

use bytes::Bytes;
use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr};

use axum::body::to_bytes;
use http::HeaderMap;
use hub::auth::{AuthConfig, Identity, KeySource, Secret, UserChannel, Verifier};
use hub::backplane::{Backplane, Publish};
use hub::channel::Grants;
use hub::close::PlannedCodes;
use hub::cursor::{EventId, Since};
use hub::departure::{DrainConfig, Window};
use hub::event::Wire;
use hub::fleet::{Fitness, FleetConfig};
use hub::hub::{Hub, HubConfig, Newcomer, Parts, Phase};
use hub::limit::Capacity;
use hub::memory::{Memory, MemoryConfig, MemoryLog};
use hub::message::Backoff;
use hub::plugin::{Admission, Plugin, Plugins};
use hub::revocation::{Company, RevocationConfig, Revocations, WhenUnavailable};
use hub::session::SessionConfig;
use hub::telemetry::Metrics;
use serde_json::Value;
use tower::ServiceExt;

use super::*;

const MAX_MESSAGE: usize = 1024;

/// Drops whatever is published on the channel `dropped`.
struct Picky;

impl Plugin for Picky {
    fn name(&self) -> &'static str {
        "picky"
    }

    fn publishing(&self, event: Publish) -> Option<Publish> {
        (event.channel.as_str() != "dropped").then_some(event)
    }
}

struct Node {
    hub: Arc<Hub>,
    log: Arc<MemoryLog>,
    memory: Arc<Memory>,
    state: AdminState,
}

const CONSOLE: &str = "<!doctype html><title>console</title>";

fn node() -> Node {
    let secs = Duration::from_secs;
    let (clock, dice) = (Clock::at(secs(1_700_000_000)), Dice::seeded(7));
    let history = MemoryConfig { history_size: 100, history_ttl: secs(3600), idempotency_ttl: secs(300) };
    let log = MemoryLog::new(history, clock.clone(), dice.clone());
    let memory = log.node("n1");
    let keys = KeySource::Secret(Secret::new(vec![b'k'; 32]));
    let verifier = Verifier::new(AuthConfig {
        keys,
        algorithms: None,
        issuer: None,
        audience: None,
        leeway: Duration::ZERO,
        user_channel: UserChannel::On,
        max_channels: 10,
        anonymous: None,
    });
    let revocation = RevocationConfig {
        when_unavailable: WhenUnavailable::Refuse,
        deadline: secs(1),
        remember: secs(60),
        company: Company::Awaited,
    };
    let session = SessionConfig {
        outbox_bytes: 1 << 20,
        write_timeout: secs(10),
        close_timeout: secs(3),
        heartbeat: secs(25),
        heartbeat_timeout: secs(10),
        position_every: secs(300),
        client_rate: 10.0,
        client_burst: 50.0,
        planned: PlannedCodes::default(),
        reconnect: Backoff::default(),
    };
    let config = HubConfig {
        node: "n1".into(),
        capacity: 5,
        max_channels: 10,
        max_message: MAX_MESSAGE,
        replay_max: 100,
        auth_timeout: secs(1),
        max_age: None,
        revocation_sweep: Duration::from_secs(30),
        fleet: FleetConfig::unlimited("1.2.3"),
        drain: DrainConfig { grace: secs(5), window: Window::Auto, deadline: secs(120), takes_per_second: 50.0 },
        session,
    };
    let metrics = Metrics::new("1.2.3");
    let parts = Parts {
        config,
        backplane: memory.clone(),
        verifier: Arc::new(verifier.unwrap()),
        revocations: Arc::new(Revocations::new(memory.clone(), revocation, metrics.clone())),
        plugins: Plugins::new().with(Picky),
        metrics,
        clock: clock.clone(),
        dice: dice.clone(),
    };
    let hub = Hub::new(parts);
    hub.start();
    hub.serve();
    let state = AdminState {
        gateway: hub.handle(),
        key: None,
        hosts: Vec::new(),
        max_message: MAX_MESSAGE,
        revocation_ttl: secs(60),
        clock,
        dice,
        console: Bytes::from_static(CONSOLE.as_bytes()),
        client_js: "export {}",
    };
    Node { hub, log, memory, state }
}

/// A call as a back end makes it.
fn request(method: &str, path: &str, body: impl Into<Body>) -> http::Request<Body> {
    http::Request::builder()
        .method(method)
        .uri(path)
        .header("host", "127.0.0.1:8081")
        .header("content-type", "application/json")
        .body(body.into())
        .unwrap()
}

struct Answer {
    status: u16,
    headers: HeaderMap,
    body: String,
}

impl Answer {
    fn json(&self) -> Value {
        serde_json::from_str(&self.body).unwrap_or_else(|e| panic!("{e}: {}", self.body))
    }

    /// Status and `code` of a problem.
    fn problem(&self) -> (u16, String) {
        assert_eq!(self.headers["content-type"], "application/problem+json");
        let json = self.json();
        assert_eq!(json["status"], self.status);
        (self.status, json["code"].as_str().unwrap().to_owned())
    }
}

impl Node {
    async fn send(&self, request: http::Request<Body>) -> Answer {
        let (head, body) = router(self.state.clone()).oneshot(request).await.unwrap().into_parts();
        let body = to_bytes(body, 32 << 20).await.unwrap();
        Answer { status: head.status.as_u16(), headers: head.headers, body: String::from_utf8(body.into()).unwrap() }
    }

    async fn call(&self, method: &str, path: &str, body: impl Into<Body>) -> Answer {
        self.send(request(method, path, body)).await
    }

    fn open(&self, user: &str) -> hub::hub::Open {
        let identity = Identity {
            user: Some(user.into()),
            jti: None,
            sid: None,
            issued_at: 0,
            expires_at: None,
            grants: Grants::default(),
        };
        let newcomer = Newcomer {
            identity: Arc::new(identity),
            wire: Wire::Ws,
            address: IpAddr::V4(Ipv4Addr::LOCALHOST),
            channels: Vec::new(),
            since: Since::Now,
            admission: Admission::Standard,
            seat: Capacity::new(5).try_acquire().unwrap(),
        };
        self.hub.open(newcomer).unwrap()
    }
}

fn id(result: &Value) -> EventId {
    result["id"].as_str().unwrap_or_else(|| panic!("{result}")).parse().unwrap()
}

#[tokio::test]
async fn a_published_event_gets_an_id_and_a_repeat_gets_the_same_one() {
    let node = node();
    let body = r#"{"channel":"news","data":{"n":1},"event":"paid","idempotency_key":"k1"}"#;
    let first = node.call("POST", "/v1/publish", body).await;
    assert_eq!(first.status, 200, "{}", first.body);
    let id = first.json()["id"].as_str().unwrap().to_owned();
    assert_eq!(first.json(), serde_json::json!({ "id": id }));
    let again = node.call("POST", "/v1/publish", body).await;
    assert_eq!(again.json(), serde_json::json!({ "id": id, "duplicate": true }));
    let ephemeral = node.call("POST", "/v1/publish", r#"{"channel":"news","data":null,"ephemeral":true}"#).await;
    assert_eq!(ephemeral.body, r#"{"id":null}"#);
    let mut traced = request("POST", "/v1/publish", r#"{"channel":"news","data":2}"#);
    let parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";
    traced.headers_mut().insert("traceparent", HeaderValue::from_static(parent));
    assert_eq!(node.send(traced).await.status, 200);
}

#[tokio::test]
async fn several_channels_get_an_id_each_and_a_bad_one_fails_alone() {
    let node = node();
    let answer = node.call("POST", "/v1/publish", r#"{"channels":["a","b c","dropped","d"],"data":1}"#).await;
    assert_eq!(answer.status, 200);
    let results = answer.json()["results"].clone();
    let codes: Vec<_> = (0..4).map(|n| results[n]["error"]["code"].as_str().unwrap_or("ok").to_owned()).collect();
    assert_eq!(codes, ["ok", "bad_request", "forbidden", "ok"]);
    assert_eq!(results[1]["channel"], "b c");
    assert!(id(&results[0]) < id(&results[3]));
}

#[tokio::test]
async fn data_is_taken_up_to_the_limit_and_a_plugin_may_refuse_it() {
    let node = node();
    for (n, status) in [(MAX_MESSAGE, 200), (MAX_MESSAGE + 1, 413)] {
        let data = format!("\"{}\"", "x".repeat(n - 2));
        let answer = node.call("POST", "/v1/publish", format!(r#"{{"channel":"a","data":  {data}  }}"#)).await;
        assert_eq!(answer.status, status, "{n}");
        if status != 200 {
            assert_eq!(answer.problem().1, "payload_too_large");
        }
    }
    let dropped = node.call("POST", "/v1/publish", r#"{"channel":"dropped","data":1}"#).await;
    assert_eq!(dropped.problem(), (403, "forbidden".into()));
    for bad in ["", "{", "[]", r#"{"channel":"a b","data":1}"#, r#"{"channel":"a"}"#] {
        assert_eq!(node.call("POST", "/v1/publish", bad).await.problem(), (400, "bad_request".into()), "{bad}");
    }
}

#[tokio::test]
async fn a_batch_keeps_its_order_and_one_bad_item_fails_alone() {
    let node = node();
    let array = r#"[{"channel":"a","data":1},{"channel":"","data":2},{"channels":["a","b"],"data":3},4]"#;
    let lines = array[1..array.len() - 1].replace("},", "}\n");
    for (kind, body) in [("application/json", array.to_owned()), ("application/x-ndjson", lines)] {
        let mut batch = request("POST", "/v1/publish/batch", body);
        batch.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static(kind));
        let answer = node.send(batch).await;
        assert_eq!(answer.status, 200, "{}", answer.body);
        let json = answer.json();
        let results = json["results"].as_array().unwrap();
        assert_eq!(results.len(), 4);
        assert_eq!(
            (&results[1]["error"]["code"], &results[3]["error"]["code"]),
            (&"bad_request".into(), &"bad_request".into())
        );
        assert!(id(&results[0]) < id(&results[2]["results"][0]));
    }
    let empty = node.call("POST", "/v1/publish/batch", "[]").await;
    assert_eq!((empty.status, &*empty.body), (200, r#"{"results":[]}"#));
}

#[tokio::test]
async fn without_a_backplane_publishing_and_revoking_are_unavailable_for_now() {
    let node = node();
    node.memory.set_reachable(false);
    for (path, body) in [
        ("/v1/publish", r#"{"channel":"a","data":1}"#),
        ("/v1/publish", r#"{"channels":["a","b"],"data":1}"#),
        ("/v1/publish/batch", r#"[{"channel":"a","data":1},{"channel":"b","data":1}]"#),
        ("/v1/revocations", r#"{"sub":"42"}"#),
    ] {
        let answer = node.call("POST", path, body).await;
        assert_eq!(answer.problem(), (503, "unavailable".into()), "{path}");
        let after = answer.json()["retry_after_ms"].as_u64().unwrap();
        assert!((1000..3000).contains(&after) && answer.headers.contains_key("retry-after"), "{after}");
    }
    let mixed =
        node.call("POST", "/v1/publish/batch", r#"[{"channel":"a","data":1},7,{"channel":"a","data":2}]"#).await;
    assert_eq!(mixed.status, 200);
    let results = mixed.json()["results"].clone();
    assert_eq!(
        (&results[0]["error"]["code"], &results[1]["error"]["code"]),
        (&"unavailable".into(), &"bad_request".into())
    );
    assert!(results[2]["error"]["message"].as_str().unwrap().starts_with("not tried"), "{results}");
}

#[tokio::test]
async fn a_revocation_is_stored_before_it_is_acknowledged() {
    use hub::backplane::RevocationKey;

    let node = node();
    let answer = node.call("POST", "/v1/revocations", r#"{"sub":"42"}"#).await;
    assert_eq!((answer.status, &*answer.body), (204, ""));
    let stored = node.memory.revocations(vec![RevocationKey::Sub("42".into())]).await.unwrap();
    assert_eq!(stored, [Some("1700000000".to_owned())]);
    let bad = node.call("POST", "/v1/revocations", r#"{"sub":"42","jti":"1"}"#).await;
    assert_eq!(bad.problem(), (400, "bad_request".into()));
}

#[tokio::test]
async fn sessions_of_a_user_and_single_ones_are_asked_to_leave() {
    let node = node();
    let sessions = [node.open("a+b c"), node.open("a+b c"), node.open("other"), node.open("third")];
    let of_user = node.call("DELETE", "/v1/sessions?user=a%2Bb+c", "").await;
    assert_eq!((of_user.status, &*of_user.body), (200, r#"{"ended":2,"missing":[]}"#));
    let id = sessions[2].session().info.id.clone();
    let single = node.call("DELETE", &format!("/v1/sessions/{id}"), "").await;
    assert_eq!((single.status, &*single.body), (200, r#"{"ended":1,"missing":[]}"#));
    assert_eq!(node.call("DELETE", "/v1/sessions/none", "").await.problem(), (404, "not_found".into()));
    assert_eq!(node.call("DELETE", "/v1/sessions?user=nobody", "").await.body, r#"{"ended":0,"missing":[]}"#);
    for query in ["", "?user=", "?user=a&user=b", "?user=%ff", "?user=%4", "?User=a"] {
        for method in ["GET", "DELETE"] {
            let answer = node.call(method, &format!("/v1/sessions{query}"), "").await;
            assert_eq!(answer.problem(), (400, "bad_request".into()), "{query}");
        }
    }
}

#[tokio::test]
async fn a_channel_is_taken_off_a_user_or_a_session_and_of_nobody_by_mistake() {
    let node = node();
    let open = [node.open("a+b c"), node.open("43")];
    for (query, n_off) in [
        ("channel=news&user=a%2Bb+c", 0),
        ("user=nobody&channel=room:1", 0),
        (&*format!("channel=news&session={}", &*open[1].session().info.id), 0),
    ] {
        let answer = node.call("DELETE", &format!("/v1/subscriptions?{query}"), "").await;
        let expected = format!(r#"{{"ended":{n_off},"missing":[]}}"#);
        assert_eq!((answer.status, &*answer.body), (200, &*expected), "{query}");
    }
    for query in [
        "",
        "channel=news",
        "user=a",
        "channel=&user=a",
        "channel=no%20name&user=a",
        "channel=a&channel=b&user=a",
        "channel=news&user=a&session=b",
        "channel=news&user=",
    ] {
        let answer = node.call("DELETE", &format!("/v1/subscriptions?{query}"), "").await;
        assert_eq!(answer.problem(), (400, "bad_request".into()), "{query}");
    }
}

#[tokio::test]
async fn sessions_of_a_user_are_listed_and_whose_answer_is_missing_is_said() {
    let node = node();
    let open = node.open("42");
    let _other = node.open("43");
    let listed = node.call("GET", "/v1/sessions?user=42", "").await.json();
    let mut expected = serde_json::json!({
        "session": &*open.session().info.id, "node": "n1", "user": "42", "transport": "ws", "address": "127.0.0.1",
        "channels": [], "opened_at": 1_700_000_000, "age_s": 0, "expires_at": null,
    });
    expected["opened_at"] = listed["sessions"][0]["opened_at"].clone();
    assert_eq!(listed, serde_json::json!({"sessions": [expected], "missing": [], "truncated": false}));
    assert!(listed["sessions"][0]["opened_at"].as_u64().unwrap().abs_diff(1_700_000_000) <= 2);
    let nobody = node.call("GET", "/v1/sessions?user=nobody", "").await;
    assert_eq!(nobody.json(), serde_json::json!({"sessions": [], "missing": [], "truncated": false}));
    // A node that has reported and does not answer: an unknown session may be its.
    node.log.node("n2").report("{}".into(), Duration::from_secs(20)).await.unwrap();
    let listed = node.call("GET", "/v1/sessions?user=42", "").await.json();
    assert_eq!((listed["sessions"].as_array().unwrap().len(), &listed["missing"]), (1, &serde_json::json!(["n2"])));
    let unknown = node.call("DELETE", "/v1/sessions/none", "").await;
    assert_eq!((unknown.status, &*unknown.body), (200, r#"{"ended":0,"missing":["n2"]}"#));
}

#[tokio::test]
async fn without_a_word_from_the_backplane_nobody_claims_to_know_the_fleet() {
    // Nothing was awaited yet: the node has not reported.
    let node = node();
    node.memory.set_reachable(false);
    for (method, path) in
        [("GET", "/v1/sessions?user=1"), ("DELETE", "/v1/sessions?user=1"), ("DELETE", "/v1/sessions/x")]
    {
        assert_eq!(node.call(method, path, "").await.problem(), (503, "unavailable".into()), "{method} {path}");
    }
}

#[tokio::test]
async fn the_fleet_shows_this_node_and_a_drain_starts_at_once() {
    let node = node();
    let _session = node.open("a");
    let fleet = node.call("GET", "/v1/fleet", "").await.json();
    let expected = serde_json::json!({
        "node": "n1", "phase": "serving", "ready": true, "sessions": 1, "capacity": 5, "share": 1.0,
        "target": 1.0, "version": "1.2.3", "age_ms": 0,
    });
    let shedding = serde_json::json!({
        "mode": "off", "state": "off", "suspended": [], "why": null, "bound": "none", "shed_total": 0,
    });
    let expected = serde_json::json!({
        "nodes": [expected], "total": 1, "cv": 0.0, "busiest_ratio": 1.0,
        "budget": 0.0, "shedding": shedding, "lb_policy_observed": "unknown",
        "moved_lately": {"watched": 0, "back": 0}, "hold": null,
    });
    assert_eq!(fleet, expected);
    node.hub.set_fitness(Fitness { is_ready: false, is_lagging: false });
    let fleet = node.call("GET", "/v1/fleet", "").await.json();
    assert_eq!(fleet["nodes"][0]["ready"], false, "it serves, but its probe says no");
    for _ in 0..2 {
        assert_eq!(node.call("POST", "/v1/drain", "").await.status, 202);
        assert_eq!(node.hub.phase(), Phase::Draining);
    }
}

#[tokio::test(start_paused = true)]
async fn a_hold_begins_is_replaced_and_ends_when_it_is_asked_to() {
    let node = node();
    let holds = async || node.memory.report(String::new(), Duration::from_secs(20)).await.unwrap().hold;
    let answer = node.call("POST", "/v1/fleet/hold", r#"{"for":"15m","reason":"deploy"}"#).await;
    assert_eq!((answer.status, &*answer.body), (200, r#"{"reason":"deploy","until":1700000900}"#));
    let hold = holds().await.unwrap();
    assert_eq!((hold.until_ms, &*hold.reason, &*hold.by), (1_700_000_900_000, "deploy", "n1"));
    let answer = node.call("POST", "/v1/fleet/hold", r#"{"for":60}"#).await;
    assert_eq!((answer.status, &*answer.body), (200, r#"{"reason":"","until":1700000060}"#));
    for body in ["{}", r#"{"for":"25h"}"#, r#"{"for":"15m","reason":7}"#] {
        assert_eq!(node.call("POST", "/v1/fleet/hold", body).await.problem(), (400, "bad_request".into()), "{body}");
    }
    assert_eq!(holds().await.unwrap().until_ms, 1_700_000_060_000, "what is unclear changes nothing");
    let mut lines = request("POST", "/v1/fleet/hold", r#"{"for":60}"#);
    lines.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("application/x-ndjson"));
    assert_eq!(node.send(lines).await.problem(), (415, "unsupported_media_type".into()));
    for _ in 0..2 {
        assert_eq!(node.call("DELETE", "/v1/fleet/hold", "").await.status, 204);
        assert_eq!(holds().await, None);
    }
    node.memory.set_reachable(false);
    for method in ["POST", "DELETE"] {
        let answer = node.call(method, "/v1/fleet/hold", r#"{"for":60}"#).await;
        assert_eq!(answer.problem(), (503, "unavailable".into()), "{method}");
        assert!(answer.headers.contains_key("retry-after"));
    }
}

#[tokio::test]
async fn with_a_key_only_pages_are_served_without_it() {
    let mut node = node();
    node.state.key = Some(AdminKey::new("open-sesame-open-sesame"));
    for (method, path, _) in table() {
        let answer = node.call(method.as_str(), path, "{}").await;
        if ["/console", "/v1/client.js", "/v1/openapi.json"].contains(&path) {
            assert_eq!(answer.status, 200, "{path}");
        } else {
            assert_eq!(answer.problem(), (401, "token_missing".into()), "{path}");
            assert!(answer.headers.contains_key("www-authenticate"));
        }
    }
    let mut keyed = request("POST", "/v1/publish", r#"{"channel":"a","data":1}"#);
    // With the key neither Host nor Origin matters: no browser sends it for a foreign page.
    keyed.headers_mut().insert("host", HeaderValue::from_static("tidegate-admin.internal"));
    keyed.headers_mut().insert("authorization", HeaderValue::from_static("Bearer open-sesame-open-sesame"));
    assert_eq!(node.send(keyed).await.status, 200);
    assert_eq!(node.hub.phase(), Phase::Serving);
}

#[tokio::test]
async fn without_a_key_foreign_pages_reach_nothing() {
    let node = node();
    for (name, value, code) in
        [("host", "evil.example", "forbidden"), ("origin", "https://evil.example", "origin_forbidden")]
    {
        for (method, path, _) in table() {
            let mut call = request(method.as_str(), path, "{}");
            call.headers_mut().insert(name, HeaderValue::from_static(value));
            assert_eq!(node.send(call).await.problem(), (403, code.into()), "{path}");
        }
    }
    assert_eq!(node.hub.phase(), Phase::Serving);
    let mut form = request("POST", "/v1/publish", r#"{"channel":"a","data":1}"#);
    form.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("text/plain"));
    assert_eq!(node.send(form).await.problem(), (415, "unsupported_media_type".into()));
}

#[tokio::test]
async fn pages_come_with_their_types_and_cannot_be_framed() {
    let node = node();
    for (path, kind, text) in [
        ("/console", "text/html; charset=utf-8", CONSOLE),
        ("/v1/client.js", "text/javascript; charset=utf-8", node.state.client_js),
        ("/v1/openapi.json", "application/json", OPENAPI),
    ] {
        let answer = node.call("GET", path, "").await;
        assert_eq!((answer.status, &*answer.body), (200, text));
        assert_eq!(answer.headers["content-type"], kind);
        assert_eq!(answer.headers["content-security-policy"], "frame-ancestors 'none'");
    }
}

#[tokio::test]
async fn unknown_paths_are_not_found_and_wrong_methods_are_told_the_right_ones() {
    let node = node();
    for path in ["/", "/v1", "/v1/publish/", "/v1/ws", "/metrics"] {
        assert_eq!(node.call("GET", path, "").await.problem(), (404, "not_found".into()), "{path}");
    }
    let answer = node.call("GET", "/v1/publish", "").await;
    assert_eq!(answer.problem(), (405, "method_not_allowed".into()));
    assert_eq!(answer.headers["allow"], "POST");
}

/// Path to methods, sorted, as the description and the router have them.
type Methods = BTreeMap<String, Vec<String>>;

#[tokio::test]
async fn the_description_and_the_router_have_the_same_routes() {
    let node = node();
    let mut served = Methods::new();
    for (_, path, _) in table() {
        let answer = node.call("PATCH", &path.replace("{session}", "x"), "").await;
        let allow = answer.headers["allow"].to_str().unwrap().to_ascii_lowercase();
        // HEAD comes with GET.
        let methods = allow.split(',').map(str::trim).filter(|method| *method != "head").map(str::to_owned);
        let mut methods: Vec<_> = methods.collect();
        methods.sort();
        served.insert(path.to_owned(), methods);
    }
    let description: Value = serde_json::from_str(OPENAPI).unwrap();
    let described: Methods = description["paths"]
        .as_object()
        .unwrap()
        .iter()
        .map(|(path, item)| (path.clone(), item.as_object().unwrap().keys().cloned().collect()))
        .collect();
    assert_eq!(served, described);
}

#[test]
fn the_description_refers_to_what_it_holds() {
    let description: Value = serde_json::from_str(OPENAPI).unwrap();
    assert_eq!(description["openapi"], "3.1.0");
    for (at, _) in OPENAPI.match_indices("\"#/") {
        let pointer = OPENAPI[at + 2..].split('"').next().unwrap();
        assert!(description.pointer(pointer).is_some(), "{pointer}");
    }
}
