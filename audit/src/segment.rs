//! The files of the log: a new name for each, appended to, never renamed or cut by us.
//!
//! A segment is named after the number of its first record, so that sorting the names is sorting
//! the log, whatever the clock did.

use std::fs::{self, File, OpenOptions, Permissions};
use std::io::{self, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

/// Owner writes, group reads (the shipper), others nothing.
const MODE: u32 = 0o640;
const PREFIX: &str = "access-";
const SUFFIX: &str = ".jsonl";

/// The segment that is being written.
#[derive(Debug)]
pub(crate) struct Segment {
    file: File,
    pub(crate) path: PathBuf,
    pub(crate) name: String,
    pub(crate) size: u64,
    born: SystemTime,
}

/// A write that failed after `written` bytes.
#[derive(Debug)]
pub(crate) struct Short {
    pub(crate) written: usize,
    pub(crate) error: io::Error,
}

impl Segment {
    /// Makes the segment whose first record will have the number `first`.
    pub(crate) fn create(dir: &Path, first: u64) -> io::Result<Self> {
        let segment = Self::open(dir, first, OpenOptions::new().create_new(true))?;
        segment.file.set_permissions(Permissions::from_mode(MODE))?; // whatever the umask says
        File::open(dir)?.sync_all()?; // or the name could be lost with the power
        Ok(segment)
    }

    /// Goes on with the segment that begins with the record `first`.
    pub(crate) fn resume(dir: &Path, first: u64) -> io::Result<Self> {
        Self::open(dir, first, &mut OpenOptions::new())
    }

    fn open(dir: &Path, first: u64, options: &mut OpenOptions) -> io::Result<Self> {
        let name = name(first);
        let path = dir.join(&name);
        let file = options.append(true).mode(MODE).open(&path)?;
        let metadata = file.metadata()?;
        // The time of the last change stands in where the file system keeps no time of birth.
        let born = metadata.created().or_else(|_| metadata.modified())?;
        Ok(Self { file, path, name, size: metadata.len(), born })
    }

    /// Appends whole lines, in one `write` unless the kernel takes less.
    pub(crate) fn append(&mut self, bytes: &[u8]) -> Result<(), Short> {
        let mut written = 0;
        while let Some(rest) = bytes.get(written..).filter(|rest| !rest.is_empty()) {
            match self.file.write(rest) {
                Ok(0) => return Err(Short { written, error: io::ErrorKind::WriteZero.into() }),
                Ok(count) => written += count,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(Short { written, error }),
            }
        }
        self.size += bytes.len() as u64;
        Ok(())
    }

    pub(crate) fn sync(&self) -> io::Result<()> {
        self.file.sync_data()
    }

    /// Fails when the file has no name any more: what is written to it is lost.
    pub(crate) fn attached(&self) -> io::Result<()> {
        match self.file.metadata()?.nlink() {
            0 => Err(io::Error::new(io::ErrorKind::NotFound, "the segment was removed")),
            _ => Ok(()),
        }
    }

    pub(crate) fn age(&self) -> Duration {
        self.born.elapsed().unwrap_or_default() // a clock set back makes it young, not old
    }
}

/// The name of the segment that begins with the record `first`.
pub(crate) fn name(first: u64) -> String {
    format!("{PREFIX}{first:020}{SUFFIX}")
}

/// The number of the first record, from the file's name.
pub(crate) fn first(name: &str) -> Option<u64> {
    let digits = name.strip_prefix(PREFIX)?.strip_suffix(SUFFIX)?;
    (digits.len() == 20).then(|| digits.parse().ok())?
}

/// The segments of a directory in order, by the number of their first record.
///
/// # Errors
///
/// Returns the error of reading the directory.
pub fn segments(dir: &Path) -> io::Result<Vec<(u64, PathBuf)>> {
    let mut found = Vec::new();
    for entry in fs::read_dir(dir)? {
        let entry = entry?;
        if let Some(first) = entry.file_name().to_str().and_then(first) {
            found.push((first, entry.path()));
        }
    }
    found.sort();
    Ok(found)
}
