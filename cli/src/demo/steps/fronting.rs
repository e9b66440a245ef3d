//! Domain fronting: an allowed name in the SNI, another in the request.

use super::DemoStep;
use crate::demo::agent::FetchRequest;
use crate::demo::context::{DemoContext, RecordQuery};
use crate::demo::report::{StepFailure, StepReport, ensure};

pub(super) const STEP: DemoStep<DemoContext> =
    DemoStep { name: "fronting", title: "Domain fronting through an allowed host", run };

fn run(demo: &mut DemoContext, report: &mut StepReport) -> Result<(), StepFailure> {
    report.note_attempt("sandbox-a: TLS to code.example, and inside it `Host: evil.example`");
    let front = FetchRequest::get("code.example", "/drop");
    let front = FetchRequest { host_header: Some("evil.example".to_owned()), ..front };
    let answer = demo.a.fetch(&front)?.map_err(StepFailure)?;
    ensure(answer.body.contains("names_disagree"), &answer.body)?;
    report.note_result(format!("{}: names_disagree; nothing reached either host", answer.status));
    let wanted = RecordQuery { sandbox: demo.a.id, reason: "names_disagree", ..RecordQuery::default() };
    demo.expect_record(wanted, report)?;
    demo.expect_no_traffic()
}
