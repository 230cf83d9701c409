//! From a URL to connections. Decides which URLs are understood and how long a dial may take;
//! everything that speaks to Redis gets its connection here, set up in full or not at all.

use std::io::{self, ErrorKind};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::select_ok;
use hub::clock::Dice;
use redis::aio::MultiplexedConnection;
use redis::{
    AsyncConnectionConfig, Client, ConnectionAddr, ConnectionInfo, IntoConnectionInfo, RedisError, TlsCertificates,
};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, ServerName};
use rustls::{ClientConfig, RootCertStore};
use tokio::net::{TcpStream, UnixStream, lookup_host};
use tokio::sync::Notify;
use tokio_rustls::TlsConnector;

use crate::wire::{self, Broken, Input, Output, Said, Stream};

/// What of the configuration names the server. Hidden in every `Debug`.
pub(crate) struct Address<'a> {
    pub(crate) url: &'a str,
    pub(crate) password: Option<&'a str>,
    pub(crate) ca_file: Option<&'a PathBuf>,
}

/// The configuration cannot work, whatever Redis does. Never holds the URL.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// The scheme is one that this version cannot serve.
    #[error("{0} is not supported yet")]
    Unsupported(&'static str),
    /// No Redis URL.
    #[error("the Redis URL is not understood: {0}")]
    BadUrl(String),
    /// The CA file cannot be read.
    #[error("the Redis CA file cannot be read: {0}")]
    CaFile(#[source] io::Error),
    /// The CA file holds no certificate, or a broken one.
    #[error("the Redis CA file holds no certificate in PEM form")]
    NoCertificate,
    /// The prefix is empty or would break the key names.
    #[error("the Redis prefix must have 1 to 100 bytes and no white space")]
    Prefix,
}

/// Dials one server, for commands (RESP2) or for the pub/sub link (RESP3: a PING is answered by the
/// same word whether anything is subscribed or not).
#[derive(Clone)]
pub(crate) struct Dialer {
    commands: Client,
    /// For the link; where the URL says so.
    tls: Option<TlsConnector>,
    connect_timeout: Duration,
    there: Arc<Notify>,
}

impl Dialer {
    pub(crate) fn new(address: &Address<'_>, timeout: Duration) -> Result<Self, ConfigError> {
        let info = connection_info(address)?;
        let root = address.ca_file.map(std::fs::read).transpose().map_err(ConfigError::CaFile)?;
        let tls = match info.addr() {
            ConnectionAddr::TcpTls { .. } => Some(connector(root.as_deref())?),
            _ => None,
        };
        Ok(Self {
            commands: client(info, root)?,
            tls,
            connect_timeout: connect_timeout(timeout),
            there: Arc::default(),
        })
    }

    /// For a pool that dials by itself.
    pub(crate) fn info(&self) -> ConnectionInfo {
        self.commands.get_connection_info().clone()
    }

    /// How long one dial may take, name resolution, TLS and AUTH included.
    pub(crate) fn connect_timeout(&self) -> Duration {
        self.connect_timeout
    }

    /// A connection for commands. Without a response time-out of its own: callers have deadlines.
    /// PING last: a server that is loading, or wants a password, accepts connections already.
    pub(crate) async fn commands(&self) -> Result<MultiplexedConnection, RedisError> {
        let opened = tokio::time::timeout(self.connect_timeout, async {
            let mut connection =
                self.commands.get_multiplexed_async_connection_with_config(&self.async_config()).await?;
            redis::cmd("PING").exec_async(&mut connection).await?;
            Ok(connection)
        });
        let opened = opened.await.unwrap_or_else(|_| Err(io::Error::from(ErrorKind::TimedOut).into()));
        if opened.is_ok() {
            self.there.notify_waiters();
        }
        opened
    }

    /// A connection for the pub/sub link, set up like one for commands. Messages of more than
    /// `max_payload` bytes are skipped.
    pub(crate) async fn link(&self, max_payload: usize) -> Result<(Input, Output), Fault> {
        let opened = tokio::time::timeout(self.connect_timeout, async {
            let (mut input, mut output) = wire::split(self.stream().await?, max_payload);
            let settings = self.commands.get_connection_info().redis_settings();
            match (settings.username(), settings.password()) {
                (user, Some(password)) => {
                    output.command("HELLO", &["3", "AUTH", user.unwrap_or("default"), password]);
                }
                (_, None) => output.command("HELLO", &["3"]),
            }
            output.command("PING", &[""; 0]);
            output.flush().await?;
            loop {
                match input.next()? {
                    Some(Said::Pong) => return Ok((input, output)),
                    Some(Said::Error(line)) => return Err(Fault::of_greeting(line)),
                    Some(_) => {}
                    None => input.fill().await?,
                }
            }
        });
        let opened = opened.await.unwrap_or_else(|_| Err(Fault::Broken(ErrorKind::TimedOut.to_string())));
        if opened.is_ok() {
            self.there.notify_waiters();
        }
        opened
    }

    async fn stream(&self) -> Result<Box<dyn Stream>, Broken> {
        match self.commands.get_connection_info().addr() {
            ConnectionAddr::Tcp(host, port) => Ok(Box::new(tcp(host, *port).await?)),
            ConnectionAddr::TcpTls { host, port, .. } => {
                let connector = self.tls.as_ref().expect("it was made for such an address");
                let name = ServerName::try_from(host.clone()).map_err(|_| io::Error::from(ErrorKind::InvalidInput))?;
                Ok(Box::new(connector.connect(name, tcp(host, *port).await?).await?))
            }
            ConnectionAddr::Unix(path) => Ok(Box::new(UnixStream::connect(path).await?)),
            // A later version of the library may know more; no URL that is accepted above names one.
            _ => Err(io::Error::from(ErrorKind::Unsupported).into()),
        }
    }

    /// The settings of every connection for commands.
    pub(crate) fn async_config(&self) -> AsyncConnectionConfig {
        AsyncConnectionConfig::new()
            .set_connection_timeout(Some(self.connect_timeout))
            .set_response_timeout(None)
            .set_pipeline_buffer_size(512)
    }

    /// Waits so long, or until somebody else's dial succeeds: what was refused need not wait on then.
    /// For failed dials only; a connection that was lost after it stood keeps its whole wait.
    pub(crate) async fn pause(&self, wait: Duration) {
        // Either arm may be dropped: a success that is missed costs the rest of the wait.
        tokio::select! {
            () = self.there.notified() => {}
            () = tokio::time::sleep(wait) => {}
        }
    }
}

/// Four commands' worth, as TLS and AUTH take round trips, and at least a second.
fn connect_timeout(timeout: Duration) -> Duration {
    (timeout * 4).max(Duration::from_secs(1))
}

fn connection_info(address: &Address<'_>) -> Result<ConnectionInfo, ConfigError> {
    let scheme = address.url.split_once("://").map_or("", |(scheme, _)| scheme);
    match scheme {
        "redis" | "unix" | "redis+unix" => {}
        // The process's crypto library; somebody else may have installed it already.
        "rediss" => drop(rustls::crypto::aws_lc_rs::default_provider().install_default()),
        "redis+cluster" | "rediss+cluster" => return Err(ConfigError::Unsupported("redis+cluster://")),
        "redis+sentinel" | "rediss+sentinel" => return Err(ConfigError::Unsupported("redis+sentinel://")),
        _ => return Err(ConfigError::BadUrl("expected redis://, rediss:// or unix://".to_owned())),
    }
    let info = address.url.into_connection_info().map_err(|e| ConfigError::BadUrl(e.category().to_owned()))?;
    Ok(match address.password {
        None => info,
        Some(password) => {
            let settings = info.redis_settings().clone().set_password(password);
            info.set_redis_settings(settings)
        }
    })
}

/// All addresses of the name at once, as the library does for commands: one that swallows everything must not
/// stand before one that lives.
async fn tcp(host: &str, port: u16) -> io::Result<TcpStream> {
    let dials: Vec<_> = lookup_host((host, port)).await?.map(|at| Box::pin(TcpStream::connect(at))).collect();
    if dials.is_empty() {
        return Err(ErrorKind::NotFound.into());
    }
    let (stream, _slower) = select_ok(dials).await?;
    stream.set_nodelay(true)?;
    Ok(stream)
}

/// Trusts the CA of this PEM text alone, or whom the web trusts: as the library does for commands.
fn connector(root: Option<&[u8]>) -> Result<TlsConnector, ConfigError> {
    let mut roots = RootCertStore::empty();
    match root {
        None => roots.extend(webpki_roots::TLS_SERVER_ROOTS.iter().cloned()),
        Some(pem) => {
            for certificate in CertificateDer::pem_slice_iter(pem) {
                let certificate = certificate.map_err(|_| ConfigError::NoCertificate)?;
                roots.add(certificate).map_err(|_| ConfigError::NoCertificate)?;
            }
            if roots.is_empty() {
                return Err(ConfigError::NoCertificate);
            }
        }
    }
    let config = ClientConfig::builder().with_root_certificates(roots).with_no_client_auth();
    Ok(TlsConnector::from(Arc::new(config)))
}

fn client(info: ConnectionInfo, root_cert: Option<Vec<u8>>) -> Result<Client, ConfigError> {
    let client = match root_cert {
        None => Client::open(info),
        Some(root) => Client::build_with_tls(info, TlsCertificates { client_tls: None, root_cert: Some(root) }),
    };
    client.map_err(|e| ConfigError::BadUrl(e.category().to_owned()))
}

/// How long to wait before the next dial: doubling to about two seconds, never in step with others.
pub(crate) struct Backoff {
    dice: Dice,
    failures: u32,
}

impl Backoff {
    /// A connection that lived so long was a good one.
    pub(crate) const GOOD: Duration = Duration::from_secs(2);

    pub(crate) fn new(dice: Dice) -> Self {
        Self { dice, failures: 0 }
    }

    pub(crate) fn next(&mut self) -> Duration {
        let whole = Duration::from_millis(50) * 2u32.saturating_pow(self.failures).min(40);
        self.failures = self.failures.saturating_add(1);
        self.dice.between(whole / 2, whole)
    }

    pub(crate) fn reset(&mut self) {
        self.failures = 0;
    }
}

/// What an error means to whoever made the call.
#[derive(Clone, Debug)]
pub(crate) enum Fault {
    /// The library is not loaded.
    Missing,
    /// A Function refused its arguments; nothing was changed.
    Refused(String),
    /// The server takes no writes (demoted, or a replica): another one does.
    Demoted,
    /// The connection is useless; the call may or may not have been executed.
    Broken(String),
    /// No answer in time, or an answer that says "not now".
    Down(String),
}

impl Fault {
    pub(crate) fn of(error: &RedisError) -> Self {
        match error.code() {
            Some(code) => Fault::said(code, error.detail().unwrap_or_default()),
            None if error.is_io_error() || error.is_unrecoverable_error() => Fault::Broken(plain(error)),
            None => Fault::Down(plain(error)),
        }
    }

    /// What the server itself refused, as it stands on the wire.
    pub(crate) fn of_line(line: &[u8]) -> Self {
        let line = String::from_utf8_lossy(line);
        let (code, detail) = line.split_once(' ').unwrap_or((&line, ""));
        Fault::said(code, detail)
    }

    /// What the server refused before it knew us. Its word alone: an error about HELLO may repeat what
    /// was sent with it, and that is the password.
    fn of_greeting(line: &[u8]) -> Self {
        let code = line.split(|&b| b == b' ').next().unwrap_or_default();
        Fault::Broken(format!("HELLO 3 was refused: {}", String::from_utf8_lossy(code)))
    }

    fn said(code: &str, detail: &str) -> Self {
        // An unknown command is told with its arguments, which are somebody's data.
        let detail = detail.split(", with args beginning").next().unwrap_or_default();
        match code {
            "READONLY" => Fault::Demoted,
            "ERR" if detail.contains("Function not found") => Fault::Missing,
            "LOADING" | "MASTERDOWN" | "NOAUTH" | "WRONGPASS" | "CLUSTERDOWN" => Fault::Broken(code.to_owned()),
            "TOOLARGE" => Fault::Refused(format!("{code} {detail}")),
            code if code.starts_with("BAD") => Fault::Refused(format!("{code} {detail}")),
            code => Fault::Down(format!("{code} {detail}")),
        }
    }

    /// Is the connection that gave this of no more use?
    pub(crate) fn is_fatal(&self) -> bool {
        matches!(self, Fault::Demoted | Fault::Broken(_))
    }

    pub(crate) fn text(&self) -> String {
        match self {
            Fault::Missing => "the function library is not loaded".to_owned(),
            Fault::Demoted => "READONLY".to_owned(),
            Fault::Refused(text) | Fault::Broken(text) | Fault::Down(text) => text.clone(),
        }
    }
}

/// The library's word, with the system's where there is one ("connection refused"). Neither holds
/// an address or a secret.
fn plain(error: &RedisError) -> String {
    // What the library calls the source is its shared pointer to it, which is an error as well.
    type Shared = Arc<dyn std::error::Error + Send + Sync>;
    let source = std::error::Error::source(error).and_then(|source| source.downcast_ref::<Shared>());
    match source.and_then(|shared| shared.downcast_ref::<io::Error>()) {
        Some(io) => format!("{}: {}", error.category(), cause(io)),
        None => error.category().to_owned(),
    }
}

/// The kind alone: the system's text may hold an address. Of TLS, what is wrong with the server's
/// certificate: its kind would be no more than "invalid data".
fn cause(io: &io::Error) -> String {
    use rustls::CertificateError::{Expired, ExpiredContext, NotValidForName, NotValidForNameContext, UnknownIssuer};
    let Some(tls) = io.get_ref().and_then(|inner| inner.downcast_ref::<rustls::Error>()) else {
        return io.kind().to_string();
    };
    let rustls::Error::InvalidCertificate(fault) = tls else { return "TLS failed".to_owned() };
    let fault = match fault {
        UnknownIssuer => "is of no issuer that is trusted here",
        NotValidForName | NotValidForNameContext { .. } => "is for another name",
        Expired | ExpiredContext { .. } => "has expired",
        _ => "is not valid",
    };
    format!("the server's certificate {fault}")
}

impl From<Broken> for Fault {
    fn from(broken: Broken) -> Self {
        Fault::Broken(match broken {
            Broken::Io(io) => format!("no connection: {}", cause(&io)),
            broken => broken.to_string(),
        })
    }
}

impl From<Fault> for hub::backplane::Unavailable {
    fn from(fault: Fault) -> Self {
        hub::backplane::Unavailable(fault.text())
    }
}

/// Shared by everything that dials.
pub(crate) type SharedDialer = Arc<Dialer>;

#[cfg(test)]
mod tests {
    use testkit::redis::RedisServer;
    use testkit::temp::TempDir;

    use super::*;

    fn dialer(url: &str) -> Result<Dialer, ConfigError> {
        Dialer::new(&Address { url, password: None, ca_file: None }, Duration::from_millis(250))
    }

    #[test]
    fn urls_that_cannot_be_served_are_refused_without_being_shown() {
        for bad in [
            "",
            "localhost",
            "http://secret@x",
            "redis+cluster://secret@x",
            "redis+sentinel://secret@x",
            "redis://:secret@[x",
        ] {
            let error = dialer(bad).err().expect(bad).to_string();
            assert!(!error.contains("secret"), "{error}");
        }
        for good in ["redis://127.0.0.1:1", "rediss://u:p@localhost:1/2", "unix:///tmp/x.sock"] {
            assert!(dialer(good).is_ok(), "{good}");
        }
    }

    #[test]
    fn a_password_that_fits_no_url_is_given_apart() {
        let address = Address { url: "redis://bob@127.0.0.1:1", password: Some("p@ss:/?#[]% word"), ca_file: None };
        let info = Dialer::new(&address, Duration::from_millis(250)).unwrap().info();
        assert_eq!(info.redis_settings().password(), Some("p@ss:/?#[]% word"));
        assert_eq!(info.redis_settings().username(), Some("bob"));
    }

    #[test]
    fn a_fault_says_what_the_system_said_and_of_tls_what_is_wrong_with_the_certificate() {
        use rustls::CertificateError::{NotValidForName, UnknownIssuer};
        let told = |fault| io::Error::new(ErrorKind::InvalidData, rustls::Error::InvalidCertificate(fault));
        // As the library meets it, and as the link does.
        let texts = |io: fn() -> io::Error| [Fault::of(&io().into()).text(), Fault::from(Broken::Io(io())).text()];
        let refused = texts(|| ErrorKind::ConnectionRefused.into());
        assert_eq!(refused, ["I/O error: connection refused", "no connection: connection refused"]);
        for (fault, said) in [(UnknownIssuer, "is of no issuer"), (NotValidForName, "is for another name")] {
            let text = Fault::of(&told(fault).into()).text();
            assert!(text.starts_with("I/O error: the server's certificate") && text.contains(said), "{text}");
        }
    }

    #[test]
    fn what_was_sent_is_in_no_fault() {
        let echo = b"ERR unknown command 'HELLO', with args beginning with: '3' 'AUTH' 'default' 'p@ss' ";
        assert_eq!(Fault::of_greeting(echo).text(), "HELLO 3 was refused: ERR");
        assert_eq!(Fault::of_line(echo).text(), "ERR unknown command 'HELLO'");
    }

    /// By the link's own means: a node asks by other connections first, and would get no further.
    #[tokio::test(flavor = "multi_thread")]
    async fn the_link_trusts_whom_the_ca_file_vouches_for_under_the_right_name_and_nobody_else() {
        let directory = TempDir::new("link-tls");
        let (certificate, key) = directory.certificate();
        let (_server, port) = RedisServer::with_tls(&certificate, &key);
        let ca = PathBuf::from(certificate);
        let link = async |host: &str, ca_file: Option<&PathBuf>| {
            let url = format!("rediss://{host}:{port}");
            let dialer = Dialer::new(&Address { url: &url, password: None, ca_file }, Duration::from_secs(5)).unwrap();
            dialer.link(1_024).await.map(drop).map_err(|fault| fault.text())
        };
        assert_eq!(link("127.0.0.1", Some(&ca)).await, Ok(()));
        let untold = link("127.0.0.1", None).await.unwrap_err();
        assert!(untold.contains("certificate"), "{untold}");
        let misnamed = link("localhost", Some(&ca)).await.unwrap_err();
        assert!(misnamed.contains("the server's certificate is for another name"), "{misnamed}");
    }

    #[test]
    fn redials_are_spread_and_never_stop() {
        let mut backoff = Backoff::new(Dice::seeded(7));
        let waits: Vec<_> = (0..100).map(|_| backoff.next()).collect();
        assert!(waits[0] < Duration::from_millis(51));
        assert!(waits[20..].iter().all(|w| (Duration::from_secs(1)..Duration::from_secs(2)).contains(w)));
    }
}
