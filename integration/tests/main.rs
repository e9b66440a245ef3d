//! Whole-program tests: the real binary, judged by what it prints and by what others saw.

#![allow(clippy::unwrap_used, clippy::expect_used)] // helpers of tests are tests

mod certs;
mod dns;
mod log;
mod policy;
