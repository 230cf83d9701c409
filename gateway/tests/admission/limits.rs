//! How many may come: capacity, the accept bucket, one address.

use std::collections::BTreeMap;
use std::time::Duration;

use serde_json::json;
use testkit::gateway::GatewayProcess;
use testkit::http::Response;
use testkit::proxy::Proxy;
use testkit::redis::RedisServer;
use testkit::sse::SseClient;
use testkit::ws::WsClient;
use tokio::task::JoinSet;
use tokio::time::Instant;

use super::{bearer, code_of, options, revoke, token, try_ws, usual_token, ws};

/// So many handshakes at once: what came of each, and how long it took.
async fn crowd(gateway: &GatewayProcess, n: usize) -> Vec<(Result<WsClient, Response>, Duration)> {
    let mut coming = JoinSet::new();
    let (public, auth) = (gateway.public(), bearer(&usual_token()));
    for _ in 0..n {
        let auth = auth.clone();
        coming.spawn(async move {
            let began = Instant::now();
            let opened = WsClient::connect(public, "/v1/ws", &[("Authorization", &auth)]).await;
            (opened, began.elapsed())
        });
    }
    coming.join_all().await
}

#[tokio::test(flavor = "multi_thread")]
async fn exactly_the_capacity_gets_in_however_many_come_at_once() {
    const CAP: usize = 50;
    let redis = RedisServer::plain();
    let proxy = Proxy::start(redis.addr()).await;
    let gateway = GatewayProcess::start(
        options()
            .env("GATEWAY_REDIS_URL", redis.url_at(proxy.port()))
            .env("GATEWAY_REDIS_TIMEOUT", "5s")
            .env("GATEWAY_AUTH_TIMEOUT", "10s")
            .env("GATEWAY_MAX_SESSIONS", CAP.to_string()),
    )
    .await;
    // The revocation list takes its time, so that all of them are between check and place.
    proxy.delay(Duration::from_millis(400));
    let outcomes = crowd(&gateway, 4 * CAP).await;
    let (mut held, mut refusals) = (Vec::new(), Vec::new());
    for (opened, took) in outcomes {
        match opened {
            Ok(client) => held.push((client, took)),
            Err(refused) => {
                assert_eq!((refused.status(), code_of(&refused).as_str()), (503, "at_capacity"));
                assert!(refused.header("retry-after").is_some());
                refusals.push(took);
            }
        }
    }
    assert_eq!((held.len(), refusals.len()), (CAP, 3 * CAP));
    // Those who are refused do not wait for the list that the others wait for.
    refusals.sort();
    let soonest_in = held.iter().map(|(_, took)| *took).min().expect("fifty");
    assert!(soonest_in >= Duration::from_millis(400), "{soonest_in:?}: the list was not late");
    let median = refusals[refusals.len() / 2];
    assert!(median < soonest_in, "half of the refused waited {median:?}");
    proxy.delay(Duration::ZERO);
    // One leaves, one comes in, whichever the transport.
    for _ in 0..3 {
        held.pop();
        gateway.until_metric("gateway_sessions_open{transport=\"ws\"}", held.len() as f64).await;
        let auth = bearer(&usual_token());
        let stream = SseClient::connect(gateway.public(), "/v1/sse", &[("Authorization", &auth)]).await;
        let _stream = stream.unwrap_or_else(|refused| panic!("{}", refused.text()));
        let Err(refused) = try_ws(&gateway, "/v1/ws", &[("Authorization", &auth)]).await else {
            panic!("one too many");
        };
        assert_eq!(code_of(&refused), "at_capacity");
        drop(_stream);
        gateway.until_metric("gateway_sessions_open{transport=\"sse\"}", 0.0).await;
        held.push((ws(&gateway).await, Duration::ZERO));
    }
}

#[tokio::test]
async fn a_refused_crowd_is_told_quickly_and_each_of_it_another_time() {
    let gateway = GatewayProcess::start(
        options()
            .env("GATEWAY_ACCEPT_BURST", "5")
            .env("GATEWAY_ACCEPT_RATE", "1")
            .env("GATEWAY_AUTH_COOKIE", "session"),
    )
    .await;
    let outcomes = crowd(&gateway, 400).await;
    let mut per_second: BTreeMap<u64, usize> = BTreeMap::new();
    let (mut n_in, mut n_refused, mut slowest) = (0, 0, Duration::ZERO);
    for (opened, took) in outcomes {
        let Err(refused) = opened else {
            n_in += 1;
            continue;
        };
        n_refused += 1;
        assert_eq!((refused.status(), code_of(&refused).as_str()), (503, "overloaded"));
        assert_eq!(refused.header("connection"), Some("close"));
        let seconds: u64 = refused.header("retry-after").expect("a hint").parse().expect("whole seconds");
        let ms = refused.json()["retry_after_ms"].as_u64().expect("the same in ms");
        assert!((1..=61).contains(&seconds) && seconds.abs_diff(ms / 1000) <= 1, "{seconds} s, {ms} ms");
        *per_second.entry(seconds).or_default() += 1;
        slowest = slowest.max(took);
    }
    assert!((5..=15).contains(&n_in), "{n_in} got in");
    assert!(per_second.values().all(|n| n * 4 <= n_refused), "{per_second:?}");
    assert!(per_second.len() > 20, "{per_second:?}");
    assert!(slowest < Duration::from_secs(10), "{slowest:?}");
    gateway.until_metric("gateway_refused_total{code=\"overloaded\"}", n_refused as f64).await;

    // What a browser cannot see, it is told otherwise.
    let query = format!("/v1/sse?access_token={}", usual_token());
    let mut soft = SseClient::connect(gateway.public(), &query, &[]).await.expect("a soft refusal");
    let blocks = soft.until_end().await;
    let [bye] = &blocks[..] else { panic!("{blocks:?}") };
    assert_eq!((bye.event.as_deref(), &bye.json()["reason"]), (Some("bye"), &json!("overload")));
    assert!(bye.retry.is_some_and(|ms| ms >= 1_000), "{bye:?}");
    let auth = bearer(&usual_token());
    let hard = SseClient::connect(gateway.public(), "/v1/sse", &[("Authorization", &auth)]).await;
    assert_eq!(hard.err().expect("a refusal").status(), 503);
    // Overload stays a status on a WebSocket, page or not.
    let page = [("Authorization", auth.as_str()), ("Origin", "https://app.example")];
    assert_eq!(try_ws(&gateway, "/v1/ws", &page).await.err().expect("a refusal").status(), 503);
}

#[tokio::test]
async fn who_was_cut_off_has_the_last_fifth_of_the_burst_and_a_made_up_cursor_has_not() {
    let limits = options().env("GATEWAY_ACCEPT_BURST", "50").env("GATEWAY_ACCEPT_RATE", "1");
    let gateway = GatewayProcess::start(limits).await;
    let auth = bearer(&usual_token());
    let mut first = try_ws(&gateway, "/v1/ws", &[("Authorization", &auth)]).await.expect("let in");
    let cursor = first.until("ready").await.pop().unwrap()["id"].as_str().expect("a position").to_owned();
    let come = async |cursor: &str| {
        let headers = [("Authorization", auth.as_str()), ("Last-Event-ID", cursor)];
        super::outcome(&gateway, "/v1/ws", &headers).await
    };
    // So many were cut off that a whole fifth is kept for them.
    for _ in 0..10 {
        assert_eq!(come(&cursor).await.0, 101);
    }
    // One token a second comes in; a run of one kind is over within a few.
    let began = Instant::now();
    let n_by_rate = || began.elapsed().as_secs() as usize + 1;
    let until_refused = async |cursor: &str| {
        let mut n = 0;
        loop {
            let (status, code) = come(cursor).await;
            if status != 101 {
                assert_eq!((status, code.as_str()), (503, "overloaded"), "{cursor}");
                return n;
            }
            n += 1;
        }
    };
    let n_new = until_refused("").await;
    assert!((25..=31 + n_by_rate()).contains(&n_new), "{n_new} newcomers: 39 places, ten of them kept");
    // From a time that has not come, or none of ours: those who show them are as new as the others. What
    // the rate brought meanwhile is theirs, and none of the ten.
    for made_up in ["9999999999999-1", "nonsense", "0"] {
        let n = until_refused(made_up).await;
        assert!(n <= n_by_rate() && n < 8, "{n} with {made_up}");
    }
    let n_back = until_refused(&cursor).await;
    assert!((8..=13 + n_by_rate()).contains(&n_back), "{n_back} came back: ten places were kept for them");
}

#[tokio::test]
async fn a_page_whose_token_is_refused_sees_it_by_the_close_code() {
    let gateway = GatewayProcess::start(options()).await;
    let revoked = token(&json!({"sub": "42", "jti": "gone"}));
    revoke(&gateway, &json!({"jti": "gone"})).await;
    for (token, code, reason, reconnect) in [
        (Some(token(&json!({"sub": "42", "exp": 1}))), 4401, "token_expired", "reauth"),
        (Some("x.y.z".to_owned()), 4401, "token_expired", "reauth"),
        (None, 4401, "token_expired", "reauth"),
        (Some(revoked), 4403, "revoked", "never"),
    ] {
        let path = token.map_or("/v1/ws".to_owned(), |token| format!("/v1/ws?access_token={token}"));
        let mut client = try_ws(&gateway, &path, &[("Origin", "https://app.example")]).await.expect("101");
        let (messages, closed) = client.until_closed().await;
        let [bye] = &messages[..] else { panic!("{messages:?}") };
        assert_eq!((closed, &bye["reason"], &bye["reconnect"]), (code, &json!(reason), &json!(reconnect)));
        // Who is no page sees the status.
        assert_eq!(try_ws(&gateway, &path, &[]).await.err().expect("a refusal").status(), 401);
    }
    assert_eq!(
        gateway.metric("gateway_sessions_opened_total{transport=\"ws\",resume=\"new\"}").await.unwrap_or(0.0),
        0.0
    );
}

#[tokio::test]
async fn an_address_is_the_one_that_a_trusted_proxy_names_and_has_its_own_bucket() {
    let limits = || options().env("GATEWAY_IP_BURST", "4").env("GATEWAY_IP_RATE", "1");
    let gateway = GatewayProcess::start(limits().env("GATEWAY_TRUSTED_PROXIES", "127.0.0.1, 10.0.0.0/8")).await;
    let auth = bearer(&usual_token());
    // How many of seven in a row get in, and how long that took: the burst, perhaps one more by the rate,
    // and one for each second.
    let get_in = async |gateway: &GatewayProcess, hops: &dyn Fn(usize) -> Vec<(&'static str, String)>| {
        let (mut n, began) = (0, Instant::now());
        for i in 0..7 {
            let hops = hops(i);
            let mut headers = vec![("Authorization", auth.as_str())];
            headers.extend(hops.iter().map(|(name, value)| (*name, value.as_str())));
            match try_ws(gateway, "/v1/ws", &headers).await {
                Ok(_) => n += 1,
                Err(refused) => {
                    assert_eq!((refused.status(), code_of(&refused).as_str()), (429, "too_many_requests"));
                    assert!(refused.header("retry-after").is_some());
                }
            }
        }
        (n, began.elapsed())
    };
    let forwarded = |text: &str| vec![("X-Forwarded-For", text.to_owned())];
    let is_limited = |(n, took): (u64, Duration)| (4..=5 + took.as_secs()).contains(&n);
    for (what, hops) in [
        ("the client", &(|_| forwarded("198.51.100.7")) as &dyn Fn(usize) -> _),
        ("a forged left part", &|i| forwarded(&format!("6.6.6.{i}, 198.51.100.8"))),
        ("two lines", &|i| vec![("X-Forwarded-For", format!("6.6.6.{i}")), ("X-Forwarded-For", "198.51.100.9".into())]),
        ("an inner proxy", &|i| forwarded(&format!("6.6.7.{i}, 198.51.100.10, 10.1.2.3"))),
        ("one /64 with ports", &|i| forwarded(&format!("[2001:db8::{i}]:{}", 1000 + i))),
        ("a thousand hops", &|i| forwarded(&format!("{}198.51.100.11", format!("6.6.8.{i}, ").repeat(1_000)))),
    ] {
        let got_in = get_in(&gateway, hops).await;
        assert!(is_limited(got_in), "{what}: {got_in:?}");
    }
    // Each of these is another client.
    assert_eq!(get_in(&gateway, &|i| forwarded(&format!("198.51.101.{i}"))).await.0, 7);
    assert_eq!(get_in(&gateway, &|i| forwarded(&format!("2001:db8:1:{i}::1"))).await.0, 7);
    // Garbage names nobody: it is the peer's own bucket, for all kinds of it together.
    let garbage = ["unknown", "1.2.3", "", "fe80::1%eth0", "[::1", "999.1.1.1", "1.2.3.4:99999"];
    let got_in = get_in(&gateway, &|i| forwarded(garbage[i])).await;
    assert!(is_limited(got_in), "garbage: {got_in:?}");

    // A peer that nobody trusts is itself, whatever it writes.
    let gateway = GatewayProcess::start(limits().env("GATEWAY_TRUSTED_PROXIES", "10.0.0.0/8")).await;
    let got_in = get_in(&gateway, &|i| {
        let claim = format!("198.51.100.{i}");
        vec![
            ("X-Forwarded-For", claim.clone()),
            ("X-Real-IP", claim.clone()),
            ("Forwarded", format!("for={claim}")),
            ("CF-Connecting-IP", claim),
        ]
    })
    .await;
    assert!(is_limited(got_in), "{got_in:?}");
    // The soft form for a stream, the status for who can see it.
    let query = format!("/v1/sse?access_token={}", usual_token());
    let mut soft = SseClient::connect(gateway.public(), &query, &[]).await.expect("a soft refusal");
    assert_eq!(soft.until_end().await.len(), 1);
    // A bad token costs its address five: nothing is left after one.
    let gateway = GatewayProcess::start(limits().env("GATEWAY_TRUSTED_PROXIES", "127.0.0.1")).await;
    let of = async |token: &str| {
        let auth = bearer(token);
        let headers = [("Authorization", auth.as_str()), ("X-Forwarded-For", "198.51.100.7")];
        super::outcome(&gateway, "/v1/ws", &headers).await.0
    };
    assert_eq!(of("x.y.z").await, 401);
    assert_eq!(of(&usual_token()).await, 429);
}
