//! What a signed token means. Decides which claims must be there, in which JSON type, and what
//! they grant; knows no signature and reads no clock (it is told the leeway, and says when).

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

use serde::{Deserialize, Deserializer};

use super::{AuthConfig, Denied, Identity, MAX_ID_BYTES, UserChannel, Verified};
use crate::channel::{Channel, Grants, Pattern};

/// The end of the year 9999: later times are taken as this, so that no sum with them overflows.
const LAST_SECOND: u64 = 253_402_300_799;

/// The claims that mean something to us. A `null` is an absent claim, but for the times.
#[derive(Deserialize)]
pub(super) struct Claims {
    sub: String,
    exp: Seconds,
    #[serde(default, deserialize_with = "time")]
    nbf: Option<Seconds>,
    #[serde(default, deserialize_with = "time")]
    iat: Option<Seconds>,
    #[serde(default)]
    jti: Option<String>,
    #[serde(default)]
    sid: Option<String>,
    #[serde(default)]
    iss: Option<serde_json::Value>,
    #[serde(default)]
    aud: Option<serde_json::Value>,
    #[serde(default)]
    channels: Option<Vec<String>>,
    #[serde(default)]
    subscribe: Option<Vec<String>>,
}

/// A NumericDate (RFC 7519 §2): seconds since 1970, possibly with a fraction.
struct Seconds(Duration);

impl<'de> Deserialize<'de> for Seconds {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let number = serde_json::Number::deserialize(deserializer)?;
        let duration = match (number.as_u64(), number.as_f64()) {
            (Some(whole), _) => Duration::from_secs(whole.min(LAST_SECOND)),
            (None, Some(float)) => Duration::from_secs_f64(float.clamp(0.0, LAST_SECOND as f64)),
            (None, None) => return Err(serde::de::Error::custom("no number of seconds")),
        };
        Ok(Self(duration))
    }
}

/// `null` is of the wrong type for a time that is there.
fn time<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<Seconds>, D::Error> {
    Seconds::deserialize(deserializer).map(Some)
}

impl Claims {
    /// # Errors
    /// `Denied::Invalid`: no JSON object, a claim missing or of the wrong JSON type.
    pub(super) fn parse(payload: &[u8]) -> Result<Self, Denied> {
        let claims: Self = serde_json::from_slice(payload).map_err(|error| {
            Denied::Invalid(match error.classify() {
                serde_json::error::Category::Data => {
                    "a claim is missing (sub, exp), given twice, or of the wrong JSON type"
                }
                _ => "the token's payload is no JSON object",
            })
        })?;
        if claims.sub.is_empty() {
            return Err(Denied::Invalid("sub is empty"));
        }
        for id in [Some(&claims.sub), claims.jti.as_ref(), claims.sid.as_ref()].into_iter().flatten() {
            if id.len() > MAX_ID_BYTES {
                return Err(Denied::Invalid("sub, jti and sid have at most 256 bytes"));
            }
        }
        Ok(claims)
    }

    /// Who these claims are about, under the rules in force; whether it is time is not asked here.
    ///
    /// # Errors
    /// `Denied::Invalid`: for somebody else, or a name that is no channel's.
    pub(super) fn verified(self, rules: &AuthConfig) -> Result<Verified, Denied> {
        if !is_from(self.iss.as_ref(), rules.issuer.as_deref()) {
            return Err(Denied::Invalid("the token is of another issuer (iss)"));
        }
        if !is_for(self.aud.as_ref(), rules.audience.as_deref()) {
            return Err(Denied::Invalid("the token is for another audience (aud)"));
        }
        let identity = Identity {
            grants: self.grants(rules.user_channel)?,
            user: Some(self.sub.into()),
            jti: id(self.jti),
            sid: id(self.sid),
            issued_at: self.iat.map_or(0, |iat| iat.0.as_secs()),
            expires_at: Some(self.exp.0.saturating_add(rules.leeway)),
        };
        let not_before = self.nbf.map_or(Duration::ZERO, |nbf| nbf.0.saturating_sub(rules.leeway));
        Ok(Verified { identity: Arc::new(identity), not_before })
    }

    fn grants(&self, user_channel: UserChannel) -> Result<Grants, Denied> {
        let mut grants = Grants::default();
        // With room for the user's own.
        grants.joined.reserve_exact(1 + self.channels.as_ref().map_or(0, Vec::len));
        let mut seen = HashSet::new();
        if user_channel == UserChannel::On {
            let own = Channel::of_user(&self.sub)
                .map_err(|_| Denied::Invalid("the channel of this sub would have over 200 bytes"))?;
            seen.insert(own.clone());
            grants.joined.push(own);
        }
        for name in self.channels.iter().flatten() {
            let channel = Channel::new(name).map_err(|_| Denied::Invalid("channels has a bad channel name"))?;
            if seen.insert(channel.clone()) {
                grants.joined.push(channel);
            }
        }
        grants.askable = self
            .subscribe
            .iter()
            .flatten()
            .map(|text| Pattern::new(text))
            .collect::<Result<_, _>>()
            .map_err(|_| Denied::Invalid("subscribe has a bad channel name or prefix"))?;
        // They stay as long as the session.
        grants.joined.shrink_to_fit();
        grants.askable.shrink_to_fit();
        Ok(grants)
    }
}

/// An empty id names nothing that could be revoked.
fn id(text: Option<String>) -> Option<Arc<str>> {
    text.filter(|text| !text.is_empty()).map(Arc::from)
}

fn is_from(iss: Option<&serde_json::Value>, wanted: Option<&[String]>) -> bool {
    let Some(wanted) = wanted else { return true };
    iss.and_then(|iss| iss.as_str()).is_some_and(|iss| wanted.iter().any(|w| w == iss))
}

fn is_for(aud: Option<&serde_json::Value>, wanted: Option<&[String]>) -> bool {
    let Some(wanted) = wanted else { return true };
    let is_ours = |aud: &serde_json::Value| aud.as_str().is_some_and(|aud| wanted.iter().any(|w| w == aud));
    match aud {
        Some(serde_json::Value::Array(list)) => list.iter().any(is_ours),
        Some(one) => is_ours(one),
        None => false,
    }
}
