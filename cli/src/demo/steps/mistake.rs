//! A policy with a slip changes nothing, and says where the slip is.

use super::Step;
use crate::demo::agent::Fetch;
use crate::demo::files::POLICY_A;
use crate::demo::stage::{Stage, Wanted};
use crate::demo::told::{Misbehaved, Told, promise};

pub(super) const STEP: Step<Stage> =
    Step { name: "mistake", title: "A bad policy is refused with its line", play };

fn play(stage: &mut Stage, told: &mut Told) -> Result<(), Misbehaved> {
    let before = stage.generation();
    told.tried("the network team writes `method = [\"GET\"]` where `methods` is meant");
    let slip = POLICY_A.replace("methods = [\"GET\", \"HEAD\"]", "method  = [\"GET\"]");
    let line = slip.lines().position(|line| line.starts_with("method ")).unwrap_or_default() + 1;
    stage.edit(&slip)?;
    let wanted = Wanted { event: "policy_rejected", ..Wanted::default() };
    let mut aside = Told::default();
    let record = stage.record(wanted, &mut aside)?;
    let message = record.pointer("/message").and_then(|text| text.as_str()).unwrap_or_default();
    let place = format!("agent-a.toml:{line}:");
    promise(message.contains(&place), format!("it does not say `{place}`: {message}"))?;
    told.happened(said(message, &place));
    told.record(&record);
    promise(stage.generation() == before, "it was put in force")?;
    let answer = stage.a.fetch(&Fetch::get("code.example", "/still"))?.map_err(Misbehaved)?;
    promise(answer.status == 200, format!("the rules in force did not stay: {}", answer.status))?;
    told.happened(format!("generation {before} stays in force; code.example still answers"));
    Ok(stage.restore()?)
}

/// The complaint, without where the file is and without its drawing.
fn said(message: &str, place: &str) -> String {
    let line = message.lines().find(|line| line.contains(place)).unwrap_or(message);
    let first = message.lines().next().unwrap_or_default().trim();
    let at = line.find("agent-a.toml").and_then(|at| line.get(at..)).unwrap_or(line).trim();
    if line.contains(first) { at.to_owned() } else { format!("{at} {first}") }
}
