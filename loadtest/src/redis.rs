//! As much of Redis' wire as a benchmark needs: one command, its answer; the server's own counts.

use std::collections::BTreeMap;

use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufStream};
use tokio::net::TcpStream;

/// A connection.
pub struct Connection(BufStream<TcpStream>);

/// An answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Reply {
    Text(String),
    Number(i64),
    Nil,
    Array(Vec<Reply>),
}

impl Reply {
    pub fn text(&self) -> &str {
        if let Reply::Text(text) = self { text } else { "" }
    }
}

impl Connection {
    pub async fn open(port: u16) -> Result<Connection, String> {
        let stream = TcpStream::connect(("127.0.0.1", port)).await.map_err(|error| format!("redis: {error}"))?;
        stream.set_nodelay(true).map_err(|error| error.to_string())?;
        Ok(Connection(BufStream::new(stream)))
    }

    /// Runs one command; an error reply is an error.
    pub async fn run(&mut self, words: &[&str]) -> Result<Reply, String> {
        self.send(words).await?;
        self.0.flush().await.map_err(|error| format!("redis: {error}"))?;
        self.reply().await
    }

    /// Sets these keys, in one go.
    pub async fn set_all(&mut self, keys: &[String], value: &str) -> Result<(), String> {
        for some in keys.chunks(1_000) {
            for key in some {
                self.send(&["SET", key, value]).await?;
            }
            self.0.flush().await.map_err(|error| format!("redis: {error}"))?;
            for _ in some {
                self.reply().await?;
            }
        }
        Ok(())
    }

    /// Runs these commands in one go: they leave in one write, and the server may answer in one.
    pub async fn run_all(&mut self, commands: &[Vec<&str>]) -> Result<(), String> {
        for words in commands {
            self.send(words).await?;
        }
        self.0.flush().await.map_err(|error| format!("redis: {error}"))?;
        for _ in commands {
            self.reply().await?;
        }
        Ok(())
    }

    async fn send(&mut self, words: &[&str]) -> Result<(), String> {
        let mut out = format!("*{}\r\n", words.len());
        for word in words {
            out.push_str(&format!("${}\r\n{word}\r\n", word.len()));
        }
        self.0.write_all(out.as_bytes()).await.map_err(|error| format!("redis: {error}"))
    }

    async fn line(&mut self) -> Result<String, String> {
        let mut line = String::new();
        let n = self.0.read_line(&mut line).await.map_err(|error| format!("redis: {error}"))?;
        if n == 0 { Err("redis: end of stream".to_owned()) } else { Ok(line.trim_end().to_owned()) }
    }

    async fn reply(&mut self) -> Result<Reply, String> {
        let line = self.line().await?;
        let (kind, rest) = line.split_at_checked(1).unwrap_or_default();
        let number = || rest.parse::<i64>().map_err(|_| format!("redis: not understood: {line}"));
        match kind {
            "+" => Ok(Reply::Text(rest.to_owned())),
            "-" => Err(format!("redis: {rest}")),
            ":" => Ok(Reply::Number(number()?)),
            "$" | "*" if number()? < 0 => Ok(Reply::Nil),
            "$" => {
                let mut bytes = vec![0; number()? as usize + 2];
                self.0.read_exact(&mut bytes).await.map_err(|error| format!("redis: {error}"))?;
                bytes.truncate(bytes.len() - 2);
                Ok(Reply::Text(String::from_utf8_lossy(&bytes).into_owned()))
            }
            "*" => {
                let mut all = Vec::new();
                for _ in 0..number()? {
                    all.push(Box::pin(self.reply()).await?);
                }
                Ok(Reply::Array(all))
            }
            _ => Err(format!("redis: not understood: {line}")),
        }
    }

    /// The server's counts so far.
    pub async fn counts(&mut self) -> Result<Counts, String> {
        let stats = self.run(&["INFO", "commandstats"]).await?;
        let cpu = self.run(&["INFO", "cpu"]).await?;
        Ok(Counts::read(stats.text(), cpu.text()))
    }
}

/// Calls by command, and the CPU time of the server (s).
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Counts {
    pub calls: BTreeMap<String, u64>,
    pub cpu_s: f64,
}

impl Counts {
    fn read(stats: &str, cpu: &str) -> Counts {
        let calls = stats.lines().filter_map(|line| {
            let (name, figures) = line.strip_prefix("cmdstat_")?.split_once(":calls=")?;
            Some((name.to_owned(), figures.split(',').next()?.parse().ok()?))
        });
        let second = |name: &str| -> f64 {
            let line = cpu.lines().find_map(|line| line.strip_prefix(name));
            line.and_then(|rest| rest.trim().parse().ok()).unwrap_or(0.0)
        };
        Counts { calls: calls.collect(), cpu_s: second("used_cpu_user:") + second("used_cpu_sys:") }
    }

    /// What was added to `earlier`. The reading itself (INFO) is left out.
    pub fn since(&self, earlier: &Counts) -> Counts {
        let added = |(name, calls): (&String, &u64)| {
            let n = calls - earlier.calls.get(name).unwrap_or(&0).min(calls);
            (n > 0 && name != "info").then(|| (name.clone(), n))
        };
        Counts { calls: self.calls.iter().filter_map(added).collect(), cpu_s: self.cpu_s - earlier.cpu_s }
    }

    pub fn of(&self, command: &str) -> u64 {
        self.calls.get(command).copied().unwrap_or(0)
    }

    pub fn total(&self) -> u64 {
        self.calls.values().sum()
    }

    /// `mget 12, fcall 3`: the most frequent first.
    pub fn text(&self) -> String {
        let mut calls: Vec<_> = self.calls.iter().collect();
        calls.sort_by_key(|(_, n)| std::cmp::Reverse(**n));
        calls.iter().take(6).map(|(name, n)| format!("{name} {n}")).collect::<Vec<_>>().join(", ")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_servers_counts_are_read_and_subtracted() {
        let before = Counts::read("# Commandstats\r\ncmdstat_mget:calls=3,usec=9,usec_per_call=3.00\r\n", "");
        let after = Counts::read(
            "cmdstat_mget:calls=10,usec=9\r\ncmdstat_info:calls=2,usec=1\r\ncmdstat_config|get:calls=1,usec=1\r\n",
            "used_cpu_sys:1.5\r\nused_cpu_user:0.25\r\nused_cpu_sys_children:9.0\r\n",
        );
        let added = after.since(&before);
        assert_eq!((added.of("mget"), added.of("info"), added.total(), added.cpu_s), (7, 0, 8, 1.75));
        assert_eq!(added.text(), "mget 7, config|get 1");
    }

    #[tokio::test]
    async fn every_kind_of_answer_is_read() {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let server = async {
            let (mut socket, _) = listener.accept().await.unwrap();
            let mut asked = [0; 20];
            socket.read_exact(&mut asked).await.unwrap();
            assert_eq!(&asked, b"*2\r\n$3\r\nGET\r\n$1\r\nk\r\n");
            socket.write_all(b"*4\r\n+OK\r\n:-2\r\n$2\r\nhi\r\n$-1\r\n").await.unwrap();
        };
        let client = async { Connection::open(port).await.unwrap().run(&["GET", "k"]).await };
        let (reply, ()) = tokio::join!(client, server);
        let text = |text: &str| Reply::Text(text.to_owned());
        assert_eq!(reply.unwrap(), Reply::Array(vec![text("OK"), Reply::Number(-2), text("hi"), Reply::Nil]));
    }
}
