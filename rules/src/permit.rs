//! What a permit says, once the rules of both layers let an attempt pass: how, where to, on which terms.
//! What passes is bounded by both layers: unseen only if both say so, within the smaller budget.

use std::sync::Arc;

use crate::budget::Budgets;
use crate::decide::{Ask, Attempt, Floor, Refused, Standing, rule_ref};
use crate::decision::{Admission, How, Layer, Lookup, Permit, RuleRef, Terms};
use crate::facts::{Ech, Protocol, QueryType, Scheme};
use crate::name::Host;
use crate::pattern::Reach;
use crate::policy::{AllowTerms, By, Match, Tls, Verdict};
use crate::reason::Reason;
use crate::ruleset::Tier;

impl<'a> Attempt<'a> {
    pub(crate) fn permit(
        &self,
        generation: u64,
        standing: &Standing<'a>,
    ) -> Result<Permit, Refused> {
        let own = standing.own.first().ok_or(Reason::NotListed)?;
        let how =
            self.how(own, standing).map_err(|reason| Refused::by(reason, Layer::Sandbox, own))?;
        let terms = own.rule.allow();
        let floor = standing.floor_terms();
        let both =
            |said: fn(&AllowTerms) -> bool| terms.is_some_and(said) && floor.is_none_or(said);
        let either =
            |said: fn(&AllowTerms) -> bool| terms.is_some_and(said) || floor.is_some_and(said);
        let budgets =
            |terms: Option<&AllowTerms>| terms.map_or_else(Budgets::default, |terms| terms.budgets);
        Ok(Permit(Arc::new(Terms {
            sandbox: self.sandbox.id.clone(),
            host: self.host.clone(),
            port: self.port,
            rule: rule_ref(own, Layer::Sandbox),
            generation,
            credential: terms
                .and_then(|terms| terms.credential.clone())
                .filter(|_| how == How::Forward),
            is_credential_host: self.own.iter().any(injects),
            how,
            admission: [standing.own.iter().map(admission).collect(), standing.base.admission()],
            lookup: self.lookup(own, either(|terms| terms.strict_cname)),
            sandbox_budgets: self.layers.budgets(),
            rule_budgets: budgets(terms).min(budgets(floor)),
            base_budgets: standing.base_budgets(),
            may_receive_memory: both(|terms| terms.may_receive_memory),
            inspect: either(|terms| terms.inspect),
            facts: self.facts.clone(),
        })))
    }

    fn how(&self, own: &Match<'_>, standing: &Standing<'_>) -> Result<How, Reason> {
        match (self.ask, &own.rule.verdict) {
            (Ask::Name(_), _) => Ok(How::Resolve),
            (Ask::Connect(_), Verdict::Memory(terms)) => {
                Ok(How::Hold { profile: terms.profile.clone(), identity: terms.identity })
            }
            (Ask::Connect(_), _) if own.rule.is_raw() && self.must_see_requests() => {
                Err(Reason::RawTcpNotAllowed)
            }
            (Ask::Connect(_), _) if own.rule.is_raw() => Ok(How::Raw),
            (Ask::Connect(protocol), _) => self.opened(own, standing, protocol),
            (Ask::Request(request), Verdict::Allow(AllowTerms { credential: Some(_), .. })) => {
                match request.scheme {
                    Scheme::Http => Err(Reason::CredentialNeedsTls),
                    Scheme::Https => Ok(How::Forward),
                }
            }
            (Ask::Memory(_) | Ask::Request(_), _) => Ok(How::Forward),
        }
    }

    /// A connection that is neither raw nor memory: looked into unless both layers tunnel and no rule needs
    /// requests.
    fn opened(
        &self,
        own: &Match<'_>,
        standing: &Standing<'_>,
        protocol: &Protocol,
    ) -> Result<How, Reason> {
        let Protocol::Tls { ech, .. } = protocol else { return Ok(How::Intercept) };
        let floor = standing.floor_terms();
        let tunnels =
            own.rule.tls() == Tls::Tunnel && floor.is_none_or(|terms| terms.tls == Tls::Tunnel);
        if !tunnels || self.must_see_requests() {
            return Ok(How::Intercept);
        }
        let tolerates = |terms: &AllowTerms| terms.tolerate_ech;
        let tolerated = own.rule.allow().is_some_and(tolerates) && floor.is_none_or(tolerates);
        match ech {
            Ech::Present if !tolerated => Err(Reason::EchHiddenName),
            Ech::Absent | Ech::Present => Ok(How::Tunnel),
        }
    }

    fn must_see_requests(&self) -> bool {
        let needs = |matched: &Match<'_>| self.is_here(matched) && matched.rule.needs_requests();
        self.own.iter().chain(&self.floor).any(needs)
    }

    fn lookup(&self, own: &Match<'_>, strict_cname: bool) -> Lookup {
        let chosen_octets = match (self.host, own.by) {
            (Host::Name(name), By::Host(hit)) if hit.reach != Reach::Exact => {
                name.as_str().len() - hit.base.len()
            }
            _ => 0,
        };
        Lookup {
            chosen_octets,
            types: own
                .rule
                .allow()
                .map_or_else(|| QueryType::DEFAULT.into(), |terms| terms.dns_types.clone()),
            synthetic: self.own.iter().any(|matched| matched.rule.is_raw()),
            strict_cname,
        }
    }
}

impl Standing<'_> {
    /// The rule of the base that acts, where it sets budgets.
    fn base_budgets(&self) -> Option<(RuleRef, Budgets)> {
        let Floor::Rules(rules) = &self.base else { return None };
        let matched = rules.first()?;
        let budgets = matched.rule.budgets();
        budgets.set().next()?;
        Some((rule_ref(matched, Layer::Base), budgets))
    }

    /// The terms of the base's own rule; a tier has none, and a memory rule sets none.
    fn floor_terms(&self) -> Option<&AllowTerms> {
        match &self.base {
            Floor::Rules(rules) => rules.first().and_then(|matched| matched.rule.allow()),
            Floor::Tier(_) => None,
        }
    }
}

impl Floor<'_> {
    fn admission(&self) -> Box<[Admission]> {
        match self {
            Floor::Rules(rules) => rules.iter().map(admission).collect(),
            Floor::Tier(Tier::System) => [Admission::Any].into(),
            Floor::Tier(Tier::Untrusted | Tier::User) => [Admission::Public].into(),
        }
    }
}

fn injects(matched: &Match<'_>) -> bool {
    matched.rule.allow().is_some_and(|terms| terms.credential.is_some())
}

fn admission(matched: &Match<'_>) -> Admission {
    match (matched.by, matched.rule.resolves_to()) {
        (By::Address(net), _) => Admission::Only([net].into()),
        (By::Host(_), None) => Admission::Public,
        (By::Host(_), Some(nets)) => Admission::Only(nets.into()),
    }
}
