//! From one policy document to one `Policy`: every entry is parsed, and every fault has its place.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;

use toml::Spanned;

use super::document::{
    AllowDocument, BudgetDocument, CnameDocument, DenyDocument, EchDocument, IdentityDocument,
    MemoryDocument, PolicyDocument, TlsDocument,
};
use super::entry::DEFAULT_PORT;
use super::list::Terms;
use super::problem::{Fault, Problems, Source, looks_secret, nearest};
use super::{GRANTS, Sources, list_path};
use crate::budget::{Budget, Budgets};
use crate::pattern::Width;
use crate::policy::{
    AddressEntry, AllowTerms, Digest, IdentityMode, MAX_RULES, MemoryTerms, Policy, Ports, Rule,
    Tls, Verdict,
};
use crate::ruleset::Tier;
use crate::set::HostSet;
use crate::trial::Trial;
use crate::word::{CredentialName, Environment, PolicyName, ProfileName};

/// The profiles that come with Sandbar.
const PROFILES: [&str; 6] = ["astrocyte", "graphiti", "hindsight", "mcp", "mem0", "zep"];
/// Longest name of a rule.
const MAX_RULE_NAME: usize = 100;

/// Builds one policy, noting problems as it goes.
pub(crate) struct Builder<'a> {
    pub(super) source: &'a Source<'a>,
    pub(super) sources: &'a Sources,
    pub(super) problems: &'a mut Problems,
    rules: Vec<Rule>,
    /// The line each rule's name stands on.
    names: HashMap<String, u32>,
    pub(super) hosts: HostSet,
    pub(super) addresses: Vec<AddressEntry>,
    tls: Tls,
}

impl<'a> Builder<'a> {
    pub(crate) fn new(
        source: &'a Source<'a>,
        sources: &'a Sources,
        problems: &'a mut Problems,
    ) -> Self {
        let (rules, addresses) = (Vec::new(), Vec::new());
        Builder {
            source,
            sources,
            problems,
            rules,
            names: HashMap::new(),
            hosts: HostSet::default(),
            addresses,
            tls: Tls::default(),
        }
    }

    /// The policy, or `None` without a name; faults elsewhere are noted and the rest goes on.
    pub(crate) fn policy(mut self, document: PolicyDocument, digest: Digest) -> Option<Policy> {
        let name = self.policy_name(&document.name)?;
        self.tls = document.tls.as_ref().map_or(Tls::default(), |tls| tls_of(*tls.get_ref()));
        document.allow.iter().for_each(|rule| self.allow(rule));
        document.deny.iter().for_each(|rule| self.deny(rule));
        document.memory.iter().for_each(|rule| self.memory(rule));
        let trials = document.test.iter().filter_map(|test| self.trial(test)).collect();
        self.hosts.shrink();
        Some(Policy {
            name,
            file: self.source.file.clone(),
            digest,
            rules: self.rules,
            hosts: self.hosts,
            addresses: self.addresses,
            budgets: document.budget.map_or_else(Budgets::default, budgets_of),
            trials,
        })
    }

    fn policy_name(&mut self, name: &Spanned<String>) -> Option<PolicyName> {
        let parsed = self.word("policy name", name, PolicyName::parse)?;
        if parsed.as_str() == GRANTS || Tier::by_name(parsed.as_str()).is_some() {
            self.fault(name.span(), Fault::Reserved(parsed.to_string()));
        }
        Some(parsed)
    }

    fn allow(&mut self, spanned: &Spanned<AllowDocument>) {
        let document = spanned.get_ref();
        let Some(at) = self.begin(&document.name) else { return };
        self.check_allow(document);
        let ports = self.ports(document);
        let terms = self.allow_terms(document);
        let methods = self.methods_or_access(document);
        let rule = Rule {
            name: document.name.get_ref().as_str().into(),
            line: self.source.line(spanned.span().start),
            at: self.source.place(document.name.span()),
            list: self.list_of(document.hosts_file.as_ref()),
            ports: Ports::Listed(ports),
            methods,
            paths: self.paths(document.paths.as_deref()),
            verdict: Verdict::Allow(terms),
        };
        let width = width_of(document);
        let terms = Terms { rule: at, width, exact_only: document.tcp.is_some() };
        self.targets(
            terms,
            document.hosts.as_deref(),
            document.hosts_file.as_ref(),
            document.addresses.as_deref(),
        );
        self.rules.push(rule);
    }

    fn deny(&mut self, spanned: &Spanned<DenyDocument>) {
        let document = spanned.get_ref();
        let name = document
            .name
            .clone()
            .unwrap_or_else(|| Spanned::new(spanned.span(), self.deny_name(document)));
        let Some(at) = self.begin(&name) else { return };
        if document.hosts.is_none() && document.hosts_file.is_none() && document.addresses.is_none()
        {
            self.fault(
                name.span(),
                Fault::Missing("a deny rule needs `hosts`, `hosts_file` or `addresses`"),
            );
        }
        let ports = document.ports.as_deref().map(|ports| self.port_list(ports));
        let rule = Rule {
            name: name.get_ref().as_str().into(),
            line: self.source.line(spanned.span().start),
            at: self.source.place(name.span()),
            list: self.list_of(document.hosts_file.as_ref()),
            ports: ports.map_or(Ports::All, Ports::Listed),
            methods: document.methods.as_deref().map(|methods| self.methods(methods)),
            paths: self.paths(document.paths.as_deref()),
            verdict: Verdict::Deny,
        };
        // A deny may be as wide as it likes.
        let terms = Terms { rule: at, width: Width::DangerouslyWide, exact_only: false };
        self.targets(
            terms,
            document.hosts.as_deref(),
            document.hosts_file.as_ref(),
            document.addresses.as_deref(),
        );
        self.rules.push(rule);
    }

    fn memory(&mut self, spanned: &Spanned<MemoryDocument>) {
        let document = spanned.get_ref();
        let Some(at) = self.begin(&document.name) else { return };
        let profile = self.word("profile", &document.profile, ProfileName::parse);
        let environment = document.environment.as_ref();
        let environment =
            environment.and_then(|text| self.word("environment", text, Environment::parse));
        let resolves_to = self.networks(document.resolves_to.as_deref(), Width::Narrow);
        let mut banks = |list: &[Spanned<String>]| self.banks(list, environment.as_ref());
        let (recall, retain, forget) =
            (banks(&document.recall), banks(&document.retain), banks(&document.forget));
        if recall.is_empty() && retain.is_empty() && forget.is_empty() {
            self.never(
                &document.name,
                "it opens no bank; list some under `recall`, `retain` or `forget`",
            );
        }
        let Some(profile) = profile else { return };
        let host = self.host(&document.host, Width::Narrow);
        if !PROFILES.contains(&profile.as_str()) {
            let near = nearest(profile.as_str(), PROFILES)
                .map(|near| format!("; did you mean `{near}`?"))
                .unwrap_or_default();
            let why = format!(
                "no profile `{profile}` comes with Sandbar, so the operator must bring it{near}"
            );
            self.problems
                .warning(self.source.place(document.profile.span()), Fault::Pointless(why));
        }
        let identity = match document.identity {
            Some(IdentityDocument::FromPath) => IdentityMode::FromPath,
            Some(IdentityDocument::Required) | None => IdentityMode::Required,
        };
        let terms =
            MemoryTerms { resolves_to, profile, identity, environment, recall, retain, forget };
        let rule = Rule {
            name: document.name.get_ref().as_str().into(),
            line: self.source.line(spanned.span().start),
            at: self.source.place(document.name.span()),
            list: None,
            ports: Ports::Listed(
                [host.as_ref().and_then(|host| host.port).unwrap_or(DEFAULT_PORT)].into(),
            ),
            methods: None,
            paths: None,
            verdict: Verdict::Memory(terms),
        };
        if let Some(pattern) = host {
            if !pattern.pattern.is_exact() {
                self.fault(
                    document.host.span(),
                    Fault::Missing("a memory service is one exact host"),
                );
            }
            self.insert(&pattern, at, document.host.span());
        }
        self.rules.push(rule);
    }

    fn list_of(&self, entry: Option<&Spanned<String>>) -> Option<Arc<str>> {
        entry.and_then(|entry| list_path(&self.source.file, entry.get_ref())).map(Arc::from)
    }

    /// Checks a rule's name and gives it its number.
    fn begin(&mut self, name: &Spanned<String>) -> Option<u16> {
        let text = name.get_ref();
        if self.rules.len() >= MAX_RULES {
            return self.refuse(
                name.span(),
                Fault::TooMany { what: "rules in one policy", limit: MAX_RULES },
            );
        }
        if text.trim().is_empty()
            || text.len() > MAX_RULE_NAME
            || text.chars().any(char::is_control)
        {
            self.fault(
                name.span(),
                Fault::Missing("a rule's name is a short text without control characters"),
            );
        }
        let line = self.source.line(name.span().start);
        if let Some(first) = self.names.insert(text.clone(), line) {
            self.fault(name.span(), Fault::Twice { what: "rule", name: text.clone(), line: first });
        }
        u16::try_from(self.rules.len()).ok()
    }

    /// The name of a deny rule that has none: its first target, and a number when that is taken.
    fn deny_name(&self, document: &DenyDocument) -> String {
        let host = document.hosts.iter().flatten().next();
        let target = host
            .or(document.hosts_file.as_ref())
            .or_else(|| document.addresses.iter().flatten().next());
        let target = super::problem::printable(target.map_or("nothing", |target| target.get_ref()));
        let name: String = format!("deny {target}").chars().take(MAX_RULE_NAME / 2).collect();
        let numbered = (2..).map(|number| format!("{name} ({number})"));
        std::iter::once(name.clone())
            .chain(numbered)
            .find(|name| !self.names.contains_key(name))
            .unwrap_or(name)
    }

    /// Keys that contradict each other, or that can never do anything beside each other.
    fn check_allow(&mut self, document: &AllowDocument) {
        let needs = needs_requests(document);
        let written =
            document.tls.as_ref().is_some_and(|tls| *tls.get_ref() == TlsDocument::Tunnel);
        if document.hosts.is_none() && document.hosts_file.is_none() && document.addresses.is_none()
        {
            self.fault(
                document.name.span(),
                Fault::Missing("an allow rule needs `hosts`, `hosts_file` or `addresses`"),
            );
        }
        if written && needs {
            self.never(
                &document.name,
                "it tunnels, and methods, paths, credentials and inspection need interception",
            );
        }
        if document.ech.is_some() && self.tls_of(document) == Tls::Intercept {
            self.never(&document.name, "`ech` is about tunnels, and this rule intercepts");
        }
        if document.methods.is_some() && document.access.is_some() {
            self.exclusive(document, "methods", "access");
        }
        if document.addresses.is_some() {
            self.check_addresses(document);
        }
        if document.tcp.is_some() {
            self.check_tcp(document, needs);
        }
        if document.credential.is_some() && document.dangerously_wide {
            self.never_may(
                &document.name,
                "a credential is never sent to names that anyone can have",
            );
        }
    }

    fn check_addresses(&mut self, document: &AllowDocument) {
        if document.ports.is_none() && document.tcp.is_none() {
            self.fault(
                document.name.span(),
                Fault::Missing("a rule with `addresses` needs `ports` or `tcp`"),
            );
        }
        if document.resolves_to.is_some() {
            self.exclusive(document, "addresses", "resolves_to");
        }
        if document.credential.is_some() {
            self.never_may(
                &document.name,
                "a credential is bound to a verified host name, never to an address",
            );
        }
    }

    fn check_tcp(&mut self, document: &AllowDocument, needs: bool) {
        if document.ports.is_some() {
            self.exclusive(document, "tcp", "ports");
        }
        if needs || document.tls.is_some() || document.ech.is_some() {
            self.never(
                &document.name,
                "raw TCP carries no requests to look at; drop `tcp`, or what needs requests",
            );
        }
    }

    /// What the rule says, or the policy's head, unless the rule has to see requests.
    fn tls_of(&self, document: &AllowDocument) -> Tls {
        match &document.tls {
            Some(written) => tls_of(*written.get_ref()),
            None if needs_requests(document) => Tls::Intercept,
            None => self.tls,
        }
    }

    fn allow_terms(&mut self, document: &AllowDocument) -> AllowTerms {
        let mut budgets = document.budget.map_or_else(Budgets::default, budgets_of);
        let bits = Budgets::default().with(Budget::DnsBitsPerHour, document.dns_bits_per_hour);
        budgets = budgets.min(bits);
        let credential = document.credential.as_ref();
        AllowTerms {
            resolves_to: self.networks(document.resolves_to.as_deref(), width_of(document)),
            raw_tcp: document.tcp.is_some(),
            tls: self.tls_of(document),
            tolerate_ech: document
                .ech
                .as_ref()
                .is_some_and(|ech| *ech.get_ref() == EchDocument::Tolerate),
            credential: credential.and_then(|name| self.credential(name)),
            may_receive_memory: document.memory.is_some(),
            inspect: is_inspected(document),
            strict_cname: document
                .cname
                .as_ref()
                .is_some_and(|cname| *cname.get_ref() == CnameDocument::Strict),
            dns_types: self.query_types(document.dns_types.as_deref()),
            budgets,
        }
    }

    /// A value pasted where a name belongs is the one mistake that must not be echoed back.
    fn credential(&mut self, name: &Spanned<String>) -> Option<CredentialName> {
        match CredentialName::parse(name.get_ref()) {
            Ok(parsed) if !looks_secret(parsed.as_str()) => Some(parsed),
            Ok(_) | Err(_) => {
                let mut place = self.source.place(name.span());
                place.excerpt = "credential = \"...\"".to_owned();
                (place.column, place.width) = (1, place.excerpt.chars().count() as u32);
                let fault = Fault::Missing(
                    "`credential` takes the name of a `[[credential]]`, never a secret itself",
                );
                self.problems.error(place, fault);
                None
            }
        }
    }

    fn trial(&mut self, test: &Spanned<super::document::TestDocument>) -> Option<Trial> {
        let line = self.source.line(test.span().start);
        super::trial::read(self, test.get_ref(), line)
    }

    fn never(&mut self, rule: &Spanned<String>, why: &str) {
        let fault = Fault::NeverActs { rule: rule.get_ref().clone(), why: why.to_owned() };
        self.fault(rule.span(), fault);
    }

    fn never_may(&mut self, rule: &Spanned<String>, why: &'static str) {
        self.fault(rule.span(), Fault::Missing(why));
    }

    fn exclusive(&mut self, document: &AllowDocument, one: &'static str, other: &'static str) {
        self.fault(document.name.span(), Fault::Exclusive(one, other));
    }

    pub(super) fn fault(&mut self, span: Range<usize>, fault: Fault) {
        self.problems.error(self.source.place(span), fault);
    }

    /// Notes a fault; the answer is `None`, so that a parser can end with it.
    pub(super) fn refuse<T>(&mut self, span: Range<usize>, fault: Fault) -> Option<T> {
        self.fault(span, fault);
        None
    }
}

pub(crate) fn tls_of(tls: TlsDocument) -> Tls {
    match tls {
        TlsDocument::Intercept => Tls::Intercept,
        TlsDocument::Tunnel => Tls::Tunnel,
    }
}

pub(crate) fn budgets_of(document: BudgetDocument) -> Budgets {
    [
        (Budget::Connections, document.connections),
        (Budget::DnsBitsPerHour, document.dns_bits_per_hour),
        (Budget::DownloadBytesPerDay, document.download_bytes_per_day),
        (Budget::DownloadBytesPerHour, document.download_bytes_per_hour),
        (Budget::LifetimeSeconds, document.lifetime_seconds),
        (Budget::RequestsPerDay, document.requests_per_day),
        (Budget::RequestsPerHour, document.requests_per_hour),
        (Budget::RequestsPerMinute, document.requests_per_minute),
        (Budget::UploadBytesPerDay, document.upload_bytes_per_day),
        (Budget::UploadBytesPerHour, document.upload_bytes_per_hour),
    ]
    .into_iter()
    .fold(Budgets::default(), |budgets, (budget, limit)| budgets.with(budget, limit))
}

fn width_of(document: &AllowDocument) -> Width {
    if document.dangerously_wide { Width::DangerouslyWide } else { Width::Narrow }
}

fn needs_requests(document: &AllowDocument) -> bool {
    let filters =
        document.methods.is_some() || document.access.is_some() || document.paths.is_some();
    filters || document.credential.is_some() || is_inspected(document)
}

fn is_inspected(document: &AllowDocument) -> bool {
    document.inspect.as_ref().is_some_and(|inspect| *inspect.get_ref())
}
