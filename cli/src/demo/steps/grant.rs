//! A grant: a person opens a host for a while, and it ends by itself, with what is open by it.

use std::time::Instant;

use super::Step;
use super::cut::flows;
use crate::demo::agent::{Fetch, Task};
use crate::demo::stage::{Stage, Wanted, shown};
use crate::demo::told::{Misbehaved, Told, promise};

pub(super) const STEP: Step<Stage> =
    Step { name: "grant", title: "A grant opens a host for three seconds", play };

const HOST: &str = "paste.example";
/// The class of a connection that made no request.
const CONNECTION: u64 = 4001;

fn play(stage: &mut Stage, told: &mut Told) -> Result<(), Misbehaved> {
    promise(stage.a.look(HOST)?.is_none(), "it is open already")?;
    told.tried("an operator: sandbar grant --sandbox sandbox-a --host paste.example --for 3s");
    let socket = shown(&stage.socket());
    let words = ["grant", "--socket", &socket, "--sandbox", stage.a.id, "--host", HOST, "--for"];
    let words = [&words[..], &["3s", "--why", "a log for support", "--by", "demo"]].concat();
    let granted = Instant::now();
    let output = stage.operate(&words)?;
    promise(output.status.success(), String::from_utf8_lossy(&output.stderr))?;
    stage.record(Wanted { event: "grant_made", ..Wanted::default() }, told)?;

    told.tried("sandbox-a: downloads without end from paste.example");
    stage.world.flow(true);
    let ticket = stage.a.start(Task::Fetch(Fetch::get(HOST, "/endless")))?;
    flows(stage, HOST, 1)?;
    let ended = stage.a.fetched(ticket)?;
    let took = granted.elapsed();
    promise(ended.as_ref().map_or(true, |answer| !answer.whole), "it ended by itself")?;
    stage.world.flow(false);
    told.happened(format!("it flowed, and was cut {:.1} s after the grant", took.as_secs_f64()));
    let wanted = Wanted { sandbox: stage.a.id, host: HOST, ..Wanted::default() };
    stage.record(Wanted { stage: "outcome", reason: "grant_ended", ..wanted }, told)?;
    stage.record(Wanted { event: "grant_ended", ..Wanted::default() }, told)?;
    promise(stage.a.look(HOST)?.is_none(), "the name is still told")?;
    let mark = stage.arrived().len();
    let aim = Some(([93, 184, 216, 68], 443).into());
    let again = stage.a.fetch(&Fetch { aim, ..Fetch::get(HOST, "/") })?;
    promise(again.map_or(true, |answer| answer.status == 403), "it still passes")?;
    promise(stage.arrived().len() == mark, "something arrived afterwards")?;
    told.happened("afterwards it is denied as before");
    let wanted = Wanted { sandbox: stage.a.id, host: HOST, ..Wanted::default() };
    stage.record(Wanted { class: CONNECTION, reason: "not_listed", ..wanted }, told)?;
    Ok(())
}
