//! What a step tells: what was tried, what happened, which records it caused; and whether it went as promised.

use std::fmt::Display;
use std::time::Duration;

use serde_json::{Value, json};

use crate::terminal::{BAD, FAINT, GOOD, HEAD, paint};

/// A step that did not go as promised, and in what.
#[derive(Debug)]
pub(super) struct Misbehaved(pub(super) String);

impl<E: Into<anyhow::Error>> From<E> for Misbehaved {
    fn from(error: E) -> Self {
        Misbehaved(format!("{:#}", error.into()))
    }
}

/// Goes on only if it `holds`.
pub(super) fn promise(holds: bool, otherwise: impl Display) -> Result<(), Misbehaved> {
    if holds { Ok(()) } else { Err(Misbehaved(otherwise.to_string())) }
}

/// What a step told so far.
#[derive(Debug, Default)]
pub(super) struct Told {
    lines: Vec<(Kind, String)>,
    records: Vec<Value>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Happened,
    Record,
    Tried,
}

impl Told {
    pub(super) fn tried(&mut self, what: impl Display) {
        self.lines.push((Kind::Tried, what.to_string()));
    }

    pub(super) fn happened(&mut self, what: impl Display) {
        self.lines.push((Kind::Happened, what.to_string()));
    }

    pub(super) fn record(&mut self, record: &Value) {
        let essence = essence(record);
        self.lines.push((Kind::Record, in_a_line(&essence)));
        self.records.push(essence);
    }

    fn of(&self, wanted: Kind) -> Vec<&str> {
        let lines = self.lines.iter().filter(|(kind, _)| *kind == wanted);
        lines.map(|(_, text)| text.as_str()).collect()
    }
}

/// How a step went.
#[derive(Debug)]
pub(super) struct Played {
    pub(super) name: &'static str,
    pub(super) title: &'static str,
    pub(super) told: Told,
    pub(super) wrong: Option<String>,
    pub(super) took: Duration,
}

impl Played {
    /// For people, as soon as it is over.
    pub(super) fn print(&self, number: usize) {
        let took = paint(FAINT, format!("{} ms", self.took.as_millis()));
        let word = match self.wrong {
            None => paint(GOOD, "as promised"),
            Some(_) => paint(BAD, "MISBEHAVED"),
        };
        anstream::println!("{number:>2}. {} {word} {took}", paint(HEAD, self.title));
        for (kind, text) in &self.told.lines {
            let (label, style) = match kind {
                Kind::Happened => ("happened", anstyle::Style::new()),
                Kind::Record => ("record", FAINT),
                Kind::Tried => ("tried", anstyle::Style::new()),
            };
            anstream::println!(
                "    {} {}",
                paint(FAINT, format!("{label:<8}")),
                paint(style, text)
            );
        }
        if let Some(wrong) = &self.wrong {
            anstream::println!("    {} {wrong}", paint(BAD, "wrong   "));
        }
    }

    pub(super) fn json(&self) -> Value {
        json!({
            "step": self.name,
            "title": self.title,
            "good": self.wrong.is_none(),
            "wrong": self.wrong,
            "tried": self.told.of(Kind::Tried),
            "happened": self.told.of(Kind::Happened),
            "records": self.told.records,
            "milliseconds": u64::try_from(self.took.as_millis()).unwrap_or(u64::MAX),
        })
    }
}

/// The members of a record that say most.
fn essence(record: &Value) -> Value {
    let text = |place: &str| record.pointer(place).cloned().unwrap_or_default();
    let host = ["/http_request/url/hostname", "/dst_endpoint/hostname", "/query/hostname"];
    let host = host.into_iter().chain(["/dst_endpoint/ip"]).map(text);
    json!({
        "sequence": text("/metadata/sequence"),
        "class": text("/class_uid"),
        "class_name": text("/class_name"),
        "sandbox": text("/src_endpoint/uid"),
        "stage": text("/unmapped/sandbar/stage"),
        "event": text("/unmapped/sandbar/event"),
        "reason": text("/status_detail"),
        "rule": text("/firewall_rule/name"),
        "host": host.into_iter().find(|host| !host.is_null()),
        "generation": text("/policy/version"),
    })
}

fn in_a_line(essence: &Value) -> String {
    let member = |name: &str| match essence.get(name) {
        None | Some(Value::Null) => None,
        Some(Value::String(text)) => Some(text.clone()),
        Some(other) => Some(other.to_string()),
    };
    let number = member("sequence").unwrap_or_default();
    let mut line = format!("#{number} {}", member("class").unwrap_or_default());
    for (name, label) in [
        ("sandbox", ""),
        ("stage", ""),
        ("event", ""),
        ("reason", ""),
        ("host", ""),
        ("rule", "rule: "),
        ("generation", "generation "),
    ] {
        if let Some(value) = member(name) {
            line += &format!(" | {label}{value}");
        }
    }
    line
}
