//! Two deployments on one Redis whose prefixes look alike, with nodes, users and tokens of the same
//! names: nothing that is said, logged, revoked, counted or replaced in one is seen in the other.

use serde_json::{Value, json};
use testkit::gateway::{GatewayProcess, token};
use testkit::http;
use testkit::numbered::call_redis;
use testkit::redis::RedisServer;
use testkit::ws::WsClient;

use super::{bearer, on_redis, until, ws};

/// One begins with the other up to its colon, and each with the third.
const PREFIXES: [&str; 3] = ["a:", "ab:", "a"];

async fn on(redis: &RedisServer, prefix: &str) -> GatewayProcess {
    let options = on_redis(&redis.url())
        .env("GATEWAY_REDIS_PREFIX", prefix)
        .env("GATEWAY_NODE", "node")
        .env("GATEWAY_FLEET_REPORT", "1s")
        .env("GATEWAY_MAX_SESSIONS_PER_USER", "2");
    GatewayProcess::start(options).await
}

fn claims(of: &str) -> Value {
    // `iat` lies before any revocation by user.
    json!({"sub": of, "jti": format!("j-{of}"), "sid": format!("s-{of}"), "iat": 1, "channels": ["news"]})
}

/// The `data` of the events up to the one whose data is `"end"`, without it.
async fn heard(client: &mut WsClient) -> Vec<Value> {
    let mut heard = Vec::new();
    loop {
        let event = client.until("event").await.pop().expect("until gives at least one");
        if event["data"] == "end" {
            return heard;
        }
        heard.push(event["data"].clone());
    }
}

async fn is_there(client: &mut WsClient) {
    client.send_json(&json!({"type": "ping"})).await;
    assert_eq!(client.json().await["type"], "pong");
}

/// By the API, by the Function and by a plain PUBLISH, each with the deployment's name.
async fn publish_every_way(redis: &RedisServer, gateway: &GatewayProcess, prefix: &str) -> Vec<Value> {
    let said = |how: &str| format!("{how} of {prefix}");
    gateway.publish("news", &json!(said("API"))).await;
    let (log, live) = (format!("{prefix}:log"), format!("{prefix}:live:news"));
    let (logged, cast) = (json!(said("Function")).to_string(), json!({"data": said("PUBLISH")}).to_string());
    let commands: [&[&str]; 2] =
        [&["FCALL", "tidegate_publish", "1", &log, "news", &logged], &["PUBLISH", &live, &cast]];
    let replies = call_redis(redis.addr(), &commands.map(<[&str]>::to_vec)).await;
    assert!(replies.len() == 2 && replies[1] == ":1", "heard by this deployment alone: {replies:?}");
    ["API", "Function", "PUBLISH"].map(|how| json!(said(how))).into()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_said_and_logged_in_one_deployment_is_heard_and_replayed_in_no_other() {
    let redis = RedisServer::plain();
    let mut all = Vec::new();
    for prefix in PREFIXES {
        let gateway = on(&redis, prefix).await;
        let client = ws(gateway.public(), &claims("u")).await;
        all.push((prefix, gateway, client));
    }
    let mut said = Vec::new();
    for (prefix, gateway, _) in &all {
        said.push(publish_every_way(&redis, gateway, prefix).await);
    }
    for ((_, gateway, client), said) in all.iter_mut().zip(&said) {
        gateway.publish("news", &json!("end")).await;
        assert_eq!(heard(client).await, *said);
        // The log: what was logged here and nothing else.
        let auth = bearer(&claims("u"));
        let headers = [("Authorization", auth.as_str()), ("Last-Event-ID", "0")];
        let mut again = WsClient::connect(gateway.public(), "/v1/ws", &headers).await.expect("a session");
        assert_eq!(heard(&mut again).await, said[..2]);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn who_is_revoked_replaced_or_counted_in_one_deployment_is_let_alone_in_the_others() {
    let redis = RedisServer::plain();
    let mut all = Vec::new();
    for prefix in PREFIXES {
        let gateway = on(&redis, prefix).await;
        let mut clients = Vec::new();
        for of in ["jti", "sid", "sub", "many", "many"] {
            clients.push(ws(gateway.public(), &claims(of)).await);
        }
        all.push((gateway, clients));
    }
    for (gateway, _) in &all {
        let own = async || {
            let fleet = http::get(gateway.admin(), "/v1/fleet").await.json();
            (fleet["nodes"].as_array().map(Vec::len), fleet["total"].as_u64()) == (Some(1), Some(5))
        };
        until("its own five sessions in its own fleet of one", own).await;
    }
    // One more than a user may have, in the first: its oldest goes, and nobody elsewhere.
    let (first, rest) = all.split_first_mut().expect("three");
    let (gateway, clients) = first;
    let third = ws(gateway.public(), &claims("many")).await;
    assert_eq!(clients[3].until_closed().await.1, 4409);
    for (i, body) in [json!({"jti": "j-jti"}), json!({"sid": "s-sid"}), json!({"sub": "sub"})].iter().enumerate() {
        let done = http::post_json(gateway.admin(), "/v1/revocations", body).await;
        assert_eq!(done.status(), 204, "{}", done.text());
        assert_eq!(clients[i].until_closed().await.1, 4403, "{body}");
        let kind = ["jti", "sid", "sub"][i];
        let auth = format!("Bearer {}", token(&claims(kind)));
        let refused = WsClient::connect(gateway.public(), "/v1/ws", &[("Authorization", &auth)]).await;
        assert_eq!(refused.err().map(|refused| refused.status()), Some(401), "{kind}");
        for (other, clients) in rest.iter_mut() {
            is_there(&mut clients[i]).await;
            let mut new = ws(other.public(), &claims(kind)).await;
            is_there(&mut new).await;
        }
    }
    for (_, clients) in rest {
        is_there(&mut clients[3]).await;
        is_there(&mut clients[4]).await;
    }
    drop(third);
}
