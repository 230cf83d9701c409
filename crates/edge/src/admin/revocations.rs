//! `POST /v1/revocations`: whom, since when, for how long. That every node ends the sessions in
//! question, and that newcomers are refused, is `hub`'s.

use std::ops::RangeInclusive;
use std::time::Duration;

use axum::extract::{Request, State};
use http::StatusCode;
use hub::auth::MAX_ID_BYTES;
use hub::backplane::{Revocation, RevocationKey};
use hub::refusal::{Refusal, RefusalCode};
use serde::Deserialize;

use super::guard::{Form, form};
use super::span::Span;
use super::{Problem, Shared};

/// Of `ttl`. A year at most, as for every duration of the configuration.
const TTLS: RangeInclusive<Duration> = Duration::from_secs(1)..=Duration::from_secs(366 * 86_400);

pub(super) async fn revoke(State(inner): State<Shared>, request: Request) -> Result<StatusCode, Problem> {
    let (head, body) = request.into_parts();
    if form(&head.headers)? != Form::Json {
        return Err(Refusal::new(RefusalCode::UnsupportedMediaType, "a revocation is application/json").into());
    }
    let (text, _memory) = inner.bodies.read(body).await?;
    let (revocation, ttl) = parse(text.as_str(), inner.state.clock.unix())?;
    match inner.state.gateway.revoke(revocation, ttl.unwrap_or(inner.state.revocation_ttl)).await {
        Ok(()) => Ok(StatusCode::NO_CONTENT),
        Err(_) => Err(inner.unavailable("the backplane does not answer; repeat the revocation").into()),
    }
}

#[derive(Deserialize)]
struct Body {
    jti: Option<String>,
    sid: Option<String>,
    sub: Option<String>,
    before: Option<u64>,
    ttl: Option<Span>,
}

fn bad(detail: impl Into<String>) -> Refusal {
    Refusal::new(RefusalCode::BadRequest, detail)
}

fn parse(text: &str, now: Duration) -> Result<(Revocation, Option<Duration>), Refusal> {
    let body: Body = serde_json::from_str(text).map_err(|e| bad(e.to_string()))?;
    let name = |name: String| match name.len() {
        1..=MAX_ID_BYTES => Ok(name.into()),
        _ => Err(bad(format!("jti, sid and sub have 1 to {MAX_ID_BYTES} bytes"))),
    };
    let key = match (body.jti, body.sid, body.sub) {
        (Some(jti), None, None) => RevocationKey::Jti(name(jti)?),
        (None, Some(sid), None) => RevocationKey::Sid(name(sid)?),
        (None, None, Some(sub)) => RevocationKey::Sub(name(sub)?),
        _ => return Err(bad("exactly one of jti, sid and sub is needed")),
    };
    if body.before.is_some() && !matches!(key, RevocationKey::Sub(_)) {
        return Err(bad("before goes with sub only"));
    }
    let before = body.before.unwrap_or(now.as_secs());
    Ok((Revocation { key, before }, body.ttl.as_ref().map(length).transpose()?))
}

fn length(ttl: &Span) -> Result<Duration, Refusal> {
    ttl.within(TTLS)
        .ok_or_else(|| bad("ttl is whole seconds or a duration as 30s, 20m, 12h or 30d, above zero, at most 366d"))
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOW: Duration = Duration::from_millis(1_700_000_000_900);

    #[test]
    fn each_kind_is_read_with_its_time() {
        let secs = Duration::from_secs;
        for (text, key, before, ttl) in [
            (r#"{"jti":"a"}"#, RevocationKey::Jti("a".into()), 1_700_000_000, None),
            (r#"{"sid":"b","ttl":60}"#, RevocationKey::Sid("b".into()), 1_700_000_000, Some(secs(60))),
            (r#"{"sub":"42","ttl":"12h"}"#, RevocationKey::Sub("42".into()), 1_700_000_000, Some(secs(43_200))),
            (r#"{"sub":"42","before":7,"ttl":"366d"}"#, RevocationKey::Sub("42".into()), 7, Some(*TTLS.end())),
        ] {
            assert_eq!(parse(text, NOW).unwrap(), (Revocation { key, before }, ttl), "{text}");
        }
    }

    #[test]
    fn what_is_unclear_revokes_nothing() {
        let long = "x".repeat(257);
        for text in [
            "{}",
            r#"{"jti":"a","sub":"b"}"#,
            r#"{"jti":""}"#,
            &format!(r#"{{"sub":"{long}"}}"#),
            r#"{"jti":1}"#,
            r#"{"jti":"a","before":7}"#,
            r#"{"sub":"a","before":-1}"#,
            r#"{"sub":"a","before":"now"}"#,
            r#"{"sub":"a","ttl":0}"#,
            r#"{"sub":"a","ttl":"0s"}"#,
            r#"{"sub":"a","ttl":"367d"}"#,
            r#"{"sub":"a","ttl":"30"}"#,
            r#"{"sub":"a","ttl":"s"}"#,
            r#"{"sub":"a","ttl":"500ms"}"#,
            r#"{"sub":"a","ttl":-1}"#,
            r#"{"sub":"a","ttl":"99999999999999999999d"}"#,
            "",
        ] {
            assert_eq!(parse(text, NOW).unwrap_err().code, RefusalCode::BadRequest, "{text}");
        }
        assert!(parse(&format!(r#"{{"sub":"{}"}}"#, &long[1..]), NOW).is_ok());
    }
}
