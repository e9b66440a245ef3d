//! Running other programs, with nothing of this machine's own trust in their environment.

use std::io::Write;
use std::path::Path;
use std::process::{Command, Output};

/// Whether a program that this test can do without is installed; says so if not.
pub(crate) fn is_installed(program: &str) -> bool {
    let found = is_on_path(program);
    if !found {
        report_skipped(program);
    }
    found
}

/// Says what was not tried, past the capture of a test that passes; where everything must be tried
/// (`SANDBAR_TEST_ALL=1`) it fails.
pub(crate) fn report_skipped(what: &str) {
    let all = std::env::var_os("SANDBAR_TEST_ALL").is_some_and(|value| value == "1");
    assert!(!all, "{what} is not installed, and SANDBAR_TEST_ALL=1 asks for everything");
    let line = format!("NOT RUN: {what} is not installed, so nothing was tried with it\n");
    std::io::stderr().write_all(line.as_bytes()).unwrap();
}

/// Fails unless a program that every machine must have for this test is installed.
pub(crate) fn require_program(program: &str, package: &str) {
    assert!(is_on_path(program), "{program} is not installed; run: apt-get install {package}");
}

fn is_on_path(program: &str) -> bool {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path).any(|directory| directory.join(program).is_file())
}

/// A program that sees only where programs are, a home of its own, and what the test adds.
pub(crate) fn clean_command(program: &str, home: &Path) -> Command {
    let mut command = Command::new(program);
    command.env_clear().env("HOME", home).env("LC_ALL", "C.UTF-8").current_dir(home);
    for kept in ["PATH", "RUSTUP_HOME", "RUSTUP_TOOLCHAIN", "PYENV_ROOT"] {
        if let Some(value) = std::env::var_os(kept) {
            command.env(kept, value);
        }
    }
    // Home has moved, and rustup's own is found through it where nothing else is said.
    if std::env::var_os("RUSTUP_HOME").is_none()
        && let Some(old_home) = std::env::var_os("HOME")
    {
        command.env("RUSTUP_HOME", Path::new(&old_home).join(".rustup"));
    }
    command
}

/// Runs to the end and gives back both streams as one text.
pub(crate) fn output_text(output: &Output) -> String {
    let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    format!("{out}{err}")
}
