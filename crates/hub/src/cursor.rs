//! Where in the log an event stands, and what a client may claim about where it stood.
//! Decides what a cursor says; whether the log can honour it is `backplane`'s to tell.

use std::fmt;
use std::str::FromStr;

/// Longest cursor that is looked at (contract: at most 256 bytes).
pub const MAX_CURSOR_BYTES: usize = 256;

/// An event's place in its partition's log: `<ms>-<n>`, as in a Redis stream, strictly rising over
/// all channels. The low 16 bits of `n` are the log's incarnation, so that a cursor of a log that
/// was flushed, rolled back or replaced is told apart from one of this log.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct EventId {
    /// Milliseconds since 1970 by the log's own clock.
    pub ms: u64,
    /// Sequence within the millisecond, shifted left by 16, plus the incarnation. Below 2^53:
    /// the log's Functions count in doubles.
    pub n: u64,
}

impl EventId {
    /// Before every event.
    pub const ZERO: EventId = EventId { ms: 0, n: 0 };

    /// Which life of the log gave this id.
    pub fn incarnation(self) -> u16 {
        (self.n & 0xffff) as u16
    }

    /// The id after `self` in incarnation `tag`, at log time `now_ms`.
    pub fn next(self, now_ms: u64, tag: u16) -> EventId {
        if now_ms > self.ms {
            EventId { ms: now_ms, n: u64::from(tag) }
        } else {
            EventId { ms: self.ms, n: (((self.n >> 16) + 1) << 16) | u64::from(tag) }
        }
    }
}

impl fmt::Display for EventId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}-{}", self.ms, self.n)
    }
}

/// The text is no `<ms>-<n>` in plain decimal digits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("not an event id of the form <ms>-<n>")]
pub struct NotAnEventId;

impl FromStr for EventId {
    type Err = NotAnEventId;

    fn from_str(text: &str) -> Result<Self, NotAnEventId> {
        let (ms, n) = text.split_once('-').ok_or(NotAnEventId)?;
        Ok(EventId { ms: digits(ms)?, n: digits(n)? })
    }
}

fn digits(text: &str) -> Result<u64, NotAnEventId> {
    if text.is_empty() || !text.bytes().all(|b| b.is_ascii_digit()) {
        return Err(NotAnEventId);
    }
    text.parse().map_err(|_| NotAnEventId)
}

/// From where a client asks to be served.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Since {
    /// No cursor, or an empty one: from now on.
    #[default]
    Now,
    /// `0`: all that is kept; never a gap.
    Start,
    /// Everything after this id.
    After(EventId),
    /// Something that is no cursor of ours: a gap (`unknown_position`), then from now on.
    Unknown,
}

impl Since {
    /// Reads a cursor as it came from a header, a query or a message. Never fails: what is no
    /// cursor is `Unknown`, and a cursor never refuses a session.
    pub fn parse(raw: &[u8]) -> Since {
        if raw.is_empty() {
            return Since::Now;
        }
        if raw == b"0" {
            return Since::Start;
        }
        if raw.len() > MAX_CURSOR_BYTES {
            return Since::Unknown;
        }
        match std::str::from_utf8(raw).ok().and_then(|text| text.parse().ok()) {
            Some(id) => Since::After(id),
            None => Since::Unknown,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_id_survives_its_text() {
        let id = EventId { ms: 1_764_460_000_123, n: 3 << 16 | 9 };
        assert_eq!(id.to_string().parse(), Ok(id));
        assert_eq!(id.incarnation(), 9);
    }

    #[test]
    fn ids_rise_within_a_millisecond_after_it_and_when_the_clock_steps_back() {
        let a = EventId::ZERO.next(10, 7);
        let b = a.next(10, 7);
        let c = b.next(5, 7);
        let d = c.next(11, 7);
        assert!(a < b && b < c && c < d);
        assert!([a, b, c, d].iter().all(|id| id.incarnation() == 7));
    }

    #[test]
    fn odd_cursors_are_unknown_and_never_an_error() {
        for odd in ["-1", "1", "abc", "1-", "-", "1-1-1", "+1-1", " 1-1", "1~1-1", "99999999999999999999-1", "0-0x"] {
            assert_eq!(Since::parse(odd.as_bytes()), Since::Unknown, "{odd}");
        }
        assert_eq!(Since::parse(&[0xff, b'-', b'1']), Since::Unknown);
        assert_eq!(Since::parse(&[b'1'; 10_240]), Since::Unknown);
        assert_eq!(Since::parse(b""), Since::Now);
        assert_eq!(Since::parse(b"0"), Since::Start);
        assert_eq!(Since::parse(b"1-1"), Since::After(EventId { ms: 1, n: 1 }));
        assert_eq!(
            Since::parse(b"18446744073709551615-9007199254740993"),
            Since::After(EventId { ms: u64::MAX, n: 9_007_199_254_740_993 })
        );
    }
}
