//! The contract's third about the link: who hears what, in which order, what a loss looks like; and
//! revocations, which travel on it.

use std::time::Duration;

use hub::backplane::{From, FromLink, Publish, Revocation, RevocationKey};
use hub::cursor::EventId;

use super::{Bench, Check, Fleet, Setup, a_little, ask, channel, checks, event, ids};

pub(super) const CHECKS: &[Check] = checks![
    a_wanted_channel_is_heard_on_every_node_in_the_order_of_ids,
    only_wanted_channels_are_heard_byte_for_byte,
    nothing_published_after_the_confirmation_is_missed,
    wanting_twice_is_confirmed_again_and_heard_once,
    many_channels_are_each_confirmed,
    what_is_unwanted_falls_silent_and_can_be_wanted_again,
    wanted_unwanted_and_wanted_at_once_is_confirmed_and_heard,
    a_beacon_follows_every_event_it_covers,
    a_new_link_is_lost_confirmed_and_up_in_this_order,
    a_link_made_anew_hears_what_comes_after,
    a_flush_shows_on_the_link_as_another_incarnation,
    a_revocation_is_stored_and_told_to_every_node,
    a_revocation_ends_with_its_time,
];

async fn a_wanted_channel_is_heard_on_every_node_in_the_order_of_ids(bench: &dyn Bench) {
    let mut fleet = Fleet::open(bench, Setup::USUAL).await;
    let channels = ["c", "d", "e"].map(channel);
    for c in &channels {
        fleet.a.want(c).await;
        fleet.b.want(c).await;
    }
    let mut given = Vec::new();
    for i in 0..90 {
        let node = if i % 2 == 0 { &fleet.a } else { &fleet.b };
        given.push(node.log(&channels[i % 3]).await);
    }
    assert_eq!(ids(&fleet.a.events_until(given[89]).await), given);
    assert_eq!(ids(&fleet.b.events_until(given[89]).await), given);
    assert!(fleet.a.node.is_link_up() && fleet.b.node.is_link_up());
}

async fn only_wanted_channels_are_heard_byte_for_byte(bench: &dyn Bench) {
    let mut fleet = Fleet::open(bench, Setup::USUAL).await;
    fleet.b.want(&channel("user:1")).await;
    fleet.a.want(&channel("user:10")).await;
    let mut last = EventId::ZERO;
    for name in ["user:1", "user:10", "User:1", "user:", "1", "user:1:x"] {
        fleet.a.publish(Publish { ephemeral: true, ..event(&channel(name), "1") }).await;
        last = fleet.a.log(&channel(name)).await;
    }
    let heard = fleet.b.events_until(last).await;
    assert_eq!(heard.len(), 2);
    assert!(heard.iter().all(|e| e.channel == channel("user:1")));
    assert!(fleet.a.events_until(last).await.iter().all(|e| e.channel == channel("user:10")));
}

/// Rule *confirm*: a read after the confirmation and the link together have everything.
async fn nothing_published_after_the_confirmation_is_missed(bench: &dyn Bench) {
    let mut fleet = Fleet::open(bench, Setup::USUAL).await;
    for round in 0..20 {
        let c = channel(&format!("c{round}"));
        let (a, b) = (&fleet.a, &mut fleet.b);
        let publish = async {
            let mut given = Vec::new();
            for _ in 0..20 {
                given.push(a.log(&c).await);
                tokio::task::yield_now().await;
            }
            given
        };
        let listen = async {
            b.want(&c).await;
            b.read(ask(&[(&c, From::Start)])).await
        };
        let (given, read) = futures_util::future::join(publish, listen).await;
        let heard = fleet.b.events_until(given[19]).await;
        let mut all = ids(&read.events);
        all.extend(ids(&heard).into_iter().filter(|id| *id > read.position));
        assert_eq!(all, given);
    }
}

async fn wanting_twice_is_confirmed_again_and_heard_once(bench: &dyn Bench) {
    let mut fleet = Fleet::open(bench, Setup::USUAL).await;
    let c = channel("c");
    fleet.a.want(&c).await;
    fleet.a.want(&c).await;
    fleet.a.node.want(&c);
    fleet.a.want(&c).await;
    let id = fleet.b.log(&c).await;
    assert_eq!(ids(&fleet.a.events_until(id).await), [id]);
}

async fn many_channels_are_each_confirmed(bench: &dyn Bench) {
    const N: usize = 3000;
    let mut fleet = Fleet::open(bench, Setup::USUAL).await;
    for i in 0..N {
        fleet.a.node.want(&channel(&format!("c{i}")));
    }
    let mut open: std::collections::HashSet<_> = (0..N).map(|i| channel(&format!("c{i}"))).collect();
    while !open.is_empty() {
        match fleet.a.next().await {
            FromLink::Confirmed(c) => {
                open.remove(&c);
            }
            FromLink::Beacon(_) => {}
            other => panic!("{other:?}"),
        }
    }
    let id = fleet.b.log(&channel("c2999")).await;
    assert_eq!(ids(&fleet.a.events_until(id).await), [id]);
}

async fn what_is_unwanted_falls_silent_and_can_be_wanted_again(bench: &dyn Bench) {
    let mut fleet = Fleet::open(bench, Setup::USUAL).await;
    let (c, d) = (channel("c"), channel("d"));
    fleet.a.want(&c).await;
    fleet.a.want(&d).await;
    fleet.a.node.unwant(&c);
    fleet.a.node.unwant(&channel("never-wanted"));
    loop {
        let id = fleet.b.log(&c).await;
        if fleet.a.events_until(id).await.is_empty() {
            break;
        }
        a_little().await;
    }
    let (of_c, of_d) = (fleet.b.log(&c).await, fleet.b.log(&d).await);
    assert_eq!(ids(&fleet.a.events_until(of_d).await), [of_d], "silent stays silent: {of_c}");
    fleet.a.want(&c).await;
    let id = fleet.b.log(&c).await;
    assert_eq!(ids(&fleet.a.events_until(id).await), [id]);
}

/// Rule *gen*: after the last want is confirmed the channel is heard, whatever preceded it: nothing yet,
/// or a confirmation. One that waits in the link is heard before the channel is wanted again, as the hub
/// does it, for it says of which want it is no more than any other.
async fn wanted_unwanted_and_wanted_at_once_is_confirmed_and_heard(bench: &dyn Bench) {
    let mut fleet = Fleet::open(bench, Setup::USUAL).await;
    for round in 0..50 {
        let c = channel(&format!("c{round}"));
        match round % 2 {
            0 => fleet.a.node.want(&c),
            _ => fleet.a.want(&c).await,
        }
        fleet.a.node.unwant(&c);
        fleet.a.hear_what_waits();
        fleet.a.want(&c).await;
        let id = fleet.b.log(&c).await;
        assert_eq!(ids(&fleet.a.events_until(id).await), [id], "round {round}");
    }
}

/// Rule *barrier*.
async fn a_beacon_follows_every_event_it_covers(bench: &dyn Bench) {
    let mut fleet = Fleet::open(bench, Setup::USUAL).await;
    let (c, d) = (channel("c"), channel("d"));
    fleet.a.want(&c).await;
    for _ in 0..20 {
        let first = fleet.b.log(&c).await;
        let last = fleet.b.log(&c).await;
        assert_eq!(ids(&fleet.a.events_until(last).await), [first, last]);
        // Events of channels that are not wanted move the beacon as well.
        let unheard = fleet.b.log(&d).await;
        assert!(fleet.a.events_until(unheard).await.is_empty());
    }
    for _ in 0..1000 {
        fleet.a.node.beacon();
    }
    let end = fleet.b.log(&c).await;
    assert_eq!(ids(&fleet.a.events_until(end).await), [end], "many beacons are no harm");
}

async fn a_new_link_is_lost_confirmed_and_up_in_this_order(bench: &dyn Bench) {
    let mut fleet = Fleet::open(bench, Setup::USUAL).await;
    let [c, d, gone] = ["c", "d", "gone"].map(channel);
    for wanted in [&c, &d, &gone] {
        fleet.a.want(wanted).await;
    }
    fleet.a.node.unwant(&gone);
    for round in 0..3 {
        let last = fleet.b.log(&c).await;
        fleet.a.node.relink();
        loop {
            match fleet.a.next().await {
                FromLink::Lost => break,
                FromLink::Event(_) | FromLink::Beacon(_) | FromLink::Confirmed(_) => {}
                other => panic!("round {round}: {other:?} before Lost"),
            }
        }
        let mut confirmed = Vec::new();
        let position = loop {
            match fleet.a.next().await {
                FromLink::Confirmed(c) => confirmed.push(c),
                FromLink::Beacon(_) => {}
                FromLink::Up(position) => break position,
                other => panic!("round {round}: {other:?} before the new link is up"),
            }
        };
        confirmed.sort();
        confirmed.dedup();
        assert_eq!(confirmed, [c.clone(), d.clone()], "round {round}");
        assert!(position >= last);
        assert!(fleet.a.node.is_link_up());
    }
}

async fn a_link_made_anew_hears_what_comes_after(bench: &dyn Bench) {
    let mut fleet = Fleet::open(bench, Setup::USUAL).await;
    let c = channel("c");
    fleet.a.want(&c).await;
    fleet.a.node.relink();
    while !matches!(fleet.a.next().await, FromLink::Up(_)) {}
    let id = fleet.b.log(&c).await;
    assert_eq!(ids(&fleet.a.events_until(id).await), [id]);
}

/// Rule *agree*: a node learns from its own beacon that the log is another one.
async fn a_flush_shows_on_the_link_as_another_incarnation(bench: &dyn Bench) {
    let mut fleet = Fleet::open(bench, Setup::USUAL).await;
    let before = fleet.b.log(&channel("c")).await;
    fleet.a.events_until(before).await;
    (fleet.flush)().await;
    let position = fleet.b.position().await;
    loop {
        fleet.a.node.beacon();
        match fleet.a.next().await {
            FromLink::Beacon(at) | FromLink::Up(at) if at.incarnation() == position.incarnation() => break,
            FromLink::Beacon(_) | FromLink::Up(_) | FromLink::Lost => {}
            other => panic!("{other:?}"),
        }
    }
}

async fn a_revocation_is_stored_and_told_to_every_node(bench: &dyn Bench) {
    let mut fleet = Fleet::open(bench, Setup::USUAL).await;
    let ttl = Duration::from_secs(3600);
    let [jti, sid, sub, other] = [
        RevocationKey::Jti("j: 1".into()),
        RevocationKey::Sid("s".into()),
        RevocationKey::Sub("ü*".into()),
        RevocationKey::Sub("s".into()),
    ];
    let made =
        [(&jti, 0), (&sid, 0), (&sub, 1_764_460_000)].map(|(key, before)| Revocation { key: key.clone(), before });
    for revocation in &made {
        fleet.a.node.revoke(revocation.clone(), ttl).await.expect("the log can be reached");
    }
    for node in [&mut fleet.a, &mut fleet.b] {
        let mut told = Vec::new();
        while told.len() < made.len() {
            match node.next().await {
                FromLink::Revoked(revocation) => told.push(revocation),
                FromLink::Beacon(_) => {}
                other => panic!("{other:?}"),
            }
        }
        for (told, made) in told.iter().zip(&made) {
            assert_eq!(told.key, made.key, "node {}: in the order made", node.name);
            if let RevocationKey::Sub(_) = made.key {
                assert_eq!(told.before, made.before);
            }
        }
        let keys = vec![other.clone(), sub.clone(), jti.clone(), sid.clone(), jti.clone()];
        let found = node.node.revocations(keys).await.expect("the log can be reached");
        assert_eq!(found.iter().map(Option::is_some).collect::<Vec<_>>(), [false, true, true, true, true]);
        assert_eq!(found[1].as_deref(), Some("1764460000"));
        assert!(node.node.revocations(Vec::new()).await.expect("nothing asked").is_empty());
    }
}

async fn a_revocation_ends_with_its_time(bench: &dyn Bench) {
    let Fleet { a, b, .. } = &Fleet::open(bench, Setup::USUAL).await;
    let key = RevocationKey::Jti("j".into());
    let started = a.read(ask(&[])).await.now_ms;
    a.node.revoke(Revocation { key: key.clone(), before: 0 }, Duration::from_secs(1)).await.expect("it can be reached");
    while b.node.revocations(vec![key.clone()]).await.expect("it can be reached")[0].is_some() {
        a_little().await;
    }
    let ended = a.read(ask(&[])).await.now_ms;
    assert!(ended >= started + 990, "ended after {} ms", ended - started);
}
