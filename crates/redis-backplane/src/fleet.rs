//! What nodes know of each other, in Redis: arguments and answers of the Functions in
//! `migrations/0003_fleet.lua`, and the message from node to node. Decides nothing about places,
//! holds or ages (the Functions do, atomically), nor what a report says (the hub does).

use std::sync::Arc;
use std::time::Duration;

use hub::backplane::{Claim, Claimed, Fleet, Hold, Report};
use redis::Cmd;

use crate::dial::Fault;
use crate::log::odd;
use crate::message::TOLD;

/// `who`: the node, or this life of it.
fn call(function: &str, log: &str, who: &str) -> Cmd {
    let mut cmd = redis::cmd("FCALL");
    cmd.arg(function).arg(1).arg(log).arg(who);
    cmd
}

/// The call that reports, in the name of this life of the node.
pub(crate) fn report_cmd(log: &str, life: &str, node: &str, body: &str, ttl: Duration) -> Cmd {
    let ttl_ms = u64::try_from(ttl.as_millis()).unwrap_or(u64::MAX).max(1);
    call("tidegate_report_2", log, life).arg(node).arg(body).arg(ttl_ms).to_owned()
}

/// Its answer: the clock, the birth, of each node its name, its report's age in ms and the report,
/// the hold, and age and text of what stood under the own name before.
pub(crate) type Reported = (u64, u64, Vec<(Vec<u8>, u64, Vec<u8>)>, Option<Held>, Option<(u64, Vec<u8>)>);

/// A hold's end, who took it, and why.
pub(crate) type Held = (u64, Vec<u8>, Vec<u8>);

/// Its answer to `own`, by node name, and how many reports and holds are no text: those are left out.
pub(crate) fn fleet(own: &str, (now_ms, birth_ms, said, held, before): Reported) -> (Fleet, u64) {
    let n_said = said.len() + usize::from(held.is_some());
    let report = |(node, age_ms, body)| {
        let node = String::from_utf8(node).ok()?.into();
        Some(Report { node, body: String::from_utf8(body).ok()?, age: Duration::from_millis(age_ms) })
    };
    let mut reports: Vec<Report> = said.into_iter().filter_map(report).collect();
    reports.sort_by(|a, b| a.node.cmp(&b.node));
    let hold = held.and_then(hold);
    let n_skipped = n_said - reports.len() - usize::from(hold.is_some());
    let before = before.and_then(|(age_ms, body)| report((own.as_bytes().to_vec(), age_ms, body)));
    (Fleet { reports, before, hold, birth_ms, now_ms }, n_skipped as u64)
}

/// The hold, unless it is no text.
pub(crate) fn hold((until_ms, by, reason): Held) -> Option<Hold> {
    Some(Hold { until_ms, by: String::from_utf8(by).ok()?.into(), reason: String::from_utf8(reason).ok()? })
}

/// The call that begins a hold in this node's name, or ends what there is.
pub(crate) fn hold_cmd(log: &str, node: &str, hold: Option<&(Duration, String)>) -> Cmd {
    let mut cmd = call("tidegate_hold_1", log, node);
    if let Some((time, reason)) = hold {
        cmd.arg(u64::try_from(time.as_millis()).unwrap_or(u64::MAX)).arg(reason);
    }
    cmd
}

/// The call that takes the own report away, and this life of the node with it.
pub(crate) fn retire_cmd(log: &str, life: &str, node: &str) -> Cmd {
    call("tidegate_retire_2", log, life).arg(node).to_owned()
}

/// The message, on a pub/sub channel. No Function: nothing of it is stored.
pub(crate) fn tell_cmd(pubsub: &str, text: &str) -> Cmd {
    redis::cmd("PUBLISH").arg(pubsub).arg(format!("{TOLD}{text}")).to_owned()
}

/// The call that claims, in the name of this life of the node; `max` 0 counts as 1.
pub(crate) fn claim_cmd(log: &str, life: &str, claims: &[Claim], max: u32) -> Cmd {
    let mut cmd = call("tidegate_claim_1", log, life);
    cmd.arg(max.max(1));
    for Claim { user, session, since } in claims {
        cmd.arg(&**user).arg(&**session);
        match since {
            Some(since) => cmd.arg(since),
            None => cmd.arg(""),
        };
    }
    cmd
}

/// Its answer: a place and a flag for each claim.
pub(crate) fn claimed(n_claims: usize, answer: &[u64]) -> Result<Vec<Claimed>, Fault> {
    if answer.len() != 2 * n_claims {
        return Err(odd());
    }
    Ok(answer.chunks_exact(2).map(|pair| Claimed { since: pair[0], replaced: pair[1] != 0 }).collect())
}

/// The call that gives places up.
pub(crate) fn release_cmd(log: &str, life: &str, of: &[(Arc<str>, Arc<str>)]) -> Cmd {
    let mut cmd = call("tidegate_release_1", log, life);
    for (user, session) in of {
        cmd.arg(&**user).arg(&**session);
    }
    cmd
}
