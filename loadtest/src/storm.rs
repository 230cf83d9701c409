//! A node dies and its clients come back: how soon, with how many attempts, and what does it cost
//! those who were not hit? Starts the fleet, kills one gateway, waits for the last client. Decides
//! the order of things; `crowd` plays the clients, `observer` watches, `outcome` judges.

mod crowd;
mod observer;
mod outcome;

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use clap::{Args, ValueEnum};
use tokio::task::JoinSet;
use tokio::time::Instant;

use crate::admin::Publisher;
use crate::balancer::{Balancer, Place, Policy};
use crate::fleet::{Gateway, Programs, Redis};
use crate::probe::Metrics;
use crate::redis::Counts;
use crate::report::Report;
use crate::wire::{Address, Transport};
use crate::{positive, process};
use crowd::{Manner, VICTIM, World};
use observer::{Observer, Stage, Watch};

/// New sessions a second on a node whose bucket is wide open; a figure that two cores bear.
const OPEN_CONNECT_RATE: f64 = 800.0;
/// Of a bucket's rate, while the fleet is filled.
const FILL: f64 = 0.9;
/// A bucket that refuses nobody.
const WIDE_OPEN: u32 = 100_000;

/// What happens to whom.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Scenario {
    /// 6 gateways, 13,080 clients, evenly; one gateway is killed
    Incident,
    /// 5 gateways; all 10,000 clients are on the one that is killed
    OneFull,
}

/// `tidegate-loadtest storm`.
#[derive(Args)]
pub struct Options {
    #[command(flatten)]
    programs: Programs,
    /// What happens
    #[arg(long, value_enum, default_value_t = Scenario::Incident)]
    scenario: Scenario,
    /// How the clients come back
    #[arg(long, value_enum, default_value_t = Manner::Ours)]
    clients: Manner,
    /// How they connect
    #[arg(long, value_enum, default_value_t = Transport::Ws)]
    transport: Transport,
    /// Clients on the gateway that is killed, instead of the scenario's number
    #[arg(long)]
    crowd: Option<usize>,
    /// How the balancer chooses a node
    #[arg(long, value_enum, default_value_t = Policy::Random)]
    balance: Policy,
    /// Seconds between two looks of the balancer at /readyz
    #[arg(long, default_value_t = 1.0, value_parser = positive)]
    health_every: f64,
    /// GATEWAY_ACCEPT_BURST of the living
    #[arg(long, default_value_t = 200)]
    burst: u32,
    /// GATEWAY_ACCEPT_RATE of the living, a second
    #[arg(long, default_value_t = 100)]
    rate: u32,
    /// Their buckets are wide open: what does a crowd cost Redis then?
    #[arg(long)]
    open: bool,
    /// Sessions on the living nodes that hear a steady load
    #[arg(long, default_value_t = 300)]
    stayers: usize,
    /// Events a second for them
    #[arg(long, default_value_t = 20.0, value_parser = positive)]
    publish_rate: f64,
    /// Seconds of that load before the kill, for comparison
    #[arg(long, default_value_t = 10.0, value_parser = positive)]
    before: f64,
    /// Seconds until whoever is not back counts as lost
    #[arg(long, default_value_t = 180.0, value_parser = positive)]
    patience: f64,
}

/// A scenario in numbers.
struct Plan {
    n_gateways: usize,
    n_victims: usize,
    /// Clients of the crowd on each of the others.
    n_each: usize,
    burst: u32,
    rate: u32,
    is_victim_open: bool,
}

impl Options {
    fn plan(&self) -> Plan {
        let (n_gateways, n_victims, is_victim_open) = match self.scenario {
            Scenario::Incident => (6, self.crowd.unwrap_or(2_180), false),
            Scenario::OneFull => (5, self.crowd.unwrap_or(10_000), true),
        };
        let n_each = if self.scenario == Scenario::Incident { n_victims } else { 0 };
        let (burst, rate) = if self.open { (WIDE_OPEN, WIDE_OPEN) } else { (self.burst, self.rate) };
        Plan { n_gateways, n_victims, n_each, burst, rate, is_victim_open }
    }
}

/// The counts of all that serves, at one moment.
struct Counters {
    at: Instant,
    metrics: Metrics,
    redis: Counts,
    own_cpu: Duration,
    gateway_cpu: Duration,
}

/// What a storm left to be judged.
struct Storm {
    plan: Plan,
    world: Arc<World>,
    seen: Arc<observer::Seen>,
    /// At the begin of the load, at the kill, and when the last was back.
    counters: [Counters; 3],
    /// Events published to the crowd while it was away.
    n_missed: u32,
}

pub async fn run(options: Options) -> Result<Report, String> {
    let plan = options.plan();
    let redis = options.programs.redis().await?;
    let mut gateways = Vec::new();
    for n in 0..plan.n_gateways {
        let is_open = n == VICTIM && plan.is_victim_open;
        let (burst, rate) = if is_open { (WIDE_OPEN, WIDE_OPEN) } else { (plan.burst, plan.rate) };
        let settings = [
            ("GATEWAY_REDIS_URL", redis.url()),
            ("GATEWAY_ACCEPT_BURST", burst.to_string()),
            ("GATEWAY_ACCEPT_RATE", rate.to_string()),
            ("GATEWAY_NODE", format!("node-{n}")),
            // A sweep's questions are MGETs too, and none of an admission's.
            ("GATEWAY_REVOCATION_SWEEP", "10m".to_owned()),
        ];
        gateways.push(options.programs.gateway(&settings).await?);
    }
    let places = gateways.iter().map(|node| Place { public: node.public, probes: node.probes });
    let balancer = Balancer::new(places, options.balance);
    let n_clients = plan.n_victims + plan.n_each * (plan.n_gateways - 1);
    let world = World::new(balancer, options.clients, options.transport, plan.n_victims, n_clients);
    let world = Arc::new(world);

    crowd::step_back()?;
    let living: Vec<&Gateway> = gateways[1..].iter().collect();
    let connect_rate = FILL * f64::from(plan.rate) * living.len() as f64;
    let what = Watch {
        stayers: options.stayers,
        rate: options.publish_rate,
        connect_rate: connect_rate.min(OPEN_CONNECT_RATE),
    };
    let mut observer = Observer::start(&living, what)?;
    observer.ready().await?;
    let mut tasks = fill(&plan, &world).await?;
    tasks.spawn(Arc::clone(&world.balancer).watch(Duration::from_secs_f64(options.health_every)));

    eprintln!("{n_clients} clients are connected; {} s of load before the kill", options.before);
    observer.enter(Stage::Before);
    let begun = counters(&living, &redis).await?;
    tokio::time::sleep(Duration::from_secs_f64(options.before)).await;
    let before = counters(&living, &redis).await?;

    let admin = Address::of(living[0].admin);
    let mut publisher = Publisher::connect(&admin, None).await?;
    observer.enter(Stage::Storm);
    world.kill();
    gateways[VICTIM].kill9();
    eprintln!("killed node-{VICTIM} with {} clients", plan.n_victims);
    publisher.publish(&crowd::channel(VICTIM), r#""while they were away""#).await?;
    wait_for_all(&world, Duration::from_secs_f64(options.patience)).await;
    let living: Vec<&Gateway> = gateways[1..].iter().collect();
    let after = counters(&living, &redis).await?;
    let seen = observer.end().await?;
    tasks.shutdown().await;
    let storm = Storm { plan, world, seen, counters: [begun, before, after], n_missed: 1 };
    Ok(outcome::judge(&options, &storm))
}

/// Connects everybody at the pace that the buckets bear, so that nobody is refused before the storm.
async fn fill(plan: &Plan, world: &Arc<World>) -> Result<JoinSet<()>, String> {
    let mut tasks = JoinSet::new();
    let gated = (FILL * f64::from(plan.rate)).min(OPEN_CONNECT_RATE / plan.n_gateways as f64);
    let mut from = 0;
    for home in 0..plan.n_gateways {
        let n = if home == VICTIM { plan.n_victims } else { plan.n_each };
        let rate = if home == VICTIM && plan.is_victim_open { OPEN_CONNECT_RATE } else { gated };
        tasks.spawn(crowd::gather(Arc::clone(world), from..from + n, home, rate));
        from += n;
    }
    let until = Instant::now() + Duration::from_secs(60 + from as u64 / 50);
    while world.n_open.load(Ordering::Relaxed) < from {
        if Instant::now() >= until {
            let refused = world.refused.lock().expect("nothing panics while it is held").clone();
            return Err(format!(
                "only {} of {from} clients could connect: {refused:?}",
                world.n_open.load(Ordering::Relaxed)
            ));
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    Ok(tasks)
}

async fn wait_for_all(world: &World, patience: Duration) {
    let until = Instant::now() + patience;
    let mut shown = Instant::now();
    loop {
        let n_back = world.n_back.load(Ordering::Relaxed);
        if n_back >= world.n_victims || Instant::now() >= until {
            return;
        }
        if shown.elapsed() > Duration::from_secs(5) {
            eprintln!("{n_back} of {} are back", world.n_victims);
            shown = Instant::now();
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

async fn counters(living: &[&Gateway], redis: &Redis) -> Result<Counters, String> {
    let metrics = Metrics::read_all(living.iter().map(|node| node.probes)).await?;
    let mut gateway_cpu = Duration::ZERO;
    for node in living {
        gateway_cpu += process::cpu_time(node.pid())?;
    }
    let redis = redis.connect().await?.counts().await?;
    let own_cpu = process::cpu_time(std::process::id())?;
    Ok(Counters { at: Instant::now(), metrics, redis, own_cpu, gateway_cpu })
}
