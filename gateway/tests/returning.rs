//! The project's own client against the real binary: channels that it asked for or left in an open
//! session cost it nothing when the connection is lost, however many they are.

use std::collections::BTreeSet;

use client::{Client, Message, Resume};
use serde_json::json;
use testkit::gateway::{GatewayOptions, GatewayProcess, token};
use testkit::http::PATIENCE;
use testkit::proxy::Proxy;
use tokio::time::timeout;

/// A gateway that takes more channels than the largest crowd of these tests.
fn options() -> GatewayOptions {
    GatewayOptions::new(env!("CARGO_BIN_EXE_tidegate"))
        .patient()
        .env("GATEWAY_MAX_CHANNELS", "200")
        .env("GATEWAY_LOG", "warn")
}

fn names(n: usize) -> Vec<String> {
    (0..n).map(|i| format!("c{i}")).collect()
}

/// The next message; the client never gives up.
async fn next(client: &mut Client) -> Message {
    let message = timeout(PATIENCE, client.next()).await.expect("something comes");
    message.unwrap_or_else(|| panic!("ended: {:?}", client.end()))
}

/// The next message that `pick` wants; no gap comes meanwhile.
async fn until<T>(client: &mut Client, mut pick: impl FnMut(&Message) -> Option<T>) -> T {
    loop {
        let message = next(client).await;
        assert!(!matches!(message, Message::Gap(_)), "{message:?}");
        if let Some(picked) = pick(&message) {
            return picked;
        }
    }
}

async fn until_ready(client: &mut Client) {
    until(client, |message| matches!(message, Message::Ready(_)).then_some(())).await;
}

/// Waits until every one of `references` is confirmed.
async fn until_done(client: &mut Client, mut references: BTreeSet<String>) {
    while !references.is_empty() {
        let reference = until(client, |message| match message {
            Message::Ok(ok) => ok.reference.clone(),
            _ => None,
        });
        references.remove(&reference.await);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn forty_later_channels_come_back_at_once_and_in_order() {
    let node = GatewayProcess::start(options()).await;
    let line = Proxy::start(node.public()).await;
    let channels = names(40);
    let token = token(&json!({"sub": "u", "channels": ["base"], "subscribe": ["c*"]}));
    let mut client =
        Client::builder(format!("http://{}", line.addr())).token(token).seed(1).connect().expect("a good URL");
    let mut asked = BTreeSet::new();
    for channel in &channels {
        asked.insert(client.subscribe(channel, None).await.expect("it lives"));
    }
    until_done(&mut client, asked).await;

    for round in 0..2 {
        line.close();
        until(&mut client, |message| matches!(message, Message::Lost(_)).then_some(())).await;
        let mut ids = Vec::new();
        for channel in channels.iter().chain([&"base".to_owned()]).rev() {
            ids.push(node.publish(channel, &json!(round)).await);
        }
        line.open();
        let mut seen = Vec::new();
        let ready = loop {
            let message = next(&mut client).await;
            match message {
                Message::Event(event) => seen.push(event.id.expect("logged")),
                Message::Ready(ready) => break ready,
                Message::Error(_) | Message::Gap(_) => panic!("{message:?}"),
                _ => {}
            }
        };
        assert_eq!((ready.resume, ready.replayed), (Resume::Ok, 41), "one replay for all");
        assert_eq!(seen, ids);
        // And live again: nothing is asked that `ready` did not settle.
        let last = node.publish("c39", &json!("live")).await;
        let live = until(&mut client, |message| match message {
            Message::Event(event) => event.id.clone(),
            Message::Ok(_) | Message::Error(_) => panic!("{message:?}"),
            _ => None,
        });
        assert_eq!(live.await, last);
    }
}

/// Leaves `n` channels of the token at once, with a rate at which a rough crowd would be thrown out.
async fn assert_that_many_can_be_left(n: usize) {
    let node = GatewayProcess::start(options().env("GATEWAY_CLIENT_RATE", "40")).await;
    let line = Proxy::start(node.public()).await;
    let channels = names(n);
    let joined: Vec<&str> = channels.iter().map(String::as_str).chain(["kept"]).collect();
    let token = token(&json!({"sub": "u", "channels": joined}));
    let mut client =
        Client::builder(format!("http://{}", line.addr())).token(token).seed(1).connect().expect("a good URL");
    until_ready(&mut client).await;
    let mut left = BTreeSet::new();
    for channel in &channels {
        left.insert(client.unsubscribe(channel).await.expect("it lives"));
    }
    until_done(&mut client, left).await;
    assert_that_only_one_is_heard(&node, &mut client, &channels).await;

    // The token joins them all anew; that they stay left takes as many messages again.
    line.cut();
    until_ready(&mut client).await;
    until_done(&mut client, (1..=n).map(|i| format!("left-{i}")).collect()).await;
    assert_that_only_one_is_heard(&node, &mut client, &channels).await;
}

async fn assert_that_only_one_is_heard(node: &GatewayProcess, client: &mut Client, left: &[String]) {
    for channel in left.iter().step_by(7).chain(left.last()) {
        node.publish(channel, &json!(0)).await;
    }
    let kept = node.publish("kept", &json!(1)).await;
    let heard = until(client, |message| match message {
        Message::Event(event) => Some((event.channel.clone(), event.id.clone())),
        Message::Lost(_) => panic!("{message:?}"),
        _ => None,
    });
    assert_eq!(heard.await, ("kept".to_owned(), Some(kept)));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sixty_channels_can_be_left_at_once_and_stay_left() {
    assert_that_many_can_be_left(60).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_hundred_and_twenty_channels_can_be_left_at_once_and_stay_left() {
    assert_that_many_can_be_left(120).await;
}
