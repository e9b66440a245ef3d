//! Terminal output: text for people, `--json` for programs, colours only on a terminal.
//!
//! Results go to stdout, so that scripts can read them; errors go to stderr as `sandbar: ...`.

pub(crate) use proxy::report::terminal::{BAD, FAINT, GOOD, HEAD, WARN, paint};

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

/// Prints one JSON value and a newline, for `--json`.
pub(crate) fn print_json(value: &serde_json::Value) {
    anstream::println!("{value:#}");
}
