//! Memory belongs to the sandbox whose path a request came by, whatever token it shows.

use super::Step;
use crate::demo::agent::Fetch;
use crate::demo::files::token;
use crate::demo::stage::{Stage, Wanted};
use crate::demo::told::{Misbehaved, Told, promise};
use crate::demo::world::MEMORY;

pub(super) const STEP: Step<Stage> =
    Step { name: "memory", title: "A memory is recalled by its own sandbox only", play };

fn play(stage: &mut Stage, told: &mut Told) -> Result<(), Misbehaved> {
    let token = token(&stage.issuer, stage.a.id)?;
    let recall = Fetch {
        fields: vec![
            ("Sandbox-Identity".to_owned(), token),
            ("Content-Type".to_owned(), "application/json".to_owned()),
        ],
        body: r#"{"query":"launch","bank_id":"staging:team-a"}"#.to_owned(),
        ..Fetch::post("memory.example", "/v1/recall")
    };
    told.tried("sandbox-a: recalls from bank staging:team-a, with its own token");
    let answer = stage.a.fetch(&recall)?.map_err(Misbehaved)?;
    promise(answer.status == 200 && answer.body.contains(MEMORY), &answer.body)?;
    told.happened(format!("200 `{MEMORY}`"));
    let wanted = Wanted { sandbox: stage.a.id, stage: "decision", ..Wanted::default() };
    stage.record(Wanted { host: "memory.example", ..wanted }, told)?;

    let before = stage.arrived().len();
    told.tried("sandbox-b: the same request with the same token, which it has stolen");
    let answer = stage.b.fetch(&recall)?.map_err(Misbehaved)?;
    promise(answer.body.contains("identity_mismatch"), &answer.body)?;
    promise(!answer.body.contains(MEMORY), "it was told the memory")?;
    promise(stage.arrived().len() == before, "the service was asked")?;
    told.happened(format!("{}: identity_mismatch; nothing reached the service", answer.status));
    let wanted = Wanted { sandbox: stage.b.id, stage: "denied", ..Wanted::default() };
    stage.record(Wanted { reason: "identity_mismatch", ..wanted }, told)?;
    Ok(())
}
