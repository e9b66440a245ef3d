//! The log verifies; with one byte flipped it does not.

use std::path::Path;

use serde_json::Value;

use super::Step;
use crate::demo::stage::{Stage, Wanted, shown};
use crate::demo::told::{Misbehaved, Told, promise};

pub(super) const STEP: Step<Stage> =
    Step { name: "log", title: "The log verifies; one byte flipped is found", play };

fn play(stage: &mut Stage, told: &mut Told) -> Result<(), Misbehaved> {
    told.tried("the proxy stops, which signs its log; an auditor: sandbar log verify");
    stage.stop()?;
    stage.record(Wanted { event: "checkpoint", ..Wanted::default() }, told)?;
    let (status, report) = verify(stage, &stage.log())?;
    promise(status == Some(0), &report)?;
    let number = |name: &str| report.pointer(name).and_then(Value::as_u64).unwrap_or_default();
    let (records, agree) = (number("/records"), number("/checkpoints/agree"));
    promise(records > 0 && agree > 0, format!("nothing is signed: {report}"))?;
    told.happened(format!("intact: {records} records, and {agree} of its checkpoints agree"));

    told.tried("an intruder: flips one bit of one byte in a copy of it");
    let copy = stage.at("copy");
    let line = flip(&stage.log(), &copy)?;
    let (status, report) = verify(stage, &copy)?;
    promise(status == Some(1), format!("it was not found: {report}"))?;
    let fault = |name: &str| report.pointer(&format!("/faults/0/{name}")).cloned();
    promise(fault("line") == Some(line.into()), format!("another line is named: {report}"))?;
    let what = fault("what").unwrap_or_default();
    told.happened(format!("changed, line {line}: {}", what.as_str().unwrap_or_default()));
    Ok(())
}

fn verify(stage: &Stage, log: &Path) -> Result<(Option<i32>, Value), Misbehaved> {
    let output = stage.operate(&["log", "verify", "--json", &shown(log)])?;
    let report = serde_json::from_slice(&output.stdout);
    Ok((output.status.code(), report.unwrap_or_default()))
}

/// Copies a log, and flips a bit in the middle of its middle line; the line's number.
fn flip(log: &Path, copy: &Path) -> Result<u64, Misbehaved> {
    std::fs::create_dir(copy)?;
    for entry in std::fs::read_dir(log)? {
        let entry = entry?;
        if entry.file_type()?.is_file() {
            std::fs::copy(entry.path(), copy.join(entry.file_name()))?;
        }
    }
    let segments = audit::segments(copy)?;
    let Some((_, segment)) = segments.first() else {
        return Err(Misbehaved("there is no log".to_owned()));
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
