//! The back end's side: publishes over one kept connection.

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use crate::wire::{Address, header, read_head};

/// A connection to the admin listener.
pub struct Publisher {
    stream: TcpStream,
    head: String,
}

impl Publisher {
    pub async fn connect(admin: &Address, key: Option<&str>) -> Result<Publisher, String> {
        let stream = TcpStream::connect(admin.authority()).await.map_err(|error| format!("admin: {error}"))?;
        stream.set_nodelay(true).map_err(|error| error.to_string())?;
        let authorization = key.map(|key| format!("Authorization: Bearer {key}\r\n")).unwrap_or_default();
        let head = format!(
            "POST /v1/publish HTTP/1.1\r\nHost: {}\r\nContent-Type: application/json\r\n{authorization}",
            admin.authority()
        );
        Ok(Publisher { stream, head })
    }

    /// Publishes `data` (JSON text) and waits for the answer.
    pub async fn publish(&mut self, channel: &str, data: &str) -> Result<(), String> {
        let body = format!(r#"{{"channel":{},"data":{data}}}"#, serde_json::Value::from(channel));
        let request = format!("{}Content-Length: {}\r\n\r\n{body}", self.head, body.len());
        self.stream.write_all(request.as_bytes()).await.map_err(|error| format!("publish: {error}"))?;
        let (head, mut body) = read_head(&mut self.stream).await?;
        let length: usize = header(&head, "content-length").and_then(|length| length.parse().ok()).unwrap_or(0);
        let read = body.len();
        body.resize(length.max(read), 0);
        self.stream.read_exact(&mut body[read..]).await.map_err(|error| format!("publish: {error}"))?;
        match head.split(' ').nth(1) {
            Some("200") => Ok(()),
            _ => {
                Err(format!("publish: {} {}", head.lines().next().unwrap_or_default(), String::from_utf8_lossy(&body)))
            }
        }
    }
}
