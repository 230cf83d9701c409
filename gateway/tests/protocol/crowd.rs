//! Many who listen at once: order, those who do not read, and what they cost.

use serde_json::{Value, json};
use testkit::gateway::GatewayProcess;
use testkit::sse::SseClient;
use testkit::ws::{Frame, Heard, WsClient, opcode};
use tokio::net::{TcpSocket, TcpStream};
use tokio::task::JoinSet;
use tokio::time::Instant;

use super::{SOON, bearer, options, publish_lines, resident, sse_with, usual_token, ws};

/// Numbered events, every second one large.
fn numbered(from: usize, to: usize, large: usize) -> Vec<String> {
    (from..to)
        .map(|i| {
            let pad = "x".repeat(if i % 2 == 0 { 1 } else { large });
            format!(r#"{{"channel":"news","data":{{"n":{i},"pad":"{pad}"}}}}"#)
        })
        .collect()
}

/// A socket that buffers next to nothing, so that a reader that stops is felt at once.
async fn narrow(gateway: &GatewayProcess) -> TcpStream {
    let socket = TcpSocket::new_v4().expect("a socket");
    socket.set_recv_buffer_size(4096).expect("an option");
    socket.connect(gateway.public()).await.expect("it listens")
}

async fn narrow_ws(gateway: &GatewayProcess) -> WsClient {
    let auth = bearer(&usual_token());
    let opened = WsClient::over(narrow(gateway).await, "x", "/v1/ws", &[("Authorization", &auth)]).await;
    let mut client = opened.unwrap_or_else(|refused| panic!("{}", refused.text()));
    client.until("ready").await;
    client
}

async fn narrow_sse(gateway: &GatewayProcess) -> SseClient {
    let auth = bearer(&usual_token());
    let opened = SseClient::over(narrow(gateway).await, "x", "/v1/sse", &[("Authorization", &auth)]).await;
    let mut client = opened.unwrap_or_else(|refused| panic!("{}", refused.text()));
    client.until("ready").await;
    client
}

/// Compares ids as numbers: `<ms>-<n>`.
fn id_of(text: &str) -> (u64, u64) {
    let (ms, n) = text.split_once('-').expect("an id");
    (ms.parse().expect("ms"), n.parse().expect("n"))
}

#[tokio::test]
async fn every_listener_hears_every_event_once_and_in_order() {
    const N: usize = 2_000;
    const EACH: usize = 20;
    let gateway = GatewayProcess::start(options().env("GATEWAY_OUTBOX_BYTES", "32MiB")).await;
    let mut listeners = JoinSet::new();
    for _ in 0..EACH {
        let mut client = ws(&gateway).await;
        listeners.spawn(async move {
            let mut heard = Vec::with_capacity(N);
            while heard.len() < N {
                let event = client.json().await;
                heard.push((event["data"]["n"].as_u64(), event["id"].as_str().map(id_of)));
            }
            heard
        });
        let mut stream = sse_with(&gateway, &usual_token(), "/v1/sse").await;
        stream.until("ready").await;
        listeners.spawn(async move {
            let mut heard = Vec::with_capacity(N);
            while heard.len() < N {
                let block = stream.block().await;
                heard.push((block.json()["data"]["n"].as_u64(), block.id.as_deref().map(id_of)));
            }
            heard
        });
    }
    for from in (0..N).step_by(250) {
        publish_lines(&gateway, &numbered(from, from + 250, 1_000)).await;
    }
    let mut n_listeners = 0;
    while let Some(heard) = listeners.join_next().await {
        let heard = heard.expect("a listener that did not fail");
        assert!(heard.iter().enumerate().all(|(i, (n, _))| *n == Some(i as u64)), "numbers in order");
        assert!(heard.windows(2).all(|two| two[0].1.is_some() && two[0].1 < two[1].1), "ids rise");
        n_listeners += 1;
    }
    assert_eq!(n_listeners, 2 * EACH);
}

#[tokio::test]
async fn who_stops_reading_is_ended_as_slow_and_may_resume_while_the_others_miss_nothing() {
    const N: usize = 600;
    let gateway =
        GatewayProcess::start(options().env("GATEWAY_OUTBOX_BYTES", "256KiB").env("GATEWAY_CLOSE_TIMEOUT", "1s")).await;
    let mut stalled_ws = narrow_ws(&gateway).await;
    let mut stalled_sse = narrow_sse(&gateway).await;
    let mut others = Vec::new();
    for _ in 0..5 {
        others.push(ws(&gateway).await);
    }
    let before = resident(&gateway);
    for from in (0..N).step_by(4) {
        publish_lines(&gateway, &numbered(from, from + 4, 32 * 1024)).await;
        // At the readers' pace: only who does not read at all falls behind.
        for client in &mut others {
            for i in from..from + 4 {
                let heard = client.json().await;
                assert_eq!(heard["data"]["n"], i, "{heard}");
            }
        }
    }
    gateway.until_metric("gateway_sessions_closed_total{reason=\"slow\"}", 2.0).await;
    // The log keeps its 600 events; what waited for the two is gone.
    let grown = resident(&gateway).saturating_sub(before);
    assert!(grown < 48 << 20, "{grown} bytes");

    // What had been sent before is whole and in order, and resumes where it ended.
    let (messages, code) = stalled_ws.until_closed().await;
    let events: Vec<_> = messages.iter().filter(|m| m["type"] == "event").collect();
    assert!(events.iter().enumerate().all(|(i, event)| event["data"]["n"] == i), "in order from the first");
    // Cut after the close timeout, if the close found no room in the kernel's buffers.
    assert!(matches!(code, 1013 | 1006), "{code}");
    let cursor = events.last().expect("something was sent")["id"].as_str().expect("an id").to_owned();
    let auth = bearer(&usual_token());
    let headers = [("Authorization", auth.as_str()), ("Last-Event-ID", cursor.as_str())];
    let mut again = WsClient::connect(gateway.public(), "/v1/ws", &headers).await.expect("let in again");
    let messages = again.until("ready").await;
    let rest: Vec<_> = messages.iter().filter(|m| m["type"] == "event").map(|m| &m["data"]["n"]).collect();
    let expected: Vec<_> = (events.len()..N).map(|i| json!(i)).collect();
    assert_eq!(rest, expected.iter().collect::<Vec<_>>());
    assert_eq!(messages.last().expect("ready")["resume"], "ok");

    let mut n = 0;
    loop {
        match stalled_sse.next().await {
            testkit::sse::Heard::Block(block) if block.event.is_none() && !block.is_comment() => {
                assert_eq!(block.json()["data"]["n"], n);
                n += 1;
            }
            testkit::sse::Heard::Block(_) => {}
            testkit::sse::Heard::End | testkit::sse::Heard::Cut => break,
        }
    }
    assert!(n > 0 && n < N);
}

#[tokio::test]
async fn one_event_that_is_larger_than_the_room_left_ends_the_stalled_and_reaches_the_idle() {
    let gateway = GatewayProcess::start(
        options()
            .env("GATEWAY_MAX_MESSAGE", "1MiB")
            .env("GATEWAY_OUTBOX_BYTES", "1MiB")
            .env("GATEWAY_HISTORY_SIZE", "2")
            .env("GATEWAY_CLOSE_TIMEOUT", "1s"),
    )
    .await;
    let mut idle = ws(&gateway).await;
    let _stalled = narrow_ws(&gateway).await;
    let large = "x".repeat(900 * 1024);
    // The kernel may take a few; then 900 KiB wait, and with the next it would be over the cap.
    let until = Instant::now() + SOON;
    while gateway.metric("gateway_sessions_closed_total{reason=\"slow\"}").await != Some(1.0) {
        gateway.publish("news", &json!(large)).await;
        assert_eq!(size_of(&idle.json().await), large.len());
        // Idle again for certain: what answers has first booked what it wrote.
        idle.send_frame(&Frame::new(opcode::PING, "")).await.unwrap();
        assert_eq!(idle.next().await, Heard::Pong(Vec::new()));
        assert!(Instant::now() < until, "nobody was ended");
        // The cap for one, and what is on its way to the other.
        let waiting = gateway.metric("gateway_outbox_bytes").await.unwrap_or(0.0);
        assert!(waiting <= f64::from(2 << 20), "{waiting} bytes wait");
    }
    // One event of the whole cap and its envelope goes to who has nothing waiting.
    let body = format!(r#"{{"channel":"news","data":"{}"}}"#, "x".repeat((1 << 20) - 2));
    assert_eq!(super::publish_text(&gateway, body.as_bytes()).await.status(), 200);
    assert_eq!(size_of(&idle.json().await), (1 << 20) - 2);
}

fn size_of(event: &Value) -> usize {
    event["data"].as_str().unwrap_or_else(|| panic!("no event: {event}")).len()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_burst_larger_than_an_outbox_ends_nobody_who_reads() {
    const N: usize = 250;
    // One thread: whoever offers the burst must let those write who are to deliver it.
    let gateway =
        GatewayProcess::start(options().env("GATEWAY_WORKERS", "1").env("GATEWAY_OUTBOX_BYTES", "256KiB")).await;
    let mut readers = JoinSet::new();
    for _ in 0..5 {
        let mut client = ws(&gateway).await;
        readers.spawn(async move {
            for i in 0..N {
                let heard = client.json().await;
                assert_eq!(heard["data"]["n"], i, "{heard}");
            }
        });
    }
    publish_lines(&gateway, &numbered(0, N, 8 * 1024)).await;
    while let Some(done) = readers.join_next().await {
        done.expect("a reader that missed nothing");
    }
}
