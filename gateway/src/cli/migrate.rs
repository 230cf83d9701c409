//! `tidegate migrate`: brings the schema in Redis up to date. What a migration is, is
//! `redis-backplane`'s.

use hub::clock::Dice;
use redis_backplane::{MigrateError, SCHEMA, migrate};

use super::output::say;
use super::{CliError, once};
use crate::config::{Config, Purpose, process_environment};
use crate::settings;

/// Reads the environment and migrates.
///
/// # Errors
/// `Config` or `Usage` where there is no Redis to migrate; else what `run` says.
pub fn start() -> Result<(), CliError> {
    let config = Config::from_environment(&process_environment(), Purpose::Look)?;
    if config.redis.url.is_none() {
        return Err(CliError::Usage("GATEWAY_REDIS_URL is not set: there is nothing to migrate".to_owned()));
    }
    once(run(config))
}

/// Applies every migration that the Redis of `config` lacks, under a lock.
///
/// # Errors
/// `Unreachable` where Redis does not answer or has a newer major schema than this build knows.
pub async fn run(config: Config) -> Result<(), CliError> {
    let redis = settings::redis(&config).map_err(|error| CliError::Usage(error.to_string()))?;
    let redis = redis.ok_or_else(|| CliError::Usage("GATEWAY_REDIS_URL is not set".to_owned()))?;
    let prepared = migrate(&redis, Dice::seeded(settings::seed())).await.map_err(|error| match error {
        MigrateError::Config(_) => CliError::Usage(error.to_string()),
        MigrateError::Start(_) => CliError::Unreachable(error.to_string()),
    })?;
    let what = if prepared.loaded { "the libraries were loaded" } else { "nothing to do" };
    say(&format!("schema {SCHEMA}, revision {}: {what}", prepared.revision));
    Ok(())
}
