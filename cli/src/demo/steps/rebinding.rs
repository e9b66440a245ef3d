//! Rebinding: a name under an allowed wildcard that leads elsewhere once it was looked at.

use std::net::IpAddr;

use super::Step;
use crate::demo::agent::Fetch;
use crate::demo::stage::{Stage, Wanted};
use crate::demo::told::{Misbehaved, Told, promise};
use crate::demo::world::{Arrival, METADATA, REBINDING};

pub(super) const STEP: Step<Stage> =
    Step { name: "rebinding", title: "An allowed name that turns into the metadata address", play };

fn play(stage: &mut Stage, told: &mut Told) -> Result<(), Misbehaved> {
    told.tried(format!("sandbox-a: GET https://{REBINDING}/ twice; in between its owner moves it"));
    let fetch = Fetch::get(REBINDING, "/");
    let first = stage.a.fetch(&fetch)?.map_err(Misbehaved)?;
    promise(first.status == 200, format!("the answer is {}", first.status))?;
    stage.world.rebind();
    let second = stage.a.fetch(&fetch)?.map_err(Misbehaved)?;
    promise(second.status == 200, format!("the answer is {}", second.status))?;
    told.happened("both reach the first address: an answer is kept, whatever its owner wishes");

    told.tried(format!("sandbox-b: GET https://{REBINDING}/, which leads to {METADATA} by now"));
    // It dials by itself, so that the name is looked up by the proxy alone.
    let aim = Some(([93, 184, 216, 15], 443).into());
    let answer = stage.b.fetch(&Fetch { aim, ..fetch })?;
    let refused = answer.as_ref().map_or(true, |answer| answer.status >= 400);
    promise(refused, "it was answered")?;
    told.happened("refused: what the name leads to is looked at each time it is dialled");
    let wanted = Wanted { sandbox: stage.b.id, reason: "private_address", ..Wanted::default() };
    stage.record(wanted, told)?;
    let there = |arrival: &Arrival| arrival.at.ip() == IpAddr::V4(METADATA);
    promise(!stage.arrived().iter().any(there), "the metadata address was reached")
}
