//! Calls of back ends that are under way when the process ends: what was done is answered.

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use serde_json::json;
use testkit::gateway::{GatewayProcess, Signal};
use testkit::http::Wire;
use testkit::lag::Lag;
use testkit::proxy::Proxy;
use testkit::redis::RedisServer;
use testkit::ws::WsClient;
use tokio::net::TcpStream;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep};

use crate::{SOON, claims, options, ws};

const N_PUBLISHERS: u64 = 16;

/// Events in one call: stored one after the other, and answered when the last of them is.
const BATCH: u64 = 10;

/// Of each step between the node and Redis, so that at any moment all publishers are in the middle of a
/// call, which takes 200 ms.
const STEP: Duration = Duration::from_millis(10);

/// A call under way at the end has a second. On a machine that stands still for this long, no more is
/// to be said of it.
const STANDSTILL: Duration = Duration::from_millis(300);

/// Publishes the batches `first`, `first + step`, … one after the other on one connection, until that
/// ends. Gives those that were answered.
async fn publish_on(admin: SocketAddr, first: u64, step: u64, n_answered: Arc<AtomicUsize>) -> BTreeSet<u64> {
    let mut answered = BTreeSet::new();
    let Ok(socket) = TcpStream::connect(admin).await else { return answered };
    let mut wire = Wire::new(socket);
    for batch in (first..).step_by(usize::try_from(step).unwrap()) {
        let events: Vec<_> = (0..BATCH).map(|i| json!({"channel": "news", "data": batch * BATCH + i})).collect();
        let body = json!(events).to_string();
        let length = body.len().to_string();
        let fields = [("Content-Type", "application/json"), ("Content-Length", length.as_str())];
        let call = async {
            wire.ask("POST", "/v1/publish/batch", "localhost", &fields, body.as_bytes()).await?;
            let head = wire.head().await?;
            wire.body(&head).await.map(|_| head.status)
        };
        match call.await {
            Ok(status) => assert_eq!(status, 200, "{batch}"),
            Err(_) => break,
        }
        answered.insert(batch);
        n_answered.fetch_add(1, Ordering::Relaxed);
    }
    answered
}

/// Publishes a last event through `gateway` and gives the batches of all that a client heard up to it.
async fn heard(client: &mut WsClient, gateway: &GatewayProcess) -> BTreeSet<u64> {
    gateway.publish("news", &json!("the last")).await;
    let mut heard = BTreeSet::new();
    loop {
        let event = client.until("event").await.pop().expect("until gives at least one");
        let Some(data) = event["data"].as_u64() else { return heard };
        heard.insert(data / BATCH);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_was_published_at_the_end_was_answered_too() {
    const ROUND: u64 = 1_000_000;
    let redis = RedisServer::plain();
    let witness = GatewayProcess::start(options().env("GATEWAY_REDIS_URL", redis.url())).await;
    let mut hears = ws(&witness, &claims("witness")).await;
    for round in 1..=5 {
        let proxy = Proxy::start(redis.addr()).await;
        let leaving = options().env("GATEWAY_REDIS_URL", redis.url_at(proxy.port())).env("GATEWAY_DRAIN_GRACE", "0s");
        let mut gateway = GatewayProcess::start(leaving).await;
        proxy.delay(STEP);
        let n_answered = Arc::new(AtomicUsize::new(0));
        let mut publishing = JoinSet::new();
        for i in 0..N_PUBLISHERS {
            publishing.spawn(publish_on(gateway.admin(), round * ROUND + i, N_PUBLISHERS, n_answered.clone()));
        }
        let until = Instant::now() + SOON;
        while n_answered.load(Ordering::Relaxed) < N_PUBLISHERS as usize {
            assert!(Instant::now() < until, "{}", gateway.stderr());
            sleep(Duration::from_millis(5)).await;
        }
        let lag = Lag::watch();
        gateway.signal(Signal::Term);
        let answered: BTreeSet<u64> = publishing.join_all().await.into_iter().flatten().collect();
        assert!(gateway.wait(SOON).await.success(), "{}", gateway.stderr());
        let stood_still = lag.longest();
        let heard = heard(&mut hears, &witness).await;
        assert!(answered.is_subset(&heard), "{:?} never came", answered.difference(&heard));
        let unanswered: Vec<_> = heard.difference(&answered).collect();
        if unanswered.is_empty() {
            return;
        }
        assert!(stood_still > STANDSTILL, "stored and not answered: batches {unanswered:?}; lag {stood_still:?}");
    }
    panic!("this machine stands still all the time");
}
