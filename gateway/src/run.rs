//! A gateway from its configuration to its end: assembly, phases, the ordered stop. Decides who is
//! started before whom and what a start is refused for; what each part does stands in its crate.
//!
//! Order of the start: listeners (their addresses are known first) → probes on their own thread →
//! backplane → hub → doors. Order of the stop: readiness falls, grace, closes, then the doors (a call
//! of a back end that is under way is answered), then the node's tasks, and the probes last, for
//! somebody may still be asking.

use std::io;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use bytes::Bytes;
use edge::accept::{self, AcceptConfig, Tcp};
use edge::admin::{AdminKey, AdminState};
use edge::admit::{Gate, GateConfig};
use edge::jwks::{FileFetcher, UrlFetcher};
use edge::probes::{Link, ProbeConfig, Probes, Reason, Vitals};
use hub::auth::{KeyError, KeyFetcher, KeyKeeper, RefreshConfig, Verifier};
use hub::backplane::Backplane;
use hub::clock::{Clock, Dice};
use hub::departure;
use hub::fleet::Fitness;
use hub::hub::{Hub, Parts, Phase};
use hub::limit::{AcceptBucket, AddressBuckets, Capacity};
use hub::memory::{MemoryConfig, MemoryLog};
use hub::plugin::Plugins;
use hub::revocation::Revocations;
use hub::telemetry::{Metrics, RedisLink};
use redis_backplane::{ConfigError, RedisBackplane, StartError};
use tokio::net::TcpListener;
use tokio::runtime::{Handle, Runtime};
use tokio::sync::mpsc;
use tokio::time::{MissedTickBehavior, interval};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::config::{Config, Key};
use crate::settings;

/// The version that runs.
pub const VERSION: &str = env!("CARGO_PKG_VERSION");

const CLIENT_JS: &str = include_str!("../web/client.js");
const CONSOLE: &str = include_str!("../web/console.html");

/// The figures that are looked at rather than counted are looked at so often.
const GAUGE_EVERY: Duration = Duration::from_secs(1);

/// Why a gateway does not run (any more).
#[derive(Debug, thiserror::Error)]
pub enum RunError {
    /// The configuration asks for what cannot be: exit 64.
    #[error("{0}")]
    Config(String),
    /// A key of the configuration: exit 64.
    #[error("{variable}: the token keys cannot be used: {source}")]
    Keys {
        /// Which variable says where they are.
        variable: &'static str,
        /// What is wrong with them.
        source: KeyError,
    },
    /// A needed service is there and cannot be worked with: exit 69.
    #[error("{0}")]
    Service(#[from] StartError),
    /// An address cannot be listened on: exit 69.
    #[error("cannot listen on {address} ({variable}): {source}")]
    Listen {
        /// Where.
        address: SocketAddr,
        /// Which variable says so.
        variable: &'static str,
        /// The system's words.
        source: io::Error,
    },
    /// Exit 70.
    #[error("{0}")]
    Io(#[from] io::Error),
    /// A fault of ours, told in the log: exit 70, for whoever starts it to start it again.
    #[error("the node cannot go on, for a task of it has panicked")]
    Broken,
}

impl From<ConfigError> for RunError {
    fn from(e: ConfigError) -> Self {
        let variable = match e {
            ConfigError::Unsupported(_) | ConfigError::BadUrl(_) => "GATEWAY_REDIS_URL",
            ConfigError::CaFile(_) | ConfigError::NoCertificate => "GATEWAY_REDIS_CA_FILE",
            ConfigError::Prefix => "GATEWAY_REDIS_PREFIX",
        };
        RunError::Config(format!("{variable}: {e}"))
    }
}

/// Where the gateway listens, once it does.
#[derive(Clone, Copy, Debug)]
pub struct Addresses {
    /// Clients.
    pub public: SocketAddr,
    /// Back ends.
    pub admin: SocketAddr,
    /// Probes and metrics.
    pub probes: SocketAddr,
}

/// How a gateway is asked to end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stop {
    /// Drain, then end.
    Drain,
    /// End now, whoever is connected.
    Now,
}

/// Called once all three listeners stand.
pub type Listening = Box<dyn FnOnce(&Addresses) + Send>;

/// What the process around a gateway brings along.
pub struct Surroundings {
    /// What outside asks for; a closed channel asks for nothing.
    pub stops: mpsc::Receiver<Stop>,
    /// Who wants to know the addresses.
    pub listening: Listening,
    /// A token that the console page offers; for trying out only.
    pub console_token: Option<String>,
}

/// What `run` would refuse before it opens a socket: files are read, nothing is listened on or dialled.
///
/// # Errors
/// `RunError::Config` and `RunError::Keys`, the first that is met.
pub fn rehearse(config: &Config) -> Result<(), RunError> {
    settings::refuse_what_is_not_there(config)?;
    verifier(config, &Dice::seeded(0))?;
    settings::gate(config)?;
    if let Some(redis) = settings::redis(config)? {
        redis.check()?;
    }
    Ok(())
}

/// Runs until it has drained, or is told to end now.
///
/// # Errors
/// See `RunError`; none once it serves.
pub async fn run(config: Config, plugins: Plugins, surroundings: Surroundings) -> Result<(), RunError> {
    let Surroundings { mut stops, listening, console_token } = surroundings;
    settings::refuse_what_is_not_there(&config)?;
    let doors = Doors::bind(&config).await?;
    let clock = Clock::system();
    let seed = settings::seed();
    let dice = Dice::seeded(seed);
    let capacity = settings::capacity(&config);
    let metrics = Metrics::new(VERSION);
    let (backplane, redis) = connect(&config, &clock, &dice)?;
    let vitals = Vitals::new(probe_config(&config), capacity, metrics.clone(), link_of(redis.clone()));
    let addresses = doors.addresses()?;
    let probes = Probes::start(doors.probes, vitals.clone())?;
    settings::announce(&config, &addresses, seed)?;
    listening(&addresses);

    let mut node = Node::assemble(&config, plugins, backplane, metrics, clock, dice, capacity)?;
    let (tasks, calls) = (TaskTracker::new(), TaskTracker::new());
    let doors_close = CancellationToken::new();
    tasks.spawn(doors_close.clone().run_until_cancelled_owned(vitals.clone().run_heartbeat()));
    tasks.spawn(doors_close.clone().run_until_cancelled_owned(follow_phase(node.hub.clone(), vitals.clone())));
    tasks.spawn(doors_close.clone().run_until_cancelled_owned(gauge(node.gate.clone(), redis.clone(), vitals.clone())));
    if let Some(keeper) = node.keeper.take() {
        tasks.spawn(doors_close.clone().run_until_cancelled_owned(keeper.run()));
    }
    let user_timeout = config.session.heartbeat_timeout + config.session.write_timeout;
    let accept = AcceptConfig {
        handshakes: config.admission.handshakes as usize,
        head_timeout: config.admission.head_timeout,
        close_timeout: config.session.close_timeout,
    };
    let door = Door::open(config.node.workers)?;
    let public = door.incoming(doors.public, user_timeout)?;
    let serving =
        accept::serve(public, node.gate.clone(), accept, Handle::current(), tasks.clone(), doors_close.clone());
    tasks.spawn_on(serving, door.runtime());
    tasks.spawn_on(doors_close.clone().run_until_cancelled_owned(vitals.clone().run_door_heartbeat()), door.runtime());
    let console = console(&addresses, console_token.as_deref().unwrap_or_default());
    let api = edge::admin::router(node.admin_state(&config, console));
    calls.spawn(accept::serve_api(doors.admin, api, calls.clone(), doors_close.clone()));

    node.hub.start();
    node.hub.balance(settings::shed(&config));
    let ended = live(&node, redis.as_deref(), &mut stops).await;
    if matches!(ended, Err(RunError::Broken)) {
        // In order is nothing any more: clients see a connection that broke, and come back to another node.
        return ended;
    }
    doors_close.cancel();
    // Each ends within its own grace. What is stored and not answered would be published twice.
    calls.close();
    calls.wait().await;
    node.hub.shut_down().await;
    vitals.set_phase(node.hub.phase());
    probes.stop();
    ended
}

/// The runtime of those who are not in yet: a storm of them takes turns from each other, and from
/// the sessions only what the kernel's fair share gives it.
struct Door(Option<Runtime>);

impl Door {
    /// Half as many threads as the main runtime has.
    fn open(workers: usize) -> io::Result<Self> {
        let mut runtime = tokio::runtime::Builder::new_multi_thread();
        runtime.worker_threads((workers / 2).max(1)).thread_name("tidegate-door").enable_all();
        Ok(Self(Some(runtime.build()?)))
    }

    fn runtime(&self) -> &Handle {
        self.0.as_ref().expect("there until it is dropped").handle()
    }

    /// Moves the listener here.
    fn incoming(&self, listener: TcpListener, user_timeout: Duration) -> io::Result<Tcp> {
        let listener = listener.into_std()?;
        let _here = self.runtime().enter();
        Tcp::new(listener, user_timeout)
    }
}

impl Drop for Door {
    fn drop(&mut self) {
        // Waiting for its threads would block the thread of a task.
        if let Some(runtime) = self.0.take() {
            runtime.shutdown_background();
        }
    }
}

/// Waits for the backplane and for the token keys, serves, drains.
async fn live(node: &Node, redis: Option<&RedisBackplane>, stops: &mut mpsc::Receiver<Stop>) -> Result<(), RunError> {
    let hub = &node.hub;
    let ready = async {
        if let Some(redis) = redis {
            redis.wait_ready().await?;
        }
        node.gate.verifier.ready().await;
        Ok::<(), RunError>(())
    };
    tokio::select! {
        ready = ready => ready?,
        // Nobody is connected, so there is nothing to drain, whoever asks for it.
        Some(_) = stops.recv() => return Ok(()),
        _ = draining(hub) => return Ok(()),
    }
    hub.serve();
    let drained = departure::drain(hub);
    tokio::pin!(drained);
    loop {
        tokio::select! {
            ended = &mut drained => {
                tracing::info!(sessions = ended.n_sessions, cut = ended.n_cut, "drained");
                return Ok(());
            }
            () = hub.broken() => return Err(RunError::Broken),
            Some(stop) = stops.recv() => match stop {
                Stop::Drain => hub.drain(),
                Stop::Now => {
                    let cut = hub.load().n_sessions;
                    tracing::warn!(cut, "ending at once, connections are cut");
                    return Ok(());
                }
            }
        }
    }
}

async fn draining(hub: &Hub) {
    let _ = hub.phases().wait_for(|phase| *phase >= Phase::Draining).await;
}

struct Doors {
    public: TcpListener,
    admin: TcpListener,
    probes: std::net::TcpListener,
}

impl Doors {
    async fn bind(config: &Config) -> Result<Self, RunError> {
        let listen = &config.listen;
        let probes = std::net::TcpListener::bind(listen.probes);
        Ok(Self {
            public: bind(listen.public, "GATEWAY_LISTEN").await?,
            admin: bind(listen.admin, "GATEWAY_ADMIN_LISTEN").await?,
            probes: probes.map_err(|source| RunError::Listen {
                address: listen.probes,
                variable: "GATEWAY_PROBE_LISTEN",
                source,
            })?,
        })
    }

    fn addresses(&self) -> io::Result<Addresses> {
        Ok(Addresses {
            public: self.public.local_addr()?,
            admin: self.admin.local_addr()?,
            probes: self.probes.local_addr()?,
        })
    }
}

async fn bind(address: SocketAddr, variable: &'static str) -> Result<TcpListener, RunError> {
    TcpListener::bind(address).await.map_err(|source| RunError::Listen { address, variable, source })
}

/// The parts that sessions live in and come through.
struct Node {
    hub: Arc<Hub>,
    gate: Arc<Gate>,
    /// Fetches the token keys, where they can change; to be run.
    keeper: Option<KeyKeeper>,
}

impl Node {
    fn assemble(
        config: &Config,
        plugins: Plugins,
        backplane: Arc<dyn Backplane>,
        metrics: Arc<Metrics>,
        clock: Clock,
        dice: Dice,
        capacity: usize,
    ) -> Result<Self, RunError> {
        let (verifier, keeper) = verifier(config, &dice)?;
        let revocations = Arc::new(Revocations::new(backplane.clone(), settings::revocation(config), metrics.clone()));
        let parts = Parts {
            config: settings::hub(config, capacity),
            backplane,
            verifier: verifier.clone(),
            revocations: revocations.clone(),
            plugins: plugins.clone(),
            metrics: metrics.clone(),
            clock: clock.clone(),
            dice: dice.clone(),
        };
        let hub = Hub::new(parts);
        let admission = &config.admission;
        let (ip_rate, ip_burst) = admission.address_bucket().unwrap_or((0, 0));
        let gate = Gate {
            config: GateConfig { client_js: CLIENT_JS, ..settings::gate(config)? },
            hub: hub.clone(),
            verifier,
            revocations,
            plugins,
            metrics,
            clock,
            capacity: Capacity::new(capacity),
            bucket: AcceptBucket::new(admission.accept_burst, f64::from(admission.accept_rate), dice.clone()),
            adaptive: settings::adaptive(config),
            addresses: AddressBuckets::new(ip_burst, f64::from(ip_rate), dice.clone()),
            dice,
        };
        Ok(Self { hub, gate: Arc::new(gate), keeper })
    }

    fn admin_state(&self, config: &Config, console: Bytes) -> AdminState {
        AdminState {
            gateway: self.hub.handle(),
            key: config.admin.key.as_ref().map(|key| AdminKey::new(key.expose())),
            hosts: config.admin.hosts.clone(),
            max_message: config.session.max_message_bytes,
            revocation_ttl: config.revocation.ttl,
            clock: self.gate.clock.clone(),
            dice: self.gate.dice.clone(),
            console,
            client_js: CLIENT_JS,
        }
    }
}

/// What tokens are checked with, and who keeps its keys new.
fn verifier(config: &Config, dice: &Dice) -> Result<(Arc<Verifier>, Option<KeyKeeper>), RunError> {
    let auth = settings::auth(config)?;
    let named =
        |source| RunError::Keys { variable: config.auth.key().map_or("GATEWAY_JWT_SECRET", Key::variable), source };
    let (refresh, fetcher): (_, Box<dyn KeyFetcher>) = match config.auth.key() {
        Some(Key::JwksUrl(url)) => {
            let fetcher = UrlFetcher::new(url).map_err(|e| RunError::Config(format!("GATEWAY_JWT_JWKS_URL: {e}")))?;
            (RefreshConfig::URL, Box::new(fetcher))
        }
        Some(Key::JwksFile(path)) => (RefreshConfig::FILE, Box::new(FileFetcher::new(path))),
        _ => return Ok((Arc::new(Verifier::new(auth).map_err(named)?), None)),
    };
    let (verifier, keeper) = Verifier::refreshed(auth, refresh, fetcher, dice.clone()).map_err(named)?;
    Ok((verifier, Some(keeper)))
}

/// The console page, which must know where clients connect.
fn console(at: &Addresses, token: &str) -> Bytes {
    let mut public = at.public;
    if public.ip().is_unspecified() {
        // Whoever sees the page reaches the admin listener, which is this host's.
        public.set_ip(if public.is_ipv4() { Ipv4Addr::LOCALHOST.into() } else { Ipv6Addr::LOCALHOST.into() });
    }
    CONSOLE.replace("{{PUBLIC_URL}}", &format!("http://{public}")).replace("{{TOKEN}}", token).into()
}

type Redis = Option<Arc<RedisBackplane>>;

fn connect(config: &Config, clock: &Clock, dice: &Dice) -> Result<(Arc<dyn Backplane>, Redis), RunError> {
    match settings::redis(config)? {
        Some(redis) => {
            let redis = Arc::new(RedisBackplane::connect(redis, dice.clone())?);
            Ok((redis.clone(), Some(redis)))
        }
        None => {
            let history = &config.history;
            let log = MemoryLog::new(
                MemoryConfig {
                    history_size: history.size,
                    history_ttl: history.ttl,
                    idempotency_ttl: history.idempotency_ttl,
                },
                clock.clone(),
                dice.clone(),
            );
            Ok((log.node(&config.node.name), None))
        }
    }
}

fn probe_config(config: &Config) -> ProbeConfig {
    let probes = &config.probes;
    ProbeConfig {
        live_stale: probes.live_stale,
        ready_headroom: probes.ready_headroom,
        ready_lag: probes.ready_lag,
        ready_redis: probes.looks_at_redis.then_some(probes.redis_grace),
    }
}

/// How the link is, for one who looks now and then. One that was whole for a moment between two looks
/// counts as up once: what follows is another outage, with a grace of its own.
fn link_of(redis: Redis) -> impl Fn() -> Link + Send + Sync + 'static {
    let stats = redis.map(|redis| redis.stats());
    let n_seen = AtomicU64::new(0);
    move || {
        let Some(stats) = &stats else { return Link::Up };
        let n_ups = stats.n_ups.load(Ordering::Relaxed);
        if n_seen.swap(n_ups, Ordering::Relaxed) != n_ups || stats.pubsub_up.load(Ordering::Relaxed) {
            Link::Up
        } else if stats.deaf.load(Ordering::Relaxed) {
            Link::Deaf
        } else {
            Link::Down
        }
    }
}

async fn follow_phase(hub: Arc<Hub>, vitals: Arc<Vitals>) {
    let mut phases = hub.phases();
    loop {
        vitals.set_phase(*phases.borrow_and_update());
        if phases.changed().await.is_err() {
            return;
        }
    }
}

/// Figures that are looked at, and the rate that follows from some of them: the bucket, the links.
async fn gauge(gate: Arc<Gate>, redis: Redis, vitals: Arc<Vitals>) {
    let stats = redis.map(|redis| redis.stats());
    let mut every = interval(GAUGE_EVERY);
    every.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut skipped = 0;
    loop {
        every.tick().await;
        steer(&gate, &vitals);
        gate.verifier.age();
        gate.hub.set_fitness(fitness(&vitals));
        gate.metrics.accept(gate.bucket.rate(), gate.bucket.tokens(tokio::time::Instant::now()));
        if let Some(keys) = gate.verifier.key_state() {
            gate.metrics.keys(keys.age.unwrap_or_default(), keys.failing_for.unwrap_or_default());
        }
        let Some(stats) = &stats else { continue };
        for (name, is_up) in stats.links() {
            if let Some(link) = RedisLink::ALL.iter().find(|link| link.word() == name) {
                gate.metrics.redis_up(*link, is_up);
            }
        }
        let now = stats.skipped.load(std::sync::atomic::Ordering::Relaxed);
        for _ in skipped..now {
            gate.metrics.skipped(hub::telemetry::SkipReason::Malformed);
        }
        skipped = now;
    }
}

/// What the fleet may know of this node's own judgement.
fn fitness(vitals: &Vitals) -> Fitness {
    let readiness = vitals.readiness();
    Fitness { is_ready: readiness.ready, is_lagging: readiness.reasons.contains(&Reason::Saturated) }
}

/// Moves the accept rate to what authentication bears (`GATEWAY_ACCEPT_MODE=adaptive`).
fn steer(gate: &Gate, vitals: &Vitals) {
    let Some(adaptive) = &gate.adaptive else { return };
    let (now, before) = (tokio::time::Instant::now(), gate.bucket.rate());
    let verdict = adaptive.tick(now, vitals.take_worst_lag(), gate.bucket.n_refused());
    if verdict.rate == before {
        return;
    }
    gate.bucket.set_rate(verdict.rate, now);
    let median_ms = verdict.p50.map(|p50| p50.as_secs_f64() * 1e3);
    tracing::info!(rate = verdict.rate, before, why = verdict.why.word(), median_ms, "the accept rate moves");
}
