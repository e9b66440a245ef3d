//! Answers kept in wire form, of one sandbox alone: a shared cache would tell one sandbox what another
//! asked. An answer is good for the permission it was given under and dies with it.

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
    /// Every address the resolver gave, also those the sandbox is not told: the dialler judges them anew.
    pub(crate) found: Vec<IpAddr>,
    /// What was told, for the record.
    pub(crate) told: Vec<audit::RecordedAnswer>,
    pub(crate) born: Instant,
    pub(crate) expires: Instant,
    /// What it was asked by.
    pub(crate) permit: Permit,
    /// The resolver that gave it.
    pub(crate) from: Option<std::net::SocketAddr>,
}

impl CachedAnswer {
    /// The addresses that the sandbox is told.
    pub(crate) fn addresses(&self) -> impl Iterator<Item = IpAddr> {
        self.told.iter().filter_map(|answer| answer.rdata.to_display().parse().ok())
    }

    pub(crate) fn age(&self, now: Instant) -> u32 {
        now.saturating_duration_since(self.born).as_secs() as u32
    }
}

/// The answers of one sandbox.
#[derive(Debug)]
pub(crate) struct AnswerCache {
    entries: HashMap<Box<[u8]>, CacheEntry, foldhash::quality::RandomState>,
    /// Oldest first.
    order: VecDeque<Box<[u8]>>,
    all: Arc<AtomicUsize>,
    /// Counts of entries that had to go before they were told.
    gone: Vec<(Arc<CachedAnswer>, u64)>,
}

/// An entry, and how often it was given since its last record.
#[derive(Debug)]
pub(crate) struct CacheEntry {
    pub(crate) entry: Arc<CachedAnswer>,
    /// The generation whose rules were asked last.
    pub(crate) generation: u64,
    pub(crate) fold: FoldWindow,
}

/// Answers alike that share a record.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct FoldWindow {
    pub(crate) since: Option<Instant>,
    pub(crate) count: u64,
}

impl AnswerCache {
    pub(crate) fn new(all: Arc<AtomicUsize>) -> Self {
        AnswerCache { entries: HashMap::default(), order: VecDeque::new(), all, gone: Vec::new() }
    }

    /// What is kept under a key and still good.
    pub(crate) fn find(&mut self, key: &[u8], now: Instant) -> Option<&mut CacheEntry> {
        self.entries.get_mut(key).filter(|kept| kept.entry.expires > now)
    }

    pub(crate) fn insert(&mut self, key: &[u8], entry: Arc<CachedAnswer>, now: Instant) {
        let generation = entry.permit.generation();
        if let Some(kept) = self.entries.get_mut(key) {
            (kept.entry, kept.generation) = (entry, generation);
            return;
        }
        while self.entries.len() >= CACHE_SANDBOX || self.all.load(Ordering::Relaxed) >= CACHE_ALL {
            let Some(oldest) = self.order.pop_front() else { return };
            self.evict(&oldest);
        }
        self.evict_expired(now);
        self.entries
            .insert(key.into(), CacheEntry { entry, generation, fold: FoldWindow::default() });
        self.order.push_back(key.into());
        self.all.fetch_add(1, Ordering::Relaxed);
    }

    /// Removes what is kept under a key.
    pub(crate) fn remove(&mut self, key: &[u8]) {
        self.order.retain(|other| **other != *key);
        self.evict(key);
    }

    /// Everything that was given without a record of its own since `before`.
    pub(crate) fn take_unrecorded(
        &mut self,
        before: Option<Instant>,
    ) -> Vec<(Arc<CachedAnswer>, u64)> {
        let due = |kept: &&mut CacheEntry| {
            let old =
                before.is_none_or(|before| kept.fold.since.is_some_and(|since| since <= before));
            kept.fold.count > 0 && old
        };
        let mut untold = std::mem::take(&mut self.gone);
        let kept = self.entries.values_mut().filter(due);
        untold.extend(kept.map(|kept| (kept.entry.clone(), std::mem::take(&mut kept.fold).count)));
        untold
    }

    fn evict_expired(&mut self, now: Instant) {
        // What has a count to tell stays until it is told.
        let gone = |kept: &CacheEntry| kept.entry.expires <= now && kept.fold.count == 0;
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
        if let Some(kept) = self.remove_entry(key)
            && kept.fold.count > 0
        {
            self.gone.push((kept.entry, kept.fold.count));
        }
    }

    fn remove_entry(&mut self, key: &[u8]) -> Option<CacheEntry> {
        let kept = self.entries.remove(key);
        if kept.is_some() {
            self.all.fetch_sub(1, Ordering::Relaxed);
        }
        kept
    }
}

impl Drop for AnswerCache {
    fn drop(&mut self) {
        self.all.fetch_sub(self.entries.len(), Ordering::Relaxed);
    }
}

impl FoldWindow {
    /// Ends the window for an answer that gets a record now; says how many that stands for.
    pub(crate) fn flush(&mut self, now: Instant) -> u64 {
        self.since = Some(now);
        std::mem::take(&mut self.count) + 1
    }

    /// Counts one more answer; says how many a record is due for, this one included.
    pub(crate) fn count_answer(
        &mut self,
        window: std::time::Duration,
        now: Instant,
    ) -> Option<u64> {
        match self.since {
            // Of two that come at once the later may be the first here: without a window none is folded.
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
        let rules = compile(&LoadSources { policies: vec![policy], ..LoadSources::default() }, &[])
            .unwrap();
        let name = DomainName::parse("a.example").unwrap();
        let facts = Facts::Name(NameFacts { name: name.clone(), query: QueryType::A });
        let Decision::Allow(permit) =
            rules.decide(rules.sandboxes().iter().next().unwrap(), &facts)
        else {
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
    fn p17_a_sandbox_keeps_no_more_than_its_share_and_loses_no_count() {
        let (now, all) = (Instant::now(), Arc::new(AtomicUsize::new(0)));
        let (entry, mut cache) = (entry(now), AnswerCache::new(all.clone()));
        for at in 0..CACHE_SANDBOX + 100 {
            cache.insert(&at.to_be_bytes(), entry.clone(), now);
            let window = std::time::Duration::from_secs(60);
            let kept = cache.find(&at.to_be_bytes(), now).unwrap();
            assert_eq!(
                (kept.fold.count_answer(window, now), kept.fold.count_answer(window, now)),
                (Some(1), None)
            );
        }
        assert_eq!((cache.entries.len(), cache.order.len()), (CACHE_SANDBOX, CACHE_SANDBOX));
        assert_eq!(all.load(Ordering::Relaxed), CACHE_SANDBOX);
        let untold: u64 = cache.take_unrecorded(None).iter().map(|(_, count)| count).sum();
        assert_eq!(untold, CACHE_SANDBOX as u64 + 100, "also of what had to go");
        drop(cache);
        assert_eq!(all.load(Ordering::Relaxed), 0);
    }

    #[test]
    fn p17_all_together_keep_no_more_than_there_is_room_for() {
        let (now, all) = (Instant::now(), Arc::new(AtomicUsize::new(CACHE_ALL - 1)));
        let (entry, mut cache) = (entry(now), AnswerCache::new(all.clone()));
        for at in 0..10u32 {
            cache.insert(&at.to_be_bytes(), entry.clone(), now);
        }
        assert_eq!(all.load(Ordering::Relaxed), CACHE_ALL);
        assert_eq!(cache.entries.len(), 1, "whoever adds gives up its own oldest");
        let mut other = AnswerCache::new(all.clone());
        other.insert(b"x", entry, now);
        assert_eq!(other.entries.len(), 0, "and has none to give: nothing is kept");
    }
}
