//! The contract's third about the fleet: who is there, who holds it, what one node says to another, and which of a
//! user's sessions is one too many.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use hub::backplane::{
    Claim, Claimed, Fleet as Known, FromLink, HOLD_TIMES, Hold, MAX_REASON_BYTES, MAX_TELL_BYTES, Report,
};

use super::{Bench, Check, Fleet, Hearing, Setup, a_little, channel, checks};

pub(super) const CHECKS: &[Check] = checks![
    what_nodes_report_is_known_to_all_until_they_retire,
    a_report_ages_by_the_backplanes_clock_and_ends_with_its_time,
    the_birth_of_the_log_is_told_and_stays_until_a_flush,
    a_hold_is_known_to_all_and_every_node_is_told_when_it_begins_and_is_taken_away,
    a_hold_ends_with_its_time,
    a_hold_has_a_shortest_and_a_longest_time_and_a_longest_reason,
    a_flush_takes_the_hold_away,
    a_text_reaches_one_node_or_all_byte_for_byte,
    a_text_has_a_greatest_length,
    the_newest_sessions_keep_their_places_and_the_oldest_is_replaced,
    a_claim_again_keeps_the_place_and_replaces_nobody,
    a_batch_is_answered_in_order_and_each_user_counts_alone,
    what_is_released_leaves_room_and_releasing_nothing_is_no_harm,
    a_dead_nodes_sessions_go_first_and_without_a_word,
    a_node_that_comes_back_is_another_one,
    what_is_no_claim_is_refused_and_changes_nothing,
    after_a_flush_claims_put_the_old_order_back,
    any_text_may_be_a_user,
    two_nodes_at_once_never_leave_more_than_the_limit,
];

const TTL: Duration = Duration::from_secs(20);

impl Hearing {
    async fn report(&self, body: &str, ttl: Duration) -> Known {
        let known = self.node.report(body.to_owned(), ttl).await.unwrap_or_else(|e| panic!("node {}: {e}", self.name));
        assert!(known.reports.is_sorted_by(|x, y| x.node < y.node), "by node name");
        let own = known.reports.iter().find(|r| *r.node == *self.name).expect("one's own report is among them");
        assert_eq!((own.body.as_str(), own.age), (body, Duration::ZERO));
        known
    }

    async fn hold(&self, time: Duration, reason: &str) -> Hold {
        let held = self.node.hold(Some((time, reason.to_owned()))).await;
        let hold = held.unwrap_or_else(|e| panic!("node {}: {e}", self.name)).expect("it holds from now on");
        assert_eq!((&*hold.by, hold.reason.as_str()), (self.name, reason));
        hold
    }

    async fn end_hold(&self) {
        assert_eq!(self.node.hold(None).await.unwrap_or_else(|e| panic!("node {}: {e}", self.name)), None);
    }

    async fn until_fleet_changed(&mut self) {
        loop {
            match self.next().await {
                FromLink::FleetChanged => return,
                FromLink::Beacon(_) => {}
                other => panic!("node {}: {other:?} instead of a change of the fleet", self.name),
            }
        }
    }

    async fn tell(&self, to: Option<&str>, text: &str) {
        let told = self.node.tell(to.map(Into::into), text.to_owned()).await;
        told.unwrap_or_else(|e| panic!("node {}: {e}", self.name));
    }

    async fn next_told(&mut self) -> String {
        loop {
            match self.next().await {
                FromLink::Told(text) => return text,
                FromLink::Beacon(_) => {}
                other => panic!("node {}: {other:?} instead of a text", self.name),
            }
        }
    }

    async fn claim_all(&self, claims: &[Claim], max: u32) -> Vec<Claimed> {
        let claimed = self.node.claim(claims.to_vec(), max).await.unwrap_or_else(|e| panic!("node {}: {e}", self.name));
        assert_eq!(claimed.len(), claims.len(), "an answer a claim");
        for (claim, claimed) in claims.iter().zip(&claimed) {
            assert_eq!(claim.since.unwrap_or(claimed.since), claimed.since, "{claim:?}");
        }
        claimed
    }

    /// The newest place for a session that is not one too many.
    async fn claim(&self, user: &str, session: &str, max: u32) -> u64 {
        let [claimed] = self.claim_all(&[claim(user, session, None)], max).await[..] else { panic!("one claim") };
        assert!(!claimed.replaced, "the newest stays: {session}");
        claimed.since
    }

    async fn release(&self, of: &[(&str, &str)]) {
        let of = of.iter().map(|(user, session)| ((*user).into(), (*session).into())).collect();
        self.node.release(of).await.unwrap_or_else(|e| panic!("node {}: {e}", self.name));
    }

    /// Who was replaced since the last look, as `session of user`.
    async fn replaced(&mut self) -> Vec<String> {
        self.tell(Some(self.name), "end").await;
        let mut replaced = Vec::new();
        loop {
            match self.next().await {
                FromLink::Replaced { user, session } => replaced.push(format!("{session} of {user}")),
                FromLink::Told(text) if text == "end" => return replaced,
                FromLink::Beacon(_) => {}
                other => panic!("node {}: {other:?}", self.name),
            }
        }
    }
}

impl Fleet {
    /// As `Hearing::replaced`, which every node must hear alike.
    async fn replaced(&mut self) -> Vec<String> {
        let heard = self.a.replaced().await;
        assert_eq!(self.b.replaced().await, heard, "every node hears of every one");
        heard
    }
}

fn claim(user: &str, session: &str, since: Option<u64>) -> Claim {
    Claim { user: user.into(), session: session.into(), since }
}

fn of<'a>(known: &'a Known, node: &str) -> Option<&'a Report> {
    known.reports.iter().find(|report| *report.node == *node)
}

async fn what_nodes_report_is_known_to_all_until_they_retire(bench: &dyn Bench) {
    let Fleet { a, b, .. } = &Fleet::open(bench, Setup::USUAL).await;
    assert_eq!(a.report("{}", TTL).await.reports.len(), 1);
    let long = format!("{{\"x\":\"{}\"}}", "ü\\n".repeat(20_000));
    let known = b.report(&long, TTL).await;
    assert_eq!(
        known.reports.iter().map(|r| (&*r.node, r.body.as_str())).collect::<Vec<_>>(),
        [("a", "{}"), ("b", &long)]
    );
    let known = a.report("[2]", TTL).await;
    assert_eq!(of(&known, "b").map(|r| &r.body), Some(&long));
    a.node.retire().await.expect("it can be reached");
    a.node.retire().await.expect("again is no harm");
    assert_eq!(of(&b.report("{}", TTL).await, "a"), None);
    assert_eq!(a.report("[3]", TTL).await.reports.len(), 2, "whoever reports again is back");
}

async fn a_report_ages_by_the_backplanes_clock_and_ends_with_its_time(bench: &dyn Bench) {
    let Fleet { a, b, .. } = &Fleet::open(bench, Setup::USUAL).await;
    let ttl = Duration::from_millis(300);
    let written = b.report("{}", ttl).await.now_ms;
    loop {
        let known = a.report("{}", ttl).await;
        let age = Duration::from_millis(known.now_ms - written);
        assert_eq!(of(&known, "b").map(|r| r.age), (age <= ttl).then_some(age));
        if age > ttl {
            break;
        }
        a_little().await;
    }
    a.report("{}", TTL).await;
    assert_eq!(of(&b.report("{}", TTL).await, "a").map(|r| &*r.body), Some("{}"), "each writes its own");
}

async fn the_birth_of_the_log_is_told_and_stays_until_a_flush(bench: &dyn Bench) {
    let Fleet { a, b, flush, .. } = &Fleet::open(bench, Setup::USUAL).await;
    let first = a.position().await;
    let born = a.report("{}", TTL).await.birth_ms;
    assert!(0 < born && born <= first.ms);
    let mut last = b.log(&channel("c")).await;
    while last.ms <= born + 1 {
        a_little().await;
        last = b.log(&channel("c")).await;
    }
    assert_eq!(b.report("{}", TTL).await.birth_ms, born);
    flush().await;
    let again = a.position().await;
    let known = b.report("{}", TTL).await;
    assert!(last.ms <= known.birth_ms && known.birth_ms <= again.ms, "the log is another one");
    assert!(known.now_ms >= known.birth_ms);
    assert_eq!(known.reports.len(), 1, "reports are forgotten too");
}

async fn a_hold_is_known_to_all_and_every_node_is_told_when_it_begins_and_is_taken_away(bench: &dyn Bench) {
    let Fleet { mut a, mut b, .. } = Fleet::open(bench, Setup::USUAL).await;
    assert_eq!(a.report("{}", TTL).await.hold, None);
    let reasons = ["deploy", "", " two  words\n", "ü\u{0}%s 15", &"x".repeat(MAX_REASON_BYTES)];
    for (i, reason) in reasons.into_iter().enumerate() {
        let time = Duration::from_secs(60 + i as u64);
        let before_ms = a.report("{}", TTL).await.now_ms;
        let hold = [&a, &b][i % 2].hold(time, reason).await;
        for node in [&mut a, &mut b] {
            node.until_fleet_changed().await;
            let known = node.report("{}", TTL).await;
            assert_eq!(known.hold.as_ref(), Some(&hold), "the newest is the one");
            let ms = |at_ms: u64| at_ms + u64::try_from(time.as_millis()).expect("a minute");
            assert!((ms(before_ms)..=ms(known.now_ms)).contains(&hold.until_ms), "by the backplane's clock: {hold:?}");
        }
    }
    for _ in 0..2 {
        b.end_hold().await;
        for node in [&mut a, &mut b] {
            node.until_fleet_changed().await;
            assert_eq!(node.report("{}", TTL).await.hold, None, "again is no harm");
        }
    }
}

async fn a_hold_ends_with_its_time(bench: &dyn Bench) {
    let Fleet { a, b, .. } = &Fleet::open(bench, Setup::USUAL).await;
    let hold = a.hold(*HOLD_TIMES.start(), "x").await;
    a.node.retire().await.expect("it can be reached");
    loop {
        let known = b.report("{}", TTL).await;
        assert_eq!(known.hold, (known.now_ms < hold.until_ms).then(|| hold.clone()), "it outlives who took it");
        if known.hold.is_none() {
            break;
        }
        a_little().await;
    }
}

async fn a_hold_has_a_shortest_and_a_longest_time_and_a_longest_reason(bench: &dyn Bench) {
    let Fleet { a, b, .. } = &Fleet::open(bench, Setup::USUAL).await;
    let (ms, longest) = (Duration::from_millis(1), "x".repeat(MAX_REASON_BYTES));
    let (low, high) = (*HOLD_TIMES.start(), *HOLD_TIMES.end());
    a.hold(low, &longest).await;
    let hold = a.hold(high, &longest).await;
    let odd =
        [(low - ms, ""), (high + ms, ""), (Duration::ZERO, ""), (Duration::MAX, ""), (low, &format!("{longest}x"))];
    for (time, reason) in odd {
        b.node.hold(Some((time, reason.to_owned()))).await.expect_err("no hold");
    }
    assert_eq!(b.report("{}", TTL).await.hold, Some(hold), "nothing was changed");
}

async fn a_flush_takes_the_hold_away(bench: &dyn Bench) {
    let Fleet { a, b, flush, .. } = &Fleet::open(bench, Setup::USUAL).await;
    a.hold(Duration::from_secs(60), "x").await;
    flush().await;
    assert_eq!(b.report("{}", TTL).await.hold, None);
    let hold = b.hold(Duration::from_secs(60), "x").await;
    assert_eq!(a.report("{}", TTL).await.hold, Some(hold));
}

async fn a_text_reaches_one_node_or_all_byte_for_byte(bench: &dyn Bench) {
    let Fleet { mut a, mut b, .. } = Fleet::open(bench, Setup::USUAL).await;
    let texts = ["{\"n\":1}", "", " ", "told told \n\r\n x", "revoked jti 0 x", "replaced s u", "ü\u{0}%s"];
    for text in texts {
        a.tell(Some("b"), text).await;
        assert_eq!(b.next_told().await, text);
        b.tell(None, text).await;
        assert_eq!(a.next_told().await, text, "what was for one only did not come here");
        assert_eq!(b.next_told().await, text, "all are all, this one too");
        b.tell(Some("b"), text).await;
        assert_eq!(b.next_told().await, text, "oneself is a node");
    }
    a.tell(Some("nobody"), "x").await;
    for i in 0..100 {
        a.tell([None, Some("b")][i % 2], &i.to_string()).await;
    }
    for i in 0..100 {
        assert_eq!(b.next_told().await, i.to_string(), "one node's texts come in their order");
    }
}

async fn a_text_has_a_greatest_length(bench: &dyn Bench) {
    let Fleet { a, mut b, .. } = Fleet::open(bench, Setup::USUAL).await;
    let longest = "x".repeat(MAX_TELL_BYTES);
    a.node.tell(Some("b".into()), format!("{longest}x")).await.expect_err("one byte over it");
    a.tell(Some("b"), &longest).await;
    assert!(b.next_told().await == longest);
    assert!(a.node.is_link_up() && b.node.is_link_up());
}

async fn the_newest_sessions_keep_their_places_and_the_oldest_is_replaced(bench: &dyn Bench) {
    let mut fleet = Fleet::open(bench, Setup::USUAL).await;
    for max in [1, 2, 7] {
        let user = format!("u{max}");
        let mut places = Vec::new();
        for i in 0..3 * max {
            let node = if i % 2 == 0 { &fleet.a } else { &fleet.b };
            places.push(node.claim(&user, &format!("s{i}"), max).await);
            let expected: Vec<String> = i.checked_sub(max).map(|old| format!("s{old} of {user}")).into_iter().collect();
            assert_eq!(fleet.replaced().await, expected, "{i} of {max}");
        }
        assert!(places.is_sorted_by(|x, y| x < y), "places rise: {places:?}");
    }
    let us = fleet.a.report("{}", TTL).await.now_ms * 1000;
    let place = fleet.b.claim("new", "s", 1).await;
    assert!(us <= place && place < us + 60_000_000, "µs of the backplane's clock: {place}, {us}");
    // A limit that was lowered takes the lowest; a limit of none counts as one.
    fleet.a.claim("u7", "t", 3).await;
    assert_eq!(fleet.replaced().await, ["s14", "s15", "s16", "s17", "s18"].map(|s| format!("{s} of u7")));
    fleet.a.claim("u7", "v", 0).await;
    assert_eq!(fleet.replaced().await, ["s19", "s20", "t"].map(|s| format!("{s} of u7")));
}

async fn a_claim_again_keeps_the_place_and_replaces_nobody(bench: &dyn Bench) {
    let mut fleet = Fleet::open(bench, Setup::USUAL).await;
    let (first, second) = (fleet.a.claim("u", "s1", 2).await, fleet.b.claim("u", "s2", 2).await);
    for _ in 0..3 {
        for (node, session, since) in [(&fleet.a, "s1", first), (&fleet.b, "s2", second)] {
            let claimed = node.claim_all(&[claim("u", session, Some(since))], 2).await;
            assert_eq!(claimed, [Claimed { since, replaced: false }]);
        }
    }
    assert_eq!(fleet.replaced().await, [""; 0]);
    fleet.b.claim("u", "s3", 2).await;
    assert_eq!(fleet.replaced().await, ["s1 of u"], "renewed, and the oldest all the same");
    let late = fleet.a.claim_all(&[claim("u", "s1", Some(first))], 2).await;
    assert_eq!(late, [Claimed { since: first, replaced: true }], "who was replaced does not come back by renewing");
    assert_eq!(fleet.replaced().await, ["s1 of u"]);
    let newest = fleet.b.claim("u", "s2", 2).await;
    fleet.a.claim("u", "s4", 2).await;
    assert_eq!(fleet.replaced().await, ["s3 of u"], "claimed anew, it had the newest place: {newest}");
}

async fn a_batch_is_answered_in_order_and_each_user_counts_alone(bench: &dyn Bench) {
    let mut fleet = Fleet::open(bench, Setup::USUAL).await;
    assert_eq!(fleet.a.claim_all(&[], 1).await, []);
    let mut claims: Vec<_> = (0..500).map(|i| claim(&format!("u{}", i % 100), &format!("s{i}"), None)).collect();
    let claimed = fleet.a.claim_all(&claims, 3).await;
    let replaced: Vec<bool> = claimed.iter().map(|c| c.replaced).collect();
    assert_eq!(replaced, [[true; 200].as_slice(), &[false; 300]].concat(), "later ones of the batch count as well");
    assert_eq!(fleet.replaced().await.len(), 200);
    claims.drain(..200);
    for (claim, claimed) in claims.iter_mut().zip(&claimed[200..]) {
        claim.since = Some(claimed.since);
    }
    claims.reverse();
    assert!(fleet.a.claim_all(&claims, 3).await.iter().all(|c| !c.replaced), "in any order");
    assert_eq!(fleet.replaced().await, [""; 0]);
    // One call may replace and be replaced.
    let claimed = fleet.b.claim_all(&[claim("x", "1", None), claim("x", "2", None), claim("x", "1", None)], 1).await;
    assert_eq!(claimed.iter().map(|c| c.replaced).collect::<Vec<_>>(), [false, true, false]);
    assert!(claimed.is_sorted_by(|x, y| x.since < y.since));
    assert_eq!(fleet.replaced().await, ["1 of x", "2 of x"]);
}

async fn what_is_released_leaves_room_and_releasing_nothing_is_no_harm(bench: &dyn Bench) {
    let mut fleet = Fleet::open(bench, Setup::USUAL).await;
    fleet.a.claim("u", "s1", 2).await;
    fleet.b.claim("u", "s2", 2).await;
    fleet.a.release(&[("u", "s1"), ("nobody", "s1"), ("u", "never"), ("u", "s1")]).await;
    fleet.a.release(&[]).await;
    fleet.b.claim("u", "s3", 2).await;
    assert_eq!(fleet.replaced().await, [""; 0]);
    fleet.a.release(&[("u", "s2")]).await;
    fleet.a.claim("u", "s4", 2).await;
    assert_eq!(fleet.replaced().await, ["s2 of u"], "nobody releases another node's session");
    fleet.b.release(&[("u", "s2"), ("u", "s3")]).await;
    fleet.a.release(&[("u", "s4")]).await;
    fleet.a.claim("u", "s5", 1).await;
    assert_eq!(fleet.replaced().await, [""; 0], "the last one out leaves nothing behind");
}

/// Claims that `node` makes so that its end can be seen: `until_gone`.
async fn be_seen(node: &Hearing) {
    for at in (0..PROBES).step_by(500) {
        let probes: Vec<_> = (at..at + 500).map(|i| claim(&format!("p{i}"), "probe", None)).collect();
        node.claim_all(&probes, 1).await;
    }
}

const PROBES: usize = 2000;

/// Waits until the backplane knows that the node of `be_seen` is gone: a dropped node's end shows a
/// little later than it happens.
async fn until_gone(seen_by: &mut Hearing) {
    for i in 0..PROBES {
        seen_by.claim(&format!("p{i}"), "probe", 1).await;
        if seen_by.replaced().await.is_empty() {
            return;
        }
        a_little().await;
    }
    panic!("the node's end never shows");
}

async fn a_dead_nodes_sessions_go_first_and_without_a_word(bench: &dyn Bench) {
    let Fleet { mut a, b, _keep, .. } = Fleet::open(bench, Setup::USUAL).await;
    let first = a.claim("u", "a1", 3).await;
    b.claim("u", "b1", 3).await;
    b.claim("u", "b2", 3).await;
    be_seen(&b).await;
    drop(b);
    until_gone(&mut a).await;
    let third = a.claim("u", "a2", 3).await;
    assert_eq!(a.replaced().await, [""; 0], "the dead go although a1 is the oldest");
    a.claim("u", "a3", 3).await;
    assert_eq!(a.replaced().await, [""; 0]);
    a.claim("u", "a4", 3).await;
    assert_eq!(a.replaced().await, ["a1 of u"]);
    let again = a.claim_all(&[claim("u", "a1", Some(first)), claim("u", "a2", Some(third))], 3).await;
    assert_eq!(again.iter().map(|c| c.replaced).collect::<Vec<_>>(), [true, false]);
}

/// A process that was killed and is started again under its name holds none of its old sessions:
/// they must not push out those of others.
async fn a_node_that_comes_back_is_another_one(bench: &dyn Bench) {
    let Fleet { mut a, b, again, _keep, .. } = Fleet::open(bench, Setup::USUAL).await;
    a.claim("u", "a1", 2).await;
    b.claim("u", "b1", 2).await;
    be_seen(&b).await;
    drop(b);
    let b = Hearing::up("b", again()).await;
    until_gone(&mut a).await;
    b.release(&[("u", "b1")]).await;
    b.claim("u", "b2", 2).await;
    assert_eq!(a.replaced().await, [""; 0], "b1 went with its process");
    a.claim("u", "a2", 2).await;
    assert_eq!(a.replaced().await, ["a1 of u"], "and b2 is there");
}

async fn what_is_no_claim_is_refused_and_changes_nothing(bench: &dyn Bench) {
    let mut fleet = Fleet::open(bench, Setup::USUAL).await;
    fleet.a.claim("u", "s", 1).await;
    for (session, since) in [("", None), (" ", None), ("a b", None), ("a\n", Some(1)), ("x", Some((1 << 53) + 2))] {
        let claims = vec![claim("u", "t", None), claim("u", session, since)];
        fleet.a.node.claim(claims, 1).await.expect_err(session);
    }
    assert_eq!(fleet.replaced().await, [""; 0]);
    let highest = [Claimed { since: 1 << 53, replaced: false }];
    assert_eq!(fleet.a.claim_all(&[claim("v", "ü", Some(1 << 53))], 1).await, highest);
}

async fn after_a_flush_claims_put_the_old_order_back(bench: &dyn Bench) {
    let mut fleet = Fleet::open(bench, Setup::USUAL).await;
    let mut places = Vec::new();
    for (i, node) in [&fleet.a, &fleet.b, &fleet.a, &fleet.b].into_iter().enumerate() {
        places.push(node.claim("u", &format!("s{i}"), 4).await);
    }
    (fleet.flush)().await;
    // One comes before the old ones are put back.
    fleet.b.claim("u", "new", 4).await;
    for i in [3, 1] {
        fleet.b.claim_all(&[claim("u", &format!("s{i}"), Some(places[i]))], 4).await;
    }
    let put_back = [claim("u", "s2", Some(places[2])), claim("u", "s0", Some(places[0]))];
    let claimed = fleet.a.claim_all(&put_back, 4).await;
    assert_eq!(claimed.iter().map(|c| c.replaced).collect::<Vec<_>>(), [false, true], "s0 is the fifth and the oldest");
    assert_eq!(fleet.replaced().await, ["s0 of u"]);
    for i in 1..4 {
        fleet.a.claim("u", &format!("t{i}"), 4).await;
        assert_eq!(fleet.replaced().await, [format!("s{i} of u")]);
    }
    fleet.a.claim("u", "t4", 4).await;
    assert_eq!(fleet.replaced().await, ["new of u"]);
}

async fn any_text_may_be_a_user(bench: &dyn Bench) {
    let mut fleet = Fleet::open(bench, Setup::USUAL).await;
    let long = "ü".repeat(128);
    let users = ["a b", " ", "a", "A", "ü", "100%", "%s%d", "*", "a:b", "{u}", "a\nb", "\"", "s1 a", "log", &long];
    for session in ["s1", "s2"] {
        for user in users {
            fleet.a.claim(user, session, 1).await;
        }
    }
    assert_eq!(fleet.replaced().await, users.map(|user| format!("s1 of {user}")));
    let all: Vec<_> = users.iter().map(|user| (*user, "s2")).collect();
    fleet.a.release(&all).await;
    for user in users {
        fleet.b.claim(user, "s3", 1).await;
    }
    assert_eq!(fleet.replaced().await, [""; 0]);
}

async fn two_nodes_at_once_never_leave_more_than_the_limit(bench: &dyn Bench) {
    const N: usize = 500;
    const MAX: u32 = 5;
    let mut fleet = Fleet::open(bench, Setup::USUAL).await;
    async fn storm(node: &Hearing) -> BTreeMap<u64, Arc<str>> {
        let mut given = BTreeMap::new();
        for i in 0..N {
            let session = format!("{}{i}", node.name);
            given.insert(node.claim("u", &session, MAX).await, session.into());
            tokio::task::yield_now().await;
        }
        given
    }
    let (of_a, of_b) = futures_util::future::join(storm(&fleet.a), storm(&fleet.b)).await;
    let places: BTreeMap<u64, Arc<str>> = of_a.into_iter().chain(of_b).collect();
    assert_eq!(places.len(), 2 * N, "no place is given twice");
    let newest: Vec<Arc<str>> = places.into_values().skip(2 * N - MAX as usize).collect();
    let replaced = fleet.replaced().await;
    assert_eq!(replaced.len(), 2 * N - MAX as usize, "one claim replaces one");
    let replaced: BTreeSet<String> = replaced.into_iter().collect();
    assert_eq!(replaced.len(), 2 * N - MAX as usize, "and nobody twice");
    assert!(newest.iter().all(|session| !replaced.contains(&format!("{session} of u"))));
    // And the backplane holds exactly these.
    fleet.a.claim("u", "last", 1).await;
    assert_eq!(fleet.replaced().await, newest.iter().map(|session| format!("{session} of u")).collect::<Vec<_>>());
}
