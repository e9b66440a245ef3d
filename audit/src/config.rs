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
    /// Maximum number of decisions without an outcome, divided among the sandboxes. Outcomes are never refused, so
    /// this bounds the memory used while the disk is full.
    pub open_max: u64,
    /// How many attempts that sent nothing have a record of their own.
    pub denials: DenialRate,
    /// Maximum bytes of the log on disk, divided among the sandboxes; `None` for a part of the disk, see
    /// [`LogConfig::DISK_PART`].
    pub max_bytes: Option<u64>,
    /// A segment ends when it has this many bytes...
    pub segment_bytes: u64,
    /// ...or is this old.
    pub segment_age: Duration,
    pub retention: Retention,
    pub compression: Compression,
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

/// The rate of records, per sandbox, for attempts that sent nothing. Unknown channels together have one more.
/// The burst lets an ordinary mistake be seen attempt by attempt; a flood is folded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DenialRate {
    pub records_per_second: u32,
    pub records_burst: u32,
    pub bytes_per_second: u32,
    pub bytes_burst: u32,
}

impl Default for DenialRate {
    fn default() -> Self {
        DenialRate {
            records_per_second: 50,
            records_burst: 256,
            bytes_per_second: 64 << 10,
            bytes_burst: 512 << 10,
        }
    }
}

impl LogConfig {
    /// The part of the disk that a log without `max_bytes` may use, in percent of what is free and what it has.
    pub const DISK_PART: u64 = 80;

    /// Returns the defaults for a log in `dir`.
    pub fn new(dir: impl Into<PathBuf>) -> Self {
        Self {
            dir: dir.into(),
            durability: LogDurability::Process,
            patience: Duration::from_secs(5),
            queue_records: 8192,
            queue_bytes: 16 << 20,
            open_max: 65_536,
            denials: DenialRate::default(),
            max_bytes: None,
            segment_bytes: 64 << 20,
            segment_age: Duration::from_secs(24 * 60 * 60),
            retention: Retention::Everything,
            compression: Compression::None,
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

/// Which segments are kept. Only age removes evidence: by size, a flood could push out what it wants to hide.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Retention {
    Everything,
    /// Closed segments whose last record is not older than this.
    Age(Duration),
}

/// How closed segments are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Compression {
    None,
    /// The newest closed segment stays plain, so that a log shipper has the time of a segment to read it.
    Zstd,
}

/// Whether records contain query strings, which often carry secrets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum QueryStrings {
    Drop,
    Keep,
}
