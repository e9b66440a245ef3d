//! `sandbar log`: reads, follows and verifies the access log.

mod filter;
mod query;
mod render;
mod tail;
mod verify;

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::Context;
use clap::Subcommand;

use super::OutputOptions;

/// Verify, follow and summarise the access log
#[derive(clap::Args)]
pub(crate) struct LogArgs {
    #[command(subcommand)]
    command: LogCommand,
}

#[derive(Subcommand)]
enum LogCommand {
    Query(query::QueryArgs),
    Tail(tail::TailArgs),
    Verify(verify::VerifyLogArgs),
}

/// Runs the subcommand, which documents its exit status.
pub(crate) fn run(args: &LogArgs, output: OutputOptions) -> anyhow::Result<ExitCode> {
    match &args.command {
        LogCommand::Query(args) => query::query(args, output),
        LogCommand::Tail(args) => tail::tail(args, output),
        LogCommand::Verify(args) => verify::verify(args, output),
    }
}

/// Expands directories into their segments.
fn find_segments(paths: &[PathBuf]) -> anyhow::Result<Vec<PathBuf>> {
    let mut files = Vec::new();
    for path in paths {
        if path.is_dir() {
            let segments = dir_segments(path)?;
            anyhow::ensure!(!segments.is_empty(), "{} contains no log segments", path.display());
            files.extend(segments);
        } else {
            files.push(path.clone());
        }
    }
    Ok(dedup_files(files))
}

/// Removes duplicates by canonical path. A missing file stays in the list, so that reading it reports the error.
fn dedup_files(mut files: Vec<PathBuf>) -> Vec<PathBuf> {
    let canonical = |path: &mut PathBuf| path.canonicalize().unwrap_or_else(|_| path.clone());
    files.sort_by_cached_key(|path| canonical(&mut path.clone()));
    files.dedup_by_key(canonical);
    files
}

fn dir_segments(dir: &Path) -> anyhow::Result<Vec<PathBuf>> {
    let segments = audit::list_segments(dir).with_context(|| format!("cannot read {}", dir.display()))?;
    Ok(segments.into_iter().map(|(_, path)| path).collect())
}
