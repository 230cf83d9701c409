//! What Redis is asked for on behalf of clients: a channel once, however many want it and however
//! often, and given up with the last; and who is told what while Redis refuses.

use std::net::SocketAddr;

use serde_json::{Value, json};
use testkit::gateway::GatewayProcess;
use testkit::redis::RedisServer;
use testkit::sse::SseClient;
use testkit::ws::WsClient;
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};
use tokio::net::TcpStream;

use super::{bearer, hearing, on_redis, sse, until, ws};

/// How often Redis was asked to do this, in however many channels.
fn n_asked(redis: &RedisServer, command: &str) -> usize {
    let stats = redis.cli(&["INFO", "commandstats"]);
    let line = stats.lines().find_map(|line| line.strip_prefix(&format!("cmdstat_{command}:calls=")));
    line.map_or(0, |rest| rest.split(',').next().and_then(|n| n.parse().ok()).expect("a number"))
}

async fn ask(client: &mut WsClient, kind: &str, channel: &str) {
    client.send_json(&json!({"type": kind, "channel": channel})).await;
    assert_eq!(client.until("ok").await.last().expect("ok")["channel"], channel);
}

/// Both publish; one copy of each comes to each, and nothing before.
async fn hear_once(clients: &mut [&mut WsClient], by: [&GatewayProcess; 2], what: &str) {
    for (i, gateway) in by.into_iter().enumerate() {
        gateway.publish("room:c", &json!([what, i])).await;
        for client in &mut *clients {
            let event = client.json().await;
            assert_eq!((&event["channel"], &event["data"]), (&json!("room:c"), &json!([what, i])), "{event}");
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_channel_is_asked_for_once_whoever_wants_it_and_given_up_with_the_last_of_them() {
    const N: usize = 10;
    let redis = RedisServer::plain();
    let (a, b) =
        tokio::join!(GatewayProcess::start(on_redis(&redis.url())), GatewayProcess::start(on_redis(&redis.url())));
    let mut first = ws(a.public(), &hearing(&[])).await;
    redis.cli(&["CONFIG", "RESETSTAT"]);
    // Three times by message; then by tokens, and by token, query and message at once.
    for _ in 0..3 {
        ask(&mut first, "subscribe", "room:c").await;
    }
    let (mut streams, auth) = (Vec::new(), bearer(&hearing(&["room:c"])));
    for _ in 0..N {
        streams.push(sse(a.public(), &hearing(&["room:c"])).await);
    }
    let path = "/v1/ws?channel=room:c&channel=room:c";
    let mut thrice = WsClient::connect(a.public(), path, &[("Authorization", &auth)]).await.expect("a session");
    let hello = thrice.until("ready").await.swap_remove(0);
    assert_eq!(hello["channels"], json!(["room:c"]));
    ask(&mut thrice, "subscribe", "room:c").await;
    assert_eq!((n_asked(&redis, "subscribe"), n_asked(&redis, "unsubscribe")), (1, 0));
    hear_once(&mut [&mut first, &mut thrice], [&a, &b], "at first").await;

    // A new link asks for all in one go, and being asked again asks Redis nothing.
    redis.cli(&["CONFIG", "RESETSTAT"]);
    assert_eq!(redis.kill_pubsub_links(), 2);
    for gateway in [&a, &b] {
        gateway.until_metric("gateway_redis_repairs_total", 1.0).await;
    }
    ask(&mut first, "subscribe", "room:c").await;
    assert_eq!(n_asked(&redis, "subscribe"), 2, "one a node");
    hear_once(&mut [&mut first, &mut thrice], [&a, &b], "over the new link").await;

    // One word is enough to leave, and the channel stays for those who hear it.
    ask(&mut first, "unsubscribe", "room:c").await;
    hear_once(&mut [&mut thrice], [&a, &b], "to who stayed").await;
    first.send_json(&json!({"type": "ping"})).await;
    assert_eq!(first.json().await["type"], "pong", "nothing came of what it left");
    ask(&mut thrice, "unsubscribe", "room:c").await;
    drop(streams);
    let numsub = || redis.cli(&["PUBSUB", "NUMSUB", "tidegate:live:room:c"]);
    until("nobody subscribes to it", async || numsub().ends_with("\n0")).await;
    assert_eq!((n_asked(&redis, "subscribe"), n_asked(&redis, "unsubscribe")), (2, 1));
}

/// A connection to Redis that stands while nobody else is let in.
struct Foot(BufReader<TcpStream>);

impl Foot {
    async fn in_the_door(redis: SocketAddr) -> Self {
        Self(BufReader::new(TcpStream::connect(redis).await.expect("Redis listens")))
    }

    /// The first line of the reply.
    async fn say(&mut self, line: &str) -> String {
        self.0.write_all(format!("{line}\r\n").as_bytes()).await.expect("Redis reads");
        let mut reply = String::new();
        self.0.read_line(&mut reply).await.expect("Redis replies");
        reply.trim_end().to_owned()
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn while_redis_lets_nobody_subscribe_no_newcomer_is_ready_and_no_answer_is_ok() {
    let redis = RedisServer::plain();
    let gateway = GatewayProcess::start(on_redis(&redis.url()).env("GATEWAY_AUTH_TIMEOUT", "3s")).await;
    let mut there = ws(gateway.public(), &hearing(&["news"])).await;
    let mut foot = Foot::in_the_door(redis.addr()).await;
    assert_eq!(foot.say("CONFIG SET maxclients 1").await, "+OK");
    assert_eq!(foot.say("CLIENT KILL TYPE pubsub").await, ":1");
    gateway.until_metric("gateway_redis_up{link=\"pubsub\"}", 0.0).await;

    let auth = bearer(&hearing(&["news"]));
    let headers = [("Authorization", auth.as_str())];
    let mut stream =
        SseClient::connect(gateway.public(), "/v1/sse?channel=room:new", &headers).await.expect("a stream");
    let mut socket = WsClient::connect(gateway.public(), "/v1/ws?channel=room:new", &headers).await.expect("a socket");
    assert_eq!(stream.block().await.kind(), "hello");
    assert_eq!(socket.json().await["type"], "hello");
    // Who asks by message is told so, within the deadline and each time, known to the node or not.
    for channel in ["room:new", "room:other"] {
        there.send_json(&json!({"type": "subscribe", "ref": channel, "channel": channel})).await;
        let answer = there.json().await;
        let told: [&Value; 3] = [&answer["type"], &answer["code"], &answer["ref"]];
        assert_eq!(told, [&json!("error"), &json!("unavailable"), &json!(channel)], "{answer}");
    }
    // The newcomers were there all the time and still heard nothing but hello.
    socket.send_json(&json!({"type": "ping"})).await;
    assert_eq!(socket.json().await["type"], "pong", "and no ready before it");
    assert_eq!(foot.say("CONFIG SET maxclients 10000").await, "+OK");
    socket.until("ready").await;
    assert_eq!(stream.until("ready").await.last().map(|block| block.kind()).as_deref(), Some("ready"));
    gateway.publish("room:new", &json!("heard")).await;
    assert_eq!(socket.until("event").await.last().expect("an event")["data"], "heard");
    assert_eq!(stream.block().await.json()["data"], "heard");
    ask(&mut there, "subscribe", "room:new").await;
    gateway.publish("room:new", &json!("by all")).await;
    assert_eq!(there.until("event").await.last().expect("an event")["data"], "by all");
}
