//! Who somebody is: algorithms, claims, precedence, forgeries.

use jsonwebtoken::{Algorithm, EncodingKey, Header};
use serde_json::{Value, json};
use testkit::gateway::{GatewayProcess, JWT_SECRET};
use tokio::net::TcpListener;

use super::{bearer, now, openssl, options, outcome, refused, revoke, token, try_ws, with_token};

/// A key pair in PEM, made by OpenSSL so that both sides are not ours.
struct Pair {
    private: String,
    public: String,
}

fn pair(algorithm: &[&str]) -> Pair {
    let private = openssl(&[&["genpkey"], algorithm].concat(), "");
    let public = openssl(&["pkey", "-pubout"], &private);
    Pair { private, public }
}

fn base64url(bytes: &[u8]) -> String {
    const ALPHABET: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_";
    let mut text = String::new();
    for three in bytes.chunks(3) {
        let bits = three.iter().enumerate().fold(0u32, |bits, (i, byte)| bits | u32::from(*byte) << (16 - 8 * i));
        for i in 0..=three.len() {
            text.push(ALPHABET[(bits >> (18 - 6 * i) & 63) as usize] as char);
        }
    }
    text
}

/// A token with this header and payload, and whatever stands for its signature.
fn forged(header: &Value, payload: &Value, signature: &str) -> String {
    format!("{}.{}.{signature}", base64url(header.to_string().as_bytes()), base64url(payload.to_string().as_bytes()))
}

fn signing(secret: &[u8]) -> EncodingKey {
    hub::auth::install_crypto();
    EncodingKey::from_secret(secret).expect("not empty")
}

fn good_claims() -> Value {
    json!({"sub": "42", "exp": now() + 3600})
}

#[tokio::test]
async fn every_algorithm_that_fits_the_key_is_taken_over_the_wire() {
    let gateway = GatewayProcess::start(options()).await;
    for algorithm in [Algorithm::HS256, Algorithm::HS384, Algorithm::HS512] {
        let token = hub::auth::mint_with_secret(algorithm, JWT_SECRET.as_bytes(), &good_claims()).unwrap();
        assert_eq!(with_token(&gateway, &token).await.0, 101, "{algorithm:?}");
    }
    let rsa = pair(&["-algorithm", "RSA", "-pkeyopt", "rsa_keygen_bits:2048"]);
    let p256 = pair(&["-algorithm", "EC", "-pkeyopt", "ec_paramgen_curve:P-256"]);
    let p384 = pair(&["-algorithm", "EC", "-pkeyopt", "ec_paramgen_curve:P-384"]);
    let ed25519 = pair(&["-algorithm", "ED25519"]);
    let all = [&rsa, &p256, &p384, &ed25519].map(|pair| pair.public.as_str()).concat();
    let many = GatewayProcess::start(options().unset("GATEWAY_JWT_SECRET").env("GATEWAY_JWT_PUBLIC_KEY", &all)).await;
    for (algorithm, pair) in [
        (Algorithm::RS256, &rsa),
        (Algorithm::RS384, &rsa),
        (Algorithm::RS512, &rsa),
        (Algorithm::PS256, &rsa),
        (Algorithm::PS384, &rsa),
        (Algorithm::PS512, &rsa),
        (Algorithm::ES256, &p256),
        (Algorithm::ES384, &p384),
        (Algorithm::EdDSA, &ed25519),
    ] {
        let token = hub::auth::mint_with_pem(algorithm, pair.private.as_bytes(), &good_claims()).unwrap();
        assert_eq!(with_token(&many, &token).await.0, 101, "{algorithm:?}");
        // The same algorithm by another's key, and with its signature's last bits changed.
        let (body, signature) = token.rsplit_once('.').unwrap();
        let flipped: String = signature.chars().rev().collect();
        for bad in [format!("{body}.{flipped}"), format!("{body}."), body.to_owned()] {
            assert_eq!(with_token(&many, &bad).await, refused(401, "token_invalid"), "{algorithm:?}: {bad}");
        }
    }
    // A key picks the algorithm, never the token.
    let only = |pair: &Pair| options().unset("GATEWAY_JWT_SECRET").env("GATEWAY_JWT_PUBLIC_KEY", &pair.public);
    let gateway = GatewayProcess::start(only(&rsa)).await;
    let hmac =
        |key: &[u8]| jsonwebtoken::encode(&Header::new(Algorithm::HS256), &good_claims(), &signing(key)).unwrap();
    let modulus = openssl(&["rsa", "-pubin", "-modulus", "-noout"], &rsa.public);
    let none = |alg: &str| forged(&json!({"alg": alg, "typ": "JWT"}), &good_claims(), "");
    for bad in [
        none("none"),
        none("None"),
        none("NONE"),
        none("nOnE"),
        none(""),
        none("RS256"),
        none("RS256").trim_end_matches('.').to_owned(),
        hmac(rsa.public.as_bytes()),
        hmac(rsa.public.trim_end().as_bytes()),
        hmac(modulus.trim_end().trim_start_matches("Modulus=").as_bytes()),
        hub::auth::mint_with_pem(Algorithm::ES256, p256.private.as_bytes(), &good_claims()).unwrap(),
    ] {
        assert_eq!(with_token(&gateway, &bad).await, refused(401, "token_invalid"), "{bad}");
    }
    let gateway = GatewayProcess::start(only(&p256)).await;
    let zero = forged(&json!({"alg": "ES256"}), &good_claims(), &base64url(&[0; 64]));
    assert_eq!(with_token(&gateway, &zero).await, refused(401, "token_invalid"));
    let asn1 = forged(&json!({"alg": "ES256"}), &good_claims(), &base64url(&[0x30, 6, 2, 1, 0, 2, 1, 0]));
    assert_eq!(with_token(&gateway, &asn1).await, refused(401, "token_invalid"));
}

#[tokio::test]
async fn a_tokens_header_picks_no_key_and_opens_nothing() {
    let gateway = GatewayProcess::start(options()).await;
    let trap = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}/keys", trap.local_addr().unwrap());
    let jwk = json!({"kty": "oct", "k": base64url(b"a key that the token brings along")});
    for mut header in [
        json!({"kid": "../../../../dev/null"}),
        json!({"kid": "' OR 1=1 --"}),
        json!({"kid": "x".repeat(10 * 1024)}),
        json!({"kid": 7}),
        json!({"kid": ["a"]}),
        json!({"kid": null}),
        json!({"jku": url}),
        json!({"x5u": url}),
        json!({"jwk": jwk}),
        json!({"x5c": ["MIIB"]}),
        json!({"crit": ["b64"], "b64": false}),
    ] {
        header["alg"] = json!("HS256");
        // Signed with nothing, and with the key that it brings.
        for signature in ["", &base64url(&[0; 32])] {
            let bad = forged(&header, &good_claims(), signature);
            assert_eq!(with_token(&gateway, &bad).await, refused(401, "token_invalid"), "{header}");
        }
    }
    let key = signing(b"a key that the token brings along");
    let header =
        Header { jku: Some(url.clone()), x5u: Some(url), kid: Some("1".into()), ..Header::new(Algorithm::HS256) };
    let signed = jsonwebtoken::encode(&header, &good_claims(), &key).unwrap();
    assert_eq!(with_token(&gateway, &signed).await, refused(401, "token_invalid"));
    let seen = tokio::time::timeout(std::time::Duration::from_millis(100), trap.accept()).await;
    assert!(seen.is_err(), "somebody came to fetch a key");
    assert!(!gateway.stderr().contains("panicked"));
}

#[tokio::test]
async fn expiry_issuer_and_audience_are_compared_exactly() {
    let strict = GatewayProcess::start(
        options().env("GATEWAY_JWT_AUDIENCE", "ours").env("GATEWAY_JWT_ISSUER", "https://issuer.example"),
    )
    .await;
    let claims = |change: Value| {
        let mut claims = json!({"sub": "42", "aud": ["other", "ours"], "iss": "https://issuer.example"});
        for (name, value) in change.as_object().unwrap() {
            match value {
                Value::String(text) if text == "absent" => drop(claims.as_object_mut().unwrap().remove(name)),
                value => claims[name] = value.clone(),
            }
        }
        claims
    };
    let invalid = || refused(401, "token_invalid");
    for (change, expected) in [
        (json!({}), (101, String::new())),
        (json!({"aud": "ours"}), (101, String::new())),
        (json!({"aud": "absent"}), invalid()),
        (json!({"aud": "other"}), invalid()),
        (json!({"aud": ["other"]}), invalid()),
        (json!({"aud": []}), invalid()),
        (json!({"iss": "https://issuer.example/"}), invalid()),
        (json!({"iss": "absent"}), invalid()),
        (json!({"exp": now() - 30}), refused(401, "token_expired")),
        (json!({"exp": now().to_string()}), invalid()),
        (json!({"exp": null}), invalid()),
        (json!({"nbf": now() + 60}), invalid()),
        (json!({"nbf": now() - 60}), (101, String::new())),
        (json!({"nbf": "soon"}), invalid()),
        (json!({"iat": "then"}), invalid()),
        (json!({"sub": "absent"}), invalid()),
        (json!({"sub": 42}), invalid()),
        (json!({"sub": ""}), invalid()),
        (json!({"sub": "x".repeat(257)}), invalid()),
        (json!({"jti": "x".repeat(256)}), (101, String::new())),
        (json!({"jti": "x".repeat(257)}), invalid()),
        (json!({"sid": "x".repeat(257)}), invalid()),
        (json!({"channels": ["a b"]}), invalid()),
        (json!({"channels": "news"}), invalid()),
        (json!({"subscribe": ["a*b"]}), invalid()),
    ] {
        assert_eq!(with_token(&strict, &token(&claims(change.clone()))).await, expected, "{change}");
    }
    // The kit adds an `exp` of its own where there is none, so this one is signed by hand.
    let key = signing(JWT_SECRET.as_bytes());
    let mut endless = claims(json!({}));
    endless.as_object_mut().unwrap().remove("exp");
    let endless = jsonwebtoken::encode(&Header::new(Algorithm::HS256), &endless, &key).unwrap();
    assert_eq!(with_token(&strict, &endless).await, invalid());
    assert!(strict.stderr().contains("leeway_s=0"), "the leeway in force is told: {}", strict.stderr());

    let lenient = GatewayProcess::start(options().env("GATEWAY_JWT_LEEWAY", "60s")).await;
    let of = async |exp: u64| with_token(&lenient, &token(&json!({"sub": "42", "exp": exp}))).await;
    // A second or two of room for the test's own time.
    assert_eq!(of(now() - 57).await.0, 101);
    assert_eq!(of(now() - 61).await, refused(401, "token_expired"));
    assert!(lenient.stderr().contains("leeway_s=60"), "{}", lenient.stderr());
}

/// Where a credential may stand, in order of precedence.
const PLACES: [&str; 4] = ["header", "subprotocol", "cookie", "query"];

#[tokio::test]
async fn the_first_place_that_holds_anything_decides() {
    let gateway =
        GatewayProcess::start(options().env("GATEWAY_AUTH_COOKIE", "session").env("GATEWAY_WS_REFUSE", "status")).await;
    let valid = token(&json!({"sub": "42", "jti": "kept"}));
    let revoked = token(&json!({"sub": "42", "jti": "gone"}));
    revoke(&gateway, &json!({"jti": "gone"})).await;
    let origin = format!("http://{}", gateway.public());
    let ask = async |held: &[(&str, &str)]| {
        let (mut path, mut headers) = ("/v1/ws".to_owned(), vec![("Origin".to_owned(), origin.clone())]);
        for (place, token) in held {
            match *place {
                "header" => headers.push(("Authorization".into(), bearer(token))),
                "subprotocol" => {
                    headers.push(("Sec-WebSocket-Protocol".into(), format!("tidegate.v1, bearer.{token}")));
                }
                "cookie" => headers.push(("Cookie".into(), format!("a=b; session={token}; c=d"))),
                _ => path.push_str(&format!("?access_token={token}")),
            }
        }
        let headers: Vec<_> = headers.iter().map(|(n, v)| (n.as_str(), v.as_str())).collect();
        outcome(&gateway, &path, &headers).await
    };
    for (i, first) in PLACES.iter().enumerate() {
        assert_eq!(ask(&[(first, &valid)]).await.0, 101, "{first}");
        assert_eq!(ask(&[(first, &revoked)]).await, refused(401, "token_revoked"), "{first}");
        assert_eq!(ask(&[(first, "")]).await, refused(401, "token_invalid"), "an empty {first} is a bad one");
        for second in &PLACES[i + 1..] {
            assert_eq!(ask(&[(first, &valid), (second, &revoked)]).await.0, 101, "{first}, {second}");
            let other_way = ask(&[(first, &revoked), (second, &valid)]).await;
            assert_eq!(other_way, refused(401, "token_revoked"), "{first}, {second}");
            for bad in ["", "x.y.z"] {
                let fallback = ask(&[(first, bad), (second, &valid)]).await;
                assert_eq!(fallback, refused(401, "token_invalid"), "{bad:?} in {first}, {second}");
            }
        }
    }
    assert_eq!(ask(&[]).await, refused(401, "token_missing"));
    for twice in ["header", "subprotocol", "query"] {
        let path = match twice {
            "query" => format!("/v1/ws?access_token={valid}&access_token={valid}"),
            _ => "/v1/ws".to_owned(),
        };
        let (auth, carried) = (bearer(&valid), format!("bearer.{valid}"));
        let line = match twice {
            "header" => ("Authorization", auth.as_str()),
            _ => ("Sec-WebSocket-Protocol", carried.as_str()),
        };
        let headers = if twice == "query" { vec![] } else { vec![line, line] };
        assert_eq!(outcome(&gateway, &path, &headers).await, refused(400, "bad_request"), "{twice} twice");
    }
    // Another scheme is no token, and no reason to look elsewhere.
    let path = format!("/v1/ws?access_token={valid}");
    assert_eq!(outcome(&gateway, &path, &[("Authorization", "Basic eDp5")]).await, refused(401, "token_invalid"));
}

#[tokio::test]
async fn who_shows_nothing_hears_what_is_open_to_everybody_and_no_more() {
    let gateway = GatewayProcess::start(options().env("GATEWAY_ANONYMOUS_CHANNELS", "public, open:*")).await;
    let mut client = try_ws(&gateway, "/v1/ws?channel=open:1", &[]).await.expect("let in");
    let hello = client.json().await;
    assert_eq!((&hello["user"], &hello["channels"]), (&Value::Null, &json!(["public", "open:1"])));
    assert_eq!(hello["expires_at"], Value::Null);
    client.until("ready").await;
    for (channel, answer) in [("open:2", "ok"), ("secret", "error"), ("user:42", "error"), ("Open:2", "error")] {
        client.send_json(&json!({"type": "subscribe", "channel": channel})).await;
        assert_eq!(client.json().await["type"], answer, "{channel}");
    }
    gateway.publish("secret", &json!("unheard")).await;
    gateway.publish("open:2", &json!("heard")).await;
    assert_eq!(client.json().await["data"], "heard");
    // An empty credential is a bad one, not an anonymous one.
    for headers in [&[("Authorization", "")][..], &[("Authorization", "Bearer ")], &[("Authorization", "Bearer")]] {
        assert_eq!(outcome(&gateway, "/v1/ws", headers).await, refused(401, "token_invalid"), "{headers:?}");
    }
    assert_eq!(outcome(&gateway, "/v1/ws?access_token=", &[]).await, refused(401, "token_invalid"));
    assert_eq!(outcome(&gateway, "/v1/ws?channel=secret", &[]).await, refused(403, "forbidden"));
}
