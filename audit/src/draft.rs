//! A record on its way into the log: all of the line but its number and its hash.
//!
//! Made by the caller, in the caller's thread, so that whoever holds the log only copies and
//! hashes. The number goes to the end of `metadata`, the chain to the end of `unmapped.sandbar`.

use std::sync::Arc;

use serde::Serialize;

use crate::encode::{EncodeError, Encoder};
use crate::record::{LINE_MAX, Metadata, RecordMembers, SandbarExtension};

/// Room for most lines, and for what most have under `unmapped`.
const LINE_USUAL: usize = 2048;
const TAIL_USUAL: usize = 512;
/// Room for the number and the chain.
const SEAL_MAX: usize = 256;

/// All of a line but its number and its hash.
#[derive(Debug)]
pub(crate) struct Draft {
    pub(crate) bytes: Vec<u8>,
    /// Where the number goes.
    pub(crate) split: usize,
    pub(crate) role: DraftRole,
}

/// What the record means to the attempt it belongs to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum DraftRole {
    /// Something may leave: an outcome has to follow.
    Decision(OpenDecision),
    /// Stands by itself: a refusal, a finding, a lifecycle event.
    Event,
    /// What became of a decision. Never refused, for the traffic has already been.
    Outcome(u128),
}

/// A decision whose outcome is still to come: enough to close it as `unknown` after a crash.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct OpenDecision {
    pub(crate) attempt: u128,
    pub(crate) class_uid: u16,
    pub(crate) sandbox: Arc<str>,
    pub(crate) tenant: Arc<str>,
    pub(crate) host: Arc<str>,
}

/// Why a record could not be put into a line. It has no cause that a peer could choose.
#[derive(Debug, thiserror::Error)]
pub(crate) enum DraftError {
    #[error("a record does not encode")]
    Encode(#[from] EncodeError),
    #[error("a record of {0} bytes is longer than a line may be")]
    TooLong(usize),
}

impl Draft {
    pub(crate) fn new(
        members: &RecordMembers<'_>,
        mut metadata: Metadata<'_>,
        sandbar: &SandbarExtension<'_>,
        role: DraftRole,
    ) -> Result<Self, DraftError> {
        let mut tail = Encoder { bytes: Vec::with_capacity(TAIL_USUAL), cut: 0 };
        sandbar.serialize(&mut tail)?;
        let mut line = Encoder { bytes: Vec::with_capacity(LINE_USUAL), cut: tail.cut };
        members.serialize(&mut line)?;
        if line.cut > 0 {
            let size = line.bytes.len() as u64 + tail.bytes.len() as u64 + line.cut;
            metadata.is_truncated = Some(true);
            metadata.untruncated_size = Some(size.div_ceil(1024));
        }
        line.bytes.pop(); // each object stays open until what follows is in it
        line.bytes.extend_from_slice(br#","metadata":"#);
        metadata.serialize(&mut line)?;
        line.bytes.pop();
        let mut bytes = line.bytes;
        let split = bytes.len();
        tail.bytes.pop();
        bytes.extend_from_slice(br#"},"unmapped":{"sandbar":"#);
        bytes.append(&mut tail.bytes);
        match bytes.len() + SEAL_MAX {
            size if size > LINE_MAX => Err(DraftError::TooLong(size)),
            _ => Ok(Self { bytes, split, role }),
        }
    }
}
