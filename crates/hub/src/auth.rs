//! Who a client is and until when: identity from a token. Decides whether a token is good; whether
//! it was revoked is `revocation`'s, what it may hear is `channel::Grants`.

use std::sync::Arc;
use std::time::Duration;

use crate::channel::Grants;

/// Somebody who was authenticated (or is anonymous), as a session carries it.
#[derive(Clone, Debug)]
pub struct Identity {
    /// `sub`; `None` for an anonymous session.
    pub user: Option<Arc<str>>,
    /// `jti`, for revocation.
    pub jti: Option<Arc<str>>,
    /// `sid`, for revocation.
    pub sid: Option<Arc<str>>,
    /// `iat` in Unix seconds, 0 where the token has none.
    pub issued_at: u64,
    /// `exp` as time since 1970; `None` for an anonymous session.
    pub expires_at: Option<Duration>,
    /// What it may hear.
    pub grants: Grants,
}
