//! What the inspection remembers of one sandbox: priced requests, the form of requests per host, recalled text, pieces of
//! canaries, and which bank's text went where. Kept over restarts, as keyed digests and never as content.
//!
//! Its memory comes from the sandbox's quota (P17, P20). Where that is used up, the sandbox forgets its own oldest: hosts,
//! which makes requests dearer (P19) and never cheaper, and for recalled text (P15) hosts first. No request is refused.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use anyhow::Context;
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use rules::budget::BudgetKind;
use rules::budget::window::SlidingWindow;
use rules::ids::{BankId, SandboxId};
use rules::quota::Resource;
use rules::signals::bits::{AccountState, DigestKey, HOSTS, HeaderAccount, RequestComponents, RequestParts};
use rules::signals::canary::{CanaryScanner, CanarySet, CanaryTracker};
use rules::signals::flow::{
    Fingerprinter, FlowKey, FlowLimits, FlowSnapshot, FlowTable, GRAM, MIN_FINGERPRINTS,
};
use rules::signals::shape::HostShape;
use rules::signals::{Signal, SignalCode, SignalMode, SignalPlace};
use serde::{Deserialize, Serialize};
use sys::file::{self, Mode};
use tokio::sync::Semaphore;

use super::turns::OpenBlockCount;
use crate::quota::cost::{FLOW_BYTES, PRICES_BYTES, SHAPE_BYTES};
use crate::quota::{Quotas, Reservation};
use crate::report::refusal::Refusal;
use crate::state_file::{Durability, read_state, write_atomic};

/// The directory of these files, inside the log directory.
const SIGNALS_DIR: &str = "signals";
/// The file of the keys.
const KEY_FILE: &str = "key";
const KEY_BYTES: usize = 48;
/// How long pieces of a canary count together.
const CANARY_WINDOW: Duration = Duration::from_secs(24 * 3600);
/// Flows that `sandbar flow` remembers for each sandbox; the oldest gives way.
const MAX_FLOWS: usize = 512;
/// How long a signal is not repeated, and how long requests are refused because of one.
const HOUR_MS: u64 = 3_600_000;
/// Bytes of text of one answer that are remembered.
pub(crate) const REMEMBERED_BYTES: usize = 1 << 20;
/// Bytes that are remembered at a time.
const PIECE_BYTES: usize = 16 << 10;
/// New fingerprints of a piece at most: two for each [`GRAM`] characters, and a pair more.
const PIECE_FINGERPRINTS: usize = PIECE_BYTES / GRAM * 2 + 2;
/// Longest host name that is kept.
const MAX_HOST: usize = 253;

/// The secret keys of the digests, the same for all sandboxes of an instance.
#[derive(Clone)]
pub(crate) struct SignalKeys {
    dir: PathBuf,
    digest: DigestKey,
    flow: FlowKey,
}

/// The memory of one sandbox.
pub(crate) struct SandboxSignals {
    keys: SignalKeys,
    path: PathBuf,
    /// Held while a request is priced, charged and learned: the bound (P19) needs these to be one step.
    bits: tokio::sync::Mutex<HeaderAccount>,
    memory: Mutex<SignalMemory>,
    room: Room,
    /// Whose memory a search takes. None where nobody counts it.
    searches: Option<(Arc<Quotas>, SandboxId)>,
    changed: AtomicBool,
    /// Held while a piece of what the sandbox sends is searched.
    scan_turn: Semaphore,
    /// Bodies that leave in blocks now.
    open_blocks: OpenBlockCount,
}

/// The part of the quota that is in use. Locked last.
struct Room(Mutex<Option<Reservation>>);

impl Room {
    /// Takes memory, and returns whether there was enough.
    fn take(&self, bytes: u64) -> bool {
        sys::lock(&self.0).as_mut().is_none_or(|reservation| reservation.grow(bytes).is_ok())
    }

    fn give_back(&self, bytes: u64) {
        if let Some(reservation) = sys::lock(&self.0).as_mut() {
            reservation.shrink_by(bytes);
        }
    }

    /// Returns how much must be given back after a reload.
    fn excess(&self) -> u64 {
        sys::lock(&self.0).as_ref().map_or(0, Reservation::excess)
    }

    /// Returns how many of `count` things fit.
    fn take_each(&self, count: usize, bytes: u64) -> usize {
        (0..count).take_while(|_| self.take(bytes)).count()
    }
}

#[derive(Default)]
struct SignalMemory {
    /// The form of requests by host, and when each was used last.
    shapes: HashMap<String, (u64, HostShape)>,
    uses: u64,
    flow: Option<FlowTable>,
    pieces: Option<CanaryTracker>,
    bits: SlidingWindow,
    bits_flagged_ms: Option<u64>,
    /// Hosts that requests are refused to, why, and until when.
    blocked: HashMap<String, (SignalCode, u64)>,
    flows: VecDeque<FlowEntry>,
    /// Flagged and denied, by code.
    counts: BTreeMap<SignalCode, [u64; 2]>,
}

/// Text of a bank that left.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct FlowEntry {
    pub(crate) bank: String,
    pub(crate) host: String,
    /// Normalised characters, estimated.
    pub(crate) characters: u64,
    /// The id of the attempt's record.
    pub(crate) record: String,
    pub(crate) at_ms: u64,
}

/// A request that was priced, and has not left.
#[must_use = "a priced request is charged, and learned if it leaves"]
pub(crate) struct PricedRequest<'a> {
    account: tokio::sync::MutexGuard<'a, HeaderAccount>,
    components: RequestComponents<'a>,
    host: &'a str,
    /// What it says, in bits.
    pub(crate) bits: u64,
    signals: &'a SandboxSignals,
}

impl PricedRequest<'_> {
    /// Remembers the request: it is charged, and leaves now.
    pub(crate) fn learn(mut self) {
        let hosts = self.account.host_count();
        if hosts < HOSTS && !self.account.has_room_for(self.host) && self.signals.room.take(PRICES_BYTES) {
            self.account.limit_hosts(hosts + 1);
        }
        self.account.learn(self.host, &self.components);
        self.signals.changed.store(true, Ordering::Relaxed);
    }
}

/// The memory as it is stored.
#[derive(Default, Serialize, Deserialize)]
struct StoredMemory {
    account: AccountState,
    shapes: Vec<(String, HostShape)>,
    flow: String,
    flows: VecDeque<FlowEntry>,
}

impl SignalKeys {
    /// Reads the keys, or makes them at the first start.
    ///
    /// # Errors
    ///
    /// Returns an error if they cannot be read or stored.
    pub(crate) fn open(log_dir: &Path) -> anyhow::Result<Self> {
        let dir = log_dir.join(SIGNALS_DIR);
        std::fs::create_dir_all(&dir).with_context(|| format!("cannot create {}", dir.display()))?;
        let path = dir.join(KEY_FILE);
        let shown = path.display().to_string();
        let stored = read_state(&path).with_context(|| format!("cannot read {shown}"))?;
        let bytes: [u8; KEY_BYTES] = match stored {
            Some(bytes) => {
                bytes.try_into().map_err(|_| anyhow::anyhow!("{shown} is not a key: remove it"))?
            }
            None => {
                let bytes: [u8; KEY_BYTES] = certs::random_bytes()?;
                file::replace(&path, &bytes, Mode::Owner, Durability::Disk)
                    .with_context(|| format!("cannot write {shown}"))?;
                bytes
            }
        };
        Ok(Self::from_bytes(dir, &bytes))
    }

    fn from_bytes(dir: PathBuf, bytes: &[u8; KEY_BYTES]) -> Self {
        let (mut digest, mut flow) = ([0; 16], [0; 32]);
        let (first, second) = bytes.split_at(digest.len());
        digest.copy_from_slice(first);
        flow.copy_from_slice(second);
        SignalKeys { dir, digest: DigestKey::new(digest), flow: FlowKey::new(&flow) }
    }

    pub(super) fn digest(&self) -> &DigestKey {
        &self.digest
    }

    pub(super) fn flow(&self) -> &FlowKey {
        &self.flow
    }

    /// Splits a request into what is priced and compared.
    pub(crate) fn split<'a>(&self, parts: &RequestParts<'a>) -> RequestComponents<'a> {
        RequestComponents::new(&self.digest, parts)
    }
}

impl SandboxSignals {
    /// Reads the memory of a sandbox; one that cannot be read is forgotten, which makes requests dearer and text
    /// unknown, and is said.
    pub(crate) fn open(keys: &SignalKeys, id: &SandboxId, quotas: &Arc<Quotas>) -> Self {
        let path = keys.dir.join(format!("{id}.json"));
        let stored = read_stored(&path).unwrap_or_else(|error| {
            tracing::warn!(%error, path = %path.display(), "cannot read what was remembered of a sandbox; starting anew");
            StoredMemory::default()
        });
        let room = Room(Mutex::new(quotas.reserve(Resource::Inspection, id, 0).ok()));
        let flow = STANDARD.decode(&stored.flow).ok().filter(|bytes| !bytes.is_empty());
        let now = super::now_ms() / 1000;
        let flow =
            flow.and_then(|bytes| FlowTable::from_bytes(&keys.flow, FlowLimits::default(), &bytes, now).ok());
        let flow = flow.and_then(|table| fit_table(table, &room, now));
        let mut account = HeaderAccount::from_state(keys.digest, &stored.account);
        account.limit_hosts(room.take_each(account.host_count(), PRICES_BYTES));
        let shapes = room.take_each(stored.shapes.len().min(HOSTS), SHAPE_BYTES);
        let shapes = stored.shapes.into_iter().take(shapes).map(|(host, shape)| (host, (0, shape))).collect();
        let mut flows = stored.flows;
        flows.truncate(room.take_each(flows.len().min(MAX_FLOWS), FLOW_BYTES));
        let memory = SignalMemory { shapes, flow, flows, ..SignalMemory::default() };
        SandboxSignals {
            bits: tokio::sync::Mutex::new(account),
            keys: keys.clone(),
            path,
            memory: Mutex::new(memory),
            room,
            searches: Some((quotas.clone(), id.clone())),
            changed: AtomicBool::new(false),
            scan_turn: Semaphore::new(1),
            open_blocks: OpenBlockCount::default(),
        }
    }

    /// Remembers nothing yet, and is never stored.
    pub(crate) fn unstored() -> anyhow::Result<Self> {
        let keys = SignalKeys::from_bytes(PathBuf::new(), &certs::random_bytes()?);
        Ok(SandboxSignals {
            bits: tokio::sync::Mutex::new(HeaderAccount::new(keys.digest)),
            keys,
            path: PathBuf::new(),
            memory: Mutex::default(),
            room: Room(Mutex::new(None)),
            searches: None,
            changed: AtomicBool::new(false),
            scan_turn: Semaphore::new(1),
            open_blocks: OpenBlockCount::default(),
        })
    }

    pub(super) fn keys(&self) -> &SignalKeys {
        &self.keys
    }

    pub(super) fn scan_turn(&self) -> &Semaphore {
        &self.scan_turn
    }

    pub(super) fn open_blocks(&self) -> &OpenBlockCount {
        &self.open_blocks
    }

    /// Reserves memory for the search of a request.
    pub(super) fn reserve_search(&self, bytes: u64) -> Result<Option<Reservation>, Refusal> {
        let Some((quotas, sandbox)) = &self.searches else { return Ok(None) };
        quotas.reserve(Resource::Buffers, sandbox, bytes).map(Some)
    }

    /// Prices a request that is about to leave (P19). No other request of the sandbox is priced until the result is
    /// dropped or learned.
    pub(crate) async fn price_request<'a>(
        &'a self,
        host: &'a str,
        parts: &RequestParts<'a>,
        sending: &'a str,
    ) -> PricedRequest<'a> {
        let account = self.bits.lock().await;
        let components = account.split(parts).sent_as(sending.as_bytes());
        let bits = account.price(host, &components).millibits.div_ceil(1000);
        PricedRequest { account, components, host, bits, signals: self }
    }

    /// Counts bits, and returns a signal once an hour while there are more than `usual` in an hour.
    pub(super) fn note_bits(&self, bits: u64, usual: u64, now_ms: u64) -> Option<Signal> {
        let mut memory = sys::lock(&self.memory);
        let hour = BudgetKind::HeaderBitsPerHour.window();
        memory.bits.charge(now_ms, hour, bits);
        let used = memory.bits.amount_used(now_ms, hour);
        let quiet = memory.bits_flagged_ms.is_some_and(|at| now_ms.saturating_sub(at) < HOUR_MS);
        if used <= usual || quiet {
            return None;
        }
        memory.bits_flagged_ms = Some(now_ms);
        let what = "bits outside bodies in an hour".to_owned();
        let (code, place) = (SignalCode::HeaderBits, SignalPlace::Attempt);
        Some(Signal { code, place, encodings: Vec::new(), what, value: used, threshold: usual })
    }

    /// Lets a detector look at what is remembered of a host.
    pub(super) fn with_shape<T>(&self, host: &str, look: impl FnOnce(&mut HostShape) -> T) -> T {
        let mut memory = sys::lock(&self.memory);
        memory.uses += 1;
        let uses = memory.uses;
        let is_new = !memory.shapes.contains_key(host);
        let has_room = !is_new || (memory.shapes.len() < HOSTS && self.room.take(SHAPE_BYTES));
        if !has_room && !memory.forget_shape() {
            return look(&mut HostShape::default()); // nothing can be remembered
        }
        let host: String = host.chars().take(MAX_HOST).collect();
        let (used, shape) = memory.shapes.entry(host).or_default();
        *used = uses;
        self.changed.store(true, Ordering::Relaxed);
        look(shape)
    }

    /// Returns the recalled text to compare with, if there is any. Use it at once: it keeps the memory of its table.
    pub(super) fn flow_snapshot(&self) -> Option<FlowSnapshot> {
        let mut memory = sys::lock(&self.memory);
        memory.flow.as_mut().filter(|flow| !flow.is_empty()).map(FlowTable::snapshot)
    }

    /// Remembers text that a memory service answered, before the sandbox gets it (P15): the first
    /// [`REMEMBERED_BYTES`] of it.
    pub(crate) fn remember_text<'a>(&self, texts: impl Iterator<Item = (&'a BankId, &'a [u8])>) {
        let now = super::now_ms() / 1000;
        let mut left = REMEMBERED_BYTES;
        for (bank, text) in texts {
            let text = text.get(..left).unwrap_or(text);
            left -= text.len();
            let mut fingerprinter = Fingerprinter::new(&self.keys.flow, bank);
            // In pieces, so that requests of the sandbox do not wait for all of it.
            for piece in text.chunks(PIECE_BYTES) {
                self.make_room_for_text(now);
                if let Some(table) = &mut sys::lock(&self.memory).flow {
                    fingerprinter.feed(table, piece, now);
                }
            }
        }
        self.changed.store(true, Ordering::Relaxed);
    }

    /// Makes or extends the table of recalled text for one more piece. Hosts are forgotten for it; without room even then,
    /// the oldest text gives way, and a sandbox whose quota has no room for a table remembers none.
    fn make_room_for_text(&self, now: u64) {
        // Room is taken for the very table that gets it: in between, a reload could take the table away, or another answer
        // extend it.
        while !sys::lock(&self.memory).extend_text(&self.room, &self.keys.flow, now) {
            if !self.forget_host() {
                return;
            }
        }
    }

    /// Forgets the host that was used least recently, and returns whether there was one.
    fn forget_host(&self) -> bool {
        if sys::lock(&self.memory).forget_shape() {
            self.room.give_back(SHAPE_BYTES);
            return true;
        }
        // A request that is being priced keeps its prices.
        let Ok(mut account) = self.bits.try_lock() else { return false };
        let hosts = account.host_count();
        if hosts > 0 {
            account.limit_hosts(hosts - 1);
            self.room.give_back(PRICES_BYTES);
        }
        hosts > 0
    }

    /// Gives back what a reload left no room for.
    fn trim(&self, now: u64) {
        while self.room.excess() > 0 && (self.forget_host() || self.forget_text(now)) {
            self.changed.store(true, Ordering::Relaxed);
        }
    }

    /// Forgets the oldest half of the recalled text, or which text went where.
    fn forget_text(&self, now: u64) -> bool {
        let mut memory = sys::lock(&self.memory);
        if let Some(table) = &mut memory.flow {
            let had = table.max_fingerprints();
            let less = had / 2;
            self.room.give_back(table_bytes(had));
            if less >= MIN_FINGERPRINTS && self.room.take(table_bytes(less)) {
                table.set_max_fingerprints(less, now);
            } else {
                memory.flow = None;
            }
            return true;
        }
        let had_flow = memory.flows.pop_front().is_some();
        if had_flow {
            self.room.give_back(FLOW_BYTES);
        }
        had_flow
    }

    /// Puts pieces of canaries together over requests.
    pub(super) fn record_pieces(
        &self,
        set: &Arc<CanarySet>,
        scanner: &mut CanaryScanner,
        now: u64,
        found: &mut Vec<Signal>,
    ) {
        let mut memory = sys::lock(&self.memory);
        let pieces = memory.pieces.get_or_insert_with(|| CanaryTracker::new(set.clone(), CANARY_WINDOW));
        pieces.replace_set(set.clone());
        pieces.record(scanner, &SignalPlace::Attempt, now, found);
    }

    pub(super) fn add_flows(&self, flows: BTreeMap<BankId, u64>, host: &str, record: String, at_ms: u64) {
        if flows.is_empty() {
            return;
        }
        let mut memory = sys::lock(&self.memory);
        for (bank, characters) in flows {
            let has_room = memory.flows.len() < MAX_FLOWS && self.room.take(FLOW_BYTES);
            if !has_room && memory.flows.pop_front().is_none() {
                break;
            }
            let (bank, host, record) = (bank.to_string(), host.to_owned(), record.clone());
            memory.flows.push_back(FlowEntry { bank, host, characters, record, at_ms });
        }
        self.changed.store(true, Ordering::Relaxed);
    }

    /// Returns which bank's text went where, the oldest first.
    pub(crate) fn flows(&self) -> Vec<FlowEntry> {
        sys::lock(&self.memory).flows.iter().cloned().collect()
    }

    pub(super) fn count(&self, code: SignalCode, mode: SignalMode) {
        let mut memory = sys::lock(&self.memory);
        let counts = memory.counts.entry(code).or_default();
        counts[usize::from(mode == SignalMode::Deny)] += 1;
    }

    /// Refuses requests to a host for an hour, because of a signal that was raised when a request had left.
    pub(super) fn block(&self, host: &str, code: SignalCode, now_ms: u64) {
        let mut memory = sys::lock(&self.memory);
        memory.blocked.retain(|_, (_, until)| *until > now_ms);
        if memory.blocked.len() < HOSTS {
            memory.blocked.insert(host.to_owned(), (code, now_ms.saturating_add(HOUR_MS)));
        }
    }

    /// Returns the signal for which requests to a host are refused.
    pub(super) fn blocked(&self, host: &str, now_ms: u64) -> Option<SignalCode> {
        let memory = sys::lock(&self.memory);
        memory.blocked.get(host).filter(|(_, until)| *until > now_ms).map(|(code, _)| *code)
    }

    /// Returns how often each signal was flagged and denied since the start.
    pub(crate) fn counts(&self) -> BTreeMap<&'static str, [u64; 2]> {
        let memory = sys::lock(&self.memory);
        memory.counts.iter().map(|(code, counts)| (super::findings::code(*code).code(), *counts)).collect()
    }

    /// Writes the memory to its file if it has changed. Blocks on the file.
    pub(crate) fn store(&self) -> io::Result<()> {
        self.trim(super::now_ms() / 1000);
        if !self.changed.swap(false, Ordering::Relaxed) {
            return Ok(());
        }
        // Whoever holds the lock may be waiting for this very thread to write an account.
        let Ok(account) = self.bits.try_lock().map(|account| account.state()) else {
            self.changed.store(true, Ordering::Relaxed);
            return Ok(()); // the next time
        };
        let mut memory = sys::lock(&self.memory);
        let now = super::now_ms() / 1000;
        if let Some(table) = memory.flow.as_mut() {
            table.expire(now);
        }
        if let Some(table) = memory.flow.take_if(|table| table.is_empty()) {
            self.room.give_back(table_bytes(table.max_fingerprints()));
        }
        let flow = memory.flow.as_ref().map(|table| STANDARD.encode(table.to_bytes()));
        if let Some(pieces) = memory.pieces.as_mut() {
            pieces.expire(now);
        }
        let shapes = memory.shapes.iter().map(|(host, (_, shape))| (host.clone(), shape.clone())).collect();
        let flows = memory.flows.clone();
        drop(memory);
        let stored = StoredMemory { account, shapes, flow: flow.unwrap_or_default(), flows };
        write_atomic(&self.path, &stored, Durability::Process)
            .inspect_err(|_| self.changed.store(true, Ordering::Relaxed))
    }
}

impl SignalMemory {
    /// Makes the table of recalled text large enough for one more piece, and returns whether there was room.
    fn extend_text(&mut self, room: &Room, key: &FlowKey, now: u64) -> bool {
        let (had, wanted) = match &self.flow {
            None => (0, MIN_FINGERPRINTS),
            Some(table) => match table.wanted_fingerprints(PIECE_FINGERPRINTS) {
                Some(wanted) => (table_bytes(table.max_fingerprints()), wanted),
                None => return true,
            },
        };
        if !room.take(table_bytes(wanted).saturating_sub(had)) {
            return false;
        }
        match &mut self.flow {
            Some(table) => table.set_max_fingerprints(wanted, now),
            None => self.flow = Some(FlowTable::new(key, limits(wanted))),
        }
        true
    }

    /// Forgets the form of requests to the host that was used least recently, and returns whether there was one.
    fn forget_shape(&mut self) -> bool {
        let oldest = self.shapes.iter().min_by_key(|(_, (used, _))| *used).map(|(host, _)| host.clone());
        oldest.is_some_and(|oldest| self.shapes.remove(&oldest).is_some())
    }
}

/// Reserves the memory of a table that was read, or of the largest part of it that fits.
fn fit_table(mut table: FlowTable, room: &Room, now: u64) -> Option<FlowTable> {
    let mut most =
        table.len().next_power_of_two().clamp(MIN_FINGERPRINTS, FlowLimits::default().max_fingerprints);
    while !room.take(table_bytes(most)) {
        most /= 2;
        if most < MIN_FINGERPRINTS {
            return None;
        }
    }
    table.set_max_fingerprints(most, now);
    Some(table)
}

fn limits(max_fingerprints: usize) -> FlowLimits {
    FlowLimits { max_fingerprints, ..FlowLimits::default() }
}

fn table_bytes(fingerprints: usize) -> u64 {
    FlowTable::bytes_for(fingerprints) as u64
}

fn read_stored(path: &Path) -> io::Result<StoredMemory> {
    match read_state(path)? {
        Some(bytes) => Ok(serde_json::from_slice(&bytes)?),
        None => Ok(StoredMemory::default()),
    }
}

impl std::fmt::Debug for SandboxSignals {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("SandboxSignals").field("path", &self.path).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests;
