//! A custom gateway, run in the test's own process over real sockets: every call of the plugin
//! trait as its text says, with the safe side taken where a plugin fails.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;

use serde_json::{Value, json};
use testkit::gateway::{JWT_SECRET, token};
use testkit::http::{self, Response};
use testkit::sse::SseClient;
use testkit::ws::{Frame, Heard, WsClient, opcode};
use tidegate::config::{Config, Purpose};
use tidegate::plugin::{
    Admission, Ask, BoxFuture, Bytes, Channel, CloseReason, Departure, GatewayHandle, Identity, Inbound, Plugin,
    Plugins, Publish, Received, Refusal, RefusalCode, SessionInfo, Stop as Told, Verdict, Who,
};
use tidegate::run::{Addresses, RunError, Stop, Surroundings, run};
use tokio::sync::{mpsc, watch};
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep, timeout};

/// The longest that a state may take to be reached; nothing is promised by it.
const SOON: Duration = Duration::from_secs(60);

/// What the plugin saw.
#[derive(Default)]
struct Seen {
    opened: Mutex<Vec<String>>,
    closed: Mutex<Vec<(String, CloseReason)>>,
    asks: Mutex<Vec<String>>,
    gateway: OnceLock<GatewayHandle>,
    running: watch::Sender<&'static str>,
}

/// Does as the user's, the channel's or the message's name says.
struct Obedient(Arc<Seen>);

impl Plugin for Obedient {
    fn name(&self) -> &'static str {
        "obedient"
    }

    fn admit<'a>(&'a self, who: &'a Identity, ask: &'a Ask) -> BoxFuture<'a, Result<Admission, Refusal>> {
        self.0.asks.lock().unwrap().push(ask.path.clone());
        match who.user.as_deref().unwrap_or_default() {
            "panics before it waits" => panic!("before there is a future"),
            "panics while it waits" => Box::pin(async { panic!("in the future") }),
            "slow" => Box::pin(std::future::pending()),
            "raw" => Box::pin(async { Ok(Admission::Raw) }),
            "refused" => Box::pin(async { Err(Refusal::new(RefusalCode::Forbidden, "not on a Sunday")) }),
            _ => Box::pin(async { Ok(Admission::Standard) }),
        }
    }

    fn may_subscribe(&self, _who: &Identity, channel: &Channel) -> Verdict {
        match channel.as_str() {
            "denied" => Verdict::Deny,
            "allowed" => Verdict::Allow,
            "panics" => panic!("may_subscribe"),
            _ => Verdict::Pass,
        }
    }

    fn publishing(&self, event: Publish) -> Option<Publish> {
        match event.channel.as_str() {
            "dropped" => None,
            "panics" => panic!("publishing"),
            "changed" => Some(Publish { data: Bytes::from_static(b"\"by the plugin\""), ..event }),
            _ => Some(event),
        }
    }

    fn received(&self, from: &SessionInfo, message: &Inbound) -> Received {
        let text = match message {
            Inbound::Text(text) if from.admission == Admission::Standard => text,
            Inbound::Binary(bytes) if from.admission == Admission::Standard && bytes.as_ref() != b"echo" => {
                return Received::Pass;
            }
            _ => return Received::Reply(message.clone()),
        };
        match serde_json::from_slice::<Value>(text).unwrap()["type"].as_str().unwrap() {
            "answer" => Received::Reply(Inbound::Text(Bytes::from_static(b"{\"type\":\"answered\"}"))),
            "swallow" => Received::Handled,
            "kick" => Received::Leave(CloseReason::Kicked),
            "panic" => panic!("received"),
            _ => Received::Pass,
        }
    }

    fn opened(&self, session: &SessionInfo) {
        self.0.opened.lock().unwrap().push(session.id.to_string());
        assert_ne!(session.identity.user.as_deref(), Some("panics when opened"));
    }

    fn closed(&self, session: &SessionInfo, reason: CloseReason) {
        self.0.closed.lock().unwrap().push((session.id.to_string(), reason));
        assert_ne!(session.identity.user.as_deref(), Some("panics when closed"));
    }

    fn run(self: Arc<Self>, gateway: GatewayHandle, stop: Told) -> BoxFuture<'static, ()> {
        Box::pin(async move {
            assert!(self.0.gateway.set(gateway).is_ok(), "called once");
            self.0.running.send_replace("running");
            stop.cancelled().await;
            // Something that takes a moment, as a last request would.
            sleep(Duration::from_millis(100)).await;
            self.0.running.send_replace("finished");
        })
    }
}

/// Its own task does not end by itself.
struct Stubborn;

impl Plugin for Stubborn {
    fn name(&self) -> &'static str {
        "stubborn"
    }

    fn run(self: Arc<Self>, _gateway: GatewayHandle, _stop: Told) -> BoxFuture<'static, ()> {
        Box::pin(std::future::pending())
    }
}

/// Its own task panics, before there is one.
struct Clumsy;

impl Plugin for Clumsy {
    fn name(&self) -> &'static str {
        "clumsy"
    }

    fn run(self: Arc<Self>, _gateway: GatewayHandle, _stop: Told) -> BoxFuture<'static, ()> {
        panic!("run")
    }
}

/// A custom gateway that serves.
struct Gateway {
    at: Addresses,
    seen: Arc<Seen>,
    stop: mpsc::Sender<Stop>,
    ended: JoinHandle<Result<(), RunError>>,
}

impl Gateway {
    async fn start() -> Self {
        let seen = Arc::new(Seen::default());
        let plugins = Plugins::new().with(Obedient(seen.clone())).with(Stubborn).with(Clumsy);
        let environment: BTreeMap<String, String> = [
            ("GATEWAY_LISTEN", "127.0.0.1:0"),
            ("GATEWAY_ADMIN_LISTEN", "127.0.0.1:0"),
            ("GATEWAY_PROBE_LISTEN", "127.0.0.1:0"),
            ("GATEWAY_JWT_SECRET", JWT_SECRET),
            ("GATEWAY_AUTH_TIMEOUT", "2s"),
            ("GATEWAY_DRAIN_GRACE", "0s"),
            ("GATEWAY_CLOSE_TIMEOUT", "1s"),
        ]
        .map(|(name, value)| (name.to_owned(), value.to_owned()))
        .into();
        let config = Config::from_environment(&environment.into_iter().collect(), Purpose::Serve).unwrap();
        let (stop, stops) = mpsc::channel(2);
        let (tell, told) = tokio::sync::oneshot::channel();
        let listening = Box::new(move |at: &Addresses| {
            let _ = tell.send(*at);
        });
        let ended = tokio::spawn(run(config, plugins, Surroundings { stops, listening, console_token: None }));
        let at = told.await.expect("it listens");
        let gateway = Self { at, seen, stop, ended };
        while http::get(gateway.at.probes, "/readyz").await.status() != 200 {
            sleep(Duration::from_millis(5)).await;
        }
        gateway
    }

    async fn connect(&self, claims: &Value, path: &str) -> Result<WsClient, Response> {
        WsClient::connect(self.at.public, path, &[("Authorization", &format!("Bearer {}", token(claims)))]).await
    }

    async fn open(&self, claims: &Value) -> WsClient {
        let mut client = self.connect(claims, "/v1/ws").await.unwrap_or_else(|refused| panic!("{}", refused.text()));
        client.until("ready").await;
        client
    }

    /// Status and `code` of a refusal.
    async fn refusal(&self, claims: &Value, path: &str) -> (u16, Value) {
        let refused = self.connect(claims, path).await.err().expect("it is refused");
        (refused.status(), refused.json()["code"].clone())
    }

    async fn publish(&self, channel: &str) -> Response {
        http::post_json(self.at.admin, "/v1/publish", &json!({"channel": channel, "data": "as sent"})).await
    }

    async fn n_panics(&self) -> u64 {
        let metrics = http::get(self.at.probes, "/metrics").await;
        let line = metrics.text().lines().find_map(|line| line.strip_prefix("gateway_plugin_panics_total "));
        line.expect("the counter is there").parse().unwrap()
    }

    fn handle(&self) -> &GatewayHandle {
        self.seen.gateway.get().expect("its task runs")
    }

    async fn drain(self) -> Arc<Seen> {
        self.stop.send(Stop::Drain).await.unwrap();
        timeout(SOON, self.ended).await.expect("it ends").unwrap().unwrap();
        self.seen
    }
}

fn user(sub: &str) -> Value {
    json!({"sub": sub, "channels": ["news"]})
}

/// The answer to a message.
async fn answer(client: &mut WsClient, message: Value) -> Value {
    client.send_json(&message).await;
    client.json().await
}

/// Reason and code of the close to come.
async fn end(client: &mut WsClient) -> (Value, u16) {
    let (messages, code) = client.until_closed().await;
    (messages.last().map_or(Value::Null, |bye| bye["reason"].clone()), code)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_first_refusal_decides_and_waiting_has_an_end() {
    let gateway = Gateway::start().await;
    let refused = gateway.connect(&user("refused"), "/v1/ws").await.err().unwrap();
    assert_eq!((refused.status(), &refused.json()["detail"]), (403, &json!("not on a Sunday")));
    let asked = Instant::now();
    let refused = gateway.connect(&user("slow"), "/v1/ws").await.err().unwrap();
    assert_eq!((refused.status(), &refused.json()["code"]), (503, &json!("auth_unavailable")));
    assert!(refused.header("retry-after").is_some());
    let took = asked.elapsed();
    assert!(took >= Duration::from_secs(2) && took < Duration::from_secs(10), "{took:?}");
    assert_eq!(gateway.handle().load().n_sessions, 0);
    assert!(gateway.seen.opened.lock().unwrap().is_empty());

    let path = format!("/v1/ws?x=1&access_token={}", token(&user("u")));
    let client = WsClient::connect(gateway.at.public, &path, &[]).await;
    assert!(client.is_ok());
    let asks = gateway.seen.asks.lock().unwrap().clone();
    assert!(asks.iter().all(|path| !path.contains("eyJ")), "no credential reaches a plugin: {asks:?}");
    assert!(asks.last().unwrap().contains("x=1"), "{asks:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_no_wins_over_a_yes_and_a_yes_over_the_token() {
    let gateway = Gateway::start().await;
    let claims = json!({"sub": "u", "channels": ["news", "denied"], "subscribe": ["*"]});
    let mut client = gateway.connect(&claims, "/v1/ws").await.unwrap_or_else(|refused| panic!("{}", refused.text()));
    let hello = client.json().await;
    let channels: Vec<&str> = hello["channels"].as_array().unwrap().iter().map(|c| c.as_str().unwrap()).collect();
    assert!(channels.contains(&"news") && !channels.contains(&"denied"), "{channels:?}");
    client.until("ready").await;
    let denied = answer(&mut client, json!({"type": "subscribe", "ref": 1, "channel": "denied"})).await;
    assert_eq!((&denied["code"], &denied["ref"]), (&json!("forbidden"), &json!(1)));
    assert_eq!(gateway.refusal(&claims, "/v1/ws?channel=denied").await, (403, json!("forbidden")));

    let mut client = gateway.open(&user("u")).await;
    let beyond = answer(&mut client, json!({"type": "subscribe", "ref": 2, "channel": "beyond the token"})).await;
    assert_eq!(beyond["code"], "unknown_channel");
    let beyond = answer(&mut client, json!({"type": "subscribe", "ref": 3, "channel": "beyond"})).await;
    assert_eq!(beyond["code"], "forbidden");
    let allowed = answer(&mut client, json!({"type": "subscribe", "ref": 4, "channel": "allowed"})).await;
    assert_eq!((&allowed["type"], &allowed["channel"]), (&json!("ok"), &json!("allowed")));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_event_may_be_changed_or_dropped_before_it_is_logged() {
    let gateway = Gateway::start().await;
    let mut client = gateway.open(&json!({"sub": "u", "channels": ["changed", "dropped", "kept"]})).await;
    let dropped = gateway.publish("dropped").await;
    assert_eq!((dropped.status(), &dropped.json()["code"]), (403, &json!("forbidden")));
    for (channel, data) in [("changed", "by the plugin"), ("kept", "as sent")] {
        assert_eq!(gateway.publish(channel).await.status(), 200);
        let event = client.json().await;
        assert_eq!((&event["channel"], &event["data"]), (&json!(channel), &json!(data)));
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_message_that_the_gateway_does_not_know_is_the_plugins() {
    let gateway = Gateway::start().await;
    let mut client = gateway.open(&user("u")).await;
    assert_eq!(answer(&mut client, json!({"type": "answer"})).await["type"], "answered");
    client.send_json(&json!({"type": "swallow"})).await;
    let unknown = answer(&mut client, json!({"type": "of nobody", "ref": 7})).await;
    assert_eq!((&unknown["code"], &unknown["ref"]), (&json!("unknown_type"), &json!(7)));
    client.send_frame(&Frame::new(opcode::BINARY, "echo")).await.unwrap();
    assert_eq!(client.next().await, Heard::Binary(b"echo".to_vec()));
    client.send_frame(&Frame::new(opcode::BINARY, "of nobody")).await.unwrap();
    assert_eq!(end(&mut client).await, (json!("bad_message"), 1003));

    let mut client = gateway.open(&user("u")).await;
    client.send_json(&json!({"type": "kick"})).await;
    let (messages, code) = client.until_closed().await;
    let bye = messages.last().unwrap();
    assert_eq!((&bye["reason"], &bye["reconnect"], code), (&json!("kicked"), &json!("never"), 4403));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_raw_session_is_bytes_and_nothing_else() {
    let gateway = Gateway::start().await;
    let mut client =
        gateway.connect(&user("raw"), "/v1/ws").await.unwrap_or_else(|refused| panic!("{}", refused.text()));
    let long = "x".repeat(60_000);
    for text in ["", "no JSON", r#"{"type":"ping"}"#, &long] {
        client.send_frame(&Frame::new(opcode::TEXT, text)).await.unwrap();
        // The first words of this session: there is no hello.
        assert_eq!(client.next().await, Heard::Text(text.to_owned()));
    }
    let begin = Frame { fin: false, ..Frame::new(opcode::BINARY, [0, 255]) };
    client.send_frame(&begin).await.unwrap();
    client.send_frame(&Frame::new(opcode::CONTINUATION, [1])).await.unwrap();
    assert_eq!(client.next().await, Heard::Binary(vec![0, 255, 1]));
    client.send_frame(&Frame::new(opcode::PING, "p")).await.unwrap();
    assert_eq!(client.next().await, Heard::Pong(b"p".to_vec()));
    assert_eq!(gateway.publish("news").await.status(), 200);
    let path = format!("/v1/sse?access_token={}", token(&user("raw")));
    assert_eq!(SseClient::connect(gateway.at.public, &path, &[]).await.err().unwrap().status(), 403);

    let draining = tokio::spawn(gateway.drain());
    let (messages, code) = client.until_closed().await;
    assert_eq!((messages, code), (vec![], 1001), "a close, and neither an event nor a bye before it");
    client.send_close(1001, "").await.unwrap();
    draining.await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_plugin_that_panics_takes_the_safe_side_and_is_counted() {
    let gateway = Gateway::start().await;
    // That of `Clumsy`'s own task.
    let mut n = 1;
    // It is counted once its story is told, which may be after a client has heard of it.
    let mut counted = async |more: u64| {
        n += more;
        let limit = Instant::now() + SOON;
        while gateway.n_panics().await < n {
            assert!(Instant::now() < limit, "{} of {n} panics", gateway.n_panics().await);
            sleep(Duration::from_millis(5)).await;
        }
        assert_eq!(gateway.n_panics().await, n);
    };
    counted(0).await;
    for sub in ["panics before it waits", "panics while it waits"] {
        assert_eq!(gateway.refusal(&user(sub), "/v1/ws").await, (500, json!("internal")));
    }
    counted(2).await;

    let all = json!({"sub": "u", "subscribe": ["*"], "channels": ["panics", "news"]});
    assert_eq!(gateway.refusal(&all, "/v1/ws?channel=panics").await, (403, json!("forbidden")));
    counted(2).await;
    let mut client = gateway.open(&json!({"sub": "u", "subscribe": ["*"]})).await;
    let denied = answer(&mut client, json!({"type": "subscribe", "ref": 1, "channel": "panics"})).await;
    assert_eq!(denied["code"], "forbidden");
    counted(1).await;

    let dropped = gateway.publish("panics").await;
    assert_eq!((dropped.status(), &dropped.json()["code"]), (403, &json!("forbidden")));
    counted(1).await;

    client.send_json(&json!({"type": "panic"})).await;
    assert_eq!(end(&mut client).await, (json!("internal"), 1011));
    counted(1).await;

    // Those that only watch change nothing.
    for sub in ["panics when opened", "panics when closed"] {
        let mut client = gateway.open(&user(sub)).await;
        assert_eq!(answer(&mut client, json!({"type": "ping"})).await["type"], "pong");
        client.send_close(1000, "").await.unwrap();
        assert_eq!(client.until_closed().await.1, 1000);
    }
    until(|| gateway.handle().load().n_sessions == 0).await;
    counted(2).await;
}

async fn until(done: impl Fn() -> bool) {
    let limit = Instant::now() + SOON;
    while !done() {
        assert!(Instant::now() < limit, "it does not come to pass");
        sleep(Duration::from_millis(5)).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_session_that_opened_is_closed_exactly_once_whatever_ended_it() {
    const ROUNDS: usize = 20;
    let gateway = Gateway::start().await;
    for round in 0..ROUNDS {
        let users = ["a", "b", "c", "d", "e", "f"].map(|kind| user(&format!("{kind}{round}")));
        let opened = futures_util::future::join_all(users.iter().map(|user| gateway.open(user))).await;
        let [vanishing, resetting, mut closing, mut breaking, mut departing, mut kicked] =
            opened.try_into().ok().expect("six");
        let _ = gateway.open(&user("panics when opened")).await;
        drop(vanishing);
        resetting.socket().set_zero_linger().unwrap();
        drop(resetting);
        closing.send_close(1000, "").await.unwrap();
        breaking.send_bytes(&[0xff; 16]).await.unwrap();
        let who = Who::User(format!("e{round}").into());
        assert_eq!(gateway.handle().depart(Departure { who, reason: CloseReason::Kicked, over: Duration::ZERO }), 1);
        kicked.send_json(&json!({"type": "kick"})).await;
        assert_eq!(end(&mut departing).await, (json!("kicked"), 4403));
        let codes = [end(&mut closing).await.1, end(&mut breaking).await.1, end(&mut kicked).await.1];
        assert_eq!(codes, [1000, 1002, 4403]);
    }
    // Nobody is asked to leave who has left already.
    until(|| gateway.handle().load().n_sessions == 0).await;
    // Some are there until the end, one of them deaf.
    let mut last = gateway.open(&user("last")).await;
    let deaf = gateway.open(&user("deaf")).await;
    let draining = tokio::spawn(gateway.drain());
    assert_eq!(end(&mut last).await, (json!("drain"), 1001));
    let seen = draining.await.unwrap();
    drop(deaf);

    let mut opened = seen.opened.lock().unwrap().clone();
    let mut closed: Vec<String> = seen.closed.lock().unwrap().iter().map(|(id, _)| id.clone()).collect();
    opened.sort();
    closed.sort();
    assert_eq!(opened.len(), ROUNDS * 7 + 2);
    assert_eq!(opened, closed);
    let n_for = |reason| seen.closed.lock().unwrap().iter().filter(|(_, r)| *r == reason).count();
    assert_eq!(n_for(CloseReason::Kicked), 2 * ROUNDS);
    assert_eq!((n_for(CloseReason::Client), n_for(CloseReason::Lost)), (ROUNDS, 3 * ROUNDS));
    assert_eq!(n_for(CloseReason::Drain), 2);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn ending_at_once_closes_the_plugins_books_too() {
    let gateway = Gateway::start().await;
    let mut client = gateway.open(&user("u")).await;
    gateway.stop.send(Stop::Now).await.unwrap();
    timeout(SOON, gateway.ended).await.expect("it ends").unwrap().unwrap();
    assert_eq!(end(&mut client).await.1, 1006);
    assert_eq!(gateway.seen.opened.lock().unwrap().len(), 1);
    assert_eq!(gateway.seen.closed.lock().unwrap().len(), 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_plugins_own_task_publishes_and_is_let_finish_at_the_end() {
    let gateway = Gateway::start().await;
    let mut client = gateway.open(&user("u")).await;
    let event = Publish {
        channel: Channel::new("news").unwrap(),
        name: None,
        data: Bytes::from_static(b"{\"from\":\"the plugin\"}"),
        ephemeral: false,
        key: None,
    };
    let published = gateway.handle().publish(event).await.unwrap();
    assert!(published.id.is_some());
    assert_eq!(client.json().await["data"], json!({"from": "the plugin"}));
    let load = gateway.handle().load();
    assert_eq!((load.n_sessions, load.phase.word()), (1, "serving"));
    let asked = Departure { who: Who::All, reason: CloseReason::Recycle, over: Duration::from_millis(200) };
    assert_eq!(gateway.handle().depart(asked), 1);
    assert_eq!(end(&mut client).await, (json!("recycle"), 1012));
    assert_eq!(*gateway.seen.running.borrow(), "running");
    drop(client);
    // `Stubborn`'s task does not hold the end up for longer than plugins have.
    let seen = gateway.drain().await;
    assert_eq!(*seen.running.borrow(), "finished");
}
