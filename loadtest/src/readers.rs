//! Thousands of sockets, read by one thread that costs the machine as little as it can. Decides when
//! a socket is looked at and whether what came is what had to come next; what that means is the
//! measurement's to say.
//!
//! A server's write(2) also pays for waking whoever sleeps in a poller on the other end: 30 % more or
//! less for no fault of the server's. So where CPU is measured nobody sleeps there: the thread looks
//! every few milliseconds (`Look::Every`). Where delay is measured it sleeps in the poller
//! (`Look::AtOnce`).

use std::io::{self, Read, Write};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, mpsc};
use std::thread;
use std::time::Duration;

use mio::event::Event;
use mio::{Events, Interest, Poll, Token, Waker};
use slab::Slab;
use tokio::time::Instant;

use crate::histogram::Histogram;
use crate::wire::{Decoder, Seen, Subscriber, number_after};

/// Before the number of an event, which has `SEQ_DIGITS` digits and a quotation mark behind it.
pub const MARKER: &[u8] = br#""seq":""#;
const SEQ_DIGITS: usize = 10;

/// The poller's own token for "a command waits".
const WAKE: Token = Token(usize::MAX);
/// Ready sockets told at a time.
const N_EVENTS: usize = 1_024;
const SCRATCH_BYTES: usize = 64 << 10;

/// When sockets are looked at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Look {
    Every(Duration),
    AtOnce,
}

impl Look {
    /// Long enough that a server never finds us waiting, short enough that no socket's buffer fills.
    pub const DRAIN: Look = Look::Every(Duration::from_millis(5));
}

/// How the bytes of a socket become events.
pub enum Reading {
    /// The gateway's own wire, every frame and chunk looked at.
    Ours(Decoder),
    /// Any other server's: whatever holds a marker. The bytes are what may be the begin of one.
    Scan(Vec<u8>),
}

/// A socket to read, non-blocking.
pub struct Opened {
    pub socket: std::net::TcpStream,
    pub reading: Reading,
    /// What was read already.
    pub early: Vec<u8>,
}

impl Opened {
    /// Takes over an open session. It will be reset, not closed, so that no port is left waiting.
    pub fn from_subscriber(subscriber: Subscriber) -> Result<Opened, String> {
        let (stream, decoder, early) = subscriber.into_parts();
        Opened::from_stream(stream, Reading::Ours(decoder), early)
    }

    pub fn from_stream(stream: tokio::net::TcpStream, reading: Reading, early: Vec<u8>) -> Result<Opened, String> {
        stream.set_zero_linger().map_err(|error| error.to_string())?;
        let socket = stream.into_std().map_err(|error| error.to_string())?;
        Ok(Opened { socket, reading, early })
    }
}

/// Sockets that hear the same events, and what they heard.
pub struct Group {
    started: Instant,
    n_members: AtomicUsize,
    n_received: AtomicU64,
    /// Not the one after the one before: lost, doubled or out of order.
    n_wrong: AtomicU64,
    ended: Mutex<Vec<String>>,
    /// When each event was sent, in ns after the start; empty where delay is not measured.
    sent: Box<[AtomicU64]>,
    delays: Mutex<Arc<Histogram>>,
}

impl Group {
    /// For events whose delay nobody asks for.
    pub fn new() -> Arc<Group> {
        Group::timed(0)
    }

    /// For so many events whose delay is measured.
    pub fn timed(n_events: usize) -> Arc<Group> {
        Arc::new(Group {
            started: Instant::now(),
            n_members: AtomicUsize::new(0),
            n_received: AtomicU64::new(0),
            n_wrong: AtomicU64::new(0),
            ended: Mutex::default(),
            sent: (0..n_events).map(|_| AtomicU64::new(0)).collect(),
            delays: Mutex::new(Arc::new(Histogram::new())),
        })
    }

    pub fn n_members(&self) -> usize {
        self.n_members.load(Ordering::Relaxed)
    }

    /// Events received by all members together.
    pub fn n_received(&self) -> u64 {
        self.n_received.load(Ordering::Acquire)
    }

    pub fn n_wrong(&self) -> u64 {
        self.n_wrong.load(Ordering::Relaxed)
    }

    /// How members ended that nobody here ended.
    pub fn ended(&self) -> Vec<String> {
        self.ended.lock().expect("nothing panics while it is held").clone()
    }

    /// From now on delays are counted here.
    pub fn count_in(&self, delays: Arc<Histogram>) {
        *self.delays.lock().expect("nothing panics while it is held") = delays;
    }

    /// Event `seq` counts as sent at `at`.
    pub fn sent(&self, seq: u64, at: Instant) {
        if let Some(sent) = self.sent.get(seq as usize) {
            sent.store(at.duration_since(self.started).as_nanos() as u64, Ordering::Release);
        }
    }

    /// Waits until `n` events were received; `false` where they were not in time.
    pub async fn until_received(&self, n: u64, patience: Duration) -> bool {
        let until = Instant::now() + patience;
        while self.n_received() < n {
            if Instant::now() >= until {
                return false;
            }
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
        true
    }

    fn note(&self, seq: u64, next: &mut u64) {
        if seq != *next {
            self.n_wrong.fetch_add(1, Ordering::Relaxed);
        }
        *next = seq + 1;
        if let Some(sent) = self.sent.get(seq as usize) {
            let sent = Duration::from_nanos(sent.load(Ordering::Acquire));
            let took = self.started.elapsed().saturating_sub(sent);
            self.delays.lock().expect("nothing panics while it is held").record(took);
        }
        self.n_received.fetch_add(1, Ordering::Release);
    }
}

enum Command {
    Add(Opened, Arc<Group>),
    Drop(Arc<Group>, mpsc::Sender<()>),
}

/// The thread. It ends, and its sockets with it, when this is dropped.
pub struct Readers {
    commands: Option<mpsc::Sender<Command>>,
    waker: Waker,
    thread: Option<thread::JoinHandle<()>>,
}

impl Readers {
    pub fn start(look: Look) -> Result<Readers, String> {
        let poll = Poll::new().map_err(|error| error.to_string())?;
        let waker = Waker::new(poll.registry(), WAKE).map_err(|error| error.to_string())?;
        let (commands, coming) = mpsc::channel();
        let reading =
            move || Thread { poll, coming, look, members: Slab::new(), scratch: vec![0; SCRATCH_BYTES] }.run();
        let thread = thread::Builder::new().name("readers".to_owned()).spawn(reading);
        let thread = thread.map_err(|error| error.to_string())?;
        Ok(Readers { commands: Some(commands), waker, thread: Some(thread) })
    }

    pub fn add(&self, opened: Opened, group: &Arc<Group>) {
        group.n_members.fetch_add(1, Ordering::Relaxed);
        self.tell(Command::Add(opened, Arc::clone(group)));
    }

    /// Resets the sockets of a group; they are gone when this returns.
    pub fn drop_group(&self, group: &Arc<Group>) {
        let (done, gone) = mpsc::channel();
        self.tell(Command::Drop(Arc::clone(group), done));
        let _ = gone.recv();
    }

    fn tell(&self, command: Command) {
        let commands = self.commands.as_ref().expect("there until the end");
        commands.send(command).expect("the thread lives until the end");
        let _ = self.waker.wake();
    }
}

impl Drop for Readers {
    fn drop(&mut self) {
        self.commands = None;
        let _ = self.waker.wake();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

struct Member {
    socket: mio::net::TcpStream,
    reading: Reading,
    group: Arc<Group>,
    next: u64,
}

struct Thread {
    poll: Poll,
    coming: mpsc::Receiver<Command>,
    look: Look,
    members: Slab<Member>,
    scratch: Vec<u8>,
}

impl Thread {
    fn run(mut self) {
        let mut events = Events::with_capacity(N_EVENTS);
        let (pause, timeout) = match self.look {
            Look::Every(pause) => (pause, Some(Duration::ZERO)),
            Look::AtOnce => (Duration::ZERO, None),
        };
        loop {
            // Waiting for a command is the pause between two looks.
            let mut command = match self.coming.recv_timeout(pause) {
                Ok(command) => Some(command),
                Err(mpsc::RecvTimeoutError::Timeout) => None,
                Err(mpsc::RecvTimeoutError::Disconnected) => return,
            };
            while let Some(next) = command {
                self.obey(next);
                command = self.coming.try_recv().ok();
            }
            loop {
                match self.poll.poll(&mut events, timeout) {
                    Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                    outcome => outcome.expect("a poller that works goes on working"),
                }
                events.iter().for_each(|event| self.look_at(event));
                if self.look == Look::AtOnce || events.iter().count() < N_EVENTS {
                    break;
                }
            }
        }
    }

    fn obey(&mut self, command: Command) {
        match command {
            Command::Add(opened, group) => self.add(opened, group),
            Command::Drop(group, done) => {
                self.members.retain(|_, member| !Arc::ptr_eq(&member.group, &group));
                let _ = done.send(());
            }
        }
    }

    fn add(&mut self, opened: Opened, group: Arc<Group>) {
        let socket = mio::net::TcpStream::from_std(opened.socket);
        let key = self.members.insert(Member { socket, reading: opened.reading, group, next: 0 });
        let member = &mut self.members[key];
        let registered = self.poll.registry().register(&mut member.socket, Token(key), Interest::READABLE);
        let begun = registered.map_err(|error| error.to_string()).and_then(|()| member.digest(&opened.early));
        self.settle(key, begun);
    }

    fn look_at(&mut self, event: &Event) {
        let Token(key) = event.token();
        let Some(member) = self.members.get_mut(key) else { return };
        let outcome = member.read(&mut self.scratch, event.is_read_closed());
        self.settle(key, outcome);
    }

    fn settle(&mut self, key: usize, outcome: Result<(), String>) {
        if let Err(end) = outcome {
            let member = self.members.remove(key);
            member.group.ended.lock().expect("nothing panics while it is held").push(end);
        }
    }
}

impl Member {
    /// Readiness is told once for all that came until then: a read that did not fill the buffer took
    /// it all, and what comes later is told anew.
    fn read(&mut self, scratch: &mut [u8], is_closed: bool) -> Result<(), String> {
        loop {
            match self.socket.read(scratch) {
                Ok(0) => return Err("end of stream".to_owned()),
                Ok(n) => {
                    self.digest(&scratch[..n])?;
                    if n < scratch.len() && !is_closed {
                        return Ok(());
                    }
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(()),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error.to_string()),
            }
        }
    }

    fn digest(&mut self, bytes: &[u8]) -> Result<(), String> {
        let (group, next, socket) = (&self.group, &mut self.next, &mut self.socket);
        match &mut self.reading {
            Reading::Scan(rest) => {
                scan(rest, bytes, &mut |seq| group.note(seq, next));
                Ok(())
            }
            Reading::Ours(decoder) => decoder.feed(bytes, &mut |seen| match seen {
                Seen::Text(text) => {
                    if let Some(seq) = number_after(text, MARKER) {
                        group.note(seq, next);
                    }
                    Ok(())
                }
                Seen::Ping(payload) => {
                    let mut pong = vec![0x8a, 0x80 | payload.len() as u8, 0, 0, 0, 0];
                    pong.extend_from_slice(payload);
                    // A few bytes now and then always fit into the socket's buffer.
                    socket.write(&pong).map(drop).map_err(|error| error.to_string())
                }
                Seen::Close(code) => Err(format!("closed with {code}")),
            }),
        }
    }
}

/// Finds every marked number, also one that two reads cut.
fn scan(rest: &mut Vec<u8>, bytes: &[u8], see: &mut impl FnMut(u64)) {
    const WHOLE: usize = MARKER.len() + SEQ_DIGITS + 1;
    let joined;
    let all: &[u8] = if rest.is_empty() {
        bytes
    } else {
        rest.extend_from_slice(bytes);
        joined = std::mem::take(rest);
        &joined
    };
    let mut at = 0;
    while let Some(found) = all[at..].windows(MARKER.len()).position(|window| window == MARKER) {
        at += found;
        if all.len() < at + WHOLE {
            break;
        }
        if let Some(seq) = number_after(&all[at..at + WHOLE], MARKER) {
            see(seq);
        }
        at += WHOLE;
    }
    // What a marker may still begin in; nothing of one that was seen.
    let keep = at.max(all.len().saturating_sub(WHOLE - 1));
    let tail = &all[keep.min(all.len())..];
    if tail.contains(&MARKER[0]) {
        *rest = tail.to_vec();
    }
}

/// The data of an event: JSON text of `n_bytes` (no less than it needs) that holds its number.
pub fn data(seq: u64, n_bytes: usize) -> String {
    let bare = format!(r#"{{"seq":"{seq:010}","pad":""}}"#);
    let pad = "x".repeat(n_bytes.saturating_sub(bare.len()));
    format!(r#"{{"seq":"{seq:010}","pad":"{pad}"}}"#)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_number_is_found_however_the_stream_is_cut() {
        let stream: String = (0..5).map(|seq| format!("MSG x 1 64\r\n{}\r\n\"se", data(seq, 64))).collect();
        for size in 1..stream.len() {
            let (mut rest, mut seen) = (Vec::new(), Vec::new());
            for piece in stream.as_bytes().chunks(size) {
                scan(&mut rest, piece, &mut |seq| seen.push(seq));
            }
            assert_eq!(seen, [0, 1, 2, 3, 4], "pieces of {size}");
        }
    }

    #[test]
    fn data_is_json_of_the_size_that_was_asked_for() {
        for n_bytes in [29, 30, 128, 8_192] {
            let text = data(7, n_bytes);
            assert_eq!(text.len(), n_bytes);
            let value: serde_json::Value = serde_json::from_str(&text).unwrap();
            assert_eq!(value["seq"], "0000000007");
        }
    }

    #[test]
    fn a_hole_a_double_and_a_swap_are_all_noticed() {
        let noted = |order: &[u64]| {
            let (group, mut next) = (Group::new(), 0);
            order.iter().for_each(|seq| group.note(*seq, &mut next));
            (group.n_received(), group.n_wrong())
        };
        assert_eq!(noted(&[0, 1, 2]), (3, 0));
        assert_eq!(noted(&[0, 2]), (2, 1));
        assert_eq!(noted(&[0, 0, 1]), (3, 1));
        assert_eq!(noted(&[0, 2, 1, 3]), (4, 3));
    }

    #[tokio::test]
    async fn a_look_finds_what_came_and_the_end() {
        for look in [Look::DRAIN, Look::AtOnce] {
            let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
            let stream = tokio::net::TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
            let (server, _) = listener.accept().await.unwrap();
            let readers = Readers::start(look).unwrap();
            let group = Group::timed(2);
            group.sent(0, Instant::now());
            let early = data(0, 40).into_bytes();
            readers.add(Opened::from_stream(stream, Reading::Scan(Vec::new()), early).unwrap(), &group);
            server.try_write(data(1, 40).as_bytes()).unwrap();
            assert!(group.until_received(2, Duration::from_secs(10)).await && group.n_wrong() == 0);
            drop(server);
            let until = Instant::now() + Duration::from_secs(10);
            while group.ended().is_empty() && Instant::now() < until {
                tokio::task::yield_now().await;
            }
            assert_eq!((group.ended().len(), group.n_members()), (1, 1));
            readers.drop_group(&group);
        }
    }
}
