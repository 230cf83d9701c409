//! What a program holds: a stream of messages and a handle for commands. Decides nothing; it starts
//! the driver and ends it.

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use futures_util::FutureExt;
use serde_json::json;
use serde_json::value::RawValue;
use tokio::sync::mpsc;
use tokio_util::task::AbortOnDropHandle;

use crate::backoff::{Backoff, Pace};
use crate::cursor::Cursor;
use crate::dial::{Target, Transport};
use crate::driver::{AddressSource, Command, Delivery, Driver, Token, TokenSource};
use crate::end::End;
use crate::leaves::Leave;
use crate::message::Message;
use crate::wanted::{Ask, Wanted};

/// Messages that wait for the program; beyond it the client stops reading, and the server sees a
/// slow client.
const MESSAGES: usize = 256;

/// Commands that wait for the driver.
const COMMANDS: usize = 64;

/// A cursor is at most this long (bytes).
const MAX_CURSOR_BYTES: usize = 256;

/// The client cannot even try.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum BuildError {
    /// Not a base URL such as `http://127.0.0.1:8080`.
    #[error("not a URL of the form http://host:port or ws://host:port: {0}")]
    Url(String),
    /// `https` and `wss` are not spoken yet.
    #[error("this client does not speak TLS yet: use an http:// or ws:// URL, or a local proxy that speaks it")]
    Tls,
    /// Too long for a cursor, or not text that a header may hold.
    #[error("not a cursor: it must be visible ASCII of at most {MAX_CURSOR_BYTES} bytes")]
    Cursor,
}

/// The command was not taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum CommandError {
    /// SSE goes one way only.
    #[error("nothing can be sent over SSE: use the WebSocket transport")]
    OneWay,
    /// The client has ended.
    #[error("the client has ended")]
    Ended,
}

/// A client, not yet started.
pub struct Builder {
    url: String,
    address_source: Option<AddressSource>,
    token: Token,
    channels: Vec<String>,
    transport: Transport,
    since: Option<String>,
    pace: Pace,
    seed: Option<u64>,
}

impl Builder {
    /// The token to connect with. When it ends, and there is no [`Builder::token_source`], the client ends.
    pub fn token(mut self, token: impl Into<String>) -> Builder {
        self.token.current = Some(token.into());
        self
    }

    /// Where tokens come from. Asked before the first connection (unless [`Builder::token`] gave
    /// one), when the server says that the token ends or has ended, and after a 401. Its error
    /// counts as a failed attempt: the client tries again later.
    pub fn token_source<F, T, E>(mut self, source: F) -> Builder
    where
        F: Fn() -> T + Send + Sync + 'static,
        T: Future<Output = Result<String, E>> + Send + 'static,
        E: std::fmt::Display,
    {
        let source: TokenSource = Box::new(move || source().map(|token| token.map_err(|why| why.to_string())).boxed());
        self.token.source = Some(source);
        self
    }

    /// Where to connect, asked before every attempt instead of resolving the URL's host: for
    /// programs that balance over the nodes themselves. The URL still gives the `Host` header and
    /// the path. `None` leaves this attempt to the URL's host. It must not block.
    pub fn address_source(mut self, source: impl Fn() -> Option<SocketAddr> + Send + Sync + 'static) -> Builder {
        self.address_source = Some(Box::new(source));
        self
    }

    /// Channels to ask for when connecting, beyond those of the token. One that is not granted
    /// makes the server refuse the connection.
    pub fn channels<C: Into<String>>(mut self, channels: impl IntoIterator<Item = C>) -> Builder {
        self.channels.extend(channels.into_iter().map(Into::into));
        self
    }

    /// Default: WebSocket.
    pub fn transport(mut self, transport: Transport) -> Builder {
        self.transport = transport;
        self
    }

    /// Resumes from a cursor that [`Client::cursor`] gave earlier; `0` asks for all that is kept.
    pub fn since(mut self, cursor: impl Into<String>) -> Builder {
        self.since = Some(cursor.into());
        self
    }

    /// The backoff's bounds until a server's `hello` sets its own.
    pub fn pace(mut self, pace: Pace) -> Builder {
        self.pace = pace;
        self
    }

    /// Makes the backoff's draws repeatable, for tests.
    pub fn seed(mut self, seed: u64) -> Builder {
        self.seed = Some(seed);
        self
    }

    /// Starts the client; it connects in the background and reports through [`Client::next`].
    ///
    /// # Errors
    /// `BuildError`: no attempt could ever succeed with this URL or cursor.
    ///
    /// # Panics
    /// Outside a tokio runtime.
    pub fn connect(self) -> Result<Client, BuildError> {
        let since = self.since.unwrap_or_default();
        if since.len() > MAX_CURSOR_BYTES || !since.bytes().all(|byte| byte.is_ascii_graphic()) {
            return Err(BuildError::Cursor);
        }
        let target = Target::parse(&self.url)?;
        let cursor = Cursor::new(&since);
        let (to_program, messages) = mpsc::channel(MESSAGES);
        let (commands, taken) = mpsc::channel(COMMANDS);
        let driver = Driver {
            target,
            address_source: self.address_source,
            transport: self.transport,
            token: self.token,
            cursor: cursor.clone(),
            wanted: Wanted::new(self.channels),
            backoff: Backoff::seeded(self.pace, self.seed.unwrap_or_else(rand::random)),
            messages: to_program,
            commands: taken,
            inbox: VecDeque::new(),
        };
        let end = Arc::new(OnceLock::new());
        let commands = Commands { to_driver: commands, transport: self.transport, counter: Arc::default() };
        let driver = AbortOnDropHandle::new(tokio::spawn(driver.run(Arc::clone(&end))));
        Ok(Client { messages, commands, cursor, end, _driver: driver })
    }
}

/// A client that keeps itself connected. Dropping it cuts the connection; [`Client::close`] says
/// goodbye first.
#[derive(Debug)]
pub struct Client {
    messages: mpsc::Receiver<Delivery>,
    commands: Commands,
    cursor: Cursor,
    end: Arc<OnceLock<End>>,
    _driver: AbortOnDropHandle<()>,
}

impl Client {
    /// A client of the gateway at `url`: `http://host:port` or `ws://host:port`, whichever transport.
    pub fn builder(url: impl Into<String>) -> Builder {
        Builder {
            url: url.into(),
            address_source: None,
            token: Token { current: None, source: None },
            channels: Vec::new(),
            transport: Transport::default(),
            since: None,
            pace: Pace::default(),
            seed: None,
        }
    }

    /// The next message, across any number of connections; `None` once the client has ended for
    /// good, and [`Client::end`] says why.
    ///
    /// # Cancel safety
    /// No message is lost when the future is dropped.
    pub async fn next(&mut self) -> Option<Message> {
        let (message, cursor) = self.messages.recv().await?;
        self.cursor = cursor;
        Some(message)
    }

    /// Where to resume from after the last message that [`Client::next`] returned, for
    /// [`Builder::since`]; `None` before the first `ready`.
    pub fn cursor(&self) -> Option<String> {
        self.cursor.text()
    }

    /// Why the client ended; `None` while it lives.
    pub fn end(&self) -> Option<&End> {
        self.end.get()
    }

    /// A handle to send with, from anywhere.
    pub fn commands(&self) -> Commands {
        self.commands.clone()
    }

    /// See [`Commands::subscribe`].
    ///
    /// # Errors
    /// `CommandError`.
    pub async fn subscribe(&self, channel: impl Into<String>, since: Option<String>) -> Result<String, CommandError> {
        self.commands.subscribe(channel, since).await
    }

    /// See [`Commands::unsubscribe`].
    ///
    /// # Errors
    /// `CommandError`.
    pub async fn unsubscribe(&self, channel: impl Into<String>) -> Result<String, CommandError> {
        self.commands.unsubscribe(channel).await
    }

    /// See [`Commands::auth`].
    ///
    /// # Errors
    /// `CommandError`.
    pub async fn auth(&self, token: impl Into<String>) -> Result<String, CommandError> {
        self.commands.auth(token).await
    }

    /// See [`Commands::busy`].
    ///
    /// # Errors
    /// `CommandError`.
    pub async fn busy(&self, time: Duration) -> Result<(), CommandError> {
        self.commands.busy(time).await
    }

    /// See [`Commands::ping`].
    ///
    /// # Errors
    /// `CommandError`.
    pub async fn ping(&self) -> Result<(), CommandError> {
        self.commands.ping().await
    }

    /// Closes the connection properly; waits at most about a second for the server. Messages that
    /// were not taken by then are dropped.
    pub async fn close(mut self) {
        if self.commands.to_driver.send(Command::Close).await.is_ok() {
            while self.messages.recv().await.is_some() {}
        }
    }
}

/// Sends commands to a client's driver. Each waits only for room in the driver's queue; answers come
/// as messages.
#[derive(Debug, Clone)]
pub struct Commands {
    to_driver: mpsc::Sender<Command>,
    transport: Transport,
    counter: Arc<AtomicU64>,
}

impl Commands {
    /// Asks for a channel, now and after every reconnect until it is left, denied or taken away.
    /// Returns the reference that the answering `Ok` or `Error` carries. Asks are made one after the
    /// other.
    ///
    /// A channel that was held when a connection was lost resumes with the session where it can:
    /// `Hello` names it and `Ready` confirms it. Where it cannot (too many of them for one request,
    /// or the server refused the request for one of them), it is asked for again, and the same
    /// reference gets another `Ok` or `Error`.
    ///
    /// # Errors
    /// `OneWay` over SSE; `Ended`.
    pub async fn subscribe(&self, channel: impl Into<String>, since: Option<String>) -> Result<String, CommandError> {
        let reference = self.reference();
        let since = since.filter(|since| !since.is_empty());
        self.send(Command::Subscribe(Ask { reference: reference.clone(), channel: channel.into(), since })).await?;
        Ok(reference)
    }

    /// Leaves a channel, also one of the token, now and after every reconnect. Returns the reference
    /// that the answering `Ok` carries; until then events of the channel may come. However many are
    /// left at once, the server is told no faster than it takes it, and without a connection once
    /// there is one again.
    ///
    /// # Errors
    /// `OneWay` over SSE; `Ended`.
    pub async fn unsubscribe(&self, channel: impl Into<String>) -> Result<String, CommandError> {
        let reference = self.reference();
        self.send(Command::Unsubscribe(Leave { reference: reference.clone(), channel: channel.into() })).await?;
        Ok(reference)
    }

    /// Replaces the token, in the open session and for the next connection.
    ///
    /// # Errors
    /// `OneWay` over SSE; `Ended`.
    pub async fn auth(&self, token: impl Into<String>) -> Result<String, CommandError> {
        let reference = self.reference();
        self.send(Command::Auth { reference: reference.clone(), token: token.into() }).await?;
        Ok(reference)
    }

    /// Asks not to be moved for `time` (the server takes at most a minute; zero ends it).
    ///
    /// # Errors
    /// `OneWay` over SSE; `Ended`.
    pub async fn busy(&self, time: Duration) -> Result<(), CommandError> {
        let for_ms = u64::try_from(time.as_millis()).unwrap_or(u64::MAX);
        self.send(Command::Send(json!({"type": "busy", "for_ms": for_ms}).to_string())).await
    }

    /// Asks for a `Pong`. Not needed to stay connected. Dropped while there is no connection.
    ///
    /// # Errors
    /// `OneWay` over SSE; `Ended`.
    pub async fn ping(&self) -> Result<(), CommandError> {
        self.send(Command::Send(r#"{"type":"ping"}"#.to_owned())).await
    }

    /// Sends a message of a plugin's own type. Dropped while there is no connection.
    ///
    /// # Errors
    /// `OneWay` over SSE; `Ended`.
    pub async fn send_raw(&self, message: &RawValue) -> Result<(), CommandError> {
        self.send(Command::Send(message.get().to_owned())).await
    }

    fn reference(&self) -> String {
        (self.counter.fetch_add(1, Ordering::Relaxed) + 1).to_string()
    }

    async fn send(&self, command: Command) -> Result<(), CommandError> {
        match self.transport {
            Transport::Sse => Err(CommandError::OneWay),
            Transport::Ws => self.to_driver.send(command).await.map_err(|_| CommandError::Ended),
        }
    }
}
