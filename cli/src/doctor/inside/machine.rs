//! The machine: privileges, kernel settings, devices, keyrings, the terminal.

use std::fs;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};

use nix::fcntl::OFlag;
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use nix::pty::{grantpt, posix_openpt, ptsname_r, unlockpt};
use nix::sys::stat::{Mode, SFlag, mknod};
use nix::unistd::setsid;

use super::{InsideProbe, ProbeTargets, judge_privileged};
use crate::doctor::probe::ProbeVerdict;
use sys::probe::{self as calls, Keyring};

const GROUP: &str = "the machine";
const DROP_FIX: &str =
    "drop every capability from the sandbox (`--cap-drop ALL`, `capabilities: drop: [ALL]`)";
const PROC_FIX: &str =
    "mount /proc/sys and /sys read-only in the sandbox, as container runtimes do by default";
const DEVICE_FIX: &str = "give the sandbox only the devices null, zero, full, random, urandom and tty";
/// Capabilities that allow an escape, by number (capabilities(7)).
const DANGEROUS_CAPABILITIES: [(u32, &str); 14] = [
    (2, "DAC_READ_SEARCH"),
    (12, "NET_ADMIN"),
    (13, "NET_RAW"),
    (16, "SYS_MODULE"),
    (17, "SYS_RAWIO"),
    (18, "SYS_CHROOT"),
    (19, "SYS_PTRACE"),
    (21, "SYS_ADMIN"),
    (22, "SYS_BOOT"),
    (25, "SYS_TIME"),
    (27, "MKNOD"),
    (38, "PERFMON"),
    (39, "BPF"),
    (40, "CHECKPOINT_RESTORE"),
];
/// Files that make the kernel run a program, or stop it.
const SETTINGS: [&str; 9] = [
    "/proc/sys/kernel/core_pattern",
    "/proc/sys/kernel/modprobe",
    "/proc/sys/kernel/randomize_va_space",
    "/proc/sys/fs/binfmt_misc/register",
    "/proc/sys/net/ipv4/ip_forward",
    "/proc/sysrq-trigger",
    "/sys/kernel/uevent_helper",
    "/sys/kernel/security",
    "/sys/power/state",
];
/// Devices that give control over the machine.
const DEVICES: [&str; 9] = [
    "/dev/kmsg",
    "/dev/kmem",
    "/dev/mem",
    "/dev/port",
    "/dev/fuse",
    "/dev/kvm",
    "/dev/vhost-vsock",
    "/dev/uinput",
    "/proc/kcore",
];

pub(super) fn probes() -> Vec<InsideProbe> {
    let mut probes = vec![
        InsideProbe::new(
            GROUP,
            "machine.capabilities",
            "capabilities that allow an escape",
            DROP_FIX,
            |_| probe_capabilities(&read_status()),
        ),
        InsideProbe::new(
            GROUP,
            "machine.set-user-id",
            "gaining capabilities through set-user-id programs",
            "set `no_new_privs` for the sandbox (`--security-opt no-new-privileges`, `allowPrivilegeEscalation: false`)",
            |_| probe_setuid(&read_status()),
        ),
        InsideProbe::new(GROUP, "machine.module", "loading a kernel module", DROP_FIX, |_| {
            judge_privileged(calls::load_invalid_module(), "kernel modules can be loaded")
        }),
        InsideProbe::new(GROUP, "machine.bpf", "kernel programs (bpf)", DROP_FIX, |_| {
            judge_privileged(calls::list_bpf_programs(), "the kernel's BPF programs can be listed")
        }),
        InsideProbe::new(GROUP, "machine.restart", "restarting the machine", DROP_FIX, |_| {
            judge_privileged(calls::reboot_without_magic(), "the machine can be restarted")
        }),
        InsideProbe::new(
            GROUP,
            "machine.by-number",
            "opening files by handle (open_by_handle_at)",
            DROP_FIX,
            |_| judge_privileged(calls::open_by_handle(), "any file of the file system can be opened"),
        ),
        InsideProbe::new(GROUP, "machine.mount", "mounting", DROP_FIX, probe_mount),
        InsideProbe::new(GROUP, "machine.mknod", "creating a device", DROP_FIX, probe_mknod),
        InsideProbe::new(GROUP, "machine.settings", "kernel settings", PROC_FIX, |_| {
            ProbeVerdict::worst(SETTINGS.map(|path| probe_open(Path::new(path), OpenMode::Write)), "none")
        }),
        InsideProbe::new(
            GROUP,
            "machine.cgroup",
            "programs run by a control group (release_agent)",
            PROC_FIX,
            |_| {
                let agents = release_agents().into_iter().map(|path| probe_open(&path, OpenMode::Write));
                ProbeVerdict::worst(agents.collect::<Vec<_>>(), "no release_agent exists")
            },
        ),
        InsideProbe::new(GROUP, "machine.devices", "kernel memory and log", DEVICE_FIX, |_| {
            ProbeVerdict::worst(DEVICES.map(|path| probe_open(Path::new(path), OpenMode::Read)), "none")
        }),
        InsideProbe::new(GROUP, "machine.disks", "disks", DEVICE_FIX, |_| {
            let disks = list_disks().into_iter().map(|path| probe_open(&path, OpenMode::Read));
            ProbeVerdict::worst(disks.collect::<Vec<_>>(), "no disks exist")
        }),
        InsideProbe::new(
            GROUP,
            "machine.ring",
            "system calls that bypass the filter (io_uring)",
            "block io_uring_setup in the system call filter: a filter does not see what io_uring does",
            |_| probe_io_uring(&read_status()),
        ),
        InsideProbe::new(
            GROUP,
            "machine.terminal",
            "injecting input into the caller's terminal (TIOCSTI)",
            "give the sandbox its own terminal, block TIOCSTI with a system call filter, or set dev.tty.legacy_tiocsti=0",
            |_| probe_terminal_input(),
        ),
    ];
    for (name, what, keyring) in [
        ("machine.keys.session", "keys in the caller's session keyring", Keyring::Session),
        ("machine.keys.user", "keys in the caller's user keyring", Keyring::User),
    ] {
        let fix =
            "start the sandbox with its own session keyring, and block keyctl with a system call filter";
        probes.push(InsideProbe::new(GROUP, name, what, fix, move |_| match calls::count_keys(keyring) {
            Ok(0) => ProbeVerdict::Blocked("the keyring is empty".to_owned()),
            Ok(count) => ProbeVerdict::Escaped(format!("{count} keys can be used")),
            Err(error) => ProbeVerdict::Blocked(error.to_string()),
        }));
    }
    probes
}

/// Reads /proc/self/status.
fn read_status() -> String {
    fs::read_to_string("/proc/self/status").unwrap_or_default()
}

fn status_field<'a>(status: &'a str, name: &str) -> Option<&'a str> {
    status.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':')).map(str::trim)
}

/// The dangerous capabilities in a set; `None` if the set cannot be read.
fn dangerous_capabilities(status: &str, set: &str) -> Option<Vec<&'static str>> {
    let bits = u64::from_str_radix(status_field(status, set)?, 16).ok()?;
    Some(DANGEROUS_CAPABILITIES.iter().filter(|(at, _)| bits >> at & 1 == 1).map(|(_, name)| *name).collect())
}

fn probe_capabilities(status: &str) -> ProbeVerdict {
    match dangerous_capabilities(status, "CapPrm") {
        Some(none) if none.is_empty() => ProbeVerdict::Blocked("the process has none of them".to_owned()),
        Some(some) => ProbeVerdict::Escaped(format!("the process has {}", some.join(", "))),
        None => ProbeVerdict::Unknown("/proc/self/status cannot be read".to_owned()),
    }
}

fn probe_setuid(status: &str) -> ProbeVerdict {
    if status_field(status, "NoNewPrivs") == Some("1") {
        return ProbeVerdict::Blocked("no_new_privs is set".to_owned());
    }
    match dangerous_capabilities(status, "CapBnd") {
        Some(none) if none.is_empty() => {
            ProbeVerdict::Blocked("the bounding set has no dangerous capability".to_owned())
        }
        Some(some) => ProbeVerdict::Escaped(format!(
            "no_new_privs is not set, and a set-user-id program could gain {}",
            some.join(", ")
        )),
        None => ProbeVerdict::Unknown("/proc/self/status cannot be read".to_owned()),
    }
}

/// io_uring is an escape only if there is a seccomp filter to bypass.
fn probe_io_uring(status: &str) -> ProbeVerdict {
    match (calls::create_io_uring(), status_field(status, "Seccomp")) {
        (Err(error), _) => ProbeVerdict::Blocked(error.to_string()),
        (Ok(()), Some("2")) => {
            ProbeVerdict::Escaped("a ring was created, which bypasses the filter".to_owned())
        }
        (Ok(()), _) => ProbeVerdict::Blocked("there is no filter to bypass".to_owned()),
    }
}

/// How to open a file. Nothing is read or written.
#[derive(Clone, Copy, Debug)]
enum OpenMode {
    Read,
    Write,
}

fn probe_open(path: &Path, how: OpenMode) -> ProbeVerdict {
    let shown = path.display();
    if path.is_dir() {
        return ProbeVerdict::Blocked(format!("{shown} is a directory"));
    }
    let (opened, word) = match how {
        OpenMode::Read => (fs::File::options().read(true).open(path), "read"),
        OpenMode::Write => (fs::File::options().write(true).open(path), "written"),
    };
    match opened {
        Ok(_) => ProbeVerdict::Escaped(format!("{shown} can be {word}")),
        Err(error) => ProbeVerdict::Blocked(format!("{shown}: {error}")),
    }
}

/// The release_agent files of control groups version 1, one per hierarchy.
fn release_agents() -> Vec<PathBuf> {
    let top = Path::new("/sys/fs/cgroup");
    let hierarchies = fs::read_dir(top).into_iter().flatten().flatten().map(|entry| entry.path());
    let agents = hierarchies.chain([top.to_owned()]).map(|dir| dir.join("release_agent"));
    agents.filter(|path| path.exists()).collect()
}

/// The disks in /sys/block, and those in /dev by their usual names.
fn list_disks() -> Vec<PathBuf> {
    let names = |dir| fs::read_dir(dir).into_iter().flatten().flatten().map(|entry| entry.file_name());
    let usual = names("/dev").filter(|name| {
        let name = name.to_string_lossy();
        ["sd", "vd", "nvme", "xvd", "dm-", "mapper"].iter().any(|begin| name.starts_with(begin))
    });
    let mut disks: Vec<PathBuf> =
        names("/sys/block").chain(usual).map(|name| Path::new("/dev").join(name)).collect();
    disks.sort();
    disks.dedup();
    disks
}

fn create_scratch_dir() -> std::io::Result<PathBuf> {
    let dir = std::env::temp_dir().join(format!("sandbar-doctor-{}", std::process::id()));
    fs::create_dir(&dir)?;
    Ok(dir)
}

fn probe_mount(_: &ProbeTargets) -> ProbeVerdict {
    let dir = match create_scratch_dir() {
        Ok(dir) => dir,
        Err(error) => {
            return ProbeVerdict::Unknown(format!("cannot create a directory: {error}"));
        }
    };
    let mounted = mount(Some("none"), &dir, Some("tmpfs"), MsFlags::empty(), None::<&str>);
    if mounted.is_ok() {
        umount2(&dir, MntFlags::MNT_DETACH).unwrap_or_default(); // it ends with the namespace anyway
    }
    drop(fs::remove_dir(&dir));
    judge_privileged(mounted.map_err(std::io::Error::from), "file systems can be mounted")
}

/// Creates a device node with the number of the first loop device, and only opens it.
fn probe_mknod(_: &ProbeTargets) -> ProbeVerdict {
    let dir = match create_scratch_dir() {
        Ok(dir) => dir,
        Err(error) => {
            return ProbeVerdict::Unknown(format!("cannot create a directory: {error}"));
        }
    };
    let path = dir.join("device");
    let made = mknod(&path, SFlag::S_IFBLK, Mode::S_IRUSR, nix::sys::stat::makedev(7, 0));
    let opens = made.is_ok() && opens_as_device(&path);
    drop(fs::remove_dir_all(&dir));
    match made {
        Ok(()) if opens => ProbeVerdict::Escaped("a device was created and can be opened".to_owned()),
        Ok(()) => ProbeVerdict::Blocked("a device was created but cannot be opened".to_owned()),
        Err(error) => ProbeVerdict::Blocked(error.to_string()),
    }
}

/// Whether the kernel looks up the device driver, even if the device does not exist.
fn opens_as_device(path: &Path) -> bool {
    match fs::File::open(path) {
        Ok(_) => true,
        Err(error) => matches!(error.raw_os_error(), Some(libc::ENXIO | libc::ENODEV)),
    }
}

/// Injects input into a terminal created for this: if that works, it works for the caller's terminal too.
fn probe_terminal_input() -> ProbeVerdict {
    if fs::File::open("/dev/tty").is_err() {
        return ProbeVerdict::Blocked("there is no controlling terminal".to_owned());
    }
    let typed = (|| -> std::io::Result<()> {
        let master = posix_openpt(OFlag::O_RDWR | OFlag::O_NOCTTY)?;
        grantpt(&master)?;
        unlockpt(&master)?;
        let name = ptsname_r(&master)?;
        setsid()?;
        let terminal = fs::File::options().read(true).write(true).open(name)?;
        drop(calls::take_terminal(terminal.as_fd())); // opening it may have made it the controlling terminal
        let typed = calls::inject_terminal_input(terminal.as_fd());
        std::mem::forget(master); // closing it would hang up this process
        typed
    })();
    match typed {
        Ok(()) => ProbeVerdict::Escaped("a character was injected".to_owned()),
        Err(error) => ProbeVerdict::Blocked(error.to_string()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn capabilities_are_parsed() {
        let of = |prm: &str, bnd: &str, nnp: u8| {
            format!("Name:\tx\nCapPrm:\t{prm}\nCapBnd:\t{bnd}\nNoNewPrivs:\t{nnp}\n")
        };
        let (none, docker) = ("0000000000000000", "00000000a80425fb");
        for (status, has, gains_it) in [
            (of(none, none, 0), false, false),
            (of(none, docker, 1), false, false),
            (of(none, docker, 0), false, true),
            (of(docker, docker, 1), true, false),
        ] {
            assert_eq!(probe_capabilities(&status).is_bad(), has, "{status}");
            assert_eq!(probe_setuid(&status).is_bad(), gains_it, "{status}");
        }
        assert!(probe_capabilities(&of(docker, docker, 1)).how().contains("NET_RAW"));
        assert!(matches!(probe_capabilities(""), ProbeVerdict::Unknown(_)));
    }
}
