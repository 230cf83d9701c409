use crate::channel::Channel;
use crate::event::{Event, Run};
use crate::hub::Open;
use crate::testing::{Kernel, Node, Testing, identity, items, settle, until};

use super::offer::{MAX_HELD_BYTES, Offered};
use super::*;

const fn secs(n: u64) -> Duration {
    Duration::from_secs(n)
}

/// A session that is live on `news` and has read all it was told.
async fn live(node: &Node, wire: Wire) -> Open {
    let open = node.open_on(wire, identity(Some("u")), &["news"]);
    settle().await;
    assert_eq!(open.session().lock().stage, Stage::Live);
    items(&open);
    open
}

/// Events of `news` behind what the session has, all of one length.
fn events(open: &Open, n: u64, n_bytes: usize) -> Vec<Arc<Encoded>> {
    let position = open.session().lock().position;
    let event = |i| Event {
        channel: Channel::new("news").unwrap(),
        id: Some(EventId { ms: position.ms + i, n: position.n }),
        name: None,
        data: format!("\"{}\"", "x".repeat(n_bytes)).into(),
    };
    (1..=n).map(|i| Encoded::new(event(i))).collect()
}

fn run(events: &[Arc<Encoded>]) -> Run {
    Run::new(events.iter().map(|encoded| encoded.event.clone()).collect())
}

fn how(cap: usize) -> Offer {
    Offer { cap, now: Instant::now(), route: Route::AtOnce }
}

fn bytes_of(events: &[Arc<Encoded>], wire: Wire) -> Vec<u8> {
    events.iter().flat_map(|event| event.on(wire).to_vec()).collect()
}

/// What the driver would write, to the last byte.
fn rest_of(open: &Open, wire: Wire) -> Vec<u8> {
    let (mut batch, mut all) = (Batch::default(), Vec::new());
    open.attend(Waker::noop(), &mut batch);
    while !batch.is_empty() {
        let mut slices = [std::io::IoSlice::new(&[]); crate::outbox::MAX_SLICES];
        let n_slices = batch.slices(wire, &mut slices);
        let bytes: Vec<u8> = slices[..n_slices].iter().flat_map(|slice| slice.to_vec()).collect();
        batch.advance(wire, bytes.len(), |_| {});
        open.progress(bytes.len(), false);
        all.extend(bytes);
        open.attend(Waker::noop(), &mut batch);
    }
    all
}

#[tokio::test(start_paused = true)]
async fn what_nothing_waits_before_goes_to_the_kernel_at_once_and_whatever_it_leaves_follows_in_order() {
    let node = Testing::new(0).node("n").await;
    for wire in [Wire::Ws, Wire::Sse] {
        for n_events in 1..=3 {
            let whole: usize = bytes_of(&events(&live(&node, wire).await, n_events, 50), wire).len();
            // The kernel takes nothing, a part that ends anywhere, or all.
            for room in 0..=whole {
                let (open, kernel) = (live(&node, wire).await, Arc::new(Kernel::default()));
                open.lend(kernel.clone());
                let events = events(&open, n_events, 50);
                kernel.make_room(room);
                let offered = open.session().offer(&run(&events), 0, &how(1 << 20));
                let mut ends = (1..=events.len()).map(|n| bytes_of(&events[..n], wire).len());
                assert_eq!(offered.n_written, ends.clone().filter(|end| *end <= room).count());
                assert_eq!(offered.rest == Rest::Passed, room == whole, "{room} of {whole}");
                assert_eq!(open.session().lock().outbox.bytes(), whole - room);
                assert_eq!(open.session().lock().position, events.last().unwrap().event.id.unwrap());
                let all = [kernel.taken(), rest_of(&open, wire)].concat();
                assert!(all == bytes_of(&events, wire) && ends.next_back() == Some(all.len()));
            }
        }
    }
}

#[tokio::test(start_paused = true)]
async fn nothing_overtakes_what_waits_or_is_being_written_and_old_or_late_events_go_nowhere() {
    let node = Testing::new(0).node("n").await;
    let (open, kernel) = (live(&node, Wire::Ws).await, Arc::new(Kernel::default()));
    open.lend(kernel.clone());
    kernel.make_room(usize::MAX);
    let events = events(&open, 6, 10);
    let offer = |i: usize| open.session().offer(&run(&events[i..=i]), 0, &how(1 << 20));
    let taken = Offered { n_written: 0, rest: Rest::Taken };
    let passed = Offered { n_written: 0, rest: Rest::Passed };
    // An answer waits: the event goes behind it.
    open.session().say(&message::pong());
    assert_eq!(offer(0), taken);
    // The driver has both in its hands: still behind them.
    let mut batch = Batch::default();
    open.attend(Waker::noop(), &mut batch);
    assert_eq!((offer(1), kernel.taken()), (taken, Vec::new()));
    let n_bytes = open.session().lock().outbox.bytes() - events[1].on(Wire::Ws).len();
    batch.advance(Wire::Ws, n_bytes, |_| {});
    open.progress(n_bytes, true);
    assert_eq!(offer(2), taken);
    assert_eq!(rest_of(&open, Wire::Ws), bytes_of(&events[1..=2], Wire::Ws));
    // Now nothing does, and what was had already is not had again.
    assert_eq!(offer(3), Offered { n_written: 1, rest: Rest::Passed });
    assert_eq!((offer(3), offer(0)), (passed, passed));
    assert_eq!(kernel.taken(), bytes_of(&events[3..=3], Wire::Ws));
    // By the driver where that was asked for.
    let by_driver = Offer { route: Route::Driver, ..how(1 << 20) };
    assert_eq!(open.session().offer(&run(&events[4..=4]), 0, &by_driver), taken);
    rest_of(&open, Wire::Ws);
    // Behind a bye nothing follows.
    open.end(CloseReason::Kicked);
    rest_of(&open, Wire::Ws);
    assert_eq!((offer(5), kernel.taken()), (passed, Vec::new()));
    // The socket is given back with the session's end.
    drop(open);
    assert_eq!(Arc::strong_count(&kernel), 1);
}

#[tokio::test(start_paused = true)]
async fn a_client_that_is_slow_in_the_midst_of_an_event_gets_the_rest_of_it_before_the_reason() {
    let node = Testing::new(0).node("n").await;
    let (open, kernel) = (live(&node, Wire::Ws).await, Arc::new(Kernel::default()));
    open.lend(kernel.clone());
    let events = events(&open, 3, 1_000);
    let size = events[0].on(Wire::Ws).len();
    kernel.make_room(10);
    assert_eq!(open.session().offer(&run(&events[..2]), 0, &how(2 * size)).rest, Rest::Taken);
    assert_eq!(open.session().offer(&run(&events[2..]), 0, &how(2 * size)).rest, Rest::Overflowed);
    open.end(CloseReason::Slow);
    let all = [kernel.taken(), rest_of(&open, Wire::Ws)].concat();
    assert_eq!(all[..size], events[0].on(Wire::Ws)[..]);
    let bye = String::from_utf8_lossy(&all[size..]);
    assert!(bye.contains("\"reason\":\"slow\"") && !bye.contains("xxx"), "{bye}");
}

#[tokio::test(start_paused = true)]
async fn the_coming_event_counts_and_exactly_the_cap_may_wait() {
    let node = Testing::new(0).node("n").await;
    for wire in [Wire::Ws, Wire::Sse] {
        let open = live(&node, wire).await;
        let session = open.session();
        let events = events(&open, 5, 1_000);
        let size = events[0].on(wire).len();
        let offer = |i: usize, cap| session.offer(&run(&events[i..=i]), 0, &how(cap)).rest;
        assert_eq!(offer(0, 2 * size), Rest::Taken);
        // What is on its way counts until the kernel has it.
        let mut batch = Batch::default();
        assert_eq!(session.attend(Waker::noop(), &mut batch), Attention::Serve);
        assert_eq!(offer(1, 2 * size - 1), Rest::Overflowed);
        assert_eq!(offer(1, 2 * size), Rest::Taken);
        assert_eq!(offer(2, 2 * size), Rest::Overflowed);
        session.progress(size - 1, true, Instant::now());
        assert_eq!(offer(2, 2 * size), Rest::Overflowed, "a byte is missing");
        session.progress(1, true, Instant::now());
        assert_eq!(offer(2, 2 * size), Rest::Taken);
        assert!(!session.is_overfull(2 * size) && session.is_overfull(2 * size - 1));
        // Who has nothing waiting gets a single one of any size.
        session.progress(2 * size, false, Instant::now());
        assert_eq!(offer(3, 1), Rest::Taken);
        assert_eq!(offer(4, 1), Rest::Overflowed);
    }
}

#[tokio::test(start_paused = true)]
async fn what_is_held_back_has_a_bound_and_what_does_not_fit_is_noted_to_be_read_again() {
    let node = Testing::new(0).node("n").await;
    let open = live(&node, Wire::Ws).await;
    // With what it costs beside its data each is 1 KiB.
    let events = events(&open, 300, 1_024 - 128 - 2);
    let n_fit = MAX_HELD_BYTES / 1_024;
    let mut held = Held::new();
    events[..n_fit].iter().for_each(|event| held.push(event));
    assert_eq!((held.events.len(), held.bytes(), held.missed), (n_fit, MAX_HELD_BYTES, EventId::ZERO));
    events[n_fit..n_fit + 2].iter().for_each(|event| held.push(event));
    assert_eq!((held.events.len(), held.bytes()), (n_fit, MAX_HELD_BYTES));
    assert_eq!(Some(held.missed), events[n_fit + 1].event.id);
    held.clear();
    assert_eq!((held.events.len(), held.bytes(), held.missed), (0, 0, EventId::ZERO));
}

async fn until_cut(open: &Open) -> Instant {
    // What is written stays in the test's hands: this client never reads.
    let mut batch = Batch::default();
    while open.attend(Waker::noop(), &mut batch) != Attention::Cut {
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    Instant::now()
}

#[tokio::test(start_paused = true)]
async fn who_is_over_the_cap_and_never_reads_is_cut_at_the_close_timeout() {
    let node = Testing::new(0).node_like("n", |config| config.session.outbox_bytes = 4_000).await;
    for wire in [Wire::Ws, Wire::Sse] {
        let (slow, other) = (live(&node, wire).await, live(&node, wire).await);
        let mut n_heard = 0;
        while slow.session().ending().is_none() {
            node.publish("news", &format!("\"{}\"", "x".repeat(990))).await;
            tokio::time::sleep(Duration::from_millis(10)).await;
            n_heard += items(&other).len();
        }
        let ended = Instant::now();
        assert_eq!((slow.session().ending(), n_heard), (Some(CloseReason::Slow), 4), "three fit, the fourth did not");
        let took = until_cut(&slow).await - ended;
        assert!(
            took >= secs(3) - Duration::from_millis(20) && took <= secs(3) + Duration::from_millis(150),
            "{took:?}"
        );
        drop(slow);
        assert_eq!(other.session().ending(), None);
    }
    assert_eq!(node.metrics.n_closed(CloseReason::Slow), 2);
}

#[tokio::test(start_paused = true)]
async fn the_write_deadline_counts_from_the_last_byte_that_went() {
    let node = Testing::new(0).node("n").await;
    let (slow, slower) = (live(&node, Wire::Ws).await, live(&node, Wire::Sse).await);
    node.publish("news", "1").await;
    settle().await;
    let mut batch = Batch::default();
    slow.attend(Waker::noop(), &mut batch);
    slow.progress(0, true);
    slower.progress(0, true);
    tokio::time::sleep(secs(9)).await;
    slow.progress(1, true);
    // Woken for another reason, it looks again and finds no room: that is no progress.
    slower.progress(0, true);
    assert_eq!((slow.session().ending(), slower.session().ending()), (None, None));
    tokio::time::sleep(Duration::from_millis(1_200)).await;
    assert_eq!((slow.session().ending(), slower.session().ending()), (None, Some(CloseReason::Slow)));
    tokio::time::sleep(Duration::from_millis(7_600)).await;
    assert_eq!(slow.session().ending(), None);
    // All of it went in the last moment: nothing is due any more.
    slow.progress(1_000, false);
    tokio::time::sleep(secs(60)).await;
    assert_eq!(slow.session().ending(), None);
}

#[tokio::test(start_paused = true)]
async fn a_burst_is_taken_whole_the_next_message_is_told_when_and_a_burst_in_debt_is_far() {
    let node = Testing::new(0).node("n").await;
    let open = live(&node, Wire::Ws).await;
    let config = &node.hub.config.session;
    let take = |cost: f64| open.session().lock().take_messages(cost, Instant::now(), config);
    assert!((0..50).all(|_| take(1.0) == Ok(())));
    assert_eq!(take(1.0), Err(Flood::Over(Duration::from_millis(100))), "ten a second");
    assert!((0..48).all(|_| matches!(take(1.0), Err(Flood::Over(_)))));
    assert_eq!(take(1.0), Err(Flood::Over(secs(5))), "a whole burst in debt");
    assert_eq!(take(1.0), Err(Flood::Far));
    // What was refused is paid for all the same; then the burst fills up and not beyond.
    tokio::time::sleep(secs(3_600)).await;
    assert!((0..50).all(|_| take(1.0) == Ok(())));
    assert!(matches!(take(1.0), Err(Flood::Over(_))));
}

/// Pings (WebSocket) or comments (SSE) among these.
fn n_beats(items: &[Item], wire: Wire) -> usize {
    let beat: &[u8] = if wire == Wire::Ws { &[0x89, 0] } else { b"3\r\n:\n\n\r\n" };
    items.iter().filter(|item| item.on(wire) == beat).count()
}

#[tokio::test(start_paused = true)]
async fn beats_go_out_at_every_interval_however_much_the_client_says() {
    let beating = |config: &mut crate::hub::HubConfig| config.session.heartbeat = secs(25);
    let node = Testing::new(0).node_like("n", beating).await;
    let (talking, stream) = (live(&node, Wire::Ws).await, live(&node, Wire::Sse).await);
    let (mut pings, mut comments) = (0, 0);
    for _ in 0..250 {
        talking.session().heard();
        tokio::time::sleep(secs(1)).await;
        pings += n_beats(&items(&talking), Wire::Ws);
        comments += n_beats(&items(&stream), Wire::Sse);
    }
    // The first is drawn from the second half of the interval.
    assert!((9..=10).contains(&pings) && (9..=10).contains(&comments), "{pings} pings, {comments} comments");
    assert_eq!((talking.session().ending(), stream.session().ending()), (None, None));
}

#[tokio::test(start_paused = true)]
async fn who_answers_no_ping_is_cut_by_its_timeout_and_not_by_the_next_interval() {
    let beating = |config: &mut crate::hub::HubConfig| config.session.heartbeat = secs(25);
    let node = Testing::new(0).node_like("n", beating).await;
    let silent = live(&node, Wire::Ws).await;
    let pinged = |open: &Open| open.session().lock().alive_by.is_some();
    until("a ping", || pinged(&silent)).await;
    let asked = Instant::now();
    let cut = until_cut(&silent).await - asked;
    assert!(cut >= secs(10) - Duration::from_millis(100) && cut <= secs(10) + Duration::from_millis(150), "{cut:?}");
    drop(silent);
    assert_eq!(node.metrics.n_closed(CloseReason::Unresponsive), 1);
    // In its last moment any sign of life will do, and the next ping has its own time.
    let late = live(&node, Wire::Ws).await;
    let late_one = late.session();
    until("a ping", || pinged(&late)).await;
    tokio::time::sleep(Duration::from_millis(9_700)).await;
    late_one.heard();
    tokio::time::sleep(secs(5)).await;
    assert_eq!(late_one.ending(), None);
}

#[tokio::test(start_paused = true)]
async fn who_reads_slowly_has_his_time_to_answer_a_ping_once_it_has_reached_him() {
    let beating = |config: &mut crate::hub::HubConfig| config.session.heartbeat = secs(25);
    let node = Testing::new(0).node_like("n", beating).await;
    let slow = live(&node, Wire::Ws).await;
    until("a ping", || slow.session().lock().alive_by.is_some()).await;
    // It stands behind much else: for a minute the kernel takes a little now and then.
    slow.progress(0, true);
    for _ in 0..12 {
        tokio::time::sleep(secs(5)).await;
        slow.progress(1, true);
        assert_eq!(slow.session().ending(), None);
    }
    slow.progress(1, false);
    let has_it = Instant::now();
    let cut = until_cut(&slow).await - has_it;
    assert!(cut >= secs(9) && cut <= secs(11), "{cut:?}");
    drop(slow);
    assert_eq!(node.metrics.n_closed(CloseReason::Unresponsive), 1);
}

/// The message rate as a count of messages that are left, in floating point.
struct Count {
    left: f64,
    at: Instant,
}

impl Count {
    fn take(&mut self, cost: f64, now: Instant, config: &SessionConfig) -> Result<(), Flood> {
        let more = (now - self.at).as_secs_f64() * config.client_rate;
        self.at = now;
        self.left = (self.left + more).min(config.client_burst) - cost;
        match self.left {
            left if left >= 0.0 => Ok(()),
            left if left < -config.client_burst => Err(Flood::Far),
            left => Err(Flood::Over(Duration::from_secs_f64(-left / config.client_rate))),
        }
    }
}

#[tokio::test(start_paused = true)]
async fn the_moment_of_the_next_burst_admits_what_a_count_of_messages_does() {
    let node = Testing::new(0).node("n").await;
    let dice = Dice::seeded(11);
    for (rate, burst) in [(1.0, 1.0), (3.0, 7.0), (7.0, 50.0), (10.0, 50.0), (10.0, 5.0), (999.0, 20.0), (1e6, 30.0)] {
        let open = live(&node, Wire::Ws).await;
        let config = SessionConfig { client_rate: rate, client_burst: burst, ..node.hub.config.session.clone() };
        let mut now = Instant::now() + secs(60);
        let mut count = Count { left: burst, at: now };
        let (mut n_taken, mut n_refused, mut n_far) = (0, 0, 0);
        for i in 0..20_000 {
            // Crowds, pauses about as long as a message takes, and rests that a burst fills up in.
            let pause = match i % 64 {
                0 => burst / rate * 3.0 * dice.unit(),
                1..32 => 0.0,
                _ => 4.0 / rate * dice.unit(),
            };
            // Who was far over the rate comes back later.
            let away = if count.left < -burst { (3.0 * burst + 9.0) / rate } else { 0.0 };
            now += Duration::from_secs_f64(pause + away);
            let cost = if dice.unit() < 0.1 { 9.0 } else { 1.0 };
            let (expected, taken) =
                (count.take(cost, now, &config), open.session().lock().take_messages(cost, now, &config));
            // Within a millionth of an edge the two may differ: one rounds there, or the other.
            let is_at_an_edge = count.left.abs() < 1e-6 || (count.left + burst).abs() < 1e-6;
            match (expected, taken) {
                (Err(Flood::Over(one)), Err(Flood::Over(other))) => {
                    assert!(one.abs_diff(other) < Duration::from_micros(1), "{one:?} or {other:?}");
                    n_refused += 1;
                }
                (expected, taken) => assert!(expected == taken || is_at_an_edge, "{i}: {expected:?}, not {taken:?}"),
            }
            n_taken += usize::from(taken.is_ok());
            n_far += usize::from(taken == Err(Flood::Far));
        }
        assert!(n_taken > 100 && n_refused > 100 && n_far > 10, "{n_taken} {n_refused} {n_far}");
    }
}

#[test]
fn an_idle_session_costs_no_more_than() {
    // What its `Arc` allocates: two counts, what is fixed, the state and its lock.
    assert_eq!(2 * size_of::<usize>() + size_of::<Session>(), 408);
    assert_eq!((size_of::<SessionInfo>(), size_of::<State>(), size_of::<Outbox>()), (64, 320, 32));
    // One for each channel.
    assert_eq!(size_of::<Option<Sub>>(), 24);
}
