//! A node's word about itself, as it stands in its report. Decides the form, and what of it the
//! balancing sees. Nodes of several versions read each other during every deploy: fields are only
//! ever added, what is missing has a harmless meaning, and what is unknown is passed over.

use std::sync::Arc;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::placement::Trials;
use super::recent::Counts;
use crate::balance::{Moved, Seen, is_sane};
use crate::handle::Phase;

/// Form of the reports. A higher number means that this version cannot read them.
pub(super) const FORM: u32 = 1;

/// What a node says of itself.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Said {
    /// `FORM`.
    pub v: u32,
    pub sessions: usize,
    pub capacity: usize,
    pub phase: String,
    pub version: String,
    /// Drawn at the start: a restarted node of the same name begins anew.
    pub boot: String,
    /// Unix seconds.
    pub started_at: u64,
    /// Sessions a second that it takes in.
    pub accept_rate: f64,
    /// For how long it has been ready without a break; absent: it is not, and is given nobody.
    #[serde(default)]
    pub ready_ms: Option<u64>,
    /// Its runtime is late.
    #[serde(default)]
    pub lagging: bool,
    /// What it did in the 5 s before the report.
    #[serde(default)]
    pub lately: Counts,
    /// What became of sessions that it moved while another node was emptier.
    #[serde(default)]
    pub trials: Trials,
}

impl Said {
    /// Reads a report; `None`: this version cannot, or no node can have written it. Whatever is
    /// reckoned from reports (shares, shedding, the window of a drain) is spared such numbers here.
    pub fn read(body: &str) -> Option<Self> {
        let said = serde_json::from_str::<Self>(body).ok().filter(|said| said.v == FORM)?;
        is_sane(&said.seen("".into(), Duration::ZERO)).then_some(said)
    }

    pub fn phase(&self) -> Option<Phase> {
        Phase::ALL.into_iter().find(|phase| phase.word() == self.phase)
    }

    /// As the balancing sees it when it is so old. Who was ready then is thought to be so still:
    /// a report that is too old is not believed anyway.
    pub fn seen(&self, node: Arc<str>, age: Duration) -> Seen {
        let n = |count: u64| usize::try_from(count).unwrap_or(usize::MAX);
        Seen {
            node,
            boot: self.boot.as_str().into(),
            version: self.version.as_str().into(),
            phase: self.phase(),
            age,
            n_sessions: self.sessions,
            capacity: self.capacity,
            accept_rate: self.accept_rate,
            ready_for: self.ready_ms.map(|ms| Duration::from_millis(ms).saturating_add(age)),
            is_lagging: self.lagging,
            moved: Moved {
                shed: n(self.lately.shed),
                recycled: n(self.lately.recycled),
                drained: n(self.lately.drained),
            },
            n_opened: n(self.lately.opened),
            n_refused: n(self.lately.refused),
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    /// A report with these numbers.
    fn report(sessions: Value, capacity: Value, accept_rate: Value) -> String {
        json!({
            "v": FORM, "sessions": sessions, "capacity": capacity, "phase": "serving", "version": "1", "boot": "b",
            "started_at": 1, "accept_rate": accept_rate
        })
        .to_string()
    }

    #[test]
    fn numbers_that_no_node_can_have_are_no_report() {
        let read = |sessions: u64, capacity: u64, rate: f64| {
            Said::read(&report(json!(sessions), json!(capacity), json!(rate))).is_some()
        };
        for (sessions, capacity, rate) in [(0, 0, 0.0), (1_000, 0, 1.0), (5_000, 500, 1e6), (0, 100_000_000, 1e6)] {
            assert!(read(sessions, capacity, rate), "{sessions} of {capacity} at {rate}");
        }
        for (sessions, capacity, rate) in
            [(1_001, 0, 1.0), (5_001, 500, 1.0), (0, 100_000_001, 1.0), (0, 1, -0.1), (0, 1, 1.1e6), (0, 1, 1e300)]
        {
            assert!(!read(sessions, capacity, rate), "{sessions} of {capacity} at {rate}");
        }
        for odd in [json!(-5), json!("60"), json!(1.5), Value::Null] {
            assert!(Said::read(&report(odd.clone(), json!(1), json!(1))).is_none(), "{odd}");
        }
        for odd in ["", "abc", "null", "[]", "{}", "-5"] {
            assert!(Said::read(odd).is_none(), "{odd}");
        }
    }
}
