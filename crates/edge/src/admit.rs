//! From a request's head to an answer: the one function that every client walks through, in the
//! order that costs least first. Until the credential's signature nothing waits and nothing is
//! looked up outside this process; a refusal is therefore cheap however many come at once.
//!
//! handshake, origin (is it a request at all?) → phase, capacity (atomics) → address bucket →
//! accept bucket → token signature → this user's own crowd → revocation → plugins → open.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::request::Parts;
use http::{HeaderValue, Method, Response, StatusCode, header};
use http_body_util::Full;
use hub::auth::{Denied, Identity, Verifier};
use hub::clock::{Clock, Dice};
use hub::close::PlannedCodes;
use hub::event::Wire;
use hub::hub::{Hub, Newcomer, Open, Phase};
use hub::limit::{AcceptBucket, Adaptive, AddressBuckets, Capacity, Coming, Seat, is_local};
use hub::plugin::{Admission, Ask, Plugins};
use hub::refusal::{Refusal, RefusalCode};
use hub::revocation::{CheckOutcome, Revocations, WhenUnavailable};
use hub::telemetry::Metrics;
use tokio::time::{Instant, timeout_at};
use tracing::Instrument;

use crate::address::{Seen, TrustedProxies};
use crate::credential::{Credential, CredentialConfig, StreamRequest, redacted_path};
use crate::handshake::{WsRequest, sse_head, sse_request, ws_head, ws_request};
use crate::origin::{CorsHeaders, OriginPolicy};
use crate::reject::{self, Manner, RefuseModes};

/// What a bad token costs its address, in attempts (contract).
const BAD_TOKEN_COST: u32 = 5;

/// The target of every span that is exported.
const TRACE: &str = "tidegate::trace";

/// A step of the handshake, as a span under it.
macro_rules! step {
    ($name:literal) => {
        tracing::debug_span!(target: TRACE, $name)
    };
}

/// Settings of admission.
#[derive(Clone, Debug)]
pub struct GateConfig {
    /// Where a credential may stand.
    pub credential: CredentialConfig,
    /// Which pages may connect.
    pub origin: OriginPolicy,
    /// Whose forwarded headers count.
    pub proxies: TrustedProxies,
    /// How refusals reach browsers.
    pub refuse: RefuseModes,
    /// `GATEWAY_AUTH_TIMEOUT`: the whole admission after the head.
    pub auth_timeout: Duration,
    /// The browser client, served at `/v1/client.js`.
    pub client_js: &'static str,
    /// Close codes, for the `bye` of soft refusals.
    pub planned: PlannedCodes,
}

/// What admission works with.
pub struct Gate {
    /// Settings.
    pub config: GateConfig,
    /// Where sessions live.
    pub hub: Arc<Hub>,
    /// Whose tokens count.
    pub verifier: Arc<Verifier>,
    /// What is known of revoked ones.
    pub revocations: Arc<Revocations>,
    /// The extensions.
    pub plugins: Plugins,
    /// The figures.
    pub metrics: Arc<Metrics>,
    /// Time.
    pub clock: Clock,
    /// Chance.
    pub dice: Dice,
    /// Places for sessions.
    pub capacity: Capacity,
    /// Attempts of everybody.
    pub bucket: AcceptBucket,
    /// What moves the bucket's rate (`GATEWAY_ACCEPT_MODE=adaptive`); `None`: it stands.
    pub adaptive: Option<Adaptive>,
    /// Attempts of one address.
    pub addresses: AddressBuckets,
}

/// What a connection is to do with its request.
pub enum Answer {
    /// An ordinary answer; a refusal tells its code.
    Respond(Response<Full<Bytes>>, Option<RefusalCode>),
    /// A soft refusal: these bytes on the bare socket, then the end.
    Say(Bytes, RefusalCode),
    /// A session: this head, then its driver.
    Stream(Box<Opened>),
}

/// An admitted session, not yet driven.
pub struct Opened {
    /// The session.
    pub open: Open,
    /// The response head.
    pub head: Bytes,
}

impl Gate {
    /// Answers one request of the public listener.
    ///
    /// # Cancel safety
    /// Whatever was taken is given back: places are guards.
    pub async fn answer(&self, head: &Parts, peer: std::net::IpAddr) -> Answer {
        let cors = self.config.origin.cors(&head.headers);
        let wire = match head.uri.path() {
            "/v1/ws" => Wire::Ws,
            "/v1/sse" => Wire::Sse,
            "/v1/client.js" => return self.client_js(head, &cors),
            _ => return self.refuse(Refusal::new(RefusalCode::NotFound, "no such path"), None, head, &cors),
        };
        if head.method == Method::OPTIONS {
            return Answer::Respond(self.config.origin.preflight(&head.headers), None);
        }
        let seen = self.config.proxies.seen(peer, None, &head.headers);
        let handshake = match wire {
            Wire::Ws => ws_request(head).map(Some),
            Wire::Sse => sse_request(head).map(|()| None),
        };
        let handshake = match handshake {
            Ok(handshake) => handshake,
            Err(refusal) => return self.refuse(refusal, None, head, &cors),
        };
        let span =
            tracing::debug_span!(target: TRACE, "handshake", transport = wire.word(), code = tracing::field::Empty);
        let admitted = self.admit(wire, head, &seen).instrument(span.clone()).await;
        match admitted {
            Ok(open) => {
                let head = handshake.map_or_else(|| sse_head(&cors), |ws| ws_head(&ws, &cors));
                Answer::Stream(Box::new(Opened { open, head }))
            }
            Err(refusal) => {
                span.record("code", refusal.code.word());
                self.refuse(refusal, Some((wire, handshake)), head, &cors)
            }
        }
    }

    async fn admit(&self, wire: Wire, head: &Parts, seen: &Seen) -> Result<Open, Refusal> {
        let request = StreamRequest::read(head, &self.config.credential)?;
        self.config.origin.check(wire, head, request.credential.place(), seen)?;
        // Not its right but its turn: whoever was cut off waits for what it misses.
        let coming = if self.hub.may_be_returning(&request.since) { Coming::Back } else { Coming::New };
        let seat = step!("limit").in_scope(|| self.take_place(coming, seen))?;
        let began = Instant::now();
        let deadline = began + self.config.auth_timeout;
        let identity =
            self.authenticate(&request.credential, coming, seen, deadline).instrument(step!("token")).await?;
        let channels = self.hub.channels_for(&identity, &request.channels)?;
        self.hub.may_come(&identity).map_err(|after| {
            Refusal::retry(
                RefusalCode::TooManyRequests,
                "this user's sessions replace each other too often (GATEWAY_MAX_SESSIONS_PER_USER)",
                after,
            )
        })?;
        let mut in_company = Duration::ZERO;
        let asked = async {
            let checked = self.revocations.check_by(&identity, deadline).instrument(step!("revocation")).await;
            in_company = checked.in_company;
            self.judge_revocation(checked.outcome)?;
            self.ask_plugins(&identity, wire, head, seen, deadline).instrument(step!("plugins")).await
        };
        let asked = asked.await;
        let admission = self.note_what_it_took(began, in_company, asked)?;
        let _open = step!("open").entered();
        self.hub.open(Newcomer {
            identity,
            wire,
            address: seen.client,
            channels,
            since: request.since,
            admission,
            seat,
        })
    }

    /// Phase and capacity, the address's bucket, everybody's bucket. Waits for nothing.
    fn take_place(&self, coming: Coming, seen: &Seen) -> Result<Seat, Refusal> {
        let now = Instant::now();
        if self.hub.is_door_closed() {
            let after = self.dice.between(Duration::from_secs(1), Duration::from_secs(3));
            return Err(Refusal::retry(RefusalCode::Draining, "this node is leaving", after));
        }
        if self.hub.phase() == Phase::Starting {
            return Err(Refusal::retry(RefusalCode::Overloaded, "this node is starting", self.bucket.promise(now)));
        }
        let seat = self.capacity.try_acquire().ok_or_else(|| {
            Refusal::retry(
                RefusalCode::AtCapacity,
                "this node is full (GATEWAY_MAX_SESSIONS)",
                self.bucket.promise(now),
            )
        })?;
        if self.counts_addresses(seen) {
            self.addresses.take(seen.client, now).map_err(|after| {
                Refusal::retry(
                    RefusalCode::TooManyRequests,
                    "too many attempts from this address (GATEWAY_IP_RATE)",
                    after,
                )
            })?;
        }
        self.bucket.take(coming, now).map_err(|after| {
            Refusal::retry(RefusalCode::Overloaded, "too many come at once (GATEWAY_ACCEPT_RATE)", after)
        })?;
        Ok(seat)
    }

    /// A loopback or private peer is most likely a proxy of ours that nobody named: one address for
    /// everybody.
    fn counts_addresses(&self, seen: &Seen) -> bool {
        !self.config.proxies.is_empty() || !is_local(seen.client)
    }

    /// Waits only for a key that nobody has seen yet.
    async fn authenticate(
        &self,
        credential: &Credential,
        coming: Coming,
        seen: &Seen,
        deadline: Instant,
    ) -> Result<Arc<Identity>, Refusal> {
        let verified = match credential.token() {
            Ok(Some(token)) => match self.verifier.authenticate(token.as_str(), &self.clock, deadline).await {
                Ok(identity) => Ok(identity),
                Err(denied @ Denied::KeysUnavailable) => Err(self.auth_unavailable(denied.detail())),
                Err(denied) => Err(Refusal::new(denied.code(), denied.detail())),
            },
            Ok(None) => {
                self.verifier.anonymous().ok_or_else(|| Refusal::new(RefusalCode::TokenMissing, "a token is needed"))
            }
            Err(refusal) => Err(refusal),
        };
        verified.inspect_err(|refusal| self.settle(refusal, coming, seen))
    }

    /// Who pays for a refused credential. Most cost us little, so their place goes to somebody else; a bad
    /// one costs its address. None at all is no guess: a page whose user has logged out must not shut
    /// an office's address out.
    fn settle(&self, refusal: &Refusal, coming: Coming, seen: &Seen) {
        let now = Instant::now();
        let is_bad = match refusal.code {
            RefusalCode::TokenInvalid | RefusalCode::TokenExpired => true,
            // The latter's token may be good: neither its address is to blame nor anybody else.
            RefusalCode::TokenMissing | RefusalCode::AuthUnavailable => false,
            // It was verified, and had all that its place pays for.
            _ => return,
        };
        self.bucket.give_back(coming, now);
        if is_bad && self.counts_addresses(seen) {
            self.addresses.charge(seen.client, BAD_TOKEN_COST, now);
        }
    }

    fn judge_revocation(&self, outcome: CheckOutcome) -> Result<(), Refusal> {
        match outcome {
            CheckOutcome::Good => Ok(()),
            CheckOutcome::Revoked => Err(Refusal::new(RefusalCode::TokenRevoked, "the token was revoked")),
            CheckOutcome::Unavailable if self.revocations.when_unavailable() == WhenUnavailable::Allow => Ok(()),
            CheckOutcome::Unavailable => Err(self.auth_unavailable("the revocation list cannot be read now")),
        }
    }

    async fn ask_plugins(
        &self,
        identity: &Identity,
        wire: Wire,
        head: &Parts,
        seen: &Seen,
        deadline: Instant,
    ) -> Result<Admission, Refusal> {
        if self.plugins.is_empty() {
            return Ok(Admission::default());
        }
        let ask = Ask {
            wire,
            path: redacted_path(&head.uri),
            origin: head.headers.get(header::ORIGIN).and_then(|v| v.to_str().ok()).map(str::to_owned),
            address: seen.client,
        };
        match timeout_at(deadline, self.plugins.admit(identity, &ask)).await {
            Ok(Ok(Admission::Raw)) if wire == Wire::Sse => Err(Refusal::new(
                RefusalCode::Forbidden,
                "this session speaks a protocol of its own, on WebSocket only",
            )),
            Ok(verdict) => verdict,
            Err(_) => Err(self.auth_unavailable("admission took too long (GATEWAY_AUTH_TIMEOUT)")),
        }
    }

    /// What a signature, the list and the plugins took, for the histogram; and for whatever steers by
    /// it, less what was waited by choice.
    fn note_what_it_took<T>(
        &self,
        began: Instant,
        in_company: Duration,
        outcome: Result<T, Refusal>,
    ) -> Result<T, Refusal> {
        let took = began.elapsed();
        let was_answered = !matches!(&outcome, Err(refusal) if refusal.code == RefusalCode::AuthUnavailable);
        if was_answered {
            self.metrics.auth_seconds(took.as_secs_f64());
        }
        match &self.adaptive {
            Some(adaptive) if was_answered => adaptive.admitted(took.saturating_sub(in_company)),
            Some(adaptive) => adaptive.failed(),
            None => {}
        }
        outcome
    }

    fn auth_unavailable(&self, detail: &str) -> Refusal {
        Refusal::retry(RefusalCode::AuthUnavailable, detail, self.bucket.promise(Instant::now()))
    }

    fn refuse(
        &self,
        refusal: Refusal,
        stream: Option<(Wire, Option<WsRequest>)>,
        head: &Parts,
        cors: &CorsHeaders,
    ) -> Answer {
        self.metrics.refused(refusal.code);
        tracing::debug!(code = refusal.code.word(), path = redacted_path(&head.uri), "refused");
        let manner = stream
            .as_ref()
            .map_or(Manner::Status, |(wire, _)| reject::manner(&refusal, *wire, head, self.config.refuse));
        match (manner, stream) {
            (Manner::SoftSse, _) => Answer::Say(reject::soft_sse(&refusal, cors, self.config.planned), refusal.code),
            (Manner::SoftWs, Some((_, Some(ws)))) => {
                let after = self.dice.between(Duration::ZERO, Duration::from_secs(5));
                Answer::Say(reject::soft_ws(&refusal, &ws, cors, after), refusal.code)
            }
            _ => Answer::Respond(reject::response(&refusal, cors, self.dice.unit()), Some(refusal.code)),
        }
    }

    fn client_js(&self, head: &Parts, cors: &CorsHeaders) -> Answer {
        if head.method != Method::GET && head.method != Method::HEAD {
            return self.refuse(Refusal::new(RefusalCode::MethodNotAllowed, "GET only"), None, head, cors);
        }
        let mut response = Response::new(Full::new(Bytes::from_static(self.config.client_js.as_bytes())));
        *response.status_mut() = StatusCode::OK;
        let headers = response.headers_mut();
        headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("text/javascript; charset=utf-8"));
        headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("public, max-age=300"));
        // A module is fetched with CORS from any page; there is nothing secret in it.
        headers.insert(header::ACCESS_CONTROL_ALLOW_ORIGIN, HeaderValue::from_static("*"));
        Answer::Respond(response, None)
    }
}
