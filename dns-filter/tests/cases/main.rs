//! The numbered cases of the specification, one test or more each, checked against what a recording resolver received.

#![allow(clippy::unwrap_used, clippy::expect_used)] // test helpers
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
