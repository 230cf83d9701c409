//! `tidegate revoke`, `fleet`, `hold`, `release`, `drain`: one call of the admin API each.

use std::time::Duration;

use hyper::Method;
use serde_json::{Map, Value, json};

use super::admin_client::AdminClient;
use super::output::say;
use super::{AdminArgs, CliError, FleetArgs, HoldArgs, RevokeArgs};
use crate::config::parse::show_duration;

/// Between two pictures of `fleet --watch`: below the nodes' own report interval.
const WATCH: Duration = Duration::from_secs(2);

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

/// Shows the fleet, once or until Ctrl-C.
///
/// # Errors
/// As `AdminClient::call`; while watching, the first failure ends it.
pub async fn fleet(args: FleetArgs) -> Result<(), CliError> {
    let client = AdminClient::new(&args.admin)?;
    loop {
        let fleet = client.call(Method::GET, "/v1/fleet", None).await?;
        say(if args.json { fleet.to_string() } else { render(&fleet) }.trim_end());
        if !args.watch {
            return Ok(());
        }
        tokio::select! {
            _ = tokio::time::sleep(WATCH) => {}
            _ = tokio::signal::ctrl_c() => return Ok(()),
        }
    }
}

/// Suspends shedding; prints what the gateway answers.
///
/// # Errors
/// As `AdminClient::call`.
pub async fn hold(args: HoldArgs) -> Result<(), CliError> {
    let client = AdminClient::new(&args.admin)?;
    let body = json!({ "for": show_duration(args.duration), "reason": args.reason });
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

/// The columns of nodes that come first, in this order. JSON keeps none.
const COLUMNS: [&str; 8] = ["node", "phase", "sessions", "target", "capacity", "share", "version", "age_ms"];

/// The nodes as a table, whatever columns the gateway gives them, and the rest below.
fn render(fleet: &Value) -> String {
    let Some(whole) = fleet.as_object() else { return fleet.to_string() };
    let nodes: Vec<&Map<String, Value>> =
        whole.get("nodes").and_then(Value::as_array).into_iter().flatten().filter_map(Value::as_object).collect();
    let mut columns: Vec<&str> = COLUMNS.into_iter().filter(|c| nodes.iter().any(|n| n.contains_key(*c))).collect();
    for key in nodes.iter().flat_map(|node| node.keys()) {
        if !columns.contains(&key.as_str()) {
            columns.push(key);
        }
    }
    let head = columns.iter().map(|c| c.to_uppercase()).collect();
    let rows = nodes.iter().map(|node| columns.iter().map(|c| node.get(*c).map_or_else(String::new, plain)).collect());
    let table: Vec<Vec<String>> = std::iter::once(head).chain(rows).collect();
    let mut out = if nodes.is_empty() { String::new() } else { grid(&table) };
    for (key, value) in whole.iter().filter(|(key, _)| *key != "nodes") {
        out.push_str(&format!("{key}: {}\n", plain(value)));
    }
    out
}

fn grid(table: &[Vec<String>]) -> String {
    let n_columns = table.first().map_or(0, Vec::len);
    let width = |i: usize| table.iter().map(|row| row[i].chars().count()).max().unwrap_or(0);
    let widths: Vec<usize> = (0..n_columns).map(width).collect();
    let line = |row: &Vec<String>| {
        let cells: Vec<String> = row.iter().zip(&widths).map(|(cell, width)| format!("{cell:width$}")).collect();
        format!("{}\n", cells.join("  ").trim_end())
    };
    table.iter().map(line).collect()
}

fn plain(value: &Value) -> String {
    match value {
        Value::String(text) => text.clone(),
        Value::Null => "-".to_owned(),
        other => other.to_string(),
    }
}

#[cfg(test)]
mod tests {
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

    #[test]
    fn the_fleet_is_shown_with_whatever_columns_it_has() {
        let fleet = json!({"nodes": [{"node": "a", "sessions": 10}, {"extra": 1, "node": "bb", "sessions": 9, "phase": "serving"}], "cv": 0.05});
        let shown = "NODE  PHASE    SESSIONS  EXTRA\na              10\nbb    serving  9         1\ncv: 0.05\n";
        assert_eq!(render(&fleet), shown);
    }
}
