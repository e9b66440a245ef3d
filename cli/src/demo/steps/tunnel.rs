//! A DNS tunnel: secrets in names, under a wildcard that is allowed.

use dns_filter::budget::RULE_BURST;

use super::DemoStep;
use crate::demo::context::{DemoContext, RecordQuery};
use crate::demo::report::{StepFailure, StepReport, ensure};

pub(super) const STEP: DemoStep<DemoContext> =
    DemoStep { name: "tunnel", title: "A DNS tunnel under an allowed wildcard", run };

/// Names that are tried.
const TRIED: usize = 40;
/// Octets of each that say something.
const SAID: usize = 60;
/// Bits of one octet.
const OCTET_BITS: f64 = 5.3;

fn run(stage: &mut DemoContext, told: &mut StepReport) -> Result<(), StepFailure> {
    told.note_attempt(format!(
        "sandbox-a: {TRIED} names of {SAID} letters below metrics.example, to be read by its owner"
    ));
    let mut answered = 0;
    for number in 0..TRIED {
        let name = format!("{}.metrics.example", unique_label(number));
        answered += usize::from(stage.a.resolve(&name)?.is_some());
    }
    let left = stage.new_queries();
    let left = left.iter().filter_map(|name| name.strip_suffix(".metrics.example"));
    let said: Vec<f64> = left.map(|label| OCTET_BITS * label.len() as f64).collect();
    let (queries, bits) = (said.len(), said.iter().sum::<f64>());
    ensure(answered < TRIED, "all of them were answered")?;
    ensure(queries > 0, "not even the first left")?;
    ensure(bits <= RULE_BURST, format!("{bits:.0} bits left"))?;
    told.note_result(format!(
        "{queries} queries for {answered} of them left, worth {bits:.0} bits; the rule has {RULE_BURST}, so no more did"
    ));
    let wanted = RecordQuery { sandbox: stage.a.id, ..RecordQuery::default() };
    stage.expect_record(RecordQuery { reason: "dns_budget", ..wanted }, told)?;
    Ok(())
}

/// A label that is not like any other.
fn unique_label(number: usize) -> String {
    let letter = |at: usize| char::from(b'a' + ((number * 7 + at * 11 + at * number) % 26) as u8);
    format!("{}{number:02}", (2..SAID).map(letter).collect::<String>())
}
