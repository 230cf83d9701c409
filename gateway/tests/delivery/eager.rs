//! Who asks faster than it can be answered: what waits is bounded, every question has an answer,
//! nobody else waits for it.

use std::time::Duration;

use serde_json::json;
use testkit::gateway::{GatewayOptions, GatewayProcess};
use testkit::proxy::Proxy;
use testkit::redis::RedisServer;
use testkit::ws::{Frame, Heard, WsClient, opcode};
use tokio::time::sleep;

use super::{closed, hearing, n_open, on_redis, resident, until, ws};

/// Messages of one flood.
const FLOOD: usize = 20_000;

/// A gateway that lets its clients say as much as they like, and what it asks of Redis takes 20 ms.
async fn slow_to_answer(redis: &RedisServer) -> (Proxy, GatewayProcess) {
    let wire = Proxy::start(redis.addr()).await;
    let gateway = GatewayProcess::start(patient(&redis.url_at(wire.port()))).await;
    wire.delay(Duration::from_millis(10));
    (wire, gateway)
}

fn patient(redis: &str) -> GatewayOptions {
    on_redis(redis)
        .env("GATEWAY_CLIENT_RATE", "1000000")
        .env("GATEWAY_CLIENT_BURST", "1000000")
        .env("GATEWAY_AUTH_TIMEOUT", "30s")
}

fn subscribe(i: usize) -> Vec<u8> {
    let ask = json!({"type": "subscribe", "ref": i, "channel": format!("room:{i}"), "since": "0"});
    Frame::new(opcode::TEXT, ask.to_string()).bytes()
}

/// Asks and reads at once, as fast as it can; gives how many were granted and how many refused.
async fn flood(client: &mut WsClient) -> (usize, usize) {
    let asks: Vec<Vec<u8>> = (0..FLOOD)
        .collect::<Vec<_>>()
        .chunks(100)
        .map(|hundred| hundred.iter().flat_map(|i| subscribe(*i)).collect())
        .collect();
    let (mut granted, mut refused, mut asked) = (0, 0, 0);
    while granted + refused < FLOOD {
        // A window of questions is always out: more than may wait, less than the sockets hold.
        if asked < asks.len() && asked * 100 < granted + refused + 1_000 {
            client.send_bytes(&asks[asked]).await.expect("open");
            asked += 1;
            continue;
        }
        let Heard::Text(text) = client.next().await else { continue };
        let answer: serde_json::Value = serde_json::from_str(&text).expect("JSON");
        match answer["type"].as_str() {
            Some("ok") => granted += 1,
            // Too much waits; or its turn came, and the session is full.
            Some("error") if answer["code"] == "rate_limited" || answer["code"] == "too_many_channels" => refused += 1,
            _ => panic!("{answer}"),
        }
    }
    (granted, refused)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn who_asks_faster_than_redis_answers_is_told_so_and_nobody_waits_for_it() {
    let redis = RedisServer::plain();
    let (_wire, gateway) = slow_to_answer(&redis).await;
    let mut eager = ws(gateway.public(), &hearing(&["news"])).await;
    let mut calm = ws(gateway.public(), &hearing(&["news"])).await;
    let before = resident(&gateway);
    let mut n_answered = 0;
    let calmly = async {
        loop {
            calm.send_json(&json!({"type": "ping"})).await;
            assert_eq!(calm.json().await["type"], "pong");
            n_answered += 1;
            sleep(Duration::from_millis(10)).await;
        }
    };
    let (granted, refused) = tokio::select! {
        flooded = flood(&mut eager) => flooded,
        () = calmly => unreachable!("it never ends"),
    };
    println!("{granted} granted, {refused} refused, {n_answered} answers to the other");
    assert!(granted > 0 && refused > FLOOD / 2, "{granted} granted, {refused} refused");
    assert!(n_answered >= 10, "{n_answered} answers to the other");
    let grown = resident(&gateway).saturating_sub(before);
    assert!(grown < 24 << 20, "{grown} bytes for one who asks");
    // It is a session like any other afterwards.
    gateway.publish("news", &json!("after")).await;
    assert_eq!(eager.until("event").await.last().expect("an event")["data"], "after");
    assert_eq!(n_open(&gateway).await, 2.0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn who_asks_and_reads_no_answer_is_ended_and_nothing_piles_up() {
    let redis = RedisServer::plain();
    let (_wire, gateway) = slow_to_answer(&redis).await;
    let mut deaf = ws(gateway.public(), &hearing(&["news"])).await;
    let before = resident(&gateway);
    let ask = Frame::new(opcode::TEXT, json!({"type": "ping"}).to_string()).bytes().repeat(200);
    let flooding = async {
        while deaf.send_bytes(&ask).await.is_ok() {}
        std::future::pending::<()>().await;
    };
    let slow = closed("slow");
    tokio::select! {
        () = flooding => unreachable!("it never ends"),
        () = gateway.until_metric(&slow, 1.0) => {}
    }
    until("the session is gone", async || n_open(&gateway).await == 0.0).await;
    let grown = resident(&gateway).saturating_sub(before);
    assert!(grown < 24 << 20, "{grown} bytes for one who does not read");
    let mut other = ws(gateway.public(), &hearing(&["news"])).await;
    other.send_json(&json!({"type": "ping"})).await;
    assert_eq!(other.json().await["type"], "pong");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn who_asks_without_a_pause_is_beaten_for_like_anybody_and_has_its_pings_answered() {
    const BEATS: usize = 3;
    let redis = RedisServer::plain();
    let wire = Proxy::start(redis.addr()).await;
    let options =
        patient(&redis.url_at(wire.port())).env("GATEWAY_HEARTBEAT", "1s").env("GATEWAY_HEARTBEAT_TIMEOUT", "5s");
    let gateway = GatewayProcess::start(options).await;
    wire.delay(Duration::from_millis(25));
    let mut eager = ws(gateway.public(), &hearing(&["news"])).await;
    let before = resident(&gateway);
    let (mut asked, mut answered, mut n_pings, mut n_pongs, mut n_beats) = (0, 0, 0_u32, 0_u32, 0);
    while n_beats < BEATS {
        // As many questions are out as the sockets hold, each hundred with a ping behind it.
        if asked < answered + 1_000 {
            let mut hundred: Vec<u8> = (asked..asked + 100).flat_map(subscribe).collect();
            hundred.extend(Frame::new(opcode::PING, n_pings.to_be_bytes()).bytes());
            eager.send_bytes(&hundred).await.expect("open");
            (asked, n_pings) = (asked + 100, n_pings + 1);
            continue;
        }
        match eager.next().await {
            Heard::Text(_) => answered += 1,
            Heard::Pong(payload) => {
                assert_eq!(payload, n_pongs.to_be_bytes(), "each its own, in order");
                n_pongs += 1;
            }
            // Answered by the kit, behind all that was asked before.
            Heard::Ping(_) => n_beats += 1,
            other => panic!("{other:?}"),
        }
    }
    println!("{answered} answers and {n_pongs} pongs in {BEATS} beats");
    assert!(answered > 1_000 && n_pongs > 10, "{answered} answers, {n_pongs} pongs");
    let grown = resident(&gateway).saturating_sub(before);
    assert!(grown < 24 << 20, "{grown} bytes for one who asks");
    assert_eq!(n_open(&gateway).await, 1.0);
}
