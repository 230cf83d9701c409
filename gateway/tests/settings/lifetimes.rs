//! How long something is kept: a publish's key, a revocation.

use std::time::Duration;

use serde_json::{Value, json};
use testkit::gateway::{GatewayOptions, GatewayProcess};
use testkit::http;
use testkit::redis::RedisServer;
use tokio::time::{Instant, sleep};

use super::{LOOK, SOON, options, outcome, refused, try_ws};

/// So long something is kept that the tests see the end of.
const TTL: Duration = Duration::from_secs(1);
/// The server keeps time in whole milliseconds, and by another clock than the test.
const CLOCKS: Duration = Duration::from_millis(20);

/// With this setting; and an answer of Redis that is late, on a busy machine, is none less.
fn with(name: &str, value: &str) -> GatewayOptions {
    options().env(name, value).env("GATEWAY_REDIS_TIMEOUT", "5s").env("GATEWAY_AUTH_TIMEOUT", "10s")
}

/// Asks again and again until the answer is another; for how long it was as it is at first.
async fn how_long<T: PartialEq + std::fmt::Debug>(mut ask: impl AsyncFnMut() -> T, expected: T) -> Duration {
    let began = Instant::now();
    loop {
        let answer = ask().await;
        if answer != expected {
            return began.elapsed();
        }
        assert!(began.elapsed() < SOON, "still {answer:?}");
        sleep(LOOK).await;
    }
}

/// Publishes with this key: the id, and whether it is a repeat's.
async fn publish(gateway: &GatewayProcess, key: &str) -> (String, bool) {
    let body = json!({"channel": "news", "data": 1, "idempotency_key": key});
    let answer = gateway.try_publish(&body).await;
    assert_eq!(answer.status(), 200, "{}", answer.text());
    let answer = answer.json();
    (answer["id"].as_str().expect("an id").to_owned(), answer["duplicate"] == true)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_publishes_key_is_remembered_as_long_as_it_is_set_and_no_longer() {
    let redis = RedisServer::plain();
    let short = || with("GATEWAY_IDEMPOTENCY_TTL", "1s");
    let gateways = tokio::join!(
        GatewayProcess::start(short()),
        GatewayProcess::start(short().env("GATEWAY_REDIS_URL", redis.url())),
    );
    for gateway in [&gateways.0, &gateways.1] {
        let began = Instant::now();
        let (id, is_repeat) = publish(gateway, "k").await;
        assert!(!is_repeat);
        // Repeats do not make it longer, or this had no end.
        let first = (id.clone(), true);
        how_long(async || publish(gateway, "k").await, first).await;
        assert!(began.elapsed() + CLOCKS >= TTL, "forgotten after {:?}", began.elapsed());
        // The next one is remembered anew; of another channel or key it was not the key.
        let (anew, is_repeat) = publish(gateway, "l").await;
        assert!(!is_repeat && anew > id, "{anew} after {id}");
    }
    // Longer than the test: as it stands in Redis.
    let long = with("GATEWAY_IDEMPOTENCY_TTL", "2h").env("GATEWAY_REDIS_PREFIX", "long");
    let gateway = GatewayProcess::start(long.env("GATEWAY_REDIS_URL", redis.url())).await;
    publish(&gateway, "k").await;
    assert_kept_for(&redis, "long:idem:news#k", Duration::from_secs(7_200));
}

/// A key of Redis that has lived for less than a minute ends so long after its writing.
fn assert_kept_for(redis: &RedisServer, key: &str, ttl: Duration) {
    let left: u64 = redis.cli(&["PTTL", key]).parse().unwrap_or_else(|_| panic!("{key} is not there, or for ever"));
    let left = Duration::from_millis(left);
    assert!(left <= ttl && left + Duration::from_secs(60) > ttl, "{key} is kept for {left:?}, not {ttl:?}");
}

async fn revoke(gateway: &GatewayProcess, what: &Value) {
    let answer = http::post_json(gateway.admin(), "/v1/revocations", what).await;
    assert_eq!(answer.status(), 204, "{}", answer.text());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_revocation_is_kept_as_long_as_it_is_set_unless_it_says_itself_for_how_long() {
    let redis = RedisServer::plain();
    let short = || with("GATEWAY_REVOCATION_TTL", "1s");
    let gateways = tokio::join!(
        GatewayProcess::start(short()),
        GatewayProcess::start(short().env("GATEWAY_REDIS_URL", redis.url())),
    );
    let token = |jti: &str| testkit::gateway::token(&json!({"sub": "42", "jti": jti}));
    for gateway in [&gateways.0, &gateways.1] {
        let come = async |jti: &str| outcome(try_ws(gateway, &token(jti)).await);
        let began = Instant::now();
        revoke(gateway, &json!({"jti": "short"})).await;
        revoke(gateway, &json!({"jti": "long", "ttl": "1h"})).await;
        how_long(async || come("short").await, refused(401, "token_revoked")).await;
        assert!(began.elapsed() + CLOCKS >= TTL, "forgotten after {:?}", began.elapsed());
        assert_eq!(come("short").await.0, 101);
        // What a node remembers by itself may be over; the list is asked.
        assert_eq!(come("long").await, refused(401, "token_revoked"));
    }

    let two_hours = with("GATEWAY_REVOCATION_TTL", "2h").env("GATEWAY_REDIS_PREFIX", "two");
    let gateway = GatewayProcess::start(two_hours.env("GATEWAY_REDIS_URL", redis.url())).await;
    let admin = format!("http://{}", gateway.admin());
    revoke(&gateway, &json!({"sub": "7"})).await;
    revoke(&gateway, &json!({"sid": "s", "ttl": 90})).await;
    let told = options().args(&["revoke", "--jti", "j", "--admin", &admin]).run(SOON).await;
    assert!(told.status.success(), "{}", told.stderr);
    for (key, seconds) in [("sub:7", 7_200), ("jti:j", 7_200), ("sid:s", 90)] {
        assert_kept_for(&redis, &format!("two:revoked:{key}"), Duration::from_secs(seconds));
    }
}
