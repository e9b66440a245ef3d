//! What the operator can choose about the log. Every default is the safe one.

use std::path::PathBuf;
use std::time::Duration;

/// Where and how the log is written, and every bound of it.
#[derive(Clone, Debug)]
pub struct LogConfig {
    /// The directory of the segments. It is locked: one writer a directory.
    pub dir: PathBuf,
    pub durability: LogDurability,
    /// How long a caller waits for room and for its receipt before it is refused.
    pub patience: Duration,
    /// Most records that wait to be written.
    pub queue_records: usize,
    /// Most bytes that wait to be written.
    pub queue_bytes: usize,
    /// Most decisions that may be without outcome at a time. Their outcomes are never refused, so
    /// this bounds what is kept in memory while the disk is full.
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
    /// The key that signs checkpoints; made when it is not there. Without a path it stands in `dir`.
    pub key: Option<PathBuf>,
    /// The name in the key and on the first line of every checkpoint: no space, no plus.
    pub name: String,
    pub query_strings: QueryStrings,
}

impl LogConfig {
    /// The defaults, for a log in `dir`.
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

/// What a record has survived when its caller is released.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LogDurability {
    /// A power loss: `fdatasync` has returned.
    Disk,
    /// The death of this process: `write` has returned.
    Process,
}

/// Which segments are kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Retention {
    Everything,
    /// The newest this many, the one being written included; at least one is always kept.
    Segments(usize),
}

/// Whether query strings, which often carry secrets, are in the records.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum QueryStrings {
    Drop,
    Keep,
}
