//! Gzip, zlib and raw deflate, in pieces and bounded against bombs.

use miniz_oxide::inflate::stream::{InflateState, inflate};
use miniz_oxide::{DataFormat, MZError, MZFlush, MZStatus};

use super::Trouble;
use crate::signals::Encoding;

/// Decoded bytes per compressed byte above which content is a bomb. Text compresses to a tenth; deflate reaches 1032.
pub const MAX_EXPANSION: u64 = 200;
/// Decoded bytes up to which any expansion is fine.
pub const FREE_EXPANSION: u64 = 1 << 20;
/// Most gzip members in one stream.
pub const MAX_MEMBERS: u32 = 64;
/// Memory of an open stream: its state with the window, and [`PIECE`].
pub const STREAM_BYTES: usize = (size_of::<InflateState>() + PIECE).next_multiple_of(1024);
/// Output buffer.
const PIECE: usize = 8 * 1024;
/// Compressed bytes to read at a time, so that it is known from which of them a piece of output comes.
const INPUT: usize = 1024;
/// Most bytes that a stream has read and not decoded: it reads whole words.
pub(crate) const LOOKAHEAD: u64 = 8;

/// How compressed content begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Magic {
    Gzip,
    Zlib,
    /// These bytes begin neither.
    None,
    /// Too few bytes to tell.
    Unknown,
}

/// Returns how the view that begins with `bytes` is compressed.
pub(crate) fn magic(bytes: &[u8]) -> Magic {
    match bytes {
        [] | [0x1f | 0x78] | [0x1f, 0x8b] => Magic::Unknown,
        [0x1f, 0x8b, 8, ..] => Magic::Gzip,
        [0x78, flags @ (0x01 | 0x5e | 0x9c | 0xda), ..]
            if (0x7800 + u16::from(*flags)).is_multiple_of(31) =>
        {
            Magic::Zlib
        }
        _ => Magic::None,
    }
}

/// How many bytes [`is_gzip_start`] looks at.
pub(crate) const GZIP_START: usize = 4;

/// Returns whether `bytes` begins with the header of a gzip member: its magic, and no reserved flag (RFC 1952, section
/// 2.3.1).
pub(crate) fn is_gzip_start(bytes: &[u8]) -> bool {
    matches!(bytes, [0x1f, 0x8b, 8, 0..=0x1f, ..])
}

/// Takes what a stream decompresses to.
pub(crate) trait StreamSink {
    /// Reserves [`STREAM_BYTES`] for the stream. None if it must not be opened.
    fn open(&mut self) -> Option<StreamMemory>;

    /// Takes the next decompressed bytes, no part of which comes from compressed bytes before `from`. Returns whether it
    /// takes more.
    fn take(&mut self, piece: &[u8], from: u64) -> bool;
}

/// What was reserved for a stream, given back when it is dropped.
pub(crate) type StreamMemory = Box<dyn Send + Sync>;

/// Decompresses one stream.
pub(crate) struct Inflater {
    /// The state of a deflate stream and its output, from the first byte of the stream on.
    work: Option<StreamWork>,
    format: Format,
    /// Bytes read, with headers and trailers.
    position: u64,
    step: Step,
    members: u32,
    /// Bytes of deflate streams, without headers and trailers.
    consumed: u64,
    produced: u64,
}

struct StreamWork {
    state: Box<InflateState>,
    piece: Box<[u8; PIECE]>,
    _memory: StreamMemory,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Format {
    Gzip,
    /// Gzip that ends with its first member.
    GzipMember,
    /// With a zlib header, as RFC 9110 demands of `deflate`.
    Zlib,
    /// `deflate` as some clients send it. Decided by the first byte.
    Either,
}

/// What comes next in the stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Step {
    /// The fixed part of a gzip header (RFC 1952, section 2.3), with the bytes seen of it and its flags.
    Header(u8, u8),
    /// The length of the extra field, then its bytes.
    ExtraLength(u8, u16, u8),
    Extra(u16, u8),
    /// A name or comment, up to its zero byte.
    Text(u8),
    HeaderChecksum(u8),
    Begin,
    Deflate,
    Trailer(u8),
    Over,
}

const HAS_CHECKSUM: u8 = 2;
const HAS_EXTRA: u8 = 4;
const HAS_NAME: u8 = 8;
const HAS_COMMENT: u8 = 16;

impl Inflater {
    /// Begins a stream of `encoding`, which is [`Encoding::Gzip`] or else deflate.
    pub(crate) fn new(encoding: Encoding, is_declared: bool) -> Inflater {
        let format = match (encoding == Encoding::Gzip, is_declared) {
            (true, _) => Format::Gzip,
            (false, true) => Format::Either,
            (false, false) => Format::Zlib,
        };
        let step = if format == Format::Gzip { Step::Header(0, 0) } else { Step::Begin };
        Inflater { work: None, format, position: 0, step, members: 0, consumed: 0, produced: 0 }
    }

    /// Begins a gzip stream that ends with its first member.
    pub(crate) fn one_member() -> Inflater {
        Inflater { format: Format::GzipMember, ..Inflater::new(Encoding::Gzip, false) }
    }

    /// Returns how many compressed bytes were read, without headers and trailers.
    pub(crate) fn consumed(&self) -> u64 {
        self.consumed
    }

    /// Returns whether the stream is at an end, its own or a forced one.
    pub(crate) fn is_over(&self) -> bool {
        self.step == Step::Over
    }

    /// Returns whether the stream ends here as it should.
    pub(crate) fn is_complete(&self) -> bool {
        matches!(self.step, Step::Over | Step::Header(0, _))
    }

    /// Decompresses `bytes`, a piece at a time.
    pub(crate) fn feed(&mut self, mut bytes: &[u8], sink: &mut impl StreamSink) -> Result<(), Trouble> {
        while !bytes.is_empty() && self.step != Step::Over {
            let rest = match self.step {
                Step::Begin | Step::Deflate => self.inflate(bytes, sink),
                Step::Header(..)
                | Step::ExtraLength(..)
                | Step::Extra(..)
                | Step::Text(_)
                | Step::HeaderChecksum(_)
                | Step::Trailer(_)
                | Step::Over => self.frame(bytes),
            };
            match rest {
                Ok(rest) => {
                    self.position += (bytes.len() - rest.len()) as u64;
                    bytes = rest;
                }
                Err(trouble) => {
                    self.step = Step::Over;
                    return Err(trouble);
                }
            }
        }
        Ok(())
    }

    /// Reads one byte of a header or trailer, or what there is of a field in it.
    fn frame<'a>(&mut self, bytes: &'a [u8]) -> Result<&'a [u8], Trouble> {
        let Some((byte, rest)) = bytes.split_first() else { return Ok(bytes) };
        // Names and extra fields may be long.
        if let Step::Text(_) = self.step
            && *byte != 0
        {
            let end = memchr::memchr(0, bytes).unwrap_or(bytes.len());
            return Ok(bytes.get(end..).unwrap_or_default());
        }
        if let Step::Extra(left @ 2.., flags) = self.step {
            let skipped = usize::from(left - 1).min(bytes.len());
            self.step = Step::Extra(left - skipped as u16, flags);
            return Ok(bytes.get(skipped..).unwrap_or_default());
        }
        self.step = match self.step {
            Step::Header(at, flags) => match (at, byte) {
                (0, 0x1f) | (1, 0x8b) | (2, 8) | (4..=8, _) => Step::Header(at + 1, flags),
                (3, flags) if flags & 0xe0 == 0 => Step::Header(4, *flags),
                (9, _) => self.after(flags, HAS_EXTRA),
                // Bytes after the last member are padding, not a fault.
                (0, _) if self.members > 0 => Step::Over,
                _ => return Err(Trouble::Corrupt),
            },
            Step::ExtraLength(0, _, flags) => Step::ExtraLength(1, u16::from(*byte), flags),
            Step::ExtraLength(_, low, flags) => Step::Extra(low | u16::from(*byte) << 8, flags),
            Step::Extra(_, flags) => self.after(flags, HAS_NAME),
            Step::Text(flags) => self.after(flags, HAS_CHECKSUM),
            Step::HeaderChecksum(0) => Step::HeaderChecksum(1),
            Step::HeaderChecksum(_) => Step::Begin,
            Step::Trailer(7) => Step::Header(0, 0),
            Step::Trailer(at) => Step::Trailer(at + 1),
            step @ (Step::Begin | Step::Deflate | Step::Over) => step,
        };
        // An empty extra field has no byte to read.
        if let Step::Extra(0, flags) = self.step {
            self.step = self.after(flags, HAS_NAME);
        }
        Ok(rest)
    }

    /// Returns the next part of a gzip header that `flags` announce, from `part` on.
    fn after(&self, flags: u8, part: u8) -> Step {
        match part {
            HAS_EXTRA if flags & HAS_EXTRA != 0 => Step::ExtraLength(0, 0, flags & !HAS_EXTRA),
            HAS_EXTRA | HAS_NAME | HAS_CHECKSUM if flags & HAS_NAME != 0 => Step::Text(flags & !HAS_NAME),
            HAS_EXTRA | HAS_NAME | HAS_CHECKSUM if flags & HAS_COMMENT != 0 => {
                Step::Text(flags & !HAS_COMMENT)
            }
            _ if flags & HAS_CHECKSUM != 0 => Step::HeaderChecksum(0),
            _ => Step::Begin,
        }
    }

    fn inflate<'a>(&mut self, bytes: &'a [u8], sink: &mut impl StreamSink) -> Result<&'a [u8], Trouble> {
        if self.work.is_none() {
            let memory = sink.open().ok_or(Trouble::Budget)?;
            let (state, piece) = (InflateState::new_boxed(DataFormat::Raw), Box::new([0; PIECE]));
            self.work = Some(StreamWork { state, piece, _memory: memory });
        }
        let Some(StreamWork { state, piece, .. }) = &mut self.work else { return Err(Trouble::Budget) };
        if self.step == Step::Begin {
            self.members += 1;
            if self.members > MAX_MEMBERS {
                return Err(Trouble::Expansion);
            }
            let is_zlib = match self.format {
                Format::Gzip | Format::GzipMember => false,
                Format::Zlib => true,
                Format::Either => bytes.first().is_some_and(|first| first & 0x8f == 0x08),
            };
            state.reset(if is_zlib { DataFormat::ZLibIgnoreChecksum } else { DataFormat::Raw });
            self.step = Step::Deflate;
        }
        let mut rest = bytes;
        // Output that did not fit comes from the input of an earlier call.
        let mut from = 0;
        loop {
            let input = rest.get(..INPUT).unwrap_or(rest);
            let result = inflate(state, input, &mut piece[..], MZFlush::None);
            self.consumed += result.bytes_consumed as u64;
            self.produced += result.bytes_written as u64;
            rest = rest.get(result.bytes_consumed..).unwrap_or_default();
            let piece = piece.get(..result.bytes_written).unwrap_or_default();
            let place = (self.position + from as u64).saturating_sub(LOOKAHEAD);
            if !piece.is_empty() && !sink.take(piece, place) {
                return Err(Trouble::Budget);
            }
            if self.produced > FREE_EXPANSION && self.produced / self.consumed.max(1) > MAX_EXPANSION {
                return Err(Trouble::Expansion);
            }
            if result.bytes_written < PIECE {
                from = bytes.len() - rest.len();
            }
            match result.status {
                Ok(MZStatus::StreamEnd) => {
                    self.step = if self.format == Format::Gzip { Step::Trailer(0) } else { Step::Over };
                    return Ok(rest);
                }
                // A full buffer may have left output behind, even if all input is taken.
                Ok(MZStatus::Ok) if result.bytes_written == PIECE => {}
                Ok(MZStatus::Ok) | Err(MZError::Buf) if rest.is_empty() => return Ok(rest),
                Ok(MZStatus::Ok) if result.bytes_consumed + result.bytes_written > 0 => {}
                Ok(_) | Err(_) => return Err(Trouble::Corrupt),
            }
        }
    }
}

#[cfg(test)]
pub(in crate::signals) mod tests {
    use miniz_oxide::deflate::{compress_to_vec, compress_to_vec_zlib};

    use super::*;

    pub(in crate::signals) fn gzip(content: &[u8], flags: u8) -> Vec<u8> {
        let mut bytes = vec![0x1f, 0x8b, 8, flags, 0, 0, 0, 0, 0, 3];
        for (flag, part) in [
            (HAS_EXTRA, &b"\x03\0abc"[..]),
            (HAS_NAME, b"name\0"),
            (HAS_COMMENT, b"c\0"),
            (HAS_CHECKSUM, b"zz"),
        ] {
            if flags & flag != 0 {
                bytes.extend_from_slice(part);
            }
        }
        bytes.extend(compress_to_vec(content, 6));
        bytes.extend([0; 8]);
        bytes
    }

    fn expand(inflater: &mut Inflater, bytes: &[u8], piece: usize) -> (Vec<u8>, Option<Trouble>) {
        let mut sink = Collected(Vec::new());
        for piece in bytes.chunks(piece) {
            if let Err(trouble) = inflater.feed(piece, &mut sink) {
                return (sink.0, Some(trouble));
            }
        }
        (sink.0, None)
    }

    struct Collected(Vec<u8>);

    impl StreamSink for Collected {
        fn open(&mut self) -> Option<StreamMemory> {
            Some(Box::new(()))
        }

        fn take(&mut self, piece: &[u8], _from: u64) -> bool {
            self.0.extend_from_slice(piece);
            true
        }
    }

    /// Takes the last `from` at which nothing from `watched` on had been decompressed.
    struct Watcher {
        taken: usize,
        watched: usize,
        from: Option<u64>,
    }

    impl StreamSink for Watcher {
        fn open(&mut self) -> Option<StreamMemory> {
            Some(Box::new(()))
        }

        fn take(&mut self, piece: &[u8], from: u64) -> bool {
            self.taken += piece.len();
            if self.taken > self.watched {
                self.from.get_or_insert(from);
            }
            true
        }
    }

    #[test]
    fn no_output_comes_from_before_its_place() {
        let noise: Vec<u8> = (0..30_000_u32).map(|at| (at.wrapping_mul(2_654_435_761) >> 13) as u8).collect();
        // Without compression: a table of codes at the beginning would depend on all that follows.
        let stored = |content: &[u8]| {
            [&b"\x1f\x8b\x08\0\0\0\0\0\0\x03"[..], &compress_to_vec(content, 0), &[0; 8]].concat()
        };
        for (name, before) in [("nothing", vec![]), ("noise", noise)] {
            let content = |byte: u8| [&before[..], &[byte], b" and what follows it"].concat();
            let (one, other) = (stored(&content(b'a')), stored(&content(b'b')));
            // The first byte of the stream that depends on the watched one.
            let differs = one.iter().zip(&other).position(|(one, other)| one != other).unwrap() as u64;
            for piece in [1, 7, 4096, usize::MAX] {
                let mut watcher = Watcher { taken: 0, watched: before.len(), from: None };
                let mut inflater = Inflater::new(Encoding::Gzip, false);
                one.chunks(piece).for_each(|piece| inflater.feed(piece, &mut watcher).unwrap());
                let from = watcher.from.unwrap();
                assert!(from <= differs, "{name} by {piece}: {from} of {differs}");
                let reach = LOOKAHEAD + 2 * INPUT as u64;
                assert!(differs - from <= reach, "{name} by {piece}: {from} of {differs}");
            }
        }
    }

    #[test]
    fn streams_of_every_kind_expand() {
        let content: Vec<u8> = (0..200_000_u32).flat_map(|at| (at % 1013).to_le_bytes()).collect();
        let two = [gzip(&content, 0), gzip(&content, HAS_NAME)].concat();
        for (name, encoding, is_declared, bytes, copies) in [
            ("gzip", Encoding::Gzip, false, gzip(&content, 0), 1),
            ("gzip with every field", Encoding::Gzip, false, gzip(&content, 30), 1),
            ("gzip with a comment", Encoding::Gzip, false, gzip(&content, HAS_COMMENT | HAS_CHECKSUM), 1),
            ("two members", Encoding::Gzip, false, two, 2),
            ("zlib", Encoding::Deflate, false, compress_to_vec_zlib(&content, 6), 1),
            ("declared zlib", Encoding::Deflate, true, compress_to_vec_zlib(&content, 6), 1),
            ("declared raw", Encoding::Deflate, true, compress_to_vec(&content, 6), 1),
        ] {
            for piece in [1, 7, 4096, usize::MAX] {
                let mut inflater = Inflater::new(encoding, is_declared);
                let (out, trouble) = expand(&mut inflater, &bytes, piece);
                assert!(out == content.repeat(copies), "{name} by {piece}: {} bytes", out.len());
                assert_eq!(trouble, None, "{name}");
                assert!(inflater.is_complete(), "{name}");
            }
        }
    }

    #[test]
    fn bad_streams_end() {
        let zeros = gzip(&vec![0; 64 << 20], 0);
        let (out, trouble) = expand(&mut Inflater::new(Encoding::Gzip, false), &zeros, 4096);
        assert_eq!(trouble, Some(Trouble::Expansion));
        assert!(out.len() < 8 << 20, "{}", out.len());

        let good = gzip(b"some text that is cut, some text that is cut", 0);
        let mut inflater = Inflater::new(Encoding::Gzip, false);
        let (out, trouble) = expand(&mut inflater, &good[..40], 3);
        assert!(!out.is_empty() && trouble.is_none() && !inflater.is_complete());

        for bad in [&b"\x1f\x8b\x08\xe0"[..], b"\x1f\x8b\x09", b"\x1f\x8b\x08\0\0\0\0\0\0\0\xff\xff\xff\xff"]
        {
            let (_, trouble) = expand(&mut Inflater::new(Encoding::Gzip, false), bad, 1);
            assert_eq!(trouble, Some(Trouble::Corrupt), "{bad:?}");
        }
    }
}
