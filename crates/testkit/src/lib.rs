//! What Tidegate's tests share. Everything a test sees of the gateway comes through sockets that
//! this crate reads with its own few lines, so that a mistake cannot be on both sides.
//!
//! `balancer` a real HAProxy or nginx in front · `chance` the seed of what is drawn · `contract` what
//! every backplane must pass · `faults` a backplane that is late, silent or away ·
//! `redis` a real server to kill, pause and fail over · `proxy` a wire to cut · `gateway` the real
//! binary · `http`, `sse`, `ws` raw clients · `temp` a directory to write in · `numbered` events that are counted from the publisher
//! to the client · `lag` how late the test itself was · `world` a fleet and its clients on in-memory pipes under a paused clock · `fleet`
//! tens of hubs and tens of thousands of light clients under that clock.

pub mod balancer;
pub mod chance;
pub mod contract;
pub mod faults;
pub mod fleet;
pub mod gateway;
pub mod http;
pub mod lag;
pub mod numbered;
pub mod proxy;
pub mod redis;
pub mod sse;
pub mod temp;
pub mod world;
pub mod ws;
