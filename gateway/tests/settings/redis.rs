//! How Redis is reached: with a password of its own variable, by a CA of one's own. That several partitions
//! need a cluster, and that this build speaks to none, is looked at beside the other refusals.

use testkit::gateway::{GatewayOptions, GatewayProcess};
use testkit::http;
use testkit::redis::{RedisOptions, RedisServer};
use testkit::temp::TempDir;
use tokio::time::{Instant, sleep};

use super::{LOOK, SOON, is_refused, options, serves, with};

/// Everything that would have to be encoded in a URL.
const PASSWORD: &str = "a#/@%+= :?&\"'\\\u{fc}$[";

fn with_password(password: &str) -> RedisServer {
    RedisServer::start(RedisOptions { requirepass: Some(password.to_owned()), ..RedisOptions::default() })
}

/// On this server, by a URL that names no password.
fn on(redis: &RedisServer, user: &str) -> GatewayOptions {
    with(&[("GATEWAY_REDIS_URL", &format!("redis://{user}127.0.0.1:{}/", redis.port()))])
}

/// It waits, unready, for this trouble with Redis.
async fn waits_for(gateway: &GatewayProcess, trouble: &str) {
    let until = Instant::now() + SOON;
    while !gateway.stderr().contains(trouble) {
        assert!(Instant::now() < until, "not {trouble:?}:\n{}", gateway.stderr());
        sleep(LOOK).await;
    }
    let readiness = http::get(gateway.probes(), "/readyz").await;
    assert_eq!((readiness.status(), &readiness.json()["phase"]), (503, &"starting".into()), "{}", readiness.text());
    assert_eq!(http::get(gateway.probes(), "/livez").await.status(), 200);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_password_that_fits_no_url_opens_every_connection_to_redis() {
    let redis = with_password(PASSWORD);
    let gateway = GatewayProcess::start(on(&redis, "").env("GATEWAY_REDIS_PASSWORD", PASSWORD)).await;
    serves(&gateway).await;
    assert!(!gateway.stderr().contains(PASSWORD));

    // As a user of the server's own list, and from a file that an editor has ended with a line end.
    let rights = ["ACL", "SETUSER", "gate", "on", &format!(">{PASSWORD}"), "~*", "&*", "+@all"];
    assert_eq!(redis.cli(&rights), "OK");
    let directory = TempDir::new("password");
    let file = directory.file("password", &format!("{PASSWORD}\n"));
    let as_gate = || on(&redis, "gate@").env("GATEWAY_REDIS_PASSWORD_FILE", file.as_str());
    drop(gateway);
    let gateway = GatewayProcess::start(as_gate()).await;
    serves(&gateway).await;
    let clients = redis.cli(&["CLIENT", "LIST"]);
    let ours: Vec<&str> = clients.lines().filter(|line| !line.contains("cmd=client|list")).collect();
    assert!(ours.len() > 2 && ours.iter().any(|line| line.contains("cmd=subscribe")), "{clients}");
    assert!(ours.iter().all(|line| line.contains(" user=gate ")), "{clients}");

    // The one-shot command takes it as well.
    let migrated = as_gate().args(&["migrate"]).run(SOON).await;
    assert!(migrated.status.success(), "{}", migrated.stderr);
    let refused = on(&redis, "").env("GATEWAY_REDIS_PASSWORD", "another").args(&["migrate"]).run(SOON).await;
    assert_eq!(refused.status.code(), Some(69), "{}", refused.stderr);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_gateway_whose_password_is_not_right_yet_waits_until_it_is() {
    const NEW: &str = "the-next-password-of-this-redis";
    let redis = with_password("the old one");
    let wrong = GatewayProcess::start_unready(on(&redis, "").env("GATEWAY_REDIS_PASSWORD", NEW)).await;
    let none = GatewayProcess::start_unready(on(&redis, "")).await;
    waits_for(&wrong, "authentication failed").await;
    waits_for(&none, "NOAUTH").await;
    assert_eq!(redis.cli(&["CONFIG", "SET", "requirepass", NEW]), "OK");
    wrong.until_status("/readyz", 200).await;
    serves(&wrong).await;
    assert!(!wrong.stderr().contains(NEW), "{}", wrong.stderr());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_ca_of_ones_own_vouches_for_redis_and_without_it_nobody_does() {
    let directory = TempDir::new("redis-tls");
    let (certificate, key) = directory.certificate();
    let (_redis, port) = RedisServer::with_tls(&certificate, &key);
    let url = format!("rediss://127.0.0.1:{port}/");
    let untold = GatewayProcess::start_unready(with(&[("GATEWAY_REDIS_URL", &url)])).await;
    let told = || with(&[("GATEWAY_REDIS_URL", &url)]);
    let gateway = GatewayProcess::start(told().env("GATEWAY_REDIS_CA_FILE", certificate.as_str())).await;
    serves(&gateway).await;
    waits_for(&untold, "the server's certificate is of no issuer that is trusted here").await;
    // A file without a certificate is no CA, and that does not depend on Redis.
    let empty = directory.file("empty", "no PEM\n");
    is_refused(&told().env("GATEWAY_REDIS_CA_FILE", empty.as_str()).run(SOON).await, &["CA file"]);
    // One that nobody uses is told, and hinders nobody.
    let unused = options().env("GATEWAY_REDIS_CA_FILE", certificate.as_str()).args(&["config", "--check"]);
    let unused = unused.run(SOON).await;
    assert!(unused.status.success() && unused.stderr.contains("GATEWAY_REDIS_CA_FILE"), "{}", unused.stderr);
}
