//! The log verifies; with one bit flipped it does not.

use std::path::Path;

use serde_json::Value;

use super::DemoStep;
use crate::demo::context::{DemoContext, RecordQuery, path_text};
use crate::demo::report::{StepFailure, StepReport, ensure};

pub(super) const STEP: DemoStep<DemoContext> =
    DemoStep { name: "log", title: "The log verifies; a flipped bit is detected", run };

fn run(demo: &mut DemoContext, report: &mut StepReport) -> Result<(), StepFailure> {
    report.note_attempt("the proxy stops, which signs its log; an auditor runs sandbar log verify");
    demo.stop()?;
    demo.expect_record(RecordQuery { event: "checkpoint", ..RecordQuery::default() }, report)?;
    let (status, verified) = run_verify(demo, &demo.log_dir())?;
    ensure(status == Some(0), &verified)?;
    let number = |name: &str| verified.pointer(name).and_then(Value::as_u64).unwrap_or_default();
    let (records, agree) = (number("/records"), number("/checkpoints/agree"));
    ensure(records > 0 && agree > 0, format!("no checkpoint was verified: {verified}"))?;
    report.note_result(format!("intact: {records} records, {agree} checkpoints agree"));

    report.note_attempt("an intruder flips one bit in a copy of the log");
    let copy = demo.path("copy");
    let line = flip_bit(&demo.log_dir(), &copy)?;
    let (status, verified) = run_verify(demo, &copy)?;
    ensure(status == Some(1), format!("the change was not detected: {verified}"))?;
    let fault = |name: &str| verified.pointer(&format!("/faults/0/{name}")).cloned();
    ensure(fault("line") == Some(line.into()), format!("the report names another line: {verified}"))?;
    let what = fault("what").unwrap_or_default();
    report.note_result(format!("changed, line {line}: {}", what.as_str().unwrap_or_default()));
    Ok(())
}

fn run_verify(demo: &DemoContext, log: &Path) -> Result<(Option<i32>, Value), StepFailure> {
    let output = demo.run_cli(&["log", "verify", "--json", &path_text(log)])?;
    let report = serde_json::from_slice(&output.stdout);
    Ok((output.status.code(), report.unwrap_or_default()))
}

/// Copies a log and flips a bit in the middle of its middle line; returns the line number.
fn flip_bit(log: &Path, copy: &Path) -> Result<u64, StepFailure> {
    std::fs::create_dir(copy)?;
    for entry in std::fs::read_dir(log)? {
        let entry = entry?;
        if entry.file_type()?.is_file() {
            std::fs::copy(entry.path(), copy.join(entry.file_name()))?;
        }
    }
    let segments = audit::list_segments(copy)?;
    let Some((_, segment)) = segments.first() else {
        return Err(StepFailure("the log has no segment".to_owned()));
    };
    let mut bytes = std::fs::read(segment)?;
    let ends: Vec<usize> =
        bytes.iter().enumerate().filter(|(_, byte)| **byte == b'\n').map(|(at, _)| at).collect();
    let middle = ends.len() / 2;
    let start = middle.checked_sub(1).and_then(|before| ends.get(before)).map_or(0, |end| end + 1);
    let end = ends.get(middle).copied().unwrap_or(start);
    if let Some(byte) = bytes.get_mut(start + (end - start) / 2) {
        *byte ^= 1;
    }
    std::fs::write(segment, bytes)?;
    Ok(middle as u64 + 1)
}
