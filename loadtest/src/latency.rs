//! How late is an event at half the load that the whole can bear? Finds the rate at which events
//! begin to pile up, then sends at half of it and looks at every single delivery. Delay counts from
//! the moment an event was due, so that a publisher that is held up hides nothing.
//!
//! Client, Redis and gateway share this machine's cores: the saturating rate is that of the three.

use std::sync::Arc;
use std::time::Duration;

use clap::Args;
use serde_json::json;

use crate::fanout;
use crate::feed::{Feed, PATIENCE};
use crate::fleet::Programs;
use crate::histogram::Histogram;
use crate::opening;
use crate::positive;
use crate::progress::Progress;
use crate::readers::{Group, Look, Readers};
use crate::report::{Bound, Chart, Line, Report, Sheet};
use crate::stats::{median, spread};
use crate::wire::{Address, Transport};

const CHANNEL: &str = "bench";
/// Of the search: where it begins, how it grows, how long each step lasts.
const FIRST_RATE: f64 = 8.0;
const GROWTH: f64 = 1.25;
const STEP: Duration = Duration::from_secs(2);
/// A step that is not delivered so long after its last event has piled up.
const BACKLOG: Duration = Duration::from_millis(250);
/// Events of the whole run at most; far beyond what two cores do.
const MAX_EVENTS: usize = 2_000_000;
/// p99 to p50 that is promised.
const MAX_TAIL: f64 = 5.0;
/// What the picture shows.
const PARTS: [f64; 9] = [0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99, 0.999];

/// `tidegate-loadtest latency`.
#[derive(Args, Clone)]
pub struct Options {
    #[command(flatten)]
    pub programs: Programs,
    /// Subscribers of the channel
    #[arg(long, default_value_t = 1_000)]
    pub clients: usize,
    /// How they connect
    #[arg(long, value_enum, default_value_t = Transport::Ws)]
    transport: Transport,
    /// Rounds at half the saturating rate; the median counts
    #[arg(long, default_value_t = 5)]
    pub rounds: usize,
    /// Seconds of a round
    #[arg(long, default_value_t = 8.0, value_parser = positive)]
    pub seconds: f64,
    /// Bytes of an event's data
    #[arg(long, default_value_t = 128, value_parser = clap::value_parser!(u16).range(29..))]
    payload_bytes: u16,
    /// Events a second, instead of half the saturating rate
    #[arg(long, value_parser = positive)]
    rate: Option<f64>,
}

pub async fn run(options: Options) -> Result<Report, String> {
    let redis = options.programs.redis().await?;
    let gateway = options.programs.gateway(&fanout::settings(Some(&redis))).await?;
    let readers = Readers::start(Look::AtOnce)?;
    let group = Group::timed(MAX_EVENTS);
    let to = Address::of(gateway.public);
    let open = |_| opening::session(to.clone(), options.transport, None, CHANNEL.to_owned());
    opening::each("opening sessions", options.clients, open, |opened| readers.add(opened, &group)).await?;
    let source = fanout::redis_source(&redis).await?;
    let n_bytes = usize::from(options.payload_bytes);
    let mut feed = Feed { group, source, channel: CHANNEL, n_bytes, next: 0 };

    let mut sheet = Sheet::new("latency");
    sheet.figure("clients", "subscribers of the channel", options.clients, "");
    let rate = match options.rate {
        Some(rate) => rate,
        None => {
            let saturating = saturate(&mut feed).await?;
            let deliveries = saturating * options.clients as f64;
            sheet.figure("saturating_events_per_s", "saturating rate", saturating, "events a second");
            sheet.figure("saturating_deliveries_per_s", "the same", deliveries, "deliveries a second");
            saturating / 2.0
        }
    };
    sheet.figure("events_per_s", "rate measured at", rate, "events a second");
    let progress = Progress::of("delay at half the saturating rate", options.rounds);
    let mut rounds = Vec::new();
    for _ in 0..options.rounds {
        let delays = Arc::new(Histogram::new());
        feed.load(rate, Duration::from_secs_f64(options.seconds), &delays, PATIENCE).await?;
        feed.settle().await?;
        rounds.push(delays);
        progress.step();
    }
    drop(progress);
    show(&rounds, &feed.group, &mut sheet);
    Ok(sheet.finish())
}

/// The highest rate at which nothing piled up.
async fn saturate(feed: &mut Feed) -> Result<f64, String> {
    let progress = Progress::of("looking for the saturating rate", 32);
    let (mut rate, mut borne) = (FIRST_RATE, None);
    loop {
        let delays = Arc::new(Histogram::new());
        let caught_up = feed.load(rate, STEP, &delays, BACKLOG).await?;
        feed.settle().await?;
        progress.step();
        match (caught_up, borne) {
            (Some(_), _) => borne = Some(rate),
            (None, Some(borne)) => return Ok(borne),
            // Even the first is too much for this machine.
            (None, None) => return Ok(rate / 2.0),
        }
        rate *= GROWTH;
    }
}

fn show(rounds: &[Arc<Histogram>], group: &Group, sheet: &mut Sheet) {
    let at = |part: f64| -> Vec<f64> {
        let quantiles = rounds.iter().filter_map(|delays| delays.quantile(part));
        quantiles.map(|took| took.as_secs_f64() * 1e3).collect()
    };
    let (p50, p99) = (at(0.5), at(0.99));
    let tails: Vec<f64> = crate::stats::ratios(&p99, &p50);
    sheet.figure("p50_ms", "publish to receive, p50 (median of rounds)", median(&p50), "ms");
    sheet.figure("p99_ms", "publish to receive, p99 (median of rounds)", median(&p99), "ms");
    sheet.figure("max_ms", "publish to receive, max (median of rounds)", median(&at(1.0)), "ms");
    sheet.line(format!("p50 {} ms · p99 {} ms · p99/p50 {}", spread(&p50), spread(&p99), spread(&tails)));
    sheet.data("rounds", json!({"p50_ms": p50, "p99_ms": p99}));
    sheet.promise("p99 to p50", median(&tails), Bound::AtMost(MAX_TAIL), "times");
    let wrong = group.n_wrong() as f64;
    sheet.promise("lost, doubled or out of order", Some(wrong), Bound::AtMost(0.0), "deliveries");
    sheet.promise("sessions that ended", Some(group.ended().len() as f64), Bound::AtMost(0.0), "");
    let line = |(n, delays): (usize, &Arc<Histogram>)| {
        let point = |part: f64| Some((part * 100.0, delays.quantile(part)?.as_secs_f64() * 1e3));
        Line { label: format!("round {}", n + 1), points: PARTS.into_iter().filter_map(point).collect() }
    };
    sheet.chart(Chart::Lines {
        title: "Publish to receive at half the saturating rate".to_owned(),
        x: "per cent of the deliveries".to_owned(),
        y: "ms at most".to_owned(),
        lines: rounds.iter().enumerate().map(line).collect(),
    });
}
