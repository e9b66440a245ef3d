//! A raw IP address instead of a name.

use std::net::SocketAddr;

use super::DemoStep;
use crate::demo::agent::FetchRequest;
use crate::demo::context::{DemoContext, RecordQuery};
use crate::demo::report::{StepFailure, StepReport, ensure};

pub(super) const STEP: DemoStep<DemoContext> =
    DemoStep { name: "raw-address", title: "A raw IP address instead of a name", run };

/// Address of evil.example.
const EVIL: &str = "93.184.216.66";

fn run(demo: &mut DemoContext, report: &mut StepReport) -> Result<(), StepFailure> {
    report.note_attempt(format!("sandbox-a: GET https://{EVIL}/, which is evil.example"));
    let answer = demo.a.fetch(&FetchRequest::get(EVIL, "/"))?;
    ensure(answer.is_err(), "the request was served")?;
    report.note_result("the TLS handshake was refused; nothing reached the host");
    let wanted = RecordQuery { sandbox: demo.a.id, reason: "name_missing", ..RecordQuery::default() };
    demo.expect_record(wanted, report)?;
    demo.expect_no_traffic()?;

    report.note_attempt(format!("sandbox-a: GET https://code.example/lie, dialled to {EVIL}"));
    let connect_to = Some(SocketAddr::new(EVIL.parse()?, 443));
    let lie = FetchRequest { connect_to, ..FetchRequest::get("code.example", "/lie") };
    let answer = demo.a.fetch(&lie)?.map_err(StepFailure)?;
    ensure(answer.body == "hello from code.example", &answer.body)?;
    let arrived = demo.new_connections();
    let lied = arrived.iter().any(|arrival| arrival.at.ip().to_string() == EVIL);
    ensure(!lied && !arrived.is_empty(), format!("connections: {arrived:?}"))?;
    report.note_result("Sandbar resolved the name and dialled that address, not the one the client dialled");
    let wanted = RecordQuery { sandbox: demo.a.id, stage: "decision", ..RecordQuery::default() };
    demo.expect_record(RecordQuery { host: "code.example", ..wanted }, report)?;
    Ok(())
}
