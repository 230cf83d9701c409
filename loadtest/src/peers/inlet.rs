//! How events get into a peer: over HTTP, in NATS' words, in MQTT's, by way of Redis. As much of
//! each as a publisher needs.

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use super::CHANNEL;
use crate::redis::Connection;
use crate::wire::{header, status};

/// A peer's way in.
pub enum Inlet {
    Http(Http),
    Nats(TcpStream),
    Mqtt(TcpStream),
    Redis(Connection),
}

/// One request an event over one kept connection.
pub struct Http {
    stream: TcpStream,
    /// Answers that were read before their turn.
    read: Vec<u8>,
    /// Request line and headers, without the length.
    head: String,
    /// The body for an event's data.
    body: fn(&str) -> String,
}

impl Inlet {
    pub async fn http(port: u16, head: String, body: fn(&str) -> String) -> Result<Inlet, String> {
        Ok(Inlet::Http(Http { stream: connect(port).await?, read: Vec::new(), head, body }))
    }

    pub async fn nats(port: u16) -> Result<Inlet, String> {
        let mut stream = connect(port).await?;
        send(&mut stream, b"CONNECT {\"verbose\":false}\r\nPING\r\n").await?;
        until(&mut stream, b"PONG").await?;
        Ok(Inlet::Nats(stream))
    }

    pub async fn mqtt(port: u16) -> Result<Inlet, String> {
        let mut stream = connect(port).await?;
        send(&mut stream, &mqtt_connect("publisher")).await?;
        until(&mut stream, MQTT_CONNECTED).await?;
        Ok(Inlet::Mqtt(stream))
    }

    /// Publishes these, in this order, in one go.
    pub async fn publish(&mut self, data: &[String]) -> Result<(), String> {
        match self {
            Inlet::Http(http) => http.publish(data).await,
            Inlet::Nats(stream) => {
                let all = data.iter().map(|data| format!("PUB {CHANNEL} {}\r\n{data}\r\n", data.len()));
                send(stream, all.collect::<String>().as_bytes()).await
            }
            Inlet::Mqtt(stream) => {
                let all: Vec<u8> = data.iter().flat_map(|data| mqtt_publish(data)).collect();
                send(stream, &all).await
            }
            Inlet::Redis(connection) => {
                let calls: Vec<Vec<&str>> = data.iter().map(|data| vec!["PUBLISH", CHANNEL, data]).collect();
                connection.run_all(&calls).await
            }
        }
    }
}

impl Http {
    async fn publish(&mut self, data: &[String]) -> Result<(), String> {
        let mut all = String::new();
        for data in data {
            let body = (self.body)(data);
            all.push_str(&format!("{}Content-Length: {}\r\n\r\n{body}", self.head, body.len()));
        }
        send(&mut self.stream, all.as_bytes()).await?;
        for _ in data {
            self.answer().await?;
        }
        Ok(())
    }

    /// Reads the next answer, which must be a yes.
    async fn answer(&mut self) -> Result<(), String> {
        let end = loop {
            if let Some(end) = self.read.windows(4).position(|four| four == b"\r\n\r\n") {
                break end + 4;
            }
            self.more().await?;
        };
        let head = String::from_utf8_lossy(&self.read[..end]).into_owned();
        let length: usize = header(&head, "content-length").and_then(|length| length.parse().ok()).unwrap_or(0);
        while self.read.len() < end + length {
            self.more().await?;
        }
        let rest = self.read.split_off(end + length);
        let answer = std::mem::replace(&mut self.read, rest);
        match status(&head) {
            Some(200..300) => Ok(()),
            _ => Err(format!("publish: {}", String::from_utf8_lossy(&answer))),
        }
    }

    async fn more(&mut self) -> Result<(), String> {
        match self.stream.read_buf(&mut self.read).await {
            Ok(0) => Err("publish: end of stream".to_owned()),
            Ok(_) => Ok(()),
            Err(error) => Err(format!("publish: {error}")),
        }
    }
}

async fn connect(port: u16) -> Result<TcpStream, String> {
    let stream = TcpStream::connect(("127.0.0.1", port)).await.map_err(|error| error.to_string())?;
    stream.set_nodelay(true).map_err(|error| error.to_string())?;
    Ok(stream)
}

async fn send(stream: &mut TcpStream, bytes: &[u8]) -> Result<(), String> {
    stream.write_all(bytes).await.map_err(|error| format!("publish: {error}"))
}

/// Reads until something that ends so was seen.
pub async fn until(stream: &mut TcpStream, wanted: &[u8]) -> Result<(), String> {
    let mut seen = Vec::new();
    while !crate::wire::contains(&seen, wanted) {
        if stream.read_buf(&mut seen).await.map_err(|error| error.to_string())? == 0 {
            return Err(format!("end of stream after {:?}", String::from_utf8_lossy(&seen)));
        }
    }
    Ok(())
}

/// CONNACK: accepted, no session from before.
pub const MQTT_CONNECTED: &[u8] = &[0x20, 2, 0, 0];
/// SUBACK of packet 1 with QoS 0.
pub const MQTT_SUBSCRIBED: &[u8] = &[0x90, 3, 0, 1, 0];

/// MQTT 3.1.1: a clean session, without pings.
pub fn mqtt_connect(name: &str) -> Vec<u8> {
    let mut body = vec![0, 4, b'M', b'Q', b'T', b'T', 4, 2, 0, 0];
    mqtt_text(name, &mut body);
    mqtt_packet(0x10, &body)
}

/// Asks for the channel, with QoS 0, as packet 1.
pub fn mqtt_subscribe() -> Vec<u8> {
    let mut body = vec![0, 1];
    mqtt_text(CHANNEL, &mut body);
    body.push(0);
    mqtt_packet(0x82, &body)
}

fn mqtt_publish(data: &str) -> Vec<u8> {
    let mut body = Vec::new();
    mqtt_text(CHANNEL, &mut body);
    body.extend_from_slice(data.as_bytes());
    mqtt_packet(0x30, &body)
}

fn mqtt_text(text: &str, out: &mut Vec<u8>) {
    out.extend_from_slice(&(text.len() as u16).to_be_bytes());
    out.extend_from_slice(text.as_bytes());
}

/// The length has seven bits a byte, the lowest first.
fn mqtt_packet(kind: u8, body: &[u8]) -> Vec<u8> {
    let (mut out, mut left) = (vec![kind], body.len());
    loop {
        let more = if left > 127 { 0x80 } else { 0 };
        out.push((left % 128) as u8 | more);
        left /= 128;
        if left == 0 {
            break;
        }
    }
    out.extend_from_slice(body);
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mqtt_lengths_have_seven_bits_a_byte() {
        assert_eq!(mqtt_packet(0x30, &[7; 3]), [0x30, 3, 7, 7, 7]);
        assert_eq!(mqtt_packet(0x30, &[0; 127])[..3], [0x30, 127, 0]);
        assert_eq!(mqtt_packet(0x30, &[0; 128])[..4], [0x30, 0x80, 1, 0]);
    }

    #[tokio::test]
    async fn answers_that_come_together_are_read_one_by_one_and_a_no_is_told() {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let server = async {
            let (mut socket, _) = listener.accept().await.unwrap();
            until(&mut socket, b"\r\n\r\n(b)").await.unwrap();
            let yes = "HTTP/1.1 202 Accepted\r\nContent-Length: 2\r\n\r\nok";
            socket.write_all(format!("{yes}{yes}HTTP/1.1 403 Forbidden\r\n\r\n").as_bytes()).await.unwrap();
            socket
        };
        let client = async {
            let mut inlet = Inlet::http(port, "POST / HTTP/1.1\r\n".to_owned(), |data| format!("({data})")).await?;
            inlet.publish(&["a".to_owned(), "b".to_owned()]).await?;
            Ok::<_, String>(inlet.publish(&["c".to_owned()]).await)
        };
        let (outcome, _socket) = tokio::join!(client, server);
        assert!(outcome.unwrap().unwrap_err().contains("403"));
    }
}
