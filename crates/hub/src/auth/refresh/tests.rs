//! An issuer that changes its keys, fails and lies, under a clock that the test moves.

use std::collections::HashSet;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures_util::FutureExt;
use futures_util::future::{BoxFuture, join_all};
use serde_json::{Value, json};
use tokio::task::JoinSet;
use tokio::time::{Instant, advance, sleep, timeout};

use super::super::tests::{NOW, Pair, b64, claims, config, jwks, p256, token, with_kid};
use super::super::{Algorithm, AuthConfig, Denied, Identity, KeySource, Verifier, mint_with_kid, mint_with_pem};
use super::*;
use crate::clock::{Clock, Dice};
use crate::refusal::RefusalCode;

const CONFIG: RefreshConfig = RefreshConfig::URL;
const AUTH_TIMEOUT: Duration = Duration::from_secs(1);
const NANO: Duration = Duration::from_nanos(1);

type Answer = Result<String, FetchError>;

/// Publishes whatever it is told to, as slowly as it is told to.
struct Issuer {
    answer: Mutex<Answer>,
    takes: Mutex<Duration>,
    fetches: Mutex<Vec<Instant>>,
}

impl Issuer {
    fn publishes(answer: Answer) -> Arc<Self> {
        Arc::new(Self { answer: Mutex::new(answer), takes: Mutex::default(), fetches: Mutex::default() })
    }

    fn publish(&self, keys: &[Value]) {
        self.say(Ok(set(keys)));
    }

    fn say(&self, answer: Answer) {
        *self.answer.lock().unwrap() = answer;
    }

    fn take(&self, time: Duration) {
        *self.takes.lock().unwrap() = time;
    }

    fn fetches(&self) -> Vec<Instant> {
        self.fetches.lock().unwrap().clone()
    }

    fn n_fetches(&self) -> usize {
        self.fetches().len()
    }
}

struct Asking(Arc<Issuer>);

impl KeyFetcher for Asking {
    fn fetch(&self) -> BoxFuture<'_, Answer> {
        async move {
            self.0.fetches.lock().unwrap().push(Instant::now());
            let takes = *self.0.takes.lock().unwrap();
            sleep(takes).await;
            self.0.answer.lock().unwrap().clone()
        }
        .boxed()
    }
}

fn set(keys: &[Value]) -> String {
    let KeySource::Jwks(text) = jwks(keys) else { unreachable!() };
    text
}

/// A verifier whose keeper runs.
struct Node {
    verifier: Arc<Verifier>,
    clock: Clock,
    _keeper: JoinSet<()>,
}

impl Node {
    fn start(issuer: &Arc<Issuer>, keys: KeySource) -> Self {
        Self::with(issuer, config(keys), 1)
    }

    fn with(issuer: &Arc<Issuer>, config: AuthConfig, seed: u64) -> Self {
        let asking = Box::new(Asking(issuer.clone()));
        let (verifier, keeper) = Verifier::refreshed(config, CONFIG, asking, Dice::seeded(seed)).unwrap();
        let mut tasks = JoinSet::new();
        tasks.spawn(keeper.run());
        Self { verifier, clock: Clock::at(NOW), _keeper: tasks }
    }

    /// One that has its first set.
    async fn ready(issuer: &Arc<Issuer>) -> Self {
        let node = Self::start(issuer, KeySource::Awaited);
        node.verifier.ready().await;
        node
    }

    async fn ask(&self, token: &str) -> Result<Arc<Identity>, Denied> {
        self.verifier.authenticate(token, &self.clock, Instant::now() + AUTH_TIMEOUT).await
    }

    /// The answer of one that must not wait.
    fn at_once(&self, token: &str) -> Result<(), Denied> {
        self.ask(token).now_or_never().expect("nothing to wait for").map(|_| ())
    }

    fn state(&self) -> KeyState {
        self.verifier.key_state().expect("it is refreshed")
    }
}

fn lasting(more: Value) -> Value {
    let mut claims = claims(json!({"exp": NOW.as_secs() + 100_000}));
    claims.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    claims
}

fn by(pair: &Pair, kid: &str) -> String {
    mint_with_kid(Algorithm::ES256, pair.private.as_bytes(), kid, &lasting(json!({}))).unwrap()
}

/// A token that nobody has signed, with a `kid` of its own.
fn forged(kid: &str) -> String {
    let head = json!({"alg": "ES256", "kid": kid}).to_string();
    format!("{}.{}.{}", b64(head.as_bytes()), b64(lasting(json!({})).to_string().as_bytes()), b64(&[7; 64]))
}

fn unknown<T>() -> Result<T, Denied> {
    Err(Denied::UnknownKey)
}

fn unavailable<T>() -> Result<T, Denied> {
    Err(Denied::KeysUnavailable)
}

#[tokio::test(start_paused = true)]
async fn a_rotated_key_counts_after_one_fetch_and_the_old_one_while_it_is_published() {
    let (a, b) = (p256(), p256());
    let (jwk_a, jwk_b) = (with_kid(&a.jwk, "a"), with_kid(&b.jwk, "b"));
    let issuer = Issuer::publishes(Ok(set(std::slice::from_ref(&jwk_a))));
    let node = Node::ready(&issuer).await;
    assert_eq!(node.at_once(&by(&a, "a")), Ok(()));
    issuer.publish(&[jwk_a, jwk_b.clone()]);
    advance(CONFIG.cool_down).await;
    assert!(node.ask(&by(&b, "b")).await.is_ok());
    assert_eq!(issuer.n_fetches(), 2);
    assert_eq!(node.at_once(&by(&a, "a")), Ok(()), "still published");
    issuer.publish(&[jwk_b]);
    sleep(CONFIG.every.mul_f64(1.2)).await;
    assert_eq!(issuer.n_fetches(), 3, "unasked");
    assert_eq!(node.at_once(&by(&b, "b")), Ok(()));
    advance(CONFIG.cool_down).await;
    assert_eq!(node.ask(&by(&a, "a")).await.map(|_| ()), unknown(), "withdrawn");
}

#[tokio::test(start_paused = true)]
async fn all_who_come_while_a_fetch_is_under_way_share_it() {
    let (a, b) = (p256(), p256());
    let issuer = Issuer::publishes(Ok(set(&[with_kid(&a.jwk, "a")])));
    let node = Node::ready(&issuer).await;
    advance(CONFIG.cool_down).await;
    issuer.take(Duration::from_millis(500));
    issuer.publish(&[with_kid(&b.jwk, "b")]);
    let (good, bad) = (by(&b, "b"), forged("c"));
    let began = Instant::now();
    let asks = (0..1_000u64).map(|i| {
        let (node, token) = (&node, if i % 2 == 0 { &good } else { &bad });
        async move {
            sleep(Duration::from_micros(400 * i)).await;
            (i % 2 == 0, node.ask(token).await.map(|_| ()))
        }
    });
    for (is_good, answer) in join_all(asks).await {
        assert_eq!(answer, if is_good { Ok(()) } else { unknown() });
    }
    assert_eq!(issuer.n_fetches(), 2);
    assert_eq!(began.elapsed().as_millis(), 500, "all were answered at its end");
}

#[tokio::test(start_paused = true)]
async fn no_fetch_begins_within_the_cool_down_and_one_may_at_its_end() {
    let a = p256();
    let issuer = Issuer::publishes(Ok(set(&[with_kid(&a.jwk, "a")])));
    let node = Node::ready(&issuer).await;
    let began = issuer.fetches()[0];
    assert_eq!(node.at_once(&forged("x")), unknown());
    advance(CONFIG.cool_down - NANO - began.elapsed()).await;
    assert_eq!(node.at_once(&forged("x")), unknown());
    assert_eq!(issuer.n_fetches(), 1);
    advance(NANO).await;
    assert_eq!(node.ask(&forged("x")).await.map(|_| ()), unknown());
    assert_eq!(issuer.n_fetches(), 2);
    assert_eq!(node.at_once(&forged("x")), unknown(), "it begins anew");
}

#[tokio::test(start_paused = true)]
async fn a_flood_of_unknown_keys_costs_one_fetch_per_cool_down_and_delays_nobody() {
    const FLOOD: Duration = Duration::from_secs(30);
    let (a, b) = (p256(), p256());
    let jwk_a = with_kid(&a.jwk, "a");
    let issuer = Issuer::publishes(Ok(set(std::slice::from_ref(&jwk_a))));
    issuer.take(Duration::from_millis(200));
    let node = Arc::new(Node::ready(&issuer).await);
    let (by_a, by_b) = (by(&a, "a"), by(&b, "b"));
    let began = Instant::now();
    let mut flood = JoinSet::new();
    let n_forged = AtomicU64::new(0);
    let mut b_since = None;
    while began.elapsed() < FLOOD {
        for _ in 0..20 {
            let (node, kid) = (node.clone(), n_forged.fetch_add(1, Ordering::Relaxed));
            flood.spawn(async move { node.ask(&forged(&format!("forged-{kid}"))).await.map(|_| ()) });
        }
        assert_eq!(node.at_once(&by_a), Ok(()), "at {:?}", began.elapsed());
        if began.elapsed() >= FLOOD / 2 && b_since.is_none() {
            issuer.publish(&[jwk_a.clone(), with_kid(&b.jwk, "b")]);
            b_since = Some(Instant::now());
        }
        sleep(Duration::from_millis(10)).await;
    }
    assert_eq!(n_forged.into_inner(), 60_000);
    for answer in flood.join_all().await {
        assert_eq!(answer, unknown());
    }
    assert_eq!(node.at_once(&by_b), Ok(()), "the flood itself had it fetched");
    let fetches = issuer.fetches();
    assert_eq!(fetches.len(), 4, "at the start, and each 10 s of 30: {fetches:?}");
    assert!(fetches.windows(2).all(|two| two[1] - two[0] >= CONFIG.cool_down), "{fetches:?}");
}

#[tokio::test(start_paused = true)]
async fn a_bad_answer_never_replaces_the_last_good_set() {
    let a = p256();
    let good = set(&[with_kid(&a.jwk, "a")]);
    let issuer = Issuer::publishes(Ok(good.clone()));
    let node = Node::ready(&issuer).await;
    let by_a = by(&a, "a");
    let oct = json!({"kty": "oct", "k": "AAAA", "kid": "a"});
    let bad: [Answer; 9] = [
        Err(FetchError::Refused("status 500".into())),
        Err(FetchError::Unreachable("nobody".into())),
        Err(FetchError::TooLarge { max_bytes: 1 << 20 }),
        Err(FetchError::NoText),
        Ok("<html><body>be right back</body></html>".into()),
        Ok(String::new()),
        Ok(set(&[])),
        Ok(set(&[oct])),
        Ok(set(&vec![with_kid(&a.jwk, "a"); 65])),
    ];
    for answer in bad {
        issuer.say(answer.clone());
        sleep(CONFIG.every.mul_f64(1.2)).await;
        let state = node.state();
        assert!(state.failing_for.is_some() && state.n_failures > 0, "{answer:?}: {state:?}");
        assert_eq!(node.at_once(&by_a), Ok(()), "{answer:?}");
        assert_eq!(node.ask(&forged("x")).await.map(|_| ()), unavailable(), "{answer:?}");
        assert_eq!(node.at_once(&forged("x")), unavailable(), "within the cool-down: {answer:?}");
        issuer.say(Ok(good.clone()));
        sleep(CONFIG.cool_down * 4).await;
        let state = node.state();
        assert!(state.failing_for.is_none() && state.age.unwrap() < CONFIG.every.mul_f64(1.2), "{answer:?}: {state:?}");
        assert_eq!(node.ask(&forged("x")).await.map(|_| ()), unknown(), "{answer:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn the_last_good_set_lasts_however_long_the_issuer_is_away() {
    let a = p256();
    let issuer = Issuer::publishes(Ok(set(&[with_kid(&a.jwk, "a")])));
    let node = Node::ready(&issuer).await;
    issuer.take(Duration::from_secs(3600));
    let began = Instant::now();
    sleep(Duration::from_secs(12 * 3600)).await;
    assert_eq!(node.at_once(&by(&a, "a")), Ok(()));
    let state = node.state();
    assert!(state.age.unwrap() >= Duration::from_secs(12 * 3600));
    assert_eq!(state.n_failures + 1, state.n_fetches);
    for two in issuer.fetches()[1..].windows(2) {
        let pause = two[1] - two[0];
        assert!(pause >= CONFIG.cool_down && pause <= CONFIG.cool_down * 3, "tried again after {pause:?}");
    }
    assert!(began.elapsed() - state.failing_for.unwrap() <= CONFIG.every.mul_f64(1.2) + CONFIG.timeout);
}

#[tokio::test(start_paused = true)]
async fn the_same_set_again_keeps_what_was_verified() {
    let (a, b) = (p256(), p256());
    let (jwk_a, jwk_b) = (with_kid(&a.jwk, "a"), with_kid(&b.jwk, "b"));
    let issuer = Issuer::publishes(Ok(set(&[jwk_a.clone(), jwk_b.clone()])));
    let node = Node::ready(&issuer).await;
    let by_a = by(&a, "a");
    let first = node.ask(&by_a).await.unwrap();
    let again = |answer: String, is_same: bool| {
        let (node, issuer, by_a, first) = (&node, issuer.clone(), &by_a, first.clone());
        issuer.say(Ok(answer));
        async move {
            let n_fetches = issuer.n_fetches();
            sleep(CONFIG.every.mul_f64(1.2)).await;
            assert!(issuer.n_fetches() > n_fetches);
            let now = node.ask(by_a).await.unwrap();
            assert_eq!(Arc::ptr_eq(&first, &now), is_same);
        }
    };
    again(set(&[jwk_a.clone(), jwk_b.clone()]), true).await;
    again(format!(" {}\n", set(&[jwk_b.clone(), json!({"kty": "odd"}), jwk_a.clone()])), true).await;
    again(set(std::slice::from_ref(&jwk_a)), false).await;
}

#[tokio::test(start_paused = true)]
async fn a_start_without_an_issuer_waits_for_it_and_asks_in_measure() {
    let a = p256();
    let issuer = Issuer::publishes(Err(FetchError::Unreachable("nobody".into())));
    let node = Node::start(&issuer, KeySource::Awaited);
    let by_a = by(&a, "a");
    assert!(timeout(Duration::from_secs(300), node.verifier.ready()).await.is_err());
    assert_eq!(node.ask(&by_a).await.map(|_| ()), unavailable(), "it may be good");
    assert_eq!(node.state().age, None);
    let n_fetches = issuer.n_fetches();
    assert!((300 / 10..=5 + 300 / 5).contains(&n_fetches), "{n_fetches}");
    issuer.publish(&[with_kid(&a.jwk, "a")]);
    let began = Instant::now();
    node.verifier.ready().await;
    assert!(began.elapsed() <= CONFIG.cool_down);
    assert_eq!(node.at_once(&by_a), Ok(()));
}

#[tokio::test(start_paused = true)]
async fn a_set_that_is_there_at_the_start_is_in_force_at_once() {
    let (a, b) = (p256(), p256());
    let issuer = Issuer::publishes(Ok(set(&[with_kid(&b.jwk, "b")])));
    let node = Node::start(&issuer, jwks(&[with_kid(&a.jwk, "a")]));
    node.verifier.ready().now_or_never().expect("nothing to wait for");
    assert_eq!(node.at_once(&by(&a, "a")), Ok(()));
    assert_eq!(issuer.n_fetches(), 0);
    assert!(node.ask(&by(&b, "b")).await.is_ok(), "no cool-down holds before the first fetch");
    assert_eq!(issuer.n_fetches(), 1);
}

#[tokio::test(start_paused = true)]
async fn who_goes_away_takes_nothing_from_those_who_wait() {
    let (a, b) = (p256(), p256());
    let issuer = Issuer::publishes(Ok(set(&[with_kid(&a.jwk, "a")])));
    let node = Node::ready(&issuer).await;
    advance(CONFIG.cool_down).await;
    issuer.publish(&[with_kid(&b.jwk, "b")]);
    issuer.take(Duration::from_millis(500));
    let by_b = by(&b, "b");
    // The one who set it off goes before it began, another in the midst of it.
    assert!(node.ask(&by_b).now_or_never().is_none());
    let (gone, stayed) = tokio::join!(timeout(Duration::from_millis(100), node.ask(&by_b)), node.ask(&by_b));
    assert!(gone.is_err() && stayed.is_ok());
    assert_eq!(issuer.n_fetches(), 2);
}

#[tokio::test(start_paused = true)]
async fn nobody_waits_beyond_the_own_deadline() {
    let (a, b) = (p256(), p256());
    let issuer = Issuer::publishes(Ok(set(&[with_kid(&a.jwk, "a")])));
    let node = Node::ready(&issuer).await;
    advance(CONFIG.cool_down).await;
    issuer.publish(&[with_kid(&b.jwk, "b")]);
    issuer.take(Duration::from_secs(3));
    let began = Instant::now();
    assert_eq!(node.ask(&by(&b, "b")).await.map(|_| ()), unavailable(), "it is good, we only do not know yet");
    assert_eq!(began.elapsed().as_millis(), AUTH_TIMEOUT.as_millis());
    sleep(Duration::from_secs(3)).await;
    assert_eq!(node.at_once(&by(&b, "b")), Ok(()), "the fetch went on");
    // A fetch that never ends is given up, and said to be a failure to those who are still there.
    advance(CONFIG.cool_down).await;
    issuer.take(Duration::MAX);
    let (began, patient) = (Instant::now(), Instant::now() + Duration::from_secs(60));
    let answer = node.verifier.authenticate(&forged("x"), &node.clock, patient).await;
    assert_eq!(answer.map(|_| ()), unavailable());
    assert_eq!(began.elapsed().as_millis(), CONFIG.timeout.as_millis());
}

#[tokio::test(start_paused = true)]
async fn who_waits_is_told_at_the_deadline_where_the_keeper_is_gone() {
    let issuer = Issuer::publishes(Ok(set(&[with_kid(&p256().jwk, "a")])));
    let mut node = Node::ready(&issuer).await;
    node._keeper.shutdown().await;
    advance(CONFIG.cool_down).await;
    assert_eq!(node.ask(&forged("x")).await.map(|_| ()), unavailable());
}

#[tokio::test(start_paused = true)]
async fn what_no_key_could_make_good_asks_for_none() {
    let a = p256();
    let issuer = Issuer::publishes(Ok(set(&[with_kid(&a.jwk, "a")])));
    let ours = AuthConfig { issuer: Some(vec!["us".into()]), ..config(KeySource::Awaited) };
    let node = Node::with(&issuer, ours, 1);
    node.verifier.ready().await;
    advance(CONFIG.cool_down).await;
    let of = |kid: &str, more: Value| {
        mint_with_kid(Algorithm::ES256, p256().private.as_bytes(), kid, &lasting(more)).unwrap()
    };
    for (token, answer) in [
        (of("x", json!({"iss": "us", "exp": NOW.as_secs()})), Err(Denied::Expired)),
        (of("x", json!({"iss": "us", "nbf": NOW.as_secs() + 60})), Err(Denied::NotYet)),
        (of("x", json!({"iss": "them"})), Err(Denied::Invalid("the token is of another issuer (iss)"))),
        (of("a", json!({"iss": "us"})), Err(Denied::Invalid("the token's signature does not match"))),
        (token(json!({"iss": "us"})), Err(Denied::Invalid("no key fits the token's algorithm and kid"))),
    ] {
        assert_eq!(node.at_once(&token), answer);
    }
    assert_eq!(issuer.n_fetches(), 1);
    assert_eq!(node.ask(&of("x", json!({"iss": "us"}))).await.map(|_| ()), unknown());
    assert_eq!(issuer.n_fetches(), 2, "with nothing else wrong it does");
}

#[tokio::test(start_paused = true)]
async fn an_issuer_that_names_no_keys_can_rotate_too() {
    let (a, b) = (p256(), p256());
    let issuer = Issuer::publishes(Ok(set(std::slice::from_ref(&a.jwk))));
    let node = Node::ready(&issuer).await;
    let of = |pair: &Pair| mint_with_pem(Algorithm::ES256, pair.private.as_bytes(), &lasting(json!({}))).unwrap();
    assert_eq!(node.at_once(&of(&a)), Ok(()));
    issuer.publish(std::slice::from_ref(&b.jwk));
    advance(CONFIG.cool_down).await;
    assert!(node.ask(&of(&b)).await.is_ok());
    assert_eq!(node.at_once(&of(&a)), unknown());
    // A key without a name may be the one that a token names.
    assert_eq!(node.at_once(&by(&b, "b")), Ok(()));
}

#[tokio::test(start_paused = true)]
async fn keys_that_never_change_are_not_waited_for() {
    let (a, b) = (p256(), p256());
    let fixed = Verifier::new(config(jwks(&[with_kid(&a.jwk, "a")]))).unwrap();
    fixed.ready().now_or_never().expect("nothing to wait for");
    assert_eq!(fixed.key_state(), None);
    let (by_b, clock) = (by(&b, "b"), Clock::at(NOW));
    let asked = fixed.authenticate(&by_b, &clock, Instant::now() + AUTH_TIMEOUT);
    let denied = asked.now_or_never().expect("nothing to wait for").map(|_| ()).unwrap_err();
    assert!(matches!(denied, Denied::Invalid(_)));
    assert!(Verifier::new(config(KeySource::Awaited)).is_err(), "nobody would ever fetch them");
}

#[tokio::test(start_paused = true)]
async fn a_fleet_does_not_ask_in_step() {
    let issuer = Issuer::publishes(Ok(set(&[with_kid(&p256().jwk, "a")])));
    let nodes: Vec<Node> = (0..50).map(|seed| Node::with(&issuer, config(KeySource::Awaited), seed)).collect();
    join_all(nodes.iter().map(|node| node.verifier.ready())).await;
    let began = Instant::now();
    sleep(CONFIG.every.mul_f64(1.2)).await;
    let later = issuer.fetches().split_off(nodes.len());
    let offsets: HashSet<u64> = later.iter().map(|at| (*at - began).as_secs()).collect();
    assert_eq!(later.len(), 50);
    assert!(offsets.len() > 25 && offsets.iter().all(|s| (240..=360).contains(s)), "{offsets:?}");
}

#[test]
fn a_client_is_told_apart_who_should_come_again() {
    assert_eq!(Denied::UnknownKey.code(), RefusalCode::TokenInvalid);
    assert_eq!(Denied::KeysUnavailable.code(), RefusalCode::AuthUnavailable);
}
