//! Whatever happens to connections, asks and replays, and in whatever order: of every channel that
//! was promised, the program sees each event once and in order. The server here is a list of events
//! and the rules of the wire.

use std::collections::{BTreeMap, BTreeSet};

use proptest::prelude::*;

use super::*;

const TOKENS: &str = "t";
/// Asked for later; `b` from the log's first event on, the others from the moment of the answer.
const LATER: [&str; 3] = ["a", "b", "c"];

#[derive(Debug, Clone)]
enum Op {
    Publish(usize),
    /// Another ask by the program for a channel that it wants already.
    WantAgain(usize),
    FailToConnect,
    /// A 403, wherever there is something in the list that it can be about.
    Refuse,
    /// Connects; cut after so many events of the replay, if there are so many.
    Connect(usize),
    /// The next ask goes out; its replay is cut likewise.
    Ask(usize),
    /// The next ask goes out and is refused for now.
    Postpone,
    Cut,
}

fn op() -> impl Strategy<Value = Op> {
    prop_oneof![
        4 => (0..4usize).prop_map(Op::Publish),
        1 => (0..3usize).prop_map(Op::WantAgain),
        1 => Just(Op::FailToConnect),
        1 => Just(Op::Refuse),
        3 => (0..8usize).prop_map(Op::Connect),
        5 => (0..8usize).prop_map(Op::Ask),
        1 => Just(Op::Postpone),
        1 => Just(Op::Cut),
    ]
}

/// A log, a client of it and the session between them.
struct Model {
    log: Vec<&'static str>,
    wanted: Wanted,
    /// How many events of the log the cursor covers.
    cursor: usize,
    /// The channels that are live; none without a connection.
    live: BTreeSet<&'static str>,
    is_connected: bool,
    seen: BTreeMap<&'static str, Vec<usize>>,
    /// From which event on a channel was promised.
    promised: BTreeMap<&'static str, usize>,
    n_asked: usize,
}

fn text(position: usize) -> String {
    format!("{position}-0")
}

/// So long that two fit into a connection's list and three do not.
fn long(channel: &str) -> String {
    channel.repeat(MAX_LIST_BYTES * 2 / 5)
}

fn known(name: &str) -> &'static str {
    LATER.into_iter().chain([TOKENS]).find(|known| name.starts_with(known)).expect("one of ours")
}

impl Model {
    fn new() -> Model {
        let mut model = Model {
            log: vec![TOKENS],
            wanted: Wanted::default(),
            cursor: 1,
            live: BTreeSet::new(),
            is_connected: false,
            seen: BTreeMap::new(),
            promised: BTreeMap::from([(TOKENS, 1), ("b", 1)]),
            n_asked: 0,
        };
        for channel in LATER {
            model.want(channel, (channel == "b").then(|| text(1)));
        }
        model
    }

    fn want(&mut self, channel: &str, since: Option<String>) {
        self.n_asked += 1;
        self.wanted.want(Ask { reference: self.n_asked.to_string(), channel: long(channel), since });
    }

    fn apply(&mut self, op: &Op) {
        match *op {
            Op::Publish(n) => {
                let channel = LATER.into_iter().chain([TOKENS]).nth(n).expect("four of them");
                self.log.push(channel);
                if self.live.contains(channel) {
                    self.hear(channel, self.log.len());
                    self.cursor = self.log.len();
                }
            }
            Op::WantAgain(n) => self.want(LATER[n], Some(text(0))),
            Op::FailToConnect if !self.is_connected => {
                self.wanted.dialled(Some(&text(self.cursor)));
                self.lose();
            }
            Op::Refuse if !self.is_connected => {
                let n_listed = self.wanted.dialled(Some(&text(self.cursor))).len();
                assert_eq!(self.wanted.carry_none(), n_listed > 0);
                self.lose();
            }
            Op::Connect(n) if !self.is_connected => self.connect(n),
            Op::Ask(n) if self.is_connected => self.ask(n),
            Op::Postpone if self.is_connected => {
                if let Some(ask) = self.wanted.next_ask() {
                    assert!(self.wanted.postponed(&ask.reference));
                }
            }
            Op::Cut if self.is_connected => self.lose(),
            _ => {}
        }
    }

    fn hear(&mut self, channel: &'static str, id: usize) {
        self.seen.entry(channel).or_default().push(id);
        self.wanted.heard(&long(channel), &text(id));
    }

    fn lose(&mut self) {
        (self.is_connected, self.live) = (false, BTreeSet::new());
        self.wanted.lost(Some(&text(self.cursor)));
    }

    /// The events after `position` on `channels`, by id.
    fn after(&self, position: usize, channels: &BTreeSet<&str>) -> Vec<(&'static str, usize)> {
        let all = self.log.iter().enumerate().map(|(n, channel)| (*channel, n + 1));
        all.filter(|(channel, id)| *id > position && channels.contains(channel)).collect()
    }

    fn connect(&mut self, n_before_the_cut: usize) {
        let listed = self.wanted.dialled(Some(&text(self.cursor)));
        let channels: BTreeSet<&str> = listed.iter().map(|name| known(name)).chain([TOKENS]).collect();
        for (n, (channel, id)) in self.after(self.cursor, &channels).into_iter().enumerate() {
            if n == n_before_the_cut {
                return self.lose();
            }
            self.hear(channel, id);
            self.cursor = id;
        }
        self.cursor = self.log.len();
        self.wanted.ready(&[TOKENS.to_owned()]);
        self.live = listed.iter().map(|name| known(name)).chain([TOKENS]).collect();
        self.is_connected = true;
    }

    fn ask(&mut self, n_before_the_cut: usize) {
        let Some(Ask { reference, channel, since }) = self.wanted.next_ask() else { return };
        let channel = known(&channel);
        if let Some(since) = since.filter(|_| !self.live.contains(channel)) {
            let since = since.split_once('-').expect("an id").0.parse().expect("a number");
            for (n, (_, id)) in self.after(since, &BTreeSet::from([channel])).into_iter().enumerate() {
                if n == n_before_the_cut {
                    return self.lose();
                }
                self.hear(channel, id);
            }
        }
        self.promised.entry(channel).or_insert(self.log.len());
        self.live.insert(channel);
        self.wanted.confirmed(&reference);
        self.cursor = self.log.len();
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1_500))]

    #[test]
    fn every_event_of_a_promised_channel_is_seen_once_and_in_order(ops in proptest::collection::vec(op(), 0..120)) {
        let mut model = Model::new();
        ops.iter().for_each(|op| model.apply(op));
        // In the end everything works.
        if !model.is_connected {
            model.connect(usize::MAX);
        }
        for _ in 0..2 * LATER.len() {
            model.ask(usize::MAX);
        }
        prop_assert_eq!(model.wanted.next_ask(), None);
        for (channel, from) in &model.promised {
            let expected: Vec<usize> =
                model.after(*from, &BTreeSet::from([*channel])).into_iter().map(|(_, id)| id).collect();
            prop_assert_eq!(model.seen.get(channel).cloned().unwrap_or_default(), expected, "{}", channel);
        }
    }
}
