//! A policy with a slip changes nothing, and says where the slip is.

use super::DemoStep;
use crate::demo::agent::FetchRequest;
use crate::demo::context::{DemoContext, RecordQuery};
use crate::demo::files::POLICY_A;
use crate::demo::report::{StepFailure, StepReport, ensure};

pub(super) const STEP: DemoStep<DemoContext> =
    DemoStep { name: "mistake", title: "A bad policy is refused with its line", run };

fn run(stage: &mut DemoContext, told: &mut StepReport) -> Result<(), StepFailure> {
    let before = stage.generation();
    told.note_attempt("the network team writes `method = [\"GET\"]` where `methods` is meant");
    let slip = POLICY_A.replace("methods = [\"GET\", \"HEAD\"]", "method  = [\"GET\"]");
    let line = slip.lines().position(|line| line.starts_with("method ")).unwrap_or_default() + 1;
    stage.edit_policy(&slip)?;
    let wanted = RecordQuery { event: "policy_rejected", ..RecordQuery::default() };
    let mut aside = StepReport::default();
    let record = stage.expect_record(wanted, &mut aside)?;
    let message = record.pointer("/message").and_then(|text| text.as_str()).unwrap_or_default();
    let place = format!("agent-a.toml:{line}:");
    ensure(message.contains(&place), format!("it does not say `{place}`: {message}"))?;
    told.note_result(complaint_line(message, &place));
    told.note_record(&record);
    ensure(stage.generation() == before, "it was put in force")?;
    let answer =
        stage.a.fetch(&FetchRequest::get("code.example", "/still"))?.map_err(StepFailure)?;
    ensure(answer.status == 200, format!("the rules in force did not stay: {}", answer.status))?;
    told.note_result(format!("generation {before} stays in force; code.example still answers"));
    Ok(stage.restore_policy()?)
}

/// The complaint, without where the file is and without its drawing.
fn complaint_line(message: &str, place: &str) -> String {
    let line = message.lines().find(|line| line.contains(place)).unwrap_or(message);
    let first = message.lines().next().unwrap_or_default().trim();
    let at = line.find("agent-a.toml").and_then(|at| line.get(at..)).unwrap_or(line).trim();
    if line.contains(first) { at.to_owned() } else { format!("{at} {first}") }
}
