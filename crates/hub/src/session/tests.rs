use crate::channel::Channel;
use crate::event::Event;
use crate::hub::Open;
use crate::testing::{Node, Testing, identity, items, settle, until};

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

#[tokio::test(start_paused = true)]
async fn the_coming_event_counts_and_exactly_the_cap_may_wait() {
    let node = Testing::new(0).node("n").await;
    for wire in [Wire::Ws, Wire::Sse] {
        let open = live(&node, wire).await;
        let session = open.session();
        let events = events(&open, 5, 1_000);
        let size = events[0].on(wire).len();
        assert_eq!(session.offer(&events[0..=0], 0, 2 * size), Offered::Taken);
        // What is on its way counts until the kernel has it.
        let mut batch = Batch::default();
        assert_eq!(session.attend(Waker::noop(), &mut batch), Attention::Serve);
        assert_eq!(session.offer(&events[1..=1], 0, 2 * size - 1), Offered::Overflowed);
        assert_eq!(session.offer(&events[1..=1], 0, 2 * size), Offered::Taken);
        assert_eq!(session.offer(&events[2..=2], 0, 2 * size), Offered::Overflowed);
        session.progress(size - 1, true, Instant::now());
        assert_eq!(session.offer(&events[2..=2], 0, 2 * size), Offered::Overflowed, "a byte is missing");
        session.progress(1, true, Instant::now());
        assert_eq!(session.offer(&events[2..=2], 0, 2 * size), Offered::Taken);
        assert!(!session.is_overfull(2 * size) && session.is_overfull(2 * size - 1));
        // Who has nothing waiting gets a single one of any size.
        session.progress(2 * size, false, Instant::now());
        assert_eq!(session.offer(&events[3..=3], 0, 1), Offered::Taken);
        assert_eq!(session.offer(&events[4..=4], 0, 1), Offered::Overflowed);
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
