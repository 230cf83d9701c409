//! todo

pub mod frame;
pub mod probes;
