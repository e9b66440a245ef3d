//! `sandbar log verify`: detects whether a log was changed, and reports it by exit status and text.

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::thread;
use std::time::Duration;

use anyhow::Context;
use audit::checkpoint::{self, Checkpoint, CheckpointKeys, CheckpointNotes, SignatureStatus};
use audit::verify::{Gap, LogIntegrity, VerifyProgress, VerifyReport};
use indicatif::{ProgressBar, ProgressStyle};

use crate::terminal::{BAD, GOOD, WARN, paint};
use crate::{EXIT_BAD_INPUT, OutputOptions};

/// Exit status for a changed log.
const EXIT_CHANGED: u8 = 1;

/// Verify that no record in a log was changed, removed, moved or added
#[derive(clap::Args)]
pub(crate) struct VerifyLogArgs {
    /// Segments, or directories of segments
    #[arg(required = true, value_name = "FILES")]
    files: Vec<PathBuf>,
    /// File of checkpoints held elsewhere; those beside the log are always read
    #[arg(long, value_name = "FILE")]
    checkpoint: Vec<PathBuf>,
    /// Public key of the checkpoints [default: the one beside the log]
    #[arg(long, value_name = "FILE")]
    key: Option<PathBuf>,
}

/// Verifies a log. Exit status: 0 intact, 1 changed, 2 incomplete or unreadable.
pub(crate) fn verify(args: &VerifyLogArgs, output: OutputOptions) -> anyhow::Result<ExitCode> {
    let keys = read_keys(args)?;
    // Read the checkpoints before listing the segments: while the log grows, a checkpoint read later could cover
    // records that the listed segments do not contain yet.
    let notes = read_checkpoints(args, keys.as_ref())?;
    let files = super::find_segments(&args.files)?;
    let mut report = verify_with_progress(&files, &notes.checkpoints)?;
    if args.key.is_some() && report.attested.is_none() {
        report.gaps.push(Gap::Unattested); // `--key` asks for a signature by that key
    }
    match output.json {
        true => anstream::println!("{}", report_json(&report, &notes)),
        false => print_report(&report, &notes),
    }
    Ok(match report.integrity() {
        LogIntegrity::Changed => ExitCode::from(EXIT_CHANGED),
        LogIntegrity::Incomplete => ExitCode::from(EXIT_BAD_INPUT),
        LogIntegrity::Intact => ExitCode::SUCCESS,
    })
}

fn read_keys(args: &VerifyLogArgs) -> anyhow::Result<Option<CheckpointKeys>> {
    let beside = || files_beside(&args.files, checkpoint::PUBLIC_KEY_FILE).into_iter().next();
    let Some(path) = args.key.clone().or_else(beside) else { return Ok(None) };
    let shown = path.display();
    let text = std::fs::read_to_string(&path).with_context(|| format!("cannot read {shown}"))?;
    CheckpointKeys::parse(&text).map(Some).with_context(|| format!("{shown} is not a key"))
}

fn read_checkpoints(args: &VerifyLogArgs, keys: Option<&CheckpointKeys>) -> anyhow::Result<CheckpointNotes> {
    let mut notes = CheckpointNotes::default();
    let given = args.checkpoint.iter().cloned();
    let files = given.chain(files_beside(&args.files, checkpoint::FILE)).collect();
    for path in super::dedup_files(files) {
        checkpoint::read_notes(&path, keys, &mut notes)?;
    }
    Ok(notes)
}

/// Returns the existing files called `name` in the directories of `paths`.
fn files_beside(paths: &[PathBuf], name: &str) -> Vec<PathBuf> {
    let dir = |path: &PathBuf| match path.is_dir() {
        true => Some(path.clone()),
        false => path.parent().map(Path::to_owned),
    };
    let beside = paths.iter().filter_map(dir).map(|dir| dir.join(name));
    beside.filter(|path| path.exists()).collect()
}

/// Verifies, with a progress bar on a terminal.
fn verify_with_progress(files: &[PathBuf], notes: &[Checkpoint]) -> anyhow::Result<VerifyReport> {
    let size = files.iter().filter_map(|file| file.metadata().ok()).map(|m| m.len()).sum();
    let bar = ProgressBar::new(size);
    let style = ProgressStyle::with_template("{bar:40} {bytes}/{total_bytes} {bytes_per_sec} {eta}");
    bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
    let progress = VerifyProgress::default();
    let (done, over) = channel::<()>();
    let result = thread::scope(|scope| {
        let (bar, progress) = (&bar, &progress);
        scope.spawn(move || {
            while over.recv_timeout(Duration::from_millis(100)) == Err(RecvTimeoutError::Timeout) {
                bar.set_position(progress.bytes.load(Ordering::Relaxed));
            }
        });
        let result = audit::verify::verify(files, notes, progress);
        drop(done);
        result
    });
    bar.finish_and_clear();
    result
        .map_err(|(path, error)| anyhow::Error::new(error).context(format!("cannot read {}", path.display())))
}

/// Summarises the signatures of the checkpoints in a word.
fn signature_status(report: &VerifyReport, notes: &CheckpointNotes) -> &'static str {
    let unchecked = |note: &Checkpoint| note.signature == SignatureStatus::Unchecked;
    match (report.attested, notes.checkpoints.iter().any(unchecked)) {
        (Some(_), _) => "good",
        (None, true) => "unchecked",
        (None, false) => "none",
    }
}

/// Counts the records after the last checkpoint, which someone with write access could have removed or forged.
fn uncovered_records(report: &VerifyReport) -> u64 {
    let last = report.last.map_or(0, |last| last.sequence);
    let before = report.first.map_or(0, |first| first.saturating_sub(1));
    last.saturating_sub(report.covered.unwrap_or(before))
}

fn print_hints(report: &VerifyReport, notes: &CheckpointNotes) {
    let hint = |text: String| anstream::println!("{} {text}", paint(WARN, "note:"));
    for line in &notes.unreadable {
        hint(format!("{}:{}: not a checkpoint", line.file.display(), line.line));
    }
    if signature_status(report, notes) == "unchecked" {
        hint("checkpoint signatures are not checked: pass the public key with --key".to_owned());
    }
    match uncovered_records(report) {
        0 => {}
        count => hint(format!("{count} records are not covered by a checkpoint")),
    }
}

fn print_report(report: &VerifyReport, notes: &CheckpointNotes) {
    for fault in &report.faults {
        let location = format!("{}:{}", fault.file.display(), fault.line);
        anstream::println!("{} {location}: {}", paint(BAD, "changed:"), fault.kind);
    }
    for gap in &report.gaps {
        anstream::println!("{} {gap}", paint(WARN, "incomplete:"));
    }
    print_hints(report, notes);
    let (word, style) = match report.integrity() {
        LogIntegrity::Changed => ("changed", BAD),
        LogIntegrity::Incomplete => ("incomplete", WARN),
        LogIntegrity::Intact => ("intact", GOOD),
    };
    anstream::println!(
        "{}: {} records, {} bytes, {} of {} checkpoints agree{}",
        paint(style, word),
        report.records,
        report.bytes,
        report.checkpoints,
        notes.checkpoints.len(),
        format_head(report),
    );
}

fn format_head(report: &VerifyReport) -> String {
    let ends = |last: audit::ChainHead| format!("; head {} {}", last.sequence, last.hash.as_str());
    report.last.map(ends).unwrap_or_default()
}

fn report_json(report: &VerifyReport, notes: &CheckpointNotes) -> serde_json::Value {
    let shown = |path: &Path| path.display().to_string();
    let faults = report.faults.iter().map(|fault| {
        serde_json::json!({
            "file": shown(&fault.file),
            "line": fault.line,
            "what": fault.kind.to_string(),
        })
    });
    let unreadable = notes.unreadable.iter();
    let unreadable =
        unreadable.map(|line| serde_json::json!({ "file": shown(&line.file), "line": line.line }));
    serde_json::json!({
        "verified": match report.integrity() {
            LogIntegrity::Changed => "changed",
            LogIntegrity::Incomplete => "incomplete",
            LogIntegrity::Intact => "intact",
        },
        "records": report.records,
        "bytes": report.bytes,
        "first": report.first,
        "last": report.last.map(|last| last.sequence),
        "head": report.last.map(|last| last.hash.as_str().to_owned()),
        "checkpoints": { "agree": report.checkpoints, "read": notes.checkpoints.len() },
        "signatures": signature_status(report, notes),
        "attested_through": report.covered,
        "uncovered": uncovered_records(report),
        "unreadable_checkpoints": unreadable.collect::<Vec<_>>(),
        "faults": faults.collect::<Vec<_>>(),
        "gaps": report.gaps.iter().map(ToString::to_string).collect::<Vec<_>>(),
    })
}
