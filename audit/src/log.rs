//! The log as its callers see it: submit a record, wait for the receipt.
//!
//! Callers put finished drafts into a bounded queue. Where `durability` is `process`, whoever
//! finds nobody writing lets the others of its thread have their turn once and then writes
//! everybody's batch itself; a caller so caught is relieved by the keeper thread after a few
//! rounds. Where it is `disk`, the keeper always writes. Nobody waits for an outcome: it goes with
//! the next batch, or by the keeper a few milliseconds later. A caller that goes away while it
//! waits leaves its record in the queue: the chain knows nothing of callers.

use std::collections::VecDeque;
use std::io;
use std::mem;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use tokio::sync::{Notify, oneshot};
use tokio::time::timeout_at;

use crate::attempt::{Arrival, Attempt, Connection, Facts, Finding, Lifecycle, Meter};
use crate::chain::Head;
use crate::compose;
use crate::config::{Config, Durability};
use crate::draft::{Draft, DraftError, Role};
use crate::health::{Counters, Health, read};
use crate::id::Ids;
use crate::open::OpenRecord;
use crate::recover::{self, OpenError};
use crate::writer::{Entry, Writer};

/// Most bytes that are taken into one write: few enough to be copied while the cache holds them.
const BATCH_BYTES: usize = 64 << 10;
/// Batches that a caller writes for others before the keeper relieves it.
const ROUNDS: usize = 16;
/// How often the keeper looks at the clock, and tries again when writing fails.
const TICK: Duration = Duration::from_millis(100);

/// How long an outcome waits for a batch to go with.
const LINGER: Duration = Duration::from_millis(5);

/// Why a record could not be written. The attempt it belongs to is refused.
#[derive(Clone, Debug, thiserror::Error)]
pub enum LogDown {
    #[error("the access log is closed")]
    Closed,
    #[error("a record does not fit the access log: {0}")]
    Encode(String),
    #[error("the access log takes no more: its queue stayed full for {0:?}")]
    Full(Duration),
    #[error("the access log is too slow: a record was not written within {0:?}")]
    Slow(Duration),
    #[error("{0} attempts are without outcome: raise the log's `open_max` or find what keeps them")]
    TooManyOpen(usize),
    #[error("the access log is not on disk: {0}; check the disk")]
    Unsynced(Arc<io::Error>),
    #[error("the access log cannot be written: {0}; make room or mend its directory")]
    Unwritable(Arc<io::Error>),
}

impl LogDown {
    pub(crate) fn unwritable(error: io::Error) -> Self {
        Self::Unwritable(Arc::new(error))
    }

    /// Whether the record may stand in the log although its caller was refused.
    pub(crate) fn may_be_recorded(&self) -> bool {
        match self {
            LogDown::Slow(_) | LogDown::Unsynced(_) => true,
            LogDown::Closed
            | LogDown::Encode(_)
            | LogDown::Full(_)
            | LogDown::TooManyOpen(_)
            | LogDown::Unwritable(_) => false,
        }
    }
}

impl From<DraftError> for LogDown {
    fn from(error: DraftError) -> Self {
        Self::Encode(error.to_string())
    }
}

/// The access log. Cheap to clone; the last clone closes it.
#[derive(Clone)]
pub struct Log {
    shared: Arc<Shared>,
    _closer: Arc<Closer>,
}

impl std::fmt::Debug for Log {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Log").field("dir", &self.shared.config.dir).finish_non_exhaustive()
    }
}

pub(crate) struct Shared {
    pub(crate) config: Arc<Config>,
    pub(crate) counters: Arc<Counters>,
    ids: Arc<Ids>,
    queue: Mutex<Queue>,
    /// Wakes the keeper.
    wake: Condvar,
    /// Wakes callers that wait for room.
    room: Notify,
    writer: Mutex<Writer>,
}

#[derive(Default)]
struct Queue {
    entries: VecDeque<Entry>,
    bytes: usize,
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

impl Log {
    /// Opens the log of a directory: verifies its tail, goes on where it ended, closes what an
    /// earlier process left open.
    ///
    /// # Errors
    ///
    /// Returns [`OpenError`] when the tail does not verify or the directory cannot be written:
    /// nothing may be served then.
    pub fn open(config: Config) -> Result<Self, OpenError> {
        let config = Arc::new(config);
        let writer = recover::open(Arc::clone(&config))?;
        let shared = Arc::new(Shared {
            counters: Arc::clone(&writer.counters),
            ids: Arc::clone(&writer.ids),
            config,
            queue: Mutex::default(),
            wake: Condvar::new(),
            room: Notify::new(),
            writer: Mutex::new(writer),
        });
        shared.look(&shared.writer());
        let keeper = Arc::clone(&shared);
        let thread = std::thread::Builder::new()
            .name("access-log".to_owned())
            .spawn(move || keeper.keep())
            .map_err(OpenError::Thread)?;
        let closer = Closer { shared: Arc::clone(&shared), keeper: Mutex::new(Some(thread)) };
        Ok(Self { shared, _closer: Arc::new(closer) })
    }

    /// Opens the record of an attempt, at accept.
    pub fn open_record(&self, arrival: Arrival) -> OpenRecord {
        OpenRecord::new(self.clone(), self.attempt(arrival))
    }

    pub(crate) fn attempt(&self, arrival: Arrival) -> Attempt {
        Attempt {
            id: self.shared.ids.next(),
            arrival,
            subject: None,
            facts: Facts::Connection(Connection::default()),
            verdict: None,
            dialled: None,
            meter: Arc::new(Meter::default()),
        }
    }

    /// Records something that happened to Sandbar itself.
    ///
    /// # Errors
    ///
    /// Returns [`LogDown`] when it could not be written.
    pub async fn lifecycle(&self, event: &Lifecycle) -> Result<Receipt, LogDown> {
        self.submit(compose::lifecycle(event, self.shared.ids.next())?).await
    }

    pub(crate) async fn finding(
        &self,
        finding: &Finding,
        attempt: &Attempt,
    ) -> Result<Receipt, LogDown> {
        self.submit(compose::finding(finding, self.shared.ids.next(), Some(attempt))?).await
    }

    /// Ends the segment and begins the next, as for those who move files away themselves.
    ///
    /// # Errors
    ///
    /// Returns [`LogDown`] when the next cannot be made; nothing is written until it can.
    pub fn reopen(&self) -> Result<(), LogDown> {
        let mut writer = self.shared.writer();
        let result = writer.rotate();
        self.shared.look(&writer);
        result
    }

    /// Where the chain ends.
    pub fn head(&self) -> Head {
        self.shared.writer().head
    }

    /// How the log is doing. Never waits for a disk.
    pub fn health(&self) -> Health {
        self.shared.health()
    }

    /// Writes what waits, a last record and a last checkpoint. Later records are refused.
    pub fn close(&self) {
        self._closer.close();
    }

    pub(crate) fn config(&self) -> &Config {
        &self.shared.config
    }

    /// Writes a record and waits until it is written.
    pub(crate) async fn submit(&self, draft: Draft) -> Result<Receipt, LogDown> {
        let patience = self.shared.config.patience;
        let deadline = tokio::time::Instant::now() + patience;
        let (sender, mut receiver) = oneshot::channel();
        let mut entry = Entry { draft, waiter: Some(sender) };
        loop {
            let mut room = std::pin::pin!(self.shared.room.notified());
            room.as_mut().enable(); // before looking, or the wake-up could be missed
            match self.shared.enqueue(entry, Bound::Queue) {
                Enqueued::Lead(lead) => {
                    tokio::task::yield_now().await;
                    break lead.write();
                }
                Enqueued::Taken => break,
                Enqueued::Refused(down) => return Err(down),
                Enqueued::Full(back) => entry = back,
            }
            timeout_at(deadline, room).await.map_err(|_| LogDown::Full(patience))?;
        }
        if let Ok(result) = receiver.try_recv() {
            return result.map(Receipt::new); // written in this very thread: no timer is needed
        }
        let answer = timeout_at(deadline, receiver).await.map_err(|_| LogDown::Slow(patience))?;
        answer.unwrap_or(Err(LogDown::Closed)).map(Receipt::new)
    }

    /// Counts an attempt that sent nothing and whose record could not be written.
    pub(crate) fn fold(&self) {
        self.shared.counters.fold(1);
    }

    /// Writes a record without waiting for it. An outcome is always taken; anything else is
    /// counted when there is no room.
    pub(crate) fn post(&self, draft: Result<Draft, DraftError>) {
        let counters = &self.shared.counters;
        let Ok(draft) = draft else { return Counters::add(&counters.lost, 1) };
        let outcome = matches!(draft.role, Role::Outcome(_));
        let bound = if outcome { Bound::Owed } else { Bound::Queue };
        match self.shared.enqueue(Entry { draft, waiter: None }, bound) {
            Enqueued::Lead(_) | Enqueued::Taken => {}
            Enqueued::Full(_) | Enqueued::Refused(_) if outcome => Counters::add(&counters.lost, 1),
            Enqueued::Full(_) | Enqueued::Refused(_) => counters.fold(1),
        }
    }
}

/// Proof that a record is written. Only the log makes one, and dialling demands it.
#[derive(Debug)]
#[must_use = "nothing may leave without the receipt of its record"]
pub struct Receipt {
    sequence: u64,
}

impl Receipt {
    fn new(sequence: u64) -> Self {
        Self { sequence }
    }

    /// The number of the record.
    pub fn sequence(&self) -> u64 {
        self.sequence
    }
}

/// Which bound a record is held to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Bound {
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

enum Enqueued<'a> {
    /// No room: the caller may wait for some.
    Full(Entry),
    /// Nobody writes: the caller has to.
    Lead(Leader<'a>),
    Refused(LogDown),
    Taken,
}

/// The duty to write what is queued. A caller that goes away hands it to the keeper, and one that
/// is kept from its turn for too long finds that the keeper took it.
struct Leader<'a> {
    shared: &'a Shared,
    term: u64,
}

impl Leader<'_> {
    fn write(self) {
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
    /// Queues a record, and sees to it that somebody writes it.
    fn enqueue(&self, entry: Entry, bound: Bound) -> Enqueued<'_> {
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
        for _ in 0..rounds {
            if !self.lead_once() {
                return;
            }
        }
        self.queue().lead = Lead::Keeper;
        self.wake.notify_one();
    }

    /// Writes one batch. False when there is nothing more to do, or writing fails.
    fn lead_once(&self) -> bool {
        let Some(batch) = self.take_batch() else { return false };
        let mut writer = self.writer();
        let again = writer.write(batch);
        let due = writer.checkpoint_due();
        self.look(&writer);
        drop(writer);
        if due {
            self.queue().due = true;
            self.wake.notify_one();
        }
        self.room.notify_waiters();
        if again.is_empty() {
            return true;
        }
        let mut queue = self.queue();
        for entry in again.into_iter().rev() {
            queue.bytes += entry.draft.bytes.len();
            queue.entries.push_front(entry);
        }
        (queue.lead, queue.writing) = (Lead::Nobody, None);
        false
    }

    fn take_batch(&self) -> Option<Vec<Entry>> {
        let mut queue = self.queue();
        let mut batch = Vec::new();
        let mut bytes = 0;
        while bytes < BATCH_BYTES
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
    fn keep(&self) {
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
        if well && queue.lead == Lead::Nobody && !queue.entries.is_empty() {
            queue.lead = Lead::Keeper; // what was kept while writing failed
            drop(queue);
            self.lead(usize::MAX);
        }
    }

    /// Notes what `health` tells, so that it need not wait for the writer.
    fn look(&self, writer: &Writer) {
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

    fn health(&self) -> Health {
        let queue = self.queue();
        let slow = queue.writing.is_some_and(|since| since.elapsed() > self.config.patience);
        let trouble = match (queue.closed, slow) {
            (true, _) => Some(LogDown::Closed.to_string()),
            (false, true) => Some(LogDown::Slow(self.config.patience).to_string()),
            (false, false) => queue.seen.trouble.clone(),
        };
        let counters = &self.counters;
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
            queued: queue.entries.len() as u64,
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

    fn writer(&self) -> MutexGuard<'_, Writer> {
        self.writer.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Closes the log when its last user is gone.
struct Closer {
    shared: Arc<Shared>,
    keeper: Mutex<Option<JoinHandle<()>>>,
}

impl Closer {
    fn close(&self) {
        let keeper = self.keeper.lock().unwrap_or_else(PoisonError::into_inner).take();
        let Some(keeper) = keeper else { return };
        self.shared.queue().closed = true;
        self.shared.wake.notify_one();
        keeper.join().unwrap_or_default(); // a keeper that panicked writes no more either way
        let mut writer = self.shared.writer();
        let rest = mem::take(&mut self.shared.queue().entries).into();
        writer.tend();
        let unwritten = writer.write(rest);
        Counters::add(&self.shared.counters.lost, unwritten.len() as u64);
        writer.stop();
    }
}

impl Drop for Closer {
    fn drop(&mut self) {
        self.close();
    }
}
