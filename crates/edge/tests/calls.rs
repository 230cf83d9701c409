//! The listener of the back ends when it stops: over real sockets, with an API of the test's own.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::routing::get;
use testkit::http::Wire;
use tidegate_edge::accept;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Notify, Semaphore};
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

/// The longest that a busy machine may take for what is to be done at once.
const SOON: Duration = Duration::from_secs(30);

/// An API whose one call ends when the test says so.
struct Api {
    at: SocketAddr,
    began: Arc<Notify>,
    may_end: Arc<Semaphore>,
    calls: TaskTracker,
    stop: CancellationToken,
}

impl Api {
    async fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let at = listener.local_addr().unwrap();
        let (began, may_end) = (Arc::new(Notify::new()), Arc::new(Semaphore::new(0)));
        let (calls, stop) = (TaskTracker::new(), CancellationToken::new());
        let (entered, leave) = (began.clone(), may_end.clone());
        let call = async move || {
            entered.notify_one();
            leave.acquire().await.expect("never closed").forget();
            "done"
        };
        let router = Router::new().route("/call", get(call));
        calls.spawn(accept::serve_api(listener, router, calls.clone(), stop.clone()));
        Self { at, began, may_end, calls, stop }
    }

    /// A connection whose call is under way.
    async fn in_a_call(&self) -> Wire {
        let mut wire = Wire::new(TcpStream::connect(self.at).await.unwrap());
        self.call_on(&mut wire).await;
        wire
    }

    async fn call_on(&self, wire: &mut Wire) {
        wire.ask("GET", "/call", "api", &[], b"").await.unwrap();
        self.began.notified().await;
    }

    fn end_a_call(&self) {
        self.may_end.add_permits(1);
    }

    async fn ended(&self) {
        self.calls.close();
        timeout(SOON, self.calls.wait()).await.expect("it ends");
    }
}

#[tokio::test]
async fn a_call_that_is_under_way_at_the_stop_is_answered_and_then_all_is_over() {
    let api = Api::start().await;
    let mut idle = api.in_a_call().await;
    api.end_a_call();
    let head = idle.head().await.unwrap();
    assert_eq!((head.header("connection"), idle.body(&head).await.unwrap().as_slice()), (None, &b"done"[..]));
    let mut silent = Wire::new(TcpStream::connect(api.at).await.unwrap());
    let mut again = api.in_a_call().await;
    api.stop.cancel();
    // It has nothing under way, so nothing is waited for.
    assert!(idle.head().await.is_err());
    api.end_a_call();
    let head = again.head().await.unwrap();
    assert_eq!(head.header("connection"), Some("close"), "who goes on is told to go elsewhere");
    assert_eq!(again.body(&head).await.unwrap(), b"done");
    api.ended().await;
    assert!(silent.head().await.is_err());
    assert!(TcpStream::connect(api.at).await.is_err(), "nobody listens any more");
}

#[tokio::test]
async fn a_call_that_does_not_end_keeps_nobody() {
    let api = Api::start().await;
    let mut wire = api.in_a_call().await;
    api.stop.cancel();
    api.ended().await;
    assert!(wire.head().await.is_err(), "ended without an answer");
}
