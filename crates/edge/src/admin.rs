//! The back ends' API and the operator's page. Decides how a call is read and how its outcome is
//! told; what publishing, revoking, leaving and draining do is `hub`'s. Who may call at all is
//! `guard`, how much of a call is read `bodies`; the calls themselves are `publish`, `revocations`,
//! `sessions` and `fleet`; `span` is how they write a length of time.
//!
//! `openapi.json` beside this file describes exactly the routes of `table`; a test compares them.

use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::extract::{Request, State};
use axum::handler::Handler;
use axum::middleware;
use axum::response::{IntoResponse, Response};
use axum::routing::{MethodFilter, MethodRouter, on};
use bytes::Bytes;
use http::header::{ALLOW, CACHE_CONTROL, CONTENT_SECURITY_POLICY, CONTENT_TYPE, X_CONTENT_TYPE_OPTIONS};
use http::{HeaderValue, Method, StatusCode};
use hub::clock::{Clock, Dice};
use hub::hub::GatewayHandle;
use hub::refusal::{Refusal, RefusalCode};
use tower_http::catch_panic::CatchPanicLayer;

use crate::origin::CorsHeaders;
use crate::reject;

mod bodies;
mod fleet;
mod guard;
mod publish;
mod revocations;
mod sessions;
mod span;

pub use guard::AdminKey;

/// What the API is: served at `/v1/openapi.json`.
pub const OPENAPI: &str = include_str!("openapi.json");

/// A back end that is told to come again does so within this time, spread.
const RETRY: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(3));

/// What the admin listener works with.
#[derive(Clone)]
pub struct AdminState {
    /// The node.
    pub gateway: GatewayHandle,
    /// `GATEWAY_ADMIN_KEY`; `None`: whoever reaches the listener and passes the guard.
    pub key: Option<AdminKey>,
    /// `GATEWAY_ADMIN_HOSTS`: names, lower case, without port.
    pub hosts: Vec<String>,
    /// `GATEWAY_MAX_MESSAGE` in bytes; a body may be larger, it holds many.
    pub max_message: usize,
    /// `GATEWAY_REVOCATION_TTL`.
    pub revocation_ttl: Duration,
    /// For `before` of a revocation that names none.
    pub clock: Clock,
    /// Spreads `Retry-After`.
    pub dice: Dice,
    /// The console, HTML, ready to be served.
    pub console: Bytes,
    /// The browser client that the console loads.
    pub client_js: &'static str,
}

struct Inner {
    state: AdminState,
    bodies: bodies::Bodies,
}

type Shared = Arc<Inner>;

/// A refusal as an answer of this API.
struct Problem(Refusal);

impl From<Refusal> for Problem {
    fn from(refusal: Refusal) -> Self {
        Self(refusal)
    }
}

impl IntoResponse for Problem {
    fn into_response(self) -> Response {
        // The delay was drawn over seconds already: to the nearest whole one it stays spread.
        reject::response(&self.0, &CorsHeaders::none(), 0.5).map(Body::new)
    }
}

impl Inner {
    fn unavailable(&self, detail: impl Into<String>) -> Refusal {
        Refusal::retry(RefusalCode::Unavailable, detail, self.state.dice.between(RETRY.0, RETRY.1))
    }
}

/// Everything that the admin listener serves.
pub fn router(state: AdminState) -> Router {
    let shared: Shared = Arc::new(Inner { bodies: bodies::Bodies::new(state.max_message, state.dice.clone()), state });
    let mut router = Router::new();
    for (_, path, route) in table() {
        router = router.route(path, route);
    }
    router
        .fallback(async || Problem(Refusal::new(RefusalCode::NotFound, "the admin API has no such path")))
        .method_not_allowed_fallback(async || {
            let refusal = Refusal::new(RefusalCode::MethodNotAllowed, "this path takes other methods, see Allow");
            let mut response = Problem(refusal).into_response();
            // That of the public listener; axum adds the path's own where there is none.
            response.headers_mut().remove(ALLOW);
            response
        })
        .layer(middleware::from_fn_with_state(Arc::clone(&shared), guard::check))
        .layer(CatchPanicLayer::custom(|_| {
            tracing::error!("a call of the admin API panicked");
            Problem(Refusal::new(RefusalCode::Internal, "an internal error, see the log")).into_response()
        }))
        .with_state(shared)
}

type Route = (Method, &'static str, MethodRouter<Shared>);

/// Every route, once.
fn table() -> Vec<Route> {
    vec![
        at(Method::POST, "/v1/publish", publish::one),
        at(Method::POST, "/v1/publish/batch", publish::batch),
        at(Method::POST, "/v1/revocations", revocations::revoke),
        at(Method::GET, "/v1/sessions", sessions::list),
        at(Method::DELETE, "/v1/sessions", sessions::end_user),
        at(Method::DELETE, "/v1/sessions/{session}", sessions::end_one),
        at(Method::DELETE, "/v1/subscriptions", sessions::unsubscribe),
        at(Method::GET, "/v1/fleet", fleet::show),
        at(Method::POST, "/v1/fleet/hold", fleet::hold),
        at(Method::DELETE, "/v1/fleet/hold", fleet::release),
        at(Method::POST, "/v1/drain", drain),
        at(Method::GET, "/v1/openapi.json", async || page("application/json", OPENAPI)),
        at(Method::GET, "/v1/client.js", async |State(inner): State<Shared>| {
            page("text/javascript; charset=utf-8", inner.state.client_js)
        }),
        at(Method::GET, "/console", async |State(inner): State<Shared>| {
            page("text/html; charset=utf-8", inner.state.console.clone())
        }),
    ]
}

fn at<T: 'static>(method: Method, path: &'static str, handler: impl Handler<T, Shared>) -> Route {
    let filter = MethodFilter::try_from(method.clone()).expect("the table holds standard methods");
    (method, path, on(filter, handler))
}

/// `POST /v1/drain`. A body is not read.
async fn drain(State(inner): State<Shared>, _request: Request) -> StatusCode {
    tracing::info!("drain asked for by the admin API");
    inner.state.gateway.drain();
    StatusCode::ACCEPTED
}

/// A text of the program's own. Never framed by another page, never taken for another type.
fn page(content_type: &'static str, text: impl IntoResponse) -> Response {
    let mut response = text.into_response();
    for (name, value) in [
        (CONTENT_TYPE, HeaderValue::from_static(content_type)),
        (CACHE_CONTROL, HeaderValue::from_static("no-cache")),
        (X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff")),
        (CONTENT_SECURITY_POLICY, HeaderValue::from_static("frame-ancestors 'none'")),
    ] {
        response.headers_mut().insert(name, value);
    }
    response
}

/// The value of `name` in a query, percent-decoded; `None` where it is absent, empty, twice there
/// or no UTF-8.
fn form_value(query: &str, name: &str) -> Option<String> {
    let mut values = query.split('&').filter_map(|pair| {
        let (key, value) = pair.split_once('=').unwrap_or((pair, ""));
        (key == name).then_some(value)
    });
    let value = values.next().filter(|value| !value.is_empty())?;
    if values.next().is_some() {
        return None;
    }
    let mut bytes = Vec::with_capacity(value.len());
    let mut rest = value.bytes();
    while let Some(byte) = rest.next() {
        bytes.push(match byte {
            b'+' => b' ',
            b'%' => {
                let mut digit = || char::from(rest.next()?).to_digit(16);
                u8::try_from(digit()? * 16 + digit()?).ok()?
            }
            other => other,
        });
    }
    String::from_utf8(bytes).ok()
}

#[cfg(test)]
mod tests;
