//! The kit's own wires, faults and clients do what tests rely on.

use std::net::Ipv4Addr;
use std::sync::Arc;
use std::time::Duration;

use futures_util::FutureExt;
use hub::backplane::{Backplane, From, Publish, ReadAsk};
use hub::channel::Channel;
use hub::clock::{Clock, Dice};
use hub::memory::{Memory, MemoryConfig, MemoryLog};
use tidegate_testkit::faults::{Call, Failure, Faulty};
use tidegate_testkit::gateway::{GatewayOptions, GatewayProcess};
use tidegate_testkit::http::{self, Wire};
use tidegate_testkit::proxy::{Direction, Flow, Proxy};
use tidegate_testkit::sse::{self, Block, SseClient};
use tidegate_testkit::ws::{self, Answer, Frame, Length, WsClient, opcode};
use tokio::io::{AsyncReadExt, AsyncWriteExt, DuplexStream};
use tokio::net::{TcpListener, TcpStream};

// Proxy.

/// An echo server, a proxy before it, and a connection through both.
async fn echo() -> (Proxy, TcpStream) {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
    let proxy = Proxy::start(listener.local_addr().unwrap()).await;
    tokio::spawn(async move {
        while let Ok((mut socket, _)) = listener.accept().await {
            tokio::spawn(async move {
                let (mut from, mut to) = socket.split();
                let _ = tokio::io::copy(&mut from, &mut to).await;
            });
        }
    });
    let mut socket = TcpStream::connect(proxy.addr()).await.unwrap();
    say(&mut socket, "hello").await;
    (proxy, socket)
}

async fn say(socket: &mut TcpStream, text: &str) {
    socket.write_all(text.as_bytes()).await.unwrap();
    hear(socket, text).await;
}

async fn hear(socket: &mut TcpStream, text: &str) {
    let mut heard = vec![0; text.len()];
    tokio::time::timeout(http::PATIENCE, socket.read_exact(&mut heard)).await.unwrap().unwrap();
    assert_eq!(heard, text.as_bytes());
}

#[tokio::test]
async fn a_cut_wire_ends_what_is_open_and_serves_the_next() {
    let (proxy, mut socket) = echo().await;
    assert_eq!(proxy.n_open(), 1);
    proxy.cut();
    assert!(matches!(socket.read(&mut [0; 1]).await, Ok(0) | Err(_)));
    let mut next = TcpStream::connect(proxy.addr()).await.unwrap();
    say(&mut next, "again").await;
}

#[tokio::test]
async fn a_closed_wire_ends_every_connection_until_it_is_opened() {
    let (proxy, mut socket) = echo().await;
    proxy.close();
    assert!(matches!(socket.read(&mut [0; 1]).await, Ok(0) | Err(_)));
    let mut refused = TcpStream::connect(proxy.addr()).await.unwrap();
    assert!(matches!(refused.read(&mut [0; 1]).await, Ok(0) | Err(_)));
    proxy.open();
    say(&mut TcpStream::connect(proxy.addr()).await.unwrap(), "again").await;
}

#[tokio::test]
async fn swallowed_bytes_are_gone_and_stalled_ones_come_later() {
    for direction in [Direction::Up, Direction::Down] {
        let (proxy, mut socket) = echo().await;
        proxy.set(direction, Flow::Stall);
        socket.write_all(b"late").await.unwrap();
        let silence = tokio::time::timeout(Duration::from_millis(50), socket.read(&mut [0; 1])).await;
        assert!(silence.is_err(), "{direction:?}");
        proxy.set(direction, Flow::Pass);
        hear(&mut socket, "late").await;
        proxy.set(direction, Flow::Swallow);
        socket.write_all(b"lost").await.unwrap();
        let silence = tokio::time::timeout(Duration::from_millis(50), socket.read(&mut [0; 1])).await;
        assert!(silence.is_err(), "{direction:?}");
        proxy.set(direction, Flow::Pass);
        say(&mut socket, "back").await;
    }
}

#[tokio::test]
async fn a_delayed_wire_takes_its_time_both_ways() {
    let (proxy, mut socket) = echo().await;
    proxy.delay(Duration::from_millis(50));
    let started = tokio::time::Instant::now();
    say(&mut socket, "slow").await;
    assert!(started.elapsed() >= Duration::from_millis(100));
}

// Faults.

fn faulty() -> Arc<Faulty<Memory>> {
    let config = MemoryConfig { history_size: 5, history_ttl: http::PATIENCE, idempotency_ttl: http::PATIENCE };
    Faulty::new(MemoryLog::new(config, Clock::at(Duration::from_secs(1_764_460_000)), Dice::seeded(1)).node("a"))
}

fn publish() -> Publish {
    Publish { channel: channel(), name: None, data: "1".into(), ephemeral: false, key: None }
}

fn channel() -> Channel {
    Channel::new("c").unwrap()
}

fn all() -> ReadAsk {
    ReadAsk { channels: vec![(channel(), From::Start)], check: None, cap: 9, page_events: 9, page_bytes: 9 }
}

#[tokio::test]
async fn a_held_answer_tells_what_was_true_when_it_was_asked_for() {
    let node = faulty();
    let held = node.hold(Call::Read);
    let mut early = Box::pin(node.read(all()));
    assert!((&mut early).now_or_never().is_none());
    held.arrived(1).await;
    node.publish(publish()).await.unwrap();
    let mut late = Box::pin(node.read(all()));
    assert!((&mut late).now_or_never().is_none());
    held.arrived(2).await;
    held.release_one();
    assert_eq!(early.await.unwrap().events.len(), 0);
    assert!((&mut late).now_or_never().is_none());
    held.release();
    assert_eq!(late.await.unwrap().events.len(), 1);
    assert_eq!(node.read(all()).await.unwrap().events.len(), 1, "nothing is held any more");
}

#[tokio::test]
async fn a_lost_request_did_nothing_and_a_lost_answer_did_it() {
    let node = faulty();
    node.fail(Call::Publish, Failure::Request);
    assert!(node.publish(publish()).await.is_err());
    assert_eq!(node.read(all()).await.unwrap().events.len(), 0);
    node.fail(Call::Publish, Failure::Answer);
    assert!(node.publish(publish()).await.is_err());
    assert_eq!(node.read(all()).await.unwrap().events.len(), 1);
    node.mend(Call::Publish);
    assert!(node.publish(publish()).await.is_ok());
}

#[tokio::test(start_paused = true)]
async fn a_delayed_call_reaches_the_log_later() {
    let node = faulty();
    node.delay(Call::Publish, Duration::from_secs(5));
    let started = tokio::time::Instant::now();
    let published = node.publish(publish()).await.unwrap();
    assert_eq!(started.elapsed(), Duration::from_secs(5));
    assert_eq!(published.id.unwrap().ms, 1_764_460_005_000);
}

// Clients.

/// Reads a request's head and answers with these bytes.
async fn answer(pipe: DuplexStream, bytes: &[u8]) -> (String, DuplexStream) {
    let mut pipe = pipe;
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        head.push(pipe.read_u8().await.unwrap());
    }
    pipe.write_all(bytes).await.unwrap();
    (String::from_utf8(head).unwrap(), pipe)
}

#[tokio::test]
async fn a_stream_is_read_block_by_block_however_it_is_cut_into_chunks() {
    let (ours, theirs) = tokio::io::duplex(7);
    let body = "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n\
                15\r\nretry: 1000\nevent: he\r\n17\r\nllo\nid: 1-2\ndata: {\"a\":\r\n5\r\n1}\n\n:\r\n3\r\n hi\r\n\
                12\r\n\n\ndata: x\ndata:y\n\n\r\n0\r\n\r\n";
    let server = tokio::spawn(async move { answer(theirs, body.as_bytes()).await });
    let mut client = SseClient::over(ours, "h", "/v1/sse", &[("Last-Event-ID", "1-1")]).await.ok().unwrap();
    let block = client.block().await;
    assert_eq!((block.event.as_deref(), block.id.as_deref(), block.retry), (Some("hello"), Some("1-2"), Some(1000)));
    assert_eq!(block.json(), serde_json::json!({"a": 1}));
    assert_eq!(client.next().await, sse::Heard::Block(Block { comments: vec!["hi".into()], ..Block::default() }));
    assert_eq!(client.block().await.data.as_deref(), Some("x\ny"));
    assert_eq!(client.next().await, sse::Heard::End);
    let (head, _pipe) = server.await.unwrap();
    assert!(head.starts_with("GET /v1/sse HTTP/1.1\r\nHost: h\r\n") && head.contains("\r\nLast-Event-ID: 1-1\r\n"));
}

#[tokio::test]
async fn a_refusal_is_given_whole_and_a_cut_is_no_end() {
    let (ours, theirs) = tokio::io::duplex(64);
    let refusal = "HTTP/1.1 503 Service Unavailable\r\nContent-Length: 2\r\nRetry-After: 3\r\n\r\nno";
    tokio::spawn(async move { answer(theirs, refusal.as_bytes()).await });
    let Err(response) = SseClient::over(ours, "h", "/", &[]).await else { panic!("it was refused") };
    assert_eq!((response.status(), response.header("retry-after"), response.text()), (503, Some("3"), "no"));

    let (ours, theirs) = tokio::io::duplex(64);
    let cut = "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n9\r\ndata: 1\n\n\r\n9\r\nda";
    tokio::spawn(async move { answer(theirs, cut.as_bytes()).await });
    let mut client = SseClient::over(ours, "h", "/", &[]).await.ok().unwrap();
    assert_eq!(client.block().await.data.as_deref(), Some("1"));
    assert_eq!(client.next().await, sse::Heard::Cut);
}

/// A client, and the server's end of its pipe after the handshake.
async fn websocket() -> (WsClient<DuplexStream>, DuplexStream) {
    let (ours, mut theirs) = tokio::io::duplex(1 << 20);
    let server = tokio::spawn(async move {
        let mut head = Vec::new();
        while !head.ends_with(b"\r\n\r\n") {
            head.push(theirs.read_u8().await.unwrap());
        }
        let head = String::from_utf8(head).unwrap();
        // The example of RFC 6455 1.3, asked for by the test itself.
        assert!(head.contains("\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n"));
        let accepted = "HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\
                        Sec-WebSocket-Accept: s3pPLMBiTxaQ9kYGzzhZRbK+xOo=\r\n\r\n";
        theirs.write_all(accepted.as_bytes()).await.unwrap();
        theirs
    });
    // Given by the test, it stands instead of the client's own.
    let key = [("Sec-WebSocket-Key", "dGhlIHNhbXBsZSBub25jZQ==")];
    let client = WsClient::over(ours, "h", "/v1/ws", &key).await.ok().unwrap();
    (client, server.await.unwrap())
}

fn unmasked(fin: bool, op: u8, payload: &[u8]) -> Vec<u8> {
    Frame { fin, mask: None, ..Frame::new(op, payload) }.bytes()
}

#[tokio::test]
async fn fragments_make_one_message_with_control_frames_between_them() {
    let (mut client, mut server) = websocket().await;
    client.answer_pings(Answer::Never);
    for frame in [
        unmasked(false, opcode::TEXT, "ä".as_bytes().split_at(1).0),
        unmasked(true, opcode::PING, b"p"),
        unmasked(true, opcode::CONTINUATION, "ä".as_bytes().split_at(1).1),
        unmasked(true, opcode::BINARY, &[7; 126]),
        unmasked(true, opcode::BINARY, &[7; 65_536]),
        unmasked(true, opcode::CLOSE, b"\x03\xe9bye"),
    ] {
        server.write_all(&frame).await.unwrap();
    }
    drop(server);
    assert_eq!(client.next().await, ws::Heard::Ping(b"p".to_vec()));
    assert_eq!(client.next().await, ws::Heard::Text("ä".into()));
    assert_eq!(client.next().await, ws::Heard::Binary(vec![7; 126]));
    assert_eq!(client.next().await, ws::Heard::Binary(vec![7; 65_536]));
    assert_eq!(client.next().await, ws::Heard::Close { code: Some(1001), reason: "bye".into() });
    assert_eq!(client.next().await, ws::Heard::Cut);
}

#[tokio::test]
async fn a_ping_is_answered_masked_with_its_own_payload() {
    let (mut client, mut server) = websocket().await;
    server.write_all(&unmasked(true, opcode::PING, b"abc")).await.unwrap();
    assert_eq!(client.next().await, ws::Heard::Ping(b"abc".to_vec()));
    let mut frame = [0; 9];
    server.read_exact(&mut frame).await.unwrap();
    assert_eq!(frame[..2], [0x8a, 0x83]);
    let payload: Vec<u8> = frame[6..].iter().zip(&frame[2..6]).map(|(byte, key)| byte ^ key).collect();
    assert_eq!(payload, b"abc");
}

#[tokio::test]
async fn frames_that_no_server_may_send_fail_the_test() {
    let illegal = [
        Frame::new(opcode::TEXT, "masked").bytes(),
        Frame { rsv: 4, mask: None, ..Frame::new(opcode::TEXT, "x") }.bytes(),
        unmasked(true, 3, b"x"),
        Frame { length: Length::Two, mask: None, ..Frame::new(opcode::TEXT, "x") }.bytes(),
        Frame { length: Length::Eight, mask: None, ..Frame::new(opcode::TEXT, vec![b'x'; 65_535]) }.bytes(),
        unmasked(false, opcode::PING, b""),
        unmasked(true, opcode::PING, &[0; 126]),
        unmasked(true, opcode::CONTINUATION, b"x"),
        [unmasked(false, opcode::TEXT, b"x"), unmasked(true, opcode::TEXT, b"x")].concat(),
        unmasked(true, opcode::TEXT, b"\xff"),
        unmasked(true, opcode::CLOSE, b"\x03"),
        unmasked(true, opcode::CLOSE, b"\x03\xed"),
    ];
    for (i, bytes) in illegal.into_iter().enumerate() {
        let (mut client, mut server) = websocket().await;
        server.write_all(&bytes).await.unwrap();
        let read = tokio::spawn(async move { client.next().await }).await;
        assert!(read.is_err_and(|e| e.is_panic()), "frame {i}");
    }
}

#[test]
fn a_frame_can_lie_about_its_length_in_every_form() {
    let length_of = |length| Frame { length, mask: None, ..Frame::new(opcode::TEXT, "abc") }.bytes();
    assert_eq!(length_of(Length::Shortest), b"\x81\x03abc");
    assert_eq!(length_of(Length::Two), b"\x81\x7e\x00\x03abc");
    assert_eq!(length_of(Length::Eight), b"\x81\x7f\x00\x00\x00\x00\x00\x00\x00\x03abc");
    assert_eq!(length_of(Length::Claim(1 << 63)), b"\x81\x7f\x80\x00\x00\x00\x00\x00\x00\x00abc");
    assert_eq!(Frame { fin: false, rsv: 7, ..Frame::new(opcode::CLOSE, "") }.bytes()[..2], [0x78, 0x80]);
}

#[tokio::test]
async fn an_answer_without_a_length_goes_to_the_connections_end() {
    let (ours, theirs) = tokio::io::duplex(8);
    tokio::spawn(
        async move { answer(theirs, b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\nA: b\r\n\r\nwhole").await },
    );
    let mut wire = Wire::new(ours);
    wire.ask("GET", "/", "h", &[], b"").await.unwrap();
    let head = wire.head().await.unwrap();
    assert_eq!((head.status, head.header("a")), (200, Some("b")));
    assert_eq!(wire.body(&head).await.unwrap(), b"whole");
}

// Processes.

#[tokio::test]
async fn a_command_leaves_its_status_and_all_that_it_said() {
    let script = "echo out; echo $GATEWAY_X >&2; exit 64";
    let options = GatewayOptions::new("/bin/sh").args(&["-c", script]).env("GATEWAY_X", "y").env("GATEWAY_X", "x");
    let ended = options.run(http::PATIENCE).await;
    assert_eq!((ended.status.code(), ended.stdout.as_str(), ended.stderr.as_str()), (Some(64), "out\n", "x\n"));
}

#[tokio::test]
#[should_panic(expected = "no key")]
async fn a_gateway_that_ends_instead_of_serving_fails_the_test_with_its_words() {
    GatewayProcess::start(GatewayOptions::new("/bin/sh").args(&["-c", "echo no key >&2; exit 64"])).await;
}
