//! Decides whether a request is a WebSocket handshake (RFC 6455) or may get an event stream, and
//! writes the head that answers it. Who may have one is `admit`'s question, after this one.

use aws_lc_rs::digest;
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use bytes::Bytes;
use http::request::Parts;
use http::{HeaderMap, HeaderName, Method, Version, header};
use hub::refusal::{Refusal, RefusalCode};

use crate::credential::offered_subprotocols;
use crate::origin::CorsHeaders;

/// The one subprotocol that is ever answered.
pub const SUBPROTOCOL: &str = "tidegate.v1";

/// RFC 6455, 1.3: appended to the key, so that only who knows WebSocket answers right.
const KEY_SUFFIX: &[u8] = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11";

/// A valid WebSocket handshake.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WsRequest {
    /// `Sec-WebSocket-Accept` of the answer.
    pub accept: String,
    /// `Sec-WebSocket-Protocol` of the answer. `None` where the client offered nothing we speak:
    /// it gets no such header, and decides itself whether to stay. Nothing it sent is echoed.
    pub protocol: Option<&'static str>,
}

/// Checks a WebSocket handshake. Extensions are never negotiated.
///
/// # Errors
/// All for good: `method_not_allowed`; `upgrade_required` where it is no handshake or not of
/// version 13; `bad_request` for the key, a body, or HTTP/1.0.
pub fn ws_request(head: &Parts) -> Result<WsRequest, Refusal> {
    only_get(head)?;
    let headers = &head.headers;
    if !has_token(headers, header::CONNECTION, b"upgrade") || !has_token(headers, header::UPGRADE, b"websocket") {
        return Err(Refusal::new(
            RefusalCode::UpgradeRequired,
            "this path speaks WebSocket: Connection: Upgrade and Upgrade: websocket",
        ));
    }
    if head.version < Version::HTTP_11 {
        return Err(bad_request("a WebSocket handshake needs HTTP/1.1"));
    }
    no_body(headers)?;
    if only_line(headers, header::SEC_WEBSOCKET_VERSION) != Some(b"13") {
        return Err(Refusal::new(RefusalCode::UpgradeRequired, "exactly one Sec-WebSocket-Version: 13 is spoken"));
    }
    let key = only_line(headers, header::SEC_WEBSOCKET_KEY).filter(|key| is_key(key));
    let key = key.ok_or_else(|| bad_request("exactly one Sec-WebSocket-Key of 16 bytes in base64 is needed"))?;
    let is_offered = offered_subprotocols(headers).any(|name| name == SUBPROTOCOL.as_bytes());
    Ok(WsRequest { accept: accept(key), protocol: is_offered.then_some(SUBPROTOCOL) })
}

/// Checks a request for an event stream.
///
/// # Errors
/// All for good: `method_not_allowed`; `bad_request` for a body or HTTP/1.0; `not_acceptable` where
/// `Accept` leaves `text/event-stream` out.
pub fn sse_request(head: &Parts) -> Result<(), Refusal> {
    only_get(head)?;
    if head.version < Version::HTTP_11 {
        // Events are kept as chunks, once for all who hear them; an older client would read their sizes as text.
        return Err(bad_request("an event stream needs HTTP/1.1, from a proxy too (nginx: proxy_http_version 1.1)"));
    }
    no_body(&head.headers)?;
    if !accepts_event_stream(&head.headers) {
        return Err(Refusal::new(RefusalCode::NotAcceptable, "this path answers text/event-stream only"));
    }
    Ok(())
}

fn bad_request(detail: &str) -> Refusal {
    Refusal::new(RefusalCode::BadRequest, detail)
}

fn only_get(head: &Parts) -> Result<(), Refusal> {
    match head.method {
        Method::GET => Ok(()),
        _ => Err(Refusal::new(RefusalCode::MethodNotAllowed, "only GET opens a stream")),
    }
}

/// Two hops that disagree on where a body ends would take its bytes for frames or a request. A
/// single `Content-Length: 0` says what is true of every GET and passes.
fn no_body(headers: &HeaderMap) -> Result<(), Refusal> {
    let mut lengths = headers.get_all(header::CONTENT_LENGTH).iter();
    let is_empty = lengths.next().is_none_or(|n| n == "0") && lengths.next().is_none();
    if is_empty && !headers.contains_key(header::TRANSFER_ENCODING) {
        return Ok(());
    }
    Err(bad_request("a request for a stream has no body"))
}

fn members(headers: &HeaderMap, name: HeaderName) -> impl Iterator<Item = &[u8]> {
    headers.get_all(name).iter().flat_map(|line| line.as_bytes().split(|b| *b == b',')).map(<[u8]>::trim_ascii)
}

fn has_token(headers: &HeaderMap, name: HeaderName, token: &[u8]) -> bool {
    members(headers, name).any(|member| member.eq_ignore_ascii_case(token))
}

fn only_line(headers: &HeaderMap, name: HeaderName) -> Option<&[u8]> {
    let mut lines = headers.get_all(name).iter();
    let line = lines.next()?.as_bytes();
    lines.next().is_none().then_some(line)
}

fn is_key(key: &[u8]) -> bool {
    key.len() == 24 && STANDARD.decode(key).is_ok_and(|raw| raw.len() == 16)
}

fn accept(key: &[u8]) -> String {
    let mut sha1 = digest::Context::new(&digest::SHA1_FOR_LEGACY_USE_ONLY);
    sha1.update(key);
    sha1.update(KEY_SUFFIX);
    STANDARD.encode(sha1.finish())
}

/// RFC 9110, 12.5.1: the most specific range that matches decides, and `q=0` excludes.
fn accepts_event_stream(headers: &HeaderMap) -> bool {
    let mut best = None;
    let mut is_said = false;
    for member in members(headers, header::ACCEPT).filter(|m| !m.is_empty()) {
        is_said = true;
        let mut parts = member.split(|b| *b == b';').map(<[u8]>::trim_ascii);
        let range = parts.next().unwrap_or_default().to_ascii_lowercase();
        let Some(rank) = [&b"*/*"[..], b"text/*", b"text/event-stream"].iter().position(|r| *r == range) else {
            continue;
        };
        let is_wanted = !parts.any(is_zero_weight);
        best = best.max(Some((rank, is_wanted)));
    }
    !is_said || best.is_some_and(|(_, is_wanted)| is_wanted)
}

fn is_zero_weight(parameter: &[u8]) -> bool {
    match parameter {
        [b'q' | b'Q', b'=', b'0', rest @ ..] => rest.iter().all(|b| matches!(b, b'.' | b'0')),
        _ => false,
    }
}

/// The head that turns the connection into a WebSocket.
pub fn ws_head(request: &WsRequest, cors: &CorsHeaders) -> Bytes {
    let mut out = Vec::with_capacity(256);
    out.extend_from_slice(b"HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n");
    line(&mut out, "Sec-WebSocket-Accept", request.accept.as_bytes());
    if let Some(protocol) = request.protocol {
        line(&mut out, "Sec-WebSocket-Protocol", protocol.as_bytes());
    }
    finish(out, cors)
}

/// The head of an event stream. What follows are HTTP/1.1 chunks, and the connection ends with it.
pub fn sse_head(cors: &CorsHeaders) -> Bytes {
    let mut out = Vec::with_capacity(256);
    out.extend_from_slice(
        b"HTTP/1.1 200 OK\r\n\
        Content-Type: text/event-stream\r\n\
        Cache-Control: no-store, no-transform\r\n\
        X-Accel-Buffering: no\r\n\
        Transfer-Encoding: chunked\r\n\
        Connection: close\r\n",
    );
    finish(out, cors)
}

fn line(out: &mut Vec<u8>, name: &str, value: &[u8]) {
    out.extend_from_slice(name.as_bytes());
    out.extend_from_slice(b": ");
    out.extend_from_slice(value);
    out.extend_from_slice(b"\r\n");
}

fn finish(mut out: Vec<u8>, cors: &CorsHeaders) -> Bytes {
    for (name, value) in cors.lines() {
        line(&mut out, name.as_str(), value.as_bytes());
    }
    out.extend_from_slice(b"\r\n");
    out.into()
}

#[cfg(test)]
mod tests {
    use http::Request;

    use super::*;
    use crate::origin::OriginPolicy;

    const GOOD: [(&str, &str); 4] = [
        ("connection", "Upgrade"),
        ("upgrade", "websocket"),
        ("sec-websocket-version", "13"),
        ("sec-websocket-key", "dGhlIHNhbXBsZSBub25jZQ=="),
    ];

    fn head(method: Method, lines: &[(&str, &str)]) -> Parts {
        let mut request = Request::builder().method(method).uri("/v1/ws");
        for (name, value) in lines {
            request = request.header(*name, *value);
        }
        request.body(()).unwrap().into_parts().0
    }

    /// The good handshake with the lines of these names replaced.
    fn with(lines: &[(&str, &str)]) -> Result<WsRequest, RefusalCode> {
        let kept = GOOD.iter().filter(|(name, _)| !lines.iter().any(|(other, _)| other == name));
        let all: Vec<_> = kept.chain(lines).copied().filter(|(_, value)| *value != "absent").collect();
        ws_request(&head(Method::GET, &all)).map_err(|refusal| refusal.code)
    }

    #[test]
    fn the_rfcs_own_key_gets_the_rfcs_own_answer() {
        assert_eq!(with(&[]).unwrap(), WsRequest { accept: "s3pPLMBiTxaQ9kYGzzhZRbK+xOo=".into(), protocol: None });
    }

    #[test]
    fn connection_is_a_list_of_tokens_over_all_lines_and_no_substring() {
        for good in [
            &[("connection", "keep-alive, Upgrade")][..],
            &[("connection", "keep-alive"), ("connection", "upgrade")],
            &[("connection", "UPGRADE"), ("upgrade", "WebSocket")],
            &[("upgrade", "h2c, websocket")],
        ] {
            assert!(with(good).is_ok(), "{good:?}");
        }
        for bad in [
            ("connection", "not-upgrade"),
            ("connection", "absent"),
            ("connection", ""),
            ("upgrade", "absent"),
            ("upgrade", "websocket2"),
        ] {
            assert_eq!(with(&[bad]), Err(RefusalCode::UpgradeRequired), "{bad:?}");
        }
    }

    #[test]
    fn a_wrong_method_version_or_key_is_refused_each_in_its_own_way() {
        for method in [Method::POST, Method::HEAD, Method::OPTIONS, Method::CONNECT] {
            assert_eq!(ws_request(&head(method, &GOOD)).unwrap_err().code, RefusalCode::MethodNotAllowed);
        }
        for version in [&["8"][..], &["absent"], &["13, 8"], &["13", "13"], &["013"], &[""]] {
            let lines: Vec<_> = version.iter().map(|v| ("sec-websocket-version", *v)).collect();
            assert_eq!(with(&lines), Err(RefusalCode::UpgradeRequired), "{version:?}");
        }
        let good = GOOD[3].1;
        for key in [
            &["absent"][..],
            &["abc"],
            &[good, good],
            &["dGhlIHNhbXBsZSBub25jZQ"],
            &["AAAA"],
            &["!GhlIHNhbXBsZSBub25jZQ=="],
            &["AAAAAAAAAAAAAAAAAAAAAAAA"],
        ] {
            let lines: Vec<_> = key.iter().map(|v| ("sec-websocket-key", *v)).collect();
            assert_eq!(with(&lines), Err(RefusalCode::BadRequest), "{key:?}");
        }
        let mut old = head(Method::GET, &GOOD);
        old.version = Version::HTTP_10;
        assert_eq!(ws_request(&old).unwrap_err().code, RefusalCode::BadRequest);
    }

    #[test]
    fn a_handshake_with_a_body_is_refused() {
        for body in [
            &[("content-length", "5")][..],
            &[("transfer-encoding", "chunked")],
            &[("content-length", "5"), ("transfer-encoding", "chunked")],
            &[("content-length", "0"), ("content-length", "0")],
            &[("content-length", "00")],
            &[("content-length", "-1")],
        ] {
            assert_eq!(with(body), Err(RefusalCode::BadRequest), "{body:?}");
            assert_eq!(sse_request(&head(Method::GET, body)).unwrap_err().code, RefusalCode::BadRequest);
        }
        assert!(with(&[("content-length", "0")]).is_ok());
    }

    #[test]
    fn only_our_subprotocol_is_answered_and_a_token_never_echoed() {
        let protocol = |lines: &[&str]| {
            let lines: Vec<_> = lines.iter().map(|v| ("sec-websocket-protocol", *v)).collect();
            let request = with(&lines).unwrap();
            let head = ws_head(&request, &CorsHeaders::none());
            let head = std::str::from_utf8(&head).unwrap();
            assert!(!head.contains("secret") && !head.contains("bearer") && !head.contains("graphql"));
            assert_eq!(
                head.matches("Sec-WebSocket-Protocol: tidegate.v1\r\n").count(),
                usize::from(request.protocol.is_some())
            );
            request.protocol
        };
        assert_eq!(protocol(&["tidegate.v1, bearer.secret"]), Some(SUBPROTOCOL));
        assert_eq!(protocol(&["bearer.secret", "tidegate.v1"]), Some(SUBPROTOCOL));
        assert_eq!(protocol(&["graphql-ws,tidegate.v1"]), Some(SUBPROTOCOL));
        assert_eq!(protocol(&["graphql-ws"]), None);
        assert_eq!(protocol(&["TIDEGATE.V1"]), None);
        assert_eq!(protocol(&["bearer.secret"]), None);
        assert_eq!(protocol(&[]), None);
    }

    #[test]
    fn the_heads_are_exactly_these() {
        let origin = Request::get("/").header("origin", "https://app.example").body(()).unwrap();
        let cors = OriginPolicy::parse(["https://app.example"]).unwrap().cors(origin.headers());
        let head = ws_head(&with(&[("sec-websocket-protocol", SUBPROTOCOL)]).unwrap(), &cors);
        assert_eq!(
            std::str::from_utf8(&head).unwrap(),
            "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\
            Sec-WebSocket-Accept: s3pPLMBiTxaQ9kYGzzhZRbK+xOo=\r\nSec-WebSocket-Protocol: tidegate.v1\r\n\
            vary: Origin\r\naccess-control-allow-origin: https://app.example\r\n\
            access-control-allow-credentials: true\r\naccess-control-expose-headers: Retry-After\r\n\r\n"
        );
        assert_eq!(
            std::str::from_utf8(&sse_head(&CorsHeaders::none())).unwrap(),
            "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nCache-Control: no-store, no-transform\r\n\
            X-Accel-Buffering: no\r\nTransfer-Encoding: chunked\r\nConnection: close\r\n\r\n"
        );
    }

    #[test]
    fn no_extension_is_ever_answered() {
        let request = with(&[("sec-websocket-extensions", "permessage-deflate; client_max_window_bits=99")]).unwrap();
        assert!(
            !String::from_utf8_lossy(&ws_head(&request, &CorsHeaders::none())).to_lowercase().contains("extensions")
        );
    }

    #[test]
    fn an_accept_that_leaves_event_streams_out_is_not_acceptable() {
        let answer = |accept: &[&str]| {
            let lines: Vec<_> = accept.iter().map(|v| ("accept", *v)).collect();
            sse_request(&head(Method::GET, &lines)).map_err(|refusal| refusal.code)
        };
        for good in [
            &[][..],
            &[""],
            &["text/event-stream"],
            &["Text/Event-Stream; charset=utf-8"],
            &["*/*"],
            &["application/json, */*;q=0.1"],
            &["application/json", "text/*"],
            &["text/event-stream, */*;q=0"],
        ] {
            assert_eq!(answer(good), Ok(()), "{good:?}");
        }
        for bad in [
            &["application/json"][..],
            &["text/html;q=1"],
            &["*/*, text/event-stream;q=0"],
            &["text/*;q=0.000, */*"],
            &["garbage"],
        ] {
            assert_eq!(answer(bad), Err(RefusalCode::NotAcceptable), "{bad:?}");
        }
        for method in [Method::HEAD, Method::POST] {
            assert_eq!(sse_request(&head(method, &[])).unwrap_err().code, RefusalCode::MethodNotAllowed);
        }
    }

    #[test]
    fn who_knows_no_chunks_gets_no_event_stream() {
        let mut old = head(Method::GET, &[]);
        old.version = Version::HTTP_10;
        assert_eq!(sse_request(&old).unwrap_err().code, RefusalCode::BadRequest);
    }
}
