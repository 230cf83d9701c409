//! From a connection to its session: heads that do not come, too many at once, bytes that come early.

use std::time::Duration;

use futures_util::future::BoxFuture;
use hub::auth::Identity;
use hub::plugin::{Admission, Ask, Plugin, Plugins};
use hub::refusal::Refusal;
use serde_json::json;
use testkit::http::Wire;
use testkit::ws::{Frame, WsClient, opcode};
use tokio::io::{AsyncReadExt, AsyncWriteExt, DuplexStream};
use tokio::time::{Instant, sleep};

use crate::node::{Node, ROOMY, Settings, secs, user};

/// How long it takes until the other side ends the connection, without a word.
async fn ended_after(mut socket: DuplexStream) -> Duration {
    let began = Instant::now();
    let mut said = Vec::new();
    let _ = socket.read_to_end(&mut said).await;
    assert!(said.is_empty(), "{}", String::from_utf8_lossy(&said));
    began.elapsed()
}

#[tokio::test(start_paused = true)]
async fn a_head_that_does_not_come_in_time_ends_its_connection_and_costs_nobody_a_place() {
    let node =
        Node::start(Settings { hub: hub::hub::HubConfig { capacity: 1, ..Settings::new().hub }, ..Settings::new() });
    let silent = node.dial(ROOMY);
    let mut half = node.dial(ROOMY);
    half.write_all(b"GET /v1/ws HT").await.unwrap();
    let dripping = async {
        let (mut read, mut write) = tokio::io::split(node.dial(ROOMY));
        let began = Instant::now();
        let drip = async {
            write.write_all(b"GET /v1/ws HTTP/1.1\r\nHost: n1\r\n").await.unwrap();
            while write.write_all(b"a").await.is_ok() {
                sleep(secs(1)).await;
            }
        };
        let ended = async {
            let mut said = Vec::new();
            let _ = read.read_to_end(&mut said).await;
            began.elapsed()
        };
        tokio::join!(drip, ended).1
    };
    let ordinary = async {
        // Ten a second while the others dawdle, in the node's only place.
        for i in 0..60 {
            let mut client = node.ws(&format!("u{i}")).await;
            client.send_close(1000, "").await.unwrap();
            assert_eq!(client.until_closed().await.1, 1000);
            drop(client);
            node.until_open(0).await;
            sleep(Duration::from_millis(100)).await;
        }
    };
    let (silent, half, dripping, ()) = tokio::join!(ended_after(silent), ended_after(half), dripping, ordinary);
    assert_eq!((silent, half, dripping), (secs(5), secs(5), secs(5)));
    assert_eq!(node.metric("gateway_refused_total{code=\"head_timeout\"}"), 3.0);
}

#[tokio::test(start_paused = true)]
async fn a_full_house_serves_the_newest_and_drops_the_longest_incomplete_head() {
    let mut settings = Settings::new();
    settings.accept.handshakes = 3;
    let node = Node::start(settings);
    let mut waiting = Vec::new();
    for _ in 0..3 {
        waiting.push(tokio::spawn(ended_after(node.dial(ROOMY))));
        sleep(Duration::from_millis(100)).await;
    }
    // An open session holds no place among the handshakes: each of these takes one for a moment.
    let clients = [node.ws("a").await, node.ws("b").await];
    sleep(Duration::from_millis(50)).await;
    let over: Vec<bool> = waiting.iter().map(|head| head.is_finished()).collect();
    assert_eq!(over, [true, false, false], "the first alone made room, and once for both");
    assert_eq!(waiting.remove(0).await.unwrap(), Duration::from_millis(300));
    for head in waiting {
        assert_eq!(head.await.unwrap(), secs(5));
    }
    drop(clients);
}

/// Never makes up its mind.
struct Undecided;

impl Plugin for Undecided {
    fn name(&self) -> &'static str {
        "undecided"
    }

    fn admit<'a>(&'a self, _who: &'a Identity, _ask: &'a Ask) -> BoxFuture<'a, Result<Admission, Refusal>> {
        Box::pin(std::future::pending())
    }
}

#[tokio::test(start_paused = true)]
async fn who_waits_for_us_is_never_dropped_for_a_newcomer() {
    let mut settings = Settings::new();
    settings.accept.handshakes = 2;
    settings.plugins = Plugins::new().with(Undecided);
    let node = Node::start(settings);
    let refusal_of = async |sub: &str| {
        let began = Instant::now();
        let auth = node.bearer(&user(sub));
        let opening = WsClient::over(node.dial(ROOMY), "n1", "/v1/ws", &[("Authorization", &*auth)]).await;
        let refused = opening.err().expect("nobody is let in");
        (refused.json()["code"].as_str().unwrap().to_owned(), began.elapsed())
    };
    let late = async {
        sleep(Duration::from_millis(10)).await;
        refusal_of("c").await
    };
    let (a, b, c) = tokio::join!(refusal_of("a"), refusal_of("b"), late);
    assert_eq!(c, ("overloaded".to_owned(), Duration::ZERO), "unread, at once");
    assert_eq!([a, b], [("auth_unavailable".to_owned(), secs(1)), ("auth_unavailable".to_owned(), secs(1))]);
}

#[tokio::test(start_paused = true)]
async fn bytes_behind_the_head_are_the_sessions_first() {
    let node = Node::start(Settings::new());
    let auth = node.bearer(&json!({"sub": "u", "subscribe": ["early"]}));
    let head = format!(
        "GET /v1/ws HTTP/1.1\r\nHost: n1\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\
         Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nAuthorization: {auth}\r\n\r\n"
    );
    let ask = json!({"type": "subscribe", "ref": "the early bird", "channel": "early"}).to_string();
    let frames = [Frame::new(opcode::PING, "are you there").bytes(), Frame::new(opcode::TEXT, ask).bytes()].concat();
    // Cut anywhere: the rest of a frame comes later, in the ordinary way.
    for n_early in [0, 1, 7, frames.len() - 1, frames.len()] {
        let mut wire = Wire::new(node.dial(ROOMY));
        wire.send(&[head.as_bytes(), &frames[..n_early]].concat()).await.unwrap();
        assert_eq!(wire.head().await.unwrap().status, 101);
        wire.send(&frames[n_early..]).await.unwrap();
        let mut said = Vec::new();
        // In whatever order the fields of the answer stand.
        let answer = ["are you there", "\"type\":\"ok\"", "\"ref\":\"the early bird\""];
        while !answer.iter().all(|part| String::from_utf8_lossy(&said).contains(part)) {
            said.extend(wire.exactly(1).await.unwrap_or_else(|e| panic!("{n_early}: {e} after {said:?}")));
        }
    }
}
