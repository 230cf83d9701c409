use std::ops::Range;
use std::task::Waker;

use super::*;
use crate::fleet::{Fitness, refresh};
use crate::hub::{HubConfig, Open};
use crate::outbox::Batch;
use crate::session::Attention;
use crate::testing::{Node, Testing, ends};

const fn s(n: u64) -> Duration {
    Duration::from_secs(n)
}

const AUTO: DrainConfig = DrainConfig { grace: s(5), window: Window::Auto, deadline: s(120), takes_per_second: 50.0 };

#[test]
fn the_window_fits_the_deadline_and_few_sessions_leave_at_once() {
    assert_eq!(AUTO.window_for(0, 50.0, s(3)), Duration::ZERO);
    assert_eq!(AUTO.window_for(1, 50.0, s(3)), Duration::from_millis(20));
    assert_eq!(AUTO.window_for(1_000, 50.0, s(3)), s(20));
    assert_eq!(AUTO.window_for(5_600, 50.0, s(3)), s(112));
    assert_eq!(AUTO.window_for(1_000_000, 50.0, s(3)), s(112));
    assert_eq!(AUTO.window_for(1_000_000, 0.0, s(3)), s(112));
    let fixed = DrainConfig { window: Window::Fixed(s(10)), ..AUTO };
    assert_eq!(fixed.window_for(1, 50.0, s(3)), Duration::from_millis(20));
    assert_eq!(fixed.window_for(10, 50.0, s(3)), Duration::from_millis(200));
    assert_eq!(fixed.window_for(10, 0.1, s(3)), s(10));
    assert_eq!(fixed.window_for(11, 50.0, s(3)), s(10));
    assert_eq!(fixed.window_for(40_000, 50.0, s(3)), s(10));
}

#[test]
fn who_drains_together_shares_what_the_others_take() {
    assert_eq!(AUTO.takes(400.0, 1), 200.0);
    assert_eq!(AUTO.takes(400.0, 2), 100.0);
    assert_eq!(AUTO.takes(0.0, 2), 50.0, "nobody is known");
}

/// What the first node believes of the others' taking in, and how many leave with it.
async fn takers(nodes: &[&Node]) -> (f64, usize) {
    for node in nodes.iter().rev() {
        refresh(&node.hub).await.unwrap();
    }
    nodes[0].hub.fleet.takers()
}

#[tokio::test(start_paused = true)]
async fn the_window_counts_on_those_who_are_ready_and_on_no_one_else() {
    let testing = Testing::new(0);
    let a = testing.node_like("a", |_| {}).await;
    assert_eq!(takers(&[&a]).await, (0.0, 0), "alone, it does not count on itself");
    let b = testing.node_like("b", |_| {}).await;
    let c = testing.node_like("c", |_| {}).await;
    c.metrics.accept(40.0, 200.0);
    assert_eq!(takers(&[&a, &b, &c]).await, (140.0, 0));
    c.hub.set_fitness(Fitness { is_ready: false, is_lagging: false });
    assert_eq!(takers(&[&a, &b, &c]).await, (100.0, 0));
    c.hub.set_fitness(Fitness { is_ready: true, is_lagging: false });
    b.hub.drain();
    assert_eq!(takers(&[&a, &b, &c]).await, (40.0, 1));
    // Away for good, it is still the best guess.
    a.memory.set_reachable(false);
    tokio::time::sleep(s(60)).await;
    assert_eq!(a.hub.fleet.takers(), (40.0, 1));
}

/// Ends of all of them, in seconds from the begin of the drain.
async fn drain_of(node: &Node, sessions: Vec<Open>) -> Vec<f64> {
    let began = Instant::now();
    node.hub.drain();
    let hub = node.hub.clone();
    let drained = tokio::spawn(async move { drain(&hub).await });
    let ends = ends(sessions).await;
    let seconds = ends.iter().map(|(at, reason)| {
        assert_eq!(*reason, CloseReason::Drain);
        (*at - began).as_secs_f64()
    });
    let seconds = seconds.collect();
    let drained = drained.await.unwrap();
    assert_eq!(drained.n_cut, 0);
    seconds
}

#[tokio::test(start_paused = true)]
async fn a_drain_is_as_long_as_the_others_need_and_no_second_has_more_than_its_part() {
    let testing = Testing::new(0);
    let (a, b) = (testing.node_like("a", |_| {}).await, testing.node_like("b", |_| {}).await);
    let c = testing.node_like("c", |_| {}).await;
    takers(&[&a, &b, &c]).await;
    // Two that take a hundred each: half of that for us.
    let mut ends = drain_of(&a, (0..1_000).map(|i| a.open(&i.to_string())).collect()).await;
    ends.sort_by(f64::total_cmp);
    assert!(ends[0] >= 5.0 && ends[0] < 5.5, "the grace first: {}", ends[0]);
    let length = ends[999] - 5.0;
    assert!((9.5..=10.5).contains(&length), "{length}");
    let in_second = |from: f64| ends.iter().filter(|end| (from..from + 1.0).contains(*end)).count();
    let most = (0..100).map(|i| in_second(5.0 + f64::from(i) / 10.0)).max().unwrap();
    assert!(most <= 125, "{most} in one second");
}

#[tokio::test(start_paused = true)]
async fn idle_sessions_leave_first_then_active_ones_then_busy_ones_and_who_came_late() {
    let testing = Testing::new(0);
    let a = testing.node_like("a", |config| config.drain.window = Window::Fixed(s(40))).await;
    let mut sessions: Vec<Open> = (0..40).map(|i| a.open(&i.to_string())).collect();
    tokio::time::sleep(s(60)).await;
    let now = Instant::now();
    for open in &sessions[..10] {
        open.session().lock().set_busy(now, s(60));
    }
    for open in &sessions[10..20] {
        open.session().lock().take_messages(1.0, now, &a.hub.config.session).unwrap();
    }
    let hub = a.hub.clone();
    let began = Instant::now();
    a.hub.drain();
    let drained = tokio::spawn(async move { drain(&hub).await });
    tokio::time::sleep(s(2)).await;
    sessions.extend((0..10).map(|i| a.open(&format!("late {i}"))));
    let ends = ends(sessions).await;
    // Five in each four seconds of the window, in this order.
    let within = |of: Range<usize>, from: f64| {
        for (at, _) in &ends[of] {
            let at = (*at - began).as_secs_f64() - 5.0;
            assert!((from - 0.2..=from + 8.2 + if from == 0.0 { 8.0 } else { 0.0 }).contains(&at), "{at} of {from}");
        }
    };
    within(20..40, 0.0);
    within(10..20, 16.0);
    within(0..10, 24.0);
    within(40..50, 32.0);
    assert_eq!(drained.await.unwrap().n_sessions, 50);
}

#[tokio::test(start_paused = true)]
async fn a_drain_needs_no_backplane_and_recycles_nobody() {
    let testing = Testing::new(0);
    let change = |config: &mut HubConfig| {
        config.drain.window = Window::Fixed(s(60));
        config.max_age = Some((s(20), s(20)));
    };
    let a = testing.node_like("a", change).await;
    a.memory.set_reachable(false);
    // All are of age in the midst of it.
    let ends = drain_of(&a, (0..60).map(|i| a.open(&i.to_string())).collect()).await;
    let last = ends.iter().copied().fold(0.0, f64::max);
    assert!((62.0..=65.2).contains(&last), "{last}");
}

#[tokio::test(start_paused = true)]
async fn who_does_not_answer_is_cut_at_the_deadline_and_counted() {
    let testing = Testing::new(0);
    let change = |config: &mut HubConfig| {
        config.drain = DrainConfig { deadline: s(30), window: Window::Fixed(s(20)), ..AUTO };
        // Later than the deadline: else each would be cut by its own close.
        config.session.close_timeout = s(60);
    };
    let a = testing.node_like("a", change).await;
    let mut sessions: Vec<Open> = (0..20).map(|i| a.open(&i.to_string())).collect();
    let began = Instant::now();
    a.hub.drain();
    let hub = a.hub.clone();
    let drained = tokio::spawn(async move { drain(&hub).await });
    while !drained.is_finished() {
        // Users of one digit end as they are told; the others never answer.
        sessions.retain(|open| {
            let answers = open.session().info.identity.user.as_deref().is_some_and(|user| user.len() == 1);
            match open.session().attend(Waker::noop(), &mut Batch::default()) {
                Attention::Cut => false,
                Attention::Close => !answers,
                Attention::Serve => true,
            }
        });
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    let drained = drained.await.unwrap();
    assert_eq!((drained.n_sessions, drained.n_cut), (20, 10));
    assert!(began.elapsed() >= s(30) && began.elapsed() < s(31), "{:?}", began.elapsed());
}

#[tokio::test(start_paused = true)]
async fn while_another_node_drains_recycling_waits_as_long_as_it_may() {
    let testing = Testing::new(0);
    let a = testing.node_like("a", |config| config.max_age = Some((s(60), s(60)))).await;
    let b = testing.node_like("b", |_| {}).await;
    let opened = Instant::now();
    let sessions = (0..20).map(|i| a.open(&i.to_string())).collect();
    tokio::time::sleep(s(50)).await;
    b.hub.drain();
    for (at, reason) in ends(sessions).await {
        let age = at - opened;
        assert_eq!(reason, CloseReason::Recycle);
        assert!(age >= s(119) && age <= s(60) + s(90) + Duration::from_millis(200), "{age:?}");
    }
}
