//! Text of memory banks, recognised when it leaves (P15).
//!
//! Answers of memory services pass through a [`Fingerprinter`] on their way to the sandbox. It keeps hashes of the
//! text in the sandbox's [`FlowTable`], never the text. A [`FlowMatcher`] looks for the same text in what leaves.
//!
//! # What is compared
//!
//! Both sides compare normalised characters: letters and digits only, in lower case. White space, punctuation,
//! symbols and invalid UTF-8 are dropped, so wrapping, quoting and markup change nothing. Full-width ASCII becomes
//! ASCII. Composed and decomposed accents differ, and so do look-alikes of other scripts. Escapes (`\n`, `%20`,
//! base64) are the work of [`super::decode`]: undecoded, the letters of an escape interrupt a run.
//!
//! # The guarantee
//!
//! A verbatim run of at least [`GUARANTEED_RUN`] normalised characters of one recalled text is recognised wherever
//! it stands in what leaves. A run of fewer than [`GRAM`] is never recognised, and one in between may be. Not covered
//! are runs with [`GRAM`] characters in a row of which fewer than [`MIN_DISTINCT`] differ, such as a nil UUID: they
//! say nothing about where they come from.
//!
//! # Why this sampling
//!
//! The table keeps the grams at two consecutive positions of every [`PAIR_DISTANCE`], and the matcher looks at every
//! second position of what leaves: of any two consecutive ones it sees one. Keeping one gram of every 25 and looking
//! at every position has the same guarantee with half the entries, but takes half as long again. Winnowing on both
//! sides needs as many entries as this, because its choice depends on the content, and finding the minimum of each
//! window takes longer than asking a filter that stays in the cache. Keeping every gram needs 12 times the memory.
//!
//! The weakness of sampling by position is that a text that is recalled again behind other text would be sampled at
//! other places. So the fingerprinter recognises pairs that the table has already and continues from there.
//!
//! Hashes are cyclic polynomials of 64 bits over secret values per character. Two given grams of ordinary text
//! collide with a chance of 2^-64, so that 10 GB of unrelated text against a million entries raise a false alarm with
//! a chance below 1 in 2,000. No pair of different grams is worse than 2^-41.

mod matcher;
mod storage;
mod stored;
mod table;
#[cfg(test)]
mod tests;
mod window;

pub use matcher::{FlowMatch, FlowMatcher};
pub use stored::FlowTableError;
pub use table::{Fingerprinter, FlowLimits, FlowSnapshot, FlowTable};
pub use window::FlowKey;

/// How many normalised characters one fingerprint covers.
pub const GRAM: usize = 24;

/// How many characters the starts of two pairs of fingerprints of a text are apart at most.
pub const PAIR_DISTANCE: usize = 24;

/// The shortest run of normalised characters that is always recognised.
pub const GUARANTEED_RUN: usize = GRAM + PAIR_DISTANCE;

/// How many different characters a fingerprint needs.
pub const MIN_DISTINCT: usize = 4;

/// Most fingerprints in a table, about 15 MB of recalled text.
pub const MAX_FINGERPRINTS: usize = 1 << 20;

/// Fingerprints in a table unless the caller says otherwise, about 4 MB of recalled text.
pub const DEFAULT_FINGERPRINTS: usize = 1 << 18;

/// Fingerprints that every table has room for.
pub const MIN_FINGERPRINTS: usize = storage::MIN_CAPACITY;

/// Most banks that a table has labels for; it has one for each 16 fingerprints.
pub const MAX_BANKS: usize = 4096;

/// Most banks that one fingerprint is kept for. The one recalled least recently gives way.
pub const MAX_BANKS_PER_GRAM: usize = 8;

/// Most bytes that a [`FlowMatcher`] asks the caller to hold back.
///
/// A run that is not recognised yet has at most [`GUARANTEED_RUN`] - 1 characters. Together with white space and
/// punctuation they need fewer bytes than this in prose, JSON and code. Where they need more, the beginning of the
/// run has left when its end is recognised, but never the whole of it.
pub const MAX_UNDECIDED: usize = 256;
