//! What no rule names does not pass, and the sandbox is told why.

use super::DemoStep;
use crate::demo::agent::FetchRequest;
use crate::demo::context::{DemoContext, RecordQuery};
use crate::demo::report::{StepFailure, StepReport, ensure};

pub(super) const STEP: DemoStep<DemoContext> =
    DemoStep { name: "denied", title: "Everything else is denied, and says why", run };

fn run(stage: &mut DemoContext, told: &mut StepReport) -> Result<(), StepFailure> {
    told.note_attempt("sandbox-a: looks up paste.example, which exists and which no rule names");
    let found = stage.a.resolve("paste.example")?;
    ensure(found.is_none(), "it was told an address")?;
    told.note_result("no such name; the world's resolver was not even asked");
    let wanted =
        RecordQuery { sandbox: stage.a.id, host: "paste.example", ..RecordQuery::default() };
    stage.expect_record(RecordQuery { reason: "not_listed", ..wanted }, told)?;

    told.note_attempt(
        "sandbox-a: POST https://code.example/upload, where a rule allows GET and HEAD",
    );
    let upload = FetchRequest {
        body: "all I know".to_owned(),
        ..FetchRequest::post("code.example", "/upload")
    };
    let answer = stage.a.fetch(&upload)?.map_err(StepFailure)?;
    ensure(answer.status == 403, format!("the answer is {}", answer.status))?;
    ensure(answer.body.contains("method_not_allowed"), &answer.body)?;
    told.note_result(format!("403 method_not_allowed: {}", explanation_line(&answer.body)));
    let wanted =
        RecordQuery { sandbox: stage.a.id, host: "code.example", ..RecordQuery::default() };
    stage.expect_record(RecordQuery { reason: "method_not_allowed", ..wanted }, told)?;

    stage.expect_no_traffic()?;
    let asked = stage.new_queries();
    ensure(!asked.iter().any(|name| name.contains("paste")), format!("it asked: {asked:?}"))
}

/// The explanation of a refusal, in a line: why, and what to do next.
fn explanation_line(body: &str) -> String {
    let why = body.lines().nth(1).unwrap_or_default();
    let next = body.lines().find_map(|line| line.strip_prefix("next:")).unwrap_or_default();
    format!("{why} {}", next.trim())
}
