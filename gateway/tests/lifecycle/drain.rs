//! A node that leaves: unready, still serving, then everybody moved over the window, then exit 0.

use std::collections::{BTreeSet, HashSet};
use std::net::TcpListener;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use serde_json::{Value, json};
use testkit::gateway::{GatewayOptions, GatewayProcess, JWT_SECRET, Signal};
use testkit::http;
use testkit::redis::RedisServer;
use testkit::sse::SseClient;
use testkit::ws::WsClient;
use tokio::net::TcpStream;
use tokio::task::{JoinHandle, JoinSet};
use tokio::time::{Instant, sleep};

use crate::{Ending, TIDEGATE, bearer, claims, options, sse, sse_end, ws, ws_end, ws_unread};

/// A process that has nothing left to do is gone within this, also on a busy machine.
const SOON: Duration = Duration::from_secs(4);

/// Opens `n` sessions, WebSocket and SSE by turns, each read to its end by a task of its own.
async fn crowd(gateway: &GatewayProcess, n: usize) -> JoinSet<Ending> {
    let mut ends = JoinSet::new();
    for i in 0..n {
        let claims = claims(&format!("u{i}"));
        if i % 2 == 0 {
            let client = ws(gateway, &claims).await;
            ends.spawn(ws_end(client));
        } else {
            let client = sse(gateway, &claims).await;
            ends.spawn(sse_end(client));
        }
    }
    ends
}

/// Asks `/livez` all the time until the process is gone; gives how often, and fails on any answer but 200.
fn watch_liveness(gateway: &GatewayProcess) -> JoinHandle<usize> {
    let probes = gateway.probes();
    tokio::spawn(async move {
        let mut n = 0;
        while let Ok(answer) = http::try_request(probes, "GET", "/livez", &[], b"").await {
            assert_eq!(answer.status(), 200, "{}", answer.text());
            n += 1;
            sleep(Duration::from_millis(50)).await;
        }
        n
    })
}

async fn ready(gateway: &GatewayProcess) -> (u16, Value) {
    let answer = http::get(gateway.probes(), "/readyz").await;
    (answer.status(), answer.json())
}

/// The share that is gone never differs much from the share of the window that is over, and no half
/// second has much more than its part. Wide enough for a test machine that stands still for half a
/// second; all closes at once, or in two halves, are far outside.
fn assert_spread(ends: &[Ending], window: Duration) {
    let mut at: Vec<Instant> = ends.iter().map(|end| end.at).collect();
    at.sort();
    let first = at[0];
    for (i, at) in at.iter().enumerate() {
        let gone = (i + 1) as f64 / ends.len() as f64;
        let over = (*at - first).as_secs_f64() / window.as_secs_f64();
        assert!((gone - over).abs() < 0.2, "{gone:.2} of the sessions are gone after {over:.2} of the window");
    }
    let slot = Duration::from_millis(500);
    let share = ends.len() as f64 * slot.as_secs_f64() / window.as_secs_f64();
    let mut slots = std::collections::BTreeMap::new();
    for at in at {
        *slots.entry((at - first).as_millis() / slot.as_millis()).or_insert(0) += 1;
    }
    assert!(slots.values().all(|n| f64::from(*n) < 2.2 * share), "{slots:?}, an even share is {share}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_drain_serves_on_during_the_grace_and_then_moves_everybody_with_a_word() {
    const N: usize = 1_000;
    let (grace, window) = (Duration::from_secs(2), Duration::from_secs(4));
    let mut gateway = GatewayProcess::start(
        options()
            .env("GATEWAY_DRAIN_GRACE", "2s")
            .env("GATEWAY_DRAIN_WINDOW", "4s")
            .env("GATEWAY_DRAIN_DEADLINE", "30s"),
    )
    .await;
    let mut ends = crowd(&gateway, N).await;
    let alive = watch_liveness(&gateway);
    assert_eq!(ready(&gateway).await.0, 200);

    let signalled = Instant::now();
    gateway.signal(Signal::Term);
    gateway.until_status("/readyz", 503).await;
    let (_, body) = ready(&gateway).await;
    assert_eq!((&body["phase"], &body["reasons"]), (&json!("draining"), &json!(["draining"])));
    // Unready, and yet whoever is still sent here is served.
    let late = ws(&gateway, &claims("late")).await;
    assert!(ends.try_join_next().is_none(), "nobody is moved during the grace");
    ends.spawn(ws_end(late));

    let mut seen = vec![ends.join_next().await.unwrap().unwrap()];
    refused_as_draining(&gateway).await;
    while let Some(end) = ends.join_next().await {
        seen.push(end.unwrap());
    }
    assert!(gateway.wait(SOON).await.success(), "{}", gateway.stderr());
    assert!(signalled.elapsed() < Duration::from_secs(30));
    assert!(alive.await.unwrap() > 50);

    assert_eq!(seen.len(), N + 1);
    for end in &seen {
        assert!(end.at >= signalled + grace, "moved {:?} after the signal", end.at - signalled);
        assert_eq!(end.words(), ("drain", 1001, "after"));
        assert!(end.bye["id"].is_string(), "a ready session is told its position: {}", end.bye);
    }
    assert_spread(&seen, window);
    let delays: HashSet<u64> = seen.iter().map(|end| end.bye["after_ms"].as_u64().unwrap()).collect();
    assert!(delays.len() > N / 2, "only {} different delays", delays.len());
}

/// After the grace: a 503 for who can see it, a soft refusal for a browser's EventSource.
async fn refused_as_draining(gateway: &GatewayProcess) {
    let auth = bearer(&claims("newcomer"));
    let auth = [("Authorization", auth.as_str())];
    let by_ws = WsClient::connect(gateway.public(), "/v1/ws", &auth).await.err().expect("the door is closed");
    let by_sse = SseClient::connect(gateway.public(), "/v1/sse", &auth).await.err().expect("the door is closed");
    for refused in [by_ws, by_sse] {
        assert_eq!((refused.status(), &refused.json()["code"]), (503, &json!("draining")));
        let after: u64 = refused.header("retry-after").unwrap().parse().unwrap();
        assert!((1..=3).contains(&after), "{after}");
    }
    let path = format!("/v1/sse?access_token={}", testkit::gateway::token(&claims("browser")));
    let soft = SseClient::connect(gateway.public(), &path, &[]).await.expect("a status it can bear");
    let end = sse_end(soft).await;
    assert_eq!((&end.bye["reason"], &end.bye["reconnect"]), (&json!("drain"), &json!("after")));
    assert!(end.retry.is_some_and(|ms| (1_000..=3_000).contains(&ms)), "{end:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nobody_is_refused_a_connection_before_the_process_ends() {
    let mut gateway = GatewayProcess::start(
        options()
            .env("GATEWAY_DRAIN_GRACE", "1500ms")
            .env("GATEWAY_DRAIN_WINDOW", "2s")
            .env("GATEWAY_DRAIN_DEADLINE", "30s"),
    )
    .await;
    let mut ends = crowd(&gateway, 20).await;
    let public = gateway.public();
    let auth = bearer(&claims("one of fifty a second"));
    let signalled = Instant::now();
    gateway.signal(Signal::Term);
    let mut answers = Vec::new();
    // Until the first that finds nobody: then the process must be ending.
    while let Ok(socket) = TcpStream::connect(public).await {
        let mut wire = http::Wire::new(socket);
        let path = "/v1/ws";
        let fields = [
            ("Authorization", auth.as_str()),
            ("Connection", "Upgrade"),
            ("Upgrade", "websocket"),
            ("Sec-WebSocket-Version", "13"),
            ("Sec-WebSocket-Key", "dGhlIHNhbXBsZSBub25jZQ=="),
        ];
        if wire.ask("GET", path, "gateway", &fields, b"").await.is_err() {
            break;
        }
        let Ok(head) = wire.head().await else { break };
        answers.push((signalled.elapsed(), head.status));
        sleep(Duration::from_millis(20)).await;
    }
    assert!(gateway.wait(SOON).await.success(), "{}", gateway.stderr());
    while let Some(end) = ends.join_next().await {
        assert_eq!(end.unwrap().words().0, "drain");
    }
    let statuses: Vec<u16> = answers.iter().map(|(_, status)| *status).collect();
    let n_served = statuses.iter().take_while(|status| **status == 101).count();
    assert!(n_served > 5, "served during the grace: {statuses:?}");
    assert!(statuses.len() > n_served + 5, "refused with a status after it: {statuses:?}");
    assert!(statuses[n_served..].iter().all(|status| *status == 503), "{statuses:?}");
    assert!(answers[n_served].0 >= Duration::from_millis(1500), "{answers:?}");
}

#[tokio::test]
async fn with_few_connected_the_exit_comes_with_the_last_of_them() {
    for n in [0, 1, 3] {
        let mut gateway = GatewayProcess::start(options().env("GATEWAY_DRAIN_GRACE", "1s")).await;
        let mut ends = crowd(&gateway, n).await;
        let signalled = Instant::now();
        gateway.signal(Signal::Term);
        while let Some(end) = ends.join_next().await {
            assert_eq!(end.unwrap().words(), ("drain", 1001, "after"));
        }
        assert!(gateway.wait(SOON).await.success(), "{}", gateway.stderr());
        let took = signalled.elapsed();
        assert!(took >= Duration::from_secs(1) && took < SOON, "{n} connected: {took:?}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn clients_that_neither_read_nor_answer_do_not_hold_the_exit_up() {
    let mut gateway = GatewayProcess::start(
        options()
            .env("GATEWAY_DRAIN_GRACE", "0s")
            .env("GATEWAY_DRAIN_WINDOW", "500ms")
            .env("GATEWAY_CLOSE_TIMEOUT", "1s"),
    )
    .await;
    let mut ends = crowd(&gateway, 90).await;
    let mut deaf = Vec::new();
    for i in 0..5 {
        deaf.push(ws_unread(gateway.public(), &claims(&format!("deaf{i}"))).await);
    }
    let deaf_stream = sse(&gateway, &claims("deaf stream")).await;
    let signalled = Instant::now();
    gateway.signal(Signal::Term);
    while let Some(end) = ends.join_next().await {
        assert_eq!(end.unwrap().words().0, "drain");
    }
    assert!(gateway.wait(SOON).await.success(), "{}", gateway.stderr());
    let took = signalled.elapsed();
    assert!(took >= Duration::from_secs(1), "they had their time to answer: {took:?}");
    // What they were told was told nevertheless.
    for mut client in deaf {
        let (messages, code) = client.until_closed().await;
        assert_eq!((code, &messages.last().unwrap()["reason"]), (1001, &json!("drain")));
    }
    drop(deaf_stream);
}

#[tokio::test]
async fn a_second_signal_ends_at_once_with_whoever_is_connected() {
    for (first, second) in [(Signal::Term, Signal::Term), (Signal::Int, Signal::Term), (Signal::Term, Signal::Int)] {
        let mut gateway = GatewayProcess::start(options().env("GATEWAY_DRAIN_GRACE", "30s")).await;
        let client = ws(&gateway, &claims("u")).await;
        gateway.signal(first);
        gateway.until_status("/readyz", 503).await;
        assert_eq!(gateway.ended(), None);
        gateway.signal(second);
        assert!(gateway.wait(SOON).await.success(), "{}", gateway.stderr());
        assert!(gateway.stderr().contains("cut=1"), "{}", gateway.stderr());
        assert_eq!(ws_end(client).await.code, Some(1006));
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_second_signal_does_not_wait_for_a_session_that_cannot_be_opened() {
    let redis = RedisServer::plain();
    let options = options()
        .env("GATEWAY_REDIS_URL", redis.url())
        .env("GATEWAY_REVOCATION_UNAVAILABLE", "allow")
        .env("GATEWAY_AUTH_TIMEOUT", "500ms")
        .env("GATEWAY_DRAIN_GRACE", "30s");
    let mut gateway = GatewayProcess::start(options).await;
    redis.pause();
    let mut opened = ws_unread(gateway.public(), &claims("u")).await;
    assert_eq!(opened.json().await["type"], "hello", "and no ready, for its history cannot be read");
    gateway.signal(Signal::Term);
    gateway.until_status("/readyz", 503).await;
    gateway.signal(Signal::Term);
    let ended = gateway.wait(SOON).await;
    redis.resume();
    assert!(ended.success(), "{}", gateway.stderr());
    drop(opened);
}

#[tokio::test]
async fn a_signal_joins_a_drain_that_the_api_started() {
    let mut gateway = GatewayProcess::start(options().env("GATEWAY_DRAIN_GRACE", "30s")).await;
    let asked = http::request(gateway.admin(), "POST", "/v1/drain", &[("Content-Type", "application/json")], b"").await;
    assert!((200..300).contains(&asked.status()), "{}", asked.text());
    gateway.until_status("/readyz", 503).await;
    gateway.signal(Signal::Term);
    // The signal was taken and changed nothing: the grace goes on and people are served.
    let client = ws(&gateway, &claims("u")).await;
    assert_eq!(gateway.ended(), None);
    gateway.signal(Signal::Term);
    assert!(gateway.wait(SOON).await.success(), "{}", gateway.stderr());
    drop(client);
}

#[tokio::test]
async fn a_drain_by_the_api_ends_the_process_too() {
    let mut gateway = GatewayProcess::start(options().env("GATEWAY_DRAIN_GRACE", "0s")).await;
    let client = ws(&gateway, &claims("u")).await;
    let asked = http::request(gateway.admin(), "POST", "/v1/drain", &[("Content-Type", "application/json")], b"").await;
    assert!((200..300).contains(&asked.status()), "{}", asked.text());
    assert_eq!(ws_end(client).await.words(), ("drain", 1001, "after"));
    assert!(gateway.wait(SOON).await.success(), "{}", gateway.stderr());
}

/// A process that is signalled before it has told anybody that it runs.
struct Early(Child);

impl Early {
    fn start(redis: &str) -> Self {
        let mut command = Command::new(TIDEGATE);
        command.arg("serve").env_clear().stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        for listener in ["GATEWAY_LISTEN", "GATEWAY_ADMIN_LISTEN", "GATEWAY_PROBE_LISTEN"] {
            command.env(listener, "127.0.0.1:0");
        }
        command.env("GATEWAY_JWT_SECRET", JWT_SECRET).env("GATEWAY_REDIS_URL", redis);
        Self(command.spawn().unwrap())
    }

    /// Waits until the kernel delivers SIGTERM to the program rather than ending it.
    async fn until_it_listens(&mut self) {
        const TERM: u64 = 1 << 14;
        loop {
            let status = std::fs::read_to_string(format!("/proc/{}/status", self.0.id())).unwrap();
            let caught = status.lines().find_map(|line| line.strip_prefix("SigCgt:")).map(str::trim).unwrap_or("0");
            if u64::from_str_radix(caught, 16).unwrap() & TERM != 0 {
                return;
            }
            assert_eq!(self.0.try_wait().unwrap(), None, "it runs");
            tokio::task::yield_now().await;
        }
    }

    async fn ends_within(&mut self, limit: Duration) {
        let signalled = Instant::now();
        let sent = Command::new("kill").args(["-TERM", &self.0.id().to_string()]).status().unwrap();
        assert!(sent.success());
        loop {
            if let Some(status) = self.0.try_wait().unwrap() {
                assert!(status.success(), "{status}");
                return;
            }
            assert!(signalled.elapsed() < limit, "still there after {limit:?}");
            sleep(Duration::from_millis(5)).await;
        }
    }
}

impl Drop for Early {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[tokio::test]
async fn a_signal_during_the_start_is_obeyed_at_once() {
    // Taken by nobody: connections are accepted by the kernel and never answered.
    let tarpit = TcpListener::bind("127.0.0.1:0").unwrap();
    let refusing = {
        let closed = TcpListener::bind("127.0.0.1:0").unwrap();
        closed.local_addr().unwrap()
    };
    for redis in [tarpit.local_addr().unwrap(), refusing] {
        for after in [Duration::ZERO, Duration::from_millis(200), Duration::from_secs(2)] {
            let mut early = Early::start(&format!("redis://{redis}"));
            early.until_it_listens().await;
            sleep(after).await;
            early.ends_within(Duration::from_secs(1)).await;
        }
    }
}

/// `unshare`: the gateway is process 1 of a PID namespace, as in a container. `None` where the
/// kernel does not permit it.
fn as_first_process() -> Option<GatewayOptions> {
    let unshare = ["/usr/bin/unshare", "/bin/unshare"].into_iter().find(|path| std::path::Path::new(path).exists())?;
    let flags = ["--pid", "--fork", "--kill-child", "--mount-proc"];
    let is_permitted =
        Command::new(unshare).args(flags).arg("true").stderr(Stdio::null()).status().is_ok_and(|s| s.success());
    let arguments: Vec<&str> = flags.into_iter().chain([TIDEGATE, "serve"]).collect();
    is_permitted.then(|| {
        let defaults = GatewayOptions::new(unshare).args(&arguments);
        defaults.env("GATEWAY_DRAIN_GRACE", "30s")
    })
}

/// Signals the gateway inside, whose parent is the process that the kit started.
fn signal_inside(gateway: &GatewayProcess, name: &str) {
    let parent = gateway.pid();
    let children = std::fs::read_to_string(format!("/proc/{parent}/task/{parent}/children")).unwrap();
    let inside = children.split_whitespace().next().expect("unshare has a child");
    assert!(Command::new("kill").args(["-s", name, inside]).status().unwrap().success());
}

#[tokio::test]
async fn as_the_first_process_of_a_container_it_obeys_both_signals_too() {
    let Some(options) = as_first_process() else {
        eprintln!("the kernel permits no PID namespace: not tested here");
        return;
    };
    for (first, second) in [("TERM", "TERM"), ("INT", "TERM")] {
        let mut gateway = GatewayProcess::start(options.clone()).await;
        let client = ws(&gateway, &claims("u")).await;
        signal_inside(&gateway, first);
        gateway.until_status("/readyz", 503).await;
        assert_eq!(gateway.ended(), None);
        signal_inside(&gateway, second);
        assert!(gateway.wait(SOON).await.success(), "{}", gateway.stderr());
        assert!(gateway.stderr().contains("cut=1"), "{}", gateway.stderr());
        drop(client);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_was_accepted_before_the_signal_reaches_who_moves_to_another_node() {
    const N: usize = 200;
    let redis = RedisServer::plain();
    let options = || options().env("GATEWAY_REDIS_URL", redis.url());
    let mut leaving = GatewayProcess::start(options().env("GATEWAY_DRAIN_GRACE", "0s")).await;
    let staying = GatewayProcess::start(options()).await;
    let mut by_ws = ws(&leaving, &claims("w")).await;
    let mut by_sse = sse(&leaving, &claims("s")).await;

    let items: Vec<Value> = (0..N).map(|n| json!({"channel": "news", "data": n})).collect();
    let stored = http::post_json(leaving.admin(), "/v1/publish/batch", &json!(items)).await;
    leaving.signal(Signal::Term);
    let ids: BTreeSet<String> =
        stored.json()["results"].as_array().unwrap().iter().map(|r| r["id"].as_str().unwrap().to_owned()).collect();
    assert_eq!(ids.len(), N);

    let mut seen = Seen::default();
    let (messages, code) = by_ws.until_closed().await;
    assert_eq!(code, 1001);
    drop(by_ws);
    messages.iter().for_each(|message| seen.take(message));
    let mut again = ws_at(&staying, &claims("w"), &seen.cursor).await;
    while seen.data.len() < N {
        seen.take(&again.json().await);
    }
    seen.is_whole(N);

    let mut seen = Seen::default();
    for block in by_sse.until_end().await.iter().filter(|block| !block.is_comment()) {
        seen.take_block(block);
    }
    let cursor = seen.cursor.clone();
    let auth = bearer(&claims("s"));
    let mut again =
        SseClient::connect(staying.public(), "/v1/sse", &[("Authorization", &auth), ("Last-Event-ID", &cursor)])
            .await
            .unwrap();
    while seen.data.len() < N {
        seen.take_block(&again.block().await);
    }
    seen.is_whole(N);
    assert!(leaving.wait(SOON).await.success(), "{}", leaving.stderr());
}

async fn ws_at(gateway: &GatewayProcess, claims: &Value, cursor: &str) -> WsClient {
    let fields = [("Authorization", &*bearer(claims)), ("Last-Event-ID", cursor)];
    WsClient::connect(gateway.public(), "/v1/ws", &fields).await.unwrap_or_else(|refused| panic!("{}", refused.text()))
}

/// What one client received over its connections.
#[derive(Default)]
struct Seen {
    data: Vec<u64>,
    cursor: String,
}

impl Seen {
    fn take(&mut self, message: &Value) {
        assert_ne!(message["type"], "gap", "{message}");
        if message["type"] == "event" {
            self.data.push(message["data"].as_u64().unwrap());
        }
        if let Some(id) = message["id"].as_str() {
            id.clone_into(&mut self.cursor);
        }
    }

    fn take_block(&mut self, block: &testkit::sse::Block) {
        let message = block.json();
        assert_ne!(message["type"], "gap", "{message}");
        if message["type"] == "event" {
            self.data.push(message["data"].as_u64().unwrap());
        }
        if let Some(id) = &block.id {
            id.clone_into(&mut self.cursor);
        }
    }

    fn is_whole(&self, n: usize) {
        assert!(self.data.iter().copied().eq(0..n as u64), "{:?}", self.data);
    }
}
