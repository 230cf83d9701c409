//! A client's stream while its request is read: is anybody still there? Decides when to ask that.
//!
//! A client that sends its request and leaves while the node is busy is found with both at once. The
//! request can be read before the readiness of the socket tells of the end (a socket that was just
//! accepted is read without waiting), and the HTTP library would have it answered: a signature
//! verified and the revocation list asked for nobody. So the read that finds nothing behind what
//! came asks the system itself. The library makes that read between a head and its answer.
//!
//! An end of the client's side alone counts as an end, here as in an open stream: whoever shuts it
//! down cannot be told from one that is gone. What follows a head in the same read (no client of a
//! stream sends that before its answer) keeps the library from reading on; such a client is found
//! out by its stream's driver.

use std::io::{self, IoSlice};
use std::pin::Pin;
use std::task::{Context, Poll};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use super::Incoming;

/// One client before it is answered.
pub(super) struct Caller<I: Incoming> {
    socket: I::Socket,
    /// It sent something, and nothing was looked for behind that yet.
    spoke: bool,
}

impl<I: Incoming> Caller<I> {
    pub(super) fn new(socket: I::Socket) -> Self {
        Self { socket, spoke: false }
    }

    pub(super) fn into_socket(self) -> I::Socket {
        self.socket
    }
}

impl<I: Incoming> AsyncRead for Caller<I> {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let n_before = buffer.filled().len();
        let read = Pin::new(&mut self.socket).poll_read(cx, buffer);
        let is_behind = std::mem::replace(&mut self.spoke, buffer.filled().len() > n_before);
        if is_behind && read.is_pending() && I::has_left(&self.socket) {
            // The end, as it would have come a moment later.
            return Poll::Ready(Ok(()));
        }
        read
    }
}

impl<I: Incoming> AsyncWrite for Caller<I> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.socket).poll_write(cx, bytes)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        slices: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.socket).poll_write_vectored(cx, slices)
    }

    fn is_write_vectored(&self) -> bool {
        self.socket.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.socket).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.socket).poll_shutdown(cx)
    }
}

#[cfg(test)]
mod tests;
