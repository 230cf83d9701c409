//! When a key set is fetched again, and who waits for it. Decides how often the issuer is asked,
//! what a bad answer means, and what a token with an unknown key is told. How a set is fetched is
//! a `KeyFetcher`'s, what is in it `keys`'.
//!
//! One task, the keeper, does all fetching, so there is never more than one fetch at a time. It
//! fetches in a period (spread, so that a fleet does not ask in step), and when somebody comes with
//! a key that is not known; but never within the cool-down after the last fetch began, whatever
//! comes in. Once a good set was there, one is always in force: a fetch that fails, or a set that
//! cannot be used, changes nothing but the state that is reported.

#[cfg(test)]
mod tests;

use std::sync::Arc;
use std::time::Duration;

use futures_util::future::BoxFuture;
use tokio::sync::{Notify, watch};
use tokio::time::{Instant, sleep_until, timeout, timeout_at};

use super::{KeyError, KeySource, Replaced, Verifier, mark};
use crate::clock::Dice;

/// First pause before the second try of a start; doubled with every further one, at most the
/// cool-down.
const FIRST_RETRY: Duration = Duration::from_millis(500);

/// How often a key set is fetched.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RefreshConfig {
    /// Between two fetches while nobody asks, ± 20 %. A key that the issuer withdraws counts for so
    /// long at most.
    pub every: Duration,
    /// The least time from the beginning of one fetch to the next. A bound on what a flood of
    /// unknown keys costs the issuer, and how long before its first token a key must be published.
    pub cool_down: Duration,
    /// The longest that a fetch may take, connecting included.
    pub timeout: Duration,
}

impl RefreshConfig {
    /// Of a set behind a URL: every 5 minutes, at most every 10 seconds, each within 5 seconds.
    /// Issuers publish a key hours before they use it and let sets be cached for minutes.
    pub const URL: Self =
        Self { every: Duration::from_secs(300), cool_down: Duration::from_secs(10), timeout: Duration::from_secs(5) };

    /// Of a set in a file, which costs next to nothing to read: every 10 seconds, at most every
    /// second. Files are looked at, not watched: a mounted secret changes by a link's exchange.
    pub const FILE: Self =
        Self { every: Duration::from_secs(10), cool_down: Duration::from_secs(1), timeout: Duration::from_secs(5) };
}

/// Where a key set is fetched from.
pub trait KeyFetcher: Send + Sync + 'static {
    /// The text of the set as it is now, of bounded size. It is dropped where it takes longer than
    /// `RefreshConfig::timeout`.
    ///
    /// # Errors
    /// `FetchError`: there is none to be had; it is tried again later.
    fn fetch(&self) -> BoxFuture<'_, Result<String, FetchError>>;
}

/// A key set could not be fetched. What it says goes into the log, so it holds nothing of a URL's
/// query and no credentials.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum FetchError {
    /// Nobody there, or no way to him.
    #[error("the key set cannot be reached: {0}")]
    Unreachable(String),
    /// An answer, but no key set.
    #[error("the answer is no key set: {0}")]
    Refused(String),
    /// Cut off: nobody has so many keys.
    #[error("the key set has more than {max_bytes} bytes")]
    TooLarge {
        /// What is read at most.
        max_bytes: usize,
    },
    /// JSON is UTF-8.
    #[error("the key set is no UTF-8")]
    NoText,
    /// Given up.
    #[error("the key set did not come within {after:?}")]
    Late {
        /// The bound.
        after: Duration,
    },
}

/// How the fetching goes, for metrics.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KeyState {
    /// How long ago the set in force was last seen at its source; `None`: there never was one.
    pub age: Option<Duration>,
    /// For how long no fetch has brought a usable set; `None`: the last one did, or none was made.
    pub failing_for: Option<Duration>,
    /// Fetches made.
    pub n_fetches: u64,
    /// Of those, without a usable set.
    pub n_failures: u64,
}

/// What somebody with an unknown key is told.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Answer {
    /// The set in force is what the issuer has (not older than the cool-down).
    Fresh,
    /// Nobody can say what the issuer has.
    Unavailable,
}

/// What the keeper and those who wait for it share.
#[derive(Debug)]
pub(super) struct Refresh {
    config: RefreshConfig,
    rounds: watch::Sender<Rounds>,
    /// Somebody wants a fetch. Holds one permit, however many want it.
    wanted: Notify,
}

#[derive(Clone, Copy, Debug, Default)]
struct Rounds {
    n_begun: u64,
    n_ended: u64,
    n_failed: u64,
    begun_at: Option<Instant>,
    good_at: Option<Instant>,
    failing_since: Option<Instant>,
}

impl Rounds {
    fn is_under_way(&self) -> bool {
        self.n_begun > self.n_ended
    }

    fn answer(&self) -> Answer {
        if self.good_at.is_some() && self.failing_since.is_none() { Answer::Fresh } else { Answer::Unavailable }
    }
}

impl Refresh {
    /// There is no set yet.
    pub(super) fn awaited(config: RefreshConfig) -> Self {
        Self { config, rounds: watch::Sender::new(Rounds::default()), wanted: Notify::new() }
    }

    /// There is one, read `at` this instant.
    pub(super) fn fetched(config: RefreshConfig, at: Instant) -> Self {
        let rounds = Rounds { good_at: Some(at), ..Rounds::default() };
        Self { rounds: watch::Sender::new(rounds), ..Self::awaited(config) }
    }

    pub(super) async fn ready(&self) {
        let mut rounds = self.rounds.subscribe();
        // The sender is ours, so it is there.
        let _ = rounds.wait_for(|rounds| rounds.good_at.is_some()).await;
    }

    pub(super) fn state(&self) -> KeyState {
        let rounds = *self.rounds.borrow();
        KeyState {
            age: rounds.good_at.map(|at| at.elapsed()),
            failing_for: rounds.failing_since.map(|at| at.elapsed()),
            n_fetches: rounds.n_ended,
            n_failures: rounds.n_failed,
        }
    }

    /// Has the set fetched, unless it just has been, and waits for the end of that fetch; for the
    /// one under way where there is one.
    pub(super) async fn ask(&self, deadline: Instant) -> Answer {
        let mut rounds = self.rounds.subscribe();
        let now = *rounds.borrow();
        if !now.is_under_way() {
            if self.is_cooling(&now) {
                return now.answer();
            }
            self.wanted.notify_one();
        }
        match timeout_at(deadline, rounds.wait_for(|rounds| rounds.n_ended > now.n_ended)).await {
            Ok(Ok(ended)) => ended.answer(),
            _ => Answer::Unavailable,
        }
    }

    fn is_cooling(&self, rounds: &Rounds) -> bool {
        rounds.begun_at.is_some_and(|at| Instant::now() < at + self.config.cool_down)
    }

    fn begin(&self) -> Instant {
        let now = Instant::now();
        self.rounds.send_if_modified(|rounds| {
            rounds.n_begun += 1;
            rounds.begun_at = Some(now);
            // Nobody waits for a beginning.
            false
        });
        now
    }

    fn end(&self, is_good: bool) {
        let now = Instant::now();
        self.rounds.send_modify(|rounds| {
            rounds.n_ended += 1;
            if is_good {
                rounds.good_at = Some(now);
                rounds.failing_since = None;
            } else {
                rounds.n_failed += 1;
                rounds.failing_since.get_or_insert(now);
            }
        });
    }
}

/// A fetch brought nothing.
#[derive(Debug, thiserror::Error)]
enum RoundError {
    #[error(transparent)]
    Fetch(#[from] FetchError),
    #[error(transparent)]
    Keys(#[from] KeyError),
}

/// The one who fetches. Made by `Verifier::refreshed`.
pub struct KeyKeeper {
    verifier: Arc<Verifier>,
    fetcher: Box<dyn KeyFetcher>,
    dice: Dice,
    /// The last good text: the same again is not even parsed.
    seen: Option<[u8; 32]>,
}

impl std::fmt::Debug for KeyKeeper {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("KeyKeeper")
    }
}

impl KeyKeeper {
    pub(super) fn new(verifier: Arc<Verifier>, fetcher: Box<dyn KeyFetcher>, dice: Dice) -> Self {
        Self { verifier, fetcher, dice, seen: None }
    }

    /// Fetches for as long as it is run. Never ends by itself.
    ///
    /// # Cancel safety
    /// Dropped for good, it leaves the last good set in force; who asks for a fetch then waits for
    /// his own deadline.
    pub async fn run(mut self) {
        let verifier = self.verifier.clone();
        let refresh = verifier.refresh.as_ref().expect("a keeper is made together with what it refreshes");
        let mut retry = FIRST_RETRY;
        let mut due = match refresh.rounds.borrow().good_at {
            Some(at) => at + self.period(refresh),
            None => Instant::now(),
        };
        loop {
            Self::wait(refresh, due).await;
            let began = refresh.begin();
            let outcome = self.round(refresh.config.timeout).await;
            let is_good = outcome.is_ok();
            self.report(&refresh.state(), outcome);
            refresh.end(is_good);
            due = self.next(refresh, began, &mut retry);
        }
    }

    /// Until the period is over, or somebody wants a fetch and may have it.
    async fn wait(refresh: &Refresh, due: Instant) {
        loop {
            // Both arms are cancel-safe: a permit that is not taken stays.
            tokio::select! {
                biased;
                () = sleep_until(due) => return,
                () = refresh.wanted.notified() => {
                    // A permit may be left of a round that came in between.
                    let rounds = *refresh.rounds.borrow();
                    if !refresh.is_cooling(&rounds) {
                        return;
                    }
                }
            }
        }
    }

    async fn round(&mut self, within: Duration) -> Result<Replaced, RoundError> {
        let fetched = timeout(within, self.fetcher.fetch()).await;
        let text = fetched.unwrap_or(Err(FetchError::Late { after: within }))?;
        let seen = mark(&text);
        if self.seen == Some(seen) {
            return Ok(Replaced::Same);
        }
        let replaced = self.verifier.replace_keys(&KeySource::Jwks(text))?;
        self.seen = Some(seen);
        Ok(replaced)
    }

    /// One line when it begins to fail, one when it is back, one when the keys are others.
    fn report(&self, before: &KeyState, outcome: Result<Replaced, RoundError>) {
        match outcome {
            Err(why) if before.failing_for.is_none() => {
                let age_s = before.age.map(|age| age.as_secs());
                tracing::warn!(%why, age_s, "the JWT key set cannot be refreshed, the last good one stays in force");
            }
            Err(why) => tracing::debug!(%why, "the JWT key set still cannot be refreshed"),
            Ok(replaced) => {
                if let Some(failed) = before.failing_for {
                    tracing::info!(failed_s = failed.as_secs(), "the JWT key set can be fetched again");
                }
                if replaced == Replaced::Changed {
                    tracing::info!(n_keys = self.verifier.n_keys(), "other JWT keys are in force");
                }
            }
        }
    }

    /// When to fetch unasked. A failure is tried again within three cool-downs; with no set at all
    /// nobody is served, so that is tried in a hurry.
    fn next(&self, refresh: &Refresh, began: Instant, retry: &mut Duration) -> Instant {
        let cool_down = refresh.config.cool_down;
        let rounds = *refresh.rounds.borrow();
        if rounds.good_at.is_none() {
            let due = Instant::now() + self.dice.between(*retry / 2, *retry);
            *retry = (*retry * 2).min(cool_down.max(FIRST_RETRY));
            return due;
        }
        let pause = match rounds.failing_since {
            Some(_) => self.dice.between(cool_down, cool_down * 3),
            None => self.period(refresh).max(cool_down),
        };
        began + pause
    }

    fn period(&self, refresh: &Refresh) -> Duration {
        let every = refresh.config.every;
        self.dice.between(every.mul_f64(0.8), every.mul_f64(1.2))
    }
}
