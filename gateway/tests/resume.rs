//! Nothing is lost when a client moves: between nodes, at random moments, under load. The real
//! binary, a real Redis, raw clients. What odd cursors get stands in `resume/positions.rs`, what
//! one channel of a session gets in `resume/channels.rs`, what an outage does in `outage.rs`.

#[path = "resume/channels.rs"]
mod channels;
#[path = "resume/positions.rs"]
mod positions;

use std::net::SocketAddr;
use std::time::Duration;

use futures_util::future::join_all;
use hub::clock::Dice;
use serde_json::{Value, json};
use testkit::chance::dice;
use testkit::gateway::{GatewayOptions, GatewayProcess, Signal, token};
use testkit::numbered::{Follower, Id, Publisher, Route, Transport};
use testkit::proxy::Proxy;
use testkit::redis::RedisServer;
use tokio::sync::watch;

const CHANNELS: [&str; 3] = ["orders", "prices", "room:7"];

/// A gateway on this Redis whose history is long enough for every test that allows no gap, and
/// whose limits on newcomers are out of the way.
fn options(redis: &str) -> GatewayOptions {
    GatewayOptions::new(env!("CARGO_BIN_EXE_tidegate"))
        .patient()
        .env("GATEWAY_REDIS_URL", redis)
        .env("GATEWAY_HISTORY_SIZE", "100000")
        .env("GATEWAY_REPLAY_MAX", "100000")
        .env("GATEWAY_ACCEPT_BURST", "100000")
        .env("GATEWAY_ACCEPT_RATE", "100000")
        .env("GATEWAY_DRAIN_GRACE", "0s")
        .env("GATEWAY_LOG", "warn")
}

fn below(dice: &Dice, n: u64) -> u64 {
    dice.bits() % n
}

fn function(redis: &RedisServer) -> Route {
    Route::Function { redis: redis.addr(), log: "tidegate:log".to_owned() }
}

fn hearing_all(sub: &str) -> String {
    token(&json!({"sub": sub, "channels": CHANNELS}))
}

/// Moves so often, each time to a gateway by chance, after a number of messages by chance: in the
/// midst of the replay, at its seam, or long after. The connection is dropped as it stands.
async fn moved(mut follower: Follower, gateways: [SocketAddr; 2], n_moves: usize, dice: Dice) -> Follower {
    for _ in 0..n_moves {
        follower.connect(gateways[below(&dice, 2) as usize]).await;
        for _ in 0..below(&dice, 40) {
            let message = follower.next().await;
            assert!(message.is_some(), "{}: the gateway ended the session: {:?}", follower.name, follower.byes);
        }
        follower.cut();
    }
    follower.connect(gateways[0]).await;
    follower
}

async fn assert_a_move_loses_nothing(publisher: Publisher, gateways: [SocketAddr; 2], n_moves: usize) {
    let dice = dice();
    let movers = Transport::ALL.map(|transport| {
        let follower = Follower::new(format!("{transport:?}"), transport, &hearing_all("mover"), &CHANNELS);
        moved(follower, gateways, n_moves, dice.clone())
    });
    let movers = join_all(movers).await;
    let ledger = publisher.stop().await;
    for mut mover in movers {
        mover.until_at(ledger.last()).await;
        mover.assert_complete(&ledger);
        println!("{}: {} events over {n_moves} moves", mover.name, mover.n_seen());
        assert!(mover.readies.iter().skip(1).all(|ready| ready["resume"] == "ok"), "{:?}", mover.readies);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_that_moves_three_hundred_times_between_two_gateways_misses_nothing() {
    let redis = RedisServer::plain();
    let (a, b) =
        tokio::join!(GatewayProcess::start(options(&redis.url())), GatewayProcess::start(options(&redis.url())));
    let routes = vec![Route::Admin(a.admin()), Route::Admin(b.admin()), function(&redis)];
    let publisher = Publisher::start(&CHANNELS, routes, 1_000);
    assert_a_move_loses_nothing(publisher, [a.public(), b.public()], 300).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_event_between_a_slow_history_read_and_the_live_stream_is_not_missed() {
    let redis = RedisServer::plain();
    let slow = Proxy::start(redis.addr()).await;
    let behind = options(&redis.url_at(slow.port()));
    let (a, b) = tokio::join!(GatewayProcess::start(options(&redis.url())), GatewayProcess::start(behind));
    slow.delay(Duration::from_millis(50));
    let publisher = Publisher::start(&CHANNELS, vec![Route::Admin(a.admin()), function(&redis)], 500);
    assert_a_move_loses_nothing(publisher, [b.public(), b.public()], 40).await;
}

/// What the project's own client hands to a program, until it has come to `end`: where it began, and
/// every event.
async fn read(mut client: client::Client, mut end: watch::Receiver<Option<Id>>) -> (Id, Vec<(Id, u64)>) {
    let (mut start, mut seen, mut n_lost) = (None, Vec::<(Id, u64)>::new(), 0);
    loop {
        let reached = seen.last().map(|(id, _)| *id);
        if end.borrow_and_update().is_some_and(|end| reached >= Some(end)) {
            assert!(n_lost > 0, "it was cut");
            return (start.expect("ready came first"), seen);
        }
        let message = tokio::select! {
            message = client.next() => message,
            changed = end.changed() => { changed.expect("the test waits for us"); continue }
        };
        match message.expect("the client never gives up") {
            client::Message::Ready(ready) => start = start.or(ready.id.as_deref().map(Id::new)),
            client::Message::Event(event) => {
                let data: Value = serde_json::from_str(event.data.get()).expect("JSON");
                let id = Id::new(&event.id.expect("logged"));
                assert!(reached.is_none_or(|reached| id > reached), "in order, no double");
                seen.push((id, data["n"].as_u64().expect("numbered")));
            }
            client::Message::Gap(gap) => panic!("{gap:?}"),
            client::Message::Lost(_) => n_lost += 1,
            _ => {}
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn our_own_client_comes_back_from_a_cut_with_everything() {
    let dice = dice();
    let redis = RedisServer::plain();
    let gateway = GatewayProcess::start(options(&redis.url())).await;
    let wire = Proxy::start(gateway.public()).await;
    let publisher = Publisher::start(&CHANNELS, vec![Route::Admin(gateway.admin())], 300);
    let end = watch::Sender::new(None);
    let readers = [client::Transport::Ws, client::Transport::Sse].map(|transport| {
        let url = format!("http://{}", wire.addr());
        let client = client::Client::builder(url).token(hearing_all("u")).transport(transport).seed(dice.bits());
        tokio::spawn(read(client.connect().expect("a good URL"), end.subscribe()))
    });
    publisher.more(200).await;
    while wire.n_open() < 2 {
        // Both are on their way.
        publisher.more(1).await;
    }
    wire.cut();
    publisher.more(200).await;
    let ledger = publisher.stop().await;
    end.send_replace(Some(ledger.last()));
    for reader in readers {
        let (start, seen) = reader.await.expect("it saw everything");
        let mut truth: Vec<_> = CHANNELS.iter().flat_map(|c| ledger.between(c, start, ledger.last())).collect();
        truth.sort_unstable();
        assert_eq!(seen, truth);
    }
}

/// Comes back at once whenever the session is ended, until it was so often.
async fn recycled(mut follower: Follower, gateway: SocketAddr, n_times: usize) -> Follower {
    while follower.byes.len() < n_times {
        follower.connect(gateway).await;
        while follower.next().await.is_some() {}
        let bye = follower.byes.last().expect("no session of a recycling node ends without a word");
        assert_eq!((&bye["reason"], &bye["reconnect"]), (&json!("recycle"), &json!("after")), "{bye}");
        // WebSocket and SSE alike: the bye's id is where the next connection goes on.
        assert_eq!(bye["id"].as_str(), follower.cursor.as_deref(), "{bye}");
    }
    follower.connect(gateway).await;
    follower
}

#[tokio::test(flavor = "multi_thread")]
async fn an_event_published_as_a_session_is_recycled_is_not_missed() {
    let redis = RedisServer::plain();
    let short = options(&redis.url()).env("GATEWAY_MAX_AGE_MIN", "1s").env("GATEWAY_MAX_AGE_MAX", "2s");
    let gateway = GatewayProcess::start(short).await;
    let publisher = Publisher::start(&CHANNELS, vec![function(&redis)], 200);
    let followers = (0..6).map(|i| {
        let transport = Transport::ALL[i % 2];
        let follower = Follower::new(format!("{transport:?} {i}"), transport, &hearing_all("stayer"), &CHANNELS);
        recycled(follower, gateway.public(), 4)
    });
    let followers = join_all(followers).await;
    let ledger = publisher.stop().await;
    for mut follower in followers {
        // The last one may be recycled, too, before it has everything.
        while follower.reached() < ledger.last() {
            if follower.next().await.is_none() {
                follower.connect(gateway.public()).await;
            }
        }
        follower.assert_complete(&ledger);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_clients_of_a_dead_node_get_what_they_missed_from_another() {
    let redis = RedisServer::plain();
    let (a, b) =
        tokio::join!(GatewayProcess::start(options(&redis.url())), GatewayProcess::start(options(&redis.url())));
    let mut followers = Vec::new();
    for transport in Transport::ALL {
        let mut follower = Follower::new(format!("{transport:?}"), transport, &hearing_all("orphan"), &CHANNELS);
        follower.connect(a.public()).await;
        follower.until(|message| message["type"] == "ready").await;
        followers.push(follower);
    }
    a.signal(Signal::Kill);
    for follower in &mut followers {
        while follower.next().await.is_some() {}
    }
    let publisher = Publisher::start(&CHANNELS, vec![Route::Admin(b.admin())], 1_000);
    publisher.more(20).await;
    let ledger = publisher.stop().await;
    for mut follower in followers {
        follower.connect(b.public()).await;
        let ready = follower.until(|message| message["type"] == "ready").await;
        assert_eq!((&ready["resume"], &ready["replayed"]), (&json!("ok"), &json!(ledger.n_events())));
        follower.assert_complete(&ledger);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_quiet_session_is_told_its_position_and_its_bye_carries_one() {
    let redis = RedisServer::plain();
    // A quarter of the TTL: once a second.
    let quiet = || options(&redis.url()).env("GATEWAY_HISTORY_TTL", "4s");
    let gateway = GatewayProcess::start(quiet()).await;
    let mut followers = Vec::new();
    for transport in Transport::ALL {
        let mut follower = Follower::new(format!("{transport:?}"), transport, &hearing_all("quiet"), &CHANNELS);
        follower.connect(gateway.public()).await;
        follower.until(|message| message["type"] == "ready").await;
        followers.push(follower);
    }
    // Longer than the TTL: without positions the cursor would have aged out.
    for follower in &mut followers {
        let first = follower.reached();
        for _ in 0..5 {
            let before = follower.reached();
            let position = follower.until(|_| true).await;
            assert_eq!(position["type"], "position");
            assert_eq!(position["id"].as_str(), follower.cursor.as_deref());
            assert!(follower.reached() >= before);
        }
        assert!(follower.reached() > first, "a position that stands still ages as well");
    }
    // Where they go is there before: their positions are good for four seconds.
    let other = GatewayProcess::start(quiet()).await;
    gateway.signal(Signal::Term);
    for follower in &mut followers {
        while follower.next().await.is_some() {}
        let bye = &follower.byes[0];
        assert_eq!((&bye["reason"], bye["id"].as_str()), (&json!("drain"), follower.cursor.as_deref()), "{bye}");
    }
    let id = other.publish("orders", &json!({"n": 1})).await;
    for mut follower in followers {
        follower.connect(other.public()).await;
        follower.until_at(Id::new(&id)).await;
        assert_eq!((follower.gaps.len(), follower.n_seen()), (0, 1), "{}", follower.name);
        follower.until(|message: &Value| message["type"] == "ready" && message["resume"] == "ok").await;
    }
}
