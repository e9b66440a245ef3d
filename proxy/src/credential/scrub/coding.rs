//! Decodes the content codings of HTTP, so that what they hide can be searched: gzip, deflate, br and zstd, at most two
//! of them. What is decoded at once, and the memory for it, is bounded.

use std::io::{self, Write};

use brotli_decompressor::DecompressorWriter;
use bytes::Bytes;
use flate2::write::MultiGzDecoder;
use flate2::{Decompress, FlushDecompress, Status};
use zstd::stream::raw::{DParameter, Decoder, InBuffer, Operation, OutBuffer};

/// Most codings on top of each other.
pub(crate) const MAX_CODINGS: usize = 2;
/// Most bytes that one piece of a body may become: 64 times the largest piece.
pub(crate) const MAX_DECODED: usize = 4 << 20;
/// Largest window of brotli and zstd, as a power of two.
const MAX_WINDOW_LOG: u32 = 23;
/// The same in bytes.
pub(crate) const MAX_DECODER_WINDOW: u64 = 1 << MAX_WINDOW_LOG;
/// Buffer of a decoder.
const BUFFER: usize = 16 << 10;
/// Memory of a decoder besides its window.
pub(crate) const DECODER_BYTES: u64 = 128 << 10;

/// A content coding.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Coding {
    Brotli,
    Deflate,
    Gzip,
    Zstd,
}

/// Why a body cannot be decoded.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum DecodeError {
    #[error("its content is not encoded as it says, or is incomplete")]
    Corrupt,
    #[error("a piece of it becomes more than {} MiB", MAX_DECODED >> 20)]
    Bomb,
    #[error("it needs a window of more than {} MiB", 1 << (MAX_WINDOW_LOG - 20))]
    Window,
}

/// Decodes a body.
pub(crate) struct ContentDecoder {
    /// The coding that was applied last comes first.
    layers: Vec<Layer>,
    /// The largest window of each.
    windows: Vec<u64>,
}

enum Layer {
    Brotli(Box<DecompressorWriter<Output>>, Begin),
    /// Servers send both the format of zlib and bare deflate; the first bytes tell.
    Deflate(Vec<u8>),
    Inflate(Decompress, StreamState),
    Gzip(MultiGzDecoder<Output>, Begin),
    Zstd(Decoder<'static>, FrameState),
}

/// Whether a layer has seen anything.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Begin {
    Waiting,
    Begun,
}

/// Whether a stream of deflate is complete.
#[derive(Clone, Copy, PartialEq, Eq)]
enum StreamState {
    Open,
    Ended,
}

/// Where a decoder of zstd is.
#[derive(Clone, Copy, PartialEq, Eq)]
enum FrameState {
    Between,
    Within,
}

/// Collects what a decoder writes, up to a bound.
#[derive(Default)]
struct Output {
    bytes: Vec<u8>,
    full: bool,
}

impl Coding {
    /// Parses the name of a coding as `Content-Encoding` has it.
    pub(crate) fn parse(name: &str) -> Option<Self> {
        match name.to_ascii_lowercase().as_str() {
            "br" => Some(Coding::Brotli),
            "deflate" => Some(Coding::Deflate),
            "gzip" | "x-gzip" => Some(Coding::Gzip),
            "zstd" => Some(Coding::Zstd),
            _ => None,
        }
    }

    /// Recognises compressed content by its first bytes; `None` if it is something else.
    pub(super) fn sniff(start: &[u8]) -> Option<Self> {
        match start {
            [0x1f, 0x8b, 8, ..] => Some(Coding::Gzip),
            [0x28, 0xb5, 0x2f, 0xfd, ..] => Some(Coding::Zstd),
            [0x78, flags @ (0x01 | 0x5e | 0x9c | 0xda), ..] if is_zlib(0x78, *flags) => Some(Coding::Deflate),
            _ => None,
        }
    }
}

impl ContentDecoder {
    /// Takes codings in the order in which they were applied.
    pub(crate) fn new(codings: &[Coding]) -> Result<Self, DecodeError> {
        let layers: Result<Vec<Layer>, _> = codings.iter().rev().map(|coding| Layer::new(*coding)).collect();
        Ok(ContentDecoder { layers: layers?, windows: vec![0; codings.len()] })
    }

    /// Decodes the next piece of a body. Every byte that can be decoded is returned at once.
    pub(crate) fn decode(&mut self, piece: &[u8], last: bool) -> Result<Bytes, DecodeError> {
        let mut bytes = Bytes::copy_from_slice(piece);
        for (layer, window) in self.layers.iter_mut().zip(&mut self.windows) {
            *window = (*window).max(layer.window(&bytes));
            let mut decoded = layer.feed(&bytes)?;
            if last {
                decoded.extend(layer.finish()?);
            }
            bytes = Bytes::from(decoded);
        }
        Ok(bytes)
    }

    /// The memory that it takes: what it needs besides its windows, and these.
    pub(crate) fn memory(&self) -> u64 {
        self.windows.iter().map(|window| DECODER_BYTES + window).sum()
    }
}

impl Layer {
    fn new(coding: Coding) -> Result<Self, DecodeError> {
        Ok(match coding {
            Coding::Brotli => {
                Layer::Brotli(Box::new(DecompressorWriter::new(Output::default(), BUFFER)), Begin::Waiting)
            }
            Coding::Deflate => Layer::Deflate(Vec::new()),
            Coding::Gzip => Layer::Gzip(MultiGzDecoder::new(Output::default()), Begin::Waiting),
            Coding::Zstd => {
                let mut decoder = Decoder::new().map_err(|_| DecodeError::Corrupt)?;
                let bounded = decoder.set_parameter(DParameter::WindowLogMax(MAX_WINDOW_LOG));
                bounded.map_err(|_| DecodeError::Corrupt)?;
                Layer::Zstd(decoder, FrameState::Between)
            }
        })
    }

    /// The window that a piece says the decoder needs.
    fn window(&self, piece: &[u8]) -> u64 {
        match self {
            Layer::Brotli(_, Begin::Waiting) => 1 << brotli_window_log(piece).min(MAX_WINDOW_LOG),
            Layer::Zstd(_, FrameState::Between) if !piece.is_empty() => {
                zstd_window(piece).unwrap_or(1 << MAX_WINDOW_LOG)
            }
            Layer::Brotli(..)
            | Layer::Deflate(_)
            | Layer::Gzip(..)
            | Layer::Inflate(..)
            | Layer::Zstd(..) => 0,
        }
    }

    fn feed(&mut self, piece: &[u8]) -> Result<Vec<u8>, DecodeError> {
        if piece.is_empty() {
            return Ok(Vec::new());
        }
        match self {
            Layer::Brotli(decoder, begin) => {
                if *begin == Begin::Waiting && brotli_window_log(piece) > MAX_WINDOW_LOG {
                    return Err(DecodeError::Window);
                }
                *begin = Begin::Begun;
                let written = decoder.write_all(piece).and_then(|()| decoder.flush());
                decoder.get_mut().take(written)
            }
            Layer::Deflate(start) => {
                start.extend_from_slice(piece);
                let [first, second, ..] = start[..] else { return Ok(Vec::new()) };
                let start = std::mem::take(start);
                *self = Layer::Inflate(Decompress::new(is_zlib(first, second)), StreamState::Open);
                self.feed(&start)
            }
            Layer::Inflate(decoder, state) => inflate(decoder, state, piece),
            Layer::Gzip(decoder, begin) => {
                *begin = Begin::Begun;
                let written = decoder.write_all(piece).and_then(|()| decoder.flush());
                decoder.get_mut().take(written)
            }
            Layer::Zstd(decoder, state) => run_zstd(decoder, state, piece),
        }
    }

    /// Checks that the content is complete, and returns what was left of it.
    fn finish(&mut self) -> Result<Vec<u8>, DecodeError> {
        match self {
            // A response without content has nothing to decode.
            Layer::Brotli(_, Begin::Waiting)
            | Layer::Inflate(_, StreamState::Ended)
            | Layer::Gzip(_, Begin::Waiting)
            | Layer::Zstd(_, FrameState::Between) => Ok(Vec::new()),
            Layer::Deflate(start) if start.is_empty() => Ok(Vec::new()),
            Layer::Deflate(_) | Layer::Inflate(_, StreamState::Open) | Layer::Zstd(_, FrameState::Within) => {
                Err(DecodeError::Corrupt)
            }
            Layer::Brotli(decoder, Begin::Begun) => {
                let closed = decoder.close();
                decoder.get_mut().take(closed)
            }
            Layer::Gzip(decoder, Begin::Begun) => {
                let finished = decoder.try_finish();
                decoder.get_mut().take(finished)
            }
        }
    }
}

fn inflate(decoder: &mut Decompress, state: &mut StreamState, piece: &[u8]) -> Result<Vec<u8>, DecodeError> {
    let mut output = Output::default();
    let mut buffer = vec![0; BUFFER];
    let mut rest = piece;
    loop {
        if *state == StreamState::Ended {
            return if rest.is_empty() { Ok(output.bytes) } else { Err(DecodeError::Corrupt) };
        }
        let before = (decoder.total_in(), decoder.total_out());
        let status = decoder.decompress(rest, &mut buffer, FlushDecompress::None);
        let consumed = (decoder.total_in() - before.0) as usize;
        let produced = (decoder.total_out() - before.1) as usize;
        rest = rest.get(consumed..).unwrap_or_default();
        if output.write_all(buffer.get(..produced).unwrap_or_default()).is_err() {
            return Err(DecodeError::Bomb);
        }
        match status {
            Ok(Status::StreamEnd) => *state = StreamState::Ended,
            Ok(Status::Ok | Status::BufError) if rest.is_empty() && produced < BUFFER => {
                return Ok(output.bytes);
            }
            Ok(Status::Ok) if consumed + produced > 0 => {}
            Ok(Status::Ok | Status::BufError) | Err(_) => return Err(DecodeError::Corrupt),
        }
    }
}

fn run_zstd(
    decoder: &mut Decoder<'static>,
    state: &mut FrameState,
    piece: &[u8],
) -> Result<Vec<u8>, DecodeError> {
    let mut output = Output::default();
    let mut input = InBuffer::around(piece);
    let mut buffer = vec![0; BUFFER];
    loop {
        let mut out = OutBuffer::around(&mut buffer[..]);
        let hint = decoder.run(&mut input, &mut out).map_err(|_| DecodeError::Corrupt)?;
        *state = if hint == 0 { FrameState::Between } else { FrameState::Within };
        let filled = out.pos() == BUFFER;
        let written = output.write_all(out.as_slice());
        if written.is_err() {
            return Err(DecodeError::Bomb);
        }
        if input.pos() == piece.len() && !filled {
            return Ok(output.bytes);
        }
    }
}

impl Output {
    /// Takes what was written, if writing it worked.
    fn take(&mut self, written: io::Result<()>) -> Result<Vec<u8>, DecodeError> {
        match written {
            Ok(()) => Ok(std::mem::take(&mut self.bytes)),
            Err(_) if self.full => Err(DecodeError::Bomb),
            Err(_) => Err(DecodeError::Corrupt),
        }
    }
}

impl Write for Output {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if self.bytes.len() + bytes.len() > MAX_DECODED {
            self.full = true;
            return Err(io::ErrorKind::StorageFull.into());
        }
        self.bytes.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Whether two bytes are the header of zlib (RFC 1950, section 2.2).
fn is_zlib(first: u8, second: u8) -> bool {
    first & 15 == 8 && first >> 4 <= 7 && (u16::from(first) << 8 | u16::from(second)) % 31 == 0
}

/// The size of the window that a stream of brotli begins with, as a power of two (RFC 7932, section 9.1).
fn brotli_window_log(stream: &[u8]) -> u32 {
    let Some(first) = stream.first().map(|first| u32::from(*first)) else { return 0 };
    match (first & 1, first >> 1 & 7, first >> 4 & 7) {
        (0, _, _) => 16,
        (_, 0, 0) => 17,
        (_, 0, 1) => u32::MAX, // large windows, which HTTP does not have
        (_, 0, code) => 8 + code,
        (_, code, _) => 17 + code,
    }
}

/// The size of the window of a frame (RFC 8878, section 3.1.1.1); `None` if the frame does not say it here.
fn zstd_window(frame: &[u8]) -> Option<u64> {
    let descriptor = *frame.get(4)?;
    if descriptor & 0x20 == 0 {
        let (exponent, mantissa) = (frame.get(5)? >> 3, u64::from(frame.get(5)? & 7));
        let base = 1u64 << (10 + exponent);
        return Some(base + base / 8 * mantissa).filter(|window| *window <= 1 << MAX_WINDOW_LOG);
    }
    // A single segment: the window is the whole content.
    let dictionary = [0, 1, 2, 4].get(usize::from(descriptor & 3))?;
    let length = 1usize << (descriptor >> 6);
    let field = frame.get(5 + dictionary..)?.get(..length)?;
    let size = field.iter().rev().fold(0u64, |size, byte| size << 8 | u64::from(*byte));
    Some(if length == 2 { size + 256 } else { size }).filter(|window| *window <= 1 << MAX_WINDOW_LOG)
}

#[cfg(test)]
mod tests {
    use super::*;
    use flate2::Compression;
    use flate2::write::{DeflateEncoder, GzEncoder, ZlibEncoder};

    fn gzip(text: &[u8]) -> Vec<u8> {
        let mut encoder = GzEncoder::new(Vec::new(), Compression::best());
        encoder.write_all(text).unwrap();
        encoder.finish().unwrap()
    }

    fn zlib(text: &[u8]) -> Vec<u8> {
        let mut encoder = ZlibEncoder::new(Vec::new(), Compression::default());
        encoder.write_all(text).unwrap();
        encoder.finish().unwrap()
    }

    fn bare(text: &[u8]) -> Vec<u8> {
        let mut encoder = DeflateEncoder::new(Vec::new(), Compression::default());
        encoder.write_all(text).unwrap();
        encoder.finish().unwrap()
    }

    fn zstd(text: &[u8]) -> Vec<u8> {
        zstd::encode_all(text, 3).unwrap()
    }

    /// `brotli -q 1` of "hello hello hello hello\n", as one meta-block that is not compressed.
    fn brotli(text: &[u8]) -> Vec<u8> {
        // WBITS 16 (0), not the last, 4 nibbles of length (00), the length, not compressed (1).
        let bits = (text.len() as u32 - 1) << 4 | 1 << 20;
        let mut bytes = bits.to_le_bytes()[..3].to_vec();
        bytes.extend_from_slice(text);
        bytes.push(3); // the last, and empty
        bytes
    }

    fn decode(codings: &[Coding], bytes: &[u8], size: usize) -> Result<Vec<u8>, DecodeError> {
        let mut decoder = ContentDecoder::new(codings)?;
        let mut out = Vec::new();
        for piece in bytes.chunks(size) {
            out.extend_from_slice(&decoder.decode(piece, false)?);
        }
        out.extend_from_slice(&decoder.decode(b"", true)?);
        Ok(out)
    }

    #[test]
    fn each_coding_is_decoded_in_pieces_of_any_size() {
        let text = b"{\"hello\": \"sandbox\"}".repeat(300);
        let members = [gzip(&text[..1000]), gzip(&text[1000..])].concat();
        let frames = [zstd(&text[..1000]), zstd(&text[1000..])].concat();
        for (what, codings, bytes) in [
            ("gzip", &[Coding::Gzip][..], gzip(&text)),
            ("two members", &[Coding::Gzip], members),
            ("zlib", &[Coding::Deflate], zlib(&text)),
            ("deflate", &[Coding::Deflate], bare(&text)),
            ("zstd", &[Coding::Zstd], zstd(&text)),
            ("two frames", &[Coding::Zstd], frames),
            ("brotli", &[Coding::Brotli], brotli(&text)),
            ("stacked", &[Coding::Gzip, Coding::Zstd], zstd(&gzip(&text))),
        ] {
            for size in [1, 7, bytes.len()] {
                assert_eq!(decode(codings, &bytes, size).as_deref(), Ok(&text[..]), "{what} by {size}");
            }
            let cut = decode(codings, &bytes[..bytes.len() - 1], 100);
            assert_eq!(cut, Err(DecodeError::Corrupt), "{what}, incomplete");
            assert_eq!(decode(codings, b"", 1).as_deref(), Ok(&b""[..]), "{what}, without content");
            let mut broken = bytes.clone();
            broken[..2].copy_from_slice(b"zz");
            assert!(decode(codings, &broken, 100).is_err(), "{what}, broken");
        }
    }

    #[test]
    fn what_is_there_is_decoded_at_once() {
        let mut encoder = GzEncoder::new(Vec::new(), Compression::default());
        encoder.write_all(b"data: one\n\n").unwrap();
        encoder.flush().unwrap();
        let mut decoder = ContentDecoder::new(&[Coding::Gzip]).unwrap();
        assert_eq!(decoder.decode(encoder.get_ref(), false).unwrap(), &b"data: one\n\n"[..]);
    }

    #[test]
    fn p17_a_bomb_goes_off_nowhere() {
        let zeros = vec![0; 64 << 20];
        assert_eq!(decode(&[Coding::Gzip], &gzip(&zeros), 64 << 10), Err(DecodeError::Bomb));
        assert_eq!(decode(&[Coding::Zstd], &zstd(&zeros), 64 << 10), Err(DecodeError::Bomb));
        assert_eq!(decode(&[Coding::Brotli], &[0x0f, 0], 64), Err(DecodeError::Window));
        assert_eq!(decode(&[Coding::Brotli], &[0x11, 0], 64), Err(DecodeError::Window));
        let long = zstd::stream::Encoder::new(Vec::new(), 1).and_then(|mut encoder| {
            encoder.window_log(24)?;
            encoder.write_all(&zeros[..1000])?;
            encoder.finish()
        });
        assert_eq!(
            decode(&[Coding::Zstd], &long.unwrap(), 1000),
            Err(DecodeError::Corrupt),
            "the window is too large"
        );
    }

    #[test]
    fn the_first_bytes_tell() {
        for (bytes, coding) in [
            (gzip(b"x"), Some(Coding::Gzip)),
            (zlib(b"x"), Some(Coding::Deflate)),
            (zstd(b"x"), Some(Coding::Zstd)),
            (b"PK\x03\x04".to_vec(), None),
            (b"xylophone".to_vec(), None),
            (b"{\"a\"".to_vec(), None),
        ] {
            assert_eq!(Coding::sniff(&bytes), coding, "{}", bytes.escape_ascii());
        }
    }
}
