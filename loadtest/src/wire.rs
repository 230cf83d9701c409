//! The smallest subscriber that is one: a socket, the bytes of an unfinished message, nothing else
//! while it is idle. Decides what is a whole message; what it says is the measurement's to know.

use std::cell::RefCell;
use std::io;
use std::time::Duration;

use clap::ValueEnum;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::timeout;

/// Until a subscriber is ready; also what a gateway in trouble gets before it counts as gone.
const OPEN_TIMEOUT: Duration = Duration::from_secs(30);

const MAX_HEAD_BYTES: usize = 16 << 10;

thread_local! {
    /// Shared by all subscribers of a thread: each uses it only between two waits.
    static SCRATCH: RefCell<Vec<u8>> = RefCell::new(vec![0; 64 << 10]);
}

/// How a subscriber connects.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Transport {
    /// WebSocket
    Ws,
    /// Server-sent events
    Sse,
}

/// Where a listener is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Address(String);

impl Address {
    /// Reads `http://host:port`.
    pub fn parse(url: &str) -> Result<Address, String> {
        let rest = url.strip_prefix("http://").or_else(|| url.strip_prefix("ws://"));
        let authority = rest.ok_or("expected http://host:port")?.trim_end_matches('/');
        let (_, port) = authority.rsplit_once(':').ok_or("expected a port")?;
        port.parse::<u16>().map_err(|_| "expected a port")?;
        if authority.contains('/') { Err("expected no path".to_owned()) } else { Ok(Address(authority.to_owned())) }
    }

    /// Of a listener whose address is known.
    pub fn of(address: std::net::SocketAddr) -> Address {
        Address(address.to_string())
    }

    /// `host:port`.
    pub fn authority(&self) -> &str {
        &self.0
    }
}

/// One session of the gateway.
pub struct Subscriber {
    stream: TcpStream,
    decoder: Decoder,
    /// What came together with the head.
    early: Vec<u8>,
}

/// Why there is no session.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Failure {
    /// The server's no. `code` is its problem's; empty where the answer was none.
    Refused { status: u16, code: String },
    /// No connection, or one that broke.
    Broken(String),
}

impl std::fmt::Display for Failure {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Failure::Refused { status, code } => write!(f, "{status} {code}"),
            Failure::Broken(why) => f.write_str(why),
        }
    }
}

impl Subscriber {
    /// Connects, and waits for `ready`.
    pub async fn open(
        to: &Address,
        transport: Transport,
        token: Option<&str>,
        channel: &str,
    ) -> Result<Subscriber, String> {
        let opening = async {
            let mut subscriber =
                Subscriber::connect(to.authority(), transport, token, channel).await.map_err(|no| no.to_string())?;
            subscriber.until_ready().await?;
            Ok(subscriber)
        };
        timeout(OPEN_TIMEOUT, opening).await.unwrap_or_else(|_| Err("not ready in time".to_owned()))
    }

    /// Connects and waits for the server's yes (101, or the head of a stream) or no.
    pub async fn connect(
        authority: &str,
        transport: Transport,
        token: Option<&str>,
        channel: &str,
    ) -> Result<Subscriber, Failure> {
        let broken = |error: io::Error| Failure::Broken(error.to_string());
        let mut stream = TcpStream::connect(authority).await.map_err(broken)?;
        stream.set_nodelay(true).map_err(broken)?;
        stream.write_all(request(authority, transport, token, channel).as_bytes()).await.map_err(broken)?;
        let (head, rest) = read_head(&mut stream).await.map_err(Failure::Broken)?;
        let decoder = match (transport, status(&head)) {
            (Transport::Ws, Some(101)) => Decoder::Ws(Vec::new()),
            (Transport::Sse, Some(200)) => Decoder::sse(&head),
            (_, Some(status)) => {
                let code = read_code(&mut stream, &head, rest).await;
                return Err(Failure::Refused { status, code });
            }
            (_, None) => return Err(Failure::Broken("no status".to_owned())),
        };
        Ok(Subscriber { stream, decoder, early: rest })
    }

    /// Waits for `ready`; what comes before it is dropped.
    pub async fn until_ready(&mut self) -> Result<(), String> {
        let mut is_ready = false;
        let early = std::mem::take(&mut self.early);
        self.digest(&early, &mut |text| is_ready |= contains(text, br#""type":"ready""#))?;
        while !is_ready {
            self.read_some(&mut |text| is_ready |= contains(text, br#""type":"ready""#)).await?;
        }
        Ok(())
    }

    /// Shows every message to `look` until the connection ends; says how it ended. Answers pings.
    ///
    /// # Cancel safety
    /// Safe: bytes are taken only in the step in which they are looked at.
    pub async fn listen(&mut self, mut look: impl FnMut(&[u8])) -> String {
        let early = std::mem::take(&mut self.early);
        if let Err(end) = self.digest(&early, &mut look) {
            return end;
        }
        loop {
            if let Err(end) = self.read_some(&mut look).await {
                return end;
            }
        }
    }

    /// Answers the server's close with the same code. `listen` has ended with it; called again it
    /// waits for the end of the stream, which is then the server's to make.
    pub fn answer_close(&self, code: u16) -> Result<(), String> {
        let [high, low] = code.to_be_bytes();
        // Masked with zeros, as the pongs are.
        self.stream.try_write(&[0x88, 0x82, 0, 0, 0, 0, high, low]).map(drop).map_err(|error| error.to_string())
    }

    /// The socket, its decoder and what was read but not yet shown, for who reads in another way.
    pub fn into_parts(self) -> (TcpStream, Decoder, Vec<u8>) {
        (self.stream, self.decoder, self.early)
    }

    async fn read_some(&mut self, look: &mut impl FnMut(&[u8])) -> Result<(), String> {
        self.stream.readable().await.map_err(|error| error.to_string())?;
        SCRATCH.with_borrow_mut(|scratch| match self.stream.try_read(scratch) {
            Ok(0) => Err("end of stream".to_owned()),
            Ok(n) => self.digest(&scratch[..n], look),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(()),
            Err(error) => Err(error.to_string()),
        })
    }

    fn digest(&mut self, bytes: &[u8], look: &mut impl FnMut(&[u8])) -> Result<(), String> {
        let stream = &self.stream;
        self.decoder.feed(bytes, &mut |seen| match seen {
            Seen::Text(text) => {
                look(text);
                Ok(())
            }
            Seen::Ping(payload) => {
                let mut pong = vec![0x8a, 0x80 | payload.len() as u8, 0, 0, 0, 0];
                pong.extend_from_slice(payload);
                // A few bytes now and then always fit into the socket's buffer.
                stream.try_write(&pong).map(drop).map_err(|error| error.to_string())
            }
            Seen::Close(code) => Err(format!("closed with {code}")),
        })
    }
}

/// The code in a refusal's body, of which `rest` came with the head; empty where there is none.
pub async fn read_code(stream: &mut TcpStream, head: &str, mut rest: Vec<u8>) -> String {
    let length: usize = header(head, "content-length").and_then(|length| length.parse().ok()).unwrap_or(0);
    while rest.len() < length.min(MAX_HEAD_BYTES) {
        match stream.read_buf(&mut rest).await {
            Ok(1..) => {}
            _ => break,
        }
    }
    let problem: serde_json::Value = serde_json::from_slice(&rest).unwrap_or_default();
    problem["code"].as_str().unwrap_or_default().to_owned()
}

/// The status of an answer's head.
pub fn status(head: &str) -> Option<u16> {
    head.split(' ').nth(1)?.parse().ok()
}

/// A request's head. No channel is named where `channel` is empty.
pub fn request(authority: &str, transport: Transport, token: Option<&str>, channel: &str) -> String {
    let (path, more) = match transport {
        Transport::Sse => ("sse", "Accept: text/event-stream\r\n"),
        Transport::Ws => (
            "ws",
            "Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGlkZWdhdGUgbG9hZHRlcw==\r\n",
        ),
    };
    let authorization = token.map(|token| format!("Authorization: Bearer {token}\r\n")).unwrap_or_default();
    let channel: String = channel.bytes().map(|byte| format!("%{byte:02X}")).collect();
    let query = if channel.is_empty() { String::new() } else { format!("?channel={channel}") };
    format!("GET /v1/{path}{query} HTTP/1.1\r\nHost: {authority}\r\n{more}{authorization}\r\n")
}

/// Reads to the end of an HTTP head; gives it and what came after it.
pub async fn read_head(stream: &mut TcpStream) -> Result<(String, Vec<u8>), String> {
    let mut bytes = Vec::with_capacity(1024);
    loop {
        if let Some(end) = bytes.windows(4).position(|four| four == b"\r\n\r\n") {
            let rest = bytes.split_off(end + 4);
            return Ok((String::from_utf8_lossy(&bytes).into_owned(), rest));
        }
        if bytes.len() > MAX_HEAD_BYTES {
            return Err("an endless head".to_owned());
        }
        match stream.read_buf(&mut bytes).await {
            Ok(0) => return Err("end of stream in the head".to_owned()),
            Ok(_) => {}
            Err(error) => return Err(error.to_string()),
        }
    }
}

/// The value of a header of a head.
pub fn header<'a>(head: &'a str, name: &str) -> Option<&'a str> {
    head.lines()
        .filter_map(|line| line.split_once(':'))
        .find(|(n, _)| n.eq_ignore_ascii_case(name))
        .map(|(_, value)| value.trim())
}

/// The digits after `marker`, as a number.
pub fn number_after(text: &[u8], marker: &[u8]) -> Option<u64> {
    let at = text.windows(marker.len()).position(|window| window == marker)? + marker.len();
    let digits = text[at..].iter().take_while(|byte| byte.is_ascii_digit());
    digits.fold(None, |number, digit| Some(number.unwrap_or(0) * 10 + u64::from(digit - b'0')))
}

pub fn contains(text: &[u8], part: &[u8]) -> bool {
    text.windows(part.len()).any(|window| window == part)
}

/// What a server sent.
pub enum Seen<'a> {
    Text(&'a [u8]),
    Ping(&'a [u8]),
    Close(u16),
}

/// Cuts what a server sends into messages.
pub enum Decoder {
    /// The bytes of an unfinished frame.
    Ws(Vec<u8>),
    /// The bytes of an unfinished line, and of an unfinished chunk head where the body is chunked.
    Sse { line: Vec<u8>, chunks: Option<Chunks> },
}

/// Where we are in a chunked body.
#[derive(Default)]
pub struct Chunks {
    head: Vec<u8>,
    left: usize,
}

impl Decoder {
    fn sse(head: &str) -> Decoder {
        let is_chunked = header(head, "transfer-encoding").is_some_and(|value| value.eq_ignore_ascii_case("chunked"));
        Decoder::Sse { line: Vec::new(), chunks: is_chunked.then(Chunks::default) }
    }

    /// Shows every message that these bytes complete; what `see` fails with ends it.
    pub fn feed(
        &mut self,
        mut bytes: &[u8],
        see: &mut impl FnMut(Seen<'_>) -> Result<(), String>,
    ) -> Result<(), String> {
        match self {
            Decoder::Ws(partial) if partial.is_empty() => {
                let rest = frames(bytes, see)?;
                partial.extend_from_slice(rest);
            }
            Decoder::Ws(partial) => {
                partial.extend_from_slice(bytes);
                let rest = frames(partial, see)?.len();
                partial.drain(..partial.len() - rest);
            }
            Decoder::Sse { line, chunks: None } => lines(line, bytes, see)?,
            Decoder::Sse { line, chunks: Some(chunks) } => {
                while let Some(body) = chunks.next(&mut bytes)? {
                    lines(line, body, see)?;
                }
            }
        }
        // An idle session keeps no buffer.
        match self {
            Decoder::Ws(buffer) | Decoder::Sse { line: buffer, .. } if buffer.is_empty() => *buffer = Vec::new(),
            _ => {}
        }
        Ok(())
    }
}

/// Shows every whole frame at the head of `bytes` and gives what is left. A server's frames have no
/// mask, and this server's events are never fragmented.
fn frames<'a>(mut bytes: &'a [u8], see: &mut impl FnMut(Seen<'_>) -> Result<(), String>) -> Result<&'a [u8], String> {
    while let [kind, short, ..] = *bytes {
        let (head, length) = match short {
            126 if bytes.len() >= 4 => (4, u64::from(u16::from_be_bytes([bytes[2], bytes[3]]))),
            127 if bytes.len() >= 10 => (10, u64::from_be_bytes(bytes[2..10].try_into().expect("eight bytes"))),
            126 | 127 => return Ok(bytes),
            length => (2, u64::from(length)),
        };
        let end = usize::try_from(length).map_err(|_| "an endless frame")?.saturating_add(head);
        let Some(payload) = bytes.get(head..end) else { return Ok(bytes) };
        match kind {
            0x81 => see(Seen::Text(payload))?,
            0x88 => see(Seen::Close(payload.get(..2).map_or(1005, |code| u16::from_be_bytes([code[0], code[1]]))))?,
            0x89 if payload.len() < 126 => see(Seen::Ping(payload))?,
            0x8a => {}
            other => return Err(format!("a frame that is not expected here: {other:#x}")),
        }
        bytes = &bytes[end..];
    }
    Ok(bytes)
}

/// Shows the value of every whole `data:` line; a message of this server is one line.
fn lines(
    line: &mut Vec<u8>,
    mut bytes: &[u8],
    see: &mut impl FnMut(Seen<'_>) -> Result<(), String>,
) -> Result<(), String> {
    while let Some(end) = bytes.iter().position(|byte| *byte == b'\n') {
        line.extend_from_slice(&bytes[..end]);
        bytes = &bytes[end + 1..];
        if let Some(data) = line.strip_prefix(b"data:") {
            see(Seen::Text(data))?;
        }
        line.clear();
    }
    line.extend_from_slice(bytes);
    Ok(())
}

impl Chunks {
    /// Cuts the next piece of body from `bytes`; `None` where more bytes are needed.
    fn next<'a>(&mut self, bytes: &mut &'a [u8]) -> Result<Option<&'a [u8]>, String> {
        while self.left == 0 {
            let Some((byte, rest)) = bytes.split_first() else { return Ok(None) };
            *bytes = rest;
            match byte {
                b'\n' if !self.head.is_empty() => {
                    let digits = std::str::from_utf8(&self.head).unwrap_or_default();
                    self.left = usize::from_str_radix(digits, 16).map_err(|_| "a broken chunk")?;
                    self.head.clear();
                    if self.left == 0 {
                        return Err("end of body".to_owned());
                    }
                }
                // Also the empty line after the chunk before.
                b'\r' | b'\n' => {}
                digit => self.head.push(*digit),
            }
        }
        let (body, rest) = bytes.split_at(self.left.min(bytes.len()));
        self.left -= body.len();
        *bytes = rest;
        Ok((!body.is_empty()).then_some(body))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Feeds `bytes` in pieces of every size and gives what was seen, which must always be the same.
    fn seen(decoder: impl Fn() -> Decoder, bytes: &[u8]) -> Vec<String> {
        let with_pieces_of = |size: usize| {
            let (mut decoder, mut seen) = (decoder(), Vec::new());
            for piece in bytes.chunks(size) {
                let _ = decoder.feed(piece, &mut |what| {
                    seen.push(match what {
                        Seen::Text(text) => String::from_utf8_lossy(text).into_owned(),
                        Seen::Ping(payload) => format!("ping {}", payload.len()),
                        Seen::Close(code) => format!("close {code}"),
                    });
                    Ok(())
                });
            }
            seen
        };
        let whole = with_pieces_of(bytes.len());
        for size in 1..bytes.len().min(40) {
            assert_eq!(with_pieces_of(size), whole, "pieces of {size}");
        }
        whole
    }

    #[test]
    fn frames_of_every_length_form_are_seen_whole() {
        let mut bytes = b"\x81\x02hi\x89\x00\x8a\x00".to_vec();
        bytes.extend_from_slice(&[0x81, 126, 0, 126]);
        bytes.extend_from_slice(&[b'a'; 126]);
        bytes.extend_from_slice(&[0x81, 127, 0, 0, 0, 0, 0, 1, 0, 0]);
        bytes.extend_from_slice(&[b'b'; 65_536]);
        bytes.extend_from_slice(b"\x88\x02\x03\xe9");
        let seen = seen(|| Decoder::Ws(Vec::new()), &bytes);
        assert_eq!(
            (seen[0].as_str(), seen[1].as_str(), seen[2].len(), seen[3].len(), seen[4].as_str()),
            ("hi", "ping 0", 126, 65_536, "close 1001")
        );
    }

    #[test]
    fn data_lines_are_seen_with_and_without_chunks() {
        let plain = "HTTP/1.1 200 OK\r\nconnection: close\r\n\r\n";
        assert_eq!(seen(|| Decoder::sse(plain), b": hb\n\nid: 5-1\ndata:{\"a\":1}\n\ndata:2\n\n"), ["{\"a\":1}", "2"]);
        let chunked = "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n";
        assert_eq!(
            seen(|| Decoder::sse(chunked), b"a\r\n: hb\n\ndata\r\nB\r\n:{\"a\":1}\n\nd\r\n6\r\nata:2\n\r\n0\r\n\r\n"),
            ["{\"a\":1}", "2"]
        );
    }

    #[test]
    fn an_address_is_a_host_and_a_port() {
        assert_eq!(Address::parse("http://[::1]:80/"), Ok(Address("[::1]:80".into())));
        for bad in ["http://h", "https://h:1", "h:1", "http://h:1/x", "http://h:99999"] {
            assert!(Address::parse(bad).is_err(), "{bad}");
        }
    }
}
