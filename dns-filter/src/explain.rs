//! `sandbar dns`: asks as a sandbox would, and tells what became of it and why.

use std::sync::Arc;

use rules::facts::{NameFacts, QueryType};
use rules::word::SandboxId;
use rules::{Channel, Decision, DomainName, Facts, special_zone};
use serde::{Deserialize, Serialize};
use tokio::time::Instant;

use crate::clean::Asked;
use crate::filter::Filter;
use crate::message::{Carrier, Query, Rcode, key_of};
use crate::query::{Arrived, Toward};

/// What became of a question, for people.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Explanation {
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

impl Filter {
    /// Asks for a name on behalf of a sandbox: charged and recorded like any query of its own.
    pub async fn explain(
        self: &Arc<Self>,
        sandbox: &SandboxId,
        name: &DomainName,
        kind: QueryType,
    ) -> Explanation {
        let mut told = self.judged(sandbox, name, kind);
        let arrived = Arrived {
            channel: Channel::Dedicated(sandbox.clone()),
            carrier: Carrier::Tcp,
            source: None,
            aimed: None,
            toward: Toward::Us,
        };
        let packet = packet(name, kind);
        let answer = self.answer(&packet, &arrived).await.unwrap_or_default();
        told.rcode = Rcode(u16::from(answer.get(3).copied().unwrap_or(2) & 0xf)).name();
        told.reason = told.reason.or_else(|| ede_of(&answer));
        self.add_kept(sandbox, name, kind, &mut told);
        told
    }

    fn judged(&self, sandbox: &SandboxId, name: &DomainName, kind: QueryType) -> Explanation {
        let rules = self.rules.load_full();
        let mut told = Explanation {
            sandbox: sandbox.to_string(),
            name: name.to_string(),
            kind: kind.to_string(),
            generation: rules.generation(),
            decision: "deny".to_owned(),
            source: "here".to_owned(),
            ..Explanation::default()
        };
        let Some(known) = rules.sandboxes().get(sandbox) else {
            told.reason = Some(rules::Reason::UnknownSandbox.code().to_owned());
            return told;
        };
        let facts = Facts::Name(NameFacts { name: name.clone(), query: kind });
        let rule = match rules.decide(known, &facts) {
            Decision::Allow(permit) => {
                told.decision = "allow".to_owned();
                let asked = Asked { rules: &rules, sandbox: known, permit: &permit, name, kind };
                told.source = self.source(&asked).to_owned();
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
    fn source(&self, asked: &Asked<'_>) -> &'static str {
        let now = Instant::now();
        let key = key_of(asked.name, asked.kind);
        let kept = self
            .known(&asked.sandbox.id)
            .is_some_and(|state| state.lock().cache.find(&key, now).is_some());
        let nowhere = special_zone(asked.name).is_some() && !self.upstreams.has_zone(asked.name);
        match () {
            () if asked.permit.lookup().synthetic => "synthetic",
            () if self.hosts.contains_key(asked.name) => "hosts",
            () if kept => "cache",
            () if nowhere => "here",
            () if self.ahead.find(asked, now).is_some() => "ahead",
            () => "resolver",
        }
    }

    fn add_kept(
        &self,
        sandbox: &SandboxId,
        name: &DomainName,
        kind: QueryType,
        told: &mut Explanation,
    ) {
        let now = Instant::now();
        let Some(state) = self.known(sandbox) else { return };
        let mut inner = state.lock();
        let key = key_of(name, kind);
        let kept = inner.cache.find(&key, now).map(|kept| kept.entry.clone());
        let Some(entry) = kept else { return };
        told.resolver = crate::clean::shown(entry.from);
        told.answers = entry
            .told
            .iter()
            .map(|answer| format!("{} {}", answer.kind.shown(), answer.rdata.shown()))
            .collect();
        let left = inner.budget.left(&entry.permit, now);
        told.rule_bits_left = Some(left.rule_bits.floor());
        told.sandbox_bits_left = Some(left.sandbox_bits.floor());
        told.forwards_left = Some(left.forwards.floor());
    }
}

/// A query as a stub resolver sends it.
fn packet(name: &DomainName, kind: QueryType) -> Vec<u8> {
    let mut packet = vec![0, 0, 1, 0, 0, 1, 0, 0, 0, 0, 0, 1];
    packet.extend_from_slice(&key_of(name, kind));
    packet.extend_from_slice(&[0, 1, 0, 0, 41, 4, 208, 0, 0, 0, 0, 0, 0]);
    packet
}

/// The reason that stands in the extended error of an answer.
fn ede_of(answer: &[u8]) -> Option<String> {
    Query::read(answer).err()?; // an answer is no query: its OPT is looked for from the end
    let text: Vec<u8> =
        answer.iter().rev().copied().take_while(|b| b.is_ascii_lowercase() || *b == b'_').collect();
    let text: String = text.into_iter().rev().map(char::from).collect();
    rules::Reason::ALL
        .iter()
        .map(|reason| reason.code())
        .find(|code| *code == text)
        .map(str::to_owned)
}
