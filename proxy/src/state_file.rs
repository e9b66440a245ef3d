//! Small files of state in the log directory, as JSON, replaced whole and readable by their owner only.
//!
//! They are read at the start and written by one thread ([`sys::worker`]), so that a file system that does not answer
//! stops neither the runtime nor readers of the state in memory.

use std::io;
use std::path::Path;

use serde::Serialize;
pub(crate) use sys::file::Durability;
use sys::file::{self, Mode};

/// Largest state file: 1000 grants, or the budgets of one sandbox, are far smaller.
const MAX_BYTES: u64 = 64 << 20;

/// Reads a state file; `None` if there is none.
pub(crate) fn read_state(path: &Path) -> io::Result<Option<Vec<u8>>> {
    file::read_state(path, MAX_BYTES)
}

/// Replaces the content of a state file.
pub(crate) fn write_atomic(path: &Path, value: &impl Serialize, durability: Durability) -> io::Result<()> {
    file::replace(path, &serde_json::to_vec(value)?, Mode::Owner, durability)
}
