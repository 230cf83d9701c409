//! The revocation list in Redis: which keys are asked for a token, and how a revocation is
//! written. Decides nothing about sessions; batching and what is known already are the hub's.

use std::time::Duration;

use hub::backplane::{Revocation, RevocationKey};
use redis::Cmd;

use crate::keys::{Keys, RevocationKeys, parts};

/// One MGET for many tokens' keys, and how its answer is read back.
pub(crate) struct Question {
    /// Per asked key: which places of the MGET speak of it.
    places: Vec<Vec<usize>>,
    is_time: Vec<bool>,
    names: Vec<String>,
}

impl Question {
    /// Where a foreign list is read, the gateway's own is read as well: a revocation made through
    /// the API holds in either case. Kinds without a template are not asked.
    pub(crate) fn new(keys: &Keys, templates: &RevocationKeys, asked: &[RevocationKey]) -> Self {
        let mut question = Self { places: Vec::new(), is_time: Vec::new(), names: Vec::new() };
        for key in asked {
            let mut places = Vec::new();
            if let Some(name) = templates.key(keys, key) {
                let own = keys.revoked(key);
                let is_foreign = name != own;
                for name in std::iter::once(name).chain(is_foreign.then_some(own)) {
                    places.push(question.names.len());
                    question.names.push(name);
                }
            }
            question.places.push(places);
            question.is_time.push(matches!(key, RevocationKey::Sub(_)));
        }
        question
    }

    /// `None`: there is nothing to ask.
    pub(crate) fn cmd(&self) -> Option<Cmd> {
        (!self.names.is_empty()).then(|| redis::cmd("MGET").arg(&self.names).to_owned())
    }

    /// The stored value of each key asked, in their order; of two times the later.
    pub(crate) fn read(&self, values: Vec<Option<Vec<u8>>>) -> Vec<Option<String>> {
        let stored =
            |place: &usize| values.get(*place).cloned().flatten().map(|v| String::from_utf8_lossy(&v).into_owned());
        let one = |(places, is_time): (&Vec<usize>, &bool)| {
            let mut found = places.iter().filter_map(stored);
            if *is_time { found.max_by_key(|v| v.trim().parse::<f64>().map_or(0, |t| t as u64)) } else { found.next() }
        };
        self.places.iter().zip(&self.is_time).map(one).collect()
    }
}

/// The call that revokes.
pub(crate) fn revoke_cmd(log: &str, revocation: &Revocation, ttl: Duration) -> Cmd {
    let (kind, value) = parts(&revocation.key);
    let ttl_s = ttl.as_secs() + u64::from(ttl.subsec_nanos() > 0);
    let mut cmd = redis::cmd("FCALL");
    cmd.arg("tidegate_revoke_1").arg(1).arg(log).arg(kind).arg(value).arg(ttl_s.max(1));
    if let RevocationKey::Sub(_) = revocation.key {
        cmd.arg(revocation.before);
    }
    cmd
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_foreign_list_is_read_beside_the_gateways_own() {
        let keys = Keys::new("t");
        let templates = RevocationKeys::parse("jti=x/{jti},sub=y/{sub}").unwrap();
        let asked = [RevocationKey::Jti("a".into()), RevocationKey::Sid("b".into()), RevocationKey::Sub("c".into())];
        let question = Question::new(&keys, &templates, &asked);
        assert_eq!(question.names, ["x/a", "t:revoked:jti:a", "y/c", "t:revoked:sub:c"]);
        let read = question.read(vec![Some(b"1".to_vec()), None, Some(b"9".to_vec()), Some(b"10".to_vec())]);
        assert_eq!(read, [Some("1".to_owned()), None, Some("10".to_owned())]);
    }

    #[test]
    fn nothing_to_ask_is_no_command() {
        let templates = RevocationKeys::parse("jti=x/{jti}").unwrap();
        let question = Question::new(&Keys::new("t"), &templates, &[RevocationKey::Sid("b".into())]);
        assert!(question.cmd().is_none());
        assert_eq!(question.read(Vec::new()), [None]);
    }
}
