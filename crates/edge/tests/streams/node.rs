//! One node whose clients come through in-memory pipes: the public listener as it runs, the hub on
//! the in-memory log, tokio's clock paused by the test.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU16, Ordering};
use std::time::Duration;

use bytes::Bytes;
use hub::auth::{AuthConfig, KeySource, Secret, UserChannel, Verifier, mint};
use hub::backplane::Publish;
use hub::channel::Channel;
use hub::clock::{Clock, Dice};
use hub::close::PlannedCodes;
use hub::departure::{DrainConfig, Window};
use hub::fleet::FleetConfig;
use hub::hub::{Hub, HubConfig, Parts};
use hub::limit::{AcceptBucket, AddressBuckets, Capacity};
use hub::memory::{MemoryConfig, MemoryLog};
use hub::message::Backoff;
use hub::plugin::Plugins;
use hub::revocation::{Company, RevocationConfig, Revocations, WhenUnavailable};
use hub::session::SessionConfig;
use hub::telemetry::Metrics;
use serde_json::{Value, json};
use testkit::chance::seed;
use testkit::sse::SseClient;
use testkit::ws::WsClient;
use tidegate_edge::accept::{self, AcceptConfig, Incoming};
use tidegate_edge::address::TrustedProxies;
use tidegate_edge::admit::{Gate, GateConfig};
use tidegate_edge::credential::{CredentialConfig, QueryToken};
use tidegate_edge::origin::OriginPolicy;
use tidegate_edge::reject::RefuseModes;
use tokio::io::DuplexStream;
use tokio::runtime::Handle;
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

const SECRET: &[u8] = b"a secret that only tests know, 32+ bytes";

/// What a pipe holds where the test does not care.
pub const ROOMY: usize = 64 * 1024;

pub fn secs(n: u64) -> Duration {
    Duration::from_secs(n)
}

/// What of a node a test may want otherwise.
pub struct Settings {
    pub hub: HubConfig,
    pub accept: AcceptConfig,
    pub plugins: Plugins,
    /// Attempts at once, and a second, from one address that is not this host's; 0: as many as they like.
    pub per_address: (u32, f64),
    pub origin: OriginPolicy,
}

impl Settings {
    /// The defaults of the configuration, but for a close timeout and a grace that are easy to tell apart.
    pub fn new() -> Self {
        let session = SessionConfig {
            outbox_bytes: 1 << 20,
            write_timeout: secs(10),
            close_timeout: secs(3),
            heartbeat: secs(25),
            heartbeat_timeout: secs(10),
            position_every: secs(300),
            client_rate: 10.0,
            client_burst: 50.0,
            planned: PlannedCodes::default(),
            reconnect: Backoff::default(),
        };
        let hub = HubConfig {
            node: "n1".into(),
            capacity: 5_000,
            max_channels: 10,
            max_message: 64 * 1024,
            replay_max: 1_000,
            auth_timeout: secs(1),
            max_age: None,
            revocation_sweep: Duration::from_secs(30),
            fleet: FleetConfig::unlimited("0.0.0"),
            drain: DrainConfig { grace: secs(5), window: Window::Auto, deadline: secs(120), takes_per_second: 50.0 },
            session,
        };
        let accept = AcceptConfig { handshakes: 1_024, head_timeout: secs(5), close_timeout: secs(3) };
        Self { hub, accept, plugins: Plugins::new(), per_address: (0, 0.0), origin: OriginPolicy::SameOrigin }
    }
}

struct Pipes(mpsc::UnboundedReceiver<(DuplexStream, SocketAddr)>);

impl Incoming for Pipes {
    type Socket = DuplexStream;
    type Admitted = DuplexStream;

    async fn accept(&mut self) -> io::Result<(DuplexStream, SocketAddr)> {
        match self.0.recv().await {
            Some(client) => Ok(client),
            None => std::future::pending().await,
        }
    }

    fn moved(socket: DuplexStream, _to: &Handle) -> io::Result<DuplexStream> {
        Ok(socket)
    }
}

/// A node that serves until it is dropped.
pub struct Node {
    pub hub: Arc<Hub>,
    pub gate: Arc<Gate>,
    clock: Clock,
    metrics: Arc<Metrics>,
    dial: mpsc::UnboundedSender<(DuplexStream, SocketAddr)>,
    n_dialled: AtomicU16,
    stop: CancellationToken,
}

impl Node {
    pub fn start(settings: Settings) -> Self {
        let (clock, dice) = (Clock::at(secs(1_800_000_000)), Dice::seeded(seed()));
        let history = MemoryConfig { history_size: 1_000, history_ttl: secs(86_400), idempotency_ttl: secs(300) };
        let memory = MemoryLog::new(history, clock.clone(), dice.clone()).node("n1");
        let verifier = Verifier::new(AuthConfig {
            keys: KeySource::Secret(Secret::new(SECRET.to_vec())),
            algorithms: None,
            issuer: None,
            audience: None,
            leeway: Duration::ZERO,
            user_channel: UserChannel::On,
            max_channels: 10,
            anonymous: None,
        });
        let verifier = Arc::new(verifier.unwrap());
        let revocation = RevocationConfig {
            when_unavailable: WhenUnavailable::Refuse,
            deadline: secs(1),
            remember: secs(60),
            company: Company::Awaited,
        };
        let metrics = Metrics::new("0.0.0");
        let revocations = Arc::new(Revocations::new(memory.clone(), revocation, metrics.clone()));
        let capacity = settings.hub.capacity;
        let auth_timeout = settings.hub.auth_timeout;
        let hub = Hub::new(Parts {
            config: settings.hub,
            backplane: memory,
            verifier: verifier.clone(),
            revocations: revocations.clone(),
            plugins: settings.plugins.clone(),
            metrics: metrics.clone(),
            clock: clock.clone(),
            dice: dice.clone(),
        });
        hub.start();
        hub.serve();
        let gate = Gate {
            config: GateConfig {
                credential: CredentialConfig { cookie: None, query: QueryToken::On },
                origin: settings.origin,
                proxies: TrustedProxies::default(),
                refuse: RefuseModes::default(),
                auth_timeout,
                client_js: "",
                planned: PlannedCodes::default(),
            },
            hub: hub.clone(),
            verifier,
            revocations,
            plugins: settings.plugins,
            metrics: metrics.clone(),
            clock: clock.clone(),
            capacity: Capacity::new(capacity),
            bucket: AcceptBucket::new(100_000, 100_000.0, dice.clone()),
            adaptive: None,
            addresses: AddressBuckets::new(settings.per_address.0, settings.per_address.1, dice.clone()),
            dice,
        };
        let (dial, dialled) = mpsc::unbounded_channel();
        let stop = CancellationToken::new();
        let gate = Arc::new(gate);
        let (inside, tasks) = (Handle::current(), TaskTracker::new());
        let serving = accept::serve(Pipes(dialled), gate.clone(), settings.accept, inside, tasks, stop.clone());
        tokio::spawn(serving);
        Self { hub, gate, clock, metrics, dial, n_dialled: AtomicU16::new(0), stop }
    }

    /// A connection that holds `bytes` each way before its reader must read.
    pub fn dial(&self, bytes: usize) -> DuplexStream {
        self.dial_from([127, 0, 0, 1], bytes)
    }

    /// The same, from this address.
    pub fn dial_from(&self, address: [u8; 4], bytes: usize) -> DuplexStream {
        let (theirs, ours) = tokio::io::duplex(bytes);
        let port = 1_024 + self.n_dialled.fetch_add(1, Ordering::Relaxed);
        self.dial.send((ours, (address, port).into())).expect("the node accepts");
        theirs
    }

    /// A token that has a day to live unless the claims say otherwise.
    pub fn token(&self, claims: &Value) -> String {
        let mut claims = claims.clone();
        claims.as_object_mut().unwrap().entry("exp").or_insert(json!(self.unix() + 86_400));
        mint(SECRET, &claims).unwrap()
    }

    /// The node's wall clock, seconds.
    pub fn unix(&self) -> u64 {
        self.clock.unix().as_secs()
    }

    pub fn bearer(&self, claims: &Value) -> String {
        format!("Bearer {}", self.token(claims))
    }

    /// A WebSocket over a pipe of so many bytes, up to `ready`.
    pub async fn ws_over(&self, bytes: usize, claims: &Value) -> WsClient<DuplexStream> {
        let opening =
            WsClient::over(self.dial(bytes), "n1", "/v1/ws", &[("Authorization", &*self.bearer(claims))]).await;
        let mut client = opening.unwrap_or_else(|refused| panic!("{}", refused.text()));
        // Longer than anything is silent here, and only so that nothing hangs.
        client.set_patience(secs(7 * 86_400));
        client.until("ready").await;
        client
    }

    pub async fn ws(&self, sub: &str) -> WsClient<DuplexStream> {
        self.ws_over(ROOMY, &user(sub)).await
    }

    /// An event stream, up to `ready`.
    pub async fn sse(&self, claims: &Value) -> SseClient<DuplexStream> {
        let auth = self.bearer(claims);
        let opening = SseClient::over(self.dial(ROOMY), "n1", "/v1/sse", &[("Authorization", &*auth)]).await;
        let mut client = opening.unwrap_or_else(|refused| panic!("{}", refused.text()));
        client.set_patience(secs(7 * 86_400));
        client.until("ready").await;
        client
    }

    /// Publishes `data` on the channel that all of `user`'s tokens hear.
    pub async fn publish(&self, data: &Value) {
        let event = Publish {
            channel: Channel::new("news").unwrap(),
            name: None,
            data: Bytes::from(data.to_string()),
            ephemeral: false,
            key: None,
        };
        self.hub.handle().publish(event).await.unwrap();
    }

    pub fn n_sessions(&self) -> usize {
        self.hub.load().n_sessions
    }

    /// Waits until so many sessions are open.
    pub async fn until_open(&self, n: usize) {
        for _ in 0..1_000 {
            if self.n_sessions() == n {
                return;
            }
            tokio::task::yield_now().await;
        }
        panic!("{} sessions are open and not {n}", self.n_sessions());
    }

    /// One sample of the metrics.
    pub fn metric(&self, name: &str) -> f64 {
        let text = self.metrics.encode();
        let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
        line.unwrap_or_else(|| panic!("{name} is there")).parse().unwrap()
    }

    pub fn n_closed(&self, reason: &str) -> f64 {
        self.metric(&format!("gateway_sessions_closed_total{{reason=\"{reason}\"}}"))
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        self.stop.cancel();
    }
}

pub fn user(sub: &str) -> Value {
    json!({"sub": sub, "channels": ["news"]})
}
