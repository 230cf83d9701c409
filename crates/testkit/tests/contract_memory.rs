//! The backplane without Redis keeps the contract.

use std::sync::Arc;

use futures_util::future::BoxFuture;
use hub::backplane::Backplane;
use hub::clock::{Clock, Dice};
use hub::memory::{MemoryConfig, MemoryLog};
use tidegate_testkit::contract::{Bench, Pair, Setup, suite};

struct InMemory;

impl Bench for InMemory {
    fn open(&self, setup: Setup) -> BoxFuture<'_, Pair> {
        Box::pin(async move {
            let config = MemoryConfig {
                history_size: setup.history_size,
                history_ttl: setup.history_ttl,
                idempotency_ttl: setup.idempotency_ttl,
            };
            let log = MemoryLog::new(config, Clock::system(), Dice::seeded(7));
            let nodes: [Arc<dyn Backplane>; 2] = [log.node("a"), log.node("b")];
            let of_again = log.clone();
            let again = move || -> Arc<dyn Backplane> { of_again.node("b") };
            let flush = move || -> BoxFuture<'static, ()> {
                log.flush();
                Box::pin(std::future::ready(()))
            };
            Pair { nodes, again: Box::new(again), flush: Box::new(flush), keep: Box::new(()) }
        })
    }
}

#[tokio::test]
async fn the_memory_backplane_keeps_the_contract_on_one_thread() {
    suite(&InMemory).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_memory_backplane_keeps_the_contract_on_several_threads() {
    suite(&InMemory).await;
}
