//! `tidegate serve`: configuration, logging and the main runtime. What runs on it is `crate::run`'s.

use std::io;
use std::time::Duration;

use hub::plugin::Plugins;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::mpsc;

use super::traces::Traces;
use super::{CliError, logging};
use crate::config::{Config, Purpose, process_environment};
use crate::run::{self, Listening, RunError, Stop, Surroundings};
use crate::settings;

/// Threads that still hold something after the gateway has ended are not waited for longer.
const RUNTIME_END: Duration = Duration::from_secs(1);

/// Runs until the gateway has drained.
///
/// # Errors
/// `Config` with every fault of the environment; what `crate::run` says otherwise.
pub fn run(plugins: Plugins) -> Result<(), CliError> {
    let config = Config::from_environment(&process_environment(), Purpose::Serve)?;
    start(config, plugins, Box::new(|_| {}), None)
}

/// Sets logging up, builds the main runtime with `GATEWAY_WORKERS` threads and runs the gateway on it.
///
/// # Errors
/// What `crate::run` says.
pub fn start(
    config: Config,
    plugins: Plugins,
    listening: Listening,
    console_token: Option<String>,
) -> Result<(), CliError> {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(config.node.workers)
        .thread_name("tidegate")
        .enable_all()
        .build()
        .map_err(|error| CliError::Internal(format!("no runtime: {error}")))?;
    let traces = {
        let _inside = runtime.enter();
        Traces::from_environment(&process_environment(), &config.node.name)?
    };
    logging::init(&config.log, traces.iter().map(Traces::layer).collect())?;
    for warning in config.warnings() {
        tracing::warn!(variables = warning.names.join(","), "{}", warning.why);
    }
    let ended = runtime.block_on(serve(settings::fit(config), plugins, listening, console_token));
    if let Some(traces) = traces {
        traces.end();
    }
    runtime.shutdown_timeout(RUNTIME_END);
    ended
}

async fn serve(
    config: Config,
    plugins: Plugins,
    listening: Listening,
    console_token: Option<String>,
) -> Result<(), CliError> {
    // Before anything slow: an early signal must find its listener.
    let stops = signals().map_err(|error| CliError::Internal(format!("no signals: {error}")))?;
    run::run(config, plugins, Surroundings { stops, listening, console_token }).await.map_err(|error| match error {
        RunError::Config(_) | RunError::Keys { .. } => CliError::Usage(error.to_string()),
        RunError::Service(_) | RunError::Listen { .. } => CliError::Unreachable(error.to_string()),
        RunError::Io(_) | RunError::Broken => CliError::Internal(error.to_string()),
    })
}

/// SIGTERM or SIGINT once: drain. Again: end at once.
fn signals() -> io::Result<mpsc::Receiver<Stop>> {
    let (mut terminate, mut interrupt) = (signal(SignalKind::terminate())?, signal(SignalKind::interrupt())?);
    let (tell, told) = mpsc::channel(2);
    tokio::spawn(async move {
        for stop in [Stop::Drain, Stop::Now] {
            tokio::select! {
                _ = terminate.recv() => {}
                _ = interrupt.recv() => {}
            }
            if tell.send(stop).await.is_err() {
                return;
            }
        }
    });
    Ok(told)
}
