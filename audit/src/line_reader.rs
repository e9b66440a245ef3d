//! Reading segments line by line, in bounded memory, whatever is in the file.

use std::io::{self, Read};
use std::path::Path;

use sha2::{Digest, Sha256};

use crate::chain::ChainHash;
use crate::record::{LINE_MAX, TornLine};

/// Bytes to read at a time.
const BUFFER: usize = 256 * 1024;

/// The lines of a file.
pub(crate) struct LineReader<R> {
    source: R,
    buffer: Vec<u8>,
    start: usize,
    end: usize,
    /// Bytes handed out so far.
    pub(crate) offset: u64,
}

/// The bytes up to a newline or the end of the file.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum RawLine<'a> {
    /// A line no longer than a record may be, without its newline.
    Line(&'a [u8]),
    /// A line longer than any record.
    Long,
    /// The bytes after the last newline.
    Torn(TornLine),
}

impl<R: Read> LineReader<R> {
    pub(crate) fn new(source: R) -> Self {
        Self { source, buffer: vec![0; BUFFER], start: 0, end: 0, offset: 0 }
    }

    /// Skips a line, but no more than about `limit` bytes: a reader of one span of a file need not look
    /// for a newline beyond it.
    pub(crate) fn skip_line(&mut self, limit: u64) -> io::Result<()> {
        while self.offset <= limit {
            let unread = self.buffer.get(self.start..self.end).unwrap_or_default();
            let newline = memchr::memchr(b'\n', unread);
            let count = newline.map_or(unread.len(), |at| at + 1);
            self.start += count;
            self.offset += count as u64;
            if newline.is_some() || self.fill()? == 0 {
                break;
            }
        }
        Ok(())
    }

    /// Returns the next piece; `None` at the end.
    pub(crate) fn next(&mut self) -> io::Result<Option<RawLine<'_>>> {
        let mut searched = 0;
        loop {
            let unread = self.buffer.get(self.start..self.end).unwrap_or_default();
            if let Some(at) = memchr::memchr(b'\n', unread.get(searched..).unwrap_or_default()) {
                return Ok(Some(self.take_line(searched + at)));
            }
            searched = unread.len();
            if searched >= LINE_MAX {
                return self.skip_long_line().map(Some);
            }
            if self.fill()? == 0 {
                return if searched == 0 { Ok(None) } else { self.skip_long_line().map(Some) };
            }
        }
    }

    fn take_line(&mut self, length: usize) -> RawLine<'_> {
        let start = self.start;
        self.start += length + 1;
        self.offset += length as u64 + 1;
        match self.buffer.get(start..start + length) {
            Some(line) if length < LINE_MAX => RawLine::Line(line),
            _ => RawLine::Long,
        }
    }

    /// Reads more bytes after those not yet handed out.
    fn fill(&mut self) -> io::Result<usize> {
        self.buffer.copy_within(self.start..self.end, 0);
        (self.start, self.end) = (0, self.end - self.start);
        let free = self.buffer.get_mut(self.end..).unwrap_or_default();
        let count = self.source.read(free)?;
        self.end += count;
        Ok(count)
    }

    /// Skips bytes that are not a line of a record's length, up to the next newline or the end.
    fn skip_long_line(&mut self) -> io::Result<RawLine<'_>> {
        let mut hasher = Sha256::new();
        let mut bytes = 0;
        loop {
            let unread = self.buffer.get(self.start..self.end).unwrap_or_default();
            let newline = memchr::memchr(b'\n', unread);
            let count = newline.unwrap_or(unread.len());
            hasher.update(unread.get(..count).unwrap_or_default());
            bytes += count as u64;
            self.start += count + usize::from(newline.is_some());
            self.offset += count as u64 + u64::from(newline.is_some());
            if newline.is_some() {
                return Ok(RawLine::Long);
            }
            if self.fill()? == 0 {
                let hash = ChainHash::from_bytes(&hasher.finalize().into());
                let sha256 = hash.as_str().to_owned();
                return Ok(RawLine::Torn(TornLine { bytes, sha256 }));
            }
        }
    }
}

/// Returns the first line of a file, unless it is longer than a record may be.
pub(crate) fn first_line(path: &Path) -> Option<Vec<u8>> {
    let mut lines = LineReader::new(crate::segment::open_reader(path).ok()?);
    match lines.next().ok()?? {
        RawLine::Line(line) => Some(line.to_vec()),
        RawLine::Long | RawLine::Torn(_) => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read_pieces(bytes: &[u8]) -> Vec<String> {
        let mut lines = LineReader::new(bytes);
        let mut pieces = Vec::new();
        while let Some(piece) = lines.next().unwrap() {
            pieces.push(match piece {
                RawLine::Line(line) => format!("line {}", line.len()),
                RawLine::Long => "long".to_owned(),
                RawLine::Torn(torn) => format!("torn {}", torn.bytes),
            });
        }
        pieces
    }

    #[test]
    fn p17_skipping_looks_no_further_than_it_must() {
        let endless = vec![b'x'; 8 * BUFFER];
        let mut source = endless.as_slice();
        LineReader::new(&mut source).skip_line(10).unwrap();
        assert!(source.len() >= 6 * BUFFER, "only {} bytes are left", source.len());
        let mut lines = LineReader::new(&b"ab\ncd\n"[..]);
        lines.skip_line(10).unwrap();
        assert_eq!(lines.next().unwrap(), Some(RawLine::Line(b"cd")));
    }

    #[test]
    fn p17_any_file_is_read_in_bounded_memory() {
        let long = [vec![b'x'; 3 * BUFFER], b"\nab\n".to_vec()].concat();
        let zeros = [b"a\n".to_vec(), vec![0; 2 * BUFFER]].concat();
        for (bytes, expected) in [
            (&b""[..], vec![]),
            (b"\n", vec!["line 0"]),
            (b"a\nbb\n", vec!["line 1", "line 2"]),
            (b"a\nbb", vec!["line 1", "torn 2"]),
            (&long, vec!["long", "line 2"]),
            (&zeros, vec!["line 1", "torn 524288"]),
            (&[b'y'; LINE_MAX], vec!["torn 16384"]),
            (&[&[b'y'; LINE_MAX][..], b"\n"].concat(), vec!["long"]),
            (&[&[b'y'; LINE_MAX - 1][..], b"\n"].concat(), vec!["line 16383"]),
        ] {
            assert_eq!(read_pieces(bytes), expected, "{} bytes", bytes.len());
        }
    }
}
