//! Pending refusals: those that a grant could lift, for a person to review. Newest first, one entry per host, and
//! bounded whatever a sandbox sends.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard};
use std::time::SystemTime;

use audit::{AttemptEvent, AttemptStatus, RecordedFacts};
use rules::{DomainName, Reason};
use serde::Serialize;

/// Most entries per sandbox, and in total.
const MAX_PER_SANDBOX: usize = 64;
const MAX_TOTAL: usize = 4096;

/// Refusals of one host.
#[derive(Clone, Debug, Serialize)]
pub struct PendingRefusal {
    pub number: u64,
    pub sandbox: String,
    pub host: String,
    /// `None` for a DNS query.
    pub port: Option<u16>,
    /// Reason of the last refusal.
    pub reason: &'static str,
    /// Method and path of the last refusal, if it was an HTTP request.
    pub request: Option<String>,
    pub count: u64,
    #[serde(skip)]
    pub last: SystemTime,
}

/// The list of pending refusals.
#[derive(Debug, Default)]
pub struct PendingList(Mutex<PendingTable>);

#[derive(Debug, Default)]
struct PendingTable {
    numbered: u64,
    all: usize,
    by: HashMap<String, Vec<PendingRefusal>>,
}

impl PendingList {
    /// Adds an attempt if it is a refusal that a grant could lift.
    pub fn observe(&self, seen: &AttemptEvent<'_>) {
        let AttemptStatus::Refused(code) = seen.status else { return };
        let (Some(subject), true) = (seen.subject, is_liftable(code.0)) else { return };
        let Some((host, port, request)) = requested_host(seen.facts) else { return };
        let count = seen.folded.saturating_add(1);
        self.lock().add(&subject.sandbox.0.to_display(), (host, port, request), code.0, count);
    }

    /// Returns all entries, newest first.
    pub fn list(&self) -> Vec<PendingRefusal> {
        let mut all: Vec<PendingRefusal> = self.lock().by.values().flatten().cloned().collect();
        all.sort_by_key(|refused| std::cmp::Reverse(refused.last));
        all
    }

    pub fn find(&self, number: u64) -> Option<PendingRefusal> {
        self.lock().by.values().flatten().find(|refused| refused.number == number).cloned()
    }

    /// Removes an entry that was approved.
    pub fn remove(&self, number: u64) {
        let mut table = self.lock();
        for refused in table.by.values_mut() {
            refused.retain(|refused| refused.number != number);
        }
        table.by.retain(|_, refused| !refused.is_empty());
        table.all = table.by.values().map(Vec::len).sum();
    }

    fn lock(&self) -> MutexGuard<'_, PendingTable> {
        sys::lock(&self.0)
    }
}

impl PendingTable {
    fn add(
        &mut self,
        sandbox: &str,
        (host, port, request): (String, Option<u16>, Option<String>),
        reason: &'static str,
        count: u64,
    ) {
        let now = SystemTime::now();
        let full = self.all >= MAX_TOTAL;
        if full && !self.by.contains_key(sandbox) {
            return;
        }
        let entries = self.by.entry(sandbox.to_owned()).or_default();
        let same = entries.iter_mut().find(|one| one.host == host && one.port == port);
        if let Some(same) = same {
            (same.count, same.last) = (same.count.saturating_add(count), now);
            (same.reason, same.request) = (reason, request);
            return;
        }
        // A sandbox that floods the list evicts only its own entries.
        if entries.len() >= MAX_PER_SANDBOX || full {
            let oldest = entries.iter().enumerate().min_by_key(|(_, one)| one.last).map(|(at, _)| at);
            let Some(oldest) = oldest else { return };
            entries.swap_remove(oldest);
            self.all -= 1;
        }
        self.numbered += 1;
        self.all += 1;
        let (number, sandbox) = (self.numbered, sandbox.to_owned());
        entries.push(PendingRefusal { number, sandbox, host, port, reason, request, count, last: now });
    }
}

/// Whether the only obstacle is a missing or too narrow rule.
fn is_liftable(code: &str) -> bool {
    [Reason::NotListed, Reason::PortNotListed, Reason::MethodNotAllowed, Reason::PathNotAllowed]
        .iter()
        .any(|reason| reason.code() == code)
}

fn requested_host(facts: &RecordedFacts) -> Option<(String, Option<u16>, Option<String>)> {
    let (host, port, request) = match facts {
        RecordedFacts::Connection(facts) => (facts.host.as_ref()?.to_display(), facts.port, None),
        RecordedFacts::Memory(_) => return None, // memory needs a rule that names the banks
        RecordedFacts::Query(facts) => (facts.name.to_display(), None, None),
        RecordedFacts::Request(facts) => {
            let request = format!("{} {}", facts.method.to_display(), facts.display_path());
            (facts.host.to_display(), Some(facts.port), Some(escape_text(&request)))
        }
    };
    Some((plain_name(&host)?, port, request))
}

/// Returns the canonical form of a plain name. Anything else cannot be approved: a sandbox could ask for a text that
/// would be a pattern in a grant.
fn plain_name(host: &str) -> Option<String> {
    DomainName::parse(host).ok().map(|name| name.as_str().to_owned())
}

/// Escapes text from a sandbox for a terminal.
fn escape_text(text: &str) -> String {
    text.chars().flat_map(char::escape_default).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_plain_name_can_be_approved() {
        for (host, shown) in [
            ("x.example", Some("x.example")),
            ("X.Example.", Some("x.example")),
            ("*.example", None),
            (".x.example", None),
            ("x.example:80", None),
            ("10.0.0.1", None),
            ("x.example\u{1b}[2J", None),
            ("", None),
        ] {
            assert_eq!(plain_name(host).as_deref(), shown, "{host}");
        }
        assert_eq!(escape_text("GET /\u{1b}[2J"), "GET /\\u{1b}[2J");
    }

    #[test]
    fn p17_a_flood_evicts_only_entries_of_its_own_sandbox() {
        let mut table = PendingTable::default();
        table.add("b", ("kept.example".into(), Some(443), None), "not_listed", 1);
        for at in 0..10 * MAX_PER_SANDBOX {
            table.add("a", (format!("n{at}.example"), Some(443), None), "not_listed", 1);
            table.add("a", (format!("n{at}.example"), Some(443), None), "not_listed", 1);
        }
        assert_eq!(table.by["a"].len(), MAX_PER_SANDBOX);
        assert!(table.by["a"].iter().all(|one| one.count == 2));
        assert_eq!(table.by["b"].len(), 1);
        for at in 0..2 * MAX_TOTAL {
            table.add(&format!("s{at}"), ("x.example".into(), None, None), "not_listed", 1);
        }
        assert_eq!(table.all, MAX_TOTAL);
        assert_eq!(table.by.values().map(Vec::len).sum::<usize>(), MAX_TOTAL);
    }
}
