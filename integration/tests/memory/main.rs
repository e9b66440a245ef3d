//! The memory guard as sandboxes and a memory service meet it: the real program between real clients and the real
//! Astrocyte engine, on loopback. Judged by what arrived at the service, and by the records.
//!
//! Rows and tests are named after the numbered attacks they try.

#![allow(clippy::unwrap_used, clippy::expect_used)] // helpers of tests are tests

mod banks;
mod bounds;
mod client;
mod engine;
mod framing;
mod identity;
mod matrix;
mod modes;
mod parallel;
mod scene;
mod story;
