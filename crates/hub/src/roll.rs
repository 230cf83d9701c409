//! The roll call: which sessions are open over the whole fleet, the end of some of them, or of one
//! channel in them. Decides how nodes are asked, what each may answer, and how long is waited for whom.
//!
//! A node asks all others with one text through the backplane, and each answers with one. Texts go by the
//! nodes' names; who wrote one, and whom an answer is for, its boot tells, so that two processes under one name
//! answer each other too. Which ones must answer the fleet's reports say; who has not within half a
//! second is named as missing, and nobody waits longer for it. Texts may be lost, late, foreign or of another
//! version: those are ignored. A node asked while its own link is down is missing, too.

use std::collections::{BTreeSet, HashMap};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use serde::{Deserialize, Serialize};
use tokio::sync::mpsc;
use tokio::time::{Instant, timeout_at};

use crate::channel::Channel;
use crate::close::CloseReason;
use crate::departure::{Departure, Who};
use crate::fleet::{self, Peer};
use crate::handle::GatewayHandle;
use crate::hub::Hub;
use crate::inbound::{self, Had};
use crate::session::Session;

/// All answers must be there within it (contract).
const PATIENCE: Duration = Duration::from_millis(500);
/// Sessions that one node tells of in one answer.
const MAX_SESSIONS: usize = 1_000;
/// Bytes of one answer, about: it travels over the link that events come by. 256 KiB: a hundredth of a
/// second of a slow network, a quarter of what the backplane carries at once.
const MAX_ANSWER_BYTES: usize = 256 * 1024;
/// What a session takes in an answer beside its channels' names.
const SESSION_BYTES: usize = 320;
/// Calls of this node in flight; more are refused.
const MAX_ASKS: usize = 64;
/// Texts from other nodes that wait for their turn; what does not fit is lost, and its sender missing.
const MAX_TEXTS: usize = 256;
/// Form of the texts.
const FORM: u32 = 1;

/// A session, as an operator sees it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SessionView {
    /// Its id.
    pub session: String,
    /// On which node.
    pub node: String,
    /// Whose; `None`: anonymous.
    pub user: Option<String>,
    /// `ws` or `sse`.
    pub transport: String,
    /// The client's address.
    pub address: String,
    /// What it hears.
    pub channels: Vec<String>,
    /// Unix seconds.
    pub opened_at: u64,
    /// Seconds since then, by its node's clock.
    pub age_s: u64,
    /// Unix seconds at which its token ends.
    pub expires_at: Option<u64>,
}

/// Who is there.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Roll {
    /// The oldest first.
    pub sessions: Vec<SessionView>,
    /// Nodes that did not answer in time: their sessions are not known. By name; this node's own where another
    /// process of its name did not.
    pub missing: Vec<String>,
    /// A node has more than fit its answer.
    pub truncated: bool,
}

/// Who was asked to leave, or lost a channel.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Ended {
    /// So many sessions, or a channel in so many, on the nodes that answered.
    pub n_ended: usize,
    /// Nodes that did not answer in time: they may or may not have done it.
    pub missing: Vec<String>,
}

/// The fleet could not be asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RollError {
    /// Too many calls at once: nothing was asked, try again.
    #[error("too many calls over the fleet at once")]
    Busy,
    /// The backplane never said who is in the fleet, so nobody knows who is missing. This node's own
    /// sessions were ended, if that was asked; again is harmless.
    #[error("the backplane does not answer, the fleet is not known")]
    UnknownFleet,
}

impl GatewayHandle {
    /// Sessions over the whole fleet, at most a thousand a node. Takes at most half a second.
    ///
    /// # Errors
    /// See `RollError`.
    ///
    /// # Cancel safety
    /// Nothing is lost; answers that come later are ignored.
    pub async fn sessions(&self, who: Who) -> Result<Roll, RollError> {
        let (answers, missing) = call(&self.hub, &Task::List, who.into()).await?;
        let mut roll = Roll { missing, truncated: answers.iter().any(|a| a.truncated), ..Roll::default() };
        roll.sessions = answers.into_iter().flat_map(|answer| answer.sessions).collect();
        roll.sessions.sort_by(|a, b| (a.opened_at, &a.session).cmp(&(b.opened_at, &b.session)));
        Ok(roll)
    }

    /// Ends sessions over the whole fleet, at once, as `kicked`. Takes at most half a second.
    ///
    /// # Errors
    /// See `RollError`.
    ///
    /// # Cancel safety
    /// Nodes that were asked do it all the same.
    pub async fn end_sessions(&self, who: Who) -> Result<Ended, RollError> {
        self.end(Task::End, who).await
    }

    /// Takes a channel off sessions over the whole fleet, which stay open and are told (`unsubscribed`, `admin`).
    /// Forbids nothing: who asks for it again, or comes back with a token that joins it, hears it again. Takes
    /// at most half a second.
    ///
    /// # Errors
    /// See `RollError`.
    ///
    /// # Cancel safety
    /// Nodes that were asked do it all the same.
    pub async fn unsubscribe(&self, who: Who, channel: &Channel) -> Result<Ended, RollError> {
        self.end(Task::Unsubscribe { channel: channel.as_str().to_owned() }, who).await
    }

    async fn end(&self, task: Task, who: Who) -> Result<Ended, RollError> {
        let (answers, missing) = call(&self.hub, &task, who.into()).await?;
        Ok(Ended { n_ended: answers.iter().map(|answer| answer.ended).sum(), missing })
    }
}

/// One text between nodes.
#[derive(Serialize, Deserialize)]
struct Letter {
    /// `FORM`.
    v: u32,
    /// Which call, by the asker's count.
    call: u64,
    #[serde(flatten)]
    from: Sender,
    /// An answer: for which process of the name it is sent to. Empty, as in an earlier version's: for any.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    to: String,
    #[serde(flatten)]
    body: Body,
}

/// Who wrote a text.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
struct Sender {
    #[serde(rename = "from")]
    node: String,
    /// Empty in an earlier version's.
    #[serde(default)]
    boot: String,
}

impl Sender {
    fn own(hub: &Hub) -> Self {
        Self { node: hub.config.node.as_ref().to_owned(), boot: hub.fleet.boot.clone() }
    }

    /// Where one of the two does not say which process it is, the name has to do.
    fn is(&self, peer: &Peer) -> bool {
        let is_boot = |boot: &str| self.boot.is_empty() || *self.boot == *boot;
        *self.node == *peer.node && peer.boot.as_deref().is_none_or(is_boot)
    }
}

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Body {
    Ask { task: Task, of: Whom },
    Answer(Answer),
}

#[derive(Clone, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Task {
    List,
    End,
    Unsubscribe { channel: String },
}

#[derive(Clone, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Whom {
    All,
    User(String),
    Session(String),
}

impl From<Who> for Whom {
    fn from(who: Who) -> Self {
        match who {
            Who::All => Whom::All,
            Who::User(user) => Whom::User(user.as_ref().into()),
            Who::Session(session) => Whom::Session(session.as_ref().into()),
        }
    }
}

impl From<Whom> for Who {
    fn from(whom: Whom) -> Self {
        match whom {
            Whom::All => Who::All,
            Whom::User(user) => Who::User(user.into()),
            Whom::Session(session) => Who::Session(session.into()),
        }
    }
}

#[derive(Default, Serialize, Deserialize)]
#[serde(default)]
struct Answer {
    sessions: Vec<SessionView>,
    truncated: bool,
    ended: usize,
}

/// The calls of a node and the texts that came for it.
pub(crate) struct Rolls {
    n_calls: AtomicU64,
    calls: Mutex<HashMap<u64, mpsc::Sender<(Sender, Answer)>>>,
    texts: mpsc::Sender<String>,
    /// The task's end, until the task has it.
    heard: Mutex<Option<mpsc::Receiver<String>>>,
}

/// A call in flight; dropped, its answers are ignored.
struct Call<'a> {
    rolls: &'a Rolls,
    id: u64,
    answers: mpsc::Receiver<(Sender, Answer)>,
}

impl Rolls {
    pub fn new() -> Self {
        let (texts, heard) = mpsc::channel(MAX_TEXTS);
        Self { n_calls: AtomicU64::new(0), calls: Mutex::default(), texts, heard: Mutex::new(Some(heard)) }
    }

    /// A text from some node. Never waits: the dispatcher brings it.
    pub fn told(&self, text: String) {
        if self.texts.try_send(text).is_err() {
            tracing::debug!("too many texts from other nodes at once, one is lost");
        }
    }

    fn begin(&self) -> Result<Call<'_>, RollError> {
        let id = self.n_calls.fetch_add(1, Ordering::Relaxed);
        let mut calls = self.calls.lock().expect("no panic while the calls are held");
        if calls.len() >= MAX_ASKS {
            return Err(RollError::Busy);
        }
        // Every node answers once.
        let (tell, answers) = mpsc::channel(MAX_TEXTS);
        calls.insert(id, tell);
        Ok(Call { rolls: self, id, answers })
    }

    fn answered(&self, call: u64, from: Sender, answer: Answer) {
        let calls = self.calls.lock().expect("no panic while the calls are held");
        if let Some(call) = calls.get(&call) {
            let _ = call.try_send((from, answer));
        }
    }
}

impl Drop for Call<'_> {
    fn drop(&mut self) {
        self.rolls.calls.lock().expect("no panic while the calls are held").remove(&self.id);
    }
}

/// Asks everybody, this node included; gives the answers and who did not.
async fn call(hub: &Arc<Hub>, task: &Task, of: Whom) -> Result<(Vec<Answer>, Vec<String>), RollError> {
    let deadline = Instant::now() + PATIENCE;
    let mut call = hub.rolls.begin()?;
    let mut answers = vec![answer(hub, task, of.clone().into())];
    let letter = letter(hub, call.id, String::new(), Body::Ask { task: task.clone(), of });
    // Together: nobody has to be known to be asked.
    let (told, fresh) =
        tokio::join!(timeout_at(deadline, hub.backplane.tell(None, letter)), timeout_at(deadline, fleet::refresh(hub)));
    if !matches!((told, fresh), (Ok(Ok(())), Ok(Ok(())))) {
        tracing::debug!("the fleet could not be asked in time; who is missing is as it was last known");
    }
    let mut missing = hub.fleet.others().ok_or(RollError::UnknownFleet)?;
    let mut heard = BTreeSet::new();
    while !missing.is_empty() {
        let Ok(Some((from, answer))) = timeout_at(deadline, call.answers.recv()).await else { break };
        missing.retain(|peer| !from.is(peer));
        if heard.insert(from) {
            answers.push(answer);
        }
    }
    let missing: BTreeSet<String> = missing.iter().map(|peer| peer.node.as_ref().to_owned()).collect();
    Ok((answers, missing.into_iter().collect()))
}

fn letter(hub: &Hub, call: u64, to: String, body: Body) -> String {
    let letter = Letter { v: FORM, call, from: Sender::own(hub), to, body };
    serde_json::to_string(&letter).expect("names and numbers always become JSON")
}

/// Reads what other nodes say and answers them, one after the other, until the hub stops.
pub(crate) async fn run(hub: Arc<Hub>) {
    let Some(mut texts) = hub.rolls.heard.lock().expect("no panic while it is held").take() else { return };
    while let Some(text) = texts.recv().await {
        match serde_json::from_str::<Letter>(&text) {
            Ok(letter) if letter.v == FORM => read(&hub, letter).await,
            // A newer node's, or no node's: it says that its sender hears nothing from us.
            Ok(_) | Err(_) => tracing::debug!(bytes = text.len(), "a text that is none of this version's was ignored"),
        }
    }
}

async fn read(hub: &Arc<Hub>, letter: Letter) {
    // What is told to all comes back; of this node's own sessions the asker knows already.
    let Letter { call, from, to, body, .. } = letter;
    if from == Sender::own(hub) {
        return;
    }
    match body {
        Body::Answer(_) if !to.is_empty() && to != hub.fleet.boot => {}
        Body::Answer(answer) => hub.rolls.answered(call, from, answer),
        Body::Ask { task, of } => {
            let text = self::letter(hub, call, from.boot, Body::Answer(answer(hub, &task, of.into())));
            // Lost, this node is missing in that call.
            if let Err(error) = hub.backplane.tell(Some(from.node.into()), text).await {
                tracing::debug!(%error, "a node could not be answered");
            }
        }
    }
}

/// This node's own part.
fn answer(hub: &Hub, task: &Task, who: Who) -> Answer {
    match task {
        Task::List => list(hub, &who),
        // At once and not spread: these do not come back by themselves.
        Task::End => {
            let ended = hub.depart(Departure { who, reason: CloseReason::Kicked, over: Duration::ZERO });
            Answer { ended, ..Answer::default() }
        }
        Task::Unsubscribe { channel } => {
            // A name that is none is nobody's channel.
            let ended = Channel::new(channel).map_or(0, |channel| unsubscribe(hub, &who, &channel));
            Answer { ended, ..Answer::default() }
        }
    }
}

/// Takes the channel off this node's own; returns off how many.
fn unsubscribe(hub: &Hub, who: &Who, channel: &Channel) -> usize {
    let all = hub.all_sessions();
    let theirs = all.iter().filter(|session| who.is(&session.info));
    theirs.filter(|session| inbound::unsubscribe(hub, session, channel) == Had::It).count()
}

fn list(hub: &Hub, who: &Who) -> Answer {
    let mut answer = Answer::default();
    let mut bytes = 0;
    for session in hub.all_sessions().iter().filter(|session| who.is(&session.info)) {
        let Some(view) = see(hub, session) else { continue };
        bytes += SESSION_BYTES + view.channels.iter().map(|channel| channel.len() + 3).sum::<usize>();
        if answer.sessions.len() == MAX_SESSIONS || bytes > MAX_ANSWER_BYTES {
            answer.truncated = true;
            break;
        }
        answer.sessions.push(view);
    }
    answer
}

/// `None`: it is ending.
fn see(hub: &Hub, session: &Session) -> Option<SessionView> {
    let info = &session.info;
    let (channels, identity) = {
        let state = session.lock();
        if state.is_over() {
            return None;
        }
        let channels = state.subs.iter().flatten().map(|sub| sub.channel.as_str().to_owned()).collect();
        (channels, state.identity.clone())
    };
    let age = info.opened_at.elapsed();
    Some(SessionView {
        session: info.id.to_string(),
        node: hub.config.node.as_ref().to_owned(),
        user: identity.user.as_ref().map(|user| user.as_ref().to_owned()),
        transport: info.wire.word().to_owned(),
        address: info.address.to_string(),
        channels,
        opened_at: hub.clock.unix().saturating_sub(age).as_secs(),
        age_s: age.as_secs(),
        expires_at: identity.expires_at.map(|at| at.as_secs()),
    })
}

#[cfg(test)]
mod tests;
