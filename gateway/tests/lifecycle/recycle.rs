//! Sessions whose age is over, with ages of seconds: many that came at once, and one that is busy.

use std::collections::BTreeMap;
use std::time::Duration;

use serde_json::json;
use testkit::gateway::GatewayProcess;
use testkit::lag::Lag;
use tokio::task::JoinSet;
use tokio::time::Instant;

use crate::{claims, closed, options, sse, sse_end, ws, ws_end};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_crowd_that_came_at_once_is_moved_over_all_of_its_ages() {
    const N: usize = 600;
    let gateway =
        GatewayProcess::start(options().env("GATEWAY_MAX_AGE_MIN", "4s").env("GATEWAY_MAX_AGE_MAX", "12s")).await;
    let (lag, mut ages) = (Lag::watch(), JoinSet::new());
    for i in 0..N {
        let claims = claims(&format!("u{i}"));
        let opened = Instant::now();
        if i % 2 == 0 {
            let client = ws(&gateway, &claims).await;
            ages.spawn(async move { (opened, ws_end(client).await) });
        } else {
            let client = sse(&gateway, &claims).await;
            ages.spawn(async move { (opened, sse_end(client).await) });
        }
    }
    let mut seconds = BTreeMap::<u64, usize>::new();
    for (opened, end) in ages.join_all().await {
        assert_eq!(end.words(), ("recycle", 1012, "after"));
        assert!(end.bye["after_ms"].as_u64().unwrap() <= 5_000, "{}", end.bye);
        *seconds.entry((end.at - opened).as_secs()).or_default() += 1;
    }
    // A tenth of the minimum to the maximum; an even share is by the mean age. Whoever had no turn for a
    // second has two seconds' ends at once.
    let late = lag.longest().as_secs_f64();
    assert!(seconds.keys().all(|second| (*second as f64) < 14.0 + late), "late by {late}: {seconds:?}");
    assert!((0..11).all(|second| seconds.contains_key(&second)), "{seconds:?}");
    let most = (2.0 + late) * N as f64 / 8.0;
    assert!(seconds.values().all(|n| (*n as f64) < most), "late by {late}: {seconds:?}");
    gateway.until_metric(&closed("recycle"), N as f64).await;
}

#[tokio::test]
async fn a_busy_session_is_left_alone_until_it_is_not() {
    let gateway =
        GatewayProcess::start(options().env("GATEWAY_MAX_AGE_MIN", "1s").env("GATEWAY_MAX_AGE_MAX", "1500ms")).await;
    let opened = Instant::now();
    let mut busy = ws(&gateway, &claims("busy")).await;
    busy.send_json(&json!({"type": "busy", "for_ms": 8_000})).await;
    let end = ws_end(ws(&gateway, &claims("not busy")).await).await;
    assert!(end.at - opened < Duration::from_secs(8), "as if it were busy: {:?}", end.at - opened);
    let end = ws_end(busy).await;
    assert_eq!(end.words(), ("recycle", 1012, "after"));
    let age = end.at - opened;
    assert!(age >= Duration::from_secs(8) && age < Duration::from_secs(16), "{age:?}");
}
