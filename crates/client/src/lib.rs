//! A client of Tidegate's wire over WebSocket or SSE: connects, resumes by cursor, backs off.
//!
//! The crate decides when to connect again and from where; it never decides what an event means.
//! It speaks only the wire and shares no code with the server, so it cannot share its mistakes.
//!
//! ```no_run
//! # async fn example() -> Result<(), tidegate_client::BuildError> {
//! use tidegate_client::{Client, Message};
//!
//! let mut client = Client::builder("http://127.0.0.1:8080").token("eyJ…").channels(["news"]).connect()?;
//! while let Some(message) = client.next().await {
//!     if let Message::Event(event) = message {
//!         println!("{} {}", event.channel, event.data);
//!     }
//! }
//! println!("{:?}", client.end());
//! # Ok(()) }
//! ```
//!
//! The walk: `client` (what a program holds) → `driver` (the one task that decides) → `dial` (one
//! connection attempt) → `ws` or `sse` (bytes to messages). `cursor`, `wanted`, `leaves` and `backoff`
//! are the rules, free of I/O.

mod alive;
mod backoff;
mod client;
mod cursor;
mod dial;
mod driver;
mod end;
mod leaves;
mod message;
mod sse;
mod wanted;
mod ws;

pub use backoff::{Backoff, Pace};
pub use client::{BuildError, Builder, Client, CommandError, Commands};
pub use cursor::Cursor;
pub use dial::Transport;
pub use end::{End, Loss};
pub use message::{
    Bye, Event, Failed, Gap, Hello, Lost, Message, NotAMessage, Pacing, Position, Ready, Reconnect, Resume, Subscribed,
    TokenExpiring, Unsubscribed,
};
pub use sse::{SseEvent, SseParser};
