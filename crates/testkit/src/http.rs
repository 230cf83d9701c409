//! Just enough HTTP/1.1 to ask one thing and read the whole answer, byte by byte by the standard and
//! strict about it. Also the buffered socket that `sse` and `ws` read from.

use std::io;
use std::net::SocketAddr;
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::TcpStream;

/// How long a test client waits for the other side before it fails the test, unless told otherwise.
/// Not a promise of the gateway: only so that nothing hangs.
pub const PATIENCE: Duration = Duration::from_secs(60);
/// A head larger than this is no head.
const MAX_HEAD: usize = 64 * 1024;

/// Status line and header fields of an answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Head {
    /// 101, 200, …
    pub status: u16,
    /// In the order sent, names in lower case.
    pub headers: Vec<(String, String)>,
}

impl Head {
    /// The only field of this name (lower case), if there is one.
    ///
    /// # Panics
    /// Where the field was sent twice.
    pub fn header(&self, name: &str) -> Option<&str> {
        let mut values = self.headers.iter().filter(|(n, _)| n == name).map(|(_, v)| v.as_str());
        let value = values.next();
        assert!(values.next().is_none(), "{name} was sent twice: {:?}", self.headers);
        value
    }
}

/// A whole answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Response {
    /// Status and header fields.
    pub head: Head,
    /// The body, chunks joined.
    pub body: Vec<u8>,
}

impl Response {
    /// The status.
    pub fn status(&self) -> u16 {
        self.head.status
    }

    /// See `Head::header`.
    pub fn header(&self, name: &str) -> Option<&str> {
        self.head.header(name)
    }

    /// The body as text.
    ///
    /// # Panics
    /// Where it is no UTF-8.
    pub fn text(&self) -> &str {
        std::str::from_utf8(&self.body).expect("the body is UTF-8")
    }

    /// The body as JSON.
    ///
    /// # Panics
    /// Where it is none.
    pub fn json(&self) -> serde_json::Value {
        serde_json::from_slice(&self.body).unwrap_or_else(|e| panic!("no JSON ({e}): {}", self.text()))
    }
}

/// `GET path`.
///
/// # Panics
/// Where there is no whole answer within `PATIENCE`.
pub async fn get(addr: SocketAddr, path: &str) -> Response {
    request(addr, "GET", path, &[], b"").await
}

/// `POST path` with a JSON body.
///
/// # Panics
/// As `get`.
pub async fn post_json(addr: SocketAddr, path: &str, body: &serde_json::Value) -> Response {
    request(addr, "POST", path, &[("Content-Type", "application/json")], body.to_string().as_bytes()).await
}

/// One request on a connection of its own. `Host` is the address unless given; `Content-Length`
/// stands there where a body does.
///
/// # Panics
/// As `get`.
pub async fn request(addr: SocketAddr, method: &str, path: &str, headers: &[(&str, &str)], body: &[u8]) -> Response {
    try_request(addr, method, path, headers, body).await.unwrap_or_else(|e| panic!("{method} {path} at {addr}: {e}"))
}

/// As `request`.
///
/// # Errors
/// No connection, one cut before the answer's end, none within `PATIENCE`, or no HTTP.
pub async fn try_request(
    addr: SocketAddr,
    method: &str,
    path: &str,
    headers: &[(&str, &str)],
    body: &[u8],
) -> io::Result<Response> {
    let whole = async {
        let mut wire = Wire::new(TcpStream::connect(addr).await?);
        let mut fields = headers.to_vec();
        let length = body.len().to_string();
        if !body.is_empty() || method == "POST" {
            fields.push(("Content-Length", &length));
        }
        wire.ask(method, path, &addr.to_string(), &fields, body).await?;
        let head = wire.head().await?;
        let body = if method == "HEAD" { Vec::new() } else { wire.body(&head).await? };
        Ok(Response { head, body })
    };
    tokio::time::timeout(PATIENCE, whole).await.map_err(|_| io::Error::from(io::ErrorKind::TimedOut))?
}

/// A socket (or pipe) with what was read from it and not yet used.
pub struct Wire<S = TcpStream> {
    socket: S,
    unread: Vec<u8>,
}

impl<S: AsyncRead + AsyncWrite + Unpin> Wire<S> {
    /// Nothing is read yet.
    pub fn new(socket: S) -> Self {
        Self { socket, unread: Vec::new() }
    }

    /// The socket, and what had been read from it already.
    pub fn into_parts(self) -> (S, Vec<u8>) {
        (self.socket, self.unread)
    }

    /// The socket, to set options on.
    pub fn socket(&self) -> &S {
        &self.socket
    }

    /// Writes exactly these bytes.
    ///
    /// # Errors
    /// The connection is gone.
    pub async fn send(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.socket.write_all(bytes).await?;
        self.socket.flush().await
    }

    /// Closes our half; what the peer still says can be read.
    ///
    /// # Errors
    /// The connection is gone.
    pub async fn finish(&mut self) -> io::Result<()> {
        self.socket.shutdown().await
    }

    /// Writes a request. `Host` is `host` where `headers` have none.
    ///
    /// # Errors
    /// The connection is gone.
    pub async fn ask(
        &mut self,
        method: &str,
        path: &str,
        host: &str,
        headers: &[(&str, &str)],
        body: &[u8],
    ) -> io::Result<()> {
        let mut head = format!("{method} {path} HTTP/1.1\r\n");
        if !headers.iter().any(|(name, _)| name.eq_ignore_ascii_case("host")) {
            head.push_str(&format!("Host: {host}\r\n"));
        }
        for (name, value) in headers {
            head.push_str(&format!("{name}: {value}\r\n"));
        }
        head.push_str("\r\n");
        self.send(&[head.as_bytes(), body].concat()).await
    }

    /// Reads the head of an answer; 1xx other than 101 are passed over.
    ///
    /// # Errors
    /// The connection ended before, or this is no HTTP/1.1.
    pub async fn head(&mut self) -> io::Result<Head> {
        loop {
            let end = loop {
                if let Some(at) = find(&self.unread, b"\r\n\r\n") {
                    break at;
                }
                if self.unread.len() > MAX_HEAD {
                    return Err(no_http("the head has no end"));
                }
                self.fill().await?;
            };
            let text = String::from_utf8(self.take(end + 4)).map_err(|_| no_http("the head is no UTF-8"))?;
            let head = parse_head(&text[..end])?;
            if head.status == 101 || head.status >= 200 {
                return Ok(head);
            }
        }
    }

    /// Reads the body that belongs to `head`.
    ///
    /// # Errors
    /// The connection ended before the body did.
    pub async fn body(&mut self, head: &Head) -> io::Result<Vec<u8>> {
        if matches!(head.status, 101 | 204 | 304) {
            return Ok(Vec::new());
        }
        if let Some(coding) = head.header("transfer-encoding") {
            assert_eq!(coding, "chunked");
            assert_eq!(head.header("content-length"), None, "a chunked body has no length");
            let mut body = Vec::new();
            while let Some(chunk) = self.chunk().await? {
                body.extend(chunk);
            }
            return Ok(body);
        }
        match head.header("content-length") {
            Some(length) => {
                let length = length.parse().map_err(|_| no_http("content-length"))?;
                self.exactly(length).await
            }
            None => {
                loop {
                    match self.fill().await {
                        Ok(()) => {}
                        Err(e) if e.kind() == io::ErrorKind::UnexpectedEof => break,
                        Err(e) => return Err(e),
                    }
                }
                Ok(std::mem::take(&mut self.unread))
            }
        }
    }

    /// The next chunk of a chunked body; `None` is its end.
    ///
    /// # Errors
    /// The connection ended before, or the framing is broken.
    pub async fn chunk(&mut self) -> io::Result<Option<Vec<u8>>> {
        let end = loop {
            if let Some(at) = find(&self.unread, b"\r\n") {
                break at;
            }
            if self.unread.len() > MAX_HEAD {
                return Err(no_http("a chunk's size has no end"));
            }
            self.fill().await?;
        };
        let line = std::str::from_utf8(&self.unread[..end]).ok();
        let size = line.and_then(|text| usize::from_str_radix(text, 16).ok());
        let size = size.ok_or_else(|| no_http("a chunk's size"))?;
        // The size stays unread until its chunk is whole: whoever is cancelled here begins anew.
        while self.unread.len() < end + 2 + size + 2 {
            self.fill().await?;
        }
        self.take(end + 2);
        let mut chunk = self.take(size + 2);
        if chunk.split_off(size) != b"\r\n" {
            return Err(no_http("a chunk's end (trailers are not expected)"));
        }
        Ok((size > 0).then_some(chunk))
    }

    /// Exactly so many bytes.
    ///
    /// # Errors
    /// `UnexpectedEof` where the connection ended before.
    ///
    /// # Cancel safety
    /// Safe: what was read stays for the next call.
    pub async fn exactly(&mut self, n: usize) -> io::Result<Vec<u8>> {
        while self.unread.len() < n {
            self.fill().await?;
        }
        Ok(self.take(n))
    }

    /// At least so many bytes, left where they are.
    ///
    /// # Errors
    /// `UnexpectedEof` where the connection ended before.
    pub async fn peek(&mut self, n: usize) -> io::Result<&[u8]> {
        while self.unread.len() < n {
            self.fill().await?;
        }
        Ok(&self.unread[..n])
    }

    async fn fill(&mut self) -> io::Result<()> {
        match self.socket.read_buf(&mut self.unread).await? {
            0 => Err(io::ErrorKind::UnexpectedEof.into()),
            _ => Ok(()),
        }
    }

    fn take(&mut self, n: usize) -> Vec<u8> {
        let rest = self.unread.split_off(n);
        std::mem::replace(&mut self.unread, rest)
    }
}

fn parse_head(text: &str) -> io::Result<Head> {
    let mut lines = text.split("\r\n");
    let status = lines
        .next()
        .and_then(|line| line.strip_prefix("HTTP/1.1 "))
        .and_then(|rest| rest.get(..3))
        .and_then(|digits| digits.parse().ok())
        .ok_or_else(|| no_http("the status line"))?;
    let headers = lines
        .map(|line| {
            let (name, value) = line.split_once(':').ok_or_else(|| no_http(line))?;
            Ok((name.to_ascii_lowercase(), value.trim().to_owned()))
        })
        .collect::<io::Result<_>>()?;
    Ok(Head { status, headers })
}

fn find(hay: &[u8], needle: &[u8]) -> Option<usize> {
    hay.windows(needle.len()).position(|window| window == needle)
}

fn no_http(what: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, format!("no HTTP/1.1: {what}"))
}
