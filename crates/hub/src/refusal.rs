//! Why a newcomer is not admitted. A value, not an error: refusals are ordinary in a storm.
//! `edge::reject` alone turns one into an HTTP status.

use std::time::Duration;

/// The `code` of a problem+json answer and the label of `gateway_refused_total`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[allow(missing_docs)]
pub enum RefusalCode {
    BadRequest,
    TokenMissing,
    TokenInvalid,
    TokenExpired,
    TokenRevoked,
    OriginForbidden,
    Forbidden,
    TooManyChannels,
    NotFound,
    MethodNotAllowed,
    NotAcceptable,
    PayloadTooLarge,
    HeadTooLarge,
    HeadTimeout,
    UpgradeRequired,
    TooManyRequests,
    Overloaded,
    AtCapacity,
    Draining,
    AuthUnavailable,
    Unavailable,
    UnsupportedMediaType,
    Internal,
}

impl RefusalCode {
    /// Was it decided without waiting for anybody: the limits, the request itself, the signature?
    pub fn is_immediate(self) -> bool {
        // What only Redis, a plugin or the client's own slowness can bring about.
        !matches!(
            self,
            RefusalCode::TokenRevoked
                | RefusalCode::AuthUnavailable
                | RefusalCode::Unavailable
                | RefusalCode::Forbidden
                | RefusalCode::HeadTimeout
                | RefusalCode::Internal
        )
    }

    /// Every code.
    pub const ALL: [RefusalCode; 23] = [
        RefusalCode::BadRequest,
        RefusalCode::TokenMissing,
        RefusalCode::TokenInvalid,
        RefusalCode::TokenExpired,
        RefusalCode::TokenRevoked,
        RefusalCode::OriginForbidden,
        RefusalCode::Forbidden,
        RefusalCode::TooManyChannels,
        RefusalCode::NotFound,
        RefusalCode::MethodNotAllowed,
        RefusalCode::NotAcceptable,
        RefusalCode::PayloadTooLarge,
        RefusalCode::HeadTooLarge,
        RefusalCode::HeadTimeout,
        RefusalCode::UpgradeRequired,
        RefusalCode::TooManyRequests,
        RefusalCode::Overloaded,
        RefusalCode::AtCapacity,
        RefusalCode::Draining,
        RefusalCode::AuthUnavailable,
        RefusalCode::Unavailable,
        RefusalCode::UnsupportedMediaType,
        RefusalCode::Internal,
    ];

    /// The word on the wire and the metric label.
    pub fn word(self) -> &'static str {
        match self {
            RefusalCode::BadRequest => "bad_request",
            RefusalCode::TokenMissing => "token_missing",
            RefusalCode::TokenInvalid => "token_invalid",
            RefusalCode::TokenExpired => "token_expired",
            RefusalCode::TokenRevoked => "token_revoked",
            RefusalCode::OriginForbidden => "origin_forbidden",
            RefusalCode::Forbidden => "forbidden",
            RefusalCode::TooManyChannels => "too_many_channels",
            RefusalCode::NotFound => "not_found",
            RefusalCode::MethodNotAllowed => "method_not_allowed",
            RefusalCode::NotAcceptable => "not_acceptable",
            RefusalCode::PayloadTooLarge => "payload_too_large",
            RefusalCode::HeadTooLarge => "head_too_large",
            RefusalCode::HeadTimeout => "head_timeout",
            RefusalCode::UpgradeRequired => "upgrade_required",
            RefusalCode::TooManyRequests => "too_many_requests",
            RefusalCode::Overloaded => "overloaded",
            RefusalCode::AtCapacity => "at_capacity",
            RefusalCode::Draining => "draining",
            RefusalCode::AuthUnavailable => "auth_unavailable",
            RefusalCode::Unavailable => "unavailable",
            RefusalCode::UnsupportedMediaType => "unsupported_media_type",
            RefusalCode::Internal => "internal",
        }
    }
}

/// A refusal with its sentence for whoever reads it, and when to try again.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refusal {
    /// The machine's word.
    pub code: RefusalCode,
    /// One sentence for a person. Never holds anything the client sent that could be secret.
    pub detail: String,
    /// Drawn so that the refused crowd comes back spread; `None` where a retry makes no sense.
    pub retry_after: Option<Duration>,
}

impl Refusal {
    /// A refusal for good.
    pub fn new(code: RefusalCode, detail: impl Into<String>) -> Self {
        Self { code, detail: detail.into(), retry_after: None }
    }

    /// A refusal for now.
    pub fn retry(code: RefusalCode, detail: impl Into<String>, after: Duration) -> Self {
        Self { code, detail: detail.into(), retry_after: Some(after) }
    }
}
