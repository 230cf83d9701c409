//! The least that any server can do: a process that accepts the same handshake and writes the same
//! bytes to the same clients, one write(2) each, in a bare loop. What a gateway costs is told in
//! multiples of it, measured in turns on the same machine. `serve` is that process, started from
//! this very program by a hidden command; `Floor` is our end of it.

use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

use clap::{Args, ValueEnum};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::time::timeout;

/// Of a head that does not come.
const HEAD_TIMEOUT: Duration = Duration::from_secs(5);
/// For one loop over all clients.
const LOOP_TIMEOUT: Duration = Duration::from_secs(30);

/// `tidegate-loadtest floor`.
#[derive(Args)]
pub struct Options {
    /// What to be the floor of
    #[arg(value_enum)]
    of: Of,
}

/// What it is the floor of.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Of {
    /// Delivery: clients stay; what comes on the control connection is written to each
    Fanout,
    /// Handshakes: accept, read, answer, close
    Accept,
}

impl Of {
    fn word(self) -> &'static str {
        match self {
            Of::Fanout => "fanout",
            Of::Accept => "accept",
        }
    }
}

/// Serves until standard input ends, which it does with the process that started this one.
///
/// # Errors
/// No port, or a broken control connection.
pub fn serve(options: &Options) -> Result<(), String> {
    let text = |error: io::Error| error.to_string();
    let clients = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).map_err(text)?;
    let control = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).map_err(text)?;
    println!("{} {}", clients.local_addr().map_err(text)?, control.local_addr().map_err(text)?);
    match options.of {
        Of::Accept => {
            thread::spawn(move || {
                clients.incoming().flatten().for_each(|client| drop(answer(client)));
            });
        }
        Of::Fanout => {
            let open = Arc::new(Mutex::new(Vec::new()));
            let joining = Arc::clone(&open);
            thread::spawn(move || {
                for client in clients.incoming().flatten() {
                    if let Ok(client) = welcome(client) {
                        joining.lock().expect("nothing panics while it is held").push(client);
                    }
                }
            });
            thread::spawn(move || control.accept().map(|(control, _)| deliver(control, &open)));
        }
    }
    // Nothing is ever written there: this waits for the end of whoever started us.
    io::stdin().read_to_end(&mut Vec::new()).map(drop).map_err(text)
}

/// A client that stays: its socket never waits.
fn welcome(client: TcpStream) -> io::Result<TcpStream> {
    client.set_nodelay(true)?;
    client.set_read_timeout(Some(HEAD_TIMEOUT))?;
    let client = answer(client)?;
    client.set_nonblocking(true)?;
    Ok(client)
}

/// Reads a head and answers it with the yes of its kind: nothing else, for this is a floor too.
fn answer(mut client: TcpStream) -> io::Result<TcpStream> {
    let (mut head, mut n) = ([0; 4 << 10], 0);
    while !head[..n].ends_with(b"\r\n\r\n") {
        match client.read(&mut head[n..])? {
            0 => return Err(io::ErrorKind::UnexpectedEof.into()),
            more => n += more,
        }
    }
    let yes: &[u8] = if head.starts_with(b"GET /v1/sse") {
        b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
    } else {
        b"HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n"
    };
    client.write_all(yes)?;
    Ok(client)
}

/// Each order is a length (u32, little endian) and so many bytes for every client; each answer the
/// number of clients that got them all.
fn deliver(mut control: TcpStream, open: &Mutex<Vec<TcpStream>>) -> io::Result<()> {
    control.set_nodelay(true)?;
    let mut bytes = Vec::new();
    loop {
        let mut length = [0; 4];
        control.read_exact(&mut length)?;
        bytes.resize(u32::from_le_bytes(length) as usize, 0);
        control.read_exact(&mut bytes)?;
        let mut open = open.lock().expect("nothing panics while it is held");
        // One whose buffer is full got a part at most: it is of no more use here.
        open.retain(|client| matches!((&mut &*client).write(&bytes), Ok(n) if n == bytes.len()));
        control.write_all(&(open.len() as u32).to_le_bytes())?;
    }
}

/// A running floor; it ends when this is dropped.
pub struct Floor {
    child: Child,
    /// Its end is the sign to go.
    stdin: Option<ChildStdin>,
    /// Where clients connect.
    pub public: SocketAddr,
    control: tokio::net::TcpStream,
}

impl Floor {
    pub async fn start(of: Of) -> Result<Floor, String> {
        let text = |error: io::Error| format!("floor: {error}");
        let program = std::env::current_exe().map_err(text)?;
        let mut command = Command::new(program);
        command.args(["floor", of.word()]).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn().map_err(text)?;
        let (stdin, stdout) = (child.stdin.take(), child.stdout.take().expect("it was asked for"));
        let mut line = String::new();
        BufReader::new(stdout).read_line(&mut line).map_err(text)?;
        let (public, control) = line.trim().split_once(' ').ok_or("floor: it does not start")?;
        let address = |text: &str| text.parse().map_err(|_| format!("floor: not understood: {line}"));
        let (public, control): (SocketAddr, SocketAddr) = (address(public)?, address(control)?);
        let control = tokio::net::TcpStream::connect(control).await.map_err(text)?;
        control.set_nodelay(true).map_err(text)?;
        Ok(Floor { child, stdin, public, control })
    }

    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Has these bytes written to every client, one write each; gives how many got them.
    pub async fn write(&mut self, bytes: &[u8]) -> Result<usize, String> {
        let mut order = u32::try_from(bytes.len()).map_err(|_| "floor: too many bytes")?.to_le_bytes().to_vec();
        order.extend_from_slice(bytes);
        let asking = async {
            self.control.write_all(&order).await?;
            self.control.read_u32_le().await
        };
        match timeout(LOOP_TIMEOUT, asking).await {
            Ok(written) => written.map(|n| n as usize).map_err(|error| format!("floor: {error}")),
            Err(_) => Err("floor: no answer in time".to_owned()),
        }
    }
}

impl Drop for Floor {
    fn drop(&mut self) {
        drop(self.stdin.take());
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::{Subscriber, Transport};

    #[tokio::test]
    async fn a_client_gets_its_yes_and_then_what_was_ordered() {
        let clients = TcpListener::bind("127.0.0.1:0").unwrap();
        let control = TcpListener::bind("127.0.0.1:0").unwrap();
        let (public, private) = (clients.local_addr().unwrap(), control.local_addr().unwrap());
        for transport in [Transport::Ws, Transport::Sse] {
            let shaking = clients.try_clone().unwrap();
            let server = thread::spawn(move || welcome(shaking.accept().unwrap().0).unwrap());
            let client = Subscriber::connect(&public.to_string(), transport, None, "x").await.unwrap();
            let open = Mutex::new(vec![server.join().unwrap()]);
            let ordering = control.try_clone().unwrap();
            let server = thread::spawn(move || deliver(ordering.accept().unwrap().0, &open));
            let mut orders = tokio::net::TcpStream::connect(private).await.unwrap();
            orders.write_all(b"\x02\x00\x00\x00hi").await.unwrap();
            assert_eq!(orders.read_u32_le().await.unwrap(), 1);
            let (mut stream, _, mut seen) = client.into_parts();
            while seen.len() < 2 {
                stream.read_buf(&mut seen).await.unwrap();
            }
            assert_eq!(seen, b"hi");
            drop(orders);
            assert!(server.join().unwrap().is_err(), "the end of the orders is its end");
        }
    }
}
