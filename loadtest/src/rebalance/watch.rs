//! Looks at the whole fleet once a second: how many sessions each node has, by its own word, and what
//! an old node says of the budget. Decides when it has seen enough.

use std::net::SocketAddr;
use std::time::Duration;

use serde_json::Value;
use tokio::time::{Instant, MissedTickBehavior, interval};

use super::course::{Row, reached};
use crate::probe;

/// Between two lines for whoever waits.
const SHOW_EVERY: Duration = Duration::from_secs(10);
/// Without the goal it is given up after so long.
const GIVE_UP: Duration = Duration::from_secs(600);

/// So many looks may fail.
const MAX_MISSED: u32 = 10;

/// Who is looked at.
pub struct Fleet {
    /// Of all nodes.
    pub probes: Vec<SocketAddr>,
    /// Of one that has been there from the start.
    pub admin: SocketAddr,
}

impl Fleet {
    /// One look.
    ///
    /// # Errors
    /// A node does not answer.
    pub async fn look(&self, began: Instant) -> Result<Row, String> {
        let mut sessions = Vec::new();
        for probes in &self.probes {
            let (_, body) = probe::get(*probes, "/readyz").await?;
            let said: Value = serde_json::from_str(&body).map_err(|_| format!("readyz: {body}"))?;
            let n = said["sessions"].as_u64().ok_or_else(|| format!("no sessions in {body}"))?;
            sessions.push(n as usize);
        }
        let (_, body) = probe::get(self.admin, "/v1/fleet").await?;
        let fleet: Value = serde_json::from_str(&body).map_err(|_| format!("/v1/fleet: {body}"))?;
        let shedding = &fleet["shedding"];
        let word = |key: &str| shedding[key].as_str().unwrap_or_default().to_owned();
        let reasons = shedding["suspended"].as_array().into_iter().flatten().filter_map(Value::as_str);
        Ok(Row {
            at: began.elapsed().as_secs_f64(),
            sessions,
            budget: fleet["budget"].as_f64().unwrap_or(0.0),
            bound: word("bound"),
            state: word("state"),
            suspended: reasons.collect::<Vec<_>>().join(", "),
        })
    }

    /// Looks until every node has had its share for `hold`, or that is given up.
    ///
    /// # Errors
    /// A node does not answer any more.
    pub async fn watch(&self, began: Instant, share: f64, hold: Duration) -> Result<Vec<Row>, String> {
        let mut rows: Vec<Row> = Vec::new();
        let mut pace = interval(Duration::from_secs(1));
        pace.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let (mut shown, mut n_missed): (Option<Instant>, u32) = (None, 0);
        loop {
            pace.tick().await;
            let row = match self.look(began).await {
                Ok(row) => row,
                // A busy machine; a node that is gone stays so.
                Err(why) if n_missed < MAX_MISSED => {
                    eprintln!("no look this second: {why}");
                    n_missed += 1;
                    continue;
                }
                Err(why) => return Err(why),
            };
            if shown.is_none_or(|at| at.elapsed() >= SHOW_EVERY) {
                shown = Some(Instant::now());
                eprintln!("{}", line(&row));
            }
            let at = row.at;
            rows.push(row);
            let enough = reached(&rows, share).map_or(GIVE_UP.as_secs_f64(), |at| at + hold.as_secs_f64());
            if at > enough {
                return Ok(rows);
            }
        }
    }

    /// Waits until the old nodes see an even fleet and nothing that would keep them from moving
    /// anybody.
    ///
    /// # Errors
    /// A node does not answer, or the fleet does not come to rest.
    pub async fn until_calm(&self) -> Result<(), String> {
        let until = Instant::now() + GIVE_UP;
        let mut pace = interval(Duration::from_secs(1));
        loop {
            pace.tick().await;
            let row = self.look(Instant::now()).await?;
            if row.state == "idle" {
                return Ok(());
            }
            if Instant::now() >= until {
                return Err(format!("the fleet does not come to rest: {} {}", row.state, row.suspended));
            }
        }
    }
}

/// `35 s: 905 902 … 120, cv 0.412, budget 29.6/s by donors, shedding`
pub fn line(row: &Row) -> String {
    let sessions: Vec<String> = row.sessions.iter().map(|n| format!("{n:>5}")).collect();
    let why = if row.suspended.is_empty() { String::new() } else { format!(" ({})", row.suspended) };
    let (sessions, cv) = (sessions.concat(), row.cv());
    format!("{:>5.0} s {sessions}  cv {cv:.3}  {:>5.1}/s by {}  {}{why}", row.at, row.budget, row.bound, row.state)
}
