//! The only place where a refusal becomes HTTP: its status, its problem+json body, its headers;
//! and, where the client is a browser that could not see those, a soft answer that it can.
//!
//! Decides only how to say no. Why and for how long is in the `Refusal`.

use std::time::Duration;

use bytes::Bytes;
use http::request::Parts;
use http::{HeaderMap, HeaderValue, Response, StatusCode, header};
use http_body_util::Full;
use hub::close::{CloseReason, PlannedCodes};
use hub::event::{LAST_CHUNK, Wire};
use hub::message;
use hub::refusal::{Refusal, RefusalCode};
use serde::Serialize;

use crate::frame::{close_frame, empty_close_frame};
use crate::handshake::{WsRequest, sse_head, ws_head};
use crate::origin::CorsHeaders;

/// Methods of the public listener's paths. Another listener overwrites the header.
pub const ALLOW: &str = "GET, OPTIONS";

/// Delay of a soft refusal whose maker drew none, which is a mistake but must not become a client
/// that comes back at once.
const UNDRAWN_RETRY: Duration = Duration::from_secs(5);

/// `GATEWAY_SSE_REFUSE`: how a temporary refusal reaches an event stream's client.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum SseRefuse {
    /// Soft, unless an `Authorization` header shows a client that sees statuses.
    #[default]
    Auto,
    /// By its status, always. A native EventSource then gives up for ever.
    Status,
    /// Soft, always.
    Soft,
}

/// `GATEWAY_WS_REFUSE`: how a 401 reaches a WebSocket's client.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum WsRefuse {
    /// By a close code where an `Origin` header shows a browser, which sees no status.
    #[default]
    Auto,
    /// By its status, always.
    Status,
}

/// Both settings.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct RefuseModes {
    /// `GATEWAY_SSE_REFUSE`.
    pub sse: SseRefuse,
    /// `GATEWAY_WS_REFUSE`.
    pub ws: WsRefuse,
}

/// How a refusal is said.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Manner {
    /// `response`.
    Status,
    /// `soft_sse`.
    SoftSse,
    /// `soft_ws`.
    SoftWs,
}

/// How to refuse this request for a stream. `SoftSse` and `SoftWs` are for requests that passed
/// `sse_request` and `ws_request`: a request that is no handshake gets its status.
pub fn manner(refusal: &Refusal, wire: Wire, head: &Parts, modes: RefuseModes) -> Manner {
    let is_soft_sse = match modes.sse {
        SseRefuse::Auto => !head.headers.contains_key(header::AUTHORIZATION),
        SseRefuse::Status => false,
        SseRefuse::Soft => true,
    };
    let is_soft_ws = modes.ws == WsRefuse::Auto && head.headers.contains_key(header::ORIGIN);
    match wire {
        Wire::Sse if is_soft_sse && is_temporary(refusal.code) => Manner::SoftSse,
        Wire::Ws if is_soft_ws && status(refusal.code) == StatusCode::UNAUTHORIZED => Manner::SoftWs,
        _ => Manner::Status,
    }
}

fn is_temporary(code: RefusalCode) -> bool {
    matches!(status(code), StatusCode::TOO_MANY_REQUESTS | StatusCode::SERVICE_UNAVAILABLE)
}

/// The table of statuses.
pub fn status(code: RefusalCode) -> StatusCode {
    match code {
        RefusalCode::BadRequest => StatusCode::BAD_REQUEST,
        RefusalCode::TokenMissing
        | RefusalCode::TokenInvalid
        | RefusalCode::TokenExpired
        | RefusalCode::TokenRevoked => StatusCode::UNAUTHORIZED,
        RefusalCode::OriginForbidden | RefusalCode::Forbidden | RefusalCode::TooManyChannels => StatusCode::FORBIDDEN,
        RefusalCode::NotFound => StatusCode::NOT_FOUND,
        RefusalCode::MethodNotAllowed => StatusCode::METHOD_NOT_ALLOWED,
        RefusalCode::NotAcceptable => StatusCode::NOT_ACCEPTABLE,
        RefusalCode::HeadTimeout => StatusCode::REQUEST_TIMEOUT,
        RefusalCode::PayloadTooLarge => StatusCode::PAYLOAD_TOO_LARGE,
        RefusalCode::UnsupportedMediaType => StatusCode::UNSUPPORTED_MEDIA_TYPE,
        RefusalCode::UpgradeRequired => StatusCode::UPGRADE_REQUIRED,
        RefusalCode::TooManyRequests => StatusCode::TOO_MANY_REQUESTS,
        RefusalCode::HeadTooLarge => StatusCode::REQUEST_HEADER_FIELDS_TOO_LARGE,
        RefusalCode::Overloaded
        | RefusalCode::AtCapacity
        | RefusalCode::Draining
        | RefusalCode::AuthUnavailable
        | RefusalCode::Unavailable => StatusCode::SERVICE_UNAVAILABLE,
        RefusalCode::Internal => StatusCode::INTERNAL_SERVER_ERROR,
    }
}

/// RFC 9457. `type` says that `code` tells more than any page could.
#[derive(Serialize)]
struct Problem<'a> {
    r#type: &'static str,
    title: &'static str,
    status: u16,
    code: &'static str,
    detail: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    retry_after_ms: Option<u64>,
}

/// A refusal as a status. `draw`, uniform in `[0, 1)`, rounds `Retry-After` so that clients that see
/// only whole seconds stay as spread as the delays that were drawn for them.
pub fn response(refusal: &Refusal, cors: &CorsHeaders, draw: f64) -> Response<Full<Bytes>> {
    let mut response = Response::new(Full::new(problem(refusal)));
    *response.status_mut() = status(refusal.code);
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/problem+json"));
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-store"));
    headers.insert(header::CONNECTION, HeaderValue::from_static("close"));
    cors.apply(headers);
    if let Some(after) = refusal.retry_after {
        headers.insert(header::RETRY_AFTER, whole_seconds(after, draw).into());
    }
    explain(refusal.code, headers);
    response
}

/// The same, ready for a socket on which no HTTP library sits.
pub fn response_bytes(refusal: &Refusal, cors: &CorsHeaders, draw: f64) -> Bytes {
    let (head, _) = response(refusal, cors, draw).into_parts();
    let body = problem(refusal);
    let mut out = format!("HTTP/1.1 {} {}\r\n", head.status.as_str(), title(head.status)).into_bytes();
    for (name, value) in &head.headers {
        out.extend_from_slice(name.as_str().as_bytes());
        out.extend_from_slice(b": ");
        out.extend_from_slice(value.as_bytes());
        out.extend_from_slice(b"\r\n");
    }
    out.extend_from_slice(format!("content-length: {}\r\n\r\n", body.len()).as_bytes());
    out.extend_from_slice(&body);
    out.into()
}

fn title(status: StatusCode) -> &'static str {
    status.canonical_reason().unwrap_or("Refused")
}

fn problem(refusal: &Refusal) -> Bytes {
    let status = status(refusal.code);
    let problem = Problem {
        r#type: "about:blank",
        title: title(status),
        status: status.as_u16(),
        code: refusal.code.word(),
        detail: &refusal.detail,
        retry_after_ms: refusal.retry_after.map(ms),
    };
    serde_json::to_vec(&problem).expect("text and numbers are always JSON").into()
}

fn ms(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}

/// Stochastic rounding: 2.3 s is 3 in three of ten draws, else 2; never below 1.
fn whole_seconds(after: Duration, draw: f64) -> u64 {
    let round_up = f64::from(after.subsec_nanos()) / 1e9 + draw >= 1.0;
    after.as_secs().saturating_add(u64::from(round_up)).max(1)
}

/// The headers that a status or a code asks for.
fn explain(code: RefusalCode, headers: &mut HeaderMap) {
    let challenge = match code {
        RefusalCode::TokenMissing => "Bearer error=\"invalid_request\", error_description=\"token_missing\"",
        RefusalCode::TokenInvalid => "Bearer error=\"invalid_token\", error_description=\"token_invalid\"",
        RefusalCode::TokenExpired => "Bearer error=\"invalid_token\", error_description=\"token_expired\"",
        RefusalCode::TokenRevoked => "Bearer error=\"invalid_token\", error_description=\"token_revoked\"",
        RefusalCode::MethodNotAllowed => {
            headers.insert(header::ALLOW, HeaderValue::from_static(ALLOW));
            return;
        }
        RefusalCode::UpgradeRequired => {
            headers.insert(header::SEC_WEBSOCKET_VERSION, HeaderValue::from_static("13"));
            headers.insert(header::UPGRADE, HeaderValue::from_static("websocket"));
            // Who sends Upgrade names it in Connection too (RFC 9110, 7.8).
            headers.append(header::CONNECTION, HeaderValue::from_static("Upgrade"));
            return;
        }
        _ => return,
    };
    headers.insert(header::WWW_AUTHENTICATE, HeaderValue::from_static(challenge));
}

/// A temporary refusal that a native EventSource survives: the whole answer to an SSE request,
/// after which the connection ends. It comes back after the drawn delay with the cursor it had.
pub fn soft_sse(refusal: &Refusal, cors: &CorsHeaders, planned: PlannedCodes) -> Bytes {
    let reason = match refusal.code {
        RefusalCode::Draining => CloseReason::Drain,
        _ => CloseReason::Overload,
    };
    let after = refusal.retry_after.unwrap_or(UNDRAWN_RETRY);
    let bye = message::bye(reason, planned, after, None).on(Wire::Sse);
    [&sse_head(cors)[..], &bye, LAST_CHUNK].concat().into()
}

/// A 401 that a browser's WebSocket sees: the whole answer to a handshake (101, `bye`, close with
/// the refusal's code as its reason), after which only the peer's close is awaited. `after` is how
/// long a client should wait with its new token; drawn, for keys expire under many at once.
pub fn soft_ws(refusal: &Refusal, request: &WsRequest, cors: &CorsHeaders, after: Duration) -> Bytes {
    let reason = match refusal.code {
        RefusalCode::TokenRevoked => CloseReason::Revoked,
        _ => CloseReason::TokenExpired,
    };
    // Neither reason is one of the planned endings.
    let planned = PlannedCodes::default();
    let bye = message::bye(reason, planned, after, None).on(Wire::Ws);
    let close = reason.code(planned).map_or_else(empty_close_frame, |code| close_frame(code, refusal.code.word()));
    [&ws_head(request, cors)[..], &bye, &close].concat().into()
}

#[cfg(test)]
mod tests;
