//! The binary starts and prints its version. `integration` tests what it does.

use std::process::Command;

#[test]
fn it_prints_its_version() {
    let output = Command::new(env!("CARGO_BIN_EXE_sandbar")).arg("--version").output().unwrap();
    let shown = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && shown.starts_with("sandbar "), "{shown}");
}
