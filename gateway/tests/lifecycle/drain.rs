//! A node that leaves: unready, still serving, then everybody moved over the window, then exit 0.

use std::collections::{BTreeSet, HashSet};
use std::time::Duration;

use serde_json::{Value, json};
use testkit::gateway::{GatewayProcess, Signal};
use testkit::http;
use testkit::lag::Lag;
use testkit::redis::RedisServer;
use testkit::sse::SseClient;
use testkit::ws::WsClient;
use tokio::net::TcpStream;
use tokio::task::{JoinHandle, JoinSet};
use tokio::time::{Instant, sleep};

use crate::{Ending, SOON, bearer, claims, options, sse, sse_end, sse_small, ws, ws_end, ws_small, ws_unread};

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
/// second, and wider by as much as it did so for longer; all closes at once, or in two halves, are far
/// outside.
fn assert_spread(ends: &[Ending], window: Duration, lag: Duration) {
    let mut at: Vec<Instant> = ends.iter().map(|end| end.at).collect();
    at.sort();
    let first = at[0];
    for (i, at) in at.iter().enumerate() {
        let gone = (i + 1) as f64 / ends.len() as f64;
        let over = (*at - first).as_secs_f64() / window.as_secs_f64();
        let most = 0.2 + lag.as_secs_f64() / window.as_secs_f64();
        assert!((gone - over).abs() < most, "{gone:.2} of the sessions are gone after {over:.2} of the window");
    }
    let slot = Duration::from_millis(500);
    let share = ends.len() as f64 * slot.as_secs_f64() / window.as_secs_f64();
    let mut slots = std::collections::BTreeMap::new();
    for at in at {
        *slots.entry((at - first).as_millis() / slot.as_millis()).or_insert(0) += 1;
    }
    let most = (2.2 + lag.as_secs_f64() / slot.as_secs_f64()) * share;
    assert!(slots.values().all(|n| f64::from(*n) < most), "{slots:?}, an even share is {share}; late by {lag:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_drain_serves_on_during_the_grace_and_then_moves_everybody_with_a_word() {
    const N: usize = 1_000;
    let (grace, window) = (Duration::from_secs(3), Duration::from_secs(4));
    let lag = Lag::watch();
    let mut gateway = GatewayProcess::start(
        options()
            .env("GATEWAY_DRAIN_GRACE", "3s")
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
    assert!(alive.await.unwrap() > 10, "it was asked all the time");

    assert_eq!(seen.len(), N + 1);
    for end in &seen {
        assert!(end.at >= signalled + grace, "moved {:?} after the signal", end.at - signalled);
        assert_eq!(end.words(), ("drain", 1001, "after"));
        assert!(end.bye["id"].is_string(), "a ready session is told its position: {}", end.bye);
    }
    assert_spread(&seen, window, lag.longest());
    let last = seen.iter().map(|end| end.at - signalled).max().unwrap();
    assert!(last >= grace + window.mul_f64(0.95), "the window is used to its end: {last:?}");
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
    let lag = Lag::watch();
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
    let found_nobody = Instant::now();
    assert!(gateway.wait(SOON).await.success(), "{}", gateway.stderr());
    while let Some(end) = ends.join_next().await {
        let end = end.unwrap();
        assert_eq!(end.words().0, "drain");
        // The door is there as long as anybody is: the rest is for a reader that was late to look.
        let early = end.at.saturating_duration_since(found_nobody);
        let most = Duration::from_millis(500) + lag.longest();
        assert!(early < most, "somebody left {early:?} after the listener was closed; the test was late by {most:?}");
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
    for window in ["auto", "20s"] {
        for n in [0, 1, 3] {
            let graced = options().env("GATEWAY_DRAIN_GRACE", "1s").env("GATEWAY_DRAIN_WINDOW", window);
            let mut gateway = GatewayProcess::start(graced).await;
            let mut ends = crowd(&gateway, n).await;
            let signalled = Instant::now();
            gateway.signal(Signal::Term);
            while let Some(end) = ends.join_next().await {
                assert_eq!(end.unwrap().words(), ("drain", 1001, "after"));
            }
            assert!(gateway.wait(SOON).await.success(), "{}", gateway.stderr());
            let took = signalled.elapsed();
            // By its window alone the last of three would go after thirteen seconds at the earliest.
            let soon = Duration::from_secs(10);
            assert!(took >= Duration::from_secs(1) && took < soon, "{n} connected, window {window}: {took:?}");
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_window_that_does_not_fit_before_the_deadline_is_said_and_the_deadline_is_kept() {
    const N: usize = 60;
    // Half of ten a second is what one other node is thought to take: twelve seconds, and there are five.
    let tight = options()
        .env("GATEWAY_ACCEPT_RATE", "10")
        .env("GATEWAY_DRAIN_GRACE", "0s")
        .env("GATEWAY_CLOSE_TIMEOUT", "1s")
        .env("GATEWAY_DRAIN_DEADLINE", "5s");
    let lag = Lag::watch();
    let mut gateway = GatewayProcess::start(tight).await;
    let ends = crowd(&gateway, N).await;
    let signalled = Instant::now();
    gateway.signal(Signal::Term);
    let ends = ends.join_all().await;
    assert!(gateway.wait(SOON).await.success(), "{}", gateway.stderr());
    let log = gateway.stderr();
    let warned = log.lines().find(|line| line.contains("raise GATEWAY_DRAIN_DEADLINE")).expect("it is said");
    for fact in ["WARN", "window_s=4", "needed_s=12", "deadline_s=14"] {
        assert!(warned.contains(fact), "{fact} in {warned}");
    }
    assert!(ends.iter().all(|end| end.words() == ("drain", 1001, "after")));
    let last = ends.iter().map(|end| end.at - signalled).max().unwrap();
    let deadline = Duration::from_secs(5) + lag.longest();
    assert!(last >= Duration::from_secs(3) && last < deadline, "the last left after {last:?} of {deadline:?}");
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

/// The whole seconds behind this word in a file.
fn seconds_behind(word: &str, text: &str) -> u64 {
    let behind = text.split_once(word).unwrap_or_else(|| panic!("no {word}")).1;
    let value: String = behind.trim_start_matches([' ', ':', '=', '`', '|']).split(['`', '\n']).take(1).collect();
    value.trim_end_matches('s').parse().unwrap_or_else(|_| panic!("{word} is no number of seconds: {value:?}"))
}

/// A process that is killed before its drain is over cuts everybody at once, whatever it had planned.
#[tokio::test]
async fn our_files_for_orchestrators_give_a_drain_half_a_minute_more_than_it_may_take() {
    let table = options().args(&["config", "--markdown"]).run(SOON).await.stdout;
    let deadline = seconds_behind("GATEWAY_DRAIN_DEADLINE", &table);
    assert!(deadline > 30, "{deadline}");
    for (word, file) in [
        ("terminationGracePeriodSeconds", include_str!("../../../deploy/kubernetes.yaml")),
        ("TimeoutStopSec", include_str!("../../../deploy/tidegate.service")),
        ("stop_grace_period", include_str!("../../../deploy/docker-compose.yml")),
    ] {
        assert!(seconds_behind(word, file) >= deadline + 30, "{word} for a deadline of {deadline} s");
    }
}

/// Reads the counter of those who had to be cut until nobody answers any more; gives its last word.
fn watch_forced(gateway: &GatewayProcess) -> JoinHandle<u64> {
    let probes = gateway.probes();
    tokio::spawn(async move {
        let mut last = 0;
        while let Ok(metrics) = http::try_request(probes, "GET", "/metrics", &[], b"").await {
            let line = metrics.text().lines().find_map(|line| line.strip_prefix("gateway_drain_forced_total "));
            last = line.expect("it is always shown").parse().unwrap();
            sleep(Duration::from_millis(20)).await;
        }
        last
    })
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn clients_that_cannot_even_be_told_are_cut_and_counted() {
    const N: usize = 90;
    const N_DEAF: usize = 10;
    let mut gateway = GatewayProcess::start(
        options()
            .env("GATEWAY_DRAIN_GRACE", "0s")
            .env("GATEWAY_DRAIN_WINDOW", "2s")
            .env("GATEWAY_CLOSE_TIMEOUT", "1s")
            .env("GATEWAY_DRAIN_DEADLINE", "60s")
            .env("GATEWAY_OUTBOX_BYTES", "64MiB")
            .env("GATEWAY_WRITE_TIMEOUT", "60s"),
    )
    .await;
    let mut ends = crowd(&gateway, N).await;
    let (mut deaf, mut deaf_streams) = (Vec::new(), Vec::new());
    for i in 0..N_DEAF / 2 {
        let claims = json!({"sub": format!("deaf{i}"), "channels": ["flood"]});
        deaf.push(ws_small(gateway.public(), &claims).await);
        deaf_streams.push(sse_small(gateway.public(), &claims).await);
    }
    // More than the kernels between hold.
    for _ in 0..100 {
        gateway.publish("flood", &json!("x".repeat(60_000))).await;
    }
    let forced = watch_forced(&gateway);
    let signalled = Instant::now();
    gateway.signal(Signal::Term);
    while let Some(end) = ends.join_next().await {
        assert_eq!(end.unwrap().words(), ("drain", 1001, "after"));
    }
    assert!(gateway.wait(SOON).await.success(), "{}", gateway.stderr());
    assert!(signalled.elapsed() < Duration::from_secs(40), "long before the deadline: {:?}", signalled.elapsed());
    let forced = forced.await.unwrap();
    assert!((1..=N_DEAF as u64).contains(&forced), "the counter said {forced} at last");
    let log = gateway.stderr();
    for words in [format!("n_cut={N_DEAF}"), format!("drained sessions={} cut={N_DEAF}", N + N_DEAF)] {
        assert!(log.contains(&words), "{words} in:\n{log}");
    }
    drop((deaf, deaf_streams));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_drain_waits_for_no_redis_that_stands_still_or_is_gone() {
    const N: usize = 40;
    for stands_still in [true, false] {
        let mut redis = RedisServer::plain();
        let mut gateway = GatewayProcess::start(
            options()
                .env("GATEWAY_REDIS_URL", redis.url())
                // So long the node may ask to be forgotten, at its end.
                .env("GATEWAY_REDIS_TIMEOUT", "2s")
                .env("GATEWAY_DRAIN_GRACE", "500ms")
                .env("GATEWAY_DRAIN_WINDOW", "1s"),
        )
        .await;
        let ends = crowd(&gateway, N).await;
        if stands_still {
            redis.pause();
        } else {
            redis.kill9();
        }
        let signalled = Instant::now();
        gateway.signal(Signal::Term);
        gateway.until_status("/readyz", 503).await;
        for end in ends.join_all().await {
            assert_eq!(end.words(), ("drain", 1001, "after"));
            assert!(end.at >= signalled + Duration::from_millis(500), "{:?}", end.at - signalled);
        }
        assert!(gateway.wait(SOON).await.success(), "{}", gateway.stderr());
        assert!(signalled.elapsed() < Duration::from_millis(1_500) + SOON, "{:?}", signalled.elapsed());
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
