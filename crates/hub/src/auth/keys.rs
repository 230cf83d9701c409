//! Whose signatures count. Decides which keys are usable at all, which algorithms go with each,
//! and whether a token was signed by one of them.
//!
//! The algorithm follows from the key and the configuration, never from the token: a key carries
//! the algorithms it may be used with, and a token that names another one finds no key. `kid`
//! only picks among the keys at hand; `jku`, `x5u`, `x5c` and `jwk` are not even read. Nothing
//! here opens a file or fetches anything: a JWKS arrives as text.

use std::borrow::Cow;

use aws_lc_rs::signature::{self, ParsedPublicKey};
use base64::Engine;
use base64::engine::general_purpose::{STANDARD, URL_SAFE_NO_PAD};
use jsonwebtoken::jwk::{AlgorithmParameters, EllipticCurve, Jwk, KeyOperations, PublicKeyUse};
use jsonwebtoken::{Algorithm, AlgorithmFamily, DecodingKey, DecodingKeyKind};
use serde::Deserialize;

/// Shortest HMAC secret in bytes: RFC 7518 §3.2 asks for at least the hash's size, 32 for HS256.
pub const MIN_SECRET_BYTES: usize = 32;

/// Smallest RSA modulus in bytes: 2048 bits, RFC 7518 §3.3.
const MIN_RSA_BYTES: usize = 256;

/// Most keys of one set. Real sets have two to four; this bounds what one token can cost.
const MAX_KEYS: usize = 64;

/// Most signature checks for a token that names no `kid`.
const MAX_TRIES: usize = 8;

/// What a set is, in an error about it.
const JWKS: &str = "a JWKS, which holds public keys";

/// Why a token is refused that no key is at hand for.
pub(super) const NO_KEY_FITS: &str = "no key fits the token's algorithm and kid";

/// Bytes that no log ever shows.
#[derive(Clone, PartialEq, Eq)]
pub struct Secret(Vec<u8>);

impl std::fmt::Debug for Secret {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("(hidden)")
    }
}

impl Secret {
    /// One line end at the end is dropped: files have one, secrets do not.
    pub fn new(mut bytes: Vec<u8>) -> Self {
        if bytes.last() == Some(&b'\n') {
            bytes.pop();
            if bytes.last() == Some(&b'\r') {
                bytes.pop();
            }
        }
        Self(bytes)
    }

    /// The bytes, to sign with.
    pub fn bytes(&self) -> &[u8] {
        &self.0
    }

    /// Would this be accepted as an HMAC key?
    ///
    /// # Errors
    /// `KeyError`: it would not, and why.
    pub fn check(&self) -> Result<(), KeyError> {
        if self.0.iter().all(u8::is_ascii_whitespace) {
            return Err(KeyError::SecretBlank);
        }
        if looks_like_a_key_file(&self.0) {
            return Err(KeyError::SecretIsKey);
        }
        if self.0.len() < MIN_SECRET_BYTES {
            return Err(KeyError::SecretShort { n_bytes: self.0.len() });
        }
        Ok(())
    }
}

/// Where the keys come from.
#[derive(Clone, Debug)]
pub enum KeySource {
    /// An HMAC secret.
    Secret(Secret),
    /// One or more PEM blocks with public keys: RSA, EC (P-256, P-384), Ed25519. A key may stand on
    /// one line with `\n` written as two characters, as environment variables often have it.
    PublicKeyPem(Vec<u8>),
    /// The text of a JSON Web Key Set.
    Jwks(String),
    /// A JSON Web Key Set that is yet to be fetched; only for `Verifier::refreshed`. No token is
    /// good before it came.
    Awaited,
}

/// The keys cannot be used; the operator must mend the configuration.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum KeyError {
    /// Nothing, or only white space.
    #[error("the JWT secret is blank")]
    SecretBlank,
    /// Guessable.
    #[error("the JWT secret has {n_bytes} bytes, at least 32 are needed")]
    SecretShort {
        /// What it has.
        n_bytes: usize,
    },
    /// Everybody may know a public key: as an HMAC secret it would let everybody in.
    #[error("the JWT secret is a key file (PEM, JWK, DER or SSH), not a secret: give a public key as a public key")]
    SecretIsKey,
    /// A gateway has no use for it, and should not know it.
    #[error("the JWT public key is a private key: give the gateway only the public one")]
    PrivateKey,
    /// Certificates are not read.
    #[error("the JWT public key is a certificate: extract its public key (openssl x509 -pubkey -noout)")]
    Certificate,
    /// No PEM, or not of a key we can use.
    #[error("the JWT public key is no PEM of an RSA (2048 to 8192 bits), EC (P-256, P-384) or Ed25519 public key")]
    BadPem,
    /// Not the JSON of a set.
    #[error("the JWKS is no JSON object with a list \"keys\"")]
    BadJwks,
    /// Nothing in it can verify a token under this configuration.
    #[error("the JWKS has no key that can verify a signature with the algorithms in force")]
    NoUsableKey,
    /// More than anybody has.
    #[error("{n_keys} JWT keys are too many, at most {MAX_KEYS} are read")]
    TooManyKeys {
        /// What was given.
        n_keys: usize,
    },
    /// Would never match a token.
    #[error("the algorithm {algorithm:?} does not fit {key}")]
    Misfit {
        /// As configured.
        algorithm: Algorithm,
        /// What the key is.
        key: &'static str,
    },
    /// A list of algorithms that lists none.
    #[error("the list of JWT algorithms is empty")]
    NoAlgorithm,
    /// Anonymous sessions would join more than a session may.
    #[error("anonymous sessions would join {n_channels} channels, a session may hold {max}")]
    TooManyAnonymousChannels {
        /// Exact names in the list.
        n_channels: usize,
        /// The limit in force.
        max: usize,
    },
}

/// The keys in force.
pub(super) struct KeySet {
    keys: Vec<Key>,
    /// The algorithms that count; `None`: all that fit a key.
    wanted: Option<Vec<Algorithm>>,
}

struct Key {
    kid: Option<String>,
    algorithms: Vec<Algorithm>,
    verifying: DecodingKey,
}

impl std::fmt::Debug for KeySet {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_list().entries(self.keys.iter().map(|key| &key.algorithms)).finish()
    }
}

/// Why a token is not known to be signed.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Unsigned {
    /// No key that a set could hold will change it. One sentence.
    Ever(&'static str),
    /// No key of this set has its `kid`, or it names none and none has signed it; another set may
    /// have the key. Holds the token's payload, which proves nothing.
    ByThese(Vec<u8>),
}

/// What we read of a token's header.
#[derive(Deserialize)]
struct Head<'a> {
    #[serde(borrow)]
    alg: Cow<'a, str>,
    #[serde(borrow, default)]
    kid: Option<Cow<'a, str>>,
    #[serde(default)]
    crit: Option<serde::de::IgnoredAny>,
}

impl KeySet {
    /// # Errors
    /// `KeyError`, for the operator.
    pub(super) fn parse(source: &KeySource, wanted: Option<&[Algorithm]>) -> Result<Self, KeyError> {
        if wanted.is_some_and(<[_]>::is_empty) {
            return Err(KeyError::NoAlgorithm);
        }
        let (keys, what) = match source {
            KeySource::Secret(secret) => (vec![secret_key(secret)?], "an HMAC secret"),
            KeySource::PublicKeyPem(pem) => (pem_keys(pem)?, "the public key"),
            KeySource::Jwks(text) => (jwks_keys(text)?, JWKS),
            KeySource::Awaited => (Vec::new(), JWKS),
        };
        if keys.len() > MAX_KEYS {
            return Err(KeyError::TooManyKeys { n_keys: keys.len() });
        }
        for &algorithm in wanted.unwrap_or_default() {
            // The keys of a set change while the process runs; only what no set could hold is wrong.
            let fits = match source {
                KeySource::Jwks(_) | KeySource::Awaited => algorithm.family() != AlgorithmFamily::Hmac,
                _ => keys.iter().any(|key| key.algorithms.contains(&algorithm)),
            };
            if !fits {
                return Err(KeyError::Misfit { algorithm, key: what });
            }
        }
        let keys: Vec<Key> = keys.into_iter().filter_map(|key| key.limited_to(wanted)).collect();
        if keys.is_empty() && !matches!(source, KeySource::Awaited) {
            return Err(KeyError::NoUsableKey);
        }
        Ok(Self { keys, wanted: wanted.map(<[_]>::to_vec) })
    }

    /// How many keys are in force.
    pub(super) fn n_keys(&self) -> usize {
        self.keys.len()
    }

    /// The same keys for the same tokens, in whatever order.
    pub(super) fn is_same(&self, other: &KeySet) -> bool {
        let is_within = |a: &[Key], b: &[Key]| a.iter().all(|key| b.iter().any(|other| key.is_same(other)));
        is_within(&self.keys, &other.keys) && is_within(&other.keys, &self.keys)
    }

    /// The payload of a token that one of the keys has signed.
    ///
    /// # Errors
    /// `Unsigned`: why it is none.
    pub(super) fn payload(&self, token: &str) -> Result<Vec<u8>, Unsigned> {
        const SHAPE: Unsigned = Unsigned::Ever("the token is no JWT");
        let (message, signature) = token.rsplit_once('.').ok_or(SHAPE)?;
        let (head, payload) = message.split_once('.').ok_or(SHAPE)?;
        if payload.contains('.') || signature.is_empty() {
            return Err(SHAPE);
        }
        let head = URL_SAFE_NO_PAD.decode(head).map_err(|_| SHAPE)?;
        let head: Head =
            serde_json::from_slice(&head).map_err(|_| Unsigned::Ever("the token's header is malformed"))?;
        if head.crit.is_some() {
            return Err(Unsigned::Ever("the token asks for an extension that is not supported (crit)"));
        }
        // Names are exact: `none`, `None` and whatever else is not in the list have no key.
        let algorithm: Algorithm =
            head.alg.parse().map_err(|_| Unsigned::Ever("the token's algorithm is not accepted"))?;
        let decode = || URL_SAFE_NO_PAD.decode(payload).map_err(|_| SHAPE);
        let mut is_known = false;
        for key in self.candidates(algorithm, head.kid.as_deref()) {
            is_known = true;
            if jsonwebtoken::crypto::verify(signature, message.as_bytes(), &key.verifying, algorithm) == Ok(true) {
                return decode();
            }
        }
        if self.may_miss(algorithm, head.kid.as_deref()) {
            return Err(Unsigned::ByThese(decode()?));
        }
        Err(Unsigned::Ever(if is_known { "the token's signature does not match" } else { NO_KEY_FITS }))
    }

    /// Could a newer set hold the key of a token that none of these has signed? Not where one of
    /// these bears its `kid`: an issuer names a new key anew.
    fn may_miss(&self, algorithm: Algorithm, kid: Option<&str>) -> bool {
        algorithm.family() != AlgorithmFamily::Hmac
            && self.wanted.as_ref().is_none_or(|wanted| wanted.contains(&algorithm))
            && kid.is_none_or(|kid| self.keys.iter().all(|key| key.kid.as_deref() != Some(kid)))
    }

    /// A key without a `kid` of its own is asked about every token, one with a `kid` only about
    /// tokens that name it, or none.
    fn candidates(&self, algorithm: Algorithm, kid: Option<&str>) -> impl Iterator<Item = &Key> {
        self.keys
            .iter()
            .filter(move |key| key.algorithms.contains(&algorithm))
            .filter(move |key| match (&key.kid, kid) {
                (Some(own), Some(asked)) => own == asked,
                _ => true,
            })
            .take(MAX_TRIES)
    }
}

impl Key {
    /// `None` where nothing is left.
    fn limited_to(mut self, wanted: Option<&[Algorithm]>) -> Option<Self> {
        if let Some(wanted) = wanted {
            self.algorithms.retain(|algorithm| wanted.contains(algorithm));
        }
        (!self.algorithms.is_empty()).then_some(self)
    }

    fn is_same(&self, other: &Key) -> bool {
        let is_same_key = match (self.verifying.kind(), other.verifying.kind()) {
            (DecodingKeyKind::SecretOrDer(ours), DecodingKeyKind::SecretOrDer(theirs)) => ours == theirs,
            (
                DecodingKeyKind::RsaModulusExponent { n, e },
                DecodingKeyKind::RsaModulusExponent { n: their_n, e: their_e },
            ) => n == their_n && e == their_e,
            _ => false,
        };
        is_same_key && self.kid == other.kid && self.algorithms == other.algorithms
    }
}

fn secret_key(secret: &Secret) -> Result<Key, KeyError> {
    secret.check()?;
    let verifying = DecodingKey::from_secret(secret.bytes()).map_err(|_| KeyError::SecretBlank)?;
    Ok(Key { kid: None, algorithms: AlgorithmFamily::Hmac.algorithms().to_vec(), verifying })
}

/// Is it something that is published, or that at any rate is no shared secret?
fn looks_like_a_key_file(bytes: &[u8]) -> bool {
    let text = String::from_utf8_lossy(bytes);
    let text = text.trim();
    if text.contains("-----BEGIN ") || ["ssh-", "ecdsa-sha2-"].iter().any(|start| text.starts_with(start)) {
        return true;
    }
    if text.starts_with('{') && text.contains("\"kty\"") {
        return true;
    }
    let unfolded: String = text.split_whitespace().collect();
    is_der_of_a_key(bytes) || STANDARD.decode(unfolded).is_ok_and(|der| is_der_of_a_key(&der))
}

/// A DER sequence that names RSA, an elliptic curve or Ed25519.
fn is_der_of_a_key(bytes: &[u8]) -> bool {
    const RSA: &[u8] = &[0x2a, 0x86, 0x48, 0x86, 0xf7, 0x0d, 0x01, 0x01, 0x01];
    const EC: &[u8] = &[0x2a, 0x86, 0x48, 0xce, 0x3d, 0x02, 0x01];
    const ED25519: &[u8] = &[0x06, 0x03, 0x2b, 0x65, 0x70];
    bytes.first() == Some(&0x30)
        && [RSA, EC, ED25519].iter().any(|oid| bytes.windows(oid.len()).any(|window| window == *oid))
}

fn pem_keys(pem: &[u8]) -> Result<Vec<Key>, KeyError> {
    let text = std::str::from_utf8(pem).map_err(|_| KeyError::BadPem)?;
    let text = text.replace("\\r", "").replace("\\n", "\n");
    let mut keys = Vec::new();
    let mut rest = text.as_str();
    while let Some(begin) = rest.find("-----BEGIN ") {
        let block = &rest[begin..];
        let label = block["-----BEGIN ".len()..].split("-----").next().unwrap_or_default();
        let end_line = format!("-----END {label}-----");
        let end = block.find(&end_line).ok_or(KeyError::BadPem)? + end_line.len();
        keys.push(pem_key(label, &block[..end])?);
        rest = &block[end..];
    }
    if keys.is_empty() { Err(KeyError::BadPem) } else { Ok(keys) }
}

fn pem_key(label: &str, block: &str) -> Result<Key, KeyError> {
    match label {
        "PUBLIC KEY" | "RSA PUBLIC KEY" => {}
        "CERTIFICATE" => return Err(KeyError::Certificate),
        private if private.ends_with("PRIVATE KEY") => return Err(KeyError::PrivateKey),
        _ => return Err(KeyError::BadPem),
    }
    let pem = block.as_bytes();
    // Each of the three refuses what is not of its kind.
    let verifying = DecodingKey::from_rsa_pem(pem)
        .or_else(|_| DecodingKey::from_ec_pem(pem))
        .or_else(|_| DecodingKey::from_ed_pem(pem))
        .map_err(|_| KeyError::BadPem)?;
    let algorithms = fitting(&verifying).ok_or(KeyError::BadPem)?;
    Ok(Key { kid: None, algorithms, verifying })
}

/// The algorithms that a public key can be used with; `None` where the key itself is no good.
fn fitting(key: &DecodingKey) -> Option<Vec<Algorithm>> {
    let bytes = key.try_get_as_bytes();
    match key.family() {
        AlgorithmFamily::Hmac => None,
        AlgorithmFamily::Rsa => {
            let n_bytes = match key.kind() {
                DecodingKeyKind::RsaModulusExponent { n, .. } => n.len(),
                DecodingKeyKind::SecretOrDer(der) => aws_lc_rs::rsa::PublicKey::from_der(der).ok()?.modulus_len(),
            };
            (MIN_RSA_BYTES..=4 * MIN_RSA_BYTES).contains(&n_bytes).then(|| AlgorithmFamily::Rsa.algorithms().to_vec())
        }
        AlgorithmFamily::Ec => {
            let point = bytes.ok()?;
            let is_on = |curve| ParsedPublicKey::new(curve, point).is_ok();
            match point.len() {
                65 if is_on(&signature::ECDSA_P256_SHA256_FIXED) => Some(vec![Algorithm::ES256]),
                97 if is_on(&signature::ECDSA_P384_SHA384_FIXED) => Some(vec![Algorithm::ES384]),
                _ => None,
            }
        }
        AlgorithmFamily::Ed => {
            let point = bytes.ok().filter(|point| point.len() == 32)?;
            ParsedPublicKey::new(&signature::ED25519, point).is_ok().then(|| vec![Algorithm::EdDSA])
        }
    }
}

/// Keys of the set that are of no use here (for encryption, symmetric, of an unknown kind) are
/// passed over, as RFC 7517 §5 asks.
fn jwks_keys(text: &str) -> Result<Vec<Key>, KeyError> {
    #[derive(Deserialize)]
    struct Set {
        keys: Vec<serde_json::Value>,
    }
    let set: Set = serde_json::from_str(text).map_err(|_| KeyError::BadJwks)?;
    if set.keys.len() > MAX_KEYS {
        return Err(KeyError::TooManyKeys { n_keys: set.keys.len() });
    }
    let n_keys = set.keys.len();
    let keys: Vec<Key> = set.keys.into_iter().filter_map(jwk_key).collect();
    if keys.len() < n_keys {
        tracing::debug!(n_keys, n_usable = keys.len(), "keys of the JWKS were passed over");
    }
    Ok(keys)
}

fn jwk_key(json: serde_json::Value) -> Option<Key> {
    let jwk: Jwk = serde_json::from_value(json).ok()?;
    if !matches!(jwk.common.public_key_use, None | Some(PublicKeyUse::Signature)) {
        return None;
    }
    if jwk.common.key_operations.as_ref().is_some_and(|ops| !ops.contains(&KeyOperations::Verify)) {
        return None;
    }
    let decode = |text: &str| URL_SAFE_NO_PAD.decode(text.trim_end_matches('=')).ok();
    let verifying = match &jwk.algorithm {
        AlgorithmParameters::RSA(rsa) => {
            // Some issuers put the sign byte of ASN.1 in front.
            let n = decode(&rsa.n)?;
            let n = &n[n.iter().take_while(|&&b| b == 0).count()..];
            DecodingKey::from_rsa_raw_components(n, &decode(&rsa.e)?)
        }
        AlgorithmParameters::EllipticCurve(_) => DecodingKey::from_jwk(&jwk).ok()?,
        AlgorithmParameters::OctetKeyPair(okp) if okp.curve == EllipticCurve::Ed25519 => {
            DecodingKey::from_jwk(&jwk).ok()?
        }
        // A symmetric key has no place in a set that is published.
        _ => return None,
    };
    let mut algorithms = fitting(&verifying)?;
    if let Some(only) = jwk.common.key_algorithm {
        let only: Algorithm = only.to_string().parse().ok()?;
        algorithms.retain(|&algorithm| algorithm == only);
    }
    let kid = jwk.common.key_id;
    (!algorithms.is_empty()).then_some(Key { kid, algorithms, verifying })
}
