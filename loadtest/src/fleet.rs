//! Processes of a benchmark's own: a Redis, gateways, gone with their values. Decides where they
//! listen (free loopback ports) and where their files lie; what they are told is the measurement's.

use std::fs;
use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use clap::Args;
use serde_json::Value;
use tokio::time::Instant;

use crate::redis::Connection;
use crate::{probe, token};

/// How long a start may take.
pub const START_TIMEOUT: Duration = Duration::from_secs(30);
/// Between two looks at a process.
pub const LOOK: Duration = Duration::from_millis(10);
/// Another program may take the port between our look and the server's bind.
const MAX_PORTS: usize = 20;
/// So much of a log is shown where a start failed.
const MAX_LOG_LINES: usize = 12;

/// What every benchmark that starts gateways takes.
#[derive(Args, Clone)]
pub struct Programs {
    /// The gateway's binary
    #[arg(long, default_value = "target/release/tidegate")]
    gateway_bin: PathBuf,
    /// The Redis server's
    #[arg(long, default_value = "redis-server")]
    redis_bin: PathBuf,
    /// A further setting of every gateway, as NAME=VALUE; may be repeated
    #[arg(long = "env", value_name = "NAME=VALUE", value_parser = setting)]
    settings: Vec<(String, String)>,
}

fn setting(text: &str) -> Result<(String, String), String> {
    let (name, value) = text.split_once('=').ok_or("expected NAME=VALUE")?;
    Ok((name.to_owned(), value.to_owned()))
}

impl Programs {
    /// Starts a Redis that keeps nothing.
    pub async fn redis(&self) -> Result<Redis, String> {
        let mut why = String::new();
        for _ in 0..MAX_PORTS {
            let (dir, port) = (TempDir::new("redis")?, free_port()?);
            let process = Redis::spawn(&self.redis_bin, port, dir.path(), &[])?;
            let mut redis = Redis { program: self.redis_bin.clone(), process, port, dir };
            match redis.until_answering("PONG").await {
                Ok(()) => return Ok(redis),
                Err(said) => why = said,
            }
        }
        Err(why)
    }

    /// Starts a gateway on free ports; `settings` win over the defaults, those of the command line over all.
    pub async fn gateway(&self, settings: &[(&str, String)]) -> Result<Gateway, String> {
        let dir = TempDir::new("gateway")?;
        let file = dir.path().join("addresses.json");
        let log = fs::File::create(dir.path().join("log")).map_err(|error| error.to_string())?;
        let program = fs::canonicalize(&self.gateway_bin)
            .map_err(|error| format!("{}: {error} (--gateway-bin)", self.gateway_bin.display()))?;
        let mut command = Command::new(&program);
        command.arg("serve").current_dir(dir.path()).env_clear();
        for name in ["GATEWAY_LISTEN", "GATEWAY_ADMIN_LISTEN", "GATEWAY_PROBE_LISTEN"] {
            command.env(name, "127.0.0.1:0");
        }
        command.env("GATEWAY_JWT_SECRET", token::SECRET).env("GATEWAY_LOG_FORMAT", "text");
        command.env("GATEWAY_ADDR_FILE", &file);
        command.envs(settings.iter().map(|(name, value)| (*name, value)));
        command.envs(self.settings.iter().map(|(name, value)| (name, value)));
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(log);
        let child = command.spawn().map_err(|error| format!("{}: {error}", program.display()))?;
        let mut process = Process(child);
        let addresses = addresses(&mut process, &file, dir.path()).await?;
        let address = |key: &str| -> Result<SocketAddr, String> {
            addresses[key].as_str().and_then(|text| text.parse().ok()).ok_or_else(|| format!("no {key} in {addresses}"))
        };
        let (public, admin, probes) = (address("public")?, address("admin")?, address("probes")?);
        let gateway = Gateway { process, public, admin, probes, dir };
        gateway.until_ready().await?;
        Ok(gateway)
    }
}

async fn addresses(process: &mut Process, file: &Path, dir: &Path) -> Result<Value, String> {
    let until = Instant::now() + START_TIMEOUT;
    loop {
        // Whole or not there: a half-written file is no JSON yet.
        let read = fs::read(file).ok();
        if let Some(addresses) = read.and_then(|bytes| serde_json::from_slice(&bytes).ok()) {
            return Ok(addresses);
        }
        if process.has_ended() || Instant::now() >= until {
            return Err(format!("the gateway does not serve:\n{}", log_tail(&dir.join("log"))));
        }
        tokio::time::sleep(LOOK).await;
    }
}

/// A gateway that serves; killed on drop.
pub struct Gateway {
    process: Process,
    pub public: SocketAddr,
    pub admin: SocketAddr,
    pub probes: SocketAddr,
    dir: TempDir,
}

impl Gateway {
    pub fn pid(&self) -> u32 {
        self.process.0.id()
    }

    /// SIGKILL: no goodbye to anybody.
    pub fn kill9(&mut self) {
        self.process.end();
    }

    /// SIGTERM: it drains.
    pub fn terminate(&self) -> Result<(), String> {
        signal(self.pid(), "TERM")
    }

    /// Waits until it has ended by itself.
    ///
    /// # Errors
    /// It has not within this time.
    pub async fn until_exit(&mut self, within: Duration) -> Result<ExitStatus, String> {
        let until = Instant::now() + within;
        loop {
            match self.process.0.try_wait() {
                Ok(Some(status)) => return Ok(status),
                Ok(None) if Instant::now() < until => tokio::time::sleep(LOOK).await,
                Ok(None) => return Err(format!("the gateway has not ended within {} s", within.as_secs())),
                Err(error) => return Err(error.to_string()),
            }
        }
    }

    /// The end of its log, for whoever wonders.
    pub fn log(&self) -> String {
        log_tail(&self.dir.path().join("log"))
    }

    /// All of it.
    pub fn whole_log(&self) -> String {
        fs::read_to_string(self.dir.path().join("log")).unwrap_or_default()
    }

    async fn until_ready(&self) -> Result<(), String> {
        let until = Instant::now() + START_TIMEOUT;
        loop {
            let answer = probe::get(self.probes, "/readyz").await;
            match answer {
                Ok((200, _)) => return Ok(()),
                _ if Instant::now() < until => tokio::time::sleep(LOOK).await,
                _ => return Err(format!("the gateway is not ready: {answer:?}\n{}", self.log())),
            }
        }
    }
}

/// A running `redis-server`; killed and its directory removed on drop.
pub struct Redis {
    program: PathBuf,
    process: Process,
    pub port: u16,
    dir: TempDir,
}

impl Redis {
    pub fn pid(&self) -> u32 {
        self.process.0.id()
    }

    pub fn url(&self) -> String {
        Redis::url_at(self.port)
    }

    /// As `url`, by way of a proxy.
    pub fn url_at(port: u16) -> String {
        format!("redis://127.0.0.1:{port}/")
    }

    pub async fn connect(&self) -> Result<Connection, String> {
        Connection::open(self.port).await
    }

    /// Kills it and starts it anew on the same port and files, with these arguments; returns when it
    /// answers a PING with something that holds `answer`.
    pub async fn restart(&mut self, arguments: &[&str], answer: &str) -> Result<(), String> {
        self.process.end();
        self.process = Redis::spawn(&self.program, self.port, self.dir.path(), arguments)?;
        self.until_answering(answer).await
    }

    /// Stands still (SIGSTOP): connections stay open and silent.
    pub fn stop(&self) -> Result<(), String> {
        signal(self.pid(), "STOP")
    }

    /// Goes on (SIGCONT).
    pub fn go_on(&self) -> Result<(), String> {
        signal(self.pid(), "CONT")
    }

    fn spawn(program: &Path, port: u16, dir: &Path, arguments: &[&str]) -> Result<Process, String> {
        let mut command = Command::new(program);
        command.args(["--port", &port.to_string(), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]);
        command.arg("--dir").arg(dir).args(["--logfile", "redis.log"]).args(arguments);
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        command.spawn().map(Process).map_err(|error| format!("{}: {error}", program.display()))
    }

    async fn until_answering(&mut self, wanted: &str) -> Result<(), String> {
        let until = Instant::now() + START_TIMEOUT;
        loop {
            let asked = async { Connection::open(self.port).await?.run(&["PING"]).await };
            let said = match asked.await {
                Ok(reply) => reply.text().to_owned(),
                Err(why) => why,
            };
            if said.contains(wanted) {
                return Ok(());
            }
            if self.process.has_ended() || Instant::now() >= until {
                return Err(format!("redis-server: {said}"));
            }
            tokio::time::sleep(LOOK).await;
        }
    }
}

pub struct Process(pub Child);

impl Process {
    pub fn has_ended(&mut self) -> bool {
        matches!(self.0.try_wait(), Ok(Some(_)))
    }

    /// SIGTERM, then its end is waited for: for a process with children of its own, which SIGKILL
    /// would orphan.
    pub fn end_politely(&mut self) {
        if !self.has_ended() && signal(self.0.id(), "TERM").is_ok() {
            let _ = self.0.wait();
        }
    }

    fn end(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.end();
    }
}

fn signal(pid: u32, name: &str) -> Result<(), String> {
    let status = Command::new("kill").args([&format!("-{name}"), &pid.to_string()]).status();
    match status {
        Ok(status) if status.success() => Ok(()),
        other => Err(format!("kill -{name} {pid}: {other:?}")),
    }
}

/// A port of the loopback address that was free a moment ago.
pub fn free_port() -> Result<u16, String> {
    let bound = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).and_then(|socket| socket.local_addr());
    bound.map(|address| address.port()).map_err(|error| error.to_string())
}

/// A port of the loopback address below those that the system gives to outgoing connections: nobody
/// who connects can take it before somebody listens there.
pub fn port_for_later() -> Result<u16, String> {
    static N: AtomicU32 = AtomicU32::new(0);
    const PORTS: std::ops::Range<u32> = 10_240..32_768;
    // Another start for each process, so that two do not try the same ones.
    let from = std::process::id().wrapping_mul(97) % PORTS.len() as u32;
    for _ in PORTS {
        let at = (from + N.fetch_add(1, Ordering::Relaxed)) % PORTS.len() as u32;
        let port = u16::try_from(PORTS.start + at).expect("the range is of ports");
        if TcpListener::bind((Ipv4Addr::LOCALHOST, port)).is_ok() {
            return Ok(port);
        }
    }
    Err("no port is free below those of outgoing connections".to_owned())
}

pub fn log_tail(path: &Path) -> String {
    let log = fs::read_to_string(path).unwrap_or_default();
    let lines: Vec<&str> = log.lines().collect();
    lines[lines.len().saturating_sub(MAX_LOG_LINES)..].join("\n")
}

/// Removed on drop.
pub struct TempDir(PathBuf);

impl TempDir {
    pub fn new(of: &str) -> Result<TempDir, String> {
        static N: AtomicU32 = AtomicU32::new(0);
        let n = N.fetch_add(1, Ordering::Relaxed);
        let path = std::env::temp_dir().join(format!("tidegate-loadtest-{of}-{}-{n}", std::process::id()));
        fs::create_dir(&path).map_err(|error| format!("{}: {error}", path.display()))?;
        Ok(TempDir(path))
    }

    pub fn path(&self) -> &Path {
        &self.0
    }
}

impl Drop for TempDir {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}
