//! How `sandbar` speaks: people first, `--json` for machines, colours only on a terminal.
//!
//! Answers go to stdout for scripts to read, complaints to stderr as `sandbar: ...`.

pub(crate) use proxy::report::terminal::{BAD, FAINT, GOOD, HEAD, WARN, paint};

/// When to colour, as `--color` says; `anstream` adds `NO_COLOR` and the terminal check.
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
