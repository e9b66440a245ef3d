//! A DNS tunnel: secrets in names, under a wildcard that is allowed.

use dns_filter::budget::RULE_BURST;

use super::Step;
use crate::demo::stage::{Stage, Wanted};
use crate::demo::told::{Misbehaved, Told, promise};

pub(super) const STEP: Step<Stage> =
    Step { name: "tunnel", title: "A DNS tunnel under an allowed wildcard", play };

/// Names that are tried.
const TRIED: usize = 40;
/// Octets of each that say something.
const SAID: usize = 60;
/// Bits of one octet.
const OCTET_BITS: f64 = 5.3;

fn play(stage: &mut Stage, told: &mut Told) -> Result<(), Misbehaved> {
    told.tried(format!(
        "sandbox-a: {TRIED} names of {SAID} letters below metrics.example, to be read by its owner"
    ));
    let mut answered = 0;
    for number in 0..TRIED {
        let name = format!("{}.metrics.example", letters(number));
        answered += usize::from(stage.a.look(&name)?.is_some());
    }
    let left = stage.asked();
    let left = left.iter().filter_map(|name| name.strip_suffix(".metrics.example"));
    let said: Vec<f64> = left.map(|label| OCTET_BITS * label.len() as f64).collect();
    let (queries, bits) = (said.len(), said.iter().sum::<f64>());
    promise(answered < TRIED, "all of them were answered")?;
    promise(queries > 0, "not even the first left")?;
    promise(bits <= RULE_BURST, format!("{bits:.0} bits left"))?;
    told.happened(format!(
        "{queries} queries for {answered} of them left, worth {bits:.0} bits; the rule has {RULE_BURST}, so no more did"
    ));
    let wanted = Wanted { sandbox: stage.a.id, ..Wanted::default() };
    stage.record(Wanted { reason: "dns_budget", ..wanted }, told)?;
    Ok(())
}

/// A label that is not like any other.
fn letters(number: usize) -> String {
    let letter = |at: usize| char::from(b'a' + ((number * 7 + at * 11 + at * number) % 26) as u8);
    format!("{}{number:02}", (2..SAID).map(letter).collect::<String>())
}
