//! A node's link on a leash: what the log says travels only as far as the test lets it, and what is
//! on the way when the link breaks may be lost with it. Wraps any other backplane; calls pass
//! untouched.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures_util::future::BoxFuture;
use hub::backplane::{
    Backplane, Claim, Claimed, Fleet, FromLink, Hold, Publish, Published, Read, ReadAsk, Revocation, RevocationKey,
    Unavailable,
};
use hub::channel::Channel;
use tokio::sync::{Notify, mpsc};

/// What happens to messages on the way when the link breaks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum InFlight {
    /// They still arrive, before the loss is told.
    #[default]
    Arrives,
    /// They are lost with it.
    IsLost,
}

#[derive(Default)]
struct Leash {
    /// How many messages may pass yet; `None`: all.
    allowed: Option<usize>,
    in_flight: InFlight,
}

#[derive(Default)]
struct Shared {
    leash: Mutex<Leash>,
    changed: Notify,
}

impl Shared {
    fn change<T>(&self, change: impl FnOnce(&mut Leash) -> T) -> T {
        let changed = change(&mut self.leash.lock().expect("nothing panics while it is held"));
        self.changed.notify_one();
        changed
    }

    fn may_pass(&self) -> bool {
        self.leash.lock().expect("nothing panics while it is held").allowed != Some(0)
    }

    /// Takes one of those that may pass yet; false where none may.
    fn pass_one(&self) -> bool {
        let mut leash = self.leash.lock().expect("nothing panics while it is held");
        match &mut leash.allowed {
            Some(0) => return false,
            Some(n) => *n -= 1,
            None => {}
        }
        true
    }

    fn loses_what_is_on_the_way(&self) -> bool {
        self.leash.lock().expect("nothing panics while it is held").in_flight == InFlight::IsLost
    }
}

/// `B` with its link on a leash. Flows freely at first.
pub struct Line<B: Backplane + ?Sized> {
    inner: Arc<B>,
    shared: Arc<Shared>,
}

impl<B: Backplane + ?Sized> Line<B> {
    /// Behaves as `inner` until it is told otherwise.
    pub fn new(inner: Arc<B>) -> Arc<Self> {
        Arc::new(Self { inner, shared: Arc::default() })
    }

    /// What is wrapped.
    pub fn inner(&self) -> &Arc<B> {
        &self.inner
    }

    /// From now on messages wait on the line.
    pub fn hold(&self) {
        self.shared.change(|leash| leash.allowed = Some(0));
    }

    /// Lets `n` more messages pass (the next ones to come, if none wait). No effect while it flows.
    pub fn pass(&self, n: usize) {
        self.shared.change(|leash| leash.allowed = leash.allowed.map(|allowed| allowed + n));
    }

    /// All that waits and all that comes passes.
    pub fn flow(&self) {
        self.shared.change(|leash| leash.allowed = None);
    }

    /// What a loss does to messages that wait on the line.
    pub fn when_lost(&self, in_flight: InFlight) {
        self.shared.change(|leash| leash.in_flight = in_flight);
    }
}

impl<B: Backplane + ?Sized> Backplane for Line<B> {
    fn publish(&self, event: Publish) -> BoxFuture<'_, Result<Published, Unavailable>> {
        self.inner.publish(event)
    }

    fn read(&self, ask: ReadAsk) -> BoxFuture<'_, Result<Read, Unavailable>> {
        self.inner.read(ask)
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

    /// # Panics
    /// Outside a tokio runtime, and where the wrapped one panics.
    fn link(&self) -> mpsc::Receiver<FromLink> {
        let (to, link) = mpsc::channel(1);
        // Ends with the node on either side of it.
        tokio::spawn(carry(self.shared.clone(), self.inner.link(), to));
        link
    }

    fn revocations(&self, keys: Vec<RevocationKey>) -> BoxFuture<'_, Result<Vec<Option<String>>, Unavailable>> {
        self.inner.revocations(keys)
    }

    fn revoke(&self, revocation: Revocation, ttl: Duration) -> BoxFuture<'_, Result<(), Unavailable>> {
        self.inner.revoke(revocation, ttl)
    }

    fn report(&self, body: String, ttl: Duration) -> BoxFuture<'_, Result<Fleet, Unavailable>> {
        self.inner.report(body, ttl)
    }

    fn retire(&self) -> BoxFuture<'_, Result<(), Unavailable>> {
        self.inner.retire()
    }

    fn hold(&self, hold: Option<(Duration, String)>) -> BoxFuture<'_, Result<Option<Hold>, Unavailable>> {
        Backplane::hold(&*self.inner, hold)
    }

    fn tell(&self, to: Option<Arc<str>>, text: String) -> BoxFuture<'_, Result<(), Unavailable>> {
        self.inner.tell(to, text)
    }

    fn claim(&self, claims: Vec<Claim>, max: u32) -> BoxFuture<'_, Result<Vec<Claimed>, Unavailable>> {
        self.inner.claim(claims, max)
    }

    fn release(&self, of: Vec<(Arc<str>, Arc<str>)>) -> BoxFuture<'_, Result<(), Unavailable>> {
        self.inner.release(of)
    }

    fn is_link_up(&self) -> bool {
        self.inner.is_link_up()
    }
}

async fn carry(shared: Arc<Shared>, mut from: mpsc::Receiver<FromLink>, to: mpsc::Sender<FromLink>) {
    let mut waiting = VecDeque::new();
    loop {
        let may_pass = !waiting.is_empty() && shared.may_pass();
        tokio::select! {
            biased;
            // Every arm is cancel-safe: nothing is taken unless it wins.
            said = from.recv() => match said {
                Some(said) => {
                    if matches!(said, FromLink::Lost) && shared.loses_what_is_on_the_way() {
                        waiting.clear();
                    }
                    waiting.push_back(said);
                }
                None => return,
            },
            room = to.reserve(), if may_pass => {
                let Ok(room) = room else { return };
                // Asked again: it may have been held while there was no room.
                if shared.pass_one() {
                    room.send(waiting.pop_front().expect("something waits"));
                }
            }
            () = shared.changed.notified() => {}
            () = to.closed() => return,
        }
    }
}
