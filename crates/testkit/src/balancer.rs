//! A real load balancer in front of gateways: the HAProxy or nginx of this machine, run with the
//! configuration that the project ships. Only what belongs to a place is changed in it: addresses,
//! paths, and limits that a test machine need not allow. How clients are spread, who is asked about
//! readiness and what is tried again stays as shipped, for that is what tests want to know.

use std::fs::{self, File};
use std::io::{self, ErrorKind};
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use tokio::time::Instant;

use crate::gateway::GatewayProcess;
use crate::redis::{free_port, pass, signal};
use crate::temp::TempDir;

/// How long a balancer may take to accept its first connection, or to end.
const START_TIMEOUT: Duration = Duration::from_secs(20);
/// Between two looks at it.
const LOOK: Duration = Duration::from_millis(5);
/// Another program may take the port between our look and its bind; then another is tried.
const MAX_PORTS: usize = 20;

/// Whose.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Product {
    /// HAProxy 2.6 or newer; its file asks each node's `/readyz`.
    Haproxy,
    /// nginx 1.22 or newer. It asks nobody: it learns from answers alone.
    Nginx,
}

/// A node behind it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Backend {
    /// Where clients are sent.
    pub public: SocketAddr,
    /// Where readiness is asked.
    pub probes: SocketAddr,
}

impl From<&GatewayProcess> for Backend {
    fn from(gateway: &GatewayProcess) -> Self {
        Self { public: gateway.public(), probes: gateway.probes() }
    }
}

/// A balancer that accepts connections; gone with the value, and so are its files.
pub struct Balancer {
    product: Product,
    addr: SocketAddr,
    child: Child,
    dir: TempDir,
}

impl Balancer {
    /// Starts `product` on a free loopback port with the text of its shipped file, in front of these
    /// nodes instead of those named there, and waits until it accepts. Blocks the thread meanwhile.
    ///
    /// # Panics
    /// Where the program is not installed, where the file has not what is to be changed, or where it
    /// does not start; with its words.
    pub fn start(product: Product, shipped: &str, backends: &[Backend]) -> Self {
        let dir = TempDir::new("balancer");
        for _ in 0..MAX_PORTS {
            let addr = SocketAddr::from((Ipv4Addr::LOCALHOST, free_port()));
            let text = match product {
                Product::Haproxy => haproxy(shipped, addr, backends),
                Product::Nginx => nginx(shipped, dir.path(), addr, backends),
            };
            if let Some(child) = run(product, &text, dir.path(), addr) {
                return Self { product, addr, child, dir };
            }
        }
        panic!("{product:?} did not start on any of {MAX_PORTS} ports:\n{}", logs(dir.path()))
    }

    /// Where clients connect.
    pub fn addr(&self) -> SocketAddr {
        self.addr
    }

    /// All that it logged so far.
    pub fn log(&self) -> String {
        logs(self.dir.path())
    }
}

impl Drop for Balancer {
    fn drop(&mut self) {
        // nginx is several processes: killed outright, the first would leave the others behind.
        if self.product == Product::Nginx && matches!(self.child.try_wait(), Ok(None)) {
            signal(self.child.id(), "TERM");
            let until = Instant::now() + START_TIMEOUT;
            while matches!(self.child.try_wait(), Ok(None)) && Instant::now() < until {
                pass(LOOK);
            }
        }
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// `None`: it ended before it accepted, most likely because the port was taken.
fn run(product: Product, text: &str, dir: &Path, addr: SocketAddr) -> Option<Child> {
    let file = dir.join("shipped.conf");
    fs::write(&file, text).expect("a new directory can be written to");
    let output = File::create(dir.join("output.log")).expect("a new directory can be written to");
    let (program, mut arguments) = match product {
        Product::Haproxy => ("haproxy", vec!["-db".into(), "-f".into(), file.into_os_string()]),
        Product::Nginx => ("nginx", vec!["-c".into(), file.into_os_string()]),
    };
    if product == Product::Nginx {
        arguments.extend(["-p".into(), dir.into(), "-e".into(), dir.join("error.log").into_os_string()]);
    }
    let mut child = spawn(program, &arguments, &output);
    let until = Instant::now() + START_TIMEOUT;
    loop {
        if matches!(child.try_wait(), Ok(Some(_))) {
            return None;
        }
        if TcpStream::connect_timeout(&addr, LOOK).is_ok() {
            return Some(child);
        }
        assert!(Instant::now() < until, "{product:?} does not accept:\n{}", logs(dir));
        pass(LOOK);
    }
}

fn spawn(program: &str, arguments: &[std::ffi::OsString], output: &File) -> Child {
    // Whoever is not root has no `sbin` in the path on some systems.
    for folder in ["", "/usr/sbin/", "/usr/local/sbin/"] {
        let to = || Stdio::from(output.try_clone().expect("a file can be had twice"));
        let mut command = Command::new(format!("{folder}{program}"));
        match command.args(arguments).stdin(Stdio::null()).stdout(to()).stderr(to()).spawn() {
            Ok(child) => return child,
            Err(e) if e.kind() == ErrorKind::NotFound => {}
            Err(e) => missing(program, &e),
        }
    }
    missing(program, &ErrorKind::NotFound.into())
}

fn missing(program: &str, error: &io::Error) -> ! {
    panic!(
        "cannot run {program}: {error}\n\
         These tests put a real {program} in front of gateways. Install it, or run scripts/setup:\n  \
         Debian, Ubuntu: apt-get install {program}\n  \
         Fedora:         dnf install {program}\n  \
         Alpine:         apk add {program}"
    )
}

fn logs(dir: &Path) -> String {
    let read = |name| fs::read_to_string(dir.join(name)).unwrap_or_default();
    ["output.log", "error.log", "access.log"].map(read).concat()
}

/// The shipped file, listening at `addr` in front of `backends`.
fn haproxy(shipped: &str, addr: SocketAddr, backends: &[Backend]) -> String {
    let (mut out, mut section) = (Vec::new(), "");
    let (mut n_binds, mut n_servers) = (0, 0);
    for line in shipped.lines() {
        let words: Vec<&str> = line.split_whitespace().collect();
        if line.starts_with(char::is_alphabetic) {
            section = words[0];
        }
        match (section, words.as_slice()) {
            // The nodes have addresses here and no names to look up.
            ("resolvers", _) => {}
            (_, ["bind", ..]) => {
                n_binds += 1;
                out.push(format!("    bind {addr}"));
            }
            // For so many the machine would have to allow as many descriptors.
            (_, ["maxconn", _]) => out.push("    maxconn 4000".to_owned()),
            (_, ["default-server", rest @ ..]) => out.push(format!("    default-server {}", for_addresses(rest))),
            (_, ["server", ..]) => {
                n_servers += 1;
                if n_servers == 1 {
                    let server = |(i, node): (usize, &Backend)| {
                        format!("    server n{i} {} port {}", node.public, node.probes.port())
                    };
                    out.extend(backends.iter().enumerate().map(server));
                }
            }
            _ => out.push(line.to_owned()),
        }
    }
    assert!(n_binds == 1 && n_servers > 0, "one bind and some servers in:\n{shipped}");
    out.join("\n") + "\n"
}

/// Options of a server without those that are about names and the one port of all probes.
fn for_addresses(options: &[&str]) -> String {
    let (mut left, mut words) = (Vec::new(), options.iter());
    while let Some(word) = words.next() {
        if ["port", "init-addr", "resolvers"].contains(word) {
            words.next();
        } else {
            left.push(*word);
        }
    }
    left.join(" ")
}

/// As `haproxy`. Two workers, so that what one worker counts for itself alone shows.
fn nginx(shipped: &str, dir: &Path, addr: SocketAddr, backends: &[Backend]) -> String {
    let at = |name: &str| dir.join(name).display().to_string();
    let mut out = vec![
        "daemon off;".to_owned(),
        "worker_processes 2;".to_owned(),
        format!("pid {};", at("nginx.pid")),
        format!("error_log {} warn;", at("error.log")),
    ];
    let (mut n_listens, mut n_servers) = (0, 0);
    for line in shipped.lines() {
        let words: Vec<&str> = line.split_whitespace().collect();
        match words.as_slice() {
            ["worker_rlimit_nofile", _] => {}
            ["worker_connections", _] => out.push("worker_connections 2048;".to_owned()),
            ["http", "{"] => {
                out.push(line.to_owned());
                let paths = ["client_body", "proxy", "fastcgi", "uwsgi", "scgi"];
                out.extend(paths.iter().map(|of| format!("{of}_temp_path {};", at(of))));
            }
            ["access_log", _, format @ ..] => out.push(format!("access_log {} {}", at("access.log"), format.join(" "))),
            ["listen", ..] => {
                n_listens += 1;
                out.push(format!("listen {addr};"));
            }
            ["server", address, options @ ..] if *address != "{" => {
                n_servers += 1;
                if n_servers == 1 {
                    let options = options.join(" ");
                    let options = options.trim_end_matches(';');
                    out.extend(backends.iter().map(|node| format!("server {} {options};", node.public)));
                }
            }
            _ => out.push(line.to_owned()),
        }
    }
    assert!(n_listens == 1 && n_servers > 0, "one listen and some servers in:\n{shipped}");
    out.join("\n") + "\n"
}

#[cfg(test)]
mod tests {
    use super::*;

    const NODES: [Backend; 2] =
        [Backend { public: addr(1), probes: addr(2) }, Backend { public: addr(3), probes: addr(4) }];

    const fn addr(port: u16) -> SocketAddr {
        SocketAddr::new(std::net::IpAddr::V4(Ipv4Addr::LOCALHOST), port)
    }

    #[test]
    fn of_haproxys_file_only_places_are_changed() {
        let shipped = "global\n    maxconn 9\nfrontend f\n    bind :80\nbackend b\n    balance leastconn\n    \
                       default-server check port 9102 inter 1s resolvers dns\n    server a a:1\n    server b b:1\n\
                       resolvers dns\n    hold valid 10s\n";
        let expected = "global\n    maxconn 4000\nfrontend f\n    bind 127.0.0.1:5\nbackend b\n    balance leastconn\n    \
                        default-server check inter 1s\n    server n0 127.0.0.1:1 port 2\n    \
                        server n1 127.0.0.1:3 port 4\n";
        assert_eq!(haproxy(shipped, addr(5), &NODES), expected);
    }

    #[test]
    fn of_nginxs_file_only_places_are_changed() {
        let shipped = "worker_rlimit_nofile 9;\nhttp {\n    upstream u {\n        least_conn;\n        \
                       server 10.0.0.1:1 max_fails=0;\n        server 10.0.0.2:1 max_fails=0;\n    }\n    server {\n        \
                       listen 80;\n        proxy_buffering off;\n    }\n}\n";
        let text = nginx(shipped, Path::new("/d"), addr(5), &NODES);
        for line in ["        least_conn;", "server 127.0.0.1:1 max_fails=0;", "server 127.0.0.1:3 max_fails=0;"] {
            assert!(text.lines().any(|is| is == line), "{line}\n{text}");
        }
        for line in ["    server {", "listen 127.0.0.1:5;", "        proxy_buffering off;", "pid /d/nginx.pid;"] {
            assert!(text.lines().any(|is| is == line), "{line}\n{text}");
        }
        assert!(!text.contains("10.0.0") && !text.contains("rlimit"), "{text}");
    }

    #[test]
    #[should_panic(expected = "one bind and some servers")]
    fn a_file_in_which_nothing_is_to_be_changed_is_no_file_of_ours() {
        haproxy("global\n", addr(5), &NODES);
    }
}
