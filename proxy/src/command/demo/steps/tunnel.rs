//! A DNS tunnel: secrets in names, under a wildcard that is allowed.

use super::Step;
use crate::command::demo::stage::{Stage, Wanted};
use crate::command::demo::told::{Misbehaved, Told, promise};

pub(super) const STEP: Step<Stage> =
    Step { name: "tunnel", title: "A DNS tunnel under an allowed wildcard", play };

/// Names that are tried.
const TRIED: usize = 40;
/// Octets of each that say something.
const SAID: usize = 60;
/// The most that may leave by one rule: what it has once, and a name's worth of what comes in the meantime.
const MOST: usize = 4096 / 8 + SAID;

fn play(stage: &mut Stage, told: &mut Told) -> Result<(), Misbehaved> {
    told.tried(format!(
        "sandbox-a: {TRIED} names of {SAID} letters each below metrics.example, to be read by its owner"
    ));
    let mut answered = 0;
    for number in 0..TRIED {
        let name = format!("{}.metrics.example", letters(number));
        answered += usize::from(stage.a.look(&name)?.is_some());
    }
    let left = stage.asked();
    let left = left.iter().filter_map(|name| name.strip_suffix(".metrics.example"));
    let (mut names, mut bits) = (0, 0.0);
    for label in left {
        (names, bits) = (names + 1, bits + 5.3 * label.len() as f64);
    }
    promise(answered < TRIED, "all of them were answered")?;
    promise(names > 0, "not even the first left")?;
    let bytes = (bits / 8.0) as usize;
    promise(bytes <= MOST, format!("{bytes} bytes left"))?;
    told.happened(format!(
        "{names} left, worth {bits:.0} bits; then the rule's budget of 4096 was spent and none did"
    ));
    stage
        .record(Wanted { sandbox: stage.a.id, reason: "dns_budget", ..Wanted::default() }, told)?;
    Ok(())
}

/// A label that is not like any other.
fn letters(number: usize) -> String {
    let letter = |at: usize| (b'a' + ((number * 7 + at * 11 + at * number) % 26) as u8) as char;
    format!("{}{number:02}", (2..SAID).map(letter).collect::<String>())
}
