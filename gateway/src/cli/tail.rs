//! `tidegate tail`: a client in the terminal. Decides only what is printed where: events on stdout,
//! one line each, all that happens around them on stderr. Resuming and backing off is `client`'s.

use std::fmt::Write as _;
use std::io::{self, Write as _};

use client::{Client, End, Event, Message, Transport};

use super::{CliError, TailArgs, TailTransport, output};

const DEFAULT_URL: &str = "http://127.0.0.1:8080";

/// Prints events until Ctrl-C, until nobody reads stdout any more, or until the server ends it for good.
///
/// # Errors
/// `Usage` for a URL or cursor that cannot be; `Unreachable` when the server does not want this
/// client (back); `Internal` when it says that we broke its protocol.
pub async fn run(args: TailArgs) -> Result<(), CliError> {
    let mut builder = Client::builder(args.url.as_deref().unwrap_or(DEFAULT_URL))
        .channels(args.channels)
        .since(args.since.unwrap_or_default())
        .transport(match args.transport {
            TailTransport::Ws => Transport::Ws,
            TailTransport::Sse => Transport::Sse,
        });
    if let Some(token) = args.token {
        builder = builder.token(token);
    }
    let mut client = builder.connect().map_err(|error| CliError::Usage(error.to_string()))?;
    loop {
        // Both arms only wait: a message is taken in the same step in which it is returned.
        let message = tokio::select! {
            message = client.next() => message,
            pressed = tokio::signal::ctrl_c() => {
                pressed.map_err(|error| CliError::Internal(format!("no signals: {error}")))?;
                client.close().await;
                return Ok(());
            }
        };
        let Some(message) = message else { return ended(client.end()) };
        match message {
            Message::Event(event) => {
                if writeln!(io::stdout().lock(), "{}", event_line(&event)).is_err() {
                    client.close().await;
                    return Ok(());
                }
            }
            other => {
                if let Some(line) = remark(&other) {
                    output::complain(&line);
                }
            }
        }
    }
}

fn ended(end: Option<&End>) -> Result<(), CliError> {
    match end {
        Some(End::Closed) => Ok(()),
        Some(End::Never { reason }) if is_our_fault(reason) => {
            Err(CliError::Internal(format!("the server ended the session: {reason}")))
        }
        Some(end) => Err(CliError::Unreachable(end.to_string())),
        None => Err(CliError::Internal("the client stopped without a reason".to_owned())),
    }
}

/// What the server calls a broken protocol, by word or by close code.
fn is_our_fault(reason: &str) -> bool {
    matches!(reason, "bad_message" | "too_large" | "1002" | "1003" | "1007" | "1008" | "1009")
}

/// `<id> <channel> <event> <data>`; `-` stands for an id or a name that is not there.
fn event_line(event: &Event) -> String {
    let id = event.id.as_deref().unwrap_or("-");
    let name = event.event.as_deref().unwrap_or("-");
    one_line(&format!("{id} {} {name} {}", event.channel, event.data.get()))
}

/// What is said about everything but events; `None` where there is nothing to say.
fn remark(message: &Message) -> Option<String> {
    let said = match message {
        Message::Hello(hello) => format!(
            "connected: session {} on {} as {}, channels {}",
            hello.session,
            hello.node.as_deref().unwrap_or("-"),
            hello.user.as_deref().unwrap_or("nobody"),
            hello.channels.join(" ")
        ),
        Message::Ready(ready) => format!(
            "ready: resume {}, {} replayed, at {}",
            format!("{:?}", ready.resume).to_lowercase(),
            ready.replayed,
            ready.id.as_deref().unwrap_or("-")
        ),
        Message::Gap(gap) => {
            format!("gap: {} ({}), goes on at {}", gap.channel, gap.reason, gap.id.as_deref().unwrap_or("-"))
        }
        Message::Unsubscribed(gone) => format!("unsubscribed: {} ({})", gone.channel, gone.reason),
        Message::Error(failed) => format!("error: {} {}", failed.code, failed.message),
        Message::TokenExpiring(expiring) => format!("the token ends in {} s", expiring.in_ms / 1000),
        Message::Bye(bye) => format!(
            "bye: {}, reconnect {}, after {} ms",
            bye.reason,
            format!("{:?}", bye.reconnect).to_lowercase(),
            bye.after_ms.unwrap_or(0)
        ),
        Message::Lost(lost) => format!("not connected: {}; again in {:.1} s", lost.why, lost.retry_in.as_secs_f64()),
        _ => return None,
    };
    Some(one_line(&format!("# {said}")))
}

/// Nothing that a server sends may start a new line or steer the terminal. White space between JSON
/// tokens becomes a blank; other control characters their JSON escape.
fn one_line(text: &str) -> String {
    let mut line = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '\n' | '\r' | '\t' => line.push(' '),
            c if c.is_control() => drop(write!(line, "\\u{:04x}", u32::from(c))),
            c => line.push(c),
        }
    }
    line
}

#[cfg(test)]
mod tests {
    use super::*;

    fn line(text: &str) -> String {
        match Message::parse(text).unwrap() {
            Message::Event(event) => event_line(&event),
            other => remark(&other).unwrap_or_default(),
        }
    }

    #[test]
    fn an_event_is_one_line_of_four_columns() {
        assert_eq!(
            line(r#"{"type":"event","channel":"news","id":"5-1","event":"new","data":{"a":[1, 2]}}"#),
            r#"5-1 news new {"a":[1, 2]}"#
        );
        assert_eq!(line(r#"{"type":"event","channel":"news","data":null}"#), "- news - null");
        assert_eq!(
            line("{\"type\":\"event\",\"channel\":\"c\",\"data\":{\n\t\"a\": \"\u{9b}2J\"}}"),
            r#"- c - {  "a": "\u009b2J"}"#
        );
    }

    #[test]
    fn gaps_byes_and_readiness_are_told_beside_the_events() {
        assert_eq!(
            line(r#"{"type":"ready","resume":"gap","replayed":3,"id":"5-1"}"#),
            "# ready: resume gap, 3 replayed, at 5-1"
        );
        assert_eq!(
            line(r#"{"type":"gap","channel":"c","reason":"evicted","id":"4-0"}"#),
            "# gap: c (evicted), goes on at 4-0"
        );
        assert_eq!(
            line(r#"{"type":"bye","reason":"drain","code":1001,"reconnect":"after","after_ms":12}"#),
            "# bye: drain, reconnect after, after 12 ms"
        );
        assert_eq!(line(r#"{"type":"position","id":"4-0"}"#), "");
    }

    #[test]
    fn each_final_end_has_its_exit_code() {
        let code = |end: End| ended(Some(&end)).map_or_else(|error| error.exit_code(), |()| 0);
        assert_eq!(code(End::Closed), 0);
        assert_eq!(code(End::Never { reason: "revoked".into() }), 69);
        assert_eq!(code(End::Never { reason: "bad_message".into() }), 70);
        assert_eq!(code(End::TokenEnded { reason: "token_expired".into() }), 69);
        let refused = End::Refused { status: 403, code: "forbidden".into(), detail: String::new() };
        assert_eq!(code(refused), 69);
    }

    #[tokio::test]
    async fn a_url_that_cannot_be_is_a_usage_error() {
        let args = TailArgs {
            url: Some("https://h".into()),
            token: None,
            channels: vec![],
            transport: TailTransport::Ws,
            since: None,
        };
        assert_eq!(run(args).await.unwrap_err().exit_code(), 64);
    }
}
