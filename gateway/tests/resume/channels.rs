//! One channel of an open session: asked for twice, asked for late with a history, left; and what
//! does not cross from one deployment to another, or from a stranger's message to a client.

use std::collections::HashMap;
use std::time::Duration;

use serde_json::{Value, json};
use testkit::gateway::{GatewayProcess, token};
use testkit::http;
use testkit::numbered::{Id, Publisher, Route, Transport, call_redis};
use testkit::redis::RedisServer;
use testkit::ws::WsClient;
use tokio::time::Instant;

use super::{CHANNELS, below, dice, function, options};

async fn ws(gateway: &GatewayProcess, claims: Value) -> WsClient {
    let bearer = format!("Bearer {}", token(&claims));
    let mut client =
        WsClient::connect(gateway.public(), "/v1/ws", &[("Authorization", &bearer)]).await.expect("a session");
    client.until("ready").await;
    client
}

async fn ask(client: &mut WsClient, message: Value, answer: &str) -> Vec<Value> {
    client.send_json(&message).await;
    client.until(answer).await
}

/// The `data` of the events up to the one whose data is `last`.
async fn data_until(client: &mut WsClient, last: &str) -> Vec<Value> {
    let mut data = Vec::new();
    while data.last().is_none_or(|data| *data != last) {
        let message = client.json().await;
        if message["type"] == "event" {
            data.push(message["data"].clone());
        }
    }
    data
}

#[tokio::test(flavor = "multi_thread")]
async fn a_channel_asked_for_again_and_again_delivers_once_and_is_left_once() {
    let redis = RedisServer::plain();
    let (a, b) =
        tokio::join!(GatewayProcess::start(options(&redis.url())), GatewayProcess::start(options(&redis.url())));
    let mut client = ws(&a, json!({"sub": "u", "subscribe": ["room"], "channels": ["news"]})).await;
    let subscribe = json!({"type": "subscribe", "ref": 1, "channel": "room"});
    for _ in 0..3 {
        ask(&mut client, subscribe.clone(), "ok").await;
    }
    a.publish("room", &json!("here")).await;
    b.publish("room", &json!("there")).await;
    assert_eq!(data_until(&mut client, "there").await, ["here", "there"]);
    assert_eq!(redis.cli(&["PUBSUB", "NUMSUB", "tidegate:live:room"]), "tidegate:live:room\n1");

    assert_eq!(redis.kill_pubsub_links(), 2);
    ask(&mut client, subscribe, "ok").await;
    b.publish("room", &json!("after the loss")).await;
    b.publish("room", &json!("end")).await;
    assert_eq!(data_until(&mut client, "end").await, ["after the loss", "end"]);
    // The other gateway's link may still be on its way; this one has delivered.
    assert_eq!(redis.cli(&["PUBSUB", "NUMSUB", "tidegate:live:room"]), "tidegate:live:room\n1");

    ask(&mut client, json!({"type": "unsubscribe", "ref": 2, "channel": "room"}), "ok").await;
    a.publish("room", &json!("unheard")).await;
    a.publish("news", &json!("heard")).await;
    assert_eq!(data_until(&mut client, "heard").await, ["heard"]);
}

/// What came for a channel asked for late: replayed before the answer, live after it.
struct Joined {
    events: Vec<(Id, u64)>,
    is_live: bool,
}

#[tokio::test(flavor = "multi_thread")]
async fn a_channel_asked_for_late_with_a_cursor_is_replayed_whole_before_the_answer() {
    let dice = dice();
    let redis = RedisServer::plain();
    let gateway = GatewayProcess::start(options(&redis.url()).env("GATEWAY_CLIENT_BURST", "100000")).await;
    let publisher = Publisher::start(&CHANNELS, vec![Route::Admin(gateway.admin()), function(&redis)], 1_000);
    let mut client = ws(&gateway, json!({"sub": "u", "subscribe": CHANNELS, "channels": [CHANNELS[0]]})).await;
    let mut cursor = Id::default();
    let (mut first, mut steady): (Option<Id>, Vec<(Id, u64)>) = (None, Vec::new());
    for round in 0..25 {
        let channel = CHANNELS[1 + round % 2];
        let known = publisher.ledger().between(channel, Id::default(), publisher.ledger().last());
        let since = match known.len() as u64 {
            0 => Id::default(),
            n => known[(n - 1 - below(&dice, n.min(400))) as usize].0,
        };
        let text = if since == Id::default() { "0".to_owned() } else { since.to_string() };
        client.send_json(&json!({"type": "subscribe", "ref": round, "channel": channel, "since": text})).await;
        let mut joined = Joined { events: Vec::new(), is_live: false };
        let mut until_left = 5 + below(&dice, 30);
        let mut is_leaving = false;
        loop {
            let message = client.json().await;
            let id = message["id"].as_str().map(Id::new);
            match message["type"].as_str().expect("a type") {
                "event" => {
                    let (id, number) = (id.expect("logged"), message["data"]["n"].as_u64().expect("numbered"));
                    let is_replay = message["replay"] == true;
                    if !is_replay {
                        assert!(id > cursor, "live ids rise: {message} at {cursor}");
                        cursor = id;
                    }
                    if message["channel"] == channel {
                        assert_eq!(is_replay, !joined.is_live, "replay before the answer, live after it: {message}");
                        joined.events.push((id, number));
                    } else if message["channel"] == CHANNELS[0] {
                        assert!(!is_replay, "{message}");
                        first.get_or_insert(id);
                        steady.push((id, number));
                    } else {
                        panic!("a channel that was left: {message}");
                    }
                }
                "ok" if message["ref"] == round => {
                    assert_eq!(message["resume"], if since == Id::default() { "new" } else { "ok" }, "{message}");
                    let at = id.expect("ok has an id");
                    assert!(at >= cursor, "{message} at {cursor}");
                    let replayed = joined.events.last().map_or(Id::default(), |(id, _)| *id);
                    assert!(at >= replayed, "{message} after {replayed}");
                    cursor = at;
                    joined.is_live = true;
                }
                "ok" => break,
                other => panic!("{other}: {message}"),
            }
            if joined.is_live && !is_leaving {
                until_left -= 1;
                is_leaving = until_left == 0;
                if is_leaving {
                    client.send_json(&json!({"type": "unsubscribe", "ref": "left", "channel": channel})).await;
                }
            }
        }
        let end = joined.events.last().expect("some came").0;
        // Acknowledged to the publisher a little later than delivered.
        publisher.until_acknowledged(end).await;
        assert_eq!(joined.events, publisher.ledger().between(channel, since, end), "round {round} on {channel}");
    }
    let ledger = publisher.stop().await;
    let (from, to) = (first.expect("some came"), steady.last().expect("some came").0);
    assert_eq!(steady[1..], ledger.between(CHANNELS[0], from, to), "the channel that was held all the time");
}

#[tokio::test(flavor = "multi_thread")]
async fn nothing_crosses_between_two_deployments_on_one_redis() {
    let redis = RedisServer::plain();
    let of = |prefix: &str| GatewayProcess::start(options(&redis.url()).env("GATEWAY_REDIS_PREFIX", prefix));
    // One begins with the other, with and without a colon.
    let gateways = [of("a").await, of("ab").await, of("a:b").await];
    let mut clients = Vec::new();
    for gateway in &gateways {
        clients.push(ws(gateway, json!({"sub": "u", "jti": "t", "channels": ["news"]})).await);
    }
    for (i, gateway) in gateways.iter().enumerate() {
        gateway.publish("news", &json!(format!("of {i}"))).await;
    }
    for (i, gateway) in gateways.iter().enumerate() {
        let end = gateway.try_publish(&json!({"channel": "news", "data": "end", "ephemeral": true})).await;
        assert_eq!(end.status(), 200);
        let heard = data_until(&mut clients[i], "end").await;
        assert_eq!(heard, [format!("of {i}"), "end".to_owned()]);
    }
    // A revocation of the same user and token, in one of them.
    let revoked = http::post_json(gateways[0].admin(), "/v1/revocations", &json!({"jti": "t"})).await;
    assert_eq!(revoked.status(), 204);
    assert_eq!(clients[0].until_closed().await.1, 4403);
    for i in [1, 2] {
        gateways[i].publish("news", &json!("still here")).await;
        assert_eq!(data_until(&mut clients[i], "still here").await, ["still here"]);
        ws(&gateways[i], json!({"sub": "u", "jti": "t"})).await;
    }
}

async fn skipped(gateway: &GatewayProcess) -> f64 {
    let text = http::get(gateway.probes(), "/metrics").await;
    let lines = text.text().lines().filter(|line| line.starts_with("gateway_events_skipped_total{"));
    lines.filter_map(|line| line.rsplit(' ').next()?.parse::<f64>().ok()).sum()
}

#[tokio::test(flavor = "multi_thread")]
async fn poison_on_the_live_channel_is_counted_and_skipped() {
    let redis = RedisServer::plain();
    let gateway = GatewayProcess::start(options(&redis.url())).await;
    let mut client = ws(&gateway, json!({"sub": "u", "channels": ["news"]})).await;
    let live = b"tidegate:live:news".to_vec();
    let poison: [Vec<u8>; 6] = [
        b"{".to_vec(),
        b"null".to_vec(),
        vec![b'['; 100_000],
        br#"{"version":99,"payload":"?"}"#.to_vec(),
        b"\xff\xfe\x00\x80".to_vec(),
        vec![b'x'; 20 << 20],
    ];
    let n_poison = poison.len() as f64;
    for message in poison {
        let replies = call_redis(redis.addr(), &[vec![b"PUBLISH".to_vec(), live.clone(), message]]).await;
        assert_eq!(replies, [":1"], "it was heard");
    }
    let good = br#"{"event":"e","data":"ephemeral"}"#.to_vec();
    let sent = Instant::now();
    assert_eq!(call_redis(redis.addr(), &[vec![b"PUBLISH".to_vec(), live.clone(), good]]).await, [":1"]);
    assert_eq!(data_until(&mut client, "ephemeral").await, ["ephemeral"]);
    assert!(sent.elapsed() < Duration::from_secs(10), "{:?}", sent.elapsed());
    while skipped(&gateway).await < n_poison {
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    assert_eq!(skipped(&gateway).await, n_poison);

    // More than Redis keeps for a subscriber: it cuts the link, and nothing logged is missed.
    call_redis(redis.addr(), &[vec![b"PUBLISH".to_vec(), live, vec![b'x'; 50 << 20]]]).await;
    gateway.publish("news", &json!("logged")).await;
    assert_eq!(data_until(&mut client, "logged").await, ["logged"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn connections_to_redis_do_not_grow_with_clients() {
    let redis = RedisServer::plain();
    let (a, b) =
        tokio::join!(GatewayProcess::start(options(&redis.url())), GatewayProcess::start(options(&redis.url())));
    let mut followers = Vec::new();
    for i in 0..300 {
        let (channel, transport) = (format!("channel-{}", i % 100), Transport::ALL[i % 2]);
        let token = token(&json!({"sub": format!("u{}", i % 50), "channels": [channel]}));
        let mut follower = testkit::numbered::Follower::new(format!("{i}"), transport, &token, &[&channel]);
        follower.connect(if i % 4 < 2 { a.public() } else { b.public() }).await;
        followers.push(follower);
    }
    for follower in &mut followers {
        follower.until(|message| message["type"] == "ready").await;
    }
    let clients = redis.cli(&["CLIENT", "LIST"]);
    println!("{} connections to Redis", clients.lines().count());
    assert!(clients.lines().count() <= 2 * 12, "{clients}");
    let pubsub = redis.cli(&["CLIENT", "LIST", "TYPE", "pubsub"]);
    assert_eq!(pubsub.lines().count(), 2, "one link a node: {pubsub}");
    // Every channel once a node, and every client hears its own.
    let mut ids = HashMap::new();
    for i in 0..100 {
        let channel = format!("channel-{i}");
        let id = a.publish(&channel, &json!({"n": i})).await;
        ids.insert(i, Id::new(&id));
    }
    for (i, follower) in followers.iter_mut().enumerate() {
        follower.until_at(ids[&(i % 100)]).await;
        assert_eq!(follower.n_seen(), 1);
    }
}
