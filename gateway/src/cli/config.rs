//! `tidegate config`: the settings in force, or only whether they are good.

use super::output::{complain, say};
use super::{CliError, ConfigArgs};
use crate::config::table::{self, row};
use crate::config::{Config, Purpose, Setting, process_environment};
use crate::run::rehearse;
use crate::settings;

/// Widest column of values; longer ones push their line out of the grid rather than all others.
const MAX_COLUMN: usize = 36;

/// Prints the table, its Markdown, or nothing but faults and warnings.
///
/// # Errors
/// `Config` with every fault; `Usage` where the check finds what `serve` would refuse besides.
pub fn run(args: &ConfigArgs) -> Result<(), CliError> {
    if args.markdown {
        say(table::markdown().trim_end());
        return Ok(());
    }
    let purpose = if args.check { Purpose::Serve } else { Purpose::Look };
    let config = Config::from_environment(&process_environment(), purpose)?;
    let mut warnings = config.warnings();
    if args.check {
        rehearse(&config).map_err(|refused| CliError::Usage(refused.to_string()))?;
        say("configuration ok");
    } else {
        say(render(config.settings()).trim_end());
        warnings.extend(config.check_for_serving());
    }
    for warning in warnings {
        complain(&format!("warning: {warning}"));
    }
    if !args.check
        && let Err(missing) = settings::refuse_what_is_not_there(&config)
    {
        complain(&format!("warning: {missing}"));
    }
    Ok(())
}

/// Name, value in force, default, meaning; `*` marks what was set.
fn render(settings: &[Setting]) -> String {
    let width = |text: fn(&Setting) -> &str| settings.iter().map(|s| text(s).chars().count()).max().unwrap_or(0);
    let name_width = width(|s| s.name) + 2;
    let value_width = width(|s| &s.value).min(MAX_COLUMN);
    let default_width = width(|s| row(s.name).default.shown()).min(MAX_COLUMN);
    let mut out =
        format!("{:name_width$} {:value_width$} {:default_width$} MEANING\n", "NAME (* set)", "VALUE", "DEFAULT");
    for setting in settings {
        let variable = row(setting.name);
        let name = format!("{}{}", setting.name, if setting.is_set { " *" } else { "" });
        let value = setting.value.escape_debug().to_string();
        let [value, default, meaning] = [&value, variable.default.shown(), variable.meaning].map(without_markup);
        out.push_str(&format!("{name:name_width$} {value:value_width$} {default:default_width$} {meaning}\n"));
    }
    out
}

/// The table's texts are written for Markdown; a terminal needs no backticks.
fn without_markup(text: &str) -> String {
    text.replace('`', "")
}
