//! A client that goes at any moment of its admission: whatever was taken for it is given back, and
//! what was opened is closed, once.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use futures_util::FutureExt;
use futures_util::future::BoxFuture;
use hub::auth::Identity;
use hub::close::CloseReason;
use hub::plugin::{Admission, Ask, Plugin, Plugins};
use hub::refusal::Refusal;
use hub::session::SessionInfo;
use tokio::task::yield_now;
use tokio::time::sleep;

use crate::node::{Node, ROOMY, Settings, user};
use testkit::http::Wire;

/// Decides in so many steps, so that there are as many moments at which a client may go meanwhile.
const STEPS: usize = 20;

/// What a plugin saw.
#[derive(Default)]
struct Books {
    asked: AtomicUsize,
    decided: AtomicUsize,
    opened: AtomicUsize,
    closed: AtomicUsize,
}

struct Slow(Arc<Books>);

impl Plugin for Slow {
    fn name(&self) -> &'static str {
        "slow"
    }

    fn admit<'a>(&'a self, _who: &'a Identity, _ask: &'a Ask) -> BoxFuture<'a, Result<Admission, Refusal>> {
        self.0.asked.fetch_add(1, Ordering::Relaxed);
        async {
            for _ in 0..STEPS {
                yield_now().await;
            }
            self.0.decided.fetch_add(1, Ordering::Relaxed);
            Ok(Admission::Standard)
        }
        .boxed()
    }

    fn opened(&self, _session: &SessionInfo) {
        self.0.opened.fetch_add(1, Ordering::Relaxed);
    }

    fn closed(&self, _session: &SessionInfo, _reason: CloseReason) {
        self.0.closed.fetch_add(1, Ordering::Relaxed);
    }
}

fn head(node: &Node, path: &str) -> String {
    let upgrade = "Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n\
                   Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n";
    let upgrade = if path == "/v1/ws" { upgrade } else { "" };
    format!("GET {path} HTTP/1.1\r\nHost: n1\r\n{upgrade}Authorization: {}\r\n\r\n", node.bearer(&user("u")))
}

#[tokio::test(start_paused = true)]
async fn whoever_goes_at_any_moment_of_its_admission_leaves_every_place_free() {
    const CAPACITY: usize = 3;
    // Beyond the last of them the client is in, and goes as a session.
    const MOMENTS: usize = 4 * STEPS;
    let books = Arc::new(Books::default());
    let mut settings = Settings::new();
    settings.hub.capacity = CAPACITY;
    settings.plugins = Plugins::new().with(Slow(books.clone()));
    let node = Node::start(settings);
    let seen = |count: &AtomicUsize| count.load(Ordering::Relaxed);
    for path in ["/v1/ws", "/v1/sse"] {
        for moment in 0..MOMENTS {
            // Never more than one at a time: a place that is lost is missed by the third at the latest.
            let mut wire = Wire::new(node.dial(ROOMY));
            wire.send(head(&node, path).as_bytes()).await.unwrap();
            for _ in 0..moment {
                yield_now().await;
            }
            drop(wire);
            // So seldom that nobody waits for company before the list is asked.
            sleep(Duration::from_secs(1)).await;
            assert_eq!((node.n_sessions(), node.gate.capacity.n_taken()), (0, 0), "{path}, moment {moment}");
            assert_eq!(seen(&books.opened), seen(&books.closed), "{path}, moment {moment}");
        }
    }
    // All kinds of moments were among them: before it was asked, while it was, and after.
    let (asked, decided, opened) = (seen(&books.asked), seen(&books.decided), seen(&books.opened));
    println!("{} came, {asked} were asked about, {decided} decided on, {opened} let in", 2 * MOMENTS);
    assert!(asked < 2 * MOMENTS && decided + STEPS < asked && opened > STEPS, "{asked}, {decided}, {opened}");
    assert_eq!(node.n_closed("lost") + node.n_closed("client"), opened as f64);
    // And exactly as many fit as ever.
    let mut held = Vec::new();
    for _ in 0..CAPACITY {
        held.push(node.ws("u").await);
    }
    let auth = node.bearer(&user("one too many"));
    let refused = testkit::ws::WsClient::over(node.dial(ROOMY), "n1", "/v1/ws", &[("Authorization", &*auth)]).await;
    assert_eq!(refused.err().expect("it is full").json()["code"], "at_capacity");
    drop(held);
    node.until_open(0).await;
}
