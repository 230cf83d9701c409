//! Several servers that deliver the same events to as many clients, in turns: what does a delivery
//! cost each? Decides the order of rounds, when the next event may be sent, and what is said of it.
//!
//! A round belongs to one server. Its next event leaves only when the one before is with every
//! client, so that single events stay single: a server that falls behind joins events into one
//! write, and would look cheaper for it.

use std::sync::Arc;
use std::time::Duration;

use serde_json::json;
use tokio::time::Instant;

use super::source::{Event, Source};
use crate::process::Cpu;
use crate::progress::Progress;
use crate::readers::Group;
use crate::report::{Bar, Bound, Chart, Sheet, Whose};
use crate::stats::{median, ratios, spread};

/// Until an event is with every client; far beyond what a busy machine needs.
const PATIENCE: Duration = Duration::from_secs(60);
/// Before every round. A receiver that heard nothing for longer than its retransmission timeout (0.2 to
/// 1 s here) acknowledges the next 16 segments at once, at the sender's cost (measured: 14 us a write
/// instead of 10). So everybody's clients have rested, as those of notifications have.
const REST: Duration = Duration::from_millis(1_500);
/// Events that a source is given at once where there are many channels.
const AT_ONCE: usize = 64;

/// A server with its clients.
pub struct Target {
    pub name: String,
    pub whose: Whose,
    pub pid: u32,
    pub group: Arc<Group>,
    /// Every client hears exactly one of them, and each has as many.
    pub channels: Vec<String>,
    pub source: Source,
    /// Of the next event, the same on every channel.
    next: u64,
}

impl Target {
    pub fn new(name: &str, whose: Whose, pid: u32, group: Arc<Group>, channels: Vec<String>, source: Source) -> Target {
        Target { name: name.to_owned(), whose, pid, group, channels, source, next: 0 }
    }

    /// Deliveries that must have been made by now.
    fn n_due(&self) -> u64 {
        self.next * self.group.n_members() as u64
    }

    /// Publishes the next `n` events on every channel, and waits until they are with every client.
    async fn send(&mut self, n: usize, n_bytes: usize) -> Result<(), String> {
        let seqs = self.next..self.next + n as u64;
        let all = self.channels.iter().flat_map(|channel| seqs.clone().map(move |seq| Event { channel, seq }));
        let all: Vec<Event<'_>> = all.collect();
        for some in all.chunks(AT_ONCE) {
            self.source.publish(some, n_bytes).await?;
        }
        self.next = seqs.end;
        if self.group.until_received(self.n_due(), PATIENCE).await {
            return Ok(());
        }
        let (got, due) = (self.group.n_received(), self.n_due());
        Err(format!("{}: {got} of {due} deliveries; ended: {:?}", self.name, self.group.ended().first()))
    }
}

/// What is measured of a target.
pub struct Series {
    pub key: String,
    pub title: String,
    target: usize,
    /// Events that leave together.
    burst: usize,
    /// Such bursts a round.
    n_bursts: usize,
    /// From one burst to the next, at least.
    pause: Duration,
    against: Option<Against>,
    costs: Vec<f64>,
    in_user: Duration,
    in_kernel: Duration,
}

/// What a series is held against.
struct Against {
    series: usize,
    at_most: Option<f64>,
}

/// Targets and what is measured of them.
pub struct Contest {
    pub key: String,
    pub title: String,
    n_bytes: usize,
    targets: Vec<Target>,
    series: Vec<Series>,
}

/// How a round of a series goes.
#[derive(Clone, Copy)]
pub struct Pace {
    pub burst: usize,
    pub n_bursts: usize,
    pub pause: Duration,
}

impl Contest {
    pub fn new(key: &str, title: impl Into<String>, n_bytes: usize) -> Contest {
        let (key, title) = (key.to_owned(), title.into());
        Contest { key, title, n_bytes, targets: Vec::new(), series: Vec::new() }
    }

    /// Gives the target's number.
    pub fn target(&mut self, target: Target) -> usize {
        self.targets.push(target);
        self.targets.len() - 1
    }

    /// Measures a target; gives the series' number.
    pub fn measure(&mut self, target: usize, key: &str, title: &str, pace: Pace) -> usize {
        self.series.push(Series {
            key: key.to_owned(),
            title: title.to_owned(),
            target,
            burst: pace.burst,
            n_bursts: pace.n_bursts,
            pause: pace.pause,
            against: None,
            costs: Vec::new(),
            in_user: Duration::ZERO,
            in_kernel: Duration::ZERO,
        });
        self.series.len() - 1
    }

    /// Shows what `series` costs in multiples of `base`; where a bound is given, that is a promise.
    pub fn hold(&mut self, series: usize, base: usize, at_most: Option<f64>) {
        self.series[series].against = Some(Against { series: base, at_most });
    }

    /// One round that is not counted, then so many that are; every second time in reverse, so that
    /// nobody always follows the same.
    pub async fn run(&mut self, rounds: usize) -> Result<(), String> {
        let progress = Progress::of(self.title.clone(), (rounds + 1) * self.series.len());
        for round in 0..=rounds {
            for turn in 0..self.series.len() {
                let at = if round % 2 == 0 { turn } else { self.series.len() - 1 - turn };
                self.round(at, round > 0).await?;
                progress.step();
            }
        }
        Ok(())
    }

    async fn round(&mut self, at: usize, counts: bool) -> Result<(), String> {
        let series = &mut self.series[at];
        let target = &mut self.targets[series.target];
        tokio::time::sleep(REST).await;
        let (before, received) = (Cpu::of(target.pid)?, target.group.n_received());
        let mut due = Instant::now();
        for _ in 0..series.n_bursts {
            tokio::time::sleep_until(due).await;
            due = Instant::now() + series.pause;
            target.send(series.burst, self.n_bytes).await?;
        }
        let spent = Cpu::of(target.pid)?.since(&before);
        if counts {
            let n = (target.group.n_received() - received) as f64;
            series.costs.push(spent.total.as_secs_f64() * 1e6 / n);
            series.in_user += spent.user;
            series.in_kernel += spent.system;
        }
        Ok(())
    }

    /// Says what was found.
    pub fn show(&self, sheet: &mut Sheet) {
        sheet.line(format!("{}:", self.title));
        let mut found = Vec::new();
        for series in &self.series {
            let base = series.against.as_ref().map(|against| ratios(&series.costs, &self.series[against.series].costs));
            let ratio = base.as_deref().and_then(median);
            let share = series.kernel_share();
            let times = base.as_deref().map(|ratios| format!(" · x{}", spread(ratios))).unwrap_or_default();
            let text = format!(
                "{:<34} {} us a delivery, {:.0} % of it in the kernel{times}",
                series.title,
                spread(&series.costs),
                share * 100.0
            );
            sheet.line(text);
            let against = series.against.as_ref().map(|against| self.series[against.series].key.as_str());
            found.push(json!({
                "series": series.key, "title": series.title, "clients": self.targets[series.target].group.n_members(),
                "channels": self.targets[series.target].channels.len(), "burst": series.burst,
                "us_per_delivery": median(&series.costs), "rounds_us": series.costs, "in_kernel": share,
                "against": against, "times": ratio, "rounds_times": base, "wrong": self.targets[series.target].group.n_wrong(),
            }));
        }
        sheet.data(&self.key, found);
        self.judge(sheet);
        self.charts(sheet);
    }

    fn judge(&self, sheet: &mut Sheet) {
        for series in &self.series {
            let Some(against @ Against { at_most: Some(bound), .. }) = &series.against else { continue };
            let base = &self.series[against.series];
            let ratio = median(&ratios(&series.costs, &base.costs));
            sheet.promise(&format!("{} to {}", series.title, base.title), ratio, Bound::AtMost(*bound), "times");
        }
        // What a peer loses is told, and no promise of ours.
        let ours = || self.targets.iter().filter(|target| target.whose != Whose::Peer);
        let wrong: u64 = ours().map(|target| target.group.n_wrong()).sum();
        let missing: u64 = ours().map(|target| target.n_due().abs_diff(target.group.n_received())).sum();
        let what = format!("lost, doubled or out of order, {}", self.key);
        sheet.promise(&what, Some((wrong + missing) as f64), Bound::AtMost(0.0), "deliveries");
        let n_ended: usize = ours().map(|target| target.group.ended().len()).sum();
        sheet.promise(&format!("sessions that ended, {}", self.key), Some(n_ended as f64), Bound::AtMost(0.0), "");
    }

    fn charts(&self, sheet: &mut Sheet) {
        let whose = |series: &Series| self.targets[series.target].whose;
        let cost = |series: &Series| Bar {
            label: series.title.clone(),
            value: median(&series.costs).unwrap_or(0.0),
            rounds: series.costs.clone(),
            bound: None,
            whose: whose(series),
        };
        let bars = self.series.iter().map(cost).collect();
        sheet.chart(Chart::Bars { title: self.title.clone(), unit: "µs of CPU a delivery".to_owned(), bars });
        let times = |series: &Series| {
            let against = series.against.as_ref()?;
            let rounds = ratios(&series.costs, &self.series[against.series].costs);
            let (value, bound) = (median(&rounds)?, against.at_most);
            Some(Bar { label: series.title.clone(), value, rounds, bound, whose: whose(series) })
        };
        let bars: Vec<Bar> = self.series.iter().filter_map(times).collect();
        if !bars.is_empty() {
            sheet.chart(Chart::Bars { title: format!("{}: multiples", self.title), unit: "times".to_owned(), bars });
        }
    }
}

impl Series {
    /// Which part of the time was the kernel's.
    fn kernel_share(&self) -> f64 {
        let all = (self.in_user + self.in_kernel).as_secs_f64();
        if all == 0.0 { 0.0 } else { self.in_kernel.as_secs_f64() / all }
    }
}
