//! The crate from its users' side: real handshakes in memory, real files, hostile tables, a fixed clock.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails if it cannot continue")]

mod authority;
mod fuzz;
mod handshake;
mod identity;
mod leaf;
mod trust;

use std::time::Duration;

use certs::UnixTime;

/// The time of the tests; no test reads the system clock.
const NOW: u64 = 1_800_000_000;

fn unix_time(seconds: u64) -> UnixTime {
    UnixTime::since_unix_epoch(Duration::from_secs(seconds))
}

const HOUR: u64 = 3600;
const DAY: u64 = 24 * HOUR;
