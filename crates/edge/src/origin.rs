//! Decides whether a page of this origin may open a session, and which CORS headers every answer
//! to it carries, refusals included.
//!
//! A browser sends cookies for whoever asks, so with a cookie the origin is always checked; other
//! credentials are only sent by who has them, and are checked where origins are configured.

use std::fmt;
use std::str::FromStr;

use bytes::Bytes;
use http::header::{self, HeaderName};
use http::request::Parts;
use http::{HeaderMap, HeaderValue, Response, StatusCode};
use http_body_util::Full;
use hub::event::Wire;
use hub::refusal::{Refusal, RefusalCode};

use crate::address::{Scheme, Seen};
use crate::credential::Place;

/// How long a browser may remember the answer to a preflight: ten minutes, the most that all
/// browsers grant and short enough for a change of the configuration to arrive.
const PREFLIGHT_MAX_AGE: &str = "600";

/// Scheme, host and port of a page, in lower case, a default port filled in.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Origin {
    scheme: String,
    host: String,
    port: Option<u16>,
}

/// The text is no origin.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is no origin: expected scheme://host or scheme://host:port and nothing behind it")]
pub struct BadOrigin(pub String);

/// `GATEWAY_ALLOWED_ORIGINS`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum OriginPolicy {
    /// Unset: only cookies are checked, and only the same origin passes.
    #[default]
    SameOrigin,
    /// These, and the same origin.
    Listed(Vec<Origin>),
    /// `*`: every page, also one whose origin has no name (`null` from a sandboxed frame, `file://`),
    /// but never with a cookie (the configuration refuses the two together).
    Any,
}

/// The CORS headers of every answer to one request.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CorsHeaders {
    lines: Vec<(HeaderName, HeaderValue)>,
}

impl CorsHeaders {
    /// None: no origins are configured.
    pub fn none() -> Self {
        Self::default()
    }

    /// Name and value of each.
    pub fn lines(&self) -> impl Iterator<Item = (&HeaderName, &HeaderValue)> {
        self.lines.iter().map(|(name, value)| (name, value))
    }

    /// Adds them to an answer.
    pub fn apply(&self, headers: &mut HeaderMap) {
        for (name, value) in &self.lines {
            headers.append(name, value.clone());
        }
    }
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}://{}", self.scheme, self.host)?;
        match self.port {
            Some(port) if default_port(&self.scheme) != Some(port) => write!(f, ":{port}"),
            _ => Ok(()),
        }
    }
}

impl FromStr for Origin {
    type Err = BadOrigin;

    fn from_str(text: &str) -> Result<Self, BadOrigin> {
        Self::parse(text).ok_or_else(|| BadOrigin(text.to_owned()))
    }
}

impl Origin {
    fn parse(text: &str) -> Option<Self> {
        let (scheme, authority) = text.split_once("://")?;
        let is_scheme = scheme.starts_with(|c: char| c.is_ascii_alphabetic())
            && scheme.bytes().all(|b| b.is_ascii_alphanumeric() || b"+-.".contains(&b));
        let (host, port) = host_and_port(authority)?;
        let scheme = is_scheme.then(|| scheme.to_ascii_lowercase())?;
        let port = port.or(default_port(&scheme));
        Some(Self { scheme, host, port })
    }
}

fn default_port(scheme: &str) -> Option<u16> {
    [Scheme::Http, Scheme::Https].into_iter().find(|s| s.word() == scheme).map(Scheme::default_port)
}

/// Host in lower case and port; `None` where it is neither a name nor an address.
fn host_and_port(authority: &str) -> Option<(String, Option<u16>)> {
    let end = if authority.starts_with('[') {
        authority.find(']')? + 1
    } else {
        authority.find(':').unwrap_or(authority.len())
    };
    let (host, port) = authority.split_at(end);
    let is_host = match host.strip_prefix('[') {
        Some(v6) => v6.trim_end_matches(']').parse::<std::net::Ipv6Addr>().is_ok(),
        None => !host.is_empty() && host.bytes().all(|b| b.is_ascii_alphanumeric() || b"-._~".contains(&b)),
    };
    let port = match port.strip_prefix(':') {
        Some(digits) if digits.bytes().all(|b| b.is_ascii_digit()) => Some(digits.parse().ok()?),
        Some(_) => return None,
        None if port.is_empty() => None,
        None => return None,
    };
    is_host.then(|| (host.to_ascii_lowercase(), port))
}

/// What the `Origin` lines of a request say.
enum Named<'a> {
    Nothing,
    One(&'a HeaderValue, Origin),
    /// `null`, nonsense, or more than one.
    Unusable,
}

fn named(headers: &HeaderMap) -> Named<'_> {
    let mut lines = headers.get_all(header::ORIGIN).iter();
    match (lines.next(), lines.next()) {
        (None, _) => Named::Nothing,
        (Some(line), None) => match line.to_str().ok().and_then(Origin::parse) {
            Some(origin) => Named::One(line, origin),
            None => Named::Unusable,
        },
        _ => Named::Unusable,
    }
}

impl OriginPolicy {
    /// Reads the entries of `GATEWAY_ALLOWED_ORIGINS`; none at all is `SameOrigin`.
    ///
    /// # Errors
    /// `BadOrigin` names the first entry that is neither an origin nor `*`.
    pub fn parse<'a>(entries: impl IntoIterator<Item = &'a str>) -> Result<Self, BadOrigin> {
        let mut policy = Self::SameOrigin;
        for entry in entries {
            policy = match (entry, policy) {
                ("*", _) => Self::Any,
                (entry, Self::SameOrigin) => Self::Listed(vec![entry.parse()?]),
                (entry, Self::Listed(mut origins)) => {
                    origins.push(entry.parse()?);
                    Self::Listed(origins)
                }
                (entry, Self::Any) => entry.parse::<Origin>().map(|_| Self::Any)?,
            };
        }
        Ok(policy)
    }

    /// May this request open a session, as far as its origin goes? Costs nothing, so it comes
    /// before any work on the credential. `place`: where the credential stands, if anywhere.
    ///
    /// # Errors
    /// `origin_forbidden`, for good.
    pub fn check(&self, wire: Wire, head: &Parts, place: Option<Place>, seen: &Seen) -> Result<(), Refusal> {
        let has_cookie = place == Some(Place::Cookie);
        if !has_cookie && *self == Self::SameOrigin {
            return Ok(());
        }
        let may = match named(&head.headers) {
            Named::Unusable => *self == Self::Any && !has_cookie,
            Named::Nothing if !has_cookie => true,
            Named::Nothing => wire == Wire::Sse && is_fetched_by_the_same_origin(&head.headers),
            Named::One(_, origin) => self.names(&origin, has_cookie) || is_same(&origin, head, seen),
        };
        if may {
            return Ok(());
        }
        Err(Refusal::new(RefusalCode::OriginForbidden, "this origin may not connect (GATEWAY_ALLOWED_ORIGINS)"))
    }

    fn names(&self, origin: &Origin, has_cookie: bool) -> bool {
        match self {
            Self::SameOrigin => false,
            Self::Listed(origins) => origins.contains(origin),
            Self::Any => !has_cookie,
        }
    }

    /// The headers that let a page of an allowed origin read the answer, whatever the answer is.
    /// A foreign origin gets none but `Vary`.
    pub fn cors(&self, headers: &HeaderMap) -> CorsHeaders {
        if *self == Self::SameOrigin {
            return CorsHeaders::none();
        }
        let mut lines = vec![(header::VARY, HeaderValue::from_static("Origin"))];
        let reader = match named(headers) {
            Named::One(value, origin) if self.names(&origin, false) => Some(value.clone()),
            // No name to give back; nobody takes `*` for a page that sends cookies.
            Named::Unusable if *self == Self::Any => Some(HeaderValue::from_static("*")),
            _ => None,
        };
        if let Some(reader) = reader {
            lines.push((header::ACCESS_CONTROL_ALLOW_ORIGIN, reader));
            if let Self::Listed(_) = self {
                lines.push((header::ACCESS_CONTROL_ALLOW_CREDENTIALS, HeaderValue::from_static("true")));
            }
            lines.push((header::ACCESS_CONTROL_EXPOSE_HEADERS, HeaderValue::from_static("Retry-After")));
        }
        CorsHeaders { lines }
    }

    /// The answer to OPTIONS on a stream's path. Takes no place in any bucket.
    pub fn preflight(&self, headers: &HeaderMap) -> Response<Full<Bytes>> {
        let mut response = Response::new(Full::new(Bytes::new()));
        *response.status_mut() = StatusCode::NO_CONTENT;
        let out = response.headers_mut();
        out.insert(header::ALLOW, HeaderValue::from_static(crate::reject::ALLOW));
        let cors = self.cors(headers);
        cors.apply(out);
        if out.contains_key(header::ACCESS_CONTROL_ALLOW_ORIGIN) {
            for (name, value) in [
                (header::ACCESS_CONTROL_ALLOW_METHODS, "GET"),
                (header::ACCESS_CONTROL_ALLOW_HEADERS, "Authorization, Last-Event-ID, Cache-Control"),
                (header::ACCESS_CONTROL_MAX_AGE, PREFLIGHT_MAX_AGE),
            ] {
                out.insert(name, HeaderValue::from_static(value));
            }
        }
        response
    }
}

fn is_fetched_by_the_same_origin(headers: &HeaderMap) -> bool {
    let mut lines = headers.get_all("sec-fetch-site").iter();
    lines.next().is_some_and(|site| site == "same-origin") && lines.next().is_none()
}

/// Is it the origin under which the client sees us? Where the scheme is not known it is not
/// compared, and a port that is not written is the default of the page's own scheme.
fn is_same(origin: &Origin, head: &Parts, seen: &Seen) -> bool {
    let Some((host, port)) = asked_host(head, seen) else { return false };
    let port = port.or(match seen.scheme {
        Some(scheme) => Some(scheme.default_port()),
        None => default_port(&origin.scheme),
    });
    let is_scheme = seen.scheme.is_none_or(|s| s.word() == origin.scheme);
    is_scheme && origin.host == host && origin.port == port
}

/// What the client calls us: by the trusted proxy, the request target, or `Host`.
fn asked_host(head: &Parts, seen: &Seen) -> Option<(String, Option<u16>)> {
    if let Some(host) = &seen.host {
        return host_and_port(host);
    }
    if let Some(authority) = head.uri.authority() {
        return host_and_port(authority.as_str());
    }
    let mut lines = head.headers.get_all(header::HOST).iter();
    let host = lines.next()?.to_str().ok()?;
    if lines.next().is_some() {
        return None;
    }
    host_and_port(host)
}

#[cfg(test)]
mod tests;
