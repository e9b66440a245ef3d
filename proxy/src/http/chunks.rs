//! A chunked request body, looked at as it passes (RFC 9112, section 7.1) and held to one reading: sizes are
//! hexadecimal digits, lines end with CRLF, and neither sizes nor extensions nor trailers hide a line end.

/// Digits of the largest size that is believed: with them every server can count.
const MAX_SIZE_DIGITS: usize = 15;
/// Bytes of extensions on one size line, and of trailers after the last chunk: nobody needs more, and both are dropped.
const MAX_IGNORED_BYTES: usize = 4096;

/// Why a body was refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ChunkFault {
    #[error("a line of a chunk does not end with CRLF")]
    LineEnd,
    #[error("a chunk has no size, or one that is no number")]
    Size,
    #[error("the extensions or trailers of a chunk are too long")]
    TooLong,
}

/// Where in a chunked body we are.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ChunkValidator {
    state: ChunkState,
    /// Bytes left of the chunk's data; before them, the size as far as it was read.
    left: u64,
    /// Digits of a size, bytes of an extension or of trailers, so far.
    spent: usize,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum ChunkState {
    Data,
    /// After the data, before its CR.
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
    Trailer,
    TrailerLf,
    /// Where a trailer, or the last line, begins.
    TrailerStart,
}

impl ChunkValidator {
    /// Looks at the next bytes of the body. What follows its end is somebody else's.
    ///
    /// # Errors
    ///
    /// Returns what could be read in more than one way.
    pub fn validate(&mut self, mut bytes: &[u8]) -> Result<(), ChunkFault> {
        while self.state != ChunkState::Done {
            if self.state == ChunkState::Data {
                let taken = usize::try_from(self.left).unwrap_or(usize::MAX).min(bytes.len());
                self.left -= taken as u64;
                bytes = bytes.get(taken..).unwrap_or_default();
                if self.left == 0 {
                    self.state = ChunkState::DataEnd;
                }
            }
            let [first, rest @ ..] = bytes else { return Ok(()) };
            self.state = self.step(*first)?;
            bytes = rest;
        }
        Ok(())
    }

    pub fn is_done(&self) -> bool {
        self.state == ChunkState::Done
    }

    fn step(&mut self, byte: u8) -> Result<ChunkState, ChunkFault> {
        match (self.state, byte) {
            (ChunkState::Size, _) => self.step_size(byte),
            (ChunkState::Extension | ChunkState::Trailer, b'\r') => {
                Ok(if self.state == ChunkState::Trailer {
                    ChunkState::TrailerLf
                } else {
                    ChunkState::SizeLf
                })
            }
            (ChunkState::TrailerStart, b'\r') => Ok(ChunkState::LastLf),
            (ChunkState::Extension | ChunkState::Trailer | ChunkState::TrailerStart, _) => {
                self.step_ignored(byte)
            }
            (ChunkState::DataEnd, b'\r') => Ok(ChunkState::DataLf),
            (ChunkState::DataLf, b'\n') => {
                (self.left, self.spent) = (0, 0);
                Ok(ChunkState::Size)
            }
            (ChunkState::SizeLf, b'\n') => {
                self.spent = 0;
                Ok(if self.left == 0 { ChunkState::TrailerStart } else { ChunkState::Data })
            }
            (ChunkState::TrailerLf, b'\n') => Ok(ChunkState::TrailerStart),
            (ChunkState::LastLf, b'\n') => Ok(ChunkState::Done),
            (
                ChunkState::Data
                | ChunkState::DataEnd
                | ChunkState::DataLf
                | ChunkState::Done
                | ChunkState::LastLf
                | ChunkState::SizeLf
                | ChunkState::TrailerLf,
                _,
            ) => Err(ChunkFault::LineEnd),
        }
    }

    fn step_size(&mut self, byte: u8) -> Result<ChunkState, ChunkFault> {
        let digit = char::from(byte).to_digit(16);
        match (digit, byte) {
            (Some(digit), _) if self.spent < MAX_SIZE_DIGITS => {
                self.left = self.left << 4 | u64::from(digit);
                self.spent += 1;
                Ok(ChunkState::Size)
            }
            (None, b'\r') if self.spent > 0 => Ok(ChunkState::SizeLf),
            (None, b';' | b' ' | b'\t') if self.spent > 0 => {
                self.spent = 0;
                Ok(ChunkState::Extension)
            }
            _ => Err(ChunkFault::Size),
        }
    }

    /// One byte of what is read over.
    fn step_ignored(&mut self, byte: u8) -> Result<ChunkState, ChunkFault> {
        self.spent += 1;
        match byte {
            _ if self.spent > MAX_IGNORED_BYTES => Err(ChunkFault::TooLong),
            b'\t' | b' '..=b'~' | 0x80.. => Ok(if self.state == ChunkState::Extension {
                ChunkState::Extension
            } else {
                ChunkState::Trailer
            }),
            _ => Err(ChunkFault::LineEnd),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_body_has_one_reading_however_it_is_cut() {
        let long = format!("1;{}\r\nx\r\n0\r\n\r\n", "e".repeat(5000));
        for (text, expected) in [
            ("0\r\n\r\n", Ok(true)),
            ("3\r\nabc\r\n0\r\n\r\n", Ok(true)),
            ("A\r\n0123456789\r\n0\r\n\r\nGET / HTTP/1.1\n", Ok(true)),
            ("3;a=b\r\nabc\r\n00 \r\nX: y\r\nZ: y\r\n\r\n", Ok(true)),
            ("3\r\nab", Ok(false)),
            ("3\r\nabc\r\n0\r\n", Ok(false)),
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
            ("0\r\nX: y\n\r\n", Err(ChunkFault::LineEnd)),
            ("0\r\n\n", Err(ChunkFault::LineEnd)),
            (&*long, Err(ChunkFault::TooLong)),
        ] {
            let whole = |chunks: &mut ChunkValidator| chunks.validate(text.as_bytes());
            let single = |chunks: &mut ChunkValidator| {
                text.as_bytes().iter().try_for_each(|byte| chunks.validate(&[*byte]))
            };
            for pass in [&whole as &dyn Fn(&mut ChunkValidator) -> _, &single] {
                let mut chunks = ChunkValidator::default();
                assert_eq!(pass(&mut chunks).map(|()| chunks.is_done()), expected, "{text:?}");
            }
        }
    }
}
