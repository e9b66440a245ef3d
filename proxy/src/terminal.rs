//! How `sandbar` speaks: people first, `--json` for machines, colours only on a terminal.
//!
//! Answers go to stdout for scripts to read, complaints to stderr as `sandbar: ...`.

use anstyle::{AnsiColor, Style};

pub(crate) const BAD: Style = AnsiColor::Red.on_default();
pub(crate) const FAINT: Style = Style::new().dimmed();
pub(crate) const GOOD: Style = AnsiColor::Green.on_default();
pub(crate) const HEAD: Style = Style::new().bold();
pub(crate) const WARN: Style = AnsiColor::Yellow.on_default();

/// When to colour, as `--color` says; `anstream` adds `NO_COLOR` and the terminal check.
#[derive(Clone, Copy, Debug, Default, clap::ValueEnum)]
pub(crate) enum Color {
    Always,
    #[default]
    Auto,
    Never,
}

impl Color {
    pub(crate) fn apply(self) {
        let choice = match self {
            Color::Always => anstream::ColorChoice::Always,
            Color::Auto => anstream::ColorChoice::Auto,
            Color::Never => anstream::ColorChoice::Never,
        };
        choice.write_global();
    }
}

/// Paints `text`, for a stream that strips colour where it is not wanted.
pub(crate) fn paint(style: Style, text: impl std::fmt::Display) -> String {
    format!("{style}{text}{style:#}")
}

/// Prints one JSON value and a newline, for `--json`.
pub(crate) fn print_json(value: &serde_json::Value) {
    anstream::println!("{value:#}");
}
