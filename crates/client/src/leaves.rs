//! Which leaves the server has still to be told of, or has not answered. Decides how many are under
//! way at once; what leaving means for the wishes is `wanted`'s.

use std::collections::VecDeque;

/// Leaves under way at once: each costs one message of a burst that is 50 by default, and the
/// program's own messages must find room beside them.
const MAX_AT_ONCE: usize = 20;

/// A channel to leave.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Leave {
    pub(crate) reference: String,
    pub(crate) channel: String,
}

#[derive(Debug)]
struct Errand {
    leave: Leave,
    is_told: bool,
}

/// Leaves without an answer, in the order in which they were made. Of one channel there are at most
/// two: one under way and one that waits.
#[derive(Debug)]
pub(crate) struct Leaves {
    errands: VecDeque<Errand>,
    /// One, once this connection's bucket was found empty: more would only be refused.
    max_at_once: usize,
    n_own: u64,
}

impl Default for Leaves {
    fn default() -> Leaves {
        Leaves { errands: VecDeque::new(), max_at_once: MAX_AT_ONCE, n_own: 0 }
    }
}

impl Leaves {
    /// The program leaves a channel. Where an earlier leave of it still waits, this one takes its place.
    pub(crate) fn add(&mut self, leave: Leave) {
        match self.errands.iter_mut().find(|known| !known.is_told && known.leave.channel == leave.channel) {
            Some(waiting) => waiting.leave = leave,
            None => self.errands.push_back(Errand { leave, is_told: false }),
        }
    }

    /// A connection joined a channel that the program had left. Nobody waits for this answer.
    pub(crate) fn add_own(&mut self, channel: &str) {
        if !self.is_pending(channel) {
            self.n_own += 1;
            self.add(Leave { reference: format!("left-{}", self.n_own), channel: channel.to_owned() });
        }
    }

    /// The next one to tell the server, unless enough are under way.
    pub(crate) fn next(&mut self) -> Option<Leave> {
        let n_told = self.errands.iter().filter(|errand| errand.is_told).count();
        let errand = self.errands.iter_mut().find(|errand| !errand.is_told).filter(|_| n_told < self.max_at_once)?;
        errand.is_told = true;
        Some(errand.leave.clone())
    }

    /// Is there a leave of `channel` without an answer?
    pub(crate) fn is_pending(&self, channel: &str) -> bool {
        self.errands.iter().any(|errand| errand.leave.channel == channel)
    }

    /// Is the leave with this reference under way?
    pub(crate) fn is_told(&self, reference: &str) -> bool {
        self.errands.iter().any(|errand| errand.is_told && errand.leave.reference == reference)
    }

    /// The server answered for good.
    pub(crate) fn answered(&mut self, reference: &str) {
        self.errands.retain(|errand| errand.leave.reference != reference);
    }

    /// The server cannot do it now: it is told again. `false` where it was no leave of ours.
    pub(crate) fn postponed(&mut self, reference: &str) -> bool {
        let errand = self.errands.iter_mut().find(|errand| errand.is_told && errand.leave.reference == reference);
        errand.map(|errand| errand.is_told = false).is_some()
    }

    /// This connection's bucket is empty.
    pub(crate) fn slow_down(&mut self) {
        self.max_at_once = 1;
    }

    /// The connection is gone. Whoever waits for an answer still gets one: not to hold a channel is
    /// no reason for the server not to give it.
    pub(crate) fn lost(&mut self) {
        self.max_at_once = MAX_AT_ONCE;
        for errand in &mut self.errands {
            errand.is_told = false;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn leave(n: usize) -> Leave {
        Leave { reference: n.to_string(), channel: format!("c{n}") }
    }

    fn told(leaves: &mut Leaves) -> Vec<String> {
        std::iter::from_fn(|| leaves.next()).map(|leave| leave.reference).collect()
    }

    #[test]
    fn a_crowd_of_leaves_goes_out_in_order_and_only_so_many_at_once() {
        let mut leaves = Leaves::default();
        (0..MAX_AT_ONCE + 2).for_each(|n| leaves.add(leave(n)));
        let first: Vec<String> = (0..MAX_AT_ONCE).map(|n| n.to_string()).collect();
        assert_eq!(told(&mut leaves), first);
        leaves.answered("3");
        assert_eq!(told(&mut leaves), [MAX_AT_ONCE.to_string()]);
        leaves.answered("0");
        leaves.answered("1");
        assert_eq!(told(&mut leaves), [(MAX_AT_ONCE + 1).to_string()]);
    }

    #[test]
    fn a_refused_leave_is_told_again_and_from_then_on_one_goes_at_a_time() {
        let mut leaves = Leaves::default();
        (0..3).for_each(|n| leaves.add(leave(n)));
        assert_eq!(told(&mut leaves), ["0", "1", "2"]);
        assert!(leaves.postponed("1") && leaves.postponed("2"));
        assert!(!leaves.postponed("2") && !leaves.postponed("9"), "no leave that is under way");
        leaves.slow_down();
        assert_eq!(told(&mut leaves), [""; 0]);
        leaves.answered("0");
        assert_eq!(told(&mut leaves), ["1"]);
        leaves.answered("1");
        assert_eq!(told(&mut leaves), ["2"]);
    }

    #[test]
    fn what_had_no_answer_is_told_again_on_the_next_connection() {
        let mut leaves = Leaves::default();
        (0..3).for_each(|n| leaves.add(leave(n)));
        leaves.slow_down();
        assert_eq!(told(&mut leaves), ["0"]);
        leaves.answered("0");
        leaves.lost();
        assert_eq!(told(&mut leaves), ["1", "2"]);
    }

    #[test]
    fn leaves_of_one_channel_never_pile_up() {
        let mut leaves = Leaves::default();
        let same = |reference: &str| Leave { reference: reference.into(), channel: "c".into() };
        leaves.add(same("1"));
        leaves.add(same("2"));
        assert_eq!(told(&mut leaves), ["2"]);
        leaves.add(same("3"));
        leaves.add(same("4"));
        leaves.add_own("c");
        assert_eq!(told(&mut leaves), ["4"], "and the one under way is not touched");
        leaves.answered("2");
        leaves.answered("4");
        assert!(!leaves.is_pending("c"));
        leaves.add_own("c");
        leaves.add_own("d");
        assert_eq!(told(&mut leaves), ["left-1", "left-2"]);
    }
}
