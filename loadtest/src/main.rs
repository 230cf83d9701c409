//! Benchmarks of gateways, over their wire only. Decides which measurement runs and how its
//! outcome is shown: a table for people on stderr, one JSON object on stdout, exit code 1 where the
//! gateway did not keep its promise.
//!
//! `fanout` and `idle` look at a gateway that runs already; the others start what they need (`fleet`)
//! and end it. The subscribers here are as small as they can be (`wire`), so that on a shared machine
//! most of the time measured is the gateway's. Only a storm's clients reconnect.

mod abort;
mod admin;
mod balancer;
mod fanout;
mod fleet;
mod handshakes;
mod histogram;
mod idle;
mod probe;
mod process;
mod redis;
mod report;
mod slow;
mod storm;
mod timeline;
mod token;
mod verdicts;
mod wire;

use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use clap::{Args, Parser, Subcommand};
use tokio::task::JoinSet;

use wire::{Address, Subscriber, Transport};

/// Measure a running Tidegate gateway. Thousands of clients need `ulimit -n` above their number.
#[derive(Parser)]
#[command(name = "tidegate-loadtest", version, max_term_width = 100)]
struct Cli {
    #[command(subcommand)]
    what: What,
}

#[derive(Subcommand)]
enum What {
    /// Many subscribers of one channel: is every event delivered to each, once, in order, how soon and at what cost?
    #[command(after_help = "Example:\n  tidegate-loadtest fanout --token \"$TOKEN\" --channel demo --clients 500 \
                            --events 200 --pid \"$(pidof tidegate)\"")]
    Fanout(fanout::Options),
    /// Idle sessions: what does one more of them cost in memory?
    #[command(
        after_help = "Example:\n  tidegate-loadtest idle --token \"$TOKEN\" --from 1000 --to 5000 --pid \"$(pidof tidegate)\""
    )]
    Idle(idle::Options),
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
}

/// Which gateway, and how fast to connect to it.
#[derive(Args, Clone)]
struct Gateway {
    /// The public listener
    #[arg(long, default_value = "http://127.0.0.1:8080", value_parser = Address::parse)]
    url: Address,
    /// A token that joins the channel or may ask for it
    #[arg(long)]
    token: Option<String>,
    /// The channel to hear
    #[arg(long, default_value = "demo")]
    channel: String,
    /// How to connect
    #[arg(long, value_enum, default_value_t = Transport::Ws)]
    transport: Transport,
    /// New connections a second; above GATEWAY_ACCEPT_RATE the gateway refuses some
    #[arg(long, default_value_t = 90.0, value_parser = positive)]
    connect_rate: f64,
}

impl Gateway {
    /// Opens `n` subscribers at the given rate, waits for each one's `ready` and hands it on at once:
    /// it has to answer pings while the others are opened. Gives how many were refused.
    async fn open(&self, n: usize, mut opened: impl FnMut(Subscriber)) -> usize {
        let gateway = Arc::new(self.clone());
        let mut pace = tokio::time::interval(Duration::from_secs_f64(1.0 / self.connect_rate));
        let mut opening = JoinSet::new();
        let (mut n_started, mut n_refused) = (0, 0);
        while n_started < n || !opening.is_empty() {
            // Both arms are cancel-safe: a tick or a finished task is taken when it is returned.
            tokio::select! {
                _ = pace.tick(), if n_started < n => {
                    n_started += 1;
                    let gateway = Arc::clone(&gateway);
                    opening.spawn(async move {
                        Subscriber::open(&gateway.url, gateway.transport, gateway.token.as_deref(), &gateway.channel).await
                    });
                }
                Some(outcome) = opening.join_next() => match outcome.expect("an opening task does not panic") {
                    Ok(subscriber) => opened(subscriber),
                    Err(why) => {
                        if n_refused == 0 {
                            eprintln!("refused, the first time: {why}");
                        }
                        n_refused += 1;
                    }
                },
            }
        }
        n_refused
    }
}

#[tokio::main]
async fn main() -> ExitCode {
    let outcome = match Cli::parse().what {
        What::Fanout(options) => fanout::run(options).await,
        What::Idle(options) => idle::run(options).await,
        What::Storm(options) => storm::run(options).await,
        What::Handshakes(options) => handshakes::run(options).await,
        What::Verdicts(options) => verdicts::run(options).await,
        What::Abort(options) => abort::run(options).await,
    };
    match outcome {
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

fn positive(text: &str) -> Result<f64, String> {
    text.parse()
        .ok()
        .filter(|n| f64::is_finite(*n) && *n > 0.0)
        .ok_or_else(|| "expected a number above zero".to_owned())
}
