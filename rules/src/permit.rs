//! Builds the permit after both layers allowed an attempt: treatment, addresses, budgets. Both layers bound it:
//! bytes pass uninspected only if both layers tunnel, and the smaller budget counts.

use std::sync::Arc;

use crate::budget::Budgets;
use crate::credential::PinAccount;
use crate::decide::{AllowingRules, AttemptContext, BaseAllowance, DecisionStage, PartialDenial, rule_ref};
use crate::decision::{AddressAdmission, LookupTerms, Permit, PermitTerms, PolicyLayer, RuleRef, Treatment};
use crate::facts::{EchPresence, Protocol, QueryType, UrlScheme};
use crate::name::Host;
use crate::pattern::PatternReach;
use crate::policy::{AllowTerms, InspectTerm, MatchedEntry, RuleAction, RuleMatch, TlsMode};
use crate::reason::Reason;
use crate::ruleset::Tier;
use crate::signals::settings::{BodyInspection, MemoryReceipt, SignalSettings, SignalTerms};

impl<'a> AttemptContext<'a> {
    pub(crate) fn build_permit(
        &self,
        generation: u64,
        allowing: &AllowingRules<'a>,
    ) -> Result<Permit, PartialDenial> {
        let own = allowing.own.first().ok_or(Reason::NotListed)?;
        let treatment = self
            .treatment(own, allowing)
            .map_err(|reason| PartialDenial::from_rule(reason, PolicyLayer::Sandbox, own))?;
        let terms = own.rule.allow_terms();
        let base_terms = allowing.base_terms();
        let either = |term: fn(&AllowTerms) -> bool| terms.is_some_and(term) || base_terms.is_some_and(term);
        let budgets = |terms: Option<&AllowTerms>| terms.map_or_else(Budgets::default, |terms| terms.budgets);
        let terms = Arc::new(PermitTerms {
            host: self.host.clone(),
            port: self.port,
            rule: rule_ref(own, PolicyLayer::Sandbox),
            generation,
            credentials: match treatment {
                Treatment::Forward => own.rule.credentials().into(),
                Treatment::Hold { .. }
                | Treatment::Intercept
                | Treatment::Raw
                | Treatment::Resolve
                | Treatment::Tunnel => [].into(),
            },
            is_credential_host: self.is_credential_host(),
            pin_account: self.pin_account(own, base_terms),
            treatment,
            admission: [allowing.own.iter().map(rule_admission).collect(), allowing.base.admissions()],
            lookup: self.lookup_terms(own, either(|terms| terms.strict_cname)),
            sandbox_budgets: self.layers.budgets(),
            rule_budgets: budgets(terms).min(budgets(base_terms)),
            base_budgets: allowing.base_budgets(),
            signals: signal_terms(own, allowing),
            facts: self.facts.clone(),
        });
        Ok(Permit { holder: self.sandbox.clone(), terms })
    }

    fn treatment(&self, own: &RuleMatch<'_>, allowing: &AllowingRules<'_>) -> Result<Treatment, Reason> {
        match (self.stage, &own.rule.verdict) {
            (DecisionStage::Name(_), _) => Ok(Treatment::Resolve),
            (DecisionStage::Connect(_), RuleAction::Memory(terms)) => {
                Ok(Treatment::Hold { profile: terms.profile.clone(), identity: terms.identity })
            }
            (DecisionStage::Connect(_), _) if own.rule.is_raw() && self.must_see_requests() => {
                Err(Reason::RawTcpNotAllowed)
            }
            (DecisionStage::Connect(_), _) if own.rule.is_raw() => Ok(Treatment::Raw),
            (DecisionStage::Connect(protocol), _) => self.tls_treatment(own, allowing, protocol),
            (DecisionStage::Request(request), RuleAction::Allow(terms)) if !terms.credentials.is_empty() => {
                match request.scheme {
                    UrlScheme::Http => Err(Reason::CredentialNeedsTls),
                    UrlScheme::Https => Ok(Treatment::Forward),
                }
            }
            (DecisionStage::Memory(_) | DecisionStage::Request(_), _) => Ok(Treatment::Forward),
        }
    }

    /// Returns the treatment of a connection that is neither raw nor memory: intercepted unless both layers tunnel
    /// and no rule needs requests.
    fn tls_treatment(
        &self,
        own: &RuleMatch<'_>,
        allowing: &AllowingRules<'_>,
        protocol: &Protocol,
    ) -> Result<Treatment, Reason> {
        let Protocol::Tls { ech, .. } = protocol else { return Ok(Treatment::Intercept) };
        let base_terms = allowing.base_terms();
        let tunnels =
            own.rule.tls() == TlsMode::Tunnel && base_terms.is_none_or(|terms| terms.tls == TlsMode::Tunnel);
        if !tunnels || self.must_see_requests() {
            return Ok(Treatment::Intercept);
        }
        let tolerates = |terms: &AllowTerms| terms.tolerate_ech;
        let tolerated = own.rule.allow_terms().is_some_and(tolerates) && base_terms.is_none_or(tolerates);
        match ech {
            EchPresence::Present if !tolerated => Err(Reason::EchHiddenName),
            EchPresence::Absent | EchPresence::Present => Ok(Treatment::Tunnel),
        }
    }

    fn must_see_requests(&self) -> bool {
        let needs = |matched: &RuleMatch<'_>| self.is_on_port(matched) && matched.rule.needs_requests();
        self.own.iter().chain(&self.base).any(needs)
    }

    /// Returns whether any rule of the sandbox injects a credential for the host.
    fn is_credential_host(&self) -> bool {
        self.own.iter().any(|matched| !matched.rule.credentials().is_empty())
    }

    /// Returns what becomes of credentials of other accounts: what the rule says, else they are removed where any rule
    /// of the sandbox injects a credential for the host. The base may be stricter.
    fn pin_account(&self, own: &RuleMatch<'_>, base: Option<&AllowTerms>) -> PinAccount {
        let default = if self.is_credential_host() { PinAccount::Remove } else { PinAccount::Off };
        let base = base.and_then(|terms| terms.pin_account).unwrap_or(PinAccount::Off);
        own.rule.pin_account().unwrap_or(default).strictest(base)
    }

    fn lookup_terms(&self, own: &RuleMatch<'_>, strict_cname: bool) -> LookupTerms {
        let chosen_octets = match (self.host, own.by) {
            (Host::Name(name), MatchedEntry::Host(hit)) if hit.reach != PatternReach::Exact => {
                name.as_str().len() - hit.base.len()
            }
            _ => 0,
        };
        LookupTerms {
            chosen_octets,
            types: own
                .rule
                .allow_terms()
                .map_or_else(|| QueryType::DEFAULT.into(), |terms| terms.dns_types.clone()),
            synthetic: self.own.iter().any(|matched| matched.rule.is_raw()),
            strict_cname,
        }
    }
}

impl AllowingRules<'_> {
    /// Returns the deciding rule of the base, if it sets budgets.
    fn base_budgets(&self) -> Option<(RuleRef, Budgets)> {
        let BaseAllowance::Rules(rules) = &self.base else { return None };
        let matched = rules.first()?;
        let budgets = matched.rule.budgets();
        budgets.limits().next()?;
        Some((rule_ref(matched, PolicyLayer::Base), budgets))
    }

    /// Returns the terms of the base's deciding rule; `None` for a tier or a memory rule.
    fn base_terms(&self) -> Option<&AllowTerms> {
        match &self.base {
            BaseAllowance::Rules(rules) => rules.first().and_then(|matched| matched.rule.allow_terms()),
            BaseAllowance::Tier(_) => None,
        }
    }
}

impl BaseAllowance<'_> {
    fn admissions(&self) -> Box<[AddressAdmission]> {
        match self {
            BaseAllowance::Rules(rules) => rules.iter().map(rule_admission).collect(),
            BaseAllowance::Tier(Tier::System) => [AddressAdmission::Any].into(),
            BaseAllowance::Tier(Tier::Untrusted | Tier::User) => [AddressAdmission::Public].into(),
        }
    }
}

/// Combines what both layers say about content: the stricter mode counts, text of a bank needs both, a field must be
/// listed by each layer that lists fields.
fn signal_terms(own: &RuleMatch<'_>, allowing: &AllowingRules<'_>) -> SignalTerms {
    let base = match &allowing.base {
        BaseAllowance::Rules(rules) => rules.first(),
        BaseAllowance::Tier(_) => None,
    };
    let settings = |matched: &RuleMatch<'_>| match &matched.rule.verdict {
        RuleAction::Allow(terms) => terms.signals.clone(),
        RuleAction::Deny => SignalSettings::default(),
        RuleAction::Memory(terms) => terms.signals.clone(),
    };
    let receipt = |matched: &RuleMatch<'_>| match &matched.rule.verdict {
        RuleAction::Allow(terms) => terms.receipt.clone(),
        RuleAction::Deny => MemoryReceipt::Nothing,
        RuleAction::Memory(terms) => MemoryReceipt::Banks(terms.receives.clone()),
    };
    let skips = |matched: &RuleMatch<'_>| {
        matched.rule.allow_terms().is_some_and(|terms| terms.inspect == InspectTerm::Off)
    };
    let listed = |matched: &RuleMatch<'_>| matched.rule.allow_terms().and_then(|terms| terms.fields.clone());
    let fields = match (listed(own), base.and_then(listed)) {
        (Some(own), Some(base)) => Some(own.iter().filter(|name| base.contains(name)).cloned().collect()),
        (own, base) => own.or(base),
    };
    SignalTerms {
        settings: settings(own).strictest(&base.map_or_else(SignalSettings::default, settings)),
        bodies: match skips(own) && base.is_none_or(skips) {
            true => BodyInspection::Skipped,
            false => BodyInspection::Searched,
        },
        receipts: [receipt(own), base.map_or(MemoryReceipt::Everything, receipt)],
        fields,
    }
}

fn rule_admission(matched: &RuleMatch<'_>) -> AddressAdmission {
    match (matched.by, matched.rule.resolves_to()) {
        (MatchedEntry::Address(net), _) => AddressAdmission::Only([net].into()),
        (MatchedEntry::Host(_), None) => AddressAdmission::Public,
        (MatchedEntry::Host(_), Some(nets)) => AddressAdmission::Only(nets.into()),
    }
}
