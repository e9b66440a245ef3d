//! Validates the framing of a chunked request body as it streams through (RFC 9112, section 7.1), so that every server
//! finds the same end: sizes are hexadecimal digits, lines end with CRLF, extensions contain no line end. A body with
//! trailers is refused: Pingora cannot forward them, and would lose them without a word.

/// Digits of the largest chunk size: 60 bits, which do not overflow in any server.
const MAX_SIZE_DIGITS: usize = 15;
/// Bytes of extensions on one size line. Pingora drops them, so few are enough.
const MAX_IGNORED_BYTES: usize = 4096;

/// Why the framing of a body was refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ChunkFault {
    #[error("a line in the chunked body does not end with CRLF")]
    LineEnd,
    #[error("a chunk size is missing or is not a hexadecimal number")]
    Size,
    #[error("chunk extensions are longer than {MAX_IGNORED_BYTES} bytes")]
    TooLong,
    #[error("the body has trailers, which Sandbar cannot forward")]
    Trailers,
}

/// An incremental validator of a chunked body.
///
/// It runs beside Pingora's own chunk parser, on the same bytes, at most a block before Pingora reads them, and changes
/// none of them.
/// Pingora parses size lines with `httparse`, which is lenient: a line without any digit is size zero, and an
/// extension may contain every byte, a bare LF included, up to the next CRLF. A stricter or laxer parser finds the end
/// of such a body elsewhere and takes the rest for a request, which is how request smuggling works. Pingora decodes
/// the body and writes its own framing upstream, which should repair all of this; we do not rely on it, refuse such
/// framing, and record the fault.
///
/// The second pass is cheap, because it skips chunk data. Decoding the body ourselves instead would replace Pingora's
/// parser with one that is less tested.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ChunkValidator {
    state: ChunkState,
    /// Bytes of chunk data that are still to come. While the size line is read, the size so far.
    remaining: u64,
    /// Digits of the size, or bytes of the extensions, so far.
    length: usize,
    /// Bytes of chunk data so far.
    data: u64,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum ChunkState {
    Data,
    /// After the data, before the CR.
    DataEnd,
    /// After the CR that ends data.
    DataLf,
    Done,
    Extension,
    /// After the CR of the last line.
    LastLf,
    #[default]
    Size,
    /// After the CR that ends a size line.
    SizeLf,
    /// After the last chunk, before the empty line.
    TrailerStart,
}

impl ChunkValidator {
    /// Validates the next bytes of the body, and returns how many of them belong to it: those after its end belong to
    /// the next request.
    ///
    /// # Errors
    ///
    /// Returns [`ChunkFault`] for framing that another parser could read differently.
    pub fn validate(&mut self, mut bytes: &[u8]) -> Result<usize, ChunkFault> {
        let length = bytes.len();
        while self.state != ChunkState::Done {
            if self.state == ChunkState::Data {
                let taken = usize::try_from(self.remaining).unwrap_or(usize::MAX).min(bytes.len());
                self.remaining -= taken as u64;
                self.data += taken as u64;
                bytes = bytes.get(taken..).unwrap_or_default();
                if self.remaining == 0 {
                    self.state = ChunkState::DataEnd;
                }
            }
            let [first, rest @ ..] = bytes else { return Ok(length) };
            self.state = self.step(*first)?;
            bytes = rest;
        }
        Ok(length - bytes.len())
    }

    /// Returns how many bytes of chunk data were validated.
    pub(super) fn data_bytes(&self) -> u64 {
        self.data
    }

    pub fn is_done(&self) -> bool {
        self.state == ChunkState::Done
    }

    fn step(&mut self, byte: u8) -> Result<ChunkState, ChunkFault> {
        match (self.state, byte) {
            (ChunkState::Size, _) => self.step_size(byte),
            (ChunkState::Extension, b'\r') => Ok(ChunkState::SizeLf),
            (ChunkState::Extension, _) => self.step_extension(byte),
            (ChunkState::TrailerStart, b'\r') => Ok(ChunkState::LastLf),
            (ChunkState::TrailerStart, b'\n') => Err(ChunkFault::LineEnd),
            (ChunkState::TrailerStart, _) => Err(ChunkFault::Trailers),
            (ChunkState::DataEnd, b'\r') => Ok(ChunkState::DataLf),
            (ChunkState::DataLf, b'\n') => {
                (self.remaining, self.length) = (0, 0);
                Ok(ChunkState::Size)
            }
            (ChunkState::SizeLf, b'\n') => {
                self.length = 0;
                Ok(if self.remaining == 0 { ChunkState::TrailerStart } else { ChunkState::Data })
            }
            (ChunkState::LastLf, b'\n') => Ok(ChunkState::Done),
            (
                ChunkState::Data
                | ChunkState::DataEnd
                | ChunkState::DataLf
                | ChunkState::Done
                | ChunkState::LastLf
                | ChunkState::SizeLf,
                _,
            ) => Err(ChunkFault::LineEnd),
        }
    }

    fn step_size(&mut self, byte: u8) -> Result<ChunkState, ChunkFault> {
        let digit = char::from(byte).to_digit(16);
        match (digit, byte) {
            (Some(digit), _) if self.length < MAX_SIZE_DIGITS => {
                self.remaining = self.remaining << 4 | u64::from(digit);
                self.length += 1;
                Ok(ChunkState::Size)
            }
            (None, b'\r') if self.length > 0 => Ok(ChunkState::SizeLf),
            (None, b';' | b' ' | b'\t') if self.length > 0 => {
                self.length = 0;
                Ok(ChunkState::Extension)
            }
            _ => Err(ChunkFault::Size),
        }
    }

    fn step_extension(&mut self, byte: u8) -> Result<ChunkState, ChunkFault> {
        self.length += 1;
        match byte {
            _ if self.length > MAX_IGNORED_BYTES => Err(ChunkFault::TooLong),
            b'\t' | b' '..=b'~' | 0x80.. => Ok(ChunkState::Extension),
            _ => Err(ChunkFault::LineEnd),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_body_has_one_reading_however_it_is_split() {
        let long = format!("1;{}\r\nx\r\n0\r\n\r\n", "e".repeat(5000));
        for (text, expected) in [
            ("0\r\n\r\n", Ok((5, true))),
            ("3\r\nabc\r\n0\r\n\r\n", Ok((13, true))),
            ("A\r\n0123456789\r\n0\r\n\r\nGET / HTTP/1.1\n", Ok((20, true))),
            ("3;a=b\r\nabc\r\n00 \r\n\r\n", Ok((19, true))),
            ("3\r\nabc\r\n0\r\nX: y\r\n\r\n", Err(ChunkFault::Trailers)),
            ("0\r\n X: y\r\n\r\n", Err(ChunkFault::Trailers)),
            ("3\r\nab", Ok((5, false))),
            ("3\r\nabc\r\n0\r\n", Ok((11, false))),
            ("\r\n", Err(ChunkFault::Size)),
            ("0x3\r\n", Err(ChunkFault::Size)),
            ("+3\r\n", Err(ChunkFault::Size)),
            (" 3\r\n", Err(ChunkFault::Size)),
            (";a\r\n", Err(ChunkFault::Size)),
            ("3\n", Err(ChunkFault::Size)),
            ("1000000000000000\r\n", Err(ChunkFault::Size)),
            ("3\rx", Err(ChunkFault::LineEnd)),
            ("3;a\nabc\r\n", Err(ChunkFault::LineEnd)),
            ("3;a\rb\r\n", Err(ChunkFault::LineEnd)),
            ("3\r\nabc\n", Err(ChunkFault::LineEnd)),
            ("2\r\nabc\r\n", Err(ChunkFault::LineEnd)),
            ("0\r\nX: y\n\r\n", Err(ChunkFault::Trailers)),
            ("0\r\n\n", Err(ChunkFault::LineEnd)),
            (&*long, Err(ChunkFault::TooLong)),
        ] {
            let whole = |chunks: &mut ChunkValidator| chunks.validate(text.as_bytes());
            let single = |chunks: &mut ChunkValidator| {
                text.as_bytes().iter().try_fold(0, |sum, byte| Ok(sum + chunks.validate(&[*byte])?))
            };
            for pass in [&whole as &dyn Fn(&mut ChunkValidator) -> _, &single] {
                let mut chunks = ChunkValidator::default();
                assert_eq!(pass(&mut chunks).map(|used| (used, chunks.is_done())), expected, "{text:?}");
            }
        }
    }
}
