//! Was this identity revoked? Decides how the backplane's list is asked so that a crowd costs few
//! questions, what its answers mean, and what holds while it cannot answer. Keys and their names
//! are the backplane's; what a refused or unchecked session gets is the edge's and the hub's.
//!
//! Checks that arrive while one question is under way share the next: one in flight a node, so an
//! idle node asks at once and a busy one asks in large batches. Where checks come by the hundred a
//! second, a question also waits a moment for company. A key that several wait for is asked once.
//!
//! While the list cannot be read, one question at a time finds out whether it can be again;
//! whoever comes in between is told so at once, instead of waiting for the same deadline.
//!
//! What this node has seen revoked is remembered. In the first seconds it decides by itself; later
//! the list decides (somebody may have taken the revocation back), and the memory holds only where
//! the list cannot be read.

#[cfg(test)]
mod tests;

use std::collections::{HashMap, VecDeque};
use std::ops::Range;
use std::panic::AssertUnwindSafe;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use futures_util::FutureExt;
use tokio::sync::{mpsc, oneshot};
use tokio::time::{Instant, sleep_until, timeout_at};
use tokio_util::task::AbortOnDropHandle;

use crate::auth::Identity;
use crate::backplane::{Backplane, Revocation, RevocationKey, Unavailable};
use crate::limit::{Capacity, Seat};
use crate::telemetry::{Metrics, RevocationSource};

/// Most checks that wait at one time, in the queue and in flight. At 100 to 1000 admissions a
/// second and a deadline of 1 s it is never reached but by a fault.
pub const MAX_WAITING: usize = 8_192;
/// Most checks that share one question: up to three keys each, about 1 ms of one Redis.
const MAX_BATCH: usize = 1_024;
/// Where checks come faster than this, a second, a question waits for company. Below, it costs
/// Redis less than the wait would cost the client. Twice the accept rate by default.
const STORM: f64 = 200.0;
/// Over at least so long that is counted.
const STORM_WINDOW: Duration = Duration::from_millis(10);
/// A storm is over when over so long they came slower than this: a little slower than what began it,
/// for on a busy machine they come in gusts.
const LULL: f64 = 150.0;
const LULL_WINDOW: Duration = Duration::from_millis(250);
/// Company enough: 256 checks of three keys cost Redis less than a millisecond.
const COMPANY: usize = 256;
/// No question waits longer for it than this after the one before began: a fifth of the time that an
/// admission has.
const COMPANY_WAIT: Duration = Duration::from_millis(200);
/// Nor longer than until so many looks in a row found nobody: those who wait are all there are.
/// Looks and not time, for on a busy machine the looks come late as well as the newcomers.
const ALONE: u32 = 12;
/// For fewer than this, looks are made until `COMPANY_WAIT` is over: a pause between two gusts is
/// more likely than that those are all. (Were they all, they came too slowly for a storm.)
const FEW: usize = 16;
/// So long nobody waits for more than there were then.
const KNOWN: Duration = Duration::from_millis(500);
/// So often it is looked.
const LOOK: Duration = Duration::from_millis(2);
/// After a question that got no answer, so long nobody is asked.
const REST: Duration = Duration::from_millis(200);
/// Most revocations remembered, about 10 MiB. The oldest go first.
const MAX_REMEMBERED: usize = 65_536;
/// So long after it was seen, a revocation decides without a question, and an answer that was read
/// before it was written cannot undo it.
const FRESH: Duration = Duration::from_secs(10);

/// What a new session gets while the list cannot be read (`GATEWAY_REVOCATION_UNAVAILABLE`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WhenUnavailable {
    /// Not now (503), never "revoked".
    Refuse,
    /// Admission, checked as soon as the list can be read again.
    Allow,
}

/// Whether a storm's questions wait for company.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Company {
    /// They do: each is one for many.
    Awaited,
    /// They do not: so few are let in that their questions are no load, and admissions had better
    /// stay evenly spread.
    Unneeded,
}

/// How `Revocations` works.
#[derive(Clone, Copy, Debug)]
pub struct RevocationConfig {
    /// What the caller is to do at `CheckOutcome::Unavailable`.
    pub when_unavailable: WhenUnavailable,
    /// A check, and each question to the backplane, takes at most so long
    /// (`GATEWAY_AUTH_TIMEOUT` less what the rest of an admission needs).
    pub deadline: Duration,
    /// A revocation that was seen is remembered so long (`GATEWAY_REVOCATION_TTL`).
    pub remember: Duration,
    /// Whether a storm's questions wait for company.
    pub company: Company,
}

/// What is known about an identity.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CheckOutcome {
    /// Not revoked, says the list.
    Good,
    /// Revoked, says the list or what this node has seen.
    Revoked,
    /// Nobody can say now. `Revocations::when_unavailable` tells what to do.
    Unavailable,
}

/// What a check came to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Checked {
    /// What is known.
    pub outcome: CheckOutcome,
    /// For so long the question waited for company, by choice and not for the list.
    pub in_company: Duration,
}

type Answers = Vec<Option<String>>;

/// One check's question. Dropped with its seat when it was answered or its asker is gone.
struct Question {
    keys: Vec<RevocationKey>,
    asked_at: Instant,
    answer: oneshot::Sender<(Option<Answers>, Duration)>,
    _seat: Seat,
}

/// The revocation list as this node sees it. Its one task ends when it is dropped.
#[derive(Debug)]
pub struct Revocations {
    config: RevocationConfig,
    waiting: Capacity,
    questions: mpsc::Sender<Question>,
    list: Arc<List>,
    seen: Seen,
    metrics: Arc<Metrics>,
    is_oddity_told: AtomicBool,
    _asking: AbortOnDropHandle<()>,
}

impl Revocations {
    /// Starts the task that asks; call it inside a tokio runtime.
    pub fn new(backplane: Arc<dyn Backplane>, config: RevocationConfig, metrics: Arc<Metrics>) -> Self {
        let (questions, asked) = mpsc::channel(MAX_WAITING);
        let list = Arc::new(List { backplane, deadline: config.deadline, is_away: AtomicBool::new(false) });
        let asking = tokio::spawn(ask_in_batches(list.clone(), config.company, asked));
        Self {
            config,
            waiting: Capacity::new(MAX_WAITING),
            questions,
            list,
            seen: Seen::new(MAX_REMEMBERED, config.remember),
            metrics,
            is_oddity_told: AtomicBool::new(false),
            _asking: AbortOnDropHandle::new(asking),
        }
    }

    /// `check_by` within the configured deadline.
    pub async fn check(&self, who: &Identity) -> CheckOutcome {
        self.check_by(who, Instant::now() + self.config.deadline).await.outcome
    }

    /// Asks whether `who` was revoked; answers by `deadline`. Over `MAX_WAITING` checks at
    /// one time the answer is `Unavailable` at once. An identity without `sub`, `jti` and `sid`
    /// needs no question. Counts in `gateway_revocation_checks_total` who could answer.
    ///
    /// Between this answer and the moment at which the session is registered a revocation may
    /// arrive: ask `is_seen` once more after that moment.
    ///
    /// # Cancel safety
    /// Dropping the future takes the question back; nobody else's answer changes.
    pub async fn check_by(&self, who: &Identity, deadline: Instant) -> Checked {
        let (outcome, source, in_company) = self.look_up(who, deadline).await;
        self.metrics.revocation_checked(source);
        Checked { outcome, in_company }
    }

    async fn look_up(&self, who: &Identity, deadline: Instant) -> (CheckOutcome, RevocationSource, Duration) {
        let keys = keys_of(who);
        if keys.is_empty() {
            return (CheckOutcome::Good, RevocationSource::Unneeded, Duration::ZERO);
        }
        let asked_at = Instant::now();
        if self.seen.is_fresh(&keys, who, asked_at) {
            return (CheckOutcome::Revoked, RevocationSource::Local, Duration::ZERO);
        }
        let (answers, in_company) = self.ask(keys.clone(), asked_at, deadline).await.unwrap_or_default();
        match answers {
            Some(answers) => (self.judge(who, &keys, &answers, asked_at), RevocationSource::Redis, in_company),
            None if self.seen.is_any(&keys, who) => (CheckOutcome::Revoked, RevocationSource::Local, in_company),
            None => (CheckOutcome::Unavailable, RevocationSource::Unavailable, in_company),
        }
    }

    /// Asks about many open sessions in one question of its own: for a sweep, in pages of some
    /// hundreds, and for sessions that were admitted unchecked. Which are revoked, in their order.
    ///
    /// # Errors
    /// `Unavailable`: keep the sessions, ask again later.
    pub async fn sweep(&self, who: &[Arc<Identity>]) -> Result<Vec<bool>, Unavailable> {
        let asked_at = Instant::now();
        let each: Vec<Vec<RevocationKey>> = who.iter().map(|who| keys_of(who)).collect();
        let mut answers = self.list.read(each.concat()).await?.into_iter();
        let revoked = who.iter().zip(&each).map(|(who, keys)| {
            let own: Answers = answers.by_ref().take(keys.len()).collect();
            self.judge(who, keys, &own, asked_at) == CheckOutcome::Revoked
        });
        Ok(revoked.collect())
    }

    /// This node saw a revocation: it holds from now on, whatever the backplane can say.
    pub fn note(&self, revocation: &Revocation) {
        self.seen.note(revocation.key.clone(), revocation.before, Instant::now());
    }

    /// Has this node seen `who` revoked? Asks nobody.
    pub fn is_seen(&self, who: &Identity) -> bool {
        self.seen.is_any(&keys_of(who), who)
    }

    /// What to do at `CheckOutcome::Unavailable`.
    pub fn when_unavailable(&self) -> WhenUnavailable {
        self.config.when_unavailable
    }

    /// Checks that wait now.
    pub fn n_waiting(&self) -> usize {
        self.waiting.n_taken()
    }

    async fn ask(
        &self,
        keys: Vec<RevocationKey>,
        asked_at: Instant,
        deadline: Instant,
    ) -> Option<(Option<Answers>, Duration)> {
        let (answer, answered) = oneshot::channel();
        let question = Question { keys, asked_at, answer, _seat: self.waiting.try_acquire()? };
        // Never full: there are as many seats as places.
        self.questions.try_send(question).ok()?;
        timeout_at(deadline, answered).await.ok()?.ok()
    }

    /// What the list's answers mean for `who`, and what they teach this node.
    fn judge(
        &self,
        who: &Identity,
        keys: &[RevocationKey],
        answers: &[Option<String>],
        asked_at: Instant,
    ) -> CheckOutcome {
        let mut is_revoked = false;
        for (key, answer) in keys.iter().zip(answers) {
            let Some(value) = answer else {
                self.seen.forget_older(key, asked_at);
                continue;
            };
            let before = match key {
                RevocationKey::Sub(_) => self.read_time(value, who.issued_at),
                RevocationKey::Jti(_) | RevocationKey::Sid(_) => Some(u64::MAX),
            };
            if let Some(before) = before.filter(|&before| before >= who.issued_at) {
                self.seen.note(key.clone(), before, asked_at);
                is_revoked = true;
            }
        }
        // What was seen while the question was under way is newer than the answer.
        if is_revoked || self.seen.is_fresh(keys, who, Instant::now()) {
            CheckOutcome::Revoked
        } else {
            CheckOutcome::Good
        }
    }

    /// A revocation whose time cannot be read revokes the token at hand: somebody meant something.
    /// `None`: a time before 1970, at which no token was issued.
    fn read_time(&self, value: &str, issued_at: u64) -> Option<u64> {
        let value = value.trim();
        if let Ok(whole) = value.parse() {
            return Some(whole);
        }
        match value.parse::<f64>() {
            // The conversion saturates.
            Ok(float) if float.is_finite() => (float >= 0.0).then_some(float as u64),
            _ => {
                if !self.is_oddity_told.swap(true, Ordering::Relaxed) {
                    tracing::warn!("a user's revocation holds no Unix time: that user's tokens are taken as revoked");
                }
                Some(issued_at)
            }
        }
    }
}

fn keys_of(who: &Identity) -> Vec<RevocationKey> {
    let jti = who.jti.clone().map(RevocationKey::Jti);
    let sid = who.sid.clone().map(RevocationKey::Sid);
    let sub = who.user.clone().map(RevocationKey::Sub);
    [jti, sid, sub].into_iter().flatten().collect()
}

/// The backplane's list, asked under a deadline.
struct List {
    backplane: Arc<dyn Backplane>,
    deadline: Duration,
    is_away: AtomicBool,
}

impl std::fmt::Debug for List {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("List")
    }
}

impl List {
    /// One answer a key, in their order.
    async fn read(&self, keys: Vec<RevocationKey>) -> Result<Answers, Unavailable> {
        if keys.is_empty() {
            return Ok(Answers::new());
        }
        let n_keys = keys.len();
        // The call itself may panic as well as its future.
        let call = AssertUnwindSafe(async { self.backplane.revocations(keys).await }).catch_unwind();
        let answers = match timeout_at(Instant::now() + self.deadline, call).await {
            Ok(Ok(Ok(answers))) if answers.len() == n_keys => Ok(answers),
            Ok(Ok(Ok(_))) => Err(Unavailable("the revocation list gave too few or too many answers".into())),
            Ok(Ok(Err(unavailable))) => Err(unavailable),
            Ok(Err(_)) => Err(Unavailable("reading the revocation list panicked".into())),
            Err(_) => Err(Unavailable("the revocation list did not answer in time".into())),
        };
        self.tell_once(&answers);
        answers
    }

    /// One line when the list goes away, one when it is back.
    fn tell_once(&self, answers: &Result<Answers, Unavailable>) {
        let was_away = self.is_away.swap(answers.is_err(), Ordering::Relaxed);
        match answers {
            Err(error) if !was_away => tracing::warn!(%error, "the revocation list cannot be read"),
            Ok(_) if was_away => tracing::info!("the revocation list can be read again"),
            _ => {}
        }
    }
}

/// The one task: what queued while the last question was under way makes the next one.
async fn ask_in_batches(list: Arc<List>, company: Company, mut asked: mpsc::Receiver<Question>) {
    let mut batch = Vec::new();
    let mut pace = Pace::new(Instant::now());
    while asked.recv_many(&mut batch, MAX_BATCH).await > 0 {
        if pace.rests_until.is_some_and(|until| Instant::now() < until) {
            answer(&mut batch, None, None);
            continue;
        }
        let waits_from = Instant::now();
        if pace.is_storm && company == Company::Awaited {
            pace.wait_for_company(&mut batch, &mut asked).await;
        }
        let waited = waits_from..Instant::now();
        batch.retain(|question: &Question| !question.answer.is_closed());
        let (keys, places) = without_repeats(&batch);
        pace.begin(batch.len(), Instant::now());
        let answers = list.read(keys).await.ok();
        pace.rests_until = answers.is_none().then(|| Instant::now() + REST);
        answer(&mut batch, answers.map(|answers| (answers, places)), Some(&waited));
    }
}

/// The batch's keys, each once, and for all its questions' keys in their order where it stands.
fn without_repeats(batch: &[Question]) -> (Vec<RevocationKey>, Vec<usize>) {
    let n_keys = batch.iter().map(|question| question.keys.len()).sum();
    let (mut keys, mut places) = (Vec::with_capacity(n_keys), Vec::with_capacity(n_keys));
    let mut known = HashMap::with_capacity(n_keys);
    for key in batch.iter().flat_map(|question| &question.keys) {
        places.push(*known.entry(key).or_insert_with(|| {
            keys.push(key.clone());
            keys.len() - 1
        }));
    }
    (keys, places)
}

/// How fast checks come, and whether asking makes sense.
struct Pace {
    /// When the last question was asked.
    began: Instant,
    /// Since when checks are counted, and how many came.
    window: (Instant, usize),
    is_storm: bool,
    /// For how many is waited, until when that is known.
    company: (usize, Instant),
    rests_until: Option<Instant>,
}

impl Pace {
    fn new(now: Instant) -> Self {
        Self { began: now, window: (now, 0), is_storm: false, company: (COMPANY, now), rests_until: None }
    }

    async fn wait_for_company(&mut self, batch: &mut Vec<Question>, asked: &mut mpsc::Receiver<Question>) {
        let until = self.began + COMPANY_WAIT;
        let (mut now, mut n_in_vain) = (Instant::now(), 0);
        if now >= self.company.1 {
            self.company.0 = COMPANY;
        }
        while batch.len() < self.company.0 && now < until {
            if n_in_vain >= ALONE && batch.len() >= FEW {
                // A little fewer: not all of them come at the same moment again.
                self.company = (batch.len() * 7 / 8, now + KNOWN);
                return;
            }
            sleep_until(until.min(now + LOOK)).await;
            now = Instant::now();
            let n_before = batch.len();
            while batch.len() < MAX_BATCH
                && let Ok(question) = asked.try_recv()
            {
                batch.push(question);
            }
            n_in_vain = if batch.len() > n_before { 0 } else { n_in_vain + 1 };
        }
    }

    /// A question of `n` checks is asked now.
    fn begin(&mut self, n: usize, now: Instant) {
        self.began = now;
        self.window.1 += n;
        let (since, n) = self.window;
        let (least, rate) = if self.is_storm { (LULL_WINDOW, LULL) } else { (STORM_WINDOW, STORM) };
        if now - since >= least {
            self.is_storm = n as f64 > rate * (now - since).as_secs_f64();
            self.window = (now, 0);
        }
    }
}

/// `answers`: what the list said, and where in it each key's answer stands. `waited`: while the batch
/// waited for company.
fn answer(batch: &mut Vec<Question>, answers: Option<(Answers, Vec<usize>)>, waited: Option<&Range<Instant>>) {
    let mut places = answers.as_ref().map(|(_, places)| places.iter());
    for question in batch.drain(..) {
        let own = answers.as_ref().zip(places.as_mut()).map(|((answers, _), places)| {
            places.take(question.keys.len()).map(|place| answers[*place].clone()).collect()
        });
        let in_company =
            waited.map_or(Duration::ZERO, |waited| waited.end - question.asked_at.clamp(waited.start, waited.end));
        // An error says that the asker is gone.
        let _ = question.answer.send((own, in_company));
    }
}

/// What this node has seen revoked: bounded, the oldest forgotten first.
#[derive(Debug)]
struct Seen {
    max: usize,
    remember: Duration,
    notes: Mutex<Notes>,
}

#[derive(Debug, Default)]
struct Notes {
    by_key: HashMap<RevocationKey, Note>,
    /// In the order of their time; an entry whose time is not its note's any more is void.
    order: VecDeque<(Instant, RevocationKey)>,
}

#[derive(Clone, Copy, Debug)]
struct Note {
    before: u64,
    seen_at: Instant,
}

impl Note {
    fn covers(&self, key: &RevocationKey, who: &Identity) -> bool {
        match key {
            RevocationKey::Sub(_) => self.before >= who.issued_at,
            RevocationKey::Jti(_) | RevocationKey::Sid(_) => true,
        }
    }
}

impl Seen {
    fn new(max: usize, remember: Duration) -> Self {
        Self { max, remember, notes: Mutex::default() }
    }

    fn note(&self, key: RevocationKey, before: u64, now: Instant) {
        let mut notes = self.lock();
        let known = notes.by_key.get(&key).copied();
        // Never weaker and never older than what is known.
        let note = Note {
            before: known.map_or(before, |known| known.before.max(before)),
            seen_at: known.map_or(now, |known| known.seen_at.max(now)),
        };
        notes.by_key.insert(key.clone(), note);
        if known.is_none_or(|known| known.seen_at < note.seen_at) {
            notes.order.push_back((note.seen_at, key));
        }
        while let Some((seen_at, _)) = notes.order.front() {
            let is_over = now.saturating_duration_since(*seen_at) >= self.remember;
            if !is_over && notes.order.len() <= self.max {
                break;
            }
            if let Some((seen_at, key)) = notes.order.pop_front()
                && notes.by_key.get(&key).is_some_and(|note| note.seen_at == seen_at)
            {
                notes.by_key.remove(&key);
            }
        }
    }

    /// The list does not hold this key (any more), and was asked after the grace of what was seen.
    fn forget_older(&self, key: &RevocationKey, asked_at: Instant) {
        let mut notes = self.lock();
        if notes.by_key.get(key).is_some_and(|note| asked_at.saturating_duration_since(note.seen_at) >= FRESH) {
            notes.by_key.remove(key);
        }
    }

    /// Revoked by something seen so recently that nobody need be asked?
    fn is_fresh(&self, keys: &[RevocationKey], who: &Identity, now: Instant) -> bool {
        self.is(keys, who, now, FRESH.min(self.remember))
    }

    /// Revoked by anything that is remembered?
    fn is_any(&self, keys: &[RevocationKey], who: &Identity) -> bool {
        self.is(keys, who, Instant::now(), self.remember)
    }

    fn is(&self, keys: &[RevocationKey], who: &Identity, now: Instant, within: Duration) -> bool {
        let notes = self.lock();
        keys.iter().any(|key| {
            notes
                .by_key
                .get(key)
                .is_some_and(|note| now.saturating_duration_since(note.seen_at) < within && note.covers(key, who))
        })
    }

    fn lock(&self) -> MutexGuard<'_, Notes> {
        self.notes.lock().expect("no panic while the notes are held")
    }
}
