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
    #[error("credential `{credential}` may not be sent to `{host}`")]
    CredentialHost { credential: String, host: String },
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
            excerpt: match self.is_in_credential(line) {
                true => mask_words(&printable(text)),
                false => mask_secrets(&printable(text)),
            },
        }
    }

    /// Returns a location whose excerpt shows no value of its line, for places where people paste secrets.
    pub(crate) fn masked_location(&self, span: Range<usize>) -> SourceLocation {
        let location = self.location(span);
        SourceLocation { excerpt: mask_values(&location.excerpt), ..location }
    }

    /// Returns whether a line is part of a `[[credential]]`.
    pub(crate) fn is_in_credential(&self, line: u32) -> bool {
        let starts = self.line_starts();
        let above = starts.get(..line as usize).unwrap_or(starts).iter().rev();
        let mut lines =
            above.filter_map(|start| self.text.get(*start..)?.lines().next().map(str::trim_start));
        lines.find_map(TableHeader::of).is_some_and(|header| header == TableHeader::Credential)
    }
}

/// What the header of a table announces.
#[derive(Clone, Copy, PartialEq, Eq)]
enum TableHeader {
    Credential,
    Other,
}

impl TableHeader {
    /// Reads a line; `None` if it is not a header.
    fn of(line: &str) -> Option<Self> {
        let inner = line.trim_start_matches('[');
        let name: &str = inner.split([']', '.', '=']).next().unwrap_or_default().trim();
        let bare = |c: char| c.is_ascii_alphanumeric() || c == '_' || c == '-';
        let is_table = line.starts_with('[') && !name.is_empty() && name.chars().all(bare);
        let is_list = name == "credential"
            && inner.split_once('=').is_some_and(|(_, rest)| rest.trim_start().starts_with('['));
        match name {
            "credential" if is_table || is_list => Some(TableHeader::Credential),
            _ if is_table => Some(TableHeader::Other),
            _ => None,
        }
    }
}

/// Masks the words of a line of `[[credential]]` that may be secrets: there a key is often random text without a prefix
/// that anyone knows.
fn mask_words(line: &str) -> String {
    let word = |c: char| {
        c.is_ascii_graphic() && !matches!(c, '"' | '\'' | '[' | ']' | '{' | '}' | '(' | ')' | ',' | '=' | '`')
    };
    let parts = line.split_inclusive(|c: char| !word(c));
    let masked = parts.map(|part| match may_be_secret(part.trim_end_matches(|c: char| !word(c))) {
        true => mask(part, word),
        false => part.to_owned(),
    });
    mask_secrets(&masked.collect::<String>())
}

/// Masks everything right of the first `=`, or the whole line, but for punctuation.
fn mask_values(line: &str) -> String {
    let (key, values) = line.split_once('=').unwrap_or(("", line));
    let equals = if key.is_empty() { "" } else { "=" };
    let word = |c: char| !c.is_whitespace() && !matches!(c, '"' | '\'' | '[' | ']' | '{' | '}' | ',' | '=');
    mask_secrets(key) + equals + &mask(values, word)
}

/// Returns whether a word of a `[[credential]]` may be a secret: it has the shape of a key, or is long and has letters
/// and digits, as no path, URL or host name has.
pub(crate) fn may_be_secret(word: &str) -> bool {
    let is_random = word.len() >= 16
        && word.bytes().any(|byte| byte.is_ascii_digit())
        && word.bytes().any(|byte| byte.is_ascii_alphabetic())
        && !word.contains(['/', ':', '.']);
    has_key_shape(word) || is_random
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
    has_key_shape(text) || text.len() > 40
}

/// Returns whether the text has the shape of a well-known API key.
pub(crate) fn has_key_shape(text: &str) -> bool {
    const PREFIXES: [&str; 12] = [
        "-----BEGIN",
        "AIza",
        "AKIA",
        "ASIA",
        "eyJ",
        "ghp_",
        "gho_",
        "github_pat_",
        "glpat-",
        "sk-",
        "sk_",
        "xoxb-",
    ];
    text.len() >= 8 && PREFIXES.iter().any(|prefix| text.starts_with(prefix))
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
    fn p11_a_credential_table_shows_no_value_that_may_be_a_secret() {
        let excerpt = |text: &str, line: usize| {
            let start = text.lines().take(line - 1).map(|line| line.len() + 1).sum::<usize>();
            let source = SourceText::new("sandbar.toml", text);
            (source.location(start..start).excerpt, source.masked_location(start..start).excerpt)
        };
        let text = "[[credential]]\nname = \"a1b2c3d4e5f6a7b8c9\"\nfile = \"secrets/anthropic\" # x\nhunter2\n[log]\ndir = \"a1b2c3d4e5f6a7b8c9\"\n";
        for (line, shown, masked) in [
            (2, "name = \"..................\"", "name = \"..................\""),
            (3, "file = \"secrets/anthropic\" # x", "file = \".................\" . ."),
            (4, "hunter2", "......."),
            (6, "dir = \"a1b2c3d4e5f6a7b8c9\"", "dir = \"..................\""),
        ] {
            assert_eq!(excerpt(text, line), (shown.to_owned(), masked.to_owned()), "{line}");
        }
        for (text, line, credential) in [
            ("[[credential]]\n", 1, true),
            ("[[ credential ]]\na = 1", 2, true),
            ("[credential.oauth2]\na = 1", 2, true),
            ("credential = [\n  { name = 1 },\n]", 2, true),
            ("[[credential]]\ncommand = [\n  \"x\",\n]", 3, true),
            ("[[credentials]]\na = 1", 2, false),
            ("[[allow]]\ncredential = \"a\"\nx = 1", 3, false),
            ("a = 1", 1, false),
            ("[[credential]]\n[log]\na = 1", 3, false),
        ] {
            assert_eq!(SourceText::new("f", text).is_in_credential(line), credential, "{text:?}");
        }
    }

    #[test]
    fn misspellings_are_recognised_and_other_words_are_not() {
        let known = ["methods", "hosts", "paths", "tls"];
        assert_eq!(nearest("methds", known), Some("methods"));
        assert_eq!(nearest("host", known), Some("hosts"));
        assert_eq!(nearest("quux", known), None);
    }
}
