//! The kit's Redis does what tests rely on.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::Duration;

use tidegate_testkit::redis::{Persistence, RedisOptions, RedisServer};

#[test]
fn what_was_acknowledged_survives_a_kill_only_with_an_aof() {
    for (persistence, kept) in [(Persistence::AofAlways, "1"), (Persistence::None, "")] {
        let mut redis = RedisServer::start(RedisOptions { persistence, ..RedisOptions::default() });
        redis.cli(&["SET", "k", "1"]);
        let port = redis.port();
        redis.kill9();
        assert!(TcpStream::connect(redis.addr()).is_err());
        redis.restart();
        assert_eq!((redis.port(), redis.cli(&["GET", "k"])), (port, kept.to_owned()));
        redis.cli(&["SET", "k", "2"]);
        redis.flushall();
        assert_eq!(redis.cli(&["DBSIZE"]), "0");
    }
}

#[test]
fn a_dropped_server_leaves_neither_port_nor_directory() {
    let redis = RedisServer::plain();
    let (addr, dir) = (redis.addr(), redis.dir().to_owned());
    assert!(dir.exists());
    drop(redis);
    assert!(TcpStream::connect(addr).is_err());
    assert!(!dir.exists());
}

#[test]
fn many_servers_started_at_once_get_ports_of_their_own() {
    let servers: Vec<_> = std::thread::scope(|scope| {
        let starts: Vec<_> = (0..6).map(|_| scope.spawn(RedisServer::plain)).collect();
        starts.into_iter().map(|s| s.join().unwrap()).collect()
    });
    let mut ports: Vec<_> = servers.iter().map(RedisServer::port).collect();
    ports.sort_unstable();
    ports.dedup();
    assert_eq!(ports.len(), 6);
}

#[test]
fn a_paused_server_is_silent_and_goes_on_where_it_was() {
    let redis = RedisServer::plain();
    let mut socket = TcpStream::connect(redis.addr()).unwrap();
    socket.set_read_timeout(Some(Duration::from_millis(100))).unwrap();
    redis.pause();
    socket.write_all(b"PING\r\n").unwrap();
    let mut answer = [0; 7];
    assert!(socket.read(&mut answer).is_err());
    redis.resume();
    socket.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
    socket.read_exact(&mut answer).unwrap();
    assert_eq!(&answer, b"+PONG\r\n");
}

#[test]
fn only_subscribers_lose_their_connection_when_these_are_killed() {
    let redis = RedisServer::start(RedisOptions { requirepass: Some("pä s".into()), ..RedisOptions::default() });
    assert_eq!(redis.url(), format!("redis://:p%C3%A4%20s@127.0.0.1:{}/", redis.port()));
    let mut sockets = [(); 2].map(|()| TcpStream::connect(redis.addr()).unwrap());
    for socket in &mut sockets {
        socket.write_all("*2\r\n$4\r\nAUTH\r\n$5\r\npä s\r\n".as_bytes()).unwrap();
        let mut ok = [0; 5];
        socket.read_exact(&mut ok).unwrap();
        assert_eq!(&ok, b"+OK\r\n");
    }
    let [subscriber, other] = &mut sockets;
    subscriber.write_all(b"SUBSCRIBE c\r\n").unwrap();
    let mut first = [0; 1];
    subscriber.read_exact(&mut first).unwrap();
    assert_eq!(redis.kill_pubsub_links(), 1);
    subscriber.read_to_end(&mut Vec::new()).unwrap();
    other.write_all(b"PING\r\n").unwrap();
    let mut pong = [0; 7];
    other.read_exact(&mut pong).unwrap();
}

#[test]
fn a_replica_has_what_the_master_had_and_can_be_promoted() {
    let (master, replica) = (RedisServer::plain(), RedisServer::plain());
    master.cli(&["SET", "k", "1"]);
    replica.replica_of(&master);
    assert_eq!(replica.cli(&["GET", "k"]), "1");
    replica.promote();
    assert_eq!(replica.cli(&["SET", "k", "2"]), "OK");
    assert_eq!(master.cli(&["GET", "k"]), "1");
}
