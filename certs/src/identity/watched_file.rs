//! A watched file: adopted while valid; the last good content stays in use if the file turns bad, but not
//! for longer than [`MAX_STALE`].

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use arc_swap::ArcSwap;
use rustls_pki_types::UnixTime;

use crate::files::{self, FileError, FilePoller};
use crate::sha256;
use crate::trust::RefreshStatus;

/// How long the last good content is used while the file is unreadable. After that, everything is refused.
pub const MAX_STALE: Duration = Duration::from_secs(3600);

/// Why a watched file was not adopted.
#[derive(Debug, thiserror::Error)]
pub enum WatchedFileError<E: std::error::Error> {
    #[error("{}: {source}", path.display())]
    Content { path: PathBuf, source: E },
    #[error(transparent)]
    File(#[from] FileError),
}

type ParseFn<T, E> = Box<dyn Fn(&[u8]) -> Result<T, E> + Send + Sync>;

pub(super) struct WatchedFile<T, E> {
    path: PathBuf,
    limit: u64,
    parse: ParseFn<T, E>,
    watch: Mutex<(FilePoller, [u8; 32])>,
    current: ArcSwap<T>,
    seen_good: AtomicU64,
}

impl<T, E: std::error::Error> WatchedFile<T, E> {
    pub(super) fn load(
        path: &Path,
        limit: u64,
        parse: ParseFn<T, E>,
        now: UnixTime,
    ) -> Result<Self, WatchedFileError<E>> {
        let mut watch = FilePoller::new(vec![path.to_owned()]);
        watch.poll_changed(); // before reading, so that a change during the read is seen later
        let text = files::read_bounded(path, limit)?;
        let value =
            parse(&text).map_err(|source| WatchedFileError::Content { path: path.to_owned(), source })?;
        Ok(Self {
            path: path.to_owned(),
            limit,
            parse,
            watch: Mutex::new((watch, sha256(&text))),
            current: ArcSwap::from_pointee(value),
            seen_good: AtomicU64::new(now.as_secs()),
        })
    }

    /// Checks the file and adopts it if it changed and is valid. It blocks.
    pub(super) fn refresh(&self, now: UnixTime) -> Result<RefreshStatus, WatchedFileError<E>> {
        let mut guard = sys::lock(&self.watch);
        let (watch, digest) = &mut *guard;
        let mut refreshed = Ok(RefreshStatus::Unchanged);
        if watch.poll_changed() {
            refreshed = self.reload(digest).inspect_err(|_| watch.mark_changed());
        }
        match &refreshed {
            Ok(_) => self.seen_good.store(now.as_secs(), Ordering::Relaxed),
            // A clock that was ahead and is corrected must not extend the time.
            Err(_) => drop(self.seen_good.fetch_min(now.as_secs(), Ordering::Relaxed)),
        }
        refreshed
    }

    fn reload(&self, digest: &mut [u8; 32]) -> Result<RefreshStatus, WatchedFileError<E>> {
        let text = files::read_bounded(&self.path, self.limit)?;
        let found = sha256(&text);
        if found == *digest {
            return Ok(RefreshStatus::Unchanged);
        }
        let parsed = (self.parse)(&text);
        let value = parsed.map_err(|source| WatchedFileError::Content { path: self.path.clone(), source })?;
        self.current.store(Arc::new(value));
        *digest = found;
        Ok(RefreshStatus::Changed)
    }

    /// Returns the last good content, or `None` once the file has been bad for [`MAX_STALE`].
    pub(super) fn current(&self, now: u64) -> Option<Arc<T>> {
        let age = now.saturating_sub(self.seen_good.load(Ordering::Relaxed));
        (age <= MAX_STALE.as_secs()).then(|| self.current.load_full())
    }
}
