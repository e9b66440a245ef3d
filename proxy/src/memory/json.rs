//! A strict JSON parser: it accepts one UTF-8 document that every other parser reads alike. Keys are unique, also
//! after unescaping; depth and number of values are limited. The result keeps structure and short text, not numbers.

use std::cell::Cell;
use std::fmt;

use rules::ids::MAX_BANK_ID;
use serde::de::{DeserializeSeed, Deserializer, Error, MapAccess, SeqAccess, Visitor};

/// Limit of the nesting depth.
pub(super) const MAX_DEPTH: usize = 64;
/// Limit of the values in a document: members, elements, and the document itself.
pub(super) const MAX_VALUES: usize = 100_000;

/// A JSON value, as far as the guard needs it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum JsonValue {
    Array(Vec<JsonValue>),
    Null,
    Object(Vec<(String, JsonValue)>),
    /// A number or a boolean.
    Other,
    Text(String),
    /// A text that is too long for the name of a bank.
    TextTooLong,
}

/// Why a document was refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum JsonFault {
    #[error("it has a duplicate key in an object")]
    Duplicate,
    #[error("it is not exactly one UTF-8 JSON document")]
    Malformed,
    #[error("it is nested more than {MAX_DEPTH} levels deep")]
    TooDeep,
    #[error("it has more than {MAX_VALUES} values")]
    TooMany,
}

/// Parses a complete document.
pub(super) fn parse_json(bytes: &[u8]) -> Result<JsonValue, JsonFault> {
    let bounds = JsonBounds { left: Cell::new(MAX_VALUES), fault: Cell::new(JsonFault::Malformed) };
    let mut input = serde_json::Deserializer::from_slice(bytes);
    let json = JsonReader { bounds: &bounds, depth: 0 }.deserialize(&mut input);
    let json = json.map_err(|_| bounds.fault.get())?;
    input.end().map_err(|_| JsonFault::Malformed)?;
    Ok(json)
}

struct JsonBounds {
    left: Cell<usize>,
    /// Why parsing stopped, if not for its syntax: an error of serde carries only text.
    fault: Cell<JsonFault>,
}

impl JsonBounds {
    fn fail<E: Error>(&self, fault: JsonFault) -> E {
        self.fault.set(fault);
        E::custom(fault)
    }
}

#[derive(Clone, Copy)]
struct JsonReader<'a> {
    bounds: &'a JsonBounds,
    depth: usize,
}

impl JsonReader<'_> {
    /// Returns the reader for the next level of nesting.
    fn descend<E: Error>(self) -> Result<Self, E> {
        let depth = self.depth + 1;
        if depth > MAX_DEPTH {
            return Err(self.bounds.fail(JsonFault::TooDeep));
        }
        Ok(JsonReader { depth, ..self })
    }
}

impl<'de> DeserializeSeed<'de> for JsonReader<'_> {
    type Value = JsonValue;

    fn deserialize<D: Deserializer<'de>>(self, input: D) -> Result<JsonValue, D::Error> {
        match self.bounds.left.get().checked_sub(1) {
            None => Err(self.bounds.fail(JsonFault::TooMany)),
            Some(left) => {
                self.bounds.left.set(left);
                input.deserialize_any(self)
            }
        }
    }
}

impl<'de> Visitor<'de> for JsonReader<'_> {
    type Value = JsonValue;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("JSON")
    }

    fn visit_bool<E>(self, _: bool) -> Result<JsonValue, E> {
        Ok(JsonValue::Other)
    }

    fn visit_i64<E>(self, _: i64) -> Result<JsonValue, E> {
        Ok(JsonValue::Other)
    }

    fn visit_u64<E>(self, _: u64) -> Result<JsonValue, E> {
        Ok(JsonValue::Other)
    }

    fn visit_f64<E>(self, _: f64) -> Result<JsonValue, E> {
        Ok(JsonValue::Other)
    }

    fn visit_unit<E>(self) -> Result<JsonValue, E> {
        Ok(JsonValue::Null)
    }

    fn visit_str<E>(self, text: &str) -> Result<JsonValue, E> {
        Ok(if text.len() > MAX_BANK_ID { JsonValue::TextTooLong } else { JsonValue::Text(text.to_owned()) })
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut elements: A) -> Result<JsonValue, A::Error> {
        let below = self.descend()?;
        let mut all = Vec::new();
        while let Some(element) = elements.next_element_seed(below)? {
            all.push(element);
        }
        Ok(JsonValue::Array(all))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut members: A) -> Result<JsonValue, A::Error> {
        let below = self.descend()?;
        let mut all: Vec<(String, JsonValue)> = Vec::new();
        while let Some(key) = members.next_key::<String>()? {
            all.push((key, members.next_value_seed(below)?));
        }
        let mut keys: Vec<&str> = all.iter().map(|(key, _)| key.as_str()).collect();
        keys.sort_unstable();
        match keys.windows(2).any(|pair| matches!(pair, [one, other] if one == other)) {
            true => Err(self.bounds.fail(JsonFault::Duplicate)),
            false => Ok(JsonValue::Object(all)),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use super::*;

    #[test]
    fn p12_only_one_unambiguous_document_is_accepted() {
        use JsonFault::{Duplicate, Malformed};
        for (text, fault) in [
            (&br#"{"bank_id":"a","n":[1,2.5,true,null]}"#[..], None),
            (b" {} \r\n\t", None),
            (br#"{"bank\u005fid":"a"}"#, None),
            (b"{\"a\":\"\xc3\xa9\"}", None),
            (br#"{"a":1,"a":1}"#, Some(Duplicate)),
            (br#"{"bank_id":"a","bank\u005fid":"b"}"#, Some(Duplicate)),
            (br#"{"x":[{"a":1,"b":2,"a":3}]}"#, Some(Duplicate)),
            (br#"{} {}"#, Some(Malformed)),
            (br#"{}x"#, Some(Malformed)),
            (br#"{"a":NaN}"#, Some(Malformed)),
            (br#"{"a":Infinity}"#, Some(Malformed)),
            (br#"{"a":1e9999}"#, Some(Malformed)),
            (br#"{"a":01}"#, Some(Malformed)),
            (br#"{"a":"\ud800"}"#, Some(Malformed)),
            (b"{\"a\":\"\n\"}", Some(Malformed)),
            (b"{\"a\":\"\xff\"}", Some(Malformed)),
            (b"{\"a\":\"\xc0\xaf\"}", Some(Malformed)),
            (b"\xef\xbb\xbf{}", Some(Malformed)),
            (b"\xff\xfe{\0}\0", Some(Malformed)),
            (b"{\0}\0", Some(Malformed)),
            (br#"{'a':1}"#, Some(Malformed)),
            (br#"{"a":1,}"#, Some(Malformed)),
            (br#"/**/{}"#, Some(Malformed)),
            (b"", Some(Malformed)),
        ] {
            assert_eq!(parse_json(text).err(), fault, "{}", String::from_utf8_lossy(text));
        }
    }

    #[test]
    fn p17_depth_and_size_are_bounded() {
        let nested = |depth: usize| "[".repeat(depth) + &"]".repeat(depth);
        assert!(parse_json(nested(MAX_DEPTH).as_bytes()).is_ok());
        assert_eq!(parse_json(nested(MAX_DEPTH + 1).as_bytes()), Err(JsonFault::TooDeep));
        assert_eq!(parse_json("[".repeat(1 << 20).as_bytes()), Err(JsonFault::TooDeep));
        let many = |values: usize| format!("[{}]", vec!["0"; values - 1].join(","));
        assert!(parse_json(many(MAX_VALUES).as_bytes()).is_ok());
        assert_eq!(parse_json(many(MAX_VALUES + 1).as_bytes()), Err(JsonFault::TooMany));
        let keys: Vec<String> = (0..MAX_VALUES).map(|key| format!("\"{key}\":0")).collect();
        let keys = format!("{{{}}}", keys.join(","));
        assert_eq!(parse_json(keys.as_bytes()), Err(JsonFault::TooMany));
    }

    #[test]
    fn a_text_too_long_for_a_bank_is_dropped() {
        let text = |length: usize| format!("\"{}\"", "a".repeat(length));
        assert_eq!(parse_json(text(MAX_BANK_ID).as_bytes()), Ok(JsonValue::Text("a".repeat(MAX_BANK_ID))));
        assert_eq!(parse_json(text(MAX_BANK_ID + 1).as_bytes()), Ok(JsonValue::TextTooLong));
    }

    /// Random sequences of every kind of token: what we accept, `serde_json` accepts too, with as many values.
    #[test]
    fn p12_accepted_documents_read_alike_elsewhere() {
        const PIECES: [&str; 26] = [
            "{",
            "}",
            "[",
            "]",
            ",",
            ":",
            "\"a\"",
            "\"bank_id\"",
            "\"bank\\u005fid\"",
            "\"\\ud83d\\ude00\"",
            "\"\\udc00\"",
            "1",
            "-0",
            "1e5",
            "1E400",
            "true",
            "null",
            " ",
            "\n",
            "\"",
            "\\",
            "\u{feff}",
            "é",
            "\"b\":1",
            "\"a\":",
            "\0",
        ];
        let mut seed = 0x9e37_79b9_7f4a_7c15_u64;
        let mut next = |bound: usize| {
            seed ^= seed << 13;
            seed ^= seed >> 7;
            seed ^= seed << 17;
            usize::try_from(seed % bound as u64).unwrap()
        };
        let (started, mut read_in_all, mut duplicates) = (Instant::now(), 0, 0);
        for _ in 0..200_000 {
            let length = next(12);
            let mut text: String = (0..length).map(|_| PIECES[next(PIECES.len())]).collect();
            if next(2) == 0 {
                text = format!("{{\"a\":1,{text}:{text}}}");
            }
            match (parse_json(text.as_bytes()), serde_json::from_str::<serde_json::Value>(&text)) {
                (Ok(read), Ok(usual)) => {
                    read_in_all += 1;
                    assert_eq!(count(&read), count_serde(&usual), "{text:?}");
                }
                (Ok(_), Err(error)) => panic!("{text:?}: {error}"),
                (Err(JsonFault::Duplicate), Ok(_)) => duplicates += 1,
                (Err(fault), Ok(_)) => panic!("{text:?}: {fault}"),
                (Err(_), Err(_)) => {}
            }
        }
        assert!(read_in_all > 1000 && duplicates > 10, "{read_in_all} read, {duplicates} duplicates");
        assert!(started.elapsed() < Duration::from_secs(60), "parsing is slow");
    }

    fn count(json: &JsonValue) -> usize {
        match json {
            JsonValue::Array(all) => 1 + all.iter().map(count).sum::<usize>(),
            JsonValue::Object(all) => 1 + all.iter().map(|(_, value)| count(value)).sum::<usize>(),
            JsonValue::Null | JsonValue::Other | JsonValue::Text(_) | JsonValue::TextTooLong => 1,
        }
    }

    fn count_serde(json: &serde_json::Value) -> usize {
        match json {
            serde_json::Value::Array(all) => 1 + all.iter().map(count_serde).sum::<usize>(),
            serde_json::Value::Object(all) => 1 + all.values().map(count_serde).sum::<usize>(),
            serde_json::Value::Bool(_)
            | serde_json::Value::Null
            | serde_json::Value::Number(_)
            | serde_json::Value::String(_) => 1,
        }
    }
}
