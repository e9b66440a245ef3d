//! What the machine has: memory, descriptors, local ports, TCP memory.

use std::fs;
use std::io;
use std::path::Path;

use nix::sys::resource::{Resource, getrlimit, setrlimit};

/// The kernel's default range of local ports, if it cannot be read.
const DEFAULT_PORTS: u64 = 28_232;
/// Assumed if neither the cgroup nor the kernel says how much memory there is.
const DEFAULT_MEMORY: u64 = 512 << 20;

/// Returns how many bytes of memory this process may use: the limit of its cgroup or an ancestor's, or the machine's
/// memory if that is less.
pub fn memory_limit() -> u64 {
    let machine = fs::read_to_string("/proc/meminfo").ok().and_then(|text| meminfo_total(&text));
    let groups = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    cgroup_limits(Path::new("/sys/fs/cgroup"), &groups).chain(machine).min().unwrap_or(DEFAULT_MEMORY)
}

/// Raises the soft limit on descriptors to the hard one. Returns the limit that then holds.
///
/// # Errors
///
/// Returns the error of `getrlimit`. A limit that cannot be raised is not an error.
pub fn raise_descriptor_limit() -> io::Result<u64> {
    let (soft, hard) = getrlimit(Resource::RLIMIT_NOFILE)?;
    match setrlimit(Resource::RLIMIT_NOFILE, hard, hard) {
        Ok(()) => Ok(hard),
        Err(_) => Ok(soft),
    }
}

/// Returns how many local ports the kernel chooses from.
pub fn local_ports() -> u64 {
    let range = read_numbers("/proc/sys/net/ipv4/ip_local_port_range");
    match range.as_slice() {
        [low, high] if low <= high => high - low + 1,
        _ => DEFAULT_PORTS,
    }
}

/// Returns the bytes of TCP memory at which the kernel starts to squeeze every connection, or `u64::MAX` if unknown.
pub fn tcp_memory() -> u64 {
    let pages = read_numbers("/proc/sys/net/ipv4/tcp_mem");
    match pages.as_slice() {
        [_, pressure, _] => pressure.saturating_mul(4096),
        _ => u64::MAX,
    }
}

/// Returns whether the kernel reuses a port in TIME_WAIT for a new connection: towards `loopback`, or in general
/// (`tcp_tw_reuse`).
pub fn reuses_waiting_ports(loopback: bool) -> bool {
    match read_numbers("/proc/sys/net/ipv4/tcp_tw_reuse").as_slice() {
        [1] => true,
        [2] => loopback,
        _ => false,
    }
}

fn read_numbers(path: &str) -> Vec<u64> {
    let text = fs::read_to_string(path).unwrap_or_default();
    text.split_ascii_whitespace().filter_map(|word| word.parse().ok()).collect()
}

fn meminfo_total(text: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix("MemTotal:"))?;
    let kib: u64 = line.split_ascii_whitespace().next()?.parse().ok()?;
    Some(kib * 1024)
}

/// Returns the memory limits of every cgroup that `/proc/self/cgroup` names, and of their ancestors (versions 1 and 2).
fn cgroup_limits(root: &Path, groups: &str) -> impl Iterator<Item = u64> {
    let mut found = Vec::new();
    for line in groups.lines() {
        let mut parts = line.splitn(3, ':').skip(1);
        let (Some(controllers), Some(path)) = (parts.next(), parts.next()) else { continue };
        let (base, file) = match controllers {
            "" => (root.to_owned(), "memory.max"),
            _ if controllers.split(',').any(|name| name == "memory") => {
                (root.join("memory"), "memory.limit_in_bytes")
            }
            _ => continue,
        };
        let group = base.join(path.trim_start_matches('/'));
        let within = group.ancestors().take_while(|above| above.starts_with(&base));
        let limits = within.filter_map(|above| fs::read_to_string(above.join(file)).ok());
        found.extend(limits.filter_map(|limit| limit.trim().parse::<u64>().ok())); // skips `max`
    }
    found.into_iter()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_smallest_limit_of_the_ancestors_counts() {
        let root = tempfile::tempdir().unwrap();
        let leaf = root.path().join("pod/app");
        fs::create_dir_all(&leaf).unwrap();
        fs::write(leaf.join("memory.max"), "max\n").unwrap();
        fs::write(root.path().join("pod/memory.max"), "536870912\n").unwrap();
        let limits: Vec<u64> = cgroup_limits(root.path(), "0::/pod/app\n").collect();
        assert_eq!(limits, [512 << 20]);
    }

    #[test]
    fn version_1_has_its_own_file() {
        let root = tempfile::tempdir().unwrap();
        let leaf = root.path().join("memory/pod");
        fs::create_dir_all(&leaf).unwrap();
        fs::write(leaf.join("memory.limit_in_bytes"), "1024\n").unwrap();
        let limits: Vec<u64> = cgroup_limits(root.path(), "9:cpu,cpuacct:/x\n4:memory:/pod\n").collect();
        assert_eq!(limits, [1024]);
    }

    #[test]
    fn this_machine_has_something_of_everything() {
        assert!(memory_limit() > 1 << 20);
        assert!(local_ports() > 0);
        assert!(tcp_memory() > 0);
        assert!(raise_descriptor_limit().unwrap() > 16);
        assert_eq!(meminfo_total("MemTotal:       16384 kB\n"), Some(16 << 20));
    }
}
