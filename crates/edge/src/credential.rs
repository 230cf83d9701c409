//! Decides which credential a request presents and what it asks to hear, from its head alone.
//! The first place that holds anything decides; the others are never tried. Whether the credential
//! is any good is the hub's to say, whether the origin may use it is `origin`'s.

use std::borrow::Cow;
use std::fmt;

use http::request::Parts;
use http::{HeaderMap, Uri, header};
use hub::cursor::Since;
use hub::refusal::{Refusal, RefusalCode};

/// The subprotocol that carries a token behind it.
const BEARER_PREFIX: &[u8] = b"bearer.";
const QUERY_TOKEN: &str = "access_token";
const QUERY_CHANNEL: &str = "channel";
const QUERY_SINCE: &str = "last_event_id";

/// Where a credential stood, in order of precedence.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Place {
    /// `Authorization: Bearer <jwt>`.
    Header,
    /// `Sec-WebSocket-Protocol: tidegate.v1, bearer.<jwt>`.
    Subprotocol,
    /// The configured cookie.
    Cookie,
    /// `?access_token=<jwt>`.
    Query,
}

/// A token as it was presented. `Debug` hides it; no other way leads to a log.
#[derive(Clone, PartialEq, Eq)]
pub struct Token(String);

impl Token {
    /// For verification only.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Token(hidden)")
    }
}

/// What a request presents.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Credential {
    /// Nothing at all: perhaps an anonymous session.
    None,
    /// Something to verify.
    Token {
        /// Where it stood.
        place: Place,
        /// Not empty, visible ASCII.
        token: Token,
    },
    /// Something that cannot be a token: empty, another scheme, foreign bytes. It is refused as a
    /// bad credential, and never taken for an anonymous request.
    Unusable {
        /// Where it stood.
        place: Place,
    },
}

impl Credential {
    /// Where it stood, if anywhere.
    pub fn place(&self) -> Option<Place> {
        match self {
            Credential::None => None,
            Credential::Token { place, .. } | Credential::Unusable { place } => Some(*place),
        }
    }

    /// The token to verify; `None`: the request presents nothing.
    ///
    /// # Errors
    /// `token_invalid`, for good.
    pub fn token(&self) -> Result<Option<&Token>, Refusal> {
        match self {
            Credential::None => Ok(None),
            Credential::Token { token, .. } => Ok(Some(token)),
            Credential::Unusable { .. } => {
                Err(Refusal::new(RefusalCode::TokenInvalid, "the credential is empty or no bearer token"))
            }
        }
    }

    fn new(place: Place, raw: &[u8]) -> Self {
        match std::str::from_utf8(raw) {
            Ok(text) if !text.is_empty() && text.bytes().all(|b| b.is_ascii_graphic()) => {
                Credential::Token { place, token: Token(text.to_owned()) }
            }
            _ => Credential::Unusable { place },
        }
    }
}

/// `GATEWAY_AUTH_QUERY`: may a token stand in the query?
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum QueryToken {
    /// Yes; a native EventSource has no other way.
    #[default]
    On,
    /// It is not looked at.
    Off,
}

/// Which places are looked at beyond the first two.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CredentialConfig {
    /// `GATEWAY_AUTH_COOKIE`; `None`: cookies are not looked at.
    pub cookie: Option<String>,
    /// `GATEWAY_AUTH_QUERY`.
    pub query: QueryToken,
}

/// What a request for a stream says beside the handshake.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StreamRequest {
    /// Who it claims to be.
    pub credential: Credential,
    /// `?channel=`, decoded, in order, unchecked; what was no UTF-8 is no channel name any more.
    pub channels: Vec<String>,
    /// From where it wants to go on.
    pub since: Since,
}

impl StreamRequest {
    /// Reads a head. Linear in its size.
    ///
    /// # Errors
    /// `bad_request`: two credentials in one place.
    pub fn read(head: &Parts, config: &CredentialConfig) -> Result<Self, Refusal> {
        let query = head.uri.query().unwrap_or_default();
        Ok(Self {
            credential: credential(&head.headers, query, config)?,
            channels: values(query, QUERY_CHANNEL).map(|v| String::from_utf8_lossy(&v).into_owned()).collect(),
            since: since(&head.headers, query),
        })
    }
}

fn credential(headers: &HeaderMap, query: &str, config: &CredentialConfig) -> Result<Credential, Refusal> {
    if let Some(line) = only(headers.get_all(header::AUTHORIZATION), "Authorization")? {
        let token = bearer(line.as_bytes()).unwrap_or_default();
        return Ok(Credential::new(Place::Header, token));
    }
    let bearers = offered_subprotocols(headers).filter_map(|name| name.strip_prefix(BEARER_PREFIX));
    if let Some(token) = only(bearers, "bearer. subprotocol")? {
        return Ok(Credential::new(Place::Subprotocol, token));
    }
    if let Some(value) = config.cookie.as_deref().and_then(|name| cookie(headers, name)) {
        return Ok(Credential::new(Place::Cookie, value));
    }
    if config.query == QueryToken::On
        && let Some(value) = only(values(query, QUERY_TOKEN), QUERY_TOKEN)?
    {
        return Ok(Credential::new(Place::Query, &value));
    }
    Ok(Credential::None)
}

fn only<T>(found: impl IntoIterator<Item = T>, what: &str) -> Result<Option<T>, Refusal> {
    let mut found = found.into_iter();
    match (found.next(), found.next()) {
        (_, Some(_)) => Err(Refusal::new(RefusalCode::BadRequest, format!("more than one {what}"))),
        (first, None) => Ok(first),
    }
}

fn bearer(value: &[u8]) -> Option<&[u8]> {
    let (scheme, rest) = value.split_at_checked(6)?;
    (scheme.eq_ignore_ascii_case(b"bearer") && rest.starts_with(b" ")).then(|| rest.trim_ascii())
}

/// The names in all `Sec-WebSocket-Protocol` lines, in order.
pub(crate) fn offered_subprotocols(headers: &HeaderMap) -> impl Iterator<Item = &[u8]> {
    headers
        .get_all(header::SEC_WEBSOCKET_PROTOCOL)
        .iter()
        .flat_map(|line| line.as_bytes().split(|b| *b == b','))
        .map(<[u8]>::trim_ascii)
}

/// The first cookie of that name: browsers put the most specific one first.
fn cookie<'a>(headers: &'a HeaderMap, name: &str) -> Option<&'a [u8]> {
    let pairs = headers.get_all(header::COOKIE).iter().flat_map(|line| line.as_bytes().split(|b| *b == b';'));
    let value =
        pairs.map(<[u8]>::trim_ascii).find_map(|pair| pair.strip_prefix(name.as_bytes())?.strip_prefix(b"="))?;
    let unquoted = value.strip_prefix(b"\"").and_then(|v| v.strip_suffix(b"\""));
    Some(unquoted.unwrap_or(value))
}

/// The header wins, for a browser reconnects to a URL that still holds the first cursor. An empty
/// one says nothing; two different answers are no answer.
fn since(headers: &HeaderMap, query: &str) -> Since {
    let lines = headers.get_all("last-event-id").iter().map(|line| line.as_bytes());
    one_since(lines).or_else(|| one_since(values(query, QUERY_SINCE))).unwrap_or_default()
}

fn one_since(found: impl Iterator<Item = impl AsRef<[u8]>>) -> Option<Since> {
    let mut found = found.filter(|raw| !raw.as_ref().is_empty());
    let first = found.next()?;
    Some(match found.next() {
        None => Since::parse(first.as_ref()),
        Some(_) => Since::Unknown,
    })
}

/// The decoded values of a parameter. Names match exactly, once decoded.
fn values<'a>(query: &'a str, name: &'static str) -> impl Iterator<Item = Cow<'a, [u8]>> {
    query.split('&').filter_map(move |pair| {
        let (key, value) = pair.split_once('=').unwrap_or((pair, ""));
        (*percent_decoded(key) == *name.as_bytes()).then(|| percent_decoded(value))
    })
}

/// What is no escape stands for itself. So does `+`: channel names may hold one, and nothing that
/// is read here may hold a space.
fn percent_decoded(text: &str) -> Cow<'_, [u8]> {
    let raw = text.as_bytes();
    if !raw.contains(&b'%') {
        return Cow::Borrowed(raw);
    }
    let mut out = Vec::with_capacity(raw.len());
    let mut i = 0;
    while i < raw.len() {
        let escaped = match raw[i..] {
            [b'%', high, low, ..] => hex(high).zip(hex(low)).map(|(high, low)| high << 4 | low),
            _ => None,
        };
        out.push(escaped.unwrap_or(raw[i]));
        i += if escaped.is_some() { 3 } else { 1 };
    }
    Cow::Owned(out)
}

fn hex(b: u8) -> Option<u8> {
    char::from(b).to_digit(16).and_then(|d| u8::try_from(d).ok())
}

/// Path and query for logs and plugins, without anything that is or looks like a token: parameters
/// called `access_token` in any letter case and encoding, and values that begin like a JWT. One
/// that was put into the path by mistake takes the path with it.
pub fn redacted_path(uri: &Uri) -> String {
    let path = if uri.path().split('/').any(is_secret) { "(hidden)" } else { uri.path() };
    let Some(query) = uri.query() else { return path.to_owned() };
    let kept: Vec<&str> = query.split('&').filter(|pair| !is_secret(pair)).collect();
    if kept.is_empty() {
        return path.to_owned();
    }
    format!("{path}?{}", kept.join("&"))
}

/// Rather too much than too little: encodings of encodings are undone, and some software takes `;`
/// for `&`.
fn is_secret(pair: &str) -> bool {
    let mut plain = pair.to_ascii_lowercase();
    for _ in 0..4 {
        let Cow::Owned(decoded) = percent_decoded(&plain) else { break };
        plain = String::from_utf8_lossy(&decoded).to_ascii_lowercase();
    }
    // "eyJ" is how base64 of `{"` begins, and so every JWT.
    plain.contains(QUERY_TOKEN)
        || plain.split(['=', ';', ' ', ',']).any(|part| part.starts_with("eyj") && part.contains('.'))
}

#[cfg(test)]
mod tests;
