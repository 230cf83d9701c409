//! A gateway leaves with everybody on it: when do the closes come, how evenly, does every client hear
//! a proper goodbye, and what becomes of those that never answer it? Starts the gateway (and peers, if
//! asked), fills it, sends SIGTERM, waits for its end. Decides the order of things; `crowd` plays the
//! clients, `outcome` judges.

mod crowd;
mod outcome;

use std::process::ExitStatus;
use std::time::Duration;

use clap::Args;
use tokio::task::JoinSet;
use tokio::time::Instant;

use crate::fleet::{Gateway, Programs};
use crate::mix::Mix;
use crate::positive;
use crate::probe::Metrics;
use crate::report::Report;
use crowd::{Deaf, Gone};

/// More than any crowd here: nobody is refused while the gateway is filled, and `auto` still goes by
/// the usual rate.
const BURST: &str = "1000000";
/// Between two looks at the metrics of a gateway that leaves.
const LOOK: Duration = Duration::from_millis(100);
/// Beyond the deadline.
const PATIENCE: Duration = Duration::from_secs(15);

/// `tidegate-loadtest drain`.
#[derive(Args)]
pub struct Options {
    #[command(flatten)]
    programs: Programs,
    /// Sessions that behave
    #[arg(long, default_value_t = 1_000)]
    sessions: usize,
    /// Sessions that never answer their close; of those by server-sent events half read nothing at all
    #[arg(long, default_value_t = 0)]
    deaf: usize,
    /// How they connect
    #[arg(long, value_enum, default_value_t = Mix::Mixed)]
    transport: Mix,
    /// GATEWAY_DRAIN_WINDOW: `auto`, or seconds such as 20s
    #[arg(long, default_value = "auto", value_parser = window)]
    window: String,
    /// GATEWAY_DRAIN_GRACE, in seconds
    #[arg(long, default_value_t = 5.0, value_parser = positive)]
    grace: f64,
    /// GATEWAY_DRAIN_DEADLINE, in seconds
    #[arg(long, default_value_t = 120.0, value_parser = positive)]
    deadline: f64,
    /// Other gateways of the fleet, for `auto` to go by
    #[arg(long, default_value_t = 0)]
    peers: usize,
    /// New sessions a second in the beginning
    #[arg(long, default_value_t = 800.0, value_parser = positive)]
    connect_rate: f64,
}

fn window(text: &str) -> Result<String, String> {
    let seconds = text.strip_suffix('s').and_then(|digits| digits.parse::<u32>().ok());
    match seconds {
        _ if text == "auto" => Ok(text.to_owned()),
        Some(1..) => Ok(text.to_owned()),
        _ => Err("expected auto, or whole seconds such as 20s".to_owned()),
    }
}

/// What a drain left to be judged.
struct Drained {
    /// When the signal was sent, just before.
    signalled: Instant,
    gone: Vec<Gone>,
    exit: ExitStatus,
    /// From the signal to the end of the process.
    took: Duration,
    /// Cut, as the metrics said last before the end.
    n_forced: Option<f64>,
    log: String,
}

pub async fn run(options: Options) -> Result<Report, String> {
    let redis = if options.peers > 0 { Some(options.programs.redis().await?) } else { None };
    let mut settings = vec![
        ("GATEWAY_ACCEPT_BURST", BURST.to_owned()),
        ("GATEWAY_DRAIN_GRACE", ms(options.grace)),
        ("GATEWAY_DRAIN_WINDOW", options.window.clone()),
        ("GATEWAY_DRAIN_DEADLINE", ms(options.deadline)),
        ("GATEWAY_MAX_AGE_MIN", "0s".to_owned()),
        ("GATEWAY_MAX_AGE_MAX", "0s".to_owned()),
    ];
    settings.extend(redis.iter().map(|redis| ("GATEWAY_REDIS_URL", redis.url())));
    let mut peers = Vec::new();
    for _ in 0..options.peers {
        peers.push(options.programs.gateway(&settings).await?);
    }
    let mut gateway = options.programs.gateway(&settings).await?;
    let gone = crowd::fill(&gateway, &options).await?;
    let deaf = Deaf::open(&gateway, &options).await?;
    if options.peers > 0 {
        until_known(&gateway, 1 + options.peers).await?;
    }
    eprintln!("{} sessions are open, {} of them deaf; SIGTERM", options.sessions + options.deaf, options.deaf);

    let counting = JoinSet::from_iter([n_forced(gateway.probes)]);
    let signalled = Instant::now();
    gateway.terminate()?;
    let exit = gateway.until_exit(Duration::from_secs_f64(options.deadline) + PATIENCE).await?;
    let took = signalled.elapsed();
    let n_forced = counting.join_all().await.into_iter().next().flatten();
    let gone = gone.join_all().await;
    drop(deaf);
    let log = gateway.whole_log();
    let drained = Drained { signalled, gone, exit, took, n_forced, log };
    Ok(outcome::judge(&options, &drained))
}

fn ms(seconds: f64) -> String {
    format!("{:.0}ms", seconds * 1_000.0)
}

/// Waits until the gateway counts so many nodes: only then `auto` goes by them.
async fn until_known(gateway: &Gateway, n: usize) -> Result<(), String> {
    let until = Instant::now() + Duration::from_secs(30);
    loop {
        let known = Metrics::read(gateway.probes).await?.sum("gateway_fleet_nodes");
        if known == Some(n as f64) {
            return Ok(());
        }
        if Instant::now() >= until {
            return Err(format!("the gateway knows {known:?} nodes of {n}"));
        }
        tokio::time::sleep(LOOK).await;
    }
}

/// Follows `gateway_drain_forced_total` to the gateway's end; its last value.
async fn n_forced(probes: std::net::SocketAddr) -> Option<f64> {
    let mut last = None;
    while let Ok(metrics) = Metrics::read(probes).await {
        last = metrics.sum("gateway_drain_forced_total").or(last);
        tokio::time::sleep(LOOK).await;
    }
    last
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_window_is_auto_or_whole_seconds() {
        for good in ["auto", "1s", "112s"] {
            assert_eq!(window(good).as_deref(), Ok(good));
        }
        for bad in ["", "0s", "20", "1.5s", "1m", "-1s"] {
            assert!(window(bad).is_err(), "{bad}");
        }
    }
}
