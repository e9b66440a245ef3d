//! A record on its way into the log: all of the line but its number and its hash.
//!
//! Made by the caller, in the caller's thread, so that whoever holds the log only copies and
//! hashes. The number goes to the end of `metadata`, the chain to the end of `unmapped.sandbar`.

use std::sync::Arc;

use serde::Serialize;
use serde_json::Serializer;

use crate::record::{LINE_MAX, Members, Metadata, Sandbar};
use crate::text::Plain;

/// Room for the number and the chain.
const SEAL_MAX: usize = 256;

/// All of a line but its number and its hash.
#[derive(Debug)]
pub(crate) struct Draft {
    pub(crate) bytes: Vec<u8>,
    /// Where the number goes.
    pub(crate) split: usize,
    pub(crate) role: Role,
}

/// What the record means to the attempt it belongs to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Role {
    /// Something may leave: an outcome has to follow.
    Decision(Owed),
    /// Stands by itself: a refusal, a finding, a lifecycle event.
    Event,
    /// What became of a decision. Never refused, for the traffic has already been.
    Outcome(u128),
}

/// A decision whose outcome is still to come: enough to close it as `unknown` after a crash.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Owed {
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
    Encode(#[from] serde_json::Error),
    #[error("a record of {0} bytes is longer than a line may be")]
    TooLong(usize),
}

impl Draft {
    pub(crate) fn new(
        members: &Members<'_>,
        mut metadata: Metadata<'_>,
        sandbar: &Sandbar<'_>,
        role: Role,
    ) -> Result<Self, DraftError> {
        let mut plain = Plain::default();
        let mut bytes = Vec::with_capacity(2048);
        encode(members, &mut plain, &mut bytes)?;
        let mut tail = Vec::with_capacity(512);
        encode(sandbar, &mut plain, &mut tail)?;
        if plain.cut > 0 {
            let size = bytes.len() as u64 + tail.len() as u64 + plain.cut;
            metadata.is_truncated = Some(true);
            metadata.untruncated_size = Some(size.div_ceil(1024));
        }
        bytes.pop(); // each object stays open until what follows is in it
        bytes.extend_from_slice(br#","metadata":"#);
        encode(&metadata, &mut plain, &mut bytes)?;
        bytes.pop();
        let split = bytes.len();
        tail.pop();
        bytes.extend_from_slice(br#"},"unmapped":{"sandbar":"#);
        bytes.append(&mut tail);
        match bytes.len() + SEAL_MAX {
            size if size > LINE_MAX => Err(DraftError::TooLong(size)),
            _ => Ok(Self { bytes, split, role }),
        }
    }
}

fn encode<T: Serialize>(
    value: &T,
    plain: &mut Plain,
    bytes: &mut Vec<u8>,
) -> serde_json::Result<()> {
    value.serialize(&mut Serializer::with_formatter(bytes, plain))
}
