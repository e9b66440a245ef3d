//! The health of the log, for readiness, metrics and on-call staff.

use std::sync::atomic::{AtomicU64, Ordering};

/// Counters since the log was opened.
#[derive(Debug, Default)]
pub(crate) struct Counters {
    pub(crate) written: AtomicU64,
    pub(crate) bytes: AtomicU64,
    pub(crate) batches: AtomicU64,
    pub(crate) refused: AtomicU64,
    /// Counted, but not yet recorded as a count.
    pub(crate) folded: AtomicU64,
    pub(crate) folded_total: AtomicU64,
    pub(crate) lost: AtomicU64,
    pub(crate) owed: AtomicU64,
    pub(crate) checkpoints: AtomicU64,
    pub(crate) checkpoint_failures: AtomicU64,
}

impl Counters {
    pub(crate) fn add(counter: &AtomicU64, count: u64) {
        counter.fetch_add(count, Ordering::Relaxed);
    }

    /// Counts an attempt that sent nothing and has no record of its own.
    pub(crate) fn count_folded(&self, count: u64) {
        Self::add(&self.folded, count);
        Self::add(&self.folded_total, count);
    }
}

/// The health of the log.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LogHealth {
    /// Whether the log accepts records now. If false, every attempt is refused.
    pub ready: bool,
    /// Why the log is not ready, for people.
    pub trouble: Option<String>,
    /// Records written.
    pub written: u64,
    /// Bytes written.
    pub bytes: u64,
    /// Writes they took.
    pub batches: u64,
    /// Callers refused because their record could not be written.
    pub refused: u64,
    /// Attempts that sent nothing and are recorded only as a count.
    pub folded: u64,
    /// Lost records of traffic. Anything but 0 is a defect.
    pub lost: u64,
    /// Decisions without outcome.
    pub open: u64,
    /// Records waiting to be written.
    pub queued: u64,
    /// Checkpoints signed.
    pub checkpoints: u64,
    /// Checkpoints that could not be stored.
    pub checkpoint_failures: u64,
    /// Number of the last record.
    pub sequence: u64,
    /// File name of the segment being written.
    pub segment: Option<String>,
}

pub(crate) fn load_counter(counter: &AtomicU64) -> u64 {
    counter.load(Ordering::Relaxed)
}
