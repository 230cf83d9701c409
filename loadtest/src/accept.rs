//! What does an admitted handshake cost, in multiples of the least that any server can do: a loop
//! that accepts, reads, answers and closes? Anonymous, with and without a channel; `handshakes` says
//! what a token adds. Rounds take turns.

use std::net::SocketAddr;
use std::sync::Arc;

use clap::Args;
use serde_json::json;

use crate::fanout;
use crate::fleet::{Gateway, Programs};
use crate::floor::{Floor, Of};
use crate::handshakes::{shake, until_gone};
use crate::process::Cpu;
use crate::progress::Progress;
use crate::report::{Bar, Bound, Chart, Report, Sheet, Whose};
use crate::stats::{median, ratios, spread};
use crate::wire::{Address, Subscriber, Transport, request};

const CHANNEL: &str = "bench";

/// `tidegate-loadtest accept`.
#[derive(Args, Clone)]
pub struct Options {
    #[command(flatten)]
    pub programs: Programs,
    /// Handshakes a round
    #[arg(long, default_value_t = 10_000)]
    pub handshakes: usize,
    /// Rounds of each kind; the median counts
    #[arg(long, default_value_t = 5)]
    pub rounds: usize,
    /// Handshakes at a time
    #[arg(long, default_value_t = 64)]
    concurrency: usize,
}

/// Whom a round asks, and for what.
struct Kind {
    key: &'static str,
    title: &'static str,
    whose: Whose,
    pid: u32,
    to: SocketAddr,
    channel: &'static str,
    costs: Vec<f64>,
    n_failed: usize,
}

pub async fn run(options: Options) -> Result<Report, String> {
    let redis = options.programs.redis().await?;
    let gateway = options.programs.gateway(&fanout::settings(Some(&redis))).await?;
    let floor = Floor::start(Of::Accept).await?;
    // Keeps the channel, so that no round pays for its subscription in Redis.
    let keeper = Subscriber::open(&Address::of(gateway.public), Transport::Ws, None, CHANNEL).await?;
    let kind = |key, title, whose, pid, to, channel| Kind {
        key,
        title,
        whose,
        pid,
        to,
        channel,
        costs: Vec::new(),
        n_failed: 0,
    };
    let (gateway_pid, public) = (gateway.pid(), gateway.public);
    let mut kinds = [
        kind("floor", "floor", Whose::Floor, floor.pid(), floor.public, ""),
        kind("bare", "gateway, no channel", Whose::Gateway, gateway_pid, public, ""),
        kind("channel", "gateway, one channel", Whose::Gateway, gateway_pid, public, CHANNEL),
    ];
    let progress = Progress::of("handshakes", (options.rounds + 1) * kinds.len());
    for round in 0..=options.rounds {
        for kind in &mut kinds {
            kind.round(&options, &gateway, round > 0).await?;
            progress.step();
        }
    }
    drop((progress, keeper));
    let mut sheet = Sheet::new("accept");
    sheet.figure("handshakes", "handshakes a round", options.handshakes, "");
    sheet.figure("concurrency", "at a time", options.concurrency, "");
    show(&kinds, &mut sheet);
    Ok(sheet.finish())
}

impl Kind {
    async fn round(&mut self, options: &Options, gateway: &Gateway, counts: bool) -> Result<(), String> {
        let head = request(&self.to.to_string(), Transport::Ws, None, self.channel);
        let heads: Arc<[String]> = (0..options.handshakes).map(|_| head.clone()).collect();
        let before = Cpu::of(self.pid)?;
        let n_failed = shake(&heads, options.concurrency, self.to).await;
        if self.whose == Whose::Gateway {
            until_gone(gateway).await?;
        }
        let spent = Cpu::of(self.pid)?.since(&before);
        if counts {
            self.n_failed += n_failed;
            self.costs.push(spent.total.as_secs_f64() * 1e6 / (heads.len() - n_failed).max(1) as f64);
        }
        Ok(())
    }
}

fn show(kinds: &[Kind], sheet: &mut Sheet) {
    let floor = &kinds[0];
    let (mut costs, mut times) = (Vec::new(), Vec::new());
    for kind in kinds {
        let ratio = ratios(&kind.costs, &floor.costs);
        sheet.line(format!("{:<22} {} us of CPU · x{}", kind.title, spread(&kind.costs), spread(&ratio)));
        let found = json!({"us": median(&kind.costs), "rounds_us": kind.costs, "times_floor": median(&ratio), "failed": kind.n_failed});
        sheet.data(kind.key, found);
        let bar = |rounds: &[f64]| Bar {
            label: kind.title.to_owned(),
            value: median(rounds).unwrap_or(0.0),
            rounds: rounds.to_vec(),
            bound: None,
            whose: kind.whose,
        };
        costs.push(bar(&kind.costs));
        times.push(bar(&ratio));
    }
    let failed: usize = kinds.iter().map(|kind| kind.n_failed).sum();
    sheet.promise("handshakes that failed", Some(failed as f64), Bound::AtMost(0.0), "");
    let title = "CPU of an anonymous handshake".to_owned();
    sheet.chart(Chart::Bars { title, unit: "µs".to_owned(), bars: costs });
    let title = "CPU of an anonymous handshake: multiples of the floor".to_owned();
    sheet.chart(Chart::Bars { title, unit: "times".to_owned(), bars: times });
}
