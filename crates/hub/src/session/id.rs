//! What a session is called. Decides how the name looks; who it is for is the contract's.

use std::fmt;
use std::hash::{Hash, Hasher};
use std::ops::Deref;
use std::sync::Arc;

/// A session's id: 16 hexadecimal digits, random, unique over the fleet. It is a `str` wherever one is
/// asked for; the text is in place, for every session has one.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct SessionId([u8; 16]);

impl SessionId {
    /// The id that these 64 random bits are.
    pub fn new(bits: u64) -> Self {
        const DIGITS: [u8; 16] = *b"0123456789abcdef";
        Self(std::array::from_fn(|i| DIGITS[(bits >> (60 - 4 * i) & 15) as usize]))
    }

    /// The bits that it is.
    pub fn bits(&self) -> u64 {
        u64::from_str_radix(self.as_str(), 16).expect("sixteen hexadecimal digits are 64 bits")
    }

    /// The digits.
    pub fn as_str(&self) -> &str {
        std::str::from_utf8(&self.0).expect("hexadecimal digits are text")
    }
}

impl Deref for SessionId {
    type Target = str;

    fn deref(&self) -> &str {
        self.as_str()
    }
}

/// As its text: sessions are found by that.
impl Hash for SessionId {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.as_str().hash(state);
    }
}

impl fmt::Display for SessionId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self)
    }
}

impl fmt::Debug for SessionId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(self.as_str(), f)
    }
}

impl From<SessionId> for Arc<str> {
    fn from(id: SessionId) -> Self {
        id.as_str().into()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_id_is_its_bits_in_sixteen_digits() {
        for bits in [0, 1, 0x0123_4567_89ab_cdef, u64::MAX] {
            let (id, text) = (SessionId::new(bits), format!("{bits:016x}"));
            assert_eq!(id.bits(), bits);
            assert_eq!((&*id, id.to_string(), format!("{id:?}")), (&*text, text.clone(), format!("{text:?}")));
        }
    }
}
