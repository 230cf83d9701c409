//! The gateway as a library: what a custom gateway needs, and nothing else.
//!
//! ```no_run
//! use std::process::ExitCode;
//! use tidegate::plugin::{Plugin, Plugins};
//!
//! struct Audit;
//! impl Plugin for Audit {
//!     fn name(&self) -> &'static str { "audit" }
//! }
//!
//! fn main() -> ExitCode {
//!     tidegate::run_with(Plugins::new().with(Audit))
//! }
//! ```
//!
//! `run_with` is the whole program: the command line, the configuration by environment variables,
//! everything that the plain gateway does, with the plugins asked where their trait says.

pub mod cli;
pub mod config;
pub mod run;
mod settings;

pub use cli::main_with as run_with;

/// Of every gateway, custom ones too. The system's (glibc) keeps the room of a crowd that has gone: 20,000 handshakes later a
/// session costs 2.4 to 2.7 KB, with this one 1.8 as before; mimalloc starts from twice the room. Measured: `tidegate-loadtest idle`.
#[cfg(all(unix, feature = "jemalloc"))]
#[global_allocator]
static ALLOCATOR: tikv_jemallocator::Jemalloc = tikv_jemallocator::Jemalloc;

/// The extension point and the types its calls speak in.
pub mod plugin {
    pub use hub::auth::Identity;
    pub use hub::backplane::{Publish, Published, Revocation, RevocationKey};
    pub use hub::channel::{Channel, EventName, Grants, Pattern};
    pub use hub::close::{CloseReason, Violation};
    pub use hub::departure::{Departure, Who};
    pub use hub::event::Wire;
    pub use hub::hub::{GatewayHandle, Load, Phase, PublishError};
    pub use hub::plugin::{Admission, Ask, Inbound, Plugin, Plugins, Received, Verdict};
    pub use hub::refusal::{Refusal, RefusalCode};
    pub use hub::roll::{Ended, Roll, RollError, SessionView};
    pub use hub::session::{SessionId, SessionInfo};

    /// What messages are made of.
    pub use bytes::Bytes;
    /// What `Plugin::admit` and `Plugin::run` return.
    pub use futures_util::future::BoxFuture;
    /// Tells a plugin's own task to end.
    pub use tokio_util::sync::CancellationToken as Stop;
}
