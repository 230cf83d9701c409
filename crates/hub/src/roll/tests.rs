use super::*;
use crate::backplane::{Backplane, FromLink};
use crate::testing::{BEGINNING, Node, Testing, endings, identity, settle};

fn user(name: &str) -> Who {
    Who::User(name.into())
}

async fn known(nodes: &[&Node]) {
    for node in nodes {
        fleet::refresh(&node.hub).await.unwrap();
    }
}

#[tokio::test(start_paused = true)]
async fn a_users_sessions_are_found_on_every_node() {
    let testing = Testing::new(0);
    let (a, b) = (testing.node("a").await, testing.node("b").await);
    known(&[&a, &b]).await;
    let mut who = identity(Some("42"));
    who.expires_at = Some(BEGINNING + Duration::from_secs(600));
    let here = a.open_as(who, &["news", "room:1"]);
    tokio::time::sleep(Duration::from_secs(3)).await;
    let there = b.open("42");
    let _other = [a.open("43"), b.open_as(identity(None), &["news"])];
    let roll = a.hub.handle().sessions(user("42")).await.unwrap();
    assert_eq!((roll.missing.len(), roll.truncated), (0, false));
    let first = SessionView {
        session: here.session().info.id.to_string(),
        node: "a".into(),
        user: Some("42".into()),
        transport: "sse".into(),
        address: "127.0.0.1".into(),
        channels: vec!["news".into(), "room:1".into()],
        opened_at: BEGINNING.as_secs(),
        age_s: 3,
        expires_at: Some(BEGINNING.as_secs() + 600),
    };
    assert_eq!(roll.sessions[0], first);
    assert_eq!((&*roll.sessions[1].session, &*roll.sessions[1].node), (&*there.session().info.id, "b"));
    assert_eq!(roll.sessions.len(), 2);
    // From the other side it is the same.
    assert_eq!(b.hub.handle().sessions(user("42")).await.unwrap(), roll);
    assert_eq!(b.hub.handle().sessions(Who::All).await.unwrap().sessions.len(), 4);
    assert_eq!(a.hub.handle().sessions(user("nobody")).await.unwrap(), Roll::default());
    let one = a.hub.handle().sessions(Who::Session(there.session().info.id.clone().into())).await.unwrap();
    assert_eq!(one.sessions[0].node, "b");
}

#[tokio::test(start_paused = true)]
async fn sessions_end_wherever_they_are() {
    let testing = Testing::new(0);
    let (a, b) = (testing.node("a").await, testing.node("b").await);
    known(&[&a, &b]).await;
    let open = [a.open("42"), b.open("42"), b.open("42"), b.open("43")];
    let id = open[3].session().info.id.clone();
    let handle = a.hub.handle();
    assert_eq!(handle.end_sessions(user("42")).await.unwrap(), Ended { n_ended: 3, missing: vec![] });
    settle().await;
    let kicked = Some(CloseReason::Kicked);
    assert_eq!(endings(&open), [kicked, kicked, kicked, None]);
    assert_eq!(handle.end_sessions(user("42")).await.unwrap().n_ended, 0, "they are ending already");
    assert!(handle.sessions(user("42")).await.unwrap().sessions.is_empty(), "and are nobody's any more");
    assert_eq!(handle.end_sessions(Who::Session(id.into())).await.unwrap().n_ended, 1);
    settle().await;
    assert_eq!(endings(&open[3..]), [kicked]);
}

#[tokio::test(start_paused = true)]
async fn a_channel_is_taken_off_wherever_it_is_heard_and_the_sessions_stay() {
    let testing = Testing::new(0);
    let (a, b) = (testing.node("a").await, testing.node("b").await);
    known(&[&a, &b]).await;
    let as_user = |user| identity(Some(user));
    let open = [
        a.open_as(as_user("42"), &["news", "room:1"]),
        b.open_as(as_user("42"), &["room:1"]),
        b.open_as(as_user("42"), &["news"]),
        b.open_as(as_user("43"), &["room:1"]),
    ];
    let (handle, room) = (a.hub.handle(), Channel::new("room:1").unwrap());
    let n_off = async |who: Who| handle.unsubscribe(who, &room).await.unwrap();
    assert_eq!(n_off(user("42")).await, Ended { n_ended: 2, missing: vec![] });
    assert_eq!(n_off(user("42")).await.n_ended, 0, "it is off already");
    let heard = |roll: Roll| roll.sessions.into_iter().map(|s| s.channels.concat()).collect::<Vec<_>>();
    let mut theirs = heard(handle.sessions(user("42")).await.unwrap());
    theirs.sort();
    assert_eq!(theirs, ["", "news", "news"]);
    assert_eq!(heard(handle.sessions(user("43")).await.unwrap()), ["room:1"]);
    let last = open[3].session().info.id.clone();
    assert_eq!(n_off(Who::Session(last.into())).await.n_ended, 1);
    settle().await;
    assert_eq!(endings(&open), [None; 4]);
    // Nobody hears it any more, on either node.
    for node in [&a, &b] {
        assert!(!node.hub.channels.listened().contains(&room));
    }
}

#[tokio::test(start_paused = true)]
async fn two_nodes_of_one_name_do_what_either_is_asked_and_mistake_no_answer() {
    let testing = Testing::new(0);
    let (a, b, c) = (testing.node("gw").await, testing.node("gw").await, testing.node("c").await);
    known(&[&a, &b, &c, &a]).await;
    let open = [a.open("42"), b.open("42"), b.open("43"), c.open("42"), c.open("43")];
    // Both calls are the first of their asker, and all answers to them come to one name.
    let (mine, yours) = (a.hub.handle(), b.hub.handle());
    let (of_42, of_43) = tokio::join!(mine.sessions(user("42")), yours.sessions(user("43")));
    let users = |roll: Roll| roll.sessions.into_iter().map(|session| session.user.unwrap()).collect::<Vec<_>>();
    assert_eq!((users(of_42.unwrap()), users(of_43.unwrap())), (vec!["42".to_owned(); 3], vec!["43".to_owned(); 2]));
    assert_eq!(a.hub.handle().end_sessions(user("42")).await.unwrap(), Ended { n_ended: 3, missing: vec![] });
    settle().await;
    let kicked = Some(CloseReason::Kicked);
    assert_eq!(endings(&open), [kicked, kicked, None, kicked, None]);
    // Neither of the two is taken for the other.
    b.memory.cut_link();
    let ended = a.hub.handle().end_sessions(user("43")).await.unwrap();
    assert_eq!(ended, Ended { n_ended: 1, missing: vec!["gw".into()] });
}

/// Letters of earlier versions do not say which process of a name wrote them.
#[tokio::test(start_paused = true)]
async fn an_earlier_versions_letters_are_obeyed_and_its_answers_count() {
    let testing = Testing::new(0);
    let a = testing.node("a").await;
    let earlier = testing.log.node("z");
    let mut link = earlier.link();
    let report = serde_json::json!({
        "v": 1, "sessions": 1, "capacity": 1, "phase": "serving", "version": "0", "boot": "1", "started_at": 1,
        "accept_rate": 1.0
    });
    earlier.report(report.to_string(), Duration::from_secs(20)).await.unwrap();
    known(&[&a]).await;
    let handle = a.hub.handle();
    let answer = async {
        let call = loop {
            let Some(FromLink::Told(text)) = link.recv().await else { continue };
            break serde_json::from_str::<serde_json::Value>(&text).unwrap()["call"].clone();
        };
        let text = serde_json::json!({"v": 1, "call": call, "from": "z", "answer": {"ended": 7}});
        earlier.tell(Some("a".into()), text.to_string()).await.unwrap();
    };
    let (ended, ()) = tokio::join!(handle.end_sessions(user("42")), answer);
    assert_eq!(ended.unwrap(), Ended { n_ended: 7, missing: vec![] });
    let open = [a.open("42"), a.open("43")];
    for (from, user) in [("z", "42"), ("a", "43")] {
        let ask = serde_json::json!({"v": 1, "call": 0, "from": from, "ask": {"task": "end", "of": {"user": user}}});
        earlier.tell(None, ask.to_string()).await.unwrap();
    }
    settle().await;
    assert_eq!(endings(&open), [Some(CloseReason::Kicked); 2], "also of one that has this node's name");
}

#[tokio::test(start_paused = true)]
async fn a_node_that_does_not_answer_is_missing_and_nobody_waits_longer() {
    let testing = Testing::new(0);
    let (a, b) = (testing.node("a").await, testing.node("b").await);
    known(&[&a, &b]).await;
    let _open = [a.open("42"), b.open("42")];
    let handle = a.hub.handle();
    let began = Instant::now();
    assert!(handle.sessions(user("42")).await.unwrap().missing.is_empty());
    assert!(began.elapsed() < PATIENCE, "all answered: nobody waits");
    // Its link is down: it neither hears nor answers, but its report is young.
    b.memory.cut_link();
    let began = Instant::now();
    let roll = handle.sessions(user("42")).await.unwrap();
    assert_eq!((roll.sessions.len(), &*roll.missing), (1, &["b".to_owned()][..]));
    assert_eq!(handle.end_sessions(user("nobody")).await.unwrap(), Ended { n_ended: 0, missing: vec!["b".into()] });
    assert!(began.elapsed() < 2 * PATIENCE + Duration::from_millis(10), "{:?}", began.elapsed());
    b.memory.restore_link();
    // This one reaches nobody: itself is known, the others are missing.
    a.memory.set_reachable(false);
    let roll = handle.sessions(user("42")).await.unwrap();
    assert_eq!((roll.sessions.len(), &*roll.missing), (1, &["b".to_owned()][..]));
}

#[tokio::test(start_paused = true)]
async fn who_never_heard_of_the_fleet_says_so() {
    let testing = Testing::new(0);
    let a = testing.node_with("a", 10);
    a.memory.set_reachable(false);
    let open = a.open("42");
    assert_eq!(a.hub.handle().sessions(user("42")).await, Err(RollError::UnknownFleet));
    assert_eq!(a.hub.handle().end_sessions(user("42")).await, Err(RollError::UnknownFleet));
    settle().await;
    assert_eq!(endings([&open]), [Some(CloseReason::Kicked)], "what could be done was done");
}

#[tokio::test(start_paused = true)]
async fn an_answer_is_bounded_in_sessions_and_in_bytes() {
    let testing = Testing::new(0);
    let (a, b) = (testing.node("a").await, testing.node("b").await);
    known(&[&a, &b]).await;
    let long = ["x", "y"].map(|c| c.repeat(190));
    let channels: Vec<&str> = long.iter().map(String::as_str).collect();
    let mut open: Vec<_> = (0..300).map(|_| b.open_as(identity(Some("42")), &channels)).collect();
    assert!(!a.hub.handle().sessions(user("42")).await.unwrap().truncated);
    open.extend((0..100).map(|_| b.open_as(identity(Some("42")), &channels)));
    let roll = a.hub.handle().sessions(user("42")).await.unwrap();
    assert!(roll.truncated && (300..400).contains(&roll.sessions.len()), "{}", roll.sessions.len());
    drop(open);
    let most = MAX_ANSWER_BYTES / SESSION_BYTES;
    let mut open: Vec<_> = (0..most).map(|_| b.open("42")).collect();
    let roll = a.hub.handle().sessions(user("42")).await.unwrap();
    assert_eq!((roll.sessions.len(), roll.truncated), (most, false));
    open.push(b.open("42"));
    let roll = a.hub.handle().sessions(user("42")).await.unwrap();
    assert_eq!((roll.sessions.len(), roll.truncated), (most, true));
}

#[tokio::test(start_paused = true)]
async fn texts_of_strangers_end_nobody_and_hold_nobody_up() {
    let testing = Testing::new(0);
    let (a, b) = (testing.node("a").await, testing.node("b").await);
    known(&[&a, &b]).await;
    let open = b.open("42");
    let ask = |v: u32, task: &str| {
        format!(r#"{{"v":{v},"call":0,"from":"z","ask":{{"task":"{task}","of":{{"user":"42"}}}}}}"#)
    };
    for text in [
        "".to_owned(),
        "{}".to_owned(),
        "\u{0}[".to_owned(),
        "[".repeat(100_000),
        ask(2, "end"),
        ask(1, "burn"),
        r#"{"v":1,"call":0,"from":"z","ask":{"task":{"unsubscribe":{"channel":"no name"}},"of":"all"}}"#.to_owned(),
        r#"{"v":1,"call":0,"from":"b","answer":{"sessions":[7]}}"#.to_owned(),
        r#"{"v":1,"call":99,"from":"b","answer":{"ended":7}}"#.to_owned(),
        ask(1, "end").replace(r#""from":"z""#, &format!(r#""from":"b","boot":"{}""#, b.hub.fleet.boot)),
    ] {
        a.memory.tell(Some("b".into()), text.clone()).await.unwrap();
    }
    settle().await;
    assert_eq!(endings([&open]), [None]);
    let roll = a.hub.handle().sessions(user("42")).await.unwrap();
    assert_eq!((roll.sessions.len(), roll.missing.len()), (1, 0));
    // More than are read in time: some are lost, and later ones come through.
    for _ in 0..2 * MAX_TEXTS {
        b.hub.rolls.told("[".to_owned());
    }
    settle().await;
    assert!(a.hub.handle().sessions(user("42")).await.unwrap().missing.is_empty());
}

#[tokio::test(start_paused = true)]
async fn calls_in_flight_are_bounded_and_a_dropped_one_leaves_nothing() {
    let testing = Testing::new(0);
    let (a, b) = (testing.node("a").await, testing.node("b").await);
    known(&[&a, &b]).await;
    b.memory.cut_link();
    let handle = a.hub.handle();
    let mut waiting: Vec<_> = (0..MAX_ASKS).map(|_| Box::pin(handle.sessions(user("42")))).collect();
    for call in &mut waiting {
        assert!(futures_util::poll!(call).is_pending());
    }
    assert_eq!(handle.sessions(user("42")).await, Err(RollError::Busy));
    waiting.pop();
    assert!(handle.sessions(user("42")).await.is_ok());
    drop(waiting);
    assert!(a.hub.rolls.calls.lock().unwrap().is_empty());
}
