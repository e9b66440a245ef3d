//! What no rule names does not pass, and the sandbox is told why.

use super::Step;
use crate::demo::agent::Fetch;
use crate::demo::stage::{Stage, Wanted};
use crate::demo::told::{Misbehaved, Told, promise};

pub(super) const STEP: Step<Stage> =
    Step { name: "denied", title: "Everything else is denied, and says why", play };

fn play(stage: &mut Stage, told: &mut Told) -> Result<(), Misbehaved> {
    told.tried("sandbox-a: looks up paste.example, which exists and which no rule names");
    let found = stage.a.look("paste.example")?;
    promise(found.is_none(), "it was told an address")?;
    told.happened("no such name; the world's resolver was not even asked");
    let wanted = Wanted { sandbox: stage.a.id, host: "paste.example", ..Wanted::default() };
    stage.record(Wanted { reason: "not_listed", ..wanted }, told)?;

    told.tried("sandbox-a: POST https://code.example/upload, where a rule allows GET and HEAD");
    let upload = Fetch { body: "all I know".to_owned(), ..Fetch::post("code.example", "/upload") };
    let answer = stage.a.fetch(&upload)?.map_err(Misbehaved)?;
    promise(answer.status == 403, format!("the answer is {}", answer.status))?;
    promise(answer.body.contains("method_not_allowed"), &answer.body)?;
    told.happened(format!("403 method_not_allowed: {}", explained(&answer.body)));
    let wanted = Wanted { sandbox: stage.a.id, host: "code.example", ..Wanted::default() };
    stage.record(Wanted { reason: "method_not_allowed", ..wanted }, told)?;

    stage.nothing_arrived()?;
    let asked = stage.asked();
    promise(!asked.iter().any(|name| name.contains("paste")), format!("it asked: {asked:?}"))
}

/// The explanation of a refusal, in a line: why, and what to do next.
fn explained(body: &str) -> String {
    let why = body.lines().nth(1).unwrap_or_default();
    let next = body.lines().find_map(|line| line.strip_prefix("next:")).unwrap_or_default();
    format!("{why} {}", next.trim())
}
