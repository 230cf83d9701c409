//! The one table of endings: reason, close code, what the client should do next. Nobody else
//! knows a close code.

use std::time::Duration;

/// Why a session ends, and the label of `gateway_sessions_closed_total`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum CloseReason {
    /// This node is leaving.
    Drain,
    /// Maximum age.
    Recycle,
    /// Moved to an emptier node.
    Shed,
    /// Admitted, then no room.
    Overload,
    /// Outbox over its cap, or a write past its deadline.
    Slow,
    /// No sign of life in time: cut without a word.
    Unresponsive,
    /// The token's end.
    TokenExpired,
    /// Per-user limit, newest wins.
    Replaced,
    /// The token was revoked.
    Revoked,
    /// An administrator or a plugin said so.
    Kicked,
    /// A WebSocket protocol error, by RFC 6455.
    BadMessage(Violation),
    /// A message over the limit.
    TooLarge,
    /// Our own fault.
    Internal,
    /// The client closed properly.
    Client,
    /// End of stream or reset without a close.
    Lost,
}

/// Which rule of RFC 6455 (or of ours) a client broke.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Violation {
    /// 1002: framing.
    Protocol,
    /// 1003: binary that nobody wants.
    Unsupported,
    /// 1007: text that is no UTF-8.
    NotUtf8,
    /// 1008: far over the message rate.
    Policy,
}

/// What a client should do after a `bye`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reconnect {
    /// Come back after `after_ms`.
    After,
    /// Come back with a new token.
    Reauth,
    /// Do not come back by yourself.
    Never,
}

impl Reconnect {
    /// The word on the wire.
    pub fn word(self) -> &'static str {
        match self {
            Reconnect::After => "after",
            Reconnect::Reauth => "reauth",
            Reconnect::Never => "never",
        }
    }
}

/// Close codes of the three planned endings, each settable: 1001, 1012 or 1013.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PlannedCodes {
    /// `GATEWAY_CLOSE_CODE_DRAIN`, default 1001: RFC 6455's own word for a server that goes.
    pub drain: u16,
    /// `GATEWAY_CLOSE_CODE_RECYCLE`, default 1012: service restart, come back after a random delay.
    pub recycle: u16,
    /// `GATEWAY_CLOSE_CODE_SHED`, default 1012.
    pub shed: u16,
}

impl Default for PlannedCodes {
    fn default() -> Self {
        Self { drain: 1001, recycle: 1012, shed: 1012 }
    }
}

impl CloseReason {
    /// Every reason, for metrics and for the tables in `docs/`.
    pub const ALL: [CloseReason; 18] = [
        CloseReason::Drain,
        CloseReason::Recycle,
        CloseReason::Shed,
        CloseReason::Overload,
        CloseReason::Slow,
        CloseReason::Unresponsive,
        CloseReason::TokenExpired,
        CloseReason::Replaced,
        CloseReason::Revoked,
        CloseReason::Kicked,
        CloseReason::BadMessage(Violation::Protocol),
        CloseReason::BadMessage(Violation::Unsupported),
        CloseReason::BadMessage(Violation::NotUtf8),
        CloseReason::BadMessage(Violation::Policy),
        CloseReason::TooLarge,
        CloseReason::Internal,
        CloseReason::Client,
        CloseReason::Lost,
    ];

    /// The word on the wire and the metric label.
    pub fn word(self) -> &'static str {
        match self {
            CloseReason::Drain => "drain",
            CloseReason::Recycle => "recycle",
            CloseReason::Shed => "shed",
            CloseReason::Overload => "overload",
            CloseReason::Slow => "slow",
            CloseReason::Unresponsive => "unresponsive",
            CloseReason::TokenExpired => "token_expired",
            CloseReason::Replaced => "replaced",
            CloseReason::Revoked => "revoked",
            CloseReason::Kicked => "kicked",
            CloseReason::BadMessage(_) => "bad_message",
            CloseReason::TooLarge => "too_large",
            CloseReason::Internal => "internal",
            CloseReason::Client => "client",
            CloseReason::Lost => "lost",
        }
    }

    /// The close code that a WebSocket sees; `None` where the socket is cut or was closed by the client.
    pub fn code(self, planned: PlannedCodes) -> Option<u16> {
        Some(match self {
            CloseReason::Drain => planned.drain,
            CloseReason::Recycle => planned.recycle,
            CloseReason::Shed => planned.shed,
            CloseReason::Overload | CloseReason::Slow => 1013,
            CloseReason::TokenExpired => 4401,
            CloseReason::Replaced => 4409,
            CloseReason::Revoked | CloseReason::Kicked => 4403,
            CloseReason::BadMessage(Violation::Protocol) => 1002,
            CloseReason::BadMessage(Violation::Unsupported) => 1003,
            CloseReason::BadMessage(Violation::NotUtf8) => 1007,
            CloseReason::BadMessage(Violation::Policy) => 1008,
            CloseReason::TooLarge => 1009,
            CloseReason::Internal => 1011,
            CloseReason::Unresponsive | CloseReason::Client | CloseReason::Lost => return None,
        })
    }

    /// What the client should do next.
    pub fn reconnect(self) -> Reconnect {
        match self {
            CloseReason::TokenExpired => Reconnect::Reauth,
            CloseReason::Replaced
            | CloseReason::Revoked
            | CloseReason::Kicked
            | CloseReason::BadMessage(_)
            | CloseReason::TooLarge => Reconnect::Never,
            _ => Reconnect::After,
        }
    }

    /// The range from which `after_ms` is drawn, so that no two clients of a crowd come back together.
    /// `first_max` is the configured first-delay bound (`reconnect.first_max_ms` of `hello`).
    pub fn after_range(self, first_max: Duration) -> (Duration, Duration) {
        match self {
            // A moved client finds a waiting node: soon, but spread.
            CloseReason::Drain | CloseReason::Recycle | CloseReason::Shed => (Duration::ZERO, first_max),
            // The reader was too slow or the node too full: leave it a breath.
            CloseReason::Overload | CloseReason::Slow => (Duration::from_secs(1), Duration::from_secs(1) + first_max),
            _ => (Duration::ZERO, first_max),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_reason_has_its_row_of_the_contract() {
        let p = PlannedCodes::default();
        let row = |r: CloseReason| (r.word(), r.code(p), r.reconnect().word());
        assert_eq!(row(CloseReason::Drain), ("drain", Some(1001), "after"));
        assert_eq!(row(CloseReason::Recycle), ("recycle", Some(1012), "after"));
        assert_eq!(row(CloseReason::Shed), ("shed", Some(1012), "after"));
        assert_eq!(row(CloseReason::Overload), ("overload", Some(1013), "after"));
        assert_eq!(row(CloseReason::Slow), ("slow", Some(1013), "after"));
        assert_eq!(row(CloseReason::Unresponsive), ("unresponsive", None, "after"));
        assert_eq!(row(CloseReason::TokenExpired), ("token_expired", Some(4401), "reauth"));
        assert_eq!(row(CloseReason::Replaced), ("replaced", Some(4409), "never"));
        assert_eq!(row(CloseReason::Revoked), ("revoked", Some(4403), "never"));
        assert_eq!(row(CloseReason::Kicked), ("kicked", Some(4403), "never"));
        assert_eq!(row(CloseReason::TooLarge), ("too_large", Some(1009), "never"));
        assert_eq!(row(CloseReason::Internal), ("internal", Some(1011), "after"));
    }
}
