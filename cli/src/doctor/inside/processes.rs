//! Processes: Sandbar's, and ways from a process to the files of another.

use std::fs;
use std::io::{self, Read};
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use nix::sys::ptrace;
use nix::sys::signal::kill;
use nix::unistd::{Pid, getpid, getppid};

use super::{InsideProbe, ProbeTargets};
use crate::doctor::probe::ProbeVerdict;

const GROUP: &str = "processes";
const FIX: &str = "give the sandbox its own PID namespace, without Sandbar in it, and another user";
/// Process name of Sandbar.
const PROGRAM_NAME: &str = "sandbar";
const NO_PROCESS: &str = "no process of Sandbar is visible";

pub(super) fn probes() -> Vec<InsideProbe> {
    vec![
        probe_each("processes.environment", "the environment of Sandbar's processes", |pid| {
            read_first_byte(&format!("/proc/{pid}/environ"))
        }),
        probe_each("processes.memory", "the memory of Sandbar's processes", |pid| {
            fs::File::open(format!("/proc/{pid}/mem")).map(drop)
        }),
        probe_each("processes.descriptors", "the open files of Sandbar's processes", |pid| {
            let numbers = fs::read_dir(format!("/proc/{pid}/fd"))?.flatten();
            // The list of numbers is not secret; the link targets are.
            let links = numbers.map(|number| fs::read_link(number.path()).map(drop));
            links.reduce(Result::or).unwrap_or_else(|| Err(io::ErrorKind::NotFound.into()))
        }),
        probe_each("processes.trace", "tracing Sandbar's processes", |pid| {
            Ok(ptrace::seize(pid, ptrace::Options::empty())?) // detached when this process exits
        }),
        probe_each("processes.kill", "ending Sandbar's processes", |pid| {
            if pid.as_raw() == 1 {
                let why = "pid 1 of a namespace cannot be killed from inside";
                return Err(io::Error::new(io::ErrorKind::PermissionDenied, why));
            }
            Ok(kill(pid, None)?)
        }),
        InsideProbe::new(GROUP, "processes.root", "other file systems through /proc/PID/root", FIX, |_| {
            let tried: Vec<ProbeVerdict> = foreign_pids().into_iter().map(probe_root).collect();
            ProbeVerdict::worst(tried, "no other process is visible")
        }),
        InsideProbe::new(
            GROUP,
            "processes.inherited",
            "inherited file descriptors",
            "close file descriptors above 2 before starting the sandbox (`close_range`)",
            |_| {
                let left = (3..1024).filter_map(probe_descriptor);
                ProbeVerdict::worst(left.collect::<Vec<_>>(), "none")
            },
        ),
        InsideProbe::new(
            GROUP,
            "processes.shared-memory",
            "shared memory of processes outside",
            "give the sandbox its own IPC namespace",
            |_| probe_shared_memory(&fs::read_to_string("/proc/sysvipc/shm").unwrap_or_default()),
        ),
    ]
}

/// A probe that tries `attempt` on every process of Sandbar outside this process tree.
fn probe_each(
    name: &'static str,
    what: &'static str,
    attempt: impl Fn(Pid) -> io::Result<()> + Send + Sync + 'static,
) -> InsideProbe {
    InsideProbe::new(GROUP, name, what, FIX, move |_: &ProbeTargets| {
        let tried = foreign_pids().into_iter().filter(|pid| is_sandbar(*pid)).map(|pid| match attempt(pid) {
            Ok(()) => ProbeVerdict::Escaped(format!("it worked on process {pid}")),
            Err(error) => ProbeVerdict::Blocked(error.to_string()),
        });
        ProbeVerdict::worst(tried.collect::<Vec<_>>(), NO_PROCESS)
    })
}

/// Maximum number of ancestors checked.
const MAX_ANCESTORS: usize = 64;

/// Every process except this one, its parent and the descendants of its parent.
pub(super) fn foreign_pids() -> Vec<Pid> {
    let names = fs::read_dir("/proc").into_iter().flatten().flatten();
    let pids = names.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    let (this, parent) = (getpid(), getppid());
    let foreign = |pid: &Pid| *pid != this && *pid != parent && !is_descendant(*pid, parent);
    pids.map(Pid::from_raw).filter(foreign).collect()
}

fn is_descendant(pid: Pid, ancestor: Pid) -> bool {
    let line = std::iter::successors(Some(pid), |pid| parent_pid(*pid)).take(MAX_ANCESTORS);
    line.skip(1).any(|one| one == ancestor)
}

fn parent_pid(pid: Pid) -> Option<Pid> {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("PPid:"))?;
    line.trim().parse().ok().map(Pid::from_raw)
}

fn is_sandbar(pid: Pid) -> bool {
    fs::read_to_string(format!("/proc/{pid}/comm")).is_ok_and(|name| name.trim() == PROGRAM_NAME)
}

fn read_first_byte(path: &str) -> io::Result<()> {
    match fs::File::open(path)?.read(&mut [0])? {
        0 => Err(io::Error::new(io::ErrorKind::UnexpectedEof, "it is empty")),
        _ => Ok(()),
    }
}

/// The root directory of a process must be the same as here.
fn probe_root(pid: Pid) -> ProbeVerdict {
    let theirs = fs::metadata(format!("/proc/{pid}/root/."));
    match (theirs, fs::metadata("/")) {
        (Ok(theirs), Ok(own)) if (theirs.dev(), theirs.ino()) == (own.dev(), own.ino()) => {
            ProbeVerdict::Blocked("every visible root is the same as here".to_owned())
        }
        (Ok(_), Ok(_)) => ProbeVerdict::Escaped(format!("/proc/{pid}/root is a different root")),
        (Err(error), _) | (_, Err(error)) => ProbeVerdict::Blocked(error.to_string()),
    }
}

/// An inherited descriptor escapes if it is a socket, or a file that cannot be opened by name.
fn probe_descriptor(number: u32) -> Option<ProbeVerdict> {
    let path = format!("/proc/self/fd/{number}");
    let leads_to = fs::read_link(&path).ok()?;
    let shown = leads_to.display().to_string();
    if shown.starts_with("socket:") {
        return Some(ProbeVerdict::Escaped(format!("file descriptor {number} is a socket")));
    }
    if !shown.starts_with('/') {
        return Some(ProbeVerdict::Blocked(format!("file descriptor {number} is {shown}")));
    }
    let same =
        |one: &fs::Metadata, other: &fs::Metadata| (one.dev(), one.ino()) == (other.dev(), other.ino());
    match (fs::metadata(&path), fs::File::open(Path::new(&shown)).and_then(|file| file.metadata())) {
        (Ok(open), Ok(named)) if same(&open, &named) => Some(ProbeVerdict::Blocked(format!(
            "file descriptor {number} is {shown}, which can be opened anyway"
        ))),
        _ => Some(ProbeVerdict::Escaped(format!(
            "file descriptor {number} is {shown}, which cannot be opened here"
        ))),
    }
}

/// A segment whose creator has no pid in this namespace was created outside.
fn probe_shared_memory(listed: &str) -> ProbeVerdict {
    let makers = listed.lines().skip(1).filter_map(|line| line.split_whitespace().nth(4));
    match makers.filter(|maker| *maker == "0").count() {
        0 => ProbeVerdict::Blocked("no segment from another PID namespace exists".to_owned()),
        count => ProbeVerdict::Escaped(format!("{count} segments created by processes outside")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shared_memory_from_outside_is_found() {
        let head = "key shmid perms size cpid lpid nattch uid\n";
        let line = |pid: u32| format!("0 0 1600 4096 {pid} 7 1 0\n");
        assert!(!probe_shared_memory(head).is_bad());
        assert!(!probe_shared_memory(&format!("{head}{}", line(7))).is_bad());
        assert!(probe_shared_memory(&format!("{head}{}{}", line(7), line(0))).is_bad());
    }
}
