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
use crate::leaves::Leave;
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

/// When what was refused for now is asked again if the server names no time. Also the width of the
/// jitter, except after a `rate_limited`: that bucket is ours alone, no crowd waits for it.
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
    Unsubscribe(Leave),
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
    /// Not before this is the next channel asked for, or left.
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
        let cursor = self.cursor.text();
        let attempt = Attempt {
            target: self.target.clone(),
            address: self.address_source.as_ref().and_then(|source| source()),
            transport: self.transport,
            token: self.token.current.clone(),
            channels: self.wanted.dialled(cursor.as_deref()),
            cursor,
        };
        let link = match self.meanwhile(dial(attempt)).await? {
            Ok(link) => link,
            Err(aftermath) => return Ok(self.not_connected(aftermath)),
        };
        let opened = Instant::now();
        let aftermath = self.serve(link).await?;
        self.backoff.lived(opened.elapsed());
        self.wanted.lost(self.cursor.text().as_deref());
        Ok(aftermath)
    }

    /// What the server refuses for a channel that travelled in the query may go well without it; the
    /// channel is asked for alone then, where the program hears of a no and the others stay.
    fn not_connected(&mut self, mut aftermath: Aftermath) -> Aftermath {
        if aftermath.may_be_for_its_channels() && self.wanted.carry_none() {
            aftermath.next = Next::Again(None);
        }
        self.wanted.lost(self.cursor.text().as_deref());
        aftermath
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
                    Some(Command::Subscribe(ask)) => self.wanted.want(ask),
                    Some(Command::Unsubscribe(leave)) => self.wanted.leave(leave),
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
            if session.is_ready && session.ask_at.is_none() && session.bye.is_none() {
                self.ask(&mut session);
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

    /// Leaves before asks: they make room.
    fn ask(&mut self, session: &mut Session) {
        while let Some(Leave { reference, channel }) = self.wanted.next_leave() {
            session.say(&Say::Unsubscribe { r#ref: &reference, channel: &channel });
        }
        if let Some(Ask { reference, channel, since }) = self.wanted.next_ask() {
            session.say(&Say::Subscribe { r#ref: &reference, channel: &channel, since: since.as_deref() });
        }
    }

    fn obey(&mut self, command: Command, session: &mut Session) {
        match command {
            Command::Subscribe(ask) => self.wanted.want(ask),
            Command::Unsubscribe(leave) => self.wanted.leave(leave),
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
                self.wanted.ready(&session.joined);
            }
            Message::Event(event) => {
                if let Some(id) = &event.id {
                    self.wanted.heard(&event.channel, id);
                }
            }
            Message::Ok(ok) => self.wanted.confirmed(ok.reference.as_deref().unwrap_or_default()),
            Message::Error(failed) => self.failed(failed, session),
            Message::Unsubscribed(gone) => self.wanted.taken(&gone.channel),
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
        let is_rate = failed.code == "rate_limited";
        // To a leave this says that too much waits for its turn.
        let is_queue = failed.code == "too_many_channels" && self.wanted.is_leaving(reference);
        if is_rate {
            self.wanted.slow_down();
        }
        if !failed.retry && !is_queue {
            self.wanted.denied(reference);
        } else if self.wanted.postponed(reference) || is_rate {
            let after = failed.after_ms.map_or(ASK_AGAIN, Duration::from_millis);
            let jitter = self.backoff.up_to(if is_rate { after } else { ASK_AGAIN });
            session.ask_at = session.ask_at.max(Some(Instant::now() + after + jitter));
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

#[cfg(test)]
mod tests {
    use super::*;

    /// A driver that nobody listens to.
    fn driver(seed: u64) -> Driver {
        Driver {
            target: Target::parse("http://h").unwrap(),
            address_source: None,
            transport: Transport::Ws,
            token: Token { current: None, source: None },
            cursor: Cursor::default(),
            wanted: Wanted::default(),
            backoff: Backoff::seeded(Pace::default(), seed),
            messages: mpsc::channel(1).0,
            commands: mpsc::channel(1).1,
            inbox: VecDeque::new(),
        }
    }

    fn failed(reference: &str, code: &str, after_ms: u64) -> Failed {
        let text = format!(r#"{{"ref":"{reference}","code":"{code}","retry":true,"after_ms":{after_ms}}}"#);
        serde_json::from_str(&text).unwrap()
    }

    /// How long the queue rests after these errors to one ask.
    fn pause(driver: &mut Driver, errors: &[Failed]) -> Duration {
        let mut session = Session { is_ready: true, ..Session::default() };
        driver.wanted.want(Ask { reference: "1".into(), channel: "c".into(), since: None });
        driver.ask(&mut session);
        errors.iter().for_each(|error| driver.failed(error, &mut session));
        session.ask_at.map_or(Duration::ZERO, |at| at - Instant::now())
    }

    #[tokio::test(start_paused = true)]
    async fn a_rate_limit_is_waited_for_with_jitter_of_its_own_width_and_an_outage_with_a_crowds() {
        let ms = Duration::from_millis;
        let pauses = |code: &str| -> Vec<Duration> {
            (0..200).map(|seed| pause(&mut driver(seed), &[failed("1", code, 100)])).collect()
        };
        let own = pauses("rate_limited");
        assert!(own.iter().all(|pause| (ms(100)..ms(200)).contains(pause)), "{own:?}");
        assert!(own.iter().any(|pause| *pause < ms(120)) && own.iter().any(|pause| *pause > ms(180)), "{own:?}");
        let crowds = pauses("unavailable");
        assert!(crowds.iter().all(|pause| (ms(100)..ms(1_100)).contains(pause)), "{crowds:?}");
        assert!(crowds.iter().any(|pause| *pause > ms(900)), "{crowds:?}");
    }

    #[tokio::test(start_paused = true)]
    async fn whoevers_message_found_the_bucket_empty_the_longest_wait_counts() {
        let (plugins, last) = (failed("x", "rate_limited", 2_000), failed("1", "rate_limited", 1));
        assert!(pause(&mut driver(1), &[plugins.clone(), last]) >= Duration::from_secs(2));
        assert_eq!(pause(&mut driver(1), &[failed("x", "unavailable", 2_000)]), Duration::ZERO, "not our question");
    }
}
