//! What some variables hold beyond a number or a word: secrets, keys, origins, networks, the
//! Redis URL, the layout of the revocation list. Decides when such a text is good; reads nothing.

use std::fmt;
use std::net::{IpAddr, Ipv6Addr};

use hub::channel::Pattern;
use jsonwebtoken::{Algorithm, AlgorithmFamily, DecodingKey};

use super::parse;

/// Shortest HMAC secret in bytes: the output of SHA-256. A shorter one can be guessed offline.
pub const MIN_HMAC_BYTES: usize = 32;

/// Something that must reach no log, table or error: `Debug` and `Display` hide it.
#[derive(Clone, PartialEq, Eq)]
pub struct Secret<T>(T);

impl<T> Secret<T> {
    /// Hides `value` from now on.
    pub fn new(value: T) -> Self {
        Self(value)
    }

    /// The secret itself: hand it on, never print it.
    pub fn expose(&self) -> &T {
        &self.0
    }
}

impl<T> fmt::Debug for Secret<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("[hidden]")
    }
}

impl<T> fmt::Display for Secret<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("[hidden]")
    }
}

/// `GATEWAY_JWT_SECRET`: any bytes, at least `MIN_HMAC_BYTES`, and nothing that everybody may know.
///
/// # Errors
/// A sentence that says what is wrong, without the secret.
pub fn hmac_secret(bytes: Vec<u8>) -> Result<Secret<Vec<u8>>, String> {
    let text = String::from_utf8_lossy(&bytes);
    if text.trim().is_empty() {
        return Err("is blank".to_owned());
    }
    if looks_like_a_key_file(text.trim()) {
        return Err("holds a public or private key: as an HMAC secret anybody who knows the public key could sign; \
                    use GATEWAY_JWT_PUBLIC_KEY"
            .to_owned());
    }
    if bytes.len() < MIN_HMAC_BYTES {
        return Err(format!("has {} bytes, at least {MIN_HMAC_BYTES} are needed", bytes.len()));
    }
    Ok(Secret(bytes))
}

/// PEM, OpenSSH, a JWK, or the bare base64 of a public key of RSA, EC or Ed25519.
fn looks_like_a_key_file(text: &str) -> bool {
    const BEGINNINGS: [&str; 8] = [
        "ssh-rsa ",
        "ssh-ed25519 ",
        "ecdsa-sha2-",
        "MIIBIjANBgkq",
        "MIICIjANBgkq",
        "MFkwEwYHKoZI",
        "MHYwEAYHKoZI",
        "MCowBQYDK2Vw",
    ];
    text.contains("-----BEGIN")
        || (text.starts_with('{') && text.contains("\"kty\""))
        || BEGINNINGS.iter().any(|beginning| text.starts_with(beginning))
}

/// `GATEWAY_JWT_PUBLIC_KEY`: a public key whose family was recognised.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PublicKey {
    /// The PEM text, with real line ends.
    pub pem: String,
    /// Which algorithms it can check.
    pub family: AlgorithmFamily,
}

impl PublicKey {
    /// A PEM text; `\n` written as two characters counts as a line end.
    ///
    /// # Errors
    /// A sentence that says what is wrong.
    pub fn new(text: &str) -> Result<Self, String> {
        let pem = text.replace("\\r", "").replace("\\n", "\n");
        if pem.trim().is_empty() {
            return Err("is blank".to_owned());
        }
        if pem.contains("PRIVATE KEY-----") {
            return Err("holds a private key: the gateway needs only the public one, keep the other away".to_owned());
        }
        let bytes = pem.as_bytes();
        let family = if DecodingKey::from_rsa_pem(bytes).is_ok() {
            AlgorithmFamily::Rsa
        } else if DecodingKey::from_ec_pem(bytes).is_ok() {
            AlgorithmFamily::Ec
        } else if DecodingKey::from_ed_pem(bytes).is_ok() {
            AlgorithmFamily::Ed
        } else {
            return Err("is no PEM public key of RSA, EC or Ed25519".to_owned());
        };
        Ok(Self { pem, family })
    }
}

/// One word of `GATEWAY_JWT_ALGORITHMS`, as it stands in tokens. `none` is none.
pub fn algorithm(word: &str) -> Option<Algorithm> {
    word.parse().ok()
}

/// `GATEWAY_ADMIN_KEY`: it must fit an `Authorization` header.
///
/// # Errors
/// A sentence that says what is wrong, without the key.
pub fn admin_key(text: String) -> Result<Secret<String>, String> {
    if text.trim().is_empty() {
        return Err("is blank".to_owned());
    }
    if !text.bytes().all(|b| b.is_ascii_graphic()) {
        return Err("has a blank or a byte beyond visible ASCII, which no Authorization header carries".to_owned());
    }
    Ok(Secret(text))
}

/// `GATEWAY_ALLOWED_ORIGINS`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Origins {
    /// Unset: `Origin` is looked at for cookies only, and only the same origin passes.
    Unset,
    /// `*`.
    Any,
    /// These, in lower case and without the scheme's own port, beside the same origin.
    Listed(Vec<String>),
}

impl Origins {
    /// From the entries of the list, each an `origin` or `*`.
    ///
    /// # Errors
    /// The entry `*` beside others: it stands alone or not at all.
    pub fn from_entries(entries: Vec<String>) -> Result<Self, Option<String>> {
        match entries.iter().any(|e| e == "*") {
            false => Ok(Origins::Listed(entries)),
            true if entries.len() == 1 => Ok(Origins::Any),
            true => Err(Some("*".to_owned())),
        }
    }
}

/// `scheme://host[:port]`, or `*`: lower case, the scheme's own port dropped. No path, no slash at
/// the end, no wildcard inside, no `null`: a browser never sends an origin like that.
pub fn origin(text: &str) -> Option<String> {
    if text == "*" {
        return Some(text.to_owned());
    }
    let lower = text.to_ascii_lowercase();
    let (scheme, rest) = lower.split_once("://")?;
    if !scheme.starts_with(|c: char| c.is_ascii_alphabetic()) {
        return None;
    }
    parse::name(scheme, 64, b"+-.")?;
    let (host, port) = split_port(rest)?;
    parse::host(host)?;
    match (scheme, port) {
        (_, None) | ("http", Some(80)) | ("https", Some(443)) => Some(format!("{scheme}://{host}")),
        (_, Some(port)) => Some(format!("{scheme}://{host}:{port}")),
    }
}

/// `host` or `host:port` with a port over 0; an IPv6 host stands in brackets.
fn split_port(text: &str) -> Option<(&str, Option<u16>)> {
    let after_host = if text.starts_with('[') { text.find(']')? + 1 } else { text.find(':').unwrap_or(text.len()) };
    let (host, port) = text.split_at(after_host);
    if port.is_empty() {
        return Some((host, None));
    }
    let port = u16::try_from(parse::whole(port.strip_prefix(':')?)?).ok()?;
    (port > 0).then_some((host, Some(port)))
}

/// An IP network of `GATEWAY_TRUSTED_PROXIES`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Network {
    /// Any address of it.
    pub address: IpAddr,
    /// How many leading bits count.
    pub prefix: u8,
}

impl Network {
    /// `10.0.0.0/8`, `fd00::/8`, or one address.
    pub fn new(text: &str) -> Option<Self> {
        let (address, prefix) = match text.split_once('/') {
            None => (text, None),
            Some((address, prefix)) => (address, Some(parse::whole(prefix)?)),
        };
        let address: IpAddr = address.parse().ok()?;
        let most = if address.is_ipv4() { 32 } else { 128 };
        let prefix = u8::try_from(prefix.unwrap_or(most)).ok()?;
        (u64::from(prefix) <= most).then_some(Self { address, prefix })
    }

    /// Does `address` lie in it? An IPv4 address mapped into IPv6 counts as IPv4.
    pub fn contains(self, address: IpAddr) -> bool {
        match (self.address.to_canonical(), address.to_canonical()) {
            (IpAddr::V4(ours), IpAddr::V4(theirs)) => {
                let prefix = if self.address.is_ipv6() { self.prefix.saturating_sub(96) } else { self.prefix };
                same_bits(ours.to_bits().into(), theirs.to_bits().into(), 32, prefix)
            }
            (IpAddr::V6(ours), IpAddr::V6(theirs)) => v6_same(ours, theirs, self.prefix),
            _ => false,
        }
    }
}

fn v6_same(ours: Ipv6Addr, theirs: Ipv6Addr, prefix: u8) -> bool {
    same_bits(ours.to_bits(), theirs.to_bits(), 128, prefix)
}

fn same_bits(a: u128, b: u128, width: u32, prefix: u8) -> bool {
    let shift = width - u32::from(prefix);
    prefix == 0 || (a ^ b) >> shift == 0
}

/// Which kind of server a `RedisUrl` names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RedisScheme {
    /// `redis://`
    Tcp,
    /// `rediss://`
    Tls,
    /// `redis+sentinel://`
    Sentinel,
    /// `redis+cluster://`
    Cluster,
    /// `unix://`
    Unix,
}

/// `GATEWAY_REDIS_URL`, looked at just far enough to refuse what could never work.
#[derive(Clone, Debug)]
pub struct RedisUrl {
    /// The whole URL, which may hold a password.
    pub url: Secret<String>,
    /// Which kind of server.
    pub scheme: RedisScheme,
    /// Does the URL itself hold a password?
    pub has_password: bool,
}

impl RedisUrl {
    /// # Errors
    /// A sentence that says what is wrong, without any part of the URL that could be secret.
    pub fn new(text: &str) -> Result<Self, String> {
        let (scheme, rest) = text.split_once("://").ok_or("has no scheme")?;
        let scheme = match scheme {
            "redis" => RedisScheme::Tcp,
            "rediss" => RedisScheme::Tls,
            "redis+sentinel" => RedisScheme::Sentinel,
            "redis+cluster" => RedisScheme::Cluster,
            "unix" => RedisScheme::Unix,
            _ => return Err("has an unknown scheme".to_owned()),
        };
        let has_password = match scheme {
            RedisScheme::Unix => {
                let (path, query) = rest.split_once('?').unwrap_or((rest, ""));
                if !path.starts_with('/') {
                    return Err("names no absolute socket path".to_owned());
                }
                query.split('&').any(|pair| pair.starts_with("pass="))
            }
            _ => check_authority(rest)?,
        };
        Ok(Self { url: Secret(text.to_owned()), scheme, has_password })
    }
}

/// Checks `[user[:password]@]host[:port][,host[:port]]…`; answers whether there is a password.
fn check_authority(rest: &str) -> Result<bool, String> {
    const RAW: &str = "holds a character that must be percent-encoded in a password \
                       (or put the password into GATEWAY_REDIS_PASSWORD)";
    let end = rest.find(['/', '?', '#']).unwrap_or(rest.len());
    let (authority, path) = rest.split_at(end);
    if path.contains('@') || path.contains('#') {
        return Err(RAW.to_owned());
    }
    let (credentials, hosts) = authority.rsplit_once('@').map_or((None, authority), |(c, h)| (Some(c), h));
    if let Some(credentials) = credentials
        && (credentials.contains(['@', ' ']) || !is_percent_encoded(credentials))
    {
        return Err(RAW.to_owned());
    }
    for host in hosts.split(',') {
        let (name, _) = split_port(host).ok_or("has a bad host or port")?;
        parse::host(name).ok_or("has a bad host or port")?;
    }
    Ok(credentials.is_some_and(|c| c.split_once(':').is_some_and(|(_, password)| !password.is_empty())))
}

/// Is every `%` followed by two hexadecimal digits?
fn is_percent_encoded(text: &str) -> bool {
    text.split('%').skip(1).all(|after| after.len() >= 2 && after.bytes().take(2).all(|b| b.is_ascii_hexdigit()))
}

/// `GATEWAY_REVOCATION_KEYS`: a template a kind, with its placeholders still in it; a kind that is
/// `None` is not asked.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RevocationKeys {
    /// Key of a revoked token.
    pub jti: Option<String>,
    /// Key of a revoked sign-in.
    pub sid: Option<String>,
    /// Key that holds the Unix time up to which a user's tokens are revoked.
    pub sub: Option<String>,
}

impl RevocationKeys {
    /// From the entries of the list.
    ///
    /// # Errors
    /// The entry that names a kind twice.
    pub fn from_entries(entries: Vec<(String, String)>) -> Result<Self, Option<String>> {
        let mut keys = Self::default();
        for (kind, template) in entries {
            let place = match kind.as_str() {
                "jti" => &mut keys.jti,
                "sid" => &mut keys.sid,
                _ => &mut keys.sub,
            };
            if place.is_some() {
                return Err(Some(format!("{kind}={template}")));
            }
            *place = Some(template);
        }
        Ok(keys)
    }

    /// One entry: `<kind>=<template>`, whose template holds that kind's own placeholder (else one
    /// key would speak for everybody) and no unknown one.
    pub fn entry(text: &str) -> Option<(String, String)> {
        let (kind, template) = text.split_once('=')?;
        let (kind, template) = (kind.trim(), template.trim());
        let is_kind = matches!(kind, "jti" | "sid" | "sub");
        let has_own = template.contains(&format!("{{{kind}}}"));
        (is_kind && has_own && has_only_placeholders(template)).then(|| (kind.to_owned(), template.to_owned()))
    }
}

fn has_only_placeholders(template: &str) -> bool {
    let mut rest = template;
    while let Some(open) = rest.find(['{', '}']) {
        let Some(close) = rest[open..].find('}').map(|n| open + n) else { return false };
        if !matches!(&rest[open..=close], "{prefix}" | "{jti}" | "{sid}" | "{sub}") {
            return false;
        }
        rest = &rest[close + 1..];
    }
    true
}

/// `GATEWAY_REDIS_PREFIX`: 1 to 64 bytes. No part of it behind a colon is a word that our own keys
/// have in that place: `a:live` would share keys with the channel `live:…` of the prefix `a`.
pub fn redis_prefix(text: &str) -> Option<String> {
    const OURS: [&str; 13] = [
        "beacon", "ch", "conf", "ctl", "fleet", "idem", "live", "lock", "log", "node", "revoked", "schema", "sessions",
    ];
    let prefix = parse::name(text, 64, b"_-.:")?;
    let is_mixed_up = prefix.split(':').skip(1).any(|part| OURS.contains(&part));
    (!is_mixed_up).then_some(prefix)
}

/// An entry of `GATEWAY_ANONYMOUS_CHANNELS`.
pub fn pattern(text: &str) -> Option<Pattern> {
    Pattern::new(text).ok()
}

/// `GATEWAY_JWT_JWKS_URL`: http or https, a host, no credentials (they would be in every log).
pub fn jwks_url(text: &str) -> Option<String> {
    let rest = text.strip_prefix("https://").or_else(|| text.strip_prefix("http://"))?;
    let authority = &rest[..rest.find(['/', '?', '#']).unwrap_or(rest.len())];
    let (host, _) = split_port(authority)?;
    parse::host(host)?;
    text.bytes().all(|b| b.is_ascii_graphic()).then(|| text.to_owned())
}
