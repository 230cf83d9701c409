//! `tidegate dev`: a gateway for trying out. Decides what holds where nothing is set: everything on
//! this host only, a random key, a token to start with. Beyond that it is the same gateway.

use std::time::Duration;

use hub::plugin::Plugins;
use rand::TryRng as _;

use super::output::say;
use super::serve::start;
use super::{CliError, TokenArgs, token};
use crate::config::{Config, Environment, Purpose, Relation, Tools, process_environment};
use crate::run::Addresses;

/// The channel that the printed token joins.
const CHANNEL: &str = "demo";
/// The token ends with the key at the latest, when this process does.
const TOKEN_TTL: Duration = Duration::from_secs(30 * 86_400);
/// What holds where the environment says nothing.
const DEFAULTS: [(&str, &str); 3] = [
    ("GATEWAY_LISTEN", "127.0.0.1:8080"),
    ("GATEWAY_PROBE_LISTEN", "127.0.0.1:9102"),
    // Nobody balances to this node, so nobody has to notice that it leaves.
    ("GATEWAY_DRAIN_GRACE", "0s"),
];
const KEYS: [&str; 4] =
    ["GATEWAY_JWT_SECRET", "GATEWAY_JWT_PUBLIC_KEY", "GATEWAY_JWT_JWKS_URL", "GATEWAY_JWT_JWKS_FILE"];

/// Runs until Ctrl-C.
///
/// # Errors
/// As `serve`; `Usage` where a listener would be open to other hosts.
pub fn run(plugins: Plugins) -> Result<(), CliError> {
    let environment = with_defaults(process_environment());
    let config = Config::from_environment(&environment, Purpose::Serve)?;
    refuse_other_hosts(&config)?;
    let tools = Tools::from_environment(&environment)?;
    let has_admin_key = config.admin.key.is_some();
    let token = match config.auth.jwt_secret {
        Some(_) => Some(token::sign(&tools, &token::claims(&wish(), &tools)?)?),
        None => None,
    };
    let console_token = token.clone();
    // As it was called, so that the lines can be pasted where it is not in the PATH.
    let program = std::env::args().next().unwrap_or_else(|| "tidegate".to_owned());
    let listening = Box::new(move |bound: &Addresses| say(&welcome(&program, bound, token.as_deref(), has_admin_key)));
    start(config, plugins, listening, console_token)
}

fn with_defaults(mut environment: Environment) -> Environment {
    let is_set = |environment: &Environment, name: &str| environment.get(name).is_some_and(|value| !value.is_empty());
    for (name, value) in DEFAULTS {
        if !is_set(&environment, name) {
            environment.insert(name.to_owned(), value.to_owned());
        }
    }
    // Pages served from elsewhere on this host, the console among them, may connect.
    if !is_set(&environment, "GATEWAY_ALLOWED_ORIGINS") && !is_set(&environment, "GATEWAY_AUTH_COOKIE") {
        environment.insert("GATEWAY_ALLOWED_ORIGINS".to_owned(), "*".to_owned());
    }
    if !KEYS.iter().any(|name| is_set(&environment, name) || is_set(&environment, &format!("{name}_FILE"))) {
        environment.insert("GATEWAY_JWT_SECRET".to_owned(), random_secret());
    }
    environment
}

fn refuse_other_hosts(config: &Config) -> Result<(), CliError> {
    let listen = &config.listen;
    let listeners = [
        ("GATEWAY_LISTEN", listen.public),
        ("GATEWAY_ADMIN_LISTEN", listen.admin),
        ("GATEWAY_PROBE_LISTEN", listen.probes),
    ];
    let open: Vec<String> = listeners
        .iter()
        .filter(|(_, address)| !address.ip().to_canonical().is_loopback())
        .map(|(name, _)| (*name).to_owned())
        .collect();
    if open.is_empty() {
        return Ok(());
    }
    let why = "dev opens nothing to other hosts; use a loopback address, or `tidegate serve`".to_owned();
    Err(CliError::Usage(Relation { names: open, why }.to_string()))
}

/// What the printed token may do: hear `CHANNEL` at once and ask for any other.
fn wish() -> TokenArgs {
    TokenArgs {
        sub: "dev".to_owned(),
        ttl: TOKEN_TTL,
        channels: vec![CHANNEL.to_owned()],
        subscribe: vec!["*".to_owned()],
        jti: Some(None),
        sid: None,
    }
}

/// What is printed once the listeners stand: lines to paste.
fn welcome(program: &str, bound: &Addresses, token: Option<&str>, has_admin_key: bool) -> String {
    let Addresses { public, admin, probes } = bound;
    let key = if has_admin_key { "   (with GATEWAY_ADMIN_KEY set as here)" } else { "" };
    let mut lines = vec![
        "Tidegate is running, for this host only. Stop it with Ctrl-C.".to_owned(),
        String::new(),
        format!("  WebSocket  ws://{public}/v1/ws"),
        format!("  SSE        http://{public}/v1/sse"),
        format!("  console    http://{admin}/console"),
        format!("  metrics    http://{probes}/metrics"),
        String::new(),
    ];
    match token {
        Some(token) => lines.extend([
            format!("A token (user dev, hears {CHANNEL}, may ask for any channel):"),
            String::new(),
            token.to_owned(),
            String::new(),
            "Hear events, one way or the other:".to_owned(),
            String::new(),
            format!("curl -N -H 'Authorization: Bearer {token}' http://{public}/v1/sse"),
            format!("{program} tail --url http://{public} --token {token}"),
        ]),
        None => lines
            .push("No token is printed: your key can check tokens, not sign them. Bring one of your own.".to_owned()),
    }
    lines.extend([
        String::new(),
        "Publish one:".to_owned(),
        String::new(),
        format!("{program} publish --admin http://{admin} {CHANNEL} '{{\"hello\":\"world\"}}'{key}"),
        String::new(),
    ]);
    lines.join("\n")
}

/// 256 random bits as hexadecimal digits.
fn random_secret() -> String {
    let mut bytes = [0; 32];
    rand::rngs::SysRng.try_fill_bytes(&mut bytes).expect("the system has random numbers");
    bytes.iter().map(|b| format!("{b:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn environment(pairs: &[(&str, &str)]) -> Environment {
        pairs.iter().map(|(n, v)| ((*n).to_owned(), (*v).to_owned())).collect()
    }

    #[test]
    fn nothing_set_is_enough_and_opens_nothing_to_other_hosts() {
        let config = Config::from_environment(&with_defaults(Environment::new()), Purpose::Serve).unwrap();
        assert!(refuse_other_hosts(&config).is_ok());
        assert!(config.auth.jwt_secret.is_some());
    }

    #[test]
    fn a_listener_for_other_hosts_is_refused_by_name() {
        let environment = with_defaults(environment(&[("GATEWAY_LISTEN", "0.0.0.0:8080")]));
        let config = Config::from_environment(&environment, Purpose::Serve).unwrap();
        let error = refuse_other_hosts(&config).unwrap_err();
        assert!(error.to_string().contains("GATEWAY_LISTEN"), "{error}");
        assert_eq!(error.exit_code(), 64);
    }

    #[test]
    fn a_key_of_the_environment_is_used_and_none_is_made() {
        let given = environment(&[("GATEWAY_JWT_JWKS_URL", "https://id.example/keys")]);
        assert!(!with_defaults(given).contains_key("GATEWAY_JWT_SECRET"));
        let secret = "0123456789abcdef0123456789abcdef";
        assert_eq!(with_defaults(environment(&[("GATEWAY_JWT_SECRET", secret)]))["GATEWAY_JWT_SECRET"], secret);
    }

    #[test]
    fn two_starts_have_two_keys() {
        assert_ne!(random_secret(), random_secret());
        assert_eq!(random_secret().len(), 64);
    }

    #[test]
    fn the_welcome_has_a_line_to_paste_for_each_way() {
        let address = |port| std::net::SocketAddr::from(([127, 0, 0, 1], port));
        let bound = Addresses { public: address(1), admin: address(2), probes: address(3) };
        let text = welcome("tidegate", &bound, Some("a.b.c"), false);
        for line in [
            "curl -N -H 'Authorization: Bearer a.b.c' http://127.0.0.1:1/v1/sse",
            "tidegate tail --url http://127.0.0.1:1 --token a.b.c",
            "tidegate publish --admin http://127.0.0.1:2 demo '{\"hello\":\"world\"}'",
            "a.b.c",
        ] {
            assert!(text.lines().any(|l| l == line), "{text}");
        }
        assert!(text.contains("ws://127.0.0.1:1/v1/ws") && text.contains("http://127.0.0.1:2/console"), "{text}");
    }
}
