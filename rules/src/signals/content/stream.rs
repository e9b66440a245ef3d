//! Compressed streams, decompressed into views.

use super::origin::OriginMap;
use super::view::View;
use super::{Shared, UndecidedTail};
use crate::signals::Encoding;
use crate::signals::decode::Trouble;
use crate::signals::decode::compressed::{Inflater, LOOKAHEAD, Magic, StreamMemory, StreamSink, magic};

/// Why a stream is given up that yields far more than it has.
const BOMB: &str = "it expands like a bomb";

/// A stream that is being decompressed.
pub(super) struct Decompression {
    inflater: Inflater,
    encoding: Encoding,
    /// Open from the first decompressed byte on: most bytes that look like a stream never yield one.
    view: Option<View>,
    /// Where the stream begins in the enclosing view, and where what it yields comes from.
    begin: u64,
    origin: OriginMap,
}

/// Whether a stream is one because the client says so. Else it only looks like one, and may be cut, as parts of an upload
/// are.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum StreamSource {
    Declared,
    Magic,
}

/// A view that is compressed as a whole.
pub(super) enum Compressed {
    /// The first bytes, too few to tell.
    Unknown(Vec<u8>),
    /// Compressed, as the caller said.
    Declared(Encoding),
    Stream(Box<Decompression>, StreamSource),
    /// Not compressed, or at its end.
    No,
}

struct ViewSink<'a> {
    view: &'a mut Option<View>,
    origin: &'a mut OriginMap,
    begin: u64,
    encoding: Encoding,
    around: &'a [Encoding],
    shared: &'a mut Shared,
}

impl StreamSink for ViewSink<'_> {
    fn open(&mut self) -> Option<StreamMemory> {
        self.shared.open_stream()
    }

    fn take(&mut self, piece: &[u8], from: u64) -> bool {
        if self.view.is_none() {
            *self.view = self.shared.open_view(self.around, self.encoding);
        }
        match self.view {
            Some(view) if self.shared.charge_decompressed(piece.len()) => {
                self.origin.mark(self.begin + from);
                self.origin.add(piece.len());
                view.feed(piece, self.shared);
                true
            }
            Some(_) | None => false,
        }
    }
}

impl Decompression {
    /// Begins with the stream at `begin` of a view.
    pub(super) fn new(inflater: Inflater, encoding: Encoding, begin: u64) -> Self {
        let mut origin = OriginMap::default();
        origin.begin(begin);
        Decompression { inflater, encoding, view: None, begin, origin }
    }

    /// Decompresses `bytes`. The budget counts itself.
    pub(super) fn feed(
        &mut self,
        bytes: &[u8],
        around: &[Encoding],
        shared: &mut Shared,
    ) -> Result<(), Trouble> {
        let Decompression { inflater, encoding, view, begin, origin } = self;
        let mut sink = ViewSink { view, origin, begin: *begin, encoding: *encoding, around, shared };
        let result = inflater.feed(bytes, &mut sink);
        if result == Err(Trouble::Expansion) {
            shared.give_up(Trouble::Expansion, BOMB);
        }
        result
    }

    pub(super) fn inflater(&self) -> &Inflater {
        &self.inflater
    }

    pub(super) fn close(&mut self, shared: &mut Shared) {
        if let Some(view) = self.view.take() {
            shared.close_view(view);
        }
    }

    /// Returns how many of the `offset` bytes of the enclosing view to hold back.
    pub(super) fn undecided(&self, offset: u64, tail: UndecidedTail) -> u64 {
        let unread = match tail {
            UndecidedTail::Possible => LOOKAHEAD.min(offset - self.begin.min(offset)),
            UndecidedTail::Begun => 0,
        };
        match self.view.as_ref().map_or(0, |view| view.undecided(tail)) {
            0 => unread,
            undecided => (offset - self.origin.origin(undecided).min(offset)).max(unread),
        }
    }
}

impl Compressed {
    pub(super) fn feed(&mut self, bytes: &[u8], around: &[Encoding], shared: &mut Shared) {
        match self {
            Compressed::No => {}
            Compressed::Declared(encoding) => {
                *self = Compressed::begin(*encoding, StreamSource::Declared);
                self.inflate(bytes, around, shared);
            }
            Compressed::Unknown(head) => {
                let early = head.len();
                head.extend_from_slice(bytes.get(..bytes.len().min(3)).unwrap_or_default());
                let head = std::mem::take(head);
                *self = match magic(&head) {
                    Magic::Unknown => {
                        *self = Compressed::Unknown(head);
                        return;
                    }
                    Magic::Gzip => Compressed::begin(Encoding::Gzip, StreamSource::Magic),
                    Magic::Zlib => Compressed::begin(Encoding::Deflate, StreamSource::Magic),
                    Magic::None => Compressed::No,
                };
                self.inflate(head.get(..early).unwrap_or_default(), around, shared);
                self.inflate(bytes, around, shared);
            }
            Compressed::Stream(..) => self.inflate(bytes, around, shared),
        }
    }

    fn begin(encoding: Encoding, source: StreamSource) -> Self {
        match encoding {
            Encoding::Gzip | Encoding::Deflate => {
                let inflater = Inflater::new(encoding, source == StreamSource::Declared);
                Compressed::Stream(Box::new(Decompression::new(inflater, encoding, 0)), source)
            }
            Encoding::Base32
            | Encoding::Base64
            | Encoding::Base64Url
            | Encoding::Hex
            | Encoding::HtmlEscapes
            | Encoding::JsonEscapes
            | Encoding::Percent => Compressed::No,
        }
    }

    fn inflate(&mut self, bytes: &[u8], around: &[Encoding], shared: &mut Shared) {
        let Compressed::Stream(stream, source) = self else { return };
        match (stream.feed(bytes, around, shared), *source) {
            (Ok(()) | Err(Trouble::Budget | Trouble::Expansion), _) => {}
            (Err(trouble), StreamSource::Declared) => shared.give_up(trouble, "its compression is corrupt"),
            (Err(trouble), StreamSource::Magic) => shared.trouble.count(trouble),
        }
        if stream.inflater().is_over() {
            stream.close(shared);
            *self = Compressed::No;
        }
    }

    pub(super) fn finish(&mut self, shared: &mut Shared) {
        if let Compressed::Stream(mut stream, source) = std::mem::replace(self, Compressed::No) {
            match (stream.inflater().is_complete(), source) {
                (true, _) => {}
                (false, StreamSource::Declared) => {
                    shared.give_up(Trouble::Truncated, "its compression ends early");
                }
                (false, StreamSource::Magic) => shared.trouble.count(Trouble::Truncated),
            }
            stream.close(shared);
        }
    }

    pub(super) fn undecided(&self, offset: u64, tail: UndecidedTail) -> u64 {
        match self {
            Compressed::Unknown(head) => tail.at_least(head.len()) as u64,
            Compressed::Declared(_) | Compressed::No => 0,
            Compressed::Stream(stream, _) => stream.undecided(offset, tail),
        }
    }
}
