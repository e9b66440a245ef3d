//! Problems of a file: location, description, and the fix.

use std::cell::OnceCell;
use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use toml::Spanned;

use crate::host_set::HostSetError;
use crate::ids::IdError;
use crate::pattern::PatternError;
use crate::quota::QuotaError;
use crate::signals::secrets::OwnPatternError;
use crate::url_path::PathPatternError;

/// Most errors, and most warnings, that one load collects.
pub const MAX_PROBLEMS: usize = 50;
/// Longest excerpt of a line, in characters.
const MAX_EXCERPT: usize = 200;

/// One problem at one location of one file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Problem {
    pub at: SourceLocation,
    pub fault: ProblemKind,
    /// A hint on the fix, if the description does not contain it.
    pub help: Option<String>,
}

/// A location in a file, with an excerpt of its line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SourceLocation {
    pub file: Arc<str>,
    /// Line number, starting at 1.
    pub line: u32,
    /// Column in characters, starting at 1.
    pub column: u32,
    /// Width of the marked text in characters, at least 1.
    pub width: u32,
    /// The line with control characters replaced, so that a policy cannot send escape sequences to a terminal.
    pub excerpt: String,
}

/// A kind of problem, with what its message needs.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ProblemKind {
    #[error(
        "bank `{bank}` names environment `{other}`, but the rule's `environment` is another; change one of them"
    )]
    BankElsewhere { bank: String, other: String },
    #[error("`{0}` and `{1}` cannot be used together; remove one of them")]
    Exclusive(&'static str, &'static str),
    #[error(
        "policy `{policy}`: bank `{bank}` is in environment `{found}`, but sandbox `{sandbox}` is in `{own}`"
    )]
    ForeignEnvironment { policy: String, bank: String, found: String, sandbox: String, own: String },
    #[error("`{entry}` is not a host pattern: {source}")]
    Host { entry: String, source: PatternError },
    #[error("cannot read the list `{path}`: {why}")]
    List { path: String, why: String },
    #[error("`{0}` is not a request method: methods are upper-case words, such as `GET`")]
    Method(String),
    #[error("`{0}` is never forwarded; remove it")]
    MethodNeverForwarded(String),
    #[error("{given} is out of range: use 1 to {most}")]
    Limit { given: u64, most: u64 },
    #[error("{0}")]
    Missing(&'static str),
    #[error(
        "`{0}` is not a network; write address/length without host bits, such as `10.1.0.0/16` (IPv4 in IPv4 form)"
    )]
    Network(String),
    #[error("rule `{rule}` has no effect: {why}")]
    NeverActs { rule: String, why: String },
    #[error("bank `{0}` names no environment")]
    NoEnvironment(String),
    #[error("the file is not UTF-8")]
    NotUtf8,
    #[error("{0}")]
    Pointless(String),
    #[error(
        "{owner} uses memory, and rule `{rule}` passes bytes unseen to a host that may not receive recalled text; intercept TLS, or set `memory = \"may-receive\"` or `signals = {{ memory_flow = \"off\" }}`"
    )]
    OpaqueBesideMemory { owner: String, rule: String },
    #[error(
        "{other} (line {line}) listens on the same address: a process that reaches both ports chooses which sandbox it is"
    )]
    SharedAddress { other: String, line: u32 },
    #[error(
        "rule `{raw}` lets raw TCP pass to `{host}` on port {port}, where rule `{other}` decides requests: remove the port from one of them"
    )]
    RawOverlap { raw: String, other: String, host: String, port: u16 },
    #[error("`{entry}` is not a path pattern: {source}")]
    Path { entry: String, source: PathPatternError },
    #[error("not a pattern of secrets: {source}")]
    SecretPattern { source: OwnPatternError },
    #[error("{0} is not a port; use 1 to 65535")]
    Port(u16),
    #[error("{0}")]
    LogQuota(String),
    #[error(transparent)]
    Quota(#[from] QuotaError),
    #[error("`{0}` is a reserved name; choose another")]
    Reserved(String),
    #[error(transparent)]
    Set(#[from] HostSetError),
    #[error("{0}")]
    Syntax(String),
    #[error(
        "rules `{one}` and `{other}` tie for `{host}` but inject different credentials; make one of them more specific"
    )]
    Tie { one: String, other: String, host: String },
    #[error("more than {limit} {what}")]
    TooMany { what: &'static str, limit: usize },
    #[error("{what} `{name}` is defined twice; first on line {line}")]
    Twice { what: &'static str, name: String, line: u32 },
    #[error("unknown {what} `{name}`")]
    Unknown { what: &'static str, name: String },
    #[error("unknown key `{key}`")]
    UnknownKey { key: String },
    #[error(
        "`{0}` includes private or special ranges; set `dangerously_wide = true` in the rule if you mean it"
    )]
    WideNetwork(String),
    #[error("invalid {what} `{entry}`: {source}")]
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

/// The text of a file, which converts byte offsets to locations.
#[derive(Clone, Debug)]
pub(crate) struct SourceText<'a> {
    pub(crate) file: Arc<str>,
    pub(crate) text: &'a str,
    /// Offset of each line start, for a binary search per location. Computed on first use: a list without
    /// errors of a million lines never needs it.
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

    /// Returns the line of a byte offset, starting at 1.
    pub(crate) fn line(&self, offset: usize) -> u32 {
        self.line_starts().partition_point(|start| *start <= offset) as u32
    }

    pub(crate) fn location(&self, span: Range<usize>) -> SourceLocation {
        let end = span.start.min(self.text.len());
        let start = (0..=end).rev().find(|at| self.text.is_char_boundary(*at)).unwrap_or(0);
        let line = self.line(start);
        let line_start = self.line_starts().get(line as usize - 1).copied().unwrap_or(0);
        let text = self.text.get(line_start..).and_then(|rest| rest.lines().next()).unwrap_or("");
        let before = self.text.get(line_start..start).map_or(0, |before| before.chars().count());
        let marked = self.text.get(start..span.end).and_then(|text| text.lines().next()).unwrap_or("");
        SourceLocation {
            file: self.file.clone(),
            line,
            column: before as u32 + 1,
            width: marked.chars().count().max(1) as u32,
            excerpt: mask_secrets(&printable(text)),
        }
    }
}

/// Masks words that look like API keys: users paste a key where its name belongs, and the error message must
/// not leak it.
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

/// Replaces each character with a dot, so that the caret below keeps its column.
fn mask(part: &str, word: impl Fn(char) -> bool) -> String {
    part.chars().map(|c| if word(c) { '.' } else { c }).collect()
}

/// Returns whether the text has the shape of a well-known API key, or is longer than a name would be.
pub(crate) fn looks_like_secret(text: &str) -> bool {
    const PREFIXES: [&str; 9] =
        ["sk-", "sk_", "ghp_", "gho_", "github_pat_", "glpat-", "xoxb-", "AKIA", "eyJ"];
    text.len() >= 8 && PREFIXES.iter().any(|prefix| text.starts_with(prefix)) || text.len() > 40
}

/// Replaces every character that a terminal could interpret, one for one, and truncates the text.
pub fn printable(text: &str) -> String {
    let sanitize = |c: char| match c {
        '\t' => ' ',
        c if c.is_control() || is_formatting(c) => char::REPLACEMENT_CHARACTER,
        c => c,
    };
    text.chars().take(MAX_EXCERPT).map(sanitize).collect()
}

/// Returns whether the character is bidirectional or invisible formatting, which disguises the text.
fn is_formatting(c: char) -> bool {
    matches!(c, '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2060}'..='\u{206f}' | '\u{feff}')
}

/// The problems found so far, at most [`MAX_PROBLEMS`] of each severity.
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

    /// Adds an existing warning, such as one of an earlier load.
    pub(crate) fn add_warning(&mut self, warning: Problem) {
        if self.warnings.len() < MAX_PROBLEMS {
            self.warnings.push(warning);
        }
    }

    /// Sorts the problems by location.
    pub(crate) fn sort(&mut self) {
        let location = |problem: &Problem| (problem.at.file.clone(), problem.at.line, problem.at.column);
        self.errors.sort_by_key(location);
        self.warnings.sort_by_key(location);
    }

    /// Parses an id; reports an invalid one and returns `None`.
    pub(crate) fn parse_id<T>(
        &mut self,
        source: &SourceText<'_>,
        what: &'static str,
        entry: &Spanned<String>,
        parse: fn(&str) -> Result<T, IdError>,
    ) -> Option<T> {
        parse(entry.get_ref())
            .map_err(|error| {
                let fault = ProblemKind::Word { what, entry: printable(entry.get_ref()), source: error };
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

/// Returns the word of `known` that `found` most likely misspells.
pub fn nearest<'a>(found: &str, known: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    let score = |word: &&str| (strsim::jaro_winkler(found, word) * 1000.0) as u32;
    known.into_iter().filter(|word| score(word) >= 800).max_by_key(score)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn locations_count_characters() {
        let source = SourceText::new("p.toml", "a = 1\nü = \"\u{1b}[31m\"\r\nlast");
        let location = source.location(6..8);
        assert_eq!((location.line, location.column, location.width), (2, 1, 1));
        assert_eq!(location.excerpt, "ü = \"\u{fffd}[31m\"");
        let end = source.location(100..200);
        assert_eq!((end.line, end.column, end.excerpt.as_str()), (3, 5, "last"));
        let inside = source.location(7..8);
        assert_eq!((inside.line, inside.column), (2, 1), "a span inside a character moves to its start");
    }

    #[test]
    fn p11_pasted_keys_are_not_shown() {
        let text = "credentials = \"sk-live-0123456789\" # x\n";
        let location = SourceText::new("p.toml", text).location(0..11);
        assert_eq!(location.excerpt, "credentials = \"..................\" # x");
    }

    #[test]
    fn misspellings_are_recognised_and_other_words_are_not() {
        let known = ["methods", "hosts", "paths", "tls"];
        assert_eq!(nearest("methds", known), Some("methods"));
        assert_eq!(nearest("host", known), Some("hosts"));
        assert_eq!(nearest("quux", known), None);
    }
}
