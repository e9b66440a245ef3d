//! Small files of state, replaced whole: a reader, or a crash, finds the old one or the new one.

use std::fs::{self, File};
use std::io::{self, Write};
use std::path::Path;

use serde::Serialize;

/// What a file outlives.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Durability {
    /// The machine too: it is waited for.
    Disk,
    /// This process.
    Process,
}

/// Puts `value` into the place of what the file held.
pub(crate) fn write_atomic(
    path: &Path,
    value: &impl Serialize,
    outlives: Durability,
) -> io::Result<()> {
    let fresh = path.with_extension("new");
    let mut file = File::create(&fresh)?;
    file.write_all(&serde_json::to_vec(value)?)?;
    if outlives == Durability::Disk {
        file.sync_all()?;
    }
    fs::rename(&fresh, path)
}
