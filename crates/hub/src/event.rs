//! An event, and its one encoding per wire, shared by every outbox; and several that leave together.

use std::io::Write;
use std::sync::{Arc, OnceLock};

use bytes::{Buf, BufMut, Bytes, BytesMut};

use crate::channel::{Channel, EventName};
use crate::cursor::EventId;

/// Which framing a session speaks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Wire {
    /// WebSocket text frames.
    Ws,
    /// Server-sent events inside HTTP/1.1 chunks.
    Sse,
}

impl Wire {
    /// The label of `gateway_sessions_open{transport}`.
    pub fn word(self) -> &'static str {
        match self {
            Wire::Ws => "ws",
            Wire::Sse => "sse",
        }
    }
}

/// One event on its way from the backplane to the outboxes.
#[derive(Clone, Debug)]
pub struct Event {
    /// Where it was published.
    pub channel: Channel,
    /// `None`: ephemeral.
    pub id: Option<EventId>,
    /// The name it was published with.
    pub name: Option<EventName>,
    /// Valid JSON text.
    pub data: Bytes,
}

/// The data is no JSON text.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("data is no JSON text: {0}")]
pub struct NotJson(pub String);

impl Event {
    /// Is `data` exactly one JSON value in UTF-8? Linear in its length, bounded stack.
    ///
    /// # Errors
    /// `NotJson` with the place of the fault; never with the text itself.
    pub fn check_data(data: &[u8]) -> Result<(), NotJson> {
        std::str::from_utf8(data).map_err(|e| NotJson(format!("no UTF-8 at byte {}", e.valid_up_to())))?;
        serde_json::from_slice::<serde::de::IgnoredAny>(data)
            .map(|_| ())
            .map_err(|e| NotJson(format!("line {} column {}", e.line(), e.column())))
    }
}

/// An event with its bytes for each wire, made on first need and shared.
#[derive(Debug)]
pub struct Encoded {
    /// The event itself.
    pub event: Event,
    ws: OnceLock<Bytes>,
    sse: OnceLock<Bytes>,
}

impl Encoded {
    /// Nothing is encoded yet.
    pub fn new(event: Event) -> Arc<Self> {
        Arc::new(Self { event, ws: OnceLock::new(), sse: OnceLock::new() })
    }

    /// The whole frame (WS) or chunk (SSE), ready for the socket.
    pub fn on(&self, wire: Wire) -> &Bytes {
        match wire {
            Wire::Ws => self
                .ws
                .get_or_init(|| framed(0x1, room_for(&self.event), |out| put_event(out, &self.event, Replay::No))),
            Wire::Sse => self.sse.get_or_init(|| {
                let id = self.event.id.map(|id| id.to_string());
                sse_chunk(None, id.as_deref(), None, &event_json(&self.event, Replay::No))
            }),
        }
    }
}

/// Events of one channel that leave together, oldest first; there is one at least.
pub(crate) struct Run {
    events: Vec<Arc<Encoded>>,
    /// Several in one piece, a wire each: one slice costs the kernel less than many.
    joined: [OnceLock<Bytes>; 2],
}

impl Run {
    /// # Panics
    /// Without an event.
    pub fn new(events: Vec<Event>) -> Self {
        assert!(!events.is_empty(), "a run has an event");
        Self { events: events.into_iter().map(Encoded::new).collect(), joined: Default::default() }
    }

    pub fn channel(&self) -> &Channel {
        &self.events[0].event.channel
    }

    pub fn events(&self) -> &[Arc<Encoded>] {
        &self.events
    }

    /// Of the oldest event that has one.
    pub fn first_id(&self) -> Option<EventId> {
        self.events.iter().find_map(|event| event.event.id)
    }

    /// Of the newest event that has one.
    pub fn last_id(&self) -> Option<EventId> {
        self.events.iter().rev().find_map(|event| event.event.id)
    }

    /// The bytes of all.
    pub fn on(&self, wire: Wire) -> &Bytes {
        match &self.events[..] {
            [only] => only.on(wire),
            many => self.joined[wire as usize].get_or_init(|| {
                let pieces: Vec<&[u8]> = many.iter().map(|event| &event.on(wire)[..]).collect();
                pieces.concat().into()
            }),
        }
    }
}

/// Is the event part of the replay of a later `subscribe`?
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Replay {
    /// Its id moves the client's cursor.
    No,
    /// Marked `"replay":true`: its id does not.
    Yes,
}

/// The `event` object of the contract.
pub fn event_json(event: &Event, replay: Replay) -> Vec<u8> {
    let mut out = Vec::with_capacity(room_for(event));
    put_event(&mut out, event, replay);
    out
}

/// Bytes that its object has at most.
fn room_for(event: &Event) -> usize {
    event.data.len()
        + event.channel.as_str().len()
        + 96
        + event.name.as_ref().map_or(0, |name| name.as_str().len() + 12)
}

fn put_event(out: &mut Vec<u8>, event: &Event, replay: Replay) {
    out.extend_from_slice(b"{\"type\":\"event\",\"channel\":\"");
    // Neither alphabet holds a character that JSON escapes.
    out.extend_from_slice(event.channel.as_str().as_bytes());
    out.push(b'"');
    if let Some(id) = event.id {
        write!(out, ",\"id\":\"{id}\"").expect("memory takes all");
    }
    if let Some(name) = &event.name {
        out.extend_from_slice(b",\"event\":\"");
        out.extend_from_slice(name.as_str().as_bytes());
        out.push(b'"');
    }
    if replay == Replay::Yes {
        out.extend_from_slice(b",\"replay\":true");
    }
    out.extend_from_slice(b",\"data\":");
    let start = out.len();
    out.extend_from_slice(&event.data);
    // A raw line end in JSON text stands between tokens only; a space there means the same and
    // cannot end an SSE line.
    for b in &mut out[start..] {
        if *b == b'\n' || *b == b'\r' {
            *b = b' ';
        }
    }
    out.push(b'}');
}

/// An unmasked, final text frame (RFC 6455 5.2), shortest length form.
pub fn text_frame(payload: &[u8]) -> Bytes {
    frame(0x1, payload)
}

/// An unmasked, final frame with this opcode.
pub fn frame(opcode: u8, payload: &[u8]) -> Bytes {
    framed(opcode, payload.len(), |out| out.extend_from_slice(payload))
}

/// A frame whose payload is written in place, behind a header that is known only then. `room` is a
/// guess at the payload's bytes.
fn framed(opcode: u8, room: usize, payload: impl FnOnce(&mut Vec<u8>)) -> Bytes {
    const MAX_HEADER: usize = 10;
    let mut out = Vec::with_capacity(MAX_HEADER + room);
    out.resize(MAX_HEADER, 0);
    payload(&mut out);
    let mut header = [0x80 | opcode, 0, 0, 0, 0, 0, 0, 0, 0, 0];
    let n_header = match out.len() - MAX_HEADER {
        n @ 0..=125 => {
            header[1] = n as u8;
            2
        }
        n @ 126..=65_535 => {
            header[1] = 126;
            header[2..4].copy_from_slice(&(n as u16).to_be_bytes());
            4
        }
        n => {
            header[1] = 127;
            header[2..].copy_from_slice(&(n as u64).to_be_bytes());
            MAX_HEADER
        }
    };
    let start = MAX_HEADER - n_header;
    out[start..MAX_HEADER].copy_from_slice(&header[..n_header]);
    let mut bytes = Bytes::from(out);
    bytes.advance(start);
    bytes
}

/// One SSE block inside one HTTP/1.1 chunk. `data` holds no line end.
pub fn sse_chunk(event: Option<&str>, id: Option<&str>, retry_ms: Option<u64>, data: &[u8]) -> Bytes {
    let mut block = Vec::with_capacity(data.len() + 64);
    if let Some(retry) = retry_ms {
        block.extend_from_slice(format!("retry: {retry}\n").as_bytes());
    }
    if let Some(event) = event {
        block.extend_from_slice(format!("event: {event}\n").as_bytes());
    }
    if let Some(id) = id {
        block.extend_from_slice(format!("id: {id}\n").as_bytes());
    }
    block.extend_from_slice(b"data: ");
    block.extend_from_slice(data);
    block.extend_from_slice(b"\n\n");
    http_chunk(&block)
}

/// Bytes as one HTTP/1.1 chunk.
pub fn http_chunk(body: &[u8]) -> Bytes {
    let mut out = BytesMut::with_capacity(body.len() + 16);
    out.put_slice(format!("{:x}\r\n", body.len()).as_bytes());
    out.put_slice(body);
    out.put_slice(b"\r\n");
    out.freeze()
}

/// The end of a chunked body.
pub const LAST_CHUNK: &[u8] = b"0\r\n\r\n";

#[cfg(test)]
mod tests {
    use super::*;

    fn event(data: &'static [u8]) -> Event {
        Event {
            channel: Channel::new("news").unwrap(),
            id: Some(EventId { ms: 5, n: 7 }),
            name: Some(EventName::new("order.paid").unwrap()),
            data: Bytes::from_static(data),
        }
    }

    #[test]
    fn data_reaches_the_client_as_the_same_text() {
        let json = event_json(&event(b"{\"big\":9007199254740993.10, \"a\" : 1}"), Replay::No);
        assert_eq!(
            std::str::from_utf8(&json).unwrap(),
            r#"{"type":"event","channel":"news","id":"5-7","event":"order.paid","data":{"big":9007199254740993.10, "a" : 1}}"#
        );
    }

    #[test]
    fn a_line_end_between_tokens_cannot_break_an_sse_block() {
        let encoded = Encoded::new(event(b"{\r\n\"a\":\n1}"));
        let chunk = std::str::from_utf8(encoded.on(Wire::Sse)).unwrap();
        let (length, rest) = chunk.split_once("\r\n").unwrap();
        let block = rest.strip_suffix("\r\n").unwrap();
        assert_eq!(usize::from_str_radix(length, 16).unwrap(), block.len());
        assert_eq!(
            block,
            "id: 5-7\ndata: {\"type\":\"event\",\"channel\":\"news\",\"id\":\"5-7\",\"event\":\"order.paid\",\"data\":{  \"a\": 1}}\n\n"
        );
    }

    #[test]
    fn a_frame_has_the_shortest_length_form_at_every_boundary() {
        for (n, header) in [(0, 2), (1, 2), (125, 2), (126, 4), (127, 4), (65_535, 4), (65_536, 10)] {
            let f = frame(1, &vec![b'x'; n]);
            assert_eq!(f.len(), n + header, "{n}");
            assert_eq!(f[0], 0x81);
        }
    }

    #[test]
    fn what_is_no_json_is_refused_and_deep_nesting_does_not_overflow_the_stack() {
        for bad in [&b"{"[..], b"", b"nul", b"1 2", b"\xff\xfe", b"\"\xed\xa0\x80\"", b"[1,]"] {
            assert!(Event::check_data(bad).is_err(), "{bad:?}");
        }
        for good in [&b"null"[..], b"0", b" {\"a\":[1,2]} ", b"\"\\u2028\""] {
            assert!(Event::check_data(good).is_ok(), "{good:?}");
        }
        let _ = Event::check_data(&vec![b'['; 100_000]);
        let deep = [vec![b'['; 100_000], vec![b']'; 100_000]].concat();
        let _ = Event::check_data(&deep);
    }
}
