//! `sandbar`: arguments in, one file per subcommand, exit code out.

use std::process::ExitCode;

/// Requests make many small blocks; the system's allocator takes a sixth more time for them.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

fn main() -> ExitCode {
    proxy::run()
}
