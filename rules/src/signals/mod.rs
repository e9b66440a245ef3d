//! Signals: what an attempt says, beside where it goes. Pure detectors over slices of what leaves; the caller passes
//! the time and keeps the state.
//!
//! [`content`] makes one pass over the bytes of a request, raw and decoded, for [`secrets`], [`canary`] and [`flow`].
//! [`bits`] bounds what requests say outside their bodies (P19), and [`shape`] describes how unusual that is.

pub mod bits;
pub mod canary;
pub mod content;
pub mod decode;
pub mod flow;
pub mod secrets;
pub mod settings;
pub mod shape;

use std::fmt;

/// What a policy does about a signal.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum SignalMode {
    Off,
    /// Record a finding and let the attempt pass.
    #[default]
    Flag,
    /// Record a finding and refuse the attempt before the bytes that caused it leave.
    Deny,
}

/// What a detector reports. The code of a finding in the log.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum SignalCode {
    /// Requests at regular intervals, small and alike.
    Beacon,
    /// A canary leaves.
    CanaryUsed,
    /// A part of what leaves could not be searched: it is too costly to decode, or corrupt.
    ContentUnsearched,
    /// A value that Sandbar itself injects leaves.
    CredentialLeaving,
    /// Small amounts that add up over minutes, hours or days.
    Drip,
    /// A long run in the alphabet of an encoding.
    EncodedRun,
    /// What requests said outside their bodies is worth more bits than the budget.
    HeaderBits,
    /// Header field names that this sandbox never sent to this host before.
    FieldNovelty,
    /// More small header fields than usual.
    ManyFields,
    /// Text of a memory bank leaves for a host that may not receive it.
    MemoryFlow,
    /// The placeholder of a credential leaves where it is not replaced.
    PlaceholderMisused,
    /// Something has the shape of a key, a token or a password.
    SecretFound,
    /// Paths or queries that count up.
    Sequence,
    /// Far more is sent to a host than received, compared with the host's own past.
    UploadRatio,
    /// Paths or query values that this sandbox never asked this host for.
    UrlNovelty,
    /// The `User-Agent` changes.
    UserAgentChanged,
}

/// Where in an attempt something was found.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum SignalPlace {
    Method,
    Path,
    Query,
    FieldName,
    /// The value of the field with this name.
    Field(String),
    /// The value of the cookie with this name.
    Cookie(String),
    Body,
    /// A name in DNS, CONNECT, SNI or SOCKS.
    HostName,
    /// The attempt as a whole, or several of them.
    Attempt,
}

/// An encoding that the content was found in.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Encoding {
    Base32,
    Base64,
    Base64Url,
    Deflate,
    Gzip,
    Hex,
    HtmlEscapes,
    JsonEscapes,
    Percent,
}

/// One thing that a detector noticed. Never contains the content itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Signal {
    pub code: SignalCode,
    pub place: SignalPlace,
    /// The encodings around it, outermost first.
    pub encodings: Vec<Encoding>,
    /// What it is, in words for an analyst: `AWS access key`, `canary "deploy-key"`.
    pub what: String,
    /// The measure that `threshold` is compared with; 1 of 1 where there is nothing to measure.
    pub value: u64,
    pub threshold: u64,
}

/// Looks at one view of what leaves, in pieces: the raw bytes of a body, or one decoded run of it.
pub trait ViewMatcher {
    /// Takes the next bytes of the view and adds what they complete to `found`.
    fn feed(&mut self, bytes: &[u8], found: &mut Vec<Signal>);

    /// Ends the view: what needed to see the end is decided now. The matcher is ready for another view afterwards.
    fn finish(&mut self, found: &mut Vec<Signal>);

    /// Returns how many of the last bytes fed may belong to something that is not complete yet. With `deny`, the caller
    /// holds that many back; each matcher names its bound.
    fn undecided(&self) -> usize;

    /// Returns how many of them are the beginning of something already: [`ViewMatcher::undecided`] without bytes that
    /// are kept because any text could go on to match.
    fn begun(&self) -> usize {
        self.undecided()
    }
}

impl fmt::Display for SignalMode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            SignalMode::Off => "off",
            SignalMode::Flag => "flag",
            SignalMode::Deny => "deny",
        })
    }
}
