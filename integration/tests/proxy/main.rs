//! The proxy as a sandbox meets it: the real program in a gateway between a sandbox and a world that has every
//! address. Judged by what arrived in the world and by the records.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::string_slice,
    reason = "a test that cannot go on says why and fails"
)]
#![allow(clippy::print_stderr, reason = "a test that fails tells what the program said")]

mod addresses;
mod agreement;
mod budgets;
mod channels;
mod client;
mod clients;
mod departure;
mod doctor;
mod git;
mod grants;
mod log_neighbours;
mod names;
mod net;
mod operations;
mod origin;
mod raw;
mod reload;
mod revoke;
mod scene;
mod site;
mod start;
mod storm;
mod transparent;
mod tunnel;
