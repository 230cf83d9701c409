//! Channels that the program asks for or leaves in an open session, and what becomes of them when
//! the connection is lost.

use super::*;

impl Server {
    /// The next connection, and the channels that its request names.
    async fn websocket_for(&self) -> (Vec<String>, Option<String>, Peer) {
        let (head, peer) = self.websocket().await;
        (listed(&head), header(&head, "last-event-id").map(str::to_owned), peer)
    }

    /// The next request gets this refusal.
    async fn refuse(&self, status: &str, code: &str) -> Vec<String> {
        let (head, mut peer) = self.request().await;
        peer.bytes(&format!("HTTP/1.1 {status}\r\nConnection: close\r\n\r\n{{\"code\":\"{code}\"}}")).await;
        listed(&head)
    }
}

impl Peer {
    /// Takes the asks for `channels`, in this order, and confirms them.
    async fn confirm(&mut self, channels: &[&str], id: &str) {
        for channel in channels {
            let ask = self.hear().await;
            assert_eq!((&ask["type"], &ask["channel"]), (&json!("subscribe"), &json!(channel)));
            self.answer(&ask["ref"], id).await;
        }
    }

    async fn refuse(&mut self, ask: &Value, code: &str, after_ms: Option<u64>) {
        let mut error = json!({"type": "error", "ref": ask["ref"], "code": code, "retry": after_ms.is_some()});
        if let Some(after_ms) = after_ms {
            error["after_ms"] = after_ms.into();
        }
        self.say(error).await;
    }

    /// What `client` has to say was said: nothing but a ping comes next.
    async fn assert_quiet(&mut self, client: &Client) {
        client.ping().await.unwrap();
        assert_eq!(self.hear().await, json!({"type": "ping"}));
    }
}

fn listed(head: &str) -> Vec<String> {
    let target = head.split(' ').nth(1).expect("a request line");
    let query = target.split_once('?').map_or("", |(_, query)| query);
    query.split('&').filter_map(|part| part.strip_prefix("channel=")).map(str::to_owned).collect()
}

fn ok(message: Message) -> Option<String> {
    match message {
        Message::Ok(ok) => ok.reference,
        _ => None,
    }
}

/// The client has heard the `ready` with this id: it is connected, and what it does about it is under way.
async fn until_ready(client: &mut Client, id: &str) {
    until(client, |message| matches!(message, Message::Ready(ready) if ready.id.as_deref() == Some(id)).then_some(()))
        .await;
}

/// A client that holds `a` and `b` at the position `6-0`, on a connection that is gone.
async fn parted() -> (Server, Client, [String; 2]) {
    let (server, builder) = Server::start().await;
    let mut client = builder.connect().unwrap();
    let references = [client.subscribe("a", None).await.unwrap(), client.subscribe("b", None).await.unwrap()];
    let (_, mut peer) = server.websocket().await;
    peer.ready("4-0").await;
    peer.confirm(&["a", "b"], "6-0").await;
    for reference in &references {
        assert_eq!(until(&mut client, ok).await, *reference);
    }
    (server, client, references)
}

#[tokio::test]
async fn channels_held_at_a_loss_resume_with_the_session() {
    let (server, builder) = Server::start().await;
    let mut client = builder.channels(["q"]).connect().unwrap();
    client.subscribe("more", Some("2-0".into())).await.unwrap();
    client.subscribe("late", None).await.unwrap();
    let (_, mut peer) = server.websocket().await;
    peer.ready("4-0").await;
    let ask = peer.hear().await;
    assert_eq!(ask, json!({"type": "subscribe", "ref": "1", "channel": "more", "since": "2-0"}));
    peer.event("more", "3-0", true).await;
    peer.answer(&ask["ref"], "6-0").await;
    assert_eq!(until(&mut client, ok).await, "1");
    assert_eq!(client.cursor().as_deref(), Some("6-0"), "the replayed event did not count, the ok did");
    assert_eq!(peer.hear().await["channel"], "late");
    drop(peer);

    let (channels, since, mut peer) = server.websocket_for().await;
    assert_eq!((channels.join(","), since.as_deref()), ("q,more".into(), Some("6-0")));
    peer.event("more", "7-0", false).await;
    peer.event("base", "8-0", false).await;
    peer.ready("9-0").await;
    assert_eq!(peer.hear().await, json!({"type": "subscribe", "ref": "2", "channel": "late"}));
    peer.assert_quiet(&client).await;
    assert_eq!(until(&mut client, event_id).await, "7-0");
    drop(peer);
    let (channels, since, _peer) = server.websocket_for().await;
    assert_eq!((channels.join(","), since.as_deref()), ("q,more".into(), Some("9-0")));
}

#[tokio::test]
async fn attempts_that_fail_in_a_row_forget_no_channel_and_no_place() {
    let (server, mut client, _) = parted().await;
    assert_eq!(server.refuse("503 Service Unavailable", "draining").await, ["a", "b"]);
    let (channels, since, peer) = server.websocket_for().await;
    assert_eq!((channels.join(","), since.as_deref()), ("a,b".into(), Some("6-0")));
    drop(peer);
    let (channels, since, mut peer) = server.websocket_for().await;
    assert_eq!((channels.join(","), since.as_deref()), ("a,b".into(), Some("6-0")));
    // Cut in the midst of the replay, which is that of all channels.
    peer.event("b", "7-0", false).await;
    drop(peer);
    let (channels, since, mut peer) = server.websocket_for().await;
    assert_eq!((channels.join(","), since.as_deref()), ("a,b".into(), Some("7-0")));
    peer.ready("9-0").await;
    until_ready(&mut client, "9-0").await;
    peer.assert_quiet(&client).await;
}

#[tokio::test]
async fn a_refusal_for_a_channel_in_the_list_costs_one_attempt_and_that_channel() {
    for (status, code) in [
        ("403 Forbidden", "forbidden"),
        ("403 Forbidden", "too_many_channels"),
        ("431 Request Header Fields Too Large", ""),
    ] {
        let (server, mut client, [_, second]) = parted().await;
        assert_eq!(server.refuse(status, code).await, ["a", "b"]);
        let why = until(&mut client, |message| lost(message).filter(|why| *why != Loss::Cut)).await;
        assert!(matches!(why, Loss::Refused { .. }), "{why:?}");
        let (channels, since, mut peer) = server.websocket_for().await;
        assert_eq!((channels, since.as_deref()), (vec![], Some("6-0")));
        // Lost before anything could be asked: the others' place has moved, theirs has not.
        peer.ready("20-0").await;
        assert_eq!(peer.hear().await["channel"], "a");
        drop(peer);

        let (channels, since, mut peer) = server.websocket_for().await;
        assert_eq!((channels, since.as_deref()), (vec![], Some("20-0")));
        peer.ready("30-0").await;
        let first = peer.hear().await;
        assert_eq!((&first["channel"], &first["since"]), (&json!("a"), &json!("6-0")));
        peer.answer(&first["ref"], "30-0").await;
        let ask = peer.hear().await;
        assert_eq!(ask, json!({"type": "subscribe", "ref": second, "channel": "b", "since": "6-0"}));
        peer.refuse(&ask, "forbidden", None).await;
        let denied = until(&mut client, |message| match message {
            Message::Error(failed) => failed.reference,
            _ => None,
        });
        assert_eq!(denied.await, second);
        drop(peer);
        let (channels, since, mut peer) = server.websocket_for().await;
        assert_eq!((channels.join(","), since.as_deref()), ("a".into(), Some("30-0")));
        peer.ready("40-0").await;
        until_ready(&mut client, "40-0").await;
        peer.assert_quiet(&client).await;
    }
}

#[tokio::test]
async fn a_refusal_that_goes_on_without_the_list_ends_the_client() {
    let (server, mut client, _) = parted().await;
    assert_eq!(server.refuse("403 Forbidden", "forbidden").await, ["a", "b"]);
    assert_eq!(server.refuse("403 Forbidden", "forbidden").await, [""; 0]);
    while client.next().await.is_some() {}
    assert!(matches!(client.end(), Some(End::Refused { status: 403, .. })), "{:?}", client.end());

    let (server, mut client, _) = parted().await;
    assert_eq!(server.refuse("403 Forbidden", "origin_forbidden").await, ["a", "b"]);
    while client.next().await.is_some() {}
    assert!(matches!(client.end(), Some(End::Refused { status: 403, .. })), "{:?}", client.end());
}

#[tokio::test]
async fn what_is_asked_or_left_during_an_attempt_changes_no_place() {
    let (server, mut client, _) = parted().await;
    let (head, mut peer) = server.request().await;
    assert_eq!(listed(&head), ["a", "b"]);
    let left = client.unsubscribe("a").await.unwrap();
    let asked = client.subscribe("b", Some("1-0".into())).await.unwrap();
    peer.bytes("HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\n").await;
    peer.say(json!({"type": "hello", "session": "s", "channels": ["base", "a", "b"]})).await;
    peer.event("b", "7-0", false).await;
    assert_eq!(until(&mut client, event_id).await, "7-0");
    drop(peer);

    let (channels, since, mut peer) = server.websocket_for().await;
    assert_eq!((channels.join(","), since.as_deref()), ("b".into(), Some("7-0")));
    peer.ready("9-0").await;
    assert_eq!(peer.hear().await, json!({"type": "unsubscribe", "ref": left, "channel": "a"}));
    assert_eq!(peer.hear().await, json!({"type": "subscribe", "ref": asked, "channel": "b"}), "it is live by then");
}

#[tokio::test]
async fn a_subscribe_cut_in_its_replay_goes_on_from_the_channels_highest_id() {
    let (server, builder) = Server::start().await;
    let mut client = builder.connect().unwrap();
    client.subscribe("more", Some("2-0".into())).await.unwrap();
    let (_, mut peer) = server.websocket().await;
    peer.ready("9-0").await;
    peer.hear().await;
    peer.event("more", "3-0", true).await;
    assert_eq!(until(&mut client, event_id).await, "3-0");
    drop(peer);
    let (channels, since, mut peer) = server.websocket_for().await;
    assert_eq!((channels, since.as_deref()), (vec![], Some("9-0")));
    peer.ready("9-0").await;
    assert_eq!(peer.hear().await["since"], "3-0");
}

#[tokio::test]
async fn a_subscribe_refused_for_now_is_asked_again_and_one_denied_is_not() {
    let (server, builder) = Server::start().await;
    let mut client = builder.connect().unwrap();
    client.subscribe("busy", None).await.unwrap();
    client.subscribe("secret", None).await.unwrap();
    let (_, mut peer) = server.websocket().await;
    peer.ready("1-0").await;
    let first = peer.hear().await;
    peer.refuse(&first, "rate_limited", Some(1)).await;
    let again = peer.hear().await;
    assert_eq!(again, first);
    peer.answer(&again["ref"], "1-0").await;
    let secret = peer.hear().await;
    assert_eq!(secret["channel"], "secret");
    peer.refuse(&secret, "forbidden", None).await;
    peer.assert_quiet(&client).await;
    drop(peer);
    let (channels, _, mut peer) = server.websocket_for().await;
    assert_eq!(channels, ["busy"]);
    peer.ready("2-0").await;
    until_ready(&mut client, "2-0").await;
    peer.assert_quiet(&client).await;
}

#[tokio::test]
async fn a_channel_left_stays_left_after_a_reconnect() {
    let (server, builder) = Server::start().await;
    let mut client = builder.channels(["q"]).connect().unwrap();
    let (_, mut peer) = server.websocket().await;
    peer.ready("1-0").await;
    until_ready(&mut client, "1-0").await;
    let left = client.unsubscribe("base").await.unwrap();
    client.unsubscribe("q").await.unwrap();
    for channel in ["base", "q"] {
        let leave = peer.hear().await;
        assert_eq!(leave["channel"], channel);
        if channel == "base" {
            peer.answer(&leave["ref"], "1-0").await;
        }
    }
    assert_eq!(until(&mut client, ok).await, left);
    drop(peer);
    let (channels, _, mut peer) = server.websocket_for().await;
    assert_eq!(channels, [""; 0]);
    peer.ready("1-0").await;
    assert_eq!(peer.hear().await["channel"], "q", "this one had no answer yet");
    assert_eq!(peer.hear().await, json!({"type": "unsubscribe", "ref": "left-1", "channel": "base"}));
}

#[tokio::test]
async fn a_crowd_of_leaves_is_told_a_few_at_a_time_and_again_what_was_refused() {
    const N_LEAVES: usize = 60;
    let (server, builder) = Server::start().await;
    let mut client = builder.connect().unwrap();
    let (_, mut peer) = server.websocket().await;
    peer.ready("1-0").await;
    until_ready(&mut client, "1-0").await;
    let mut unanswered = Vec::new();
    for n in 0..N_LEAVES {
        unanswered.push(client.unsubscribe(format!("c{n}")).await.unwrap());
    }
    let mut under_way = Vec::new();
    for _ in 0..20 {
        under_way.push(peer.hear().await);
    }
    peer.assert_quiet(&client).await;
    let (refused, done) = under_way.split_at(10);
    for leave in done {
        peer.answer(&leave["ref"], "1-0").await;
    }
    for leave in refused {
        peer.refuse(leave, "rate_limited", Some(1)).await;
    }
    for _ in done {
        let done = until(&mut client, ok).await;
        unanswered.retain(|reference| *reference != done);
    }
    // Ten more were told as ten were done; what the refusals say of the bucket holds for them too.
    for _ in done {
        let leave = peer.hear().await;
        peer.refuse(&leave, "too_many_channels", None).await;
    }
    while !unanswered.is_empty() {
        let leave = peer.hear().await;
        assert_eq!(leave["type"], "unsubscribe");
        peer.assert_quiet(&client).await;
        peer.answer(&leave["ref"], "1-0").await;
        let done = until(&mut client, ok).await;
        assert_eq!(leave["ref"], *done);
        unanswered.retain(|reference| *reference != done);
    }
    assert_eq!(client.end(), None);
}
