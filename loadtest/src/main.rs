//! Benchmarks of a running gateway, over its wire only. Decides which measurement runs and how its
//! outcome is shown: a table for people on stderr, one JSON object on stdout, exit code 1 where the
//! gateway did not keep its promise.
//!
//! The subscribers here are as small as they can be (`wire`), so that on a shared machine most of
//! the time measured is the gateway's. They neither reconnect nor resume.

mod admin;
mod fanout;
mod histogram;
mod idle;
mod process;
mod wire;

use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use clap::{Args, Parser, Subcommand};
use serde_json::Value;
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

/// What a measurement found.
struct Report {
    rows: Vec<(&'static str, String)>,
    json: Value,
    /// The gateway kept its promise.
    is_good: bool,
}

#[tokio::main]
async fn main() -> ExitCode {
    let outcome = match Cli::parse().what {
        What::Fanout(options) => fanout::run(options).await,
        What::Idle(options) => idle::run(options).await,
    };
    match outcome {
        Ok(report) => {
            for (name, value) in &report.rows {
                eprintln!("{name:<28} {value:>16}");
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
