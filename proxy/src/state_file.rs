//! Small files of state in the log directory, as JSON, replaced whole and readable by their owner only.

use std::io;
use std::path::Path;

use serde::Serialize;
pub(crate) use sys::file::Durability;
use sys::file::{self, Mode};

/// Replaces the content of a state file.
pub(crate) fn write_atomic(path: &Path, value: &impl Serialize, durability: Durability) -> io::Result<()> {
    file::replace(path, &serde_json::to_vec(value)?, Mode::Owner, durability)
}
