//! Every key and pub/sub channel of ours, by name. Decides spelling only; types, TTLs and writers
//! stand in `migrations/README.md`. What the Functions write they derive themselves from `log`.

use std::fmt;

use hub::backplane::RevocationKey;
use hub::channel::Channel;

/// The names under one prefix.
#[derive(Clone, Debug)]
pub(crate) struct Keys {
    prefix: String,
    live: String,
}

impl Keys {
    pub(crate) fn new(prefix: &str) -> Self {
        Self { prefix: prefix.to_owned(), live: format!("{prefix}:live:") }
    }

    /// The one key that every Function call names.
    pub(crate) fn log(&self) -> String {
        format!("{}:log", self.prefix)
    }

    pub(crate) fn conf(&self) -> String {
        format!("{}:conf", self.prefix)
    }

    pub(crate) fn schema(&self) -> String {
        format!("{}:schema", self.prefix)
    }

    pub(crate) fn lock(&self) -> String {
        format!("{}:lock:schema", self.prefix)
    }

    /// Pub/sub: what concerns every node.
    pub(crate) fn ctl(&self) -> String {
        format!("{}:ctl", self.prefix)
    }

    /// Pub/sub: a node's own beacon.
    pub(crate) fn beacon(&self, node: &str) -> String {
        format!("{}:beacon:{node}", self.prefix)
    }

    /// Pub/sub: what concerns one node.
    pub(crate) fn node(&self, node: &str) -> String {
        format!("{}:node:{node}", self.prefix)
    }

    /// Pub/sub: a channel's live events.
    pub(crate) fn live(&self, channel: &Channel) -> String {
        format!("{}{channel}", self.live)
    }

    /// The channel whose live events come over this pub/sub channel. Exact: another deployment's
    /// prefix that begins with ours is not ours.
    pub(crate) fn channel_of<'a>(&self, pubsub: &'a str) -> Option<&'a str> {
        pubsub.strip_prefix(self.live.as_str())
    }

    /// Where the gateway itself writes a revocation.
    pub(crate) fn revoked(&self, key: &RevocationKey) -> String {
        let (kind, value) = parts(key);
        format!("{}:revoked:{kind}:{value}", self.prefix)
    }
}

/// The kind's word and the value.
pub(crate) fn parts(key: &RevocationKey) -> (&'static str, &str) {
    match key {
        RevocationKey::Jti(value) => ("jti", value),
        RevocationKey::Sid(value) => ("sid", value),
        RevocationKey::Sub(value) => ("sub", value),
    }
}

/// Which keys of a revocation list are read, one template a kind.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RevocationKeys {
    jti: Option<Template>,
    sid: Option<Template>,
    sub: Option<Template>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct Template(Vec<Part>);

#[derive(Clone, Debug, PartialEq, Eq)]
enum Part {
    Text(String),
    Prefix,
    Value,
}

/// The templates are no `jti=…,sid=…,sub=…` with the placeholders of their kind.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("revocation keys: {0}")]
pub struct BadTemplate(String);

impl Default for RevocationKeys {
    /// The gateway's own list.
    fn default() -> Self {
        Self::parse("jti={prefix}:revoked:jti:{jti},sid={prefix}:revoked:sid:{sid},sub={prefix}:revoked:sub:{sub}")
            .expect("the default is well formed")
    }
}

impl RevocationKeys {
    /// Reads `jti=<template>,sid=<template>,sub=<template>`; kinds left out are not asked.
    /// Placeholders are `{prefix}` and the kind's own, which must occur; their braces never reach Redis.
    ///
    /// # Errors
    /// `BadTemplate` with what is wrong and where.
    pub fn parse(text: &str) -> Result<Self, BadTemplate> {
        let mut keys = Self { jti: None, sid: None, sub: None };
        for item in text.split(',') {
            let Some((kind, template)) = item.split_once('=') else {
                return Err(BadTemplate(format!("{item:?} is no <kind>=<template>")));
            };
            let kind = kind.trim();
            let slot = match kind {
                "jti" => &mut keys.jti,
                "sid" => &mut keys.sid,
                "sub" => &mut keys.sub,
                _ => return Err(BadTemplate(format!("{kind:?} is none of jti, sid, sub"))),
            };
            if slot.is_some() {
                return Err(BadTemplate(format!("{kind} is given twice")));
            }
            *slot = Some(Template::parse(kind, template.trim())?);
        }
        Ok(keys)
    }

    /// The key to ask, or `None` where this kind is not asked.
    pub(crate) fn key(&self, keys: &Keys, revoked: &RevocationKey) -> Option<String> {
        let (template, value) = match revoked {
            RevocationKey::Jti(value) => (&self.jti, value),
            RevocationKey::Sid(value) => (&self.sid, value),
            RevocationKey::Sub(value) => (&self.sub, value),
        };
        let template = template.as_ref()?;
        let room = String::with_capacity(keys.prefix.len() + value.len() + 32);
        Some(template.0.iter().fold(room, |mut key, part| {
            key.push_str(match part {
                Part::Text(text) => text,
                Part::Prefix => &keys.prefix,
                Part::Value => value,
            });
            key
        }))
    }
}

impl Template {
    fn parse(kind: &str, text: &str) -> Result<Self, BadTemplate> {
        let mut parts = Vec::new();
        let mut rest = text;
        while let Some(open) = rest.find(['{', '}']) {
            let (before, after) = rest.split_at(open);
            let Some((name, tail)) = after.strip_prefix('{').and_then(|inner| inner.split_once('}')) else {
                return Err(BadTemplate(format!("{kind}: a brace without its partner")));
            };
            if !before.is_empty() {
                parts.push(Part::Text(before.to_owned()));
            }
            parts.push(match name {
                "prefix" => Part::Prefix,
                name if name == kind => Part::Value,
                other => return Err(BadTemplate(format!("{kind}: unknown placeholder {{{other}}}"))),
            });
            rest = tail;
        }
        if !rest.is_empty() {
            parts.push(Part::Text(rest.to_owned()));
        }
        if !parts.contains(&Part::Value) {
            return Err(BadTemplate(format!("{kind}: {{{kind}}} does not occur")));
        }
        Ok(Self(parts))
    }
}

impl fmt::Display for RevocationKeys {
    /// As `parse` reads it.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kinds = [("jti", &self.jti), ("sid", &self.sid), ("sub", &self.sub)];
        let mut between = "";
        for (kind, template) in kinds {
            let Some(template) = template else { continue };
            write!(f, "{between}{kind}=")?;
            between = ",";
            for part in &template.0 {
                match part {
                    Part::Text(text) => f.write_str(text)?,
                    Part::Prefix => f.write_str("{prefix}")?,
                    Part::Value => write!(f, "{{{kind}}}")?,
                }
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_prefix_that_begins_with_ours_is_not_ours() {
        let keys = Keys::new("a");
        assert_eq!(keys.channel_of("a:live:news"), Some("news"));
        assert_eq!(keys.channel_of("ab:live:news"), None);
        assert_eq!(keys.channel_of("a:live"), None);
    }

    #[test]
    fn a_foreign_revocation_list_is_read_as_it_stands() {
        let keys = Keys::new("tidegate");
        let own = RevocationKeys::parse("jti=blacklist/{jti},sub={prefix}#{sub}").unwrap();
        assert_eq!(own.key(&keys, &RevocationKey::Jti("x".into())).as_deref(), Some("blacklist/x"));
        assert_eq!(own.key(&keys, &RevocationKey::Sub("{sub}".into())).as_deref(), Some("tidegate#{sub}"));
        assert_eq!(own.key(&keys, &RevocationKey::Sid("x".into())), None);
        assert_eq!(RevocationKeys::parse(&own.to_string()), Ok(own));
    }

    #[test]
    fn a_bad_template_is_refused_and_says_why() {
        for bad in [
            "",
            "jti",
            "jti=x",
            "jti={sub}",
            "jti={jti",
            "jti=}{jti}",
            "xyz={xyz}",
            "jti={jti},jti={jti}",
            "jti={jti},",
        ] {
            assert!(RevocationKeys::parse(bad).is_err(), "{bad:?}");
        }
    }

    #[test]
    fn the_default_list_is_the_one_that_the_gateway_writes() {
        let keys = Keys::new("p");
        for key in [RevocationKey::Jti("1".into()), RevocationKey::Sid("2".into()), RevocationKey::Sub("3".into())] {
            assert_eq!(RevocationKeys::default().key(&keys, &key), Some(keys.revoked(&key)));
        }
    }
}
