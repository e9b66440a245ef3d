//! Pre-resolves the exact names of policies on a timer, so that an observer at the resolver learns neither whether nor
//! when a sandbox looks one up. All sandboxes share the raw answer; each gets it cleaned by its own rules.

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

/// Interval of the check for due names and changed rules.
const PRE_RESOLVE_TICK: Duration = Duration::from_secs(1);

/// How long the start waits for the first round.
const PRE_RESOLVE_WAIT: Duration = Duration::from_secs(5);

/// The pre-resolved answers.
#[derive(Debug, Default)]
pub(crate) struct PreResolvedNames {
    answers: Mutex<HashMap<(DomainName, QueryType), PreResolvedAnswer>>,
}

#[derive(Debug)]
struct PreResolvedAnswer {
    message: Option<Arc<Message>>,
    born: Instant,
    expires: Instant,
    /// When to ask again: shortly before it expires, or soon after a failure.
    due: Instant,
}

/// A name to pre-resolve, and a sandbox that may ask for it.
struct PreResolveTarget {
    sandbox: SandboxRef,
    permit: Permit,
    name: DomainName,
    kind: QueryType,
}

impl PreResolvedNames {
    /// Returns the answer to a query, cleaned by the rules of its sandbox, and when it was received.
    pub(crate) fn find(&self, query: &PermittedQuery<'_>, now: Instant) -> Option<(CleanAnswer, Instant)> {
        if query.permit.lookup().chosen_octets > 0 {
            return None;
        }
        let (message, born, expires) = {
            let answers = lock(&self.answers);
            let answer =
                answers.get(&(query.name.clone(), query.kind)).filter(|answer| answer.expires > now)?;
            (answer.message.clone()?, answer.born, answer.expires)
        };
        let mut cleaned = clean(query, &message).ok()?;
        let left = expires.saturating_duration_since(born).as_secs() as u32;
        cleaned.ttl = cleaned.ttl.max(left);
        Some((cleaned, born))
    }

    fn is_due(&self, target: &PreResolveTarget, now: Instant) -> bool {
        let key = (target.name.clone(), target.kind);
        lock(&self.answers).get(&key).is_none_or(|answer| answer.due <= now)
    }

    fn insert(&self, target: &PreResolveTarget, message: Option<Message>, ttl: u32) {
        let now = Instant::now();
        let life = Duration::from_secs(u64::from(ttl)).max(PRE_RESOLVE_FLOOR);
        let mut all = lock(&self.answers);
        let key = (target.name.clone(), target.kind);
        let answer = match message {
            // Due before it expires, so that there is no gap.
            Some(message) => PreResolvedAnswer {
                message: Some(Arc::new(message)),
                born: now,
                expires: now + life + PRE_RESOLVE_RETRY,
                due: now + life,
            },
            None => match all.remove(&key) {
                Some(before) => PreResolvedAnswer { due: now + PRE_RESOLVE_RETRY, ..before },
                None => {
                    PreResolvedAnswer { message: None, born: now, expires: now, due: now + PRE_RESOLVE_RETRY }
                }
            },
        };
        all.insert(key, answer);
    }

    /// Drops names that no policy has any more.
    fn retain(&self, targets: &[PreResolveTarget]) {
        let wanted = |name: &DomainName| targets.iter().any(|target| target.name == *name);
        lock(&self.answers).retain(|(name, _), _| wanted(name));
    }
}

impl DnsFilter {
    /// Pre-resolves the exact names of all policies, until dropped.
    pub(crate) async fn run_pre_resolve(self: &Arc<Self>) {
        let mut generation = None;
        let mut targets: Arc<Vec<PreResolveTarget>> = Arc::default();
        loop {
            let rules = self.rules.load_full();
            if generation != Some(rules.generation()) {
                generation = Some(rules.generation());
                targets = Arc::new(self.pre_resolve_targets(&rules));
                self.pre_resolved.retain(&targets);
            }
            self.resolve_due(&rules, &targets).await;
            tokio::time::sleep(PRE_RESOLVE_TICK).await;
        }
    }

    /// Pre-resolves every exact name once, before the first query. The time is bounded: a resolver that is down must
    /// not prevent the start.
    pub async fn pre_resolve_once(self: &Arc<Self>) {
        if self.is_pre_resolving() {
            let rules = self.rules.load_full();
            let targets = Arc::new(self.pre_resolve_targets(&rules));
            drop(tokio::time::timeout(PRE_RESOLVE_WAIT, self.resolve_due(&rules, &targets)).await);
        }
    }

    async fn resolve_due(self: &Arc<Self>, rules: &Arc<RuleSet>, targets: &Arc<Vec<PreResolveTarget>>) {
        let now = Instant::now();
        let limit = Arc::new(Semaphore::new(PRE_RESOLVE_AT_ONCE));
        let mut tasks = tokio::task::JoinSet::new();
        for at in 0..targets.len() {
            let due = targets.get(at).is_some_and(|target| self.pre_resolved.is_due(target, now));
            if !due {
                continue;
            }
            let Ok(permit) = limit.clone().acquire_owned().await else { return };
            let (filter, rules, targets) = (self.clone(), rules.clone(), targets.clone());
            tasks.spawn(async move {
                if let Some(target) = targets.get(at) {
                    filter.resolve_one(&rules, target).await;
                }
                drop(permit);
            });
        }
        while tasks.join_next().await.is_some() {}
    }

    async fn resolve_one(&self, rules: &RuleSet, target: &PreResolveTarget) {
        let mut record = self.log.open_record(record::own_arrival("timer"));
        record.set_facts(record::facts(target.name.as_str(), target.kind));
        let verdict = record::allow_details(&target.permit, self.policy(rules), record::PRE_RESOLVE);
        let Ok(receipt) = record.record_decision(verdict).await else { return }; // no record, no traffic
        let reply = self.upstreams.ask(&target.name, target.kind, &receipt).await;
        let query = PermittedQuery {
            rules,
            sandbox: &target.sandbox,
            permit: &target.permit,
            name: &target.name,
            kind: target.kind,
        };
        let message = reply.ok().map(|reply| reply.message);
        let cleaned = message.as_ref().map(|message| clean(&query, message));
        match cleaned {
            Some(Ok(cleaned)) => {
                record.close(answer_outcome(cleaned.rcode, &cleaned.told, Ending::Completed));
                self.pre_resolved.insert(target, message, cleaned.ttl.min(TTL_CEILING));
            }
            Some(Err(reason)) => {
                record.close(answer_outcome(Rcode::SERVFAIL, &[], Ending::Failed(reason.into())));
                self.pre_resolved.insert(target, None, 0);
            }
            None => {
                let code = rules::Reason::ResolverUnreachable.into();
                record.close(answer_outcome(Rcode::SERVFAIL, &[], Ending::Failed(code)));
                self.pre_resolved.insert(target, None, 0);
            }
        }
    }

    /// Returns the exact names in policies, each with a sandbox that may ask for it.
    fn pre_resolve_targets(&self, rules: &RuleSet) -> Vec<PreResolveTarget> {
        let mut targets: Vec<PreResolveTarget> = Vec::new();
        let mut known = std::collections::HashSet::new();
        for sandbox in rules.sandboxes().iter() {
            for policy in rules.policies_of(sandbox) {
                let exact = policy.literals().filter(|(_, rule)| !rule.is_deny());
                for (name, _) in exact.take(PRE_RESOLVE_POLICY) {
                    if targets.len() >= PRE_RESOLVE_ALL || !known.insert(name.clone()) {
                        continue;
                    }
                    targets.extend(self.targets_for(rules, sandbox, name));
                }
            }
        }
        targets
    }

    fn targets_for(&self, rules: &RuleSet, sandbox: &SandboxRef, name: &DomainName) -> Vec<PreResolveTarget> {
        let answered_locally =
            self.hosts.contains_key(name) || special_zone(name).is_some() && !self.upstreams.has_zone(name);
        let allowed = |kind: QueryType| {
            let facts = Facts::Name(NameFacts { name: name.clone(), query: kind });
            match rules.decide(sandbox, &facts) {
                Decision::Allow(permit) if !answered_locally => {
                    Some(PreResolveTarget { sandbox: sandbox.clone(), permit, name: name.clone(), kind })
                }
                Decision::Allow(_) | Decision::Deny(_) => None,
            }
        };
        QueryType::DEFAULT.into_iter().filter_map(allowed).collect()
    }
}
