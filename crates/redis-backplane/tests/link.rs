//! The link and the other connections when the server, or somebody else on it, misbehaves.

mod common;

use std::collections::HashSet;
use std::net::SocketAddr;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use common::{Node, channel, config, connection, event, until};
use hub::backplane::{Backplane, From, FromLink, RevocationKey};
use hub::channel::Channel;
use hub::clock::Dice;
use testkit::lag::Lag;
use testkit::redis::{RedisOptions, RedisServer};
use tidegate_redis_backplane::migrate;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::time::Instant;

fn upstream(server: &RedisServer) -> HashSet<String> {
    server.cli(&["PUBSUB", "CHANNELS", "t:live:*"]).lines().map(str::to_owned).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_killed_link_comes_back_with_what_is_wanted_now() {
    let server = RedisServer::plain();
    let mut node = Node::up(&server, "t", "n").await;
    // More than one chunk of SUBSCRIBE.
    let mut wanted: HashSet<Channel> = (0..1_200).map(|i| channel(&format!("c{i}"))).collect();
    wanted.iter().for_each(|c| node.plane.want(c));
    let mut owed = wanted.clone();
    while !owed.is_empty() {
        if let FromLink::Confirmed(c) = node.next().await {
            owed.remove(&c);
        }
    }
    assert_eq!(server.kill_pubsub_links(), 1);
    node.until_lost().await;
    let (gone, new) = (channel("c7"), channel("new"));
    node.plane.unwant(&gone);
    node.plane.want(&new);
    wanted.remove(&gone);
    wanted.insert(new.clone());
    let mut owed = wanted.clone();
    loop {
        match node.next().await {
            FromLink::Confirmed(c) => drop(owed.remove(&c)),
            FromLink::Up(_) => break,
            other => panic!("{other:?} before the link is up"),
        }
    }
    while !owed.is_empty() {
        // Wanted too late to be part of the beginning.
        match node.next().await {
            FromLink::Confirmed(c) => drop(owed.remove(&c)),
            other => assert!(matches!(other, FromLink::Beacon(_)), "{other:?}"),
        }
    }
    let names: HashSet<_> = wanted.iter().map(|c| format!("t:live:{c}")).collect();
    until("exactly what is wanted is subscribed", || upstream(&server) == names).await;
    let id = node.log(&new, "1").await;
    assert_eq!(node.next_event().await.id, Some(id));
    assert_eq!(node.plane.stats().relinks.load(Ordering::Relaxed), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn no_outage_is_too_long_and_each_ends_by_itself() {
    let mut server = RedisServer::plain();
    let mut config = config(server.url(), "t", "n");
    // So long a call to a server that is away may take.
    config.timeout = Duration::from_secs(2);
    let (mut node, lag) = (Node::up_with(config).await, Lag::watch());
    let c = channel("c");
    node.want(&c).await;
    for _ in 0..2 {
        server.kill9();
        node.until_lost().await;
        assert!(!node.plane.is_link_up());
        // Long enough that several redials are refused.
        let back = Instant::now() + Duration::from_secs(2);
        while Instant::now() < back {
            assert!(node.plane.publish(event(&c, "1")).await.is_err());
        }
        server.restart();
        let started = Instant::now();
        node.until_up().await;
        // The longest wait between two dials, and more than as much again for a busy machine.
        assert!(started.elapsed() < Duration::from_secs(6) + lag.longest(), "{:?}", started.elapsed());
        assert!(node.plane.is_link_up());
        let id = node.log(&c, "1").await;
        assert_eq!(node.next_event().await.id, Some(id));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_absent_server_is_waited_for() {
    let mut server = RedisServer::plain();
    server.kill9();
    let mut config = config(server.url(), "t", "n");
    config.timeout = Duration::from_millis(250);
    let node = Node::start(config);
    let ready = tokio::time::timeout(Duration::from_millis(500), node.plane.wait_ready()).await;
    assert!(ready.is_err(), "not ready, and no error either");
    until("the trouble has a name", || node.plane.stats().trouble().is_some()).await;
    server.restart();
    node.plane.wait_ready().await.unwrap();
    assert_eq!(node.plane.stats().trouble(), None);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_silent_server_is_noticed_and_every_call_ends_at_its_deadline() {
    let server = RedisServer::plain();
    let mut config = config(server.url(), "t", "n");
    config.timeout = Duration::from_millis(250);
    let mut node = Node::up_with(config).await;
    let c = channel("c");
    node.want(&c).await;
    server.pause();
    let (lag, started) = (Lag::watch(), Instant::now());
    assert!(node.plane.publish(event(&c, "1")).await.is_err());
    let ask = hub::backplane::ReadAsk {
        channels: vec![(c.clone(), From::Here)],
        check: None,
        cap: 1,
        page_events: 1,
        page_bytes: 1,
    };
    assert!(node.plane.read(ask).await.is_err());
    assert!(node.plane.revocations(vec![RevocationKey::Jti("x".into())]).await.is_err());
    let took = started.elapsed();
    assert!(took < Duration::from_secs(2) + 3 * lag.longest(), "three deadlines: {took:?}");
    node.until_lost().await;
    assert!(started.elapsed() < Duration::from_secs(10) + lag.longest(), "{:?}", started.elapsed());
    server.resume();
    node.until_up().await;
    let id = node.log(&c, "2").await;
    while node.next_event().await.id != Some(id) {}
}

#[tokio::test(flavor = "multi_thread")]
async fn poison_is_counted_and_the_next_message_heard() {
    let server = RedisServer::plain();
    let mut node = Node::up(&server, "t", "n").await;
    let c = channel("c");
    node.want(&c).await;
    let mut connection = connection(&server).await;
    let deep = "[".repeat(100_000);
    let poison: [Vec<u8>; 6] = [
        b"{".to_vec(),
        b"null".to_vec(),
        deep.into_bytes(),
        b"{\"version\":99}".to_vec(),
        vec![b'x'; 20 << 20],
        b"\xff\xfe\x00\x80".to_vec(),
    ];
    for payload in &poison {
        redis::cmd("PUBLISH").arg("t:live:c").arg(payload).exec_async(&mut connection).await.unwrap();
    }
    redis::cmd("PUBLISH").arg("t:ctl").arg(b"revoked").exec_async(&mut connection).await.unwrap();
    redis::cmd("PUBLISH").arg("t:beacon:n").arg(b"nonsense").exec_async(&mut connection).await.unwrap();
    redis::cmd("PUBLISH").arg("t:ctl").arg(b"revoked jti x y").exec_async(&mut connection).await.unwrap();
    let id = node.log(&c, "1").await;
    assert_eq!(node.next_event().await.id, Some(id));
    // `revoked` alone is no word of ours and may be a later version's; the other two are faults.
    assert_eq!(node.plane.stats().skipped.load(Ordering::Relaxed), 8);
    assert_eq!(node.plane.stats().relinks.load(Ordering::Relaxed), 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_hub_that_cannot_keep_up_loses_the_link_and_not_the_memory() {
    let server = RedisServer::plain();
    let mut node = Node::up(&server, "t", "n").await;
    let c = channel("c");
    node.want(&c).await;
    let mut connection = connection(&server).await;
    // Each has 2 KiB: more than what may wait here, between the kernels and in Redis.
    let (n_sent, message) = (60_000, format!("{{\"data\":\"{}\"}}", "x".repeat(2_048)));
    for _ in 0..n_sent / 1_000 {
        let mut pipe = redis::pipe();
        for _ in 0..1_000 {
            pipe.cmd("PUBLISH").arg("t:live:c").arg(&message).ignore();
        }
        pipe.exec_async(&mut connection).await.unwrap();
    }
    let mut n_heard = 0;
    loop {
        match node.next().await {
            FromLink::Event(_) => n_heard += 1,
            FromLink::Lost => break,
            _ => {}
        }
    }
    assert!(n_heard < n_sent, "{n_heard}");
    node.until_up().await;
    let id = node.log(&c, "1").await;
    assert_eq!(node.next_event().await.id, Some(id));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_demoted_server_is_not_written_to_and_a_master_is_found_again() {
    let server = RedisServer::plain();
    let other = RedisServer::plain();
    let node = Node::up(&server, "t", "n").await;
    let c = channel("c");
    node.log(&c, "1").await;
    server.replica_of(&other);
    let started = Instant::now();
    let refused = node.plane.publish(event(&c, "1")).await;
    assert!(refused.is_err(), "{refused:?}");
    assert!(started.elapsed() < Duration::from_secs(10), "{:?}", started.elapsed());
    server.promote();
    node.log(&c, "2").await;
}

/// A name whose meaning changes: what new connections to it reach.
struct Name {
    port: u16,
    /// `None`: something that replies LOADING to every command.
    target: Arc<Mutex<Option<SocketAddr>>>,
}

impl Name {
    async fn of(target: Option<SocketAddr>) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let name = Self { port: listener.local_addr().unwrap().port(), target: Arc::new(Mutex::new(target)) };
        let target = name.target.clone();
        tokio::spawn(async move {
            loop {
                let (client, _) = listener.accept().await.unwrap();
                let target = *target.lock().unwrap();
                tokio::spawn(serve(client, target));
            }
        });
        name
    }

    fn now_means(&self, server: &RedisServer) {
        *self.target.lock().unwrap() = Some(server.addr());
    }
}

async fn serve(mut client: TcpStream, target: Option<SocketAddr>) {
    if let Some(target) = target {
        let mut server = TcpStream::connect(target).await.unwrap();
        let _ = tokio::io::copy_bidirectional(&mut client, &mut server).await;
        return;
    }
    let mut piece = [0; 4096];
    while let Ok(n @ 1..) = client.read(&mut piece).await {
        // One reply a command: each begins with the number of its words.
        let n_commands = piece[..n].iter().filter(|b| **b == b'*').count();
        let reply = "-LOADING Redis is loading the dataset in memory\r\n".repeat(n_commands);
        if client.write_all(reply.as_bytes()).await.is_err() {
            return;
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_link_to_another_server_than_the_logs_is_deaf_and_given_up() {
    let (old, new) = (RedisServer::plain(), RedisServer::plain());
    migrate(&config(new.url(), "t", "n"), Dice::seeded(1)).await.unwrap();
    let name = Name::of(Some(old.addr())).await;
    let mut node = Node::up_with(config(new.url_at(name.port), "t", "n")).await;
    let c = channel("c");
    node.want(&c).await;
    name.now_means(&new);
    // All but the link go to the new server.
    old.cli(&["CLIENT", "KILL", "TYPE", "normal"]);
    node.until_lost().await;
    assert!(node.plane.stats().deaf.load(Ordering::Relaxed));
    node.until_up().await;
    assert!(!node.plane.stats().deaf.load(Ordering::Relaxed));
    let id = node.log(&c, "1").await;
    assert_eq!(node.next_event().await.id, Some(id));
    assert_eq!(new.cli(&["HGET", "t:log", "last"]), id.to_string());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_that_is_loading_is_not_ready_and_is_set_up_anew_when_it_is() {
    let server = RedisServer::plain();
    let name = Name::of(None).await;
    let mut config = config(server.url_at(name.port), "t", "n");
    config.timeout = Duration::from_millis(250);
    let mut node = Node::start(config);
    until("the trouble has a name", || node.plane.stats().trouble().is_some_and(|t| t.contains("LOADING"))).await;
    assert!(!node.plane.is_link_up());
    name.now_means(&server);
    node.until_up().await;
    // The other connections follow within one wait of theirs.
    node.log(&channel("c"), "1").await;
    assert_eq!(node.read(&[(channel("c"), From::Start)]).await.events.len(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_password_that_is_refused_at_first_is_tried_again() {
    let odd = "p@ss:/?#[]% word";
    let server = RedisServer::start(RedisOptions { requirepass: Some("another".into()), ..RedisOptions::default() });
    let mut config = config(format!("redis://127.0.0.1:{}", server.port()), "t", "n");
    config.password = Some(odd.into());
    config.timeout = Duration::from_millis(250);
    let mut node = Node::start(config);
    until("the trouble has a name", || node.plane.stats().trouble().is_some()).await;
    assert!(!node.plane.stats().trouble().unwrap().contains("p@ss"));
    server.cli(&["CONFIG", "SET", "requirepass", odd]);
    node.until_up().await;
    node.log(&channel("c"), "1").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_without_hello_is_named_as_the_trouble_and_the_password_is_not() {
    let extra = ["--rename-command", "HELLO", ""].map(str::to_owned).into();
    let server =
        RedisServer::start(RedisOptions { requirepass: Some("hush".into()), extra, ..RedisOptions::default() });
    let node = Node::start(config(server.url(), "t", "n"));
    until("the trouble has a name", || node.plane.stats().trouble().is_some_and(|t| t.contains("HELLO"))).await;
    let trouble = node.plane.stats().trouble().unwrap();
    assert!(!trouble.contains("hush") && !node.plane.is_link_up(), "{trouble}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_node_that_may_not_publish_says_so_and_is_up_as_soon_as_it_may() {
    let server = RedisServer::plain();
    assert_eq!(server.cli(&["ACL", "SETUSER", "default", "-publish"]), "OK");
    let mut node = Node::start(config(server.url(), "t", "n"));
    until("the trouble has a name", || node.plane.stats().trouble().is_some_and(|t| t.contains("beacon"))).await;
    assert!(!node.plane.is_link_up());
    assert_eq!(server.cli(&["ACL", "SETUSER", "default", "+publish"]), "OK");
    node.until_up().await;
    assert_eq!(node.plane.stats().trouble(), None);
}

#[tokio::test(flavor = "multi_thread")]
async fn channels_are_left_while_others_keep_being_joined() {
    let server = RedisServer::plain();
    let mut node = Node::up(&server, "t", "n").await;
    let old = channel("old");
    node.want(&old).await;
    node.plane.unwant(&old);
    // Until it is left there is always somebody to be joined; the hub takes what it is told.
    let Node { plane, mut link } = node;
    let others = tokio::spawn(async move {
        for i in 0.. {
            plane.want(&channel(&format!("c{i}")));
            tokio::task::yield_now().await;
        }
    });
    let hub = tokio::spawn(async move { while link.recv().await.is_some() {} });
    until("it is left", || !upstream(&server).contains("t:live:old")).await;
    others.abort();
    hub.abort();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_quiet_spell_costs_the_first_call_nothing() {
    let server = RedisServer::plain();
    let node = Node::up(&server, "t", "n").await;
    let c = channel("c");
    node.read(&[(c.clone(), From::Here)]).await;
    server.cli(&["CONFIG", "SET", "timeout", "1"]);
    for _ in 0..2 {
        // The server closes what was idle for a second.
        tokio::time::sleep(Duration::from_millis(2_500)).await;
        node.plane.publish(event(&c, "1")).await.unwrap();
        let ask = hub::backplane::ReadAsk { channels: vec![], check: None, cap: 1, page_events: 1, page_bytes: 1 };
        node.plane.read(ask).await.unwrap();
        node.plane.revocations(vec![RevocationKey::Jti("x".into())]).await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_node_has_few_connections_however_many_channels_it_hears() {
    let server = RedisServer::plain();
    let mut node = Node::up(&server, "t", "n").await;
    for i in 0..500 {
        node.plane.want(&channel(&format!("c{i}")));
    }
    node.want(&channel("last")).await;
    let reads = (0..50).map(|_| node.read(&[])).collect::<Vec<_>>();
    futures_util::future::join_all(reads).await;
    let n = server.cli(&["CLIENT", "LIST"]).lines().count();
    // Link, publish, revocation, control, fleet, four readers, and redis-cli itself.
    assert!(n <= 10, "{n} connections");
}
