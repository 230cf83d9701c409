//! A wire to Redis on which every answer arrives later. Order and throughput are untouched: what
//! left together arrives together.

use std::net::Ipv4Addr;
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream, tcp};
use tokio::sync::mpsc;
use tokio::task::{AbortHandle, JoinSet};
use tokio::time::{Instant, sleep_until};

/// Pieces on their way; beyond it the sender waits.
const PIECES: usize = 4_096;

/// Ends with everything on it when dropped.
pub struct SlowWire {
    pub port: u16,
    accept: AbortHandle,
}

impl SlowWire {
    /// Listens on a free loopback port, and passes on to `target`.
    pub async fn start(target: u16, delay: Duration) -> Result<SlowWire, String> {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.map_err(|error| error.to_string())?;
        let port = listener.local_addr().map_err(|error| error.to_string())?.port();
        let accept = tokio::spawn(accept(listener, target, delay)).abort_handle();
        Ok(SlowWire { port, accept })
    }
}

impl Drop for SlowWire {
    fn drop(&mut self) {
        self.accept.abort();
    }
}

async fn accept(listener: TcpListener, target: u16, delay: Duration) {
    // Owns the connections: they end with this task.
    let mut connections = JoinSet::new();
    loop {
        tokio::select! {
            accepted = listener.accept() => {
                let Ok((near, _)) = accepted else { continue };
                connections.spawn(async move {
                    let Ok(far) = TcpStream::connect((Ipv4Addr::LOCALHOST, target)).await else { return };
                    let _ = (near.set_nodelay(true), far.set_nodelay(true));
                    let (near_read, near_write) = near.into_split();
                    let (far_read, far_write) = far.into_split();
                    tokio::join!(carry(near_read, far_write, Duration::ZERO), carry(far_read, near_write, delay));
                });
            }
            Some(_) = connections.join_next() => {}
        }
    }
}

async fn carry(mut from: tcp::OwnedReadHalf, mut to: tcp::OwnedWriteHalf, delay: Duration) {
    let (pieces, mut under_way) = mpsc::channel::<(Instant, Vec<u8>)>(PIECES);
    let read = async move {
        let mut piece = vec![0; 16 << 10];
        while let Ok(n @ 1..) = from.read(&mut piece).await {
            if pieces.send((Instant::now() + delay, piece[..n].to_vec())).await.is_err() {
                return;
            }
        }
    };
    let write = async move {
        while let Some((at, piece)) = under_way.recv().await {
            sleep_until(at).await;
            if to.write_all(&piece).await.is_err() {
                return;
            }
        }
        let _ = to.shutdown().await;
    };
    tokio::join!(read, write);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn answers_are_late_and_whole_and_questions_are_not() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let delay = Duration::from_millis(30);
        let wire = SlowWire::start(listener.local_addr().unwrap().port(), delay).await.unwrap();
        let mut client = TcpStream::connect(("127.0.0.1", wire.port)).await.unwrap();
        let (mut server, _) = listener.accept().await.unwrap();
        client.write_all(b"question").await.unwrap();
        let mut text = [0; 8];
        server.read_exact(&mut text).await.unwrap();
        let asked = Instant::now();
        server.write_all(b"answer 1answer 2").await.unwrap();
        drop(server);
        let mut answers = Vec::new();
        client.read_to_end(&mut answers).await.unwrap();
        assert_eq!((&text, answers.as_slice()), (b"question", &b"answer 1answer 2"[..]));
        assert!(asked.elapsed() >= delay);
    }
}
