//! The configuration and the command line as an operator meets them: the real binary, a clean
//! environment, its exit code and what it prints.

use std::process::{Command, Output};

/// 32 bytes, the least that is taken.
const SECRET: &str = "swordfish-swordfish-swordfish-42";

const COMMANDS: [&str; 12] =
    ["serve", "dev", "config", "migrate", "token", "publish", "tail", "revoke", "fleet", "hold", "release", "drain"];

/// Runs `tidegate` to its end with this environment and no other.
fn tidegate(arguments: &[&str], environment: &[(&str, &str)]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_tidegate"))
        .args(arguments)
        .env_clear()
        .envs(environment.iter().copied())
        .stdin(std::process::Stdio::null())
        .output()
        .expect("the binary was built")
}

fn stdout(output: &Output) -> String {
    String::from_utf8(output.stdout.clone()).unwrap()
}

fn stderr(output: &Output) -> String {
    String::from_utf8(output.stderr.clone()).unwrap()
}

#[test]
fn five_faults_at_once_are_named_in_one_error_with_exit_code_64() {
    let environment = [
        ("GATEWAY_JWT_SECRET", "too-short"),
        ("GATEWAY_HEARTBEET", "25s"),
        ("GATEWAY_LISTEN", "8080"),
        ("GATEWAY_OUTBOX_BYTES", "lots"),
        ("GATEWAY_MAX_AGE_MIN", "2h"),
    ];
    for arguments in [&[][..], &["serve"], &["config"], &["config", "--check"], &["dev"], &["migrate"]] {
        let output = tidegate(arguments, &environment);
        let text = stderr(&output);
        assert_eq!(output.status.code(), Some(64), "{arguments:?}: {text}");
        for (name, _) in environment {
            assert!(text.contains(name), "{arguments:?} does not name {name}: {text}");
        }
        assert!(text.contains("5 faults") && text.contains("did you mean GATEWAY_HEARTBEAT?"), "{text}");
        assert!(!text.contains("too-short"), "{text}");
        assert!(stdout(&output).is_empty(), "{arguments:?}");
    }
}

#[test]
fn the_defaults_and_a_secret_are_a_good_configuration_without_a_warning() {
    let output = tidegate(&["config", "--check"], &[("GATEWAY_JWT_SECRET", SECRET)]);
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    assert_eq!(stderr(&output), "");
}

#[test]
fn serve_without_a_key_refuses_to_start_and_the_check_says_so_too() {
    for arguments in [&["serve"][..], &["config", "--check"]] {
        let output = tidegate(arguments, &[("GATEWAY_JWT_SECRET", "")]);
        assert_eq!(output.status.code(), Some(64));
        assert!(stderr(&output).contains("GATEWAY_JWT_SECRET"), "{}", stderr(&output));
    }
}

#[test]
fn what_kubernetes_injects_for_a_service_called_gateway_is_ignored() {
    let environment = [
        ("GATEWAY_JWT_SECRET", SECRET),
        ("GATEWAY_SERVICE_HOST", "10.96.0.7"),
        ("GATEWAY_SERVICE_PORT", "8080"),
        ("GATEWAY_SERVICE_PORT_PUBLIC", "8080"),
        ("GATEWAY_PORT", "tcp://10.96.0.7:8080"),
        ("GATEWAY_PORT_8080_TCP", "tcp://10.96.0.7:8080"),
        ("GATEWAY_PORT_8080_TCP_PROTO", "tcp"),
        ("GATEWAY_PORT_8080_TCP_PORT", "8080"),
        ("GATEWAY_PORT_8080_TCP_ADDR", "10.96.0.7"),
        ("GATEWAY_ADMIN_SERVICE_HOST", "10.96.0.8"),
    ];
    let output = tidegate(&["config", "--check"], &environment);
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
}

#[test]
fn a_warning_does_not_fail_the_check() {
    let environment = [("GATEWAY_JWT_SECRET", SECRET), ("GATEWAY_HEARTBEAT", "90s")];
    let output = tidegate(&["config", "--check"], &environment);
    assert_eq!(output.status.code(), Some(0));
    assert!(stderr(&output).contains("warning: GATEWAY_HEARTBEAT"), "{}", stderr(&output));
}

#[test]
fn the_table_shows_values_in_force_defaults_and_no_secret() {
    let environment = [
        ("GATEWAY_JWT_SECRET", SECRET),
        ("GATEWAY_ADMIN_KEY", "swordfish-admin-key"),
        ("GATEWAY_REDIS_URL", "redis://user:swordfish@redis.internal:6379/1"),
        ("GATEWAY_HEARTBEAT", "20s"),
    ];
    let output = tidegate(&["config"], &environment);
    let table = stdout(&output);
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    assert!(!table.contains("swordfish") && !stderr(&output).contains("swordfish"), "{table}");
    let row = |name: &str| {
        table.lines().find(|l| l.split_whitespace().next() == Some(name)).unwrap_or_else(|| panic!("{name}: {table}"))
    };
    assert!(row("GATEWAY_HEARTBEAT").contains("20s") && row("GATEWAY_HEARTBEAT").contains("25s"));
    assert!(row("GATEWAY_JWT_SECRET").contains("[hidden]"));
    assert!(row("GATEWAY_MAX_SESSIONS").contains("40000"));
}

#[test]
fn an_unreadable_or_wrong_secret_is_refused_without_showing_it() {
    let public_key = "-----BEGIN PUBLIC KEY-----\nMCowBQYDK2VwAyEA68SsPBpxVXAFA2TWzqtHjkJz0Mk5eBf1aXBvzJ5toWY=\n-----END PUBLIC KEY-----\n";
    for (name, value, hidden) in [
        ("GATEWAY_JWT_SECRET", "      ", "no such text"),
        ("GATEWAY_JWT_SECRET", "tooshort", "tooshort"),
        ("GATEWAY_JWT_SECRET", public_key, "MCowBQYDK2VwAyEA"),
        ("GATEWAY_JWT_SECRET_FILE", "/no/such/file", "no such text"),
        ("GATEWAY_REDIS_URL", "redis://u:p#w0rd@redis", "w0rd"),
        ("GATEWAY_JWT_SECRT", SECRET, "swordfish"),
    ] {
        let output = tidegate(&["serve"], &[(name, value)]);
        assert_eq!(output.status.code(), Some(64), "{name}");
        assert!(stderr(&output).contains(name) && !stderr(&output).contains(hidden), "{}", stderr(&output));
    }
}

#[test]
fn every_command_has_help_with_an_example() {
    for command in COMMANDS {
        let output = tidegate(&[command, "--help"], &[]);
        let help = stdout(&output);
        assert_eq!(output.status.code(), Some(0), "{command}");
        assert!(help.contains("Example:") && help.contains(&format!("tidegate {command}")), "{help}");
    }
    let help = stdout(&tidegate(&["--help"], &[]));
    assert!(COMMANDS.iter().all(|command| help.contains(command)) && help.contains("Example:"), "{help}");
}

#[test]
fn wrong_usage_exits_with_64_and_says_so_on_stderr() {
    for arguments in [
        &["serf"][..],
        &["--no-such-flag"],
        &["token"],
        &["publish", "news"],
        &["hold", "--for", "soon", "--reason", "x"],
    ] {
        let output = tidegate(arguments, &[]);
        assert_eq!(output.status.code(), Some(64), "{arguments:?}");
        assert!(!stderr(&output).is_empty() && stdout(&output).is_empty(), "{arguments:?}");
    }
}

#[test]
fn a_token_is_printed_alone_and_only_with_a_key_to_sign_it() {
    let arguments = ["token", "--sub", "42", "--ttl", "1h", "--channel", "news", "--subscribe", "room:*", "--jti"];
    let output = tidegate(&arguments, &[("GATEWAY_JWT_SECRET", SECRET)]);
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    let token = stdout(&output);
    assert!(token.ends_with('\n') && token.trim_end().split('.').count() == 3 && !token.contains(' '), "{token}");
    assert_eq!(tidegate(&arguments, &[]).status.code(), Some(64));
    let bad = ["token", "--sub", "42", "--channel", "two words"];
    assert_eq!(tidegate(&bad, &[("GATEWAY_JWT_SECRET", SECRET)]).status.code(), Some(64));
}

#[test]
fn migrating_without_a_redis_url_is_a_usage_error() {
    let output = tidegate(&["migrate"], &[]);
    assert_eq!(output.status.code(), Some(64));
    assert!(stderr(&output).contains("GATEWAY_REDIS_URL"), "{}", stderr(&output));
}

#[test]
fn an_admin_api_that_is_not_there_is_exit_code_69() {
    // A port that was free a moment ago and that nobody listens on.
    let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let url = format!("http://127.0.0.1:{port}");
    for arguments in [
        &["publish", "news", "1"][..],
        &["revoke", "--jti", "a"],
        &["fleet"],
        &["hold", "1m", "--reason", "x"],
        &["release"],
        &["drain"],
    ] {
        let arguments: Vec<&str> = arguments.iter().copied().chain(["--admin", &url]).collect();
        let output = tidegate(&arguments, &[]);
        assert_eq!(output.status.code(), Some(69), "{arguments:?}: {}", stderr(&output));
    }
    assert_eq!(tidegate(&["fleet", "--admin", "https://a"], &[]).status.code(), Some(64));
}
