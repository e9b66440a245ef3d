//! Styles of terminal output, shared by the proxy's texts and the command line.

use anstyle::{AnsiColor, Style};

pub const BAD: Style = AnsiColor::Red.on_default();
pub const FAINT: Style = Style::new().dimmed();
pub const GOOD: Style = AnsiColor::Green.on_default();
pub const HEAD: Style = Style::new().bold();
pub const WARN: Style = AnsiColor::Yellow.on_default();

/// Styles `text`. Print it with `anstream`, which strips the style where it is not wanted.
pub fn paint(style: Style, text: impl std::fmt::Display) -> String {
    format!("{style}{text}{style:#}")
}
