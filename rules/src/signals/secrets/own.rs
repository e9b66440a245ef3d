//! Patterns of the operator: a literal, or a literal prefix with a character class and a length.

use super::candidate::{ByteSet, Candidate, Verdict};

/// Most patterns of the operator.
pub const MAX_OWN_PATTERNS: usize = 256;
/// Shortest literal prefix.
pub const MIN_OWN_PREFIX: usize = 3;
/// Longest pattern text, and longest run of its class.
pub const MAX_OWN_LENGTH: usize = 512;

/// A shape that the operator names: `acme_[A-Za-z0-9]{32}`, or an exact literal such as `Project Bluebird`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OwnPattern {
    pub(super) label: String,
    pub(super) prefix: Vec<u8>,
    pub(super) class: Option<(ByteSet, usize, usize)>,
}

/// Why a pattern does not compile.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum OwnPatternError {
    #[error("the range `{first}-{last}` is the wrong way round")]
    ClassRange { first: char, last: char },
    #[error("the class `[...]` is empty or has no `]`")]
    ClassOpen,
    #[error("a class holds ASCII characters only, not `{0}`")]
    ClassCharacter(char),
    #[error("after the class comes a length, `{{32}}` or `{{20,40}}`, and nothing else")]
    Length,
    #[error("a length is at most {MAX_OWN_LENGTH}, at least 1, and not less than its lower end")]
    LengthRange,
    #[error(
        "the literal before the class has {0} bytes; it needs {MIN_OWN_PREFIX} at least to be found quickly"
    )]
    PrefixShort(usize),
    #[error("the pattern is longer than {MAX_OWN_LENGTH} bytes")]
    TooLong,
}

impl OwnPattern {
    /// Parses a pattern. `\` takes the special meaning from the character after it.
    ///
    /// # Errors
    ///
    /// Returns [`OwnPatternError`] for text that is not a literal, or a literal with one class and its length.
    pub fn parse(label: &str, text: &str) -> Result<OwnPattern, OwnPatternError> {
        if text.len() > MAX_OWN_LENGTH {
            return Err(OwnPatternError::TooLong);
        }
        let mut prefix = String::new();
        let mut characters = text.chars();
        let mut has_class = false;
        while let Some(character) = characters.next() {
            match character {
                '\\' => prefix.extend(characters.next()),
                '[' => {
                    has_class = true;
                    break;
                }
                _ => prefix.push(character),
            }
        }
        if prefix.len() < MIN_OWN_PREFIX {
            return Err(OwnPatternError::PrefixShort(prefix.len()));
        }
        let class = if has_class { Some(parse_class(characters.as_str())?) } else { None };
        Ok(OwnPattern { label: label.to_owned(), prefix: prefix.into_bytes(), class })
    }

    pub(super) fn validate(&self, at: &Candidate) -> Verdict {
        match &self.class {
            None => Verdict::Yes,
            Some((class, min, max)) => at.between(class, *min, *max, |_| true),
        }
    }
}

/// Parses what follows `[`: `A-Za-z]{32}`.
fn parse_class(text: &str) -> Result<(ByteSet, usize, usize), OwnPatternError> {
    let mut class = ByteSet::EMPTY;
    let mut characters = text.chars().peekable();
    loop {
        let first = match characters.next() {
            None => return Err(OwnPatternError::ClassOpen),
            Some(']') => break,
            Some('\\') => characters.next().ok_or(OwnPatternError::ClassOpen)?,
            Some(character) => character,
        };
        let mut ahead = characters.clone();
        let last = match (ahead.next(), ahead.next()) {
            (Some('-'), Some(last)) if last != ']' => {
                characters = ahead;
                last
            }
            _ => first,
        };
        if last < first {
            return Err(OwnPatternError::ClassRange { first, last });
        }
        class = class.with_range(ascii(first)?, ascii(last)?);
    }
    if class.is_empty() {
        return Err(OwnPatternError::ClassOpen);
    }
    let rest: String = characters.collect();
    let length =
        rest.strip_prefix('{').and_then(|rest| rest.strip_suffix('}')).ok_or(OwnPatternError::Length)?;
    let (min, max) = length.split_once(',').unwrap_or((length, length));
    let number = |text: &str| text.trim().parse::<usize>().map_err(|_| OwnPatternError::Length);
    let (min, max) = (number(min)?, number(max)?);
    if min == 0 || min > max || max > MAX_OWN_LENGTH {
        return Err(OwnPatternError::LengthRange);
    }
    Ok((class, min, max))
}

fn ascii(character: char) -> Result<u8, OwnPatternError> {
    u8::try_from(character).ok().filter(u8::is_ascii).ok_or(OwnPatternError::ClassCharacter(character))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patterns_are_a_literal_and_one_class() {
        for (text, expected) in [
            ("acme_[a-z]{4}", None),
            ("acme_[A-Za-z0-9_-]{20,40}", None),
            ("Project Bluebird", None),
            (r"array\[0\]", None),
            ("ab[a-z]{4}", Some(OwnPatternError::PrefixShort(2))),
            ("", Some(OwnPatternError::PrefixShort(0))),
            ("acme_[", Some(OwnPatternError::ClassOpen)),
            ("acme_[]{2}", Some(OwnPatternError::ClassOpen)),
            ("acme_[a-z]", Some(OwnPatternError::Length)),
            ("acme_[a-z]{4}x", Some(OwnPatternError::Length)),
            ("acme_[a-z]{x}", Some(OwnPatternError::Length)),
            ("acme_[a-z]{9,4}", Some(OwnPatternError::LengthRange)),
            ("acme_[a-z]{0}", Some(OwnPatternError::LengthRange)),
            ("acme_[a-z]{1,99999}", Some(OwnPatternError::LengthRange)),
            ("acme_[z-a]{4}", Some(OwnPatternError::ClassRange { first: 'z', last: 'a' })),
            ("acme_[ä]{4}", Some(OwnPatternError::ClassCharacter('ä'))),
        ] {
            assert_eq!(OwnPattern::parse("p", text).err(), expected, "{text}");
        }
        assert_eq!(OwnPattern::parse("p", &"x".repeat(600)), Err(OwnPatternError::TooLong));
    }
}
