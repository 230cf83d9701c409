//! How a key set is fetched: from a URL, or from a file. Decides what counts as an answer and how
//! much of one is read; when to fetch, how long to wait and what the set means is `hub::auth`'s.
//!
//! An answer is status 200 with a body of at most `MAX_SET_BYTES`, counted as it comes in. No
//! redirect is followed: whoever may move the keys elsewhere may replace them. No proxy variable is
//! read, no cookie kept, no content type looked at (issuers send all kinds), and every fetch is a
//! connection of its own, for there is one in minutes.

#[cfg(test)]
mod tests;

use std::error::Error;
use std::io;
use std::path::PathBuf;
use std::sync::Arc;

use bytes::Bytes;
use futures_util::future::{BoxFuture, FutureExt};
use http::uri::{Authority, PathAndQuery, Scheme};
use http::{HeaderValue, Request, StatusCode, Uri, header};
use http_body_util::{BodyExt, Empty};
use hub::auth::{FetchError, KeyFetcher};
use hyper::body::{Body, Incoming};
use hyper::client::conn::http1;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioIo;
use rustls::pki_types::ServerName;
use rustls::{ClientConfig, RootCertStore};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite};
use tokio_rustls::TlsConnector;
use tower::ServiceExt;

/// Most bytes of a key set: 1 MiB, some hundred times what issuers publish.
pub const MAX_SET_BYTES: usize = 1024 * 1024;

/// Most characters of somebody else's words in an error.
const MAX_WORDS: usize = 200;

/// `GATEWAY_JWT_JWKS_URL` cannot be used. None of these repeats it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum UrlError {
    /// Not a URL at all, or of something else.
    #[error("a key set's URL begins with http:// or https:// and a host")]
    NotHttp,
    /// They would be sent to whoever answers.
    #[error("a key set's URL has no user and no password in it")]
    Credentials,
}

/// Fetches a set over HTTP or HTTPS.
#[derive(Debug)]
pub struct UrlFetcher {
    authority: Authority,
    path: PathAndQuery,
    connector: HttpConnector,
    /// Where to connect, without the path.
    target: Uri,
    /// `None`: plain HTTP.
    tls: Option<Tls>,
}

struct Tls {
    name: ServerName<'static>,
    connector: TlsConnector,
}

impl std::fmt::Debug for Tls {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Tls({:?})", self.name)
    }
}

impl UrlFetcher {
    /// For HTTPS the certificates of the system's store count, which is read here and once (it
    /// blocks for some ms); where it has none, Mozilla's.
    ///
    /// # Errors
    /// `UrlError`: the operator must mend it.
    pub fn new(url: &str) -> Result<Self, UrlError> {
        Self::trusting(url, roots)
    }

    fn trusting(url: &str, roots: impl FnOnce() -> RootCertStore) -> Result<Self, UrlError> {
        let uri: Uri = url.parse().map_err(|_| UrlError::NotHttp)?;
        let parts = uri.into_parts();
        let (Some(scheme), Some(authority)) = (parts.scheme, parts.authority) else { return Err(UrlError::NotHttp) };
        if authority.as_str().contains('@') {
            return Err(UrlError::Credentials);
        }
        let is_plain = scheme == Scheme::HTTP;
        if authority.host().is_empty() || !is_plain && scheme != Scheme::HTTPS {
            return Err(UrlError::NotHttp);
        }
        let tls = if is_plain { None } else { Some(Tls::of(&authority, roots())?) };
        let target = Uri::builder().scheme(scheme).authority(authority.clone()).path_and_query("/");
        let mut connector = HttpConnector::new();
        connector.enforce_http(false);
        Ok(Self {
            path: parts.path_and_query.unwrap_or(PathAndQuery::from_static("/")),
            target: target.build().map_err(|_| UrlError::NotHttp)?,
            authority,
            connector,
            tls,
        })
    }

    async fn get(&self) -> Result<String, FetchError> {
        let tcp = self.connector.clone().oneshot(self.target.clone()).await.map_err(|e| unreachable(&e))?.into_inner();
        match &self.tls {
            None => self.ask(tcp).await,
            Some(tls) => {
                let stream = tls.connector.connect(tls.name.clone(), tcp).await.map_err(|e| unreachable(&e))?;
                self.ask(stream).await
            }
        }
    }

    async fn ask(&self, stream: impl AsyncRead + AsyncWrite + Unpin) -> Result<String, FetchError> {
        let (mut sender, connection) = http1::handshake(TokioIo::new(stream)).await.map_err(|e| unreachable(&e))?;
        let exchange = async {
            let response = sender.send_request(self.request()).await.map_err(|e| refused(&e))?;
            match response.status() {
                StatusCode::OK => read(response.into_body()).await,
                status if status.is_redirection() => {
                    Err(FetchError::Refused(format!("status {}, redirects are not followed", status.as_u16())))
                }
                status => Err(FetchError::Refused(format!("status {}", status.as_u16()))),
            }
        };
        tokio::select! {
            biased;
            text = exchange => text,
            // Its end, good or bad, is the exchange's to tell.
            never = connection.then(|_| std::future::pending()) => never,
        }
    }

    fn request(&self) -> Request<Empty<Bytes>> {
        let mut request = Request::new(Empty::new());
        *request.uri_mut() = Uri::from(self.path.clone());
        let host = HeaderValue::from_str(self.authority.as_str()).expect("an authority has only visible ASCII");
        let headers = request.headers_mut();
        headers.insert(header::HOST, host);
        headers.insert(header::ACCEPT, HeaderValue::from_static("application/jwk-set+json, application/json, */*"));
        headers.insert(header::USER_AGENT, HeaderValue::from_static("tidegate"));
        headers.insert(header::CONNECTION, HeaderValue::from_static("close"));
        request
    }
}

impl KeyFetcher for UrlFetcher {
    fn fetch(&self) -> BoxFuture<'_, Result<String, FetchError>> {
        self.get().boxed()
    }
}

impl Tls {
    fn of(authority: &Authority, roots: RootCertStore) -> Result<Self, UrlError> {
        let host = authority.host().trim_start_matches('[').trim_end_matches(']');
        let name = ServerName::try_from(host.to_owned()).map_err(|_| UrlError::NotHttp)?;
        let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
        let config = ClientConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .expect("the provider has the ciphers of both versions")
            .with_root_certificates(roots)
            .with_no_client_auth();
        Ok(Self { name, connector: TlsConnector::from(Arc::new(config)) })
    }
}

fn roots() -> RootCertStore {
    let mut roots = RootCertStore::empty();
    let (n_good, n_bad) = roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
    if n_good == 0 {
        roots.extend(webpki_roots::TLS_SERVER_ROOTS.iter().cloned());
    }
    tracing::debug!(n_system = n_good, n_unreadable = n_bad, n_roots = roots.len(), "certificates for the key set");
    roots
}

async fn read(mut body: Incoming) -> Result<String, FetchError> {
    const TOO_LARGE: FetchError = FetchError::TooLarge { max_bytes: MAX_SET_BYTES };
    if body.size_hint().lower() > MAX_SET_BYTES as u64 {
        return Err(TOO_LARGE);
    }
    let mut bytes = Vec::new();
    while let Some(frame) = body.frame().await {
        let Ok(data) = frame.map_err(|e| refused(&e))?.into_data() else { continue };
        if bytes.len() + data.len() > MAX_SET_BYTES {
            return Err(TOO_LARGE);
        }
        bytes.extend_from_slice(&data);
    }
    String::from_utf8(bytes).map_err(|_| FetchError::NoText)
}

/// Reads a set from a file, whole, every time: a link that was exchanged is followed.
#[derive(Debug)]
pub struct FileFetcher {
    path: PathBuf,
}

impl FileFetcher {
    /// Of the file that is there when it is read.
    pub fn new(path: impl Into<PathBuf>) -> Self {
        Self { path: path.into() }
    }

    async fn read(&self) -> Result<String, FetchError> {
        let unreachable = |error: io::Error| unreachable(&error);
        // A pipe would be waited for, on a thread that cannot be called back.
        if !tokio::fs::metadata(&self.path).await.map_err(unreachable)?.is_file() {
            return Err(FetchError::Unreachable("it is no regular file".to_owned()));
        }
        let file = tokio::fs::File::open(&self.path).await.map_err(unreachable)?;
        let mut bytes = Vec::new();
        file.take(MAX_SET_BYTES as u64 + 1).read_to_end(&mut bytes).await.map_err(unreachable)?;
        if bytes.len() > MAX_SET_BYTES {
            return Err(FetchError::TooLarge { max_bytes: MAX_SET_BYTES });
        }
        String::from_utf8(bytes).map_err(|_| FetchError::NoText)
    }
}

impl KeyFetcher for FileFetcher {
    fn fetch(&self) -> BoxFuture<'_, Result<String, FetchError>> {
        self.read().boxed()
    }
}

fn unreachable(error: &dyn Error) -> FetchError {
    FetchError::Unreachable(words(error))
}

fn refused(error: &dyn Error) -> FetchError {
    FetchError::Refused(words(error))
}

/// An error with its causes. They may quote the other side (a certificate's names), so they are cut
/// and escaped.
fn words(error: &dyn Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        text = format!("{text}: {error}");
        cause = error.source();
    }
    text.chars().take(MAX_WORDS).flat_map(char::escape_debug).collect()
}
