use super::view::evened;
use super::*;
use crate::backplane::{Backplane, Publish};
use crate::channel::Channel;
use crate::cursor::EventId;
use crate::testing::lines::Lines;
use crate::testing::mute::Answers;
use crate::testing::{BEGINNING, Node, Testing, until};

fn one(name: &str, n_sessions: usize, capacity: usize, phase: &str) -> NodeView {
    NodeView {
        node: name.into(),
        n_sessions,
        capacity,
        share: 0.0,
        target: 0.0,
        phase: phase.to_owned(),
        is_ready: phase == "serving",
        version: "1".to_owned(),
        age: Duration::ZERO,
    }
}

fn names(node: &Node) -> Vec<(String, usize, String)> {
    let view = node.hub.fleet();
    view.nodes.iter().map(|n| (n.node.to_string(), n.n_sessions, n.phase.clone())).collect()
}

fn row(name: &str, n: usize, phase: &str) -> (String, usize, String) {
    (name.to_owned(), n, phase.to_owned())
}

#[test]
fn shares_follow_capacity_and_whoever_leaves_has_none() {
    let nodes = vec![
        one("a", 100, 100, "serving"),
        one("b", 200, 400, "serving"),
        one("c", 300, 500, "draining"),
        one("d", 0, 1_000, "starting"),
    ];
    let (nodes, figures) = evened(nodes, 1);
    assert_eq!(nodes.iter().map(|n| n.share).collect::<Vec<_>>(), [0.2, 0.8, 0.0, 0.0]);
    assert_eq!(nodes.iter().map(|n| n.target).collect::<Vec<_>>(), [120.0, 480.0, 0.0, 0.0]);
    // Full to 1 and 1/2: mean 3/4, deviation 1/4.
    let third = 1.0 / 3.0;
    assert_eq!((figures.n_nodes, figures.n_sessions, figures.share), (4, 600, 0.8));
    assert!((figures.cv - third).abs() < 1e-9 && (figures.busiest_ratio - 4.0 * third).abs() < 1e-9, "{figures:?}");
}

#[test]
fn an_empty_and_a_leaving_fleet_have_figures_too() {
    for (nodes, share) in [
        (vec![one("a", 0, 10, "serving")], 1.0),
        (vec![one("a", 3, 10, "draining")], 0.0),
        (vec![one("a", 3, 0, "serving")], 0.0),
    ] {
        let (_, figures) = evened(nodes, 0);
        assert_eq!((figures.share, figures.cv, figures.busiest_ratio), (share, 0.0, 1.0));
    }
}

#[tokio::test(start_paused = true)]
async fn nodes_know_of_each_other_and_forget_who_is_silent() {
    let testing = Testing::new(0);
    let (a, b) = (testing.node("a").await, testing.node("b").await);
    let _open = [b.open("1"), b.open("2")];
    until("a knows of b", || names(&a) == [row("a", 0, "serving"), row("b", 2, "serving")]).await;
    assert!(a.hub.fleet().nodes[1].age <= Duration::from_secs(7));
    until("the gauges say so", || a.metrics.encode().contains("gateway_fleet_sessions 2.0")).await;
    b.memory.set_reachable(false);
    until("a forgets b", || names(&a) == [row("a", 0, "serving")]).await;
    tokio::time::sleep(Duration::from_secs(20)).await;
    assert_eq!(names(&b), [row("b", 2, "serving")], "without a backplane it knows of itself alone");
    b.memory.set_reachable(true);
    until("they meet again", || names(&a).len() == 2 && names(&b).len() == 2).await;
}

/// As of a container that was killed and started again under its name.
#[tokio::test(start_paused = true)]
async fn a_predecessors_report_is_nobodys_and_nothing_is_said() {
    let testing = Testing::new(0);
    let lines = Lines::listen();
    let killed = testing.node("a").await;
    tokio::time::sleep(Duration::from_secs(7)).await;
    killed.memory.set_reachable(false);
    let a = testing.node("a").await;
    for _ in 0..5 {
        refresh(&a.hub).await.unwrap();
        assert_eq!((names(&a), a.hub.fleet.others().unwrap()), (vec![row("a", 0, "serving")], vec![]));
        tokio::time::sleep(Duration::from_secs(3)).await;
    }
    assert_eq!(lines.with("ERROR"), [""; 0]);
}

#[tokio::test(start_paused = true)]
async fn a_name_that_two_nodes_have_is_said_once_a_minute_and_both_are_shown() {
    let testing = Testing::new(0);
    let lines = Lines::listen();
    let (a, b) = (testing.node("gw").await, testing.node("gw").await);
    let _open = [b.open("1"), b.open("2")];
    until("each knows of the other", || names(&a).len() == 2 && names(&b).len() == 2).await;
    until("as it is now", || names(&a)[1] == row("gw", 2, "serving")).await;
    assert_eq!(names(&a), [row("gw", 0, "serving"), row("gw", 2, "serving")], "the own one first");
    assert_eq!(a.hub.fleet().figures.n_sessions, 2);
    // Read at once and again: the report under the name is its own, and the other is known all the same.
    for _ in 0..3 {
        refresh(&a.hub).await.unwrap();
        assert_eq!(names(&a).len(), 2);
    }
    let said = || lines.with("GATEWAY_NODE").len();
    assert!(
        lines.with("GATEWAY_NODE").iter().all(|line| line.starts_with("ERROR ")),
        "{:?}",
        lines.with("GATEWAY_NODE")
    );
    assert_eq!(said(), 2, "each said it");
    tokio::time::sleep(Duration::from_secs(150)).await;
    assert_eq!(said(), 6, "{:?}", lines.with("GATEWAY_NODE"));
    b.memory.set_reachable(false);
    until("who is silent is forgotten", || names(&a).len() == 1).await;
    refresh(&a.hub).await.unwrap();
    assert_eq!(a.hub.fleet.others().unwrap(), []);
}

#[tokio::test(start_paused = true)]
async fn a_drain_is_told_at_once_and_the_end_leaves_no_report() {
    let testing = Testing::new(0);
    let (a, b) = (testing.node("a").await, testing.node("b").await);
    tokio::time::sleep(Duration::from_secs(7)).await;
    b.hub.drain();
    tokio::time::sleep(Duration::from_millis(1)).await;
    refresh(&a.hub).await.unwrap();
    assert_eq!(names(&a)[1], row("b", 0, "draining"));
    b.hub.shut_down().await;
    refresh(&a.hub).await.unwrap();
    assert_eq!(names(&a), [row("a", 0, "serving")]);
}

#[tokio::test(start_paused = true)]
async fn reports_of_another_form_are_not_counted_but_their_nodes_are_known() {
    let testing = Testing::new(0);
    let a = testing.node("a").await;
    let foreign = testing.log.node("z");
    for body in ["", "null", "{}", r#"{"v":2,"sessions":1}"#, "\u{0}", r#"{"v":1,"sessions":-1}"#] {
        foreign.report(body.to_owned(), Duration::from_secs(20)).await.unwrap();
        refresh(&a.hub).await.unwrap();
        assert_eq!(names(&a).len(), 1, "{body}");
        assert_eq!(a.hub.fleet.others().unwrap(), [Peer { node: "z".into(), boot: None }]);
    }
    // A later version says more.
    let mut more = serde_json::to_value(said(&a.hub)).unwrap();
    more["lag"] = serde_json::json!({"p99": 1});
    foreign.report(more.to_string(), Duration::from_secs(20)).await.unwrap();
    refresh(&a.hub).await.unwrap();
    assert_eq!(names(&a).len(), 2);
}

#[tokio::test(start_paused = true)]
async fn a_returning_client_is_told_from_a_new_one_by_what_its_cursor_could_be() {
    let testing = Testing::new(0);
    let unborn = testing.node_with("a", 1);
    unborn.memory.set_reachable(false);
    let node = testing.node("b").await;
    let event =
        Publish { channel: Channel::new("x").unwrap(), name: None, data: "1".into(), ephemeral: false, key: None };
    let id = node.memory.publish(event).await.unwrap().id.unwrap();
    refresh(&node.hub).await.unwrap();
    let birth = u64::try_from(BEGINNING.as_millis()).unwrap();
    let at = |ms| Since::After(EventId { ms, n: 1 });
    for (since, expected) in [
        (Since::After(id), true),
        (at(birth), true),
        (at(birth - 1), false),
        (at(birth + 60_000), true),
        (at(birth + 61_000), false),
        (at(u64::MAX), false),
        (Since::Now, false),
        (Since::Start, false),
        (Since::Unknown, false),
    ] {
        assert_eq!(node.hub.may_be_returning(&since), expected, "{since:?}");
    }
    assert!(unborn.hub.may_be_returning(&at(0)), "while the birth is not known no cursor is too old");
}

#[tokio::test(start_paused = true)]
async fn a_report_of_an_earlier_version_is_read_and_its_node_is_given_nobody() {
    let testing = Testing::new(0);
    let a = testing.node("a").await;
    let earlier = r#"{"v":1,"sessions":7,"capacity":10,"phase":"serving","version":"1.2.2","boot":"x","started_at":1,"accept_rate":5.0}"#;
    testing.log.node("z").report(earlier.to_owned(), Duration::from_secs(20)).await.unwrap();
    refresh(&a.hub).await.unwrap();
    let seen = a.hub.seen();
    let z = &seen.nodes[1];
    assert_eq!((&*z.node, &*z.version, z.n_sessions, z.phase), ("z", "1.2.2", 7, Some(Phase::Serving)));
    assert_eq!((z.ready_for, z.is_lagging, z.n_refused, z.n_opened), (None, false, 0, 0));
    assert_eq!(z.moved, crate::balance::Moved::default());
}

#[tokio::test(start_paused = true)]
async fn who_reads_of_another_knows_how_long_it_is_ready_and_what_it_did_lately() {
    let testing = Testing::new(0);
    let (a, b) = (testing.node("a").await, testing.node("b").await);
    tokio::time::sleep(Duration::from_secs(60)).await;
    let mut open: Vec<_> = (0..5).map(|i| b.open(&i.to_string())).collect();
    for reason in [CloseReason::Shed, CloseReason::Shed, CloseReason::Recycle, CloseReason::Drain] {
        open.pop().unwrap().end(reason);
    }
    b.metrics.refused(RefusalCode::Overloaded);
    b.metrics.refused(RefusalCode::AtCapacity);
    b.metrics.refused(RefusalCode::TokenInvalid);
    b.metrics.refused(RefusalCode::TooManyRequests);
    refresh(&b.hub).await.unwrap();
    refresh(&a.hub).await.unwrap();
    tokio::time::sleep(Duration::from_millis(500)).await;
    let seen = a.hub.seen();
    let b_is = &seen.nodes[1];
    assert_eq!(seen.nodes.iter().map(|node| &*node.node).collect::<Vec<_>>(), ["a", "b"]);
    assert_eq!((b_is.n_sessions, b_is.n_opened, b_is.n_refused), (1, 5, 2));
    assert_eq!((b_is.moved.shed, b_is.moved.recycled, b_is.moved.drained), (2, 1, 1));
    assert_eq!((b_is.age, b_is.ready_for), (Duration::from_millis(500), Some(Duration::from_millis(60_500))));
    // What it did is lately for five seconds.
    tokio::time::sleep(Duration::from_secs(7)).await;
    refresh(&b.hub).await.unwrap();
    refresh(&a.hub).await.unwrap();
    assert_eq!((a.hub.seen().nodes[1].n_opened, a.hub.seen().nodes[1].moved.shed), (0, 0));
}

#[tokio::test(start_paused = true)]
async fn readiness_is_what_the_probe_says_once_it_says_anything() {
    let testing = Testing::new(0);
    let a = testing.node("a").await;
    let s = Duration::from_secs;
    let fit = |is_ready, is_lagging| a.hub.set_fitness(Fitness { is_ready, is_lagging });
    let seen = async || {
        refresh(&a.hub).await.unwrap();
        let own = a.hub.seen().nodes[0].clone();
        (own.ready_for, own.is_lagging)
    };
    tokio::time::sleep(s(10)).await;
    assert_eq!(seen().await, (Some(s(10)), false), "it serves, and nobody said more");
    fit(true, true);
    tokio::time::sleep(s(10)).await;
    assert_eq!(seen().await, (Some(s(20)), true), "without a break");
    fit(false, false);
    assert_eq!(seen().await, (None, false));
    tokio::time::sleep(s(10)).await;
    fit(true, false);
    tokio::time::sleep(s(3)).await;
    fit(true, false);
    assert_eq!(seen().await, (Some(s(3)), false));
    a.hub.drain();
    assert_eq!(seen().await.0, None, "who leaves is not ready");
}

#[tokio::test(start_paused = true)]
async fn who_is_ready_is_shown_to_all() {
    let testing = Testing::new(0);
    let (a, b) = (testing.node("a").await, testing.node("b").await);
    let shown = async || {
        refresh(&b.hub).await.unwrap();
        refresh(&a.hub).await.unwrap();
        a.hub.fleet().nodes.iter().map(|node| node.is_ready).collect::<Vec<_>>()
    };
    assert_eq!(shown().await, [true, true]);
    b.hub.set_fitness(Fitness { is_ready: false, is_lagging: false });
    assert_eq!(shown().await, [true, false]);
    b.hub.set_fitness(Fitness { is_ready: true, is_lagging: true });
    a.hub.drain();
    assert_eq!(shown().await, [false, true]);
}

#[tokio::test(start_paused = true)]
async fn a_report_without_an_answer_is_a_failure_after_half_a_second_and_over_after_five() {
    let testing = Testing::new(0);
    let a = testing.node("a").await;
    refresh(&a.hub).await.unwrap();
    assert_eq!(a.hub.fleet.failing_since(), None);
    a.mute.set(Answers::Never);
    let hub = a.hub.clone();
    let began = Instant::now();
    let report = tokio::spawn(async move { refresh(&hub).await });
    tokio::time::sleep(Duration::from_millis(490)).await;
    assert_eq!(a.hub.fleet.failing_since(), None);
    tokio::time::sleep(Duration::from_millis(20)).await;
    assert!(a.hub.fleet.failing_since().is_some());
    let error = report.await.unwrap().unwrap_err();
    assert_eq!((error.0.as_str(), began.elapsed().as_secs()), ("it does not answer", 5));
    tokio::time::sleep(Duration::from_secs(60)).await;
    assert!(a.hub.fleet.failing_since().is_some());
    a.mute.set(Answers::AtOnce);
    until("reports go on", || a.hub.fleet.failing_since().is_none()).await;
}

#[tokio::test(start_paused = true)]
async fn what_became_of_moved_sessions_is_told_to_the_others_and_no_form_of_it_is_believed_blindly() {
    let testing = Testing::new(0);
    let a = testing.node("a").await;
    let earlier = serde_json::to_value(said(&a.hub)).unwrap();
    let foreign = testing.log.node("z");
    let moved = async |trials: serde_json::Value| {
        let mut report = earlier.clone();
        report["trials"] = trials;
        foreign.report(report.to_string(), Duration::from_secs(20)).await.unwrap();
        refresh(&a.hub).await.unwrap();
        let placing = a.hub.fleet().placing;
        (placing.n_moved, placing.n_back)
    };
    assert_eq!(moved(serde_json::json!({"moved": 7, "back": 3})).await, (7, 3));
    assert_eq!(moved(serde_json::json!({"moved": 7, "later": 3})).await, (7, 0));
    assert_eq!(moved(serde_json::json!({"moved": 3, "back": 4})).await, (0, 0));
    // A report that is not read at all is no node of ours.
    assert_eq!(moved(serde_json::json!({"moved": -1})).await, (0, 0));
    assert_eq!(a.hub.fleet().nodes.len(), 1);
}

#[tokio::test(start_paused = true)]
async fn what_cannot_be_read_or_has_expired_is_counted_and_not_guessed() {
    let testing = Testing::new(0);
    let a = testing.node("a").await;
    assert!(a.hub.seen().failing_since.is_none());
    let foreign = testing.log.node("z");
    foreign.report("gibberish".to_owned(), Duration::from_secs(20)).await.unwrap();
    refresh(&a.hub).await.unwrap();
    assert_eq!((a.hub.seen().nodes.len(), a.hub.seen().n_unreadable), (1, 1));
    a.memory.set_reachable(false);
    assert!(refresh(&a.hub).await.is_err());
    let failing = a.hub.seen().failing_since.unwrap();
    tokio::time::sleep(Duration::from_secs(25)).await;
    let seen = a.hub.seen();
    assert_eq!((seen.nodes.len(), seen.n_unreadable, seen.failing_since), (1, 0, Some(failing)));
    assert!(seen.nodes[0].age >= Duration::from_secs(25), "its own report is as old as it was sent");
    a.memory.set_reachable(true);
    refresh(&a.hub).await.unwrap();
    assert!(a.hub.seen().failing_since.is_some(), "for a moment it is remembered");
    tokio::time::sleep(Duration::from_secs(2)).await;
    assert_eq!(a.hub.seen().failing_since, None);
}
