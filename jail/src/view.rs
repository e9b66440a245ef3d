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

use super::paths::{Mounts, links};

/// Directories that are new and empty inside: sockets of daemons, agents and displays live there, and
/// files that other programs of the caller trust.
const FRESH: &[&str] = &["/run", "/tmp", "/var/run", "/var/tmp"];
/// Below these nothing becomes writable by being worked in.
const SYSTEM: &[&str] = &[
    "/bin", "/boot", "/dev", "/etc", "/lib", "/lib32", "/lib64", "/libx32", "/nix", "/opt",
    "/proc", "/sbin", "/snap", "/sys", "/usr",
];
/// In the home directory: what proves who the caller is.
const CREDENTIALS: &[&str] = &[
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
const STARTUP: &[&str] = &[
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
const VARIABLES: &[&str] = &[
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
pub(super) enum Change {
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
pub struct Wishes {
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
pub struct View {
    pub(super) cwd: PathBuf,
    pub(super) changes: Vec<(PathBuf, Change)>,
    /// Unix sockets that somebody outside listens on, wherever they are.
    pub(super) sockets: Vec<PathBuf>,
    /// Policies that the command can write: they are read once.
    pub exposed: BTreeSet<PathBuf>,
}

impl View {
    /// Decides what is seen. Only paths that exist are changed: there is nothing to hide of others.
    pub fn of(wishes: &Wishes) -> anyhow::Result<Self> {
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
        let mut view = Changes::default();
        for path in FRESH.iter().map(PathBuf::from).chain(wishes.runtime.clone()) {
            view.put(real(&path).filter(|path| path.is_dir()), Change::Fresh);
        }
        let in_home = |names: &[&str]| -> Vec<PathBuf> {
            let homes = homes.iter();
            homes.flat_map(|home| names.iter().map(move |name| home.join(name))).collect()
        };
        view.put(home, Change::Writable);
        view.work_in(&cwd);
        for path in in_home(STARTUP) {
            view.keep(&path, Change::ReadOnly);
        }
        for path in in_home(CREDENTIALS) {
            view.keep(&path, Change::Hide);
        }
        view.work_in(&cwd); // whoever works in one of those means it
        // After everything that is so by itself: what is asked for by name counts.
        for path in &visible {
            view.put(Some(path.clone()), Change::ReadOnly);
        }
        for path in wishes.writable.iter().filter_map(real) {
            view.put(Some(path), Change::Writable);
        }
        if let Ok(own) = std::env::current_exe() {
            view.keep(&own, Change::ReadOnly);
        }
        for path in hidden {
            view.keep(&path, Change::Hide);
        }
        view.guard(&wishes.trusted, &cwd);
        let exposed = view.guard(&wishes.policies, &cwd);
        let mounts = Mounts::read();
        view.hide_again(&mounts);
        let sockets = sockets();
        for socket in sockets.iter().filter_map(real) {
            view.pin(&socket); // or the next jail would not find it where it was made
        }
        let again: Vec<PathBuf> = sockets.iter().flat_map(|path| mounts.aliases(path)).collect();
        let sockets = sockets.into_iter().chain(again).collect();
        Ok(View { cwd, changes: view.0, sockets, exposed })
    }
}

/// Whether a directory becomes writable by being worked in.
fn is_for_work(cwd: &Path) -> bool {
    cwd.parent().is_some() && !SYSTEM.iter().any(|system| cwd.starts_with(system))
}

#[derive(Default)]
struct Changes(Vec<(PathBuf, Change)>);

impl Changes {
    /// Later changes of a path take the place of earlier ones; parents stand before children.
    fn put(&mut self, path: Option<PathBuf>, change: Change) {
        let Some(path) = path else { return };
        self.0.retain(|(known, _)| *known != path);
        let at = self.0.partition_point(|(known, _)| *known < path);
        self.0.insert(at, (path, change));
    }

    /// What becomes of a path: the change of its nearest changed ancestor, or of itself.
    fn of(&self, path: &Path) -> Option<&Change> {
        path.ancestors().find_map(|ancestor| {
            self.0.iter().find(|(known, _)| known == ancestor).map(|(_, change)| change)
        })
    }

    /// Makes the directory that is worked in writable. What is so already is not mounted again: files could
    /// not be moved between the two.
    fn work_in(&mut self, cwd: &Path) {
        if is_for_work(cwd) && self.of(cwd) != Some(&Change::Writable) {
            self.put(Some(cwd.to_owned()), Change::Writable);
        }
    }

    /// Changes what a path leads to, for good: were it moved away, or a directory or a link on the way to it,
    /// another could be put in its place.
    fn keep(&mut self, path: &Path, change: Change) {
        let Ok(real) = fs::canonicalize(path) else { return };
        for link in links(path) {
            if self.of(&link) == Some(&Change::Writable) {
                self.pin(&link);
                self.put(Some(link), Change::Link);
            }
        }
        self.pin(&real);
        self.put(Some(real), change);
    }

    /// Hides what is hidden in every other place too where its file system is mounted.
    fn hide_again(&mut self, mounts: &Mounts) {
        let hidden = self.0.iter().filter(|(_, change)| *change == Change::Hide);
        let again: Vec<PathBuf> = hidden.flat_map(|(path, _)| mounts.aliases(path)).collect();
        for path in again {
            self.keep(&path, Change::Hide);
        }
    }

    /// Makes the directories of policies read-only, for a file alone would be replaced by the next edit. Those
    /// that lie in a directory that is worked in cannot be guarded so, nor those that a link leads to which can be
    /// replaced; they are told.
    fn guard(&mut self, policies: &[PathBuf], cwd: &Path) -> BTreeSet<PathBuf> {
        let mut exposed = BTreeSet::new();
        for named in policies {
            let Ok(policy) = fs::canonicalize(named) else { continue };
            if links(named).iter().any(|link| self.of(link) == Some(&Change::Writable)) {
                exposed.insert(named.clone());
            }
            let dir = if policy.is_dir() { Some(policy.as_path()) } else { policy.parent() };
            let Some(dir) = dir.map(Path::to_owned) else { continue };
            match self.of(&policy) {
                None | Some(Change::Fresh | Change::Hide | Change::Link | Change::ReadOnly) => {}
                Some(Change::Writable) => {
                    let worked_in = self.0.iter().any(|(known, change)| {
                        *change == Change::Writable && known.starts_with(&dir)
                    });
                    if worked_in || cwd.starts_with(&dir) {
                        self.put(Some(policy.clone()), Change::ReadOnly);
                        exposed.insert(policy);
                        continue;
                    }
                    self.pin(&dir);
                    self.put(Some(dir), Change::ReadOnly);
                }
            }
        }
        exposed
    }

    /// Keeps a directory where it is: what is a mount of its own cannot be renamed from inside.
    fn pin(&mut self, dir: &Path) {
        if self.of(dir) != Some(&Change::Writable) {
            return;
        }
        let between: Vec<PathBuf> = dir
            .ancestors()
            .skip(1)
            .take_while(|ancestor| !self.0.iter().any(|(known, _)| known == ancestor))
            .map(Path::to_owned)
            .collect();
        for ancestor in between {
            self.put(Some(ancestor), Change::Writable);
        }
    }
}

/// The unix sockets that have a path, of every network that the caller can look into. Those without one are the
/// network namespace's.
fn sockets() -> Vec<PathBuf> {
    let processes = fs::read_dir("/proc").into_iter().flatten().flatten();
    let processes = processes.map(|entry| entry.path());
    let mut networks = BTreeSet::new();
    let each = processes.filter(|process| {
        fs::read_link(process.join("ns/net")).is_ok_and(|network| networks.insert(network))
    });
    let lists = each.collect::<Vec<_>>().into_iter().chain([PathBuf::from("/proc/self")]);
    let lists = lists.filter_map(|process| fs::read_to_string(process.join("net/unix")).ok());
    lists.flat_map(|list| paths(&list)).collect::<BTreeSet<_>>().into_iter().collect()
}

/// The unix sockets of this process's own network, looked at again and again.
#[derive(Debug, Default)]
pub struct Sockets(String);

impl Sockets {
    /// The paths of all, if anything has changed since the last look: a socket that took the place of another
    /// has its path.
    pub fn changed(&mut self) -> Option<Vec<PathBuf>> {
        let list = fs::read_to_string("/proc/self/net/unix").ok()?;
        if list == self.0 {
            return None;
        }
        self.0 = list;
        Some(paths(&self.0))
    }
}

/// The paths of a list as the kernel writes it. Of a socket that was made in the directory where its process was,
/// the list has the name alone.
fn paths(list: &str) -> Vec<PathBuf> {
    let named = list.lines().filter_map(entry).filter(|(_, name)| !name.starts_with('@'));
    let (whole, parts): (Vec<_>, Vec<_>) = named.partition(|(_, name)| name.starts_with('/'));
    let whole = whole.into_iter().map(|(_, name)| PathBuf::from(name));
    whole
        .chain(parts.into_iter().flat_map(|(inode, name)| beside_its_process(inode, name)))
        .collect()
}

/// The number of a socket and its name: the seventh column, and the eighth, which may have spaces.
fn entry(line: &str) -> Option<(&str, &str)> {
    let (mut inode, mut rest) = ("", line);
    for _ in 0..7 {
        (inode, rest) = rest.trim_start().split_once(' ')?;
    }
    Some((inode, rest))
}

/// Where a socket is, if one of the processes that have it is still where it was made.
fn beside_its_process(inode: &str, name: &str) -> Vec<PathBuf> {
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
pub fn environment(
    given: impl Iterator<Item = (OsString, OsString)>,
    added: Vec<(String, String)>,
) -> Vec<(OsString, OsString)> {
    let leads_out = |name: &OsString| {
        let name = name.to_string_lossy().to_ascii_uppercase();
        VARIABLES.contains(&name.as_str()) || name.starts_with("SANDBAR")
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
        let kept = environment(given, vec![("A".to_owned(), "2".to_owned())]);
        let wanted: Vec<(OsString, OsString)> =
            vec![("PATH".into(), "/bin".into()), ("A".into(), "2".into())];
        assert_eq!(kept, wanted);
    }

    /// A home with a few things in it, below a directory that is not new inside.
    fn home() -> (tempfile::TempDir, PathBuf) {
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
        let (_dir, home) = home();
        let view = View::of(&Wishes {
            cwd: home.join("work"),
            home: Some(home.clone()),
            hidden: vec![home.join("state/own")],
            policies: vec![home.join("conf/policies/own.toml")],
            ..Wishes::default()
        });
        let view = view.unwrap();
        assert!(view.exposed.is_empty());
        let changes = Changes(view.changes);
        for (path, wanted) in [
            ("", Some(Change::Writable)),
            ("work", Some(Change::Writable)),
            ("other/file", Some(Change::Writable)),
            (".bashrc", Some(Change::ReadOnly)),
            (".config/gh", Some(Change::Hide)),
            (".config/other", Some(Change::Writable)),
            (".ssh/id", Some(Change::Hide)),
            (".zshrc", Some(Change::Link)),
            ("dots/zshrc", Some(Change::ReadOnly)),
            ("dots/other", Some(Change::Writable)),
            ("state/own/log", Some(Change::Hide)),
            ("conf/policies/own.toml", Some(Change::ReadOnly)),
            ("conf/policies/new.toml", Some(Change::ReadOnly)),
            ("..", None),
        ] {
            let path = if path == ".." { PathBuf::from("/etc/passwd") } else { home.join(path) };
            assert_eq!(changes.of(&path), wanted.as_ref(), "{}", path.display());
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
        let (_dir, account) = home();
        for home in [None, Some(account.join("work"))] {
            let view = View::of(&Wishes {
                cwd: account.join("work"),
                home,
                account: Some(account.clone()),
                ..Wishes::default()
            });
            let changes = Changes(view.unwrap().changes);
            for (path, wanted) in [
                (".ssh/id", Some(Change::Hide)),
                (".config/gh", Some(Change::Hide)),
                ("work/file", Some(Change::Writable)),
            ] {
                assert_eq!(changes.of(&account.join(path)), wanted.as_ref(), "{path}");
            }
            assert_ne!(changes.of(&account.join("other")), Some(&Change::Writable));
        }
    }

    #[test]
    fn a_policy_that_the_command_can_replace_is_told() {
        let (_dir, home) = home();
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
            let view = View::of(&Wishes { cwd: cwd.clone(), home, policies, ..Wishes::default() });
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
            let view = View::of(&Wishes { cwd: cwd.into(), ..Wishes::default() }).unwrap();
            let of = Changes(view.changes).of(Path::new(cwd)).cloned();
            assert_eq!(of == Some(Change::Writable), writable, "{cwd}");
        }
    }

    #[test]
    fn nobody_works_in_what_is_ours() {
        let (_dir, home) = home();
        let (cwd, hidden) = (home.join("state/own"), vec![home.join("state/own")]);
        assert!(View::of(&Wishes { cwd, hidden, ..Wishes::default() }).is_err());
    }

    #[test]
    fn sockets_are_found_by_their_paths() {
        let list = "Num       RefCount Protocol Flags    Type St Inode Path\n\
            ffff8880: 00000002 00000000 00010000 0001 01 12345 /run/with space.sock\n\
            ffff8881: 00000003 00000000 00000000 0001 03 12346\n\
            ffff8882: 00000002 00000000 00010000 0001 01 12347 @/abstract\n";
        assert_eq!(paths(list), [PathBuf::from("/run/with space.sock")]);
        let part = "0000000000000000: 00000002 00000000 00010000 0001 01   317 part/of.sock";
        assert_eq!(entry(part), Some(("317", "part/of.sock")));
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("one.sock");
        let _listening = std::os::unix::net::UnixListener::bind(&path).unwrap();
        assert!(sockets().contains(&path));
    }

    #[test]
    fn lists_stand_in_order_and_once() {
        for list in [CREDENTIALS, STARTUP, VARIABLES, FRESH, SYSTEM] {
            assert!(list.is_sorted_by(|one, other| one < other), "{list:?}");
        }
    }
}
