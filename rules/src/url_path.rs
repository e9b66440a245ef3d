//! URL paths: one canonical form, and patterns over its segments.
//!
//! Paths that servers interpret differently (`%2f`, `..`, `//`, `;`, `\`) are refused, never guessed. Only a pattern that
//! spells an encoded slash (`/@scope%2Fname`) allows one; deny rules then count under both readings of it.

use std::fmt;

/// Longest path to parse, in octets.
pub const MAX_PATH: usize = 8192;

/// A path that every server interprets the same way: `/a/b%20c`, upper-case hex escapes, no query.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct CanonicalPath(Box<str>);

/// Why a path is ambiguous or invalid.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum UrlPathError {
    #[error("servers interpret `{0}` differently")]
    Character(char),
    #[error("it has a `.` or `..` segment")]
    Dots,
    #[error("it has an empty segment (`//`)")]
    EmptySegment,
    #[error("it percent-encodes a character that needs no encoding or would change the path")]
    Encoding,
    #[error("it does not begin with `/`")]
    Relative,
    #[error("it is longer than {MAX_PATH} octets")]
    TooLong,
}

impl CanonicalPath {
    /// Parses the path of a request target, without its query.
    ///
    /// # Errors
    ///
    /// Returns [`UrlPathError`] for every spelling that some server could interpret as another path.
    pub fn parse(text: &str) -> Result<Self, UrlPathError> {
        if text.len() > MAX_PATH {
            return Err(UrlPathError::TooLong);
        }
        let rest = text.strip_prefix('/').ok_or(UrlPathError::Relative)?;
        let mut canonical = String::with_capacity(text.len());
        let mut segments = rest.split('/').peekable();
        while let Some(segment) = segments.next() {
            canonical.push('/');
            match segment {
                "." | ".." => return Err(UrlPathError::Dots),
                "" if segments.peek().is_some() => return Err(UrlPathError::EmptySegment),
                segment => push_segment(&mut canonical, segment)?,
            }
        }
        Ok(CanonicalPath(canonical.into()))
    }

    pub fn as_str(&self) -> &str {
        &self.0
    }
}

/// An encoded slash in canonical form.
pub(crate) const ENCODED_SLASH: &str = "%2F";

/// The path of a request: canonical but for slashes inside its segments, encoded as `%2F`.
///
/// Some servers read an encoded slash as part of its segment, others as a slash. Under both readings the path has one
/// spelling: `/..%2Fa`, `/a%2F%2Fb` and `/a%252Fb` do not parse.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RequestPath {
    /// As written, with upper-case escapes.
    written: Box<str>,
    /// With a slash in the place of each encoded one; `None` if the path has none.
    decoded: Option<CanonicalPath>,
}

impl RequestPath {
    /// Parses the path of a request target, without its query.
    ///
    /// # Errors
    ///
    /// Returns [`UrlPathError`] for every path that is ambiguous other than by an encoded slash.
    pub fn parse(text: &str) -> Result<Self, UrlPathError> {
        if !text.contains("%2f") && !text.contains(ENCODED_SLASH) {
            return CanonicalPath::parse(text).map(|path| RequestPath { written: path.0, decoded: None });
        }
        if text.len() > MAX_PATH {
            return Err(UrlPathError::TooLong);
        }
        let rest = text.strip_prefix('/').ok_or(UrlPathError::Relative)?;
        let mut written = String::with_capacity(text.len());
        for segment in rest.split('/') {
            written.push('/');
            for (at, piece) in segment.split(ENCODED_SLASH).flat_map(|part| part.split("%2f")).enumerate() {
                written.push_str(if at == 0 { "" } else { ENCODED_SLASH });
                push_segment(&mut written, piece)?;
            }
        }
        if written.ends_with(ENCODED_SLASH) {
            return Err(UrlPathError::EmptySegment);
        }
        let decoded = CanonicalPath::parse(&written.replace(ENCODED_SLASH, "/"))?;
        Ok(RequestPath { written: written.into(), decoded: Some(decoded) })
    }

    pub fn as_str(&self) -> &str {
        &self.written
    }

    /// Returns whether the path has an encoded slash.
    pub fn has_encoded_slash(&self) -> bool {
        self.decoded.is_some()
    }
}

fn push_segment(canonical: &mut String, segment: &str) -> Result<(), UrlPathError> {
    let mut decoded = Vec::with_capacity(segment.len());
    let mut characters = segment.chars();
    while let Some(character) = characters.next() {
        match character {
            '%' => {
                let octet = decode_escape(characters.next(), characters.next())?;
                canonical.push_str(&format!("%{octet:02X}"));
                decoded.push(octet);
            }
            plain if is_unreserved(plain) => {
                canonical.push(plain);
                decoded.push(plain as u8);
            }
            other => return Err(UrlPathError::Character(other)),
        }
    }
    // Some decoders read overlong or invalid UTF-8 as `/` or `.`.
    str::from_utf8(&decoded).map(drop).map_err(|_| UrlPathError::Encoding)
}

/// Returns whether a character needs no escape: `pchar` of RFC 3986, 3.3, without `;`, on which servers disagree.
fn is_unreserved(character: char) -> bool {
    character.is_ascii_alphanumeric() || "-._~!$&'()*+,=:@".contains(character)
}

/// Decodes a percent escape; refuses one that would change the path or is unnecessary.
fn decode_escape(high: Option<char>, low: Option<char>) -> Result<u8, UrlPathError> {
    let digit = |character: Option<char>| character.and_then(|c| c.to_digit(16));
    let (Some(high), Some(low)) = (digit(high), digit(low)) else {
        return Err(UrlPathError::Encoding);
    };
    let octet = (high * 16 + low) as u8;
    let harmful = octet.is_ascii_control() || b"/\\%;?#".contains(&octet);
    if harmful || is_unreserved(char::from(octet)) { Err(UrlPathError::Encoding) } else { Ok(octet) }
}

/// A pattern over a path: `*` matches one segment, `**` any number of them, including none.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct PathPattern {
    text: Box<str>,
    segments: Box<[PatternSegment]>,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
enum PatternSegment {
    Any,
    /// Literals and `*` with encoded slashes between them.
    Joined(Box<[PatternSegment]>),
    Literal(Box<str>),
    One,
}

/// Whether `*` and `**` match a segment with an encoded slash.
#[derive(Clone, Copy, PartialEq, Eq)]
enum StarReach {
    /// They do, as deny rules need it.
    Every,
    /// They do not: an allow pattern spells each encoded slash.
    Plain,
}

/// Why a text is not a path pattern.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PathPatternError {
    #[error("{0}")]
    Path(#[from] UrlPathError),
    #[error("a path pattern does not match the query; remove everything from `?`")]
    Query,
    #[error(
        "`*` must be a whole segment or stand between encoded slashes, and `**` a whole segment, such as `/v1/*/items/**`"
    )]
    Star,
}

/// The specificity of a pattern; a greater value is more specific.
pub type PathSpecificity = (usize, usize, usize);

impl PathPattern {
    /// Parses one entry of `paths`.
    ///
    /// # Errors
    ///
    /// Returns [`PathPatternError`], also for a segment that is not canonical, which could never match.
    pub fn parse(text: &str) -> Result<Self, PathPatternError> {
        if text.contains('?') {
            return Err(PathPatternError::Query);
        }
        let path = RequestPath::parse(text)?;
        let segments = path.as_str().split('/').skip(1).map(parse_segment).collect::<Result<_, _>>()?;
        Ok(PathPattern { text: path.written, segments })
    }

    /// Returns whether the pattern is `/**`, which matches every path, even one without canonical form.
    pub fn is_everything(&self) -> bool {
        self.segments.iter().all(|segment| *segment == PatternSegment::Any)
    }

    /// Returns whether some path matches both patterns.
    pub(crate) fn overlaps(&self, other: &PathPattern) -> bool {
        segments_overlap(&self.segments, &other.segments)
    }

    /// Returns whether the pattern of an allow rule matches: it spells every encoded slash of the path, or is `/**`.
    pub fn matches(&self, path: &RequestPath) -> bool {
        self.is_everything() || segments_match(&self.segments, split_path(&path.written), StarReach::Plain)
    }

    /// Returns whether the pattern of a deny rule matches the path under either reading of encoded slashes, with or
    /// without its trailing slash.
    pub(crate) fn denies(&self, path: &RequestPath) -> bool {
        let matches = |pattern: &[PatternSegment], text: &str| {
            let trimmed = text.strip_suffix('/').filter(|rest| !rest.is_empty());
            let mut texts = [text].into_iter().chain(trimmed);
            texts.any(|text| segments_match(pattern, split_path(text), StarReach::Every))
        };
        let decoded = path.decoded.as_ref().map_or(&*path.written, CanonicalPath::as_str);
        matches(&self.segments, &path.written) || matches(&self.decoded_segments(), decoded)
    }

    /// Returns the segments with a slash in the place of each encoded one.
    fn decoded_segments(&self) -> Vec<PatternSegment> {
        let pieces = |segment: &PatternSegment| match segment {
            PatternSegment::Joined(pieces) => pieces.to_vec(),
            PatternSegment::Any | PatternSegment::Literal(_) | PatternSegment::One => vec![segment.clone()],
        };
        self.segments.iter().flat_map(pieces).collect()
    }

    /// Returns the specificity: literal segments count most, then `*`, then fewer `**`; `/**` ranks like no pattern.
    pub fn specificity(&self) -> PathSpecificity {
        if self.is_everything() {
            return PathSpecificity::default();
        }
        let segments = self.decoded_segments();
        let count = |wanted: fn(&PatternSegment) -> bool| segments.iter().filter(|s| wanted(s)).count();
        let many = count(|s| matches!(s, PatternSegment::Any));
        (
            count(|s| matches!(s, PatternSegment::Literal(_))),
            count(|s| matches!(s, PatternSegment::One)),
            usize::MAX - many,
        )
    }

    /// Returns a path that this pattern matches, to test a policy with.
    pub fn example(&self) -> String {
        self.segments.iter().map(|segment| format!("/{}", segment.example())).collect()
    }
}

impl fmt::Display for PathPattern {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

impl PatternSegment {
    fn example(&self) -> String {
        match self {
            PatternSegment::Any | PatternSegment::One => "any".to_owned(),
            PatternSegment::Joined(pieces) => {
                pieces.iter().map(PatternSegment::example).collect::<Vec<_>>().join(ENCODED_SLASH)
            }
            PatternSegment::Literal(text) => text.to_string(),
        }
    }

    /// Returns whether this segment of a pattern matches one segment of a path.
    fn matches(&self, found: &str, stars: StarReach) -> bool {
        match self {
            PatternSegment::Any => passes_star(found, stars),
            PatternSegment::Joined(pieces) => {
                let found: Vec<&str> = found.split(ENCODED_SLASH).collect();
                let mut pairs = pieces.iter().zip(&found);
                pieces.len() == found.len() && pairs.all(|(piece, found)| piece.matches(found, stars))
            }
            PatternSegment::Literal(wanted) => **wanted == *found,
            PatternSegment::One => !found.is_empty() && passes_star(found, stars),
        }
    }

    /// Returns whether some segment matches both; neither is `**`.
    fn overlaps(&self, other: &PatternSegment) -> bool {
        match (self, other) {
            (PatternSegment::Joined(one), PatternSegment::Joined(other)) => {
                one.len() == other.len() && one.iter().zip(other).all(|(one, other)| one.overlaps(other))
            }
            (PatternSegment::Joined(_), _) | (_, PatternSegment::Joined(_)) => false,
            (PatternSegment::Literal(one), PatternSegment::Literal(other)) => one == other,
            (PatternSegment::Any | PatternSegment::One, _)
            | (_, PatternSegment::Any | PatternSegment::One) => true,
        }
    }
}

fn passes_star(found: &str, stars: StarReach) -> bool {
    stars == StarReach::Every || !found.contains(ENCODED_SLASH)
}

fn split_path(text: &str) -> impl Iterator<Item = &str> + Clone {
    text.split('/').skip(1)
}

fn parse_segment(text: &str) -> Result<PatternSegment, PathPatternError> {
    match text {
        "*" => Ok(PatternSegment::One),
        "**" => Ok(PatternSegment::Any),
        text if text.contains(ENCODED_SLASH) => {
            let pieces = text.split(ENCODED_SLASH).map(parse_segment).collect::<Result<Box<[_]>, _>>()?;
            if pieces.contains(&PatternSegment::Any) {
                return Err(PathPatternError::Star);
            }
            Ok(PatternSegment::Joined(pieces))
        }
        text if text.contains('*') => Err(PathPatternError::Star),
        text => Ok(PatternSegment::Literal(text.into())),
    }
}

/// Returns whether two patterns have a path in common.
///
/// Dynamic programming over the suffixes of both patterns: cell (at, beside) says whether the rest of `one` from
/// `at` and the rest of `other` from `beside` overlap. Only the row below is needed, and the work is bounded by the
/// product of the lengths, so hostile patterns cannot cause exponential backtracking.
fn segments_overlap(one: &[PatternSegment], other: &[PatternSegment]) -> bool {
    let mut below = vec![false; other.len() + 1];
    for at in (0..=one.len()).rev() {
        let mut row = vec![false; other.len() + 1];
        for beside in (0..=other.len()).rev() {
            let right = |row: &[bool]| row.get(beside + 1).copied().unwrap_or(false);
            let down = below.get(beside).copied().unwrap_or(false);
            let found = match (one.get(at), other.get(beside)) {
                (None, None) => true,
                // `**` passes over the other's segment, unless that has an encoded slash.
                (Some(PatternSegment::Any), Some(PatternSegment::Joined(_))) => down,
                (Some(PatternSegment::Joined(_)), Some(PatternSegment::Any)) => right(&row),
                (Some(PatternSegment::Any), _) | (_, Some(PatternSegment::Any)) => down || right(&row),
                (Some(a), Some(b)) => a.overlaps(b) && right(&below),
                (None, Some(_)) | (Some(_), None) => false,
            };
            if let Some(cell) = row.get_mut(beside) {
                *cell = found;
            }
        }
        below = row;
    }
    below.first().copied().unwrap_or(false)
}

/// Matches a path with one level of backtracking: on a mismatch the last `**` consumes one more segment.
///
/// Retrying only the last `**` is enough: an earlier one that consumed more could only move the later match
/// further right, which the last one does too. Where stars stop at encoded slashes, each segment with one has its own
/// place in the pattern, which no choice moves. So the work is bounded by the product of the lengths.
fn segments_match<'a>(
    pattern: &[PatternSegment],
    path: impl Iterator<Item = &'a str> + Clone,
    stars: StarReach,
) -> bool {
    let (mut rest, mut path) = (pattern, path);
    let mut retry = None;
    loop {
        let before = path.clone();
        match (rest.split_first(), path.next()) {
            (Some((PatternSegment::Any, after)), _) => {
                (rest, path) = (after, before.clone());
                retry = Some((after, before));
                continue;
            }
            (None, None) => return true,
            (Some((segment, after)), Some(found)) if segment.matches(found, stars) => rest = after,
            _ => {
                let Some((after, mut from)) = retry.take() else { return false };
                if !from.next().is_some_and(|passed| passes_star(passed, stars)) {
                    return false;
                }
                (rest, path) = (after, from.clone());
                retry = Some((after, from));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn p17_the_length_of_a_path_is_bounded() {
        for slash in ["", "%2F"] {
            let path = |length: usize| format!("/a{slash}{}", "a".repeat(length - 2 - slash.len()));
            assert!(RequestPath::parse(&path(MAX_PATH)).is_ok(), "{slash}");
            let longer = RequestPath::parse(&path(MAX_PATH + 1));
            assert_eq!(longer.err(), Some(UrlPathError::TooLong), "{slash}");
            let longest = RequestPath::parse(&path(2 * MAX_PATH));
            assert_eq!(longest.err(), Some(UrlPathError::TooLong), "{slash}");
        }
    }

    #[test]
    fn a_path_has_one_spelling_or_none() {
        for (text, canonical) in [
            ("/", Ok("/")),
            ("/v1/models", Ok("/v1/models")),
            ("/v1/", Ok("/v1/")),
            ("/a%20b", Ok("/a%20b")),
            ("/caf%c3%a9", Ok("/caf%C3%A9")),
            ("/@scope/pkg-1.0.tgz", Ok("/@scope/pkg-1.0.tgz")),
            ("", Err(UrlPathError::Relative)),
            ("v1", Err(UrlPathError::Relative)),
            ("*", Err(UrlPathError::Relative)),
            ("//", Err(UrlPathError::EmptySegment)),
            ("/a//b", Err(UrlPathError::EmptySegment)),
            ("/a/../b", Err(UrlPathError::Dots)),
            ("/a/..", Err(UrlPathError::Dots)),
            ("/./a", Err(UrlPathError::Dots)),
            ("/a/%2e%2e/b", Err(UrlPathError::Encoding)),
            ("/a/.%2e/b", Err(UrlPathError::Encoding)),
            ("/a%2fb", Err(UrlPathError::Encoding)),
            ("/a%2Fb", Err(UrlPathError::Encoding)),
            ("/a%5cb", Err(UrlPathError::Encoding)),
            ("/a%252fb", Err(UrlPathError::Encoding)),
            ("/a%3bb", Err(UrlPathError::Encoding)),
            ("/a%00", Err(UrlPathError::Encoding)),
            ("/a%0d%0a", Err(UrlPathError::Encoding)),
            ("/re%63all", Err(UrlPathError::Encoding)),
            ("/%40evil/x", Err(UrlPathError::Encoding)),
            ("/v1/files%3Aupload", Err(UrlPathError::Encoding)),
            ("/public/%c0%ae%c0%ae/admin", Err(UrlPathError::Encoding)),
            ("/%c0%af", Err(UrlPathError::Encoding)),
            ("/%ff", Err(UrlPathError::Encoding)),
            ("/%e2%82", Err(UrlPathError::Encoding)),
            ("/%22", Ok("/%22")),
            ("/a%", Err(UrlPathError::Encoding)),
            ("/a%g0", Err(UrlPathError::Encoding)),
            ("/a;x=1", Err(UrlPathError::Character(';'))),
            ("/a\\b", Err(UrlPathError::Character('\\'))),
            ("/a?b", Err(UrlPathError::Character('?'))),
            ("/a#b", Err(UrlPathError::Character('#'))),
            ("/a b", Err(UrlPathError::Character(' '))),
            ("/a\u{0}", Err(UrlPathError::Character('\u{0}'))),
            ("/é", Err(UrlPathError::Character('é'))),
        ] {
            assert_eq!(
                CanonicalPath::parse(text).as_ref().map(CanonicalPath::as_str),
                canonical.as_ref().copied(),
                "{text:?}"
            );
        }
        assert_eq!(CanonicalPath::parse(&format!("/{}", "a".repeat(MAX_PATH))), Err(UrlPathError::TooLong));
    }

    #[test]
    fn encoded_slashes_are_ambiguous_in_themselves_only() {
        for (text, written, decoded) in [
            ("/@babel%2fcore", "/@babel%2Fcore", "/@babel/core"),
            ("/projects/a%2Fb%2fc/x", "/projects/a%2Fb%2Fc/x", "/projects/a/b/c/x"),
            ("/caf%c3%a9%2fx/", "/caf%C3%A9%2Fx/", "/caf%C3%A9/x/"),
        ] {
            let path = RequestPath::parse(text).unwrap();
            let found = (path.as_str(), path.decoded.as_ref().map(CanonicalPath::as_str));
            assert_eq!(found, (written, Some(decoded)), "{text}");
        }
        assert!(!RequestPath::parse("/a/b").unwrap().has_encoded_slash());
        for text in [
            "/..%2fadmin",
            "/x%2f..%2fadmin",
            "/x%2F..",
            "/.%2fa",
            "/%2e%2e%2fadmin",
            "/a%252fb",
            "/a%25%32%66b",
            "/a%2f%2fb",
            "/%2fa",
            "/a%2f",
            "/a%2f/b",
            "/a/%2fb",
            "/a%2fb%5cc",
            "/a%2fb;c",
            "/a%2f%c0%af",
            "/%c3%2f%a9",
            "a%2fb",
            "/a%%2f",
            "/a%2%2f",
            "/a%2f\\b",
            "/a%2fb%00",
            "/a%2f%2e%2e",
            "/a%2fb//c",
            "/a%2fb/../c",
        ] {
            assert!(RequestPath::parse(text).is_err(), "{text}");
            assert!(CanonicalPath::parse(text).is_err(), "{text}");
        }
        let long = format!("/{}%2fb", "a".repeat(MAX_PATH));
        assert_eq!(RequestPath::parse(&long), Err(UrlPathError::TooLong));
    }

    #[test]
    fn an_allow_pattern_spells_encoded_slashes() {
        for (pattern, path, matches) in [
            ("/@babel%2fcore", "/@babel%2Fcore", true),
            ("/@babel%2Fcore", "/@babel%2fcore", true),
            ("/@babel%2fcore", "/@babel/core", false),
            ("/@babel/core", "/@babel%2fcore", false),
            ("/@babel%2fcore", "/@babel%2fcore/x", false),
            ("/@babel%2fcore", "/@babel%2fCore", false),
            ("/@babel%2f*", "/@babel%2fcore", true),
            ("/@babel%2f*", "/@babel%2fcore%2fx", false),
            ("/*%2f*", "/a%2fb", true),
            ("/*%2f*", "/a/b", false),
            ("/*", "/a%2fb", false),
            ("/*/*", "/a%2fb", false),
            ("/a/**", "/a%2fb", false),
            ("/a/**", "/a/b%2fc", false),
            ("/**/c", "/a%2fb/c", false),
            ("/**", "/a%2fb", true),
            ("/projects/g%2f*/**", "/projects/g%2fp/issues/1", true),
            ("/projects/g%2f*/**", "/projects/g%2fp", true),
            ("/projects/g%2f*/**", "/projects/g%2fp/files/x%2fy", false),
            ("/projects/g%2f*/**", "/projects/h%2fp/issues", false),
            ("/**/a%2fb/**", "/x/a%2fb/y", true),
            ("/**/a%2fb/**/*%2fd", "/x/a%2fb/y/z/c%2fd", true),
        ] {
            let path = RequestPath::parse(path).unwrap();
            assert_eq!(PathPattern::parse(pattern).unwrap().matches(&path), matches, "{pattern} ~ {path:?}");
        }
    }

    #[test]
    fn a_deny_pattern_counts_under_both_readings() {
        for (pattern, path, denied) in [
            ("/admin/**", "/admin%2fx", true),
            ("/admin/**", "/x%2fadmin", false),
            ("/**/admin", "/x%2fadmin", true),
            ("/**/admin/**", "/x%2fadmin%2fy", true),
            ("/*/b", "/a%2fx/b", true),
            ("/a/x/b", "/a%2fx/b", true),
            ("/*", "/a%2fb", true),
            ("/a%2fb", "/a%2Fb", true),
            ("/a%2fb", "/a/b", true),
            ("/a%2f*", "/a/b/", true),
            ("/a%2fb", "/a%2fb/", true),
            ("/a/b", "/a/b/", true),
            ("/a/b", "/a/c", false),
            ("/a/b", "/a%2fc", false),
        ] {
            let path = RequestPath::parse(path).unwrap();
            assert_eq!(PathPattern::parse(pattern).unwrap().denies(&path), denied, "{pattern} ~ {path:?}");
        }
    }

    #[test]
    fn stars_match_segments() {
        for (pattern, path, matches) in [
            ("/v1/**", "/v1", true),
            ("/v1/**", "/v1/", true),
            ("/v1/**", "/v1/a/b", true),
            ("/v1/**", "/v10", false),
            ("/v1/*", "/v1/a", true),
            ("/v1/*", "/v1/", false),
            ("/v1/*", "/v1/a/b", false),
            ("/v1/*/c", "/v1/a/c", true),
            ("/**/c", "/a/b/c", true),
            ("/**/c", "/c", true),
            ("/**/c", "/a/b/cc", false),
            ("/**/a/**/b", "/x/a/y/a/b", true),
            ("/**/a/*/b", "/a/a/a/b", true),
            ("/v1", "/v1/", false),
            ("/v1", "/V1", false),
            ("/", "/", true),
            ("/", "/a", false),
            ("/**", "/", true),
        ] {
            let path = RequestPath::parse(path).unwrap();
            assert_eq!(PathPattern::parse(pattern).unwrap().matches(&path), matches, "{pattern} ~ {path:?}");
        }
    }

    #[test]
    fn patterns_overlap_or_do_not() {
        for (one, other, overlaps) in [
            ("/a/*", "/*/b", true),
            ("/a/**", "/**/b", true),
            ("/a/*", "/b/*", false),
            ("/a", "/a/*", false),
            ("/a", "/a/**", true),
            ("/a/*/c", "/**/d", false),
            ("/a%2fb", "/**/*", false),
            ("/a%2fb", "/*%2fb", true),
            ("/a%2fb/**", "/**/*%2f*", true),
            ("/a%2fb", "/*%2fb%2f*", false),
        ] {
            assert_eq!(
                PathPattern::parse(one).unwrap().overlaps(&PathPattern::parse(other).unwrap()),
                overlaps,
                "{one} {other}"
            );
        }
    }

    #[test]
    fn patterns_that_cannot_match_are_refused() {
        for text in [
            "", "v1", "/v1?x=1", "/a*", "/a**", "/***", "/../x", "/a//b", "/a%252fb", "/a%2f", "/a%2f**",
            "/a%2f*b", "/..%2fa", "/a;b",
        ] {
            assert!(PathPattern::parse(text).is_err(), "{text}");
        }
    }

    proptest! {
        #[test]
        fn matching_agrees_with_a_recursive_reference(pattern in "(/(a|b|\\*|\\*\\*)){1,5}", path in "(/[ab]){1,6}/?") {
            fn reference(pattern: &[&str], path: &[&str]) -> bool {
                match (pattern.split_first(), path.split_first()) {
                    (None, None) => true,
                    (Some((&"**", rest)), _) => (0..=path.len()).any(|n| reference(rest, &path[n..])),
                    (Some((&"*", rest)), Some((found, more))) => !found.is_empty() && reference(rest, more),
                    (Some((wanted, rest)), Some((found, more))) => wanted == found && reference(rest, more),
                    _ => false,
                }
            }
            let (pattern_segments, path_segments): (Vec<_>, Vec<_>) = (pattern.split('/').skip(1).collect(), path.split('/').skip(1).collect());
            let found = PathPattern::parse(&pattern).unwrap().matches(&RequestPath::parse(&path).unwrap());
            prop_assert_eq!(found, reference(&pattern_segments, &path_segments), "{} ~ {}", pattern, path);
        }

        #[test]
        fn patterns_overlap_where_a_path_matches_both(one in "(/(a|b|\\*|\\*\\*)){1,4}", other in "(/(a|b|\\*|\\*\\*)){1,4}", path in "(/[ab]){1,5}") {
            let (one, other) = (PathPattern::parse(&one).unwrap(), PathPattern::parse(&other).unwrap());
            let path = RequestPath::parse(&path).unwrap();
            prop_assert!(one.overlaps(&other) || !one.matches(&path) || !other.matches(&path));
            prop_assert_eq!(one.overlaps(&other), other.overlaps(&one));
        }

        #[test]
        fn encoded_patterns_agree_with_a_recursive_reference(
            pattern in "(/(a|b|\\*|\\*\\*|a%2Fb|\\*%2Fb|a%2F\\*)){1,5}", path in "(/(a|b|a%2Fb|b%2Fb)){1,6}/?",
        ) {
            fn one(wanted: &str, found: &str) -> bool {
                match wanted.contains("%2F") || found.contains("%2F") {
                    true => {
                        let (wanted, found): (Vec<_>, Vec<_>) = (wanted.split("%2F").collect(), found.split("%2F").collect());
                        wanted.len() == found.len() && wanted.iter().zip(&found).all(|(wanted, found)| one(wanted, found))
                    }
                    false => (wanted == "*" && !found.is_empty()) || wanted == found,
                }
            }
            fn reference(pattern: &[&str], path: &[&str]) -> bool {
                match (pattern.split_first(), path.split_first()) {
                    (None, None) => true,
                    (Some((&"**", rest)), _) => (0..=path.len())
                        .take_while(|n| *n == 0 || !path[n - 1].contains("%2F"))
                        .any(|n| reference(rest, &path[n..])),
                    (Some((wanted, rest)), Some((found, more))) => one(wanted, found) && reference(rest, more),
                    _ => false,
                }
            }
            let parsed = PathPattern::parse(&pattern).unwrap();
            let (pattern_segments, path_segments): (Vec<_>, Vec<_>) = (pattern.split('/').skip(1).collect(), path.split('/').skip(1).collect());
            let found = parsed.matches(&RequestPath::parse(&path).unwrap());
            prop_assert_eq!(found, parsed.is_everything() || reference(&pattern_segments, &path_segments), "{} ~ {}", pattern, path);
        }

        /// What an encoded pattern allows, its decoded form allows for the decoded path: an encoded slash never leads out
        /// of what the pattern names.
        #[test]
        fn an_encoded_pattern_admits_nothing_outside_its_decoded_form(
            pattern in "(/(a|admin|\\*|\\*\\*|a%2Fb|\\*%2F\\*)){1,4}",
            path in "(/(a|b|admin|a%2[fF]b|a%2[fF]admin|\\.\\.%2[fF]a|a%2[fF]\\.\\.|a%252fb|%2e%2e%2fa|a%5cb|%2[fF])){1,4}/?",
        ) {
            let pattern = PathPattern::parse(&pattern).unwrap();
            let Ok(path) = RequestPath::parse(&path) else { return Ok(()) };
            if !pattern.is_everything() && pattern.matches(&path) {
                let decoded = path.as_str().replace("%2F", "/");
                prop_assert!(CanonicalPath::parse(&decoded).is_ok(), "{decoded}");
                let plain = PathPattern::parse(&pattern.to_string().replace("%2F", "/")).unwrap();
                prop_assert!(plain.matches(&RequestPath::parse(&decoded).unwrap()), "{pattern} {decoded}");
            }
        }

        #[test]
        fn a_deny_pattern_holds_for_every_reading(
            pattern in "(/(a|admin|\\*|\\*\\*|a%2Fb)){1,4}", path in "(/(a|b|admin|a%2Fb|a%2Fadmin)){1,4}/?",
        ) {
            let pattern = PathPattern::parse(&pattern).unwrap();
            let request = RequestPath::parse(&path).unwrap();
            // The segment with an encoded slash as one opaque segment, and as several.
            let opaque = RequestPath::parse(&path.replace("%2F", "~")).unwrap();
            let decoded = RequestPath::parse(&path.replace("%2F", "/")).unwrap();
            let plain = PathPattern::parse(&pattern.to_string().replace("%2F", "~")).unwrap();
            let read = PathPattern::parse(&pattern.to_string().replace("%2F", "/")).unwrap();
            let expected = plain.denies(&opaque) || read.denies(&decoded);
            prop_assert_eq!(pattern.denies(&request), expected, "{} ~ {}", pattern, path);
            prop_assert!(!pattern.matches(&request) || pattern.denies(&request));
        }

        #[test]
        fn canonical_form_is_idempotent(text in "/\\PC{0,30}|(/[a-z%0-9.A-F]{0,8}){1,4}") {
            if let Ok(path) = CanonicalPath::parse(&text) {
                prop_assert_eq!(CanonicalPath::parse(path.as_str()), Ok(path.clone()));
            }
            if let Ok(path) = RequestPath::parse(&text) {
                prop_assert_eq!(RequestPath::parse(path.as_str()), Ok(path.clone()));
            }
        }

        #[test]
        fn a_pattern_matches_its_own_example(pattern in "(/(a|b|\\*|\\*\\*)){1,5}") {
            let pattern = PathPattern::parse(&pattern).unwrap();
            prop_assert!(pattern.matches(&RequestPath::parse(&pattern.example()).unwrap()));
        }
    }
}
