//! The log on a real server: what survives what, what is told of what is lost, and what any other
//! Redis client may do with it.

mod common;

use std::sync::atomic::Ordering;
use std::time::Duration;

use common::{Node, channel, config, connection, event, until};
use hub::backplane::{Backplane, Claim, From, GapReason, Publish, ReadAsk, Revocation, RevocationKey};
use hub::clock::Dice;
use testkit::redis::{Persistence, RedisOptions, RedisServer};
use tidegate_redis_backplane::{MigrateError, RevocationKeys, SCHEMA, StartError, check_version, migrate};

fn ask(channels: &[(hub::channel::Channel, From)], page_events: usize) -> ReadAsk {
    ReadAsk { channels: channels.to_vec(), check: None, cap: 1000, page_events, page_bytes: 1 << 20 }
}

#[tokio::test(flavor = "multi_thread")]
async fn missing_as_many_as_are_kept_is_no_gap_and_one_more_is() {
    let server = RedisServer::plain();
    let mut config = config(server.url(), "t", "n");
    config.history_size = 5;
    let node = Node::up_with(config).await;
    let c = channel("c");
    let seen = node.log(&c, "0").await;
    for n_missed in 1..=7 {
        node.log(&c, "1").await;
        let read = node.read(&[(c.clone(), From::After(seen))]).await;
        let hole = read.hole(&read.facts[0], seen);
        assert_eq!(hole, (n_missed > 5).then_some(GapReason::Evicted), "missed {n_missed}");
        assert_eq!(read.events.len(), n_missed.min(5));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn after_a_kill_with_the_aof_synced_always_every_position_still_counts() {
    let mut server =
        RedisServer::start(RedisOptions { persistence: Persistence::AofAlways, ..RedisOptions::default() });
    let mut node = Node::up(&server, "t", "n").await;
    let c = channel("c");
    let mut ids = Vec::new();
    for life in 0..3 {
        ids.push(node.log(&c, "1").await);
        ids.push(node.log(&c, "2").await);
        server.restart();
        node.until_lost().await;
        node.until_up().await;
        let read = node.read(&[(c.clone(), From::After(ids[0]))]).await;
        assert_eq!(read.broken, None, "life {life}");
        assert_eq!(read.hole(&read.facts[0], ids[0]), None);
        let got: Vec<_> = read.events.iter().map(|e| e.id.unwrap()).collect();
        assert_eq!(got, ids[1..]);
        assert_ne!(read.position.incarnation(), ids.last().unwrap().incarnation(), "a new life of the log");
        assert!(read.position > *ids.last().unwrap());
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_that_comes_back_with_an_older_state_vouches_for_nothing() {
    let mut server = RedisServer::start(RedisOptions {
        extra: vec!["--dbfilename".into(), "d.rdb".into()],
        ..RedisOptions::default()
    });
    let mut node = Node::up(&server, "t", "n").await;
    let c = channel("c");
    let kept = node.log(&c, "1").await;
    server.cli(&["SAVE"]);
    let lost = node.log(&c, "2").await;
    server.restart();
    node.until_up().await;
    for old in [kept, lost] {
        let read = node.read(&[(c.clone(), From::After(old))]).await;
        assert_eq!((read.broken, read.events.len()), (Some(GapReason::Reset), 0));
    }
    let read = node.read(&[(c.clone(), From::Start)]).await;
    assert_eq!((read.broken, read.events.len()), (None, 1), "what came back may be read from the start");
    assert!(node.log(&c, "3").await > kept);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_promoted_replica_vouches_for_nothing_older() {
    let aof = RedisOptions { persistence: Persistence::AofAlways, ..RedisOptions::default() };
    let master = RedisServer::start(aof.clone());
    let replica = RedisServer::start(aof);
    let old = Node::up(&master, "t", "n").await.log(&channel("c"), "1").await;
    replica.replica_of(&master);
    until("the event is replicated", || replica.cli(&["HGET", "t:log", "last"]) == old.to_string()).await;
    replica.promote();
    let node = Node::up(&replica, "t", "m").await;
    assert_eq!(node.read(&[(channel("c"), From::After(old))]).await.broken, Some(GapReason::Reset));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_flushed_server_is_another_log_and_gets_its_settings_back() {
    let server = RedisServer::plain();
    let mut config = config(server.url(), "t", "n");
    config.history_size = 7;
    let mut node = Node::up_with(config).await;
    let c = channel("c");
    let old = node.log(&c, "1").await;
    server.flushall();
    assert_eq!(node.read(&[(c.clone(), From::After(old))]).await.broken, Some(GapReason::Reset));
    assert_eq!(node.read(&[(c.clone(), From::Here)]).await.broken, None);
    // The hub sees the other incarnation on the link and asks for a new one.
    node.plane.relink();
    node.until_lost().await;
    node.until_up().await;
    assert_eq!(server.cli(&["HGET", "t:conf", "history_size"]), "7");
    assert_eq!(server.cli(&["GET", "t:schema"]), SCHEMA.to_string());
}

#[tokio::test(flavor = "multi_thread")]
async fn functions_that_went_are_loaded_again_and_nothing_is_lost_by_it() {
    let server = RedisServer::plain();
    let node = Node::up(&server, "t", "n").await;
    let c = channel("c");
    let old = node.log(&c, "1").await;
    for _ in 0..2 {
        server.cli(&["FUNCTION", "FLUSH"]);
        let id = node.plane.publish(event(&c, "2")).await.unwrap().id.unwrap();
        assert_eq!(id.incarnation(), old.incarnation(), "the process remembers the log, though not the library");
        server.cli(&["FUNCTION", "FLUSH"]);
        assert_eq!(node.plane.read(ask(&[(c.clone(), From::After(old))], 10)).await.unwrap().broken, None);
        server.cli(&["FUNCTION", "FLUSH"]);
        node.plane
            .revoke(Revocation { key: RevocationKey::Jti("x".into()), before: 0 }, Duration::from_secs(9))
            .await
            .unwrap();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn two_deployments_never_meet_on_one_server() {
    let server = RedisServer::plain();
    let mut a = Node::up(&server, "a", "n").await;
    let mut ab = Node::up(&server, "ab", "n").await;
    let c = channel("c");
    a.want(&c).await;
    ab.want(&c).await;
    a.log(&c, "\"of a\"").await;
    ab.log(&c, "\"of ab\"").await;
    let key = RevocationKey::Jti("x".into());
    a.plane.revoke(Revocation { key: key.clone(), before: 0 }, Duration::from_secs(9)).await.unwrap();
    assert_eq!(a.next_event().await.data, "\"of a\"");
    assert_eq!(ab.next_event().await.data, "\"of ab\"", "and nothing of a came before");
    assert_eq!(ab.plane.revocations(vec![key.clone()]).await.unwrap(), [None]);
    assert!(a.plane.revocations(vec![key]).await.unwrap()[0].is_some());
    assert_eq!(ab.read(&[(c, From::Start)]).await.events.len(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn bad_input_from_any_client_gets_an_error_and_changes_nothing() {
    let server = RedisServer::plain();
    let node = Node::up(&server, "t", "n").await;
    node.log(&channel("c"), "1").await;
    let state = || (server.cli(&["DBSIZE"]), server.cli(&["HGETALL", "t:log"]), server.cli(&["XLEN", "t:ch:c"]));
    let before = state();
    let long = "x".repeat(201);
    let big = "x".repeat(65_537);
    let publish: [&[&str]; 13] = [
        &[],
        &["c"],
        &["", "1"],
        &["c d", "1"],
        &["c*", "1"],
        &[&long, "1"],
        &["c", &big],
        &["c", "1", "EVENT"],
        &["c", "1", "EVENT", "a b"],
        &["c", "1", "EVENT", &long[..65]],
        &["c", "1", "KEY", ""],
        &["c", "1", "KEY", &long[..129]],
        &["c", "1", "WHAT"],
    ];
    for args in publish {
        let printed = server.cli(&[&["FCALL", "tidegate_publish", "1", "t:log"], args].concat());
        assert!(printed.starts_with("BAD") || printed.starts_with("TOOLARGE"), "{:?}: {printed}", args.first());
    }
    let revoke: [&[&str]; 7] = [
        &["xyz", "a", "9"],
        &["jti", "", "9"],
        &["jti", "a"],
        &["jti", "a", "0"],
        &["jti", "a", "-1"],
        &["jti", "a", "x"],
        &["sub", "a", "9", "-5"],
    ];
    for args in revoke {
        let printed = server.cli(&[&["FCALL", "tidegate_revoke", "1", "t:log"], args].concat());
        assert!(printed.starts_with("BADARGS"), "{args:?}: {printed}");
    }
    assert!(server.cli(&["FCALL", "tidegate_publish", "1", "t", "c", "1"]).starts_with("BADKEYS"));
    let not_utf8 =
        redis::cmd("FCALL").arg("tidegate_publish").arg(1).arg("t:log").arg("c").arg(b"\"\xed\xa0\x80\"").to_owned();
    let mut connection = connection(&server).await;
    let error = not_utf8.exec_async(&mut connection).await.unwrap_err();
    assert_eq!(error.code(), Some("BADDATA"));
    assert_eq!(state(), before);
}

#[tokio::test(flavor = "multi_thread")]
async fn any_redis_client_publishes_logged_and_ephemeral_events() {
    let server = RedisServer::plain();
    let mut node = Node::up(&server, "t", "n").await;
    let c = channel("c");
    node.want(&c).await;
    let id = server.cli(&[
        "FCALL",
        "tidegate_publish",
        "1",
        "t:log",
        "c",
        "{\"a\" : 1.0}",
        "EVENT",
        "order.paid",
        "KEY",
        "k",
    ]);
    let again = server.cli(&["FCALL", "tidegate_publish", "1", "t:log", "c", "2", "KEY", "k"]);
    assert_eq!(again, id);
    server.cli(&["PUBLISH", "t:live:c", "{\"event\":\"tick\",\"data\":{\"n\" : 2}}"]);
    let logged = node.next_event().await;
    assert_eq!(logged.id.unwrap().to_string(), id);
    assert_eq!((logged.name.unwrap().as_str(), &logged.data[..]), ("order.paid", &b"{\"a\" : 1.0}"[..]));
    let ephemeral = node.next_event().await;
    assert_eq!(
        (ephemeral.id, ephemeral.name.unwrap().as_str(), &ephemeral.data[..]),
        (None, "tick", &b"{\"n\" : 2}"[..])
    );
    assert_eq!(node.read(&[(c, From::Start)]).await.events.len(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_revocation_by_any_client_is_told_and_never_weakened() {
    let server = RedisServer::plain();
    let mut node = Node::up(&server, "t", "n").await;
    for args in [["sub", "a b", "100", "50"], ["sub", "a b", "10", "40"]] {
        assert_eq!(server.cli(&[&["FCALL", "tidegate_revoke", "1", "t:log"], &args[..]].concat()), "OK");
        let told = loop {
            if let hub::backplane::FromLink::Revoked(revocation) = node.next().await {
                break revocation;
            }
        };
        assert_eq!(told, Revocation { key: RevocationKey::Sub("a b".into()), before: 50 });
    }
    assert_eq!(node.plane.revocations(vec![told_key()]).await.unwrap(), [Some("50".to_owned())]);
    assert!(server.cli(&["TTL", "t:revoked:sub:a b"]).parse::<u64>().unwrap() > 10);
}

fn told_key() -> RevocationKey {
    RevocationKey::Sub("a b".into())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_foreign_revocation_list_is_read_as_it_stands() {
    let server = RedisServer::plain();
    let mut config = config(server.url(), "t", "n");
    config.revocation_keys = RevocationKeys::parse("jti=denied/{jti}").unwrap();
    let node = Node::up_with(config).await;
    server.cli(&["SET", "denied/x", "whatever"]);
    let asked = ["x", "y", "z"].map(|jti| RevocationKey::Jti(jti.into())).to_vec();
    node.plane.revoke(Revocation { key: asked[1].clone(), before: 0 }, Duration::from_secs(9)).await.unwrap();
    let answers = node.plane.revocations(asked).await.unwrap();
    assert_eq!(answers, [Some("whatever".to_owned()), Some("1".to_owned()), None]);
    assert_eq!(
        node.plane.revocations(vec![told_key()]).await.unwrap(),
        [None],
        "a kind without a template is not asked"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn entries_that_are_no_json_are_counted_and_paged_over() {
    let server = RedisServer::plain();
    let mut node = Node::up(&server, "t", "n").await;
    let c = channel("c");
    node.want(&c).await;
    for _ in 0..5 {
        server.cli(&["FCALL", "tidegate_publish", "1", "t:log", "c", "{no json"]);
    }
    let good = node.log(&c, "1").await;
    assert_eq!(node.next_event().await.id, Some(good), "nothing came of the bad ones");
    assert_eq!(node.plane.stats().skipped.load(Ordering::Relaxed), 5);
    let read = node.plane.read(ask(&[(c.clone(), From::Start)], 2)).await.unwrap();
    assert_eq!(read.events.iter().map(|e| e.id).collect::<Vec<_>>(), [Some(good)]);
    assert!(!read.more);
    assert_eq!(node.plane.stats().skipped.load(Ordering::Relaxed), 10);
}

#[tokio::test(flavor = "multi_thread")]
async fn every_key_expires_or_is_one_of_three() {
    let server = RedisServer::plain();
    let node = Node::up(&server, "t", "n").await;
    for i in 0..50 {
        let to = channel(&format!("c{i}"));
        node.plane.publish(Publish { key: Some("k".into()), ..event(&to, "1") }).await.unwrap();
    }
    node.plane
        .revoke(Revocation { key: RevocationKey::Sid("s".into()), before: 0 }, Duration::from_secs(9))
        .await
        .unwrap();
    let keys = server.cli(&["KEYS", "*"]);
    let lasting: Vec<_> = keys.lines().filter(|key| server.cli(&["PTTL", key]) == "-1").collect();
    let mut sorted = lasting.clone();
    sorted.sort_unstable();
    assert_eq!(sorted, ["t:conf", "t:log", "t:schema"]);
    assert_eq!(keys.lines().count(), 50 + 50 + 1 + 3);
}

#[tokio::test(flavor = "multi_thread")]
async fn no_two_pairs_of_channel_and_idempotency_key_are_mistaken() {
    let server = RedisServer::plain();
    let node = Node::up(&server, "t", "n").await;
    for (to, key) in [("a:b", "c"), ("a", "b:c"), ("a", "b#c"), ("a:b", "#c")] {
        let published =
            node.plane.publish(Publish { key: Some(key.into()), ..event(&channel(to), "1") }).await.unwrap();
        assert!(!published.duplicate, "{to} {key}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_newer_schema_is_refused_and_left_alone() {
    let server = RedisServer::plain();
    let newer = (SCHEMA + 1).to_string();
    server.cli(&["SET", "t:schema", &newer]);
    let config = config(server.url(), "t", "n");
    let node = Node::start(config.clone());
    assert!(matches!(node.plane.wait_ready().await, Err(StartError::NewerSchema { .. })));
    let refused = |r| matches!(r, Err(MigrateError::Start(StartError::NewerSchema { found, known: SCHEMA })) if found == SCHEMA + 1);
    assert!(refused(check_version(&config, Dice::seeded(1)).await));
    assert!(refused(migrate(&config, Dice::seeded(1)).await.map(|_| ())));
    assert_eq!(server.cli(&["GET", "t:schema"]), newer);
    assert_eq!(server.cli(&["FUNCTION", "LIST"]), "");
}

#[tokio::test(flavor = "multi_thread")]
async fn migrating_twice_loads_once_and_an_absent_server_is_an_error_in_time() {
    let mut server = RedisServer::plain();
    let config = config(server.url(), "t", "n");
    assert!(migrate(&config, Dice::seeded(1)).await.unwrap().loaded);
    assert!(!migrate(&config, Dice::seeded(1)).await.unwrap().loaded);
    check_version(&config, Dice::seeded(1)).await.unwrap();
    server.kill9();
    assert!(matches!(
        check_version(&config, Dice::seeded(1)).await,
        Err(MigrateError::Start(StartError::Unreachable(_)))
    ));
}

/// As documented in migrations/README.md.
const RIGHTS: &str = "+fcall +function|load +info +ping +get +set +del +mget +hset +hmget +hget +hgetall +config|get \
                      +subscribe +unsubscribe +publish +time +ttl +pttl +pexpire +pexpireat \
                      +xadd +xlen +xrange +xrevrange +xtrim +zadd +zcard +zrange +zrem +zremrangebyscore +pubsub|numsub";

#[tokio::test(flavor = "multi_thread")]
async fn the_documented_rights_suffice() {
    let server = RedisServer::plain();
    let rights: Vec<_> = RIGHTS.split_whitespace().collect();
    server.cli(&[&["ACL", "SETUSER", "node", "on", ">secret", "~t:*", "&t:*"], &rights[..]].concat());
    let mut config = config(format!("redis://node@127.0.0.1:{}", server.port()), "t", "n");
    config.password = Some("secret".into());
    config.history_size = 2;
    let mut node = Node::up_with(config).await;
    let c = channel("c");
    node.want(&c).await;
    for i in 0..4 {
        let wish = Publish { key: Some(i.to_string().into()), ..event(&c, "1") };
        node.plane.publish(wish).await.unwrap();
    }
    node.read(&[(c.clone(), From::Start)]).await;
    node.plane.revoke(Revocation { key: told_key(), before: 5 }, Duration::from_secs(9)).await.unwrap();
    node.plane.revocations(vec![told_key()]).await.unwrap();
    node.plane.unwant(&c);
    node.want(&channel("d")).await;
    node.plane.report("{}".into(), Duration::from_secs(9)).await.unwrap();
    node.plane.tell(None, "x".into()).await.unwrap();
    server.cli(&["FCALL", "tidegate_claim_1", "1", "t:log", "dead", "1", "u", "s1", ""]);
    node.plane.claim(vec![Claim { user: "u".into(), session: "s2".into(), since: None }], 1).await.unwrap();
    let held = server.cli(&["ZRANGE", "t:sessions:u", "0", "-1"]);
    assert!(held.starts_with("s2 n/") && !held.contains('\n'), "{held}");
    node.plane.release(vec![("u".into(), "s2".into())]).await.unwrap();
    node.plane.retire().await.unwrap();
    let log = server.cli(&["ACL", "LOG"]);
    assert!(!log.contains("\ncommand\n") && !log.contains("client-info"), "{log}");
}
