//! The back end's side: publishes over one kept connection.

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use crate::wire::{Address, header, read_head};

/// A connection to the admin listener.
pub struct Publisher {
    stream: TcpStream,
    /// The headers that every request has.
    headers: String,
}

impl Publisher {
    pub async fn connect(admin: &Address, key: Option<&str>) -> Result<Publisher, String> {
        let stream = TcpStream::connect(admin.authority()).await.map_err(|error| format!("admin: {error}"))?;
        stream.set_nodelay(true).map_err(|error| error.to_string())?;
        let authorization = key.map(|key| format!("Authorization: Bearer {key}\r\n")).unwrap_or_default();
        let headers = format!("Host: {}\r\nContent-Type: application/json\r\n{authorization}", admin.authority());
        Ok(Publisher { stream, headers })
    }

    /// Publishes `data` (JSON text) and waits for the answer.
    pub async fn publish(&mut self, channel: &str, data: &str) -> Result<(), String> {
        self.post("/v1/publish", &item(channel, data)).await.map(drop)
    }

    /// As `publish`, with an idempotency key: where it fails, it may be repeated.
    pub async fn publish_keyed(&mut self, channel: &str, data: &str, key: &str) -> Result<(), String> {
        let item = item(channel, data);
        let keyed = format!(r#"{{"idempotency_key":{},{}"#, serde_json::Value::from(key), &item[1..]);
        self.post("/v1/publish", &keyed).await.map(drop)
    }

    /// Publishes these, channel and data, in one request; one that fails fails it.
    pub async fn publish_all(&mut self, events: &[(&str, &str)]) -> Result<(), String> {
        let items: Vec<String> = events.iter().map(|(channel, data)| item(channel, data)).collect();
        let answer = self.post("/v1/publish/batch", &format!("[{}]", items.join(","))).await?;
        if answer.contains("\"error\"") { Err(format!("publish: {answer}")) } else { Ok(()) }
    }

    async fn post(&mut self, path: &str, body: &str) -> Result<String, String> {
        let request = format!("POST {path} HTTP/1.1\r\n{}Content-Length: {}\r\n\r\n{body}", self.headers, body.len());
        self.stream.write_all(request.as_bytes()).await.map_err(|error| format!("publish: {error}"))?;
        let (head, mut body) = read_head(&mut self.stream).await?;
        let length: usize = header(&head, "content-length").and_then(|length| length.parse().ok()).unwrap_or(0);
        let read = body.len();
        body.resize(length.max(read), 0);
        self.stream.read_exact(&mut body[read..]).await.map_err(|error| format!("publish: {error}"))?;
        let body = String::from_utf8_lossy(&body).into_owned();
        match head.split(' ').nth(1) {
            Some("200") => Ok(body),
            _ => Err(format!("publish: {} {body}", head.lines().next().unwrap_or_default())),
        }
    }
}

fn item(channel: &str, data: &str) -> String {
    format!(r#"{{"channel":{},"data":{data}}}"#, serde_json::Value::from(channel))
}
