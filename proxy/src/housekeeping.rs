//! What an instance does from time to time, off the data path: says which files hang, drops the state of sandboxes that
//! have left, returns memory.

use std::collections::HashSet;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use sys::file::{self, FileCall};

use crate::admin::status::AdminState;
use crate::policy::store::HANGING_AFTER;

/// Time between two looks.
const INTERVAL: Duration = Duration::from_secs(1);

/// Runs until dropped.
pub(crate) async fn run_periodic(state: Arc<AdminState>) {
    tokio::join!(report_hanging_files(), prune_sandboxes(&state));
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

/// Drops the state of sandboxes that have left the configuration and whose connections are closed.
async fn prune_sandboxes(state: &AdminState) {
    loop {
        tokio::time::sleep(INTERVAL).await;
        state.filter.prune_sandboxes();
        state.pending.prune_sandboxes(&state.rules.load());
        let ledger = &state.reloader.ledger;
        if ledger.needs_pruning() {
            let ledger = ledger.clone();
            drop(state.reloader.state_files.run(move || ledger.prune_sandboxes()).await); // tried again
        }
    }
}
