//! Fronting: an allowed name outside, another inside.

use super::Step;
use crate::demo::agent::Fetch;
use crate::demo::stage::{Stage, Wanted};
use crate::demo::told::{Misbehaved, Told, promise};

pub(super) const STEP: Step<Stage> =
    Step { name: "fronting", title: "An allowed name as a front for another", play };

fn play(stage: &mut Stage, told: &mut Told) -> Result<(), Misbehaved> {
    told.tried("sandbox-a: TLS for code.example, and inside it `Host: evil.example`");
    let front = Fetch::get("code.example", "/drop");
    let front = Fetch { named: Some("evil.example".to_owned()), ..front };
    let answer = stage.a.fetch(&front)?.map_err(Misbehaved)?;
    promise(answer.body.contains("names_disagree"), &answer.body)?;
    told.happened(format!("{}: names_disagree; nothing reached either host", answer.status));
    let wanted = Wanted { sandbox: stage.a.id, reason: "names_disagree", ..Wanted::default() };
    stage.record(wanted, told)?;
    stage.nothing_arrived()
}
