//! Segments: the files of the log. Each is appended to under a name of its own, and never renamed or
//! truncated once it holds a record. A closed one may be compressed; its lines stay the same.
//!
//! A segment is named after the number of its first record, so that sorting by name gives the order
//! of the log even if the clock was set back.

use std::fs::{self, File, OpenOptions, Permissions};
use std::io::{self, Read, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use crate::line_reader::{LineReader, RawLine};
use crate::record::MovedFile;

/// The owner writes, the group (the log shipper) reads.
pub(crate) const MODE: u32 = 0o640;
const PREFIX: &str = "access-";
const SUFFIX: &str = ".jsonl";
/// What a compressed segment has at the end of its name in addition.
const COMPRESSED: &str = ".zst";
/// Largest window of a compressed segment to read (16 MiB); ours are smaller.
const WINDOW_LOG_MAX: u32 = 24;

/// The segment being written.
#[derive(Debug)]
pub(crate) struct LogSegment {
    file: File,
    pub(crate) path: PathBuf,
    pub(crate) name: String,
    pub(crate) size: u64,
    born: SystemTime,
}

/// A write that failed after `written` bytes.
#[derive(Debug)]
pub(crate) struct ShortWrite {
    pub(crate) written: usize,
    pub(crate) error: io::Error,
}

impl LogSegment {
    /// Creates the segment that starts with record number `first`. Reuses an empty file of that name,
    /// which an earlier attempt left behind.
    pub(crate) fn create(dir: &Path, first: u64) -> io::Result<Self> {
        let directory = File::open(dir)?; // first: if descriptors run out, no file is left behind
        let path = dir.join(segment_name(first));
        move_aside(&path)?;
        let created = Self::open(dir, first, OpenOptions::new().create(true)).and_then(|segment| {
            segment.file.set_permissions(Permissions::from_mode(MODE))?; // independent of the umask
            directory.sync_all()?; // or a power loss could lose the name
            Ok(segment)
        });
        created.inspect_err(|_| fs::remove_file(&path).unwrap_or_default())
    }

    /// Reopens the segment that starts with record number `first`.
    pub(crate) fn resume(dir: &Path, first: u64) -> io::Result<Self> {
        Self::open(dir, first, &mut OpenOptions::new())
    }

    fn open(dir: &Path, first: u64, options: &mut OpenOptions) -> io::Result<Self> {
        let name = segment_name(first);
        let path = dir.join(&name);
        let file = options.append(true).mode(MODE).open(&path)?;
        let metadata = file.metadata()?;
        // Not every file system records a birth time; fall back to the modification time.
        let born = metadata.created().or_else(|_| metadata.modified())?;
        Ok(Self { file, path, name, size: metadata.len(), born })
    }

    /// Wraps any open file, for tests.
    #[cfg(test)]
    pub(crate) fn from_file(path: &Path, file: File) -> Self {
        let (path, name) = (path.to_owned(), segment_name(1));
        Self { file, path, name, size: 0, born: SystemTime::now() }
    }

    /// Appends whole lines, in one `write` unless the kernel accepts less.
    pub(crate) fn append(&mut self, bytes: &[u8]) -> Result<(), ShortWrite> {
        let mut written = 0;
        while let Some(rest) = bytes.get(written..).filter(|rest| !rest.is_empty()) {
            match self.file.write(rest) {
                Ok(0) => {
                    return Err(ShortWrite { written, error: io::ErrorKind::WriteZero.into() });
                }
                Ok(count) => written += count,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(ShortWrite { written, error }),
            }
        }
        self.size += bytes.len() as u64;
        Ok(())
    }

    pub(crate) fn sync(&self) -> io::Result<()> {
        self.file.sync_data()
    }

    /// Fails if the file has been unlinked: everything written to it is lost. This is one `fstat`, cheap
    /// enough to run before callers are released.
    pub(crate) fn check_linked(&self) -> io::Result<()> {
        match self.file.metadata()?.nlink() {
            0 => Err(io::Error::new(io::ErrorKind::NotFound, "the segment was removed")),
            _ => Ok(()),
        }
    }

    /// Fails if the file is no longer at its path, for example after the directory was renamed: readers
    /// would not find it.
    pub(crate) fn check_attached(&self) -> io::Result<()> {
        self.check_linked()?;
        let place = |metadata: fs::Metadata| (metadata.dev(), metadata.ino());
        let there = fs::symlink_metadata(&self.path).map(place).ok();
        if there == Some(place(self.file.metadata()?)) {
            return Ok(());
        }
        Err(io::Error::new(io::ErrorKind::NotFound, "the segment was moved away"))
    }

    pub(crate) fn age(&self) -> Duration {
        self.born.elapsed().unwrap_or_default() // if the clock was set back, count as new
    }
}

/// Moves a file that has bytes but no complete line aside, under a new name, to preserve its content.
///
/// # Errors
///
/// Returns `AlreadyExists` for a file with a complete line: that is a segment.
pub(crate) fn move_aside(path: &Path) -> io::Result<Option<MovedFile>> {
    let file = match open_reader(path) {
        Ok(file) => file,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(error),
    };
    let torn = match LineReader::new(file).next()? {
        None => return Ok(None),
        Some(RawLine::Torn(torn)) => torn,
        Some(RawLine::Line(_) | RawLine::Long) => return Err(io::ErrorKind::AlreadyExists.into()),
    };
    let names = (0..).map(|nth| match nth {
        0 => path.with_extension("jsonl.torn"),
        nth => path.with_extension(format!("jsonl.torn{nth}")),
    });
    let free = names.into_iter().find(|name| !name.exists()).unwrap_or_default();
    fs::rename(path, &free)?;
    let name = free.file_name().unwrap_or_default().to_string_lossy().into_owned();
    Ok(Some(MovedFile { name, bytes: torn.bytes, sha256: torn.sha256 }))
}

/// Returns the name of the segment that starts with record number `first`.
pub(crate) fn segment_name(first: u64) -> String {
    format!("{PREFIX}{first:020}{SUFFIX}")
}

/// Returns the path of a segment once it is compressed.
pub(crate) fn compressed_path(plain: &Path) -> PathBuf {
    let mut name = plain.as_os_str().to_owned();
    name.push(COMPRESSED);
    name.into()
}

pub(crate) fn is_compressed(path: &Path) -> bool {
    path.as_os_str().as_encoded_bytes().ends_with(COMPRESSED.as_bytes())
}

/// Opens a segment, compressed or not, and reads its lines as they were written.
pub(crate) fn open_reader(path: &Path) -> io::Result<Box<dyn Read + Send>> {
    let file = File::open(path)?;
    if !is_compressed(path) {
        return Ok(Box::new(file));
    }
    let mut decoder = zstd::Decoder::new(file)?;
    decoder.window_log_max(WINDOW_LOG_MAX)?;
    Ok(Box::new(decoder))
}

/// Returns the name under which a segment was written, before it was compressed.
pub(crate) fn plain_name(name: &str) -> &str {
    name.strip_suffix(COMPRESSED).unwrap_or(name)
}

/// Parses the number of the first record from a file name.
pub(crate) fn first_sequence(name: &str) -> Option<u64> {
    let digits = plain_name(name).strip_prefix(PREFIX)?.strip_suffix(SUFFIX)?;
    (digits.len() == 20).then(|| digits.parse().ok())?
}

/// Lists the segments of a directory in order, compressed or not, each with the number of its first record.
///
/// # Errors
///
/// Returns the error from reading the directory.
pub fn list_segments(dir: &Path) -> io::Result<Vec<(u64, PathBuf)>> {
    let mut found = Vec::new();
    for entry in fs::read_dir(dir)? {
        let entry = entry?;
        let regular = entry.file_type()?.is_file(); // we never create links or pipes
        if let Some(first) = entry.file_name().to_str().and_then(first_sequence).filter(|_| regular) {
            found.push((first, entry.path()));
        }
    }
    found.sort(); // the plain form of a segment first: while both exist, the compressed one may be unfinished
    found.dedup_by_key(|(first, _)| *first);
    Ok(found)
}
