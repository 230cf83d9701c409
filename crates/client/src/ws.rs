//! The two tasks of a WebSocket: one reads, one writes. They decide nothing about messages.
//!
//! Reading a frame cannot be interrupted without losing its bytes, so the reader is a task of its
//! own that only its end or the peer's stops; the driver waits on its queue instead.

use std::time::Duration;

use fastwebsockets::{FragmentCollector, Frame, OpCode, Payload, Role, WebSocket, WebSocketError};
use hyper::upgrade::Upgraded;
use hyper_util::rt::TokioIo;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::sync::mpsc;
use tokio::task::JoinSet;

use crate::dial::{Arrival, Ending, Outgoing};

/// Longest message that is taken, in bytes: far above what a gateway may be configured to send.
const MAX_MESSAGE_BYTES: usize = 32 << 20;

/// Longest wait for the socket to take a message; then the connection counts as broken.
const WRITE_TIMEOUT: Duration = Duration::from_secs(10);

/// Code of a close frame without one (RFC 6455, 7.1.5).
const NO_CODE: u16 = 1005;

/// Starts both tasks on `tasks`. `to_send` ends the writer, and with it the connection's use.
pub(crate) fn start(
    upgraded: Upgraded,
    arrived: mpsc::Sender<Arrival>,
    answers: mpsc::Sender<Outgoing>,
    to_send: mpsc::Receiver<Outgoing>,
    tasks: &mut JoinSet<()>,
) {
    let (read, write) = tokio::io::split(TokioIo::new(upgraded));
    tasks.spawn(read_all(read, arrived, answers));
    tasks.spawn(write_all(write, to_send));
}

async fn read_all(read: impl AsyncRead + Unpin, arrived: mpsc::Sender<Arrival>, answers: mpsc::Sender<Outgoing>) {
    // This half never writes: pongs and the close go through the writer's queue, in one order.
    let mut socket = WebSocket::after_handshake(tokio::io::join(read, tokio::io::sink()), Role::Client);
    socket.set_auto_pong(false);
    socket.set_auto_close(false);
    socket.set_max_message_size(MAX_MESSAGE_BYTES);
    let mut socket = FragmentCollector::new(socket);
    let ending = loop {
        let frame = match socket.read_frame().await {
            Ok(frame) => frame,
            Err(WebSocketError::UnexpectedEOF) => break Ending::Eof,
            Err(error) => break Ending::from_error(&error),
        };
        match frame.opcode {
            OpCode::Text => {
                let Ok(text) = String::from_utf8(Vec::from(frame.payload)) else {
                    break Ending::Broken("a text message that is no UTF-8".to_owned());
                };
                if arrived.send(Arrival::Message { text, cursor: None }).await.is_err() {
                    return;
                }
            }
            // A full queue means that the socket takes nothing: a pong more would not help.
            OpCode::Ping => drop(answers.try_send(Outgoing::Pong(Vec::from(frame.payload)))),
            OpCode::Close => {
                let code = frame.payload.get(..2).map_or(NO_CODE, |code| u16::from_be_bytes([code[0], code[1]]));
                drop(answers.try_send(Outgoing::Close(code)));
                break Ending::Close(code);
            }
            OpCode::Pong | OpCode::Binary | OpCode::Continuation => {}
        }
    };
    let _ = arrived.send(Arrival::Ended(ending)).await;
}

async fn write_all(write: impl AsyncWrite + Unpin, mut to_send: mpsc::Receiver<Outgoing>) {
    let mut socket = WebSocket::after_handshake(tokio::io::join(tokio::io::empty(), write), Role::Client);
    while let Some(outgoing) = to_send.recv().await {
        let frame = match outgoing {
            Outgoing::Text(text) => Frame::text(Payload::Owned(text.into_bytes())),
            Outgoing::Pong(payload) => Frame::pong(Payload::Owned(payload)),
            Outgoing::Close(NO_CODE) => Frame::close_raw(Payload::Owned(Vec::new())),
            Outgoing::Close(code) => Frame::close(code, b""),
        };
        if !matches!(tokio::time::timeout(WRITE_TIMEOUT, socket.write_frame(frame)).await, Ok(Ok(()))) {
            return;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::io::{AsyncReadExt, AsyncWriteExt, duplex};

    async fn arrivals(bytes: &[u8]) -> (Vec<String>, Ending, Vec<Outgoing>) {
        let (ours, mut theirs) = duplex(1 << 16);
        theirs.write_all(bytes).await.unwrap();
        drop(theirs);
        let (arrived, mut arrivals) = mpsc::channel(16);
        let (answers, mut answered) = mpsc::channel(16);
        read_all(ours, arrived, answers).await;
        let mut texts = Vec::new();
        let ending = loop {
            match arrivals.recv().await.unwrap() {
                Arrival::Message { text, .. } => texts.push(text),
                Arrival::Ended(ending) => break ending,
            }
        };
        let mut out = Vec::new();
        while let Some(outgoing) = answered.recv().await {
            out.push(outgoing);
        }
        (texts, ending, out)
    }

    #[tokio::test]
    async fn texts_and_fragments_arrive_whole_and_pings_are_answered() {
        let (texts, ending, out) = arrivals(b"\x81\x02hi\x89\x01p\x01\x02ab\x80\x01c").await;
        assert_eq!(texts, ["hi", "abc"]);
        assert_eq!(ending, Ending::Eof);
        assert!(matches!(&out[..], [Outgoing::Pong(payload)] if payload == b"p"), "{out:?}");
    }

    #[tokio::test]
    async fn a_close_is_told_with_its_code_and_answered() {
        let (_, ending, out) = arrivals(b"\x88\x02\x03\xf4").await;
        assert_eq!(ending, Ending::Close(1012));
        assert!(matches!(out[..], [Outgoing::Close(1012)]));
        let (_, ending, out) = arrivals(b"\x88\x00").await;
        assert_eq!(ending, Ending::Close(1005));
        assert!(matches!(out[..], [Outgoing::Close(1005)]));
    }

    #[tokio::test]
    async fn what_we_send_is_masked_and_a_close_without_code_is_empty() {
        let (ours, mut theirs) = duplex(1 << 16);
        let (outgoing, to_send) = mpsc::channel(16);
        outgoing.send(Outgoing::Text("hi".into())).await.unwrap();
        outgoing.send(Outgoing::Close(1005)).await.unwrap();
        drop(outgoing);
        write_all(ours, to_send).await;
        let mut bytes = Vec::new();
        theirs.read_to_end(&mut bytes).await.unwrap();
        assert_eq!(&bytes[..2], b"\x81\x82");
        assert_eq!([bytes[6] ^ bytes[2], bytes[7] ^ bytes[3]], *b"hi");
        assert_eq!(&bytes[8..10], b"\x88\x80");
    }
}
