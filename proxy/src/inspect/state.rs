//! What the inspection remembers of one sandbox: priced requests, the form of requests per host, recalled text, pieces of
//! canaries, and which bank's text went where. Kept over restarts, as keyed digests and never as content.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use anyhow::Context;
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use rules::ids::{BankId, SandboxId};
use rules::signals::bits::{
    AccountState, BitWindow, DigestKey, HOSTS, HeaderAccount, RequestComponents, RequestParts, WINDOW_MS,
};
use rules::signals::canary::{CanaryScanner, CanarySet, CanaryTracker};
use rules::signals::flow::{Fingerprinter, FlowKey, FlowLimits, FlowSnapshot, FlowTable};
use rules::signals::shape::HostShape;
use rules::signals::{Signal, SignalCode, SignalMode, SignalPlace};
use serde::{Deserialize, Serialize};
use sys::file::{self, Mode};

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
/// Bytes of text of one answer that are remembered.
pub(crate) const REMEMBERED_BYTES: usize = 1 << 20;
/// Bytes that are remembered at a time.
const PIECE_BYTES: usize = 16 << 10;
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
    changed: AtomicBool,
}

#[derive(Default)]
struct SignalMemory {
    /// The form of requests by host, and when each was used last.
    shapes: HashMap<String, (u64, HostShape)>,
    uses: u64,
    flow: Option<FlowTable>,
    pieces: Option<CanaryTracker>,
    bits: BitWindow,
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
    changed: &'a AtomicBool,
}

impl PricedRequest<'_> {
    /// Remembers the request: it is charged, and leaves now.
    pub(crate) fn learn(mut self) {
        self.account.learn(self.host, &self.components);
        self.changed.store(true, Ordering::Relaxed);
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

    /// Splits a request into what is priced and compared.
    pub(crate) fn split<'a>(&self, parts: &RequestParts<'a>) -> RequestComponents<'a> {
        RequestComponents::new(&self.digest, parts)
    }
}

impl SandboxSignals {
    /// Reads the memory of a sandbox; one that cannot be read is forgotten, which makes requests dearer and text
    /// unknown, and is said.
    pub(crate) fn open(keys: &SignalKeys, id: &SandboxId) -> Self {
        let path = keys.dir.join(format!("{id}.json"));
        let stored = read_stored(&path).unwrap_or_else(|error| {
            tracing::warn!(%error, path = %path.display(), "cannot read what was remembered of a sandbox; starting anew");
            StoredMemory::default()
        });
        let flow = STANDARD.decode(&stored.flow).ok().filter(|bytes| !bytes.is_empty());
        let now = super::now_ms() / 1000;
        let flow =
            flow.and_then(|bytes| FlowTable::from_bytes(&keys.flow, FlowLimits::default(), &bytes, now).ok());
        let shapes = stored.shapes.into_iter().take(HOSTS).map(|(host, shape)| (host, (0, shape))).collect();
        let memory = SignalMemory { shapes, flow, flows: stored.flows, ..SignalMemory::default() };
        SandboxSignals {
            bits: tokio::sync::Mutex::new(HeaderAccount::from_state(keys.digest, &stored.account)),
            keys: keys.clone(),
            path,
            memory: Mutex::new(memory),
            changed: AtomicBool::new(false),
        }
    }

    /// Remembers nothing yet, and is never stored.
    pub(super) fn unstored() -> anyhow::Result<Self> {
        let keys = SignalKeys::from_bytes(PathBuf::new(), &certs::random_bytes()?);
        Ok(SandboxSignals {
            bits: tokio::sync::Mutex::new(HeaderAccount::new(keys.digest)),
            keys,
            path: PathBuf::new(),
            memory: Mutex::default(),
            changed: AtomicBool::new(false),
        })
    }

    pub(super) fn keys(&self) -> &SignalKeys {
        &self.keys
    }

    /// Prices a request that is about to leave (P19). No other request of the sandbox is priced until the result is
    /// dropped or learned.
    pub(crate) async fn price_request<'a>(
        &'a self,
        host: &'a str,
        parts: &RequestParts<'a>,
    ) -> PricedRequest<'a> {
        let account = self.bits.lock().await;
        let components = account.split(parts);
        let bits = account.price(host, &components).millibits.div_ceil(1000);
        PricedRequest { account, components, host, bits, changed: &self.changed }
    }

    /// Counts bits, and returns a signal once an hour while there are more than `usual` in an hour.
    pub(super) fn note_bits(&self, bits: u64, usual: u64, now_ms: u64) -> Option<Signal> {
        let mut memory = sys::lock(&self.memory);
        memory.bits.charge_beyond(bits.saturating_mul(1000), now_ms);
        let used = memory.bits.used_millibits(now_ms) / 1000;
        let quiet = memory.bits_flagged_ms.is_some_and(|at| now_ms.saturating_sub(at) < WINDOW_MS);
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
        if !memory.shapes.contains_key(host) && memory.shapes.len() >= HOSTS {
            let oldest =
                memory.shapes.iter().min_by_key(|(_, (used, _))| *used).map(|(host, _)| host.clone());
            oldest.and_then(|oldest| memory.shapes.remove(&oldest));
        }
        let host: String = host.chars().take(MAX_HOST).collect();
        let (used, shape) = memory.shapes.entry(host).or_default();
        *used = uses;
        self.changed.store(true, Ordering::Relaxed);
        look(shape)
    }

    pub(super) fn flow_snapshot(&self) -> FlowSnapshot {
        let mut memory = sys::lock(&self.memory);
        let flow = memory.flow.get_or_insert_with(|| FlowTable::new(&self.keys.flow, FlowLimits::default()));
        flow.snapshot()
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
                let mut memory = sys::lock(&self.memory);
                let new = || FlowTable::new(&self.keys.flow, FlowLimits::default());
                fingerprinter.feed(memory.flow.get_or_insert_with(new), piece, now);
            }
        }
        self.changed.store(true, Ordering::Relaxed);
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
            if memory.flows.len() >= MAX_FLOWS {
                memory.flows.pop_front();
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
            memory.blocked.insert(host.to_owned(), (code, now_ms.saturating_add(WINDOW_MS)));
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
        let flow = memory.flow.as_mut().map(|flow| {
            flow.expire(now);
            STANDARD.encode(flow.to_bytes())
        });
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
mod tests {
    use super::*;

    const TEXT: &str =
        "The launch code of the northern archive is kept in the blue folder of Marguerite Delacroix";

    fn open(dir: &Path) -> SandboxSignals {
        SandboxSignals::open(&SignalKeys::open(dir).unwrap(), &SandboxId::parse("s").unwrap())
    }

    #[test]
    fn p15_recalled_text_is_recognised_after_a_restart_and_is_not_stored() {
        let dir = tempfile::tempdir().unwrap();
        let (bank, now) = (BankId::parse("staging:a").unwrap(), super::super::now_ms());
        let signals = open(dir.path());
        signals.remember_text(std::iter::once((&bank, TEXT.as_bytes())));
        signals.add_flows(BTreeMap::from([(bank.clone(), 48)]), "a.example", "record".to_owned(), now);
        signals.store().unwrap();
        let file = std::fs::read_to_string(dir.path().join("signals/s.json")).unwrap();
        assert!(!file.contains("Marguerite"), "{file}");
        let again = open(dir.path());
        let found = again.flow_snapshot().match_text(TEXT, now / 1000);
        assert_eq!(found.iter().map(|found| &found.bank).collect::<Vec<_>>(), [&bank]);
        assert_eq!(again.flows().len(), 1);
        assert!(open(dir.path()).flow_snapshot().match_text(TEXT, now / 1000 + 25 * 3600).is_empty());
    }

    #[tokio::test]
    async fn p19_what_was_said_is_cheap_after_a_restart() {
        let dir = tempfile::tempdir().unwrap();
        let parts =
            RequestParts { method: "GET", path: b"/some/path", query: None, fields: &[("x-a", b"value")] };
        let signals = open(dir.path());
        let first = signals.price_request("a.example", &parts).await;
        let dear = first.bits;
        first.learn();
        let signals = Arc::new(signals);
        let stored = signals.clone();
        tokio::task::spawn_blocking(move || stored.store()).await.unwrap().unwrap();
        let again = open(dir.path());
        let cheap = again.price_request("a.example", &parts).await.bits;
        assert!(dear > 50 && cheap <= 2, "{dear} then {cheap}");
    }

    #[test]
    fn p16_memory_that_cannot_be_read_is_forgotten_and_the_key_is_not() {
        let dir = tempfile::tempdir().unwrap();
        drop(open(dir.path()));
        std::fs::write(dir.path().join("signals/s.json"), "{ not json").unwrap();
        assert!(open(dir.path()).flow_snapshot().is_empty());
        std::fs::write(dir.path().join("signals/key"), "short").unwrap();
        assert!(SignalKeys::open(dir.path()).is_err());
    }

    #[test]
    fn p17_hosts_and_flows_are_bounded() {
        let dir = tempfile::tempdir().unwrap();
        let (signals, bank) = (open(dir.path()), BankId::parse("staging:a").unwrap());
        for at in 0..2_000 {
            let host = format!("h{at}.example");
            signals.with_shape(&host, |_| ());
            signals.block(&host, SignalCode::Beacon, 1);
            signals.add_flows(BTreeMap::from([(bank.clone(), 48)]), &host, "record".to_owned(), 1);
        }
        let memory = sys::lock(&signals.memory);
        assert_eq!(
            (memory.shapes.len(), memory.blocked.len(), memory.flows.len()),
            (HOSTS, HOSTS, MAX_FLOWS)
        );
        assert!(memory.shapes.contains_key("h1999.example"), "the newest is kept");
    }
}
