//! What a rule names passes.

use super::DemoStep;
use crate::demo::agent::FetchRequest;
use crate::demo::context::{DemoContext, RecordQuery};
use crate::demo::fake_internet::ObservedConnection;
use crate::demo::report::{StepFailure, StepReport, ensure};

pub(super) const STEP: DemoStep<DemoContext> =
    DemoStep { name: "allowed", title: "What a rule names passes", run };

fn run(stage: &mut DemoContext, told: &mut StepReport) -> Result<(), StepFailure> {
    told.note_attempt("sandbox-a: GET https://code.example/readme");
    let answer =
        stage.a.fetch(&FetchRequest::get("code.example", "/readme"))?.map_err(StepFailure)?;
    ensure(answer.status == 200, format!("the answer is {}", answer.status))?;
    ensure(answer.body == "hello from code.example", &answer.body)?;
    let arrived = stage.new_connections();
    let asked = |arrival: &&ObservedConnection| {
        arrival.request.as_ref().is_some_and(|request| request.line.starts_with("GET /readme "))
    };
    let Some(arrival) = arrived.iter().find(asked) else {
        return Err(StepFailure("the origin was not asked".to_owned()));
    };
    told.note_result(format!("200 `{}`, from {}", answer.body, arrival.at));
    let wanted = RecordQuery { stage: "decision", host: "code.example", ..RecordQuery::default() };
    stage.expect_record(RecordQuery { sandbox: stage.a.id, ..wanted }, told)?;
    Ok(())
}
