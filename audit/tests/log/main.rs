//! The access log from outside: writing, restarts, tampering, full disks, `kill -9`.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::let_underscore_must_use)] // test helpers

mod conformance;
mod kill;
mod neighbours;
mod restart;
mod support;
mod tamper;
mod trouble;
mod writing;
