//! The contract's third about the log: ids, keys, reads, holes, incarnations.

use std::time::Duration;

use hub::backplane::{Facts, From, GapReason, Publish, Published, ReadAsk};
use hub::channel::{Channel, EventName};
use hub::cursor::EventId;

use super::{Bench, Check, Fleet, Setup, a_little, ask, channel, checks, event, ids};

pub(super) const CHECKS: &[Check] = checks![
    ids_rise_over_all_channels_and_nodes,
    an_empty_log_has_a_position_that_can_be_resumed_from,
    a_key_publishes_once_a_channel_whichever_node_is_asked,
    a_key_is_forgotten_after_its_time_however_often_it_was_repeated,
    any_text_may_be_a_key,
    an_event_is_kept_byte_for_byte,
    an_ephemeral_event_is_not_kept,
    here_start_and_after_give_nothing_all_and_the_rest,
    channels_are_kept_apart_whatever_their_names,
    the_cap_keeps_the_newest_over_all_channels_and_names_what_was_cut,
    pages_by_count_make_up_the_whole,
    pages_by_bytes_make_up_the_whole_and_never_are_empty,
    eviction_is_told_exactly,
    age_is_told_from_the_ttl_on,
    without_history_events_have_ids_and_nothing_is_kept,
    reads_under_fire_miss_nothing,
    a_position_ahead_of_the_log_is_reset,
    a_position_of_another_incarnation_is_reset,
    a_flushed_log_is_another_one,
];

async fn ids_rise_over_all_channels_and_nodes(bench: &dyn Bench) {
    let Fleet { a, b, .. } = &Fleet::open(bench, Setup::USUAL).await;
    let mut given = vec![a.position().await];
    for i in 0..60 {
        let node = if i % 3 == 0 { a } else { b };
        given.push(node.log(&channel(&format!("c{}", i % 4))).await);
    }
    assert!(given.is_sorted_by(|x, y| x < y), "{given:?}");
    assert!(given.iter().all(|id| id.incarnation() == given[0].incarnation()));
    assert!(given.iter().all(|id| id.n < 1 << 53));
    assert_eq!(a.position().await, given[60]);
    assert_eq!(b.position().await, given[60]);
}

async fn an_empty_log_has_a_position_that_can_be_resumed_from(bench: &dyn Bench) {
    let Fleet { a, b, .. } = &Fleet::open(bench, Setup::USUAL).await;
    let c = channel("c");
    let read = a.read(ask(&[(&c, From::Here)])).await;
    assert!(read.position > EventId::ZERO);
    assert_eq!((read.broken, read.facts[0], read.more), (None, Facts::default(), false));
    assert_eq!((read.ttl, read.has_history), (Setup::USUAL.history_ttl, true));
    assert!(read.now_ms >= read.position.ms);
    let id = b.log(&c).await;
    let read = b.read(ask(&[(&c, From::After(read.position))])).await;
    assert_eq!((read.broken, ids(&read.events)), (None, vec![id]));
}

async fn a_key_publishes_once_a_channel_whichever_node_is_asked(bench: &dyn Bench) {
    let mut fleet = Fleet::open(bench, Setup::USUAL).await;
    let (c, d) = (channel("c"), channel("d"));
    fleet.a.want(&c).await;
    let keyed = |to: &Channel, key: &str| Publish { key: Some(key.into()), ..event(to, "1") };
    let first = fleet.a.publish(keyed(&c, "k")).await;
    assert!(!first.duplicate);
    let again = Published { id: first.id, duplicate: true };
    assert_eq!(fleet.a.publish(keyed(&c, "k")).await, again);
    assert_eq!(fleet.b.publish(keyed(&c, "k")).await, again);
    assert!(!fleet.b.publish(keyed(&d, "k")).await.duplicate, "a key counts for its channel only");
    let other = fleet.b.publish(keyed(&c, "l")).await;
    assert!(!other.duplicate);
    let heard = fleet.a.events_until(other.id.unwrap()).await;
    assert_eq!(ids(&heard), [first.id.unwrap(), other.id.unwrap()], "a repeat is not heard again");
    assert_eq!(fleet.a.read(ask(&[(&c, From::Start)])).await.events.len(), 2);
}

async fn a_key_is_forgotten_after_its_time_however_often_it_was_repeated(bench: &dyn Bench) {
    let setup = Setup { idempotency_ttl: Duration::from_millis(300), ..Setup::USUAL };
    let Fleet { a, .. } = &Fleet::open(bench, setup).await;
    let c = channel("c");
    let keyed = || Publish { key: Some("k".into()), ..event(&c, "1") };
    let first = a.publish(keyed()).await.id.unwrap();
    let second = loop {
        let published = a.publish(keyed()).await;
        if !published.duplicate {
            break published.id.unwrap();
        }
        assert_eq!(published.id, Some(first));
        a_little().await;
    };
    assert!(second.ms >= first.ms + 300, "forgotten too early: {first}, {second}");
}

async fn any_text_may_be_a_key(bench: &dyn Bench) {
    let Fleet { a, .. } = &Fleet::open(bench, Setup::USUAL).await;
    let c = channel("c");
    for key in ["a:b", "{x}", " ", "\r\n$3\r\n", "ключ", "*", &"k".repeat(128)] {
        let keyed = || Publish { key: Some(key.into()), ..event(&c, "1") };
        let first = a.publish(keyed()).await;
        assert!(!first.duplicate, "{key:?}");
        assert_eq!(a.publish(keyed()).await, Published { id: first.id, duplicate: true }, "{key:?}");
    }
}

async fn an_event_is_kept_byte_for_byte(bench: &dyn Bench) {
    let mut fleet = Fleet::open(bench, Setup::USUAL).await;
    let c = channel("c");
    fleet.b.want(&c).await;
    let big = format!("\"{}\"", "x".repeat(64 * 1024));
    let texts = ["1", "{\"a\" : 1.10,\r\n \"b\":9007199254740993}", "\"äß\u{2028}\\u0000 EVENT KEY\"", "[]", &big];
    let mut last = EventId::ZERO;
    for (i, text) in texts.iter().enumerate() {
        let name = (i % 2 == 1).then(|| EventName::new("order.paid:v1_x-y").unwrap());
        last = fleet.a.publish(Publish { name, ..event(&c, text.to_string()) }).await.id.unwrap();
    }
    let heard = fleet.b.events_until(last).await;
    let read = fleet.a.read(ask(&[(&c, From::Start)])).await.events;
    for events in [heard, read] {
        assert_eq!(events.len(), texts.len());
        for (i, event) in events.iter().enumerate() {
            assert!(event.data == texts[i].as_bytes(), "text {i} was changed");
            assert_eq!(event.name.as_ref().map(EventName::as_str), (i % 2 == 1).then_some("order.paid:v1_x-y"));
            assert_eq!(event.channel, c);
        }
    }
}

async fn an_ephemeral_event_is_not_kept(bench: &dyn Bench) {
    let mut fleet = Fleet::open(bench, Setup::USUAL).await;
    let c = channel("c");
    fleet.b.want(&c).await;
    let name = EventName::new("typing").ok();
    let published = fleet.a.publish(Publish { ephemeral: true, name: name.clone(), ..event(&c, "{\"u\":1}") }).await;
    assert_eq!(published, Published { id: None, duplicate: false });
    let id = fleet.a.log(&c).await;
    let heard = fleet.b.events_until(id).await;
    assert_eq!(heard.iter().map(|e| e.id).collect::<Vec<_>>(), [None, Some(id)], "heard once, in its place");
    assert_eq!((&heard[0].name, &heard[0].data[..]), (&name, &b"{\"u\":1}"[..]));
    assert_eq!(ids(&fleet.a.read(ask(&[(&c, From::Start)])).await.events), [id]);
}

async fn here_start_and_after_give_nothing_all_and_the_rest(bench: &dyn Bench) {
    let Fleet { a, b, .. } = &Fleet::open(bench, Setup::USUAL).await;
    let [c, d, e, none] = ["c", "d", "e", "none"].map(channel);
    let mut given = Vec::new();
    for i in 0..12 {
        given.push(a.log([&c, &d, &e][i % 3]).await);
    }
    let read =
        b.read(ask(&[(&none, From::Start), (&d, From::After(given[4])), (&c, From::Start), (&e, From::Here)])).await;
    let expected = [0, 3, 6, 7, 9, 10].map(|i| given[i]);
    assert_eq!(ids(&read.events), expected, "merged over the channels");
    assert_eq!((read.broken, read.more, read.position), (None, false, given[11]));
    let firsts: Vec<_> = read.facts.iter().map(|f| f.first).collect();
    assert_eq!(firsts, [None, Some(given[1]), Some(given[0]), Some(given[2])], "facts in the order asked");
    assert!(read.facts.iter().all(|f| f.evicted.is_none() && !f.cut));
    // A position between two events of a channel, and the position itself.
    assert_eq!(ids(&b.read(ask(&[(&c, From::After(given[8]))])).await.events), [given[9]]);
    assert!(b.read(ask(&[(&c, From::After(given[11]))])).await.events.is_empty());
}

async fn channels_are_kept_apart_whatever_their_names(bench: &dyn Bench) {
    let Fleet { a, .. } = &Fleet::open(bench, Setup::USUAL).await;
    let long = "x".repeat(200);
    let names = ["user:1", "user:10", "User:1", "log", "conf", "live:user:1", "a,b", "a|b~c%2A", "../x", "=", &long];
    let mut given = Vec::new();
    for name in names {
        given.push(a.log(&channel(name)).await);
    }
    for (name, id) in names.iter().zip(&given) {
        assert_eq!(ids(&a.read(ask(&[(&channel(name), From::Start)])).await.events), [*id], "{name}");
    }
}

async fn the_cap_keeps_the_newest_over_all_channels_and_names_what_was_cut(bench: &dyn Bench) {
    let Fleet { a, .. } = &Fleet::open(bench, Setup::USUAL).await;
    let [old, mixed, new] = ["old", "mixed", "new"].map(channel);
    let mut given = Vec::new();
    for to in [&old, &old, &mixed, &mixed, &new, &mixed] {
        given.push(a.log(to).await);
    }
    let capped =
        |cap| ReadAsk { cap, ..ask(&[(&old, From::Start), (&mixed, From::Start), (&new, From::After(given[0]))]) };
    for (cap, cut) in [
        (7, [false, false, false]),
        (6, [false, false, false]),
        (5, [true, false, false]),
        (4, [true, false, false]),
        (3, [true, true, false]),
        (1, [true, true, true]),
        (0, [true, true, true]),
    ] {
        let read = a.read(capped(cap)).await;
        assert_eq!(ids(&read.events), given[6 - cap.min(6)..], "cap {cap}");
        assert_eq!(read.facts.iter().map(|f| f.cut).collect::<Vec<_>>(), cut, "cap {cap}");
        assert!(!read.more, "what was cut is no further page (cap {cap})");
    }
}

async fn pages_by_count_make_up_the_whole(bench: &dyn Bench) {
    let Fleet { a, .. } = &Fleet::open(bench, Setup::USUAL).await;
    let [c, d] = ["c", "d"].map(channel);
    let from = a.position().await;
    let mut given = Vec::new();
    for i in 0..20 {
        given.push(a.log([&c, &d][usize::from(i % 3 == 0)]).await);
    }
    for page_events in [1, 7, 10, 19, 20, 21] {
        let (mut at, mut got, mut n_pages) = (from, Vec::new(), 0);
        loop {
            let read = a.read(ReadAsk { page_events, ..ask(&[(&c, From::After(at)), (&d, From::After(at))]) }).await;
            assert!(read.events.len() <= page_events);
            n_pages += 1;
            got.extend(ids(&read.events));
            if !read.more {
                break;
            }
            let last = *got.last().expect("a page that is not the last holds something");
            assert!(last > at, "what was read is not given again");
            at = last;
        }
        assert_eq!((got, n_pages), (given.clone(), 20usize.div_ceil(page_events)), "pages of {page_events}");
    }
    // The cap comes before the page.
    let read = a.read(ReadAsk { cap: 3, page_events: 2, ..ask(&[(&c, From::Start), (&d, From::Start)]) }).await;
    assert_eq!((ids(&read.events), read.more), (given[17..19].to_vec(), true));
}

async fn pages_by_bytes_make_up_the_whole_and_never_are_empty(bench: &dyn Bench) {
    let Fleet { a, .. } = &Fleet::open(bench, Setup::USUAL).await;
    let c = channel("c");
    let mut given = Vec::new();
    for size in [10, 10, 50, 10, 10, 10] {
        given.push(a.publish(event(&c, "1".repeat(size))).await.id.unwrap());
    }
    let (mut at, mut pages) = (From::Start, Vec::new());
    loop {
        let read = a.read(ReadAsk { page_bytes: 30, ..ask(&[(&c, at)]) }).await;
        pages.push(read.events.len());
        at = From::After(ids(&read.events).pop().expect("at least one entry, whatever its size"));
        assert!(pages.len() <= 6, "what was read is not given again");
        if !read.more {
            break;
        }
    }
    assert_eq!(pages, [2, 1, 3]);
    assert_eq!(at, From::After(given[5]));
}

async fn eviction_is_told_exactly(bench: &dyn Bench) {
    let Fleet { a, .. } = &Fleet::open(bench, Setup { history_size: 5, ..Setup::USUAL }).await;
    let [c, d] = ["c", "d"].map(channel);
    let mut given = Vec::new();
    for _ in 0..12 {
        given.push(a.log(&c).await);
    }
    for _ in 0..5 {
        a.log(&d).await;
    }
    for n_missing in 0..12 {
        let since = given[11 - n_missing];
        let read = a.read(ask(&[(&c, From::After(since)), (&d, From::After(since))])).await;
        assert_eq!(read.broken, None);
        assert_eq!(read.facts[0].evicted, Some(given[6]));
        assert_eq!(read.facts[0].first, Some(given[7]));
        let hole = read.hole(&read.facts[0], since);
        assert_eq!(hole, (n_missing > 5).then_some(GapReason::Evicted), "{n_missing} missing of 5 kept");
        let of_c = read.events.iter().filter(|e| e.channel == c).count();
        assert_eq!(of_c, n_missing.min(5));
        assert_eq!(read.facts[1].evicted, None, "five of five is no eviction");
        assert_eq!(read.hole(&read.facts[1], since), None);
    }
}

async fn age_is_told_from_the_ttl_on(bench: &dyn Bench) {
    let ttl = Duration::from_secs(1);
    let Fleet { a, .. } = &Fleet::open(bench, Setup { history_ttl: ttl, ..Setup::USUAL }).await;
    let c = channel("c");
    let since = a.position().await;
    loop {
        let read = a.read(ask(&[(&c, From::After(since))])).await;
        assert_eq!((read.ttl, read.broken), (ttl, None));
        let age = Duration::from_millis(read.now_ms - since.ms);
        assert_eq!(read.hole(&read.facts[0], since), (age >= ttl).then_some(GapReason::Expired), "{age:?}");
        if age > ttl {
            break;
        }
        a_little().await;
    }
    let id = a.log(&c).await;
    let read = a.read(ask(&[(&c, From::After(since))])).await;
    assert_eq!(ids(&read.events), [id]);
    assert_eq!(read.hole(&read.facts[0], since), Some(GapReason::Expired), "the first kept is a TTL younger");
    assert_eq!(read.hole(&read.facts[0], id), None);
}

async fn without_history_events_have_ids_and_nothing_is_kept(bench: &dyn Bench) {
    let mut fleet = Fleet::open(bench, Setup { history_size: 0, ..Setup::USUAL }).await;
    let c = channel("c");
    fleet.b.want(&c).await;
    let from = fleet.a.position().await;
    let (first, second) = (fleet.a.log(&c).await, fleet.b.log(&c).await);
    assert!(from < first && first < second);
    assert_eq!(ids(&fleet.b.events_until(second).await), [first, second]);
    let read = fleet.a.read(ask(&[(&c, From::After(from))])).await;
    assert_eq!((read.has_history, read.broken, read.events.len(), read.more), (false, None, 0, false));
    assert_eq!(read.position, second);
    assert_eq!(read.hole(&read.facts[0], first), Some(GapReason::NoHistory));
    assert_eq!(read.hole(&read.facts[0], second), None);
}

/// Rule *atomic*: reading on from each answer's position, while others publish, gives everything
/// once and in order.
async fn reads_under_fire_miss_nothing(bench: &dyn Bench) {
    const N: usize = 300;
    let Fleet { a, b, .. } = &Fleet::open(bench, Setup::USUAL).await;
    let [c, d] = ["c", "d"].map(channel);
    let from = a.position().await;
    let fire = async {
        let mut given = Vec::new();
        for i in 0..N {
            given.push(a.log([&c, &d][i % 2]).await);
            tokio::task::yield_now().await;
        }
        given
    };
    let watch = async {
        let (mut at, mut got) = (from, Vec::new());
        while got.len() < N {
            let read = b.read(ask(&[(&c, From::After(at)), (&d, From::After(at))])).await;
            assert!(read.position >= at);
            assert_eq!((read.broken, read.more), (None, false));
            got.extend(ids(&read.events));
            at = read.position;
            tokio::task::yield_now().await;
        }
        got
    };
    let (given, got) = futures_util::future::join(fire, watch).await;
    assert_eq!(got, given);
}

async fn a_position_ahead_of_the_log_is_reset(bench: &dyn Bench) {
    let Fleet { a, .. } = &Fleet::open(bench, Setup::USUAL).await;
    let [c, d] = ["c", "d"].map(channel);
    a.log(&c).await;
    let last = a.log(&d).await;
    for ahead in [EventId { n: last.n + (1 << 16), ..last }, EventId { ms: last.ms + 3_600_000, ..last }] {
        let read = a.read(ask(&[(&c, From::Start), (&d, From::After(ahead))])).await;
        assert_eq!((read.broken, read.events.len(), read.more), (Some(GapReason::Reset), 0, false), "{ahead}");
        let read = a.read(ReadAsk { check: Some(ahead), ..ask(&[(&c, From::Start)]) }).await;
        assert_eq!((read.broken, read.events.len()), (Some(GapReason::Reset), 0), "{ahead} as the further position");
        assert_eq!(read.position, last);
    }
    let read = a.read(ReadAsk { check: Some(last), ..ask(&[(&c, From::After(last))]) }).await;
    assert_eq!(read.broken, None, "the position itself is known");
}

async fn a_position_of_another_incarnation_is_reset(bench: &dyn Bench) {
    let Fleet { a, .. } = &Fleet::open(bench, Setup::USUAL).await;
    let c = channel("c");
    let id = a.log(&c).await;
    a.log(&c).await;
    for foreign in [EventId { n: id.n ^ 1, ..id }, EventId { ms: id.ms - 1, n: id.n ^ 0xffff }] {
        let read = a.read(ask(&[(&c, From::After(foreign))])).await;
        assert_eq!((read.broken, read.events.len()), (Some(GapReason::Reset), 0), "{foreign}");
        let read = a.read(ReadAsk { check: Some(foreign), ..ask(&[(&c, From::Start)]) }).await;
        assert_eq!((read.broken, read.events.len()), (Some(GapReason::Reset), 0), "{foreign}");
    }
}

async fn a_flushed_log_is_another_one(bench: &dyn Bench) {
    let Fleet { a, b, flush, .. } = &Fleet::open(bench, Setup::USUAL).await;
    let c = channel("c");
    let keyed = || Publish { key: Some("k".into()), ..event(&c, "1") };
    let before = a.publish(keyed()).await.id.unwrap();
    flush().await;
    let read = a.read(ask(&[(&c, From::After(before))])).await;
    assert_eq!((read.broken, read.facts[0]), (Some(GapReason::Reset), Facts::default()));
    assert_ne!(read.position.incarnation(), before.incarnation());
    let after = b.publish(keyed()).await;
    assert!(!after.duplicate, "keys are forgotten too");
    let id = after.id.unwrap();
    assert_eq!(id.incarnation(), read.position.incarnation());
    let read = a.read(ask(&[(&c, From::After(read.position))])).await;
    assert_eq!((read.broken, ids(&read.events)), (None, vec![id]));
}
