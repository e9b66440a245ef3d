//! Other people's programs: whether they are here, and what is said where they are not.

use std::io::Write;

/// Whether a program that a test can do without is installed; says so if not.
pub fn is_installed(program: &str) -> bool {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let found = std::env::split_paths(&path).any(|directory| directory.join(program).is_file());
    if !found {
        report_skipped(program);
    }
    found
}

/// Says what was not tried, past the capture of a test that passes; where everything must be tried
/// (`SANDBAR_TEST_ALL=1`) it fails.
pub fn report_skipped(what: &str) {
    let all = std::env::var_os("SANDBAR_TEST_ALL").is_some_and(|value| value == "1");
    assert!(!all, "{what} is not installed, and SANDBAR_TEST_ALL=1 asks for everything");
    let line = format!("NOT RUN: {what} is not installed, so nothing was tried with it\n");
    std::io::stderr().write_all(line.as_bytes()).expect("stderr is open");
}
