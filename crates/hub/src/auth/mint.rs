//! Makes tokens: for `tidegate token`, `tidegate dev`, and tests. A gateway never signs one while
//! it serves.

use jsonwebtoken::{Algorithm, AlgorithmFamily, EncodingKey, Header};
use serde_json::Value;

use super::{KeyError, Secret, install_crypto};

/// The token could not be made.
#[derive(Debug, thiserror::Error)]
pub enum MintError {
    /// The secret would not be accepted by a gateway either.
    #[error(transparent)]
    Key(#[from] KeyError),
    /// Claims are a JSON object.
    #[error("the claims of a token are a JSON object")]
    NotAnObject,
    /// The private key is none, or does not fit the algorithm.
    #[error("the private key is unusable with {algorithm:?}: {source}")]
    Signing {
        /// What was asked for.
        algorithm: Algorithm,
        /// The library's own words; they hold nothing of the key.
        source: jsonwebtoken::errors::Error,
    },
}

/// An HS256 token. A trailing line end of the secret is dropped, as everywhere.
///
/// # Errors
/// `MintError`: the caller's arguments are wrong.
pub fn mint(secret: &[u8], claims: &Value) -> Result<String, MintError> {
    mint_with_secret(Algorithm::HS256, secret, claims)
}

/// A token by any of the HMAC algorithms.
///
/// # Errors
/// `MintError`: the caller's arguments are wrong.
pub fn mint_with_secret(algorithm: Algorithm, secret: &[u8], claims: &Value) -> Result<String, MintError> {
    let secret = Secret::new(secret.to_vec());
    secret.check()?;
    let key = EncodingKey::from_secret(secret.bytes());
    encode(Header::new(algorithm), key, claims)
}

/// A token by a private key in PEM: PKCS#8 (RSA, EC, Ed25519) or PKCS#1 (RSA).
///
/// # Errors
/// `MintError`: the caller's arguments are wrong.
pub fn mint_with_pem(algorithm: Algorithm, pem: &[u8], claims: &Value) -> Result<String, MintError> {
    encode(Header::new(algorithm), private_key(algorithm, pem), claims)
}

/// As `mint_with_pem`, with a `kid` in the header that picks a key of a JWKS.
///
/// # Errors
/// `MintError`: the caller's arguments are wrong.
pub fn mint_with_kid(algorithm: Algorithm, pem: &[u8], kid: &str, claims: &Value) -> Result<String, MintError> {
    let header = Header { kid: Some(kid.to_owned()), ..Header::new(algorithm) };
    encode(header, private_key(algorithm, pem), claims)
}

fn private_key(algorithm: Algorithm, pem: &[u8]) -> jsonwebtoken::errors::Result<EncodingKey> {
    match algorithm.family() {
        AlgorithmFamily::Rsa => EncodingKey::from_rsa_pem(pem),
        AlgorithmFamily::Ec => EncodingKey::from_ec_pem(pem),
        AlgorithmFamily::Ed => EncodingKey::from_ed_pem(pem),
        AlgorithmFamily::Hmac => Err(jsonwebtoken::errors::ErrorKind::InvalidAlgorithm.into()),
    }
}

fn encode(header: Header, key: jsonwebtoken::errors::Result<EncodingKey>, claims: &Value) -> Result<String, MintError> {
    install_crypto();
    if !claims.is_object() {
        return Err(MintError::NotAnObject);
    }
    key.and_then(|key| jsonwebtoken::encode(&header, claims, &key))
        .map_err(|source| MintError::Signing { algorithm: header.alg, source })
}
