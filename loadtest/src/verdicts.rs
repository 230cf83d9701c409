//! Thousands connect while Redis is slow, silent or of no use: does every one of them get an answer
//! in time, and the right one? Tokens are good, revoked, expired and forged, in a mix; the wrong
//! answers are an admission of a bad token and a 401 for a good one. A 503 is never wrong.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use clap::{Args, ValueEnum};
use serde_json::json;
use tokio::io::AsyncWriteExt;
use tokio::net::TcpStream;
use tokio::task::JoinSet;
use tokio::time::{Instant, timeout};

use crate::delay::SlowWire;
use crate::fleet::{Gateway, Programs, Redis, free_port};
use crate::probe::Metrics;
use crate::report::{Bound, Report, Sheet};
use crate::timeline::quantile;
use crate::token::{self, Flaw};
use crate::wire::{Failure, Subscriber, Transport, read_code, read_head, request, status};
use crate::{positive, process};

/// GATEWAY_AUTH_TIMEOUT, and what a busy machine gets on top of it.
const DEADLINE: Duration = Duration::from_secs(1);
const SLACK: Duration = Duration::from_millis(250);
/// A client that has no verdict by then has none.
const PATIENCE: Duration = Duration::from_secs(10);
/// For the gateway to come to rest.
const SETTLE: Duration = Duration::from_secs(10);
/// Keys of a Redis that is loading, and how long each takes: half a minute.
const N_LOADED: usize = 60_000;
const LOAD_DELAY_US: &str = "500";

/// What is the matter with Redis.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Trouble {
    /// Nothing
    Ok,
    /// Answers 5 ms late
    #[value(name = "delay-5ms")]
    Delay5ms,
    /// Answers 200 ms late
    #[value(name = "delay-200ms")]
    Delay200ms,
    /// Stands still (SIGSTOP)
    Stopped,
    /// A replica of a master that is gone
    Readonly,
    /// Restarted, and reads its data for half a minute: -LOADING
    Loading,
}

/// `tidegate-loadtest verdicts`.
#[derive(Args)]
pub struct Options {
    #[command(flatten)]
    programs: Programs,
    /// What is the matter with Redis
    #[arg(long, value_enum, default_value_t = Trouble::Ok)]
    redis: Trouble,
    /// How many connect
    #[arg(long, default_value_t = 10_000)]
    connects: usize,
    /// Over so many seconds
    #[arg(long, default_value_t = 4.0, value_parser = positive)]
    over: f64,
}

/// What a token deserves.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Kind {
    Good,
    Revoked,
    Expired,
    Forged,
}

impl Kind {
    /// Half of them are good.
    fn of(n: usize) -> Kind {
        [Kind::Good, Kind::Revoked, Kind::Good, Kind::Expired, Kind::Good, Kind::Forged][n % 6]
    }

    fn word(self) -> &'static str {
        match self {
            Kind::Good => "good",
            Kind::Revoked => "revoked",
            Kind::Expired => "expired",
            Kind::Forged => "forged",
        }
    }

    fn token(self, n: usize) -> String {
        let flaw = match self {
            Kind::Good | Kind::Revoked => Flaw::None,
            Kind::Expired => Flaw::Expired,
            Kind::Forged => Flaw::BadSignature,
        };
        token::full(&n.to_string(), &["demo"], flaw)
    }

    /// A 503 is never wrong; silence is counted elsewhere.
    fn is_wrong(self, verdict: &Verdict) -> bool {
        match verdict {
            Verdict::Status { status: 503, .. } | Verdict::None(_) => false,
            Verdict::Status { status, code } => match self {
                Kind::Good => *status != 101,
                Kind::Revoked => code != "token_revoked",
                Kind::Expired => code != "token_expired",
                Kind::Forged => code != "token_invalid",
            },
        }
    }
}

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Verdict {
    Status { status: u16, code: String },
    None(String),
}

impl Verdict {
    fn text(&self) -> String {
        match self {
            Verdict::Status { status, code } => format!("{status} {code}").trim_end().to_owned(),
            Verdict::None(why) => format!("none ({why})"),
        }
    }
}

/// One connect.
struct Case {
    kind: Kind,
    verdict: Verdict,
    /// From the head's last byte to the status line.
    took: Duration,
}

pub async fn run(options: Options) -> Result<Report, String> {
    let mut redis = options.programs.redis().await?;
    let wire = match options.redis {
        Trouble::Delay5ms => Some(SlowWire::start(redis.port, Duration::from_millis(5)).await?),
        Trouble::Delay200ms => Some(SlowWire::start(redis.port, Duration::from_millis(200)).await?),
        _ => None,
    };
    let settings = [
        ("GATEWAY_REDIS_URL", Redis::url_at(wire.as_ref().map_or(redis.port, |wire| wire.port))),
        ("GATEWAY_ACCEPT_BURST", "1000000".to_owned()),
        ("GATEWAY_ACCEPT_RATE", "1000000".to_owned()),
        ("GATEWAY_AUTH_TIMEOUT", format!("{}ms", DEADLINE.as_millis())),
    ];
    let gateway = options.programs.gateway(&settings).await?;
    let revoked = (0..options.connects).filter(|n| Kind::of(*n) == Kind::Revoked);
    // The three kinds in turn, as somebody else would write them.
    let keys: Vec<String> = revoked
        .enumerate()
        .map(|(at, n)| match at % 3 {
            0 => format!("tidegate:revoked:jti:j-{n}"),
            1 => format!("tidegate:revoked:sid:s-{n}"),
            _ => format!("tidegate:revoked:sub:u-{n}"),
        })
        .collect();
    redis.connect().await?.set_all(&keys, "4102444800").await?;
    trouble(&options, &mut redis).await?;

    let before = Rest::of(&gateway).await?;
    let cases = connect_all(&options, gateway.public).await;
    let after = at_rest(&gateway).await?;
    relief(options.redis, &mut redis).await?;
    let n_good_later = good_ones(&options, gateway.public).await;
    Ok(judge(&options, &cases, &before, &after, n_good_later))
}

/// Brings Redis into its state.
async fn trouble(options: &Options, redis: &mut Redis) -> Result<(), String> {
    match options.redis {
        Trouble::Ok | Trouble::Delay5ms | Trouble::Delay200ms => Ok(()),
        Trouble::Stopped => redis.stop(),
        Trouble::Readonly => {
            let nobody = free_port()?.to_string();
            redis.connect().await?.run(&["REPLICAOF", "127.0.0.1", &nobody]).await.map(drop)
        }
        Trouble::Loading => {
            let mut asking = redis.connect().await?;
            let keys: Vec<String> = (0..N_LOADED).map(|n| format!("ballast:{n}")).collect();
            asking.set_all(&keys, "x").await?;
            asking.run(&["SAVE"]).await?;
            // A real server that really loads, only slowly, and looks at its connections meanwhile.
            let slowly = ["--key-load-delay", LOAD_DELAY_US, "--loading-process-events-interval-bytes", "1024"];
            redis.restart(&slowly, "LOADING").await
        }
    }
}

/// Brings it back.
async fn relief(trouble: Trouble, redis: &mut Redis) -> Result<(), String> {
    match trouble {
        Trouble::Ok | Trouble::Delay5ms | Trouble::Delay200ms => Ok(()),
        Trouble::Stopped => redis.go_on(),
        Trouble::Readonly => redis.connect().await?.run(&["REPLICAOF", "NO", "ONE"]).await.map(drop),
        Trouble::Loading => redis.restart(&[], "PONG").await,
    }
}

async fn connect_all(options: &Options, to: SocketAddr) -> Vec<Case> {
    let heads: Arc<[String]> = (0..options.connects)
        .map(|n| request(&to.to_string(), Transport::Ws, Some(&Kind::of(n).token(n)), ""))
        .collect();
    let mut connecting = JoinSet::new();
    let mut pace = tokio::time::interval(Duration::from_secs_f64(options.over / options.connects as f64));
    for n in 0..options.connects {
        pace.tick().await;
        let heads = Arc::clone(&heads);
        connecting.spawn(async move { case(Kind::of(n), to, &heads[n]).await });
    }
    connecting.join_all().await
}

async fn case(kind: Kind, to: SocketAddr, head: &str) -> Case {
    let mut took = Duration::ZERO;
    let verdict = timeout(PATIENCE, ask(to, head, &mut took)).await;
    let verdict = verdict.unwrap_or_else(|_| Err("no answer in time".to_owned())).unwrap_or_else(Verdict::None);
    Case { kind, verdict, took }
}

async fn ask(to: SocketAddr, head: &str, took: &mut Duration) -> Result<Verdict, String> {
    let text = |error: std::io::Error| error.kind().to_string();
    let mut stream = TcpStream::connect(to).await.map_err(text)?;
    stream.set_nodelay(true).map_err(text)?;
    let began = Instant::now();
    stream.write_all(head.as_bytes()).await.map_err(text)?;
    let (answer, rest) = read_head(&mut stream).await?;
    *took = began.elapsed();
    let status = status(&answer).ok_or("no status")?;
    let code = if status == 101 { String::new() } else { read_code(&mut stream, &answer, rest).await };
    Ok(Verdict::Status { status, code })
}

/// A hundred good tokens, once Redis is well; gives how many got in within the patience.
async fn good_ones(options: &Options, to: SocketAddr) -> usize {
    let mut connecting = JoinSet::new();
    for n in 0..100 {
        let token = Kind::Good.token(options.connects + n);
        connecting.spawn(async move { timeout(SETTLE, good_one(to, &token)).await.unwrap_or(false) });
    }
    connecting.join_all().await.into_iter().filter(|is_in| *is_in).count()
}

async fn good_one(to: SocketAddr, token: &str) -> bool {
    loop {
        match Subscriber::connect(&to.to_string(), Transport::Ws, Some(token), "").await {
            Ok(_) => return true,
            // Not yet; the gateway finds out by itself.
            Err(Failure::Refused { status: 503, .. }) => tokio::time::sleep(Duration::from_millis(100)).await,
            Err(why) => {
                eprintln!("a good token afterwards: {why}");
                return false;
            }
        }
    }
}

/// What the gateway holds.
struct Rest {
    metrics: Metrics,
    resident: u64,
    n_descriptors: usize,
}

impl Rest {
    async fn of(gateway: &Gateway) -> Result<Rest, String> {
        Ok(Rest {
            metrics: Metrics::read(gateway.probes).await?,
            resident: process::resident_bytes(gateway.pid())?,
            n_descriptors: process::n_descriptors(gateway.pid())?,
        })
    }

    fn open(&self) -> f64 {
        self.metrics.sum("gateway_sessions_open").unwrap_or(0.0)
    }
}

/// Waits for the last session's end, within bounds.
async fn at_rest(gateway: &Gateway) -> Result<Rest, String> {
    let until = Instant::now() + SETTLE;
    loop {
        let rest = Rest::of(gateway).await?;
        if rest.open() == 0.0 || Instant::now() >= until {
            return Ok(rest);
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}

fn judge(options: &Options, cases: &[Case], before: &Rest, after: &Rest, n_good_later: usize) -> Report {
    let mut sheet = Sheet::new("verdicts");
    let redis = options.redis.to_possible_value().map(|value| value.get_name().to_owned()).unwrap_or_default();
    sheet.figure("redis", "Redis", redis, "");
    sheet.figure("connects", "connects", cases.len(), &format!("over {} s", options.over));
    let mut classes: BTreeMap<(Kind, String), Vec<Duration>> = BTreeMap::new();
    for case in cases {
        classes.entry((case.kind, case.verdict.text())).or_default().push(case.took);
    }
    let ms = |took: &[Duration], part| quantile(took, part).map(|took| took.as_secs_f64() * 1e3);
    let mut shown = Vec::new();
    for ((kind, verdict), took) in &mut classes {
        took.sort();
        let [p50, p99, max] = [0.5, 0.99, 1.0].map(|part| ms(took, part).unwrap_or(0.0));
        let n = took.len();
        sheet.line(format!(
            "{:<8} {verdict:<24} {n:>6} times · p50 {p50:.1} · p99 {p99:.1} · max {max:.1} ms",
            kind.word()
        ));
        shown.push(
            json!({"token": kind.word(), "verdict": verdict, "n": n, "p50_ms": p50, "p99_ms": p99, "max_ms": max}),
        );
    }
    sheet.data("verdicts", shown);
    let mut all: Vec<Duration> = cases.iter().map(|case| case.took).collect();
    all.sort();
    sheet.figure("p99_ms", "verdict, p99", ms(&all, 0.99), "ms");
    sheet.figure("max_ms", "verdict, slowest", ms(&all, 1.0), "ms");
    let count = |is: &dyn Fn(&Case) -> bool| Some(cases.iter().filter(|case| is(case)).count() as f64);
    let wrong = count(&|case| case.kind.is_wrong(&case.verdict));
    sheet.promise("wrong verdicts", wrong, Bound::AtMost(0.0), "");
    let silent = count(&|case| matches!(case.verdict, Verdict::None(_)));
    sheet.promise("connects without a verdict", silent, Bound::AtMost(0.0), "");
    let limit = (DEADLINE + SLACK).as_secs_f64() * 1e3;
    sheet.promise("verdict, p99", ms(&all, 0.99), Bound::AtMost(limit), "ms");
    sheet.promise("sessions open afterwards", Some(after.open()), Bound::AtMost(0.0), "");
    let mib = |bytes: u64| bytes as f64 / f64::from(1 << 20);
    sheet.figure("resident_mib", "resident", mib(after.resident), &format!("MiB, {:.1} before", mib(before.resident)));
    let more = after.n_descriptors as f64 - before.n_descriptors as f64;
    sheet.figure("descriptors", "descriptors more than before", more, "");
    for (name, value) in after.metrics.like(&["waiting", "pending", "in_flight", "inflight", "tasks"]) {
        sheet.line(format!("{name} {value}"));
    }
    if options.redis == Trouble::Ok || options.redis == Trouble::Delay5ms {
        let busy = count(&|case| case.kind == Kind::Good && case.verdict.text() != "101");
        sheet.promise("good tokens that got a 503 or nothing", busy, Bound::AtMost(0.0), "");
    }
    sheet.promise("of 100 good tokens afterwards, admitted", Some(n_good_later as f64), Bound::AtLeast(100.0), "");
    sheet.finish()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_verdict_is_wrong_where_it_says_yes_to_a_bad_token_or_never_to_a_good_one() {
        let said = |status, code: &str| Verdict::Status { status, code: code.to_owned() };
        let revoked = said(401, "token_revoked");
        let wrong = |verdict: &Verdict| {
            [Kind::Good, Kind::Revoked, Kind::Expired, Kind::Forged].map(|kind| kind.is_wrong(verdict))
        };
        assert_eq!(wrong(&said(101, "")), [false, true, true, true]);
        assert_eq!(wrong(&revoked), [true, false, true, true]);
        assert_eq!(wrong(&said(401, "token_expired")), [true, true, false, true]);
        assert_eq!(wrong(&said(503, "auth_unavailable")), [false; 4]);
        assert_eq!(wrong(&Verdict::None(String::new())), [false; 4]);
    }
}
