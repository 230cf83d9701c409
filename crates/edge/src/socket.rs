//! The socket of an open stream, as its driver and the hub share it: one reads and writes it with a
//! task's patience, the other writes what the kernel takes at once (`hub::outbox::Outlet`).

use std::io::{self, IoSlice};
use std::net::Shutdown;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use hub::outbox::Outlet;
use tokio::io::{AsyncRead, AsyncWrite, DuplexStream, ReadBuf};
use tokio::net::TcpStream;

/// What a stream runs over.
pub trait Socket: AsyncRead + AsyncWrite + Unpin + Send + 'static {
    /// The way to it for whoever offers its session an event; `None` where all must go by its driver.
    fn outlet(&self) -> Option<Arc<dyn Outlet>>;
}

/// A TCP socket; it is closed once both its driver and the hub have let it go.
#[derive(Debug)]
pub struct Shared(Arc<Tcp>);

#[derive(Debug)]
struct Tcp(TcpStream);

impl Shared {
    /// Registered with the runtime that `socket` is registered with.
    pub fn new(socket: TcpStream) -> Self {
        Self(Arc::new(Tcp(socket)))
    }
}

impl Socket for Shared {
    fn outlet(&self) -> Option<Arc<dyn Outlet>> {
        Some(self.0.clone())
    }
}

impl Outlet for Tcp {
    fn write_now(&self, bytes: &[u8]) -> usize {
        // Past the runtime, which would look first whether it knows the socket to be full (0.25 us of
        // cache misses, measured): the kernel says so as well, and the driver then waits for room.
        socket2::SockRef::from(&self.0).send(bytes).unwrap_or(0)
    }
}

impl AsyncRead for Shared {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let socket = &self.0.0;
        loop {
            ready!(socket.poll_read_ready(cx))?;
            match socket.try_read(buffer.initialize_unfilled()) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                read => return Poll::Ready(read.map(|n| buffer.advance(n))),
            }
        }
    }
}

impl AsyncWrite for Shared {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        self.written(cx, |socket| socket.try_write(bytes))
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        slices: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        self.written(cx, |socket| socket.try_write_vectored(slices))
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(socket2::SockRef::from(&self.0.0).shutdown(Shutdown::Write))
    }
}

impl Shared {
    fn written(
        &self,
        cx: &mut Context<'_>,
        write: impl Fn(&TcpStream) -> io::Result<usize>,
    ) -> Poll<io::Result<usize>> {
        let socket = &self.0.0;
        loop {
            ready!(socket.poll_write_ready(cx))?;
            match write(socket) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                written => return Poll::Ready(written),
            }
        }
    }
}

/// A pipe, for tests: nobody but its driver can write to it.
impl Socket for DuplexStream {
    fn outlet(&self) -> Option<Arc<dyn Outlet>> {
        None
    }
}
