//! Names resolved ahead: the exact names of policies, on a timer of ours, so that neither the fact nor
//! the moment of a sandbox's look-up leaves. What comes back is the instance's; each sandbox's own rules
//! clean it anew.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use audit::Ending;
use hickory_proto::op::Message;
use rules::facts::{NameFacts, QueryType};
use rules::{Decision, DomainName, Facts, Permit, RuleSet, SandboxRef, special_zone};
use tokio::sync::Semaphore;
use tokio::time::Instant;

use crate::clean::{CleanAnswer, PermittedQuery, answer_outcome, clean};
use crate::filter::DnsFilter;
use crate::limits::{
    PRE_RESOLVE_ALL, PRE_RESOLVE_AT_ONCE, PRE_RESOLVE_FLOOR, PRE_RESOLVE_POLICY, PRE_RESOLVE_RETRY,
    TTL_CEILING,
};
use crate::lock;
use crate::message::Rcode;
use crate::record;

/// How often it is looked whether a name is due, and whether the rules have changed.
const PRE_RESOLVE_TICK: Duration = Duration::from_secs(1);

/// How long a start waits for the first round.
const PRE_RESOLVE_WAIT: Duration = Duration::from_secs(5);

/// What was resolved ahead.
#[derive(Debug, Default)]
pub(crate) struct PreResolvedNames {
    found: Mutex<HashMap<(DomainName, QueryType), PreResolvedAnswer>>,
}

#[derive(Debug)]
struct PreResolvedAnswer {
    message: Option<Arc<Message>>,
    born: Instant,
    expires: Instant,
    /// When it is asked for again: at its end, or soon after a failure.
    due: Instant,
}

/// A name to be resolved ahead, and a sandbox whose rules allow it.
struct PreResolveTarget {
    sandbox: SandboxRef,
    permit: Permit,
    name: DomainName,
    kind: QueryType,
}

impl PreResolvedNames {
    /// What is known of a name, cleaned by the rules of whoever asks.
    pub(crate) fn find(
        &self,
        asked: &PermittedQuery<'_>,
        now: Instant,
    ) -> Option<(CleanAnswer, Instant)> {
        if asked.permit.lookup().chosen_octets > 0 {
            return None;
        }
        let (message, born, expires) = {
            let found = lock(&self.found);
            let found =
                found.get(&(asked.name.clone(), asked.kind)).filter(|found| found.expires > now)?;
            (found.message.clone()?, found.born, found.expires)
        };
        let mut cleaned = clean(asked, &message).ok()?;
        let left = expires.saturating_duration_since(born).as_secs() as u32;
        cleaned.ttl = cleaned.ttl.max(left);
        Some((cleaned, born))
    }

    fn is_due(&self, literal: &PreResolveTarget, now: Instant) -> bool {
        let key = (literal.name.clone(), literal.kind);
        lock(&self.found).get(&key).is_none_or(|found| found.due <= now)
    }

    fn insert(&self, literal: &PreResolveTarget, message: Option<Message>, ttl: u32) {
        let now = Instant::now();
        let life = Duration::from_secs(u64::from(ttl)).max(PRE_RESOLVE_FLOOR);
        let mut all = lock(&self.found);
        let key = (literal.name.clone(), literal.kind);
        let found = match message {
            // It is asked for a little before its end, so that nobody meets a gap.
            Some(message) => PreResolvedAnswer {
                message: Some(Arc::new(message)),
                born: now,
                expires: now + life + PRE_RESOLVE_RETRY,
                due: now + life,
            },
            None => match all.remove(&key) {
                Some(before) => PreResolvedAnswer { due: now + PRE_RESOLVE_RETRY, ..before },
                None => PreResolvedAnswer {
                    message: None,
                    born: now,
                    expires: now,
                    due: now + PRE_RESOLVE_RETRY,
                },
            },
        };
        all.insert(key, found);
    }

    /// Forgets what no policy names any more.
    fn retain(&self, literals: &[PreResolveTarget]) {
        let wanted = |name: &DomainName| literals.iter().any(|literal| literal.name == *name);
        lock(&self.found).retain(|(name, _), _| wanted(name));
    }
}

impl DnsFilter {
    /// Resolves the exact names of all policies for ever.
    pub(crate) async fn run_pre_resolve(self: &Arc<Self>) {
        let mut generation = None;
        let mut literals: Arc<Vec<PreResolveTarget>> = Arc::default();
        loop {
            let rules = self.rules.load_full();
            if generation != Some(rules.generation()) {
                generation = Some(rules.generation());
                literals = Arc::new(self.pre_resolve_targets(&rules));
                self.pre_resolved.retain(&literals);
            }
            self.resolve_due(&rules, &literals).await;
            tokio::time::sleep(PRE_RESOLVE_TICK).await;
        }
    }

    /// Resolves every exact name once, so that the first question finds it; bounded, for a resolver
    /// that is down must not keep others from being served.
    pub async fn pre_resolve_once(self: &Arc<Self>) {
        if self.is_pre_resolving() {
            let rules = self.rules.load_full();
            let literals = Arc::new(self.pre_resolve_targets(&rules));
            drop(tokio::time::timeout(PRE_RESOLVE_WAIT, self.resolve_due(&rules, &literals)).await);
        }
    }

    async fn resolve_due(
        self: &Arc<Self>,
        rules: &Arc<RuleSet>,
        literals: &Arc<Vec<PreResolveTarget>>,
    ) {
        let now = Instant::now();
        let limit = Arc::new(Semaphore::new(PRE_RESOLVE_AT_ONCE));
        let mut tasks = tokio::task::JoinSet::new();
        for at in 0..literals.len() {
            let due =
                literals.get(at).is_some_and(|literal| self.pre_resolved.is_due(literal, now));
            if !due {
                continue;
            }
            let Ok(turn) = limit.clone().acquire_owned().await else { return };
            let (filter, rules, literals) = (self.clone(), rules.clone(), literals.clone());
            tasks.spawn(async move {
                if let Some(literal) = literals.get(at) {
                    filter.resolve_one(&rules, literal).await;
                }
                drop(turn);
            });
        }
        while tasks.join_next().await.is_some() {}
    }

    async fn resolve_one(&self, rules: &RuleSet, literal: &PreResolveTarget) {
        let mut record = self.log.open_record(record::own_arrival("timer"));
        record.set_facts(record::facts(literal.name.as_str(), literal.kind));
        let verdict =
            record::allow_details(&literal.permit, self.policy(rules), record::PRE_RESOLVE);
        let Ok(receipt) = record.record_decision(verdict).await else { return }; // no record, no traffic
        let told = self.upstreams.ask(&literal.name, literal.kind, &receipt).await;
        let asked = PermittedQuery {
            rules,
            sandbox: &literal.sandbox,
            permit: &literal.permit,
            name: &literal.name,
            kind: literal.kind,
        };
        let message = told.ok().map(|told| told.message);
        let cleaned = message.as_ref().map(|message| clean(&asked, message));
        match cleaned {
            Some(Ok(cleaned)) => {
                record.close(answer_outcome(cleaned.rcode, &cleaned.told, Ending::Completed));
                self.pre_resolved.insert(literal, message, cleaned.ttl.min(TTL_CEILING));
            }
            Some(Err(reason)) => {
                record.close(answer_outcome(Rcode::SERVFAIL, &[], Ending::Failed(reason.into())));
                self.pre_resolved.insert(literal, None, 0);
            }
            None => {
                record.close(answer_outcome(
                    Rcode::SERVFAIL,
                    &[],
                    Ending::Failed(rules::Reason::ResolverUnreachable.into()),
                ));
                self.pre_resolved.insert(literal, None, 0);
            }
        }
    }

    /// The exact names that stand in policies themselves, each with a sandbox that may ask for it.
    fn pre_resolve_targets(&self, rules: &RuleSet) -> Vec<PreResolveTarget> {
        let mut literals: Vec<PreResolveTarget> = Vec::new();
        let mut known = std::collections::HashSet::new();
        for sandbox in rules.sandboxes().iter() {
            for policy in rules.policies_of(sandbox) {
                let exact = policy.literals().filter(|(_, rule)| !rule.is_deny());
                for (name, _) in exact.take(PRE_RESOLVE_POLICY) {
                    if literals.len() >= PRE_RESOLVE_ALL || !known.insert(name.clone()) {
                        continue;
                    }
                    literals.extend(self.targets_for(rules, sandbox, name));
                }
            }
        }
        literals
    }

    fn targets_for(
        &self,
        rules: &RuleSet,
        sandbox: &SandboxRef,
        name: &DomainName,
    ) -> Vec<PreResolveTarget> {
        let unasked = self.hosts.contains_key(name)
            || special_zone(name).is_some() && !self.upstreams.has_zone(name);
        let allowed = |kind: QueryType| {
            let facts = Facts::Name(NameFacts { name: name.clone(), query: kind });
            match rules.decide(sandbox, &facts) {
                Decision::Allow(permit) if !unasked => Some(PreResolveTarget {
                    sandbox: sandbox.clone(),
                    permit,
                    name: name.clone(),
                    kind,
                }),
                Decision::Allow(_) | Decision::Deny(_) => None,
            }
        };
        QueryType::DEFAULT.into_iter().filter_map(allowed).collect()
    }
}
