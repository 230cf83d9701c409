//! A TCP wire between two programs that a test can cut, close, slow down or make deaf in one
//! direction. Decides when bytes pass, never what they say.

use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::{AbortHandle, JoinSet};

/// Which way bytes go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// From who connected to the target.
    Up,
    /// From the target to who connected.
    Down,
}

/// What happens to bytes of one direction.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Flow {
    /// They arrive.
    #[default]
    Pass,
    /// They are taken and thrown away: the sender believes them sent.
    Swallow,
    /// They are not taken: the sender's buffers fill. They arrive after `Pass`.
    Stall,
}

#[derive(Clone, Copy, Debug, Default)]
struct Rules {
    up: Flow,
    down: Flow,
    delay: Duration,
    is_closed: bool,
    /// How often everything was cut; a connection ends once this is not what it began under.
    n_cuts: u64,
}

impl Rules {
    fn flow(&self, direction: Direction) -> Flow {
        match direction {
            Direction::Up => self.up,
            Direction::Down => self.down,
        }
    }
}

/// A listener that passes on to a target; ends with everything on it when dropped.
pub struct Proxy {
    addr: SocketAddr,
    rules: watch::Sender<Rules>,
    n_open: Arc<AtomicUsize>,
    accept: AbortHandle,
}

impl Proxy {
    /// Listens on a free port of the loopback address. Nothing is altered at first.
    pub async fn start(target: SocketAddr) -> Self {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.expect("the loopback address has a free port");
        let addr = listener.local_addr().expect("a bound socket has an address");
        let (rules, seen) = watch::channel(Rules::default());
        let n_open = Arc::new(AtomicUsize::new(0));
        let accept = tokio::spawn(accept(listener, target, seen, n_open.clone())).abort_handle();
        Self { addr, rules, n_open, accept }
    }

    /// Where to connect instead of the target.
    pub fn addr(&self) -> SocketAddr {
        self.addr
    }

    /// The port of `addr`.
    pub fn port(&self) -> u16 {
        self.addr.port()
    }

    /// Ends every connection that is open; new ones are served.
    pub fn cut(&self) {
        self.rules.send_modify(|rules| rules.n_cuts += 1);
    }

    /// Ends every connection, and every new one at once, until `open`.
    pub fn close(&self) {
        self.rules.send_modify(|rules| {
            rules.n_cuts += 1;
            rules.is_closed = true;
        });
    }

    /// Serves new connections again.
    pub fn open(&self) {
        self.rules.send_modify(|rules| rules.is_closed = false);
    }

    /// What happens to bytes of one direction from now on, on open connections too.
    pub fn set(&self, direction: Direction, flow: Flow) {
        self.rules.send_modify(|rules| match direction {
            Direction::Up => rules.up = flow,
            Direction::Down => rules.down = flow,
        });
    }

    /// Every piece that is read from now on arrives so much later (both ways).
    pub fn delay(&self, by: Duration) {
        self.rules.send_modify(|rules| rules.delay = by);
    }

    /// Connections that are open through it now.
    pub fn n_open(&self) -> usize {
        self.n_open.load(Ordering::Relaxed)
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.accept.abort();
    }
}

async fn accept(listener: TcpListener, target: SocketAddr, rules: watch::Receiver<Rules>, n_open: Arc<AtomicUsize>) {
    // Owns the connections: they end with this task.
    let mut connections = JoinSet::new();
    loop {
        tokio::select! {
            accepted = listener.accept() => {
                let Ok((socket, _)) = accepted else { continue };
                if !rules.borrow().is_closed {
                    connections.spawn(connection(socket, target, rules.clone(), Counted::new(n_open.clone())));
                }
            }
            Some(_) = connections.join_next() => {}
        }
    }
}

struct Counted(Arc<AtomicUsize>);

impl Counted {
    fn new(n: Arc<AtomicUsize>) -> Self {
        n.fetch_add(1, Ordering::Relaxed);
        Self(n)
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

async fn connection(mut socket: TcpStream, target: SocketAddr, rules: watch::Receiver<Rules>, _counted: Counted) {
    let n_cuts = rules.borrow().n_cuts;
    let mut ends = rules.clone();
    let both = async {
        let Ok(mut upstream) = TcpStream::connect(target).await else { return };
        let _ = (socket.set_nodelay(true), upstream.set_nodelay(true));
        let (from_client, to_client) = socket.split();
        let (from_target, to_target) = upstream.split();
        let up = carry(Direction::Up, from_client, to_target, rules.clone());
        let down = carry(Direction::Down, from_target, to_client, rules);
        tokio::join!(up, down);
    };
    tokio::select! {
        () = both => {}
        _ = ends.wait_for(|rules| rules.n_cuts != n_cuts) => {}
    }
}

async fn carry(
    direction: Direction,
    mut from: impl AsyncRead + Unpin,
    mut to: impl AsyncWrite + Unpin,
    mut rules: watch::Receiver<Rules>,
) {
    let mut piece = vec![0; 16 * 1024];
    loop {
        if rules.wait_for(|rules| rules.flow(direction) != Flow::Stall).await.is_err() {
            return;
        }
        // Both cancel-safe: a read that is dropped has taken nothing.
        let n = tokio::select! {
            biased;
            Ok(_) = rules.wait_for(|rules| rules.flow(direction) == Flow::Stall) => continue,
            read = from.read(&mut piece) => read.unwrap_or(0),
        };
        let delay = rules.borrow().delay;
        if !delay.is_zero() {
            tokio::time::sleep(delay).await;
        }
        let flow = rules.borrow().flow(direction);
        if n == 0 {
            let _ = to.shutdown().await;
            return;
        }
        if flow != Flow::Swallow && to.write_all(&piece[..n]).await.is_err() {
            return;
        }
    }
}
