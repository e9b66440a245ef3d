//! Everything that no rule names is denied, and the sandbox gets the reason.

use super::DemoStep;
use crate::demo::agent::FetchRequest;
use crate::demo::context::{DemoContext, RecordQuery};
use crate::demo::report::{StepFailure, StepReport, ensure};

pub(super) const STEP: DemoStep<DemoContext> =
    DemoStep { name: "denied", title: "Everything else is denied, with the reason", run };

fn run(demo: &mut DemoContext, report: &mut StepReport) -> Result<(), StepFailure> {
    report.note_attempt("sandbox-a: looks up paste.example, which exists but is in no rule");
    let address = demo.a.resolve("paste.example")?;
    ensure(address.is_none(), "it got an address")?;
    report.note_result("NXDOMAIN; the upstream resolver was not asked");
    let wanted = RecordQuery { sandbox: demo.a.id, host: "paste.example", ..RecordQuery::default() };
    demo.expect_record(RecordQuery { reason: "not_listed", ..wanted }, report)?;

    report.note_attempt("sandbox-a: POST https://code.example/upload, where the rule allows GET and HEAD");
    let upload =
        FetchRequest { body: "all I know".to_owned(), ..FetchRequest::post("code.example", "/upload") };
    let answer = demo.a.fetch(&upload)?.map_err(StepFailure)?;
    ensure(answer.status == 403, format!("the status is {}", answer.status))?;
    ensure(answer.body.contains("method_not_allowed"), &answer.body)?;
    report.note_result(format!("403 method_not_allowed: {}", explanation_line(&answer.body)));
    let wanted = RecordQuery { sandbox: demo.a.id, host: "code.example", ..RecordQuery::default() };
    demo.expect_record(RecordQuery { reason: "method_not_allowed", ..wanted }, report)?;

    demo.expect_no_traffic()?;
    let asked = demo.new_queries();
    ensure(!asked.iter().any(|name| name.contains("paste")), format!("upstream queries: {asked:?}"))
}

/// The explanation in a refusal, in one line: the reason and the next step.
fn explanation_line(body: &str) -> String {
    let why = body.lines().nth(1).unwrap_or_default();
    let next = body.lines().find_map(|line| line.strip_prefix("next:")).unwrap_or_default();
    format!("{why} {}", next.trim())
}
