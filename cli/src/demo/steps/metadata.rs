//! The address at which clouds give their keys away.

use super::Step;
use crate::demo::agent::{Fetch, Scheme};
use crate::demo::stage::{Stage, Wanted};
use crate::demo::told::{Misbehaved, Told, promise};
use crate::demo::world::METADATA;

pub(super) const STEP: Step<Stage> =
    Step { name: "metadata", title: "The cloud's metadata address", play };

fn play(stage: &mut Stage, told: &mut Told) -> Result<(), Misbehaved> {
    let host = METADATA.to_string();
    told.tried(format!("sandbox-a: GET http://{host}/latest/meta-data/"));
    let fetch = Fetch { scheme: Scheme::Http, ..Fetch::get(&host, "/latest/meta-data/") };
    let answer = stage.a.fetch(&fetch)?.map_err(Misbehaved)?;
    promise(answer.status >= 400, format!("the answer is {}", answer.status))?;
    let wanted = Wanted { sandbox: stage.a.id, stage: "denied", host: &host, ..Wanted::default() };
    let mut aside = Told::default();
    let record = stage.record(wanted, &mut aside)?;
    let reason = record.pointer("/status_detail").and_then(|code| code.as_str()).unwrap_or("-");
    promise(answer.body.contains(reason), &answer.body)?;
    told.happened(format!("{}: {reason}; it answers there, and nothing reached it", answer.status));
    told.record(&record);
    stage.nothing_arrived()
}
