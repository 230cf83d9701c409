//! Who a client is and until when: identity from a token. Decides whether a token is good now;
//! whether it was revoked is `revocation`'s, what it may hear is `channel::Grants`, where the
//! token is found in a request is the edge's.
//!
//! `keys` says which signatures count, `claims` what a signed token means, `cache` what need not
//! be asked twice, `names` which texts identities share, `refresh` when a key set is fetched again,
//! `mint` makes tokens for the command line and for tests.

mod cache;
mod claims;
mod keys;
mod mint;
mod names;
mod refresh;
#[cfg(test)]
mod tests;

use std::sync::Arc;
use std::time::Duration;

use arc_swap::ArcSwap;
use aws_lc_rs::digest;
pub use jsonwebtoken::Algorithm;
use tokio::time::Instant;

use crate::channel::{Grants, Pattern};
use crate::clock::{Clock, Dice};
use crate::refusal::RefusalCode;

pub use keys::{KeyError, KeySource, MIN_SECRET_BYTES, Secret};
pub use mint::{MintError, mint, mint_with_kid, mint_with_pem, mint_with_secret};
pub use refresh::{FetchError, KeyFetcher, KeyKeeper, KeyState, RefreshConfig};

use cache::{Cache, Mark};
use claims::Claims;
use keys::{KeySet, NO_KEY_FITS, Unsigned};
use names::Names;
use refresh::{Answer, Refresh};

/// Longest token that is looked at, in bytes. Far above any real one (a request head holds less),
/// and a bound on what one attempt may cost in hashing.
pub const MAX_TOKEN_BYTES: usize = 32 * 1024;

/// Longest `sub`, `jti` or `sid` in bytes (contract).
pub const MAX_ID_BYTES: usize = 256;

/// Somebody who was authenticated (or is anonymous), as a session carries it.
#[derive(Clone, Debug)]
pub struct Identity {
    /// `sub`; `None` for an anonymous session.
    pub user: Option<Arc<str>>,
    /// `jti`, for revocation.
    pub jti: Option<Arc<str>>,
    /// `sid`, for revocation.
    pub sid: Option<Arc<str>>,
    /// `iat` in whole Unix seconds (rounded down), 0 where the token has none.
    pub issued_at: u64,
    /// When it ends, as time since 1970: `exp` plus the leeway in force (none by default), so that
    /// what was accepted within the leeway is not ended at once. `None` for an anonymous session.
    pub expires_at: Option<Duration>,
    /// What it may hear.
    pub grants: Grants,
}

/// Whether a token's `sub` also joins the channel `user:<sub>` (`GATEWAY_USER_CHANNEL`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum UserChannel {
    /// It does.
    On,
    /// It does not.
    Off,
}

/// What `Verifier` is built from.
#[derive(Clone, Debug)]
pub struct AuthConfig {
    /// Whose signatures count.
    pub keys: KeySource,
    /// The algorithms that count; `None`: all that fit the key.
    pub algorithms: Option<Vec<Algorithm>>,
    /// `iss` must be one of these, and be there. `None`: not looked at.
    pub issuer: Option<Vec<String>>,
    /// `aud` must be, or list, one of these, and be there. `None`: not looked at.
    pub audience: Option<Vec<String>>,
    /// How much a clock may differ: added to `exp`, taken from `nbf`. Default 0.
    pub leeway: Duration,
    /// Whether `sub` joins `user:<sub>`.
    pub user_channel: UserChannel,
    /// At most so many channels joined by the token, `user:<sub>` counted.
    pub max_channels: usize,
    /// What somebody without a token may hear; `None`: nobody comes in without one.
    pub anonymous: Option<Vec<Pattern>>,
}

/// Why a token does not let its bearer in. An ordinary outcome; holds nothing of the token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Denied {
    /// Never will: malformed, signed by somebody else, or meant for another. The text says which.
    Invalid(&'static str),
    /// No key of the set that could be fetched has signed it, and a newer set may have the key.
    /// Final where `authenticate` says so: the set was fetched again, or just has been.
    UnknownKey,
    /// As `UnknownKey`, but the set cannot be fetched now, or not in time: nobody can say whether
    /// the token is good, and it may well be.
    KeysUnavailable,
    /// Was good until `exp`.
    Expired,
    /// Will be good from `nbf`.
    NotYet,
    /// Joins more channels than a session may hold.
    TooManyChannels,
}

impl Denied {
    /// The word for the client.
    pub fn code(&self) -> RefusalCode {
        match self {
            Denied::Invalid(_) | Denied::UnknownKey | Denied::NotYet => RefusalCode::TokenInvalid,
            Denied::KeysUnavailable => RefusalCode::AuthUnavailable,
            Denied::Expired => RefusalCode::TokenExpired,
            Denied::TooManyChannels => RefusalCode::TooManyChannels,
        }
    }

    /// One sentence for a person.
    pub fn detail(&self) -> &'static str {
        match self {
            Denied::Invalid(why) => why,
            Denied::UnknownKey => NO_KEY_FITS,
            Denied::KeysUnavailable => "the keys of tokens cannot be fetched now",
            Denied::Expired => "the token has expired",
            Denied::NotYet => "the token is not valid yet",
            Denied::TooManyChannels => "the token joins more channels than a session may hold",
        }
    }
}

/// Makes aws-lc the crypto library of all token code in this process. `Verifier::new` and the
/// minting functions call it; calling it again is harmless.
pub fn install_crypto() {
    // The only error is that a provider is installed already.
    let _ = jsonwebtoken::crypto::aws_lc::DEFAULT_PROVIDER.install_default();
}

/// A token that was found good, with what time must still be asked about.
#[derive(Clone, Debug)]
struct Verified {
    identity: Arc<Identity>,
    /// `nbf` less the leeway.
    not_before: Duration,
}

impl Verified {
    fn check_time(&self, now: Duration) -> Result<(), Denied> {
        if self.identity.expires_at.is_some_and(|end| now >= end) {
            return Err(Denied::Expired);
        }
        if now < self.not_before {
            return Err(Denied::NotYet);
        }
        Ok(())
    }
}

/// A key set together with what was verified by it: replacing the keys forgets both at once, and
/// a check that is under way with the old keys can only write into the old cache.
#[derive(Debug)]
struct InForce {
    keys: KeySet,
    cache: Cache,
    /// One more with every replacement.
    generation: u64,
}

impl InForce {
    fn new(keys: KeySet, generation: u64) -> Arc<Self> {
        Arc::new(Self { keys, cache: Cache::new(cache::CAPACITY, cache::CAPACITY_BYTES), generation })
    }
}

/// What became of a set that was to be put in force.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Replaced {
    /// It is.
    Changed,
    /// It is the one in force: nothing was done, and what was verified stays so.
    Same,
}

/// Tells good tokens from others. Shared by all; only `authenticate` and `ready` may wait.
#[derive(Debug)]
pub struct Verifier {
    config: AuthConfig,
    in_force: ArcSwap<InForce>,
    names: Names,
    anonymous: Option<Arc<Identity>>,
    /// `None` where the keys never change.
    refresh: Option<Refresh>,
}

impl Verifier {
    /// With keys that stay as they are.
    ///
    /// # Errors
    /// `KeyError`: the operator must mend the configuration; the process must not start.
    pub fn new(config: AuthConfig) -> Result<Self, KeyError> {
        if matches!(config.keys, KeySource::Awaited) {
            return Err(KeyError::NoUsableKey);
        }
        Self::assemble(config, None)
    }

    /// With a key set that is fetched again and again: at once where `config.keys` is `Awaited`,
    /// else (a `Jwks` read already) from the first period on. Somebody must run the keeper.
    ///
    /// # Errors
    /// As `new`. A set that cannot be fetched is none: `ready` waits for it.
    pub fn refreshed(
        config: AuthConfig,
        refresh: RefreshConfig,
        fetcher: Box<dyn KeyFetcher>,
        dice: Dice,
    ) -> Result<(Arc<Self>, KeyKeeper), KeyError> {
        let refresh = match config.keys {
            KeySource::Awaited => Refresh::awaited(refresh),
            _ => Refresh::fetched(refresh, Instant::now()),
        };
        let verifier = Arc::new(Self::assemble(config, Some(refresh))?);
        Ok((verifier.clone(), KeyKeeper::new(verifier, fetcher, dice)))
    }

    fn assemble(config: AuthConfig, refresh: Option<Refresh>) -> Result<Self, KeyError> {
        install_crypto();
        let keys = KeySet::parse(&config.keys, config.algorithms.as_deref())?;
        let anonymous = config.anonymous.as_deref().map(nobody).map(Arc::new);
        if let Some(who) = &anonymous
            && who.grants.joined.len() > config.max_channels
        {
            return Err(KeyError::TooManyAnonymousChannels {
                n_channels: who.grants.joined.len(),
                max: config.max_channels,
            });
        }
        let names = Names::new(names::CAPACITY);
        Ok(Self { in_force: ArcSwap::new(InForce::new(keys, 0)), names, config, anonymous, refresh })
    }

    /// Waits until there is a key set; at once where there always is one. Until then no token is
    /// good, so nobody should be served.
    ///
    /// # Cancel safety
    /// Safe.
    pub async fn ready(&self) {
        if let Some(refresh) = &self.refresh {
            refresh.ready().await;
        }
    }

    /// How the fetching of the key set goes; `None` where the keys never change.
    pub fn key_state(&self) -> Option<KeyState> {
        self.refresh.as_ref().map(Refresh::state)
    }

    /// Who the bearer of `token` is, by the keys in force or, where none of them has signed it, by
    /// those that the issuer has now: it then waits for a fetch, the one under way or a new one, at
    /// most until `deadline`. Where the keys are known it waits for nothing.
    ///
    /// # Errors
    /// `Denied`. `UnknownKey` is final: the set was fetched and does not have the key, or was
    /// fetched so short a time ago that it is not asked for again (`RefreshConfig::cool_down`).
    /// `KeysUnavailable` is not: the set cannot be fetched, tell the client to come again.
    ///
    /// # Cancel safety
    /// Safe: the fetch is the keeper's and goes on.
    pub async fn authenticate(&self, token: &str, clock: &Clock, deadline: Instant) -> Result<Arc<Identity>, Denied> {
        let generation = {
            let in_force = self.in_force.load();
            match self.verify_by(&in_force, token, clock.unix()) {
                Err(Denied::UnknownKey) => in_force.generation,
                said => return said,
            }
        };
        let answer = match &self.refresh {
            Some(refresh) => refresh.ask(deadline).await,
            None => Answer::Fresh,
        };
        // It may have been replaced while we waited, or between our look and our question.
        let in_force = self.in_force.load();
        if in_force.generation != generation {
            match self.verify_by(&in_force, token, clock.unix()) {
                Err(Denied::UnknownKey) => {}
                said => return said,
            }
        }
        Err(match answer {
            Answer::Fresh => Denied::UnknownKey,
            Answer::Unavailable => Denied::KeysUnavailable,
        })
    }

    /// Who the bearer of `token` is, if it is good at `now` (time since 1970) by the keys in force.
    /// Costs a signature check (30 to 130 µs) the first time, a hash and a look-up after that.
    ///
    /// # Errors
    /// `Denied`: tell the client, there is nothing to retry with this token (but `NotYet`). After
    /// `UnknownKey`, which only a set that is refreshed gives, ask `authenticate`.
    pub fn verify(&self, token: &str, now: Duration) -> Result<Arc<Identity>, Denied> {
        self.verify_by(&self.in_force.load(), token, now)
    }

    fn verify_by(&self, in_force: &InForce, token: &str, now: Duration) -> Result<Arc<Identity>, Denied> {
        if token.len() > MAX_TOKEN_BYTES {
            return Err(Denied::Invalid("the token is too long"));
        }
        let mark = Mark::of(token);
        if let Some(known) = in_force.cache.get(&mark) {
            known.check_time(now).inspect_err(|denied| {
                if *denied == Denied::Expired {
                    in_force.cache.remove(&mark);
                }
            })?;
            return Ok(known.identity);
        }
        let payload = match in_force.keys.payload(token) {
            Ok(payload) => payload,
            Err(Unsigned::Ever(why)) => return Err(Denied::Invalid(why)),
            Err(Unsigned::ByThese(_)) if self.refresh.is_none() => return Err(Denied::Invalid(NO_KEY_FITS)),
            Err(Unsigned::ByThese(payload)) => {
                // What no key could make good is no reason to fetch any.
                self.read(&payload)?.check_time(now)?;
                return Err(Denied::UnknownKey);
            }
        };
        let mut verified = self.read(&payload)?;
        verified.check_time(now)?;
        let fresh = Arc::get_mut(&mut verified.identity).expect("nobody else has seen it yet");
        if fresh.grants.joined.len() > self.config.max_channels {
            return Err(Denied::TooManyChannels);
        }
        self.names.share(&mut fresh.grants);
        let identity = verified.identity.clone();
        in_force.cache.put(mark, verified, token.len());
        Ok(identity)
    }

    fn read(&self, payload: &[u8]) -> Result<Verified, Denied> {
        Claims::parse(payload)?.verified(&self.config)
    }

    /// Forgets verified tokens that nobody uses any more, and names that nobody carries; to be called
    /// once a second or so.
    pub fn age(&self) {
        let now = Instant::now();
        self.in_force.load().cache.age(now);
        self.names.age(now);
    }

    /// Who somebody without a token is, where anonymous sessions are configured: exact names are
    /// joined at once, prefixes may be asked for.
    pub fn anonymous(&self) -> Option<Arc<Identity>> {
        self.anonymous.clone()
    }

    /// Puts other keys in force, for tokens checked from now on; only the keeper does. Everything
    /// verified by the old ones is forgotten, unless the new ones are the same. On an error the old
    /// keys stay.
    ///
    /// # Errors
    /// `KeyError`: the new keys are unusable.
    fn replace_keys(&self, keys: &KeySource) -> Result<Replaced, KeyError> {
        let keys = KeySet::parse(keys, self.config.algorithms.as_deref())?;
        let before = self.in_force.load();
        if keys.is_same(&before.keys) {
            return Ok(Replaced::Same);
        }
        self.in_force.store(InForce::new(keys, before.generation + 1));
        Ok(Replaced::Changed)
    }

    fn n_keys(&self) -> usize {
        self.in_force.load().keys.n_keys()
    }
}

fn nobody(may_hear: &[Pattern]) -> Identity {
    let mut grants = Grants::default();
    for pattern in may_hear {
        match pattern {
            Pattern::Exact(channel) if grants.joined.contains(channel) => {}
            Pattern::Exact(channel) => grants.joined.push(channel.clone()),
            Pattern::Prefix(_) => grants.askable.push(pattern.clone()),
        }
    }
    Identity { user: None, jti: None, sid: None, issued_at: 0, expires_at: None, grants }
}

fn mark(text: &str) -> [u8; 32] {
    digest::digest(&digest::SHA256, text.as_bytes()).as_ref().try_into().expect("a SHA-256 has 32 bytes")
}
