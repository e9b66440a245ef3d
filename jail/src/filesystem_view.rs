//! What a jail sees of the machine's files: decided outside, before anything is mounted.
//!
//! Everything is read-only but the working directory, the home directory, and what is asked for. Temporary and
//! runtime directories are new and empty. In the home directory what outlives the jail and is run or believed
//! outside is read-only, and what proves who the caller is, is hidden. Nothing of this is moved away from inside,
//! nor is a directory or a symbolic link on the way to it.

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};

use super::paths::{MountTable, find_symlinks};

/// Directories that are new and empty inside: sockets of daemons, agents and displays live there, and
/// files that other programs of the caller trust.
const FRESH_DIRS: &[&str] = &["/run", "/tmp", "/var/run", "/var/tmp"];
/// Below these nothing becomes writable by being worked in.
const SYSTEM_DIRS: &[&str] = &[
    "/bin", "/boot", "/dev", "/etc", "/lib", "/lib32", "/lib64", "/libx32", "/nix", "/opt",
    "/proc", "/sbin", "/snap", "/sys", "/usr",
];
/// In the home directory: what proves who the caller is.
const CREDENTIAL_PATHS: &[&str] = &[
    ".aws",
    ".azure",
    ".config/gcloud",
    ".config/gh",
    ".config/sandbar",
    ".docker",
    ".git-credentials",
    ".gnupg",
    ".kube",
    ".local/share/keyrings",
    ".netrc",
    ".password-store",
    ".pki",
    ".ssh",
];
/// In the home directory: what programs outside run or obey.
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
/// Variables that lead to sockets, or to proxies that cannot be reached from inside.
const DROPPED_VARIABLES: &[&str] = &[
    "ALL_PROXY",
    "CONTAINERD_ADDRESS",
    "CONTAINER_HOST",
    "DBUS_SESSION_BUS_ADDRESS",
    "DBUS_SYSTEM_BUS_ADDRESS",
    "DISPLAY",
    "DOCKER_HOST",
    "FTP_PROXY",
    "GNOME_KEYRING_CONTROL",
    "GPG_AGENT_INFO",
    "HTTPS_PROXY",
    "HTTP_PROXY",
    "I3SOCK",
    "KITTY_LISTEN_ON",
    "LISTEN_FDNAMES",
    "LISTEN_FDS",
    "LISTEN_PID",
    "NOTIFY_SOCKET",
    "NO_PROXY",
    "PULSE_SERVER",
    "SSH_AGENT_PID",
    "SSH_AUTH_SOCK",
    "STY",
    "SWAYSOCK",
    "TMPDIR",
    "TMUX",
    "TMUX_PANE",
    "VSCODE_GIT_IPC_HANDLE",
    "VSCODE_IPC_HOOK_CLI",
    "WAYLAND_DISPLAY",
    "WAYLAND_SOCKET",
    "XAUTHORITY",
];

/// One thing that is done to a path, parents before children.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum MountAction {
    /// Nothing is there any more.
    Hide,
    /// A new directory, empty and writable.
    Fresh,
    /// A symbolic link, which leads where it did.
    Link,
    /// As outside, but never written.
    ReadOnly,
    /// As outside, and written as outside.
    Writable,
}

/// What is asked for by whoever runs the command.
#[derive(Clone, Debug, Default)]
pub struct ViewOptions {
    pub cwd: PathBuf,
    pub home: Option<PathBuf>,
    /// The home directory of the account, which `HOME` need not be.
    pub account: Option<PathBuf>,
    pub runtime: Option<PathBuf>,
    /// Directories to be written.
    pub writable: Vec<PathBuf>,
    /// What would be hidden or new and shall be seen.
    pub visible: Vec<PathBuf>,
    /// Directories and files of ours, which nobody inside sees.
    pub hidden: Vec<PathBuf>,
    /// Files of trust: nobody inside changes them, if it can be helped.
    pub trusted: Vec<PathBuf>,
    /// Files that rules come from.
    pub policies: Vec<PathBuf>,
}

/// What the jail sees.
#[derive(Clone, Debug)]
pub struct FilesystemView {
    pub(super) cwd: PathBuf,
    pub(super) changes: Vec<(PathBuf, MountAction)>,
    /// Unix sockets that somebody outside listens on, wherever they are.
    pub(super) sockets: Vec<PathBuf>,
    /// Policies that the command can write: they are read once.
    pub exposed: BTreeSet<PathBuf>,
}

impl FilesystemView {
    /// Decides what is seen. Only paths that exist are changed: there is nothing to hide of others.
    pub fn build(wishes: &ViewOptions) -> anyhow::Result<Self> {
        let real = |path: &PathBuf| fs::canonicalize(path).ok();
        let cwd = fs::canonicalize(&wishes.cwd)?;
        let hidden: Vec<PathBuf> = wishes.hidden.iter().filter_map(real).collect();
        if let Some(own) = hidden.iter().find(|own| cwd.starts_with(own)) {
            anyhow::bail!("{} is Sandbar's own: run the command from elsewhere", own.display());
        }
        let home_of = |path: &Option<PathBuf>| {
            path.iter().filter_map(real).find(|home| home.parent().is_some())
        };
        let home = home_of(&wishes.home);
        let homes: BTreeSet<PathBuf> =
            home_of(&wishes.account).into_iter().chain(home.clone()).collect();
        let visible: BTreeSet<PathBuf> = wishes.visible.iter().filter_map(real).collect();
        let mut view = MountPlan::default();
        for path in FRESH_DIRS.iter().map(PathBuf::from).chain(wishes.runtime.clone()) {
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
        for path in in_home(CREDENTIAL_PATHS) {
            view.protect(&path, MountAction::Hide);
        }
        view.make_cwd_writable(&cwd); // whoever works in one of those means it
        // After everything that is so by itself: what is asked for by name counts.
        for path in &visible {
            view.set(Some(path.clone()), MountAction::ReadOnly);
        }
        for path in wishes.writable.iter().filter_map(real) {
            view.set(Some(path), MountAction::Writable);
        }
        if let Ok(own) = std::env::current_exe() {
            view.protect(&own, MountAction::ReadOnly);
        }
        for path in hidden {
            view.protect(&path, MountAction::Hide);
        }
        view.protect_policies(&wishes.trusted, &cwd);
        let exposed = view.protect_policies(&wishes.policies, &cwd);
        let mounts = MountTable::read();
        view.hide_aliases(&mounts);
        let sockets = list_unix_sockets();
        for socket in sockets.iter().filter_map(real) {
            view.pin(&socket); // or the next jail would not find it where it was made
        }
        let again: Vec<PathBuf> = sockets.iter().flat_map(|path| mounts.aliases(path)).collect();
        let sockets = sockets.into_iter().chain(again).collect();
        Ok(FilesystemView { cwd, changes: view.0, sockets, exposed })
    }
}

/// Whether a directory becomes writable by being worked in.
fn is_workspace(cwd: &Path) -> bool {
    cwd.parent().is_some() && !SYSTEM_DIRS.iter().any(|system| cwd.starts_with(system))
}

#[derive(Default)]
struct MountPlan(Vec<(PathBuf, MountAction)>);

impl MountPlan {
    /// Later changes of a path take the place of earlier ones; parents stand before children.
    fn set(&mut self, path: Option<PathBuf>, change: MountAction) {
        let Some(path) = path else { return };
        self.0.retain(|(known, _)| *known != path);
        let at = self.0.partition_point(|(known, _)| *known < path);
        self.0.insert(at, (path, change));
    }

    /// What becomes of a path: the change of its nearest changed ancestor, or of itself.
    fn action_for(&self, path: &Path) -> Option<&MountAction> {
        path.ancestors().find_map(|ancestor| {
            self.0.iter().find(|(known, _)| known == ancestor).map(|(_, change)| change)
        })
    }

    /// Makes the directory that is worked in writable. What is so already is not mounted again: files could
    /// not be moved between the two.
    fn make_cwd_writable(&mut self, cwd: &Path) {
        if is_workspace(cwd) && self.action_for(cwd) != Some(&MountAction::Writable) {
            self.set(Some(cwd.to_owned()), MountAction::Writable);
        }
    }

    /// Changes what a path leads to, for good: were it moved away, or a directory or a link on the way to it,
    /// another could be put in its place.
    fn protect(&mut self, path: &Path, change: MountAction) {
        let Ok(real) = fs::canonicalize(path) else { return };
        for link in find_symlinks(path) {
            if self.action_for(&link) == Some(&MountAction::Writable) {
                self.pin(&link);
                self.set(Some(link), MountAction::Link);
            }
        }
        self.pin(&real);
        self.set(Some(real), change);
    }

    /// Hides what is hidden in every other place too where its file system is mounted.
    fn hide_aliases(&mut self, mounts: &MountTable) {
        let hidden = self.0.iter().filter(|(_, change)| *change == MountAction::Hide);
        let again: Vec<PathBuf> = hidden.flat_map(|(path, _)| mounts.aliases(path)).collect();
        for path in again {
            self.protect(&path, MountAction::Hide);
        }
    }

    /// Makes the directories of policies read-only, for a file alone would be replaced by the next edit. Those
    /// that lie in a directory that is worked in cannot be guarded so, nor those that a link leads to which can be
    /// replaced; they are told.
    fn protect_policies(&mut self, policies: &[PathBuf], cwd: &Path) -> BTreeSet<PathBuf> {
        let mut exposed = BTreeSet::new();
        for named in policies {
            let Ok(policy) = fs::canonicalize(named) else { continue };
            if find_symlinks(named)
                .iter()
                .any(|link| self.action_for(link) == Some(&MountAction::Writable))
            {
                exposed.insert(named.clone());
            }
            let dir = if policy.is_dir() { Some(policy.as_path()) } else { policy.parent() };
            let Some(dir) = dir.map(Path::to_owned) else { continue };
            match self.action_for(&policy) {
                None
                | Some(
                    MountAction::Fresh
                    | MountAction::Hide
                    | MountAction::Link
                    | MountAction::ReadOnly,
                ) => {}
                Some(MountAction::Writable) => {
                    let worked_in = self.0.iter().any(|(known, change)| {
                        *change == MountAction::Writable && known.starts_with(&dir)
                    });
                    if worked_in || cwd.starts_with(&dir) {
                        self.set(Some(policy.clone()), MountAction::ReadOnly);
                        exposed.insert(policy);
                        continue;
                    }
                    self.pin(&dir);
                    self.set(Some(dir), MountAction::ReadOnly);
                }
            }
        }
        exposed
    }

    /// Keeps a directory where it is: what is a mount of its own cannot be renamed from inside.
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

/// The unix sockets that have a path, of every network that the caller can look into. Those without one are the
/// network namespace's.
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

/// The unix sockets of this process's own network, looked at again and again.
#[derive(Debug, Default)]
pub struct UnixSocketWatcher(String);

impl UnixSocketWatcher {
    /// The paths of all, if anything has changed since the last look: a socket that took the place of another
    /// has its path.
    pub fn poll_changes(&mut self) -> Option<Vec<PathBuf>> {
        let list = fs::read_to_string("/proc/self/net/unix").ok()?;
        if list == self.0 {
            return None;
        }
        self.0 = list;
        Some(socket_paths(&self.0))
    }
}

/// The paths of a list as the kernel writes it. Of a socket that was made in the directory where its process was,
/// the list has the name alone.
fn socket_paths(list: &str) -> Vec<PathBuf> {
    let named =
        list.lines().filter_map(parse_socket_entry).filter(|(_, name)| !name.starts_with('@'));
    let (whole, parts): (Vec<_>, Vec<_>) = named.partition(|(_, name)| name.starts_with('/'));
    let whole = whole.into_iter().map(|(_, name)| PathBuf::from(name));
    whole
        .chain(parts.into_iter().flat_map(|(inode, name)| resolve_relative_socket(inode, name)))
        .collect()
}

/// The number of a socket and its name: the seventh column, and the eighth, which may have spaces.
fn parse_socket_entry(line: &str) -> Option<(&str, &str)> {
    let (mut inode, mut rest) = ("", line);
    for _ in 0..7 {
        (inode, rest) = rest.trim_start().split_once(' ')?;
    }
    Some((inode, rest))
}

/// Where a socket is, if one of the processes that have it is still where it was made.
fn resolve_relative_socket(inode: &str, name: &str) -> Vec<PathBuf> {
    let wanted = PathBuf::from(format!("socket:[{inode}]"));
    let processes = fs::read_dir("/proc").into_iter().flatten().flatten();
    let has_it = |process: &PathBuf| {
        let mut open = fs::read_dir(process.join("fd")).into_iter().flatten().flatten();
        open.any(|open| fs::read_link(open.path()).is_ok_and(|link| link == wanted))
    };
    let holders = processes.map(|entry| entry.path()).filter(has_it);
    holders
        .filter_map(|process| Some(fs::read_link(process.join("cwd")).ok()?.join(name)))
        .collect()
}

/// The environment of the command: without what leads to what is hidden, with what makes tools trust us.
pub fn command_environment(
    given: impl Iterator<Item = (OsString, OsString)>,
    added: Vec<(String, String)>,
) -> Vec<(OsString, OsString)> {
    let leads_out = |name: &OsString| {
        let name = name.to_string_lossy().to_ascii_uppercase();
        DROPPED_VARIABLES.contains(&name.as_str()) || name.starts_with("SANDBAR")
    };
    let mut kept: Vec<_> = given.filter(|(name, _)| !leads_out(name)).collect();
    for (name, value) in added {
        kept.retain(|(known, _)| *known != *name);
        kept.push((name.into(), value.into()));
    }
    kept
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn variables_that_lead_out_are_left_behind() {
        let given =
            [("PATH", "/bin"), ("SSH_AUTH_SOCK", "/x"), ("https_proxy", "http://p"), ("A", "1")];
        let given = given.iter().map(|(name, value)| (name.into(), value.into()));
        let kept = command_environment(given, vec![("A".to_owned(), "2".to_owned())]);
        let wanted: Vec<(OsString, OsString)> =
            vec![("PATH".into(), "/bin".into()), ("A".into(), "2".into())];
        assert_eq!(kept, wanted);
    }

    /// A home with a few things in it, below a directory that is not new inside.
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
    fn each_path_has_the_change_it_needs() {
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
            (".config/gh", Some(MountAction::Hide)),
            (".config/other", Some(MountAction::Writable)),
            (".ssh/id", Some(MountAction::Hide)),
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
        // What could be renamed to bring another in its place is a mount of its own.
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
                (".ssh/id", Some(MountAction::Hide)),
                (".config/gh", Some(MountAction::Hide)),
                ("work/file", Some(MountAction::Writable)),
            ] {
                assert_eq!(changes.action_for(&account.join(path)), wanted.as_ref(), "{path}");
            }
            assert_ne!(changes.action_for(&account.join("other")), Some(&MountAction::Writable));
        }
    }

    #[test]
    fn a_policy_that_the_command_can_replace_is_told() {
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
            assert_eq!(
                !view.unwrap().exposed.is_empty(),
                exposed,
                "{policy} from {}",
                cwd.display()
            );
        }
    }

    #[test]
    fn nothing_of_the_system_is_written_by_being_worked_in() {
        for (cwd, writable) in
            [("/", false), ("/etc", false), ("/usr/share", false), ("/tmp", true)]
        {
            let view =
                FilesystemView::build(&ViewOptions { cwd: cwd.into(), ..ViewOptions::default() })
                    .unwrap();
            let of = MountPlan(view.changes).action_for(Path::new(cwd)).cloned();
            assert_eq!(of == Some(MountAction::Writable), writable, "{cwd}");
        }
    }

    #[test]
    fn nobody_works_in_what_is_ours() {
        let (_dir, home) = make_home();
        let (cwd, hidden) = (home.join("state/own"), vec![home.join("state/own")]);
        assert!(
            FilesystemView::build(&ViewOptions { cwd, hidden, ..ViewOptions::default() }).is_err()
        );
    }

    #[test]
    fn sockets_are_found_by_their_paths() {
        let list = "Num       RefCount Protocol Flags    Type St Inode Path\n\
            ffff8880: 00000002 00000000 00010000 0001 01 12345 /run/with space.sock\n\
            ffff8881: 00000003 00000000 00000000 0001 03 12346\n\
            ffff8882: 00000002 00000000 00010000 0001 01 12347 @/abstract\n";
        assert_eq!(socket_paths(list), [PathBuf::from("/run/with space.sock")]);
        let part = "0000000000000000: 00000002 00000000 00010000 0001 01   317 part/of.sock";
        assert_eq!(parse_socket_entry(part), Some(("317", "part/of.sock")));
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("one.sock");
        let _listening = std::os::unix::net::UnixListener::bind(&path).unwrap();
        assert!(list_unix_sockets().contains(&path));
    }

    #[test]
    fn lists_stand_in_order_and_once() {
        for list in [CREDENTIAL_PATHS, STARTUP_FILES, DROPPED_VARIABLES, FRESH_DIRS, SYSTEM_DIRS] {
            assert!(list.is_sorted_by(|one, other| one < other), "{list:?}");
        }
    }
}
