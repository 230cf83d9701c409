//! What these tests share: a backplane on a real server, and what its link says.
#![allow(dead_code)]

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use hub::backplane::{Backplane, From, FromLink, Publish, Read, ReadAsk};
use hub::channel::Channel;
use hub::clock::Dice;
use hub::cursor::EventId;
use hub::event::Event;
use redis::AsyncConnectionConfig;
use redis::aio::MultiplexedConnection;
use testkit::redis::RedisServer;
use tidegate_redis_backplane::{RedisBackplane, RedisConfig, RevocationKeys};
use tokio::sync::mpsc;

/// Far above what anything here needs.
pub const PATIENCE: Duration = Duration::from_secs(60);

pub fn config(url: String, prefix: &str, node: &str) -> RedisConfig {
    RedisConfig {
        url,
        password: None,
        ca_file: None,
        prefix: prefix.to_owned(),
        // Above the gateway's 250 ms: many tests share few cores. And above the 2 s that a connection may
        // wait for its next dial: who asks when the link is back is answered, though another is not yet.
        timeout: Duration::from_secs(5),
        node: node.to_owned(),
        history_size: 1000,
        history_ttl: Duration::from_secs(86_400),
        idempotency_ttl: Duration::from_secs(300),
        max_message: 65_536,
        revocation_keys: RevocationKeys::default(),
    }
}

/// A node and its link.
pub struct Node {
    pub plane: Arc<RedisBackplane>,
    pub link: mpsc::Receiver<FromLink>,
}

impl Node {
    /// Not waited for.
    pub fn start(config: RedisConfig) -> Self {
        let plane = Arc::new(RedisBackplane::connect(config, Dice::seeded(1)).unwrap());
        let link = plane.link();
        Self { plane, link }
    }

    /// On this server, its link up.
    pub async fn up(server: &RedisServer, prefix: &str, node: &str) -> Self {
        Self::up_with(config(server.url(), prefix, node)).await
    }

    pub async fn up_with(config: RedisConfig) -> Self {
        let mut node = Self::start(config);
        node.until_up().await;
        node
    }

    pub async fn next(&mut self) -> FromLink {
        let next = tokio::time::timeout(PATIENCE, self.link.recv()).await;
        next.expect("the link says something in time").expect("the link does not end")
    }

    pub async fn until_up(&mut self) -> EventId {
        loop {
            if let FromLink::Up(position) = self.next().await {
                return position;
            }
        }
    }

    pub async fn until_lost(&mut self) {
        while !matches!(self.next().await, FromLink::Lost) {}
    }

    /// Wants it and waits for its confirmation.
    pub async fn want(&mut self, channel: &Channel) {
        self.plane.want(channel);
        loop {
            match self.next().await {
                FromLink::Confirmed(c) if c == *channel => return,
                FromLink::Lost => panic!("lost before {channel} was confirmed"),
                _ => {}
            }
        }
    }

    pub async fn next_event(&mut self) -> Event {
        loop {
            match self.next().await {
                FromLink::Event(event) => return event,
                FromLink::Lost => panic!("lost before an event"),
                _ => {}
            }
        }
    }

    /// Logs `data` and gives the id; asks again while the server is away.
    pub async fn log(&self, channel: &Channel, data: &str) -> EventId {
        let started = tokio::time::Instant::now();
        loop {
            match self.plane.publish(event(channel, data)).await {
                Ok(published) => return published.id.unwrap(),
                Err(e) => assert!(started.elapsed() < PATIENCE, "{e}"),
            }
        }
    }

    pub async fn read(&self, channels: &[(Channel, From)]) -> Read {
        let ask =
            ReadAsk { channels: channels.to_vec(), check: None, cap: 1000, page_events: 1000, page_bytes: 1 << 20 };
        let started = tokio::time::Instant::now();
        loop {
            match self.plane.read(ask.clone()).await {
                Ok(read) => return read,
                Err(e) => assert!(started.elapsed() < PATIENCE, "{e}"),
            }
        }
    }
}

/// A stranger's connection. By itself the library gives an answer half a second, which a server that
/// copies megabytes on a busy machine may need.
pub async fn connection(server: &RedisServer) -> MultiplexedConnection {
    let patient =
        AsyncConnectionConfig::new().set_connection_timeout(Some(PATIENCE)).set_response_timeout(Some(PATIENCE));
    let client = redis::Client::open(server.url()).unwrap();
    client.get_multiplexed_async_connection_with_config(&patient).await.unwrap()
}

pub fn channel(name: &str) -> Channel {
    Channel::new(name).unwrap()
}

pub fn event(channel: &Channel, data: &str) -> Publish {
    Publish {
        channel: channel.clone(),
        name: None,
        data: Bytes::copy_from_slice(data.as_bytes()),
        ephemeral: false,
        key: None,
    }
}

/// Looks until it is so. For what another process does; not for luck.
pub async fn until(what: &str, mut is_so: impl FnMut() -> bool) {
    let started = tokio::time::Instant::now();
    while !is_so() {
        assert!(started.elapsed() < PATIENCE, "never: {what}");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}
