//! `sandbar`: arguments in, one file per subcommand, exit code out.

mod admin;
mod app;
mod command;
mod policies;
mod problems;
mod terminal;

use std::process::ExitCode;

fn main() -> ExitCode {
    command::run()
}
