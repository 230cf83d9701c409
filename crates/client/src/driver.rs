//! The one task of a client: connects, listens, sends, waits, connects again. All decisions about
//! when and from where come together here; the rules themselves are in `backoff`, `cursor`, `wanted`
//! and `end`.

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use futures_util::future::{BoxFuture, OptionFuture};
use serde::Serialize;
use tokio::sync::mpsc;
use tokio::time::Instant;

use crate::backoff::{Backoff, Pace};
use crate::cursor::Cursor;
use crate::dial::{Arrival, Attempt, Ending, Link, Outgoing, Target, Transport, dial};
use crate::end::{Aftermath, End, Loss, Next};
use crate::message::{Bye, Failed, Hello, Lost, Message};
use crate::wanted::{Ask, Wanted};

/// Own messages and commands that wait for room further on. At this number the driver takes no
/// more commands, or makes no further attempt, until there is room.
const MAX_WAITING: usize = 64;

/// What a server that promised heartbeats gets on top of two of them before it counts as gone.
const SILENCE_SLACK: Duration = Duration::from_secs(5);

/// After a `bye` nothing else comes and the server closes at once; where it does not, we do after this.
const BYE_LINGER: Duration = Duration::from_secs(1);

/// Longest wait for the program's token source.
const TOKEN_TIMEOUT: Duration = Duration::from_secs(30);

/// When a refused `subscribe` is asked again if the server names no time, plus jitter of the same width.
const ASK_AGAIN: Duration = Duration::from_secs(1);

/// How long the program's own close waits for the server's.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(1);

pub(crate) type TokenSource = Box<dyn Fn() -> BoxFuture<'static, Result<String, String>> + Send + Sync>;

/// Where the program wants the next attempt to go; `None`: where the URL says.
pub(crate) type AddressSource = Box<dyn Fn() -> Option<SocketAddr> + Send + Sync>;

/// The credential: a token in use, and perhaps a place to get another from.
pub(crate) struct Token {
    pub(crate) current: Option<String>,
    pub(crate) source: Option<TokenSource>,
}

/// What the program asks of its client.
#[derive(Debug)]
pub(crate) enum Command {
    Subscribe(Ask),
    Unsubscribe {
        reference: String,
        channel: String,
    },
    Auth {
        reference: String,
        token: String,
    },
    /// Sent if connected, else dropped.
    Send(String),
    Close,
}

/// A message, and the cursor as it stands behind it.
pub(crate) type Delivery = (Message, Cursor);

pub(crate) struct Driver {
    pub(crate) target: Target,
    pub(crate) address_source: Option<AddressSource>,
    pub(crate) transport: Transport,
    pub(crate) token: Token,
    pub(crate) cursor: Cursor,
    pub(crate) wanted: Wanted,
    pub(crate) backoff: Backoff,
    pub(crate) messages: mpsc::Sender<Delivery>,
    pub(crate) commands: mpsc::Receiver<Command>,
    /// Heard, and on the way to the program.
    pub(crate) inbox: VecDeque<Delivery>,
}

/// The program closed the client or dropped it.
struct Closed;

/// What is known of one connection.
#[derive(Default)]
struct Session {
    outbox: VecDeque<Outgoing>,
    joined: Vec<String>,
    is_ready: bool,
    bye: Option<Bye>,
    /// Not before this is the next channel asked for.
    ask_at: Option<Instant>,
    renewing: Option<BoxFuture<'static, Result<String, String>>>,
}

#[derive(Serialize)]
#[serde(tag = "type", rename_all = "snake_case")]
enum Say<'a> {
    Subscribe {
        r#ref: &'a str,
        channel: &'a str,
        #[serde(skip_serializing_if = "Option::is_none")]
        since: Option<&'a str>,
    },
    Unsubscribe {
        r#ref: &'a str,
        channel: &'a str,
    },
    Auth {
        r#ref: &'a str,
        token: &'a str,
    },
}

impl Driver {
    /// Runs until the program closes the client or the server ends it for good; says which in `end`
    /// before the last message can be missed.
    pub(crate) async fn run(mut self, end: Arc<OnceLock<End>>) {
        let why = self.live().await;
        tracing::debug!(%why, "client ended");
        while let Some(delivery) = self.inbox.pop_front() {
            if why == End::Closed || self.messages.send(delivery).await.is_err() {
                break;
            }
        }
        let _ = end.set(why);
    }

    async fn live(&mut self) -> End {
        loop {
            let Ok(aftermath) = self.one_connection().await else { return End::Closed };
            let hint = match aftermath.next {
                Next::Stop(end) => return end,
                Next::Again(hint) => hint,
                Next::NewToken(hint) => {
                    if self.token.source.is_none() {
                        return End::TokenEnded { reason: word(aftermath.why) };
                    }
                    self.token.current = None;
                    hint
                }
            };
            let retry_in = self.backoff.next_delay(hint);
            tracing::debug!(why = %aftermath.why, ?retry_in, "not connected");
            let lost = Message::Lost(Lost { why: aftermath.why, retry_in });
            self.inbox.push_back((lost, self.cursor.clone()));
            if self.meanwhile(tokio::time::sleep(retry_in)).await.is_err() {
                return End::Closed;
            }
        }
    }

    async fn one_connection(&mut self) -> Result<Aftermath, Closed> {
        if let (None, Some(source)) = (&self.token.current, &self.token.source) {
            let asked = tokio::time::timeout(TOKEN_TIMEOUT, source());
            match self.meanwhile(asked).await? {
                Ok(Ok(token)) => self.token.current = Some(token),
                Ok(Err(why)) => return Ok(Aftermath::again(Loss::NoToken(why))),
                Err(_) => return Ok(Aftermath::again(Loss::NoToken("its source did not answer in time".to_owned()))),
            }
        }
        let attempt = Attempt {
            target: self.target.clone(),
            address: self.address_source.as_ref().and_then(|source| source()),
            transport: self.transport,
            token: self.token.current.clone(),
            cursor: self.cursor.text(),
            channels: self.wanted.at_connect.clone(),
        };
        let link = match self.meanwhile(dial(attempt)).await? {
            Ok(link) => link,
            Err(aftermath) => return Ok(aftermath),
        };
        let opened = Instant::now();
        let aftermath = self.serve(link).await?;
        self.backoff.lived(opened.elapsed());
        self.wanted.lost(self.cursor.text().as_deref());
        Ok(aftermath)
    }

    /// Waits for `future`, and for the program to keep up; delivers messages and takes commands
    /// meanwhile.
    async fn meanwhile<F: Future>(&mut self, future: F) -> Result<F::Output, Closed> {
        tokio::pin!(future);
        let mut output = None;
        while output.is_none() || self.inbox.len() >= MAX_WAITING {
            // Each arm is a queue or a pinned future: nothing is lost when another one wins.
            tokio::select! { biased;
                done = &mut future, if output.is_none() => output = Some(done),
                passed = pass_on(&mut self.inbox, &self.messages), if !self.inbox.is_empty() => passed?,
                command = self.commands.recv() => match command {
                    None | Some(Command::Close) => return Err(Closed),
                    Some(Command::Subscribe(ask)) => drop(self.wanted.want(ask)),
                    Some(Command::Unsubscribe { channel, .. }) => self.wanted.leave(&channel),
                    Some(Command::Auth { token, .. }) => self.token.current = Some(token),
                    Some(Command::Send(_)) => {}
                },
            }
        }
        Ok(output.expect("the loop ends only with an output"))
    }

    async fn serve(&mut self, mut link: Link) -> Result<Aftermath, Closed> {
        let mut session = Session::default();
        loop {
            let may_ask = session.is_ready && session.ask_at.is_none() && session.bye.is_none();
            if may_ask && let Some(ask) = self.wanted.next_ask() {
                session.say(&subscribe(&ask));
            }
            let ask_at = session.ask_at;
            // Each arm is a queue, a timer or a boxed future: nothing is lost when another one wins.
            tokio::select! { biased;
                passed = pass_on(&mut self.inbox, &self.messages), if !self.inbox.is_empty() => passed?,
                passed = pass_on(&mut session.outbox, &link.outgoing), if !session.outbox.is_empty() => {
                    if passed.is_err() {
                        return Ok(session.aftermath(Ending::Broken("the socket takes nothing".to_owned())));
                    }
                }
                command = self.commands.recv(), if session.outbox.len() < MAX_WAITING => match command {
                    None | Some(Command::Close) => {
                        close(link).await;
                        return Err(Closed);
                    }
                    Some(command) => self.obey(command, &mut session),
                },
                arrival = link.arrivals.recv(), if self.inbox.is_empty() => match arrival {
                    Some(Arrival::Message { text, cursor }) => self.hear(&text, cursor, &mut session, &link),
                    Some(Arrival::Ended(ending)) => return Ok(session.aftermath(ending)),
                    None => return Ok(session.aftermath(Ending::Eof)),
                },
                () = async { tokio::time::sleep_until(ask_at.expect("the arm asks for one")).await }, if ask_at.is_some() => {
                    session.ask_at = None;
                }
                Some(renewed) = OptionFuture::from(session.renewing.as_mut()), if session.renewing.is_some() => {
                    session.renewing = None;
                    self.renewed(renewed, &mut session);
                }
            }
        }
    }

    fn obey(&mut self, command: Command, session: &mut Session) {
        match command {
            Command::Subscribe(ask) => {
                if let Some(ask) = self.wanted.want(ask) {
                    session.say(&subscribe(&ask));
                }
            }
            Command::Unsubscribe { reference, channel } => {
                self.wanted.leave(&channel);
                session.say(&Say::Unsubscribe { r#ref: &reference, channel: &channel });
            }
            Command::Auth { reference, token } => {
                session.say(&Say::Auth { r#ref: &reference, token: &token });
                self.token.current = Some(token);
            }
            Command::Send(text) => session.outbox.push_back(Outgoing::Text(text)),
            Command::Close => unreachable!("a close is taken before"),
        }
    }

    fn hear(&mut self, text: &str, wire_cursor: Option<String>, session: &mut Session, link: &Link) {
        let message = match Message::parse(text) {
            Ok(message) => message,
            Err(error) => return tracing::debug!(%error, "a message was skipped"),
        };
        match &message {
            Message::Hello(hello) => self.greet(hello, session, link),
            Message::Ready(_) if !session.is_ready => {
                session.is_ready = true;
                for channel in self.wanted.unwanted(&session.joined) {
                    let say = Say::Unsubscribe { r#ref: "left", channel };
                    session.outbox.push_back(Outgoing::Text(json(&say)));
                }
            }
            Message::Event(event) => {
                if let Some(id) = &event.id {
                    self.wanted.heard(&event.channel, id);
                }
            }
            Message::Ok(ok) => self.wanted.confirmed(ok.reference.as_deref().unwrap_or_default()),
            Message::Error(failed) => self.failed(failed, session),
            Message::Unsubscribed(gone) => self.wanted.forget(&gone.channel),
            Message::TokenExpiring(expiring) => self.renew(Duration::from_millis(expiring.in_ms), session),
            Message::Bye(bye) => {
                session.bye = Some(bye.clone());
                link.silence.set(BYE_LINGER);
            }
            _ => {}
        }
        self.cursor.hear(&message);
        self.cursor.replace(wire_cursor.as_deref());
        self.inbox.push_back((message, self.cursor.clone()));
    }

    fn greet(&mut self, hello: &Hello, session: &mut Session, link: &Link) {
        if let Some(heartbeat_ms) = hello.heartbeat_ms {
            link.silence.set(2 * Duration::from_millis(heartbeat_ms) + SILENCE_SLACK);
        }
        if let Some(pacing) = hello.reconnect {
            self.backoff.set_pace(Pace {
                first_max: Duration::from_millis(pacing.first_max_ms),
                base: Duration::from_millis(pacing.min_ms),
                cap: Duration::from_millis(pacing.max_ms),
            });
        }
        session.joined.clone_from(&hello.channels);
    }

    fn failed(&mut self, failed: &Failed, session: &mut Session) {
        let reference = failed.reference.as_deref().unwrap_or_default();
        if !failed.retry {
            self.wanted.denied(reference);
        } else if self.wanted.postponed(reference) {
            let after = failed.after_ms.map_or(ASK_AGAIN, Duration::from_millis);
            session.ask_at = Some(Instant::now() + after + self.backoff.up_to(ASK_AGAIN));
        }
    }

    /// Gets a new token for the open session, a little later: tokens of one birth end together.
    fn renew(&mut self, ends_in: Duration, session: &mut Session) {
        if self.transport != Transport::Ws || session.renewing.is_some() {
            return;
        }
        if let Some(source) = &self.token.source {
            let token = source();
            let wait = self.backoff.up_to((ends_in / 4).min(Duration::from_secs(5)));
            session.renewing = Some(Box::pin(async move {
                tokio::time::sleep(wait).await;
                token.await
            }));
        }
    }

    fn renewed(&mut self, token: Result<String, String>, session: &mut Session) {
        match token {
            Ok(token) => {
                session.say(&Say::Auth { r#ref: "renewal", token: &token });
                self.token.current = Some(token);
            }
            // The session ends with its token then, and the source is asked again.
            Err(why) => tracing::warn!(why, "the token source gave no new token"),
        }
    }
}

impl Session {
    fn say(&mut self, say: &Say<'_>) {
        self.outbox.push_back(Outgoing::Text(json(say)));
    }

    /// A `bye` says more than the way in which the connection ended after it.
    fn aftermath(&self, ending: Ending) -> Aftermath {
        self.bye.as_ref().map_or_else(|| ending.aftermath(), Aftermath::of_bye)
    }
}

fn subscribe(ask: &Ask) -> Say<'_> {
    Say::Subscribe { r#ref: &ask.reference, channel: &ask.channel, since: ask.since.as_deref() }
}

fn json(say: &Say<'_>) -> String {
    serde_json::to_string(say).expect("texts only")
}

fn word(why: Loss) -> String {
    match why {
        Loss::Bye { reason } => reason,
        Loss::Refused { code, .. } if !code.is_empty() => code,
        other => other.to_string(),
    }
}

/// Moves the first of `from` on as soon as there is room. Fails when nobody takes it any more.
///
/// # Cancel safety
/// Nothing leaves `from` unless it arrives.
async fn pass_on<T>(from: &mut VecDeque<T>, to: &mpsc::Sender<T>) -> Result<(), Closed> {
    let room = to.reserve().await.map_err(|_| Closed)?;
    if let Some(first) = from.pop_front() {
        room.send(first);
    }
    Ok(())
}

/// Says goodbye and gives the server a moment to answer.
async fn close(mut link: Link) {
    let farewell = async {
        if link.outgoing.send(Outgoing::Close(1000)).await.is_ok() {
            while let Some(Arrival::Message { .. }) = link.arrivals.recv().await {}
        }
    };
    let _ = tokio::time::timeout(CLOSE_TIMEOUT, farewell).await;
}
