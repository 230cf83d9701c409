//! Decides where a client's WebSocket frame ends, whether it is legal (RFC 6455), and when its
//! fragments make a message. Strict: the first fault ends it, named by the close reason it earns.
//!
//! Pure, no I/O: whoever owns the socket hands over whatever it has just read, cut anywhere, so
//! nothing can be cancelled in the middle of a frame. It deliberately does not answer pings, count
//! messages or time out half a frame; that is `ws`'s and the session's.

use std::ops::ControlFlow;

use bytes::Bytes;
use fastwebsockets::{OpCode, unmask};
use hub::close::{CloseReason, Violation};
use hub::event::frame;

/// Longest payload of a control frame (RFC 6455, 5.5).
pub const MAX_CONTROL_PAYLOAD: usize = 125;

/// Longest reason in a close frame: a control payload less the two bytes of the code.
pub const MAX_CLOSE_REASON: usize = MAX_CONTROL_PAYLOAD - 2;

/// Fragments without payload that one message may hold. Fragments with payload are bounded by the
/// message's size; empty ones could go on for ever. No known client sends more than a few.
pub const MAX_EMPTY_FRAGMENTS: usize = 1024;

/// Two bytes, eight of length, four of mask.
const MAX_HEADER: usize = 14;

/// First allocation for a message that comes in pieces, so that a trickle does not reallocate at
/// each byte.
const FIRST_GROWTH: usize = 64;

/// What one session may send.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Payload bytes of a whole message, all fragments together; exactly this many are accepted.
    pub max_message: usize,
}

/// Something whole that a client sent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Inbound {
    /// A text message, valid UTF-8.
    Text(Bytes),
    /// A binary message.
    Binary(Bytes),
    /// To be answered by a pong with the same payload of at most 125 bytes.
    Ping(Bytes),
    /// A sign of life.
    Pong,
    /// The client closes. Nothing is delivered after it.
    Close {
        /// A code that may stand on the wire; `None` where the frame was empty.
        code: Option<u16>,
        /// At most 123 bytes.
        reason: String,
    },
}

/// Why a client's bytes cannot be taken. All of them end the session with `reason()`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum FrameError {
    /// A rule of framing was broken.
    #[error("websocket framing: {0}")]
    Protocol(&'static str),
    /// A text message, or the reason of a close, that is no UTF-8.
    #[error("text that is no UTF-8")]
    NotUtf8,
    /// The message, by what it holds or by what it announces, is over the limit.
    #[error("message over the limit of GATEWAY_MAX_MESSAGE")]
    TooLarge,
    /// More empty fragments than anybody needs.
    #[error("more than {MAX_EMPTY_FRAGMENTS} empty fragments in one message")]
    Endless,
}

impl FrameError {
    /// How the session ends: close 1002, 1007, 1009 or 1008.
    pub fn reason(self) -> CloseReason {
        match self {
            FrameError::Protocol(_) => CloseReason::BadMessage(Violation::Protocol),
            FrameError::NotUtf8 => CloseReason::BadMessage(Violation::NotUtf8),
            FrameError::TooLarge => CloseReason::TooLarge,
            FrameError::Endless => CloseReason::BadMessage(Violation::Policy),
        }
    }
}

/// What one connection has sent in part. Between messages it holds nothing on the heap.
#[derive(Debug, Default)]
pub struct Assembler {
    partial: Option<Box<Partial>>,
    is_over: bool,
}

impl Assembler {
    /// At the beginning of a frame.
    pub fn new() -> Self {
        Self::default()
    }

    /// Takes bytes as they came and calls `out` for each whole thing in them. Returns how many
    /// bytes were taken: all of them, unless `out` broke; then the rest is to be fed again later.
    /// The taken part of `input` is overwritten (unmasked in place).
    ///
    /// After a close, an error, or `end`, everything is taken and ignored.
    ///
    /// # Errors
    /// `FrameError`: what was whole before the fault has been delivered; close with its reason.
    pub fn feed(
        &mut self,
        input: &mut [u8],
        limits: &Limits,
        out: &mut impl FnMut(Inbound) -> ControlFlow<()>,
    ) -> Result<usize, FrameError> {
        let mut n_taken = 0;
        while n_taken < input.len() {
            if self.is_over {
                return Ok(input.len());
            }
            let (n, whole) = self.step(&mut input[n_taken..], limits).inspect_err(|_| self.end())?;
            n_taken += n;
            let Some(inbound) = whole else { continue };
            if matches!(inbound, Inbound::Close { .. }) {
                self.end();
            }
            if out(inbound).is_break() {
                return Ok(if self.is_over { input.len() } else { n_taken });
            }
        }
        Ok(n_taken)
    }

    /// Takes nothing more seriously: our side has sent its close.
    pub fn end(&mut self) {
        self.partial = None;
        self.is_over = true;
    }

    /// Is a frame or a message begun and not finished? Then it should have a deadline.
    pub fn is_partial(&self) -> bool {
        self.partial.is_some()
    }

    /// Bytes of a client's payload that are held: at most the largest message and one control frame.
    pub fn n_held_bytes(&self) -> usize {
        self.partial.as_ref().map_or(0, |p| p.n_held_bytes())
    }

    /// Takes at least one byte of a non-empty `input` and at most one frame.
    fn step(&mut self, input: &mut [u8], limits: &Limits) -> Result<(usize, Option<Inbound>), FrameError> {
        if self.partial.is_none()
            && let Some(header) = Header::read(input, None, limits)?
            && header.is_final
            && let Some(payload) = input[header.n_bytes..].get_mut(..header.n_payload)
        {
            unmask(payload, header.mask);
            return Ok((header.n_bytes + header.n_payload, Some(whole(header.opcode, payload)?)));
        }
        let partial = self.partial.get_or_insert_default();
        let step = partial.take(input, limits)?;
        if partial.is_empty() {
            self.partial = None;
        }
        Ok(step)
    }
}

/// The most frequent case: one frame, one message, all of it there.
fn whole(opcode: OpCode, payload: &[u8]) -> Result<Inbound, FrameError> {
    match opcode {
        OpCode::Text if std::str::from_utf8(payload).is_err() => Err(FrameError::NotUtf8),
        OpCode::Text => Ok(Inbound::Text(Bytes::copy_from_slice(payload))),
        OpCode::Binary => Ok(Inbound::Binary(Bytes::copy_from_slice(payload))),
        OpCode::Ping => Ok(Inbound::Ping(Bytes::copy_from_slice(payload))),
        OpCode::Pong => Ok(Inbound::Pong),
        OpCode::Close => close(payload),
        OpCode::Continuation => Err(FrameError::Protocol("continuation of nothing")),
    }
}

fn close(payload: &[u8]) -> Result<Inbound, FrameError> {
    let Some((code, reason)) = payload.split_first_chunk::<2>() else {
        return match payload {
            [] => Ok(Inbound::Close { code: None, reason: String::new() }),
            _ => Err(FrameError::Protocol("close with half a code")),
        };
    };
    let code = u16::from_be_bytes(*code);
    if !may_be_sent(code) {
        return Err(FrameError::Protocol("close code that may not be sent"));
    }
    let reason = std::str::from_utf8(reason).map_err(|_| FrameError::NotUtf8)?;
    Ok(Inbound::Close { code: Some(code), reason: reason.to_owned() })
}

/// The registered codes without those that only stand for the absence of one (1004 to 1006, 1015),
/// the libraries' and the applications' range.
fn may_be_sent(code: u16) -> bool {
    matches!(code, 1000..=1003 | 1007..=1014 | 3000..=4999)
}

#[derive(Clone, Copy, Debug)]
struct Header {
    is_final: bool,
    opcode: OpCode,
    mask: [u8; 4],
    n_payload: usize,
    n_bytes: usize,
}

impl Header {
    /// Reads a header whose beginning is `bytes`; `None` while it is incomplete. A fault is found
    /// with the first byte that shows it. `open`: payload so far of the message in progress.
    fn read(bytes: &[u8], open: Option<usize>, limits: &Limits) -> Result<Option<Header>, FrameError> {
        let Some(&first) = bytes.first() else { return Ok(None) };
        let (is_final, opcode) = first_byte(first, open)?;
        let Some(&second) = bytes.get(1) else { return Ok(None) };
        if second & 0x80 == 0 {
            return Err(FrameError::Protocol("unmasked"));
        }
        if is_control(opcode) && usize::from(second & 0x7f) > MAX_CONTROL_PAYLOAD {
            return Err(FrameError::Protocol("control frame over 125 bytes"));
        }
        let Some((n_payload, n_length)) = length(second & 0x7f, &bytes[2..])? else { return Ok(None) };
        let room = limits.max_message.saturating_sub(open.unwrap_or(0));
        let n_payload = match usize::try_from(n_payload) {
            Ok(n) if n <= room || is_control(opcode) => n,
            _ => return Err(FrameError::TooLarge),
        };
        let mask = bytes[2 + n_length..].first_chunk::<4>();
        Ok(mask.map(|mask| Header { is_final, opcode, mask: *mask, n_payload, n_bytes: 6 + n_length }))
    }
}

fn is_control(opcode: OpCode) -> bool {
    matches!(opcode, OpCode::Close | OpCode::Ping | OpCode::Pong)
}

fn first_byte(byte: u8, open: Option<usize>) -> Result<(bool, OpCode), FrameError> {
    if byte & 0x70 != 0 {
        return Err(FrameError::Protocol("reserved bit without an extension"));
    }
    let opcode = OpCode::try_from(byte & 0x0f).map_err(|_| FrameError::Protocol("reserved opcode"))?;
    let is_final = byte & 0x80 != 0;
    match (opcode, open) {
        (OpCode::Continuation, None) => Err(FrameError::Protocol("continuation of nothing")),
        (OpCode::Text | OpCode::Binary, Some(_)) => Err(FrameError::Protocol("new message inside a message")),
        _ if is_control(opcode) && !is_final => Err(FrameError::Protocol("fragmented control frame")),
        _ => Ok((is_final, opcode)),
    }
}

/// Payload length and how many extra bytes it stands in; `None` while those are incomplete.
fn length(short: u8, rest: &[u8]) -> Result<Option<(u64, usize)>, FrameError> {
    let (n, n_bytes, least) = match short {
        126 => (rest.first_chunk().map(|raw| u64::from(u16::from_be_bytes(*raw))), 2, 126),
        127 => (rest.first_chunk().map(|raw| u64::from_be_bytes(*raw)), 8, 65_536),
        short => (Some(u64::from(short)), 0, 0),
    };
    match n {
        None => Ok(None),
        Some(n) if n < least => Err(FrameError::Protocol("length not in its shortest form")),
        Some(n) if n >> 63 != 0 => Err(FrameError::Protocol("length with its top bit set")),
        Some(n) => Ok(Some((n, n_bytes))),
    }
}

/// What is kept while a header, a frame or a message is incomplete.
#[derive(Debug, Default)]
struct Partial {
    head: [u8; MAX_HEADER],
    n_head: usize,
    frame: Option<Begun>,
    /// Payload of the control frame in progress; it may stand between the fragments of a message.
    control: Vec<u8>,
    message: Option<Message>,
}

/// A frame whose header is complete.
#[derive(Debug)]
struct Begun {
    header: Header,
    n_taken: usize,
}

impl Partial {
    fn is_empty(&self) -> bool {
        self.n_head == 0 && self.frame.is_none() && self.message.is_none()
    }

    fn n_held_bytes(&self) -> usize {
        self.control.capacity() + self.message.as_ref().map_or(0, |m| m.bytes.capacity())
    }

    fn take(&mut self, input: &mut [u8], limits: &Limits) -> Result<(usize, Option<Inbound>), FrameError> {
        let n_head = match self.frame {
            Some(_) => 0,
            None => self.take_head(input, limits)?,
        };
        let Some(begun) = &mut self.frame else { return Ok((n_head, None)) };
        let header = begun.header;
        let n_missing = header.n_payload - begun.n_taken;
        let n = n_missing.min(input.len() - n_head);
        let piece = &mut input[n_head..n_head + n];
        let mut mask = header.mask;
        mask.rotate_left(begun.n_taken % 4);
        unmask(piece, mask);
        begun.n_taken += n;
        match &mut self.message {
            Some(message) if !is_control(header.opcode) => {
                let ceiling = if header.is_final { message.bytes.len() + n_missing } else { limits.max_message };
                message.push(piece, ceiling)?;
            }
            _ => {
                self.control.reserve_exact(n_missing);
                self.control.extend_from_slice(piece);
            }
        }
        if n < n_missing {
            return Ok((n_head + n, None));
        }
        self.frame = None;
        Ok((n_head + n, self.finish(header)?))
    }

    /// Completes the header as far as `input` goes; returns how many bytes that took.
    fn take_head(&mut self, input: &[u8], limits: &Limits) -> Result<usize, FrameError> {
        let n = input.len().min(MAX_HEADER - self.n_head);
        self.head[self.n_head..self.n_head + n].copy_from_slice(&input[..n]);
        let open = self.message.as_ref().map(|m| m.bytes.len());
        let Some(header) = Header::read(&self.head[..self.n_head + n], open, limits)? else {
            self.n_head += n;
            return Ok(n);
        };
        let n_taken = header.n_bytes - self.n_head;
        self.n_head = 0;
        self.frame = Some(Begun { header, n_taken: 0 });
        if matches!(header.opcode, OpCode::Text | OpCode::Binary) {
            self.message = Some(Message::new(header.opcode));
        }
        Ok(n_taken)
    }

    /// A frame is complete: what does it complete?
    fn finish(&mut self, header: Header) -> Result<Option<Inbound>, FrameError> {
        if is_control(header.opcode) {
            return whole(header.opcode, &std::mem::take(&mut self.control)).map(Some);
        }
        if header.is_final {
            return self.message.take().map(Message::finish).transpose();
        }
        if let Some(message) = &mut self.message
            && header.n_payload == 0
        {
            message.n_empty += 1;
            if message.n_empty > MAX_EMPTY_FRAGMENTS {
                return Err(FrameError::Endless);
            }
        }
        Ok(None)
    }
}

/// A data message in progress.
#[derive(Debug)]
struct Message {
    opcode: OpCode,
    bytes: Vec<u8>,
    /// So many bytes are known to be whole characters; at most three behind `bytes`.
    n_valid: usize,
    n_empty: usize,
}

impl Message {
    fn new(opcode: OpCode) -> Self {
        Self { opcode, bytes: Vec::new(), n_valid: 0, n_empty: 0 }
    }

    /// Grows with what arrived, twofold, and never beyond `ceiling`, the most that can still come.
    fn push(&mut self, piece: &[u8], ceiling: usize) -> Result<(), FrameError> {
        let needed = self.bytes.len() + piece.len();
        if needed > self.bytes.capacity() {
            let grown = (self.bytes.capacity() * 2).max(FIRST_GROWTH).min(ceiling).max(needed);
            self.bytes.reserve_exact(grown - self.bytes.len());
        }
        self.bytes.extend_from_slice(piece);
        if self.opcode == OpCode::Text {
            self.check_text()?;
        }
        Ok(())
    }

    /// Fails with the first byte that no continuation could make valid.
    fn check_text(&mut self) -> Result<(), FrameError> {
        match std::str::from_utf8(&self.bytes[self.n_valid..]) {
            Ok(text) => self.n_valid += text.len(),
            Err(e) if e.error_len().is_some() => return Err(FrameError::NotUtf8),
            Err(e) => self.n_valid += e.valid_up_to(),
        }
        Ok(())
    }

    fn finish(self) -> Result<Inbound, FrameError> {
        match self.opcode {
            OpCode::Text if self.n_valid < self.bytes.len() => Err(FrameError::NotUtf8),
            OpCode::Text => Ok(Inbound::Text(self.bytes.into())),
            _ => Ok(Inbound::Binary(self.bytes.into())),
        }
    }
}

/// A close frame for the wire; the reason is cut at a character to its 123 bytes.
pub fn close_frame(code: u16, reason: &str) -> Bytes {
    let end = (0..=reason.len().min(MAX_CLOSE_REASON)).rev().find(|i| reason.is_char_boundary(*i));
    let reason = &reason[..end.unwrap_or(0)];
    frame(OpCode::Close as u8, &[&code.to_be_bytes(), reason.as_bytes()].concat())
}

/// The answer to a close frame that held no code.
pub fn empty_close_frame() -> Bytes {
    frame(OpCode::Close as u8, &[])
}

/// The answer to a ping with this payload.
///
/// # Panics
/// Over 125 bytes, which no `Inbound::Ping` has.
pub fn pong_frame(payload: &[u8]) -> Bytes {
    assert!(payload.len() <= MAX_CONTROL_PAYLOAD, "a ping's payload was checked when it came");
    frame(OpCode::Pong as u8, payload)
}

/// A heartbeat.
pub fn ping_frame() -> Bytes {
    Bytes::from_static(&[0x89, 0])
}

/// A binary message for the wire.
pub fn binary_frame(payload: &[u8]) -> Bytes {
    frame(OpCode::Binary as u8, payload)
}

#[cfg(test)]
mod tests;
