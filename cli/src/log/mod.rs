//! `sandbar log`: what operators and auditors do with the access log.

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

/// Verify, follow and sum up the access log
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

/// Runs the subcommand. Exit statuses stand at each.
pub(crate) fn run(args: &LogArgs, output: OutputOptions) -> anyhow::Result<ExitCode> {
    match &args.command {
        LogCommand::Query(args) => query::query(args, output),
        LogCommand::Tail(args) => tail::tail(args, output),
        LogCommand::Verify(args) => verify::verify(args, output),
    }
}

/// The segments meant: those of a directory, or the files themselves.
fn find_segments(paths: &[PathBuf]) -> anyhow::Result<Vec<PathBuf>> {
    let mut files = Vec::new();
    for path in paths {
        if path.is_dir() {
            let found = dir_segments(path)?;
            anyhow::ensure!(!found.is_empty(), "{} holds no segment of a log", path.display());
            files.extend(found);
        } else {
            files.push(path.clone());
        }
    }
    Ok(dedup_files(files))
}

/// Each file once, however it is spelt; one that cannot be found is left for whoever reads it.
fn dedup_files(mut files: Vec<PathBuf>) -> Vec<PathBuf> {
    let place = |path: &mut PathBuf| path.canonicalize().unwrap_or_else(|_| path.clone());
    files.sort_by_cached_key(|path| place(&mut path.clone()));
    files.dedup_by_key(place);
    files
}

fn dir_segments(dir: &Path) -> anyhow::Result<Vec<PathBuf>> {
    let found =
        audit::list_segments(dir).with_context(|| format!("cannot read {}", dir.display()))?;
    Ok(found.into_iter().map(|(_, path)| path).collect())
}
