//! Permission ends when it ends: a download that runs is cut by an edit, and its neighbour is not.

use std::time::{Duration, Instant};

use super::Step;
use crate::demo::agent::{Fetch, Task};
use crate::demo::files::POLICY_A;
use crate::demo::stage::{Stage, Wanted, until};
use crate::demo::told::{Misbehaved, Told, promise};

pub(super) const STEP: Step<Stage> =
    Step { name: "cut", title: "An edit on disk cuts the running download it forbids", play };

/// What is promised.
const PROMISED: Duration = Duration::from_secs(1);
/// As much as a download has brought before it is cut, and its neighbour afterwards.
const ENOUGH: u64 = 20_000;

fn play(stage: &mut Stage, told: &mut Told) -> Result<(), Misbehaved> {
    told.tried("sandbox-a: downloads without end from downloads.example and mirror.example");
    stage.world.flow(true);
    let endless = |host| Task::Fetch(Fetch::get(host, "/endless"));
    let loser = stage.a.start(endless("downloads.example"))?;
    let neighbour = stage.a.start(endless("mirror.example"))?;
    flows(stage, "downloads.example", ENOUGH)?;
    flows(stage, "mirror.example", ENOUGH)?;

    told.tried("the network team deletes downloads.example from the policy file");
    let edited =
        POLICY_A.replace("[[allow]]\nname  = \"downloads\"\nhosts = [\"downloads.example\"]\n", "");
    promise(edited != POLICY_A, "there is nothing to delete")?;
    let written = Instant::now();
    stage.edit(&edited)?;
    let cut = stage.a.fetched(loser)?;
    let took = written.elapsed();
    promise(cut.as_ref().map_or(true, |answer| !answer.whole), "it ended by itself")?;
    promise(took < PROMISED, format!("it was cut after {} ms", took.as_millis()))?;
    told.happened(format!("downloads.example was cut {} ms after the write", took.as_millis()));
    let wanted = Wanted { sandbox: stage.a.id, stage: "outcome", ..Wanted::default() };
    stage.record(Wanted { host: "downloads.example", reason: "not_listed", ..wanted }, told)?;

    flows(stage, "mirror.example", stage.world.sent("mirror.example") + ENOUGH)?;
    promise(stage.a.poll(neighbour).is_none(), "its neighbour has ended too")?;
    stage.world.flow(false);
    let answer = stage.a.fetched(neighbour)?.map_err(Misbehaved)?;
    promise(answer.whole, "its neighbour was cut too")?;
    told.happened(format!(
        "mirror.example went on, and ended by itself after {} KB",
        answer.bytes / 1000
    ));
    Ok(stage.restore()?)
}

/// Waits until a host has sent so much.
pub(super) fn flows(stage: &Stage, host: &str, bytes: u64) -> Result<(), Misbehaved> {
    let flows = until(|| (stage.world.sent(host) >= bytes).then_some(()));
    promise(flows.is_some(), format!("{host} does not send"))
}
