//! A light client of a simulated fleet: the driver's and the client's side of one session in a few
//! fields, without a pipe between them. It takes what the session has for it when it is woken,
//! answers pings, keeps its cursor, goes when it is told and comes back when it was told to. Some
//! are listeners: they hear a channel of numbered events, and a judge sees to it that none is
//! missing and none comes twice.

use std::sync::{Arc, Mutex};
use std::task::{Wake, Waker};
use std::time::Duration;

use hub::channel::Channel;
use hub::close::{CloseReason, Reconnect};
use hub::cursor::{EventId, Since};
use hub::event::Wire;
use hub::hub::Open;
use hub::outbox::{Batch, Item};
use hub::session::Attention;
use serde_json::Value;
use tokio::time::Instant;

use crate::world::judge::{Judge, Promise, Truth, Violation};

/// Opcodes of a WebSocket frame.
const TEXT: u8 = 0x1;
const PING: u8 = 0x9;

/// Clients that something was said to, by their numbers.
pub(super) type Bells = Arc<Mutex<Vec<usize>>>;

struct Bell {
    client: usize,
    bells: Bells,
}

impl Wake for Bell {
    fn wake(self: Arc<Self>) {
        self.bells.lock().expect("a few lines").push(self.client);
    }
}

/// One client over all its sessions.
pub(super) struct Client {
    seat: Option<Seat>,
    cursor: Option<EventId>,
    waker: Waker,
    pub last: Option<usize>,
    pub closed_at: Option<Instant>,
    pub shed_at: Option<Instant>,
    pub listener: Option<Box<Listener>>,
}

struct Seat {
    node: usize,
    open: Open,
}

/// What a client hears, and whether it is what was promised.
pub(super) struct Listener {
    pub channel: String,
    pub judge: Judge,
    /// Sessions that it was moved from.
    pub n_moves: usize,
}

/// How it stands with a client that has taken what there was for it.
pub(super) enum Taken {
    /// It stays.
    Stays,
    /// Its session is over, and it comes back after this time; `None`: never.
    Leaves { node: usize, reason: CloseReason, after: Option<Duration> },
    /// Its socket was cut.
    Cut { node: usize, reason: CloseReason },
}

impl Client {
    pub fn new(client: usize, bells: &Bells) -> Self {
        let waker = Waker::from(Arc::new(Bell { client, bells: bells.clone() }));
        Self { seat: None, cursor: None, waker, last: None, closed_at: None, shed_at: None, listener: None }
    }

    /// It hears this channel from its first session on.
    pub fn listen(&mut self, name: &str, channel: &str) {
        let judge = Judge::new(name);
        self.listener = Some(Box::new(Listener { channel: channel.to_owned(), judge, n_moves: 0 }));
    }

    pub fn channels(&self) -> Vec<Channel> {
        let channel = self.listener.as_ref().map(|listener| Channel::new(&listener.channel).expect("a good name"));
        channel.into_iter().collect()
    }

    pub fn since(&self) -> Since {
        self.cursor.map_or(Since::Now, Since::After)
    }

    /// Where it is connected.
    pub fn node(&self) -> Option<usize> {
        self.seat.as_ref().map(|seat| seat.node)
    }

    /// Its session on `node` is open.
    pub fn sit(&mut self, node: usize, open: Open) {
        self.seat = Some(Seat { node, open });
        self.last = Some(node);
        self.waker.wake_by_ref();
    }

    /// Its connection is lost; what it was not told is lost with it.
    pub fn cut(&mut self) -> Option<usize> {
        if let Some(listener) = &mut self.listener {
            listener.judge.begin();
        }
        self.seat.take().map(|seat| seat.node)
    }

    /// Takes all that its session has for it.
    ///
    /// # Errors
    /// A promise was broken.
    pub fn take(&mut self, truth: &Truth) -> Result<Taken, Violation> {
        let Some(seat) = self.seat.take() else { return Ok(Taken::Stays) };
        let mut batch = Batch::default();
        let attention = seat.open.attend(&self.waker, &mut batch);
        let ending = seat.open.session().ending();
        let node = seat.node;
        if attention == Attention::Cut {
            self.cut();
            return Ok(Taken::Cut { node, reason: ending.unwrap_or(CloseReason::Lost) });
        }
        let (mut n_bytes, mut n_events, mut newest, mut items) = (0, 0, None, Vec::new());
        batch.advance(Wire::Ws, usize::MAX / 2, |item| {
            n_bytes += item.on(Wire::Ws).len();
            if let Item::Event(event) = item {
                n_events += 1;
                newest = event.event.id.or(newest);
            }
            items.push(item.on(Wire::Ws).clone());
        });
        seat.open.progress(n_bytes, false);
        if n_events > 0 {
            seat.open.delivered(n_events, newest);
        }
        let mut after = None;
        for frame in &items {
            match opcode(frame) {
                PING => seat.open.session().heard(),
                TEXT => after = self.hear(truth, payload(frame))?.or(after),
                _ => {}
            }
        }
        if attention == Attention::Serve {
            self.seat = Some(seat);
            return Ok(Taken::Stays);
        }
        self.cut();
        let reason = ending.unwrap_or(CloseReason::Lost);
        let after = after.filter(|_| reason.reconnect() != Reconnect::Never);
        Ok(Taken::Leaves { node, reason, after })
    }

    /// One message; of a `bye` the time after which to come back.
    fn hear(&mut self, truth: &Truth, payload: &[u8]) -> Result<Option<Duration>, Violation> {
        let message: Value = serde_json::from_slice(payload).expect("the hub says JSON");
        let id: Option<EventId> = message["id"].as_str().and_then(|id| id.parse().ok());
        let kind = message["type"].as_str().unwrap_or_default();
        if let Some(listener) = &mut self.listener {
            listener.hear(truth, kind, id, &message)?;
        }
        self.cursor = id.or(self.cursor);
        Ok((kind == "bye").then(|| message["after_ms"].as_u64().map(Duration::from_millis)).flatten())
    }
}

impl Listener {
    fn hear(&mut self, truth: &Truth, kind: &str, id: Option<EventId>, message: &Value) -> Result<(), Violation> {
        let claim = |judge: &mut Judge, id: Option<EventId>| match id {
            Some(id) => judge.claim(truth, id, &|_| false),
            None => Ok(()),
        };
        match kind {
            "event" => {
                let (Some(id), Some(number)) = (id, message["data"].as_u64()) else {
                    return Err(self.odd(message));
                };
                self.judge.event(truth, &self.channel, id, number)
            }
            "gap" => {
                self.judge.gap(truth, &self.channel);
                Ok(())
            }
            "ready" => {
                self.judge.begin();
                claim(&mut self.judge, id)?;
                self.judge.follow(&self.channel, id.map_or(0, |id| truth.number_at(id)));
                Ok(())
            }
            "position" | "bye" => claim(&mut self.judge, id),
            "hello" | "token_expiring" => Ok(()),
            _ => Err(self.odd(message)),
        }
    }

    fn odd(&self, message: &Value) -> Violation {
        let what = format!("unexpected {message}");
        Violation { promise: Promise::Protocol, client: self.channel.clone(), what }
    }
}

fn opcode(frame: &[u8]) -> u8 {
    frame[0] & 0x0f
}

/// What an unmasked frame carries.
fn payload(frame: &[u8]) -> &[u8] {
    match frame[1] {
        126 => &frame[4..],
        127 => &frame[10..],
        _ => &frame[2..],
    }
}
