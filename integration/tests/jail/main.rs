//! `sandbar run`: the jail against what tries to leave it, as root and as an ordinary user, and the programs
//! people use inside it. Judged in a world that has every address there is: what leaves arrives there and is seen.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::print_stdout)] // helpers of tests are tests

mod demo;
mod doctor;
mod escapes;
mod files;
mod hidden;
mod model_clients;
mod programs;
mod run_command;
mod scene;
mod teardown;
mod terminal;

#[path = "../proxy/names.rs"]
#[allow(dead_code, reason = "shared with the tests of the proxy")]
mod names;
#[path = "../proxy/net.rs"]
#[allow(dead_code, reason = "shared with the tests of the proxy")]
mod net;
#[path = "../proxy/origin.rs"]
#[allow(dead_code, reason = "shared with the tests of the proxy")]
mod origin;
