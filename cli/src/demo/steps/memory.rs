//! Memory belongs to the sandbox of the channel a request arrived on, whatever token it carries.

use super::DemoStep;
use crate::demo::agent::FetchRequest;
use crate::demo::context::{DemoContext, RecordQuery};
use crate::demo::fake_internet::MEMORY;
use crate::demo::files::issue_token;
use crate::demo::report::{StepFailure, StepReport, ensure};

pub(super) const STEP: DemoStep<DemoContext> =
    DemoStep { name: "memory", title: "Only its own sandbox can recall a memory", run };

fn run(demo: &mut DemoContext, report: &mut StepReport) -> Result<(), StepFailure> {
    let token = issue_token(&demo.issuer, demo.a.id)?;
    let recall = FetchRequest {
        fields: vec![
            ("Sandbox-Identity".to_owned(), token),
            ("Content-Type".to_owned(), "application/json".to_owned()),
        ],
        body: r#"{"query":"launch","bank_id":"staging:team-a"}"#.to_owned(),
        ..FetchRequest::post("memory.example", "/v1/recall")
    };
    report.note_attempt("sandbox-a: recalls from bank staging:team-a, with its own token");
    let answer = demo.a.fetch(&recall)?.map_err(StepFailure)?;
    ensure(answer.status == 200 && answer.body.contains(MEMORY), &answer.body)?;
    report.note_result(format!("200 `{MEMORY}`"));
    let wanted = RecordQuery { sandbox: demo.a.id, stage: "decision", ..RecordQuery::default() };
    demo.expect_record(RecordQuery { host: "memory.example", ..wanted }, report)?;

    let before = demo.new_connections().len();
    report.note_attempt("sandbox-b: sends the same request with the token stolen from sandbox-a");
    let answer = demo.b.fetch(&recall)?.map_err(StepFailure)?;
    ensure(answer.body.contains("identity_mismatch"), &answer.body)?;
    ensure(!answer.body.contains(MEMORY), "sandbox-b got the memory")?;
    ensure(demo.new_connections().len() == before, "the service got a request")?;
    report.note_result(format!("{}: identity_mismatch; nothing reached the service", answer.status));
    let wanted = RecordQuery { sandbox: demo.b.id, stage: "denied", ..RecordQuery::default() };
    demo.expect_record(RecordQuery { reason: "identity_mismatch", ..wanted }, report)?;
    Ok(())
}
