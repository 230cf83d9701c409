//! Benchmarks of gateways, over their wire only. Decides which measurement runs and how its
//! outcome is shown: a table for people on stderr, one JSON object on stdout, exit code 1 where the
//! gateway did not keep its promise.
//!
//! Each starts what it needs (`fleet`) and ends it; `fanout` and `idle` also look at a gateway that runs
//! already. The subscribers here are as small as they can be (`wire`), so that on a shared machine
//! most of the time measured is the gateway's. Only the clients of a storm and of a growing fleet reconnect.

mod abort;
mod accept;
mod admin;
mod all;
mod balancer;
mod delay;
mod drain;
mod fanout;
mod feed;
mod fleet;
mod floor;
mod handshakes;
mod histogram;
mod idle;
mod latency;
mod mix;
mod opening;
mod page;
mod peers;
mod probe;
mod process;
mod progress;
mod proxy;
mod readers;
mod rebalance;
mod redis;
mod report;
mod slow;
mod stats;
mod storm;
mod timeline;
mod token;
mod verdicts;
mod wire;

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::{Parser, Subcommand};
use tokio::signal::unix::{SignalKind, signal};

use report::Report;

/// Measure Tidegate gateways. Thousands of clients need `ulimit -n` above their number.
#[derive(Parser)]
#[command(name = "tidegate-loadtest", version, max_term_width = 100)]
struct Cli {
    #[command(subcommand)]
    what: What,
    /// Write the result to this file as well, as a page with plots
    #[arg(long, global = true, value_name = "FILE")]
    html: Option<PathBuf>,
}

#[derive(Subcommand)]
enum What {
    /// What a delivery costs, in multiples of the floor: one channel, many channels, users' own channels
    #[command(after_help = "Examples:\n  tidegate-loadtest fanout --html fanout.html\n  \
                            tidegate-loadtest fanout --only ws --clients 2000\n  \
                            tidegate-loadtest fanout --channels 200 --per-channel 20\n  \
                            tidegate-loadtest fanout --url http://127.0.0.1:8080 --token \"$TOKEN\" --channel demo \
                            --clients 500 --pid \"$(pidof tidegate)\"")]
    Fanout(fanout::Options),
    /// What one more idle session costs in memory; also after tens of thousands came and went
    #[command(after_help = "Examples:\n  tidegate-loadtest idle\n  \
                            tidegate-loadtest idle --url http://127.0.0.1:8080 --token \"$TOKEN\" --from 1000 --to 5000 \
                            --pid \"$(pidof tidegate)\"")]
    Idle(idle::Options),
    /// How late an event is at half the load that the machine can bear
    #[command(
        after_help = "Examples:\n  tidegate-loadtest latency\n  tidegate-loadtest latency --rate 20 --clients 500"
    )]
    Latency(latency::Options),
    /// Some readers stand still: do the others notice, and does the memory stay within its caps?
    #[command(after_help = "Example:\n  tidegate-loadtest slow --clients 1000 --stalled 10")]
    Slow(slow::Options),
    /// The CPU time of an anonymous handshake, in multiples of the floor
    #[command(after_help = "Example:\n  tidegate-loadtest accept --rounds 7")]
    Accept(accept::Options),
    /// Other servers beside the gateway and the floor: those that are installed, or whose path is given
    #[command(after_help = "Examples:\n  tidegate-loadtest compare\n  \
                            tidegate-loadtest compare --centrifugo ./centrifugo --mercure ./mercure --html peers.html")]
    Compare(peers::Options),
    /// All of the above in one run
    #[command(after_help = "Examples:\n  tidegate-loadtest all --html all.html > all.json\n  \
                            tidegate-loadtest all --size small --no-peers")]
    All(all::Options),
    /// The floor, which the other commands start for themselves
    #[command(hide = true)]
    Floor(floor::Options),
    /// A gateway of a fleet is killed: how soon are its clients back, and what do the others feel?
    #[command(after_help = "Examples:\n  tidegate-loadtest storm\n  tidegate-loadtest storm --scenario one-full\n  \
                            tidegate-loadtest storm --scenario one-full --clients plain\n  \
                            tidegate-loadtest storm --scenario one-full --clients plain --open")]
    Storm(storm::Options),
    /// The CPU time of a handshake: anonymous, with a new token, with one that comes again
    #[command(after_help = "Examples:\n  tidegate-loadtest handshakes\n  \
                            tidegate-loadtest handshakes --bare --concurrency 64 --rounds 5")]
    Handshakes(handshakes::Options),
    /// Thousands connect while Redis is in trouble: is every verdict there in time, and right?
    #[command(after_help = "Example:\n  for redis in ok delay-5ms delay-200ms stopped readonly loading; do\n    \
                            tidegate-loadtest verdicts --redis $redis\n  done")]
    Verdicts(verdicts::Options),
    /// Handshakes broken off at every point: is everything given back that was taken for them?
    #[command(after_help = "Example:\n  tidegate-loadtest abort --handshakes 100000")]
    Abort(abort::Options),
    /// A fleet behind HAProxy or nginx grows: how soon has every node its share, and at what cost?
    #[command(after_help = "Examples:\n  tidegate-loadtest rebalance\n  \
                            tidegate-loadtest rebalance --balancer nginx --clients 3000 --from 6 --to 7")]
    Rebalance(rebalance::Options),
    /// A gateway leaves: are its closes as even as they should be, and is everybody told?
    #[command(after_help = "Examples:\n  tidegate-loadtest drain --sessions 1000 --window 20s\n  \
                            tidegate-loadtest drain --sessions 15000 --deaf 10 --peers 3")]
    Drain(drain::Options),
}

#[tokio::main]
async fn main() -> ExitCode {
    let cli = Cli::parse();
    if let What::Floor(options) = &cli.what {
        return floor_process(options);
    }
    // Whatever was started for the measurement ends with it: it is dropped where it stands.
    let outcome = tokio::select! {
        outcome = measure(cli.what) => outcome,
        why = told_to_end() => Err(why),
    };
    match outcome.and_then(|report| keep(cli.html.as_deref(), report)) {
        Ok(report) => {
            for (name, value) in &report.rows {
                eprintln!("{name:<36} {value}");
            }
            println!("{}", report.json);
            ExitCode::from(u8::from(!report.is_good))
        }
        Err(why) => {
            eprintln!("tidegate-loadtest: {why}");
            ExitCode::from(69)
        }
    }
}

async fn measure(what: What) -> Result<Report, String> {
    match what {
        What::Fanout(options) => fanout::run(options).await,
        What::Idle(options) => idle::run(options).await,
        What::Latency(options) => latency::run(options).await,
        What::Slow(options) => slow::run(options).await,
        What::Accept(options) => accept::run(options).await,
        What::Compare(options) => peers::run(options).await,
        What::All(options) => all::run(options).await,
        What::Floor(_) => Err("the floor is no measurement".to_owned()),
        What::Storm(options) => storm::run(options).await,
        What::Handshakes(options) => handshakes::run(options).await,
        What::Verdicts(options) => verdicts::run(options).await,
        What::Abort(options) => abort::run(options).await,
        What::Rebalance(options) => rebalance::run(options).await,
        What::Drain(options) => drain::run(options).await,
    }
}

/// Ctrl-C or SIGTERM.
async fn told_to_end() -> String {
    let (Ok(mut interrupt), Ok(mut terminate)) = (signal(SignalKind::interrupt()), signal(SignalKind::terminate()))
    else {
        return std::future::pending().await;
    };
    tokio::select! {
        _ = interrupt.recv() => {}
        _ = terminate.recv() => {}
    }
    "told to end before there was a result".to_owned()
}

/// Writes the page, where one was asked for.
fn keep(html: Option<&Path>, report: Report) -> Result<Report, String> {
    let Some(path) = html else { return Ok(report) };
    let run = format!("{} · {}", std::env::args().collect::<Vec<_>>().join(" "), page::machine());
    std::fs::write(path, page::render(&report, &run)).map_err(|error| format!("{}: {error}", path.display()))?;
    Ok(report)
}

fn floor_process(options: &floor::Options) -> ExitCode {
    match floor::serve(options) {
        Ok(()) => ExitCode::SUCCESS,
        Err(why) => {
            eprintln!("floor: {why}");
            ExitCode::from(69)
        }
    }
}

fn positive(text: &str) -> Result<f64, String> {
    text.parse()
        .ok()
        .filter(|n| f64::is_finite(*n) && *n > 0.0)
        .ok_or_else(|| "expected a number above zero".to_owned())
}
