//! The log verifies; with one byte flipped it does not.

use std::path::Path;

use serde_json::Value;

use super::DemoStep;
use crate::demo::context::{DemoContext, RecordQuery, path_text};
use crate::demo::report::{StepFailure, StepReport, ensure};

pub(super) const STEP: DemoStep<DemoContext> =
    DemoStep { name: "log", title: "The log verifies; one byte flipped is found", run };

fn run(stage: &mut DemoContext, told: &mut StepReport) -> Result<(), StepFailure> {
    told.note_attempt("the proxy stops, which signs its log; an auditor: sandbar log verify");
    stage.stop()?;
    stage.expect_record(RecordQuery { event: "checkpoint", ..RecordQuery::default() }, told)?;
    let (status, report) = run_verify(stage, &stage.log_dir())?;
    ensure(status == Some(0), &report)?;
    let number = |name: &str| report.pointer(name).and_then(Value::as_u64).unwrap_or_default();
    let (records, agree) = (number("/records"), number("/checkpoints/agree"));
    ensure(records > 0 && agree > 0, format!("nothing is signed: {report}"))?;
    told.note_result(format!("intact: {records} records, and {agree} of its checkpoints agree"));

    told.note_attempt("an intruder: flips one bit of one byte in a copy of it");
    let copy = stage.path("copy");
    let line = flip_bit(&stage.log_dir(), &copy)?;
    let (status, report) = run_verify(stage, &copy)?;
    ensure(status == Some(1), format!("it was not found: {report}"))?;
    let fault = |name: &str| report.pointer(&format!("/faults/0/{name}")).cloned();
    ensure(fault("line") == Some(line.into()), format!("another line is named: {report}"))?;
    let what = fault("what").unwrap_or_default();
    told.note_result(format!("changed, line {line}: {}", what.as_str().unwrap_or_default()));
    Ok(())
}

fn run_verify(stage: &DemoContext, log: &Path) -> Result<(Option<i32>, Value), StepFailure> {
    let output = stage.run_cli(&["log", "verify", "--json", &path_text(log)])?;
    let report = serde_json::from_slice(&output.stdout);
    Ok((output.status.code(), report.unwrap_or_default()))
}

/// Copies a log, and flips a bit in the middle of its middle line; the line's number.
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
        return Err(StepFailure("there is no log".to_owned()));
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
