//! What is kept: log, disk, and how files are mounted.

use std::fs;
use std::path::{Path, PathBuf};

use audit::verify::{LogIntegrity, VerifyProgress, verify};
use nix::sys::statvfs::statvfs;

use super::{ConfigFiles, DeploymentState, OutsideProbe};
use crate::doctor::probe::ProbeVerdict;

const GROUP: &str = "log and files";
/// Least room for the log: some minutes of a busy gateway's records.
const MIN_FREE_BYTES: u64 = 512 << 20;
/// Fewest files that can still be made.
const MIN_FREE_FILES: u64 = 1000;
/// Most bytes of the end of a log that are looked at for records.
const TAIL_BYTES: u64 = 4 << 20;

pub(super) fn probes() -> Vec<OutsideProbe> {
    vec![
        OutsideProbe::new(
            GROUP,
            "log.room",
            "there is room for the log",
            "make room on the file system of the log's directory, or move it: when it is full, everything is refused",
            probe_free_space,
        ),
        OutsideProbe::new(
            GROUP,
            "log.intact",
            "the newest segment of the log is what was written",
            "keep the files, and compare with the checkpoints held elsewhere: `sandbar log verify DIR`",
            probe_log_chain,
        ),
        OutsideProbe::new(
            GROUP,
            "files.mounts",
            "no policy is mounted as a single file",
            "mount the directory instead: a file that is mounted alone does not change when it is replaced outside",
            probe_mounts,
        ),
    ]
}

fn probe_free_space(site: &DeploymentState) -> ProbeVerdict {
    let files = match site.files() {
        Ok(files) => files,
        Err(unknown) => return unknown,
    };
    let dir = files.places.log.ancestors().find(|dir| dir.exists()).unwrap_or(Path::new("."));
    match statvfs(dir) {
        Err(error) => ProbeVerdict::Unknown(format!("{}: {error}", dir.display())),
        Ok(found) => {
            let free = found.blocks_available() * found.fragment_size();
            // A file system that makes its files as it goes says that it has none at all.
            let files = if found.files() == 0 { u64::MAX } else { found.files_available() };
            let told = format!("{} MiB free", free >> 20);
            match free < MIN_FREE_BYTES || files < MIN_FREE_FILES {
                true => ProbeVerdict::Wrong(format!("{told}, {files} files")),
                false => ProbeVerdict::Fine(told),
            }
        }
    }
}

fn probe_log_chain(site: &DeploymentState) -> ProbeVerdict {
    let files = match site.files() {
        Ok(files) => files,
        Err(unknown) => return unknown,
    };
    let Some(newest) = newest_segment(&files.places.log) else {
        return ProbeVerdict::Unknown("there is no log yet".to_owned());
    };
    match verify(&[newest], &[], &VerifyProgress::default()) {
        Err((path, error)) => ProbeVerdict::Unknown(format!("{}: {error}", path.display())),
        Ok(report) => match report.integrity() {
            LogIntegrity::Changed => {
                let first = report.faults.first().map(|fault| {
                    format!("{}:{}: {}", fault.file.display(), fault.line, fault.kind)
                });
                ProbeVerdict::Wrong(first.unwrap_or_default())
            }
            // One segment alone begins later, and a record may be on its way.
            LogIntegrity::Incomplete | LogIntegrity::Intact => {
                ProbeVerdict::Fine(format!("{} records", report.records))
            }
        },
    }
}

fn newest_segment(log: &Path) -> Option<PathBuf> {
    audit::list_segments(log).ok()?.into_iter().next_back().map(|(_, path)| path)
}

/// The last records of a log, oldest first; the first line may be cut off.
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

/// Looked at as the running instance sees it, if that can be seen.
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
    let alone: Vec<String> = watched_files(files)
        .into_iter()
        .filter_map(|path| fs::canonicalize(path).ok())
        .map(|path| path.display().to_string())
        .filter(|path| points.contains(&escape_mount_path(path).as_str()))
        .collect();
    match alone.is_empty() {
        true => ProbeVerdict::Fine("none is".to_owned()),
        false => ProbeVerdict::Wrong(format!("{} is mounted alone", alone.join(", "))),
    }
}

/// Files whose changes count at once.
fn watched_files(files: &ConfigFiles) -> Vec<PathBuf> {
    let policies = files.sources.policies.iter().map(|file| PathBuf::from(&file.path));
    let lists = files.sources.lists.keys().map(PathBuf::from);
    let credentials = files.operator.credentials.iter().map(|one| files.resolve(&one.file));
    [files.config.clone()].into_iter().chain(policies).chain(lists).chain(credentials).collect()
}

/// As `/proc/self/mountinfo` writes a path (proc(5)).
fn escape_mount_path(path: &str) -> String {
    path.replace('\\', "\\134").replace(' ', "\\040").replace('\t', "\\011").replace('\n', "\\012")
}
