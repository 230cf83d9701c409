//! A small HTTP/1.1 client of the admin API: one request, one JSON answer. Decides which exit code
//! a refusal becomes.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::path::Path;
use std::time::Duration;

use bytes::Bytes;
use http_body_util::{BodyExt as _, Full, Limited};
use hyper::header::{AUTHORIZATION, CONTENT_TYPE, HOST};
use hyper::{Method, Request, Response, StatusCode, Uri};
use hyper_util::rt::TokioIo;
use serde_json::Value;
use tokio::net::TcpStream;

use super::{AdminArgs, CliError};
use crate::config::{Secret, Tools, process_environment};

/// From the first packet to the last byte of the answer. The slowest call gathers for 500 ms.
const DEADLINE: Duration = Duration::from_secs(10);
/// Largest answer that is read: a fleet of thousands of nodes fits.
const MAX_ANSWER_BYTES: usize = 8 << 20;

/// Where the admin API is, and its key.
#[derive(Debug)]
pub struct AdminClient {
    host: String,
    port: u16,
    key: Option<Secret<String>>,
}

impl AdminClient {
    /// By `--admin`, else by the environment.
    ///
    /// # Errors
    /// `Config` for bad variables, `Usage` where the address is not known.
    pub fn new(args: &AdminArgs) -> Result<Self, CliError> {
        let tools = Tools::from_environment(&process_environment())?;
        Self::from_parts(args.admin.as_deref(), tools)
    }

    fn from_parts(url: Option<&str>, tools: Tools) -> Result<Self, CliError> {
        let (host, port) = match url {
            Some(url) => from_url(url)?,
            None => {
                let address = where_it_listens(&tools)?;
                (address.ip().to_string(), address.port())
            }
        };
        Ok(Self { host, port, key: tools.admin_key })
    }

    /// One call. `body`, where there is one, is JSON text. Empty answers are `Null`.
    ///
    /// # Errors
    /// `Unreachable` where nobody answers, not now, or not to this call yet; `Usage` where the
    /// answer says that the request was at fault; `Internal` for the rest.
    pub async fn call(&self, method: Method, path: &str, body: Option<String>) -> Result<Value, CliError> {
        let answer = tokio::time::timeout(DEADLINE, self.exchange(method, path, body)).await.map_err(|_| {
            CliError::Unreachable(format!("{}: no answer within {} s", self.authority(), DEADLINE.as_secs()))
        })??;
        let (status, body) = answer;
        let value = || serde_json::from_slice(&body).unwrap_or(Value::Null);
        if status.is_success() { Ok(value()) } else { Err(refusal(status, &value())) }
    }

    async fn exchange(
        &self,
        method: Method,
        path: &str,
        body: Option<String>,
    ) -> Result<(StatusCode, Bytes), CliError> {
        let lost = |error: &dyn std::fmt::Display| CliError::Unreachable(format!("{}: {error}", self.authority()));
        let stream = TcpStream::connect((self.host.as_str(), self.port)).await.map_err(|e| lost(&e))?;
        let (mut sender, connection) =
            hyper::client::conn::http1::handshake(TokioIo::new(stream)).await.map_err(|e| lost(&e))?;
        let request = self.request(method, path, body)?;
        let answer = async {
            let response: Response<_> = sender.send_request(request).await.map_err(|e| lost(&e))?;
            let status = response.status();
            let body = Limited::new(response.into_body(), MAX_ANSWER_BYTES).collect().await.map_err(|e| lost(&e))?;
            Ok((status, body.to_bytes()))
        };
        // The connection is driven here and dropped with the answer: nothing is spawned.
        tokio::pin!(connection, answer);
        let mut is_open = true;
        loop {
            tokio::select! {
                biased;
                answer = &mut answer => return answer,
                // Its errors reach the answer too; once it has ended it must not be polled again.
                _ = &mut connection, if is_open => is_open = false,
            }
        }
    }

    fn request(&self, method: Method, path: &str, body: Option<String>) -> Result<Request<Full<Bytes>>, CliError> {
        let mut request = Request::builder().method(method).uri(path).header(HOST, self.authority());
        if let Some(key) = &self.key {
            request = request.header(AUTHORIZATION, format!("Bearer {}", key.expose()));
        }
        if body.is_some() {
            request = request.header(CONTENT_TYPE, "application/json");
        }
        request
            .body(Full::from(body.unwrap_or_default()))
            .map_err(|_| CliError::Usage("the admin API's address or key does not fit a request".to_owned()))
    }

    fn authority(&self) -> String {
        let host = &self.host;
        if host.contains(':') { format!("[{host}]:{}", self.port) } else { format!("{host}:{}", self.port) }
    }
}

fn from_url(url: &str) -> Result<(String, u16), CliError> {
    let bad = || CliError::Usage(format!("--admin {url}: expected a URL such as http://127.0.0.1:8081"));
    let uri: Uri = url.parse().map_err(|_| bad())?;
    let authority = uri.authority().ok_or_else(bad)?;
    let has_only_authority =
        matches!(uri.path(), "" | "/") && uri.query().is_none() && !authority.as_str().contains('@');
    if uri.scheme_str() != Some("http") || !has_only_authority {
        return Err(bad());
    }
    let host = authority.host().trim_start_matches('[').trim_end_matches(']');
    Ok((host.to_owned(), authority.port_u16().unwrap_or(80)))
}

/// The bound address where the gateway wrote it down, else the configured one; an unspecified
/// address is reached over loopback.
fn where_it_listens(tools: &Tools) -> Result<SocketAddr, CliError> {
    let bound = tools.addr_file.as_deref().and_then(from_addr_file);
    let mut address = bound.unwrap_or(tools.admin_listen);
    if address.port() == 0 {
        return Err(CliError::Usage(
            "the admin API's port is not known: give --admin http://host:port, or GATEWAY_ADDR_FILE as the gateway has it".to_owned(),
        ));
    }
    match address.ip() {
        IpAddr::V4(ip) if ip.is_unspecified() => address.set_ip(Ipv4Addr::LOCALHOST.into()),
        IpAddr::V6(ip) if ip.is_unspecified() => address.set_ip(Ipv6Addr::LOCALHOST.into()),
        _ => {}
    }
    Ok(address)
}

fn from_addr_file(path: &Path) -> Option<SocketAddr> {
    let bound: Value = serde_json::from_slice(&std::fs::read(path).ok()?).ok()?;
    bound["admin"].as_str()?.parse().ok()
}

/// A refusal in the server's own words, grouped by what the caller can do.
fn refusal(status: StatusCode, problem: &Value) -> CliError {
    let word = |name: &str| problem[name].as_str().filter(|text| !text.is_empty());
    let code = word("code").map(|code| format!(" ({code})")).unwrap_or_default();
    let text = word("detail").or(word("title")).unwrap_or("no reason given");
    let text = format!("{status}{code}: {text}");
    match status.as_u16() {
        // Not found, not allowed or not implemented: this gateway does not have the call.
        404 | 405 | 501 => CliError::Unreachable(format!("{text}; is the gateway of an older version?")),
        429 | 502..=504 => CliError::Unreachable(text),
        400..=499 => CliError::Usage(text),
        _ => CliError::Internal(text),
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
    use tokio::net::TcpListener;

    use super::*;
    use crate::config::Environment;

    fn tools(pairs: &[(&str, &str)]) -> Tools {
        let environment: Environment = pairs.iter().map(|(n, v)| ((*n).to_owned(), (*v).to_owned())).collect();
        Tools::from_environment(&environment).unwrap()
    }

    fn authority(url: Option<&str>, pairs: &[(&str, &str)]) -> Result<String, CliError> {
        AdminClient::from_parts(url, tools(pairs)).map(|client| client.authority())
    }

    #[test]
    fn the_admin_api_is_found_by_url_else_by_the_environment() {
        assert_eq!(authority(None, &[]).unwrap(), "127.0.0.1:8081");
        let open = [("GATEWAY_ADMIN_LISTEN", "0.0.0.0:7000")];
        assert_eq!(authority(None, &open).unwrap(), "127.0.0.1:7000");
        assert_eq!(authority(None, &[("GATEWAY_ADMIN_LISTEN", "[::]:7000")]).unwrap(), "[::1]:7000");
        assert_eq!(authority(Some("http://admin.internal:9/"), &open).unwrap(), "admin.internal:9");
        assert_eq!(authority(Some("http://[::1]:9"), &open).unwrap(), "[::1]:9");
        assert!(authority(None, &[("GATEWAY_ADMIN_LISTEN", "127.0.0.1:0")]).is_err());
        for bad in ["https://a:1", "a:1", "http://a:1/v1", "http://u:p@a:1", "http://"] {
            assert!(matches!(authority(Some(bad), &[]), Err(CliError::Usage(_))), "{bad}");
        }
    }

    #[test]
    fn refusals_are_grouped_by_what_the_caller_can_do() {
        let code = |status: u16| refusal(StatusCode::from_u16(status).unwrap(), &Value::Null).exit_code();
        for (status, exit) in
            [(400, 64), (401, 64), (403, 64), (413, 64), (404, 69), (501, 69), (503, 69), (429, 69), (500, 70)]
        {
            assert_eq!(code(status), exit, "{status}");
        }
        let problem = serde_json::json!({"code": "forbidden", "detail": "no such key"});
        assert_eq!(refusal(StatusCode::FORBIDDEN, &problem).to_string(), "403 Forbidden (forbidden): no such key");
    }

    /// Answers one request with `answer` and gives back what was asked.
    async fn serve_once(answer: &'static str) -> (u16, tokio::task::JoinHandle<String>) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let asked = tokio::spawn(async move {
            let (mut stream, _) = listener.accept().await.unwrap();
            let mut asked = Vec::new();
            while !asked.ends_with(b"}") {
                let mut chunk = [0; 4096];
                let n = stream.read(&mut chunk).await.unwrap();
                assert!(n > 0, "the request ended early");
                asked.extend_from_slice(&chunk[..n]);
            }
            stream.write_all(answer.as_bytes()).await.unwrap();
            String::from_utf8(asked).unwrap()
        });
        (port, asked)
    }

    #[tokio::test]
    async fn a_call_carries_the_key_and_gives_the_answer() {
        let (port, asked) = serve_once("HTTP/1.1 200 OK\r\ncontent-length: 12\r\n\r\n{\"id\":\"1-0\"}").await;
        let listen = format!("127.0.0.1:{port}");
        let pairs = [("GATEWAY_ADMIN_LISTEN", listen.as_str()), ("GATEWAY_ADMIN_KEY", "swordfish")];
        let client = AdminClient::from_parts(None, tools(&pairs)).unwrap();
        let answer = client.call(Method::POST, "/v1/publish", Some("{\"a\":1}".to_owned())).await.unwrap();
        assert_eq!(answer["id"], "1-0");
        let asked = asked.await.unwrap().to_ascii_lowercase();
        assert!(asked.starts_with("post /v1/publish http/1.1\r\n"), "{asked}");
        assert!(asked.contains("authorization: bearer swordfish\r\n"), "{asked}");
        assert!(asked.contains(&format!("host: {listen}\r\n")) && asked.ends_with("{\"a\":1}"), "{asked}");
    }

    #[tokio::test]
    async fn a_gateway_that_hangs_up_or_is_not_there_is_unreachable() {
        let (port, asked) = serve_once("").await;
        let url = format!("http://127.0.0.1:{port}");
        let client = AdminClient::from_parts(Some(&url), tools(&[])).unwrap();
        let error = client.call(Method::POST, "/v1/drain", Some("{}".to_owned())).await.unwrap_err();
        assert_eq!(error.exit_code(), 69, "{error}");
        asked.await.unwrap();
        // The listener is gone with its task.
        let error = client.call(Method::POST, "/v1/drain", Some("{}".to_owned())).await.unwrap_err();
        assert_eq!(error.exit_code(), 69, "{error}");
    }
}
