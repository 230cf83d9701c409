//! A whole fleet in one thread: nodes as they run, from the accept loop to the outbox, on one
//! in-memory log, and clients at the other ends of in-memory pipes. Under tokio's paused clock an
//! hour takes a moment, and everything that happens follows from one seed.
//!
//! `line` a link on a leash · `wire` bytes of a pipe · `client` one client by the protocol's rules ·
//! `judge` what was promised. The caller brings a current-thread runtime with a paused clock; the
//! world spawns its tasks there and ends them when it is dropped.

pub mod client;
pub mod judge;
pub mod line;
pub mod wire;

use std::io;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use edge::accept::{self, AcceptConfig, Incoming};
use edge::address::TrustedProxies;
use edge::admit::{Gate, GateConfig};
use edge::credential::CredentialConfig;
use edge::origin::OriginPolicy;
use edge::reject::RefuseModes;
use hub::auth::{AuthConfig, KeySource, Secret, UserChannel, Verifier, mint};
use hub::backplane::{Backplane, Publish, Published, ReadAsk};
use hub::channel::Channel;
use hub::clock::{Clock, Dice};
use hub::close::{CloseReason, PlannedCodes};
use hub::cursor::EventId;
use hub::departure::{Departure, DrainConfig, Who, Window};
use hub::event::Wire;
use hub::fleet::FleetConfig;
use hub::hub::{Hub, HubConfig, Parts};
use hub::limit::{AcceptBucket, AddressBuckets, Capacity};
use hub::memory::{Memory, MemoryConfig, MemoryLog, Restart};
use hub::message::Backoff;
use hub::plugin::Plugins;
use hub::revocation::{Company, RevocationConfig, Revocations, WhenUnavailable};
use hub::session::SessionConfig;
use hub::telemetry::Metrics;
use serde_json::json;
use tokio::io::DuplexStream;
use tokio::runtime::Handle;
use tokio::sync::mpsc;
use tokio::time::sleep;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::faults::Faulty;

use self::client::Client;
use self::judge::{Promise, Truth, Violation};
use self::line::Line;

const SECRET: &[u8] = b"a secret of the simulated world, 32 bytes and more";

/// 2030-01-01 00:00 UTC: when every world begins.
const BEGINNING: Duration = Duration::from_secs(1_893_456_000);

/// How long everybody may need, in simulated time, once all faults are mended.
const PATIENCE: Duration = Duration::from_secs(60);

/// Longer than any pause of a node that is about to do something: it asks an unreachable log again
/// after half a second at most.
const QUIET: Duration = Duration::from_secs(1);

/// What a world is made of.
#[derive(Clone, Debug)]
pub struct WorldConfig {
    /// Everything follows from it.
    pub seed: u64,
    /// Nodes at the beginning.
    pub n_nodes: usize,
    /// What the log remembers.
    pub history: MemoryConfig,
    /// Events of one replay.
    pub replay_max: usize,
    /// Attempts a second that a node authenticates; the burst is twice that.
    pub accept_rate: f64,
    /// Places of a node.
    pub capacity: usize,
    /// What a pipe holds each way, in bytes: the socket buffers of this world.
    pub pipe_bytes: usize,
    /// What every session obeys.
    pub session: SessionConfig,
}

impl WorldConfig {
    /// A fleet of two with everything roomy; tests narrow what they are about.
    pub fn new(seed: u64) -> Self {
        let ttl = Duration::from_secs(600);
        Self {
            seed,
            n_nodes: 2,
            history: MemoryConfig { history_size: 1_000, history_ttl: ttl, idempotency_ttl: Duration::from_secs(300) },
            replay_max: 1_000,
            accept_rate: 1_000_000.0,
            capacity: 1_000_000,
            pipe_bytes: 64 * 1024,
            session: SessionConfig {
                outbox_bytes: 1024 * 1024,
                write_timeout: Duration::from_secs(10),
                close_timeout: Duration::from_secs(3),
                heartbeat: Duration::from_secs(24 * 3600),
                heartbeat_timeout: Duration::from_secs(10),
                position_every: ttl / 4,
                client_rate: 1_000.0,
                client_burst: 10_000.0,
                planned: PlannedCodes::default(),
                reconnect: Backoff::default(),
            },
        }
    }
}

/// One node with its faults.
pub struct Node {
    /// The node.
    pub hub: Arc<Hub>,
    /// Delays, fails and holds its calls.
    pub faults: Arc<Faulty<Line<Memory>>>,
    /// Its figures.
    pub metrics: Arc<Metrics>,
    door: mpsc::UnboundedSender<(DuplexStream, SocketAddr)>,
    stop: CancellationToken,
}

impl Node {
    /// Holds its link back.
    pub fn line(&self) -> &Line<Memory> {
        self.faults.inner()
    }

    /// Cuts and mends its link, or cuts it off from the log.
    pub fn memory(&self) -> &Memory {
        self.faults.inner().inner()
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        self.stop.cancel();
    }
}

/// The listener of a node without sockets.
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

/// Nodes, clients, the log between them, and what is true.
pub struct World {
    /// As it was made.
    pub config: WorldConfig,
    /// The shared log.
    pub log: Arc<MemoryLog>,
    /// The nodes.
    pub nodes: Vec<Node>,
    /// The clients.
    pub clients: Vec<Client>,
    /// Everything that was published.
    pub truth: Truth,
    clock: Clock,
    dice: Dice,
    /// A node nobody connects to, never cut off: back ends publish there.
    publisher: Arc<Memory>,
    n_pipes: u32,
}

impl World {
    /// A fleet that serves, with nobody connected yet.
    ///
    /// # Panics
    /// Outside a tokio runtime.
    pub async fn new(config: WorldConfig) -> Self {
        let clock = Clock::at(BEGINNING);
        let dice = Dice::seeded(config.seed);
        let log = MemoryLog::new(config.history, clock.clone(), dice.clone());
        let publisher = log.node("publisher");
        let mut world = Self {
            log,
            nodes: Vec::new(),
            clients: Vec::new(),
            truth: Truth::default(),
            clock,
            dice,
            publisher,
            n_pipes: 0,
            config,
        };
        for _ in 0..world.config.n_nodes {
            world.add_node();
        }
        world.look().await;
        world.settle().await;
        world
    }

    /// One more node; returns its number.
    pub fn add_node(&mut self) -> usize {
        let name: Arc<str> = format!("node{}", self.nodes.len()).into();
        let faults = Faulty::new(Line::new(self.log.node(&name)));
        let node = Node::start(&self.config, name, faults, &self.clock, &self.dice);
        self.nodes.push(node);
        self.nodes.len() - 1
    }

    /// One more client, not connected; returns its number. It hears `joined` by its token.
    pub fn add_client(&mut self, wire: Wire, joined: &[&str]) -> usize {
        self.add_client_asking(wire, joined, &[])
    }

    /// As `add_client`, with channels asked for in the query.
    pub fn add_client_asking(&mut self, wire: Wire, joined: &[&str], asked: &[&str]) -> usize {
        let name = format!("client{}", self.clients.len());
        let expires = (self.clock.unix() + Duration::from_secs(365 * 24 * 3600)).as_secs();
        let claims = json!({ "sub": name, "exp": expires, "channels": joined, "subscribe": ["*"] });
        let token = mint(SECRET, &claims).expect("a secret and an object");
        let owned = |channels: &[&str]| channels.iter().map(|&channel| channel.to_owned()).collect::<Vec<_>>();
        self.clients.push(Client::new(&name, wire, token, &owned(joined), &owned(asked)));
        self.clients.len() - 1
    }

    /// The client knocks at the node.
    pub fn connect(&mut self, client: usize, node: usize) {
        self.n_pipes += 1;
        let (ours, theirs) = tokio::io::duplex(self.config.pipe_bytes);
        // Private, so that one address does not stand for one client.
        let from = SocketAddr::new(IpAddr::V4(Ipv4Addr::from(0x0a00_0000 | (self.n_pipes & 0x00ff_ffff))), 1024);
        // A node that has stopped accepts nobody: the pipe ends.
        let _ = self.nodes[node].door.send((theirs, from));
        self.clients[client].connect(ours);
    }

    /// Connects and lets everything go on until the client is ready.
    ///
    /// # Panics
    /// A promise was broken, or it never is.
    pub async fn bring(&mut self, client: usize, node: usize) {
        self.connect(client, node);
        for _ in 0..2_000 {
            self.settle().await;
            self.receive(client).unwrap_or_else(|violation| self.fail(&violation));
            if self.clients[client].is_ready() {
                return;
            }
        }
        panic!("client{client} is never ready\n{}", self.clients[client].log().join("\n"));
    }

    /// The client takes everything that is there.
    ///
    /// # Errors
    /// A promise was broken.
    pub fn receive(&mut self, client: usize) -> Result<bool, Violation> {
        self.clients[client].receive(&self.truth, usize::MAX, usize::MAX)
    }

    /// Settles, and everybody takes what is there, until nothing comes any more.
    ///
    /// # Panics
    /// A promise was broken.
    pub async fn flow(&mut self) {
        loop {
            self.settle().await;
            let mut happened = false;
            for client in 0..self.clients.len() {
                happened |= self.receive(client).unwrap_or_else(|violation| self.fail(&violation));
            }
            if !happened {
                return;
            }
        }
    }

    /// Ends the test with what the client that found the violation had seen.
    ///
    /// # Panics
    /// Always.
    pub fn fail(&self, violation: &Violation) -> ! {
        let client = self.clients.iter().find(|client| client.name == violation.client);
        let log = client.map_or_else(String::new, |client| client.log().join("\n"));
        panic!("{violation}\n{log}");
    }

    /// Lets every task run until all wait for something. Takes a simulated millisecond.
    pub async fn settle(&self) {
        // The clock moves only once nothing else can.
        sleep(Duration::from_millis(1)).await;
    }

    /// The client asks for one more channel.
    pub fn subscribe(&mut self, client: usize, channel: &str, since: Option<&str>) {
        self.clients[client].subscribe(&self.truth, channel, since);
    }

    /// A back end publishes one event that carries its number.
    pub async fn publish(&mut self, channel: &str) -> Published {
        self.publish_with(channel, None, 0).await
    }

    /// As `publish`, with an idempotency key and padding of so many bytes.
    pub async fn publish_with(&mut self, channel: &str, key: Option<&str>, pad: usize) -> Published {
        let number = self.truth.next_number();
        let data = match pad {
            0 => number.to_string(),
            _ => json!({ "number": number, "pad": "x".repeat(pad) }).to_string(),
        };
        let published = self.say(channel, data, key, Kept::Logged).await;
        if let Some(id) = published.id.filter(|_| !published.duplicate) {
            self.truth.published(channel, id);
        }
        published
    }

    /// A back end publishes an event that is not logged.
    pub async fn publish_ephemeral(&self, channel: &str) {
        self.say(channel, "0".to_owned(), None, Kept::Ephemeral).await;
    }

    async fn say(&self, channel: &str, data: String, key: Option<&str>, kept: Kept) -> Published {
        let event = Publish {
            channel: Channel::new(channel).expect("tests use good names"),
            name: None,
            data: Bytes::from(data),
            ephemeral: kept == Kept::Ephemeral,
            key: key.map(Into::into),
        };
        self.publisher.publish(event).await.expect("the publisher is never cut off")
    }

    /// Wall time in this world.
    pub fn unix(&self) -> Duration {
        self.clock.unix()
    }

    /// Where the log stands now.
    pub async fn position(&self) -> EventId {
        let ask = ReadAsk { channels: Vec::new(), check: None, cap: 1, page_events: 1, page_bytes: 1 };
        self.publisher.read(ask).await.expect("the publisher is never cut off").position
    }

    /// Notes which life of the log it is.
    async fn look(&mut self) {
        let position = self.position().await;
        self.truth.log_is_at(position);
    }

    /// Everything is forgotten under the open links.
    pub async fn flush(&mut self) {
        self.log.flush();
        self.look().await;
    }

    /// The log's server restarts.
    pub async fn restart(&mut self, restart: Restart) {
        self.log.restart(restart);
        self.look().await;
    }

    /// The node of this client asks it to leave, now.
    pub fn ask_to_leave(&self, client: usize, reason: CloseReason) -> usize {
        let who = Who::User(self.clients[client].name.as_str().into());
        let leaves =
            |node: &Node| node.hub.handle().depart(Departure { who: who.clone(), reason, over: Duration::ZERO });
        self.nodes.iter().map(leaves).sum()
    }

    /// Mends nothing, but drives all clients until each is connected, ready and holds what it asked
    /// for, then publishes on every channel and sees that everybody gets it.
    ///
    /// # Errors
    /// A promise was broken, or somebody is stuck.
    pub async fn conclude(&mut self) -> Result<(), Violation> {
        self.everybody_settles().await?;
        let mut channels: Vec<String> = self.clients.iter().flat_map(Client::channels).cloned().collect();
        channels.sort_unstable();
        channels.dedup();
        // The first may be what tells a node that its log was flushed.
        for _ in 0..2 {
            for channel in &channels {
                self.publish(channel).await;
            }
            self.everybody_settles().await?;
        }
        for client in &self.clients {
            client.judge().end(&self.truth, client.channels())?;
        }
        Ok(())
    }

    /// Until nothing has happened for `QUIET`, and everybody is ready and has what it asked for.
    async fn everybody_settles(&mut self) -> Result<(), Violation> {
        let (mut waited, mut quiet) = (Duration::ZERO, Duration::ZERO);
        loop {
            self.settle().await;
            let mut happened = false;
            for i in 0..self.clients.len() {
                if !self.clients[i].is_connected() {
                    self.connect(i, i % self.nodes.len());
                    happened = true;
                }
                happened |= self.receive(i)?;
            }
            if happened {
                quiet = Duration::ZERO;
                continue;
            }
            let unsettled = self.clients.iter().find(|client| !client.is_settled());
            match unsettled {
                None if quiet >= QUIET => return Ok(()),
                Some(client) if waited >= PATIENCE => {
                    let what = "is never ready, or never gets what it asked for".to_owned();
                    return Err(Violation { promise: Promise::NeverStuck, client: client.name.clone(), what });
                }
                _ => {}
            }
            let step = QUIET / 4;
            sleep(step).await;
            waited += step;
            quiet += step;
        }
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Kept {
    Logged,
    Ephemeral,
}

impl Node {
    fn start(
        config: &WorldConfig,
        name: Arc<str>,
        faults: Arc<Faulty<Line<Memory>>>,
        clock: &Clock,
        dice: &Dice,
    ) -> Self {
        let backplane: Arc<dyn Backplane> = faults.clone();
        let metrics = Metrics::new("simulated");
        let verifier = Arc::new(Verifier::new(auth_config()).expect("the secret is long enough"));
        let revocations = Arc::new(Revocations::new(backplane.clone(), revocation_config(), metrics.clone()));
        let hub = Hub::new(Parts {
            config: hub_config(config, name),
            backplane,
            verifier: verifier.clone(),
            revocations: revocations.clone(),
            plugins: Plugins::new(),
            metrics: metrics.clone(),
            clock: clock.clone(),
            dice: dice.clone(),
        });
        let burst = (config.accept_rate * 2.0) as u32;
        let gate = Arc::new(Gate {
            config: gate_config(),
            hub: hub.clone(),
            verifier,
            revocations,
            plugins: Plugins::new(),
            metrics: metrics.clone(),
            clock: clock.clone(),
            dice: dice.clone(),
            capacity: Capacity::new(config.capacity),
            bucket: AcceptBucket::new(burst, config.accept_rate, dice.clone()),
            adaptive: None,
            addresses: AddressBuckets::new(1, 1.0, dice.clone()),
        });
        let (door, pipes) = mpsc::unbounded_channel();
        let stop = CancellationToken::new();
        let accept = AcceptConfig {
            handshakes: usize::MAX,
            head_timeout: Duration::from_secs(5),
            close_timeout: config.session.close_timeout,
        };
        let tasks = TaskTracker::new();
        tasks.spawn(accept::serve(Pipes(pipes), gate, accept, Handle::current(), tasks.clone(), stop.clone()));
        hub.start();
        hub.serve();
        Self { hub, faults, metrics, door, stop }
    }
}

/// Of every simulated node.
pub(crate) fn auth_config() -> AuthConfig {
    AuthConfig {
        keys: KeySource::Secret(Secret::new(SECRET.to_vec())),
        algorithms: None,
        issuer: None,
        audience: None,
        leeway: Duration::ZERO,
        user_channel: UserChannel::Off,
        max_channels: 100,
        anonymous: None,
    }
}

/// Of every simulated node.
pub(crate) fn revocation_config() -> RevocationConfig {
    RevocationConfig {
        when_unavailable: WhenUnavailable::Allow,
        deadline: Duration::from_secs(1),
        remember: Duration::from_secs(3600),
        company: Company::Awaited,
    }
}

fn hub_config(config: &WorldConfig, node: Arc<str>) -> HubConfig {
    HubConfig {
        node,
        capacity: config.capacity,
        max_channels: 100,
        max_message: 256 * 1024,
        replay_max: config.replay_max,
        auth_timeout: Duration::from_secs(1),
        max_age: None,
        revocation_sweep: Duration::from_secs(30),
        fleet: FleetConfig::unlimited("simulated"),
        drain: DrainConfig {
            grace: Duration::from_secs(5),
            window: Window::Auto,
            deadline: Duration::from_secs(120),
            takes_per_second: config.accept_rate / 2.0,
        },
        session: config.session.clone(),
    }
}

fn gate_config() -> GateConfig {
    GateConfig {
        credential: CredentialConfig::default(),
        origin: OriginPolicy::default(),
        proxies: TrustedProxies::default(),
        refuse: RefuseModes::default(),
        auth_timeout: Duration::from_secs(1),
        client_js: "",
        planned: PlannedCodes::default(),
    }
}
