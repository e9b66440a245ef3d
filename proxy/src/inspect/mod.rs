//! Content inspection: what leaves in a request's body, seen chunk by chunk before it is forwarded.
//!
//! The departure opens one [`Inspection`] per attempt. Today it bounds the body of a rule with `inspect = true`; detectors
//! of `rules` that look at content are fed from here.

use rules::limits::TrafficLimits;
use rules::{Permit, Reason};

/// The inspection of one attempt.
#[derive(Debug)]
pub(crate) struct Inspection {
    /// Longest body that may pass; none where the rule inspects nothing.
    limit: Option<u64>,
    uploaded: u64,
}

impl Inspection {
    pub(crate) fn begin(permit: &Permit, limits: &TrafficLimits) -> Self {
        let limit = permit.inspect().then_some(limits.inspected_body_bytes);
        Inspection { limit, uploaded: 0 }
    }

    /// Looks at the next bytes of the body, which are forwarded only if this returns `Ok`.
    ///
    /// # Errors
    ///
    /// Returns [`Reason::BodyTooLarge`] once the body exceeds what can be inspected.
    pub(crate) fn observe(&mut self, bytes: &[u8]) -> Result<(), Reason> {
        self.uploaded += bytes.len() as u64;
        match self.limit {
            Some(limit) if self.uploaded > limit => Err(Reason::BodyTooLarge),
            Some(_) | None => Ok(()),
        }
    }
}
