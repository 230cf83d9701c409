//! Idle sessions: the gateway's memory at two numbers of sessions, and what one more of them costs;
//! the same again after tens of thousands came and went, for nothing may be kept of them. The
//! sockets' own kernel memory is not in it: the resident set is the process's.

use std::sync::Arc;
use std::time::Duration;

use clap::Args;
use serde_json::json;
use tokio::time::Instant;

use crate::fleet::{Gateway, Programs};
use crate::handshakes::shake;
use crate::probe::Metrics;
use crate::progress::Progress;
use crate::readers::{Group, Look, Readers};
use crate::report::{Bar, Bound, Chart, Line, Report, Sheet, Whose};
use crate::stats::median;
use crate::wire::{Address, Transport, request};
use crate::{fanout, opening, positive, process, token};

/// What an idle session may cost: two KiB.
const MAX_BYTES: f64 = 2_048.0;
/// Looks between the two numbers, for the picture.
const STEPS: usize = 4;
/// Handshakes of the storm at a time.
const STORMING: usize = 250;
/// Until the last of a storm is gone.
const SETTLE: Duration = Duration::from_secs(60);
/// Descriptors that may come and go by themselves (links to Redis, a probe's connection).
const STRAY_DESCRIPTORS: usize = 4;

/// `tidegate-loadtest idle`.
#[derive(Args, Clone)]
pub struct Options {
    #[command(flatten)]
    pub programs: Programs,
    /// Sessions at the first look
    #[arg(long, default_value_t = 2_000)]
    pub from: usize,
    /// Sessions at the last look
    #[arg(long, default_value_t = 15_000)]
    pub to: usize,
    /// Handshakes that come and go between the two measurements
    #[arg(long, default_value_t = 50_000)]
    pub storm: usize,
    /// Seconds of rest after them, for what is remembered of them on purpose: their channels for ten
    /// seconds, their verified tokens for up to two minutes
    #[arg(long, default_value_t = 130.0, value_parser = positive)]
    pub rest: f64,
    /// How they connect: one after the other, each on a gateway of its own
    #[arg(long, value_enum, value_delimiter = ',', default_values_t = [Transport::Ws, Transport::Sse])]
    transport: Vec<Transport>,
    /// Measurements, each on a new gateway; the median counts
    #[arg(long, default_value_t = 1)]
    pub rounds: usize,
    /// Seconds between the last `ready` and a look, for what the handshakes used to be given back
    #[arg(long, default_value_t = 2.0, value_parser = positive)]
    settle: f64,
    /// A gateway that runs already, instead of one that is started here; needs --pid
    #[arg(long, requires = "pid", value_parser = Address::parse)]
    url: Option<Address>,
    /// Its process on this machine
    #[arg(long, requires = "url")]
    pid: Option<u32>,
    /// A token for it
    #[arg(long)]
    token: Option<String>,
    /// The channel to ask it for
    #[arg(long, default_value = "demo")]
    channel: String,
    /// New connections a second to it; above GATEWAY_ACCEPT_RATE it refuses some
    #[arg(long, default_value_t = 90.0, value_parser = positive)]
    connect_rate: f64,
}

/// Resident bytes at numbers of sessions.
#[derive(Clone, Debug, Default)]
struct Looks(Vec<(usize, u64)>);

impl Looks {
    /// Bytes that one more session cost, from the first look of `base` to the last of these.
    fn slope_from(&self, base: &Looks) -> Option<f64> {
        let ((n_low, low), (n_high, high)) = (*base.0.first()?, *self.0.last()?);
        (n_high > n_low).then(|| (high as f64 - low as f64) / (n_high - n_low) as f64)
    }

    fn line(&self, label: String) -> Line {
        Line {
            label,
            points: self.0.iter().map(|(n, bytes)| (*n as f64, *bytes as f64 / f64::from(1 << 20))).collect(),
        }
    }
}

/// What was found of one transport in one round.
struct Found {
    fresh: Looks,
    /// After the storm; empty where there was none.
    stormed: Looks,
    n_descriptors_kept: usize,
}

/// Who is asked for sessions, and for what.
struct Crowd<'a> {
    options: &'a Options,
    transport: Transport,
    to: Address,
    pid: u32,
    readers: Readers,
    group: Arc<Group>,
}

pub async fn run(options: Options) -> Result<Report, String> {
    if options.to <= options.from {
        return Err("--to must be above --from".to_owned());
    }
    let mut sheet = Sheet::new("idle");
    if let (Some(url), Some(pid)) = (&options.url, options.pid) {
        let crowd = Crowd::of(&options, options.transport[0], url.clone(), pid)?;
        let looks = crowd.grow(0).await?;
        sheet.figure("resident", "sessions and resident bytes", json!(looks.0), "");
        sheet.figure("bytes_per_session", "per session", looks.slope_from(&looks), "B");
        return Ok(sheet.finish());
    }
    let (mut lines, mut bars) = (Vec::new(), Vec::new());
    for transport in &options.transport {
        let mut found = Vec::new();
        for _ in 0..options.rounds {
            found.push(measure(&options, *transport).await?);
        }
        show(&options, *transport, &found, &mut sheet, &mut bars);
        let word = word(*transport);
        let last = found.last().ok_or("--rounds must be above zero")?;
        lines.push(last.fresh.line(word.to_owned()));
        if options.storm > 0 {
            lines.push(last.stormed.line(format!("{word}, after the storm")));
        }
    }
    let (unit, title) = ("bytes".to_owned(), "Resident memory of one more idle session".to_owned());
    sheet.chart(Chart::Bars { title, unit, bars });
    let (x, y) = ("sessions".to_owned(), "MiB resident".to_owned());
    sheet.chart(Chart::Lines { title: "Resident memory of the gateway".to_owned(), x, y, lines });
    Ok(sheet.finish())
}

fn word(transport: Transport) -> &'static str {
    match transport {
        Transport::Ws => "ws",
        Transport::Sse => "sse",
    }
}

fn show(options: &Options, transport: Transport, found: &[Found], sheet: &mut Sheet, bars: &mut Vec<Bar>) {
    let word = word(transport);
    let (from, to, storm) = (options.from, options.to, options.storm);
    let fresh: Vec<f64> = found.iter().filter_map(|found| found.fresh.slope_from(&found.fresh)).collect();
    let stormed: Vec<f64> = found.iter().filter_map(|found| found.stormed.slope_from(&found.fresh)).collect();
    let looks = |looks: &Looks| json!(looks.0);
    let last = &found[found.len() - 1];
    sheet.data(&format!("{word}_resident"), looks(&last.fresh));
    sheet.data(&format!("{word}_resident_after_storm"), looks(&last.stormed));
    sheet.data(&format!("{word}_bytes_per_session"), json!({"fresh": fresh, "after_storm": stormed}));
    let mib = |looks: &Looks| {
        let shown = looks.0.iter().map(|(n, bytes)| format!("{n}: {:.1} MiB", *bytes as f64 / f64::from(1 << 20)));
        shown.collect::<Vec<_>>().join(" · ")
    };
    sheet.line(format!("{word}: {}", mib(&last.fresh)));
    let what = format!("a session over {word} between {from} and {to}");
    sheet.promise(&what, median(&fresh), Bound::AtMost(MAX_BYTES), "bytes");
    let bar = |label: String, rounds: Vec<f64>| Bar {
        label,
        value: median(&rounds).unwrap_or(0.0),
        rounds,
        bound: Some(MAX_BYTES),
        whose: Whose::Gateway,
    };
    bars.push(bar(word.to_owned(), fresh));
    if storm > 0 {
        sheet.line(format!("{word}, after {storm} came and went: {}", mib(&last.stormed)));
        let what = format!("the same after {storm} that came and went");
        sheet.promise(&what, median(&stormed), Bound::AtMost(MAX_BYTES), "bytes");
        let kept = found.iter().map(|found| found.n_descriptors_kept).max().unwrap_or(0);
        let bound = Bound::AtMost(STRAY_DESCRIPTORS as f64);
        sheet.promise(&format!("descriptors kept of them, {word}"), Some(kept as f64), bound, "");
        bars.push(bar(format!("{word}, after the storm"), stormed));
    }
}

/// On a new gateway: from few sessions to many; back to few, a storm, and to many again.
async fn measure(options: &Options, transport: Transport) -> Result<Found, String> {
    let redis = options.programs.redis().await?;
    let gateway = options.programs.gateway(&fanout::settings(Some(&redis))).await?;
    let mut crowd = Crowd::of(options, transport, Address::of(gateway.public), gateway.pid())?;
    let fresh = crowd.grow(0).await?;
    if options.storm == 0 {
        return Ok(Found { fresh, stormed: Looks::default(), n_descriptors_kept: 0 });
    }
    crowd.leave();
    until_open(&gateway, 0).await?;
    let n_before = process::n_descriptors(gateway.pid())?;
    storm(options, transport, &gateway).await?;
    until_open(&gateway, 0).await?;
    let _resting = Progress::of("rest", 0);
    tokio::time::sleep(Duration::from_secs_f64(options.rest)).await;
    let n_after = process::n_descriptors(gateway.pid())?;
    // Other users than before: what is known of the first would make it too easy.
    let stormed = crowd.grow(options.to).await?;
    Ok(Found { fresh, stormed, n_descriptors_kept: n_after.saturating_sub(n_before) })
}

impl Crowd<'_> {
    fn of(options: &Options, transport: Transport, to: Address, pid: u32) -> Result<Crowd<'_>, String> {
        process::resident_bytes(pid)?;
        let (readers, group) = (Readers::start(Look::DRAIN)?, Group::new());
        Ok(Crowd { options, transport, to, pid, readers, group })
    }

    /// Opens sessions from the first number to the last, with looks between; the users' names begin
    /// at `first_user`.
    async fn grow(&self, first_user: usize) -> Result<Looks, String> {
        let (from, to) = (self.options.from, self.options.to);
        let mut looks = Looks::default();
        let mut n_open = 0;
        for step in 0..=STEPS {
            let n = from + (to - from) * step / STEPS;
            let begin = Instant::now();
            let open = |at: usize| {
                let (token, channel) = self.ask(first_user + n_open + at);
                let session = opening::session(self.to.clone(), self.transport, token, channel);
                let rate = self.options.url.as_ref().map_or(f64::INFINITY, |_| self.options.connect_rate);
                let at = begin + Duration::from_secs_f64(at as f64 / rate);
                async move {
                    tokio::time::sleep_until(at).await;
                    session.await
                }
            };
            let what = format!("idle sessions over {}, to {n}", word(self.transport));
            opening::each(&what, n - n_open, open, |opened| self.readers.add(opened, &self.group)).await?;
            n_open = n;
            tokio::time::sleep(Duration::from_secs_f64(self.options.settle)).await;
            if let Some(ended) = self.group.ended().first() {
                return Err(format!("a session ended: {ended}"));
            }
            looks.0.push((n, process::resident_bytes(self.pid)?));
        }
        Ok(looks)
    }

    /// On a gateway of ours: a user with three channels, its own, one of a hundred and one of all.
    fn ask(&self, user: usize) -> (Option<String>, String) {
        if self.options.url.is_some() {
            return (self.options.token.clone(), self.options.channel.clone());
        }
        let group = format!("group-{}", user % 100);
        (Some(token::full(&user.to_string(), &["all", &group], token::Flaw::None)), String::new())
    }

    fn leave(&mut self) {
        self.readers.drop_group(&self.group);
        self.group = Group::new();
    }
}

/// Handshakes that are reset as soon as they are answered, each with a token of its own.
async fn storm(options: &Options, transport: Transport, gateway: &Gateway) -> Result<(), String> {
    const PIECE: usize = 5_000;
    let progress = Progress::of("come and go", options.storm.div_ceil(PIECE));
    let authority = gateway.public.to_string();
    for from in (0..options.storm).step_by(PIECE) {
        let heads = (from..options.storm.min(from + PIECE)).map(|n| {
            let token = token::full(&format!("storm-{n}"), &["all"], token::Flaw::None);
            request(&authority, transport, Some(&token), "")
        });
        let heads: Arc<[String]> = heads.collect();
        shake(&heads, STORMING, gateway.public).await;
        progress.step();
    }
    Ok(())
}

/// Waits until so many sessions are open.
async fn until_open(gateway: &Gateway, n: usize) -> Result<(), String> {
    let until = Instant::now() + SETTLE;
    loop {
        let open = Metrics::read(gateway.probes).await?.sum("gateway_sessions_open").unwrap_or(0.0);
        if open <= n as f64 {
            return Ok(());
        }
        if Instant::now() >= until {
            return Err(format!("{open} sessions are still open:\n{}", gateway.log()));
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_storm_left_counts_as_memory_of_the_sessions_after_it() {
        let fresh = Looks(vec![(2_000, 10_000_000), (12_000, 20_000_000)]);
        let stormed = Looks(vec![(2_000, 19_000_000), (12_000, 30_000_000)]);
        assert_eq!(fresh.slope_from(&fresh), Some(1_000.0));
        assert_eq!(stormed.slope_from(&fresh), Some(2_000.0));
        assert_eq!(Looks::default().slope_from(&fresh), None);
    }
}
