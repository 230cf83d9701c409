//! Peers that vanish without a word (their kernel neither acknowledges nor resets), peers that only
//! keep silent, and the proxies between that take silence for an end.

use std::io;
use std::net::{Ipv4Addr, SocketAddr};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use serde_json::{Value, json};
use socket2::{SockFilter, SockRef};
use testkit::gateway::{GatewayOptions, GatewayProcess, token};
use testkit::lag::Lag;
use testkit::redis::RedisServer;
use testkit::sse::{self, SseClient};
use testkit::ws::{Answer, Frame, Heard, WsClient, opcode};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinSet;
use tokio::time::{Instant, interval, timeout};

use super::{bearer, closed, hearing, n_open, n_sockets, on_redis, options, sse, until, until_open, ws};

/// The instruction "take nothing of the packet" (`BPF_RET | BPF_K`).
const TAKE_NOTHING: SockFilter = SockFilter::new(0x06, 0, 0, 0);

/// Pulls the plug: whatever comes for this socket is lost before its kernel sees it, so the other
/// side gets no acknowledgement, no end and no reset, as long as the socket is kept.
fn unplug(socket: SockRef<'_>) {
    socket.attach_filter(&[TAKE_NOTHING]).expect("a filter may be attached to one's own socket");
}

fn beating(options: GatewayOptions) -> GatewayOptions {
    // Whoever is there has time to say so, also on a busy machine.
    options.env("GATEWAY_HEARTBEAT", "1s").env("GATEWAY_HEARTBEAT_TIMEOUT", "3s")
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_peer_that_vanished_is_found_out_by_its_silence_whether_or_not_it_is_written_to() {
    let gateway = GatewayProcess::start(beating(options())).await;
    let mut gone = Vec::new();
    for channel in ["quiet", "busy"] {
        for _ in 0..5 {
            gone.push(ws(gateway.public(), &hearing(&[channel])).await);
        }
    }
    let mut there = ws(gateway.public(), &hearing(&["busy"])).await;
    gone.iter().for_each(|client| unplug(client.socket().into()));
    let (lag, unplugged) = (Lag::watch(), Instant::now());
    let publishing = async {
        let mut every = interval(Duration::from_millis(100));
        loop {
            every.tick().await;
            gateway.publish("busy", &json!("said to nobody")).await;
        }
    };
    let listening = async {
        loop {
            // Answers pings, too.
            there.json().await;
        }
    };
    let unresponsive = closed("unresponsive");
    let found_out = gateway.until_metric(&unresponsive, gone.len() as f64);
    tokio::select! {
        () = publishing => unreachable!("it never ends"),
        () = listening => unreachable!("it never ends"),
        () = found_out => {}
    }
    // Interval and timeout are four seconds; the rest is for a busy machine.
    assert!(unplugged.elapsed() < Duration::from_secs(8) + lag.longest(), "{:?}", unplugged.elapsed());
    until_open(&gateway, 1).await;
    until("their sockets are free", async || n_sockets(&gateway) == 1).await;
    there.send_json(&json!({"type": "ping"})).await;
    while there.json().await["type"] != "pong" {}
    drop(gone);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn streams_of_a_silent_channel_end_with_their_clients_killed_or_vanished() {
    const EACH: usize = 20;
    let redis = RedisServer::plain();
    let options = beating(on_redis(&redis.url())).env("GATEWAY_WRITE_TIMEOUT", "1s");
    let gateway = GatewayProcess::start(options).await;
    let (mut killed, mut vanished) = (Vec::new(), Vec::new());
    for _ in 0..EACH {
        killed.push(stream_with_handle(gateway.public()).await);
        vanished.push(stream_with_handle(gateway.public()).await);
    }
    let numsub = || redis.cli(&["PUBSUB", "NUMSUB", "tidegate:live:silent"]);
    assert!(numsub().ends_with("\n1"), "{}", numsub());
    vanished.iter().for_each(|(_, handle)| unplug(handle.into()));
    let (lag, unplugged) = (Lag::watch(), Instant::now());
    // As the kernel does for a program that is killed with something unread: a reset.
    for (_, handle) in &killed {
        SockRef::from(handle).set_linger(Some(Duration::ZERO)).expect("an option");
    }
    drop(killed);
    until("those that were killed are gone", async || n_open(&gateway).await <= EACH as f64).await;
    // Long before a beat would have found that they do not answer.
    assert!(unplugged.elapsed() < Duration::from_secs(3) + lag.longest(), "{:?}", unplugged.elapsed());
    // A beat within a second finds nobody: no acknowledgement for the four seconds that the
    // heartbeat's and a write's timeouts make together.
    until_open(&gateway, 0).await;
    let took = unplugged.elapsed();
    assert!(took < Duration::from_secs(12) + lag.longest(), "{took:?}");
    gateway.until_metric(&closed("lost"), (2 * EACH) as f64).await;
    until("their sockets are free", async || n_sockets(&gateway) == 0).await;
    until("nobody subscribes to it", async || numsub().ends_with("\n0")).await;
    drop(vanished);
}

/// A stream of the silent channel, ready, and a second handle on its socket.
async fn stream_with_handle(gateway: SocketAddr) -> (SseClient, std::net::TcpStream) {
    let socket = TcpStream::connect(gateway).await.and_then(TcpStream::into_std).expect("it listens");
    let handle = socket.try_clone().expect("a second handle");
    let socket = TcpStream::from_std(socket).expect("it does not block");
    let auth = bearer(&hearing(&["silent"]));
    let opened = SseClient::over(socket, "x", "/v1/sse", &[("Authorization", &auth)]).await;
    let mut stream = opened.unwrap_or_else(|refused| panic!("{}", refused.text()));
    stream.until("ready").await;
    (stream, handle)
}

/// A program of its own that hears the silent channel.
fn program(gateway: &GatewayProcess, transport: &str) -> Child {
    let url = format!("http://{}", gateway.public());
    let token = token(&hearing(&["silent"]));
    let mut command = Command::new(env!("CARGO_BIN_EXE_tidegate"));
    command.args(["tail", "--url", &url, "--token", &token, "--transport", transport]).env_clear();
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).spawn().expect("it runs")
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn who_listens_to_a_silent_channel_and_dies_is_gone_though_nothing_is_ever_written_to_it() {
    const PROGRAMS: usize = 3;
    const SOCKETS: usize = 60;
    let redis = RedisServer::plain();
    // No beat finds it out: there is none while this test lasts.
    let gateway = GatewayProcess::start(on_redis(&redis.url()).env("GATEWAY_HEARTBEAT", "10m")).await;
    let mut programs: Vec<Child> = (0..2 * PROGRAMS).map(|i| program(&gateway, ["sse", "ws"][i % 2])).collect();
    until_open(&gateway, 2 * PROGRAMS).await;
    let mut streams = Vec::new();
    for _ in 0..SOCKETS {
        streams.push(sse(gateway.public(), &hearing(&["silent"])).await);
    }
    let numsub = || redis.cli(&["PUBSUB", "NUMSUB", "tidegate:live:silent"]);
    assert!(numsub().ends_with("\n1"), "{}", numsub());
    programs.iter_mut().for_each(|program| program.kill().expect("it runs"));
    programs.iter_mut().for_each(|program| assert!(!program.wait().expect("it was killed").success()));
    drop(streams);
    until_open(&gateway, 0).await;
    until("their sockets are free", async || n_sockets(&gateway) == 0).await;
    gateway.until_metric(&closed("lost"), (2 * PROGRAMS + SOCKETS) as f64).await;
    until("nobody subscribes to it", async || numsub().ends_with("\n0")).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn who_never_asks_for_anything_is_judged_by_its_silence_like_anybody() {
    const N: usize = 40;
    let gateway = GatewayProcess::start(beating(options())).await;
    // Neither a channel of the token nor one asked for; half of them do not even read.
    let (mut ignoring, mut unread) = (JoinSet::new(), Vec::new());
    let opened = Instant::now();
    for i in 0..N {
        let mut client = ws(gateway.public(), &json!({"sub": format!("u{i}")})).await;
        client.answer_pings(Answer::Never);
        if i % 2 == 0 {
            ignoring.spawn(async move { client.until_closed().await });
        } else {
            unread.push(client);
        }
    }
    let mut polite = ws(gateway.public(), &json!({"sub": "polite"})).await;
    let answering = async {
        loop {
            polite.next().await;
        }
    };
    let gone = async {
        gateway.until_metric(&closed("unresponsive"), N as f64).await;
        ignoring.join_all().await
    };
    let ends = tokio::select! {
        () = answering => unreachable!("it never ends"),
        ends = gone => ends,
    };
    assert!(ends.iter().all(|(messages, code)| messages.is_empty() && *code == 1006), "cut without a word: {ends:?}");
    assert!(opened.elapsed() < Duration::from_secs(20), "{:?}", opened.elapsed());
    assert_eq!(n_open(&gateway).await, 1.0);
    drop(unread);
}

/// A proxy that ends a connection on which the server has been silent for so long, as most do.
async fn impatient(target: SocketAddr, patience: Duration) -> SocketAddr {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.expect("a free port");
    let at = listener.local_addr().expect("it is bound");
    tokio::spawn(async move {
        let mut connections = JoinSet::new();
        while let Ok((client, _)) = listener.accept().await {
            connections.spawn(async move {
                let Ok(server) = TcpStream::connect(target).await else { return };
                let ((from_client, to_client), (from_server, to_server)) = (client.into_split(), server.into_split());
                // What the client says is passed on whatever it is; it keeps no connection alive.
                let up = carry(from_client, to_server, Duration::MAX);
                let down = carry(from_server, to_client, patience);
                tokio::select! {
                    _ = up => {}
                    _ = down => {}
                }
            });
        }
    });
    at
}

async fn carry(
    mut from: impl AsyncRead + Unpin,
    mut to: impl AsyncWrite + Unpin,
    patience: Duration,
) -> io::Result<()> {
    let mut piece = [0; 4096];
    loop {
        match timeout(patience, from.read(&mut piece)).await.map_err(|_| io::ErrorKind::TimedOut)?? {
            0 => return Ok(()),
            n => to.write_all(&piece[..n]).await?,
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_proxy_that_cuts_idle_connections_finds_none() {
    const BEATS: usize = 12;
    let gateway = GatewayProcess::start(beating(options())).await;
    // Four intervals; the beats go on for twice that at least.
    let proxy = impatient(gateway.public(), Duration::from_secs(4)).await;
    let mut quiet = ws(proxy, &hearing(&["silent"])).await;
    let mut talking = ws(proxy, &hearing(&["silent"])).await;
    let mut stream = sse(proxy, &hearing(&["silent"])).await;
    let by_quiet = async {
        for _ in 0..BEATS {
            assert_eq!(quiet.next().await, Heard::Ping(Vec::new()));
        }
    };
    let by_talking = async {
        // Says something each moment that has no answer, and leaves the pings unanswered.
        talking.answer_pings(Answer::Never);
        let busy = Frame::new(opcode::TEXT, json!({"type": "busy", "for_ms": 0}).to_string());
        let mut every = interval(Duration::from_millis(200));
        let mut n_beats = 0;
        while n_beats < BEATS {
            tokio::select! {
                _ = every.tick() => talking.send_frame(&busy).await.expect("open"),
                heard = talking.next() => {
                    assert_eq!(heard, Heard::Ping(Vec::new()));
                    n_beats += 1;
                }
            }
        }
    };
    let by_stream = async {
        for _ in 0..BEATS {
            match stream.next().await {
                // Nothing but a comment: no id that would move the place to resume from.
                sse::Heard::Block(block) => assert!(block.is_comment(), "{block:?}"),
                other => panic!("{other:?}"),
            }
        }
    };
    tokio::join!(by_quiet, by_talking, by_stream);
    assert_eq!(n_open(&gateway).await, 3.0);
    gateway.publish("silent", &json!("no more")).await;
    for client in [&mut quiet, &mut talking] {
        assert_eq!(next_event(client).await["data"], "no more");
    }
}

async fn next_event(client: &mut WsClient) -> Value {
    client.until("event").await.pop().expect("until gives at least one")
}
