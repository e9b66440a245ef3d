//! The container that the gateway runs in: 512 MiB, and whoever takes more is killed.
//!
//! A memory cgroup does it where this process may make one (cgroup v2 with the memory controller delegated). Elsewhere
//! the tests do what the kernel would: they look at the resident memory many times a second and kill the gateway. The
//! gateway reads the same limit then, from files in a mount namespace of its own.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Child;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

/// What the container has.
pub(crate) const MEMORY_LIMIT: u64 = 512 << 20;

const LOOK_INTERVAL: Duration = Duration::from_millis(10);

/// Watches the memory and descriptors of one process, and kills it at the limit if no cgroup does.
pub(crate) struct MemoryWatch {
    shared: Arc<Watched>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Debug, Default)]
struct Watched {
    over: AtomicBool,
    killed: AtomicBool,
    peak: AtomicU64,
    descriptors: AtomicU64,
}

impl MemoryWatch {
    pub(crate) fn start(child: Arc<Mutex<Child>>, limited_by_cgroup: bool) -> Self {
        let shared = Arc::<Watched>::default();
        let watched = shared.clone();
        let thread = std::thread::spawn(move || {
            let pid = child.lock().unwrap().id();
            for look in 0_u64.. {
                if watched.over.load(Ordering::SeqCst) {
                    break;
                }
                let resident = resident_bytes(pid).unwrap_or_default();
                watched.peak.fetch_max(resident, Ordering::SeqCst);
                if resident > MEMORY_LIMIT && !limited_by_cgroup {
                    watched.killed.store(true, Ordering::SeqCst);
                    drop(child.lock().unwrap().kill()); // it may have ended by itself
                }
                if look % 20 == 0 {
                    watched.descriptors.fetch_max(count_descriptors(pid), Ordering::SeqCst);
                }
                std::thread::sleep(LOOK_INTERVAL);
            }
        });
        MemoryWatch { shared, thread: Some(thread) }
    }

    /// Most resident bytes seen.
    pub(crate) fn peak(&self) -> u64 {
        self.shared.peak.load(Ordering::SeqCst)
    }

    /// Most descriptors seen.
    pub(crate) fn descriptors(&self) -> u64 {
        self.shared.descriptors.load(Ordering::SeqCst)
    }

    /// Whether the limit was reached and the gateway killed.
    pub(crate) fn has_killed(&self) -> bool {
        self.shared.killed.load(Ordering::SeqCst)
    }
}

impl Drop for MemoryWatch {
    fn drop(&mut self) {
        self.shared.over.store(true, Ordering::SeqCst);
        if let Some(thread) = self.thread.take() {
            drop(thread.join());
        }
    }
}

/// Resident bytes of a process; none once it has ended.
pub(crate) fn resident_bytes(pid: u32) -> Option<u64> {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"))?;
    line.trim().strip_suffix(" kB")?.parse::<u64>().ok().map(|kilobytes| kilobytes << 10)
}

fn count_descriptors(pid: u32) -> u64 {
    fs::read_dir(format!("/proc/{pid}/fd")).map_or(0, |all| all.count() as u64)
}

/// What a shell in a mount namespace of its own does so that a program there reads the limit where a cgroup would have it.
pub(crate) fn tell_limit() -> String {
    let root = "/sys/fs/cgroup";
    format!(
        "mount -t tmpfs tmpfs {root} && mkdir {root}/memory && echo {MEMORY_LIMIT} > {root}/memory.max && \
         echo {MEMORY_LIMIT} > {root}/memory/memory.limit_in_bytes"
    )
}

/// A memory cgroup of the limit's size, below this process's own; removed when it is dropped.
#[derive(Debug)]
pub(crate) struct MemoryCgroup(PathBuf);

impl MemoryCgroup {
    /// None where this process may not make one.
    pub(crate) fn create() -> Option<Self> {
        let own = fs::read_to_string("/proc/self/cgroup").ok()?;
        let own = own.lines().find_map(|line| line.strip_prefix("0::/"))?.to_owned();
        let parent = Path::new("/sys/fs/cgroup").join(own);
        let delegated = fs::read_to_string(parent.join("cgroup.subtree_control")).ok()?;
        if !delegated.split_whitespace().any(|controller| controller == "memory") {
            return None;
        }
        let made = MemoryCgroup(parent.join(format!("neighbours-{}", std::process::id())));
        fs::create_dir(&made.0).ok()?;
        let set = |file: &str, value: &str| fs::write(made.0.join(file), value).ok();
        set("memory.max", &MEMORY_LIMIT.to_string())?;
        set("memory.swap.max", "0").or(Some(()))?; // a machine without swap has no such file
        Some(made)
    }

    /// What a shell does to enter it.
    pub(crate) fn join_script(&self) -> String {
        format!("echo $$ > {}/cgroup.procs", self.0.display())
    }

    /// Whether the kernel killed somebody inside.
    pub(crate) fn has_killed(&self) -> bool {
        let events = fs::read_to_string(self.0.join("memory.events")).unwrap_or_default();
        events.lines().any(|line| line.strip_prefix("oom_kill ").is_some_and(|count| count != "0"))
    }
}

impl Drop for MemoryCgroup {
    fn drop(&mut self) {
        drop(fs::remove_dir(&self.0));
    }
}
