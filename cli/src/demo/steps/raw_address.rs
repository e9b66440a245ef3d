//! An address instead of a name.

use std::net::SocketAddr;

use super::DemoStep;
use crate::demo::agent::FetchRequest;
use crate::demo::context::{DemoContext, RecordQuery};
use crate::demo::report::{StepFailure, StepReport, ensure};

pub(super) const STEP: DemoStep<DemoContext> =
    DemoStep { name: "raw-address", title: "An address instead of a name", run };

/// Where evil.example is.
const EVIL: &str = "93.184.216.66";

fn run(stage: &mut DemoContext, told: &mut StepReport) -> Result<(), StepFailure> {
    told.note_attempt(format!("sandbox-a: GET https://{EVIL}/, which is evil.example"));
    let answer = stage.a.fetch(&FetchRequest::get(EVIL, "/"))?;
    ensure(answer.is_err(), "it was answered")?;
    told.note_result("the connection ended in its handshake; nothing reached the host");
    let wanted =
        RecordQuery { sandbox: stage.a.id, reason: "name_missing", ..RecordQuery::default() };
    stage.expect_record(wanted, told)?;
    stage.expect_no_traffic()?;

    told.note_attempt(format!("sandbox-a: GET https://code.example/lie, but dials {EVIL}"));
    let aim = Some(SocketAddr::new(EVIL.parse()?, 443));
    let lie = FetchRequest { aim, ..FetchRequest::get("code.example", "/lie") };
    let answer = stage.a.fetch(&lie)?.map_err(StepFailure)?;
    ensure(answer.body == "hello from code.example", &answer.body)?;
    let arrived = stage.new_connections();
    let lied = arrived.iter().any(|arrival| arrival.at.ip().to_string() == EVIL);
    ensure(!lied && !arrived.is_empty(), format!("it arrived at {arrived:?}"))?;
    told.note_result("the name counts: it was asked at its own address, not at the one dialled");
    let wanted = RecordQuery { sandbox: stage.a.id, stage: "decision", ..RecordQuery::default() };
    stage.expect_record(RecordQuery { host: "code.example", ..wanted }, told)?;
    Ok(())
}
