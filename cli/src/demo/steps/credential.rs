//! A credential that is used by the sandbox and never seen in it.

use super::DemoStep;
use crate::demo::agent::FetchRequest;
use crate::demo::context::{DemoContext, RecordQuery};
use crate::demo::files::SECRET;
use crate::demo::report::{StepFailure, StepReport, ensure};

pub(super) const STEP: DemoStep<DemoContext> =
    DemoStep { name: "credential", title: "A credential the sandbox never sees", run };

fn run(stage: &mut DemoContext, told: &mut StepReport) -> Result<(), StepFailure> {
    told.note_attempt(
        "sandbox-a: GET https://model.example/v1/echo, which repeats every header it gets",
    );
    let own = ("Authorization".to_owned(), "Bearer made-up".to_owned());
    let fetch =
        FetchRequest { fields: vec![own], ..FetchRequest::get("model.example", "/v1/echo") };
    let answer = stage.a.fetch(&fetch)?.map_err(StepFailure)?;
    ensure(answer.status == 200, format!("the answer is {}: {}", answer.status, answer.body))?;
    let arrived = stage.new_connections();
    let requests = arrived.iter().filter_map(|arrival| arrival.request.as_ref());
    let seen: Vec<&(String, String)> = requests
        .flat_map(|request| &request.fields)
        .filter(|(name, _)| name == "authorization")
        .collect();
    let wanted = ("authorization".to_owned(), format!("Bearer {SECRET}"));
    ensure(seen == [&wanted], format!("the host got {seen:?}"))?;
    let back = answer.body.lines().find(|line| line.starts_with("authorization:"));
    let back = back.ok_or_else(|| StepFailure("it was not repeated".to_owned()))?;
    ensure(!answer.body.contains(SECRET), "the sandbox sees it")?;
    told.note_result("the host got the real key; the sandbox's made-up one was removed");
    told.note_result(format!("the sandbox got `{back}`"));
    let wanted = RecordQuery { sandbox: stage.a.id, stage: "decision", ..RecordQuery::default() };
    stage.expect_record(RecordQuery { host: "model.example", ..wanted }, told)?;
    for (_, segment) in audit::list_segments(&stage.log_dir())? {
        let text = std::fs::read_to_string(segment)?;
        ensure(!text.contains(SECRET), "it stands in the log")?;
    }
    Ok(())
}
