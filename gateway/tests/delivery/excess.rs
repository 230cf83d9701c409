//! Clients that send more than anybody may: messages without an end, pings without a reader, words
//! behind a broken rule. What is held of it is bounded by the settings, and who reads is told.

use futures_util::future::join_all;
use serde_json::json;
use testkit::gateway::GatewayProcess;
use testkit::ws::{Frame, Heard, WsClient, opcode};

use super::{closed, hearing, n_sockets, narrow_ws, options, resident, until, until_open, ws};

fn part(op: u8, payload: impl Into<Vec<u8>>) -> Frame {
    Frame { fin: false, ..Frame::new(op, payload) }
}

/// The gateway has taken in all that this client sent before: it answers what came behind it.
async fn is_taken_in(client: &mut WsClient) {
    client.send_frame(&Frame::new(opcode::PING, "taken in?")).await.expect("open");
    assert_eq!(client.next().await, Heard::Pong(b"taken in?".to_vec()));
}

/// Sends 63 KiB of a message that goes on: three pieces, and a fourth that stops in its midst.
async fn park(client: &mut WsClient, op: u8) {
    for op in [op, opcode::CONTINUATION, opcode::CONTINUATION] {
        client.send_frame(&part(op, vec![b'x'; 20 << 10])).await.expect("open");
    }
    is_taken_in(client).await;
    client.send_bytes(&part(opcode::CONTINUATION, vec![b'x'; 4 << 10]).bytes()[..3 << 10]).await.expect("open");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn unfinished_messages_cost_no_more_than_the_limit_each_and_end_as_soon_as_they_pass_it() {
    const PARKED: usize = 300;
    const LIMIT: usize = 64 << 10;
    let gateway = GatewayProcess::start(options()).await;
    let mut parked = Vec::with_capacity(PARKED);
    for _ in 0..PARKED {
        parked.push(ws(gateway.public(), &hearing(&[])).await);
    }
    let before = resident(&gateway);
    join_all(parked.iter_mut().enumerate().map(|(i, client)| park(client, [opcode::TEXT, opcode::BINARY][i % 2])))
        .await;
    let mut witness = ws(gateway.public(), &hearing(&["news"])).await;
    is_taken_in(&mut witness).await;
    let grown = resident(&gateway).saturating_sub(before);
    println!("{grown} bytes for {PARKED} that sent 63 KiB each");
    assert!(grown < PARKED * LIMIT + (8 << 20), "{grown} bytes");
    // The rest of that piece is the whole limit, and still no message; one byte more is too much.
    let passing = parked.iter_mut().map(async |client| {
        client.send_bytes(&part(opcode::CONTINUATION, vec![b'x'; 4 << 10]).bytes()[3 << 10..]).await.expect("open");
        is_taken_in(client).await;
        client.send_frame(&part(opcode::CONTINUATION, "x")).await.expect("open");
        client.until_closed().await.1
    });
    assert!(join_all(passing).await.into_iter().all(|code| code == 1009));
    drop(parked);
    until_open(&gateway, 1).await;
    gateway.until_metric(&closed("too_large"), PARKED as f64).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_message_without_an_end_is_ended_by_the_limit_that_is_set_and_by_its_empty_pieces() {
    let gateway = GatewayProcess::start(options().env("GATEWAY_MAX_MESSAGE", "4KiB")).await;
    for op in [opcode::TEXT, opcode::BINARY] {
        let mut client = ws(gateway.public(), &hearing(&[])).await;
        for piece in 0..4 {
            let op = if piece == 0 { op } else { opcode::CONTINUATION };
            client.send_frame(&part(op, vec![b'x'; 1 << 10])).await.expect("open");
            is_taken_in(&mut client).await;
        }
        client.send_frame(&part(opcode::CONTINUATION, "x")).await.expect("open");
        assert_eq!(client.until_closed().await.1, 1009);
    }
    // Nothing adds up here but the number of pieces.
    let mut client = ws(gateway.public(), &hearing(&[])).await;
    let empty = part(opcode::CONTINUATION, "").bytes().repeat(1_000);
    client.send_frame(&part(opcode::TEXT, "x")).await.expect("open");
    client.send_bytes(&empty).await.expect("open");
    is_taken_in(&mut client).await;
    client.send_bytes(&empty).await.expect("open");
    assert_eq!(client.until_closed().await.1, 1008);
    drop(client);
    until_open(&gateway, 0).await;
    gateway.until_metric(&closed("bad_message"), 1.0).await;
    gateway.until_metric(&closed("too_large"), 2.0).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn pongs_that_nobody_reads_count_for_the_cap_and_end_their_session_there() {
    const CAP: usize = 8 << 20;
    // No deadline of a write is met in this test: it is the cap that ends it.
    let options = options()
        .env("GATEWAY_OUTBOX_BYTES", "8MiB")
        .env("GATEWAY_WRITE_TIMEOUT", "5m")
        .env("GATEWAY_HEARTBEAT", "5m")
        .env("GATEWAY_CLOSE_TIMEOUT", "1s");
    let gateway = GatewayProcess::start(options).await;
    let mut reader = ws(gateway.public(), &hearing(&["news"])).await;
    let mut deaf = narrow_ws(gateway.public(), &hearing(&["news"])).await;
    let (before, pings) = (resident(&gateway), Frame::new(opcode::PING, vec![b'p'; 125]).bytes().repeat(1_000));
    // Whoever reads has an answer to each of its own meanwhile, and events between them.
    let reading = async {
        for round in 0..50 {
            reader.send_frame(&Frame::new(opcode::PING, "mine")).await.expect("open");
            assert_eq!(reader.next().await, Heard::Pong(b"mine".to_vec()));
            gateway.publish("news", &json!(round)).await;
            assert_eq!(reader.json().await["data"], round);
        }
    };
    let flooding = async {
        for _ in 0..80 {
            deaf.send_bytes(&pings).await.expect("all of it is taken");
        }
    };
    tokio::join!(reading, flooding);
    // Ten MB of pongs: the kernels between take up to five, the rest is counted.
    let waiting = async || gateway.metric("gateway_outbox_bytes").await.expect("it is there");
    until("what waits is counted", async || waiting().await >= (4 << 20) as f64).await;
    assert!(waiting().await <= CAP as f64, "{} bytes wait", waiting().await);
    assert_eq!(gateway.metric(&closed("slow")).await, Some(0.0));
    let grown = resident(&gateway).saturating_sub(before);
    println!("{} bytes of pongs wait, memory grew by {grown}", waiting().await);
    assert!(grown < 4 * CAP, "{grown} bytes");
    for _ in 0..40 {
        // Cut in the midst of it.
        let _ = deaf.send_bytes(&pings).await;
    }
    gateway.until_metric(&closed("slow"), 1.0).await;
    until_open(&gateway, 1).await;
    until("its socket is free", async || n_sockets(&gateway) == 1).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn who_breaks_a_rule_and_talks_on_still_hears_which_one_it_was() {
    const TAIL: usize = 4 << 20;
    let gateway = GatewayProcess::start(options().env("GATEWAY_CLOSE_TIMEOUT", "10s")).await;
    let text = |payload: &[u8]| Frame::new(opcode::TEXT, payload);
    let huge = Frame { fin: false, ..text(&vec![b'x'; 1 << 20]) };
    let cases = [
        ("unmasked", Frame { mask: None, ..text(b"{}") }.bytes(), 1002),
        ("a reserved bit", Frame { rsv: 4, ..text(b"{}") }.bytes(), 1002),
        ("a reserved opcode", Frame::new(5, "x").bytes(), 1002),
        ("an oversize ping", Frame::new(opcode::PING, vec![b'p'; 126]).bytes(), 1002),
        ("a continuation of nothing", Frame::new(opcode::CONTINUATION, "x").bytes(), 1002),
        ("binary", Frame::new(opcode::BINARY, "x").bytes(), 1003),
        ("no UTF-8", text(b"\xff").bytes(), 1007),
        ("a flood", text(br#"{"type":"ping"}"#).bytes().repeat(200), 1008),
        ("a megabyte, all of it sent", huge.bytes(), 1009),
    ];
    let (n_cases, mut tails) = (cases.len(), text(&[b'x'; 1_000]).bytes());
    tails = tails.repeat(TAIL / tails.len());
    for (what, broken, code) in cases {
        let mut client = ws(gateway.public(), &hearing(&[])).await;
        // All of it is taken, though none of it is looked at: nothing unread is left that would reset
        // the connection before the close frame is read.
        client.send_bytes(&broken).await.unwrap_or_else(|e| panic!("{what}: {e}"));
        client.send_bytes(&tails).await.unwrap_or_else(|e| panic!("{what}: {e}"));
        let (messages, closed) = client.until_closed().await;
        assert_eq!(closed, code, "{what}");
        let bye = messages.last().unwrap_or_else(|| panic!("{what}: no bye"));
        assert_eq!((&bye["type"], &bye["code"]), (&json!("bye"), &json!(code)), "{what}");
        let _ = client.send_close(code, "").await;
        assert_eq!(client.next().await, Heard::Cut, "{what}");
    }
    gateway.until_metric(&closed("bad_message"), (n_cases - 1) as f64).await;
    gateway.until_metric(&closed("too_large"), 1.0).await;
    until_open(&gateway, 0).await;
}
