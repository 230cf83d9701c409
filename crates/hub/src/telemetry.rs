//! Every metric of the node: what is counted, under which name, with which labels. Labels come
//! from closed enums only, so that no client can make a series. Handles are resolved once, here;
//! counting is an array index and an atomic add. Decides nothing about health: `/readyz` has its
//! own sources, and reading the metrics changes nothing.
//!
//! The process's own figures (`process_*`) are read from the kernel at each scrape: `process`.

use std::fmt::Write as _;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::Duration;

use prometheus_client::encoding::prometheus_text;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::metrics::info::Info;
use prometheus_client::registry::{Metric, Registry};

use crate::backplane::GapReason;
use crate::close::CloseReason;
use crate::event::Wire;
use crate::hub::Phase;
use crate::refusal::RefusalCode;

mod labels;
pub mod process;

pub use labels::{LbPolicy, RedisLink, ResumeLabel, RevocationSource, ShedSuspension, SkipReason};

/// The `Content-Type` of `Metrics::encode`: Prometheus' text format.
pub const CONTENT_TYPE: &str = prometheus_text::CONTENT_TYPE;

/// Upper bounds in seconds for what should take milliseconds: from half a millisecond (a token
/// from the cache) to ten seconds (beyond every deadline on these paths).
const SECONDS: [f64; 14] = [0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0];

/// The fleet as this node knows it, for the `gateway_fleet_*` gauges.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct FleetFigures {
    /// Nodes with a report young enough to count.
    pub n_nodes: usize,
    /// Sessions on all of them.
    pub n_sessions: usize,
    /// This node's part of the capacity of all that serve, 0 to 1.
    pub share: f64,
    /// Coefficient of variation of how full the nodes are.
    pub cv: f64,
    /// The fullest node over the mean.
    pub busiest_ratio: f64,
}

type Label = [(&'static str, &'static str); 1];
type Labels = [(&'static str, &'static str); 2];
type Float = Gauge<f64, AtomicU64>;

/// Every metric of the node. Shared as `Arc<Metrics>`; all methods are cheap, none waits.
#[derive(Debug)]
pub struct Metrics {
    registry: Registry,
    open: [Gauge; 2],
    opened: [Vec<Counter>; 2],
    closed: Vec<Counter>,
    refused: Vec<Counter>,
    refusal: Histogram,
    accept_rate: Float,
    keys_age: Float,
    keys_failing: Float,
    accept_tokens: Float,
    auth: Histogram,
    revocation: Vec<Counter>,
    published: Counter,
    delivered: [Counter; 2],
    delivery: Histogram,
    skipped: Vec<Counter>,
    outbox: Gauge,
    gaps: Vec<Counter>,
    redis_up: Family<Label, Gauge>,
    redis_repairs: Counter,
    lag: [(&'static str, Float); 3],
    fleet: [Float; 5],
    shed: Counter,
    shed_suspended: Vec<Gauge>,
    lb_policy: Vec<Gauge>,
    phase: Vec<Gauge>,
    plugin_panics: Counter,
    drain_forced: Counter,
}

const WIRES: [Wire; 2] = [Wire::Ws, Wire::Sse];

impl Metrics {
    /// All series of the closed sets exist from here on, at zero; `gateway_redis_up` alone appears
    /// when a link is first reported, for a node without Redis has none that could be down.
    pub fn new(version: &'static str) -> Arc<Self> {
        let mut r = Registry::default();
        register(&mut r, "gateway_build", "The version that runs; always 1", Info::new([("version", version)]));
        let opened = add(
            &mut r,
            "gateway_sessions_opened",
            "Sessions by transport and by how their first ready came out; none: ended before it, or raw",
            Family::<Labels, Counter>::default(),
        );
        let opened = WIRES.map(|wire| {
            let one = |resume: &ResumeLabel| {
                opened.get_or_create_owned(&[("transport", wire.word()), ("resume", resume.word())])
            };
            ResumeLabel::ALL.iter().map(one).collect()
        });
        let this = Self {
            open: by_wire(&mut r, "gateway_sessions_open", "Sessions open now"),
            opened,
            closed: by(
                &mut r,
                "gateway_sessions_closed",
                "Sessions that ended",
                "reason",
                &CloseReason::ALL,
                CloseReason::word,
            ),
            refused: by(
                &mut r,
                "gateway_refused",
                "Requests refused before a session",
                "code",
                &RefusalCode::ALL,
                RefusalCode::word,
            ),
            refusal: add(
                &mut r,
                "gateway_refusal_seconds",
                "Time from a request's head to the end of its connection, of refusals that waited for nobody",
                Histogram::new(SECONDS),
            ),
            keys_age: add(
                &mut r,
                "gateway_keys_age_seconds",
                "Time since the fetched token keys were last seen to be the issuer's; 0 where none are fetched",
                Float::default(),
            ),
            keys_failing: add(
                &mut r,
                "gateway_keys_failing_seconds",
                "Time since fetching the token keys began to fail; 0 while it does not",
                Float::default(),
            ),
            accept_rate: add(
                &mut r,
                "gateway_accept_rate",
                "Admissions a second that the accept bucket refills now",
                Float::default(),
            ),
            accept_tokens: add(
                &mut r,
                "gateway_accept_tokens",
                "Admissions that the accept bucket holds now",
                Float::default(),
            ),
            auth: add(
                &mut r,
                "gateway_auth_seconds",
                "Time from the head read to the decision, plugins included",
                Histogram::new(SECONDS),
            ),
            revocation: by(
                &mut r,
                "gateway_revocation_checks",
                "Revocation checks by who could answer",
                "source",
                RevocationSource::ALL,
                RevocationSource::word,
            ),
            published: add(
                &mut r,
                "gateway_events_published",
                "Events published through this node",
                Counter::default(),
            ),
            delivered: by_wire(&mut r, "gateway_events_delivered", "Events written to clients"),
            delivery: add(
                &mut r,
                "gateway_delivery_seconds",
                "Time from publish to socket write",
                Histogram::new(SECONDS),
            ),
            skipped: by(
                &mut r,
                "gateway_events_skipped",
                "Events from other writers that this node could not deliver",
                "reason",
                SkipReason::ALL,
                SkipReason::word,
            ),
            outbox: add(&mut r, "gateway_outbox_bytes", "Bytes that wait for slow clients", Gauge::default()),
            gaps: by(&mut r, "gateway_gaps", "Gaps told to clients", "reason", &GapReason::ALL, GapReason::word),
            redis_up: add(&mut r, "gateway_redis_up", "1 while this link to Redis stands", Family::default()),
            redis_repairs: add(
                &mut r,
                "gateway_redis_repairs",
                "Times the pub/sub link was lost and its hole read from the log",
                Counter::default(),
            ),
            // Not registered: a summary is written by `encode`, the library has none.
            lag: ["0.5", "0.99", "1"].map(|quantile| (quantile, Float::default())),
            fleet: [
                ("gateway_fleet_nodes", "Nodes with a young report"),
                ("gateway_fleet_sessions", "Sessions on all known nodes"),
                ("gateway_fleet_share", "This node's part of the capacity of all that serve, 0 to 1"),
                ("gateway_fleet_cv", "Coefficient of variation of how full the nodes are"),
                ("gateway_fleet_busiest_ratio", "The fullest node over the mean"),
            ]
            .map(|(name, help)| add(&mut r, name, help, Float::default())),
            shed: add(&mut r, "gateway_shed", "Sessions moved to an emptier node", Counter::default()),
            shed_suspended: by(
                &mut r,
                "gateway_shed_suspended",
                "1 while this reason keeps sessions where they are",
                "reason",
                ShedSuspension::ALL,
                ShedSuspension::word,
            ),
            lb_policy: by(
                &mut r,
                "gateway_lb_policy_observed",
                "1 for what the balancer in front seems to go by",
                "policy",
                LbPolicy::ALL,
                LbPolicy::word,
            ),
            phase: by(&mut r, "gateway_phase", "1 for the phase the node is in", "phase", &Phase::ALL, Phase::word),
            plugin_panics: add(&mut r, "gateway_plugin_panics", "Panics caught in plugins", Counter::default()),
            drain_forced: add(
                &mut r,
                "gateway_drain_forced",
                "Sessions cut at the drain's deadline",
                Counter::default(),
            ),
            registry: r,
        };
        this.phase(Phase::Starting);
        this.lb_policy(LbPolicy::Unknown);
        Arc::new(this)
    }

    /// The whole exposition, `CONTENT_TYPE`. Reads `/proc/self` for `process_*`; else memory only.
    pub fn encode(&self) -> String {
        let mut out = String::with_capacity(24 * 1024);
        prometheus_text::encode(&mut out, &self.registry).expect("a String takes every write");
        let name = "gateway_runtime_lag_seconds";
        let _ = writeln!(out, "# HELP {name} How late the main runtime ran its heartbeat, over the last 10 to 20 s");
        let _ = writeln!(out, "# TYPE {name} summary");
        for (quantile, lag) in &self.lag {
            let _ = writeln!(out, "{name}{{quantile=\"{quantile}\"}} {}", lag.get());
        }
        process::encode(&mut out);
        out
    }

    /// A session exists. Pairs with exactly one `session_closed`.
    pub fn session_opened(&self, wire: Wire) {
        self.open[wire as usize].inc();
    }

    /// How its first `ready` came out. Exactly once a session: at that `ready`, or with
    /// `ResumeLabel::None` where it ends before it or never has one.
    pub fn session_ready(&self, wire: Wire, resume: ResumeLabel) {
        self.opened[wire as usize][resume as usize].inc();
    }

    /// The session is over.
    pub fn session_closed(&self, wire: Wire, reason: CloseReason) {
        self.open[wire as usize].dec();
        let place = CloseReason::ALL.iter().position(|r| *r == reason).expect("ALL holds every reason");
        self.closed[place].inc();
    }

    /// Sessions that ended for this reason, since the start.
    pub fn n_closed(&self, reason: CloseReason) -> u64 {
        CloseReason::ALL.iter().position(|r| *r == reason).map_or(0, |place| self.closed[place].get())
    }

    /// Requests refused with this code, since the start.
    pub fn n_refused(&self, code: RefusalCode) -> u64 {
        self.refused[code as usize].get()
    }

    /// Sessions open now, both transports.
    pub fn sessions_open(&self) -> usize {
        self.open.iter().map(|gauge| usize::try_from(gauge.get()).unwrap_or(0)).sum()
    }

    /// A request was refused before a session existed.
    pub fn refused(&self, code: RefusalCode) {
        self.refused[code as usize].inc();
    }

    /// Seconds from a request's head to the closed connection, of a refusal that waited for nobody.
    pub fn refusal_seconds(&self, seconds: f64) {
        self.refusal.observe(seconds);
    }

    /// A revocation check was answered.
    pub fn revocation_checked(&self, source: RevocationSource) {
        self.revocation[source as usize].inc();
    }

    /// An event was published through this node.
    pub fn published(&self) {
        self.published.inc();
    }

    /// `n` events left for one client.
    pub fn delivered(&self, wire: Wire, n: u64) {
        self.delivered[wire as usize].inc_by(n);
    }

    /// Seconds from publish to socket write. Takes a short lock: observe once a write, not once
    /// an event.
    pub fn delivery_seconds(&self, seconds: f64, n_writes: usize) {
        (0..n_writes).for_each(|_| self.delivery.observe(seconds));
    }

    /// Seconds that an admission took from its head to the decision.
    pub fn auth_seconds(&self, seconds: f64) {
        self.auth.observe(seconds);
    }

    /// Bytes that began (positive) or ceased (negative) to wait in outboxes.
    pub fn outbox_bytes(&self, delta: i64) {
        self.outbox.inc_by(delta);
    }

    /// A `gap` was told to a client.
    pub fn gap(&self, reason: GapReason) {
        self.gaps[reason as usize].inc();
    }

    /// Whether a link to Redis stands.
    pub fn redis_up(&self, link: RedisLink, is_up: bool) {
        self.redis_up.get_or_create(&[("link", link.word())]).set(i64::from(is_up));
    }

    /// A lost link was repaired from the log.
    pub fn redis_repair(&self) {
        self.redis_repairs.inc();
    }

    /// An event from another writer could not be delivered.
    pub fn skipped(&self, reason: SkipReason) {
        self.skipped[reason as usize].inc();
    }

    /// How late the main runtime runs what is due, over the last window.
    pub fn runtime_lag(&self, p50: Duration, p99: Duration, max: Duration) {
        for ((_, gauge), value) in self.lag.iter().zip([p50, p99, max]) {
            gauge.set(value.as_secs_f64());
        }
    }

    /// The accept bucket now: refill a second, and what it holds.
    pub fn accept(&self, rate: f64, tokens: f64) {
        self.accept_rate.set(rate);
        self.accept_tokens.set(tokens);
    }

    /// Admissions a second that the accept bucket refills, as it was said last.
    pub fn accept_rate(&self) -> f64 {
        self.accept_rate.get()
    }

    /// The token keys that are fetched: how old the set is, and how long fetching has failed.
    pub fn keys(&self, age: Duration, failing_for: Duration) {
        self.keys_age.set(age.as_secs_f64());
        self.keys_failing.set(failing_for.as_secs_f64());
    }

    /// The phase the node is in.
    pub fn phase(&self, phase: Phase) {
        for (gauge, each) in self.phase.iter().zip(Phase::ALL) {
            gauge.set(i64::from(each == phase));
        }
    }

    /// A panic was caught in a plugin.
    pub fn plugin_panicked(&self) {
        self.plugin_panics.inc();
    }

    /// `n` sessions were cut at the drain's deadline.
    pub fn drain_forced(&self, n: u64) {
        self.drain_forced.inc_by(n);
    }

    /// The fleet as this node knows it now.
    pub fn fleet(&self, figures: FleetFigures) {
        let values =
            [figures.n_nodes as f64, figures.n_sessions as f64, figures.share, figures.cv, figures.busiest_ratio];
        for (gauge, value) in self.fleet.iter().zip(values) {
            gauge.set(value);
        }
    }

    /// `n` sessions were asked to move to an emptier node.
    pub fn shed(&self, n: u64) {
        self.shed.inc_by(n);
    }

    /// What the balancer in front seems to go by.
    pub fn lb_policy(&self, observed: LbPolicy) {
        for (gauge, each) in self.lb_policy.iter().zip(LbPolicy::ALL) {
            gauge.set(i64::from(*each == observed));
        }
    }

    /// All that keeps sessions where they are at the moment; empty: nothing.
    pub fn shed_suspended(&self, reasons: &[ShedSuspension]) {
        for (gauge, each) in self.shed_suspended.iter().zip(ShedSuspension::ALL) {
            gauge.set(i64::from(reasons.contains(each)));
        }
    }
}

fn register(registry: &mut Registry, name: &str, help: &str, metric: impl Metric) {
    registry.register(name, help, metric);
}

/// Registers a metric under its name without the suffixes `_total` and `_info`, which the
/// exposition adds by its type, and hands it back.
fn add<M: Metric + Clone>(registry: &mut Registry, name: &str, help: &str, metric: M) -> M {
    register(registry, name, help, metric.clone());
    metric
}

/// One handle a value of a closed set, in the set's order. Values that share a word share a series.
fn by<M, E: Copy>(
    registry: &mut Registry,
    name: &str,
    help: &str,
    label: &'static str,
    all: &[E],
    word: impl Fn(E) -> &'static str,
) -> Vec<M>
where
    M: Metric + Clone + Default,
    Family<Label, M>: Metric,
{
    let family = add(registry, name, help, Family::<Label, M>::default());
    all.iter().map(|value| family.get_or_create_owned(&[(label, word(*value))])).collect()
}

fn by_wire<M>(registry: &mut Registry, name: &str, help: &str) -> [M; 2]
where
    M: Metric + Clone + Default,
    Family<Label, M>: Metric,
{
    let family = add(registry, name, help, Family::<Label, M>::default());
    WIRES.map(|wire| family.get_or_create_owned(&[("transport", wire.word())]))
}

#[cfg(test)]
mod tests {
    use super::*;

    const FAMILIES: [(&str, &str); 36] = [
        ("gateway_sessions_open", "gauge"),
        ("gateway_sessions_opened_total", "counter"),
        ("gateway_sessions_closed_total", "counter"),
        ("gateway_refused_total", "counter"),
        ("gateway_refusal_seconds", "histogram"),
        ("gateway_accept_rate", "gauge"),
        ("gateway_keys_age_seconds", "gauge"),
        ("gateway_keys_failing_seconds", "gauge"),
        ("gateway_accept_tokens", "gauge"),
        ("gateway_auth_seconds", "histogram"),
        ("gateway_revocation_checks_total", "counter"),
        ("gateway_events_published_total", "counter"),
        ("gateway_events_delivered_total", "counter"),
        ("gateway_events_skipped_total", "counter"),
        ("gateway_delivery_seconds", "histogram"),
        ("gateway_outbox_bytes", "gauge"),
        ("gateway_gaps_total", "counter"),
        ("gateway_redis_up", "gauge"),
        ("gateway_redis_repairs_total", "counter"),
        ("gateway_runtime_lag_seconds", "summary"),
        ("gateway_fleet_nodes", "gauge"),
        ("gateway_fleet_sessions", "gauge"),
        ("gateway_fleet_share", "gauge"),
        ("gateway_fleet_cv", "gauge"),
        ("gateway_fleet_busiest_ratio", "gauge"),
        ("gateway_shed_total", "counter"),
        ("gateway_shed_suspended", "gauge"),
        ("gateway_lb_policy_observed", "gauge"),
        ("gateway_phase", "gauge"),
        ("gateway_build_info", "gauge"),
        ("gateway_plugin_panics_total", "counter"),
        ("gateway_drain_forced_total", "counter"),
        ("process_cpu_seconds_total", "counter"),
        ("process_resident_memory_bytes", "gauge"),
        ("process_open_fds", "gauge"),
        ("process_start_time_seconds", "gauge"),
    ];

    /// The value of the series written exactly so, labels in any order of the encoder's own.
    fn value(metrics: &Metrics, series: &str) -> f64 {
        let text = metrics.encode();
        let line = text.lines().find_map(|line| line.strip_prefix(series)?.strip_prefix(' '));
        line.unwrap_or_else(|| panic!("{series} is missing in\n{text}")).parse().unwrap()
    }

    #[test]
    fn every_family_stands_once_in_the_exposition_with_its_help_and_type() {
        let metrics = Metrics::new("1.2.3");
        metrics.redis_up(RedisLink::Pubsub, true);
        let text = metrics.encode();
        for (name, kind) in FAMILIES {
            let n = |line: &str| text.lines().filter(|l| *l == line || l.starts_with(&format!("{line} "))).count();
            assert_eq!(n(&format!("# HELP {name}")), 1, "HELP of {name}");
            assert_eq!(n(&format!("# TYPE {name} {kind}")), 1, "TYPE of {name}");
        }
        let declared = text.lines().filter(|line| line.starts_with("# TYPE ")).count();
        assert_eq!(declared, FAMILIES.len() + 1, "process_max_fds and those listed, no other");
        assert!(text.ends_with('\n') && !text.contains("# EOF"));
    }

    #[test]
    fn every_series_stands_once_and_belongs_to_a_declared_family() {
        let text = Metrics::new("1.2.3").encode();
        let mut seen = std::collections::HashSet::new();
        for line in text.lines().filter(|line| !line.starts_with('#')) {
            let (series, value) = line.rsplit_once(' ').unwrap();
            assert!(seen.insert(series), "{series} twice");
            assert!(value.parse::<f64>().is_ok(), "{line}");
            let name = series.split('{').next().unwrap();
            let stem = ["_bucket", "_sum", "_count"].iter().find_map(|s| name.strip_suffix(s)).unwrap_or(name);
            assert!(text.contains(&format!("# TYPE {stem} ")), "{line}");
        }
    }

    #[test]
    fn a_session_counts_up_once_and_down_once() {
        let metrics = Metrics::new("1.2.3");
        metrics.session_opened(Wire::Ws);
        metrics.session_opened(Wire::Sse);
        assert_eq!(metrics.sessions_open(), 2);
        metrics.session_ready(Wire::Ws, ResumeLabel::Ok);
        metrics.session_ready(Wire::Sse, ResumeLabel::None);
        metrics.session_closed(Wire::Ws, CloseReason::Drain);
        assert_eq!(metrics.sessions_open(), 1);
        assert_eq!(value(&metrics, "gateway_sessions_open{transport=\"ws\"}"), 0.0);
        assert_eq!(value(&metrics, "gateway_sessions_open{transport=\"sse\"}"), 1.0);
        assert_eq!(value(&metrics, "gateway_sessions_opened_total{transport=\"ws\",resume=\"ok\"}"), 1.0);
        assert_eq!(value(&metrics, "gateway_sessions_opened_total{transport=\"sse\",resume=\"none\"}"), 1.0);
        assert_eq!(value(&metrics, "gateway_sessions_closed_total{reason=\"drain\"}"), 1.0);
    }

    #[test]
    fn every_value_of_a_closed_set_counts_under_its_own_word() {
        let metrics = Metrics::new("1.2.3");
        for (n, reason) in CloseReason::ALL.into_iter().enumerate() {
            let series = format!("gateway_sessions_closed_total{{reason=\"{}\"}}", reason.word());
            let before = value(&metrics, &series);
            metrics.session_closed(WIRES[n % 2], reason);
            assert_eq!(value(&metrics, &series), before + 1.0, "{series}");
        }
        for code in RefusalCode::ALL {
            metrics.refused(code);
            assert_eq!(value(&metrics, &format!("gateway_refused_total{{code=\"{}\"}}", code.word())), 1.0);
        }
        for reason in GapReason::ALL {
            metrics.gap(reason);
            assert_eq!(value(&metrics, &format!("gateway_gaps_total{{reason=\"{}\"}}", reason.word())), 1.0);
        }
        for source in RevocationSource::ALL {
            metrics.revocation_checked(*source);
            let series = format!("gateway_revocation_checks_total{{source=\"{}\"}}", source.word());
            assert_eq!(value(&metrics, &series), 1.0);
        }
        for reason in SkipReason::ALL {
            metrics.skipped(*reason);
            assert_eq!(value(&metrics, &format!("gateway_events_skipped_total{{reason=\"{}\"}}", reason.word())), 1.0);
        }
    }

    #[test]
    fn exactly_one_phase_is_set() {
        let metrics = Metrics::new("1.2.3");
        assert_eq!(value(&metrics, "gateway_phase{phase=\"starting\"}"), 1.0);
        for phase in Phase::ALL {
            metrics.phase(phase);
            for each in Phase::ALL {
                let series = format!("gateway_phase{{phase=\"{}\"}}", each.word());
                assert_eq!(value(&metrics, &series), f64::from(u8::from(each == phase)));
            }
        }
    }

    #[test]
    fn a_node_without_redis_has_no_link_that_could_be_down() {
        let metrics = Metrics::new("1.2.3");
        assert!(!metrics.encode().contains("gateway_redis_up{"));
        metrics.redis_up(RedisLink::Pubsub, true);
        assert_eq!(value(&metrics, "gateway_redis_up{link=\"pubsub\"}"), 1.0);
        metrics.redis_up(RedisLink::Pubsub, false);
        assert_eq!(value(&metrics, "gateway_redis_up{link=\"pubsub\"}"), 0.0);
    }

    #[test]
    fn gauges_hold_what_was_set_and_outbox_bytes_come_back_to_zero() {
        let metrics = Metrics::new("1.2.3");
        metrics.outbox_bytes(700);
        metrics.outbox_bytes(-700);
        assert_eq!(value(&metrics, "gateway_outbox_bytes"), 0.0);
        metrics.accept(100.0, 199.5);
        assert_eq!(value(&metrics, "gateway_accept_tokens"), 199.5);
        metrics.runtime_lag(Duration::from_millis(2), Duration::from_millis(250), Duration::from_secs(1));
        assert_eq!(value(&metrics, "gateway_runtime_lag_seconds{quantile=\"0.99\"}"), 0.25);
        metrics.fleet(FleetFigures { n_nodes: 3, n_sessions: 9, share: 0.25, cv: 0.1, busiest_ratio: 1.5 });
        assert_eq!(value(&metrics, "gateway_fleet_busiest_ratio"), 1.5);
        metrics.shed_suspended(&[ShedSuspension::Hold, ShedSuspension::Deploy]);
        assert_eq!(value(&metrics, "gateway_shed_suspended{reason=\"deploy\"}"), 1.0);
        assert_eq!(value(&metrics, "gateway_lb_policy_observed{policy=\"unknown\"}"), 1.0);
        metrics.lb_policy(LbPolicy::Sticky);
        assert_eq!(value(&metrics, "gateway_lb_policy_observed{policy=\"unknown\"}"), 0.0);
        assert_eq!(value(&metrics, "gateway_lb_policy_observed{policy=\"sticky\"}"), 1.0);
        metrics.shed_suspended(&[]);
        assert_eq!(value(&metrics, "gateway_shed_suspended{reason=\"deploy\"}"), 0.0);
        assert_eq!(value(&metrics, "gateway_build_info{version=\"1.2.3\"}"), 1.0);
    }
}
