use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

use super::*;
use crate::accept::Tcp;

/// Both ends of a connection; the second is what a listener of ours accepted.
async fn connected() -> (TcpStream, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let (client, accepted) = tokio::join!(TcpStream::connect(listener.local_addr().unwrap()), listener.accept());
    (client.unwrap(), accepted.unwrap().0)
}

/// Until the end of `socket`'s peer is here, without reading anything.
async fn until_over(socket: &TcpStream) {
    while !socket.ready(tokio::io::Interest::READABLE).await.unwrap().is_read_closed() {
        tokio::task::yield_now().await;
    }
}

#[tokio::test]
async fn who_is_there_has_not_left_whether_it_spoke_or_not() {
    let (mut client, socket) = connected().await;
    assert!(!Tcp::has_left(&socket));
    client.write_all(b"hello").await.unwrap();
    socket.readable().await.unwrap();
    assert!(!Tcp::has_left(&socket), "and nothing was taken");
    assert_eq!(socket.try_read(&mut [0; 16]).unwrap(), 5);
    assert!(!Tcp::has_left(&socket));
}

#[tokio::test]
async fn who_closed_shut_its_side_or_was_reset_has_left_once_all_it_said_is_read() {
    for end in ["close", "shutdown", "reset"] {
        let (mut client, socket) = connected().await;
        client.write_all(b"hello").await.unwrap();
        socket.readable().await.unwrap();
        assert_eq!(socket.try_read(&mut [0; 16]).unwrap(), 5);
        // Kept where only its side is shut.
        let mut kept = Some(client);
        match end {
            "shutdown" => kept.as_mut().unwrap().shutdown().await.unwrap(),
            "reset" => kept.take().unwrap().set_zero_linger().unwrap(),
            _ => drop(kept.take()),
        }
        until_over(&socket).await;
        assert!(Tcp::has_left(&socket), "{end}");
        drop(kept);
    }
}

#[tokio::test]
async fn an_unread_word_comes_before_the_end() {
    let (mut client, socket) = connected().await;
    client.write_all(b"hello").await.unwrap();
    drop(client);
    until_over(&socket).await;
    assert!(!Tcp::has_left(&socket));
    let mut caller = Caller::<Tcp>::new(socket);
    let mut said = String::new();
    caller.read_to_string(&mut said).await.unwrap();
    assert_eq!(said, "hello");
    assert!(Tcp::has_left(&caller.into_socket()));
}

/// What a caller's next read gives, without anything being awaited.
fn read_now(caller: &mut Caller<Tcp>) -> Poll<usize> {
    let mut bytes = [0; 16];
    let mut buffer = ReadBuf::new(&mut bytes);
    let read = Pin::new(caller).poll_read(&mut Context::from_waker(std::task::Waker::noop()), &mut buffer);
    read.map(|read| read.map(|()| buffer.filled().len()).unwrap())
}

#[tokio::test]
async fn the_read_behind_a_word_finds_the_end_before_readiness_tells_of_it() {
    let (mut client, socket) = connected().await;
    let mut caller = Caller::<Tcp>::new(socket);
    client.write_all(b"hello").await.unwrap();
    caller.socket.readable().await.unwrap();
    // Nothing is awaited from here on, so that nobody asks the system about readiness.
    assert_eq!(read_now(&mut caller), Poll::Ready(5));
    assert_eq!(read_now(&mut caller), Poll::Pending, "it is there");
    drop(client);
    while !Tcp::has_left(&caller.socket) {
        std::thread::yield_now();
    }
    assert_eq!(read_now(&mut caller), Poll::Pending, "one look behind each word is enough");
    caller.spoke = true;
    assert_eq!(read_now(&mut caller), Poll::Ready(0));
}
