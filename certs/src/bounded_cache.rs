//! A cache with a hard bound that a flood of new keys cannot empty.
//!
//! It has two halves, newcomers and regulars. A key seen once can evict only newcomers. A key requested
//! again becomes a regular if there is room, or if it was requested more often than the regular it would
//! replace. A regular that survives such a challenge loses half its count, so one that is no longer
//! requested makes room in the end.

use std::borrow::Borrow;
use std::hash::Hash;
use std::num::NonZeroUsize;

use lru::LruCache;

/// The maximum number of entries of a [`BoundedCache`], newcomers and regulars together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct CacheBound(NonZeroUsize);

impl CacheBound {
    /// A bound of twice `half`: as many newcomers as regulars.
    pub(crate) const fn from_half(half: NonZeroUsize) -> Self {
        Self(half)
    }
}

struct CountedEntry<V> {
    value: V,
    hits: u32,
}

pub(crate) struct BoundedCache<K: Hash + Eq, V> {
    newcomers: LruCache<K, CountedEntry<V>>,
    regulars: LruCache<K, CountedEntry<V>>,
}

impl<K: Hash + Eq, V> BoundedCache<K, V> {
    pub(crate) fn new(bound: CacheBound) -> Self {
        Self { newcomers: LruCache::new(bound.0), regulars: LruCache::new(bound.0) }
    }

    /// Returns the value of `key`. Requests are what turns a newcomer into a regular.
    pub(crate) fn get<Q>(&mut self, key: &Q) -> Option<&V>
    where
        K: Borrow<Q>,
        Q: Hash + Eq + ?Sized,
    {
        if !self.regulars.contains(key) {
            let (key, mut entry) = self.newcomers.pop_entry(key)?;
            entry.hits = entry.hits.saturating_add(1);
            self.promote(key, entry);
        }
        // Promotion may have been refused, so look in both halves; only one can hold the key.
        if let Some(entry) = self.regulars.get_mut(key) {
            entry.hits = entry.hits.saturating_add(1);
            return Some(&entry.value);
        }
        self.newcomers.get(key).map(|entry| &entry.value)
    }

    /// Inserts `value`, as a newcomer unless `key` is a regular already.
    pub(crate) fn insert(&mut self, key: K, value: V) {
        if let Some(entry) = self.regulars.get_mut(&key) {
            entry.value = value;
            return;
        }
        self.newcomers.put(key, CountedEntry { value, hits: 0 });
    }

    pub(crate) fn len(&self) -> usize {
        self.newcomers.len() + self.regulars.len()
    }

    fn promote(&mut self, key: K, entry: CountedEntry<V>) {
        if self.regulars.len() < self.regulars.cap().get() {
            self.regulars.put(key, entry);
            return;
        }
        let Some((oldest_key, mut oldest)) = self.regulars.pop_lru() else {
            return;
        };
        if oldest.hits > entry.hits {
            oldest.hits /= 2;
            self.regulars.put(oldest_key, oldest);
            self.newcomers.put(key, entry);
        } else {
            self.regulars.put(key, entry);
            self.newcomers.put(oldest_key, oldest);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HALF: NonZeroUsize = NonZeroUsize::new(8).unwrap();

    fn with_regulars() -> BoundedCache<String, u32> {
        let mut cache = BoundedCache::new(CacheBound::from_half(HALF));
        for round in 0..50 {
            for regular in 0..8 {
                let key = format!("regular-{regular}");
                if cache.get(&key).is_none() {
                    assert_eq!(round, 0, "a regular was lost");
                    cache.insert(key, regular);
                }
            }
        }
        cache
    }

    #[test]
    fn p17_names_seen_once_push_out_no_regular() {
        let mut cache = with_regulars();
        for stranger in 0..10_000 {
            cache.insert(format!("stranger-{stranger}"), 0);
        }
        assert!((0..8).all(|regular| cache.get(&format!("regular-{regular}")) == Some(&regular)));
        assert!(cache.len() <= 16);
    }

    #[test]
    fn names_seen_twice_push_out_no_regular_that_is_still_asked_for() {
        let mut cache = with_regulars();
        for stranger in 0..10_000 {
            let key = format!("stranger-{stranger}");
            cache.insert(key.clone(), 0);
            assert_eq!(cache.get(&key), Some(&0));
            let regular = stranger % 8;
            assert_eq!(cache.get(&format!("regular-{regular}")), Some(&regular), "{stranger}");
        }
        assert!(cache.len() <= 16);
    }

    #[test]
    fn a_regular_that_is_no_longer_requested_makes_room() {
        let mut cache = with_regulars();
        cache.insert("new".to_owned(), 99);
        for _ in 0..200 {
            assert_eq!(cache.get("new"), Some(&99));
        }
        assert!(cache.regulars.contains("new"));
    }

    #[test]
    fn what_is_kept_again_is_new() {
        let mut cache = with_regulars();
        cache.insert("regular-1".to_owned(), 7);
        assert_eq!(cache.get("regular-1"), Some(&7));
    }
}
