//! The report of a step: what it tried, what happened, the records it caused, and whether it passed.

use std::fmt::Display;
use std::time::Duration;

use serde_json::{Value, json};

use crate::terminal::{BAD, FAINT, GOOD, HEAD, paint};

/// Why a step failed.
#[derive(Debug)]
pub(super) struct StepFailure(pub(super) String);

impl<E: Into<anyhow::Error>> From<E> for StepFailure {
    fn from(error: E) -> Self {
        StepFailure(format!("{:#}", error.into()))
    }
}

/// Fails with `message` unless `condition` holds.
pub(super) fn ensure(condition: bool, message: impl Display) -> Result<(), StepFailure> {
    if condition { Ok(()) } else { Err(StepFailure(message.to_string())) }
}

/// What a step has reported so far.
#[derive(Debug, Default)]
pub(super) struct StepReport {
    lines: Vec<(LineKind, String)>,
    records: Vec<Value>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum LineKind {
    Happened,
    Record,
    Tried,
}

impl StepReport {
    pub(super) fn note_attempt(&mut self, what: impl Display) {
        self.lines.push((LineKind::Tried, what.to_string()));
    }

    pub(super) fn note_result(&mut self, what: impl Display) {
        self.lines.push((LineKind::Happened, what.to_string()));
    }

    pub(super) fn note_record(&mut self, record: &Value) {
        let summary = summarize_record(record);
        self.lines.push((LineKind::Record, format_record(&summary)));
        self.records.push(summary);
    }

    fn lines_of(&self, wanted: LineKind) -> Vec<&str> {
        let lines = self.lines.iter().filter(|(kind, _)| *kind == wanted);
        lines.map(|(_, text)| text.as_str()).collect()
    }
}

/// The result of a step.
#[derive(Debug)]
pub(super) struct StepResult {
    pub(super) name: &'static str,
    pub(super) title: &'static str,
    pub(super) report: StepReport,
    pub(super) wrong: Option<String>,
    pub(super) took: Duration,
}

impl StepResult {
    /// Prints the result as text, as soon as the step is over.
    pub(super) fn print(&self, number: usize) {
        let took = paint(FAINT, format!("{} ms", self.took.as_millis()));
        let word = match self.wrong {
            None => paint(GOOD, "passed"),
            Some(_) => paint(BAD, "FAILED"),
        };
        anstream::println!("{number:>2}. {}: {word} {took}", paint(HEAD, self.title));
        for (kind, text) in &self.report.lines {
            let label = match kind {
                LineKind::Happened => "happened",
                LineKind::Record => "record",
                LineKind::Tried => "tried",
            };
            anstream::println!("    {} {text}", paint(FAINT, format!("{label:<8}")));
        }
        if let Some(wrong) = &self.wrong {
            anstream::println!("    {} {wrong}", paint(BAD, "wrong   "));
        }
    }

    pub(super) fn to_json(&self) -> Value {
        json!({
            "step": self.name,
            "title": self.title,
            "good": self.wrong.is_none(),
            "wrong": self.wrong,
            "tried": self.report.lines_of(LineKind::Tried),
            "happened": self.report.lines_of(LineKind::Happened),
            "records": self.report.records,
            "milliseconds": u64::try_from(self.took.as_millis()).unwrap_or(u64::MAX),
        })
    }
}

/// The most telling members of a record.
fn summarize_record(record: &Value) -> Value {
    let text = |pointer: &str| record.pointer(pointer).cloned().unwrap_or_default();
    let host = ["/http_request/url/hostname", "/dst_endpoint/hostname", "/query/hostname"];
    let host = host.into_iter().chain(["/dst_endpoint/ip"]).map(text);
    json!({
        "sequence": text("/metadata/sequence"),
        "class": text("/class_uid"),
        "class_name": text("/class_name"),
        "sandbox": text("/src_endpoint/uid"),
        "stage": text("/unmapped/sandbar/stage"),
        "event": text("/unmapped/sandbar/event"),
        "ending": text("/unmapped/sandbar/ending"),
        "reason": text("/status_detail"),
        "rule": text("/firewall_rule/name"),
        "host": host.into_iter().find(|host| !host.is_null()),
        "generation": text("/policy/version"),
    })
}

/// Formats class, stage, reason, sandbox, host, rule, generation and sequence number in one line.
fn format_record(summary: &Value) -> String {
    let member = |name: &str| match summary.get(name) {
        None | Some(Value::Null) => None,
        Some(Value::String(text)) => Some(text.clone()),
        Some(other) => Some(other.to_string()),
    };
    let stage = member("stage").unwrap_or_default();
    let style = if stage == "denied" { BAD } else { anstyle::Style::new() };
    let stage = Some(stage).filter(|stage| stage != "lifecycle"); // the class name says it
    let head = [Some(class_label(summary)), stage, member("event"), member("ending"), member("reason")];
    let head = head.into_iter().flatten().collect::<Vec<_>>().join(" ");
    let parts = [
        Some(paint(style, head)),
        [member("sandbox"), member("host")]
            .into_iter()
            .flatten()
            .reduce(|from, to| format!("{from} to {to}")),
        member("rule").map(|rule| format!("rule `{rule}`")),
        member("generation").map(|number| format!("generation {number}")),
        member("sequence").map(|number| format!("#{number}")),
    ];
    parts.into_iter().flatten().collect::<Vec<_>>().join(&paint(FAINT, ", "))
}

/// Number and short name of a record's class.
fn class_label(summary: &Value) -> String {
    let number = summary.get("class").and_then(Value::as_u64).unwrap_or_default();
    let word = match number {
        2004 => "finding",
        4001 => "connection",
        4002 => "http",
        4003 => "dns",
        6002 => "lifecycle",
        6003 => "memory",
        _ => "other",
    };
    format!("{number} {word}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_record_fits_in_a_line() {
        let record = json!({
            "class_uid": 4002,
            "status_detail": "method_not_allowed",
            "src_endpoint": { "uid": "sandbox-a" },
            "dst_endpoint": { "hostname": "code.example", "ip": "93.184.216.10" },
            "firewall_rule": { "name": "source code" },
            "policy": { "version": "7" },
            "metadata": { "sequence": 41 },
            "unmapped": { "sandbar": { "stage": "denied" } },
        });
        let line = anstream::adapter::strip_str(&format_record(&summarize_record(&record))).to_string();
        let expected = "4002 http denied method_not_allowed, sandbox-a to code.example, rule `source code`, generation 7, #41";
        assert_eq!(line, expected);
    }
}
