//! What a cursor gets that cannot be honoured, or only in part: an explicit gap at once, a position
//! to go on from, and the session; never silence and never an error.

use std::net::SocketAddr;
use std::time::Duration;

use futures_util::future::join_all;
use serde_json::{Value, json};
use testkit::gateway::{GatewayProcess, token};
use testkit::numbered::{Follower, Id, Publisher, Route, Transport};
use testkit::redis::RedisServer;
use testkit::sse::SseClient;
use testkit::ws::WsClient;

use super::{CHANNELS, function, hearing_all, options};

/// All that comes up to `ready`, from this cursor.
async fn resumed(gateway: SocketAddr, token: &str, transport: Transport, cursor: &str) -> Vec<Value> {
    let mut follower = Follower::new(format!("{transport:?}"), transport, token, &[]).resuming(cursor);
    follower.connect(gateway).await;
    let mut messages = Vec::new();
    follower
        .until(|message| {
            messages.push(message.clone());
            message["type"] == "ready"
        })
        .await;
    assert_eq!(messages[0]["type"], "hello");
    messages
}

fn of_type<'a>(messages: &'a [Value], kind: &str) -> Vec<&'a Value> {
    messages.iter().filter(|message| message["type"] == kind).collect()
}

fn numbers(messages: &[Value]) -> Vec<u64> {
    of_type(messages, "event").iter().map(|event| event["data"]["n"].as_u64().expect("numbered")).collect()
}

async fn publish(gateway: &GatewayProcess, channel: &str, numbers: std::ops::Range<u64>) -> Vec<String> {
    let mut ids = Vec::new();
    for n in numbers {
        ids.push(gateway.publish(channel, &json!({ "n": n })).await);
    }
    ids
}

fn only_room() -> String {
    token(&json!({"sub": "u", "channels": ["room"]}))
}

#[tokio::test(flavor = "multi_thread")]
async fn a_history_shorter_than_what_was_missed_is_told_and_one_that_just_suffices_is_whole() {
    let redis = RedisServer::plain();
    let gateway = GatewayProcess::start(options(&redis.url()).env("GATEWAY_HISTORY_SIZE", "5")).await;
    let mut ids = publish(&gateway, "room", 0..1).await;
    ids.extend(publish(&gateway, "room", 1..8).await);
    for transport in Transport::ALL {
        let whole = resumed(gateway.public(), &only_room(), transport, &ids[2]).await;
        assert_eq!(numbers(&whole), [3, 4, 5, 6, 7], "exactly five missed");
        assert!(of_type(&whole, "gap").is_empty(), "{whole:?}");
        let ready = whole.last().unwrap();
        assert_eq!((&ready["resume"], &ready["replayed"], &ready["id"]), (&json!("ok"), &json!(5), &json!(ids[7])));

        // Six and seven missed: five come, and that it is not all is said before them.
        for since in [1, 0] {
            let part = resumed(gateway.public(), &only_room(), transport, &ids[since]).await;
            assert_eq!(numbers(&part), [3, 4, 5, 6, 7]);
            let kinds: Vec<_> = part.iter().map(|message| message["type"].as_str().unwrap()).collect();
            let gap = kinds.iter().position(|kind| *kind == "gap").expect("a gap");
            assert!(gap < kinds.iter().position(|kind| *kind == "event").unwrap(), "{kinds:?}");
            // The room has a hole; the user's own channel never had an event and has none.
            let gaps = of_type(&part, "gap");
            assert_eq!(gaps.len(), 1, "{gaps:?}");
            assert_eq!((&gaps[0]["channel"], &gaps[0]["reason"]), (&json!("room"), &json!("evicted")));
            assert_eq!(part.last().unwrap()["resume"], "gap");
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_cursor_older_than_the_history_is_told_expired() {
    let redis = RedisServer::plain();
    let gateway = GatewayProcess::start(options(&redis.url()).env("GATEWAY_HISTORY_TTL", "3s")).await;
    let ids = publish(&gateway, "room", 0..4).await;
    let fresh = resumed(gateway.public(), &only_room(), Transport::Ws, &ids[0]).await;
    assert_eq!(numbers(&fresh), [1, 2, 3]);
    assert_eq!(fresh.last().unwrap()["resume"], "ok");
    // The TTL itself is what is waited for.
    tokio::time::sleep(Duration::from_millis(3_100)).await;
    publish(&gateway, "room", 4..5).await;
    for transport in Transport::ALL {
        let late = resumed(gateway.public(), &only_room(), transport, &ids[0]).await;
        let reasons: Vec<_> = of_type(&late, "gap").iter().map(|gap| gap["reason"].clone()).collect();
        assert!(!reasons.is_empty() && reasons.iter().all(|reason| *reason == "expired"), "{late:?}");
        assert_eq!(late.last().unwrap()["resume"], "gap");
        assert_eq!(numbers(&late).last(), Some(&4), "what is kept comes all the same");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_id_that_this_log_never_gave_is_told_at_once_and_live_events_follow() {
    let redis = RedisServer::plain();
    let gateway = GatewayProcess::start(options(&redis.url())).await;
    let ids = publish(&gateway, "room", 0..3).await;
    let other = gateway.publish("elsewhere", &json!({"n": 9})).await;
    let after = publish(&gateway, "room", 3..5).await;
    let last = Id::new(after.last().unwrap());
    let (ms, n) = ids[0].split_once('-').unwrap();
    let n: u64 = n.parse().unwrap();
    let future = format!("{}-{n}", ms.parse::<u64>().unwrap() + 1_000_000_000);
    let other_life = format!("{ms}-{}", n ^ 1);
    let mut live = 10;
    for transport in Transport::ALL {
        // Another channel's id is a place in the same log.
        let whole = resumed(gateway.public(), &only_room(), transport, &other).await;
        assert_eq!((&numbers(&whole)[..2], &whole.last().unwrap()["resume"]), (&[3, 4][..], &json!("ok")));
        for unknown in [&future, &other_life] {
            let follower = Follower::new(format!("{transport:?}"), transport, &only_room(), &["room"]);
            let mut follower = follower.resuming(unknown);
            follower.connect(gateway.public()).await;
            let ready = follower.until(|message| message["type"] == "ready").await;
            assert_eq!(ready["resume"], "gap");
            assert!(Id::new(ready["id"].as_str().unwrap()) >= last, "it goes on from where the log stands");
            let gaps: Vec<_> =
                follower.gaps.iter().map(|gap| (gap["channel"].clone(), gap["reason"].clone())).collect();
            assert_eq!(gaps.len(), 2, "one a channel: {gaps:?}");
            assert!(gaps.iter().all(|(_, reason)| *reason == "reset"), "{gaps:?}");
            live += 1;
            let id = gateway.publish("room", &json!({ "n": live })).await;
            follower.until_at(Id::new(&id)).await;
            assert_eq!(follower.n_seen(), 1);
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_header_beats_the_stale_cursor_of_the_url() {
    let redis = RedisServer::plain();
    let gateway = GatewayProcess::start(options(&redis.url())).await;
    let ids = publish(&gateway, "room", 0..6).await;
    let bearer = format!("Bearer {}", only_room());
    let (ws, sse) = (format!("/v1/ws?last_event_id={}", ids[0]), format!("/v1/sse?last_event_id={}", ids[0]));
    for name in ["Last-Event-ID", "last-event-id", "LAST-EVENT-ID", "lAsT-eVeNt-Id"] {
        let headers = [("Authorization", bearer.as_str()), (name, ids[3].as_str())];
        let mut client = WsClient::connect(gateway.public(), &ws, &headers).await.expect("a session");
        assert_eq!(numbers(&client.until("ready").await), [4, 5], "{name}");
        let mut client = SseClient::connect(gateway.public(), &sse, &headers).await.expect("a session");
        let messages: Vec<_> = client.until("ready").await.iter().map(|block| block.json()).collect();
        assert_eq!(numbers(&messages), [4, 5], "{name}");
    }
    let headers = [("Authorization", bearer.as_str())];
    let mut client = WsClient::connect(gateway.public(), &ws, &headers).await.expect("a session");
    assert_eq!(numbers(&client.until("ready").await), [1, 2, 3, 4, 5], "the query alone counts");
}

#[tokio::test(flavor = "multi_thread")]
async fn without_history_a_resume_says_so() {
    let redis = RedisServer::plain();
    let gateway = GatewayProcess::start(options(&redis.url()).env("GATEWAY_HISTORY_SIZE", "0")).await;
    let claims = token(&json!({"sub": "u", "channels": ["room"], "subscribe": ["late"]}));
    for transport in Transport::ALL {
        let mut follower = Follower::new(format!("{transport:?}"), transport, &claims, &["room"]);
        follower.connect(gateway.public()).await;
        let ready = follower.until(|message| message["type"] == "ready").await;
        assert_eq!((&ready["resume"], follower.gaps.len()), (&json!("new"), 0));
        follower.cut();
        gateway.publish("room", &json!({"n": 1})).await;
        follower.connect(gateway.public()).await;
        let ready = follower.until(|message| message["type"] == "ready").await;
        assert_eq!((&ready["resume"], &ready["replayed"]), (&json!("gap"), &json!(0)));
        assert!(!follower.gaps.is_empty() && follower.gaps.iter().all(|gap| gap["reason"] == "no_history"));
        let id = gateway.publish("room", &json!({"n": 2})).await;
        follower.until_at(Id::new(&id)).await;
        assert_eq!(follower.n_seen(), 1, "live events are not history");
    }
    let since = gateway.publish("late", &json!({"n": 1})).await;
    gateway.publish("late", &json!({"n": 2})).await;
    let bearer = format!("Bearer {claims}");
    let mut client =
        WsClient::connect(gateway.public(), "/v1/ws", &[("Authorization", &bearer)]).await.expect("a session");
    client.until("ready").await;
    client.send_json(&json!({"type": "subscribe", "channel": "late", "since": since})).await;
    let answer = client.until("ok").await;
    assert_eq!((&answer[0]["reason"], &answer[1]["resume"]), (&json!("no_history"), &json!("gap")), "{answer:?}");
}

/// Cursors of clients that err, age or attack. `None`: they are honoured as absent or as `0`.
fn odd_cursors() -> Vec<String> {
    let mut odd: Vec<String> = [
        "-1",
        "1",
        "9007199254740993",
        "9223372036854775808",
        "18446744073709551616",
        "abc",
        "1-",
        "-",
        "1-1-1",
        "0-0x",
        "0~1-1",
        "1-1,2-2",
        "99999999999999999999-1",
        "null",
        "NaN",
        "1 1",
        "1\t1",
        "é-1",
        "%00",
        "\u{7f}",
    ]
    .map(str::to_owned)
    .to_vec();
    odd.push("1".repeat(300));
    // Well formed, and not of this log.
    odd.extend(
        ["1-1", "0-0", "0-1", "18446744073709551615-18446744073709551615", "1-9007199254740993"].map(str::to_owned),
    );
    odd
}

fn assert_told(messages: &[Value], cursor: &str) {
    let reasons: Vec<_> = of_type(messages, "gap").iter().map(|gap| gap["reason"].as_str().unwrap()).collect();
    assert!(!reasons.is_empty(), "{cursor:?} was taken: {messages:?}");
    assert!(reasons.iter().all(|reason| ["unknown_position", "reset"].contains(reason)), "{cursor:?}: {reasons:?}");
    assert_eq!(messages.last().unwrap()["resume"], "gap", "{cursor:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn odd_cursors_never_refuse_a_session_and_are_always_told() {
    let redis = RedisServer::plain();
    let gateway = GatewayProcess::start(options(&redis.url()).env("GATEWAY_CLIENT_BURST", "100000")).await;
    let ids = publish(&gateway, "room", 0..3).await;
    let token = token(&json!({"sub": "u", "channels": ["room"], "subscribe": ["late"]}));
    let bearer = format!("Bearer {token}");
    gateway.publish("late", &json!({"n": 7})).await;
    let mut talker =
        WsClient::connect(gateway.public(), "/v1/ws", &[("Authorization", &bearer)]).await.expect("a session");
    talker.until("ready").await;
    for cursor in odd_cursors() {
        for transport in Transport::ALL {
            // A control character is no header value: 400 is right.
            if !cursor.contains('\u{7f}') {
                assert_told(&resumed(gateway.public(), &token, transport, &cursor).await, &cursor);
            }
        }
        let encoded: String = cursor.bytes().map(|b| format!("%{b:02X}")).collect();
        let path = format!("/v1/ws?last_event_id={encoded}");
        let mut client =
            WsClient::connect(gateway.public(), &path, &[("Authorization", &bearer)]).await.expect("a session");
        assert_told(&client.until("ready").await, &cursor);
        talker.send_json(&json!({"type": "subscribe", "channel": "late", "since": cursor})).await;
        assert_told(&talker.until("ok").await, &cursor);
        talker.send_json(&json!({"type": "unsubscribe", "channel": "late"})).await;
        talker.until("ok").await;
    }
    // Absent, empty and `0` have their own meaning.
    for transport in Transport::ALL {
        let empty = resumed(gateway.public(), &token, transport, "").await;
        assert_eq!((numbers(&empty), &empty.last().unwrap()["resume"]), (vec![], &json!("new")));
        let all = resumed(gateway.public(), &token, transport, "0").await;
        assert_eq!((numbers(&all), &all.last().unwrap()["resume"]), (vec![0, 1, 2], &json!("new")));
        assert!(of_type(&all, "gap").is_empty(), "{all:?}");
    }
    for (since, resume) in [("", "new"), ("0", "new")] {
        talker.send_json(&json!({"type": "subscribe", "channel": "late", "since": since})).await;
        let answer = talker.until("ok").await;
        assert_eq!(answer.last().unwrap()["resume"], resume);
        assert_eq!(numbers(&answer), if since == "0" { vec![7] } else { vec![] });
        talker.send_json(&json!({"type": "unsubscribe", "channel": "late"})).await;
        talker.until("ok").await;
    }
    // Hostile heads: served, or refused as a head, never an error of ours.
    for headers in [
        vec![("Last-Event-ID", "1".repeat(10_240))],
        vec![("Last-Event-ID", "1".repeat(16_384))],
        vec![("Last-Event-ID", ids[0].clone()), ("Last-Event-ID", ids[1].clone())],
        vec![("Last-Event-ID", "\u{7f}".to_owned())],
        vec![("Last-Event-ID", "\u{1}".to_owned())],
    ] {
        let mut fields = vec![("Authorization", bearer.as_str())];
        fields.extend(headers.iter().map(|(name, value)| (*name, value.as_str())));
        match SseClient::connect(gateway.public(), "/v1/sse", &fields).await {
            Ok(mut client) => {
                let messages: Vec<_> = client.until("ready").await.iter().map(|block| block.json()).collect();
                assert_told(&messages, &headers[0].1);
            }
            Err(refused) => assert!(matches!(refused.status(), 400 | 431), "{}", refused.text()),
        }
    }
    assert!(!gateway.stderr().contains("panicked"), "{}", gateway.stderr());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_flood_of_old_cursors_is_capped_told_and_hurts_nobody_who_is_live() {
    let redis = RedisServer::plain();
    let gateway = GatewayProcess::start(options(&redis.url()).env("GATEWAY_REPLAY_MAX", "1000")).await;
    let oldest = gateway.publish("orders", &json!({"n": 1_000_000})).await;
    let filler = Publisher::start(&["orders"], vec![function(&redis)], 50_000);
    filler.more(3_000).await;
    filler.stop().await;
    let mut live = Vec::new();
    for i in 0..10 {
        let mut follower = Follower::new(format!("live {i}"), Transport::ALL[i % 2], &hearing_all("live"), &CHANNELS);
        follower.connect(gateway.public()).await;
        follower.until(|message| message["type"] == "ready").await;
        live.push(follower);
    }
    let publisher = Publisher::start(&["prices"], vec![Route::Admin(gateway.admin())], 200);
    let flood = join_all((0..50).map(|i| {
        let token = token(&json!({"sub": "old", "channels": ["orders"]}));
        let (gateway, oldest) = (gateway.public(), oldest.clone());
        async move { resumed(gateway, &token, Transport::ALL[i % 2], &oldest).await }
    }));
    for messages in flood.await {
        let gaps = of_type(&messages, "gap");
        assert_eq!(gaps.iter().map(|gap| &gap["reason"]).collect::<Vec<_>>(), ["overflow"]);
        let numbers = numbers(&messages);
        assert_eq!(numbers.len(), 1_000, "the newest, each once");
        assert!(numbers.is_sorted_by(|a, b| a < b));
        assert_eq!(messages.last().unwrap()["replayed"], 1_000);
    }
    let ledger = publisher.stop().await;
    for mut follower in live {
        follower.until_at(ledger.last()).await;
        follower.assert_complete(&ledger);
    }
}
