//! A credential that the sandbox uses but never sees.

use super::DemoStep;
use crate::demo::agent::FetchRequest;
use crate::demo::context::{DemoContext, RecordQuery};
use crate::demo::files::SECRET;
use crate::demo::report::{StepFailure, StepReport, ensure};

pub(super) const STEP: DemoStep<DemoContext> =
    DemoStep { name: "credential", title: "A credential the sandbox never sees", run };

fn run(demo: &mut DemoContext, report: &mut StepReport) -> Result<(), StepFailure> {
    report.note_attempt("sandbox-a: GET https://model.example/v1/echo, which echoes every request header");
    let fake = ("Authorization".to_owned(), "Bearer made-up".to_owned());
    let fetch = FetchRequest { fields: vec![fake], ..FetchRequest::get("model.example", "/v1/echo") };
    let answer = demo.a.fetch(&fetch)?.map_err(StepFailure)?;
    ensure(answer.status == 200, format!("the status is {}: {}", answer.status, answer.body))?;
    let arrived = demo.new_connections();
    let requests = arrived.iter().filter_map(|arrival| arrival.request.as_ref());
    let received: Vec<&(String, String)> =
        requests.flat_map(|request| &request.fields).filter(|(name, _)| name == "authorization").collect();
    let wanted = ("authorization".to_owned(), format!("Bearer {SECRET}"));
    ensure(received == [&wanted], format!("the host got {received:?}"))?;
    let echoed = answer.body.lines().find(|line| line.starts_with("authorization:"));
    let echoed = echoed.ok_or_else(|| StepFailure("the header was not echoed".to_owned()))?;
    ensure(!answer.body.contains(SECRET), "the sandbox got the credential")?;
    report.note_result("the host got the real key instead of the sandbox's made-up one");
    report.note_result(format!("the sandbox got `{echoed}`"));
    let wanted = RecordQuery { sandbox: demo.a.id, stage: "decision", ..RecordQuery::default() };
    demo.expect_record(RecordQuery { host: "model.example", ..wanted }, report)?;
    for (_, segment) in audit::list_segments(&demo.log_dir())? {
        let text = std::fs::read_to_string(segment)?;
        ensure(!text.contains(SECRET), "the credential is in the log")?;
    }
    Ok(())
}
