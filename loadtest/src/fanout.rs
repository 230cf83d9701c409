//! Fan-out: what does one delivery cost the server, in multiples of the least that any server can
//! do? Decides who delivers what to how many; `contest` has the rounds, `source` publishes. Every
//! delivery is checked: once, in order.
//!
//! The clients are read every few milliseconds (`readers`), so that no server pays for waking them:
//! this measures cost, and `latency` delay.

mod contest;
mod running;
mod source;

pub use contest::{Contest, Pace, Target};
pub use source::{Event, Frame, Source};

use std::sync::Arc;
use std::time::Duration;

use clap::{Args, ValueEnum};
use tokio::io::AsyncReadExt;

use crate::admin::Publisher;
use crate::fleet::{Gateway, Programs, Redis};
use crate::floor::{Floor, Of};
use crate::opening;
use crate::readers::{Group, Look, Opened, Readers};
use crate::report::{Report, Sheet, Whose};
use crate::token;
use crate::wire::{Address, Subscriber, Transport, contains};

/// Keys of the gateways that are started here; the default of theirs.
const PREFIX: &str = "tidegate";
/// Deliveries a second at which single events are sent: below what one core writes.
const SINGLE_RATE: f64 = 62_500.0;
/// And bursts: a write of eight costs little more than a write of one.
const BURST_RATE: f64 = 250_000.0;
const BURST: usize = 8;
/// Deliveries of a round, about: a second's worth, so that the count of CPU time is fine enough.
const ROUND: usize = 80_000;
/// Descriptors that a process may open here, less what it needs besides its clients.
const MAX_CLIENTS: usize = 19_000;

/// `tidegate-loadtest fanout`.
#[derive(Args, Clone)]
pub struct Options {
    #[command(flatten)]
    pub programs: Programs,
    #[command(flatten)]
    running: running::Running,
    /// Subscribers of the one channel
    #[arg(long, default_value_t = 5_000)]
    pub clients: usize,
    /// Rounds of each series; the median counts
    #[arg(long, default_value_t = 7)]
    pub rounds: usize,
    /// Bytes of an event's data
    #[arg(long, default_value_t = 128, value_parser = clap::value_parser!(u16).range(29..))]
    payload_bytes: u16,
    /// Only these contests
    #[arg(long, value_enum, value_delimiter = ',', default_values_t = [Which::Ws, Which::Sse, Which::Channels, Which::Users])]
    only: Vec<Which>,
    /// So many channels against one, instead of the usual contests
    #[arg(long, requires = "per_channel")]
    channels: Option<usize>,
    /// Subscribers of each of them
    #[arg(long, requires = "channels")]
    per_channel: Option<usize>,
    /// So much fewer channels than usual in the contests of many
    #[arg(long, hide = true, default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=100))]
    scale: u16,
}

/// A contest.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Which {
    /// One channel over WebSocket: floor, gateway with Redis, gateway in memory; single events and bursts
    Ws,
    /// The same over server-sent events
    Sse,
    /// 1,000 channels with 5 subscribers each against one channel
    Channels,
    /// 15,000 users' own channels with one subscriber each against one channel
    Users,
}

impl Options {
    /// A tenth of everything, to see that it works.
    pub fn shrink(&mut self) {
        (self.clients, self.rounds) = (self.clients / 10, 2);
        self.scale = 10;
    }
}

pub async fn run(options: Options) -> Result<Report, String> {
    let mut sheet = Sheet::new("fanout");
    let n_bytes = usize::from(options.payload_bytes);
    sheet.figure("payload_bytes", "bytes of an event's data", n_bytes, "");
    sheet.figure("rounds", "rounds of each series", options.rounds, "");
    if options.running.is_given() {
        running::measure(&options, &mut sheet).await?;
        return Ok(sheet.finish());
    }
    if let (Some(n_channels), Some(per_channel)) = (options.channels, options.per_channel) {
        let channels = Channels { n: n_channels, per_channel, are_users: false, at_most: None };
        many_channels(&options, &channels, "channels", &mut sheet).await?;
        return Ok(sheet.finish());
    }
    let scale = usize::from(options.scale);
    for which in &options.only {
        match which {
            Which::Ws => one_channel(&options, Transport::Ws, &mut sheet).await?,
            Which::Sse => one_channel(&options, Transport::Sse, &mut sheet).await?,
            Which::Channels => {
                let channels = Channels { n: 1_000 / scale, per_channel: 5, are_users: false, at_most: Some(1.2) };
                many_channels(&options, &channels, "channels", &mut sheet).await?;
            }
            Which::Users => {
                let channels = Channels { n: 15_000 / scale, per_channel: 1, are_users: true, at_most: Some(1.6) };
                many_channels(&options, &channels, "users", &mut sheet).await?;
            }
        }
    }
    Ok(sheet.finish())
}

/// What every gateway is told that is measured here: nobody is refused, nothing moves meanwhile.
pub fn settings(redis: Option<&Redis>) -> Vec<(&'static str, String)> {
    let mut settings = vec![
        ("GATEWAY_ACCEPT_BURST", "1000000".to_owned()),
        ("GATEWAY_ACCEPT_RATE", "1000000".to_owned()),
        // More than ever are under way here; what is kept for them is lost to sessions.
        ("GATEWAY_HANDSHAKES", "512".to_owned()),
        ("GATEWAY_ANONYMOUS_CHANNELS", "*".to_owned()),
        // The pings of thousands would count as cost of the events between them.
        ("GATEWAY_HEARTBEAT", "10m".to_owned()),
        // Nor is anybody to be moved: sessions that came in a crowd are, from the second minute on.
        ("GATEWAY_MAX_AGE_MIN", "0s".to_owned()),
        ("GATEWAY_MAX_AGE_MAX", "0s".to_owned()),
    ];
    settings.extend(redis.map(|redis| ("GATEWAY_REDIS_URL", redis.url())));
    settings
}

/// Publishes as a back end does, straight into Redis.
pub async fn redis_source(redis: &Redis) -> Result<Source, String> {
    Ok(Source::Redis { connection: redis.connect().await?, log: format!("{PREFIX}:log") })
}

/// So many anonymous sessions on one channel of a gateway, read by `readers`.
pub async fn crowd(
    readers: &Readers,
    gateway: &Gateway,
    transport: Transport,
    channel: &str,
    n: usize,
) -> Result<Arc<Group>, String> {
    let group = Group::new();
    let to = Address::of(gateway.public);
    let open = |_| opening::session(to.clone(), transport, None, channel.to_owned());
    opening::each("opening sessions", n, open, |opened: Opened| readers.add(opened, &group)).await?;
    Ok(group)
}

/// A floor with so many clients.
pub async fn floor(readers: &Readers, transport: Transport, n: usize, frame: Frame) -> Result<Target, String> {
    let floor = Floor::start(Of::Fanout).await?;
    let (group, to, pid) = (Group::new(), Address::of(floor.public), floor.pid());
    let open = |_| opening::of_floor(to.clone(), transport);
    opening::each("opening clients of the floor", n, open, |opened| readers.add(opened, &group)).await?;
    Ok(Target::new("floor", Whose::Floor, pid, group, vec![String::new()], Source::Floor { floor, frame }))
}

/// How single events are sent to so many clients.
pub fn single(n_clients: usize) -> Pace {
    let pause = Duration::from_secs_f64(n_clients as f64 / SINGLE_RATE);
    Pace { burst: 1, n_bursts: ROUND.div_ceil(n_clients), pause }
}

/// How bursts are; a delivery in one is cheap, so a round has twice as many.
pub fn burst(n_clients: usize) -> Pace {
    let pause = Duration::from_secs_f64((BURST * n_clients) as f64 / BURST_RATE);
    Pace { burst: BURST, n_bursts: (2 * ROUND).div_ceil(BURST * n_clients), pause }
}

/// Which bytes a gateway sends for event 0 on this wire: those the floor has to write as well.
async fn frame_of(
    gateway: &Gateway,
    source: &mut Source,
    transport: Transport,
    n_bytes: usize,
) -> Result<Frame, String> {
    const CHANNEL: &str = "bench";
    let subscriber = Subscriber::open(&Address::of(gateway.public), transport, None, CHANNEL).await?;
    let (mut stream, _, mut seen) = subscriber.into_parts();
    source.publish(&[Event { channel: CHANNEL, seq: 0 }], n_bytes).await?;
    // The gateway writes an event at once, and loopback does not cut so few bytes.
    let end: &[u8] = if transport == Transport::Ws { b"\"}}" } else { b"\n\n\r\n" };
    while !contains(&seen, crate::readers::MARKER) || !seen.ends_with(end) {
        if stream.read_buf(&mut seen).await.map_err(|error| error.to_string())? == 0 {
            return Err("the gateway ended a session".to_owned());
        }
    }
    Frame::like(seen)
}

/// Floor, gateway with Redis and gateway in memory, all with as many clients of one channel.
async fn one_channel(options: &Options, transport: Transport, sheet: &mut Sheet) -> Result<(), String> {
    let (n, n_bytes) = (options.clients, usize::from(options.payload_bytes));
    let redis = options.programs.redis().await?;
    let with_redis = options.programs.gateway(&settings(Some(&redis))).await?;
    let in_memory = options.programs.gateway(&settings(None)).await?;
    let readers = Readers::start(Look::DRAIN)?;
    let mut redis_source = redis_source(&redis).await?;
    let frame = frame_of(&with_redis, &mut redis_source, transport, n_bytes).await?;
    let wire = format!("{transport:?}").to_uppercase();
    let key = wire.to_lowercase();
    let mut contest = Contest::new(&key, format!("{n} {wire} clients of one channel"), n_bytes);
    let channels = || vec!["bench".to_owned()];

    let floor = contest.target(floor(&readers, transport, n, frame).await?);
    let group = crowd(&readers, &with_redis, transport, "bench", n).await?;
    let redis_target = Target::new("gateway, Redis", Whose::Gateway, with_redis.pid(), group, channels(), redis_source);
    let redis_target = contest.target(redis_target);
    let group = crowd(&readers, &in_memory, transport, "bench", n).await?;
    let source = Source::Admin(Publisher::connect(&Address::of(in_memory.admin), None).await?);
    let memory_target = Target::new("gateway, memory", Whose::Gateway, in_memory.pid(), group, channels(), source);
    let memory_target = contest.target(memory_target);

    for (pace, word, at_most) in [(single(n), "single", 1.10), (burst(n), "burst of 8", 1.3)] {
        let key = word.replace(' ', "_");
        let base = contest.measure(floor, &format!("floor_{key}"), &format!("floor, {wire} {word}"), pace);
        for (target, name) in [(redis_target, "redis"), (memory_target, "memory")] {
            let title = format!("gateway ({name}), {wire} {word}");
            let series = contest.measure(target, &format!("{name}_{key}"), &title, pace);
            contest.hold(series, base, Some(at_most));
        }
    }
    contest.run(options.rounds).await?;
    contest.show(sheet);
    Ok(())
}

/// Many small channels against one large one, on one gateway.
struct Channels {
    n: usize,
    per_channel: usize,
    /// The channel of each session is its user's own.
    are_users: bool,
    at_most: Option<f64>,
}

impl Channels {
    fn name(&self, n: usize) -> String {
        if self.are_users { format!("user:u-{n}") } else { format!("room-{n}") }
    }

    /// Which session asks for what: a token that joins by itself, or a channel.
    fn ask(&self, session: usize) -> (Option<String>, String) {
        let n = session % self.n;
        if self.are_users {
            (Some(token::full(&n.to_string(), &[], token::Flaw::None)), String::new())
        } else {
            (None, self.name(n))
        }
    }
}

async fn many_channels(options: &Options, channels: &Channels, key: &str, sheet: &mut Sheet) -> Result<(), String> {
    let (n_many, n_bytes) = (channels.n * channels.per_channel, usize::from(options.payload_bytes));
    let n_one = options.clients.min(MAX_CLIENTS.saturating_sub(n_many));
    if n_one == 0 {
        return Err(format!("{n_many} sessions do not fit into this process"));
    }
    let redis = options.programs.redis().await?;
    let gateway = options.programs.gateway(&settings(Some(&redis))).await?;
    let readers = Readers::start(Look::DRAIN)?;
    let title = format!("{} channels with {} each, and one with {n_one}", channels.n, channels.per_channel);
    let mut contest = Contest::new(key, title, n_bytes);

    let group = crowd(&readers, &gateway, Transport::Ws, "bench", n_one).await?;
    let source = redis_source(&redis).await?;
    let one = Target::new("one channel", Whose::Gateway, gateway.pid(), group, vec!["bench".to_owned()], source);
    let one = contest.target(one);
    let (group, to) = (Group::new(), Address::of(gateway.public));
    let open = |session| {
        let (token, channel) = channels.ask(session);
        opening::session(to.clone(), Transport::Ws, token, channel)
    };
    opening::each("opening sessions", n_many, open, |opened| readers.add(opened, &group)).await?;
    let (names, source) = ((0..channels.n).map(|n| channels.name(n)).collect(), redis_source(&redis).await?);
    let many = contest.target(Target::new("many channels", Whose::Gateway, gateway.pid(), group, names, source));

    let base = contest.measure(one, "one", "one channel", single(n_one));
    let what = if channels.are_users { "user channels" } else { "channels" };
    let title = format!("{} {what} x {}", channels.n, channels.per_channel);
    let series = contest.measure(many, "many", &title, single(n_many));
    contest.hold(series, base, channels.at_most);
    contest.run(options.rounds).await?;
    contest.show(sheet);
    Ok(())
}
