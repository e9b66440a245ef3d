//! A chunked request body, looked at as it passes (RFC 9112, section 7.1) and held to one reading: sizes are
//! hexadecimal digits, lines end with CRLF, and neither sizes nor extensions nor trailers hide a line end.

/// Digits of the largest size that is believed: with them every server can count.
const SIZE_DIGITS: usize = 15;
/// Bytes of extensions on one size line, and of trailers after the last chunk: nobody needs more, and both are dropped.
const SPARE_BYTES: usize = 4096;

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
pub struct Chunks {
    at: At,
    /// Bytes left of the chunk's data; before them, the size as far as it was read.
    left: u64,
    /// Digits of a size, bytes of an extension or of trailers, so far.
    spent: usize,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum At {
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

impl Chunks {
    /// Looks at the next bytes of the body. What follows its end is somebody else's.
    ///
    /// # Errors
    ///
    /// Returns what could be read in more than one way.
    pub fn pass(&mut self, mut bytes: &[u8]) -> Result<(), ChunkFault> {
        while self.at != At::Done {
            if self.at == At::Data {
                let taken = usize::try_from(self.left).unwrap_or(usize::MAX).min(bytes.len());
                self.left -= taken as u64;
                bytes = bytes.get(taken..).unwrap_or_default();
                if self.left == 0 {
                    self.at = At::DataEnd;
                }
            }
            let [first, rest @ ..] = bytes else { return Ok(()) };
            self.at = self.step(*first)?;
            bytes = rest;
        }
        Ok(())
    }

    pub fn is_done(&self) -> bool {
        self.at == At::Done
    }

    fn step(&mut self, byte: u8) -> Result<At, ChunkFault> {
        match (self.at, byte) {
            (At::Size, _) => self.size(byte),
            (At::Extension | At::Trailer, b'\r') => {
                Ok(if self.at == At::Trailer { At::TrailerLf } else { At::SizeLf })
            }
            (At::TrailerStart, b'\r') => Ok(At::LastLf),
            (At::Extension | At::Trailer | At::TrailerStart, _) => self.spare(byte),
            (At::DataEnd, b'\r') => Ok(At::DataLf),
            (At::DataLf, b'\n') => {
                (self.left, self.spent) = (0, 0);
                Ok(At::Size)
            }
            (At::SizeLf, b'\n') => {
                self.spent = 0;
                Ok(if self.left == 0 { At::TrailerStart } else { At::Data })
            }
            (At::TrailerLf, b'\n') => Ok(At::TrailerStart),
            (At::LastLf, b'\n') => Ok(At::Done),
            (
                At::Data
                | At::DataEnd
                | At::DataLf
                | At::Done
                | At::LastLf
                | At::SizeLf
                | At::TrailerLf,
                _,
            ) => Err(ChunkFault::LineEnd),
        }
    }

    fn size(&mut self, byte: u8) -> Result<At, ChunkFault> {
        let digit = char::from(byte).to_digit(16);
        match (digit, byte) {
            (Some(digit), _) if self.spent < SIZE_DIGITS => {
                self.left = self.left << 4 | u64::from(digit);
                self.spent += 1;
                Ok(At::Size)
            }
            (None, b'\r') if self.spent > 0 => Ok(At::SizeLf),
            (None, b';' | b' ' | b'\t') if self.spent > 0 => {
                self.spent = 0;
                Ok(At::Extension)
            }
            _ => Err(ChunkFault::Size),
        }
    }

    /// One byte of what is read over.
    fn spare(&mut self, byte: u8) -> Result<At, ChunkFault> {
        self.spent += 1;
        match byte {
            _ if self.spent > SPARE_BYTES => Err(ChunkFault::TooLong),
            b'\t' | b' '..=b'~' | 0x80.. => {
                Ok(if self.at == At::Extension { At::Extension } else { At::Trailer })
            }
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
            let whole = |chunks: &mut Chunks| chunks.pass(text.as_bytes());
            let single = |chunks: &mut Chunks| {
                text.as_bytes().iter().try_for_each(|byte| chunks.pass(&[*byte]))
            };
            for pass in [&whole as &dyn Fn(&mut Chunks) -> _, &single] {
                let mut chunks = Chunks::default();
                assert_eq!(pass(&mut chunks).map(|()| chunks.is_done()), expected, "{text:?}");
            }
        }
    }
}
