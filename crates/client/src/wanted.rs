//! Which channels the program wants beyond those of its token, and from where each is asked for
//! again after a loss. Decides what to ask next; the driver sends it.
//!
//! One ask is under way at a time: the server replays one channel at a time, and a crowd of asks
//! would only meet its rate limit.

use std::collections::BTreeSet;

use crate::cursor::is_later;

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
}

#[derive(Debug, PartialEq, Eq)]
enum State {
    /// Not asked on this connection yet.
    Waiting,
    /// Asked, no answer yet.
    Asked,
    /// Confirmed on this connection.
    Held,
}

/// The program's wishes, in the order in which they were made.
#[derive(Debug, Default)]
pub(crate) struct Wanted {
    /// Asked for in the connection's own query; they resume with the session's cursor.
    pub(crate) at_connect: Vec<String>,
    later: Vec<Wish>,
    /// Channels of the token that the program does not want.
    left: BTreeSet<String>,
}

impl Wanted {
    pub(crate) fn new(at_connect: Vec<String>) -> Wanted {
        Wanted { at_connect, ..Wanted::default() }
    }

    /// The program wants a channel. What is returned is to be sent at once: the channel is held
    /// already, so nothing changes but that the program gets an answer for its new reference.
    pub(crate) fn want(&mut self, ask: Ask) -> Option<Ask> {
        self.left.remove(&ask.channel);
        match self.later.iter_mut().find(|wish| wish.ask.channel == ask.channel) {
            Some(wish) if wish.state == State::Held => return Some(Ask { since: None, ..ask }),
            Some(wish) => {
                wish.ask.reference = ask.reference;
                wish.state = State::Waiting;
            }
            None => self.later.push(Wish { ask, state: State::Waiting }),
        }
        None
    }

    /// The program does not want `channel`, whoever asked for it before.
    pub(crate) fn leave(&mut self, channel: &str) {
        self.forget(channel);
        self.left.insert(channel.to_owned());
    }

    /// The server took `channel` away: it is not asked for again.
    pub(crate) fn forget(&mut self, channel: &str) {
        self.at_connect.retain(|known| known != channel);
        self.later.retain(|wish| wish.ask.channel != channel);
    }

    /// Those of `joined` that the program had left; the token joins them anew on every connection.
    pub(crate) fn unwanted<'a>(&'a self, joined: &'a [String]) -> impl Iterator<Item = &'a str> {
        joined.iter().map(String::as_str).filter(|channel| self.left.contains(*channel))
    }

    /// The next ask, unless one is under way.
    pub(crate) fn next_ask(&mut self) -> Option<Ask> {
        if self.later.iter().any(|wish| wish.state == State::Asked) {
            return None;
        }
        let wish = self.later.iter_mut().find(|wish| wish.state == State::Waiting)?;
        wish.state = State::Asked;
        Some(wish.ask.clone())
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

    /// The server confirmed what was asked under `reference`.
    pub(crate) fn confirmed(&mut self, reference: &str) {
        if let Some(wish) = self.later.iter_mut().find(|wish| wish.ask.reference == reference) {
            wish.state = State::Held;
        }
    }

    /// The server cannot do it now: it is asked again later. `false` where it was no ask of ours.
    pub(crate) fn postponed(&mut self, reference: &str) -> bool {
        let asked = self.later.iter_mut().find(|wish| wish.ask.reference == reference && wish.state == State::Asked);
        asked.map(|wish| wish.state = State::Waiting).is_some()
    }

    /// The server will not do it.
    pub(crate) fn denied(&mut self, reference: &str) {
        self.later.retain(|wish| wish.ask.reference != reference);
    }

    /// The connection is gone. A confirmed channel is asked for again from `cursor`, where the
    /// session stood; an unconfirmed one from where its own replay stood.
    pub(crate) fn lost(&mut self, cursor: Option<&str>) {
        for wish in &mut self.later {
            if wish.state == State::Held {
                wish.ask.since = cursor.map(str::to_owned);
            }
            wish.state = State::Waiting;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ask(reference: &str, channel: &str, since: Option<&str>) -> Ask {
        Ask { reference: reference.into(), channel: channel.into(), since: since.map(Into::into) }
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
    fn a_cut_subscribe_goes_on_from_the_highest_id_of_its_channel() {
        let mut wanted = Wanted::default();
        wanted.want(ask("1", "a", Some("5-0")));
        wanted.next_ask();
        wanted.heard("a", "7-0");
        wanted.heard("b", "9-0");
        wanted.heard("a", "6-0");
        wanted.lost(Some("8-0"));
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
    fn a_confirmed_channel_is_asked_again_from_the_cursor_at_the_loss() {
        let mut wanted = Wanted::default();
        wanted.want(ask("1", "a", Some("5-0")));
        wanted.next_ask();
        wanted.confirmed("1");
        wanted.heard("a", "30-0");
        wanted.lost(Some("20-0"));
        // The next connection moves the cursor before its `ready`; the ask must not follow it.
        wanted.lost(Some("40-0"));
        assert_eq!(wanted.next_ask(), Some(ask("1", "a", Some("20-0"))));
    }

    #[test]
    fn asking_twice_loses_neither_the_place_nor_the_second_answer() {
        let mut wanted = Wanted::default();
        wanted.want(ask("1", "a", Some("5-0")));
        wanted.next_ask();
        assert_eq!(wanted.want(ask("2", "a", Some("9-0"))), None);
        assert_eq!(wanted.next_ask(), Some(ask("2", "a", Some("5-0"))));
        wanted.confirmed("2");
        assert_eq!(wanted.want(ask("3", "a", Some("9-0"))), Some(ask("3", "a", None)));
        wanted.confirmed("3");
        wanted.lost(Some("20-0"));
        assert_eq!(wanted.next_ask(), Some(ask("2", "a", Some("20-0"))));
    }

    #[test]
    fn what_the_server_took_or_the_program_left_is_not_asked_again() {
        let mut wanted = Wanted::new(vec!["q".into(), "r".into()]);
        wanted.want(ask("1", "a", None));
        wanted.want(ask("2", "b", None));
        wanted.forget("a");
        wanted.forget("q");
        wanted.leave("b");
        assert_eq!((wanted.next_ask(), wanted.at_connect.join(",")), (None, "r".into()));
        let joined = ["b".to_owned(), "c".to_owned()];
        assert_eq!(wanted.unwanted(&joined).collect::<Vec<_>>(), ["b"]);
        wanted.want(ask("3", "b", None));
        assert_eq!(wanted.unwanted(&joined).count(), 0);
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
