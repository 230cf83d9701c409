//! Behind the balancers that people have, with the configurations that we ship for them: a node that
//! leaves, one that dies, and a crowd that is told to come later. What must not happen is the same in
//! all: clients sent where nobody takes them while other nodes have room.

use std::net::SocketAddr;
use std::time::Duration;

use futures_util::future::join_all;
use serde_json::json;
use testkit::balancer::{Backend, Balancer, Product};
use testkit::gateway::{GatewayOptions, GatewayProcess, Signal};
use testkit::http::Response;
use testkit::sse::SseClient;
use testkit::ws::WsClient;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep};

use crate::{Ending, SOON, bearer, claims, n_open, options, sse_end, until_open, ws_end};

const N_NODES: usize = 3;

/// Three nodes, and the balancer in front with the file that we ship for it.
async fn fleet(product: Product, each: impl Fn(GatewayOptions) -> GatewayOptions) -> (Vec<GatewayProcess>, Balancer) {
    let behind = || each(options().env("GATEWAY_TRUSTED_PROXIES", "127.0.0.0/8").env("GATEWAY_IP_RATE", "0"));
    let nodes = join_all((0..N_NODES).map(|_| GatewayProcess::start(behind()))).await;
    let backends: Vec<Backend> = nodes.iter().map(Backend::from).collect();
    let shipped = match product {
        Product::Haproxy => include_str!("../../../deploy/haproxy.cfg"),
        Product::Nginx => include_str!("../../../deploy/nginx.conf"),
    };
    let balancer = tokio::task::block_in_place(|| Balancer::start(product, shipped, &backends));
    (nodes, balancer)
}

enum Client {
    Ws(WsClient),
    Sse(SseClient),
}

/// A client as the balancer sees it, WebSocket and event stream by turns.
async fn try_open(at: SocketAddr, i: usize) -> Result<Client, Response> {
    let auth = bearer(&claims(&format!("u{i}")));
    let auth = [("Authorization", auth.as_str())];
    if i.is_multiple_of(2) {
        WsClient::connect(at, "/v1/ws", &auth).await.map(Client::Ws)
    } else {
        SseClient::connect(at, "/v1/sse", &auth).await.map(Client::Sse)
    }
}

/// Opens it, and whoever is turned away fails the test.
async fn open(balancer: &Balancer, i: usize) -> Client {
    let opened = try_open(balancer.addr(), i).await;
    opened.unwrap_or_else(|answer| panic!("client {i}: {} {}\n{}", answer.status(), answer.text(), balancer.log()))
}

/// Reads up to `ready` and then to the end.
async fn end(client: Client) -> Ending {
    match client {
        Client::Ws(mut client) => {
            client.until("ready").await;
            ws_end(client).await
        }
        Client::Sse(mut client) => {
            client.until("ready").await;
            sse_end(client).await
        }
    }
}

/// Opens `n` through the balancer: to each node its equal part.
async fn even_crowd(nodes: &[GatewayProcess], balancer: &Balancer, n: usize) -> JoinSet<Ending> {
    let mut ends = JoinSet::new();
    for i in 0..n {
        ends.spawn(end(open(balancer, i).await));
    }
    for node in nodes {
        let is = n_open(node).await;
        assert!((is - (n / N_NODES) as f64).abs() <= 2.0, "{is} of {n} on one of {N_NODES}");
    }
    ends
}

/// Between two newcomers.
const EVERY: Duration = Duration::from_millis(50);

/// A node leaves under a steady stream of newcomers, and whoever it moves comes back at once: all of
/// them are served, by the node itself during its grace and by the others after it.
async fn nobody_notices_a_node_that_leaves(product: Product) {
    const N: usize = 45;
    // The grace is the default one: that is what the balancers' files are made for.
    let leaves = |node: GatewayOptions| node.env("GATEWAY_DRAIN_WINDOW", "2s").env("GATEWAY_CLOSE_TIMEOUT", "1s");
    let (mut nodes, balancer) = fleet(product, leaves).await;
    let mut ends = even_crowd(&nodes, &balancer, N).await;
    let mut leaving = nodes.remove(0);
    leaving.signal(Signal::Term);
    let (mut n_newcomers, mut n_moved) = (0, 0);
    let mut gone_at = None;
    while gone_at.is_none_or(|at: Instant| at.elapsed() < Duration::from_secs(1)) {
        while let Some(moved) = ends.try_join_next() {
            assert_eq!(moved.unwrap().words(), ("drain", 1001, "after"));
            n_moved += 1;
            ends.spawn(end(open(&balancer, n_moved).await));
        }
        n_newcomers += 1;
        ends.spawn(end(open(&balancer, 1_000 + n_newcomers).await));
        if gone_at.is_none() && leaving.ended().is_some() {
            gone_at = Some(Instant::now());
        }
        sleep(EVERY).await;
    }
    assert!(leaving.wait(SOON).await.success(), "{}", leaving.stderr());
    // Some of those who came during the grace have been moved too.
    assert!(n_newcomers > 20 && n_moved >= N / N_NODES - 2, "{n_newcomers} came and {n_moved} were moved");
    // Whoever was moved last, and had not heard of it yet, is back as well.
    let until = Instant::now() + SOON;
    loop {
        while let Some(moved) = ends.try_join_next() {
            assert_eq!(moved.unwrap().words(), ("drain", 1001, "after"));
            n_moved += 1;
            ends.spawn(end(open(&balancer, n_moved).await));
        }
        let n = n_open(&nodes[0]).await + n_open(&nodes[1]).await;
        if n == (N + n_newcomers) as f64 {
            return;
        }
        assert!(Instant::now() < until, "{n} of {N} and {n_newcomers} are there");
        sleep(EVERY).await;
    }
}

/// A node is killed: nobody waits for a health check to find out.
async fn a_dead_node_turns_nobody_away(product: Product) {
    const N: usize = 30;
    let (mut nodes, balancer) = fleet(product, |node| node).await;
    let mut ends = even_crowd(&nodes, &balancer, N).await;
    let mut dead = nodes.remove(0);
    dead.signal(Signal::Kill);
    dead.wait(SOON).await;
    // Emptier than any other by now: least connections has it in mind first of all.
    let mut served = Vec::new();
    for i in 0..60 {
        served.push(open(&balancer, N + i).await);
        sleep(EVERY).await;
    }
    ends.abort_all();
}

/// More come than the nodes take a second. Quick refusals must not look like failures to a balancer:
/// nodes taken out for them would leave the crowd to the others, which then refuse as well.
async fn a_crowd_that_is_told_to_wait_takes_no_node_out(product: Product) {
    const N: usize = 120;
    let small = |node: GatewayOptions| node.env("GATEWAY_ACCEPT_BURST", "5").env("GATEWAY_ACCEPT_RATE", "20");
    let (nodes, balancer) = fleet(product, small).await;
    let at = balancer.addr();
    let waits = |i: usize| async move {
        let (mut n_refused, until) = (0, Instant::now() + Duration::from_secs(120));
        loop {
            match try_open(at, i).await {
                Ok(client) => return (client, n_refused),
                Err(answer) => {
                    // Ours, and not a balancer's that has nobody left to send it to.
                    assert_eq!((answer.status(), &answer.json()["code"]), (503, &json!("overloaded")));
                    assert!(Instant::now() < until, "client {i} was refused {n_refused} times");
                    n_refused += 1;
                    let after = answer.json()["retry_after_ms"].as_u64().expect("told when");
                    sleep(Duration::from_millis(after)).await;
                }
            }
        }
    };
    let came: Vec<(Client, usize)> = join_all((0..N).map(waits)).await;
    assert!(came.iter().any(|(_, n_refused)| *n_refused > 0), "it was no storm");
    for node in &nodes {
        let is = n_open(node).await;
        let even = (N / N_NODES) as f64;
        assert!((is - even).abs() <= 0.4 * even, "{is} of {N} on one of {N_NODES}\n{}", balancer.log());
    }
    drop(came);
    for node in &nodes {
        until_open(node, 0.0).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn behind_haproxy_nobody_notices_a_node_that_leaves() {
    nobody_notices_a_node_that_leaves(Product::Haproxy).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn behind_nginx_nobody_notices_a_node_that_leaves() {
    nobody_notices_a_node_that_leaves(Product::Nginx).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn behind_haproxy_a_dead_node_turns_nobody_away() {
    a_dead_node_turns_nobody_away(Product::Haproxy).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn behind_nginx_a_dead_node_turns_nobody_away() {
    a_dead_node_turns_nobody_away(Product::Nginx).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn behind_haproxy_a_crowd_that_is_told_to_wait_takes_no_node_out() {
    a_crowd_that_is_told_to_wait_takes_no_node_out(Product::Haproxy).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn behind_nginx_a_crowd_that_is_told_to_wait_takes_no_node_out() {
    a_crowd_that_is_told_to_wait_takes_no_node_out(Product::Nginx).await;
}
