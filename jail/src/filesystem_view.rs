//! Plans which of the machine's files the jail sees. Runs in the proxy, before anything is mounted; `mounts` carries
//! the plan out in init.
//!
//! Everything is read-only except the working directory, the home directory, and what the caller names. Temporary and
//! runtime directories are new and empty. In the home directory, startup files that programs outside run or obey are
//! read-only, and credentials are hidden. The command cannot move any of these away, nor a directory or symbolic link
//! that leads to them.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use super::credential_files::{home_credentials, system_credentials};
use super::paths::{MountTable, find_symlinks};

/// Directories that are new and empty inside. Outside they hold sockets of daemons, agents and displays, and files
/// that other programs of the caller trust.
const FRESH_DIRS: &[&str] = &["/run", "/tmp", "/var/run", "/var/tmp"];
/// System directories: a working directory in one of these stays read-only.
const SYSTEM_DIRS: &[&str] = &[
    "/bin", "/boot", "/dev", "/etc", "/lib", "/lib32", "/lib64", "/libx32", "/nix", "/opt", "/proc", "/sbin",
    "/snap", "/sys", "/usr",
];
/// Files in the home directory that programs outside run or obey, which are read-only.
const STARTUP_FILES: &[&str] = &[
    ".bash_aliases",
    ".bash_login",
    ".bash_logout",
    ".bash_profile",
    ".bashrc",
    ".config/autostart",
    ".config/environment.d",
    ".config/fish",
    ".config/git",
    ".config/nvim",
    ".config/systemd",
    ".gitconfig",
    ".inputrc",
    ".local/share/systemd",
    ".pam_environment",
    ".profile",
    ".tmux.conf",
    ".vim",
    ".vimrc",
    ".xinitrc",
    ".xprofile",
    ".xsession",
    ".xsessionrc",
    ".zlogin",
    ".zlogout",
    ".zprofile",
    ".zshenv",
    ".zshrc",
];

/// Where the caller keeps policies, in the home directory; hidden.
const SANDBAR_CONFIG: &str = ".config/sandbar";

/// What init mounts at a path.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum MountAction {
    /// In place of a credential: an empty directory or file that the command may write, in memory.
    Blank,
    /// An empty directory or file over the original.
    Hide,
    /// A new directory, empty and writable.
    Fresh,
    /// The symbolic link itself, as a mount, so that it cannot be replaced.
    Link,
    /// The original, read-only.
    ReadOnly,
    /// The original, writable where the caller can write.
    Writable,
}

impl MountAction {
    /// Whether what is at the path is not to be seen inside.
    fn hides(&self) -> bool {
        match self {
            MountAction::Blank | MountAction::Hide => true,
            MountAction::Fresh | MountAction::Link | MountAction::ReadOnly | MountAction::Writable => false,
        }
    }
}

/// What the caller of `sandbar run` asks for.
#[derive(Clone, Debug, Default)]
pub struct ViewOptions {
    pub cwd: PathBuf,
    pub home: Option<PathBuf>,
    /// The home directory in the account database; `HOME` may name another.
    pub account: Option<PathBuf>,
    pub runtime: Option<PathBuf>,
    /// Additional writable directories.
    pub writable: Vec<PathBuf>,
    /// Paths to expose, read-only, that are hidden or new by default.
    pub visible: Vec<PathBuf>,
    /// Directories and files of Sandbar, which are hidden.
    pub hidden: Vec<PathBuf>,
    /// Credentials at other places than the usual ones.
    pub credentials: Vec<PathBuf>,
    /// CA certificates that the proxy trusts. They are read-only inside where possible.
    pub trusted: Vec<PathBuf>,
    /// Policy files and directories, and the lists they name.
    pub policies: Vec<PathBuf>,
}

/// The files that the jail sees.
#[derive(Clone, Debug)]
pub struct FilesystemView {
    pub(super) cwd: PathBuf,
    pub(super) changes: Vec<(PathBuf, MountAction)>,
    /// Unix sockets of processes outside, at any path.
    pub(super) sockets: Vec<PathBuf>,
    /// Policies that the command could change: the proxy reads them once and does not follow edits.
    pub exposed: BTreeMap<PathBuf, PolicyExposure>,
}

/// How the command could change a policy although its path is read-only.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PolicyExposure {
    /// The file has another hard link.
    HardLink,
    /// It is in a directory that the command works in, behind a symbolic link that the command can replace, or in a
    /// directory that is mounted elsewhere, too, where the command can write.
    Location,
}

impl std::fmt::Display for PolicyExposure {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            PolicyExposure::HardLink => "has another hard link, through which the command may write it",
            PolicyExposure::Location => "is in a place where the command can write",
        })
    }
}

impl FilesystemView {
    /// Plans the view. It ignores paths that do not exist.
    ///
    /// # Errors
    ///
    /// Fails if the working directory does not exist or belongs to Sandbar.
    pub fn build(options: &ViewOptions) -> anyhow::Result<Self> {
        let real = |path: &PathBuf| fs::canonicalize(path).ok();
        let cwd = fs::canonicalize(&options.cwd)?;
        let hidden: Vec<PathBuf> = options.hidden.iter().filter_map(real).collect();
        if let Some(dir) = hidden.iter().find(|dir| cwd.starts_with(dir)) {
            anyhow::bail!("{} belongs to Sandbar: run the command from another directory", dir.display());
        }
        let home_of =
            |path: &Option<PathBuf>| path.iter().filter_map(real).find(|home| home.parent().is_some());
        let home = home_of(&options.home);
        let homes: BTreeSet<PathBuf> = home_of(&options.account).into_iter().chain(home.clone()).collect();
        let visible: BTreeSet<PathBuf> = options.visible.iter().filter_map(real).collect();
        let mut view = MountPlan::default();
        for path in FRESH_DIRS.iter().map(PathBuf::from).chain(options.runtime.clone()) {
            view.set(real(&path).filter(|path| path.is_dir()), MountAction::Fresh);
        }
        let in_home = |names: &[&str]| -> Vec<PathBuf> {
            let homes = homes.iter();
            homes.flat_map(|home| names.iter().map(move |name| home.join(name))).collect()
        };
        view.set(home, MountAction::Writable);
        view.make_cwd_writable(&cwd);
        for path in in_home(STARTUP_FILES) {
            view.protect(&path, MountAction::ReadOnly);
        }
        view.make_cwd_writable(&cwd); // a working directory inside one of those is intended
        for path in in_home(&[SANDBAR_CONFIG]) {
            view.protect(&path, MountAction::Hide);
        }
        let usual = homes.iter().flat_map(|home| home_credentials(home)).chain(system_credentials());
        for path in usual.chain(options.credentials.iter().cloned()) {
            view.protect(&path, MountAction::Blank);
        }
        // Explicit options override the defaults above.
        for path in &visible {
            view.set(Some(path.clone()), MountAction::ReadOnly);
        }
        for path in options.writable.iter().filter_map(real) {
            view.set(Some(path), MountAction::Writable);
        }
        if view.action_for(&cwd).is_some_and(MountAction::hides) {
            let shown = cwd.display();
            anyhow::bail!(
                "{shown} is hidden inside: run the command from another directory, or give it with --writable {shown}"
            );
        }
        if let Ok(sandbar) = std::env::current_exe() {
            view.protect(&sandbar, MountAction::ReadOnly);
        }
        for path in hidden {
            view.protect(&path, MountAction::Hide);
        }
        let mounts = MountTable::read();
        view.protect_policies(&options.trusted, &cwd, &mounts);
        let exposed = view.protect_policies(&options.policies, &cwd, &mounts);
        view.hide_aliases(&mounts);
        let sockets = list_unix_sockets();
        for socket in sockets.iter().filter_map(real) {
            view.pin(&socket); // if the command renamed its directory, the next jail would not cover it
        }
        let aliases: Vec<PathBuf> = sockets.iter().flat_map(|path| mounts.aliases(path)).collect();
        let sockets = sockets.into_iter().chain(aliases).collect();
        Ok(FilesystemView { cwd, changes: view.0, sockets, exposed })
    }

    /// Returns a watcher for what is hidden.
    pub fn watch_hidden(&self) -> HiddenFileWatcher {
        let hidden = self.changes.iter().filter(|(_, action)| *action == MountAction::Blank);
        HiddenFileWatcher(hidden.map(|(path, _)| (path.clone(), identity(path))).collect())
    }

    /// Returns whether the command can write at a real path, as far as the caller can.
    pub(super) fn is_writable(&self, path: &Path) -> bool {
        action_for(&self.changes, path) == Some(&MountAction::Writable)
    }
}

/// Returns the action that applies to a path: its own, or that of its nearest ancestor with one.
fn action_for<'a>(changes: &'a [(PathBuf, MountAction)], path: &Path) -> Option<&'a MountAction> {
    path.ancestors()
        .find_map(|ancestor| changes.iter().find(|(known, _)| known == ancestor).map(|(_, action)| action))
}

/// Returns whether `cwd` becomes writable because it is the working directory.
fn is_workspace(cwd: &Path) -> bool {
    cwd.parent().is_some() && !SYSTEM_DIRS.iter().any(|system| cwd.starts_with(system))
}

/// Actions by path, sorted, so that parents come before children.
#[derive(Default)]
struct MountPlan(Vec<(PathBuf, MountAction)>);

impl MountPlan {
    /// Sets the action for a path, replacing an earlier one.
    fn set(&mut self, path: Option<PathBuf>, action: MountAction) {
        let Some(path) = path else { return };
        self.0.retain(|(known, _)| *known != path);
        let at = self.0.partition_point(|(known, _)| *known < path);
        self.0.insert(at, (path, action));
    }

    fn action_for(&self, path: &Path) -> Option<&MountAction> {
        action_for(&self.0, path)
    }

    fn is_writable(&self, path: &Path) -> bool {
        self.action_for(path) == Some(&MountAction::Writable)
    }

    /// Makes the working directory writable. If it already is, it does not become a mount of its own, because files
    /// cannot be renamed between mounts.
    fn make_cwd_writable(&mut self, cwd: &Path) {
        if is_workspace(cwd) && self.action_for(cwd) != Some(&MountAction::Writable) {
            self.set(Some(cwd.to_owned()), MountAction::Writable);
        }
    }

    /// Sets the action for what a path leads to, and pins every directory and symbolic link along it: otherwise the
    /// command could rename one of them and put another file in its place.
    fn protect(&mut self, path: &Path, action: MountAction) {
        let Ok(real) = fs::canonicalize(path) else { return };
        for link in find_symlinks(path) {
            if self.action_for(&link) == Some(&MountAction::Writable) {
                self.pin(&link);
                self.set(Some(link), MountAction::Link);
            }
        }
        self.pin(&real);
        self.set(Some(real), action);
    }

    /// Hides every other path that leads to a hidden file through another mount of its file system.
    fn hide_aliases(&mut self, mounts: &MountTable) {
        let hidden = self.0.iter().filter(|(_, action)| action.hides());
        let alias = |(path, action): &(PathBuf, MountAction)| {
            let action = action.clone();
            mounts.aliases(path).into_iter().map(move |path| (path, action.clone()))
        };
        let aliases: Vec<(PathBuf, MountAction)> = hidden.flat_map(alias).collect();
        for (path, action) in aliases {
            self.protect(&path, action);
        }
    }

    /// Makes the directories of policies read-only, not the files: editors replace a file, and the mount would stay
    /// on the old one. Returns the policies that cannot be protected this way.
    fn protect_policies(
        &mut self,
        policies: &[PathBuf],
        cwd: &Path,
        mounts: &MountTable,
    ) -> BTreeMap<PathBuf, PolicyExposure> {
        let mut exposed = BTreeMap::new();
        for named in policies {
            let Ok(policy) = fs::canonicalize(named) else { continue };
            if find_symlinks(named).iter().any(|link| self.is_writable(link))
                || mounts.aliases(&policy).iter().any(|alias| self.is_writable(alias))
            {
                exposed.insert(named.clone(), PolicyExposure::Location);
            } else if sys::file::has_writable_link(&policy) {
                exposed.insert(named.clone(), PolicyExposure::HardLink);
            }
            let dir = if policy.is_dir() { Some(policy.as_path()) } else { policy.parent() };
            let Some(dir) = dir.map(Path::to_owned) else { continue };
            match self.action_for(&policy) {
                None
                | Some(
                    MountAction::Blank
                    | MountAction::Fresh
                    | MountAction::Hide
                    | MountAction::Link
                    | MountAction::ReadOnly,
                ) => {}
                Some(MountAction::Writable) => {
                    let worked_in = self
                        .0
                        .iter()
                        .any(|(known, action)| *action == MountAction::Writable && known.starts_with(&dir));
                    if worked_in || cwd.starts_with(&dir) {
                        self.set(Some(policy.clone()), MountAction::ReadOnly);
                        exposed.insert(policy, PolicyExposure::Location);
                        continue;
                    }
                    self.pin(&dir);
                    self.set(Some(dir), MountAction::ReadOnly);
                }
            }
        }
        exposed
    }

    /// Makes every writable ancestor of a path a mount of its own: a mount point cannot be renamed from inside.
    fn pin(&mut self, dir: &Path) {
        if self.action_for(dir) != Some(&MountAction::Writable) {
            return;
        }
        let between: Vec<PathBuf> = dir
            .ancestors()
            .skip(1)
            .take_while(|ancestor| !self.0.iter().any(|(known, _)| known == ancestor))
            .map(Path::to_owned)
            .collect();
        for ancestor in between {
            self.set(Some(ancestor), MountAction::Writable);
        }
    }
}

/// Detects credentials that a program outside has replaced: renaming a file over another takes away what is mounted
/// there, in every mount namespace. Runs in the proxy, while the command runs.
#[derive(Debug)]
pub struct HiddenFileWatcher(Vec<(PathBuf, Option<FileIdentity>)>);

/// Device and inode.
type FileIdentity = (u64, u64);

impl HiddenFileWatcher {
    /// Returns the paths that lead to another file than at the last call.
    pub fn poll_replaced(&mut self) -> Vec<PathBuf> {
        let mut replaced = Vec::new();
        for (path, known) in &mut self.0 {
            let now = identity(path);
            if now.is_some() && now != *known {
                replaced.push(path.clone());
            }
            *known = now;
        }
        replaced
    }
}

fn identity(path: &Path) -> Option<FileIdentity> {
    fs::symlink_metadata(path).ok().map(|found| (found.dev(), found.ino()))
}

/// Returns the unix sockets that have a path, in every network namespace that the caller can read. Abstract sockets
/// need no cover: they belong to their network namespace.
fn list_unix_sockets() -> Vec<PathBuf> {
    let processes = fs::read_dir("/proc").into_iter().flatten().flatten();
    let processes = processes.map(|entry| entry.path());
    let mut networks = BTreeSet::new();
    let each = processes.filter(|process| {
        fs::read_link(process.join("ns/net")).is_ok_and(|network| networks.insert(network))
    });
    let lists = each.collect::<Vec<_>>().into_iter().chain([PathBuf::from("/proc/self")]);
    let lists = lists.filter_map(|process| fs::read_to_string(process.join("net/unix")).ok());
    lists.flat_map(|list| socket_paths(&list)).collect::<BTreeSet<_>>().into_iter().collect()
}

/// Detects new unix sockets in the network namespace of this process. Runs in the proxy, while the command runs.
#[derive(Debug, Default)]
pub struct UnixSocketWatcher(BTreeSet<SocketEntry>);

impl UnixSocketWatcher {
    /// Returns the paths of the unix sockets that are new since the last call. One that replaced another has the same
    /// path and another inode, so it is new.
    pub fn poll_new(&mut self) -> Vec<PathBuf> {
        let Ok(list) = fs::read_to_string("/proc/self/net/unix") else { return Vec::new() };
        let before = std::mem::replace(&mut self.0, parse_sockets(&list));
        self.0.difference(&before).flat_map(SocketEntry::paths).collect()
    }
}

/// A unix socket with a path, in the contents of `/proc/net/unix`.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct SocketEntry {
    /// As it was bound, so possibly relative.
    name: String,
    /// `None` for a stream that does not listen: one that is about to, or a connection that a listener has accepted.
    inode: Option<String>,
}

impl SocketEntry {
    /// Flag of a socket that listens (`__SO_ACCEPTCON`), and the type of datagram sockets (`SOCK_DGRAM`).
    const LISTENING: u32 = 0x1_0000;
    const DATAGRAM: &'static str = "0002";

    /// Parses a line; the eighth column is the name, which may contain spaces.
    fn parse(line: &str) -> Option<Self> {
        let (mut columns, mut rest) = ([""; 7], line);
        for column in &mut columns {
            (*column, rest) = rest.trim_start().split_once(' ')?;
        }
        let [_, _, _, flags, kind, _, inode] = columns;
        let listens = u32::from_str_radix(flags, 16).is_ok_and(|flags| flags & Self::LISTENING != 0);
        let inode = (listens || kind == Self::DATAGRAM).then(|| inode.to_owned());
        Some(SocketEntry { name: rest.to_owned(), inode })
    }

    fn paths(&self) -> Vec<PathBuf> {
        match &self.inode {
            _ if self.name.starts_with('/') => vec![PathBuf::from(&self.name)],
            Some(inode) => resolve_relative_socket(inode, &self.name),
            None => Vec::new(),
        }
    }
}

/// Parses the contents of `/proc/net/unix`, without abstract sockets.
fn parse_sockets(list: &str) -> BTreeSet<SocketEntry> {
    list.lines().filter_map(SocketEntry::parse).filter(|entry| !entry.name.starts_with('@')).collect()
}

/// Returns the paths in the contents of `/proc/net/unix`. A socket that was bound by a relative path appears there
/// with that relative path only.
fn socket_paths(list: &str) -> Vec<PathBuf> {
    parse_sockets(list).iter().flat_map(SocketEntry::paths).collect()
}

/// Resolves a relative socket path against the working directory of every process that holds the socket. The result
/// is right if one of them is still in the directory where it was bound.
fn resolve_relative_socket(inode: &str, name: &str) -> Vec<PathBuf> {
    let wanted = PathBuf::from(format!("socket:[{inode}]"));
    let processes = fs::read_dir("/proc").into_iter().flatten().flatten();
    let holds_socket = |process: &PathBuf| {
        let mut open = fs::read_dir(process.join("fd")).into_iter().flatten().flatten();
        open.any(|open| fs::read_link(open.path()).is_ok_and(|link| link == wanted))
    };
    let holders = processes.map(|entry| entry.path()).filter(holds_socket);
    holders.filter_map(|process| Some(fs::read_link(process.join("cwd")).ok()?.join(name))).collect()
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    /// Creates a home directory with a few files, outside the directories that are new in a jail.
    fn make_home() -> (tempfile::TempDir, PathBuf) {
        let dir = tempfile::tempdir_in(env!("CARGO_MANIFEST_DIR")).unwrap();
        let home = fs::canonicalize(dir.path()).unwrap();
        for name in ["work/deep", "conf/policies", ".config/gh", ".ssh", "dots", "state/own"] {
            fs::create_dir_all(home.join(name)).unwrap();
        }
        for name in [".bashrc", "conf/policies/own.toml", "dots/zshrc", "work/own.toml"] {
            fs::write(home.join(name), "").unwrap();
        }
        symlink("dots/zshrc", home.join(".zshrc")).unwrap();
        symlink("conf/policies", home.join("linked")).unwrap();
        (dir, home)
    }

    #[test]
    fn each_path_gets_its_action() {
        let (_dir, home) = make_home();
        let view = FilesystemView::build(&ViewOptions {
            cwd: home.join("work"),
            home: Some(home.clone()),
            hidden: vec![home.join("state/own")],
            policies: vec![home.join("conf/policies/own.toml")],
            ..ViewOptions::default()
        });
        let view = view.unwrap();
        assert!(view.exposed.is_empty());
        let changes = MountPlan(view.changes);
        for (path, wanted) in [
            ("", Some(MountAction::Writable)),
            ("work", Some(MountAction::Writable)),
            ("other/file", Some(MountAction::Writable)),
            (".bashrc", Some(MountAction::ReadOnly)),
            (".config/gh", Some(MountAction::Blank)),
            (".config/other", Some(MountAction::Writable)),
            (".ssh/id", Some(MountAction::Blank)),
            (".zshrc", Some(MountAction::Link)),
            ("dots/zshrc", Some(MountAction::ReadOnly)),
            ("dots/other", Some(MountAction::Writable)),
            ("state/own/log", Some(MountAction::Hide)),
            ("conf/policies/own.toml", Some(MountAction::ReadOnly)),
            ("conf/policies/new.toml", Some(MountAction::ReadOnly)),
            ("..", None),
        ] {
            let path = if path == ".." { PathBuf::from("/etc/passwd") } else { home.join(path) };
            assert_eq!(changes.action_for(&path), wanted.as_ref(), "{}", path.display());
        }
        // A directory or link that the command could rename and replace is a mount of its own.
        for pinned in [".config", ".zshrc", "conf", "dots", "state"] {
            let pinned = home.join(pinned);
            assert!(changes.0.iter().any(|(path, _)| *path == pinned), "{}", pinned.display());
        }
        assert!(changes.0.is_sorted_by(|one, other| one.0 < other.0), "parents before children");
    }

    #[test]
    fn credentials_of_the_account_are_hidden_wherever_home_is() {
        let (_dir, account) = make_home();
        for home in [None, Some(account.join("work"))] {
            let view = FilesystemView::build(&ViewOptions {
                cwd: account.join("work"),
                home,
                account: Some(account.clone()),
                ..ViewOptions::default()
            });
            let changes = MountPlan(view.unwrap().changes);
            for (path, wanted) in [
                (".ssh/id", Some(MountAction::Blank)),
                (".config/gh", Some(MountAction::Blank)),
                ("work/file", Some(MountAction::Writable)),
            ] {
                assert_eq!(changes.action_for(&account.join(path)), wanted.as_ref(), "{path}");
            }
            assert_ne!(changes.action_for(&account.join("other")), Some(&MountAction::Writable));
        }
    }

    #[test]
    fn a_policy_that_the_command_can_replace_is_reported() {
        let (_dir, home) = make_home();
        for (cwd, policy, exposed) in [
            ("work", "work/own.toml", true),
            ("work/deep", "work/own.toml", true),
            ("work", "work", true),
            ("work", "conf/policies", false),
            ("conf/policies", "conf/policies/own.toml", true),
            ("conf", "conf/policies/own.toml", false),
            ("work", "linked/own.toml", true),
            ("work", "linked", true),
        ] {
            let policies = vec![home.join(policy)];
            let home = Some(home.clone());
            let cwd = home.as_ref().unwrap().join(cwd);
            let view = FilesystemView::build(&ViewOptions {
                cwd: cwd.clone(),
                home,
                policies,
                ..ViewOptions::default()
            });
            assert_eq!(!view.unwrap().exposed.is_empty(), exposed, "{policy} from {}", cwd.display());
        }
    }

    #[test]
    fn a_system_directory_stays_read_only_as_working_directory() {
        for (cwd, writable) in [("/", false), ("/etc", false), ("/usr/share", false), ("/tmp", true)] {
            let view =
                FilesystemView::build(&ViewOptions { cwd: cwd.into(), ..ViewOptions::default() }).unwrap();
            let action = MountPlan(view.changes).action_for(Path::new(cwd)).cloned();
            assert_eq!(action == Some(MountAction::Writable), writable, "{cwd}");
        }
    }

    #[test]
    fn a_working_directory_of_sandbar_is_refused() {
        let (_dir, home) = make_home();
        let (cwd, hidden) = (home.join("state/own"), vec![home.join("state/own")]);
        assert!(FilesystemView::build(&ViewOptions { cwd, hidden, ..ViewOptions::default() }).is_err());
    }

    #[test]
    fn sockets_are_found_by_their_paths() {
        let list = "Num       RefCount Protocol Flags    Type St Inode Path\n\
            ffff8880: 00000002 00000000 00010000 0001 01 12345 /run/with space.sock\n\
            ffff8881: 00000003 00000000 00000000 0001 03 12346\n\
            ffff8882: 00000002 00000000 00010000 0001 01 12347 @/abstract\n";
        assert_eq!(socket_paths(list), [PathBuf::from("/run/with space.sock")]);
        let part = "0000000000000000: 00000002 00000000 00010000 0001 01   317 part/of.sock";
        let wanted = SocketEntry { name: "part/of.sock".to_owned(), inode: Some("317".to_owned()) };
        assert_eq!(SocketEntry::parse(part), Some(wanted));
        let accepted = "ffff8883: 00000003 00000000 00000000 0001 03 12348 /run/daemon.sock";
        let wanted = SocketEntry { name: "/run/daemon.sock".to_owned(), inode: None };
        assert_eq!(
            SocketEntry::parse(accepted),
            Some(wanted),
            "each connection to a daemon is not a new socket"
        );
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("one.sock");
        let _listening = std::os::unix::net::UnixListener::bind(&path).unwrap();
        assert!(list_unix_sockets().contains(&path));
    }

    #[test]
    fn lists_are_sorted_without_duplicates() {
        for list in [STARTUP_FILES, FRESH_DIRS, SYSTEM_DIRS] {
            assert!(list.is_sorted_by(|one, other| one < other), "{list:?}");
        }
    }
}
