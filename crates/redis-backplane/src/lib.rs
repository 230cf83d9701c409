//! Tidegate's backplane over Redis 7: the log and the live link that all nodes share, the revocation
//! list, and what nodes know of each other. Decides which connection serves what, when it is redialled, and that every
//! call ends at its deadline; ids, order and atomicity are decided by the Functions in
//! `migrations/`, sessions and gaps by the hub.
//!
//! Connections of one node: one for the pub/sub link, one for publishing, one for revocation, one
//! for control (beacons, schema), one for the fleet (reports, holds, messages, claims), at most four for
//! reads. None of them waits for another's: a storm of claims or a long message delays no beacon,
//! by which a link is judged, and no token's check.
//!
//! `pubsub` the link → `wire` its bytes → `message` what comes over it → `wants` what is wanted from it; `log` publish
//! and read; `revocation`; `fleet`; `schema` version, libraries, settings; `lane`, `dial` connections; `keys`
//! every name.

mod dial;
mod fleet;
mod keys;
mod lane;
mod log;
mod message;
mod pubsub;
mod revocation;
mod schema;
mod wants;
mod wire;

use std::fmt;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures_util::future::BoxFuture;
use hub::backplane::{
    Backplane, Claim, Claimed, Fleet, From as Since, FromLink, Hold, MAX_TELL_BYTES, Publish, Published, Read, ReadAsk,
    Revocation, RevocationKey, Unavailable,
};
use hub::channel::Channel;
use hub::clock::Dice;
use redis::Cmd;
use tokio::sync::{mpsc, watch};
use tokio_util::task::AbortOnDropHandle;

pub use dial::ConfigError;
pub use keys::{BadTemplate, RevocationKeys};
pub use schema::{Prepared, SCHEMA, StartError};

use dial::{Address, Backoff, Dialer, Fault};
use keys::Keys;
use lane::{Again, Lane};
use log::Readers;
use pubsub::{Start, Supervisor};
use revocation::Question;
use schema::Schema;
use wants::Wants;

/// Bytes of events of the greatest length that may wait for the hub; fewer events where those are longer.
const MAX_TO_HUB: usize = 64 << 20;
/// Messages that may wait for it, however short.
const TO_HUB: std::ops::RangeInclusive<usize> = 16..=1_024;

/// Everything that the backplane needs to know. `Debug` hides the URL and the password.
#[derive(Clone)]
pub struct RedisConfig {
    /// `redis://`, `rediss://` or `unix://`.
    pub url: String,
    /// For passwords that do not fit a URL; goes before the URL's.
    pub password: Option<String>,
    /// A private CA, PEM.
    pub ca_file: Option<PathBuf>,
    /// Of every key and pub/sub channel; 1 to 100 bytes.
    pub prefix: String,
    /// Of one command (default of the gateway: 250 ms).
    pub timeout: Duration,
    /// This node's name, one of its own in the fleet.
    pub node: String,
    /// Events kept a channel; 0: none.
    pub history_size: u64,
    /// How long they are kept.
    pub history_ttl: Duration,
    /// How long an idempotency key is remembered.
    pub idempotency_ttl: Duration,
    /// Longest `data` in bytes.
    pub max_message: usize,
    /// Which revocation list is read.
    pub revocation_keys: RevocationKeys,
}

impl fmt::Debug for RedisConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RedisConfig").field("prefix", &self.prefix).field("node", &self.node).finish_non_exhaustive()
    }
}

impl RedisConfig {
    /// Could a connection be tried with it? The CA file is read, nothing is dialled.
    ///
    /// # Errors
    /// `ConfigError`: `RedisBackplane::connect` would give the same.
    pub fn check(&self) -> Result<(), ConfigError> {
        self.dialer().map(drop)
    }

    fn dialer(&self) -> Result<Dialer, ConfigError> {
        if self.prefix.is_empty() || self.prefix.len() > 100 || self.prefix.contains(char::is_whitespace) {
            return Err(ConfigError::Prefix);
        }
        let address = Address { url: &self.url, password: self.password.as_deref(), ca_file: self.ca_file.as_ref() };
        Dialer::new(&address, self.timeout)
    }
}

/// What telemetry and readiness may look at, at any time, for the cost of a load.
#[derive(Debug)]
pub struct LinkStats {
    /// Messages and log entries that were no events.
    pub skipped: AtomicU64,
    /// Losses of the pub/sub link.
    pub relinks: AtomicU64,
    /// How often the pub/sub link has become whole.
    pub n_ups: AtomicU64,
    /// The pub/sub link is whole.
    pub pubsub_up: AtomicBool,
    /// The link was given up because it heard nothing, and is not whole again.
    pub deaf: AtomicBool,
    /// The connection for publishing stands.
    pub publish_up: Arc<AtomicBool>,
    /// The last read was answered.
    pub read_up: AtomicBool,
    /// The connection for revocation stands.
    pub revocation_up: Arc<AtomicBool>,
    /// The connection for the fleet stands.
    pub fleet_up: Arc<AtomicBool>,
    trouble: Mutex<Option<String>>,
    dice: Dice,
}

impl LinkStats {
    /// Why the pub/sub link is not whole, in words for an operator; `None` while it is.
    pub fn trouble(&self) -> Option<String> {
        self.trouble.lock().expect("nothing panics while it is held").clone()
    }

    /// Is it another one than before?
    fn set_trouble(&self, trouble: Option<String>) -> bool {
        let mut now = self.trouble.lock().expect("nothing panics while it is held");
        let is_new = *now != trouble;
        *now = trouble;
        is_new
    }

    /// `(link, is_up)` for `gateway_redis_up{link}`.
    pub fn links(&self) -> [(&'static str, bool); 5] {
        [
            ("pubsub", self.pubsub_up.load(Ordering::Relaxed)),
            ("publish", self.publish_up.load(Ordering::Relaxed)),
            ("read", self.read_up.load(Ordering::Relaxed)),
            ("revocation", self.revocation_up.load(Ordering::Relaxed)),
            ("fleet", self.fleet_up.load(Ordering::Relaxed)),
        ]
    }
}

/// The backplane over one Redis server. Dropping it ends its tasks and connections.
pub struct RedisBackplane {
    keys: Keys,
    log: String,
    node: String,
    /// The node's name and what tells this process from an earlier one of that name.
    life: String,
    revocation_keys: RevocationKeys,
    limit: Duration,
    publish: Lane,
    revocation: Lane,
    fleet: Lane,
    readers: Readers,
    schema: Arc<Schema>,
    wants: Arc<Wants>,
    stats: Arc<LinkStats>,
    start: watch::Receiver<Start>,
    link: Mutex<Option<mpsc::Receiver<FromLink>>>,
    _supervisor: AbortOnDropHandle<()>,
}

impl fmt::Debug for RedisBackplane {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RedisBackplane").field("stats", &self.stats).finish_non_exhaustive()
    }
}

impl RedisBackplane {
    /// Starts the tasks that connect, and returns at once, whether Redis is there or not.
    ///
    /// # Errors
    /// `ConfigError` where no waiting helps.
    ///
    /// # Panics
    /// Outside a tokio runtime.
    pub fn connect(config: RedisConfig, dice: Dice) -> Result<Self, ConfigError> {
        let dialer = Arc::new(config.dialer()?);
        let readers =
            Readers::new(&dialer, config.timeout).map_err(|e| ConfigError::BadUrl(e.category().to_owned()))?;
        let stats = Arc::new(LinkStats {
            skipped: AtomicU64::default(),
            relinks: AtomicU64::default(),
            n_ups: AtomicU64::default(),
            pubsub_up: AtomicBool::default(),
            deaf: AtomicBool::default(),
            publish_up: Arc::default(),
            read_up: AtomicBool::default(),
            revocation_up: Arc::default(),
            fleet_up: Arc::default(),
            trouble: Mutex::default(),
            dice: dice.clone(),
        });
        let lane = |up| Lane::start(dialer.clone(), config.timeout, dice.clone(), up);
        let control = Arc::new(lane(Arc::default()));
        let keys = Keys::new(&config.prefix);
        let schema = Arc::new(Schema::new(&config, keys.clone(), control.clone(), dialer.connect_timeout()));
        let wants = Arc::new(Wants::default());
        let life = format!("{}/{:016x}", config.node, dice.bits());
        let to_hub = (MAX_TO_HUB / config.max_message.max(1)).clamp(*TO_HUB.start(), *TO_HUB.end());
        let (out, link) = mpsc::channel(to_hub);
        let (started, start) = watch::channel(Start::Waiting);
        let supervisor = Supervisor {
            dialer: dialer.clone(),
            keys: keys.clone(),
            node: config.node.clone(),
            life: life.clone(),
            max_data: config.max_message,
            schema: schema.clone(),
            control,
            wants: wants.clone(),
            stats: stats.clone(),
            start: started,
            out,
        };
        Ok(Self {
            log: keys.log(),
            keys,
            node: config.node,
            life,
            revocation_keys: config.revocation_keys,
            limit: config.timeout,
            publish: lane(stats.publish_up.clone()),
            revocation: lane(stats.revocation_up.clone()),
            fleet: lane(stats.fleet_up.clone()),
            readers,
            schema,
            wants,
            stats,
            start,
            link: Mutex::new(Some(link)),
            _supervisor: AbortOnDropHandle::new(tokio::spawn(supervisor.run(Backoff::new(dice)))),
        })
    }

    /// Waits, however long, until the link was whole once.
    ///
    /// # Errors
    /// Only what waiting does not mend: a newer schema, a Redis that is too old.
    ///
    /// # Cancel safety
    /// Nothing is lost.
    pub async fn wait_ready(&self) -> Result<(), StartError> {
        pubsub::wait_ready(self.start.clone()).await
    }

    /// Counters and states, to look at whenever one likes.
    pub fn stats(&self) -> Arc<LinkStats> {
        self.stats.clone()
    }

    /// The call, and once more where a library had to be loaded first (a flushed or new server).
    async fn with_library<T, F: Future<Output = Result<T, Fault>>>(
        &self,
        call: impl Fn() -> F,
    ) -> Result<T, Unavailable> {
        let answer = match call().await {
            Err(Fault::Missing) => {
                self.schema.prepare().await.map_err(|e| Unavailable(e.to_string()))?;
                call().await
            }
            answer => answer,
        };
        Ok(answer?)
    }

    /// `with_library` under the deadline of one command.
    async fn bounded<T, F: Future<Output = Result<T, Fault>>>(&self, call: impl Fn() -> F) -> Result<T, Unavailable> {
        let late = |_| Err(Unavailable("no answer in time".to_owned()));
        tokio::time::timeout(self.limit, self.with_library(call)).await.unwrap_or_else(late)
    }

    async fn read_page(&self, ask: &ReadAsk) -> Result<log::Page, Unavailable> {
        let cmd = log::read_cmd(&self.log, ask);
        let answer = self.bounded(|| self.readers.call(&cmd)).await;
        self.stats.read_up.store(answer.is_ok(), Ordering::Relaxed);
        let page = log::page(&ask.channels, answer?)?;
        self.stats.skipped.fetch_add(page.n_skipped, Ordering::Relaxed);
        Ok(page)
    }

    /// Pages on over entries that are no events: an asker that gets none could not ask on.
    async fn read_events(&self, mut ask: ReadAsk) -> Result<Read, Unavailable> {
        let mut page = self.read_page(&ask).await?;
        while let (true, true, Some(last)) = (page.read.events.is_empty(), page.read.more, page.last) {
            for (_, since) in &mut ask.channels {
                if *since != Since::Here {
                    *since = Since::After(last);
                }
            }
            let next = self.read_page(&ask).await?;
            page = log::Page { read: log::join(page.read, last, next.read), ..next };
        }
        Ok(page.read)
    }
}

impl Backplane for RedisBackplane {
    fn publish(&self, event: Publish) -> BoxFuture<'_, Result<Published, Unavailable>> {
        Box::pin(async move {
            let cmd: Cmd = log::publish_cmd(&self.log, &event);
            let answer = self.bounded(|| self.publish.call(&cmd, Again::Never)).await?;
            Ok(log::published(answer)?)
        })
    }

    fn read(&self, ask: ReadAsk) -> BoxFuture<'_, Result<Read, Unavailable>> {
        Box::pin(self.read_events(ask))
    }

    fn want(&self, channel: &Channel) {
        self.wants.want(channel);
    }

    fn unwant(&self, channel: &Channel) {
        self.wants.unwant(channel);
    }

    fn beacon(&self) {
        self.wants.ask_beacon();
    }

    fn relink(&self) {
        self.wants.ask_relink();
    }

    /// # Panics
    /// When called a second time.
    fn link(&self) -> mpsc::Receiver<FromLink> {
        self.link.lock().expect("nothing panics while it is held").take().expect("the link is taken once")
    }

    fn revocations(&self, keys: Vec<RevocationKey>) -> BoxFuture<'_, Result<Vec<Option<String>>, Unavailable>> {
        Box::pin(async move {
            let question = Question::new(&self.keys, &self.revocation_keys, &keys);
            let values = match question.cmd() {
                Some(cmd) => self.revocation.call(cmd, Again::Once).await?,
                None => Vec::new(),
            };
            Ok(question.read(values))
        })
    }

    fn revoke(&self, revocation: Revocation, ttl: Duration) -> BoxFuture<'_, Result<(), Unavailable>> {
        Box::pin(async move {
            let cmd = revocation::revoke_cmd(&self.log, &revocation, ttl);
            self.bounded(|| self.revocation.call(&cmd, Again::Once)).await
        })
    }

    fn report(&self, body: String, ttl: Duration) -> BoxFuture<'_, Result<Fleet, Unavailable>> {
        Box::pin(async move {
            let cmd = fleet::report_cmd(&self.log, &self.life, &self.node, &body, ttl);
            let answer = self.bounded(|| self.fleet.call(&cmd, Again::Once)).await?;
            let (fleet, n_skipped) = fleet::fleet(&self.node, answer);
            self.stats.skipped.fetch_add(n_skipped, Ordering::Relaxed);
            Ok(fleet)
        })
    }

    fn retire(&self) -> BoxFuture<'_, Result<(), Unavailable>> {
        Box::pin(async move {
            let cmd = fleet::retire_cmd(&self.log, &self.life, &self.node);
            self.bounded(|| self.fleet.call(&cmd, Again::Once)).await
        })
    }

    fn hold(&self, hold: Option<(Duration, String)>) -> BoxFuture<'_, Result<Option<Hold>, Unavailable>> {
        Box::pin(async move {
            let cmd = fleet::hold_cmd(&self.log, &self.node, hold.as_ref());
            let held: Option<fleet::Held> = self.bounded(|| self.fleet.call(&cmd, Again::Once)).await?;
            Ok(held.and_then(fleet::hold))
        })
    }

    fn tell(&self, to: Option<Arc<str>>, text: String) -> BoxFuture<'_, Result<(), Unavailable>> {
        Box::pin(async move {
            if text.len() > MAX_TELL_BYTES {
                return Err(Unavailable(format!("a text has at most {MAX_TELL_BYTES} bytes")));
            }
            let pubsub = to.map_or_else(|| self.keys.ctl(), |node| self.keys.node(&node));
            let cmd = fleet::tell_cmd(&pubsub, &text);
            Ok(self.fleet.call(&cmd, Again::Never).await?)
        })
    }

    fn claim(&self, claims: Vec<Claim>, max: u32) -> BoxFuture<'_, Result<Vec<Claimed>, Unavailable>> {
        Box::pin(async move {
            let cmd = fleet::claim_cmd(&self.log, &self.life, &claims, max);
            // Again is the same again but for the places, which are those of the second time then.
            let answer: Vec<u64> = self.bounded(|| self.fleet.call(&cmd, Again::Once)).await?;
            Ok(fleet::claimed(claims.len(), &answer)?)
        })
    }

    fn release(&self, of: Vec<(Arc<str>, Arc<str>)>) -> BoxFuture<'_, Result<(), Unavailable>> {
        Box::pin(async move {
            let cmd = fleet::release_cmd(&self.log, &self.life, &of);
            self.bounded(|| self.fleet.call(&cmd, Again::Once)).await
        })
    }

    fn is_link_up(&self) -> bool {
        self.stats.pubsub_up.load(Ordering::Relaxed)
    }
}

/// Brings the server's schema up to this build's, for `tidegate migrate`. Gives up after a few
/// seconds.
///
/// # Errors
/// `MigrateError` says whether the configuration (exit 64) or the server (exit 69) is at fault.
pub async fn migrate(config: &RedisConfig, dice: Dice) -> Result<Prepared, MigrateError> {
    let schema = one_shot(config, dice)?;
    Ok(pubsub::within(ONE_SHOT, schema.prepare()).await?)
}

/// May this build use the server? Changes nothing.
///
/// # Errors
/// As `migrate`.
pub async fn check_version(config: &RedisConfig, dice: Dice) -> Result<(), MigrateError> {
    let schema = one_shot(config, dice)?;
    Ok(pubsub::within(ONE_SHOT, schema.check()).await?)
}

/// How long a command-line call tries. Longer than the lock that another migration may hold.
const ONE_SHOT: Duration = Duration::from_secs(8);

fn one_shot(config: &RedisConfig, dice: Dice) -> Result<Schema, ConfigError> {
    let dialer = Arc::new(config.dialer()?);
    let control = Arc::new(Lane::start(dialer.clone(), config.timeout, dice, Arc::default()));
    Ok(Schema::new(config, Keys::new(&config.prefix), control, dialer.connect_timeout()))
}

/// Why a one-shot command could not do its work.
#[derive(Debug, thiserror::Error)]
pub enum MigrateError {
    /// Exit 64.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// Exit 69.
    #[error(transparent)]
    Start(#[from] StartError),
}
