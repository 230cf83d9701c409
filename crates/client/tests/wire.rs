//! The client against a scripted server on a real socket: what it sends, when it comes back and
//! from where. The server here is a listener and a few lines of bytes, so that nothing but the wire
//! is shared with what is tested.

#[path = "wire/later.rs"]
mod later;

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use serde_json::{Value, json};
use tidegate_client::{Builder, Client, CommandError, End, Loss, Message, Pace, Transport};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

/// Delays short enough for a test; the real ones are tested in `backoff`.
const QUICK: Pace =
    Pace { first_max: Duration::from_millis(20), base: Duration::from_millis(10), cap: Duration::from_millis(20) };

struct Server(TcpListener);

impl Server {
    async fn start() -> (Server, Builder) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        (Server(listener), Client::builder(url).pace(QUICK).seed(1))
    }

    /// The next connection's request head.
    async fn request(&self) -> (String, Peer) {
        let (mut stream, _) = self.0.accept().await.unwrap();
        // A frame is written in two pieces here.
        stream.set_nodelay(true).unwrap();
        let mut head = Vec::new();
        while !head.ends_with(b"\r\n\r\n") {
            head.push(stream.read_u8().await.unwrap());
        }
        (String::from_utf8(head).unwrap(), Peer(stream))
    }

    async fn websocket(&self) -> (String, Peer) {
        let (head, mut peer) = self.request().await;
        peer.bytes("HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\n").await;
        peer.say(json!({"type": "hello", "session": "s", "channels": ["base"]})).await;
        (head, peer)
    }
}

struct Peer(TcpStream);

impl Peer {
    async fn bytes(&mut self, text: &str) {
        self.0.write_all(text.as_bytes()).await.unwrap();
    }

    async fn say(&mut self, message: Value) {
        let text = message.to_string();
        assert!(text.len() < 126);
        self.0.write_all(&[0x81, text.len() as u8]).await.unwrap();
        self.bytes(&text).await;
    }

    async fn ready(&mut self, id: &str) {
        self.say(json!({"type": "ready", "resume": "ok", "replayed": 0, "id": id})).await;
    }

    async fn event(&mut self, channel: &str, id: &str, replay: bool) {
        let mut event = json!({"type": "event", "channel": channel, "id": id, "data": 1});
        if replay {
            event["replay"] = true.into();
        }
        self.say(event).await;
    }

    async fn frame(&mut self) -> (u8, Vec<u8>) {
        let kind = self.0.read_u8().await.unwrap();
        let length = usize::from(self.0.read_u8().await.unwrap() & 0x7f);
        assert!(length < 126);
        let mut mask = [0; 4];
        self.0.read_exact(&mut mask).await.unwrap();
        let mut payload = vec![0; length];
        self.0.read_exact(&mut payload).await.unwrap();
        for (n, byte) in payload.iter_mut().enumerate() {
            *byte ^= mask[n % 4];
        }
        (kind, payload)
    }

    async fn hear(&mut self) -> Value {
        serde_json::from_slice(&self.frame().await.1).unwrap()
    }

    async fn answer(&mut self, reference: &Value, id: &str) {
        self.say(json!({"type": "ok", "ref": reference, "resume": "ok", "id": id})).await;
    }
}

/// The value of a header of a request head.
fn header<'a>(head: &'a str, name: &str) -> Option<&'a str> {
    head.lines()
        .find_map(|line| line.split_once(": ").filter(|(n, _)| n.eq_ignore_ascii_case(name)).map(|(_, value)| value))
}

async fn until<T>(client: &mut Client, mut pick: impl FnMut(Message) -> Option<T>) -> T {
    loop {
        let message = client.next().await.unwrap_or_else(|| panic!("ended: {:?}", client.end()));
        if let Some(picked) = pick(message) {
            return picked;
        }
    }
}

fn event_id(message: Message) -> Option<String> {
    match message {
        Message::Event(event) => event.id,
        _ => None,
    }
}

fn lost(message: Message) -> Option<Loss> {
    match message {
        Message::Lost(lost) => Some(lost.why),
        _ => None,
    }
}

#[tokio::test]
async fn a_cut_client_resumes_from_the_last_id_it_received() {
    let (server, builder) = Server::start().await;
    let mut client = builder.token("t").channels(["a b"]).since("3-0").connect().unwrap();
    let (head, mut peer) = server.websocket().await;
    assert!(head.starts_with("GET /v1/ws?channel=a%20b HTTP/1.1\r\n"), "{head}");
    assert_eq!((header(&head, "authorization"), header(&head, "last-event-id")), (Some("Bearer t"), Some("3-0")));
    peer.ready("4-0").await;
    peer.event("base", "5-0", false).await;
    assert_eq!(until(&mut client, event_id).await, "5-0");
    assert_eq!(client.cursor().as_deref(), Some("5-0"));
    drop(peer);

    assert_eq!(until(&mut client, lost).await, Loss::Cut);
    let (head, mut peer) = server.websocket().await;
    assert_eq!(header(&head, "last-event-id"), Some("5-0"));
    // The log was reset: the position goes down, and so does what is asked for next.
    peer.ready("1-0").await;
    drop(peer);
    let (head, _peer) = server.websocket().await;
    assert_eq!(header(&head, "last-event-id"), Some("1-0"));
}

#[tokio::test]
async fn every_attempt_goes_where_the_program_says_and_keeps_the_urls_name() {
    let (first, _) = Server::start().await;
    let (second, _) = Server::start().await;
    let addresses = [&first, &second].map(|server| server.0.local_addr().unwrap());
    let asked = AtomicUsize::new(0);
    let _client = Client::builder("http://fleet.example:81")
        .pace(QUICK)
        .address_source(move || addresses.get(asked.fetch_add(1, Ordering::Relaxed)).copied())
        .connect()
        .unwrap();
    let (head, peer) = first.websocket().await;
    assert_eq!(header(&head, "host"), Some("fleet.example:81"));
    drop(peer);
    let (head, _peer) = second.websocket().await;
    assert_eq!(header(&head, "host"), Some("fleet.example:81"));
}

#[tokio::test]
async fn never_means_never_and_says_why() {
    for (message, close, reason) in [
        (Some(json!({"type": "bye", "reason": "revoked", "code": 4403, "reconnect": "never"})), 4403u16, "revoked"),
        (None, 4409, "4409"),
    ] {
        let (server, builder) = Server::start().await;
        let mut client = builder.connect().unwrap();
        let (_, mut peer) = server.websocket().await;
        if let Some(message) = message {
            peer.say(message).await;
        }
        peer.0.write_all(&[0x88, 2]).await.unwrap();
        peer.0.write_u16(close).await.unwrap();
        assert_eq!(peer.frame().await, (0x88, close.to_be_bytes().to_vec()), "the close is answered");
        while client.next().await.is_some() {}
        assert_eq!(client.end(), Some(&End::Never { reason: reason.into() }));
        assert_eq!(client.ping().await, Err(CommandError::Ended));
    }
}

#[tokio::test]
async fn a_new_token_is_fetched_before_the_end_and_after_a_401() {
    let (server, builder) = Server::start().await;
    let asked = Arc::new(AtomicUsize::new(0));
    let counter = Arc::clone(&asked);
    let source = move || {
        let n = counter.fetch_add(1, Ordering::SeqCst);
        async move { Ok::<_, String>(format!("t{n}")) }
    };
    let mut client = builder.token_source(source).connect().unwrap();
    let (head, mut peer) = server.websocket().await;
    assert_eq!(header(&head, "authorization"), Some("Bearer t0"));
    peer.say(json!({"type": "token_expiring", "in_ms": 4})).await;
    assert_eq!(peer.hear().await, json!({"type": "auth", "ref": "renewal", "token": "t1"}));
    drop(peer);
    let (head, mut peer) = server.request().await;
    assert_eq!(header(&head, "authorization"), Some("Bearer t1"));
    peer.bytes("HTTP/1.1 401 Unauthorized\r\nContent-Length: 24\r\n\r\n{\"code\":\"token_expired\"}").await;
    let refused = until(&mut client, |message| lost(message).filter(|why| *why != Loss::Cut)).await;
    assert_eq!(refused, Loss::Refused { status: 401, code: "token_expired".into() });
    let (head, _peer) = server.websocket().await;
    assert_eq!(header(&head, "authorization"), Some("Bearer t2"));
}

#[tokio::test]
async fn a_fixed_token_that_ended_ends_the_client() {
    let (server, builder) = Server::start().await;
    let mut client = builder.token("t").connect().unwrap();
    let (_, mut peer) = server.websocket().await;
    peer.say(json!({"type": "bye", "reason": "token_expired", "code": 4401, "reconnect": "reauth"})).await;
    drop(peer);
    while client.next().await.is_some() {}
    assert_eq!(client.end(), Some(&End::TokenEnded { reason: "token_expired".into() }));
}

#[tokio::test]
async fn a_refusal_that_can_pass_is_waited_for_and_any_other_ends_the_client() {
    let (server, builder) = Server::start().await;
    let mut client = builder.connect().unwrap();
    let body = r#"{"code":"overloaded","retry_after_ms":30}"#;
    let (_, mut peer) = server.request().await;
    peer.bytes(&format!(
        "HTTP/1.1 503 Service Unavailable\r\nRetry-After: 60\r\nContent-Length: {}\r\n\r\n{body}",
        body.len()
    ))
    .await;
    let retry_in = until(&mut client, |message| match message {
        Message::Lost(lost) => Some(lost.retry_in),
        _ => None,
    })
    .await;
    assert!(
        retry_in >= Duration::from_millis(30) && retry_in < Duration::from_millis(1_030),
        "the finer figure counts: {retry_in:?}"
    );
    let (_, mut peer) = server.request().await;
    peer.bytes("HTTP/1.1 403 Forbidden\r\nConnection: close\r\n\r\n{\"code\":\"forbidden\",\"detail\":\"not you\"}")
        .await;
    drop(peer);
    while client.next().await.is_some() {}
    assert_eq!(client.end(), Some(&End::Refused { status: 403, code: "forbidden".into(), detail: "not you".into() }));
}

#[tokio::test]
async fn a_server_that_falls_silent_is_left() {
    let (server, builder) = Server::start().await;
    let mut client = builder.connect().unwrap();
    let (_, mut peer) = server.websocket().await;
    until(&mut client, |message| matches!(message, Message::Hello(_)).then_some(())).await;
    // A `bye` without an end is the shortest promise of silence there is.
    peer.say(json!({"type": "bye", "reason": "drain", "code": 1001, "reconnect": "after", "after_ms": 0})).await;
    until(&mut client, |message| matches!(message, Message::Bye(_)).then_some(())).await;
    assert_eq!(until(&mut client, lost).await, Loss::Bye { reason: "drain".into() });
    let (_, _second) = server.websocket().await;
    assert_eq!(peer.0.read(&mut [0; 1]).await.unwrap(), 0, "the old socket was closed");
}

#[tokio::test]
async fn sse_resumes_with_the_id_line_and_takes_a_soft_refusal() {
    const HEAD: &str = "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n";
    let (server, builder) = Server::start().await;
    let mut client = builder.transport(Transport::Sse).channels(["c"]).connect().unwrap();
    assert_eq!(client.ping().await, Err(CommandError::OneWay));
    let (head, mut peer) = server.request().await;
    assert!(head.starts_with("GET /v1/sse?channel=c HTTP/1.1\r\n"), "{head}");
    assert_eq!(header(&head, "accept"), Some("text/event-stream"));
    peer.bytes(HEAD).await;
    peer.bytes("retry: 1500\nevent: hello\ndata: {\"type\":\"hello\",\"session\":\"s\"}\n\n: hb\n\n").await;
    peer.bytes(
        "event: gap\nid: 4-0\ndata: {\"type\":\"gap\",\"channel\":\"c\",\"reason\":\"evicted\",\"id\":\"4-0\"}\n\n",
    )
    .await;
    peer.bytes("id: 5-0\ndata: {\"type\":\"event\",\"channel\":\"c\",\"id\":\"5-0\",\"data\":{}}\n\n").await;
    until(&mut client, |message| matches!(message, Message::Gap(_)).then_some(())).await;
    assert_eq!(client.cursor().as_deref(), Some("4-0"), "the wire's own cursor");
    assert_eq!(until(&mut client, event_id).await, "5-0");
    drop(peer);

    let (head, mut peer) = server.request().await;
    assert_eq!(header(&head, "last-event-id"), Some("5-0"));
    peer.bytes(HEAD).await;
    peer.bytes("retry: 10\nevent: bye\ndata: {\"type\":\"bye\",\"reason\":\"overload\",\"reconnect\":\"after\",\"after_ms\":10}\n\n").await;
    drop(peer);
    let why = until(&mut client, |message| lost(message).filter(|why| *why != Loss::Cut)).await;
    assert_eq!(why, Loss::Bye { reason: "overload".into() });
    let (head, _peer) = server.request().await;
    assert_eq!(header(&head, "last-event-id"), Some("5-0"));
}

#[tokio::test]
async fn a_close_by_the_program_is_said_to_the_server() {
    let (server, builder) = Server::start().await;
    let mut client = builder.connect().unwrap();
    let (_, mut peer) = server.websocket().await;
    until(&mut client, |message| matches!(message, Message::Hello(_)).then_some(())).await;
    client.commands().ping().await.unwrap();
    peer.hear().await;
    let closing = tokio::spawn(client.close());
    assert_eq!(peer.frame().await, (0x88, 1000u16.to_be_bytes().to_vec()));
    drop(peer);
    closing.await.unwrap();
}
