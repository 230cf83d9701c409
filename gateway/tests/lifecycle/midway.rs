//! Who and what is on its way as the node leaves: a handshake that is not answered yet, a session that
//! is not ready yet, a back end that publishes, and the stop that is asked for twice.

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::time::Duration;

use serde_json::{Value, json};
use testkit::gateway::{GatewayOptions, GatewayProcess, Signal, token};
use testkit::http::{self, Response};
use testkit::numbered::{Follower, Publisher, Route, Transport};
use testkit::proxy::{Direction, Flow, Proxy};
use testkit::redis::RedisServer;
use testkit::sse::{Block, SseClient};
use testkit::ws::WsClient;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, sleep_until};

use crate::{SOON, bearer, claims, n_open, options, sse_end, ws, ws_end, ws_unread};

/// An answer to a handshake that was refused.
fn refused<T>(answer: Result<T, Response>) -> Response {
    answer.err().expect("nobody is let in any more")
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_handshake_under_way_as_the_door_closes_is_told_to_go_elsewhere_and_holds_nobody_up() {
    let redis = RedisServer::plain();
    let wire = Proxy::start(redis.addr()).await;
    let slow = options()
        .env("GATEWAY_REDIS_URL", redis.url_at(wire.port()))
        .env("GATEWAY_REDIS_TIMEOUT", "20s")
        .env("GATEWAY_AUTH_TIMEOUT", "30s")
        // Time for three to come that far.
        .env("GATEWAY_DRAIN_GRACE", "3s")
        .env("GATEWAY_CLOSE_TIMEOUT", "20s");
    let mut gateway = GatewayProcess::start(slow).await;
    let public = gateway.public();
    // Keeps the node there: it reads its close and takes its time to answer it.
    let mut lingering = ws(&gateway, &claims("lingering")).await;

    // Whether their tokens were revoked is not answered for a while.
    wire.set(Direction::Down, Flow::Stall);
    let auth = bearer(&claims("newcomer"));
    let by_query = format!("/v1/sse?access_token={}", token(&claims("browser")));
    let by_ws = {
        let auth = auth.clone();
        tokio::spawn(async move { refused(WsClient::connect(public, "/v1/ws", &[("Authorization", &auth)]).await) })
    };
    let by_sse =
        tokio::spawn(async move { refused(SseClient::connect(public, "/v1/sse", &[("Authorization", &auth)]).await) });
    let by_browser = tokio::spawn(async move {
        sse_end(SseClient::connect(public, &by_query, &[]).await.expect("a status that it can bear")).await
    });
    gateway.signal(Signal::Term);
    let (_, code) = lingering.until_closed().await;
    assert_eq!(code, 1001, "the grace is over and the door is closed");
    let late = refused(WsClient::connect(public, "/v1/ws", &[("Authorization", &bearer(&claims("late")))]).await);
    assert_eq!(late.json()["code"], "draining");
    for waiting in [by_ws.is_finished(), by_sse.is_finished(), by_browser.is_finished()] {
        assert!(!waiting, "who came before waits for the list");
    }

    wire.set(Direction::Down, Flow::Pass);
    for refused in [by_ws.await.unwrap(), by_sse.await.unwrap()] {
        assert_eq!((refused.status(), &refused.json()["code"]), (503, &json!("draining")), "{}", refused.text());
        let after: u64 = refused.header("retry-after").unwrap().parse().unwrap();
        assert!((1..=3).contains(&after), "{after}");
    }
    let soft = by_browser.await.unwrap();
    assert_eq!((&soft.bye["reason"], &soft.bye["reconnect"]), (&json!("drain"), &json!("after")));
    // None of them was a session for a moment: nobody would have asked it to leave.
    assert_eq!(n_open(&gateway).await, 1.0);
    for (wire, n) in [("ws", 1.0), ("sse", 0.0)] {
        let opened = format!("gateway_sessions_opened_total{{transport=\"{wire}\",resume=\"new\"}}");
        assert_eq!(gateway.metric(&opened).await.unwrap_or(0.0), n, "{wire}");
    }
    gateway.until_metric("gateway_refused_total{code=\"draining\"}", 4.0).await;
    // With its end nobody is there any more, and nothing is waited for.
    drop(lingering);
    assert!(gateway.wait(SOON).await.success(), "{}", gateway.stderr());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_session_that_waits_for_its_history_leaves_with_the_others() {
    let redis = RedisServer::plain();
    let open_without_a_list = options()
        .env("GATEWAY_REDIS_URL", redis.url())
        .env("GATEWAY_REVOCATION_UNAVAILABLE", "allow")
        .env("GATEWAY_AUTH_TIMEOUT", "500ms")
        .env("GATEWAY_DRAIN_GRACE", "500ms")
        .env("GATEWAY_DRAIN_WINDOW", "1s");
    let mut gateway = GatewayProcess::start(open_without_a_list).await;
    redis.pause();
    let mut by_ws = ws_unread(gateway.public(), &claims("w")).await;
    assert_eq!(by_ws.json().await["type"], "hello", "and no ready, for its history cannot be read");
    let auth = bearer(&claims("s"));
    let mut by_sse = SseClient::connect(gateway.public(), "/v1/sse", &[("Authorization", &auth)]).await.unwrap();
    by_sse.until("hello").await;
    gateway.signal(Signal::Term);
    let (by_ws, by_sse) = tokio::join!(ws_end(by_ws), sse_end(by_sse));
    for end in [by_ws, by_sse] {
        assert_eq!(end.words(), ("drain", 1001, "after"));
        // It has heard nothing yet, so there is no place that it could go on from.
        assert_eq!(end.bye.get("id"), None, "{}", end.bye);
    }
    let ended = gateway.wait(SOON).await;
    redis.resume();
    assert!(ended.success(), "{}", gateway.stderr());
}

async fn ask_to_drain(gateway: &GatewayProcess) {
    let asked = http::request(gateway.admin(), "POST", "/v1/drain", &[("Content-Type", "application/json")], b"").await;
    assert!((200..300).contains(&asked.status()), "{}", asked.text());
}

/// A hook that runs before the signal asks for the drain, the signal comes seconds later: as an
/// orchestrator does it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stop_that_is_asked_for_twice_has_one_grace_and_one_window() {
    const N: usize = 20;
    let grace = Duration::from_secs(6);
    let mut gateway =
        GatewayProcess::start(options().env("GATEWAY_DRAIN_GRACE", "6s").env("GATEWAY_DRAIN_WINDOW", "1s")).await;
    let mut ends = JoinSet::new();
    for i in 0..N {
        ends.spawn(ws_end(ws(&gateway, &claims(&format!("u{i}"))).await));
    }
    let asked = Instant::now();
    ask_to_drain(&gateway).await;
    gateway.until_status("/readyz", 503).await;
    sleep_until(asked + grace - Duration::from_millis(500)).await;
    gateway.signal(Signal::Term);
    ask_to_drain(&gateway).await;
    for end in ends.join_all().await {
        assert_eq!(end.words(), ("drain", 1001, "after"));
        let after = end.at - asked;
        // Counted from the signal, the grace alone would be over at eleven and a half.
        assert!(after >= grace && after < Duration::from_secs(11), "{after:?} after it was first asked for");
    }
    assert!(gateway.wait(SOON).await.success(), "{}", gateway.stderr());
    assert_eq!(gateway.stderr().matches("closing sessions").count(), 1, "{}", gateway.stderr());
}

#[tokio::test]
async fn a_stop_that_the_api_asks_for_before_the_node_serves_is_obeyed_at_once() {
    // Nobody listens there, so the start waits for it.
    let nobody = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let waits = options().env("GATEWAY_REDIS_URL", format!("redis://{nobody}")).env("GATEWAY_DRAIN_GRACE", "30s");
    let mut gateway = GatewayProcess::start_unready(waits).await;
    assert_eq!(http::get(gateway.probes(), "/startupz").await.status(), 503);
    ask_to_drain(&gateway).await;
    assert!(gateway.wait(SOON).await.success(), "{}", gateway.stderr());
}

/// Moves as its `bye` says, and reads on until it has the last event of its channel.
async fn moved(mut follower: Follower, to: SocketAddr) -> Follower {
    while follower.next().await.is_some() {}
    let bye = follower.byes.last().unwrap_or_else(|| panic!("{} left without a word", follower.name));
    assert_eq!((&bye["reason"], &bye["reconnect"]), (&json!("drain"), &json!("after")), "{bye}");
    // WebSocket and SSE alike: the place that it was told of is where it goes on.
    assert_eq!(bye["id"].as_str(), follower.cursor.as_deref(), "{bye}");
    follower.connect(to).await;
    follower.until_the_last().await;
    follower
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_event_published_while_its_node_leaves_is_missed_by_nobody() {
    const N: usize = 24;
    let redis = RedisServer::plain();
    let on = |options: GatewayOptions| options.env("GATEWAY_REDIS_URL", redis.url());
    let leaves = options().env("GATEWAY_DRAIN_GRACE", "300ms").env("GATEWAY_DRAIN_WINDOW", "2s");
    let (mut leaving, staying) = tokio::join!(GatewayProcess::start(on(leaves)), GatewayProcess::start(on(options())));
    let publisher = Publisher::start(&["news"], vec![Route::Admin(staying.admin())], 300);
    let mut followers = JoinSet::new();
    for i in 0..N {
        let transport = Transport::ALL[i % 2];
        let (name, token) = (format!("{transport:?} {i}"), token(&claims(&format!("u{i}"))));
        let mut follower = Follower::new(name, transport, &token, &["news"]);
        follower.connect(leaving.public()).await;
        follower.until(|message| message["type"] == "ready").await;
        followers.spawn(moved(follower, staying.public()));
    }
    publisher.more(100).await;
    leaving.signal(Signal::Term);
    assert!(leaving.wait(Duration::from_secs(3) + SOON).await.success(), "{}", leaving.stderr());
    publisher.more(100).await;
    let ledger = publisher.stop().await;
    for follower in followers.join_all().await {
        follower.assert_complete(&ledger);
        assert!(follower.readies.iter().skip(1).all(|ready| ready["resume"] == "ok"), "{:?}", follower.readies);
    }
}

/// One that publishes through the node until nobody is there any more. Gives the numbers that were
/// acknowledged, with their ids; what is asked for is answered by a yes or not at all.
async fn publish_to_the_end(admin: SocketAddr) -> Vec<(u64, String)> {
    let mut acknowledged = Vec::new();
    for n in 0.. {
        let body = json!({"channel": "news", "data": n}).to_string();
        let fields = [("Content-Type", "application/json")];
        let Ok(answer) = http::try_request(admin, "POST", "/v1/publish", &fields, body.as_bytes()).await else { break };
        assert_eq!(answer.status(), 200, "{}", answer.text());
        acknowledged.push((n, answer.json()["id"].as_str().expect("an id").to_owned()));
        sleep(Duration::from_millis(5)).await;
    }
    acknowledged
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_back_end_publishes_through_a_node_to_its_last_moment_and_what_was_acknowledged_is_heard() {
    let redis = RedisServer::plain();
    let on = |options: GatewayOptions| options.env("GATEWAY_REDIS_URL", redis.url());
    let leaves = options().env("GATEWAY_DRAIN_GRACE", "500ms").env("GATEWAY_DRAIN_WINDOW", "1500ms");
    let (mut leaving, staying) = tokio::join!(GatewayProcess::start(on(leaves)), GatewayProcess::start(on(options())));
    let mut ends = JoinSet::new();
    for i in 0..20 {
        ends.spawn(ws_end(ws(&leaving, &claims(&format!("u{i}"))).await));
    }
    let auth = bearer(&claims("s"));
    let mut by_ws = ws(&staying, &claims("w")).await;
    let mut by_sse = SseClient::connect(staying.public(), "/v1/sse", &[("Authorization", &auth)]).await.unwrap();
    by_sse.until("ready").await;
    let publishing = tokio::spawn(publish_to_the_end(leaving.admin()));
    leaving.signal(Signal::Term);
    for end in ends.join_all().await {
        assert_eq!(end.words().0, "drain");
    }
    let acknowledged = publishing.await.unwrap();
    assert!(leaving.wait(SOON).await.success(), "{}", leaving.stderr());
    assert!(acknowledged.len() > 10, "{} were acknowledged", acknowledged.len());
    // Whether the very last one was stored before the end, nobody was told.
    let last = staying.publish("news", &json!("the last")).await;
    let heard_by_ws = until_id(async || by_ws.json().await, &last).await;
    let heard_by_sse = until_id(async || next_event(&mut by_sse).await, &last).await;
    assert_eq!(heard_by_ws, heard_by_sse);
    let heard: BTreeSet<_> = heard_by_ws.into_iter().collect();
    for (n, id) in &acknowledged {
        assert!(heard.contains(&(*n, id.clone())), "{n} was acknowledged as {id} and is lost");
    }
    assert!(heard.len() <= acknowledged.len() + 1, "{} heard, {} acknowledged", heard.len(), acknowledged.len());
}

async fn next_event(stream: &mut SseClient) -> Value {
    stream.until("event").await.last().map(Block::json).expect("until gives at least one")
}

/// Numbers and ids of what comes before this event.
async fn until_id(mut next: impl AsyncFnMut() -> Value, last: &str) -> Vec<(u64, String)> {
    let mut heard = Vec::new();
    loop {
        let message = next().await;
        if message["type"] != "event" {
            continue;
        }
        let id = message["id"].as_str().expect("logged");
        if id == last {
            return heard;
        }
        heard.push((message["data"].as_u64().expect("numbered"), id.to_owned()));
    }
}
