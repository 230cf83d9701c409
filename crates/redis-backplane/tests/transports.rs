//! Redis over TLS and over a Unix socket: every connection of a node, the pub/sub link among them.

use std::time::Duration;

use hub::backplane::From;
use testkit::redis::{RedisOptions, RedisServer};
use testkit::temp::TempDir;

use common::{Node, channel, config, until};

mod common;

/// Publishes, reads and hears, with a long message and many channels.
async fn serves(node: &mut Node) {
    let c = channel("c");
    node.want(&c).await;
    let id = node.log(&c, "1").await;
    assert_eq!(node.next_event().await.id, Some(id));
    let long = format!("\"{}\"", "x".repeat(60_000));
    node.log(&c, &long).await;
    assert_eq!(&node.next_event().await.data[..], long.as_bytes());
    for i in 0..600 {
        node.want(&channel(&format!("c{i}"))).await;
    }
    let last = channel("c599");
    node.log(&last, "2").await;
    assert_eq!(node.next_event().await.channel, last);
    assert_eq!(node.read(&[(c, From::Start)]).await.events.len(), 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_unix_socket_serves_with_a_password_too() {
    let directory = TempDir::new("unix");
    let socket = directory.path_of("redis.sock");
    let extra = ["--unixsocket", &socket].map(str::to_owned).into();
    let server = RedisServer::start(RedisOptions { extra, requirepass: Some("p w".into()), ..RedisOptions::default() });
    let mut of_the_socket = config(format!("unix://{socket}"), "t", "n");
    of_the_socket.password = Some("p w".into());
    let mut node = Node::up_with(of_the_socket).await;
    serves(&mut node).await;
    let links = server.cli(&["CLIENT", "LIST", "TYPE", "pubsub"]);
    assert!(links.contains(&socket) && links.lines().count() == 1, "{links}");
}

#[tokio::test(flavor = "multi_thread")]
async fn tls_serves_whom_the_ca_file_vouches_for_and_nobody_else() {
    let directory = TempDir::new("tls");
    let (certificate, key) = directory.certificate();
    let (server, port) = RedisServer::with_tls(&certificate, &key);
    let url = format!("rediss://127.0.0.1:{port}");
    let mut trusting = config(url.clone(), "t", "n");
    trusting.ca_file = Some(certificate.into());
    let mut node = Node::up_with(trusting.clone()).await;
    serves(&mut node).await;
    let n_links = || server.cli(&["CLIENT", "LIST", "TYPE", "pubsub"]).lines().filter(|line| !line.is_empty()).count();
    assert_eq!(n_links(), 1);
    // It comes back by TLS as well.
    server.cli(&["CLIENT", "KILL", "TYPE", "pubsub"]);
    node.until_up().await;
    node.log(&channel("c"), "3").await;
    assert_eq!(&node.next_event().await.data[..], b"3");

    // Known to no CA of the web; and a name that the certificate is not for.
    let untold = config(url, "t", "m");
    let mut misnamed = trusting;
    misnamed.url = format!("rediss://localhost:{port}");
    for mut refused in [untold, misnamed] {
        refused.timeout = Duration::from_millis(250);
        let node = Node::start(refused);
        until("the trouble has a name", || node.plane.stats().trouble().is_some()).await;
        assert_eq!(n_links(), 1);
    }
}
