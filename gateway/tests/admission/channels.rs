//! What may be heard: names match byte by byte, however they are asked for.

use serde_json::{Value, json};
use testkit::gateway::GatewayProcess;
use testkit::redis::RedisServer;
use testkit::ws::WsClient;

use super::{bearer, options, outcome, refused, token, try_ws};

async fn subscribe(client: &mut WsClient, channel: &str, since: Option<&str>) -> Value {
    let mut ask = json!({"type": "subscribe", "channel": channel, "ref": 1});
    if let Some(since) = since {
        ask["since"] = json!(since);
    }
    client.send_json(&ask).await;
    client.json().await
}

fn percent(name: &str) -> String {
    name.bytes().map(|byte| format!("%{byte:02x}")).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn no_spelling_of_a_channel_opens_another() {
    let redis = RedisServer::plain();
    let gateway = GatewayProcess::start(
        options()
            .env("GATEWAY_REDIS_URL", redis.url())
            .env("GATEWAY_CLIENT_RATE", "100000")
            .env("GATEWAY_CLIENT_BURST", "100000"),
    )
    .await;
    let mine = token(&json!({"sub": "42", "channels": ["news"], "subscribe": ["room:*", "a+b@c.d", "dir/../x"]}));
    let auth = bearer(&mine);
    let mut client = try_ws(&gateway, "/v1/ws", &[("Authorization", &auth)]).await.expect("let in");
    client.until("ready").await;
    let id = gateway.publish("user:43", &json!("private")).await;
    let long = "x".repeat(10 * 1024);
    let just_too_long = format!("room:{}", "x".repeat(196));
    for (name, code) in [
        ("user:43", "forbidden"),
        ("USER:42", "forbidden"),
        ("User:42", "forbidden"),
        ("user:042", "forbidden"),
        ("user:42/", "forbidden"),
        ("user:4", "forbidden"),
        ("user:", "forbidden"),
        ("Room:1", "forbidden"),
        ("room", "forbidden"),
        ("../x", "forbidden"),
        ("x", "forbidden"),
        ("a+b@c.de", "forbidden"),
        ("a b@c.d", "unknown_channel"),
        // Names of our own beside the channels' in Redis.
        ("tidegate:ctl", "forbidden"),
        ("ctl", "forbidden"),
        ("tidegate:live:user:43", "forbidden"),
        ("tidegate:revoked:jti:x", "forbidden"),
        ("user:42 ", "unknown_channel"),
        (" user:42", "unknown_channel"),
        ("user:*", "unknown_channel"),
        ("user:4?", "unknown_channel"),
        ("user:[0-9]*", "unknown_channel"),
        ("room:*", "unknown_channel"),
        ("room:1\n", "unknown_channel"),
        ("room:1\0", "unknown_channel"),
        ("room:1\r\nSUBSCRIBE user:43", "unknown_channel"),
        ("room:\u{ff11}", "unknown_channel"),
        ("", "unknown_channel"),
        (&long, "unknown_channel"),
        (&just_too_long, "unknown_channel"),
    ] {
        for since in [None, Some("0"), Some(id.as_str()), Some("nonsense")] {
            let answer = subscribe(&mut client, name, since).await;
            assert_eq!((&answer["type"], &answer["code"]), (&json!("error"), &json!(code)), "{name:?} since {since:?}");
        }
        // In the query, alone and with a cursor; every byte escaped, so that it says the same.
        for more in ["", "&last_event_id=0"] {
            let path = format!("/v1/ws?channel={}{more}", percent(name));
            let answer = outcome(&gateway, &path, &[("Authorization", &auth)]).await;
            assert_eq!(answer, refused(403, "forbidden"), "{name:?}");
        }
    }
    for name in ["room:1", "room:", "a+b@c.d", "dir/../x", "user:42", "news"] {
        assert_eq!(subscribe(&mut client, name, None).await["type"], "ok", "{name}");
        // `+` stands for itself.
        let path = format!("/v1/ws?channel={name}");
        assert_eq!(outcome(&gateway, &path, &[("Authorization", &auth)]).await.0, 101, "{name}");
    }
    assert_eq!(redis.cli(&["PUBSUB", "NUMPAT"]), "0", "a name never becomes a pattern");

    // A cursor is a place, not a right: resuming asks anew.
    let narrower = bearer(&token(&json!({"sub": "42"})));
    let path = format!("/v1/ws?channel=room:1&last_event_id={id}");
    assert_eq!(outcome(&gateway, &path, &[("Authorization", &narrower)]).await, refused(403, "forbidden"));
    // What is withdrawn is not heard any more.
    let narrower = token(&json!({"sub": "42"}));
    client.send_json(&json!({"type": "auth", "token": narrower, "ref": "a"})).await;
    let answers = client.until("ok").await;
    assert!(answers.iter().any(|m| m["type"] == "unsubscribed" && m["channel"] == "room:1"), "{answers:?}");
    for name in ["room:1", "news", "a+b@c.d", "user:43"] {
        gateway.publish(name, &json!("unheard")).await;
    }
    gateway.publish("user:42", &json!("mine")).await;
    let next = client.json().await;
    assert_eq!((&next["channel"], &next["data"]), (&json!("user:42"), &json!("mine")), "{next}");
}

#[tokio::test]
async fn a_subject_of_any_bytes_has_a_channel_of_its_own() {
    let gateway = GatewayProcess::start(options()).await;
    for (sub, channel) in [("a b", "user:a%20b"), ("a%20b", "user:a%2520b"), ("\u{fc}*", "user:%C3%BC%2A")] {
        let auth = bearer(&token(&json!({"sub": sub})));
        let mut client = try_ws(&gateway, "/v1/ws", &[("Authorization", &auth)]).await.expect("let in");
        let hello = client.json().await;
        assert_eq!((&hello["user"], &hello["channels"]), (&json!(sub), &json!([channel])));
        client.until("ready").await;
        gateway.publish(channel, &json!(sub)).await;
        assert_eq!(client.json().await["data"], json!(sub));
    }
    let without = GatewayProcess::start(options().env("GATEWAY_USER_CHANNEL", "off")).await;
    let auth = bearer(&token(&json!({"sub": "42"})));
    let mut client = try_ws(&without, "/v1/ws", &[("Authorization", &auth)]).await.expect("let in");
    assert_eq!(client.json().await["channels"], json!([]));
    client.until("ready").await;
    assert_eq!(subscribe(&mut client, "user:42", None).await["code"], "forbidden");
}

#[tokio::test]
async fn a_session_may_join_as_many_channels_as_are_allowed_and_not_one_more() {
    let gateway = GatewayProcess::start(options().env("GATEWAY_MAX_CHANNELS", "3")).await;
    let with = |n: usize| {
        let names: Vec<String> = (0..n).map(|i| format!("c{i}")).collect();
        bearer(&token(&json!({"sub": "42", "channels": names, "subscribe": ["room:*"]})))
    };
    // One of them is the user's own.
    assert_eq!(outcome(&gateway, "/v1/ws", &[("Authorization", &with(2))]).await.0, 101);
    assert_eq!(outcome(&gateway, "/v1/ws", &[("Authorization", &with(3))]).await, refused(403, "too_many_channels"));
    let path = "/v1/ws?channel=room:1&channel=room:1";
    assert_eq!(outcome(&gateway, path, &[("Authorization", &with(1))]).await.0, 101, "the same one twice");
    let path = "/v1/ws?channel=room:1&channel=room:2";
    assert_eq!(outcome(&gateway, path, &[("Authorization", &with(1))]).await, refused(403, "too_many_channels"));
}
