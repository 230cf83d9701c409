//! How values bear each other: contradictions, which stop the start, and warnings, which do not.
//! Every broken relation is returned, not the first. The defaults break none and warn of none.

use std::fmt;
use std::net::SocketAddr;
use std::time::Duration;

use jsonwebtoken::{Algorithm, AlgorithmFamily};

use super::parse::{show_duration, show_size};
use super::values::{Origins, RedisScheme};
use super::{AcceptMode, Config, Drain, Key};

/// Idle connections are cut after 60 s by most proxies and balancers in their default settings.
const COMMON_IDLE_CUT: Duration = Duration::from_secs(60);
/// What an event's frame has beside its `data`, at most: channel, name, id and field names.
const ENVELOPE_BYTES: usize = 1024;
/// Shortest admin key that cannot be tried out in reasonable time.
const STRONG_KEY_BYTES: usize = 16;

/// Variables whose values do not go together, and why.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Relation {
    /// All the variables concerned.
    pub names: Vec<String>,
    /// One sentence for the operator, with the values.
    pub why: String,
}

impl fmt::Display for Relation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.names.join(", "), self.why)
    }
}

/// Relations found broken so far.
#[derive(Default)]
struct Broken(Vec<Relation>);

impl Broken {
    fn when(&mut self, is_broken: bool, names: &[&str], why: impl FnOnce() -> String) {
        if is_broken {
            let names = names.iter().map(|n| (*n).to_owned()).collect();
            self.0.push(Relation { names, why: why() });
        }
    }
}

impl Config {
    /// Every contradiction, in the table's order. Empty: the gateway may start.
    pub fn check(&self) -> Vec<Relation> {
        let mut broken = Broken::default();
        self.check_listeners(&mut broken);
        self.check_credentials(&mut broken);
        self.check_redis(&mut broken);
        self.check_sessions(&mut broken);
        self.check_leaving(&mut broken);
        self.check_termination(&mut broken);
        self.check_fleet(&mut broken);
        broken.0
    }

    /// What `serve` needs beyond `check`: a key to check tokens with.
    pub fn check_for_serving(&self) -> Vec<Relation> {
        let mut broken = Broken::default();
        broken.when(self.auth.key().is_none(), &KEYS, || {
            "no token could be checked: one of them is needed (`tidegate dev` makes its own)".to_owned()
        });
        broken.0
    }

    /// What is allowed but probably not meant, in the table's order. Told once at start.
    pub fn warnings(&self) -> Vec<Relation> {
        let mut doubtful = Broken::default();
        self.doubt_security(&mut doubtful);
        self.doubt_redis(&mut doubtful);
        self.doubt_sessions(&mut doubtful);
        self.doubt_termination(&mut doubtful);
        self.doubt_fleet(&mut doubtful);
        doubtful.0
    }

    fn check_listeners(&self, broken: &mut Broken) {
        let listeners = [
            ("GATEWAY_LISTEN", self.listen.public),
            ("GATEWAY_ADMIN_LISTEN", self.listen.admin),
            ("GATEWAY_PROBE_LISTEN", self.listen.probes),
        ];
        for (i, (name, address)) in listeners.iter().enumerate() {
            for (other_name, other) in &listeners[i + 1..] {
                broken.when(overlap(*address, *other), &[name, other_name], || {
                    format!("{address} and {other} are the same place; the listeners are never shared")
                });
            }
        }
        broken.when(
            !self.listen.admin.ip().to_canonical().is_loopback() && self.admin.key.is_none(),
            &["GATEWAY_ADMIN_LISTEN", "GATEWAY_ADMIN_KEY"],
            || format!("{} is reachable from other hosts, which needs a key", self.listen.admin),
        );
        broken.when(
            self.listen.tls_cert_file.is_some() != self.listen.tls_key_file.is_some(),
            &["GATEWAY_TLS_CERT_FILE", "GATEWAY_TLS_KEY_FILE"],
            || "TLS needs both or neither".to_owned(),
        );
    }

    fn check_credentials(&self, broken: &mut Broken) {
        let auth = &self.auth;
        let is_set = [
            auth.jwt_secret.is_some(),
            auth.jwt_public_key.is_some(),
            auth.jwks_url.is_some(),
            auth.jwks_file.is_some(),
        ];
        let set: Vec<&str> = KEYS.iter().zip(is_set).filter(|(_, set)| *set).map(|(name, _)| *name).collect();
        broken.when(set.len() > 1, &set, || "only one kind of key may be set".to_owned());
        if let [name] = set[..] {
            let unfit: Vec<String> = auth
                .algorithms
                .iter()
                .filter(|a| !auth.key().is_some_and(|k| k.fits(**a)))
                .map(|a| format!("{a:?}"))
                .collect();
            broken.when(!unfit.is_empty(), &["GATEWAY_JWT_ALGORITHMS", name], || {
                format!("{} does not fit this kind of key", unfit.join(", "))
            });
        }
        broken.when(
            auth.origins == Origins::Any && auth.cookie.is_some(),
            &["GATEWAY_ALLOWED_ORIGINS", "GATEWAY_AUTH_COOKIE"],
            || "with a cookie, * would let any web page act as its visitor".to_owned(),
        );
    }

    fn check_redis(&self, broken: &mut Broken) {
        let redis = &self.redis;
        let is_cluster = redis.url.as_ref().is_some_and(|u| u.scheme == RedisScheme::Cluster);
        broken.when(redis.partitions > 1 && !is_cluster, &["GATEWAY_PARTITIONS", "GATEWAY_REDIS_URL"], || {
            format!("{} partitions need a redis+cluster:// URL", redis.partitions)
        });
        broken.when(
            redis.password.is_some() && redis.url.as_ref().is_some_and(|u| u.has_password),
            &["GATEWAY_REDIS_PASSWORD", "GATEWAY_REDIS_URL"],
            || "the password may stand in one of them only".to_owned(),
        );
    }

    fn check_sessions(&self, broken: &mut Broken) {
        let admission = &self.admission;
        broken.when(
            admission.accept_mode == AcceptMode::Adaptive && admission.accept_rate_max < admission.accept_rate,
            &["GATEWAY_ACCEPT_RATE_MAX", "GATEWAY_ACCEPT_RATE", "GATEWAY_ACCEPT_MODE"],
            || {
                format!(
                    "the adaptive maximum {} is below the rate {}",
                    admission.accept_rate_max, admission.accept_rate
                )
            },
        );
        let session = &self.session;
        broken.when(
            session.outbox_bytes < session.max_message_bytes,
            &["GATEWAY_OUTBOX_BYTES", "GATEWAY_MAX_MESSAGE"],
            || {
                let (outbox, message) =
                    (show_size(session.outbox_bytes as u64), show_size(session.max_message_bytes as u64));
                format!("an outbox of {outbox} cannot hold one message of {message}")
            },
        );
        broken.when(
            self.probes.live_stale <= self.probes.ready_lag,
            &["GATEWAY_LIVE_STALE", "GATEWAY_READY_LAG"],
            || {
                let (live, ready) = (show_duration(self.probes.live_stale), show_duration(self.probes.ready_lag));
                format!("liveness ({live}) would restart the node before readiness ({ready}) took load off it")
            },
        );
    }

    fn check_leaving(&self, broken: &mut Broken) {
        let (age, drain) = (&self.lifecycle, &self.drain);
        let (min, max) = (age.max_age_min, age.max_age_max);
        let names = ["GATEWAY_MAX_AGE_MIN", "GATEWAY_MAX_AGE_MAX"];
        broken.when(min.is_zero() != max.is_zero(), &names, || {
            "0s turns recycling off, but only when both are 0s".to_owned()
        });
        broken.when(!min.is_zero() && !max.is_zero() && min > max, &names, || {
            format!("the least age {} is above the greatest {}", show_duration(min), show_duration(max))
        });
        let (grace, close, deadline) = (drain.grace, drain.close_timeout, drain.deadline);
        match drain.window {
            None => broken.when(
                grace + close >= deadline,
                &["GATEWAY_DRAIN_GRACE", "GATEWAY_CLOSE_TIMEOUT", "GATEWAY_DRAIN_DEADLINE"],
                || {
                    format!(
                        "{} + {} leave no time before the deadline {}",
                        show_duration(grace),
                        show_duration(close),
                        show_duration(deadline)
                    )
                },
            ),
            Some(window) => broken.when(
                grace + window + close > deadline,
                &["GATEWAY_DRAIN_GRACE", "GATEWAY_DRAIN_WINDOW", "GATEWAY_CLOSE_TIMEOUT", "GATEWAY_DRAIN_DEADLINE"],
                || {
                    let parts = [grace, window, close].map(show_duration).join(" + ");
                    format!("{parts} are longer than the deadline {}", show_duration(deadline))
                },
            ),
        }
    }

    fn check_termination(&self, broken: &mut Broken) {
        let drain = &self.drain;
        let Some(killed) = drain.termination_grace else { return };
        let needed = drain.grace + drain.close_timeout + Drain::EXIT;
        broken.when(
            killed <= needed,
            &["GATEWAY_TERMINATION_GRACE", "GATEWAY_DRAIN_GRACE", "GATEWAY_CLOSE_TIMEOUT"],
            || {
                let [grace, close, exit, needed, killed] =
                    [drain.grace, drain.close_timeout, Drain::EXIT, needed, killed].map(show_duration);
                format!(
                    "{grace} + {close} + {exit} for the exit leave no time to close before the process is killed after {killed}; let it live longer than {needed}"
                )
            },
        );
    }

    fn check_fleet(&self, broken: &mut Broken) {
        let fleet = &self.fleet;
        // A pause between two reports is up to a fifth longer than that, and the next one may be late or lost.
        broken.when(fleet.ttl < 2 * fleet.report, &["GATEWAY_FLEET_TTL", "GATEWAY_FLEET_REPORT"], || {
            let (ttl, report) = (show_duration(fleet.ttl), show_duration(fleet.report));
            format!(
                "reports would expire ({ttl}) before the next one is sure to come: set it to twice {report} or more"
            )
        });
    }

    fn doubt_security(&self, doubtful: &mut Broken) {
        let auth = &self.auth;
        doubtful.when(
            auth.jwks_url.as_deref().is_some_and(|u| u.starts_with("http://")),
            &["GATEWAY_JWT_JWKS_URL"],
            || "keys fetched without TLS can be replaced on the way".to_owned(),
        );
        let weak = self.admin.key.as_ref().is_some_and(|k| k.expose().len() < STRONG_KEY_BYTES);
        doubtful.when(weak, &["GATEWAY_ADMIN_KEY"], || {
            format!("is shorter than {STRONG_KEY_BYTES} bytes and could be guessed")
        });
        let trusts_all = self.admission.trusted_proxies.iter().any(|n| n.prefix == 0);
        doubtful.when(trusts_all, &["GATEWAY_TRUSTED_PROXIES"], || {
            "trusts every address: any client may then claim to be any other".to_owned()
        });
    }

    fn doubt_redis(&self, doubtful: &mut Broken) {
        let redis = &self.redis;
        doubtful.when(
            redis.url.is_none() && redis.password.is_some(),
            &["GATEWAY_REDIS_PASSWORD", "GATEWAY_REDIS_URL"],
            || "a password without a URL: the gateway runs in memory, alone".to_owned(),
        );
        let has_no_tls = redis.url.as_ref().is_none_or(|u| matches!(u.scheme, RedisScheme::Tcp | RedisScheme::Unix));
        doubtful.when(redis.ca_file.is_some() && has_no_tls, &["GATEWAY_REDIS_CA_FILE", "GATEWAY_REDIS_URL"], || {
            "a CA without TLS is not used; rediss:// speaks TLS".to_owned()
        });
        doubtful.when(redis.timeout >= self.auth.timeout, &["GATEWAY_REDIS_TIMEOUT", "GATEWAY_AUTH_TIMEOUT"], || {
            let (command, admission) = (show_duration(redis.timeout), show_duration(self.auth.timeout));
            format!("one slow command ({command}) uses up the whole admission ({admission})")
        });
    }

    fn doubt_sessions(&self, doubtful: &mut Broken) {
        let (admission, session) = (&self.admission, &self.session);
        doubtful.when(
            admission.accept_burst > admission.handshakes,
            &["GATEWAY_ACCEPT_BURST", "GATEWAY_HANDSHAKES"],
            || format!("a burst of {} does not fit into {} handshakes", admission.accept_burst, admission.handshakes),
        );
        doubtful.when(session.heartbeat >= COMMON_IDLE_CUT, &["GATEWAY_HEARTBEAT"], || {
            format!("{}: most proxies cut a connection that is idle for 60s", show_duration(session.heartbeat))
        });
        doubtful.when(
            session.heartbeat_timeout > session.heartbeat,
            &["GATEWAY_HEARTBEAT_TIMEOUT", "GATEWAY_HEARTBEAT"],
            || {
                let (timeout, beat) = (show_duration(session.heartbeat_timeout), show_duration(session.heartbeat));
                format!("a ping may go unanswered ({timeout}) beyond the next one ({beat})")
            },
        );
        let with_envelope = session.max_message_bytes.saturating_add(ENVELOPE_BYTES);
        let is_tight = (session.max_message_bytes..with_envelope).contains(&session.outbox_bytes);
        doubtful.when(is_tight, &["GATEWAY_OUTBOX_BYTES", "GATEWAY_MAX_MESSAGE"], || {
            "an event of the full size with its envelope would not fit and end the session; leave 1KiB more".to_owned()
        });
        let (min, max) = (self.lifecycle.max_age_min, self.lifecycle.max_age_max);
        doubtful.when(!min.is_zero() && min == max, &["GATEWAY_MAX_AGE_MIN", "GATEWAY_MAX_AGE_MAX"], || {
            "no spread: sessions that came together leave together".to_owned()
        });
    }

    fn doubt_termination(&self, doubtful: &mut Broken) {
        let drain = &self.drain;
        let Some(killed) = drain.termination_grace else { return };
        let in_force = drain.deadline_in_force();
        doubtful.when(
            in_force < drain.deadline,
            &["GATEWAY_TERMINATION_GRACE", "GATEWAY_DRAIN_DEADLINE"],
            || {
                let most = in_force.saturating_sub(drain.grace).saturating_sub(drain.close_timeout);
                let window = match drain.window {
                    Some(window) if window > most => format!(" and the window to {}", show_duration(most)),
                    _ => String::new(),
                };
                let [killed, deadline, in_force, fits] =
                    [killed, drain.deadline, in_force, drain.deadline + Drain::EXIT].map(show_duration);
                format!(
                    "killed after {killed}, the process would not live to the drain's deadline of {deadline}: the deadline is lowered to {in_force}{window}; with {fits} before the kill it would fit"
                )
            },
        );
    }

    fn doubt_fleet(&self, doubtful: &mut Broken) {
        let (fleet, shed) = (&self.fleet, &self.shed);
        doubtful.when(shed.interval < fleet.report, &["GATEWAY_SHED_INTERVAL", "GATEWAY_FLEET_REPORT"], || {
            let (interval, report) = (show_duration(shed.interval), show_duration(fleet.report));
            format!("decides every {interval} on reports that come every {report}")
        });
    }
}

/// The four places a key may stand in.
const KEYS: [&str; 4] =
    ["GATEWAY_JWT_SECRET", "GATEWAY_JWT_PUBLIC_KEY", "GATEWAY_JWT_JWKS_URL", "GATEWAY_JWT_JWKS_FILE"];

impl Key<'_> {
    /// Can this kind of key check tokens of `algorithm`? A key set is public keys only.
    fn fits(&self, algorithm: Algorithm) -> bool {
        match self {
            Key::Secret(_) => AlgorithmFamily::Hmac.algorithms().contains(&algorithm),
            Key::Public(key) => key.family.algorithms().contains(&algorithm),
            Key::JwksUrl(_) | Key::JwksFile(_) => !AlgorithmFamily::Hmac.algorithms().contains(&algorithm),
        }
    }
}

/// Would the second of two listeners fail to bind?
fn overlap(a: SocketAddr, b: SocketAddr) -> bool {
    let is_same_host = a.ip() == b.ip() || a.ip().is_unspecified() || b.ip().is_unspecified();
    a.port() != 0 && a.port() == b.port() && is_same_host && a.is_ipv4() == b.is_ipv4()
}
