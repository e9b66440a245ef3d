//! A draft: a record's line, complete except for its number and its hashes.
//!
//! The caller encodes it on its own thread, so that the writer, which one thread holds at a time,
//! only copies and hashes. The number goes to the end of `metadata`, the chain to the end of
//! `unmapped.sandbar`.

use std::sync::Arc;

use rules::ids::SandboxId;
use serde::Serialize;

use crate::encode::{EncodeError, Encoder};
use crate::record::{LINE_MAX, Metadata, RecordMembers, SandbarExtension};

/// Initial capacity for a line, and for its `unmapped` part: enough for most.
const LINE_USUAL: usize = 2048;
const TAIL_USUAL: usize = 512;
/// Bytes that an outcome has beyond its decision: at most 16 DNS answers, what was attempted, bytes, status, duration.
const OUTCOME_EXTRA: usize = 5 * 1024;
/// Room for the number and the chain.
const SEAL_MAX: usize = 256;

/// A line without its number and hashes.
#[derive(Debug)]
pub(crate) struct Draft {
    pub(crate) bytes: Vec<u8>,
    /// Where the number goes.
    pub(crate) split: usize,
    pub(crate) role: DraftRole,
    /// The sandbox whose quota it counts against.
    pub(crate) sandbox: Option<SandboxId>,
}

/// The role of a record in its attempt.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum DraftRole {
    /// The attempt may proceed: an outcome has to follow.
    Decision(OpenDecision),
    /// Independent of other records: a refusal, a finding, a lifecycle event.
    Event,
    /// The outcome of a decision. Never refused, because the traffic has already happened.
    Outcome(u128),
}

/// A decision without an outcome yet: enough to close it as `unknown` after a crash.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct OpenDecision {
    pub(crate) attempt: u128,
    pub(crate) class_uid: u16,
    pub(crate) sandbox: Arc<str>,
    pub(crate) tenant: Arc<str>,
    pub(crate) host: Arc<str>,
    /// Bytes reserved for its outcome.
    pub(crate) outcome_bytes: u64,
}

/// Why a record could not be encoded. No input of a peer can cause this.
#[derive(Debug, thiserror::Error)]
pub(crate) enum DraftError {
    #[error("it has an unsupported shape")]
    Encode(#[from] EncodeError),
    #[error("its {0} bytes exceed the maximum length of a line")]
    TooLong(usize),
}

impl Draft {
    pub(crate) fn new(
        members: &RecordMembers<'_>,
        mut metadata: Metadata<'_>,
        sandbar: &SandbarExtension<'_>,
        mut role: DraftRole,
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
        line.bytes.pop(); // removes the closing brace: more members follow
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
            size => {
                if let DraftRole::Decision(owed) = &mut role {
                    owed.outcome_bytes = (size + OUTCOME_EXTRA) as u64;
                }
                Ok(Self { bytes, split, role, sandbox: None })
            }
        }
    }

    /// Returns the bytes charged for it: its line, with the most that its place in the chain takes.
    pub(crate) fn size(&self) -> u64 {
        (self.bytes.len() + SEAL_MAX) as u64
    }

    /// Sets the sandbox whose quota it counts against.
    pub(crate) fn charged_to(self, sandbox: Option<SandboxId>) -> Self {
        Self { sandbox, ..self }
    }
}
