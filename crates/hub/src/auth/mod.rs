//! Who a client is and until when: identity from a token. Decides whether a token is good now;
//! whether it was revoked is `revocation`'s, what it may hear is `channel::Grants`, where the
//! token is found in a request is the edge's.
//!
//! `keys` says which signatures count, `claims` what a signed token means, `cache` what need not
//! be asked twice, `mint` makes tokens for the command line and for tests.

mod cache;
mod claims;
mod keys;
mod mint;
#[cfg(test)]
mod tests;

use std::sync::Arc;
use std::time::Duration;

use arc_swap::ArcSwap;
use aws_lc_rs::digest;
pub use jsonwebtoken::Algorithm;

use crate::channel::{Grants, Pattern};
use crate::refusal::RefusalCode;

pub use keys::{KeyError, KeySource, MIN_SECRET_BYTES, Secret};
pub use mint::{MintError, mint, mint_with_kid, mint_with_pem, mint_with_secret};

use cache::Cache;
use claims::Claims;
use keys::KeySet;

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
            Denied::Invalid(_) | Denied::NotYet => RefusalCode::TokenInvalid,
            Denied::Expired => RefusalCode::TokenExpired,
            Denied::TooManyChannels => RefusalCode::TooManyChannels,
        }
    }

    /// One sentence for a person.
    pub fn detail(&self) -> &'static str {
        match self {
            Denied::Invalid(why) => why,
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
    fn at(&self, now: Duration) -> Result<Arc<Identity>, Denied> {
        if self.identity.expires_at.is_some_and(|end| now >= end) {
            return Err(Denied::Expired);
        }
        if now < self.not_before {
            return Err(Denied::NotYet);
        }
        Ok(self.identity.clone())
    }
}

/// A key set together with what was verified by it: replacing the keys forgets both at once, and
/// a check that is under way with the old keys can only write into the old cache.
#[derive(Debug)]
struct InForce {
    keys: KeySet,
    cache: Cache,
}

impl InForce {
    fn new(keys: KeySet) -> Arc<Self> {
        Arc::new(Self { keys, cache: Cache::new(cache::CAPACITY, cache::CAPACITY_BYTES) })
    }
}

/// Tells good tokens from others. Shared by all; its calls do not wait.
#[derive(Debug)]
pub struct Verifier {
    config: AuthConfig,
    in_force: ArcSwap<InForce>,
    anonymous: Option<Arc<Identity>>,
}

impl Verifier {
    /// # Errors
    /// `KeyError`: the operator must mend the configuration; the process must not start.
    pub fn new(config: AuthConfig) -> Result<Self, KeyError> {
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
        Ok(Self { in_force: ArcSwap::new(InForce::new(keys)), config, anonymous })
    }

    /// Who the bearer of `token` is, if it is good at `now` (time since 1970). Costs a signature
    /// check (30 to 130 µs) the first time, a hash and a look-up after that.
    ///
    /// # Errors
    /// `Denied`: tell the client, there is nothing to retry with this token (but `NotYet`).
    pub fn verify(&self, token: &str, now: Duration) -> Result<Arc<Identity>, Denied> {
        if token.len() > MAX_TOKEN_BYTES {
            return Err(Denied::Invalid("the token is too long"));
        }
        let in_force = self.in_force.load();
        let mark = mark(token);
        if let Some(known) = in_force.cache.get(&mark) {
            return known.at(now).inspect_err(|denied| {
                if *denied == Denied::Expired {
                    in_force.cache.remove(&mark);
                }
            });
        }
        let payload = in_force.keys.payload(token).map_err(Denied::Invalid)?;
        let verified = Claims::parse(&payload)?.verified(&self.config)?;
        let identity = verified.at(now)?;
        if identity.grants.joined.len() > self.config.max_channels {
            return Err(Denied::TooManyChannels);
        }
        in_force.cache.put(mark, verified, token.len());
        Ok(identity)
    }

    /// Who somebody without a token is, where anonymous sessions are configured: exact names are
    /// joined at once, prefixes may be asked for.
    pub fn anonymous(&self) -> Option<Arc<Identity>> {
        self.anonymous.clone()
    }

    /// Puts other keys in force, for tokens checked from now on. Everything verified by the old
    /// ones is forgotten. On an error the old keys stay.
    ///
    /// # Errors
    /// `KeyError`: the new keys are unusable.
    pub fn replace_keys(&self, keys: &KeySource) -> Result<(), KeyError> {
        let keys = KeySet::parse(keys, self.config.algorithms.as_deref())?;
        self.in_force.store(InForce::new(keys));
        Ok(())
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

fn mark(token: &str) -> [u8; 32] {
    digest::digest(&digest::SHA256, token.as_bytes()).as_ref().try_into().expect("a SHA-256 has 32 bytes")
}
