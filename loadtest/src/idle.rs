//! Idle sessions: the gateway's memory at two numbers of sessions, and what one more costs. The
//! sockets' own kernel memory is not in it: the resident set is the process's.

use std::time::Duration;

use clap::Args;
use serde_json::json;
use tokio::task::JoinSet;

use crate::report::Report;
use crate::wire::Subscriber;
use crate::{Gateway, positive, process};

/// `tidegate-loadtest idle`.
#[derive(Args)]
pub struct Options {
    #[command(flatten)]
    gateway: Gateway,
    /// Sessions at the first look
    #[arg(long, default_value_t = 1_000)]
    from: usize,
    /// Sessions at the second look
    #[arg(long, default_value_t = 5_000)]
    to: usize,
    /// The gateway's process on this machine
    #[arg(long)]
    pid: u32,
    /// Seconds between the last `ready` and a look, for what the handshakes used to be given back
    #[arg(long, default_value_t = 3.0, value_parser = positive)]
    settle: f64,
}

pub async fn run(options: Options) -> Result<Report, String> {
    if options.to <= options.from {
        return Err("--to must be above --from".to_owned());
    }
    process::resident_bytes(options.pid)?;
    let mut sessions = JoinSet::new();
    let (n_low, low) = look(&options, options.from, &mut sessions).await?;
    let (n_high, high) = look(&options, options.to - options.from, &mut sessions).await?;
    if n_high <= n_low {
        return Err("no further session could be opened".to_owned());
    }
    let slope = (high as f64 - low as f64) / (n_high - n_low) as f64;
    let mib = |bytes: u64| format!("{:.1} MiB", bytes as f64 / f64::from(1 << 20));
    let is_good = n_high == options.to;
    Ok(Report {
        rows: vec![
            ("sessions", format!("{n_low}, {n_high}")),
            ("resident", format!("{}, {}", mib(low), mib(high))),
            ("per session", format!("{slope:.0} B")),
        ],
        json: json!({
            "test": "idle", "transport": format!("{:?}", options.gateway.transport).to_lowercase(),
            "sessions": [n_low, n_high], "resident_bytes": [low, high], "bytes_per_session": slope,
        }),
        is_good,
    })
}

/// Opens `n` more sessions; gives how many live and the gateway's resident bytes then.
async fn look(options: &Options, n: usize, sessions: &mut JoinSet<String>) -> Result<(usize, u64), String> {
    options.gateway.open(n, |subscriber| drop(sessions.spawn(stay(subscriber)))).await;
    tokio::time::sleep(Duration::from_secs_f64(options.settle)).await;
    while let Some(ended) = sessions.try_join_next() {
        eprintln!("a session ended: {}", ended.unwrap_or_else(|error| error.to_string()));
    }
    Ok((sessions.len(), process::resident_bytes(options.pid)?))
}

async fn stay(mut subscriber: Subscriber) -> String {
    subscriber.listen(|_| {}).await
}
