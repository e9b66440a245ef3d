//! The encoder of lines: compact JSON in which every string is printable ASCII.
//!
//! Records are written before anything leaves, so this is on every attempt's path; it knows only
//! the shapes a record has. Anything a terminal, a pager or a parser could act upon (controls,
//! bidi marks, line separators, look-alikes) becomes a `\u` escape.

use std::fmt::Display;

use serde::ser::{Error as _, Impossible, Serialize, SerializeSeq, SerializeStruct, Serializer};

use crate::text::CUT;

/// A line in the making.
#[derive(Debug, Default)]
pub(crate) struct Encoder {
    pub(crate) bytes: Vec<u8>,
    /// Bytes that were cut from texts.
    pub(crate) cut: u64,
}

/// A shape that no record has.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub(crate) struct EncodeError(String);

impl serde::ser::Error for EncodeError {
    fn custom<T: Display>(message: T) -> Self {
        Self(message.to_string())
    }
}

impl Encoder {
    fn text(&mut self, text: &str) {
        self.bytes.push(b'"');
        if text.bytes().fold(true, |plain, byte| plain & stands_as_it_is(byte)) {
            self.bytes.extend_from_slice(text.as_bytes());
        } else {
            self.escape(text);
        }
        self.bytes.push(b'"');
    }

    fn escape(&mut self, text: &str) {
        let mut letters = text.chars();
        while let Some(letter) = letters.next() {
            match letter {
                '"' => self.bytes.extend_from_slice(b"\\\""),
                '\\' => self.bytes.extend_from_slice(b"\\\\"),
                ' '..='~' => self.bytes.push(letter as u8),
                CUT => {
                    self.cut += letters.as_str().parse().unwrap_or(0);
                    self.bytes.extend_from_slice(b"\\u2026+");
                }
                other => other.encode_utf16(&mut [0; 2]).iter().for_each(|unit| self.unit(*unit)),
            }
        }
    }

    fn unit(&mut self, unit: u16) {
        self.bytes.extend_from_slice(b"\\u");
        self.bytes.extend_from_slice(format!("{unit:04x}").as_bytes());
    }

    fn number(&mut self, mut number: u64) {
        let mut digits = [0; 20];
        let mut at = digits.len();
        for digit in digits.iter_mut().rev() {
            *digit = b'0' + (number % 10) as u8;
            number /= 10;
            at -= 1;
            if number == 0 {
                break;
            }
        }
        self.bytes.extend_from_slice(digits.get(at..).unwrap_or_default());
    }
}

/// Whether a byte needs no escape.
pub(crate) fn stands_as_it_is(byte: u8) -> bool {
    matches!(byte, b' '..=b'~') & (byte != b'"') & (byte != b'\\')
}

/// An object or a list that is being written.
pub(crate) struct Open<'a> {
    encoder: &'a mut Encoder,
    first: bool,
    end: u8,
}

impl Open<'_> {
    fn separate(&mut self) {
        if !std::mem::replace(&mut self.first, false) {
            self.encoder.bytes.push(b',');
        }
    }
}

impl SerializeStruct for Open<'_> {
    type Ok = ();
    type Error = EncodeError;

    fn serialize_field<T: ?Sized + Serialize>(
        &mut self,
        key: &'static str,
        value: &T,
    ) -> Result<(), EncodeError> {
        self.separate();
        self.encoder.bytes.push(b'"');
        self.encoder.bytes.extend_from_slice(key.as_bytes()); // ours, so there is nothing to escape
        self.encoder.bytes.extend_from_slice(b"\":");
        value.serialize(&mut *self.encoder)
    }

    fn end(self) -> Result<(), EncodeError> {
        self.encoder.bytes.push(self.end);
        Ok(())
    }
}

impl SerializeSeq for Open<'_> {
    type Ok = ();
    type Error = EncodeError;

    fn serialize_element<T: ?Sized + Serialize>(&mut self, value: &T) -> Result<(), EncodeError> {
        self.separate();
        value.serialize(&mut *self.encoder)
    }

    fn end(self) -> Result<(), EncodeError> {
        self.encoder.bytes.push(self.end);
        Ok(())
    }
}

impl serde::ser::SerializeTuple for Open<'_> {
    type Ok = ();
    type Error = EncodeError;

    fn serialize_element<T: ?Sized + Serialize>(&mut self, value: &T) -> Result<(), EncodeError> {
        SerializeSeq::serialize_element(self, value)
    }

    fn end(self) -> Result<(), EncodeError> {
        SerializeSeq::end(self)
    }
}

type Never = Impossible<(), EncodeError>;

fn never<T>(shape: &str) -> Result<T, EncodeError> {
    Err(EncodeError::custom(format!("a record has no {shape}")))
}

impl<'a> Serializer for &'a mut Encoder {
    type Ok = ();
    type Error = EncodeError;
    type SerializeSeq = Open<'a>;
    type SerializeTuple = Open<'a>;
    type SerializeTupleStruct = Never;
    type SerializeTupleVariant = Never;
    type SerializeMap = Never;
    type SerializeStruct = Open<'a>;
    type SerializeStructVariant = Never;

    fn serialize_bool(self, value: bool) -> Result<(), EncodeError> {
        self.bytes.extend_from_slice(if value { b"true" } else { b"false" });
        Ok(())
    }
    fn serialize_u8(self, value: u8) -> Result<(), EncodeError> {
        self.serialize_u64(value.into())
    }
    fn serialize_u16(self, value: u16) -> Result<(), EncodeError> {
        self.serialize_u64(value.into())
    }
    fn serialize_u32(self, value: u32) -> Result<(), EncodeError> {
        self.serialize_u64(value.into())
    }
    fn serialize_u64(self, value: u64) -> Result<(), EncodeError> {
        self.number(value);
        Ok(())
    }
    fn serialize_str(self, text: &str) -> Result<(), EncodeError> {
        self.text(text);
        Ok(())
    }
    fn serialize_some<T: ?Sized + Serialize>(self, value: &T) -> Result<(), EncodeError> {
        value.serialize(self)
    }
    fn serialize_newtype_struct<T: ?Sized + Serialize>(
        self,
        _: &'static str,
        value: &T,
    ) -> Result<(), EncodeError> {
        value.serialize(self)
    }
    fn serialize_seq(self, _: Option<usize>) -> Result<Open<'a>, EncodeError> {
        self.bytes.push(b'[');
        Ok(Open { encoder: self, first: true, end: b']' })
    }
    fn serialize_tuple(self, length: usize) -> Result<Open<'a>, EncodeError> {
        self.serialize_seq(Some(length))
    }
    fn serialize_struct(self, _: &'static str, _: usize) -> Result<Open<'a>, EncodeError> {
        self.bytes.push(b'{');
        Ok(Open { encoder: self, first: true, end: b'}' })
    }

    // What follows no record has.
    fn serialize_i8(self, _: i8) -> Result<(), EncodeError> {
        never("signed number")
    }
    fn serialize_i16(self, _: i16) -> Result<(), EncodeError> {
        never("signed number")
    }
    fn serialize_i32(self, _: i32) -> Result<(), EncodeError> {
        never("signed number")
    }
    fn serialize_i64(self, _: i64) -> Result<(), EncodeError> {
        never("signed number")
    }
    fn serialize_f32(self, _: f32) -> Result<(), EncodeError> {
        never("fraction")
    }
    fn serialize_f64(self, _: f64) -> Result<(), EncodeError> {
        never("fraction")
    }
    fn serialize_char(self, _: char) -> Result<(), EncodeError> {
        never("character")
    }
    fn serialize_bytes(self, _: &[u8]) -> Result<(), EncodeError> {
        never("bytes")
    }
    fn serialize_none(self) -> Result<(), EncodeError> {
        never("null")
    }
    fn serialize_unit(self) -> Result<(), EncodeError> {
        never("unit")
    }
    fn serialize_unit_struct(self, _: &'static str) -> Result<(), EncodeError> {
        never("unit")
    }
    fn serialize_unit_variant(
        self,
        _: &'static str,
        _: u32,
        _: &'static str,
    ) -> Result<(), EncodeError> {
        never("variant")
    }
    fn serialize_newtype_variant<T: ?Sized + Serialize>(
        self,
        _: &'static str,
        _: u32,
        _: &'static str,
        _: &T,
    ) -> Result<(), EncodeError> {
        never("variant")
    }
    fn serialize_tuple_struct(self, _: &'static str, _: usize) -> Result<Never, EncodeError> {
        never("tuple")
    }
    fn serialize_tuple_variant(
        self,
        _: &'static str,
        _: u32,
        _: &'static str,
        _: usize,
    ) -> Result<Never, EncodeError> {
        never("variant")
    }
    fn serialize_map(self, _: Option<usize>) -> Result<Never, EncodeError> {
        never("map")
    }
    fn serialize_struct_variant(
        self,
        _: &'static str,
        _: u32,
        _: &'static str,
        _: usize,
    ) -> Result<Never, EncodeError> {
        never("variant")
    }
}
