//! A backplane that answers late or not at all: calls wait, and nothing fails. What is no call, the
//! link above all, goes on.

use std::sync::Arc;
use std::time::Duration;

use futures_util::future::BoxFuture;
use tokio::sync::{mpsc, watch};
use tokio::time::sleep;

use crate::backplane::{
    Backplane, Claim, Claimed, Fleet, FromLink, Hold, Publish, Published, Read, ReadAsk, Revocation, RevocationKey,
    Unavailable,
};
use crate::channel::Channel;
use crate::memory::Memory;

/// When calls are answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Answers {
    AtOnce,
    After(Duration),
    /// Not before that is changed, those that wait then too.
    Never,
}

/// In front of one node's memory.
pub(crate) struct Mute {
    memory: Arc<Memory>,
    answers: watch::Sender<Answers>,
}

impl Mute {
    /// One that answers.
    pub fn new(memory: Arc<Memory>) -> Self {
        Self { memory, answers: watch::Sender::new(Answers::AtOnce) }
    }

    /// From now on.
    pub fn set(&self, answers: Answers) {
        self.answers.send_replace(answers);
    }

    fn call<'a, T: Send + 'a>(&'a self, call: BoxFuture<'a, T>) -> BoxFuture<'a, T> {
        Box::pin(async move {
            let mut changes = self.answers.subscribe();
            let answers = changes.wait_for(|answers| *answers != Answers::Never).await.map(|answers| *answers);
            if let Ok(Answers::After(delay)) = answers {
                sleep(delay).await;
            }
            call.await
        })
    }
}

impl Backplane for Mute {
    fn publish(&self, event: Publish) -> BoxFuture<'_, Result<Published, Unavailable>> {
        self.call(self.memory.publish(event))
    }

    fn read(&self, ask: ReadAsk) -> BoxFuture<'_, Result<Read, Unavailable>> {
        self.call(self.memory.read(ask))
    }

    fn want(&self, channel: &Channel) {
        self.memory.want(channel);
    }

    fn unwant(&self, channel: &Channel) {
        self.memory.unwant(channel);
    }

    fn beacon(&self) {
        self.memory.beacon();
    }

    fn relink(&self) {
        self.memory.relink();
    }

    fn link(&self) -> mpsc::Receiver<FromLink> {
        self.memory.link()
    }

    fn revocations(&self, keys: Vec<RevocationKey>) -> BoxFuture<'_, Result<Vec<Option<String>>, Unavailable>> {
        self.call(self.memory.revocations(keys))
    }

    fn revoke(&self, revocation: Revocation, ttl: Duration) -> BoxFuture<'_, Result<(), Unavailable>> {
        self.call(self.memory.revoke(revocation, ttl))
    }

    fn report(&self, body: String, ttl: Duration) -> BoxFuture<'_, Result<Fleet, Unavailable>> {
        self.call(self.memory.report(body, ttl))
    }

    fn retire(&self) -> BoxFuture<'_, Result<(), Unavailable>> {
        self.call(self.memory.retire())
    }

    fn hold(&self, hold: Option<(Duration, String)>) -> BoxFuture<'_, Result<Option<Hold>, Unavailable>> {
        self.call(self.memory.hold(hold))
    }

    fn tell(&self, to: Option<Arc<str>>, text: String) -> BoxFuture<'_, Result<(), Unavailable>> {
        self.call(self.memory.tell(to, text))
    }

    fn claim(&self, claims: Vec<Claim>, max: u32) -> BoxFuture<'_, Result<Vec<Claimed>, Unavailable>> {
        self.call(self.memory.claim(claims, max))
    }

    fn release(&self, of: Vec<(Arc<str>, Arc<str>)>) -> BoxFuture<'_, Result<(), Unavailable>> {
        self.call(self.memory.release(of))
    }

    fn is_link_up(&self) -> bool {
        self.memory.is_link_up()
    }
}
