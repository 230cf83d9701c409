use std::net::{IpAddr, Ipv4Addr};
use std::sync::Arc;

use super::*;
use crate::event::Wire;
use crate::plugin::Admission;
use crate::testing::identity;

const fn s(n: u64) -> Duration {
    Duration::from_secs(n)
}

fn one(user: Option<&str>, address: u8, at: Instant) -> SessionInfo {
    SessionInfo {
        id: crate::session::SessionId::new(0),
        identity: Arc::new(identity(user)),
        wire: Wire::Ws,
        address: IpAddr::V4(Ipv4Addr::new(10, 0, 0, address)),
        opened_at: at,
        admission: Admission::Standard,
    }
}

fn node(name: &str, n_sessions: usize, n_opened: usize) -> Seen {
    Seen {
        node: name.into(),
        boot: "1".into(),
        version: "1".into(),
        phase: Some(Phase::Serving),
        age: s(1),
        n_sessions,
        capacity: 1_000,
        accept_rate: 100.0,
        ready_for: Some(s(1_000)),
        is_lagging: false,
        moved: crate::balance::Moved::default(),
        n_opened,
        n_refused: 0,
    }
}

/// One node's watch over two, itself `a`; a reading every five seconds.
struct Watch {
    placement: Placement,
    now: Instant,
    nodes: Vec<Seen>,
    others: Vec<Trials>,
}

impl Watch {
    fn of(counts: &[(usize, usize)]) -> Self {
        let name = |i: usize| char::from(b'a' + i as u8).to_string();
        let nodes = counts.iter().enumerate().map(|(i, (n, opened))| node(&name(i), *n, *opened)).collect();
        let mut watch = Self { placement: Placement::new(5), now: Instant::now(), nodes, others: Vec::new() };
        watch.read(1);
        watch
    }

    /// So many readings; the policy that they lead to.
    fn read(&mut self, n: usize) -> LbPolicy {
        for _ in 0..n {
            self.now += s(5);
            self.placement.read(self.now, "a", &self.nodes, self.others.iter().copied());
        }
        self.placement.observed().0
    }

    /// These users are moved, a second apart, and the first `n_back` of them come back.
    fn move_away(&mut self, n: usize, n_back: usize) {
        let users: Vec<SessionInfo> = (0..n).map(|i| one(Some(&format!("u{i}")), 1, self.now)).collect();
        for user in &users {
            self.now += s(1);
            self.placement.moved(self.now, user, || true);
        }
        users[..n_back].iter().for_each(|user| self.placement.arrived(user));
    }

    fn trials(&self) -> (usize, usize) {
        let Trials { moved, back } = self.placement.trials(self.now);
        (moved, back)
    }
}

#[test]
fn it_is_sticky_from_more_than_four_in_five_of_twenty_on_and_until_fewer_than_three_in_five() {
    for (n, n_back, expected) in [
        (20, 20, LbPolicy::Sticky),
        (20, 17, LbPolicy::Sticky),
        (20, 16, LbPolicy::Unknown),
        (19, 19, LbPolicy::Unknown),
        (40, 0, LbPolicy::Unknown),
    ] {
        let mut watch = Watch::of(&[(500, 0), (0, 0)]);
        watch.move_away(n, n_back);
        assert_eq!(watch.trials(), (0, 0), "nothing is known before a minute is over");
        assert_eq!(watch.read(20), expected, "{n_back} of {n}");
        assert_eq!(watch.trials(), (n, n_back));
    }
    let mut watch = Watch::of(&[(500, 0), (0, 0)]);
    watch.move_away(30, 30);
    assert_eq!(watch.read(20), LbPolicy::Sticky);
    watch.move_away(19, 0);
    assert_eq!(watch.read(20), LbPolicy::Sticky, "30 of 49");
    watch.move_away(1, 0);
    assert_eq!(watch.read(20), LbPolicy::Unknown, "30 of 50");
}

#[test]
fn it_is_forgotten_after_half_an_hour_and_only_the_last_fifty_count() {
    let mut watch = Watch::of(&[(500, 0), (0, 0)]);
    watch.move_away(60, 60);
    watch.read(20);
    assert_eq!(watch.trials(), (50, 50));
    watch.read(12 * 28);
    assert_eq!(watch.read(1), LbPolicy::Sticky);
    watch.read(12 * 5);
    assert_eq!((watch.read(1), watch.trials()), (LbPolicy::Unknown, (0, 0)));
}

#[test]
fn only_a_node_that_is_fuller_than_another_tells_anything() {
    for (nodes, tells) in [
        (&[(500, 0), (489, 0)][..], true),
        (&[(500, 0), (490, 0)], false),
        (&[(1_000, 0), (979, 0)], true),
        (&[(1_000, 0), (980, 0)], false),
        (&[(500, 0)], false),
        (&[(500, 0), (600, 0)], false),
    ] {
        let mut watch = Watch::of(nodes);
        watch.move_away(5, 5);
        watch.now += s(60);
        assert_eq!(watch.trials(), if tells { (5, 5) } else { (0, 0) }, "{nodes:?}");
    }
    // By their capacity; and who does not serve, or not for long, is nobody.
    type Change = fn(&mut Seen);
    let cases: [(Change, bool); 5] = [
        (|b| b.capacity = 400, false),
        (|b| b.capacity = 4_000, true),
        (|b| b.phase = Some(Phase::Draining), false),
        (|b| b.ready_for = Some(s(14)), false),
        (|b| b.ready_for = Some(s(15)), true),
    ];
    for (change, tells) in cases {
        let mut watch = Watch::of(&[(500, 0), (250, 0)]);
        change(&mut watch.nodes[1]);
        watch.read(1);
        watch.move_away(1, 1);
        watch.now += s(60);
        assert_eq!(watch.trials() == (1, 1), tells);
    }
}

#[test]
fn who_has_another_session_here_or_was_just_asked_about_is_not_watched() {
    let watch = Watch::of(&[(500, 0), (0, 0)]);
    let (at, user) = (watch.now, one(Some("u"), 1, watch.now));
    watch.placement.moved(at, &user, || false);
    watch.placement.moved(at + Duration::from_millis(999), &user, || panic!("once a second"));
    watch.placement.moved(at + s(1), &user, || true);
    // The same user again, while it is awaited.
    watch.placement.moved(at + s(2), &user, || true);
    watch.placement.arrived(&one(Some("somebody else"), 1, at));
    let Trials { moved, back } = watch.placement.trials(at + s(61));
    assert_eq!((moved, back), (1, 0));
}

#[test]
fn who_has_no_name_is_told_by_its_address() {
    let watch = Watch::of(&[(500, 0), (0, 0)]);
    let at = watch.now;
    for address in 1..4 {
        watch.placement.moved(at + s(u64::from(address)), &one(None, address, at), || true);
    }
    watch.placement.arrived(&one(None, 2, at));
    let (unnamed, named) = (one(None, 1, at), one(Some("10.0.0.1"), 1, at));
    watch.placement.arrived(&named);
    assert!(is_same(&unnamed, &one(None, 1, at)) && is_same(&named, &one(Some("10.0.0.1"), 2, at)));
    assert!(!is_same(&unnamed, &named) && !is_same(&unnamed, &one(None, 2, at)));
    let Trials { moved, back } = watch.placement.trials(at + s(100));
    assert_eq!((moved, back), (3, 1));
}

#[test]
fn what_other_nodes_have_seen_counts_and_nonsense_does_not() {
    let mut watch = Watch::of(&[(500, 0), (0, 0)]);
    watch.others = vec![Trials { moved: 10, back: 10 }, Trials { moved: 10, back: 8 }];
    assert_eq!(watch.read(3), LbPolicy::Sticky);
    for nonsense in [Trials { moved: 20, back: 21 }, Trials { moved: usize::MAX, back: usize::MAX }] {
        let mut watch = Watch::of(&[(500, 0), (0, 0)]);
        watch.others = vec![nonsense; 3];
        assert_eq!((watch.read(5), watch.placement.observed().1), (LbPolicy::Unknown, Trials::default()));
    }
}

#[test]
fn where_newcomers_land_tells_the_rest() {
    for (nodes, expected) in [
        // One of four is emptier and gets all, three quarters, a half, its even part, and nobody.
        (&[(300, 0), (300, 0), (300, 0), (100, 20)][..], LbPolicy::Emptiest),
        (&[(300, 2), (300, 2), (300, 1), (100, 15)], LbPolicy::Emptier),
        (&[(300, 4), (300, 3), (300, 3), (100, 10)], LbPolicy::Emptier),
        (&[(300, 5), (300, 5), (300, 5), (100, 5)], LbPolicy::Spread),
        (&[(300, 7), (300, 7), (300, 6), (100, 0)], LbPolicy::Unknown),
        // The better of two, where half of them are emptier.
        (&[(300, 2), (300, 3), (100, 7), (100, 8)], LbPolicy::Emptier),
        // An even fleet, and one where next to nobody comes.
        (&[(300, 0), (300, 0), (300, 0), (290, 20)], LbPolicy::Unknown),
        (&[(300, 0), (300, 0), (300, 0), (100, 0)], LbPolicy::Unknown),
        // All but one are emptier: nearly everybody would land there anyway.
        (&[(900, 0), (100, 5), (100, 5), (100, 5), (100, 5), (100, 5)], LbPolicy::Unknown),
    ] {
        assert_eq!(Watch::of(nodes).read(30), expected, "{nodes:?}");
    }
}

#[test]
fn an_even_fleet_changes_nothing_and_another_policy_must_show_in_three_readings() {
    let mut watch = Watch::of(&[(300, 0), (300, 0), (300, 0), (100, 100)]);
    assert_eq!(watch.read(10), LbPolicy::Emptiest);
    for node in &mut watch.nodes {
        (node.n_sessions, node.n_opened) = (250, 25);
    }
    assert_eq!(watch.read(1_000), LbPolicy::Emptiest);
    watch.nodes[3].n_sessions = 100;
    assert_eq!(watch.read(2), LbPolicy::Emptiest);
    assert_eq!(watch.read(1), LbPolicy::Spread);
}
