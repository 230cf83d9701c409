//! `tidegate fleet`: the fleet in the terminal. Decides how the answer of `/v1/fleet` looks to
//! people; what it says, an older or a newer gateway's answer too, is the gateway's.

use std::io::IsTerminal as _;
use std::time::Duration;

use hub::clock::Clock;
use hyper::Method;
use serde_json::{Map, Value};

use super::admin_client::AdminClient;
use super::output::say;
use super::{CliError, FleetArgs};

/// Between two pictures of `fleet --watch`: below the nodes' own report interval.
const WATCH: Duration = Duration::from_secs(2);

/// Puts the next picture in the last one's place.
const CLEAR: &str = "\x1b[2J\x1b[H";

/// Shows the fleet, once or until Ctrl-C.
///
/// # Errors
/// As `AdminClient::call`; while watching, the first failure ends it.
pub async fn run(args: FleetArgs) -> Result<(), CliError> {
    let client = AdminClient::new(&args.admin)?;
    let between = match (args.watch, args.json, std::io::stdout().is_terminal()) {
        (true, false, true) => CLEAR,
        (true, false, false) => "\n",
        _ => "",
    };
    loop {
        let fleet = client.call(Method::GET, "/v1/fleet", None).await?;
        let picture = if args.json { fleet.to_string() } else { render(&fleet, Clock::system().unix()) };
        say(&format!("{between}{}", picture.trim_end()));
        if !args.watch {
            return Ok(());
        }
        tokio::select! {
            _ = tokio::time::sleep(WATCH) => {}
            _ = tokio::signal::ctrl_c() => return Ok(()),
        }
    }
}

/// The columns of nodes that come first, in this order. JSON keeps none.
const COLUMNS: [&str; 9] = ["node", "phase", "ready", "sessions", "target", "capacity", "share", "version", "age_ms"];

/// What stands in the lines below the nodes.
const IN_LINES: [&str; 9] =
    ["nodes", "total", "cv", "busiest_ratio", "budget", "shedding", "lb_policy_observed", "moved_lately", "hold"];

/// The nodes as a table, whatever columns the gateway gives them; what holds over all of them in a
/// few lines; the rest, of which this version knows nothing, as it came. `now`: since 1970.
fn render(fleet: &Value, now: Duration) -> String {
    let Some(whole) = fleet.as_object() else { return fleet.to_string() };
    let nodes: Vec<&Map<String, Value>> =
        whole.get("nodes").and_then(Value::as_array).into_iter().flatten().filter_map(Value::as_object).collect();
    let mut out = if nodes.is_empty() { String::new() } else { table(&nodes) };
    let lines = [totals(whole), shedding(whole), balancer(whole), hold(whole, now)];
    for line in lines.into_iter().flatten() {
        out.push_str(&format!("{line}\n"));
    }
    for (key, value) in whole.iter().filter(|(key, _)| !IN_LINES.contains(&key.as_str())) {
        out.push_str(&format!("{key}: {}\n", plain(value)));
    }
    out
}

/// `total 30000, cv 0.02, busiest 1.04 × mean`
fn totals(fleet: &Map<String, Value>) -> Option<String> {
    let of = |key: &str, name: &str, unit: &str| Some(format!("{name} {}{unit}", plain(fleet.get(key)?)));
    let all = [of("total", "total", ""), of("cv", "cv", ""), of("busiest_ratio", "busiest", " × mean")];
    let all: Vec<String> = all.into_iter().flatten().collect();
    (!all.is_empty()).then(|| all.join(", "))
}

/// `budget 50/s by fleet, shedding on: suspended (hold, deploy), 1200 shed`
fn shedding(fleet: &Map<String, Value>) -> Option<String> {
    let shed = fleet.get("shedding").and_then(Value::as_object);
    let of = |key: &str| shed?.get(key);
    let mut line = String::new();
    if let Some(budget) = fleet.get("budget") {
        line = format!("budget {}/s", plain(budget));
        if let Some(bound) = of("bound").and_then(Value::as_str).filter(|bound| *bound != "none") {
            line.push_str(&format!(" by {bound}"));
        }
    }
    if let Some(mode) = of("mode") {
        let between = if line.is_empty() { "" } else { ", " };
        line.push_str(&format!("{between}shedding {}", plain(mode)));
    }
    // Switched off, it is in no other state.
    if let Some(state) = of("state").filter(|state| Some(*state) != of("mode")) {
        line.push_str(&format!(": {}", plain(state)));
    }
    let suspended = of("suspended").and_then(Value::as_array).into_iter().flatten();
    let why: Vec<String> = suspended.chain(of("why").filter(|why| !why.is_null())).map(plain).collect();
    if !why.is_empty() {
        line.push_str(&format!(" ({})", why.join(", ").replace('_', " ")));
    }
    if let Some(n_shed) = of("shed_total") {
        line.push_str(&format!(", {} shed", plain(n_shed)));
    }
    (!line.is_empty()).then_some(line)
}

/// `the balancer in front puts clients back where they were (19 of 20 watched came back …)`
fn balancer(fleet: &Map<String, Value>) -> Option<String> {
    let words = match fleet.get("lb_policy_observed")?.as_str()? {
        "unknown" => "has not shown yet where it puts clients",
        "emptiest" => "puts clients on the emptiest node",
        "emptier" => "puts clients rather on emptier nodes",
        "spread" => "puts clients on all nodes alike",
        "sticky" => "puts clients back where they were",
        other => other,
    };
    let moved = |key: &str| fleet.get("moved_lately")?.get(key)?.as_u64();
    let figures = match (moved("watched"), moved("back")) {
        (Some(watched), Some(back)) if watched > 0 => {
            format!(" ({back} of {watched} watched came back to the node that had moved them)")
        }
        _ => String::new(),
    };
    Some(format!("the balancer in front {words}{figures}"))
}

/// `held for 14m32s more by a: "deploy"`; nothing where nobody holds it.
fn hold(fleet: &Map<String, Value>, now: Duration) -> Option<String> {
    let hold = fleet.get("hold")?.as_object()?;
    let left = hold.get("until")?.as_u64()?.saturating_sub(now.as_secs());
    let mut line = format!("held for {} more", seconds(left));
    if let Some(by) = hold.get("by").and_then(Value::as_str) {
        line.push_str(&format!(" by {by}"));
    }
    if let Some(reason) = hold.get("reason").and_then(Value::as_str).filter(|reason| !reason.is_empty()) {
        // Quoted and escaped: somebody else's text on a terminal.
        line.push_str(&format!(": {reason:?}"));
    }
    Some(line)
}

/// `2h05m`, `14m32s`, `9s`.
fn seconds(n: u64) -> String {
    let (hours, minutes, seconds) = (n / 3_600, n / 60 % 60, n % 60);
    match (hours, minutes) {
        (0, 0) => format!("{seconds}s"),
        (0, _) => format!("{minutes}m{seconds:02}s"),
        _ => format!("{hours}h{minutes:02}m"),
    }
}

fn table(nodes: &[&Map<String, Value>]) -> String {
    let mut columns: Vec<&str> = COLUMNS.into_iter().filter(|c| nodes.iter().any(|n| n.contains_key(*c))).collect();
    for key in nodes.iter().flat_map(|node| node.keys()) {
        if !columns.contains(&key.as_str()) {
            columns.push(key);
        }
    }
    let head = columns.iter().map(|column| column.strip_suffix("_ms").unwrap_or(column).to_uppercase()).collect();
    let rows = nodes.iter().map(|node| columns.iter().map(|column| cell(column, node.get(*column))).collect());
    grid(&std::iter::once(head).chain(rows).collect::<Vec<_>>())
}

fn cell(column: &str, value: Option<&Value>) -> String {
    match (value, column.ends_with("_ms")) {
        (None, _) => String::new(),
        (Some(value), true) => match value.as_f64() {
            Some(ms) => format!("{:.1}s", ms / 1_000.0),
            None => plain(value),
        },
        (Some(Value::Bool(is_so)), _) => if *is_so { "yes" } else { "no" }.to_owned(),
        (Some(value), false) => plain(value),
    }
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
        // 4.0 is 4 to people.
        Value::Number(number) if number.as_f64().is_some_and(|n| n.fract() == 0.0) => {
            number.as_f64().map_or_else(String::new, |n| format!("{n:.0}"))
        }
        other => other.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    const NOW: Duration = Duration::from_secs(1_700_000_000);

    #[test]
    fn the_fleet_is_shown_with_whatever_columns_it_has() {
        let fleet = json!({
            "nodes": [
                {"node": "a", "sessions": 10, "target": 9.5, "ready": true},
                {"extra": 1, "node": "bb", "sessions": 9, "phase": "serving", "age_ms": 1234, "ready": false},
            ],
            "cv": 0.05, "later": {"x": 1},
        });
        let shown = "NODE  PHASE    READY  SESSIONS  TARGET  AGE   EXTRA\n\
                     a              yes    10        9.5\n\
                     bb    serving  no     9                 1.2s  1\n\
                     cv 0.05\n\
                     later: {\"x\":1}\n";
        assert_eq!(render(&fleet, NOW), shown);
        assert_eq!(render(&json!({}), NOW), "");
        assert_eq!(render(&json!("odd"), NOW), "\"odd\"");
    }

    #[test]
    fn below_stand_the_totals_the_budget_what_suspends_shedding_and_the_hold() {
        let mut fleet = json!({
            "nodes": [], "total": 30_000, "cv": 0.0214, "busiest_ratio": 1.04, "budget": 50.0, "hold": null,
            "shedding": {"mode": "on", "state": "shedding", "suspended": [], "bound": "fleet", "shed_total": 12},
        });
        let totals = "total 30000, cv 0.0214, busiest 1.04 × mean\n";
        let shown = format!("{totals}budget 50/s by fleet, shedding on: shedding, 12 shed\n");
        assert_eq!(render(&fleet, NOW), shown);
        fleet["shedding"]["state"] = json!("suspended");
        fleet["shedding"]["suspended"] = json!(["hold", "peer_draining"]);
        fleet["hold"] = json!({"until": NOW.as_secs() + 872, "reason": "a \u{1b}[2J\nb", "by": "n1"});
        let shown = format!(
            "{totals}budget 50/s by fleet, shedding on: suspended (hold, peer draining), 12 shed\n\
             held for 14m32s more by n1: \"a \\u{{1b}}[2J\\nb\"\n"
        );
        assert_eq!(render(&fleet, NOW), shown);
        fleet["shedding"] = json!({"mode": "off", "state": "off", "suspended": [], "bound": "none", "shed_total": 0});
        fleet["budget"] = json!(0.0);
        fleet["hold"]["reason"] = json!("");
        assert!(render(&fleet, NOW).contains("\nbudget 0/s, shedding off, 0 shed\n"));
        assert!(render(&fleet, NOW).ends_with("\nheld for 14m32s more by n1\n"));
    }

    #[test]
    fn why_nobody_is_moved_and_what_the_balancer_goes_by_stand_there_in_words() {
        let mut fleet = json!({
            "budget": 3.5, "lb_policy_observed": "sticky", "moved_lately": {"watched": 20, "back": 19},
            "shedding": {"mode": "on", "state": "idle", "suspended": [], "why": "below_minimum", "bound": "room"},
        });
        let first = "budget 3.5/s by room, shedding on: idle (below minimum)\n";
        let back = "(19 of 20 watched came back to the node that had moved them)";
        let shown = format!("{first}the balancer in front puts clients back where they were {back}\n");
        assert_eq!(render(&fleet, NOW), shown);
        fleet["moved_lately"]["watched"] = json!(0);
        fleet["shedding"]["suspended"] = json!(["ineffective"]);
        fleet["shedding"]["why"] = json!("come_back");
        for (word, words) in [
            ("unknown", "has not shown yet where it puts clients"),
            ("emptiest", "puts clients on the emptiest node"),
            ("emptier", "puts clients rather on emptier nodes"),
            ("spread", "puts clients on all nodes alike"),
            ("later", "later"),
        ] {
            fleet["lb_policy_observed"] = json!(word);
            let shown = render(&fleet, NOW);
            assert!(shown.ends_with(&format!("\nthe balancer in front {words}\n")), "{shown}");
            assert!(shown.contains(": idle (ineffective, come back)\n"), "{shown}");
        }
    }

    #[test]
    fn what_is_left_is_told_in_two_units() {
        for (n, text) in
            [(0, "0s"), (59, "59s"), (60, "1m00s"), (3_599, "59m59s"), (3_600, "1h00m"), (86_400, "24h00m")]
        {
            assert_eq!(seconds(n), text);
        }
    }
}
