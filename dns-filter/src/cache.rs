//! The answer cache of one sandbox, in wire form. It is not shared: a sandbox could find out from a shared cache what
//! another has asked. An answer is valid only under the permit it was asked with.

use std::collections::VecDeque;
use std::net::IpAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use hashbrown::HashMap;
use rules::facts::QueryType;
use rules::{DomainName, Permit};
use tokio::time::Instant;

use crate::limits::{CACHE_ALL, CACHE_SANDBOX};
use crate::message::{AnswerSection, Ede, Rcode};

/// One cleaned answer.
#[derive(Clone, Debug)]
pub(crate) struct CachedAnswer {
    pub(crate) name: DomainName,
    pub(crate) kind: QueryType,
    pub(crate) rcode: Rcode,
    pub(crate) section: AnswerSection,
    pub(crate) ede: Option<Ede>,
    /// Every address in the resolver's answer, including those withheld from the sandbox: the proxy checks them again
    /// before it dials.
    pub(crate) found: Vec<IpAddr>,
    /// The records given to the sandbox, for the log.
    pub(crate) told: Vec<audit::RecordedAnswer>,
    pub(crate) born: Instant,
    pub(crate) expires: Instant,
    /// The permit it was asked with.
    pub(crate) permit: Permit,
    /// The resolver that answered.
    pub(crate) from: Option<std::net::SocketAddr>,
}

impl CachedAnswer {
    /// Returns the addresses given to the sandbox.
    pub(crate) fn addresses(&self) -> impl Iterator<Item = IpAddr> {
        self.told.iter().filter_map(|answer| answer.rdata.to_display().parse().ok())
    }

    pub(crate) fn age(&self, now: Instant) -> u32 {
        now.saturating_duration_since(self.born).as_secs() as u32
    }
}

/// The cached answers of one sandbox.
#[derive(Debug)]
pub(crate) struct AnswerCache {
    entries: HashMap<Box<[u8]>, CacheEntry, foldhash::quality::RandomState>,
    /// Oldest first.
    order: VecDeque<Box<[u8]>>,
    total: Arc<AtomicUsize>,
    /// Counts of evicted entries that are not recorded yet.
    evicted: Vec<(Arc<CachedAnswer>, u64)>,
}

/// An answer, and how often it was given since its last record.
#[derive(Debug)]
pub(crate) struct CacheEntry {
    pub(crate) entry: Arc<CachedAnswer>,
    /// Generation of the rules that last allowed it.
    pub(crate) generation: u64,
    pub(crate) fold: FoldWindow,
}

/// Counts identical answers that share a record.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct FoldWindow {
    pub(crate) since: Option<Instant>,
    pub(crate) count: u64,
}

impl AnswerCache {
    pub(crate) fn new(total: Arc<AtomicUsize>) -> Self {
        AnswerCache { entries: HashMap::default(), order: VecDeque::new(), total, evicted: Vec::new() }
    }

    /// Returns the entry of a key, if it has not expired.
    pub(crate) fn find(&mut self, key: &[u8], now: Instant) -> Option<&mut CacheEntry> {
        self.entries.get_mut(key).filter(|cached| cached.entry.expires > now)
    }

    pub(crate) fn insert(&mut self, key: &[u8], entry: Arc<CachedAnswer>, now: Instant) {
        let generation = entry.permit.generation();
        if let Some(cached) = self.entries.get_mut(key) {
            (cached.entry, cached.generation) = (entry, generation);
            return;
        }
        while self.entries.len() >= CACHE_SANDBOX || self.total.load(Ordering::Relaxed) >= CACHE_ALL {
            let Some(oldest) = self.order.pop_front() else { return };
            self.evict(&oldest);
        }
        self.evict_expired(now);
        self.entries.insert(key.into(), CacheEntry { entry, generation, fold: FoldWindow::default() });
        self.order.push_back(key.into());
        self.total.fetch_add(1, Ordering::Relaxed);
    }

    /// Removes the entry of a key.
    pub(crate) fn remove(&mut self, key: &[u8]) {
        self.order.retain(|other| **other != *key);
        self.evict(key);
    }

    /// Takes the counts of answers given without a record, whose fold window began at `before` or earlier; all of them
    /// if it is `None`.
    pub(crate) fn take_unrecorded(&mut self, before: Option<Instant>) -> Vec<(Arc<CachedAnswer>, u64)> {
        let due = |cached: &&mut CacheEntry| {
            let old = before.is_none_or(|before| cached.fold.since.is_some_and(|since| since <= before));
            cached.fold.count > 0 && old
        };
        let mut unrecorded = std::mem::take(&mut self.evicted);
        let cached = self.entries.values_mut().filter(due);
        unrecorded
            .extend(cached.map(|cached| (cached.entry.clone(), std::mem::take(&mut cached.fold).count)));
        unrecorded
    }

    fn evict_expired(&mut self, now: Instant) {
        // An entry with an unrecorded count stays until that is recorded.
        let gone = |cached: &CacheEntry| cached.entry.expires <= now && cached.fold.count == 0;
        for _ in 0..2 {
            match self.order.front() {
                Some(key) if self.entries.get(key).is_some_and(gone) => {
                    let Some(key) = self.order.pop_front() else { return };
                    self.evict(&key);
                }
                Some(_) | None => return,
            }
        }
    }

    fn evict(&mut self, key: &[u8]) {
        if let Some(cached) = self.remove_entry(key)
            && cached.fold.count > 0
        {
            self.evicted.push((cached.entry, cached.fold.count));
        }
    }

    fn remove_entry(&mut self, key: &[u8]) -> Option<CacheEntry> {
        let cached = self.entries.remove(key);
        if cached.is_some() {
            self.total.fetch_sub(1, Ordering::Relaxed);
        }
        cached
    }
}

impl Drop for AnswerCache {
    fn drop(&mut self) {
        self.total.fetch_sub(self.entries.len(), Ordering::Relaxed);
    }
}

impl FoldWindow {
    /// Starts a new window for an answer that gets a record now; returns how many answers that record covers.
    pub(crate) fn flush(&mut self, now: Instant) -> u64 {
        self.since = Some(now);
        std::mem::take(&mut self.count) + 1
    }

    /// Counts an answer. If a record is due, returns how many answers it covers, including this one.
    pub(crate) fn count_answer(&mut self, window: std::time::Duration, now: Instant) -> Option<u64> {
        match self.since {
            // Two concurrent queries can get here out of order, so a window of 0 needs its own check.
            Some(since) if !window.is_zero() && now < since + window => {
                self.count += 1;
                None
            }
            Some(_) | None => Some(self.flush(now)),
        }
    }
}

#[cfg(test)]
mod tests {
    use rules::facts::{Facts, NameFacts};
    use rules::{Decision, LoadSources, SourceFile, compile};

    use super::*;

    fn entry(now: Instant) -> Arc<CachedAnswer> {
        let text = "name = \"p\"\n[[allow]]\nname = \"r\"\nhosts = [\"a.example\"]\n";
        let policy = SourceFile { path: "p.toml".into(), bytes: text.into() };
        let rules = compile(&LoadSources { policies: vec![policy], ..LoadSources::default() }, &[]).unwrap();
        let name = DomainName::parse("a.example").unwrap();
        let facts = Facts::Name(NameFacts { name: name.clone(), query: QueryType::A });
        let Decision::Allow(permit) = rules.decide(rules.sandboxes().iter().next().unwrap(), &facts) else {
            panic!()
        };
        let (section, found, told) = (AnswerSection::default(), Vec::new(), Vec::new());
        let expires = now + std::time::Duration::from_secs(60);
        let (kind, rcode, ede, from) = (QueryType::A, Rcode::NOERROR, None, None);
        Arc::new(CachedAnswer {
            name,
            kind,
            rcode,
            section,
            ede,
            found,
            told,
            born: now,
            expires,
            permit,
            from,
        })
    }

    #[test]
    fn p17_a_sandbox_caches_at_most_its_share_and_loses_no_count() {
        let (now, all) = (Instant::now(), Arc::new(AtomicUsize::new(0)));
        let (entry, mut cache) = (entry(now), AnswerCache::new(all.clone()));
        for at in 0..CACHE_SANDBOX + 100 {
            cache.insert(&at.to_be_bytes(), entry.clone(), now);
            let window = std::time::Duration::from_secs(60);
            let cached = cache.find(&at.to_be_bytes(), now).unwrap();
            assert_eq!(
                (cached.fold.count_answer(window, now), cached.fold.count_answer(window, now)),
                (Some(1), None)
            );
        }
        assert_eq!((cache.entries.len(), cache.order.len()), (CACHE_SANDBOX, CACHE_SANDBOX));
        assert_eq!(all.load(Ordering::Relaxed), CACHE_SANDBOX);
        let unrecorded: u64 = cache.take_unrecorded(None).iter().map(|(_, count)| count).sum();
        assert_eq!(unrecorded, CACHE_SANDBOX as u64 + 100, "including evicted entries");
        drop(cache);
        assert_eq!(all.load(Ordering::Relaxed), 0);
    }

    #[test]
    fn p17_all_caches_together_are_bounded() {
        let (now, all) = (Instant::now(), Arc::new(AtomicUsize::new(CACHE_ALL - 1)));
        let (entry, mut cache) = (entry(now), AnswerCache::new(all.clone()));
        for at in 0..10u32 {
            cache.insert(&at.to_be_bytes(), entry.clone(), now);
        }
        assert_eq!(all.load(Ordering::Relaxed), CACHE_ALL);
        assert_eq!(cache.entries.len(), 1, "a full cache evicts its own oldest entry");
        let mut other = AnswerCache::new(all.clone());
        other.insert(b"x", entry, now);
        assert_eq!(other.entries.len(), 0, "an empty cache has none to evict, so it stores nothing");
    }
}
