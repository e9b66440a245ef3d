//! What was found, for people and for machines.

use std::time::Duration;

use anstyle::Style;
use serde_json::{Value, json};

use super::probe::{Finding, Verdict};
use crate::terminal::{BAD, FAINT, GOOD, HEAD, WARN, paint, print_json};

/// Everything that was found on one side.
pub(super) struct Report {
    pub(super) side: &'static str,
    pub(super) findings: Vec<Finding>,
    pub(super) evidence: Vec<Evidence>,
    pub(super) took: Duration,
}

/// A request that was made to be shown, and what is to be seen of it.
#[derive(Clone, Debug, serde::Serialize)]
pub(super) struct Evidence {
    /// `allowed` or `refused`.
    pub(super) wanted: &'static str,
    pub(super) request: String,
    /// What was answered, or why nothing was.
    pub(super) answer: String,
    /// The record's id, by which the log has it.
    pub(super) record: Option<String>,
    /// The line of the log, where it can be read from here.
    pub(super) line: Option<Value>,
}

impl Evidence {
    /// Whether the log says that it was allowed.
    pub(super) fn is_allowed(&self) -> bool {
        let action = self.line.as_ref().and_then(|line| line.get("action_id")?.as_u64());
        action == Some(1)
    }
}

/// How many came to what.
#[derive(Clone, Copy, Debug, Default)]
struct Count {
    good: usize,
    bad: usize,
    unknown: usize,
}

impl Report {
    /// Whether anything is bad.
    pub(super) fn is_bad(&self) -> bool {
        self.findings.iter().any(|finding| finding.verdict.is_bad())
    }

    fn count(&self) -> Count {
        let mut count = Count::default();
        for finding in &self.findings {
            match finding.verdict {
                Verdict::Answered(_) | Verdict::Blocked(_) | Verdict::Fine(_) => count.good += 1,
                Verdict::Escaped(_) | Verdict::Wrong(_) => count.bad += 1,
                Verdict::Unknown(_) => count.unknown += 1,
            }
        }
        count
    }

    pub(super) fn print_json(&self) {
        let count = self.count();
        print_json(&json!({
            "ok": !self.is_bad(),
            "side": self.side,
            "tried": count.good + count.bad,
            "good": count.good,
            "bad": count.bad,
            "unknown": count.unknown,
            "milliseconds": u64::try_from(self.took.as_millis()).unwrap_or(u64::MAX),
            "probes": self.findings,
            "evidence": self.evidence,
        }));
    }

    pub(super) fn print(&self) {
        let mut group = "";
        for finding in &self.findings {
            if finding.group != group {
                group = finding.group;
                anstream::println!("{}", paint(HEAD, group));
            }
            line(finding);
        }
        if !self.evidence.is_empty() {
            anstream::println!("{}", paint(HEAD, "evidence"));
        }
        self.evidence.iter().for_each(show);
        self.sum_up();
    }

    fn sum_up(&self) {
        let Count { good, bad, unknown } = self.count();
        let seconds = self.took.as_secs_f64();
        let unclear = match unknown {
            0 => String::new(),
            _ => format!(", {} not known", paint(WARN, unknown)),
        };
        let (style, word) = if bad > 0 { (BAD, "not good") } else { (GOOD, "good") };
        let what = match self.side {
            "inside" => format!("{} ways around tried, {bad} escaped", good + bad),
            _ => format!("{} things looked at, {bad} wrong", good + bad),
        };
        anstream::println!("{}: {what}{unclear}, in {seconds:.1} s", paint(style, word));
    }
}

fn line(finding: &Finding) {
    let (style, word) = word(&finding.verdict);
    let how = paint(FAINT, safe(finding.verdict.how()));
    anstream::println!("  {} {}: {how}", paint(style, format!("{word:<8}")), finding.what);
    if let Some(fix) = finding.fix {
        anstream::println!("           {} {fix}", paint(HEAD, "fix:"));
    }
}

fn word(verdict: &Verdict) -> (Style, &'static str) {
    match verdict {
        Verdict::Answered(_) => (GOOD, "answered"),
        Verdict::Blocked(_) => (GOOD, "blocked"),
        Verdict::Escaped(_) => (BAD, "ESCAPED"),
        Verdict::Fine(_) => (GOOD, "fine"),
        Verdict::Unknown(_) => (WARN, "unknown"),
        Verdict::Wrong(_) => (BAD, "WRONG"),
    }
}

fn show(evidence: &Evidence) {
    let Evidence { wanted, request, answer, record, line } = evidence;
    anstream::println!("  {wanted:<8} {}: {}", safe(request), safe(answer));
    if let Some(record) = record {
        anstream::println!("           record {}", safe(record));
    }
    if let Some(line) = line {
        anstream::println!("           {}", paint(FAINT, safe(&line.to_string())));
    }
}

/// What others chose must not drive the terminal of whoever reads it.
pub(super) fn safe(text: &str) -> String {
    let escaped = |letter: char| match letter {
        ' '..='~' => letter.to_string(),
        other => other.escape_default().to_string(),
    };
    text.chars().map(escaped).collect()
}
