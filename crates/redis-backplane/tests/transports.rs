//! Redis over TLS and over a Unix socket: every connection of a node, the pub/sub link among them.

use std::fs;
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use hub::backplane::From;
use testkit::redis::{RedisOptions, RedisServer};

use common::{Node, channel, config, until};

mod common;

/// Of this test and this run alone; gone with the value.
struct Directory(PathBuf);

impl Directory {
    fn new(name: &str) -> Self {
        let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("{name}-{}", std::process::id()));
        fs::create_dir_all(&path).unwrap();
        Self(path)
    }

    fn path(&self, name: &str) -> String {
        self.0.join(name).to_str().unwrap().to_owned()
    }
}

impl Drop for Directory {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

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
    let directory = Directory::new("unix");
    let socket = directory.path("redis.sock");
    let extra = ["--unixsocket", &socket].map(str::to_owned).into();
    let server = RedisServer::start(RedisOptions { extra, requirepass: Some("p w".into()), ..RedisOptions::default() });
    let mut of_the_socket = config(format!("unix://{socket}"), "t", "n");
    of_the_socket.password = Some("p w".into());
    let mut node = Node::up_with(of_the_socket).await;
    serves(&mut node).await;
    let links = server.cli(&["CLIENT", "LIST", "TYPE", "pubsub"]);
    assert!(links.contains(&socket) && links.lines().count() == 1, "{links}");
}

/// A server that speaks TLS with a certificate for 127.0.0.1; its CA is itself.
fn with_tls(directory: &Directory) -> (RedisServer, u16) {
    let (conf, key, certificate) = (directory.path("conf"), directory.path("key"), directory.path("certificate"));
    let text = "[req]\ndistinguished_name=dn\nx509_extensions=ext\nprompt=no\n[dn]\nCN=redis\n\
                [ext]\nbasicConstraints=critical,CA:FALSE\nsubjectAltName=IP:127.0.0.1\n";
    fs::write(&conf, text).unwrap();
    let made = Command::new("openssl")
        .args(["req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2"])
        .args(["-config", &conf, "-keyout", &key, "-out", &certificate])
        .output()
        .expect("openssl is installed");
    assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
    let extra = ["--tls-cert-file", &certificate, "--tls-key-file", &key, "--tls-ca-cert-file", &certificate];
    let extra = extra.into_iter().chain(["--tls-auth-clients", "no"]).map(str::to_owned).collect();
    let server = RedisServer::start(RedisOptions { extra, ..RedisOptions::default() });
    for _ in 0..20 {
        // Somebody else may take it before the server does; it says so then.
        let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        if server.cli(&["CONFIG", "SET", "tls-port", &port.to_string()]) == "OK" {
            return (server, port);
        }
    }
    panic!("no port for TLS: is this redis-server built with it?")
}

#[tokio::test(flavor = "multi_thread")]
async fn tls_serves_whom_the_ca_file_vouches_for_and_nobody_else() {
    let directory = Directory::new("tls");
    let (server, port) = with_tls(&directory);
    let url = format!("rediss://127.0.0.1:{port}");
    let mut trusting = config(url.clone(), "t", "n");
    trusting.ca_file = Some(directory.path("certificate").into());
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
