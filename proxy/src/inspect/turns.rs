//! Turns for searching what leaves: one piece of one request of a sandbox at a time, and in total fewer than there are
//! workers, so that a sandbox whose content is slow to search waits for itself and not the others for it (P20).

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use tokio::sync::{Semaphore, SemaphorePermit};

use super::state::SandboxSignals;

/// Pieces of all sandboxes that are searched at once.
pub(super) struct ScanTurns(Semaphore);

/// The right to search one piece.
pub(super) struct ScanTurn<'a> {
    _own: Option<SemaphorePermit<'a>>,
    _common: Option<SemaphorePermit<'a>>,
}

/// Counts an open body among those of its sandbox that leave in blocks.
pub(crate) struct OpenBlocks(Arc<SandboxSignals>);

impl ScanTurns {
    /// Leaves one of the workers to others; with a single one, tasks take turns anyway.
    pub(super) fn new() -> Self {
        let workers = std::thread::available_parallelism().map_or(1, |workers| workers.get());
        ScanTurns(Semaphore::new(workers.saturating_sub(1).max(1)))
    }

    /// Waits for the sandbox's turn, then for one of those of all. Both queues are in order of arrival, so a sandbox
    /// waits for at most one piece of each other.
    pub(super) async fn wait<'a>(&'a self, signals: &'a SandboxSignals) -> ScanTurn<'a> {
        // Neither is ever closed.
        let own = signals.scan_turn().acquire().await.ok();
        ScanTurn { _own: own, _common: self.0.acquire().await.ok() }
    }
}

impl OpenBlocks {
    pub(crate) fn new(signals: &Arc<SandboxSignals>) -> Self {
        signals.open_blocks().fetch_add(1, Ordering::Relaxed);
        OpenBlocks(signals.clone())
    }

    /// Returns how many there are, this one included.
    pub(crate) fn count(&self) -> u32 {
        self.0.open_blocks().load(Ordering::Relaxed)
    }

    #[cfg(test)]
    pub(crate) fn signals(&self) -> &Arc<SandboxSignals> {
        &self.0
    }
}

impl Drop for OpenBlocks {
    fn drop(&mut self) {
        self.0.open_blocks().fetch_sub(1, Ordering::Relaxed);
    }
}

/// The counter behind [`OpenBlocks`].
pub(super) type OpenBlockCount = AtomicU32;

#[cfg(test)]
mod tests {
    use std::task::{Context, Waker};

    use super::*;

    #[tokio::test]
    async fn p20_a_sandbox_has_one_turn_at_a_time_and_others_get_theirs() {
        let turns = ScanTurns(Semaphore::new(2));
        let (greedy, other) = (SandboxSignals::unstored().unwrap(), SandboxSignals::unstored().unwrap());
        let first = turns.wait(&greedy).await;
        let mut second = Box::pin(turns.wait(&greedy));
        let mut context = Context::from_waker(Waker::noop());
        assert!(second.as_mut().poll(&mut context).is_pending(), "its second piece waits for the first");
        drop(turns.wait(&other).await);
        drop(first);
        drop(second.await);
    }
}
