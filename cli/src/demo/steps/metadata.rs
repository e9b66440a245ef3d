//! The metadata address, where clouds hand out credentials.

use super::DemoStep;
use crate::demo::agent::{FetchRequest, FetchScheme};
use crate::demo::context::{DemoContext, RecordQuery};
use crate::demo::fake_internet::METADATA;
use crate::demo::report::{StepFailure, StepReport, ensure};

pub(super) const STEP: DemoStep<DemoContext> =
    DemoStep { name: "metadata", title: "The cloud metadata address", run };

fn run(demo: &mut DemoContext, report: &mut StepReport) -> Result<(), StepFailure> {
    let host = METADATA.to_string();
    report.note_attempt(format!("sandbox-a: GET http://{host}/latest/meta-data/"));
    let fetch = FetchRequest { scheme: FetchScheme::Http, ..FetchRequest::get(&host, "/latest/meta-data/") };
    let answer = demo.a.fetch(&fetch)?.map_err(StepFailure)?;
    ensure(answer.status >= 400, format!("the status is {}", answer.status))?;
    let wanted = RecordQuery { sandbox: demo.a.id, stage: "denied", host: &host, ..RecordQuery::default() };
    let mut aside = StepReport::default();
    let record = demo.expect_record(wanted, &mut aside)?;
    let reason = record.pointer("/status_detail").and_then(|code| code.as_str()).unwrap_or("-");
    ensure(answer.body.contains(reason), &answer.body)?;
    report.note_result(format!("{}: {reason}; nothing reached the metadata service", answer.status));
    report.note_record(&record);
    demo.expect_no_traffic()
}
