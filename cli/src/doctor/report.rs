//! The report, as text and as JSON.

use std::time::Duration;

use anstyle::Style;
use serde_json::{Value, json};

use super::probe::{ProbeFinding, ProbeVerdict};
use crate::terminal::{BAD, FAINT, GOOD, HEAD, WARN, paint, print_json};

/// The findings of one side.
pub(super) struct DoctorReport {
    pub(super) side: &'static str,
    pub(super) findings: Vec<ProbeFinding>,
    pub(super) evidence: Vec<RequestEvidence>,
    pub(super) took: Duration,
}

/// A request made as evidence, with its response and record.
#[derive(Clone, Debug, serde::Serialize)]
pub(super) struct RequestEvidence {
    /// `allowed` or `refused`.
    pub(super) wanted: &'static str,
    pub(super) request: String,
    /// The response, or why there was none.
    pub(super) answer: String,
    /// Id of its record in the log.
    pub(super) record: Option<String>,
    /// Its line in the log, if readable from here.
    pub(super) line: Option<Value>,
}

impl RequestEvidence {
    /// Whether its record says that it was allowed.
    pub(super) fn is_allowed(&self) -> bool {
        let action = self.line.as_ref().and_then(|line| line.get("action_id")?.as_u64());
        action == Some(1)
    }
}

/// Number of findings by verdict.
#[derive(Clone, Copy, Debug, Default)]
struct VerdictCounts {
    good: usize,
    bad: usize,
    unknown: usize,
}

impl DoctorReport {
    /// Whether any verdict is bad.
    pub(super) fn is_bad(&self) -> bool {
        self.findings.iter().any(|finding| finding.verdict.is_bad())
    }

    fn count(&self) -> VerdictCounts {
        let mut count = VerdictCounts::default();
        for finding in &self.findings {
            match finding.verdict {
                ProbeVerdict::Answered(_) | ProbeVerdict::Blocked(_) | ProbeVerdict::Fine(_) => {
                    count.good += 1
                }
                ProbeVerdict::Escaped(_) | ProbeVerdict::Wrong(_) => count.bad += 1,
                ProbeVerdict::Unknown(_) => count.unknown += 1,
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
            print_finding(finding);
        }
        if !self.evidence.is_empty() {
            anstream::println!("{}", paint(HEAD, "evidence"));
        }
        self.evidence.iter().for_each(print_evidence);
        self.print_summary();
    }

    fn print_summary(&self) {
        let VerdictCounts { good, bad, unknown } = self.count();
        let seconds = self.took.as_secs_f64();
        let unclear = match unknown {
            0 => String::new(),
            _ => format!(", {} unknown", paint(WARN, unknown)),
        };
        let (style, word) = if bad > 0 { (BAD, "failed") } else { (GOOD, "ok") };
        let what = match self.side {
            "inside" => format!("tried {} ways around Sandbar, {bad} escaped", good + bad),
            _ => format!("{} checks, {bad} wrong", good + bad),
        };
        anstream::println!("{}: {what}{unclear}, in {seconds:.1} s", paint(style, word));
    }
}

fn print_finding(finding: &ProbeFinding) {
    let (style, word) = verdict_word(&finding.verdict);
    let how = paint(FAINT, escape_terminal(finding.verdict.how()));
    anstream::println!("  {} {}: {how}", paint(style, format!("{word:<8}")), finding.what);
    if let Some(fix) = finding.fix {
        anstream::println!("           {} {fix}", paint(HEAD, "fix:"));
    }
}

fn verdict_word(verdict: &ProbeVerdict) -> (Style, &'static str) {
    match verdict {
        ProbeVerdict::Answered(_) => (GOOD, "answered"),
        ProbeVerdict::Blocked(_) => (GOOD, "blocked"),
        ProbeVerdict::Escaped(_) => (BAD, "ESCAPED"),
        ProbeVerdict::Fine(_) => (GOOD, "fine"),
        ProbeVerdict::Unknown(_) => (WARN, "unknown"),
        ProbeVerdict::Wrong(_) => (BAD, "WRONG"),
    }
}

fn print_evidence(evidence: &RequestEvidence) {
    let RequestEvidence { wanted, request, answer, record, line } = evidence;
    anstream::println!("  {wanted:<8} {}: {}", escape_terminal(request), escape_terminal(answer));
    if let Some(record) = record {
        anstream::println!("           record {}", escape_terminal(record));
    }
    if let Some(line) = line {
        anstream::println!("           {}", paint(FAINT, escape_terminal(&line.to_string())));
    }
}

/// Escapes text chosen by peers, so that it cannot control the terminal.
pub(super) fn escape_terminal(text: &str) -> String {
    let escaped = |letter: char| match letter {
        ' '..='~' => letter.to_string(),
        other => other.escape_default().to_string(),
    };
    text.chars().map(escaped).collect()
}
