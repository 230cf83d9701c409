//! What a node did lately, from counters that only ever grow. Nothing is added to the path of a
//! session: the counters are looked at once a second.

use std::collections::VecDeque;
use std::sync::Mutex;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use tokio::time::Instant;

/// What reports count over.
const SPAN: Duration = Duration::from_secs(5);

/// Since the node's start, or over a span.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub(crate) struct Counts {
    /// Sessions opened.
    pub opened: u64,
    /// Attempts refused for want of room or of rate.
    pub refused: u64,
    /// Sessions closed to even out the fleet,
    pub shed: u64,
    /// at the end of their age,
    pub recycled: u64,
    /// because the node leaves.
    pub drained: u64,
}

impl Counts {
    fn since(self, earlier: Self) -> Self {
        Self {
            opened: self.opened.saturating_sub(earlier.opened),
            refused: self.refused.saturating_sub(earlier.refused),
            shed: self.shed.saturating_sub(earlier.shed),
            recycled: self.recycled.saturating_sub(earlier.recycled),
            drained: self.drained.saturating_sub(earlier.drained),
        }
    }
}

/// The counters as they were, a look a second.
#[derive(Debug, Default)]
pub(super) struct Recent {
    looks: Mutex<VecDeque<(Instant, Counts)>>,
}

impl Recent {
    /// Takes them down; once a second or so.
    pub fn look(&self, now: Instant, counts: Counts) {
        let mut looks = self.looks.lock().expect("no panic while the looks are held");
        looks.push_back((now, counts));
        // The first of them is the one that `lately` counts from.
        while looks.get(1).is_some_and(|(at, _)| now.saturating_duration_since(*at) >= SPAN) {
            looks.pop_front();
        }
    }

    /// What was added in the last 5 s, or a look more; in a node's first seconds, ever.
    pub fn lately(&self, now: Instant, counts: Counts) -> Counts {
        let looks = self.looks.lock().expect("no panic while the looks are held");
        let before = looks.iter().rev().find(|(at, _)| now.saturating_duration_since(*at) >= SPAN);
        counts.since(before.map_or(Counts::default(), |(_, counts)| *counts))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_older_than_five_seconds_is_not_lately() {
        let (recent, began) = (Recent::default(), Instant::now());
        let at = |s| began + Duration::from_secs(s);
        let opened = |opened| Counts { opened, ..Counts::default() };
        assert_eq!(recent.lately(began, opened(3)), opened(3));
        for s in 0..20 {
            // Ten a second up to the tenth, then none.
            recent.look(at(s), opened(10 * s.min(10)));
        }
        assert_eq!(recent.lately(at(19), opened(100)), opened(0));
        assert_eq!(recent.lately(at(19), opened(107)), opened(7));
        assert!(recent.looks.lock().unwrap().len() <= 6);
        let recent = Recent::default();
        for s in 0..8 {
            recent.look(at(s), opened(10 * s));
        }
        assert_eq!(recent.lately(at(7), opened(70)), opened(50));
        assert_eq!(recent.lately(at(7), opened(0)), opened(0), "never below nothing");
    }
}
