//! A destination that a rule names is reachable.

use super::DemoStep;
use crate::demo::agent::FetchRequest;
use crate::demo::context::{DemoContext, RecordQuery};
use crate::demo::fake_internet::ObservedConnection;
use crate::demo::report::{StepFailure, StepReport, ensure};

pub(super) const STEP: DemoStep<DemoContext> =
    DemoStep { name: "allowed", title: "A destination named in a rule is reachable", run };

fn run(demo: &mut DemoContext, report: &mut StepReport) -> Result<(), StepFailure> {
    report.note_attempt("sandbox-a: GET https://code.example/readme");
    let answer = demo.a.fetch(&FetchRequest::get("code.example", "/readme"))?.map_err(StepFailure)?;
    ensure(answer.status == 200, format!("the status is {}", answer.status))?;
    ensure(answer.body == "hello from code.example", &answer.body)?;
    let arrived = demo.new_connections();
    let asked = |arrival: &&ObservedConnection| {
        arrival.request.as_ref().is_some_and(|request| request.line.starts_with("GET /readme "))
    };
    let Some(arrival) = arrived.iter().find(asked) else {
        return Err(StepFailure("the origin server got no request".to_owned()));
    };
    report.note_result(format!("200 `{}`, from {}", answer.body, arrival.at));
    let wanted = RecordQuery { stage: "decision", host: "code.example", ..RecordQuery::default() };
    demo.expect_record(RecordQuery { sandbox: demo.a.id, ..wanted }, report)?;
    Ok(())
}
