//! A node that stood still and goes on: whoever asked and left meanwhile costs it the reading of a
//! head, and whoever stayed is served.

use std::time::Duration;

use testkit::gateway::{GatewayProcess, Signal};
use testkit::http::{self, Wire};
use tokio::net::TcpStream;
use tokio::time::{Instant, sleep};

use crate::{bearer, claims, options, ws_unread};

/// Clients that ask and leave.
const N: usize = 200;

/// For what takes a moment, also on a busy machine.
const PATIENCE: Duration = Duration::from_secs(60);

async fn until(what: &str, is_so: impl Fn() -> bool) {
    let until = Instant::now() + PATIENCE;
    while !is_so() {
        assert!(Instant::now() < until, "not within {PATIENCE:?}: {what}");
        sleep(Duration::from_millis(5)).await;
    }
}

/// Connections of the public port on the gateway's side, as the kernel has them.
#[derive(Debug, Default, PartialEq, Eq)]
struct Connections {
    /// Open from both sides.
    n_open: usize,
    /// Those that the peer has closed and the gateway has not.
    n_left: usize,
    /// Still being made.
    n_coming: usize,
    /// Those that the gateway has accepted, in whatever state.
    n_accepted: usize,
}

impl Connections {
    fn of(gateway: &GatewayProcess) -> Self {
        let local = format!(":{:04X}", gateway.public().port());
        let table = std::fs::read_to_string("/proc/net/tcp").expect("Linux has a table");
        let mut seen = Self::default();
        for line in table.lines() {
            let fields: Vec<&str> = line.split_whitespace().collect();
            let [_, at, _, state, _, _, _, _, _, inode, ..] = fields[..] else { continue };
            if !at.ends_with(&local) {
                continue;
            }
            match state {
                "01" => seen.n_open += 1,
                "03" => seen.n_coming += 1,
                "08" => seen.n_left += 1,
                _ => continue,
            }
            seen.n_accepted += usize::from(inode != "0");
        }
        seen
    }
}

/// Stops every thread of the gateway.
async fn stand_still(gateway: &GatewayProcess) {
    gateway.signal(Signal::Stop);
    let threads = format!("/proc/{}/task", gateway.pid());
    let is_stopped = |thread: std::io::Result<std::fs::DirEntry>| {
        let stat = std::fs::read_to_string(thread.expect("a thread").path().join("stat")).expect("its state");
        stat.rsplit_once(") ").is_some_and(|(_, rest)| rest.starts_with('T'))
    };
    until("the gateway stands still", || std::fs::read_dir(&threads).expect("it is there").all(is_stopped)).await;
}

fn n_descriptors(gateway: &GatewayProcess) -> usize {
    std::fs::read_dir(format!("/proc/{}/fd", gateway.pid())).expect("the process runs").count()
}

/// How a client asks and leaves; every mix occurs.
#[derive(Clone, Copy)]
struct Leaver {
    is_ws: bool,
    is_reset: bool,
    /// Accepted before the node stood still.
    is_known: bool,
}

impl Leaver {
    fn nth(i: usize) -> Self {
        // Most wait to be accepted: more than the 128 that are usual.
        Self { is_ws: i.is_multiple_of(2), is_reset: (i / 2).is_multiple_of(4), is_known: (i / 8).is_multiple_of(4) }
    }

    /// Sends a whole request that any node would admit, and goes.
    async fn ask_and_leave(self, socket: TcpStream, sub: &str) {
        let auth = bearer(&claims(sub));
        let upgrade = [
            ("Connection", "Upgrade"),
            ("Upgrade", "websocket"),
            ("Sec-WebSocket-Version", "13"),
            ("Sec-WebSocket-Key", "dGhlIHNhbXBsZSBub25jZQ=="),
        ];
        let (path, more) = if self.is_ws { ("/v1/ws", &upgrade[..]) } else { ("/v1/sse", &[][..]) };
        let fields = [&[("Authorization", auth.as_str())], more].concat();
        let mut wire = Wire::new(socket);
        wire.ask("GET", path, "gateway", &fields, b"").await.expect("the kernel takes it");
        if self.is_reset {
            wire.socket().set_zero_linger().expect("an option of sockets");
        }
    }
}

/// All samples of these counters, each with its labels' together.
async fn sums<const K: usize>(gateway: &GatewayProcess, counters: [&str; K]) -> [f64; K] {
    let answer = http::get(gateway.probes(), "/metrics").await;
    counters.map(|counter| {
        let samples = answer.text().lines().filter(|line| line.starts_with(counter));
        let values = samples.map(|line| line.rsplit(' ').next().and_then(|n| n.parse::<f64>().ok()));
        values.map(|value| value.expect("a sample ends with its value")).sum()
    })
}

/// `N` clients, some of them accepted, ask and leave while the gateway stands still.
async fn all_ask_and_leave(gateway: &GatewayProcess) {
    let mut leavers = Vec::new();
    for leaver in (0..N).map(Leaver::nth) {
        let known =
            if leaver.is_known { Some(TcpStream::connect(gateway.public()).await.expect("it listens")) } else { None };
        leavers.push((leaver, known));
    }
    let n_known = leavers.iter().filter(|(leaver, _)| leaver.is_known).count();
    until("those who came first are accepted", || Connections::of(gateway).n_accepted == n_known).await;
    stand_still(gateway).await;
    let n_closed = leavers.iter().filter(|(leaver, _)| !leaver.is_reset).count();
    for (i, (leaver, known)) in leavers.into_iter().enumerate() {
        let socket = match known {
            Some(socket) => socket,
            None => TcpStream::connect(gateway.public()).await.expect("the kernel lets it wait"),
        };
        leaver.ask_and_leave(socket, &format!("gone {i}")).await;
    }
    let is_known_to_the_kernel = || {
        let now = Connections::of(gateway);
        (now.n_open, now.n_coming, now.n_left) == (0, 0, n_closed)
    };
    until("the gateway's kernel knows that they left", is_known_to_the_kernel).await;
}

#[tokio::test]
async fn who_asked_and_left_while_the_node_stood_still_is_not_authenticated() {
    // However long it stands still, no head that came before is late.
    let gateway = GatewayProcess::start(options().env("GATEWAY_HEAD_TIMEOUT", "60s")).await;
    let n_descriptors_before = n_descriptors(&gateway);
    all_ask_and_leave(&gateway).await;

    let stays = claims("stays");
    let (mut stays, ()) = tokio::join!(ws_unread(gateway.public(), &stays), async {
        until("one who stays is the last in the line", || Connections::of(&gateway).n_open == 1).await;
        gateway.signal(Signal::Cont);
    });
    stays.until("ready").await;
    // It was the last: all are accepted, and those who left are done with once their sockets are.
    let is_done = || {
        let now = Connections::of(&gateway);
        // What the last probe before had open may be among those that were there before.
        (now.n_open, now.n_left) == (1, 0) && n_descriptors(&gateway) <= n_descriptors_before + 1
    };
    until("only who stayed has a socket", is_done).await;

    let counted = ["gateway_auth_seconds_count", "gateway_revocation_checks_total", "gateway_sessions_opened_total"];
    assert_eq!(sums(&gateway, counted).await, [1.0; 3], "{counted:?}: {N} left and one stayed");
    assert_eq!(sums(&gateway, ["gateway_refused_total"]).await, [0.0], "nobody was there to be refused");
}
