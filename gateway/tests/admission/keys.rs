//! A key set that others change: rotated, withdrawn, away, and asked for by a crowd. The cool-down
//! is the real one, ten seconds for a URL.

use std::fs;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures_util::future::join_all;
use hub::auth::{Algorithm, mint_with_kid};
use serde_json::{Value, json};
use testkit::gateway::{GatewayOptions, GatewayProcess};
use testkit::http;
use testkit::temp::TempDir;
use testkit::ws::WsClient;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep};

use super::{SOON, bearer, now, openssl, options, refused, try_ws, with_token};

/// The least time between two fetches of a URL.
const COOL_DOWN: Duration = Duration::from_secs(10);
/// Between two looks.
const LOOK: Duration = Duration::from_millis(100);

/// An Ed25519 key of the issuer, made by OpenSSL.
struct Key {
    kid: &'static str,
    private: String,
    jwk: Value,
}

impl Key {
    fn new(kid: &'static str) -> Self {
        let private = openssl(&["genpkey", "-algorithm", "ED25519"], "");
        let public = openssl(&["pkey", "-pubout"], &private);
        // 12 bytes of DER, which are 16 characters, then the point.
        let body: String = public.lines().filter(|line| !line.starts_with('-')).collect();
        let x = body[16..].trim_end_matches('=').replace('+', "-").replace('/', "_");
        Self { kid, private, jwk: json!({"kty": "OKP", "crv": "Ed25519", "kid": kid, "x": x, "use": "sig"}) }
    }

    fn token(&self) -> String {
        self.token_named(self.kid)
    }

    fn token_named(&self, kid: &str) -> String {
        let claims = json!({"sub": "42", "exp": now() + 3600});
        mint_with_kid(Algorithm::EdDSA, self.private.as_bytes(), kid, &claims).expect("a key of OpenSSL's is good")
    }
}

fn set(keys: &[&Key]) -> String {
    json!({"keys": keys.iter().map(|key| &key.jwk).collect::<Vec<_>>()}).to_string()
}

/// Who publishes keys, on a port of his own.
struct Issuer {
    url: String,
    shared: Arc<Shared>,
    _task: JoinSet<()>,
}

struct Shared {
    /// The whole answer; `None`: connections are cut unanswered.
    answer: Mutex<Option<String>>,
    /// The request lines, the unanswered ones too.
    asked: Mutex<Vec<String>>,
}

impl Issuer {
    async fn away() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        let url = format!("http://{}/keys", listener.local_addr().expect("it is bound"));
        let shared = Arc::new(Shared { answer: Mutex::default(), asked: Mutex::default() });
        let mut task = JoinSet::new();
        let serving = shared.clone();
        task.spawn(async move {
            while let Ok((socket, _)) = listener.accept().await {
                serving.serve(socket).await;
            }
        });
        Self { url, shared, _task: task }
    }

    async fn publishing(keys: &[&Key]) -> Self {
        let issuer = Self::away().await;
        issuer.publish(keys);
        issuer
    }

    fn publish(&self, keys: &[&Key]) {
        self.answer("200 OK", &set(keys));
    }

    fn answer(&self, status: &str, body: &str) {
        let answer = format!("HTTP/1.1 {status}\r\nContent-Length: {}\r\n\r\n{body}", body.len());
        *self.shared.answer.lock().unwrap() = Some(answer);
    }

    fn asked(&self) -> Vec<String> {
        self.shared.asked.lock().unwrap().clone()
    }

    fn n_fetches(&self) -> usize {
        self.asked().len()
    }

    fn gateway(&self) -> GatewayOptions {
        options().unset("GATEWAY_JWT_SECRET").env("GATEWAY_JWT_JWKS_URL", &self.url)
    }
}

impl Shared {
    async fn serve(&self, mut socket: TcpStream) {
        let mut head = Vec::new();
        while !head.ends_with(b"\r\n\r\n") {
            let Ok(byte) = socket.read_u8().await else { return };
            head.push(byte);
        }
        let line = String::from_utf8_lossy(&head).lines().next().unwrap_or_default().to_owned();
        self.asked.lock().unwrap().push(line);
        let answer = self.answer.lock().unwrap().clone();
        if let Some(answer) = answer {
            let _ = socket.write_all(answer.as_bytes()).await;
        }
    }
}

/// Comes again and again with this token, until it is answered so.
async fn until_answered(gateway: &GatewayProcess, token: &str, expected: (u16, String)) {
    let until = Instant::now() + SOON;
    loop {
        let answer = with_token(gateway, token).await;
        if answer == expected {
            return;
        }
        assert!(Instant::now() < until, "{answer:?}, not {expected:?}:\n{}", gateway.stderr());
        sleep(LOOK).await;
    }
}

fn good() -> (u16, String) {
    (101, String::new())
}

fn unknown() -> (u16, String) {
    refused(401, "token_invalid")
}

fn unavailable() -> (u16, String) {
    refused(503, "auth_unavailable")
}

/// Hands in a token in an open session and gives what is said to it.
async fn hand_in(client: &mut WsClient, token: &str) -> Value {
    client.send_json(&json!({"type": "auth", "token": token})).await;
    loop {
        let message = client.json().await;
        if message["type"] == "ok" || message["type"] == "error" {
            return message;
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_rotated_key_is_known_without_a_restart() {
    let (a, b, c) = (Key::new("a"), Key::new("b"), Key::new("c"));
    let issuer = Issuer::publishing(&[&a]).await;
    let began = Instant::now();
    let gateway = GatewayProcess::start(issuer.gateway()).await;
    assert_eq!(with_token(&gateway, &a.token()).await, good());
    issuer.publish(&[&a, &b]);
    until_answered(&gateway, &b.token(), good()).await;
    assert_eq!(with_token(&gateway, &a.token()).await, good(), "still published");
    // In an open session, too, and the first key is gone with the same fetch.
    let mut client = try_ws(&gateway, "/v1/ws", &[("Authorization", &bearer(&b.token()))]).await.expect("let in");
    client.until("ready").await;
    issuer.publish(&[&b, &c]);
    let until = Instant::now() + SOON;
    loop {
        let answer = hand_in(&mut client, &c.token()).await;
        if answer["type"] == "ok" {
            break;
        }
        assert_eq!(answer["code"], "token_invalid", "the set is some seconds old: {answer}");
        assert!(Instant::now() < until, "{answer}");
        sleep(Duration::from_millis(500)).await;
    }
    assert_eq!(with_token(&gateway, &a.token()).await, unknown(), "withdrawn");
    let at_most = 1 + (began.elapsed().as_secs() / COOL_DOWN.as_secs()) as usize;
    assert!(issuer.n_fetches() <= at_most, "{} fetches", issuer.n_fetches());
    assert!(issuer.asked().iter().all(|line| line == "GET /keys HTTP/1.1"), "{:?}", issuer.asked());
}

#[tokio::test(flavor = "multi_thread")]
async fn the_last_key_set_stays_in_force_while_the_issuer_raves_or_is_away() {
    let (a, b) = (Key::new("a"), Key::new("b"));
    let issuer = Issuer::publishing(&[&a]).await;
    let gateway = GatewayProcess::start(issuer.gateway()).await;
    issuer.answer("200 OK", r#"{"keys":[]}"#);
    until_answered(&gateway, &b.token(), unavailable()).await;
    let mut client = try_ws(&gateway, "/v1/ws", &[("Authorization", &bearer(&a.token()))]).await.expect("let in");
    client.until("ready").await;
    assert_eq!(hand_in(&mut client, &b.token()).await["code"], "unavailable");
    assert_eq!(hand_in(&mut client, &a.token()).await["type"], "ok");
    issuer.answer("500 Internal Server Error", &set(&[&b]));
    let n_fetches = issuer.n_fetches();
    let until = Instant::now() + SOON * 2;
    while issuer.n_fetches() == n_fetches {
        assert_eq!(with_token(&gateway, &a.token()).await, good());
        assert_eq!(with_token(&gateway, &b.token()).await, unavailable(), "it may be good");
        assert!(Instant::now() < until, "it is not tried again");
        sleep(LOOK).await;
    }
    let warnings = gateway.stderr().lines().filter(|line| line.contains("cannot be refreshed")).count();
    assert_eq!(warnings, 1, "said once:\n{}", gateway.stderr());
    issuer.publish(&[&a, &b]);
    until_answered(&gateway, &b.token(), good()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_crowd_of_unknown_keys_is_one_fetch_and_hinders_nobody() {
    let (a, stranger) = (Key::new("a"), Key::new("stranger"));
    let issuer = Issuer::publishing(&[&a]).await;
    let began = Instant::now();
    let gateway = GatewayProcess::start(issuer.gateway()).await;
    let mut n_crowd = 0;
    // Until the crowd has had its one fetch, and a little beyond.
    let mut is_last = false;
    while !std::mem::replace(&mut is_last, issuer.n_fetches() > 1) {
        assert!(began.elapsed() < SOON * 2, "no fetch for all of {n_crowd}");
        let kids = (n_crowd..n_crowd + 30).map(|n| match n % 3 {
            0 => format!("../../dev/null?{n}"),
            1 => format!("{}/{n}", issuer.url),
            _ => format!("' OR {n}=1"),
        });
        let tokens: Vec<String> = kids.map(|kid| stranger.token_named(&kid)).collect();
        let by_a = a.token();
        let (crowd, valid) =
            tokio::join!(join_all(tokens.iter().map(|token| with_token(&gateway, token))), with_token(&gateway, &by_a));
        assert_eq!(valid, good());
        assert!(crowd.iter().all(|answer| *answer == unknown()), "{crowd:?}");
        n_crowd += crowd.len();
        sleep(LOOK).await;
    }
    assert!(n_crowd >= 90, "{n_crowd}");
    let at_most = 1 + (began.elapsed().as_secs() / COOL_DOWN.as_secs()) as usize;
    let asked = issuer.asked();
    assert!(asked.len() <= at_most, "{n_crowd} came: {asked:?}");
    assert!(asked.iter().all(|line| line == "GET /keys HTTP/1.1"), "{asked:?}");
    assert!(!gateway.stderr().contains("dev/null"), "a token's words are not logged");
}

#[tokio::test(flavor = "multi_thread")]
async fn without_its_first_key_set_a_gateway_is_starting() {
    let a = Key::new("a");
    let issuer = Issuer::away().await;
    let gateway = GatewayProcess::start_unready(issuer.gateway()).await;
    let until = Instant::now() + SOON;
    while issuer.n_fetches() < 3 {
        assert!(Instant::now() < until, "it does not try again:\n{}", gateway.stderr());
        sleep(LOOK).await;
    }
    let answer = http::get(gateway.probes(), "/readyz").await;
    assert_eq!((answer.status(), &answer.json()["phase"]), (503, &json!("starting")), "{}", answer.text());
    assert_eq!(http::get(gateway.probes(), "/livez").await.status(), 200, "that is no reason to be killed");
    assert_eq!(with_token(&gateway, &a.token()).await.0, 503);
    issuer.publish(&[&a]);
    gateway.until_status("/readyz", 200).await;
    assert_eq!(with_token(&gateway, &a.token()).await, good());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_key_file_is_read_again_when_it_changed() {
    let (a, b) = (Key::new("a"), Key::new("b"));
    let dir = TempDir::new("keys");
    let path = dir.file("keys.json", &set(&[&a]));
    let by_file = || options().unset("GATEWAY_JWT_SECRET").env("GATEWAY_JWT_JWKS_FILE", path.as_str());
    let gateway = GatewayProcess::start(by_file()).await;
    assert_eq!(with_token(&gateway, &a.token()).await, good());
    dir.file("keys.json", &set(&[&a, &b]));
    until_answered(&gateway, &b.token(), good()).await;
    dir.file("keys.json", "{\"keys\": [");
    until_answered(&gateway, &Key::new("c").token(), unavailable()).await;
    fs::remove_file(&path).expect("it is there");
    assert_eq!(with_token(&gateway, &a.token()).await, good(), "the last good set stays");
    dir.file("keys.json", &set(&[&b]));
    until_answered(&gateway, &a.token(), unknown()).await;
    assert_eq!(with_token(&gateway, &b.token()).await, good());
    // At the start a bad one is a mistake in the configuration.
    dir.file("keys.json", "<html>");
    let ended = by_file().run(SOON).await;
    assert_eq!(ended.status.code(), Some(64), "{}", ended.stderr);
}
