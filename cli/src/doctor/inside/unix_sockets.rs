//! Unix sockets, by path and by abstract name: daemons, agents and displays that would act outside on behalf of a
//! process inside.
//!
//! The peer credentials of a connected socket name the listening process. If it has no pid here, it is in another PID
//! namespace, and so outside. A socket of a known daemon is an escape wherever the listener is.

use std::collections::BTreeSet;
use std::fs;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::fs::FileTypeExt;
use std::os::unix::net::{SocketAddr, UnixDatagram, UnixStream};
use std::path::{Path, PathBuf};

use nix::sys::socket::{getsockopt, sockopt::PeerCredentials};

use super::{InsideProbe, ProbeTargets};
use crate::doctor::probe::ProbeVerdict;

const GROUP: &str = "unix sockets";
const FIX: &str = "do not mount this socket into the sandbox (`sandbar run` hides such sockets)";
/// Maximum number of files visited below one directory.
const MAX_FILES: usize = 20_000;
/// Maximum depth of the search below a directory.
const MAX_DEPTH: usize = 4;
/// Sockets of daemons that act on behalf of their clients. `*` matches anything but a slash.
const KNOWN_SOCKETS: &[(&str, &str, &[&str])] = &[
    (
        "containers",
        "Docker, containerd, Podman, CRI-O",
        &[
            "/run/docker.sock",
            "/var/run/docker.sock",
            "/run/containerd/containerd.sock",
            "/run/podman/podman.sock",
            "/run/crio/crio.sock",
            "/run/buildkit/buildkitd.sock",
            "/run/k3s/containerd/containerd.sock",
            "/var/lib/kubelet/pod-resources/kubelet.sock",
        ],
    ),
    (
        "dbus",
        "system and session D-Bus",
        &["/run/dbus/system_bus_socket", "/var/run/dbus/system_bus_socket", "/run/user/*/bus"],
    ),
    (
        "agents",
        "key agents",
        &[
            "/tmp/ssh-*/agent.*",
            "/run/user/*/gnupg/S.gpg-agent*",
            "/run/user/*/keyring/*",
            "/run/user/*/ssh-agent*",
            "/run/user/*/gcr/*",
        ],
    ),
    (
        "displays",
        "displays and sound",
        &["/tmp/.X11-unix/*", "/run/user/*/wayland-*", "/run/user/*/pulse/native", "/run/user/*/pipewire-*"],
    ),
    (
        "system",
        "systemd, snapd, libvirt, LXD",
        &[
            "/run/systemd/private",
            "/run/systemd/notify",
            "/run/systemd/io.systemd.*",
            "/run/user/*/systemd/private",
            "/run/snapd.socket",
            "/run/snapd-snap.socket",
            "/run/libvirt/libvirt-sock",
            "/var/snap/lxd/common/lxd/unix.socket",
            "/var/lib/lxd/unix.socket",
            "/run/udev/control",
            "/dev/log",
        ],
    ),
    (
        "sandbar",
        "Sandbar's own admin socket",
        &[
            "/run/sandbar/admin.sock",
            "/var/log/sandbar/admin.sock",
            "/var/lib/sandbar/admin.sock",
            "/var/lib/sandbar/log/admin.sock",
        ],
    ),
];
/// Environment variables that name sockets.
const SOCKET_VARIABLES: [&str; 8] = [
    "CONTAINERD_ADDRESS",
    "CONTAINER_HOST",
    "DBUS_SESSION_BUS_ADDRESS",
    "DBUS_SYSTEM_BUS_ADDRESS",
    "DOCKER_HOST",
    "NOTIFY_SOCKET",
    "SSH_AUTH_SOCK",
    "TMUX",
];

pub(super) fn probes() -> Vec<InsideProbe> {
    let mut probes: Vec<InsideProbe> = KNOWN_SOCKETS
        .iter()
        .map(|(name, what, patterns)| {
            InsideProbe::new(GROUP, format!("unix.{name}"), *what, FIX, move |_| {
                let paths = patterns.iter().flat_map(|pattern| expand_pattern(pattern));
                let tried: Vec<ProbeVerdict> = paths.map(|path| probe_known(&path)).collect();
                ProbeVerdict::worst(tried, "none of them exists")
            })
        })
        .collect();
    probes.push(InsideProbe::new(
        GROUP,
        "unix.variables",
        "sockets named by environment variables",
        FIX,
        |_| {
            let named = SOCKET_VARIABLES.iter().filter_map(std::env::var_os);
            let named = named.filter_map(|value| socket_path(&value.to_string_lossy()));
            ProbeVerdict::worst(
                named.map(|path| probe_known(&path)).collect::<Vec<_>>(),
                "no variable names a socket",
            )
        },
    ));
    probes.push(InsideProbe::new(
        GROUP,
        "unix.anywhere",
        "any socket with its listener outside",
        FIX,
        |targets| {
            let tried: Vec<ProbeVerdict> =
                find_sockets(targets).iter().map(|path| probe_foreign(path)).collect();
            let none = "no sockets found";
            ProbeVerdict::worst(tried, none)
        },
    ));
    probes.push(InsideProbe::new(
        GROUP,
        "unix.abstract",
        "abstract sockets with their listener outside",
        "give the sandbox its own network namespace, which also isolates abstract sockets",
        |_| {
            let tried = abstract_names().iter().map(|name| probe_abstract(name)).collect::<Vec<_>>();
            ProbeVerdict::worst(tried, "no abstract socket listens in this network namespace")
        },
    ));
    probes
}

/// The existing paths that match a pattern.
fn expand_pattern(pattern: &str) -> Vec<PathBuf> {
    let mut paths = vec![PathBuf::from("/")];
    for part in pattern.split('/').filter(|part| !part.is_empty()) {
        let Some((begin, end)) = part.split_once('*') else {
            paths.iter_mut().for_each(|path| path.push(part));
            continue;
        };
        let entries = paths.iter().flat_map(|path| fs::read_dir(path).into_iter().flatten());
        let matches = |name: &str| {
            name.len() >= begin.len() + end.len() && name.starts_with(begin) && name.ends_with(end)
        };
        paths = entries
            .flatten()
            .filter(|entry| matches(&entry.file_name().to_string_lossy()))
            .map(|entry| entry.path())
            .collect();
    }
    paths.retain(|path| fs::symlink_metadata(path).is_ok());
    paths
}

/// The path in the value of a variable: `unix:path=/x,guid=...`, `unix:///x`, `/x,1,2` or `/x`.
fn socket_path(value: &str) -> Option<PathBuf> {
    let from = value.find('/')?;
    let path = value.get(from..)?.split([',', ';']).next()?;
    let path = format!("/{}", path.trim_start_matches('/'));
    let local = value.starts_with('/') || value.starts_with("unix:");
    local.then(|| PathBuf::from(path))
}

/// A known socket is an escape if it can be reached, wherever the listener is.
fn probe_known(path: &Path) -> ProbeVerdict {
    match locate_peer(path) {
        Ok(_) => ProbeVerdict::Escaped(format!("{} is reachable", path.display())),
        Err(error) => ProbeVerdict::Blocked(format!("{}: {error}", path.display())),
    }
}

/// Any other socket is an escape only if its listener is outside.
fn probe_foreign(path: &Path) -> ProbeVerdict {
    match locate_peer(path) {
        Ok(PeerLocation::Outside) => ProbeVerdict::Escaped(format!("{} is reachable", path.display())),
        Ok(PeerLocation::Here) => ProbeVerdict::Blocked(format!("{} is served inside", path.display())),
        Ok(PeerLocation::Unknown) => {
            ProbeVerdict::Unknown(format!("{} is reachable, but its listener is unknown", path.display()))
        }
        Err(error) => ProbeVerdict::Blocked(format!("{}: {error}", path.display())),
    }
}

/// Where the listening process is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum PeerLocation {
    Here,
    Outside,
    /// Datagram sockets have no peer credentials.
    Unknown,
}

fn locate_peer(path: &Path) -> io::Result<PeerLocation> {
    match UnixStream::connect(path) {
        Ok(stream) => Ok(peer_location(stream.as_fd())),
        Err(error) if error.raw_os_error() == Some(libc::EPROTOTYPE) => {
            UnixDatagram::unbound()?.connect(path).map(|()| PeerLocation::Unknown)
        }
        Err(error) => Err(error),
    }
}

/// A peer with pid 0 is in another PID namespace.
fn peer_location(socket: BorrowedFd<'_>) -> PeerLocation {
    match getsockopt(&socket, PeerCredentials) {
        Ok(peer) if peer.pid() == 0 => PeerLocation::Outside,
        Ok(_) => PeerLocation::Here,
        Err(_) => PeerLocation::Unknown,
    }
}

/// Every socket below the directories where sockets usually are.
fn find_sockets(targets: &ProbeTargets) -> BTreeSet<PathBuf> {
    let usual = ["/run", "/var/run", "/tmp", "/var/tmp", "/var/lib", "/dev"].map(PathBuf::from);
    let runtime = std::env::var_os("XDG_RUNTIME_DIR").map(PathBuf::from);
    let here = std::env::current_dir().ok();
    let mut all = BTreeSet::new();
    for dir in usual.into_iter().chain(runtime).chain(here).chain(targets.home.clone()) {
        let mut left = MAX_FILES;
        walk_sockets(&dir, MAX_DEPTH, &mut left, &mut all);
    }
    all
}

fn walk_sockets(dir: &Path, depth: usize, left: &mut usize, all: &mut BTreeSet<PathBuf>) {
    for entry in fs::read_dir(dir).into_iter().flatten().flatten() {
        if *left == 0 {
            return;
        }
        *left -= 1;
        match entry.file_type() {
            Ok(kind) if kind.is_socket() => drop(all.insert(entry.path())),
            Ok(kind) if kind.is_dir() && depth > 0 => {
                walk_sockets(&entry.path(), depth - 1, left, all);
            }
            Ok(_) | Err(_) => {}
        }
    }
}

/// The abstract names with a listener in this network namespace.
fn abstract_names() -> BTreeSet<Vec<u8>> {
    /// Flag of a socket that accepts connections (`__SO_ACCEPTCON`).
    const LISTENS: &str = "00010000";
    let listed = fs::read("/proc/net/unix").unwrap_or_default();
    let listed = String::from_utf8_lossy(&listed);
    let names = listed.lines().filter_map(|line| {
        let fields: Vec<&str> = line.split_whitespace().collect();
        let name = fields.get(7)?.strip_prefix('@')?;
        (fields.get(3) == Some(&LISTENS)).then(|| name.as_bytes().to_vec())
    });
    names.collect()
}

fn probe_abstract(name: &[u8]) -> ProbeVerdict {
    let shown = String::from_utf8_lossy(name).into_owned();
    let connected =
        SocketAddr::from_abstract_name(name).and_then(|address| UnixStream::connect_addr(&address));
    match connected.map(|stream| peer_location(stream.as_fd())) {
        Ok(PeerLocation::Outside) => ProbeVerdict::Escaped(format!("@{shown} is reachable")),
        Ok(PeerLocation::Here | PeerLocation::Unknown) => {
            ProbeVerdict::Blocked(format!("@{shown} is served inside"))
        }
        Err(error) => ProbeVerdict::Blocked(format!("@{shown}: {error}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn socket_paths_are_found_in_variables() {
        for (value, path) in [
            ("/tmp/ssh-x/agent.1", Some("/tmp/ssh-x/agent.1")),
            ("unix:path=/run/user/7/bus,guid=1", Some("/run/user/7/bus")),
            ("unix:///run/docker.sock", Some("/run/docker.sock")),
            ("/tmp/tmux-0/default,1,0", Some("/tmp/tmux-0/default")),
            ("tcp://10.0.0.1:2375/", None),
            ("", None),
        ] {
            assert_eq!(socket_path(value).as_deref(), path.map(Path::new), "{value}");
        }
    }

    #[test]
    fn patterns_match_existing_paths() {
        let dir = tempfile::tempdir().unwrap();
        for name in ["a-1", "a-2", "b"] {
            fs::write(dir.path().join(name), "").unwrap();
        }
        let count = |pattern: &str| expand_pattern(&format!("{}/{pattern}", dir.path().display())).len();
        assert_eq!([count("a-*"), count("*"), count("b"), count("c"), count("*-2")], [2, 3, 1, 0, 1]);
    }

    #[test]
    fn a_local_listener_is_recognised() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("socket");
        let listener = std::os::unix::net::UnixListener::bind(&path).unwrap();
        assert_eq!(locate_peer(&path).unwrap(), PeerLocation::Here);
        assert!(matches!(probe_known(&path), ProbeVerdict::Escaped(_)));
        assert!(matches!(probe_foreign(&path), ProbeVerdict::Blocked(_)));
        drop(listener);
        assert!(locate_peer(&path).is_err());
    }
}
