//! What does one admitted handshake cost the gateway and Redis: anonymous, with a token that nobody
//! has seen before, with a token that comes again? Rounds of each kind alternate on one gateway, so
//! that whatever else the machine does meets all of them alike. A handshake is: connect, request,
//! 101, reset.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use clap::{Args, ValueEnum};
use serde_json::json;
use tokio::io::AsyncWriteExt;
use tokio::net::TcpStream;
use tokio::task::JoinSet;
use tokio::time::{Instant, timeout};

use crate::fleet::{Gateway, Programs, Redis};
use crate::probe::Metrics;
use crate::process;
use crate::report::{Bound, Report, Sheet};
use crate::token;
use crate::wire::{Address, Subscriber, Transport, read_head, request, status};

const CHANNEL: &str = "demo";
/// Of one handshake; a slower one has failed.
const PATIENCE: Duration = Duration::from_secs(10);
/// Until the sessions of a round are gone.
const SETTLE: Duration = Duration::from_secs(30);
/// What a revocation check asks Redis for: `jti`, `sid`, `sub`.
const KEYS: f64 = 3.0;
/// Checks in one question from which on its cost is promised.
const LARGE_BATCH: f64 = 16.0;

/// `tidegate-loadtest handshakes`.
#[derive(Args)]
pub struct Options {
    #[command(flatten)]
    programs: Programs,
    /// Handshakes a round
    #[arg(long, default_value_t = 10_000)]
    handshakes: usize,
    /// Rounds of each kind, at each concurrency
    #[arg(long, default_value_t = 3)]
    rounds: usize,
    /// Handshakes at a time; may be repeated
    #[arg(long, default_values_t = [64, 512])]
    concurrency: Vec<usize>,
    /// Rounds of this kind alone, for a profiler; nothing is compared then
    #[arg(long, value_enum)]
    only: Option<Kind>,
    /// Ask for no channel: the handshake alone, without a subscription
    #[arg(long)]
    bare: bool,
    /// Let `sub` join its own channel, as a gateway does by default: one Redis subscription a user
    #[arg(long)]
    user_channel: bool,
}

/// As whom a round connects.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Kind {
    /// Without a token
    Anonymous,
    /// Every handshake with a token of its own
    Distinct,
    /// All with the same token
    Repeated,
}

const KINDS: [Kind; 3] = [Kind::Anonymous, Kind::Distinct, Kind::Repeated];

impl Kind {
    fn word(self) -> &'static str {
        match self {
            Kind::Anonymous => "anonymous",
            Kind::Distinct => "distinct",
            Kind::Repeated => "repeated",
        }
    }
}

/// What rounds of one kind cost together.
#[derive(Clone, Copy, Debug, Default)]
struct Cost {
    n: usize,
    n_failed: usize,
    gateway: Duration,
    redis_s: f64,
    n_mget: u64,
    took: Duration,
}

impl Cost {
    fn add(&mut self, other: Cost) {
        self.n += other.n;
        self.n_failed += other.n_failed;
        self.gateway += other.gateway;
        self.redis_s += other.redis_s;
        self.n_mget += other.n_mget;
        self.took += other.took;
    }

    fn gateway_us(&self) -> f64 {
        self.gateway.as_secs_f64() * 1e6 / self.n.max(1) as f64
    }

    fn redis_us(&self) -> f64 {
        self.redis_s * 1e6 / self.n.max(1) as f64
    }

    /// Checks that shared a question, on average.
    fn batch(&self) -> f64 {
        self.n as f64 / self.n_mget.max(1) as f64
    }
}

pub async fn run(options: Options) -> Result<Report, String> {
    let redis = options.programs.redis().await?;
    let user_channel = if options.user_channel { "on" } else { "off" };
    let settings = [
        ("GATEWAY_REDIS_URL", redis.url()),
        ("GATEWAY_ACCEPT_BURST", "1000000".to_owned()),
        ("GATEWAY_ACCEPT_RATE", "1000000".to_owned()),
        ("GATEWAY_HANDSHAKES", "8192".to_owned()),
        ("GATEWAY_ANONYMOUS_CHANNELS", CHANNEL.to_owned()),
        ("GATEWAY_USER_CHANNEL", user_channel.to_owned()),
    ];
    let gateway = options.programs.gateway(&settings).await?;
    // Keeps the channel, so that no round pays for its subscription in Redis.
    let keeper = Subscriber::open(&Address::of(gateway.public), Transport::Ws, None, CHANNEL).await?;
    let mut sheet = Sheet::new("handshakes");
    sheet.figure("handshakes", "handshakes a round", options.handshakes, "");
    sheet.figure("rounds", "rounds of each kind", options.rounds, "");
    let channel = if options.bare { "" } else { CHANNEL };
    // Buffers grow, caches fill: not measured.
    for kind in KINDS {
        round(&options, kind, 0, options.concurrency[0], channel, &gateway, &redis).await?;
    }
    for concurrency in &options.concurrency {
        let mut costs = [Cost::default(); KINDS.len()];
        for n in 1..=options.rounds {
            let wanted = |(kind, _): &(Kind, _)| options.only.is_none_or(|only| only == *kind);
            for (kind, cost) in KINDS.into_iter().zip(&mut costs).filter(wanted) {
                cost.add(round(&options, kind, n, *concurrency, channel, &gateway, &redis).await?);
            }
        }
        show(&mut sheet, *concurrency, &costs);
    }
    drop(keeper);
    Ok(sheet.finish())
}

fn show(sheet: &mut Sheet, concurrency: usize, costs: &[Cost; KINDS.len()]) {
    sheet.line(format!("{concurrency} at a time:"));
    let base = costs[0];
    for (kind, cost) in KINDS.into_iter().zip(costs) {
        let rate = cost.n as f64 / cost.took.as_secs_f64();
        let (gateway_us, redis_us) = (cost.gateway_us(), cost.redis_us());
        let ratio = gateway_us / base.gateway_us();
        sheet.line(format!(
            "{:<10} gateway {gateway_us:6.1} us, x{ratio:.2} · Redis {redis_us:5.1} us, {:.1} checks a question · {rate:.0}/s",
            kind.word(),
            if cost.n_mget == 0 { 0.0 } else { cost.batch() },
        ));
        let figures = json!({
            "gateway_us": gateway_us, "ratio": ratio, "redis_us": redis_us, "mgets": cost.n_mget,
            "keys_per_mget": (cost.n_mget > 0).then(|| KEYS * cost.batch()), "per_s": rate, "n": cost.n, "failed": cost.n_failed,
        });
        sheet.data(&format!("{}_{concurrency}", kind.word()), figures);
    }
    let distinct = costs[1];
    let failed: usize = costs.iter().map(|cost| cost.n_failed).sum();
    sheet.promise(
        &format!("handshakes that failed, {concurrency} at a time"),
        Some(failed as f64),
        Bound::AtMost(0.0),
        "",
    );
    let ratio = distinct.gateway_us() / base.gateway_us();
    sheet.promise(
        &format!("with a token to anonymous, {concurrency} at a time"),
        Some(ratio),
        Bound::AtMost(1.3),
        "times",
    );
    let more = distinct.redis_us() - base.redis_us();
    let is_large = distinct.batch() >= LARGE_BATCH;
    let what = format!("Redis for three keys in batches >= {LARGE_BATCH}, {concurrency} at a time");
    sheet.promise(&what, is_large.then_some(more), Bound::AtMost(8.0), "us");
}

async fn round(
    options: &Options,
    kind: Kind,
    n: usize,
    concurrency: usize,
    channel: &str,
    gateway: &Gateway,
    redis: &Redis,
) -> Result<Cost, String> {
    let authority = gateway.public.to_string();
    let token_of = |at: usize| match kind {
        Kind::Anonymous => None,
        Kind::Distinct => Some(may_hear(&format!("{concurrency}-{n}-{at}"))),
        Kind::Repeated => Some(may_hear("again")),
    };
    let all = (0..options.handshakes).map(|at| request(&authority, Transport::Ws, token_of(at).as_deref(), channel));
    let requests: Arc<[String]> = all.collect();
    let mut asking = redis.connect().await?;
    let (redis_before, before) = (asking.counts().await?, process::cpu_time(gateway.pid())?);
    let began = Instant::now();
    let n_failed = shake(&requests, concurrency, gateway.public).await;
    let took = began.elapsed();
    until_gone(gateway).await?;
    let redis_after = asking.counts().await?.since(&redis_before);
    Ok(Cost {
        n: requests.len() - n_failed,
        n_failed,
        gateway: process::cpu_time(gateway.pid())? - before,
        redis_s: redis_after.cpu_s,
        n_mget: redis_after.of("mget"),
        took,
    })
}

/// A token that joins nothing by itself, so that `--bare` is, and may ask for the channel.
fn may_hear(name: &str) -> String {
    token::asking(name, &[CHANNEL])
}

/// All requests, so many at a time; gives how many were not answered by 101.
pub async fn shake(requests: &Arc<[String]>, concurrency: usize, to: SocketAddr) -> usize {
    let next = Arc::new(AtomicUsize::new(0));
    let mut workers = JoinSet::new();
    for _ in 0..concurrency {
        let (requests, next) = (Arc::clone(requests), Arc::clone(&next));
        workers.spawn(async move {
            let mut n_failed = 0;
            while let Some(request) = requests.get(next.fetch_add(1, Ordering::Relaxed)) {
                let shaken = timeout(PATIENCE, handshake(to, request)).await;
                n_failed += usize::from(!matches!(shaken, Ok(Ok(Some(101)))));
            }
            n_failed
        });
    }
    workers.join_all().await.into_iter().sum()
}

async fn handshake(to: SocketAddr, request: &str) -> Result<Option<u16>, String> {
    let mut stream = TcpStream::connect(to).await.map_err(|error| error.to_string())?;
    stream.set_nodelay(true).map_err(|error| error.to_string())?;
    stream.write_all(request.as_bytes()).await.map_err(|error| error.to_string())?;
    let (head, _) = read_head(&mut stream).await?;
    // Reset, not closed: no port is left waiting.
    stream.set_zero_linger().map_err(|error| error.to_string())?;
    Ok(status(&head))
}

/// Waits for the end of all sessions but the keeper's: what they cost belongs to their round.
pub async fn until_gone(gateway: &Gateway) -> Result<(), String> {
    let until = Instant::now() + SETTLE;
    loop {
        let open = Metrics::read(gateway.probes).await?.sum("gateway_sessions_open").unwrap_or(0.0);
        if open <= 1.0 {
            return Ok(());
        }
        if Instant::now() >= until {
            return Err(format!("{open} sessions are still open:\n{}", gateway.log()));
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}
