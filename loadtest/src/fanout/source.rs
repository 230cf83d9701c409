//! Where events come from: Redis, as a back end's publish or another node's does; a gateway's admin
//! listener; a floor's control connection; a peer's own way.

use crate::admin::Publisher;
use crate::floor::Floor;
use crate::peers::Inlet;
use crate::readers;
use crate::redis::Connection;

/// Whoever publishes for a target.
pub enum Source {
    /// The function that back ends call; `log` is its key.
    Redis {
        connection: Connection,
        log: String,
    },
    Admin(Publisher),
    Floor {
        floor: Floor,
        frame: Frame,
    },
    Peer(Inlet),
}

/// One event on one channel.
#[derive(Clone, Copy)]
pub struct Event<'a> {
    pub channel: &'a str,
    pub seq: u64,
}

/// The bytes of one event on a wire, with the place of its number.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Frame {
    bytes: Vec<u8>,
    at: usize,
}

impl Frame {
    /// Takes bytes that a server sent for event 0.
    pub fn like(bytes: Vec<u8>) -> Result<Frame, String> {
        let marker = readers::MARKER;
        let at = bytes.windows(marker.len()).position(|window| window == marker);
        let at = at.ok_or("no event came where one was expected")? + marker.len();
        Ok(Frame { bytes, at })
    }

    /// A WebSocket text frame of an event's bare data.
    pub fn bare(n_bytes: usize) -> Frame {
        let data = readers::data(0, n_bytes);
        let mut bytes = vec![0x81];
        match u16::try_from(data.len()).expect("small data") {
            n @ 0..126 => bytes.push(n as u8),
            n => {
                bytes.push(126);
                bytes.extend_from_slice(&n.to_be_bytes());
            }
        }
        bytes.extend_from_slice(data.as_bytes());
        Frame::like(bytes).expect("the data holds its number")
    }

    pub fn n_bytes(&self) -> usize {
        self.bytes.len()
    }

    /// Appends the frame of event `seq`.
    fn append(&self, seq: u64, to: &mut Vec<u8>) {
        let from = to.len() + self.at;
        to.extend_from_slice(&self.bytes);
        let number = format!("{seq:010}");
        to[from..from + number.len()].copy_from_slice(number.as_bytes());
    }
}

impl Source {
    /// Publishes these in one go, in this order, each with `n_bytes` of data; returns when the server
    /// has them.
    pub async fn publish(&mut self, events: &[Event<'_>], n_bytes: usize) -> Result<(), String> {
        match self {
            Source::Redis { connection, log } => {
                let data: Vec<String> = events.iter().map(|event| readers::data(event.seq, n_bytes)).collect();
                let call = |(event, data)| {
                    let (event, data): (&Event<'_>, &String) = (event, data);
                    vec!["FCALL", "tidegate_publish", "1", log, event.channel, data.as_str()]
                };
                let calls: Vec<Vec<&str>> = events.iter().zip(&data).map(call).collect();
                connection.run_all(&calls).await
            }
            Source::Admin(publisher) => {
                let data: Vec<String> = events.iter().map(|event| readers::data(event.seq, n_bytes)).collect();
                let items: Vec<(&str, &str)> =
                    events.iter().zip(&data).map(|(event, data)| (event.channel, data.as_str())).collect();
                publisher.publish_all(&items).await
            }
            Source::Floor { floor, frame } => {
                let mut bytes = Vec::with_capacity(frame.n_bytes() * events.len());
                events.iter().for_each(|event| frame.append(event.seq, &mut bytes));
                floor.write(&bytes).await.map(drop)
            }
            Source::Peer(inlet) => {
                let data: Vec<String> = events.iter().map(|event| readers::data(event.seq, n_bytes)).collect();
                inlet.publish(&data).await
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_floors_frame_is_the_servers_with_another_number() {
        let frame = Frame::like(format!("\u{7f}~..{}", readers::data(0, 64)).into_bytes()).unwrap();
        let mut burst = Vec::new();
        (8..10).for_each(|seq| frame.append(seq, &mut burst));
        let wanted = [readers::data(8, 64), readers::data(9, 64)].map(|data| format!("\u{7f}~..{data}")).concat();
        assert_eq!(String::from_utf8(burst).unwrap(), wanted);
        assert!(Frame::like(b"{}".to_vec()).is_err());
    }

    #[test]
    fn a_bare_frame_has_the_shortest_length_form() {
        assert_eq!((Frame::bare(64).n_bytes(), Frame::bare(128).n_bytes()), (66, 132));
    }
}
