//! The peers as processes: which program, told what, and how a client says hello. Each with the
//! settings that its documentation gives for many clients; what is not installed is said to be missing.

use std::fs;
use std::io;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::{Command, Stdio};

use clap::Args;
use tokio::io::AsyncWriteExt;
use tokio::net::TcpStream;
use tokio::time::Instant;

use super::CHANNEL;
use super::inlet::{self, Inlet};
use crate::fleet::{LOOK, Process, Programs, Redis, START_TIMEOUT, TempDir, free_port, log_tail};
use crate::readers::{Opened, Reading};
use crate::token;
use crate::wire::{read_head, status};

/// Where the programs are.
#[derive(Args, Clone)]
pub struct Bins {
    /// nginx, with nchan as a module
    #[arg(long, default_value = "nginx")]
    nginx: PathBuf,
    /// The module
    #[arg(long, default_value = "/usr/lib/nginx/modules/ngx_nchan_module.so")]
    nchan: PathBuf,
    /// NATS
    #[arg(long, default_value = "nats-server")]
    nats: PathBuf,
    /// Mosquitto
    #[arg(long, default_value = "mosquitto")]
    mosquitto: PathBuf,
    /// Node
    #[arg(long, default_value = "node")]
    node: PathBuf,
    /// Where Node's package `ws` is
    #[arg(long, default_value = "strangers/node_modules")]
    node_modules: PathBuf,
    /// Centrifugo
    #[arg(long)]
    centrifugo: Option<PathBuf>,
    /// Mercure
    #[arg(long)]
    mercure: Option<PathBuf>,
}

/// A peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    NchanWs,
    NchanSse,
    Nats,
    Mosquitto,
    NodeWs,
    Centrifugo,
    Mercure,
}

pub const KINDS: [Kind; 7] =
    [Kind::NchanWs, Kind::NchanSse, Kind::Nats, Kind::Mosquitto, Kind::NodeWs, Kind::Centrifugo, Kind::Mercure];

impl Kind {
    pub fn name(self) -> &'static str {
        match self {
            Kind::NchanWs => "nchan (WebSocket)",
            Kind::NchanSse => "nchan (SSE)",
            Kind::Nats => "nats-server (WebSocket)",
            Kind::Mosquitto => "mosquitto (WebSocket)",
            Kind::NodeWs => "Node ws + Redis",
            Kind::Centrifugo => "Centrifugo (WebSocket)",
            Kind::Mercure => "Mercure (SSE)",
        }
    }

    pub fn key(self) -> &'static str {
        match self {
            Kind::NchanWs => "nchan_ws",
            Kind::NchanSse => "nchan_sse",
            Kind::Nats => "nats",
            Kind::Mosquitto => "mosquitto",
            Kind::NodeWs => "node_ws",
            Kind::Centrifugo => "centrifugo",
            Kind::Mercure => "mercure",
        }
    }
}

/// Why a peer does not take part.
pub enum Absent {
    /// Not on this machine.
    Missing(String),
    /// There, but it does not do what it should.
    Broken(String),
}

impl From<String> for Absent {
    fn from(why: String) -> Absent {
        Absent::Broken(why)
    }
}

/// A running peer; ended on drop, in this order.
pub struct Peer {
    pub kind: Kind,
    process: Process,
    /// What does the work: the process, or its worker.
    pub pid: u32,
    /// Where clients connect.
    pub public: SocketAddr,
    /// Where events go in.
    control: u16,
    redis: Option<Redis>,
    dir: TempDir,
}

impl Drop for Peer {
    fn drop(&mut self) {
        // nginx has a worker that would outlive it otherwise.
        self.process.end_politely();
    }
}

impl Peer {
    pub async fn start(kind: Kind, bins: &Bins, programs: &Programs) -> Result<Peer, Absent> {
        let dir = TempDir::new(kind.key())?;
        let (public, control) = (free_port()?, free_port()?);
        let redis = if kind == Kind::NodeWs { Some(programs.redis().await?) } else { None };
        let mut command = command(kind, bins, &dir, [public, control], redis.as_ref())?;
        let log = fs::File::create(dir.path().join("log")).map_err(|error| error.to_string())?;
        let errors = log.try_clone().map_err(|error| error.to_string())?;
        command.stdin(Stdio::null()).stdout(log).stderr(errors);
        let child = command.spawn().map_err(|error| {
            let why = format!("{}: {error}", command.get_program().display());
            if error.kind() == io::ErrorKind::NotFound { Absent::Missing(why) } else { Absent::Broken(why) }
        })?;
        let (process, pid) = (Process(child), 0);
        let public = SocketAddr::from(([127, 0, 0, 1], public));
        let mut peer = Peer { kind, process, pid, public, control, redis, dir };
        peer.until_listening().await?;
        peer.pid = match kind {
            Kind::NchanWs | Kind::NchanSse => child_of(peer.process.0.id()).await?,
            _ => peer.process.0.id(),
        };
        Ok(peer)
    }

    async fn until_listening(&mut self) -> Result<(), String> {
        let until = Instant::now() + START_TIMEOUT;
        while TcpStream::connect(self.public).await.is_err() {
            if self.process.has_ended() || Instant::now() >= until {
                return Err(format!("{} does not listen:\n{}", self.kind.name(), self.log()));
            }
            tokio::time::sleep(LOOK).await;
        }
        Ok(())
    }

    pub fn log(&self) -> String {
        log_tail(&self.dir.path().join("log"))
    }

    /// Its way in.
    pub async fn inlet(&self) -> Result<Inlet, String> {
        let (public, host) = (self.public.port(), self.public);
        match self.kind {
            Kind::NchanWs | Kind::NchanSse => {
                let head = format!("POST /pub HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n");
                Inlet::http(public, head, str::to_owned).await
            }
            Kind::Nats => Inlet::nats(self.control).await,
            Kind::Mosquitto => Inlet::mqtt(self.control).await,
            Kind::NodeWs => Ok(Inlet::Redis(self.redis.as_ref().expect("it has one").connect().await?)),
            Kind::Centrifugo => {
                let head = format!("POST /api/publish HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n");
                let body = |data: &str| format!(r#"{{"channel":"{CHANNEL}","data":{data}}}"#);
                Inlet::http(public, head, body).await
            }
            Kind::Mercure => {
                let token = token::mercure(&["*"]);
                let head = format!(
                    "POST /.well-known/mercure HTTP/1.1\r\nHost: {host}\r\nAuthorization: Bearer {token}\r\n\
                     Content-Type: application/x-www-form-urlencoded\r\n"
                );
                let body = |data: &str| {
                    let data: String = data.bytes().map(|byte| format!("%{byte:02X}")).collect();
                    format!("topic={CHANNEL}&data={data}")
                };
                Inlet::http(public, head, body).await
            }
        }
    }

    /// A client of it that hears the channel.
    pub async fn open(kind: Kind, to: SocketAddr) -> Result<Opened, String> {
        let text = |error: io::Error| error.to_string();
        let mut stream = TcpStream::connect(to).await.map_err(text)?;
        stream.set_nodelay(true).map_err(text)?;
        let (path, more) = match kind {
            Kind::NchanWs => ("/sub", ""),
            Kind::NchanSse => ("/sub", "Accept: text/event-stream\r\n"),
            Kind::Nats | Kind::NodeWs => ("/", ""),
            Kind::Mosquitto => ("/mqtt", "Sec-WebSocket-Protocol: mqtt\r\n"),
            Kind::Centrifugo => ("/connection/uni_websocket", ""),
            Kind::Mercure => ("/.well-known/mercure?topic=bench", "Accept: text/event-stream\r\n"),
        };
        let is_sse = more.contains("event-stream");
        let upgrade = "Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n\
                       Sec-WebSocket-Key: dGlkZWdhdGUgbG9hZHRlcw==\r\n";
        let upgrade = if is_sse { "" } else { upgrade };
        let head = format!("GET {path} HTTP/1.1\r\nHost: {to}\r\n{upgrade}{more}\r\n");
        stream.write_all(head.as_bytes()).await.map_err(text)?;
        let (answer, early) = read_head(&mut stream).await?;
        if !matches!(status(&answer), Some(101 | 200)) {
            return Err(format!("refused: {answer}"));
        }
        greet(kind, &mut stream).await?;
        Opened::from_stream(stream, Reading::Scan(Vec::new()), early)
    }
}

/// What a client says once it is connected, and hears before it is subscribed.
async fn greet(kind: Kind, stream: &mut TcpStream) -> Result<(), String> {
    let text = |error: io::Error| error.to_string();
    match kind {
        Kind::Nats => {
            let hello = format!("CONNECT {{\"verbose\":false}}\r\nSUB {CHANNEL} 1\r\nPING\r\n");
            stream.write_all(&masked(2, hello.as_bytes())).await.map_err(text)?;
            inlet::until(stream, b"PONG").await
        }
        Kind::Mosquitto => {
            let name = stream.local_addr().map_err(text)?.to_string();
            stream.write_all(&masked(2, &inlet::mqtt_connect(&name))).await.map_err(text)?;
            inlet::until(stream, inlet::MQTT_CONNECTED).await?;
            stream.write_all(&masked(2, &inlet::mqtt_subscribe())).await.map_err(text)?;
            inlet::until(stream, inlet::MQTT_SUBSCRIBED).await
        }
        Kind::Centrifugo => {
            let hello = format!(r#"{{"subs":{{"{CHANNEL}":{{}}}}}}"#);
            stream.write_all(&masked(1, hello.as_bytes())).await.map_err(text)?;
            inlet::until(stream, b"\"connect\"").await
        }
        Kind::NchanWs | Kind::NchanSse | Kind::NodeWs | Kind::Mercure => Ok(()),
    }
}

/// A short client's frame; a mask of zeros is a mask too.
fn masked(opcode: u8, payload: &[u8]) -> Vec<u8> {
    assert!(payload.len() < 126, "a longer one has another length form");
    [&[0x80 | opcode, 0x80 | payload.len() as u8, 0, 0, 0, 0], payload].concat()
}

fn command(
    kind: Kind,
    bins: &Bins,
    dir: &TempDir,
    [public, control]: [u16; 2],
    redis: Option<&Redis>,
) -> Result<Command, Absent> {
    let here = dir.path().display();
    let missing = |path: &PathBuf| Absent::Missing(format!("{} is not there", path.display()));
    let given = |path: &Option<PathBuf>| path.clone().ok_or_else(|| Absent::Missing("no path was given".to_owned()));
    let (program, name, text, arguments): (PathBuf, &str, String, &[&str]) = match kind {
        Kind::NchanWs | Kind::NchanSse => {
            if !bins.nchan.exists() {
                return Err(missing(&bins.nchan));
            }
            let text = NGINX.replace("MODULE", &bins.nchan.display().to_string());
            (bins.nginx.clone(), "nginx.conf", text, &["-e", "stderr", "-p", "DIR", "-c", "FILE"])
        }
        Kind::Nats => (bins.nats.clone(), "nats.conf", NATS.to_owned(), &["-c", "FILE"]),
        Kind::Mosquitto => (bins.mosquitto.clone(), "mosquitto.conf", MOSQUITTO.to_owned(), &["-c", "FILE"]),
        Kind::NodeWs => {
            if !bins.node_modules.join("ws").exists() {
                return Err(missing(&bins.node_modules.join("ws")));
            }
            let port = redis.map_or(0, |redis| redis.port).to_string();
            (bins.node.clone(), "server.js", NODE.replace("REDIS", &port), &["FILE"])
        }
        Kind::Centrifugo => (given(&bins.centrifugo)?, "config.json", CENTRIFUGO.to_owned(), &["--config", "FILE"]),
        Kind::Mercure => {
            let text = MERCURE.replace("KEY", token::SECRET);
            (given(&bins.mercure)?, "Caddyfile", text, &["run", "--config", "FILE"])
        }
    };
    let text = text.replace("PUBLIC", &public.to_string()).replace("CONTROL", &control.to_string());
    let file = dir.path().join(name);
    fs::write(&file, text.replace("DIR", &here.to_string())).map_err(|error| error.to_string())?;
    let mut command = Command::new(program);
    for argument in arguments {
        command.arg(argument.replace("DIR", &here.to_string()).replace("FILE", &file.display().to_string()));
    }
    if let Ok(modules) = fs::canonicalize(&bins.node_modules) {
        command.env("NODE_PATH", modules);
    }
    Ok(command)
}

/// nginx: a master with one worker, which is what is measured.
const NGINX: &str = "\
user root;
daemon off;
worker_processes 1;
pid DIR/pid;
error_log stderr;
load_module MODULE;
events { worker_connections 12000; }
http {
  access_log off;
  client_body_temp_path DIR/body;
  proxy_temp_path DIR/proxy;
  fastcgi_temp_path DIR/fastcgi;
  uwsgi_temp_path DIR/uwsgi;
  scgi_temp_path DIR/scgi;
  server {
    listen 127.0.0.1:PUBLIC backlog=4096;
    keepalive_requests 100000000;
    tcp_nodelay on;
    location = /sub { nchan_subscriber; nchan_channel_id bench; nchan_subscriber_first_message newest; }
    location = /pub { nchan_publisher; nchan_channel_id bench; nchan_message_buffer_length 64; }
  }
}
";

const NATS: &str = "\
listen: 127.0.0.1:CONTROL
ping_interval: \"10m\"
websocket { listen: \"127.0.0.1:PUBLIC\", no_tls: true, compression: false }
";

const MOSQUITTO: &str = "\
per_listener_settings false
allow_anonymous true
persistence false
set_tcp_nodelay true
max_queued_messages 10000
listener CONTROL 127.0.0.1
listener PUBLIC 127.0.0.1
protocol websockets
";

const CENTRIFUGO: &str = r#"{
  "http_server": {"address": "127.0.0.1", "port": "PUBLIC"},
  "http_api": {"insecure": true},
  "client": {"insecure": true, "allowed_origins": ["*"]},
  "channel": {"without_namespace": {"allow_subscribe_for_client": true, "allow_subscribe_for_anonymous": true}},
  "uni_websocket": {"enabled": true},
  "log": {"level": "error"}
}
"#;

const MERCURE: &str = "\
{
  auto_https off
  admin off
}
http://127.0.0.1:PUBLIC {
  bind 127.0.0.1
  mercure {
    publisher_jwt \"KEY\" HS256
    subscriber_jwt \"KEY\" HS256
    anonymous
    heartbeat 10m
    write_timeout 0s
  }
}
";

/// What one writes in an afternoon: `ws`, and a subscription in Redis, here without a library for it.
const NODE: &str = r#"'use strict';
const { WebSocketServer, WebSocket } = require('ws');
const server = require('http').createServer();
const sockets = new WebSocketServer({ server, perMessageDeflate: false });
const redis = require('net').connect(REDIS, '127.0.0.1');
redis.write('SUBSCRIBE bench\r\n');
let rest = Buffer.alloc(0);
// A message is *3, $7 message, $5 bench, $<n>, <n bytes>.
function next() {
  let at = 0;
  const line = () => {
    const end = rest.indexOf('\r\n', at);
    if (end < 0) return null;
    const text = rest.toString('latin1', at, end);
    at = end + 2;
    return text;
  };
  if (line() === null) return false;
  const words = [];
  while (words.length < 3) {
    const head = line();
    if (head === null) return false;
    if (head[0] === ':') { words.push(head); continue; }
    const length = Number(head.slice(1));
    if (rest.length < at + length + 2) return false;
    words.push(rest.subarray(at, at + length));
    at += length + 2;
  }
  rest = rest.subarray(at);
  if (words[0].toString() === 'message') {
    const text = words[2].toString();
    for (const socket of sockets.clients) if (socket.readyState === WebSocket.OPEN) socket.send(text);
  }
  return true;
}
redis.on('data', (bytes) => {
  rest = Buffer.concat([rest, bytes]);
  while (next());
});
server.listen({ port: PUBLIC, host: '127.0.0.1', backlog: 4096 });
"#;

/// The first child of a process, as soon as it has one.
async fn child_of(pid: u32) -> Result<u32, String> {
    let path = format!("/proc/{pid}/task/{pid}/children");
    let until = Instant::now() + START_TIMEOUT;
    loop {
        let children = fs::read_to_string(&path).map_err(|error| format!("{path}: {error}"))?;
        if let Some(child) = children.split_ascii_whitespace().next().and_then(|child| child.parse().ok()) {
            return Ok(child);
        }
        if Instant::now() >= until {
            return Err(format!("{path}: no child"));
        }
        tokio::time::sleep(LOOK).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_not_installed_is_missing_and_not_broken() {
        let nowhere = PathBuf::from("/nowhere");
        let bins = Bins {
            nginx: nowhere.clone(),
            nchan: nowhere.clone(),
            nats: nowhere.clone(),
            mosquitto: nowhere.clone(),
            node: nowhere.clone(),
            node_modules: nowhere,
            centrifugo: None,
            mercure: None,
        };
        let dir = TempDir::new("missing").unwrap();
        for kind in [Kind::NchanWs, Kind::NchanSse, Kind::NodeWs, Kind::Centrifugo, Kind::Mercure] {
            let absent = command(kind, &bins, &dir, [1, 2], None);
            assert!(matches!(absent, Err(Absent::Missing(_))), "{kind:?}");
        }
    }

    #[test]
    fn a_clients_frame_says_that_it_is_masked() {
        assert_eq!(masked(2, b"hi"), [0x82, 0x82, 0, 0, 0, 0, b'h', b'i']);
    }
}
