//! A grant: an operator allows a host temporarily; it expires on its own, and its connections are cut.

use std::time::Instant;

use super::DemoStep;
use super::cut::wait_for_bytes;
use crate::demo::agent::{AgentTask, FetchRequest};
use crate::demo::context::{DemoContext, RecordQuery, path_text};
use crate::demo::report::{StepFailure, StepReport, ensure};

pub(super) const STEP: DemoStep<DemoContext> =
    DemoStep { name: "grant", title: "A grant allows a host for three seconds", run };

const HOST: &str = "paste.example";
/// Class of a connection without a request.
const CONNECTION: u64 = 4001;

fn run(demo: &mut DemoContext, report: &mut StepReport) -> Result<(), StepFailure> {
    ensure(demo.a.resolve(HOST)?.is_none(), "the host is already allowed")?;
    report.note_attempt("an operator: sandbar grant --sandbox sandbox-a --host paste.example --for 3s");
    let socket = path_text(&demo.admin_socket());
    let words = ["grant", "--socket", &socket, "--sandbox", demo.a.id, "--host", HOST, "--for"];
    let words = [&words[..], &["3s", "--why", "a log for support", "--by", "demo"]].concat();
    let granted = Instant::now();
    let output = demo.run_cli(&words)?;
    ensure(output.status.success(), String::from_utf8_lossy(&output.stderr))?;
    demo.expect_record(RecordQuery { event: "grant_made", ..RecordQuery::default() }, report)?;

    report.note_attempt("sandbox-a: starts an endless download from paste.example");
    demo.internet.set_streaming(true);
    let ticket = demo.a.start_task(AgentTask::Fetch(FetchRequest::get(HOST, "/endless")))?;
    wait_for_bytes(demo, HOST, 1)?;
    let ended = demo.a.wait_fetch(ticket)?;
    let took = granted.elapsed();
    ensure(ended.as_ref().map_or(true, |answer| !answer.whole), "the download ended without being cut")?;
    demo.internet.set_streaming(false);
    report.note_result(format!("it ran, and was cut {:.1} s after the grant", took.as_secs_f64()));
    let wanted = RecordQuery { sandbox: demo.a.id, host: HOST, ..RecordQuery::default() };
    demo.expect_record(RecordQuery { stage: "outcome", reason: "grant_ended", ..wanted }, report)?;
    demo.expect_record(RecordQuery { event: "grant_ended", ..RecordQuery::default() }, report)?;
    ensure(demo.a.resolve(HOST)?.is_none(), "the name still resolves")?;
    let mark = demo.new_connections().len();
    let connect_to = Some(([93, 184, 216, 68], 443).into());
    let again = demo.a.fetch(&FetchRequest { connect_to, ..FetchRequest::get(HOST, "/") })?;
    ensure(again.map_or(true, |answer| answer.status == 403), "the host is still reachable")?;
    ensure(demo.new_connections().len() == mark, "a connection arrived after the grant expired")?;
    report.note_result("afterwards the host is denied as before");
    let wanted = RecordQuery { sandbox: demo.a.id, host: HOST, ..RecordQuery::default() };
    demo.expect_record(RecordQuery { class: CONNECTION, reason: "not_listed", ..wanted }, report)?;
    Ok(())
}
