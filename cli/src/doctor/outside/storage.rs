//! Storage: the log, disk space, and how files are mounted.

use std::fs;
use std::path::{Path, PathBuf};

use audit::verify::{LogIntegrity, VerifyProgress, verify};
use nix::sys::statvfs::statvfs;

use super::{ConfigFiles, DeploymentState, OutsideProbe};
use crate::doctor::probe::ProbeVerdict;

const GROUP: &str = "log and files";
/// Minimum free space for the log: a few minutes of a busy gateway's records.
const MIN_FREE_BYTES: u64 = 512 << 20;
/// Minimum number of free inodes.
const MIN_FREE_FILES: u64 = 1000;
/// Number of bytes at the end of the log in which to look for records.
const TAIL_BYTES: u64 = 4 << 20;

pub(super) fn probes() -> Vec<OutsideProbe> {
    vec![
        OutsideProbe::new(
            GROUP,
            "log.room",
            "there is enough free space for the log",
            "free space on the file system of the log directory, or move the log: when the disk is full, Sandbar refuses everything",
            probe_free_space,
        ),
        OutsideProbe::new(
            GROUP,
            "log.intact",
            "the newest segment of the log verifies",
            "preserve the files, and verify them against checkpoints held elsewhere: `sandbar log verify DIR`",
            probe_log_chain,
        ),
        OutsideProbe::new(
            GROUP,
            "files.mounts",
            "no policy is mounted as a single file",
            "mount the directory instead: a file mounted on its own does not change when it is replaced outside",
            probe_mounts,
        ),
    ]
}

fn probe_free_space(site: &DeploymentState) -> ProbeVerdict {
    let files = match site.files() {
        Ok(files) => files,
        Err(unknown) => return unknown,
    };
    let dir = files.paths.log.ancestors().find(|dir| dir.exists()).unwrap_or(Path::new("."));
    match statvfs(dir) {
        Err(error) => ProbeVerdict::Unknown(format!("{}: {error}", dir.display())),
        Ok(stats) => {
            let free = stats.blocks_available() * stats.fragment_size();
            // A file system that allocates inodes dynamically reports zero of them.
            let files = if stats.files() == 0 { u64::MAX } else { stats.files_available() };
            let shown = format!("{} MiB free", free >> 20);
            match free < MIN_FREE_BYTES || files < MIN_FREE_FILES {
                true => ProbeVerdict::Wrong(format!("{shown}, {files} inodes free")),
                false => ProbeVerdict::Fine(shown),
            }
        }
    }
}

fn probe_log_chain(site: &DeploymentState) -> ProbeVerdict {
    let files = match site.files() {
        Ok(files) => files,
        Err(unknown) => return unknown,
    };
    let Some(newest) = newest_segment(&files.paths.log) else {
        return ProbeVerdict::Unknown("no log yet".to_owned());
    };
    match verify(&[newest], &[], &VerifyProgress::default()) {
        Err((path, error)) => ProbeVerdict::Unknown(format!("{}: {error}", path.display())),
        Ok(report) => match report.integrity() {
            LogIntegrity::Changed => {
                let first = report
                    .faults
                    .first()
                    .map(|fault| format!("{}:{}: {}", fault.file.display(), fault.line, fault.kind));
                ProbeVerdict::Wrong(first.unwrap_or_default())
            }
            // A single segment does not start at the first record, and a record may be half written.
            LogIntegrity::Incomplete | LogIntegrity::Intact => {
                ProbeVerdict::Fine(format!("{} records", report.records))
            }
        },
    }
}

fn newest_segment(log: &Path) -> Option<PathBuf> {
    audit::list_segments(log).ok()?.into_iter().next_back().map(|(_, path)| path)
}

/// The last lines of a log, oldest first; the first may be incomplete.
pub(super) fn newest_lines(log: &Path) -> Vec<Vec<u8>> {
    let Some(path) = newest_segment(log) else { return Vec::new() };
    let read = || -> std::io::Result<Vec<u8>> {
        use std::io::{Read, Seek, SeekFrom};
        let mut file = fs::File::open(path)?;
        let length = file.metadata()?.len();
        file.seek(SeekFrom::Start(length.saturating_sub(TAIL_BYTES)))?;
        let mut bytes = Vec::new();
        file.take(TAIL_BYTES).read_to_end(&mut bytes)?;
        Ok(bytes)
    };
    let bytes = read().unwrap_or_default();
    let lines = bytes.split(|byte| *byte == b'\n').filter(|line| !line.is_empty());
    lines.map(<[u8]>::to_vec).collect()
}

/// Checks the mounts of the running instance, if they are readable, or else those of this process.
fn probe_mounts(site: &DeploymentState) -> ProbeVerdict {
    let files = match site.files() {
        Ok(files) => files,
        Err(unknown) => return unknown,
    };
    let theirs = site.process.map(|process| format!("/proc/{}/mountinfo", process.pid));
    let theirs = theirs.and_then(|path| fs::read_to_string(path).ok());
    let listed = theirs.or_else(|| fs::read_to_string("/proc/self/mountinfo").ok());
    let listed = listed.unwrap_or_default();
    let points: Vec<&str> = listed.lines().filter_map(|line| line.split(' ').nth(4)).collect();
    let mounted: Vec<String> = watched_files(files)
        .into_iter()
        .filter_map(|path| fs::canonicalize(path).ok())
        .map(|path| path.display().to_string())
        .filter(|path| points.contains(&escape_mount_path(path).as_str()))
        .collect();
    match mounted.is_empty() {
        true => ProbeVerdict::Fine("none".to_owned()),
        false => ProbeVerdict::Wrong(format!("{} is mounted as a single file", mounted.join(", "))),
    }
}

/// Files that the instance watches for changes.
fn watched_files(files: &ConfigFiles) -> Vec<PathBuf> {
    let policies = files.sources.policies.iter().map(|file| PathBuf::from(&file.path));
    let lists = files.sources.lists.keys().map(PathBuf::from);
    let credentials = files.configuration.credentials.iter().flat_map(|one| one.source.files());
    let credentials = credentials.map(|file| files.resolve(file));
    [files.config.clone()].into_iter().chain(policies).chain(lists).chain(credentials).collect()
}

/// Escapes a path as `/proc/self/mountinfo` does (proc(5)).
fn escape_mount_path(path: &str) -> String {
    path.replace('\\', "\\134").replace(' ', "\\040").replace('\t', "\\011").replace('\n', "\\012")
}
