//! The crate as its users see it: real handshakes in memory, real files, hostile tables, a clock in hand.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test that cannot go on fails")]

mod authority;
mod fuzz;
mod handshake;
mod identity;
mod leaf;
mod trust;

use std::time::Duration;

use certs::UnixTime;

/// A moment to test at; no test looks at the machine's clock.
const NOW: u64 = 1_800_000_000;

fn unix_time(seconds: u64) -> UnixTime {
    UnixTime::since_unix_epoch(Duration::from_secs(seconds))
}

const HOUR: u64 = 3600;
const DAY: u64 = 24 * HOUR;
