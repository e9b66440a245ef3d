//! What is wrong with a file: where, what, and what to change.

use std::cell::OnceCell;
use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use toml::Spanned;

use crate::host_set::HostSetError;
use crate::ids::IdError;
use crate::pattern::PatternError;
use crate::url_path::PathPatternError;

/// Most problems that are collected; more help nobody.
pub const MAX_PROBLEMS: usize = 50;
/// Longest excerpt of a line that is shown.
const MAX_EXCERPT: usize = 200;

/// One thing wrong with one place of one file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Problem {
    pub at: SourceLocation,
    pub fault: ProblemKind,
    /// What to do, when that is more than the fault itself says.
    pub help: Option<String>,
}

/// A place in a file, with the line as it stands there.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SourceLocation {
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
pub enum ProblemKind {
    #[error(
        "bank `{bank}` names environment `{other}`, but the rule says every bank there is of another"
    )]
    BankElsewhere { bank: String, other: String },
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
    #[error("{given} is no limit here: from 1 to {most}")]
    Limit { given: u64, most: u64 },
    #[error("{0}")]
    Missing(&'static str),
    #[error(
        "`{0}` is not a network; write it as address/length, such as `10.1.0.0/16` (IPv4 as IPv4)"
    )]
    Network(String),
    #[error("rule `{rule}` can never act: {why}")]
    NeverActs { rule: String, why: String },
    #[error("bank `{0}` names no environment")]
    NoEnvironment(String),
    #[error("the file is not UTF-8")]
    NotUtf8,
    #[error("this does nothing: {0}")]
    Pointless(String),
    #[error(
        "{whose} has memory, and rule `{rule}` passes bytes unseen to a host that may not receive it"
    )]
    OpaqueBesideMemory { whose: String, rule: String },
    #[error("`{entry}` is not a path pattern: {source}")]
    Path { entry: String, source: PathPatternError },
    #[error("{0} is not a port")]
    Port(u16),
    #[error("`{0}` is a name Sandbar itself uses")]
    Reserved(String),
    #[error(transparent)]
    Set(#[from] HostSetError),
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
    #[error(
        "`{0}` takes in private and special ranges; say `dangerously_wide = true` in the rule if that is meant"
    )]
    WideNetwork(String),
    #[error("{what} `{entry}` is not good: {source}")]
    Word { what: &'static str, entry: String, source: IdError },
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.at, self.fault)
    }
}

impl fmt::Display for SourceLocation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}:{}", self.file, self.line, self.column)
    }
}

/// A file's text, able to say where in it something stands.
#[derive(Clone, Debug)]
pub(crate) struct SourceText<'a> {
    pub(crate) file: Arc<str>,
    pub(crate) text: &'a str,
    /// Where each line begins, so that a place is found by search and not by counting anew; of a good list
    /// nobody asks.
    starts: OnceCell<Vec<usize>>,
}

impl<'a> SourceText<'a> {
    pub(crate) fn new(file: &str, text: &'a str) -> Self {
        SourceText { file: file.into(), text, starts: OnceCell::new() }
    }

    fn line_starts(&self) -> &[usize] {
        self.starts.get_or_init(|| {
            let ends = self.text.bytes().enumerate().filter(|(_, byte)| *byte == b'\n');
            std::iter::once(0).chain(ends.map(|(at, _)| at + 1)).collect()
        })
    }

    /// The line a byte offset lies on, from 1.
    pub(crate) fn line(&self, offset: usize) -> u32 {
        self.line_starts().partition_point(|start| *start <= offset) as u32
    }

    pub(crate) fn location(&self, span: Range<usize>) -> SourceLocation {
        let end = span.start.min(self.text.len());
        let start = (0..=end).rev().find(|at| self.text.is_char_boundary(*at)).unwrap_or(0);
        let line = self.line(start);
        let line_start = self.line_starts().get(line as usize - 1).copied().unwrap_or(0);
        let text = self.text.get(line_start..).and_then(|rest| rest.lines().next()).unwrap_or("");
        let front = self.text.get(line_start..start).map_or(0, |front| front.chars().count());
        let meant =
            self.text.get(start..span.end).and_then(|text| text.lines().next()).unwrap_or("");
        SourceLocation {
            file: self.file.clone(),
            line,
            column: front as u32 + 1,
            width: meant.chars().count().max(1) as u32,
            excerpt: mask_secrets(&printable(text)),
        }
    }
}

/// A line with what looks like a key cut out: people paste one where its name belongs, and the error must not
/// spread it.
fn mask_secrets(line: &str) -> String {
    let word = |c: char| c.is_ascii_alphanumeric() || c == '-' || c == '_';
    let parts = line.split_inclusive(|c: char| !word(c));
    parts
        .map(|part| {
            if looks_like_secret(part.trim_end_matches(|c: char| !word(c))) {
                mask(part, word)
            } else {
                part.to_owned()
            }
        })
        .collect()
}

/// As many dots as characters, so that a caret below still points at what it means.
fn mask(part: &str, word: impl Fn(char) -> bool) -> String {
    part.chars().map(|c| if word(c) { '.' } else { c }).collect()
}

/// The shapes of well-known API keys.
pub(crate) fn looks_like_secret(text: &str) -> bool {
    const PREFIXES: [&str; 9] =
        ["sk-", "sk_", "ghp_", "gho_", "github_pat_", "glpat-", "xoxb-", "AKIA", "eyJ"];
    text.len() >= 8 && PREFIXES.iter().any(|prefix| text.starts_with(prefix)) || text.len() > 40
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
    pub(crate) fn error(&mut self, at: SourceLocation, fault: ProblemKind) {
        self.push(Problem { at, fault, help: None });
    }

    pub(crate) fn error_with_help(
        &mut self,
        at: SourceLocation,
        fault: ProblemKind,
        help: impl Into<String>,
    ) {
        self.push(Problem { at, fault, help: Some(help.into()) });
    }

    pub(crate) fn warning(&mut self, at: SourceLocation, fault: ProblemKind) {
        self.add_warning(Problem { at, fault, help: None });
    }

    /// Takes a warning as it was found before.
    pub(crate) fn add_warning(&mut self, warning: Problem) {
        if self.warnings.len() < MAX_PROBLEMS {
            self.warnings.push(warning);
        }
    }

    /// In the order a reader meets them.
    pub(crate) fn sort(&mut self) {
        let place =
            |problem: &Problem| (problem.at.file.clone(), problem.at.line, problem.at.column);
        self.errors.sort_by_key(place);
        self.warnings.sort_by_key(place);
    }

    /// Parses an id; `None` when it is not one, which is noted.
    pub(crate) fn parse_id<T>(
        &mut self,
        source: &SourceText<'_>,
        what: &'static str,
        entry: &Spanned<String>,
        parse: fn(&str) -> Result<T, IdError>,
    ) -> Option<T> {
        parse(entry.get_ref())
            .map_err(|error| {
                let fault =
                    ProblemKind::Word { what, entry: printable(entry.get_ref()), source: error };
                self.error(source.location(entry.span()), fault);
            })
            .ok()
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
        let source = SourceText::new("p.toml", "a = 1\nü = \"\u{1b}[31m\"\r\nlast");
        let place = source.location(6..8);
        assert_eq!((place.line, place.column, place.width), (2, 1, 1));
        assert_eq!(place.excerpt, "ü = \"\u{fffd}[31m\"");
        let end = source.location(100..200);
        assert_eq!((end.line, end.column, end.excerpt.as_str()), (3, 5, "last"));
        let inside = source.location(7..8);
        assert_eq!(
            (inside.line, inside.column),
            (2, 1),
            "a span inside a character is moved to its front"
        );
    }

    #[test]
    fn p11_pasted_keys_are_not_shown() {
        let text = "credentials = \"sk-live-0123456789\" # x\n";
        let place = SourceText::new("p.toml", text).location(0..11);
        assert_eq!(place.excerpt, "credentials = \"..................\" # x");
    }

    #[test]
    fn slips_are_recognised_and_strangers_are_not() {
        let known = ["methods", "hosts", "paths", "tls"];
        assert_eq!(nearest("methds", known), Some("methods"));
        assert_eq!(nearest("host", known), Some("hosts"));
        assert_eq!(nearest("quux", known), None);
    }
}
