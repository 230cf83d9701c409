//! What the figures of a drain mean, and which bounds were kept.

use std::collections::BTreeMap;
use std::time::Duration;

use super::{Drained, Options};
use crate::report::{Bound, Report, Sheet};
use crate::timeline::{Timeline, bars};
use crate::wire::Transport;

/// So few sessions leave at once.
const FEW: usize = 10;
/// What "at once" may take: the gateway's timers have a resolution of 100 ms, and ten sessions
/// are a fifth of a second at the usual rate (s).
const PROMPT: f64 = 0.5;
/// Of the window, the closes may be off by so much.
const OFF: f64 = 0.05;
/// Of an even share, no second may have more.
const DENSEST: f64 = 1.25;
/// The close code of a drain, as nobody has set it.
const CLOSE_CODE: u16 = 1001;
/// The default of GATEWAY_CLOSE_TIMEOUT, and what the end of the process may take (s).
const CLOSE_TIMEOUT: f64 = 3.0;
const END: f64 = 2.0;

pub fn judge(options: &Options, drained: &Drained) -> Report {
    let mut sheet = Sheet::new("drain");
    let n = options.sessions + options.deaf;
    sheet.figure("sessions", "sessions", n, &format!("({})", options.transport.word()));
    sheet.figure("deaf", "of them deaf", options.deaf, "");
    sheet.figure("peers", "other gateways", options.peers, "");
    sheet.figure("asked", "GATEWAY_DRAIN_WINDOW", options.window.clone(), "");
    let window = window(options, &drained.log, n);
    sheet.figure("window_s", "window in force", window, "s");
    closes(options, drained, window, &mut sheet);
    goodbyes(drained, &mut sheet);
    end(options, drained, window, &mut sheet);
    sheet.finish()
}

/// The window as it was set; where the gateway chose it, as its log says.
fn window(options: &Options, log: &str, n: usize) -> Option<f64> {
    let set = options.window.strip_suffix('s').and_then(|seconds| seconds.parse().ok());
    set.filter(|_| n > FEW).or_else(|| logged(log, "closing sessions", "window_s"))
}

/// The value of a field in the last line of a log that says `message`.
fn logged(log: &str, message: &str, field: &str) -> Option<f64> {
    let line = log.lines().rev().find(|line| line.contains(message))?;
    let value = line.split(' ').find_map(|word| word.strip_prefix(field)?.strip_prefix('='))?;
    value.parse().ok()
}

/// When they came.
fn closes(options: &Options, drained: &Drained, window: Option<f64>, sheet: &mut Sheet) {
    let n = options.sessions + options.deaf;
    let opens = drained.signalled + Duration::from_secs_f64(options.grace);
    let timeline = Timeline::new();
    let mut n_early = 0;
    let mut after = Vec::new();
    for gone in &drained.gone {
        let at = gone.bye.unwrap_or(gone.at).min(gone.at);
        n_early += u32::from(at < opens);
        let since = at.saturating_duration_since(opens);
        timeline.record(since);
        after.push(since.as_secs_f64());
    }
    let first = after.iter().copied().reduce(f64::min);
    let last = after.iter().copied().reduce(f64::max);
    sheet.figure("first_s", "first close, after the grace", first, "s");
    sheet.figure("last_s", "last close, after the grace", last, "s");
    let seconds = timeline.seconds();
    sheet.line("closes a second after the grace:");
    bars(&seconds, &[]).into_iter().step_by(2).for_each(|line| sheet.line(line));
    sheet.data("closes_per_s", seconds);
    sheet.promise("closes before the grace was over", Some(f64::from(n_early)), Bound::AtMost(0.0), "");
    if n <= FEW {
        sheet.promise("all closes, where they are few", last, Bound::AtMost(PROMPT), "s");
        return;
    }
    let off = window.zip(last).map(|(window, last)| 100.0 * (last / window - 1.0).abs());
    sheet.promise("length of the closing off the window", off, Bound::AtMost(100.0 * OFF), "%");
    let most = timeline.windows(1, Duration::MAX).into_iter().max().map(f64::from);
    let even = window.map(|window| n as f64 / window);
    sheet.figure("even_per_s", "an even share of a second", even, "");
    // One session more or less is no crowd.
    let bound = even.map_or(0.0, |even| (DENSEST * even).max(2.0));
    sheet.promise("closes in any second", most, Bound::AtMost(bound), "");
}

/// Whether each client that behaves was told properly.
fn goodbyes(drained: &Drained, sheet: &mut Sheet) {
    let mut ways: BTreeMap<String, u32> = BTreeMap::new();
    for gone in &drained.gone {
        let transport = if gone.transport == Transport::Ws { "ws" } else { "sse" };
        let bye = if gone.is_drain { "bye, " } else { "" };
        *ways.entry(format!("{transport}: {bye}{}, {}", gone.how, gone.then)).or_default() += 1;
    }
    for (way, n) in &ways {
        sheet.line(format!("{n:>6} × {way}"));
    }
    sheet.data("ways", serde_json::json!(ways));
    let n_abnormal = drained.gone.iter().filter(|gone| !gone.is_proper(CLOSE_CODE)).count();
    sheet.promise("sessions without a proper end (1006)", Some(n_abnormal as f64), Bound::AtMost(0.0), "");
}

/// How the process ended, and what it says of those that were cut.
fn end(options: &Options, drained: &Drained, window: Option<f64>, sheet: &mut Sheet) {
    let took = drained.took.as_secs_f64();
    sheet.figure("took_s", "from the signal to the exit", took, "s");
    let n_cut = logged(&drained.log, "drained", "cut");
    sheet.figure("cut", "cut, as the log says", n_cut, "");
    sheet.figure("forced", "cut, as gateway_drain_forced_total said last", drained.n_forced, "");
    let code = drained.exit.code().map_or(f64::INFINITY, f64::from);
    sheet.promise("exit code", Some(code), Bound::AtMost(0.0), "");
    let wrong = |n: Option<f64>| n.map_or(f64::INFINITY, |n| (n - options.deaf as f64).abs());
    sheet.promise(
        "cut sessions that were not deaf, or deaf that were not cut",
        Some(wrong(n_cut)),
        Bound::AtMost(0.0),
        "",
    );
    if options.deaf > 0 {
        let warned = logged(&drained.log, "did not answer their close", "n_cut");
        sheet.promise("cut ones missing in the warning", Some(wrong(warned)), Bound::AtMost(0.0), "");
    }
    let waits = if options.deaf > 0 { CLOSE_TIMEOUT } else { 0.0 };
    let most = window.map_or(0.0, |window| options.grace + window * (1.0 + OFF) + waits + END);
    sheet.promise("from the signal to the exit", Some(took), Bound::AtMost(most.min(options.deadline + END)), "s");
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_are_read_from_the_last_line_that_has_them() {
        let log = "t INFO a: closing sessions n_sessions=5 window_s=0.1 takes_per_second=50.0\n\
                   t INFO a: closing sessions n_sessions=1000 window_s=20.0 takes_per_second=50.0\n\
                   t INFO b: drained sessions=1000 cut=3\n";
        assert_eq!(logged(log, "closing sessions", "window_s"), Some(20.0));
        assert_eq!(logged(log, "drained", "cut"), Some(3.0));
        assert_eq!(logged(log, "drained", "window_s"), None);
        assert_eq!(logged("", "drained", "cut"), None);
    }
}
