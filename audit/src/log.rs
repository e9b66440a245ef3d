//! The log as its callers see it: submit a record, wait for the receipt.
//!
//! No record, no traffic: whoever gets no receipt must refuse.

use std::io;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use tokio::sync::oneshot;
use tokio::time::timeout_at;

use crate::attempt::{Arrival, Attempt, Connection, Facts, Finding, Lifecycle, Meter};
use crate::chain::Head;
use crate::compose::{self, Stage};
use crate::config::Config;
use crate::draft::{Draft, DraftError, Role};
use crate::health::{Counters, Health};
use crate::open::OpenRecord;
use crate::queue::{Bound, Enqueued, Shared};
use crate::recover::{self, OpenError};
use crate::witness::Seen;
use crate::writer::Entry;

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
        let shared = Arc::new(Shared::new(config, writer));
        let keeper = Arc::clone(&shared);
        let thread = std::thread::Builder::new()
            .name("access-log".to_owned())
            .spawn(move || keeper.keep())
            .map_err(OpenError::Thread)?;
        let closer = Closer { shared: Arc::clone(&shared), keeper: Mutex::new(Some(thread)) };
        Ok(Self { shared, _closer: Arc::new(closer) })
    }

    /// Lets somebody look on as attempts are recorded; false if somebody does already.
    ///
    /// Traffic waits for the one who looks on, so it must be quick.
    pub fn watch(&self, eye: impl Fn(&Seen<'_>) + Send + Sync + 'static) -> bool {
        self.shared.witness.seat(Box::new(eye))
    }

    pub(crate) fn tell(&self, attempt: &Attempt, stage: &Stage<'_>) {
        self.shared.witness.see(attempt, stage);
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
    pub async fn lifecycle(&self, event: &Lifecycle) -> Result<(), LogDown> {
        let draft = compose::lifecycle(event, self.shared.ids.next());
        self.submit(draft, || ()).await.map(drop)
    }

    pub(crate) async fn finding(
        &self,
        finding: &Finding,
        attempt: &Attempt,
    ) -> Result<(), LogDown> {
        let draft = compose::finding(finding, self.shared.ids.next(), Some(attempt));
        self.submit(draft, || ()).await.map(drop)
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

    /// Writes a record, waits until it is written and returns its number. `queued` is called once
    /// it will be written whether or not the caller waits on.
    pub(crate) async fn submit(
        &self,
        draft: Result<Draft, DraftError>,
        queued: impl FnOnce(),
    ) -> Result<u64, LogDown> {
        let result = match draft {
            Ok(draft) => self.wait_for(draft, queued).await,
            Err(error) => Err(error.into()),
        };
        if result.is_err() {
            Counters::add(&self.shared.counters.refused, 1);
        }
        result
    }

    async fn wait_for(&self, draft: Draft, queued: impl FnOnce()) -> Result<u64, LogDown> {
        let bound = bound(&draft);
        let patience = self.shared.config.patience;
        let deadline = tokio::time::Instant::now() + patience;
        let (sender, mut receiver) = oneshot::channel();
        let mut entry = Entry { draft, waiter: Some(sender) };
        loop {
            let mut room = std::pin::pin!(self.shared.room.notified());
            room.as_mut().enable(); // before looking, or the wake-up could be missed
            match self.shared.enqueue(entry, bound) {
                Enqueued::Lead(lead) => {
                    queued();
                    tokio::task::yield_now().await;
                    break lead.write();
                }
                Enqueued::Taken => break queued(),
                Enqueued::Refused(down) => return Err(down),
                Enqueued::Full(back) => entry = back,
            }
            timeout_at(deadline, room).await.map_err(|_| LogDown::Full(patience))?;
        }
        if let Ok(result) = receiver.try_recv() {
            return result; // written in this very thread: no timer is needed
        }
        let answer = timeout_at(deadline, receiver).await.map_err(|_| LogDown::Slow(patience))?;
        answer.unwrap_or(Err(LogDown::Closed))
    }

    /// Writes a record without waiting for it. An outcome is always taken; anything else is
    /// counted when there is no room.
    pub(crate) fn post(&self, draft: Result<Draft, DraftError>) {
        let counters = &self.shared.counters;
        let Ok(draft) = draft else { return Counters::add(&counters.lost, 1) };
        let bound = bound(&draft);
        let outcome = bound == Bound::Owed;
        match self.shared.enqueue(Entry { draft, waiter: None }, bound) {
            Enqueued::Lead(_) | Enqueued::Taken => {}
            Enqueued::Full(_) | Enqueued::Refused(_) if outcome => Counters::add(&counters.lost, 1),
            Enqueued::Full(_) | Enqueued::Refused(_) => counters.fold(1),
        }
    }
}

/// An outcome is held to the bound of the decision it belongs to.
fn bound(draft: &Draft) -> Bound {
    match draft.role {
        Role::Outcome(_) => Bound::Owed,
        Role::Decision(_) | Role::Event => Bound::Queue,
    }
}

/// Proof that a decision is written. Only [`OpenRecord::decided`] gives one, and dialling demands
/// it.
#[derive(Debug)]
#[must_use = "nothing may leave without the receipt of its record"]
pub struct Receipt {
    sequence: u64,
}

impl Receipt {
    pub(crate) fn new(sequence: u64) -> Self {
        Self { sequence }
    }

    /// The number of the record.
    pub fn sequence(&self) -> u64 {
        self.sequence
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
        self.shared.shut();
        keeper.join().unwrap_or_default(); // a keeper that panicked writes no more either way
        self.shared.finish();
    }
}

impl Drop for Closer {
    fn drop(&mut self) {
        self.close();
    }
}
