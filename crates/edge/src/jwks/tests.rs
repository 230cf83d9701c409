//! Issuers on free ports that answer with the test's own bytes, and files that change.

use std::fs;
use std::net::SocketAddr;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::Command;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use hub::auth::{AuthConfig, KeySource, RefreshConfig, UserChannel, Verifier};
use hub::clock::Dice;
use rustls::ServerConfig;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpListener;
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};
use tokio_rustls::TlsAcceptor;

use super::*;

/// The longest that anything may take; nothing is promised by it.
const SOON: Duration = Duration::from_secs(20);
const SET: &str = r#"{"keys":[]}"#;

/// Answers every connection with the same bytes, then waits for the other side to end it, or ends
/// it itself.
struct Site {
    addr: SocketAddr,
    heads: Arc<Mutex<Vec<String>>>,
    /// Of the last answer.
    n_sent: Arc<Mutex<usize>>,
    _tasks: JoinSet<()>,
}

#[derive(Clone, Copy, PartialEq)]
enum Then {
    End,
    Hold,
}

impl Site {
    async fn answering(answer: impl Into<Vec<u8>>, then: Then) -> Self {
        Self::behind(None, answer.into(), then).await
    }

    async fn behind(tls: Option<TlsAcceptor>, answer: Vec<u8>, then: Then) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let addr = listener.local_addr().unwrap();
        let (heads, n_sent) = (Arc::<Mutex<Vec<String>>>::default(), Arc::<Mutex<usize>>::default());
        let mut tasks = JoinSet::new();
        let (heads_too, n_sent_too) = (heads.clone(), n_sent.clone());
        tasks.spawn(async move {
            while let Ok((socket, _)) = listener.accept().await {
                match &tls {
                    None => exchange(socket, &answer, then, &heads_too, &n_sent_too).await,
                    Some(tls) => {
                        let Ok(socket) = tls.accept(socket).await else { continue };
                        exchange(socket, &answer, then, &heads_too, &n_sent_too).await;
                    }
                }
            }
        });
        Self { addr, heads, n_sent, _tasks: tasks }
    }

    fn heads(&self) -> Vec<String> {
        self.heads.lock().unwrap().clone()
    }

    async fn fetch(&self) -> Result<String, FetchError> {
        fetch(&format!("http://{}/keys", self.addr)).await
    }
}

async fn exchange(
    mut socket: impl AsyncRead + AsyncWrite + Unpin,
    answer: &[u8],
    then: Then,
    heads: &Mutex<Vec<String>>,
    n_sent: &Mutex<usize>,
) {
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        match socket.read_u8().await {
            Ok(byte) => head.push(byte),
            Err(_) => return,
        }
    }
    heads.lock().unwrap().push(String::from_utf8(head).unwrap());
    *n_sent.lock().unwrap() = 0;
    for piece in answer.chunks(16 * 1024) {
        if socket.write_all(piece).await.is_err() {
            return;
        }
        *n_sent.lock().unwrap() += piece.len();
    }
    let _ = socket.flush().await;
    match then {
        Then::End => drop(socket.shutdown().await),
        Then::Hold => while socket.read_u8().await.is_ok() {},
    }
}

async fn fetch(url: &str) -> Result<String, FetchError> {
    timeout(SOON, UrlFetcher::new(url).unwrap().fetch()).await.expect("an answer in time")
}

fn answer(status: &str, headers: &str, body: &str) -> String {
    format!("HTTP/1.1 {status}\r\n{headers}Content-Length: {}\r\n\r\n{body}", body.len())
}

fn is_refused(outcome: &Result<String, FetchError>) -> bool {
    matches!(outcome, Err(FetchError::Refused(_)))
}

fn is_unreachable(outcome: &Result<String, FetchError>) -> bool {
    matches!(outcome, Err(FetchError::Unreachable(_)))
}

const TOO_LARGE: Result<String, FetchError> = Err(FetchError::TooLarge { max_bytes: MAX_SET_BYTES });

#[tokio::test]
async fn a_body_is_the_set_however_it_is_framed_and_called() {
    let chunked = format!("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nb\r\n{SET}\r\n0\r\n\r\n");
    for (framed, then) in [
        (answer("200 OK", "Content-Type: application/json\r\n", SET), Then::Hold),
        (answer("200 OK", "Content-Type: text/html\r\n", SET), Then::Hold),
        (answer("200 OK", "", SET), Then::End),
        (format!("HTTP/1.1 103 Early Hints\r\n\r\n{}", answer("200 OK", "", SET)), Then::Hold),
        (chunked, Then::Hold),
        (format!("HTTP/1.1 200 OK\r\n\r\n{SET}"), Then::End),
        (format!("HTTP/1.0 200 OK\r\n\r\n{SET}"), Then::End),
    ] {
        let site = Site::answering(framed.clone(), then).await;
        assert_eq!(site.fetch().await.as_deref(), Ok(SET), "{framed}");
    }
    let empty = Site::answering(answer("200 OK", "", ""), Then::Hold).await;
    assert_eq!(empty.fetch().await.as_deref(), Ok(""), "what it is worth is not asked here");
}

#[tokio::test]
async fn the_request_is_for_the_urls_path_and_query_and_brings_nothing_else() {
    let site = Site::answering(answer("200 OK", "", SET), Then::Hold).await;
    let addr = site.addr;
    for (path, line) in [
        ("", "GET / "),
        ("/", "GET / "),
        ("/a/b?x=1&y=%20", "GET /a/b?x=1&y=%20 "),
        ("?x", "GET /?x "),
        ("/a#f", "GET /a "),
    ] {
        fetch(&format!("http://{addr}{path}")).await.unwrap();
        let head = site.heads().pop().unwrap().to_lowercase();
        assert!(head.starts_with(&format!("{}http/1.1\r\n", line.to_lowercase())), "{head}");
        assert!(
            head.contains(&format!("\r\nhost: {addr}\r\n")) && head.contains("\r\nconnection: close\r\n"),
            "{head}"
        );
        assert!(!head.contains("authorization") && !head.contains("cookie"), "{head}");
    }
}

#[tokio::test]
async fn any_other_status_is_no_set_whatever_the_body_says() {
    for status in ["500 Oops", "404 Not Found", "204 No Content", "206 Partial Content", "304 Not Modified", "401 No"] {
        let body = if status.starts_with(['2', '3']) { "" } else { SET };
        let site = Site::answering(answer(status, "", body), Then::Hold).await;
        let outcome = site.fetch().await;
        assert!(is_refused(&outcome), "{status}: {outcome:?}");
    }
}

#[tokio::test]
async fn a_redirect_is_refused_and_not_followed() {
    let elsewhere = Site::answering(answer("200 OK", "", SET), Then::Hold).await;
    for status in [301, 302, 303, 307, 308] {
        let location = format!("Location: http://{}/keys\r\n", elsewhere.addr);
        let site = Site::answering(answer(&format!("{status} Moved"), &location, ""), Then::Hold).await;
        let outcome = site.fetch().await;
        assert!(is_refused(&outcome), "{outcome:?}");
        assert!(outcome.unwrap_err().to_string().contains("redirect"), "the operator is told why");
    }
    assert_eq!(elsewhere.heads().len(), 0);
}

#[tokio::test]
async fn a_body_may_have_one_mebibyte_and_no_byte_more() {
    let full = "x".repeat(MAX_SET_BYTES);
    let over = format!("{full}y");
    let chunks = |body: &str| {
        let mut text = "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n".to_owned();
        for chunk in body.as_bytes().chunks(50_000) {
            text += &format!("{:x}\r\n{}\r\n", chunk.len(), str::from_utf8(chunk).unwrap());
        }
        text + "0\r\n\r\n"
    };
    for (framed, is_good) in [
        (answer("200 OK", "", &full), true),
        (answer("200 OK", "", &over), false),
        (chunks(&full), true),
        (chunks(&over), false),
    ] {
        let site = Site::answering(framed, Then::Hold).await;
        let outcome = site.fetch().await;
        assert_eq!(outcome, if is_good { Ok(full.clone()) } else { TOO_LARGE });
    }
}

#[tokio::test]
async fn of_a_huge_body_no_more_is_taken_than_the_bound() {
    const HUGE: usize = 50 << 20;
    for head in ["HTTP/1.1 200 OK\r\n\r\n".to_owned(), format!("HTTP/1.1 200 OK\r\nContent-Length: {HUGE}\r\n\r\n")] {
        let mut bytes = head.into_bytes();
        bytes.resize(bytes.len() + HUGE, b' ');
        let site = Site::answering(bytes, Then::End).await;
        assert_eq!(site.fetch().await, TOO_LARGE);
        let n_sent = *site.n_sent.lock().unwrap();
        assert!(n_sent < HUGE / 2, "what the sockets held, and no more: {n_sent}");
    }
}

#[tokio::test]
async fn what_is_no_whole_answer_is_none() {
    for broken in [
        "",
        "SSH-2.0-OpenSSH_9\r\n",
        "HTTP/1.1 200",
        "HTTP/1.1 200 OK\r\nContent-Length: 11\r\n\r\n{\"keys\"",
        "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nb\r\n{\"keys\":[]}",
        "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
    ] {
        let site = Site::answering(broken, Then::End).await;
        let outcome = site.fetch().await;
        assert!(is_refused(&outcome), "{broken}: {outcome:?}");
    }
    let latin = Site::answering(b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\n\xe9".to_vec(), Then::Hold).await;
    assert_eq!(latin.fetch().await, Err(FetchError::NoText));
}

#[tokio::test]
async fn nobody_there_is_said_without_the_url() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let addr = listener.local_addr().unwrap();
    drop(listener);
    for url in [format!("http://{addr}/hidden?key=hidden"), format!("https://{addr}/hidden?key=hidden")] {
        let outcome = fetch(&url).await;
        assert!(is_unreachable(&outcome), "{outcome:?}");
        assert!(!outcome.unwrap_err().to_string().contains("hidden"));
    }
    let oops = Site::answering(answer("500 hidden", "Location: hidden\r\n", "hidden"), Then::Hold).await;
    let error = fetch(&format!("http://{}/hidden?key=hidden", oops.addr)).await.unwrap_err().to_string();
    assert!(!error.contains("hidden"), "{error}");
}

#[test]
fn a_url_is_http_or_https_with_a_host_and_without_a_user() {
    for good in [
        "http://a",
        "https://a.example:8443/k?v=1",
        "http://[::1]:80/",
        "https://[::1]/",
        "HTTP://a/",
        "https://1.2.3.4",
    ] {
        assert!(UrlFetcher::new(good).is_ok(), "{good}");
    }
    for bad in ["", "a", "/keys", "ftp://a/", "file:///keys", "http://", "http:///keys", "https://a b/", "https://-_*/"]
    {
        assert_eq!(UrlFetcher::new(bad).map(|_| ()), Err(UrlError::NotHttp), "{bad}");
    }
    for bad in ["http://u@a/", "https://u:p@a/", "https://:p@a/", "https://@a/"] {
        assert_eq!(UrlFetcher::new(bad).map(|_| ()), Err(UrlError::Credentials), "{bad}");
    }
}

/// A self-signed certificate for `localhost`, made by OpenSSL.
fn certificate() -> (CertificateDer<'static>, PrivateKeyDer<'static>) {
    let output = Command::new("openssl")
        .args(["req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "30"])
        .args(["-subj", "/CN=test", "-addext", "subjectAltName=DNS:localhost"])
        .args(["-addext", "basicConstraints=critical,CA:FALSE", "-keyout", "-", "-out", "-"])
        .output()
        .expect("openssl is installed");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let pem = output.stdout;
    (CertificateDer::from_pem_slice(&pem).unwrap(), PrivateKeyDer::from_pem_slice(&pem).unwrap())
}

#[tokio::test]
async fn over_tls_only_a_certificate_that_is_trusted_and_of_that_name_counts() {
    let (certificate, key) = certificate();
    let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
    let config = ServerConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_no_client_auth()
        .with_single_cert(vec![certificate.clone()], key)
        .unwrap();
    let tls = TlsAcceptor::from(Arc::new(config));
    let site = Site::behind(Some(tls), answer("200 OK", "", SET).into_bytes(), Then::Hold).await;
    let port = site.addr.port();
    let trusting = |host: &str, certificates: &[CertificateDer<'static>]| {
        let mut roots = RootCertStore::empty();
        roots.add_parsable_certificates(certificates.iter().cloned());
        UrlFetcher::trusting(&format!("https://{host}:{port}/keys"), || roots).unwrap()
    };
    let ours = std::slice::from_ref(&certificate);
    assert_eq!(trusting("localhost", ours).fetch().await.as_deref(), Ok(SET));
    for (host, trusted) in [("localhost", &[][..]), ("127.0.0.1", ours)] {
        let outcome = trusting(host, trusted).fetch().await;
        assert!(is_unreachable(&outcome), "{outcome:?}");
        let why = outcome.unwrap_err().to_string();
        assert!(why.contains("certificate"), "the operator is told why: {why}");
    }
    assert!(is_unreachable(&fetch(&format!("https://localhost:{port}/keys")).await), "by the system's store");
    assert_eq!(site.heads().len(), 1, "nobody else was asked anything");
    // Plain HTTP where TLS is awaited, and the other way round.
    assert!(fetch(&format!("http://localhost:{port}/keys")).await.is_err());
    let plain = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("https://{}/keys", plain.local_addr().unwrap());
    let complain = async {
        let (mut socket, _) = plain.accept().await.unwrap();
        socket.write_all(b"HTTP/1.1 400 Bad Request\r\n\r\n").await.unwrap();
        socket
    };
    assert!(is_unreachable(&tokio::join!(fetch(&url), complain).0));
}

/// A directory of the test's own, gone with the value.
struct TempDir(PathBuf);

impl TempDir {
    fn new(name: &str) -> Self {
        let path = std::env::temp_dir().join(format!("tidegate-jwks-{}-{name}", std::process::id()));
        fs::create_dir_all(&path).unwrap();
        Self(path)
    }

    fn path(&self) -> &Path {
        &self.0
    }
}

impl Drop for TempDir {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// Fetches once a time of `timeout`, until it has failed once.
async fn fails_in_time(fetcher: impl KeyFetcher) {
    let config = AuthConfig {
        keys: KeySource::Awaited,
        algorithms: None,
        issuer: None,
        audience: None,
        leeway: Duration::ZERO,
        user_channel: UserChannel::On,
        max_channels: 100,
        anonymous: None,
    };
    let small = Duration::from_millis(50);
    let refresh = RefreshConfig { every: small, cool_down: small, timeout: small };
    let (verifier, keeper) = Verifier::refreshed(config, refresh, Box::new(fetcher), Dice::seeded(1)).unwrap();
    let failed = async {
        while verifier.key_state().unwrap().n_failures == 0 {
            sleep(Duration::from_millis(1)).await;
        }
    };
    tokio::select! {
        () = keeper.run() => unreachable!("it never ends"),
        failed = timeout(SOON, failed) => failed.expect("given up in time"),
    }
}

#[tokio::test]
async fn an_issuer_that_never_ends_is_given_up() {
    for stalled in ["", "HTTP/1.1 200 OK\r\n", "HTTP/1.1 200 OK\r\nContent-Length: 11\r\n\r\n{\"keys\""] {
        let site = Site::answering(stalled, Then::Hold).await;
        fails_in_time(UrlFetcher::new(&format!("http://{}/", site.addr)).unwrap()).await;
    }
    // Nobody ever speaks TLS there.
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("https://{}/", listener.local_addr().unwrap());
    fails_in_time(UrlFetcher::new(&url).unwrap()).await;
}

#[tokio::test]
async fn a_page_instead_of_a_set_is_a_failure() {
    for page in ["<html></html>", "", SET, "null"] {
        let site = Site::answering(answer("200 OK", "", page), Then::Hold).await;
        fails_in_time(UrlFetcher::new(&format!("http://{}/", site.addr)).unwrap()).await;
    }
}

#[tokio::test]
async fn a_file_is_read_as_it_is_now_also_behind_an_exchanged_link() {
    let dir = TempDir::new("links");
    let path = |name: &str| dir.path().join(name);
    let fetcher = FileFetcher::new(path("keys.json"));
    assert!(is_unreachable(&fetcher.fetch().await), "not there yet");
    fs::create_dir(path("v1")).unwrap();
    fs::write(path("v1/keys.json"), "one").unwrap();
    fs::create_dir(path("v2")).unwrap();
    fs::write(path("v2/keys.json"), "two").unwrap();
    symlink("v1", path("data")).unwrap();
    symlink("data/keys.json", path("keys.json")).unwrap();
    assert_eq!(fetcher.fetch().await.as_deref(), Ok("one"));
    symlink("v2", path("next")).unwrap();
    fs::rename(path("next"), path("data")).unwrap();
    assert_eq!(fetcher.fetch().await.as_deref(), Ok("two"));
    fs::write(path("v2/keys.json"), "three").unwrap();
    assert_eq!(fetcher.fetch().await.as_deref(), Ok("three"));
    fs::remove_file(path("v2/keys.json")).unwrap();
    let gone = fetcher.fetch().await.unwrap_err().to_string();
    assert!(!gone.contains("keys.json"), "{gone}");
}

#[tokio::test]
async fn a_file_is_bounded_and_a_file() {
    let dir = TempDir::new("bounds");
    let path = dir.path().join("keys.json");
    let fetcher = FileFetcher::new(&path);
    for (n_bytes, is_good) in [(MAX_SET_BYTES - 1, true), (MAX_SET_BYTES, true), (MAX_SET_BYTES + 1, false)] {
        fs::write(&path, "x".repeat(n_bytes)).unwrap();
        let read = fetcher.fetch().await.map(|text| text.len());
        assert_eq!(read, if is_good { Ok(n_bytes) } else { TOO_LARGE.map(|_| 0) });
    }
    fs::write(&path, b"\xe9").unwrap();
    assert_eq!(fetcher.fetch().await, Err(FetchError::NoText));
    assert!(is_unreachable(&FileFetcher::new(dir.path()).fetch().await), "a directory");
    let pipe = dir.path().join("pipe");
    assert!(Command::new("mkfifo").arg(&pipe).status().unwrap().success());
    let outcome = timeout(SOON, FileFetcher::new(&pipe).fetch()).await.expect("a pipe is not waited for");
    assert!(is_unreachable(&outcome));
}
