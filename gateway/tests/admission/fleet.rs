//! What nodes decide together: how many sessions a user may have, who is there, who is ended; with
//! nodes that are killed, stopped, or somebody else's.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use serde_json::{Value, json};
use testkit::gateway::{GatewayOptions, GatewayProcess, Signal};
use testkit::http::{self, Response};
use testkit::redis::RedisServer;
use testkit::ws::{Heard, WsClient};
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, timeout};

use super::{SOON, bearer, code_of, options, token, try_ws};

const REPLACED: &str = "gateway_sessions_closed_total{reason=\"replaced\"}";

/// Between two looks at a state that is about to be reached.
const LOOK: Duration = Duration::from_millis(20);

fn on(redis: &RedisServer, name: &str) -> GatewayOptions {
    options()
        .env("GATEWAY_REDIS_URL", redis.url())
        .env("GATEWAY_NODE", name)
        .env("GATEWAY_FLEET_REPORT", "1s")
        .env("GATEWAY_DRAIN_GRACE", "0s")
}

fn limited(redis: &RedisServer, name: &str, limit: usize) -> GatewayOptions {
    on(redis, name).env("GATEWAY_MAX_SESSIONS_PER_USER", limit.to_string())
}

async fn try_user(gateway: &GatewayProcess, user: &str) -> Result<WsClient, Response> {
    let auth = bearer(&token(&json!({"sub": user, "channels": ["news"]})));
    try_ws(gateway, "/v1/ws", &[("Authorization", &auth)]).await
}

/// An open session of this user, ready, and its id.
async fn open(gateway: &GatewayProcess, user: &str) -> (WsClient, String) {
    let mut client = try_user(gateway, user).await.unwrap_or_else(|refused| panic!("{}", refused.text()));
    let hello = client.json().await;
    client.until("ready").await;
    (client, hello["session"].as_str().expect("an id").to_owned())
}

/// Waits until this user has so many places: claims follow the opening.
async fn until_places(redis: &RedisServer, user: &str, n: usize) {
    let until = Instant::now() + SOON;
    let key = format!("tidegate:sessions:{user}");
    loop {
        let has = redis.cli(&["ZCARD", &key]);
        if has.trim() == n.to_string() {
            return;
        }
        assert!(Instant::now() < until, "{has} places, not {n}");
        sleep(LOOK).await;
    }
}

/// Waits until this node knows of these nodes, and of no others.
async fn until_known(gateway: &GatewayProcess, names: &[&str]) {
    let until = Instant::now() + SOON;
    loop {
        let fleet = http::get(gateway.admin(), "/v1/fleet").await.json();
        let rows = fleet["nodes"].as_array().expect("rows").clone();
        let known: Vec<&str> = rows.iter().filter_map(|row| row["node"].as_str()).collect();
        if known == names {
            return;
        }
        assert!(Instant::now() < until, "{fleet}");
        sleep(LOOK).await;
    }
}

/// The events a client has by now: everything up to the one whose data is `last`.
async fn events_to(client: &mut WsClient, last: u64) -> Vec<u64> {
    let mut seen = Vec::new();
    while seen.last() != Some(&last) {
        let message = client.json().await;
        if message["type"] == "event" {
            seen.push(message["data"].as_u64().expect("a number"));
        }
    }
    seen
}

async fn call(gateway: &GatewayProcess, method: &str, path: &str) -> Response {
    http::request(gateway.admin(), method, path, &[], b"").await
}

/// `(session, node)` of a listing, and who is missing.
fn listed(answer: &Response) -> (Vec<(String, String)>, Value) {
    assert_eq!(answer.status(), 200, "{}", answer.text());
    let json = answer.json();
    let text = |value: &Value| value.as_str().expect("a name").to_owned();
    let rows = json["sessions"].as_array().expect("rows").iter();
    (rows.map(|row| (text(&row["session"]), text(&row["node"]))).collect(), json["missing"].clone())
}

/// A listing by all nodes that are asked. Each has half a second for its answer, so on a busy machine
/// one may be missing now and then.
async fn listed_by_all(gateway: &GatewayProcess, path: &str) -> Vec<(String, String)> {
    let until = Instant::now() + SOON;
    loop {
        let (rows, missing) = listed(&call(gateway, "GET", path).await);
        if missing == json!([]) {
            return rows;
        }
        assert!(Instant::now() < until, "{missing} are missing");
    }
}

/// So many were ended. Who answers too late for that is named; he has done it all the same.
fn assert_ended(answer: &Response, n: u64) {
    assert_eq!(answer.status(), 200, "{}", answer.text());
    let said = answer.json();
    let (ended, n_missing) = (said["ended"].as_u64(), said["missing"].as_array().map(Vec::len));
    match n_missing.expect("who is missing") {
        0 => assert_eq!(ended, Some(n), "{said}"),
        _ => assert!(ended.is_some_and(|ended| ended <= n), "{said}"),
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_oldest_beyond_the_limit_end_wherever_they_are_and_the_others_miss_nothing() {
    let redis = RedisServer::plain();
    let (a, b) =
        tokio::join!(GatewayProcess::start(limited(&redis, "a", 4)), GatewayProcess::start(limited(&redis, "b", 4)));
    let mut clients = Vec::new();
    for i in 0..6 {
        clients.push(open([&a, &b][i % 2], "42").await.0);
        until_places(&redis, "42", 4.min(i + 1)).await;
        a.publish("news", &json!(i)).await;
    }
    let stranger = open(&a, "43").await;
    for client in clients.drain(..2) {
        let mut client = client;
        let (messages, code) = client.until_closed().await;
        let bye = messages.last().expect("a bye");
        assert_eq!(
            (code, &bye["type"], &bye["reason"], &bye["reconnect"]),
            (4409, &json!("bye"), &json!("replaced"), &json!("never"))
        );
    }
    for gateway in [&a, &b] {
        gateway.until_metric(REPLACED, 1.0).await;
    }
    b.publish("news", &json!(6)).await;
    for (client, first) in clients.iter_mut().zip(2..) {
        assert_eq!(events_to(client, 6).await, (first..=6).collect::<Vec<_>>());
    }
    drop(stranger);
    // A place is free again as soon as its session ends.
    drop(clients.pop());
    until_places(&redis, "42", 3).await;
    let (mut again, _) = open(&a, "42").await;
    until_places(&redis, "42", 4).await;
    a.publish("news", &json!(7)).await;
    for client in clients.iter_mut().chain([&mut again]) {
        assert_eq!(events_to(client, 7).await, [7]);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_channel_ends_in_a_users_sessions_on_every_node_and_they_hear_the_others_on() {
    let redis = RedisServer::plain();
    let (a, b) = tokio::join!(GatewayProcess::start(on(&redis, "a")), GatewayProcess::start(on(&redis, "b")));
    for gateway in [&a, &b] {
        until_known(gateway, &["a", "b"]).await;
    }
    let auth = |user: &str| bearer(&token(&json!({"sub": user, "channels": ["news", "room:1"]})));
    let open = async |gateway: &GatewayProcess, user: &str| {
        let opened = try_ws(gateway, "/v1/ws", &[("Authorization", &auth(user))]).await;
        let mut client = opened.unwrap_or_else(|refused| panic!("{}", refused.text()));
        client.until("ready").await;
        client
    };
    let mut theirs = [open(&a, "42").await, open(&b, "42").await];
    let mut other = open(&b, "43").await;
    let off = call(&a, "DELETE", "/v1/subscriptions?channel=room:1&user=42").await;
    assert_ended(&off, 2);
    for client in &mut theirs {
        let told = client.until("unsubscribed").await.pop().expect("it is told");
        assert_eq!((&told["channel"], &told["reason"]), (&json!("room:1"), &json!("admin")));
    }
    b.publish("room:1", &json!(1)).await;
    a.publish("news", &json!(2)).await;
    for client in &mut theirs {
        assert_eq!(events_to(client, 2).await, [2]);
    }
    assert_eq!(events_to(&mut other, 2).await, [1, 2]);
    // It forbids nothing: the token grants it still.
    theirs[0].send_json(&json!({"type": "subscribe", "channel": "room:1"})).await;
    theirs[0].until("ok").await;
    b.publish("room:1", &json!(3)).await;
    assert_eq!(events_to(&mut theirs[0], 3).await, [3]);
}

/// A tab whose author read nothing: whatever happens, it comes back. Ends with what its last
/// session has heard, once that stays open beyond `end`.
async fn dumb_tab(
    gateway: Arc<GatewayProcess>,
    n_opened: Arc<AtomicUsize>,
    n_refused: Arc<AtomicUsize>,
    end: Instant,
) -> Option<Vec<u64>> {
    while Instant::now() < end {
        let mut client = match try_user(&gateway, "42").await {
            Ok(client) => client,
            Err(refused) => {
                assert_eq!((refused.status(), code_of(&refused).as_str()), (429, "too_many_requests"));
                let after = refused.json()["retry_after_ms"].as_u64().expect("a delay");
                assert!((1_000..=60_000).contains(&after), "{after}");
                n_refused.fetch_add(1, Ordering::Relaxed);
                sleep(Duration::from_millis(100)).await;
                continue;
            }
        };
        n_opened.fetch_add(1, Ordering::Relaxed);
        let mut seen = Vec::new();
        loop {
            // Events come all the time, so nothing is cut in the middle but the last wait.
            match timeout(SOON, client.next()).await.expect("events all the time") {
                Heard::Text(text) => {
                    let message: Value = serde_json::from_str(&text).expect("JSON");
                    if message["type"] == "event" {
                        seen.push(message["data"].as_u64().expect("a number"));
                    }
                }
                Heard::Close { code, .. } => {
                    assert_eq!(code, Some(4409));
                    break;
                }
                Heard::Cut => break,
                _ => {}
            }
            if Instant::now() >= end {
                return Some(seen);
            }
        }
    }
    None
}

#[tokio::test(flavor = "multi_thread")]
async fn two_tabs_that_always_come_back_do_not_fight_for_ever() {
    let redis = RedisServer::plain();
    let (a, b) =
        tokio::join!(GatewayProcess::start(limited(&redis, "a", 1)), GatewayProcess::start(limited(&redis, "b", 1)));
    let (a, b) = (Arc::new(a), Arc::new(b));
    let (n_opened, n_refused) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
    let end = Instant::now() + Duration::from_secs(15);
    let mut tabs = JoinSet::new();
    for gateway in [&a, &b] {
        tabs.spawn(dumb_tab(gateway.clone(), n_opened.clone(), n_refused.clone(), end));
    }
    let mut n = 0;
    while !tabs.is_empty() && Instant::now() < end + SOON {
        a.publish("news", &json!(n)).await;
        n += 1;
        sleep(LOOK).await;
        if Instant::now() >= end && tabs.len() == 1 {
            break;
        }
        // The refused one gives up at the end, the other at its next event.
        while let Some(done) = tabs.try_join_next() {
            judge(done.expect("no panic in a tab"));
        }
    }
    while let Some(done) = tabs.join_next().await {
        judge(done.expect("no panic in a tab"));
    }
    let replaced = a.metric(REPLACED).await.unwrap_or(0.0) + b.metric(REPLACED).await.unwrap_or(0.0);
    // Four are allowed, the fifth is one too many, and one may have been on its way in.
    assert!((1.0..=6.0).contains(&replaced), "{replaced} replacements in 15 s");
    let (n_opened, n_refused) = (n_opened.load(Ordering::Relaxed), n_refused.load(Ordering::Relaxed));
    assert!(n_opened as f64 <= replaced + 2.0 && n_refused > 10, "{n_opened} sessions, {n_refused} refusals");
}

/// Whoever was there at the end got everything from its first event on.
fn judge(survivor: Option<Vec<u64>>) {
    let Some(seen) = survivor else { return };
    assert!(seen.len() > 50, "it was there for most of the time: {} events", seen.len());
    assert!(seen.windows(2).all(|pair| pair[1] == pair[0] + 1), "{seen:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn sessions_of_a_killed_node_do_not_count_against_who_comes_back() {
    let redis = RedisServer::plain();
    let (mut a, b) =
        tokio::join!(GatewayProcess::start(limited(&redis, "a", 2)), GatewayProcess::start(limited(&redis, "b", 2)));
    // The older one lives elsewhere: it is the one who would go.
    let (mut phone, _) = open(&b, "42").await;
    until_places(&redis, "42", 1).await;
    let (mut laptop, _) = open(&a, "42").await;
    until_places(&redis, "42", 2).await;
    a.signal(Signal::Kill);
    a.wait(SOON).await;
    assert_eq!(laptop.until_closed().await.1, 1006);
    let (mut laptop, id) = open(&b, "42").await;
    let until = Instant::now() + SOON;
    while !redis.cli(&["ZRANGE", "tidegate:sessions:42", "0", "-1"]).contains(&id) {
        assert!(Instant::now() < until, "no place");
        sleep(LOOK).await;
    }
    b.publish("news", &json!(1)).await;
    for client in [&mut phone, &mut laptop] {
        assert_eq!(events_to(client, 1).await, [1]);
    }
    assert_eq!(b.metric(REPLACED).await.unwrap_or(0.0), 0.0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_session_that_is_told_to_leave_has_no_place_any_more() {
    let redis = RedisServer::plain();
    let (mut a, b) =
        tokio::join!(GatewayProcess::start(limited(&redis, "a", 1)), GatewayProcess::start(limited(&redis, "b", 1)));
    let (mut client, _) = open(&a, "42").await;
    until_places(&redis, "42", 1).await;
    a.signal(Signal::Term);
    // Its bye is out, its socket still stands.
    assert_eq!(client.until("bye").await.last().expect("a bye")["reason"], "drain");
    until_places(&redis, "42", 0).await;
    let (_again, _) = open(&b, "42").await;
    assert_eq!(client.until_closed().await.1, 1001);
    a.wait(SOON).await;
    until_known(&b, &["b"]).await;
    assert_eq!(b.metric(REPLACED).await.unwrap_or(0.0), 0.0);
}

#[tokio::test(flavor = "multi_thread")]
async fn sessions_are_listed_and_ended_on_every_node() {
    let redis = RedisServer::plain();
    let (a, b, c) = tokio::join!(
        GatewayProcess::start(on(&redis, "a")),
        GatewayProcess::start(on(&redis, "b")),
        GatewayProcess::start(on(&redis, "c")),
    );
    for gateway in [&b, &c] {
        until_known(gateway, &["a", "b", "c"]).await;
    }
    let (mut on_a, first) = open(&a, "42").await;
    let (mut on_b, second) = open(&b, "42").await;
    let (mut stays, _) = open(&b, "43").await;
    let mine = listed_by_all(&c, "/v1/sessions?user=42").await;
    let mut expected = vec![(first, "a".to_owned()), (second.clone(), "b".to_owned())];
    let mut sorted = mine.clone();
    sorted.sort_by(|x, y| x.1.cmp(&y.1));
    expected.sort_by(|x, y| x.1.cmp(&y.1));
    assert_eq!(sorted, expected);
    // One of them, by a node that has neither.
    let ended = call(&c, "DELETE", &format!("/v1/sessions/{second}")).await;
    assert_ended(&ended, 1);
    let (messages, code) = on_b.until_closed().await;
    assert_eq!((code, &messages.last().expect("a bye")["reason"]), (4403, &json!("kicked")));
    let until = Instant::now() + SOON;
    loop {
        let unknown = call(&c, "DELETE", &format!("/v1/sessions/{second}")).await;
        if unknown.status() != 200 {
            assert_eq!((unknown.status(), code_of(&unknown).as_str()), (404, "not_found"));
            break;
        }
        // Somebody is missing, and perhaps it is that one's.
        assert_ended(&unknown, 0);
        assert!(Instant::now() < until, "{}", unknown.text());
    }
    let ended = call(&b, "DELETE", "/v1/sessions?user=42").await;
    assert_ended(&ended, 1);
    assert_eq!(on_a.until_closed().await.1, 4403);
    a.publish("news", &json!(1)).await;
    assert_eq!(events_to(&mut stays, 1).await, [1]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_node_that_stands_still_is_missing_and_holds_nobody_up() {
    let redis = RedisServer::plain();
    let (a, b) = tokio::join!(
        GatewayProcess::start(on(&redis, "a").env("GATEWAY_FLEET_TTL", "30s")),
        GatewayProcess::start(on(&redis, "b").env("GATEWAY_FLEET_TTL", "30s")),
    );
    let (_here, first) = open(&a, "42").await;
    let (_there, second) = open(&b, "42").await;
    until_known(&a, &["a", "b"]).await;
    b.signal(Signal::Stop);
    let began = Instant::now();
    let answer = listed(&call(&a, "GET", "/v1/sessions?user=42").await);
    assert_eq!(answer, (vec![(first, "a".to_owned())], json!(["b"])));
    // Perhaps it is that one's: nobody says that there is no such session.
    let ended = call(&a, "DELETE", &format!("/v1/sessions/{second}")).await;
    assert_eq!((ended.status(), ended.json()), (200, json!({"ended": 0, "missing": ["b"]})));
    assert!(began.elapsed() < Duration::from_secs(10), "half a second each: {:?}", began.elapsed());
    b.signal(Signal::Cont);
    // It reads what it was asked meanwhile; then it answers again.
    let until = Instant::now() + SOON;
    while listed(&call(&a, "GET", "/v1/sessions?user=42").await).1 != json!([]) {
        assert!(Instant::now() < until, "still missing");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn nodes_see_each_others_load_and_who_is_leaving() {
    let redis = RedisServer::plain();
    let started = |name, max: &str| GatewayProcess::start(on(&redis, name).env("GATEWAY_MAX_SESSIONS", max));
    let (mut a, b) = tokio::join!(started("a", "100"), started("b", "300"));
    let _clients = [open(&a, "1").await, open(&b, "2").await, open(&b, "3").await, open(&b, "4").await];
    b.until_metric("gateway_fleet_nodes", 2.0).await;
    b.until_metric("gateway_fleet_sessions", 4.0).await;
    assert_eq!(b.metric("gateway_fleet_share").await, Some(0.75));
    let fleet = http::get(b.admin(), "/v1/fleet").await.json();
    let rows = fleet["nodes"].as_array().expect("rows");
    for (row, expected) in rows.iter().zip([
        json!({"node": "a", "phase": "serving", "sessions": 1, "capacity": 100, "share": 0.25, "target": 1.0}),
        json!({"node": "b", "phase": "serving", "sessions": 3, "capacity": 300, "share": 0.75, "target": 3.0}),
    ]) {
        for (key, value) in expected.as_object().expect("an object") {
            assert_eq!(&row[key], value, "{key} of {row}");
        }
        assert!(row["age_ms"].as_u64().is_some_and(|age| age < 10_000), "{row}");
        assert_eq!(row["version"], rows[1]["version"]);
    }
    assert_eq!((&fleet["total"], &fleet["cv"], &fleet["busiest_ratio"]), (&json!(4), &json!(0.0), &json!(1.0)));
    a.signal(Signal::Term);
    a.wait(SOON).await;
    until_known(&b, &["b"]).await;
    b.until_metric("gateway_fleet_nodes", 1.0).await;
}
