//! A backplane whose revocation list is slow, away, wrong or dead on demand.

use std::sync::atomic::AtomicU64;

use futures_util::future::BoxFuture;
use tokio::sync::Notify;

use super::*;
use crate::backplane::{Claim, Claimed, Fleet, FromLink, Hold, Publish, Published, Read, ReadAsk};
use crate::channel::{Channel, Grants};

const DEADLINE: Duration = Duration::from_secs(1);

#[derive(Default)]
struct Fake {
    list: Mutex<HashMap<RevocationKey, String>>,
    calls: Mutex<Vec<Vec<RevocationKey>>>,
    mode: Mutex<Mode>,
    in_flight: AtomicU64,
    most_in_flight: AtomicU64,
    called: Notify,
    go: Notify,
}

#[derive(Clone, Copy, Default, PartialEq)]
enum Mode {
    #[default]
    Prompt,
    /// Reads the list at once, answers when `go` is told.
    Held,
    Away,
    Hung,
    Panicking,
    TooShort,
}

impl Fake {
    fn set(&self, mode: Mode) {
        *self.mode.lock().unwrap() = mode;
    }

    fn put(&self, key: RevocationKey, value: &str) {
        self.list.lock().unwrap().insert(key, value.into());
    }

    fn n_calls(&self) -> usize {
        self.calls.lock().unwrap().len()
    }

    async fn answer(&self, keys: Vec<RevocationKey>) -> Result<Answers, Unavailable> {
        let mut answers: Answers = {
            let list = self.list.lock().unwrap();
            keys.iter().map(|key| list.get(key).cloned()).collect()
        };
        self.calls.lock().unwrap().push(keys);
        let n = self.in_flight.fetch_add(1, Ordering::SeqCst) + 1;
        self.most_in_flight.fetch_max(n, Ordering::SeqCst);
        self.called.notify_one();
        let mode = *self.mode.lock().unwrap();
        let result = match mode {
            Mode::Prompt => Ok(answers),
            Mode::Held => {
                self.go.notified().await;
                Ok(answers)
            }
            Mode::Away => Err(Unavailable("away".into())),
            Mode::Hung => {
                self.in_flight.fetch_sub(1, Ordering::SeqCst);
                std::future::pending().await
            }
            Mode::Panicking => {
                self.in_flight.fetch_sub(1, Ordering::SeqCst);
                std::panic::resume_unwind(Box::new("a fake's panic"))
            }
            Mode::TooShort => {
                answers.pop();
                Ok(answers)
            }
        };
        self.in_flight.fetch_sub(1, Ordering::SeqCst);
        result
    }
}

impl Backplane for Fake {
    fn publish(&self, _: Publish) -> BoxFuture<'_, Result<Published, Unavailable>> {
        unreachable!()
    }
    fn read(&self, _: ReadAsk) -> BoxFuture<'_, Result<Read, Unavailable>> {
        unreachable!()
    }
    fn want(&self, _: &Channel) {}
    fn unwant(&self, _: &Channel) {}
    fn beacon(&self) {}
    fn relink(&self) {}
    fn link(&self) -> mpsc::Receiver<FromLink> {
        unreachable!()
    }
    fn revocations(&self, keys: Vec<RevocationKey>) -> BoxFuture<'_, Result<Answers, Unavailable>> {
        self.answer(keys).boxed()
    }
    fn revoke(&self, _: Revocation, _: Duration) -> BoxFuture<'_, Result<(), Unavailable>> {
        unreachable!()
    }
    fn report(&self, _: String, _: Duration) -> BoxFuture<'_, Result<Fleet, Unavailable>> {
        unreachable!()
    }
    fn retire(&self) -> BoxFuture<'_, Result<(), Unavailable>> {
        unreachable!()
    }
    fn hold(&self, _: Option<(Duration, String)>) -> BoxFuture<'_, Result<Option<Hold>, Unavailable>> {
        unreachable!()
    }
    fn tell(&self, _: Option<Arc<str>>, _: String) -> BoxFuture<'_, Result<(), Unavailable>> {
        unreachable!()
    }
    fn claim(&self, _: Vec<Claim>, _: u32) -> BoxFuture<'_, Result<Vec<Claimed>, Unavailable>> {
        unreachable!()
    }
    fn release(&self, _: Vec<(Arc<str>, Arc<str>)>) -> BoxFuture<'_, Result<(), Unavailable>> {
        unreachable!()
    }
    fn is_link_up(&self) -> bool {
        true
    }
}

fn node() -> (Arc<Fake>, Arc<Revocations>) {
    node_with(Company::Awaited)
}

fn node_with(company: Company) -> (Arc<Fake>, Arc<Revocations>) {
    let fake = Arc::new(Fake::default());
    let config = RevocationConfig {
        when_unavailable: WhenUnavailable::Refuse,
        deadline: DEADLINE,
        remember: Duration::from_secs(3_600),
        company,
    };
    (fake.clone(), Arc::new(Revocations::new(fake, config, Metrics::new("test"))))
}

fn n_checks(node: &Revocations, source: RevocationSource) -> u64 {
    let series = format!("gateway_revocation_checks_total{{source=\"{}\"}} ", source.word());
    let text = node.metrics.encode();
    text.lines().find_map(|line| line.strip_prefix(&series)).expect("the series is there").parse().unwrap()
}

fn who(sub: &str, jti: &str, iat: u64) -> Identity {
    Identity {
        user: Some(sub.into()),
        jti: Some(jti.into()),
        sid: None,
        issued_at: iat,
        expires_at: None,
        grants: Grants::default(),
    }
}

fn jti(text: &str) -> RevocationKey {
    RevocationKey::Jti(text.into())
}

fn sub(text: &str) -> RevocationKey {
    RevocationKey::Sub(text.into())
}

fn spawn(node: &Arc<Revocations>, who: Identity) -> tokio::task::JoinHandle<CheckOutcome> {
    let node = node.clone();
    tokio::spawn(async move { node.check(&who).await })
}

/// Waits (in simulated time) until so many checks wait.
async fn until_waiting(node: &Revocations, n: usize) {
    while node.n_waiting() < n {
        tokio::task::yield_now().await;
    }
}

#[tokio::test(start_paused = true)]
async fn any_value_revokes_a_token_or_a_login_and_a_time_revokes_a_user() {
    let (fake, node) = node();
    fake.put(jti("bad"), "");
    fake.put(RevocationKey::Sid("gone".into()), "1");
    fake.put(sub("u"), "100");
    fake.put(sub("float"), "100.9");
    fake.put(sub("early"), "-1");
    fake.put(sub("odd"), "yesterday");
    assert_eq!(node.check(&who("a", "good", 5)).await, CheckOutcome::Good);
    assert_eq!(node.check(&who("a", "bad", 5)).await, CheckOutcome::Revoked);
    let login = Identity { sid: Some("gone".into()), ..who("a", "good", 5) };
    assert_eq!(node.check(&login).await, CheckOutcome::Revoked);
    for (user, iat, outcome) in [
        ("u", 0, CheckOutcome::Revoked),
        ("u", 99, CheckOutcome::Revoked),
        ("u", 100, CheckOutcome::Revoked),
        ("u", 101, CheckOutcome::Good),
        ("float", 100, CheckOutcome::Revoked),
        ("float", 101, CheckOutcome::Good),
        ("early", 0, CheckOutcome::Good),
        ("odd", u64::MAX, CheckOutcome::Revoked),
    ] {
        assert_eq!(node.check(&who(user, "j", iat)).await, outcome, "{user} {iat}");
    }
}

#[tokio::test(start_paused = true)]
async fn an_identity_without_names_is_good_without_a_question() {
    let (fake, node) = node();
    fake.set(Mode::Away);
    let nobody = Identity { user: None, jti: None, ..who("", "", 0) };
    assert_eq!(node.check(&nobody).await, CheckOutcome::Good);
    assert_eq!(fake.n_calls(), 0);
    assert_eq!(n_checks(&node, RevocationSource::Unneeded), 1);
}

#[tokio::test(start_paused = true)]
async fn checks_that_arrive_while_one_is_in_flight_share_the_next() {
    let (fake, node) = node();
    fake.set(Mode::Held);
    fake.put(jti("j3"), "1");
    let first = spawn(&node, who("u", "first", 1));
    fake.called.notified().await;
    let crowd: Vec<_> = (0..500).map(|i| spawn(&node, who("u", &format!("j{i}"), 1))).collect();
    until_waiting(&node, 501).await;
    fake.go.notify_one();
    assert_eq!(first.await.unwrap(), CheckOutcome::Good);
    fake.called.notified().await;
    fake.go.notify_one();
    for (i, check) in crowd.into_iter().enumerate() {
        let right = if i == 3 { CheckOutcome::Revoked } else { CheckOutcome::Good };
        assert_eq!(check.await.unwrap(), right, "{i}");
    }
    let calls = fake.calls.lock().unwrap();
    assert_eq!(calls.len(), 2);
    assert_eq!(calls[1].len(), 501, "the user's own key is asked once for all");
    assert_eq!(fake.most_in_flight.load(Ordering::SeqCst), 1);
    assert_eq!(node.n_waiting(), 0);
}

#[tokio::test(start_paused = true)]
async fn a_cancelled_check_never_answers_anothers_question() {
    let (fake, node) = node();
    fake.set(Mode::Held);
    for i in (0..300).step_by(7) {
        fake.put(jti(&format!("j{i}")), "1");
    }
    let check = |i| spawn(&node, who(&format!("u{i}"), &format!("j{i}"), 1));
    let mut checks = vec![check(0)];
    fake.called.notified().await;
    checks.extend((1..300).map(check));
    until_waiting(&node, 300).await;
    // The first of them in flight, the others waiting for the next question.
    for check in checks.iter().step_by(3) {
        check.abort();
    }
    fake.set(Mode::Prompt);
    fake.go.notify_one();
    for (i, check) in checks.into_iter().enumerate() {
        match check.await {
            Ok(outcome) => assert_eq!(outcome == CheckOutcome::Revoked, i % 7 == 0, "{i}"),
            Err(error) => assert!(error.is_cancelled() && i % 3 == 0, "{i}"),
        }
    }
    assert_eq!(node.check(&who("u1", "j1", 1)).await, CheckOutcome::Good);
    assert_eq!(node.n_waiting(), 0);
    let asked: Vec<_> = fake.calls.lock().unwrap().concat();
    assert!(!asked.contains(&jti("j297")), "a question nobody waits for is not asked");
}

#[tokio::test(start_paused = true)]
async fn a_list_that_is_away_hung_wrong_or_broken_is_unavailable_within_the_deadline() {
    let (fake, node) = node();
    for mode in [Mode::Away, Mode::Hung, Mode::Panicking, Mode::TooShort] {
        tokio::time::sleep(REST).await;
        fake.set(mode);
        let start = Instant::now();
        assert_eq!(node.check(&who("u", "j", 1)).await, CheckOutcome::Unavailable);
        assert!(start.elapsed() <= DEADLINE + Duration::from_millis(2));
    }
    fake.set(Mode::Prompt);
    tokio::time::sleep(DEADLINE).await;
    assert_eq!(node.check(&who("u", "j", 1)).await, CheckOutcome::Good);
    assert_eq!(n_checks(&node, RevocationSource::Unavailable), 4);
    assert_eq!(n_checks(&node, RevocationSource::Redis), 1);
}

#[tokio::test(start_paused = true)]
async fn while_the_list_is_away_one_question_tries_it_and_nobody_else_waits_for_that() {
    let (fake, node) = node();
    fake.set(Mode::Hung);
    // They share a question that fails; those who queued behind it are not made to wait for another.
    let crowd: Vec<_> = (0..100).map(|i| spawn(&node, who(&format!("u{i}"), "j", 1))).collect();
    let start = Instant::now();
    for check in crowd {
        assert_eq!(check.await.unwrap(), CheckOutcome::Unavailable);
    }
    assert!(start.elapsed() <= DEADLINE + Duration::from_millis(2), "{:?}", start.elapsed());
    let n_calls = fake.n_calls();
    let start = Instant::now();
    for i in 0..100 {
        assert_eq!(node.check(&who(&format!("v{i}"), "j", 1)).await, CheckOutcome::Unavailable);
    }
    assert_eq!((start.elapsed(), fake.n_calls()), (Duration::ZERO, n_calls), "told at once, and Redis left alone");
    fake.set(Mode::Prompt);
    tokio::time::sleep(REST).await;
    assert_eq!(node.check(&who("u", "j", 1)).await, CheckOutcome::Good);
}

/// Comes `per_second` for a second; how many questions that took, and the longest that anybody waited.
async fn come(per_second: u32, company: Company) -> (usize, Duration) {
    let (fake, node) = node_with(company);
    let start = Instant::now();
    let mut checks = Vec::new();
    for i in 0..per_second {
        tokio::time::sleep_until(start + Duration::from_secs(1) * i / per_second).await;
        let node = node.clone();
        checks.push(tokio::spawn(async move {
            let asked_at = Instant::now();
            let checked = node.check_by(&who(&format!("u{i}"), "j", 1), asked_at + DEADLINE).await;
            assert_eq!(checked.outcome, CheckOutcome::Good);
            // The list itself answers at once here.
            assert_eq!(checked.in_company, asked_at.elapsed());
            asked_at.elapsed()
        }));
    }
    let mut longest = Duration::ZERO;
    for check in checks {
        longest = longest.max(check.await.unwrap());
    }
    (fake.n_calls(), longest)
}

#[tokio::test(start_paused = true)]
async fn a_question_waits_for_company_in_a_storm_only_and_never_long() {
    let (n, longest) = come(100, Company::Awaited).await;
    assert_eq!((n, longest), (100, Duration::ZERO), "alone, everybody is asked for at once");
    for per_second in [1_000, 5_000] {
        let (n, longest) = come(per_second, Company::Awaited).await;
        assert!(n <= per_second as usize / 50 + 10, "{n} questions for {per_second} checks");
        assert!(longest <= COMPANY_WAIT + Duration::from_millis(2), "{longest:?}");
    }
    let (n, longest) = come(1_000, Company::Unneeded).await;
    assert_eq!((n, longest), (1_000, Duration::ZERO), "few are let in: nobody waits, however they come");
    // Sixty who come again as soon as they were answered are all there are: no use to wait for more.
    let (fake, node) = node();
    let start = Instant::now();
    for i in 0..100 {
        let all: Vec<_> = (0..60).map(|k| spawn(&node, who(&format!("u{k}"), &format!("j{i}"), 1))).collect();
        for check in all {
            assert_eq!(check.await.unwrap(), CheckOutcome::Good);
        }
    }
    assert!(start.elapsed() <= 100 * (ALONE + 2) * LOOK, "{:?}", start.elapsed());
    assert!(fake.n_calls() <= 200, "{}", fake.n_calls());
}

#[tokio::test(start_paused = true)]
async fn waiters_are_bounded_and_the_one_too_many_is_told_at_once() {
    let (fake, node) = node();
    fake.set(Mode::Hung);
    let checks: Vec<_> = (0..MAX_WAITING).map(|i| spawn(&node, who(&format!("u{i}"), "j", 1))).collect();
    until_waiting(&node, MAX_WAITING).await;
    let start = Instant::now();
    assert_eq!(node.check(&who("x", "j", 1)).await, CheckOutcome::Unavailable);
    assert_eq!(start.elapsed(), Duration::ZERO);
    for check in checks {
        assert_eq!(check.await.unwrap(), CheckOutcome::Unavailable);
    }
    fake.set(Mode::Prompt);
    tokio::time::sleep(2 * DEADLINE).await;
    assert_eq!(node.check(&who("x", "j", 1)).await, CheckOutcome::Good);
    assert_eq!(node.n_waiting(), 0);
}

#[tokio::test(start_paused = true)]
async fn what_this_node_saw_holds_while_the_list_is_away() {
    let (fake, node) = node();
    node.note(&Revocation { key: jti("j"), before: 0 });
    node.note(&Revocation { key: sub("u"), before: 100 });
    fake.set(Mode::Away);
    for _ in 0..2 {
        assert_eq!(node.check(&who("a", "j", 500)).await, CheckOutcome::Revoked);
        assert_eq!(node.check(&who("u", "k", 100)).await, CheckOutcome::Revoked);
        assert_eq!(node.check(&who("u", "k", 101)).await, CheckOutcome::Unavailable);
        assert!(node.is_seen(&who("u", "k", 100)) && !node.is_seen(&who("u", "k", 101)));
        // The second time it is seen long ago, and the list must be tried first.
        tokio::time::sleep(10 * FRESH).await;
    }
    tokio::time::sleep(Duration::from_secs(3_600)).await;
    assert_eq!(node.check(&who("a", "j", 500)).await, CheckOutcome::Unavailable);
}

#[tokio::test(start_paused = true)]
async fn what_the_list_once_said_is_remembered_too() {
    let (fake, node) = node();
    fake.put(sub("u"), "100");
    assert_eq!(node.check(&who("u", "j", 50)).await, CheckOutcome::Revoked);
    fake.set(Mode::Away);
    tokio::time::sleep(2 * FRESH).await;
    assert_eq!(node.check(&who("u", "k", 60)).await, CheckOutcome::Revoked);
}

#[tokio::test(start_paused = true)]
async fn a_revoked_client_that_insists_costs_no_question() {
    let (fake, node) = node();
    fake.put(jti("j"), "1");
    for _ in 0..1_000 {
        assert_eq!(node.check(&who("u", "j", 1)).await, CheckOutcome::Revoked);
    }
    assert_eq!(fake.n_calls(), 1);
}

#[tokio::test(start_paused = true)]
async fn a_revocation_taken_back_in_the_list_ends_after_the_grace() {
    let (fake, node) = node();
    node.note(&Revocation { key: jti("j"), before: 0 });
    tokio::time::sleep(FRESH - Duration::from_millis(1)).await;
    assert_eq!(node.check(&who("u", "j", 1)).await, CheckOutcome::Revoked);
    assert_eq!(fake.n_calls(), 0);
    tokio::time::sleep(Duration::from_millis(1)).await;
    assert_eq!(node.check(&who("u", "j", 1)).await, CheckOutcome::Good);
    assert!(!node.is_seen(&who("u", "j", 1)));
}

#[tokio::test(start_paused = true)]
async fn a_revocation_that_arrives_during_the_question_wins_over_its_answer() {
    let (fake, node) = node();
    fake.set(Mode::Held);
    let check = spawn(&node, who("u", "j", 1));
    fake.called.notified().await;
    node.note(&Revocation { key: jti("j"), before: 0 });
    fake.go.notify_one();
    assert_eq!(check.await.unwrap(), CheckOutcome::Revoked);
}

#[tokio::test(start_paused = true)]
async fn a_sweep_tells_each_of_many_apart() {
    let (fake, node) = node();
    fake.put(jti("j1"), "1");
    fake.put(sub("u2"), "50");
    let nobody = Identity { user: None, jti: None, ..who("", "", 0) };
    let all = [who("u0", "j0", 1), who("u1", "j1", 1), nobody, who("u2", "j2", 50), who("u2", "j2", 51)].map(Arc::new);
    assert_eq!(node.sweep(&all).await.unwrap(), [false, true, false, true, false]);
    assert_eq!(fake.n_calls(), 1);
    fake.set(Mode::Away);
    assert!(node.sweep(&all).await.is_err());
    assert!(node.sweep(&[]).await.unwrap().is_empty());
}

#[tokio::test(start_paused = true)]
async fn its_task_ends_with_it() {
    let (fake, node) = node();
    fake.set(Mode::Hung);
    let check = spawn(&node, who("u", "j", 1));
    fake.called.notified().await;
    check.abort();
    let _ = check.await;
    drop(node);
    for _ in 0..10 {
        tokio::task::yield_now().await;
    }
    assert_eq!(Arc::strong_count(&fake), 1, "nothing holds the backplane any more");
}

#[test]
fn notes_are_bounded_and_the_oldest_goes_first() {
    let seen = Seen::new(10, Duration::from_secs(60));
    let start = Instant::now();
    for i in 0..100u64 {
        seen.note(jti(&i.to_string()), 0, start + Duration::from_millis(i));
        seen.note(jti("again"), 0, start + Duration::from_millis(i));
        assert!(seen.lock().by_key.len() <= 10 && seen.lock().order.len() <= 10);
    }
    let now = start + Duration::from_millis(99);
    let is = |key: &str| seen.is(&[jti(key)], &who("u", key, 1), now, seen.remember);
    assert!(is("99") && is("again") && !is("0"));
    seen.note(jti("new"), 0, start + Duration::from_secs(70));
    assert_eq!(seen.lock().by_key.len(), 1, "the others were over");
}

#[test]
fn a_weaker_note_never_replaces_a_stronger_one() {
    let seen = Seen::new(10, Duration::from_secs(60));
    let now = Instant::now();
    seen.note(sub("u"), 100, now);
    seen.note(sub("u"), 50, now);
    assert!(seen.is(&[sub("u")], &who("u", "j", 100), now, seen.remember));
}
