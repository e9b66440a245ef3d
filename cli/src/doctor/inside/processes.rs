//! Processes: those of Sandbar, and whatever leads from a process to another's files.

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
const FIX: &str =
    "give the sandbox a process namespace of its own, without Sandbar in it, and another user";
/// What the program is called.
const PROGRAM_NAME: &str = "sandbar";
const NO_PROCESS: &str = "no process of Sandbar's can be seen";

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
            // That there are some is no secret; what they are is.
            let seen = numbers.map(|number| fs::read_link(number.path()).map(drop));
            seen.reduce(Result::or).unwrap_or_else(|| Err(io::ErrorKind::NotFound.into()))
        }),
        probe_each("processes.trace", "tracing Sandbar's processes", |pid| {
            Ok(ptrace::seize(pid, ptrace::Options::empty())?) // let go at this one's end
        }),
        probe_each("processes.kill", "ending Sandbar's processes", |pid| {
            if pid.as_raw() == 1 {
                let why = "the first process of a namespace cannot be killed from within";
                return Err(io::Error::new(io::ErrorKind::PermissionDenied, why));
            }
            Ok(kill(pid, None)?)
        }),
        InsideProbe::new(
            GROUP,
            "processes.root",
            "other file systems, by a process's root",
            FIX,
            |_| {
                let tried: Vec<ProbeVerdict> = foreign_pids().into_iter().map(probe_root).collect();
                ProbeVerdict::worst(tried, "there is no other process")
            },
        ),
        InsideProbe::new(
            GROUP,
            "processes.inherited",
            "descriptors that were left open",
            "close what is open before the sandbox starts (`close_range`), above standard error",
            |_| {
                let left = (3..1024).filter_map(probe_descriptor);
                ProbeVerdict::worst(left.collect::<Vec<_>>(), "none is open")
            },
        ),
        InsideProbe::new(
            GROUP,
            "processes.shared-memory",
            "shared memory of processes outside",
            "give the sandbox an IPC namespace of its own",
            |_| probe_shared_memory(&fs::read_to_string("/proc/sysvipc/shm").unwrap_or_default()),
        ),
    ]
}

/// Something to be tried on every process of Sandbar's but this one and those with it.
fn probe_each(
    name: &'static str,
    what: &'static str,
    attempt: impl Fn(Pid) -> io::Result<()> + Send + Sync + 'static,
) -> InsideProbe {
    InsideProbe::new(GROUP, name, what, FIX, move |_: &ProbeTargets| {
        let tried = foreign_pids().into_iter().filter(|pid| is_sandbar(*pid)).map(|pid| {
            match attempt(pid) {
                Ok(()) => ProbeVerdict::Escaped(format!("process {pid} let it happen")),
                Err(error) => ProbeVerdict::Blocked(error.to_string()),
            }
        });
        ProbeVerdict::worst(tried.collect::<Vec<_>>(), NO_PROCESS)
    })
}

/// Most ancestors that are looked at.
const MAX_ANCESTORS: usize = 64;

/// Every process but this one, the one that began it, and all that came of that one besides.
pub(super) fn foreign_pids() -> Vec<Pid> {
    let names = fs::read_dir("/proc").into_iter().flatten().flatten();
    let pids = names.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    let (own, parent) = (getpid(), getppid());
    let strange = |pid: &Pid| *pid != own && *pid != parent && !is_descendant(*pid, parent);
    pids.map(Pid::from_raw).filter(strange).collect()
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
        0 => Err(io::Error::new(io::ErrorKind::UnexpectedEof, "there is nothing in it")),
        _ => Ok(()),
    }
}

/// Whether the root of a process is another directory than here.
fn probe_root(pid: Pid) -> ProbeVerdict {
    let theirs = fs::metadata(format!("/proc/{pid}/root/."));
    match (theirs, fs::metadata("/")) {
        (Ok(theirs), Ok(own)) if (theirs.dev(), theirs.ino()) == (own.dev(), own.ino()) => {
            ProbeVerdict::Blocked("every root that can be seen is the one here".to_owned())
        }
        (Ok(_), Ok(_)) => ProbeVerdict::Escaped(format!("/proc/{pid}/root is another")),
        (Err(error), _) | (_, Err(error)) => ProbeVerdict::Blocked(error.to_string()),
    }
}

/// Sockets, and files that are not to be had by their name.
fn probe_descriptor(number: u32) -> Option<ProbeVerdict> {
    let path = format!("/proc/self/fd/{number}");
    let leads_to = fs::read_link(&path).ok()?;
    let shown = leads_to.display().to_string();
    if shown.starts_with("socket:") {
        return Some(ProbeVerdict::Escaped(format!("descriptor {number} is a socket")));
    }
    if !shown.starts_with('/') {
        return Some(ProbeVerdict::Blocked(format!("descriptor {number} is a {shown}")));
    }
    let same = |one: &fs::Metadata, other: &fs::Metadata| {
        (one.dev(), one.ino()) == (other.dev(), other.ino())
    };
    match (fs::metadata(&path), fs::File::open(Path::new(&shown)).and_then(|file| file.metadata()))
    {
        (Ok(open), Ok(named)) if same(&open, &named) => {
            Some(ProbeVerdict::Blocked(format!("descriptor {number} is {shown}, to be had anyway")))
        }
        _ => Some(ProbeVerdict::Escaped(format!(
            "descriptor {number} is {shown}, not to be had here"
        ))),
    }
}

/// Segments whose maker has no number here.
fn probe_shared_memory(listed: &str) -> ProbeVerdict {
    let makers = listed.lines().skip(1).filter_map(|line| line.split_whitespace().nth(4));
    match makers.filter(|maker| *maker == "0").count() {
        0 => ProbeVerdict::Blocked("none of another process namespace is there".to_owned()),
        count => ProbeVerdict::Escaped(format!("{count} segments of processes outside")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shared_memory_of_others_is_found() {
        let head = "key shmid perms size cpid lpid nattch uid\n";
        let line = |pid: u32| format!("0 0 1600 4096 {pid} 7 1 0\n");
        assert!(!probe_shared_memory(head).is_bad());
        assert!(!probe_shared_memory(&format!("{head}{}", line(7))).is_bad());
        assert!(probe_shared_memory(&format!("{head}{}{}", line(7), line(0))).is_bad());
    }
}
