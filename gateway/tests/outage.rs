//! What an outage of Redis does to sessions that stay connected: nothing where the log kept what it
//! acknowledged; a word to every session where it did not. The real binary and a real Redis that
//! is killed, emptied, cut off and made deaf, under load. What a connection to Redis goes through
//! before it stands is in `outage/dialling.rs`, a node that cannot keep up in `outage/overrun.rs`, what
//! the balancer is told when one of several nodes or all of them lose Redis in `outage/shared.rs`.

#[path = "outage/dialling.rs"]
mod dialling;
#[path = "outage/overrun.rs"]
mod overrun;
#[path = "outage/shared.rs"]
mod shared;

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::join_all;
use hub::clock::Dice;
use serde_json::json;
use testkit::chance::dice;
use testkit::gateway::{GatewayOptions, GatewayProcess, token};
use testkit::http;
use testkit::lag::Lag;
use testkit::numbered::{Follower, Ledger, Publisher, Route, Transport};
use testkit::proxy::{Direction, Flow, Proxy};
use testkit::redis::{Persistence, RedisOptions, RedisServer};
use testkit::ws::WsClient;
use tokio::task::{JoinSet, block_in_place};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

const CHANNELS: [&str; 3] = ["orders", "prices", "room:7"];

/// A gateway whose history allows no gap and whose sessions hear what their token names, no more.
fn options(redis: &str) -> GatewayOptions {
    GatewayOptions::new(env!("CARGO_BIN_EXE_tidegate"))
        .env("GATEWAY_REDIS_URL", redis)
        .env("GATEWAY_HISTORY_SIZE", "100000")
        .env("GATEWAY_REPLAY_MAX", "100000")
        .env("GATEWAY_ACCEPT_BURST", "100000")
        .env("GATEWAY_ACCEPT_RATE", "100000")
        .env("GATEWAY_USER_CHANNEL", "off")
        .env("GATEWAY_LOG", "info")
}

/// Connected sessions, each of which is read all the time, until its channels' last events.
struct Crowd(JoinSet<Follower>);

impl Crowd {
    fn listening(followers: Vec<Follower>) -> Self {
        let listen = async |mut follower: Follower| {
            follower.until_the_last().await;
            follower
        };
        Self(followers.into_iter().map(listen).collect())
    }

    async fn at_the_end(self) -> Vec<Follower> {
        self.0.join_all().await
    }
}

/// Two gateways, a publisher through both and through Redis itself, and clients that are ready.
struct Town {
    redis: RedisServer,
    gateways: Vec<GatewayProcess>,
    publisher: Publisher,
}

impl Town {
    async fn new(persistence: Persistence, n_followers: usize) -> (Self, Vec<Follower>) {
        let redis = RedisServer::start(RedisOptions { persistence, ..RedisOptions::default() });
        let patient = || options(&redis.url()).patient();
        let (a, b) = tokio::join!(GatewayProcess::start(patient()), GatewayProcess::start(patient()));
        let function = Route::Function { redis: redis.addr(), log: "tidegate:log".to_owned() };
        let publisher =
            Publisher::start(&CHANNELS, vec![Route::Admin(a.admin()), Route::Admin(b.admin()), function], 1_000);
        let gateways = vec![a, b];
        let mut followers = Vec::new();
        for i in 0..n_followers {
            // Over a period of 12 every mix of transport, node and channel occurs.
            let (transport, gateway) = (Transport::ALL[i % 2], &gateways[i / 2 % 2]);
            let channel = CHANNELS[i / 4 % 3];
            let token = token(&json!({"sub": format!("u{i}"), "channels": [channel]}));
            let mut follower = Follower::new(format!("{transport:?} {i}"), transport, &token, &[channel]);
            follower.connect(gateway.public()).await;
            followers.push(follower);
        }
        (Self { redis, gateways, publisher }, followers)
    }

    /// Kills Redis, and has it back after this time.
    async fn restart_redis(&mut self, away: Duration) {
        block_in_place(|| self.redis.kill9());
        tokio::time::sleep(away).await;
        block_in_place(|| self.redis.restart());
    }

    async fn end(self, crowd: Crowd) -> (Arc<Ledger>, Vec<Follower>, Vec<GatewayProcess>) {
        let ledger = self.publisher.stop().await;
        let followers = crowd.at_the_end().await;
        (ledger, followers, self.gateways)
    }
}

fn assert_nobody_noticed(ledger: &Ledger, followers: &[Follower]) {
    for follower in followers {
        follower.assert_complete(ledger);
        assert_eq!(follower.readies.len(), 1, "{} was reset", follower.name);
    }
    println!("{} events, {} sessions", ledger.n_events(), followers.len());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_redis_that_is_killed_and_kept_its_data_costs_no_session_an_event() {
    let (mut town, followers) = Town::new(Persistence::AofAlways, 40).await;
    let crowd = Crowd::listening(followers);
    for away in [Duration::ZERO, Duration::from_secs(1)] {
        town.publisher.more(500).await;
        town.restart_redis(away).await;
    }
    town.publisher.more(500).await;
    let (ledger, followers, _gateways) = town.end(crowd).await;
    assert_nobody_noticed(&ledger, &followers);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lost_pubsub_link_costs_no_session_an_event() {
    let (town, followers) = Town::new(Persistence::None, 40).await;
    let crowd = Crowd::listening(followers);
    for _ in 0..6 {
        town.publisher.more(300).await;
        assert!(town.redis.kill_pubsub_links() <= 2, "one link a node");
    }
    town.publisher.more(300).await;
    let (ledger, followers, gateways) = town.end(crowd).await;
    assert_nobody_noticed(&ledger, &followers);
    for gateway in &gateways {
        let repairs = gateway.metric("gateway_redis_repairs_total").await;
        assert!(repairs.is_some_and(|n| n >= 1.0), "{repairs:?}");
    }
}

/// One attempt to connect. Refused is nobody but while the gateway cannot say whether the token was
/// revoked: the connection that it asks over comes back by itself, before or after the pub/sub link.
async fn is_let_in(follower: &mut Follower, gateway: SocketAddr) -> bool {
    let Err(refused) = follower.try_connect(gateway).await else { return true };
    assert_eq!((refused.status(), &refused.json()["code"]), (503, &json!("auth_unavailable")));
    tokio::time::sleep(Duration::from_millis(20)).await;
    false
}

/// Moves between the gateways, each time after a number of messages by chance, until told to stop.
async fn wander(mut follower: Follower, gateways: [SocketAddr; 2], dice: Dice, stop: CancellationToken) -> Follower {
    while !stop.is_cancelled() {
        if !is_let_in(&mut follower, gateways[(dice.bits() % 2) as usize]).await {
            continue;
        }
        for _ in 0..dice.bits() % 60 {
            let Some(message) = stop.run_until_cancelled(follower.next()).await else { break };
            assert!(message.is_some(), "{} ended: {:?}", follower.name, follower.byes);
        }
        follower.cut();
    }
    while !is_let_in(&mut follower, gateways[0]).await {}
    follower
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn whoever_moves_about_while_redis_comes_and_goes_misses_nothing() {
    let dice = dice();
    let (mut town, _) = Town::new(Persistence::AofAlways, 0).await;
    let gateways = [town.gateways[0].public(), town.gateways[1].public()];
    let stop = CancellationToken::new();
    let mut wanderers = JoinSet::new();
    for i in 0..6 {
        let transport = Transport::ALL[i % 2];
        let token = token(&json!({"sub": "u", "channels": CHANNELS}));
        let follower = Follower::new(format!("{transport:?} {i}"), transport, &token, &CHANNELS);
        wanderers.spawn(wander(follower, gateways, dice.clone(), stop.clone()));
    }
    for _ in 0..4 {
        for _ in 0..3 {
            town.publisher.more(100 + (dice.bits() % 200) as usize).await;
            town.redis.kill_pubsub_links();
        }
        town.publisher.more(100).await;
        town.restart_redis(dice.between(Duration::ZERO, Duration::from_millis(600))).await;
    }
    town.publisher.more(200).await;
    for gateway in &town.gateways {
        gateway.until_status("/readyz", 200).await;
    }
    stop.cancel();
    let wanderers = wanderers.join_all().await;
    let (ledger, wanderers, _gateways) = town.end(Crowd::listening(wanderers)).await;
    for wanderer in &wanderers {
        wanderer.assert_complete(&ledger);
        println!("{}: {} events, {} times ready", wanderer.name, wanderer.n_seen(), wanderer.readies.len());
    }
}

/// Reads up to the `ready` that follows a reset; the session is measured from there on.
async fn told_of_a_reset(mut follower: Follower) -> Follower {
    follower.until(|message| message["type"] == "ready").await;
    let first = follower.readies.len();
    if follower.gaps.is_empty() {
        follower.until(|message| message["type"] == "ready").await;
        assert_eq!(follower.readies.len(), first + 1);
    }
    assert_eq!(follower.gaps.len(), 1, "{}: one a channel: {:?}", follower.name, follower.gaps);
    assert_eq!(follower.gaps[0]["reason"], "reset", "{:?}", follower.gaps);
    assert_eq!(follower.readies.last().expect("just read")["resume"], "gap");
    follower.begin_anew();
    follower
}

async fn assert_everybody_is_told(mut town: Town, followers: Vec<Follower>, forget: impl AsyncFnOnce(&mut Town)) {
    let told = tokio::spawn(join_all(followers.into_iter().map(told_of_a_reset)));
    town.publisher.more(300).await;
    forget(&mut town).await;
    let followers = told.await.expect("everybody was told");
    // From here on everything is complete again.
    let crowd = Crowd::listening(followers);
    town.publisher.more(500).await;
    let (ledger, followers, _gateways) = town.end(crowd).await;
    for follower in &followers {
        follower.assert_complete(&ledger);
        assert!(follower.n_seen() > 100, "{} heard {} events after the reset", follower.name, follower.n_seen());
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_flushed_redis_is_told_to_every_session_and_live_events_go_on() {
    let (town, followers) = Town::new(Persistence::None, 40).await;
    assert_everybody_is_told(town, followers, async |town| town.redis.flushall()).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_redis_that_comes_back_empty_is_told_to_every_session() {
    let (town, followers) = Town::new(Persistence::None, 40).await;
    let kill = async |town: &mut Town| town.restart_redis(Duration::from_millis(300)).await;
    assert_everybody_is_told(town, followers, kill).await;
}

async fn ws(gateway: &GatewayProcess, channels: &[&str]) -> WsClient {
    let bearer = format!("Bearer {}", token(&json!({"sub": "u", "channels": channels, "subscribe": ["*"]})));
    WsClient::connect(gateway.public(), "/v1/ws", &[("Authorization", &bearer)]).await.expect("a session")
}

/// Reads up to the event with this `data`; nothing may end the session before.
async fn until_data(client: &mut WsClient, data: &str) {
    while client.json().await["data"] != data {}
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sessions_outlast_a_redis_that_is_away_and_the_node_says_unready_meanwhile() {
    const AUTH_TIMEOUT: Duration = Duration::from_millis(500);
    const GRACE: Duration = Duration::from_secs(1);
    let mut redis = RedisServer::plain();
    let options = options(&redis.url()).env("GATEWAY_AUTH_TIMEOUT", "500ms").env("GATEWAY_READY_REDIS_GRACE", "1s");
    let gateway = GatewayProcess::start(options).await;
    let lag = Lag::watch();
    let mut client = ws(&gateway, &["news"]).await;
    client.until("ready").await;
    for round in 0..2 {
        block_in_place(|| redis.kill9());
        let gone = Instant::now();
        client.send_json(&json!({"type": "subscribe", "ref": round, "channel": format!("late-{round}")})).await;
        let answer = client.json().await;
        assert_eq!(
            (&answer["type"], &answer["code"], &answer["retry"]),
            (&json!("error"), &json!("unavailable"), &json!(true))
        );
        let took = gone.elapsed();
        assert!(took >= AUTH_TIMEOUT / 2 && took < AUTH_TIMEOUT + Duration::from_secs(1) + lag.longest(), "{took:?}");
        let key = json!({"channel": "news", "data": "lost?", "idempotency_key": format!("k{round}")});
        assert_eq!(gateway.try_publish(&key).await.status(), 503);

        let ready = http::get(gateway.probes(), "/readyz").await;
        assert!(
            ready.status() == 200 || gone.elapsed() >= GRACE,
            "unready after {:?}: {}",
            gone.elapsed(),
            ready.text()
        );
        gateway.until_status("/readyz", 503).await;
        let unready_after = gone.elapsed();
        assert!(
            unready_after >= GRACE && unready_after < GRACE + Duration::from_secs(3) + lag.longest(),
            "{unready_after:?}"
        );
        let unready = http::get(gateway.probes(), "/readyz").await;
        assert_eq!(unready.json()["reasons"], json!(["pubsub_down"]), "{}", unready.text());
        assert_eq!(http::get(gateway.probes(), "/livez").await.status(), 200);
        // A newcomer is refused for now, not for good, and in time.
        let bearer = format!("Bearer {}", token(&json!({"sub": "new"})));
        let asked = Instant::now();
        let refused = WsClient::connect(gateway.public(), "/v1/ws", &[("Authorization", &bearer)]).await;
        let refused = refused.err().expect("nobody can say whether the token was revoked");
        assert_eq!((refused.status(), &refused.json()["code"]), (503, &json!("auth_unavailable")));
        assert!(asked.elapsed() < AUTH_TIMEOUT + Duration::from_secs(1) + lag.longest(), "{:?}", asked.elapsed());

        tokio::time::sleep_until(gone + Duration::from_secs(5)).await;
        block_in_place(|| redis.restart());
        let back = Instant::now();
        gateway.until_status("/readyz", 200).await;
        // It kept nothing, so the session is told; and then hears again.
        let said = client.until("ready").await;
        let (gaps, _ready) = said.split_at(said.len() - 1);
        assert_eq!(gaps.len(), 1 + round, "one a channel: {said:?}");
        assert!(gaps.iter().all(|gap| gap["reason"] == "reset"), "{said:?}");
        gateway.publish_once_it_can("news", &json!("again")).await;
        until_data(&mut client, "again").await;
        // The longest pause between two dials is 2 s.
        assert!(back.elapsed() < Duration::from_secs(4) + lag.longest(), "{:?}", back.elapsed());
        // The connection that this needs comes back by itself.
        loop {
            client.send_json(&json!({"type": "subscribe", "channel": format!("late-{round}")})).await;
            let answer = client.json().await;
            if answer["type"] == "ok" {
                break;
            }
            assert_eq!((&answer["type"], &answer["code"]), (&json!("error"), &json!("unavailable")), "{answer}");
        }
    }
}

/// The channels that Redis has subscribers on, without the prefix.
fn subscribed(redis: &RedisServer) -> BTreeSet<String> {
    let names = redis.cli(&["PUBSUB", "CHANNELS", "tidegate:live:*"]);
    names.lines().filter_map(|name| name.strip_prefix("tidegate:live:")).map(str::to_owned).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn after_a_lost_link_exactly_the_wanted_channels_are_subscribed() {
    let redis = RedisServer::plain();
    let wire = Proxy::start(redis.addr()).await;
    // Newcomers are let in during the outage.
    let options = options(&redis.url_at(wire.port())).env("GATEWAY_REVOCATION_UNAVAILABLE", "allow");
    let gateway = GatewayProcess::start(options).await;
    let names = |range: std::ops::Range<usize>| range.map(|i| format!("c{i}")).collect::<Vec<_>>();
    let (kept, removed, added) = (names(0..60), names(60..90), names(90..110));
    let mut keeper = ws(&gateway, &kept.iter().map(String::as_str).collect::<Vec<_>>()).await;
    let mut leaver = ws(&gateway, &removed.iter().map(String::as_str).collect::<Vec<_>>()).await;
    keeper.until("ready").await;
    leaver.until("ready").await;
    assert_eq!(subscribed(&redis), kept.iter().chain(&removed).cloned().collect());

    redis.kill_pubsub_links();
    wire.close();
    drop(leaver);
    let mut newcomer = ws(&gateway, &added.iter().map(String::as_str).collect::<Vec<_>>()).await;
    assert_eq!(newcomer.json().await["type"], "hello", "ready is late, hello is not");
    wire.open();
    newcomer.until("ready").await;
    let wanted: BTreeSet<String> = kept.iter().chain(&added).cloned().collect();
    assert!(subscribed(&redis).is_superset(&wanted));
    // A channel nobody hears any more is kept for some seconds in case its listener comes back.
    let until = Instant::now() + Duration::from_secs(20);
    while subscribed(&redis) != wanted {
        assert!(Instant::now() < until, "{:?} instead of {wanted:?}", subscribed(&redis));
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    for (client, channels) in [(&mut keeper, &kept), (&mut newcomer, &added)] {
        for channel in channels {
            let counted = redis.cli(&["PUBSUB", "NUMSUB", &format!("tidegate:live:{channel}")]);
            assert!(counted.ends_with("\n1"), "{counted}");
            gateway.publish_once_it_can(channel, &json!(channel)).await;
            until_data(client, channel).await;
        }
    }
}

/// What a node behind `wire` missed while `away`, published by another: everything is made up for,
/// in order, before anything newer.
async fn assert_made_up_for(
    wire: &Proxy,
    away: &GatewayProcess,
    present: &GatewayProcess,
    cut: impl AsyncFnOnce(&Proxy),
) {
    let mut followers = Vec::new();
    for transport in Transport::ALL {
        let token = token(&json!({"sub": "u", "channels": CHANNELS}));
        let mut follower = Follower::new(format!("{transport:?}"), transport, &token, &CHANNELS);
        follower.connect(away.public()).await;
        follower.until(|message| message["type"] == "ready").await;
        followers.push(follower);
    }
    let crowd = Crowd::listening(followers);
    let publisher = Publisher::start(&CHANNELS, vec![Route::Admin(present.admin())], 100);
    publisher.more(20).await;
    cut(wire).await;
    publisher.more(50).await;
    let ledger = publisher.stop().await;
    assert_nobody_noticed(&ledger, &crowd.at_the_end().await);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_one_node_missed_is_made_up_for_from_the_log() {
    let redis = RedisServer::plain();
    let wire = Proxy::start(redis.addr()).await;
    let (a, b) = tokio::join!(
        GatewayProcess::start(options(&redis.url_at(wire.port())).patient()),
        GatewayProcess::start(options(&redis.url()).patient())
    );
    assert_made_up_for(&wire, &a, &b, async |wire: &Proxy| {
        wire.close();
        tokio::time::sleep(Duration::from_secs(2)).await;
        wire.open();
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_wire_that_swallows_everything_is_found_out_and_made_up_for() {
    let redis = RedisServer::plain();
    let wire = Proxy::start(redis.addr()).await;
    let swallowed = options(&redis.url_at(wire.port())).env("GATEWAY_READY_REDIS_GRACE", "1s");
    let (a, b) = tokio::join!(GatewayProcess::start(swallowed), GatewayProcess::start(options(&redis.url())));
    let (node, bearer) = (&a, format!("Bearer {}", token(&json!({"sub": "new"}))));
    let lag = &Lag::watch();
    assert_made_up_for(&wire, &a, &b, async |wire: &Proxy| {
        let silent = Instant::now();
        wire.set(Direction::Up, Flow::Swallow);
        wire.set(Direction::Down, Flow::Swallow);
        // Commands and handshakes end at their own deadlines, long before the link is found dead.
        let refused = WsClient::connect(node.public(), "/v1/ws", &[("Authorization", &bearer)]).await;
        assert_eq!(refused.err().expect("nobody can say whether the token was revoked").status(), 503);
        assert_eq!(node.try_publish(&json!({"channel": "x", "data": 1})).await.status(), 503);
        assert!(silent.elapsed() < Duration::from_secs(4) + lag.longest(), "{:?}", silent.elapsed());
        // A beacon or PING each second, 3 s for its answer, 1 s of grace.
        node.until_status("/readyz", 503).await;
        assert!(silent.elapsed() < Duration::from_secs(8) + lag.longest(), "{:?}", silent.elapsed());
        let reasons = http::get(node.probes(), "/readyz").await.json()["reasons"].clone();
        assert!(reasons == json!(["pubsub_down"]) || reasons == json!(["pubsub_deaf"]), "{reasons}");
        wire.set(Direction::Up, Flow::Pass);
        wire.set(Direction::Down, Flow::Pass);
        node.until_status("/readyz", 200).await;
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn without_history_a_lost_link_is_told_to_whoever_was_connected() {
    let redis = RedisServer::plain();
    let wire = Proxy::start(redis.addr()).await;
    let none = |url: String| options(&url).patient().env("GATEWAY_HISTORY_SIZE", "0");
    let (a, b) =
        tokio::join!(GatewayProcess::start(none(redis.url_at(wire.port()))), GatewayProcess::start(none(redis.url())));
    let mut clients = [ws(&a, &["news", "quiet"]).await, ws(&a, &["news", "quiet"]).await];
    for client in &mut clients {
        client.until("ready").await;
    }
    wire.close();
    b.publish("news", &json!("missed")).await;
    wire.open();
    a.until_status("/readyz", 200).await;
    for client in &mut clients {
        let mut gaps =
            [client.json().await, client.json().await].map(|gap| (gap["channel"].clone(), gap["reason"].clone()));
        gaps.sort_by_key(|(channel, _)| channel.to_string());
        let no_history = |channel: &str| (json!(channel), json!("no_history"));
        assert_eq!(gaps, [no_history("news"), no_history("quiet")]);
    }
    b.publish("news", &json!("heard")).await;
    for client in &mut clients {
        until_data(client, "heard").await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_connection_that_redis_closed_for_idling_costs_no_handshake() {
    let redis = RedisServer::plain();
    let gateway = GatewayProcess::start(options(&redis.url()).patient()).await;
    let mut client = ws(&gateway, &["news"]).await;
    client.until("ready").await;
    redis.cli(&["CONFIG", "SET", "timeout", "1"]);
    for round in 0..5 {
        // Idling is the matter itself: over the timeout and the server's own second of slack.
        tokio::time::sleep(Duration::from_millis(2_300)).await;
        let mut newcomer = ws(&gateway, &["news"]).await;
        newcomer.until("ready").await;
        gateway.publish("news", &json!(format!("{round}"))).await;
        until_data(&mut newcomer, &format!("{round}")).await;
        until_data(&mut client, &format!("{round}")).await;
    }
}
