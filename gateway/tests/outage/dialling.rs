//! On the way to a connection that stands: a server that accepts and says nothing, one that is not
//! even reached, one that is full, a name that means nothing for a while and then something else.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use serde_json::json;
use testkit::gateway::{GatewayOptions, GatewayProcess, Signal, token};
use testkit::http::{self, Wire};
use testkit::lag::Lag;
use testkit::redis::{RedisOptions, RedisServer};
use testkit::ws::WsClient;
use tokio::net::{TcpListener, TcpSocket, TcpStream};
use tokio::task::{JoinSet, block_in_place};
use tokio::time::{Instant, timeout};

use super::{options, until_data, ws};

const SOON: Duration = Duration::from_secs(60);

/// In front of a server: takes every connection, and serves those that come while it speaks.
struct Tarpit {
    addr: SocketAddr,
    speaks: Arc<AtomicBool>,
    n_dialled: Arc<AtomicUsize>,
    task: tokio::task::JoinHandle<()>,
}

impl Tarpit {
    async fn before(server: SocketAddr) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        let addr = listener.local_addr().expect("it is bound");
        let (speaks, n_dialled) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicUsize::new(0)));
        let (now, n) = (speaks.clone(), n_dialled.clone());
        let task = tokio::spawn(async move {
            let mut connections = JoinSet::new();
            while let Ok((mut client, _)) = listener.accept().await {
                n.fetch_add(1, Ordering::SeqCst);
                let is_served = now.load(Ordering::SeqCst);
                connections.spawn(async move {
                    if !is_served {
                        // Kept open; what comes is not even read.
                        std::future::pending::<()>().await;
                    }
                    let Ok(mut server) = TcpStream::connect(server).await else { return };
                    let _ = tokio::io::copy_bidirectional(&mut client, &mut server).await;
                });
            }
        });
        Self { addr, speaks, n_dialled, task }
    }

    fn url(&self) -> String {
        format!("redis://{}", self.addr)
    }

    fn speak(&self, speaks: bool) {
        self.speaks.store(speaks, Ordering::SeqCst);
    }

    /// Waits until so many further connections were made.
    async fn until_dialled(&self, n: usize) {
        let goal = self.n_dialled.load(Ordering::SeqCst) + n;
        let until = Instant::now() + SOON;
        while self.n_dialled.load(Ordering::SeqCst) < goal {
            assert!(Instant::now() < until, "{} of {goal} dials", self.n_dialled.load(Ordering::SeqCst));
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }
}

impl Drop for Tarpit {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// As `ws`, for the time after an outage: the connection on which it is asked whether a token was
/// revoked comes back by itself, before or after the one that readiness looks at.
async fn ws_once_it_can(gateway: &GatewayProcess, channels: &[&str]) -> WsClient {
    let bearer = format!("Bearer {}", token(&json!({"sub": "u", "channels": channels, "subscribe": ["*"]})));
    let until = Instant::now() + SOON;
    loop {
        match WsClient::connect(gateway.public(), "/v1/ws", &[("Authorization", &bearer)]).await {
            Ok(client) => return client,
            Err(refused) => {
                assert_eq!((refused.status(), &refused.json()["code"]), (503, &json!("auth_unavailable")));
                assert!(Instant::now() < until, "{}", gateway.stderr());
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        }
    }
}

async fn assert_alive_and_unready(gateway: &GatewayProcess) {
    assert_eq!(http::get(gateway.probes(), "/livez").await.status(), 200);
    let ready = http::get(gateway.probes(), "/readyz").await;
    assert_eq!(ready.status(), 503, "{}", ready.text());
    assert_eq!(http::get(gateway.probes(), "/metrics").await.status(), 200);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_that_accepts_and_says_nothing_is_dialled_until_it_speaks_at_start_and_later() {
    let redis = RedisServer::plain();
    let tarpit = Tarpit::before(redis.addr()).await;
    // What asks ends by its time, however long it is dialled.
    const AUTH_TIMEOUT: Duration = Duration::from_secs(2);
    let quick = options(&tarpit.url()).env("GATEWAY_READY_REDIS_GRACE", "1s").env("GATEWAY_AUTH_TIMEOUT", "2s");
    let gateway = GatewayProcess::start_unready(quick).await;
    // No dial is waited for longer than its time-out, or there were only the first ones.
    tarpit.until_dialled(4).await;
    assert_alive_and_unready(&gateway).await;
    assert_eq!(http::get(gateway.probes(), "/startupz").await.status(), 503);
    tarpit.speak(true);
    gateway.until_status("/readyz", 200).await;
    let mut client = ws_once_it_can(&gateway, &["news"]).await;
    client.until("ready").await;

    // The same to a node that serves: what stood is cut, what is dialled from now on says nothing.
    tarpit.speak(false);
    let (lag, muted) = (Lag::watch(), Instant::now());
    redis.cli(&["CLIENT", "KILL", "TYPE", "normal"]);
    redis.kill_pubsub_links();
    let bearer = format!("Bearer {}", token(&json!({"sub": "new"})));
    let refused = WsClient::connect(gateway.public(), "/v1/ws", &[("Authorization", &bearer)]).await;
    assert_eq!(refused.err().expect("nobody can say whether the token was revoked").status(), 503);
    client.send_json(&json!({"type": "subscribe", "ref": 1, "channel": "late"})).await;
    let answer = client.json().await;
    assert_eq!((&answer["ref"], &answer["code"]), (&json!(1), &json!("unavailable")), "{answer}");
    assert!(muted.elapsed() < 4 * AUTH_TIMEOUT + 2 * lag.longest(), "{:?}", muted.elapsed());
    tarpit.until_dialled(4).await;
    gateway.until_status("/readyz", 503).await;
    assert_alive_and_unready(&gateway).await;
    tarpit.speak(true);
    gateway.until_status("/readyz", 200).await;
    gateway.publish_once_it_can("news", &json!("again")).await;
    until_data(&mut client, "again").await;
}

/// A listener whose queue is full: a further SYN is dropped, so that a connect gets no answer at all.
async fn unreachable() -> (TcpListener, Vec<TcpStream>) {
    let socket = TcpSocket::new_v4().expect("a socket");
    socket.bind("127.0.0.1:0".parse().expect("an address")).expect("a free port");
    let listener = socket.listen(1).expect("it listens");
    let addr = listener.local_addr().expect("it is bound");
    let mut queued = Vec::new();
    while let Ok(connected) = timeout(Duration::from_secs(1), TcpStream::connect(addr)).await {
        queued.push(connected.expect("it is queued"));
        assert!(queued.len() < 100, "the queue has no end");
    }
    (listener, queued)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_that_is_not_even_reached_holds_up_no_probe_and_no_end() {
    let (listener, _queued) = unreachable().await;
    let url = format!("redis://{}", listener.local_addr().expect("it is bound"));
    let mut gateway = GatewayProcess::start_unready(options(&url)).await;
    assert_alive_and_unready(&gateway).await;
    // The dial's own time-out, several times over: it is still trying, and says why.
    let until = Instant::now() + SOON;
    while !gateway.stderr().contains("trying again") {
        assert!(Instant::now() < until, "{}", gateway.stderr());
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    assert_alive_and_unready(&gateway).await;
    gateway.signal(Signal::Term);
    assert!(gateway.wait(SOON).await.success(), "{}", gateway.stderr());
}

/// One connection to Redis that stays, for commands when no other is let in.
struct Foot(Wire<TcpStream>);

impl Foot {
    async fn in_the_door(redis: &RedisServer) -> Self {
        Self(Wire::new(TcpStream::connect(redis.addr()).await.expect("Redis listens")))
    }

    /// The reply's first line.
    async fn call(&mut self, words: &[&str]) -> String {
        let mut command = format!("*{}\r\n", words.len());
        words.iter().for_each(|word| command.push_str(&format!("${}\r\n{word}\r\n", word.len())));
        self.0.send(command.as_bytes()).await.expect("Redis reads");
        let mut line = Vec::new();
        while !line.ends_with(b"\r\n") {
            line.extend(timeout(SOON, self.0.exactly(1)).await.expect("in time").expect("a reply"));
        }
        String::from_utf8(line).expect("text").trim_end().to_owned()
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_that_lets_nobody_in_gets_no_false_success_and_is_joined_when_it_does() {
    let redis = RedisServer::plain();
    let quick = options(&redis.url()).env("GATEWAY_AUTH_TIMEOUT", "2s").env("GATEWAY_READY_REDIS_GRACE", "1s");
    let gateway = GatewayProcess::start(quick.env("GATEWAY_REDIS_TIMEOUT", "1s")).await;
    let mut client = ws(&gateway, &["news"]).await;
    client.until("ready").await;
    let mut foot = Foot::in_the_door(&redis).await;
    assert_eq!(foot.call(&["CONFIG", "SET", "maxclients", "1"]).await, "+OK");
    assert_eq!(foot.call(&["CLIENT", "KILL", "TYPE", "pubsub"]).await, ":1");
    for round in 0..3 {
        let channel = format!("room-{round}");
        client.send_json(&json!({"type": "subscribe", "ref": round, "channel": channel})).await;
        let answer = client.json().await;
        let told = (&answer["type"], &answer["ref"], &answer["code"], &answer["retry"]);
        assert_eq!(told, (&json!("error"), &json!(round), &json!("unavailable"), &json!(true)), "{answer}");
    }
    gateway.until_status("/readyz", 503).await;
    // Published by somebody whose connection stands.
    let missed = foot.call(&["FCALL", "tidegate_publish", "1", "tidegate:log", "news", "\"missed\""]).await;
    assert!(missed.starts_with('$'), "{missed}");
    let id = foot.0.exactly(missed[1..].parse::<usize>().expect("a length") + 2).await.expect("the id");
    assert!(!id.is_empty());
    assert_eq!(foot.call(&["CONFIG", "SET", "maxclients", "10000"]).await, "+OK");
    until_data(&mut client, "missed").await;
    gateway.until_status("/readyz", 200).await;
    // What reads the log has a connection of its own, which comes back by itself.
    let until = Instant::now() + SOON;
    let answer = loop {
        client.send_json(&json!({"type": "subscribe", "ref": "now", "channel": "room-0"})).await;
        let answer = client.json().await;
        if answer["type"] == "ok" {
            break answer;
        }
        assert_eq!((&answer["code"], &answer["retry"]), (&json!("unavailable"), &json!(true)), "{answer}");
        assert!(Instant::now() < until, "{answer}");
    };
    assert_eq!((&answer["ref"], &answer["channel"]), (&json!("now"), &json!("room-0")));
    gateway.publish_once_it_can("room-0", &json!("heard")).await;
    until_data(&mut client, "heard").await;
}

/// A gateway that resolves names by files of the test's own: a mount namespace in which they lie
/// over the system's.
struct Names {
    hosts: PathBuf,
    resolver: PathBuf,
}

impl Names {
    fn at(dir: &Path) -> Self {
        let names = Self { hosts: dir.join("hosts"), resolver: dir.join("resolv.conf") };
        names.mean("");
        // No name server: what the file does not know, nobody does.
        std::fs::write(&names.resolver, "options timeout:1 attempts:1\n").expect("a directory of ours");
        names
    }

    /// What the file says from now on, written over what is mounted.
    fn mean(&self, lines: &str) {
        std::fs::write(&self.hosts, lines).expect("a directory of ours");
    }

    /// A gateway for which these are the names there are.
    fn options(&self) -> GatewayOptions {
        let [hosts, resolver] = [&self.hosts, &self.resolver].map(|path| path.display());
        let mounts = format!("mount --bind {hosts} /etc/hosts && mount --bind {resolver} /etc/resolv.conf");
        GatewayOptions::new(env!("CARGO_BIN_EXE_tidegate")).unshared(&["--mount"], &mounts)
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_name_that_means_nothing_for_a_while_and_then_something_else_is_followed() {
    let extra = ["--bind", "127.0.0.1", "127.0.0.2"].map(str::to_owned).to_vec();
    let redis = RedisServer::start(RedisOptions { extra, ..RedisOptions::default() });
    let names = Names::at(redis.dir());
    // At the start the name is not known yet.
    let url = format!("redis://redis.test:{}", redis.port());
    let gateway = GatewayProcess::start_unready(
        names.options().env("GATEWAY_REDIS_URL", url).env("GATEWAY_READY_REDIS_GRACE", "1s").env("GATEWAY_LOG", "info"),
    )
    .await;
    assert_alive_and_unready(&gateway).await;
    names.mean("127.0.0.1 redis.test\n");
    gateway.until_status("/readyz", 200).await;
    let mut client = ws_once_it_can(&gateway, &["news"]).await;
    client.until("ready").await;

    names.mean("# gone\n");
    redis.cli(&["CLIENT", "KILL", "TYPE", "normal"]);
    redis.kill_pubsub_links();
    gateway.until_status("/readyz", 503).await;
    assert_alive_and_unready(&gateway).await;
    client.send_json(&json!({"type": "ping"})).await;
    client.until("pong").await;

    // It moved; and one of its addresses is dead.
    names.mean("::1 redis.test\n127.0.0.2 redis.test\n");
    gateway.until_status("/readyz", 200).await;
    let links = block_in_place(|| redis.cli(&["CLIENT", "LIST", "TYPE", "pubsub"]));
    assert!(links.contains(&format!("laddr=127.0.0.2:{}", redis.port())), "{links}");
    gateway.publish_once_it_can("news", &json!("again")).await;
    until_data(&mut client, "again").await;
}
