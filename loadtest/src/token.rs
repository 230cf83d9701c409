//! Tokens of our own making, so that a mistake of the gateway's minting cannot hide one of its
//! verifying. Signs (HS256); decides nothing about claims.

use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use serde_json::{Value, json};
use sha2::{Digest, Sha256};

/// The key of every gateway that the benchmarks start.
pub const SECRET: &str = "the key of a benchmark, worth nothing";

/// An `exp` that no run lives to see (2100-01-01), and so no clock is needed here.
const NEVER: u64 = 4_102_444_800;

/// An `exp` long past.
const LONG_AGO: u64 = 1_000_000_000;

const BLOCK_BYTES: usize = 64;

/// What is wrong with a token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Flaw {
    None,
    Expired,
    BadSignature,
}

/// A token that joins `channels`, with the three identities that a revocation may name, all made
/// from `name`.
pub fn full(name: &str, channels: &[&str], flaw: Flaw) -> String {
    let mut claims = identities(name);
    claims["channels"] = channels.into();
    if flaw == Flaw::Expired {
        claims["exp"] = LONG_AGO.into();
    }
    sign(&claims, if flaw == Flaw::BadSignature { "another key, which the gateway does not know" } else { SECRET })
}

/// As `full`; joins nothing, and may ask for `channels`.
pub fn asking(name: &str, channels: &[&str]) -> String {
    let mut claims = identities(name);
    claims["subscribe"] = channels.into();
    sign(&claims, SECRET)
}

/// A token that may publish these topics to a Mercure hub with the same key.
pub fn mercure(topics: &[&str]) -> String {
    sign(&json!({"mercure": {"publish": topics}}), SECRET)
}

fn identities(name: &str) -> Value {
    json!({"sub": format!("u-{name}"), "sid": format!("s-{name}"), "jti": format!("j-{name}"), "exp": NEVER})
}

fn sign(claims: &Value, key: &str) -> String {
    let part = |value: &Value| URL_SAFE_NO_PAD.encode(value.to_string());
    let signed = format!("{}.{}", part(&json!({"alg": "HS256", "typ": "JWT"})), part(claims));
    let signature = URL_SAFE_NO_PAD.encode(hmac_sha256(key.as_bytes(), signed.as_bytes()));
    format!("{signed}.{signature}")
}

/// RFC 2104. `key` is no longer than a block here.
fn hmac_sha256(key: &[u8], text: &[u8]) -> [u8; 32] {
    assert!(key.len() <= BLOCK_BYTES, "a longer key would have to be hashed first");
    let pad = |with: u8| {
        let mut block = [with; BLOCK_BYTES];
        block.iter_mut().zip(key).for_each(|(byte, key)| *byte ^= key);
        block
    };
    let inner = Sha256::new().chain_update(pad(0x36)).chain_update(text).finalize();
    Sha256::new().chain_update(pad(0x5c)).chain_update(inner).finalize().into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_mac_is_that_of_rfc_4231() {
        let hex: String =
            hmac_sha256(b"Jefe", b"what do ya want for nothing?").iter().map(|byte| format!("{byte:02x}")).collect();
        assert_eq!(hex, "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843");
    }

    #[test]
    fn a_flaw_changes_the_signature_or_the_time_and_nothing_else() {
        let claims = |flaw| {
            let token = full("7", &["a"], flaw);
            let claims = URL_SAFE_NO_PAD.decode(token.split('.').nth(1).unwrap()).unwrap();
            serde_json::from_slice::<Value>(&claims).unwrap()
        };
        assert_eq!(claims(Flaw::None), claims(Flaw::BadSignature));
        assert_ne!(full("7", &["a"], Flaw::None), full("7", &["a"], Flaw::BadSignature));
        assert_eq!(claims(Flaw::Expired)["exp"], LONG_AGO);
    }
}
