//! The table of every variable: name, kind with its bounds, default, meaning and reason. What is
//! parsed, what `tidegate config` prints and what `docs/CONFIGURATION.md` says follow from it. How
//! a value is read is `read.rs`'s; how values bear each other is `check.rs`'s.

use std::time::Duration;

use super::parse;

/// Longest duration any variable takes: a year and a day. Longer is a slip of the unit.
pub const MAX_DURATION: Duration = Duration::from_secs(366 * 86_400);

/// What a value looks like, with its bounds.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Kind {
    /// An IP address and port, or `localhost:<port>`; port 0 picks a free one.
    Address,
    /// A duration, `MAX_DURATION` at most; zero only where `Zero::Allowed`.
    Duration(Zero),
    /// A duration over zero, or `auto`.
    Window,
    /// Bytes, with both bounds included.
    Size { least: u64, most: u64 },
    /// A whole number, with both bounds included.
    Count { least: u64, most: u64 },
    /// A number above 0 and at most 1.
    Ratio,
    /// `on` or `off`.
    Switch,
    /// One of these words.
    Choice(&'static [&'static str]),
    /// Text of this form.
    Text(&'static str),
    /// Entries of this form, separated by commas; blanks around them and a last comma are dropped.
    List(&'static str),
    /// A file's path.
    Path,
    /// Never shown. Also as `<name>_FILE`, whose content counts; one line end at its end is dropped.
    Secret(&'static str),
}

/// Whether a duration may be zero.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Zero {
    /// Zero means something here; the row says what.
    Allowed,
    /// Zero is refused like any bad value.
    Refused,
}

/// What holds where a variable is unset.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unset {
    /// This value, parsed like one that was set.
    Value(&'static str),
    /// Nothing; the words say what that means.
    Nothing(&'static str),
}

/// One variable.
#[derive(Clone, Copy, Debug)]
pub struct Variable {
    /// Its name, beginning with `GATEWAY_`.
    pub name: &'static str,
    /// What a value looks like.
    pub kind: Kind,
    /// What holds where it is unset.
    pub default: Unset,
    /// What it is for and why the default is what it is. One or two sentences, lower case.
    pub meaning: &'static str,
}

/// A heading of the table.
#[derive(Debug)]
pub struct Section {
    /// The heading.
    pub title: &'static str,
    /// Its variables.
    pub rows: &'static [Variable],
}

impl Kind {
    /// What a value must look like, as the error and the documentation say it.
    pub fn form(self) -> String {
        match self {
            Kind::Address => "an address such as 127.0.0.1:8080 or [::1]:8080".to_owned(),
            Kind::Duration(Zero::Allowed) => "a duration such as 250ms, 30s, 20m, 1h or 30d; 0s is allowed".to_owned(),
            Kind::Duration(Zero::Refused) => "a duration over zero such as 250ms, 30s, 20m, 1h or 30d".to_owned(),
            Kind::Window => "auto, or a duration over zero such as 30s or 2m".to_owned(),
            Kind::Size { least, most } => {
                format!("a size such as 64KiB or 1MiB, from {} to {}", parse::show_size(least), parse::show_size(most))
            }
            Kind::Count { least, most } => format!("a whole number from {least} to {most}"),
            Kind::Ratio => "a number above 0 and at most 1, such as 0.05".to_owned(),
            Kind::Switch => "on or off".to_owned(),
            Kind::Choice(words) => format!("one of {}", words.join(", ")),
            Kind::Text(form) | Kind::Secret(form) => form.to_owned(),
            Kind::List(form) => format!("a list separated by commas of {form}"),
            Kind::Path => "the path of a readable file".to_owned(),
        }
    }

    /// Must the value stay out of every output?
    pub fn is_secret(self) -> bool {
        matches!(self, Kind::Secret(_))
    }
}

impl Unset {
    /// As the table prints it.
    pub fn shown(self) -> &'static str {
        match self {
            Unset::Value(text) | Unset::Nothing(text) => text,
        }
    }
}

/// Every variable, in the order in which it is printed.
pub fn variables() -> impl Iterator<Item = &'static Variable> {
    SECTIONS.iter().flat_map(|section| section.rows)
}

/// The row of `name`.
///
/// # Panics
/// Where no such row exists: a slip in the code, which every test of the configuration shows.
pub fn row(name: &str) -> &'static Variable {
    variables().find(|v| v.name == name).unwrap_or_else(|| panic!("{name} has no row in the table"))
}

/// The whole table as Markdown, one table a section: the text `docs/CONFIGURATION.md` must contain.
pub fn markdown() -> String {
    let mut out = String::new();
    for section in SECTIONS {
        out.push_str(&format!("## {}\n\n", section.title));
        out.push_str("| variable | default | value | meaning, reason |\n|---|---|---|---|\n");
        for v in section.rows {
            let default = match v.default {
                Unset::Value(text) => format!("`{text}`"),
                Unset::Nothing(text) => text.to_owned(),
            };
            let file = if v.kind.is_secret() { ", `…_FILE`" } else { "" };
            out.push_str(&format!(
                "| `{}`{file} | {default} | {} | {} |\n",
                v.name,
                v.kind.form().replace('*', "\\*"),
                v.meaning
            ));
        }
        out.push('\n');
    }
    out
}

const fn var(name: &'static str, kind: Kind, default: Unset, meaning: &'static str) -> Variable {
    Variable { name, kind, default, meaning }
}

const TIME: Kind = Kind::Duration(Zero::Refused);
const TIME_OR_ZERO: Kind = Kind::Duration(Zero::Allowed);
const PLANNED: Kind = Kind::Choice(&["1001", "1012", "1013"]);
const KIB: u64 = 1024;
const MIB: u64 = 1024 * KIB;
const GIB: u64 = 1024 * MIB;

use self::Unset::{Nothing, Value};

const fn count(least: u64, most: u64) -> Kind {
    Kind::Count { least, most }
}

/// Every variable under its heading.
pub const SECTIONS: &[Section] = &[
    Section { title: "Listeners and the process", rows: PROCESS },
    Section { title: "Credentials", rows: CREDENTIALS },
    Section { title: "Revocation", rows: REVOCATION },
    Section { title: "Redis", rows: REDIS },
    Section { title: "Admission", rows: ADMISSION },
    Section { title: "Sessions", rows: SESSIONS },
    Section { title: "History and resume", rows: HISTORY },
    Section { title: "Recycling and drain", rows: LEAVING },
    Section { title: "Fleet and shedding", rows: FLEET },
    Section { title: "Admin API", rows: ADMIN },
    Section { title: "Probes", rows: PROBES },
];

const PROCESS: &[Variable] = &[
    var(
        "GATEWAY_LISTEN",
        Kind::Address,
        Value("0.0.0.0:8080"),
        "public listener: `/v1/ws`, `/v1/sse`, `/v1/client.js`",
    ),
    var(
        "GATEWAY_ADMIN_LISTEN",
        Kind::Address,
        Value("127.0.0.1:8081"),
        "the back ends' API and the console; beyond loopback only with `GATEWAY_ADMIN_KEY`",
    ),
    var(
        "GATEWAY_PROBE_LISTEN",
        Kind::Address,
        Value("0.0.0.0:9102"),
        "`/livez`, `/readyz`, `/startupz`, `/metrics`, on a thread of its own",
    ),
    var(
        "GATEWAY_ADDR_FILE",
        Kind::Text("the path of a file that may be written"),
        Nothing("unset"),
        "the bound addresses are written there as JSON with the keys `public`, `admin`, `probes`; needed with port 0",
    ),
    var(
        "GATEWAY_TLS_CERT_FILE",
        Kind::Path,
        Nothing("unset"),
        "PEM chain; with the key file: TLS and HTTP/2 on the public listener; refused by this build",
    ),
    var("GATEWAY_TLS_KEY_FILE", Kind::Path, Nothing("unset"), "PEM private key of the certificate"),
    var(
        "GATEWAY_WORKERS",
        count(1, 1024),
        Nothing("one a core"),
        "threads of the main runtime; the door, where newcomers are dealt with, has half as many besides, and the probes one",
    ),
    var(
        "GATEWAY_NODE",
        Kind::Text("1 to 64 bytes of A-Z a-z 0-9 _ - ."),
        Nothing("host name + random"),
        "this node's name in the fleet, one of its own for each; random at its end, so that a restarted host is a new node",
    ),
    var(
        "GATEWAY_LOG",
        Kind::Text("log directives such as info or info,tidegate_hub=debug"),
        Value("info"),
        "what is logged, to stderr",
    ),
    var(
        "GATEWAY_LOG_FORMAT",
        Kind::Choice(&["text", "json"]),
        Nothing("`text` on a terminal, else `json`"),
        "one line an entry in either",
    ),
];

const CREDENTIALS: &[Variable] = &[
    var(
        "GATEWAY_JWT_SECRET",
        Kind::Secret("an HMAC secret of at least 32 bytes that is no public key"),
        Nothing("unset"),
        "key of HS256, HS384, HS512; under 32 bytes it could be guessed offline from one token",
    ),
    var(
        "GATEWAY_JWT_PUBLIC_KEY",
        Kind::Secret("a PEM public key: RSA, EC or Ed25519"),
        Nothing("unset"),
        "key of RS256 to RS512, PS256 to PS512, ES256, ES384, EdDSA; line ends may be written as `\\n`",
    ),
    var(
        "GATEWAY_JWT_JWKS_URL",
        Kind::Text("an http:// or https:// URL without credentials"),
        Nothing("unset"),
        "key set, fetched at start, every five minutes and when a key is missing (at most once in 10 s); answered with 200, no redirect, at most 1 MiB",
    ),
    var("GATEWAY_JWT_JWKS_FILE", Kind::Path, Nothing("unset"), "key set in a file, read again when it changes"),
    var(
        "GATEWAY_JWT_ALGORITHMS",
        Kind::List("HS256 HS384 HS512 RS256 RS384 RS512 PS256 PS384 PS512 ES256 ES384 EdDSA"),
        Nothing("what fits the key"),
        "accepted algorithms; the token's header never chooses beyond them",
    ),
    var(
        "GATEWAY_JWT_ISSUER",
        Kind::List("issuers"),
        Nothing("unset"),
        "`iss` must be one of these; unset: not looked at",
    ),
    var(
        "GATEWAY_JWT_AUDIENCE",
        Kind::List("audiences"),
        Nothing("unset"),
        "`aud` must name one of these; unset: not looked at",
    ),
    var(
        "GATEWAY_JWT_LEEWAY",
        TIME_OR_ZERO,
        Value("0s"),
        "tolerance for `exp` and `nbf`, for issuers whose clock differs",
    ),
    var(
        "GATEWAY_AUTH_COOKIE",
        Kind::Text("a cookie name"),
        Nothing("off"),
        "the cookie that may hold the token; `Origin` is then always checked",
    ),
    var(
        "GATEWAY_AUTH_QUERY",
        Kind::Switch,
        Value("on"),
        "may the token stand in the query `access_token`? A native EventSource has no other way. Never logged",
    ),
    var(
        "GATEWAY_ANONYMOUS_CHANNELS",
        Kind::List("channel names or prefixes ending in *"),
        Nothing("no anonymous sessions"),
        "what a client without any credential may hear",
    ),
    var("GATEWAY_USER_CHANNEL", Kind::Switch, Value("on"), "does `sub` join the channel `user:<sub>`?"),
    var(
        "GATEWAY_ALLOWED_ORIGINS",
        Kind::List("origins such as https://app.example or http://localhost:3000 (or * alone)"),
        Nothing("unset"),
        "exact origins, beside the same origin, for which browsers may use this gateway; while unset, a page of another origin gets no event stream; `*` means pages without a name (`null`, `file://`) too, and is refused together with a cookie",
    ),
    var(
        "GATEWAY_AUTH_TIMEOUT",
        TIME,
        Value("1s"),
        "the whole admission after the head was read; also how long a `subscribe` waits for the backplane",
    ),
];

const REVOCATION: &[Variable] = &[
    var(
        "GATEWAY_REVOCATION_KEYS",
        Kind::List("jti=, sid= or sub= and a key with its placeholder, of {prefix} {jti} {sid} {sub}"),
        Value("jti={prefix}:revoked:jti:{jti},sid={prefix}:revoked:sid:{sid},sub={prefix}:revoked:sub:{sub}"),
        "where the revocation list stands in Redis; kinds left out are not asked",
    ),
    var(
        "GATEWAY_REVOCATION_SWEEP",
        TIME,
        Value("30s"),
        "how soon open sessions end after somebody else wrote a key; revocations through the gateway take under 1 s",
    ),
    var(
        "GATEWAY_REVOCATION_UNAVAILABLE",
        Kind::Choice(&["refuse", "allow"]),
        Value("refuse"),
        "what a new session, and a new token in an open one, gets while Redis cannot answer: a refusal for now (503), or admission that is checked as soon as Redis is back",
    ),
    var(
        "GATEWAY_REVOCATION_TTL",
        TIME,
        Value("30d"),
        "how long a revocation made here is kept; longer than any token lives",
    ),
];

const REDIS: &[Variable] = &[
    var(
        "GATEWAY_REDIS_URL",
        Kind::Secret(
            "a redis://, rediss://, redis+sentinel://, redis+cluster:// or unix:// URL, its password percent-encoded (or in GATEWAY_REDIS_PASSWORD)",
        ),
        Nothing("in memory"),
        "the backplane; unset: one node, everything else works; Sentinel and Cluster are refused by this build",
    ),
    var("GATEWAY_REDIS_PASSWORD", Kind::Secret("a password"), Nothing("unset"), "for passwords that do not fit a URL"),
    var("GATEWAY_REDIS_CA_FILE", Kind::Path, Nothing("unset"), "PEM of a private CA for TLS to Redis"),
    var(
        "GATEWAY_REDIS_PREFIX",
        Kind::Text("1 to 64 bytes of A-Z a-z 0-9 _ - . :"),
        Value("tidegate"),
        "of every key and channel",
    ),
    var("GATEWAY_REDIS_TIMEOUT", TIME, Value("250ms"), "of one command"),
    var(
        "GATEWAY_PARTITIONS",
        count(1, 8),
        Value("1"),
        "partitions of the log, above 1 only with `redis+cluster://`, which this build refuses; fixed at the log's birth",
    ),
];

const ADMISSION: &[Variable] = &[
    var(
        "GATEWAY_ACCEPT_BURST",
        count(1, 1_000_000),
        Value("200"),
        "admissions at once; more are refused until the bucket has filled",
    ),
    var(
        "GATEWAY_ACCEPT_RATE",
        count(1, 1_000_000),
        Value("100"),
        "admissions a second that refill the bucket; with `adaptive` the least",
    ),
    var(
        "GATEWAY_ACCEPT_MODE",
        Kind::Choice(&["fixed", "adaptive"]),
        Value("fixed"),
        "`adaptive` moves the rate between `GATEWAY_ACCEPT_RATE` and `GATEWAY_ACCEPT_RATE_MAX` by what authentication bears",
    ),
    var(
        "GATEWAY_ACCEPT_RATE_MAX",
        count(1, 1_000_000),
        Value("1000"),
        "upper end of the adaptive rate; not read with `fixed`",
    ),
    var(
        "GATEWAY_HANDSHAKES",
        count(1, 1_000_000),
        Value("1024"),
        "in flight from accept to the answer's head; bounds memory in a storm; lowered with `GATEWAY_MAX_SESSIONS` where the descriptor limit allows fewer",
    ),
    var("GATEWAY_HEAD_TIMEOUT", TIME, Value("5s"), "until a request's head must have come"),
    var(
        "GATEWAY_IP_RATE",
        count(0, 1_000_000),
        Value("20"),
        "attempts a second from one address (IPv6: one /64); `0` = off. Loopback and private peers are exempt unless proxies are named",
    ),
    var("GATEWAY_IP_BURST", count(0, 1_000_000), Value("60"), "attempts at once from one address; `0` = off"),
    var(
        "GATEWAY_TRUSTED_PROXIES",
        Kind::List("networks such as 10.0.0.0/8 or fd00::/8"),
        Nothing("none"),
        "whose `X-Forwarded-*` is believed; the right-most untrusted hop is the client",
    ),
    var(
        "GATEWAY_SSE_REFUSE",
        Kind::Choice(&["auto", "status", "soft"]),
        Value("auto"),
        "a temporary refusal of an SSE request: `soft` is a 200 with `retry:` and `bye`, since a native EventSource gives up on any other status; `auto`: soft without an `Authorization` header; `status` behind an nginx that tries a second node, as `deploy/nginx.conf` does",
    ),
    var(
        "GATEWAY_WS_REFUSE",
        Kind::Choice(&["auto", "status"]),
        Value("auto"),
        "a 401 to a browser's WebSocket, which cannot see a status: `auto` answers 101, `bye`, close 4401 or 4403",
    ),
];

const SESSIONS: &[Variable] = &[
    var(
        "GATEWAY_MAX_SESSIONS",
        count(1, 10_000_000),
        Value("40000"),
        "this node's capacity and its weight in the fleet; lowered to what the descriptor limit allows (the soft one is raised to the hard one before), with a warning",
    ),
    var(
        "GATEWAY_MAX_SESSIONS_PER_USER",
        count(0, 1_000_000),
        Value("0"),
        "over the fleet, newest wins; `0` = no limit",
    ),
    var("GATEWAY_MAX_CHANNELS", count(1, 100_000), Value("100"), "channels of one session"),
    var(
        "GATEWAY_MAX_MESSAGE",
        Kind::Size { least: 1, most: 512 * MIB },
        Value("64KiB"),
        "`data` of an event as published; a whole message from a client",
    ),
    var("GATEWAY_CLIENT_RATE", count(1, 1_000_000), Value("10"), "messages a second that a client may send"),
    var(
        "GATEWAY_CLIENT_BURST",
        count(10, 1_000_000),
        Value("50"),
        "messages at once that a client may send; a `since` costs ten",
    ),
    var(
        "GATEWAY_HEARTBEAT",
        TIME,
        Value("25s"),
        "between signs of life sent to an idle client; below the common 60 s idle cuts of proxies",
    ),
    var(
        "GATEWAY_HEARTBEAT_TIMEOUT",
        TIME,
        Value("10s"),
        "how long a WebSocket may stay silent after a ping; any inbound frame is a sign of life",
    ),
    var(
        "GATEWAY_OUTBOX_BYTES",
        Kind::Size { least: 1, most: 4 * GIB },
        Value("1MiB"),
        "what may wait for one client; beyond it the session ends with `slow` and can resume",
    ),
    var("GATEWAY_WRITE_TIMEOUT", TIME, Value("10s"), "how long one write may wait for a client"),
    var("GATEWAY_CLOSE_TIMEOUT", TIME, Value("3s"), "from our close frame to the peer's; then the socket is cut"),
    var(
        "GATEWAY_CLOSE_CODE_DRAIN",
        PLANNED,
        Value("1001"),
        "close code of a drain: RFC 6455's own word for a server that goes",
    ),
    var("GATEWAY_CLOSE_CODE_RECYCLE", PLANNED, Value("1012"), "close code at the maximum age"),
    var("GATEWAY_CLOSE_CODE_SHED", PLANNED, Value("1012"), "close code of a move to an emptier node"),
];

const HISTORY: &[Variable] = &[
    var(
        "GATEWAY_HISTORY_SIZE",
        count(0, 10_000_000),
        Value("1000"),
        "events kept a channel; `0` = none, a resume then gives `gap` `no_history`",
    ),
    var("GATEWAY_HISTORY_TTL", TIME, Value("24h"), "how long they are kept"),
    var(
        "GATEWAY_REPLAY_MAX",
        count(1, 10_000_000),
        Value("1000"),
        "events replayed to one session; beyond it `gap`, newest kept",
    ),
];

const LEAVING: &[Variable] = &[
    var("GATEWAY_MAX_AGE_MIN", TIME_OR_ZERO, Value("20m"), "a session's age at which it is moved is drawn from here …"),
    var(
        "GATEWAY_MAX_AGE_MAX",
        TIME_OR_ZERO,
        Value("60m"),
        "… to here; both `0s` = off. With a spread of at least the mean a storm does not echo",
    ),
    var(
        "GATEWAY_DRAIN_GRACE",
        TIME_OR_ZERO,
        Value("5s"),
        "after the signal: unready but still serving, until balancers have noticed",
    ),
    var(
        "GATEWAY_DRAIN_WINDOW",
        Kind::Window,
        Value("auto"),
        "closes are spread evenly over it; `auto`: the time the rest of the fleet needs to take these sessions in at half its accept rate",
    ),
    var(
        "GATEWAY_DRAIN_DEADLINE",
        TIME,
        Value("120s"),
        "from the signal; what remains is cut. Keep the orchestrator's own grace time above it",
    ),
    var(
        "GATEWAY_TERMINATION_GRACE",
        TIME,
        Nothing("unknown"),
        "how long the orchestrator waits between SIGTERM and SIGKILL (Kubernetes `terminationGracePeriodSeconds`, systemd `TimeoutStopSec`, ECS `stopTimeout`, `docker stop -t`); the drain's deadline is lowered to 5 s before it, with a warning",
    ),
];

const FLEET: &[Variable] = &[
    var(
        "GATEWAY_SHED",
        Kind::Choice(&["on", "off", "dry-run"]),
        Value("on"),
        "moving sessions to emptier nodes; `dry-run` only counts",
    ),
    var(
        "GATEWAY_SHED_TOLERANCE",
        Kind::Ratio,
        Value("0.05"),
        "band around this node's share in which nothing is moved",
    ),
    var(
        "GATEWAY_SHED_FRACTION",
        Kind::Ratio,
        Value("0.025"),
        "at most this part of own sessions in an interval; the fleet's budget is the real guard",
    ),
    var("GATEWAY_SHED_INTERVAL", TIME, Value("5s"), "between two decisions"),
    var("GATEWAY_FLEET_REPORT", TIME, Value("5s"), "between two reports of this node"),
    var(
        "GATEWAY_FLEET_TTL",
        TIME,
        Value("20s"),
        "after which a silent node no longer counts, nor the places of its users",
    ),
];

const ADMIN: &[Variable] = &[
    var(
        "GATEWAY_ADMIN_KEY",
        Kind::Secret("visible ASCII without blanks"),
        Nothing("unset"),
        "bearer key of the admin API; without it only loopback is served",
    ),
    var(
        "GATEWAY_ADMIN_HOSTS",
        Kind::List("host names without port"),
        Nothing("none"),
        "names under which the admin API may be called without a key, beside IP literals and `localhost`",
    ),
    var("GATEWAY_IDEMPOTENCY_TTL", TIME, Value("5m"), "how long a publish's key is remembered"),
];

const PROBES: &[Variable] = &[
    var(
        "GATEWAY_LIVE_STALE",
        TIME,
        Value("30s"),
        "`/livez` fails when the main runtime or the door's has not moved for so long, or one of their worker threads has been blocked for twice as long; far above any load, for a restart ends every session",
    ),
    var(
        "GATEWAY_READY_HEADROOM",
        Kind::Ratio,
        Value("0.95"),
        "unready `at_capacity` from this part of the capacity, ready again 0.05 below",
    ),
    var(
        "GATEWAY_READY_LAG",
        TIME,
        Value("250ms"),
        "unready `saturated` when the runtime's lag p99 is above it in 3 of the last 4 windows",
    ),
    var("GATEWAY_READY_REDIS", Kind::Switch, Value("on"), "does readiness look at Redis?"),
    var(
        "GATEWAY_READY_REDIS_GRACE",
        TIME,
        Value("10s"),
        "for how long the pub/sub link may be down or deaf before readiness fails",
    ),
];
