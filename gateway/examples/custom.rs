//! A whole custom gateway: everything that `tidegate` does, and one rule of its own. Run it as
//! `cargo run -p tidegate --example custom -- dev`.

use std::process::ExitCode;

use tidegate::plugin::{Channel, CloseReason, Identity, Plugin, Plugins, SessionInfo, Verdict};

/// Nobody but staff hears `internal.…`, and every session's end is told.
struct Audit;

impl Plugin for Audit {
    fn name(&self) -> &'static str {
        "audit"
    }

    fn may_subscribe(&self, who: &Identity, channel: &Channel) -> Verdict {
        let is_staff = who.user.as_deref().is_some_and(|user| user.starts_with("staff-"));
        if channel.as_str().starts_with("internal.") && !is_staff { Verdict::Deny } else { Verdict::Pass }
    }

    fn closed(&self, session: &SessionInfo, reason: CloseReason) {
        println!("{} left after {:?}: {}", session.id, session.opened_at.elapsed(), reason.word());
    }
}

fn main() -> ExitCode {
    tidegate::run_with(Plugins::new().with(Audit))
}
