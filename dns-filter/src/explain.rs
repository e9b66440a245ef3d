//! `sandbar dns`: asks as a sandbox would, and explains the answer.

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

/// The answer to a question, and the reason for it.
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
    /// The resolver that answered, now or when the answer was cached.
    pub resolver: Option<String>,
    pub rcode: String,
    pub answers: Vec<String>,
    /// What is left of the rule's bits, the sandbox's bits and its queries, if the answer is cached.
    pub rule_bits_left: Option<f64>,
    pub sandbox_bits_left: Option<f64>,
    pub forwards_left: Option<f64>,
}

impl DnsFilter {
    /// Asks for a name on behalf of a sandbox. The query is charged and recorded like one of the sandbox's own.
    pub async fn explain(
        self: &Arc<Self>,
        sandbox: &SandboxId,
        name: &DomainName,
        kind: QueryType,
    ) -> DnsExplanation {
        let mut explanation = self.explain_decision(sandbox, name, kind);
        let arrived = QueryArrival {
            channel: Channel::Dedicated(sandbox.clone()),
            carrier: DnsTransport::Tcp,
            source: None,
            original_dst: None,
            toward: QueryTarget::Us,
        };
        let packet = stub_query(name, kind);
        let answer = self.answer(&packet, &arrived).await.unwrap_or_default();
        explanation.rcode = Rcode(u16::from(answer.get(3).copied().unwrap_or(2) & 0xf)).name();
        explanation.reason = explanation.reason.or_else(|| extended_error(&answer));
        self.add_cached(sandbox, name, kind, &mut explanation);
        explanation
    }

    fn explain_decision(&self, sandbox: &SandboxId, name: &DomainName, kind: QueryType) -> DnsExplanation {
        let rules = self.rules.load_full();
        let mut explanation = DnsExplanation {
            sandbox: sandbox.to_string(),
            name: name.to_string(),
            kind: kind.to_string(),
            generation: rules.generation(),
            decision: "deny".to_owned(),
            source: "here".to_owned(),
            ..DnsExplanation::default()
        };
        let Some(known) = rules.sandboxes().get(sandbox) else {
            explanation.reason = Some(rules::Reason::UnknownSandbox.code().to_owned());
            return explanation;
        };
        let facts = Facts::Name(NameFacts { name: name.clone(), query: kind });
        let rule = match rules.decide(known, &facts) {
            Decision::Allow(permit) => {
                explanation.decision = "allow".to_owned();
                let query = PermittedQuery { rules: &rules, sandbox: known, permit: &permit, name, kind };
                explanation.source = self.answer_source(&query).to_owned();
                Some(permit.rule().clone())
            }
            Decision::Deny(denial) => {
                explanation.reason = Some(denial.reason.code().to_owned());
                explanation.meaning = Some(denial.reason.meaning().to_owned());
                explanation.next_step = Some(denial.reason.next_step().to_owned());
                denial.rule.clone()
            }
        };
        if let Some(rule) = rule {
            explanation.place = Some(format!("{}:{}", rule.file, rule.line));
            (explanation.policy, explanation.rule) =
                (Some(rule.policy.to_string()), Some(rule.rule.to_string()));
        }
        explanation
    }

    /// Returns where the answer will come from.
    fn answer_source(&self, query: &PermittedQuery<'_>) -> &'static str {
        let now = Instant::now();
        let key = wire_key(query.name, query.kind);
        let cached = self
            .find_state(&query.sandbox.id)
            .is_some_and(|state| state.lock().cache.find(&key, now).is_some());
        let nowhere = special_zone(query.name).is_some() && !self.upstreams.has_zone(query.name);
        match () {
            () if query.permit.lookup().synthetic => "synthetic",
            () if self.hosts.contains_key(query.name) => "hosts",
            () if cached => "cache",
            () if nowhere => "here",
            () if self.pre_resolved.find(query, now).is_some() => "ahead",
            () => "resolver",
        }
    }

    fn add_cached(
        &self,
        sandbox: &SandboxId,
        name: &DomainName,
        kind: QueryType,
        explanation: &mut DnsExplanation,
    ) {
        let now = Instant::now();
        let Some(state) = self.find_state(sandbox) else { return };
        let mut inner = state.lock();
        let key = wire_key(name, kind);
        let cached = inner.cache.find(&key, now).map(|cached| cached.entry.clone());
        let Some(entry) = cached else { return };
        explanation.resolver = crate::clean::display_resolver(entry.from);
        explanation.answers = entry
            .told
            .iter()
            .map(|answer| format!("{} {}", answer.kind.to_display(), answer.rdata.to_display()))
            .collect();
        let left = inner.budget.remaining(&entry.permit, now);
        explanation.rule_bits_left = Some(left.rule_bits.floor());
        explanation.sandbox_bits_left = Some(left.sandbox_bits.floor());
        explanation.forwards_left = Some(left.forwards.floor());
    }
}

/// Builds a query as a stub resolver sends it.
fn stub_query(name: &DomainName, kind: QueryType) -> Vec<u8> {
    let mut packet = vec![0, 0, 1, 0, 0, 1, 0, 0, 0, 0, 0, 1];
    packet.extend_from_slice(&wire_key(name, kind));
    packet.extend_from_slice(&[0, 1, 0, 0, 41, 4, 208, 0, 0, 0, 0, 0, 0]);
    packet
}

/// Returns the reason code in the extended error of an answer. Our answers end with it, so it is read from the end.
fn extended_error(answer: &[u8]) -> Option<String> {
    DnsQuery::parse(answer).err()?; // fails for an answer
    let text: Vec<u8> =
        answer.iter().rev().copied().take_while(|b| b.is_ascii_lowercase() || *b == b'_').collect();
    let text: String = text.into_iter().rev().map(char::from).collect();
    rules::Reason::ALL.iter().map(|reason| reason.code()).find(|code| *code == text).map(str::to_owned)
}
