//! When to reload: a file changed (told by inotify on its directory, so that an editor's rename and a
//! ConfigMap's swap are seen), SIGHUP, or a look now and then for what no event tells.

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use inotify::{Inotify, WatchMask};
use tokio::io::unix::AsyncFd;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::time::timeout;

use crate::reload::{Loaded, Reloader};

/// A storm of writes is over when none came for so long...
const QUIET: Duration = Duration::from_millis(20);
/// ...or it has lasted for so long.
const STORM: Duration = Duration::from_millis(200);
/// How often the files are looked at without being told to.
const LOOK: Duration = Duration::from_secs(10);
/// Room for events; those that do not fit come with the next read.
const EVENTS: usize = 4096;

/// Watches the directories of the files that rules come from.
pub(crate) struct Watch {
    events: AsyncFd<Inotify>,
    watched: BTreeSet<PathBuf>,
    hangup: Signal,
}

impl Watch {
    #[allow(unsafe_code, reason = "tokio cannot know that a descriptor stays open")]
    pub(crate) fn new() -> anyhow::Result<Self> {
        let inotify =
            Inotify::init().context("cannot watch files: see fs.inotify.max_user_instances")?;
        Ok(Watch {
            // SAFETY: `Inotify` owns its descriptor and keeps it open as long as it lives.
            events: unsafe { AsyncFd::register(inotify) }?,
            watched: BTreeSet::new(),
            hangup: signal(SignalKind::hangup()).context("cannot wait for SIGHUP")?,
        })
    }

    /// Reloads whenever there is reason to. Runs until it is dropped.
    pub(crate) async fn run(mut self, reloader: Arc<Reloader>) {
        loop {
            self.follow(&reloader.files());
            tokio::select! {
                () = changed(&mut self.events) => self.quiet().await,
                _ = self.hangup.recv() => {}
                () = tokio::time::sleep(LOOK) => {}
            }
            let reloader = reloader.clone();
            let loaded = tokio::task::spawn_blocking(move || reloader.reload()).await;
            if let Ok(Ok(Loaded::Fresh { generation, cut })) = loaded {
                tracing::info!(generation, cut = cut.len(), "policies loaded");
            }
        }
    }

    /// Waits for the end of a storm: what counts is its last content.
    async fn quiet(&mut self) {
        let storm = async { while timeout(QUIET, changed(&mut self.events)).await.is_ok() {} };
        drop(timeout(STORM, storm).await); // one that goes on is looked at in between
    }

    /// Watches the directory of every file. One that is gone is watched again when it is back.
    fn follow(&mut self, files: &[PathBuf]) {
        let mask = WatchMask::CLOSE_WRITE
            | WatchMask::MOVED_TO
            | WatchMask::MOVED_FROM
            | WatchMask::CREATE
            | WatchMask::DELETE
            | WatchMask::DELETE_SELF;
        let dirs = files.iter().filter_map(|file| file.parent());
        let dirs =
            dirs.map(|dir| if dir.as_os_str().is_empty() { ".".into() } else { dir.to_owned() });
        for dir in dirs.collect::<BTreeSet<PathBuf>>() {
            // Adding one again is how the kernel is told of a directory that took another's place.
            match self.events.get_ref().watches().add(&dir, mask) {
                Ok(_) => drop(self.watched.insert(dir)),
                Err(error) if self.watched.remove(&dir) => {
                    tracing::warn!(%error, dir = %dir.display(), "a directory cannot be watched");
                }
                Err(_) => {}
            }
        }
    }
}

/// Returns once the kernel tells of a change, with its events read.
async fn changed(events: &mut AsyncFd<Inotify>) {
    loop {
        let Ok(mut ready) = events.readable_mut().await else {
            return std::future::pending().await;
        };
        let mut buffer = [0; EVENTS];
        let read =
            ready.try_io(|inner| inner.get_mut().read_events(&mut buffer).map(Iterator::count));
        match read {
            Ok(Ok(0)) | Err(_) => {}
            Ok(Ok(_)) => return,
            Ok(Err(_)) => return tokio::time::sleep(QUIET).await,
        }
    }
}
