//! A raw client of the event stream: chunks into blocks, nothing more. It neither reconnects nor
//! judges what the blocks say; it fails the test where the framing is not exact.

use std::io;
use std::net::SocketAddr;
use std::time::Duration;

use serde_json::Value;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;

use crate::http::{Head, PATIENCE, Response, Wire};

/// One block of the stream, as its lines say.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Block {
    /// `event:`
    pub event: Option<String>,
    /// `id:`
    pub id: Option<String>,
    /// `data:`, several joined by line ends.
    pub data: Option<String>,
    /// `retry:` in ms.
    pub retry: Option<u64>,
    /// Lines that begin with a colon, without it.
    pub comments: Vec<String>,
}

impl Block {
    /// Is it a heartbeat: comments and nothing else?
    pub fn is_comment(&self) -> bool {
        *self == Block { comments: self.comments.clone(), ..Block::default() }
    }

    /// `data` as JSON.
    ///
    /// # Panics
    /// Where there is none.
    pub fn json(&self) -> Value {
        let data = self.data.as_deref().unwrap_or_else(|| panic!("a block without data: {self:?}"));
        serde_json::from_str(data).unwrap_or_else(|e| panic!("no JSON ({e}): {data}"))
    }

    /// The `type` of the message in it; empty where it has none.
    pub fn kind(&self) -> String {
        self.json()["type"].as_str().unwrap_or_default().to_owned()
    }
}

/// What the stream brought.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Heard {
    /// A block.
    Block(Block),
    /// The body ended as it should.
    End,
    /// The connection ended in the midst of the body.
    Cut,
}

/// An open stream.
pub struct SseClient<S = TcpStream> {
    wire: Wire<S>,
    /// The head of the answer.
    pub head: Head,
    patience: Duration,
    text: Vec<u8>,
    is_ended: bool,
}

impl SseClient<TcpStream> {
    /// Asks for `path` with these header fields.
    ///
    /// # Errors
    /// The whole answer where it is not 200 `text/event-stream`, or one of a length known from the
    /// start: no stream goes on behind that, so it is somebody else's word and not the gateway's.
    ///
    /// # Panics
    /// Where no head comes within `PATIENCE`.
    pub async fn connect(addr: SocketAddr, path: &str, headers: &[(&str, &str)]) -> Result<Self, Response> {
        let socket = TcpStream::connect(addr).await.unwrap_or_else(|e| panic!("connecting to {addr}: {e}"));
        Self::over(socket, &addr.to_string(), path, headers).await
    }
}

impl<S: AsyncRead + AsyncWrite + Unpin> SseClient<S> {
    /// As `connect`, over a pipe or socket that is open.
    ///
    /// # Errors
    /// As `connect`.
    ///
    /// # Panics
    /// As `connect`.
    pub async fn over(socket: S, host: &str, path: &str, headers: &[(&str, &str)]) -> Result<Self, Response> {
        let mut wire = Wire::new(socket);
        let mut fields = vec![("Accept", "text/event-stream")];
        fields.extend(headers);
        let opening = async {
            wire.ask("GET", path, host, &fields, b"").await?;
            let head = wire.head().await?;
            let is_stream = head.status == 200
                && head.header("content-length").is_none()
                && head.header("content-type").is_some_and(|kind| kind.starts_with("text/event-stream"));
            if is_stream {
                return io::Result::Ok(Ok(head));
            }
            let body = wire.body(&head).await?;
            Ok(Err(Response { head, body }))
        };
        let opened = tokio::time::timeout(PATIENCE, opening).await.expect("an answer in time");
        let head = opened.unwrap_or_else(|e| panic!("GET {path}: {e}"))?;
        assert_eq!(head.header("transfer-encoding"), Some("chunked"));
        Ok(Self { wire, head, patience: PATIENCE, text: Vec::new(), is_ended: false })
    }

    /// How long `next` waits before it fails the test.
    pub fn set_patience(&mut self, patience: Duration) {
        self.patience = patience;
    }

    /// The next block, or the end.
    ///
    /// # Panics
    /// Where none comes in time, or the stream's framing is broken.
    ///
    /// # Cancel safety
    /// Safe.
    pub async fn next(&mut self) -> Heard {
        match tokio::time::timeout(self.patience, self.heard()).await {
            Ok(heard) => heard,
            Err(_) => panic!("the stream said nothing for {:?}", self.patience),
        }
    }

    async fn heard(&mut self) -> Heard {
        loop {
            if let Some(end) = self.text.windows(2).position(|two| two == b"\n\n") {
                let rest = self.text.split_off(end + 2);
                let block = std::mem::replace(&mut self.text, rest);
                return Heard::Block(parse(&block[..end]));
            }
            if self.is_ended {
                assert!(self.text.is_empty(), "the body ends in the midst of a block");
                return Heard::End;
            }
            match self.wire.chunk().await {
                Ok(Some(chunk)) => self.text.extend(chunk),
                Ok(None) => self.is_ended = true,
                Err(e) if e.kind() == io::ErrorKind::InvalidData => panic!("{e}"),
                Err(_) => return Heard::Cut,
            }
        }
    }

    /// The next block that is not a heartbeat.
    ///
    /// # Panics
    /// Where the stream ends instead, or as `next`.
    pub async fn block(&mut self) -> Block {
        loop {
            match self.next().await {
                Heard::Block(block) if block.is_comment() => {}
                Heard::Block(block) => return block,
                end => panic!("{end:?} instead of a block"),
            }
        }
    }

    /// The blocks up to and with the first message of this `type`.
    ///
    /// # Panics
    /// As `block`.
    pub async fn until(&mut self, kind: &str) -> Vec<Block> {
        let mut blocks = Vec::new();
        loop {
            let block = self.block().await;
            let is_last = block.kind() == kind;
            blocks.push(block);
            if is_last {
                return blocks;
            }
        }
    }

    /// The blocks up to the body's end.
    ///
    /// # Panics
    /// Where the connection is cut, or as `next`.
    pub async fn until_end(&mut self) -> Vec<Block> {
        let mut blocks = Vec::new();
        loop {
            match self.next().await {
                Heard::Block(block) => blocks.push(block),
                Heard::End => return blocks,
                Heard::Cut => panic!("cut after {blocks:?}"),
            }
        }
    }
}

fn parse(block: &[u8]) -> Block {
    let text = std::str::from_utf8(block).expect("the stream is UTF-8");
    assert!(!text.contains('\r'), "one kind of line end: {text:?}");
    let mut parsed = Block::default();
    for line in text.split('\n') {
        let (field, value) = line.split_once(':').unwrap_or_else(|| panic!("a line without a colon: {line:?}"));
        let value = value.strip_prefix(' ').unwrap_or(value).to_owned();
        match field {
            "" => parsed.comments.push(value),
            "event" => once(&mut parsed.event, value, text),
            "id" => once(&mut parsed.id, value, text),
            "retry" => {
                let ms = value.parse().unwrap_or_else(|_| panic!("retry is a number: {text:?}"));
                once(&mut parsed.retry, ms, text);
            }
            "data" => match &mut parsed.data {
                Some(data) => {
                    data.push('\n');
                    data.push_str(&value);
                }
                none => *none = Some(value),
            },
            _ => panic!("an unknown field: {line:?}"),
        }
    }
    parsed
}

fn once<T>(place: &mut Option<T>, value: T, block: &str) {
    assert!(place.replace(value).is_none(), "a field stands twice in {block:?}");
}
