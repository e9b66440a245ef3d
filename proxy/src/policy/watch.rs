//! Decides when to reload: on a file change, on SIGHUP, and periodically for changes without an event.
//!
//! inotify watches the directories rather than the files, so that it reports an editor's rename and the symlink swap
//! of a mounted ConfigMap.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::ffi::{OsStr, OsString};
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use anyhow::Context;
use inotify::{Event, EventMask, Inotify, WatchDescriptor, WatchMask};
use tokio::io::unix::AsyncFd;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::time::timeout;

use crate::policy::store::PolicyStore;

/// A burst of events ends after this long without one...
const DEBOUNCE: Duration = Duration::from_millis(20);
/// ...or after this long in total.
const MAX_DEBOUNCE: Duration = Duration::from_millis(200);
/// How often to reload without an event.
const POLL_INTERVAL: Duration = Duration::from_secs(10);
/// How long to wait until the directories are watched, before waiting for changes of those that are.
const WATCH_WAIT: Duration = Duration::from_secs(5);
/// Size of the event buffer; further events come with the next read...
const EVENT_BUFFER: usize = 4096;
/// ...of at most this many in a row, so that a flood of events does not keep us reading forever.
const MAX_READS: usize = 1024;

/// Waits for reasons to reload.
pub(crate) struct ReloadTrigger {
    watcher: Arc<Mutex<FileWatcher>>,
    /// Readable when there are events; `watcher` reads them.
    ready: AsyncFd<OwnedFd>,
    hangup: Signal,
}

/// Reads inotify events. Shared by the reload loop and the loader, each of which reads pending events when it needs
/// to know.
pub(crate) struct FileWatcher {
    inotify: Inotify,
    watched: HashMap<WatchDescriptor, WatchedDir>,
    /// Directories that cannot be watched, to warn about each once.
    unwatched: BTreeSet<PathBuf>,
    /// Our files that were modified and not closed since.
    written: HashSet<(WatchDescriptor, OsString)>,
    /// Whether a change has happened since the last `take_changed`.
    changed: bool,
}

/// A watched directory.
#[derive(Debug, Default)]
struct WatchedDir {
    interest: DirInterest,
    /// The names of our files in it.
    files: BTreeSet<OsString>,
}

/// Which events of a directory matter.
#[derive(Clone, Debug, PartialEq, Eq)]
enum DirInterest {
    /// All of them: it contains our files.
    All,
    /// Those of these names: our directories, which may be replaced.
    Named(BTreeSet<OsString>),
}

impl Default for DirInterest {
    fn default() -> Self {
        DirInterest::Named(BTreeSet::new())
    }
}

impl DirInterest {
    /// Adds what `other` is interested in: two paths may lead to one directory.
    fn merge(&mut self, other: DirInterest) {
        match (&mut *self, other) {
            (DirInterest::All, _) => {}
            (_, DirInterest::All) => *self = DirInterest::All,
            (DirInterest::Named(names), DirInterest::Named(more)) => names.extend(more),
        }
    }
}

/// A directory, what matters in it, and its watch.
type AddedWatch = (PathBuf, DirInterest, std::io::Result<WatchDescriptor>);

/// Whether an update added a watch.
#[derive(Clone, Copy, PartialEq, Eq)]
enum WatchUpdate {
    Unchanged,
    Added,
}

impl ReloadTrigger {
    pub(crate) fn new(watcher: Arc<Mutex<FileWatcher>>) -> anyhow::Result<Self> {
        // The kernel sends SIGIO when a process opens a file for writing while we hold its lease (see `has_writer` in
        // the store). The default action is to terminate; registering a handler once replaces it for good.
        drop(signal(SignalKind::io()).context("cannot handle SIGIO")?);
        let fd = sys::lock(&watcher).inotify.as_fd().try_clone_to_owned()?;
        Ok(ReloadTrigger {
            watcher,
            ready: sys::fd::register(fd)?,
            hangup: signal(SignalKind::hangup()).context("cannot wait for SIGHUP")?,
        })
    }

    /// Reloads whenever there is a reason to, until dropped.
    pub(crate) async fn run(mut self, reloader: Arc<PolicyStore>) {
        loop {
            // Reload at once after adding a watch: the directory may have changed before that.
            if self.update_watches(&reloader).await == WatchUpdate::Unchanged {
                tokio::select! {
                    () = wait_for_change(&self.watcher, &mut self.ready) => self.debounce().await,
                    _ = self.hangup.recv() => {}
                    () = tokio::time::sleep(POLL_INTERVAL) => {}
                }
            }
            drop(reloader.reload().await); // it has logged the problems
        }
    }

    /// Watches the directories of the files, unless one of them does not answer.
    async fn update_watches(&self, reloader: &Arc<PolicyStore>) -> WatchUpdate {
        let (watcher, files) = (self.watcher.clone(), reloader.policy_files());
        let update = reloader.loader.run(move || update_watches(&watcher, &files));
        let updated = timeout(WATCH_WAIT, update).await;
        updated.ok().and_then(Result::ok).unwrap_or(WatchUpdate::Unchanged)
    }

    /// Waits for the end of a burst of events: only the final content matters.
    async fn debounce(&mut self) {
        let ReloadTrigger { watcher, ready, .. } = self;
        let burst = async { while timeout(DEBOUNCE, wait_for_change(watcher, ready)).await.is_ok() {} };
        drop(timeout(MAX_DEBOUNCE, burst).await); // a longer one is loaded in between, too
    }
}

/// Returns after a change that matters.
async fn wait_for_change(watcher: &Mutex<FileWatcher>, ready: &mut AsyncFd<OwnedFd>) {
    loop {
        if sys::lock(watcher).take_changed() {
            return;
        }
        let Ok(mut guard) = ready.readable_mut().await else {
            return std::future::pending().await; // the periodic reload remains
        };
        sys::lock(watcher).drain_events();
        guard.clear_ready();
    }
}

impl FileWatcher {
    pub(crate) fn open() -> anyhow::Result<Self> {
        let inotify = Inotify::init().context("cannot watch files: check fs.inotify.max_user_instances")?;
        Ok(FileWatcher {
            inotify,
            watched: HashMap::new(),
            unwatched: BTreeSet::new(),
            written: HashSet::new(),
            changed: false,
        })
    }

    /// Whether one of our files was modified and not closed since.
    pub(crate) fn has_writers(&mut self) -> bool {
        self.drain_events();
        !self.written.is_empty()
    }

    fn take_changed(&mut self) -> bool {
        self.drain_events();
        std::mem::take(&mut self.changed)
    }

    /// Reads all pending events.
    fn drain_events(&mut self) {
        let mut buffer = [0; EVENT_BUFFER];
        for _ in 0..MAX_READS {
            let Ok(events) = self.inotify.read_events(&mut buffer) else { return };
            for event in events {
                self.changed |= handle_event(&event, &self.watched, &mut self.written);
            }
        }
    }

    /// Watches these directories and no others. A directory that replaced another gets a new watch.
    fn adopt_watches(&mut self, files: &[PathBuf], dirs: Vec<AddedWatch>) -> WatchUpdate {
        let mut before = std::mem::take(&mut self.watched);
        let mut update = WatchUpdate::Unchanged;
        for (dir, interest, added) in dirs {
            // A missing directory is watched once it is back: an event of its parent or the periodic reload leads here.
            let watch = match added {
                Ok(watch) => watch,
                Err(error) => {
                    let shown = dir.display().to_string();
                    if self.unwatched.insert(dir) {
                        tracing::warn!(%error, dir = shown, "cannot watch a directory; its files are only polled");
                    }
                    continue;
                }
            };
            self.unwatched.remove(&dir);
            if before.remove(&watch).is_none() && !self.watched.contains_key(&watch) {
                update = WatchUpdate::Added;
            }
            let ours = files.iter().filter(|file| parent_dir(file).is_some_and(|parent| parent == dir));
            let names = ours.filter_map(|file| file.file_name().map(ToOwned::to_owned));
            let watched = self.watched.entry(watch).or_default();
            watched.files.extend(names);
            watched.interest.merge(interest);
        }
        self.written.retain(|(watch, _)| self.watched.contains_key(watch));
        for watch in before.into_keys() {
            drop(self.inotify.watches().remove(watch)); // the kernel may have done so already
        }
        update
    }
}

/// Watches the directories of `files` and no others.
///
/// The kernel looks each directory up, which may hang, so the lock is not held meanwhile: the reload loop needs it. An
/// event in between may be missed, but an added watch leads to a reload.
fn update_watches(watcher: &Mutex<FileWatcher>, files: &[PathBuf]) -> WatchUpdate {
    let mask = WatchMask::ATTRIB
        | WatchMask::CLOSE_WRITE
        | WatchMask::CREATE
        | WatchMask::DELETE
        | WatchMask::DELETE_SELF
        | WatchMask::MODIFY
        | WatchMask::MOVED_FROM
        | WatchMask::MOVED_TO
        | WatchMask::MOVE_SELF;
    let mut watches = sys::lock(watcher).inotify.watches();
    let add = |(dir, interest): (PathBuf, DirInterest)| {
        let _note = sys::file::note_call(&dir);
        let added = watches.add(&dir, mask);
        (dir, interest, added)
    };
    let dirs = watch_dirs(files).into_iter().map(add).collect();
    sys::lock(watcher).adopt_watches(files, dirs)
}

/// Returns the directories of the files, and the parents of those.
fn watch_dirs(files: &[PathBuf]) -> BTreeMap<PathBuf, DirInterest> {
    let mut all = BTreeMap::new();
    let dirs: BTreeSet<PathBuf> = files.iter().filter_map(|file| parent_dir(file)).collect();
    for dir in &dirs {
        let (Some(above), Some(name)) = (parent_dir(dir), dir.file_name()) else { continue };
        let named = all.entry(above).or_insert_with(|| DirInterest::Named(BTreeSet::new()));
        if let DirInterest::Named(names) = named {
            names.insert(name.to_owned());
        }
    }
    all.extend(dirs.into_iter().map(|dir| (dir, DirInterest::All)));
    all
}

fn parent_dir(path: &Path) -> Option<PathBuf> {
    let dir = path.parent()?;
    Some(if dir.as_os_str().is_empty() { ".".into() } else { dir.to_owned() })
}

/// Whether an event may concern our files; lost events may, too. Updates the files being written.
fn handle_event(
    event: &Event<&OsStr>,
    watched: &HashMap<WatchDescriptor, WatchedDir>,
    written: &mut HashSet<(WatchDescriptor, OsString)>,
) -> bool {
    if event.mask.contains(EventMask::Q_OVERFLOW) {
        written.clear();
        return true;
    }
    let Some(dir) = watched.get(&event.wd) else { return false };
    let file = event.name.map(|name| (event.wd.clone(), name.to_owned()));
    if event.mask.contains(EventMask::MODIFY) {
        written.extend(file.filter(|(_, name)| dir.files.contains(name)));
        return false; // the reload waits for the close that follows
    }
    if !event.mask.contains(EventMask::ATTRIB)
        && let Some(file) = file
    {
        written.remove(&file);
    }
    match (&dir.interest, event.name) {
        (DirInterest::All, _) | (DirInterest::Named(_), None) => true,
        (DirInterest::Named(names), Some(name)) => names.contains(name),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn directories_are_watched_whole_and_those_above_by_name() {
        let files = ["/etc/sandbar/sandbar.toml", "/srv/p/a.toml", "/srv/p/lists/l.txt"];
        let found = watch_dirs(&files.map(PathBuf::from));
        let named = |name: &str| DirInterest::Named(BTreeSet::from([OsString::from(name)]));
        let wanted = [
            ("/etc", named("sandbar")),
            ("/etc/sandbar", DirInterest::All),
            ("/srv", named("p")),
            ("/srv/p", DirInterest::All),
            ("/srv/p/lists", DirInterest::All),
        ];
        assert_eq!(found, wanted.map(|(dir, interest)| (PathBuf::from(dir), interest)).into());
        let here = watch_dirs(&[PathBuf::from("sandbar.toml"), PathBuf::from("p/a.toml")]);
        assert_eq!(here.keys().map(|dir| dir.display().to_string()).collect::<Vec<_>>(), [".", "p"]);
    }
}
