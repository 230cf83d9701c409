//! What stands in a pub/sub message. Decides which payloads are events, beacons, or words
//! from node to node (revocations, messages, replaced sessions, a change of the fleet); everything else is `None` and counted by the caller, never an error: anybody may publish
//! anything to a pub/sub channel, and one bad message must not end the link.

use bytes::Bytes;
use hub::backplane::{FromLink, Revocation, RevocationKey};
use hub::channel::Channel;
use hub::cursor::EventId;
use hub::event::Event;
use serde::Deserialize;
use serde_json::value::RawValue;

use crate::log::name_of;

/// An event from a channel's live messages: `<id> <name>\n<data>` as the Function publishes it
/// (`-` for the id of an ephemeral one), or `{"event"?,"data"}` from any Redis client.
///
/// The data is copied out: an event that waits for a slow client keeps no more alive than itself.
pub(crate) fn event(channel: Channel, payload: &[u8], max_data: usize) -> Option<Event> {
    match payload.first()? {
        b'0'..=b'9' | b'-' => framed(channel, payload),
        _ => plain(channel, payload, max_data),
    }
}

fn framed(channel: Channel, payload: &[u8]) -> Option<Event> {
    let end = payload.iter().position(|b| *b == b'\n')?;
    let (id, name) = std::str::from_utf8(&payload[..end]).ok()?.split_once(' ')?;
    let id = match id {
        "-" => None,
        id => Some(id.parse().ok()?),
    };
    let name = name_of(name)?;
    let data = &payload[end + 1..];
    Event::check_data(data).ok()?;
    Some(Event { channel, id, name, data: Bytes::copy_from_slice(data) })
}

#[derive(Deserialize)]
struct Plain<'a> {
    event: Option<String>,
    #[serde(borrow)]
    data: &'a RawValue,
}

fn plain(channel: Channel, payload: &[u8], max_data: usize) -> Option<Event> {
    let text = std::str::from_utf8(payload).ok()?;
    let Plain { event, data } = serde_json::from_str(text).ok()?;
    let name = match event {
        None => None,
        Some(name) => Some(name_of(&name)??),
    };
    let data = data.get();
    (data.len() <= max_data).then(|| Event { channel, id: None, name, data: Bytes::copy_from_slice(data.as_bytes()) })
}

/// A beacon: `<position> <nonce>`.
pub(crate) fn beacon(payload: &[u8]) -> Option<(EventId, &str)> {
    let (id, nonce) = std::str::from_utf8(payload).ok()?.split_once(' ')?;
    Some((id.parse().ok()?, nonce))
}

/// What a message from node to node begins with; the rest is its text.
pub(crate) const TOLD: &str = "told ";

/// From the control channel, or a node's own: `revoked <kind> <before> <value>`, `told <text>`,
/// `replaced <session> <user>`, `fleet`. `Some(None)`: a word of a later version, which is not ours to
/// understand.
pub(crate) fn control(payload: &[u8]) -> Option<Option<FromLink>> {
    let text = std::str::from_utf8(payload).ok()?;
    if let Some(told) = text.strip_prefix(TOLD) {
        return Some(Some(FromLink::Told(told.to_owned())));
    }
    if text == "fleet" {
        return Some(Some(FromLink::FleetChanged));
    }
    match text.split_once(' ') {
        Some(("revoked", rest)) => revoked(rest).map(|revocation| Some(FromLink::Revoked(revocation))),
        Some(("replaced", rest)) => {
            let (session, user) = rest.split_once(' ').filter(|(session, _)| !session.is_empty())?;
            Some(Some(FromLink::Replaced { user: user.into(), session: session.into() }))
        }
        _ => Some(None),
    }
}

fn revoked(rest: &str) -> Option<Revocation> {
    let (kind, rest) = rest.split_once(' ')?;
    let (before, value) = rest.split_once(' ')?;
    let key = match kind {
        "jti" => RevocationKey::Jti(value.into()),
        "sid" => RevocationKey::Sid(value.into()),
        "sub" => RevocationKey::Sub(value.into()),
        _ => return None,
    };
    Some(Revocation { key, before: before.parse().ok()? })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(payload: &[u8]) -> Option<Event> {
        event(Channel::new("news").unwrap(), payload, 100)
    }

    #[test]
    fn a_logged_event_keeps_its_text() {
        let e = read(b"5-7 order.paid\n {\"a\" :1.0} ").unwrap();
        assert_eq!(
            (e.id, e.name.unwrap().as_str(), &e.data[..]),
            (Some(EventId { ms: 5, n: 7 }), "order.paid", &b" {\"a\" :1.0} "[..])
        );
        let e = read(b"- \n[1]").unwrap();
        assert_eq!((e.id, e.name, &e.data[..]), (None, None, &b"[1]"[..]));
    }

    #[test]
    fn a_plain_message_is_an_ephemeral_event_with_its_own_text() {
        let e = read(b" {\"other\":1, \"data\" : {\"n\": 1.50} , \"event\":\"x\"}").unwrap();
        assert_eq!((e.id, e.name.unwrap().as_str(), &e.data[..]), (None, "x", &b"{\"n\": 1.50}"[..]));
        assert!(read(b"{\"data\":null,\"event\":null}").is_some());
    }

    #[test]
    fn what_is_no_event_is_none_and_never_a_panic() {
        let deep = vec![b'['; 100_000];
        let deep_data = [b"{\"data\":".to_vec(), deep.clone(), vec![b']'; 100_000], b"}".to_vec()].concat();
        let long = format!("{{\"data\":\"{}\"}}", "x".repeat(99));
        let poison: [&[u8]; 16] = [
            b"",
            b"{",
            b"null",
            b"{}",
            &deep,
            &deep_data,
            long.as_bytes(),
            b"\xff\xfe\x00\x80",
            b"{\"data\":\"\xed\xa0\x80\"}",
            b"5-7 x",
            b"5-x \n1",
            b"5-7 a b\n1",
            b"5-7 \n{",
            b"5-7\n1",
            b"{\"data\":1,\"event\":\"a b\"}",
            b"{\"data\":1,\"event\":\"\"}",
        ];
        for payload in poison {
            assert!(read(payload).is_none(), "{:?}", &payload[..payload.len().min(40)]);
        }
        assert!(read(format!("{{\"data\":\"{}\"}}", "x".repeat(98)).as_bytes()).is_some(), "exactly at the limit");
    }

    #[test]
    fn a_revocation_may_name_anything_and_later_words_are_left_alone() {
        let Some(Some(FromLink::Revoked(revoked))) = control(b"revoked sub 17 a b\nc") else { panic!("a revocation") };
        assert_eq!(revoked, Revocation { key: RevocationKey::Sub("a b\nc".into()), before: 17 });
        for later in [&b"hold 15"[..], b"", b" ", b"told", b"replaced", b"Told x", b"fleet x", b"fleet "] {
            assert!(matches!(control(later), Some(None)), "{later:?}");
        }
        for bad in [&b"\xff"[..], b"told \xff", b"revoked xyz 1 a", b"revoked sub x a", b"revoked sub"] {
            assert!(control(bad).is_none(), "{bad:?}");
        }
    }

    #[test]
    fn a_node_may_be_told_any_text() {
        let long = "x".repeat(1 << 20);
        for text in ["", " ", "revoked jti 0 x", "a\nb ü", &long] {
            let Some(Some(FromLink::Told(told))) = control(format!("told {text}").as_bytes()) else {
                panic!("{text:.40?}")
            };
            assert_eq!(told, text);
        }
    }

    #[test]
    fn a_change_of_the_fleet_is_one_word() {
        assert!(matches!(control(b"fleet"), Some(Some(FromLink::FleetChanged))));
    }

    #[test]
    fn a_replaced_session_may_be_of_any_user() {
        for name in ["u", "a b", " ", "", "ü\n%", "replaced x y"] {
            let Some(Some(FromLink::Replaced { user, session })) = control(format!("replaced s1 {name}").as_bytes())
            else {
                panic!("{name:?}")
            };
            assert_eq!((&*user, &*session), (name, "s1"));
        }
        for bad in ["replaced ", "replaced s1", "replaced  u"] {
            assert!(control(bad.as_bytes()).is_none(), "{bad:?}");
        }
    }
}
