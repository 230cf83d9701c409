//! Everybody is cut off at once by what stands in front: the balancer restarts. That is nobody's
//! fault here, so nobody is moved for it, and the crowd is back bit by bit with nothing missed.

use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use client::{Client, Message, Transport};
use futures_util::future::join_all;
use serde_json::{Value, json};
use testkit::balancer::{Backend, Balancer, Product};
use testkit::gateway::{GatewayOptions, GatewayProcess, token};
use testkit::http;
use testkit::redis::RedisServer;
use tokio::sync::watch;
use tokio::task::{JoinSet, block_in_place};
use tokio::time::{Instant, sleep};

use crate::{claims, n_open, options};

const N_NODES: usize = 3;
/// Clients of the project's own kind: they wait as they are told.
const N: usize = 90;

fn node(redis: &RedisServer, name: usize) -> GatewayOptions {
    options()
        .env("GATEWAY_REDIS_URL", redis.url())
        .env("GATEWAY_NODE", format!("node{name}"))
        .env("GATEWAY_TRUSTED_PROXIES", "127.0.0.0/8")
        .env("GATEWAY_IP_RATE", "0")
        .env("GATEWAY_FLEET_REPORT", "1s")
        .env("GATEWAY_SHED_INTERVAL", "1s")
        .env("GATEWAY_SHED_FRACTION", "0.1")
        // All at once is more than they take: some are told to come later.
        .env("GATEWAY_ACCEPT_BURST", "8")
        .env("GATEWAY_ACCEPT_RATE", "8")
}

fn balancer(nodes: &[GatewayProcess]) -> Balancer {
    let backends: Vec<Backend> = nodes.iter().map(Backend::from).collect();
    block_in_place(|| Balancer::start(Product::Haproxy, include_str!("../../../deploy/haproxy.cfg"), &backends))
}

/// What one client went through.
struct Life {
    client: Client,
    seen: Vec<u64>,
    /// Attempts that failed and connections that were lost, each of which is followed by an attempt.
    n_lost: usize,
    /// When it was last let in.
    back_at: Option<Instant>,
}

/// Reads until it has come to the number `end`, and fails where one is missing, double or out of order.
async fn live(client: Client, mut end: watch::Receiver<Option<u64>>, is_in: Arc<Mutex<usize>>) -> Life {
    let mut life = Life { client, seen: Vec::new(), n_lost: 0, back_at: None };
    while end.borrow_and_update().is_none_or(|end| life.seen.last() != Some(&end)) {
        let message = tokio::select! {
            message = life.client.next() => message.expect("it never gives up"),
            changed = end.changed() => { changed.expect("the test waits for us"); continue }
        };
        match message {
            Message::Ready(_) => {
                *is_in.lock().unwrap() += usize::from(life.back_at.is_none());
                life.back_at = Some(Instant::now());
            }
            Message::Event(event) => {
                let n: u64 = event.data.get().parse().expect("numbered");
                assert!(life.seen.last().is_none_or(|last| n == last + 1), "{n} after {:?}", life.seen.last());
                life.seen.push(n);
            }
            Message::Lost(_) => life.n_lost += 1,
            Message::Gap(gap) => panic!("{gap:?}"),
            _ => {}
        }
    }
    life
}

async fn sum(nodes: &[GatewayProcess], name: &str) -> f64 {
    join_all(nodes.iter().map(|node| node.metric(name))).await.into_iter().map(Option::unwrap_or_default).sum()
}

async fn all_open(nodes: &[GatewayProcess]) -> f64 {
    join_all(nodes.iter().map(n_open)).await.into_iter().sum()
}

async fn until_all_are_in(nodes: &[GatewayProcess]) -> Duration {
    let began = Instant::now();
    while all_open(nodes).await != N as f64 {
        assert!(began.elapsed() < Duration::from_secs(120), "{} of {N} are in", all_open(nodes).await);
        sleep(Duration::from_millis(50)).await;
    }
    began.elapsed()
}

/// Why this node moves nobody, if it says so.
async fn suspended(node: &GatewayProcess) -> Value {
    http::get(node.admin(), "/v1/fleet").await.json()["shedding"]["suspended"].clone()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_balancer_that_restarts_costs_a_wait_and_nothing_else() {
    let redis = RedisServer::plain();
    let nodes = join_all((0..N_NODES).map(|i| GatewayProcess::start(node(&redis, i)))).await;
    let mut front = balancer(&nodes);
    let at: Arc<Mutex<Option<SocketAddr>>> = Arc::new(Mutex::new(Some(front.addr())));
    let (end, is_in) = (watch::Sender::new(None), Arc::new(Mutex::new(0)));
    let mut lives = JoinSet::new();
    for i in 0..N {
        let at = at.clone();
        let client = Client::builder("http://gateway.test")
            .address_source(move || *at.lock().unwrap())
            .token(token(&claims(&format!("u{i}"))))
            .transport(if i.is_multiple_of(2) { Transport::Ws } else { Transport::Sse })
            .seed(i as u64);
        lives.spawn(live(client.connect().expect("a good URL"), end.subscribe(), is_in.clone()));
    }
    until_all_are_in(&nodes).await;
    while *is_in.lock().unwrap() != N {
        sleep(Duration::from_millis(10)).await;
    }
    let mut n_published = 0;
    let mut publish = async |n: u64| {
        for _ in 0..n {
            nodes[0].publish("news", &json!(n_published)).await;
            n_published += 1;
        }
    };
    publish(20).await;
    let opened = "gateway_sessions_opened_total{transport=\"ws\",resume=\"ok\"}";
    assert_eq!(sum(&nodes, opened).await, 0.0);

    // It is gone with every connection, and another one stands there a second later.
    let cut = Instant::now();
    drop(front);
    publish(20).await;
    sleep(Duration::from_secs(1)).await;
    front = balancer(&nodes);
    *at.lock().unwrap() = Some(front.addr());
    let took = until_all_are_in(&nodes).await;
    publish(20).await;
    end.send_replace(Some(n_published - 1));
    let lives = lives.join_all().await;
    println!("all back {took:?} after the restart");

    for life in &lives {
        assert_eq!(life.seen.len() as u64, n_published, "all of it, from the first one on");
        assert!(life.back_at.is_some_and(|at| at > cut) && life.client.end().is_none(), "it was cut, and is back");
    }
    // As many attempts as the wait needs: one that is lost with the connection, one that finds nobody
    // or no room now and then, and no hammering.
    let n_lost: usize = lives.iter().map(|life| life.n_lost).sum();
    assert!((N..=6 * N).contains(&n_lost), "{n_lost} attempts of {N} clients");
    assert!(sum(&nodes, "gateway_refused_total{code=\"overloaded\"}").await > 0.0, "it was no crowd");
    for node in &nodes {
        let is = n_open(node).await;
        let even = (N / N_NODES) as f64;
        assert!((is - even).abs() <= 0.4 * even, "{is} of {N} on one of {N_NODES}\n{}", front.log());
        assert_eq!(node.metric("gateway_shed_total").await, Some(0.0));
        assert!(suspended(node).await.as_array().is_some_and(|why| !why.is_empty()), "the total has just jumped");
    }
    // What was cut was lost, and everybody is counted once.
    let closed = sum(&nodes, &crate::closed("lost")).await + sum(&nodes, &crate::closed("client")).await;
    assert_eq!(closed, N as f64);
}
