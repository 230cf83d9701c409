//! What happened in a simulated fleet, by the instant, and the figures that are asked of it.

use std::time::Duration;

use hub::close::CloseReason;
use tokio::time::Instant;

/// The end of a session, as its client saw it.
#[derive(Clone, Copy, Debug)]
pub struct Close {
    /// When.
    pub at: Instant,
    /// Of which node.
    pub node: usize,
    /// Whose.
    pub client: usize,
    /// Why.
    pub reason: CloseReason,
}

/// A client that was let in again.
#[derive(Clone, Copy, Debug)]
pub struct Return {
    /// When.
    pub at: Instant,
    /// For how long it had been away, refusals included.
    pub away: Duration,
}

/// The fleet in one second, of the nodes that serve.
#[derive(Clone, Copy, Debug)]
pub struct Look {
    /// When.
    pub at: Instant,
    /// The furthest that a node is from its share, as a part of it.
    pub worst: f64,
    /// Coefficient of variation of how full they are.
    pub cv: f64,
    /// Sessions on them.
    pub n_sessions: usize,
    /// Sessions a second that may be moved, by the word of the first of them.
    pub budget: f64,
}

/// Everything that is remembered.
#[derive(Debug, Default)]
pub struct Record {
    /// Sessions that ended.
    pub closes: Vec<Close>,
    /// Clients that were let in again.
    pub returns: Vec<Return>,
    /// Attempts that were refused, and by which node.
    pub refusals: Vec<(Instant, usize)>,
    /// A look a second.
    pub looks: Vec<Look>,
    /// Sessions shed by a node that was short of sessions itself in the two minutes before.
    pub n_ping_pong: usize,
    /// Sheds of clients that had been shed in the ten minutes before.
    pub n_moved_again: usize,
}

impl Record {
    /// When sessions ended for this reason, after this instant.
    pub fn closed(&self, reason: CloseReason, after: Instant) -> Vec<Instant> {
        let is_meant = |close: &&Close| close.reason == reason && close.at > after;
        self.closes.iter().filter(is_meant).map(|close| close.at).collect()
    }

    /// Sessions shed after this instant, up to that one.
    pub fn n_shed(&self, after: Instant, up_to: Instant) -> usize {
        self.closed(CloseReason::Shed, after).iter().filter(|at| **at <= up_to).count()
    }

    /// Clients let in again after this instant.
    pub fn returns_after(&self, after: Instant) -> Vec<Instant> {
        self.returns.iter().map(|back| back.at).filter(|at| *at > after).collect()
    }

    /// The longest that a client was away of those that came back after this instant.
    pub fn longest_away(&self, after: Instant) -> Duration {
        self.returns.iter().filter(|back| back.at > after).map(|back| back.away).max().unwrap_or_default()
    }

    /// How long after `from` it was well for good; `None`: it is not.
    pub fn settled(&self, from: Instant, is_well: impl Fn(&Look) -> bool) -> Option<Duration> {
        let looks = &self.looks[self.looks.partition_point(|look| look.at <= from)..];
        let n_until = looks.iter().rposition(|look| !is_well(look)).map_or(0, |last| last + 1);
        looks.get(n_until).map(|look| look.at - from)
    }

    /// The fleet in the last second.
    ///
    /// # Panics
    /// In the first one.
    pub fn now(&self) -> &Look {
        self.looks.last().expect("a second has passed")
    }
}

/// The most of these (in their order) in any such span, a second.
pub fn peak(times: &[Instant], width: Duration) -> f64 {
    let (mut first, mut most) = (0, 0);
    for (last, at) in times.iter().enumerate() {
        while *at - times[first] >= width {
            first += 1;
        }
        most = most.max(last + 1 - first);
    }
    most as f64 / width.as_secs_f64()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_peak_is_the_most_in_any_span_wherever_it_begins() {
        let began = Instant::now();
        let at = |ms| began + Duration::from_millis(ms);
        let times = [at(0), at(900), at(1_000), at(1_500), at(1_899), at(1_900), at(9_000)];
        assert_eq!(peak(&times, Duration::from_secs(1)), 4.0);
        assert_eq!(peak(&times, Duration::from_secs(2)), 3.0);
        assert_eq!(peak(&[], Duration::from_secs(1)), 0.0);
    }

    #[test]
    fn it_is_settled_once_it_is_well_for_good() {
        let began = Instant::now();
        let look = |(s, worst)| {
            let at = began + Duration::from_secs(s);
            Look { at, worst, cv: 0.0, n_sessions: 0, budget: 0.0 }
        };
        let record = Record { looks: [(1, 0.3), (2, 0.0), (3, 0.3), (4, 0.1)].map(look).to_vec(), ..Record::default() };
        let settled = |after: u64, limit| record.settled(began + Duration::from_secs(after), |look| look.worst < limit);
        assert_eq!(settled(0, 0.2), Some(Duration::from_secs(4)));
        assert_eq!(settled(1, 0.5), Some(Duration::from_secs(1)));
        assert_eq!(settled(0, 0.1), None);
    }
}
