//! A raw WebSocket client: reads frames strictly by RFC 6455, writes any frame a test can think of.
//! It decides what is legal from a server, independently of the code that the gateway uses.

use std::io;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use serde_json::Value;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;

use crate::http::{Head, PATIENCE, Response, Wire};

/// Opcodes of RFC 6455 5.2.
pub mod opcode {
    /// A further fragment.
    pub const CONTINUATION: u8 = 0x0;
    /// Text.
    pub const TEXT: u8 = 0x1;
    /// Bytes.
    pub const BINARY: u8 = 0x2;
    /// The end.
    pub const CLOSE: u8 = 0x8;
    /// A question for a sign of life.
    pub const PING: u8 = 0x9;
    /// The answer.
    pub const PONG: u8 = 0xa;
}

/// `Sec-WebSocket-Key` and the accept value that belongs to it, computed beforehand: the first pair
/// is RFC 6455's own. Alternated, so that a constant answer is found out.
const KEYS: [(&str, &str); 3] = [
    ("dGhlIHNhbXBsZSBub25jZQ==", "s3pPLMBiTxaQ9kYGzzhZRbK+xOo="),
    ("dGlkZWdhdGUtdGVzdGtpdA==", "HCXRQgExPGMxiV0J65A6j11FbKQ="),
    ("YW5vdGhlci1rZXktMDAwMQ==", "LkPNf0/5PWf5hzSDsyc/GZi592k="),
];

/// How a frame to send tells its length.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Length {
    /// In the shortest form, as the RFC demands.
    #[default]
    Shortest,
    /// In two bytes after a 126, whatever it is.
    Two,
    /// In eight bytes after a 127, whatever it is.
    Eight,
    /// In eight bytes, and another one than the payload has.
    Claim(u64),
}

/// A frame to send, legal or not.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Frame {
    /// The last fragment of its message.
    pub fin: bool,
    /// The three reserved bits, 0 to 7.
    pub rsv: u8,
    /// 0 to 15.
    pub opcode: u8,
    /// `None` sends it unmasked, which a client must not.
    pub mask: Option<[u8; 4]>,
    /// How the length is written.
    pub length: Length,
    /// Before masking.
    pub payload: Vec<u8>,
}

impl Frame {
    /// A whole, masked, legal frame.
    pub fn new(opcode: u8, payload: impl Into<Vec<u8>>) -> Self {
        Self {
            fin: true,
            rsv: 0,
            opcode,
            mask: Some([0x37, 0xfa, 0x21, 0x3d]),
            length: Length::Shortest,
            payload: payload.into(),
        }
    }

    /// Its bytes on the wire.
    pub fn bytes(&self) -> Vec<u8> {
        let mut out = vec![u8::from(self.fin) << 7 | self.rsv << 4 | self.opcode];
        let masked = u8::from(self.mask.is_some()) << 7;
        let n = self.payload.len();
        match self.length {
            Length::Shortest if n <= 125 => out.push(masked | n as u8),
            Length::Two => {
                out.push(masked | 126);
                out.extend((n as u16).to_be_bytes());
            }
            Length::Shortest if n <= 0xffff => {
                out.push(masked | 126);
                out.extend((n as u16).to_be_bytes());
            }
            Length::Shortest | Length::Eight => {
                out.push(masked | 127);
                out.extend((n as u64).to_be_bytes());
            }
            Length::Claim(claimed) => {
                out.push(masked | 127);
                out.extend(claimed.to_be_bytes());
            }
        }
        match self.mask {
            None => out.extend(&self.payload),
            Some(mask) => {
                out.extend(mask);
                out.extend(self.payload.iter().zip(mask.iter().cycle()).map(|(byte, key)| byte ^ key));
            }
        }
        out
    }
}

/// What the server sent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Heard {
    /// A whole text message.
    Text(String),
    /// A whole binary message.
    Binary(Vec<u8>),
    /// A ping; it has been answered unless `answer_pings(Answer::Never)`.
    Ping(Vec<u8>),
    /// A pong.
    Pong(Vec<u8>),
    /// A close frame; nothing was answered.
    Close {
        /// `None` where the frame is empty.
        code: Option<u16>,
        /// The text after it.
        reason: String,
    },
    /// The connection ended.
    Cut,
}

/// Are pings answered without the test's doing?
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Answer {
    /// As a browser does.
    Pings,
    /// As a program that hangs.
    Never,
}

/// An open WebSocket.
pub struct WsClient<S = TcpStream> {
    wire: Wire<S>,
    /// The head of the 101.
    pub head: Head,
    patience: Duration,
    answer: Answer,
    /// Fragments so far, and what they are of.
    partial: Option<(u8, Vec<u8>)>,
    is_closed: bool,
}

impl WsClient<TcpStream> {
    /// Opens `path` with these further header fields.
    ///
    /// # Errors
    /// The whole answer where it is not 101.
    ///
    /// # Panics
    /// Where no answer comes within `PATIENCE`, or a 101 that RFC 6455 4.1 forbids to accept.
    pub async fn connect(addr: SocketAddr, path: &str, headers: &[(&str, &str)]) -> Result<Self, Response> {
        let socket = TcpStream::connect(addr).await.unwrap_or_else(|e| panic!("connecting to {addr}: {e}"));
        let _ = socket.set_nodelay(true);
        Self::over(socket, &addr.to_string(), path, headers).await
    }
}

impl<S: AsyncRead + AsyncWrite + Unpin> WsClient<S> {
    /// As `connect`, over a pipe or socket that is open.
    ///
    /// # Errors
    /// As `connect`.
    ///
    /// # Panics
    /// As `connect`.
    pub async fn over(socket: S, host: &str, path: &str, headers: &[(&str, &str)]) -> Result<Self, Response> {
        static N: AtomicUsize = AtomicUsize::new(0);
        let (key, accept) = KEYS[N.fetch_add(1, Ordering::Relaxed) % KEYS.len()];
        let mut fields = vec![
            ("Connection", "Upgrade"),
            ("Upgrade", "websocket"),
            ("Sec-WebSocket-Version", "13"),
            ("Sec-WebSocket-Key", key),
        ];
        // A field that the test gives stands instead of ours.
        fields.retain(|(name, _)| !headers.iter().any(|(given, _)| given.eq_ignore_ascii_case(name)));
        let is_our_key = fields.iter().any(|(name, _)| *name == "Sec-WebSocket-Key");
        fields.extend(headers);
        let mut wire = Wire::new(socket);
        let opening = async {
            wire.ask("GET", path, host, &fields, b"").await?;
            let head = wire.head().await?;
            if head.status == 101 {
                return io::Result::Ok(Ok(head));
            }
            let body = wire.body(&head).await?;
            Ok(Err(Response { head, body }))
        };
        let opened = tokio::time::timeout(PATIENCE, opening).await.expect("an answer in time");
        let head = opened.unwrap_or_else(|e| panic!("GET {path}: {e}"))?;
        let is = |name, value: &str| head.header(name).is_some_and(|is| is.eq_ignore_ascii_case(value));
        assert!(is("upgrade", "websocket") && is("connection", "upgrade"), "{head:?}");
        assert!(!is_our_key || head.header("sec-websocket-accept") == Some(accept), "{head:?}");
        assert_eq!(head.header("sec-websocket-extensions"), None, "none was offered");
        Ok(Self { wire, head, patience: PATIENCE, answer: Answer::Pings, partial: None, is_closed: false })
    }

    /// How long `next` waits before it fails the test.
    pub fn set_patience(&mut self, patience: Duration) {
        self.patience = patience;
    }

    /// Whether pings are answered by `next`; at first they are.
    pub fn answer_pings(&mut self, answer: Answer) {
        self.answer = answer;
    }

    /// The socket, to set options on or to stop reading from.
    pub fn socket(&self) -> &S {
        self.wire.socket()
    }

    /// Writes exactly these bytes.
    ///
    /// # Errors
    /// The connection is gone.
    pub async fn send_bytes(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.wire.send(bytes).await
    }

    /// Writes one frame.
    ///
    /// # Errors
    /// The connection is gone.
    pub async fn send_frame(&mut self, frame: &Frame) -> io::Result<()> {
        self.wire.send(&frame.bytes()).await
    }

    /// Writes a message as one text frame.
    ///
    /// # Panics
    /// Where the connection is gone.
    pub async fn send_json(&mut self, message: &Value) {
        let frame = Frame::new(opcode::TEXT, message.to_string());
        self.send_frame(&frame).await.unwrap_or_else(|e| panic!("sending {message}: {e}"));
    }

    /// Writes a close frame.
    ///
    /// # Errors
    /// The connection is gone.
    pub async fn send_close(&mut self, code: u16, reason: &str) -> io::Result<()> {
        let payload = [&code.to_be_bytes()[..], reason.as_bytes()].concat();
        self.send_frame(&Frame::new(opcode::CLOSE, payload)).await
    }

    /// Closes our half of the connection; what the gateway still says can be read.
    ///
    /// # Errors
    /// The connection is gone.
    pub async fn finish(&mut self) -> io::Result<()> {
        self.wire.finish().await
    }

    /// The next message or control frame.
    ///
    /// # Panics
    /// Where none comes in time, or where it is not legal (RFC 6455 5): masked, reserved bits or
    /// opcodes, a length not in its shortest form, a fragment out of place, text that is no UTF-8,
    /// anything after a close frame.
    ///
    /// # Cancel safety
    /// Safe up to the answer to a ping.
    pub async fn next(&mut self) -> Heard {
        match tokio::time::timeout(self.patience, self.heard()).await {
            Ok(heard) => heard,
            Err(_) => panic!("the server said nothing for {:?}", self.patience),
        }
    }

    async fn heard(&mut self) -> Heard {
        loop {
            let Ok((fin, op, payload)) = self.frame().await else { return Heard::Cut };
            assert!(!self.is_closed, "a frame after the close frame");
            match op {
                opcode::PING => {
                    if self.answer == Answer::Pings {
                        let _ = self.send_frame(&Frame::new(opcode::PONG, payload.clone())).await;
                    }
                    return Heard::Ping(payload);
                }
                opcode::PONG => return Heard::Pong(payload),
                opcode::CLOSE => {
                    self.is_closed = true;
                    return close_of(&payload);
                }
                opcode::CONTINUATION => {
                    let (_, whole) = self.partial.as_mut().expect("a continuation continues something");
                    whole.extend(payload);
                }
                _ => {
                    assert!(self.partial.is_none(), "a message begins within another");
                    self.partial = Some((op, payload));
                }
            }
            if fin && let Some((op, whole)) = self.partial.take() {
                return match op {
                    opcode::TEXT => Heard::Text(String::from_utf8(whole).expect("text is UTF-8")),
                    _ => Heard::Binary(whole),
                };
            }
        }
    }

    /// Reads one frame, leaving it on the wire until it is whole.
    async fn frame(&mut self) -> io::Result<(bool, u8, Vec<u8>)> {
        let head = self.wire.peek(2).await?;
        let (first, second) = (head[0], head[1]);
        let (fin, op) = (first & 0x80 != 0, first & 0x0f);
        assert_eq!(first & 0x70, 0, "reserved bits");
        assert!(matches!(op, 0x0..=0x2 | 0x8..=0xa), "opcode {op:#x}");
        assert_eq!(second & 0x80, 0, "a server does not mask");
        assert!(op < 8 || (fin && second <= 125), "a control frame is whole and short");
        let (n_head, length) = match second {
            126 => {
                let head = self.wire.peek(4).await?;
                let length = usize::from(u16::from_be_bytes([head[2], head[3]]));
                assert!(length > 125, "{length} in two bytes");
                (4, length)
            }
            127 => {
                let head = self.wire.peek(10).await?;
                let length = u64::from_be_bytes(head[2..10].try_into().expect("eight bytes"));
                assert!(length > 0xffff && length < 1 << 63, "{length} in eight bytes");
                (10, usize::try_from(length).expect("a length of this machine"))
            }
            length => (2, usize::from(length)),
        };
        let mut frame = self.wire.exactly(n_head + length).await?;
        Ok((fin, op, frame.split_off(n_head)))
    }

    /// The next text message as JSON; pings and pongs are passed over.
    ///
    /// # Panics
    /// Where something else comes, or as `next`.
    pub async fn json(&mut self) -> Value {
        loop {
            match self.next().await {
                Heard::Text(text) => {
                    return serde_json::from_str(&text).unwrap_or_else(|e| panic!("no JSON ({e}): {text}"));
                }
                Heard::Ping(_) | Heard::Pong(_) => {}
                other => panic!("{other:?} instead of a message"),
            }
        }
    }

    /// The messages up to and with the first of this `type`.
    ///
    /// # Panics
    /// As `json`.
    pub async fn until(&mut self, kind: &str) -> Vec<Value> {
        let mut messages = Vec::new();
        loop {
            let message = self.json().await;
            let is_last = message["type"] == kind;
            messages.push(message);
            if is_last {
                return messages;
            }
        }
    }

    /// The messages up to the close frame, and its code (1005 where it has none, 1006 where there is
    /// no close frame), as a browser would tell.
    pub async fn until_closed(&mut self) -> (Vec<Value>, u16) {
        let mut messages = Vec::new();
        loop {
            match self.next().await {
                Heard::Text(text) => {
                    messages.push(serde_json::from_str(&text).unwrap_or_else(|e| panic!("no JSON ({e}): {text}")));
                }
                Heard::Close { code, .. } => return (messages, code.unwrap_or(1005)),
                Heard::Cut => return (messages, 1006),
                Heard::Binary(_) | Heard::Ping(_) | Heard::Pong(_) => {}
            }
        }
    }
}

fn close_of(payload: &[u8]) -> Heard {
    if payload.is_empty() {
        return Heard::Close { code: None, reason: String::new() };
    }
    assert!(payload.len() >= 2, "a close frame has no code or a whole one");
    let code = u16::from_be_bytes([payload[0], payload[1]]);
    assert!(matches!(code, 1000..=1003 | 1007..=1014 | 3000..=4999), "close code {code}");
    let reason = String::from_utf8(payload[2..].to_vec()).expect("a close reason is UTF-8");
    Heard::Close { code: Some(code), reason }
}
