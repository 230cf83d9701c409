//! Nodes for the tests of what nodes decide together: real hubs on one log in memory, and sessions
//! without a driver. Whole clients on pipes are the testkit's.

use std::net::{IpAddr, Ipv4Addr};
use std::num::NonZeroU32;
use std::sync::{Arc, Mutex};
use std::task::Waker;
use std::time::Duration;

use serde_json::Value;
use tokio::time::{Instant, sleep};

use crate::auth::{AuthConfig, Identity, KeySource, Secret, UserChannel, Verifier};
use crate::backplane::Publish;
use crate::channel::{Channel, Grants};
use crate::clock::{Clock, Dice};
use crate::close::{CloseReason, PlannedCodes};
use crate::cursor::{EventId, Since};
use crate::departure::{DrainConfig, Window};
use crate::event::Wire;
use crate::fleet::FleetConfig;
use crate::hub::{Hub, HubConfig, Newcomer, Open, Parts};
use crate::limit::Capacity;
use crate::memory::{Memory, MemoryConfig, MemoryLog};
use crate::message::Backoff;
use crate::outbox::{Batch, Item, Outlet};
use crate::plugin::{Admission, Plugins};
use crate::revocation::{Company, RevocationConfig, Revocations, WhenUnavailable};
use crate::session::{Attention, SessionConfig};
use crate::telemetry::Metrics;

use self::mute::Mute;

pub(crate) mod lines;
pub(crate) mod mute;

const SECS: fn(u64) -> Duration = Duration::from_secs;

/// When every test begins.
pub(crate) const BEGINNING: Duration = Duration::from_secs(1_893_456_000);

/// A log and what its nodes share.
pub(crate) struct Testing {
    pub log: Arc<MemoryLog>,
    clock: Clock,
    dice: Dice,
    limit: Option<NonZeroU32>,
}

pub(crate) struct Node {
    pub hub: Arc<Hub>,
    pub memory: Arc<Memory>,
    /// In front of it.
    pub mute: Arc<Mute>,
    pub metrics: Arc<Metrics>,
}

impl Testing {
    pub fn new(limit: u32) -> Self {
        let (clock, dice) = (Clock::at(BEGINNING), Dice::seeded(11));
        let history = MemoryConfig { history_size: 10, history_ttl: SECS(3600), idempotency_ttl: SECS(300) };
        let log = MemoryLog::new(history, clock.clone(), dice.clone());
        Self { log, clock, dice, limit: NonZeroU32::new(limit) }
    }

    /// A node that serves, its link up.
    pub async fn node(&self, name: &str) -> Node {
        let node = self.node_with(name, 100);
        node.hub.serve();
        node.hub.place.live().await;
        node
    }

    pub fn node_with(&self, name: &str, capacity: usize) -> Node {
        self.node_of(config(name, capacity), Plugins::new())
    }

    /// As `node`, with other settings than usual; takes in a hundred a second.
    pub async fn node_like(&self, name: &str, change: impl FnOnce(&mut HubConfig)) -> Node {
        let mut config = config(name, 1_000);
        change(&mut config);
        let node = self.node_of(config, Plugins::new());
        node.metrics.accept(100.0, 200.0);
        node.hub.serve();
        node.hub.place.live().await;
        node
    }

    /// As `node`, extended.
    pub async fn node_extended(&self, name: &str, plugins: Plugins) -> Node {
        let node = self.node_of(config(name, 100), plugins);
        node.hub.serve();
        node.hub.place.live().await;
        node
    }

    fn node_of(&self, config: HubConfig, plugins: Plugins) -> Node {
        let node = self.still(config, plugins);
        node.hub.start();
        node
    }

    /// One none of whose tasks runs; whoever tests one of them runs that.
    pub fn still(&self, config: HubConfig, plugins: Plugins) -> Node {
        let memory = self.log.node(&config.node);
        let mute = Arc::new(Mute::new(memory.clone()));
        let metrics = Metrics::new("1.2.3");
        let verifier = Verifier::new(AuthConfig {
            keys: KeySource::Secret(Secret::new(vec![b'k'; 32])),
            algorithms: None,
            issuer: None,
            audience: None,
            leeway: Duration::ZERO,
            user_channel: UserChannel::On,
            max_channels: 10,
            anonymous: None,
        });
        let revocation = RevocationConfig {
            when_unavailable: WhenUnavailable::Refuse,
            deadline: SECS(1),
            remember: SECS(60),
            company: Company::Awaited,
        };
        let fleet = FleetConfig { max_sessions_per_user: self.limit, ..config.fleet };
        let parts = Parts {
            config: HubConfig { fleet, ..config },
            backplane: mute.clone(),
            verifier: Arc::new(verifier.expect("a good key")),
            revocations: Arc::new(Revocations::new(mute.clone(), revocation, metrics.clone())),
            plugins,
            metrics: metrics.clone(),
            clock: self.clock.clone(),
            dice: self.dice.clone(),
        };
        Node { hub: Hub::new(parts), memory, mute, metrics }
    }
}

pub(crate) fn config(name: &str, capacity: usize) -> HubConfig {
    HubConfig {
        node: name.into(),
        capacity,
        max_channels: 10,
        max_message: 1024,
        replay_max: 100,
        auth_timeout: SECS(1),
        max_age: None,
        revocation_sweep: SECS(30),
        fleet: FleetConfig::unlimited("1.2.3"),
        drain: DrainConfig { grace: SECS(5), window: Window::Auto, deadline: SECS(120), takes_per_second: 50.0 },
        session: SessionConfig {
            outbox_bytes: 1 << 20,
            write_timeout: SECS(10),
            close_timeout: SECS(3),
            heartbeat: SECS(24 * 3600),
            heartbeat_timeout: SECS(10),
            position_every: SECS(300),
            client_rate: 10.0,
            client_burst: 50.0,
            planned: PlannedCodes::default(),
            reconnect: Backoff::default(),
        },
    }
}

pub(crate) fn identity(user: Option<&str>) -> Identity {
    Identity {
        user: user.map(Into::into),
        jti: None,
        sid: None,
        issued_at: 0,
        expires_at: None,
        grants: Grants::default(),
    }
}

impl Node {
    /// A session of this user; it stays as long as what is returned.
    pub fn open(&self, user: &str) -> Open {
        self.open_as(identity(Some(user)), &[])
    }

    pub fn open_as(&self, identity: Identity, channels: &[&str]) -> Open {
        self.open_on(Wire::Sse, identity, channels)
    }

    pub fn open_on(&self, wire: Wire, identity: Identity, channels: &[&str]) -> Open {
        self.open_with(wire, identity, channels, Since::Now)
    }

    /// An event stream that resumes.
    pub fn open_since(&self, identity: Identity, channels: &[&str], since: Since) -> Open {
        self.open_with(Wire::Sse, identity, channels, since)
    }

    fn open_with(&self, wire: Wire, identity: Identity, channels: &[&str], since: Since) -> Open {
        let newcomer = Newcomer {
            identity: Arc::new(identity),
            wire,
            address: IpAddr::V4(Ipv4Addr::LOCALHOST),
            channels: channels.iter().map(|name| Channel::new(name).unwrap()).collect(),
            since,
            admission: Admission::Standard,
            seat: Capacity::new(1).try_acquire().unwrap(),
        };
        self.hub.open(newcomer).unwrap()
    }

    /// Publishes JSON text on a channel.
    pub async fn publish(&self, channel: &str, data: &str) -> EventId {
        let event = Publish {
            channel: Channel::new(channel).unwrap(),
            name: None,
            data: data.to_owned().into(),
            ephemeral: false,
            key: None,
        };
        self.hub.publish(event).await.unwrap().id.unwrap()
    }
}

/// A kernel that takes so many bytes more.
#[derive(Default)]
pub(crate) struct Kernel {
    room: Mutex<usize>,
    taken: Mutex<Vec<u8>>,
}

impl Kernel {
    pub fn make_room(&self, n: usize) {
        *self.room.lock().unwrap() = n;
    }

    pub fn taken(&self) -> Vec<u8> {
        std::mem::take(&mut *self.taken.lock().unwrap())
    }
}

impl Outlet for Kernel {
    fn write_now(&self, bytes: &[u8]) -> usize {
        let mut room = self.room.lock().unwrap();
        let n = bytes.len().min(*room);
        *room -= n;
        self.taken.lock().unwrap().extend_from_slice(&bytes[..n]);
        n
    }
}

/// What a driver would write now, item by item; it is booked as written.
pub(crate) fn items(open: &Open) -> Vec<Item> {
    let wire = open.session().info.wire;
    let (mut batch, mut items, mut n_bytes) = (Batch::default(), Vec::new(), 0);
    if open.attend(Waker::noop(), &mut batch) != Attention::Cut {
        batch.advance(wire, usize::MAX, |item| {
            n_bytes += item.on(wire).len();
            items.push(item.clone());
        });
        open.progress(n_bytes, false);
    }
    items
}

/// The messages among them. Only what is said over server-sent events is understood.
pub(crate) fn said(open: &Open) -> Vec<Value> {
    let texts: Vec<u8> = items(open).iter().flat_map(|item| item.on(Wire::Sse).to_vec()).collect();
    let lines = String::from_utf8(texts).unwrap();
    lines
        .lines()
        .filter_map(|line| line.strip_prefix("data: "))
        .map(|json| serde_json::from_str(json).unwrap())
        .collect()
}

/// Gives everybody time to do what they are about to; simulated.
pub(crate) async fn settle() {
    sleep(Duration::from_millis(300)).await;
}

/// Waits, in simulated time, until `is` holds.
pub(crate) async fn until(what: &str, is: impl Fn() -> bool) {
    let give_up = Instant::now() + SECS(120);
    while !is() {
        assert!(Instant::now() < give_up, "never: {what}");
        sleep(Duration::from_millis(50)).await;
    }
}

/// Waits, in simulated time, for all of these to be told to leave, and lets each go as its driver
/// would: when that was, and why.
pub(crate) async fn ends(sessions: Vec<Open>) -> Vec<(Instant, CloseReason)> {
    let mut ends = vec![None; sessions.len()];
    let mut sessions: Vec<Option<Open>> = sessions.into_iter().map(Some).collect();
    while ends.iter().any(Option::is_none) {
        for (end, open) in ends.iter_mut().zip(&mut sessions) {
            if let Some(reason) = open.as_ref().and_then(|open| open.session().ending()) {
                *end = Some((Instant::now(), reason));
                *open = None;
            }
        }
        sleep(Duration::from_millis(20)).await;
    }
    ends.into_iter().flatten().collect()
}

/// How each of these ended, or is ending.
pub(crate) fn endings<'a>(sessions: impl IntoIterator<Item = &'a Open>) -> Vec<Option<CloseReason>> {
    sessions.into_iter().map(|open| open.session().ending()).collect()
}
