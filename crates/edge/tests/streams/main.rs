//! Streams over in-memory pipes under a paused clock: what is due happens at its instant, and
//! nothing else does. `heads` from a connection to its session · `cancelled` clients that go meanwhile ·
//! `flow` bytes both ways · `leaving` when and how sessions end · `refused` who is told no.

mod cancelled;
mod flow;
mod heads;
mod leaving;
mod node;
mod refused;
