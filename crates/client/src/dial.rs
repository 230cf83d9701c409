//! One attempt to connect: address, request, the server's yes or no. Decides what a refusal means;
//! when to try again is the driver's.

use std::net::SocketAddr;
use std::time::Duration;

use bytes::Bytes;
use http::header::{ACCEPT, AUTHORIZATION, CONNECTION, CONTENT_TYPE, HOST, RETRY_AFTER, UPGRADE};
use http::{HeaderMap, HeaderValue, Request, Response, StatusCode, Uri};
use http_body_util::{BodyExt, Empty, Limited};
use hyper::body::Incoming;
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use serde::Deserialize;
use tokio::net::TcpStream;
use tokio::sync::mpsc;
use tokio::task::JoinSet;

use crate::alive::{Alive, SilenceLimit};
use crate::client::BuildError;
use crate::end::{Aftermath, Loss};
use crate::{sse, ws};

/// Which of the two wires is spoken.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Transport {
    /// WebSocket: everything works.
    #[default]
    Ws,
    /// Server-sent events: one way. Channels are named when connecting; nothing can be sent.
    Sse,
}

/// From the first packet to the server's yes; and the longest silence until its `hello` says what
/// it promises.
pub(crate) const DIAL_TIMEOUT: Duration = Duration::from_secs(15);

/// Messages that were read and not yet taken. A slow program stops the reading here, so that the
/// server notices it.
const ARRIVALS: usize = 256;

/// Messages on their way to the socket.
const OUTGOING: usize = 64;

/// Before each channel of the query.
const CHANNEL: &str = "channel=";

/// Of a refusal's body, no more is read.
const MAX_PROBLEM_BYTES: usize = 64 << 10;

/// Where to connect to.
#[derive(Debug, Clone)]
pub(crate) struct Target {
    host: String,
    port: u16,
    authority: String,
    path: String,
    query: Option<String>,
}

/// What a connection hands to the driver.
#[derive(Debug)]
pub(crate) enum Arrival {
    /// A message, and the cursor that the wire itself gave with it.
    Message { text: String, cursor: Option<String> },
    /// Nothing comes after this.
    Ended(Ending),
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Ending {
    Eof,
    Close(u16),
    Silent,
    Broken(String),
}

/// What the driver hands to a WebSocket.
#[derive(Debug)]
pub(crate) enum Outgoing {
    Text(String),
    Pong(Vec<u8>),
    Close(u16),
}

/// An open connection. Dropping it ends its tasks and the socket with them.
pub(crate) struct Link {
    pub(crate) arrivals: mpsc::Receiver<Arrival>,
    pub(crate) outgoing: mpsc::Sender<Outgoing>,
    pub(crate) silence: SilenceLimit,
    _tasks: JoinSet<()>,
}

/// What to ask for, and as whom.
pub(crate) struct Attempt {
    pub(crate) target: Target,
    /// Instead of the target's host and port.
    pub(crate) address: Option<SocketAddr>,
    pub(crate) transport: Transport,
    pub(crate) token: Option<String>,
    pub(crate) cursor: Option<String>,
    pub(crate) channels: Vec<String>,
}

impl Target {
    /// Reads a base URL such as `http://127.0.0.1:8080`; `ws://` means the same, a path is kept as
    /// a prefix, and a URL that names `/v1/ws` or `/v1/sse` itself is understood.
    pub(crate) fn parse(url: &str) -> Result<Target, BuildError> {
        let uri: Uri = url.parse().map_err(|_| BuildError::Url(url.to_owned()))?;
        match uri.scheme_str() {
            Some("http" | "ws") => {}
            Some("https" | "wss") => return Err(BuildError::Tls),
            _ => return Err(BuildError::Url(url.to_owned())),
        }
        let authority = uri.authority().filter(|a| !a.as_str().contains('@') && !a.host().is_empty());
        let authority = authority.ok_or_else(|| BuildError::Url(url.to_owned()))?;
        let path = uri.path().trim_end_matches('/');
        let path = path.strip_suffix("/v1/ws").or_else(|| path.strip_suffix("/v1/sse")).unwrap_or(path);
        Ok(Target {
            host: authority.host().trim_start_matches('[').trim_end_matches(']').to_owned(),
            port: authority.port_u16().unwrap_or(80),
            authority: authority.to_string(),
            path: path.to_owned(),
            query: uri.query().filter(|query| !query.is_empty()).map(str::to_owned),
        })
    }

    fn uri(&self, transport: Transport, channels: &[String]) -> String {
        let end = match transport {
            Transport::Ws => "/v1/ws",
            Transport::Sse => "/v1/sse",
        };
        let mut query: Vec<String> = self.query.iter().cloned().collect();
        query.extend(channels.iter().map(|channel| format!("{CHANNEL}{}", percent_encoded(channel))));
        let mark = if query.is_empty() { "" } else { "?" };
        format!("{}{end}{mark}{}", self.path, query.join("&"))
    }
}

/// Bytes that `channel` takes of a request's query.
pub(crate) fn listed_bytes(channel: &str) -> usize {
    1 + CHANNEL.len() + percent_encoded(channel).len()
}

fn percent_encoded(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for byte in text.bytes() {
        if byte.is_ascii_alphanumeric() || b"-._~:@".contains(&byte) {
            out.push(char::from(byte));
        } else {
            out.push_str(&format!("%{byte:02X}"));
        }
    }
    out
}

impl Ending {
    /// A read that timed out is silence, wherever in the chain of causes it stands.
    pub(crate) fn from_error(error: &(dyn std::error::Error + 'static)) -> Ending {
        let mut cause = Some(error);
        while let Some(error) = cause {
            if let Some(io) = error.downcast_ref::<std::io::Error>() {
                match io.kind() {
                    std::io::ErrorKind::TimedOut => return Ending::Silent,
                    std::io::ErrorKind::UnexpectedEof | std::io::ErrorKind::ConnectionReset => return Ending::Eof,
                    _ => {}
                }
            }
            if error.downcast_ref::<hyper::Error>().is_some_and(hyper::Error::is_incomplete_message) {
                return Ending::Eof;
            }
            cause = error.source();
        }
        Ending::Broken(error.to_string())
    }

    pub(crate) fn aftermath(self) -> Aftermath {
        match self {
            Ending::Close(code) => Aftermath::of_close(code),
            Ending::Eof => Aftermath::again(Loss::Cut),
            Ending::Silent => Aftermath::again(Loss::Silent),
            Ending::Broken(why) => Aftermath::again(Loss::Broken(why)),
        }
    }
}

/// Connects once.
///
/// # Errors
/// What the failure means for the next attempt.
///
/// # Cancel safety
/// Dropping the future closes whatever was opened.
pub(crate) async fn dial(attempt: Attempt) -> Result<Link, Aftermath> {
    match tokio::time::timeout(DIAL_TIMEOUT, attempt.connect()).await {
        Ok(connected) => connected,
        Err(_) => Err(Aftermath::again(Loss::Broken("no answer in time".to_owned()))),
    }
}

impl Attempt {
    async fn connect(self) -> Result<Link, Aftermath> {
        let connected = match self.address {
            Some(address) => TcpStream::connect(address).await,
            None => TcpStream::connect((self.target.host.as_str(), self.target.port)).await,
        };
        let stream = connected.map_err(|error| broken(&error))?;
        stream.set_nodelay(true).map_err(|error| broken(&error))?;
        let silence = SilenceLimit::new(DIAL_TIMEOUT);
        let stream = TokioIo::new(Alive::new(stream, silence.clone()));
        let (mut requests, connection) = http1::handshake(stream).await.map_err(|error| broken(&error))?;
        let mut tasks = JoinSet::new();
        // Its error reaches us through the response or the body as well.
        tasks.spawn(async move { drop(connection.with_upgrades().await) });

        let response = requests.send_request(self.request()?).await.map_err(|error| broken(&error))?;
        let (arrived, arrivals) = mpsc::channel(ARRIVALS);
        let (outgoing, to_send) = mpsc::channel(OUTGOING);
        match self.transport {
            Transport::Ws if response.status() == StatusCode::SWITCHING_PROTOCOLS => {
                let upgraded = hyper::upgrade::on(response).await.map_err(|error| broken(&error))?;
                ws::start(upgraded, arrived, outgoing.clone(), to_send, &mut tasks);
            }
            Transport::Sse if response.status() == StatusCode::OK => {
                let kind = response.headers().get(CONTENT_TYPE).map(HeaderValue::as_bytes).unwrap_or_default();
                if !kind.starts_with(b"text/event-stream") {
                    return Err(Aftermath::again(Loss::Broken("the answer is no event stream".to_owned())));
                }
                tasks.spawn(sse::read(response.into_body(), arrived));
            }
            _ => return Err(refused(response).await),
        }
        Ok(Link { arrivals, outgoing, silence, _tasks: tasks })
    }

    fn request(&self) -> Result<Request<Empty<Bytes>>, Aftermath> {
        let mut request =
            Request::get(self.target.uri(self.transport, &self.channels)).header(HOST, &self.target.authority);
        request = match self.transport {
            Transport::Sse => request.header(ACCEPT, "text/event-stream"),
            Transport::Ws => request
                .header(CONNECTION, "Upgrade")
                .header(UPGRADE, "websocket")
                .header("Sec-WebSocket-Version", "13")
                .header("Sec-WebSocket-Key", fastwebsockets::handshake::generate_key()),
        };
        if let Some(token) = &self.token {
            let mut value = HeaderValue::try_from(format!("Bearer {token}"))
                .map_err(|_| Aftermath::again(Loss::NoToken("the token holds bytes that no header may".to_owned())))?;
            value.set_sensitive(true);
            request = request.header(AUTHORIZATION, value);
        }
        if let Some(cursor) = self.cursor.as_deref().and_then(|cursor| HeaderValue::from_str(cursor).ok()) {
            request = request.header("Last-Event-ID", cursor);
        }
        request.body(Empty::new()).map_err(|error| broken(&error))
    }
}

fn broken(error: &(dyn std::error::Error + 'static)) -> Aftermath {
    let mut why = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        why = format!("{why}: {error}");
        cause = error.source();
    }
    Aftermath::again(Loss::Broken(why))
}

#[derive(Deserialize, Default)]
#[serde(default)]
struct Problem {
    code: String,
    detail: String,
    retry_after_ms: Option<u64>,
}

async fn refused(response: Response<Incoming>) -> Aftermath {
    let (head, body) = response.into_parts();
    let body = Limited::new(body, MAX_PROBLEM_BYTES).collect().await.map(|body| body.to_bytes()).unwrap_or_default();
    let problem: Problem = serde_json::from_slice(&body).unwrap_or_default();
    // The body's figure is the same draw as the header's, only finer.
    let hint = problem.retry_after_ms.map(Duration::from_millis).or_else(|| retry_after(&head.headers));
    Aftermath::of_refusal(head.status.as_u16(), problem.code, problem.detail, hint)
}

fn retry_after(headers: &HeaderMap) -> Option<Duration> {
    headers.get(RETRY_AFTER)?.to_str().ok()?.trim().parse().ok().map(Duration::from_secs)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_base_url_becomes_the_path_of_the_transport() {
        let uri = |url: &str, transport| Target::parse(url).unwrap().uri(transport, &["a/b".into(), "c%d".into()]);
        assert_eq!(uri("http://h:1", Transport::Ws), "/v1/ws?channel=a%2Fb&channel=c%25d");
        assert_eq!(uri("ws://h:1/edge/", Transport::Sse), "/edge/v1/sse?channel=a%2Fb&channel=c%25d");
        assert_eq!(Target::parse("ws://h/v1/sse?x=1").unwrap().uri(Transport::Ws, &[]), "/v1/ws?x=1");
        let six = Target::parse("http://[::1]:81").unwrap();
        assert_eq!((six.host.as_str(), six.port, six.authority.as_str()), ("::1", 81, "[::1]:81"));
    }

    #[test]
    fn what_cannot_be_connected_to_is_refused_before_any_attempt() {
        assert!(matches!(Target::parse("https://h"), Err(BuildError::Tls)));
        assert!(matches!(Target::parse("wss://h"), Err(BuildError::Tls)));
        for url in ["", "h:1", "/v1/ws", "ftp://h", "http://", "http://user:pw@h"] {
            assert!(matches!(Target::parse(url), Err(BuildError::Url(_))), "{url}");
        }
    }

    #[test]
    fn retry_after_counts_whole_seconds_only() {
        let of =
            |value: &'static str| retry_after(&HeaderMap::from_iter([(RETRY_AFTER, HeaderValue::from_static(value))]));
        assert_eq!(of("7"), Some(Duration::from_secs(7)));
        assert_eq!(of("Wed, 21 Oct 2015 07:28:00 GMT"), None);
        assert_eq!(of("-1"), None);
    }

    #[test]
    fn a_timeout_deep_in_the_causes_is_silence() {
        #[derive(Debug, thiserror::Error)]
        #[error("outer")]
        struct Outer(#[source] std::io::Error);
        let of = |kind: std::io::ErrorKind| Ending::from_error(&Outer(kind.into()));
        assert_eq!(of(std::io::ErrorKind::TimedOut), Ending::Silent);
        assert_eq!(of(std::io::ErrorKind::ConnectionReset), Ending::Eof);
        assert_eq!(of(std::io::ErrorKind::InvalidData), Ending::Broken("outer".into()));
    }
}
