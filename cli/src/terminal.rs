//! Terminal output: text for people, `--json` for programs, colours only on a terminal.
//!
//! Results go to stdout, so that scripts can read them; errors go to stderr as `sandbar: ...`.

use proxy::report::diagnostics::{DiagnosticLevel, InvalidPolicy, render};
pub(crate) use proxy::report::terminal::{BAD, FAINT, GOOD, HEAD, WARN, paint};
use rules::load::problem::Problem;

/// The value of `--color`. For `auto`, `anstream` checks `NO_COLOR` and whether the output is a terminal.
#[derive(Clone, Copy, Debug, Default, clap::ValueEnum)]
pub(crate) enum ColorMode {
    Always,
    #[default]
    Auto,
    Never,
}

impl ColorMode {
    pub(crate) fn apply(self) {
        let choice = match self {
            ColorMode::Always => anstream::ColorChoice::Always,
            ColorMode::Auto => anstream::ColorChoice::Auto,
            ColorMode::Never => anstream::ColorChoice::Never,
        };
        choice.write_global();
    }
}

/// Prints an error to stderr, once. For an invalid policy that is each problem with its caret, then what failed.
pub(crate) fn print_error(error: &anyhow::Error) {
    let what = match error.downcast_ref::<InvalidPolicy>() {
        Some(InvalidPolicy { problems }) => {
            print_problems(problems, DiagnosticLevel::Error);
            error.to_string()
        }
        None => format!("{error:#}"),
    };
    anstream::eprintln!("{} {what}", paint(BAD, "sandbar:"));
}

/// Prints problems to stderr, as a compiler would.
pub(crate) fn print_problems(problems: &[Problem], severity: DiagnosticLevel) {
    for problem in problems {
        anstream::eprintln!("{}", render(problem, severity));
    }
}

/// Prints one JSON value and a newline, for `--json`.
pub(crate) fn print_json(value: &serde_json::Value) {
    anstream::println!("{value:#}");
}
