//! When sessions end of the node's accord, to the instant: drain, age, token.

use std::time::Duration;

use hub::close::CloseReason;
use hub::departure::{self, Departure, Drained, Who, Window};
use serde_json::{Value, json};
use testkit::ws::{Heard, WsClient};
use tokio::io::DuplexStream;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, sleep_until};

use crate::node::{Node, ROOMY, Settings, secs, user};

/// The wheel turns so often; what is due is done at its next turn.
const TICK: Duration = Duration::from_millis(100);

/// Reads to the close and answers it. Gives the reason and when it came.
async fn end(mut client: WsClient<DuplexStream>) -> (String, Instant) {
    let (messages, code) = client.until_closed().await;
    let at = Instant::now();
    if code != 1006 {
        let _ = client.send_close(code, "").await;
    }
    (messages.last().map(|bye| bye["reason"].to_string()).unwrap_or_default(), at)
}

fn within(at: Instant, low: Instant, high: Instant) {
    assert!(at >= low && at <= high + 2 * TICK, "{:?} of {:?}", at - low, high - low);
}

#[tokio::test(start_paused = true)]
async fn a_drain_moves_an_even_part_in_every_part_of_its_window() {
    const N: u32 = 1_000;
    let mut settings = Settings::new();
    settings.hub.drain.window = Window::Fixed(secs(10));
    let node = Node::start(settings);
    let mut ends = JoinSet::new();
    for i in 0..N {
        let mut stream = node.sse(&user(&format!("u{i}"))).await;
        ends.spawn(async move {
            let retry = stream.until_end().await.pop().unwrap().retry.unwrap();
            (Instant::now(), retry)
        });
    }
    let began = Instant::now();
    let draining = departure::drain(&node.hub);
    node.hub.drain();
    let (drained, mut ends) = tokio::join!(draining, ends.join_all());
    assert_eq!(drained, Drained { n_sessions: N as usize, n_cut: 0 });
    ends.sort();
    // The i-th of n leaves in the i-th n-th of the window: no luck involved but within it.
    for (i, (at, _)) in ends.iter().enumerate() {
        let slot = secs(10) / N * i as u32;
        within(*at, began + secs(5) + slot, began + secs(5) + slot + secs(10) / N);
    }
    let mut delays: Vec<u64> = ends.iter().map(|(_, retry)| *retry).collect();
    delays.sort_unstable();
    delays.dedup();
    assert!(delays.len() > 800, "{} different delays", delays.len());
}

#[tokio::test(start_paused = true)]
async fn a_drain_of_few_waits_for_nothing_but_its_grace() {
    for n in [0, 1, 3] {
        let node = Node::start(Settings::new());
        let mut ends = JoinSet::new();
        for i in 0..n {
            ends.spawn(end(node.ws(&format!("u{i}")).await));
        }
        let began = Instant::now();
        node.hub.drain();
        let drained = departure::drain(&node.hub).await;
        assert_eq!(drained, Drained { n_sessions: n, n_cut: 0 });
        within(Instant::now(), began + secs(5), began + secs(5) + Duration::from_millis(20) * n as u32);
        assert!(ends.join_all().await.iter().all(|(reason, _)| reason == "\"drain\""));
    }
}

#[tokio::test(start_paused = true)]
async fn what_is_left_at_the_deadline_is_cut_and_counted() {
    let mut settings = Settings::new();
    settings.hub.drain.grace = secs(1);
    settings.hub.drain.deadline = secs(2);
    settings.hub.session.close_timeout = secs(60);
    let node = Node::start(settings);
    let polite = tokio::spawn(end(node.ws("polite").await));
    // Reads nothing and answers nothing.
    let deaf = node.ws_over(256, &user("deaf")).await;
    let began = Instant::now();
    node.hub.drain();
    let drained = departure::drain(&node.hub).await;
    assert_eq!(drained, Drained { n_sessions: 2, n_cut: 1 });
    assert_eq!(began.elapsed(), secs(2));
    assert_eq!(polite.await.unwrap().0, "\"drain\"");
    assert_eq!(node.metric("gateway_drain_forced_total"), 1.0);
    assert_eq!(node.n_closed("drain"), 2.0);
    drop(deaf);
}

#[tokio::test(start_paused = true)]
async fn newcomers_are_served_during_the_grace_and_refused_after_it() {
    let mut settings = Settings::new();
    settings.hub.drain.window = Window::Fixed(secs(10));
    let node = Node::start(settings);
    let began = Instant::now();
    node.hub.drain();
    let draining = departure::drain(&node.hub);
    let coming = async {
        sleep_until(began + secs(5) - TICK).await;
        let late = tokio::spawn(end(node.ws("in time").await));
        sleep_until(began + secs(5) + TICK).await;
        let refused =
            WsClient::over(node.dial(ROOMY), "n1", "/v1/ws", &[("Authorization", &*node.bearer(&user("late")))]).await;
        let refused = refused.err().unwrap();
        assert_eq!((refused.status(), &refused.json()["code"]), (503, &json!("draining")));
        late.await.unwrap()
    };
    let (drained, (reason, _)) = tokio::join!(draining, coming);
    assert_eq!((drained.n_sessions, &*reason), (1, "\"drain\""));
}

#[tokio::test(start_paused = true)]
async fn only_the_earliest_of_all_reasons_to_leave_counts() {
    let mut settings = Settings::new();
    settings.hub.max_age = Some((secs(50), secs(50)));
    let node = Node::start(settings);
    let began = Instant::now();
    let by_age = tokio::spawn(end(node.ws("age").await));
    let token = json!({"sub": "token", "exp": node.unix() + 40});
    let by_token = tokio::spawn(end(node.ws_over(ROOMY, &token).await));
    let by_ask = tokio::spawn(end(node.ws("ask").await));
    let ask = |reason, over| node.hub.depart(Departure { who: Who::User("ask".into()), reason, over });
    // Each is drawn from its span; whatever the others drew, the second one holds.
    ask(CloseReason::Shed, secs(120));
    ask(CloseReason::Kicked, secs(10));
    ask(CloseReason::Drain, secs(3_600));
    let (_, at) = by_ask.await.unwrap();
    within(at, began, began + secs(10));
    let (reason, at) = by_token.await.unwrap();
    assert_eq!(reason, "\"token_expired\"");
    within(at, began + secs(40), began + secs(40));
    let (reason, at) = by_age.await.unwrap();
    assert_eq!(reason, "\"recycle\"");
    within(at, began + secs(50), began + secs(50));
}

/// Says `busy` for `for_ms` at these seconds after the session opened; gives its age at its end.
async fn age_of_who_is_busy(node: &Node, at: impl Iterator<Item = u64>, for_ms: u64) -> Duration {
    let mut client = node.ws("busy").await;
    let opened = Instant::now();
    for at in at {
        loop {
            tokio::select! {
                () = sleep_until(opened + secs(at)) => break,
                heard = client.next() => if matches!(heard, Heard::Close { .. }) {
                    return opened.elapsed();
                }
            }
        }
        client.send_json(&json!({"type": "busy", "for_ms": for_ms})).await;
    }
    end(client).await.1 - opened
}

#[tokio::test(start_paused = true)]
async fn being_busy_puts_the_age_off_but_never_by_more_than_ninety_seconds() {
    let mut settings = Settings::new();
    settings.hub.max_age = Some((secs(60), secs(60)));
    let node = Node::start(settings);
    let about = |age: Duration, s: u64| assert!(age >= secs(s) && age <= secs(s) + 3 * TICK, "{age:?}, not {s} s");
    about(age_of_who_is_busy(&node, 0..0, 0).await, 60);
    about(age_of_who_is_busy(&node, 50..51, 30_000).await, 80);
    about(age_of_who_is_busy(&node, 10..11, 30_000).await, 60);
    about(age_of_who_is_busy(&node, (0..1_000).step_by(5), 60_000).await, 150);
    about(age_of_who_is_busy(&node, [50, 55].into_iter(), 0).await, 60);
}

#[tokio::test(start_paused = true)]
async fn tokens_that_end_together_end_their_sessions_spread_and_never_late() {
    const N: usize = 100;
    let node = Node::start(Settings::new());
    let began = Instant::now();
    let claims = |i: usize| json!({"sub": format!("u{i}"), "exp": node.unix() + 1_000});
    let mut ends = JoinSet::new();
    for i in 0..N {
        ends.spawn(end(node.ws_over(ROOMY, &claims(i)).await));
    }
    let mut at: Vec<Instant> = ends.join_all().await.into_iter().map(|(_, at)| at).collect();
    at.sort();
    within(at[0], began + secs(800), began + secs(1_000));
    within(at[N - 1], began + secs(800), began + secs(1_000));
    // A hundred draws that leave a quarter of their range empty at one end: 0.75^100.
    assert!(at[0] < began + secs(850) && at[N - 1] > began + secs(950));
    assert_eq!(node.n_closed("token_expired"), N as f64);
}

async fn renew(node: &Node, client: &mut WsClient<DuplexStream>, claims: &Value) -> Value {
    client.send_json(&json!({"type": "auth", "ref": 1, "token": node.token(claims)})).await;
    loop {
        let message = client.json().await;
        if message["ref"] == 1 {
            return message;
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_new_token_moves_the_end_and_the_warning_both_ways() {
    let node = Node::start(Settings::new());
    let began = Instant::now();
    let ending_in = |s: u64| json!({"sub": "u", "exp": node.unix() + s});
    let mut client = node.ws_over(ROOMY, &ending_in(50)).await;
    let warning = client.until("token_expiring").await.pop().unwrap();
    let left = secs(50) - began.elapsed();
    assert!(left <= secs(25) && left >= secs(25) - 2 * TICK, "{left:?}");
    assert!(warning["in_ms"].as_u64().unwrap().abs_diff(25_000) <= 200, "{warning}");

    assert_eq!(renew(&node, &mut client, &ending_in(86_400)).await["type"], "ok");
    // Far beyond the old end.
    let rest = async {
        loop {
            match client.next().await {
                Heard::Ping(_) => {}
                Heard::Text(text) if text.contains("position") => {}
                other => panic!("{other:?}"),
            }
        }
    };
    tokio::select! {
        () = rest => unreachable!(),
        () = sleep(secs(3_600)) => {}
    }
    // And back: a shorter life than the one it had.
    let renewed = Instant::now();
    assert_eq!(renew(&node, &mut client, &ending_in(30)).await["type"], "ok");
    client.until("token_expiring").await;
    within(Instant::now(), renewed + secs(15), renewed + secs(15));
    let (reason, at) = end(client).await;
    assert_eq!(reason, "\"token_expired\"");
    within(at, renewed + secs(29), renewed + secs(30));
}
