//! A backplane that is late, away, or whose answers are held until the test lets them go. Wraps any
//! other. The link passes untouched: `Memory` and `Proxy` break links.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures_util::future::BoxFuture;
use hub::backplane::{
    Backplane, Claim, Claimed, Fleet, FromLink, Hold, Publish, Published, Read, ReadAsk, Revocation, RevocationKey,
    Unavailable,
};
use hub::channel::Channel;
use tokio::sync::{Semaphore, mpsc, watch};

/// Which call a fault is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Call {
    /// `Backplane::publish`
    Publish,
    /// `Backplane::read`
    Read,
    /// `Backplane::revocations`
    Revocations,
    /// `Backplane::revoke`
    Revoke,
    /// `Backplane::report`
    Report,
    /// `Backplane::retire`
    Retire,
    /// `Backplane::hold`
    Hold,
    /// `Backplane::tell`
    Tell,
    /// `Backplane::claim`
    Claim,
    /// `Backplane::release`
    Release,
}

/// How many kinds of calls there are.
const CALLS: usize = Call::Release as usize + 1;

/// How a call comes to be `Unavailable`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Failure {
    /// It never reached the log.
    Request,
    /// It was done; only the answer is lost.
    Answer,
}

#[derive(Clone, Default)]
struct Rule {
    delay: Duration,
    failure: Option<Failure>,
    hold: Option<Arc<Gate>>,
}

struct Gate {
    n_held: watch::Sender<usize>,
    let_go: Semaphore,
}

/// `B` with faults on demand. None at first.
pub struct Faulty<B: Backplane + ?Sized> {
    inner: Arc<B>,
    rules: Mutex<[Rule; CALLS]>,
}

impl<B: Backplane + ?Sized> Faulty<B> {
    /// Behaves as `inner` until it is told otherwise.
    pub fn new(inner: Arc<B>) -> Arc<Self> {
        Arc::new(Self { inner, rules: Mutex::default() })
    }

    /// What is wrapped.
    pub fn inner(&self) -> &Arc<B> {
        &self.inner
    }

    /// Each such call reaches the log so much later (tokio's clock). Zero ends it.
    pub fn delay(&self, call: Call, by: Duration) {
        self.rule(call, |rule| rule.delay = by);
    }

    /// Each such call is `Unavailable` until `mend`.
    pub fn fail(&self, call: Call, failure: Failure) {
        self.rule(call, |rule| rule.failure = Some(failure));
    }

    /// Ends `fail`.
    pub fn mend(&self, call: Call) {
        self.rule(call, |rule| rule.failure = None);
    }

    /// From now on such calls are executed at once, but their answers wait for the returned value:
    /// what a late answer finds changed is thereby decided by the test. Replaces an earlier `hold`
    /// of the same call, whose answers stay with it.
    pub fn hold(&self, call: Call) -> Held {
        let gate = Arc::new(Gate { n_held: watch::channel(0).0, let_go: Semaphore::new(0) });
        self.rule(call, |rule| rule.hold = Some(gate.clone()));
        Held { gate }
    }

    fn rule<T>(&self, call: Call, change: impl FnOnce(&mut Rule) -> T) -> T {
        change(&mut self.rules.lock().expect("nothing panics while it is held")[call as usize])
    }

    async fn through<T>(&self, call: Call, inner: BoxFuture<'_, Result<T, Unavailable>>) -> Result<T, Unavailable> {
        let Rule { delay, failure, hold } = self.rule(call, |rule| rule.clone());
        if !delay.is_zero() {
            tokio::time::sleep(delay).await;
        }
        if failure == Some(Failure::Request) {
            return Err(Unavailable("the request was lost".to_owned()));
        }
        let answer = inner.await;
        if let Some(gate) = hold {
            gate.n_held.send_modify(|n| *n += 1);
            // An error means that the gate was opened for good.
            if let Ok(permit) = gate.let_go.acquire().await {
                permit.forget();
            }
        }
        match failure {
            Some(Failure::Answer) => Err(Unavailable("the answer was lost".to_owned())),
            _ => answer,
        }
    }
}

/// Answers that were held back. Dropping it lets all go, later ones of the same `hold` too.
pub struct Held {
    gate: Arc<Gate>,
}

impl Held {
    /// Waits until so many calls in all were executed and their answers arrived here.
    pub async fn arrived(&self, n_calls: usize) {
        let mut seen = self.gate.n_held.subscribe();
        let _ = seen.wait_for(|n| *n >= n_calls).await;
    }

    /// Lets the oldest answer go that was not let go yet (or the next to come).
    pub fn release_one(&self) {
        self.gate.let_go.add_permits(1);
    }

    /// Lets all go, and holds nothing any more.
    pub fn release(self) {}
}

impl Drop for Held {
    fn drop(&mut self) {
        self.gate.let_go.close();
    }
}

impl<B: Backplane + ?Sized> Backplane for Faulty<B> {
    fn publish(&self, event: Publish) -> BoxFuture<'_, Result<Published, Unavailable>> {
        Box::pin(self.through(Call::Publish, self.inner.publish(event)))
    }

    fn read(&self, ask: ReadAsk) -> BoxFuture<'_, Result<Read, Unavailable>> {
        Box::pin(self.through(Call::Read, self.inner.read(ask)))
    }

    fn want(&self, channel: &Channel) {
        self.inner.want(channel);
    }

    fn unwant(&self, channel: &Channel) {
        self.inner.unwant(channel);
    }

    fn beacon(&self) {
        self.inner.beacon();
    }

    fn relink(&self) {
        self.inner.relink();
    }

    fn link(&self) -> mpsc::Receiver<FromLink> {
        self.inner.link()
    }

    fn revocations(&self, keys: Vec<RevocationKey>) -> BoxFuture<'_, Result<Vec<Option<String>>, Unavailable>> {
        Box::pin(self.through(Call::Revocations, self.inner.revocations(keys)))
    }

    fn revoke(&self, revocation: Revocation, ttl: Duration) -> BoxFuture<'_, Result<(), Unavailable>> {
        Box::pin(self.through(Call::Revoke, self.inner.revoke(revocation, ttl)))
    }

    fn report(&self, body: String, ttl: Duration) -> BoxFuture<'_, Result<Fleet, Unavailable>> {
        Box::pin(self.through(Call::Report, self.inner.report(body, ttl)))
    }

    fn retire(&self) -> BoxFuture<'_, Result<(), Unavailable>> {
        Box::pin(self.through(Call::Retire, self.inner.retire()))
    }

    fn hold(&self, hold: Option<(Duration, String)>) -> BoxFuture<'_, Result<Option<Hold>, Unavailable>> {
        Box::pin(self.through(Call::Hold, Backplane::hold(&*self.inner, hold)))
    }

    fn tell(&self, to: Option<Arc<str>>, text: String) -> BoxFuture<'_, Result<(), Unavailable>> {
        Box::pin(self.through(Call::Tell, self.inner.tell(to, text)))
    }

    fn claim(&self, claims: Vec<Claim>, max: u32) -> BoxFuture<'_, Result<Vec<Claimed>, Unavailable>> {
        Box::pin(self.through(Call::Claim, self.inner.claim(claims, max)))
    }

    fn release(&self, of: Vec<(Arc<str>, Arc<str>)>) -> BoxFuture<'_, Result<(), Unavailable>> {
        Box::pin(self.through(Call::Release, self.inner.release(of)))
    }

    fn is_link_up(&self) -> bool {
        self.inner.is_link_up()
    }
}
