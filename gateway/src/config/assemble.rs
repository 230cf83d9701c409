//! Puts the configuration together: which variable fills which field. Decides nothing about a
//! value; that is `values`', `parse`'s and the table's.

use std::path::PathBuf;

use jsonwebtoken::Algorithm;
use rand::TryRng as _;

use super::read::Reader;
use super::*;

/// The environment of this process. Values that are no UTF-8 keep a replacement character, which
/// every variable refuses.
pub fn process_environment() -> Environment {
    let text = |s: std::ffi::OsString| s.to_string_lossy().into_owned();
    std::env::vars_os().map(|(name, value)| (text(name), text(value))).collect()
}

impl Config {
    /// Reads and checks everything; `names` are all names in the environment.
    ///
    /// # Errors
    /// Every fault at once: unknown names, bad values, contradictions. Print it and exit with 64.
    pub fn from_env(
        lookup: impl Fn(&str) -> Option<String>,
        names: impl Iterator<Item = String>,
    ) -> Result<Self, ConfigErrors> {
        Self::load(&lookup, names, Purpose::Look)
    }

    /// As `from_env`, from a map, with what `purpose` needs beyond.
    ///
    /// # Errors
    /// As `from_env`.
    pub fn from_environment(environment: &Environment, purpose: Purpose) -> Result<Self, ConfigErrors> {
        Self::load(&|name| environment.get(name).cloned(), environment.keys().cloned(), purpose)
    }

    fn load(
        lookup: &dyn Fn(&str) -> Option<String>,
        names: impl Iterator<Item = String>,
        purpose: Purpose,
    ) -> Result<Self, ConfigErrors> {
        let mut reader = Reader::new(lookup);
        reader.refuse_unknown(names);
        let mut config = Self::read(&mut reader, lookup);
        let mut relations = config.check();
        if purpose == Purpose::Serve {
            relations.extend(config.check_for_serving());
        }
        // A relation to a value that is bad anyway would only confuse: the default stands there.
        relations.retain(|relation| !relation.names.iter().any(|name| reader.is_bad(name)));
        reader.faults.extend(relations.into_iter().map(Fault::Contradiction));
        config.settings = in_table_order(std::mem::take(&mut reader.settings));
        if reader.faults.is_empty() { Ok(config) } else { Err(ConfigErrors(reader.faults)) }
    }

    fn read(r: &mut Reader<'_>, lookup: &dyn Fn(&str) -> Option<String>) -> Self {
        let listen = Listen::read(r);
        let (node, log) = (Node::read(r, lookup), Log::read(r));
        let auth = Auth::read(r);
        let revocation = Revocation::read(r);
        let redis = Redis::read(r);
        let admission = Admission::read(r);
        let session = Session::read(r);
        let history = History::read(r);
        let lifecycle = Lifecycle {
            max_age_min: r.duration("GATEWAY_MAX_AGE_MIN"),
            max_age_max: r.duration("GATEWAY_MAX_AGE_MAX"),
        };
        let drain = Drain {
            grace: r.duration("GATEWAY_DRAIN_GRACE"),
            window: r.window("GATEWAY_DRAIN_WINDOW"),
            deadline: r.duration("GATEWAY_DRAIN_DEADLINE"),
            termination_grace: r.maybe_duration("GATEWAY_TERMINATION_GRACE"),
            close_timeout: session.close_timeout,
        };
        if drain.deadline_in_force() < drain.deadline {
            r.computed("GATEWAY_DRAIN_DEADLINE", parse::show_duration(drain.deadline_in_force()));
        }
        let shed = Shed::read(r);
        let fleet = Fleet { report: r.duration("GATEWAY_FLEET_REPORT"), ttl: r.duration("GATEWAY_FLEET_TTL") };
        let admin = Admin::read(r);
        let idempotency_ttl = r.duration("GATEWAY_IDEMPOTENCY_TTL");
        let history = History { idempotency_ttl, ..history };
        let probes = Probes::read(r);
        Self {
            node,
            log,
            listen,
            auth,
            revocation,
            redis,
            admission,
            session,
            history,
            lifecycle,
            drain,
            shed,
            fleet,
            admin,
            probes,
            settings: Vec::new(),
        }
    }
}

impl Tools {
    /// Reads only what the commands need.
    ///
    /// # Errors
    /// Every fault in these few variables at once.
    pub fn from_environment(environment: &Environment) -> Result<Self, ConfigErrors> {
        let lookup = |name: &str| environment.get(name).cloned();
        let mut r = Reader::new(&lookup);
        let tools = Self {
            admin_listen: r.address("GATEWAY_ADMIN_LISTEN"),
            admin_key: r.secret("GATEWAY_ADMIN_KEY", |bytes| values::admin_key(text(bytes)?)),
            addr_file: addr_file(&mut r),
            jwt_secret: r.secret("GATEWAY_JWT_SECRET", values::hmac_secret),
            algorithms: algorithms(&mut r),
            issuers: strings(&mut r, "GATEWAY_JWT_ISSUER"),
            audiences: strings(&mut r, "GATEWAY_JWT_AUDIENCE"),
        };
        if r.faults.is_empty() { Ok(tools) } else { Err(ConfigErrors(r.faults)) }
    }
}

impl Auth {
    fn read(r: &mut Reader<'_>) -> Self {
        Self {
            jwt_secret: r.secret("GATEWAY_JWT_SECRET", values::hmac_secret),
            jwt_public_key: r.secret("GATEWAY_JWT_PUBLIC_KEY", |bytes| PublicKey::new(&text(bytes)?)),
            jwks_url: r.maybe("GATEWAY_JWT_JWKS_URL", |_, text| values::jwks_url(text)),
            jwks_file: r.path("GATEWAY_JWT_JWKS_FILE"),
            algorithms: algorithms(r),
            issuers: strings(r, "GATEWAY_JWT_ISSUER"),
            audiences: strings(r, "GATEWAY_JWT_AUDIENCE"),
            leeway: r.duration("GATEWAY_JWT_LEEWAY"),
            cookie: r.maybe("GATEWAY_AUTH_COOKIE", |_, text| parse::cookie_name(text)),
            is_query_allowed: r.switch("GATEWAY_AUTH_QUERY"),
            anonymous: r.list("GATEWAY_ANONYMOUS_CHANNELS", values::pattern, Ok).unwrap_or_default(),
            has_user_channel: r.switch("GATEWAY_USER_CHANNEL"),
            origins: r.list("GATEWAY_ALLOWED_ORIGINS", values::origin, Origins::from_entries).unwrap_or(Origins::Unset),
            timeout: r.duration("GATEWAY_AUTH_TIMEOUT"),
        }
    }
}

impl Listen {
    fn read(r: &mut Reader<'_>) -> Self {
        Self {
            public: r.address("GATEWAY_LISTEN"),
            admin: r.address("GATEWAY_ADMIN_LISTEN"),
            probes: r.address("GATEWAY_PROBE_LISTEN"),
            addr_file: addr_file(r),
            tls_cert_file: r.path("GATEWAY_TLS_CERT_FILE"),
            tls_key_file: r.path("GATEWAY_TLS_KEY_FILE"),
        }
    }
}

impl Admission {
    fn read(r: &mut Reader<'_>) -> Self {
        Self {
            accept_burst: r.count("GATEWAY_ACCEPT_BURST"),
            accept_rate: r.count("GATEWAY_ACCEPT_RATE"),
            accept_mode: r.value(
                "GATEWAY_ACCEPT_MODE",
                choice(&[("fixed", AcceptMode::Fixed), ("adaptive", AcceptMode::Adaptive)]),
            ),
            accept_rate_max: r.count("GATEWAY_ACCEPT_RATE_MAX"),
            handshakes: r.count("GATEWAY_HANDSHAKES"),
            head_timeout: r.duration("GATEWAY_HEAD_TIMEOUT"),
            ip_rate: r.count("GATEWAY_IP_RATE"),
            ip_burst: r.count("GATEWAY_IP_BURST"),
            trusted_proxies: r.list("GATEWAY_TRUSTED_PROXIES", Network::new, Ok).unwrap_or_default(),
            sse_refuse: r.value(
                "GATEWAY_SSE_REFUSE",
                choice(&[("auto", SseRefuse::Auto), ("status", SseRefuse::Status), ("soft", SseRefuse::Soft)]),
            ),
            ws_refuse: r.value("GATEWAY_WS_REFUSE", choice(&[("auto", WsRefuse::Auto), ("status", WsRefuse::Status)])),
        }
    }
}

impl Node {
    fn read(r: &mut Reader<'_>, lookup: &dyn Fn(&str) -> Option<String>) -> Self {
        let cores = || std::thread::available_parallelism().map_or(1, usize::from);
        let workers = r.count_or("GATEWAY_WORKERS", cores);
        let set = r.maybe("GATEWAY_NODE", |_, text| parse::name(text, 64, b"_-."));
        let name = set.unwrap_or_else(|| r.computed("GATEWAY_NODE", node_name(lookup)));
        Self { name, workers }
    }
}

impl Log {
    fn read(r: &mut Reader<'_>) -> Self {
        let is_filter = |text: &str| tracing_subscriber::EnvFilter::builder().parse(text).is_ok();
        Self {
            filter: r.value("GATEWAY_LOG", |_, text| is_filter(text).then(|| text.to_owned())),
            format: r.maybe("GATEWAY_LOG_FORMAT", choice(&[("text", LogFormat::Text), ("json", LogFormat::Json)])),
        }
    }
}

impl Revocation {
    fn read(r: &mut Reader<'_>) -> Self {
        let table::Unset::Value(default) = table::row("GATEWAY_REVOCATION_KEYS").default else {
            unreachable!("the row has a default")
        };
        let layout = |text: &str| parse::list(text, RevocationKeys::entry).and_then(RevocationKeys::from_entries);
        Self {
            keys: r
                .list("GATEWAY_REVOCATION_KEYS", RevocationKeys::entry, RevocationKeys::from_entries)
                .unwrap_or_else(|| layout(default).expect("the default layout is good")),
            sweep: r.duration("GATEWAY_REVOCATION_SWEEP"),
            unavailable: r.value(
                "GATEWAY_REVOCATION_UNAVAILABLE",
                choice(&[("refuse", WhenUnavailable::Refuse), ("allow", WhenUnavailable::Allow)]),
            ),
            ttl: r.duration("GATEWAY_REVOCATION_TTL"),
        }
    }
}

impl Redis {
    fn read(r: &mut Reader<'_>) -> Self {
        let password = |bytes| {
            let password = text(bytes)?;
            if password.trim().is_empty() { Err("is blank".to_owned()) } else { Ok(Secret::new(password)) }
        };
        Self {
            url: r.secret("GATEWAY_REDIS_URL", |bytes| RedisUrl::new(text(bytes)?.trim())),
            password: r.secret("GATEWAY_REDIS_PASSWORD", password),
            ca_file: r.path("GATEWAY_REDIS_CA_FILE"),
            prefix: r.value("GATEWAY_REDIS_PREFIX", |_, text| values::redis_prefix(text)),
            timeout: r.duration("GATEWAY_REDIS_TIMEOUT"),
            partitions: r.count("GATEWAY_PARTITIONS"),
        }
    }
}

impl Session {
    fn read(r: &mut Reader<'_>) -> Self {
        let code = || choice(&[("1001", 1001), ("1012", 1012), ("1013", 1013)]);
        Self {
            max_sessions: r.count("GATEWAY_MAX_SESSIONS"),
            max_per_user: Some(r.count("GATEWAY_MAX_SESSIONS_PER_USER")).filter(|n| *n > 0),
            max_channels: r.count("GATEWAY_MAX_CHANNELS"),
            max_message_bytes: r.size("GATEWAY_MAX_MESSAGE"),
            client_rate: r.count("GATEWAY_CLIENT_RATE"),
            client_burst: r.count("GATEWAY_CLIENT_BURST"),
            heartbeat: r.duration("GATEWAY_HEARTBEAT"),
            heartbeat_timeout: r.duration("GATEWAY_HEARTBEAT_TIMEOUT"),
            outbox_bytes: r.size("GATEWAY_OUTBOX_BYTES"),
            write_timeout: r.duration("GATEWAY_WRITE_TIMEOUT"),
            close_timeout: r.duration("GATEWAY_CLOSE_TIMEOUT"),
            planned_codes: PlannedCodes {
                drain: r.value("GATEWAY_CLOSE_CODE_DRAIN", code()),
                recycle: r.value("GATEWAY_CLOSE_CODE_RECYCLE", code()),
                shed: r.value("GATEWAY_CLOSE_CODE_SHED", code()),
            },
        }
    }
}

impl History {
    /// All but `idempotency_ttl`, which stands elsewhere in the table.
    fn read(r: &mut Reader<'_>) -> Self {
        Self {
            size: r.count("GATEWAY_HISTORY_SIZE"),
            ttl: r.duration("GATEWAY_HISTORY_TTL"),
            replay_max: r.count("GATEWAY_REPLAY_MAX"),
            idempotency_ttl: Duration::ZERO,
        }
    }
}

impl Shed {
    fn read(r: &mut Reader<'_>) -> Self {
        Self {
            mode: r.value(
                "GATEWAY_SHED",
                choice(&[("on", ShedMode::On), ("off", ShedMode::Off), ("dry-run", ShedMode::DryRun)]),
            ),
            tolerance: r.ratio("GATEWAY_SHED_TOLERANCE"),
            fraction: r.ratio("GATEWAY_SHED_FRACTION"),
            interval: r.duration("GATEWAY_SHED_INTERVAL"),
        }
    }
}

impl Admin {
    fn read(r: &mut Reader<'_>) -> Self {
        Self {
            key: r.secret("GATEWAY_ADMIN_KEY", |bytes| values::admin_key(text(bytes)?)),
            hosts: r.list("GATEWAY_ADMIN_HOSTS", parse::host, Ok).unwrap_or_default(),
        }
    }
}

impl Probes {
    fn read(r: &mut Reader<'_>) -> Self {
        Self {
            live_stale: r.duration("GATEWAY_LIVE_STALE"),
            ready_headroom: r.ratio("GATEWAY_READY_HEADROOM"),
            ready_lag: r.duration("GATEWAY_READY_LAG"),
            looks_at_redis: r.switch("GATEWAY_READY_REDIS"),
            redis_grace: r.duration("GATEWAY_READY_REDIS_GRACE"),
        }
    }
}

fn in_table_order(mut settings: Vec<Setting>) -> Vec<Setting> {
    let place = |name: &str| table::variables().position(|v| v.name == name);
    settings.sort_by_key(|setting| place(setting.name));
    settings
}

fn choice<T: Copy>(words: &'static [(&'static str, T)]) -> impl Fn(table::Kind, &str) -> Option<T> {
    move |_, text| words.iter().find(|(word, _)| *word == text).map(|(_, value)| *value)
}

fn addr_file(r: &mut Reader<'_>) -> Option<PathBuf> {
    r.maybe("GATEWAY_ADDR_FILE", |_, text| Some(PathBuf::from(text)))
}

fn algorithms(r: &mut Reader<'_>) -> Vec<Algorithm> {
    r.list("GATEWAY_JWT_ALGORITHMS", values::algorithm, Ok).unwrap_or_default()
}

fn strings(r: &mut Reader<'_>, name: &'static str) -> Vec<String> {
    r.list(name, |entry| (!entry.is_empty()).then(|| entry.to_owned()), Ok).unwrap_or_default()
}

fn text(bytes: Vec<u8>) -> Result<String, String> {
    String::from_utf8(bytes).map_err(|_| "is not valid UTF-8".to_owned())
}

/// The host's name and eight random digits: a restarted host is a new node to its fleet.
fn node_name(lookup: &dyn Fn(&str) -> Option<String>) -> String {
    let host =
        lookup("HOSTNAME").or_else(|| std::fs::read_to_string("/proc/sys/kernel/hostname").ok()).unwrap_or_default();
    let fits = |c: char| if c.is_ascii_alphanumeric() || "_-.".contains(c) { c } else { '-' };
    let host: String = host.trim().chars().take(48).map(fits).collect();
    let host = if host.is_empty() { "node" } else { &host };
    let random = rand::rngs::SysRng.try_next_u32().expect("the system has random numbers");
    format!("{host}-{random:08x}")
}
