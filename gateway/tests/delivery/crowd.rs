//! Crowds on one channel: whichever thread writes to whom, the order is one; and what waits for all
//! of them is held once, and given back when they have read it.

use futures_util::future::join_all;
use serde_json::json;
use testkit::gateway::GatewayProcess;
use testkit::sse::{self, SseClient};
use testkit::ws::{Heard, WsClient};
use tokio::task::JoinSet;

use super::order::{first_by_sse, first_by_ws};
use super::{closed, hearing, narrow_sse, narrow_ws, options, publish_lines, resident, sse, until, until_open, ws};

/// More than one thread alone writes to.
const CROWD: usize = 300;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn hundreds_hear_every_number_of_their_channels_in_order_whoever_writes_to_them() {
    const N: usize = 400;
    const STALLED: usize = 10;
    const LARGE: usize = 100;
    let gateway =
        GatewayProcess::start(options().env("GATEWAY_WORKERS", "4").env("GATEWAY_OUTBOX_BYTES", "32MiB")).await;
    // Each channel is written to by all threads; what waits on one ends a run of the other.
    let channels = hearing(&["news", "more"]);
    let mut listeners = JoinSet::new();
    for _ in 0..CROWD / 2 {
        listeners.spawn(first_by_ws(ws(gateway.public(), &channels).await, N));
        listeners.spawn(first_by_sse(sse(gateway.public(), &channels).await, N));
    }
    // Some do not read for now. All that their kernels hold is something else: of the numbers, each is
    // offered by whichever thread it is and written by their own future.
    let (mut stalled, more_yet) = (Vec::new(), hearing(&["news", "more", "large"]));
    for _ in 0..STALLED {
        stalled.push(narrow_ws(gateway.public(), &more_yet).await);
    }
    for _ in 0..LARGE {
        gateway.publish("large", &json!("x".repeat(60_000))).await;
    }
    for from in (0..N).step_by(50) {
        let lines: Vec<String> = (from..from + 50).map(numbered).collect();
        publish_lines(gateway.admin(), &lines).await;
    }
    while let Some(heard) = listeners.join_next().await {
        heard.expect("all in order");
    }
    until("somebody is waited for", async || n_waiting(&gateway).await > 0.0).await;
    let late = stalled.into_iter().map(async |mut client| {
        for _ in 0..LARGE {
            assert_eq!(client.json().await["channel"], "large");
        }
        first_by_ws(client, N).await;
    });
    join_all(late).await;
    // Each once, by whomever it was written.
    let delivered = |wire: &str| format!("gateway_events_delivered_total{{transport=\"{wire}\"}}");
    gateway.until_metric(&delivered("ws"), (CROWD / 2 * N + STALLED * (N + LARGE)) as f64).await;
    gateway.until_metric(&delivered("sse"), (CROWD / 2 * N) as f64).await;
}

/// Bytes that wait for slow clients, as they were summed a few seconds ago.
async fn n_waiting(gateway: &GatewayProcess) -> f64 {
    gateway.metric("gateway_outbox_bytes").await.expect("it is there")
}

/// Of 10 bytes and 1.5 KB by turns, and now and then of 20 KB.
fn numbered(i: usize) -> String {
    let pad = match i {
        i if i % 20 == 7 => 20_000,
        i if i % 2 == 1 => 1_500,
        _ => 10,
    };
    let channel = if i.is_multiple_of(3) { "more" } else { "news" };
    format!(r#"{{"channel":"{channel}","data":{{"n":{i},"pad":"{}"}}}}"#, "x".repeat(pad))
}

/// Clients that do not read for now.
struct Stalled {
    ws: Vec<WsClient>,
    sse: Vec<SseClient>,
}

impl Stalled {
    async fn on(gateway: &GatewayProcess, n: usize) -> Self {
        let mut stalled = Self { ws: Vec::new(), sse: Vec::new() };
        for _ in 0..n / 2 {
            stalled.ws.push(narrow_ws(gateway.public(), &hearing(&["news"])).await);
            stalled.sse.push(narrow_sse(gateway.public(), &hearing(&["news"])).await);
        }
        stalled
    }

    /// Reads so many events by each, all at once.
    async fn read(&mut self, n: usize) {
        let by_ws = self.ws.iter_mut().map(async |client| {
            let mut n_read = 0;
            while n_read < n {
                match client.next().await {
                    Heard::Text(text) => n_read += usize::from(text.starts_with(r#"{"type":"event""#)),
                    Heard::Ping(_) => {}
                    other => panic!("{other:?}"),
                }
            }
        });
        let by_sse = self.sse.iter_mut().map(async |stream| {
            let mut n_read = 0;
            while n_read < n {
                match stream.next().await {
                    sse::Heard::Block(block) => n_read += usize::from(block.id.is_some() && block.event.is_none()),
                    other => panic!("{other:?}"),
                }
            }
        });
        tokio::join!(join_all(by_ws), join_all(by_sse));
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_waits_for_a_crowd_is_held_once_and_given_back_when_they_have_read_it() {
    const STALLED: usize = 80;
    // A kernel holds four MB of them for each; the rest waits here.
    const EVENTS: usize = 120;
    let patient = options()
        .env("GATEWAY_OUTBOX_BYTES", "16MiB")
        .env("GATEWAY_WRITE_TIMEOUT", "5m")
        .env("GATEWAY_HEARTBEAT", "5m")
        // What is kept for others is not what waits for these.
        .env("GATEWAY_HISTORY_SIZE", "1");
    let gateway = GatewayProcess::start(patient).await;
    let mut stalled = Stalled::on(&gateway, STALLED).await;
    let data = json!("x".repeat(60_000));
    let before = resident(&gateway);
    for _ in 0..EVENTS {
        gateway.publish("news", &data).await;
    }
    until("most of it waits", async || n_waiting(&gateway).await > (150 << 20) as f64).await;
    let (waiting, grown) = (n_waiting(&gateway).await, resident(&gateway).saturating_sub(before));
    println!("{waiting} bytes wait, memory grew by {grown}");
    // Seven MB for either wire; an entry of each queue is next to nothing.
    assert!(grown < 40 << 20, "{grown} bytes for {waiting} that wait");
    stalled.read(EVENTS).await;
    gateway.until_metric("gateway_outbox_bytes", 0.0).await;
    until("the room is given back", async || resident(&gateway).saturating_sub(before) < 12 << 20).await;
    assert_eq!(gateway.metric(&closed("slow")).await.unwrap_or(0.0), 0.0);
    until_open(&gateway, STALLED).await;
    gateway.publish("news", &json!("after")).await;
    stalled.read(1).await;
}
