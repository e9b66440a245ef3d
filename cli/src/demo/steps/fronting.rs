//! Fronting: an allowed name outside, another inside.

use super::DemoStep;
use crate::demo::agent::FetchRequest;
use crate::demo::context::{DemoContext, RecordQuery};
use crate::demo::report::{StepFailure, StepReport, ensure};

pub(super) const STEP: DemoStep<DemoContext> =
    DemoStep { name: "fronting", title: "An allowed name as a front for another", run };

fn run(stage: &mut DemoContext, told: &mut StepReport) -> Result<(), StepFailure> {
    told.note_attempt("sandbox-a: TLS for code.example, and inside it `Host: evil.example`");
    let front = FetchRequest::get("code.example", "/drop");
    let front = FetchRequest { named: Some("evil.example".to_owned()), ..front };
    let answer = stage.a.fetch(&front)?.map_err(StepFailure)?;
    ensure(answer.body.contains("names_disagree"), &answer.body)?;
    told.note_result(format!("{}: names_disagree; nothing reached either host", answer.status));
    let wanted =
        RecordQuery { sandbox: stage.a.id, reason: "names_disagree", ..RecordQuery::default() };
    stage.expect_record(wanted, told)?;
    stage.expect_no_traffic()
}
