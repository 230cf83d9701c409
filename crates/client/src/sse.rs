//! The text/event-stream format, read incrementally by the HTML standard's rules, and the task that
//! feeds a connection's bytes through it. Decides where an event ends; not what it means.

use http_body_util::BodyExt;
use hyper::body::Incoming;
use tokio::sync::mpsc;

use crate::dial::{Arrival, Ending};

/// One dispatched event.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SseEvent {
    /// The `event:` field; `message` where there was none.
    pub event: String,
    /// The `data:` lines, joined by line feeds.
    pub data: String,
    /// The value of an `id:` line since the last dispatched event; not repeated from earlier ones.
    pub id: Option<String>,
}

/// Longest block that is kept, in bytes. Default of `SseParser::new`: 32 MiB, far above any message
/// that a gateway may be configured for; beyond it the stream is broken or hostile.
const MAX_BLOCK_BYTES: usize = 32 << 20;

/// The stream sent a block that is larger than this client keeps.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("an event of the stream is larger than {MAX_BLOCK_BYTES} bytes")]
pub struct TooLong;

/// An incremental parser: bytes in any pieces in, events out. Comments and unknown fields are
/// skipped, bytes that are no UTF-8 are replaced, a line may end in CR, LF or CRLF.
#[derive(Debug, Default)]
pub struct SseParser {
    line: Vec<u8>,
    /// The last byte was a CR: a LF that follows belongs to the same line end.
    after_cr: bool,
    /// A byte order mark may stand before the first line only.
    past_first_line: bool,
    event: String,
    data: String,
    has_data: bool,
    id: Option<String>,
    retry_ms: Option<u64>,
}

impl SseParser {
    /// A parser at the start of a stream.
    pub fn new() -> SseParser {
        SseParser::default()
    }

    /// The last `retry:` of the stream, in ms.
    pub fn retry_ms(&self) -> Option<u64> {
        self.retry_ms
    }

    /// Reads the next bytes of the stream and appends what they complete to `out`.
    ///
    /// # Errors
    /// `TooLong`; the stream should be given up.
    pub fn feed(&mut self, mut bytes: &[u8], out: &mut Vec<SseEvent>) -> Result<(), TooLong> {
        if self.after_cr && !bytes.is_empty() {
            self.after_cr = false;
            bytes = bytes.strip_prefix(b"\n").unwrap_or(bytes);
        }
        while let Some(end) = bytes.iter().position(|byte| matches!(byte, b'\r' | b'\n')) {
            self.line.extend_from_slice(&bytes[..end]);
            let is_cr = bytes[end] == b'\r';
            bytes = &bytes[end + 1..];
            match bytes.first() {
                Some(b'\n') if is_cr => bytes = &bytes[1..],
                None => self.after_cr = is_cr,
                _ => {}
            }
            self.end_line(out);
        }
        self.line.extend_from_slice(bytes);
        if self.line.len() + self.data.len() > MAX_BLOCK_BYTES { Err(TooLong) } else { Ok(()) }
    }

    fn end_line(&mut self, out: &mut Vec<SseEvent>) {
        let line = std::mem::take(&mut self.line);
        let mut bytes = &line[..];
        if !std::mem::replace(&mut self.past_first_line, true) {
            bytes = bytes.strip_prefix(b"\xef\xbb\xbf").unwrap_or(bytes);
        }
        if bytes.is_empty() {
            return self.dispatch(out);
        }
        let text = String::from_utf8_lossy(bytes);
        let (field, value) = match text.split_once(':') {
            Some((field, value)) => (field, value.strip_prefix(' ').unwrap_or(value)),
            None => (&*text, ""),
        };
        self.field(field, value);
        self.line = line;
        self.line.clear();
    }

    fn field(&mut self, field: &str, value: &str) {
        match field {
            "event" => value.clone_into(&mut self.event),
            "data" => {
                if std::mem::replace(&mut self.has_data, true) {
                    self.data.push('\n');
                }
                self.data.push_str(value);
            }
            "id" if !value.contains('\0') => self.id = Some(value.to_owned()),
            "retry" if !value.is_empty() && value.bytes().all(|byte| byte.is_ascii_digit()) => {
                self.retry_ms = value.parse().ok();
            }
            _ => {}
        }
    }

    fn dispatch(&mut self, out: &mut Vec<SseEvent>) {
        let event = std::mem::take(&mut self.event);
        let data = std::mem::take(&mut self.data);
        if std::mem::take(&mut self.has_data) {
            let event = if event.is_empty() { "message".to_owned() } else { event };
            out.push(SseEvent { event, data, id: self.id.take() });
        }
    }
}

/// Reads `body` to its end and hands on every event; the last arrival says how it ended. Ends early
/// when nobody listens any more. Waits for room in `to`, so a slow program slows the server's writes.
pub(crate) async fn read(mut body: Incoming, to: mpsc::Sender<Arrival>) {
    let mut parser = SseParser::new();
    let mut events = Vec::new();
    let ending = loop {
        match body.frame().await {
            None => break Ending::Eof,
            Some(Err(error)) => break Ending::from_error(&error),
            Some(Ok(frame)) => {
                let Ok(bytes) = frame.into_data() else { continue };
                let fed = parser.feed(&bytes, &mut events);
                for event in events.drain(..) {
                    if to.send(Arrival::Message { text: event.data, cursor: event.id }).await.is_err() {
                        return;
                    }
                }
                if let Err(too_long) = fed {
                    break Ending::Broken(too_long.to_string());
                }
            }
        }
    };
    let _ = to.send(Arrival::Ended(ending)).await;
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn parse(stream: &[u8]) -> Vec<SseEvent> {
        let mut events = Vec::new();
        SseParser::new().feed(stream, &mut events).unwrap();
        events
    }

    fn event(event: &str, data: &str, id: Option<&str>) -> SseEvent {
        SseEvent { event: event.into(), data: data.into(), id: id.map(Into::into) }
    }

    #[test]
    fn a_line_may_end_in_cr_lf_or_both() {
        let expected = [event("message", "a", None), event("message", "b", None)];
        for stream in [
            "data: a\n\ndata: b\n\n",
            "data: a\r\rdata: b\r\r",
            "data: a\r\n\r\ndata: b\r\n\r\n",
            "data: a\r\n\rdata: b\n\r",
        ] {
            assert_eq!(parse(stream.as_bytes()), expected, "{stream:?}");
        }
    }

    #[test]
    fn data_lines_are_joined_and_only_one_space_is_cut() {
        assert_eq!(parse(b"data:a\ndata:  b\ndata\ndata:\n\n"), [event("message", "a\n b\n\n", None)]);
    }

    #[test]
    fn a_block_without_data_is_no_event_but_its_id_is_kept() {
        assert_eq!(parse(b"event: x\nid: 7\n\ndata: a\n\n"), [event("message", "a", Some("7"))]);
    }

    #[test]
    fn an_id_is_given_once_and_an_id_with_nul_never() {
        assert_eq!(
            parse(b"id: 5-1\ndata: a\n\ndata: b\n\nid: x\0y\ndata: c\n\nid\ndata: d\n\n"),
            [
                event("message", "a", Some("5-1")),
                event("message", "b", None),
                event("message", "c", None),
                event("message", "d", Some(""))
            ]
        );
    }

    #[test]
    fn comments_unknown_fields_and_an_unfinished_block_are_skipped() {
        assert_eq!(
            parse(b": hb\n\n:\n\nfoo: 1\nDATA: 2\ndata: a\nevent: ready\n\ndata: cut"),
            [event("ready", "a", None)]
        );
    }

    #[test]
    fn a_byte_order_mark_is_skipped_at_the_start_only() {
        assert_eq!(parse(b"\xef\xbb\xbfdata: a\n\n\xef\xbb\xbfdata: b\n\n"), [event("message", "a", None)]);
    }

    #[test]
    fn retry_is_digits_or_nothing() {
        let retry = |stream: &str| {
            let mut parser = SseParser::new();
            parser.feed(stream.as_bytes(), &mut Vec::new()).unwrap();
            parser.retry_ms()
        };
        assert_eq!(retry("retry: 1200\n"), Some(1200));
        assert_eq!(retry("retry: 1200\nretry: 12x\nretry:\nretry: -1\n"), Some(1200));
    }

    #[test]
    fn a_block_without_end_is_given_up_at_its_bound() {
        let mut parser = SseParser::new();
        let piece = vec![b'x'; MAX_BLOCK_BYTES / 2];
        assert_eq!(parser.feed(&piece, &mut Vec::new()), Ok(()));
        assert_eq!(parser.feed(&piece, &mut Vec::new()), Ok(()));
        assert_eq!(parser.feed(b"x", &mut Vec::new()), Err(TooLong));
    }

    proptest! {
        #[test]
        fn the_pieces_in_which_bytes_come_change_nothing(
            stream in proptest::collection::vec(
                prop_oneof![
                    Just("data: é1"), Just("data:"), Just("\n"), Just("\r"), Just("\r\n"), Just("id: 4-2"), Just("\u{feff}"),
                    Just("event: ready"), Just(": hb"), Just("retry: 5"), Just("id: a\0b"), Just("x"), Just(":"), Just(" ")
                ], 0..60),
            cuts in proptest::collection::vec(1usize..7, 1..40),
        ) {
            let stream = stream.concat().into_bytes();
            let whole = parse(&stream);
            let (mut parser, mut events, mut rest) = (SseParser::new(), Vec::new(), &stream[..]);
            for cut in cuts.iter().cycle() {
                if rest.is_empty() {
                    break;
                }
                let (piece, tail) = rest.split_at((*cut).min(rest.len()));
                parser.feed(piece, &mut events).unwrap();
                rest = tail;
            }
            prop_assert_eq!(events, whole);
        }

        #[test]
        fn no_bytes_make_it_panic(stream in proptest::collection::vec(any::<u8>(), 0..300)) {
            let _ = parse(&stream);
        }
    }
}
