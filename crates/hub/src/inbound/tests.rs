use std::sync::atomic::{AtomicBool, Ordering};

use serde_json::{Value, json};

use crate::auth::{Identity, mint};
use crate::backplane::{Backplane, Revocation, RevocationKey};
use crate::hub::Open;
use crate::plugin::{Plugin, Plugins, Verdict};
use crate::revocation::{Company, RevocationConfig, Revocations, WhenUnavailable};
use crate::testing::mute::Answers;
use crate::testing::{BEGINNING, Node, Testing, said, settle};

use super::*;

mod moments;
mod turns;

/// What the nodes' tokens are signed with.
const KEY: [u8; 32] = [b'k'; 32];

fn token(claims: &Value) -> String {
    let mut claims = claims.clone();
    claims["sub"] = json!("u");
    claims["exp"] = json!(BEGINNING.as_secs() + 3_600);
    mint(&KEY, &claims).unwrap()
}

/// A session with a token of these claims, ready.
async fn holder(node: &Node, claims: Value) -> Open {
    let identity = node.hub.verifier.verify(&token(&claims), BEGINNING).unwrap();
    let channels = node.hub.channels_for(&identity, &[]).unwrap();
    let names: Vec<&str> = channels.iter().map(Channel::as_str).collect();
    let open = node.open_as((*identity).clone(), &names);
    settle().await;
    said(&open);
    open
}

fn say(open: &Open, message: &Value) {
    open.received(Inbound::Text(message.to_string().into()));
}

fn auth(open: &Open, claims: &Value) {
    say(open, &json!({"type": "auth", "ref": "auth", "token": token(claims)}));
}

/// `type`, `ref`, `channel` and `code` or `reason`, where a message has them.
fn words(messages: &[Value]) -> Vec<String> {
    let text = |m: &Value| {
        let fields = ["type", "ref", "channel", "code", "reason", "data"].map(|field| m[field].clone());
        let known = fields.iter().filter(|value| !value.is_null());
        known.map(|value| value.as_str().map_or_else(|| value.to_string(), str::to_owned)).collect::<Vec<_>>().join(" ")
    };
    messages.iter().map(text).collect()
}

#[tokio::test(start_paused = true)]
async fn a_new_token_joins_what_only_it_names_and_not_what_was_left() {
    let node = Testing::new(0).node("n").await;
    let open = holder(&node, json!({"channels": ["kept", "left", "gone"]})).await;
    say(&open, &json!({"type": "unsubscribe", "channel": "left"}));
    settle().await;
    said(&open);
    node.publish("new", "\"before\"").await;
    auth(&open, &json!({"channels": ["kept", "left", "new"]}));
    settle().await;
    let answers = said(&open);
    assert_eq!(words(&answers), ["unsubscribed gone grant", "ok auth", "ok new"]);
    assert_eq!((&answers[2]["resume"], answers[2]["id"].is_string()), (&json!("new"), true), "{answers:?}");
    for channel in ["kept", "left", "new", "gone"] {
        node.publish(channel, "\"after\"").await;
    }
    settle().await;
    assert_eq!(words(&said(&open)), ["event kept after", "event new after"]);
    // The same again changes nothing; nor does what the client has asked for itself meanwhile.
    auth(&open, &json!({"channels": ["kept", "left", "new"]}));
    settle().await;
    assert_eq!(words(&said(&open)), ["ok auth"]);
}

#[tokio::test(start_paused = true)]
async fn what_the_client_holds_or_leaves_itself_is_not_joined_a_second_time() {
    let node = Testing::new(0).node("n").await;
    let open = holder(&node, json!({"channels": ["a"], "subscribe": ["*"]})).await;
    say(&open, &json!({"type": "subscribe", "ref": 1, "channel": "b"}));
    settle().await;
    auth(&open, &json!({"channels": ["a", "b", "c"]}));
    settle().await;
    say(&open, &json!({"type": "unsubscribe", "ref": 2, "channel": "c"}));
    settle().await;
    assert_eq!(words(&said(&open)), ["ok 1 b", "ok auth", "ok c", "ok 2 c"]);
    for channel in ["a", "b", "c"] {
        node.publish(channel, "1").await;
    }
    settle().await;
    assert_eq!(words(&said(&open)), ["event a 1", "event b 1"]);
}

#[tokio::test(start_paused = true)]
async fn while_the_link_is_away_a_granted_channel_waits_and_holds_up_no_answer() {
    let node = Testing::new(0).node("n").await;
    let open = holder(&node, json!({"channels": ["a"], "subscribe": ["*"]})).await;
    node.memory.cut_link();
    settle().await;
    auth(&open, &json!({"channels": ["a", "b"], "subscribe": ["*"]}));
    settle().await;
    assert_eq!(words(&said(&open)), ["ok auth"], "the token is in force");
    for round in 0..3 {
        say(&open, &json!({"type": "subscribe", "ref": round, "channel": "c"}));
        // GATEWAY_AUTH_TIMEOUT is a second here.
        tokio::time::sleep(Duration::from_millis(1_050)).await;
        assert_eq!(words(&said(&open)), [format!("error {round} unavailable")]);
    }
    node.memory.restore_link();
    tokio::time::sleep(Duration::from_millis(1_050)).await;
    assert_eq!(words(&said(&open)), ["ok b"]);
    node.publish("b", "1").await;
    settle().await;
    assert_eq!(words(&said(&open)), ["event b 1"]);
}

#[tokio::test(start_paused = true)]
async fn a_granted_channel_beyond_the_limit_is_told_and_the_session_stays() {
    let node = Testing::new(0).node("n").await;
    // Ten are allowed here, `user:u` is one of them.
    let open = holder(&node, json!({"subscribe": ["x*", "y*"]})).await;
    for i in 0..8 {
        say(&open, &json!({"type": "subscribe", "ref": i, "channel": format!("x{i}")}));
    }
    settle().await;
    assert_eq!(said(&open).iter().filter(|m| m["type"] == "ok").count(), 8);
    auth(&open, &json!({"channels": ["y1", "y2"], "subscribe": ["x*"]}));
    settle().await;
    let answers = said(&open);
    assert_eq!(words(&answers), ["ok auth", "ok y1", "error too_many_channels"]);
    assert!(answers[2]["message"].as_str().unwrap().contains("y2"), "{}", answers[2]);
    assert_eq!(open.session().ending(), None);
}

/// Denies `fickle` once it was told to.
struct Fickle(Arc<AtomicBool>);

impl Plugin for Fickle {
    fn name(&self) -> &'static str {
        "fickle"
    }

    fn may_subscribe(&self, _: &Identity, channel: &Channel) -> Verdict {
        if channel.as_str() == "fickle" && self.0.load(Ordering::SeqCst) { Verdict::Deny } else { Verdict::Pass }
    }
}

#[tokio::test(start_paused = true)]
async fn a_channel_is_taken_away_with_the_reason_of_whoever_forbids_it() {
    let denies = Arc::new(AtomicBool::new(false));
    let node = Testing::new(0).node_extended("n", Plugins::new().with(Fickle(denies.clone()))).await;
    let open = holder(&node, json!({"channels": ["fickle", "plain", "gone"]})).await;
    denies.store(true, Ordering::SeqCst);
    auth(&open, &json!({"channels": ["fickle", "plain"]}));
    settle().await;
    assert_eq!(words(&said(&open)), ["unsubscribed fickle plugin", "unsubscribed gone grant", "ok auth"]);
    // Nor is it joined by a token that names it anew.
    auth(&open, &json!({"channels": ["plain"]}));
    auth(&open, &json!({"channels": ["plain", "fickle"]}));
    settle().await;
    assert_eq!(words(&said(&open)), ["ok auth", "ok auth"]);
}

#[tokio::test(start_paused = true)]
async fn what_is_taken_off_while_the_session_opens_is_not_replayed() {
    let node = Testing::new(0).node("n").await;
    let first = node.publish("kept", "1").await;
    let since = Since::After(first);
    node.publish("gone", "2").await;
    node.publish("left", "3").await;
    node.publish("kept", "4").await;
    // The history is asked for when the link is back.
    node.memory.cut_link();
    settle().await;
    let identity = node.hub.verifier.verify(&token(&json!({"subscribe": ["*"]})), BEGINNING).unwrap();
    let open = node.open_since((*identity).clone(), &["kept", "gone", "left"], since);
    settle().await;
    auth(&open, &json!({"subscribe": ["kept", "left"]}));
    say(&open, &json!({"type": "unsubscribe", "ref": 1, "channel": "left"}));
    settle().await;
    assert_eq!(words(&said(&open)[1..]), ["unsubscribed gone grant", "ok auth", "ok 1 left"]);
    // Asked for again, it is replayed once.
    say(&open, &json!({"type": "subscribe", "ref": 2, "channel": "left", "since": first.to_string()}));
    node.memory.restore_link();
    tokio::time::sleep(Duration::from_millis(500)).await;
    assert_eq!(words(&said(&open)), ["event kept 4", "ready", "event left 3", "ok 2 left"]);
    for channel in ["gone", "left", "kept"] {
        node.publish(channel, "5").await;
    }
    settle().await;
    assert_eq!(words(&said(&open)), ["event left 5", "event kept 5"]);
}

#[tokio::test(start_paused = true)]
async fn a_question_under_way_is_answered_when_a_new_token_forbids_it() {
    let node = Testing::new(0).node("n").await;
    let open = holder(&node, json!({"channels": ["a"], "subscribe": ["b"]})).await;
    node.memory.cut_link();
    settle().await;
    say(&open, &json!({"type": "subscribe", "ref": 1, "channel": "b"}));
    settle().await;
    auth(&open, &json!({"channels": ["a", "c"]}));
    settle().await;
    assert_eq!(words(&said(&open)), ["error 1 forbidden", "ok auth"]);
    // Nor is it said of a channel that nobody has been told of that it is gone.
    auth(&open, &json!({"channels": ["a"]}));
    settle().await;
    assert_eq!(words(&said(&open)), ["ok auth"]);
    node.memory.restore_link();
    tokio::time::sleep(Duration::from_secs(2)).await;
    for channel in ["a", "b", "c"] {
        node.publish(channel, "1").await;
    }
    settle().await;
    assert_eq!(words(&said(&open)), ["event a 1"]);
}

#[tokio::test(start_paused = true)]
async fn who_reads_none_of_its_answers_is_slow_whatever_it_may_send() {
    let talkative = |config: &mut crate::hub::HubConfig| {
        (config.session.client_rate, config.session.client_burst) = (1e6, 1e6);
        config.session.outbox_bytes = 64 * 1024;
    };
    let node = Testing::new(0).node_like("n", talkative).await;
    for ask in [json!({"type": "ping"}), json!({"type": "nonsense"}), json!({"type": "subscribe", "channel": "no"})] {
        let open = holder(&node, json!({})).await;
        let mut n_asked = 0;
        while open.session().ending().is_none() {
            say(&open, &ask);
            n_asked += 1;
            assert!(n_asked < 5_000, "so many answers wait");
        }
        assert_eq!(open.session().ending(), Some(CloseReason::Slow));
    }
}

#[tokio::test(start_paused = true)]
async fn who_waits_as_long_as_it_was_told_is_not_refused_again() {
    let node = Testing::new(0).node("n").await;
    for ask in [json!({"type": "ping"}), json!({"type": "subscribe", "channel": "room", "since": "0"})] {
        let open = holder(&node, json!({"subscribe": ["*"]})).await;
        let refused = loop {
            say(&open, &ask);
            if let Some(refused) = said(&open).into_iter().find(|m| m["type"] == "error") {
                break refused;
            }
        };
        assert_eq!((&refused["code"], &refused["retry"]), (&json!("rate_limited"), &json!(true)));
        tokio::time::sleep(Duration::from_millis(refused["after_ms"].as_u64().unwrap())).await;
        said(&open);
        say(&open, &ask);
        settle().await;
        let answers = said(&open);
        assert!(answers.iter().all(|m| m["type"] != "error"), "{answers:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_ref_comes_back_as_the_text_it_was() {
    let node = Testing::new(0).node("n").await;
    let open = holder(&node, json!({})).await;
    let texts = [
        "12345678901234567890123",
        "9007199254740993.10",
        "1e400",
        r#""\ud800""#,
        r#"{"b":1,"a":[2, {}],"b":3}"#,
        "null",
        r#""}\"""#,
        "-0.0",
    ];
    for text in texts {
        for (ask, answer) in [("unsubscribe", "ok"), ("nonsense", "error")] {
            let message = format!(r#"{{"ref": {text} ,"type":"{ask}","channel":"a"}}"#);
            open.received(Inbound::Text(message.into()));
            settle().await;
            let answers: Vec<u8> = crate::testing::items(&open)
                .iter()
                .flat_map(|item| item.on(crate::event::Wire::Sse).to_vec())
                .collect();
            let answers = String::from_utf8(answers).unwrap();
            assert!(answers.contains(&format!("event: {answer}\n")), "{answers}");
            assert!(answers.contains(&format!(",\"ref\":{text}}}\n")), "{answers}");
        }
    }
    // A line end between its tokens ends no line of ours.
    open.received(Inbound::Text("{\"type\":\"unsubscribe\",\"channel\":\"a\",\"ref\":[1,\r\n2]}".into()));
    settle().await;
    assert_eq!(said(&open)[0]["ref"], json!([1, 2]));
}

#[tokio::test(start_paused = true)]
async fn a_token_that_joins_too_much_is_told_so_in_band_as_well() {
    let node = Testing::new(0).node("n").await;
    let open = holder(&node, json!({})).await;
    // `user:u` is one of the ten.
    for (n, answer) in [(9, "ok auth"), (10, "error auth too_many_channels")] {
        auth(&open, &json!({"channels": (0..n).map(|i| format!("c{i}")).collect::<Vec<_>>()}));
        settle().await;
        assert_eq!(words(&said(&open))[0], answer);
    }
}

/// A node whose revocation list may be away.
async fn trusting(when_unavailable: WhenUnavailable) -> Node {
    let mut node = Testing::new(0).still(crate::testing::config("n", 100), Plugins::new());
    let config = RevocationConfig {
        when_unavailable,
        deadline: Duration::from_secs(1),
        remember: Duration::from_secs(60),
        company: Company::Awaited,
    };
    let list = Arc::new(Revocations::new(node.mute.clone(), config, node.metrics.clone()));
    Arc::get_mut(&mut node.hub).expect("nothing runs yet").revocations = list;
    node.hub.start();
    node.hub.serve();
    node.hub.place.live().await;
    node
}

#[tokio::test(start_paused = true)]
async fn a_token_is_renewed_without_the_revocation_list_where_newcomers_are_let_in_without_it() {
    for (when, answer) in [(WhenUnavailable::Allow, "ok auth"), (WhenUnavailable::Refuse, "error auth unavailable")] {
        let node = trusting(when).await;
        let open = holder(&node, json!({"channels": ["a"]})).await;
        node.mute.set(Answers::Never);
        auth(&open, &json!({"channels": ["a"], "jti": "new"}));
        tokio::time::sleep(Duration::from_millis(1_050)).await;
        assert_eq!(words(&said(&open)), [answer]);
        // What the node has seen itself holds all the same.
        let seen = Revocation { key: RevocationKey::Jti("seen".into()), before: 0 };
        node.hub.revoked(&seen);
        auth(&open, &json!({"channels": ["a"], "jti": "seen"}));
        tokio::time::sleep(Duration::from_millis(1_050)).await;
        assert_eq!(words(&said(&open)), ["error auth token_revoked"]);
        // And the list is asked for the one in force as soon as it answers: another system's word.
        node.memory.cut_link();
        let said_elsewhere = Revocation { key: RevocationKey::Jti("new".into()), before: 0 };
        node.memory.revoke(said_elsewhere, Duration::from_secs(600)).await.unwrap();
        node.mute.set(Answers::AtOnce);
        node.memory.restore_link();
        tokio::time::sleep(Duration::from_secs(20)).await;
        let is_revoked = open.session().ending() == Some(CloseReason::Revoked);
        assert_eq!(is_revoked, when == WhenUnavailable::Allow);
    }
}
