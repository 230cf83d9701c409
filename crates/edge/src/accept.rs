//! The public listener: may this socket exist, and until when must its head be here? Decides how
//! many handshakes are in flight, which of them is dropped when there are too many, and how a
//! socket goes from the HTTP library to its driver.
//!
//! hyper reads one head a connection (keep-alive is off on this listener: it serves streams). A
//! stream is taken out of hyper before anything was answered, so no answer of hyper's can be half
//! written, its buffers go, and our own head is the first thing on the bare socket.
//!
//! Who has left by the time its head is read is not answered (`caller`).

mod caller;

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::future::Future;
use std::io;
use std::mem::MaybeUninit;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bytes::Bytes;
use http_body_util::Full;
use hub::refusal::{Refusal, RefusalCode};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::{Request, Response};
use hyper_util::rt::TokioIo;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::runtime::Handle;
use tokio::sync::oneshot;
use tokio::time::{Instant, sleep, sleep_until, timeout};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use self::caller::Caller;
use crate::admit::{Answer, Gate};
use crate::drive::Driver;
use crate::origin::CorsHeaders;
use crate::reject;
use crate::socket::{Shared, Socket};

/// Largest request head, its empty line included. 32 KiB: room for the largest cookies that browsers
/// send and a token besides; a byte beyond it is 431.
const MAX_HEAD: usize = 32 * 1024;

/// Most header lines; beyond it 431.
const MAX_HEADERS: usize = 128;

/// Who may wait in the kernel to be accepted. 4096: as many as Linux allows unless told otherwise
/// (`net.core.somaxconn`). The usual 128 fill up in a moment's standstill; whoever comes then tries
/// again after a second, and after three.
#[cfg(target_os = "linux")]
const BACKLOG: i32 = 4096;

/// Settings of the listener.
#[derive(Clone, Copy, Debug)]
pub struct AcceptConfig {
    /// `GATEWAY_HANDSHAKES`: in flight from accept until the response head is written.
    pub handshakes: usize,
    /// `GATEWAY_HEAD_TIMEOUT`: from accept until the request's head is here.
    pub head_timeout: Duration,
    /// `GATEWAY_CLOSE_TIMEOUT`: for the peer's end after ours.
    pub close_timeout: Duration,
}

/// Where clients come from: sockets, or a test's pipes.
pub trait Incoming: Send + 'static {
    /// One client's byte stream.
    type Socket: AsyncRead + AsyncWrite + Unpin + Send + 'static;

    /// That of a client who was admitted.
    type Admitted: Socket;

    /// The next client.
    ///
    /// # Errors
    /// Of the moment (no descriptor left, say): wait a little and ask again.
    ///
    /// # Cancel safety
    /// No client is lost.
    fn accept(&mut self) -> impl Future<Output = io::Result<(Self::Socket, SocketAddr)>> + Send;

    /// Is this client gone, or has it ended its side, with nothing unread? Asked once a request,
    /// before it is answered; waits for nothing. `false` where reading alone tells.
    fn has_left(socket: &Self::Socket) -> bool {
        let _ = socket;
        false
    }

    /// Moves a client's stream to another runtime, `to`, whose threads then wait for it.
    ///
    /// # Errors
    /// The system's: the client is lost.
    fn moved(socket: Self::Socket, to: &Handle) -> io::Result<Self::Admitted>;
}

/// A listening TCP socket with the options that streams need.
pub struct Tcp {
    listener: TcpListener,
    /// Unacknowledged bytes end a connection after this; otherwise a peer that vanished without a
    /// word would be noticed only when the kernel's buffer is full.
    user_timeout: Duration,
}

impl Tcp {
    /// Belongs to the runtime in whose context this is called. `user_timeout`: heartbeat timeout and
    /// write timeout together are a good value.
    ///
    /// # Errors
    /// The system's.
    pub fn new(listener: std::net::TcpListener, user_timeout: Duration) -> io::Result<Self> {
        listener.set_nonblocking(true)?;
        // It listens already: this only lengthens the line.
        #[cfg(target_os = "linux")]
        socket2::SockRef::from(&listener).listen(BACKLOG)?;
        Ok(Self { listener: TcpListener::from_std(listener)?, user_timeout })
    }
}

impl Incoming for Tcp {
    type Socket = TcpStream;
    type Admitted = Shared;

    async fn accept(&mut self) -> io::Result<(TcpStream, SocketAddr)> {
        let (socket, peer) = self.listener.accept().await?;
        // Neither is worth losing a client for.
        let _ = socket.set_nodelay(true);
        #[cfg(target_os = "linux")]
        let _ = socket2::SockRef::from(&socket).set_tcp_user_timeout(Some(self.user_timeout));
        Ok((socket, peer))
    }

    fn has_left(socket: &TcpStream) -> bool {
        use io::ErrorKind::{Interrupted, WouldBlock};
        match socket2::SockRef::from(socket).peek(&mut [MaybeUninit::uninit()]) {
            Ok(n) => n == 0,
            Err(error) => !matches!(error.kind(), WouldBlock | Interrupted),
        }
    }

    fn moved(socket: TcpStream, to: &Handle) -> io::Result<Shared> {
        let socket = socket.into_std()?;
        let _there = to.enter();
        TcpStream::from_std(socket).map(Shared::new)
    }
}

/// Accepts until `stop`, on the runtime that runs this. Who is admitted moves to the runtime
/// `inside`: so a storm at the door takes its turn from nobody who is in. Connections are tasks of
/// `tasks`, here and there.
pub async fn serve<I: Incoming>(
    mut incoming: I,
    gate: Arc<Gate>,
    config: AcceptConfig,
    inside: Handle,
    tasks: TaskTracker,
    stop: CancellationToken,
) {
    let heads = Arc::new(Heads::new(config.handshakes));
    let inside = Inside { runtime: inside, tasks: tasks.clone() };
    loop {
        let accepted = tokio::select! {
            accepted = incoming.accept() => accepted,
            () = stop.cancelled() => return,
        };
        match accepted {
            Ok((socket, peer)) => match heads.enter() {
                Some(in_flight) => {
                    let task = connection::<I>(socket, peer, gate.clone(), in_flight, config, inside.clone());
                    tasks.spawn(task);
                }
                None => {
                    tasks.spawn(turn_away(socket, gate.clone()));
                }
            },
            Err(e) => {
                tracing::warn!(error = %e, "accept failed");
                sleep(Duration::from_millis(50)).await;
            }
        }
    }
}

/// How long an API client may take for a request's head, keep-alive included.
const API_HEAD_TIMEOUT: Duration = Duration::from_secs(30);

/// How long a call of the API that is under way at the stop may go on: what it did is then answered.
const API_GRACE: Duration = Duration::from_secs(1);

/// Serves an HTTP API (the back ends') until `stop`; ordinary requests, keep-alive on. Connections are
/// tasks of `tasks`: whoever waits for these after `stop` waits a second at most, and has every call
/// answered that ended by then.
pub async fn serve_api(listener: TcpListener, api: axum::Router, tasks: TaskTracker, stop: CancellationToken) {
    loop {
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            () = stop.cancelled() => return,
        };
        let Ok((socket, _)) = accepted else {
            sleep(Duration::from_millis(50)).await;
            continue;
        };
        let service = hyper_util::service::TowerToHyperService::new(api.clone());
        let mut http = http1::Builder::new();
        http.timer(hyper_util::rt::TokioTimer::new()).header_read_timeout(API_HEAD_TIMEOUT);
        let stop = stop.clone();
        tasks.spawn(async move {
            let conn = http.serve_connection(TokioIo::new(socket), service);
            tokio::pin!(conn);
            tokio::select! {
                ended = conn.as_mut() => drop(ended),
                () = stop.cancelled() => {
                    conn.as_mut().graceful_shutdown();
                    let _ = timeout(API_GRACE, conn).await;
                }
            }
        });
    }
}

/// Full, and everybody in flight waits for us: the newcomer is refused unread.
async fn turn_away<S: AsyncWrite + Unpin>(mut socket: S, gate: Arc<Gate>) {
    let refusal = Refusal::retry(
        RefusalCode::Overloaded,
        "too many handshakes in flight (GATEWAY_HANDSHAKES)",
        gate.bucket.promise(Instant::now()),
    );
    gate.metrics.refused(refusal.code);
    let answer = reject::response_bytes(&refusal, &CorsHeaders::none(), gate.dice.unit());
    let _ = timeout(Duration::from_secs(1), async {
        socket.write_all(&answer).await?;
        socket.shutdown().await
    })
    .await;
}

/// Where sessions are driven.
#[derive(Clone)]
struct Inside {
    runtime: Handle,
    tasks: TaskTracker,
}

async fn connection<I: Incoming>(
    socket: I::Socket,
    peer: SocketAddr,
    gate: Arc<Gate>,
    in_flight: InFlight,
    config: AcceptConfig,
    inside: Inside,
) {
    let (hand_over, handed_over) = oneshot::channel();
    let desk = Arc::new(Mutex::new(Desk { hand_over: Some(hand_over), refused: None }));
    let id = in_flight.id;
    let heads = in_flight.heads.clone();
    let service = service_fn(|request: Request<hyper::body::Incoming>| {
        heads.is_read(id);
        let head_read = Instant::now();
        let (gate, desk) = (gate.clone(), desk.clone());
        Box::pin(async move {
            let (head, _) = request.into_parts();
            let answer = gate.answer(&head, peer.ip()).await;
            let hand_over = desk.lock().expect("a few lines").answered(&answer, head_read);
            if let Answer::Respond(mut response, _) = answer {
                response.headers_mut().insert(http::header::CONNECTION, http::HeaderValue::from_static("close"));
                return Ok::<Response<Full<Bytes>>, Infallible>(response);
            }
            if let Some(hand_over) = hand_over {
                // The receiver takes the socket and drops this future with the rest of hyper.
                let _ = hand_over.send(answer);
            }
            std::future::pending().await
        })
    });
    let mut http = http1::Builder::new();
    // The buffer alone is no bound: hyper grows it in larger steps, and a head that is whole passes.
    http.max_buf_size(MAX_HEAD).max_header_size(MAX_HEAD).max_headers(MAX_HEADERS);
    http.keep_alive(false).header_read_timeout(None);
    let mut conn = http.serve_connection(TokioIo::new(Caller::<I>::new(socket)), service);
    let late = sleep_until(Instant::now() + config.head_timeout);
    tokio::pin!(late);
    let bare = tokio::select! {
        biased;
        Ok(bare) = handed_over => bare,
        ended = &mut conn => {
            if let Err(e) = ended {
                note_bad_head(&gate, &in_flight, &e);
            }
            drop(conn);
            note_refused(&gate, &desk);
            return;
        }
        () = async { late.as_mut().await; in_flight.unread().await } => {
            gate.metrics.refused(RefusalCode::HeadTimeout);
            return;
        }
        () = in_flight.dropped.cancelled() => {
            gate.metrics.refused(RefusalCode::HeadTimeout);
            return;
        }
    };
    let parts = conn.into_parts();
    let (socket, early) = (parts.io.into_inner().into_socket(), parts.read_buf);
    match bare {
        Answer::Stream(opened) => {
            // A fresh small task: this one has hyper's size.
            match I::moved(socket, &inside.runtime) {
                Ok(socket) => {
                    let driver = Driver::new(socket, opened.open, opened.head, &early, in_flight);
                    inside.tasks.spawn_on(driver, &inside.runtime);
                }
                Err(error) => tracing::warn!(%error, "an admitted client is lost: its socket cannot be moved"),
            }
        }
        Answer::Say(bytes, _) => {
            say_and_end(socket, &bytes, config.close_timeout, || note_refused(&gate, &desk)).await;
        }
        Answer::Respond(..) => unreachable!("answered by the HTTP library"),
    }
}

/// What a connection's service and its task share.
struct Desk {
    hand_over: Option<oneshot::Sender<Answer>>,
    /// When the head of a request was here that was refused at once.
    refused: Option<Instant>,
}

impl Desk {
    /// Notes a refusal; gives the way out for what the HTTP library does not answer.
    fn answered(&mut self, answer: &Answer, head_read: Instant) -> Option<oneshot::Sender<Answer>> {
        let code = match answer {
            Answer::Respond(_, code) => *code,
            Answer::Say(_, code) => Some(*code),
            Answer::Stream(_) => None,
        };
        self.refused = code.filter(|code| code.is_immediate()).map(|_| head_read);
        self.hand_over.take()
    }
}

/// The connection of a refused request is closed: how long did it take?
fn note_refused(gate: &Gate, desk: &Mutex<Desk>) {
    if let Some(head_read) = desk.lock().expect("a few lines").refused {
        gate.metrics.refusal_seconds(head_read.elapsed().as_secs_f64());
    }
}

/// hyper answered by itself (400, 431) or the client left; only the former is a refusal.
fn note_bad_head(gate: &Gate, in_flight: &InFlight, e: &hyper::Error) {
    if e.is_parse_too_large() {
        gate.metrics.refused(RefusalCode::HeadTooLarge);
    } else if e.is_parse() {
        gate.metrics.refused(RefusalCode::BadRequest);
    }
    tracing::debug!(error = %e, was_read = in_flight.heads.was_read(in_flight.id), "connection over");
}

/// `ended` is called once our side of the connection is closed.
async fn say_and_end<S: AsyncRead + AsyncWrite + Unpin>(
    mut socket: S,
    bytes: &[u8],
    close_timeout: Duration,
    ended: impl FnOnce(),
) {
    let said = timeout(close_timeout, async {
        socket.write_all(bytes).await?;
        socket.shutdown().await?;
        ended();
        // Closing with unread bytes would reset what was just said.
        let mut scratch = [0; 512];
        while socket.read(&mut scratch).await? > 0 {}
        io::Result::Ok(())
    });
    let _ = said.await;
}

/// Handshakes in flight, and which of them still wait for the client's head.
struct Heads {
    max: usize,
    inner: Mutex<HeadsInner>,
}

#[derive(Default)]
struct HeadsInner {
    n: usize,
    next: u64,
    /// In order of arrival.
    unread: BTreeMap<u64, CancellationToken>,
}

impl Heads {
    fn new(max: usize) -> Self {
        Self { max, inner: Mutex::default() }
    }

    /// A place for a newcomer. Full: the longest incomplete head loses its own, so that slow heads
    /// do not shut the door; where all heads are complete, there is none.
    fn enter(self: &Arc<Self>) -> Option<InFlight> {
        let mut inner = self.inner.lock().expect("a few lines");
        if inner.n >= self.max {
            let (_, oldest) = inner.unread.pop_first()?;
            oldest.cancel();
        }
        inner.n += 1;
        inner.next += 1;
        let (id, dropped) = (inner.next, CancellationToken::new());
        inner.unread.insert(id, dropped.clone());
        Some(InFlight { heads: self.clone(), id, dropped })
    }

    fn is_read(&self, id: u64) {
        self.inner.lock().expect("a few lines").unread.remove(&id);
    }

    fn was_read(&self, id: u64) -> bool {
        !self.inner.lock().expect("a few lines").unread.contains_key(&id)
    }
}

/// A handshake in flight; dropping it gives its place back.
struct InFlight {
    heads: Arc<Heads>,
    id: u64,
    /// Its place went to somebody else.
    dropped: CancellationToken,
}

impl InFlight {
    /// Returns if the head is not here; waits for ever if it is (admission has its own deadline).
    async fn unread(&self) {
        if self.heads.was_read(self.id) {
            std::future::pending().await
        }
    }
}

impl Drop for InFlight {
    fn drop(&mut self) {
        let mut inner = self.heads.inner.lock().expect("a few lines");
        inner.n -= 1;
        inner.unread.remove(&self.id);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_full_house_drops_the_longest_incomplete_head_and_never_one_that_waits_for_us() {
        let heads = Arc::new(Heads::new(2));
        let (first, second) = (heads.enter().unwrap(), heads.enter().unwrap());
        heads.is_read(first.id);
        let third = heads.enter().unwrap();
        assert!(second.dropped.is_cancelled() && !first.dropped.is_cancelled());
        heads.is_read(third.id);
        assert!(heads.enter().is_none());
        drop(second);
        drop(first);
        assert!(heads.enter().is_some());
    }
}
