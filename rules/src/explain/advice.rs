//! Suggests the edit that would allow a refused attempt. It suggests nothing that would not load, would not help
//! or would bypass the filter; the reason's next step then has to suffice.

use crate::decide::check_filters;

use crate::decision::{Decision, Denial, PolicyLayer, RuleRef};
use crate::facts::{Facts, QueryType, UrlScheme};
use crate::host_set::{PatternHit, PatternOrigin};
use crate::load::problem::printable;
use crate::load::{GRANTS_POLICY, LoadSources, SourceFile, compile};
use crate::name::Host;
use crate::pattern::{HostPattern, PatternReach, PatternWidth};
use crate::policy::{IdentityMode, Policy, Rule, RuleMatch, matching_rules};
use crate::probe::{PolicyProbe, ProbeKind};
use crate::reason::Reason;
use crate::ruleset::RuleSet;
use crate::sandbox::SandboxRef;
use crate::special_names;
use crate::url_path::PathPattern;

use super::PolicyEdit;

/// Longest part of a host to use as the name of a new rule.
const MAX_NAME_LENGTH: usize = 80;
/// The methods of `access = "read-only"`; a rule with these methods may use either key.
const READ_ONLY_METHODS: [&str; 3] = ["GET", "HEAD", "OPTIONS"];
/// Reasons that another rule for the same host can fix.
const FIXABLE_REASONS: [Reason; 6] = [
    Reason::DnsTypeNotAllowed,
    Reason::MethodNotAllowed,
    Reason::PathNotAllowed,
    Reason::PortNotListed,
    Reason::RawTcpNotAllowed,
    Reason::SpecialName,
];

/// Returns the edit that would allow `probe`, if there is one to suggest.
pub(super) fn suggest_edit(
    rules: &RuleSet,
    sandbox: &SandboxRef,
    probe: &PolicyProbe,
    denial: &Denial,
) -> Option<PolicyEdit> {
    if denial.layer == PolicyLayer::Base || is_public_resolver(&probe.host) {
        return None;
    }
    let advice = EditAdvisor { rules, sandbox, probe };
    match (&denial.rule, &probe.special) {
        (Some(reference), ProbeKind::Memory { .. }) => advice.extend_banks(denial.reason, reference),
        (Some(reference), _) => advice.advise_near_miss(denial.reason, reference),
        (None, _) => advice.advise_new_rule(denial.reason),
    }
}

/// Returns whether the host is a public resolver, which the advice never opens: it bypasses the DNS filter.
fn is_public_resolver(host: &Host) -> bool {
    let (reach, origin) = (PatternReach::Tree, PatternOrigin::Policy);
    let wide = PatternHit { rule: 0, port: None, line: 0, origin, reach, base: "" };
    host.name().is_some_and(|name| special_names::is_hidden_resolver(name, &wide))
}

struct EditAdvisor<'a> {
    rules: &'a RuleSet,
    sandbox: &'a SandboxRef,
    probe: &'a PolicyProbe,
}

impl EditAdvisor<'_> {
    /// No rule came close: suggests a new one.
    fn advise_new_rule(&self, reason: Reason) -> Option<PolicyEdit> {
        let unlisted = [Reason::NotListed, Reason::AddressNotListed, Reason::NameMissing];
        unlisted.contains(&reason).then(|| self.add_rule()).flatten()
    }

    /// A rule came close: suggests to extend it if that suffices, else a new rule.
    fn advise_near_miss(&self, reason: Reason, reference: &RuleRef) -> Option<PolicyEdit> {
        // Any other rule for a memory service would bypass its guard.
        let rule = self.find_rule(reference).filter(|rule| rule.memory_terms().is_none())?;
        // Extending a rule does not help against the base or a deny rule; `add_rule` checks that.
        let add = self.add_rule()?;
        let in_file = reference.policy.as_str() != GRANTS_POLICY;
        if in_file && reason == Reason::DnsTypeNotAllowed {
            return self.extend_dns_types(rule, reference);
        }
        if in_file && reason == Reason::PathNotAllowed {
            return self.extend_paths(reference);
        }
        let extended = if !in_file {
            None
        } else if reason == Reason::MethodNotAllowed {
            self.extend_methods(rule, reference)
        } else if reason == Reason::PortNotListed {
            self.extend_ports(rule, reference)
        } else {
            None
        };
        FIXABLE_REASONS.contains(&reason).then(|| extended.unwrap_or(add))
    }

    fn find_rule(&self, reference: &RuleRef) -> Option<&Rule> {
        let mut policies = self.rules.own_policies_of(self.sandbox).iter();
        let policy = policies.find(|policy| policy.name == reference.policy)?;
        policy.rules.iter().find(|rule| rule.name == reference.rule)
    }

    fn extend_ports(&self, rule: &Rule, reference: &RuleRef) -> Option<PolicyEdit> {
        let entry = format!("{}:{}", self.probe.host, self.probe.port);
        let takes_ports = self.probe.special == ProbeKind::Connection
            && rule.allow_terms().is_some_and(|terms| !terms.raw_tcp);
        let plain = self.probe.scheme == UrlScheme::Http;
        let passes = self.passes_filters(rule) && !(plain && !rule.credentials().is_empty());
        let narrow = HostPattern::parse(&entry, PatternWidth::Narrow).is_ok();
        (takes_ports && passes && narrow).then(|| extend_key(reference, "hosts", entry))
    }

    /// Returns whether the rule's methods and paths match the request, if the probe is one.
    fn passes_filters(&self, rule: &Rule) -> bool {
        self.probe.facts(self.sandbox).iter().all(|facts| match facts {
            Facts::Request(request) => check_filters(rule, request).is_ok(),
            Facts::Connect(_) | Facts::Memory(_) | Facts::Name(_) => true,
        })
    }

    fn extend_methods(&self, rule: &Rule, reference: &RuleRef) -> Option<PolicyEdit> {
        let method = self.probe.method.clone().unwrap_or_else(crate::facts::HttpMethod::get);
        let path = self.probe.path.as_deref().unwrap_or("/");
        let path = crate::url_path::RequestPath::parse(path).ok();
        let passes = rule.paths().is_none_or(|paths| {
            paths.iter().any(|pattern| path.as_ref().is_some_and(|path| pattern.matches(path)))
        });
        if !passes {
            return None;
        }
        let written: Vec<&str> = rule.methods().unwrap_or(&[]).iter().map(|m| m.as_str()).collect();
        if written != READ_ONLY_METHODS {
            return Some(extend_key(reference, "methods", method.to_string()));
        }
        let entries = written.into_iter().chain([method.as_str()]).map(str::to_owned).collect();
        let (rule, instead_of) = (reference.clone(), Some("access"));
        Some(PolicyEdit::Set { rule, key: "methods", entries, instead_of })
    }

    /// Suggests the literal path; a path with a star would open more than requested.
    fn extend_paths(&self, reference: &RuleRef) -> Option<PolicyEdit> {
        let path = self.probe.path.as_deref().unwrap_or("/");
        let pattern = PathPattern::parse(path).ok().filter(|_| !path.contains('*'))?;
        Some(extend_key(reference, "paths", pattern.to_string()))
    }

    /// Suggests all types, because the key replaces the default types.
    fn extend_dns_types(&self, rule: &Rule, reference: &RuleRef) -> Option<PolicyEdit> {
        let ProbeKind::Lookup(query) = self.probe.special else { return None };
        let types = rule.allow_terms()?.dns_types.iter().chain([&query]);
        let entries = types.map(ToString::to_string).collect();
        let rule = reference.clone();
        Some(PolicyEdit::Set { rule, key: "dns_types", entries, instead_of: None })
    }

    fn extend_banks(&self, reason: Reason, reference: &RuleRef) -> Option<PolicyEdit> {
        let (ProbeKind::Memory { operation, bank }, Reason::ForeignBank) = (&self.probe.special, reason)
        else {
            return None;
        };
        let terms = self.find_rule(reference)?.memory_terms()?;
        let identity = match terms.identity {
            IdentityMode::FromChannel => "from-channel",
            IdentityMode::Required => "required",
        };
        let environment = terms.environment.as_ref();
        let environment = environment.map(|name| format!("environment = \"{name}\"\n")).unwrap_or_default();
        let service = format!(
            "[[memory]]\nname = \"m\"\nhost = \"{}:{}\"\nprofile = \"{}\"\nidentity = \"{identity}\"\n{environment}{} = [\"{bank}\"]",
            self.probe.host,
            self.probe.port,
            terms.profile,
            operation.as_str()
        );
        self.would_allow(&service).then(|| extend_key(reference, operation.as_str(), bank.to_string()))
    }

    /// Suggests a rule that allows exactly the probe, if one can.
    fn add_rule(&self) -> Option<PolicyEdit> {
        let lines = self.new_rule_text();
        (!self.must_inspect() && self.would_allow(&lines)).then_some(PolicyEdit::Add(lines))
    }

    /// Returns whether the probe is raw TCP where another rule decides requests: a rule for it would not load.
    fn must_inspect(&self) -> bool {
        let policies = self.rules.own_policies_of(self.sandbox);
        let mut matching = policies
            .iter()
            .flat_map(|policy| matching_rules(policy, &self.probe.host))
            .filter(|matched| matched.has_port(self.probe.port));
        let is_decided = |other: RuleMatch<'_>| !other.rule.is_deny() && !other.rule.is_raw();
        self.probe.special == ProbeKind::Raw && matching.any(is_decided)
    }

    /// Returns whether adding `lines` to a policy of the sandbox would allow the probe.
    fn would_allow(&self, lines: &str) -> bool {
        let bytes = format!("name = \"advice\"\n{lines}").into_bytes();
        let policies = vec![SourceFile { path: "advice".to_owned(), bytes }];
        let Ok(advised) = compile(&LoadSources { policies, ..LoadSources::default() }, &[]) else {
            return false;
        };
        let mut rules = self.rules.clone();
        if let Some(layers) = rules.layers.get_mut(&self.sandbox.id) {
            layers.sandbox.extend(advised.policies.into_values());
        }
        matches!(self.probe.decide(&rules, self.sandbox), Decision::Allow(_))
    }

    fn new_rule_text(&self) -> String {
        let (host, port) = (&self.probe.host, self.probe.port);
        let raw = self.probe.special == ProbeKind::Raw;
        let mut lines = vec!["[[allow]]".to_owned(), format!("name = \"{}\"", self.unused_name())];
        lines.push(match host {
            Host::Address(address) => {
                format!("addresses = [\"{address}/{}\"]", if address.is_ipv4() { 32 } else { 128 })
            }
            Host::Name(_) if port == 443 || raw => format!("hosts = [\"{host}\"]"),
            Host::Name(_) => format!("hosts = [\"{host}:{port}\"]"),
        });
        match (host, raw) {
            (_, true) => lines.push(format!("tcp = [{port}]")),
            (Host::Address(_), false) => lines.push(format!("ports = [{port}]")),
            (Host::Name(_), false) => {}
        }
        if host.name().is_some_and(|name| HostPattern::parse(name.as_str(), PatternWidth::Narrow).is_err()) {
            lines.push("dangerously_wide = true".to_owned());
        }
        lines.extend(self.probe.method.iter().map(|method| format!("methods = [\"{method}\"]")));
        lines.extend(self.dns_types_line());
        lines.iter().map(|line| printable(line)).collect::<Vec<_>>().join("\n")
    }

    fn dns_types_line(&self) -> Option<String> {
        let ProbeKind::Lookup(query) = self.probe.special else { return None };
        let types = QueryType::DEFAULT.iter().chain([&query]);
        let types: Vec<String> = types.map(|query| format!("\"{query}\"")).collect();
        let is_default = QueryType::DEFAULT.contains(&query);
        (!is_default).then(|| format!("dns_types = [{}]", types.join(", ")))
    }

    /// Returns the host as rule name, with a number if a rule has that name already.
    fn unused_name(&self) -> String {
        let host: String = self.probe.host.to_string().chars().take(MAX_NAME_LENGTH).collect();
        let policies = self.rules.own_policies_of(self.sandbox);
        let taken = |name: &str| policies.iter().any(|policy| has_rule(policy, name));
        let numbered = (2..).map(|count| format!("{host} {count}"));
        std::iter::once(host.clone()).chain(numbered).find(|name| !taken(name)).unwrap_or(host)
    }
}

fn has_rule(policy: &Policy, name: &str) -> bool {
    policy.rules.iter().any(|rule| &*rule.name == name)
}

fn extend_key(rule: &RuleRef, key: &'static str, entry: String) -> PolicyEdit {
    PolicyEdit::Extend { rule: rule.clone(), key, entry }
}
