//! Recovery: opening a log that a crash, a full disk or an attacker may have left in any state.
//!
//! | state found | action |
//! | --- | --- |
//! | the last line is incomplete | keep it; the next segment records its length and hash |
//! | the newest file has no complete line | delete it if empty, otherwise move it aside and record that |
//! | decisions without an outcome | close them as `unknown`: their process died with them |
//! | fewer records than the newest checkpoint covers | record `log_behind_checkpoint` as an alert, and start |
//! | a complete line that does not verify | refuse to start, see [`OpenError::Tail`] |
//!
//! The first three are what `kill -9` or a power loss leaves behind, so they must not prevent a start.
//! Existing bytes are never truncated or overwritten: a torn line is evidence, and a segment may be
//! append-only (`chattr +a`). A complete line that does not verify is not what a killed process
//! leaves: it was changed, or the disk lost data. Continuing the chain after it would vouch for it.
//!
//! Only the newest segment is read: each segment starts with the decisions that were open when the
//! previous one ended.

use std::collections::HashMap;
use std::fs::{self, DirBuilder};
use std::io;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

use serde::Deserialize;
use ulid::Ulid;

use crate::archive::SegmentArchive;
use crate::chain::{ChainHead, ChainLink, LineIntegrity};
use crate::checkpoint::{self, CheckpointError, CheckpointSigner};
use crate::config::LogConfig;
use crate::draft::OpenDecision;
use crate::health::Counters;
use crate::id::IdGenerator;
use crate::line_reader::{LineReader, RawLine};
use crate::log::LogDown;
use crate::quota::LogQuota;
use crate::record::{MovedFile, TornLine};
use crate::segment::{self, LogSegment};
use crate::text::Text;
use crate::usage::SegmentUsage;
use crate::writer::{self, LastCheckpoint, LogWriter, NoteStored};

/// Why a log could not be opened. Sandbar does not serve without one.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    #[error("cannot sign checkpoints of the access log")]
    Checkpoint(#[from] CheckpointError),
    #[error("cannot write the access log in {dir}")]
    Dir { dir: PathBuf, source: io::Error },
    #[error("cannot start the access log")]
    Down(#[from] LogDown),
    #[error("{file}:{line}: {what}; move the log directory aside, keep it, and start with an empty one")]
    Tail { file: PathBuf, line: u64, what: &'static str },
    #[error("cannot start the access log thread")]
    Thread(#[source] io::Error),
}

/// The end of a segment.
struct SegmentTail {
    head: ChainHead,
    torn: Option<TornLine>,
    owed: HashMap<u128, OpenDecision>,
    usage: SegmentUsage,
}

impl SegmentTail {
    fn new() -> Self {
        Self { head: ChainHead::START, torn: None, owed: HashMap::new(), usage: SegmentUsage::default() }
    }
}

/// Opens the log in `config.dir` and records the start.
pub(crate) fn open(config: Arc<LogConfig>) -> Result<LogWriter, OpenError> {
    let fail = |source| OpenError::Dir { dir: config.dir.clone(), source };
    DirBuilder::new().recursive(true).mode(0o750).create(&config.dir).map_err(fail)?;
    let lock = writer::lock_dir(&config.dir).map_err(fail)?;
    let signer = CheckpointSigner::open(&config.key_path(), &config.name, &config.dir)?;
    let mut aside = Vec::new();
    let newest = newest_segment(&config.dir, &mut aside).map_err(fail)?;
    let tail = newest.as_ref().map(|(first, path)| read_tail(*first, path)).transpose()?;
    let tail = tail.unwrap_or_else(SegmentTail::new);
    let mut closed = segment::list_segments(&config.dir).map_err(fail)?;
    closed.retain(|(first, _)| newest.as_ref().is_none_or(|(newest, _)| first < newest));
    let archive = SegmentArchive::open(&config.dir, &closed).map_err(fail)?;
    let quota = open_quota(&config, &archive, &tail.usage).map_err(fail)?;
    let behind = missing_tail_message(&config.dir, tail.head);
    let mut writer = LogWriter {
        counters: Arc::new(Counters::default()),
        ids: Arc::new(IdGenerator::new()),
        signer,
        lock: Some(lock),
        head: tail.head,
        segment: None,
        last: newest.as_ref().map(|(first, _)| segment::segment_name(*first)),
        torn: tail.torn,
        owed: tail.owed,
        usage: tail.usage,
        archive,
        quota: Arc::new(quota),
        folded_at: Instant::now(),
        retention_at: Instant::now(),
        trouble: None,
        last_checkpoint: LastCheckpoint {
            sequence: tail.head.sequence,
            at: Instant::now(),
            stored: NoteStored::Yes,
        },
        buffer: Vec::new(),
        marks: Vec::new(),
        config,
    };
    // A compressed segment is not continued.
    let open = newest.filter(|(_, path)| !segment::is_compressed(path)).map(|(first, _)| first);
    resume(&mut writer, open)?;
    writer.record_event("log_started", None)?;
    for aside in aside {
        writer.record_moved_file(aside)?;
    }
    if let Some(message) = behind {
        writer.record_event("log_behind_checkpoint", Some(&message))?;
    }
    writer.close_unknown()?;
    Ok(writer)
}

/// Counts what the log has on disk, and finds out how much it may have.
fn open_quota(config: &LogConfig, archive: &SegmentArchive, newest: &SegmentUsage) -> io::Result<LogQuota> {
    let usages = || archive.usages().chain([newest]);
    let max_bytes = match config.max_bytes {
        Some(most) => most,
        None => {
            let have: u64 = usages().map(SegmentUsage::total).sum();
            let disk = sys::file::free_bytes(&config.dir)?.saturating_add(have);
            disk / 100 * LogConfig::DISK_PART
        }
    };
    let quota = LogQuota::new(config.open_max, max_bytes);
    usages().for_each(|usage| quota.load(usage));
    Ok(quota)
}

/// Returns a message if the newest checkpoint covers more records than the log has: the tail was cut
/// off, or a power loss came before it was on disk. `verify` would report it too; the record raises
/// the alert at once.
fn missing_tail_message(dir: &Path, head: ChainHead) -> Option<Text<512>> {
    let noted = checkpoint::newest_head(dir)?;
    let (size, have) = (noted.sequence, head.sequence);
    (size > have).then(|| format!("a checkpoint covers {size} records, but the log has {have}").into())
}

/// Continues the newest segment, or starts a new one if that is full, too old or torn.
fn resume(writer: &mut LogWriter, newest: Option<u64>) -> Result<(), OpenError> {
    let config = Arc::clone(&writer.config);
    if let Some(first) = newest.filter(|_| writer.torn.is_none()) {
        let fail = |source| OpenError::Dir { dir: config.dir.clone(), source };
        let segment = LogSegment::resume(&config.dir, first).map_err(fail)?;
        if segment.size < config.segment_bytes && segment.age() < config.segment_age {
            writer.segment = Some(segment);
            return Ok(());
        }
    }
    Ok(writer.open_segment()?)
}

/// Finds the newest segment that holds a record. A file without one dates from a crash during its
/// creation. The log needs its name, so it is deleted if empty and moved aside otherwise.
fn newest_segment(dir: &Path, aside: &mut Vec<MovedFile>) -> io::Result<Option<(u64, PathBuf)>> {
    let mut found = segment::list_segments(dir)?;
    while let Some((first, path)) = found.pop() {
        match segment::move_aside(&path) {
            Ok(Some(moved)) => aside.push(moved),
            Ok(None) => fs::remove_file(path)?,
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
                return Ok(Some((first, path)));
            }
            Err(error) => return Err(error),
        }
    }
    Ok(None)
}

/// Verifies a segment and collects the decisions without an outcome.
fn read_tail(first: u64, path: &Path) -> Result<SegmentTail, OpenError> {
    let fail = |source| OpenError::Dir { dir: path.to_owned(), source };
    let broken = |line, what| OpenError::Tail { file: path.to_owned(), line, what };
    let mut lines = LineReader::new(segment::open_reader(path).map_err(fail)?);
    let mut tail = SegmentTail::new();
    let mut number = 0;
    while let Some(piece) = lines.next().map_err(fail)? {
        number += 1;
        match piece {
            RawLine::Line(line) => {
                let last = (number > 1).then_some(tail.head);
                tail.head = check_link(last, line).map_err(|what| broken(number, what))?;
                if number == 1 && tail.head.sequence != first {
                    return Err(broken(number, "the file is named after another record"));
                }
                track_open_decisions(line, &mut tail.owed);
                tail.usage.add_line(line);
            }
            RawLine::Long => return Err(broken(number, "the line is longer than any record")),
            RawLine::Torn(torn) => tail.torn = Some(torn),
        }
    }
    Ok(tail)
}

fn check_link(last: Option<ChainHead>, line: &[u8]) -> Result<ChainHead, &'static str> {
    let link = ChainLink::parse(line).ok_or("the line is not a record")?;
    match (link.content, last) {
        (LineIntegrity::Changed, _) => Err("the record was changed"),
        (LineIntegrity::Intact, Some(last)) if link.previous != last.hash => {
            Err("the record does not follow the one before it")
        }
        (LineIntegrity::Intact, Some(last)) if link.head.sequence != last.sequence + 1 => {
            Err("the record is out of sequence")
        }
        (LineIntegrity::Intact, _) => Ok(link.head),
    }
}

/// The members of a record that tell whether an attempt is open.
#[derive(Deserialize)]
struct PartialRecord {
    class_uid: u16,
    #[serde(default)]
    src_endpoint: PartialEndpoint,
    #[serde(default)]
    dst_endpoint: PartialEndpoint,
    #[serde(default)]
    query: PartialEndpoint,
    metadata: PartialMetadata,
    unmapped: PartialUnmapped,
}

#[derive(Default, Deserialize)]
struct PartialEndpoint {
    #[serde(default)]
    uid: String,
    #[serde(default)]
    hostname: String,
}

#[derive(Deserialize)]
struct PartialMetadata {
    correlation_uid: String,
    #[serde(default)]
    tenant_uid: String,
}

#[derive(Deserialize)]
struct PartialUnmapped {
    sandbar: PartialExtension,
}

#[derive(Deserialize)]
struct PartialExtension {
    stage: String,
    #[serde(default)]
    open: Vec<PartialAttempt>,
}

#[derive(Deserialize)]
struct PartialAttempt {
    uid: String,
    class_uid: u16,
    #[serde(default)]
    sandbox: String,
    #[serde(default)]
    tenant: String,
    #[serde(default)]
    host: String,
}

fn track_open_decisions(line: &[u8], owed: &mut HashMap<u128, OpenDecision>) {
    let Ok(record) = serde_json::from_slice::<PartialRecord>(line) else { return };
    let attempt = |uid: &str| Ulid::from_string(uid).ok().map(u128::from);
    match record.unmapped.sandbar.stage.as_str() {
        "decision" => {
            let Some(attempt) = attempt(&record.metadata.correlation_uid) else { return };
            let names = [record.dst_endpoint.hostname, record.query.hostname];
            let host = names.into_iter().find(|name| !name.is_empty()).unwrap_or_default();
            let open = PartialAttempt {
                uid: String::new(),
                class_uid: record.class_uid,
                sandbox: record.src_endpoint.uid,
                tenant: record.metadata.tenant_uid,
                host,
            };
            owed.insert(attempt, open_decision(attempt, open));
        }
        "outcome" => {
            attempt(&record.metadata.correlation_uid).map(|attempt| owed.remove(&attempt));
        }
        _ => {
            for open in record.unmapped.sandbar.open {
                if let Some(attempt) = attempt(&open.uid) {
                    owed.insert(attempt, open_decision(attempt, open));
                }
            }
        }
    }
}

fn open_decision(attempt: u128, open: PartialAttempt) -> OpenDecision {
    OpenDecision {
        attempt,
        class_uid: open.class_uid,
        sandbox: open.sandbox.into(),
        tenant: open.tenant.into(),
        host: open.host.into(),
        outcome_bytes: 0,
    }
}
