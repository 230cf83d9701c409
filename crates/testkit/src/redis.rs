//! A real `redis-server` of a test's own: on a free port, in a directory of its own, gone with the
//! value. Decides nothing about what is stored; it is there to be killed, paused, cut and failed over.
//!
//! Calls block the thread for milliseconds (they run programs); a test that needs its runtime
//! meanwhile has more than one thread.

use std::fs;
use std::io::{self, Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc;
use std::time::Duration;

use tokio::time::Instant;

use crate::temp::TempDir;

/// How long a server may take to answer its first PING, or to end.
const START_TIMEOUT: Duration = Duration::from_secs(20);
/// Between two looks at a starting server.
const LOOK: Duration = Duration::from_millis(5);
/// Another program may take the port between our look and the server's bind; then another is tried.
const MAX_PORTS: usize = 20;

/// What is remembered across a kill.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Persistence {
    /// Nothing: a restart comes back empty.
    #[default]
    None,
    /// Everything acknowledged (`appendonly yes`, `appendfsync always`).
    AofAlways,
}

/// How the server is started.
#[derive(Clone, Debug, Default)]
pub struct RedisOptions {
    /// What survives `kill9` and `restart`.
    pub persistence: Persistence,
    /// The password of the default user.
    pub requirepass: Option<String>,
    /// Further arguments, as on the command line: `["--maxmemory", "100mb"]`.
    pub extra: Vec<String>,
}

/// A running `redis-server`; killed and its directory removed on drop.
pub struct RedisServer {
    options: RedisOptions,
    port: u16,
    dir: TempDir,
    child: Child,
}

impl RedisServer {
    /// Starts a server on a free port of the loopback address and waits until it answers.
    ///
    /// # Panics
    /// Where no `redis-server` is installed, or it does not start.
    pub fn start(options: RedisOptions) -> Self {
        let dir = TempDir::new("redis");
        for _ in 0..MAX_PORTS {
            let port = free_port();
            if let Some(child) = spawn(&options, port, dir.path()) {
                return Self { options, port, dir, child };
            }
        }
        panic!("redis-server did not start on any of {MAX_PORTS} ports:\n{}", log_of(dir.path()))
    }

    /// As `plain`, and it speaks TLS with this certificate (a path, as its key's) on a further port.
    ///
    /// # Panics
    /// Also where it is built without TLS.
    pub fn with_tls(certificate: &str, key: &str) -> (Self, u16) {
        let extra = ["--tls-cert-file", certificate, "--tls-key-file", key, "--tls-ca-cert-file", certificate];
        let extra = extra.into_iter().chain(["--tls-auth-clients", "no"]).map(str::to_owned).collect();
        let server = Self::start(RedisOptions { extra, ..RedisOptions::default() });
        for _ in 0..MAX_PORTS {
            // Somebody else may take it before the server does; it says so then.
            let port = free_port();
            if server.cli(&["CONFIG", "SET", "tls-port", &port.to_string()]) == "OK" {
                return (server, port);
            }
        }
        panic!("no port for TLS: is this redis-server built with it?")
    }

    /// A server that keeps nothing, without a password.
    pub fn plain() -> Self {
        Self::start(RedisOptions::default())
    }

    /// `redis://…` of this server, with the password if it has one.
    pub fn url(&self) -> String {
        self.url_at(self.port)
    }

    /// As `url`, by way of a proxy at `port`.
    pub fn url_at(&self, port: u16) -> String {
        match &self.options.requirepass {
            Some(password) => format!("redis://:{}@127.0.0.1:{port}/", percent_encoded(password)),
            None => format!("redis://127.0.0.1:{port}/"),
        }
    }

    /// The port; the same after a restart.
    pub fn port(&self) -> u16 {
        self.port
    }

    /// Where it listens.
    pub fn addr(&self) -> SocketAddr {
        SocketAddr::from((Ipv4Addr::LOCALHOST, self.port))
    }

    /// Kills it without warning and waits for its end. `restart` brings it back.
    pub fn kill9(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }

    /// Kills it if it runs, and starts it again on the same port over the same directory.
    ///
    /// # Panics
    /// Where it does not come back (somebody took the port).
    pub fn restart(&mut self) {
        self.kill9();
        let until = Instant::now() + START_TIMEOUT;
        loop {
            if let Some(child) = spawn(&self.options, self.port, self.dir.path()) {
                self.child = child;
                return;
            }
            assert!(Instant::now() < until, "redis-server did not come back:\n{}", log_of(self.dir.path()));
        }
    }

    /// Stops its process where it stands (SIGSTOP): connections stay open and silent.
    pub fn pause(&self) {
        signal(self.child.id(), "STOP");
    }

    /// Lets it go on (SIGCONT).
    pub fn resume(&self) {
        signal(self.child.id(), "CONT");
    }

    /// Runs `redis-cli` with these arguments and gives what it prints, without the last line end.
    ///
    /// # Panics
    /// Where redis-cli is missing or fails.
    pub fn cli(&self, args: &[&str]) -> String {
        let mut command = Command::new("redis-cli");
        command.args(["-p", &self.port.to_string()]);
        if let Some(password) = &self.options.requirepass {
            command.args(["--no-auth-warning", "-a", password]);
        }
        let output = command.args(args).stdin(Stdio::null()).output().unwrap_or_else(|e| missing("redis-cli", &e));
        let printed = String::from_utf8_lossy(&output.stdout).trim_end().to_owned();
        assert!(output.status.success(), "redis-cli {args:?}: {printed}{}", String::from_utf8_lossy(&output.stderr));
        printed
    }

    /// Forgets every key; Functions and links stay.
    pub fn flushall(&self) {
        self.cli(&["FLUSHALL"]);
    }

    /// Closes every connection that subscribes, and only those; gives how many there were.
    pub fn kill_pubsub_links(&self) -> usize {
        self.cli(&["CLIENT", "KILL", "TYPE", "pubsub"]).parse().expect("CLIENT KILL gives a number")
    }

    /// Makes it a replica of `master` and waits until it is in step with it.
    ///
    /// # Panics
    /// Where it is not in step within 20 s.
    pub fn replica_of(&self, master: &RedisServer) {
        if let Some(password) = &master.options.requirepass {
            self.cli(&["CONFIG", "SET", "masterauth", password]);
        }
        self.cli(&["CONFIG", "SET", "repl-diskless-sync-delay", "0"]);
        master.cli(&["CONFIG", "SET", "repl-diskless-sync-delay", "0"]);
        self.cli(&["REPLICAOF", "127.0.0.1", &master.port.to_string()]);
        let until = Instant::now() + START_TIMEOUT;
        while !self.cli(&["INFO", "replication"]).contains("master_link_status:up") {
            assert!(Instant::now() < until, "the replica is not in step");
            pass(LOOK);
        }
    }

    /// Makes a replica a master of its own.
    pub fn promote(&self) {
        self.cli(&["REPLICAOF", "NO", "ONE"]);
    }

    /// Its directory (AOF files, log).
    pub fn dir(&self) -> &Path {
        self.dir.path()
    }
}

impl Drop for RedisServer {
    fn drop(&mut self) {
        self.kill9();
    }
}

/// `None`: it ended before it answered, most likely because the port was taken.
fn spawn(options: &RedisOptions, port: u16, dir: &Path) -> Option<Child> {
    let port_text = port.to_string();
    let mut command = Command::new("redis-server");
    command.args(["--port", &port_text, "--bind", "127.0.0.1", "--save", "", "--daemonize", "no"]);
    command.arg("--dir").arg(dir).args(["--logfile", "redis.log"]);
    match options.persistence {
        Persistence::None => command.args(["--appendonly", "no"]),
        Persistence::AofAlways => command.args(["--appendonly", "yes", "--appendfsync", "always"]),
    };
    if let Some(password) = &options.requirepass {
        command.args(["--requirepass", password]);
    }
    command.args(&options.extra).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    let mut child = command.spawn().unwrap_or_else(|e| missing("redis-server", &e));
    let until = Instant::now() + START_TIMEOUT;
    loop {
        if matches!(child.try_wait(), Ok(Some(_))) {
            return None;
        }
        // Whoever answers must be ours: a stranger on this port does not have our process id.
        if is_answering(port, options.requirepass.as_deref(), child.id()) {
            return Some(child);
        }
        if Instant::now() >= until {
            let _ = child.kill();
            let _ = child.wait();
            return None;
        }
        pass(LOOK);
    }
}

/// Does the server with this process id serve at the port, its data loaded?
fn is_answering(port: u16, password: Option<&str>, pid: u32) -> bool {
    let ask = || -> io::Result<String> {
        let mut socket = TcpStream::connect((Ipv4Addr::LOCALHOST, port))?;
        socket.set_read_timeout(Some(Duration::from_secs(1)))?;
        if let Some(password) = password {
            socket.write_all(&command(&["AUTH", password]))?;
        }
        socket.write_all(&command(&["PING"]))?;
        socket.write_all(&command(&["INFO", "server"]))?;
        let mut answer = Vec::new();
        let mut piece = [0; 4096];
        while !String::from_utf8_lossy(&answer).contains("uptime_in_days") {
            match socket.read(&mut piece)? {
                0 => break,
                n => answer.extend_from_slice(&piece[..n]),
            }
        }
        Ok(String::from_utf8_lossy(&answer).into_owned())
    };
    ask().is_ok_and(|answer| answer.contains("+PONG\r\n") && answer.contains(&format!("process_id:{pid}\r\n")))
}

fn command(words: &[&str]) -> Vec<u8> {
    let mut out = format!("*{}\r\n", words.len());
    for word in words {
        out.push_str(&format!("${}\r\n{word}\r\n", word.len()));
    }
    out.into_bytes()
}

fn percent_encoded(text: &str) -> String {
    let plain = |b: u8| b.is_ascii_alphanumeric() || b"-._~".contains(&b);
    text.bytes().map(|b| if plain(b) { char::from(b).to_string() } else { format!("%{b:02X}") }).collect()
}

fn log_of(dir: &Path) -> String {
    fs::read_to_string(dir.join("redis.log")).unwrap_or_default()
}

fn missing(program: &str, error: &io::Error) -> ! {
    panic!(
        "cannot run {program}: {error}\n\
         These tests start a real Redis (7.0 or newer). Install it:\n  \
         Debian, Ubuntu: apt-get install redis-server redis-tools\n  \
         Fedora:         dnf install redis\n  \
         Alpine:         apk add redis\n  \
         macOS:          brew install redis"
    )
}

// What other parts of the kit need of the system too.

/// A port of the loopback address that was free a moment ago.
pub(crate) fn free_port() -> u16 {
    let socket = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("the loopback address has a free port");
    socket.local_addr().expect("a bound socket has an address").port()
}

/// Sends a signal by name (`TERM`) to a process that this test started.
pub(crate) fn signal(pid: u32, name: &str) {
    let status = Command::new("kill").args([&format!("-{name}"), &pid.to_string()]).status().expect("`kill` exists");
    assert!(status.success(), "kill -{name} {pid}: {status}");
}

/// Blocks this thread for a moment, between two looks at another process.
pub(crate) fn pass(time: Duration) {
    let (_keep, never) = mpsc::channel::<()>();
    let _ = never.recv_timeout(time);
}
