//! Memory belongs to the sandbox whose path a request came by, whatever token it shows.

use super::DemoStep;
use crate::demo::agent::FetchRequest;
use crate::demo::context::{DemoContext, RecordQuery};
use crate::demo::fake_internet::MEMORY;
use crate::demo::files::issue_token;
use crate::demo::report::{StepFailure, StepReport, ensure};

pub(super) const STEP: DemoStep<DemoContext> =
    DemoStep { name: "memory", title: "A memory is recalled by its own sandbox only", run };

fn run(stage: &mut DemoContext, told: &mut StepReport) -> Result<(), StepFailure> {
    let token = issue_token(&stage.issuer, stage.a.id)?;
    let recall = FetchRequest {
        fields: vec![
            ("Sandbox-Identity".to_owned(), token),
            ("Content-Type".to_owned(), "application/json".to_owned()),
        ],
        body: r#"{"query":"launch","bank_id":"staging:team-a"}"#.to_owned(),
        ..FetchRequest::post("memory.example", "/v1/recall")
    };
    told.note_attempt("sandbox-a: recalls from bank staging:team-a, with its own token");
    let answer = stage.a.fetch(&recall)?.map_err(StepFailure)?;
    ensure(answer.status == 200 && answer.body.contains(MEMORY), &answer.body)?;
    told.note_result(format!("200 `{MEMORY}`"));
    let wanted = RecordQuery { sandbox: stage.a.id, stage: "decision", ..RecordQuery::default() };
    stage.expect_record(RecordQuery { host: "memory.example", ..wanted }, told)?;

    let before = stage.new_connections().len();
    told.note_attempt("sandbox-b: the same request with the same token, which it has stolen");
    let answer = stage.b.fetch(&recall)?.map_err(StepFailure)?;
    ensure(answer.body.contains("identity_mismatch"), &answer.body)?;
    ensure(!answer.body.contains(MEMORY), "it was told the memory")?;
    ensure(stage.new_connections().len() == before, "the service was asked")?;
    told.note_result(format!("{}: identity_mismatch; nothing reached the service", answer.status));
    let wanted = RecordQuery { sandbox: stage.b.id, stage: "denied", ..RecordQuery::default() };
    stage.expect_record(RecordQuery { reason: "identity_mismatch", ..wanted }, told)?;
    Ok(())
}
