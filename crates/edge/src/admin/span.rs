//! How a call writes a length of time: whole seconds, or a duration as the configuration writes
//! it. Which lengths make sense, and what is said of others, the call decides.

use std::ops::RangeInclusive;
use std::time::Duration;

use serde::Deserialize;

/// A length of time as it came.
#[derive(Deserialize)]
#[serde(untagged)]
pub(super) enum Span {
    Seconds(u64),
    Text(String),
}

impl Span {
    /// The length, if it is one, and within these.
    pub(super) fn within(&self, lengths: RangeInclusive<Duration>) -> Option<Duration> {
        let length = match self {
            Span::Seconds(n) => Some(Duration::from_secs(*n)),
            Span::Text(text) => written(text),
        };
        length.filter(|length| lengths.contains(length))
    }
}

/// `30s`, `20m`, `12h`, `30d`. No `ms`: whatever is asked for that short means a slip of the pen.
fn written(text: &str) -> Option<Duration> {
    let (number, unit) = text.split_at(text.find(|c: char| !c.is_ascii_digit())?);
    let seconds = match unit {
        "s" => 1,
        "m" => 60,
        "h" => 3_600,
        "d" => 86_400,
        _ => return None,
    };
    number.parse::<u64>().ok()?.checked_mul(seconds).map(Duration::from_secs)
}
