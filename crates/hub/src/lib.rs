//! Tidegate's decisions. Opens no socket, speaks to no Redis, reads no environment: it knows time
//! and chance only through tokio's clock, `Clock` and `Dice`.
//!
//! In walking order: `limit` (may this attempt cost us an authentication now?) → `auth`,
//! `revocation` (who, until when?) → `plugin` → `session` (exists only from here) → `channel`
//! (may this identity hear this?) → `fanout` (whose outboxes?) → `outbox` (can this client keep
//! up?) → `departure`, `recycle`, `close` (when, with which words?). Beside the path, and never in
//! its way, what nodes decide together: `quota` (too many sessions of one user?), `roll` (who is
//! there?), `fleet` (how are all doing?), `balance`, `shed` (who has too many, and who goes?).

mod attach;
pub mod auth;
pub mod backplane;
pub mod balance;
pub mod channel;
pub mod clock;
pub mod close;
pub mod cursor;
pub mod departure;
mod dispatch;
pub mod event;
mod fanout;
pub mod fleet;
mod handle;
pub mod hub;
mod inbound;
pub mod limit;
pub mod memory;
pub mod message;
mod open;
pub mod outbox;
pub mod plugin;
mod quota;
mod recycle;
pub mod refusal;
pub mod revocation;
mod revoking;
pub mod roll;
pub mod session;
pub mod shed;
mod sweep;
pub mod telemetry;
#[cfg(test)]
mod testing;
pub mod wheel;
