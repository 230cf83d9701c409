//! todo

pub mod address;
pub mod credential;
pub mod frame;
pub mod handshake;
pub mod origin;
pub mod probes;
pub mod reject;
