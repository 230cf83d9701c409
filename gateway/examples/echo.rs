//! Another protocol on the gateway's own WebSocket stack: every message comes back as it was. Made
//! of a raw session: no hello, no channels, only bytes. Conformance suites are run against it.
//! `GATEWAY_MAX_MESSAGE=16MiB GATEWAY_OUTBOX_BYTES=32MiB cargo run -p tidegate --example echo -- dev`

use std::process::ExitCode;

use tidegate::plugin::{Admission, Ask, BoxFuture, Identity, Inbound, Plugin, Plugins, Received, Refusal, SessionInfo};

struct Echo;

impl Plugin for Echo {
    fn name(&self) -> &'static str {
        "echo"
    }

    fn admit<'a>(&'a self, _who: &'a Identity, _ask: &'a Ask) -> BoxFuture<'a, Result<Admission, Refusal>> {
        Box::pin(async { Ok(Admission::Raw) })
    }

    fn received(&self, _from: &SessionInfo, message: &Inbound) -> Received {
        Received::Reply(message.clone())
    }
}

fn main() -> ExitCode {
    tidegate::run_with(Plugins::new().with(Echo))
}
