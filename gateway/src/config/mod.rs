//! The configuration: every `GATEWAY_…` variable, read once at start. The only place that knows
//! the environment. `table` says which variables exist, `read` reads them and collects the faults,
//! `values` and `parse` say when a text is good, `check` which values contradict each other;
//! `assemble` puts the typed groups of this file together.
//!
//! Each part of the gateway takes its own group by value; nobody stores the whole.

mod assemble;
pub mod check;
pub mod parse;
mod read;
pub mod table;
#[cfg(test)]
mod tests;
pub mod values;

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use hub::channel::Pattern;
use hub::close::PlannedCodes;
use jsonwebtoken::Algorithm;

pub use assemble::process_environment;
pub use check::Relation;
pub use read::{ConfigErrors, Fault, Setting};
pub use values::{Network, Origins, PublicKey, RedisScheme, RedisUrl, RevocationKeys, Secret};

/// The whole configuration, parsed and free of contradictions.
#[derive(Clone, Debug)]
pub struct Config {
    /// This process in its fleet.
    pub node: Node,
    /// What is logged and how.
    pub log: Log,
    /// The three listeners.
    pub listen: Listen,
    /// Who a client is.
    pub auth: Auth,
    /// What was revoked.
    pub revocation: Revocation,
    /// The backplane.
    pub redis: Redis,
    /// What a newcomer may cost.
    pub admission: Admission,
    /// What one session may hold and for how long it is waited for.
    pub session: Session,
    /// What is kept for those who come back.
    pub history: History,
    /// When a session has been here long enough.
    pub lifecycle: Lifecycle,
    /// How the node leaves.
    pub drain: Drain,
    /// How sessions move to emptier nodes.
    pub shed: Shed,
    /// How nodes tell each other of themselves.
    pub fleet: Fleet,
    /// The back ends' API.
    pub admin: Admin,
    /// Liveness and readiness.
    pub probes: Probes,
    settings: Vec<Setting>,
}

/// This process in its fleet.
#[derive(Clone, Debug)]
pub struct Node {
    /// 1 to 64 bytes of `A-Z a-z 0-9 _ - .`, unique to this start unless it was set.
    pub name: String,
    /// Threads of the main runtime.
    pub workers: usize,
}

/// What is logged and how.
#[derive(Clone, Debug)]
pub struct Log {
    /// Directives of `tracing_subscriber::EnvFilter`, known to parse.
    pub filter: String,
    /// `None`: text on a terminal, else JSON.
    pub format: Option<LogFormat>,
}

/// One line an entry, either way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LogFormat {
    /// For people.
    Text,
    /// For machines.
    Json,
}

/// The three listeners, never shared. Port 0 picks a free one.
#[derive(Clone, Debug)]
pub struct Listen {
    /// Clients.
    pub public: SocketAddr,
    /// Back ends.
    pub admin: SocketAddr,
    /// Probes and metrics.
    pub probes: SocketAddr,
    /// Where the bound addresses are written as JSON.
    pub addr_file: Option<PathBuf>,
    /// PEM chain; `check` sees to it that both files are set or neither.
    pub tls_cert_file: Option<PathBuf>,
    /// PEM private key.
    pub tls_key_file: Option<PathBuf>,
}

/// Who a client is.
#[derive(Clone, Debug)]
pub struct Auth {
    /// HMAC secret, at least 32 bytes.
    pub jwt_secret: Option<Secret<Vec<u8>>>,
    /// PEM public key.
    pub jwt_public_key: Option<PublicKey>,
    /// Key set by URL.
    pub jwks_url: Option<String>,
    /// Key set by file.
    pub jwks_file: Option<PathBuf>,
    /// Accepted algorithms; empty: what fits the key.
    pub algorithms: Vec<Algorithm>,
    /// Accepted `iss`; empty: not looked at.
    pub issuers: Vec<String>,
    /// Accepted `aud`; empty: not looked at.
    pub audiences: Vec<String>,
    /// Tolerance for `exp` and `nbf`.
    pub leeway: Duration,
    /// The cookie that may hold a token.
    pub cookie: Option<String>,
    /// May the query hold a token?
    pub is_query_allowed: bool,
    /// What an anonymous client may hear; empty: there are no anonymous sessions.
    pub anonymous: Vec<Pattern>,
    /// Does `sub` join `user:<sub>`?
    pub has_user_channel: bool,
    /// Which browsers' pages may use this gateway.
    pub origins: Origins,
    /// The whole admission after the head was read.
    pub timeout: Duration,
}

/// The one key that tokens are checked with.
#[derive(Clone, Copy, Debug)]
pub enum Key<'a> {
    /// HMAC.
    Secret(&'a Secret<Vec<u8>>),
    /// RSA, EC or Ed25519.
    Public(&'a PublicKey),
    /// A key set to fetch.
    JwksUrl(&'a str),
    /// A key set to read.
    JwksFile(&'a Path),
}

impl Key<'_> {
    /// Which variable says it.
    pub fn variable(self) -> &'static str {
        match self {
            Key::Secret(_) => "GATEWAY_JWT_SECRET",
            Key::Public(_) => "GATEWAY_JWT_PUBLIC_KEY",
            Key::JwksUrl(_) => "GATEWAY_JWT_JWKS_URL",
            Key::JwksFile(_) => "GATEWAY_JWT_JWKS_FILE",
        }
    }
}

/// What was revoked.
#[derive(Clone, Debug)]
pub struct Revocation {
    /// Where the list stands.
    pub keys: RevocationKeys,
    /// How often foreign keys are looked for.
    pub sweep: Duration,
    /// What a new session gets while Redis cannot answer.
    pub unavailable: WhenUnavailable,
    /// How long a revocation made here is kept.
    pub ttl: Duration,
}

/// What a new session gets while the revocation list cannot be asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WhenUnavailable {
    /// 503.
    Refuse,
    /// Admission, checked as soon as Redis is back.
    Allow,
}

/// The backplane.
#[derive(Clone, Debug)]
pub struct Redis {
    /// `None`: in memory, one node.
    pub url: Option<RedisUrl>,
    /// A password that does not stand in the URL.
    pub password: Option<Secret<String>>,
    /// PEM of a private CA.
    pub ca_file: Option<PathBuf>,
    /// Of every key and channel.
    pub prefix: String,
    /// Of one command.
    pub timeout: Duration,
    /// 1 to 8.
    pub partitions: u16,
}

/// What a newcomer may cost.
#[derive(Clone, Debug)]
pub struct Admission {
    /// Admissions at once.
    pub accept_burst: u32,
    /// Admissions a second.
    pub accept_rate: u32,
    /// Whether the rate moves.
    pub accept_mode: AcceptMode,
    /// Upper end of the adaptive rate, admissions a second.
    pub accept_rate_max: u32,
    /// In flight from accept to the answer's head.
    pub handshakes: u32,
    /// Until a request's head must have come.
    pub head_timeout: Duration,
    /// Attempts a second from one address; see `address_bucket`.
    pub ip_rate: u32,
    /// Attempts at once from one address; see `address_bucket`.
    pub ip_burst: u32,
    /// Whose `X-Forwarded-*` is believed.
    pub trusted_proxies: Vec<Network>,
    /// How an SSE request is refused for now.
    pub sse_refuse: SseRefuse,
    /// How a browser's WebSocket gets a 401.
    pub ws_refuse: WsRefuse,
}

/// Whether the accept rate moves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AcceptMode {
    /// It stands at `accept_rate`.
    Fixed,
    /// Between `accept_rate` and `accept_rate_max`, by what authentication bears.
    Adaptive,
}

/// How an SSE request is refused for now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SseRefuse {
    /// Soft where there is no `Authorization` header, since only a native EventSource has none.
    Auto,
    /// Always the status.
    Status,
    /// Always soft.
    Soft,
}

/// How a browser's WebSocket gets a 401.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WsRefuse {
    /// 101, `bye`, close, where the request has an `Origin`.
    Auto,
    /// Always the status.
    Status,
}

/// What one session may hold and for how long it is waited for.
#[derive(Clone, Debug)]
pub struct Session {
    /// Sessions on this node.
    pub max_sessions: usize,
    /// Sessions of one user over the fleet; `None`: no limit.
    pub max_per_user: Option<u32>,
    /// Channels of one session.
    pub max_channels: usize,
    /// Bytes of an event's `data`, or of a whole message from a client.
    pub max_message_bytes: usize,
    /// Messages a second from one client.
    pub client_rate: u32,
    /// Messages at once from one client.
    pub client_burst: u32,
    /// Between signs of life sent to an idle client.
    pub heartbeat: Duration,
    /// For the answer to a ping.
    pub heartbeat_timeout: Duration,
    /// Bytes that may wait for one client.
    pub outbox_bytes: usize,
    /// Of one write.
    pub write_timeout: Duration,
    /// From our close frame to the peer's.
    pub close_timeout: Duration,
    /// Close codes of the planned endings.
    pub planned_codes: PlannedCodes,
}

/// What is kept for those who come back.
#[derive(Clone, Debug)]
pub struct History {
    /// Events a channel; 0: none.
    pub size: usize,
    /// How long they are kept.
    pub ttl: Duration,
    /// Events replayed to one session.
    pub replay_max: usize,
    /// How long a publish's key is remembered.
    pub idempotency_ttl: Duration,
}

/// When a session has been here long enough.
#[derive(Clone, Debug)]
pub struct Lifecycle {
    /// Least age at which a session is moved; see `max_age`.
    pub max_age_min: Duration,
    /// Greatest age at which a session is moved; see `max_age`.
    pub max_age_max: Duration,
}

/// How the node leaves.
#[derive(Clone, Debug)]
pub struct Drain {
    /// Unready but still serving.
    pub grace: Duration,
    /// Closes are spread over it; `None`: worked out from what the fleet takes in.
    pub window: Option<Duration>,
    /// From the signal to the last cut, as it is asked for; see `deadline_in_force`.
    pub deadline: Duration,
    /// From the signal to the kill, by whoever runs this process; `None`: not known.
    pub termination_grace: Option<Duration>,
    /// `Session::close_timeout`, which the window must leave room for.
    pub close_timeout: Duration,
}

/// How sessions move to emptier nodes.
#[derive(Clone, Debug)]
pub struct Shed {
    /// Whether they do.
    pub mode: ShedMode,
    /// Band around the share, above 0 and at most 1.
    pub tolerance: f64,
    /// Part of own sessions an interval, above 0 and at most 1.
    pub fraction: f64,
    /// Between two decisions.
    pub interval: Duration,
}

/// Whether sessions are moved to emptier nodes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ShedMode {
    /// They are.
    On,
    /// They are not.
    Off,
    /// It is only counted how many would be.
    DryRun,
}

/// How nodes tell each other of themselves.
#[derive(Clone, Debug)]
pub struct Fleet {
    /// Between two reports.
    pub report: Duration,
    /// After which a silent node no longer counts.
    pub ttl: Duration,
}

/// The back ends' API.
#[derive(Clone, Debug)]
pub struct Admin {
    /// Bearer key; `None`: loopback only.
    pub key: Option<Secret<String>>,
    /// Host names, lower case, under which it may be called without a key.
    pub hosts: Vec<String>,
}

/// Liveness and readiness.
#[derive(Clone, Debug)]
pub struct Probes {
    /// Age of either runtime's heartbeat at which `/livez` fails; a blocked worker fails it after twice that.
    pub live_stale: Duration,
    /// Part of the capacity from which the node is unready, above 0 and at most 1.
    pub ready_headroom: f64,
    /// Lag p99 from which the node is unready.
    pub ready_lag: Duration,
    /// Does readiness look at Redis?
    pub looks_at_redis: bool,
    /// For how long the pub/sub link may be down.
    pub redis_grace: Duration,
}

/// Names and values of an environment.
pub type Environment = BTreeMap<String, String>;

/// What the configuration is read for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Purpose {
    /// To serve clients: a key is needed.
    Serve,
    /// To look at, or for a command that checks no token.
    Look,
}

/// What commands that talk to a running gateway read; faults of other variables do not concern them.
#[derive(Clone, Debug)]
pub struct Tools {
    /// Where the gateway's admin API listens.
    pub admin_listen: SocketAddr,
    /// Its key.
    pub admin_key: Option<Secret<String>>,
    /// Where the gateway wrote its bound addresses.
    pub addr_file: Option<PathBuf>,
    /// What tokens are signed with.
    pub jwt_secret: Option<Secret<Vec<u8>>>,
    /// What the gateway accepts.
    pub algorithms: Vec<Algorithm>,
    /// `iss` that the gateway wants.
    pub issuers: Vec<String>,
    /// `aud` that the gateway wants.
    pub audiences: Vec<String>,
}

impl Config {
    /// The value in force of every variable, in the table's order, secrets hidden.
    pub fn settings(&self) -> &[Setting] {
        &self.settings
    }
}

impl Auth {
    /// The key that is set; `check` refuses more than one.
    pub fn key(&self) -> Option<Key<'_>> {
        None.or(self.jwt_secret.as_ref().map(Key::Secret))
            .or(self.jwt_public_key.as_ref().map(Key::Public))
            .or(self.jwks_url.as_deref().map(Key::JwksUrl))
            .or(self.jwks_file.as_deref().map(Key::JwksFile))
    }
}

impl Listen {
    /// Certificate and key, where TLS is on.
    pub fn tls(&self) -> Option<(&Path, &Path)> {
        self.tls_cert_file.as_deref().zip(self.tls_key_file.as_deref())
    }
}

impl Admission {
    /// Rate a second and burst of one address; `None`: off.
    pub fn address_bucket(&self) -> Option<(u32, u32)> {
        (self.ip_rate > 0 && self.ip_burst > 0).then_some((self.ip_rate, self.ip_burst))
    }
}

impl Drain {
    /// From the last cut to the end of the process at most, 5s: cut sessions are waited for 1 s, the
    /// fleet's last word 1 s, the last traces 2 s, the runtime's threads 1 s.
    pub const EXIT: Duration = Duration::from_secs(5);

    /// From the signal to the last cut: the deadline, or earlier where the process would be killed
    /// before it has ended.
    pub fn deadline_in_force(&self) -> Duration {
        let killed = self.termination_grace.unwrap_or(Duration::MAX);
        self.deadline.min(killed.saturating_sub(Self::EXIT))
    }
}

impl Lifecycle {
    /// The range an age is drawn from; `None`: sessions are never recycled.
    pub fn max_age(&self) -> Option<(Duration, Duration)> {
        (!self.max_age_max.is_zero()).then_some((self.max_age_min, self.max_age_max))
    }
}
