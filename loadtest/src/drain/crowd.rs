//! The sessions of a gateway that leaves. Those that behave read to the very end, answer the close
//! and note what they heard; the deaf stay silent. Decides nothing about what is good.

use std::time::Duration;

use tokio::task::JoinSet;
use tokio::time::{Instant, interval, timeout};

use super::Options;
use crate::fleet::Gateway;
use crate::token::{self, Flaw};
use crate::wire::{Address, Subscriber, Transport, contains};

/// For the server's end of stream after ours.
const LAST: Duration = Duration::from_secs(10);

const BYE: &[u8] = br#""type":"bye""#;
const DRAIN: &[u8] = br#""reason":"drain""#;

/// How a session ended, as its client saw it.
#[derive(Clone, Debug)]
pub struct Gone {
    pub transport: Transport,
    /// When the `bye` came; `None`: none did.
    pub bye: Option<Instant>,
    /// It said `drain`.
    pub is_drain: bool,
    /// When the stream ended, or its close came.
    pub at: Instant,
    /// In words: `closed with 1001`, `end of body`, or what went wrong.
    pub how: String,
    /// What came after that: `end of stream`, or what went wrong.
    pub then: String,
}

impl Gone {
    /// With a word before it, and closed in its transport's own way: what a browser calls clean.
    pub fn is_proper(&self, close_code: u16) -> bool {
        let is_closed = match self.transport {
            Transport::Ws => self.how == format!("closed with {close_code}"),
            Transport::Sse => self.how == "end of body",
        };
        self.is_drain && is_closed && self.then == "end of stream"
    }
}

/// Opens the sessions that behave, each read to its end by a task of its own.
pub async fn fill(gateway: &Gateway, options: &Options) -> Result<JoinSet<Gone>, String> {
    let mut pace = interval(Duration::from_secs_f64(1.0 / options.connect_rate));
    let (mut opening, mut open) = (JoinSet::new(), JoinSet::new());
    let mut n_started = 0;
    while n_started < options.sessions || !opening.is_empty() {
        // Both arms are cancel-safe: a tick or a finished task is taken when it is returned.
        tokio::select! {
            _ = pace.tick(), if n_started < options.sessions => {
                opening.spawn(subscribe(Address::of(gateway.public), format!("{n_started}"), options.transport.of(n_started)));
                n_started += 1;
            }
            Some(opened) = opening.join_next() => {
                let (transport, subscriber) = opened.expect("an opening task does not panic")?;
                open.spawn(to_the_end(transport, subscriber));
            }
        }
    }
    Ok(open)
}

async fn subscribe(to: Address, name: String, transport: Transport) -> Result<(Transport, Subscriber), String> {
    let token = token::full(&name, &[], Flaw::None);
    Subscriber::open(&to, transport, Some(&token), "").await.map(|subscriber| (transport, subscriber))
}

async fn to_the_end(transport: Transport, mut subscriber: Subscriber) -> Gone {
    let (mut bye, mut is_drain) = (None, false);
    let how = subscriber
        .listen(|text| {
            if contains(text, BYE) {
                bye = Some(Instant::now());
                is_drain = contains(text, DRAIN);
            }
        })
        .await;
    let at = Instant::now();
    if let Some(code) = how.strip_prefix("closed with ").and_then(|code| code.parse().ok()) {
        // A socket that takes nothing any more shows in what comes then.
        let _ = subscriber.answer_close(code);
    }
    let then = timeout(LAST, subscriber.listen(|_| {})).await.unwrap_or_else(|_| "no end".to_owned());
    Gone { transport, bye, is_drain, at, how, then }
}

/// Sessions whose clients never answer a close. They end with this value.
pub struct Deaf {
    /// Who reads nothing.
    _idle: Vec<Subscriber>,
    /// Who reads, and says nothing to what it reads.
    _mute: JoinSet<()>,
}

impl Deaf {
    /// Opens them. A WebSocket that answers no ping either would be gone before its turn.
    ///
    /// # Errors
    /// One could not be opened.
    pub async fn open(gateway: &Gateway, options: &Options) -> Result<Deaf, String> {
        let (mut idle, mut mute) = (Vec::new(), JoinSet::new());
        for n in 0..options.deaf {
            let transport = options.transport.of(n);
            let (_, mut subscriber) = subscribe(Address::of(gateway.public), format!("deaf-{n}"), transport).await?;
            if transport == Transport::Sse && (n / 2).is_multiple_of(2) {
                idle.push(subscriber);
            } else {
                mute.spawn(async move {
                    subscriber.listen(|_| {}).await;
                    // Held open: the end of its socket would be an answer, too.
                    std::future::pending::<()>().await;
                });
            }
        }
        Ok(Deaf { _idle: idle, _mute: mute })
    }
}
