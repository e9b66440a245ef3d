//! Revocation is immediate: an edit cuts a running download, and only that one.

use std::time::{Duration, Instant};

use super::DemoStep;
use crate::demo::agent::{AgentTask, FetchRequest};
use crate::demo::context::{DemoContext, RecordQuery, poll_until};
use crate::demo::files::POLICY_A;
use crate::demo::report::{StepFailure, StepReport, ensure};

pub(super) const STEP: DemoStep<DemoContext> =
    DemoStep { name: "cut", title: "A policy edit cuts a running download", run };

/// Promise P10: how soon a revoked connection is cut.
const CUT_DEADLINE: Duration = Duration::from_secs(1);
/// Bytes each download transfers before the edit, and the remaining one after it.
const MIN_BYTES: u64 = 20_000;

fn run(demo: &mut DemoContext, report: &mut StepReport) -> Result<(), StepFailure> {
    report.note_attempt("sandbox-a: starts endless downloads from downloads.example and mirror.example");
    demo.internet.set_streaming(true);
    let endless = |host| AgentTask::Fetch(FetchRequest::get(host, "/endless"));
    let revoked = demo.a.start_task(endless("downloads.example"))?;
    let unaffected = demo.a.start_task(endless("mirror.example"))?;
    wait_for_bytes(demo, "downloads.example", MIN_BYTES)?;
    wait_for_bytes(demo, "mirror.example", MIN_BYTES)?;

    report.note_attempt("the network team deletes downloads.example from the policy file");
    let edited = POLICY_A.replace("[[allow]]\nname  = \"downloads\"\nhosts = [\"downloads.example\"]\n", "");
    ensure(edited != POLICY_A, "the rule to delete was not found")?;
    let written = Instant::now();
    demo.edit_policy(&edited)?;
    let cut = demo.a.wait_fetch(revoked)?;
    let took = written.elapsed();
    ensure(cut.as_ref().map_or(true, |answer| !answer.whole), "the download ended without being cut")?;
    ensure(took < CUT_DEADLINE, format!("it was cut only after {} ms", took.as_millis()))?;
    report.note_result(format!("downloads.example was cut {} ms after the write", took.as_millis()));
    let wanted = RecordQuery { sandbox: demo.a.id, stage: "outcome", ..RecordQuery::default() };
    demo.expect_record(RecordQuery { host: "downloads.example", reason: "not_listed", ..wanted }, report)?;

    wait_for_bytes(demo, "mirror.example", demo.internet.bytes_sent("mirror.example") + MIN_BYTES)?;
    ensure(demo.a.poll(unaffected).is_none(), "the other download has ended too")?;
    demo.internet.set_streaming(false);
    let answer = demo.a.wait_fetch(unaffected)?.map_err(StepFailure)?;
    ensure(answer.whole, "the other download was cut too")?;
    report.note_result(format!("mirror.example continued and completed after {} KB", answer.bytes / 1000));
    Ok(demo.restore_policy()?)
}

/// Waits until a host has sent at least `bytes`.
pub(super) fn wait_for_bytes(demo: &DemoContext, host: &str, bytes: u64) -> Result<(), StepFailure> {
    let flows = poll_until(|| (demo.internet.bytes_sent(host) >= bytes).then_some(()));
    ensure(flows.is_some(), format!("{host} sent too little"))
}
