//! The terms of a rule under their policy keys, so that `check` can show all that is in effect.

use crate::budget::Budgets;
use crate::facts::QueryType;
use crate::policy::{AllowTerms, IdentityMode, InspectTerm, MemoryTerms, Rule, RuleAction, TlsMode};
use crate::signals::settings::{MemoryReceipt, SignalSettings};

/// One term: its policy key and its value.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RuleTerm {
    pub key: &'static str,
    pub value: TermValue,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TermValue {
    List(Vec<String>),
    Word(String),
}

impl Rule {
    /// Returns the terms of a rule other than its targets and filters; most terms are omitted at their default.
    pub fn terms(&self) -> Vec<RuleTerm> {
        match &self.verdict {
            RuleAction::Allow(terms) => allow_rule_terms(terms),
            RuleAction::Deny => Vec::new(),
            RuleAction::Memory(terms) => memory_rule_terms(terms),
        }
    }

    /// Returns the budgets of this rule alone.
    pub fn budgets(&self) -> Budgets {
        self.allow_terms().map_or_else(Budgets::default, |terms| terms.budgets)
    }
}

fn allow_rule_terms(terms: &AllowTerms) -> Vec<RuleTerm> {
    let tls = match terms.tls {
        TlsMode::Intercept => "intercept",
        TlsMode::Tunnel => "tunnel",
    };
    let strict = terms.strict_cname.then(|| word_term("cname", "strict"));
    let ech = terms.tolerate_ech.then(|| word_term("ech", "tolerate"));
    let unusual = *terms.dns_types != QueryType::DEFAULT;
    let types = unusual.then(|| list_term("dns_types", &terms.dns_types));
    let tls = (!terms.raw_tcp).then(|| word_term("tls", tls));
    let inspect = match terms.inspect {
        InspectTerm::Unset => None,
        InspectTerm::Off => Some(word_term("inspect", "false")),
        InspectTerm::On => Some(word_term("inspect", "true")),
    };
    let receipt = match &terms.receipt {
        MemoryReceipt::Nothing => None,
        MemoryReceipt::Banks(banks) => Some(list_term("receives_banks", banks)),
        MemoryReceipt::Everything => Some(word_term("memory", "may-receive")),
    };
    let fields = terms.fields.as_deref().map(|fields| list_term("headers", fields));
    let signals = signal_rule_term(&terms.signals);
    [tls, ech, types, strict, inspect, receipt, fields, signals].into_iter().flatten().collect()
}

fn memory_rule_terms(terms: &MemoryTerms) -> Vec<RuleTerm> {
    let identity = match terms.identity {
        IdentityMode::FromChannel => "from-channel",
        IdentityMode::Required => "required",
    };
    let environment = terms.environment.as_ref();
    let head = [word_term("profile", terms.profile.as_str()), word_term("identity", identity)];
    let banks = [("forget", &terms.forget), ("recall", &terms.recall), ("retain", &terms.retain)];
    let opened = banks.into_iter().filter(|(_, banks)| !banks.is_empty());
    head.into_iter()
        .chain(environment.map(|name| word_term("environment", name.as_str())))
        .chain(opened.map(|(key, banks)| list_term(key, banks)))
        .chain((!terms.receives.is_empty()).then(|| list_term("receives_banks", &terms.receives)))
        .chain(signal_rule_term(&terms.signals))
        .collect()
}

fn signal_rule_term(signals: &SignalSettings) -> Option<RuleTerm> {
    let modes = signals.set().map(|(kind, mode)| format!("{} {mode}", kind.key()));
    let thresholds = signals.set_thresholds().map(|(name, value)| format!("{name} {value}"));
    let set: Vec<String> = modes.chain(thresholds).collect();
    (!set.is_empty()).then(|| list_term("signals", &set))
}

fn word_term(key: &'static str, text: &str) -> RuleTerm {
    RuleTerm { key, value: TermValue::Word(text.to_owned()) }
}

fn list_term<T: ToString>(key: &'static str, items: &[T]) -> RuleTerm {
    RuleTerm { key, value: TermValue::List(items.iter().map(ToString::to_string).collect()) }
}
