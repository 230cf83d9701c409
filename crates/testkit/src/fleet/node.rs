//! One node of a simulated fleet: the real hub, and what stands before it in a gateway as far as it
//! matters to a fleet, that is places and the accept bucket.

use std::net::{IpAddr, Ipv4Addr};
use std::sync::Arc;
use std::time::Duration;

use hub::auth::{Identity, Verifier};
use hub::backplane::Backplane;
use hub::channel::Channel;
use hub::clock::{Clock, Dice};
use hub::close::PlannedCodes;
use hub::cursor::Since;
use hub::event::Wire;
use hub::fleet::FleetConfig as Reporting;
use hub::hub::{Hub, HubConfig, Newcomer, Open, Parts};
use hub::limit::{AcceptBucket, Capacity, Coming, Seat};
use hub::memory::Memory;
use hub::message::Backoff;
use hub::plugin::{Admission, Plugins};
use hub::refusal::{Refusal, RefusalCode};
use hub::revocation::Revocations;
use hub::session::SessionConfig;
use hub::shed::ShedConfig;
use hub::telemetry::Metrics;
use tokio::time::Instant;

use super::FleetConfig;
use crate::faults::{Call, Failure, Faulty};
use crate::world::{auth_config, revocation_config};

/// Every call that reaches for the backplane.
const CALLS: [Call; 10] = [
    Call::Publish,
    Call::Read,
    Call::Revocations,
    Call::Revoke,
    Call::Report,
    Call::Retire,
    Call::Hold,
    Call::Tell,
    Call::Claim,
    Call::Release,
];

/// What makes one node different from another.
#[derive(Clone, Copy, Debug)]
pub struct Kind {
    /// The version that runs on it.
    pub version: &'static str,
    /// Its places, and its weight.
    pub capacity: usize,
}

/// A node.
pub struct Node {
    /// Its hub.
    pub hub: Arc<Hub>,
    /// Its backplane, to be broken.
    pub faults: Arc<Faulty<Memory>>,
    /// Its figures.
    pub metrics: Arc<Metrics>,
    /// Its places.
    pub capacity: usize,
    /// Its process is there.
    pub is_up: bool,
    pub(super) began_at: Instant,
    /// When it said that it leaves.
    pub(super) left_at: Option<Instant>,
    /// When it was last seen with fewer sessions than it should hold.
    pub(super) below_at: Option<Instant>,
    seats: Capacity,
    bucket: AcceptBucket,
    dice: Dice,
}

/// A client at the door.
pub(super) struct Caller<'a> {
    pub identity: &'a Arc<Identity>,
    pub channels: Vec<Channel>,
    pub since: Since,
}

impl Node {
    pub(super) fn start(
        config: &FleetConfig,
        kind: Kind,
        name: Arc<str>,
        memory: Arc<Memory>,
        clock: &Clock,
        dice: &Dice,
    ) -> Self {
        let faults = Faulty::new(memory);
        let backplane: Arc<dyn Backplane> = faults.clone();
        let metrics = Metrics::new(kind.version);
        let verifier = Verifier::new(auth_config()).expect("the secret is long enough");
        let revocations = Arc::new(Revocations::new(backplane.clone(), revocation_config(), metrics.clone()));
        let hub = Hub::new(Parts {
            config: hub_config(config, kind, name),
            backplane,
            verifier: Arc::new(verifier),
            revocations,
            plugins: Plugins::new(),
            metrics: metrics.clone(),
            clock: clock.clone(),
            dice: dice.clone(),
        });
        metrics.accept(config.accept_per_second, f64::from(config.accept_burst));
        hub.start();
        hub.serve();
        hub.balance(ShedConfig { mode: config.shed, balance: config.balance });
        Self {
            hub,
            faults,
            metrics,
            capacity: kind.capacity,
            is_up: true,
            began_at: Instant::now(),
            left_at: None,
            below_at: None,
            seats: Capacity::new(kind.capacity),
            bucket: AcceptBucket::new(config.accept_burst, config.accept_per_second, dice.clone()),
            dice: dice.clone(),
        }
    }

    /// Sessions open now.
    pub fn n_sessions(&self) -> usize {
        self.hub.load().n_sessions
    }

    /// Does it count as one that shares the sessions?
    pub fn is_serving(&self) -> bool {
        self.is_up && self.left_at.is_none()
    }

    /// Why it moves nobody, by its own word.
    pub fn suspended(&self) -> Vec<&'static str> {
        self.hub.fleet().shed.suspended
    }

    /// Nothing reaches its backplane, and it is told nothing.
    pub fn cut_off(&self) {
        CALLS.iter().for_each(|call| self.faults.fail(*call, Failure::Request));
        self.faults.inner().cut_link();
    }

    /// Ends `cut_off`.
    pub fn mend(&self) {
        CALLS.iter().for_each(|call| self.faults.mend(*call));
        self.faults.inner().restore_link();
    }

    /// Lets the client in, or tells it when to try again: as the public listener does, but for its
    /// credential.
    pub(super) fn admit(&self, caller: Caller, now: Instant) -> Result<Open, Duration> {
        if self.hub.is_door_closed() {
            self.metrics.refused(RefusalCode::Draining);
            return Err(self.dice.between(Duration::from_secs(1), Duration::from_secs(3)));
        }
        let coming = if self.hub.may_be_returning(&caller.since) { Coming::Back } else { Coming::New };
        let Some(seat) = self.seats.try_acquire() else {
            self.metrics.refused(RefusalCode::AtCapacity);
            return Err(self.bucket.promise(now));
        };
        self.bucket.take(coming, now).inspect_err(|_| self.metrics.refused(RefusalCode::Overloaded))?;
        self.open(caller, seat)
    }

    /// Lets the client in whoever else comes.
    pub(super) fn admit_at_once(&self, caller: Caller) -> Option<Open> {
        let seat = self.seats.try_acquire()?;
        self.open(caller, seat).ok()
    }

    fn open(&self, caller: Caller, seat: Seat) -> Result<Open, Duration> {
        let refused = |refusal: Refusal| {
            self.metrics.refused(refusal.code);
            refusal.retry_after.expect("the hub refuses for now only")
        };
        let newcomer = Newcomer {
            identity: caller.identity.clone(),
            wire: Wire::Ws,
            address: IpAddr::V4(Ipv4Addr::LOCALHOST),
            channels: caller.channels,
            since: caller.since,
            admission: Admission::Standard,
            seat,
        };
        self.hub.open(newcomer).map_err(refused)
    }

    /// What the gateway says of its bucket once a second.
    pub(super) fn gauge(&self, now: Instant) {
        self.metrics.accept(self.bucket.rate(), self.bucket.tokens(now));
    }
}

fn hub_config(config: &FleetConfig, kind: Kind, node: Arc<str>) -> HubConfig {
    HubConfig {
        node,
        capacity: kind.capacity,
        max_channels: 100,
        max_message: 64 * 1024,
        replay_max: 1_000,
        auth_timeout: Duration::from_secs(1),
        max_age: config.max_age,
        // Nobody is revoked here.
        revocation_sweep: Duration::from_secs(24 * 3600),
        fleet: Reporting { report_every: config.balance.report_every, ..Reporting::unlimited(kind.version) },
        drain: config.drain,
        session: SessionConfig {
            outbox_bytes: 1024 * 1024,
            write_timeout: Duration::from_secs(10),
            close_timeout: Duration::from_secs(3),
            heartbeat: config.heartbeat,
            heartbeat_timeout: Duration::from_secs(10),
            position_every: Duration::from_secs(300),
            client_rate: 10.0,
            client_burst: 50.0,
            planned: PlannedCodes::default(),
            reconnect: Backoff::default(),
        },
    }
}
