//! The writer: gives records their place in the chain and appends them, whole lines only.
//!
//! A mutex guards it, so one thread writes at a time: the leader or the keeper (see `queue`). It
//! reports a record as written only after `write` (and `fdatasync`, with durability `disk`) has
//! returned and the file still has a name. After any failure it abandons the segment without
//! repairing it, even if its last line is torn. While it has no segment it refuses every batch, and
//! the keeper retries; the first record of the next segment names the old one and its torn line.

use std::collections::HashMap;
use std::fs::{self, File};
use std::io;
use std::mem;
use std::os::unix::fs::MetadataExt;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use rules::ids::SandboxId;
use tokio::sync::oneshot;

use crate::archive::SegmentArchive;
use crate::chain::{ChainHash, ChainHead};
use crate::checkpoint::{self, CheckpointSigner};
use crate::compose;
use crate::config::{Compression, LogConfig, LogDurability, Retention};
use crate::draft::{Draft, DraftRole, OpenDecision};
use crate::health::Counters;
use crate::id::IdGenerator;
use crate::log::LogDown;
use crate::meter::Fold;
use crate::quota::LogQuota;
use crate::record::{
    LIST_MAX, MovedFile, OpenAttempt, RemovedSegments, SandbarExtension, SegmentStart, TornLine,
};
use crate::segment::{self, LogSegment};
use crate::text::Text;
use crate::usage::SegmentUsage;

/// Time between two records of attempts that are only counted.
const FOLDED_INTERVAL: Duration = Duration::from_secs(1);
/// How often the keeper looks for expired segments, apart from each rotation.
const RETENTION_INTERVAL: Duration = Duration::from_secs(60);

/// A record in the queue, and the channel to the caller that waits for it.
#[derive(Debug)]
pub(crate) struct QueuedRecord {
    pub(crate) draft: Draft,
    pub(crate) waiter: Option<oneshot::Sender<Result<u64, LogDown>>>,
}

/// The end of the log and everything needed to append to it.
pub(crate) struct LogWriter {
    pub(crate) config: Arc<LogConfig>,
    pub(crate) counters: Arc<Counters>,
    pub(crate) ids: Arc<IdGenerator>,
    pub(crate) signer: CheckpointSigner,
    /// Locks the directory against other writers.
    pub(crate) lock: Option<File>,
    pub(crate) head: ChainHead,
    pub(crate) segment: Option<LogSegment>,
    /// Name of the newest segment, and the unfinished line at its end.
    pub(crate) last: Option<String>,
    pub(crate) torn: Option<TornLine>,
    /// Decisions without outcome.
    pub(crate) owed: HashMap<u128, OpenDecision>,
    /// Bytes of each sandbox in the newest segment.
    pub(crate) usage: SegmentUsage,
    pub(crate) archive: SegmentArchive,
    pub(crate) quota: Arc<LogQuota>,
    /// When to record counts of attempts again.
    pub(crate) folded_at: Instant,
    /// When to look for expired segments again.
    pub(crate) retention_at: Instant,
    /// Why there is no segment.
    pub(crate) trouble: Option<LogDown>,
    pub(crate) last_checkpoint: LastCheckpoint,
    pub(crate) buffer: Vec<u8>,
    pub(crate) marks: Vec<SealedLine>,
}

/// What the last checkpoint covers, and when it was signed.
pub(crate) struct LastCheckpoint {
    pub(crate) sequence: u64,
    pub(crate) at: Instant,
    pub(crate) stored: NoteStored,
}

/// Whether the last note was stored. If not, the next attempt is made after `checkpoint_age`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum NoteStored {
    No,
    Yes,
}

/// The end of a line in the buffer, and the chain head once that line is written.
pub(crate) struct SealedLine {
    end: usize,
    head: ChainHead,
}

impl LogWriter {
    /// Writes a batch and releases its callers. Returns the outcomes to retry later: unlike other
    /// records they are never refused, because their traffic has already happened.
    pub(crate) fn write(&mut self, batch: Vec<QueuedRecord>) -> Vec<QueuedRecord> {
        let batch = self.drop_orphans(batch);
        if let Some(down) = self.trouble.clone() {
            return self.refuse_batch(batch, &down);
        }
        let result = self.append(batch.iter().map(|entry| &entry.draft));
        let Err(failed) = result else {
            self.release_callers(batch, None);
            return Vec::new();
        };
        let mut batch = batch;
        let rest = batch.split_off(failed.written);
        self.release_callers(batch, failed.unsynced.as_ref());
        self.refuse_batch(rest, &failed.down)
    }

    /// Opens a new segment after a failure. The keeper calls it periodically while there is none.
    pub(crate) fn recover(&mut self) {
        let Some(down) = self.trouble.clone() else { return };
        let message = Text::from(format!("writing again after: {down}"));
        let start = self.draft_event("log_recovered", Some(&message), SandbarExtension::default());
        if self.relock().and_then(|()| self.open_segment()).is_ok()
            && start.is_some_and(|draft| self.append([&draft]).is_ok())
        {
            self.trouble = None;
        }
    }

    /// Ends the segment and starts the next.
    pub(crate) fn rotate(&mut self) -> Result<(), LogDown> {
        if self.trouble.is_none() {
            self.write_checkpoint();
        }
        if let Some(down) = &self.trouble {
            return Err(down.clone());
        }
        self.segment = None;
        self.open_segment()
    }

    /// Does periodic work: recovery, rotation, checkpoints, retention, compression.
    pub(crate) fn run_periodic(&mut self) {
        if self.trouble.is_some() {
            self.recover();
        }
        if self.trouble.is_some() {
            return;
        }
        if let Some(Err(error)) = self.segment.as_ref().map(LogSegment::check_attached) {
            self.set_trouble(LogDown::unwritable(error));
        } else if self.rotation_due() {
            self.rotate().unwrap_or_default(); // a failure shows in `trouble`
        } else if self.checkpoint_due() {
            self.write_checkpoint();
        }
        if Instant::now() >= self.folded_at {
            self.folded_at = Instant::now() + FOLDED_INTERVAL;
            self.record_folded();
        }
        self.apply_retention();
        if self.config.compression == Compression::Zstd
            && let Some(freed) = self.archive.compress()
        {
            self.quota.release(&freed);
        }
    }

    /// Signs the chain head, stores the note beside the log and records it in the log.
    pub(crate) fn write_checkpoint(&mut self) {
        if self.head.sequence == self.last_checkpoint.sequence {
            return;
        }
        let Some(note) = self.sign_checkpoint() else { return };
        let extension = SandbarExtension { checkpoint: Some(&note), ..SandbarExtension::default() };
        if let Some(draft) = self.draft_event("checkpoint", None, extension) {
            self.append([&draft]).unwrap_or_default(); // a failure sets `trouble`
        }
        if self.last_checkpoint.stored == NoteStored::Yes {
            // The record of the note alone does not make another checkpoint due.
            self.last_checkpoint.sequence = self.head.sequence;
        }
    }

    /// Signs the chain head and stores the note beside the log.
    ///
    /// It syncs the segment first: after a power loss, a note that covers records which never reached
    /// the disk would make an honest log fail verification forever.
    fn sign_checkpoint(&mut self) -> Option<String> {
        if let Some(Err(error)) = self.segment.as_ref().map(LogSegment::sync) {
            Counters::add(&self.counters.checkpoint_failures, 1);
            self.set_trouble(LogDown::Unsynced(Arc::new(error)));
            return None;
        }
        let note = self.signer.sign(self.head);
        let dir = &self.config.dir;
        let stored = note.as_ref().is_some_and(|note| checkpoint::append_note(dir, note).is_ok());
        let counters = &self.counters;
        let counter = if stored { &counters.checkpoints } else { &counters.checkpoint_failures };
        Counters::add(counter, 1);
        self.last_checkpoint.at = Instant::now();
        self.last_checkpoint.stored = if stored { NoteStored::Yes } else { NoteStored::No };
        note
    }

    /// Writes the final record and the final checkpoint.
    pub(crate) fn stop(&mut self) {
        self.record_folded();
        self.write_checkpoint();
        if let Some(draft) = self.draft_event("log_stopped", None, SandbarExtension::default()) {
            self.append([&draft]).unwrap_or_default();
        }
        // This note covers the final record, so that cutting off any record is detected.
        self.sign_checkpoint();
        self.archive.wait();
        self.set_trouble(LogDown::Closed);
        self.lock = None;
    }

    /// Whether a checkpoint is due, by the number of new records or by age.
    pub(crate) fn checkpoint_due(&self) -> bool {
        let new = self.head.sequence.saturating_sub(self.last_checkpoint.sequence);
        let stored = self.last_checkpoint.stored == NoteStored::Yes;
        (new >= self.config.checkpoint_records && stored)
            || (new > 0 && self.last_checkpoint.at.elapsed() >= self.config.checkpoint_age)
    }

    /// Closes every decision of an earlier process as `unknown`.
    pub(crate) fn close_unknown(&mut self) -> Result<(), LogDown> {
        let mut left: Vec<OpenDecision> = self.owed.values().cloned().collect();
        left.sort_by_key(|owed| owed.attempt);
        for some in left.chunks(1024) {
            let drafts: Result<Vec<Draft>, _> = some.iter().map(compose::draft_unknown_outcome).collect();
            let drafts = drafts.map_err(|error| LogDown::Encode(error.to_string()))?;
            self.append(&drafts).map_err(|failed| failed.down)?;
        }
        Ok(())
    }

    /// Creates the next segment. Its first record names the previous segment, and the next records
    /// carry over the open decisions, so that a restart has to read only the newest segment.
    pub(crate) fn open_segment(&mut self) -> Result<(), LogDown> {
        let before = self.head;
        let segment = LogSegment::create(&self.config.dir, before.sequence + 1);
        let segment = segment.map_err(|error| self.set_trouble(LogDown::unwritable(error)))?;
        let (name, path) = (segment.name.clone(), segment.path.clone());
        let start = SegmentStart { name: name.clone(), after: self.last.clone(), torn: self.torn.clone() };
        let (drafts, torn) = (self.opening_drafts(start), self.torn.clone());
        self.segment = Some(segment);
        let ended = mem::take(&mut self.usage);
        if let Err(failed) = self.append(&drafts) {
            self.quota.release(&mem::replace(&mut self.usage, ended));
            // No caller was released for any record in it, and the next attempt needs the same name.
            fs::remove_file(path).unwrap_or_default();
            self.counters.written.fetch_sub(failed.written as u64, Ordering::Relaxed);
            (self.head, self.torn) = (before, torn);
            return Err(failed.down);
        }
        if let Some(first) = self.last.as_deref().and_then(segment::first_sequence) {
            self.archive.add(first, ended);
        }
        (self.last, self.torn) = (Some(name), None);
        self.retention_at = Instant::now();
        Ok(())
    }

    fn opening_drafts(&self, start: SegmentStart) -> Vec<Draft> {
        let began = SandbarExtension { segment: Some(start), ..SandbarExtension::default() };
        let mut owed: Vec<&OpenDecision> = self.owed.values().collect();
        owed.sort_by_key(|owed| owed.attempt);
        let carried = owed.chunks(LIST_MAX).filter_map(|some| {
            let open = some.iter().map(|owed| open_attempt(owed)).collect();
            self.draft_event("attempts_open", None, SandbarExtension { open, ..SandbarExtension::default() })
        });
        self.draft_event("segment_started", None, began).into_iter().chain(carried).collect()
    }

    /// Removes the segments that are too old, if there is a limit, and records that in the chain.
    fn apply_retention(&mut self) {
        let Retention::Age(age) = self.config.retention else { return };
        if Instant::now() < self.retention_at || self.trouble.is_some() {
            return;
        }
        self.retention_at = Instant::now() + RETENTION_INTERVAL;
        let expired = self.archive.count_expired(age);
        if expired == 0 {
            return;
        }
        let newest =
            || self.segment.as_ref().map(|open| (segment::first_sequence(&open.name), open.path.clone()));
        let kept = self.archive.first_after(expired).map(|(first, path)| (Some(first), path)).or_else(newest);
        let Some((Some(first_kept), path)) = kept else { return };
        let Some(hash) = first_previous(&path) else { return };
        let removed = RemovedSegments { through: first_kept - 1, hash: hash.as_str().to_owned() };
        let extension = SandbarExtension { removed: Some(removed), ..SandbarExtension::default() };
        let Some(draft) = self.draft_event("segments_removed", None, extension) else { return };
        if self.append([&draft]).is_err() {
            return;
        }
        self.write_checkpoint(); // `verify` accepts a removal only if a signed note covers it
        if self.last_checkpoint.stored == NoteStored::Yes && self.trouble.is_none() {
            for usage in self.archive.remove_oldest(expired) {
                self.quota.release(&usage);
            }
        }
    }

    /// Writes summaries of folded attempts. What cannot be written is counted.
    pub(crate) fn write_summaries(&mut self, folds: Vec<(Option<SandboxId>, Fold)>) {
        let mut drafts = Vec::new();
        let mut counts = Vec::new();
        for (sandbox, fold) in folds {
            let count = fold.count;
            let Ok(draft) = fold.draft(self.config.query_strings) else { continue };
            let draft = draft.charged_to(sandbox);
            // Without room in its sandbox's part it comes out of the reserve.
            let draft = if self.quota.admit(&draft).is_ok() { draft } else { draft.charged_to(None) };
            drafts.push(draft);
            counts.push(count);
        }
        if drafts.is_empty() {
            return;
        }
        let written = match self.append(&drafts) {
            Ok(()) => drafts.len(),
            Err(failed) => failed.written,
        };
        let (written_counts, lost) = counts.split_at(written);
        Counters::add(&self.counters.folded_total, written_counts.iter().map(|count| count - 1).sum());
        self.counters.count_folded(lost.iter().sum());
        drafts.iter().skip(written).for_each(|draft| self.quota.withdraw(draft));
    }

    /// Whether the segment is full or old enough to start the next.
    fn rotation_due(&self) -> bool {
        let LogConfig { segment_bytes, segment_age, .. } = *self.config;
        self.segment.as_ref().is_some_and(|open| open.size >= segment_bytes || open.age() >= segment_age)
    }

    /// Whether the keeper should do its work now, not at the next tick.
    pub(crate) fn maintenance_due(&self) -> bool {
        self.trouble.is_none() && (self.rotation_due() || self.checkpoint_due())
    }

    /// Records the number of attempts that could not be recorded one by one.
    fn record_folded(&mut self) {
        let folded = self.counters.folded.swap(0, Ordering::Relaxed);
        if folded == 0 {
            return;
        }
        let extension = SandbarExtension { folded: Some(folded), ..SandbarExtension::default() };
        let draft = self.draft_event("attempts_folded", None, extension);
        if draft.is_some_and(|draft| self.append([&draft]).is_err()) {
            self.counters.folded.fetch_add(folded, Ordering::Relaxed);
        }
    }

    /// Drops outcomes whose decision was refused: they would report traffic that never happened.
    fn drop_orphans(&self, batch: Vec<QueuedRecord>) -> Vec<QueuedRecord> {
        let orphan = |entry: &QueuedRecord| match entry.draft.role {
            DraftRole::Decision(_) | DraftRole::Event => false,
            DraftRole::Outcome(attempt) => {
                !self.owed.contains_key(&attempt) && !batch.iter().any(|e| is_decision_of(e, attempt))
            }
        };
        if !batch.iter().any(orphan) {
            return batch;
        }
        let keep: Vec<bool> = batch.iter().map(|entry| !orphan(entry)).collect();
        batch.into_iter().zip(keep).filter_map(|(entry, keep)| keep.then_some(entry)).collect()
    }

    /// Seals and appends drafts. A failure says how many of them are complete in the file.
    fn append<'a>(&mut self, drafts: impl IntoIterator<Item = &'a Draft>) -> Result<(), WriteFailure> {
        let before = self.head;
        self.buffer.clear();
        self.marks.clear();
        let mut sealed = Vec::new();
        for draft in drafts {
            self.head.seal(draft, &mut self.buffer);
            self.marks.push(SealedLine { end: self.buffer.len(), head: self.head });
            sealed.push(draft);
        }
        let result = self.write_buffer(before);
        let written = match &result {
            Ok(()) => sealed.len(),
            Err(failed) => failed.written,
        };
        for draft in sealed.into_iter().take(written) {
            let reserved = self.track_open_decision(&draft.role);
            let charged = self.quota.settle(draft, reserved);
            self.usage.add(draft.sandbox.as_ref(), charged);
        }
        Counters::add(&self.counters.written, written as u64);
        Counters::add(&self.counters.batches, 1);
        self.counters.owed.store(self.owed.len() as u64, Ordering::Relaxed);
        result
    }

    /// Appends the buffer to the segment.
    fn write_buffer(&mut self, before: ChainHead) -> Result<(), WriteFailure> {
        let Some(segment) = &mut self.segment else {
            self.head = before;
            let down = self.trouble.clone().unwrap_or(LogDown::Closed);
            return Err(WriteFailure { written: 0, unsynced: None, down });
        };
        let appended = segment.append(&self.buffer);
        if let Err(error) = segment.check_linked() {
            self.head = before; // the whole file was deleted, and these lines with it
            let down = self.set_trouble(LogDown::unwritable(error));
            return Err(WriteFailure { written: 0, unsynced: None, down });
        }
        // After a short write, sync too: the callers of the complete lines are still released.
        let synced = match self.config.durability {
            LogDurability::Disk => segment.sync(),
            LogDurability::Process => Ok(()),
        };
        let unsynced = synced.err().map(|error| LogDown::Unsynced(Arc::new(error)));
        match (appended, unsynced) {
            (Err(short), unsynced) => {
                let failed = self.handle_short_write(before, short.written, short.error);
                Err(WriteFailure { unsynced, ..failed })
            }
            (Ok(()), Some(unsynced)) => {
                let (written, down) = (self.marks.len(), self.set_trouble(unsynced.clone()));
                Err(WriteFailure { written, unsynced: Some(unsynced), down })
            }
            (Ok(()), None) => {
                Counters::add(&self.counters.bytes, self.buffer.len() as u64);
                Ok(())
            }
        }
    }

    /// Handles a short write: the chain continues after the last complete line, and the incomplete
    /// line, if any, is remembered for the next segment.
    fn handle_short_write(&mut self, before: ChainHead, bytes: usize, error: io::Error) -> WriteFailure {
        let written = self.marks.partition_point(|mark| mark.end <= bytes);
        let last = written.checked_sub(1).and_then(|at| self.marks.get(at));
        let (whole, head) = last.map_or((0, before), |mark| (mark.end, mark.head));
        self.head = head;
        let fragment = self.buffer.get(whole..bytes).unwrap_or_default();
        self.torn = describe_torn_line(fragment);
        WriteFailure { written, unsynced: None, down: self.set_trouble(LogDown::unwritable(error)) }
    }

    fn set_trouble(&mut self, down: LogDown) -> LogDown {
        self.segment = None;
        self.trouble = Some(down.clone());
        down
    }

    /// Locks the directory again if it was replaced by another one of the same name.
    fn relock(&mut self) -> Result<(), LogDown> {
        let place = |metadata: fs::Metadata| (metadata.dev(), metadata.ino());
        let now = fs::metadata(&self.config.dir).map(place).map_err(LogDown::unwritable)?;
        let held = self.lock.as_ref().and_then(|lock| lock.metadata().ok()).map(place);
        if held != Some(now) {
            self.lock = Some(lock_dir(&self.config.dir).map_err(LogDown::unwritable)?);
        }
        Ok(())
    }

    /// Remembers or forgets a decision. Returns the bytes that were reserved for an outcome.
    fn track_open_decision(&mut self, role: &DraftRole) -> u64 {
        match role {
            DraftRole::Decision(owed) => {
                self.owed.insert(owed.attempt, owed.clone());
                0
            }
            DraftRole::Event => 0,
            DraftRole::Outcome(attempt) => self.owed.remove(attempt).map_or(0, |owed| owed.outcome_bytes),
        }
    }

    fn release_callers(&self, batch: Vec<QueuedRecord>, unsynced: Option<&LogDown>) {
        let last = self.head.sequence;
        let first = (last + 1).saturating_sub(batch.len() as u64);
        for (sequence, entry) in (first..).zip(batch) {
            let Some(waiter) = entry.waiter else { continue };
            let result = unsynced.map_or(Ok(sequence), |down| Err(down.clone()));
            // If the caller was cancelled, its record is in the log all the same.
            waiter.send(result).unwrap_or_default();
        }
    }

    fn refuse_batch(&self, batch: Vec<QueuedRecord>, down: &LogDown) -> Vec<QueuedRecord> {
        let mut keep = Vec::new();
        for entry in batch {
            self.quota.withdraw(&entry.draft); // nothing was reserved for an outcome
            match (&entry.draft.role, entry.waiter) {
                (DraftRole::Outcome(_), waiter) => keep.push(QueuedRecord { draft: entry.draft, waiter }),
                (DraftRole::Decision(_) | DraftRole::Event, Some(waiter)) => {
                    if waiter.send(Err(down.clone())).is_err() {
                        self.counters.count_folded(1); // the caller was cancelled and will not record it
                    }
                }
                (DraftRole::Decision(_) | DraftRole::Event, None) => self.counters.count_folded(1),
            }
        }
        keep
    }

    /// Drafts a record of the log itself. Encoding one cannot fail; if it did, only the record is lost.
    pub(crate) fn draft_event(
        &self,
        event: &'static str,
        message: Option<&Text<512>>,
        sandbar: SandbarExtension<'_>,
    ) -> Option<Draft> {
        compose::draft_log_event(event, self.ids.next(), message, sandbar).ok()
    }

    /// Records that a file was moved aside.
    pub(crate) fn record_moved_file(&mut self, aside: MovedFile) -> Result<(), LogDown> {
        let extension = SandbarExtension { aside: Some(aside), ..SandbarExtension::default() };
        match self.draft_event("segment_set_aside", None, extension) {
            Some(draft) => self.append([&draft]).map_err(|failed| failed.down),
            None => Ok(()),
        }
    }

    /// Appends one record of the log itself.
    pub(crate) fn record_event(
        &mut self,
        event: &'static str,
        message: Option<&Text<512>>,
    ) -> Result<(), LogDown> {
        match self.draft_event(event, message, SandbarExtension::default()) {
            Some(draft) => self.append([&draft]).map_err(|failed| failed.down),
            None => Ok(()),
        }
    }
}

/// A failed write, with the number of records that are complete in the file all the same.
struct WriteFailure {
    written: usize,
    /// Why those may not be on disk; with durability `disk` only.
    unsynced: Option<LogDown>,
    /// Why the rest is not written.
    down: LogDown,
}

fn is_decision_of(entry: &QueuedRecord, attempt: u128) -> bool {
    matches!(&entry.draft.role, DraftRole::Decision(owed) if owed.attempt == attempt)
}

/// Describes an unfinished line.
pub(crate) fn describe_torn_line(fragment: &[u8]) -> Option<TornLine> {
    let sha256 = ChainHash::digest(fragment).as_str().to_owned();
    (!fragment.is_empty()).then_some(TornLine { bytes: fragment.len() as u64, sha256 })
}

/// Locks `dir` against other writers, for as long as the returned file is open.
pub(crate) fn lock_dir(dir: &std::path::Path) -> io::Result<File> {
    let handle = File::open(dir)?;
    handle.try_lock().map_err(|error| match error {
        fs::TryLockError::Error(error) => error,
        fs::TryLockError::WouldBlock => io::Error::new(
            io::ErrorKind::ResourceBusy,
            "another process is writing a log there; give each its own directory",
        ),
    })?;
    Ok(handle)
}

/// Reads the `previous` hash of the first record of a segment.
fn first_previous(path: &std::path::Path) -> Option<ChainHash> {
    let line = crate::line_reader::first_line(path)?;
    crate::chain::ChainLink::parse(&line).map(|link| link.previous)
}

fn open_attempt(owed: &OpenDecision) -> OpenAttempt<'_> {
    OpenAttempt {
        uid: ulid::Ulid::from(owed.attempt).to_string(),
        class_uid: owed.class_uid,
        sandbox: &owed.sandbox,
        tenant: &owed.tenant,
        host: &owed.host,
    }
}

#[cfg(test)]
mod tests {
    use std::fs::OpenOptions;
    use std::os::unix::fs::OpenOptionsExt;
    use std::path::Path;

    use super::*;
    use crate::checkpoint::FILE;
    use crate::recover;

    /// A writer that appends to a FIFO: it accepts some 64 KiB, then no more, and `fdatasync` fails.
    fn writer_over_pipe(dir: &Path, durability: LogDurability) -> LogWriter {
        const O_NONBLOCK: i32 = 0o4000;
        let config = LogConfig { durability, ..LogConfig::new(dir.join("log")) };
        let mut writer = recover::open(Arc::new(config)).unwrap();
        let pipe = dir.join("pipe");
        let made = std::process::Command::new("mkfifo").arg(&pipe).status().unwrap();
        assert!(made.success());
        let mut options = OpenOptions::new();
        let file = options.read(true).write(true).custom_flags(O_NONBLOCK).open(&pipe).unwrap();
        writer.segment = Some(LogSegment::from_file(&pipe, file));
        writer
    }

    type ReceiptReceiver = oneshot::Receiver<Result<u64, LogDown>>;

    fn queued_record(writer: &LogWriter) -> (QueuedRecord, ReceiptReceiver) {
        let (sender, receiver) = oneshot::channel();
        let draft = writer.draft_event("checkpoint", None, SandbarExtension::default()).unwrap();
        (QueuedRecord { draft, waiter: Some(sender) }, receiver)
    }

    // proves: log.durability
    #[test]
    fn p7_lines_before_a_tear_are_released_only_as_durable_as_promised() {
        for durability in [LogDurability::Disk, LogDurability::Process] {
            let dir = tempfile::tempdir().unwrap();
            let mut writer = writer_over_pipe(dir.path(), durability);
            let (batch, answers): (Vec<_>, Vec<_>) = (0..500).map(|_| queued_record(&writer)).unzip();
            assert!(writer.write(batch).is_empty());
            let answers: Vec<_> = answers.into_iter().map(|mut a| a.try_recv().unwrap()).collect();
            let whole = answers.iter().filter(|a| match a {
                Ok(_) => durability == LogDurability::Process,
                Err(down) => matches!(down, LogDown::Unsynced(_)),
            });
            let torn = answers.iter().filter(|a| matches!(a, Err(LogDown::Unwritable(_))));
            let (whole, torn) = (whole.count(), torn.count());
            assert!(whole > 10 && torn > 10, "{durability:?}: {whole} {torn}");
            assert_eq!(whole + torn, 500, "{durability:?}");
        }
    }

    #[test]
    fn p8_nothing_is_signed_that_is_not_on_disk() {
        let dir = tempfile::tempdir().unwrap();
        let mut writer = writer_over_pipe(dir.path(), LogDurability::Process);
        writer.write_checkpoint();
        assert!(!dir.path().join("log").join(FILE).exists());
        assert!(matches!(writer.trouble, Some(LogDown::Unsynced(_))), "{:?}", writer.trouble);
        assert_eq!(writer.counters.checkpoint_failures.load(Ordering::Relaxed), 1);
    }

    #[test]
    fn a_note_that_could_not_be_kept_is_due_again() {
        let dir = tempfile::tempdir().unwrap();
        let mut writer = recover::open(Arc::new(LogConfig::new(dir.path()))).unwrap();
        let file = dir.path().join(FILE);
        fs::create_dir(&file).unwrap();
        writer.write_checkpoint();
        assert_eq!(writer.last_checkpoint.sequence, 0);
        assert!(!writer.checkpoint_due(), "not at once");
        fs::remove_dir(&file).unwrap();
        writer.write_checkpoint();
        assert_eq!(writer.last_checkpoint.sequence, writer.head.sequence);
    }
}
