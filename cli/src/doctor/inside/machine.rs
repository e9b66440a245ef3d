//! The machine itself: privileges, settings of the kernel, devices, keys, the terminal.

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
    "take every capability from the sandbox (`--cap-drop ALL`, `capabilities: drop: [ALL]`)";
const PROC_FIX: &str = "mount /proc/sys and /sys read-only in the sandbox, as container runtimes do unless they are told otherwise";
const DEVICE_FIX: &str =
    "give the sandbox no devices but null, zero, full, random, urandom and tty";
/// Capabilities by which one leaves, by number (capabilities(7)).
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
/// Settings by which the kernel is told what to run, or stopped.
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
/// Devices that are the machine.
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
            "capabilities by which one leaves",
            DROP_FIX,
            |_| probe_capabilities(&read_status()),
        ),
        InsideProbe::new(
            GROUP,
            "machine.set-user-id",
            "gaining capabilities by set-user-id programs",
            "set `no_new_privs` for the sandbox (`--security-opt no-new-privileges`, `allowPrivilegeEscalation: false`)",
            |_| probe_setuid(&read_status()),
        ),
        InsideProbe::new(GROUP, "machine.module", "loading a kernel module", DROP_FIX, |_| {
            judge_privileged(calls::load_invalid_module(), "kernel modules can be loaded")
        }),
        InsideProbe::new(GROUP, "machine.bpf", "programs in the kernel (bpf)", DROP_FIX, |_| {
            judge_privileged(calls::list_bpf_programs(), "the kernel's programs can be seen")
        }),
        InsideProbe::new(GROUP, "machine.restart", "restarting the machine", DROP_FIX, |_| {
            judge_privileged(calls::reboot_without_magic(), "the machine can be restarted")
        }),
        InsideProbe::new(
            GROUP,
            "machine.by-number",
            "opening files by number (open_by_handle_at)",
            DROP_FIX,
            |_| {
                judge_privileged(
                    calls::open_by_handle(),
                    "files of the whole file system can be opened",
                )
            },
        ),
        InsideProbe::new(GROUP, "machine.mount", "mounting", DROP_FIX, probe_mount),
        InsideProbe::new(GROUP, "machine.mknod", "making a device", DROP_FIX, probe_mknod),
        InsideProbe::new(GROUP, "machine.settings", "settings of the kernel", PROC_FIX, |_| {
            ProbeVerdict::worst(
                SETTINGS.map(|path| probe_open(Path::new(path), OpenMode::Write)),
                "none",
            )
        }),
        InsideProbe::new(
            GROUP,
            "machine.cgroup",
            "programs that a control group runs (release_agent)",
            PROC_FIX,
            |_| {
                let agents =
                    release_agents().into_iter().map(|path| probe_open(&path, OpenMode::Write));
                ProbeVerdict::worst(agents.collect::<Vec<_>>(), "there is no release_agent")
            },
        ),
        InsideProbe::new(
            GROUP,
            "machine.devices",
            "memory and log of the kernel",
            DEVICE_FIX,
            |_| {
                ProbeVerdict::worst(
                    DEVICES.map(|path| probe_open(Path::new(path), OpenMode::Read)),
                    "none",
                )
            },
        ),
        InsideProbe::new(GROUP, "machine.disks", "disks", DEVICE_FIX, |_| {
            let disks = list_disks().into_iter().map(|path| probe_open(&path, OpenMode::Read));
            ProbeVerdict::worst(disks.collect::<Vec<_>>(), "there are no disks")
        }),
        InsideProbe::new(
            GROUP,
            "machine.ring",
            "system calls past the filter (io_uring)",
            "have the system call filter refuse io_uring_setup: what it does, no filter sees",
            |_| probe_io_uring(&read_status()),
        ),
        InsideProbe::new(
            GROUP,
            "machine.terminal",
            "typing into the caller's terminal (TIOCSTI)",
            "give the sandbox a terminal of its own, refuse TIOCSTI by a system call filter, or set dev.tty.legacy_tiocsti=0",
            |_| probe_terminal_input(),
        ),
    ];
    for (name, what, keyring) in [
        ("machine.keys.session", "keys of the caller's session", Keyring::Session),
        ("machine.keys.user", "keys of the caller", Keyring::User),
    ] {
        let fix = "start the sandbox with a session keyring of its own, and refuse keyctl by a system call filter";
        probes.push(InsideProbe::new(GROUP, name, what, fix, move |_| {
            match calls::count_keys(keyring) {
                Ok(0) => ProbeVerdict::Blocked("the keyring is empty".to_owned()),
                Ok(count) => ProbeVerdict::Escaped(format!("{count} keys can be used")),
                Err(error) => ProbeVerdict::Blocked(error.to_string()),
            }
        }));
    }
    probes
}

/// What proc(5) says of this process.
fn read_status() -> String {
    fs::read_to_string("/proc/self/status").unwrap_or_default()
}

fn status_field<'a>(status: &'a str, name: &str) -> Option<&'a str> {
    status.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':')).map(str::trim)
}

/// The dangerous ones in a set of capabilities; none if the set cannot be read.
fn dangerous_capabilities(status: &str, set: &str) -> Option<Vec<&'static str>> {
    let bits = u64::from_str_radix(status_field(status, set)?, 16).ok()?;
    Some(
        DANGEROUS_CAPABILITIES
            .iter()
            .filter(|(at, _)| bits >> at & 1 == 1)
            .map(|(_, name)| *name)
            .collect(),
    )
}

fn probe_capabilities(status: &str) -> ProbeVerdict {
    match dangerous_capabilities(status, "CapPrm") {
        Some(none) if none.is_empty() => ProbeVerdict::Blocked("it has none of them".to_owned()),
        Some(some) => ProbeVerdict::Escaped(format!("it has {}", some.join(", "))),
        None => ProbeVerdict::Unknown("/proc/self/status cannot be read".to_owned()),
    }
}

fn probe_setuid(status: &str) -> ProbeVerdict {
    if status_field(status, "NoNewPrivs") == Some("1") {
        return ProbeVerdict::Blocked("no_new_privs is set".to_owned());
    }
    match dangerous_capabilities(status, "CapBnd") {
        Some(none) if none.is_empty() => {
            ProbeVerdict::Blocked("the bounding set has none that matters".to_owned())
        }
        Some(some) => ProbeVerdict::Escaped(format!(
            "no_new_privs is not set, and a set-user-id program could gain {}",
            some.join(", ")
        )),
        None => ProbeVerdict::Unknown("/proc/self/status cannot be read".to_owned()),
    }
}

/// It is bad only where there is a filter to get past.
fn probe_io_uring(status: &str) -> ProbeVerdict {
    match (calls::create_io_uring(), status_field(status, "Seccomp")) {
        (Err(error), _) => ProbeVerdict::Blocked(error.to_string()),
        (Ok(()), Some("2")) => ProbeVerdict::Escaped("a ring was made, past the filter".to_owned()),
        (Ok(()), _) => ProbeVerdict::Blocked("there is no filter to get past".to_owned()),
    }
}

/// How something is opened. Nothing is read or written.
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

/// Those of the first version of control groups, one a hierarchy.
fn release_agents() -> Vec<PathBuf> {
    let top = Path::new("/sys/fs/cgroup");
    let hierarchies = fs::read_dir(top).into_iter().flatten().flatten().map(|entry| entry.path());
    let agents = hierarchies.chain([top.to_owned()]).map(|dir| dir.join("release_agent"));
    agents.filter(|path| path.exists()).collect()
}

/// The disks that the kernel tells of, and those that are in `/dev` all the same.
fn list_disks() -> Vec<PathBuf> {
    let names =
        |dir| fs::read_dir(dir).into_iter().flatten().flatten().map(|entry| entry.file_name());
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
            return ProbeVerdict::Unknown(format!("no directory for it could be made: {error}"));
        }
    };
    let mounted = mount(Some("none"), &dir, Some("tmpfs"), MsFlags::empty(), None::<&str>);
    if mounted.is_ok() {
        umount2(&dir, MntFlags::MNT_DETACH).unwrap_or_default(); // it goes with the namespace anyway
    }
    drop(fs::remove_dir(&dir));
    judge_privileged(mounted.map_err(std::io::Error::from), "file systems can be mounted")
}

/// A device with the number of the first loop device, which is opened and nothing else.
fn probe_mknod(_: &ProbeTargets) -> ProbeVerdict {
    let dir = match create_scratch_dir() {
        Ok(dir) => dir,
        Err(error) => {
            return ProbeVerdict::Unknown(format!("no directory for it could be made: {error}"));
        }
    };
    let path = dir.join("device");
    let made = mknod(&path, SFlag::S_IFBLK, Mode::S_IRUSR, nix::sys::stat::makedev(7, 0));
    let opens = made.is_ok() && opens_as_device(&path);
    drop(fs::remove_dir_all(&dir));
    match made {
        Ok(()) if opens => ProbeVerdict::Escaped("a device was made, and opens".to_owned()),
        Ok(()) => ProbeVerdict::Blocked("a device was made, and does not open".to_owned()),
        Err(error) => ProbeVerdict::Blocked(error.to_string()),
    }
}

/// Whether the kernel looks for what the number stands for, be it there or not.
fn opens_as_device(path: &Path) -> bool {
    match fs::File::open(path) {
        Ok(_) => true,
        Err(error) => matches!(error.raw_os_error(), Some(libc::ENXIO | libc::ENODEV)),
    }
}

/// Types into a terminal made for it: whoever can, can type into the caller's, if there is one.
fn probe_terminal_input() -> ProbeVerdict {
    if fs::File::open("/dev/tty").is_err() {
        return ProbeVerdict::Blocked("there is no terminal of anybody's".to_owned());
    }
    let typed = (|| -> std::io::Result<()> {
        let master = posix_openpt(OFlag::O_RDWR | OFlag::O_NOCTTY)?;
        grantpt(&master)?;
        unlockpt(&master)?;
        let name = ptsname_r(&master)?;
        setsid()?;
        let own = fs::File::options().read(true).write(true).open(name)?;
        drop(calls::take_terminal(own.as_fd())); // by opening it, it may be this process's already
        let typed = calls::inject_terminal_input(own.as_fd());
        std::mem::forget(master); // its end would be the end of this process too
        typed
    })();
    match typed {
        Ok(()) => ProbeVerdict::Escaped("a letter was typed".to_owned()),
        Err(error) => ProbeVerdict::Blocked(error.to_string()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn privileges_are_read() {
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
