//! What the host does to a node: few descriptors for a crowd at the door, a name given to two nodes, a host that
//! vanishes and leaves its connections standing. The real binary, and a Redis of the test's own.

use std::time::Duration;

use serde_json::{Value, json};
use testkit::gateway::{GatewayOptions, GatewayProcess, Signal, token};
use testkit::http::{self, Response};
use testkit::redis::RedisServer;
use testkit::ws::WsClient;
use tokio::net::TcpStream;
use tokio::time::{Instant, sleep};

/// The longest that a state may take to be reached; nothing is promised by it.
const SOON: Duration = Duration::from_secs(60);
/// Between two looks at a state that is about to be reached.
const LOOK: Duration = Duration::from_millis(20);

const BINARY: &str = env!("CARGO_BIN_EXE_tidegate");

/// With settings for tests that are about something else.
fn usual(options: GatewayOptions) -> GatewayOptions {
    options
        .patient()
        .env("GATEWAY_ACCEPT_BURST", "100000")
        .env("GATEWAY_ACCEPT_RATE", "100000")
        .env("GATEWAY_DRAIN_GRACE", "0s")
}

/// A gateway that is started where this shell command has set limits.
fn under(limits: &str) -> GatewayOptions {
    let start = format!("{limits} && exec \"$0\" serve");
    usual(GatewayOptions::new("/bin/sh").args(&["-c", &start, BINARY]))
}

fn on(redis: &RedisServer, name: &str) -> GatewayOptions {
    usual(GatewayOptions::new(BINARY))
        .env("GATEWAY_REDIS_URL", redis.url())
        .env("GATEWAY_NODE", name)
        .env("GATEWAY_FLEET_REPORT", "1s")
}

async fn try_open(gateway: &GatewayProcess, user: &str) -> Result<WsClient, Response> {
    let auth = format!("Bearer {}", token(&json!({"sub": user, "channels": ["news"]})));
    let mut client = WsClient::connect(gateway.public(), "/v1/ws", &[("Authorization", &auth)]).await?;
    client.until("ready").await;
    Ok(client)
}

async fn open(gateway: &GatewayProcess, user: &str) -> WsClient {
    try_open(gateway, user).await.unwrap_or_else(|refused| panic!("{}", refused.text()))
}

async fn is_alive(gateway: &GatewayProcess) {
    assert_eq!(http::get(gateway.probes(), "/livez").await.status(), 200);
}

/// Looks until the rows of `/v1/fleet` are so.
async fn until_fleet(gateway: &GatewayProcess, is_so: impl Fn(&[Value]) -> bool) {
    let until = Instant::now() + SOON;
    loop {
        let fleet = http::get(gateway.admin(), "/v1/fleet").await.json();
        if is_so(fleet["nodes"].as_array().expect("rows")) {
            return;
        }
        assert!(Instant::now() < until, "{fleet}");
        sleep(LOOK).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_crowd_at_the_door_takes_no_descriptor_from_sessions_probes_and_back_ends() {
    const LIMIT: usize = 1_024;
    let options = under(&format!("ulimit -n {LIMIT}")).env("GATEWAY_HEAD_TIMEOUT", "60s");
    let gateway = GatewayProcess::start(options).await;
    assert_eq!(gateway.metric("process_max_fds").await, Some(LIMIT as f64));
    let log = gateway.stderr();
    let lowered = log.lines().find(|line| line.contains("are lowered")).unwrap_or_else(|| panic!("{log}"));
    for said in [" WARN ", "sessions=512", "sessions_asked=40000", "handshakes=256", "handshakes_asked=1024", "41280"] {
        assert!(lowered.contains(said), "{said}: {lowered}");
    }
    // More than there are descriptors, and none of them says a word.
    let mut crowd = Vec::new();
    for _ in 0..2 * LIMIT {
        crowd.push(TcpStream::connect(gateway.public()).await.expect("the kernel takes it"));
    }
    let mut sessions = Vec::new();
    for i in 0..512 {
        sessions.push(open(&gateway, &i.to_string()).await);
    }
    is_alive(&gateway).await;
    let Err(refused) = try_open(&gateway, "one too many").await else { panic!("the node is full") };
    assert_eq!((refused.status(), &refused.json()["code"]), (503, &json!("at_capacity")));
    gateway.publish("news", &json!("hello")).await;
    for session in &mut sessions {
        session.until("event").await;
    }
    let left = LIMIT as f64 - gateway.metric("process_open_fds").await.expect("said");
    assert!(left > 100.0, "{left} are left");
    let log = gateway.stderr();
    assert!(!log.contains("accept failed") && !log.contains("cannot accept"), "{log}");
}

#[tokio::test(flavor = "multi_thread")]
async fn the_soft_limit_of_descriptors_is_raised_to_the_hard_one() {
    let gateway = GatewayProcess::start(under("ulimit -n 2000 && ulimit -Sn 200")).await;
    assert_eq!(gateway.metric("process_max_fds").await, Some(2_000.0));
    // As it was, and no word of it, where it is enough.
    let few = under("ulimit -n 2000").env("GATEWAY_MAX_SESSIONS", "700");
    let gateway = GatewayProcess::start(few).await;
    assert!(!gateway.stderr().contains("descriptor"), "{}", gateway.stderr());
    assert_eq!(gateway.metric("process_max_fds").await, Some(2_000.0));
}

#[tokio::test(flavor = "multi_thread")]
async fn two_nodes_of_one_name_say_so_and_a_kick_at_one_reaches_the_other() {
    let redis = RedisServer::plain();
    let (a, b) = tokio::join!(GatewayProcess::start(on(&redis, "gw")), GatewayProcess::start(on(&redis, "gw")));
    let mut there = open(&b, "42").await;
    for gateway in [&a, &b] {
        until_fleet(gateway, |rows| rows.len() == 2 && rows.iter().all(|row| row["node"] == "gw")).await;
        let log = gateway.stderr();
        assert!(log.lines().any(|line| line.contains(" ERROR ") && line.contains("GATEWAY_NODE")), "{log}");
    }
    let ended = http::request(a.admin(), "DELETE", "/v1/sessions?user=42", &[], b"").await;
    // On a busy machine the other may be late with its answer, and is named then.
    let answers = [json!({"ended": 1, "missing": []}), json!({"ended": 0, "missing": ["gw"]})];
    assert!(ended.status() == 200 && answers.contains(&ended.json()), "{}", ended.text());
    let (messages, code) = there.until_closed().await;
    assert_eq!((code, &messages.last().expect("a bye")["reason"]), (4403, &json!("kicked")));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_restart_under_the_same_name_is_no_namesake() {
    let redis = RedisServer::plain();
    let mut killed = GatewayProcess::start(on(&redis, "gw")).await;
    killed.signal(Signal::Kill);
    killed.wait(SOON).await;
    let began = GatewayProcess::start(on(&redis, "gw")).await;
    let other = GatewayProcess::start(on(&redis, "other")).await;
    // Its second report at the latest brings the other.
    until_fleet(&began, |rows| rows.len() == 2).await;
    until_fleet(&other, |rows| rows.len() == 2).await;
    assert!(!began.stderr().contains("GATEWAY_NODE"), "{}", began.stderr());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_session_is_not_replaced_for_places_of_a_node_that_vanished() {
    let redis = RedisServer::plain();
    let limited = |name| on(&redis, name).env("GATEWAY_MAX_SESSIONS_PER_USER", "2").env("GATEWAY_FLEET_TTL", "4s");
    let (stays, vanishes) = tokio::join!(GatewayProcess::start(limited("a")), GatewayProcess::start(limited("b")));
    let placed = async |n: usize, what: &str| {
        let until = Instant::now() + SOON;
        loop {
            let members = redis.cli(&["ZRANGE", "tidegate:sessions:42", "0", "-1"]);
            if members.lines().count() == n && members.contains(what) {
                return;
            }
            assert!(Instant::now() < until, "{members}");
            sleep(LOOK).await;
        }
    };
    let mut oldest = open(&stays, "42").await;
    placed(1, "a/").await;
    let _gone = open(&vanishes, "42").await;
    placed(2, "b/").await;
    until_fleet(&stays, |rows| rows.len() == 2).await;
    // As a host without power: nobody closes its connections, nobody reports.
    vanishes.signal(Signal::Stop);
    until_fleet(&stays, |rows| rows.len() == 1).await;
    assert!(redis.cli(&["PUBSUB", "CHANNELS", "tidegate:beacon:b/*"]).contains("b/"), "its link stands");
    let mut again = open(&stays, "42").await;
    let until = Instant::now() + SOON;
    while redis.cli(&["ZRANGE", "tidegate:sessions:42", "0", "-1"]).contains("b/") {
        assert!(Instant::now() < until, "its place stays");
        sleep(LOOK).await;
    }
    placed(2, "a/").await;
    stays.publish("news", &json!(1)).await;
    for client in [&mut oldest, &mut again] {
        client.until("event").await;
    }
    assert_eq!(stays.metric("gateway_sessions_closed_total{reason=\"replaced\"}").await.unwrap_or(0.0), 0.0);
}
