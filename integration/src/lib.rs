//! What the whole-program tests share; the tests themselves are in `tests/`, one binary.

#![allow(clippy::expect_used, reason = "a test that cannot go on fails")]

use std::fs::{OpenOptions, Permissions};
use std::io::Write;
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::LazyLock;

mod names;
mod program;

pub use names::{NameRecorder, ask_name};
pub use program::{is_installed, report_skipped};

/// The binary under test: `SANDBAR_BIN`, as `make test` sets it after building everything at once. Without it
/// cargo is asked, because another package's binary is not built for a test.
static SANDBAR: LazyLock<PathBuf> = LazyLock::new(|| {
    if let Some(built) = std::env::var_os("SANDBAR_BIN") {
        return PathBuf::from(built);
    }
    let test = std::env::current_exe().expect("a test knows where it lies");
    let profile = test.parent().and_then(Path::parent).expect("below target").to_owned();
    let mut cargo = Command::new(env!("CARGO"));
    cargo.args(["build", "--quiet", "--package", "cli", "--bin", "sandbar"]);
    if profile.ends_with("release") {
        cargo.arg("--release");
    }
    let built = cargo.current_dir(repository_root()).status();
    assert!(built.is_ok_and(|status| status.success()), "sandbar does not build");
    profile.join("sandbar")
});

/// `sandbar`, run where the repository begins.
pub fn sandbar() -> Command {
    let mut command = Command::new(&*SANDBAR);
    command.current_dir(repository_root()).env_remove("NO_COLOR").env_remove("CLICOLOR_FORCE");
    command
}

/// Runs `sandbar` with arguments separated by spaces.
pub fn run_sandbar(arguments: &str) -> Output {
    sandbar().args(arguments.split_whitespace()).output().expect("sandbar runs")
}

/// The repository.
pub fn repository_root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("a crate of the workspace")
}

/// Writes a file that only its owner may read, as Sandbar wants it of a credential.
pub fn write_secret(path: &Path, text: &str) {
    // Made as such: for a moment in between, Sandbar could see a file that everybody reads.
    let made = OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(path);
    let mut file = made.expect("a secret can be written");
    file.set_permissions(Permissions::from_mode(0o600)).expect("it is ours");
    file.write_all(text.as_bytes()).expect("a secret can be written");
}

/// What a program printed, as text.
pub fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}
