//! When a node counts as full, late or dead.

use std::sync::Mutex;
use std::sync::mpsc as blocking;
use std::time::Duration;

use serde_json::{Value, json};
use testkit::gateway::{GatewayProcess, JWT_SECRET, Signal};
use testkit::http;
use testkit::ws::WsClient;
use tidegate::config::{Config, Purpose};
use tidegate::plugin::{Inbound, Plugin, Plugins, Received, SessionInfo};
use tidegate::run::{Addresses, Stop, Surroundings, run};
use tokio::runtime::Runtime;
use tokio::sync::{mpsc, oneshot};
use tokio::time::{Instant, sleep};

use super::{LOOK, SOON, bearer, usual_token, with, ws};

async fn readiness(gateway: &GatewayProcess) -> Value {
    http::get(gateway.probes(), "/readyz").await.json()
}

/// For some ten looks of the node at itself it says the same.
async fn stays(gateway: &GatewayProcess, n_sessions: usize, is_ready: bool) {
    gateway.until_metric("gateway_sessions_open{transport=\"ws\"}", n_sessions as f64).await;
    let until = Instant::now() + Duration::from_secs(1);
    while Instant::now() < until {
        let said = readiness(gateway).await;
        assert_eq!((&said["ready"], &said["sessions"]), (&json!(is_ready), &json!(n_sessions)), "{said}");
        sleep(LOOK).await;
    }
}

async fn is_full(gateway: &GatewayProcess) {
    gateway.until_status("/readyz", 503).await;
    assert_eq!(readiness(gateway).await["reasons"], json!(["at_capacity"]));
}

#[tokio::test]
async fn a_node_is_full_from_the_part_that_is_set_and_ready_again_a_twentieth_below() {
    let of_twenty = |part: &str| with(&[("GATEWAY_MAX_SESSIONS", "20"), ("GATEWAY_READY_HEADROOM", part)]);
    let (half, none, tiny) = tokio::join!(
        GatewayProcess::start(of_twenty("0.5")),
        GatewayProcess::start(of_twenty("1")),
        GatewayProcess::start(of_twenty("0.04"))
    );
    let at_half = async {
        let mut held = Vec::new();
        for _ in 0..9 {
            held.push(ws(&half).await);
        }
        stays(&half, 9, true).await;
        held.push(ws(&half).await);
        is_full(&half).await;
        // 45 % is not yet below it.
        held.pop();
        stays(&half, 9, false).await;
        held.pop();
        half.until_status("/readyz", 200).await;
    };
    let at_all = async {
        let mut held = Vec::new();
        for _ in 0..19 {
            held.push(ws(&none).await);
        }
        stays(&none, 19, true).await;
        held.push(ws(&none).await);
        is_full(&none).await;
        held.truncate(18);
        none.until_status("/readyz", 200).await;
    };
    // A twentieth below is less than nobody: empty is ready.
    let at_one = async {
        let one = ws(&tiny).await;
        is_full(&tiny).await;
        drop(one);
        tiny.until_status("/readyz", 200).await;
    };
    tokio::join!(at_half, at_all, at_one);
}

/// Three windows of ten seconds have to be late, so whoever sees it waits for half a minute.
#[tokio::test]
async fn a_node_is_saturated_by_the_lag_that_is_set() {
    const STALL: Duration = Duration::from_millis(150);
    let lag = |lag: &str| with(&[("GATEWAY_READY_LAG", lag)]);
    let (strict, lenient) = tokio::join!(GatewayProcess::start(lag("20ms")), GatewayProcess::start(lag("20s")));
    let until = Instant::now() + SOON * 2;
    // Both stand still now and then, for longer than from one heartbeat to the next but never for long.
    while readiness(&strict).await["ready"] == true {
        assert!(Instant::now() < until, "{}", readiness(&strict).await);
        for (signal, then) in [(Signal::Stop, STALL), (Signal::Cont, 3 * STALL)] {
            strict.signal(signal);
            lenient.signal(signal);
            sleep(then).await;
        }
    }
    let said = readiness(&strict).await;
    assert_eq!(said["reasons"], json!(["saturated"]), "{said}");
    let said = readiness(&lenient).await;
    assert_eq!((&said["ready"], &said["reasons"]), (&json!(true), &json!([])), "{said}");
    assert!(said["lag_p99_ms"].as_u64().is_some_and(|ms| ms > 20), "it was as late: {said}");
    // It serves on: unready is a word for those in front.
    ws(&strict).await;
}

/// Holds the thread that asks it, until it is let go.
struct StandsStill {
    begun: mpsc::Sender<()>,
    let_go: Mutex<blocking::Receiver<()>>,
}

impl Plugin for StandsStill {
    fn name(&self) -> &'static str {
        "stands still"
    }

    fn received(&self, _from: &SessionInfo, _message: &Inbound) -> Received {
        self.begun.try_send(()).expect("it is asked once");
        // Let go by a dropped sender.
        let _ = self.let_go.lock().unwrap().recv();
        Received::Handled
    }
}

/// A gateway whose main runtime has one thread, and a client that has made it stand still.
struct Still {
    at: Addresses,
    _client: WsClient,
    // Before the runtime: its thread has to come back to end.
    let_go: Option<blocking::Sender<()>>,
    _stop: mpsc::Sender<Stop>,
    runtime: Option<Runtime>,
}

impl Still {
    async fn start(variables: &[(&str, &str)]) -> Self {
        let listeners = ["GATEWAY_LISTEN", "GATEWAY_ADMIN_LISTEN", "GATEWAY_PROBE_LISTEN"];
        let environment = listeners.map(|name| (name, "127.0.0.1:0")).into_iter();
        let environment = environment.chain([("GATEWAY_JWT_SECRET", JWT_SECRET), ("GATEWAY_WORKERS", "1")]);
        let environment = environment.chain(variables.iter().copied());
        let environment = environment.map(|(name, value)| (name.to_owned(), value.to_owned())).collect();
        let config = Config::from_environment(&environment, Purpose::Serve).unwrap();

        let (begun, mut is_still) = mpsc::channel(1);
        let (let_go, held) = blocking::channel();
        let plugins = Plugins::new().with(StandsStill { begun, let_go: Mutex::new(held) });
        let (stop, stops) = mpsc::channel(1);
        let (tell, told) = oneshot::channel();
        let listening = Box::new(move |at: &Addresses| tell.send(*at).expect("the test waits for it"));
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
        runtime.spawn(run(config, plugins, Surroundings { stops, listening, console_token: None }));
        let at = told.await.expect("it listens");
        until(&at, "/readyz", |status, _| status == 200).await;

        let auth = bearer(&usual_token());
        let mut client = WsClient::connect(at.public, "/v1/ws", &[("Authorization", &auth)]).await.expect("let in");
        client.until("ready").await;
        client.send_json(&json!({"type": "stand still"})).await;
        is_still.recv().await.expect("it was asked");
        Self { at, _client: client, let_go: Some(let_go), _stop: stop, runtime: Some(runtime) }
    }
}

impl Drop for Still {
    fn drop(&mut self) {
        self.let_go = None;
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}

/// Asks until it is answered so; status and body.
async fn until(at: &Addresses, path: &str, is_so: impl Fn(u16, &str) -> bool) -> (u16, String) {
    let until = Instant::now() + SOON;
    loop {
        let answer = http::get(at.probes, path).await;
        if is_so(answer.status(), answer.text()) {
            return (answer.status(), answer.text().to_owned());
        }
        assert!(Instant::now() < until, "{path}: {} {}", answer.status(), answer.text());
        sleep(LOOK).await;
    }
}

/// `tick_age_ms`, the first line of `/livez`.
fn age_ms(body: &str) -> u64 {
    let age = body.lines().next().and_then(|line| line.strip_prefix("tick_age_ms=")?.parse().ok());
    age.unwrap_or_else(|| panic!("{body}"))
}

#[tokio::test]
async fn a_node_that_stands_still_is_dead_after_the_time_that_is_set_and_alive_when_it_moves() {
    const STALE_MS: u64 = 500;
    let patient = Still::start(&[]).await;
    let mut strict = Still::start(&[("GATEWAY_LIVE_STALE", "500ms")]).await;
    // Sooner it may be called dead for want of a turn, on a busy machine; for this at the latest.
    until(&strict.at, "/livez", |status, body| status == 503 && age_ms(body) >= STALE_MS).await;
    // The other has stood still for longer, and that is no reason by default.
    let (status, body) = until(&patient.at, "/livez", |_, body| age_ms(body) >= STALE_MS).await;
    assert_eq!(status, 200, "{body}");
    // With one thread it is that thread, and it is named.
    let (status, body) = until(&strict.at, "/livez", |_, body| body.contains("main_worker_0_still_ms=")).await;
    assert_eq!(status, 503, "{body}");
    strict.let_go = None;
    until(&strict.at, "/livez", |status, _| status == 200).await;
}
