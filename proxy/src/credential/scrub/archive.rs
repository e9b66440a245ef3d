//! Searches a body that is compressed without saying so, as archives are. A copy is decoded and searched; the bytes
//! themselves pass as they are, each once what it decodes to was searched.

use bytes::{Bytes, BytesMut};

use super::ResponseScrubber;
use super::coding::{Coding, ContentDecoder, DecodeError};

/// First bytes by which a format is recognised.
const MAGIC: usize = 4;
/// Bytes decoded at once: the most compressible ones become less than a MiB.
const SLICE: usize = 1 << 10;

/// The body contains a credential, or cannot be searched.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum ArchiveError {
    #[error("a credential is in its compressed content")]
    Echo,
    #[error(transparent)]
    Decode(#[from] DecodeError),
}

/// The search of one body.
pub(super) enum ArchiveSearch {
    /// The format is not known yet.
    Waiting(BytesMut),
    Decoding(Box<Decoding>),
    /// Not compressed, or not any more.
    Off,
}

pub(super) struct Decoding {
    decoder: ContentDecoder,
    scrubber: ResponseScrubber,
    /// Bytes whose content may be the start of an echo.
    held: BytesMut,
    /// What a slice became at most.
    most: usize,
}

impl ArchiveSearch {
    pub(super) fn new() -> Self {
        ArchiveSearch::Waiting(BytesMut::new())
    }

    /// Searches a body that says how it is encoded.
    pub(super) fn declared(codings: &[Coding], answer: &ResponseScrubber) -> Result<Self, ArchiveError> {
        Ok(ArchiveSearch::Decoding(Box::new(Decoding::new(codings, answer)?)))
    }

    /// Takes the next piece, and returns what may be passed on. Tells `answer` what was found.
    pub(super) fn pass(
        &mut self,
        piece: &Bytes,
        last: bool,
        answer: &mut ResponseScrubber,
    ) -> Result<Bytes, ArchiveError> {
        let waited = match self {
            ArchiveSearch::Off => return Ok(piece.clone()),
            ArchiveSearch::Decoding(decoding) => {
                let passed = decoding.pass(piece, last, answer)?;
                return Ok(self.end_if_over(passed));
            }
            ArchiveSearch::Waiting(waited) => {
                waited.extend_from_slice(piece);
                if waited.len() < MAGIC && !last {
                    return Ok(Bytes::new());
                }
                std::mem::take(waited).freeze()
            }
        };
        let Some(coding) = Coding::sniff(&waited) else {
            *self = ArchiveSearch::Off;
            return Ok(waited);
        };
        let mut decoding = Decoding::new(&[coding], answer)?;
        let passed = decoding.pass(&waited, last, answer)?;
        *self = ArchiveSearch::Decoding(Box::new(decoding));
        Ok(self.end_if_over(passed))
    }

    /// The memory that decoding a copy takes.
    pub(super) fn memory(&self) -> u64 {
        match self {
            ArchiveSearch::Decoding(decoding) => decoding.decoder.memory() + decoding.most as u64,
            ArchiveSearch::Off | ArchiveSearch::Waiting(_) => 0,
        }
    }

    fn end_if_over(&mut self, passed: Passed) -> Bytes {
        match passed {
            Passed::On(bytes) => bytes,
            Passed::Over(bytes) => {
                *self = ArchiveSearch::Off;
                bytes
            }
        }
    }
}

/// What may be passed on.
enum Passed {
    On(Bytes),
    /// The rest is not of the format that the start announced.
    Over(Bytes),
}

impl Decoding {
    fn new(codings: &[Coding], answer: &ResponseScrubber) -> Result<Self, ArchiveError> {
        let decoder = ContentDecoder::new(codings)?;
        Ok(Decoding { decoder, scrubber: answer.fresh(), held: BytesMut::new(), most: 0 })
    }

    fn pass(
        &mut self,
        piece: &Bytes,
        last: bool,
        answer: &mut ResponseScrubber,
    ) -> Result<Passed, ArchiveError> {
        let before = self.held.len();
        self.held.extend_from_slice(piece);
        let mut fresh = 0;
        let mut slices = piece.chunks(SLICE).peekable();
        let mut over = false;
        while let Some(slice) = slices.next() {
            let end = last && slices.peek().is_none();
            match self.search(slice, end, answer)? {
                Some(decoded) => fresh += decoded,
                None => {
                    over = true;
                    break;
                }
            }
        }
        if last && piece.is_empty() {
            over = self.search(&[], true, answer)?.is_none();
        }
        let passed = match self.scrubber.held_back() {
            1.. if last || over => self.held.split(),
            0 => self.held.split(),
            held_back if held_back <= fresh => self.held.split_to(before),
            _ => BytesMut::new(),
        };
        let passed = passed.freeze();
        Ok(if over { Passed::Over(passed) } else { Passed::On(passed) })
    }

    /// Searches what a slice decodes to, and returns its length; `None` if it is of another format.
    fn search(
        &mut self,
        slice: &[u8],
        last: bool,
        answer: &mut ResponseScrubber,
    ) -> Result<Option<usize>, ArchiveError> {
        let decoded = match self.decoder.decode(slice, last) {
            Ok(decoded) => decoded,
            Err(DecodeError::Corrupt) => return Ok(None),
            Err(error @ (DecodeError::Bomb | DecodeError::Window)) => return Err(error.into()),
        };
        self.most = self.most.max(decoded.len());
        self.scrubber.scrub(Some(&decoded), last);
        match self.scrubber.echo_count() {
            0 => Ok(Some(decoded.len())),
            _ => {
                answer.add_found(&self.scrubber);
                Err(ArchiveError::Echo)
            }
        }
    }
}
