//! The revocation list in Redis: which keys are asked for a token, and how a revocation is
//! written. Decides nothing about sessions; batching and what is known already are the hub's.

use std::time::Duration;

use hub::backplane::{Revocation, RevocationKey};
use redis::Cmd;

use crate::keys::{Keys, RevocationKeys, parts};

/// One MGET for many tokens' keys, and how its answer is read back.
pub(crate) struct Question {
    cmd: Cmd,
    asked: Vec<Asked>,
    n_names: usize,
}

/// One key that was asked: how many names of the MGET speak of it, and whether a time stands there.
struct Asked {
    n_names: usize,
    is_time: bool,
}

impl Question {
    /// Where a foreign list is read, the gateway's own is read as well: a revocation made through
    /// the API holds in either case. Kinds without a template are not asked.
    pub(crate) fn new(keys: &Keys, templates: &RevocationKeys, asked: &[RevocationKey]) -> Self {
        let mut cmd = redis::cmd("MGET");
        let mut question = Vec::with_capacity(asked.len());
        let mut n_all = 0;
        for key in asked {
            let mut n_names = 0;
            if let Some(name) = templates.key(keys, key) {
                let own = keys.revoked(key);
                cmd.arg(&name);
                n_names = 1;
                if name != own {
                    cmd.arg(own);
                    n_names = 2;
                }
            }
            n_all += n_names;
            question.push(Asked { n_names, is_time: matches!(key, RevocationKey::Sub(_)) });
        }
        Self { cmd, asked: question, n_names: n_all }
    }

    /// `None`: there is nothing to ask.
    pub(crate) fn cmd(&self) -> Option<&Cmd> {
        (self.n_names > 0).then_some(&self.cmd)
    }

    /// The stored value of each key asked, in their order; of two times the later.
    pub(crate) fn read(&self, values: Vec<Option<Vec<u8>>>) -> Vec<Option<String>> {
        let mut values = values.into_iter();
        let one = |asked: &Asked| {
            let stored = values.by_ref().take(asked.n_names).flatten();
            let mut found = stored.map(|value| String::from_utf8_lossy(&value).into_owned());
            // Both are taken in either case: what is left in `values` belongs to the next key.
            let (first, second) = (found.next(), found.next());
            match (first, second) {
                (Some(first), Some(second)) if asked.is_time && time(&second) > time(&first) => Some(second),
                (first, second) => first.or(second),
            }
        };
        self.asked.iter().map(one).collect()
    }
}

fn time(stored: &str) -> u64 {
    stored.trim().parse::<f64>().map_or(0, |time| time as u64)
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
        let sent = question.cmd().unwrap().get_packed_command();
        let names = "$3\r\nx/a\r\n$15\r\nt:revoked:jti:a\r\n$3\r\ny/c\r\n$15\r\nt:revoked:sub:c\r\n";
        assert_eq!(String::from_utf8_lossy(&sent), format!("*5\r\n$4\r\nMGET\r\n{names}"));
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
