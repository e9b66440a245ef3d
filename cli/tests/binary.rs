//! The binary starts and says who it is. What it does is tested whole in `integration`.

use std::process::Command;

#[test]
fn it_says_its_version() {
    let output = Command::new(env!("CARGO_BIN_EXE_sandbar")).arg("--version").output().unwrap();
    let shown = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && shown.starts_with("sandbar "), "{shown}");
}
