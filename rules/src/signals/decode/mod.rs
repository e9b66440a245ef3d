//! Decoders for content within content, bounded in depth, size and time.
//!
//! Each works in pieces and keeps a few bytes between them; nothing is decoded to a whole.

pub(crate) mod alphabet;
pub(crate) mod compressed;
pub(crate) mod escapes;
pub(crate) mod runs;

pub use self::compressed::{FREE_EXPANSION, MAX_EXPANSION, MAX_MEMBERS, STREAM_BYTES};

/// How many encodings deep content is decoded.
pub const MAX_DEPTH: usize = 2;
/// Decompressed bytes per request, all views together.
pub const MAX_DECOMPRESSED: u64 = 64 << 20;

/// What did not decode.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DecodeTrouble {
    /// Compressed streams that are corrupt.
    pub corrupt: u32,
    /// Compressed streams without their end.
    pub truncated: u32,
    /// Compressed streams that expand like a bomb.
    pub expansion: u32,
    /// Runs and streams left undecoded because the request used up a bound.
    pub over_budget: u32,
}

/// Why a stream ends early.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Trouble {
    Budget,
    Corrupt,
    Expansion,
    Truncated,
}

impl DecodeTrouble {
    pub(crate) fn count(&mut self, trouble: Trouble) {
        let counter = match trouble {
            Trouble::Budget => &mut self.over_budget,
            Trouble::Corrupt => &mut self.corrupt,
            Trouble::Expansion => &mut self.expansion,
            Trouble::Truncated => &mut self.truncated,
        };
        *counter = counter.saturating_add(1);
    }
}
