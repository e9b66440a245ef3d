//! What an instance does from time to time, off the data path: says which files hang, drops the state of sandboxes that
//! have left, returns memory.

use std::collections::HashSet;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::time::{Duration, Instant};

use sys::file::{self, FileCall};

use crate::admin::status::AdminState;
use crate::policy::store::HANGING_AFTER;
use crate::report::metrics;

/// Time between two looks.
const INTERVAL: Duration = Duration::from_secs(1);
/// Seconds between two writes of what the inspection remembers. A crash loses that much.
const STORE_SECONDS: u64 = 10;
/// Resident bytes beyond those at the quietest time that are worth returning.
const RETURN_BYTES: u64 = 32 << 20;
/// Longest time between two returns of memory, while they gain nothing.
const MAX_PAUSE: Duration = Duration::from_secs(60);
/// Tasks per worker thread that return its memory. More than one, because a thread may run two in a row.
const RELEASES_PER_WORKER: usize = 4;
/// Size of a page, in which the kernel counts. Where pages are larger, less memory seems resident.
const PAGE_BYTES: u64 = 4096;

/// Runs until dropped.
pub(crate) async fn run_periodic(state: Arc<AdminState>) {
    tokio::join!(report_hanging_files(), prune_sandboxes(&state), return_memory());
}

/// Logs what a start waits for, until the sender is dropped. A start reads files itself: it serves nothing yet.
pub(crate) fn report_start() -> std::io::Result<Sender<()>> {
    let (started, wait) = channel();
    std::thread::Builder::new().name("start".to_owned()).spawn(move || {
        while wait.recv_timeout(HANGING_AFTER) == Err(RecvTimeoutError::Timeout) {
            for call in file::calls_longer_than(HANGING_AFTER) {
                let seconds = call.since.elapsed().as_secs();
                tracing::error!(path = %call.path.display(), seconds, "still starting: a file does not answer");
            }
        }
    })?;
    Ok(started)
}

/// Logs each file that does not answer, once, and when it does again.
async fn report_hanging_files() {
    let mut reported: HashSet<(PathBuf, Instant)> = HashSet::new();
    loop {
        tokio::time::sleep(INTERVAL).await;
        let hanging = file::calls_longer_than(HANGING_AFTER);
        let hanging: HashSet<_> =
            hanging.into_iter().map(|FileCall { path, since, .. }| (path, since)).collect();
        for (path, since) in hanging.difference(&reported) {
            let seconds = since.elapsed().as_secs();
            tracing::error!(path = %path.display(), seconds, "a file does not answer; its last content stays in use");
        }
        for (path, _) in reported.difference(&hanging) {
            tracing::info!(path = %path.display(), "a file answers again");
        }
        reported = hanging;
    }
}

/// Returns memory to the kernel when a burst is over.
///
/// The allocator keeps freed memory with the thread that allocated it, for reuse, and an idle thread never looks at it
/// again: hundreds of megabytes stay resident. So, while more is resident than there was at the quietest time and it
/// does not grow, every worker thread is made to return what it has; less and less often if that gains nothing, because
/// the memory is in use.
async fn return_memory() {
    let mut quietest = resident_bytes();
    let (mut last, mut pause) = (quietest, INTERVAL);
    loop {
        tokio::time::sleep(pause).await;
        let resident = resident_bytes();
        let is_growing = resident > last;
        (quietest, last) = (quietest.min(resident), resident);
        if is_growing || resident < quietest + RETURN_BYTES {
            pause = INTERVAL;
            continue;
        }
        release_on_workers().await;
        last = resident_bytes();
        pause = match resident.saturating_sub(last) > RETURN_BYTES / 4 {
            true => INTERVAL,
            false => (pause * 2).min(MAX_PAUSE),
        };
        metrics::count_memory_return(resident.saturating_sub(last));
    }
}

/// Makes every worker thread of the runtime return the memory that it has freed.
async fn release_on_workers() {
    let workers = tokio::runtime::Handle::current().metrics().num_workers();
    let release = |_| tokio::spawn(async { sys::memory::release_freed() });
    for task in (0..workers * RELEASES_PER_WORKER).map(release).collect::<Vec<_>>() {
        drop(task.await); // it cannot fail
    }
}

/// Returns the bytes that are resident; see proc(5).
fn resident_bytes() -> u64 {
    let text = std::fs::read_to_string("/proc/self/statm").unwrap_or_default();
    let pages = text.split(' ').nth(1).and_then(|pages| pages.parse::<u64>().ok());
    pages.unwrap_or_default() * PAGE_BYTES
}

/// Drops the state of sandboxes that have left the configuration and whose connections are closed.
async fn prune_sandboxes(state: &AdminState) {
    let mut seconds = 0_u64;
    loop {
        tokio::time::sleep(INTERVAL).await;
        seconds += INTERVAL.as_secs();
        state.filter.prune_sandboxes();
        state.pending.prune_sandboxes(&state.rules.load());
        let store = &state.reloader;
        for id in store.ledger.departed() {
            let ledger = store.ledger.clone();
            drop(store.state_files.run(move || ledger.prune_sandbox(&id)).await); // tried again
        }
        if seconds.is_multiple_of(STORE_SECONDS) {
            let ledger = store.ledger.clone();
            drop(store.state_files.run(move || ledger.store_signals()).await); // tried again
        }
        if store.ledger.needs_sweep() {
            let ledger = store.ledger.clone();
            drop(store.loader.run(move || ledger.sweep_files()).await); // tried again
        }
    }
}
