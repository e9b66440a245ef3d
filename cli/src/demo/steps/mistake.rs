//! An invalid policy changes nothing, and the error names file and line.

use super::DemoStep;
use crate::demo::agent::FetchRequest;
use crate::demo::context::{DemoContext, RecordQuery};
use crate::demo::files::POLICY_A;
use crate::demo::report::{StepFailure, StepReport, ensure};

pub(super) const STEP: DemoStep<DemoContext> =
    DemoStep { name: "mistake", title: "An invalid policy is rejected with file and line", run };

fn run(demo: &mut DemoContext, report: &mut StepReport) -> Result<(), StepFailure> {
    let before = demo.generation();
    report.note_attempt("the network team writes `method = [\"GET\"]` instead of `methods`");
    let invalid = POLICY_A.replace("methods = [\"GET\", \"HEAD\"]", "method  = [\"GET\"]");
    let line = invalid.lines().position(|line| line.starts_with("method ")).unwrap_or_default() + 1;
    demo.edit_policy(&invalid)?;
    let wanted = RecordQuery { event: "policy_rejected", ..RecordQuery::default() };
    let mut aside = StepReport::default();
    let record = demo.expect_record(wanted, &mut aside)?;
    let message = record.pointer("/message").and_then(|text| text.as_str()).unwrap_or_default();
    let location = format!("agent-a.toml:{line}:");
    ensure(message.contains(&location), format!("`{location}` is not in the error: {message}"))?;
    report.note_result(error_line(message, &location));
    report.note_record(&record);
    ensure(demo.generation() == before, "the invalid policy took effect")?;
    let answer = demo.a.fetch(&FetchRequest::get("code.example", "/still"))?.map_err(StepFailure)?;
    ensure(answer.status == 200, format!("the previous rules are not in force: {}", answer.status))?;
    report.note_result(format!("generation {before} stays in force; code.example still answers"));
    Ok(demo.restore_policy()?)
}

/// The error in one line, without the directory and the source excerpt.
fn error_line(message: &str, location: &str) -> String {
    let line = message.lines().find(|line| line.contains(location)).unwrap_or(message);
    let first = message.lines().next().unwrap_or_default().trim();
    let at = line.find("agent-a.toml").and_then(|at| line.get(at..)).unwrap_or(line).trim();
    if line.contains(first) { at.to_owned() } else { format!("{at} {first}") }
}
