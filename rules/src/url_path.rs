//! URL paths: one canonical form, and patterns over its segments.
//!
//! Paths that servers interpret differently (`%2f`, `..`, `//`, `;`, `\`) are refused, never guessed.

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

    /// Returns the path without its trailing slash, for deny rules; `None` if it has none or is `/`.
    pub(crate) fn without_slash(&self) -> Option<Self> {
        self.0.strip_suffix('/').filter(|rest| !rest.is_empty()).map(|rest| CanonicalPath(rest.into()))
    }

    fn segments(&self) -> impl Iterator<Item = &str> + Clone {
        self.0.split('/').skip(1)
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
    Literal(Box<str>),
    One,
}

/// Why a text is not a path pattern.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PathPatternError {
    #[error("{0}")]
    Path(#[from] UrlPathError),
    #[error("a path pattern does not match the query; remove everything from `?`")]
    Query,
    #[error("`*` and `**` must be whole segments, such as `/v1/*/items/**`")]
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
        let canonical = CanonicalPath::parse(text)?;
        let segments = canonical.segments().map(parse_segment).collect::<Result<_, _>>()?;
        Ok(PathPattern { text: canonical.as_str().into(), segments })
    }

    /// Returns whether the pattern is `/**`, which matches every path, even one without canonical form.
    pub fn is_everything(&self) -> bool {
        self.segments.iter().all(|segment| *segment == PatternSegment::Any)
    }

    /// Returns whether some path matches both patterns.
    pub(crate) fn overlaps(&self, other: &PathPattern) -> bool {
        segments_overlap(&self.segments, &other.segments)
    }

    pub fn matches(&self, path: &CanonicalPath) -> bool {
        segments_match(&self.segments, path.segments())
    }

    /// Returns the specificity: literal segments count most, then `*`, then fewer `**`; `/**` ranks like no pattern.
    pub fn specificity(&self) -> PathSpecificity {
        if self.is_everything() {
            return PathSpecificity::default();
        }
        let count = |wanted: fn(&PatternSegment) -> bool| self.segments.iter().filter(|s| wanted(s)).count();
        let many = count(|s| matches!(s, PatternSegment::Any));
        (
            count(|s| matches!(s, PatternSegment::Literal(_))),
            count(|s| matches!(s, PatternSegment::One)),
            usize::MAX - many,
        )
    }

    /// Returns a path that this pattern matches, to test a policy with.
    pub fn example(&self) -> String {
        let part = |segment: &PatternSegment| match segment {
            PatternSegment::Any | PatternSegment::One => "/any".to_owned(),
            PatternSegment::Literal(text) => format!("/{text}"),
        };
        self.segments.iter().map(part).collect()
    }
}

impl fmt::Display for PathPattern {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

fn parse_segment(text: &str) -> Result<PatternSegment, PathPatternError> {
    match text {
        "*" => Ok(PatternSegment::One),
        "**" => Ok(PatternSegment::Any),
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
                (Some(PatternSegment::Any), _) | (_, Some(PatternSegment::Any)) => down || right(&row),
                (Some(PatternSegment::Literal(a)), Some(PatternSegment::Literal(b))) => {
                    a == b && right(&below)
                }
                (Some(_), Some(_)) => right(&below),
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
/// further right, which the last one does too. So the work is bounded by the product of the lengths.
fn segments_match<'a>(pattern: &[PatternSegment], path: impl Iterator<Item = &'a str> + Clone) -> bool {
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
            (Some((PatternSegment::One, after)), Some(found)) if !found.is_empty() => rest = after,
            (Some((PatternSegment::Literal(wanted), after)), Some(found)) if **wanted == *found => {
                rest = after
            }
            _ => {
                let Some((after, mut from)) = retry.take() else { return false };
                if from.next().is_none() {
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
            let path = CanonicalPath::parse(path).unwrap();
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
        for text in ["", "v1", "/v1?x=1", "/a*", "/a**", "/***", "/../x", "/a//b", "/a%2fb", "/a;b"] {
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
            let found = PathPattern::parse(&pattern).unwrap().matches(&CanonicalPath::parse(&path).unwrap());
            prop_assert_eq!(found, reference(&pattern_segments, &path_segments), "{} ~ {}", pattern, path);
        }

        #[test]
        fn patterns_overlap_where_a_path_matches_both(one in "(/(a|b|\\*|\\*\\*)){1,4}", other in "(/(a|b|\\*|\\*\\*)){1,4}", path in "(/[ab]){1,5}") {
            let (one, other) = (PathPattern::parse(&one).unwrap(), PathPattern::parse(&other).unwrap());
            let path = CanonicalPath::parse(&path).unwrap();
            prop_assert!(one.overlaps(&other) || !one.matches(&path) || !other.matches(&path));
            prop_assert_eq!(one.overlaps(&other), other.overlaps(&one));
        }

        #[test]
        fn canonical_form_is_idempotent(text in "/\\PC{0,30}|(/[a-z%0-9.A-F]{0,8}){1,4}") {
            if let Ok(path) = CanonicalPath::parse(&text) {
                prop_assert_eq!(CanonicalPath::parse(path.as_str()), Ok(path.clone()));
            }
        }

        #[test]
        fn a_pattern_matches_its_own_example(pattern in "(/(a|b|\\*|\\*\\*)){1,5}") {
            let pattern = PathPattern::parse(&pattern).unwrap();
            prop_assert!(pattern.matches(&CanonicalPath::parse(&pattern.example()).unwrap()));
        }
    }
}
