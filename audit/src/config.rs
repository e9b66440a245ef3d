//! The settings of the log. Every default is the safe one.

use std::path::PathBuf;
use std::time::Duration;

/// Where and how the log is written, and every bound.
#[derive(Clone, Debug)]
pub struct LogConfig {
    /// The directory of the segments. It is locked: one writer per directory.
    pub dir: PathBuf,
    pub durability: LogDurability,
    /// How long a caller waits for room in the queue and for its receipt before it is refused.
    pub patience: Duration,
    /// Maximum number of queued records.
    pub queue_records: usize,
    /// Maximum bytes of queued records.
    pub queue_bytes: usize,
    /// Maximum number of decisions without an outcome. Outcomes are never refused, so this bounds
    /// the memory used while the disk is full.
    pub open_max: usize,
    /// A segment ends when it has this many bytes...
    pub segment_bytes: u64,
    /// ...or is this old.
    pub segment_age: Duration,
    pub retention: Retention,
    /// A checkpoint is signed after this many records...
    pub checkpoint_records: u64,
    /// ...or after this long, if there was a record.
    pub checkpoint_age: Duration,
    /// The key that signs checkpoints, generated if missing. The default is a file in `dir`.
    pub key: Option<PathBuf>,
    /// The name in the key and on the first line of every checkpoint, without spaces or plus signs.
    pub name: String,
    pub query_strings: QueryStrings,
}

impl LogConfig {
    /// Returns the defaults for a log in `dir`.
    pub fn new(dir: impl Into<PathBuf>) -> Self {
        Self {
            dir: dir.into(),
            durability: LogDurability::Process,
            patience: Duration::from_secs(5),
            queue_records: 8192,
            queue_bytes: 16 << 20,
            open_max: 65_536,
            segment_bytes: 64 << 20,
            segment_age: Duration::from_secs(24 * 60 * 60),
            retention: Retention::Everything,
            checkpoint_records: 10_000,
            checkpoint_age: Duration::from_secs(60),
            key: None,
            name: "sandbar.example/access".to_owned(),
            query_strings: QueryStrings::Drop,
        }
    }

    pub(crate) fn key_path(&self) -> PathBuf {
        self.key.clone().unwrap_or_else(|| self.dir.join("checkpoint.key"))
    }
}

/// What a record has survived by the time its caller is released.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LogDurability {
    /// A power loss: `fdatasync` has returned.
    Disk,
    /// The death of this process (`kill -9`): `write` has returned.
    Process,
}

/// Which segments are kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Retention {
    Everything,
    /// The newest segments, including the one being written; at least one.
    Segments(usize),
}

/// Whether records contain query strings, which often carry secrets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum QueryStrings {
    Drop,
    Keep,
}
