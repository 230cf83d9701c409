//! Opening thousands of sessions, so many at a time.

use std::future::Future;

use tokio::task::JoinSet;

use crate::progress::Progress;
use crate::readers::Opened;
use crate::wire::{Address, Subscriber, Transport};

/// Handshakes at a time: below any backlog, enough to keep both ends busy.
const AT_A_TIME: usize = 128;

/// Opens `n` of something, at most so many at a time, and hands each on as soon as it is there; the
/// first that fails ends it. `what` is for people.
pub async fn each<T, F>(
    what: &str,
    n: usize,
    open: impl Fn(usize) -> F,
    mut opened: impl FnMut(T),
) -> Result<(), String>
where
    T: Send + 'static,
    F: Future<Output = Result<T, String>> + Send + 'static,
{
    let progress = Progress::of(what, n);
    let mut opening = JoinSet::new();
    let mut n_begun = 0;
    loop {
        while n_begun < n && opening.len() < AT_A_TIME {
            opening.spawn(open(n_begun));
            n_begun += 1;
        }
        let Some(outcome) = opening.join_next().await else { return Ok(()) };
        opened(outcome.expect("an opening task does not panic").map_err(|why| format!("{what}: {why}"))?);
        progress.step();
    }
}

/// A session of a gateway, ready.
pub async fn session(
    to: Address,
    transport: Transport,
    token: Option<String>,
    channel: String,
) -> Result<Opened, String> {
    Opened::from_subscriber(Subscriber::open(&to, transport, token.as_deref(), &channel).await?)
}

/// A client of a floor: the yes is all it says.
pub async fn of_floor(to: Address, transport: Transport) -> Result<Opened, String> {
    let connected = Subscriber::connect(to.authority(), transport, None, "").await;
    Opened::from_subscriber(connected.map_err(|why| why.to_string())?)
}
