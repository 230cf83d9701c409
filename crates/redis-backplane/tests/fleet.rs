//! The fleet on a real server: what is stored and for how long, what a flushed or foreign server
//! costs, and what anybody may publish to a node.

mod common;

use std::sync::atomic::Ordering;
use std::time::Duration;

use common::{Node, PATIENCE, channel, config, connection};
use hub::backplane::{Backplane, Claim, Claimed, FromLink, Hold};
use testkit::redis::RedisServer;
use tidegate_redis_backplane::LinkStats;

const TTL: Duration = Duration::from_secs(20);

fn claim(user: &str, session: &str, since: Option<u64>) -> Claim {
    Claim { user: user.into(), session: session.into(), since }
}

impl Node {
    async fn claim(&self, session: &str, since: Option<u64>, max: u32) -> Claimed {
        self.plane.claim(vec![claim("u", session, since)], max).await.unwrap()[0]
    }

    /// Who was replaced, before the next text.
    async fn replaced(&mut self) -> Vec<String> {
        let mut replaced = Vec::new();
        loop {
            match self.next().await {
                FromLink::Replaced { session, .. } => replaced.push(session.to_string()),
                FromLink::Told(_) => return replaced,
                FromLink::Lost => panic!("lost before a text"),
                _ => {}
            }
        }
    }
}

fn relinks(node: &Node) -> u64 {
    let stats: &LinkStats = &node.plane.stats();
    stats.relinks.load(Ordering::Relaxed)
}

#[tokio::test(flavor = "multi_thread")]
async fn nothing_of_a_fleet_that_went_stays_behind() {
    let server = RedisServer::plain();
    let node = Node::up(&server, "t", "n").await;
    let left = |key: &str| server.cli(&["PTTL", key]).parse::<i64>().unwrap();
    node.plane.report("{}".into(), TTL).await.unwrap();
    node.plane.hold(Some((Duration::from_secs(20), "x".to_owned()))).await.unwrap();
    for key in ["t:fleet:idx", "t:fleet:n:n", "t:fleet:hold"] {
        assert!((1..=20_000).contains(&left(key)), "{key}");
    }
    let life = server.cli(&["KEYS", "t:fleet:life:n/*"]);
    assert!((86_400_000..=86_420_000).contains(&left(&life)), "{life}");
    node.claim("s", None, 1).await;
    assert!((590_000..=600_000).contains(&left("t:sessions:u")));
    node.plane.release(vec![("u".into(), "s".into())]).await.unwrap();
    node.plane.hold(None).await.unwrap();
    node.plane.retire().await.unwrap();
    assert_eq!(server.cli(&["EXISTS", "t:sessions:u", "t:fleet:idx", "t:fleet:n:n", "t:fleet:hold"]), "0");
    assert_eq!(server.cli(&["KEYS", "*sessions*"]), "");
    assert_eq!(server.cli(&["KEYS", "*fleet*"]), "");
}

#[tokio::test(flavor = "multi_thread")]
async fn libraries_that_went_are_loaded_again_by_every_call() {
    let server = RedisServer::plain();
    let node = Node::up(&server, "t", "n").await;
    let first = node.claim("s1", None, 2).await.since;
    for gone in [["FUNCTION", "FLUSH", "SYNC"], ["FUNCTION", "DELETE", "tidegate_fleet"]] {
        server.cli(&gone);
        assert_eq!(node.claim("s1", Some(first), 2).await, Claimed { since: first, replaced: false });
        server.cli(&gone);
        node.plane.report("{}".into(), TTL).await.unwrap();
        server.cli(&gone);
        node.plane.hold(None).await.unwrap();
        server.cli(&gone);
        node.plane.release(vec![("u".into(), "s1".into())]).await.unwrap();
        server.cli(&gone);
        node.plane.retire().await.unwrap();
    }
    server.cli(&["FUNCTION", "FLUSH"]);
    server.flushall();
    assert_eq!(node.claim("s1", Some(first), 1).await, Claimed { since: first, replaced: false });
    assert!(node.claim("s2", None, 1).await.since > first);
    let held = server.cli(&["ZRANGE", "t:sessions:u", "0", "-1"]);
    assert!(held.starts_with("s2 n/") && !held.contains('\n'), "{held}");
}

#[tokio::test(flavor = "multi_thread")]
async fn the_logs_birth_is_of_the_log_and_no_restart_of_the_server_moves_it() {
    let server = RedisServer::plain();
    // Nobody has read or published yet: a back end's claim finds no log.
    let migrated = Node::up(&server, "other", "n").await;
    let born =
        |prefix: &str| server.cli(&["FCALL", "tidegate_report_1", "1", &format!("{prefix}:log"), "x", "{}", "1000"]);
    assert_eq!(born("empty").lines().nth(1), Some("0"));
    assert_eq!(server.cli(&["EXISTS", "empty:log"]), "0");
    let birth_ms = migrated.plane.report("{}".into(), TTL).await.unwrap().birth_ms;
    assert_eq!(server.cli(&["HGET", "other:log", "born"]), birth_ms.to_string());
    server.cli(&["HSET", "other:log", "start", "99-1"]);
    assert_eq!(migrated.plane.report("{}".into(), TTL).await.unwrap().birth_ms, birth_ms);
}

#[tokio::test(flavor = "multi_thread")]
async fn reports_that_are_no_text_are_counted_and_left_out() {
    let server = RedisServer::plain();
    let node = Node::up(&server, "t", "n").await;
    let mut connection = connection(&server).await;
    let mut report = async |name: &[u8], body: &[u8]| {
        let mut cmd = redis::cmd("FCALL");
        cmd.arg("tidegate_report_1").arg(1).arg("t:log").arg(name).arg(body).arg(20_000);
        cmd.exec_async(&mut connection).await.unwrap();
    };
    report(b"odd", b"\xff").await;
    report(b"\xff", b"{}").await;
    report(b"good", b"").await;
    let fleet = node.plane.report("{}".into(), TTL).await.unwrap();
    assert_eq!(fleet.reports.iter().map(|r| &*r.node).collect::<Vec<_>>(), ["good", "n"]);
    assert_eq!(node.plane.stats().skipped.load(Ordering::Relaxed), 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn poison_where_the_hold_stands_is_none_and_no_report_suffers() {
    let server = RedisServer::plain();
    let node = Node::up(&server, "t", "n").await;
    let now_ms = node.plane.report("{}".into(), TTL).await.unwrap().now_ms;
    let (past, soon, far) = (now_ms, now_ms + 60_000, now_ms + 2 * 86_400_000);
    let hold = async || {
        let fleet = node.plane.report("{}".into(), TTL).await.unwrap();
        assert_eq!(fleet.reports.len(), 1);
        fleet.hold
    };
    server.cli(&["SET", "t:fleet:hold", &format!("{soon} m by hand")]);
    let held = Hold { until_ms: soon, by: "m".into(), reason: "by hand".to_owned() };
    assert_eq!(hold().await, Some(held));
    let texts = [
        "".to_owned(),
        "15m".to_owned(),
        format!("{soon}"),
        format!("{soon} m"),
        format!("{soon}  x"),
        format!("-{soon} m x"),
        format!("{soon}.5 m x"),
        format!("{past} m what should have ended"),
        format!("{far} m what never should have begun"),
        format!("{}{soon} m x", "9".repeat(400)),
        format!("{soon} m {}", "x".repeat(201)),
        "x".repeat(100_000),
    ];
    for text in texts {
        server.cli(&["SET", "t:fleet:hold", &text]);
        assert_eq!(hold().await, None, "{text:.60}");
    }
    for other in [["LPUSH", "t:fleet:hold", "x"].as_slice(), &["HSET", "t:fleet:hold", "x", "y"]] {
        server.cli(&["DEL", "t:fleet:hold"]);
        server.cli(other);
        assert_eq!(hold().await, None, "{other:?}");
    }
    assert_eq!(node.plane.stats().skipped.load(Ordering::Relaxed), 0);
    let mut connection = connection(&server).await;
    let no_text = [format!("{soon} m ").as_bytes(), b"\xff"].concat();
    redis::cmd("SET").arg("t:fleet:hold").arg(no_text).exec_async(&mut connection).await.unwrap();
    assert_eq!(hold().await, None);
    assert_eq!(node.plane.stats().skipped.load(Ordering::Relaxed), 1);
    let taken = node.plane.hold(Some((TTL, String::new()))).await.unwrap();
    assert!(taken.is_some() && hold().await == taken, "whatever was there is replaced");
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_no_hold_is_refused_and_changes_nothing() {
    let server = RedisServer::plain();
    let node = Node::up(&server, "t", "n").await;
    let hold = node.plane.hold(Some((TTL, "x".to_owned()))).await.unwrap();
    for args in [
        &["n", "1000"][..],
        &["n", "999", "x"],
        &["n", "86400001", "x"],
        &["n", "1000", "x", "y"],
        &["n", "1s", "x"],
        &["a b", "1000", "x"],
        &["", "1000", "x"],
        &[""],
        &[],
    ] {
        let answer = server.cli(&[&["FCALL", "tidegate_hold_1", "1", "t:log"], args].concat());
        assert!(answer.contains("BADARGS"), "{args:?}: {answer}");
    }
    assert!(server.cli(&["FCALL", "tidegate_hold_1", "1", "t", "n"]).contains("BADKEYS"));
    assert_eq!(node.plane.report("{}".into(), TTL).await.unwrap().hold, hold);
}

#[tokio::test(flavor = "multi_thread")]
async fn poison_from_node_to_node_is_counted_and_the_next_text_heard() {
    let server = RedisServer::plain();
    let mut node = Node::up(&server, "t", "n").await;
    let mut connection = connection(&server).await;
    let long = [b"told ".to_vec(), vec![b'x'; 2 << 20]].concat();
    let faults: [&[u8]; 6] = [b"told \xff", b"replaced ", b"replaced s", b"replaced  u", b"\x00\xfe", &long];
    let later: [&[u8]; 5] = [b"told", b"", b"replaced", b"hold 15m x", b"fleet x"];
    for name in ["t:ctl", "t:node:n"] {
        for payload in faults.iter().chain(&later) {
            redis::cmd("PUBLISH").arg(name).arg(payload).exec_async(&mut connection).await.unwrap();
        }
    }
    node.plane.tell(None, "still here".into()).await.unwrap();
    loop {
        match node.next().await {
            FromLink::Told(text) => break assert_eq!(text, "still here"),
            FromLink::Beacon(_) => {}
            other => panic!("{other:?}"),
        }
    }
    assert_eq!(node.plane.stats().skipped.load(Ordering::Relaxed), 2 * faults.len() as u64);
    assert_eq!(relinks(&node), 0);
}

/// As documented in migrations/README.md.
#[tokio::test(flavor = "multi_thread")]
async fn who_may_not_ask_for_nodes_takes_all_for_living() {
    let server = RedisServer::plain();
    server.cli(&["ACL", "SETUSER", "node", "on", ">secret", "allcommands", "-pubsub", "~t:*", "&t:*"]);
    let mut config = config(format!("redis://node@127.0.0.1:{}", server.port()), "t", "n");
    config.password = Some("secret".into());
    let mut node = Node::up_with(config).await;
    server.cli(&["FCALL", "tidegate_claim_1", "1", "t:log", "dead", "1", "u", "old", ""]);
    node.claim("s1", None, 1).await;
    node.plane.tell(None, "end".into()).await.unwrap();
    assert_eq!(node.replaced().await, ["old"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_storm_of_claims_and_long_texts_delays_neither_publishing_nor_the_link() {
    let server = RedisServer::plain();
    let mut node = Node::up(&server, "t", "n").await;
    let other = Node::up(&server, "t", "m").await;
    let c = channel("c");
    node.want(&c).await;
    let storm = async {
        for round in 0..20 {
            let claims = (0..300).map(|i| claim(&format!("u{i}"), &format!("s{round}-{i}"), None)).collect();
            other.plane.claim(claims, 2).await.unwrap();
            other.plane.tell(Some("nobody".into()), "x".repeat(1 << 20)).await.unwrap();
        }
    };
    let publish = async {
        for _ in 0..20 {
            node.log(&c, "1").await;
        }
    };
    tokio::time::timeout(PATIENCE, futures_util::future::join(storm, publish)).await.expect("all is answered");
    assert_eq!(relinks(&node), 0);
    assert_eq!(server.cli(&["ZCARD", "t:sessions:u7"]), "2");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_node_that_is_cut_off_loses_its_places_and_gets_them_back_by_claiming_again() {
    let mut server = RedisServer::plain();
    let mut node = Node::up(&server, "t", "n").await;
    let first = node.claim("s1", None, 1).await.since;
    server.restart();
    node.until_lost().await;
    node.until_up().await;
    assert_eq!(server.cli(&["EXISTS", "t:sessions:u"]), "0", "the server had nothing to keep it on");
    assert_eq!(node.claim("s1", Some(first), 1).await, Claimed { since: first, replaced: false });
    node.claim("s2", None, 1).await;
    node.plane.tell(Some("n".into()), "end".into()).await.unwrap();
    assert_eq!(node.replaced().await, ["s1"]);
}

impl Node {
    /// Reports for the last time, for the moment that a node waits for one that has vanished: its link stands.
    async fn vanish(&self, seen_by: &Node) {
        self.plane.report("{}".into(), Duration::from_millis(200)).await.unwrap();
        let started = tokio::time::Instant::now();
        while seen_by.plane.report("{}".into(), TTL).await.unwrap().reports.len() > 1 {
            assert!(started.elapsed() < PATIENCE, "its report never ends");
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }

    /// Who stands in the user's set, the lowest first.
    fn placed(server: &RedisServer) -> Vec<String> {
        let members = server.cli(&["ZRANGE", "t:sessions:u", "0", "-1"]);
        members.lines().map(|member| member.split(' ').next().unwrap_or_default().to_owned()).collect()
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_vanished_hosts_places_go_first_though_its_link_stands_and_come_back_with_it() {
    let server = RedisServer::plain();
    let (mut here, vanished) = (Node::up(&server, "t", "n").await, Node::up(&server, "t", "m").await);
    here.claim("a", None, 2).await;
    let place = vanished.claim("b", None, 2).await.since;
    vanished.vanish(&here).await;
    assert!(!server.cli(&["PUBSUB", "CHANNELS", "t:beacon:m/*"]).is_empty(), "its link stands");
    // Its client comes back here.
    here.claim("c", None, 2).await;
    here.plane.tell(None, "end".into()).await.unwrap();
    assert_eq!(here.replaced().await, [""; 0]);
    assert_eq!(Node::placed(&server), ["a", "c"]);
    // It was only cut off: it reports, and claims again what it holds.
    vanished.plane.report("{}".into(), TTL).await.unwrap();
    assert_eq!(vanished.claim("b", Some(place), 3).await, Claimed { since: place, replaced: false });
    here.claim("d", None, 3).await;
    here.plane.tell(None, "end".into()).await.unwrap();
    assert_eq!(here.replaced().await, ["a"], "b counts again");
    assert_eq!(Node::placed(&server), ["b", "c", "d"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn who_has_not_reported_yet_or_not_since_a_flush_is_not_gone() {
    let server = RedisServer::plain();
    let (mut here, other) = (Node::up(&server, "t", "n").await, Node::up(&server, "t", "m").await);
    here.plane.report("{}".into(), TTL).await.unwrap();
    for round in ["just begun", "flushed"] {
        for (node, session) in [(&other, "a"), (&here, "b"), (&here, "c")] {
            node.claim(session, None, 2).await;
        }
        here.plane.tell(None, "end".into()).await.unwrap();
        assert_eq!(here.replaced().await, ["a"], "{round}");
        other.vanish(&here).await;
        server.flushall();
    }
}

/// A node of an earlier version reports without its life: it counts by its link alone.
#[tokio::test(flavor = "multi_thread")]
async fn a_node_of_an_earlier_version_keeps_its_places_beside_later_ones() {
    let server = RedisServer::plain();
    let (mut here, earlier) = (Node::up(&server, "t", "n").await, Node::up(&server, "t", "m").await);
    here.plane.report("{}".into(), TTL).await.unwrap();
    let answer = server.cli(&["FCALL", "tidegate_report_1", "1", "t:log", "m", "{}", "20000"]);
    assert!(answer.lines().any(|line| line == "n"), "{answer}");
    assert_eq!(here.plane.report("{}".into(), TTL).await.unwrap().reports.len(), 2);
    // It ended.
    server.cli(&["DEL", "t:fleet:n:m"]);
    assert_eq!(here.plane.report("{}".into(), TTL).await.unwrap().reports.len(), 1);
    earlier.claim("a", None, 1).await;
    here.claim("b", None, 1).await;
    here.plane.tell(None, "end".into()).await.unwrap();
    assert_eq!(here.replaced().await, ["a"]);
    assert_eq!(server.cli(&["FCALL", "tidegate_retire_1", "1", "t:log", "n"]), "OK");
    assert_eq!(server.cli(&["EXISTS", "t:fleet:n:n"]), "0");
}

/// As it happens while a fleet is deployed: who misses a Function loads what it came with.
#[tokio::test(flavor = "multi_thread")]
async fn an_earlier_library_is_replaced_by_the_first_call_that_misses_something() {
    let server = RedisServer::plain();
    let node = Node::up(&server, "t", "n").await;
    let earlier = include_str!("../../../migrations/0002_fleet.lua");
    for call in ["report", "retire"] {
        server.cli(&["FUNCTION", "LOAD", "REPLACE", earlier]);
        assert_eq!(server.cli(&["FCALL", "tidegate_fleet_version", "0"]), "2");
        match call {
            "report" => drop(node.plane.report("{}".into(), TTL).await.unwrap()),
            _ => node.plane.retire().await.unwrap(),
        }
        assert_eq!(server.cli(&["FCALL", "tidegate_fleet_version", "0"]), "3");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn who_writes_over_another_ones_report_is_shown_it() {
    let server = RedisServer::plain();
    let (one, other) = (Node::up(&server, "t", "n").await, Node::up(&server, "t", "n").await);
    let before = async |node: &Node, body: &str| {
        let fleet = node.plane.report(body.into(), TTL).await.unwrap();
        assert_eq!(
            fleet.reports.iter().map(|report| &*report.body).collect::<Vec<_>>(),
            [body],
            "one name, one report"
        );
        fleet.before.map(|report| (report.node.to_string(), report.body))
    };
    let stood = |body: &str| Some(("n".to_owned(), body.to_owned()));
    assert_eq!(before(&one, "1").await, None);
    assert_eq!(before(&one, "2").await, stood("1"));
    assert_eq!(before(&other, "3").await, stood("2"));
    assert_eq!(before(&one, "4").await, stood("3"));
    one.plane.retire().await.unwrap();
    assert_eq!(before(&one, "5").await, None);
}
