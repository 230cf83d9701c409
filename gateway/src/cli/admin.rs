//! `tidegate revoke`, `hold`, `release`, `drain`: one call of the admin API each.

use hyper::Method;
use serde_json::{Map, Value, json};

use super::admin_client::AdminClient;
use super::output::say;
use super::{AdminArgs, CliError, HoldArgs, RevokeArgs};
use crate::config::parse::show_duration;

/// Revokes; silent where it worked.
///
/// # Errors
/// As `AdminClient::call`.
pub async fn revoke(args: RevokeArgs) -> Result<(), CliError> {
    let client = AdminClient::new(&args.admin)?;
    client.call(Method::POST, "/v1/revocations", Some(revocation(&args).to_string())).await?;
    Ok(())
}

fn revocation(args: &RevokeArgs) -> Value {
    let mut body = Map::new();
    for (kind, value) in [("jti", &args.what.jti), ("sid", &args.what.sid), ("sub", &args.what.sub)] {
        if let Some(value) = value {
            body.insert(kind.to_owned(), json!(value));
        }
    }
    if let Some(before) = args.before {
        body.insert("before".to_owned(), json!(before));
    }
    if let Some(ttl) = args.ttl {
        body.insert("ttl".to_owned(), json!(show_duration(ttl)));
    }
    Value::Object(body)
}

/// Suspends shedding; prints what the gateway answers.
///
/// # Errors
/// As `AdminClient::call`.
pub async fn hold(args: HoldArgs) -> Result<(), CliError> {
    let client = AdminClient::new(&args.admin)?;
    let body = json!({ "for": show_duration(args.time), "reason": args.reason });
    tell(&client.call(Method::POST, "/v1/fleet/hold", Some(body.to_string())).await?);
    Ok(())
}

/// Ends a hold.
///
/// # Errors
/// As `AdminClient::call`.
pub async fn release(args: AdminArgs) -> Result<(), CliError> {
    tell(&AdminClient::new(&args)?.call(Method::DELETE, "/v1/fleet/hold", None).await?);
    Ok(())
}

/// Starts a node's drain; does not wait for its end.
///
/// # Errors
/// As `AdminClient::call`.
pub async fn drain(args: AdminArgs) -> Result<(), CliError> {
    tell(&AdminClient::new(&args)?.call(Method::POST, "/v1/drain", Some("{}".to_owned())).await?);
    Ok(())
}

fn tell(answer: &Value) {
    if !answer.is_null() {
        say(&answer.to_string());
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::cli::RevokeWhat;

    #[test]
    fn a_revocation_carries_what_was_named_and_nothing_else() {
        let args = RevokeArgs {
            what: RevokeWhat { jti: None, sid: None, sub: Some("42".to_owned()) },
            before: Some(7),
            ttl: Some(Duration::from_secs(60)),
            admin: AdminArgs { admin: None },
        };
        assert_eq!(revocation(&args), json!({"sub": "42", "before": 7, "ttl": "1m"}));
    }
}
