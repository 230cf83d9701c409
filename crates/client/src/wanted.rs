//! Which channels the program wants beyond those of its token, and from where each is asked for
//! again after a loss. Decides what the next connection names in its query, and what to ask next;
//! the driver sends it.
//!
//! The session's cursor stands for all channels of a session, so those that were held when it was
//! lost travel in the next connection's query and resume with it, in one replay. That holds only as
//! long as no session without them moved the cursor: then, as for whatever has no answer yet, each
//! is asked for alone, from a place of its own.
//!
//! One ask is under way at a time: the server replays one channel at a time, and a crowd of asks
//! would only meet its rate limit.

use std::collections::BTreeSet;

use crate::cursor::is_later;
use crate::dial::listed_bytes;
use crate::leaves::{Leave, Leaves};

/// Longest channel list of a connection's query, in bytes as they are sent: common proxies refuse a
/// head over 8 KiB, and the token stands in it as well.
const MAX_LIST_BYTES: usize = 4 << 10;

/// A channel to ask for, and from where.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Ask {
    pub(crate) reference: String,
    pub(crate) channel: String,
    pub(crate) since: Option<String>,
}

#[derive(Debug)]
struct Wish {
    ask: Ask,
    state: State,
    /// The program asked once more meanwhile: the reference that has no answer yet.
    owed: Option<String>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    /// Not asked on this connection yet.
    Waiting,
    /// Asked, no answer yet.
    Asked,
    /// Confirmed on this connection.
    Held,
    /// Confirmed on this connection, and asked once more because the program did.
    Echoed,
    /// Was confirmed when its connection was lost; `since` is where that session stood.
    Parted,
    /// In this connection's query: what it said last of its place counts for this channel too, and
    /// `ready` confirms it.
    Carried,
}

/// The program's wishes, in the order in which they were made.
#[derive(Debug, Default)]
pub(crate) struct Wanted {
    /// Asked for in every connection's own query; they resume with the session's cursor.
    at_connect: Vec<String>,
    later: Vec<Wish>,
    /// Channels that the program does not want, whatever its token joins.
    left: BTreeSet<String>,
    leaves: Leaves,
}

impl Wanted {
    pub(crate) fn new(at_connect: Vec<String>) -> Wanted {
        Wanted { at_connect, ..Wanted::default() }
    }

    /// The program wants a channel. One that it wants already keeps its place, and the new reference
    /// gets an answer of its own.
    pub(crate) fn want(&mut self, ask: Ask) {
        self.left.remove(&ask.channel);
        match self.later.iter_mut().find(|wish| wish.ask.channel == ask.channel) {
            Some(wish) => wish.owed = Some(ask.reference),
            None => self.later.push(Wish { ask, state: State::Waiting, owed: None }),
        }
    }

    /// The program does not want a channel, whoever asked for it before.
    pub(crate) fn leave(&mut self, leave: Leave) {
        self.at_connect.retain(|known| *known != leave.channel);
        self.later.retain(|wish| wish.ask.channel != leave.channel);
        self.left.insert(leave.channel.clone());
        self.leaves.add(leave);
    }

    /// The server took `channel` away: it is not asked for again, unless the program waits for an
    /// answer about it.
    pub(crate) fn taken(&mut self, channel: &str) {
        self.at_connect.retain(|known| known != channel);
        self.later.retain_mut(|wish| wish.ask.channel != channel || wish.survives_its_end());
    }

    /// The channels of the next connection's query, which resumes from `cursor`.
    pub(crate) fn dialled(&mut self, cursor: Option<&str>) -> Vec<String> {
        let mut channels = self.at_connect.clone();
        let mut n_bytes: usize = channels.iter().map(|channel| listed_bytes(channel)).sum();
        for wish in self.later.iter_mut().filter(|wish| wish.state == State::Parted) {
            if !self.at_connect.contains(&wish.ask.channel) {
                let with_it = n_bytes + listed_bytes(&wish.ask.channel);
                if wish.ask.since.as_deref() != cursor || with_it > MAX_LIST_BYTES {
                    continue;
                }
                n_bytes = with_it;
                channels.push(wish.ask.channel.clone());
            }
            wish.state = State::Carried;
        }
        channels
    }

    /// The attempt was refused, perhaps for a channel that it carried beyond the program's own list:
    /// each of those is asked for alone from now on. `false` where it carried none.
    pub(crate) fn carry_none(&mut self) -> bool {
        let mut carried_any = false;
        for wish in self.later.iter_mut().filter(|wish| wish.state == State::Carried) {
            wish.state = State::Waiting;
            carried_any |= !self.at_connect.contains(&wish.ask.channel);
        }
        carried_any
    }

    /// The connection is live; it came with the channels `joined`.
    pub(crate) fn ready(&mut self, joined: &[String]) {
        for wish in self.later.iter_mut().filter(|wish| wish.state == State::Carried) {
            wish.state = State::Held;
        }
        for channel in joined.iter().filter(|channel| self.left.contains(*channel)) {
            self.leaves.add_own(channel);
        }
    }

    /// The next leave, unless enough are under way.
    pub(crate) fn next_leave(&mut self) -> Option<Leave> {
        self.leaves.next()
    }

    /// The next ask, unless one is under way. A channel whose leave has no answer is not asked for:
    /// a leave that must be repeated would undo it.
    pub(crate) fn next_ask(&mut self) -> Option<Ask> {
        if self.later.iter().any(|wish| matches!(wish.state, State::Asked | State::Echoed)) {
            return None;
        }
        let leaves = &self.leaves;
        let may_be_asked = |wish: &&mut Wish| wish.has_a_question() && !leaves.is_pending(&wish.ask.channel);
        self.later.iter_mut().find(may_be_asked).map(Wish::asked)
    }

    /// An event with an id came. While its channel is not confirmed, it is where a repeated ask
    /// would have to go on.
    pub(crate) fn heard(&mut self, channel: &str, id: &str) {
        let pending = self.later.iter_mut().find(|wish| wish.ask.channel == channel && wish.state == State::Asked);
        if let Some(wish) = pending
            && wish.ask.since.as_deref().is_none_or(|since| is_later(id, since))
        {
            wish.ask.since = Some(id.to_owned());
        }
    }

    /// The server did what it was told under `reference`.
    pub(crate) fn confirmed(&mut self, reference: &str) {
        self.leaves.answered(reference);
        if let Some(wish) = self.under_way(reference) {
            wish.state = State::Held;
        }
    }

    /// The server cannot do it now: it is asked again later. `false` where it was nothing of ours.
    pub(crate) fn postponed(&mut self, reference: &str) -> bool {
        if self.leaves.postponed(reference) {
            return true;
        }
        self.under_way(reference).map(Wish::unasked).is_some()
    }

    /// The server will not do it. `too_many_channels` is no such answer to a leave (too much was
    /// asked for at once): see [`Wanted::postponed`].
    pub(crate) fn denied(&mut self, reference: &str) {
        self.leaves.answered(reference);
        let is_denied = |wish: &Wish| wish.is_under_way(reference);
        self.later.retain_mut(|wish| !is_denied(wish) || wish.survives_a_no());
    }

    /// Is `reference` a leave without an answer?
    pub(crate) fn is_leaving(&self, reference: &str) -> bool {
        self.leaves.is_told(reference)
    }

    /// The server hears more from us than it will take.
    pub(crate) fn slow_down(&mut self) {
        self.leaves.slow_down();
    }

    /// There is no connection, or an attempt failed. What was confirmed goes on from `cursor`, where
    /// the session stood; an unconfirmed ask from where its own replay stood; and what has not been
    /// asked since an earlier loss from where it stood then.
    pub(crate) fn lost(&mut self, cursor: Option<&str>) {
        self.leaves.lost();
        for wish in &mut self.later {
            if matches!(wish.state, State::Asked | State::Echoed) {
                wish.unasked();
            }
            if matches!(wish.state, State::Held | State::Carried) {
                wish.ask.since = cursor.map(str::to_owned);
                wish.state = State::Parted;
            }
        }
    }

    fn under_way(&mut self, reference: &str) -> Option<&mut Wish> {
        self.later.iter_mut().find(|wish| wish.is_under_way(reference))
    }
}

impl Wish {
    fn is_under_way(&self, reference: &str) -> bool {
        matches!(self.state, State::Asked | State::Echoed) && self.ask.reference == reference
    }

    fn has_a_question(&self) -> bool {
        match self.state {
            State::Waiting | State::Parted => true,
            State::Held => self.owed.is_some(),
            State::Asked | State::Echoed | State::Carried => false,
        }
    }

    /// What to send now.
    fn asked(&mut self) -> Ask {
        if let Some(reference) = self.owed.take() {
            self.ask.reference = reference;
        }
        if self.state == State::Held {
            self.state = State::Echoed;
            // It is live: nothing changes but that the program gets its answer.
            return Ask { since: None, ..self.ask.clone() };
        }
        self.state = State::Asked;
        self.ask.clone()
    }

    /// What is under way will get no answer, or none that counts.
    fn unasked(&mut self) {
        if self.state == State::Echoed {
            self.state = State::Held;
            self.owed.get_or_insert_with(|| self.ask.reference.clone());
        } else {
            self.state = State::Waiting;
        }
    }

    /// Whether there is still something to ask after the server took the channel away.
    fn survives_its_end(&mut self) -> bool {
        match self.state {
            State::Waiting | State::Asked => return true,
            State::Echoed => self.state = State::Asked,
            State::Held | State::Parted | State::Carried if self.owed.is_some() => self.state = State::Waiting,
            State::Held | State::Parted | State::Carried => return false,
        }
        self.ask.since = None;
        true
    }

    /// Whether the wish goes on after the server's no to what is under way.
    fn survives_a_no(&mut self) -> bool {
        let is_held = self.state == State::Echoed;
        self.state = if is_held { State::Held } else { State::Waiting };
        is_held || self.owed.is_some()
    }
}

#[cfg(test)]
mod model;

#[cfg(test)]
mod tests {
    use super::*;

    fn ask(reference: &str, channel: &str, since: Option<&str>) -> Ask {
        Ask { reference: reference.into(), channel: channel.into(), since: since.map(Into::into) }
    }

    fn leave(reference: &str, channel: &str) -> Leave {
        Leave { reference: reference.into(), channel: channel.into() }
    }

    /// Wishes that were confirmed on a connection that was lost at `cursor`.
    fn parted(channels: &[&str], cursor: &str) -> Wanted {
        let mut wanted = Wanted::default();
        for channel in channels {
            wanted.want(ask(channel, channel, None));
            wanted.next_ask().unwrap();
            wanted.confirmed(channel);
        }
        wanted.lost(Some(cursor));
        wanted
    }

    #[test]
    fn one_channel_is_asked_for_at_a_time_in_order() {
        let mut wanted = Wanted::default();
        wanted.want(ask("1", "a", None));
        wanted.want(ask("2", "b", Some("5-0")));
        assert_eq!(wanted.next_ask(), Some(ask("1", "a", None)));
        assert_eq!(wanted.next_ask(), None);
        wanted.confirmed("1");
        assert_eq!(wanted.next_ask(), Some(ask("2", "b", Some("5-0"))));
        wanted.denied("2");
        assert_eq!(wanted.next_ask(), None);
    }

    #[test]
    fn channels_held_at_the_loss_resume_with_the_next_connection() {
        let mut wanted = parted(&["a", "b"], "20-0");
        wanted.at_connect.push("q".into());
        assert_eq!(wanted.dialled(Some("20-0")), ["q", "a", "b"]);
        wanted.ready(&[]);
        assert_eq!(wanted.next_ask(), None, "ready confirms them");
        wanted.lost(Some("30-0"));
        assert_eq!(wanted.dialled(Some("30-0")), ["q", "a", "b"]);
    }

    #[test]
    fn attempts_that_fail_and_replays_that_are_cut_leave_them_in_the_list() {
        let mut wanted = parted(&["a", "b"], "20-0");
        for _ in 0..3 {
            assert_eq!(wanted.dialled(Some("20-0")), ["a", "b"]);
            wanted.lost(Some("20-0"));
        }
        assert_eq!(wanted.dialled(Some("20-0")), ["a", "b"]);
        // The replay was theirs as well: its last id is where they stand.
        wanted.lost(Some("25-0"));
        assert_eq!(wanted.dialled(Some("25-0")), ["a", "b"]);
    }

    #[test]
    fn a_session_without_a_channel_does_not_move_that_channels_place() {
        let mut wanted = parted(&["a"], "20-0");
        wanted.want(ask("2", "b", Some("3-0")));
        assert_eq!(wanted.dialled(Some("20-0")), ["a"]);
        assert!(wanted.carry_none());
        wanted.lost(Some("20-0"));
        for cursor in ["20-0", "40-0", "60-0"] {
            assert_eq!(wanted.dialled(Some(cursor)), [""; 0], "what may be refused does not travel");
            wanted.ready(&[]);
            wanted.lost(Some(cursor));
        }
        assert_eq!(wanted.next_ask(), Some(ask("a", "a", Some("20-0"))));
        wanted.lost(Some("70-0"));
        assert_eq!(wanted.dialled(Some("70-0")), [""; 0], "asked is not held");
        assert_eq!(wanted.next_ask(), Some(ask("a", "a", Some("20-0"))));
        wanted.confirmed("a");
        assert_eq!(wanted.next_ask(), Some(ask("2", "b", Some("3-0"))));
        wanted.lost(Some("80-0"));
        assert_eq!(wanted.dialled(Some("80-0")), ["a"]);
        wanted.ready(&[]);
        assert_eq!(wanted.next_ask(), Some(ask("2", "b", Some("3-0"))));
    }

    #[test]
    fn the_list_stays_within_its_bound_and_the_rest_is_asked_for_from_the_loss() {
        let names: Vec<String> = (0..40).map(|n| format!("{n:02}{}", "/".repeat(40))).collect();
        let names: Vec<&str> = names.iter().map(String::as_str).collect();
        let n_fit = MAX_LIST_BYTES / listed_bytes(names[0]);
        assert_eq!(listed_bytes(names[0]), 1 + "channel=".len() + 2 + 3 * 40);
        let mut wanted = parted(&names, "20-0");
        assert_eq!(wanted.dialled(Some("20-0")), names[..n_fit]);
        wanted.ready(&[]);
        assert_eq!(wanted.next_ask(), Some(ask(names[n_fit], names[n_fit], Some("20-0"))));
        wanted.lost(Some("30-0"));
        // Those that fitted stand where that session stood; the others still where they were left,
        // whatever room there is for them now.
        wanted.leave(leave("9", names[0]));
        assert_eq!(wanted.dialled(Some("30-0")), names[1..n_fit]);
        wanted.ready(&[]);
        for name in &names[n_fit..] {
            assert_eq!(wanted.next_ask(), Some(ask(name, name, Some("20-0"))));
            wanted.confirmed(name);
        }
    }

    #[test]
    fn a_list_may_be_exactly_as_long_as_its_bound() {
        let names: Vec<String> = (100..400).map(|n| n.to_string()).collect();
        let room = MAX_LIST_BYTES - names.iter().map(|name| listed_bytes(name)).sum::<usize>() - listed_bytes("");
        let (fits, exceeds) = ("x".repeat(room), "x".repeat(room + 1));
        for (last, n_more) in [(fits, 1), (exceeds, 0)] {
            let mut wanted = parted(&[&last], "20-0");
            wanted.at_connect.clone_from(&names);
            assert_eq!(wanted.dialled(Some("20-0")).len(), names.len() + n_more);
        }
    }

    #[test]
    fn a_refusal_is_laid_on_the_list_only_where_it_carried_something() {
        let mut wanted = parted(&["a"], "20-0");
        wanted.at_connect.push("a".into());
        assert_eq!(wanted.dialled(Some("20-0")), ["a"], "once is enough");
        assert!(!wanted.carry_none(), "the program's own list says it as well");
        assert_eq!(wanted.dialled(Some("20-0")), ["a"]);
        assert!(!Wanted::new(vec!["q".into()]).carry_none());
    }

    #[test]
    fn a_cut_subscribe_goes_on_from_the_highest_id_of_its_channel() {
        let mut wanted = Wanted::default();
        wanted.want(ask("1", "a", Some("5-0")));
        wanted.next_ask();
        wanted.heard("a", "7-0");
        wanted.heard("b", "9-0");
        wanted.heard("a", "6-0");
        wanted.lost(Some("8-0"));
        assert_eq!(wanted.dialled(Some("8-0")), [""; 0]);
        assert_eq!(wanted.next_ask(), Some(ask("1", "a", Some("7-0"))));
        wanted.lost(Some("20-0"));
        assert_eq!(wanted.next_ask(), Some(ask("1", "a", Some("7-0"))), "nothing came: the same place");
    }

    #[test]
    fn a_cut_subscribe_without_an_event_keeps_its_own_since() {
        let mut wanted = Wanted::default();
        wanted.want(ask("1", "a", None));
        wanted.next_ask();
        wanted.lost(Some("8-0"));
        assert_eq!(wanted.next_ask(), Some(ask("1", "a", None)));
    }

    #[test]
    fn asking_twice_loses_neither_the_place_nor_an_answer() {
        let mut wanted = Wanted::default();
        wanted.want(ask("1", "a", Some("5-0")));
        wanted.next_ask();
        wanted.want(ask("2", "a", Some("9-0")));
        assert_eq!(wanted.next_ask(), None, "the first is under way");
        wanted.heard("a", "7-0");
        wanted.lost(Some("8-0"));
        assert_eq!(wanted.next_ask(), Some(ask("2", "a", Some("7-0"))));
        wanted.want(ask("3", "a", None));
        wanted.confirmed("2");
        assert_eq!(wanted.next_ask(), Some(ask("3", "a", None)), "it is live: only an answer is wanted");
        wanted.heard("a", "30-0");
        assert!(wanted.postponed("3"));
        assert_eq!(wanted.next_ask(), Some(ask("3", "a", None)));
        wanted.lost(Some("20-0"));
        assert_eq!(wanted.dialled(Some("20-0")), ["a"]);
        wanted.want(ask("4", "a", Some("1-0")));
        wanted.lost(Some("21-0"));
        assert_eq!(wanted.dialled(Some("21-0")), ["a"], "an ask in the midst of an attempt moves nothing");
        wanted.ready(&[]);
        assert_eq!(wanted.next_ask(), Some(ask("4", "a", None)));
        wanted.confirmed("4");
        assert_eq!(wanted.next_ask(), None);
    }

    #[test]
    fn an_ask_that_waits_is_answered_though_an_earlier_one_was_denied() {
        let mut wanted = Wanted::default();
        wanted.want(ask("1", "a", None));
        wanted.next_ask();
        wanted.want(ask("2", "a", None));
        wanted.denied("1");
        assert_eq!(wanted.next_ask(), Some(ask("2", "a", None)));
        wanted.confirmed("2");
        wanted.want(ask("3", "a", None));
        wanted.next_ask();
        wanted.denied("3");
        wanted.lost(Some("9-0"));
        assert_eq!(wanted.dialled(Some("9-0")), ["a"], "what is held stays held until the server takes it");
    }

    #[test]
    fn what_the_server_took_or_the_program_left_does_not_come_back() {
        let mut wanted = parted(&["a", "b", "c"], "20-0");
        wanted.at_connect = vec!["q".into(), "r".into()];
        wanted.taken("a");
        wanted.taken("q");
        wanted.leave(leave("9", "b"));
        assert_eq!(wanted.dialled(Some("20-0")), ["r", "c"]);
        wanted.leave(leave("10", "c"));
        wanted.ready(&["r".into(), "c".into(), "b".into()]);
        assert_eq!(wanted.next_ask(), None);
        let told: Vec<Leave> = std::iter::from_fn(|| wanted.next_leave()).collect();
        assert_eq!(told, [leave("9", "b"), leave("10", "c")]);
        told.iter().for_each(|leave| wanted.confirmed(&leave.reference));
        wanted.lost(Some("30-0"));
        wanted.ready(&["r".into(), "b".into()]);
        assert_eq!(wanted.next_leave(), Some(leave("left-1", "b")), "the token joins it on every connection");
        assert_eq!(wanted.next_leave(), None);
    }

    #[test]
    fn who_waits_for_an_answer_gets_one_though_the_server_took_the_channel() {
        let mut wanted = Wanted::default();
        wanted.want(ask("1", "a", Some("5-0")));
        wanted.taken("a");
        assert_eq!(wanted.next_ask(), Some(ask("1", "a", Some("5-0"))));
        wanted.confirmed("1");
        wanted.want(ask("2", "a", None));
        wanted.taken("a");
        assert_eq!(wanted.next_ask(), Some(ask("2", "a", None)));
        wanted.confirmed("2");
        wanted.want(ask("3", "a", None));
        wanted.next_ask();
        wanted.taken("a");
        wanted.denied("3");
        wanted.lost(Some("9-0"));
        assert_eq!((wanted.dialled(Some("9-0")), wanted.next_ask()), (vec![], None));
    }

    #[test]
    fn a_channel_is_asked_for_again_only_after_its_leave_is_done() {
        let mut wanted = parted(&["a"], "20-0");
        wanted.dialled(Some("20-0"));
        wanted.ready(&["a".into()]);
        wanted.leave(leave("8", "a"));
        wanted.want(ask("9", "a", None));
        wanted.want(ask("10", "b", None));
        assert_eq!(wanted.next_leave(), Some(leave("8", "a")));
        assert_eq!(wanted.next_ask(), Some(ask("10", "b", None)), "others need not wait for it");
        wanted.confirmed("10");
        assert!(wanted.is_leaving("8") && !wanted.is_leaving("9"));
        assert!(wanted.postponed("8"));
        assert_eq!(wanted.next_ask(), None);
        assert_eq!(wanted.next_leave(), Some(leave("8", "a")));
        wanted.confirmed("8");
        assert_eq!(wanted.next_ask(), Some(ask("9", "a", None)));
    }

    #[test]
    fn a_postponed_ask_comes_again() {
        let mut wanted = Wanted::default();
        wanted.want(ask("1", "a", None));
        wanted.next_ask();
        assert!(wanted.postponed("1") && !wanted.postponed("9"));
        assert_eq!(wanted.next_ask(), Some(ask("1", "a", None)));
    }
}
