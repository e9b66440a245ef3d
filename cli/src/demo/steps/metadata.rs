//! The address at which clouds give their keys away.

use super::DemoStep;
use crate::demo::agent::{FetchRequest, FetchScheme};
use crate::demo::context::{DemoContext, RecordQuery};
use crate::demo::fake_internet::METADATA;
use crate::demo::report::{StepFailure, StepReport, ensure};

pub(super) const STEP: DemoStep<DemoContext> =
    DemoStep { name: "metadata", title: "The cloud's metadata address", run };

fn run(stage: &mut DemoContext, told: &mut StepReport) -> Result<(), StepFailure> {
    let host = METADATA.to_string();
    told.note_attempt(format!("sandbox-a: GET http://{host}/latest/meta-data/"));
    let fetch = FetchRequest {
        scheme: FetchScheme::Http,
        ..FetchRequest::get(&host, "/latest/meta-data/")
    };
    let answer = stage.a.fetch(&fetch)?.map_err(StepFailure)?;
    ensure(answer.status >= 400, format!("the answer is {}", answer.status))?;
    let wanted =
        RecordQuery { sandbox: stage.a.id, stage: "denied", host: &host, ..RecordQuery::default() };
    let mut aside = StepReport::default();
    let record = stage.expect_record(wanted, &mut aside)?;
    let reason = record.pointer("/status_detail").and_then(|code| code.as_str()).unwrap_or("-");
    ensure(answer.body.contains(reason), &answer.body)?;
    told.note_result(format!(
        "{}: {reason}; it answers there, and nothing reached it",
        answer.status
    ));
    told.note_record(&record);
    stage.expect_no_traffic()
}
