//! The specification's cases, each a test named after its number, judged by what a recording resolver saw.

#![allow(clippy::unwrap_used, clippy::expect_used)] // helpers of tests are tests
#![allow(clippy::wildcard_enum_match_arm, reason = "the codec's enums")]

mod answers;
mod benign;
mod bound;
mod clock;
mod fixture;
mod flow;
mod fuzz;
mod kernel;
mod limits;
mod listeners;
mod names;
mod query_metrics;
mod query_shapes;
mod recording_resolver;
mod records;
