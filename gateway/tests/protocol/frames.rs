//! WebSocket framing on sessions of the ordinary kind. What is legal is RFC 6455's to say.

use std::time::Duration;

use serde_json::{Value, json};
use testkit::gateway::GatewayProcess;
use testkit::ws::{Answer, Frame, Heard, Length, WsClient, opcode};

use super::{SOON, options, publish_text, resident, talkative, usual_token, ws, ws_with};

/// The default of `GATEWAY_MAX_MESSAGE`.
const MAX: usize = 64 * 1024;

fn part(op: u8, payload: impl Into<Vec<u8>>) -> Frame {
    Frame { fin: false, ..Frame::new(op, payload) }
}

/// A message of exactly so many bytes that is answered by `pong`.
fn ping_message(n: usize) -> Vec<u8> {
    let frame = r#"{"type":"ping","pad":""}"#;
    let mut text = frame.as_bytes()[..frame.len() - 2].to_vec();
    text.resize(n - 2, b'x');
    text.extend(b"\"}");
    text
}

/// Sends these frames in one write; gives the last words, the close code, and asserts that the
/// socket ends after it.
async fn sent(gateway: &GatewayProcess, frames: &[Frame]) -> (Vec<Value>, u16) {
    let mut client = ws(gateway).await;
    let bytes: Vec<u8> = frames.iter().flat_map(Frame::bytes).collect();
    let _ = client.send_bytes(&bytes).await;
    let (messages, code) = client.until_closed().await;
    let ended = tokio::time::timeout(SOON, client.next()).await;
    assert_eq!(ended, Ok(Heard::Cut), "the socket ends after the close frame");
    (messages, code)
}

#[tokio::test]
async fn each_broken_rule_of_framing_gets_its_close_code_and_nothing_is_delivered() {
    let gateway = GatewayProcess::start(talkative()).await;
    let text = Frame::new(opcode::TEXT, r#"{"type":"ping"}"#);
    let with = |change: &dyn Fn(&mut Frame)| {
        let mut frame = text.clone();
        change(&mut frame);
        frame
    };
    let mut cases: Vec<(String, Vec<Frame>, u16)> = vec![
        ("unmasked".into(), vec![with(&|f| f.mask = None)], 1002),
        ("length in two bytes".into(), vec![with(&|f| f.length = Length::Two)], 1002),
        ("length in eight bytes".into(), vec![with(&|f| f.length = Length::Eight)], 1002),
        ("length with its top bit".into(), vec![with(&|f| f.length = Length::Claim((1 << 63) + 1))], 1002),
        ("announces 1 MiB".into(), vec![with(&|f| f.length = Length::Claim(1 << 20))], 1009),
        ("announces 1 TiB".into(), vec![with(&|f| f.length = Length::Claim(1 << 40))], 1009),
        ("text within text".into(), vec![part(1, "{"), part(1, "}"), Frame::new(0, "")], 1002),
        ("binary within text".into(), vec![part(1, "{"), Frame::new(2, "}")], 1002),
        ("continues nothing".into(), vec![Frame::new(0, "{}")], 1002),
        ("continues a finished one".into(), vec![text.clone(), Frame::new(0, "{}")], 1002),
        ("half a close code".into(), vec![Frame::new(8, "\x03")], 1002),
        ("close code 1005".into(), vec![Frame::new(8, 1005u16.to_be_bytes())], 1002),
        ("close code 2999".into(), vec![Frame::new(8, 2999u16.to_be_bytes())], 1002),
        ("close reason no UTF-8".into(), vec![Frame::new(8, [0x03, 0xe8, 0xff])], 1007),
        ("binary that nobody wants".into(), vec![Frame::new(2, "{\"type\":\"ping\"}")], 1003),
    ];
    for rsv in [1, 2, 4, 7] {
        cases.push((format!("reserved bits {rsv}"), vec![with(&|f| f.rsv = rsv)], 1002));
    }
    for op in (3..=7).chain(11..=15) {
        cases.push((format!("opcode {op}"), vec![with(&|f| f.opcode = op)], 1002));
    }
    for op in [opcode::PING, opcode::PONG, opcode::CLOSE] {
        for n in [126, 70_000] {
            cases.push((format!("control {op} of {n}"), vec![Frame::new(op, vec![b'x'; n])], 1002));
        }
        cases.push((format!("control {op} in parts"), vec![part(op, "")], 1002));
    }
    for (what, frames, code) in cases {
        let (messages, closed) = sent(&gateway, &frames).await;
        assert_eq!(closed, code, "{what}: {messages:?}");
        let (bye, before) = messages.split_last().unwrap_or_else(|| panic!("{what}: no bye"));
        let reason = if code == 1009 { "too_large" } else { "bad_message" };
        assert_eq!((&bye["type"], &bye["reason"], &bye["reconnect"]), (&json!("bye"), &json!(reason), &json!("never")));
        assert_eq!(bye["code"], code, "{what}");
        // What was whole before the fault is answered; the faulty thing itself is not.
        let is_whole_first = what == "continues a finished one";
        assert_eq!(before.len(), usize::from(is_whole_first), "{what}: {before:?}");
    }
    gateway.until_metric("gateway_sessions_open{transport=\"ws\"}", 0.0).await;
}

#[tokio::test]
async fn text_is_utf_8_across_fragments_and_nothing_else() {
    let gateway = GatewayProcess::start(talkative()).await;
    let wrap = |inner: &[u8]| [br#"{"type":"ping","x":""#, inner, br#""}"#].concat();
    let mut client = ws(&gateway).await;
    let good = wrap("\u{1f30a}".as_bytes());
    let at = br#"{"type":"ping","x":""#.len();
    for cut in [at + 1, at + 2, at + 3] {
        let (a, b) = good.split_at(cut);
        for frame in [part(1, a), part(0, ""), Frame::new(0, b)] {
            client.send_frame(&frame).await.unwrap();
        }
        assert_eq!(client.json().await["type"], "pong", "cut at {cut}");
    }
    for (what, inner) in [
        ("ends inside a character", &b"\xf0\x9f\x8c"[..]),
        ("a surrogate", b"\xed\xa0\x80"),
        ("an overlong form", b"\xc0\xaf"),
        ("beyond U+10FFFF", b"\xf4\x90\x80\x80"),
        ("a stray continuation", b"\x80"),
    ] {
        let whole = if what == "ends inside a character" { [b"\"", inner].concat() } else { wrap(inner) };
        assert_eq!(sent(&gateway, &[Frame::new(1, whole.clone())]).await.1, 1007, "{what}, whole");
        let (a, b) = whole.split_at(whole.len() - inner.len().min(2));
        assert_eq!(sent(&gateway, &[part(1, a), Frame::new(0, b)]).await.1, 1007, "{what}, in parts");
    }
}

#[tokio::test]
async fn control_frames_pass_between_fragments_and_the_message_stays_whole() {
    let gateway = GatewayProcess::start(options()).await;
    let mut client = ws(&gateway).await;
    let frames = [
        part(1, r#"{"type":"pi"#),
        Frame::new(opcode::PING, "p"),
        part(0, r#"ng","ref":"#),
        Frame::new(opcode::PONG, "nobody asked"),
        Frame::new(0, "1}"),
    ];
    client.send_bytes(&frames.iter().flat_map(Frame::bytes).collect::<Vec<_>>()).await.unwrap();
    assert_eq!(client.next().await, Heard::Pong(b"p".to_vec()));
    assert_eq!(client.json().await, json!({"type": "pong"}));
    client.send_frame(&Frame::new(opcode::PING, vec![7; 125])).await.unwrap();
    assert_eq!(client.next().await, Heard::Pong(vec![7; 125]));
}

#[tokio::test]
async fn a_close_is_echoed_and_what_follows_it_is_ignored() {
    let gateway = GatewayProcess::start(options()).await;
    for (code, reason) in [(Some(1000u16), "bye"), (Some(1001), ""), (Some(4999), "own"), (None, "")] {
        let mut client = ws(&gateway).await;
        let payload = code.map_or(Vec::new(), |code| [&code.to_be_bytes()[..], reason.as_bytes()].concat());
        let frames = [
            Frame::new(opcode::CLOSE, payload),
            Frame::new(opcode::TEXT, r#"{"type":"ping"}"#),
            Frame::new(opcode::TEXT, r#"{"type":"subscribe","channel":"room:1"}"#),
            Frame::new(opcode::PING, "p"),
        ];
        client.send_bytes(&frames.iter().flat_map(Frame::bytes).collect::<Vec<_>>()).await.unwrap();
        match client.next().await {
            Heard::Close { code: echoed, .. } => assert_eq!(echoed, code),
            other => panic!("{other:?} instead of the echo"),
        }
        assert_eq!(client.next().await, Heard::Cut);
    }
    gateway.until_metric("gateway_sessions_closed_total{reason=\"client\"}", 4.0).await;
}

#[tokio::test]
async fn a_message_of_exactly_the_limit_is_taken_and_one_byte_more_is_not() {
    let gateway = GatewayProcess::start(talkative()).await;
    let mut client = ws(&gateway).await;
    for n in [MAX - 1, MAX] {
        let text = ping_message(n);
        client.send_frame(&Frame::new(1, text.clone())).await.unwrap();
        assert_eq!(client.json().await["type"], "pong", "{n} whole");
        let (a, b) = text.split_at(n / 3);
        client.send_frame(&part(1, a)).await.unwrap();
        client.send_frame(&Frame::new(0, b)).await.unwrap();
        assert_eq!(client.json().await["type"], "pong", "{n} in parts");
    }
    let over = ping_message(MAX + 1);
    assert_eq!(sent(&gateway, &[Frame::new(1, over.clone())]).await.1, 1009, "whole");
    let (a, b) = over.split_at(MAX / 2);
    assert_eq!(sent(&gateway, &[part(1, a), Frame::new(0, b)]).await.1, 1009, "in parts");
    // Endless: the sum counts, not the frame, and it is over as soon as it is over.
    for op in [opcode::TEXT, opcode::BINARY] {
        let piece = vec![b'x'; MAX / 2];
        let frames = [part(op, piece.clone()), part(0, piece.clone()), part(0, "x")];
        assert_eq!(sent(&gateway, &frames).await.1, 1009, "opcode {op}");
    }
}

#[tokio::test]
async fn what_goes_out_has_the_shortest_length_at_every_boundary() {
    let gateway = GatewayProcess::start(options()).await;
    let mut client = ws(&gateway).await;
    // Without an id, whose length is not always the same.
    let fleeting = |n: usize| json!({"channel": "news", "data": "x".repeat(n), "ephemeral": true});
    assert_eq!(gateway.try_publish(&fleeting(0)).await.status(), 200);
    let empty = super::next_text(&mut client).await.len();
    // The client of the kit fails the test where a length is not in its shortest form.
    for n in [empty + 1, 125, 126, 127, 128, 65_535, 65_536, 65_537] {
        assert_eq!(gateway.try_publish(&fleeting(n - empty)).await.status(), 200);
        assert_eq!(super::next_text(&mut client).await.len(), n);
    }
    // `data` counts as published, quotes and all.
    let largest = format!(r#"{{"channel":"news","ephemeral":true,"data":"{}"}}"#, "x".repeat(MAX - 2));
    assert_eq!(publish_text(&gateway, largest.as_bytes()).await.status(), 200);
    assert_eq!(super::next_text(&mut client).await.len(), empty - 2 + MAX);
    let over = format!(r#"{{"channel":"news","data":"{}"}}"#, "x".repeat(MAX - 1));
    let refused = publish_text(&gateway, over.as_bytes()).await;
    assert_eq!((refused.status(), &refused.json()["code"]), (413, &json!("payload_too_large")));
    gateway.publish("news", &json!("in step")).await;
    assert_eq!(client.json().await["data"], "in step");
}

#[tokio::test]
async fn a_frame_in_a_hundred_pieces_survives_everything_that_goes_out_meanwhile() {
    const FRAMES: usize = 12;
    let gateway = GatewayProcess::start(talkative().env("GATEWAY_OUTBOX_BYTES", "64MiB")).await;
    let mut client = ws(&gateway).await;
    let sending = async {
        let mut bytes = Vec::new();
        for i in 0..FRAMES {
            bytes.extend(Frame::new(1, ping_message(MAX)).bytes());
            bytes.extend(Frame::new(opcode::PING, [i as u8]).bytes());
        }
        bytes
    };
    let bytes = sending.await;
    // 500 events and more a second, until the last piece is out.
    let lines: Vec<String> = (0..100).map(|i| format!(r#"{{"channel":"news","data":{i}}}"#)).collect();
    let (socket_done, mut is_done) = tokio::sync::watch::channel(false);
    let publishing = async {
        let mut n = 0;
        while !*is_done.borrow_and_update() {
            super::publish_lines(&gateway, &lines).await;
            n += lines.len();
        }
        n
    };
    let talking = async {
        // Pieces of 100 bytes, and a ping's frame cut after its first byte wherever it falls.
        let (mut pongs, mut answers, mut events) = (Vec::new(), 0, 0);
        for piece in bytes.chunks(100) {
            client.send_bytes(piece).await.unwrap();
            tokio::task::yield_now().await;
        }
        while answers < FRAMES || pongs.len() < FRAMES {
            match client.next().await {
                Heard::Pong(payload) => pongs.push(payload),
                Heard::Text(text) if text == r#"{"type":"pong"}"# => answers += 1,
                Heard::Text(_) => events += 1,
                Heard::Ping(_) => {}
                other => panic!("{other:?}"),
            }
        }
        socket_done.send_replace(true);
        (client, pongs, events)
    };
    let ((mut client, pongs, mut events), published) = tokio::join!(talking, publishing);
    assert_eq!(pongs, (0..FRAMES).map(|i| vec![i as u8]).collect::<Vec<_>>());
    while events < published {
        assert_eq!(client.json().await["type"], "event");
        events += 1;
    }
}

#[tokio::test]
async fn every_ping_gets_its_own_pong_while_large_events_stream_out() {
    let gateway =
        GatewayProcess::start(options().env("GATEWAY_MAX_MESSAGE", "1MiB").env("GATEWAY_OUTBOX_BYTES", "64MiB")).await;
    let mut client = ws(&gateway).await;
    let large = "x".repeat(1 << 19);
    let publishing = async {
        for _ in 0..20 {
            gateway.publish("news", &json!(large)).await;
        }
    };
    let pinging = async {
        let (mut n_events, mut sent, mut heard) = (0, 0u32, 0u32);
        let mut every = tokio::time::interval(Duration::from_millis(2));
        while n_events < 20 || heard < sent {
            tokio::select! {
                _ = every.tick(), if n_events < 20 => {
                    client.send_frame(&Frame::new(opcode::PING, sent.to_be_bytes())).await.unwrap();
                    sent += 1;
                }
                // Cancel-safe: nothing is answered here.
                heard_now = client.next() => match heard_now {
                    Heard::Pong(payload) => {
                        assert_eq!(payload, heard.to_be_bytes());
                        heard += 1;
                    }
                    Heard::Text(text) => {
                        assert!(text.len() > large.len());
                        n_events += 1;
                    }
                    other => panic!("{other:?}"),
                },
            }
        }
        sent
    };
    let (sent, ()) = tokio::join!(pinging, publishing);
    assert!(sent > 5, "{sent} pings among 20 events");
    // A reset in the midst of it ends that connection and no other.
    let mut other = ws(&gateway).await;
    for i in 0..50u32 {
        let _ = client.send_frame(&Frame::new(opcode::PING, i.to_be_bytes())).await;
    }
    client.socket().set_zero_linger().unwrap();
    drop(client);
    gateway.publish("news", &json!("still here")).await;
    assert_eq!(other.json().await["data"], "still here");
    gateway.until_metric("gateway_sessions_open{transport=\"ws\"}", 1.0).await;
}

#[tokio::test]
async fn memory_grows_with_what_arrived_and_not_with_what_was_announced() {
    const PARKED: usize = 300;
    let gateway =
        GatewayProcess::start(options().env("GATEWAY_MAX_MESSAGE", "1MiB").env("GATEWAY_OUTBOX_BYTES", "2MiB")).await;
    let mut parked = Vec::with_capacity(PARKED);
    for _ in 0..PARKED {
        parked.push(ws(&gateway).await);
    }
    let before = resident(&gateway);
    for (i, client) in parked.iter_mut().enumerate() {
        // A MiB is announced, whole or as a fragment, and a thousandth of it comes.
        let frame = Frame { fin: i % 2 == 0, ..Frame::new(1, vec![b'x'; 1 << 20]) };
        client.send_bytes(&frame.bytes()[..1024]).await.unwrap();
    }
    // The gateway has read it all once it has answered somebody who came later.
    let mut witness = ws(&gateway).await;
    witness.send_json(&json!({"type": "ping"})).await;
    assert_eq!(witness.json().await["type"], "pong");
    let grown = resident(&gateway).saturating_sub(before);
    assert!(grown < 16 << 20, "{grown} bytes for {PARKED} announcements of 1 MiB");
}

#[tokio::test]
async fn a_frame_that_never_ends_is_ended_by_the_heartbeat() {
    let gateway =
        GatewayProcess::start(options().env("GATEWAY_HEARTBEAT", "1s").env("GATEWAY_HEARTBEAT_TIMEOUT", "3s")).await;
    let mut stalled = ws(&gateway).await;
    let mut alive = ws(&gateway).await;
    stalled.send_bytes(&Frame::new(1, ping_message(1_000)).bytes()[..500]).await.unwrap();
    stalled.answer_pings(Answer::Never);
    let ending = async {
        loop {
            match stalled.next().await {
                Heard::Ping(_) => {}
                other => return other,
            }
        }
    };
    let answering = async {
        loop {
            // Answers pings by itself.
            alive.next().await;
        }
    };
    let ended = tokio::select! {
        ended = ending => ended,
        () = answering => unreachable!("it hears on"),
    };
    assert_eq!(ended, Heard::Cut);
    gateway.until_metric("gateway_sessions_closed_total{reason=\"unresponsive\"}", 1.0).await;
    gateway.until_metric("gateway_sessions_open{transport=\"ws\"}", 1.0).await;
}

#[tokio::test]
async fn a_ping_flood_is_answered_to_a_reader_and_ends_who_does_not_read() {
    const FLOOD: usize = 20_000;
    let gateway = GatewayProcess::start(options()).await;
    let frame = Frame::new(opcode::PING, vec![b'p'; 125]).bytes();
    let hundred = frame.repeat(100);

    let mut reader = ws(&gateway).await;
    gateway.publish("news", &json!("before")).await;
    let (mut pongs, mut events) = (0, 0);
    for i in 0..FLOOD / 100 {
        reader.send_bytes(&hundred).await.unwrap();
        if i == FLOOD / 200 {
            gateway.publish("news", &json!("in the midst")).await;
        }
        // A window of pings is always out.
        while pongs + 2_000 < (i + 1) * 100 {
            count(&mut reader, &mut pongs, &mut events).await;
        }
    }
    while pongs < FLOOD || events < 2 {
        count(&mut reader, &mut pongs, &mut events).await;
    }

    let mut deaf = ws_with(&gateway, &usual_token(), "/v1/ws").await;
    let before = resident(&gateway);
    let flooding = async {
        // Until the gateway takes no more: it has ended the session or the socket is full.
        for _ in 0..4_000 {
            if deaf.send_bytes(&hundred).await.is_err() {
                return;
            }
        }
    };
    let slow = gateway.until_metric("gateway_sessions_closed_total{reason=\"slow\"}", 1.0);
    tokio::select! {
        biased;
        () = slow => {}
        () = async { flooding.await; std::future::pending().await } => {}
    }
    let grown = resident(&gateway).saturating_sub(before);
    assert!(grown < 16 << 20, "{grown} bytes for one who does not read");
    gateway.until_metric("gateway_sessions_open{transport=\"ws\"}", 1.0).await;
    reader.send_json(&json!({"type": "ping"})).await;
    assert_eq!(reader.json().await["type"], "pong");
}

async fn count(client: &mut WsClient, pongs: &mut usize, events: &mut usize) {
    match client.next().await {
        Heard::Pong(payload) => {
            assert_eq!(payload.len(), 125);
            *pongs += 1;
        }
        Heard::Text(_) => *events += 1,
        Heard::Ping(_) => {}
        other => panic!("{other:?}"),
    }
}
