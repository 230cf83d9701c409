//! Writing to the terminal. A reader that went away (`tidegate config | head`) is no failure.

use std::io::Write as _;

/// Prints `text` and a line end to stdout.
pub fn say(text: &str) {
    let _ = writeln!(std::io::stdout().lock(), "{text}");
}

/// Prints `text` and a line end to stderr.
pub fn complain(text: &str) {
    let _ = writeln!(std::io::stderr().lock(), "{text}");
}
