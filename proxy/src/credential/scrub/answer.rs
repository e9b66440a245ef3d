//! Scrubs the answer to one request: its fields, and its body, decoded where it is compressed.

use std::sync::Arc;

use bytes::Bytes;

use super::archive::{ArchiveError, ArchiveSearch};
use super::coding::{Coding, ContentDecoder};
use super::{EchoPatterns, ResponseScrubber};

/// Why a body cannot be passed on.
pub(crate) type AnswerError = ArchiveError;

/// The scrubber of one answer.
pub(crate) struct AnswerScrubber {
    scrubber: ResponseScrubber,
    body: Body,
    /// The memory that decoding took at most.
    memory: u64,
    /// How much of it was reserved.
    reserved: u64,
}

/// How a body is read.
enum Body {
    /// As it is.
    Plain,
    /// It says how it is encoded, and is passed on decoded.
    Encoded(ContentDecoder),
    /// It may be compressed without saying so.
    Unknown(ArchiveSearch),
}

impl AnswerScrubber {
    pub(crate) fn new(patterns: Arc<EchoPatterns>) -> Self {
        AnswerScrubber {
            scrubber: ResponseScrubber::new(patterns),
            body: Body::Plain,
            memory: 0,
            reserved: 0,
        }
    }

    /// The scrubber itself, for fields and for streams that have no coding.
    pub(crate) fn text(&mut self) -> &mut ResponseScrubber {
        &mut self.scrubber
    }

    pub(crate) fn found(&self) -> &ResponseScrubber {
        &self.scrubber
    }

    /// Prepares for a body with these codings, in the order in which they were applied.
    pub(crate) fn expect_body(&mut self, codings: &[Coding]) -> Result<(), AnswerError> {
        self.body = match codings {
            [] => Body::Unknown(ArchiveSearch::new()),
            codings => Body::Encoded(ContentDecoder::new(codings)?),
        };
        Ok(())
    }

    /// Prepares for a body with these codings that is passed on as it is, and searched in a copy.
    pub(crate) fn expect_copy(&mut self, codings: &[Coding]) -> Result<(), AnswerError> {
        self.body = match codings {
            [] => Body::Unknown(ArchiveSearch::new()),
            codings => Body::Unknown(ArchiveSearch::declared(codings, &self.scrubber)?),
        };
        Ok(())
    }

    /// Takes the next piece of the body, and returns what may be passed on.
    pub(crate) fn pass(&mut self, piece: Option<&Bytes>, last: bool) -> Result<Bytes, AnswerError> {
        let empty = Bytes::new();
        let piece = piece.unwrap_or(&empty);
        match &mut self.body {
            Body::Plain => Ok(self.scrubber.scrub(Some(piece), last)),
            Body::Encoded(decoder) => {
                let decoded = decoder.decode(piece, last)?;
                self.memory = self.memory.max(decoder.memory() + decoded.len() as u64);
                Ok(self.scrubber.scrub(Some(&decoded), last))
            }
            Body::Unknown(archive) => {
                let passed = archive.pass(piece, last, &mut self.scrubber)?;
                self.memory = self.memory.max(archive.memory());
                Ok(self.scrubber.scrub(Some(&passed), last))
            }
        }
    }

    /// Returns the memory that decoding took at most, less what was returned before: it is to be reserved.
    pub(crate) fn take_memory(&mut self) -> u64 {
        let more = self.memory.saturating_sub(self.reserved);
        self.reserved = self.reserved.max(self.memory);
        more
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use flate2::Compression;
    use flate2::write::GzEncoder;

    use super::*;

    const SECRET: &str = "sk-live/8fJ2kq0Zp7+abQx91==";

    fn scrubber() -> AnswerScrubber {
        AnswerScrubber::new(Arc::new(EchoPatterns::new([("key", SECRET)])))
    }

    fn gzip(text: &[u8]) -> Vec<u8> {
        let mut encoder = GzEncoder::new(Vec::new(), Compression::default());
        encoder.write_all(text).unwrap();
        encoder.finish().unwrap()
    }

    /// Random text, so that compression does not shrink it.
    fn noise(length: usize) -> Vec<u8> {
        let mut seed = 9u64;
        let digit = || {
            seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            b"abcdefghijklmnop.\"<>{}/\nABCDEFGH0123456789XYZ"[(seed >> 58) as usize % 44]
        };
        std::iter::repeat_with(digit).take(length).collect()
    }

    #[test]
    fn p11_a_declared_coding_is_decoded_and_masked() {
        let bytes = gzip(format!("you sent {SECRET}, thanks").as_bytes());
        for size in [1, 5, bytes.len()] {
            let mut scrubber = scrubber();
            scrubber.expect_body(&[Coding::Gzip]).unwrap();
            let mut out = Vec::new();
            for piece in bytes.chunks(size) {
                out.extend_from_slice(&scrubber.pass(Some(&Bytes::copy_from_slice(piece)), false).unwrap());
            }
            out.extend_from_slice(&scrubber.pass(None, true).unwrap());
            assert_eq!(
                String::from_utf8(out).unwrap(),
                format!("you sent {}, thanks", "*".repeat(SECRET.len()))
            );
            assert!(scrubber.take_memory() > 0);
            assert_eq!(scrubber.take_memory(), 0);
            assert_eq!(scrubber.found().found_labels().collect::<Vec<_>>(), ["key"]);
        }
    }

    #[test]
    fn p11_an_archive_is_cut_before_it_gives_a_credential_away() {
        let mut text = noise(40_000);
        let clean = gzip(&text);
        text.splice(20_000..20_000, SECRET.bytes());
        let leaky = [gzip(b"first member"), gzip(&text)].concat();
        for size in [1, 700, 100_000] {
            let mut scrubber = scrubber();
            scrubber.expect_body(&[]).unwrap();
            let mut out = Vec::new();
            for piece in clean.chunks(size) {
                out.extend_from_slice(&scrubber.pass(Some(&Bytes::copy_from_slice(piece)), false).unwrap());
            }
            out.extend_from_slice(&scrubber.pass(None, true).unwrap());
            assert!(out == clean, "an archive without one passes as it is");
            let mut scrubber = self::scrubber();
            scrubber.expect_body(&[]).unwrap();
            let (mut out, mut cut) = (Vec::new(), None);
            for piece in leaky.chunks(size) {
                match scrubber.pass(Some(&Bytes::copy_from_slice(piece)), false) {
                    Ok(passed) => out.extend_from_slice(&passed),
                    Err(error) => {
                        cut = Some(error);
                        break;
                    }
                }
            }
            assert_eq!(cut, Some(AnswerError::Echo), "by {size}");
            let mut shown = Vec::new();
            let mut decoder = flate2::read::MultiGzDecoder::new(&out[..]);
            let _cut_off = std::io::Read::read_to_end(&mut decoder, &mut shown);
            let shown = String::from_utf8_lossy(&shown);
            assert!(!shown.contains("sk-live/8"), "by {size}: more than a start was passed on");
            assert_eq!(scrubber.found().echo_count(), 1);
        }
    }

    #[test]
    fn what_only_begins_like_an_archive_passes() {
        for start in [
            &b"\x1f\x8b\x08"[..],
            b"\x1f\x8b\x08zzzzzzzzzzzzzzzzzzzz",
            b"x\x9cnonsense",
            b"\x28\xb5\x2f\xfdzzzz",
            b"x",
            b"",
        ] {
            for size in [1, 100] {
                let text = [start, &noise(3000)].concat();
                let mut scrubber = scrubber();
                scrubber.expect_body(&[]).unwrap();
                let mut out = Vec::new();
                for piece in text.chunks(size) {
                    out.extend_from_slice(
                        &scrubber.pass(Some(&Bytes::copy_from_slice(piece)), false).unwrap(),
                    );
                }
                out.extend_from_slice(&scrubber.pass(None, true).unwrap());
                assert!(out == text, "{} by {size}", start.escape_ascii());
            }
        }
    }
}
