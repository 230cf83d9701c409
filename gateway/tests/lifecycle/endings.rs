//! Every reason to end a session: its close code, what the client is told to do, its label.

use std::time::Duration;

use hub::clock::Clock;
use serde_json::{Value, json};
use testkit::gateway::{GatewayOptions, GatewayProcess, Signal, token};
use testkit::http;
use testkit::lag::Lag;
use testkit::proxy::Proxy;
use testkit::redis::RedisServer;
use testkit::sse::SseClient;
use testkit::ws::{Answer, Frame, Heard, WsClient, opcode};
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep};

use crate::{
    SOON, bearer, claims, closed, first_event, n_open, options, sse, sse_end, until_open, ws, ws_end, ws_small,
};

fn unix() -> u64 {
    Clock::system().unix().as_secs()
}

async fn revoke(gateway: &GatewayProcess, what: &Value) {
    let answer = http::post_json(gateway.admin(), "/v1/revocations", what).await;
    assert_eq!(answer.status(), 204, "{}", answer.text());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nobody_stays_beyond_the_maximum_age_and_ages_are_spread() {
    const N: usize = 40;
    let gateway =
        GatewayProcess::start(options().env("GATEWAY_MAX_AGE_MIN", "1s").env("GATEWAY_MAX_AGE_MAX", "3s")).await;
    let (lag, mut ends) = (Lag::watch(), JoinSet::new());
    for i in 0..N {
        let opened = Instant::now();
        let claims = claims(&format!("u{i}"));
        if i % 2 == 0 {
            let client = ws(&gateway, &claims).await;
            ends.spawn(async move { (opened, ws_end(client).await) });
        } else {
            let client = sse(&gateway, &claims).await;
            ends.spawn(async move { (opened, sse_end(client).await) });
        }
    }
    let ends = ends.join_all().await;
    let mut ages: Vec<Duration> = ends.iter().map(|(opened, end)| end.at - *opened).collect();
    ages.sort();
    for (_, end) in &ends {
        assert_eq!(end.words(), ("recycle", 1012, "after"));
    }
    assert!(ages[0] >= Duration::from_secs(1), "{ages:?}");
    assert!(ages[N - 1] < Duration::from_secs(5) + lag.longest(), "{ages:?}");
    // Forty draws from two seconds that all fall into half of them: one in 2^39.
    assert!(ages[N - 1] - ages[0] > Duration::from_secs(1), "{ages:?}");
    gateway.until_metric(&closed("recycle"), N as f64).await;
    assert_eq!(n_open(&gateway).await, 0.0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn planned_ends_have_the_close_codes_that_are_set_and_no_others_can_be() {
    let set = |drain: &str, recycle: &str, shed: &str| {
        options()
            .env("GATEWAY_CLOSE_CODE_DRAIN", drain)
            .env("GATEWAY_CLOSE_CODE_RECYCLE", recycle)
            .env("GATEWAY_CLOSE_CODE_SHED", shed)
    };
    let aged = set("1012", "1013", "1001").env("GATEWAY_MAX_AGE_MIN", "1s").env("GATEWAY_MAX_AGE_MAX", "1500ms");
    let mut gateway = GatewayProcess::start(aged.env("GATEWAY_DRAIN_GRACE", "0s")).await;
    // Busy, it is there until the drain.
    let mut busy = ws(&gateway, &claims("busy")).await;
    busy.send_json(&json!({"type": "busy", "for_ms": 60_000})).await;
    let (by_ws, by_sse) = (ws(&gateway, &claims("w")).await, sse(&gateway, &claims("s")).await);
    let (by_ws, by_sse) = tokio::join!(ws_end(by_ws), sse_end(by_sse));
    for end in [by_ws, by_sse] {
        assert_eq!(end.words(), ("recycle", 1013, "after"));
    }
    gateway.signal(Signal::Term);
    assert_eq!(ws_end(busy).await.words(), ("drain", 1012, "after"));
    assert!(gateway.wait(SOON).await.success(), "{}", gateway.stderr());
    // A client that is told to stay away, or that it was its own fault, does not come back.
    for code in ["1000", "1008", "4403", "0"] {
        for options in [set(code, "1012", "1012"), set("1001", code, "1012"), set("1001", "1012", code)] {
            let refused = options.args(&["config", "--check"]).run(SOON).await;
            assert_eq!(refused.status.code(), Some(64), "{code}: {}", refused.stderr);
            assert!(refused.stderr.contains("GATEWAY_CLOSE_CODE_"), "{}", refused.stderr);
        }
    }
}

/// What the kernels between do not hold any more: events of nearly 64 KiB.
async fn flood(gateway: &GatewayProcess, n: usize) {
    let data = json!("x".repeat(60_000));
    for _ in 0..n {
        gateway.publish("news", &data).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_reader_that_stops_is_slow_once_its_outbox_is_full() {
    let gateway =
        GatewayProcess::start(options().env("GATEWAY_OUTBOX_BYTES", "256KiB").env("GATEWAY_CLOSE_TIMEOUT", "20s"))
            .await;
    let stopped = ws_small(gateway.public(), &claims("stopped")).await;
    let mut reading = sse(&gateway, &claims("reading")).await;
    for _ in 0..200 {
        flood(&gateway, 1).await;
        first_event(&mut reading).await;
    }
    // It was told, behind what it had been sent a part of already.
    assert_eq!(ws_end(stopped).await.words(), ("slow", 1013, "after"));
    gateway.until_metric(&closed("slow"), 1.0).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_write_that_makes_no_progress_is_slow_at_its_deadline() {
    let gateway = GatewayProcess::start(
        options()
            .env("GATEWAY_OUTBOX_BYTES", "64MiB")
            .env("GATEWAY_WRITE_TIMEOUT", "1s")
            .env("GATEWAY_CLOSE_TIMEOUT", "1s"),
    )
    .await;
    let stopped = ws_small(gateway.public(), &claims("stopped")).await;
    flood(&gateway, 150).await;
    gateway.until_metric(&closed("slow"), 1.0).await;
    until_open(&gateway, 0.0).await;
    drop(stopped);
}

fn beating() -> GatewayOptions {
    options().env("GATEWAY_HEARTBEAT", "1s").env("GATEWAY_HEARTBEAT_TIMEOUT", "3s")
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn who_gives_no_sign_of_life_is_cut_and_who_gives_any_is_not() {
    let gateway = GatewayProcess::start(beating()).await;
    let opened = Instant::now();
    let mut silent = ws(&gateway, &claims("silent")).await;
    silent.answer_pings(Answer::Never);
    let mut talking = ws(&gateway, &claims("talking")).await;
    talking.answer_pings(Answer::Never);
    let mut ponging = ws(&gateway, &claims("ponging")).await;
    ponging.answer_pings(Answer::Never);
    let listening = sse(&gateway, &claims("listening")).await;

    let cut = tokio::spawn(async move {
        let (messages, code) = silent.until_closed().await;
        (opened.elapsed(), messages, code)
    });
    // Neither answers a ping; both say something of their own, for longer than the silent one has.
    for _ in 0..14 {
        talking.send_json(&json!({"type": "ping"})).await;
        ponging.send_frame(&Frame::new(opcode::PONG, "unasked")).await.unwrap();
        sleep(Duration::from_millis(500)).await;
    }
    let (after, messages, code) = cut.await.unwrap();
    assert_eq!((code, messages.last()), (1006, None), "cut without a word");
    // The first ping is drawn from the second half of the interval.
    assert!(after >= Duration::from_millis(3_500) && after < Duration::from_secs(12), "{after:?}");
    gateway.until_metric(&closed("unresponsive"), 1.0).await;
    assert_eq!(n_open(&gateway).await, 3.0);
    drop((talking, ponging, listening));
    gateway.until_metric(&closed("lost"), 3.0).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_session_ends_with_its_token_and_cannot_come_back_with_it() {
    let lag = Lag::watch();
    let gateway = GatewayProcess::start(options()).await;
    let exp = unix() + 4;
    let claims = json!({"sub": "42", "channels": ["news"], "exp": exp});
    let mut by_ws = ws(&gateway, &claims).await;
    let by_sse = sse(&gateway, &claims).await;
    let warned = by_ws.until("token_expiring").await.pop().unwrap();
    let in_ms = warned["in_ms"].as_u64().unwrap();
    assert!(in_ms > 0 && in_ms <= 2_500, "half of what it had left: {in_ms}");
    let (by_ws, by_sse) = tokio::join!(ws_end(by_ws), sse_end(by_sse));
    let late = Clock::system().unix().as_secs_f64() - exp as f64;
    assert!((-1.0..1.5 + lag.longest().as_secs_f64()).contains(&late), "{late} s after exp");
    assert_eq!(by_ws.words(), ("token_expired", 4401, "reauth"));
    assert_eq!(by_sse.words(), ("token_expired", 4401, "reauth"));
    gateway.until_metric(&closed("token_expired"), 2.0).await;
    let refused =
        WsClient::connect(gateway.public(), "/v1/ws", &[("Authorization", &bearer(&claims))]).await.err().unwrap();
    assert_eq!((refused.status(), &refused.json()["code"]), (401, &json!("token_expired")));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_revocation_ends_open_sessions_on_every_node_within_a_second() {
    let redis = RedisServer::plain();
    let options = || options().env("GATEWAY_REDIS_URL", redis.url());
    let (here, there) = tokio::join!(GatewayProcess::start(options()), GatewayProcess::start(options()));
    let (iat, lag) = (unix(), Lag::watch());
    for (i, what) in [json!({"jti": "j"}), json!({"sid": "s"}), json!({"sub": "42"})].iter().enumerate() {
        let named = json!({"sub": "42", "jti": "j", "sid": "s", "iat": iat, "channels": ["news"]});
        // Whoever is revoked once must not come in again: each round is of another token.
        let mut claims = named.clone();
        for other in ["jti", "sid"] {
            if what.get(other).is_none() {
                claims[other] = json!(format!("{other}{i}"));
            }
        }
        let other = json!({"sub": "43", "jti": "other", "sid": "other", "iat": iat, "channels": ["news"]});
        let mut bystander = ws(&there, &other).await;
        let (a, b) = tokio::join!(ws(&here, &claims), ws(&there, &claims));
        let c = sse(&there, &claims).await;
        let asked = Instant::now();
        revoke(&here, what).await;
        let (a, b, c) = tokio::join!(ws_end(a), ws_end(b), sse_end(c));
        for end in [a, b, c] {
            assert_eq!(end.words(), ("revoked", 4403, "never"), "{what}");
            // A second, and what neither the nodes nor the test had of it.
            let soon = Duration::from_secs(1) + lag.longest();
            assert!(end.at - asked < soon, "{what} after {:?}, not {soon:?}", end.at - asked);
        }
        let refused =
            WsClient::connect(there.public(), "/v1/ws", &[("Authorization", &bearer(&claims))]).await.err().unwrap();
        assert_eq!((refused.status(), &refused.json()["code"]), (401, &json!("token_revoked")));
        bystander.send_json(&json!({"type": "ping"})).await;
        assert_eq!(bystander.json().await["type"], "pong");
    }
    here.until_metric(&closed("revoked"), 3.0).await;
    there.until_metric(&closed("revoked"), 6.0).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nothing_published_after_a_tokens_end_reaches_its_session_and_redis_is_not_asked_for_it() {
    let redis = RedisServer::plain();
    let gateway = GatewayProcess::start(options().env("GATEWAY_REDIS_URL", redis.url())).await;
    let exp = unix() + 4;
    let claims = json!({"sub": "42", "channels": ["news"], "exp": exp});
    let (by_ws, by_sse) = (ws(&gateway, &claims).await, sse(&gateway, &claims).await);
    let publishing = async {
        loop {
            gateway.publish("news", &json!(Clock::system().unix().as_secs_f64())).await;
            sleep(Duration::from_millis(100)).await;
        }
    };
    let hearing = async {
        let (mut by_ws, mut by_sse) = (by_ws, by_sse);
        let (blocks, (messages, code)) = tokio::join!(by_sse.until_end(), by_ws.until_closed());
        assert_eq!((code, &messages.last().unwrap()["reason"]), (4401, &json!("token_expired")));
        let of_ws = messages.iter().filter(|m| m["type"] == "event").map(|m| m["data"].as_f64().unwrap());
        let events = blocks.iter().filter(|b| !b.is_comment() && b.kind() == "event");
        let of_sse = events.map(|b| b.json()["data"].as_f64().unwrap());
        [of_ws.collect::<Vec<_>>(), of_sse.collect()]
    };
    let heard = tokio::select! {
        heard = hearing => heard,
        () = publishing => unreachable!("it goes on for ever"),
    };
    for at in heard {
        // A tenth of a second apart, for more than two seconds; less often on a busy machine.
        assert!(at.len() > 5, "{at:?}");
        assert!(at.iter().all(|at| *at < exp as f64 + 1.0), "ends at {exp}: {at:?}");
    }
    redis.cli(&["CONFIG", "RESETSTAT"]);
    let (auth, public) = (bearer(&claims), gateway.public());
    let by_ws = WsClient::connect(public, "/v1/ws", &[("Authorization", &auth)]).await.err().unwrap();
    let by_sse = SseClient::connect(public, "/v1/sse", &[("Authorization", &auth)]).await.err().unwrap();
    for refused in [by_ws, by_sse] {
        assert_eq!((refused.status(), &refused.json()["code"]), (401, &json!("token_expired")));
    }
    assert!(!redis.cli(&["INFO", "commandstats"]).contains("cmdstat_mget"), "Redis was asked about a dead token");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_revocation_during_an_outage_of_one_nodes_link_ends_its_sessions_when_the_link_is_back() {
    let redis = RedisServer::plain();
    let proxy = Proxy::start(redis.addr()).await;
    let here = GatewayProcess::start(options().env("GATEWAY_REDIS_URL", redis.url())).await;
    // The sweep alone would take a minute: it is the link's return that must bring it.
    let behind = options().env("GATEWAY_REDIS_URL", redis.url_at(proxy.port())).env("GATEWAY_REVOCATION_SWEEP", "2m");
    let there = GatewayProcess::start(behind).await;
    let of = |jti: &str| json!({"sub": "42", "jti": jti, "channels": ["news"]});
    let (a, b) = (ws(&there, &of("j1")).await, sse(&there, &of("j1")).await);
    let mut stays = ws(&there, &of("j2")).await;
    let mut rotates = ws(&here, &of("j2")).await;
    proxy.close();
    proxy.cut();
    revoke(&here, &json!({"jti": "j1"})).await;
    // Ten seconds of it, as long as an outage lasts that nobody is paged for; nobody is ended by it.
    sleep(Duration::from_secs(10)).await;
    assert_eq!(n_open(&there).await, 3.0);
    proxy.open();
    let back = Instant::now();
    let (a, b) = tokio::join!(ws_end(a), sse_end(b));
    for end in [a, b] {
        assert_eq!(end.words(), ("revoked", 4403, "never"));
        assert!(end.at - back < Duration::from_secs(20), "{:?}", end.at - back);
    }
    // Another token of the same user is another token, and a new one in its place ends nobody.
    rotates.send_json(&json!({"type": "auth", "ref": "r", "token": token(&of("j3"))})).await;
    rotates.until("ok").await;
    for client in [&mut stays, &mut rotates] {
        client.send_json(&json!({"type": "ping"})).await;
        client.until("pong").await;
    }
    there.until_metric(&closed("revoked"), 2.0).await;
    here.until_metric(&closed("revoked"), 0.0).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn who_breaks_the_protocol_is_told_how_and_not_to_come_back() {
    let gateway = GatewayProcess::start(options().env("GATEWAY_MAX_MESSAGE", "1KiB")).await;
    let unmasked = Frame { mask: None, ..Frame::new(opcode::TEXT, "{}") };
    let reserved = Frame { rsv: 4, ..Frame::new(opcode::TEXT, "{}") };
    let too_long = Frame::new(opcode::TEXT, vec![b'x'; 1_025]);
    let cases = [
        ("unmasked", unmasked.bytes(), ("bad_message", 1002, "never")),
        ("a reserved bit", reserved.bytes(), ("bad_message", 1002, "never")),
        ("binary", Frame::new(opcode::BINARY, "x").bytes(), ("bad_message", 1003, "never")),
        ("no UTF-8", Frame::new(opcode::TEXT, [0xff, 0xfe]).bytes(), ("bad_message", 1007, "never")),
        ("too long", too_long.bytes(), ("too_large", 1009, "never")),
        ("a flood", Frame::new(opcode::TEXT, r#"{"type":"ping"}"#).bytes().repeat(200), ("bad_message", 1008, "never")),
    ];
    let n_cases = cases.len() as f64;
    for (name, bytes, words) in cases {
        let mut client = ws(&gateway, &claims(name)).await;
        client.send_bytes(&bytes).await.unwrap();
        assert_eq!(ws_end(client).await.words(), words, "{name}");
    }
    gateway.until_metric(&closed("bad_message"), n_cases - 1.0).await;
    gateway.until_metric(&closed("too_large"), 1.0).await;
    // At the limit, a message is a message: no JSON, so it is told so and stays.
    let mut client = ws(&gateway, &claims("just right")).await;
    client.send_frame(&Frame::new(opcode::TEXT, vec![b'x'; 1_024])).await.unwrap();
    assert_eq!(client.json().await["code"], "bad_message");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nothing_follows_a_bye_however_much_the_client_still_asks() {
    let gateway =
        GatewayProcess::start(options().env("GATEWAY_CLIENT_RATE", "10000").env("GATEWAY_CLIENT_BURST", "10000")).await;
    for round in 0..20 {
        let mut client = ws(&gateway, &json!({"sub": "u", "jti": format!("j{round}")})).await;
        let (pings, auth) =
            (json!({"type": "ping"}).to_string(), json!({"type": "subscribe", "channel": "x"}).to_string());
        let asks =
            [Frame::new(opcode::TEXT, pings).bytes(), Frame::new(opcode::TEXT, auth).bytes()].concat().repeat(50);
        client.send_bytes(&asks).await.unwrap();
        // Fewer than it may say at once: a revocation that comes late must not find it cut for a flood.
        let mut n_left = 9_000 / 100 - 1;
        let revoked = json!({"jti": format!("j{round}")});
        // The client fails the test where a frame follows the close frame.
        let asking = async {
            loop {
                match client.next().await {
                    Heard::Close { code, .. } => break code,
                    Heard::Cut => panic!("cut before the close"),
                    _ if n_left > 0 => {
                        n_left -= 1;
                        let _ = client.send_bytes(&asks).await;
                    }
                    _ => {}
                }
            }
        };
        let (code, ()) = tokio::join!(asking, revoke(&gateway, &revoked));
        assert_eq!(code, Some(4403));
        // The rest of the stream: nothing but its end.
        client.send_close(4403, "").await.ok();
        assert_eq!(client.next().await, Heard::Cut);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_clients_own_close_is_answered_and_a_vanished_client_is_lost() {
    let gateway = GatewayProcess::start(options()).await;
    let mut polite = ws(&gateway, &claims("polite")).await;
    polite.send_close(1000, "thanks").await.unwrap();
    assert_eq!(polite.until_closed().await.1, 1000);
    let mut terse = ws(&gateway, &claims("terse")).await;
    terse.send_frame(&Frame::new(opcode::CLOSE, "")).await.unwrap();
    assert_eq!(terse.until_closed().await.1, 1005);
    gateway.until_metric(&closed("client"), 2.0).await;

    let (gone, gone_stream) = (ws(&gateway, &claims("gone")).await, sse(&gateway, &claims("gone")).await);
    until_open(&gateway, 2.0).await;
    drop((gone, gone_stream));
    gateway.until_metric(&closed("lost"), 2.0).await;
    until_open(&gateway, 0.0).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_new_token_replaces_the_old_one_in_all() {
    let gateway = GatewayProcess::start(options()).await;
    let exp = unix() + 6;
    let old = json!({"sub": "42", "jti": "old", "channels": ["news", "sport"], "exp": exp});
    let mut client = ws(&gateway, &old).await;

    client.send_json(&json!({"type": "auth", "ref": 1, "token": testkit::gateway::token(&claims("43"))})).await;
    let refused = client.json().await;
    assert_eq!(
        (&refused["type"], &refused["ref"], &refused["code"]),
        (&json!("error"), &json!(1), &json!("token_invalid"))
    );

    let new = json!({"sub": "42", "jti": "new", "channels": ["news"]});
    client.send_json(&json!({"type": "auth", "ref": 2, "token": testkit::gateway::token(&new)})).await;
    let messages = client.until("ok").await;
    assert_eq!(messages.last().unwrap()["ref"], 2);
    let left: Vec<_> = messages.iter().filter(|m| m["type"] == "unsubscribed").collect();
    assert_eq!(left.len(), 1);
    assert_eq!((&left[0]["channel"], &left[0]["reason"]), (&json!("sport"), &json!("grant")));

    // The old one's revocation and end do not touch it any more.
    revoke(&gateway, &json!({"jti": "old"})).await;
    sleep(Duration::from_secs(exp + 1).saturating_sub(Clock::system().unix())).await;
    gateway.publish("sport", &json!(1)).await;
    gateway.publish("news", &json!(2)).await;
    let event = client.until("event").await.pop().unwrap();
    assert_eq!((&event["channel"], &event["data"]), (&json!("news"), &json!(2)));
    revoke(&gateway, &json!({"jti": "new"})).await;
    assert_eq!(ws_end(client).await.words(), ("revoked", 4403, "never"));
}
