//! An address instead of a name.

use std::net::SocketAddr;

use super::Step;
use crate::demo::agent::Fetch;
use crate::demo::stage::{Stage, Wanted};
use crate::demo::told::{Misbehaved, Told, promise};

pub(super) const STEP: Step<Stage> =
    Step { name: "raw-address", title: "An address instead of a name", play };

/// Where evil.example is.
const EVIL: &str = "93.184.216.66";

fn play(stage: &mut Stage, told: &mut Told) -> Result<(), Misbehaved> {
    told.tried(format!("sandbox-a: GET https://{EVIL}/, which is evil.example"));
    let answer = stage.a.fetch(&Fetch::get(EVIL, "/"))?;
    promise(answer.is_err(), "it was answered")?;
    told.happened("the connection ended in its handshake; nothing reached the host");
    let wanted = Wanted { sandbox: stage.a.id, reason: "name_missing", ..Wanted::default() };
    stage.record(wanted, told)?;
    stage.nothing_arrived()?;

    told.tried(format!("sandbox-a: GET https://code.example/lie, but dials {EVIL}"));
    let aim = Some(SocketAddr::new(EVIL.parse()?, 443));
    let lie = Fetch { aim, ..Fetch::get("code.example", "/lie") };
    let answer = stage.a.fetch(&lie)?.map_err(Misbehaved)?;
    promise(answer.body == "hello from code.example", &answer.body)?;
    let arrived = stage.arrived();
    let lied = arrived.iter().any(|arrival| arrival.at.ip().to_string() == EVIL);
    promise(!lied && !arrived.is_empty(), format!("it arrived at {arrived:?}"))?;
    told.happened("the name counts: it was asked at its own address, not at the one dialled");
    let wanted = Wanted { sandbox: stage.a.id, stage: "decision", ..Wanted::default() };
    stage.record(Wanted { host: "code.example", ..wanted }, told)?;
    Ok(())
}
