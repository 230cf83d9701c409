//! Where log lines go: stderr, in text or JSON, filtered by `GATEWAY_LOG`. What is logged is
//! decided where it happens.

use std::io::IsTerminal as _;

use tracing_subscriber::layer::SubscriberExt as _;
use tracing_subscriber::util::SubscriberInitExt as _;
use tracing_subscriber::{EnvFilter, Layer, Registry};

use crate::cli::CliError;
use crate::config::{Log, LogFormat};

/// A further consumer of spans and events, such as an exporter of traces.
pub type Extra = Box<dyn Layer<Registry> + Send + Sync>;

/// Sets the process's logging up, once, with what else wants to see spans.
///
/// # Errors
/// `Internal` where logging was set up before.
pub fn init(log: &Log, extra: Vec<Extra>) -> Result<(), CliError> {
    let filter =
        EnvFilter::builder().parse(&log.filter).map_err(|error| CliError::Usage(format!("GATEWAY_LOG: {error}")))?;
    let is_terminal = std::io::stderr().is_terminal();
    let format = log.format.unwrap_or(if is_terminal { LogFormat::Text } else { LogFormat::Json });
    let lines = tracing_subscriber::fmt::layer().with_writer(std::io::stderr).with_ansi(is_terminal);
    let lines: Extra = match format {
        LogFormat::Text => lines.with_filter(filter).boxed(),
        LogFormat::Json => lines.json().flatten_event(true).with_filter(filter).boxed(),
    };
    let mut layers = extra;
    layers.push(lines);
    tracing_subscriber::registry()
        .with(layers)
        .try_init()
        .map_err(|error| CliError::Internal(format!("logging: {error}")))
}
