//! `sandbar dns`: asks as a sandbox would, and tells what became of it and why.

use std::sync::Arc;

use rules::facts::{NameFacts, QueryType};
use rules::ids::SandboxId;
use rules::{Channel, Decision, DomainName, Facts, special_zone};
use serde::{Deserialize, Serialize};
use tokio::time::Instant;

use crate::clean::PermittedQuery;
use crate::filter::DnsFilter;
use crate::message::{DnsQuery, DnsTransport, Rcode, wire_key};
use crate::query::{QueryArrival, QueryTarget};

/// What became of a question, for people.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct DnsExplanation {
    pub sandbox: String,
    pub name: String,
    pub kind: String,
    /// `allow` or `deny`.
    pub decision: String,
    pub reason: Option<String>,
    pub meaning: Option<String>,
    pub next_step: Option<String>,
    pub policy: Option<String>,
    pub rule: Option<String>,
    pub place: Option<String>,
    pub generation: u64,
    /// Where the answer came from: `hosts`, `synthetic`, `ahead`, `cache`, `resolver` or `here`.
    pub source: String,
    /// The resolver that was asked, now or when the answer was kept.
    pub resolver: Option<String>,
    pub rcode: String,
    pub answers: Vec<String>,
    /// Bits and queries left, when the name lies under a wildcard or could not be resolved ahead.
    pub rule_bits_left: Option<f64>,
    pub sandbox_bits_left: Option<f64>,
    pub forwards_left: Option<f64>,
}

impl DnsFilter {
    /// Asks for a name on behalf of a sandbox: charged and recorded like any query of its own.
    pub async fn explain(
        self: &Arc<Self>,
        sandbox: &SandboxId,
        name: &DomainName,
        kind: QueryType,
    ) -> DnsExplanation {
        let mut told = self.explain_decision(sandbox, name, kind);
        let arrived = QueryArrival {
            channel: Channel::Dedicated(sandbox.clone()),
            carrier: DnsTransport::Tcp,
            source: None,
            original_dst: None,
            toward: QueryTarget::Us,
        };
        let packet = stub_query(name, kind);
        let answer = self.answer(&packet, &arrived).await.unwrap_or_default();
        told.rcode = Rcode(u16::from(answer.get(3).copied().unwrap_or(2) & 0xf)).name();
        told.reason = told.reason.or_else(|| extended_error(&answer));
        self.add_cached(sandbox, name, kind, &mut told);
        told
    }

    fn explain_decision(
        &self,
        sandbox: &SandboxId,
        name: &DomainName,
        kind: QueryType,
    ) -> DnsExplanation {
        let rules = self.rules.load_full();
        let mut told = DnsExplanation {
            sandbox: sandbox.to_string(),
            name: name.to_string(),
            kind: kind.to_string(),
            generation: rules.generation(),
            decision: "deny".to_owned(),
            source: "here".to_owned(),
            ..DnsExplanation::default()
        };
        let Some(known) = rules.sandboxes().get(sandbox) else {
            told.reason = Some(rules::Reason::UnknownSandbox.code().to_owned());
            return told;
        };
        let facts = Facts::Name(NameFacts { name: name.clone(), query: kind });
        let rule = match rules.decide(known, &facts) {
            Decision::Allow(permit) => {
                told.decision = "allow".to_owned();
                let asked =
                    PermittedQuery { rules: &rules, sandbox: known, permit: &permit, name, kind };
                told.source = self.answer_source(&asked).to_owned();
                Some(permit.rule().clone())
            }
            Decision::Deny(denial) => {
                told.reason = Some(denial.reason.code().to_owned());
                told.meaning = Some(denial.reason.meaning().to_owned());
                told.next_step = Some(denial.reason.next_step().to_owned());
                denial.rule.clone()
            }
        };
        if let Some(rule) = rule {
            told.place = Some(format!("{}:{}", rule.file, rule.line));
            (told.policy, told.rule) = (Some(rule.policy.to_string()), Some(rule.rule.to_string()));
        }
        told
    }

    /// Where an answer will come from.
    fn answer_source(&self, asked: &PermittedQuery<'_>) -> &'static str {
        let now = Instant::now();
        let key = wire_key(asked.name, asked.kind);
        let kept = self
            .find_state(&asked.sandbox.id)
            .is_some_and(|state| state.lock().cache.find(&key, now).is_some());
        let nowhere = special_zone(asked.name).is_some() && !self.upstreams.has_zone(asked.name);
        match () {
            () if asked.permit.lookup().synthetic => "synthetic",
            () if self.hosts.contains_key(asked.name) => "hosts",
            () if kept => "cache",
            () if nowhere => "here",
            () if self.pre_resolved.find(asked, now).is_some() => "ahead",
            () => "resolver",
        }
    }

    fn add_cached(
        &self,
        sandbox: &SandboxId,
        name: &DomainName,
        kind: QueryType,
        told: &mut DnsExplanation,
    ) {
        let now = Instant::now();
        let Some(state) = self.find_state(sandbox) else { return };
        let mut inner = state.lock();
        let key = wire_key(name, kind);
        let kept = inner.cache.find(&key, now).map(|kept| kept.entry.clone());
        let Some(entry) = kept else { return };
        told.resolver = crate::clean::display_resolver(entry.from);
        told.answers = entry
            .told
            .iter()
            .map(|answer| format!("{} {}", answer.kind.to_display(), answer.rdata.to_display()))
            .collect();
        let left = inner.budget.remaining(&entry.permit, now);
        told.rule_bits_left = Some(left.rule_bits.floor());
        told.sandbox_bits_left = Some(left.sandbox_bits.floor());
        told.forwards_left = Some(left.forwards.floor());
    }
}

/// A query as a stub resolver sends it.
fn stub_query(name: &DomainName, kind: QueryType) -> Vec<u8> {
    let mut packet = vec![0, 0, 1, 0, 0, 1, 0, 0, 0, 0, 0, 1];
    packet.extend_from_slice(&wire_key(name, kind));
    packet.extend_from_slice(&[0, 1, 0, 0, 41, 4, 208, 0, 0, 0, 0, 0, 0]);
    packet
}

/// The reason that stands in the extended error of an answer.
fn extended_error(answer: &[u8]) -> Option<String> {
    DnsQuery::parse(answer).err()?; // an answer is no query: its OPT is looked for from the end
    let text: Vec<u8> =
        answer.iter().rev().copied().take_while(|b| b.is_ascii_lowercase() || *b == b'_').collect();
    let text: String = text.into_iter().rev().map(char::from).collect();
    rules::Reason::ALL
        .iter()
        .map(|reason| reason.code())
        .find(|code| *code == text)
        .map(str::to_owned)
}
