//! Another process under this node's name. Decides what shows it, and how often that is said. Whoever shares
//! a name shares the report under it: each writes over the other's, and the rest of the fleet sees them by turns.
//!
//! A report found under the own name and not written by this process is its predecessor's, or a
//! namesake's. Which of them shows at the next: a predecessor does not write again.

use std::time::Duration;

use tokio::time::Instant;

use super::Snapshot;
use super::said::Said;
use crate::backplane::Report;

/// A name that was given twice is said so often: until somebody changes it.
const SAY_EVERY: Duration = Duration::from_secs(60);

/// What the other one said last.
#[derive(Clone)]
pub(super) struct Namesake {
    pub report: Report,
    pub said: Said,
}

impl Namesake {
    /// `before` is what stood under the name of `own` until now, `earlier` what was known when this process
    /// reported the last time, if it did: what was written over that report was written by somebody who is
    /// there. As the others, a namesake is forgotten when it has been silent for `ttl`.
    pub fn find(before: Option<Report>, earlier: Option<&Snapshot>, own: &Said, ttl: Duration) -> Option<Self> {
        let earlier = earlier?;
        let wrote_over = before.and_then(|report| {
            let said = Said::read(&report.body)?;
            (said.boot != own.boot).then_some(Self { report, said })
        });
        wrote_over.or_else(|| {
            let mut known = earlier.namesake.clone()?;
            known.report.age += earlier.read_at.elapsed();
            (known.report.age < ttl).then_some(known)
        })
    }
}

/// When it was last said.
#[derive(Default)]
pub(super) struct Complaint(Option<Instant>);

impl Complaint {
    /// Is it time to say it, again?
    pub fn is_due(&mut self, now: Instant) -> bool {
        let is_due = self.0.is_none_or(|at| now >= at + SAY_EVERY);
        if is_due {
            self.0 = Some(now);
        }
        is_due
    }
}
