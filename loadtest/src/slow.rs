//! Readers that stand still: are they ended, does the memory that waits for them stay within its
//! caps, and do the others notice? Rounds with and without them take turns on one gateway; the
//! others are the same in both.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use clap::Args;
use serde_json::json;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpSocket, TcpStream};
use tokio::task::JoinSet;
use tokio::time::Instant;

use crate::fanout::{self, Event};
use crate::feed::{Feed, PATIENCE};
use crate::fleet::{Gateway, Programs};
use crate::histogram::Histogram;
use crate::opening;
use crate::probe::Metrics;
use crate::progress::Progress;
use crate::readers::{Group, Look, Readers};
use crate::report::{Bound, Chart, Line, Report, Sheet};
use crate::stats::{median, ratios, spread};
use crate::wire::{Address, Transport, contains, read_head, request, status};
use crate::{positive, process};

const CHANNEL: &str = "bench";
const MAX_EVENTS: usize = 100_000;
/// The others' p99 with the stalled to theirs without.
const MAX_TIMES: f64 = 1.2;
/// The default of GATEWAY_OUTBOX_BYTES.
const OUTBOX_BYTES: u64 = 1 << 20;
/// What a stalled reader's kernel keeps for it: little, so that it stalls soon.
const RECEIVE_BUFFER: u32 = 4 << 10;
/// Heard by the stalled only, until the kernel takes no more for them.
const FILL_CHANNEL: &str = "fill";
const FILL_BYTES: usize = 60_000;
/// The kernel's buffers hold a few MiB.
const MAX_FILL_EVENTS: u64 = 1_000;
/// What the kernel takes of an event is counted long before this.
const SOON: Duration = Duration::from_millis(500);
/// GATEWAY_WRITE_TIMEOUT, GATEWAY_CLOSE_TIMEOUT, and what a busy machine gets on top.
const UNTIL_ENDED: Duration = Duration::from_secs(10 + 3 + 7);
/// Between two looks at the memory.
const LOOK: Duration = Duration::from_millis(100);

/// `tidegate-loadtest slow`.
#[derive(Args, Clone)]
pub struct Options {
    #[command(flatten)]
    pub programs: Programs,
    /// Readers, the stalled among them
    #[arg(long, default_value_t = 1_000)]
    pub clients: usize,
    /// Those that stop reading
    #[arg(long, default_value_t = 10)]
    pub stalled: usize,
    /// Rounds of each kind; the median counts
    #[arg(long, default_value_t = 5)]
    pub rounds: usize,
    /// Seconds of a round
    #[arg(long, default_value_t = 12.0, value_parser = positive)]
    pub seconds: f64,
    /// Events a second
    #[arg(long, default_value_t = 30.0, value_parser = positive)]
    rate: f64,
    /// Bytes of an event's data: enough to fill a stalled reader's outbox within a round
    #[arg(long, default_value_t = 4_096, value_parser = clap::value_parser!(u16).range(29..))]
    payload_bytes: u16,
}

/// What a round with stalled readers showed.
struct Stall {
    delays: Arc<Histogram>,
    /// More than before the round, at most.
    more_bytes: u64,
    /// Ended as slow, and their sockets with them.
    n_ended: usize,
    n_sockets_kept: usize,
}

pub async fn run(options: Options) -> Result<Report, String> {
    let n_others = options.clients.checked_sub(options.stalled).filter(|n| *n > 0);
    let n_others = n_others.ok_or("--clients must be above --stalled")?;
    let redis = options.programs.redis().await?;
    let gateway = options.programs.gateway(&fanout::settings(Some(&redis))).await?;
    let readers = Readers::start(Look::AtOnce)?;
    let group = Group::timed(MAX_EVENTS);
    let to = Address::of(gateway.public);
    let open = |_| opening::session(to.clone(), Transport::Ws, None, CHANNEL.to_owned());
    opening::each("opening sessions", n_others, open, |opened| readers.add(opened, &group)).await?;
    let source = fanout::redis_source(&redis).await?;
    let n_bytes = usize::from(options.payload_bytes);
    let mut feed = Feed { group, source, channel: CHANNEL, n_bytes, next: 0 };

    let over = Duration::from_secs_f64(options.seconds);
    let progress = Progress::of("rounds without and with stalled readers", 2 * options.rounds);
    // Not counted: buffers grow, pages are touched.
    load(&mut feed, options.rate, over / 4).await?;
    let (mut without, mut with) = (Vec::new(), Vec::new());
    for _ in 0..options.rounds {
        without.push(load(&mut feed, options.rate, over).await?);
        progress.step();
        with.push(stall(&options, &mut feed, &gateway, over).await?);
        progress.step();
    }
    drop(progress);
    let mut sheet = Sheet::new("slow");
    sheet.figure("readers", "readers", options.clients, "");
    sheet.figure("stalled", "of them stalled", options.stalled, "");
    sheet.figure("events_per_s", "events a second", options.rate, "");
    sheet.figure("payload_bytes", "bytes of an event's data", n_bytes, "");
    show(&options, &without, &with, &feed.group, &mut sheet);
    Ok(sheet.finish())
}

async fn load(feed: &mut Feed, rate: f64, over: Duration) -> Result<Arc<Histogram>, String> {
    let delays = Arc::new(Histogram::new());
    feed.load(rate, over, &delays, PATIENCE).await?;
    feed.settle().await?;
    Ok(delays)
}

/// A round with readers that stand still from the begin.
async fn stall(options: &Options, feed: &mut Feed, gateway: &Gateway, over: Duration) -> Result<Stall, String> {
    let ended_before = slow_ends(gateway).await?;
    let (pid, n_before) = (gateway.pid(), process::n_descriptors(gateway.pid())?);
    let bytes_before = process::resident_bytes(pid)?;
    let mut stalled = Vec::new();
    for _ in 0..options.stalled {
        stalled.push(standing(gateway.public).await?);
    }
    fill(feed, gateway).await?;
    let most = Arc::new(AtomicU64::new(bytes_before));
    // Ends with this round.
    let mut watching = JoinSet::new();
    watching.spawn(watch(pid, Arc::clone(&most)));
    let delays = load(feed, options.rate, over).await?;
    // What stands since the last events has until its write deadline, and its socket a little more.
    let until = Instant::now() + UNTIL_ENDED;
    let (mut n_ended, mut n_sockets_kept);
    loop {
        n_ended = slow_ends(gateway).await? - ended_before;
        n_sockets_kept = process::n_descriptors(pid)?.saturating_sub(n_before);
        if (n_ended >= options.stalled && n_sockets_kept == 0) || Instant::now() >= until {
            break;
        }
        tokio::time::sleep(LOOK).await;
    }
    watching.shutdown().await;
    drop(stalled);
    Ok(Stall { delays, more_bytes: most.load(Ordering::Relaxed) - bytes_before, n_ended, n_sockets_kept })
}

/// Publishes to the stalled until an event reaches none of their sockets: from then on all that they
/// hear waits in the gateway. (The gauge of what waits is a second old: it would tell when their
/// outboxes have overflowed already.)
async fn fill(feed: &mut Feed, gateway: &Gateway) -> Result<(), String> {
    for seq in 0..MAX_FILL_EVENTS {
        let before = delivered(gateway).await?;
        feed.source.publish(&[Event { channel: FILL_CHANNEL, seq }], FILL_BYTES).await?;
        if !rises(gateway, before).await? {
            return Ok(());
        }
    }
    Err("the kernel's buffers do not fill".to_owned())
}

async fn delivered(gateway: &Gateway) -> Result<f64, String> {
    Ok(Metrics::read(gateway.probes).await?.sum("gateway_events_delivered_total").unwrap_or(0.0))
}

/// Is anything delivered soon? What was just published and fits is, in a millisecond.
async fn rises(gateway: &Gateway, before: f64) -> Result<bool, String> {
    let until = Instant::now() + SOON;
    while delivered(gateway).await? <= before {
        if Instant::now() >= until {
            return Ok(false);
        }
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    Ok(true)
}

/// Keeps the most memory that a process ever had.
async fn watch(pid: u32, most: Arc<AtomicU64>) {
    loop {
        most.fetch_max(process::resident_bytes(pid).unwrap_or(0), Ordering::Relaxed);
        tokio::time::sleep(LOOK).await;
    }
}

/// A session that is ready and of which nothing more is read.
async fn standing(to: SocketAddr) -> Result<TcpStream, String> {
    let text = |error: std::io::Error| error.to_string();
    let socket = TcpSocket::new_v4().map_err(text)?;
    socket.set_recv_buffer_size(RECEIVE_BUFFER).map_err(text)?;
    let mut stream = socket.connect(to).await.map_err(text)?;
    stream.set_zero_linger().map_err(text)?;
    let request = request(&to.to_string(), Transport::Ws, None, CHANNEL);
    let request = request.replacen(" HTTP/1.1", &format!("&channel={FILL_CHANNEL} HTTP/1.1"), 1);
    stream.write_all(request.as_bytes()).await.map_err(text)?;
    let (head, mut seen) = read_head(&mut stream).await?;
    if status(&head) != Some(101) {
        return Err(format!("refused: {head}"));
    }
    while !contains(&seen, br#""type":"ready""#) {
        if stream.read_buf(&mut seen).await.map_err(text)? == 0 {
            return Err("end of stream before ready".to_owned());
        }
    }
    Ok(stream)
}

async fn slow_ends(gateway: &Gateway) -> Result<usize, String> {
    let closed = Metrics::read(gateway.probes).await?.by("gateway_sessions_closed_total", "reason");
    Ok(closed.get("slow").copied().unwrap_or(0.0) as usize)
}

fn show(options: &Options, without: &[Arc<Histogram>], with: &[Stall], group: &Group, sheet: &mut Sheet) {
    let ms = |delays: &Arc<Histogram>, part| delays.quantile(part).map_or(0.0, |took| took.as_secs_f64() * 1e3);
    let of = |part: f64| -> (Vec<f64>, Vec<f64>) {
        (
            without.iter().map(|round| ms(round, part)).collect(),
            with.iter().map(|round| ms(&round.delays, part)).collect(),
        )
    };
    let (p50, p99) = (of(0.5), of(0.99));
    let times = ratios(&p99.1, &p99.0);
    for (word, (without, with)) in [("p50", &p50), ("p99", &p99)] {
        sheet.line(format!("{word} {} ms without · {} ms with stalled readers", spread(without), spread(with)));
    }
    sheet.data(
        "rounds",
        json!({"p50_ms": {"without": p50.0, "with": p50.1}, "p99_ms": {"without": p99.0, "with": p99.1}}),
    );
    sheet.promise("the others' p99 with stalled readers to without", median(&times), Bound::AtMost(MAX_TIMES), "times");
    let mib = |bytes: u64| bytes as f64 / f64::from(1 << 20);
    let more = with.iter().map(|round| mib(round.more_bytes)).fold(0.0, f64::max);
    let cap = mib(OUTBOX_BYTES * options.stalled as u64);
    sheet.promise("memory for the stalled, at most", Some(more), Bound::AtMost(cap), "MiB");
    let ended = with.iter().map(|round| round.n_ended).min().unwrap_or(0) as f64;
    sheet.promise(
        "ended with slow, of the stalled of a round",
        Some(ended),
        Bound::AtLeast(options.stalled as f64),
        "",
    );
    let kept = with.iter().map(|round| round.n_sockets_kept).max().unwrap_or(0) as f64;
    sheet.promise("sockets of theirs that the gateway kept", Some(kept), Bound::AtMost(0.0), "");
    sheet.promise("lost, doubled or out of order for the others", Some(group.n_wrong() as f64), Bound::AtMost(0.0), "");
    sheet.promise("sessions of the others that ended", Some(group.ended().len() as f64), Bound::AtMost(0.0), "");
    let line = |label: &str, values: &[f64]| {
        let points = values.iter().enumerate().map(|(round, ms)| ((round + 1) as f64, *ms)).collect();
        Line { label: label.to_owned(), points }
    };
    sheet.chart(Chart::Lines {
        title: format!("The others' p99 while {} of {} readers stand still", options.stalled, options.clients),
        x: "round".to_owned(),
        y: "ms".to_owned(),
        lines: vec![line("without", &p99.0), line("with stalled readers", &p99.1)],
    });
}
