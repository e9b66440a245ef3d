//! The terms of a rule by the keys a policy writes them with, so that `check` can show all that is in effect.

use crate::budget::Budgets;
use crate::facts::QueryType;
use crate::policy::{AllowTerms, IdentityMode, MemoryTerms, Rule, Tls, Verdict};

/// One term: its key in the policy and what it says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Term {
    pub key: &'static str,
    pub value: Value,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Value {
    List(Vec<String>),
    Word(String),
}

impl Rule {
    /// What a rule says beyond its targets and filters; what merely holds by default is left out.
    pub fn terms(&self) -> Vec<Term> {
        match &self.verdict {
            Verdict::Allow(terms) => of_allow(terms),
            Verdict::Deny => Vec::new(),
            Verdict::Memory(terms) => of_memory(terms),
        }
    }

    /// The limits of this rule alone.
    pub fn budgets(&self) -> Budgets {
        self.allow().map_or_else(Budgets::default, |terms| terms.budgets)
    }
}

fn of_allow(terms: &AllowTerms) -> Vec<Term> {
    let tls = match terms.tls {
        Tls::Intercept => "intercept",
        Tls::Tunnel => "tunnel",
    };
    let strict = terms.strict_cname.then(|| word("cname", "strict"));
    let ech = terms.tolerate_ech.then(|| word("ech", "tolerate"));
    let inspect = terms.inspect.then(|| word("inspect", "true"));
    let memory = terms.may_receive_memory.then(|| word("memory", "may-receive"));
    let unusual = *terms.dns_types != QueryType::DEFAULT;
    let types = unusual.then(|| list("dns_types", &terms.dns_types));
    let tls = (!terms.raw_tcp).then(|| word("tls", tls));
    [tls, ech, inspect, memory, types, strict].into_iter().flatten().collect()
}

fn of_memory(terms: &MemoryTerms) -> Vec<Term> {
    let identity = match terms.identity {
        IdentityMode::FromPath => "from-path",
        IdentityMode::Required => "required",
    };
    let environment = terms.environment.as_ref();
    let head = [word("profile", terms.profile.as_str()), word("identity", identity)];
    let banks = [("forget", &terms.forget), ("recall", &terms.recall), ("retain", &terms.retain)];
    let opened = banks.into_iter().filter(|(_, banks)| !banks.is_empty());
    head.into_iter()
        .chain(environment.map(|name| word("environment", name.as_str())))
        .chain(opened.map(|(key, banks)| list(key, banks)))
        .collect()
}

fn word(key: &'static str, text: &str) -> Term {
    Term { key, value: Value::Word(text.to_owned()) }
}

fn list<T: ToString>(key: &'static str, items: &[T]) -> Term {
    Term { key, value: Value::List(items.iter().map(ToString::to_string).collect()) }
}
