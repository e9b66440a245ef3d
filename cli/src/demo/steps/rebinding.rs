//! Rebinding: a name under an allowed wildcard that leads elsewhere once it was looked at.

use std::net::IpAddr;

use super::DemoStep;
use crate::demo::agent::FetchRequest;
use crate::demo::context::{DemoContext, RecordQuery};
use crate::demo::fake_internet::{METADATA, ObservedConnection, REBINDING};
use crate::demo::report::{StepFailure, StepReport, ensure};

pub(super) const STEP: DemoStep<DemoContext> = DemoStep {
    name: "rebinding",
    title: "An allowed name that turns into the metadata address",
    run,
};

fn run(stage: &mut DemoContext, told: &mut StepReport) -> Result<(), StepFailure> {
    told.note_attempt(format!(
        "sandbox-a: GET https://{REBINDING}/ twice; in between its owner moves it"
    ));
    let fetch = FetchRequest::get(REBINDING, "/");
    let first = stage.a.fetch(&fetch)?.map_err(StepFailure)?;
    ensure(first.status == 200, format!("the answer is {}", first.status))?;
    stage.world.rebind();
    let second = stage.a.fetch(&fetch)?.map_err(StepFailure)?;
    ensure(second.status == 200, format!("the answer is {}", second.status))?;
    told.note_result("both reach the first address: an answer is kept, whatever its owner wishes");

    told.note_attempt(format!(
        "sandbox-b: GET https://{REBINDING}/, which leads to {METADATA} by now"
    ));
    // It dials by itself, so that the name is looked up by the proxy alone.
    let aim = Some(([93, 184, 216, 15], 443).into());
    let answer = stage.b.fetch(&FetchRequest { aim, ..fetch })?;
    let refused = answer.as_ref().map_or(true, |answer| answer.status >= 400);
    ensure(refused, "it was answered")?;
    told.note_result("refused: what the name leads to is looked at each time it is dialled");
    let wanted =
        RecordQuery { sandbox: stage.b.id, reason: "private_address", ..RecordQuery::default() };
    stage.expect_record(wanted, told)?;
    let there = |arrival: &ObservedConnection| arrival.at.ip() == IpAddr::V4(METADATA);
    ensure(!stage.new_connections().iter().any(there), "the metadata address was reached")
}
