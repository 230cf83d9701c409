//! Whose turn it is, after what, and for how long.

use super::*;

fn subscribe(open: &Open, reference: impl Into<Value>, channel: &str) {
    say(open, &json!({"type": "subscribe", "ref": reference.into(), "channel": channel}));
}

fn unsubscribe(open: &Open, reference: impl Into<Value>, channel: &str) {
    say(open, &json!({"type": "unsubscribe", "ref": reference.into(), "channel": channel}));
}

async fn millis(n: u64) {
    tokio::time::sleep(Duration::from_millis(n)).await;
}

#[tokio::test(start_paused = true)]
async fn a_channel_is_judged_by_the_token_that_was_sent_before_it() {
    let node = Testing::new(0).node("n").await;
    let open = holder(&node, json!({"channels": ["a"], "subscribe": ["old"]})).await;
    auth(&open, &json!({"channels": ["a"], "subscribe": ["room:*"]}));
    subscribe(&open, 1, "room:1");
    subscribe(&open, 2, "old");
    settle().await;
    assert_eq!(words(&said(&open)), ["ok auth", "ok 1 room:1", "error 2 forbidden"]);
    // One that is not good changes nothing.
    let revoked = Revocation { key: RevocationKey::Jti("bad".into()), before: 0 };
    node.memory.revoke(revoked, Duration::from_secs(600)).await.unwrap();
    auth(&open, &json!({"channels": ["a"], "subscribe": ["*"], "jti": "bad"}));
    subscribe(&open, 3, "other");
    subscribe(&open, 4, "room:2");
    settle().await;
    assert_eq!(words(&said(&open)), ["error auth token_revoked", "error 3 forbidden", "ok 4 room:2"]);
    // With nothing under way the answer is known at once.
    subscribe(&open, 5, "other");
    assert_eq!(words(&said(&open)), ["error 5 forbidden"]);
}

#[tokio::test(start_paused = true)]
async fn what_is_asked_for_after_a_token_comes_after_what_that_joins() {
    let node = Testing::new(0).node("n").await;
    let open = holder(&node, json!({"channels": ["a"]})).await;
    auth(&open, &json!({"channels": ["a", "b", "c"]}));
    unsubscribe(&open, 1, "b");
    auth(&open, &json!({"channels": ["a", "b", "c", "d"], "subscribe": ["*"]}));
    subscribe(&open, 2, "e");
    settle().await;
    assert_eq!(words(&said(&open)), ["ok auth", "ok auth", "ok b", "ok c", "ok 1 b", "ok d", "ok 2 e"]);
    for channel in ["a", "b", "c", "d", "e"] {
        node.publish(channel, "1").await;
    }
    settle().await;
    assert_eq!(words(&said(&open)), ["event a 1", "event c 1", "event d 1", "event e 1"]);
}

#[tokio::test(start_paused = true)]
async fn a_token_that_is_not_settled_in_time_is_waited_for_no_longer() {
    let node = Testing::new(0).node("n").await;
    let open = holder(&node, json!({"channels": ["a"], "subscribe": ["*"]})).await;
    auth(&open, &json!({"channels": ["a"], "subscribe": ["*"]}));
    settle().await;
    assert_eq!(words(&said(&open)), ["ok auth"]);
    assert!(open.session().lock().asks.is_none(), "nothing is kept of it");
    node.mute.set(Answers::Never);
    auth(&open, &json!({"channels": ["a"], "subscribe": ["*"]}));
    unsubscribe(&open, 1, "a");
    subscribe(&open, 2, "b");
    subscribe(&open, 3, "user:u");
    millis(900).await;
    assert_eq!(words(&said(&open)), Vec::<String>::new());
    millis(1_200).await;
    let mut answers = words(&said(&open));
    answers.sort();
    // What needs nobody is done all the same.
    assert_eq!(answers, ["error 2 unavailable", "error auth unavailable", "ok 1 a", "ok 3 user:u"]);
    // Nor of this, also where the session ends meanwhile.
    assert!(open.session().lock().asks.is_none());
    auth(&open, &json!({"channels": ["a"]}));
    open.end(CloseReason::Kicked);
    millis(2_000).await;
    assert!(open.session().lock().asks.is_none());
}

#[tokio::test(start_paused = true)]
async fn what_a_token_takes_to_be_checked_is_no_delay_of_the_backplane() {
    let node = Testing::new(0).node("n").await;
    let open = holder(&node, json!({"channels": ["a"]})).await;
    node.mute.set(Answers::After(Duration::from_millis(700)));
    auth(&open, &json!({"channels": ["a"], "subscribe": ["*"]}));
    subscribe(&open, 1, "b");
    subscribe(&open, 2, "c");
    millis(3_000).await;
    assert_eq!(words(&said(&open)), ["ok auth", "ok 1 b", "ok 2 c"]);
}

#[tokio::test(start_paused = true)]
async fn a_token_that_a_later_one_has_overtaken_is_not_waited_for() {
    let node = Testing::new(0).node("n").await;
    let open = holder(&node, json!({"channels": ["a"], "subscribe": ["*"]})).await;
    node.mute.set(Answers::Never);
    auth(&open, &json!({"channels": ["a"], "subscribe": ["*"]}));
    let narrower = node.hub.verifier.verify(&token(&json!({"channels": ["a"]})), BEGINNING).unwrap();
    node.hub.replace_identity(open.session(), &narrower, 2);
    subscribe(&open, 1, "b");
    assert_eq!(words(&said(&open)), ["error 1 forbidden"]);
}

#[tokio::test(start_paused = true)]
async fn what_is_left_while_the_link_is_away_is_not_joined_when_it_is_back() {
    let node = Testing::new(0).node("n").await;
    let open = holder(&node, json!({"channels": ["a"]})).await;
    node.memory.cut_link();
    settle().await;
    auth(&open, &json!({"channels": ["a", "b", "c"]}));
    // Both have had a turn in vain.
    millis(1_500).await;
    unsubscribe(&open, 1, "b");
    millis(1_500).await;
    node.memory.restore_link();
    millis(1_500).await;
    assert_eq!(words(&said(&open)), ["ok auth", "ok 1 b", "ok c"]);
}

#[tokio::test(start_paused = true)]
async fn many_granted_channels_hold_up_an_answer_no_longer_than_one() {
    let node = Testing::new(0).node("n").await;
    let open = holder(&node, json!({"channels": ["a"], "subscribe": ["*"]})).await;
    node.memory.cut_link();
    settle().await;
    let joined: Vec<String> = (0..8).map(|i| format!("b{i}")).collect();
    auth(&open, &json!({"channels": joined, "subscribe": ["*"]}));
    settle().await;
    said(&open);
    subscribe(&open, 1, "c");
    millis(1_050).await;
    assert_eq!(words(&said(&open)), ["error 1 unavailable"]);
    node.memory.restore_link();
    millis(1_050).await;
    let n_joined = said(&open).iter().filter(|m| m["type"] == "ok").count();
    assert_eq!(n_joined, 8);
}

/// A node of small pages, whose clients may send as fast as they like but no more than ten at once.
async fn of_small_pages() -> Node {
    let change = |config: &mut crate::hub::HubConfig| {
        (config.session.client_rate, config.session.client_burst) = (1e6, 10.0);
        config.session.outbox_bytes = 16_000;
    };
    let node = Testing::new(0).node_like("n", change).await;
    for _ in 0..10 {
        node.publish("long", &format!("\"{}\"", "x".repeat(990))).await;
    }
    node
}

/// A replay of several pages is under way, whose client has yet to read the first.
async fn in_a_replay(node: &Node) -> Open {
    let open = holder(node, json!({"subscribe": ["*"]})).await;
    say(&open, &json!({"type": "subscribe", "ref": "long", "channel": "long", "since": "0"}));
    settle().await;
    open
}

#[tokio::test(start_paused = true)]
async fn who_stands_behind_a_long_replay_has_the_backplanes_whole_time_when_its_turn_comes() {
    let node = of_small_pages().await;
    let open = in_a_replay(&node).await;
    subscribe(&open, 1, "b");
    millis(1).await;
    say(&open, &json!({"type": "subscribe", "ref": 2, "channel": "c", "since": "0"}));
    node.mute.set(Answers::After(Duration::from_millis(600)));
    let mut answers = Vec::new();
    for _ in 0..20 {
        millis(700).await;
        answers.extend(said(&open).into_iter().filter(|m| m["type"] != "event"));
    }
    assert_eq!(words(&answers), ["ok long long", "ok 1 b", "ok 2 c"]);
}

#[tokio::test(start_paused = true)]
async fn while_the_backplane_is_away_every_ask_has_its_answer_within_its_time() {
    let node = Testing::new(0).node("n").await;
    let open = holder(&node, json!({"subscribe": ["*"]})).await;
    node.memory.cut_link();
    settle().await;
    for i in 0..20 {
        subscribe(&open, i, &format!("c{i}"));
        tokio::task::yield_now().await;
    }
    assert_eq!(words(&said(&open)), Vec::<String>::new());
    millis(1_100).await;
    let late: Vec<String> = (0..20).map(|i| format!("error {i} unavailable")).collect();
    assert_eq!(words(&said(&open)), late, "all within their one second");
}

#[tokio::test(start_paused = true)]
async fn what_waits_for_its_turn_is_bounded_and_over_it_is_told_to_come_again() {
    let node = of_small_pages().await;
    let open = in_a_replay(&node).await;
    // Twice the burst is more than the ten channels of a session.
    for i in 0..22 {
        unsubscribe(&open, i, "b");
        millis(1).await;
    }
    let answers: Vec<Value> = said(&open).into_iter().filter(|m| m["type"] != "event").collect();
    assert_eq!(words(&answers), ["error 20 rate_limited", "error 21 rate_limited"]);
    for refused in &answers {
        assert_eq!((&refused["retry"], &refused["after_ms"]), (&json!(true), &json!(1_000)));
    }
    // The first page is read now, and so will the others be.
    let mut answers = Vec::new();
    for _ in 0..10 {
        millis(100).await;
        answers.extend(said(&open).into_iter().filter(|m| m["type"] != "event"));
    }
    let all: Vec<String> =
        std::iter::once("ok long long".to_owned()).chain((0..20).map(|i| format!("ok {i} b"))).collect();
    assert_eq!(words(&answers), all);
    unsubscribe(&open, "again", "b");
    settle().await;
    assert_eq!(words(&said(&open)), ["ok again b"]);
}

#[tokio::test(start_paused = true)]
async fn what_tokens_join_and_cannot_yet_is_bounded_and_leaves_their_client_its_turns() {
    let node = Testing::new(0).node("n").await;
    let open = holder(&node, json!({"subscribe": ["*"]})).await;
    node.memory.cut_link();
    settle().await;
    for round in 0..3 {
        let joined: Vec<String> = (0..6).map(|i| format!("b{round}-{i}")).collect();
        auth(&open, &json!({"channels": joined, "subscribe": ["*"]}));
        millis(10).await;
    }
    let answers = words(&said(&open));
    let n_refused = answers.iter().filter(|answer| *answer == "error too_many_channels").count();
    // One is under way, ten wait.
    assert_eq!((n_refused, answers.len()), (18 - 11, 18 - 11 + 3));
    subscribe(&open, 1, "c");
    millis(1_050).await;
    assert_eq!(words(&said(&open)), ["error 1 unavailable"]);
}
