//! A real balancer in front of the gateways: HAProxy or nginx, started with a configuration like
//! those in `deploy/`, gone with its value. Decides what stands in it; whom it sends where is its own.
//!
//! Both are told of all nodes from the start, those that do not run yet among them. HAProxy asks
//! each one's `/readyz` and leaves out who does not say yes. nginx has no such checks: whoever
//! refuses a connection is passed over for that client, and tried again by the next one. Its passive
//! checks (`max_fails`) are off: it forgets a failure only when a request to that node ends well, so
//! that a node which was away once gets one stream in a `fail_timeout` for as long as its streams
//! last (measured: 20 sessions of 600 in a minute, where 28 a second were moved). No
//! node is added by a reload: a new process that counts its connections from zero knows nothing of
//! those the old one still holds, and its least-connections is round-robin until they are gone.

use std::fs;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::{Command, Stdio};

use clap::{Args, ValueEnum};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpStream, UnixStream};
use tokio::time::Instant;

use crate::balancer::Place;
use crate::fleet::{LOOK, Process, START_TIMEOUT, TempDir, log_tail, port_for_later};

/// Descriptors that a proxy needs beside two for each session.
const SPARE: usize = 500;

/// Which one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Kind {
    /// HAProxy, `leastconn`, active checks of /readyz
    Haproxy,
    /// nginx, `least_conn` with a shared zone, one worker, no checks
    Nginx,
}

impl Kind {
    /// The word on the command line.
    pub fn word(self) -> &'static str {
        match self {
            Kind::Haproxy => "haproxy",
            Kind::Nginx => "nginx",
        }
    }
}

/// What a benchmark with a balancer takes.
#[derive(Args, Clone)]
pub struct Balancers {
    /// The balancer in front of the gateways
    #[arg(long, value_enum, default_value_t = Kind::Haproxy)]
    pub balancer: Kind,
    /// HAProxy's binary
    #[arg(long, default_value = "haproxy")]
    haproxy_bin: PathBuf,
    /// nginx's
    #[arg(long, default_value = "nginx")]
    nginx_bin: PathBuf,
}

/// A running balancer.
pub struct Proxy {
    process: Process,
    kind: Kind,
    pub address: SocketAddr,
    dir: TempDir,
}

impl Balancers {
    /// Starts it in front of `nodes`, for so many sessions at once.
    ///
    /// # Errors
    /// It is not there, or does not listen.
    pub async fn start(&self, nodes: &[Place], n_sessions: usize) -> Result<Proxy, String> {
        let dir = TempDir::new(self.balancer.word())?;
        let address = SocketAddr::from(([127, 0, 0, 1], port_for_later()?));
        let here = dir.path().display().to_string();
        let (program, text, mut command) = match self.balancer {
            Kind::Haproxy => {
                let mut command = Command::new(&self.haproxy_bin);
                command.args(["-db", "-f"]).arg(dir.path().join("config"));
                (&self.haproxy_bin, haproxy(address, nodes, n_sessions, &here), command)
            }
            Kind::Nginx => {
                let mut command = Command::new(&self.nginx_bin);
                command.arg("-p").arg(dir.path()).arg("-c").arg(dir.path().join("config"));
                command.arg("-e").arg(dir.path().join("log"));
                (&self.nginx_bin, nginx(address, nodes, n_sessions, &here), command)
            }
        };
        let io = |error: std::io::Error| format!("{}: {error}", program.display());
        fs::write(dir.path().join("config"), text).map_err(io)?;
        let said = fs::File::create(dir.path().join("said")).map_err(io)?;
        let errors = said.try_clone().map_err(io)?;
        command.stdin(Stdio::null()).stdout(said).stderr(errors);
        let process = Process(command.spawn().map_err(io)?);
        let mut proxy = Proxy { process, kind: self.balancer, address, dir };
        proxy.until_listening().await?;
        Ok(proxy)
    }
}

impl Proxy {
    async fn until_listening(&mut self) -> Result<(), String> {
        let until = Instant::now() + START_TIMEOUT;
        while TcpStream::connect(self.address).await.is_err() {
            if self.process.has_ended() || Instant::now() >= until {
                let said = ["said", "log"].map(|name| log_tail(&self.dir.path().join(name)));
                return Err(format!("the balancer does not listen:\n{}", said.join("\n")));
            }
            tokio::time::sleep(LOOK).await;
        }
        Ok(())
    }

    /// Waits until the balancer knows that exactly the first `n` nodes are there. nginx never knows:
    /// it finds out with every connection.
    ///
    /// # Errors
    /// Not in time.
    pub async fn until_up(&self, n: usize) -> Result<(), String> {
        if self.kind == Kind::Nginx {
            return Ok(());
        }
        let until = Instant::now() + START_TIMEOUT;
        loop {
            let ups = ups(&self.ask("show stat").await?);
            if ups.iter().enumerate().all(|(at, is_up)| *is_up == (at < n)) {
                return Ok(());
            }
            if Instant::now() >= until {
                return Err(format!("HAProxy does not see {n} nodes: {ups:?}"));
            }
            tokio::time::sleep(LOOK).await;
        }
    }

    async fn ask(&self, what: &str) -> Result<String, String> {
        let io = |error: std::io::Error| format!("HAProxy's socket: {error}");
        let mut socket = UnixStream::connect(self.dir.path().join("socket")).await.map_err(io)?;
        socket.write_all(format!("{what}\n").as_bytes()).await.map_err(io)?;
        let mut answer = String::new();
        socket.read_to_string(&mut answer).await.map_err(io)?;
        Ok(answer)
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        // nginx is a master and its worker.
        self.process.end_politely();
    }
}

/// Which servers are up, from HAProxy's `show stat`.
fn ups(csv: &str) -> Vec<bool> {
    let mut lines = csv.lines();
    let head: Vec<&str> = lines.next().unwrap_or_default().trim_start_matches("# ").split(',').collect();
    let Some(status) = head.iter().position(|name| *name == "status") else { return Vec::new() };
    let rows = lines.map(|line| line.split(',').collect::<Vec<_>>());
    let servers = rows.filter(|row| row.first() == Some(&"gateways") && row.get(1).is_some_and(|n| n.starts_with('g')));
    servers.map(|row| row.get(status).is_some_and(|word| word.starts_with("UP"))).collect()
}

fn haproxy(address: SocketAddr, nodes: &[Place], n_sessions: usize, dir: &str) -> String {
    let n = n_sessions + SPARE;
    let server = |(at, node): (usize, &Place)| {
        format!("    server g{at} {} check port {} inter 1s fall 2 rise 2\n", node.public, node.probes.port())
    };
    let servers: String = nodes.iter().enumerate().map(server).collect();
    format!(
        "global
    maxconn {n}
    stats socket {dir}/socket mode 600 level admin
defaults
    mode http
    maxconn {n}
    option http-no-delay
    option forwardfor
    timeout connect 2s
    timeout client  75s
    timeout server  75s
    timeout tunnel  1h
    timeout http-request 10s
    timeout queue 2s
    retries 1
frontend public
    bind {address} backlog 4096
    default_backend gateways
backend gateways
    balance leastconn
    option httpchk GET /readyz
    http-check expect status 200
{servers}"
    )
}

fn nginx(address: SocketAddr, nodes: &[Place], n_sessions: usize, dir: &str) -> String {
    // A session is two connections to it.
    let n = 2 * n_sessions + SPARE;
    let server = |node: &Place| format!("        server {} max_fails=0;\n", node.public);
    let servers: String = nodes.iter().map(server).collect();
    let temporary = |kind: &str| format!("    {kind}_temp_path {dir}/{kind};\n");
    let temporary: String = ["client_body", "proxy", "fastcgi", "uwsgi", "scgi"].map(temporary).concat();
    format!(
        "daemon off;
pid {dir}/pid;
error_log {dir}/log crit;
worker_processes 1;
worker_rlimit_nofile {n};
events {{
    worker_connections {n};
}}
http {{
    access_log off;
{temporary}    upstream gateways {{
        zone gateways 256k;
        least_conn;
{servers}    }}
    map $http_upgrade $connection_upgrade {{
        default upgrade;
        ''      close;
    }}
    server {{
        listen {address} backlog=4096;
        location / {{
            proxy_pass http://gateways;
            proxy_http_version 1.1;
            proxy_set_header Upgrade $http_upgrade;
            proxy_set_header Connection $connection_upgrade;
            proxy_set_header Host $host;
            proxy_set_header X-Forwarded-For $proxy_add_x_forwarded_for;
            proxy_buffering off;
            proxy_connect_timeout 2s;
            proxy_read_timeout 75s;
            proxy_send_timeout 75s;
            # Only who cannot be connected to is passed over; a refusal is meant for the client.
            proxy_next_upstream error timeout;
        }}
    }}
}}
"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn haproxy_says_which_servers_are_up() {
        let csv = "# pxname,svname,qcur,scur,status,weight\npublic,FRONTEND,,1,OPEN,\ngateways,g0,0,1,UP,1\n\
                   gateways,g1,0,0,DOWN,1\ngateways,g2,0,0,UP 1/2,1\ngateways,BACKEND,0,1,UP,3\n\n";
        assert_eq!(ups(csv), [true, false, true]);
        assert!(ups("").is_empty());
    }

    #[tokio::test]
    async fn a_balancer_that_is_not_there_is_said_by_its_name() {
        let missing = PathBuf::from("/nowhere/balancer");
        for balancer in [Kind::Haproxy, Kind::Nginx] {
            let balancers = Balancers { balancer, haproxy_bin: missing.clone(), nginx_bin: missing.clone() };
            let why = balancers.start(&[], 1).await.err().unwrap();
            assert!(why.contains("/nowhere/balancer"), "{why}");
        }
    }
}
