//! Who may call the admin API, and what a call's body may be. With a key the key decides. Without
//! one only this host can connect (the configuration sees to that), and what is left to keep out
//! are web pages in a browser here: a page names itself in `Origin`, and a page that made its own
//! name point here (DNS rebinding) names itself in `Host`.

use std::net::{IpAddr, Ipv6Addr};

use aws_lc_rs::{constant_time, digest};
use axum::extract::{Request, State};
use axum::middleware::Next;
use axum::response::Response;
use http::header::{AUTHORIZATION, CONTENT_ENCODING, CONTENT_TYPE, HOST, ORIGIN};
use http::{HeaderMap, Uri};
use hub::refusal::{Refusal, RefusalCode};

use super::{Problem, Shared};
use crate::origin::Origin;

/// What needs no key: it says nothing about the node, and a browser cannot send one for a page.
const OPEN_PATHS: [&str; 3] = ["/console", "/v1/client.js", "/v1/openapi.json"];

/// `GATEWAY_ADMIN_KEY`, kept as its SHA-256 so that it cannot be printed and that comparing takes
/// the same time whatever is offered.
#[derive(Clone)]
pub struct AdminKey(digest::Digest);

impl AdminKey {
    /// Forgets `key` itself.
    pub fn new(key: &str) -> Self {
        Self(digest::digest(&digest::SHA256, key.as_bytes()))
    }

    fn is(&self, offered: &[u8]) -> bool {
        let offered = digest::digest(&digest::SHA256, offered);
        constant_time::verify_slices_are_equal(self.0.as_ref(), offered.as_ref()).is_ok()
    }
}

impl std::fmt::Debug for AdminKey {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("[hidden]")
    }
}

/// Lets a call through or answers it.
pub(super) async fn check(State(inner): State<Shared>, request: Request, next: Next) -> Result<Response, Problem> {
    match &inner.state.key {
        Some(_) if OPEN_PATHS.contains(&request.uri().path()) => {}
        Some(key) => check_key(key, request.headers())?,
        None => check_browser(request.uri(), request.headers(), &inner.state.hosts)?,
    }
    Ok(next.run(request).await)
}

fn check_key(key: &AdminKey, headers: &HeaderMap) -> Result<(), Refusal> {
    let mut lines = headers.get_all(AUTHORIZATION).iter();
    let (line, another) = (lines.next(), lines.next());
    let Some(line) = line else {
        return Err(Refusal::new(
            RefusalCode::TokenMissing,
            "the admin API needs Authorization: Bearer $GATEWAY_ADMIN_KEY",
        ));
    };
    let offered = match line.as_bytes().split_at_checked(7) {
        Some((scheme, key)) if scheme.eq_ignore_ascii_case(b"bearer ") => Some(key.trim_ascii()),
        _ => None,
    };
    match offered {
        Some(offered) if another.is_none() && key.is(offered) => Ok(()),
        _ => Err(Refusal::new(RefusalCode::TokenInvalid, "this is not the admin key")),
    }
}

fn check_browser(uri: &Uri, headers: &HeaderMap, hosts: &[String]) -> Result<(), Refusal> {
    let mut lines = headers.get_all(HOST).iter();
    let (line, another) = (lines.next(), lines.next());
    let host = match uri.authority() {
        Some(authority) => Some(authority.as_str()),
        None => line.and_then(|line| line.to_str().ok()),
    };
    let Some(host) = host.filter(|host| another.is_none() && is_own_host(host, hosts)) else {
        return Err(Refusal::new(
            RefusalCode::Forbidden,
            "Host must be an IP address, localhost or a name of GATEWAY_ADMIN_HOSTS, or set GATEWAY_ADMIN_KEY",
        ));
    };
    let mut origins = headers.get_all(ORIGIN).iter();
    if !origins.all(|origin| origin.to_str().is_ok_and(|origin| is_same_origin(origin, host))) {
        return Err(Refusal::new(RefusalCode::OriginForbidden, "pages of other origins may not call the admin API"));
    }
    Ok(())
}

/// `host` with or without a port.
fn is_own_host(host: &str, hosts: &[String]) -> bool {
    if let Some(rest) = host.strip_prefix('[') {
        return rest.split_once(']').is_some_and(|(v6, port)| v6.parse::<Ipv6Addr>().is_ok() && is_port(port));
    }
    let at = host.find(':').unwrap_or(host.len());
    let (name, port) = host.split_at(at);
    let is_known = name.parse::<IpAddr>().is_ok()
        || name.eq_ignore_ascii_case("localhost")
        || hosts.iter().any(|known| known.eq_ignore_ascii_case(name));
    is_known && is_port(port)
}

fn is_port(text: &str) -> bool {
    text.is_empty() || text.strip_prefix(':').is_some_and(|digits| digits.parse::<u16>().is_ok())
}

/// The scheme cannot be told here (a proxy may speak TLS for us): the page's own is taken for ours.
fn is_same_origin(origin: &str, host: &str) -> bool {
    let Some((scheme, _)) = origin.split_once("://") else { return false };
    match (origin.parse::<Origin>(), format!("{scheme}://{host}").parse::<Origin>()) {
        (Ok(page), Ok(ours)) => page == ours,
        _ => false,
    }
}

/// What a body may be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Form {
    /// `application/json`
    Json,
    /// `application/x-ndjson`
    Lines,
}

/// The form that `Content-Type` names. A browser cannot send either across origins without asking.
pub(super) fn form(headers: &HeaderMap) -> Result<Form, Refusal> {
    let unsupported = |detail| Refusal::new(RefusalCode::UnsupportedMediaType, detail);
    let coding = headers.get(CONTENT_ENCODING);
    if coding.is_some_and(|coding| !coding.as_bytes().eq_ignore_ascii_case(b"identity")) {
        return Err(unsupported("send the body as it is, without Content-Encoding"));
    }
    let line = headers.get(CONTENT_TYPE).and_then(|line| line.to_str().ok()).unwrap_or_default();
    match line.split(';').next().unwrap_or_default().trim() {
        kind if kind.eq_ignore_ascii_case("application/json") => Ok(Form::Json),
        kind if kind.eq_ignore_ascii_case("application/x-ndjson") => Ok(Form::Lines),
        _ => Err(unsupported("Content-Type must be application/json or application/x-ndjson")),
    }
}

#[cfg(test)]
mod tests {
    use http::{HeaderName, HeaderValue};

    use super::*;

    fn headers(lines: &[(HeaderName, &str)]) -> HeaderMap {
        let mut headers = HeaderMap::new();
        for (name, value) in lines {
            headers.append(name, HeaderValue::from_str(value).unwrap());
        }
        headers
    }

    fn code<T: std::fmt::Debug>(result: Result<T, Refusal>) -> &'static str {
        result.map_or_else(|refusal| refusal.code.word(), |_| "ok")
    }

    #[test]
    fn only_the_whole_key_opens() {
        let key = AdminKey::new("open-sesame-open-sesame");
        let cases: [(&[&str], &str); 10] = [
            (&["Bearer open-sesame-open-sesame"], "ok"),
            (&["bearer open-sesame-open-sesame"], "ok"),
            (&[], "token_missing"),
            (&["Bearer open-sesame-open-sesam"], "token_invalid"),
            (&["Bearer open-sesame-open-sesamee"], "token_invalid"),
            (&["Bearer Open-sesame-open-sesame"], "token_invalid"),
            (&["Bearer "], "token_invalid"),
            (&["Bearer"], "token_invalid"),
            (&["Basic open-sesame-open-sesame"], "token_invalid"),
            (&["Bearer open-sesame-open-sesame", "Bearer x"], "token_invalid"),
        ];
        for (lines, expected) in cases {
            let lines: Vec<_> = lines.iter().map(|line| (AUTHORIZATION, *line)).collect();
            assert_eq!(code(check_key(&key, &headers(&lines))), expected, "{lines:?}");
        }
        assert_eq!(format!("{key:?}"), "[hidden]");
    }

    #[test]
    fn without_a_key_a_name_that_somebody_pointed_here_is_refused() {
        let hosts = ["admin.internal".to_owned()];
        for own in [
            "127.0.0.1",
            "127.0.0.1:8081",
            "[::1]:8081",
            "[::1]",
            "10.1.2.3:80",
            "localhost",
            "LocalHost:8081",
            "admin.internal",
            "Admin.Internal:443",
        ] {
            let headers = headers(&[(HOST, own)]);
            assert_eq!(code(check_browser(&Uri::from_static("/v1/drain"), &headers, &hosts)), "ok", "{own}");
        }
        for foreign in [
            "evil.example",
            "localhost.evil.example",
            "127.0.0.1.evil.example",
            "localhost.",
            "admin.internal.evil",
            "",
            "localhost:x",
            "[::1",
            "[::1]x",
            "::1",
            "localhost:80:80",
            "localhost@evil.example",
        ] {
            let headers = headers(&[(HOST, foreign)]);
            assert_eq!(code(check_browser(&Uri::from_static("/"), &headers, &hosts)), "forbidden", "{foreign}");
        }
        let twice = headers(&[(HOST, "localhost"), (HOST, "localhost")]);
        assert_eq!(code(check_browser(&Uri::from_static("/"), &twice, &hosts)), "forbidden");
        assert_eq!(code(check_browser(&Uri::from_static("/"), &HeaderMap::new(), &hosts)), "forbidden");
        let target = Uri::from_static("http://evil.example/v1/drain");
        assert_eq!(code(check_browser(&target, &headers(&[(HOST, "localhost")]), &hosts)), "forbidden");
    }

    #[test]
    fn without_a_key_pages_of_other_origins_are_refused() {
        let cases = [
            ("127.0.0.1:8081", "http://127.0.0.1:8081", "ok"),
            ("localhost", "http://localhost", "ok"),
            ("localhost:80", "http://localhost", "ok"),
            ("localhost", "https://localhost:443", "ok"),
            ("[::1]:8081", "http://[::1]:8081", "ok"),
            ("127.0.0.1:8081", "http://127.0.0.1:8080", "origin_forbidden"),
            ("127.0.0.1:8081", "http://localhost:8081", "origin_forbidden"),
            ("127.0.0.1:8081", "https://evil.example", "origin_forbidden"),
            ("127.0.0.1:8081", "null", "origin_forbidden"),
            ("127.0.0.1:8081", "", "origin_forbidden"),
        ];
        for (host, origin, expected) in cases {
            let headers = headers(&[(HOST, host), (ORIGIN, origin)]);
            assert_eq!(code(check_browser(&Uri::from_static("/"), &headers, &[])), expected, "{origin} at {host}");
        }
    }

    #[test]
    fn a_body_must_say_that_it_is_json() {
        let cases = [
            ("application/json", Ok(Form::Json)),
            ("Application/JSON; charset=utf-8", Ok(Form::Json)),
            ("application/x-ndjson", Ok(Form::Lines)),
            ("text/plain", Err("unsupported_media_type")),
            ("application/x-www-form-urlencoded", Err("unsupported_media_type")),
            ("text/plain; application/json", Err("unsupported_media_type")),
            ("", Err("unsupported_media_type")),
        ];
        for (line, expected) in cases {
            let found = form(&headers(&[(CONTENT_TYPE, line)])).map_err(|refusal| refusal.code.word());
            assert_eq!(found, expected, "{line}");
        }
        assert_eq!(code(form(&HeaderMap::new())), "unsupported_media_type");
        let packed = headers(&[(CONTENT_TYPE, "application/json"), (CONTENT_ENCODING, "gzip")]);
        assert_eq!(code(form(&packed)), "unsupported_media_type");
    }
}
