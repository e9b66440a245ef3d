//! When to reload: a file changed (told by inotify on its directory, so that an editor's rename and a
//! ConfigMap's swap are seen), SIGHUP, or a look now and then for what no event tells.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use inotify::{Event, EventMask, Inotify, WatchDescriptor, WatchMask};
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
    watched: HashMap<WatchDescriptor, Interest>,
    hangup: Signal,
}

/// What of a directory counts.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Interest {
    /// Whatever happens in it.
    All,
    /// Only these: directories of ours, which another may take the place of.
    Named(BTreeSet<OsString>),
}

impl Interest {
    /// Counts what `other` counts, too: two paths may lead to one directory.
    fn widen(&mut self, other: Interest) {
        match (&mut *self, other) {
            (Interest::All, _) => {}
            (_, Interest::All) => *self = Interest::All,
            (Interest::Named(names), Interest::Named(more)) => names.extend(more),
        }
    }
}

/// Whether following the files began to watch something.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Followed {
    Known,
    Something,
}

impl Watch {
    #[allow(unsafe_code, reason = "tokio cannot know that a descriptor stays open")]
    pub(crate) fn new() -> anyhow::Result<Self> {
        let inotify =
            Inotify::init().context("cannot watch files: see fs.inotify.max_user_instances")?;
        Ok(Watch {
            // SAFETY: `Inotify` owns its descriptor and keeps it open as long as it lives.
            events: unsafe { AsyncFd::register(inotify) }?,
            watched: HashMap::new(),
            hangup: signal(SignalKind::hangup()).context("cannot wait for SIGHUP")?,
        })
    }

    /// Reloads whenever there is reason to. Runs until it is dropped.
    pub(crate) async fn run(mut self, reloader: Arc<Reloader>) {
        loop {
            // What changed in a directory before it was watched is seen by looking right away.
            if self.follow(&reloader.files()) == Followed::Known {
                tokio::select! {
                    () = changed(&mut self.events, &self.watched) => self.quiet().await,
                    _ = self.hangup.recv() => {}
                    () = tokio::time::sleep(LOOK) => {}
                }
            }
            let reloader = reloader.clone();
            match tokio::task::spawn_blocking(move || reloader.reload()).await {
                Ok(Ok(Loaded::Fresh { generation, cut })) => {
                    tracing::info!(generation, cut = cut.len(), "policies loaded");
                }
                Ok(Ok(Loaded::Same { .. }) | Err(_)) => {} // it has said itself what is wrong
                Err(error) => tracing::error!(%error, "a load broke; the rules in force stay"),
            }
        }
    }

    /// Waits for the end of a storm: what counts is its last content.
    async fn quiet(&mut self) {
        let storm = async {
            while timeout(QUIET, changed(&mut self.events, &self.watched)).await.is_ok() {}
        };
        drop(timeout(STORM, storm).await); // one that goes on is looked at in between
    }

    /// Watches what is to be watched, and nothing else. A directory that took another's place is a new one.
    fn follow(&mut self, files: &[PathBuf]) -> Followed {
        let mask = WatchMask::ATTRIB
            | WatchMask::CLOSE_WRITE
            | WatchMask::CREATE
            | WatchMask::DELETE
            | WatchMask::DELETE_SELF
            | WatchMask::MOVED_FROM
            | WatchMask::MOVED_TO
            | WatchMask::MOVE_SELF;
        let mut before = std::mem::take(&mut self.watched);
        let mut followed = Followed::Known;
        for (dir, interest) in directories(files) {
            // One that is gone is watched again when it is back: its parent tells of that, or a look does.
            let Ok(watch) = self.events.get_ref().watches().add(&dir, mask) else { continue };
            if before.remove(&watch).is_none() && !self.watched.contains_key(&watch) {
                followed = Followed::Something;
            }
            self.watched.entry(watch).or_insert(Interest::Named(BTreeSet::new())).widen(interest);
        }
        for watch in before.into_keys() {
            drop(self.events.get_ref().watches().remove(watch)); // the kernel may have done so already
        }
        followed
    }
}

/// The directories of the files, and those in which these directories stand.
fn directories(files: &[PathBuf]) -> BTreeMap<PathBuf, Interest> {
    let mut all = BTreeMap::new();
    let own: BTreeSet<PathBuf> = files.iter().filter_map(|file| parent(file)).collect();
    for dir in &own {
        let (Some(above), Some(name)) = (parent(dir), dir.file_name()) else { continue };
        let named = all.entry(above).or_insert_with(|| Interest::Named(BTreeSet::new()));
        if let Interest::Named(names) = named {
            names.insert(name.to_owned());
        }
    }
    all.extend(own.into_iter().map(|dir| (dir, Interest::All)));
    all
}

fn parent(path: &Path) -> Option<PathBuf> {
    let dir = path.parent()?;
    Some(if dir.as_os_str().is_empty() { ".".into() } else { dir.to_owned() })
}

/// Returns once the kernel tells of a change that counts, with its events read.
async fn changed(events: &mut AsyncFd<Inotify>, watched: &HashMap<WatchDescriptor, Interest>) {
    loop {
        let Ok(mut ready) = events.readable_mut().await else {
            return std::future::pending().await;
        };
        let mut buffer = [0; EVENTS];
        let read = ready.try_io(|inner| {
            let mut events = inner.get_mut().read_events(&mut buffer)?;
            Ok(events.any(|event| counts(&event, watched)))
        });
        match read {
            Ok(Ok(false)) | Err(_) => {}
            Ok(Ok(true)) => return,
            Ok(Err(_)) => return tokio::time::sleep(QUIET).await,
        }
    }
}

/// Whether an event may be about our files. That some were lost is one, too.
fn counts(event: &Event<&std::ffi::OsStr>, watched: &HashMap<WatchDescriptor, Interest>) -> bool {
    if event.mask.contains(EventMask::Q_OVERFLOW) {
        return true;
    }
    match (watched.get(&event.wd), event.name) {
        (None, _) => false,
        (Some(Interest::All), _) | (Some(Interest::Named(_)), None) => true,
        (Some(Interest::Named(names)), Some(name)) => names.contains(name),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn directories_are_watched_whole_and_those_above_by_name() {
        let files = ["/etc/sandbar/sandbar.toml", "/srv/p/a.toml", "/srv/p/lists/l.txt"];
        let found = directories(&files.map(PathBuf::from));
        let named = |name: &str| Interest::Named(BTreeSet::from([OsString::from(name)]));
        let wanted = [
            ("/etc", named("sandbar")),
            ("/etc/sandbar", Interest::All),
            ("/srv", named("p")),
            ("/srv/p", Interest::All),
            ("/srv/p/lists", Interest::All),
        ];
        assert_eq!(found, wanted.map(|(dir, interest)| (PathBuf::from(dir), interest)).into());
        let here = directories(&[PathBuf::from("sandbar.toml"), PathBuf::from("p/a.toml")]);
        assert_eq!(
            here.keys().map(|dir| dir.display().to_string()).collect::<Vec<_>>(),
            [".", "p"]
        );
    }
}
