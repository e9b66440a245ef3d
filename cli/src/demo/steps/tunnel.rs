//! A DNS tunnel: data encoded in names below an allowed wildcard.

use dns_filter::budget::RULE_BURST;

use super::DemoStep;
use crate::demo::context::{DemoContext, RecordQuery};
use crate::demo::report::{StepFailure, StepReport, ensure};

pub(super) const STEP: DemoStep<DemoContext> =
    DemoStep { name: "tunnel", title: "A DNS tunnel under an allowed wildcard", run };

/// Number of names tried.
const TRIED: usize = 40;
/// Octets of data in each name.
const DATA_OCTETS: usize = 60;
/// Bits of information per octet.
const OCTET_BITS: f64 = 5.3;

fn run(demo: &mut DemoContext, report: &mut StepReport) -> Result<(), StepFailure> {
    report.note_attempt(format!(
        "sandbox-a: looks up {TRIED} names with {DATA_OCTETS} letters of data each below metrics.example"
    ));
    let mut answered = 0;
    for number in 0..TRIED {
        let name = format!("{}.metrics.example", unique_label(number));
        answered += usize::from(demo.a.resolve(&name)?.is_some());
    }
    let left = demo.new_queries();
    let left = left.iter().filter_map(|name| name.strip_suffix(".metrics.example"));
    let bits: Vec<f64> = left.map(|label| OCTET_BITS * label.len() as f64).collect();
    let (queries, bits) = (bits.len(), bits.iter().sum::<f64>());
    ensure(answered < TRIED, "every name was answered")?;
    ensure(queries > 0, "no query left, not even the first")?;
    ensure(bits <= RULE_BURST, format!("{bits:.0} bits got out"))?;
    report.note_result(format!(
        "{queries} queries for {answered} names left, carrying {bits:.0} bits; the rest exceed the rule's budget of {RULE_BURST} bits"
    ));
    let wanted = RecordQuery { sandbox: demo.a.id, ..RecordQuery::default() };
    demo.expect_record(RecordQuery { reason: "dns_budget", ..wanted }, report)?;
    Ok(())
}

/// A label that differs from every other.
fn unique_label(number: usize) -> String {
    let letter = |at: usize| char::from(b'a' + ((number * 7 + at * 11 + at * number) % 26) as u8);
    format!("{}{number:02}", (2..DATA_OCTETS).map(letter).collect::<String>())
}
