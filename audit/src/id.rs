//! Ids of attempts and records: ULIDs that cost a counter.

use std::sync::atomic::{AtomicU32, Ordering};

use crate::compose;

/// Generates unique ids: a timestamp, 48 random bits per process, then a counter.
#[derive(Debug)]
pub(crate) struct IdGenerator {
    process: u128,
    counter: AtomicU32,
}

impl IdGenerator {
    pub(crate) fn new() -> Self {
        Self { process: u128::from(rand::random::<u64>() >> 16) << 32, counter: AtomicU32::new(0) }
    }

    pub(crate) fn next(&self) -> u128 {
        let counter = u128::from(self.counter.fetch_add(1, Ordering::Relaxed));
        u128::from(compose::unix_millis()) << 80 | self.process | counter
    }
}
