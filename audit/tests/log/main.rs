//! The access log from outside: written, restarted, damaged, starved, killed.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::let_underscore_must_use)] // helpers of tests are tests

mod conformance;
mod kill;
mod restart;
mod support;
mod tamper;
mod trouble;
mod writing;
