//! What is wrong with a file: where, what, and what to change.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use crate::path::PathPatternError;
use crate::pattern::PatternError;
use crate::set::SetError;
use crate::word::WordError;

/// Most problems that are collected; more help nobody.
pub const MAX_PROBLEMS: usize = 50;
/// Longest excerpt of a line that is shown.
const MAX_EXCERPT: usize = 200;

/// One thing wrong with one place of one file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Problem {
    pub at: Place,
    pub fault: Fault,
    /// What to do, when that is more than the fault itself says.
    pub help: Option<String>,
}

/// A place in a file, with the line as it stands there.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Place {
    pub file: Arc<str>,
    /// From 1.
    pub line: u32,
    /// From 1, in characters.
    pub column: u32,
    /// How many characters are meant, at least one.
    pub width: u32,
    /// The line, with control characters replaced: a policy must not steer the terminal it is shown on.
    pub excerpt: String,
}

/// What is wrong.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Fault {
    #[error("`{0}` and `{1}` exclude each other")]
    Exclusive(&'static str, &'static str),
    #[error(
        "{policy}: bank `{bank}` is of environment `{found}`, but sandbox `{sandbox}` is of `{own}`"
    )]
    ForeignEnvironment { policy: String, bank: String, found: String, sandbox: String, own: String },
    #[error("`{entry}` is not a host pattern: {source}")]
    Host { entry: String, source: PatternError },
    #[error("cannot read the list `{path}`: {why}")]
    List { path: String, why: String },
    #[error("`{0}` is not a request method: methods are upper-case words, such as `GET`")]
    Method(String),
    #[error("`{0}` is never forwarded, whatever a rule says")]
    MethodNeverForwarded(String),
    #[error("{0}")]
    Missing(&'static str),
    #[error("`{0}` is not a network; write it as address/length, such as `10.1.0.0/16`")]
    Network(String),
    #[error("rule `{rule}` can never act: {why}")]
    NeverActs { rule: String, why: String },
    #[error("bank `{0}` names no environment")]
    NoEnvironment(String),
    #[error("the file is not UTF-8")]
    NotUtf8,
    #[error("this does nothing: {0}")]
    Pointless(String),
    #[error("`{entry}` is not a path pattern: {source}")]
    Path { entry: String, source: PathPatternError },
    #[error("{0} is not a port")]
    Port(u16),
    #[error("`{0}` is a name Sandbar itself uses")]
    Reserved(String),
    #[error(transparent)]
    Set(#[from] SetError),
    #[error("{0}")]
    Syntax(String),
    #[error("rules `{one}` and `{other}` tie for `{host}` but differ in their credential")]
    Tie { one: String, other: String, host: String },
    #[error("more than {limit} {what}")]
    TooMany { what: &'static str, limit: usize },
    #[error(
        "sandbox `{sandbox}` has memory, and rule `{rule}` passes bytes unseen to a host that may not receive it"
    )]
    TunnelBesideMemory { sandbox: String, rule: String },
    #[error("{what} `{name}` stands twice; first on line {line}")]
    Twice { what: &'static str, name: String, line: u32 },
    #[error("there is no {what} `{name}`")]
    Unknown { what: &'static str, name: String },
    #[error("`{key}` is not a key here")]
    UnknownKey { key: String },
    #[error("{what} `{entry}` is not good: {source}")]
    Word { what: &'static str, entry: String, source: WordError },
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.at, self.fault)
    }
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}:{}", self.file, self.line, self.column)
    }
}

/// A file's text, able to say where in it something stands.
#[derive(Clone, Debug)]
pub(crate) struct Source<'a> {
    pub(crate) file: Arc<str>,
    pub(crate) text: &'a str,
}

impl Source<'_> {
    /// The line a byte offset lies on, from 1.
    pub(crate) fn line(&self, offset: usize) -> u32 {
        let before = self.text.as_bytes().get(..offset).unwrap_or(self.text.as_bytes());
        before.iter().filter(|byte| **byte == b'\n').count() as u32 + 1
    }

    pub(crate) fn place(&self, span: Range<usize>) -> Place {
        let start = (0..=span.start.min(self.text.len()))
            .rev()
            .find(|at| self.text.is_char_boundary(*at))
            .unwrap_or(0);
        let (before, after) = self.text.split_at(start);
        let line_start = before.rfind('\n').map_or(0, |at| at + 1);
        let column = before.get(line_start..).map_or(0, |front| front.chars().count()) as u32 + 1;
        let line = self.text.get(line_start..).and_then(|rest| rest.lines().next()).unwrap_or("");
        let meant = after.get(..span.len()).and_then(|text| text.lines().next()).unwrap_or("");
        Place {
            file: self.file.clone(),
            line: self.line(start),
            column,
            width: meant.chars().count().max(1) as u32,
            excerpt: printable(line),
        }
    }
}

/// The text with everything a terminal could act on replaced, one character for one.
pub fn printable(text: &str) -> String {
    let harmless = |c: char| match c {
        '\t' => ' ',
        c if c.is_control() || is_formatting(c) => char::REPLACEMENT_CHARACTER,
        c => c,
    };
    text.chars().take(MAX_EXCERPT).map(harmless).collect()
}

/// Bidirectional and invisible formatting, which makes a line read other than it is.
fn is_formatting(c: char) -> bool {
    matches!(c, '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2060}'..='\u{206f}' | '\u{feff}')
}

/// The problems found so far, up to a bound.
#[derive(Debug, Default)]
pub(crate) struct Problems {
    pub(crate) errors: Vec<Problem>,
    pub(crate) warnings: Vec<Problem>,
}

impl Problems {
    pub(crate) fn error(&mut self, at: Place, fault: Fault) {
        self.push(Problem { at, fault, help: None });
    }

    pub(crate) fn error_with(&mut self, at: Place, fault: Fault, help: impl Into<String>) {
        self.push(Problem { at, fault, help: Some(help.into()) });
    }

    pub(crate) fn warning(&mut self, at: Place, fault: Fault) {
        if self.warnings.len() < MAX_PROBLEMS {
            self.warnings.push(Problem { at, fault, help: None });
        }
    }

    /// In the order a reader meets them.
    pub(crate) fn sort(&mut self) {
        let place =
            |problem: &Problem| (problem.at.file.clone(), problem.at.line, problem.at.column);
        self.errors.sort_by_key(place);
        self.warnings.sort_by_key(place);
    }

    pub(crate) fn is_full(&self) -> bool {
        self.errors.len() >= MAX_PROBLEMS
    }

    fn push(&mut self, problem: Problem) {
        if !self.is_full() {
            self.errors.push(problem);
        }
    }
}

/// The word of `known` that `found` is a likely slip of.
pub fn nearest<'a>(found: &str, known: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    let score = |word: &&str| (strsim::jaro_winkler(found, word) * 1000.0) as u32;
    known.into_iter().filter(|word| score(word) >= 800).max_by_key(score)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_are_counted_in_characters() {
        let source = Source { file: "p.toml".into(), text: "a = 1\nü = \"\u{1b}[31m\"\r\nlast" };
        let place = source.place(6..8);
        assert_eq!((place.line, place.column, place.width), (2, 1, 1));
        assert_eq!(place.excerpt, "ü = \"\u{fffd}[31m\"");
        let end = source.place(100..200);
        assert_eq!((end.line, end.column, end.excerpt.as_str()), (3, 5, "last"));
        let inside = source.place(7..8);
        assert_eq!(
            (inside.line, inside.column),
            (2, 1),
            "a span inside a character is moved to its front"
        );
    }

    #[test]
    fn slips_are_recognised_and_strangers_are_not() {
        let known = ["methods", "hosts", "paths", "tls"];
        assert_eq!(nearest("methds", known), Some("methods"));
        assert_eq!(nearest("host", known), Some("hosts"));
        assert_eq!(nearest("quux", known), None);
    }
}
