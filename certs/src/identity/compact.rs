//! The compact form of a token, parsed strictly: a token has one spelling and one meaning, or it is refused.
//!
//! Attacks on tokens live where two parsers disagree (the issuer's, ours, a log viewer's), or where the token
//! itself steers its verification. So this parser refuses everything that leaves room for either:
//!
//! - more than [`MAX_TOKEN`] bytes, before hashing or decoding anything;
//! - anything but three parts of canonical base64url (no padding, no stray bits): otherwise one token has
//!   many spellings, each a separate entry in the cache of verified tokens, whose key is the text's hash;
//! - a duplicate member at any depth, compared after unescaping: some parsers take the first, some the last;
//! - header members other than `alg`, `kid` and `typ`: `jku`, `x5u`, `jwk` and `crit` would let a token
//!   choose its own key. `alg` is only compared with the algorithm of the key, never used to select one;
//! - nesting deeper than [`MAX_DEPTH`].
//!
//! `claims` continues the same way: exact types, exactly one audience. Nothing in here is verified yet.

use std::cell::Cell;
use std::fmt;

use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use serde::de::{self, DeserializeSeed, MapAccess, SeqAccess, Visitor};
use serde_json::{Map, Value};

use super::{IdentityError, is_plain};

/// Largest token to parse, in bytes.
pub const MAX_TOKEN: usize = 4096;
/// Deepest nesting of a claim.
const MAX_DEPTH: usize = 8;
/// Longest `kid`.
pub(super) const MAX_KEY_ID: usize = 128;

/// A parsed token, not verified.
pub(super) struct CompactJws<'a> {
    /// The signed text.
    pub(super) message: &'a str,
    pub(super) signature: &'a str,
    pub(super) algorithm: String,
    pub(super) key_id: String,
    pub(super) claims: Map<String, Value>,
}

impl<'a> CompactJws<'a> {
    pub(super) fn parse(token: &'a str) -> Result<Self, IdentityError> {
        let JwsParts { message, header, claims, signature } = split_token(token)?;
        let (algorithm, key_id) = read_header(decode_object(header)?)?;
        decode_base64url(signature)?; // only the form; verifying costs most, so it comes last
        Ok(Self { message, signature, algorithm, key_id, claims: decode_object(claims)? })
    }
}

/// Header and claims of an unverified token, for display.
#[derive(Clone, Debug, PartialEq, serde::Serialize)]
pub struct UnverifiedToken {
    pub header: Map<String, Value>,
    pub claims: Map<String, Value>,
}

/// Parses a token without verifying it.
pub fn inspect(token: &str) -> Result<UnverifiedToken, IdentityError> {
    let parts = split_token(token)?;
    Ok(UnverifiedToken { header: decode_object(parts.header)?, claims: decode_object(parts.claims)? })
}

/// Checks the size, before anything is hashed or decoded.
pub(super) fn check_size(token: &str) -> Result<(), IdentityError> {
    match token.len() {
        0 => Err(IdentityError::Absent),
        1..=MAX_TOKEN => Ok(()),
        _ => Err(IdentityError::TooLarge),
    }
}

struct JwsParts<'a> {
    message: &'a str,
    header: &'a str,
    claims: &'a str,
    signature: &'a str,
}

fn split_token(token: &str) -> Result<JwsParts<'_>, IdentityError> {
    check_size(token)?;
    let (message, signature) = token.rsplit_once('.').ok_or(IdentityError::Malformed)?;
    let (header, claims) = message.split_once('.').ok_or(IdentityError::Malformed)?;
    // A fourth part would be in the claims, and base64url has no dot.
    Ok(JwsParts { message, header, claims, signature })
}

/// Decodes canonical base64url: no padding, no other alphabet, no stray bits.
fn decode_base64url(part: &str) -> Result<Vec<u8>, IdentityError> {
    URL_SAFE_NO_PAD.decode(part).map_err(|_| IdentityError::Malformed)
}

fn decode_object(part: &str) -> Result<Map<String, Value>, IdentityError> {
    let bytes = decode_base64url(part)?;
    match parse_strict_json(&bytes)? {
        Value::Object(map) => Ok(map),
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) | Value::Array(_) => {
            Err(IdentityError::Malformed)
        }
    }
}

/// Returns `alg` and `kid`. Members that could steer the verification (`jku`, `x5u`, `jwk`, `crit`) must be absent.
fn read_header(mut header: Map<String, Value>) -> Result<(String, String), IdentityError> {
    let mut take = |name| match header.remove(name) {
        Some(Value::String(text)) => Ok(Some(text)),
        Some(_) => Err(IdentityError::Header),
        None => Ok(None),
    };
    let algorithm = take("alg")?.ok_or(IdentityError::Header)?;
    let key_id = take("kid")?.ok_or(IdentityError::UnknownKey)?;
    let kind = take("typ")?;
    let kind_is_good = matches!(kind.as_deref(), None | Some("JWT" | "JOSE"));
    if !header.is_empty() || !kind_is_good || !is_plain(&key_id, MAX_KEY_ID) {
        return Err(IdentityError::Header);
    }
    Ok((algorithm, key_id))
}

/// Parses JSON and refuses duplicate members. Names are compared unescaped, so escapes do not hide one.
pub(super) fn parse_strict_json(bytes: &[u8]) -> Result<Value, IdentityError> {
    let duplicate = Cell::new(false);
    let mut input = serde_json::Deserializer::from_slice(bytes);
    let strict = StrictJson { depth: MAX_DEPTH, duplicate: &duplicate };
    let parsed = strict.deserialize(&mut input).and_then(|value| input.end().map(|()| value));
    parsed.map_err(|_| if duplicate.get() { IdentityError::Duplicate } else { IdentityError::Malformed })
}

#[derive(Clone, Copy)]
struct StrictJson<'a> {
    depth: usize,
    duplicate: &'a Cell<bool>,
}

impl StrictJson<'_> {
    fn descend<E: de::Error>(self) -> Result<Self, E> {
        let depth = self.depth.checked_sub(1).ok_or_else(|| E::custom("too deep"))?;
        Ok(Self { depth, ..self })
    }
}

impl<'de> DeserializeSeed<'de> for StrictJson<'_> {
    type Value = Value;

    fn deserialize<D: de::Deserializer<'de>>(self, input: D) -> Result<Value, D::Error> {
        input.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for StrictJson<'_> {
    type Value = Value;

    fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("JSON without duplicates")
    }

    fn visit_unit<E>(self) -> Result<Value, E> {
        Ok(Value::Null)
    }

    fn visit_bool<E>(self, found: bool) -> Result<Value, E> {
        Ok(found.into())
    }

    fn visit_u64<E>(self, found: u64) -> Result<Value, E> {
        Ok(found.into())
    }

    fn visit_i64<E>(self, found: i64) -> Result<Value, E> {
        Ok(found.into())
    }

    fn visit_f64<E>(self, found: f64) -> Result<Value, E> {
        Ok(found.into())
    }

    fn visit_str<E>(self, found: &str) -> Result<Value, E> {
        Ok(found.into())
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut found: A) -> Result<Value, A::Error> {
        let inner = self.descend()?;
        let mut list = Vec::new();
        while let Some(value) = found.next_element_seed(inner)? {
            list.push(value);
        }
        Ok(Value::Array(list))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut found: A) -> Result<Value, A::Error> {
        let inner = self.descend()?;
        let mut map = Map::new();
        while let Some(name) = found.next_key::<String>()? {
            let value = found.next_value_seed(inner)?;
            if map.insert(name, value).is_some() {
                self.duplicate.set(true);
                return Err(de::Error::custom("duplicate"));
            }
        }
        Ok(Value::Object(map))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn p12_json_is_read_one_way_only() {
        let deep = format!("{}1{}", "[".repeat(1000), "]".repeat(1000));
        for (text, expected) in [
            (r#"{"sub":"a"}"#, Ok(())),
            (r#"{"a":{"b":[1,{"c":null}]}}"#, Ok(())),
            (r#"{"sub":"a","sub":"b"}"#, Err(IdentityError::Duplicate)),
            (r#"{"sub":"a","s\u0075b":"b"}"#, Err(IdentityError::Duplicate)),
            (r#"{"cnf":{"a":1,"a":1}}"#, Err(IdentityError::Duplicate)),
            (r#"[{"a":1},{"a":1,"a":1}]"#, Err(IdentityError::Duplicate)),
            (r#"{"a":1}{"a":2}"#, Err(IdentityError::Malformed)),
            (r#"{"a":1} x"#, Err(IdentityError::Malformed)),
            (r#"{"a":NaN}"#, Err(IdentityError::Malformed)),
            ("\u{feff}{}", Err(IdentityError::Malformed)),
            ("", Err(IdentityError::Malformed)),
            (&deep, Err(IdentityError::Malformed)),
        ] {
            assert_eq!(parse_strict_json(text.as_bytes()).map(|_| ()), expected, "{text:.40}");
        }
        assert_eq!(parse_strict_json(b"\"\xff\""), Err(IdentityError::Malformed));
        assert_eq!(parse_strict_json(b"\"\\ud800\""), Err(IdentityError::Malformed));
    }
}
