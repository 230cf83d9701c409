//! `GATEWAY_MAX_SESSIONS_PER_USER`: how many sessions a user may have over the whole fleet, the
//! newest first. Decides when this node's sessions claim their places and give them back; who is
//! one too many the backplane says, for it alone sees all nodes.
//!
//! What a user sees: opening one session more than allowed always works, and ends the oldest with
//! 4409 `replaced`, on whichever node that is. A client that obeys `reconnect: "never"` stays away.
//! One that does not would replace another in turn, that one the next, and nobody would ever hear a
//! message to its end. So whoever's sessions were replaced too often within half a minute is
//! refused (429) for the rest of it: the sessions that are there stay, and get everything.
//!
//! Admission waits for none of this. A session opens first and claims its place a moment later,
//! together with all that came meanwhile; while the backplane cannot answer, a user may have too
//! many sessions for so long. A place is given back when a session *begins* to end, not when its
//! socket is gone: a client that a drain sends away is at another node before that, and must not be
//! one too many there. Anonymous sessions have no places.

use std::collections::{HashMap, VecDeque};
use std::num::NonZeroU32;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures_util::future::BoxFuture;
use tokio::sync::mpsc;
use tokio::time::{Instant, sleep_until, timeout};

use crate::auth::Identity;
use crate::backplane::{Claim, Claimed, Unavailable};
use crate::clock::Dice;
use crate::close::CloseReason;
use crate::fanout::LinkState;
use crate::hub::Hub;
use crate::session::SessionInfo;

/// Sessions of one call. As for the revocation list: well under a millisecond of Redis.
const PAGE: usize = 256;

/// All places are claimed again within this time, spread. 30 s: the backplane forgets them after
/// minutes, so that several rounds may fail.
const RENEW: Duration = Duration::from_secs(30);

/// The pause after a failed call is drawn between the two, from up to twice the first on.
const PAUSE: (Duration, Duration) = (Duration::from_millis(250), Duration::from_secs(5));

/// Places whose giving back waits for the backplane. Beyond it the oldest are forgotten, and stay
/// taken until they end by themselves: of a user's they are the first to be replaced.
const MAX_LEFT: usize = 65_536;

/// How long the last places are given back when the node stops. What is left then is dropped by
/// the others' claims, for the node is gone.
const LAST_WORDS: Duration = Duration::from_millis(500);

/// Replacements are counted over this time. 30 s: longer than a client's first delays, so that a
/// loop of reconnects is seen as one.
const WINDOW: Duration = Duration::from_secs(30);

/// So many replacements in a window are nobody's fight, whatever the limit: a browser that restores
/// its tabs.
const ALWAYS_ALLOWED: u32 = 4;

/// Users whose replacements are remembered. Beyond it further ones are not counted: they may fight
/// for half a minute more.
const MAX_USERS: usize = 16_384;

/// A full table is looked through for what is over at most so often.
const SWEEP: Duration = Duration::from_secs(1);

/// The limit of one node. Exists only where there is one.
pub(crate) struct Quota {
    max: NonZeroU32,
    /// At most two words a session: the task takes them also while it waits for the backplane.
    words: mpsc::UnboundedSender<Word>,
    /// The task's end, until the task has it.
    heard: Mutex<Option<mpsc::UnboundedReceiver<Word>>>,
    churn: Mutex<Churn>,
}

/// What sessions say.
enum Word {
    Came { user: Arc<str>, session: Arc<str> },
    Left { session: Arc<str> },
}

/// A session's place. Dropped as soon as the session begins to end, whatever the reason, which
/// gives it back exactly once.
pub(crate) struct Place {
    session: Arc<str>,
    words: mpsc::UnboundedSender<Word>,
}

impl Drop for Place {
    fn drop(&mut self) {
        // Nobody hears it once the node has stopped.
        let _ = self.words.send(Word::Left { session: self.session.clone() });
    }
}

impl Quota {
    pub fn new(max: NonZeroU32) -> Self {
        let (words, heard) = mpsc::unbounded_channel();
        Self { max, words, heard: Mutex::new(Some(heard)), churn: Mutex::default() }
    }

    /// The place of a session that has just opened; none for an anonymous one. Waits for nothing.
    pub fn place(&self, info: &SessionInfo) -> Option<Box<Place>> {
        let (user, session) = (info.identity.user.clone()?, Arc::<str>::from(info.id.clone()));
        let _ = self.words.send(Word::Came { user, session: session.clone() });
        Some(Box::new(Place { session, words: self.words.clone() }))
    }

    /// How many replacements of one user in a window are allowed: twice the limit is everybody
    /// once over, by clients that all moved at the same time.
    fn allowed(&self) -> u32 {
        self.max.get().saturating_mul(2).max(ALWAYS_ALLOWED)
    }
}

impl Hub {
    /// May this user open a session now, or do its sessions replace each other in circles?
    /// Always, where no limit is set. Waits for nothing.
    ///
    /// # Errors
    /// More than twice the limit (at least four) were replaced within the last half minute: the
    /// user's next session should be asked to come after this time, 1 to 60 s, drawn.
    pub fn may_come(&self, identity: &Identity) -> Result<(), Duration> {
        let (Some(quota), Some(user)) = (&self.quota, &identity.user) else { return Ok(()) };
        let rest = quota.churn.lock().expect("no panic while it is held").over(user, quota.allowed(), Instant::now());
        rest.map_or(Ok(()), |rest| Err(retry_after(rest, &self.dice)))
    }

    /// A session somewhere in the fleet lost its place; ours are ended.
    pub(crate) fn replaced(&self, user: &Arc<str>, session: &str) {
        if let Some(quota) = &self.quota {
            quota.churn.lock().expect("no panic while it is held").note(user, Instant::now());
        }
        if let Some(session) = self.session(session) {
            self.end(&session, CloseReason::Replaced);
        }
    }
}

/// Spread beyond the window's end, so that the refused do not begin the next fight at its first moment.
fn retry_after(rest: Duration, dice: &Dice) -> Duration {
    let spread = dice.between(Duration::ZERO, WINDOW / 3);
    (rest + spread).clamp(Duration::from_secs(1), Duration::from_secs(60))
}

/// Who was replaced how often of late.
#[derive(Default)]
struct Churn {
    users: HashMap<Arc<str>, Window>,
    swept_at: Option<Instant>,
}

struct Window {
    began: Instant,
    n: u32,
}

impl Window {
    fn is_over(&self, now: Instant) -> bool {
        now >= self.began + WINDOW
    }
}

impl Churn {
    fn note(&mut self, user: &Arc<str>, now: Instant) {
        if let Some(window) = self.users.get_mut(user) {
            if window.is_over(now) {
                *window = Window { began: now, n: 0 };
            }
            window.n = window.n.saturating_add(1);
            return;
        }
        if self.users.len() >= MAX_USERS && self.swept_at.is_none_or(|at| now >= at + SWEEP) {
            self.swept_at = Some(now);
            self.users.retain(|_, window| !window.is_over(now));
        }
        if self.users.len() < MAX_USERS {
            self.users.insert(user.clone(), Window { began: now, n: 1 });
        }
    }

    /// The rest of the window in which more than `allowed` were replaced.
    fn over(&self, user: &str, allowed: u32, now: Instant) -> Option<Duration> {
        let window = self.users.get(user)?;
        (window.n > allowed && !window.is_over(now)).then(|| window.began + WINDOW - now)
    }
}

/// Claims, renews and gives back this node's places until the hub stops; at once over where there
/// is no limit.
pub(crate) async fn run(hub: Arc<Hub>) {
    let Some(quota) = &hub.quota else { return };
    let Some(mut words) = quota.heard.lock().expect("no panic while it is held").take() else { return };
    let mut desk = Desk::new(hub.clone(), quota.max.get());
    let mut links = hub.place.changes();
    desk.link = *links.borrow_and_update();
    let mut said = Vec::new();
    loop {
        desk.begin_call(Instant::now());
        let wakes_at = desk.wakes_at();
        // All arms are cancel-safe: the call is polled in place, the others lose nothing.
        tokio::select! {
            biased;
            () = hub.stop.cancelled() => break,
            done = pending_or(&mut desk.call) => desk.answered(done, Instant::now()),
            _ = words.recv_many(&mut said, PAGE) => said.drain(..).for_each(|word| desk.hear(word)),
            Ok(()) = links.changed() => desk.linked(*links.borrow_and_update()),
            () = sleep_until(wakes_at) => desk.renew(Instant::now()),
        }
    }
    while let Ok(word) = words.try_recv() {
        desk.hear(word);
    }
    desk.close().await;
}

async fn pending_or(call: &mut Option<BoxFuture<'static, Done>>) -> Done {
    match call {
        Some(done) => done.await,
        None => std::future::pending().await,
    }
}

/// What a call came to.
enum Done {
    Claimed(Vec<Arc<str>>, Result<Vec<Claimed>, Unavailable>),
    Released(Vec<(Arc<str>, Arc<str>)>, Result<(), Unavailable>),
}

/// A place as this node knows it.
struct Held {
    user: Arc<str>,
    /// Where it stands among the user's; `None` until the backplane said so.
    since: Option<u64>,
    /// The backplane may have it.
    was_asked: bool,
}

/// The task's books. One call at a time: what queues meanwhile makes the next.
struct Desk {
    hub: Arc<Hub>,
    max: u32,
    link: LinkState,
    places: HashMap<Arc<str>, Held>,
    /// To be claimed for the first time, in the order in which they came.
    fresh: VecDeque<Arc<str>>,
    /// To be claimed again, with their places.
    again: VecDeque<Arc<str>>,
    /// To be given back, as (user, session).
    left: VecDeque<(Arc<str>, Arc<str>)>,
    call: Option<BoxFuture<'static, Done>>,
    n_failures: u32,
    rests_until: Instant,
    /// What this round of renewals still has to do, and when its next page is due.
    round: Vec<Arc<str>>,
    page_at: Instant,
    page_every: Duration,
}

impl Desk {
    fn new(hub: Arc<Hub>, max: u32) -> Self {
        let now = Instant::now();
        Self {
            max,
            link: hub.place.state(),
            places: HashMap::new(),
            fresh: VecDeque::new(),
            again: VecDeque::new(),
            left: VecDeque::new(),
            call: None,
            n_failures: 0,
            rests_until: now,
            round: Vec::new(),
            // Nodes that were started together do not renew together.
            page_at: now + hub.dice.between(Duration::ZERO, RENEW),
            page_every: RENEW,
            hub,
        }
    }

    fn hear(&mut self, word: Word) {
        match word {
            Word::Came { user, session } => {
                self.fresh.push_back(session.clone());
                self.places.insert(session, Held { user, since: None, was_asked: false });
            }
            Word::Left { session } => {
                let Some(held) = self.places.remove(&session) else { return };
                if held.was_asked {
                    self.left.push_back((held.user, session));
                }
                if self.left.len() > MAX_LEFT {
                    self.left.pop_front();
                }
            }
        }
    }

    /// What was claimed over an earlier link may be gone: the log was flushed, or this node was
    /// thought gone and its sessions made room for others.
    fn linked(&mut self, link: LinkState) {
        let came_up = link.is_live && (!self.link.is_live || link.generation != self.link.generation);
        self.link = link;
        if came_up {
            self.round.clear();
            self.again =
                self.places.iter().filter(|(_, held)| held.since.is_some()).map(|(id, _)| id.clone()).collect();
        }
    }

    /// Queues the next page of the round, if it is due.
    fn renew(&mut self, now: Instant) {
        if now < self.page_at {
            return;
        }
        if self.round.is_empty() {
            self.round =
                self.places.iter().filter(|(_, held)| held.since.is_some()).map(|(id, _)| id.clone()).collect();
            self.page_every = RENEW / u32::try_from(self.round.len().div_ceil(PAGE).max(1)).unwrap_or(u32::MAX);
        }
        let rest = self.round.len().saturating_sub(PAGE);
        self.again.extend(self.round.drain(rest..));
        self.page_at = now + self.hub.dice.between(self.page_every.mul_f64(0.9), self.page_every);
    }

    fn wakes_at(&self) -> Instant {
        let has_work = !(self.left.is_empty() && self.fresh.is_empty() && self.again.is_empty());
        let page_at = self.page_at;
        if has_work && self.call.is_none() { page_at.min(self.rests_until) } else { page_at }
    }

    fn begin_call(&mut self, now: Instant) {
        if self.call.is_some() || now < self.rests_until {
            return;
        }
        // Giving back goes first: who closed one session and opened another is not one too many.
        self.call = self.release().or_else(|| self.claim());
    }

    fn release(&mut self) -> Option<BoxFuture<'static, Done>> {
        let page: Vec<_> = self.left.drain(..self.left.len().min(PAGE)).collect();
        if page.is_empty() {
            return None;
        }
        let backplane = self.hub.backplane.clone();
        Some(Box::pin(async move {
            let done = backplane.release(page.clone()).await;
            Done::Released(page, done)
        }))
    }

    fn claim(&mut self) -> Option<BoxFuture<'static, Done>> {
        let (mut ids, mut claims) = (Vec::new(), Vec::new());
        while claims.len() < PAGE {
            let Some(id) = self.fresh.pop_front().or_else(|| self.again.pop_front()) else { break };
            // It may have left while it waited.
            let Some(held) = self.places.get_mut(&id) else { continue };
            held.was_asked = true;
            claims.push(Claim { user: held.user.clone(), session: id.clone(), since: held.since });
            ids.push(id);
        }
        if claims.is_empty() {
            return None;
        }
        let (backplane, max) = (self.hub.backplane.clone(), self.max);
        Some(Box::pin(async move {
            let done = backplane.claim(claims, max).await;
            Done::Claimed(ids, done)
        }))
    }

    fn answered(&mut self, done: Done, now: Instant) {
        self.call = None;
        match done {
            Done::Released(_, Ok(())) => self.n_failures = 0,
            Done::Claimed(ids, Ok(places)) => {
                self.n_failures = 0;
                self.placed(&ids, &places);
            }
            Done::Released(page, Err(error)) => {
                page.into_iter().rev().for_each(|one| self.left.push_front(one));
                self.rest(&error, now);
            }
            Done::Claimed(ids, Err(error)) => {
                for id in ids.into_iter().rev() {
                    match self.places.get(&id) {
                        Some(Held { since: None, .. }) => self.fresh.push_front(id),
                        Some(_) => self.again.push_front(id),
                        None => {}
                    }
                }
                self.rest(&error, now);
            }
        }
    }

    fn placed(&mut self, ids: &[Arc<str>], places: &[Claimed]) {
        for (id, claimed) in ids.iter().zip(places) {
            let Some(held) = self.places.get_mut(id) else { continue };
            held.since = Some(claimed.since);
            if claimed.replaced {
                // Its place is gone already.
                self.places.remove(id);
                if let Some(session) = self.hub.session(id) {
                    self.hub.end(&session, CloseReason::Replaced);
                }
            }
        }
    }

    /// A late limit is not a lost one: it is tried again until it is answered.
    fn rest(&mut self, error: &Unavailable, now: Instant) {
        let most = PAUSE.0.saturating_mul(2u32.saturating_pow(self.n_failures.min(8) + 1)).min(PAUSE.1);
        self.n_failures = self.n_failures.saturating_add(1);
        self.rests_until = now + self.hub.dice.between(PAUSE.0, most);
        tracing::debug!(%error, waiting = self.fresh.len(), "places of users' sessions could not be claimed yet");
    }

    /// The node stops: its places are free.
    async fn close(mut self) {
        let last_words = async {
            if let Some(call) = self.call.take() {
                let done = call.await;
                self.answered(done, Instant::now());
            }
            let held = self.places.drain().filter(|(_, held)| held.was_asked).map(|(id, held)| (held.user, id));
            self.left.extend(held);
            while let Some(release) = self.release() {
                if let Done::Released(_, Err(error)) = release.await {
                    tracing::debug!(%error, "the last places of users' sessions were not given back");
                    return;
                }
            }
        };
        let _ = timeout(LAST_WORDS, last_words).await;
    }
}

#[cfg(test)]
mod tests;
