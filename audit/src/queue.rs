//! The queue between callers and the writer: group commit with a leader and followers.
//!
//! One write serves every record that is queued, so the cost per record falls as load rises. Who
//! writes depends on the durability:
//!
//! - `process` (write only): the first caller that waits for a record while no one writes becomes the
//!   *leader*. It yields once, so that other tasks of its thread can queue their records, and then
//!   writes the whole queue itself: an idle log then costs no thread switch. Callers that arrive
//!   meanwhile are *followers*: they queue their record and wait for its receipt, which the leader
//!   sends once the batch is in the file. The leader repeats until the queue is empty, but after
//!   [`CALLER_BATCHES_MAX`] batches it hands over to the keeper thread, or a busy queue would hold up
//!   the leader's own connection forever.
//! - `disk` (write and `fdatasync`): the keeper always writes, so that no async task blocks on a disk. The
//!   same holds for a directory on a network file system, where even `write` can block for ever.
//!
//! A leader only appends to the open segment. Everything else that touches the file system (rotation, checkpoints,
//! recovery, retention) is *maintenance*, and only the keeper does it. While it does, it has the turn to
//! write, so a caller queues its record and waits as a task: no runtime thread ever waits for the writer's lock.
//!
//! The keeper thread also takes over when a leader does not write: its task was cancelled, its
//! thread stalls for [`FLUSH_DELAY`], or the write panicked. No caller waits for an outcome, so an
//! outcome goes with the next batch, or the keeper writes it after [`FLUSH_DELAY`]. A record stays
//! queued when its caller is cancelled: the chain does not depend on callers.
//!
//! Lock order: the writer before the queue.

use std::collections::VecDeque;
use std::mem;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tokio::sync::Notify;

use crate::config::{LogConfig, LogDurability};
use crate::draft::Draft;
use crate::health::{Counters, LogHealth, load_counter};
use crate::id::IdGenerator;
use crate::log::LogDown;
use crate::meter::{DenialMeter, SummaryRoom};
use crate::observer::AttemptObserver;
use crate::quota::LogQuota;
use crate::writer::{LogWriter, QueuedRecord};

/// Maximum bytes per write: small enough to stay in the CPU cache while being copied and hashed.
const BATCH_BYTES: usize = 64 << 10;
/// The same with durability `disk`, where each batch costs an `fdatasync`.
const BATCH_BYTES_DISK: usize = 1 << 20;
/// Batches that a leader writes before it hands over to the keeper.
const CALLER_BATCHES_MAX: usize = 16;
/// Interval of the keeper's periodic work, including retries after a write failure.
const TICK: Duration = Duration::from_millis(100);
/// How long an outcome waits for a batch, and a leader may take to start writing.
const FLUSH_DELAY: Duration = Duration::from_millis(5);

/// The state shared by callers, the keeper and the log's handle.
pub(crate) struct LogCore {
    pub(crate) config: Arc<LogConfig>,
    pub(crate) counters: Arc<Counters>,
    pub(crate) ids: Arc<IdGenerator>,
    queue: Mutex<RecordQueue>,
    /// Wakes the keeper.
    wake: Condvar,
    /// Wakes callers that wait for room in the queue.
    pub(crate) room: Notify,
    writer: Mutex<LogWriter>,
    writer_thread: WriterThread,
    pub(crate) quota: Arc<LogQuota>,
    pub(crate) meter: DenialMeter,
    pub(crate) observer: AttemptObserver,
}

#[derive(Default)]
struct RecordQueue {
    entries: VecDeque<QueuedRecord>,
    bytes: usize,
    /// Outcomes that could not be written yet; bounded by the open decisions they belong to.
    deferred: VecDeque<QueuedRecord>,
    owner: WriteOwner,
    /// Changes whenever the turn to write changes hands, so that a late leader notices.
    term: u64,
    /// When the current leader got its turn.
    granted_at: Option<Instant>,
    /// When the current batch was started.
    writing_since: Option<Instant>,
    /// Set to make the keeper do maintenance; a leader then hands over after its batch.
    maintenance_due: bool,
    /// When the keeper writes records that no caller waits for, or checks on the leader.
    flush_at: Option<Instant>,
    /// A copy for `health`, which must not wait for a writer that hangs.
    status: WriterStatus,
    closed: bool,
}

/// The thread that writes while no maintenance is due.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum WriterThread {
    Caller,
    Keeper,
}

/// Who has the turn to write.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum WriteOwner {
    /// The leader, one of the callers.
    Caller,
    Keeper,
    #[default]
    Nobody,
}

#[derive(Clone, Default)]
struct WriterStatus {
    trouble: Option<String>,
    sequence: u64,
    segment: Option<String>,
}

/// The bound that limits a record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum QueueBound {
    /// The bound on open decisions: the record is the outcome of one.
    Owed,
    /// The bound on the queue.
    Queue,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum QueueRoom {
    Free,
    None,
}

pub(crate) enum EnqueueOutcome<'a> {
    /// The queue is full; the caller may wait for room.
    Full(QueuedRecord),
    /// The caller is the leader: it must write.
    Lead(WriteTurn<'a>),
    Refused(LogDown),
    /// Queued as a follower, or without a waiter.
    Taken,
}

/// The leader's turn to write. Dropping it unused hands over to the keeper; a leader that takes too
/// long finds that the keeper has taken over already.
pub(crate) struct WriteTurn<'a> {
    shared: &'a LogCore,
    term: u64,
}

impl WriteTurn<'_> {
    /// Writes the queue, unless the keeper has taken over.
    pub(crate) fn write(self) {
        let mut queue = self.shared.lock_queue();
        if queue.term == self.term {
            queue.term += 1; // so that `drop` has nothing to hand over
            queue.writing_since = Some(Instant::now());
            drop(queue);
            self.shared.write_batches(CALLER_BATCHES_MAX);
        }
    }
}

impl Drop for WriteTurn<'_> {
    fn drop(&mut self) {
        let mut queue = self.shared.lock_queue();
        if queue.term == self.term {
            queue.hand_to_keeper();
            self.shared.wake.notify_one();
        }
    }
}

/// Hands over to the keeper when the writing ends, even by a panic.
struct HandoverGuard<'a> {
    shared: &'a LogCore,
}

impl Drop for HandoverGuard<'_> {
    fn drop(&mut self) {
        let mut queue = self.shared.lock_queue();
        queue.writing_since = None;
        queue.hand_to_keeper();
        self.shared.wake.notify_one();
    }
}

/// Closes the log if the keeper panics: later records would never be written.
struct KeeperGuard<'a> {
    shared: &'a LogCore,
}

impl Drop for KeeperGuard<'_> {
    fn drop(&mut self) {
        self.shared.lock_queue().closed = true;
        self.shared.room.notify_waiters();
    }
}

impl RecordQueue {
    /// Gives the keeper the turn.
    fn hand_to_keeper(&mut self) {
        self.term += 1;
        self.owner = WriteOwner::Keeper;
    }

    /// Gives the keeper the turn if nobody has it and work is due, or if the leader does not start to write.
    fn take_keeper_turn(&mut self) {
        let flush = self.flush_at.is_some_and(|at| Instant::now() >= at);
        if flush {
            self.flush_at = None;
        }
        match self.owner {
            WriteOwner::Nobody if flush || self.maintenance_due => self.hand_to_keeper(),
            WriteOwner::Caller if flush && self.is_overdue() => self.hand_to_keeper(),
            WriteOwner::Caller if flush && self.writing_since.is_none() => {
                self.flush_at = Some(Instant::now() + FLUSH_DELAY);
            }
            WriteOwner::Caller | WriteOwner::Keeper | WriteOwner::Nobody => {}
        }
    }

    /// Gives the turn back once the queue is empty: to the keeper if it has maintenance to do.
    fn end_turn(&mut self) {
        self.writing_since = None;
        self.owner = if self.maintenance_due { WriteOwner::Keeper } else { WriteOwner::Nobody };
    }

    /// Whether the leader has had its turn for too long without starting to write.
    fn is_overdue(&self) -> bool {
        let late = self.granted_at.is_some_and(|since| since.elapsed() >= FLUSH_DELAY);
        self.owner == WriteOwner::Caller && self.writing_since.is_none() && late
    }
}

impl LogCore {
    pub(crate) fn new(config: Arc<LogConfig>, writer: LogWriter) -> Self {
        let writer_thread = match config.durability {
            LogDurability::Process if sys::file::is_local(&config.dir) => WriterThread::Caller,
            LogDurability::Disk | LogDurability::Process => WriterThread::Keeper,
        };
        let quota = Arc::clone(&writer.quota);
        let meter = DenialMeter::new(config.denials);
        let shared = Self {
            config,
            counters: Arc::clone(&writer.counters),
            ids: Arc::clone(&writer.ids),
            queue: Mutex::default(),
            wake: Condvar::new(),
            room: Notify::new(),
            writer: Mutex::new(writer),
            writer_thread,
            quota,
            meter,
            observer: AttemptObserver::default(),
        };
        shared.update_status(&shared.lock_writer());
        shared
    }

    /// Refuses new records and makes the keeper exit.
    pub(crate) fn stop_accepting(&self) {
        self.lock_queue().closed = true;
        self.wake.notify_one();
    }

    /// Writes the remaining records and the final one, once the keeper has exited.
    pub(crate) fn write_remaining(&self) {
        let mut writer = self.lock_writer();
        let mut queue = self.lock_queue();
        let mut rest = Vec::from(mem::take(&mut queue.deferred));
        rest.extend(mem::take(&mut queue.entries));
        drop(queue);
        writer.run_periodic();
        writer.write_summaries(self.meter.take_due(true, |_| SummaryRoom::Free));
        let unwritten = writer.write(rest);
        Counters::add(&self.counters.lost, unwritten.len() as u64);
        writer.stop();
    }

    /// Queues a record and makes sure that the leader or the keeper will write it.
    pub(crate) fn enqueue(&self, entry: QueuedRecord, bound: QueueBound) -> EnqueueOutcome<'_> {
        let mut queue = self.lock_queue();
        match self.check_room(&queue, &entry.draft, bound) {
            Ok(QueueRoom::Free) => {}
            Ok(QueueRoom::None) => return EnqueueOutcome::Full(entry),
            Err(down) => return EnqueueOutcome::Refused(down),
        }
        let awaited = entry.waiter.is_some();
        queue.bytes += entry.draft.bytes.len();
        queue.entries.push_back(entry);
        match (queue.owner, awaited, self.writer_thread) {
            (WriteOwner::Caller | WriteOwner::Keeper, _, _) => {}
            (WriteOwner::Nobody, false, _) => self.schedule_flush(&mut queue),
            (WriteOwner::Nobody, true, WriterThread::Keeper) => {
                queue.owner = WriteOwner::Keeper;
                self.wake.notify_one();
            }
            (WriteOwner::Nobody, true, WriterThread::Caller) => {
                (queue.owner, queue.granted_at) = (WriteOwner::Caller, Some(Instant::now()));
                self.schedule_flush(&mut queue);
                return EnqueueOutcome::Lead(WriteTurn { shared: self, term: queue.term });
            }
        }
        EnqueueOutcome::Taken
    }

    /// Sets the keeper's timer, unless it is set: for records without a waiter, and to check on the
    /// leader.
    fn schedule_flush(&self, queue: &mut RecordQueue) {
        if queue.flush_at.is_none() {
            queue.flush_at = Some(Instant::now() + FLUSH_DELAY);
            self.wake.notify_one();
        }
    }

    /// Finds room for a record, and reserves what it needs of its sandbox's part of the log.
    fn check_room(
        &self,
        queue: &RecordQueue,
        draft: &Draft,
        bound: QueueBound,
    ) -> Result<QueueRoom, LogDown> {
        if queue.closed {
            return Err(LogDown::Closed);
        }
        if bound == QueueBound::Owed {
            return Ok(QueueRoom::Free);
        }
        let full = queue.entries.len() >= self.config.queue_records
            || queue.bytes + draft.bytes.len() > self.config.queue_bytes;
        if full {
            return Ok(QueueRoom::None);
        }
        self.quota.admit(draft).map(|()| QueueRoom::Free)
    }

    /// Writes up to `rounds` batches, then hands over to the keeper; sooner if maintenance is due.
    fn write_batches(&self, rounds: usize) {
        let turn = HandoverGuard { shared: self };
        for _ in 0..rounds {
            if !self.write_batch() {
                return std::mem::forget(turn); // the queue is empty: nothing to hand over
            }
            if self.lock_queue().maintenance_due {
                return;
            }
        }
    }

    /// Writes or refuses one batch. Returns false when the queue is empty.
    fn write_batch(&self) -> bool {
        // Lock the writer before taking records off the queue. `write_remaining`, which also locks the
        // writer first, then finds every record either in the queue or in the file, never in between.
        let mut writer = self.lock_writer();
        let Some(batch) = self.take_batch() else { return false };
        let again = writer.write(batch);
        if !again.is_empty() {
            self.lock_queue().deferred.extend(again);
        }
        let due = writer.maintenance_due();
        self.update_status(&writer);
        drop(writer);
        if due {
            self.lock_queue().maintenance_due = true;
        }
        self.room.notify_waiters();
        true
    }

    fn take_batch(&self) -> Option<Vec<QueuedRecord>> {
        let mut queue = self.lock_queue();
        let mut batch = Vec::new();
        let mut bytes = 0;
        let limit = match self.config.durability {
            LogDurability::Disk => BATCH_BYTES_DISK,
            LogDurability::Process => BATCH_BYTES,
        };
        while bytes < limit
            && let Some(entry) = queue.entries.pop_front()
        {
            bytes += entry.draft.bytes.len();
            batch.push(entry);
        }
        queue.bytes -= bytes;
        if batch.is_empty() {
            queue.end_turn();
            if queue.owner == WriteOwner::Keeper {
                self.wake.notify_one();
            }
            return None;
        }
        queue.writing_since = Some(Instant::now());
        Some(batch)
    }

    /// Runs the keeper thread: takes over from leaders, writes in `disk` mode, does periodic work.
    pub(crate) fn run_keeper(&self) {
        let watch = KeeperGuard { shared: self };
        self.keeper_loop();
        std::mem::forget(watch);
    }

    fn keeper_loop(&self) {
        let mut next = Instant::now() + TICK;
        loop {
            let closed = self.wait_for_work(next);
            if closed {
                return;
            }
            let mut queue = self.lock_queue();
            if Instant::now() >= next {
                next = Instant::now() + TICK;
                queue.maintenance_due = true;
            }
            queue.take_keeper_turn();
            let is_owner = queue.owner == WriteOwner::Keeper;
            let maintain = is_owner && mem::take(&mut queue.maintenance_due);
            drop(queue);
            if maintain {
                self.run_maintenance();
            }
            if is_owner {
                self.write_batches(usize::MAX);
            }
        }
    }

    /// Waits until the keeper has something to do, a timer expires, or the log closes.
    fn wait_for_work(&self, tick: Instant) -> bool {
        let mut queue = self.lock_queue();
        loop {
            let until = queue.flush_at.map_or(tick, |at| at.min(tick));
            let patience = until.saturating_duration_since(Instant::now());
            let maintain = queue.maintenance_due && queue.owner == WriteOwner::Nobody;
            let idle = queue.owner != WriteOwner::Keeper && !maintain && !queue.closed;
            if !idle || patience.is_zero() {
                return queue.closed;
            }
            let waited = self.wake.wait_timeout(queue, patience);
            queue = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Does maintenance. The keeper has the turn, so the lock is free.
    fn run_maintenance(&self) {
        self.lock_queue().writing_since = Some(Instant::now()); // if it hangs, `health` says so
        let mut writer = self.lock_writer();
        writer.run_periodic();
        if writer.trouble.is_none() {
            let due = self.meter.take_due(false, |sandbox| self.quota.summary_room(sandbox));
            writer.write_summaries(due);
        }
        let recovered = writer.trouble.is_none();
        self.update_status(&writer);
        drop(writer);
        let mut queue = self.lock_queue();
        queue.writing_since = None;
        if recovered && !queue.deferred.is_empty() {
            let deferred = mem::take(&mut queue.deferred);
            queue.bytes += deferred.iter().map(|entry| entry.draft.bytes.len()).sum::<usize>();
            deferred.into_iter().rev().for_each(|entry| queue.entries.push_front(entry));
        }
    }

    /// Copies what `health` reports, so that it does not wait for the writer.
    pub(crate) fn update_status(&self, writer: &LogWriter) {
        let segment = writer.segment.as_ref();
        let mut queue = self.lock_queue();
        queue.status.sequence = writer.head.sequence;
        let trouble = writer.trouble.as_ref();
        if queue.status.trouble.is_some() || trouble.is_some() {
            queue.status.trouble = trouble.map(ToString::to_string);
        }
        if queue.status.segment.as_deref() != segment.map(|segment| segment.name.as_str()) {
            queue.status.segment = segment.map(|segment| segment.name.clone());
        }
    }

    pub(crate) fn health(&self) -> LogHealth {
        let queue = self.lock_queue();
        let slow = queue.writing_since.is_some_and(|since| since.elapsed() > self.config.patience);
        let counters = &self.counters;
        let trouble = match (queue.closed, slow) {
            (true, _) => Some(LogDown::Closed.to_string()),
            (false, true) => Some(LogDown::Slow(self.config.patience).to_string()),
            (false, false) => queue.status.trouble.clone(),
        };
        LogHealth {
            ready: trouble.is_none(),
            trouble,
            written: load_counter(&counters.written),
            bytes: load_counter(&counters.bytes),
            batches: load_counter(&counters.batches),
            refused: load_counter(&counters.refused),
            folded: load_counter(&counters.folded_total),
            lost: load_counter(&counters.lost),
            open: load_counter(&counters.owed),
            queued: (queue.entries.len() + queue.deferred.len()) as u64,
            checkpoints: load_counter(&counters.checkpoints),
            checkpoint_failures: load_counter(&counters.checkpoint_failures),
            sequence: queue.status.sequence,
            segment: queue.status.segment.clone(),
        }
    }

    // Both structures stay consistent if a holder panics, so a poisoned lock is safe to use: at worst
    // the next write fails.
    fn lock_queue(&self) -> MutexGuard<'_, RecordQueue> {
        sys::lock(&self.queue)
    }

    pub(crate) fn lock_writer(&self) -> MutexGuard<'_, LogWriter> {
        sys::lock(&self.writer)
    }
}

#[cfg(test)]
mod tests {
    use std::panic::{AssertUnwindSafe, catch_unwind};

    use super::*;
    use crate::recover;

    /// Otherwise `write_remaining`, which holds the writer, would miss a batch taken but not yet written.
    #[test]
    fn p7_nothing_is_taken_from_the_queue_before_it_can_be_written() {
        let dir = tempfile::tempdir().unwrap();
        let config = Arc::new(LogConfig::new(dir.path()));
        let writer = recover::open(Arc::clone(&config)).unwrap();
        let draft =
            writer.draft_event("checkpoint", None, crate::record::SandbarExtension::default()).unwrap();
        let shared = LogCore::new(config, writer);
        shared.lock_queue().bytes = draft.bytes.len();
        shared.lock_queue().entries.push_back(QueuedRecord { draft, waiter: None });
        std::thread::scope(|scope| {
            let held = shared.lock_writer();
            let leading = scope.spawn(|| shared.write_batch());
            std::thread::sleep(Duration::from_millis(50));
            assert_eq!(shared.lock_queue().entries.len(), 1);
            drop(held);
            assert!(leading.join().unwrap());
        });
        assert_eq!(shared.lock_queue().entries.len(), 0);
    }

    #[test]
    fn p16_a_panic_while_writing_hands_the_turn_to_the_keeper() {
        let dir = tempfile::tempdir().unwrap();
        let config = Arc::new(LogConfig::new(dir.path()));
        let writer = recover::open(Arc::clone(&config)).unwrap();
        let shared = LogCore::new(config, writer);
        shared.lock_queue().owner = WriteOwner::Caller;
        let died = catch_unwind(AssertUnwindSafe(|| {
            let _turn = HandoverGuard { shared: &shared };
            panic!("a writer panics");
        }));
        assert!(died.is_err());
        assert_eq!(shared.lock_queue().owner, WriteOwner::Keeper);
        assert!(shared.health().ready);
        let died = catch_unwind(AssertUnwindSafe(|| {
            let _watch = KeeperGuard { shared: &shared };
            panic!("the keeper panics");
        }));
        assert!(died.is_err());
        assert!(!shared.health().ready, "no thread writes any more");
    }

    /// A full segment is not the leader's business, and a caller never waits for a lock that maintenance holds.
    #[test]
    fn p20_only_the_keeper_starts_segments_and_nobody_blocks_on_it() {
        let dir = tempfile::tempdir().unwrap();
        let config = Arc::new(LogConfig { segment_bytes: 1, ..LogConfig::new(dir.path()) });
        let shared = LogCore::new(Arc::clone(&config), recover::open(config).unwrap());
        let entry = || {
            let extension = crate::record::SandbarExtension::default();
            let draft = shared.lock_writer().draft_event("checkpoint", None, extension).unwrap();
            QueuedRecord { draft, waiter: Some(tokio::sync::oneshot::channel().0) }
        };
        let before = shared.lock_writer().last.clone();
        let (first, second) = (entry(), entry());
        let EnqueueOutcome::Lead(turn) = shared.enqueue(first, QueueBound::Queue) else {
            panic!("not the leader")
        };
        turn.write();
        assert_eq!(shared.lock_writer().last, before, "the leader only appended");
        assert!(shared.lock_queue().maintenance_due);
        assert_eq!(shared.lock_queue().owner, WriteOwner::Keeper, "handed over");
        let maintaining = shared.lock_writer();
        assert!(matches!(shared.enqueue(second, QueueBound::Queue), EnqueueOutcome::Taken));
        assert!(shared.health().ready);
        drop(maintaining);
        shared.run_maintenance();
        assert_ne!(shared.lock_writer().last, before);
        shared.write_batches(usize::MAX);
        assert_eq!(shared.lock_queue().entries.len(), 0);
    }

    /// A disk that hangs holds up the keeper, and nobody else: this runtime has only one thread.
    #[tokio::test]
    async fn p20_a_directory_that_blocks_stops_no_runtime_thread() {
        use std::io::Read as _;

        let dir = tempfile::tempdir().unwrap();
        let pipe = dir.path().join("pipe");
        assert!(std::process::Command::new("mkfifo").arg(&pipe).status().unwrap().success());
        let mut file = std::fs::File::options().read(true).write(true).open(&pipe).unwrap();
        let patience = Duration::from_millis(200);
        let config = Arc::new(LogConfig { patience, ..LogConfig::new(dir.path().join("log")) });
        let mut writer = recover::open(Arc::clone(&config)).unwrap();
        writer.segment = Some(crate::segment::LogSegment::from_file(&pipe, file.try_clone().unwrap()));
        let draft = |writer: &LogWriter| {
            writer.draft_event("checkpoint", None, crate::record::SandbarExtension::default()).unwrap()
        };
        let drafts: Vec<Draft> = (0..500).map(|_| draft(&writer)).collect();
        let mut shared = LogCore::new(config, writer);
        shared.writer_thread = WriterThread::Keeper; // as on a network file system
        let shared = Arc::new(shared);
        let keeper = std::thread::spawn({
            let shared = Arc::clone(&shared);
            move || shared.run_keeper()
        });
        let mut waiting = Vec::new();
        for draft in drafts {
            let (sender, receiver) = tokio::sync::oneshot::channel();
            let entry = QueuedRecord { draft, waiter: Some(sender) };
            assert!(matches!(shared.enqueue(entry, QueueBound::Queue), EnqueueOutcome::Taken));
            waiting.push(receiver);
        }
        while shared.health().ready {
            tokio::time::sleep(Duration::from_millis(1)).await; // this thread goes on
        }
        assert!(shared.health().trouble.is_some_and(|trouble| trouble.contains("too slow")));
        let drain = std::thread::spawn(move || {
            let mut chunk = vec![0; 64 << 10];
            loop {
                let count = file.read(&mut chunk).unwrap();
                if chunk[..count].ends_with(b"END") {
                    return;
                }
            }
        });
        for receiver in waiting {
            assert!(receiver.await.unwrap().is_ok(), "written once the disk moves again");
        }
        shared.stop_accepting();
        keeper.join().unwrap();
        std::io::Write::write_all(&mut std::fs::File::options().write(true).open(&pipe).unwrap(), b"END")
            .unwrap();
        drain.join().unwrap();
    }
}
