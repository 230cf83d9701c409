//! `/livez`, `/readyz`, `/startupz`, `/metrics`, on a thread and a runtime of their own: a probe is
//! answered while the main runtime is blocked, and says so. Nothing here waits for the main
//! runtime or for Redis; what it tells are atomics of `Vitals`. Who judges them is `vitals`; whether
//! a single worker stands still is looked at from here, by `workers`.

use std::convert::Infallible;
use std::fmt::Write as _;
use std::io;
use std::net::{SocketAddr, TcpListener};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use bytes::Bytes;
use http::header::{ALLOW, CACHE_CONTROL, CONTENT_TYPE};
use http::{HeaderValue, Method, Request, Response, StatusCode};
use http_body_util::Full;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::net::TcpStream;
use tokio::sync::Semaphore;
use tokio::time::{sleep, timeout};
use tokio_util::sync::CancellationToken;

mod readiness;
mod vitals;
mod workers;

pub use readiness::{Readiness, Reason};
pub use vitals::{Link, ProbeConfig, TICK, Vitals, WINDOW};

/// Connections answered at once; more wait in the kernel's queue. A prober, a scraper, a person:
/// this leaves room for those that hang.
const MAX_CONNECTIONS: usize = 32;

/// From accept to the head read: a prober sends it at once.
const HEAD_TIMEOUT: Duration = Duration::from_secs(2);

/// From accept to the last byte: 32 connections that hang block the port no longer than this.
const CONNECTION_TIMEOUT: Duration = Duration::from_secs(5);

/// After an accept that failed (no descriptor left, say), so that it is not tried in a loop.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// The running probe thread. Dropping it ends the thread soon; `stop` waits for that.
pub struct Probes {
    stop: CancellationToken,
    thread: Option<JoinHandle<()>>,
}

impl Probes {
    /// Answers on `listener` from a thread named `probe` until stopped.
    ///
    /// # Errors
    /// The listener cannot be used without blocking, or no thread or runtime can be made: the
    /// process should not start.
    pub fn start(listener: TcpListener, vitals: Arc<Vitals>) -> io::Result<Self> {
        listener.set_nonblocking(true)?;
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let stop = CancellationToken::new();
        let until = stop.clone();
        let listener = {
            let _inside = runtime.enter();
            tokio::net::TcpListener::from_std(listener)?
        };
        let thread = std::thread::Builder::new().name("probe".into()).spawn(move || {
            let watch = vitals.watch_workers();
            let both = async { tokio::join!(accept(listener, Arc::clone(&vitals)), watch) };
            runtime.block_on(until.run_until_cancelled(both));
        })?;
        Ok(Self { stop, thread: Some(thread) })
    }

    /// Ends the thread, connections and all, and waits for it (milliseconds).
    pub fn stop(mut self) {
        self.stop.cancel();
        if let Some(thread) = self.thread.take() {
            // A panic there was printed by its own hook; there is nobody left to tell.
            let _ = thread.join();
        }
    }
}

impl Drop for Probes {
    fn drop(&mut self) {
        self.stop.cancel();
    }
}

async fn accept(listener: tokio::net::TcpListener, vitals: Arc<Vitals>) {
    let places = Arc::new(Semaphore::new(MAX_CONNECTIONS));
    let mut connections = tokio::task::JoinSet::new();
    loop {
        let place = Arc::clone(&places).acquire_owned().await.expect("nobody closes this semaphore");
        while connections.try_join_next().is_some() {}
        match listener.accept().await {
            Ok((stream, peer)) => {
                let vitals = Arc::clone(&vitals);
                connections.spawn(async move {
                    serve(stream, peer, vitals).await;
                    drop(place);
                });
            }
            Err(error) => {
                tracing::warn!(%error, "the probe port cannot accept");
                sleep(ACCEPT_PAUSE).await;
            }
        }
    }
}

async fn serve(stream: TcpStream, peer: SocketAddr, vitals: Arc<Vitals>) {
    let service = service_fn(move |request| {
        let response = answer(&request, &vitals);
        async move { Ok::<_, Infallible>(response) }
    });
    let connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(HEAD_TIMEOUT)
        // A place is for one question: idle scrapers would hold them all.
        .keep_alive(false)
        .max_buf_size(8 * 1024)
        .serve_connection(TokioIo::new(stream), service);
    match timeout(CONNECTION_TIMEOUT, connection).await {
        Ok(Ok(())) => {}
        Ok(Err(error)) => tracing::debug!(%peer, %error, "probe connection failed"),
        Err(_) => tracing::debug!(%peer, "probe connection timed out"),
    }
}

fn answer<B>(request: &Request<B>, vitals: &Vitals) -> Response<Full<Bytes>> {
    const TEXT: &str = "text/plain; charset=utf-8";
    let ok_if = |good: bool| if good { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE };
    let path = request.uri().path();
    if !["/livez", "/readyz", "/startupz", "/metrics"].contains(&path) {
        return response(StatusCode::NOT_FOUND, TEXT, "not found\n");
    }
    // The answer to HEAD is that to GET; hyper leaves the body out.
    if request.method() != Method::GET && request.method() != Method::HEAD {
        let mut refusal = response(StatusCode::METHOD_NOT_ALLOWED, TEXT, "GET or HEAD\n");
        refusal.headers_mut().insert(ALLOW, HeaderValue::from_static("GET, HEAD"));
        return refusal;
    }
    match path {
        "/livez" => response(ok_if(vitals.is_live()), TEXT, livez(vitals)),
        "/startupz" => {
            let started = vitals.is_started();
            response(ok_if(started), TEXT, if started { "started\n" } else { "starting\n" })
        }
        "/readyz" => {
            let readiness = vitals.readiness();
            let body = serde_json::to_string(&readiness).expect("plain fields always serialise");
            response(ok_if(readiness.ready), "application/json", body)
        }
        _ => response(StatusCode::OK, hub::telemetry::CONTENT_TYPE, metrics(vitals)),
    }
}

/// What the node counts, and what `/readyz` says at this moment: an alert looks back, which a probe cannot.
fn metrics(vitals: &Vitals) -> String {
    let (mut body, now) = (vitals.metrics().encode(), vitals.readiness());
    let of_reason =
        |reason: Reason| (format!("{{reason=\"{}\"}}", reason.word()), usize::from(now.reasons.contains(&reason)));
    let whole = |value: usize| vec![(String::new(), value)];
    for (name, help, series) in [
        ("gateway_ready", "1 while /readyz answers 200", whole(now.ready.into())),
        ("gateway_unready", "1 for each reason for which it does not", Reason::ALL.map(of_reason).to_vec()),
        ("gateway_sessions_capacity", "Sessions that this node takes at most", whole(now.capacity)),
    ] {
        let _ = writeln!(body, "# HELP {name} {help}\n# TYPE {name} gauge");
        for (labels, value) in series {
            let _ = writeln!(body, "{name}{labels} {value}");
        }
    }
    body
}

/// The age of the heartbeat, and a line for each worker that stands still, by runtime and index.
fn livez(vitals: &Vitals) -> String {
    let mut body = format!("tick_age_ms={}\n", vitals.tick_age().as_millis());
    for still in vitals.still_workers() {
        let (pool, worker, ms) = (still.pool.word(), still.worker, still.time.as_millis());
        writeln!(body, "{pool}_worker_{worker}_still_ms={ms}").expect("a string takes what it is given");
    }
    body
}

fn response(status: StatusCode, content_type: &'static str, body: impl Into<Bytes>) -> Response<Full<Bytes>> {
    let mut response = Response::new(Full::new(body.into()));
    *response.status_mut() = status;
    let headers = response.headers_mut();
    headers.insert(CONTENT_TYPE, HeaderValue::from_static(content_type));
    headers.insert(CACHE_CONTROL, HeaderValue::from_static("no-store"));
    response
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::sync::mpsc;

    use hub::hub::Phase;
    use hub::telemetry::Metrics;
    use tokio::time::Instant;

    use super::*;

    const CONFIG: ProbeConfig = ProbeConfig {
        live_stale: Duration::from_millis(400),
        ready_headroom: 0.95,
        ready_lag: Duration::from_millis(250),
        ready_redis: Some(Duration::from_secs(10)),
    };

    /// Longest wait for what must come; never waited for in full when all is well.
    const PATIENCE: Duration = Duration::from_secs(20);

    struct Node {
        vitals: Arc<Vitals>,
        address: SocketAddr,
        _probes: Probes,
    }

    fn node(config: ProbeConfig) -> Node {
        let vitals = Vitals::new(config, 100, Metrics::new("1.2.3"), || Link::Up);
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let probes = Probes::start(listener, Arc::clone(&vitals)).unwrap();
        Node { vitals, address, _probes: probes }
    }

    impl Node {
        /// The whole answer to these bytes.
        fn raw(&self, request: &str) -> String {
            let mut stream = std::net::TcpStream::connect(self.address).unwrap();
            stream.set_read_timeout(Some(PATIENCE)).unwrap();
            stream.write_all(request.as_bytes()).unwrap();
            let mut answer = String::new();
            stream.read_to_string(&mut answer).unwrap();
            answer
        }

        /// Status and body.
        fn get(&self, path: &str) -> (u16, String) {
            let answer = self.raw(&format!("GET {path} HTTP/1.1\r\nhost: x\r\n\r\n"));
            let (head, body) = answer.split_once("\r\n\r\n").unwrap();
            (head[9..12].parse().unwrap(), body.to_owned())
        }

        fn until(&self, path: &str, wanted: impl Fn(u16, &str) -> bool) -> (u16, String) {
            let deadline = Instant::now() + PATIENCE;
            loop {
                let (status, body) = self.get(path);
                if wanted(status, &body) {
                    return (status, body);
                }
                assert!(Instant::now() < deadline, "{path} stayed {status} {body}");
            }
        }
    }

    fn runtime(workers: usize) -> tokio::runtime::Runtime {
        tokio::runtime::Builder::new_multi_thread().worker_threads(workers).enable_all().build().unwrap()
    }

    /// Blocks one more worker, and returns when it is blocked; dropping what this gives releases it.
    fn block_one(runtime: &tokio::runtime::Runtime) -> mpsc::Sender<()> {
        let (release, released) = mpsc::channel();
        let (blocked, is_blocked) = mpsc::channel();
        runtime.spawn(async move {
            blocked.send(()).unwrap();
            let _ = released.recv();
        });
        is_blocked.recv_timeout(PATIENCE).unwrap();
        release
    }

    /// `tick_age_ms`, the first line of `/livez`.
    fn age(body: &str) -> u64 {
        body.lines().next().unwrap().strip_prefix("tick_age_ms=").unwrap().parse().unwrap()
    }

    /// Who stands still for how many ms by `/livez`, such as `main_worker_1`.
    fn still(body: &str) -> Vec<(String, u64)> {
        let line = |line: &str| {
            let (who, ms) = line.split_once("_still_ms=").unwrap();
            (who.to_owned(), ms.parse().unwrap())
        };
        body.lines().skip(1).map(line).collect()
    }

    #[test]
    fn a_blocked_main_runtime_is_seen_and_its_return_too() {
        let node = node(CONFIG);
        node.vitals.set_phase(Phase::Serving);
        let main = runtime(2);
        main.spawn(Arc::clone(&node.vitals).run_heartbeat());

        let releases = [block_one(&main), block_one(&main)];
        let first = age(&node.get("/livez").1);
        let (status, body) = node.until("/livez", |status, _| status != 200);
        assert_eq!(status, 503);
        assert!(age(&body) >= 400 && age(&body) > first, "{body}");
        assert_eq!(node.get("/metrics").0, 200);

        drop(releases);
        node.until("/livez", |status, body| status == 200 && age(body) < 400);
        main.shutdown_background();
    }

    #[test]
    fn one_blocked_worker_among_others_is_named_and_fails_liveness_while_the_heart_beats() {
        for pool in ["main", "door"] {
            let node = node(CONFIG);
            let (main, door) = (runtime(2), runtime(2));
            main.spawn(Arc::clone(&node.vitals).run_heartbeat());
            door.spawn(Arc::clone(&node.vitals).run_door_heartbeat());
            let stale = CONFIG.live_stale.as_millis() as u64;
            let is_well = |status: u16, body: &str| status == 200 && age(body) < stale && still(body).is_empty();
            node.until("/livez", is_well);

            let release = block_one(if pool == "main" { &main } else { &door });
            let beats = || node.vitals.tick_age().max(node.vitals.door_tick_age()) < CONFIG.live_stale;
            let is_wedged = |body: &str| matches!(still(body)[..], [(_, ms)] if ms >= stale * 2);
            let (status, body) = node.until("/livez", |_, body| beats() && is_wedged(body));
            assert_eq!(status, 503);
            let (who, _) = &still(&body)[0];
            assert!([0, 1].map(|k| format!("{pool}_worker_{k}")).contains(who), "{body}");

            drop(release);
            node.until("/livez", is_well);
            main.shutdown_background();
            door.shutdown_background();
        }
    }

    #[test]
    fn readiness_says_what_it_knows_and_reading_it_changes_nothing() {
        let node = node(CONFIG);
        let starting =
            r#"{"ready":false,"phase":"starting","reasons":["starting"],"sessions":0,"capacity":100,"lag_p99_ms":0}"#;
        for _ in 0..3 {
            assert_eq!(node.get("/readyz"), (503, starting.to_owned()));
        }
        assert_eq!(node.get("/startupz").0, 503);
        node.vitals.set_phase(Phase::Serving);
        let serving = r#"{"ready":true,"phase":"serving","reasons":[],"sessions":0,"capacity":100,"lag_p99_ms":0}"#;
        assert_eq!(node.get("/readyz"), (200, serving.to_owned()));
        assert_eq!(node.get("/readyz?verbose"), (200, serving.to_owned()));
        node.vitals.set_phase(Phase::Draining);
        let (status, body) = node.get("/readyz");
        assert!(status == 503 && body.contains(r#""reasons":["draining"]"#), "{body}");
        assert_eq!(node.get("/startupz").0, 200);
    }

    #[test]
    fn metrics_are_there_in_every_phase() {
        let node = node(CONFIG);
        for phase in Phase::ALL {
            node.vitals.set_phase(phase);
            let (status, body) = node.get("/metrics");
            assert_eq!(status, 200);
            assert!(body.contains(&format!("gateway_phase{{phase=\"{}\"}} 1\n", phase.word())), "{phase:?}");
        }
    }

    #[test]
    fn metrics_say_what_readyz_says_and_how_many_sessions_there_may_be() {
        let node = node(CONFIG);
        let says = |series: &str| node.get("/metrics").1.contains(&format!("\n{series}\n"));
        assert!(says("gateway_ready 0") && says("gateway_unready{reason=\"starting\"} 1"));
        node.vitals.set_phase(Phase::Serving);
        assert!(says("gateway_ready 1") && says("gateway_sessions_capacity 100"));
        for reason in Reason::ALL {
            assert!(says(&format!("gateway_unready{{reason=\"{}\"}} 0", reason.word())), "{reason:?}");
        }
        node.vitals.set_phase(Phase::Draining);
        assert!(says("gateway_ready 0") && says("gateway_unready{reason=\"draining\"} 1"));
    }

    #[test]
    fn head_is_answered_as_get_without_the_body() {
        let node = node(CONFIG);
        for path in ["/livez", "/readyz", "/startupz", "/metrics"] {
            let answer = node.raw(&format!("HEAD {path} HTTP/1.1\r\nhost: x\r\n\r\n"));
            assert!(answer.starts_with("HTTP/1.1 ") && answer.ends_with("\r\n\r\n"), "{answer}");
            assert!(answer.contains("content-length: ") && !answer.contains("content-length: 0"), "{answer}");
        }
    }

    #[test]
    fn anything_else_is_not_found_and_other_methods_are_told_which_to_use() {
        let node = node(CONFIG);
        for path in ["/", "/livez/", "//livez", "/%6civez", "/metricsx", "/v1/ws"] {
            assert_eq!(node.get(path).0, 404, "{path}");
        }
        let answer = node.raw("POST /livez HTTP/1.1\r\nhost: x\r\ncontent-length: 0\r\n\r\n");
        assert!(answer.starts_with("HTTP/1.1 405") && answer.contains("allow: GET, HEAD"), "{answer}");
    }

    #[test]
    fn connections_that_say_nothing_are_cut_and_do_not_shut_the_port() {
        let node = node(ProbeConfig { live_stale: PATIENCE * 10, ..CONFIG });
        let silent: Vec<_> =
            (0..MAX_CONNECTIONS + 1).map(|_| std::net::TcpStream::connect(node.address).unwrap()).collect();
        assert_eq!(node.get("/livez").0, 200);
        for mut stream in silent {
            stream.set_read_timeout(Some(PATIENCE)).unwrap();
            assert_eq!(stream.read(&mut [0; 64]).unwrap_or(0), 0);
        }
    }

    #[test]
    fn a_stopped_port_is_closed() {
        let node = node(CONFIG);
        let address = node.address;
        node._probes.stop();
        assert!(std::net::TcpStream::connect(address).is_err());
    }
}
