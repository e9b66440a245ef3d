//! Compiles one policy document to one [`Policy`]: parses every entry and reports each problem at its location.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;

use toml::Spanned;

use super::document::{
    AllowDocument, BudgetDocument, CanaryModeDocument, CnameDocument, DenyDocument, EchDocument,
    IdentityModeDocument, MemoryDocument, PinAccountDocument, PolicyDocument, RuleBudgetDocument,
    SignalModeDocument, SignalsDocument, TlsDocument,
};
use super::entry::DEFAULT_PORT;
use super::list::PatternTerms;
use super::problem::{ProblemKind, Problems, SourceText, looks_like_secret, nearest};
use super::suspicion::HostNetwork;
use super::{GRANTS_POLICY, LoadSources, list_path};
use crate::budget::{BudgetKind, Budgets};
use crate::credential::{MAX_CREDENTIALS, PinAccount};
use crate::host_set::HostSet;
use crate::ids::{CredentialName, Environment, PolicyName, ProfileName};
use crate::pattern::PatternWidth;
use crate::policy::{
    AddressEntry, AllowTerms, IdentityMode, InspectTerm, MAX_RULES, MemoryTerms, Policy, PolicyDigest,
    PortSet, Rule, RuleAction, TlsMode, open_ports,
};
use crate::policy_test::PolicyTest;
use crate::ruleset::Tier;
use crate::signals::SignalMode;
use crate::signals::settings::{MemoryReceipt, SignalKind, SignalSettings};

/// Longest rule name, in bytes.
const MAX_RULE_NAME: usize = 100;

/// Builds one policy and collects its problems.
pub(crate) struct PolicyBuilder<'a> {
    pub(super) source: &'a SourceText<'a>,
    pub(super) sources: &'a LoadSources,
    pub(super) problems: &'a mut Problems,
    rules: Vec<Rule>,
    /// The line of each rule name.
    names: HashMap<String, u32>,
    pub(super) hosts: HostSet,
    pub(super) addresses: Vec<AddressEntry>,
    tls: TlsMode,
    signals: SignalSettings,
}

impl<'a> PolicyBuilder<'a> {
    pub(crate) fn new(
        source: &'a SourceText<'a>,
        sources: &'a LoadSources,
        problems: &'a mut Problems,
    ) -> Self {
        let (rules, addresses) = (Vec::new(), Vec::new());
        PolicyBuilder {
            source,
            sources,
            problems,
            rules,
            names: HashMap::new(),
            hosts: HostSet::default(),
            addresses,
            tls: TlsMode::default(),
            signals: SignalSettings::default(),
        }
    }

    /// Builds the policy; returns `None` if its name is invalid. Other problems are reported without stopping.
    pub(crate) fn build(mut self, document: PolicyDocument, digest: PolicyDigest) -> Option<Policy> {
        let name = self.parse_policy_name(&document.name)?;
        self.tls = document.tls.as_ref().map_or(TlsMode::default(), |tls| tls_from_document(*tls.get_ref()));
        self.signals = self.parse_signals(document.signals.as_ref());
        document.allow.iter().for_each(|rule| self.add_allow(rule));
        document.deny.iter().for_each(|rule| self.add_deny(rule));
        document.memory.iter().for_each(|rule| self.add_memory(rule));
        let trials = document.test.iter().filter_map(|test| self.parse_test(test)).collect();
        self.hosts.shrink();
        Some(Policy {
            open_ports: open_ports(&self.rules, &self.hosts),
            name,
            file: self.source.file.clone(),
            digest,
            rules: self.rules,
            hosts: self.hosts,
            addresses: self.addresses,
            budgets: document.budget.map_or_else(Budgets::default, budgets_from_document),
            trials,
        })
    }

    fn parse_policy_name(&mut self, name: &Spanned<String>) -> Option<PolicyName> {
        let parsed = self.parse_id("policy name", name, PolicyName::parse)?;
        if parsed.as_str() == GRANTS_POLICY || Tier::by_name(parsed.as_str()).is_some() {
            self.report(name.span(), ProblemKind::Reserved(parsed.to_string()));
        }
        Some(parsed)
    }

    fn add_allow(&mut self, spanned: &Spanned<AllowDocument>) {
        let document = spanned.get_ref();
        let Some(at) = self.begin_rule(&document.name) else { return };
        self.check_allow(document);
        let network = HostNetwork::of(document.resolves_to.as_deref());
        self.warn_of_hosts(document.hosts.as_deref().unwrap_or(&[]), network);
        self.warn_of_metadata(document.addresses.as_deref());
        self.warn_of_metadata(document.resolves_to.as_deref());
        let ports = self.parse_ports(document);
        let terms = self.allow_terms(document);
        let methods = self.parse_access(document);
        let rule = Rule {
            name: document.name.get_ref().as_str().into(),
            line: self.source.line(spanned.span().start),
            at: self.source.location(document.name.span()),
            list: self.list_file(document.hosts_file.as_ref()),
            ports: PortSet::Listed(ports),
            methods,
            paths: self.parse_paths(document.paths.as_deref()),
            verdict: RuleAction::Allow(terms),
        };
        let width = width_from_document(document);
        let terms = PatternTerms { rule: at, width, exact_only: document.tcp.is_some() };
        self.add_targets(
            terms,
            document.hosts.as_deref(),
            document.hosts_file.as_ref(),
            document.addresses.as_deref(),
        );
        self.rules.push(rule);
    }

    fn add_deny(&mut self, spanned: &Spanned<DenyDocument>) {
        let document = spanned.get_ref();
        let name =
            document.name.clone().unwrap_or_else(|| Spanned::new(spanned.span(), self.deny_name(document)));
        let Some(at) = self.begin_rule(&name) else { return };
        if document.hosts.is_none() && document.hosts_file.is_none() && document.addresses.is_none() {
            self.report(
                name.span(),
                ProblemKind::Missing("a deny rule needs `hosts`, `hosts_file` or `addresses`"),
            );
        }
        self.warn_of_hosts(document.hosts.as_deref().unwrap_or(&[]), HostNetwork::Public);
        let ports = document.ports.as_deref().map(|ports| self.check_ports(ports));
        let rule = Rule {
            name: name.get_ref().as_str().into(),
            line: self.source.line(spanned.span().start),
            at: self.source.location(name.span()),
            list: self.list_file(document.hosts_file.as_ref()),
            ports: ports.map_or(PortSet::All, PortSet::Listed),
            methods: document.methods.as_deref().map(|methods| self.parse_methods(methods)),
            paths: self.parse_paths(document.paths.as_deref()),
            verdict: RuleAction::Deny,
        };
        // A wide deny rule is safe, so it needs no `dangerously_wide`.
        let terms = PatternTerms { rule: at, width: PatternWidth::DangerouslyWide, exact_only: false };
        self.add_targets(
            terms,
            document.hosts.as_deref(),
            document.hosts_file.as_ref(),
            document.addresses.as_deref(),
        );
        self.rules.push(rule);
    }

    fn add_memory(&mut self, spanned: &Spanned<MemoryDocument>) {
        let document = spanned.get_ref();
        let Some(at) = self.begin_rule(&document.name) else { return };
        self.warn_of_hosts(
            std::slice::from_ref(&document.host),
            HostNetwork::of(document.resolves_to.as_deref()),
        );
        self.warn_of_metadata(document.resolves_to.as_deref());
        let profile = self.parse_profile(&document.profile);
        let environment = document.environment.as_ref();
        let environment = environment.and_then(|text| self.parse_id("environment", text, Environment::parse));
        let resolves_to = self.parse_networks(document.resolves_to.as_deref(), PatternWidth::Narrow);
        let mut banks = |list: &[Spanned<String>]| self.parse_banks(list, environment.as_ref());
        let (recall, retain, forget) =
            (banks(&document.recall), banks(&document.retain), banks(&document.forget));
        if recall.is_empty() && retain.is_empty() && forget.is_empty() {
            self.report_never_acts(
                &document.name,
                "it opens no bank; list banks under `recall`, `retain` or `forget`",
            );
        }
        let Some(profile) = profile else { return };
        let host = self.parse_host(&document.host, PatternWidth::Narrow);
        let identity = match document.identity {
            Some(IdentityModeDocument::FromChannel) => IdentityMode::FromChannel,
            Some(IdentityModeDocument::Required) | None => IdentityMode::Required,
        };
        let signals = self.rule_signals(document.signals.as_ref());
        let receives =
            self.parse_banks(document.receives_banks.as_deref().unwrap_or(&[]), environment.as_ref());
        let terms = MemoryTerms {
            resolves_to,
            profile,
            identity,
            environment,
            recall,
            retain,
            forget,
            signals,
            receives,
        };
        let rule = Rule {
            name: document.name.get_ref().as_str().into(),
            line: self.source.line(spanned.span().start),
            at: self.source.location(document.name.span()),
            list: None,
            ports: PortSet::Listed([host.as_ref().and_then(|host| host.port).unwrap_or(DEFAULT_PORT)].into()),
            methods: None,
            paths: None,
            verdict: RuleAction::Memory(terms),
        };
        if let Some(pattern) = host {
            if !pattern.pattern.is_exact() {
                self.report(
                    document.host.span(),
                    ProblemKind::Missing("a memory service must be one exact host name"),
                );
            }
            self.insert_host(&pattern, at, document.host.span());
        }
        self.rules.push(rule);
    }

    fn parse_profile(&mut self, entry: &Spanned<String>) -> Option<ProfileName> {
        let name = self.parse_id("profile", entry, ProfileName::parse)?;
        if ProfileName::BUILT_IN.contains(&name.as_str()) {
            return Some(name);
        }
        let help = match nearest(name.as_str(), ProfileName::BUILT_IN) {
            Some(near) => format!("did you mean `{near}`?"),
            None => format!("built-in profiles: {}", ProfileName::BUILT_IN.join(", ")),
        };
        let fault = ProblemKind::Unknown { what: "profile", name: name.to_string() };
        self.problems.error_with_help(self.source.location(entry.span()), fault, help);
        None
    }

    fn list_file(&self, entry: Option<&Spanned<String>>) -> Option<Arc<str>> {
        entry.and_then(|entry| list_path(&self.source.file, entry.get_ref())).map(Arc::from)
    }

    /// Checks a rule's name and returns the rule's index.
    fn begin_rule(&mut self, name: &Spanned<String>) -> Option<u16> {
        let text = name.get_ref();
        if self.rules.len() >= MAX_RULES {
            return self
                .reject(name.span(), ProblemKind::TooMany { what: "rules in one policy", limit: MAX_RULES });
        }
        if text.trim().is_empty() || text.len() > MAX_RULE_NAME || text.chars().any(char::is_control) {
            self.report(
                name.span(),
                ProblemKind::Missing("a rule name must have 1 to 100 bytes and no control characters"),
            );
        }
        let line = self.source.line(name.span().start);
        if let Some(first) = self.names.insert(text.clone(), line) {
            self.report(name.span(), ProblemKind::Twice { what: "rule", name: text.clone(), line: first });
        }
        u16::try_from(self.rules.len()).ok()
    }

    /// Makes a name for a deny rule without one: its first target, with a number if that name is taken.
    fn deny_name(&self, document: &DenyDocument) -> String {
        let host = document.hosts.iter().flatten().next();
        let target =
            host.or(document.hosts_file.as_ref()).or_else(|| document.addresses.iter().flatten().next());
        let target = super::problem::printable(target.map_or("nothing", |target| target.get_ref()));
        let name: String = format!("deny {target}").chars().take(MAX_RULE_NAME / 2).collect();
        let numbered = (2..).map(|number| format!("{name} ({number})"));
        std::iter::once(name.clone())
            .chain(numbered)
            .find(|name| !self.names.contains_key(name))
            .unwrap_or(name)
    }

    /// Reports keys that contradict each other or have no effect together.
    fn check_allow(&mut self, document: &AllowDocument) {
        let needs = needs_requests(document);
        let tunnels = document.tls.as_ref().is_some_and(|tls| *tls.get_ref() == TlsDocument::Tunnel);
        if document.hosts.is_none() && document.hosts_file.is_none() && document.addresses.is_none() {
            self.report(
                document.name.span(),
                ProblemKind::Missing("an allow rule needs `hosts`, `hosts_file` or `addresses`"),
            );
        }
        if tunnels && needs {
            self.report_never_acts(
                &document.name,
                "it tunnels TLS, and `methods`, `access`, `paths`, `credential`, `pin_account`, `headers` and `inspect` need interception",
            );
        }
        if document.ech.is_some() && self.tls_mode(document) == TlsMode::Intercept {
            self.report_never_acts(
                &document.name,
                "`ech` applies to tunnels only; set `tls = \"tunnel\"` or remove `ech`",
            );
        }
        if document.methods.is_some() && document.access.is_some() {
            self.report_exclusive(document, "methods", "access");
        }
        if document.addresses.is_some() {
            self.check_addresses(document);
        }
        if document.tcp.is_some() {
            self.check_tcp(document, needs);
        }
        if document.memory.is_some() && document.receives_banks.is_some() {
            self.report_exclusive(document, "memory", "receives_banks");
        }
        if document.credential.is_some() && document.credentials.is_some() {
            self.report_exclusive(document, "credential", "credentials");
        }
        if injects(document) && document.dangerously_wide {
            self.report_forbidden(
                &document.name,
                "a rule with `dangerously_wide` cannot inject a credential: anyone could register a matching name",
            );
        }
    }

    fn check_addresses(&mut self, document: &AllowDocument) {
        if document.ports.is_none() && document.tcp.is_none() {
            self.report(
                document.name.span(),
                ProblemKind::Missing("a rule with `addresses` needs `ports` or `tcp`"),
            );
        }
        if document.resolves_to.is_some() {
            self.report_exclusive(document, "addresses", "resolves_to");
        }
        if injects(document) {
            self.report_forbidden(
                &document.name,
                "a rule with `addresses` cannot inject a credential: it needs a verified host name",
            );
        }
    }

    fn check_tcp(&mut self, document: &AllowDocument, needs: bool) {
        if document.ports.is_some() {
            self.report_exclusive(document, "tcp", "ports");
        }
        if needs || document.tls.is_some() || document.ech.is_some() {
            self.report_never_acts(
                &document.name,
                "raw TCP carries no requests; remove `tcp`, or `tls`, `ech` and the keys that need requests",
            );
        }
    }

    /// Returns the TLS mode of the rule: its own, else interception if it needs requests, else the policy's default.
    fn tls_mode(&self, document: &AllowDocument) -> TlsMode {
        match &document.tls {
            Some(written) => tls_from_document(*written.get_ref()),
            None if needs_requests(document) => TlsMode::Intercept,
            None => self.tls,
        }
    }

    fn allow_terms(&mut self, document: &AllowDocument) -> AllowTerms {
        let mut budgets = document.budget.map_or_else(Budgets::default, rule_budgets_from_document);
        let bits = Budgets::default().with(BudgetKind::DnsBitsPerHour, document.dns_bits_per_hour);
        budgets = budgets.min(bits);
        AllowTerms {
            resolves_to: self.parse_networks(document.resolves_to.as_deref(), width_from_document(document)),
            raw_tcp: document.tcp.is_some(),
            tls: self.tls_mode(document),
            tolerate_ech: document.ech.as_ref().is_some_and(|ech| *ech.get_ref() == EchDocument::Tolerate),
            credentials: self.parse_credentials(document),
            pin_account: document.pin_account.as_ref().map(|pin| match pin.get_ref() {
                PinAccountDocument::Off => PinAccount::Off,
                PinAccountDocument::Refuse => PinAccount::Refuse,
                PinAccountDocument::Remove => PinAccount::Remove,
            }),
            strict_cname: document
                .cname
                .as_ref()
                .is_some_and(|cname| *cname.get_ref() == CnameDocument::Strict),
            dns_types: self.parse_query_types(document.dns_types.as_deref()),
            budgets,
            signals: self.rule_signals(document.signals.as_ref()),
            inspect: match document.inspect.as_ref().map(|inspect| *inspect.get_ref()) {
                None => InspectTerm::Unset,
                Some(false) => InspectTerm::Off,
                Some(true) => InspectTerm::On,
            },
            receipt: self.parse_receipt(document),
            fields: document.headers.as_deref().map(|names| self.parse_field_names(names)),
        }
    }

    /// Returns the signals of a rule: its own, then those of the policy.
    fn rule_signals(&mut self, document: Option<&SignalsDocument>) -> SignalSettings {
        self.parse_signals(document).or(&self.signals)
    }

    fn parse_signals(&mut self, document: Option<&SignalsDocument>) -> SignalSettings {
        let Some(document) = document else { return SignalSettings::default() };
        let thresholds = document.thresholds.as_ref().map(|thresholds| {
            thresholds.to_settings(|entry, most| {
                self.report(entry.span(), ProblemKind::Limit { given: *entry.get_ref(), most });
            })
        });
        modes_from_document(document).with_thresholds(thresholds.unwrap_or_default())
    }

    fn parse_receipt(&mut self, document: &AllowDocument) -> MemoryReceipt {
        match (&document.memory, &document.receives_banks) {
            (Some(_), _) => MemoryReceipt::Everything,
            (None, Some(banks)) => MemoryReceipt::Banks(self.parse_banks(banks, None)),
            (None, None) => MemoryReceipt::Nothing,
        }
    }

    fn parse_field_names(&mut self, names: &[Spanned<String>]) -> Box<[String]> {
        let mut parsed = Vec::new();
        for name in names {
            let text = name.get_ref();
            let token = |byte: u8| byte.is_ascii_alphanumeric() || b"!#$%&'*+-.^_`|~".contains(&byte);
            if text.is_empty() || !text.bytes().all(token) {
                self.report(name.span(), ProblemKind::Missing("`headers` takes names of header fields"));
                continue;
            }
            parsed.push(text.to_ascii_lowercase());
        }
        parsed.sort_unstable();
        parsed.dedup();
        parsed.into()
    }

    /// Parses the names of the credentials that a rule injects, in order.
    fn parse_credentials(&mut self, document: &AllowDocument) -> Box<[CredentialName]> {
        let list = document.credentials.as_ref();
        if let Some(list) = list
            && !(1..=MAX_CREDENTIALS).contains(&list.get_ref().len())
        {
            self.report(list.span(), ProblemKind::Missing("`credentials` takes 1 to 8 names"));
        }
        let names = document.credential.iter().chain(list.iter().flat_map(|list| list.get_ref()));
        let mut parsed: Vec<CredentialName> = Vec::new();
        for entry in names.take(MAX_CREDENTIALS) {
            let Some(name) = self.parse_credential(entry) else { continue };
            if parsed.contains(&name) {
                let line = self.source.line(entry.span().start);
                let fault = ProblemKind::Twice { what: "credential", name: name.to_string(), line };
                self.report(entry.span(), fault);
                continue;
            }
            parsed.push(name);
        }
        parsed.sort();
        parsed.into()
    }

    /// Parses a credential name; the error does not echo the text, which may be a pasted secret.
    fn parse_credential(&mut self, name: &Spanned<String>) -> Option<CredentialName> {
        match CredentialName::parse(name.get_ref()) {
            Ok(parsed) if !looks_like_secret(parsed.as_str()) => Some(parsed),
            Ok(_) | Err(_) => {
                let mut location = self.source.location(name.span());
                location.excerpt = "credential = \"...\"".to_owned();
                (location.column, location.width) = (1, location.excerpt.chars().count() as u32);
                let fault = ProblemKind::Missing(
                    "`credential` takes the name of a `[[credential]]`, never a secret itself",
                );
                self.problems.error(location, fault);
                None
            }
        }
    }

    fn parse_test(&mut self, test: &Spanned<super::document::TestDocument>) -> Option<PolicyTest> {
        let line = self.source.line(test.span().start);
        super::policy_test::read_test(self, test.get_ref(), line)
    }

    fn report_never_acts(&mut self, rule: &Spanned<String>, why: &str) {
        let fault = ProblemKind::NeverActs { rule: rule.get_ref().clone(), why: why.to_owned() };
        self.report(rule.span(), fault);
    }

    fn report_forbidden(&mut self, rule: &Spanned<String>, why: &'static str) {
        self.report(rule.span(), ProblemKind::Missing(why));
    }

    fn report_exclusive(&mut self, document: &AllowDocument, one: &'static str, other: &'static str) {
        self.report(document.name.span(), ProblemKind::Exclusive(one, other));
    }

    pub(super) fn report(&mut self, span: Range<usize>, fault: ProblemKind) {
        self.problems.error(self.source.location(span), fault);
    }

    /// Reports a problem and returns `None`, so that a parser can return it.
    pub(super) fn reject<T>(&mut self, span: Range<usize>, fault: ProblemKind) -> Option<T> {
        self.report(span, fault);
        None
    }
}

pub(crate) fn tls_from_document(tls: TlsDocument) -> TlsMode {
    match tls {
        TlsDocument::Intercept => TlsMode::Intercept,
        TlsDocument::Tunnel => TlsMode::Tunnel,
    }
}

fn modes_from_document(document: &SignalsDocument) -> SignalSettings {
    let mode = |written: Option<SignalModeDocument>| {
        written.map(|written| match written {
            SignalModeDocument::Deny => SignalMode::Deny,
            SignalModeDocument::Flag => SignalMode::Flag,
            SignalModeDocument::Off => SignalMode::Off,
        })
    };
    let canaries = document.canaries.map(|written| match written {
        CanaryModeDocument::Deny => SignalMode::Deny,
        CanaryModeDocument::Flag => SignalMode::Flag,
    });
    SignalSettings::default()
        .with(SignalKind::Body, mode(document.body))
        .with(SignalKind::Canaries, canaries)
        .with(SignalKind::Headers, mode(document.headers))
        .with(SignalKind::MemoryFlow, mode(document.memory_flow))
        .with(SignalKind::Secrets, mode(document.secrets))
        .with(SignalKind::Url, mode(document.url))
}

pub(crate) fn budgets_from_document(document: BudgetDocument) -> Budgets {
    [
        (BudgetKind::Connections, document.connections),
        (BudgetKind::DnsBitsPerHour, document.dns_bits_per_hour),
        (BudgetKind::DownloadBytesPerDay, document.download_bytes_per_day),
        (BudgetKind::DownloadBytesPerHour, document.download_bytes_per_hour),
        (BudgetKind::HeaderBitsPerHour, document.header_bits_per_hour),
        (BudgetKind::LifetimeSeconds, document.lifetime_seconds),
        (BudgetKind::RequestsPerDay, document.requests_per_day),
        (BudgetKind::RequestsPerHour, document.requests_per_hour),
        (BudgetKind::RequestsPerMinute, document.requests_per_minute),
        (BudgetKind::UploadBytesPerDay, document.upload_bytes_per_day),
        (BudgetKind::UploadBytesPerHour, document.upload_bytes_per_hour),
    ]
    .into_iter()
    .fold(Budgets::default(), |budgets, (budget, limit)| budgets.with(budget, limit))
}

/// A rule has no lifetime: only a sandbox ends.
fn rule_budgets_from_document(document: RuleBudgetDocument) -> Budgets {
    budgets_from_document(BudgetDocument {
        connections: document.connections,
        dns_bits_per_hour: document.dns_bits_per_hour,
        download_bytes_per_day: document.download_bytes_per_day,
        download_bytes_per_hour: document.download_bytes_per_hour,
        header_bits_per_hour: document.header_bits_per_hour,
        lifetime_seconds: None,
        requests_per_day: document.requests_per_day,
        requests_per_hour: document.requests_per_hour,
        requests_per_minute: document.requests_per_minute,
        upload_bytes_per_day: document.upload_bytes_per_day,
        upload_bytes_per_hour: document.upload_bytes_per_hour,
    })
}

fn width_from_document(document: &AllowDocument) -> PatternWidth {
    if document.dangerously_wide { PatternWidth::DangerouslyWide } else { PatternWidth::Narrow }
}

fn needs_requests(document: &AllowDocument) -> bool {
    let filters = document.methods.is_some() || document.access.is_some() || document.paths.is_some();
    let inspected = document.inspect.as_ref().is_some_and(|inspect| *inspect.get_ref());
    let pins = document.pin_account.as_ref().is_some_and(|pin| *pin.get_ref() != PinAccountDocument::Off);
    filters || injects(document) || pins || document.headers.is_some() || inspected
}

fn injects(document: &AllowDocument) -> bool {
    document.credential.is_some() || document.credentials.is_some()
}
