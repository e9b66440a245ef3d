//! `cargo fuzz run list`, in `rules/fuzz`.
#![no_main]

#[path = "../checks.rs"]
mod checks;

libfuzzer_sys::fuzz_target!(|data: &[u8]| checks::list(data));
