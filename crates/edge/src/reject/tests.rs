use http::Request;
use http_body_util::BodyExt;
use serde_json::{Value, json};

use super::*;
use crate::handshake::ws_request;
use crate::origin::OriginPolicy;

fn head(lines: &[(&str, &str)]) -> Parts {
    let mut request = Request::get("/");
    for (name, value) in lines {
        request = request.header(*name, *value);
    }
    request.body(()).unwrap().into_parts().0
}

fn cors() -> CorsHeaders {
    OriginPolicy::parse(["https://app.example"]).unwrap().cors(&head(&[("origin", "https://app.example")]).headers)
}

fn answer(refusal: &Refusal, draw: f64) -> (http::response::Parts, Value) {
    let (head, body) = response(refusal, &cors(), draw).into_parts();
    let body = futures_util::FutureExt::now_or_never(body.collect()).unwrap().unwrap().to_bytes();
    (head, serde_json::from_slice(&body).unwrap())
}

#[test]
fn every_code_has_its_row_of_the_contract() {
    let want = |code| match code {
        RefusalCode::BadRequest => 400,
        RefusalCode::TokenMissing
        | RefusalCode::TokenInvalid
        | RefusalCode::TokenExpired
        | RefusalCode::TokenRevoked => 401,
        RefusalCode::OriginForbidden | RefusalCode::Forbidden | RefusalCode::TooManyChannels => 403,
        RefusalCode::NotFound => 404,
        RefusalCode::MethodNotAllowed => 405,
        RefusalCode::NotAcceptable => 406,
        RefusalCode::HeadTimeout => 408,
        RefusalCode::PayloadTooLarge => 413,
        RefusalCode::UnsupportedMediaType => 415,
        RefusalCode::UpgradeRequired => 426,
        RefusalCode::TooManyRequests => 429,
        RefusalCode::HeadTooLarge => 431,
        RefusalCode::Internal => 500,
        _ => 503,
    };
    for code in RefusalCode::ALL {
        let (head, body) = answer(&Refusal::new(code, "why \"not\""), 0.0);
        assert_eq!(head.status.as_u16(), want(code), "{code:?}");
        assert_eq!(head.headers["content-type"], "application/problem+json");
        assert_eq!(head.headers["connection"], "close");
        assert_eq!(head.headers["access-control-allow-origin"], "https://app.example");
        assert_eq!(head.headers["access-control-expose-headers"], "Retry-After");
        assert_eq!(head.headers.contains_key("www-authenticate"), want(code) == 401);
        let title = head.status.canonical_reason().unwrap();
        assert_eq!(
            body,
            json!({"type": "about:blank", "title": title, "status": want(code), "code": code.word(), "detail": "why \"not\""})
        );
    }
}

#[test]
fn a_status_explains_itself_in_its_headers() {
    let header = |code, name: &str| answer(&Refusal::new(code, ""), 0.0).0.headers[name].to_str().unwrap().to_owned();
    assert_eq!(header(RefusalCode::MethodNotAllowed, "allow"), "GET, OPTIONS");
    assert_eq!(header(RefusalCode::UpgradeRequired, "sec-websocket-version"), "13");
    assert_eq!(header(RefusalCode::UpgradeRequired, "upgrade"), "websocket");
    let connection = answer(&Refusal::new(RefusalCode::UpgradeRequired, ""), 0.0).0.headers;
    assert_eq!(connection.get_all("connection").iter().collect::<Vec<_>>(), ["close", "Upgrade"]);
    assert_eq!(
        header(RefusalCode::TokenExpired, "www-authenticate"),
        r#"Bearer error="invalid_token", error_description="token_expired""#
    );
    assert!(header(RefusalCode::TokenMissing, "www-authenticate").starts_with("Bearer error="));
}

#[test]
fn retry_after_is_rounded_by_the_draw_and_its_mean_is_the_delay() {
    let seconds = |ms, draw| {
        let refusal = Refusal::retry(RefusalCode::Overloaded, "full", Duration::from_millis(ms));
        let (head, body) = answer(&refusal, draw);
        assert_eq!(body["retry_after_ms"], ms);
        head.headers["retry-after"].to_str().unwrap().parse::<u64>().unwrap()
    };
    assert_eq!((seconds(2300, 0.0), seconds(2300, 0.69), seconds(2300, 0.71), seconds(2300, 0.999)), (2, 2, 3, 3));
    assert_eq!((seconds(2000, 0.0), seconds(2000, 0.999)), (2, 2));
    assert_eq!((seconds(0, 0.0), seconds(10, 0.0), seconds(10, 0.999)), (1, 1, 1));
    let sum: u64 = (0..1000).map(|i| whole_seconds(Duration::from_millis(7_250), f64::from(i) / 1000.0)).sum();
    assert_eq!(sum, 7_250);
    assert_eq!(whole_seconds(Duration::MAX, 0.999), u64::MAX);
}

#[test]
fn a_refusal_as_bytes_says_the_same_as_the_response() {
    let refusal = Refusal::retry(RefusalCode::AtCapacity, "full", Duration::from_millis(1500));
    let bytes = response_bytes(&refusal, &cors(), 0.0);
    let text = std::str::from_utf8(&bytes).unwrap();
    let (head, body) = text.split_once("\r\n\r\n").unwrap();
    assert!(head.starts_with("HTTP/1.1 503 Service Unavailable\r\n"));
    assert!(head.contains("\r\nconnection: close\r\n") && head.contains("\r\nretry-after: 1\r\n"));
    assert!(head.ends_with(&format!("\r\ncontent-length: {}", body.len())));
    assert_eq!(serde_json::from_str::<Value>(body).unwrap()["code"], "at_capacity");
}

#[test]
fn a_browser_is_refused_in_the_way_it_can_see() {
    let of = |code, wire, lines: &[_], modes| manner(&Refusal::new(code, ""), wire, &head(lines), modes);
    let auto = RefuseModes::default();
    let status = RefuseModes { sse: SseRefuse::Status, ws: WsRefuse::Status };
    let soft = RefuseModes { sse: SseRefuse::Soft, ws: WsRefuse::Auto };
    let bearer = [("authorization", "Bearer x")];
    let origin = [("origin", "https://app.example")];
    for code in RefusalCode::ALL {
        let n = super::status(code).as_u16();
        let sse = if n == 429 || n == 503 { Manner::SoftSse } else { Manner::Status };
        assert_eq!(of(code, Wire::Sse, &[], auto), sse, "{code:?}");
        assert_eq!(of(code, Wire::Sse, &bearer, auto), Manner::Status);
        assert_eq!(of(code, Wire::Sse, &[], status), Manner::Status);
        assert_eq!(of(code, Wire::Sse, &bearer, soft), sse);
        let ws = if n == 401 { Manner::SoftWs } else { Manner::Status };
        assert_eq!(of(code, Wire::Ws, &origin, auto), ws);
        assert_eq!(of(code, Wire::Ws, &[], auto), Manner::Status);
        assert_eq!(of(code, Wire::Ws, &origin, status), Manner::Status);
    }
}

#[test]
fn a_soft_sse_refusal_is_a_whole_stream_with_one_bye_and_its_retry() {
    let refusal = |code| Refusal::retry(code, "full", Duration::from_millis(2345));
    let say = |code| {
        let bytes = soft_sse(&refusal(code), &CorsHeaders::none(), PlannedCodes::default());
        let text = String::from_utf8(bytes.to_vec()).unwrap();
        let body = text.strip_prefix(std::str::from_utf8(&sse_head(&CorsHeaders::none())).unwrap()).unwrap().to_owned();
        let (length, rest) = body.split_once("\r\n").unwrap();
        let block = rest.strip_suffix("\r\n0\r\n\r\n").unwrap();
        assert_eq!(usize::from_str_radix(length, 16).unwrap(), block.len());
        let data = block.strip_prefix("retry: 2345\nevent: bye\ndata: ").unwrap().strip_suffix("\n\n").unwrap();
        serde_json::from_str::<Value>(data).unwrap()
    };
    assert_eq!(
        say(RefusalCode::Overloaded),
        json!({"type": "bye", "reason": "overload", "code": 1013, "reconnect": "after", "after_ms": 2345})
    );
    assert_eq!(say(RefusalCode::Draining)["reason"], "drain");
    assert_eq!(say(RefusalCode::TooManyRequests)["reason"], "overload");
}

#[test]
fn a_soft_ws_refusal_is_a_handshake_a_bye_and_a_close() {
    let handshake = head(&[
        ("connection", "upgrade"),
        ("upgrade", "websocket"),
        ("sec-websocket-version", "13"),
        ("sec-websocket-key", "dGhlIHNhbXBsZSBub25jZQ=="),
    ]);
    let request = ws_request(&handshake).unwrap();
    for (code, close, reconnect) in [
        (RefusalCode::TokenMissing, 4401_u16, "reauth"),
        (RefusalCode::TokenInvalid, 4401, "reauth"),
        (RefusalCode::TokenExpired, 4401, "reauth"),
        (RefusalCode::TokenRevoked, 4403, "never"),
    ] {
        let bytes = soft_ws(&Refusal::new(code, ""), &request, &CorsHeaders::none(), Duration::from_millis(777));
        let frames = bytes.strip_prefix(&ws_head(&request, &CorsHeaders::none())[..]).unwrap();
        let n_bye = usize::from(u16::from_be_bytes([frames[2], frames[3]]));
        let (first, n_bye) = if frames[1] < 126 { (2, usize::from(frames[1])) } else { (4, n_bye) };
        let bye: Value = serde_json::from_slice(&frames[first..first + n_bye]).unwrap();
        assert_eq!(
            (frames[0], &bye["type"], &bye["code"], &bye["reconnect"]),
            (0x81, &json!("bye"), &json!(close), &json!(reconnect))
        );
        assert_eq!(bye["after_ms"].as_u64(), (reconnect == "reauth").then_some(777));
        assert_eq!(frames[first + n_bye..], close_frame(close, code.word())[..]);
    }
}
