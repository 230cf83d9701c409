//! One client's end of a pipe: the request, and the bytes that come back as messages. Decides
//! nothing; whatever is not framed exactly fails the test. Never waits: it takes what is there.

use bytes::{Buf, BytesMut};
use futures_util::FutureExt;
use hub::event::Wire;
use serde_json::Value;
use tokio::io::{AsyncReadExt, AsyncWriteExt, DuplexStream};

/// One message of the server, and the stream's `id:` that came with it (SSE).
#[derive(Clone, Debug)]
pub struct Arrival {
    /// The object.
    pub message: Value,
    /// The `id:` line of its block.
    pub line_id: Option<String>,
}

/// How far a connection has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stage {
    /// The response head has not been read yet.
    Head,
    /// The stream is open.
    Open,
    /// Answered by this status instead of a stream.
    Refused(u16),
    /// The server's end was reached.
    Ended,
}

/// One connection.
pub struct Connection {
    socket: DuplexStream,
    wire: Wire,
    to_send: BytesMut,
    read: BytesMut,
    /// The body of an event stream, without its chunks.
    body: BytesMut,
    stage: Stage,
    is_at_end: bool,
}

/// What a client asks for in its request.
pub struct Request<'a> {
    /// The transport.
    pub wire: Wire,
    /// The token.
    pub token: &'a str,
    /// `Last-Event-ID`, if any.
    pub cursor: Option<&'a str>,
    /// `?channel=`
    pub channels: &'a [String],
}

impl Request<'_> {
    fn bytes(&self) -> BytesMut {
        let (path, mode) = match self.wire {
            Wire::Ws => (
                "/v1/ws",
                "Upgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Version: 13\r\n\
                 Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n",
            ),
            Wire::Sse => ("/v1/sse", "Accept: text/event-stream\r\n"),
        };
        let query: Vec<String> = self.channels.iter().map(|channel| format!("channel={channel}")).collect();
        let query = if query.is_empty() { String::new() } else { format!("?{}", query.join("&")) };
        let cursor = self.cursor.map_or_else(String::new, |cursor| format!("Last-Event-ID: {cursor}\r\n"));
        let token = self.token;
        let head =
            format!("GET {path}{query} HTTP/1.1\r\nHost: world\r\n{mode}{cursor}Authorization: Bearer {token}\r\n\r\n");
        BytesMut::from(head.as_bytes())
    }
}

impl Connection {
    /// Says the request into `socket`, as far as there is room.
    pub fn new(socket: DuplexStream, request: &Request<'_>) -> Self {
        let mut connection = Self {
            socket,
            wire: request.wire,
            to_send: request.bytes(),
            read: BytesMut::new(),
            body: BytesMut::new(),
            stage: Stage::Head,
            is_at_end: false,
        };
        connection.flush();
        connection
    }

    /// How far it has come.
    pub fn stage(&self) -> Stage {
        self.stage
    }

    /// Queues a message (WebSocket).
    pub fn send(&mut self, message: &Value) {
        self.frame(0x1, message.to_string().as_bytes());
    }

    fn frame(&mut self, opcode: u8, payload: &[u8]) {
        self.to_send.extend_from_slice(&[0x80 | opcode]);
        match payload.len() {
            n @ 0..=125 => self.to_send.extend_from_slice(&[0x80 | n as u8]),
            n => {
                self.to_send.extend_from_slice(&[0x80 | 126]);
                self.to_send.extend_from_slice(&u16::try_from(n).expect("tests say little").to_be_bytes());
            }
        }
        // A mask of zeros is a mask.
        self.to_send.extend_from_slice(&[0; 4]);
        self.to_send.extend_from_slice(payload);
        self.flush();
    }

    fn flush(&mut self) {
        while !self.to_send.is_empty() {
            let written = tokio::task::unconstrained(self.socket.write(&self.to_send)).now_or_never();
            match written {
                Some(Ok(n)) if n > 0 => self.to_send.advance(n),
                _ => return,
            }
        }
    }

    /// Takes at most `max` bytes of what is there now; returns whether there was anything.
    pub fn pull(&mut self, max: usize) -> bool {
        self.flush();
        let mut left = max;
        while left > 0 && !self.is_at_end {
            let mut chunk = [0; 8 * 1024];
            let size = left.min(chunk.len());
            let read = tokio::task::unconstrained(self.socket.read(&mut chunk[..size])).now_or_never();
            match read {
                None => break,
                Some(Ok(n)) if n > 0 => {
                    self.read.extend_from_slice(&chunk[..n]);
                    left -= n;
                }
                Some(_) => self.is_at_end = true,
            }
        }
        left < max
    }

    /// The next whole message of what was pulled.
    pub fn arrival(&mut self) -> Option<Arrival> {
        if self.stage == Stage::Head {
            self.head();
        }
        let arrival = match (self.stage, self.wire) {
            (Stage::Open, Wire::Ws) => self.next_frame(),
            (Stage::Open, Wire::Sse) => self.next_block(),
            _ => None,
        };
        if arrival.is_none() && self.is_at_end && !matches!(self.stage, Stage::Refused(_)) {
            self.stage = Stage::Ended;
        }
        arrival
    }

    fn head(&mut self) {
        let Some(end) = find(&self.read, b"\r\n\r\n") else { return };
        let head = String::from_utf8(self.read.split_to(end + 4).to_vec()).expect("a head is text");
        let status = head.split(' ').nth(1).and_then(|status| status.parse().ok()).expect("a status");
        self.stage = match (self.wire, status) {
            (Wire::Ws, 101) | (Wire::Sse, 200) => Stage::Open,
            _ => Stage::Refused(status),
        };
    }

    fn next_frame(&mut self) -> Option<Arrival> {
        loop {
            let (opcode, payload) = self.take_frame()?;
            match opcode {
                0x1 => {
                    let message = serde_json::from_slice(&payload).expect("a text message is JSON");
                    return Some(Arrival { message, line_id: None });
                }
                0x8 => self.is_at_end = true,
                0x9 => self.frame(0xa, &payload),
                _ => panic!("opcode {opcode} is none of the server's"),
            }
        }
    }

    fn take_frame(&mut self) -> Option<(u8, BytesMut)> {
        let (&first, &second) = (self.read.first()?, self.read.get(1)?);
        assert_eq!(first & 0xf0, 0x80, "one frame is one message");
        let (header, n) = match second {
            n @ 0..=125 => (2, usize::from(n)),
            126 => (4, usize::from(u16::from_be_bytes(self.read.get(2..4)?.try_into().expect("two bytes")))),
            127 => {
                let n = u64::from_be_bytes(self.read.get(2..10)?.try_into().expect("eight bytes"));
                (10, usize::try_from(n).expect("fits the memory"))
            }
            _ => panic!("a server does not mask"),
        };
        if self.read.len() < header + n {
            return None;
        }
        self.read.advance(header);
        Some((first & 0x0f, self.read.split_to(n)))
    }

    fn next_block(&mut self) -> Option<Arrival> {
        loop {
            while let Some(end) = find(&self.body, b"\n\n") {
                let block = self.body.split_to(end + 2);
                let block = std::str::from_utf8(&block).expect("an event stream is text");
                let line = |name: &str| block.lines().find_map(|line| line.strip_prefix(name));
                if let Some(data) = line("data: ") {
                    let message = serde_json::from_str(data).expect("data is JSON");
                    return Some(Arrival { message, line_id: line("id: ").map(str::to_owned) });
                }
            }
            self.next_chunk()?;
        }
    }

    fn next_chunk(&mut self) -> Option<()> {
        let end = find(&self.read, b"\r\n")?;
        let size = std::str::from_utf8(&self.read[..end]).expect("a chunk size is text");
        let size = usize::from_str_radix(size, 16).expect("a chunk size is hexadecimal");
        if self.read.len() < end + 2 + size + 2 {
            return None;
        }
        self.read.advance(end + 2);
        self.body.extend_from_slice(&self.read.split_to(size));
        self.read.advance(2);
        if size == 0 {
            self.is_at_end = true;
            return None;
        }
        Some(())
    }
}

fn find(haystack: &[u8], needle: &[u8]) -> Option<usize> {
    haystack.windows(needle.len()).position(|window| window == needle)
}
