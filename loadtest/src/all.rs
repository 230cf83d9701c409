//! Everything of one gateway in one run: fan-out, memory, delay, stalled readers, handshakes, and the
//! peers that are here. Decides the order and the sizes; each measurement is its own.

use clap::{Args, Command, ValueEnum};

use crate::fleet::Programs;
use crate::peers::Bins;
use crate::report::Report;
use crate::{accept, fanout, idle, latency, peers, slow};

/// `tidegate-loadtest all`.
#[derive(Args)]
pub struct Options {
    #[command(flatten)]
    programs: Programs,
    #[command(flatten)]
    bins: Bins,
    /// How much of everything
    #[arg(long, value_enum, default_value_t = Size::Full)]
    size: Size,
    /// Leave the peers out
    #[arg(long)]
    no_peers: bool,
}

/// How much of everything.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Size {
    /// What the promises are about; half an hour
    Full,
    /// A tenth, to see that all of it works; its figures say little
    Small,
}

pub async fn run(options: Options) -> Result<Report, String> {
    let mut parts = vec![
        fanout::run(fanout(&options)).await?,
        idle::run(idle(&options)).await?,
        latency::run(latency(&options)).await?,
        slow::run(slow(&options)).await?,
        accept::run(accept(&options)).await?,
    ];
    if !options.no_peers {
        parts.push(peers::run(peers(&options)).await?);
    }
    Ok(Report::together("all", parts))
}

/// The options as they are when none is given.
fn defaults<T: Args>() -> T {
    let matches = T::augment_args(Command::new("defaults")).get_matches_from(["defaults"]);
    T::from_arg_matches(&matches).expect("every option has a default")
}

fn fanout(all: &Options) -> fanout::Options {
    let mut options: fanout::Options = defaults();
    options.programs = all.programs.clone();
    if all.size == Size::Small {
        options.shrink();
    }
    options
}

fn idle(all: &Options) -> idle::Options {
    let mut options: idle::Options = defaults();
    options.programs = all.programs.clone();
    if all.size == Size::Small {
        (options.from, options.to, options.storm, options.rest) = (200, 1_500, 2_000, 15.0);
    }
    options
}

fn latency(all: &Options) -> latency::Options {
    let mut options: latency::Options = defaults();
    options.programs = all.programs.clone();
    if all.size == Size::Small {
        (options.clients, options.rounds, options.seconds) = (100, 2, 2.0);
    }
    options
}

fn slow(all: &Options) -> slow::Options {
    let mut options: slow::Options = defaults();
    options.programs = all.programs.clone();
    if all.size == Size::Small {
        (options.clients, options.stalled, options.rounds) = (100, 2, 1);
    }
    options
}

fn accept(all: &Options) -> accept::Options {
    let mut options: accept::Options = defaults();
    options.programs = all.programs.clone();
    if all.size == Size::Small {
        (options.handshakes, options.rounds) = (1_000, 2);
    }
    options
}

fn peers(all: &Options) -> peers::Options {
    let mut options: peers::Options = defaults();
    (options.programs, options.bins) = (all.programs.clone(), all.bins.clone());
    if all.size == Size::Small {
        (options.clients, options.rounds) = (500, 2);
    }
    options
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_measurement_runs_without_an_option_of_its_own() {
        let options = |size| Options { size, ..defaults() };
        for size in [Size::Full, Size::Small] {
            let options = options(size);
            assert!(fanout(&options).rounds >= 2 && latency(&options).rounds >= 2 && peers(&options).rounds >= 2);
            assert!(idle(&options).to > idle(&options).from && slow(&options).clients > slow(&options).stalled);
            assert!(accept(&options).handshakes > 0);
        }
    }
}
