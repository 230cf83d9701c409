//! Tidegate's listeners, and the way of a client through them.
//!
//! `accept` (may this socket exist?) → `handshake`, `origin`, `credential`, `address` (what does the
//! request say?) → `admit` (the order of admission, one function) → `drive` (the loop of every open
//! stream, with `frame` for what a WebSocket's client sends). `reject` alone turns a refusal into
//! HTTP. Beside the public listener: `admin` (the back ends' API), `probes` (own thread, own port) and
//! `jwks`, which fetches the keys of tokens.

pub mod accept;
pub mod address;
pub mod admin;
pub mod admit;
pub mod credential;
pub mod drive;
pub mod frame;
pub mod handshake;
pub mod jwks;
pub mod origin;
pub mod probes;
pub mod reject;
pub mod socket;
