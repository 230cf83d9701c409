//! The suite that every backplane must pass, over a real server.

mod common;

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use common::config;
use futures_util::future::BoxFuture;
use hub::backplane::Backplane;
use hub::clock::Dice;
use testkit::contract::{Bench, Pair, Setup, suite};
use testkit::redis::RedisServer;
use tidegate_redis_backplane::RedisBackplane;

/// One server, a prefix for each pair.
struct OnRedis {
    server: Arc<RedisServer>,
    n_pairs: AtomicU32,
}

impl Bench for OnRedis {
    fn open(&self, setup: Setup) -> BoxFuture<'_, Pair> {
        Box::pin(async move {
            let prefix = format!("pair{}", self.n_pairs.fetch_add(1, Ordering::Relaxed));
            let url = self.server.url();
            let node = move |name: &str, seed: u64| -> Arc<dyn Backplane> {
                let mut config = config(url.clone(), &prefix, name);
                config.history_size = setup.history_size as u64;
                config.history_ttl = setup.history_ttl;
                config.idempotency_ttl = setup.idempotency_ttl;
                // The suite publishes texts a little over the gateway's default.
                config.max_message = 1 << 20;
                Arc::new(RedisBackplane::connect(config, Dice::seeded(seed)).unwrap())
            };
            let server = self.server.clone();
            Pair {
                nodes: [node("a", 1), node("b", 2)],
                again: Box::new(move || node("b", 3)),
                flush: Box::new(move || {
                    let server = server.clone();
                    Box::pin(async move { server.flushall() })
                }),
                keep: Box::new(()),
            }
        })
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn redis_keeps_the_backplanes_contract() {
    let bench = OnRedis { server: Arc::new(RedisServer::plain()), n_pairs: AtomicU32::default() };
    suite(&bench).await;
}
