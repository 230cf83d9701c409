//! Other servers that do the same, with as many clients, in turns with the floor and the gateway on
//! the same machine in the same run. Decides which are asked and what is compared: the cost of a
//! delivery, and the memory of an idle client. A peer that is not installed is said to be missing.

mod inlet;
mod start;

pub use inlet::Inlet;

use std::time::Duration;

use clap::Args;
use serde_json::json;

use crate::fanout::{self, Contest, Frame, Source, Target};
use crate::fleet::Programs;
use crate::opening;
use crate::process;
use crate::readers::{Group, Look, Readers};
use crate::report::{Bar, Chart, Report, Sheet, Whose};
use crate::wire::Transport;
pub use start::Bins;
use start::{Absent, KINDS, Kind, Peer};

/// The one channel of a comparison, and its name in every peer's configuration.
pub const CHANNEL: &str = "bench";
/// For what the handshakes used to be given back.
const SETTLE: Duration = Duration::from_secs(1);

/// `tidegate-loadtest compare`.
#[derive(Args, Clone)]
pub struct Options {
    #[command(flatten)]
    pub programs: Programs,
    #[command(flatten)]
    pub bins: Bins,
    /// Subscribers of each server
    #[arg(long, default_value_t = 5_000)]
    pub clients: usize,
    /// Rounds of each series; the median counts
    #[arg(long, default_value_t = 5)]
    pub rounds: usize,
    /// Bytes of an event's data
    #[arg(long, default_value_t = 128, value_parser = clap::value_parser!(u16).range(29..))]
    payload_bytes: u16,
}

pub async fn run(options: Options) -> Result<Report, String> {
    let mut sheet = Sheet::new("compare");
    sheet.figure("clients", "subscribers of each server", options.clients, "");
    let mut memory = Vec::new();
    for kind in KINDS {
        match Peer::start(kind, &options.bins, &options.programs).await {
            Ok(peer) => {
                // What one peer cannot do does not end the comparison.
                if let Err(why) = compare(&options, &peer, &mut memory, &mut sheet).await {
                    sheet.line(format!("{}: {why}\n{}", kind.name(), peer.log()));
                    sheet.data(kind.key(), json!({"failed": why}));
                }
            }
            Err(Absent::Missing(why)) => {
                sheet.line(format!("{}: missing ({why})", kind.name()));
                sheet.data(kind.key(), json!({"missing": why}));
            }
            Err(Absent::Broken(why)) => {
                sheet.line(format!("{}: {why}", kind.name()));
                sheet.data(kind.key(), json!({"failed": why}));
            }
        }
    }
    let (title, unit) = ("Resident memory of a client, as it connected".to_owned(), "bytes".to_owned());
    sheet.chart(Chart::Bars { title, unit, bars: memory });
    Ok(sheet.finish())
}

/// Floor, gateway (with Redis) and one peer.
async fn compare(options: &Options, peer: &Peer, memory: &mut Vec<Bar>, sheet: &mut Sheet) -> Result<(), String> {
    let (n, n_bytes) = (options.clients, usize::from(options.payload_bytes));
    let name = peer.kind.name();
    let redis = options.programs.redis().await?;
    let gateway = options.programs.gateway(&fanout::settings(Some(&redis))).await?;
    let readers = Readers::start(Look::DRAIN)?;
    let mut contest =
        Contest::new(peer.kind.key(), format!("{name} and the gateway, {n} clients of one channel"), n_bytes);

    let floor = contest.target(fanout::floor(&readers, Transport::Ws, n, Frame::bare(n_bytes)).await?);
    let before = process::resident_bytes(gateway.pid())?;
    let transport = match peer.kind {
        Kind::NchanSse | Kind::Mercure => Transport::Sse,
        _ => Transport::Ws,
    };
    let group = fanout::crowd(&readers, &gateway, transport, CHANNEL, n).await?;
    tokio::time::sleep(SETTLE).await;
    let ours = (process::resident_bytes(gateway.pid())?.saturating_sub(before)) as f64 / n as f64;
    let source = fanout::redis_source(&redis).await?;
    let channels = || vec![CHANNEL.to_owned()];
    let gateway_target = Target::new("gateway", Whose::Gateway, gateway.pid(), group, channels(), source);
    let gateway_target = contest.target(gateway_target);

    let before = process::resident_bytes(peer.pid)?;
    let (group, to, kind) = (Group::new(), peer.public, peer.kind);
    let open = |_| Peer::open(kind, to);
    opening::each(&format!("opening clients of {name}"), n, open, |opened| readers.add(opened, &group)).await?;
    tokio::time::sleep(SETTLE).await;
    let theirs = (process::resident_bytes(peer.pid)?.saturating_sub(before)) as f64 / n as f64;
    let source = Source::Peer(peer.inlet().await?);
    let peer_target = contest.target(Target::new(name, Whose::Peer, peer.pid, group, channels(), source));

    for (pace, word) in [(fanout::single(n), "single"), (fanout::burst(n), "burst of 8")] {
        let key = word.replace(' ', "_");
        let base = contest.measure(floor, &format!("floor_{key}"), &format!("floor, {word}"), pace);
        for (target, who, short) in [(gateway_target, "gateway", "gateway"), (peer_target, name, peer.kind.key())] {
            let series = contest.measure(target, &format!("{short}_{key}"), &format!("{who}, {word}"), pace);
            contest.hold(series, base, None);
        }
    }
    contest.run(options.rounds).await?;
    contest.show(sheet);
    sheet.line(format!("a client as it connected: gateway {ours:.0} B, {name} {theirs:.0} B resident"));
    sheet.data(&format!("{}_bytes_per_client", peer.kind.key()), json!({"gateway": ours, "peer": theirs}));
    let bar =
        |label: &str, value, whose| Bar { label: label.to_owned(), value, rounds: Vec::new(), bound: None, whose };
    if memory.is_empty() {
        memory.push(bar("gateway", ours, Whose::Gateway));
    }
    memory.push(bar(name, theirs, Whose::Peer));
    Ok(())
}
