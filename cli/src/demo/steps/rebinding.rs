//! DNS rebinding: a name below an allowed wildcard changes its address after the first lookup.

use std::net::IpAddr;

use super::DemoStep;
use crate::demo::agent::FetchRequest;
use crate::demo::context::{DemoContext, RecordQuery};
use crate::demo::fake_internet::{METADATA, ObservedConnection, REBINDING};
use crate::demo::report::{StepFailure, StepReport, ensure};

pub(super) const STEP: DemoStep<DemoContext> =
    DemoStep { name: "rebinding", title: "DNS rebinding to the metadata address", run };

fn run(demo: &mut DemoContext, report: &mut StepReport) -> Result<(), StepFailure> {
    report.note_attempt(format!(
        "sandbox-a: GET https://{REBINDING}/ twice; its owner changes the address in between"
    ));
    let fetch = FetchRequest::get(REBINDING, "/");
    let first = demo.a.fetch(&fetch)?.map_err(StepFailure)?;
    ensure(first.status == 200, format!("the status is {}", first.status))?;
    demo.internet.rebind();
    let second = demo.a.fetch(&fetch)?.map_err(StepFailure)?;
    ensure(second.status == 200, format!("the status is {}", second.status))?;
    report.note_result("both reach the first address: Sandbar caches the answer despite its TTL of 0");

    report.note_attempt(format!("sandbox-b: GET https://{REBINDING}/, which now resolves to {METADATA}"));
    // The agent dials an address, so that only the proxy resolves the name.
    let connect_to = Some(([93, 184, 216, 15], 443).into());
    let answer = demo.b.fetch(&FetchRequest { connect_to, ..fetch })?;
    let refused = answer.as_ref().map_or(true, |answer| answer.status >= 400);
    ensure(refused, "the request was served")?;
    report.note_result("refused: Sandbar checks the resolved address before every dial");
    let wanted = RecordQuery { sandbox: demo.b.id, reason: "private_address", ..RecordQuery::default() };
    demo.expect_record(wanted, report)?;
    let there = |arrival: &ObservedConnection| arrival.at.ip() == IpAddr::V4(METADATA);
    ensure(!demo.new_connections().iter().any(there), "a connection reached the metadata address")
}
