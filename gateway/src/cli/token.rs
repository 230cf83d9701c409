//! `tidegate token`: signs a token for trying out. Real ones come from whoever signs users in.

use std::time::Duration;

use hub::channel::{Channel, Pattern};
use hub::clock::Clock;
use jsonwebtoken::{Algorithm, AlgorithmFamily};
use rand::TryRng as _;
use serde_json::{Value, json};

use super::output::say;
use super::{CliError, TokenArgs};
use crate::config::{Tools, process_environment};

/// Prints the token and nothing else.
///
/// # Errors
/// `Usage` for a bad channel name, or where no secret is set.
pub fn run(args: TokenArgs) -> Result<(), CliError> {
    let tools = Tools::from_environment(&process_environment())?;
    let claims = claims(&args, &tools)?;
    say(&sign(&tools, &claims)?);
    Ok(())
}

/// The claims that `args` ask for, from now on, for the issuer and audience that the gateway wants.
///
/// # Errors
/// `Usage` for a bad channel name.
pub fn claims(args: &TokenArgs, tools: &Tools) -> Result<Value, CliError> {
    let bad = |name: &str, error: &dyn std::fmt::Display| CliError::Usage(format!("{name:?}: {error}"));
    for name in &args.channels {
        Channel::new(name).map_err(|error| bad(name, &error))?;
    }
    for pattern in &args.subscribe {
        Pattern::new(pattern).map_err(|error| bad(pattern, &error))?;
    }
    let now = Clock::system().unix();
    let until = now + args.ttl.max(Duration::from_secs(1));
    let mut claims = json!({ "sub": args.sub, "iat": now.as_secs(), "exp": until.as_secs() });
    let mut put = |name: &str, value: Value| claims[name] = value;
    if !args.channels.is_empty() {
        put("channels", json!(args.channels));
    }
    if !args.subscribe.is_empty() {
        put("subscribe", json!(args.subscribe));
    }
    for (name, id) in [("jti", &args.jti), ("sid", &args.sid)] {
        if let Some(id) = id {
            put(name, json!(id.clone().unwrap_or_else(random_id)));
        }
    }
    for (name, wanted) in [("iss", &tools.issuers), ("aud", &tools.audiences)] {
        if let Some(first) = wanted.first() {
            put(name, json!(first));
        }
    }
    Ok(claims)
}

/// Signs with the secret, by the first HMAC algorithm that the gateway accepts.
///
/// # Errors
/// `Usage` where there is no secret or no such algorithm.
pub fn sign(tools: &Tools, claims: &Value) -> Result<String, CliError> {
    let secret = tools.jwt_secret.as_ref().ok_or_else(|| {
        CliError::Usage(
            "GATEWAY_JWT_SECRET (or GATEWAY_JWT_SECRET_FILE) is not set: there is no key to sign with".to_owned(),
        )
    })?;
    let is_hmac = |a: &Algorithm| AlgorithmFamily::Hmac.algorithms().contains(a);
    let algorithm = match tools.algorithms.is_empty() {
        true => Algorithm::HS256,
        false => tools.algorithms.iter().copied().find(is_hmac).ok_or_else(|| {
            CliError::Usage("GATEWAY_JWT_ALGORITHMS names no HMAC algorithm, and others need a private key".to_owned())
        })?,
    };
    hub::auth::mint_with_secret(algorithm, secret.expose(), claims)
        .map_err(|error| CliError::Internal(error.to_string()))
}

fn random_id() -> String {
    let bits = rand::rngs::SysRng.try_next_u64().expect("the system has random numbers");
    format!("{bits:016x}")
}
