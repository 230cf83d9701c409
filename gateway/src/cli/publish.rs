//! `tidegate publish`: one event through the admin API.

use std::io::Read as _;

use hyper::Method;
use serde::Serialize;
use serde_json::value::RawValue;

use super::admin_client::AdminClient;
use super::output::say;
use super::{CliError, PublishArgs};

/// The body of `POST /v1/publish`; `data` is sent as it was typed.
#[derive(Serialize)]
struct Body<'a> {
    channel: &'a str,
    data: &'a RawValue,
    #[serde(skip_serializing_if = "Option::is_none")]
    event: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    idempotency_key: Option<&'a str>,
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    ephemeral: bool,
}

/// Publishes and prints the gateway's answer.
///
/// # Errors
/// `Usage` for what is no JSON; else as `AdminClient::call`.
pub async fn run(args: PublishArgs) -> Result<(), CliError> {
    let client = AdminClient::new(&args.admin)?;
    let body = body(&args)?;
    say(&client.call(Method::POST, "/v1/publish", Some(body)).await?.to_string());
    Ok(())
}

fn body(args: &PublishArgs) -> Result<String, CliError> {
    let text = match args.json.as_str() {
        "-" => read_stdin()?,
        text => text.to_owned(),
    };
    let data: &RawValue = serde_json::from_str(text.trim()).map_err(|error| {
        CliError::Usage(format!("the data is no JSON ({error}); a text needs its quotes: '\"hello\"'"))
    })?;
    let body = Body {
        channel: &args.channel,
        data,
        event: args.event.as_deref(),
        idempotency_key: args.key.as_deref(),
        ephemeral: args.ephemeral,
    };
    serde_json::to_string(&body).map_err(|error| CliError::Internal(error.to_string()))
}

fn read_stdin() -> Result<String, CliError> {
    let mut text = String::new();
    std::io::stdin().read_to_string(&mut text).map_err(|error| CliError::Usage(format!("standard input: {error}")))?;
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::AdminArgs;

    fn args(json: &str) -> PublishArgs {
        PublishArgs {
            channel: "news".to_owned(),
            json: json.to_owned(),
            event: None,
            key: None,
            ephemeral: false,
            admin: AdminArgs { admin: None },
        }
    }

    #[test]
    fn data_is_sent_as_it_was_typed() {
        assert_eq!(
            body(&args("{\"b\": 1.50, \"a\": \"\\u00e9\"}")).unwrap(),
            r#"{"channel":"news","data":{"b": 1.50, "a": "\u00e9"}}"#
        );
        let full = PublishArgs { event: Some("e".to_owned()), key: Some("k".to_owned()), ephemeral: true, ..args("1") };
        assert_eq!(
            body(&full).unwrap(),
            r#"{"channel":"news","data":1,"event":"e","idempotency_key":"k","ephemeral":true}"#
        );
    }

    #[test]
    fn what_is_no_json_is_a_usage_error_with_a_hint() {
        for bad in ["hello", "{", "", "1 2", "{'a':1}"] {
            let error = body(&args(bad)).unwrap_err();
            assert_eq!(error.exit_code(), 64, "{bad}");
            assert!(error.to_string().contains("quotes"), "{error}");
        }
    }
}
