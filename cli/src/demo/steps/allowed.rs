//! What a rule names passes.

use super::Step;
use crate::demo::agent::Fetch;
use crate::demo::stage::{Stage, Wanted};
use crate::demo::told::{Misbehaved, Told, promise};
use crate::demo::world::Arrival;

pub(super) const STEP: Step<Stage> =
    Step { name: "allowed", title: "What a rule names passes", play };

fn play(stage: &mut Stage, told: &mut Told) -> Result<(), Misbehaved> {
    told.tried("sandbox-a: GET https://code.example/readme");
    let answer = stage.a.fetch(&Fetch::get("code.example", "/readme"))?.map_err(Misbehaved)?;
    promise(answer.status == 200, format!("the answer is {}", answer.status))?;
    promise(answer.body == "hello from code.example", &answer.body)?;
    let arrived = stage.arrived();
    let asked = |arrival: &&Arrival| {
        arrival.request.as_ref().is_some_and(|request| request.line.starts_with("GET /readme "))
    };
    let Some(arrival) = arrived.iter().find(asked) else {
        return Err(Misbehaved("the origin was not asked".to_owned()));
    };
    told.happened(format!("200 `{}`, from {}", answer.body, arrival.at));
    let wanted = Wanted { stage: "decision", host: "code.example", ..Wanted::default() };
    stage.record(Wanted { sandbox: stage.a.id, ..wanted }, told)?;
    Ok(())
}
