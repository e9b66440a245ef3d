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

use crate::config::{Config, Durability};
use crate::draft::{Draft, Role};
use crate::health::{Counters, Health, read};
use crate::id::Ids;
use crate::log::LogDown;
use crate::witness::Witness;
use crate::writer::{Entry, Writer};

/// Most bytes that are taken into one write: few enough to be copied while the cache holds them...
const BATCH_BYTES: usize = 64 << 10;
/// ...and as many as wait where each batch costs a turn of the disk.
const BATCH_BYTES_DISK: usize = 1 << 20;
/// Batches that a caller writes for others before the keeper relieves it.
const ROUNDS: usize = 16;
/// How often the keeper looks at the clock, and tries again when writing fails.
const TICK: Duration = Duration::from_millis(100);

/// How long an outcome waits for a batch to go with.
const LINGER: Duration = Duration::from_millis(5);

/// What callers, the keeper and the log's handle share.
pub(crate) struct Shared {
    pub(crate) config: Arc<Config>,
    pub(crate) counters: Arc<Counters>,
    pub(crate) ids: Arc<Ids>,
    queue: Mutex<Queue>,
    /// Wakes the keeper.
    wake: Condvar,
    /// Wakes callers that wait for room.
    pub(crate) room: Notify,
    writer: Mutex<Writer>,
    pub(crate) witness: Witness,
}

#[derive(Default)]
struct Queue {
    entries: VecDeque<Entry>,
    bytes: usize,
    /// Outcomes that could not be written yet; bounded by the open decisions they belong to.
    kept: VecDeque<Entry>,
    lead: Lead,
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
    seen: Seen,
    closed: bool,
}

/// Who writes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Lead {
    Caller,
    Keeper,
    #[default]
    Nobody,
}

#[derive(Clone, Default)]
struct Seen {
    trouble: Option<String>,
    sequence: u64,
    segment: Option<String>,
}

/// Which bound a record is held to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Bound {
    /// That of open decisions, which it belongs to.
    Owed,
    /// That of the queue.
    Queue,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Room {
    Free,
    None,
}

pub(crate) enum Enqueued<'a> {
    /// No room: the caller may wait for some.
    Full(Entry),
    /// Nobody writes: the caller has to.
    Lead(Leader<'a>),
    Refused(LogDown),
    Taken,
}

/// The duty to write what is queued. A caller that goes away hands it to the keeper, and one that
/// is kept from its turn for too long finds that the keeper took it.
pub(crate) struct Leader<'a> {
    shared: &'a Shared,
    term: u64,
}

impl Leader<'_> {
    /// Writes what is queued, unless the keeper took the turn.
    pub(crate) fn write(self) {
        let mut queue = self.shared.queue();
        if queue.term == self.term {
            queue.term += 1; // taken up: nothing is left to hand over
            queue.writing = Some(Instant::now());
            drop(queue);
            self.shared.lead(ROUNDS);
        }
    }
}

impl Drop for Leader<'_> {
    fn drop(&mut self) {
        let mut queue = self.shared.queue();
        if queue.term == self.term {
            queue.relieve();
            self.shared.wake.notify_one();
        }
    }
}

/// The turn of whoever writes. However it ends, even by a panic, the keeper goes on.
struct Turn<'a> {
    shared: &'a Shared,
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        let mut queue = self.shared.queue();
        queue.writing = None;
        queue.relieve();
        self.shared.wake.notify_one();
    }
}

/// Sees the keeper die: nobody would write then, so nothing more is taken.
struct Watch<'a> {
    shared: &'a Shared,
}

impl Drop for Watch<'_> {
    fn drop(&mut self) {
        self.shared.queue().closed = true;
        self.shared.room.notify_waiters();
    }
}

impl Queue {
    /// Gives the keeper the turn.
    fn relieve(&mut self) {
        self.term += 1;
        self.lead = Lead::Keeper;
    }

    /// Whether a caller has had its turn for too long without beginning to write.
    fn overdue(&self) -> bool {
        let late = self.granted.is_some_and(|since| since.elapsed() >= LINGER);
        self.lead == Lead::Caller && self.writing.is_none() && late
    }
}

impl Shared {
    pub(crate) fn new(config: Arc<Config>, writer: Writer) -> Self {
        let shared = Self {
            config,
            counters: Arc::clone(&writer.counters),
            ids: Arc::clone(&writer.ids),
            queue: Mutex::default(),
            wake: Condvar::new(),
            room: Notify::new(),
            writer: Mutex::new(writer),
            witness: Witness::default(),
        };
        shared.look(&shared.writer());
        shared
    }

    /// Lets no more in and sends the keeper home.
    pub(crate) fn shut(&self) {
        self.queue().closed = true;
        self.wake.notify_one();
    }

    /// Writes what is left and the last record, once the keeper is gone.
    pub(crate) fn finish(&self) {
        let mut writer = self.writer();
        let mut queue = self.queue();
        let mut rest = Vec::from(mem::take(&mut queue.kept));
        rest.extend(mem::take(&mut queue.entries));
        drop(queue);
        writer.tend();
        let unwritten = writer.write(rest);
        Counters::add(&self.counters.lost, unwritten.len() as u64);
        writer.stop();
    }

    /// Queues a record, and sees to it that somebody writes it.
    pub(crate) fn enqueue(&self, entry: Entry, bound: Bound) -> Enqueued<'_> {
        let mut queue = self.queue();
        match self.admit(&queue, &entry.draft, bound) {
            Ok(Room::Free) => {}
            Ok(Room::None) => return Enqueued::Full(entry),
            Err(down) => return Enqueued::Refused(down),
        }
        let awaited = entry.waiter.is_some();
        queue.bytes += entry.draft.bytes.len();
        queue.entries.push_back(entry);
        match (queue.lead, awaited, self.config.durability) {
            (Lead::Caller | Lead::Keeper, _, _) => {}
            (Lead::Nobody, false, _) => self.linger(&mut queue),
            (Lead::Nobody, true, Durability::Disk) => {
                queue.lead = Lead::Keeper;
                self.wake.notify_one();
            }
            (Lead::Nobody, true, Durability::Process) => {
                (queue.lead, queue.granted) = (Lead::Caller, Some(Instant::now()));
                self.linger(&mut queue);
                return Enqueued::Lead(Leader { shared: self, term: queue.term });
            }
        }
        Enqueued::Taken
    }

    /// Sets the keeper's clock, once, for what nobody waits for and for callers that do not come
    /// to write.
    fn linger(&self, queue: &mut Queue) {
        if queue.flush.is_none() {
            queue.flush = Some(Instant::now() + LINGER);
            self.wake.notify_one();
        }
    }

    fn admit(&self, queue: &Queue, draft: &Draft, bound: Bound) -> Result<Room, LogDown> {
        if queue.closed {
            return Err(LogDown::Closed);
        }
        if bound == Bound::Owed {
            return Ok(Room::Free);
        }
        let open_max = self.config.open_max;
        let decision = matches!(draft.role, Role::Decision(_));
        if decision && read(&self.counters.owed) >= open_max as u64 {
            return Err(LogDown::TooManyOpen(open_max));
        }
        let full = queue.entries.len() >= self.config.queue_records
            || queue.bytes + draft.bytes.len() > self.config.queue_bytes;
        Ok(if full { Room::None } else { Room::Free })
    }

    /// Writes what is queued, up to `rounds` batches; then the keeper goes on.
    fn lead(&self, rounds: usize) {
        let turn = Turn { shared: self };
        for _ in 0..rounds {
            if !self.lead_once() {
                return std::mem::forget(turn); // nothing is left to hand over
            }
        }
    }

    /// Writes one batch, or refuses it. False when there is nothing more to do.
    fn lead_once(&self) -> bool {
        // Before anything is taken from the queue, so that `finish` finds it there or written.
        let mut writer = self.writer();
        let Some(batch) = self.take_batch() else { return false };
        let again = writer.write(batch);
        if !again.is_empty() {
            self.queue().kept.extend(again);
        }
        let due = writer.checkpoint_due();
        self.look(&writer);
        drop(writer);
        if due {
            self.queue().due = true;
            self.wake.notify_one();
        }
        self.room.notify_waiters();
        true
    }

    fn take_batch(&self) -> Option<Vec<Entry>> {
        let mut queue = self.queue();
        let mut batch = Vec::new();
        let mut bytes = 0;
        let most = match self.config.durability {
            Durability::Disk => BATCH_BYTES_DISK,
            Durability::Process => BATCH_BYTES,
        };
        while bytes < most
            && let Some(entry) = queue.entries.pop_front()
        {
            bytes += entry.draft.bytes.len();
            batch.push(entry);
        }
        queue.bytes -= bytes;
        if batch.is_empty() {
            (queue.lead, queue.writing) = (Lead::Nobody, None);
            return None;
        }
        queue.writing = Some(Instant::now());
        Some(batch)
    }

    /// The keeper thread: relieves callers, writes in `disk` mode, tends to time.
    pub(crate) fn keep(&self) {
        let watch = Watch { shared: self };
        self.keep_on();
        std::mem::forget(watch);
    }

    fn keep_on(&self) {
        let mut next = Instant::now() + TICK;
        loop {
            let closed = self.wait(next);
            self.flush();
            if closed {
                return;
            }
            if mem::take(&mut self.queue().due) || Instant::now() >= next {
                next = Instant::now() + TICK;
                self.tend();
            }
        }
    }

    /// Writes what is the keeper's to write by now.
    fn flush(&self) {
        let mut queue = self.queue();
        if queue.flush.is_some_and(|at| Instant::now() >= at) {
            queue.flush = None;
            if queue.lead == Lead::Nobody || queue.overdue() {
                queue.relieve();
            } else if queue.lead == Lead::Caller && queue.writing.is_none() {
                queue.flush = Some(Instant::now() + LINGER);
            }
        }
        let leads = queue.lead == Lead::Keeper;
        drop(queue);
        if leads {
            self.lead(usize::MAX);
        }
    }

    /// Waits until there is something to write, it is time, or the log closes.
    fn wait(&self, tick: Instant) -> bool {
        let mut queue = self.queue();
        loop {
            let until = queue.flush.map_or(tick, |at| at.min(tick));
            let patience = until.saturating_duration_since(Instant::now());
            let idle = queue.lead != Lead::Keeper && !queue.due && !queue.closed;
            if !idle || patience.is_zero() {
                return queue.closed;
            }
            let waited = self.wake.wait_timeout(queue, patience);
            queue = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    fn tend(&self) {
        let mut writer = self.writer();
        writer.tend();
        let well = writer.trouble.is_none();
        self.look(&writer);
        drop(writer);
        let mut queue = self.queue();
        if well && !queue.kept.is_empty() {
            let kept = mem::take(&mut queue.kept);
            queue.bytes += kept.iter().map(|entry| entry.draft.bytes.len()).sum::<usize>();
            kept.into_iter().rev().for_each(|entry| queue.entries.push_front(entry));
            if queue.lead == Lead::Nobody {
                queue.relieve();
            }
        }
        drop(queue);
        self.flush();
    }

    /// Notes what `health` tells, so that it need not wait for the writer.
    pub(crate) fn look(&self, writer: &Writer) {
        let segment = writer.segment.as_ref();
        let mut queue = self.queue();
        queue.seen.sequence = writer.head.sequence;
        let trouble = writer.trouble.as_ref();
        if queue.seen.trouble.is_some() || trouble.is_some() {
            queue.seen.trouble = trouble.map(ToString::to_string);
        }
        if queue.seen.segment.as_deref() != segment.map(|segment| segment.name.as_str()) {
            queue.seen.segment = segment.map(|segment| segment.name.clone());
        }
    }

    pub(crate) fn health(&self) -> Health {
        let queue = self.queue();
        let slow = queue.writing.is_some_and(|since| since.elapsed() > self.config.patience);
        let counters = &self.counters;
        let open_max = self.config.open_max;
        let trouble = match (queue.closed, slow, read(&counters.owed) >= open_max as u64) {
            (true, _, _) => Some(LogDown::Closed.to_string()),
            (false, true, _) => Some(LogDown::Slow(self.config.patience).to_string()),
            (false, false, true) => Some(LogDown::TooManyOpen(open_max).to_string()),
            (false, false, false) => queue.seen.trouble.clone(),
        };
        Health {
            ready: trouble.is_none(),
            trouble,
            written: read(&counters.written),
            bytes: read(&counters.bytes),
            batches: read(&counters.batches),
            refused: read(&counters.refused),
            folded: read(&counters.folded_total),
            lost: read(&counters.lost),
            open: read(&counters.owed),
            queued: (queue.entries.len() + queue.kept.len()) as u64,
            checkpoints: read(&counters.checkpoints),
            checkpoint_failures: read(&counters.checkpoint_failures),
            sequence: queue.seen.sequence,
            segment: queue.seen.segment.clone(),
        }
    }

    // A panic while holding either lock leaves data that the next write finds whole or fails on.
    fn queue(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn writer(&self) -> MutexGuard<'_, Writer> {
        self.writer.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use std::panic::{AssertUnwindSafe, catch_unwind};

    use super::*;
    use crate::recover;

    /// Else `finish`, which has the writer, would miss what somebody took and cannot write yet.
    #[test]
    fn nothing_is_taken_from_the_queue_before_it_can_be_written() {
        let dir = tempfile::tempdir().unwrap();
        let config = Arc::new(Config::new(dir.path()));
        let writer = recover::open(Arc::clone(&config)).unwrap();
        let draft = writer.own("checkpoint", None, crate::record::Sandbar::default()).unwrap();
        let shared = Shared::new(config, writer);
        shared.queue().bytes = draft.bytes.len();
        shared.queue().entries.push_back(Entry { draft, waiter: None });
        std::thread::scope(|scope| {
            let held = shared.writer();
            let leading = scope.spawn(|| shared.lead_once());
            std::thread::sleep(Duration::from_millis(50));
            assert_eq!(shared.queue().entries.len(), 1);
            drop(held);
            assert!(leading.join().unwrap());
        });
        assert_eq!(shared.queue().entries.len(), 0);
    }

    #[test]
    fn a_panic_while_writing_hands_the_turn_to_the_keeper() {
        let dir = tempfile::tempdir().unwrap();
        let config = Arc::new(Config::new(dir.path()));
        let writer = recover::open(Arc::clone(&config)).unwrap();
        let shared = Shared::new(config, writer);
        shared.queue().lead = Lead::Caller;
        let died = catch_unwind(AssertUnwindSafe(|| {
            let _turn = Turn { shared: &shared };
            panic!("as a writer may");
        }));
        assert!(died.is_err());
        assert_eq!(shared.queue().lead, Lead::Keeper);
        assert!(shared.health().ready);
        let died = catch_unwind(AssertUnwindSafe(|| {
            let _watch = Watch { shared: &shared };
            panic!("as the keeper may");
        }));
        assert!(died.is_err());
        assert!(!shared.health().ready, "nobody writes any more");
    }
}
