//! `POST /v1/publish` and `/v1/publish/batch`: what is asked, in which order it is done, and what
//! came of each part. A part that is bad, or that a plugin refuses, fails alone. When the backplane
//! goes away in the middle, nothing further is tried: a later event must not overtake one that
//! will be repeated.

use std::borrow::Cow;
use std::ops::Not;
use std::sync::Arc;

use axum::Json;
use axum::extract::{Request, State};
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use hub::backplane::{MAX_KEY_BYTES, Publish, Published};
use hub::channel::{Channel, EventName};
use hub::hub::PublishError;
use hub::refusal::{Refusal, RefusalCode};
use serde::ser::SerializeStruct;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use serde_json::value::RawValue;

use super::guard::{Form, form};
use super::{Inner, Problem, Shared};

/// Events in one call, every channel of every item counted: bounds the answer and the time.
const MAX_EVENTS: usize = 10_000;

/// `POST /v1/publish`
pub(super) async fn one(State(inner): State<Shared>, request: Request) -> Result<Response, Problem> {
    let (head, body) = request.into_parts();
    if form(&head.headers)? != Form::Json {
        return Err(Refusal::new(RefusalCode::UnsupportedMediaType, "one event is application/json").into());
    }
    let (text, _memory) = inner.bodies.read(body).await?;
    let asked = Asked::parse(text.as_str())?;
    check_number(asked.n_events())?;
    match Run::new(&inner).item(asked).await {
        Outcome::Event(OfEvent::Failed { error }) => Err(error.into()),
        outcome => match only_unavailable(std::slice::from_ref(&outcome)) {
            Some(refusal) => Err(refusal.into()),
            None => Ok(Json(outcome).into_response()),
        },
    }
}

/// `POST /v1/publish/batch`
pub(super) async fn batch(State(inner): State<Shared>, request: Request) -> Result<Response, Problem> {
    let (head, body) = request.into_parts();
    let form = form(&head.headers)?;
    let (text, _memory) = inner.bodies.read(body).await?;
    let items = items(form, text.as_str())?;
    check_number(items.iter().map(|item| item.as_ref().map_or(1, Asked::n_events)).sum())?;
    let mut run = Run::new(&inner);
    let mut results = Vec::with_capacity(items.len());
    for item in items {
        results.push(match item {
            Ok(asked) => run.item(asked).await,
            Err(error) => Outcome::Event(OfEvent::Failed { error }),
        });
    }
    match only_unavailable(&results) {
        Some(refusal) => Err(refusal.into()),
        None => Ok(Json(Results { results }).into_response()),
    }
}

/// The body of one publish, as it is written.
#[derive(Deserialize)]
struct Body<'a> {
    #[serde(borrow)]
    channel: Option<Cow<'a, str>>,
    #[serde(borrow)]
    channels: Option<Vec<Cow<'a, str>>>,
    // Not read as an option: `null` is data.
    #[serde(borrow, default, deserialize_with = "written")]
    data: Option<&'a RawValue>,
    #[serde(borrow)]
    event: Option<Cow<'a, str>>,
    ephemeral: Option<bool>,
    #[serde(borrow)]
    idempotency_key: Option<Cow<'a, str>>,
}

fn written<'de, D: Deserializer<'de>>(text: D) -> Result<Option<&'de RawValue>, D::Error> {
    <&RawValue>::deserialize(text).map(Some)
}

/// One publish that may be tried.
#[derive(Clone, Debug)]
struct Asked {
    to: To,
    name: Option<EventName>,
    data: Bytes,
    ephemeral: bool,
    key: Option<Arc<str>>,
}

/// Where it goes.
#[derive(Clone, Debug)]
enum To {
    One(Channel),
    /// Each name as given; a bad one fails alone.
    Many(Vec<(String, Result<Channel, Refusal>)>),
}

fn bad(detail: impl Into<String>) -> Refusal {
    Refusal::new(RefusalCode::BadRequest, detail)
}

fn channel(name: &str) -> Result<Channel, Refusal> {
    Channel::new(name).map_err(|e| bad(e.to_string()))
}

impl Asked {
    /// Unknown fields are ignored: a later version's caller may meet an earlier node.
    fn parse(text: &str) -> Result<Self, Refusal> {
        let body: Body = serde_json::from_str(text).map_err(|e| bad(e.to_string()))?;
        let to = match (body.channel, body.channels) {
            (Some(name), None) => To::One(channel(&name)?),
            (None, Some(names)) if !names.is_empty() => {
                To::Many(names.into_iter().map(|name| (name.to_string(), channel(&name))).collect())
            }
            (None, Some(_)) => return Err(bad("channels names no channel")),
            (None, None) => return Err(bad("channel or channels is missing")),
            (Some(_), Some(_)) => return Err(bad("channel and channels exclude each other")),
        };
        let data = body.data.ok_or_else(|| bad("data is missing"))?;
        let name = body.event.map(|name| EventName::new(&name)).transpose().map_err(|e| bad(e.to_string()))?;
        if body.idempotency_key.as_ref().is_some_and(|key| key.is_empty() || key.len() > MAX_KEY_BYTES) {
            return Err(bad(format!("idempotency_key has 1 to {MAX_KEY_BYTES} bytes")));
        }
        Ok(Self {
            to,
            name,
            // A copy: a slice would keep the whole body alive as long as one event of it.
            data: Bytes::copy_from_slice(data.get().as_bytes()),
            ephemeral: body.ephemeral.unwrap_or(false),
            key: body.idempotency_key.map(|key| key.into()),
        })
    }

    fn n_events(&self) -> usize {
        match &self.to {
            To::One(_) => 1,
            To::Many(channels) => channels.len(),
        }
    }

    fn event(&self, channel: Channel) -> Publish {
        Publish {
            channel,
            name: self.name.clone(),
            data: self.data.clone(),
            ephemeral: self.ephemeral,
            key: self.key.clone(),
        }
    }
}

/// A batch's items: of an array, or one a line (blank lines are none). What is no array of JSON
/// values at all is refused as a whole.
fn items(form: Form, text: &str) -> Result<Vec<Result<Asked, Refusal>>, Refusal> {
    Ok(match form {
        Form::Json => {
            let items: Vec<&RawValue> = serde_json::from_str(text).map_err(|e| bad(e.to_string()))?;
            items.into_iter().map(|item| Asked::parse(item.get())).collect()
        }
        Form::Lines => text.split('\n').filter(|line| !line.trim().is_empty()).map(Asked::parse).collect(),
    })
}

fn check_number(n_events: usize) -> Result<(), Refusal> {
    if n_events > MAX_EVENTS {
        let detail = format!("{n_events} events in one call, at most {MAX_EVENTS} are allowed");
        return Err(Refusal::new(RefusalCode::PayloadTooLarge, detail));
    }
    Ok(())
}

/// What came of one item, as the answer says it.
#[derive(Debug, Serialize)]
#[serde(untagged)]
enum Outcome {
    /// It named one channel, or could not be read.
    Event(OfEvent),
    /// It named several.
    Each { results: Vec<OfChannel> },
}

#[derive(Debug, Serialize)]
#[serde(untagged)]
enum OfEvent {
    Published {
        id: Option<String>,
        #[serde(skip_serializing_if = "Not::not")]
        duplicate: bool,
    },
    Failed {
        #[serde(serialize_with = "fault")]
        error: Refusal,
    },
}

#[derive(Debug, Serialize)]
struct OfChannel {
    channel: String,
    #[serde(flatten)]
    outcome: OfEvent,
}

#[derive(Serialize)]
struct Results {
    results: Vec<Outcome>,
}

fn fault<S: Serializer>(refusal: &Refusal, to: S) -> Result<S::Ok, S::Error> {
    let mut fault = to.serialize_struct("Fault", 2)?;
    fault.serialize_field("code", refusal.code.word())?;
    fault.serialize_field("message", &refusal.detail)?;
    fault.end()
}

impl OfEvent {
    fn unavailable(&self) -> Option<&Refusal> {
        match self {
            Self::Failed { error } if error.code == RefusalCode::Unavailable => Some(error),
            _ => None,
        }
    }
}

impl Outcome {
    fn events(&self) -> impl Iterator<Item = &OfEvent> {
        let (one, each) = match self {
            Self::Event(event) => (Some(event), &[][..]),
            Self::Each { results } => (None, &results[..]),
        };
        one.into_iter().chain(each.iter().map(|result| &result.outcome))
    }
}

/// The refusal that is all there is to tell: nothing is known of any event but that the backplane
/// is away. Then the whole call is a 503.
fn only_unavailable(outcomes: &[Outcome]) -> Option<Refusal> {
    let mut events = outcomes.iter().flat_map(Outcome::events);
    let first = events.next()?.unavailable()?;
    events.all(|event| event.unavailable().is_some()).then(|| first.clone())
}

impl From<Result<Published, Refusal>> for OfEvent {
    fn from(result: Result<Published, Refusal>) -> Self {
        match result {
            Ok(published) => {
                Self::Published { id: published.id.map(|id| id.to_string()), duplicate: published.duplicate }
            }
            Err(error) => Self::Failed { error },
        }
    }
}

/// One call's publishing, in its order.
struct Run<'a> {
    inner: &'a Inner,
    is_away: bool,
}

impl<'a> Run<'a> {
    fn new(inner: &'a Inner) -> Self {
        Self { inner, is_away: false }
    }

    async fn item(&mut self, asked: Asked) -> Outcome {
        let channels = match &asked.to {
            To::One(channel) => return Outcome::Event(self.event(asked.event(channel.clone())).await.into()),
            To::Many(channels) => channels,
        };
        let mut results = Vec::with_capacity(channels.len());
        for (name, channel) in channels {
            let result = match channel {
                Ok(channel) => self.event(asked.event(channel.clone())).await,
                Err(refusal) => Err(refusal.clone()),
            };
            results.push(OfChannel { channel: name.clone(), outcome: result.into() });
        }
        Outcome::Each { results }
    }

    async fn event(&mut self, event: Publish) -> Result<Published, Refusal> {
        if self.is_away {
            return Err(self.inner.unavailable("not tried: the backplane did not answer an event before this one"));
        }
        self.inner.state.gateway.publish(event).await.map_err(|error| match error {
            PublishError::Dropped => Refusal::new(RefusalCode::Forbidden, error.to_string()),
            PublishError::TooLarge { .. } => Refusal::new(RefusalCode::PayloadTooLarge, error.to_string()),
            PublishError::NotJson(_) => bad(error.to_string()),
            PublishError::Unavailable(_) => {
                self.is_away = true;
                let detail = "the backplane does not answer; whether the event was stored is not known: \
                              repeat it with the same idempotency_key";
                self.inner.unavailable(detail)
            }
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<Asked, String> {
        Asked::parse(text).map_err(|refusal| {
            assert_eq!(refusal.code, RefusalCode::BadRequest, "{text}");
            refusal.detail
        })
    }

    #[test]
    fn data_stays_the_text_that_it_was() {
        for data in [
            "null",
            "false",
            "0",
            "1e400",
            "9007199254740993.10",
            r#""""#,
            r#""\u00e4\ud83d\ude00 \/""#,
            r#"{"a" : 1,  "a":2, "b":[ 1,2 ]}"#,
            "{\n\"a\":\r\n1}",
        ] {
            let asked = parse(&format!(r#"{{"channel":"a","data": {data} }}"#)).unwrap();
            assert_eq!(asked.data, data);
        }
        let deep = format!("{}{}", "[".repeat(20_000), "]".repeat(20_000));
        assert_eq!(parse(&format!(r#"{{"channel":"a","data":{deep}}}"#)).unwrap().data, deep);
    }

    #[test]
    fn what_is_missing_or_bad_is_named() {
        let long = "k".repeat(129);
        for (text, word) in [
            (r#"{"data":1}"#, "channel or channels"),
            (r#"{"channel":"a","channels":["b"],"data":1}"#, "exclude"),
            (r#"{"channels":[],"data":1}"#, "no channel"),
            (r#"{"channel":"a"}"#, "data is missing"),
            (r#"{"channel":"a b","data":1}"#, "channel name"),
            (r#"{"channel":"","data":1}"#, "channel name"),
            (r#"{"channel":"a","data":1,"event":"x y"}"#, "event name"),
            (r#"{"channel":"a","data":1,"idempotency_key":""}"#, "idempotency_key"),
            (&format!(r#"{{"channel":"a","data":1,"idempotency_key":"{long}"}}"#), "idempotency_key"),
            (r#"{"channel":"a","data":1,"ephemeral":"yes"}"#, "boolean"),
            (r#"{"channel":"a","data":1,"data":2}"#, "duplicate field"),
            (r#"{"channel":"a","data":tru}"#, "line 1"),
            (r#"{"channel":"a","data":1} x"#, "trailing"),
            (r#"["a"]"#, "line 1"),
            ("", "line 1"),
        ] {
            let fault = parse(text).unwrap_err();
            assert!(fault.contains(word), "{text}: {fault}");
        }
    }

    #[test]
    fn what_is_asked_for_is_what_is_published() {
        let key = "k".repeat(128);
        let text = format!(
            r#"{{"channel":"news","data":{{"n":1}},"event":"order.paid","ephemeral":true,"idempotency_key":"{key}","later":1}}"#
        );
        let asked = parse(&text).unwrap();
        let To::One(channel) = &asked.to else { panic!("one channel was named") };
        let event = asked.event(channel.clone());
        assert_eq!((event.channel.as_str(), &event.data[..], event.ephemeral), ("news", &b"{\"n\":1}"[..], true));
        assert_eq!(event.name.unwrap().as_str(), "order.paid");
        assert_eq!(event.key.as_deref(), Some(&*key));
        let plain = parse(r#"{"channel":"news","data":null,"event":null,"idempotency_key":null}"#).unwrap();
        assert_eq!((plain.name, plain.ephemeral, plain.key), (None, false, None));
    }

    #[test]
    fn one_bad_item_of_a_batch_fails_alone_and_order_is_kept() {
        let array = r#"[{"channel":"a","data":1}, 7, {"channel":"c","data":3}]"#;
        let lines = "{\"channel\":\"a\",\"data\":1}\r\n\n{oops\n{\"channel\":\"c\",\"data\":3}\n";
        for (form, text) in [(Form::Json, array), (Form::Lines, lines)] {
            let items = items(form, text).unwrap();
            let data: Vec<_> = items.iter().map(|item| item.as_ref().ok().map(|asked| &asked.data[..])).collect();
            assert_eq!(data, [Some(&b"1"[..]), None, Some(&b"3"[..])]);
        }
        assert!(items(Form::Json, r#"{"channel":"a","data":1}"#).is_err(), "one item is no batch");
        assert!(items(Form::Json, "[1,").is_err());
        assert!(items(Form::Lines, "").unwrap().is_empty());
    }

    #[test]
    fn a_call_has_a_most_of_events_over_all_its_channels() {
        let several = parse(r#"{"channels":["a","b","a"],"data":1}"#).unwrap();
        assert_eq!(several.n_events(), 3);
        assert!(check_number(MAX_EVENTS).is_ok());
        assert_eq!(check_number(MAX_EVENTS + 1).unwrap_err().code, RefusalCode::PayloadTooLarge);
    }

    fn published(id: Option<&str>, duplicate: bool) -> OfEvent {
        Ok(Published { id: id.map(|id| id.parse().unwrap()), duplicate }).into()
    }

    fn failed(code: RefusalCode) -> OfEvent {
        Err(Refusal::new(code, "no")).into()
    }

    fn each(outcomes: Vec<OfEvent>) -> Outcome {
        let results = outcomes.into_iter().map(|outcome| OfChannel { channel: "b c".into(), outcome }).collect();
        Outcome::Each { results }
    }

    #[test]
    fn answers_have_the_form_of_the_api() {
        let cases = [
            (Outcome::Event(published(Some("5-7"), false)), r#"{"id":"5-7"}"#),
            (Outcome::Event(published(Some("5-7"), true)), r#"{"id":"5-7","duplicate":true}"#),
            (Outcome::Event(published(None, false)), r#"{"id":null}"#),
            (
                each(vec![published(Some("5-7"), false), failed(RefusalCode::BadRequest)]),
                r#"{"results":[{"channel":"b c","id":"5-7"},{"channel":"b c","error":{"code":"bad_request","message":"no"}}]}"#,
            ),
        ];
        for (outcome, expected) in cases {
            assert_eq!(serde_json::to_string(&outcome).unwrap(), expected);
        }
    }

    #[test]
    fn only_when_nothing_else_is_known_the_whole_call_is_unavailable() {
        let away = || failed(RefusalCode::Unavailable);
        let one = Outcome::Event;
        for (outcomes, expected) in [
            (vec![one(away())], true),
            (vec![one(away()), each(vec![away(), away()])], true),
            (vec![one(published(None, false)), one(away())], false),
            (vec![one(away()), one(failed(RefusalCode::BadRequest))], false),
            (vec![each(vec![away(), published(None, false)])], false),
            (vec![], false),
        ] {
            assert_eq!(only_unavailable(&outcomes).is_some(), expected, "{outcomes:?}");
        }
    }
}
