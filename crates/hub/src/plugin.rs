//! The extension point: what a custom gateway may decide and observe. Everything but `name` is
//! defaulted. Only `admit` may wait, and only under the admission deadline; a panic in any call is
//! caught, counted and answered by the safe side (admit refuses, may_subscribe denies, publishing
//! drops the event, received ends the session).

use std::future::Future;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use bytes::Bytes;
use futures_util::FutureExt;
use futures_util::future::BoxFuture;
use tokio_util::sync::CancellationToken;

use crate::auth::Identity;
use crate::backplane::Publish;
use crate::channel::Channel;
use crate::close::CloseReason;
use crate::event::Wire;
use crate::hub::GatewayHandle;
use crate::refusal::{Refusal, RefusalCode};
use crate::session::SessionInfo;
use crate::telemetry::Metrics;

/// How long a plugin's own task may still run once it was told to stop. 1 s: enough to send what
/// it had in hand, little enough that a second signal still ends the process at once.
const RUN_END: Duration = Duration::from_secs(1);

/// What a newcomer asks for, beside who it is.
#[derive(Clone, Debug)]
pub struct Ask {
    /// The transport.
    pub wire: Wire,
    /// The request's path and query with every credential removed.
    pub path: String,
    /// The `Origin` header, if any.
    pub origin: Option<String>,
    /// The client's address (behind named proxies: the right-most untrusted hop).
    pub address: std::net::IpAddr,
}

/// What kind of session a plugin wants opened.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Admission {
    /// The contract's protocol.
    #[default]
    Standard,
    /// WebSocket only: no hello, ready, bye or channels. Every text and binary message goes to
    /// `Plugin::received` as bytes and is answered as bytes.
    Raw,
}

/// Whether a channel may be heard, beyond what the token grants.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Verdict {
    /// No opinion: the token's grants decide.
    #[default]
    Pass,
    /// Yes, whatever the token says.
    Allow,
    /// No, whatever the token says.
    Deny,
}

/// A message from a client that the gateway itself has no use for (or any message of a raw session).
#[derive(Clone, Debug)]
pub enum Inbound {
    /// A text message, valid UTF-8.
    Text(Bytes),
    /// A binary message.
    Binary(Bytes),
}

/// What a plugin did with an inbound message.
#[derive(Clone, Debug, Default)]
pub enum Received {
    /// Not mine: the next plugin is asked; after the last the client gets `unknown_type`.
    #[default]
    Pass,
    /// Mine, with an answer.
    Reply(Inbound),
    /// Mine, nothing to answer.
    Handled,
    /// End this session.
    Leave(CloseReason),
}

/// A gateway's extension. See the module's text for what each default does.
pub trait Plugin: Send + Sync + 'static {
    /// For logs and metrics.
    fn name(&self) -> &'static str;

    /// After the token and the revocation list agreed, before a session exists. Runs under
    /// `GATEWAY_AUTH_TIMEOUT`; the first plugin that refuses decides. `Raw` wins over `Standard`.
    ///
    /// # Errors
    /// A `Refusal` is answered to the client as it stands.
    fn admit<'a>(&'a self, _who: &'a Identity, _ask: &'a Ask) -> BoxFuture<'a, Result<Admission, Refusal>> {
        async { Ok(Admission::Standard) }.boxed()
    }

    /// Asked for every channel, also those of the token. `Deny` of any plugin wins over `Allow`.
    fn may_subscribe(&self, _who: &Identity, _channel: &Channel) -> Verdict {
        Verdict::Pass
    }

    /// Sees every event published through this node's API before it is logged; may change or drop it.
    fn publishing(&self, event: Publish) -> Option<Publish> {
        Some(event)
    }

    /// A message of a type the gateway does not know, a binary one, or any message of a raw session.
    fn received(&self, _from: &SessionInfo, _message: &Inbound) -> Received {
        Received::Pass
    }

    /// A session exists. Pairs exactly with one `closed`.
    fn opened(&self, _session: &SessionInfo) {}

    /// The session is over.
    fn closed(&self, _session: &SessionInfo, _reason: CloseReason) {}

    /// A task of the plugin's own, from the gateway's start on. When `stop` is cancelled (nobody is
    /// connected any more) it has a second to come to its end, then it is dropped where it waits.
    fn run(self: Arc<Self>, _gateway: GatewayHandle, _stop: CancellationToken) -> BoxFuture<'static, ()> {
        async {}.boxed()
    }
}

/// The compiled-in plugins, asked in the order in which they were added.
#[derive(Clone, Default)]
pub struct Plugins {
    list: Vec<Arc<dyn Plugin>>,
    /// Where panics are counted, once there is a node; shared by all clones of it.
    metrics: Arc<OnceLock<Arc<Metrics>>>,
}

impl Plugins {
    /// None.
    pub fn new() -> Self {
        Self::default()
    }

    /// One more, asked after those before it.
    #[must_use]
    pub fn with(mut self, plugin: impl Plugin) -> Self {
        self.list.push(Arc::new(plugin));
        self
    }

    /// Is there none?
    pub fn is_empty(&self) -> bool {
        self.list.is_empty()
    }

    /// Each of them.
    pub fn iter(&self) -> impl Iterator<Item = &Arc<dyn Plugin>> {
        self.list.iter()
    }

    /// Panics are counted here from now on; the first call decides.
    pub(crate) fn count_in(&self, metrics: &Arc<Metrics>) {
        let _ = self.metrics.set(metrics.clone());
    }

    /// The plugins' own tasks. None runs longer than `RUN_END` beyond `stop`.
    pub(crate) fn tasks(
        &self,
        gateway: &GatewayHandle,
        stop: &CancellationToken,
    ) -> Vec<impl Future<Output = ()> + Send + use<>> {
        let task = |plugin: &Arc<dyn Plugin>| {
            let (plugins, plugin) = (self.clone(), plugin.clone());
            let (gateway, stop) = (gateway.clone(), stop.clone());
            async move {
                let name = plugin.name();
                let running = AssertUnwindSafe(async { plugin.run(gateway, stop.clone()).await }).catch_unwind();
                tokio::select! {
                    ended = running => if ended.is_err() { plugins.panicked(name, "run") },
                    () = async { stop.cancelled().await; tokio::time::sleep(RUN_END).await } => {}
                }
            }
        };
        self.list.iter().map(task).collect()
    }

    /// All must agree; one `Raw` makes the session raw.
    ///
    /// # Errors
    /// The first refusal; a panic refuses with `internal`.
    pub async fn admit(&self, who: &Identity, ask: &Ask) -> Result<Admission, Refusal> {
        let mut admission = Admission::Standard;
        for plugin in &self.list {
            // The call itself stands inside: it may panic before there is a future.
            match AssertUnwindSafe(async { plugin.admit(who, ask).await }).catch_unwind().await {
                Ok(Ok(Admission::Raw)) => admission = Admission::Raw,
                Ok(Ok(Admission::Standard)) => {}
                Ok(Err(refusal)) => return Err(refusal),
                Err(_) => {
                    self.panicked(plugin.name(), "admit");
                    return Err(Refusal::new(RefusalCode::Internal, "a plugin failed"));
                }
            }
        }
        Ok(admission)
    }

    /// Grants and plugins together.
    pub fn may_subscribe(&self, who: &Identity, channel: &Channel) -> bool {
        let mut allowed = who.grants.allow(channel);
        for plugin in &self.list {
            match self.guarded(plugin, "may_subscribe", || plugin.may_subscribe(who, channel)) {
                Some(Verdict::Pass) => {}
                Some(Verdict::Allow) => allowed = true,
                Some(Verdict::Deny) | None => return false,
            }
        }
        allowed
    }

    /// Through all of them in turn; `None` as soon as one drops it or panics.
    pub fn publishing(&self, event: Publish) -> Option<Publish> {
        self.list
            .iter()
            .try_fold(event, |event, plugin| self.guarded(plugin, "publishing", || plugin.publishing(event)).flatten())
    }

    /// The first that does not pass.
    pub fn received(&self, from: &SessionInfo, message: &Inbound) -> Received {
        for plugin in &self.list {
            match self.guarded(plugin, "received", || plugin.received(from, message)) {
                Some(Received::Pass) => {}
                Some(answer) => return answer,
                None => return Received::Leave(CloseReason::Internal),
            }
        }
        Received::Pass
    }

    /// Tells all.
    pub fn opened(&self, session: &SessionInfo) {
        for plugin in &self.list {
            self.guarded(plugin, "opened", || plugin.opened(session));
        }
    }

    /// Tells all.
    pub fn closed(&self, session: &SessionInfo, reason: CloseReason) {
        for plugin in &self.list {
            self.guarded(plugin, "closed", || plugin.closed(session, reason));
        }
    }

    fn guarded<T>(&self, plugin: &Arc<dyn Plugin>, call: &'static str, f: impl FnOnce() -> T) -> Option<T> {
        catch_unwind(AssertUnwindSafe(f)).inspect_err(|_| self.panicked(plugin.name(), call)).ok()
    }

    fn panicked(&self, plugin: &'static str, call: &'static str) {
        tracing::error!(plugin, call, "plugin panicked");
        if let Some(metrics) = self.metrics.get() {
            metrics.plugin_panicked();
        }
    }
}
