//! A credential that is used by the sandbox and never seen in it.

use super::Step;
use crate::demo::agent::Fetch;
use crate::demo::files::SECRET;
use crate::demo::stage::{Stage, Wanted};
use crate::demo::told::{Misbehaved, Told, promise};

pub(super) const STEP: Step<Stage> =
    Step { name: "credential", title: "A credential the sandbox never sees", play };

fn play(stage: &mut Stage, told: &mut Told) -> Result<(), Misbehaved> {
    told.tried("sandbox-a: GET https://model.example/v1/echo, which repeats every header it gets");
    let own = ("Authorization".to_owned(), "Bearer made-up".to_owned());
    let fetch = Fetch { fields: vec![own], ..Fetch::get("model.example", "/v1/echo") };
    let answer = stage.a.fetch(&fetch)?.map_err(Misbehaved)?;
    promise(answer.status == 200, format!("the answer is {}: {}", answer.status, answer.body))?;
    let arrived = stage.arrived();
    let requests = arrived.iter().filter_map(|arrival| arrival.request.as_ref());
    let seen: Vec<&(String, String)> = requests
        .flat_map(|request| &request.fields)
        .filter(|(name, _)| name == "authorization")
        .collect();
    let wanted = ("authorization".to_owned(), format!("Bearer {SECRET}"));
    promise(seen == [&wanted], format!("the host got {seen:?}"))?;
    let back = answer.body.lines().find(|line| line.starts_with("authorization:"));
    let back = back.ok_or_else(|| Misbehaved("it was not repeated".to_owned()))?;
    promise(!answer.body.contains(SECRET), "the sandbox sees it")?;
    told.happened("the host got the real key; the sandbox's made-up one was removed");
    told.happened(format!("the sandbox got `{back}`"));
    let wanted = Wanted { sandbox: stage.a.id, stage: "decision", ..Wanted::default() };
    stage.record(Wanted { host: "model.example", ..wanted }, told)?;
    for (_, segment) in audit::segments(&stage.log())? {
        let text = std::fs::read_to_string(segment)?;
        promise(!text.contains(SECRET), "it stands in the log")?;
    }
    Ok(())
}
