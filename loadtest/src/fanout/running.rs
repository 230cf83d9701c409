//! Fan-out of a gateway that runs already, over its public and its admin listener only: is every
//! event delivered to each, once, in order, how soon, and (where its process is here) at what cost?

use std::sync::Arc;
use std::time::Duration;

use clap::Args;
use tokio::time::{Instant, MissedTickBehavior};

use super::Options;
use crate::admin::Publisher;
use crate::histogram::Histogram;
use crate::opening;
use crate::positive;
use crate::process::Cpu;
use crate::readers::{self, Group, Look, Readers};
use crate::report::{Bound, Sheet};
use crate::wire::{Address, Transport};

/// A gateway that somebody else started.
#[derive(Args, Clone)]
#[command(next_help_heading = "A gateway that runs already")]
pub struct Running {
    /// Its public listener; without it gateways are started here
    #[arg(long, value_parser = Address::parse)]
    url: Option<Address>,
    /// Its admin listener
    #[arg(long, default_value = "http://127.0.0.1:8081", value_parser = Address::parse)]
    admin: Address,
    /// Its key, where one is set
    #[arg(long)]
    admin_key: Option<String>,
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
    /// Its process on this machine: shows its CPU time per delivery
    #[arg(long)]
    pid: Option<u32>,
    /// How many events
    #[arg(long, default_value_t = 200)]
    events: usize,
    /// Events a second
    #[arg(long, default_value_t = 50.0, value_parser = positive)]
    rate: f64,
    /// Wait at most so many seconds for what is still on its way at the end
    #[arg(long, default_value_t = 10.0, value_parser = positive)]
    patience: f64,
}

impl Running {
    pub fn is_given(&self) -> bool {
        self.url.is_some()
    }
}

/// Opens the sessions, sends the events and says what came of them.
pub async fn measure(options: &Options, sheet: &mut Sheet) -> Result<(), String> {
    let running = &options.running;
    let url = running.url.as_ref().ok_or("--url is not given")?;
    let mut publisher = Publisher::connect(&running.admin, running.admin_key.as_deref()).await?;
    let readers = Readers::start(Look::AtOnce)?;
    let group = Group::timed(running.events);
    let delays = Arc::new(Histogram::new());
    group.count_in(Arc::clone(&delays));
    let begin = Instant::now();
    let open = |n: usize| {
        let at = begin + Duration::from_secs_f64(n as f64 / running.connect_rate);
        let session = opening::session(url.clone(), running.transport, running.token.clone(), running.channel.clone());
        async move {
            tokio::time::sleep_until(at).await;
            session.await
        }
    };
    opening::each("opening sessions", options.clients, open, |opened| readers.add(opened, &group)).await?;

    let before = running.pid.map(Cpu::of).transpose()?;
    let begun = Instant::now();
    let mut pace = tokio::time::interval(Duration::from_secs_f64(1.0 / running.rate));
    // A late publish does not thin the load out: the rate is that of the whole run.
    pace.set_missed_tick_behavior(MissedTickBehavior::Burst);
    for seq in 0..running.events as u64 {
        pace.tick().await;
        group.sent(seq, Instant::now());
        publisher.publish(&running.channel, &readers::data(seq, usize::from(options.payload_bytes))).await?;
    }
    let publishing = begun.elapsed();
    let wanted = (options.clients * running.events) as u64;
    group.until_received(wanted, Duration::from_secs_f64(running.patience)).await;
    let spent = running.pid.map(Cpu::of).transpose()?.zip(before).map(|(after, before)| after.since(&before));

    let received = group.n_received();
    let ms = |part| delays.quantile(part).map(|took| took.as_secs_f64() * 1e3);
    let cost = spent.map(|spent| spent.total.as_secs_f64() * 1e6 / received.max(1) as f64);
    sheet.figure("subscribers", "subscribers", options.clients, "");
    sheet.figure("events_per_s", "events published", running.events as f64 / publishing.as_secs_f64(), "a second");
    sheet.figure("delivered", "delivered", received, "");
    sheet.figure("p50_ms", "publish to receive, p50", ms(0.5), "ms");
    sheet.figure("p99_ms", "publish to receive, p99", ms(0.99), "ms");
    sheet.figure("max_ms", "publish to receive, max", ms(1.0), "ms");
    sheet.figure("cpu_us_per_delivery", "gateway CPU per delivery", cost, "us");
    let wrong = wanted.abs_diff(received) + group.n_wrong();
    sheet.promise("lost, doubled or out of order", Some(wrong as f64), Bound::AtMost(0.0), "deliveries");
    sheet.promise("sessions that ended", Some(group.ended().len() as f64), Bound::AtMost(0.0), "");
    Ok(())
}
