//! Pending refusals: those that a grant could lift, for a person to review. Newest first, one entry per host, and
//! bounded whatever sandboxes send: each has a share of the entries, and one that floods the list evicts its own.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard};
use std::time::SystemTime;

use audit::{AttemptEvent, AttemptStatus, RecordedFacts};
use rules::ids::SandboxId;
use rules::share::{ShareTerms, SharedTotal};
use rules::{DomainName, Reason, RuleSet};
use serde::Serialize;

/// Most entries per sandbox, and in total. With more than half as many sandboxes as the total, the total is two for
/// each.
const MAX_PER_SANDBOX: u64 = 64;
const MAX_TOTAL: u64 = 4096;

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

#[derive(Debug)]
struct PendingTable {
    numbered: u64,
    /// The entries of each sandbox, and the generation of the rules that the shares come from.
    quota: SharedTotal,
    generation: u64,
    by: HashMap<SandboxId, Vec<PendingRefusal>>,
}

impl Default for PendingTable {
    fn default() -> Self {
        PendingTable { numbered: 0, quota: SharedTotal::new(terms(1), 1), generation: 0, by: HashMap::new() }
    }
}

fn terms(sandboxes: u64) -> ShareTerms {
    ShareTerms::halved(MAX_TOTAL.max(2 * sandboxes), MAX_PER_SANDBOX, sandboxes)
}

impl PendingList {
    /// Adds an attempt if it is a refusal that a grant could lift.
    pub fn observe(&self, seen: &AttemptEvent<'_>, rules: &RuleSet) {
        let AttemptStatus::Refused(code) = seen.status else { return };
        let (Some(subject), true) = (seen.subject, is_liftable(code.0)) else { return };
        let Some((host, port, request)) = requested_host(seen.facts) else { return };
        let count = seen.folded.saturating_add(1);
        let Ok(sandbox) = SandboxId::parse(&subject.sandbox.0.to_display()) else { return };
        let mut table = self.lock();
        table.adopt_sandboxes(rules);
        table.add(&sandbox, (host, port, request), code.0, count);
    }

    /// Drops the entries of sandboxes that have left: no grant could lift them.
    pub fn prune_sandboxes(&self, rules: &RuleSet) {
        let mut table = self.lock();
        table.adopt_sandboxes(rules);
        let PendingTable { by, quota, .. } = &mut *table;
        by.retain(|id, refused| {
            let stays = rules.sandboxes().get(id).is_some();
            if !stays {
                quota.give_back(id, refused.len() as u64);
            }
            stays
        });
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
        let PendingTable { by, quota, .. } = &mut *table;
        for (id, refused) in by.iter_mut() {
            if let Some(at) = refused.iter().position(|refused| refused.number == number) {
                refused.remove(at);
                quota.give_back(id, 1);
            }
        }
        by.retain(|_, refused| !refused.is_empty());
    }

    fn lock(&self) -> MutexGuard<'_, PendingTable> {
        sys::lock(&self.0)
    }
}

impl PendingTable {
    /// Divides the list among the sandboxes of the rules.
    fn adopt_sandboxes(&mut self, rules: &RuleSet) {
        if rules.generation() > self.generation {
            let count = rules.sandboxes().iter().count() as u64;
            self.quota.set_terms(terms(count), count);
            self.generation = rules.generation();
        }
    }

    fn add(
        &mut self,
        sandbox: &SandboxId,
        (host, port, request): (String, Option<u16>, Option<String>),
        reason: &'static str,
        count: u64,
    ) {
        let now = SystemTime::now();
        let entries = self.by.entry(sandbox.clone()).or_default();
        let same = entries.iter_mut().find(|one| one.host == host && one.port == port);
        if let Some(same) = same {
            (same.count, same.last) = (same.count.saturating_add(count), now);
            (same.reason, same.request) = (reason, request);
            return;
        }
        // A sandbox that floods the list evicts only its own entries. Its share is at least one, so it has some.
        if self.quota.take(sandbox, 1).is_err() {
            let oldest = entries.iter().enumerate().min_by_key(|(_, one)| one.last).map(|(at, _)| at);
            let Some(oldest) = oldest else { return };
            entries.swap_remove(oldest);
        }
        self.numbered += 1;
        let (number, sandbox) = (self.numbered, sandbox.to_string());
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

    fn id(name: &str) -> SandboxId {
        SandboxId::parse(name).unwrap()
    }

    fn add(table: &mut PendingTable, sandbox: &str, host: &str) {
        table.add(&id(sandbox), (host.into(), Some(443), None), "not_listed", 1);
    }

    #[test]
    fn p17_a_flood_evicts_only_entries_of_its_own_sandbox() {
        let mut table = PendingTable::default();
        table.quota.set_terms(terms(2), 2);
        add(&mut table, "b", "kept.example");
        for at in 0..10 * MAX_PER_SANDBOX {
            add(&mut table, "a", &format!("n{at}.example"));
            add(&mut table, "a", &format!("n{at}.example"));
        }
        assert_eq!(table.by[&id("a")].len() as u64, MAX_PER_SANDBOX);
        assert!(table.by[&id("a")].iter().all(|one| one.count == 2));
        assert_eq!(table.by[&id("b")].len(), 1);
    }

    #[test]
    fn p20_a_full_list_has_room_for_every_sandbox() {
        for sandboxes in [200, 5000] {
            let mut table = PendingTable::default();
            table.quota.set_terms(terms(sandboxes), sandboxes);
            for at in 0..sandboxes - 1 {
                (0..MAX_PER_SANDBOX)
                    .for_each(|host| add(&mut table, &format!("s{at}"), &format!("n{host}.example")));
            }
            let listed = |table: &PendingTable| table.by.values().map(Vec::len).sum::<usize>() as u64;
            assert!(listed(&table) < MAX_TOTAL.max(2 * sandboxes), "{sandboxes}");
            add(&mut table, "quiet", "wanted.example");
            assert_eq!(table.by[&id("quiet")].len(), 1, "{sandboxes}");
            assert_eq!(table.quota.in_use(), listed(&table));
        }
    }
}
