//! What each sandbox may use of the log: open decisions, and bytes on disk (P20).
//!
//! Both are totals divided by `rules::share`: a share is kept for each sandbox, the rest is common. Evidence is
//! deleted only by age, so a sandbox cannot push out another's: once its part is used up, its own attempts are refused
//! (`log_quota`) until its oldest segments expire, and everybody else goes on. The bytes of sandboxes that have left the
//! configuration reduce the total until they expire.
//!
//! One eighth of the bytes is a reserve for records without a sandbox (the log's own, unknown channels) and for
//! the few summaries that say what a sandbox without room still tries.

use std::collections::{HashMap, HashSet};
use std::sync::{Mutex, MutexGuard};
use std::time::{Duration, Instant};

use rules::ids::SandboxId;
use rules::share::{ShareTerms, SharedTotal};

use crate::draft::{Draft, DraftRole};
use crate::log::LogDown;
use crate::meter::SummaryRoom;
use crate::record::LINE_MAX;
use crate::usage::SegmentUsage;

/// Time between summaries of a sandbox that has used up its part, and how many it then gets.
const RESERVE_INTERVAL: Duration = Duration::from_secs(60);
const RESERVE_SUMMARIES: usize = 4;
/// The part of the bytes that is reserved for records without a sandbox.
const RESERVE_PART: u64 = 8;

#[derive(Debug)]
pub(crate) struct LogQuota {
    state: Mutex<QuotaState>,
}

#[derive(Debug)]
struct QuotaState {
    open_max: u64,
    max_bytes: u64,
    sandboxes: u64,
    open: SharedTotal,
    bytes: SharedTotal,
    /// Bytes of sandboxes that have left the configuration.
    departed: HashMap<SandboxId, u64>,
    /// Bytes of records without a sandbox.
    own: u64,
    /// When a sandbox without room last got summaries.
    reserve_used: HashMap<Option<SandboxId>, Instant>,
}

/// The bytes of the log on disk, and what they may be.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LogUsage {
    pub bytes: u64,
    pub max_bytes: u64,
    /// Bytes kept for each sandbox.
    pub share: u64,
    /// Bytes of each sandbox that has records, sorted by name.
    pub sandboxes: Vec<(SandboxId, SandboxUsage)>,
}

/// What one sandbox uses of the log.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SandboxUsage {
    pub bytes: u64,
    /// Decisions without outcome.
    pub open: u64,
}

impl LogQuota {
    /// Until the sandboxes are known, all bytes are common.
    pub(crate) fn new(open_max: u64, max_bytes: u64) -> Self {
        let common = |total| SharedTotal::new(ShareTerms { total, cap: total, share: 0 }, 0);
        let state = QuotaState {
            open_max,
            max_bytes,
            sandboxes: 0,
            open: common(open_max),
            bytes: common(max_bytes - max_bytes / RESERVE_PART),
            departed: HashMap::new(),
            own: 0,
            reserve_used: HashMap::new(),
        };
        Self { state: Mutex::new(state) }
    }

    /// Divides the totals among these sandboxes.
    pub(crate) fn set_sandboxes(&self, sandboxes: &HashSet<SandboxId>) {
        let mut state = self.lock();
        state.sandboxes = sandboxes.len() as u64;
        state.lift_terms();
        let used: Vec<(SandboxId, u64)> = state.bytes.used().map(|(id, used)| (id.clone(), used)).collect();
        for (id, used) in used.into_iter().filter(|(id, _)| !sandboxes.contains(id)) {
            state.bytes.give_back(&id, used);
            *state.departed.entry(id).or_default() += used;
        }
        for id in sandboxes {
            if let Some(used) = state.departed.remove(id) {
                state.bytes.take(id, used).unwrap_or_default(); // there are no terms to exceed
            }
        }
        state.reserve_used.retain(|id, _| id.as_ref().is_none_or(|id| sandboxes.contains(id)));
        state.apply_terms();
    }

    /// Counts the records of a segment that exists already.
    pub(crate) fn load(&self, usage: &SegmentUsage) {
        let mut state = self.lock();
        state.lift_terms();
        state.own += usage.own;
        for (id, used) in &usage.sandboxes {
            state.bytes.take(id, *used).unwrap_or_default(); // there are no terms to exceed
        }
        state.apply_terms();
    }

    /// Gives back the bytes of a segment that was removed or compressed.
    pub(crate) fn release(&self, usage: &SegmentUsage) {
        let mut state = self.lock();
        state.own = state.own.saturating_sub(usage.own);
        for (id, used) in &usage.sandboxes {
            state.give_back_bytes(id, *used);
        }
        state.apply_terms();
    }

    /// Reserves what a record needs; a decision also reserves the place and the bytes of its outcome, which must
    /// not be refused later.
    pub(crate) fn admit(&self, draft: &Draft) -> Result<(), LogDown> {
        let Some(sandbox) = &draft.sandbox else { return Ok(()) };
        let mut state = self.lock();
        let wanted = match &draft.role {
            DraftRole::Outcome(_) => return Ok(()),
            DraftRole::Event => draft.size(),
            DraftRole::Decision(owed) => draft.size() + owed.outcome_bytes,
        };
        let decision = matches!(draft.role, DraftRole::Decision(_));
        if decision {
            state.open.take(sandbox, 1).map_err(|full| LogDown::too_many_open(sandbox, full))?;
        }
        let taken = state.bytes.take(sandbox, wanted);
        if taken.is_err() && decision {
            state.open.give_back(sandbox, 1);
        }
        taken.map_err(|full| LogDown::quota(sandbox, full))
    }

    /// Gives back what [`Self::admit`] reserved for a record that is not written.
    pub(crate) fn withdraw(&self, draft: &Draft) {
        let Some(sandbox) = &draft.sandbox else { return };
        let mut state = self.lock();
        match &draft.role {
            DraftRole::Outcome(_) => {}
            DraftRole::Event => state.give_back_bytes(sandbox, draft.size()),
            DraftRole::Decision(owed) => {
                state.open.give_back(sandbox, 1);
                state.give_back_bytes(sandbox, draft.size() + owed.outcome_bytes);
            }
        }
    }

    /// Accounts for a record that was written; `reserved` is what the decision of an outcome reserved for it. Returns the
    /// bytes charged.
    pub(crate) fn settle(&self, draft: &Draft, reserved: u64) -> u64 {
        let size = draft.size();
        let mut state = self.lock();
        match (&draft.sandbox, &draft.role) {
            (None, _) => state.own += size,
            (Some(_), DraftRole::Decision(_) | DraftRole::Event) => {}
            (Some(sandbox), DraftRole::Outcome(_)) => {
                state.open.give_back(sandbox, 1);
                state.give_back_bytes(sandbox, reserved);
                if state.bytes.take(sandbox, size).is_err() {
                    return 0; // nothing was reserved: its decision is of an earlier process
                }
            }
        }
        size
    }

    /// Returns whether a record of this sandbox, or of none, has room.
    pub(crate) fn has_room(&self, sandbox: Option<&SandboxId>) -> bool {
        self.lock().has_room(sandbox)
    }

    /// Returns how many summaries of a sandbox may be written now.
    pub(crate) fn summary_room(&self, sandbox: Option<&SandboxId>) -> SummaryRoom {
        let mut state = self.lock();
        if state.has_room(sandbox) {
            return SummaryRoom::Free;
        }
        let now = Instant::now();
        let key = sandbox.cloned();
        let waited =
            state.reserve_used.get(&key).is_none_or(|at| now.duration_since(*at) >= RESERVE_INTERVAL);
        if !waited || (sandbox.is_some() && !state.has_room(None)) {
            return SummaryRoom::Few(0);
        }
        state.reserve_used.insert(key, now);
        SummaryRoom::Few(RESERVE_SUMMARIES)
    }

    pub(crate) fn usage(&self) -> LogUsage {
        let state = self.lock();
        let mut sandboxes: HashMap<SandboxId, SandboxUsage> = HashMap::new();
        let departed = state.departed.iter().map(|(id, used)| (id, *used));
        for (id, bytes) in state.bytes.used().chain(departed) {
            sandboxes.entry(id.clone()).or_default().bytes += bytes;
        }
        for (id, open) in state.open.used() {
            sandboxes.entry(id.clone()).or_default().open = open;
        }
        let mut sandboxes: Vec<_> = sandboxes.into_iter().collect();
        sandboxes.sort_by(|(one, _), (other, _)| one.cmp(other));
        LogUsage {
            bytes: state.own + sandboxes.iter().map(|(_, usage)| usage.bytes).sum::<u64>(),
            max_bytes: state.max_bytes,
            share: state.bytes.terms().share,
            sandboxes,
        }
    }

    fn lock(&self) -> MutexGuard<'_, QuotaState> {
        sys::lock(&self.state)
    }
}

impl QuotaState {
    fn lift_terms(&mut self) {
        let unlimited = ShareTerms { total: u64::MAX, cap: u64::MAX, share: 0 };
        self.bytes.set_terms(unlimited, 0);
    }

    fn apply_terms(&mut self) {
        let departed: u64 = self.departed.values().sum();
        let total = (self.max_bytes - self.reserve()).saturating_sub(departed);
        let divided = |total, sandboxes| match sandboxes {
            0 => ShareTerms { total, cap: total, share: 0 },
            _ => ShareTerms::halved(total, total, sandboxes),
        };
        self.bytes.set_terms(divided(total, self.sandboxes), self.sandboxes);
        self.open.set_terms(divided(self.open_max, self.sandboxes), self.sandboxes);
    }

    fn reserve(&self) -> u64 {
        self.max_bytes / RESERVE_PART
    }

    fn give_back_bytes(&mut self, sandbox: &SandboxId, bytes: u64) {
        let Some(departed) = self.departed.get_mut(sandbox) else {
            return self.bytes.give_back(sandbox, bytes);
        };
        let rest = bytes.saturating_sub(*departed);
        *departed -= bytes - rest;
        if *departed == 0 {
            self.departed.remove(sandbox);
        }
        self.bytes.give_back(sandbox, rest);
    }

    fn has_room(&mut self, sandbox: Option<&SandboxId>) -> bool {
        let line = LINE_MAX as u64;
        let Some(sandbox) = sandbox else { return self.own + line <= self.reserve() };
        let room = self.bytes.take(sandbox, line).is_ok();
        if room {
            self.bytes.give_back(sandbox, line);
        }
        room
    }
}
