//! Permission ends when it ends: a download that runs is cut by an edit, and its neighbour is not.

use std::time::{Duration, Instant};

use super::DemoStep;
use crate::demo::agent::{AgentTask, FetchRequest};
use crate::demo::context::{DemoContext, RecordQuery, poll_until};
use crate::demo::files::POLICY_A;
use crate::demo::report::{StepFailure, StepReport, ensure};

pub(super) const STEP: DemoStep<DemoContext> =
    DemoStep { name: "cut", title: "An edit on disk cuts the running download it forbids", run };

/// What is promised.
const CUT_DEADLINE: Duration = Duration::from_secs(1);
/// As much as a download has brought before it is cut, and its neighbour afterwards.
const MIN_BYTES: u64 = 20_000;

fn run(stage: &mut DemoContext, told: &mut StepReport) -> Result<(), StepFailure> {
    told.note_attempt("sandbox-a: downloads without end from downloads.example and mirror.example");
    stage.world.set_streaming(true);
    let endless = |host| AgentTask::Fetch(FetchRequest::get(host, "/endless"));
    let loser = stage.a.start_task(endless("downloads.example"))?;
    let neighbour = stage.a.start_task(endless("mirror.example"))?;
    wait_for_bytes(stage, "downloads.example", MIN_BYTES)?;
    wait_for_bytes(stage, "mirror.example", MIN_BYTES)?;

    told.note_attempt("the network team deletes downloads.example from the policy file");
    let edited =
        POLICY_A.replace("[[allow]]\nname  = \"downloads\"\nhosts = [\"downloads.example\"]\n", "");
    ensure(edited != POLICY_A, "there is nothing to delete")?;
    let written = Instant::now();
    stage.edit_policy(&edited)?;
    let cut = stage.a.wait_fetch(loser)?;
    let took = written.elapsed();
    ensure(cut.as_ref().map_or(true, |answer| !answer.whole), "it ended by itself")?;
    ensure(took < CUT_DEADLINE, format!("it was cut after {} ms", took.as_millis()))?;
    told.note_result(format!("downloads.example was cut {} ms after the write", took.as_millis()));
    let wanted = RecordQuery { sandbox: stage.a.id, stage: "outcome", ..RecordQuery::default() };
    stage.expect_record(
        RecordQuery { host: "downloads.example", reason: "not_listed", ..wanted },
        told,
    )?;

    wait_for_bytes(stage, "mirror.example", stage.world.bytes_sent("mirror.example") + MIN_BYTES)?;
    ensure(stage.a.poll(neighbour).is_none(), "its neighbour has ended too")?;
    stage.world.set_streaming(false);
    let answer = stage.a.wait_fetch(neighbour)?.map_err(StepFailure)?;
    ensure(answer.whole, "its neighbour was cut too")?;
    told.note_result(format!(
        "mirror.example went on, and ended by itself after {} KB",
        answer.bytes / 1000
    ));
    Ok(stage.restore_policy()?)
}

/// Waits until a host has sent so much.
pub(super) fn wait_for_bytes(
    stage: &DemoContext,
    host: &str,
    bytes: u64,
) -> Result<(), StepFailure> {
    let flows = poll_until(|| (stage.world.bytes_sent(host) >= bytes).then_some(()));
    ensure(flows.is_some(), format!("{host} does not send"))
}
