//! Values from text: durations, sizes, numbers, addresses, lists. Decides what each form accepts;
//! which form a variable has is `table.rs`'s. Each function gives `None` or the bad entry; the
//! caller says what was expected.

use std::net::SocketAddr;
use std::time::Duration;

use super::table::MAX_DURATION;

/// `250ms`, `30s`, `20m`, `1h`, `30d`; a bare `0` is zero; `MAX_DURATION` at most.
pub fn duration(text: &str) -> Option<Duration> {
    if text == "0" {
        return Some(Duration::ZERO);
    }
    let (number, unit) = split_unit(text)?;
    let ms = match unit {
        "ms" => 1,
        "s" => 1_000,
        "m" => 60_000,
        "h" => 3_600_000,
        "d" => 86_400_000,
        _ => return None,
    };
    let duration = Duration::from_millis(number.checked_mul(ms)?);
    (duration <= MAX_DURATION).then_some(duration)
}

/// The shortest form that `duration` reads back.
pub fn show_duration(duration: Duration) -> String {
    let ms = u64::try_from(duration.as_millis()).unwrap_or(u64::MAX);
    match ms {
        0 => "0s".to_owned(),
        _ => in_units(ms, &[(86_400_000, "d"), (3_600_000, "h"), (60_000, "m"), (1_000, "s"), (1, "ms")]),
    }
}

/// `64KiB`, `1MiB`, `1GiB`, or plain bytes (`512`, `512B`). `KB` is refused: it means two things.
pub fn size(text: &str) -> Option<u64> {
    let (number, unit) = split_unit(text).or_else(|| Some((whole(text)?, "")))?;
    let bytes: u64 = match unit {
        "" | "B" => 1,
        "KiB" => 1 << 10,
        "MiB" => 1 << 20,
        "GiB" => 1 << 30,
        _ => return None,
    };
    number.checked_mul(bytes)
}

/// The shortest form that `size` reads back.
pub fn show_size(bytes: u64) -> String {
    match bytes {
        0 => "0".to_owned(),
        _ => in_units(bytes, &[(1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"), (1, "")]),
    }
}

/// Decimal digits and nothing else: no sign, no blank, no separator.
pub fn whole(text: &str) -> Option<u64> {
    if text.is_empty() || !text.bytes().all(|b| b.is_ascii_digit()) {
        return None;
    }
    text.parse().ok()
}

/// A decimal above 0 and at most 1.
pub fn ratio(text: &str) -> Option<f64> {
    if !text.bytes().all(|b| b.is_ascii_digit() || b == b'.') {
        return None;
    }
    let number: f64 = text.parse().ok()?;
    (number > 0.0 && number <= 1.0).then_some(number)
}

/// An IP address with port; `localhost:<port>` is 127.0.0.1.
pub fn address(text: &str) -> Option<SocketAddr> {
    match text.strip_prefix("localhost:") {
        Some(port) => Some(SocketAddr::from(([127, 0, 0, 1], port.parse().ok()?))),
        None => text.parse().ok(),
    }
}

/// Entries between commas, trimmed; one comma may end the list. Fails with the first entry that
/// `parse` does not take, or with nothing where the list holds none.
pub fn list<T>(text: &str, parse: impl Fn(&str) -> Option<T>) -> Result<Vec<T>, Option<String>> {
    let text = text.trim();
    let text = text.strip_suffix(',').unwrap_or(text);
    if text.trim().is_empty() {
        return Err(None);
    }
    text.split(',').map(str::trim).map(|entry| parse(entry).ok_or_else(|| Some(entry.to_owned()))).collect()
}

/// A name of bytes of `A-Z a-z 0-9` and `more`, 1 to `most` of them.
pub fn name(text: &str, most: usize, more: &[u8]) -> Option<String> {
    let fits = |b: u8| b.is_ascii_alphanumeric() || more.contains(&b);
    (!text.is_empty() && text.len() <= most && text.bytes().all(fits)).then(|| text.to_owned())
}

/// An RFC 6265 cookie name: a token.
pub fn cookie_name(text: &str) -> Option<String> {
    name(text, 256, b"!#$%&'*+-.^_`|~")
}

/// A host name or IP literal without port, lower case.
pub fn host(text: &str) -> Option<String> {
    let lower = text.to_ascii_lowercase();
    if let Some(inner) = lower.strip_prefix('[') {
        let literal = inner.strip_suffix(']')?;
        return literal.parse::<std::net::Ipv6Addr>().is_ok().then_some(lower);
    }
    let is_label = |label: &str| !label.is_empty() && label.len() <= 63;
    let fits = |b: u8| b.is_ascii_alphanumeric() || b == b'-' || b == b'.' || b == b'_';
    let whole = lower.strip_suffix('.').unwrap_or(&lower);
    (lower.len() <= 253 && lower.bytes().all(fits) && whole.split('.').all(is_label)).then_some(lower)
}

/// In the largest unit that leaves no rest; the last unit is 1.
fn in_units(number: u64, units: &[(u64, &str)]) -> String {
    let (size, unit) = units.iter().find(|(size, _)| number.is_multiple_of(*size)).unwrap_or(&(1, ""));
    format!("{}{unit}", number / size)
}

fn split_unit(text: &str) -> Option<(u64, &str)> {
    let at = text.find(|c: char| !c.is_ascii_digit())?;
    Some((whole(&text[..at])?, &text[at..]))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_have_a_unit_and_are_read_back_as_shown() {
        for (text, ms) in
            [("250ms", 250), ("30s", 30_000), ("20m", 1_200_000), ("1h", 3_600_000), ("30d", 2_592_000_000)]
        {
            assert_eq!(duration(text), Some(Duration::from_millis(ms)), "{text}");
            assert_eq!(show_duration(Duration::from_millis(ms)), text);
        }
        assert_eq!(duration("0"), Some(Duration::ZERO));
        assert_eq!(duration("366d"), Some(MAX_DURATION));
        for bad in ["", "25", "25 s", "s", "-1s", "+1s", "1.5s", "1S", "1sec", "367d", "99999999999999999999d", "١s"] {
            assert_eq!(duration(bad), None, "{bad:?}");
        }
    }

    #[test]
    fn sizes_are_powers_of_two_or_plain_bytes() {
        for (text, bytes) in [("64KiB", 65_536), ("1MiB", 1 << 20), ("2GiB", 2 << 30), ("100", 100)] {
            assert_eq!(size(text), Some(bytes), "{text}");
            assert_eq!(show_size(bytes), text);
        }
        assert_eq!(size("7B"), Some(7));
        for bad in ["", "KiB", "64KB", "64K", "1.5MiB", "-1", "64 KiB", "99999999999GiB"] {
            assert_eq!(size(bad), None, "{bad:?}");
        }
    }

    #[test]
    fn a_ratio_lies_above_zero_and_at_most_at_one() {
        assert_eq!(ratio("1"), Some(1.0));
        assert_eq!(ratio("0.025"), Some(0.025));
        for bad in ["0", "1.01", "-0.1", "5%", "nan", "inf", "1e-3", "", "."] {
            assert_eq!(ratio(bad), None, "{bad:?}");
        }
    }

    #[test]
    fn a_list_drops_blanks_and_its_last_comma_and_names_the_bad_entry() {
        assert_eq!(list(" 1 ,2,\t3 , ", whole), Ok(vec![1, 2, 3]));
        assert_eq!(list("1,,2", whole), Err(Some(String::new())));
        assert_eq!(list("1,x y,2", whole), Err(Some("x y".to_owned())));
        assert_eq!(list(" , ", whole), Err(None));
    }

    #[test]
    fn hosts_carry_no_port_scheme_or_wildcard() {
        assert_eq!(host("Admin.Internal").as_deref(), Some("admin.internal"));
        assert_eq!(host("[::1]").as_deref(), Some("[::1]"));
        for bad in ["", "a:1", "http://a", "*.a", "a..b", "[::1", "a b"] {
            assert_eq!(host(bad), None, "{bad:?}");
        }
    }
}
