//! What a crowd may cost, and what it must not: Redis, a place, somebody else's answer.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use serde_json::json;
use testkit::gateway::GatewayProcess;
use testkit::http::Response;
use testkit::redis::RedisServer;
use testkit::ws::WsClient;
use tokio::task::JoinSet;
use tokio::time::Instant;

use super::{bearer, code_of, now, options, token, try_ws, usual_token, ws};

/// `n` handshakes of which `at_once` are under way at any time; `each` gives the i-th one's token.
async fn storm(
    gateway: &GatewayProcess,
    n: usize,
    at_once: usize,
    each: impl Fn(usize) -> String + Send + Sync + 'static,
) -> Vec<(usize, Result<WsClient, Response>)> {
    let (next, each, public) = (Arc::new(AtomicUsize::new(0)), Arc::new(each), gateway.public());
    let mut lanes = JoinSet::new();
    for _ in 0..at_once {
        let (next, each) = (next.clone(), each.clone());
        lanes.spawn(async move {
            let mut outcomes = Vec::new();
            loop {
                let i = next.fetch_add(1, Ordering::Relaxed);
                if i >= n {
                    return outcomes;
                }
                let auth = bearer(&each(i));
                outcomes.push((i, WsClient::connect(public, "/v1/ws", &[("Authorization", &auth)]).await));
            }
        });
    }
    lanes.join_all().await.into_iter().flatten().collect()
}

/// How often Redis was asked for the revocation list since its counters were reset.
fn n_questions(redis: &RedisServer) -> usize {
    let stats = redis.cli(&["INFO", "commandstats"]);
    let calls = stats.lines().find_map(|line| line.strip_prefix("cmdstat_mget:calls=")?.split_once(','));
    calls.map_or(0, |(calls, _)| calls.parse().expect("a count"))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn whom_the_bucket_refuses_never_sees_a_101_and_costs_redis_nothing() {
    const CROWD: usize = 3_000;
    let redis = RedisServer::plain();
    let gateway = GatewayProcess::start(
        options()
            .env("GATEWAY_REDIS_URL", redis.url())
            .env("GATEWAY_ACCEPT_BURST", "5")
            .env("GATEWAY_ACCEPT_RATE", "1"),
    )
    .await;
    redis.cli(&["CONFIG", "RESETSTAT"]);
    let began = Instant::now();
    let outcomes = storm(&gateway, CROWD, 50, |_| usual_token()).await;
    let most = 5 + 1 + began.elapsed().as_secs() as usize;
    let mut held = Vec::new();
    let mut n_refused = 0;
    for (_, outcome) in outcomes {
        match outcome {
            Ok(client) => held.push(client),
            Err(refused) => {
                n_refused += 1;
                assert_eq!((refused.status(), code_of(&refused).as_str()), (503, "overloaded"));
                assert_eq!(refused.header("connection"), Some("close"));
                assert!(refused.header("retry-after").is_some_and(|s| s.parse::<u32>().is_ok_and(|s| s >= 1)));
                assert!(refused.body.len() < 512, "{} bytes", refused.body.len());
            }
        }
    }
    assert!((5..=most).contains(&held.len()), "{} of {CROWD} got in, {most} are allowed", held.len());
    // Who got in stays: no 101 was taken back at once.
    for client in &mut held {
        client.until("ready").await;
        client.send_json(&json!({"type": "ping"})).await;
        client.until("pong").await;
    }
    assert!(n_questions(&redis) <= held.len(), "{} questions for {} sessions", n_questions(&redis), held.len());
    gateway.until_metric("gateway_refused_total{code=\"overloaded\"}", n_refused as f64).await;
    gateway.until_metric("gateway_refusal_seconds_count", n_refused as f64).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_flood_of_forged_tokens_takes_no_place_from_the_good_ones() {
    const FLOOD: usize = 5_000;
    let redis = RedisServer::plain();
    // Room for the good ones and no more: a forged token that kept its place would cost one of them theirs.
    let gateway = GatewayProcess::start(
        options()
            .env("GATEWAY_REDIS_URL", redis.url())
            .env("GATEWAY_ACCEPT_BURST", "160")
            .env("GATEWAY_ACCEPT_RATE", "1"),
    )
    .await;
    redis.cli(&["CONFIG", "RESETSTAT"]);
    let outcomes = storm(&gateway, FLOOD, 50, |i| match i % 50 {
        0 => usual_token(),
        n if n % 2 == 0 => token(&json!({"sub": "42", "jti": "a", "exp": now() - 1})),
        _ => hub::auth::mint(b"another secret of thirty-two bytes", &json!({"sub": "42", "exp": now() + 60}))
            .expect("long enough"),
    })
    .await;
    let mut held = Vec::new();
    for (i, outcome) in outcomes {
        match outcome {
            Ok(client) => held.push((i, client)),
            Err(refused) => {
                assert!(!i.is_multiple_of(50), "the good one {i}: {}", refused.text());
                let code = if (i % 50).is_multiple_of(2) { "token_expired" } else { "token_invalid" };
                assert_eq!((refused.status(), code_of(&refused).as_str()), (401, code));
                assert_eq!(refused.header("retry-after"), None, "there is nothing to wait for");
            }
        }
    }
    assert_eq!(held.len(), FLOOD / 50);
    assert!(n_questions(&redis) <= held.len(), "{} questions", n_questions(&redis));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_crowd_behind_a_waiting_list_asks_it_in_few_questions() {
    const CROWD: usize = 1_000;
    let redis = RedisServer::plain();
    let proxy = testkit::proxy::Proxy::start(redis.addr()).await;
    let gateway = GatewayProcess::start(
        options()
            .env("GATEWAY_REDIS_URL", redis.url_at(proxy.port()))
            .env("GATEWAY_REDIS_TIMEOUT", "5s")
            .env("GATEWAY_AUTH_TIMEOUT", "10s"),
    )
    .await;
    for i in (0..CROWD).step_by(10) {
        redis.cli(&["SET", &format!("tidegate:revoked:jti:j{i}"), "1"]);
    }
    redis.cli(&["CONFIG", "RESETSTAT"]);
    // A list that takes its time: whoever comes meanwhile shares the next question.
    proxy.delay(std::time::Duration::from_millis(50));
    let outcomes =
        storm(&gateway, CROWD, 250, |i| token(&json!({"sub": format!("u{i}"), "jti": format!("j{i}")}))).await;
    for (i, outcome) in &outcomes {
        match outcome {
            Ok(_) => assert!(!i.is_multiple_of(10), "{i} was revoked and is in"),
            Err(refused) => {
                assert_eq!((i % 10, refused.status(), code_of(refused)), (0, 401, "token_revoked".to_owned()))
            }
        }
    }
    let n = n_questions(&redis);
    assert!(n <= CROWD / 50, "{n} questions for {CROWD} newcomers");
    drop(outcomes);
    proxy.delay(std::time::Duration::ZERO);
    let _one_more = ws(&gateway).await;
    assert!(
        try_ws(&gateway, "/v1/ws", &[("Authorization", &bearer(&token(&json!({"sub": "u", "jti": "j0"}))))])
            .await
            .is_err()
    );
}
