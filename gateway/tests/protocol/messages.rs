//! The JSON objects of the protocol on a WebSocket: what each message of a client is answered with,
//! and that what is published arrives as it was written.

use serde_json::{Value, json};
use testkit::gateway::{GatewayProcess, token};
use testkit::ws::{Frame, WsClient, opcode};

use super::{all, next_text, options, publish_text, talkative, usual_token, ws, ws_with};

async fn ask(client: &mut WsClient, message: Value) -> Value {
    client.send_json(&message).await;
    client.json().await
}

async fn ask_text(client: &mut WsClient, message: &str) -> Value {
    client.send_frame(&Frame::new(opcode::TEXT, message)).await.expect("the connection is there");
    client.json().await
}

fn is_error(answer: &Value, code: &str) -> bool {
    let has_shape = answer["message"].is_string() && answer["retry"].is_boolean();
    answer["type"] == "error" && answer["code"] == code && has_shape
}

#[tokio::test]
async fn a_session_begins_with_hello_and_then_ready() {
    let gateway = GatewayProcess::start(options().env("GATEWAY_NODE", "node-a")).await;
    let mut client = ws_with(&gateway, &usual_token(), "/v1/ws?channel=room:1").await;
    let hello = client.json().await;
    assert_eq!(hello["type"], "hello");
    assert_eq!(hello["node"], "node-a");
    assert_eq!(hello["user"], "42");
    assert_eq!(hello["channels"], json!(["user:42", "news", "room:1"]));
    assert_eq!(hello["heartbeat_ms"], 25_000);
    assert!(hello["expires_at"].is_u64() && hello["session"].is_string(), "{hello}");
    let reconnect = &hello["reconnect"];
    let bounds = ["min_ms", "max_ms", "first_max_ms"].map(|name| reconnect[name].as_u64().expect("a number of ms"));
    assert!(bounds[0] < bounds[1] && bounds[2] >= 1_000, "{reconnect}");
    let ready = client.json().await;
    assert_eq!((&ready["type"], &ready["resume"], &ready["replayed"]), (&json!("ready"), &json!("new"), &json!(0)));
    assert!(ready["id"].as_str().is_some_and(|id| id.contains('-')), "{ready}");
    let mut other = ws_with(&gateway, &usual_token(), "/v1/ws").await;
    assert_ne!(other.json().await["session"], hello["session"]);
}

#[tokio::test]
async fn every_message_of_a_client_has_its_answer() {
    let gateway = GatewayProcess::start(talkative().env("GATEWAY_MAX_CHANNELS", "4")).await;
    let mut client = ws(&gateway).await;

    // No message at all: the session stays.
    for text in ["", "x", "[]", "[\"ping\"]", "null", "1", "\"ping\"", "{", "{}", r#"{"type":1}"#, r#"{"type":null}"#] {
        assert!(is_error(&ask_text(&mut client, text).await, "bad_message"), "{text}");
    }
    for (bad, code) in [
        (json!({"type": "nobody-knows-this"}), "unknown_type"),
        (json!({"type": "PING"}), "unknown_type"),
        (json!({"type": "subscribe"}), "bad_message"),
        (json!({"type": "subscribe", "channel": 7}), "bad_message"),
        (json!({"type": "subscribe", "channel": "room:1", "since": 7}), "bad_message"),
        (json!({"type": "unsubscribe"}), "bad_message"),
        (json!({"type": "auth"}), "bad_message"),
        (json!({"type": "auth", "token": 1}), "bad_message"),
        (json!({"type": "auth", "token": "x.y.z"}), "token_invalid"),
        (json!({"type": "auth", "token": ""}), "token_invalid"),
        (json!({"type": "auth", "token": token(&json!({"sub": "43"}))}), "token_invalid"),
        (json!({"type": "auth", "token": token(&json!({"sub": "42", "exp": 1}))}), "token_expired"),
        (json!({"type": "subscribe", "channel": "other"}), "forbidden"),
        (json!({"type": "subscribe", "channel": "user:43"}), "forbidden"),
        (json!({"type": "subscribe", "channel": ""}), "unknown_channel"),
        (json!({"type": "subscribe", "channel": "room:*"}), "unknown_channel"),
        (json!({"type": "unsubscribe", "channel": "a b"}), "unknown_channel"),
        (json!({"type": "busy"}), "bad_message"),
        (json!({"type": "busy", "for_ms": -1}), "bad_message"),
        (json!({"type": "busy", "for_ms": 1.5}), "bad_message"),
        (json!({"type": "busy", "for_ms": "1"}), "bad_message"),
        (json!({"type": "busy", "for_ms": 60_001}), "bad_message"),
    ] {
        let mut asked = bad.clone();
        asked["ref"] = json!("r");
        let answer = ask(&mut client, asked).await;
        assert!(is_error(&answer, code) && answer["ref"] == "r", "{bad}: {answer}");
    }

    // `busy` has no answer, so what comes next is that of the ping.
    for for_ms in [0, 1, 60_000, 0] {
        client.send_json(&json!({"type": "busy", "for_ms": for_ms})).await;
        assert_eq!(ask(&mut client, json!({"type": "ping"})).await, json!({"type": "pong"}));
    }
    // Fields that nobody knows are nobody's business.
    let answer = ask(&mut client, json!({"type": "ping", "colour": {"deep": [1, 2]}, "channel": 7})).await;
    assert_eq!(answer, json!({"type": "pong"}));

    // Of four channels two are held.
    for (channel, code) in [("room:1", ""), ("room:2", ""), ("room:3", "too_many_channels")] {
        let answer = ask(&mut client, json!({"type": "subscribe", "channel": channel, "ref": 1})).await;
        match code {
            "" => assert_eq!((&answer["type"], &answer["resume"]), (&json!("ok"), &json!("new")), "{answer}"),
            code => assert!(is_error(&answer, code), "{answer}"),
        }
    }
    let again = ask(&mut client, json!({"type": "subscribe", "channel": "room:1", "since": "0"})).await;
    assert_eq!((&again["type"], &again["channel"]), (&json!("ok"), &json!("room:1")), "{again}");
    gateway.publish("room:1", &json!("once")).await;
    gateway.publish("news", &json!("after")).await;
    let heard = [client.json().await, client.json().await];
    assert_eq!(all(&heard, "data"), ["once", "after"], "twice subscribed, once delivered");

    for channel in ["room:1", "room:1", "room:never-held", "news", "user:42"] {
        let answer = ask(&mut client, json!({"type": "unsubscribe", "channel": channel, "ref": 2})).await;
        assert_eq!((&answer["type"], &answer["channel"], &answer["ref"]), (&json!("ok"), &json!(channel), &json!(2)));
    }
    gateway.publish("room:1", &json!("unheard")).await;
    gateway.publish("news", &json!("unheard")).await;
    gateway.publish("room:2", &json!("heard")).await;
    assert_eq!(client.json().await["data"], "heard");
    // A channel that the token joins may be left and asked for again, with what was missed.
    let since = json!({"type": "subscribe", "channel": "news", "since": "0", "ref": 3});
    client.send_json(&since).await;
    let answers = client.until("ok").await;
    let (ok, replayed) = answers.split_last().expect("ok came");
    assert_eq!(all(replayed, "data"), ["after", "unheard"]);
    assert!(replayed.iter().all(|event| event["replay"] == true), "{replayed:?}");
    assert_eq!((&ok["ref"], &ok["channel"]), (&json!(3), &json!("news")));
    gateway.publish("news", &json!("live")).await;
    let live = client.json().await;
    assert_eq!((&live["data"], &live["replay"]), (&json!("live"), &Value::Null));
}

#[tokio::test]
async fn a_ref_comes_back_as_it_went_out() {
    let gateway = GatewayProcess::start(talkative()).await;
    let mut client = ws(&gateway).await;
    for reference in [r#""a\u00e9\n\"""#, "7", "-1.5", "true", "null", r#"{"a":[1,{"b":null}]}"#, "[]", "1e3"] {
        let message = format!(r#"{{"type":"unsubscribe","channel":"room:1","ref":{reference}}}"#);
        let answer = ask_text(&mut client, &message).await;
        let sent: Value = serde_json::from_str(reference).unwrap();
        assert_eq!((&answer["type"], &answer["ref"]), (&json!("ok"), &sent), "{answer}");
    }
    // As text too: a number that a double cannot hold.
    let message = r#"{"type":"unsubscribe","channel":"room:1","ref":9007199254740993}"#;
    client.send_frame(&Frame::new(opcode::TEXT, message)).await.unwrap();
    assert!(next_text(&mut client).await.contains(r#""ref":9007199254740993"#));
    // What is too long to be a reference is no message; below the bound it is one.
    let with = |n: usize| json!({"type": "unsubscribe", "channel": "room:1", "ref": "x".repeat(n)});
    assert_eq!(ask(&mut client, with(126)).await["type"], "ok");
    assert!(is_error(&ask(&mut client, with(127)).await, "bad_message"));
    // None given, none comes back.
    let answer = ask(&mut client, json!({"type": "unsubscribe", "channel": "room:1"})).await;
    assert!(answer.get("ref").is_none(), "{answer}");
}

#[tokio::test]
async fn data_arrives_as_the_text_that_was_published() {
    let gateway = GatewayProcess::start(options()).await;
    let mut client = ws(&gateway).await;
    for data in [
        "1.0e3",
        "9007199254740993",
        "-0",
        "1E400",
        "123456789012345678901234567890.000",
        "null",
        "true",
        r#""""#,
        r#""\u0041\u00e9\ud83c\udf0a\/\b\f""#,
        "\"\u{1f30a} \u{2028}\u{2029} \u{feff}\"",
        r#"{"b":1,"a":2,"b":3}"#,
        r#"{ "spaced" : [ 1 , 2 ] }"#,
        "[[[[]]]]",
        r#""\u0000""#,
    ] {
        let published = publish_text(&gateway, format!(r#"{{"channel":"news","data":{data}}}"#).as_bytes()).await;
        assert_eq!(published.status(), 200, "{data}: {}", published.text());
        let text = next_text(&mut client).await;
        let (_, tail) = text.split_once(r#""data":"#).expect("an event has data");
        assert_eq!(tail.strip_suffix('}'), Some(data));
    }
    // White space between tokens may become other white space, never a line end.
    let published = publish_text(&gateway, b"{\"channel\":\"news\",\"data\":{\r\n\t\"a\"\n:\r1}}").await;
    assert_eq!(published.status(), 200);
    let text = next_text(&mut client).await;
    assert!(!text.contains(['\r', '\n']), "{text:?}");
    assert_eq!(serde_json::from_str::<Value>(&text).unwrap()["data"], json!({"a": 1}));
    // A replay is the same text again.
    let mut late = ws_with(&gateway, &usual_token(), "/v1/ws?last_event_id=0").await;
    late.json().await;
    let first = next_text(&mut late).await;
    assert!(first.ends_with(r#""data":1.0e3}"#), "{first}");
}

#[tokio::test]
async fn names_ids_and_ephemeral_events_are_told_apart() {
    let gateway = GatewayProcess::start(options()).await;
    let mut client = ws(&gateway).await;
    let id = gateway.publish("news", &json!(1)).await;
    let event = client.json().await;
    assert_eq!(event, json!({"type": "event", "channel": "news", "id": id, "data": 1}));
    let named = json!({"channel": "news", "data": 2, "event": "order.paid"});
    let id = gateway.try_publish(&named).await.json()["id"].clone();
    assert_eq!(
        client.json().await,
        json!({"type": "event", "channel": "news", "id": id, "event": "order.paid", "data": 2})
    );
    let fleeting = gateway.try_publish(&json!({"channel": "news", "data": 3, "ephemeral": true})).await;
    assert_eq!(fleeting.json(), json!({"id": null}));
    assert_eq!(client.json().await, json!({"type": "event", "channel": "news", "data": 3}));
    // It is for whoever is here: no history has it.
    let mut late = ws_with(&gateway, &usual_token(), "/v1/ws?last_event_id=0").await;
    let messages = late.until("ready").await;
    let data: Vec<&Value> = messages.iter().filter(|m| m["type"] == "event").map(|m| &m["data"]).collect();
    assert_eq!(data, [&json!(1), &json!(2)]);
    for bad in ["", "a b", "ä", &"x".repeat(65)] {
        let answer = gateway.try_publish(&json!({"channel": "news", "data": 1, "event": bad})).await;
        assert_eq!(answer.status(), 400, "{bad:?}");
    }
}

#[tokio::test]
async fn who_says_too_much_is_told_and_then_ended() {
    let gateway =
        GatewayProcess::start(options().env("GATEWAY_CLIENT_BURST", "20").env("GATEWAY_CLIENT_RATE", "1")).await;
    let mut other = ws(&gateway).await;
    let mut client = ws(&gateway).await;
    let ping = Frame::new(opcode::TEXT, r#"{"type":"ping","ref":1}"#).bytes();
    client.send_bytes(&ping.repeat(2_000)).await.unwrap();
    let (messages, code) = client.until_closed().await;
    let n_of = |kind: &str| messages.iter().filter(|m| m["type"] == kind).count();
    assert_eq!(code, 1008);
    // The burst, and what the rate gave meanwhile.
    assert!((20..=25).contains(&n_of("pong")), "{}", n_of("pong"));
    assert!((18..=22).contains(&n_of("error")), "{}", n_of("error"));
    for error in messages.iter().filter(|m| m["type"] == "error") {
        assert!(is_error(error, "rate_limited") && error["retry"] == true, "{error}");
        assert!(error["after_ms"].as_u64().is_some_and(|ms| ms > 0), "{error}");
    }
    let bye = messages.last().expect("a bye");
    assert_eq!((&bye["type"], &bye["reason"], &bye["code"]), (&json!("bye"), &json!("bad_message"), &json!(1008)));
    // `since` reads history and costs ten.
    let mut reader = ws(&gateway).await;
    for n in [1, 2] {
        reader.send_json(&json!({"type": "subscribe", "channel": format!("room:{n}"), "since": "0"})).await;
        assert_eq!(reader.json().await["type"], "ok");
    }
    let answer = ask(&mut reader, json!({"type": "subscribe", "channel": "room:3", "since": "0", "ref": 9})).await;
    assert!(is_error(&answer, "rate_limited") && answer["ref"] == 9, "{answer}");
    // Nobody else noticed.
    assert_eq!(ask(&mut other, json!({"type": "ping"})).await["type"], "pong");
}

#[tokio::test]
async fn a_new_token_replaces_the_old_one_in_all() {
    let gateway = GatewayProcess::start(options()).await;
    let mut client = ws(&gateway).await;
    assert_eq!(ask(&mut client, json!({"type": "subscribe", "channel": "room:1"})).await["type"], "ok");
    let narrower = token(&json!({"sub": "42", "channels": ["other"], "subscribe": ["news"], "jti": "second"}));
    client.send_json(&json!({"type": "auth", "token": narrower, "ref": "a"})).await;
    let answers = client.until("ok").await;
    let (ok, gone) = answers.split_last().expect("ok came");
    assert_eq!(ok["ref"], "a");
    assert_eq!(gone.len(), 1, "{gone:?}");
    assert_eq!(gone[0], json!({"type": "unsubscribed", "channel": "room:1", "reason": "grant"}));
    // What only the new one names is joined, as it would be by a new connection.
    let joined = client.json().await;
    assert_eq!((&joined["type"], &joined["channel"], &joined["ref"]), (&json!("ok"), &json!("other"), &Value::Null));
    gateway.publish("other", &json!("joined")).await;
    assert_eq!(client.json().await["data"], "joined");
    gateway.publish("room:1", &json!("unheard")).await;
    gateway.publish("news", &json!("heard")).await;
    assert_eq!(client.json().await["data"], "heard");
    let answer = ask(&mut client, json!({"type": "subscribe", "channel": "room:1"})).await;
    assert!(is_error(&answer, "forbidden"), "{answer}");
    // One that was revoked is none, and changes nothing.
    let revoked = testkit::http::post_json(gateway.admin(), "/v1/revocations", &json!({"jti": "third"})).await;
    assert_eq!(revoked.status(), 204);
    let third = token(&json!({"sub": "42", "subscribe": ["room:*"], "jti": "third"}));
    let answer = ask(&mut client, json!({"type": "auth", "token": third, "ref": "b"})).await;
    assert!(is_error(&answer, "token_revoked") && answer["ref"] == "b", "{answer}");
    // The new one is what a revocation finds.
    let revoked = testkit::http::post_json(gateway.admin(), "/v1/revocations", &json!({"jti": "second"})).await;
    assert_eq!(revoked.status(), 204);
    let (messages, code) = client.until_closed().await;
    assert_eq!((code, &messages[0]["reason"]), (4403, &json!("revoked")));
}
