//! Fan-out: N subscribers of one channel, M events. Decides whether each event came to each
//! subscriber, once and in order; measures from the moment an event is sent to the admin API to the
//! moment a subscriber has read it.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use clap::Args;
use serde_json::{Value, json};
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::{Instant, MissedTickBehavior};

use crate::admin::Publisher;
use crate::histogram::Histogram;
use crate::report::Report;
use crate::wire::{Address, Subscriber, number_after};
use crate::{Gateway, positive, process};

/// `tidegate-loadtest fanout`.
#[derive(Args)]
pub struct Options {
    #[command(flatten)]
    gateway: Gateway,
    /// The admin listener
    #[arg(long, default_value = "http://127.0.0.1:8081", value_parser = Address::parse)]
    admin: Address,
    /// Its key, where one is set
    #[arg(long)]
    admin_key: Option<String>,
    /// How many subscribers
    #[arg(long, default_value_t = 100)]
    clients: usize,
    /// How many events
    #[arg(long, default_value_t = 200)]
    events: u64,
    /// Events a second
    #[arg(long, default_value_t = 50.0, value_parser = positive)]
    rate: f64,
    /// Size of an event's data, about
    #[arg(long, default_value_t = 120)]
    payload_bytes: usize,
    /// The gateway's process on this machine: shows its CPU time per delivery
    #[arg(long)]
    pid: Option<u32>,
    /// Wait at most so many seconds for what is still on its way at the end
    #[arg(long, default_value_t = 10.0, value_parser = positive)]
    patience: f64,
}

/// What all tasks share.
struct Run {
    started: Instant,
    /// When each event was sent, in ns after the start.
    sent: Vec<AtomicU64>,
    latency: Histogram,
    n_delivered: AtomicU64,
    marker: Vec<u8>,
}

/// What one subscriber saw.
#[derive(Default)]
struct Seen {
    next: u64,
    n_received: u64,
    /// Came after a later one, or a second time.
    n_out_of_order: u64,
    ended: Option<String>,
}

pub async fn run(options: Options) -> Result<Report, String> {
    let mut publisher = Publisher::connect(&options.admin, options.admin_key.as_deref()).await?;
    let run = Arc::new(Run {
        started: Instant::now(),
        sent: (0..options.events).map(|_| AtomicU64::new(0)).collect(),
        latency: Histogram::new(),
        n_delivered: AtomicU64::new(0),
        marker: format!(r#""run":{},"seq":"#, std::process::id()).into_bytes(),
    });
    let (finish, finished) = watch::channel(());
    let mut listening = JoinSet::new();
    let start = |subscriber| drop(listening.spawn(listen(subscriber, Arc::clone(&run), finished.clone())));
    let n_refused = options.gateway.open(options.clients, start).await;
    if listening.is_empty() {
        return Err("no subscriber could be opened".to_owned());
    }

    let cpu_before = options.pid.map(process::cpu_time).transpose()?;
    let begun = Instant::now();
    publish_all(&options, &run, &mut publisher).await?;
    let publishing = begun.elapsed();
    wait_for(&run, listening.len() as u64 * options.events, Duration::from_secs_f64(options.patience)).await;
    let cpu = options.pid.map(process::cpu_time).transpose()?.zip(cpu_before).map(|(after, before)| after - before);
    drop(finish);
    let seen = listening.join_all().await;
    Ok(report(&options, &run, &seen, n_refused, publishing, cpu))
}

async fn listen(mut subscriber: Subscriber, run: Arc<Run>, mut finished: watch::Receiver<()>) -> Seen {
    let mut seen = Seen::default();
    // Listening is cancel-safe; `finished` only ever tells the end.
    let ended = tokio::select! {
        ended = subscriber.listen(|text| run.note(text, &mut seen)) => Some(ended),
        _ = finished.changed() => None,
    };
    seen.ended = ended;
    seen
}

impl Run {
    fn note(&self, text: &[u8], seen: &mut Seen) {
        let Some(seq) = number_after(text, &self.marker) else { return };
        let Some(sent) = self.sent.get(seq as usize) else { return };
        let sent = Duration::from_nanos(sent.load(Ordering::Acquire));
        self.latency.record(self.started.elapsed().saturating_sub(sent));
        if seq < seen.next {
            seen.n_out_of_order += 1;
        } else {
            seen.next = seq + 1;
        }
        seen.n_received += 1;
        self.n_delivered.fetch_add(1, Ordering::Relaxed);
    }
}

async fn publish_all(options: &Options, run: &Run, publisher: &mut Publisher) -> Result<(), String> {
    let pad = "x".repeat(options.payload_bytes.saturating_sub(40));
    let marker = std::str::from_utf8(&run.marker).expect("made of text");
    let mut pace = tokio::time::interval(Duration::from_secs_f64(1.0 / options.rate));
    // A late publish does not thin the load out: the rate is that of the whole run.
    pace.set_missed_tick_behavior(MissedTickBehavior::Burst);
    for (seq, sent) in run.sent.iter().enumerate() {
        pace.tick().await;
        sent.store(run.started.elapsed().as_nanos() as u64, Ordering::Release);
        publisher.publish(&options.gateway.channel, &format!(r#"{{{marker}{seq},"pad":"{pad}"}}"#)).await?;
    }
    Ok(())
}

async fn wait_for(run: &Run, wanted: u64, patience: Duration) {
    let deadline = Instant::now() + patience;
    while run.n_delivered.load(Ordering::Relaxed) < wanted && Instant::now() < deadline {
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

fn report(
    options: &Options,
    run: &Run,
    seen: &[Seen],
    n_refused: usize,
    publishing: Duration,
    cpu: Option<Duration>,
) -> Report {
    let wanted = seen.len() as u64 * options.events;
    let delivered = run.n_delivered.load(Ordering::Relaxed);
    let n_incomplete = seen.iter().filter(|seen| seen.n_received != options.events).count();
    let n_out_of_order: u64 = seen.iter().map(|seen| seen.n_out_of_order).sum();
    let ended: Vec<&str> = seen.iter().filter_map(|seen| seen.ended.as_deref()).collect();
    let ms = |part| run.latency.quantile(part).map(|took| took.as_secs_f64() * 1e3);
    let cpu_us = cpu.map(|cpu| cpu.as_secs_f64() * 1e6 / delivered.max(1) as f64);
    let text = |number: Option<f64>, unit: &str| number.map_or("-".to_owned(), |number| format!("{number:.3} {unit}"));
    let rate = options.events as f64 / publishing.as_secs_f64();
    let rows = vec![
        ("subscribers", seen.len().to_string()),
        ("refused", n_refused.to_string()),
        ("ended early", ended.len().to_string()),
        ("events published", format!("{} ({rate:.0}/s)", options.events)),
        ("delivered", format!("{delivered} of {wanted}")),
        ("incomplete subscribers", n_incomplete.to_string()),
        ("out of order or double", n_out_of_order.to_string()),
        ("publish to receive, p50", text(ms(0.5), "ms")),
        ("publish to receive, p99", text(ms(0.99), "ms")),
        ("publish to receive, max", text(ms(1.0), "ms")),
        ("gateway CPU per delivery", text(cpu_us, "us")),
    ];
    let json = json!({
        "test": "fanout", "transport": format!("{:?}", options.gateway.transport).to_lowercase(),
        "subscribers": seen.len(), "refused": n_refused, "ended": ended.len(), "first_end": ended.first(),
        "events": options.events, "events_per_s": rate, "delivered": delivered, "wanted": wanted,
        "incomplete": n_incomplete, "out_of_order": n_out_of_order,
        "p50_ms": ms(0.5), "p99_ms": ms(0.99), "max_ms": ms(1.0),
        "cpu_us_per_delivery": cpu_us.map_or(Value::Null, Value::from),
    });
    let is_good = n_refused == 0 && n_incomplete == 0 && n_out_of_order == 0;
    Report { rows, json, is_good }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_hole_a_double_and_a_swap_are_all_noticed() {
        let run = Run {
            started: Instant::now(),
            sent: (0..5).map(|_| AtomicU64::new(0)).collect(),
            latency: Histogram::new(),
            n_delivered: AtomicU64::new(0),
            marker: br#""run":1,"seq":"#.to_vec(),
        };
        let note = |order: &[u64]| {
            let mut seen = Seen::default();
            for seq in order {
                run.note(format!(r#"{{"type":"event","data":{{"run":1,"seq":{seq}}}}}"#).as_bytes(), &mut seen);
            }
            (seen.n_received, seen.n_out_of_order)
        };
        assert_eq!(note(&[0, 1, 2, 3, 4]), (5, 0));
        assert_eq!(note(&[0, 1, 3, 4]), (4, 0), "fewer than published: incomplete");
        assert_eq!(note(&[0, 1, 1, 2, 3]), (5, 1));
        assert_eq!(note(&[0, 2, 1, 3, 4]), (5, 1));
        assert_eq!(note(&[7]), (0, 0), "not of this run");
        assert_eq!(number_after(br#""run":2,"seq":1"#, &run.marker), None);
    }
}
