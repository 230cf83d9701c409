//! How far this client has heard. Decides what the next connection asks for; it never judges
//! whether the log can honour it.

use std::fmt;

use crate::message::Message;

/// A client's place in the log, opaque but for one rule: a log of several partitions tells them
/// apart by the text before `~`, and the cursor is the last id of each, joined by commas.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Cursor {
    /// The last id of each partition, in the order in which they were first heard of.
    places: Vec<String>,
}

impl Cursor {
    /// A cursor as it was written before; an empty text is no cursor.
    pub fn new(text: &str) -> Cursor {
        Cursor { places: text.split(',').filter(|place| !place.is_empty()).map(str::to_owned).collect() }
    }

    /// There is nothing to resume from.
    pub fn is_empty(&self) -> bool {
        self.places.is_empty()
    }

    /// The text to send, or `None` where there is nothing to resume from.
    pub fn text(&self) -> Option<String> {
        (!self.is_empty()).then(|| self.to_string())
    }

    /// Moves to what `message` says. An event of a later subscription's replay does not count; a
    /// `ready` replaces the cursor, downwards too; a `gap` says where one channel goes on, which is
    /// not where the session stands.
    pub fn hear(&mut self, message: &Message) {
        match message {
            Message::Event(event) if !event.replay => self.advance(event.id.as_deref()),
            Message::Ready(ready) => self.replace(ready.id.as_deref()),
            Message::Position(position) => self.advance(Some(&position.id)),
            Message::Ok(ok) => self.advance(ok.id.as_deref()),
            Message::Bye(bye) => self.advance(bye.id.as_deref()),
            _ => {}
        }
    }

    /// Takes `id` for the whole cursor, as an SSE `id:` line and a `ready` are meant.
    pub(crate) fn replace(&mut self, id: Option<&str>) {
        if let Some(id) = id {
            *self = Cursor::new(id);
        }
    }

    /// Takes each place in `id` for its own partition.
    fn advance(&mut self, id: Option<&str>) {
        let Some(id) = id else { return };
        for place in id.split(',').filter(|place| !place.is_empty()) {
            let of = partition(place);
            // A place without a partition and places with one never belong to the same log.
            self.places.retain(|known| partition(known).is_some() == of.is_some());
            match self.places.iter_mut().find(|known| partition(known) == of) {
                Some(known) => place.clone_into(known),
                None => self.places.push(place.to_owned()),
            }
        }
    }
}

impl fmt::Display for Cursor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.places.join(","))
    }
}

fn partition(place: &str) -> Option<&str> {
    place.split_once('~').map(|(partition, _)| partition)
}

/// Whether `a` stands behind `b` in the same partition's log. Ids that cannot be compared count as
/// later, for then the order of arrival is all there is.
pub(crate) fn is_later(a: &str, b: &str) -> bool {
    match (place(a), place(b)) {
        (Some(a), Some(b)) if a.0 == b.0 => (a.1, a.2) > (b.1, b.2),
        _ => true,
    }
}

fn place(id: &str) -> Option<(Option<&str>, u64, u64)> {
    let (of, rest) = match id.split_once('~') {
        Some((of, rest)) => (Some(of), rest),
        None => (None, id),
    };
    let (ms, n) = rest.split_once('-')?;
    Some((of, ms.parse().ok()?, n.parse().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn heard(start: &str, messages: &[&str]) -> Option<String> {
        let mut cursor = Cursor::new(start);
        for text in messages {
            cursor.hear(&Message::parse(text).unwrap());
        }
        cursor.text()
    }

    fn event(id: &str) -> String {
        format!(r#"{{"type":"event","channel":"c","id":"{id}","data":1}}"#)
    }

    #[test]
    fn the_cursor_is_the_last_id_received() {
        assert_eq!(heard("", &[]), None);
        assert_eq!(heard("", &[&event("5-1"), &event("6-0")]).as_deref(), Some("6-0"));
        assert_eq!(heard("6-0", &[r#"{"type":"position","id":"7-0"}"#]).as_deref(), Some("7-0"));
        assert_eq!(heard("6-0", &[r#"{"type":"ok","ref":"1","id":"8-0"}"#]).as_deref(), Some("8-0"));
        let bye = r#"{"type":"bye","reason":"drain","reconnect":"after","id":"9-0"}"#;
        assert_eq!(heard("6-0", &[bye]).as_deref(), Some("9-0"));
    }

    #[test]
    fn an_ephemeral_or_replayed_event_or_a_gap_does_not_move_it() {
        let replayed = r#"{"type":"event","channel":"c","id":"9-0","data":1,"replay":true}"#;
        let ephemeral = r#"{"type":"event","channel":"c","data":1}"#;
        let gap = r#"{"type":"gap","channel":"c","reason":"evicted","id":"9-0"}"#;
        assert_eq!(heard("5-0", &[replayed, ephemeral, gap]).as_deref(), Some("5-0"));
    }

    #[test]
    fn ready_replaces_it_downwards_too() {
        assert_eq!(heard("9-0", &[r#"{"type":"ready","resume":"gap","id":"2-0"}"#]).as_deref(), Some("2-0"));
        assert_eq!(
            heard("0~9-0,1~9-0", &[r#"{"type":"ready","resume":"gap","id":"1~2-0"}"#]).as_deref(),
            Some("1~2-0")
        );
        assert_eq!(heard("9-0", &[r#"{"type":"ready","resume":"new"}"#]).as_deref(), Some("9-0"));
    }

    #[test]
    fn each_partition_keeps_its_own_last_id() {
        let messages = [event("0~5-1"), event("1~3-0"), event("0~6-0")];
        let messages: Vec<&str> = messages.iter().map(String::as_str).collect();
        assert_eq!(heard("", &messages).as_deref(), Some("0~6-0,1~3-0"));
        assert_eq!(
            heard("0~6-0,1~3-0", &[r#"{"type":"position","id":"0~7-0,1~7-0"}"#]).as_deref(),
            Some("0~7-0,1~7-0")
        );
        assert_eq!(heard("0", &[&event("0~5-1")]).as_deref(), Some("0~5-1"), "a start cursor belongs to no partition");
    }

    #[test]
    fn ids_are_compared_as_numbers() {
        assert!(is_later("10-0", "9-0") && is_later("9-10", "9-9") && is_later("1~10-0", "1~9-0"));
        assert!(!is_later("9-0", "9-0") && !is_later("9-0", "10-0"));
        assert!(is_later("1~1-0", "0~9-0") && is_later("odd", "9-0"));
    }
}
