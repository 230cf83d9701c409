//! What is no event, wherever a stranger puts it: on the live channel, into the log, into the API.
//! It reaches nobody, it is counted, and the next event follows on every wire.

use serde_json::{Value, json};
use testkit::gateway::GatewayProcess;
use testkit::http;
use testkit::numbered::call_redis;
use testkit::redis::RedisServer;
use testkit::sse::SseClient;
use testkit::ws::{Heard, WsClient};

use super::{bearer, hearing, on_redis, resident, sse, ws};

const SKIPPED: &str = "gateway_events_skipped_total{reason=\"malformed\"}";
const LIVE: &str = "tidegate:live:news";
const STREAM: &str = "tidegate:ch:news";

/// A listener on either wire.
struct Two {
    ws: WsClient,
    sse: SseClient,
}

impl Two {
    async fn on(gateway: &GatewayProcess) -> Self {
        let claims = hearing(&["news"]);
        Self { ws: ws(gateway.public(), &claims).await, sse: sse(gateway.public(), &claims).await }
    }

    /// Both resume.
    async fn resumed(gateway: &GatewayProcess, cursor: &str) -> (Self, Vec<Value>) {
        let auth = bearer(&hearing(&["news"]));
        let headers = [("Authorization", auth.as_str()), ("Last-Event-ID", cursor)];
        let mut ws = WsClient::connect(gateway.public(), "/v1/ws", &headers).await.expect("a session");
        let messages = ws.until("ready").await;
        let mut sse = SseClient::connect(gateway.public(), "/v1/sse", &headers).await.expect("a stream");
        let blocks: Vec<Value> = sse.until("ready").await.iter().map(|block| block.json()).collect();
        let replayed = |messages: &[Value]| -> Vec<Value> {
            messages.iter().filter(|m| m["type"] == "event").map(|m| m["data"].clone()).collect()
        };
        let heard = replayed(&messages);
        assert_eq!(replayed(&blocks), heard, "on both wires alike");
        for ready in [messages.last(), blocks.last()].map(|last| last.expect("ready")) {
            assert_eq!(ready["replayed"], heard.len(), "{ready}");
            assert_ne!(ready["resume"], "gap", "{ready}");
        }
        (Self { ws, sse }, heard)
    }

    /// What is next on both is an event, and `data` in it is this text.
    async fn hear(&mut self, data: &str) {
        let Heard::Text(text) = self.ws.next().await else { panic!("no message, but {data} was due") };
        let block = self.sse.block().await;
        let written = block.data.expect("a message");
        for message in [text, written] {
            assert!(message.contains(&format!(r#""data":{data}"#)), "{data} was due: {message:.300}");
        }
    }
}

fn words(words: &[&[u8]]) -> Vec<Vec<u8>> {
    words.iter().map(|word| word.to_vec()).collect()
}

async fn redis_says(redis: &RedisServer, command: Vec<Vec<u8>>) -> String {
    call_redis(redis.addr(), &[command]).await.pop().expect("a reply")
}

/// Publishes past the gateway, on the live channel.
async fn cast(redis: &RedisServer, payload: &[u8]) {
    assert_eq!(redis_says(redis, words(&[b"PUBLISH", LIVE.as_bytes(), payload])).await, ":1", "the gateway hears it");
}

/// Logs past the gateway, as any back end may.
async fn log(redis: &RedisServer, data: &[u8]) -> String {
    let reply = redis_says(redis, words(&[b"FCALL", b"tidegate_publish", b"1", b"tidegate:log", b"news", data])).await;
    reply.strip_prefix('$').unwrap_or_else(|| panic!("{reply}")).to_owned()
}

fn nested(n: usize) -> String {
    "[".repeat(n) + &"]".repeat(n)
}

fn poison() -> Vec<Vec<u8>> {
    let mut all: Vec<Vec<u8>> = [
        &b""[..],
        b"{",
        b"null",
        b"{}",
        b"\xff\xfe\x00\x80",
        b"{\"data\":\"\xff\"}",
        b"{\"data\":\"\xed\xa0\x80\"}",
        b"{\"data\":1}{\"data\":2}",
        b"{\"data\":1,\"event\":\"a b\"}",
        b"{\"data\":1,\"event\":\"\"}",
        b"{\"data\":1,\"event\":7}",
        br#"{"version":99,"payload":"?"}"#,
        b"5-7 x",
        b"5-x \n1",
        b"5-7 a b\n1",
        b"18446744073709551616-1 \n1",
        b"- \n{",
        b"- \n",
        b"- \xff\n1",
    ]
    .map(<[u8]>::to_vec)
    .into();
    all.push(vec![b'['; 100_000]);
    all.push(format!(r#"{{"data":{}}}"#, nested(100_000)).into_bytes());
    all.push(format!(r#"{{"data":"{}"}}"#, "x".repeat(64 << 10)).into_bytes());
    all
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn poison_on_the_live_channel_is_counted_each_time_and_the_next_event_follows_on_both_wires() {
    let redis = RedisServer::plain();
    redis.cli(&["CONFIG", "SET", "client-output-buffer-limit", "pubsub 0 0 0"]);
    let gateway = GatewayProcess::start(on_redis(&redis.url())).await;
    let mut two = Two::on(&gateway).await;
    let (poison, before) = (poison(), resident(&gateway));
    for (i, payload) in poison.iter().enumerate() {
        cast(&redis, payload).await;
        cast(&redis, format!(r#"{{"data":{i}}}"#).as_bytes()).await;
        two.hear(&i.to_string()).await;
    }
    // 64 MiB at once, and nobody who gives up the link for them: they are passed over as they come.
    // They lie ready in Redis, which is silent while it works.
    assert_eq!(redis.cli(&["SETRANGE", "blob", &((64 << 20) - 1).to_string(), "x"]), (64 << 20).to_string());
    let publish = "return redis.call('PUBLISH', ARGV[1], redis.call('GET', KEYS[1]))";
    assert_eq!(redis.cli(&["EVAL", publish, "1", "blob", LIVE]), "1");
    log(&redis, br#""after""#).await;
    two.hear(r#""after""#).await;
    let grown = resident(&gateway).saturating_sub(before);
    assert!(grown < 24 << 20, "{grown} bytes");
    gateway.until_metric(SKIPPED, (poison.len() + 1) as f64).await;
    assert_eq!(gateway.metric("gateway_redis_repairs_total").await, Some(0.0), "the link stood");
    assert!(!gateway.stderr().contains("panicked"), "{}", gateway.stderr());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn poison_in_the_log_is_passed_over_by_who_hears_it_live_and_by_who_resumes_over_it() {
    let redis = RedisServer::plain();
    let gateway = GatewayProcess::start(on_redis(&redis.url())).await;
    let mut two = Two::on(&gateway).await;
    let cursor = log(&redis, b"0").await;
    two.hear("0").await;
    // What the Function takes, for it knows no JSON: live, and then in the log.
    let mut n_counted = 0;
    for data in [&b"{no json"[..], b"", &[b'['; 20_000]] {
        log(&redis, data).await;
        n_counted += 1;
    }
    // What only somebody with a hand in the stream itself brings about.
    let top = log(&redis, b"1").await;
    two.hear("1").await;
    let (ms, n) = top.split_once('-').expect("an id");
    let n: u64 = n.parse().expect("a number");
    let by_hand: [&[&[u8]]; 4] = [
        &[b"d", b"\xff\xfe\x00\x80"],
        &[b"d", b"2", b"n", b"\xff\xfe"],
        &[b"d", b"2", b"n", b"no name"],
        // No data at all: not even counted.
        &[b"x", b"y"],
    ];
    for (i, fields) in by_hand.into_iter().enumerate() {
        let id = format!("{ms}-{}", n + 1 + i as u64);
        let head = words(&[b"XADD", STREAM.as_bytes(), id.as_bytes()]);
        assert_eq!(redis_says(&redis, [head, words(fields)].concat()).await, format!("${id}"));
    }
    log(&redis, b"3").await;
    two.hear("3").await;
    gateway.until_metric(SKIPPED, f64::from(n_counted)).await;

    let (mut after, heard) = Two::resumed(&gateway, &cursor).await;
    assert_eq!(heard, [1, 3]);
    // Three and three, read by two.
    n_counted += 2 * 6;
    gateway.until_metric(SKIPPED, f64::from(n_counted)).await;
    let (mut start, heard) = Two::resumed(&gateway, "0").await;
    assert_eq!(heard, [0, 1, 3]);
    n_counted += 2 * 6;
    log(&redis, b"4").await;
    for listener in [&mut two, &mut after, &mut start] {
        listener.hear("4").await;
    }
    gateway.until_metric(SKIPPED, f64::from(n_counted)).await;
    assert!(!gateway.stderr().contains("panicked"), "{}", gateway.stderr());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_id_that_this_log_never_gave_or_gave_before_brings_nothing_and_hides_nothing() {
    let redis = RedisServer::plain();
    let gateway = GatewayProcess::start(on_redis(&redis.url())).await;
    let mut two = Two::on(&gateway).await;
    let first = log(&redis, b"1").await;
    two.hear("1").await;
    // What was delivered already, under its own id and under an older one.
    let (ms, n) = first.split_once('-').expect("an id");
    let (ms, n): (u64, u64) = (ms.parse().expect("ms"), n.parse().expect("n"));
    cast(&redis, format!("{first} \n\"again\"").as_bytes()).await;
    cast(&redis, format!("{}-{n} \n\"older\"", ms - 1).as_bytes()).await;
    log(&redis, b"2").await;
    two.hear("2").await;
    assert_eq!(gateway.metric("gateway_redis_repairs_total").await, Some(0.0), "the link stood");
    // Of another life of the log, which the low bits of the second number tell: the link is made anew.
    cast(&redis, format!("{}-{} \n\"foreign\"", ms + 1, n + 1).as_bytes()).await;
    log(&redis, b"3").await;
    two.hear("3").await;
    gateway.until_metric("gateway_redis_repairs_total", 1.0).await;
    log(&redis, b"4").await;
    two.hear("4").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_text_that_is_no_utf_8_comes_in_and_any_json_goes_out_as_it_was() {
    let redis = RedisServer::plain();
    let gateway = GatewayProcess::start(on_redis(&redis.url())).await;
    let mut two = Two::on(&gateway).await;
    let json = [("Content-Type", "application/json")];
    for bad in [&b"\xff\xfe\x00\x80"[..], b"\"\xed\xa0\x80\"", b"\"\xf0\x9f\x8c\"", b""] {
        let body = [br#"{"channel":"news","data":"#, bad, b"}"].concat();
        let refused = http::request(gateway.admin(), "POST", "/v1/publish", &json, &body).await;
        assert_eq!((refused.status(), &refused.json()["code"]), (400, &json!("bad_request")), "{bad:?}");
        if !bad.is_empty() {
            let call = words(&[b"FCALL", b"tidegate_publish", b"1", b"tidegate:log", b"news", bad]);
            let refused = redis_says(&redis, call).await;
            assert!(refused.starts_with("-BADDATA"), "{bad:?}: {refused}");
        }
    }
    // Half a pair is text like any other as long as it is escaped; so is all that a line cannot hold.
    let deep = nested(10_000);
    for good in [r#""\ud800""#, r#""\u0000\r\n\u2028""#, r#""""#, "null", "\"\u{feff}\u{2028}\"", &deep] {
        let body = format!(r#"{{"channel":"news","data":{good}}}"#);
        let taken = http::request(gateway.admin(), "POST", "/v1/publish", &json, body.as_bytes()).await;
        assert_eq!(taken.status(), 200, "{good:.40}: {}", taken.text());
        two.hear(good).await;
        log(&redis, good.as_bytes()).await;
        two.hear(good).await;
        cast(&redis, format!(r#"{{"data":{good}}}"#).as_bytes()).await;
        two.hear(good).await;
    }
    // White space between tokens is not text: a line end there ends no line of the stream.
    for spaced in [" {\"a\":\r\n1}", "{\"a\":\n\n1}", "{\r\"a\":1}\t"] {
        log(&redis, spaced.as_bytes()).await;
        cast(&redis, format!("{{\"data\":{spaced}}}").as_bytes()).await;
        for _ in 0..2 {
            assert_eq!(two.ws.json().await["data"], json!({"a": 1}));
            assert_eq!(two.sse.block().await.json()["data"], json!({"a": 1}));
        }
    }
    gateway.publish("news", &json!("as usual")).await;
    two.hear(r#""as usual""#).await;
    assert_eq!(gateway.metric(SKIPPED).await, Some(0.0));
}
