//! Processes: those of Sandbar, and whatever leads from a process to another's files.

use std::fs;
use std::io::{self, Read};
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use nix::sys::ptrace;
use nix::sys::signal::kill;
use nix::unistd::{Pid, getpid, getppid};

use super::{Ground, Probe};
use crate::doctor::probe::Verdict;

const GROUP: &str = "processes";
const FIX: &str =
    "give the sandbox a process namespace of its own, without Sandbar in it, and another user";
/// What the program is called.
const NAME: &str = "sandbar";
const NONE: &str = "no process of Sandbar's can be seen";

pub(super) fn probes() -> Vec<Probe> {
    vec![
        each("processes.environment", "the environment of Sandbar's processes", |pid| {
            holds(&format!("/proc/{pid}/environ"))
        }),
        each("processes.memory", "the memory of Sandbar's processes", |pid| {
            fs::File::open(format!("/proc/{pid}/mem")).map(drop)
        }),
        each("processes.descriptors", "the open files of Sandbar's processes", |pid| {
            let numbers = fs::read_dir(format!("/proc/{pid}/fd"))?.flatten();
            // That there are some is no secret; what they are is.
            let seen = numbers.map(|number| fs::read_link(number.path()).map(drop));
            seen.reduce(Result::or).unwrap_or_else(|| Err(io::ErrorKind::NotFound.into()))
        }),
        each("processes.trace", "tracing Sandbar's processes", |pid| {
            Ok(ptrace::seize(pid, ptrace::Options::empty())?) // let go at this one's end
        }),
        each("processes.kill", "ending Sandbar's processes", |pid| {
            if pid.as_raw() == 1 {
                let why = "the first process of a namespace cannot be killed from within";
                return Err(io::Error::new(io::ErrorKind::PermissionDenied, why));
            }
            Ok(kill(pid, None)?)
        }),
        Probe::new(GROUP, "processes.root", "other file systems, by a process's root", FIX, |_| {
            let tried: Vec<Verdict> = pids().into_iter().map(root).collect();
            Verdict::worst(tried, "there is no other process")
        }),
        Probe::new(
            GROUP,
            "processes.inherited",
            "descriptors that were left open",
            "close what is open before the sandbox starts (`close_range`), above standard error",
            |_| {
                let left = (3..1024).filter_map(inherited);
                Verdict::worst(left.collect::<Vec<_>>(), "none is open")
            },
        ),
        Probe::new(
            GROUP,
            "processes.shared-memory",
            "shared memory of processes outside",
            "give the sandbox an IPC namespace of its own",
            |_| shared_memory(&fs::read_to_string("/proc/sysvipc/shm").unwrap_or_default()),
        ),
    ]
}

/// Something to be tried on every process of Sandbar's but this one and those with it.
fn each(
    name: &'static str,
    what: &'static str,
    attempt: impl Fn(Pid) -> io::Result<()> + Send + Sync + 'static,
) -> Probe {
    Probe::new(GROUP, name, what, FIX, move |_: &Ground| {
        let tried =
            pids().into_iter().filter(|pid| is_sandbar(*pid)).map(|pid| match attempt(pid) {
                Ok(()) => Verdict::Escaped(format!("process {pid} let it happen")),
                Err(error) => Verdict::Blocked(error.to_string()),
            });
        Verdict::worst(tried.collect::<Vec<_>>(), NONE)
    })
}

/// Most ancestors that are looked at.
const GENERATIONS: usize = 64;

/// Every process but this one, the one that began it, and all that came of that one besides.
pub(super) fn pids() -> Vec<Pid> {
    let names = fs::read_dir("/proc").into_iter().flatten().flatten();
    let pids = names.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    let (own, parent) = (getpid(), getppid());
    let strange = |pid: &Pid| *pid != own && *pid != parent && !comes_of(*pid, parent);
    pids.map(Pid::from_raw).filter(strange).collect()
}

fn comes_of(pid: Pid, ancestor: Pid) -> bool {
    let line = std::iter::successors(Some(pid), |pid| parent_of(*pid)).take(GENERATIONS);
    line.skip(1).any(|one| one == ancestor)
}

fn parent_of(pid: Pid) -> Option<Pid> {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("PPid:"))?;
    line.trim().parse().ok().map(Pid::from_raw)
}

fn is_sandbar(pid: Pid) -> bool {
    fs::read_to_string(format!("/proc/{pid}/comm")).is_ok_and(|name| name.trim() == NAME)
}

fn holds(path: &str) -> io::Result<()> {
    match fs::File::open(path)?.read(&mut [0])? {
        0 => Err(io::Error::new(io::ErrorKind::UnexpectedEof, "there is nothing in it")),
        _ => Ok(()),
    }
}

/// Whether the root of a process is another directory than here.
fn root(pid: Pid) -> Verdict {
    let theirs = fs::metadata(format!("/proc/{pid}/root/."));
    match (theirs, fs::metadata("/")) {
        (Ok(theirs), Ok(own)) if (theirs.dev(), theirs.ino()) == (own.dev(), own.ino()) => {
            Verdict::Blocked("every root that can be seen is the one here".to_owned())
        }
        (Ok(_), Ok(_)) => Verdict::Escaped(format!("/proc/{pid}/root is another")),
        (Err(error), _) | (_, Err(error)) => Verdict::Blocked(error.to_string()),
    }
}

/// Sockets, and files that are not to be had by their name.
fn inherited(number: u32) -> Option<Verdict> {
    let path = format!("/proc/self/fd/{number}");
    let leads_to = fs::read_link(&path).ok()?;
    let shown = leads_to.display().to_string();
    if shown.starts_with("socket:") {
        return Some(Verdict::Escaped(format!("descriptor {number} is a socket")));
    }
    if !shown.starts_with('/') {
        return Some(Verdict::Blocked(format!("descriptor {number} is a {shown}")));
    }
    let same = |one: &fs::Metadata, other: &fs::Metadata| {
        (one.dev(), one.ino()) == (other.dev(), other.ino())
    };
    match (fs::metadata(&path), fs::File::open(Path::new(&shown)).and_then(|file| file.metadata()))
    {
        (Ok(open), Ok(named)) if same(&open, &named) => {
            Some(Verdict::Blocked(format!("descriptor {number} is {shown}, to be had anyway")))
        }
        _ => Some(Verdict::Escaped(format!("descriptor {number} is {shown}, not to be had here"))),
    }
}

/// Segments whose maker has no number here.
fn shared_memory(listed: &str) -> Verdict {
    let makers = listed.lines().skip(1).filter_map(|line| line.split_whitespace().nth(4));
    match makers.filter(|maker| *maker == "0").count() {
        0 => Verdict::Blocked("none of another process namespace is there".to_owned()),
        count => Verdict::Escaped(format!("{count} segments of processes outside")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shared_memory_of_others_is_found() {
        let head = "key shmid perms size cpid lpid nattch uid\n";
        let line = |pid: u32| format!("0 0 1600 4096 {pid} 7 1 0\n");
        assert!(!shared_memory(head).is_bad());
        assert!(!shared_memory(&format!("{head}{}", line(7))).is_bad());
        assert!(shared_memory(&format!("{head}{}{}", line(7), line(0))).is_bad());
    }
}
