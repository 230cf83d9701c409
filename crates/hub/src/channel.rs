//! Channel and event names, and which channels an identity may hear.

use std::borrow::Borrow;
use std::fmt;
use std::sync::Arc;

/// Longest channel name in bytes (contract).
pub const MAX_CHANNEL_BYTES: usize = 200;
/// Longest event name in bytes (contract).
pub const MAX_EVENT_NAME_BYTES: usize = 64;

/// A channel's name: 1 to 200 bytes of `A-Z a-z 0-9 _ - . : + @ = , / | ~ %`, matched byte by byte.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Channel(Arc<str>);

/// The name has a byte outside the alphabet, or is empty or too long.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("a channel name has 1 to 200 bytes of A-Z a-z 0-9 _ - . : + @ = , / | ~ %")]
pub struct BadChannel;

/// The name has a byte outside the alphabet, or is empty or too long.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("an event name has 1 to 64 bytes of A-Z a-z 0-9 _ - . :")]
pub struct BadEventName;

/// What the names of users' own channels begin with.
pub(crate) const USER_PREFIX: &str = "user:";

fn is_channel_byte(b: u8) -> bool {
    b.is_ascii_alphanumeric() || b"_-.:+@=,/|~%".contains(&b)
}

impl Channel {
    /// # Errors
    /// `BadChannel`: tell the caller the alphabet, there is nothing to retry.
    pub fn new(name: &str) -> Result<Self, BadChannel> {
        if name.is_empty() || name.len() > MAX_CHANNEL_BYTES || !name.bytes().all(is_channel_byte) {
            return Err(BadChannel);
        }
        Ok(Self(name.into()))
    }

    /// `user:<sub>`, the bytes of `sub` outside the alphabet (and `%`) percent-encoded in upper case.
    ///
    /// # Errors
    /// `BadChannel` where the encoded name is over 200 bytes.
    pub fn of_user(sub: &str) -> Result<Self, BadChannel> {
        let mut name = String::with_capacity(USER_PREFIX.len() + sub.len());
        name.push_str(USER_PREFIX);
        for b in sub.bytes() {
            if is_channel_byte(b) && b != b'%' {
                name.push(b as char);
            } else {
                name.push_str(&format!("%{b:02X}"));
            }
        }
        Self::new(&name)
    }

    /// The name.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl Borrow<str> for Channel {
    fn borrow(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for Channel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl fmt::Debug for Channel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&*self.0, f)
    }
}

/// The name an event was published under: 1 to 64 bytes of `A-Z a-z 0-9 _ - . :`.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct EventName(Arc<str>);

impl EventName {
    /// # Errors
    /// `BadEventName`: tell the caller the alphabet.
    pub fn new(name: &str) -> Result<Self, BadEventName> {
        let ok = |b: u8| b.is_ascii_alphanumeric() || b"_-.:".contains(&b);
        if name.is_empty() || name.len() > MAX_EVENT_NAME_BYTES || !name.bytes().all(ok) {
            return Err(BadEventName);
        }
        Ok(Self(name.into()))
    }

    /// The name.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

/// One entry of a list of channels that may be heard: an exact name, or a prefix ending in `*`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Pattern {
    /// This channel only.
    Exact(Channel),
    /// Every channel that begins with these bytes (possibly none: all channels).
    Prefix(Arc<str>),
}

impl Pattern {
    /// # Errors
    /// `BadChannel` where the part before `*` is no beginning of a channel name.
    pub fn new(text: &str) -> Result<Self, BadChannel> {
        match text.strip_suffix('*') {
            None => Channel::new(text).map(Pattern::Exact),
            Some(prefix) if prefix.len() <= MAX_CHANNEL_BYTES && prefix.bytes().all(is_channel_byte) => {
                Ok(Pattern::Prefix(prefix.into()))
            }
            Some(_) => Err(BadChannel),
        }
    }

    /// Does it cover `channel`? Byte by byte; no other wildcard exists.
    pub fn covers(&self, channel: &Channel) -> bool {
        match self {
            Pattern::Exact(exact) => exact == channel,
            Pattern::Prefix(prefix) => channel.as_str().starts_with(&**prefix),
        }
    }
}

/// Which channels a session hears from the start and which it may ask for.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Grants {
    /// Joined at once; may be left and asked for again.
    pub joined: Vec<Channel>,
    /// May be asked for.
    pub askable: Vec<Pattern>,
}

impl Grants {
    /// May this channel be heard under these grants?
    pub fn allow(&self, channel: &Channel) -> bool {
        self.joined.contains(channel) || self.askable.iter().any(|p| p.covers(channel))
    }

    /// The texts of all names and prefixes, for whoever puts equal ones in their place that others
    /// have, too.
    pub(crate) fn texts_mut(&mut self) -> impl Iterator<Item = &mut Arc<str>> {
        let asked = self.askable.iter_mut().map(|pattern| match pattern {
            Pattern::Exact(Channel(text)) | Pattern::Prefix(text) => text,
        });
        self.joined.iter_mut().map(|Channel(text)| text).chain(asked)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_exact_and_pattern_characters_are_refused() {
        for bad in ["", "user:*", "user:4?", "user:[0-9]*", "user:42 ", "a\nb", "a\0", "ä", &"x".repeat(201)] {
            assert_eq!(Channel::new(bad), Err(BadChannel), "{bad:?}");
        }
        for good in ["user:42", "USER:42", "../x", "a+b@c.d", "a%20b", &"x".repeat(200)] {
            assert!(Channel::new(good).is_ok(), "{good:?}");
        }
    }

    #[test]
    fn a_user_channel_encodes_what_the_alphabet_lacks_and_stays_unambiguous() {
        assert_eq!(Channel::of_user("a b").unwrap().as_str(), "user:a%20b");
        assert_eq!(Channel::of_user("a%20b").unwrap().as_str(), "user:a%2520b");
        assert_eq!(Channel::of_user("ü").unwrap().as_str(), "user:%C3%BC");
        assert!(Channel::of_user(&"x".repeat(195)).is_ok());
        assert_eq!(Channel::of_user(&"x".repeat(196)), Err(BadChannel));
    }

    #[test]
    fn a_prefix_covers_what_begins_with_it_and_nothing_else() {
        let p = Pattern::new("room:*").unwrap();
        assert!(p.covers(&Channel::new("room:1").unwrap()));
        assert!(!p.covers(&Channel::new("Room:1").unwrap()));
        assert!(Pattern::new("*").unwrap().covers(&Channel::new("x").unwrap()));
        assert!(Pattern::new("a*b").is_err());
    }
}
