//! The command line: which commands exist, what each is told, which exit code it ends with. What a
//! command does stands in its own file; the gateway itself is `crate::run`'s.

mod admin;
mod admin_client;
mod config;
mod dev;
mod fleet;
pub mod logging;
pub mod migrate;
mod output;
mod publish;
mod serve;
pub mod tail;
mod token;
mod traces;

use std::ffi::OsString;
use std::process::ExitCode;
use std::time::Duration;

use clap::{Args, Parser, Subcommand, ValueEnum};
use hub::plugin::Plugins;

use crate::config::{ConfigErrors, parse};

/// A realtime gateway: notifications over WebSocket and SSE, none lost when a client comes back.
#[derive(Debug, Parser)]
#[command(name = "tidegate", version, max_term_width = 100)]
#[command(after_help = "Every setting is a GATEWAY_… variable: `tidegate config` prints them all.\n\n\
    Example:\n  tidegate dev\n\n\
    Exit codes: 0 done; 64 bad configuration or usage; 69 a needed service cannot be reached or is too old; 70 internal.")]
struct Cli {
    #[command(subcommand)]
    command: Option<Command>,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Run the gateway (the default command)
    #[command(
        after_help = "Example:\n  GATEWAY_JWT_SECRET_FILE=/run/secrets/jwt GATEWAY_REDIS_URL=redis://redis:6379 tidegate serve"
    )]
    Serve,
    /// Run a gateway for trying out: on this host only, with a random key and a ready-made token
    #[command(
        after_help = "Variables that are set count here too, except that nothing may listen for other hosts.\n\n\
        Example:\n  tidegate dev"
    )]
    Dev,
    /// Print every setting with its value in force, or only check them
    #[command(
        after_help = "Example:\n  GATEWAY_HEARTBEAT=20s tidegate config\n  tidegate config --check && tidegate serve"
    )]
    Config(ConfigArgs),
    /// Bring the schema in Redis up to date (nodes do so themselves at start)
    #[command(after_help = "Example:\n  GATEWAY_REDIS_URL=redis://redis:6379 tidegate migrate")]
    Migrate,
    /// Sign a token with GATEWAY_JWT_SECRET and print it
    #[command(after_help = "Example:\n  tidegate token --sub 42 --ttl 1h --channel news --subscribe 'room:*'")]
    Token(TokenArgs),
    /// Publish an event through the admin API
    #[command(
        after_help = "Example:\n  tidegate publish news '{\"title\":\"hello\"}'\n  echo '[1,2,3]' | tidegate publish news - --event numbers"
    )]
    Publish(PublishArgs),
    /// Watch events in the terminal: resumes, shows byes and gaps
    #[command(
        after_help = "Example:\n  tidegate tail --token \"$(tidegate token --sub 42 --channel news)\" --channel news"
    )]
    Tail(TailArgs),
    /// Revoke a token, a sign-in, or all tokens of a user issued until now
    #[command(after_help = "Example:\n  tidegate revoke --jti 0d9f2c\n  tidegate revoke --sub 42 --ttl 30d")]
    Revoke(RevokeArgs),
    /// Show the nodes of the fleet and how evenly sessions lie on them
    #[command(after_help = "Example:\n  tidegate fleet --watch")]
    Fleet(FleetArgs),
    /// Suspend the moving of sessions in the whole fleet for a while
    #[command(after_help = "Example:\n  tidegate hold 15m --reason 'deploy of the balancer'")]
    Hold(HoldArgs),
    /// End a hold before its time
    #[command(after_help = "Example:\n  tidegate release")]
    Release(AdminArgs),
    /// Make one node leave: unready, then its sessions move, then it exits
    #[command(after_help = "Example:\n  tidegate drain --admin http://10.0.0.7:8081")]
    Drain(AdminArgs),
}

/// `tidegate config`.
#[derive(Debug, Args)]
struct ConfigArgs {
    /// Only check, as `serve` would; print nothing but faults and warnings
    #[arg(long)]
    check: bool,
    /// Print the reference of all variables as Markdown instead
    #[arg(long, conflicts_with = "check")]
    markdown: bool,
}

/// `tidegate token`.
#[derive(Debug, Args)]
struct TokenArgs {
    /// Whom the token is for
    #[arg(long)]
    sub: String,
    /// How long it is good
    #[arg(long, default_value = "1h", value_parser = duration)]
    ttl: Duration,
    /// A channel joined at once (may be repeated)
    #[arg(long = "channel", value_name = "NAME")]
    channels: Vec<String>,
    /// A channel, or a prefix ending in *, that may be asked for (may be repeated)
    #[arg(long = "subscribe", value_name = "PATTERN")]
    subscribe: Vec<String>,
    /// The token's own id, for revocation; without a value a random one
    #[arg(long, num_args = 0..=1, value_name = "ID")]
    jti: Option<Option<String>>,
    /// The sign-in's id, for revocation; without a value a random one
    #[arg(long, num_args = 0..=1, value_name = "ID")]
    sid: Option<Option<String>>,
}

/// Which gateway's admin API.
#[derive(Clone, Debug, Args)]
struct AdminArgs {
    /// The admin API [default: where GATEWAY_ADDR_FILE or GATEWAY_ADMIN_LISTEN says]; its key comes from GATEWAY_ADMIN_KEY
    #[arg(long, value_name = "URL")]
    admin: Option<String>,
}

/// `tidegate publish`.
#[derive(Debug, Args)]
struct PublishArgs {
    /// Where to
    channel: String,
    /// The event's data, any JSON; - reads it from standard input
    json: String,
    /// The event's name
    #[arg(long, value_name = "NAME")]
    event: Option<String>,
    /// Idempotency key: a repeat with the same key publishes nothing new
    #[arg(long)]
    key: Option<String>,
    /// Reach only who is connected now: no id, no history
    #[arg(long)]
    ephemeral: bool,
    #[command(flatten)]
    admin: AdminArgs,
}

/// `tidegate tail`.
#[derive(Debug, Args)]
pub struct TailArgs {
    /// The gateway [default: http://127.0.0.1:8080]
    #[arg(long)]
    pub url: Option<String>,
    /// The token; none: an anonymous session
    #[arg(long)]
    pub token: Option<String>,
    /// A channel to hear beyond those of the token (may be repeated)
    #[arg(long = "channel", value_name = "NAME")]
    pub channels: Vec<String>,
    /// How to connect
    #[arg(long, value_enum, default_value_t = TailTransport::Ws)]
    pub transport: TailTransport,
    /// The cursor to resume from; 0: all that is kept
    #[arg(long, value_name = "CURSOR")]
    pub since: Option<String>,
}

/// How `tail` connects.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum TailTransport {
    /// WebSocket
    Ws,
    /// Server-Sent Events
    Sse,
}

/// `tidegate revoke`.
#[derive(Debug, Args)]
struct RevokeArgs {
    #[command(flatten)]
    what: RevokeWhat,
    /// With --sub: tokens issued until this Unix time [default: now]
    #[arg(long, value_name = "UNIX", conflicts_with_all = ["jti", "sid"])]
    before: Option<u64>,
    /// How long the revocation is kept [default: GATEWAY_REVOCATION_TTL of the gateway]
    #[arg(long, value_parser = duration)]
    ttl: Option<Duration>,
    #[command(flatten)]
    admin: AdminArgs,
}

#[derive(Debug, Args)]
#[group(required = true, multiple = false)]
struct RevokeWhat {
    /// One token
    #[arg(long, value_name = "ID")]
    jti: Option<String>,
    /// All tokens of one sign-in
    #[arg(long, value_name = "ID")]
    sid: Option<String>,
    /// All tokens of one user
    #[arg(long, value_name = "USER")]
    sub: Option<String>,
}

/// `tidegate fleet`.
#[derive(Debug, Args)]
struct FleetArgs {
    /// Show it again every two seconds
    #[arg(long)]
    watch: bool,
    /// Print the answer as it came
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    admin: AdminArgs,
}

/// `tidegate hold`.
#[derive(Debug, Args)]
struct HoldArgs {
    /// For how long: 1s to 24h; it replaces a hold that there is
    #[arg(value_name = "TIME", value_parser = duration)]
    time: Duration,
    /// Why, for those who wonder
    #[arg(long)]
    reason: Option<String>,
    #[command(flatten)]
    admin: AdminArgs,
}

/// Why a command failed, grouped by exit code.
#[derive(Debug, thiserror::Error)]
pub enum CliError {
    /// It was asked for something that cannot be: 64.
    #[error("{0}")]
    Usage(String),
    /// The environment is bad: 64.
    #[error(transparent)]
    Config(#[from] ConfigErrors),
    /// A needed service cannot be reached, cannot answer now, or is too old: 69.
    #[error("{0}")]
    Unreachable(String),
    /// Our own fault or the machine's: 70.
    #[error("{0}")]
    Internal(String),
}

impl CliError {
    /// The process's exit code, as in BSD's `sysexits.h`.
    pub fn exit_code(&self) -> u8 {
        match self {
            CliError::Usage(_) | CliError::Config(_) => EXIT_USAGE,
            CliError::Unreachable(_) => 69,
            CliError::Internal(_) => 70,
        }
    }
}

const EXIT_USAGE: u8 = 64;

/// The whole program, without plugins.
pub fn main() -> ExitCode {
    main_with(Plugins::new())
}

/// The whole program with plugins compiled in: reads the command line, does what it says, prints
/// what went wrong to stderr and gives the exit code.
pub fn main_with(plugins: Plugins) -> ExitCode {
    main_of(std::env::args_os(), plugins)
}

fn main_of(arguments: impl Iterator<Item = OsString>, plugins: Plugins) -> ExitCode {
    let cli = match Cli::try_parse_from(arguments) {
        Ok(cli) => cli,
        Err(answer) => {
            let is_failure = answer.use_stderr();
            // Nothing better can be done where even the terminal is gone.
            let _ = answer.print();
            return ExitCode::from(if is_failure { EXIT_USAGE } else { 0 });
        }
    };
    match run(cli.command.unwrap_or(Command::Serve), plugins) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            output::complain(&format!("tidegate: {error}"));
            ExitCode::from(error.exit_code())
        }
    }
}

fn run(command: Command, plugins: Plugins) -> Result<(), CliError> {
    match command {
        Command::Serve => serve::run(plugins),
        Command::Dev => dev::run(plugins),
        Command::Config(args) => config::run(&args),
        Command::Migrate => migrate::start(),
        Command::Token(args) => token::run(args),
        Command::Publish(args) => once(publish::run(args)),
        Command::Tail(args) => once(tail::run(args)),
        Command::Revoke(args) => once(admin::revoke(args)),
        Command::Fleet(args) => once(fleet::run(args)),
        Command::Hold(args) => once(admin::hold(args)),
        Command::Release(args) => once(admin::release(args)),
        Command::Drain(args) => once(admin::drain(args)),
    }
}

/// Runs a one-shot command on a small runtime of its own.
fn once(command: impl Future<Output = Result<(), CliError>>) -> Result<(), CliError> {
    tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(|error| CliError::Internal(format!("no runtime: {error}")))?
        .block_on(command)
}

/// A duration over zero on the command line, in the environment's form.
fn duration(text: &str) -> Result<Duration, String> {
    parse::duration(text)
        .filter(|d| !d.is_zero())
        .ok_or_else(|| "expected a duration over zero such as 30s, 20m, 1h or 30d".to_owned())
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory as _;

    use super::*;

    #[test]
    fn the_command_line_is_sound_and_every_command_shows_an_example() {
        let command = Cli::command();
        command.clone().debug_assert();
        for command in command.get_subcommands() {
            let help = command.clone().render_long_help().to_string();
            assert!(help.contains("Example:\n  "), "{help}");
            assert!(help.contains(&format!("tidegate {}", command.get_name())), "{help}");
        }
    }

    #[test]
    fn no_command_means_serve() {
        assert!(Cli::try_parse_from(["tidegate"]).unwrap().command.is_none());
    }

    #[test]
    fn a_revocation_names_exactly_one_thing() {
        for bad in [vec![], vec!["--jti", "a", "--sid", "b"], vec!["--jti", "a", "--before", "1"]] {
            assert!(Cli::try_parse_from(["tidegate", "revoke"].into_iter().chain(bad.clone())).is_err(), "{bad:?}");
        }
        assert!(Cli::try_parse_from(["tidegate", "revoke", "--sub", "42", "--before", "1"]).is_ok());
    }

    #[test]
    fn an_id_may_be_asked_for_without_naming_it() {
        let parse = |line: &str| match Cli::try_parse_from(line.split(' ')).unwrap().command {
            Some(Command::Token(args)) => (args.jti, args.sid),
            other => panic!("{other:?}"),
        };
        assert_eq!(parse("tidegate token --sub 1"), (None, None));
        assert_eq!(parse("tidegate token --sub 1 --jti --sid s"), (Some(None), Some(Some("s".to_owned()))));
    }
}
