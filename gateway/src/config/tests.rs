//! The promises of the configuration, over a map instead of the process's environment.

use std::collections::BTreeSet;
use std::time::Duration;

use jsonwebtoken::{Algorithm, AlgorithmFamily};

use super::table::{Kind, Unset, variables};
use super::*;

const SECRET: &str = "swordfish-swordfish-swordfish-42";
const RSA_KEY: &str = "-----BEGIN PUBLIC KEY-----
MIIBIjANBgkqhkiG9w0BAQEFAAOCAQ8AMIIBCgKCAQEAvNepdG96X19kMlhWOoWk
+Mu9Bywpo1Lyf05Py2w6IsFbrmUHa0eCqQY4qS6u8J5vSRIQn9AtcFTmUQ3zg4Kc
mYZe4syawT09CBPNiYsqga3JtGXepq2wL9RfwJH2Jz5lr6w1BYP7zTKcaQMHnZRq
47RZEnG0m2wZra+BYRUv2YTQfJPQOGciLFzIFc4jDBZoIpVvXm7nJmp1y3JzM9zT
VAHwAFlWGj54EcGmgZAEaO2M8amdZg01P4tYXW2Xi9QU0uGF/8UBbvKAH1e/C/II
loA6Md5VI9hz2HWdbNJtdkIUHyRRsrjH+75pbx5emtdxOyQ/yoGTYFI+OiAGrV6b
swIDAQAB
-----END PUBLIC KEY-----
";
const EC_KEY: &str = "-----BEGIN PUBLIC KEY-----
MFkwEwYHKoZIzj0CAQYIKoZIzj0DAQcDQgAERyZDvL3uyOBiLvCDrXUwMrQbHrTW
CcbLnNwLJHt32cJFaVuRiipm40u8OUsTLyq/AywfaiQn2oN03c9zz/+u7Q==
-----END PUBLIC KEY-----
";
const ED_KEY: &str = "-----BEGIN PUBLIC KEY-----
MCowBQYDK2VwAyEA68SsPBpxVXAFA2TWzqtHjkJz0Mk5eBf1aXBvzJ5toWY=
-----END PUBLIC KEY-----
";

fn environment(pairs: &[(&str, &str)]) -> Environment {
    pairs.iter().map(|(n, v)| ((*n).to_owned(), (*v).to_owned())).collect()
}

fn load(pairs: &[(&str, &str)]) -> Result<Config, ConfigErrors> {
    Config::from_environment(&environment(pairs), Purpose::Look)
}

fn good(pairs: &[(&str, &str)]) -> Config {
    load(pairs).unwrap_or_else(|error| panic!("{pairs:?}: {error}"))
}

/// The fault's whole text; exactly one is expected, and it must name `name`.
fn fault(name: &str, pairs: &[(&str, &str)]) -> String {
    let faults = load(pairs).expect_err(&format!("{pairs:?} is refused")).0;
    assert_eq!(faults.len(), 1, "{pairs:?}: {faults:?}");
    let text = faults[0].to_string();
    assert!(text.contains(name), "{text}");
    text
}

fn names(relations: &[Relation]) -> Vec<&str> {
    relations.iter().flat_map(|r| &r.names).map(String::as_str).collect()
}

/// A file that goes away with the test.
struct TempFile(std::path::PathBuf);

impl TempFile {
    fn with(content: &[u8]) -> Self {
        let random = rand::TryRng::try_next_u64(&mut rand::rngs::SysRng).unwrap();
        let path = std::env::temp_dir().join(format!("tidegate-config-{random:016x}"));
        std::fs::write(&path, content).unwrap();
        Self(path)
    }

    fn path(&self) -> &str {
        self.0.to_str().unwrap()
    }
}

impl Drop for TempFile {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

#[test]
fn defaults_are_clean_and_raise_no_warning() {
    let config = good(&[]);
    assert_eq!(config.check(), []);
    assert_eq!(config.warnings(), []);
}

#[test]
fn defaults_are_the_documented_ones() {
    let config = good(&[]);
    assert_eq!(config.listen.public.to_string(), "0.0.0.0:8080");
    assert_eq!(config.listen.admin.to_string(), "127.0.0.1:8081");
    assert_eq!(config.session.outbox_bytes, 1 << 20);
    assert_eq!(config.session.max_message_bytes, 64 << 10);
    assert_eq!(config.session.max_per_user, None);
    assert_eq!(config.lifecycle.max_age(), Some((Duration::from_secs(1200), Duration::from_secs(3600))));
    assert_eq!((config.drain.window, config.drain.deadline), (None, Duration::from_secs(120)));
    assert_eq!(config.admission.address_bucket(), Some((20, 60)));
    assert_eq!(config.revocation.keys.jti.as_deref(), Some("{prefix}:revoked:jti:{jti}"));
    assert_eq!(config.revocation.ttl, Duration::from_secs(30 * 86_400));
    assert_eq!(config.auth.origins, Origins::Unset);
    assert!(config.auth.key().is_none() && config.auth.is_query_allowed && config.auth.has_user_channel);
    assert!(config.node.workers >= 1 && config.redis.url.is_none());
}

#[test]
fn every_row_is_read_once_and_printed_in_the_table_order() {
    let config = good(&[]);
    let printed: Vec<&str> = config.settings().iter().map(|s| s.name).collect();
    let table: Vec<&str> = variables().map(|v| v.name).collect();
    assert_eq!(printed, table);
    assert_eq!(table.iter().collect::<BTreeSet<_>>().len(), table.len(), "no name stands twice");
}

#[test]
fn every_bound_of_the_table_holds_at_below_and_above() {
    let takes = |name: &str, value: &str| {
        let errors = load(&[(name, value)]).err().map(|e| e.0).unwrap_or_default();
        !errors.iter().any(|f| matches!(f, Fault::Bad { name: bad, .. } if bad == name))
    };
    for v in variables() {
        match v.kind {
            Kind::Count { least, most } | Kind::Size { least, most } => {
                for inside in [least, most] {
                    assert!(takes(v.name, &inside.to_string()), "{} {inside}", v.name);
                }
                assert!(!takes(v.name, &(most + 1).to_string()), "{} above {most}", v.name);
                assert!(least == 0 || !takes(v.name, &(least - 1).to_string()), "{} below {least}", v.name);
            }
            Kind::Duration(zero) => {
                assert!(takes(v.name, "1ms") && takes(v.name, "366d") && !takes(v.name, "367d"), "{}", v.name);
                assert_eq!(takes(v.name, "0s"), zero == table::Zero::Allowed, "{}", v.name);
            }
            Kind::Window => assert!(takes(v.name, "auto") && takes(v.name, "1s") && !takes(v.name, "0s")),
            Kind::Ratio => assert!(takes(v.name, "1") && !takes(v.name, "1.001") && !takes(v.name, "0")),
            Kind::Switch => assert!(takes(v.name, "on") && takes(v.name, "off") && !takes(v.name, "true")),
            Kind::Choice(words) => {
                assert!(words.iter().all(|word| takes(v.name, word)), "{}", v.name);
                assert!(
                    !takes(v.name, &words[0].to_ascii_uppercase()) || words[0].parse::<u16>().is_ok(),
                    "{}",
                    v.name
                );
                assert!(!takes(v.name, "neither"), "{}", v.name);
            }
            Kind::Address => {
                assert!(takes(v.name, "[::1]:0") && !takes(v.name, "8080") && !takes(v.name, "127.0.0.1:65536"))
            }
            Kind::Text(_) | Kind::List(_) | Kind::Path | Kind::Secret(_) => {}
        }
    }
}

#[test]
fn an_empty_value_is_an_unset_one() {
    let pairs: Vec<(&str, &str)> = variables().map(|v| (v.name, "")).collect();
    assert!(good(&pairs).settings().iter().all(|s| !s.is_set));
}

#[test]
fn faults_of_every_kind_are_named_at_once() {
    let errors = load(&[
        ("GATEWAY_HEARTBEET", "25s"),
        ("GATEWAY_LISTEN", "8080"),
        ("GATEWAY_DRAIN_DEADLINE", "120"),
        ("GATEWAY_OUTBOX_BYTES", "1MB"),
        ("GATEWAY_SHED", "yes"),
        ("GATEWAY_ALLOWED_ORIGINS", "https://app.example, https://app.example/path"),
        ("GATEWAY_FLEET_TTL", "5s"),
    ])
    .unwrap_err();
    assert_eq!(errors.0.len(), 7, "{errors}");
    let text = errors.to_string();
    for part in [
        "GATEWAY_HEARTBEET: unknown variable; did you mean GATEWAY_HEARTBEAT?",
        "GATEWAY_LISTEN: \"8080\"; expected an address such as",
        "GATEWAY_DRAIN_DEADLINE: \"120\"; expected a duration",
        "GATEWAY_OUTBOX_BYTES: \"1MB\"; expected a size",
        "GATEWAY_SHED: \"yes\"; expected one of on, off, dry-run",
        "GATEWAY_ALLOWED_ORIGINS: bad entry \"https://app.example/path\"; expected a list",
        "GATEWAY_FLEET_TTL, GATEWAY_FLEET_REPORT:",
    ] {
        assert!(text.contains(part), "{part} in {text}");
    }
}

#[test]
fn an_unknown_variables_value_is_never_shown() {
    let text = fault("GATEWAY_JWT_SECRT", &[("GATEWAY_JWT_SECRT", SECRET)]);
    assert!(!text.contains("swordfish") && text.contains("did you mean GATEWAY_JWT_SECRET?"), "{text}");
}

#[test]
fn names_without_our_prefix_and_those_of_kubernetes_are_nobodys_fault() {
    good(&[
        ("PATH", "/bin"),
        ("GATEWAYS", "2"),
        ("GATEWAY_SERVICE_HOST", "10.0.0.1"),
        ("GATEWAY_SERVICE_PORT_HTTP", "80"),
        ("GATEWAY_PORT", "tcp://10.0.0.1:80"),
        ("GATEWAY_PORT_80_TCP_ADDR", "10.0.0.1"),
    ]);
}

#[test]
fn a_relation_to_a_bad_value_is_not_reported_beside_it() {
    fault("GATEWAY_OUTBOX_BYTES", &[("GATEWAY_OUTBOX_BYTES", "big"), ("GATEWAY_MAX_MESSAGE", "16MiB")]);
}

#[test]
fn a_secret_comes_by_value_or_by_file_without_its_line_end() {
    for end in ["", "\n", "\r\n"] {
        let text = format!("{SECRET}{end}");
        let file = TempFile::with(text.as_bytes());
        for pair in [("GATEWAY_JWT_SECRET", text.as_str()), ("GATEWAY_JWT_SECRET_FILE", file.path())] {
            let config = good(&[pair]);
            assert_eq!(config.auth.jwt_secret.unwrap().expose(), SECRET.as_bytes(), "{pair:?}");
        }
    }
}

#[test]
fn a_secret_file_may_hold_any_bytes() {
    let bytes: Vec<u8> = (128..160).collect();
    let file = TempFile::with(&bytes);
    assert_eq!(good(&[("GATEWAY_JWT_SECRET_FILE", file.path())]).auth.jwt_secret.unwrap().expose(), &bytes);
}

#[test]
fn a_blank_short_or_public_secret_is_refused_and_never_shown() {
    let public = RSA_KEY.replace('\n', "\\n");
    for bad in
        ["   ", "\n", "short", &SECRET[1..], RSA_KEY, &public, "ssh-rsa AAAAB3NzaC1yc2EAAAADAQABAAABAQ someone@host"]
    {
        let text = fault("GATEWAY_JWT_SECRET", &[("GATEWAY_JWT_SECRET", bad)]);
        assert!(bad.trim().is_empty() || !text.contains(bad.trim()), "{text}");
        let file = TempFile::with(bad.as_bytes());
        fault("GATEWAY_JWT_SECRET_FILE", &[("GATEWAY_JWT_SECRET_FILE", file.path())]);
    }
    let empty = TempFile::with(b"");
    fault("is blank", &[("GATEWAY_JWT_SECRET_FILE", empty.path())]);
    good(&[("GATEWAY_JWT_SECRET", SECRET)]);
    assert_eq!(SECRET.len(), values::MIN_HMAC_BYTES);
}

#[test]
fn every_secret_has_a_file_twin_and_both_set_contradict() {
    let file = TempFile::with(SECRET.as_bytes());
    let secrets: Vec<&str> = variables().filter(|v| v.kind.is_secret()).map(|v| v.name).collect();
    assert_eq!(
        secrets,
        [
            "GATEWAY_JWT_SECRET",
            "GATEWAY_JWT_PUBLIC_KEY",
            "GATEWAY_REDIS_URL",
            "GATEWAY_REDIS_PASSWORD",
            "GATEWAY_ADMIN_KEY"
        ]
    );
    for name in secrets {
        let twin = format!("{name}_FILE");
        let text = fault(name, &[(name, SECRET), (&twin, file.path())]);
        assert!(text.contains(&twin) && text.contains("only one of them"), "{text}");
    }
}

#[test]
fn a_file_that_cannot_be_read_is_named_with_its_path() {
    for name in ["GATEWAY_ADMIN_KEY_FILE", "GATEWAY_JWT_JWKS_FILE", "GATEWAY_REDIS_CA_FILE"] {
        assert!(fault(name, &[(name, "/no/such/file")]).contains("/no/such/file"));
    }
}

#[test]
fn secrets_appear_in_no_debug_text_and_no_table() {
    let config = good(&[
        ("GATEWAY_JWT_SECRET", SECRET),
        ("GATEWAY_ADMIN_KEY", "swordfish-admin"),
        ("GATEWAY_REDIS_URL", "redis://user:swordfish@redis:6379/1"),
    ]);
    let shown = format!("{config:?} {:?}", config.settings());
    assert!(!shown.contains("swordfish") && shown.contains("[hidden]"), "{shown}");
    assert!(!shown.contains(&format!("{:?}", SECRET.as_bytes())[1..20]), "{shown}");
}

#[test]
fn a_public_key_is_recognised_by_its_family_also_with_written_line_ends() {
    for (pem, family) in [(RSA_KEY, AlgorithmFamily::Rsa), (EC_KEY, AlgorithmFamily::Ec), (ED_KEY, AlgorithmFamily::Ed)]
    {
        let written = pem.replace('\n', "\\n");
        for text in [pem, &written, &pem.replace('\n', "\r\n")] {
            assert_eq!(good(&[("GATEWAY_JWT_PUBLIC_KEY", text)]).auth.jwt_public_key.unwrap().family, family, "{text}");
        }
    }
    let private = EC_KEY.replace("PUBLIC", "PRIVATE");
    assert!(fault("GATEWAY_JWT_PUBLIC_KEY", &[("GATEWAY_JWT_PUBLIC_KEY", &private)]).contains("private key"));
    for bad in [" ", "nonsense", SECRET, "-----BEGIN PUBLIC KEY-----\nAAAA\n-----END PUBLIC KEY-----"] {
        fault("GATEWAY_JWT_PUBLIC_KEY", &[("GATEWAY_JWT_PUBLIC_KEY", bad)]);
    }
}

#[test]
fn serving_needs_a_key_and_one_only() {
    let serve = |pairs: &[(&str, &str)]| Config::from_environment(&environment(pairs), Purpose::Serve);
    assert!(serve(&[]).unwrap_err().to_string().contains("GATEWAY_JWT_SECRET"));
    assert!(serve(&[("GATEWAY_JWT_SECRET", "")]).is_err());
    assert!(serve(&[("GATEWAY_JWT_SECRET", SECRET)]).is_ok());
    let short = serve(&[("GATEWAY_JWT_SECRET", "short")]).unwrap_err();
    assert_eq!(short.0.len(), 1, "the missing key is not reported beside the bad one: {short}");
    let two = [("GATEWAY_JWT_SECRET", SECRET), ("GATEWAY_JWT_PUBLIC_KEY", EC_KEY)];
    assert!(fault("GATEWAY_JWT_PUBLIC_KEY", &two).contains("only one kind of key"));
    fault("GATEWAY_JWT_JWKS_URL", &[("GATEWAY_JWT_SECRET", SECRET), ("GATEWAY_JWT_JWKS_URL", "https://a/keys")]);
}

#[test]
fn algorithms_fit_the_key() {
    let with = |key: (&'static str, &'static str), list: &str| load(&[key, ("GATEWAY_JWT_ALGORITHMS", list)]);
    let (secret, rsa, jwks) = (
        ("GATEWAY_JWT_SECRET", SECRET),
        ("GATEWAY_JWT_PUBLIC_KEY", RSA_KEY),
        ("GATEWAY_JWT_JWKS_URL", "https://id.example/k"),
    );
    assert_eq!(with(secret, "HS256, HS512,").unwrap().auth.algorithms, [Algorithm::HS256, Algorithm::HS512]);
    for (key, bad) in
        [(secret, "HS256,RS256"), (rsa, "HS256"), (rsa, "ES256"), (jwks, "HS256"), (secret, "none"), (secret, "hs256")]
    {
        let error = with(key, bad).unwrap_err().to_string();
        assert!(error.contains("GATEWAY_JWT_ALGORITHMS"), "{error}");
    }
    assert!(with(rsa, "RS256,PS256").is_ok() && with(jwks, "ES256,RS256,EdDSA").is_ok());
}

#[test]
fn origins_are_exact_in_lower_case_and_lose_their_schemes_own_port() {
    let origins = |text: &str| good(&[("GATEWAY_ALLOWED_ORIGINS", text)]).auth.origins;
    assert_eq!(
        origins(" https://App.Example:443 ,http://localhost:3000,\tcapacitor://localhost, http://[::1]:80, "),
        Origins::Listed(
            ["https://app.example", "http://localhost:3000", "capacitor://localhost", "http://[::1]"]
                .map(str::to_owned)
                .into()
        )
    );
    assert_eq!(origins("*"), Origins::Any);
    for bad in [
        "app.example",
        "https://app.example/",
        "https://app.example/x",
        "https://*.example",
        "null",
        "http://a:b",
        "http://a:0",
        "http://",
        "https://user@app.example",
        "*,https://app.example",
        "https://a b",
        ",",
        " ",
    ] {
        fault("GATEWAY_ALLOWED_ORIGINS", &[("GATEWAY_ALLOWED_ORIGINS", bad)]);
    }
    let both = [("GATEWAY_ALLOWED_ORIGINS", "*"), ("GATEWAY_AUTH_COOKIE", "session")];
    assert!(fault("GATEWAY_ALLOWED_ORIGINS", &both).contains("GATEWAY_AUTH_COOKIE"));
}

#[test]
fn trusted_networks_contain_what_lies_in_them() {
    let networks = good(&[("GATEWAY_TRUSTED_PROXIES", "10.0.0.0/8, fd00::/8, 192.0.2.7, ::ffff:198.51.100.0/120")]);
    let trusts = |ip: &str| networks.admission.trusted_proxies.iter().any(|n| n.contains(ip.parse().unwrap()));
    for inside in ["10.0.0.0", "10.255.255.255", "::ffff:10.1.2.3", "fd12::1", "192.0.2.7", "198.51.100.9"] {
        assert!(trusts(inside), "{inside}");
    }
    for outside in ["11.0.0.0", "9.255.255.255", "fe00::1", "192.0.2.8", "::1", "198.51.101.0"] {
        assert!(!trusts(outside), "{outside}");
    }
    for bad in ["10.0.0.0/33", "fd00::/129", "10.0.0/8", "proxy.internal", "10.0.0.0/", "10.0.0.0/-1"] {
        fault(bad, &[("GATEWAY_TRUSTED_PROXIES", bad)]);
    }
    let all = good(&[("GATEWAY_TRUSTED_PROXIES", "0.0.0.0/0")]);
    assert!(all.admission.trusted_proxies[0].contains("8.8.8.8".parse().unwrap()));
    assert_eq!(names(&all.warnings()), ["GATEWAY_TRUSTED_PROXIES"]);
}

#[test]
fn a_redis_url_is_refused_where_it_could_never_work_and_never_shown() {
    let url = |text: &str| good(&[("GATEWAY_REDIS_URL", text)]).redis.url.unwrap();
    for (text, scheme, has_password) in [
        ("redis://localhost", RedisScheme::Tcp, false),
        ("redis://user:p%23%2F%40%25@redis:6379/3", RedisScheme::Tcp, true),
        ("rediss://:p+=@[::1]:6380", RedisScheme::Tls, true),
        ("redis+sentinel://a:26379,b:26379/main", RedisScheme::Sentinel, false),
        ("redis+cluster://a:7000,b:7001", RedisScheme::Cluster, false),
        ("unix:///run/redis.sock?db=1&pass=x", RedisScheme::Unix, true),
    ] {
        let parsed = url(text);
        assert_eq!((parsed.scheme, parsed.has_password), (scheme, has_password), "{text}");
        assert_eq!(parsed.url.expose(), text);
    }
    for raw in ["sword#fish", "sword/fish", "sword@fish", "sword%fish", "sword?fish"] {
        let text = fault("GATEWAY_REDIS_URL", &[("GATEWAY_REDIS_URL", &format!("redis://u:{raw}@redis:6379"))]);
        assert!(text.contains("GATEWAY_REDIS_PASSWORD") && !text.contains("fish"), "{text}");
    }
    for bad in [
        "redis:6379",
        "http://redis",
        "redis://",
        "redis://redis:port",
        "redis://redis:70000",
        "unix://run.sock",
        "redis://a,",
    ] {
        fault("GATEWAY_REDIS_URL", &[("GATEWAY_REDIS_URL", bad)]);
    }
    let password = [("GATEWAY_REDIS_URL", "redis://redis"), ("GATEWAY_REDIS_PASSWORD", "a#/@%+=")];
    assert_eq!(good(&password).redis.password.unwrap().expose(), "a#/@%+=");
    fault("GATEWAY_REDIS_PASSWORD", &[("GATEWAY_REDIS_URL", "redis://:x@redis"), ("GATEWAY_REDIS_PASSWORD", "y")]);
}

#[test]
fn a_revocation_layout_names_each_kind_once_with_its_own_placeholder() {
    let keys = good(&[("GATEWAY_REVOCATION_KEYS", "jti=bl:{jti}, sub={prefix}/u/{sub}")]).revocation.keys;
    assert_eq!(keys, RevocationKeys { jti: Some("bl:{jti}".into()), sid: None, sub: Some("{prefix}/u/{sub}".into()) });
    for bad in [
        "jti",
        "jti=all",
        "jti={sid}",
        "who={jti}",
        "jti={jti},jti=x{jti}",
        "jti={jti}{",
        "jti={jti}}",
        "sub={sub}{user}",
    ] {
        fault("GATEWAY_REVOCATION_KEYS", &[("GATEWAY_REVOCATION_KEYS", bad)]);
    }
}

#[test]
fn either_zero_turns_the_address_bucket_off() {
    for pairs in [[("GATEWAY_IP_RATE", "0")], [("GATEWAY_IP_BURST", "0")]] {
        assert_eq!(good(&pairs).admission.address_bucket(), None);
    }
}

#[test]
fn contradictions_are_refused_just_beyond_the_bound_and_name_all_their_variables() {
    type Pairs = &'static [(&'static str, &'static str)];
    let cases: &[(Pairs, Pairs)] = &[
        (
            &[("GATEWAY_MAX_AGE_MIN", "60m"), ("GATEWAY_MAX_AGE_MAX", "60m")],
            &[("GATEWAY_MAX_AGE_MIN", "61m"), ("GATEWAY_MAX_AGE_MAX", "60m")],
        ),
        (
            &[("GATEWAY_MAX_AGE_MIN", "0s"), ("GATEWAY_MAX_AGE_MAX", "0s")],
            &[("GATEWAY_MAX_AGE_MIN", "0s"), ("GATEWAY_MAX_AGE_MAX", "60m")],
        ),
        (
            &[("GATEWAY_DRAIN_WINDOW", "112s")],
            &[("GATEWAY_DRAIN_WINDOW", "112001ms"), ("GATEWAY_DRAIN_DEADLINE", "120s")],
        ),
        (&[("GATEWAY_DRAIN_DEADLINE", "8001ms")], &[("GATEWAY_DRAIN_DEADLINE", "8s"), ("GATEWAY_DRAIN_GRACE", "5s")]),
        (
            &[("GATEWAY_TERMINATION_GRACE", "13001ms")],
            &[("GATEWAY_TERMINATION_GRACE", "13s"), ("GATEWAY_DRAIN_GRACE", "5s"), ("GATEWAY_CLOSE_TIMEOUT", "3s")],
        ),
        (
            &[("GATEWAY_TERMINATION_GRACE", "10s"), ("GATEWAY_DRAIN_GRACE", "0s")],
            &[("GATEWAY_TERMINATION_GRACE", "8s"), ("GATEWAY_DRAIN_GRACE", "0s")],
        ),
        (&[("GATEWAY_OUTBOX_BYTES", "64KiB")], &[("GATEWAY_OUTBOX_BYTES", "65535"), ("GATEWAY_MAX_MESSAGE", "64KiB")]),
        (&[("GATEWAY_FLEET_TTL", "10s")], &[("GATEWAY_FLEET_TTL", "9999ms"), ("GATEWAY_FLEET_REPORT", "5s")]),
        (&[("GATEWAY_LIVE_STALE", "251ms")], &[("GATEWAY_LIVE_STALE", "250ms"), ("GATEWAY_READY_LAG", "250ms")]),
        (
            &[("GATEWAY_ACCEPT_MODE", "adaptive"), ("GATEWAY_ACCEPT_RATE_MAX", "100")],
            &[("GATEWAY_ACCEPT_MODE", "adaptive"), ("GATEWAY_ACCEPT_RATE_MAX", "99"), ("GATEWAY_ACCEPT_RATE", "100")],
        ),
        (&[("GATEWAY_ACCEPT_RATE", "2000")], &[("GATEWAY_ACCEPT_MODE", "adaptive"), ("GATEWAY_ACCEPT_RATE", "2000")]),
        (
            &[("GATEWAY_PARTITIONS", "8"), ("GATEWAY_REDIS_URL", "redis+cluster://a:7000")],
            &[("GATEWAY_PARTITIONS", "2"), ("GATEWAY_REDIS_URL", "redis://a")],
        ),
        (&[("GATEWAY_ADMIN_LISTEN", "[::1]:8081")], &[("GATEWAY_ADMIN_LISTEN", "0.0.0.0:8081")]),
        (
            &[("GATEWAY_ADMIN_LISTEN", "0.0.0.0:8081"), ("GATEWAY_ADMIN_KEY", SECRET)],
            &[("GATEWAY_ADMIN_LISTEN", "192.0.2.1:8081")],
        ),
        (
            &[("GATEWAY_PROBE_LISTEN", "0.0.0.0:0")],
            &[("GATEWAY_LISTEN", "127.0.0.1:8081"), ("GATEWAY_ADMIN_LISTEN", "127.0.0.1:8081")],
        ),
        (
            &[("GATEWAY_LISTEN", "127.0.0.1:0")],
            &[("GATEWAY_LISTEN", "127.0.0.1:9102"), ("GATEWAY_PROBE_LISTEN", "0.0.0.0:9102")],
        ),
    ];
    for (fine, broken) in cases {
        good(fine);
        for (name, _) in *broken {
            fault(name, broken);
        }
    }
}

#[test]
fn a_drain_that_would_be_killed_before_its_end_is_shortened_and_said_with_all_figures() {
    for (set, in_force, said) in [
        ("", 120_000, None),
        ("126s", 120_000, None),
        ("125s", 120_000, None),
        ("124999ms", 119_999, Some("lowered to 119999ms; with 125s")),
        ("30s", 25_000, Some("killed after 30s, the process would not live to the drain's deadline of 2m")),
        ("13001ms", 8_001, Some("lowered to 8001ms; with 125s before the kill it would fit")),
    ] {
        let config = good(&[("GATEWAY_TERMINATION_GRACE", set)]);
        assert_eq!(config.drain.deadline_in_force(), Duration::from_millis(in_force), "{set}");
        let printed = config.settings().iter().find(|s| s.name == "GATEWAY_DRAIN_DEADLINE").unwrap();
        assert_eq!(parse::duration(&printed.value), Some(config.drain.deadline_in_force()), "{set}");
        let warnings: Vec<String> = config.warnings().iter().map(Relation::to_string).collect();
        assert_eq!(warnings.len(), usize::from(said.is_some()), "{set}: {warnings:?}");
        assert!(said.is_none_or(|said| warnings[0].contains(said)), "{set}: {warnings:?}");
    }
}

#[test]
fn a_window_that_is_shortened_with_the_deadline_is_said_too() {
    let grace = ("GATEWAY_TERMINATION_GRACE", "30s");
    for (window, said) in [("17s", "lowered to 25s; with"), ("17001ms", "lowered to 25s and the window to 17s; with")] {
        let warnings = good(&[grace, ("GATEWAY_DRAIN_WINDOW", window)]).warnings();
        assert!(warnings[0].why.contains(said), "{window}: {}", warnings[0]);
    }
}

#[test]
fn tls_needs_certificate_and_key() {
    let file = TempFile::with(b"pem");
    let (cert, key) = (("GATEWAY_TLS_CERT_FILE", file.path()), ("GATEWAY_TLS_KEY_FILE", file.path()));
    assert!(good(&[cert, key]).listen.tls().is_some());
    assert!(good(&[]).listen.tls().is_none());
    for one in [cert, key] {
        assert!(fault("GATEWAY_TLS_CERT_FILE", &[one]).contains("GATEWAY_TLS_KEY_FILE"));
    }
}

#[test]
fn doubtful_values_are_warned_about_by_name() {
    for (quiet, doubtful) in [
        (("GATEWAY_HEARTBEAT", "59s"), ("GATEWAY_HEARTBEAT", "60s")),
        (("GATEWAY_HEARTBEAT_TIMEOUT", "25s"), ("GATEWAY_HEARTBEAT_TIMEOUT", "25001ms")),
        (("GATEWAY_ACCEPT_BURST", "1024"), ("GATEWAY_ACCEPT_BURST", "1025")),
        (("GATEWAY_OUTBOX_BYTES", "65KiB"), ("GATEWAY_OUTBOX_BYTES", "66559")),
        (("GATEWAY_REDIS_TIMEOUT", "999ms"), ("GATEWAY_REDIS_TIMEOUT", "1s")),
        (("GATEWAY_SHED_INTERVAL", "5s"), ("GATEWAY_SHED_INTERVAL", "4s")),
        (("GATEWAY_MAX_AGE_MIN", "59m"), ("GATEWAY_MAX_AGE_MIN", "60m")),
        (("GATEWAY_TERMINATION_GRACE", "125s"), ("GATEWAY_TERMINATION_GRACE", "124999ms")),
        (("GATEWAY_ADMIN_KEY", "0123456789abcdef"), ("GATEWAY_ADMIN_KEY", "0123456789abcde")),
        (("GATEWAY_JWT_JWKS_URL", "https://a/k"), ("GATEWAY_JWT_JWKS_URL", "http://a/k")),
        (("GATEWAY_LISTEN", "127.0.0.1:1"), ("GATEWAY_REDIS_PASSWORD", "x")),
    ] {
        assert_eq!(good(&[quiet]).warnings(), [], "{quiet:?}");
        assert!(names(&good(&[doubtful]).warnings()).contains(&doubtful.0), "{doubtful:?}");
    }
}

#[test]
fn every_broken_relation_of_a_config_is_found_at_once() {
    let mut config = good(&[]);
    config.session.outbox_bytes = 1;
    config.fleet.ttl = Duration::from_secs(1);
    config.drain.window = Some(Duration::from_secs(600));
    config.redis.partitions = 2;
    assert_eq!(config.check().len(), 4);
}

#[test]
fn a_node_is_named_after_its_host_and_each_start_differs() {
    let name = || good(&[("HOSTNAME", "web 1/ä")]).node.name;
    let first = name();
    assert!(first.starts_with("web-1---") && first.len() <= 64, "{first}");
    assert_ne!(first, name());
    assert_eq!(good(&[("GATEWAY_NODE", "a.b-c_1")]).node.name, "a.b-c_1");
    for bad in ["a b", "a/b", &"x".repeat(65)] {
        fault("GATEWAY_NODE", &[("GATEWAY_NODE", bad)]);
    }
}

#[test]
fn values_of_other_forms_are_checked_too() {
    for (name, bad) in [
        ("GATEWAY_AUTH_COOKIE", "a=b"),
        ("GATEWAY_ANONYMOUS_CHANNELS", "news,user:*x"),
        ("GATEWAY_ADMIN_HOSTS", "http://admin.internal"),
        ("GATEWAY_ADMIN_KEY", "two words"),
        ("GATEWAY_ADMIN_KEY", "  "),
        ("GATEWAY_REDIS_PREFIX", "{tide}"),
        ("GATEWAY_LOG", "info,=,="),
        ("GATEWAY_JWT_JWKS_URL", "https://user:pass@id.example/keys"),
        ("GATEWAY_JWT_JWKS_URL", "file:///keys"),
        ("GATEWAY_JWT_ISSUER", "a,,b"),
        ("GATEWAY_NODE", "\u{FFFD}"),
    ] {
        fault(name, &[(name, bad)]);
    }
}

#[test]
fn tools_read_only_what_they_need() {
    let tools = |pairs: &[(&str, &str)]| Tools::from_environment(&environment(pairs));
    assert!(tools(&[("GATEWAY_HEARTBEET", "x"), ("GATEWAY_SHED", "maybe")]).is_ok());
    assert!(tools(&[("GATEWAY_ADMIN_KEY", "two words"), ("GATEWAY_ADMIN_LISTEN", "x")]).unwrap_err().0.len() == 2);
}

#[test]
fn the_documentation_holds_the_table_as_the_code_has_it() {
    let doc = include_str!("../../../docs/CONFIGURATION.md");
    for line in table::markdown().lines() {
        assert!(
            doc.lines().any(|l| l == line),
            "docs/CONFIGURATION.md lacks this line (`tidegate config --markdown` prints all):\n{line}"
        );
    }
    let known = |name: &str| variables().any(|v| name == v.name || name.strip_suffix("_FILE") == Some(v.name));
    let is_name = |c: char| c.is_ascii_uppercase() || c == '_';
    for name in doc.split(|c: char| !is_name(c)).filter(|w| w.starts_with("GATEWAY_") && !w.ends_with('_')) {
        assert!(
            known(name) || name.contains("SERVICE") || name.contains("PORT"),
            "docs/CONFIGURATION.md names {name}, which does not exist"
        );
    }
    let defaults = variables().filter(|v| matches!(v.default, Unset::Value(_))).count();
    assert!(defaults > 50, "most rows have a value of their own");
}

#[test]
fn a_prefix_that_would_share_keys_with_another_deployment_is_refused() {
    for good in ["tidegate", "a", "a:b", "live", "eu:prod.1"] {
        assert_eq!(super::values::redis_prefix(good).as_deref(), Some(good));
    }
    for bad in ["a:live", "a:revoked:b", "a:ch", "", "a b", "a{b}"] {
        assert_eq!(super::values::redis_prefix(bad), None, "{bad}");
    }
}
