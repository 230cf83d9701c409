//! Behind the balancers that people have, with the configurations that we ship for them: a node that
//! leaves, one that dies, and a crowd that is told to come later. What must not happen is the same in
//! all: clients sent where nobody takes them while other nodes have room. A browser's own EventSource
//! is looked at apart, for it sees neither statuses nor headers.

use std::collections::HashSet;
use std::net::SocketAddr;
use std::time::Duration;

use futures_util::future::join_all;
use serde_json::json;
use testkit::balancer::{Backend, Balancer, Product};
use testkit::gateway::{GatewayOptions, GatewayProcess, Signal, token};
use testkit::http::{Response, get};
use testkit::sse::SseClient;
use testkit::ws::WsClient;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep};

use crate::{Ending, SOON, bearer, claims, n_open, options, sse_end, until_open, ws_end};

const N_NODES: usize = 3;

/// Three nodes, and the balancer in front with the file that we ship for it; the nodes say "later"
/// as that file wants it.
async fn fleet(product: Product, each: impl Fn(GatewayOptions) -> GatewayOptions) -> (Vec<GatewayProcess>, Balancer) {
    let sse_refuse = match product {
        Product::Haproxy => "auto",
        Product::Nginx => "status",
    };
    let behind = || {
        let node = options().env("GATEWAY_TRUSTED_PROXIES", "127.0.0.0/8").env("GATEWAY_IP_RATE", "0");
        each(node.env("GATEWAY_SSE_REFUSE", sse_refuse))
    };
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

/// What a browser's EventSource has of one connection.
enum Round {
    /// Past `ready`.
    In(SseClient),
    /// Told to come later, by the gateway or by the balancer in its words.
    Later(Duration),
}

/// One connection of an EventSource: the token in the query, no header of its own. An answer that
/// ends it for ever fails the test.
async fn round(at: SocketAddr, i: usize) -> Round {
    let path = format!("/v1/sse?access_token={}", token(&claims(&format!("u{i}"))));
    match SseClient::connect(at, &path, &[]).await {
        Ok(mut client) => {
            let first = client.block().await;
            if first.kind() == "hello" {
                client.until("ready").await;
                return Round::In(client);
            }
            assert_eq!(first.kind(), "bye", "{first:?}");
            Round::Later(Duration::from_millis(first.retry.expect("told when")))
        }
        Err(answer) => Round::Later(later(&answer)),
    }
}

/// How long it waits after nginx's own answer, which is in each word what the gateway would say.
fn later(answer: &Response) -> Duration {
    assert_eq!(answer.status(), 200, "out for ever: {}", answer.text());
    assert_eq!(answer.header("content-type"), Some("text/event-stream"));
    assert_eq!(answer.header("cache-control"), Some("no-store, no-transform"));
    let retry = answer.text().lines().next().and_then(|line| line.strip_prefix("retry: "));
    let ms: u64 = retry.and_then(|ms| ms.parse().ok()).unwrap_or_else(|| panic!("told when: {}", answer.text()));
    let bye = format!(r#"{{"type":"bye","reason":"overload","code":1013,"reconnect":"after","after_ms":{ms}}}"#);
    assert_eq!(answer.text(), format!("retry: {ms}\nevent: bye\ndata: {bye}\n\n"));
    Duration::from_millis(ms)
}

/// A node leaves: whoever it moves is back with its first attempt, for as long as the node is there
/// and the emptiest of all.
async fn an_event_source_is_moved_at_once(product: Product) {
    const N: usize = 45;
    let leaves = |node: GatewayOptions| node.env("GATEWAY_DRAIN_WINDOW", "6s").env("GATEWAY_CLOSE_TIMEOUT", "1s");
    let (mut nodes, balancer) = fleet(product, leaves).await;
    let mut crowd = Vec::new();
    for i in 0..N {
        match round(balancer.addr(), i).await {
            Round::In(client) => crowd.push(client),
            Round::Later(_) => panic!("client {i} is refused by nodes with room\n{}", balancer.log()),
        }
    }
    let mut leaving = nodes.remove(0);
    let n_there = n_open(&leaving).await as usize;
    assert!(n_there > 10, "{n_there} of {N} on one of {N_NODES}: too few to leave one by one");
    let mut moved = JoinSet::new();
    for (i, client) in crowd.into_iter().enumerate() {
        let at = balancer.addr();
        moved.spawn(async move {
            let ending = sse_end(client).await;
            assert_eq!(ending.words(), ("drain", 1001, "after"));
            sleep(Duration::from_millis(ending.retry.expect("told when"))).await;
            (i, round(at, i).await)
        });
    }
    leaving.signal(Signal::Term);
    let mut back = Vec::new();
    while back.len() < n_there {
        match moved.join_next().await.expect("all are back only when the last is").unwrap() {
            (_, Round::In(client)) => back.push(client),
            (i, Round::Later(_)) => panic!("client {i} is refused while two nodes have room\n{}", balancer.log()),
        }
    }
    assert!(leaving.wait(SOON).await.success(), "{}", leaving.stderr());
    assert_eq!(n_open(&nodes[0]).await + n_open(&nodes[1]).await, N as f64);
}

/// More EventSources come than the nodes take: each is told when to come again, and none is lost.
async fn a_crowd_of_event_sources_comes_back_by_itself(product: Product) {
    const N: usize = 60;
    let small = |node: GatewayOptions| node.env("GATEWAY_ACCEPT_BURST", "2").env("GATEWAY_ACCEPT_RATE", "5");
    let (nodes, balancer) = fleet(product, small).await;
    let at = balancer.addr();
    let comes = |i: usize| async move {
        let (mut told, until) = (Vec::new(), Instant::now() + Duration::from_secs(120));
        loop {
            match round(at, i).await {
                Round::In(client) => return (client, told),
                Round::Later(after) => {
                    assert!(Instant::now() < until, "client {i} was told to come later: {told:?}");
                    told.push(after);
                    sleep(after).await;
                }
            }
        }
    };
    let (crowd, told): (Vec<_>, Vec<_>) = join_all((0..N).map(comes)).await.into_iter().unzip();
    let told: Vec<Duration> = told.into_iter().flatten().collect();
    let each: HashSet<Duration> = told.iter().copied().collect();
    assert!(told.len() >= 5, "it was no storm: {told:?}");
    assert!(2 * each.len() > told.len(), "many are told the same: {told:?}");
    let mut n = 0.0;
    for node in &nodes {
        n += n_open(node).await;
    }
    assert_eq!(n, N as f64);
    drop(crowd);
}

/// Only "later" is said softly, and only to whom cannot see a status; a page of an allowed origin may
/// read it.
async fn nginx_softens_nothing_else() {
    const ORIGIN: &str = "https://app.example";
    let one_each = |node: GatewayOptions| {
        node.env("GATEWAY_MAX_SESSIONS", "1").env("GATEWAY_ALLOWED_ORIGINS", ORIGIN).env("GATEWAY_READY_HEADROOM", "1")
    };
    let (mut nodes, balancer) = fleet(Product::Nginx, one_each).await;
    let at = balancer.addr();
    let query = format!("/v1/sse?access_token={}", token(&claims("me")));
    for (path, status, code) in [
        ("/v1/sse?access_token=none".to_owned(), 401, "token_invalid"),
        (format!("{query}&channel=others"), 403, "forbidden"),
    ] {
        let answer = get(at, &path).await;
        assert_eq!((answer.status(), &answer.json()["code"]), (status, &json!(code)));
        assert_eq!(answer.header("www-authenticate").is_some(), status == 401);
    }
    let mut full = Vec::new();
    while full.len() < N_NODES {
        match round(at, full.len()).await {
            Round::In(client) => full.push(client),
            // A second try goes to one other node, and that may be full as well.
            Round::Later(_) => sleep(EVERY).await,
        }
    }
    let auth = bearer(&claims("me"));
    let ask = async |headers: &[(&str, &str)]| SseClient::connect(at, &query, headers).await.err().expect("no room");
    let refused = ask(&[("Authorization", &auth)]).await;
    assert_eq!((refused.status(), &refused.json()["code"]), (503, &json!("at_capacity")));
    assert!(refused.header("retry-after").is_some() && refused.json()["retry_after_ms"].is_u64());
    let refused = ask(&[("Origin", ORIGIN)]).await;
    assert!(later(&refused) >= Duration::from_secs(1));
    assert_eq!(refused.header("access-control-allow-origin"), Some(ORIGIN));
    assert_eq!(ask(&[("Origin", "https://other.example")]).await.status(), 403);
    for node in &mut nodes {
        node.signal(Signal::Kill);
        node.wait(SOON).await;
    }
    let refused = ask(&[("Origin", ORIGIN)]).await;
    assert!((1_000..10_000).contains(&later(&refused).as_millis()), "{}", refused.text());
    assert_eq!(refused.header("access-control-allow-origin"), Some(ORIGIN));
    assert_eq!(ask(&[("Authorization", &auth)]).await.status(), 502);
    assert!(!balancer.log().contains("access_token"), "tokens are in the log:\n{}", balancer.log());
}

/// A token of nearly the size that the gateway takes (32 KiB a head), in the query and in a header.
async fn a_large_token_passes(product: Product) {
    let (_nodes, balancer) = fleet(product, |node| node).await;
    let at = balancer.addr();
    let token = token(&json!({"sub": "u", "channels": ["news"], "groups": "g".repeat(23_000)}));
    assert!((30_000..31_500).contains(&token.len()), "{}", token.len());
    let (query, auth) = (format!("?access_token={token}"), format!("Bearer {token}"));
    for (query, headers) in [(query.as_str(), vec![]), ("", vec![("Authorization", auth.as_str())])] {
        let ws = WsClient::connect(at, &format!("/v1/ws{query}"), &headers).await;
        ws.unwrap_or_else(|answer| panic!("{} {}", answer.status(), answer.text())).until("ready").await;
        let sse = SseClient::connect(at, &format!("/v1/sse{query}"), &headers).await;
        sse.unwrap_or_else(|answer| panic!("{} {}", answer.status(), answer.text())).until("ready").await;
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

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn behind_haproxy_an_event_source_is_moved_at_once() {
    an_event_source_is_moved_at_once(Product::Haproxy).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn behind_nginx_an_event_source_is_moved_at_once() {
    an_event_source_is_moved_at_once(Product::Nginx).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn behind_haproxy_a_crowd_of_event_sources_comes_back_by_itself() {
    a_crowd_of_event_sources_comes_back_by_itself(Product::Haproxy).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn behind_nginx_a_crowd_of_event_sources_comes_back_by_itself() {
    a_crowd_of_event_sources_comes_back_by_itself(Product::Nginx).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn behind_haproxy_a_large_token_passes() {
    a_large_token_passes(Product::Haproxy).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn behind_nginx_a_large_token_passes() {
    a_large_token_passes(Product::Nginx).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn behind_nginx_only_later_is_said_softly() {
    nginx_softens_nothing_else().await;
}
