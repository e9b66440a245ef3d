//! The real engine: a virtual environment with the pinned package, made once and kept below `target`.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::Command;

use integration::repository_root;

/// The Python that has the engine.
pub(crate) fn engine_python() -> PathBuf {
    let home = std::env::var_os("CARGO_TARGET_DIR").map_or(repository_root().join("target"), PathBuf::from);
    let (home, needs) = (home.join("memory-engine"), repository_root().join("deploy/memory-engine.sh"));
    let python = home.join("bin/python");
    if !is_ready(&python) {
        fs::create_dir_all(home.parent().unwrap()).unwrap();
        let lock = File::create(home.with_extension("lock")).unwrap();
        lock.lock().unwrap(); // tests begin together
        if !is_ready(&python) {
            let made = Command::new(needs).arg(&home).output().expect("a shell");
            let said = String::from_utf8_lossy(&made.stderr);
            assert!(made.status.success(), "the memory engine cannot be installed: {said}");
        }
    }
    python
}

fn is_ready(python: &Path) -> bool {
    let asked = Command::new(python).args(["-c", "import astrocyte"]).output();
    asked.is_ok_and(|asked| asked.status.success())
}
