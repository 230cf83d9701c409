//! The program `tidegate`: the gateway without plugins. A custom gateway has a `main` like this one.

use std::process::ExitCode;

fn main() -> ExitCode {
    tidegate::cli::main()
}
