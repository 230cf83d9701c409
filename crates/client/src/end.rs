//! How connections and clients end. Decides, from what was seen, whether coming back makes sense.

use std::time::Duration;

use crate::message::{Bye, Reconnect};

/// Why there is no connection.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Loss {
    /// The server said so.
    #[error("the server ended the session: {reason}")]
    Bye {
        /// Its word for it.
        reason: String,
    },
    /// The connection was closed with a WebSocket close code, and no word before it.
    #[error("closed with code {code}")]
    Closed {
        /// The close code; 1005 where the close frame had none.
        code: u16,
    },
    /// End of stream without a word.
    #[error("the connection was cut")]
    Cut,
    /// Not a byte for longer than the server promised.
    #[error("the server gave no sign of life")]
    Silent,
    /// The network or the peer broke the connection or never made one.
    #[error("{0}")]
    Broken(String),
    /// The server answered the attempt with a refusal.
    #[error("refused: {status} {code}")]
    Refused {
        /// The HTTP status.
        status: u16,
        /// The problem's code; empty where the answer was no problem document.
        code: String,
    },
    /// The program's token source failed.
    #[error("no token: {0}")]
    NoToken(String),
}

/// Why a client ended for good. It does not come back by itself.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum End {
    /// The program closed it.
    #[error("closed by the program")]
    Closed,
    /// The server does not want this client back: `revoked`, `kicked`, `replaced`, `bad_message`, …
    #[error("the server ended the session for good: {reason}")]
    Never {
        /// The server's word for it; the close code's digits where there was no word.
        reason: String,
    },
    /// The token is at its end and there is no source to take a new one from.
    #[error("the token is not accepted any more: {reason}")]
    TokenEnded {
        /// The server's word for it.
        reason: String,
    },
    /// The server refused the attempt in a way that trying again cannot change.
    #[error("refused: {status} {code}: {detail}")]
    Refused {
        /// The HTTP status.
        status: u16,
        /// The problem's code; empty where the answer was no problem document.
        code: String,
        /// A sentence for people.
        detail: String,
    },
}

/// What an ended connection or a failed attempt means for the next one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Aftermath {
    pub(crate) why: Loss,
    pub(crate) next: Next,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Next {
    /// Try again, not before the hint.
    Again(Option<Duration>),
    /// Try again with a new token, not before the hint.
    NewToken(Option<Duration>),
    /// Never by itself.
    Stop(End),
}

impl Aftermath {
    pub(crate) fn of_bye(bye: &Bye) -> Aftermath {
        let reason = bye.reason.clone();
        let hint = bye.after_ms.map(Duration::from_millis);
        let next = match bye.reconnect {
            Reconnect::Never => Next::Stop(End::Never { reason: reason.clone() }),
            Reconnect::Reauth => Next::NewToken(hint),
            Reconnect::After | Reconnect::Unknown => Next::Again(hint),
        };
        Aftermath { why: Loss::Bye { reason }, next }
    }

    /// A refusal for good that the channels in the request's query may have brought about: what
    /// they ask for, or how long they make its head.
    pub(crate) fn may_be_for_its_channels(&self) -> bool {
        match &self.why {
            Loss::Refused { status: 403, code } => matches!(&**code, "forbidden" | "too_many_channels"),
            Loss::Refused { status, .. } => matches!(status, 414 | 431),
            _ => false,
        }
    }

    /// A close frame without a `bye`: the private codes and those that say we broke a rule are
    /// final, all others are worth another attempt.
    pub(crate) fn of_close(code: u16) -> Aftermath {
        let next = match code {
            4401 => Next::NewToken(None),
            4403 | 4409 | 1002 | 1003 | 1007 | 1008 | 1009 => Next::Stop(End::Never { reason: code.to_string() }),
            _ => Next::Again(None),
        };
        Aftermath { why: Loss::Closed { code }, next }
    }

    pub(crate) fn of_refusal(status: u16, code: String, detail: String, hint: Option<Duration>) -> Aftermath {
        let next = match status {
            401 => Next::NewToken(hint),
            408 | 425 | 429 | 500.. => Next::Again(hint),
            _ => Next::Stop(End::Refused { status, code: code.clone(), detail }),
        };
        Aftermath { why: Loss::Refused { status, code }, next }
    }

    pub(crate) fn again(why: Loss) -> Aftermath {
        Aftermath { why, next: Next::Again(None) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bye(reconnect: Reconnect) -> Next {
        let bye = Bye { reason: "x".into(), code: None, reconnect, after_ms: Some(7), id: None };
        Aftermath::of_bye(&bye).next
    }

    #[test]
    fn a_bye_is_obeyed() {
        let hint = Some(Duration::from_millis(7));
        assert_eq!(bye(Reconnect::After), Next::Again(hint));
        assert_eq!(bye(Reconnect::Reauth), Next::NewToken(hint));
        assert_eq!(bye(Reconnect::Never), Next::Stop(End::Never { reason: "x".into() }));
        assert_eq!(bye(Reconnect::Unknown), Next::Again(hint));
    }

    #[test]
    fn a_close_code_without_a_word_is_understood() {
        for code in [1000, 1001, 1005, 1006, 1011, 1012, 1013, 4000] {
            assert_eq!(Aftermath::of_close(code).next, Next::Again(None), "{code}");
        }
        for code in [1002, 1003, 1007, 1008, 1009, 4403, 4409] {
            assert!(matches!(Aftermath::of_close(code).next, Next::Stop(End::Never { .. })), "{code}");
        }
        assert_eq!(Aftermath::of_close(4401).next, Next::NewToken(None));
    }

    #[test]
    fn a_refusal_may_be_for_the_channels_only_where_it_can_be() {
        let may = |status, code: &str| {
            Aftermath::of_refusal(status, code.into(), String::new(), None).may_be_for_its_channels()
        };
        for (status, code) in [(403, "forbidden"), (403, "too_many_channels"), (414, ""), (431, "")] {
            assert!(may(status, code), "{status} {code}");
        }
        for (status, code) in [(403, "origin_forbidden"), (403, ""), (401, "token_expired"), (400, "bad_request")] {
            assert!(!may(status, code), "{status} {code}");
        }
        assert!(!Aftermath::again(Loss::Cut).may_be_for_its_channels());
    }

    #[test]
    fn only_refusals_that_can_pass_are_tried_again() {
        let next = |status| Aftermath::of_refusal(status, "c".into(), "d".into(), None).next;
        for status in [429, 500, 502, 503, 504] {
            assert_eq!(next(status), Next::Again(None), "{status}");
        }
        assert_eq!(next(401), Next::NewToken(None));
        for status in [200, 301, 400, 403, 404, 406, 426, 431] {
            assert!(matches!(next(status), Next::Stop(End::Refused { .. })), "{status}");
        }
    }
}
