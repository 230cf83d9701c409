//! What only this backplane does: expiry by its own clock, its memory, its faults. What every
//! backplane must do is `testkit::contract`'s to test.

use bytes::Bytes;
use proptest::prelude::*;

use super::*;
use crate::backplane::{From, GapReason};
use crate::cursor::EventId;
use crate::event::Event;

const HOUR: Duration = Duration::from_secs(3600);
const CONFIG: MemoryConfig =
    MemoryConfig { history_size: 5, history_ttl: HOUR, idempotency_ttl: Duration::from_secs(300) };

fn log_of(config: MemoryConfig) -> Arc<MemoryLog> {
    MemoryLog::new(config, Clock::at(Duration::from_secs(1_764_460_000)), Dice::seeded(1))
}

fn channel(name: &str) -> Channel {
    Channel::new(name).unwrap()
}

fn event(to: &str, data: impl Into<Bytes>) -> Publish {
    Publish { channel: channel(to), name: None, data: data.into(), ephemeral: false, key: None }
}

fn ask(channels: &[(&str, From)]) -> ReadAsk {
    ReadAsk {
        channels: channels.iter().map(|(name, from)| (channel(name), *from)).collect(),
        check: None,
        cap: 1000,
        page_events: 1000,
        page_bytes: usize::MAX,
    }
}

async fn publish(node: &Memory, to: &str) -> EventId {
    node.publish(event(to, "1")).await.unwrap().id.unwrap()
}

async fn next(link: &mut mpsc::Receiver<FromLink>) -> FromLink {
    tokio::time::timeout(Duration::from_secs(5), link.recv())
        .await
        .expect("the link says something")
        .expect("the link lives")
}

#[tokio::test(start_paused = true)]
async fn a_stream_goes_five_minutes_after_its_ttl_and_not_a_millisecond_before() {
    let node = log_of(CONFIG).node("a");
    let id = publish(&node, "c").await;
    tokio::time::advance(HOUR + log::STREAM_SLACK - Duration::from_millis(1)).await;
    assert_eq!(node.read(ask(&[("c", From::Start)])).await.unwrap().events.len(), 1);
    tokio::time::advance(Duration::from_millis(1)).await;
    let read = node.read(ask(&[("c", From::After(id))])).await.unwrap();
    assert_eq!((read.events.len(), read.facts[0].first), (0, None));
    assert_eq!(read.hole(&read.facts[0], id), Some(GapReason::Expired));
}

#[tokio::test(start_paused = true)]
async fn each_event_gives_its_stream_a_new_lease() {
    let node = log_of(CONFIG).node("a");
    publish(&node, "c").await;
    tokio::time::advance(HOUR).await;
    publish(&node, "c").await;
    tokio::time::advance(HOUR).await;
    assert_eq!(node.read(ask(&[("c", From::Start)])).await.unwrap().events.len(), 2);
}

#[tokio::test(start_paused = true)]
async fn what_is_dead_leaves_no_memory_behind_even_on_an_idle_node() {
    let log = log_of(CONFIG);
    let node = log.node("a");
    for i in 0..10_000 {
        let key = Some(format!("k{i}").into());
        node.publish(Publish { key, ..event(&format!("c{i}"), "1") }).await.unwrap();
        let revocation = Revocation { key: RevocationKey::Jti(format!("{i}").into()), before: 0 };
        node.revoke(revocation, Duration::from_secs(60)).await.unwrap();
    }
    assert_eq!(log.lock().log.held(), (10_000, 10_000, 10_000));
    tokio::time::advance(HOUR + log::STREAM_SLACK).await;
    for _ in 0..10_000 / 16 {
        node.beacon();
    }
    assert_eq!(log.lock().log.held(), (0, 0, 0));
}

#[tokio::test(start_paused = true)]
async fn a_key_is_remembered_for_its_time_and_then_may_be_used_again() {
    let log = log_of(CONFIG);
    let node = log.node("a");
    let keyed = || Publish { key: Some("k".into()), ..event("c", "1") };
    let first = node.publish(keyed()).await.unwrap();
    tokio::time::advance(CONFIG.idempotency_ttl - Duration::from_millis(1)).await;
    assert_eq!(node.publish(keyed()).await.unwrap(), Published { id: first.id, duplicate: true });
    tokio::time::advance(Duration::from_millis(1)).await;
    let second = node.publish(keyed()).await.unwrap();
    assert!(!second.duplicate && second.id > first.id);
    assert_eq!(node.publish(keyed()).await.unwrap(), Published { id: second.id, duplicate: true });
    // The sweep of the first use leaves the second alone.
    node.beacon();
    assert_eq!(log.lock().log.held().1, 1);
}

#[tokio::test(start_paused = true)]
async fn a_revocation_is_never_taken_back_by_a_weaker_one_and_ends_with_its_time() {
    let node = log_of(CONFIG).node("a");
    let key = RevocationKey::Sub("u".into());
    let revoke = |before, ttl| node.revoke(Revocation { key: key.clone(), before }, Duration::from_secs(ttl));
    revoke(200, 60).await.unwrap();
    revoke(100, 10).await.unwrap();
    tokio::time::advance(Duration::from_millis(59_999)).await;
    assert_eq!(node.revocations(vec![key.clone()]).await.unwrap(), [Some("200".to_owned())]);
    tokio::time::advance(Duration::from_millis(1)).await;
    assert_eq!(node.revocations(vec![key.clone()]).await.unwrap(), [None]);
    revoke(100, 10).await.unwrap();
    assert_eq!(node.revocations(vec![key.clone()]).await.unwrap(), [Some("100".to_owned())]);
}

#[tokio::test(start_paused = true)]
async fn without_history_ids_still_rise_and_every_older_position_has_a_hole() {
    let node = log_of(MemoryConfig { history_size: 0, ..CONFIG }).node("a");
    let (first, second) = (publish(&node, "c").await, publish(&node, "c").await);
    assert!(first < second);
    let read = node.read(ask(&[("c", From::After(first))])).await.unwrap();
    assert_eq!((read.has_history, read.events.len(), read.position), (false, 0, second));
    assert_eq!(read.hole(&read.facts[0], first), Some(GapReason::NoHistory));
    assert_eq!(read.hole(&read.facts[0], second), None);
}

#[tokio::test(start_paused = true)]
async fn positions_survive_a_clean_restart_but_not_a_torn_one_nor_a_flush() {
    let log = log_of(CONFIG);
    let node = log.node("a");
    let id = publish(&node, "c").await;
    publish(&node, "c").await;
    log.restart(Restart::Clean);
    let read = node.read(ask(&[("c", From::After(id))])).await.unwrap();
    assert_eq!((read.broken, read.events.len()), (None, 1));
    assert!(read.position > read.events[0].id.unwrap());
    assert_ne!(read.position.incarnation(), id.incarnation());
    // Beyond what the earlier life had given is beyond what is known of it.
    let ahead = EventId { ms: id.ms, n: id.n + (9 << 16) };
    assert_eq!(node.read(ask(&[("c", From::After(ahead))])).await.unwrap().broken, Some(GapReason::Reset));

    log.restart(Restart::Torn);
    assert_eq!(node.read(ask(&[("c", From::After(id))])).await.unwrap().broken, Some(GapReason::Reset));
    assert_eq!(node.read(ask(&[("c", From::Start)])).await.unwrap().events.len(), 2);

    let id = publish(&node, "c").await;
    log.flush();
    let read = node.read(ReadAsk { check: Some(id), ..ask(&[("c", From::Start)]) }).await.unwrap();
    assert_eq!((read.broken, read.events.len()), (Some(GapReason::Reset), 0));
}

#[tokio::test(start_paused = true)]
async fn a_restart_is_no_birth_and_a_flush_is() {
    let log = log_of(CONFIG);
    let node = log.node("a");
    let born = node.report(String::new(), HOUR).await.unwrap().birth_ms;
    assert_eq!(born, 1_764_460_000_000);
    tokio::time::advance(HOUR).await;
    for restart in [Restart::Clean, Restart::Torn] {
        log.restart(restart);
        let fleet = node.report(String::new(), HOUR).await.unwrap();
        assert_eq!((fleet.birth_ms, fleet.now_ms), (born, born + 3_600_000));
    }
    log.flush();
    assert_eq!(node.report(String::new(), HOUR).await.unwrap().birth_ms, born + 3_600_000);
}

#[tokio::test(start_paused = true)]
async fn a_report_lives_its_own_time_and_the_askers_and_not_a_millisecond_more() {
    let log = log_of(CONFIG);
    let (a, b) = (log.node("a"), log.node("b"));
    let [short, long] = [10, 20].map(Duration::from_secs);
    let n_heard = async |ttl| a.report("{}".to_owned(), ttl).await.unwrap().reports.len();
    b.report("{}".to_owned(), short).await.unwrap();
    tokio::time::advance(short).await;
    assert_eq!((n_heard(short).await, n_heard(long).await), (2, 2));
    tokio::time::advance(Duration::from_millis(1)).await;
    assert_eq!(n_heard(long).await, 1, "its writer's time is over");
    b.report("{}".to_owned(), long).await.unwrap();
    tokio::time::advance(short + Duration::from_millis(1)).await;
    assert_eq!(n_heard(long).await, 2);
    assert_eq!(n_heard(short).await, 1, "the asker's time is over");
    assert_eq!(log.lock().fleet.held().0, 1);
}

#[tokio::test(start_paused = true)]
async fn a_hold_ends_with_its_time_and_not_a_millisecond_before() {
    let log = log_of(CONFIG);
    let (a, b) = (log.node("a"), log.node("b"));
    let hold = a.hold(Some((HOUR, "deploy".to_owned()))).await.unwrap();
    tokio::time::advance(HOUR - Duration::from_millis(1)).await;
    assert_eq!(b.report(String::new(), HOUR).await.unwrap().hold, hold);
    tokio::time::advance(Duration::from_millis(1)).await;
    assert_eq!(b.report(String::new(), HOUR).await.unwrap().hold, None);
}

fn claims(user: &str, sessions: &[&str]) -> Vec<Claim> {
    sessions.iter().map(|s| Claim { user: user.into(), session: (*s).into(), since: None }).collect()
}

/// Who was replaced since the last look.
async fn replaced(node: &Memory, link: &mut mpsc::Receiver<FromLink>) -> Vec<Arc<str>> {
    node.tell(Some(node.name().into()), "end".to_owned()).await.unwrap();
    let mut replaced = Vec::new();
    loop {
        match next(link).await {
            FromLink::Replaced { session, .. } => replaced.push(session),
            FromLink::Told(_) => return replaced,
            _ => {}
        }
    }
}

#[tokio::test(start_paused = true)]
async fn places_end_ten_minutes_after_the_last_claim_and_not_a_millisecond_before() {
    let node = log_of(CONFIG).node("a");
    let mut link = node.link();
    node.claim(claims("u", &["s1"]), 1).await.unwrap();
    tokio::time::advance(fleet::PLACES_TTL - Duration::from_millis(1)).await;
    node.claim(claims("u", &["s2"]), 1).await.unwrap();
    assert_eq!(replaced(&node, &mut link).await, ["s1".into()]);
    tokio::time::advance(fleet::PLACES_TTL).await;
    node.claim(claims("u", &["s3"]), 1).await.unwrap();
    assert_eq!(replaced(&node, &mut link).await, []);
}

#[tokio::test(start_paused = true)]
async fn places_that_nobody_renews_leave_no_memory_behind_even_on_an_idle_node() {
    let log = log_of(CONFIG);
    let node = log.node("a");
    for i in 0..10_000 {
        node.claim(claims(&format!("u{i}"), &["s1", "s2"]), 2).await.unwrap();
    }
    node.release(vec![("u1".into(), "s1".into()), ("u1".into(), "s2".into())]).await.unwrap();
    assert_eq!(log.lock().fleet.held().1, 9_999);
    tokio::time::advance(fleet::PLACES_TTL).await;
    for _ in 0..10_000 / 16 {
        node.beacon();
    }
    assert_eq!(log.lock().fleet.held().1, 0);
}

#[tokio::test]
async fn a_node_whose_link_is_down_counts_as_gone_to_all_but_itself() {
    let log = log_of(CONFIG);
    let (a, b) = (log.node("a"), log.node("b"));
    let mut link = a.link();
    let own = a.claim(claims("u", &["a1"]), 2).await.unwrap();
    let of_b = b.claim(claims("u", &["b1"]), 2).await.unwrap();
    b.cut_link();
    b.claim(claims("u", &["b2"]), 2).await.unwrap();
    assert_eq!(replaced(&a, &mut link).await, ["a1".into()], "b's own are there to b");
    a.claim(claims("u", &["a2"]), 2).await.unwrap();
    a.claim(claims("u", &["a3"]), 2).await.unwrap();
    assert_eq!(replaced(&a, &mut link).await, [], "and gone to a");
    b.restore_link();
    let again = |session: &str, since: u64| vec![Claim { since: Some(since), ..claims("u", &[session]).remove(0) }];
    let claimed = b.claim(again("b1", of_b[0].since), 2).await.unwrap();
    assert!(claimed[0].replaced, "put back at its place, it is the oldest");
    assert!(a.claim(again("a1", own[0].since), 2).await.unwrap()[0].replaced);
    assert_eq!(replaced(&a, &mut link).await, ["b1".into(), "a1".into()]);
}

#[tokio::test(start_paused = true)]
async fn a_node_that_falls_silent_counts_as_gone_until_it_reports_again_though_its_link_stands() {
    const TTL: Duration = Duration::from_secs(20);
    let log = log_of(CONFIG);
    let (a, b) = (log.node("a"), log.node("b"));
    let mut link = a.link();
    a.claim(claims("u", &["a1"]), 2).await.unwrap();
    let of_b = b.claim(claims("u", &["b1"]), 2).await.unwrap();
    assert_eq!(b.report(String::new(), TTL).await.unwrap().before, None);
    tokio::time::advance(TTL - Duration::from_millis(1)).await;
    a.claim(claims("u", &["a2"]), 2).await.unwrap();
    assert_eq!(replaced(&a, &mut link).await, ["a1".into()], "not silent for long enough");
    tokio::time::advance(Duration::from_millis(1)).await;
    a.claim(claims("u", &["a3"]), 2).await.unwrap();
    assert_eq!(replaced(&a, &mut link).await, [], "b1 went");
    b.report(String::new(), TTL).await.unwrap();
    let again = vec![Claim { since: Some(of_b[0].since), ..claims("u", &["b1"]).remove(0) }];
    assert!(!b.claim(again, 3).await.unwrap()[0].replaced);
    a.claim(claims("u", &["a4"]), 3).await.unwrap();
    assert_eq!(replaced(&a, &mut link).await, ["b1".into()], "and stands at its old place again: the lowest");
    // Who leaves in order leaves nothing behind.
    b.retire().await.unwrap();
    assert_eq!(b.report(String::new(), TTL).await.unwrap().before, None);
}

#[tokio::test]
async fn a_text_nobody_takes_counts_with_its_length() {
    let log = log_of(CONFIG);
    let (a, b) = (log.node("a"), log.node("b"));
    let _link = a.link();
    for _ in 0..MAX_LINK_BYTES / MAX_TELL_BYTES + LINK_AHEAD {
        b.tell(Some("a".into()), "x".repeat(MAX_TELL_BYTES)).await.unwrap();
        tokio::task::yield_now().await;
    }
    assert!(!a.is_link_up());
    assert!(b.tell(None, "x".repeat(MAX_TELL_BYTES + 1)).await.is_err());
}

#[tokio::test]
async fn a_restart_loses_every_link_and_brings_it_back_in_the_new_incarnation() {
    let log = log_of(CONFIG);
    let node = log.node("a");
    let mut link = node.link();
    assert!(matches!(next(&mut link).await, FromLink::Up(_)));
    node.want(&channel("c"));
    assert!(matches!(next(&mut link).await, FromLink::Confirmed(_)));
    log.restart(Restart::Clean);
    assert!(matches!(next(&mut link).await, FromLink::Lost));
    assert!(matches!(next(&mut link).await, FromLink::Confirmed(_)));
    let FromLink::Up(position) = next(&mut link).await else { panic!("up last") };
    assert_eq!(position, node.read(ask(&[])).await.unwrap().position);
}

#[tokio::test]
async fn a_cut_link_says_so_once_hears_nothing_and_comes_back_with_all_that_is_wanted() {
    let node = log_of(CONFIG).node("a");
    let mut link = node.link();
    assert!(matches!(next(&mut link).await, FromLink::Up(_)));
    node.want(&channel("c"));
    assert!(matches!(next(&mut link).await, FromLink::Confirmed(_)));
    node.cut_link();
    node.cut_link();
    assert!(!node.is_link_up());
    let missed = publish(&node, "c").await;
    node.want(&channel("d"));
    node.unwant(&channel("c"));
    node.beacon();
    node.relink();
    node.restore_link();
    node.restore_link();
    assert!(node.is_link_up());
    assert!(matches!(next(&mut link).await, FromLink::Lost));
    assert!(matches!(next(&mut link).await, FromLink::Confirmed(c) if c == channel("d")));
    assert!(matches!(next(&mut link).await, FromLink::Up(p) if p == missed));
    let id = publish(&node, "d").await;
    assert!(matches!(next(&mut link).await, FromLink::Event(e) if e.id == Some(id)));
}

#[tokio::test]
async fn an_unreachable_node_answers_unavailable_and_still_listens() {
    let log = log_of(CONFIG);
    let (a, b) = (log.node("a"), log.node("b"));
    let mut link = a.link();
    a.want(&channel("c"));
    a.set_reachable(false);
    assert!(a.publish(event("c", "1")).await.is_err());
    assert!(a.read(ask(&[])).await.is_err());
    assert!(a.revocations(vec![]).await.is_err());
    assert!(a.report(String::new(), HOUR).await.is_err() && a.retire().await.is_err());
    assert!(a.tell(None, String::new()).await.is_err() && a.hold(None).await.is_err());
    assert!(a.claim(claims("u", &["s"]), 1).await.is_err() && a.release(vec![]).await.is_err());
    let id = publish(&b, "c").await;
    assert!(matches!(next(&mut link).await, FromLink::Up(_)));
    assert!(matches!(next(&mut link).await, FromLink::Confirmed(_)));
    assert!(matches!(next(&mut link).await, FromLink::Event(e) if e.id == Some(id)));
    a.set_reachable(true);
    assert!(a.publish(event("c", "1")).await.is_ok());
}

/// Fills a link that nobody reads to exactly its bound, and by one message over it.
#[tokio::test]
async fn a_link_is_lost_only_over_its_bound_and_comes_up_again_once_it_was_drained() {
    let log = log_of(MemoryConfig { history_size: 0, ..CONFIG });
    let (a, b) = (log.node("a"), log.node("b"));
    let mut link = a.link();
    a.want(&channel("c"));
    while link.len() < 2 {
        tokio::task::yield_now().await;
    }
    let data = Bytes::from(vec![b'1'; 64 * 1024 - MESSAGE_COST]);
    for _ in 0..LINK_AHEAD - 2 {
        b.publish(event("c", "1")).await.unwrap();
    }
    while link.len() < LINK_AHEAD {
        tokio::task::yield_now().await;
    }
    for _ in 0..MAX_LINK_BYTES / (64 * 1024) {
        b.publish(event("c", data.clone())).await.unwrap();
        assert!(a.is_link_up());
    }
    let last = publish(&b, "c").await;
    assert!(!a.is_link_up());

    let mut n_events = 0;
    loop {
        match next(&mut link).await {
            FromLink::Event(_) => n_events += 1,
            FromLink::Lost => break,
            FromLink::Up(_) | FromLink::Confirmed(_) if n_events == 0 => {}
            other => panic!("{other:?}"),
        }
    }
    assert_eq!(n_events, LINK_AHEAD - 2, "what was handed over comes, what waited is gone");
    assert!(matches!(next(&mut link).await, FromLink::Confirmed(c) if c == channel("c")));
    assert!(matches!(next(&mut link).await, FromLink::Up(p) if p == last));
    assert!(a.is_link_up());
}

#[tokio::test]
async fn a_dropped_node_leaves_the_log_and_its_link_ends() {
    let log = log_of(CONFIG);
    let node = log.node("a");
    let mut link = node.link();
    drop(node);
    while link.recv().await.is_some() {}
    assert_eq!(log.lock().nodes.len(), 0);
}

#[tokio::test]
async fn a_hub_that_is_gone_keeps_nothing_waiting() {
    let log = log_of(CONFIG);
    let node = log.node("a");
    drop(node.link());
    node.want(&channel("c"));
    while Arc::strong_count(&node.log) > 2 {
        tokio::task::yield_now().await;
    }
    publish(&node, "c").await;
    assert!(!node.is_link_up());
    assert_eq!(log.lock().nodes[node.slot].queue.len(), 0);
}

proptest! {
    /// Against the plainest way to answer: look at everything, sort, cut.
    #[test]
    fn a_read_gives_what_a_naive_one_gives(
        publishes in prop::collection::vec(0usize..4, 0..40),
        from in prop::collection::vec(0usize..45, 4),
        cap in 0usize..25,
        page_events in 1usize..12,
        page_bytes in 1usize..60,
    ) {
        let now_ms = 1_764_460_000_000;
        let mut log = Log::born(CONFIG, now_ms, 7);
        let mut positions = vec![log.position()];
        let mut all: Vec<(usize, Event)> = Vec::new();
        for (i, to) in publishes.iter().enumerate() {
            let (_, told) = log.publish(now_ms + i as u64 / 3, event(&format!("c{to}"), vec![b'1'; i % 9]));
            positions.push(log.position());
            all.push((*to, told.unwrap()));
        }
        let froms: Vec<From> = from.iter().map(|at| match at {
            0 => From::Here,
            1 => From::Start,
            at => From::After(positions[*at % positions.len()]),
        }).collect();
        let read_ask = ReadAsk {
            channels: froms.iter().enumerate().map(|(i, from)| (channel(&format!("c{i}")), *from)).collect(),
            check: None, cap, page_events, page_bytes,
        };
        let read = log.read(now_ms + 100, &read_ask);

        let mut wanted: Vec<&Event> = Vec::new();
        let mut facts = Vec::new();
        for (i, from) in froms.iter().enumerate() {
            let of_it: Vec<&Event> = all.iter().filter(|(to, _)| *to == i).map(|(_, e)| e).collect();
            let (gone, held) = of_it.split_at(of_it.len().saturating_sub(CONFIG.history_size));
            facts.push((held.first().and_then(|e| e.id), gone.last().and_then(|e| e.id)));
            wanted.extend(held.iter().filter(|e| match from {
                From::Here => false,
                From::Start => true,
                From::After(id) => e.id.unwrap() > *id,
            }));
        }
        wanted.sort_by_key(|e| e.id);
        let (cut, kept) = wanted.split_at(wanted.len().saturating_sub(cap));
        for (i, (first, evicted)) in facts.into_iter().enumerate() {
            let is_cut = cut.iter().any(|e| e.channel == read_ask.channels[i].0);
            prop_assert_eq!(read.facts[i], crate::backplane::Facts { first, evicted, cut: is_cut });
        }
        let mut page = Vec::new();
        let mut n_bytes = 0;
        for e in kept {
            n_bytes += e.data.len();
            if !page.is_empty() && (page.len() == page_events || n_bytes > page_bytes) {
                break;
            }
            page.push(e.id);
        }
        prop_assert_eq!(read.events.iter().map(|e| e.id).collect::<Vec<_>>(), page.clone());
        prop_assert_eq!(read.more, page.len() < kept.len());
        prop_assert_eq!(read.broken, None);
    }
}
