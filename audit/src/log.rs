//! The log as its callers see it: submit a record, wait for the receipt.
//!
//! No record, no traffic: a caller without a receipt must refuse the attempt.

use std::io;
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

use rules::Reason;
use rules::ids::SandboxId;
use rules::share::ShareExhausted;
use tokio::sync::oneshot;
use tokio::time::timeout_at;

use crate::attempt::{
    AttemptState, ByteCount, DetectionFinding, Lifecycle, RecordedArrival, RecordedConnection, RecordedFacts,
};
use crate::chain::ChainHead;
use crate::compose::{self, DraftStage};
use crate::config::LogConfig;
use crate::draft::{Draft, DraftError, DraftRole};
use crate::health::{Counters, LogHealth};
use crate::meter::{FoldKind, FoldedRecord, LastAttempt, Metered};
use crate::observer::AttemptEvent;
use crate::open_record::OpenRecord;
use crate::queue::{EnqueueOutcome, LogCore, QueueBound};
use crate::quota::LogUsage;
use crate::recover::{self, OpenError};
use crate::writer::QueuedRecord;

/// Why a record could not be written. The attempt it belongs to must be refused.
#[derive(Clone, Debug, thiserror::Error)]
pub enum LogDown {
    #[error("the access log is closed")]
    Closed,
    #[error("cannot write a record: {0}")]
    Encode(String),
    #[error("the access log queue stayed full for {0:?}")]
    Full(Duration),
    #[error("the access log is too slow: a record was not written within {0:?}")]
    Slow(Duration),
    #[error("the log has no room for sandbox `{sandbox}`, which {exhausted} (bytes)")]
    Quota { sandbox: SandboxId, exhausted: Box<ShareExhausted> },
    #[error(
        "open decisions in the log: sandbox `{sandbox}` {exhausted}; `open_decisions` under `[log]` sets the total"
    )]
    TooManyOpen { sandbox: SandboxId, exhausted: Box<ShareExhausted> },
    #[error("cannot sync the access log to disk: {0}; check the disk")]
    Unsynced(Arc<io::Error>),
    #[error("cannot write the access log: {0}; free disk space or fix its directory")]
    Unwritable(Arc<io::Error>),
}

impl LogDown {
    pub(crate) fn unwritable(error: io::Error) -> Self {
        Self::Unwritable(Arc::new(error))
    }

    pub(crate) fn quota(sandbox: &SandboxId, exhausted: ShareExhausted) -> Self {
        Self::Quota { sandbox: sandbox.clone(), exhausted: Box::new(exhausted) }
    }

    pub(crate) fn too_many_open(sandbox: &SandboxId, exhausted: ShareExhausted) -> Self {
        Self::TooManyOpen { sandbox: sandbox.clone(), exhausted: Box::new(exhausted) }
    }

    /// Returns the reason for the refusal of the attempt.
    pub fn reason(&self) -> Reason {
        match self {
            LogDown::Quota { .. } => Reason::LogQuota,
            LogDown::TooManyOpen { .. } => Reason::QuotaExhausted,
            LogDown::Closed
            | LogDown::Encode(_)
            | LogDown::Full(_)
            | LogDown::Slow(_)
            | LogDown::Unsynced(_)
            | LogDown::Unwritable(_) => Reason::LogUnwritable,
        }
    }

    /// Whether the record may be in the log although its caller was refused.
    pub(crate) fn may_be_recorded(&self) -> bool {
        match self {
            LogDown::Slow(_) | LogDown::Unsynced(_) => true,
            LogDown::Closed
            | LogDown::Encode(_)
            | LogDown::Full(_)
            | LogDown::Quota { .. }
            | LogDown::TooManyOpen { .. }
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
    shared: Arc<LogCore>,
    _closer: Arc<LogCloser>,
}

impl std::fmt::Debug for Log {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Log").field("dir", &self.shared.config.dir).finish_non_exhaustive()
    }
}

impl Log {
    /// Opens the log of a directory: verifies its tail, continues the chain, and closes the decisions
    /// that an earlier process left open.
    ///
    /// # Errors
    ///
    /// Returns [`OpenError`] if the tail does not verify or the directory is not writable. Sandbar
    /// must not serve then.
    pub fn open(config: LogConfig) -> Result<Self, OpenError> {
        let config = Arc::new(config);
        let writer = recover::open(Arc::clone(&config))?;
        let shared = Arc::new(LogCore::new(config, writer));
        let keeper = Arc::clone(&shared);
        let thread = std::thread::Builder::new()
            .name("access-log".to_owned())
            .spawn(move || keeper.run_keeper())
            .map_err(OpenError::Thread)?;
        let closer = LogCloser { shared: Arc::clone(&shared), keeper: Mutex::new(Some(thread)) };
        Ok(Self { shared, _closer: Arc::new(closer) })
    }

    /// Subscribes an observer to attempts as they are recorded. Returns false if there is one already.
    ///
    /// It runs on the path of the traffic, so it must be quick.
    pub fn subscribe(&self, observer: impl Fn(&AttemptEvent<'_>) + Send + Sync + 'static) -> bool {
        self.shared.observer.subscribe(Box::new(observer))
    }

    pub(crate) fn notify_observer(&self, attempt: &AttemptState, stage: &DraftStage<'_>) {
        self.shared.observer.notify(attempt, stage);
    }

    /// Opens the record of an attempt, at accept.
    pub fn open_record(&self, arrival: RecordedArrival) -> OpenRecord {
        OpenRecord::new(self.clone(), self.new_attempt(arrival))
    }

    pub(crate) fn new_attempt(&self, arrival: RecordedArrival) -> AttemptState {
        AttemptState {
            id: self.shared.ids.next(),
            arrival,
            subject: None,
            sandbox: None,
            facts: RecordedFacts::Connection(RecordedConnection::default()),
            verdict: None,
            dialled: None,
            byte_count: Arc::new(ByteCount::default()),
            summary: None,
        }
    }

    /// Divides the log among these sandboxes. To be called at the start and whenever they change.
    pub fn set_sandboxes(&self, sandboxes: impl IntoIterator<Item = SandboxId>) {
        self.shared.quota.set_sandboxes(&sandboxes.into_iter().collect());
    }

    /// Returns what each sandbox uses of the log.
    pub fn usage(&self) -> LogUsage {
        self.shared.quota.usage()
    }

    /// Counts an attempt that sent nothing in a summary, if it gets no record of its own. Returns the id of
    /// the summary.
    pub(crate) fn fold(&self, attempt: &AttemptState, stage: &DraftStage<'_>) -> Option<u128> {
        let kind = FoldKind::of_attempt(attempt, stage)?;
        let folded = self.meter(attempt, kind, || FoldedRecord::of_attempt(attempt, stage))?;
        self.notify_observer(attempt, stage);
        Some(folded)
    }

    fn meter(
        &self,
        attempt: &AttemptState,
        kind: FoldKind,
        first: impl FnOnce() -> FoldedRecord,
    ) -> Option<u128> {
        let LogCore { meter, quota, counters, .. } = &*self.shared;
        let sandbox = attempt.sandbox.clone();
        let room = quota.has_room(sandbox.as_ref());
        let count = attempt.folded().saturating_add(1);
        let last = LastAttempt {
            time: compose::unix_millis(),
            host: attempt.host().cloned(),
            attempted: attempt.is_refused().then(|| attempt.attempted()).flatten(),
        };
        match meter.admit_or_fold(sandbox, kind, (count, last), room, first) {
            Metered::Recorded => None,
            Metered::Folded(id) => Some(id),
            Metered::Counted => {
                counters.count_folded(count);
                Some(attempt.id)
            }
        }
    }

    /// Charges a record that the meter admitted.
    pub(crate) fn charge_meter(&self, draft: &Draft) {
        self.shared.meter.charge(draft.sandbox.as_ref(), draft.bytes.len());
    }

    /// Records something that happened to Sandbar itself.
    ///
    /// # Errors
    ///
    /// Returns [`LogDown`] if it could not be written.
    pub async fn record_lifecycle(&self, event: &Lifecycle) -> Result<(), LogDown> {
        let draft = compose::draft_lifecycle(event, self.shared.ids.next());
        self.submit(draft, || ()).await.map(drop)
    }

    pub(crate) async fn record_finding(
        &self,
        finding: &DetectionFinding,
        attempt: &AttemptState,
    ) -> Result<(), LogDown> {
        let draft = compose::draft_finding(finding, self.shared.ids.next(), Some(attempt));
        draft.iter().for_each(|draft| self.charge_meter(draft));
        self.submit(draft, || ()).await.map(drop)
    }

    /// Counts a finding in a summary, if it gets no record of its own. Returns the id of the attempt that the
    /// summary names.
    pub(crate) fn fold_finding(&self, finding: &DetectionFinding, attempt: &AttemptState) -> Option<u128> {
        let first = || FoldedRecord::Finding(attempt.clone(), finding.clone(), self.shared.ids.next());
        self.meter(attempt, FoldKind::of_finding(finding), first)
    }

    /// Ends the segment and starts the next, for operators who move files away themselves.
    ///
    /// # Errors
    ///
    /// Returns [`LogDown`] if the next segment cannot be created; until it can, nothing is written.
    pub fn reopen(&self) -> Result<(), LogDown> {
        let mut writer = self.shared.lock_writer();
        let result = writer.rotate();
        self.shared.update_status(&writer);
        result
    }

    /// Returns the head of the chain.
    pub fn head(&self) -> ChainHead {
        self.shared.lock_writer().head
    }

    /// Returns the health of the log. Never waits for a disk.
    pub fn health(&self) -> LogHealth {
        self.shared.health()
    }

    /// Writes queued records, the final record and the final checkpoint. Later records are refused.
    pub fn close(&self) {
        self._closer.close();
    }

    pub(crate) fn config(&self) -> &LogConfig {
        &self.shared.config
    }

    /// Submits a record, waits until it is written and returns its number. Calls `queued` as soon as
    /// the record will be written even if the caller is cancelled.
    pub(crate) async fn submit(
        &self,
        draft: Result<Draft, DraftError>,
        queued: impl FnOnce(),
    ) -> Result<u64, LogDown> {
        let result = match draft {
            Ok(draft) => self.enqueue_and_wait(draft, queued).await,
            Err(error) => Err(error.into()),
        };
        if result.is_err() {
            Counters::add(&self.shared.counters.refused, 1);
        }
        result
    }

    async fn enqueue_and_wait(&self, draft: Draft, queued: impl FnOnce()) -> Result<u64, LogDown> {
        let bound = queue_bound(&draft);
        let patience = self.shared.config.patience;
        let deadline = tokio::time::Instant::now() + patience;
        let (sender, mut receiver) = oneshot::channel();
        let mut entry = QueuedRecord { draft, waiter: Some(sender) };
        loop {
            let mut room = std::pin::pin!(self.shared.room.notified());
            room.as_mut().enable(); // before checking, or the wake-up could be missed
            match self.shared.enqueue(entry, bound) {
                EnqueueOutcome::Lead(lead) => {
                    queued();
                    tokio::task::yield_now().await; // lets others join the batch, see `queue`
                    break lead.write();
                }
                EnqueueOutcome::Taken => break queued(),
                EnqueueOutcome::Refused(down) => return Err(down),
                EnqueueOutcome::Full(back) => entry = back,
            }
            timeout_at(deadline, room).await.map_err(|_| LogDown::Full(patience))?;
        }
        if let Ok(result) = receiver.try_recv() {
            return result; // written on this thread: no need for a timer
        }
        let answer = timeout_at(deadline, receiver).await.map_err(|_| LogDown::Slow(patience))?;
        answer.unwrap_or(Err(LogDown::Closed))
    }

    /// Submits a record without waiting for it. An outcome is always accepted; any other record is only
    /// counted if the queue is full.
    pub(crate) fn post(&self, draft: Result<Draft, DraftError>) {
        let counters = &self.shared.counters;
        let Ok(draft) = draft else { return Counters::add(&counters.lost, 1) };
        let bound = queue_bound(&draft);
        let outcome = bound == QueueBound::Owed;
        match self.shared.enqueue(QueuedRecord { draft, waiter: None }, bound) {
            EnqueueOutcome::Lead(_) | EnqueueOutcome::Taken => {}
            EnqueueOutcome::Full(_) | EnqueueOutcome::Refused(_) if outcome => {
                Counters::add(&counters.lost, 1)
            }
            EnqueueOutcome::Full(_) | EnqueueOutcome::Refused(_) => counters.count_folded(1),
        }
    }
}

/// Returns the bound for a record: an outcome counts against the open decisions, like its decision.
fn queue_bound(draft: &Draft) -> QueueBound {
    match draft.role {
        DraftRole::Outcome(_) => QueueBound::Owed,
        DraftRole::Decision(_) | DraftRole::Event => QueueBound::Queue,
    }
}

/// Proof that a decision is written. Only [`OpenRecord::record_decision`] returns one, and dialling
/// requires it.
#[derive(Debug)]
#[must_use = "no traffic without the receipt of its record"]
pub struct Receipt {
    sequence: u64,
}

impl Receipt {
    pub(crate) fn new(sequence: u64) -> Self {
        Self { sequence }
    }

    /// Returns the number of the record.
    pub fn sequence(&self) -> u64 {
        self.sequence
    }
}

/// Closes the log when its last handle is dropped.
struct LogCloser {
    shared: Arc<LogCore>,
    keeper: Mutex<Option<JoinHandle<()>>>,
}

impl LogCloser {
    fn close(&self) {
        let keeper = sys::lock(&self.keeper).take();
        let Some(keeper) = keeper else { return };
        self.shared.stop_accepting();
        keeper.join().unwrap_or_default(); // a panic closed the log already
        self.shared.write_remaining();
    }
}

impl Drop for LogCloser {
    fn drop(&mut self) {
        self.close();
    }
}
