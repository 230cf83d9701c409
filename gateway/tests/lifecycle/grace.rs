//! What the orchestrator's own patience does to a drain: told of it, the node ends before it is
//! killed, whatever its deadline and its window ask for.

use std::time::Duration;

use testkit::gateway::{GatewayProcess, Signal};
use tokio::time::Instant;

use crate::{SOON, claims, n_open, options, ws, ws_end, ws_unread};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_node_that_is_killed_before_its_deadline_cuts_who_never_answers_and_ends_in_time() {
    const N_DEAF: usize = 15;
    const N: usize = 15;
    // Of twelve seconds five are the exit's. By its window alone it would go on for a minute.
    let grace = Duration::from_secs(12);
    let impatient = options()
        .env("GATEWAY_TERMINATION_GRACE", "12s")
        .env("GATEWAY_DRAIN_GRACE", "500ms")
        .env("GATEWAY_DRAIN_WINDOW", "60s")
        .env("GATEWAY_CLOSE_TIMEOUT", "5s");
    let mut gateway = GatewayProcess::start(impatient).await;
    let (mut ends, mut deaf) = (tokio::task::JoinSet::new(), Vec::new());
    for i in 0..N {
        ends.spawn(ws_end(ws(&gateway, &claims(&format!("u{i}"))).await));
    }
    for i in 0..N_DEAF {
        deaf.push(ws_unread(gateway.public(), &claims(&format!("deaf{i}"))).await);
    }
    assert_eq!(n_open(&gateway).await, (N + N_DEAF) as f64);

    let signalled = Instant::now();
    gateway.signal(Signal::Term);
    for end in ends.join_all().await {
        assert_eq!(end.words(), ("drain", 1001, "after"));
    }
    assert!(gateway.wait(grace).await.success(), "{}", gateway.stderr());
    let took = signalled.elapsed();
    assert!(took < grace, "{took:?}");

    let log = gateway.stderr();
    let warned: Vec<&str> = log.lines().filter(|line| line.contains("GATEWAY_TERMINATION_GRACE")).collect();
    assert_eq!(warned.len(), 1, "once: {log}");
    for fact in ["WARN", "killed after 12s", "deadline of 2m", "lowered to 7s and the window to 1500ms", "with 125s"] {
        assert!(warned[0].contains(fact), "{fact} in {}", warned[0]);
    }
    let drained = format!("drained sessions={} cut={N_DEAF}", N + N_DEAF);
    assert!(log.contains(&drained), "{drained} in:\n{log}");
    // What they were told was told nevertheless.
    for client in deaf {
        assert_eq!(ws_end(client).await.words(), ("drain", 1001, "after"));
    }
}

#[tokio::test]
async fn patience_that_is_too_short_for_any_goodbye_is_refused_at_the_start() {
    // 5 s of grace, 3 s for the answers to the last closes, 5 s for the exit.
    let with = |grace: &str| options().env("GATEWAY_TERMINATION_GRACE", grace);
    let refused = with("13s").run(SOON).await;
    assert_eq!(refused.status.code(), Some(64), "{}", refused.stderr);
    for word in ["GATEWAY_TERMINATION_GRACE", "GATEWAY_DRAIN_GRACE", "GATEWAY_CLOSE_TIMEOUT", "longer than 13s"] {
        assert!(refused.stderr.contains(word), "{word} in {}", refused.stderr);
    }
    for (grace, warns) in [("13001ms", true), ("124999ms", true), ("125s", false)] {
        let checked = with(grace).args(&["config", "--check"]).run(SOON).await;
        assert_eq!(checked.status.code(), Some(0), "{}", checked.stderr);
        assert_eq!(checked.stderr.contains("warning: GATEWAY_TERMINATION_GRACE"), warns, "{grace}: {}", checked.stderr);
    }
}

/// The first number behind this word, comments left out.
fn number_behind(word: &str, file: &str) -> u64 {
    let lines: Vec<&str> = file.lines().filter(|line| !line.trim_start().starts_with('#')).collect();
    let text = lines.join("\n");
    let (_, behind) = text.split_once(word).unwrap_or_else(|| panic!("no {word}"));
    let is_other = |c: char| !c.is_ascii_digit();
    let digits = behind.trim_start_matches(is_other).split(is_other).next().expect("a split has a first part");
    digits.parse().unwrap_or_else(|_| panic!("no number behind {word}"))
}

#[tokio::test]
async fn our_files_for_orchestrators_tell_the_gateway_their_own_patience_and_it_suffices() {
    for (word, file) in [
        ("terminationGracePeriodSeconds", include_str!("../../../deploy/kubernetes.yaml")),
        ("TimeoutStopSec", include_str!("../../../deploy/tidegate.service")),
        ("stop_grace_period", include_str!("../../../deploy/docker-compose.yml")),
    ] {
        let told = number_behind("GATEWAY_TERMINATION_GRACE", file);
        assert_eq!(told, number_behind(word, file), "{word}");
        let checked =
            options().env("GATEWAY_TERMINATION_GRACE", format!("{told}s")).args(&["config", "--check"]).run(SOON).await;
        assert!(checked.status.success() && !checked.stderr.contains("warning"), "{word}: {}", checked.stderr);
    }
}
