//! What stops the process: signals at every moment of its life, the admin API, and both. A first
//! one drains, a second signal ends at once, and neither waits for anything that may not come: a
//! start, a Redis, a session that cannot be opened.

use std::net::TcpListener;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use testkit::gateway::{GatewayOptions, GatewayProcess, JWT_SECRET, Signal};
use testkit::http;
use testkit::redis::RedisServer;
use tokio::time::{Instant, sleep};

use crate::{SOON, TIDEGATE, claims, options, ws, ws_end, ws_unread};

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
    // Another one than the first: of two that are the same the kernel may make one.
    gateway.signal(Signal::Int);
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
    fn start(settings: &[(&str, &str)]) -> Self {
        let mut command = Command::new(TIDEGATE);
        command.arg("serve").env_clear().stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        for listener in ["GATEWAY_LISTEN", "GATEWAY_ADMIN_LISTEN", "GATEWAY_PROBE_LISTEN"] {
            command.env(listener, "127.0.0.1:0");
        }
        command.envs(settings.iter().copied());
        Self(command.spawn().unwrap())
    }

    /// A command may take long, a dial four times as long: whoever waits for either does not end in time.
    fn with_redis(url: &str) -> Self {
        Self::start(&[
            ("GATEWAY_JWT_SECRET", JWT_SECRET),
            ("GATEWAY_REDIS_URL", url),
            ("GATEWAY_REDIS_TIMEOUT", "30s"),
            ("GATEWAY_AUTH_TIMEOUT", "60s"),
        ])
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

/// Nobody is connected yet, so there is nothing to wait for; and a busy machine is given its time.
const AT_ONCE: Duration = Duration::from_secs(10);

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
            let mut early = Early::with_redis(&format!("redis://{redis}"));
            early.until_it_listens().await;
            sleep(after).await;
            early.ends_within(AT_ONCE).await;
        }
    }
    // It waits for its token keys.
    let keys = format!("http://{}/keys", tarpit.local_addr().unwrap());
    let mut early = Early::start(&[("GATEWAY_JWT_JWKS_URL", &keys)]);
    early.until_it_listens().await;
    sleep(Duration::from_millis(200)).await;
    early.ends_within(AT_ONCE).await;
}

/// Waits until Redis has been asked for its libraries some times: a node waits for its turn to load them.
async fn until_it_waits_for_the_schema(redis: &RedisServer) {
    let until = Instant::now() + SOON;
    loop {
        let stats = redis.cli(&["INFO", "commandstats"]);
        let calls = stats.lines().find_map(|line| line.strip_prefix("cmdstat_fcall:calls=")?.split_once(','));
        if calls.is_some_and(|(n, _)| n.parse::<u32>().unwrap() >= 3) {
            return;
        }
        assert!(Instant::now() < until, "nobody migrates:\n{stats}");
        sleep(Duration::from_millis(5)).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_signal_during_the_migration_is_obeyed_at_once_and_leaves_no_trace_in_the_fleet() {
    for stands_still in [false, true] {
        let redis = RedisServer::plain();
        // Another node loads the libraries, it says, and never does.
        redis.cli(&["SET", "tidegate:lock:schema", "another"]);
        let mut early = Early::with_redis(&redis.url());
        until_it_waits_for_the_schema(&redis).await;
        if stands_still {
            redis.pause();
        }
        early.ends_within(AT_ONCE).await;
        redis.resume();
        assert_eq!(redis.cli(&["KEYS", "tidegate:fleet*"]), "");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_node_that_ended_is_in_the_fleet_no_longer() {
    let redis = RedisServer::plain();
    let options = options().env("GATEWAY_REDIS_URL", redis.url()).env("GATEWAY_DRAIN_GRACE", "0s");
    let mut gateway = GatewayProcess::start(options).await;
    gateway.until_metric("gateway_fleet_nodes", 1.0).await;
    let until = Instant::now() + SOON;
    while redis.cli(&["KEYS", "tidegate:fleet:n:*"]).is_empty() {
        assert!(Instant::now() < until, "it never reported");
        sleep(Duration::from_millis(20)).await;
    }
    gateway.signal(Signal::Term);
    assert!(gateway.wait(SOON).await.success(), "{}", gateway.stderr());
    assert_eq!(redis.cli(&["KEYS", "tidegate:fleet*"]), "");
}

/// The gateway is process 1 of a PID namespace, as in a container.
fn as_first_process() -> GatewayOptions {
    GatewayOptions::new(TIDEGATE).unshared(&["--pid", "--fork", "--kill-child", "--mount-proc"], "true")
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
    let options = as_first_process();
    for (first, second) in [("TERM", "TERM"), ("INT", "TERM")] {
        let mut gateway = GatewayProcess::start(options.clone().env("GATEWAY_DRAIN_GRACE", "30s")).await;
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

#[tokio::test]
async fn as_the_first_process_of_a_container_it_drains_and_says_so_by_its_exit_code() {
    let options = as_first_process();
    let mut gateway = GatewayProcess::start(options.env("GATEWAY_DRAIN_GRACE", "0s")).await;
    let client = ws(&gateway, &claims("u")).await;
    signal_inside(&gateway, "TERM");
    assert_eq!(ws_end(client).await.words(), ("drain", 1001, "after"));
    assert!(gateway.wait(SOON).await.success(), "{}", gateway.stderr());
}
