//! `cargo fuzz run flow_table`, in `rules/fuzz`.
#![no_main]

#[path = "../checks.rs"]
mod checks;

libfuzzer_sys::fuzz_target!(|data: &[u8]| checks::flow_table(data));
