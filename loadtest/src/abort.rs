//! A hundred thousand handshakes given up at every point: does the gateway give back everything
//! that it took for them? Decides where and how each is broken off, and what has to be zero after it.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use clap::Args;
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::task::JoinSet;
use tokio::time::{Instant, timeout};

use crate::fleet::{Gateway, Programs, Redis};
use crate::probe::Metrics;
use crate::process;
use crate::redis::Reply;
use crate::report::{Bound, Report, Sheet};
use crate::token::{self, Flaw};
use crate::wire::{Address, Failure, Subscriber, Transport, contains, read_head, request};

/// For an answer that we wait for before we break off, and for the server's end after ours.
const PATIENCE: Duration = Duration::from_secs(3);
/// Until everything has to be given back. Channels in Redis are given up a little after their last
/// listener, and heads that never came a head's timeout later.
const SETTLE: Duration = Duration::from_secs(60);
/// Descriptors that may come and go by themselves (links to Redis, a probe's connection).
const STRAY_DESCRIPTORS: usize = 4;

/// `tidegate-loadtest abort`.
#[derive(Args)]
pub struct Options {
    #[command(flatten)]
    programs: Programs,
    /// Handshakes
    #[arg(long, default_value_t = 100_000)]
    handshakes: usize,
    /// At a time; with twice as many places, a leak shows as `at_capacity`
    #[arg(long, default_value_t = 250)]
    concurrency: usize,
    /// GATEWAY_MAX_SESSIONS: opened in full afterwards
    #[arg(long, default_value_t = 500)]
    places: usize,
    /// Repeats a run's choices
    #[arg(long, default_value_t = 1)]
    seed: u64,
}

/// How far a handshake gets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Point {
    Connected,
    MidHead,
    /// The head is sent; broken off at once, or a moment later.
    Asked,
    /// The answer's head is here.
    Answered,
    /// `ready` is here.
    Ready,
}

const POINTS: [Point; 5] = [Point::Connected, Point::MidHead, Point::Asked, Point::Answered, Point::Ready];

/// How it is broken off.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Break {
    Reset,
    /// Both directions closed.
    Close,
    /// Our direction closed; the server's end is waited for.
    Half,
}

const BREAKS: [Break; 3] = [Break::Reset, Break::Close, Break::Half];

/// What is drawn for one handshake.
struct Draw {
    point: Point,
    how: Break,
    transport: Transport,
    /// Where the head is cut, 0 to 1; how long we wait after it, as a part of 4 ms.
    part: f64,
}

impl Draw {
    fn of(dice: &mut StdRng) -> Draw {
        Draw {
            point: POINTS[dice.random_range(0..POINTS.len())],
            how: BREAKS[dice.random_range(0..BREAKS.len())],
            transport: if dice.random() { Transport::Ws } else { Transport::Sse },
            part: dice.random(),
        }
    }
}

#[derive(Default)]
struct Tally {
    by_point: [AtomicU64; POINTS.len()],
    n_refused: AtomicU64,
    /// No answer, or no end after a half-close, within the patience.
    n_stuck: AtomicU64,
    n_broken: AtomicU64,
}

pub async fn run(options: Options) -> Result<Report, String> {
    if options.concurrency > options.places {
        return Err("--places must not be below --concurrency".to_owned());
    }
    let redis = options.programs.redis().await?;
    let settings = [
        ("GATEWAY_REDIS_URL", redis.url()),
        ("GATEWAY_ACCEPT_BURST", "1000000".to_owned()),
        ("GATEWAY_ACCEPT_RATE", "1000000".to_owned()),
        ("GATEWAY_MAX_SESSIONS", options.places.to_string()),
    ];
    let gateway = options.programs.gateway(&settings).await?;
    let n_channels = Held::of(&gateway, &redis).await?.n_channels;
    warm_up(gateway.public).await?;
    let before = Held { n_channels, ..Held::of(&gateway, &redis).await? };
    let began = Instant::now();
    let tally = abort_all(&options, gateway.public).await;
    let took = began.elapsed();
    let settling = Instant::now();
    let after = at_rest(&gateway, &redis, &before).await?;
    let settled = settling.elapsed();
    let full = fill(&options, gateway.public).await;
    Ok(judge(&options, &tally, took, settled, &before, &after, full))
}

/// A few sessions, so that links to Redis that are opened at their first use are there already.
async fn warm_up(to: SocketAddr) -> Result<(), String> {
    for n in 0..8 {
        let token = token::full(&format!("warm-{n}"), &["demo"], Flaw::None);
        Subscriber::open(&Address::of(to), Transport::Ws, Some(&token), "").await?;
    }
    Ok(())
}

async fn abort_all(options: &Options, to: SocketAddr) -> Arc<Tally> {
    let (tally, next) = (Arc::new(Tally::default()), Arc::new(AtomicUsize::new(0)));
    let mut workers = JoinSet::new();
    for worker in 0..options.concurrency {
        let (tally, next, n) = (Arc::clone(&tally), Arc::clone(&next), options.handshakes);
        let mut dice = StdRng::seed_from_u64(options.seed.wrapping_mul(1 << 20) + worker as u64);
        workers.spawn(async move {
            loop {
                let at = next.fetch_add(1, Ordering::Relaxed);
                if at >= n {
                    return;
                }
                let draw = Draw::of(&mut dice);
                tally.by_point[draw.point as usize].fetch_add(1, Ordering::Relaxed);
                if abort(to, at, &draw, &tally).await.is_err() {
                    tally.n_broken.fetch_add(1, Ordering::Relaxed);
                }
            }
        });
    }
    workers.join_all().await;
    tally
}

async fn abort(to: SocketAddr, n: usize, draw: &Draw, tally: &Tally) -> Result<(), String> {
    let text = |error: std::io::Error| error.to_string();
    let token = token::full(&n.to_string(), &["demo"], Flaw::None);
    let head = request(&to.to_string(), draw.transport, Some(&token), "");
    let mut stream = TcpStream::connect(to).await.map_err(text)?;
    match draw.point {
        Point::Connected => {}
        Point::MidHead => {
            // At least a byte is missing, and one is there.
            let end = (1.0 + (head.len() - 2) as f64 * draw.part) as usize;
            stream.write_all(&head.as_bytes()[..end]).await.map_err(text)?;
        }
        Point::Asked => {
            stream.write_all(head.as_bytes()).await.map_err(text)?;
            tokio::time::sleep(Duration::from_millis(4).mul_f64(draw.part)).await;
        }
        Point::Answered | Point::Ready => {
            stream.write_all(head.as_bytes()).await.map_err(text)?;
            let answer = timeout(PATIENCE, answered(&mut stream, draw.point)).await;
            match answer {
                Ok(Ok(true)) => {}
                Ok(Ok(false)) => drop(tally.n_refused.fetch_add(1, Ordering::Relaxed)),
                Ok(Err(why)) => return Err(why),
                Err(_) => drop(tally.n_stuck.fetch_add(1, Ordering::Relaxed)),
            }
        }
    }
    match draw.how {
        Break::Reset => stream.set_zero_linger().map_err(text)?,
        Break::Close => {}
        Break::Half => {
            stream.shutdown().await.map_err(text)?;
            let mut sink = [0; 1024];
            let end = async { while let Ok(1..) = stream.read(&mut sink).await {} };
            if timeout(PATIENCE, end).await.is_err() {
                tally.n_stuck.fetch_add(1, Ordering::Relaxed);
            }
        }
    }
    Ok(())
}

/// Was it admitted? Waits for `ready` too where that is the point.
async fn answered(stream: &mut TcpStream, point: Point) -> Result<bool, String> {
    let (head, mut rest) = read_head(stream).await?;
    if !head.contains(" 101 ") && !head.contains(" 200 ") {
        return Ok(false);
    }
    while point == Point::Ready && !contains(&rest, br#""type":"ready""#) {
        if stream.read_buf(&mut rest).await.map_err(|error| error.to_string())? == 0 {
            return Err("end of stream before ready".to_owned());
        }
    }
    Ok(true)
}

/// What the gateway holds and counted.
struct Held {
    open: f64,
    opened: f64,
    closed: f64,
    n_descriptors: usize,
    /// Channels that anybody subscribes in Redis.
    n_channels: usize,
    resident: u64,
    refused: BTreeMap<String, f64>,
}

impl Held {
    async fn of(gateway: &Gateway, redis: &Redis) -> Result<Held, String> {
        let metrics = Metrics::read(gateway.probes).await?;
        let channels = redis.connect().await?.run(&["PUBSUB", "CHANNELS"]).await?;
        let n_channels = if let Reply::Array(channels) = channels { channels.len() } else { 0 };
        let sum = |name| metrics.sum(name).unwrap_or(0.0);
        Ok(Held {
            open: sum("gateway_sessions_open"),
            opened: sum("gateway_sessions_opened_total"),
            closed: sum("gateway_sessions_closed_total"),
            n_descriptors: process::n_descriptors(gateway.pid())?,
            n_channels,
            resident: process::resident_bytes(gateway.pid())?,
            refused: metrics.by("gateway_refused_total", "code"),
        })
    }

    fn is_back_at(&self, start: &Held) -> bool {
        self.open == 0.0
            && self.n_channels <= start.n_channels
            && self.n_descriptors <= start.n_descriptors + STRAY_DESCRIPTORS
    }
}

async fn at_rest(gateway: &Gateway, redis: &Redis, start: &Held) -> Result<Held, String> {
    let until = Instant::now() + SETTLE;
    loop {
        let held = Held::of(gateway, redis).await?;
        if held.is_back_at(start) || Instant::now() >= until {
            return Ok(held);
        }
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
}

/// What the places say afterwards.
struct Full {
    n_admitted: usize,
    one_more: String,
}

/// Takes every place, and asks for one more.
async fn fill(options: &Options, to: SocketAddr) -> Full {
    let mut sessions = Vec::new();
    let connect = async |n: usize| {
        let token = token::full(&format!("full-{n}"), &["demo"], Flaw::None);
        Subscriber::connect(&to.to_string(), Transport::Ws, Some(&token), "").await
    };
    for n in 0..options.places {
        match connect(n).await {
            Ok(session) => sessions.push(session),
            Err(why) => eprintln!("place {n}: {why}"),
        }
    }
    let one_more = match connect(options.places).await {
        Ok(_) => "admitted".to_owned(),
        Err(Failure::Refused { code, .. }) => code,
        Err(Failure::Broken(why)) => why,
    };
    Full { n_admitted: sessions.len(), one_more }
}

fn judge(
    options: &Options,
    tally: &Tally,
    took: Duration,
    settled: Duration,
    before: &Held,
    after: &Held,
    full: Full,
) -> Report {
    let mut sheet = Sheet::new("abort");
    let of = |count: &AtomicU64| count.load(Ordering::Relaxed);
    sheet.figure("handshakes", "handshakes", options.handshakes, "");
    for (point, n) in POINTS.iter().zip(&tally.by_point) {
        sheet.line(format!("given up at {point:?}: {}", of(n)));
    }
    sheet.figure("took_s", "in", took.as_secs_f64(), "s");
    sheet.figure("settled_s", "all given back after", settled.as_secs_f64(), "s");
    sheet.figure("opened", "sessions opened", after.opened, "");
    sheet.figure("closed", "sessions closed", after.closed, "");
    sheet.figure("refused_seen", "refused before we broke off", of(&tally.n_refused), "");
    let codes: Vec<String> = after.refused.iter().map(|(code, n)| format!("{code} {n}")).collect();
    sheet.figure("refused", "refused, by code", codes.join(", "), "");
    sheet.figure("broken", "broken by the server before our break", of(&tally.n_broken), "");
    let mib = |held: &Held| held.resident as f64 / f64::from(1 << 20);
    sheet.figure("resident_mib", "resident", mib(after), &format!("MiB, {:.1} before", mib(before)));
    let zero = Bound::AtMost(0.0);
    let for_places = after.refused.get("at_capacity").copied().unwrap_or(0.0);
    sheet.promise("refused as at_capacity, though places are enough", Some(for_places), zero, "");
    sheet.promise("no answer or no end in time", Some(of(&tally.n_stuck) as f64), zero, "");
    sheet.promise("sessions open", Some(after.open), zero, "");
    sheet.promise("opened and closed differ by", Some((after.opened - after.closed).abs()), zero, "");
    let channels = after.n_channels as f64 - before.n_channels as f64;
    sheet.promise("channels still subscribed in Redis", Some(channels), zero, "");
    let descriptors = after.n_descriptors as f64 - before.n_descriptors as f64;
    sheet.promise("descriptors more than before", Some(descriptors), Bound::AtMost(STRAY_DESCRIPTORS as f64), "");
    let wanted = Bound::AtLeast(options.places as f64);
    sheet.promise("places that can be taken again", Some(full.n_admitted as f64), wanted, "");
    sheet.figure("one_more", "and one more", full.one_more.clone(), "");
    let is_full = f64::from(u8::from(full.one_more == "at_capacity"));
    sheet.promise("one more is refused as at_capacity", Some(is_full), Bound::AtLeast(1.0), "");
    sheet.finish()
}
