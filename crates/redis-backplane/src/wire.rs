//! The pub/sub connection's own protocol (RESP3). Decides where a message ends, which one is too
//! long to be kept, and nothing else: what a message means is the link's.
//!
//! The library that carries every command would hand each message from its task to ours, parsed
//! into a tree of owned values, and keep a second table of all channels. Here a message is looked at
//! where it lies: one to a single client costs 19 to 22 µs where it cost 27, of which 15 are its
//! write, and a channel 80 bytes less (measured).

use std::io;

use bytes::{Buf, BytesMut};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, ReadHalf, WriteHalf};

/// A TCP, TLS or Unix connection.
pub(crate) trait Stream: AsyncRead + AsyncWrite + Send + Unpin {}

impl<T: AsyncRead + AsyncWrite + Send + Unpin> Stream for T {}

/// Room that a read is given. 64 KiB: a few hundred messages of the usual size.
const READ: usize = 64 << 10;
/// A buffer that a crowd of messages has grown beyond this is given back once it is empty.
const KEPT: usize = 1 << 20;
/// No line (a length, a word, an error) and no name is longer.
const MAX_LINE: usize = 64 << 10;
/// How deep answers may be nested: one that tells about a connection is three deep.
const MAX_DEPTH: usize = 8;

/// Why a connection is of no more use.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Broken {
    #[error("the server closed it")]
    Closed,
    #[error(transparent)]
    Io(#[from] io::Error),
    #[error("what arrives is not Redis' protocol")]
    Garbled,
}

/// One thing that the server says.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Said<'a> {
    /// Somebody published this.
    Message { name: &'a [u8], payload: &'a [u8] },
    /// A message of more bytes than are looked at; they are skipped.
    TooLong,
    /// The subscription stands from here on.
    Subscribed(&'a [u8]),
    /// It is over.
    Unsubscribed,
    /// The answer to a PING.
    Pong,
    /// A command was refused: `CODE detail`.
    Error(&'a [u8]),
    /// Whatever else; of no meaning to the link.
    Other,
}

/// Both directions of one connection.
pub(crate) fn split(stream: Box<dyn Stream>, max_payload: usize) -> (Input, Output) {
    let (read, write) = tokio::io::split(stream);
    let input = Input { half: read, buffer: BytesMut::new(), taken: 0, to_skip: 0, max_payload };
    (input, Output { half: write, buffer: BytesMut::new(), is_flushed: true })
}

/// What the server sends.
pub(crate) struct Input {
    half: ReadHalf<Box<dyn Stream>>,
    buffer: BytesMut,
    /// Of the buffer's beginning, what `next` has given out.
    taken: usize,
    /// Of what is still to arrive (or arrived behind `taken`): the rest of a message that is too long.
    to_skip: usize,
    max_payload: usize,
}

impl Input {
    /// Bytes that arrived and were not looked at.
    pub(crate) fn n_waiting(&self) -> usize {
        self.buffer.len() - self.taken
    }

    /// The next thing that arrived in full; `None`: nothing yet.
    ///
    /// # Errors
    /// `Broken::Garbled`.
    pub(crate) fn next(&mut self) -> Result<Option<Said<'_>>, Broken> {
        self.buffer.advance(std::mem::take(&mut self.taken));
        let skipped = self.to_skip.min(self.buffer.len());
        self.buffer.advance(skipped);
        self.to_skip -= skipped;
        if self.to_skip > 0 {
            return Ok(None);
        }
        if self.buffer.is_empty() && self.buffer.capacity() > KEPT {
            self.buffer = BytesMut::new();
        }
        let mut reader = Reader { bytes: &self.buffer, at: 0, max_payload: self.max_payload, left: 0 };
        match reader.said() {
            Ok(said) => {
                self.taken = reader.at;
                self.to_skip = reader.left;
                Ok(Some(said))
            }
            Err(Stop::Short) => Ok(None),
            Err(Stop::Garbled) => Err(Broken::Garbled),
        }
    }

    /// Waits until something more has arrived.
    ///
    /// # Errors
    /// `Broken::Closed`, `Broken::Io`.
    ///
    /// # Cancel safety
    /// Nothing is lost.
    pub(crate) async fn fill(&mut self) -> Result<(), Broken> {
        self.buffer.reserve(READ);
        match self.half.read_buf(&mut self.buffer).await? {
            0 => Err(Broken::Closed),
            _ => Ok(()),
        }
    }
}

/// What is sent to the server.
pub(crate) struct Output {
    half: WriteHalf<Box<dyn Stream>>,
    buffer: BytesMut,
    /// An empty buffer alone does not say so: TLS holds back what it has encrypted.
    is_flushed: bool,
}

impl Output {
    /// Appends a command.
    pub(crate) fn command<T: AsRef<[u8]>>(&mut self, name: &str, args: &[T]) {
        self.is_flushed = false;
        self.line(b'*', args.len() + 1);
        self.bulk(name.as_bytes());
        args.iter().for_each(|arg| self.bulk(arg.as_ref()));
    }

    fn line(&mut self, kind: u8, n: usize) {
        self.buffer.extend_from_slice(format!("{}{n}\r\n", char::from(kind)).as_bytes());
    }

    fn bulk(&mut self, bytes: &[u8]) {
        self.line(b'$', bytes.len());
        self.buffer.extend_from_slice(bytes);
        self.buffer.extend_from_slice(b"\r\n");
    }

    /// Has everything been handed to the kernel?
    pub(crate) fn is_flushed(&self) -> bool {
        self.is_flushed
    }

    /// Waits until everything was handed to the kernel.
    ///
    /// # Errors
    /// `Broken::Io`.
    ///
    /// # Cancel safety
    /// Nothing is lost, nothing is sent twice.
    pub(crate) async fn flush(&mut self) -> Result<(), Broken> {
        while !self.buffer.is_empty() {
            if self.half.write_buf(&mut self.buffer).await? == 0 {
                return Err(Broken::Closed);
            }
        }
        self.half.flush().await?;
        self.buffer = BytesMut::new();
        self.is_flushed = true;
        Ok(())
    }
}

/// Why nothing was read.
#[derive(Debug, PartialEq, Eq)]
enum Stop {
    /// More must arrive.
    Short,
    Garbled,
}

/// Reads one value from the beginning of what has arrived.
struct Reader<'a> {
    bytes: &'a [u8],
    at: usize,
    max_payload: usize,
    /// Bytes of a message that is too long, beyond `at`.
    left: usize,
}

impl<'a> Reader<'a> {
    fn said(&mut self) -> Result<Said<'a>, Stop> {
        match *self.bytes.first().ok_or(Stop::Short)? {
            // RESP2 sends arrays for pushes.
            b'>' | b'*' => self.push(),
            b'+' => Ok(if self.line()? == b"PONG" { Said::Pong } else { Said::Other }),
            b'-' => self.line().map(Said::Error),
            _ => self.skip(0).map(|()| Said::Other),
        }
    }

    fn push(&mut self) -> Result<Said<'a>, Stop> {
        let n = self.count()?.unwrap_or(0);
        if n != 3 || self.peek()? != b'$' {
            return self.skip_all(n, 1).map(|()| Said::Other);
        }
        let kind = self.bulk(MAX_LINE)?;
        match kind {
            b"message" => {
                let name = self.bulk(MAX_LINE)?;
                let length = self.length()?.ok_or(Stop::Garbled)?;
                if length > self.max_payload {
                    self.left = length.saturating_add(2);
                    return Ok(Said::TooLong);
                }
                Ok(Said::Message { name, payload: self.body(length)? })
            }
            b"subscribe" => {
                let name = self.bulk(MAX_LINE)?;
                self.skip(1).map(|()| Said::Subscribed(name))
            }
            b"unsubscribe" => self.skip_all(2, 1).map(|()| Said::Unsubscribed),
            _ => self.skip_all(2, 1).map(|()| Said::Other),
        }
    }

    fn peek(&self) -> Result<u8, Stop> {
        self.bytes.get(self.at).copied().ok_or(Stop::Short)
    }

    /// The rest of a line behind its first byte.
    fn line(&mut self) -> Result<&'a [u8], Stop> {
        let rest = self.bytes.get(self.at + 1..).ok_or(Stop::Short)?;
        let within = &rest[..rest.len().min(MAX_LINE)];
        let Some(end) = within.windows(2).position(|pair| pair == b"\r\n") else {
            return Err(if rest.len() >= MAX_LINE { Stop::Garbled } else { Stop::Short });
        };
        self.at += 1 + end + 2;
        Ok(&rest[..end])
    }

    /// A line's number; `None`: -1, which stands for nothing.
    fn count(&mut self) -> Result<Option<usize>, Stop> {
        match self.line()? {
            b"-1" => Ok(None),
            digits => {
                let text = std::str::from_utf8(digits).map_err(|_| Stop::Garbled)?;
                text.parse().map(Some).map_err(|_| Stop::Garbled)
            }
        }
    }

    fn length(&mut self) -> Result<Option<usize>, Stop> {
        match self.peek()? {
            b'$' | b'=' | b'!' => self.count(),
            _ => Err(Stop::Garbled),
        }
    }

    /// A text that is there and has at most `max` bytes.
    fn bulk(&mut self, max: usize) -> Result<&'a [u8], Stop> {
        match self.length()? {
            Some(length) if length <= max => self.body(length),
            _ => Err(Stop::Garbled),
        }
    }

    fn body(&mut self, length: usize) -> Result<&'a [u8], Stop> {
        let end = self.at + length;
        match self.bytes.get(end..end + 2) {
            Some(b"\r\n") => {}
            Some(_) => return Err(Stop::Garbled),
            None => return Err(Stop::Short),
        }
        let body = &self.bytes[self.at..end];
        self.at = end + 2;
        Ok(body)
    }

    fn skip(&mut self, depth: usize) -> Result<(), Stop> {
        if depth > MAX_DEPTH {
            return Err(Stop::Garbled);
        }
        match self.peek()? {
            b'+' | b'-' | b':' | b'_' | b'#' | b',' | b'(' => self.line().map(drop),
            b'$' | b'=' | b'!' => match self.count()? {
                Some(length) if length > self.max_payload => Err(Stop::Garbled),
                Some(length) => self.body(length).map(drop),
                None => Ok(()),
            },
            b'*' | b'~' | b'>' => {
                let n = self.count()?.unwrap_or(0);
                self.skip_all(n, depth + 1)
            }
            b'%' => {
                let n = self.count()?.unwrap_or(0);
                self.skip_all(n.saturating_mul(2), depth + 1)
            }
            _ => Err(Stop::Garbled),
        }
    }

    fn skip_all(&mut self, n: usize, depth: usize) -> Result<(), Stop> {
        (0..n).try_for_each(|_| self.skip(depth))
    }
}

#[cfg(test)]
mod tests {
    use std::pin::Pin;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::task::{Context, Poll};

    use futures_util::FutureExt;
    use tokio::io::ReadBuf;

    use super::*;

    const MAX: usize = 100;

    /// What these bytes say when they arrive in pieces of `step`, and how it ended.
    async fn heard(bytes: &[u8], step: usize) -> (Vec<String>, Broken) {
        let (near, mut far) = tokio::io::duplex(1 << 20);
        let (mut input, _output) = split(Box::new(near), MAX);
        let mut said = Vec::new();
        for piece in bytes.chunks(step) {
            far.write_all(piece).await.unwrap();
            if let Err(broken) = all_of(&mut input, &mut said).await {
                return (said, broken);
            }
        }
        drop(far);
        loop {
            if let Err(broken) = all_of(&mut input, &mut said).await {
                return (said, broken);
            }
        }
    }

    async fn all_of(input: &mut Input, said: &mut Vec<String>) -> Result<(), Broken> {
        input.fill().await?;
        while let Some(one) = input.next()? {
            said.push(format!("{one:?}"));
        }
        Ok(())
    }

    fn message(name: &str, payload: &str) -> Vec<u8> {
        format!(">3\r\n$7\r\nmessage\r\n${}\r\n{name}\r\n${}\r\n{payload}\r\n", name.len(), payload.len()).into_bytes()
    }

    const HELLO: &str =
        "%3\r\n$6\r\nserver\r\n$5\r\nredis\r\n$5\r\nproto\r\n:3\r\n$7\r\nmodules\r\n*1\r\n%1\r\n+name\r\n_\r\n";

    #[tokio::test]
    async fn whatever_the_pieces_the_same_is_said() {
        let all = [
            HELLO.as_bytes(),
            b"+PONG\r\n",
            b"*3\r\n$9\r\nsubscribe\r\n$1\r\nc\r\n:1\r\n",
            b">3\r\n$9\r\nsubscribe\r\n$3\r\nt:a\r\n:2\r\n",
            &message("t:a", "x\r\n$1\r\ny"),
            &message("t:b", &"y".repeat(MAX)),
            &message("t:b", &"y".repeat(MAX + 1)),
            &message("t:b", &"+PONG\r\n".repeat(1_000)),
            &message("", ""),
            b">3\r\n$11\r\nunsubscribe\r\n$-1\r\n:0\r\n",
            b">2\r\n$10\r\ninvalidate\r\n*1\r\n$1\r\nk\r\n",
            b">3\r\n$8\r\nwhatever\r\n$1\r\nk\r\n#t\r\n",
            b"+OK\r\n$-1\r\n:7\r\n,1.5\r\n(9\r\n~1\r\n:1\r\n*-1\r\n*0\r\n",
            b"-NOPERM this user may not\r\n",
        ]
        .concat();
        let (whole, end) = heard(&all, all.len()).await;
        assert!(matches!(end, Broken::Closed), "{end:?}");
        let of = |n: usize| &*whole[n];
        assert_eq!((of(0), of(1)), ("Other", "Pong"));
        assert_eq!(of(2), format!("{:?}", Said::Subscribed(b"c")));
        assert_eq!(of(3), format!("{:?}", Said::Subscribed(b"t:a")));
        assert_eq!(of(4), format!("{:?}", Said::Message { name: b"t:a", payload: b"x\r\n$1\r\ny" }));
        assert_eq!(of(5), format!("{:?}", Said::Message { name: b"t:b", payload: &[b'y'; MAX] }));
        assert_eq!((of(6), of(7)), ("TooLong", "TooLong"));
        assert_eq!(of(8), format!("{:?}", Said::Message { name: b"", payload: b"" }));
        assert_eq!(of(9), "Unsubscribed");
        assert_eq!(whole[10..20], ["Other"; 10]);
        assert_eq!(of(20), format!("{:?}", Said::Error(b"NOPERM this user may not")));
        assert_eq!(whole.len(), 21);
        for step in [1, 2, 3, 7, 64, 1_000] {
            assert_eq!(heard(&all, step).await.0, whole, "in pieces of {step}");
        }
    }

    #[tokio::test]
    async fn what_is_no_such_protocol_ends_the_connection_and_never_panics() {
        let long = [b"+".to_vec(), vec![b'x'; MAX_LINE + 1]].concat();
        let long_name = format!(">3\r\n$7\r\nmessage\r\n${}\r\n", MAX_LINE + 1);
        let deep = "*1\r\n".repeat(100_000);
        let bad: [&[u8]; 14] = [
            b"HTTP/1.1 400 Bad Request\r\n\r\n",
            b"*x\r\n",
            b"*-2\r\n",
            b"$99999999999999999999\r\n",
            b"$18446744073709551615\r\n",
            b">3\r\n$7\r\nmessage\r\n$1\r\nc\r\n$-1\r\n",
            b">3\r\n$7\r\nmessage\r\n:1\r\n",
            b">3\r\n$7\r\nmessageXX$1\r\n",
            b">3\r\n$-1\r\n",
            b"$?\r\n",
            b"\xff\xff\xff",
            &long,
            long_name.as_bytes(),
            deep.as_bytes(),
        ];
        for bytes in bad {
            let (said, end) = heard(bytes, bytes.len()).await;
            assert!(matches!(end, Broken::Garbled), "{:?}: {said:?} {end:?}", &bytes[..bytes.len().min(40)]);
        }
    }

    #[tokio::test]
    async fn a_crowd_of_messages_leaves_no_room_behind() {
        let crowd = message("c", &"x".repeat(90)).repeat(20_000);
        let (near, mut far) = tokio::io::duplex(64 << 10);
        let (mut input, _output) = split(Box::new(near), MAX);
        let sent = tokio::spawn(async move {
            far.write_all(&crowd).await.unwrap();
            far
        });
        while input.n_waiting() < KEPT + 1 {
            input.fill().await.unwrap();
        }
        let mut n = 0;
        while n < 20_000 {
            match input.next().unwrap() {
                Some(_) => n += 1,
                None => input.fill().await.unwrap(),
            }
        }
        assert!(input.next().unwrap().is_none());
        assert!(input.buffer.capacity() <= KEPT, "{}", input.buffer.capacity());
        drop(sent.await.unwrap());
    }

    #[tokio::test]
    async fn commands_are_counted_texts_and_leave_in_order() {
        let (near, mut far) = tokio::io::duplex(16);
        let (_input, mut output) = split(Box::new(near), MAX);
        assert!(output.is_flushed());
        output.command("PING", &[""; 0]);
        output.command("SUBSCRIBE", &["t:a", "t: ü\r\n"]);
        let read = tokio::spawn(async move {
            let mut all = String::new();
            far.read_to_string(&mut all).await.unwrap();
            all
        });
        // Given up and gone on with as often as its task is woken for something else.
        while tokio::time::timeout(std::time::Duration::from_millis(1), output.flush()).await.is_err() {}
        assert!(output.is_flushed());
        drop((output, _input));
        assert_eq!(read.await.unwrap(), "*1\r\n$4\r\nPING\r\n*3\r\n$9\r\nSUBSCRIBE\r\n$3\r\nt:a\r\n$7\r\nt: ü\r\n\r\n");
    }

    /// Takes everything at once and keeps it back until it is flushed, which it is not at the first try.
    #[derive(Default)]
    struct Holding {
        n_tries: usize,
        is_out: Arc<AtomicBool>,
    }

    impl AsyncRead for Holding {
        fn poll_read(self: Pin<&mut Self>, _: &mut Context<'_>, _: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
            Poll::Pending
        }
    }

    impl AsyncWrite for Holding {
        fn poll_write(self: Pin<&mut Self>, _: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
            Poll::Ready(Ok(bytes.len()))
        }

        fn poll_flush(mut self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
            self.n_tries += 1;
            if self.n_tries == 1 {
                return Poll::Pending;
            }
            self.is_out.store(true, Ordering::Relaxed);
            Poll::Ready(Ok(()))
        }

        fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
            Poll::Ready(Ok(()))
        }
    }

    #[tokio::test]
    async fn what_the_stream_keeps_back_is_not_taken_for_sent() {
        let holding = Holding::default();
        let is_out = holding.is_out.clone();
        let (_input, mut output) = split(Box::new(holding), MAX);
        output.command("PING", &[""; 0]);
        assert!(output.flush().now_or_never().is_none());
        assert!(!output.is_flushed() && !is_out.load(Ordering::Relaxed));
        output.flush().now_or_never().expect("it is flushed now").unwrap();
        assert!(output.is_flushed() && is_out.load(Ordering::Relaxed));
    }
}
