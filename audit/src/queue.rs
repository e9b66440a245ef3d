//! The queue between callers and the writer, and who writes.
//!
//! Where `durability` is `process`, whoever finds nobody writing lets the others of its thread
//! have their turn once and then writes everybody's batch itself; a caller so caught is relieved
//! by the keeper thread after a few rounds. Where it is `disk`, the keeper always writes. Nobody
//! waits for an outcome: it goes with the next batch, or by the keeper a few milliseconds later. A
//! caller that goes away while it waits leaves its record in the queue: the chain knows nothing of
//! callers.

use std::collections::VecDeque;
use std::mem;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tokio::sync::Notify;

use crate::config::{LogConfig, LogDurability};
use crate::draft::{Draft, DraftRole};
use crate::health::{Counters, LogHealth, load_counter};
use crate::id::IdGenerator;
use crate::log::LogDown;
use crate::observer::AttemptObserver;
use crate::writer::{LogWriter, QueuedRecord};

/// Most bytes that are taken into one write: few enough to be copied while the cache holds them...
const BATCH_BYTES: usize = 64 << 10;
/// ...and as many as wait where each batch costs a turn of the disk.
const BATCH_BYTES_DISK: usize = 1 << 20;
/// Batches that a caller writes for others before the keeper relieves it.
const CALLER_BATCHES_MAX: usize = 16;
/// How often the keeper looks at the clock, and tries again when writing fails.
const TICK: Duration = Duration::from_millis(100);

/// How long an outcome waits for a batch to go with.
const FLUSH_DELAY: Duration = Duration::from_millis(5);

/// What callers, the keeper and the log's handle share.
pub(crate) struct LogCore {
    pub(crate) config: Arc<LogConfig>,
    pub(crate) counters: Arc<Counters>,
    pub(crate) ids: Arc<IdGenerator>,
    queue: Mutex<RecordQueue>,
    /// Wakes the keeper.
    wake: Condvar,
    /// Wakes callers that wait for room.
    pub(crate) room: Notify,
    writer: Mutex<LogWriter>,
    pub(crate) witness: AttemptObserver,
}

#[derive(Default)]
struct RecordQueue {
    entries: VecDeque<QueuedRecord>,
    bytes: usize,
    /// Outcomes that could not be written yet; bounded by the open decisions they belong to.
    kept: VecDeque<QueuedRecord>,
    lead: WriteOwner,
    /// Counts whose turn it is to write, so that one who comes too late knows.
    term: u64,
    /// Since when the turn is taken.
    granted: Option<Instant>,
    /// Since when somebody writes.
    writing: Option<Instant>,
    /// Whether the keeper should look at the clock before its time.
    due: bool,
    /// When the keeper writes what nobody waits for.
    flush: Option<Instant>,
    /// Kept for the eye of `health`, which must not wait for a writer that hangs.
    seen: WriterStatus,
    closed: bool,
}

/// Who writes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum WriteOwner {
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

/// Which bound a record is held to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum QueueBound {
    /// That of open decisions, which it belongs to.
    Owed,
    /// That of the queue.
    Queue,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum QueueRoom {
    Free,
    None,
}

pub(crate) enum EnqueueOutcome<'a> {
    /// No room: the caller may wait for some.
    Full(QueuedRecord),
    /// Nobody writes: the caller has to.
    Lead(WriteTurn<'a>),
    Refused(LogDown),
    Taken,
}

/// The duty to write what is queued. A caller that goes away hands it to the keeper, and one that
/// is kept from its turn for too long finds that the keeper took it.
pub(crate) struct WriteTurn<'a> {
    shared: &'a LogCore,
    term: u64,
}

impl WriteTurn<'_> {
    /// Writes what is queued, unless the keeper took the turn.
    pub(crate) fn write(self) {
        let mut queue = self.shared.lock_queue();
        if queue.term == self.term {
            queue.term += 1; // taken up: nothing is left to hand over
            queue.writing = Some(Instant::now());
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

/// The turn of whoever writes. However it ends, even by a panic, the keeper goes on.
struct HandoverGuard<'a> {
    shared: &'a LogCore,
}

impl Drop for HandoverGuard<'_> {
    fn drop(&mut self) {
        let mut queue = self.shared.lock_queue();
        queue.writing = None;
        queue.hand_to_keeper();
        self.shared.wake.notify_one();
    }
}

/// Sees the keeper die: nobody would write then, so nothing more is taken.
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
        self.lead = WriteOwner::Keeper;
    }

    /// Whether a caller has had its turn for too long without beginning to write.
    fn is_overdue(&self) -> bool {
        let late = self.granted.is_some_and(|since| since.elapsed() >= FLUSH_DELAY);
        self.lead == WriteOwner::Caller && self.writing.is_none() && late
    }
}

impl LogCore {
    pub(crate) fn new(config: Arc<LogConfig>, writer: LogWriter) -> Self {
        let shared = Self {
            config,
            counters: Arc::clone(&writer.counters),
            ids: Arc::clone(&writer.ids),
            queue: Mutex::default(),
            wake: Condvar::new(),
            room: Notify::new(),
            writer: Mutex::new(writer),
            witness: AttemptObserver::default(),
        };
        shared.update_status(&shared.lock_writer());
        shared
    }

    /// Lets no more in and sends the keeper home.
    pub(crate) fn stop_accepting(&self) {
        self.lock_queue().closed = true;
        self.wake.notify_one();
    }

    /// Writes what is left and the last record, once the keeper is gone.
    pub(crate) fn write_remaining(&self) {
        let mut writer = self.lock_writer();
        let mut queue = self.lock_queue();
        let mut rest = Vec::from(mem::take(&mut queue.kept));
        rest.extend(mem::take(&mut queue.entries));
        drop(queue);
        writer.run_periodic();
        let unwritten = writer.write(rest);
        Counters::add(&self.counters.lost, unwritten.len() as u64);
        writer.stop();
    }

    /// Queues a record, and sees to it that somebody writes it.
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
        match (queue.lead, awaited, self.config.durability) {
            (WriteOwner::Caller | WriteOwner::Keeper, _, _) => {}
            (WriteOwner::Nobody, false, _) => self.schedule_flush(&mut queue),
            (WriteOwner::Nobody, true, LogDurability::Disk) => {
                queue.lead = WriteOwner::Keeper;
                self.wake.notify_one();
            }
            (WriteOwner::Nobody, true, LogDurability::Process) => {
                (queue.lead, queue.granted) = (WriteOwner::Caller, Some(Instant::now()));
                self.schedule_flush(&mut queue);
                return EnqueueOutcome::Lead(WriteTurn { shared: self, term: queue.term });
            }
        }
        EnqueueOutcome::Taken
    }

    /// Sets the keeper's clock, once, for what nobody waits for and for callers that do not come
    /// to write.
    fn schedule_flush(&self, queue: &mut RecordQueue) {
        if queue.flush.is_none() {
            queue.flush = Some(Instant::now() + FLUSH_DELAY);
            self.wake.notify_one();
        }
    }

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
        let open_max = self.config.open_max;
        let decision = matches!(draft.role, DraftRole::Decision(_));
        if decision && load_counter(&self.counters.owed) >= open_max as u64 {
            return Err(LogDown::TooManyOpen(open_max));
        }
        let full = queue.entries.len() >= self.config.queue_records
            || queue.bytes + draft.bytes.len() > self.config.queue_bytes;
        Ok(if full { QueueRoom::None } else { QueueRoom::Free })
    }

    /// Writes what is queued, up to `rounds` batches; then the keeper goes on.
    fn write_batches(&self, rounds: usize) {
        let turn = HandoverGuard { shared: self };
        for _ in 0..rounds {
            if !self.write_batch() {
                return std::mem::forget(turn); // nothing is left to hand over
            }
        }
    }

    /// Writes one batch, or refuses it. False when there is nothing more to do.
    fn write_batch(&self) -> bool {
        // Before anything is taken from the queue, so that `finish` finds it there or written.
        let mut writer = self.lock_writer();
        let Some(batch) = self.take_batch() else { return false };
        let again = writer.write(batch);
        if !again.is_empty() {
            self.lock_queue().kept.extend(again);
        }
        let due = writer.checkpoint_due();
        self.update_status(&writer);
        drop(writer);
        if due {
            self.lock_queue().due = true;
            self.wake.notify_one();
        }
        self.room.notify_waiters();
        true
    }

    fn take_batch(&self) -> Option<Vec<QueuedRecord>> {
        let mut queue = self.lock_queue();
        let mut batch = Vec::new();
        let mut bytes = 0;
        let most = match self.config.durability {
            LogDurability::Disk => BATCH_BYTES_DISK,
            LogDurability::Process => BATCH_BYTES,
        };
        while bytes < most
            && let Some(entry) = queue.entries.pop_front()
        {
            bytes += entry.draft.bytes.len();
            batch.push(entry);
        }
        queue.bytes -= bytes;
        if batch.is_empty() {
            (queue.lead, queue.writing) = (WriteOwner::Nobody, None);
            return None;
        }
        queue.writing = Some(Instant::now());
        Some(batch)
    }

    /// The keeper thread: relieves callers, writes in `disk` mode, tends to time.
    pub(crate) fn run_keeper(&self) {
        let watch = KeeperGuard { shared: self };
        self.keeper_loop();
        std::mem::forget(watch);
    }

    fn keeper_loop(&self) {
        let mut next = Instant::now() + TICK;
        loop {
            let closed = self.wait_for_work(next);
            self.flush_due();
            if closed {
                return;
            }
            if mem::take(&mut self.lock_queue().due) || Instant::now() >= next {
                next = Instant::now() + TICK;
                self.run_periodic();
            }
        }
    }

    /// Writes what is the keeper's to write by now.
    fn flush_due(&self) {
        let mut queue = self.lock_queue();
        if queue.flush.is_some_and(|at| Instant::now() >= at) {
            queue.flush = None;
            if queue.lead == WriteOwner::Nobody || queue.is_overdue() {
                queue.hand_to_keeper();
            } else if queue.lead == WriteOwner::Caller && queue.writing.is_none() {
                queue.flush = Some(Instant::now() + FLUSH_DELAY);
            }
        }
        let leads = queue.lead == WriteOwner::Keeper;
        drop(queue);
        if leads {
            self.write_batches(usize::MAX);
        }
    }

    /// Waits until there is something to write, it is time, or the log closes.
    fn wait_for_work(&self, tick: Instant) -> bool {
        let mut queue = self.lock_queue();
        loop {
            let until = queue.flush.map_or(tick, |at| at.min(tick));
            let patience = until.saturating_duration_since(Instant::now());
            let idle = queue.lead != WriteOwner::Keeper && !queue.due && !queue.closed;
            if !idle || patience.is_zero() {
                return queue.closed;
            }
            let waited = self.wake.wait_timeout(queue, patience);
            queue = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    fn run_periodic(&self) {
        let mut writer = self.lock_writer();
        writer.run_periodic();
        let well = writer.trouble.is_none();
        self.update_status(&writer);
        drop(writer);
        let mut queue = self.lock_queue();
        if well && !queue.kept.is_empty() {
            let kept = mem::take(&mut queue.kept);
            queue.bytes += kept.iter().map(|entry| entry.draft.bytes.len()).sum::<usize>();
            kept.into_iter().rev().for_each(|entry| queue.entries.push_front(entry));
            if queue.lead == WriteOwner::Nobody {
                queue.hand_to_keeper();
            }
        }
        drop(queue);
        self.flush_due();
    }

    /// Notes what `health` tells, so that it need not wait for the writer.
    pub(crate) fn update_status(&self, writer: &LogWriter) {
        let segment = writer.segment.as_ref();
        let mut queue = self.lock_queue();
        queue.seen.sequence = writer.head.sequence;
        let trouble = writer.trouble.as_ref();
        if queue.seen.trouble.is_some() || trouble.is_some() {
            queue.seen.trouble = trouble.map(ToString::to_string);
        }
        if queue.seen.segment.as_deref() != segment.map(|segment| segment.name.as_str()) {
            queue.seen.segment = segment.map(|segment| segment.name.clone());
        }
    }

    pub(crate) fn health(&self) -> LogHealth {
        let queue = self.lock_queue();
        let slow = queue.writing.is_some_and(|since| since.elapsed() > self.config.patience);
        let counters = &self.counters;
        let open_max = self.config.open_max;
        let trouble = match (queue.closed, slow, load_counter(&counters.owed) >= open_max as u64) {
            (true, _, _) => Some(LogDown::Closed.to_string()),
            (false, true, _) => Some(LogDown::Slow(self.config.patience).to_string()),
            (false, false, true) => Some(LogDown::TooManyOpen(open_max).to_string()),
            (false, false, false) => queue.seen.trouble.clone(),
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
            queued: (queue.entries.len() + queue.kept.len()) as u64,
            checkpoints: load_counter(&counters.checkpoints),
            checkpoint_failures: load_counter(&counters.checkpoint_failures),
            sequence: queue.seen.sequence,
            segment: queue.seen.segment.clone(),
        }
    }

    // A panic while holding either lock leaves data that the next write finds whole or fails on.
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

    /// Else `finish`, which has the writer, would miss what somebody took and cannot write yet.
    #[test]
    fn p7_nothing_is_taken_from_the_queue_before_it_can_be_written() {
        let dir = tempfile::tempdir().unwrap();
        let config = Arc::new(LogConfig::new(dir.path()));
        let writer = recover::open(Arc::clone(&config)).unwrap();
        let draft = writer
            .draft_event("checkpoint", None, crate::record::SandbarExtension::default())
            .unwrap();
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
        shared.lock_queue().lead = WriteOwner::Caller;
        let died = catch_unwind(AssertUnwindSafe(|| {
            let _turn = HandoverGuard { shared: &shared };
            panic!("as a writer may");
        }));
        assert!(died.is_err());
        assert_eq!(shared.lock_queue().lead, WriteOwner::Keeper);
        assert!(shared.health().ready);
        let died = catch_unwind(AssertUnwindSafe(|| {
            let _watch = KeeperGuard { shared: &shared };
            panic!("as the keeper may");
        }));
        assert!(died.is_err());
        assert!(!shared.health().ready, "nobody writes any more");
    }
}
