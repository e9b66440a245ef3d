//! When to reload: a file changed (told by inotify on its directory, so that an editor's rename and a
//! ConfigMap's swap are seen), SIGHUP, or a look now and then for what no event tells.

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

use crate::policy::store::{LoadOutcome, PolicyStore};

/// A storm of writes is over when none came for so long...
const DEBOUNCE: Duration = Duration::from_millis(20);
/// ...or it has lasted for so long.
const MAX_DEBOUNCE: Duration = Duration::from_millis(200);
/// How often the files are looked at without being told to.
const POLL_INTERVAL: Duration = Duration::from_secs(10);
/// Room for events; those that do not fit come with the next read...
const EVENT_BUFFER: usize = 4096;
/// ...of so many in a row: whoever makes more of them is not followed any further for now.
const MAX_READS: usize = 1024;

/// Watches the directories of the files that rules come from.
pub(crate) struct ReloadTrigger {
    eyes: Arc<Mutex<FileWatcher>>,
    /// Tells that there are events; `eyes` read them.
    ready: AsyncFd<OwnedFd>,
    hangup: Signal,
}

/// What the kernel tells of these directories, read by whoever wants to know: it is told as it happens.
pub(crate) struct FileWatcher {
    inotify: Inotify,
    watched: HashMap<WatchDescriptor, WatchedDir>,
    /// Directories that cannot be watched, so that this is said once.
    unwatched: BTreeSet<PathBuf>,
    /// Files of ours that somebody writes, and has not closed yet.
    written: HashSet<(WatchDescriptor, OsString)>,
    /// Whether something has changed that nobody has looked at.
    changed: bool,
}

/// One directory.
#[derive(Debug, Default)]
struct WatchedDir {
    interest: DirInterest,
    /// The names of our files in it.
    files: BTreeSet<OsString>,
}

/// What of a directory counts.
#[derive(Clone, Debug, PartialEq, Eq)]
enum DirInterest {
    /// Whatever happens in it.
    All,
    /// Only these: directories of ours, which another may take the place of.
    Named(BTreeSet<OsString>),
}

impl Default for DirInterest {
    fn default() -> Self {
        DirInterest::Named(BTreeSet::new())
    }
}

impl DirInterest {
    /// Counts what `other` counts, too: two paths may lead to one directory.
    fn merge(&mut self, other: DirInterest) {
        match (&mut *self, other) {
            (DirInterest::All, _) => {}
            (_, DirInterest::All) => *self = DirInterest::All,
            (DirInterest::Named(names), DirInterest::Named(more)) => names.extend(more),
        }
    }
}

/// Whether following the files began to watch something.
#[derive(Clone, Copy, PartialEq, Eq)]
enum WatchUpdate {
    Unchanged,
    Added,
}

impl ReloadTrigger {
    pub(crate) fn new(eyes: Arc<Mutex<FileWatcher>>) -> anyhow::Result<Self> {
        // Who opens a file for writing while its lease is asked for makes the kernel send this, and it would end us.
        drop(signal(SignalKind::io()).context("cannot leave SIGIO be")?);
        let fd = sys::lock(&eyes).inotify.as_fd().try_clone_to_owned()?;
        Ok(ReloadTrigger {
            eyes,
            ready: sys::fd::register(fd)?,
            hangup: signal(SignalKind::hangup()).context("cannot wait for SIGHUP")?,
        })
    }

    /// Reloads whenever there is reason to. Runs until it is dropped.
    pub(crate) async fn run(mut self, reloader: Arc<PolicyStore>) {
        loop {
            // What changed in a directory before it was watched is seen by looking right away.
            let fresh = sys::lock(&self.eyes).update_watches(&reloader.policy_files())
                == WatchUpdate::Added;
            if !fresh {
                tokio::select! {
                    () = wait_for_change(&self.eyes, &mut self.ready) => self.debounce().await,
                    _ = self.hangup.recv() => {}
                    () = tokio::time::sleep(POLL_INTERVAL) => {}
                }
            }
            let reloader = reloader.clone();
            match tokio::task::spawn_blocking(move || reloader.reload()).await {
                Ok(Ok(LoadOutcome::Fresh { generation, cut })) => {
                    tracing::info!(generation, cut = cut.len(), "policies loaded");
                }
                Ok(Ok(LoadOutcome::Same { .. }) | Err(_)) => {} // it has said itself what is wrong
                Err(error) => tracing::error!(%error, "a load broke; the rules in force stay"),
            }
        }
    }

    /// Waits for the end of a storm: what counts is its last content.
    async fn debounce(&mut self) {
        let ReloadTrigger { eyes, ready, .. } = self;
        let storm =
            async { while timeout(DEBOUNCE, wait_for_change(eyes, ready)).await.is_ok() {} };
        drop(timeout(MAX_DEBOUNCE, storm).await); // one that goes on is looked at in between
    }
}

/// Returns once the kernel has told of a change that counts.
async fn wait_for_change(eyes: &Mutex<FileWatcher>, ready: &mut AsyncFd<OwnedFd>) {
    loop {
        if sys::lock(eyes).take_changed() {
            return;
        }
        let Ok(mut told) = ready.readable_mut().await else {
            return std::future::pending().await; // the files are still looked at now and then
        };
        sys::lock(eyes).drain_events();
        told.clear_ready();
    }
}

impl FileWatcher {
    pub(crate) fn open() -> anyhow::Result<Self> {
        let inotify =
            Inotify::init().context("cannot watch files: see fs.inotify.max_user_instances")?;
        Ok(FileWatcher {
            inotify,
            watched: HashMap::new(),
            unwatched: BTreeSet::new(),
            written: HashSet::new(),
            changed: false,
        })
    }

    /// Whether somebody has begun to write a file of ours and has not closed it.
    pub(crate) fn has_writers(&mut self) -> bool {
        self.drain_events();
        !self.written.is_empty()
    }

    fn take_changed(&mut self) -> bool {
        self.drain_events();
        std::mem::take(&mut self.changed)
    }

    /// Reads all that was told so far.
    fn drain_events(&mut self) {
        let mut buffer = [0; EVENT_BUFFER];
        for _ in 0..MAX_READS {
            let Ok(events) = self.inotify.read_events(&mut buffer) else { return };
            for event in events {
                self.changed |= handle_event(&event, &self.watched, &mut self.written);
            }
        }
    }

    /// Watches what is to be watched, and nothing else. A directory that took another's place is a new one.
    fn update_watches(&mut self, files: &[PathBuf]) -> WatchUpdate {
        let mask = WatchMask::ATTRIB
            | WatchMask::CLOSE_WRITE
            | WatchMask::CREATE
            | WatchMask::DELETE
            | WatchMask::DELETE_SELF
            | WatchMask::MODIFY
            | WatchMask::MOVED_FROM
            | WatchMask::MOVED_TO
            | WatchMask::MOVE_SELF;
        let mut before = std::mem::take(&mut self.watched);
        let mut followed = WatchUpdate::Unchanged;
        for (dir, interest) in watch_dirs(files) {
            // One that is gone is watched again when it is back: its parent tells of that, or a look does.
            let watch = match self.inotify.watches().add(&dir, mask) {
                Ok(watch) => watch,
                Err(error) => {
                    let shown = dir.display().to_string();
                    if self.unwatched.insert(dir) {
                        tracing::warn!(%error, dir = shown, "not watched, only looked at now and then");
                    }
                    continue;
                }
            };
            self.unwatched.remove(&dir);
            if before.remove(&watch).is_none() && !self.watched.contains_key(&watch) {
                followed = WatchUpdate::Added;
            }
            let ours = files.iter().filter(|file| parent_dir(file).is_some_and(|own| own == dir));
            let names = ours.filter_map(|file| file.file_name().map(ToOwned::to_owned));
            let watched = self.watched.entry(watch).or_default();
            watched.files.extend(names);
            watched.interest.merge(interest);
        }
        self.written.retain(|(watch, _)| self.watched.contains_key(watch));
        for watch in before.into_keys() {
            drop(self.inotify.watches().remove(watch)); // the kernel may have done so already
        }
        followed
    }
}

/// The directories of the files, and those in which these directories stand.
fn watch_dirs(files: &[PathBuf]) -> BTreeMap<PathBuf, DirInterest> {
    let mut all = BTreeMap::new();
    let own: BTreeSet<PathBuf> = files.iter().filter_map(|file| parent_dir(file)).collect();
    for dir in &own {
        let (Some(above), Some(name)) = (parent_dir(dir), dir.file_name()) else { continue };
        let named = all.entry(above).or_insert_with(|| DirInterest::Named(BTreeSet::new()));
        if let DirInterest::Named(names) = named {
            names.insert(name.to_owned());
        }
    }
    all.extend(own.into_iter().map(|dir| (dir, DirInterest::All)));
    all
}

fn parent_dir(path: &Path) -> Option<PathBuf> {
    let dir = path.parent()?;
    Some(if dir.as_os_str().is_empty() { ".".into() } else { dir.to_owned() })
}

/// Whether an event may be about our files; that some were lost is one, too. Notes who writes and who is done.
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
        return false; // whoever writes will close, and that counts
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
        assert_eq!(
            here.keys().map(|dir| dir.display().to_string()).collect::<Vec<_>>(),
            [".", "p"]
        );
    }
}
