//! The schema on the server: its version, the Function libraries, the settings that the Functions
//! read. Decides whether this node may use a server at all, and repairs what a flushed, replaced
//! or upgraded server lacks.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::Semaphore;

use crate::RedisConfig;
use crate::dial::Fault;
use crate::keys::Keys;
use crate::lane::{Again, Lane};

/// A Function library, as `tidegate migrate` loads it.
struct Library {
    /// Names the revision that a server holds.
    version: &'static str,
    code: &'static str,
    /// The number of the migration that it comes from. A server may hold a later one: it serves
    /// earlier nodes too.
    revision: u64,
}

const LIBRARIES: [Library; 2] = [
    Library { version: "tidegate_version", code: include_str!("../../../migrations/0001_log.lua"), revision: 1 },
    Library {
        version: "tidegate_fleet_version",
        code: include_str!("../../../migrations/0003_fleet.lua"),
        revision: 3,
    },
];

/// The schema's major version: the highest that this build understands.
pub const SCHEMA: u64 = 1;

/// Who loads a library holds a lock for so long at most.
const LOCK: Duration = Duration::from_secs(5);

/// Why the server cannot be used.
#[derive(Clone, Debug, thiserror::Error)]
pub enum StartError {
    /// A later version of Tidegate has migrated this prefix.
    #[error("the Redis schema has version {found}, this build understands up to {known}: run a newer tidegate")]
    NewerSchema {
        /// The server's.
        found: u64,
        /// Ours.
        known: u64,
    },
    /// Functions need Redis 7.
    #[error("redis is too old: {0}, 7.0 is needed")]
    TooOld(String),
    /// Not now: absent, loading, wrong password, no permission. Trying again may help.
    #[error("redis does not answer: {0}")]
    Unreachable(String),
}

impl From<Fault> for StartError {
    fn from(fault: Fault) -> Self {
        StartError::Unreachable(fault.text())
    }
}

impl StartError {
    /// Does waiting not help?
    pub fn is_final(&self) -> bool {
        !matches!(self, StartError::Unreachable(_))
    }
}

/// What `Schema::prepare` found and did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Prepared {
    /// At least one library was loaded now.
    pub loaded: bool,
    /// The number of the newest migration in force.
    pub revision: u64,
}

pub(crate) struct Schema {
    control: Arc<Lane>,
    keys: Keys,
    node: String,
    conf: Vec<(&'static str, String)>,
    limit: Duration,
    /// One at a time: the callers that found a library missing come together.
    gate: Semaphore,
}

impl Schema {
    pub(crate) fn new(config: &RedisConfig, keys: Keys, control: Arc<Lane>, limit: Duration) -> Self {
        let conf = vec![
            ("history_size", config.history_size.to_string()),
            ("history_ttl_ms", config.history_ttl.as_millis().to_string()),
            ("idempotency_ttl_ms", config.idempotency_ttl.as_millis().to_string()),
            ("max_message", config.max_message.to_string()),
        ];
        Self { control, keys, node: config.node.clone(), conf, limit, gate: Semaphore::new(1) }
    }

    /// Makes the server fit for this node: version, libraries, settings. Cheap when it already is.
    ///
    /// # Cancel safety
    /// Every step is whole by itself; a dropped call leaves at most a lock that expires.
    pub(crate) async fn prepare(&self) -> Result<Prepared, StartError> {
        let _turn = self.gate.acquire().await.expect("never closed");
        self.check().await?;
        let schema = redis::cmd("SET").arg(self.keys.schema()).arg(SCHEMA).arg("NX").to_owned();
        self.call::<Option<String>>(&schema).await?;
        let mut prepared = Prepared { loaded: false, revision: 0 };
        for library in &LIBRARIES {
            let found = self.ensure(library).await?;
            prepared.loaded |= found.loaded;
            prepared.revision = prepared.revision.max(found.revision);
        }
        self.settings().await?;
        Ok(prepared)
    }

    /// May this build use the server? Changes nothing.
    pub(crate) async fn check(&self) -> Result<(), StartError> {
        let info: String = self.call(redis::cmd("INFO").arg("server")).await?;
        let version = info.lines().find_map(|l| l.strip_prefix("redis_version:")).unwrap_or_default().trim();
        let major = version.split('.').next().and_then(|m| m.parse().ok()).unwrap_or(0);
        if major < 7 {
            return Err(StartError::TooOld(version.to_owned()));
        }
        let found: Option<String> = self.call(redis::cmd("GET").arg(self.keys.schema())).await?;
        match found.map(|f| f.parse::<u64>().unwrap_or(u64::MAX)) {
            Some(found) if found > SCHEMA => Err(StartError::NewerSchema { found, known: SCHEMA }),
            _ => Ok(()),
        }
    }

    async fn ensure(&self, library: &Library) -> Result<Prepared, StartError> {
        let mut loaded = false;
        let mut patience = LOCK.as_millis() / 100;
        loop {
            match self.revision(library).await? {
                Some(revision) if revision >= library.revision => return Ok(Prepared { loaded, revision }),
                _ => {}
            }
            if self.lock().await? || patience == 0 {
                self.call::<String>(redis::cmd("FUNCTION").arg("LOAD").arg("REPLACE").arg(library.code)).await?;
                self.call::<i64>(redis::cmd("DEL").arg(self.keys.lock())).await?;
                tracing::info!(revision = library.revision, "function library loaded");
                loaded = true;
            } else {
                patience -= 1;
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
        }
    }

    async fn lock(&self) -> Result<bool, Fault> {
        let ttl = u64::try_from(LOCK.as_millis()).expect("seconds");
        let lock = redis::cmd("SET").arg(self.keys.lock()).arg(&self.node).arg("NX").arg("PX").arg(ttl).to_owned();
        Ok(self.call::<Option<String>>(&lock).await?.is_some())
    }

    /// Of this library on the server, if it is there.
    async fn revision(&self, library: &Library) -> Result<Option<u64>, Fault> {
        match self.call(redis::cmd("FCALL").arg(library.version).arg(0)).await {
            Ok(revision) => Ok(Some(revision)),
            Err(Fault::Missing) => Ok(None),
            Err(fault) => Err(fault),
        }
    }

    /// Writes `<prefix>:conf` where it differs. The last node to start wins, and says so.
    async fn settings(&self) -> Result<(), StartError> {
        let mut wanted = self.conf.clone();
        wanted.push(("fsync", self.fsync().await.to_owned()));
        let stored: HashMap<String, String> = self.call(redis::cmd("HGETALL").arg(self.keys.conf())).await?;
        let differing: Vec<_> = wanted.iter().filter(|(name, value)| stored.get(*name) != Some(value)).collect();
        if differing.is_empty() {
            return Ok(());
        }
        for (name, value) in &differing {
            if let Some(stored) = stored.get(*name) {
                tracing::warn!(
                    setting = name,
                    stored,
                    ours = value,
                    "another node wrote another setting, ours replaces it"
                );
            }
        }
        let mut write = redis::cmd("HSET");
        write.arg(self.keys.conf());
        for (name, value) in &differing {
            write.arg(*name).arg(value);
        }
        self.call::<i64>(&write).await?;
        Ok(())
    }

    /// `always` only where every acknowledged write survives a kill of the server. A server that
    /// does not say (CONFIG may be forbidden) counts as one that may forget.
    async fn fsync(&self) -> &'static str {
        for (name, needed) in [("appendonly", "yes"), ("appendfsync", "always")] {
            let got: Result<Vec<String>, Fault> = self.call(redis::cmd("CONFIG").arg("GET").arg(name)).await;
            if got.ok().and_then(|pair| pair.into_iter().nth(1)).as_deref() != Some(needed) {
                return "other";
            }
        }
        "always"
    }

    async fn call<T: redis::FromRedisValue>(&self, cmd: &redis::Cmd) -> Result<T, Fault> {
        self.control.call_within(self.limit, cmd, Again::Once).await
    }
}
