//! A grant: a person opens a host for a while, and it ends by itself, with what is open by it.

use std::time::Instant;

use super::DemoStep;
use super::cut::wait_for_bytes;
use crate::demo::agent::{AgentTask, FetchRequest};
use crate::demo::context::{DemoContext, RecordQuery, path_text};
use crate::demo::report::{StepFailure, StepReport, ensure};

pub(super) const STEP: DemoStep<DemoContext> =
    DemoStep { name: "grant", title: "A grant opens a host for three seconds", run };

const HOST: &str = "paste.example";
/// The class of a connection that made no request.
const CONNECTION: u64 = 4001;

fn run(stage: &mut DemoContext, told: &mut StepReport) -> Result<(), StepFailure> {
    ensure(stage.a.resolve(HOST)?.is_none(), "it is open already")?;
    told.note_attempt(
        "an operator: sandbar grant --sandbox sandbox-a --host paste.example --for 3s",
    );
    let socket = path_text(&stage.admin_socket());
    let words = ["grant", "--socket", &socket, "--sandbox", stage.a.id, "--host", HOST, "--for"];
    let words = [&words[..], &["3s", "--why", "a log for support", "--by", "demo"]].concat();
    let granted = Instant::now();
    let output = stage.run_cli(&words)?;
    ensure(output.status.success(), String::from_utf8_lossy(&output.stderr))?;
    stage.expect_record(RecordQuery { event: "grant_made", ..RecordQuery::default() }, told)?;

    told.note_attempt("sandbox-a: downloads without end from paste.example");
    stage.world.set_streaming(true);
    let ticket = stage.a.start_task(AgentTask::Fetch(FetchRequest::get(HOST, "/endless")))?;
    wait_for_bytes(stage, HOST, 1)?;
    let ended = stage.a.wait_fetch(ticket)?;
    let took = granted.elapsed();
    ensure(ended.as_ref().map_or(true, |answer| !answer.whole), "it ended by itself")?;
    stage.world.set_streaming(false);
    told.note_result(format!("it flowed, and was cut {:.1} s after the grant", took.as_secs_f64()));
    let wanted = RecordQuery { sandbox: stage.a.id, host: HOST, ..RecordQuery::default() };
    stage.expect_record(RecordQuery { stage: "outcome", reason: "grant_ended", ..wanted }, told)?;
    stage.expect_record(RecordQuery { event: "grant_ended", ..RecordQuery::default() }, told)?;
    ensure(stage.a.resolve(HOST)?.is_none(), "the name is still told")?;
    let mark = stage.new_connections().len();
    let aim = Some(([93, 184, 216, 68], 443).into());
    let again = stage.a.fetch(&FetchRequest { aim, ..FetchRequest::get(HOST, "/") })?;
    ensure(again.map_or(true, |answer| answer.status == 403), "it still passes")?;
    ensure(stage.new_connections().len() == mark, "something arrived afterwards")?;
    told.note_result("afterwards it is denied as before");
    let wanted = RecordQuery { sandbox: stage.a.id, host: HOST, ..RecordQuery::default() };
    stage.expect_record(RecordQuery { class: CONNECTION, reason: "not_listed", ..wanted }, told)?;
    Ok(())
}
