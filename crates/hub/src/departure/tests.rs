use std::ops::Range;
use std::task::Waker;

use super::*;
use crate::auth::Identity;
use crate::backplane::Publish;
use crate::channel::Channel;
use crate::fleet::{Fitness, refresh};
use crate::hub::{HubConfig, Open};
use crate::outbox::Batch;
use crate::session::Attention;
use crate::testing::lines::Lines;
use crate::testing::mute::Answers;
use crate::testing::{BEGINNING, Node, Testing, ends, identity};

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

/// What the first node believes of the others' taking in of a thousand, and how many leave with it.
async fn takers(nodes: &[&Node]) -> (f64, usize) {
    for node in nodes.iter().rev() {
        refresh(&node.hub).await.unwrap();
    }
    nodes[0].hub.fleet.takers(1_000)
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
    assert_eq!(a.hub.fleet.takers(1_000), (40.0, 1));
}

#[tokio::test(start_paused = true)]
async fn where_one_node_is_much_emptier_than_the_rest_the_window_counts_on_it_alone() {
    let testing = Testing::new(0);
    let (a, b) = (testing.node_like("a", |_| {}).await, testing.node_like("b", |_| {}).await);
    let old: Vec<Open> = (0..200).map(|i| b.open(&i.to_string())).collect();
    let c = testing.node_like("c", |_| {}).await;
    // Each accepts 100 a second. The first 200 are sent to the empty one, later ones to both.
    for (n, seconds) in [(1, 0.01), (100, 1.0), (200, 2.0), (400, 3.0), (2_200, 12.0)] {
        takers(&[&a, &b, &c]).await;
        let (accepted, _) = a.hub.fleet.takers(n);
        assert!((n as f64 / accepted - seconds).abs() < 1e-6, "{n} in {} s", n as f64 / accepted);
    }
    assert_eq!(a.hub.fleet.takers(0), (200.0, 0), "nobody has to go anywhere");
    drop(old);
    assert_eq!(takers(&[&a, &b, &c]).await, (200.0, 0));
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
    for n in [1_000, 4_000] {
        let testing = Testing::new(0);
        let (a, b) = (testing.node_like("a", |config| config.capacity = n).await, testing.node_like("b", |_| {}).await);
        let c = testing.node_like("c", |_| {}).await;
        takers(&[&a, &b, &c]).await;
        // Two that take a hundred each: half of that for us.
        let mut ends = drain_of(&a, (0..n).map(|i| a.open(&i.to_string())).collect()).await;
        ends.sort_by(f64::total_cmp);
        assert!(ends[0] >= 5.0 && ends[0] < 5.5, "the grace first: {}", ends[0]);
        let (length, window) = (ends[n - 1] - 5.0, n as f64 / 100.0);
        assert!((length / window - 1.0).abs() <= 0.05, "{length} of {window}");
        let in_second = |from: f64| ends.iter().filter(|end| (from..from + 1.0).contains(*end)).count();
        let most = (0..n / 10).map(|i| in_second(5.0 + i as f64 / 10.0)).max().unwrap();
        assert!(most <= 125, "{most} in one second");
    }
}

#[tokio::test(start_paused = true)]
async fn one_session_or_none_is_not_waited_for_beyond_the_grace() {
    for n in [0, 1, 3] {
        let a = Testing::new(0).node_like("a", |config| config.drain.window = Window::Fixed(s(60))).await;
        let began = Instant::now();
        let ends = drain_of(&a, (0..n).map(|i| a.open(&i.to_string())).collect()).await;
        assert_eq!(ends.len(), n);
        assert!(began.elapsed() >= s(5) && began.elapsed() < Duration::from_millis(5_500), "{:?}", began.elapsed());
    }
}

#[tokio::test(start_paused = true)]
async fn a_grace_that_is_too_short_is_told_with_the_one_that_would_do() {
    let lines = Lines::listen();
    let told = "the window is shorter than the other nodes bear";
    let testing = Testing::new(0);
    let deadline = |seconds| move |config: &mut HubConfig| config.drain.deadline = s(seconds);
    let (a, b) = (testing.node_like("a", deadline(20)).await, testing.node_like("b", deadline(20)).await);
    // The other takes a hundred a second, half of that is ours: 1,000 need 20 s, and 12 are there.
    takers(&[&a, &b]).await;
    drain_of(&a, (0..1_000).map(|i| a.open(&i.to_string())).collect()).await;
    let warned = lines.with(told);
    assert_eq!(warned.len(), 1, "{warned:?}");
    for figure in ["WARN", "GATEWAY_DRAIN_DEADLINE", "window_s=12", "needed_s=20", "deadline_s=29"] {
        assert!(warned[0].contains(figure), "{figure}: {}", warned[0]);
    }
    // With the deadline that it was told nobody is warned.
    let (c, d) = (testing.node_like("c", deadline(29)).await, testing.node_like("d", |_| {}).await);
    a.hub.shut_down().await;
    b.hub.shut_down().await;
    takers(&[&c, &d]).await;
    drain_of(&c, (0..1_000).map(|i| c.open(&i.to_string())).collect()).await;
    assert_eq!(lines.with(told).len(), 1, "{:?}", lines.with(told));
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
async fn while_the_backplane_is_away_nobody_is_sent_where_nobody_can_take_it_in() {
    let testing = Testing::new(0);
    let a = testing.node_like("a", |config| config.max_age = Some((s(20), s(20)))).await;
    let (aged, began) = (a.open("aged"), Instant::now());
    // Their ends are drawn from the last twenty of the hundred seconds.
    let mortal = |i: u64| Identity { expires_at: Some(BEGINNING + s(100)), ..identity(Some(&format!("m{i}"))) };
    let mortals: Vec<Open> = (0..20).map(|i| a.open_as(mortal(i), &[])).collect();
    a.memory.set_reachable(false);
    a.memory.cut_link();
    let ended = ends(mortals).await;
    assert!(
        ended.iter().all(|(at, reason)| *reason == CloseReason::TokenExpired && *at >= began + s(100)),
        "{ended:?}"
    );
    assert!(ended.iter().all(|(at, _)| *at < began + s(102)), "{ended:?}");
    // Nobody stays beyond the maximum and ninety seconds, not even now.
    let [(at, reason)] = ends(vec![aged]).await[..] else { panic!("it was one") };
    assert_eq!((reason, (at - began).as_secs()), (CloseReason::Recycle, 110));

    // And once it is back, those whose time had come go.
    a.memory.set_reachable(true);
    a.memory.restore_link();
    let aged = a.open("aged");
    a.memory.cut_link();
    tokio::time::sleep(s(60)).await;
    assert_eq!(crate::testing::endings([&aged]), [None]);
    let began = Instant::now();
    a.memory.restore_link();
    let [(at, reason)] = ends(vec![aged]).await[..] else { panic!("it was one") };
    assert_eq!(reason, CloseReason::Recycle);
    assert!(at - began <= s(33), "{:?}", at - began);
}

#[tokio::test(start_paused = true)]
async fn tokens_end_by_the_clock_as_it_was_set() {
    let testing = Testing::new(0);
    let a = testing.node("a").await;
    let lasting = |seconds| Identity { expires_at: Some(BEGINNING + s(seconds)), ..identity(Some("u")) };
    let (short, long) = (a.open_as(lasting(3_600 + 50), &[]), a.open_as(lasting(3 * 3_600), &[]));
    tokio::time::sleep(s(2)).await;
    // The machine slept for an hour.
    a.hub.clock_was_set(a.hub.clock.set(BEGINNING + s(3_602)).unwrap());
    let began = Instant::now();
    let [(at, reason)] = ends(vec![short]).await[..] else { panic!("it was one") };
    assert_eq!(reason, CloseReason::TokenExpired);
    assert!(at - began <= s(49), "{:?}", at - began);
    // And then it turned out that it had not.
    let now = a.hub.clock.unix();
    a.hub.clock_was_set(a.hub.clock.set(now - s(3_600)).unwrap());
    tokio::time::sleep(s(7_200)).await;
    assert_eq!(crate::testing::endings([&long]), [None], "at {:?}", a.hub.clock.unix() - BEGINNING);
    ends(vec![long]).await;
    assert!(a.hub.clock.unix() - BEGINNING <= s(3 * 3_600));
}

#[tokio::test(start_paused = true)]
async fn a_drain_keeps_to_its_window_though_the_backplane_never_answers() {
    let testing = Testing::new(0);
    let (a, b) = (testing.node_like("a", |_| {}).await, testing.node_like("b", |_| {}).await);
    takers(&[&a, &b]).await;
    let sessions: Vec<Open> = (0..500).map(|i| a.open(&i.to_string())).collect();
    a.mute.set(Answers::Never);
    tokio::time::sleep(s(30)).await;
    // What the other takes is known from before: fifty a second for us.
    let ends = drain_of(&a, sessions).await;
    let (first, last) = ends.iter().fold((f64::MAX, 0.0_f64), |(first, last), end| (first.min(*end), last.max(*end)));
    assert!((5.0..5.5).contains(&first) && (14.5..=15.5).contains(&last), "{first} to {last}");
    let began = Instant::now();
    a.hub.shut_down().await;
    assert!(began.elapsed() < s(3), "{:?}", began.elapsed());
}

#[tokio::test(start_paused = true)]
async fn a_position_is_no_activity_and_an_event_is_one_with_an_id_or_without() {
    let testing = Testing::new(0);
    let a = testing.node_like("a", |config| config.session.position_every = s(10)).await;
    let open = a.open_as(identity(Some("1")), &["news"]);
    let opened = Instant::now();
    tokio::time::sleep(s(5)).await;
    let before = open.session().lock().outbox.bytes();
    tokio::time::sleep(s(55)).await;
    let turn = || DrainTurn::of(open.session(), Instant::now(), Instant::now());
    assert!(open.session().lock().outbox.bytes() > before + 200, "positions were sent");
    assert_eq!((open.session().candidate().unwrap().idle_since, turn()), (opened, DrainTurn::Idle));
    for ephemeral in [false, true] {
        tokio::time::sleep(s(31)).await;
        assert_eq!(turn(), DrainTurn::Idle);
        let event =
            Publish { channel: Channel::new("news").unwrap(), name: None, data: "1".into(), ephemeral, key: None };
        a.hub.publish(event).await.unwrap();
        tokio::time::sleep(s(5)).await;
        assert_eq!(turn(), DrainTurn::Active);
    }
}

#[tokio::test(start_paused = true)]
async fn tokens_with_one_end_leave_over_a_fifth_of_their_life() {
    let a = Testing::new(0).node_like("a", |_| {}).await;
    let expires_at = BEGINNING + s(600);
    let began = Instant::now();
    let of = |i: usize| Identity { expires_at: Some(expires_at), ..identity(Some(&i.to_string())) };
    let ends = ends((0..200).map(|i| a.open_as(of(i), &[])).collect()).await;
    let mut ages: Vec<f64> = ends.iter().map(|(at, _)| (*at - began).as_secs_f64()).collect();
    ages.sort_by(f64::total_cmp);
    assert!(ends.iter().all(|(_, reason)| *reason == CloseReason::TokenExpired));
    assert!(ages[0] >= 480.0 && ages[0] < 490.0 && ages[199] > 590.0 && ages[199] <= 600.2, "{ages:?}");
    let most = ages.iter().map(|at| ages.iter().filter(|age| (*at..*at + 12.0).contains(*age)).count()).max();
    assert!(most.unwrap() <= 40, "{most:?} in a tenth of it");
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
