//! A fleet behind a real balancer grows: how soon has every node its share, how many sessions had to
//! move for it, and did anybody miss anything? Starts Redis, HAProxy or nginx, and the gateways;
//! opens sessions, lets them grow old enough to be moved, and starts the new nodes. Decides the order
//! of things; `crowd` plays the clients, `load` publishes, `watch` looks, `course` and `outcome` judge.
//!
//! Sessions end for no other reason here: their maximum age is off, unless `--env` sets it.

mod course;
mod crowd;
mod load;
mod outcome;
mod watch;

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use clap::Args;
use tokio::sync::{mpsc, watch as value};
use tokio::task::JoinSet;
use tokio::time::Instant;

use crate::balancer::Place;
use crate::fleet::{Gateway, Programs, port_for_later};
use crate::mix::Mix;
use crate::positive;
use crate::probe::Metrics;
use crate::process;
use crate::proxy::Balancers;
use crate::report::Report;
use course::Row;
use crowd::World;
use load::{Published, Rates};
use watch::Fleet;

/// New sessions a second and gateway that the usual bucket (100/s) lets in for certain.
const FILL: f64 = 80.0;
/// Load before the new nodes come.
const LOAD_BEFORE: Duration = Duration::from_secs(10);
/// For what is still on its way when the load ends.
const LAST_EVENTS: Duration = Duration::from_secs(15);
/// Clients that were moved and wait for an event of their own.
const MAX_MOVED: usize = 10_000;

/// `tidegate-loadtest rebalance`.
#[derive(Args)]
pub struct Options {
    #[command(flatten)]
    programs: Programs,
    #[command(flatten)]
    balancers: Balancers,
    /// Clients; the balancer needs two descriptors for each
    #[arg(long, default_value_t = 6_000)]
    clients: usize,
    /// Gateways at first
    #[arg(long, default_value_t = 6)]
    from: usize,
    /// Gateways in the end
    #[arg(long, default_value_t = 10)]
    to: usize,
    /// How the clients connect
    #[arg(long, value_enum, default_value_t = Mix::Mixed)]
    transport: Mix,
    /// New sessions a second in the beginning, at most 80 for each gateway
    #[arg(long, default_value_t = 400.0, value_parser = positive)]
    connect_rate: f64,
    /// Seconds before the new nodes come: whoever is younger than two minutes is not moved
    #[arg(long, default_value_t = 125.0, value_parser = positive)]
    settle: f64,
    /// Seconds for which the fleet is watched after every node has its share
    #[arg(long, default_value_t = 180.0, value_parser = positive)]
    hold: f64,
    /// Events a second for everybody
    #[arg(long, default_value_t = 1.0, value_parser = positive)]
    common_rate: f64,
    /// Events a second for one client each
    #[arg(long, default_value_t = 40.0, value_parser = positive)]
    own_rate: f64,
}

/// What a run left to be judged.
struct Growth {
    world: Arc<World>,
    rows: Vec<Row>,
    published: Published,
    /// How long the new gateways took to be ready.
    started: Duration,
    /// Since the new nodes were started.
    metrics: Metrics,
    /// CPU seconds of this program and of the gateways.
    own_cpu: Duration,
    gateway_cpu: Duration,
    took: Duration,
}

pub async fn run(options: Options) -> Result<Report, String> {
    if options.from < 1 || options.to <= options.from {
        return Err("--to must be above --from".to_owned());
    }
    let redis = options.programs.redis().await?;
    let places = (0..options.to).map(|_| place()).collect::<Result<Vec<_>, String>>()?;
    let url = redis.url();
    let mut gateways = start(&options.programs, &url, &places, 0..options.from).await?;
    let proxy = options.balancers.start(&places, options.clients).await?;
    proxy.until_up(options.from).await?;

    let (moved, to_moved) = mpsc::channel(MAX_MOVED);
    let world = Arc::new(World::new(proxy.address, options.transport, options.clients, moved));
    let mut clients = JoinSet::new();
    let rate = options.connect_rate.min(FILL * options.from as f64);
    clients.spawn(crowd::gather(Arc::clone(&world), rate));
    until_open(&world, rate).await?;
    eprintln!("{} clients are connected; {} s until they may be moved", options.clients, options.settle);
    tokio::time::sleep(Duration::from_secs_f64(options.settle)).await;
    let fleet = |gateways: &[Gateway]| Fleet {
        probes: gateways.iter().map(|node| node.probes).collect(),
        admin: gateways[0].admin,
    };
    fleet(&gateways).until_calm().await?;

    let (over, is_over) = value::channel(false);
    let rates = Rates { common: options.common_rate, own: options.own_rate };
    let admin = gateways[0].admin;
    let mut load = tokio::spawn(load::publish(Arc::clone(&world), admin, rates, to_moved, is_over));
    tokio::time::sleep(LOAD_BEFORE).await;
    let before = Cpu::read(&gateways)?;
    let counted = Metrics::read_all(gateways.iter().map(|node| node.probes)).await?;
    let began = world.begin();
    gateways.extend(start(&options.programs, &url, &places, options.from..options.to).await?);
    let started = began.elapsed();
    eprintln!("{} more gateways are ready after {:.1} s", options.to - options.from, started.as_secs_f64());
    let share = options.clients as f64 / options.to as f64;
    let grown = fleet(&gateways);
    let rows = tokio::select! {
        rows = grown.watch(began, share, Duration::from_secs_f64(options.hold)) => rows?,
        ended = &mut load => return Err(format!("the load ended: {ended:?}")),
    };
    over.send_replace(true);
    let published = load.await.map_err(|error| error.to_string())??;
    until_heard(&world).await;
    let metrics = Metrics::read_all(gateways.iter().map(|node| node.probes)).await?.since(&counted);
    let cpu = Cpu::read(&gateways)?;
    clients.shutdown().await;
    let growth = Growth {
        world,
        rows,
        published,
        started,
        metrics,
        own_cpu: cpu.own.saturating_sub(before.own),
        gateway_cpu: cpu.gateways.saturating_sub(before.gateways),
        took: began.elapsed(),
    };
    Ok(outcome::judge(&options, &growth))
}

/// Where a gateway will be: the balancer is told before it runs.
fn place() -> Result<Place, String> {
    let at = |port| ([127, 0, 0, 1], port).into();
    Ok(Place { public: at(port_for_later()?), probes: at(port_for_later()?) })
}

/// Starts these gateways at once and waits until all are ready.
async fn start(
    programs: &Programs,
    redis: &str,
    places: &[Place],
    range: std::ops::Range<usize>,
) -> Result<Vec<Gateway>, String> {
    let mut starting = JoinSet::new();
    for n in range {
        let (programs, redis, place) = (programs.clone(), redis.to_owned(), places[n]);
        starting.spawn(async move {
            let settings = [
                ("GATEWAY_REDIS_URL", redis),
                ("GATEWAY_NODE", format!("node-{n:02}")),
                ("GATEWAY_LISTEN", place.public.to_string()),
                ("GATEWAY_PROBE_LISTEN", place.probes.to_string()),
                ("GATEWAY_MAX_AGE_MIN", "0s".to_owned()),
                ("GATEWAY_MAX_AGE_MAX", "0s".to_owned()),
            ];
            programs.gateway(&settings).await.map(|gateway| (n, gateway))
        });
    }
    let mut started = starting.join_all().await.into_iter().collect::<Result<Vec<_>, String>>()?;
    started.sort_by_key(|(n, _)| *n);
    Ok(started.into_iter().map(|(_, gateway)| gateway).collect())
}

async fn until_open(world: &World, rate: f64) -> Result<(), String> {
    let n = world.records.len();
    let until = Instant::now() + Duration::from_secs_f64(60.0 + 2.0 * n as f64 / rate);
    loop {
        let n_open = world.n_open.load(Ordering::Relaxed);
        if n_open == n {
            return Ok(());
        }
        if Instant::now() >= until {
            return Err(format!("only {n_open} of {n} clients could connect"));
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

/// Waits until everybody has heard everything, or long enough.
async fn until_heard(world: &World) {
    let until = Instant::now() + LAST_EVENTS;
    while world.n_lost() > 0 && Instant::now() < until {
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}

/// CPU time so far.
struct Cpu {
    own: Duration,
    gateways: Duration,
}

impl Cpu {
    fn read(gateways: &[Gateway]) -> Result<Cpu, String> {
        let each = gateways.iter().map(|node| process::cpu_time(node.pid()));
        Ok(Cpu { own: process::cpu_time(std::process::id())?, gateways: each.sum::<Result<Duration, String>>()? })
    }
}
