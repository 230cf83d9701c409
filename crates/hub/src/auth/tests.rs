//! Tokens good and bad. Every key is made here.

use std::sync::OnceLock;

use aws_lc_rs::encoding::{AsDer, Pkcs8V1Der, PublicKeyX509Der};
use aws_lc_rs::rand::SystemRandom;
use aws_lc_rs::rsa::KeySize;
use aws_lc_rs::signature::{
    ECDSA_P256_SHA256_FIXED_SIGNING, ECDSA_P384_SHA384_FIXED_SIGNING, EcdsaKeyPair, EcdsaSigningAlgorithm,
    Ed25519KeyPair, KeyPair, RsaKeyPair,
};
use base64::Engine;
use base64::engine::general_purpose::{STANDARD, URL_SAFE_NO_PAD};
use serde_json::{Value, json};

use super::*;

const SECRET: &[u8] = b"0123456789abcdef0123456789abcdef";
pub(super) const NOW: Duration = Duration::from_secs(1_800_000_000);

pub(super) fn config(keys: KeySource) -> AuthConfig {
    AuthConfig {
        keys,
        algorithms: None,
        issuer: None,
        audience: None,
        leeway: Duration::ZERO,
        user_channel: UserChannel::On,
        max_channels: 100,
        anonymous: None,
    }
}

fn secret(bytes: &[u8]) -> KeySource {
    KeySource::Secret(Secret::new(bytes.to_vec()))
}

fn verifier() -> Verifier {
    Verifier::new(config(secret(SECRET))).unwrap()
}

pub(super) fn claims(more: Value) -> Value {
    let mut claims = json!({"sub": "42", "exp": NOW.as_secs() + 60});
    claims.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    claims.as_object_mut().unwrap().retain(|_, value| *value != json!("absent"));
    claims
}

pub(super) fn token(more: Value) -> String {
    mint(SECRET, &claims(more)).unwrap()
}

fn is_invalid(result: Result<Arc<Identity>, Denied>) -> bool {
    matches!(result, Err(Denied::Invalid(_)))
}

/// A key pair as an operator has it.
pub(super) struct Pair {
    pub(super) private: String,
    public: String,
    /// Without `kid`.
    pub(super) jwk: Value,
}

fn pem(label: &str, der: &[u8]) -> String {
    let text = STANDARD.encode(der);
    let lines: Vec<&str> = text.as_bytes().chunks(64).map(|line| std::str::from_utf8(line).unwrap()).collect();
    format!("-----BEGIN {label}-----\n{}\n-----END {label}-----\n", lines.join("\n"))
}

pub(super) fn b64(bytes: &[u8]) -> String {
    URL_SAFE_NO_PAD.encode(bytes)
}

fn pair(private: &[u8], public: impl AsDer<PublicKeyX509Der<'static>>, jwk: Value) -> Pair {
    let public = public.as_der().unwrap();
    Pair { private: pem("PRIVATE KEY", private), public: pem("PUBLIC KEY", public.as_ref()), jwk }
}

fn new_rsa(size: KeySize) -> Pair {
    let key = RsaKeyPair::generate(size).unwrap();
    let private: Pkcs8V1Der = key.as_der().unwrap();
    let public = key.public_key();
    let n = public.modulus().big_endian_without_leading_zero().to_vec();
    let e = public.exponent().big_endian_without_leading_zero().to_vec();
    let jwk = json!({"kty": "RSA", "n": b64(&n), "e": b64(&e), "use": "sig"});
    let public: PublicKeyX509Der = public.as_der().unwrap();
    Pair { private: pem("PRIVATE KEY", private.as_ref()), public: pem("PUBLIC KEY", public.as_ref()), jwk }
}

fn rsa() -> &'static Pair {
    static RSA: OnceLock<Pair> = OnceLock::new();
    RSA.get_or_init(|| new_rsa(KeySize::Rsa2048))
}

fn ec(algorithm: &'static EcdsaSigningAlgorithm, curve: &str) -> Pair {
    let private = EcdsaKeyPair::generate_pkcs8(algorithm, &SystemRandom::new()).unwrap();
    let key = EcdsaKeyPair::from_pkcs8(algorithm, private.as_ref()).unwrap();
    let point = &key.public_key().as_ref()[1..];
    let (x, y) = point.split_at(point.len() / 2);
    let jwk = json!({"kty": "EC", "crv": curve, "x": b64(x), "y": b64(y)});
    pair(private.as_ref(), key.public_key().clone(), jwk)
}

pub(super) fn p256() -> Pair {
    ec(&ECDSA_P256_SHA256_FIXED_SIGNING, "P-256")
}

fn p384() -> Pair {
    ec(&ECDSA_P384_SHA384_FIXED_SIGNING, "P-384")
}

fn ed25519() -> Pair {
    let private = Ed25519KeyPair::generate_pkcs8(&SystemRandom::new()).unwrap();
    let key = Ed25519KeyPair::from_pkcs8(private.as_ref()).unwrap();
    let jwk = json!({"kty": "OKP", "crv": "Ed25519", "x": b64(key.public_key().as_ref())});
    let public: PublicKeyX509Der = key.public_key().as_der().unwrap();
    Pair { private: pem("PRIVATE KEY", private.as_ref()), public: pem("PUBLIC KEY", public.as_ref()), jwk }
}

fn public(pair: &Pair) -> KeySource {
    KeySource::PublicKeyPem(pair.public.clone().into_bytes())
}

pub(super) fn jwks(keys: &[Value]) -> KeySource {
    KeySource::Jwks(json!({ "keys": keys }).to_string())
}

pub(super) fn with_kid(jwk: &Value, kid: &str) -> Value {
    let mut jwk = jwk.clone();
    jwk["kid"] = json!(kid);
    jwk
}

const RSA_ALGORITHMS: [Algorithm; 6] =
    [Algorithm::RS256, Algorithm::RS384, Algorithm::RS512, Algorithm::PS256, Algorithm::PS384, Algorithm::PS512];

#[test]
fn every_hmac_algorithm_is_understood() {
    for algorithm in [Algorithm::HS256, Algorithm::HS384, Algorithm::HS512] {
        let token = mint_with_secret(algorithm, SECRET, &claims(json!({}))).unwrap();
        assert_eq!(verifier().verify(&token, NOW).unwrap().user.as_deref(), Some("42"));
    }
}

#[test]
fn every_asymmetric_algorithm_is_understood_by_pem_and_by_jwks() {
    let (p256, p384, ed25519) = (p256(), p384(), ed25519());
    let mut cases = vec![(Algorithm::ES256, &p256), (Algorithm::ES384, &p384), (Algorithm::EdDSA, &ed25519)];
    cases.extend(RSA_ALGORITHMS.map(|algorithm| (algorithm, rsa())));
    let all = jwks(&[
        with_kid(&rsa().jwk, "r"),
        with_kid(&p256.jwk, "p"),
        with_kid(&p384.jwk, "q"),
        with_kid(&ed25519.jwk, "e"),
    ]);
    let all = Verifier::new(config(all)).unwrap();
    for (algorithm, pair) in cases {
        let token = mint_with_pem(algorithm, pair.private.as_bytes(), &claims(json!({}))).unwrap();
        let by_pem = Verifier::new(config(public(pair))).unwrap();
        assert!(by_pem.verify(&token, NOW).is_ok(), "{algorithm:?} by PEM");
        assert!(all.verify(&token, NOW).is_ok(), "{algorithm:?} by JWKS");
        let named = mint_with_kid(algorithm, pair.private.as_bytes(), "nobody", &claims(json!({}))).unwrap();
        assert!(by_pem.verify(&named, NOW).is_ok(), "a kid does not matter to a PEM");
        assert!(is_invalid(all.verify(&named, NOW)), "{algorithm:?} with a kid that is not in the set");
    }
}

/// `header.payload` with the given header, signed as told.
fn forged(head: Value, sign: impl FnOnce(&[u8]) -> Vec<u8>) -> String {
    let message = format!("{}.{}", b64(head.to_string().as_bytes()), b64(claims(json!({})).to_string().as_bytes()));
    let signature = sign(message.as_bytes());
    format!("{message}.{}", b64(&signature))
}

fn hs256(key: &[u8]) -> impl FnOnce(&[u8]) -> Vec<u8> {
    let key = aws_lc_rs::hmac::Key::new(aws_lc_rs::hmac::HMAC_SHA256, key);
    move |message| aws_lc_rs::hmac::sign(&key, message).as_ref().to_vec()
}

#[test]
fn the_token_never_picks_its_algorithm() {
    let by_rsa = Verifier::new(config(public(rsa()))).unwrap();
    let set = Verifier::new(config(jwks(&[with_kid(&rsa().jwk, "r")]))).unwrap();
    let pem = rsa().public.as_bytes();
    let n = URL_SAFE_NO_PAD.decode(rsa().jwk["n"].as_str().unwrap()).unwrap();
    let mut tokens: Vec<String> =
        ["none", "None", "NONE", "", "hs256", "ES512"].map(|alg| forged(json!({"alg": alg}), |_| vec![0; 64])).to_vec();
    for key in [pem, pem.trim_ascii_end(), n.as_slice(), rsa().jwk["n"].as_str().unwrap().as_bytes()] {
        tokens.push(forged(json!({"alg": "HS256", "typ": "JWT"}), hs256(key)));
    }
    let none = forged(json!({"alg": "none"}), |_| Vec::new());
    let empty = forged(json!({"alg": "RS256"}), |_| Vec::new());
    tokens.extend([none.trim_end_matches('.').to_owned(), none, empty]);
    for token in &tokens {
        assert!(is_invalid(by_rsa.verify(token, NOW)), "{token}");
        assert!(is_invalid(set.verify(token, NOW)), "{token}");
        assert!(is_invalid(verifier().verify(token, NOW)), "{token}");
    }
    let by_ec = Verifier::new(config(public(&p256()))).unwrap();
    for zeros in [vec![0; 64], vec![0; 96], Vec::new()] {
        assert!(is_invalid(by_ec.verify(&forged(json!({"alg": "ES256"}), |_| zeros), NOW)));
    }
    let rs256 = mint_with_pem(Algorithm::RS256, rsa().private.as_bytes(), &claims(json!({}))).unwrap();
    assert!(is_invalid(verifier().verify(&rs256, NOW)), "an RS256 token for an HMAC secret");
    assert!(by_rsa.verify(&rs256, NOW).is_ok());
}

#[test]
fn a_configured_list_of_algorithms_is_the_whole_list() {
    let only = AuthConfig { algorithms: Some(vec![Algorithm::PS256]), ..config(public(rsa())) };
    let only = Verifier::new(only).unwrap();
    for algorithm in RSA_ALGORITHMS {
        let token = mint_with_pem(algorithm, rsa().private.as_bytes(), &claims(json!({}))).unwrap();
        assert_eq!(only.verify(&token, NOW).is_ok(), algorithm == Algorithm::PS256, "{algorithm:?}");
    }
}

#[test]
fn an_algorithm_that_does_not_fit_the_key_stops_the_start() {
    let with = |keys, list: &[Algorithm]| {
        Verifier::new(AuthConfig { algorithms: Some(list.to_vec()), ..config(keys) }).map(|_| ())
    };
    let misfit = |algorithm, key| Err(KeyError::Misfit { algorithm, key });
    assert_eq!(with(secret(SECRET), &[Algorithm::HS256, Algorithm::RS256]), misfit(Algorithm::RS256, "an HMAC secret"));
    assert_eq!(with(public(rsa()), &[Algorithm::HS256]), misfit(Algorithm::HS256, "the public key"));
    assert_eq!(with(public(&p256()), &[Algorithm::ES384]), misfit(Algorithm::ES384, "the public key"));
    let set = jwks(std::slice::from_ref(&rsa().jwk));
    assert!(matches!(with(set.clone(), &[Algorithm::HS256]), Err(KeyError::Misfit { .. })));
    assert_eq!(with(set.clone(), &[Algorithm::RS256, Algorithm::ES256]), Ok(()), "a set may get such a key later");
    assert_eq!(with(set, &[Algorithm::ES256]), Err(KeyError::NoUsableKey));
    assert_eq!(with(secret(SECRET), &[]), Err(KeyError::NoAlgorithm));
}

#[test]
fn secrets_are_trimmed_of_one_line_end_and_refused_when_weak() {
    for end in ["", "\n", "\r\n"] {
        let written = [SECRET, end.as_bytes()].concat();
        let verifier = Verifier::new(config(secret(&written))).unwrap();
        assert!(verifier.verify(&token(json!({})), NOW).is_ok(), "{end:?}");
        assert_eq!(mint(&written, &claims(json!({}))).unwrap(), token(json!({})));
    }
    let refused = |bytes: &[u8]| Verifier::new(config(secret(bytes))).map(|_| ()).unwrap_err();
    assert_eq!(refused(b""), KeyError::SecretBlank);
    assert_eq!(refused(b"\n"), KeyError::SecretBlank);
    assert_eq!(refused(&[b' '; 64]), KeyError::SecretBlank);
    assert_eq!(refused(b"12345"), KeyError::SecretShort { n_bytes: 5 });
    assert_eq!(refused(&SECRET[1..]), KeyError::SecretShort { n_bytes: 31 });
    assert!(mint(b"12345", &claims(json!({}))).is_err());
}

#[test]
fn a_key_file_is_no_secret() {
    let refused = |bytes: &[u8]| Verifier::new(config(secret(bytes))).map(|_| ()).unwrap_err();
    for pair in [rsa(), &p256(), &ed25519()] {
        let der =
            STANDARD.decode(pair.public.lines().filter(|line| !line.starts_with('-')).collect::<String>()).unwrap();
        let bare: String = pair.public.lines().filter(|line| !line.starts_with('-')).collect();
        for text in [pair.public.as_bytes(), pair.public.replace('\n', "\\n").as_bytes(), pair.private.as_bytes()] {
            assert_eq!(refused(text), KeyError::SecretIsKey);
        }
        assert_eq!(refused(pair.jwk.to_string().as_bytes()), KeyError::SecretIsKey);
        assert_eq!(refused(&der), KeyError::SecretIsKey);
        assert_eq!(refused(bare.as_bytes()), KeyError::SecretIsKey);
    }
    assert_eq!(refused(b"ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIF"), KeyError::SecretIsKey);
}

#[test]
fn public_keys_are_read_as_people_have_them_and_others_are_refused() {
    let pair = p256();
    let token = mint_with_pem(Algorithm::ES256, pair.private.as_bytes(), &claims(json!({}))).unwrap();
    let other = mint_with_pem(Algorithm::RS256, rsa().private.as_bytes(), &claims(json!({}))).unwrap();
    let with = |text: &str| Verifier::new(config(KeySource::PublicKeyPem(text.as_bytes().to_vec())));
    let one_line = pair.public.replace('\n', "\\n");
    let windows = pair.public.replace('\n', "\r\n");
    let trimmed = pair.public.trim_end();
    for text in [pair.public.as_str(), &one_line, &windows, trimmed, &format!("# ours\n{}", pair.public)] {
        assert!(with(text).unwrap().verify(&token, NOW).is_ok(), "{text}");
    }
    let both = with(&format!("{}{}", pair.public, rsa().public)).unwrap();
    assert!(both.verify(&token, NOW).is_ok() && both.verify(&other, NOW).is_ok());

    let refused = |text: &str| with(text).map(|_| ()).unwrap_err();
    assert_eq!(refused(&pair.private), KeyError::PrivateKey);
    assert_eq!(refused(&pem("EC PRIVATE KEY", b"x")), KeyError::PrivateKey);
    assert_eq!(refused(&pem("CERTIFICATE", b"x")), KeyError::Certificate);
    let cut = &pair.public[..pair.public.len() / 2];
    for bad in ["", "no PEM", cut, &pem("PUBLIC KEY", b"not DER"), &pem("DH PARAMETERS", b"x")] {
        assert_eq!(refused(bad), KeyError::BadPem, "{bad}");
    }
}

#[test]
fn no_secret_and_no_key_shows_in_debug_text() {
    let config = config(secret(SECRET));
    let shown = format!("{:?} {:?}", Verifier::new(config.clone()).unwrap(), config);
    assert!(!shown.contains("0123456789") && !shown.contains("48, 49, 50"), "{shown}");
}

#[test]
fn kid_only_picks_among_the_keys_of_the_set() {
    let (a, b) = (p256(), p256());
    let set = Verifier::new(config(jwks(&[with_kid(&a.jwk, "a"), with_kid(&b.jwk, "b")]))).unwrap();
    let mint = |pair: &Pair, kid: &str| {
        mint_with_kid(Algorithm::ES256, pair.private.as_bytes(), kid, &claims(json!({}))).unwrap()
    };
    assert!(set.verify(&mint(&a, "a"), NOW).is_ok());
    assert!(set.verify(&mint(&b, "b"), NOW).is_ok());
    let long = "k".repeat(10_000);
    for kid in ["b", "A", "", "../../dev/null", "' OR 1=1", &long] {
        assert!(is_invalid(set.verify(&mint(&a, kid), NOW)), "{kid}");
    }
    let unnamed = mint_with_pem(Algorithm::ES256, b.private.as_bytes(), &claims(json!({}))).unwrap();
    assert!(set.verify(&unnamed, NOW).is_ok(), "without a kid any key of the set may have signed");
}

#[test]
fn key_sources_named_by_the_token_are_not_even_read() {
    let ours = p256();
    let theirs = p256();
    let set = Verifier::new(config(jwks(&[with_kid(&ours.jwk, "a")]))).unwrap();
    let der: String = theirs.private.lines().filter(|line| !line.starts_with('-')).collect();
    let key = EcdsaKeyPair::from_pkcs8(&ECDSA_P256_SHA256_FIXED_SIGNING, &STANDARD.decode(der).unwrap()).unwrap();
    let sign = |message: &[u8]| key.sign(&SystemRandom::new(), message).unwrap().as_ref().to_vec();
    for head in [
        json!({"alg": "ES256", "jwk": theirs.jwk}),
        json!({"alg": "ES256", "jwk": theirs.jwk, "kid": "a"}),
        json!({"alg": "ES256", "jku": "http://127.0.0.1:1/jwks.json"}),
        json!({"alg": "ES256", "x5u": "http://127.0.0.1:1/chain.pem"}),
        json!({"alg": "ES256", "kid": ["a"]}),
        json!({"alg": "ES256", "kid": 1}),
        json!({"alg": ["ES256"]}),
        json!({"kid": "a"}),
        json!([]),
    ] {
        assert!(is_invalid(set.verify(&forged(head.clone(), sign), NOW)), "{head}");
    }
    let crit = forged(json!({"alg": "HS256", "crit": ["b64"], "b64": false}), hs256(SECRET));
    assert!(is_invalid(verifier().verify(&crit, NOW)), "an extension we do not know");
}

#[test]
fn a_set_is_read_past_keys_that_are_of_no_use() {
    let pair = p256();
    let mut usable = with_kid(&pair.jwk, "a");
    usable["alg"] = json!("ES256");
    let mut encrypting = with_kid(&rsa().jwk, "enc");
    encrypting["use"] = json!("enc");
    let mut signing_only = with_kid(&pair.jwk, "ops");
    signing_only["key_ops"] = json!(["sign"]);
    let shared = json!({"kty": "oct", "k": b64(SECRET), "kid": "oct", "alg": "HS256"});
    let odd = json!({"kty": "LOTUS", "kid": "odd"});
    let off_curve = json!({"kty": "EC", "crv": "P-256", "x": b64(&[1; 32]), "y": b64(&[2; 32]), "kid": "off"});
    let set = [json!("no object"), odd, shared, encrypting, signing_only, off_curve, usable];
    let verifier = Verifier::new(config(jwks(&set))).unwrap();
    let good = mint_with_kid(Algorithm::ES256, pair.private.as_bytes(), "a", &claims(json!({}))).unwrap();
    assert!(verifier.verify(&good, NOW).is_ok());
    assert!(is_invalid(verifier.verify(&token(json!({})), NOW)), "a symmetric key in a set is no key");
    for kid in ["ops", "off"] {
        let token = mint_with_kid(Algorithm::ES256, pair.private.as_bytes(), kid, &claims(json!({}))).unwrap();
        assert!(is_invalid(verifier.verify(&token, NOW)), "{kid}");
    }
    let refused = |keys: KeySource| Verifier::new(config(keys)).map(|_| ()).unwrap_err();
    assert_eq!(refused(jwks(&set[..6])), KeyError::NoUsableKey);
    assert_eq!(refused(jwks(&[])), KeyError::NoUsableKey);
    for text in ["", "<html>", "[]", "{}", "{\"keys\":1}"] {
        assert_eq!(refused(KeySource::Jwks(text.into())), KeyError::BadJwks, "{text}");
    }
    assert_eq!(refused(jwks(&vec![json!({}); 65])), KeyError::TooManyKeys { n_keys: 65 });
}

#[test]
fn rsa_keys_under_2048_bits_are_refused() {
    let n = [0xff; 128];
    let small = json!({"kty": "RSA", "n": b64(&n), "e": "AQAB"});
    assert_eq!(Verifier::new(config(jwks(&[small]))).map(|_| ()).unwrap_err(), KeyError::NoUsableKey);
    let mut padded = rsa().jwk.clone();
    let n = URL_SAFE_NO_PAD.decode(padded["n"].as_str().unwrap()).unwrap();
    padded["n"] = json!(b64(&[&[0], n.as_slice()].concat()));
    let token = mint_with_pem(Algorithm::RS256, rsa().private.as_bytes(), &claims(json!({}))).unwrap();
    assert!(Verifier::new(config(jwks(&[padded]))).unwrap().verify(&token, NOW).is_ok(), "a leading zero");
}

#[test]
fn replaced_keys_hold_at_once_and_bad_ones_change_nothing() {
    let (a, b) = (p256(), p256());
    let verifier = Verifier::new(config(jwks(&[with_kid(&a.jwk, "a")]))).unwrap();
    let of =
        |pair: &Pair, kid| mint_with_kid(Algorithm::ES256, pair.private.as_bytes(), kid, &claims(json!({}))).unwrap();
    let (by_a, by_b) = (of(&a, "a"), of(&b, "b"));
    assert!(verifier.verify(&by_a, NOW).is_ok());
    assert!(is_invalid(verifier.verify(&by_b, NOW)));
    assert!(verifier.replace_keys(&KeySource::Jwks("<html>".into())).is_err());
    assert!(verifier.replace_keys(&jwks(&[])).is_err());
    assert!(verifier.verify(&by_a, NOW).is_ok());
    verifier.replace_keys(&jwks(&[with_kid(&b.jwk, "b")])).unwrap();
    assert!(verifier.verify(&by_b, NOW).is_ok());
    assert!(is_invalid(verifier.verify(&by_a, NOW)), "what was remembered went with its key");
}

#[test]
fn what_is_no_jwt_is_invalid() {
    let good = token(json!({}));
    let [head, payload, signature] = good.split('.').collect::<Vec<_>>().try_into().unwrap();
    for bad in [
        "".to_owned(),
        ".".into(),
        "..".into(),
        "...".into(),
        format!("{head}.{payload}"),
        format!("{good}."),
        format!("{good}.x"),
        format!("{good}="),
        format!(" {good}"),
        format!("{head}.{payload}x.{signature}"),
        format!("{head}.{payload}.{}", signature.to_lowercase()),
        format!("é.{payload}.{signature}"),
        "a".repeat(MAX_TOKEN_BYTES + 1),
    ] {
        assert!(is_invalid(verifier().verify(&bad, NOW)), "{bad}");
    }
    for payload in [json!([]), json!("x"), json!(null)] {
        assert!(mint(SECRET, &payload).is_err());
        let head = b64(br#"{"alg":"HS256"}"#);
        let message = format!("{head}.{}", b64(payload.to_string().as_bytes()));
        let signature = b64(&hs256(SECRET)(message.as_bytes()));
        assert!(is_invalid(verifier().verify(&format!("{message}.{signature}"), NOW)));
    }
}

#[test]
fn a_claim_missing_twice_or_of_the_wrong_type_is_invalid() {
    for bad in [
        json!({"sub": "absent"}),
        json!({"exp": "absent"}),
        json!({"sub": 42}),
        json!({"sub": null}),
        json!({"sub": ""}),
        json!({"exp": "1800000060"}),
        json!({"exp": null}),
        json!({"exp": true}),
        json!({"exp": [1_800_000_060]}),
        json!({"nbf": "0"}),
        json!({"nbf": null}),
        json!({"iat": "0"}),
        json!({"iat": null}),
        json!({"jti": 7}),
        json!({"sid": {}}),
        json!({"channels": "a"}),
        json!({"channels": [1]}),
        json!({"channels": ["a b"]}),
        json!({"channels": [""]}),
        json!({"channels": ["a*"]}),
        json!({"subscribe": "a"}),
        json!({"subscribe": ["a*b"]}),
        json!({"subscribe": ["a b*"]}),
    ] {
        assert!(is_invalid(verifier().verify(&token(bad.clone()), NOW)), "{bad}");
    }
    let payload = r#"{"sub":"1","sub":"2","exp":1800000060}"#;
    let message = format!("{}.{}", b64(br#"{"alg":"HS256"}"#), b64(payload.as_bytes()));
    let signature = b64(&hs256(SECRET)(message.as_bytes()));
    assert!(is_invalid(verifier().verify(&format!("{message}.{signature}"), NOW)));
}

#[test]
fn ids_have_at_most_256_bytes_and_a_subs_channel_200() {
    let off = AuthConfig { user_channel: UserChannel::Off, ..config(secret(SECRET)) };
    let off = Verifier::new(off).unwrap();
    for claim in ["sub", "jti", "sid"] {
        assert!(off.verify(&token(json!({claim: "x".repeat(255)})), NOW).is_ok());
        assert!(off.verify(&token(json!({claim: "x".repeat(256)})), NOW).is_ok());
        assert!(is_invalid(off.verify(&token(json!({claim: "x".repeat(257)})), NOW)));
    }
    assert!(verifier().verify(&token(json!({"sub": "x".repeat(195)})), NOW).is_ok());
    assert!(is_invalid(verifier().verify(&token(json!({"sub": "x".repeat(196)})), NOW)));
}

#[test]
fn claims_become_an_identity() {
    let who = verifier()
        .verify(
            &token(json!({
                "sub": "a b", "jti": "j", "sid": "s", "iat": 1_799_999_999.9,
                "channels": ["news", "news", "user:a%20b"], "subscribe": ["room:*", "lobby"],
            })),
            NOW,
        )
        .unwrap();
    assert_eq!((who.user.as_deref(), who.jti.as_deref(), who.sid.as_deref()), (Some("a b"), Some("j"), Some("s")));
    assert_eq!(who.issued_at, 1_799_999_999);
    assert_eq!(who.expires_at, Some(NOW + Duration::from_secs(60)));
    let joined: Vec<&str> = who.grants.joined.iter().map(|channel| channel.as_str()).collect();
    assert_eq!(joined, ["user:a%20b", "news"]);
    assert_eq!(who.grants.askable, ["room:*", "lobby"].map(|text| Pattern::new(text).unwrap()));

    let bare = token(json!({"jti": null, "sid": "", "channels": null, "subscribe": null, "aud": null}));
    let bare = verifier().verify(&bare, NOW).unwrap();
    assert_eq!((&bare.jti, &bare.sid, bare.issued_at), (&None, &None, 0));
    assert_eq!(bare.grants.joined.len(), 1);

    let off = AuthConfig { user_channel: UserChannel::Off, ..config(secret(SECRET)) };
    assert!(Verifier::new(off).unwrap().verify(&token(json!({})), NOW).unwrap().grants.joined.is_empty());
}

#[test]
fn the_channels_of_a_token_are_bounded_with_the_users_own() {
    let few = Verifier::new(AuthConfig { max_channels: 3, ..config(secret(SECRET)) }).unwrap();
    let joining = |names: &[&str]| few.verify(&token(json!({"channels": names})), NOW).map(|_| ());
    assert_eq!(joining(&["a", "b", "a"]), Ok(()));
    assert_eq!(joining(&["a", "b", "c"]), Err(Denied::TooManyChannels));
    assert_eq!(Denied::TooManyChannels.code(), RefusalCode::TooManyChannels);
}

#[test]
fn a_token_ends_at_exp_and_begins_at_nbf_to_the_nanosecond() {
    let at = |token: &str, now| verifier().verify(token, now).map(|_| ());
    let exp = token(json!({"exp": NOW.as_secs()}));
    assert_eq!(at(&exp, NOW - Duration::from_nanos(1)), Ok(()));
    assert_eq!(at(&exp, NOW), Err(Denied::Expired));
    let half = token(json!({"exp": NOW.as_secs_f64() + 0.5}));
    assert_eq!(at(&half, NOW + Duration::from_millis(499)), Ok(()));
    assert_eq!(at(&half, NOW + Duration::from_millis(500)), Err(Denied::Expired));
    let nbf = token(json!({"nbf": NOW.as_secs()}));
    assert_eq!(at(&nbf, NOW - Duration::from_nanos(1)), Err(Denied::NotYet));
    assert_eq!(at(&nbf, NOW), Ok(()));
    for (exp, outcome) in [
        (json!(-5), Err(Denied::Expired)),
        (json!(0), Err(Denied::Expired)),
        (json!(1e18), Ok(())),
        (json!(u64::MAX), Ok(())),
    ] {
        assert_eq!(at(&token(json!({"exp": exp})), NOW), outcome, "{exp}");
    }
    assert_eq!((Denied::Expired.code(), Denied::NotYet.code()), (RefusalCode::TokenExpired, RefusalCode::TokenInvalid));
}

#[test]
fn the_leeway_is_what_was_configured_and_moves_the_end() {
    let strict = |ago: u64| verifier().verify(&token(json!({"exp": NOW.as_secs() - ago})), NOW).map(|_| ());
    assert_eq!(strict(30), Err(Denied::Expired));
    let lenient = AuthConfig { leeway: Duration::from_secs(60), ..config(secret(SECRET)) };
    let lenient = Verifier::new(lenient).unwrap();
    let expired = |ago: u64| lenient.verify(&token(json!({"exp": NOW.as_secs() - ago})), NOW);
    assert_eq!(expired(59).unwrap().expires_at, Some(NOW + Duration::from_secs(1)));
    assert_eq!(expired(60).map(|_| ()), Err(Denied::Expired));
    assert_eq!(expired(61).map(|_| ()), Err(Denied::Expired));
    let early = |by: u64| lenient.verify(&token(json!({"nbf": NOW.as_secs() + by})), NOW).map(|_| ());
    assert_eq!((early(60), early(61)), (Ok(()), Err(Denied::NotYet)));
}

#[test]
fn issuer_and_audience_count_where_configured_also_when_absent() {
    let strict = AuthConfig {
        issuer: Some(vec!["us".into(), "them".into()]),
        audience: Some(vec!["gateway".into()]),
        ..config(secret(SECRET))
    };
    let strict = Verifier::new(strict).unwrap();
    let is_ok = |iss: Value, aud: Value| strict.verify(&token(json!({"iss": iss, "aud": aud})), NOW).is_ok();
    for (iss, aud, right) in [
        (json!("us"), json!("gateway"), true),
        (json!("them"), json!(["x", "gateway"]), true),
        (json!("us"), json!(["x"]), false),
        (json!("us"), json!([]), false),
        (json!("us"), json!("x"), false),
        (json!("us"), json!("gateway "), false),
        (json!("us"), json!(7), false),
        (json!("us"), json!("absent"), false),
        (json!("us"), json!(null), false),
        (json!("x"), json!("gateway"), false),
        (json!(["us"]), json!("gateway"), false),
        (json!("absent"), json!("gateway"), false),
    ] {
        assert_eq!(is_ok(iss.clone(), aud.clone()), right, "iss {iss}, aud {aud}");
        let token = token(json!({"iss": iss, "aud": aud}));
        assert!(verifier().verify(&token, NOW).is_ok(), "not configured, not looked at");
    }
}

#[test]
fn a_remembered_token_is_the_same_identity_and_still_ends_in_time() {
    let verifier = verifier();
    let token = token(json!({"nbf": NOW.as_secs()}));
    let first = verifier.verify(&token, NOW).unwrap();
    let second = verifier.verify(&token, NOW + Duration::from_secs(59)).unwrap();
    assert!(Arc::ptr_eq(&first, &second));
    assert_eq!(verifier.verify(&token, NOW - Duration::from_secs(1)).map(|_| ()), Err(Denied::NotYet));
    assert_eq!(verifier.verify(&token, NOW + Duration::from_secs(60)).map(|_| ()), Err(Denied::Expired));
    let back = verifier.verify(&token, NOW).unwrap();
    assert!(!Arc::ptr_eq(&first, &back), "an ended one is forgotten");
}

#[test]
fn anonymous_sessions_exist_only_where_configured() {
    assert!(verifier().anonymous().is_none());
    let patterns = |list: &[&str]| Some(list.iter().map(|text| Pattern::new(text).unwrap()).collect());
    let open =
        AuthConfig { anonymous: patterns(&["news", "news", "room:*"]), max_channels: 1, ..config(secret(SECRET)) };
    let nobody = Verifier::new(open.clone()).unwrap().anonymous().unwrap();
    assert!(nobody.user.is_none() && nobody.expires_at.is_none());
    assert_eq!(nobody.grants.joined.len(), 1);
    assert_eq!(nobody.grants.askable, [Pattern::new("room:*").unwrap()]);
    assert!(is_invalid(Verifier::new(open.clone()).unwrap().verify("", NOW)), "an empty token is a bad one");
    let many = AuthConfig { anonymous: patterns(&["a", "b"]), ..open };
    let error = Verifier::new(many).map(|_| ()).unwrap_err();
    assert_eq!(error, KeyError::TooManyAnonymousChannels { n_channels: 2, max: 1 });
}

#[test]
fn tokens_share_the_texts_of_the_names_they_have_in_common_and_no_room_is_left_over() {
    let verifier = verifier();
    let of = |sub: &str| {
        let more = json!({"sub": sub, "channels": ["news", "news", "lobby"], "subscribe": ["room:*"]});
        let mut who = Identity::clone(&verifier.verify(&token(more), NOW).unwrap());
        assert_eq!((who.grants.joined.capacity(), who.grants.askable.capacity()), (3, 1));
        who.grants.texts_mut().map(|text| text.clone()).collect::<Vec<_>>()
    };
    let (one, other) = (of("1"), of("2"));
    assert_eq!((&*one[0], &*other[0]), ("user:1", "user:2"));
    for i in 1..4 {
        assert!(Arc::ptr_eq(&one[i], &other[i]), "{}", one[i]);
    }
}

#[tokio::test(start_paused = true)]
async fn names_are_kept_as_long_as_somebody_carries_them() {
    let verifier = verifier();
    let text = |sub: &str| {
        let who = verifier.verify(&token(json!({"sub": sub, "channels": ["news"]})), NOW).unwrap();
        (Identity::clone(&who).grants.texts_mut().nth(1).unwrap().clone(), who)
    };
    let (first, session) = text("1");
    for _ in 0..5 {
        tokio::time::advance(Duration::from_secs(60)).await;
        verifier.age();
    }
    assert!(Arc::ptr_eq(&first, &text("2").0), "a session has it");
    let weak = Arc::downgrade(&first);
    drop((first, session));
    for _ in 0..3 {
        tokio::time::advance(Duration::from_secs(60)).await;
        verifier.age();
    }
    assert!(weak.upgrade().is_none());
}
