//! `sandbar log tail`: shows the last records, one per line, and follows the log across rotations.

use std::collections::VecDeque;
use std::io::{self, Write};
use std::path::PathBuf;
use std::process::ExitCode;
use std::thread;
use std::time::Duration;

use anyhow::Context;
use audit::view::{Follower, RecordFilter, RecordView};

use super::filter::FilterArgs;
use super::render::{escape_json, format_record};
use crate::OutputOptions;

/// Polling interval while the log does not grow.
const POLL: Duration = Duration::from_millis(100);
/// Maximum number of records shown before following.
const LAST_MAX: usize = 100_000;

/// Show the last records; with `--follow`, also every new one
#[derive(clap::Args)]
pub(crate) struct TailArgs {
    /// Directory of the log
    #[arg(default_value = "log", value_name = "DIR")]
    dir: PathBuf,
    /// Keep running and show every new record
    #[arg(long, short)]
    follow: bool,
    /// Number of selected records to show
    #[arg(long, short = 'n', default_value_t = 20, value_name = "COUNT")]
    last: usize,
    #[command(flatten)]
    filter: FilterArgs,
}

/// Shows records. Exit status: 0, or 2 if the log cannot be read.
pub(crate) fn tail(args: &TailArgs, output: OutputOptions) -> anyhow::Result<ExitCode> {
    let cannot_read = || format!("cannot read {}", args.dir.display());
    let filter = args.filter.to_filter();
    let (mut follower, last) = last_records(args, &filter, output).with_context(cannot_read)?;
    for text in last {
        if print_line(&text).is_err() {
            return Ok(ExitCode::SUCCESS);
        }
    }
    if args.follow {
        follow(&mut follower, &filter, output).with_context(cannot_read)?;
    }
    Ok(ExitCode::SUCCESS)
}

/// Returns the last selected records, and a follower positioned after them. Starts with the newest
/// segment and doubles the number of segments until there are enough records.
fn last_records(
    args: &TailArgs,
    filter: &RecordFilter,
    output: OutputOptions,
) -> io::Result<(Follower, VecDeque<String>)> {
    let (segments, keep) = (audit::list_segments(&args.dir)?.len(), args.last.min(LAST_MAX));
    let mut back = 0;
    loop {
        let mut follower = Follower::from_newest(&args.dir, back)?;
        let mut last = VecDeque::new();
        follower.poll(|line| {
            last.extend(render_selected(line, filter, output));
            if last.len() > keep {
                last.pop_front();
            }
        })?;
        if last.len() >= keep || back >= segments {
            return Ok((follower, last));
        }
        back = back * 2 + 1;
    }
}

/// Shows every new record until stdout is closed.
fn follow(follower: &mut Follower, filter: &RecordFilter, output: OutputOptions) -> io::Result<()> {
    loop {
        let mut written = Ok(());
        let grew = follower.poll(|line| {
            if let (Some(text), Ok(())) = (render_selected(line, filter, output), &written) {
                written = print_line(&text);
            }
        })?;
        if written.is_err() {
            return Ok(());
        }
        if !grew {
            thread::sleep(POLL);
        }
    }
}

/// Renders a record, if the filter selects it.
fn render_selected(line: &[u8], filter: &RecordFilter, output: OutputOptions) -> Option<String> {
    let view = RecordView::parse(line).filter(|view| filter.matches(view))?;
    match output.json {
        true => Some(escape_json(line)),
        false => Some(format_record(&view)),
    }
}

fn print_line(text: &str) -> io::Result<()> {
    let mut out = anstream::stdout().lock();
    writeln!(out, "{text}")?;
    out.flush()
}
