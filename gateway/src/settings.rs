//! From the environment's words to what each part is told: every part receives its own typed
//! settings by value, and nobody stores the whole. Decides what of a valid configuration this build
//! cannot do, and says so at the start rather than do something else; and how the descriptors that the system
//! allows are shared out (`descriptors`).

mod descriptors;

use std::fs;
use std::io::{self, Write};
use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::Duration;

use edge::address::TrustedProxies;
use edge::admit::GateConfig;
use edge::credential::{CredentialConfig, QueryToken};
use edge::origin::OriginPolicy;
use edge::reject::{RefuseModes, SseRefuse, WsRefuse};
use hub::auth::{AuthConfig, KeySource, Secret, UserChannel};
use hub::balance::BalanceConfig;
use hub::departure::{DrainConfig, Window};
use hub::fleet::FleetConfig;
use hub::hub::HubConfig;
use hub::limit::Adaptive;
use hub::message::Backoff;
use hub::revocation::{Company, RevocationConfig, WhenUnavailable};
use hub::session::SessionConfig;
use hub::shed::{ShedConfig, ShedMode};
use redis_backplane::{RedisConfig, RevocationKeys};
use tokio::time::Instant;

use crate::config::{self, AcceptMode, Config, Key, Origins, RedisScheme};
use crate::run::{Addresses, RunError};

pub use descriptors::{capacity, fit};

/// The longest time without an id before a quiet session is told its position (contract).
const POSITION_AT_MOST: Duration = Duration::from_secs(5 * 60);

/// What this build does not do yet is refused by name, not ignored.
///
/// # Errors
/// `RunError::Config`, exit 64.
pub fn refuse_what_is_not_there(config: &Config) -> Result<(), RunError> {
    let mut missing = Vec::new();
    if config.listen.tls().is_some() {
        missing.push("GATEWAY_TLS_CERT_FILE, GATEWAY_TLS_KEY_FILE: this build ends no TLS, let the balancer do it");
    }
    match config.redis.url.as_ref().map(|url| url.scheme) {
        Some(RedisScheme::Cluster) => missing.push("GATEWAY_REDIS_URL: this build speaks to no Redis Cluster"),
        Some(RedisScheme::Sentinel) => missing.push("GATEWAY_REDIS_URL: this build asks no Sentinel"),
        _ => {}
    }
    if missing.is_empty() {
        return Ok(());
    }
    Err(RunError::Config(format!("not in this build:\n  {}", missing.join("\n  "))))
}

/// A seed for all chance of this process; logged, so that a run can be told again.
pub fn seed() -> u64 {
    use std::hash::{BuildHasher, RandomState};
    RandomState::new().hash_one(std::process::id())
}

/// Says where it listens: one line on stderr, and the file that scripts read.
///
/// # Errors
/// The file cannot be written.
pub fn announce(config: &Config, at: &Addresses, seed: u64) -> io::Result<()> {
    let line = format!("listening public={} admin={} probes={}\n", at.public, at.admin, at.probes);
    io::stderr().write_all(line.as_bytes())?;
    tracing::info!(
        node = config.node.name,
        seed,
        version = crate::run::VERSION,
        leeway_s = config.auth.leeway.as_secs(),
        "starting"
    );
    if let Some(path) = &config.listen.addr_file {
        let json = serde_json::json!({
            "public": at.public.to_string(),
            "admin": at.admin.to_string(),
            "probes": at.probes.to_string(),
        });
        // Renamed into place: a reader never sees half of it.
        let beside = path.with_extension("tmp");
        fs::write(&beside, json.to_string())?;
        fs::rename(&beside, path)?;
    }
    Ok(())
}

/// What tokens are checked with.
///
/// # Errors
/// `RunError::Config` where a key file cannot be read or there is no key.
pub fn auth(config: &Config) -> Result<AuthConfig, RunError> {
    let auth = &config.auth;
    let keys =
        match auth.key() {
            Some(Key::Secret(secret)) => KeySource::Secret(Secret::new(secret.expose().clone())),
            Some(Key::Public(key)) => KeySource::PublicKeyPem(key.pem.clone().into_bytes()),
            Some(Key::JwksFile(path)) => KeySource::Jwks(fs::read_to_string(path).map_err(|e| {
                RunError::Config(format!("GATEWAY_JWT_JWKS_FILE: {} cannot be read: {e}", path.display()))
            })?),
            Some(Key::JwksUrl(_)) => KeySource::Awaited,
            None => return Err(RunError::Config("no JWT key is set".to_owned())),
        };
    let some = |list: &Vec<String>| (!list.is_empty()).then(|| list.clone());
    Ok(AuthConfig {
        keys,
        algorithms: (!auth.algorithms.is_empty()).then(|| auth.algorithms.clone()),
        issuer: some(&auth.issuers),
        audience: some(&auth.audiences),
        leeway: auth.leeway,
        user_channel: if auth.has_user_channel { UserChannel::On } else { UserChannel::Off },
        max_channels: config.session.max_channels,
        anonymous: (!auth.anonymous.is_empty()).then(|| auth.anonymous.clone()),
    })
}

/// Admissions a second that may each ask Redis a question of their own: at 40 us of Redis a command
/// (measured in a storm) 4 % of one. What the accept bucket lets in then stays evenly spread.
const FEW_A_SECOND: u32 = 1_000;

/// How the revocation list is asked.
pub fn revocation(config: &Config) -> RevocationConfig {
    let is_few = config.admission.accept_rate <= FEW_A_SECOND && config.admission.accept_mode == AcceptMode::Fixed;
    RevocationConfig {
        when_unavailable: match config.revocation.unavailable {
            config::WhenUnavailable::Refuse => WhenUnavailable::Refuse,
            config::WhenUnavailable::Allow => WhenUnavailable::Allow,
        },
        deadline: config.auth.timeout,
        remember: config.revocation.ttl,
        company: if is_few { Company::Unneeded } else { Company::Awaited },
    }
}

/// What the node obeys.
pub fn hub(config: &Config, capacity: usize) -> HubConfig {
    let (session, drain) = (&config.session, &config.drain);
    HubConfig {
        node: Arc::from(config.node.name.as_str()),
        capacity,
        max_channels: session.max_channels,
        max_message: session.max_message_bytes,
        replay_max: config.history.replay_max,
        auth_timeout: config.auth.timeout,
        max_age: config.lifecycle.max_age(),
        revocation_sweep: config.revocation.sweep,
        fleet: fleet(config),
        drain: DrainConfig {
            grace: drain.grace,
            window: drain.window.map_or(Window::Auto, Window::Fixed),
            deadline: drain.deadline_in_force(),
            takes_per_second: f64::from(config.admission.accept_rate) / 2.0,
        },
        session: SessionConfig {
            outbox_bytes: session.outbox_bytes,
            write_timeout: session.write_timeout,
            close_timeout: session.close_timeout,
            heartbeat: session.heartbeat,
            heartbeat_timeout: session.heartbeat_timeout,
            position_every: (config.history.ttl / 4).min(POSITION_AT_MOST),
            client_rate: f64::from(session.client_rate),
            client_burst: f64::from(session.client_burst),
            planned: session.planned_codes,
            reconnect: Backoff::default(),
        },
    }
}

/// What the node tells of itself, and what it limits over the fleet.
fn fleet(config: &Config) -> FleetConfig {
    FleetConfig {
        version: crate::run::VERSION,
        report_every: config.fleet.report,
        ttl: config.fleet.ttl,
        max_sessions_per_user: config.session.max_per_user.and_then(NonZeroU32::new),
    }
}

/// How sessions move to emptier nodes.
pub fn shed(config: &Config) -> ShedConfig {
    let shed = &config.shed;
    ShedConfig {
        mode: match shed.mode {
            config::ShedMode::On => ShedMode::On,
            config::ShedMode::Off => ShedMode::Off,
            config::ShedMode::DryRun => ShedMode::DryRun,
        },
        balance: BalanceConfig {
            tolerance: shed.tolerance,
            fraction: shed.fraction,
            interval: shed.interval,
            report_every: config.fleet.report,
        },
    }
}

/// What moves the accept rate, where something does.
pub fn adaptive(config: &Config) -> Option<Adaptive> {
    let admission = &config.admission;
    let (floor, ceiling) = (f64::from(admission.accept_rate), f64::from(admission.accept_rate_max));
    (admission.accept_mode == AcceptMode::Adaptive).then(|| Adaptive::new(floor, ceiling, Instant::now()))
}

/// How newcomers are looked at. The browser client is the caller's to add.
///
/// # Errors
/// `RunError::Config` for an origin or a network that the edge reads otherwise than the configuration.
pub fn gate(config: &Config) -> Result<GateConfig, RunError> {
    let auth = &config.auth;
    let origins: Vec<&str> = match &auth.origins {
        Origins::Unset => Vec::new(),
        Origins::Any => vec!["*"],
        Origins::Listed(origins) => origins.iter().map(String::as_str).collect(),
    };
    let networks = config.admission.trusted_proxies.iter().map(|n| format!("{}/{}", n.address, n.prefix).parse());
    Ok(GateConfig {
        credential: CredentialConfig {
            cookie: auth.cookie.clone(),
            query: if auth.is_query_allowed { QueryToken::On } else { QueryToken::Off },
        },
        origin: OriginPolicy::parse(origins).map_err(|e| RunError::Config(format!("GATEWAY_ALLOWED_ORIGINS: {e}")))?,
        proxies: TrustedProxies::new(
            networks
                .collect::<Result<_, _>>()
                .map_err(|e| RunError::Config(format!("GATEWAY_TRUSTED_PROXIES: {e}")))?,
        ),
        refuse: RefuseModes {
            sse: match config.admission.sse_refuse {
                config::SseRefuse::Auto => SseRefuse::Auto,
                config::SseRefuse::Status => SseRefuse::Status,
                config::SseRefuse::Soft => SseRefuse::Soft,
            },
            ws: match config.admission.ws_refuse {
                config::WsRefuse::Auto => WsRefuse::Auto,
                config::WsRefuse::Status => WsRefuse::Status,
            },
        },
        auth_timeout: auth.timeout,
        client_js: "",
        planned: config.session.planned_codes,
    })
}

/// The shared world, where one is configured.
///
/// # Errors
/// `RunError::Config` for revocation keys that the backplane reads otherwise than the configuration.
pub fn redis(config: &Config) -> Result<Option<RedisConfig>, RunError> {
    let redis = &config.redis;
    let Some(url) = &redis.url else { return Ok(None) };
    Ok(Some(RedisConfig {
        url: url.url.expose().clone(),
        password: redis.password.as_ref().map(|password| password.expose().clone()),
        ca_file: redis.ca_file.clone(),
        prefix: redis.prefix.clone(),
        timeout: redis.timeout,
        node: config.node.name.clone(),
        history_size: config.history.size as u64,
        history_ttl: config.history.ttl,
        idempotency_ttl: config.history.idempotency_ttl,
        max_message: config.session.max_message_bytes,
        revocation_keys: revocation_keys(&config.revocation.keys)?,
    }))
}

fn revocation_keys(keys: &config::RevocationKeys) -> Result<RevocationKeys, RunError> {
    let kinds = [("jti", &keys.jti), ("sid", &keys.sid), ("sub", &keys.sub)];
    let text: Vec<String> =
        kinds.into_iter().filter_map(|(kind, template)| Some(format!("{kind}={}", template.as_ref()?))).collect();
    RevocationKeys::parse(&text.join(",")).map_err(|e| RunError::Config(format!("GATEWAY_REVOCATION_KEYS: {e}")))
}
