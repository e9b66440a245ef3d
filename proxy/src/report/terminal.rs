//! How `sandbar` speaks: people first, `--json` for machines, colours only on a terminal.
//!
//! Answers go to stdout for scripts to read, complaints to stderr as `sandbar: ...`.

use anstyle::{AnsiColor, Style};

pub const BAD: Style = AnsiColor::Red.on_default();
pub const FAINT: Style = Style::new().dimmed();
pub const GOOD: Style = AnsiColor::Green.on_default();
pub const HEAD: Style = Style::new().bold();
pub const WARN: Style = AnsiColor::Yellow.on_default();

/// Paints `text`, for a stream that strips colour where it is not wanted.
pub fn paint(style: Style, text: impl std::fmt::Display) -> String {
    format!("{style}{text}{style:#}")
}
