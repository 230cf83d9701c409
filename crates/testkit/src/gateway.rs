//! The real binary as a process of a test's own: ports of the system's choice, an environment that
//! holds nothing but what the test gives, gone with the value.

use std::io::Read;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use hub::clock::Clock;
use serde_json::{Value, json};
use tokio::time::Instant;

use crate::http::{self, Response};
use crate::redis::signal;
use crate::temp::TempDir;

/// The key that a gateway of the kit verifies tokens with (HMAC), unless the test sets another.
pub const JWT_SECRET: &str = "a secret that only tests know, 32+ bytes";
/// How long a start may take, or a state that is waited for. Nothing is promised by it: only so that
/// nothing hangs.
const START_TIMEOUT: Duration = Duration::from_secs(60);
/// Between two looks at a process.
const LOOK: Duration = Duration::from_millis(5);

/// A token that a gateway of the kit accepts: these claims, and an hour to live unless they have an
/// `exp` of their own.
///
/// # Panics
/// Where the claims are no JSON object.
pub fn token(claims: &Value) -> String {
    let mut claims = claims.clone();
    let members = claims.as_object_mut().expect("claims are an object");
    members.entry("exp").or_insert_with(|| json!(Clock::system().unix().as_secs() + 3600));
    hub::auth::mint(JWT_SECRET.as_bytes(), &claims).expect("the kit's key is long enough")
}

/// A signal that a process can be sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Signal {
    /// Drain and exit.
    Term,
    /// As Ctrl-C.
    Int,
    /// The end, at once.
    Kill,
    /// Stand still.
    Stop,
    /// Go on.
    Cont,
}

/// How the binary is started.
#[derive(Clone, Debug)]
pub struct GatewayOptions {
    binary: PathBuf,
    args: Vec<String>,
    env: Vec<(String, String)>,
}

impl GatewayOptions {
    /// `tidegate serve` on free loopback ports, in memory, with `JWT_SECRET`. `binary` is
    /// `env!("CARGO_BIN_EXE_tidegate")`.
    pub fn new(binary: impl Into<PathBuf>) -> Self {
        let options = Self { binary: binary.into(), args: vec!["serve".to_owned()], env: Vec::new() };
        options
            .env("GATEWAY_LISTEN", "127.0.0.1:0")
            .env("GATEWAY_ADMIN_LISTEN", "127.0.0.1:0")
            .env("GATEWAY_PROBE_LISTEN", "127.0.0.1:0")
            .env("GATEWAY_JWT_SECRET", JWT_SECRET)
            .env("GATEWAY_LOG_FORMAT", "text")
    }

    /// Sets a variable.
    pub fn env(mut self, name: &str, value: impl Into<String>) -> Self {
        self.env.retain(|(set, _)| set != name);
        self.env.push((name.to_owned(), value.into()));
        self
    }

    /// Waits for Redis as long as a busy machine may need, where the defaults (250 ms a command, 1 s an
    /// admission or a subscription) are meant for production: for tests that are not about these limits.
    /// It also means that whoever asks right after an outage is answered once the connection that his
    /// question needs is back, whichever of them came first.
    pub fn patient(self) -> Self {
        self.env("GATEWAY_REDIS_TIMEOUT", "5s").env("GATEWAY_AUTH_TIMEOUT", "10s")
    }

    /// Leaves a variable unset.
    pub fn unset(mut self, name: &str) -> Self {
        self.env.retain(|(set, _)| set != name);
        self
    }

    /// Other arguments than `serve`.
    pub fn args(mut self, args: &[&str]) -> Self {
        self.args = args.iter().map(|&arg| arg.to_owned()).collect();
        self
    }

    /// In namespaces of its own, such as `unshare FLAGS` makes, once `before` (a line of shell) has
    /// succeeded there.
    ///
    /// # Panics
    /// Where the kernel permits them neither to this user nor to root of a user namespace: run such
    /// tests as root.
    pub fn unshared(mut self, flags: &[&str], before: &str) -> Self {
        let programs = ["/usr/bin/unshare", "/bin/unshare"];
        let unshare = programs.into_iter().find(|path| Path::new(path).exists()).expect("util-linux is installed");
        let line = |then: &str| format!("PATH=/usr/sbin:/usr/bin:/sbin:/bin; {before} && {then}");
        let with = |user: &[&str]| -> Vec<String> {
            [user, flags, &["/bin/sh", "-c"]].concat().into_iter().map(str::to_owned).collect()
        };
        let is_permitted = |start: &Vec<String>| {
            let mut tried = Command::new(unshare);
            tried.args(start).arg(line("true")).stderr(Stdio::null()).status().is_ok_and(|status| status.success())
        };
        let starts = [with(&[]), with(&["--user", "--map-root-user"])];
        let mut args = starts.into_iter().find(is_permitted).expect("the kernel permits namespaces; run this as root");
        // `sh` becomes the binary: it has the process id that was meant for it.
        args.extend([line("exec \"$0\" \"$@\""), self.binary.to_string_lossy().into_owned()]);
        args.append(&mut self.args);
        Self { binary: unshare.into(), args, ..self }
    }

    /// Runs a command that ends by itself (`config --check`, `token`, a start that must fail).
    ///
    /// # Panics
    /// Where it does not end within `timeout`; it is killed.
    pub async fn run(self, timeout: Duration) -> Ended {
        let dir = TempDir::new("run");
        let mut process = Process::spawn(&self, dir.path());
        match process.wait(timeout).await {
            Some(status) => Ended { status, stdout: process.out.whole(), stderr: process.err.whole() },
            None => panic!("{:?} did not end within {timeout:?}:\n{}", self.args, process.err.text()),
        }
    }
}

/// What a command left.
#[derive(Clone, Debug)]
pub struct Ended {
    /// Its exit status.
    pub status: ExitStatus,
    /// All that it printed.
    pub stdout: String,
    /// All that it complained about.
    pub stderr: String,
}

/// A gateway that serves; killed on drop.
pub struct GatewayProcess {
    process: Process,
    public: SocketAddr,
    admin: SocketAddr,
    probes: SocketAddr,
    _dir: TempDir,
}

impl GatewayProcess {
    /// Starts it and waits until `/readyz` is 200.
    ///
    /// # Panics
    /// Where it ends instead, or is not ready within a minute; with its log.
    pub async fn start(options: GatewayOptions) -> Self {
        let gateway = Self::start_unready(options).await;
        gateway.until_status("/readyz", 200).await;
        gateway
    }

    /// Starts it and waits only until its listeners are bound (its Redis may be away).
    ///
    /// # Panics
    /// As `start`.
    pub async fn start_unready(options: GatewayOptions) -> Self {
        let dir = TempDir::new("gateway");
        let file = dir.path().join("addresses.json");
        let options = options.env("GATEWAY_ADDR_FILE", file.to_string_lossy());
        let mut process = Process::spawn(&options, dir.path());
        let until = Instant::now() + START_TIMEOUT;
        let addresses = loop {
            // Whole or not there: a half-written file is no JSON yet.
            let read = std::fs::read(&file).ok();
            if let Some(addresses) = read.and_then(|bytes| serde_json::from_slice::<Value>(&bytes).ok()) {
                break addresses;
            }
            if let Some(status) = process.ended() {
                panic!("the gateway ended ({status}) instead of serving:\n{}", process.err.whole());
            }
            assert!(Instant::now() < until, "the gateway has no addresses:\n{}", process.err.text());
            tokio::time::sleep(LOOK).await;
        };
        let addr = |key: &str| -> SocketAddr {
            addresses[key].as_str().and_then(|text| text.parse().ok()).unwrap_or_else(|| panic!("{key} in {addresses}"))
        };
        Self { process, public: addr("public"), admin: addr("admin"), probes: addr("probes"), _dir: dir }
    }

    /// Where clients connect.
    pub fn public(&self) -> SocketAddr {
        self.public
    }

    /// The back ends' API.
    pub fn admin(&self) -> SocketAddr {
        self.admin
    }

    /// `/readyz`, `/metrics`, …
    pub fn probes(&self) -> SocketAddr {
        self.probes
    }

    /// Its process id.
    pub fn pid(&self) -> u32 {
        self.process.child.id()
    }

    /// Sends it a signal.
    ///
    /// # Panics
    /// Where the process is gone.
    pub fn signal(&self, which: Signal) {
        let name = match which {
            Signal::Term => "TERM",
            Signal::Int => "INT",
            Signal::Kill => "KILL",
            Signal::Stop => "STOP",
            Signal::Cont => "CONT",
        };
        signal(self.pid(), name);
    }

    /// Waits for its end.
    ///
    /// # Panics
    /// Where it does not end within `timeout`; with its log.
    pub async fn wait(&mut self, timeout: Duration) -> ExitStatus {
        match self.process.wait(timeout).await {
            Some(status) => status,
            None => panic!("the gateway did not end within {timeout:?}:\n{}", self.stderr()),
        }
    }

    /// Has it ended?
    pub fn ended(&mut self) -> Option<ExitStatus> {
        self.process.ended()
    }

    /// What it logged so far.
    pub fn stderr(&self) -> String {
        self.process.err.text()
    }

    /// Waits until a probe answers with this status.
    ///
    /// # Panics
    /// Where it does not within a minute; with the log.
    pub async fn until_status(&self, path: &str, status: u16) {
        let until = Instant::now() + START_TIMEOUT;
        loop {
            let answer = http::try_request(self.probes, "GET", path, &[], b"").await;
            if answer.as_ref().is_ok_and(|answer| answer.status() == status) {
                return;
            }
            assert!(Instant::now() < until, "{path} is not {status} but {answer:?}:\n{}", self.stderr());
            tokio::time::sleep(LOOK).await;
        }
    }

    /// One sample of `/metrics` by its whole name with labels, as it stands in the text.
    pub async fn metric(&self, name: &str) -> Option<f64> {
        let text = http::get(self.probes, "/metrics").await;
        let line =
            text.text().lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' ').map(str::to_owned))?;
        line.split(' ').next()?.parse().ok()
    }

    /// Waits until a sample of `/metrics` has this value.
    ///
    /// # Panics
    /// Where it does not within a minute; with the log.
    pub async fn until_metric(&self, name: &str, value: f64) {
        let until = Instant::now() + START_TIMEOUT;
        loop {
            let is = self.metric(name).await;
            if is == Some(value) {
                return;
            }
            assert!(Instant::now() < until, "{name} is {is:?}, not {value}:\n{}", self.stderr());
            tokio::time::sleep(LOOK).await;
        }
    }

    /// Publishes through the admin API and gives the event's id.
    ///
    /// # Panics
    /// Where the answer is not 200 with an id.
    pub async fn publish(&self, channel: &str, data: &Value) -> String {
        let answer = self.try_publish(&json!({"channel": channel, "data": data})).await;
        assert_eq!(answer.status(), 200, "{}", answer.text());
        answer.json()["id"].as_str().unwrap_or_else(|| panic!("an id in {}", answer.text())).to_owned()
    }

    /// As `publish`, for the time after an outage: asks again while Redis is away, since the connection
    /// that publishes comes back by itself, before or after the one that readiness looks at. The log has
    /// it once.
    ///
    /// # Panics
    /// Where the answer is neither 200 nor 503, or 503 for a minute.
    pub async fn publish_once_it_can(&self, channel: &str, data: &Value) -> String {
        static N: AtomicU64 = AtomicU64::new(0);
        let key = format!("once-{}", N.fetch_add(1, Ordering::Relaxed));
        let until = Instant::now() + START_TIMEOUT;
        loop {
            let answer = self.try_publish(&json!({"channel": channel, "data": data, "idempotency_key": key})).await;
            if answer.status() == 200 {
                return answer.json()["id"].as_str().unwrap_or_else(|| panic!("an id in {}", answer.text())).to_owned();
            }
            assert_eq!(answer.status(), 503, "{}", answer.text());
            assert!(Instant::now() < until, "{}\n{}", answer.text(), self.stderr());
            tokio::time::sleep(LOOK).await;
        }
    }

    /// `POST /v1/publish` with this body, whatever is answered.
    pub async fn try_publish(&self, body: &Value) -> Response {
        http::post_json(self.admin, "/v1/publish", body).await
    }
}

struct Process {
    child: Child,
    out: Captured,
    err: Captured,
}

impl Process {
    fn spawn(options: &GatewayOptions, dir: &Path) -> Self {
        let mut command = Command::new(&options.binary);
        command.args(&options.args).current_dir(dir).env_clear().envs(options.env.iter().cloned());
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().unwrap_or_else(|e| panic!("cannot run {}: {e}", options.binary.display()));
        let out = Captured::of(child.stdout.take().expect("it is piped"));
        let err = Captured::of(child.stderr.take().expect("it is piped"));
        Self { child, out, err }
    }

    fn ended(&mut self) -> Option<ExitStatus> {
        self.child.try_wait().expect("a child can be asked")
    }

    async fn wait(&mut self, timeout: Duration) -> Option<ExitStatus> {
        let until = Instant::now() + timeout;
        loop {
            if let Some(status) = self.ended() {
                return Some(status);
            }
            if Instant::now() >= until {
                return None;
            }
            tokio::time::sleep(LOOK).await;
        }
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        self.out.join();
        self.err.join();
    }
}

/// All that comes out of a pipe, read by a thread of its own so that the process never waits for us.
struct Captured {
    bytes: Arc<Mutex<Vec<u8>>>,
    reader: Option<std::thread::JoinHandle<()>>,
}

impl Captured {
    fn of(mut pipe: impl Read + Send + 'static) -> Self {
        let bytes = Arc::new(Mutex::new(Vec::new()));
        let into = bytes.clone();
        let reader = std::thread::spawn(move || {
            let mut piece = [0; 4096];
            while let Ok(n @ 1..) = pipe.read(&mut piece) {
                into.lock().expect("nothing panics while it is held").extend_from_slice(&piece[..n]);
            }
        });
        Self { bytes, reader: Some(reader) }
    }

    /// What came so far.
    fn text(&self) -> String {
        String::from_utf8_lossy(&self.bytes.lock().expect("nothing panics while it is held")).into_owned()
    }

    /// What came until the pipe's end; only for a process that has ended.
    fn whole(&mut self) -> String {
        self.join();
        self.text()
    }

    fn join(&mut self) {
        if let Some(reader) = self.reader.take() {
            let _ = reader.join();
        }
    }
}
