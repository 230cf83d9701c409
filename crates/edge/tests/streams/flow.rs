//! Bytes both ways: whole frames whatever happens, and nobody waits for anybody else.

use std::time::Duration;

use bytes::Bytes;
use hub::close::CloseReason;
use hub::cursor::Since;
use hub::departure::{Departure, Who};
use hub::event::Wire;
use hub::hub::Newcomer;
use hub::plugin::Admission;
use serde_json::{Value, json};
use testkit::ws::{Answer, Heard, WsClient};
use testkit::{http, sse};
use tidegate_edge::drive::Driver;
use tokio::io::DuplexStream;
use tokio::time::{Instant, sleep, timeout};

use crate::node::{Node, ROOMY, Settings, secs, user};

/// Fits into no pipe of these tests.
fn large(n: usize) -> Value {
    json!({"n": n, "fill": "x".repeat(10_000)})
}

fn numbers(messages: &[Value]) -> Vec<u64> {
    messages.iter().filter(|m| m["type"] == "event").map(|m| m["data"]["n"].as_u64().unwrap()).collect()
}

#[tokio::test(start_paused = true)]
async fn a_stream_whose_client_vanishes_frees_its_session_at_once() {
    let node = Node::start(Settings::new());
    let began = Instant::now();
    let (stream, socket) = (node.sse(&user("a")).await, node.ws("b").await);
    node.until_open(2).await;
    drop(stream);
    node.until_open(1).await;
    drop(socket);
    node.until_open(0).await;
    assert_eq!(began.elapsed(), Duration::ZERO);
    assert_eq!(node.n_closed("lost"), 2.0);
}

async fn kick(node: &Node, user: &str) {
    let asked = Departure { who: Who::User(user.into()), reason: CloseReason::Kicked, over: Duration::ZERO };
    assert_eq!(node.hub.depart(asked), 1);
    // The wheel's next turn ends it.
    sleep(Duration::from_millis(200)).await;
}

#[tokio::test(start_paused = true)]
async fn a_frame_that_is_half_written_is_finished_before_the_close() {
    let node = Node::start(Settings::new());
    let mut client = node.ws_over(256, &user("u")).await;
    for n in 0..3 {
        node.publish(&large(n)).await;
    }
    kick(&node, "u").await;
    // Only now it reads on: what it was sent, whole and in order, then why it must go.
    let (messages, code) = client.until_closed().await;
    assert_eq!(numbers(&messages), [0, 1, 2]);
    assert_eq!((&messages.last().unwrap()["reason"], code), (&json!("kicked"), 4403));
}

#[tokio::test(start_paused = true)]
async fn who_says_goodbye_and_closes_his_half_at_once_still_hears_ours() {
    let node = Node::start(Settings::new());
    let mut client = node.ws("u").await;
    client.send_close(1000, "").await.unwrap();
    client.finish().await.unwrap();
    assert_eq!(client.until_closed().await.1, 1000);
    node.until_open(0).await;
    assert_eq!(node.n_closed("client"), 1.0);
}

#[tokio::test(start_paused = true)]
async fn a_slow_client_gets_the_rest_of_its_frame_then_the_reason_and_nothing_else() {
    let mut settings = Settings::new();
    settings.hub.session.outbox_bytes = 35_000;
    let node = Node::start(settings);
    let mut client = node.ws_over(256, &user("u")).await;
    // Each waits in the outbox until the kernel has it: three fit, the fourth does not.
    for n in 0..3 {
        node.publish(&large(n)).await;
        sleep(Duration::from_millis(1)).await;
    }
    assert_eq!(node.n_closed("slow"), 0.0);
    node.publish(&large(3)).await;
    sleep(Duration::from_millis(1)).await;
    let (messages, code) = client.until_closed().await;
    assert_eq!(numbers(&messages), [0]);
    let bye = messages.last().unwrap();
    assert_eq!((&bye["reason"], &bye["reconnect"], code), (&json!("slow"), &json!("after"), 1013));
    // A position would claim what was thrown away.
    assert_eq!(bye.get("id"), None);
    client.send_close(1013, "").await.unwrap();
    assert_eq!(client.next().await, Heard::Cut);
    // Both sides have said all; the session is over with the client's own end.
    drop(client);
    node.until_open(0).await;
    assert_eq!(node.n_closed("slow"), 1.0);
}

#[tokio::test(start_paused = true)]
async fn a_session_that_is_slow_before_its_first_byte_still_begins_with_its_head() {
    let mut settings = Settings::new();
    settings.hub.session.outbox_bytes = 35_000;
    let node = Node::start(settings);
    let identity = node.gate.verifier.verify(&node.token(&user("u")), Duration::from_secs(node.unix())).unwrap();
    let open = node.hub.open(Newcomer {
        channels: node.hub.channels_for(&identity, &[]).unwrap(),
        identity,
        wire: Wire::Sse,
        address: [127, 0, 0, 1].into(),
        since: Since::Now,
        admission: Admission::Standard,
        seat: node.gate.capacity.try_acquire().unwrap(),
    });
    let open = open.unwrap_or_else(|refusal| panic!("{}", refusal.detail));
    let session = open.session().clone();
    let head = Bytes::from_static(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n");
    let (theirs, ours) = tokio::io::duplex(ROOMY);
    // Its first turn comes late: a busy thread.
    let driver = Driver::new(ours, open, head, b"", ());
    for n in 0..5 {
        sleep(Duration::from_millis(1)).await;
        node.publish(&large(n)).await;
    }
    sleep(Duration::from_millis(1)).await;
    assert_eq!(session.ending(), Some(CloseReason::Slow));
    tokio::spawn(driver);
    let mut wire = http::Wire::new(theirs);
    let head = wire.head().await.unwrap();
    let body = String::from_utf8(wire.body(&head).await.unwrap()).unwrap();
    assert!(body.contains("\"type\":\"hello\"") && body.ends_with("\n\n") && !body.contains("\"n\":"), "{body}");
    assert!(body.contains("\"reason\":\"slow\""), "{body}");
}

#[tokio::test(start_paused = true)]
async fn a_slow_stream_ends_cleanly_where_it_can_still_be_told() {
    let mut settings = Settings::new();
    settings.hub.session.outbox_bytes = 35_000;
    let node = Node::start(settings);
    let auth = node.bearer(&user("u"));
    let opening = sse::SseClient::over(node.dial(256), "n1", "/v1/sse", &[("Authorization", &*auth)]).await;
    let mut client = opening.unwrap_or_else(|refused| panic!("{}", refused.text()));
    client.until("ready").await;
    for n in 0..4 {
        node.publish(&large(n)).await;
        sleep(Duration::from_millis(1)).await;
    }
    let blocks = client.until_end().await;
    let kinds: Vec<String> = blocks.iter().map(sse::Block::kind).collect();
    assert_eq!(kinds, ["event", "bye"]);
    assert_eq!(blocks[1].json()["reason"], "slow");
}

#[tokio::test(start_paused = true)]
async fn a_write_that_makes_no_progress_ends_at_its_deadline_and_is_cut_at_the_next() {
    let node = Node::start(Settings::new());
    let mut client = node.ws_over(256, &user("u")).await;
    let began = Instant::now();
    node.publish(&large(0)).await;
    sleep(secs(9)).await;
    // A sip counts as progress: the deadline is for the next one.
    let first = timeout(secs(1), client.next()).await;
    assert!(matches!(first, Ok(Heard::Text(_))), "{first:?}");
    node.publish(&large(1)).await;
    sleep(secs(9)).await;
    assert_eq!(node.n_closed("slow") + node.n_closed("lost"), 0.0);
    while node.n_sessions() > 0 {
        sleep(Duration::from_millis(10)).await;
    }
    // 10 s without progress, then 3 s for the bye that did not get through either.
    let ended = began.elapsed() - secs(9);
    assert!(ended >= secs(13) && ended <= secs(13) + Duration::from_millis(250), "{ended:?}");
    assert_eq!(node.n_closed("slow"), 1.0);
    drop(client);
}

#[tokio::test(start_paused = true)]
async fn a_slow_client_never_delays_another() {
    const N_EVENTS: usize = 100;
    let node = Node::start(Settings::new());
    let stalled = node.ws_over(256, &user("stalled")).await;
    let mut reading: Vec<WsClient<DuplexStream>> = Vec::new();
    for i in 0..10 {
        reading.push(node.ws(&format!("u{i}")).await);
    }
    let mut streaming = node.sse(&user("streaming")).await;
    for n in 0..N_EVENTS {
        let published = Instant::now();
        node.publish(&large(n)).await;
        for client in &mut reading {
            assert_eq!(client.json().await["data"]["n"], n);
        }
        assert_eq!(streaming.until("event").await.last().unwrap().json()["data"]["n"], n);
        assert_eq!(published.elapsed(), Duration::ZERO, "event {n}");
    }
    drop(stalled);
}

#[tokio::test(start_paused = true)]
async fn a_quiet_client_is_pinged_and_a_silent_one_cut_by_interval_and_timeout() {
    let node = Node::start(Settings::new());
    let opened = Instant::now();
    let (mut quiet, mut silent) = (node.ws("quiet").await, node.ws("silent").await);
    silent.answer_pings(Answer::Never);
    let mut stream = node.sse(&user("stream")).await;
    let mut beats = Vec::new();
    let beating = async {
        while opened.elapsed() < secs(590) {
            assert!(matches!(quiet.next().await, Heard::Ping(_) | Heard::Text(_)));
            beats.push(opened.elapsed());
        }
    };
    let mut comments = Vec::new();
    let commenting = async {
        while opened.elapsed() < secs(590) {
            assert!(matches!(stream.next().await, sse::Heard::Block(_)));
            comments.push(opened.elapsed());
        }
    };
    let cut = async {
        assert_eq!(silent.next().await, Heard::Ping(Vec::new()));
        let pinged = opened.elapsed();
        assert_eq!(silent.next().await, Heard::Cut);
        (pinged, opened.elapsed() - pinged)
    };
    let ((pinged, after_ping), (), ()) = tokio::join!(cut, beating, commenting);
    assert!(pinged >= Duration::from_millis(12_500) && pinged <= Duration::from_millis(25_100), "{pinged:?}");
    assert!(after_ping >= secs(10) && after_ping <= Duration::from_millis(10_250), "{after_ping:?}");
    for beats in [beats, comments] {
        let longest = beats.windows(2).map(|pair| pair[1] - pair[0]).max().unwrap();
        assert!(longest <= Duration::from_millis(25_200), "{longest:?}");
    }
    assert_eq!((node.n_sessions(), node.n_closed("unresponsive")), (2, 1.0));
}
